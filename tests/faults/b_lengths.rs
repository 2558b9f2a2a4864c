//! Group B, the rows about lengths that were promised: files of a job that are replaced, cut, or larger than there is
//! room for keep no end of a job back, and what was in them is told once.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use agent_proto::v1;
use agent_proto::v1::telemetry_client::TelemetryClient;
use agent_tests::bounds::SmallDisk;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};

/// The rows of this part of the group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "B8",
        promise: "a job that replaces or cuts its metrics file ends, and each metric is told once",
        run: replaced,
    },
    Row {
        id: "B9",
        promise: "what finds no room in the archive keeps no end back, and the job says what is missing",
        run: no_room,
    },
    Row {
        id: "B10",
        promise: "outputs that change while they are stored cost the others nothing, and are named",
        run: unsteady,
    },
];

/// What a job does with its metrics file `$M` after `m1` was told, and what is told in the end. `r N` prints a record.
struct Change {
    name: &'static str,
    script: &'static str,
    told: &'static [&'static str],
}

const CHANGES: &[Change] = &[
    Change { name: "nothing", script: "r 2 >> $M", told: &["m1", "m2"] },
    Change { name: "removed, appended", script: "rm -f $M; r 2 >> $M; r 3 >> $M", told: &["m1", "m2", "m3"] },
    Change { name: "renamed over", script: "r 2 > $M.t; mv $M.t $M", told: &["m1", "m2"] },
    Change {
        name: "written anew with all that was there, renamed over",
        script: "(r 1; r 2) > $M.t; mv $M.t $M; (r 1; r 2; r 3) > $M.t; mv $M.t $M",
        told: &["m1", "m2", "m3"],
    },
    Change { name: "cut, appended", script: ": > $M; r 2 >> $M", told: &["m1", "m2"] },
    Change {
        name: "cut, more written than before",
        script: "(r 2; r 3; r 4) > $M",
        told: &["m1", "m2", "m3", "m4"],
    },
    Change { name: "a directory", script: "rm -f $M; mkdir $M", told: &["m1"] },
    Change { name: "a pipe", script: "rm -f $M; mkfifo $M", told: &["m1"] },
    Change { name: "a link", script: "rm -f $M; r secret > hidden; ln -s $PWD/hidden $M", told: &["m1"] },
    Change { name: "1 TB of nothing", script: "truncate -s 1T $M; r 2 >> $M", told: &["m1", "m2"] },
    Change { name: "removed for good", script: "r 2 >> $M; rm -f $M", told: &["m1", "m2"] },
];

/// What is not there while the file is changed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Away {
    Nobody,
    Node,
    Controller,
}

/// How often each metric of a job was told.
fn told(fleet: &Fleet, job: &str) -> BTreeMap<String, usize> {
    let read = || {
        let request = v1::ReadTrackingRequest { job: job.to_owned(), ..v1::ReadTrackingRequest::default() };
        fleet.client.wait(async {
            let mut client = TelemetryClient::new(fleet.client.channel());
            let (mut chunks, mut text) = (client.read_tracking(request).await?.into_inner(), Vec::new());
            while let Some(chunk) = chunks.message().await? {
                text.extend(chunk.lines);
            }
            Ok(text)
        })
    };
    let text = eventually("the metrics are read", SOON, || read().ok());
    let mut told = BTreeMap::new();
    for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let record: serde_json::Value = serde_json::from_slice(line).expect("each line is a record");
        if let Some(name) = record["metric"].as_str() {
            *told.entry(name.to_owned()).or_default() += 1;
        } else {
            assert!(record["note"].is_string(), "{record}");
        }
    }
    told
}

fn replaced(tally: &mut Tally, scale: &Scale) {
    for away in [Away::Nobody, Away::Node, Away::Controller] {
        replaced_while(tally, scale, away);
    }
}

