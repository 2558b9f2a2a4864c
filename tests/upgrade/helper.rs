//! A helper of root of the release before, which an upgrade ends, and a daemon of this one.

use std::fs;
use std::os::unix::process::CommandExt;

use agent_tests::split::{Helper, split_of};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, Ran, SOON, before, binaries, eventually, finish};
use serde_json::json;

use crate::upgrade::states::{LINES, check_lines};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "H1",
    promise: "jobs that a helper of root of the release before started are served by helper and daemon of this one",
    run: helped,
}];

/// Whose jobs: `games` of every Debian, in the group that may submit.
const GAMES: u32 = 5;
const MEMBERS: u32 = 65_534;

/// `agentctl` as that user.
fn ctl(host: &Host, words: &[&str]) -> Ran {
    let theirs = host.home().join(GAMES.to_string());
    let mut command = host.client(words);
    command.uid(GAMES).gid(MEMBERS).env("HOME", &theirs).env("XDG_CACHE_HOME", theirs.join("cache"));
    finish(command.current_dir(&theirs))
}

#[track_caller]
fn submit(host: &Host, name: &str, command: &str) {
    let file = json!({ "command": command, "code": ".", "environment": "host" });
    let dir = host.project(&format!("{GAMES}/{name}"), &[("job.yml", &file.to_string())]);
    ctl(host, &["submit", dir.to_str().expect("UTF-8"), "--name", name]).ok();
}

#[track_caller]
fn said(host: &Host, job: &str, text: &str) {
    eventually(&format!("{job} says `{text}`"), SOON, || {
        ctl(host, &["logs", job]).stdout.contains(text).then_some(())
    });
}

fn helped(tally: &mut Tally, _: &Scale) {
    let (mut host, mut helper) = split_of(before::programs(), &[]);
    let theirs = host.home().join(GAMES.to_string());
    let go = theirs.join("go").display().to_string();
    submit(&host, "runs", &LINES.replace("-e go", &format!("-e {go}")));
    submit(&host, "sleeps", "echo up; setsid sleep 1000 & sleep 1000");
    said(&host, "runs", "line 9\n");
    said(&host, "sleeps", "up");
    assert_eq!(host.stop(), 0);
    // As a package does: every file is replaced, helper and daemon are started again.
    helper.kill();
    host.install(binaries());
    let _helper = Helper::start(host.home(), &host.state());
    tally.case("the daemon starts", || host.start());
    tally.case("a job of before goes on, and another is ended with all its processes", || {
        fs::write(&go, "").expect("a file");
        host.wait_for("runs", &["Completed"]);
        check_lines(&host.ctl(&["logs", "runs"]).ok().stdout, true);
        host.ctl(&["cancel", "--wait", "sleeps"]).ok();
        assert_eq!(host.job_state("sleeps"), "Canceled");
    });
    tally.case("a new job is its owner's, and its outputs are stored", || {
        submit(&host, "new", "id -u; umask 077; echo kept >outputs/kept");
        let state = host.wait_for("new", &["Completed", "Failed"]);
        assert_eq!(state, "Completed", "{}", host.ctl(&["why", "new"]).stdout);
        assert_eq!(host.ctl(&["logs", "new"]).ok().stdout, format!("{GAMES}\n"));
        let to = host.home().join("got");
        host.ctl(&["download", "new", "--output", to.to_str().expect("UTF-8")]).ok();
        assert_eq!(fs::read_to_string(to.join("outputs/kept")).expect("an output"), "kept\n");
    });
    tally.case("a new job is ended with all its processes", || {
        submit(&host, "long", "setsid sleep 1000 & echo up; sleep 1000");
        said(&host, "long", "up");
        host.ctl(&["cancel", "--wait", "long"]).ok();
        assert_eq!(host.job_state("long"), "Canceled");
    });
}
