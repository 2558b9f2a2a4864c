//! Outputs with a name in the job file: data that the next job reads, given once whatever becomes of the daemon.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use agent_tests::{Host, SOON, eventually};

use crate::data::{host as with_stores, submit};

const JOB: &str = "\
command: |
  mkdir ${{outputs.model}}/deep
  echo weights >${{outputs.model}}/deep/w
  echo table >${{outputs.table}}/MLTable
  echo 0.9 >${{outputs.scores}}
environment: host
compute: azureml:cpu-cluster
outputs:
  model: {type: mlflow_model, name: iris-model}
  table: {type: mltable, name: iris-table}
  scores: {type: uri_file, name: iris-scores, version: 2024-01}
";

const READS: &str = "\
command: cat ${{inputs.model}}/deep/w ${{inputs.table}}/MLTable ${{inputs.scores}}
environment: host
inputs:
  model: {type: mlflow_model, path: 'azureml:iris-model@latest'}
  table: {type: mltable, path: 'azureml:iris-table:1'}
  scores: {type: uri_file, path: 'azureml:iris-scores:2024-01'}
";

fn project(host: &Host, name: &str, job: &str) -> String {
    host.project(name, &[("job.yml", job)]).to_str().unwrap().to_owned()
}

/// The versions of a name, the oldest first.
fn versions(host: &Host, name: &str) -> Vec<String> {
    let listed = host.ctl(&["data", "list", "--all", "--json"]).ok().json();
    let of_name = listed.as_array().unwrap().iter().filter(|one| one["name"] == name);
    of_name.map(|one| one["version"].as_str().unwrap().to_owned()).rev().collect()
}

#[test]
fn test_outputs_of_every_type_are_data_of_the_next_job_and_outlive_theirs() {
    let host = Host::started();
    let train = project(&host, "train", JOB);
    host.ctl(&["run", &train])
        .ok()
        .says("output model is azureml:iris-model:1")
        .says("output scores is azureml:iris-scores:2024-01");
    let first = host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    assert!(host.ctl(&["show", &first]).ok().stdout.contains("table is azureml:iris-table:1"));
    let why = host.ctl(&["why", &first]).ok().stdout;
    assert!(why.contains("output `scores` is `azureml:iris-scores:2024-01`"), "{why}");
    let shown = host.ctl(&["data", "show", "iris-scores", "--json"]).ok().json();
    assert_eq!((&shown[0]["type"], &shown[0]["version"]), (&"uri_file".into(), &"2024-01".into()));

    // The version is given: the same file again is refused, and a rerun gets the next ones.
    host.ctl(&["run", &train])
        .code(125)
        .says("DAT-109")
        .says("`azureml:iris-scores:2024-01` is there already");
    let again = host.ctl(&["rerun", &first]).ok().stdout.trim().to_owned();
    host.wait_for(&again, &["Completed"]);
    assert_eq!(versions(&host, "iris-model"), ["1", "2"]);
    assert_eq!(versions(&host, "iris-scores").len(), 2);
    let text = host.ctl(&["show", &first, "--as-job"]).ok().says("which is given once").stdout;
    assert!(text.contains("name: \"iris-scores\"") || text.contains("name: iris-scores"), "{text}");
    assert!(!text.contains("2024-01"), "{text}");

    // Jobs go with their outputs; the data stay.
    host.ctl(&["rm", &first, &again]).ok();
    eventually("unneeded files are removed", SOON, || (host.ctl(&["gc", "--all"]).code == 0).then_some(()));
    let reads = project(&host, "reads", READS);
    assert_eq!(host.ctl(&["run", &reads]).ok().stdout, "weights\ntable\n0.9\n");
}

#[test]
fn test_a_killed_daemon_gives_each_name_once() {
    let mut host = Host::started();
    let text = "command: sleep 0.3; echo $AZUREML_RUN_ID >${{outputs.m}}/of\nenvironment: host\noutputs: {m: {name: m}}\n";
    let dir = project(&host, "p", text);
    let kills = 8;
    for round in 0..kills {
        let job = host.ctl(&["submit", &dir]).ok().stdout.trim().to_owned();
        // From before the command ends until after its end is stored.
        sleep(Duration::from_millis(250 + 60 * round));
        host.kill();
        host.start();
        host.wait_for(&job, &["Completed"]);
        let named = host.ctl(&["show", &job, "--json"]).ok().json()["named"][0]["version"].clone();
        assert_eq!(named, (round + 1).to_string());
    }
    let expected: Vec<String> = (1..=kills).map(|version| version.to_string()).collect();
    assert_eq!(versions(&host, "m"), expected);
}

#[test]
fn test_what_gives_no_name_says_so_and_what_was_sent_is_named_where_it_is() {
    let share = tempfile::tempdir().unwrap();
    let host =
        with_stores(&format!("datastores:\n  share: {{path: {}, writable: true}}\n", share.path().display()));
    let empty = project(&host, "empty", "command: 'true'\nenvironment: host\noutputs: {m: {name: m}}\n");
    host.ctl(&["run", &empty]).ok().says("output m is not named m: the job left nothing there");
    let fails = "command: echo >${{outputs.m}}/x; exit 3\nenvironment: host\noutputs: {m: {name: m}}\n";
    host.ctl(&["run", &project(&host, "fails", fails)]).code(3);
    assert!(versions(&host, "m").is_empty());
    let array = "command: 'true'\nenvironment: host\narray: 0-1\noutputs: {m: {name: m, version: 1}}\n";
    host.ctl(&["submit", &project(&host, "array", array)]).code(1).says("each task");

    let sends = "command: echo sent >${{outputs.m}}\nenvironment: host\n\
                 outputs: {m: {type: uri_file, name: m, path: 'azureml://datastores/share/paths/${{name}}/m.txt'}}\n";
    let job = submit(&host, "sends", sends);
    host.wait_for(&job, &["Completed"]);
    let shown = host.ctl(&["data", "show", "m", "--json"]).ok().json();
    assert_eq!(shown[0]["path"], format!("azureml://datastores/share/paths/{job}/m.txt"));
    assert_eq!(fs::read_to_string(share.path().join(&job).join("m.txt")).unwrap(), "sent\n");
    let reads =
        "command: cat ${{inputs.m}}\nenvironment: host\ninputs: {m: {type: uri_file, path: 'azureml:m:1'}}\n";
    assert_eq!(host.ctl(&["run", &project(&host, "reads", reads)]).ok().stdout, "sent\n");
}
