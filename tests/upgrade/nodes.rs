//! A fleet whose machines get this release one after the other, the controller first.

#![allow(clippy::disallowed_methods, reason = "runs clients of both releases")]

use std::fs;
use std::path::Path;
use std::process::Command;

use agent_tests::fleet::{Daemon, Fleet, Setup};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Ran, SOON, before, binaries, eventually, finish, signal};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::upgrade::states::{LINES, check_lines};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "G1",
        promise: "a gang that runs goes on while controller and nodes are replaced one by one",
        run: gang,
    },
    Row {
        id: "N1",
        promise: "a node of the release before does everything for a controller of this one",
        run: old_node,
    },
];

/// `agentctl` of this directory, for the controller of a fleet.
fn ctl(programs: &Path, fleet: &Fleet, words: &[&str]) -> Ran {
    let mut command = Command::new(programs.join("agentctl"));
    command.arg("--socket").arg(fleet.controller.socket()).args(words).env("NO_COLOR", "1");
    finish(command.env("XDG_CACHE_HOME", fleet.home().join("cache")))
}

/// Submits the job that this file describes, under a name.
#[track_caller]
fn submit(programs: &Path, fleet: &Fleet, name: &str, mut file: Value, more: &[&str]) {
    let dir = fleet.home().join(format!("code-{name}"));
    fs::create_dir_all(&dir).expect("a directory");
    file["environment"] = "host".into();
    fs::write(dir.join("job.yml"), file.to_string()).expect("a file");
    let words = ["submit", dir.to_str().expect("UTF-8"), "--name", name];
    ctl(programs, fleet, &[&words, more].concat()).ok();
}

#[track_caller]
fn said(fleet: &Fleet, words: &[&str], text: &str) {
    eventually(&format!("{words:?} gives `{text}`"), SOON, || {
        ctl(binaries(), fleet, words).stdout.contains(text).then_some(())
    });
}

#[track_caller]
fn completed(fleet: &Fleet, job: &str) {
    let ended = fleet.client.ended(job);
    assert_eq!(ended.state, "Completed", "{}", ctl(binaries(), fleet, &["why", job]).stdout);
}

/// Has a daemon be of this release.
fn replace(daemon: &mut Daemon) {
    daemon.use_programs(binaries());
    daemon.bounce();
}

fn gang(tally: &mut Tally, _: &Scale) {
    const RANKS: [&str; 2] = ["0", "1"];
    let mut fleet = Fleet::new(&Setup { nodes: RANKS.len(), hosts: true, ..Setup::default() });
    let daemons = std::iter::once(&mut fleet.controller).chain(&mut fleet.nodes);
    daemons.for_each(|daemon| daemon.use_programs(before::programs()));
    fleet.start();
    let go = fleet.home().join("go");
    let command = LINES.replace("-e go", &format!("-e {}", go.display()));
    let file = json!({ "command": command, "resources": { "instance_count": RANKS.len() } });
    submit(before::programs(), &fleet, "gang", file, &[]);
    let all_speak = |fleet: &Fleet, line: u32| {
        let text = format!("line {line}\n");
        RANKS.iter().for_each(|rank| said(fleet, &["logs", "gang", "--rank", rank], &text));
    };
    all_speak(&fleet, 9);
    tally.case("the controller is replaced", || {
        replace(&mut fleet.controller);
        fleet.ready();
        all_speak(&fleet, 50);
    });
    for (index, rank) in RANKS.iter().enumerate() {
        tally.case("a node is replaced", || {
            replace(&mut fleet.nodes[index]);
            fleet.ready();
            let lines = ctl(binaries(), &fleet, &["logs", "gang", "--rank", rank]).stdout.lines().count();
            all_speak(&fleet, u32::try_from(lines).expect("a short log") + 50);
        });
    }
    tally.case("it ends with one result and every line", || {
        fs::write(&go, "").expect("a file");
        completed(&fleet, "gang");
        assert_eq!(fleet.client.job("gang").epoch, 1);
        for rank in RANKS {
            check_lines(&ctl(binaries(), &fleet, &["logs", "gang", "--rank", rank]).ok().stdout, true);
        }
    });
}

fn old_node(tally: &mut Tally, _: &Scale) {
    let mut fleet = Fleet::new(&Setup { nodes: 1, ..Setup::default() });
    fleet.nodes[0].use_programs(before::programs());
    fleet.start();
    let new = binaries();
    tally.case("a job with outputs and metrics", || {
        let command = "echo one; echo kept >outputs/kept; \
                       echo '{\"metric\": \"loss\", \"value\": 0.5}' >>$AGENTD_METRICS";
        submit(new, &fleet, "one", json!({ "command": command }), &[]);
        completed(&fleet, "one");
        let to = fleet.home().join("got");
        ctl(new, &fleet, &["download", "one", "-o", to.to_str().expect("UTF-8")]).ok();
        assert_eq!(fs::read_to_string(to.join("outputs/kept")).expect("an output"), "kept\n");
        assert_eq!(ctl(new, &fleet, &["logs", "one"]).ok().stdout, "one\n");
        let metrics = ctl(new, &fleet, &["metrics", "one", "--json"]).ok().json();
        assert_eq!(metrics["metrics"][0]["last"], 0.5, "{metrics}");
    });
    tally.case("an array", || {
        submit(new, &fleet, "array", json!({ "command": "echo $AGENTD_ARRAY_INDEX" }), &["--array", "0-5%3"]);
        completed(&fleet, "array");
        for index in 0..6 {
            let log = ctl(new, &fleet, &["logs", &format!("array[{index}]")]).ok().stdout;
            assert_eq!(log, format!("{index}\n"));
        }
    });
    tally.case("a command in a running job, and its end", || {
        submit(new, &fleet, "sleeps", json!({ "command": "echo up; sleep 1000" }), &[]);
        said(&fleet, &["logs", "sleeps"], "up");
        ctl(new, &fleet, &["exec", "sleeps", "--", "sh", "-c", "exit 7"]).code(7);
        ctl(new, &fleet, &["cancel", "sleeps"]).ok();
        assert_eq!(fleet.client.ended("sleeps").state, "Canceled");
    });
    tally.case("a lost attempt is tried again", || {
        let command = "case $AGENTD_REPLICA in *.1.0) echo one; sleep 1000;; esac; echo two";
        let retry = json!({ "max_attempts": 2, "backoff": 1 });
        submit(new, &fleet, "retry", json!({ "command": command, "retry": retry }), &[]);
        said(&fleet, &["logs", "retry"], "one");
        fleet.nodes[0].shims().iter().for_each(|(_, pid)| signal(*pid, Signal::KILL));
        completed(&fleet, "retry");
        assert_eq!(ctl(new, &fleet, &["logs", "retry"]).ok().stdout, "two\n");
    });
    tally.case("it is replaced while a job runs", || {
        let go = fleet.home().join("go");
        let command = LINES.replace("-e go", &format!("-e {}", go.display()));
        submit(new, &fleet, "runs", json!({ "command": command }), &[]);
        said(&fleet, &["logs", "runs"], "line 9\n");
        replace(&mut fleet.nodes[0]);
        fleet.ready();
        fs::write(&go, "").expect("a file");
        completed(&fleet, "runs");
        check_lines(&ctl(new, &fleet, &["logs", "runs"]).ok().stdout, true);
    });
}
