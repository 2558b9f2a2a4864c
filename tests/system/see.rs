//! What is seen of a job while it runs and after: what it takes of its machine, and what its peak of memory says.

use agent_tests::nvml::{Card, FakeNvml, State};
use agent_tests::{Host, SOON, eventually};
use serde_json::Value;

/// Takes a processor and 64 MiB until it is told to stop; by a child, which the group counts as well.
const BUSY: &str = r#"
import os, signal, subprocess, sys
if len(sys.argv) > 1:
    held = b"x" * (64 << 20)
    while not os.path.exists("stop"):
        sum(range(100000))
else:
    subprocess.run([sys.executable, "t.py", "child"])
"#;

fn system(host: &Host, job: &str) -> Value {
    host.ctl(&["metrics", job, "--system", "--json"]).ok().json()
}

/// The seconds that were measured so far.
fn seconds(measured: &Value) -> u64 {
    measured["metrics"]["system/cpu_cores"]["seconds"].as_u64().unwrap_or(0)
}

#[test]
fn test_what_a_job_takes_is_measured_while_it_runs_through_a_kill_of_the_daemon_and_is_kept() {
    let mut host = Host::started();
    let code = host.project("p", &[("t.py", BUSY)]);
    let submit =
        ["submit", code.to_str().unwrap(), "--name", "busy", "--memory", "1GiB", "--", "python3", "t.py"];
    let job = host.ctl(&submit).ok().stdout.trim().to_owned();
    let first =
        eventually("the job is measured", SOON, || Some(system(&host, &job)).filter(|all| seconds(all) > 0));
    for name in ["cpu_cores", "system_memory_usage_megabytes", "system_memory_usage_percentage"] {
        assert!(first["metrics"][format!("system/{name}")]["max"].as_f64().unwrap() > 0.0, "{name}: {first}");
    }
    let memory = &first["metrics"]["system/memory_peak_megabytes"];
    assert!(memory["max"].as_f64().unwrap() > 64.0, "the child counts: {first}");
    // What nobody counts is absent and has its reason; it is never a number.
    let name = "system/network_receive_megabytes";
    assert!(
        first["absent"][name].as_str().unwrap().contains("network") && first["metrics"][name].is_null(),
        "{first}"
    );

    let shown = host.ctl(&["show", &job]).ok();
    assert!(
        shown.stdout.contains("takes now") && shown.stdout.contains("% of its limit"),
        "{}",
        shown.stdout
    );
    assert!(host.show(&job)["takes"]["cpu_cores"].as_f64().is_some());

    host.kill();
    host.start();
    let before = seconds(&first);
    let more = eventually("the next daemon goes on", SOON, || {
        Some(system(&host, &job)).filter(|all| seconds(all) > before)
    });
    let text = host.ctl(&["metrics", &job, "--system"]).ok().stdout;
    assert!(text.contains("system/cpu_cores") && text.contains("not known: "), "{text}");
    for work in walk(&host.state().join("jobs")) {
        std::fs::write(work.join("stop"), "").unwrap();
    }
    host.wait_for(&job, &["Completed"]);
    let after = system(&host, &job);
    assert!(seconds(&after) >= seconds(&more), "what was measured is kept: {after}");
    let usage = &host.show(&job)["usage"];
    assert_eq!(usage["memory_limit_bytes"], 1 << 30, "{usage}");
    assert!(host.ctl(&["show", &job]).ok().stdout.contains("of 1 GiB memory"));
    let points =
        host.ctl(&["metrics", &job, "--system", "--history", "--csv", "--metric", "cpu_cores"]).ok().stdout;
    assert!(points.lines().count() >= 3 && points.lines().all(|line| !line.contains("memory")), "{points}");

    host.ctl(&["rm", &job]).ok();
    assert!(!host.state().join("controller/archive").join(&job).exists(), "it goes with the job");
}

/// The folders of code of jobs.
fn walk(jobs: &std::path::Path) -> Vec<std::path::PathBuf> {
    let jobs = std::fs::read_dir(jobs).unwrap().flatten();
    jobs.map(|job| job.path().join("job/work")).filter(|work| work.is_dir()).collect()
}

const LARGE: &str = "held = b'x' * (250 << 20)\nprint(len(held))\n";

#[test]
fn test_a_peak_near_the_limit_is_told_with_what_to_raise() {
    let host = Host::started();
    let code = host.project("p", &[("t.py", LARGE)]);
    let run = |memory: &str, name: &str| {
        host.ctl(&[
            "run",
            code.to_str().unwrap(),
            "--name",
            name,
            "--memory",
            memory,
            "--",
            "python3",
            "t.py",
        ])
    };
    run("264MiB", "near").ok();
    let why = host.ctl(&["why", "near"]).ok().stdout;
    assert!(why.contains("raise `resources.memory`") && why.contains("264 MiB"), "{why}");
    run("1GiB", "far").ok();
    let why = host.ctl(&["why", "far"]).ok().stdout;
    assert!(!why.contains("resources.memory"), "{why}");
    run("100MiB", "over").code(137);
    let why = host.ctl(&["why", "over"]).ok().stdout;
    assert!(why.contains("peak seen") && why.contains("raise `resources.memory`"), "{why}");
}

#[test]
fn test_gpus_of_a_job_are_measured_and_a_part_of_one_tells_what_it_cannot() {
    let dir = tempfile::tempdir().unwrap();
    let library = FakeNvml::build(dir.path());
    let whole = Card::new(0).set("utilization", 42);
    State::of(vec![whole, Card::new(1).part("MIG-1", 10 << 30)]).write(&library);
    let mut host = Host::new();
    host.set("AGENTD_NVML_LIBRARY", library.to_str().unwrap());
    host.set("AGENTD_SLOTS", "2");
    host.start();
    let measured = |job: &str| {
        eventually(&format!("{job} is measured"), SOON, || {
            let all = host.ctl(&["metrics", job, "--system", "--json"]).ok().json();
            all["metrics"]["system/gpu_0_memory_usage_megabytes"].is_object().then_some(all)
        })
    };
    let (mut wholes, mut parts) = (0, 0);
    for name in ["one", "two"] {
        host.ctl(&["submit", "--name", name, "--gpus", "1", "--", "sleep", "600"]).ok();
        let all = measured(name);
        let busy = "system/gpu_0_utilization_percentage";
        match all["absent"][busy].as_str() {
            Some(why) => {
                parts += 1;
                assert!(why.contains("MIG") && all["metrics"][busy].is_null(), "{all}");
            }
            None => {
                wholes += 1;
                assert_eq!(all["metrics"][busy]["last"], 42.0, "{all}");
            }
        }
    }
    assert_eq!((wholes, parts), (1, 1));
}

/// A node that cannot keep what it measures runs its jobs all the same.
#[test]
fn test_a_job_does_not_notice_that_nothing_can_be_measured() {
    let mut host = Host::new();
    host.set("AGENTD_FAILPOINTS", "node.system.write=errno:28");
    host.start();
    let job = host.submit("sleep 3; echo done");
    host.wait_for(&job, &["Completed"]);
    let told = host.ctl(&["metrics", &job, "--system"]).ok();
    assert!(told.stderr.contains("nothing was measured"), "{} {}", told.stdout, told.stderr);
}
