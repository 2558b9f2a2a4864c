use std::os::unix::fs::symlink;
use std::time::Duration;

use agent_model::{Digest, ManualClock, Timestamp};
use rustix::fs::{Timespec, Timestamps};

use super::*;
use crate::snapshot::{Choice, ScanError, Snapshot, scan, scan_whole};

impl StatCache {
    /// A scan of code that does not read what is remembered.
    pub(in crate::snapshot) fn scan(&self, dir: &Path) -> Result<Snapshot, ScanError> {
        Choice { cache: Some(self), ..Choice::default() }.scan(dir)
    }

    fn scan_whole(&self, dir: &Path) -> Result<Snapshot, ScanError> {
        Choice { whole: true, cache: Some(self), ..Choice::default() }.scan(dir)
    }
}

/// A tree, a cache beside it, and a clock that starts at the real time.
struct Rig {
    base: tempfile::TempDir,
    clock: Arc<ManualClock>,
    cache: StatCache,
}

impl Rig {
    fn new(files: &[(&str, &str)]) -> Rig {
        let base = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::new(SystemClock.now()));
        let cache = StatCache::with_clock(base.path().join("deep/cache"), Arc::<ManualClock>::clone(&clock));
        fs::create_dir(base.path().join("tree")).unwrap();
        let rig = Rig { base, clock, cache };
        files.iter().for_each(|(path, text)| rig.write(path, text));
        rig
    }

    fn at(&self, path: &str) -> PathBuf {
        self.base.path().join("tree").join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Lets every file become old enough to be remembered.
    fn settle(&self) {
        self.clock.advance(Duration::from_secs(3600));
    }

    /// Scans, and compares with a scan that remembers nothing; the files that were read.
    #[track_caller]
    fn look(&self) -> u64 {
        let snapshot = self.cache.scan(&self.at("")).unwrap();
        assert_eq!(snapshot.root, scan(&self.at("")).unwrap().root, "the cache lies");
        snapshot.read
    }

    /// The same, and waits until the clock of the file system has moved on: a test that pretends by `settle` that
    /// time has passed must let some pass.
    #[track_caller]
    fn read(&self) -> u64 {
        let read = self.look();
        let tick = || {
            let probe = self.base.path().join("probe");
            fs::write(&probe, "").unwrap();
            let about = fs::metadata(&probe).unwrap();
            (about.ctime(), about.ctime_nsec())
        };
        let first = tick();
        while tick() == first {
            std::thread::yield_now();
        }
        read
    }

    fn pages(&self) -> Vec<PathBuf> {
        fs::read_dir(&self.cache.dir).map_or(Vec::new(), |all| all.map(|e| e.unwrap().path()).collect())
    }

    fn page(&self) -> PathBuf {
        let pages = self.pages();
        assert_eq!(pages.len(), 1);
        pages[0].clone()
    }

    /// A cache that knows all of the tree.
    fn learned(files: &[(&str, &str)]) -> Rig {
        let rig = Rig::new(files);
        rig.settle();
        assert_eq!(rig.read(), files.len() as u64);
        assert_eq!(rig.read(), 0);
        rig
    }

    fn set_times(&self, path: &str, seconds: i64) {
        let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(rustix::fs::CWD, self.at(path), &times, rustix::fs::AtFlags::empty()).unwrap();
    }
}

const FILES: [(&str, &str); 6] =
    [("a", "1"), ("a.b", "2"), ("d/x", "3"), ("d/e/y", "4"), ("d.e", "5"), ("d.d/z", "6")];

#[test]
fn test_what_did_not_change_is_not_read_again() {
    let rig = Rig::learned(&FILES);
    rig.write("d/e/y", "5");
    assert_eq!(rig.read(), 1);
    assert_eq!(rig.read(), 0);
    rig.write("d/a", "new");
    fs::remove_file(rig.at("a.b")).unwrap();
    fs::rename(rig.at("d.d"), rig.at("d.f")).unwrap();
    assert_eq!(rig.read(), 2, "one is new, and one has another name");
}

