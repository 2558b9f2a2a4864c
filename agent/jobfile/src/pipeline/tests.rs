use std::collections::BTreeMap;

use agent_model::Code;
use agent_model::job::{Input, Output};
use agent_model::pipeline::StepOutput;

use super::*;
use crate::EnvironmentRef;

/// What the public pipelines are like: components, bindings of all kinds, defaults, and a step for itself.
const PIPELINE: &str = "\
type: pipeline
display_name: nyc taxi
experiment_name: e
inputs:
  raw: {type: uri_folder, path: ./data, mode: ro_mount}
  rate: {type: number, default: 0.1, min: 0.01, max: 1}
  epochs: 3
outputs:
  model: {type: mlflow_model, mode: upload, name: taxi}
settings:
  default_compute: azureml:cpu-cluster
  continue_on_step_failure: false
jobs:
  prep:
    component: ./components/prep.yml
    inputs: {raw: '${{parent.inputs.raw}}'}
  train:
    type: command
    component: file:components/train.yml
    inputs:
      data: {type: uri_folder, path: '${{ parent.jobs.prep.outputs.clean }}', mode: download}
      rate: ${{parent.inputs.rate}}
      epochs: ${{parent.inputs.epochs}}
    outputs:
      model: ${{parent.outputs.model}}
    compute: azureml:gpu-cluster
    resources: {instance_count: 2}
    environment_variables: {RATE: 'r${{parent.inputs.rate}}'}
  report:
    command: python report.py --model ${{inputs.model}} --all ${{inputs.all}} --raw ${{inputs.raw}}
    code: ./report
    environment: host
    after: train
    inputs:
      model: ${{parent.jobs.train.outputs.model}}
      all: ${{parent.jobs.prep.outputs.artifacts}}
      raw: ${{parent.jobs.prep.inputs.raw}}
";

const PREP: &str = "\
name: prep
version: 1
type: command
inputs: {raw: {type: uri_folder}, sample: {type: integer, default: 100}}
outputs: {clean: {type: uri_folder}}
code: ../src
environment: {image: 'python:3.12'}
command: python prep.py ${{inputs.raw}} ${{inputs.sample}} ${{outputs.clean}}
";

const TRAIN: &str = "\
type: command
inputs:
  data: {type: uri_folder}
  rate: {type: number}
  epochs: {type: integer, min: 1}
  depth: {type: integer, optional: true}
outputs: {model: {type: mlflow_model}}
code: ../src
environment: azureml:AzureML-sklearn-1.5@latest
distribution: {type: pytorch}
resources: {instance_count: 1, gpus: 1}
command: >-
  python train.py --data ${{inputs.data}} --rate ${{inputs.rate}} --epochs ${{inputs.epochs}}
  $[[--depth ${{inputs.depth}}]] --out ${{outputs.model}}
";

fn files() -> BTreeMap<&'static str, String> {
    [("./components/prep.yml", PREP.to_owned()), ("components/train.yml", TRAIN.to_owned())].into()
}

fn read_with(
    text: &str,
    files: &BTreeMap<&'static str, String>,
    given: &[(&str, &str)],
) -> Result<PipelineFile, Vec<Misread>> {
    let given: Vec<_> = given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let mut open = |path: &str| {
        let gone = || Fault::new(Code::JobFile, format!("`{path}` cannot be read")).fix("correct the path");
        files.get(path).cloned().ok_or_else(gone)
    };
    pipeline(text, &given, &mut open)
}

fn read(text: &str) -> PipelineFile {
    read_with(text, &files(), &[]).unwrap_or_else(|wrong| panic!("{wrong:?}"))
}

/// The mistakes as `FILE: PLACE: what`, each with what to do.
fn mistakes(text: &str, files: &BTreeMap<&'static str, String>, given: &[(&str, &str)]) -> Vec<String> {
    let wrong = read_with(text, files, given).err().unwrap_or_default();
    let told = |misread: &Misread| {
        let file = misread.file.clone().unwrap_or_else(|| "pipeline".to_owned());
        let all = misread.refused.mistakes.iter();
        all.map(|mistake| {
            let fix = mistake.fix.clone().unwrap_or_default();
            format!("{file}: {}: {}; {fix}", mistake.at.place, mistake.at.message)
        })
        .collect::<Vec<_>>()
    };
    wrong.iter().flat_map(told).collect()
}

