use std::collections::BTreeSet;

use super::*;
use crate::command_job::environment::EnvironmentRef;
use crate::keys::Effect;
use crate::schema::tests::{checked, examples};
use crate::{Dialect, InputRef};
use agent_model::job::{Distribution, Input};
use agent_model::{Code, EnvSpec, Fault};

fn of(text: &str) -> JobFile {
    runconfig(text, &[], ".azureml").unwrap_or_else(|refused| panic!("{text}: {}", Fault::from(refused))).job
}

fn refused(text: &str) -> Fault {
    runconfig(text, &[], ".azureml").map(|_| ()).expect_err(text).into()
}

/// With the machine's Python, which needs no file.
fn with(text: &str) -> JobFile {
    of(&format!("{text}\nenvironment: {{python: {{userManagedDependencies: true}}}}\n"))
}

fn messages(job: &JobFile) -> Vec<String> {
    job.warnings.iter().map(|warning| format!("{}: {}", warning.place, warning.message)).collect()
}

#[test]
fn test_the_smallest_file_in_json() {
    let job = of(&examples()[0]);
    assert_eq!(job.draft.command, "python code/fit.py");
    assert!(job.draft.azureml_stand_in, "its script is one of the SDK v1");
    let EnvironmentRef::Spec(EnvSpec::Image { image, conda: Some(document) }) = &job.environment else {
        panic!("{:?}", job.environment)
    };
    assert_eq!(image, "base:0.2.4");
    let (conda, _) = crate::condafile::parse(document).unwrap();
    assert_eq!((conda.specs.len(), conda.pip.len()), (3, 1));
    let told = messages(&job);
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("ask for GPUs with `--gpus`") && job.draft.compute.is_some());
}

#[test]
fn test_a_file_with_every_key_that_the_old_tools_wrote_is_read_without_a_warning() {
    let job = of(&examples()[1]);
    assert_eq!(job.warnings, []);
    assert_eq!(
        job.draft.command,
        "spark-submit --conf \"spark.app.name=Azure ML Experiment\" --conf spark.yarn.maxAppAttempts=1 --repositories \
         https://repo.example/ml --packages com.example.ml:spark_2.11:0.12 train.py --epochs 2"
    );
    assert_eq!(job.draft.environment_variables["EXAMPLE_ENV_VAR"], "EXAMPLE_VALUE");
    assert_eq!(job.draft.resources.shm, 1 << 30);
    let path = ".azureml/conda_dependencies.yml".to_owned();
    assert_eq!(
        job.environment,
        EnvironmentRef::CondaFile { image: Some("base:intelmpi".into()), path, lock: None }
    );
}

#[test]
fn test_data_reaches_the_script_as_an_argument_and_as_variables() {
    let job = of(&examples()[2]);
    assert_eq!(
        job.draft.command,
        "export mnist=\"${{inputs.mnist}}\"\nexport AZUREML_DATAREFERENCE_mnist=\"${{inputs.mnist}}\"\n\
         python train.py --data-folder \"${{inputs.mnist}}\" --reg 0.5"
    );
    let InputRef { name, path, is_file, .. } = &job.inputs[0];
    assert_eq!((name.as_str(), path.as_str(), *is_file), ("mnist", "data/digits.csv", true));
    assert_eq!((job.draft.resources.nodes, job.draft.display_name.as_str()), (4, "train.py"));
    assert_eq!(job.draft.distribution, None);
    let text = "script: t.py\narguments: ['DatasetConsumptionConfig:x']\nenvironment: {name: e}\n";
    assert!(refused(text).what.contains("`data` has no `x`"));
    let by_id = of(&format!("{text}data: {{x: {{dataLocation: {{dataset: {{id: 1}}}}}}}}\n"));
    let Input::Data(data) = &by_id.draft.inputs["x"] else { panic!("{by_id:?}") };
    assert_eq!(data.uri.to_string(), "azureml:x@latest");
    assert!(by_id.warnings.iter().any(|warning| warning.message.contains("registered here as `x`")));
    let url = "script: t.py\nenvironment: {name: e}\ndata: {d: {mechanism: direct, dataLocation: {uri: {path: 'https://h/x'}}}}\n";
    assert_eq!(of(url).draft.inputs["d"], Input::Literal("https://h/x".into()));
}

