//! The way back: state that a later release has opened is refused in words, and stays as it is.

#![allow(clippy::disallowed_methods, reason = "changes a database with the means of Python")]

use std::fs;
use std::path::Path;
use std::process::Command;

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, Ran, before, binaries, finish};

use crate::upgrade::kept;
use crate::upgrade::states;

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "B1",
        promise: "state of a later release is refused: what, why and what to do; and it stays as it is",
        run: refused,
    },
    Row {
        id: "B2",
        promise: "the release before takes back what this one had if no version rose, else it refuses it",
        run: taken_back,
    },
];

/// The databases of a box below its state directory.
const DATABASES: [&str; 2] = ["controller/db", "journal.db"];

/// What the daemon ends with when it is of no use to start it again.
const CONFIG: i32 = 78;

/// Runs a statement in a database; what it returns.
fn sql(database: &Path, statement: &str) -> String {
    const RUN: &str = "import sqlite3, sys\nc = sqlite3.connect(sys.argv[1])\n\
                       print(*(c.execute(sys.argv[2]).fetchone() or []))\nc.commit()\nc.close()";
    let ran = finish(Command::new("python3").args(["-c", RUN]).arg(database).arg(statement)).ok();
    ran.stdout.trim().to_owned()
}

/// The version of the schema of a database.
fn version(database: &Path) -> u32 {
    sql(database, "PRAGMA user_version").parse().expect("a number")
}

/// What a daemon says to a database whose version is one higher than it is now. It must be stopped.
fn one_higher(host: &Host, name: &str) -> Ran {
    let database = host.state().join(name);
    let known = version(&database);
    sql(&database, &format!("PRAGMA user_version = {}", known + 1));
    let whole = fs::read(&database).expect("a database");
    let ran = host.agentd(&["run"]);
    assert!(fs::read(&database).expect("a database") == whole, "{name} was changed");
    sql(&database, &format!("PRAGMA user_version = {known}"));
    ran.says(&format!("{} has version {}; this program knows {known}", database.display(), known + 1))
}

fn refused(tally: &mut Tally, _: &Scale) {
    let (mut host, _) = kept::unpacked();
    host.start();
    assert_eq!(host.stop(), 0);
    for name in DATABASES {
        tally.case(name, || {
            let ran = one_higher(&host, name).code(CONFIG);
            ran.says("agentd cannot start").says("install the later release again");
        });
    }
    tally.case("a daemon that knows it goes on with the jobs", || {
        host.start();
        host.wait_for("retry", &["Completed"]);
    });
}

fn taken_back(tally: &mut Tally, _: &Scale) {
    let mut host = states::host();
    host.use_programs(before::programs());
    host.start();
    states::submit(&host, "old", serde_json::json!({ "command": "echo old" }), &[]);
    host.wait_for("old", &["Completed"]);
    assert_eq!(host.stop(), 0);
    let versions = |host: &Host| DATABASES.map(|name| version(&host.state().join(name)));
    let known = versions(&host);
    host.use_programs(binaries());
    host.start();
    states::submit(&host, "runs", serde_json::json!({ "command": states::LINES }), &[]);
    states::said(&host, "runs", "line 9\n");
    assert_eq!(host.stop(), 0);
    let now = versions(&host);
    host.use_programs(before::programs());
    if known == now {
        tally.note(format!("versions of {DATABASES:?} are {now:?} in both: it is taken back"));
        tally.case("the controller's database, one version higher", || one_higher(&host, DATABASES[0]));
        tally.case("what this release had is taken back", || {
            host.start();
            states::let_go(&host, "runs.");
            host.wait_for("runs", &["Completed"]);
            states::check_lines(&host.ctl(&["logs", "runs"]).ok().stdout, true);
            assert_eq!(host.ctl(&["logs", "old"]).ok().stdout, "old\n");
        });
    } else {
        tally.note(format!("versions of {DATABASES:?} were {known:?} and are {now:?}: it is refused"));
        tally.case("what this release had is refused", || {
            let ran = host.agentd(&["run"]);
            assert_ne!(ran.code, 0);
            ran.says("this program knows").says("fix:");
        });
    }
}
