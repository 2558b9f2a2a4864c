//! Group K: disks and processes that fail. What a store acknowledged it has, whatever happened in between; what it
//! did not finish is gone; and nobody shares a store who does not know of the other.

use std::fs;
use std::path::{Path, PathBuf};

use agent_cas::snapshot::{self, MaterializeError};
use agent_cas::{BlobStore, Disk, ReadError, Remote, WriteError, digest_of};
use agent_model::{Digest, failpoint};
use agent_tests::bounds::SmallDisk;
use agent_tests::client::{Client, runtime};
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};
use bytes::Bytes;

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "K1",
        promise: "killed at any step of storing, a controller has every blob it acknowledged",
        run: killed,
    },
    Row {
        id: "K2",
        promise: "an error of the disk at any step is told or tried again, and leaves no wrong blob",
        run: failing,
    },
    Row { id: "K3", promise: "a full disk refuses a tree and keeps nothing of it", run: full },
    Row { id: "K4", promise: "uploads that break off are reclaimed", run: broken_off },
    Row { id: "K5", promise: "two daemons never share a store", run: two_daemons },
];

/// Every step of storing a blob in a file of its own, by which each comes; and of storing small ones together,
/// by which a batch comes.
const STEPS: &[(&str, Kind)] = &[
    ("cas.blob.create", Kind::Each),
    ("cas.blob.write", Kind::Each),
    ("cas.blob.sync", Kind::Each),
    ("cas.blob.rename", Kind::Each),
    ("cas.directory.sync", Kind::Each),
    ("cas.segment.append", Kind::Batch),
    ("cas.segment.sync", Kind::Batch),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Each,
    Batch,
}

/// Twenty blobs that have files of their own, one that needs a stream, and twenty small ones; others for each
/// seed.
fn blobs(seed: u64) -> Vec<(Digest, Bytes)> {
    let sizes = (0..20).map(|i| 140_000 + i * 100).chain([2_500_000]).chain((0..20).map(|i| 3000 + i * 100));
    let make = |(i, size): (usize, usize)| {
        let text = format!("{seed}-{i} ");
        let bytes = Bytes::from(text.repeat(size / text.len() + 1));
        (digest_of(&bytes), bytes)
    };
    sizes.enumerate().map(make).collect()
}