#[test]
fn test_a_file_changed_shortly_before_the_scan_is_never_remembered() {
    let rig = Rig::new(&[("x", "0000")]);
    for round in 0..200 {
        rig.write("x", &format!("{round:04}"));
        assert_eq!(rig.look(), 1);
    }
    assert!(rig.pages().is_empty());
    rig.clock.advance(Duration::from_secs(50));
    assert_eq!((rig.read(), rig.read()), (1, 1), "a mapped page may still be written to");
    rig.settle();
    assert_eq!((rig.read(), rig.read()), (1, 0));
}

#[test]
fn test_a_time_that_was_put_back_does_not_hide_a_change() {
    let rig = Rig::new(&[("x", "old!")]);
    rig.set_times("x", 1_000_000);
    rig.settle();
    assert_eq!((rig.read(), rig.read()), (1, 0));
    let inode = fs::metadata(rig.at("x")).unwrap().ino();
    rig.write("x", "new!");
    rig.set_times("x", 1_000_000);
    let about = fs::metadata(rig.at("x")).unwrap();
    assert_eq!((about.ino(), about.len(), about.mtime()), (inode, 4, 1_000_000));
    assert_eq!(rig.read(), 1);
}

#[test]
fn test_a_file_that_took_the_place_or_the_inode_of_another_is_read() {
    let rig = Rig::new(&[("x", "old!"), ("y", "two!")]);
    rig.set_times("x", 1_000_000);
    rig.set_times("y", 1_000_000);
    rig.settle();
    assert_eq!((rig.read(), rig.read()), (2, 0));
    rustix::fs::renameat_with(
        rustix::fs::CWD,
        rig.at("x"),
        rustix::fs::CWD,
        rig.at("y"),
        rustix::fs::RenameFlags::EXCHANGE,
    )
    .unwrap();
    assert_eq!(rig.read(), 2, "they changed places, with equal sizes and times");
    // Many file systems give the number of the file that was just removed to the next one.
    fs::remove_file(rig.at("x")).unwrap();
    rig.write("x", "new!");
    rig.set_times("x", 1_000_000);
    rig.read();
}

#[test]
fn test_each_part_of_a_stamp_counts() {
    let stamp = Stamp { device: 1, inode: 2, size: 3, modified: 4, changed: 5 };
    let others = [
        Stamp { device: 9, ..stamp },
        Stamp { inode: 9, ..stamp },
        Stamp { size: 9, ..stamp },
        Stamp { modified: -4, ..stamp },
        Stamp { changed: 5 + (1 << 40), ..stamp },
    ];
    assert!(others.iter().all(|other| bytes_of(other) != bytes_of(&stamp)));
}

#[test]
fn test_times_of_the_future_and_pages_of_the_future_are_not_believed() {
    let rig = Rig::new(&[("x", "1"), ("y", "2")]);
    rig.set_times("y", i64::from(u32::MAX));
    rig.settle();
    assert_eq!((rig.read(), rig.read()), (2, 1));
    // The same page, when the clock is right again.
    let early = Arc::new(ManualClock::new(SystemClock.now()));
    let cache = StatCache::with_clock(rig.cache.dir.clone(), early);
    assert_eq!(cache.scan(&rig.at("")).unwrap().read, 2);
}

#[test]
fn test_a_damaged_page_costs_time_alone() {
    let many: Vec<(String, String)> = (0..20).map(|i| (format!("d{}/f{i}", i % 5), i.to_string())).collect();
    let files: Vec<(&str, &str)> = many.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    let rig = Rig::learned(&files);
    let whole = fs::read(rig.page()).unwrap();
    for at in (0..whole.len()).step_by(11) {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x10;
        for page in [&flipped[..], &whole[..at]] {
            fs::write(rig.page(), page).unwrap();
            rig.look();
            assert!(at % 110 != 0 || rig.look() == 0, "a bad page is replaced");
        }
    }
    for page in
        [&b""[..], b"a foreign file", b"agentst\x00", &[0xff; 100], &[&whole[..24], &[0xff; 40]].concat()]
    {
        fs::write(rig.page(), page).unwrap();
        assert_eq!((rig.look(), rig.look()), (20, 0));
    }
    let mut old = whole.clone();
    old[7] = 0;
    fs::write(rig.page(), old).unwrap();
    assert_eq!((rig.look(), rig.look()), (20, 0));
}