#[test]
fn test_the_kind_of_a_machine_is_demanded_only_of_its_target() {
    let job = of(&examples()[3]);
    assert_eq!(job.draft.resources.labels["instance_type"], "STANDARD_D2_V2");
    assert_eq!(job.warnings, []);
    let job = with("script: t.py\namlcompute: {vmSize: X}");
    assert!(job.draft.resources.labels.is_empty());
    let job = with("script: t.py\ntarget: amlcompute\namlCompute: {vm_size: X, vmPriority: lowpriority}");
    assert_eq!(job.draft.resources.labels["instance_type"], "X");
    assert!(messages(&job)[0].contains("`amlcompute.vmPriority` has no effect"), "{job:?}");
    let image =
        "environment: {docker: {baseImage: i}, python: {userManagedDependencies: true, interpreterPath: py}}";
    let job = of(&format!(
        "script: t.py\ntarget: containerinstance\n{image}\ncontainerInstance: {{cpuCores: 1.5, memoryGb: 3.5}}\n"
    ));
    assert_eq!((job.draft.resources.cpus, job.draft.resources.memory), (2, 7 << 29));
    assert_eq!(job.environment, EnvironmentRef::Spec(EnvSpec::Image { image: "i".into(), conda: None }));
    assert_eq!(job.draft.command, "py t.py");
}

#[test]
fn test_counts_of_processes_and_nodes() {
    use Distribution::{Mpi, PyTorch, TensorFlow};
    for (text, distribution, nodes) in [
        (
            "communicator: OpenMpi\nnodeCount: 2\nmpi: {processCountPerNode: 3, nodeCount: 1}",
            Some(Mpi { processes: 3 }),
            2,
        ),
        ("communicator: Mpi\nmpi: {nodeCount: 4}", Some(Mpi { processes: 1 }), 4),
        ("communicator: IntelMpi\nbatchAi: {node_count: 2}", Some(Mpi { processes: 1 }), 2),
        ("framework: PyTorch\npytorch: {processCount: 4, nodeCount: 2}", Some(PyTorch { processes: 2 }), 2),
        ("framework: PyTorch\nmpi: {nodeCount: 7}", None, 1),
        ("communicator: Nccl", Some(PyTorch { processes: 1 }), 1),
        (
            "framework: TensorFlow\ncommunicator: ParameterServer\nnode_count: '3'\ntensorflow: {workerCount: 3}",
            Some(TensorFlow { workers: 3, parameter_servers: 1 }),
            3,
        ),
        ("framework: Python\nnodeCount: 2", None, 2),
    ] {
        let job = with(&format!("script: t.py\n{text}"));
        assert_eq!((job.draft.distribution, job.draft.resources.nodes), (distribution, nodes), "{text}");
        assert_eq!(job.warnings, [], "{text}");
    }
}

#[test]
fn test_words_of_the_command_line_go_before_those_of_the_file() {
    let text = "command: [echo, hello]\nenvironment: {name: e, version: 3}\n";
    assert_eq!(of(text).draft.command, "echo hello");
    let given = ["t.py".to_owned(), "--lr".to_owned(), "$LR".to_owned()];
    let read = runconfig(text, &given, "").unwrap();
    assert_eq!(read.job.draft.command, "python t.py --lr \"${LR-\\$LR}\"");
    assert_eq!(read.script.unwrap().0, "t.py");
    let named = EnvSpec::Named { reference: "azureml:e:3".into() };
    assert_eq!(read.job.environment, EnvironmentRef::Spec(named));
}

#[test]
fn test_docker_of_the_run_goes_before_that_of_the_environment() {
    let docker = "environment: {docker: {enabled: true, baseImage: i, shmSize: 1g, baseImageRegistry: {address: r.example}}, \
                  python: {userManagedDependencies: true, interpreterPath: /opt/py}}";
    let job = of(&format!("script: t.py\n{docker}\ndocker: {{shmSize: 4g, arguments: [--cpus, 2]}}\n"));
    assert_eq!((job.draft.resources.shm, job.draft.resources.docker_args.len()), (4 << 30, 2));
    let image = EnvSpec::Image { image: "r.example/i".into(), conda: None };
    assert_eq!((job.environment, job.draft.command.as_str()), (EnvironmentRef::Spec(image), "/opt/py t.py"));
    let job = of(&format!("script: t.py\n{docker}\ndocker: {{useDocker: false}}\n"));
    let host = EnvSpec::Host { python: "/opt/py".into(), requirements: vec![] };
    assert_eq!((job.environment, job.draft.command.as_str()), (EnvironmentRef::Spec(host), "python t.py"));
    assert_eq!(job.draft.resources.shm, 0);
}

