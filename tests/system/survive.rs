//! The daemon may die at any instant; the job does not notice and nothing it says is lost.

use std::time::Duration;

use agent_tests::{Host, SOON, eventually};

/// Numbered lines and metrics for about eight seconds, then a code of its own.
const TICKER: &str = r#"
import json, os, sys, time
metrics = open(os.environ["AGENTD_METRICS"], "a", buffering=1)
open("outputs/starts", "a").write("started\n")
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
    assert_eq!((&shown["exit_code"], &shown["attempt"]), (&7.into(), &1.into()), "{shown}");
    let to = host.home().join("got");
    host.ctl(&["download", &job, "-o", to.to_str().unwrap()]).ok();
    assert_eq!(std::fs::read_to_string(to.join("outputs/starts")).unwrap(), "started\n");
    let metrics = host.ctl(&["metrics", &job, "--json"]).ok().json();
    assert_eq!(metrics["metrics"][0]["count"], 400, "{metrics}");
    println!("20 kills of the daemon: 4000 lines and 400 metrics, each once");
}

/// What became of a job while the daemon was away is in one file. If that is not as it was written, it counts as missing:
/// nobody is blamed by it, and what the job wrote is there to its last line.
#[test]
fn test_a_record_of_the_end_that_was_damaged_is_not_believed_and_costs_no_line() {
    let mut host = Host::new();
    host.set("AGENTD_SLOTS", "4");
    host.start();
    let gate = host.home().join("gate");
    let command = format!(
        "for i in $(seq 20); do echo $i; done; while [ ! -e {} ]; do sleep 0.05; done; for i in $(seq 21 40); do echo $i; done",
        gate.display()
    );
    let jobs = ["flipped", "cut", "of-another", "sound"].map(|name| {
        let job = format!(
            "name: {name}\ncommand: {}\nenvironment: host\n",
            serde_json::Value::from(command.clone())
        );
        let dir = host.project(name, &[("job.yml", &job)]);
        host.ctl(&["submit", dir.to_str().unwrap()]).ok().stdout.trim().to_owned()
    });
    for job in &jobs {
        host.wait_for(job, &["Running"]);
    }
    host.kill();
    std::fs::write(&gate, "").unwrap();
    let record = |job: &str| host.state().join(format!("jobs/{job}.1.0/exit.json"));
    for job in &jobs {
        eventually("it ends", SOON, || record(job).exists().then_some(()));
    }
    let text = std::fs::read_to_string(record("flipped")).unwrap();
    assert!(text.contains(r#"{"code":0}"#), "{text}");
    std::fs::write(record("flipped"), text.replace(r#"{"code":0}"#, r#"{"code":4}"#)).unwrap();
    std::fs::write(record("cut"), &text[..300]).unwrap();
    std::fs::copy(record("sound"), record("of-another")).unwrap();
    host.start();
    host.wait_for("sound", &["Completed"]);
    let lines: String = (1..=40).map(|line| format!("{line}\n")).collect();
    for job in &jobs {
        let shown = match job.as_str() {
            "sound" => host.show(job),
            job => {
                host.wait_for(job, &["Failed"]);
                let shown = host.show(job);
                assert_eq!(
                    (&shown["exit_code"], &shown["fault"]["code"]),
                    (&serde_json::Value::Null, &"RUN-107".into()),
                    "{shown}"
                );
                assert!(shown["fault"]["why"].to_string().contains("its record proves nothing"), "{shown}");
                shown
            }
        };
        assert!(host.ctl(&["logs", job]).ok().stdout == lines, "{job}: {shown}");
    }
}

#[test]
fn test_a_job_that_ends_while_the_daemon_is_away_is_reported_in_full() {
    let mut host = Host::started();
    let gate = host.home().join("gate");
    let job = host.submit(&format!(
        "echo before; while [ ! -e {} ]; do sleep 0.05; done; echo after; touch outputs/x; \
         echo '{{\"metric\": \"n\", \"value\": 1}}' >>$AGENTD_METRICS; exit 3",
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
    let shown = host.show(&job);
    assert_eq!((&shown["exit_code"], &shown["attempt"]), (&3.into(), &1.into()), "{shown}");
    assert_eq!(shown["artifacts"]["files"], 1, "{shown}");
    assert_eq!(host.ctl(&["metrics", &job, "--json"]).ok().json()["metrics"][0]["count"], 1);
}

#[test]
fn test_stop_leaves_the_job_running() {
    let mut host = Host::started();
    let job = host.submit("echo one; sleep 2; echo two");
    host.wait_for(&job, &["Running"]);
    assert_eq!(host.stop(), 0);
    assert!(!host.state().join("agentd.sock").exists());
    host.start();
    host.wait_for(&job, &["Completed"]);
    assert_eq!(host.show(&job)["attempt"], 1);
    assert_eq!(host.ctl(&["logs", &job]).ok().stdout, "one\ntwo\n");
}

#[test]
fn test_a_second_daemon_on_the_same_state_refuses() {
    let host = Host::started();
    let second = host.second_daemon();
    second.code(75).says("error[CFG-102]").says(&host.pid().to_string());
    host.ctl(&["nodes"]).ok();
}
