//! A job that goes on with its outputs: the example, killed five times, each time in another way.

use std::process::Command;
use std::time::Duration;

use agent_tests::fleet::{Fleet, Setup};
use agent_tests::{SOON, binaries, eventually, finish, root, signal};
use rustix::process::Signal;
use serde_json::Value;

/// `agentctl` at the controller of the fleet.
#[allow(clippy::disallowed_methods, reason = "runs what it tests")]
fn ctl(fleet: &Fleet, words: &[&str]) -> agent_tests::Ran {
    let mut command = Command::new(binaries().join("agentctl"));
    command.args(words).env("AGENTD_SOCKET", fleet.controller.socket()).env("HOME", fleet.home());
    command.env_remove("XDG_CONFIG_HOME").env_remove("XDG_DATA_HOME").env_remove("AGENTCTL_CONTEXT");
    finish(&mut command)
}

/// Waits until attempt `epoch` of the job has done some steps; the index of the node that it is on.
fn does_steps(fleet: &Fleet, job: &str, epoch: u64) -> usize {
    let on = eventually("the attempt runs", SOON, || {
        let found = fleet.client.job(job);
        let replica = found.replicas.first()?;
        (found.epoch == epoch && found.state == "Running").then(|| replica.node.clone())
    });
    eventually("it says where it begins", SOON, || {
        let log = fleet.client.try_log(job, epoch, "job").ok()?;
        String::from_utf8_lossy(&log).contains("begins at step").then_some(())
    });
    std::thread::sleep(Duration::from_millis(700));
    on.strip_prefix('n').and_then(|number| number.parse().ok()).expect("a node of the fleet")
}

#[test]
fn test_the_example_goes_on_each_time_it_is_killed() {
    let node = "outputs_every: 1s\npreemption: off\n".to_owned();
    let controller = "lease: 3s\n".to_owned();
    let mut fleet = Fleet::started(&Setup { nodes: 2, slots: 1, node, controller, ..Setup::default() });
    let example = root().join("packaging/examples/checkpoints");
    let example = example.to_str().expect("UTF-8");
    let sets = ["--set", "inputs.steps=250", "--set", "inputs.seconds=0.1"];
    let job = ctl(&fleet, &[&["submit", example], &sets[..]].concat()).ok().stdout.trim().to_owned();
    // Four times its machine will be taken away, as an operator says.
    for epoch in 1..=4 {
        let on = format!("n{}", does_steps(&fleet, &job, epoch));
        ctl(&fleet, &["preempt", &on, "--in", "20s", "--reason", "a try"]).ok();
        eventually("it is queued again", SOON, || (fleet.client.job(&job).epoch > epoch).then_some(()));
        ctl(&fleet, &["preempt", &on, "--withdraw"]).ok();
    }
    // Once it is gone without a word: what was stored while it ran is all there is.
    let on = does_steps(&fleet, &job, 5);
    let stored = || fleet.nodes[on].log().matches("asked to store outputs of job").count();
    let before = stored();
    eventually("its outputs so far are stored", SOON, || (stored() > before).then_some(()));
    std::thread::sleep(Duration::from_millis(500)); // until the controller knows
    fleet.nodes[on].kill();
    let left = fleet.nodes[on].processes();
    left.into_iter().for_each(|pid| signal(pid, Signal::KILL));
    eventually("the node counts as silent", SOON, || {
        (fleet.client.job(&job).state == "NotResponding").then_some(())
    });
    let retried = ctl(&fleet, &["node", "lost", &format!("n{on}"), "--yes"]);
    retried.ok();
    let ended = fleet.client.ended(&job);
    assert_eq!((ended.state.as_str(), ended.epoch), ("Completed", 6), "{ended:?}");
    let to = fleet.home().join("got");
    ctl(&fleet, &["download", &job, "-o", to.to_str().expect("UTF-8")]).ok();
    let state: Value =
        serde_json::from_slice(&std::fs::read(to.join("outputs/state.json")).expect("its state")).unwrap();
    let starts: Vec<u64> = state["starts"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
    assert_eq!((state["step"].as_u64(), starts.len()), (Some(250), 6), "{state}");
    assert!(starts[0] == 0 && starts.windows(2).all(|pair| pair[0] < pair[1]), "{starts:?}");
    let shown = ctl(&fleet, &["show", &job]).ok().stdout;
    assert!(shown.contains("what was stored last of attempt 5"), "{shown}");
    let build = String::from_utf8_lossy(&fleet.client.try_log(&job, 2, "build").expect("a log")).into_owned();
    assert!(build.contains("./outputs begins with what attempt 1 left: 1 file"), "{build}");
    // The same once more begins at its beginning.
    let again = ctl(&fleet, &["rerun", &job, "--set", "inputs.steps=1"]).ok().stdout.trim().to_owned();
    assert_eq!(fleet.client.ended(&again).state, "Completed");
    let log = String::from_utf8_lossy(&fleet.client.log(&again, "job")).into_owned();
    assert!(log.contains("begins at step 0"), "{log}");
}