#[test]
fn test_times_priorities_and_variables() {
    let job = of("script: t.py\nmaxRunDurationSeconds: 90\npriority: -5\njobName: Fit\n\
                  environmentVariables: {a_B: 1}\n\
                  environment: {environmentVariables: {a_B: 2, c: 3}, python: {userManagedDependencies: true}}\n");
    assert_eq!(job.draft.limits.timeout, Some(Duration::from_secs(90)));
    assert_eq!((job.draft.priority, job.draft.display_name.as_str()), (Priority::Low, "Fit"));
    let variables: Vec<_> = job.draft.environment_variables.into_iter().collect();
    assert_eq!(variables, [("a_B".into(), "1".into()), ("c".into(), "3".into())]);
}

#[test]
fn test_what_cannot_be_done_is_refused_by_name_with_its_place() {
    let env = "environment: {name: e}\n";
    let dockerfile = "environment: {docker: {enabled: true, baseDockerfile: D}}\n";
    for (text, code, place, said) in [
        ("ArgumentVector: [t.py]\nTarget: local\n", Code::JobUnsupported, "line 1, column 1", "oldest form"),
        (
            "target: local\nenvironment: {name: e}\n",
            Code::JobInvalid,
            "line 1, column 1",
            "neither a `script`",
        ),
        (
            "script: a\ncommand: b\nenvironment: {name: e}\n",
            Code::JobInvalid,
            "line 2, column 10",
            "a `command` and",
        ),
        ("script: a\nnodeCount: two\n", Code::JobInvalid, "line 2, column 12", "expected a whole number"),
        ("script: a\nnodeCount: 1\nnode_count: 2\n", Code::JobInvalid, "line 3, column 1", "is the same key"),
        ("script: a\nframework: Caffe\n", Code::JobInvalid, "line 2, column 12", "is not one of Python"),
        ("script: a\ncommunicator: ParallelTask\n", Code::JobUnsupported, "line 2, column 15", "is not run"),
        ("script: a\nmaxRunDurationSeconds: 0\n", Code::JobInvalid, "line 1, column 1", "is 0 seconds"),
        ("script: a\nenvironment: e.yml\n", Code::JobUnsupported, "line 2, column 14", "names a file"),
        (
            "script: a\nenvironment: {docker: {enabled: true}}\n",
            Code::JobInvalid,
            "line 2, column 23",
            "has no image",
        ),
        (
            &format!("script: a\n{dockerfile}"),
            Code::JobUnsupported,
            "line 2, column 55",
            "no conda environment",
        ),
        (
            "script: a\nenvironment: {r: {rVersion: 3}}\n",
            Code::JobUnsupported,
            "line 2, column 18",
            "`environment.r`",
        ),
        (
            &format!("script: a\n{env}datacaches: [{{a: b}}]\n"),
            Code::JobUnsupported,
            "line 3, column 13",
            "`datacaches`",
        ),
        (
            &format!("script: a\n{env}outputData: {{o: {{mechanism: upload}}}}\n"),
            Code::JobUnsupported,
            "line 3, column 13",
            "`outputData`",
        ),
        (
            &format!("script: a\n{env}dataReferences: {{d: {{dataStoreName: s, pathOnDataStore: ../p}}}}\n"),
            Code::JobUnsupported,
            "line 3, column 21",
            "`dataReferences.d` is not fetched from `azureml://datastores/s/paths/../p`",
        ),
        (
            &format!("script: a\n{env}data: {{d: {{dataLocation: {{dataset: {{version: 7}}}}}}}}\n"),
            Code::JobInvalid,
            "line 3, column 26",
            "`data.d.dataLocation.dataset` does not say where the data is",
        ),
        (
            "script: a\nenvironment: {docker: {enabled: true, baseImage: i, baseImageRegistry: {username: u, password: p}}}\n",
            Code::JobUnsupported,
            "line 2, column 83",
            "`environment.docker.baseImageRegistry.username`",
        ),
    ] {
        let fault = refused(text);
        assert_eq!(fault.code, code, "{text}");
        assert!(fault.what.starts_with(place) && fault.what.contains(said), "{text}: {}", fault.what);
        assert!(fault.fix.is_some_and(|fix| !fix.is_empty()), "{text}");
    }
}

