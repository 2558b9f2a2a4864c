//! The daemon may die at any instant; the job does not notice and nothing it says is lost.

use std::time::Duration;

use agent_tests::{Host, SOON, eventually};

/// Numbered lines and metrics for about eight seconds, then a code of its own.
const TICKER: &str = r#"
import json, os, sys, time
metrics = open(os.environ["AGENTD_METRICS"], "a", buffering=1)
for number in range(4000):
    print("line", number)
    if number % 10 == 0:
        metrics.write(json.dumps({"metric": "n", "value": number, "step": number}) + "\n")
    time.sleep(0.002)
sys.exit(7)
"#;

#[test]
fn test_20_kills_of_the_daemon_lose_and_repeat_no_line() {
    let mut host = Host::started();
    let code = host.project("p", &[("t.py", TICKER)]);
    let job =
        host.ctl(&["submit", code.to_str().unwrap(), "--", "python", "t.py"]).ok().stdout.trim().to_owned();
    // Someone follows all the while, and sees every line once.
    let mut follower = host.client(&["logs", "-f", &job]);
    let follower =
        follower.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::null()).spawn().unwrap();
    for round in 0..20 {
        std::thread::sleep(Duration::from_millis(37 * (round % 7)));
        host.kill();
        host.start();
    }
    host.wait_for(&job, &["Failed"]);
    let expected: String = (0..4000).map(|number| format!("line {number}\n")).collect();
    assert!(host.ctl(&["logs", &job]).ok().stdout == expected, "the stored log differs");
    let followed = follower.wait_with_output().unwrap();
    assert!(String::from_utf8(followed.stdout).unwrap() == expected, "what the follower saw differs");

    let shown = host.show(&job);
    assert_eq!(shown["exit_code"], 7, "{shown}");
    let metrics = host.ctl(&["metrics", &job, "--json"]).ok().json();
    assert_eq!(metrics["metrics"][0]["count"], 400, "{metrics}");
    println!("20 kills of the daemon: 4000 lines and 400 metrics, each once");
}

#[test]
fn test_a_job_that_ends_while_the_daemon_is_away_is_reported_in_full() {
    let mut host = Host::started();
    let gate = host.home().join("gate");
    let job = host.submit(&format!(
        "echo before; while [ ! -e {} ]; do sleep 0.05; done; echo after; touch outputs/x; exit 3",
        gate.display()
    ));
    host.wait_for(&job, &["Running"]);
    host.kill();
    std::fs::write(&gate, "").unwrap();
    eventually("the job ends without a daemon", SOON, || {
        let jobs = std::fs::read_dir(host.state().join("jobs")).ok()?;
        jobs.flatten().any(|dir| dir.path().join("exit.json").exists()).then_some(())
    });
    host.start();
    host.wait_for(&job, &["Failed"]);
    assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "before\nafter\n");
    assert_eq!(host.show(&job)["exit_code"], 3);
    assert_eq!(host.show(&job)["artifacts"]["files"], 1);
}

#[test]
fn test_stop_leaves_the_job_running() {
    let mut host = Host::started();
    let job = host.submit("echo one; sleep 2; echo two");
    host.wait_for(&job, &["Running"]);
    assert_eq!(host.stop(), 0);
    host.start();
    host.wait_for(&job, &["Completed"]);
    assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "one\ntwo\n");
}

#[test]
fn test_a_second_daemon_on_the_same_state_refuses() {
    let host = Host::started();
    let second = host.second_daemon();
    assert_eq!(second.code, 75, "{second:?}");
    host.ctl(&["nodes"]).ok();
}