fn literal(text: &str) -> Input {
    Input::Literal(text.to_owned())
}

fn output(step: u32, name: &str) -> StepOutput {
    StepOutput { step, output: name.to_owned() }
}

#[test]
fn test_steps_are_jobs_with_what_the_pipeline_the_component_and_other_steps_give_them() {
    let read = read(PIPELINE);
    assert_eq!((read.draft.display_name.as_str(), read.draft.experiment.as_str()), ("nyc taxi", "e"));
    assert!(!read.settings.continue_on_failure);
    assert_eq!(read.outputs, [("model".to_owned(), output(1, "model"))].into());
    let names: Vec<&str> = read.steps.iter().map(|step| step.name.as_str()).collect();
    assert_eq!(names, ["prep", "train", "report"]);
    let [prep, train, report] = &read.steps[..] else { panic!() };

    assert_eq!(prep.component.as_deref(), Some("./components/prep.yml"));
    assert_eq!(prep.job.draft.inputs["sample"], literal("100"));
    let raw = &prep.job.inputs[0];
    assert_eq!((raw.name.as_str(), raw.path.as_str(), raw.is_file), ("raw", "./data", false));
    assert_eq!(
        (prep.job.code.as_deref(), prep.job.draft.compute.as_deref()),
        (Some("../src"), Some("cpu-cluster"))
    );
    assert!(prep.is_environment_of_component && prep.bound.is_empty());
    assert_eq!(prep.job.draft.display_name, "prep");

    let draft = &train.job.draft;
    assert_eq!(train.bound, [("data".to_owned(), output(0, "clean"))].into());
    assert_eq!(draft.inputs["data"], literal("${{parent.jobs.prep.outputs.clean}}"));
    assert_eq!((&draft.inputs["rate"], &draft.inputs["epochs"]), (&literal("0.1"), &literal("3")));
    assert!(!draft.inputs.contains_key("depth") && !draft.command.contains("--depth"), "{}", draft.command);
    assert_eq!((draft.resources.nodes, draft.resources.gpus), (2, 1), "the step's go over the component's");
    assert_eq!(draft.compute.as_deref(), Some("gpu-cluster"));
    assert_eq!(draft.environment_variables["RATE"], "r0.1");
    assert_eq!(
        draft.output_names["model"].name, "taxi",
        "what is said of the pipeline's output holds for it"
    );

    assert_eq!(report.after, [1]);
    assert_eq!(
        report.bound,
        [("all".to_owned(), output(0, "artifacts")), ("model".to_owned(), output(1, "model"))].into()
    );
    assert_eq!(report.job.inputs[0].path, "./data", "it is given what prep is given");
    assert!(matches!(report.job.environment, EnvironmentRef::Spec(_)) && !report.is_environment_of_component);
    assert!(read.warnings.is_empty(), "{:?}", read.warnings);
}

#[test]
fn test_inputs_of_the_pipeline_can_be_set() {
    let set = |given: &[(&str, &str)]| read_with(PIPELINE, &files(), given).unwrap();
    let read = set(&[("inputs.rate", "0.5"), ("inputs.raw", "/elsewhere")]);
    assert_eq!(read.steps[1].job.draft.inputs["rate"], literal("0.5"));
    assert_eq!(read.steps[1].job.draft.environment_variables["RATE"], "r0.5");
    let raw = &read.steps[0].job.inputs[0];
    assert!(raw.path == "/elsewhere" && raw.is_given);
    for (given, said) in [
        (("inputs.rate", "fast"), "`inputs.rate`: `fast` is not a number"),
        (("inputs.rate", "2"), "`inputs.rate`: 2 is more than 1"),
        (("inputs.epochs", "0"), "`jobs.train.inputs.epochs`: 0 is less than 1"),
        (("inputs.gone", "0"), "names nothing of this job"),
    ] {
        let told = mistakes(PIPELINE, &files(), &[given]);
        assert!(told.iter().any(|line| line.contains(said)), "{given:?}: {told:?}");
    }
}

