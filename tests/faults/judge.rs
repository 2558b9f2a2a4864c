//! What must hold of a job whatever was done around it, and what is done around it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent_proto::v1;
use agent_tests::chance::Chance;
use agent_tests::client::is_over;
use agent_tests::fleet::{Daemon, Fleet};
use agent_tests::witness;

use crate::faults::look;

/// The job ended well in its first attempt, was executed once, and all its lines are there.
#[track_caller]
pub(crate) fn whole(fleet: &Fleet, job: &str, lines: u64) {
    assert_eq!(whole_after_loss(fleet, job, lines), 1, "{job}");
}

/// The same where the controller lost records: the number of the first attempt may be above a gap. Returns it.
#[track_caller]
pub(crate) fn whole_after_loss(fleet: &Fleet, job: &str, lines: u64) -> u64 {
    let ended = fleet.client.ended(job);
    assert!(ended.state == "Completed" && (ended.epoch == 1 || ended.epoch > 1000), "{ended:?}");
    let found = witness::lines(&fleet.client.log(job, "job"), lines);
    assert!(found.is_whole() && found.read == lines, "{job}: {found:?}");
    let execs = fleet.witness.execs();
    let ran: Vec<_> = execs.iter().filter(|((of, _), _)| of == job).collect();
    assert_eq!(ran, [(&(job.to_owned(), ended.epoch), &1)], "{job} was executed {execs:?}");
    ended.epoch
}

/// What the job is said to have come to is what it came to: `Completed` only with its last words, its exit
/// and every line, or word of how many
/// were dropped where; a failure only with a fault that has a name; no attempt executed twice, no two at once.
#[track_caller]
pub(crate) fn truthful(fleet: &Fleet, job: &str, lines: u64) -> v1::Job {
    let ended = fleet.client.ended(job);
    let seen = fleet.witness.of(job);
    let outcome = ended.outcome.clone().unwrap_or_default();
    let count =
        |kind: &str| seen.iter().filter(|seen| seen.kind == kind && seen.epoch == ended.epoch).count();
    let code = outcome.fault.as_ref().map_or("", |fault| fault.code.as_str());
    match ended.state.as_str() {
        "Completed" => {
            assert_eq!((count("exec"), count("end")), (1, 1), "{job} is not complete: {ended:?}");
            assert_eq!(outcome.exit.and_then(|exit| exit.kind), Some(v1::exit::Kind::Code(0)), "{ended:?}");
            let found = witness::lines(&fleet.client.log(job, "job"), lines);
            let told: u64 = found.strange.iter().map(|line| dropped(line).unwrap_or(u64::MAX)).sum();
            let in_order = (found.duplicated, found.reordered) == (0, 0);
            assert!(in_order && found.lost == told, "{job} is complete, its log is not: {found:?}");
        }
        "Failed" => assert!(!code.is_empty(), "{job} failed and nobody says why: {ended:?}"),
        "Canceled" => assert!(ended.cancel_requested, "{job} was canceled and nobody asked: {ended:?}"),
        other => panic!("{job} ended as {other}"),
    }
    let twice = fleet.witness.run_twice();
    assert!(twice.is_empty(), "{twice:?}");
    let overlaps = fleet.witness.overlaps();
    assert!(overlaps.is_empty(), "{overlaps:?}");
    ended
}

/// How many lines the log says were dropped at this place.
fn dropped(line: &str) -> Option<u64> {
    let (lines, _) = line.strip_prefix("[agentd: ")?.split_once(" lines of output were dropped here")?;
    lines.rsplit(' ').next()?.parse().ok()
}

/// The supervisor of every replica by its directory.
pub(crate) fn instances(daemon: &Daemon) -> BTreeMap<PathBuf, String> {
    let read = |dir: PathBuf| {
        let text = fs::read_to_string(dir.join("hello.json")).ok()?;
        let hello: serde_json::Value = serde_json::from_str(&text).ok()?;
        Some((dir, hello["instance"].as_str()?.to_owned()))
    };
    daemon.job_dirs().into_iter().filter_map(read).collect()
}

