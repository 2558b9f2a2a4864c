//! The daemon looks after itself: what panics is started again or told, and its service manager is served.

use agent_model::failpoint;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::manager::ServiceManager;
use agent_tests::{SOON, eventually};

#[test]
fn test_panic_of_a_task_it_needs_stops_the_daemon_and_no_job() {
    let mut fleet = Fleet::one_box();
    let job = fleet.client.run("echo up; while [ ! -e go ]; do sleep 0.02; done; echo done");
    fleet.client.wrote(&job, "up\n");
    assert!(fleet.controller.stop().success());
    fleet.controller.set(failpoint::VARIABLE, "node.sync.open=panic");
    fleet.controller.spawn();
    assert_eq!(fleet.controller.exited().code(), Some(70), "{}", fleet.controller.log());
    assert!(fleet.controller.log().contains("Sync ended unexpectedly: panic: failpoint node.sync.open"));
    fleet.controller.set(failpoint::VARIABLE, "");
    fleet.serve();
    fleet.controller.open_gate("go");
    assert_eq!(fleet.client.ended(&job).state, "Completed");
    assert_eq!(fleet.client.text(&job), "up\ndone\n");
}

#[test]
fn test_panics_of_upkeep_and_runners_are_got_over() {
    let mut fleet = Fleet::new(&Setup { controller: "keep_jobs: 1s\n".into(), ..Setup::default() });
    // The runner dies at its third record; upkeep and retention at their first looks.
    let plan = "node.journal.enter=panic=3,node.retention.sweep=panic=1,node.upkeep.look=panic=1";
    fleet.controller.set(failpoint::VARIABLE, plan);
    fleet.serve();
    let job = fleet.client.run("echo once >> outputs/starts");
    let ended = fleet.client.ended(&job);
    assert_eq!((ended.state.as_str(), ended.epoch), ("Completed", 1), "{ended:?}");
    assert_eq!(fleet.client.outputs(&ended), [("outputs/starts".to_owned(), "once\n".to_owned())]);
    eventually("the retention is swept", SOON, || fleet.controller.job_dirs().is_empty().then_some(()));
    eventually("upkeep dies and lives", SOON, || {
        fleet.controller.log().contains("name=\"upkeep\"").then_some(())
    });
    for said in ["restarting task", "restarting runner of replica", "failpoint node.journal.enter"] {
        assert!(fleet.controller.log().contains(said), "{said}");
    }
}

#[test]
fn test_full_disk_while_a_job_is_accepted_costs_an_attempt_and_no_more() {
    let mut fleet = Fleet::new(&Setup::default());
    // Whoever journals finds no room, the whole time, except for the last steps.
    fleet.controller.set(failpoint::VARIABLE, "node.journal.enter=errno:28");
    fleet.serve();
    let job = fleet.client.run("echo never >> outputs/starts");
    let ended = fleet.client.ended(&job);
    assert_eq!(ended.state, "Failed", "{ended:?}");
    assert_eq!(ended.outcome.as_ref().unwrap().fault.as_ref().unwrap().code, "NODE-101", "{ended:?}");
    assert!(fleet.client.outputs(&ended).is_empty(), "nothing starts that is not written down");
    eventually("nothing is left", SOON, || fleet.controller.job_dirs().is_empty().then_some(()));
}

#[test]
fn test_log_that_cannot_be_read_for_want_of_descriptors_arrives_later() {
    let mut fleet = Fleet::new(&Setup::default());
    // EMFILE, once.
    fleet.controller.set(failpoint::VARIABLE, "node.log.read=errno:24=1");
    fleet.serve();
    let job = fleet.client.run("echo kept");
    let ended = fleet.client.ended(&job);
    assert_eq!(ended.state, "Completed", "{ended:?}");
    assert_eq!(fleet.client.text(&job), "kept\n");
    assert!(fleet.controller.log().contains("paused shipping of file"), "{}", fleet.controller.log());
}

#[test]
fn test_running_job_ends_well_though_nothing_can_be_journaled() {
    let mut fleet = Fleet::one_box();
    let job =
        fleet.client.run("echo up; while [ ! -e go ]; do sleep 0.02; done; echo kept > outputs/x; exit 3");
    fleet.client.wrote(&job, "up\n");
    fleet.controller.kill();
    fleet.controller.set(failpoint::VARIABLE, "node.journal.enter=errno:28,node.journal.done=errno:28");
    fleet.serve();
    fleet.controller.open_gate("go");
    let ended = fleet.client.ended(&job);
    assert_eq!((ended.state.as_str(), ended.epoch), ("Failed", 1), "{ended:?}");
    assert_eq!(ended.outcome.as_ref().unwrap().fault.as_ref().unwrap().code, "RUN-101");
    assert_eq!(fleet.client.outputs(&ended), [("outputs/x".to_owned(), "kept\n".to_owned())]);
    // The next life knows an older record, tells the outcome again, and nothing comes of it.
    fleet.controller.kill();
    fleet.controller.set(failpoint::VARIABLE, "");
    fleet.serve();
    eventually("nothing is left", SOON, || fleet.controller.job_dirs().is_empty().then_some(()));
    assert_eq!(fleet.client.ended(&job).epoch, 1);
}

#[test]
fn test_service_manager_hears_of_the_start_the_life_and_the_stop() {
    let mut fleet = Fleet::new(&Setup::default());
    let manager = ServiceManager::of(&mut fleet.controller);
    fleet.serve();
    let mut words = Vec::new();
    eventually("the watchdog is fed", SOON, || {
        words.extend(manager.heard());
        (words.iter().filter(|word| *word == "WATCHDOG=1").count() > 3).then_some(())
    });
    let ready = words.iter().find(|word| word.starts_with("READY=1\n")).unwrap();
    assert!(ready.contains("STATUS=serving at "), "{ready}");
    manager.heard();
    assert!(fleet.controller.stop().success());
    assert!(manager.heard().iter().any(|word| word.starts_with("STOPPING=1\n")));
    for phase in ["no new orders are taken", "saying a last word", "closing the store"] {
        assert!(fleet.controller.log().contains(phase), "{phase}");
    }
}

#[test]
fn test_watchdog_starves_when_a_loop_hangs_and_not_when_nobody_answers() {
    // Nodes without their controller.
    let mut fleet = Fleet::new(&Setup { nodes: 2, ..Setup::default() });
    let [fed, starved] = [0, 1].map(|index| ServiceManager::of(&mut fleet.nodes[index]));
    fleet.nodes[1].set(failpoint::VARIABLE, "node.sync.open=delay:600000@5");
    fleet.nodes.iter_mut().for_each(agent_tests::fleet::Daemon::spawn);
    let mut since = 0;
    eventually("one of them starves while the other is fed", SOON, || {
        let (others, own) = (fed.heard().len(), starved.heard().len());
        since = if own > 0 { 0 } else { since + others };
        (since > 20).then_some(())
    });
    assert!(!fleet.nodes[0].log().contains("the watchdog is not fed"));
    assert!(fleet.nodes[0].stop().success());
}
