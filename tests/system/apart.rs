//! Controller and node as two processes: either may die, stand still or forget, in whatever order.

use std::fs;
use std::time::Duration;

use agent_model::JobDraft;
use agent_model::job::{Limits, OnDisconnect, RetryPolicy};
use agent_proto::v1;
use agent_proto::v1::nodes_client::NodesClient;
use agent_shim::JobDir;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::{SOON, eventually};

use crate::kills::{assert_whole, ticker};

#[test]
fn test_either_process_may_be_killed_in_any_order() {
    let mut fleet = Fleet::of(1);
    let job = ticker(&fleet);
    fleet.client.reached(&job, &["Running"]);
    for order in ["nc", "cn", "nn", "cc", "nc", "cn"] {
        for which in order.chars() {
            let daemon = if which == 'n' { &mut fleet.nodes[0] } else { &mut fleet.controller };
            daemon.kill();
            std::thread::sleep(Duration::from_millis(30));
            if order == "nn" || order == "cc" {
                daemon.spawn();
            }
        }
        if order == "nc" || order == "cn" {
            fleet.controller.spawn();
            fleet.nodes[0].spawn();
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_whole(&fleet, &job);
    // Killed while it has something to tell, and while somebody is to hear it.
    let next = fleet.client.run("echo once >> outputs/starts");
    fleet.controller.kill();
    fleet.nodes[0].kill();
    fleet.nodes[0].spawn();
    fleet.serve();
    let ended = fleet.client.ended(&next);
    assert_eq!((ended.state.as_str(), ended.epoch), ("Completed", 1), "{ended:?}");
    assert_eq!(fleet.client.outputs(&ended), [("outputs/starts".to_owned(), "once\n".to_owned())]);
}

#[test]
fn test_either_process_may_stand_still_for_longer_than_the_other_waits() {
    let fleet = Fleet::of(1);
    let job = fleet.client.run("echo up; while [ ! -e go ]; do sleep 0.02; done; echo done; exit 7");
    fleet.client.wrote(&job, "up\n");
    // The node notices, and comes back by itself; nothing is stopped meanwhile.
    fleet.controller.freeze();
    eventually("the node notices", SOON, || {
        fleet.nodes[0].log().contains("connecting to the controller again").then_some(())
    });
    fleet.controller.thaw();
    eventually("they talk", SOON, || {
        let nodes = fleet.client.nodes().ok()?;
        (nodes[0].liveness == "ready").then_some(())
    });
    fleet.nodes[0].freeze();
    fleet.client.reached(&job, &["NotResponding"]);
    fleet.nodes[0].open_gate("go");
    eventually("the job ends", SOON, || {
        fleet.nodes[0].job_dirs()[0].join("exit.json").exists().then_some(())
    });
    fleet.nodes[0].thaw();
    let ended = fleet.client.ended(&job);
    assert_eq!((ended.epoch, ended.state.as_str()), (1, "Failed"), "{ended:?}");
    assert_eq!(fleet.client.text(&job), "up\ndone\n");
}

#[test]
fn test_job_goes_on_though_the_controller_lost_its_memory() {
    let mut fleet = Fleet::of(1);
    let job = fleet.client.run("echo kept > outputs/x; echo up; sleep 1000");
    fleet.client.reached(&job, &["Running"]);
    fleet.controller.kill();
    fs::remove_dir_all(fleet.controller.state().join("controller")).unwrap();
    fleet.serve();
    fleet.client.reached(&job, &["Running"]);
    fleet.client.cancel(&job).unwrap();
    let ended = fleet.client.ended(&job);
    assert_eq!((ended.state.as_str(), ended.epoch), ("Canceled", 1), "{ended:?}");
    assert_eq!(fleet.client.outputs(&ended), [("outputs/x".to_owned(), "kept\n".to_owned())]);
}

#[test]
fn test_attempt_of_a_node_that_was_declared_lost_is_ended_and_kept() {
    let mut fleet = Fleet::of(1);
    let job = fleet.client.run("echo kept > outputs/x; echo up; sleep 1000");
    fleet.client.reached(&job, &["Running"]);
    let dir = fleet.nodes[0].job_dirs().remove(0);
    fleet.nodes[0].kill();
    fleet.client.reached(&job, &["NotResponding"]);
    let lost = v1::DeclareLostRequest { node: "n0".into() };
    let lost =
        fleet.client.wait(NodesClient::new(fleet.client.channel()).declare_lost(lost)).unwrap().into_inner();
    assert_eq!(lost.jobs, std::slice::from_ref(&job));
    assert_eq!(fleet.client.ended(&job).state, "Failed");
    fleet.nodes[0].spawn();
    eventually("the attempt is put away", SOON, || dir.join("remove-after").exists().then_some(()));
    assert!(dir.join("exit.json").exists());
    assert_eq!(fs::read_to_string(dir.join("job/work/outputs/x")).unwrap(), "kept\n");
    // The next daemon leaves it alone.
    fleet.nodes[0].kill();
    fleet.nodes[0].spawn();
    let next = fleet.client.run("true");
    assert_eq!(fleet.client.ended(&next).state, "Completed");
    assert!(dir.exists());
}

/// What a job wrote down of its starts.
fn starts(dir: &std::path::Path) -> String {
    fs::read_to_string(dir.join("job/work/outputs/starts")).unwrap_or_default()
}

#[test]
fn test_job_that_may_be_replaced_ends_when_nobody_renews_its_lease() {
    for agent_too in [false, true] {
        let setup = Setup { nodes: 1, controller: "lease: 3s\n".into(), ..Setup::default() };
        let mut fleet = Fleet::started(&setup);
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
        let job = fleet.client.submit(&draft);
        fleet.client.wrote(&job, "up\n");
        // For longer than the lease everybody talks, and nothing ends.
        std::thread::sleep(Duration::from_secs(5));
        let dir = fleet.nodes[0].job_dirs().remove(0);
        assert!(!dir.join("exit.json").exists());

        fleet.controller.freeze();
        if agent_too {
            fleet.nodes[0].kill();
        }
        eventually("the job ends", SOON, || dir.join("exit.json").exists().then_some(()));
        let exit = JobDir::new(dir.clone()).read_exit().unwrap().unwrap();
        assert!(exit.lease_over, "{exit:?}");
        fleet.controller.thaw();
        if agent_too {
            fleet.nodes[0].spawn();
        }
        let again = eventually("another attempt runs", SOON, || {
            let dirs = fleet.nodes[0].job_dirs().into_iter();
            dirs.map(|dir| starts(&dir)).find(|starts| starts.contains(".2.0"))
        });
        assert_eq!(again, format!("{job}.2.0\n"));
        fleet.client.cancel(&job).unwrap();
        assert_eq!(fleet.client.ended(&job).state, "Canceled");
    }
}