/// The value below which so many of a hundred lie, for people.
pub(crate) fn percentile(times: &mut [Duration], of_a_hundred: usize) -> String {
    times.sort();
    let index = (times.len() * of_a_hundred).div_ceil(100).saturating_sub(1);
    times.get(index).map_or_else(|| "nothing".to_owned(), |time| format!("{:.2} s", time.as_secs_f64()))
}

/// What is wrong with a database that nobody has open, looked at in a copy; nothing when it is whole.
pub(crate) fn broken(database: &Path) -> Option<String> {
    const CHECK: &str = "
import sqlite3, sys
try:
    print(sqlite3.connect(sys.argv[1]).execute('pragma integrity_check').fetchone()[0])
except sqlite3.Error as error:
    print(error)
";
    let said = in_a_copy(database, CHECK);
    (said != "ok").then_some(said)
}

/// Everything a database that nobody has open holds, read in a copy; an error is an answer too.
pub(crate) fn contents(database: &Path) -> String {
    const DUMP: &str = "
import sqlite3, sys
try:
    print(*sqlite3.connect(sys.argv[1]).iterdump(), sep='\\n')
except sqlite3.Error as error:
    print(error)
";
    in_a_copy(database, DUMP)
}

fn in_a_copy(database: &Path, script: &str) -> String {
    let copy = tempfile::tempdir().expect("a temporary directory");
    for ending in ["", "-wal"] {
        let from = PathBuf::from(format!("{}{ending}", database.display()));
        let _ = fs::copy(from, copy.path().join(format!("db{ending}"))); // a database need not have both
    }
    let said = look::python(script, &[copy.path().join("db").to_str().expect("UTF-8")]).stdout;
    String::from_utf8_lossy(&said).trim().to_owned()
}

/// Something that is done again and again at random instants.
#[derive(Debug)]
pub(crate) struct Every {
    from: u64,
    to: u64,
    due: Instant,
}

impl Every {
    /// First and then again after a time between the two, in milliseconds.
    pub(crate) fn new(chance: &mut Chance, from: u64, to: u64) -> Every {
        Every { from, to, due: Instant::now() + chance.millis(from, to) }
    }

    /// Whether it is time; then it is not for a while.
    pub(crate) fn is_due(&mut self, chance: &mut Chance) -> bool {
        let due = Instant::now() >= self.due;
        if due {
            self.due = Instant::now() + chance.millis(self.from, self.to);
        }
        due
    }
}

/// Looks at all jobs from time to time: nothing that ended changes, and whatever has not ended belongs to
/// somebody.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    /// How often it looked.
    pub(crate) taken: u32,
    /// What it saw that must not be.
    pub(crate) complaints: Vec<String>,
    ended: BTreeMap<String, String>,
}

impl Samples {
    /// Looks once; a controller that does not answer now is asked another time.
    pub(crate) fn take(&mut self, fleet: &Fleet) {
        let Ok(jobs) = fleet.client.jobs(false) else { return };
        self.taken += 1;
        for job in jobs {
            let known = self.ended.get(&job.job).cloned();
            match known {
                Some(state) if state != job.state => {
                    self.complaints.push(format!("{} was {state} and is {}", job.job, job.state));
                }
                None if is_over(&job) => {
                    self.ended.insert(job.job.clone(), job.state.clone());
                }
                _ => {}
            }
            if !is_over(&job) && job.state != "Queued" && job.replicas.is_empty() {
                self.complaints.push(format!("{} is {} and belongs to no node", job.job, job.state));
            }
        }
    }
}

/// The jobs a controller has, against those it acknowledged: what is lost, and what nobody ever submitted.
pub(crate) fn lost_and_unexpected(fleet: &Fleet, acknowledged: &[String]) -> Vec<String> {
    let jobs = fleet.client.jobs(false).expect("the controller answers");
    let known: BTreeSet<&str> = jobs.iter().map(|job| job.job.as_str()).collect();
    let wanted: BTreeSet<&str> = acknowledged.iter().map(String::as_str).collect();
    let lost = wanted.difference(&known).map(|job| format!("{job} is lost"));
    lost.chain(known.difference(&wanted).map(|job| format!("{job} was never submitted"))).collect()
}
