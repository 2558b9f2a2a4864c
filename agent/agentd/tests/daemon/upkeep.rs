//! The daemon looks after itself: what panics is started again or told, and its service manager is served.

use std::fs;
use std::os::unix::net::UnixDatagram;

use agent_model::failpoint;
use rustix::process::Signal;

use crate::harness::{Daemon, eventually};

#[tokio::test]
async fn test_panic_of_a_task_it_needs_stops_the_daemon_and_no_job() {
    let mut daemon = Daemon::started("").await;
    let job = daemon.run("echo up; while [ ! -e go ]; do sleep 0.02; done; echo done").await;
    eventually("the job is up", async || (daemon.log(&job, "job").await == "up\n").then_some(())).await;
    assert!(daemon.stop().await.success());
    daemon.set(failpoint::VARIABLE, "node.sync.open=panic");
    daemon.spawn();
    assert_eq!(daemon.exited().await.code(), Some(70), "{}", daemon.said());
    assert!(daemon.said().contains("Sync ended unexpectedly: panic: failpoint node.sync.open"));
    daemon.set(failpoint::VARIABLE, "");
    daemon.start().await;
    fs::write(daemon.job_dirs()[0].join("job/work/go"), "").unwrap();
    assert_eq!(daemon.ended(&job).await.state, "Completed");
    assert_eq!(daemon.log(&job, "job").await, "up\ndone\n");
}

#[tokio::test]
async fn test_panics_of_upkeep_and_runners_are_got_over() {
    let mut daemon = Daemon::new("keep_jobs: 1s");
    // The runner dies at its third record; upkeep and retention at their first looks.
    let plan = "node.journal.enter=panic=3,node.retention.sweep=panic=1,node.upkeep.look=panic=1";
    daemon.set(failpoint::VARIABLE, plan);
    daemon.start().await;
    let job = daemon.run("echo once >> outputs/starts").await;
    let ended = daemon.ended(&job).await;
    assert_eq!((ended.state.as_str(), ended.epoch), ("Completed", 1), "{ended:?}");
    assert_eq!(daemon.outputs(&ended).await, [("outputs/starts".to_owned(), "once\n".to_owned())]);
    eventually("the retention is swept", async || daemon.job_dirs().is_empty().then_some(())).await;
    eventually("upkeep dies and lives", async || daemon.said().contains("name=\"upkeep\"").then_some(()))
        .await;
    for said in ["restarting task", "restarting runner of replica", "failpoint node.journal.enter"] {
        assert!(daemon.said().contains(said), "{said}");
    }
}

#[tokio::test]
async fn test_full_disk_while_a_job_is_accepted_costs_an_attempt_and_no_more() {
    let mut daemon = Daemon::new("");
    // Whoever journals finds no room, the whole time, except for the last steps.
    daemon.set(failpoint::VARIABLE, "node.journal.enter=errno:28");
    daemon.start().await;
    let job = daemon.run("echo never >> outputs/starts").await;
    let ended = daemon.ended(&job).await;
    assert_eq!(ended.state, "Failed", "{ended:?}");
    assert_eq!(ended.outcome.as_ref().unwrap().fault.as_ref().unwrap().code, "NODE-101", "{ended:?}");
    assert!(daemon.outputs(&ended).await.is_empty(), "nothing starts that is not written down");
    eventually("nothing is left", async || daemon.job_dirs().is_empty().then_some(())).await;
}

#[tokio::test]
async fn test_log_that_cannot_be_read_for_want_of_descriptors_arrives_later() {
    let mut daemon = Daemon::new("");
    // EMFILE, once.
    daemon.set(failpoint::VARIABLE, "node.log.read=errno:24=1");
    daemon.start().await;
    let job = daemon.run("echo kept").await;
    let ended = daemon.ended(&job).await;
    assert_eq!(ended.state, "Completed", "{ended:?}");
    assert_eq!(daemon.log(&job, "job").await, "kept\n");
    assert!(daemon.said().contains("paused shipping of file"), "{}", daemon.said());
}

