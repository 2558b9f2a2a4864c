use std::time::Duration;

use super::*;
use agent_model::job::{OnDisconnect, RetryPolicy};
use agent_model::{Code, Fault};

const FULL: &str = r#"
$schema: https://example.com/commandJob.schema.json
type: Command
name: train-1
display_name: Train
description: |
  # two
  lines
experiment_name: diabetes
tags: {team: vision, year: 2024}
command: >-
  python train.py --lr ${{inputs.lr}} --data ${{inputs.data}}
  --flag ${{ inputs.flag }} --out ${{outputs.model}}
code: ./src
environment:
  python: python3.11
  requirements: requirements.txt
secrets: {WANDB_API_KEY: wandb}
environment_variables:
  OMP_NUM_THREADS: 4
  EMPTY:
inputs:
  lr: 0.10
  flag: true
  type: uri_file
  data: {type: URI_FILE, path: file:data/x.csv, mode: Ro_Mount}
  folder: {path: ../data}
  steps: {type: integer, default: 30}
  url: {path: https://example.com/x.csv, mode: direct}
  maybe: {type: uri_folder, optional: true}
outputs:
  model:
  report: {type: uri_file, mode: upload}
compute: local
resources: {instance_count: 2, gpus: 1, memory: 8g, shm_size: 512m, docker_args: --cpus 2}
limits: {timeout: 3600, grace: 2m, on_disconnect: Replace}
retry: {max_attempts: 3, backoff: 5}
identity: {type: aml_token}
queue_settings: {job_tier: Spot, priority: High}
"#;

fn refused(text: &str) -> Fault {
    command_job(text, &[]).expect_err(text).into()
}

#[test]
fn test_an_optional_input_goes_with_what_names_it() {
    let text = "command: t $[[--lr ${{inputs.lr}}]] ${{inputs.n}}\ninputs:\n  lr: {type: number, optional: true}\n  n: 3\n";
    assert_eq!(command_job(text, &[]).unwrap().draft.command, "t  ${{inputs.n}}");
    let given = [("inputs.lr".to_owned(), "0.1".to_owned())];
    assert_eq!(command_job(text, &given).unwrap().draft.command, "t --lr ${{inputs.lr}} ${{inputs.n}}");
    let bare = "command: t ${{inputs.lr}}\ninputs: {lr: {type: number, optional: true}}\n";
    let fault = Fault::from(command_job(bare, &[]).unwrap_err());
    assert!(fault.what.contains("is optional and has no value"), "{fault}");
}

#[test]
fn test_every_key_reaches_the_draft() {
    let job = command_job(FULL, &[]).unwrap();
    assert_eq!(job.warnings, []);
    let draft = &job.draft;
    assert_eq!(draft.name.as_ref().unwrap().as_str(), "train-1");
    assert_eq!(draft.display_name, "Train");
    assert_eq!(draft.description, "# two\nlines\n");
    assert_eq!(draft.experiment, "diabetes");
    assert_eq!(draft.tags["year"], "2024");
    assert!(draft.command.contains("${{inputs.data}} --flag"), "{}", draft.command);
    assert_eq!(job.code.as_deref(), Some("./src"));
    let requirements = "requirements.txt".to_owned();
    assert_eq!(
        job.environment,
        EnvironmentRef::Requirements { python: "python3.11".into(), path: requirements, user_managed: false }
    );
    assert_eq!(draft.environment_variables["OMP_NUM_THREADS"], "4");
    assert_eq!(draft.environment_variables["EMPTY"], "");
    assert_eq!(draft.secrets["WANDB_API_KEY"], "wandb");
    let docker_args = vec!["--cpus 2".to_owned()];
    let resources =
        Resources { nodes: 2, gpus: 1, memory: 8 << 30, shm: 512 << 20, docker_args, ..Resources::default() };
    assert_eq!(draft.resources, resources);
    assert_eq!(draft.limits.timeout, Some(Duration::from_secs(3600)));
    assert_eq!(draft.limits.grace, Some(Duration::from_secs(120)));
    assert_eq!(draft.limits.on_disconnect, OnDisconnect::Replace);
    assert_eq!(draft.retry, RetryPolicy { max_attempts: 3, backoff: Duration::from_secs(5) });
    assert_eq!(draft.priority, Priority::High);
}

#[test]
fn test_the_kind_of_a_machine_is_a_label() {
    let text = "command: x\nenvironment: host\nresources:\n  cpus: 8\n  instance_type: Standard_NC6\n  labels: {rack: 7}\n";
    let resources = command_job(text, &[]).unwrap().draft.resources;
    assert_eq!((resources.cpus, resources.labels["rack"].as_str()), (8, "7"));
    assert_eq!(resources.labels["instance_type"], "Standard_NC6");
}

#[test]
fn test_inputs_and_outputs_are_told_apart() {
    let job = command_job(FULL, &[]).unwrap();
    let literal = |text: &str| Input::Literal(text.to_owned());
    let expected = [
        ("flag", "true"),
        ("lr", "0.10"),
        ("steps", "30"),
        ("type", "uri_file"),
        ("url", "https://example.com/x.csv"),
    ];
    let expected: Vec<_> = expected.iter().map(|(name, text)| ((*name).to_owned(), literal(text))).collect();
    assert_eq!(job.draft.inputs.into_iter().collect::<Vec<_>>(), expected);
    let paths: Vec<_> = job.inputs.iter().map(|i| (i.name.as_str(), i.path.as_str(), i.is_file)).collect();
    assert_eq!(paths, [("data", "data/x.csv", true), ("folder", "../data", false)]);
    assert_eq!(job.draft.outputs["model"], Output::Folder);
    assert_eq!(job.draft.outputs["report"], Output::File);
}

#[test]
fn test_outputs_have_an_address_where_they_are_sent() {
    let output = |text: &str| {
        let job = command_job(&format!("command: x\noutputs: {{m: {{{text}}}}}\n"), &[]).expect(text);
        (job.draft.outputs["m"].clone(), job.warnings.into_iter().map(|warning| warning.message).collect())
    };
    let address = "path: 'azureml://datastores/blob/paths/${{name}}/${{output_name}}'";
    for (mode, warned) in [("upload", 0), ("rw_mount", 0), ("direct", 1)] {
        let (sent, warnings): (Output, Vec<String>) = output(&format!("mode: {mode}, {address}"));
        let sent = sent.data().unwrap().clone();
        assert_eq!(sent.to_string(), "azureml://datastores/blob/paths/${{name}}/m");
        assert!(!sent.is_file && warnings.len() == warned, "{warnings:?}");
    }
    let (sent, warnings): (Output, Vec<String>) = output("type: uri_file, path: 's3://b/m.pkl', name: m");
    assert!(sent.is_file() && sent.data().is_some() && warnings.is_empty(), "{warnings:?}");
    for (path, said) in [
        ("./models", "it is no address of a data store"),
        ("https://h.example/x", "a web server takes no files"),
        ("'azureml://datastores/a/paths/${{inputs.a}}'", "means nothing there"),
    ] {
        let fault = refused(&format!("command: x\noutputs: {{m: {{path: {path}}}}}\n"));
        let line = fault.line();
        assert!(fault.code == Code::JobUnsupported && line.contains(said), "{line}");
        assert!(line.contains("line 2, column 21") && fault.fix.is_some(), "{line}");
    }
}

#[test]
fn test_outputs_get_names_as_data() {
    let name = |text: &str| {
        let job = command_job(&format!("command: x\noutputs: {{m: {{{text}}}}}\n"), &[]).expect(text);
        let name = job.draft.output_names.get("m").cloned();
        (name.map(|name| (name.name, name.version)), job.warnings.len())
    };
    let some = |version: Option<&str>| Some(("iris_model".to_owned(), version.map(str::to_owned)));
    assert_eq!(name("type: mlflow_model, name: iris_model"), (some(None), 0));
    assert_eq!(name("type: uri_file, name: iris_model, version: 3"), (some(Some("3")), 0));
    assert_eq!(name("name: iris_model, version: '2024-01'"), (some(Some("2024-01")), 0));
    assert_eq!(name("name: iris_model, version:"), (some(None), 0));
    assert_eq!(name("version: 3"), (None, 1));
    for (text, line) in [("name: a b", "outputs.m.name"), ("name: m, version: a/b", "outputs.m.version")] {
        let fault = refused(&format!("command: x\noutputs:\n  m: {{{text}}}\n"));
        assert!(fault.line().contains(line) && fault.line().contains("line 3"), "{}", fault.line());
    }
}

#[test]
fn test_addresses_of_data_reach_the_draft_and_are_not_sent() {
    let file = "type: uri_file, path";
    for (input, is_file, is_own_copy) in [
        (format!("{file}: 'https://h.example/iris.csv'"), true, false),
        (format!("{file}: 'wasbs://c@a.blob.core.windows.net/iris.csv', mode: download"), true, true),
        (format!("{file}: azureml://datastores/blob/paths/iris.csv, mode: ro_mount"), true, false),
        ("path: azureml://datastores/blob/paths/iris".to_owned(), false, false),
        ("type: uri_file, path: azureml:iris:1".to_owned(), true, false),
        ("type: mltable, path: 's3://b/t', mode: eval_download".to_owned(), false, true),
    ] {
        let job = command_job(&format!("command: cat ${{{{inputs.d}}}}\ninputs: {{d: {{{input}}}}}\n"), &[])
            .unwrap();
        let Input::Data(data) = &job.draft.inputs["d"] else { panic!("{input}") };
        assert_eq!((data.is_file, data.is_own_copy), (is_file, is_own_copy), "{input}");
        assert!(job.inputs.is_empty() && job.warnings.is_empty(), "{input}");
    }
    let direct = "command: x\ninputs: {d: {mode: direct, path: 'azureml://datastores/blob/paths/a/'}}\n";
    let literal = Input::Literal("azureml://datastores/blob/paths/a".to_owned());
    assert_eq!(command_job(direct, &[]).unwrap().draft.inputs["d"], literal);
    let fault = refused("command: x\ninputs: {d: {type: uri_file, path: 'https://h.example'}}\n");
    assert!(fault.what.contains("line 2, column 36") && fault.what.contains("names none"), "{fault}");
}

#[test]
fn test_smallest_job_and_json() {
    for text in ["command: true", r#"{"command": "true"}"#] {
        let job = command_job(text, &[]).unwrap();
        assert_eq!((job.draft.command.as_str(), job.code), ("true", None));
        assert_eq!(job.environment, EnvironmentRef::Spec(EnvSpec::host()));
    }
}

#[test]
fn test_what_has_no_effect_is_a_warning_with_its_place() {
    let text = "command: x\ncompute: azureml:cpu\nenviroment: y\nresources: {gpu: 1}\nfoo: 1\n";
    let warnings = command_job(text, &[]).unwrap().warnings;
    let warnings: Vec<_> = warnings.iter().map(|w| format!("{}: {}", w.place, w.message)).collect();
    assert_eq!(
        warnings,
        [
            "line 3, column 1: `enviroment` is not known and has no effect; did you mean `environment`?",
            "line 4, column 13: `resources.gpu` is not known and has no effect; did you mean `gpus`?",
            "line 5, column 1: `foo` is not known and has no effect",
        ]
    );
}

#[test]
fn test_what_a_script_could_count_on_is_a_warning_that_says_why_it_has_no_effect() {
    for (key, why) in [
        ("properties: {a: b}", "`properties` has no effect: only `tags` are kept"),
        ("parent_job_name: other", "`parent_job_name` has no effect: a job is never part of another"),
        ("identity: {type: user_identity}", "`identity` has no effect: a job has no identity of the cloud"),
        ("inputs: {d: {path: d, path_on_compute: /d}}", "`inputs.d.path_on_compute` has no effect: its path"),
    ] {
        let warnings = command_job(&format!("command: x\n{key}\n"), &[]).unwrap().warnings;
        assert!(matches!(&*warnings, [warning] if warning.message.starts_with(why)), "{key}: {warnings:?}");
    }
}

#[test]
fn test_what_is_not_run_is_refused_with_its_place_and_a_way_out() {
    for (text, place, message) in [
        ("type: pipeline\njobs: {}\n", "line 1, column 7", "`type: pipeline` is not run"),
        ("policy: {}\nmax_total_runs: 3\n", "line 2, column 17", "HyperDrive configuration of the SDK v1"),
        ("jobs: {a: {}}\n", "line 1, column 7", "`jobs` makes this a pipeline job"),
        ("command: x\ncode: azureml:code:1\n", "line 2, column 7", "is not fetched"),
        ("command: x\ncode: git+https://h/x\n", "line 2, column 7", "is not fetched"),
        ("command: x\ninputs: {d: {path: azureml:d}}\n", "line 2, column 20", "does not say the version"),
        ("command: x\ninputs: {d: {path: 'ftp://h/x'}}\n", "line 2, column 20", "is not fetched"),
        ("command: x\ninputs: {d: {path: 'https://u:p@h/x'}}\n", "line 2, column 20", "holds credentials"),
        ("command: x\ninputs: {d: {path: 'azureml://jobs/j/x'}}\n", "line 2, column 20", "output of a job"),
    ] {
        let fault = refused(text);
        assert_eq!(fault.code, Code::JobUnsupported, "{text}");
        assert!(!fault.what.contains("u:p"), "{}", fault.what);
        assert!(fault.what.starts_with(place) && fault.what.contains(message), "{}", fault.what);
        assert!(fault.fix.is_some());
    }
}

#[test]
fn test_replacing_without_a_second_attempt_is_warned_of() {
    let text = "command: x\nlimits: {on_disconnect: replace}\n";
    let warnings = command_job(text, &[]).unwrap().warnings;
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].message.contains("`retry.max_attempts` allows no second attempt"));
    assert_eq!(command_job(&format!("{text}retry: {{max_attempts: 2}}\n"), &[]).unwrap().warnings, []);
}

