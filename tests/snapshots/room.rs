//! Group G: room is made while everything goes on. What somebody needs never goes, what nobody needs does.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use agent_cas::{BlobStore, Remote, snapshot};
use agent_model::Digest;
use agent_tests::client::{Client, runtime};
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually, within};
use tonic::Code;

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "G1",
    promise: "blobs are collected all the time, by a daemon that is killed, and no job lacks one",
    run: collected,
}];

/// How often everything that may go is told to.
const EVERY: Duration = Duration::from_millis(50);

/// Jobs that are submitted at a time.
const AT_ONCE: u32 = 3;

/// A project that shares half of its bytes with all others; its job checks all of them and leaves a result.
fn project(home: &Path, number: u32) -> std::path::PathBuf {
    let dir = home.join(format!("project-{number}"));
    fs::create_dir_all(dir.join("d/e")).expect("a directory");
    for (file, text) in
        [("shared", "shared".to_owned()), ("own", format!("own {number}")), ("d/e/own", format!("{number}"))]
    {
        fs::write(dir.join(file), text.repeat(3000)).expect("a file");
    }
    fs::write(dir.join("d/shared"), vec![7; 1 << 20]).expect("a file");
    fs::write(dir.join("d/large"), format!("large {number}").repeat(20_000)).expect("a file");
    let check = format!(
        "test $(cat shared own d/e/own d/shared d/large | wc -c) = {} && cp own outputs/result",
        bytes(&dir)
    );
    let job = format!("command: {}\ncode: .\nenvironment: host\n", serde_json::Value::from(check));
    fs::write(dir.join("job.yml"), job).expect("a file");
    dir
}

fn bytes(dir: &Path) -> u64 {
    let size = |file: &str| fs::metadata(dir.join(file)).expect("a file").len();
    ["shared", "own", "d/e/own", "d/shared", "d/large"].into_iter().map(size).sum()
}

/// The job of the project, which is submitted again and again while the daemon is away.
fn submit(client: &Client, dir: &Path) -> String {
    eventually("the job is taken", SOON, || client.try_submit_dir(dir).ok())
}

fn collected(tally: &mut Tally, scale: &Scale) {
    let mut fleet = Fleet::new(&Setup { controller: "store_size: 1MiB\n".into(), ..Setup::default() });
    fleet.controller.set("AGENTD_TEST_BLOB_LEASE", "1s");
    fleet.start();
    let (home, client) = (fleet.home().to_owned(), fleet.client.clone());
    let (wanted, next, jobs) = (scale.of(45u32, 500), AtomicU64::new(0), Mutex::new(Vec::new()));
    let (over, rounds, mut kills) = (AtomicBool::new(false), AtomicU64::new(0), 0);
    std::thread::scope(|scope| {
        let submitting: Vec<_> = (0..AT_ONCE)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= u64::from(wanted) {
                            return;
                        }
                        let job = submit(&client, &project(&home, number as u32));
                        jobs.lock().expect("a list").push(job);
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                rounds.fetch_add(u64::from(client.collect(true).is_ok()), Ordering::Relaxed);
                std::thread::sleep(EVERY);
            }
        });
        let mut chance = scale.chance();
        while submitting.iter().any(|thread| !thread.is_finished()) {
            std::thread::sleep(chance.millis(1500, 3500));
            fleet.controller.kill();
            fleet.controller.spawn();
            kills += 1;
        }
        fleet.ready();
        for job in jobs.lock().expect("a list").iter() {
            tally.case(&format!("job {job}"), || {
                let ended = fleet.client.ended(job);
                let fault = ended.outcome.and_then(|outcome| outcome.fault);
                assert_eq!(ended.state, "Completed", "{fault:?}");
            });
        }
        over.store(true, Ordering::Relaxed);
    });
    tally.note(format!("{} collections, {kills} kills", rounds.load(Ordering::Relaxed)));
    tally.case("there were collections and kills", || {
        assert!(rounds.load(Ordering::Relaxed) > 10 && kills > 0);
    });
    let jobs = jobs.into_inner().expect("a list");
    tally.case("every result is there, and nothing that nobody needs", || only_results(&fleet, &jobs));
}

/// After the last collection the store has what the jobs left, and nothing else.
fn only_results(fleet: &Fleet, jobs: &[String]) {
    let mut last = None;
    let collected = within(SOON, || match fleet.client.collect(true) {
        Ok(told) => {
            // An environment that the box keeps has a build log.
            let is_kept = |reason: &str| matches!(reason, "outputs" | "environments");
            let is_all = told.stays.iter().all(|stay| is_kept(&stay.reason) || stay.blobs == 0);
            last = Some(told);
            last.take_if(|_| is_all)
        }
        // The daemon was just started, and its node has not said yet what it needs.
        Err(status) => {
            assert_eq!(status.code(), Code::Unavailable, "{status}");
            None
        }
    });
    let collected = collected.unwrap_or_else(|| panic!("something else stays: {last:?}"));
    let remote = Remote::new(fleet.client.channel());
    let mut needed = BTreeSet::new();
    for job in jobs {
        let outcome = fleet.client.job(job).outcome.expect("it has ended");
        let root: Digest = outcome.artifacts.expect("it left something").root.parse().expect("a digest");
        let listed = runtime().block_on(snapshot::list(&remote, root)).expect("it is listed");
        assert_eq!(listed.len(), 1, "{listed:?}");
        needed.extend(listed.into_iter().map(|entry| entry.digest));
    }
    let digests: Vec<Digest> = needed.iter().copied().collect();
    assert_eq!(runtime().block_on(remote.missing(&digests)).expect("it says so"), []);
    // Of each result the file, and the two directories on the way to it; those with one name are shared.
    let outputs = collected.stays.iter().find(|stay| stay.reason == "outputs");
    let stays = outputs.map_or(0, |stay| stay.blobs);
    let most = 3 * needed.len() as u64;
    assert!(stays >= needed.len() as u64 && stays <= most, "{stays} blobs for {} results", needed.len());
}
