//! Group A: jobs, leases and the control plane.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use agent_tests::fleet::{Daemon, Fleet, Setup};
use agent_tests::{SOON, eventually, witness};

use crate::row::{Row, Scale, Tally};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "A4",
    promise: "a daemon killed at any instant costs its jobs nothing: not a line, not a restart",
    run: kill_agent,
}];

/// Kills over live jobs: the same supervisors, no line lost or doubled.
fn kill_agent(scale: &Scale) -> Tally {
    const LINES: u64 = 20_000;
    let (mut tally, mut chance) = (Tally::default(), scale.chance());
    let (count, kills) = (scale.of(4, 20), scale.of(20, 200));
    let mut fleet = Fleet::started(&Setup { nodes: 1, slots: count, ..Setup::default() });
    let go = fleet.home().join("go");
    let wishes = format!("--lines {LINES} --rate 100 --until {}", go.display());
    let jobs: Vec<String> = (0..count).map(|_| fleet.submit(&wishes)).collect();
    for job in &jobs {
        fleet.client.reached(job, &["Running"]);
    }
    let before = instances(fleet.node());
    let mut adopted = Vec::new();
    for kill in 0..kills {
        let pause = chance.millis(0, 900);
        std::thread::sleep(pause);
        tally.case(&format!("kill {kill} after {pause:?}"), || {
            fleet.node().kill();
            let (before_log, begun) = (fleet.node().log().len(), Instant::now());
            fleet.node().spawn();
            eventually("every command is found", SOON, || {
                (found(&fleet.node().log()[before_log..]) >= count).then_some(())
            });
            adopted.push(begun.elapsed());
            assert_eq!(instances(fleet.node()), before, "the supervisors changed");
        });
    }
    fs::write(go, "").expect("the sign to end");
    for job in &jobs {
        tally.case(&format!("the end of {job}"), || whole(&fleet, job, LINES));
    }
    adopted.sort();
    tally.note(format!("adoption of {count} jobs: p50 {:?}, p99 {:?}", at(&adopted, 50), at(&adopted, 99)));
    tally
}

/// The job ended well in its first attempt, was executed once, and all its lines are there.
#[track_caller]
fn whole(fleet: &Fleet, job: &str, lines: u64) {
    let ended = fleet.client.ended(job);
    assert_eq!((ended.state.as_str(), ended.epoch), ("Completed", 1), "{ended:?}");
    let found = witness::lines(&fleet.client.log(job, "job"), lines);
    assert!(found.is_whole() && found.read == lines, "{job}: {found:?}");
    let execs = fleet.witness.execs();
    assert_eq!(execs.get(&(job.to_owned(), 1)), Some(&1), "{job} was executed {execs:?}");
}

/// The supervisor of every replica by its directory.
fn instances(daemon: &Daemon) -> BTreeMap<PathBuf, String> {
    let read = |dir: PathBuf| {
        let text = fs::read_to_string(dir.join("hello.json")).ok()?;
        let hello: serde_json::Value = serde_json::from_str(&text).ok()?;
        Some((dir, hello["instance"].as_str()?.to_owned()))
    };
    daemon.job_dirs().into_iter().filter_map(read).collect()
}

/// How many commands a life of the daemon with this log found running.
fn found(log: &str) -> usize {
    log.matches("found the command running").count()
}

/// The value below which so many of a hundred lie; the values are sorted.
fn at(sorted: &[Duration], of_a_hundred: usize) -> Duration {
    let index = (sorted.len() * of_a_hundred).div_ceil(100).saturating_sub(1);
    sorted.get(index).copied().unwrap_or_default()
}