#[test]
fn test_all_mistakes_are_told_and_what_has_no_effect_is_a_warning() {
    let fault = refused(
        "scrpt: a\nnodeCount: x\nenvironment: {python: {userManagedDependencies: perhaps}}\npriority: much\n",
    );
    assert_eq!(fault.why.len(), 4, "{fault:?}");
    assert!(fault.why[3].ends_with("did you mean `script`?"), "{fault:?}");
    let job = with(
        "script: t.py\nhistory: {outputCollection: false, directoriesToWatch: [logs, weights]}\nfoo: 1\nnodeCont: 2\narguments: --a 1",
    );
    let told = messages(&job);
    assert_eq!(
        told,
        [
            "line 2, column 29: `history.outputCollection` has no effect: `./outputs` is always kept",
            "line 2, column 56: `history.directoriesToWatch` has no effect: only `./logs` and `./outputs` are kept",
            "line 3, column 1: `foo` is not known and has no effect",
            "line 4, column 1: `nodeCont` is not known and has no effect; did you mean `nodeCount`?",
            "line 5, column 12: `arguments` is one text, which the script gets as one argument; write a list",
        ]
    );
    let told = messages(&of("script: t.py\n"));
    assert!(told[0].contains("no `environment`"), "{told:?}");
}

proptest::proptest! {
    #[test]
    fn test_no_text_makes_the_reader_fail_otherwise(text in "(script|nodeCount|docker|data|environment|mpi|[a-z: \n{}\\[\\]\"'$#0-9])*") {
        if let Err(refused) = runconfig(&text, &[], "") {
            let fault = Fault::from(refused);
            assert!(fault.what.starts_with("line "), "{}", fault.what);
        }
    }
}

/// A row for each key, as `agent/docs/runconfig.md` has them.
fn rows() -> String {
    let mut rows = String::from("| Key | What it does |\n|---|---|\n");
    keys::RUNCONFIG.walk("", &mut |path, row| {
        let meaning = match row.effect {
            Effect::Read => row.about.to_owned(),
            Effect::Ignored => "no effect".to_owned(),
            Effect::Unused { why, .. } => format!("no effect: {why}"),
            Effect::Refused { fix, .. } => format!("not supported: {fix}"),
        };
        rows.push_str(&format!("| `{path}` | {meaning} |\n"));
    });
    rows
}

#[test]
#[allow(clippy::disallowed_methods, reason = "a switch for whoever changes a key")]
fn test_the_reference_has_every_key() {
    const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/runconfig.md");
    let page = std::fs::read_to_string(PAGE).unwrap();
    let (before, after) = page.split_once("| Key | What it does |\n").unwrap();
    let after = after.lines().skip_while(|line| line.starts_with('|')).map(|line| format!("{line}\n"));
    let current = format!("{before}{}{}", rows(), after.collect::<String>());
    if std::env::var_os("AGENT_UPDATE_GENERATED").is_some() {
        std::fs::write(PAGE, current).unwrap();
        return;
    }
    assert!(page == current, "AGENT_UPDATE_GENERATED=1 writes the table anew");
}

#[test]
fn test_the_schema_takes_the_examples_and_knows_no_other_key() {
    for text in examples() {
        assert_eq!(checked(Dialect::Runconfig, &text), [""; 0], "{text}");
    }
    let wrong =
        "script: t.py\nnodeCont: 2\nframework: Caffe\nenvironment: {python: {userManagedDependencies: 7}}\n";
    let told: BTreeSet<String> = checked(Dialect::Runconfig, wrong).into_iter().collect();
    let expected = ["/nodeCont", "/framework", "/environment/python/userManagedDependencies"];
    assert_eq!(told, expected.into_iter().map(str::to_owned).collect());
}