/// All changes at once, each by a job that ends then and by one that is canceled then.
fn replaced_while(tally: &mut Tally, _: &Scale, away: Away) {
    let mut fleet = Fleet::new(&Setup { nodes: 1, slots: 32, ..Setup::default() });
    fleet.controller.configure("archive_quota: 64MiB\n"); // a mistake must not fill the disk of whoever tests
    fleet.start();
    let gate = fleet.home().join("gate");
    let start = |change: &Change, canceled: bool| {
        let then = if canceled { "exec sleep 1000" } else { "exit 0" };
        fleet.client.run(&format!(
            "M=$AGENTD_METRICS; r() {{ echo \"{{\\\"metric\\\":\\\"m$1\\\",\\\"value\\\":1}}\"; }}
            r 1 >> $M; while [ ! -e {gate} ]; do sleep 0.1; done
            {script}; touch {gate}.$AGENTD_JOB; {then}",
            gate = gate.display(),
            script = change.script,
        ))
    };
    let jobs: Vec<(&Change, bool, String)> = CHANGES
        .iter()
        .flat_map(|change| [false, true].map(|canceled| (change, canceled, start(change, canceled))))
        .collect();
    for (_, _, job) in &jobs {
        eventually("the first metric is stored", SOON, || (!told(&fleet, job).is_empty()).then_some(()));
    }
    match away {
        Away::Nobody => {}
        Away::Node => fleet.nodes[0].kill(),
        Away::Controller => fleet.controller.kill(),
    }
    fs::write(&gate, "").expect("a file");
    for (_, _, job) in &jobs {
        eventually("the file is changed", SOON, || gate.with_extension(job).exists().then_some(()));
    }
    match away {
        Away::Nobody => {}
        Away::Node => fleet.nodes[0].spawn(),
        Away::Controller => fleet.controller.spawn(),
    }
    for (_, _, job) in jobs.iter().filter(|(_, canceled, _)| *canceled) {
        eventually("the cancel is taken", SOON, || fleet.client.cancel(job).ok());
    }
    let (mut tried, mut wrong) = (0, Vec::new());
    // By then every one has ended, or waits for what will not come.
    let deadline = Instant::now() + Duration::from_secs(60);
    for (change, canceled, job) in &jobs {
        let wanted = if *canceled { "Canceled" } else { "Completed" };
        let ended = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let left = deadline.saturating_duration_since(Instant::now());
            fleet.client.reached_within(left.max(Duration::from_secs(1)), job, &[wanted])
        }));
        let told = told(&fleet, job);
        let once = told.values().all(|times| *times == 1);
        let fault = ended.as_ref().ok().and_then(|job| job.outcome.clone()?.fault);
        tried += 1;
        if ended.is_err() || fault.is_some() || !once || told.keys().ne(change.told.iter().copied()) {
            wrong.push(format!(
                "{}, {wanted}: {job} is {}; told {told:?}; {fault:?}",
                change.name,
                fleet.client.job(job).state
            ));
        }
    }
    tally.count(tried, &format!("{away:?} away"), &wrong);
}

fn no_room(tally: &mut Tally, scale: &Scale) {
    tally.case("a log and metrics beyond the archive's quota", || {
        let mut fleet = Fleet::new(&Setup { nodes: 1, slots: 2, ..Setup::default() });
        fleet.controller.configure("archive_quota: 1MiB\n");
        fleet.start();
        let line = r#"{"metric":"m","value":1}"#;
        let job = fleet.client.run(&format!(
            "yes 'a line' | head -c 3M; yes '{line}' | head -c 1M >> $AGENTD_METRICS; sleep 1"
        ));
        let ended = fleet.client.ended(&job);
        let fault = ended.outcome.clone().and_then(|outcome| outcome.fault).expect("it is told");
        assert_eq!((ended.state.as_str(), fault.code.as_str()), ("Completed", "CTL-101"), "{ended:?}");
        for what in ["1 MiB of the 3 MiB of the log", "256 KiB of the 1 MiB of the metrics"] {
            assert!(fault.why.iter().any(|why| why.contains(what)), "{what}: {fault:?}");
        }
        assert_eq!(fleet.client.log(&job, "job").len(), 1 << 20);
    });
    for canceled in scale.of(&[true][..], &[true, false]) {
        tally.case(&format!("a disk that the archive fills, canceled: {canceled}"), || {
            full_archive(*canceled)
        });
    }
}

