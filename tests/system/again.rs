//! A job is made again from its record: as a job file, as a rerun; and two jobs are compared.

use std::fs;
use std::path::{Path, PathBuf};

use agent_tests::Host;
use serde_json::Value;

const TRAIN: &str = r#"
import json, os, sys

lr = float(sys.argv[1])
rows = open(sys.argv[2]).read().split()
with open(os.environ["AGENTD_METRICS"], "a") as metrics:
    for step in range(3):
        metrics.write(json.dumps({"metric": "loss", "value": lr * len(rows) / (step + 3), "step": step}) + "\n")
print("trained with", lr)
"#;

/// A job with code, a file, a folder, a value and an environment of its own.
fn project(host: &Host, name: &str, lr: &str) -> PathBuf {
    let job = format!(
        "command: |\n  python3 train.py ${{{{inputs.lr}}}} ${{{{inputs.data}}}}\n  ls ${{{{inputs.folder}}}}\ncode: code\n\
         environment: {{python: python3, requirements: requirements.txt}}\nenvironment_variables: {{A: '1'}}\n\
         inputs:\n  lr: {lr}\n  data: {{type: uri_file, path: data.csv}}\n  folder: {{path: folder}}\n\
         outputs: {{model: {{type: uri_file}}}}\nlimits: {{timeout: 5m}}\n"
    );
    let files = [
        ("job.yml", job.as_str()),
        ("requirements.txt", "# none\n"),
        ("data.csv", "1 2 3\n"),
        ("folder/one", "1"),
        ("code/train.py", TRAIN),
        ("code/note.txt", "as it was\n"),
    ];
    host.project(name, &files)
}

fn submit(host: &Host, target: &Path) -> String {
    host.ctl(&["submit", target.to_str().unwrap()]).ok().stdout.trim().to_owned()
}

/// What a job was made from, and what it ran in: code, inputs, environment, its key and the digest of its lock.
fn made_from(host: &Host, job: &str) -> [Value; 5] {
    let shown = host.show(job);
    let spec = &shown["spec"];
    [
        &spec["code"],
        &spec["inputs"],
        &spec["environment"],
        &shown["environment"]["key"],
        &shown["environment"]["lock"],
    ]
    .map(Value::clone)
}

fn metrics(host: &Host, job: &str) -> Value {
    let mut recorded = host.ctl(&["metrics", job, "--json"]).ok().json();
    recorded["job"].take();
    recorded
}

#[test]
fn test_a_job_file_made_from_a_job_makes_the_same_job() {
    let host = Host::started();
    let dir = project(&host, "p", "0.1");
    let first = submit(&host, &dir);
    host.wait_for(&first, &["Completed"]);
    // Nothing of what it was made from is there any more.
    fs::remove_dir_all(&dir).unwrap();
    for locked in [false, true] {
        let mut show = vec!["show", first.as_str(), "--as-job"];
        show.extend(locked.then_some("--locked"));
        let text = host.ctl(&show).ok().stdout;
        assert!(text.starts_with(&format!("# {first}, submitted ")), "{text}");
        assert!(text.contains("\ncode: \"snapshot:") && !text.contains("/note"), "{text}");
        let file = host.home().join("again.yml");
        fs::write(&file, &text).unwrap();
        host.ctl(&["check", "--strict", file.to_str().unwrap()]).ok();
        let again = submit(&host, &file);
        host.wait_for(&again, &["Completed"]);
        assert_eq!(made_from(&host, &again)[..2], made_from(&host, &first)[..2]);
        assert_eq!(metrics(&host, &again), metrics(&host, &first));
        assert_eq!(
            host.ctl(&["show", &again, "--as-job"]).ok().stdout.split_once('\n').unwrap().1,
            text.split_once('\n').unwrap().1
        );
        if !locked {
            assert_eq!(made_from(&host, &again), made_from(&host, &first));
        }
    }
    // Who names a snapshot that nobody has is told so.
    let text = host.ctl(&["show", &first, "--as-job"]).ok().stdout;
    let root = made_from(&host, &first)[0].as_str().unwrap().split('/').next().unwrap().to_owned();
    let file = host.home().join("gone.yml");
    fs::write(&file, text.replace(&root, &"0".repeat(64))).unwrap();
    host.ctl(&["submit", file.to_str().unwrap()]).code(1).says("SNP-").says("not in the store any more");
}

