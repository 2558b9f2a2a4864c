//! A state directory that the release before left, in `fixtures`: opened by this release.
//!
//! `AGENT_UPDATE_FIXTURES=1 tests/run upgrade K1` records it anew with the programs of that release: a box with the jobs
//! of [`states`], as if its machine had lost its power, and what `agentctl` said of those that had ended.

#![allow(clippy::disallowed_methods, reason = "packs and unpacks with tar, and reads a switch")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, SOON, before, eventually, finish, root, signal};
use rustix::process::Signal;
use serde_json::Value;

use crate::upgrade::states::{self, Meanwhile};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "K1",
    promise: "the state that the release before left is opened, and each of its jobs has one true result",
    run: opened,
}];

/// Beside the state directory in the archive: what was said of jobs that had ended.
const TOLD: &str = "told.json";

fn fixture() -> PathBuf {
    root().join("tests/upgrade/fixtures/state.tar.gz")
}

/// A box with what the release before left; no daemon runs. And what that one said of jobs that had ended.
pub(crate) fn unpacked() -> (Host, Value) {
    let host = states::host();
    finish(Command::new("tar").arg("-xzf").arg(fixture()).arg("-C").arg(host.home())).ok();
    let told = fs::read_to_string(host.home().join(TOLD)).expect("it is in the archive");
    (host, serde_json::from_str(&told).expect("JSON"))
}

fn opened(tally: &mut Tally, _: &Scale) {
    let (mut host, told) = unpacked();
    tally.case("the daemon starts", || host.start());
    states::go_on(tally, &host, &told, Meanwhile::Gone);
}

/// Records the fixture, if the environment says so.
pub(crate) fn record_if_asked() {
    if std::env::var_os("AGENT_UPDATE_FIXTURES").is_none() {
        return;
    }
    let mut host = states::host();
    host.use_programs(before::programs());
    host.start();
    let told = states::begin(&mut host);
    fs::write(host.home().join(TOLD), told.to_string()).expect("a file");
    eventually("every process is gone", SOON, || {
        let left = host.processes();
        left.iter().for_each(|pid| signal(*pid, Signal::KILL));
        left.is_empty().then_some(())
    });
    let mut tar = Command::new("tar");
    tar.env("GZIP", "-9").args([
        "--sparse",
        "--sort=name",
        "--numeric-owner",
        "--exclude=*-shm",
        "--exclude=*.sock",
    ]);
    finish(tar.arg("-czf").arg(fixture()).arg("-C").arg(host.home()).args([TOLD, "agentd"])).ok();
}