/// A page whose checksums hold, but whose text does not: nothing but a page of another program could be that.
#[test]
fn test_a_block_that_makes_no_sense_is_not_believed() {
    let rig = Rig::learned(&FILES);
    let page = rig.page();
    let head = fs::read(&page).unwrap()[..24].to_vec();
    let record = [&[1, 0, b'a'][..], &[0; 72]].concat();
    let blocks: [&[u8]; 6] = [
        b"",
        b"\x00",
        b"\xff\xff",
        b"\x01\x00\xff",
        &[&[0, 0][..], &record[..40]].concat(),
        &[&[0, 0][..], &record, &[9]].concat(),
    ];
    for block in blocks {
        let length = u32::try_from(block.len()).unwrap().to_le_bytes();
        fs::write(&page, [&head[..], &length, &sum(block), block].concat()).unwrap();
        assert_eq!((rig.read(), rig.read()), (FILES.len() as u64, 0), "{block:?}");
    }
    // One with a stamp that is not the file's.
    let block = [&[0, 0][..], &record].concat();
    let length = u32::try_from(block.len()).unwrap().to_le_bytes();
    fs::write(&page, [&head[..], &length, &sum(&block), &block].concat()).unwrap();
    assert_eq!((rig.read(), rig.read()), (FILES.len() as u64, 0));
}

#[test]
fn test_the_cache_is_for_one_user_and_leads_nowhere() {
    let rig = Rig::learned(&FILES);
    assert_eq!(fs::metadata(&rig.cache.dir).unwrap().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(rig.page()).unwrap().mode() & 0o777, 0o600);
    let elsewhere = rig.base.path().join("elsewhere");
    fs::rename(rig.page(), &elsewhere).unwrap();
    let page = rig.cache.page(Rules::Code, &rig.at("")).path();
    symlink(&elsewhere, &page).unwrap();
    assert_eq!((rig.read(), rig.read()), (FILES.len() as u64, 0));
    assert!(fs::symlink_metadata(&page).unwrap().is_file(), "the link was replaced, not followed");
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&page, Some(4711), None).unwrap();
        assert_eq!((rig.read(), rig.read()), (FILES.len() as u64, 0));
    }
}

#[test]
fn test_a_cache_that_cannot_be_kept_is_no_failure() {
    let rig = Rig::new(&FILES);
    rig.settle();
    fs::write(rig.base.path().join("deep"), "no directory").unwrap();
    assert_eq!((rig.read(), rig.read()), (FILES.len() as u64, FILES.len() as u64));
}

#[test]
fn test_forget_and_other_rules_have_every_file_read() {
    let rig = Rig::learned(&FILES);
    rig.write(".amlignore", "d\n");
    rig.settle();
    assert_eq!((rig.read(), rig.read()), (1, 0));
    let whole = rig.cache.scan_whole(&rig.at("")).unwrap();
    assert_eq!((whole.read, whole.root), (7, scan_whole(&rig.at("")).unwrap().root));
    assert_eq!(rig.cache.scan_whole(&rig.at("")).unwrap().read, 0);
    assert_eq!(rig.read(), 0, "each keeps its own page");
    rig.cache.forget(&rig.at(""));
    assert_eq!((rig.read(), rig.cache.scan_whole(&rig.at("")).unwrap().read), (5, 7));
}

#[test]
fn test_the_way_to_the_directory_does_not_matter_but_the_directory_does() {
    let rig = Rig::learned(&FILES);
    symlink(rig.at(""), rig.base.path().join("link")).unwrap();
    assert_eq!(rig.cache.scan(&rig.base.path().join("link/d/..")).unwrap().read, 0);
    assert_eq!(rig.cache.scan(&rig.at("d")).unwrap().read, 2);
    assert_eq!(rig.pages().len(), 2);
}

