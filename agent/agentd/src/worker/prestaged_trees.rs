//! Trees that jobs may want next, laid out while the ones before them run.
//!
//! Owns `prestaged/` of the state directory, closed to everybody else. After a job was started, this makes a
//! prestaged tree of each of its trees that is large enough; the next job with a similar tree takes it over
//! ([`agent_cas::snapshot::PrestagedTree`]) in a moment, while writing all of it takes seconds.
//!
//! Invariants: a prestaged tree is made only of trees of a running job, one at a time, and never if the disk would be
//! low then; at most [`KEPT`] are kept, and the least recently used is removed first; when the disk is low all are
//! removed, before anything waits for room. A prestaged tree is not used after a restart of the daemon, as after a
//! crash it could not be trusted: those found at the start are removed.
//!
//! Tasks: one ([`PrestagedTrees::run`]), which can be restarted at any time.

use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_cas::snapshot::{Laid, Owner, PrestagedTree};
use agent_cas::{Store, remove_tree};
use agent_model::disk::Pressure;
use agent_model::{Digest, causes};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tracing::{debug, info, warn};

use crate::disk::{DiskKeeper, Reclaimer};

/// How many prestaged trees are kept: the code of two kinds of jobs, or the code and an input of one.
const KEPT: usize = 2;

/// The most pending wishes; with more, the oldest are dropped.
const WISHES: usize = 4;

/// From this many files or bytes on, a tree takes noticeably long to lay out.
const FILES_WORTH_IT: u64 = 1000;
const BYTES_WORTH_IT: u64 = 64 << 20;

/// Larger trees are not prestaged: their names take memory, and their bytes take disk.
const MOST_FILES: u64 = 200_000;
const MOST_BYTES: u64 = 4 << 30;

/// How much of the disk a file takes beside its bytes, at most.
const BLOCK: u64 = 4096;

/// A tree that a job has, and that another job may want.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    pub(crate) root: Digest,
    /// Its number of files and bytes.
    pub(crate) laid: Laid,
    /// The user that the job runs as.
    pub(crate) owner: Option<Owner>,
}

impl Wish {
    fn is_worth_it(&self) -> bool {
        let Laid { files, bytes } = self.laid;
        (files >= FILES_WORTH_IT || bytes >= BYTES_WORTH_IT) && files <= MOST_FILES && bytes <= MOST_BYTES
    }

    /// How many bytes of the disk it takes, at most.
    fn room(&self) -> u64 {
        self.laid.bytes.saturating_add(self.laid.files.saturating_mul(BLOCK))
    }

    fn is_met_by(&self, prestaged: &PrestagedTree) -> bool {
        prestaged.root() == self.root && prestaged.owner() == self.owner && !prestaged.is_claimed()
    }
}

/// The prestaged trees of a node. Clones share them.
#[derive(Clone)]
pub(crate) struct PrestagedTrees {
    shared: Arc<Shared>,
}

struct Shared {
    state_dir: PathBuf,
    /// The directory of this process of the daemon.
    home: PathBuf,
    store: Store,
    disk: DiskKeeper,
    cache: Mutex<EnvCache>,
    wished: Notify,
}

#[derive(Default)]
struct EnvCache {
    /// Least recently used first.
    kept: Vec<Arc<PrestagedTree>>,
    wishes: VecDeque<Wish>,
    /// Prestaged trees made so far, for their names.
    made: u64,
}

impl PrestagedTrees {
    /// Without any tree yet.
    pub(crate) fn new(state_dir: &Path, store: Store, disk: DiskKeeper) -> PrestagedTrees {
        let number = |entry: io::Result<std::fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
        let lives = std::fs::read_dir(all(state_dir)).into_iter().flatten().filter_map(number);
        let life = lives.max().map_or(0, |last: u64| last.saturating_add(1));
        PrestagedTrees {
            shared: Arc::new(Shared {
                state_dir: state_dir.to_owned(),
                home: all(state_dir).join(life.to_string()),
                store,
                disk,
                cache: Mutex::default(),
                wished: Notify::new(),
            }),
        }
    }

    /// Those that a job may take.
    pub(crate) fn list(&self) -> Vec<Arc<PrestagedTree>> {
        self.cache().kept.iter().filter(|prestaged| !prestaged.is_claimed()).cloned().collect()
    }

    /// Wishes for a tree that later jobs may want.
    pub(crate) fn wish(&self, wish: Wish) {
        if !wish.is_worth_it() {
            return;
        }
        let mut cache = self.cache();
        cache.wishes.retain(|other| (other.root, other.owner) != (wish.root, wish.owner));
        cache.wishes.push_back(wish);
        if cache.wishes.len() > WISHES {
            cache.wishes.pop_front();
        }
        self.shared.wished.notify_one();
    }

