//! The daemon may die at any instant; the job must not notice, and nothing may be lost or done twice.

use std::fs;
use std::time::Duration;

use agent_model::JobDraft;
use agent_model::job::{Limits, OnDisconnect, RetryPolicy};
use agent_proto::v1;
use agent_proto::v1::nodes_client::NodesClient;
use rustix::process::Signal;

use crate::harness::{Daemon, eventually};

const TICKER: &str = r#"
import json, os, sys, time
metrics = open(os.environ["AGENTD_METRICS"], "a", buffering=1)
open("outputs/starts", "a").write("started\n")
for number in range(1000):
    print("line", number)
    if number % 10 == 0:
        metrics.write(json.dumps({"metric": "n", "value": number}) + "\n")
    time.sleep(0.002)
sys.exit(7)
"#;

fn ticked() -> String {
    (0..1000).map(|number| format!("line {number}\n")).collect()
}

async fn ticker(daemon: &Daemon) -> String {
    let code = Some(daemon.push(&[("t.py", TICKER)]).await);
    daemon.submit(JobDraft { command: "python t.py".into(), code, ..JobDraft::default() }).await
}

/// The job ran once, to its end, and everything it said is there once.
async fn assert_whole(daemon: &Daemon, job: &str) {
    let ended = daemon.ended(job).await;
    assert_eq!(ended.epoch, 1, "it was tried again: {ended:?}");
    assert!(daemon.log(job, "job").await == ticked(), "the log differs");
    assert_eq!(daemon.records(job).await.len(), 100);
    let exit = ended.outcome.as_ref().and_then(|outcome| outcome.exit).and_then(|exit| exit.kind);
    assert_eq!(exit, Some(agent_proto::v1::exit::Kind::Code(7)), "{ended:?}");
    assert_eq!(daemon.outputs(&ended).await, [("outputs/starts".to_owned(), "started\n".to_owned())]);
}

#[tokio::test]
async fn test_kills_while_the_job_runs_change_nothing() {
    let mut daemon = Daemon::started("").await;
    let job = ticker(&daemon).await;
    for round in 0..8 {
        tokio::time::sleep(Duration::from_millis(40 * (round % 4))).await;
        daemon.kill();
        daemon.start().await;
    }
    assert_whole(&daemon, &job).await;
}

#[tokio::test]
async fn test_kills_in_every_step_start_the_command_once() {
    // A kill soon after the submit meets a replica in each of its steps, in some round or other.
    let mut daemon = Daemon::started("").await;
    for delay in [0, 2, 4, 6, 8, 10, 13, 16, 20, 25, 35, 50] {
        let job = daemon.run("echo once >> outputs/starts; echo line; exit 7").await;
        tokio::time::sleep(Duration::from_millis(delay)).await;
        daemon.kill();
        daemon.start().await;
        let ended = daemon.ended(&job).await;
        assert_eq!((ended.epoch, ended.state.as_str()), (1, "Failed"), "after {delay} ms: {ended:?}");
        assert_eq!(daemon.log(&job, "job").await, "line\n", "after {delay} ms");
        let outputs = daemon.outputs(&ended).await;
        assert_eq!(outputs, [("outputs/starts".to_owned(), "once\n".to_owned())], "after {delay} ms");
    }
}

#[tokio::test]
async fn test_job_that_ends_while_the_daemon_is_away_is_reported_in_full() {
    let mut daemon = Daemon::started("").await;
    let job = ticker(&daemon).await;
    daemon.reached(&job, &["Running"]).await;
    daemon.kill();
    eventually("the job ends", async || {
        daemon.job_dirs().iter().any(|dir| dir.join("exit.json").exists()).then_some(())
    })
    .await;
    daemon.start().await;
    assert_whole(&daemon, &job).await;
}

