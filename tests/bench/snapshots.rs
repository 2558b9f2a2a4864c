//! What it costs to move a directory, against git, rsync and the processor itself.
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

use agent_tests::{Host, SOON, eventually};

pub(crate) use self::mover::main as move_one;
use self::others::{Git, Rsync};
use self::tree::Tree;
use crate::measure::{Series, time};

/// Files of the tree, unless told.
const FILES: usize = 20_000;

/// Rounds of what takes a moment, and of what takes long.
const ROUNDS: usize = 9;
const LONG_ROUNDS: usize = 3;

/// How long it takes until a file counts as settled, with some room.
const SETTLING: Duration = Duration::from_secs(100);

/// All rows.
pub(crate) fn all(files: Option<usize>) {
    let mut bench = Bench::new(files.unwrap_or(FILES));
    println!("{:<58} {:>10} {:>10} {:>7} {:>7}", "measure", "ours", "other", "ratio", "goal");
    bench.cold_hash();
    bench.cold_push_and_pull();
    bench.learn();
    bench.rescan();
    bench.push("nothing changed", 0);
    bench.push("1 file changed", 1);
    bench.push("1 % changed", files.unwrap_or(FILES).div_ceil(100));
    bench.pull_one_file();
    bench.wire();
    bench.memory();
}

struct Bench {
    scratch: tempfile::TempDir,
    tree: Tree,
    host: Host,
    rsync: Rsync,
    git: Git,
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
        Bench { scratch, tree, host: Host::started(), rsync, git, numbers: 0, peak: 0 }
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

    fn push_to(&mut self, socket: &Path) -> (Duration, mover::Told) {
        let (tree, cache) = (text(&self.tree.path), text(&self.cache()));
        self.moves(&["push", &text(socket), &tree, &cache])
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
        let root = self.tree.root();
        for _ in 0..LONG_ROUNDS {
            let (host, to) = (Host::started(), self.fresh("cold"));
            fs::create_dir(&to).expect("a directory");
            synced.push(time(self.rsync.push(&self.tree.path, &to)));
            let socket = host.state().join("agentd.sock");
            pushed.push(self.push_to(&socket).0);
            let (ours, theirs) = (self.fresh("pulled"), self.fresh("fetched"));
            fetched.push(time(self.rsync.pull(&to, &theirs)));
            pulled.push(self.moves(&["pull", &text(&socket), &root, &text(&ours)]).0);
            drop(host);
            [to, ours, theirs].iter().for_each(|dir| fs::remove_dir_all(dir).expect("it goes"));
        }
        row("P5 push to an empty daemon / rsync -a to a daemon", &pushed, &synced, Some(1.3));
        row("P7 pull all / rsync -a from a daemon", &pulled, &fetched, Some(1.3));
    }

    /// Every side gets to know the tree, and the tree gets old enough to be remembered.
    fn learn(&mut self) {
        time(self.git.commit());
        time(self.rsync.local(&self.tree.path, "local"));
        time(self.rsync.push(&self.tree.path, &self.scratch.path().join("served")));
        let socket = self.host.state().join("agentd.sock");
        self.push_to(&socket);
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
        let [mut ours, mut git, mut rsync] = std::array::from_fn(|_| Series::default());
        let socket = self.host.state().join("agentd.sock");
        let served = self.scratch.path().join("served");
        for _ in 0..ROUNDS {
            self.tree.change(files);
            rsync.push(time(self.rsync.push(&self.tree.path, &served)));
            ours.push(self.push_to(&socket).0);
            git.push(time(self.git.commit()));
        }
        let (row_number, limits) = if files > 1 { ("P4", (0.35, None)) } else { ("P3", (0.3, Some(1.0))) };
        row(&format!("{row_number} push, {change} / rsync -a to a daemon"), &ours, &rsync, Some(limits.0));
        row(&format!("{row_number} push, {change} / git add, git commit"), &ours, &git, limits.1);
    }

    /// Ours is what a node does for a job: the new file from the daemon, the others from its own store, and a new
    /// directory. The peer changes the directory it made before.
    fn pull_one_file(&mut self) {
        let (mut ours, mut rsync) = (Series::default(), Series::default());
        let socket = self.host.state().join("agentd.sock");
        let (served, near) = (self.scratch.path().join("served"), text(&self.fresh("near")));
        let copy = self.fresh("copy");
        for round in 0..=LONG_ROUNDS {
            self.tree.change(1);
            self.push_to(&socket);
            time(self.rsync.push(&self.tree.path, &served));
            let (root, dest) = (self.tree.root(), self.fresh("laid"));
            let theirs = time(self.rsync.pull(&served, &copy));
            let (took, _) = self.moves(&["fetch", &text(&socket), &root, &text(&dest), &near]);
            fs::remove_dir_all(&dest).expect("it goes");
            if round > 0 {
                ours.push(took); // the first one filled the store and the copy
                rsync.push(theirs);
            }
        }
        row("P8 fetch 1 changed file, lay out all / rsync -a, in place", &ours, &rsync, Some(0.2));
    }

    /// All bytes of the connection, in both directions.
    fn wire(&mut self) {
        for (change, files) in [("nothing", 0), ("1 file", 1), ("1 %", self.tree.files.len().div_ceil(100))] {
            let changed = self.tree.change(files);
            let relay = others::Relay::start(&self.host.state().join("agentd.sock"), &self.fresh("relay"));
            let told = self.push_to(&relay.socket).1;
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

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

/// Prints a row; the ratio is of the medians, and the goal is what it should not exceed.
fn row(measure: &str, ours: &Series, other: &Series, goal: Option<f64>) {
    crate::environments::row(measure, ours, other, goal);
}
