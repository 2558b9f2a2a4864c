//! The queue: in order, two at a time, nothing lost and nothing twice.

use std::collections::BTreeMap;
use std::fs;

use agent_tests::{Host, SOON, eventually};

/// Each job writes one line of its number when it starts, and one when it ends.
fn witness(host: &Host, number: usize) -> String {
    let file = host.home().join("witness").display().to_string();
    format!("echo start {number} >> {file}; echo end {number} >> {file}")
}

#[test]
fn test_200_tiny_jobs_all_run_once() {
    let host = Host::started();
    let jobs: Vec<String> = (0..200).map(|number| host.submit(&witness(&host, number))).collect();
    eventually("200 jobs to end", 5 * SOON, || {
        let listed = host.ctl(&["jobs", "--json", "--limit", "500"]).ok().json();
        let ended = listed["jobs"].as_array()?.iter().filter(|job| job["state"] == "Completed").count();
        (ended == jobs.len()).then_some(())
    });
    let text = fs::read_to_string(host.home().join("witness")).unwrap();
    let mut lines: BTreeMap<&str, u32> = BTreeMap::new();
    for line in text.lines() {
        *lines.entry(line).or_default() += 1;
    }
    assert_eq!(lines.len(), 400, "each of 200 jobs starts and ends");
    assert!(lines.values().all(|count| *count == 1), "a job ran twice: {lines:?}");

    // Two slots: a job starts at most one place away from its turn.
    let started: Vec<i64> = text.lines().filter_map(|l| l.strip_prefix("start ")?.parse().ok()).collect();
    for (turn, number) in (0_i64..).zip(&started) {
        assert!((turn - number).abs() <= 1, "job {number} started as number {turn}");
    }
}

#[test]
fn test_a_waiting_job_says_why_and_priority_goes_first() {
    let host = Host::started();
    let gates = ["one", "two"].map(|name| host.home().join(name));
    let running = gates
        .each_ref()
        .map(|gate| host.submit(&format!("while [ ! -e {} ]; do sleep 0.05; done", gate.display())));
    running.iter().for_each(|job| drop(host.wait_for(job, &["Running"])));

    let late = host.submit(&witness(&host, 1));
    let dir = host.project(
        "urgent",
        &[(
            "job.yml",
            &format!(
                "command: {}\nenvironment: host\nqueue_settings: {{priority: high}}\n",
                serde_json::Value::from(witness(&host, 2))
            ),
        )],
    );
    let urgent = host.ctl(&["submit", dir.to_str().unwrap()]).ok().stdout.trim().to_owned();
    let why = host.ctl(&["why", &late]).ok().stdout;
    assert!(why.contains(&running[0]) || why.contains("slot"), "no reason in:\n{why}");

    fs::write(&gates[0], "").unwrap(); // one slot for the two of them
    for job in [&urgent, &late] {
        host.wait_for(job, &["Completed"]);
    }
    fs::write(&gates[1], "").unwrap();
    let text = fs::read_to_string(host.home().join("witness")).unwrap();
    assert!(text.starts_with("start 2\n"), "the urgent job goes first:\n{text}");
}

#[test]
fn test_the_queue_survives_the_daemon() {
    let mut host = Host::started();
    let gate = host.home().join("gate");
    let wait = format!("while [ ! -e {} ]; do sleep 0.05; done", gate.display());
    let mut jobs = vec![host.submit(&wait), host.submit(&wait)];
    jobs.extend((0..5).map(|number| host.submit(&witness(&host, number))));
    host.kill();
    host.start();
    fs::write(&gate, "").unwrap();
    for job in &jobs {
        host.wait_for(job, &["Completed"]);
    }
    let text = fs::read_to_string(host.home().join("witness")).unwrap();
    assert_eq!(text.lines().count(), 10);
}