/// What is written in the place of what, and what is told of that.
const MISTAKES: [(&str, &str, &str); 24] = [
    (
        "jobs.prep.outputs.clean",
        "jobs.perp.outputs.clean",
        "line 21, column 38: there is no step `perp`; did you mean `prep`?",
    ),
    (
        "jobs.prep.outputs.clean",
        "jobs.prep.outputs.claen",
        "the step `prep` has no output `claen`; did you mean `clean`?",
    ),
    (
        "'${{parent.inputs.raw}}'",
        "'${{parent.inputs.row}}'",
        "line 16, column 19: the pipeline has no input `row`; did you mean `raw`?",
    ),
    (
        "${{parent.outputs.model}}",
        "${{parent.outputs.modle}}",
        "the pipeline has no output `modle`; did you mean `model`?",
    ),
    (
        "      model: ${{parent.outputs.model}}\n",
        "      model: {type: mlflow_model}\n",
        "line 9, column 10: no step writes the output `model`",
    ),
    (
        "      rate: ${{parent.inputs.rate}}\n",
        "",
        "line 17, column 3: `jobs.train.inputs.rate` has no value, and the component needs one of type number",
    ),
    (
        "      rate: ${{",
        "      rat: ${{",
        "`jobs.train.inputs.rat` is no input of components/train.yml; did you mean `rate`?",
    ),
    (
        "${{parent.inputs.epochs}}",
        "many",
        "line 23, column 15: `jobs.train.inputs.epochs`: `many` is not an integer",
    ),
    (
        "${{parent.inputs.epochs}}",
        "${{parent.inputs.raw}}",
        "`jobs.train.inputs.epochs` is a value of type integer, and is given data",
    ),
    (
        "${{parent.inputs.epochs}}",
        "${{parent.jobs.prep.outputs.clean}}",
        "is a value of type integer, and an output is data",
    ),
    (
        "inputs: {raw: '${{parent.inputs.raw}}'}",
        "inputs: {raw: 7}",
        "is data of type uri_folder, and `7` is a value",
    ),
    ("'${{parent.inputs.raw}}'", "'${{inputs.raw}}'", "`${{inputs.raw}}` names nothing that a step can read"),
    (
        "after: train",
        "after: [prep, trian]",
        "line 33, column 19: there is no step `trian`; did you mean `train`?",
    ),
    (
        "'${{parent.inputs.raw}}'",
        "'${{parent.jobs.report.outputs.artifacts}}'",
        "steps wait for each other: ",
    ),
    ("  report:\n", "  Report:\n", "`Report` cannot be the name of a step"),
    (
        "components/train.yml\n",
        "components/gone.yml\n",
        "line 19, column 16: `components/gone.yml` cannot be read",
    ),
    ("component: ./components/prep.yml", "component: azureml:prep:1", "here are no registered components"),
    (
        "component: ./components/prep.yml",
        "component: 'azureml://registries/a/components/b/versions/1'",
        "kept by a registry of the cloud",
    ),
    (
        "    type: command\n",
        "    type: automl\n",
        "a step of `type: automl` is not run; AutoML runs in the cloud only",
    ),
    ("    type: command\n", "    type: if_else\n", "a step of `type: if_else` is not run"),
    (
        "    code: ./report\n",
        "    code: ./report\n    outputs: {m: '${{parent.outputs.model}}'}\n",
        "two steps write the output `model`: one at line",
    ),
    (
        "    compute: azureml:gpu-cluster\n",
        "    command: x\n",
        "`jobs.train.command` stands beside a component",
    ),
    ("--model ${{inputs.model}}", "--model ${{inputs.modle}}", "did you mean `${{inputs.model}}`?"),
    (
        "continue_on_step_failure: false",
        "continue_on_step_failure: maybe",
        "`settings.continue_on_step_failure`: expected `true` or `false`",
    ),
];

#[test]
fn test_mistakes_are_told_with_file_line_and_column_and_what_was_meant() {
    for (from, to, said) in MISTAKES {
        assert!(PIPELINE.contains(from), "{from}");
        let told = mistakes(&PIPELINE.replacen(from, to, 1), &files(), &[]);
        assert!(told.iter().any(|line| line.contains(said)), "{to}: {told:?}");
        assert!(told.iter().all(|line| line.starts_with("pipeline: line ")), "{told:?}");
    }
}

