//! A job whose supervisor dies is lost and said so; with attempts left it runs again, as another attempt. One that fails
//! by itself does not.

use std::fs;

use agent_tests::{Host, SOON, eventually, signal};
use rustix::process::Signal;

/// Waits for ever the first time, and ends well the second.
const COMMAND: &str = "if [ $(wc -l < $WITNESS) = 1 ]; then echo one; sleep 1000; fi; echo two";

/// A job that may have so many attempts, each of which leaves a line in the file `name`.
fn submit(host: &Host, name: &str, command: &str, attempts: u32) -> String {
    let witness = host.home().join(name).display().to_string();
    let text = format!(
        "command: {}\nenvironment: host\nenvironment_variables: {{WITNESS: {witness}}}\n\
         retry: {{max_attempts: {attempts}, backoff: 1}}\n",
        serde_json::Value::from(format!("echo attempt >> $WITNESS; {command}"))
    );
    let dir = host.project(&format!("{name}-code"), &[("job.yml", &text)]);
    host.ctl(&["submit", dir.to_str().unwrap()]).ok().stdout.trim().to_owned()
}

fn attempts(host: &Host, name: &str) -> usize {
    fs::read_to_string(host.home().join(name)).unwrap().lines().count()
}

fn job(host: &Host, name: &str, attempts: u32) -> String {
    let job = submit(host, name, COMMAND, attempts);
    eventually("the first attempt speaks", SOON, || {
        host.ctl(&["logs", &job]).ok().stdout.contains("one").then_some(())
    });
    job
}

fn kill_the_shim(host: &Host) {
    let is_shim =
        |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.trim() == "agent-shim");
    let shim = host.processes().into_iter().find(is_shim).expect("a running job has a shim");
    signal(shim, Signal::KILL);
}

#[test]
fn test_a_lost_job_runs_again_when_it_may() {
    let host = Host::started();
    let job = job(&host, "twice", 2);
    kill_the_shim(&host);
    host.wait_for(&job, &["Completed"]);
    assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "two\n", "the log is that of the latest attempt");
    assert_eq!(host.show(&job)["attempt"], 2);
    let why = host.ctl(&["why", &job]).ok().stdout;
    assert!(why.contains("RUN-107") && why.contains("attempt 2"), "{why}");
    assert_eq!(attempts(&host, "twice"), 2);
}

#[test]
fn test_a_job_that_fails_by_itself_is_not_tried_again() {
    let host = Host::started();
    let job = submit(&host, "own", "exit 3", 3);
    host.wait_for(&job, &["Failed"]);
    let shown = host.show(&job);
    assert_eq!((&shown["exit_code"], &shown["attempt"]), (&3.into(), &1.into()), "{shown}");
    assert_eq!(attempts(&host, "own"), 1);
}

#[test]
fn test_a_lost_job_without_attempts_left_fails_and_leaves_no_process() {
    let host = Host::started();
    let job = job(&host, "once", 1);
    kill_the_shim(&host);
    host.wait_for(&job, &["Failed"]);
    assert_eq!(host.show(&job)["fault"]["code"], "RUN-107");
    assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "one\n", "what it said before is kept");
    let sleeps =
        |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.trim() == "sleep");
    assert!(!host.processes().iter().any(sleeps), "the command outlived its supervisor");
}