#[tokio::test]
async fn test_stop_leaves_the_job_running() {
    let mut daemon = Daemon::started("").await;
    let job = ticker(&daemon).await;
    daemon.reached(&job, &["Running"]).await;
    assert!(daemon.stop().await.success());
    assert!(!daemon.socket().exists());
    daemon.start().await;
    assert_whole(&daemon, &job).await;
}

#[tokio::test]
async fn test_damaged_journal_costs_nothing() {
    let mut daemon = Daemon::started("").await;
    let job = ticker(&daemon).await;
    daemon.reached(&job, &["Running"]).await;
    daemon.kill();
    for (file, bytes) in [("journal.db", vec![0xa5; 8192]), ("journal.db-wal", vec![])] {
        fs::write(daemon.state().join(file), bytes).unwrap();
    }
    daemon.start().await;
    eventually("the journal is set aside", async || {
        daemon.state().join("journal.db.damaged-1").exists().then_some(())
    })
    .await;
    assert_whole(&daemon, &job).await;
}

#[tokio::test]
async fn test_cancel_that_comes_before_a_kill_still_counts() {
    let mut daemon = Daemon::started("").await;
    let script = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye')))\nprint('up')\nsignal.pause()\n";
    let code = Some(daemon.push(&[("t.py", script)]).await);
    let job = daemon.submit(JobDraft { command: "python t.py".into(), code, ..JobDraft::default() }).await;
    eventually("the job is up", async || (daemon.log(&job, "job").await == "up\n").then_some(())).await;
    daemon.cancel(&job).await;
    daemon.kill();
    daemon.start().await;
    assert_eq!(daemon.ended(&job).await.state, "Canceled");
    assert_eq!(daemon.log(&job, "job").await, "up\nbye\n");
}

#[tokio::test]
async fn test_lost_supervisor_is_told_and_leaves_nothing() {
    let daemon = Daemon::started("").await;
    let job = daemon.run("echo up; sleep 1000").await;
    eventually("the job is up", async || (daemon.log(&job, "job").await == "up\n").then_some(())).await;
    let is_shim = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "agent-shim")
    };
    let shim = crate::harness::processes_below(&daemon.state()).into_iter().find(is_shim).unwrap();
    crate::harness::signal(shim, rustix::process::Signal::KILL);
    let ended = daemon.ended(&job).await;
    assert_eq!(
        (ended.state.as_str(), ended.outcome.unwrap().fault.unwrap().code.as_str()),
        ("Failed", "RUN-107")
    );
    assert_eq!(daemon.log(&job, "job").await, "up\n");
}

const REPORTER: &str = r#"
import json, os, pathlib, time, urllib.request
print("up")
while not pathlib.Path("go").exists(): time.sleep(0.02)
url = os.environ["MLFLOW_TRACKING_URI"] + "/api/2.0/mlflow/runs/log-metric"
body = {"run_id": os.environ["MLFLOW_RUN_ID"], "key": "loss", "value": 0.5, "timestamp": 1, "step": 0}
headers = {"Authorization": "Bearer " + os.environ["MLFLOW_TRACKING_TOKEN"], "Content-Type": "application/json"}
while True:  # as the client does: again when nobody listens, never after a refusal
    try:
        print(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).status)
    except urllib.error.HTTPError as refused:
        print(refused.code)
    except OSError:
        time.sleep(0.005)
        continue
    break
"#;

#[tokio::test]
async fn test_tracking_endpoint_is_where_it_was_after_a_restart() {
    let mut daemon = Daemon::started("").await;
    let code = Some(daemon.push(&[("t.py", REPORTER)]).await);
    let job = daemon.submit(JobDraft { command: "python t.py".into(), code, ..JobDraft::default() }).await;
    eventually("the job is up", async || (daemon.log(&job, "job").await == "up\n").then_some(())).await;
    daemon.kill();
    daemon.start().await;
    fs::write(daemon.job_dirs()[0].join("job/work/go"), "").unwrap();
    assert_eq!(daemon.ended(&job).await.state, "Completed", "{}", daemon.log(&job, "job").await);
    assert_eq!(daemon.log(&job, "job").await, "up\n200\n");
    assert_eq!(daemon.records(&job).await.len(), 1);
}