#[test]
fn test_mistakes_in_components_name_the_component() {
    let table = [
        (PREP, "${{inputs.raw}}", "${{inputs.row}}", "line 8, column 10: the command uses `${{inputs.row}}`"),
        (
            PREP,
            "type: command",
            "type: parallel",
            "line 3, column 7: a component of `type: parallel` is not run",
        ),
        (PREP, "type: command", "additional_includes: [../x]", "`additional_includes` is not supported"),
        (PREP, "{type: integer, default: 100}", "7", "`inputs.sample` is to be a mapping"),
        (PREP, "{image: 'python:3.12'}", "{imgae: x}", "`environment.imgae` is not known"),
        (PREP, "name: prep", "jobs: {a: 1}", "`jobs` is not supported"),
    ];
    for (text, from, to, said) in table {
        let mut files = files();
        files.insert("./components/prep.yml", text.replacen(from, to, 1));
        let told = mistakes(PIPELINE, &files, &[]);
        let there = |line: &String| line.starts_with("./components/prep.yml: ") && line.contains(said);
        assert!(told.iter().any(there), "{to}: {told:?}");
    }
    let mut files = files();
    files.insert("./components/prep.yml", PREP.replace("version: 1", "vresion: 1"));
    let read = read_with(PIPELINE, &files, &[]).unwrap();
    let (file, warning) = &read.warnings[0];
    assert_eq!(file.as_deref(), Some("./components/prep.yml"));
    assert!(warning.message.contains("`vresion` is not known"), "{warning:?}");
}

#[test]
fn test_all_mistakes_are_told_at_once() {
    let text = PIPELINE.replace("inputs.raw}}'}", "inputs.row}}'}").replace("after: train", "after: trian");
    assert_eq!(mistakes(&text, &files(), &[]).len(), 2);
}

#[test]
fn test_components_and_steps_may_be_written_in_place() {
    let text = "\
jobs:
  a:
    component:
      type: command
      inputs: {n: {type: integer, enum: ['1', '2']}}
      outputs: {o: {type: uri_file}}
      command: echo ${{inputs.n}} > ${{outputs.o}}
    inputs: {n: 2}
  b:
    command: cat ${{inputs.x}} $[[--n ${{inputs.n}}]]
    inputs:
      x: {type: uri_file, path: '${{parent.jobs.a.outputs.o}}'}
      n: ${{parent.jobs.a.inputs.n}}
";
    let read = read(text);
    assert!(read.settings.continue_on_failure, "that is what happens where nothing is said");
    assert_eq!(read.steps[0].job.draft.outputs["o"], Output::File);
    assert_eq!(read.steps[1].job.draft.inputs["n"], literal("2"));
    assert_eq!(read.steps[1].job.draft.command, "cat ${{inputs.x}} --n ${{inputs.n}}");
    let told = mistakes(&text.replace("{n: 2}", "{n: 3}"), &files(), &[]);
    assert!(told[0].contains("`jobs.a.inputs.n`: `3` is none of 1, 2"), "{told:?}");
}

#[test]
fn test_an_optional_input_of_the_pipeline_that_has_no_value_has_none_in_its_steps() {
    let text = "\
type: pipeline
inputs: {depth: {type: integer, optional: true}, tag: x}
jobs:
  a:
    command: train $[[--depth ${{inputs.depth}}]] ${{inputs.name}}
    inputs: {depth: '${{parent.inputs.depth}}', name: 'run-${{parent.inputs.tag}}'}
";
    let read_one = |given: &[(&str, &str)]| {
        let read = read_with(text, &files(), given).unwrap();
        read.steps[0].job.draft.clone()
    };
    assert_eq!(read_one(&[]).command, "train  ${{inputs.name}}");
    assert_eq!(read_one(&[]).inputs["name"], literal("run-x"));
    let set = read_one(&[("inputs.depth", "4")]);
    assert_eq!(
        (set.command.as_str(), &set.inputs["depth"]),
        ("train --depth ${{inputs.depth}} ${{inputs.name}}", &literal("4"))
    );
}