#[tokio::test]
async fn test_running_job_ends_well_though_nothing_can_be_journaled() {
    let mut daemon = Daemon::started("").await;
    let job =
        daemon.run("echo up; while [ ! -e go ]; do sleep 0.02; done; echo kept > outputs/x; exit 3").await;
    eventually("the job is up", async || (daemon.log(&job, "job").await == "up\n").then_some(())).await;
    daemon.kill();
    daemon.set(failpoint::VARIABLE, "node.journal.enter=errno:28,node.journal.done=errno:28");
    daemon.start().await;
    fs::write(daemon.job_dirs()[0].join("job/work/go"), "").unwrap();
    let ended = daemon.ended(&job).await;
    assert_eq!((ended.state.as_str(), ended.epoch), ("Failed", 1), "{ended:?}");
    assert_eq!(ended.outcome.as_ref().unwrap().fault.as_ref().unwrap().code, "RUN-101");
    assert_eq!(daemon.outputs(&ended).await, [("outputs/x".to_owned(), "kept\n".to_owned())]);
    // The next life knows an older record, tells the outcome again, and nothing comes of it.
    daemon.kill();
    daemon.set(failpoint::VARIABLE, "");
    daemon.start().await;
    eventually("nothing is left", async || daemon.job_dirs().is_empty().then_some(())).await;
    assert_eq!(daemon.ended(&job).await.epoch, 1);
}

/// A service manager's end of the socket.
fn manager(daemon: &mut Daemon) -> impl FnMut() -> Vec<String> + use<> {
    let path = daemon.beside("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_nonblocking(true).unwrap();
    daemon.set("NOTIFY_SOCKET", &path.display().to_string());
    daemon.set("WATCHDOG_USEC", "2000000");
    move || {
        let mut buffer = [0; 512];
        let next =
            || socket.recv(&mut buffer).ok().map(|n| String::from_utf8_lossy(&buffer[..n]).into_owned());
        std::iter::from_fn(next).collect()
    }
}

#[tokio::test]
async fn test_service_manager_hears_of_the_start_the_life_and_the_stop() {
    let mut daemon = Daemon::new("");
    let mut heard = manager(&mut daemon);
    daemon.start().await;
    let mut words = Vec::new();
    eventually("the watchdog is fed", async || {
        words.extend(heard());
        (words.iter().filter(|word| *word == "WATCHDOG=1").count() > 3).then_some(())
    })
    .await;
    let ready = words.iter().find(|word| word.starts_with("READY=1\n")).unwrap();
    assert!(ready.contains("STATUS=serving at "), "{ready}");
    heard();
    assert!(daemon.stop().await.success());
    assert!(heard().iter().any(|word| word.starts_with("STOPPING=1\n")));
    for phase in ["no new orders are taken", "saying a last word", "closing the store"] {
        assert!(daemon.said().contains(phase), "{phase}");
    }
}

#[tokio::test]
async fn test_watchdog_starves_when_a_loop_hangs_and_not_when_nobody_answers() {
    // A node alone, whose controller never answers at all.
    let mut lonely = Daemon::new("roles: node\ncontroller: unix:/nowhere/agentd.sock");
    let mut fed = manager(&mut lonely);
    lonely.spawn();
    let mut hangs = Daemon::new("roles: node\ncontroller: unix:/nowhere/agentd.sock");
    let mut starved = manager(&mut hangs);
    hangs.set(failpoint::VARIABLE, "node.sync.open=delay:600000@5");
    hangs.spawn();
    let mut since = 0;
    eventually("one of them starves while the other is fed", async || {
        let (others, own) = (fed().len(), starved().len());
        since = if own > 0 { 0 } else { since + others };
        (since > 20).then_some(())
    })
    .await;
    assert!(!lonely.said().contains("the watchdog is not fed"));
    lonely.signal(Signal::TERM);
    assert!(lonely.exited().await.success());
}