/// A log that is larger than the disk of the controller, and questions meanwhile.
fn full_archive(canceled: bool) {
    let disk = SmallDisk::mount("size=96m");
    let mut fleet = Fleet::new(&Setup { nodes: 1, slots: 4, ..Setup::default() });
    disk.hold(&fleet.controller);
    fleet.start();
    let written = fleet.home().join("written");
    let end = if canceled { "exec sleep 1000" } else { "exit 0" };
    let job = fleet
        .client
        .run(&format!("yes 'a line of a log' | head -c 150M; touch {}; {end}", written.display()));
    eventually("the log is written", SOON, || written.exists().then_some(()));
    let is_full = || fleet.controller.log().contains("cannot store log now").then_some(());
    eventually("the archive is full", SOON, is_full);
    fleet.client.nodes().expect("an answer while the archive is full");
    let other = fleet.client.run("echo other");
    eventually("the other job runs or ended", SOON, || {
        (!matches!(fleet.client.job(&other).state.as_str(), "Queued" | "Preparing")).then_some(())
    });
    if canceled {
        fleet.client.cancel(&job).expect("a cancel is taken while the archive is full");
    }
    let ended = fleet.client.ended(&job);
    let fault = ended.outcome.clone().and_then(|outcome| outcome.fault).expect("it is told");
    assert_eq!(ended.state, if canceled { "Canceled" } else { "Completed" }, "{ended:?}");
    assert!(fault.why.iter().any(|why| why.contains("150 MiB of the log")), "{fault:?}");
    assert_eq!(fleet.client.ended(&other).state, "Completed", "{:?}", fleet.client.job(&other));
}

/// Files that somebody else writes, cuts or replaces while they are stored.
fn unsteady(tally: &mut Tally, _: &Scale) {
    const SIZE: u64 = 64 << 20;
    /// What is done to the file in each round.
    type Writer = fn(&Path, u64);
    let changes: [(&str, Writer); 3] = [
        ("changes", |path, round| {
            open(path).write_all_at(&round.to_le_bytes(), round % SIZE).expect("a write")
        }),
        ("grows", |path, _| {
            open(path).set_len(fs::metadata(path).expect("a file").len() + 1).expect("a length")
        }),
        ("shrinks", |path, round| open(path).set_len(SIZE - round % SIZE).expect("a length")),
    ];
    for (what, change) in changes {
        tally.case(&format!("one of the outputs {what} while it is stored"), || {
            let fleet = Fleet::one_box();
            let job = fleet
                .client
                .run("echo steady > outputs/steady; head -c 64M /dev/urandom > outputs/other; sleep 1");
            fleet.client.reached(&job, &["Running"]);
            let path = eventually("the file is written", SOON, || {
                let path = fleet.controller.job_dirs().first()?.join("job/work/outputs/other");
                fs::metadata(&path).is_ok_and(|found| found.len() == SIZE).then_some(path)
            });
            let over = AtomicBool::new(false);
            let ended = std::thread::scope(|scope| {
                scope.spawn(|| {
                    (1..).take_while(|_| !over.load(Ordering::Relaxed)).for_each(|round| change(&path, round))
                });
                let ended = std::panic::catch_unwind(AssertUnwindSafe(|| fleet.client.ended(&job)));
                over.store(true, Ordering::Relaxed);
                ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            let outcome = ended.outcome.expect("an outcome");
            let stored = outcome.artifacts.map_or(0, |artifacts| artifacts.files);
            let names = |fault: &v1::Fault| fault.why.iter().any(|why| why.contains("outputs/other"));
            let named = outcome.fault.as_ref().is_some_and(names);
            // It may just have held still; then it is there.
            let expected = if named { ("Failed", 1) } else { ("Completed", 2) };
            assert_eq!((ended.state.as_str(), stored), expected, "{:?}", outcome.fault);
        });
    }
}

fn open(path: &Path) -> fs::File {
    fs::File::options().write(true).open(path).expect("a file")
}