#[test]
fn test_two_scans_at_once_leave_a_good_page() {
    let many: Vec<(String, String)> = (0..300).map(|i| (format!("d{}/f{i}", i % 9), i.to_string())).collect();
    let files: Vec<(&str, &str)> = many.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    let rig = Rig::new(&files);
    let root = scan(&rig.at("")).unwrap().root;
    rig.settle();
    let scans = |rounds: usize| {
        for round in 0..rounds {
            if round % 3 == 0 {
                rig.cache.forget(&rig.at(""));
            }
            assert_eq!(rig.cache.scan(&rig.at("")).unwrap().root, root);
        }
    };
    std::thread::scope(|scope| {
        (0..4).for_each(|_| drop(scope.spawn(|| scans(12))));
    });
    rig.read();
    assert_eq!(rig.read(), 0);
    assert_eq!(rig.pages().len(), 1, "nothing unfinished stays");
}

#[test]
fn test_the_cache_is_bounded_and_what_was_written_last_stays() {
    let rig = Rig::new(&[]);
    let base = 1_000_000;
    for number in 0..PAGES as i64 + 8 {
        let path = rig.base.path().join(format!("deep/cache/{number:04}.temp"));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "x").unwrap();
        rig.set_times(path.to_str().unwrap(), base + number);
    }
    rig.write("x", "1");
    rig.settle();
    assert_eq!((rig.read(), rig.read()), (1, 0));
    let mut left: Vec<_> = rig.pages().iter().map(|path| path.file_name().unwrap().to_owned()).collect();
    left.sort();
    assert_eq!(left.len(), PAGES);
    assert_eq!(left[0], "0009.temp");
    let large = rig.base.path().join("deep/cache/0100.temp");
    fs::File::create(&large).unwrap().set_len(BYTES - 10).unwrap();
    prune(&rig.cache.dir).unwrap();
    assert_eq!(rig.pages(), [large], "it alone has nearly all the room");
}

#[test]
fn test_a_large_directory_takes_several_blocks() {
    let rig = Rig::new(&[]);
    let name = "n".repeat(200);
    (0..2000).for_each(|i| rig.write(&format!("d/{name}{i}"), ""));
    rig.write("e/x", "1");
    rig.settle();
    assert_eq!((rig.read(), rig.read()), (2001, 0));
    assert!(fs::metadata(rig.page()).unwrap().len() > 4 * BLOCK as u64);
    fs::remove_file(rig.at(&format!("d/{name}1000"))).unwrap();
    rig.write(&format!("d/{name}1500"), "new");
    assert_eq!(rig.read(), 1);
}

#[test]
fn test_a_page_that_is_mostly_out_of_date_is_written_anew() {
    let rig = Rig::new(&[("keep", "1")]);
    (0..STALE + 10).for_each(|i| rig.write(&format!("d/{i}"), ""));
    rig.settle();
    rig.read();
    let full = fs::metadata(rig.page()).unwrap().len();
    fs::remove_dir_all(rig.at("d")).unwrap();
    assert_eq!(rig.read(), 0);
    assert!(fs::metadata(rig.page()).unwrap().len() < full / 100);
}

/// Random edits, each of which may leave size and time as they were, against scans that remember nothing.
#[test]
fn test_random_edits_are_always_seen() {
    use proptest::prelude::*;
    let edit = (0..6_usize, 0..5_u8, any::<bool>());
    proptest!(ProptestConfig::with_cases(12), |(edits in prop::collection::vec(edit, 1..16))| {
        let rig = Rig::learned(&FILES);
        for (file, kind, settles) in edits {
            let path = rig.at(FILES[file].0);
            let old = fs::metadata(&path).ok().map(|about| about.mtime());
            match kind {
                0 => { fs::remove_file(&path).ok(); }
                1 => { fs::rename(rig.at(FILES[(file + 1) % 6].0), &path).ok(); }
                _ => rig.write(FILES[file].0, &kind.to_string()),
            }
            if let Some(old) = old.filter(|_| path.exists() && kind < 4) {
                rig.set_times(FILES[file].0, old);
            }
            if settles {
                rig.settle();
            }
            rig.read();
        }
    });
}

#[test]
fn test_a_clock_before_1970_or_without_end_is_no_panic() {
    let rig = Rig::learned(&FILES);
    for now in [0, 1, u64::MAX] {
        let clock = Arc::new(ManualClock::new(Timestamp(now)));
        let cache = StatCache::with_clock(rig.cache.dir.clone(), clock);
        assert_ne!(cache.scan(&rig.at("")).unwrap().root, Digest::EMPTY);
    }
}