#[tokio::test]
async fn test_node_and_controller_as_two_processes() {
    let mut controller = Daemon::started("roles: controller").await;
    let mut node = Daemon::new(&format!(
        "roles: node\nnode_name: far\ncontroller: unix:{}\n",
        controller.socket().display()
    ));
    node.spawn();
    let job = ticker(&controller).await;
    controller.reached(&job, &["Running"]).await;
    assert_eq!(controller.nodes().await.unwrap()[0].node, "far");
    // Either side may go away for a while.
    controller.kill();
    tokio::time::sleep(Duration::from_millis(100)).await;
    controller.start().await;
    node.kill();
    node.spawn();
    assert_whole(&controller, &job).await;
    assert_eq!(node.nodes().await.unwrap()[0].node, "far", "a node tells of itself");
}

/// A controller and a node of its own.
async fn pair() -> (Daemon, Daemon) {
    pair_of("roles: controller").await
}

async fn pair_of(controller: &str) -> (Daemon, Daemon) {
    let controller = Daemon::started(controller).await;
    let config = format!("roles: node\nnode_name: far\ncontroller: unix:{}\n", controller.socket().display());
    let mut node = Daemon::new(&config);
    node.spawn();
    (controller, node)
}

#[tokio::test]
async fn test_either_process_may_be_killed_in_any_order() {
    let (mut controller, mut node) = pair().await;
    let job = ticker(&controller).await;
    controller.reached(&job, &["Running"]).await;
    for order in ["nc", "cn", "nn", "cc", "nc", "cn"] {
        for which in order.chars() {
            if which == 'n' {
                node.kill()
            } else {
                controller.kill()
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
            if order == "nc" || order == "cn" {
                continue;
            }
            if which == 'n' { node.spawn() } else { controller.spawn() }
        }
        if order == "nc" || order == "cn" {
            controller.spawn();
            node.spawn();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_whole(&controller, &job).await;
    // Killed while it has something to tell, and while somebody is to hear it.
    let next = controller.run("echo once >> outputs/starts").await;
    controller.kill();
    node.kill();
    node.spawn();
    controller.start().await;
    let ended = controller.ended(&next).await;
    assert_eq!((ended.state.as_str(), ended.epoch), ("Completed", 1), "{ended:?}");
    assert_eq!(controller.outputs(&ended).await, [("outputs/starts".to_owned(), "once\n".to_owned())]);
}

#[tokio::test]
async fn test_either_process_may_stand_still_for_longer_than_the_other_waits() {
    let (controller, node) = pair().await;
    let job = controller.run("echo up; while [ ! -e go ]; do sleep 0.02; done; echo done; exit 7").await;
    eventually("the job is up", async || (controller.log(&job, "job").await == "up\n").then_some(())).await;
    // The node notices, and comes back by itself; nothing is stopped meanwhile.
    controller.signal(Signal::STOP);
    eventually("the node notices", async || {
        node.said().contains("connecting to the controller again").then_some(())
    })
    .await;
    controller.signal(Signal::CONT);
    eventually("they talk", async || {
        let nodes = controller.nodes().await.ok()?;
        (nodes[0].liveness == "ready").then_some(())
    })
    .await;
    node.signal(Signal::STOP);
    controller.reached(&job, &["NotResponding"]).await;
    fs::write(node.job_dirs()[0].join("job/work/go"), "").unwrap();
    eventually("the job ends", async || node.job_dirs()[0].join("exit.json").exists().then_some(())).await;
    node.signal(Signal::CONT);
    let ended = controller.ended(&job).await;
    assert_eq!((ended.epoch, ended.state.as_str()), (1, "Failed"), "{ended:?}");
    assert_eq!(controller.log(&job, "job").await, "up\ndone\n");
}

#[tokio::test]
async fn test_job_goes_on_though_the_controller_lost_its_memory() {
    let (mut controller, _node) = pair().await;
    let job = controller.run("echo kept > outputs/x; echo up; sleep 1000").await;
    controller.reached(&job, &["Running"]).await;
    controller.kill();
    fs::remove_dir_all(controller.state().join("controller")).unwrap();
    controller.start().await;
    controller.reached(&job, &["Running"]).await;
    controller.cancel(&job).await;
    let ended = controller.ended(&job).await;
    assert_eq!((ended.state.as_str(), ended.epoch), ("Canceled", 1), "{ended:?}");
    assert_eq!(controller.outputs(&ended).await, [("outputs/x".to_owned(), "kept\n".to_owned())]);
}

#[tokio::test]
async fn test_attempt_of_a_node_that_was_declared_lost_is_ended_and_kept() {
    let (controller, mut node) = pair().await;
    let job = controller.run("echo kept > outputs/x; echo up; sleep 1000").await;
    controller.reached(&job, &["Running"]).await;
    let dir = node.job_dirs().remove(0);
    node.kill();
    controller.reached(&job, &["NotResponding"]).await;
    let lost = v1::DeclareLostRequest { node: "far".into() };
    let lost = NodesClient::new(controller.channel()).declare_lost(lost).await.unwrap().into_inner();
    assert_eq!(lost.jobs, std::slice::from_ref(&job));
    assert_eq!(controller.ended(&job).await.state, "Failed");
    node.spawn();
    eventually("the attempt is put away", async || dir.join("remove-after").exists().then_some(())).await;
    assert!(dir.join("exit.json").exists());
    assert_eq!(fs::read_to_string(dir.join("job/work/outputs/x")).unwrap(), "kept\n");
    // The next daemon leaves it alone.
    node.kill();
    node.spawn();
    let next = controller.run("true").await;
    assert_eq!(controller.ended(&next).await.state, "Completed");
    assert!(dir.exists());
}

/// What a job wrote down of its starts.
fn starts(dir: &std::path::Path) -> String {
    fs::read_to_string(dir.join("job/work/outputs/starts")).unwrap_or_default()
}

#[tokio::test]
async fn test_job_that_may_be_replaced_ends_when_nobody_renews_its_lease() {
    for agent_too in [false, true] {
        let (controller, mut node) = pair_of("roles: controller\nlease: 3s").await;
        let limits = Limits {
            on_disconnect: OnDisconnect::Replace,
            grace: Some(Duration::from_secs(1)),
            ..Limits::default()
        };
        let draft = JobDraft {
            command: "echo $AGENTD_REPLICA >> outputs/starts; echo up; sleep 1000".into(),
            limits,
            retry: RetryPolicy { max_attempts: 3, backoff: Duration::ZERO },
            ..JobDraft::default()
        };
        let job = controller.submit(draft).await;
        eventually("the job is up", async || (controller.log(&job, "job").await == "up\n").then_some(()))
            .await;
        // For longer than the lease everybody talks, and nothing ends.
        tokio::time::sleep(Duration::from_secs(5)).await;
        let dir = node.job_dirs().remove(0);
        assert!(!dir.join("exit.json").exists());

        controller.signal(Signal::STOP);
        if agent_too {
            node.kill();
        }
        eventually("the job ends", async || dir.join("exit.json").exists().then_some(())).await;
        let exit = fs::read_to_string(dir.join("exit.json")).unwrap();
        assert!(exit.contains("\"lease_over\":true") || exit.contains("\"lease_over\": true"), "{exit}");
        controller.signal(Signal::CONT);
        if agent_too {
            node.spawn();
        }
        let again = eventually("another attempt runs", async || {
            let dirs = node.job_dirs().into_iter();
            dirs.map(|dir| starts(&dir)).find(|starts| starts.contains(".2.0"))
        })
        .await;
        assert_eq!(again, format!("{job}.2.0\n"));
        controller.cancel(&job).await;
        assert_eq!(controller.ended(&job).await.state, "Canceled");
    }
}
