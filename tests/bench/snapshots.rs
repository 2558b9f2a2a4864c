//! What it costs to move a directory, against git, rsync, NativeLink where it is installed, and the processor itself.
//!
//! Each side is a program that starts, does its work and ends, so what a start costs is in all of them; ours is this
//! very program with the word `move` (see [`mover`]) against a daemon of its own. The daemon flushes what it
//! takes to the disk before it says so, which rsync never does and git leaves to the system too.
//!
//! The tree is the same each time: sizes as in a project with data in it, most of 10 kB, some of 50 MB.

mod mover;
mod others;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent_cas::{BlobStore, Disk};
use agent_tests::client::runtime;
use agent_tests::{Host, SOON, eventually};

pub(crate) use self::mover::main as move_one;
use self::others::{Git, NativeLink, Rsync, Xfs};
use self::tree::Tree;
use crate::measure::{Series, time};

/// Files of the tree, unless told.
const FILES: usize = 20_000;

/// Rounds of what takes a moment, and of what takes long.
const ROUNDS: usize = 9;
const LONG_ROUNDS: usize = 3;

/// What a second start of the same tree may take.
const AGAIN: Duration = Duration::from_millis(20);

/// Files that are cloned.
const LARGE_FILES: usize = 200;

/// Small blobs of a round, their size, and what one may take; as many in a batch, and so many batches at once, as a
/// push has. The times of so many are told.
const SMALL_BLOBS: u32 = 20_000;
const SMALL: usize = 10_000;
const SMALL_LIMIT: Duration = Duration::from_micros(15);
const SMALL_BATCH: usize = 100;
const LANES: usize = 4;
const PER: u32 = 1000;

/// Small blobs that are flushed one by one.
const ALONE: usize = 300;

/// How long it takes until a file counts as settled, with some room.
const SETTLING: Duration = Duration::from_secs(100);

/// All rows.
pub(crate) fn all(files: Option<usize>) {
    let mut bench = Bench::new(files.unwrap_or(FILES));
    println!("{:<58} {:>10} {:>10} {:>7} {:>7}", "measure", "ours", "other", "ratio", "goal");
    bench.cold_hash();
    bench.cold_push_and_pull();
    bench.durable_push();
    bench.learn();
    bench.rescan();
    bench.push("nothing changed", 0);
    bench.push("1 file changed", 1);
    bench.push("1 % changed", files.unwrap_or(FILES).div_ceil(100));
    bench.pull_one_file();
    bench.clones();
    bench.ingest();
    bench.wire();
    bench.memory();
}

struct Bench {
    scratch: tempfile::TempDir,
    tree: Tree,
    host: Host,
    rsync: Rsync,
    git: Git,
    /// With all trees that were pushed to `host` since it learned of them.
    native: Option<NativeLink>,
    numbers: usize,
    /// The most memory that one of our programs had, in bytes.
    peak: u64,
}

impl Bench {
    fn new(files: usize) -> Bench {
        let scratch = tempfile::Builder::new().prefix("snapshots-").tempdir().expect("a directory");
        let tree = Tree::make(&scratch.path().join("tree"), files);
        println!(
            "{} files, {} MB, in {}",
            tree.files.len(),
            tree.bytes / 1_000_000,
            scratch.path().display()
        );
        let rsync = Rsync::start(scratch.path());
        let git = Git::new(&tree.path, &scratch.path().join("git"));
        Bench { scratch, tree, host: Host::started(), rsync, git, native: None, numbers: 0, peak: 0 }
    }

    /// A path that is not there yet.
    fn fresh(&mut self, name: &str) -> PathBuf {
        self.numbers += 1;
        self.scratch.path().join(format!("{name}{}", self.numbers))
    }

    fn cache(&self) -> PathBuf {
        self.scratch.path().join("cache")
    }

    /// One of our programs: how long it took; what it tells is looked at as well.
    fn moves(&mut self, words: &[&str]) -> (Duration, mover::Told) {
        let begun = Instant::now();
        let told = mover::start(words);
        self.peak = self.peak.max(told.peak);
        (begun.elapsed(), told)
    }

