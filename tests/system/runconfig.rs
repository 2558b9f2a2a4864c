//! Run configurations and job files, from `init` over `check` to a job that ran.

use agent_tests::Host;

const SCRIPT: &str = r#"
import os, sys
print("arguments", sys.argv[1:])
for name in ("mnist", "AZUREML_DATAREFERENCE_mnist", "LEVEL", "OUTER"):
    print(name, os.environ.get(name))
path = os.environ.get("mnist")
print("data", open(path).read().strip() if path else None)
open("outputs/model.txt", "w").write("weights")
"#;

const DATA: &str = include_str!("../fixtures/runconfig/data.runconfig");

#[test]
fn test_a_run_configuration_runs_with_its_data_variables_and_arguments() {
    let host = Host::started();
    let text =
        DATA.replace("node_count: 4", "node_count: 1\nenvironmentVariables: {LEVEL: deep, OUTER: 'a b'}");
    let text = text.replace("- 0.5", "- 0.5\n- $LEVEL/$OUTER\n- $NONE");
    let files =
        [(".azureml/local.runconfig", text.as_str()), ("train.py", SCRIPT), ("data/digits.csv", "1,2,3\n")];
    let dir = host.project("p", &files);
    let path = dir.to_str().unwrap();
    let checked = host.ctl(&["check", path]).ok().stdout;
    assert!(checked.ends_with(": no mistakes\n"), "{checked}");
    let ran = host.ctl(&["run", path, "-c", "local", "-e", "digits"]).ok().says("outputs/model.txt");
    for said in [", '--reg', '0.5', 'deep/a b', '$NONE']", "LEVEL deep", "data 1,2,3"] {
        assert!(ran.stdout.contains(said), "no `{said}` in:\n{}", ran.stdout);
    }
    let path_of =
        |name: &str| ran.stdout.lines().find_map(|line| line.strip_prefix(name)).unwrap().to_owned();
    assert_eq!(path_of("mnist "), path_of("AZUREML_DATAREFERENCE_mnist "));
    let jobs = host.ctl(&["jobs", "--json", "--experiment", "digits"]).ok().json();
    assert_eq!(jobs["jobs"].as_array().unwrap().len(), 1, "{jobs}");
    // Words behind the name stand in place of the script and its arguments, options included.
    let ran = host.ctl(&["run", path, "-c", "local", "train.py", "--lr", "0.1"]).ok();
    assert!(ran.stdout.contains("arguments ['--lr', '0.1']"), "{}", ran.stdout);
}

#[test]
fn test_init_writes_what_checks_and_runs_and_never_writes_over() {
    let host = Host::started();
    for (name, flags, file) in
        [("a", &[][..], "job.yml"), ("b", &["--runconfig"][..], ".azureml/local.runconfig")]
    {
        let dir = host.project(name, &[("main.py", "print('it ran')\n")]);
        let path = dir.to_str().unwrap();
        host.ctl(&[&["init", path], flags].concat()).ok().says(file);
        let text = std::fs::read_to_string(dir.join(file)).unwrap();
        assert!(text.starts_with("# yaml-language-server: $schema=") && text.contains("main.py"), "{text}");
        let checked = host.ctl(&["check", path, "--strict", "--json"]).ok().json();
        assert_eq!(checked["targets"][0]["ok"], true, "{checked}");
        assert!(host.ctl(&["run", path]).ok().stdout.contains("it ran"));
        std::fs::write(dir.join(file), "mine").unwrap();
        host.ctl(&[&["init", path], flags].concat()).ok().says("is there already");
        assert_eq!(std::fs::read_to_string(dir.join(file)).unwrap(), "mine");
    }
}

#[test]
fn test_check_tells_all_mistakes_of_all_files_with_their_places() {
    let host = Host::new();
    let dir = host.project(
        "p",
        &[
            ("job.yml", "command: x\ncode: .\nfoo: 1\n"),
            ("bad.yml", "comand: x\nresources: {gpus: two}\n"),
            (".azureml/old.runconfig", "ArgumentVector: [train.py]\nTarget: local\n"),
            (".azureml/new.runconfig", "script: gone.py\nenvironment: {name: e}\n"),
        ],
    );
    let file = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let checked = host.ctl(&["check", "--json", &file("job.yml"), &file("bad.yml")]).code(1).json();
    let [good, bad] = [&checked["targets"][0], &checked["targets"][1]];
    assert_eq!((&good["ok"], &good["warnings"][0]["line"]), (&true.into(), &3.into()), "{checked}");
    let lines = |of: &serde_json::Value| -> Vec<u64> {
        of["mistakes"].as_array().unwrap().iter().filter_map(|mistake| mistake["line"].as_u64()).collect()
    };
    assert_eq!(lines(bad), [1, 2], "{checked}");
    host.ctl(&["check", &file("job.yml")]).ok();
    host.ctl(&["check", "--strict", &file("job.yml")]).code(1);
    let old = host.ctl(&["check", &file(".azureml/old.runconfig")]).code(1).stdout;
    assert!(old.contains("JOB-103") && old.contains("line 1, column 1") && old.contains("`script`"), "{old}");
    let gone = host.ctl(&["run", dir.to_str().unwrap(), "-c", "new"]).code(125);
    assert!(gone.stderr.contains("there is no file `gone.py`"), "{}", gone.stderr);
    host.ctl(&["run", dir.to_str().unwrap(), "-c", "none"]).code(125).says("there is: new, old");
    let schema = host.ctl(&["schema", "runconfig"]).ok().json();
    assert!(schema["properties"]["node_count"].is_object() && schema["properties"]["nodeCount"].is_object());
}

/// Logs as a client of MLflow does.
const LOGGING: &str = r#"
import json, os, time, urllib.request

def log(name, value):
    record = {"run_id": os.environ["MLFLOW_RUN_ID"], "key": name, "value": value, "timestamp": int(time.time() * 1000)}
    request = urllib.request.Request(
        os.environ["MLFLOW_TRACKING_URI"] + "/api/2.0/mlflow/runs/log-metric",
        json.dumps(record).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["MLFLOW_TRACKING_TOKEN"]},
    )
    urllib.request.urlopen(request).read()
"#;

const LOCAL: &str = r#"
import os
import mylib
for step in range(20):
    alpha = step / 20
    mylib.log("alpha", alpha)
    mylib.log("mse", 3000 + alpha)
    with open(os.path.join("./outputs", f"ridge_{alpha:.2f}.txt"), "w") as model:
        model.write(str(alpha))
"#;

#[test]
fn test_a_script_in_a_local_target_keeps_its_forty_metrics_and_twenty_models() {
    let host = Host::started();
    let environment = "environment: {python: {userManagedDependencies: true, interpreterPath: python3}}";
    let runconfig = format!("script: train.py\ntarget: local\nframework: Python\n{environment}\n");
    let dir = host.project(
        "p",
        &[("train.py", LOCAL), ("mylib.py", LOGGING), (".azureml/local.runconfig", &runconfig)],
    );
    host.ctl(&["run", dir.to_str().unwrap()]).ok().says("20 files");
    let metrics = host.ctl(&["metrics", "-", "--json"]).ok().json();
    let counts: Vec<_> =
        metrics["metrics"].as_array().unwrap().iter().map(|metric| &metric["count"]).collect();
    assert_eq!(counts, [20, 20], "{metrics}");
}
