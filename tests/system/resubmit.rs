//! What is there already does not travel again, and is not built again.

use std::fs;

use agent_tests::Host;

#[test]
fn test_second_run_sends_nothing_and_builds_nothing() {
    let host = Host::started();
    let code =
        host.project("p", &[("a.py", "print(1)"), ("b.py", "print(2)"), ("requirements.txt", "# none\n")]);
    let run = ["run", code.to_str().unwrap(), "--", "python", "a.py"];
    host.ctl(&run).ok().says("3 files, 3 changed");
    let second = host.ctl(&run).ok().says("3 files, 0 changed, 0 B sent").says("reused");
    assert_eq!(second.stdout, "1\n");

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