#[test]
fn test_a_sweep_may_be_a_step_with_a_component_as_its_trial() {
    let text = "\
jobs:
  prep: {component: ./components/prep.yml, inputs: {raw: {path: data}}}
  tune:
    type: sweep
    trial: components/train.yml
    inputs: {data: '${{parent.jobs.prep.outputs.clean}}', epochs: 3}
    outputs: {model: '${{parent.outputs.model}}'}
    search_space: {rate: {type: uniform, min_value: 0.1, max_value: 0.9}}
    sampling_algorithm: random
    objective: {goal: minimize, primary_metric: loss}
    limits: {max_total_trials: 4, max_concurrent_trials: 2}
outputs: {model: }
";
    let read = read(text);
    let tune = &read.steps[1];
    let draft = &tune.job.draft;
    assert_eq!(draft.array.as_ref().unwrap().to_string(), "0-3%2");
    assert!(
        draft.command.contains("--rate ${{search_space.rate}} --epochs ${{inputs.epochs}}"),
        "{}",
        draft.command
    );
    assert!(draft.sweep.is_some() && !draft.inputs.contains_key("rate"));
    assert_eq!(tune.bound, [("data".to_owned(), output(0, "clean"))].into());
    assert_eq!(tune.component.as_deref(), Some("components/train.yml"));
    assert_eq!(read.outputs["model"], output(1, "model"));
}

#[test]
fn test_documents_say_whether_they_are_pipelines() {
    for (text, is) in [
        ("type: pipeline\n", true),
        ("$schema: https://azuremlschemas.azureedge.net/latest/pipelineJob.schema.json\n", true),
        ("jobs: {}\n", true),
        ("command: x\n", false),
        ("type: command\n", false),
        ("", false),
        ("[", false),
    ] {
        assert_eq!(is_pipeline(text), is, "{text}");
    }
}

#[test]
fn test_the_example_of_the_guide_is_read_with_its_component() {
    let page = include_str!("../../../docs/pipelines.md");
    let mut shown = page.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let (text, component) = (shown.next().unwrap(), shown.next().unwrap());
    let read = read_with(text, &[("./components/prep.yml", component.to_owned())].into(), &[]).unwrap();
    assert!(read.warnings.is_empty() && read.steps.len() == 3, "{:?}", read.warnings);
    assert_eq!(read.steps[2].after, [1]);
    let known = [
        "automl",
        "data_transfer",
        "do_while",
        "if_else",
        "import",
        "parallel",
        "parallel_for",
        "pipeline",
        "spark",
    ];
    assert!(known.iter().all(|kind| page.contains(&format!("`{kind}`"))));
}

proptest::proptest! {
    #[test]
    fn test_no_text_makes_the_reader_fail_otherwise(text in "(jobs: *)?[a-z: \n\\-\\[\\]{}\"'$#|>0-9.]{0,120}") {
        let mut open = |_: &str| Ok(PREP.to_owned());
        if let Err(wrong) = pipeline(&text, &[], &mut open) {
            proptest::prop_assert!(wrong.iter().any(|misread| !misread.refused.mistakes.is_empty()));
        }
    }
}

#[test]
fn test_a_file_says_which_steps_are_run_whatever_ran_before() {
    let text = "\
settings: {force_rerun: false}
jobs:
  usual: {component: {command: echo}}
  chance: {component: {command: echo, is_deterministic: false}}
  over: {component: {command: echo, is_deterministic: false}, reuse: true}
  inline: {command: echo, reuse: 'False'}
";
    let pipeline = read(text);
    let reuse: Vec<bool> = pipeline.steps.iter().map(|step| step.reuse).collect();
    assert_eq!((reuse, pipeline.settings.force_rerun), (vec![true, false, true, false], false));
    assert!(read(&text.replace("force_rerun: false", "force_rerun: true")).settings.force_rerun);
    let told = mistakes(&text.replace("'False'", "sometimes"), &files(), &[]);
    assert!(told[0].contains("`jobs.inline.reuse` is `sometimes`; write `true` or `false`"), "{told:?}");
}