#[test]
fn test_what_breaks_a_rule_is_refused_with_its_place() {
    for (text, what) in [
        ("", "line 1, column 1: the job file is empty"),
        ("code: .\n", "line 1, column 1: the job has no `command`"),
        ("code: .\ncomand: x\n", "line 2, column 1: `comand` is not known"),
        ("[a]", "line 1, column 1: expected a mapping, found a list"),
        ("command: [a]", "line 1, column 10: `command`: expected a plain value, found a list"),
        ("command: x\ntype: sweeep\n", "line 2, column 7: `type: sweeep` is not a kind of job"),
        (
            "command: x\nresources:\n  instance_count: two\n",
            "line 3, column 19: `resources.instance_count`: expected a whole number of at least 1, found `two`",
        ),
        (
            "command: x\nlimits: {timeout: soon}\n",
            "line 2, column 19: `limits.timeout`: expected a number of seconds, for example 3600 or `2h`, \
             found `soon`",
        ),
        (
            "command: x\nlimits: {on_disconnect: replaces}\n",
            "line 2, column 25: `limits.on_disconnect`: `replaces` is not one of hold, replace; did you mean \
             `replace`?",
        ),
        ("command: x\nlimits: {timeout: 0}\n", "line 2, column 9: `limits.timeout` is 0 seconds"),
        (
            "command: x\nqueue_settings: {priority: hihg}\n",
            "line 2, column 28: `queue_settings.priority`: `hihg` is not one of low, medium, high; \
             did you mean `high`?",
        ),
        ("command: x\ntags: {a: [1]}\n", "line 2, column 11: `tags.a`: expected a plain value, found a list"),
        ("command: x\ninputs: {a: {type: string}}\n", "line 2, column 13: `inputs.a` has no value"),
        (
            "command: x ${{inputs.dta}}\ninputs: {data: 1}\n",
            "line 1, column 10: the command uses `${{inputs.dta}}`, which the job does not define",
        ),
        ("command: x ${{outputs.m\n", "line 1, column 10: the command has `${{` without `}}`"),
    ] {
        let fault = refused(text);
        assert_eq!((fault.code, fault.what.as_str()), (Code::JobInvalid, what), "{text}");
        assert!(fault.fix.is_some_and(|fix| !fix.is_empty()), "{text}");
    }
}