    /// Pushes to a daemon's socket, or the place of another server.
    fn push_to(&mut self, place: &str) -> (Duration, mover::Told) {
        let (tree, cache) = (text(&self.tree.path), text(&self.cache()));
        self.moves(&["push", place, &tree, &cache])
    }

    /// The same to the peer, if there is one.
    fn push_to_native(&mut self, series: &mut Series) {
        if let Some(place) = self.native.as_ref().map(|native| native.place.clone()) {
            series.push(self.push_to(&place).0);
        }
    }

    fn socket(&self) -> String {
        socket_of(&self.host)
    }

    fn cold_hash(&mut self) {
        let (mut ours, mut floor) = (Series::default(), Series::default());
        for _ in 0..LONG_ROUNDS {
            floor.push(tree::hash_floor(self.tree.bytes));
            let tree = text(&self.tree.path);
            ours.push(self.moves(&["scan", &tree]).0);
        }
        row("P1 walk and hash all / hashing alone, on all processors", &ours, &floor, Some(1.3));
    }

    /// Each round has a new daemon, and the peer a new directory.
    fn cold_push_and_pull(&mut self) {
        let [mut pushed, mut synced, mut pulled, mut fetched] = std::array::from_fn(|_| Series::default());
        let [mut pushed_there, mut pulled_there] = std::array::from_fn(|_| Series::default());
        let root = self.tree.root();
        for _ in 0..LONG_ROUNDS {
            let (host, to) = (Host::started(), self.fresh("cold"));
            fs::create_dir(&to).expect("a directory");
            synced.push(time(self.rsync.push(&self.tree.path, &to)));
            let socket = socket_of(&host);
            pushed.push(self.push_to(&socket).0);
            let (ours, theirs) = (self.fresh("pulled"), self.fresh("fetched"));
            fetched.push(time(self.rsync.pull(&to, &theirs)));
            pulled.push(self.moves(&["pull", &socket, &root, &text(&ours)]).0);
            drop(host);
            let home = self.fresh("native");
            if let Some(native) = NativeLink::start(&home) {
                let dest = self.fresh("pulled");
                pushed_there.push(self.push_to(&native.place).0);
                pulled_there.push(self.moves(&["pull", &native.place, &root, &text(&dest)]).0);
                fs::remove_dir_all(&dest).expect("it goes");
            }
            fs::remove_dir_all(&home).expect("it goes");
            [to, ours, theirs].iter().for_each(|dir| fs::remove_dir_all(dir).expect("it goes"));
        }
        row("P5 push to an empty daemon / rsync -a to a daemon", &pushed, &synced, Some(1.3));
        row("P7 pull all / rsync -a from a daemon", &pulled, &fetched, Some(1.3));
        peer_row("P5 push to an empty daemon / to NativeLink", &pushed, &pushed_there, 0.5);
        peer_row("P7 pull all / from NativeLink", &pulled, &pulled_there, 0.75);
    }

    /// The other side is the same daemon, for which flushing does nothing.
    fn durable_push(&mut self) {
        let unflushed = agent_tests::root().join("tests/bench/snapshots/unflushed");
        let (mut durable, mut relaxed) = (Series::default(), Series::default());
        for _ in 0..LONG_ROUNDS {
            for (host, series) in
                [(Host::started_by(&unflushed), &mut relaxed), (Host::started(), &mut durable)]
            {
                rustix::fs::sync(); // what came before is not to be paid for
                series.push(self.push_to(&socket_of(&host)).0);
            }
        }
        row("P6 push to an empty daemon / without flushing", &durable, &relaxed, Some(1.2));
    }

    /// Every side gets to know the tree, and the tree gets old enough to be remembered.
    fn learn(&mut self) {
        time(self.git.commit());
        time(self.rsync.local(&self.tree.path, "local"));
        time(self.rsync.push(&self.tree.path, &self.scratch.path().join("served")));
        self.push_to(&self.socket());
        self.native = NativeLink::start(&self.fresh("native"));
        self.push_to_native(&mut Series::default());
        let (tree, cache) = (text(&self.tree.path), text(&self.cache()));
        eventually("the tree is old enough to be remembered", SETTLING + SOON, || {
            let told = mover::start(&["scan", &tree, &cache]);
            (told.read == 0).then_some(())
        });
        time(self.git.status());
    }

