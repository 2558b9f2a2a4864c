//! A box by itself: jobs share it by size, and it shuts itself down when nothing keeps it up.

use std::fs;
use std::path::PathBuf;

use agent_tests::{Host, SOON, eventually};

/// A command that runs until a file is there.
fn until(file: &str) -> String {
    format!("while [ ! -e {file} ]; do sleep 0.05; done")
}

/// A box with two processors for jobs.
fn shared() -> Host {
    let cpus = std::thread::available_parallelism().unwrap().get();
    assert!(cpus >= 2, "this needs two processors");
    let mut host = Host::new();
    host.set("AGENTD_SLOTS", "auto");
    host.set("AGENTD_RESERVED_CPUS", &(cpus - 2).to_string());
    host.start();
    host
}

#[test]
fn test_jobs_run_while_what_they_ask_for_fits_in_order_also_after_a_restart() {
    let mut host = shared();
    let (first, rest) = (host.home().join("first"), host.home().join("rest"));
    let witness = host.home().join("witness").display().to_string();
    let running = [&first, &rest].map(|gate| host.submit(&until(&gate.display().to_string())));
    running.iter().for_each(|job| drop(host.wait_for(job, &["Running"])));
    let waiting: Vec<String> =
        (0..4).map(|number| host.submit(&format!("echo {number} >>{witness}"))).collect();
    let why = host.ctl(&["why", &waiting[0]]).ok().stdout;
    assert!(why.contains("0 of 2 CPUs"), "{why}");
    assert!(why.contains("it takes 1 CPU and "), "{why}");
    let status = host.ctl(&["status"]).ok().stdout;
    assert!(status.contains("2 jobs with 2 of 2 CPUs and "), "{status}");
    assert!(host.ctl(&["nodes"]).ok().stdout.contains("2/auto"));
    let large = host.ctl(&["submit", "--cpus", "3", "--", "true"]).ok().stdout.trim().to_owned();
    let why = host.ctl(&["why", &large]).ok().stdout;
    assert!(why.contains("no node is large enough for 3 CPUs"), "{why}");

    host.kill();
    host.start();
    fs::write(&first, "").unwrap(); // one processor, for one job after the other
    waiting.iter().for_each(|job| drop(host.wait_for(job, &["Completed"])));
    assert_eq!(fs::read_to_string(host.home().join("witness")).unwrap(), "0\n1\n2\n3\n");
    fs::write(&rest, "").unwrap();
    host.wait_for(&running[1], &["Completed"]);
}

/// A box that is shut down by a command once nothing has kept it up for two seconds, and the file that it writes.
fn stopping(command: impl Fn(&str) -> String) -> (Host, PathBuf) {
    let mut host = Host::new();
    let file = host.home().join("told");
    host.set("AGENTD_IDLE_AFTER", "2s");
    host.set("AGENTD_SHUTDOWN_RUN", &command(&file.display().to_string()));
    host.set("AGENTD_TEST_SHUTDOWN_GONE", "3s");
    (host, file)
}

fn told(file: &PathBuf) -> Option<String> {
    fs::read_to_string(file).ok().filter(|text| text.ends_with('\n'))
}

#[test]
fn test_idle_box_is_shut_down_and_a_job_that_comes_then_waits_and_runs() {
    let (mut host, file) = stopping(|file| {
        format!("echo $AGENTD_SHUTDOWN_REASON: $AGENTD_SHUTDOWN_RULE, $AGENTD_IDLE_SECONDS >>{file}")
    });
    let gate = host.home().join("gate").display().to_string();
    host.start();
    let job = host.submit(&until(&gate));
    host.wait_for(&job, &["Running"]);
    eventually("the box to say who keeps it up", SOON, || {
        let text = host.ctl(&["status"]).ok().stdout;
        text.contains(&format!("power   {job} runs (idle for 2 s)")).then_some(())
    });
    assert_eq!(told(&file), None, "a job keeps it up");
    let awake = host.ctl(&["keep-awake", "1h"]).ok().stderr;
    assert!(awake.contains("it stays up until "), "{awake}");
    fs::write(&gate, "").unwrap();
    host.wait_for(&job, &["Completed"]);
    let until = &host.ctl(&["status", "--json"]).ok().json()["controller"]["shutdown"]["awake_until_ms"];
    assert!(until.as_u64().is_some(), "{until}");
    host.kill();
    host.start(); // what was asked for outlives the daemon
    assert!(host.ctl(&["status"]).ok().stdout.contains("power   kept awake until "));
    host.ctl(&["keep-awake", "--off"]).ok();

    let text = eventually("the command to run", SOON, || told(&file));
    assert_eq!(text, "idle: idle for 2 s, 2\n");
    // The machine goes now: nothing is started. It is still there afterwards.
    let late = host.submit("true");
    let why = host.ctl(&["why", &late]).ok().stdout;
    assert!(why.contains("no node takes work now: this machine is about to be shut down"), "{why}");
    host.wait_for(&late, &["Completed"]);
    let status = host.ctl(&["status"]).ok().stdout;
    assert!(status.contains("3 seconds later the machine was still there"), "{status}");
}

#[test]
fn test_command_that_fails_is_told_and_not_repeated_at_once() {
    let (mut host, file) = stopping(|file| format!("echo once >>{file}; echo 'not allowed' >&2; exit 3"));
    host.start();
    eventually("the failure to be told", SOON, || {
        let text = host.ctl(&["status"]).ok().stdout;
        (text.contains("could not be shut down") && text.contains("not allowed")).then_some(())
    });
    let job = host.submit("sleep 4");
    host.wait_for(&job, &["Completed"]);
    assert_eq!(told(&file).as_deref(), Some("once\n"));
    let plan = host.ctl(&["status", "--json"]).ok().json()["controller"]["shutdown"].clone();
    assert!(plan["failed"].as_str().unwrap().contains("exit status: 3"), "{plan}");
}

#[test]
fn test_a_box_with_jobs_of_its_own_joins_nobody_before_they_have_ended() {
    let mut host = Host::new();
    host.start();
    let job = host.submit("sleep 600");
    host.wait_for(&job, &["Running"]);
    let join = |host: &Host, more: &[&str]| {
        host.agentd(&[&["join", "https://127.0.0.1:1", "--token", "x"], more].concat())
    };
    host.kill();
    join(&host, &[]).code(1).says("1 job of its own").says(&job).says("--lose-jobs");
    // The token is only looked at after that.
    join(&host, &["--lose-jobs"]).code(1).says("token");
    host.start();
    host.ctl(&["cancel", "--wait", &job]).ok();
    host.kill();
    join(&host, &[]).code(1).says("token");
}
