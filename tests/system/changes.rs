//! Jobs that are changed after they were submitted.

use std::fs;
use std::time::Duration;

use agent_tests::Host;

/// The first time limit of the job that runs: enough for a slow machine to change it before it is over.
const LIMIT: Duration = Duration::from_secs(10);

#[test]
fn test_jobs_are_changed_while_they_wait_and_get_more_time_while_they_run() {
    let mut host = Host::new();
    host.set("AGENTD_SLOTS", "1");
    host.start();
    let gate = host.home().join("gate");
    let job = format!(
        "command: while [ ! -e {} ]; do sleep 0.05; done\nlimits: {{timeout: {}}}\n",
        gate.display(),
        LIMIT.as_secs()
    );
    let dir = host.project("p", &[("job.yml", &job)]);
    let submit = |name: &str, more: &[&str]| {
        host.ctl(&[&["submit", dir.to_str().unwrap(), "--name", name], more].concat()).ok();
    };
    submit("runs", &[]);
    host.wait_for("runs", &["Running"]);
    host.ctl(&["set", "runs", "--time", "1h"]).ok().says("runs: at most 1 h");
    let started = host.show("runs")["started_ms"].as_u64().unwrap();
    for refused in [["--time", "5s"], ["--gpus", "1"]] {
        host.ctl(&[&["set", "runs"], &refused[..]].concat()).code(1).says("JOB-107");
    }
    submit("first", &[]);
    submit("then", &["--array", "0-1"]);
    let set = host.ctl(&["set", "then", "--priority", "high", "--time", "2h", "--json"]).ok().json();
    assert_eq!([&set["jobs"][0]["priority"], &set["jobs"][0]["state"]], ["high", "Queued"], "{set}");
    host.ctl(&["set", "first", "--hold", "--memory", "64m"]).ok().says("first: 64 MiB of memory, held");
    // What was changed outlives the daemon, and the supervisor of the command knows its new limit.
    host.kill();
    host.start();
    let now = || u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    let over = u64::try_from((LIMIT + Duration::from_secs(1)).as_millis()).unwrap();
    std::thread::sleep(Duration::from_millis((started + over).saturating_sub(now())));
    assert_eq!(host.job_state("runs"), "Running");
    fs::write(gate, "").unwrap();
    host.wait_for("then", &["Completed"]);
    assert_eq!([host.job_state("runs"), host.job_state("first")], ["Completed", "Queued"]);
    host.ctl(&["set", "first", "--release"]).ok().says("first: released");
    host.wait_for("first", &["Completed"]);
    assert_eq!(host.show("then--1")["spec"]["limits"]["timeout_s"], 7200.0);
    // Who changed what.
    for (job, told) in [
        ("runs", "changed by root: time limit from 10 s to 1 h"),
        ("then", "changed by root: priority from medium to high, time limit from 10 s to 2 h"),
        ("first", "changed by root: memory from none to 64 MiB"),
    ] {
        let why = host.ctl(&["why", job]).ok().stdout.replace('\n', " ");
        assert!(why.split_whitespace().collect::<Vec<_>>().join(" ").contains(told), "{why}");
        let events = host.ctl(&["why", job, "--json"]).ok().json()["events"].to_string();
        assert!(events.contains("changed by "), "{events}");
    }
    host.ctl(&["set", "first", "--priority", "low"]).code(1).says("JOB-107");
}