    fn rescan(&mut self) {
        let [mut ours, mut git, mut rsync] = std::array::from_fn(|_| Series::default());
        let (tree, cache) = (text(&self.tree.path), text(&self.cache()));
        for _ in 0..ROUNDS {
            git.push(time(self.git.status()));
            ours.push(self.moves(&["scan", &tree, &cache]).0);
            rsync.push(time(self.rsync.local(&self.tree.path, "local")));
        }
        row("P2 scan, nothing changed / git status", &ours, &git, Some(1.2));
        row("P2 scan, nothing changed / rsync -a to a copy", &ours, &rsync, Some(0.3));
    }

    fn push(&mut self, change: &str, files: usize) {
        let [mut ours, mut git, mut rsync, mut native] = std::array::from_fn(|_| Series::default());
        let served = self.scratch.path().join("served");
        for _ in 0..ROUNDS {
            self.tree.change(files);
            rsync.push(time(self.rsync.push(&self.tree.path, &served)));
            ours.push(self.push_to(&self.socket()).0);
            self.push_to_native(&mut native);
            git.push(time(self.git.commit()));
        }
        let (row_number, limits) = if files > 1 { ("P4", (0.35, None)) } else { ("P3", (0.3, Some(1.0))) };
        row(&format!("{row_number} push, {change} / rsync -a to a daemon"), &ours, &rsync, Some(limits.0));
        row(&format!("{row_number} push, {change} / git add, git commit"), &ours, &git, limits.1);
        if files > 1 {
            peer_row(&format!("P4 push, {change} / to NativeLink"), &ours, &native, 0.5);
        }
    }

    /// Ours is what a node does for a job whose tree is near one that it laid out before: the new file from the daemon,
    /// the others by the prestaged tree of that one. Only this is timed: a node runs already, and makes its prestaged
    /// trees after jobs were started, when nobody waits for them. The peer changes the directory it made before, start
    /// of the program included.
    fn pull_one_file(&mut self) {
        let [mut ours, mut rsync, mut again, mut anew] = std::array::from_fn(|_| Series::default());
        let socket = self.socket();
        let (served, near) = (self.scratch.path().join("served"), text(&self.fresh("near")));
        let (copy, home) = (self.fresh("copy"), self.fresh("prestaged"));
        for round in 0..=LONG_ROUNDS {
            let before = self.tree.root();
            self.tree.change(1);
            self.push_to(&socket);
            time(self.rsync.push(&self.tree.path, &served));
            let (root, dest) = (self.tree.root(), self.fresh("laid"));
            let theirs = time(self.rsync.pull(&served, &copy));
            fs::create_dir(&home).expect("a directory");
            let (_, told) = self.moves(&["near", &socket, &before, &root, &text(&home), &near]);
            let (whole, _) = self.moves(&["fetch", &socket, &root, &text(&dest), &near]);
            [&home, &dest].iter().for_each(|dir| fs::remove_dir_all(dir).expect("it goes"));
            if round > 0 {
                rsync.push(theirs); // the first one filled the store and the copy
                anew.push(whole);
                let [near, same] = told.took;
                ours.push(near);
                again.push(same);
            }
        }
        row("P8 lay out, 1 file changed, by a prestaged / rsync -a, in place", &ours, &rsync, Some(0.2));
        row("P13 the same tree again, by a prestaged / all of it anew", &again, &anew, None);
        let told = if again.median() <= AGAIN { "" } else { " MISSED" };
        println!("{:<58} {:>10} {:>10} {:>7} {:>4} ms{told}", "  limit", "", "", "", AGAIN.as_millis());
    }

    /// Large files, each cloned, against the bare calls, on a file system that can.
    fn clones(&mut self) {
        let xfs = Xfs::mount(&self.fresh("xfs"));
        let home = xfs.path.clone();
        let large = home.join("large");
        fs::create_dir(&large).expect("a directory");
        for number in 0..LARGE_FILES {
            fs::write(large.join(number.to_string()), vec![number as u8; 4 << 20]).expect("a file");
        }
        let store = text(&home.join("store"));
        let (mut ours, mut bare) = (Series::default(), Series::default());
        for round in 0..LONG_ROUNDS {
            let [theirs, dest] = ["bare", "ours"].map(|side| home.join(format!("{side}-{round}")));
            bare.push(tree::clone_all(&large, &theirs));
            ours.push(self.moves(&["lay", &text(&large), &store, &text(&dest)]).1.took[0]);
        }
        row("P13 lay out large files / bare FICLONE", &ours, &bare, Some(1.2));
    }