/// Sends all of them, the small ones in a batch and the large one as a stream; those that were acknowledged.
fn send(client: &Client, blobs: &[(Digest, Bytes)]) -> Vec<Digest> {
    let results = runtime().block_on(Remote::new(client.channel()).write_batch(blobs.to_vec()));
    blobs.iter().zip(results).filter(|(_, result)| result.is_ok()).map(|((digest, _), _)| *digest).collect()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let listed = fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    listed.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Every file below `blobs/` is what its name says, and nothing is unfinished.
fn is_sound(fleet: &Fleet) {
    let cas = fleet.controller.state().join("cas");
    for blob in files(&cas.join("blobs")) {
        let digest = digest_of(&fs::read(&blob).expect("a blob"));
        let name = blob.file_name().expect("a name").to_string_lossy().into_owned();
        assert_eq!(name, format!("{}-{}", digest.hex(), digest.size));
    }
    assert_eq!(files(&cas.join("temp")), Vec::<PathBuf>::new(), "unfinished files");
}

fn has(fleet: &Fleet, digests: &[Digest]) {
    let remote = Remote::new(fleet.client.channel());
    let missing = runtime().block_on(remote.missing(digests)).expect("it says what it lacks");
    assert_eq!(missing, [], "acknowledged and gone");
    for read in runtime().block_on(remote.read_batch(digests.to_vec())) {
        read.expect("acknowledged and not to be read");
    }
}

fn killed(tally: &mut Tally, scale: &Scale) {
    let mut fleet = Fleet::started(&Setup::default());
    for (number, (step, kind)) in STEPS.iter().enumerate() {
        let visits: &[u64] = match kind {
            Kind::Each => scale.of(&[2], &[1, 2, 3, 5, 9, 15, 20]),
            Kind::Batch => &[1],
        };
        for visit in visits {
            tally.case(&format!("killed at visit {visit} of {step}"), || {
                let blobs = blobs(100 * number as u64 + visit);
                fleet.controller.kill();
                fleet.controller.set(failpoint::VARIABLE, &format!("{step}=kill@{visit}"));
                fleet.start();
                let client = fleet.client.clone();
                let sent = std::thread::scope(|scope| {
                    let sending = scope.spawn(|| send(&client, &blobs));
                    eventually("the controller is killed", SOON, || fleet.controller.ended());
                    // What it had not acknowledged is sent again by a client that has the patience.
                    fleet.controller.set(failpoint::VARIABLE, "");
                    fleet.controller.bounce();
                    sending.join().expect("the client")
                });
                fleet.ready();
                has(&fleet, &sent);
                // A stream cannot be repeated by who sends it; whoever has the file does that.
                assert!(sent.len() + 1 >= blobs.len(), "{} of {}", sent.len(), blobs.len());
                assert_eq!(send(&fleet.client, &blobs).len(), blobs.len());
                is_sound(&fleet);
            });
        }
    }
}

/// What a full disk says.
const FULL: u64 = 28;

fn failing(tally: &mut Tally, scale: &Scale) {
    // Full and broken; over a quota and read-only.
    let errors: &[u64] = scale.of(&[FULL, 5], &[FULL, 5, 122, 30]);
    let mut fleet = Fleet::started(&Setup::default());
    for (number, (step, kind)) in STEPS.iter().enumerate() {
        let visit = if *kind == Kind::Each { 3 } else { 1 };
        for error in errors {
            tally.case(&format!("error {error} at {step}"), || {
                let blobs = blobs(10_000 + 1000 * number as u64 + error);
                fleet.controller.kill();
                let trace = fleet.home().join(format!("trace-{number}-{error}"));
                let plan = format!("{step}=errno:{error}={visit},trace={}", trace.display());
                fleet.controller.set(failpoint::VARIABLE, &plan);
                fleet.start();
                let sent = send(&fleet.client, &blobs);
                assert!(std::fs::read(&trace).is_ok_and(|failed| !failed.is_empty()), "nothing failed");
                // It fails once; the client tries again what may be another answer later.
                assert_eq!(sent.len(), blobs.len(), "an error of a moment is told as the last word");
                has(&fleet, &sent);
                assert_eq!(send(&fleet.client, &blobs).len(), blobs.len(), "it goes on afterwards");
                is_sound(&fleet);
            });
        }
    }
}

fn full(tally: &mut Tally, _: &Scale) {
    let home = tempfile::tempdir().expect("a directory");
    let code = home.path().join("code");
    fs::create_dir(&code).expect("a directory");
    for i in 0..100 {
        fs::write(code.join(format!("{i}")), format!("{i} ").repeat(10_000)).expect("a file");
    }
    let scanned = snapshot::scan(&code).expect("a directory can be scanned");
    let store = Disk::open(&home.path().join("store")).expect("a store");
    runtime().block_on(snapshot::push(&scanned, &store, |_| {})).expect("the store takes it");
    let lay = |at: &Path| {
        runtime().block_on(snapshot::materialize(&store, scanned.root, &at.join("work"), None, &[]))
    };
    let is_empty =
        |at: &Path| assert_eq!(fs::read_dir(at).expect("a directory").count(), 0, "something is left");
    for (what, options) in [("too few bytes", "size=1m"), ("too few files", "size=64m,nr_inodes=60")] {
        tally.case(&format!("a tree on a disk with {what}"), || {
            let disk = SmallDisk::mount(options);
            let refused = lay(disk.path());
            let is_full = |error: &std::io::Error| error.kind() == std::io::ErrorKind::StorageFull;
            assert!(
                matches!(&refused, Err(MaterializeError::Write { source, .. }) if is_full(source)),
                "{refused:?}"
            );
            is_empty(disk.path());
        });
    }
    tally.case("a tree on a disk that is read-only", || {
        let disk = SmallDisk::mount("size=64m");
        disk.make_read_only();
        let refused = lay(disk.path());
        assert!(matches!(&refused, Err(MaterializeError::Write { .. })), "{refused:?}");
        is_empty(disk.path());
    });
    tally.case("a store on a disk that fills up, and goes on when there is room", || {
        let disk = SmallDisk::mount("size=1m");
        let small = Disk::open(&disk.path().join("store")).expect("a store");
        let ballast = disk.path().join("ballast");
        fs::write(&ballast, vec![0; 700_000]).expect("room for it");
        let pushed = runtime().block_on(snapshot::push(&scanned, &small, |_| {}));
        assert!(pushed.is_err(), "{pushed:?}");
        // Batches that were on their way beside the one that failed end by themselves.
        let temp = disk.path().join("store/temp");
        eventually("nothing is unfinished", SOON, || files(&temp).is_empty().then_some(()));
        assert_eq!(runtime().block_on(small.check(|_| {})).damaged, 0);
        fs::remove_file(ballast).expect("it is removed");
        let few: Vec<_> = blobs(1).into_iter().rev().take(3).collect();
        let kept = runtime().block_on(small.write_batch(few));
        kept.into_iter().for_each(|kept| kept.expect("there is room again"));
    });
    tally.case("a store on a disk that turned read-only", || {
        let disk = SmallDisk::mount("size=64m");
        let store = Disk::open(&disk.path().join("store")).expect("a store");
        // No small ones: a disk on which a file is open to be written cannot be made read-only like this.
        let first: Vec<_> = blobs(2).into_iter().take(3).collect();
        runtime().block_on(store.write_batch(first.clone())).into_iter().for_each(|kept| kept.expect("kept"));
        disk.make_read_only();
        let refused = runtime().block_on(store.write_batch(blobs(3)));
        assert!(refused.iter().all(Result::is_err), "a disk that cannot be written took a blob");
        let read = runtime().block_on(store.read_batch(first.iter().map(|(digest, _)| *digest).collect()));
        assert!(read.iter().all(Result::is_ok), "what is there can be read");
    });
}

fn broken_off(tally: &mut Tally, scale: &Scale) {
    let mut fleet = Fleet::started(&Setup::default());
    let many = scale.of(200, 1000);
    let temp = fleet.controller.state().join("cas/temp");
    tally.case(&format!("{many} uploads"), || {
        let remote = Remote::new(fleet.client.channel());
        for number in 0..many {
            let whole = Bytes::from(format!("{number} ").repeat(800_000));
            let digest = digest_of(&whole);
            let parts = [Ok(whole.slice(..1_200_000)), Err(ReadError::Absent { digest })];
            let sent = runtime().block_on(remote.write(digest, Box::pin(tokio_stream::iter(parts))));
            assert!(matches!(sent, Err(WriteError::Source { .. })), "{sent:?}");
            let missing = runtime().block_on(remote.missing(&[digest])).expect("it says what it lacks");
            assert_eq!(missing, [digest], "a part of a blob can be seen");
        }
        // A handful is kept for those who come back; a call that just broke off may still be on its way.
        eventually("the others are reclaimed", SOON, || (files(&temp).len() <= 16).then_some(()));
    });
    tally.case("after a crash nothing of them is left", || {
        fleet.controller.bounce();
        fleet.ready();
        is_sound(&fleet);
    });
}

fn two_daemons(tally: &mut Tally, _: &Scale) {
    let mut fleet = Fleet::started(&Setup::default());
    let kept = send(&fleet.client, &blobs(7));
    tally.case("a second daemon on the same state", || {
        let mut second = fleet.controller.command().spawn().expect("it starts");
        let ended = eventually("it gives up", SOON, || second.try_wait().expect("its own child"));
        assert_eq!(ended.code(), Some(75));
    });
    tally.case("the first goes on", || {
        assert!(fleet.controller.ended().is_none());
        has(&fleet, &kept);
        is_sound(&fleet);
    });
}
