//! Group D: disks that are full, read-only, elsewhere, or lost something.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use agent_env::FailureKind::{self, DiskFull, Other};
use agent_env::Task;
use agent_tests::bounds::SmallDisk;
use agent_tests::{SOON, eventually};

use crate::environments::bench::{Room, files, server, text, tiny};
use agent_tests::table::{Row, Scale, Tally};

/// The cases of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "D1",
        promise: "a full disk is told as that, wherever it is met, and is clean after a sweep",
        run: full,
    },
    Row { id: "D2", promise: "a package that is much larger than it says fills no disk for good", run: bomb },
    Row { id: "D3", promise: "a cache on another file system works", run: elsewhere },
    Row {
        id: "D4",
        promise: "a disk that takes nothing is told with what was to be written",
        run: read_only,
    },
    Row { id: "D5", promise: "a cache that lost or damaged something is made whole again", run: lost },
    Row { id: "D6", promise: "a sweep leaves what is used, and nothing that is not", run: swept },
];

/// Bytes in use below a directory, by what the disk gave for them.
fn used(dir: &Path) -> u64 {
    let size = |path: PathBuf| fs::symlink_metadata(dir.join(path)).map_or(0, |meta| meta.blocks() * 512);
    files(dir).into_iter().map(size).sum()
}

/// After a failure: the prefix is removed as the daemon would, the cache is swept, and something small fits.
#[track_caller]
fn recovers(room: &Room, prefix: &Path, at_most: u64) {
    fs::remove_dir_all(prefix).expect("the prefix can be removed");
    room.sweep(3600);
    let left = used(&room.cache);
    assert!(left <= at_most, "{left} bytes are left, in {:#?}", files(&room.cache));
    let (prefix, _) = room.made(&tiny("main"), &["linked"]);
    assert_eq!(text(&prefix, "share/linked/target"), "1\n");
}

/// What an engine leaves free on a disk, and more.
const LARGE: &str = "size=100m";

fn full(tally: &mut Tally, _: &Scale) {
    const PACKAGE: &str = "big";
    tally.case("a disk that is too small from the beginning", || {
        let disk = SmallDisk::mount("size=8m");
        let room = Room::at(disk.path());
        let wish = room.wish(&tiny("main"), &[PACKAGE]);
        let told = room.build(&wish);
        let failure = told.failed(&[DiskFull]);
        assert!(failure.hint.is_some(), "what is to be done? {failure:#?}");
        assert!(!wish.prefix.join("share").exists() && used(&room.cache) < 1 << 20, "something was begun");
    });
    for package in [PACKAGE, "part-00"] {
        tally.case(&format!("a disk that is filled meanwhile, in {package}"), || {
            let (disk, server) = (SmallDisk::mount(LARGE), server());
            let mut room = Room::new();
            room.cache = disk.path().join("cache");
            fs::create_dir(&room.cache).expect("a directory");
            let wish = room.wish(&server.url(&format!("stall~{package}")), &[package, "linked"]);
            let engine = room.start(&Task::Build(Box::new(wish.clone())));
            eventually("it stalls", SOON, || (server.stalled() > 0).then_some(()));
            let ballast = Ballast::fill(disk.path());
            server.release();
            let told = engine.finish();
            assert!(told.failed(&[DiskFull]).hint.is_some(), "what is to be done? {told:#?}");
            drop(ballast);
            recovers(&room, &wish.prefix, 1 << 20);
            room.made(&server.url("plain"), &[package]);
        });
    }
    tally.case("the environment on a disk that is too small", || {
        let (disk, room) = (SmallDisk::mount("size=3m"), Room::new());
        let mut wish = room.wish(&tiny("main"), &[PACKAGE]);
        wish.prefix = disk.path().join("environment");
        fs::create_dir(&wish.prefix).expect("a directory");
        room.build(&wish).failed(&[DiskFull]);
        // The package is sound and stays.
        recovers(&room, &wish.prefix, 64 << 20);
    });
    for inodes in [100, 1000, 2500] {
        tally.case(&format!("{inodes} inodes"), || {
            let disk = SmallDisk::mount(&format!("{LARGE},nr_inodes={inodes}"));
            let room = Room::at(disk.path());
            let wish = room.wish(&tiny("main"), &["many-files"]);
            room.build(&wish).failed(&[DiskFull]);
            recovers(&room, &wish.prefix, 64 << 20);
        });
    }
}

