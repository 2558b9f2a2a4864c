//! What becomes of a job, as a client of the API sees it.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use agent_model::job::{Input, Output};
use agent_model::{EnvSpec, JobDraft};
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::{SOON, eventually};

const SCRIPT: &str = r#"
import json, os, pathlib, sys
print("data:", open(sys.argv[1] + "/d.txt").read())
print("to stderr", file=sys.stderr)
with open(os.environ["AGENTD_METRICS"], "a") as metrics:
    metrics.write(json.dumps({"metric": "loss", "value": 0.5, "step": 1}) + "\n")
pathlib.Path("outputs/model.txt").write_text("weights")
pathlib.Path("logs/x.log").write_text("log")
pathlib.Path(sys.argv[2], "t.csv").write_text("table")
pathlib.Path("scratch").write_text("dropped")
print(os.environ["AZUREML_RUN_ID"], os.environ["AZURE_ML_INPUT_data"] == sys.argv[1], repr(os.environ["CUDA_VISIBLE_DEVICES"]))
"#;

#[test]
fn test_job_runs_and_all_it_left_is_stored() {
    let fleet = Fleet::one_box();
    let job = JobDraft {
        name: Some("story".parse().unwrap()),
        command: "python train.py ${{inputs.data}} ${{outputs.table}}".into(),
        code: Some(fleet.client.try_push(&[("train.py", SCRIPT)]).unwrap()),
        inputs: [("data".to_owned(), Input::Folder(fleet.client.try_push(&[("d.txt", "rows")]).unwrap()))]
            .into(),
        outputs: [("table".to_owned(), Output::Folder)].into(),
        ..JobDraft::default()
    };
    let name = fleet.client.submit(&job);
    let ended = fleet.client.ended(&name);
    assert_eq!(fleet.client.text(&name), "data: rows\nto stderr\nstory True ''\n");
    assert_eq!(ended.state, "Completed", "{ended:?}");
    assert_eq!(fleet.client.records(&name), [r#"{"metric": "loss", "value": 0.5, "step": 1}"#]);
    let kept =
        [("logs/x.log", "log"), ("named-outputs/table/t.csv", "table"), ("outputs/model.txt", "weights")];
    let outputs = fleet.client.outputs(&ended);
    assert_eq!(outputs, kept.map(|(path, text)| (path.to_owned(), text.to_owned())));
    eventually("the job directory goes", SOON, || fleet.controller.job_dirs().is_empty().then_some(()));
}

#[test]
fn test_jobs_wait_while_the_disk_is_too_full_and_say_so() {
    let mut fleet = Fleet::new(&Setup::default());
    fleet.controller.set("AGENTD_DISK_RESERVE", "900TB");
    fleet.serve();
    let job = fleet.client.run("echo at last");
    let why = eventually("it is said why the job waits", SOON, || {
        let job = fleet.client.try_job(&job).ok()?;
        assert_eq!(job.state, "Queued", "{job:?}");
        job.detail.contains("fails the check `disk`").then_some(job.detail)
    });
    assert!(why.contains("free for") && why.contains("NODE-101"), "{why}");
    assert_eq!(fleet.client.nodes().unwrap()[0].liveness, "degraded");
    fleet.controller.set("AGENTD_DISK_RESERVE", "0");
    fleet.bounce();
    assert_eq!(fleet.client.ended(&job).state, "Completed");
}

#[test]
fn test_log_of_many_megabytes_arrives_whole() {
    let fleet = Fleet::one_box();
    let script = "import sys\nfor n in range(400000): sys.stdout.write(f'{n:049d}\\n')\n";
    let code = Some(fleet.client.try_push(&[("t.py", script)]).unwrap());
    let job = fleet.client.submit(&JobDraft { command: "python t.py".into(), code, ..JobDraft::default() });
    assert_eq!(fleet.client.ended(&job).state, "Completed");
    let log = fleet.client.text(&job);
    assert_eq!(log.len(), 400_000 * 50);
    assert!(
        log.lines().enumerate().all(|(number, line)| line.parse() == Ok(number)),
        "lines are lost or moved"
    );
}

#[test]
fn test_jobs_run_as_the_user_that_was_configured() {
    let controller = "job_user: nobody\nkeep_jobs: 1h\n".into();
    let mut fleet = Fleet::new(&Setup { controller, ..Setup::default() });
    fs::set_permissions(fleet.home(), Permissions::from_mode(0o755)).unwrap();
    fleet.start();
    let code = Some(fleet.client.try_push(&[("own.txt", "mine")]).unwrap());
    let command = "id -un; echo more >> own.txt; echo x > outputs/x; echo '{\"metric\":\"m\",\"value\":1}' >> $AGENTD_METRICS; \
                   ls .. 2>&1 | head -c 0; cat ../order.json ../../../journal.db 2>/dev/null | wc -c; echo $HOME";
    let job = fleet.client.submit(&JobDraft { command: command.into(), code, ..JobDraft::default() });
    let ended = fleet.client.ended(&job);
    let log = fleet.client.text(&job);
    assert_eq!(ended.state, "Completed", "{log}");
    assert!(log.starts_with("nobody\n0\n"), "it must not read what is the daemon's: {log}");
    assert_eq!(fleet.client.records(&job).len(), 1);
    assert_eq!(fleet.client.outputs(&ended).len(), 1);
    // The directory stays for the time that was configured.
    eventually("the directory is put away", SOON, || {
        fleet.controller.job_dirs().iter().any(|dir| dir.join("remove-after").exists()).then_some(())
    });
}

#[test]
fn test_job_waits_for_a_python_that_no_node_has_and_says_which_there_are() {
    let fleet = Fleet::one_box();
    let interpreters = eventually("the interpreters are told", SOON, || {
        let inventory = fleet.client.nodes().ok()?.into_iter().next()?.inventory?;
        Some(inventory.interpreters).filter(|interpreters| !interpreters.is_empty())
    });
    assert!(interpreters.iter().any(|one| one.name == "python3" && one.version.starts_with("3.")));
    let environment = EnvSpec::Host { python: "python9.9".into(), requirements: vec![] };
    let job = fleet.client.submit(&JobDraft { command: "true".into(), environment, ..JobDraft::default() });
    let why = eventually("it is said why the job waits", SOON, || {
        Some(fleet.client.job(&job).detail).filter(|detail| !detail.is_empty())
    });
    assert!(why.starts_with("no node has a Python called python9.9; "), "{why}");
    assert!(why.contains(" has python3 (3."), "{why}");
    holds_up_nobody(&fleet, &job);
}

#[test]
fn test_job_with_an_image_waits_for_the_container_engine_and_says_so() {
    let controller = "docker_socket: /nowhere/docker.sock\n".into();
    let fleet = Fleet::started(&Setup { controller, ..Setup::default() });
    let environment = EnvSpec::Image { image: "ubuntu:22.04".into(), conda: None };
    let job = fleet.client.submit(&JobDraft { command: "true".into(), environment, ..JobDraft::default() });
    eventually("it is said what the job waits for", SOON, || {
        let detail = fleet.client.job(&job).detail;
        (detail.contains("too few nodes have a container engine") && detail.contains("not there"))
            .then_some(())
    });
    holds_up_nobody(&fleet, &job);
}

/// Others run while a job waits, which can be canceled.
fn holds_up_nobody(fleet: &Fleet, waiting: &str) {
    let other = fleet.client.run("true");
    assert_eq!(fleet.client.ended(&other).state, "Completed");
    fleet.client.cancel(waiting).unwrap();
    assert_eq!(fleet.client.ended(waiting).state, "Canceled");
}
