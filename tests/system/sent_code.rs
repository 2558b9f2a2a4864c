//! What is sent as the code of a job, and what comes back.

use std::fs;

use agent_tests::Host;

#[test]
fn test_what_jobs_left_is_neither_sent_nor_taken_for_the_results_of_the_next() {
    let host = Host::started();
    let script = "mkdir -p outputs; ls outputs >seen; cp seen outputs/seen; echo new >outputs/new.txt";
    let dir = host.project(
        "p",
        &[
            ("train.sh", script),
            ("outputs/old.ckpt", "stale"),
            (".venv/pyvenv.cfg", ""),
            (".venv/bin/x", "x"),
        ],
    );
    let path = dir.to_str().unwrap();
    let run = |name: &str| {
        let mut command = host.client(&["run", ".", "--name", name, "--", "bash", "train.sh"]);
        agent_tests::finish(command.current_dir(&dir)).ok()
    };
    run("one").says("code: 1 file").says("outputs is not sent: a job begins with an empty one");
    let download = |name: &str| agent_tests::finish(host.client(&["download", name]).current_dir(&dir)).ok();
    download("one");
    assert_eq!(fs::read_to_string(dir.join("one/outputs/new.txt")).unwrap(), "new\n");
    assert_eq!(fs::read_to_string(dir.join("one/outputs/seen")).unwrap(), "", "nothing was there before");
    // What was fetched stays here, and what somebody made himself is sent.
    run("two").says("code: 1 file").says("one was made by agentd; left out");
    let listed = host.ctl(&["files", path]).ok().stdout;
    assert!(listed.contains("/outputs/ (always; a line !/outputs/ in .gitignore sends it)"), "{listed}");
    assert!(listed.contains("a virtual environment (pyvenv.cfg)"), "{listed}");
    fs::remove_dir_all(dir.join("one")).unwrap();
    fs::create_dir(dir.join("one")).unwrap();
    fs::write(dir.join("one/mine.py"), "x").unwrap();
    fs::write(dir.join(".amlignore"), "!/outputs/\n").unwrap();
    run("three").says("code: 4 files");
}
