//! What is there already does not travel again, and is not built again.

use std::fs;
use std::path::Path;

use agent_tests::Host;

#[test]
fn test_second_run_sends_nothing_and_builds_nothing() {
    let host = Host::started();
    let code = host.project(
        "p",
        &[("a.py", "import sys; print(sys.prefix)"), ("b.py", "print(2)"), ("requirements.txt", "# none\n")],
    );
    let run = ["run", code.to_str().unwrap(), "--", "python", "a.py"];
    let first = host.ctl(&run).ok().says("3 files, 3 changed");
    let why = host.ctl(&["why", "-"]).ok().stdout;
    assert!(why.contains(" built in "), "{why}");
    let second = host.ctl(&run).ok().says("3 files, 0 changed, 0 B sent").says("reused");
    assert_eq!(second.stdout, first.stdout);
    let prefix = Path::new(first.stdout.trim());
    assert!(prefix.starts_with(host.state().join("envs")), "{}", prefix.display());

    fs::write(code.join("b.py"), "print(3)").unwrap();
    host.ctl(&run).ok().says("3 files, 1 changed");
}

#[test]
fn test_a_job_cannot_change_what_the_next_one_gets() {
    let host = Host::started();
    let code = host.project("p", &[("data.txt", "original")]);
    let spoil = "cat data.txt; chmod u+w data.txt; echo spoilt > data.txt";
    for _ in 0..2 {
        let ran = host.ctl(&["run", code.to_str().unwrap(), "--", "sh", "-c", spoil]).ok();
        assert_eq!(ran.stdout, "original");
    }
}

#[test]
fn test_what_is_ignored_stays_at_home() {
    let host = Host::started();
    let files = [(".amlignore", "*.bin\n/secret/\n"), ("big.bin", "x"), ("secret/key", "k"), ("t.py", "")];
    let code = host.project("p", &files);
    let ran = host.ctl(&["run", code.to_str().unwrap(), "--", "find", ".", "-type", "f"]).ok();
    let mut found: Vec<&str> = ran.stdout.lines().collect();
    found.sort_unstable();
    assert_eq!(found, ["./.amlignore", "./t.py"]);
}

#[test]
fn test_a_job_is_run_again_from_what_it_was_made_from() {
    let host = Host::started();
    let job = "command: cat note.txt && echo lr ${{inputs.lr}} && cat ${{inputs.data}}\ncode: code\n\
               environment: host\ninputs: {lr: 0.1, data: {type: uri_file, path: data.csv}}\n";
    let files = [("job.yml", job), ("data.csv", "1,2\n"), ("code/note.txt", "as it was\n")];
    let dir = host.project("p", &files);
    let first = host.ctl(&["submit", dir.to_str().unwrap()]).ok().stdout.trim().to_owned();
    host.wait_for(&first, &["Completed"]);
    fs::write(dir.join("code/note.txt"), "changed\n").unwrap();
    fs::remove_file(dir.join("data.csv")).unwrap();

    let again = host.ctl(&["rerun", &first]).ok().stdout.trim().to_owned();
    assert!(again != first && again.starts_with("p-"), "{again}");
    host.wait_for(&again, &["Completed"]);
    assert_eq!(host.ctl(&["logs", &again]).ok().stdout, "as it was\nlr 0.1\n1,2\n");
    let spec = |job: &str| {
        let spec = host.show(job)["spec"].clone();
        (spec["code"].clone(), spec["inputs"].clone(), spec["environment"].clone())
    };
    assert_eq!(spec(&again), spec(&first));

    let other = host.ctl(&["rerun", &first, "--set", "inputs.lr=0.2", "--name", "better"]).ok();
    assert_eq!(other.stdout, "better\n");
    host.wait_for("better", &["Completed"]);
    assert_eq!(host.ctl(&["logs", "better"]).ok().stdout, "as it was\nlr 0.2\n1,2\n");
    host.ctl(&["rerun", &first, "--set", "inputs.data=x"]).code(1).says("is not a value");
    host.ctl(&["rerun", &first, "--name", "better"]).code(1).says("JOB-105");
    host.ctl(&["rerun", "no-such"]).code(1).says("JOB-104");

    let to = host.home().join("code of first");
    let to = to.to_str().unwrap();
    host.ctl(&["code", &first, "-o", to]).ok().says("1 file");
    assert_eq!(fs::read_to_string(format!("{to}/note.txt")).unwrap(), "as it was\n");
    host.ctl(&["code", &first, "-o", to]).code(1).says("exists");
}
