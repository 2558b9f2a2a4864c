//! Jobs that are changed after they were submitted.

use std::fs;
use std::time::Duration;

use agent_tests::Host;

#[test]
fn test_jobs_begin_not_before_and_are_not_started_when_they_could_not_end_in_time() {
    let mut host = Host::new();
    host.set("AGENTD_SLOTS", "1");
    host.start();
    let dir =
        host.project("p", &[("a.txt", "a"), ("a.sh", "#!/bin/bash\n#SBATCH --begin=now+3hours\ntrue\n")]);
    let submit = |host: &Host, name: &str, more: &[&str]| {
        host.ctl(&[&["submit", dir.to_str().unwrap(), "--name", name], more, &["--", "true"]].concat())
    };
    submit(&host, "later", &["--begin", "+2h"]).ok();
    submit(&host, "soon", &["--begin", "+3s"]).ok();
    let listed = host.ctl(&["jobs"]).ok().stdout;
    assert!(listed.contains("waits until "), "{listed}");
    let why = host.ctl(&["why", "later"]).ok().stdout;
    assert!(why.contains(", in 1 h 59 min"), "{why}");
    assert!(host.ctl(&["show", "later"]).ok().stdout.contains("not before "));
    host.kill();
    host.start();
    host.wait_for("soon", &["Completed"]);
    let soon = host.show("soon");
    assert!(soon["started_ms"].as_u64() >= soon["begin_ms"].as_u64(), "{soon}");
    assert_eq!(host.job_state("later"), "Queued");
    // A deadline, with room for only one.
    let gate = host.home().join("gate");
    let wait = format!("while [ ! -e {} ]; do sleep 0.05; done", gate.display());
    let first = host.submit(&wait);
    host.wait_for(&first, &["Running"]);
    submit(&host, "late", &["--deadline", "+2s"]).ok();
    host.wait_for("late", &["Failed"]);
    assert_eq!(host.show("late")["fault"]["code"], "JOB-108");
    fs::write(gate, "").unwrap();
    host.wait_for(&first, &["Completed"]);
    host.ctl(&["set", "later", "--begin", "now"]).ok().says("later: starts at once");
    host.wait_for("later", &["Completed"]);
    submit(&host, "never", &["--begin", "+3h", "--deadline", "+2h"]).code(1).says("JOB-102");
    submit(&host, "never", &["--begin", "yesterday"]).code(2).says("write 22:00");
    // The dates were of that submission.
    let again = host.ctl(&["rerun", "soon", "--json"]).ok().json()["job"].as_str().unwrap().to_owned();
    assert!(host.show(&again)["begin_ms"].is_null());
    let script = host.ctl(&["submit", dir.join("a.sh").to_str().unwrap(), "--json"]).ok().json();
    assert!(host.show(script["job"].as_str().unwrap())["detail"].as_str().unwrap().contains("in 2 h 59 min"));
}

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
