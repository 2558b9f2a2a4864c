//! Group H: the hostile corpus, to a store on disk and through a controller. Each case must meet its fate, within
//! bounds of time and memory, and leave nothing anywhere but what it is allowed to.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use agent_cas::{BlobStore, Disk, Remote, WriteError};
use agent_model::Digest;
use agent_tests::client::runtime;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::table::{Row, Scale, Tally};
use bytes::Bytes;

use crate::snapshots::corpus::{self, Case, Fate};
use crate::snapshots::probe::{Attempt, MEMORY, PROCESSOR, attempt, peak};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "H1", promise: "names that are no names are refused, odd ones kept as they are", run: names },
    Row { id: "H2", promise: "links that lead out, or help to, are refused", run: links },
    Row { id: "H3", promise: "what is not written in the one form there is, is refused", run: encodings },
    Row { id: "H4", promise: "contents that are not what was named reach nobody", run: contents },
    Row {
        id: "H5",
        promise: "trees that are far larger than they look are refused at their door",
        run: shapes,
    },
    Row { id: "H6", promise: "the corpus has at least 250 different snapshots", run: different },
];

/// Blobs that are sent together.
const TOGETHER: usize = 500;

fn names(tally: &mut Tally, _: &Scale) {
    tried(tally, corpus::names());
}

fn links(tally: &mut Tally, _: &Scale) {
    tried(tally, corpus::links());
}

fn encodings(tally: &mut Tally, _: &Scale) {
    tried(tally, corpus::encodings());
}

fn contents(tally: &mut Tally, _: &Scale) {
    tried(tally, corpus::contents());
}

fn shapes(tally: &mut Tally, _: &Scale) {
    tried(tally, corpus::shapes());
}

/// The shapes are left out of the count: there are enough without them, and they are large to make.
fn different(tally: &mut Tally, _: &Scale) {
    let groups = [corpus::names(), corpus::links(), corpus::encodings(), corpus::contents()];
    let mut all: Vec<(Digest, Vec<Digest>)> = groups
        .into_iter()
        .flatten()
        .map(|case| (case.root, case.forged.iter().map(|(_, bytes)| agent_cas::digest_of(bytes)).collect()))
        .collect();
    let made = all.len();
    all.sort_unstable();
    all.dedup();
    tally.note(format!("{} different snapshots in {made} cases, without the shapes", all.len()));
    tally.case("different snapshots", || assert!(all.len() >= 250, "{}", all.len()));
}

/// Where the cases of a row are tried.
struct Ground {
    fleet: Fleet,
    store: PathBuf,
    /// Nothing may appear in here but while a case is tried.
    sandbox: PathBuf,
}

fn tried(tally: &mut Tally, cases: Vec<Case>) {
    let fleet = Fleet::started(&Setup::default());
    let (store, sandbox) = (fleet.home().join("store"), fleet.home().join("sandbox"));
    fs::create_dir(&sandbox).expect("a directory");
    let ground = Ground { fleet, store, sandbox };
    let (mut memory, mut processor) = (0, 0.0f64);
    for case in &cases {
        for way in [Way::Disk, Way::Controller] {
            let attempt = tally.case(&format!("{} {way:?}", case.name), || ground.try_case(case, way));
            if let Some(attempt) = attempt {
                memory = memory.max(attempt.memory);
                processor = processor.max(attempt.processor);
            }
        }
    }
    let controller = peak(ground.fleet.controller.pid());
    tally.case("the memory of the controller", || {
        assert!(controller > 0 && controller <= MEMORY, "the controller took {} MiB", controller >> 20);
    });
    let note = format!(
        "{} cases, each twice; at most {} MiB and {processor:.1} s of a processor",
        cases.len(),
        memory >> 20
    );
    tally.note(format!("{note}; the controller {} MiB", controller >> 20));
}

/// How a case comes to who lays it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Disk,
    Controller,
}

