//! An `agentctl` of the release before, as people have it on their laptops, and a daemon of this one.

use std::fs;

use agent_tests::before;
use agent_tests::table::{Row, Scale, Tally};
use serde_json::json;

use crate::upgrade::states;

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "C1",
    promise: "an agentctl of the release before submits, follows, shows, cancels and fetches",
    run: commands,
}];

fn commands(tally: &mut Tally, _: &Scale) {
    let mut host = states::host();
    host.start();
    host.use_programs(before::programs());
    tally.case("submit, logs -f, wait", || {
        states::submit(&host, "one", json!({ "command": "echo one; echo kept >outputs/kept; exit 3" }), &[]);
        assert_eq!(host.ctl(&["logs", "-f", "one"]).code(3).stdout, "one\n");
        host.ctl(&["wait", "one"]).code(3);
    });
    tally.case("run", || {
        let dir = host.project("code", &[("x", "from the code\n")]);
        let ran = host.ctl(&["run", dir.to_str().expect("UTF-8"), "--", "cat", "x"]).ok();
        assert_eq!(ran.stdout, "from the code\n");
    });
    tally.case("status, jobs, nodes, show, why", || {
        let status = host.ctl(&["status"]).ok().stdout;
        assert!(status.contains("box"), "{status}");
        let jobs = host.ctl(&["jobs", "--json"]).ok().json();
        assert_eq!(jobs["jobs"].as_array().expect("a list").len(), 2, "{jobs}");
        assert!(host.ctl(&["nodes"]).ok().stdout.contains("box"));
        let one = host.show("one");
        assert_eq!(one["exit_code"], 3);
        let why = host.ctl(&["why", "one"]).ok().stdout;
        assert!(why.contains(one["fault"]["code"].as_str().expect("it failed")), "{why}");
    });
    tally.case("download", || {
        let to = host.home().join("got");
        host.ctl(&["download", "one", "-o", to.to_str().expect("UTF-8")]).ok();
        assert_eq!(fs::read_to_string(to.join("outputs/kept")).expect("an output"), "kept\n");
    });
    tally.case("exec, cancel", || {
        states::submit(&host, "sleeps", json!({ "command": "echo up; sleep 1000" }), &[]);
        states::said(&host, "sleeps", "up");
        host.ctl(&["exec", "sleeps", "--", "sh", "-c", "exit 7"]).code(7);
        host.ctl(&["cancel", "--wait", "sleeps"]).ok();
        assert_eq!(host.job_state("sleeps"), "Canceled");
    });
    tally.case("an array, and a rerun", || {
        states::submit(&host, "array", json!({ "command": "echo $AGENTD_ARRAY_INDEX" }), &["--array", "0-3"]);
        host.ctl(&["wait", "array"]).ok();
        assert_eq!(host.ctl(&["logs", "array[2]"]).ok().stdout, "2\n");
        let again = host.ctl(&["rerun", "array"]).ok().stdout.trim().to_owned();
        host.ctl(&["wait", &again]).ok();
        host.ctl(&["rm", "array"]).ok();
    });
}