    /// Removes all, because something needs the room; `false` when there was none.
    pub(crate) async fn give_way(&self) -> bool {
        let prestaged_trees: Vec<_> = std::mem::take(&mut self.cache().kept);
        let mut any = false;
        for prestaged in prestaged_trees {
            any |= !prestaged.is_claimed();
            discard(prestaged).await;
        }
        any
    }

    /// Runs forever: makes the trees that are wished for.
    pub(crate) async fn run(self) {
        self.wipe().await;
        loop {
            let wish = self.cache().wishes.pop_front();
            match wish {
                Some(wish) => self.meet(wish).await,
                None => self.shared.wished.notified().await,
            }
        }
    }

    /// Removes the trees of earlier processes.
    async fn wipe(&self) {
        let shared = Arc::clone(&self.shared);
        let wipe = move || -> io::Result<()> {
            for entry in std::fs::read_dir(all(&shared.state_dir))? {
                let path = entry?.path();
                if path != shared.home {
                    remove_tree(&path)?;
                }
            }
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&shared.home)
        };
        if let Err(error) = agent_blocking::blocking_io(wipe).await {
            warn!(%error, "cannot remove prestaged trees of an earlier run");
        }
    }

    async fn meet(&self, wish: Wish) {
        let spared = {
            let mut cache = self.cache();
            cache.kept.retain(|prestaged| !prestaged.is_claimed());
            if let Some(at) = cache.kept.iter().position(|prestaged| wish.is_met_by(prestaged)) {
                let prestaged = cache.kept.remove(at);
                cache.kept.push(prestaged);
                return;
            }
            if !self.shared.disk.can_spare(wish.room()) {
                debug!(root = %wish.root, "cannot prestage tree: no room");
                return;
            }
            match cache.kept.len() {
                full if full >= KEPT => Some(cache.kept.remove(0)),
                _ => None,
            }
        };
        if let Some(prestaged) = spared {
            discard(prestaged).await;
        }
        self.make(wish).await;
    }

    async fn make(&self, wish: Wish) {
        let path = self.next_place();
        match PrestagedTree::lay(&self.shared.store, wish.root, &path, wish.owner).await {
            Ok(prestaged) => self.cache().kept.push(Arc::new(prestaged)),
            Err(error) => {
                debug!(root = %wish.root, error = causes::tell(&error), "cannot prestage tree");
                // Parts that cannot be removed now are removed at the next start.
                let _ = agent_blocking::spawn_blocking(move || remove_tree(&path)).await;
            }
        }
    }

    fn next_place(&self) -> PathBuf {
        let mut cache = self.cache();
        cache.made += 1;
        self.shared.home.join(cache.made.to_string())
    }

    fn cache(&self) -> MutexGuard<'_, EnvCache> {
        self.shared.cache.lock()
    }
}

/// The directory of the trees of all processes.
fn all(state_dir: &Path) -> PathBuf {
    state_dir.join("prestaged")
}

async fn discard(prestaged: Arc<PrestagedTree>) {
    if let Err(error) = prestaged.discard().await {
        warn!(%error, "cannot remove prestaged tree");
    }
}

/// They only save time, so they are removed first.
impl Reclaimer for PrestagedTrees {
    fn starts_at(&self) -> Pressure {
        Pressure::Tight
    }
    fn reclaim(&self, _: u64) -> BoxFuture<'_, ()> {
        let removed = self.give_way().inspect(|any| {
            if *any {
                info!("removing prestaged trees: the disk is low");
            }
        });
        removed.map(drop).boxed()
    }
}

#[cfg(test)]
mod tests {
    use agent_cas::Disk;
    use agent_cas::snapshot::{self, materialize};

    use std::time::Duration;

    use super::*;

    struct Bench {
        home: tempfile::TempDir,
        store: Store,
    }

    impl Bench {
        fn new() -> Bench {
            let home = tempfile::tempdir().unwrap();
            std::fs::create_dir(all(home.path())).unwrap();
            let store = Store::Disk(Disk::open(&home.path().join("cas")).unwrap());
            Bench { home, store }
        }

        fn prestaged_trees(&self, reserve: u64) -> PrestagedTrees {
            let disk = DiskKeeper::open(self.home.path(), reserve);
            PrestagedTrees::new(self.home.path(), self.store.clone(), disk)
        }

        /// A tree that is worth a prestaged tree, with this in one of its files.
        async fn tree(&self, text: &str) -> Wish {
            let code = self.home.path().join("code");
            std::fs::create_dir_all(&code).unwrap();
            for i in 0..FILES_WORTH_IT {
                std::fs::write(code.join(i.to_string()), "").unwrap();
            }
            std::fs::write(code.join("text"), text).unwrap();
            let scanned = snapshot::scan(&code).unwrap();
            snapshot::push(&scanned, &self.store, |_| {}).await.unwrap();
            let laid = Laid { files: scanned.files, bytes: scanned.bytes };
            Wish { root: scanned.root, laid, owner: None }
        }