impl Ground {
    fn try_case(&self, case: &Case, way: Way) -> Attempt {
        let from = match way {
            Way::Disk => {
                self.plant(case);
                self.store.clone()
            }
            Way::Controller => {
                self.upload(case);
                self.fleet.controller.socket()
            }
        };
        let dest = self.sandbox.join("a/b/work");
        fs::create_dir_all(self.sandbox.join("a/b")).expect("a directory");
        let attempt = attempt(&from, case.root, &dest);
        match &case.fate {
            // A controller never took what is forged.
            Fate::Refused(why) => {
                let outcome = attempt.outcome.as_str();
                assert!(why.contains(&outcome), "expected {why:?}, got `{outcome}`: {}", attempt.words);
            }
            Fate::Laid(entries) => {
                assert_eq!(attempt.outcome, "laid", "{}", attempt.words);
                assert_eq!(entries_below(&dest), *entries, "{}", attempt.words);
                fs::remove_dir_all(&dest).expect("the tree is removed");
            }
        }
        assert_eq!(
            entries_below(&self.sandbox),
            2,
            "something is left, or outside: {}",
            listing(&self.sandbox)
        );
        assert!(!Path::new("/tmp/agentd-hostile").exists() && !Path::new("/etc/agentd-hostile").exists());
        assert!(attempt.words.len() < 20_000, "a refusal of {} bytes", attempt.words.len());
        assert!(attempt.memory > 0 && attempt.memory <= MEMORY, "{} MiB of memory", attempt.memory >> 20);
        assert!(attempt.processor <= PROCESSOR, "{:.1} s of a processor", attempt.processor);
        attempt
    }

    /// Puts the case into the store as if it had come there in a good way; and what is forged in a bad one, as
    /// a file of its own, which counts whatever else there is. Who lays it out opens the store after that.
    fn plant(&self, case: &Case) {
        let disk = Disk::open(&self.store).expect("a store");
        for result in self.write(&disk, &case.blobs) {
            result.expect("the store takes what has the right digest");
        }
        drop(disk);
        for (digest, bytes) in &case.forged {
            let hex = digest.hex();
            let path = self.store.join(format!("blobs/{}/{hex}-{}", &hex[..2], digest.size));
            let _ = fs::remove_file(&path);
            fs::write(&path, bytes).expect("a damaged blob");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).expect("its mode");
        }
    }

    /// Sends the case to the controller, which takes blobs whatever they say and refuses what is forged.
    fn upload(&self, case: &Case) {
        let remote = Remote::new(self.fleet.client.channel());
        for result in self.write(&remote, &case.blobs) {
            result.expect("the controller takes what has the right digest");
        }
        for (digest, bytes) in &case.forged {
            let result = runtime().block_on(remote.write_batch(vec![(*digest, bytes.clone())])).remove(0);
            assert!(matches!(result, Err(WriteError::Mismatch { .. })), "forged and taken: {result:?}");
        }
    }

    fn write(&self, store: &impl BlobStore, blobs: &[Bytes]) -> Vec<Result<(), WriteError>> {
        let named: Vec<_> = blobs.iter().map(|bytes| (agent_cas::digest_of(bytes), bytes.clone())).collect();
        named.chunks(TOGETHER).flat_map(|some| runtime().block_on(store.write_batch(some.to_vec()))).collect()
    }
}

/// What is below a directory, links not followed.
fn entries_below(dir: &Path) -> usize {
    let listed = fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry"));
    let count = |entry: fs::DirEntry| match entry.file_type().expect("a type").is_dir() {
        true => 1 + entries_below(&entry.path()),
        false => 1,
    };
    listed.map(count).sum()
}

fn listing(dir: &Path) -> String {
    let mut open = vec![dir.to_owned()];
    let mut shown = Vec::new();
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            shown.push(entry.path().display().to_string());
            open.extend(entry.file_type().is_ok_and(|kind| kind.is_dir()).then(|| entry.path()));
        }
    }
    shown.truncate(20);
    shown.join(", ")
}