#[test]
fn test_slips_are_answered_with_what_was_meant() {
    assert_eq!(refused("comand: x\n").fix.unwrap(), "write `command` instead");
    let fault = refused("command: x ${{inputs.dta}}\ninputs: {data: 1}\n");
    assert_eq!(fault.fix.unwrap(), "did you mean `${{inputs.data}}`?");
    let fault = refused("command: x\nname: my job\n");
    assert!(fault.what.contains("it may hold only letters"), "{}", fault.what);
    assert!(fault.fix.unwrap().contains("display_name"));
}

#[test]
fn test_all_mistakes_are_told_at_once_the_first_one_first() {
    let fault = refused(
        "command: python t.py ${{inputs.a}}\nenvironment: {requirments: r.txt}\nname: my job\n\
         resources: {gpus: two, memory: much}\nlimits: {timeout: soon}\ninputs: {a: {type: strin}}\n",
    );
    assert_eq!(fault.what, "line 2, column 15: `environment.requirments` is not known");
    assert_eq!(fault.fix.as_deref(), Some("did you mean `requirements`?"));
    let places = [
        "line 3, column 7",
        "line 4, column 19",
        "line 4, column 32",
        "line 5, column 19",
        "line 6, column 20",
    ];
    assert_eq!(fault.why.len(), places.len(), "{:?}", fault.why);
    for (why, place) in fault.why.iter().zip(places) {
        assert!(why.starts_with(&format!("also {place}: ")), "{why}");
    }
    assert!(fault.why[0].contains("display_name"), "{}", fault.why[0]);
    // For a kind of job that is not run nothing else is reported.
    assert_eq!(refused("type: sweep\nname: my job\n").why, [""; 0]);
    let text = "command: x\nresources: {colour: 2}\n";
    assert!(!command_job(text, &[]).unwrap().warnings[0].message.contains("did you mean"));
}