/// Finishes so many jobs, changes all that they were made from, and runs each of them again.
fn rerun(jobs: usize) {
    let host = Host::started();
    let made: Vec<(PathBuf, String)> = (0..jobs)
        .map(|number| {
            let dir = project(&host, &format!("p{number}"), &format!("0.{}", number + 1));
            let job = submit(&host, &dir);
            (dir, job)
        })
        .collect();
    for (dir, job) in &made {
        host.wait_for(job, &["Completed"]);
        for (path, text) in [
            ("code/train.py", "raise SystemExit(3)"),
            ("data.csv", "9 9 9 9\n"),
            ("requirements.txt", "no-such-package\n"),
            ("job.yml", "command: 'false'\n"),
        ] {
            fs::write(dir.join(path), text).unwrap();
        }
    }
    let again: Vec<String> =
        made.iter().map(|(_, job)| host.ctl(&["rerun", job]).ok().stdout.trim().to_owned()).collect();
    for ((_, job), again) in made.iter().zip(&again) {
        host.wait_for(again, &["Completed"]);
        let (before, after) = (made_from(&host, job), made_from(&host, again));
        assert!(before[0].is_string() && before[3].is_string(), "{before:?}");
        assert_eq!(before, after, "{job} and {again}");
        assert_eq!(metrics(&host, job), metrics(&host, again), "{job} and {again}");
        let differ = host.ctl(&["diff", job, again, "--json"]).ok().json();
        assert_eq!(differ["same"], true, "{differ}");
    }
}

#[test]
fn test_jobs_are_run_again_alike_in_a_changed_directory() {
    rerun(3);
}

#[test]
#[ignore = "the same many times; by name"]
fn test_twenty_jobs_are_run_again_alike_in_a_changed_directory() {
    rerun(20);
}

#[test]
fn test_two_jobs_are_compared_by_what_made_them_differ() {
    let host = Host::started();
    let dir = project(&host, "p", "0.1");
    let one = submit(&host, &dir);
    host.wait_for(&one, &["Completed"]);
    fs::write(dir.join("code/train.py"), TRAIN.replace("range(3)", "range(5)")).unwrap();
    fs::write(dir.join("code/new.bin"), b"\0\x01").unwrap();
    fs::remove_file(dir.join("code/note.txt")).unwrap();
    fs::write(dir.join("data.csv"), "1 2\n").unwrap();
    let other =
        host.ctl(&["submit", dir.to_str().unwrap(), "--set", "inputs.lr=0.2", "--memory", "200m"]).ok();
    let other = other.stdout.trim().to_owned();
    host.wait_for(&other, &["Completed"]);
    let said = host.ctl(&["diff", &one, &other]).ok().stdout;
    for words in [
        "lr  0.1 -> 0.2",
        "data.path  snapshot:",
        "resources.memory  (none) -> 209715200",
        "loss  0.06000000000000001 -> 0.05714285714285715",
        "changed train.py",
        "-    for step in range(3):",
        "+    for step in range(5):",
        "added new.bin (binary)",
        "removed note.txt",
        "no difference: environment, machine, end",
    ] {
        let spaced = said.lines().any(|line| {
            line.split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
                .contains(&words.split_whitespace().collect::<Vec<_>>().join(" "))
        });
        assert!(spaced, "`{words}` is not in\n{said}");
    }
    let told = host.ctl(&["diff", &one, &other, "--json"]).ok().json();
    assert_eq!(told["same"], false);
    assert_eq!(told["files"].as_array().unwrap().len(), 3, "{told}");
    let same = host.ctl(&["diff", &one, &one]).ok();
    assert!(same.stdout.ends_with("metrics, end, code\n"), "{}", same.stdout);
    host.ctl(&["diff", &one, "no-such"]).code(1).says("JOB-104");
}
