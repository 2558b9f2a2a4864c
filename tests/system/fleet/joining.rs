//! A box with its own controller joins a fleet: not with its jobs.

use std::fs;
use std::process::Stdio;

use agent_tests::fleet::Daemon;
use agent_tests::{Ran, SOON, eventually, finish};

use super::Site;

/// A box that is its own controller, and runs.
fn alone(site: &Site, name: &str) -> Daemon {
    let config = format!("node_name: {name}\nslots: 1\ndisk_reserve: 64MiB\n");
    let mut daemon = Daemon::new(site.path(name), config);
    daemon.spawn();
    eventually("the box answers", SOON, || (at(site, &daemon, &["nodes"]).code == 0).then_some(()));
    daemon
}

/// `agentctl` at the socket of a box.
fn at(site: &Site, daemon: &Daemon, arguments: &[&str]) -> Ran {
    finish(site.client("local", arguments).env("AGENTD_SOCKET", daemon.socket()))
}

/// Submits a job; returns its name.
fn submit(site: &Site, daemon: &Daemon, job: &str) -> String {
    let project = site.project("local", job);
    at(site, daemon, &["submit", &project]).ok().stdout.trim().to_owned()
}

/// `agentd join` of a stopped box, with more words.
fn join(site: &Site, daemon: &Daemon, words: &[&str]) -> Ran {
    let file = daemon.state().with_file_name("token");
    fs::write(&file, site.token(&[])).unwrap();
    let address = site.address("127.0.0.1");
    let all = [&["join", &address, "--token-file", file.to_str().unwrap()], words].concat();
    finish(daemon.command_of(&all).stdout(Stdio::piped()).stderr(Stdio::piped()))
}

#[test]
fn test_a_box_that_leaves_its_jobs_behind_runs_them_to_their_end_and_is_believed_about_none() {
    let mut site = Site::new();
    let mut joiner = alone(&site, "box");
    let (go, done) = (site.path("go"), site.path("done"));
    let gated = format!(
        "command: 'while ! [ -e {} ]; do sleep 0.1; done; echo ended > {}'\n",
        go.display(),
        done.display()
    );
    let runs = submit(&site, &joiner, &gated);
    eventually("the job runs", SOON, || {
        (at(&site, &joiner, &["show", &runs, "--json"]).ok().json()["state"] == "Running").then_some(())
    });
    let waits = submit(&site, &joiner, "command: 'true'\n");
    joiner.stop();
    join(&site, &joiner, &[]).code(1).says("2 jobs").says("--lose-jobs");
    join(&site, &joiner, &["--lose-jobs"]).ok();
    joiner.spawn();
    site.nodes.push(joiner);
    site.until_ready("box");
    let told = || site.json(&["status", "--json"])["controller"]["notices"].to_string();
    eventually("what runs is told", SOON, || told().contains(&format!("{runs}.1.0")).then_some(()));
    site.ctl(&["show", &runs]).code(1).says("JOB-104");
    fs::write(go, "").unwrap();
    eventually("it has run to its end", SOON, || done.exists().then_some(()));
    site.ctl(&["show", &waits]).code(1).says("JOB-104");
}

/// The file that the release before left when its join with jobs was cut off.
#[test]
fn test_a_move_that_the_release_before_began_is_told_and_nothing_starts_beside_it() {
    let mut site = Site::new();
    site.add_node("n0", "127.0.0.1");
    let mut node = site.nodes.pop().unwrap();
    node.stop();
    let begun = node.state().join("moving");
    fs::write(&begun, site.address("127.0.0.1")).unwrap();
    for words in [&["run"][..], &["leave"]] {
        let ran = finish(node.command_of(words).stdout(Stdio::piped()).stderr(Stdio::piped()));
        assert_ne!(ran.code, 0, "{words:?}");
        assert!(ran.stderr.contains("release before") && ran.stderr.contains("moving"), "{ran:?}");
    }
    fs::remove_file(begun).unwrap();
    node.spawn();
    site.nodes.push(node);
    site.until_ready("n0");
}