#[test]
fn test_broken_text_is_a_file_fault() {
    let fault = refused("command: x\n  bad: [\n");
    assert_eq!(fault.code, Code::JobFile);
    assert!(fault.what.starts_with("line "), "{}", fault.what);
}

proptest::proptest! {
    #[test]
    fn test_no_text_makes_the_reader_fail_otherwise(text in "[a-z: \n\\-\\[\\]{}\"'$#|>0-9]{0,120}") {
        if let Err(refused) = command_job(&text, &[]) {
            let fault = Fault::from(refused);
            assert!(fault.what.starts_with("line "), "{}", fault.what);
            assert!(fault.fix.is_some());
        }
    }
}

#[test]
fn test_the_reference_names_every_key_that_is_read_and_no_other() {
    use std::collections::BTreeSet;

    use crate::keys::Effect;

    let page = include_str!("../../../docs/job-file.md");
    let last = |key: &str| key.rsplit('.').next().unwrap().to_owned();
    let sections = [
        "inputs",
        "outputs",
        "resources",
        "distribution",
        "limits",
        "retry",
        "queue_settings",
        "services",
        "objective",
    ];
    let mut read = BTreeSet::new();
    keys::JOB.walk("", &mut |path, row| {
        if matches!(row.effect, Effect::Read) {
            read.insert(last(path));
        }
    });
    let cells = page.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let told =
        cells.flat_map(|cell| cell.split(", ").map(|key| last(key.trim_matches('`'))).collect::<Vec<_>>());
    let mut told: BTreeSet<String> = told.collect();
    assert!(sections.iter().all(|section| page.contains(&format!("`{section}`"))));
    told.extend(sections.map(str::to_owned)); // the name of a section is above its keys
    told.extend(["path", "dockerfile_path"].map(str::to_owned)); // told where `build` is
    assert_eq!(told, read);
    // And its example can be read.
    let shown = page.split("```yaml\n").nth(1).unwrap().split("```").next().unwrap();
    assert_eq!(command_job(shown, &[]).unwrap().warnings, []);
}
