//! What becomes of a job.

use std::time::Duration;

use agent_model::job::{Input, Limits, Output};
use agent_model::{EnvSpec, JobDraft};

use crate::harness::{Daemon, eventually, processes_below};

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

#[tokio::test]
async fn test_job_runs_and_all_it_left_is_stored() {
    let daemon = Daemon::started("").await;
    let job = JobDraft {
        name: Some("story".parse().unwrap()),
        command: "python train.py ${{inputs.data}} ${{outputs.table}}".into(),
        code: Some(daemon.push(&[("train.py", SCRIPT)]).await),
        inputs: [("data".to_owned(), Input::Folder(daemon.push(&[("d.txt", "rows")]).await))].into(),
        outputs: [("table".to_owned(), Output::Folder)].into(),
        ..JobDraft::default()
    };
    let name = daemon.submit(job).await;
    let ended = daemon.ended(&name).await;
    assert_eq!(daemon.log(&name, "job").await, "data: rows\nto stderr\nstory True ''\n");
    assert_eq!(ended.state, "Completed", "{ended:?}");
    assert_eq!(daemon.records(&name).await, [r#"{"metric": "loss", "value": 0.5, "step": 1}"#]);
    let kept =
        [("logs/x.log", "log"), ("named-outputs/table/t.csv", "table"), ("outputs/model.txt", "weights")];
    let mut outputs = daemon.outputs(&ended).await;
    outputs.sort();
    assert_eq!(outputs, kept.map(|(path, text)| (path.to_owned(), text.to_owned())));
    eventually("the job directory goes", async || daemon.job_dirs().is_empty().then_some(())).await;
}

#[tokio::test]
async fn test_failing_script_is_told_with_its_last_words() {
    let daemon = Daemon::started("").await;
    let job =
        daemon.run("echo so far; echo 'ValueError: too few rows' >&2; echo kept > outputs/x; exit 3").await;
    let ended = daemon.ended(&job).await;
    assert_eq!(ended.state, "Failed");
    assert_eq!(daemon.outputs(&ended).await.len(), 1, "outputs are kept after a failure");
    let outcome = ended.outcome.unwrap();
    assert_eq!(outcome.exit.unwrap().kind, Some(agent_proto::v1::exit::Kind::Code(3)));
    let fault = outcome.fault.unwrap();
    assert_eq!((fault.code.as_str(), fault.what.as_str()), ("RUN-101", "the command returned 3"));
    assert_eq!(fault.why, ["so far", "ValueError: too few rows"]);
    assert!(!fault.fix.is_empty());
}

#[tokio::test]
async fn test_what_keeps_a_job_from_starting_is_told() {
    let daemon = Daemon::started("").await;
    for (environment, command, code) in [
        (EnvSpec::host(), "no-such-command", "RUN-102"),
        (EnvSpec::Host { python: "/nowhere/python9.9".into(), requirements: vec![] }, "true", "ENV-101"),
        (EnvSpec::Named { reference: "azureml:none:1".into() }, "true", "ENV-110"),
    ] {
        let draft = JobDraft { command: command.into(), environment, ..JobDraft::default() };
        let job = daemon.submit(draft).await;
        let fault = daemon.ended(&job).await.outcome.unwrap().fault.unwrap();
        assert_eq!(fault.code, code, "{fault:?}");
    }
}

#[tokio::test]
async fn test_jobs_wait_while_the_disk_is_too_full_and_say_so() {
    let mut daemon = Daemon::started("disk_reserve: 900TB").await;
    let job = daemon.run("echo at last").await;
    let why = eventually("it is said why the job waits", async || {
        let job = daemon.job(&job).await?;
        assert_eq!(job.state, "Queued", "{job:?}");
        job.detail.contains("fails the check `disk`").then_some(job.detail)
    })
    .await;
    assert!(why.contains("free for") && why.contains("NODE-101"), "{why}");
    assert_eq!(daemon.nodes().await.unwrap()[0].liveness, "degraded");
    daemon.kill();
    daemon.set("AGENTD_DISK_RESERVE", "0");
    daemon.start().await;
    assert_eq!(daemon.ended(&job).await.state, "Completed");
}

#[tokio::test]
async fn test_cancel_ends_the_whole_family_and_keeps_outputs() {
    let daemon = Daemon::started("").await;
    let limits = Limits { grace: Some(Duration::from_secs(1)), ..Limits::default() };
    let command = "echo kept > outputs/x; (trap '' TERM; setsid sleep 1000 & sleep 1000) & echo up; wait";
    let job = daemon.submit(JobDraft { command: command.into(), limits, ..JobDraft::default() }).await;
    eventually("the job is up", async || (daemon.log(&job, "job").await == "up\n").then_some(())).await;
    daemon.cancel(&job).await;
    let ended = daemon.ended(&job).await;
    assert_eq!(ended.state, "Canceled");
    assert_eq!(daemon.outputs(&ended).await.len(), 1);
    eventually(
        "nothing but the daemon is left, and what it asked of interpreters at its start",
        async || {
            let mut left =
                processes_below(&daemon.state()).into_iter().filter(|pid| *pid != daemon.process());
            left.next().is_none().then_some(())
        },
    )
    .await;
}

#[tokio::test]
async fn test_time_limit_ends_a_job() {
    let daemon = Daemon::started("").await;
    let limits = Limits {
        timeout: Some(Duration::from_millis(300)),
        grace: Some(Duration::from_millis(200)),
        ..Limits::default()
    };
    let job = daemon.submit(JobDraft { command: "sleep 1000".into(), limits, ..JobDraft::default() }).await;
    let ended = daemon.ended(&job).await;
    assert_eq!(
        (ended.state.as_str(), ended.outcome.unwrap().fault.unwrap().code.as_str()),
        ("Failed", "RUN-105")
    );
}

#[tokio::test]
async fn test_log_of_many_megabytes_arrives_whole() {
    let daemon = Daemon::started("").await;
    let script = "import sys\nfor n in range(400000): sys.stdout.write(f'{n:049d}\\n')\n";
    let code = Some(daemon.push(&[("t.py", script)]).await);
    let job = daemon.submit(JobDraft { command: "python t.py".into(), code, ..JobDraft::default() }).await;
    assert_eq!(daemon.ended(&job).await.state, "Completed");
    let log = daemon.log(&job, "job").await;
    assert_eq!(log.len(), 400_000 * 50);
    assert!(
        log.lines().enumerate().all(|(number, line)| line.parse() == Ok(number)),
        "lines are lost or moved"
    );
}

#[tokio::test]
async fn test_second_job_of_an_environment_finds_it_ready() {
    let daemon = Daemon::started("").await;
    let pip = || EnvSpec::Pip { python: "python3".into(), requirements: Vec::new() };
    let draft = || JobDraft {
        command: "python -c 'import sys; print(sys.prefix)'".into(),
        environment: pip(),
        ..JobDraft::default()
    };
    let mut prefixes = Vec::new();
    for how in [" built in ", " reused"] {
        let job = daemon.submit(draft()).await;
        let ended = daemon.ended(&job).await;
        assert_eq!(ended.state, "Completed", "{ended:?}");
        prefixes.push(daemon.log(&job, "job").await);
        let history = agent_proto::v1::jobs_client::JobsClient::new(daemon.channel())
            .history(agent_proto::v1::GetJobRequest { job })
            .await
            .unwrap()
            .into_inner();
        assert!(history.events.iter().any(|event| event.text.contains(how)), "{how}: {history:?}");
    }
    assert_eq!(prefixes[0], prefixes[1]);
    assert!(prefixes[0].starts_with(&daemon.state().join("envs").display().to_string()), "{}", prefixes[0]);
}

#[tokio::test]
async fn test_jobs_run_as_the_user_that_was_configured() {
    let mut daemon = Daemon::new("job_user: nobody\nkeep_jobs: 1h\n");
    if !daemon.opens_to_everybody() {
        return; // only root may start processes of others
    }
    daemon.start().await;
    let code = Some(daemon.push(&[("own.txt", "mine")]).await);
    let command = "id -un; echo more >> own.txt; echo x > outputs/x; echo '{\"metric\":\"m\",\"value\":1}' >> $AGENTD_METRICS; \
                   ls .. 2>&1 | head -c 0; cat ../order.json ../../../journal.db 2>/dev/null | wc -c; echo $HOME";
    let job = daemon.submit(JobDraft { command: command.into(), code, ..JobDraft::default() }).await;
    let ended = daemon.ended(&job).await;
    let log = daemon.log(&job, "job").await;
    assert_eq!(ended.state, "Completed", "{log}");
    assert!(log.starts_with("nobody\n0\n"), "it must not read what is the daemon's: {log}");
    assert_eq!(daemon.records(&job).await.len(), 1);
    assert_eq!(daemon.outputs(&ended).await.len(), 1);
    // The directory stays for the time that was configured.
    eventually("the directory is put away", async || {
        daemon.job_dirs().iter().any(|dir| dir.join("remove-after").exists()).then_some(())
    })
    .await;
}