/// A file that takes all the room of a disk, until it is dropped.
struct Ballast(PathBuf);

impl Ballast {
    fn fill(disk: &Path) -> Ballast {
        let path = disk.join("ballast");
        let mut file = fs::File::create(&path).expect("a file");
        let block = vec![1; 64 << 10];
        while file.write_all(&block).is_ok() {}
        while file.write_all(&block[..512]).is_ok() {}
        Ballast(path)
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn bomb(tally: &mut Tally, _: &Scale) {
    tally.case("96 MiB in a few kilobytes, on a disk it would fill", || {
        let disk = SmallDisk::mount(LARGE);
        let room = Room::at(disk.path());
        let wish = room.wish(&tiny("main"), &["bomb"]);
        room.build(&wish).failed(&[DiskFull, FailureKind::Refused]);
        recovers(&room, &wish.prefix, 1 << 20);
    });
}

fn elsewhere(tally: &mut Tally, _: &Scale) {
    tally.case("cache on a tmpfs", || {
        let disk = SmallDisk::mount(LARGE);
        let mut room = Room::new();
        room.cache = disk.path().join("cache");
        fs::create_dir(&room.cache).expect("a directory");
        for _ in 0..2 {
            let (prefix, _) = room.made(&tiny("main"), &["linked", "big", "text-prefix"]);
            assert_eq!(fs::metadata(prefix.join("share/big.bin")).expect("a file").len(), 4 << 20);
            assert_eq!(text(&prefix, "share/linked/link"), "1\n");
        }
    });
}

fn read_only(tally: &mut Tally, _: &Scale) {
    tally.case("the environment", || {
        let (disk, room) = (SmallDisk::mount(LARGE), Room::new());
        let mut wish = room.wish(&tiny("main"), &["linked"]);
        wish.prefix = disk.path().join("environment");
        fs::create_dir(&wish.prefix).expect("a directory");
        disk.make_read_only();
        let told = room.build(&wish);
        let failure = told.failed(&[Other, FailureKind::Refused]);
        assert!(failure.message.to_lowercase().contains("read-only"), "{failure:#?}");
    });
    tally.case("the cache", || {
        let (disk, mut room) = (SmallDisk::mount(LARGE), Room::new());
        room.cache = disk.path().join("cache");
        fs::create_dir(&room.cache).expect("a directory");
        disk.make_read_only();
        let told = room.build(&room.wish(&tiny("main"), &["linked"]));
        let failure = told.failed(&[Other, FailureKind::Refused]);
        assert!(failure.message.contains(&room.cache.display().to_string()), "{failure:#?}");
    });
}

/// The copy of a file of a package in the cache.
#[track_caller]
fn cached(room: &Room, ending: &str) -> PathBuf {
    let found = files(&room.cache).into_iter().find(|path| path.ends_with(ending));
    room.cache
        .join(found.unwrap_or_else(|| panic!("{ending} is not in the cache: {:#?}", files(&room.cache))))
}

/// Replaces what is in the cache; whatever shares it keeps what it has.
fn replace(path: &Path, with: Option<&[u8]>) {
    fs::remove_file(path).expect("a file");
    if let Some(bytes) = with {
        fs::write(path, bytes).expect("a file");
    }
}

fn lost(tally: &mut Tally, _: &Scale) {
    let damages: &[(&str, &str, Option<&[u8]>)] = &[
        ("a file is missing", "share/part-00/7.txt", None),
        ("a file is empty, as after a power cut", "share/part-00/7.txt", Some(b"")),
        ("the list of a package is missing", "part-00-1.0-0/info/paths.json", None),
        ("the list of a package is empty", "part-00-1.0-0/info/paths.json", Some(b"")),
        ("the index of a package is empty", "part-00-1.0-0/info/index.json", Some(b"")),
    ];
    for (name, path, with) in damages {
        tally.case(name, || {
            let room = Room::new();
            room.made(&tiny("main"), &["part-00", "part-01"]);
            replace(&cached(&room, path), *with);
            let (prefix, _) = room.made(&tiny("main"), &["part-00", "part-01"]);
            assert_eq!(text(&prefix, "share/part-00/7.txt"), format!("0 7 {}\n", prefix.display()));
        });
    }
    tally.case("a package is gone altogether", || {
        let room = Room::new();
        room.made(&tiny("main"), &["part-00", "part-01"]);
        let package = cached(&room, "part-00-1.0-0/info/index.json");
        fs::remove_dir_all(package.ancestors().nth(2).expect("the package")).expect("a directory");
        room.made(&tiny("main"), &["part-00", "part-01"]);
    });
    for (name, bytes) in [("empty", b"".as_slice()), ("cut", b"{\"info\": {"), ("zeros", &[0; 4096])] {
        tally.case(&format!("every list of a channel is {name}"), || {
            let (room, server) = (Room::new(), server());
            room.made(&server.url("plain"), &["linked"]);
            let all = files(&room.cache);
            let lists: Vec<_> =
                all.iter().filter(|path| path.to_string_lossy().contains("repodata")).collect();
            assert!(!lists.is_empty(), "no list is kept: {all:#?}");
            lists.iter().for_each(|path| replace(&room.cache.join(path), Some(bytes)));
            room.made(&server.url("plain"), &["linked"]);
        });
    }
    tally.case("the whole cache is gone", || {
        let room = Room::new();
        room.made(&tiny("main"), &["linked"]);
        fs::remove_dir_all(&room.cache).expect("a directory");
        room.made(&tiny("main"), &["linked"]);
    });
}

fn swept(tally: &mut Tally, _: &Scale) {
    let room = Room::new();
    let (prefix, _) = room.made(&tiny("main"), &["big", "linked", "parts"]);
    tally.case("what was used just now stays", || {
        room.sweep(3600);
        assert!(cached(&room, "share/big.bin").exists());
    });
    tally.case("the environment is as it was", || {
        room.sweep(0);
        assert_eq!(text(&prefix, "share/linked/target"), "1\n");
        assert_eq!(fs::metadata(prefix.join("share/big.bin")).expect("a file").len(), 4 << 20);
    });
    tally.case("without environments all packages go", || {
        fs::remove_dir_all(&prefix).expect("a directory");
        let before = used(&room.cache);
        let freed = room.sweep(0);
        let left: Vec<_> =
            files(&room.cache).into_iter().filter(|path| path.to_string_lossy().contains("share/")).collect();
        assert_eq!(left, Vec::<PathBuf>::new());
        assert!(freed > 0 || before < 4 << 20, "{before} bytes were there, {freed} came free");
    });
    tally.case("what a stranger left half-made goes", || {
        let pkgs = room.cache.join("pkgs");
        let orphan = if pkgs.is_dir() { pkgs } else { room.cache.clone() }.join(".half-1.0-0AbCdEf");
        fs::create_dir(&orphan).expect("a directory");
        fs::write(orphan.join("part"), vec![7; 1 << 20]).expect("a file");
        let freed = room.sweep(3600);
        assert!(!orphan.exists() && freed >= 1 << 20, "{freed} bytes came free");
    });
    tally.case("an empty cache, and one that is not there", || {
        let room = Room::new();
        assert_eq!(room.sweep(0), 0);
        fs::remove_dir_all(&room.cache).expect("a directory");
        assert_eq!(room.sweep(0), 0);
    });
    tally.case("and all is built again", || {
        room.made(&tiny("main"), &["big", "linked", "parts"]);
    });
}