        /// The text that a job of this tree gets, and the inode of its directory.
        async fn job(&self, prestaged_trees: &PrestagedTrees, name: &str, wish: Wish) -> (String, u64) {
            let dest = self.home.path().join(name);
            materialize(&self.store, wish.root, &dest, None, &prestaged_trees.list()).await.unwrap();
            assert_eq!(std::fs::read_dir(&dest).unwrap().count() as u64, wish.laid.files);
            (std::fs::read_to_string(dest.join("text")).unwrap(), inode(&dest))
        }
    }

    fn inode(path: &Path) -> u64 {
        std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap())
    }

    /// Lets the task run until `done`.
    async fn until(prestaged_trees: &PrestagedTrees, done: impl Fn(&[Digest]) -> bool) {
        let looks = async {
            while !done(&prestaged_trees.list().iter().map(|prestaged| prestaged.root()).collect::<Vec<_>>())
            {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::select! {
            () = prestaged_trees.clone().run() => {}
            () = looks => {}
            () = tokio::time::sleep(Duration::from_secs(600)) => panic!("it never comes to that"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn test_job_of_the_same_family_takes_what_the_one_before_it_left() {
        let bench = Bench::new();
        let prestaged_trees = bench.prestaged_trees(0);
        let (one, two) = (bench.tree("one").await, bench.tree("two").await);
        bench.job(&prestaged_trees, "first", one).await;
        prestaged_trees.wish(one);
        until(&prestaged_trees, |roots| roots == [one.root]).await;
        let made = inode(&prestaged_trees.shared.home.join("1"));
        assert_eq!(bench.job(&prestaged_trees, "second", two).await, ("two".to_owned(), made));
        assert!(prestaged_trees.list().is_empty());
        assert_ne!(bench.job(&prestaged_trees, "third", two).await.1, made);
        prestaged_trees.wish(two);
        until(&prestaged_trees, |roots| roots == [two.root]).await;
        assert_eq!(std::fs::read_dir(&prestaged_trees.shared.home).unwrap().count(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn test_the_one_of_no_use_for_longest_goes() {
        let bench = Bench::new();
        let prestaged_trees = bench.prestaged_trees(0);
        let [a, b, c] = [bench.tree("a").await, bench.tree("b").await, bench.tree("c").await];
        for (wish, expected) in [(a, vec![a]), (b, vec![a, b]), (a, vec![b, a]), (c, vec![a, c])] {
            let expected: Vec<Digest> = expected.iter().map(|wish| wish.root).collect();
            prestaged_trees.wish(wish);
            until(&prestaged_trees, |roots| roots == expected).await;
        }
        assert_eq!(std::fs::read_dir(&prestaged_trees.shared.home).unwrap().count(), KEPT);
    }

    #[tokio::test(start_paused = true)]
    async fn test_low_disk_has_no_spares() {
        let bench = Bench::new();
        let wish = bench.tree("tree").await;
        let prestaged_trees = bench.prestaged_trees(0);
        prestaged_trees.wish(wish);
        until(&prestaged_trees, |roots| roots.len() == 1).await;
        assert!(prestaged_trees.give_way().await && !prestaged_trees.give_way().await);
        assert_eq!(std::fs::read_dir(&prestaged_trees.shared.home).unwrap().count(), 0);
        let half = agent_node::disk_free(bench.home.path()) / 2;
        let low = bench.prestaged_trees(half + (1 << 30));
        low.wish(wish);
        let looked = tokio::time::timeout(Duration::from_secs(60), low.clone().run()).await;
        assert!(looked.is_err() && low.list().is_empty(), "there would not be twice the reserve left");
    }

    #[tokio::test(start_paused = true)]
    async fn test_nothing_of_an_earlier_life_stays() {
        let bench = Bench::new();
        let wish = bench.tree("tree").await;
        let before = bench.prestaged_trees(0);
        before.wish(wish);
        until(&before, |roots| roots.len() == 1).await;
        std::fs::create_dir_all(before.shared.home.join("2.partial/half")).unwrap();
        let after = bench.prestaged_trees(0);
        assert_ne!(after.shared.home, before.shared.home);
        after.wish(wish);
        until(&after, |roots| roots.len() == 1).await;
        assert!(!before.shared.home.exists());
        assert_eq!(bench.job(&before, "of-before", wish).await.0, "tree");
        assert_eq!(bench.job(&after, "of-after", wish).await.0, "tree");
    }

    #[test]
    fn test_only_trees_that_take_long_and_fit_are_worth_it() {
        let wish = |files, bytes| Wish { root: Digest::EMPTY, laid: Laid { files, bytes }, owner: None };
        for (files, bytes, worth) in [
            (999, 1 << 20, false),
            (1000, 0, true),
            (1, 64 << 20, true),
            (200_000, 4 << 30, true),
            (200_001, 0, false),
            (1, (4 << 30) + 1, false),
        ] {
            assert_eq!(wish(files, bytes).is_worth_it(), worth, "{files} {bytes}");
        }
    }
}