    /// Small blobs, each on the disk when that is said, in batches of which as many are on their way as in a push. The
    /// other side makes a file of each, and flushes it and its directory.
    fn ingest(&mut self) {
        let (mut ours, mut alone) = (Series::default(), Series::default());
        for _ in 0..LONG_ROUNDS {
            let made: Vec<_> = (0..SMALL_BLOBS).map(|_| self.tree.fresh(SMALL)).collect();
            let mut lanes = vec![Vec::new(); LANES];
            for (number, batch) in made.chunks(SMALL_BATCH).enumerate() {
                lanes[number % LANES].push(batch.to_vec());
            }
            let disk = Disk::open(&self.fresh("store")).expect("a store");
            let begun = Instant::now();
            runtime().block_on(async {
                let mut under_way = tokio::task::JoinSet::new();
                for lane in lanes {
                    let disk = disk.clone();
                    under_way.spawn(async move {
                        for batch in lane {
                            let kept = disk.write_batch(batch).await;
                            assert!(kept.iter().all(Result::is_ok), "a blob is not kept");
                        }
                    });
                }
                under_way.join_all().await;
            });
            ours.push(begun.elapsed() * PER / SMALL_BLOBS);
            let home = self.fresh("files");
            fs::create_dir(&home).expect("a directory");
            alone.push(tree::flushed_one_by_one(&home, made.iter().take(ALONE)) * PER / ALONE as u32);
        }
        row("P11 1,000 small blobs, durable / a flushed file of each", &ours, &alone, Some(0.02));
        let told = if ours.median() <= PER * SMALL_LIMIT { "" } else { " MISSED" };
        println!("{:<58} {:>10} {:>10} {:>7} {:>4} ms{told}", "  limit", "", "", "", SMALL_LIMIT.as_micros());
    }

    /// All bytes of the connection, in both directions.
    fn wire(&mut self) {
        for (change, files) in [("nothing", 0), ("1 file", 1), ("1 %", self.tree.files.len().div_ceil(100))] {
            let changed = self.tree.change(files);
            let relay = others::Relay::start(&self.host.state().join("agentd.sock"), &self.fresh("relay"));
            let told = self.push_to(&text(&relay.socket)).1;
            let questions = format!("{} kB in all", relay.bytes() / 1000);
            let of = if changed > 0 { told.sent as f64 / changed as f64 } else { 1.0 };
            let sent = format!("{} kB", told.sent / 1000);
            let measure = format!("P14 sent, {change} changed ({} kB of content)", changed / 1000);
            let goal = if files > 1 { "1.06" } else { "-" };
            println!("{measure:<58} {sent:>10} {:>10} {of:>7.2} {goal:>7}  {questions}", "");
        }
    }

    fn memory(&self) {
        let status = fs::read_to_string(format!("/proc/{}/status", self.host.pid())).unwrap_or_default();
        for (name, bytes) in [("the client", self.peak), ("the daemon", mover::peak_in(&status))] {
            let told = if bytes <= 200_000_000 { "" } else { " MISSED" };
            let measure = format!("P15 the most memory that {name} had");
            println!("{measure:<58} {:>7} MB {:>10} {:>7} 200 MB{told}", bytes / 1_000_000, "", "");
        }
    }
}

fn socket_of(host: &Host) -> String {
    text(&host.state().join("agentd.sock"))
}

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

/// A row against NativeLink, which may not be here. Our client fills its batches as far as it says they may be: 64 KiB.
fn peer_row(measure: &str, ours: &Series, peer: &Series, goal: f64) {
    match peer.is_empty() {
        true => println!("{measure:<58} there is no nativelink on the path"),
        false => row(measure, ours, peer, Some(goal)),
    }
}

/// Prints a row; the ratio is of the medians, and the goal is what it should not exceed.
fn row(measure: &str, ours: &Series, other: &Series, goal: Option<f64>) {
    crate::environments::row(measure, ours, other, goal);
}
