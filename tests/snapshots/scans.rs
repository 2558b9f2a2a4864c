//! Group S: what is read while somebody writes there. A scan from outside: what it takes in is what was there at
//! some moment, below the directory it was given and nowhere else, and it ends.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use agent_cas::snapshot::{self, Snapshot};
use agent_cas::{BlobStore, Disk};
use agent_tests::client::runtime;
use agent_tests::table::{Row, Scale, Tally};

use crate::snapshots::isolation::become_nobody;

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "S1", promise: "a file that changes while it is read is read whole or refused", run: changing },
    Row {
        id: "S2",
        promise: "a directory that becomes a link while it is walked leads nowhere",
        run: swapped,
    },
    Row {
        id: "S3",
        promise: "odd things in a directory are kept, left out or refused, and never followed",
        run: odd,
    },
    Row { id: "S4", promise: "what git ignores is ignored, and nothing else", run: ignored },
    Row {
        id: "S5",
        promise: "what cannot be sent is refused by its name, what is only huge is not",
        run: extreme,
    },
];

/// A directory, and a store for what is read from it.
struct Bench {
    home: tempfile::TempDir,
    disk: Disk,
}

impl Bench {
    fn new() -> Bench {
        let home = tempfile::tempdir().expect("a directory");
        fs::create_dir(home.path().join("code")).expect("a directory");
        let disk = Disk::open(&home.path().join("store")).expect("a store");
        Bench { home, disk }
    }

    fn code(&self) -> PathBuf {
        self.home.path().join("code")
    }

    /// Scans and sends; what was laid out of it, unless it was refused.
    fn there_and_back(&self, to: &str) -> Option<PathBuf> {
        let scanned: Snapshot = snapshot::scan(&self.code()).ok()?;
        runtime().block_on(snapshot::push(&scanned, &self.disk, |_| {})).ok()?;
        assert_eq!(runtime().block_on(self.disk.missing(&[scanned.root])).expect("it says so"), []);
        let dest = self.home.path().join(to);
        runtime()
            .block_on(snapshot::materialize(&self.disk, scanned.root, &dest, None, &[]))
            .expect("it is whole");
        Some(dest)
    }
}

/// What is done to a file: in words, and with which byte.
type Change = (&'static str, fn(&Path, u8));

/// A file is always rewritten with bytes that are all the same: a mixture was never there.
fn changing(tally: &mut Tally, scale: &Scale) {
    let changes: &[Change] = &[
        ("moved in place of", |path, byte| {
            let new = path.with_extension("new");
            if fs::write(&new, vec![byte; 1 << 20]).is_ok() {
                let _ = fs::rename(&new, path);
            }
        }),
        ("truncated and grown", |path, byte| {
            let _ = fs::write(path, vec![byte; 1 << 20]);
        }),
        ("written in place", |path, byte| {
            if let Ok(mut file) = File::options().write(true).open(path) {
                let _ = file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&vec![byte; 1 << 20]));
            }
        }),
        ("a link, and a file again", |path, byte| {
            let _ = fs::remove_file(path);
            let _ = symlink("/etc/passwd", path);
            let _ = fs::remove_file(path);
            let _ = fs::write(path, vec![byte; 1000]);
        }),
        ("a pipe, and a file again", |path, byte| {
            let _ = fs::remove_file(path);
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            let _ = rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0);
            let _ = fs::remove_file(path);
            let _ = fs::write(path, vec![byte; 1000]);
        }),
    ];
    for (what, change) in changes {
        tally.case(what, || {
            let bench = Bench::new();
            let path = bench.code().join("file");
            fs::write(&path, vec![1; 1 << 20]).expect("a file");
            let (over, writes) = (AtomicBool::new(false), AtomicU64::new(0));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for byte in (b'a'..=b'z').cycle() {
                        if over.load(Ordering::Relaxed) {
                            return;
                        }
                        change(&path, byte);
                        writes.fetch_add(1, Ordering::Relaxed);
                    }
                });
                for round in 0..scale.of(15, 200) {
                    let name = format!("{round}");
                    let Some(dest) = bench.there_and_back(&name) else { continue };
                    let laid = dest.join("file");
                    if laid.exists() && *what == "moved in place of" {
                        let bytes = fs::read(&laid).expect("a file");
                        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a mixture");
                    }
                    assert!(!laid.is_symlink(), "a link to the outside was kept");
                }
                over.store(true, Ordering::Relaxed);
            });
            assert!(writes.load(Ordering::Relaxed) > 0, "nobody wrote");
        });
    }
}

/// A directory that is now a directory and now a link to one with a secret in it.
fn swapped(tally: &mut Tally, scale: &Scale) {
    let bench = Bench::new();
    let (inside, aside) = (bench.code().join("d"), bench.home.path().join("aside"));
    let secret = bench.home.path().join("secret");
    for dir in [&inside, &secret] {
        fs::create_dir(dir).expect("a directory");
    }
    for i in 0..50 {
        fs::write(inside.join(format!("{i}")), "public").expect("a file");
        fs::write(secret.join(format!("{i}")), "secret").expect("a file");
    }
    let (over, swaps) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                if fs::rename(&inside, &aside).is_ok() {
                    let _ = symlink(&secret, &inside);
                    swaps.fetch_add(1, Ordering::Relaxed);
                    let _ = fs::remove_file(&inside);
                    let _ = fs::rename(&aside, &inside);
                }
            }
        });
        for round in 0..scale.of(100, 2000) {
            tally.case(&format!("round {round}"), || {
                let Some(dest) = bench.there_and_back("dest") else { return };
                for i in 0..50 {
                    let read = fs::read(dest.join(format!("d/{i}"))).unwrap_or_default();
                    assert_ne!(read, b"secret", "what is outside was taken in");
                }
                fs::remove_dir_all(dest).expect("it is removed");
            });
        }
        over.store(true, Ordering::Relaxed);
    });
    let digest = agent_cas::digest_of(b"secret");
    tally.case("the store", || {
        let missing = runtime().block_on(bench.disk.missing(&[digest])).expect("it says so");
        assert_eq!(missing, [digest], "the secret is in the store");
    });
    tally.note(format!("{} swaps", swaps.load(Ordering::Relaxed)));
    tally.case("there were swaps", || assert!(swaps.load(Ordering::Relaxed) > 0));
}

fn odd(tally: &mut Tally, _: &Scale) {
    let keeps = |what: &str, make: &dyn Fn(&Path), kept: &[&str]| {
        let bench = Bench::new();
        make(&bench.code());
        let dest = bench.there_and_back("dest").unwrap_or_else(|| panic!("{what}: it is refused"));
        let mut found: Vec<String> = fs::read_dir(&dest)
            .expect("a directory")
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        found.sort();
        assert_eq!(found, kept, "{what}");
    };
    let fifo = |path: &Path| {
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).expect("a pipe");
    };
    type Make<'a> = Box<dyn Fn(&Path) + 'a>;
    let link = |target: &'static str| -> Make<'_> {
        Box::new(move |code: &Path| symlink(target, code.join("l")).expect("a link"))
    };
    let cases: Vec<(&str, Make<'_>, &[&str])> = vec![
        ("a pipe", Box::new(|code| fifo(&code.join("pipe"))), &[]),
        (
            "a socket",
            Box::new(|code| {
                drop(std::os::unix::net::UnixListener::bind(code.join("s")).expect("a socket"));
            }),
            &[],
        ),
        ("a link to itself", link("l"), &[]),
        ("a link to what is not there yet", link("nothing"), &["l"]),
        ("a link out", link("/etc/passwd"), &[]),
        ("a link up and out", link("../../../etc/passwd"), &[]),
        ("a link to its directory", link("."), &["l"]),
        (
            "a link of 4,000 bytes to what is not there yet",
            Box::new(|code| {
                symlink("t/".repeat(2000), code.join("l")).expect("a link");
            }),
            &["l"],
        ),
        ("an empty directory", Box::new(|code| fs::create_dir(code.join("d")).expect("a directory")), &["d"]),
        (
            "a name that is no text",
            Box::new(|code| {
                use std::os::unix::ffi::OsStrExt;
                fs::write(code.join(std::ffi::OsStr::from_bytes(b"\xff\xfe")), "x").expect("a file");
            }),
            &["\u{fffd}\u{fffd}"],
        ),
        (
            "a file that is not readable, for who may read anything",
            Box::new(|code| {
                fs::write(code.join("f"), "x").expect("a file");
                fs::set_permissions(code.join("f"), fs::Permissions::from_mode(0o000)).expect("its mode");
            }),
            &["f"],
        ),
        (
            "names with newlines and escapes",
            Box::new(|code| fs::write(code.join("a\n\u{1b}[2J"), "x").expect("a file")),
            &["a\n\u{1b}[2J"],
        ),
    ];
    for (what, make, kept) in &cases {
        tally.case(what, || keeps(what, make, kept));
    }
}

/// Patterns that readers of ignore files get wrong.
const PATTERNS: &[&str] = &[
    "*.log",
    "/a.log",
    "build/",
    "**/cache",
    "a/**",
    "a/**/b",
    "!keep.log",
    "*.log\n!keep.log",
    "*\n!*/\n!*.py",
    "\\!important",
    "\\#hash",
    "# a comment",
    "trailing \\ ",
    "trailing   ",
    "[ab].txt",
    "[!ab].txt",
    "?.txt",
    "a.txt\r",
    "\u{feff}a.txt",
    "build\n!build/keep.log",
    "/*\n!/a",
    "a/b",
    "b",
    "**",
    "a/*",
    "*/b",
    "\\a.txt",
    "[",
    "a[",
    "A.TXT",
    "/",
    "//",
    "build//",
    "***/b",
    "[[:digit:]]*",
    "![[:digit:]]*",
    "!",
];

#[allow(clippy::disallowed_methods, reason = "asks git what it thinks")]
pub(crate) fn git(dir: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new("git");
    command.args(["-c", "init.defaultBranch=main", "-c", "core.excludesFile=/dev/null"]);
    let done = command.args(arguments).current_dir(dir).output().expect("git starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).expect("text")
}

/// What git would keep of a directory that is a repository.
pub(crate) fn kept_by_git(dir: &Path) -> Vec<String> {
    let listed = git(dir, &["ls-files", "-z", "-co", "--exclude-standard"]);
    let mut kept: Vec<String> =
        listed.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect();
    kept.sort();
    kept
}

/// What is there when a directory was sent to `disk`.
pub(crate) fn kept_by_us(dir: &Path, disk: &Disk) -> Vec<String> {
    let scanned = snapshot::scan(dir).expect("it can be scanned");
    runtime().block_on(snapshot::push(&scanned, disk, |_| {})).expect("it is kept");
    let listed = runtime().block_on(snapshot::list(disk, scanned.root)).expect("it is listed");
    let mut kept: Vec<String> = listed.into_iter().map(|entry| entry.path).collect();
    kept.sort();
    kept
}

fn ignored(tally: &mut Tally, _: &Scale) {
    let names = [
        "a.txt",
        "b.txt",
        "c.txt",
        "1.txt",
        "a.log",
        "keep.log",
        "!important",
        "#hash",
        "trailing ",
        "trailing",
        "main.py",
        "a/b",
        "a/c/b",
        "a/a.log",
        "build/x",
        "build/keep.log",
        "x/build/y",
        "x/cache/z",
        "x/b/c",
    ];
    for pattern in PATTERNS {
        tally.case(&format!("{pattern:?}"), || {
            let bench = Bench::new();
            for name in names {
                let path = bench.code().join(name);
                fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
                fs::write(path, name).expect("a file");
            }
            fs::write(bench.code().join(".gitignore"), pattern).expect("a file");
            git(&bench.code(), &["init", "-q"]);
            let wanted = kept_by_git(&bench.code());
            let kept = kept_by_us(&bench.code(), &bench.disk);
            assert_eq!(kept, wanted);
        });
    }
}

fn extreme(tally: &mut Tally, scale: &Scale) {
    tally.case("a file that this user may not read", || {
        let bench = Bench::new();
        for dir in [bench.home.path().to_owned(), bench.code()] {
            fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).expect("its mode");
        }
        fs::write(bench.code().join("open"), "x").expect("a file");
        fs::write(bench.code().join("closed"), "x").expect("a file");
        fs::set_permissions(bench.code().join("closed"), fs::Permissions::from_mode(0o600))
            .expect("its mode");
        let code = bench.code();
        // Of this thread alone, and of those that it starts.
        let scanned = std::thread::spawn(move || {
            become_nobody();
            snapshot::scan(&code).map(|scanned| scanned.files)
        });
        let refused = scanned.join().expect("it ends").expect_err("it is refused");
        let words = format!("{refused}");
        assert!(words.contains("closed"), "{words}");
    });
    for (what, depth, is_taken) in [("200 directories deep", 199, true), ("201 directories deep", 200, false)]
    {
        tally.case(what, || {
            let bench = Bench::new();
            let below = bench.code().join(["d"].repeat(depth).join("/"));
            fs::create_dir_all(&below).expect("directories");
            fs::write(below.join("f"), "x").expect("a file");
            match snapshot::scan(&bench.code()) {
                Ok(_) => assert!(is_taken && bench.there_and_back("dest").is_some(), "it is taken"),
                Err(refused) => assert!(!is_taken && refused.to_string().contains("deep"), "{refused}"),
            }
        });
    }
    let names = scale.of(20_000, 320_000);
    tally.case(&format!("{names} names in one directory"), || {
        let bench = Bench::new();
        (0..names).for_each(|i| drop(File::create(bench.code().join(format!("{i:0100}"))).expect("a file")));
        match snapshot::scan(&bench.code()) {
            Ok(scanned) => assert!(names < 300_000 && scanned.files == names, "{}", scanned.files),
            Err(refused) => assert!(names > 300_000, "{refused}"),
        }
    });
    let huge: u64 = scale.of(1 << 30, 5 << 30);
    tally.case(&format!("a file of {} GiB with nothing in it", huge >> 30), || {
        let bench = Bench::new();
        let file = File::create(bench.code().join("sparse")).expect("a file");
        file.set_len(huge).expect("its length");
        let scanned = snapshot::scan(&bench.code()).expect("it is taken");
        assert_eq!((scanned.files, scanned.bytes), (1, huge));
        assert_eq!(scanned.largest, [("sparse".to_owned(), huge)]);
    });
    tally.case("a path that is longer than the system takes", || {
        let bench = Bench::new();
        let long = "n".repeat(250);
        // Made from within: nothing can name it from outside.
        let mut dir =
            rustix::fs::open(bench.code(), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).expect("it");
        for _ in 0..17 {
            rustix::fs::mkdirat(&dir, &*long, rustix::fs::Mode::RWXU).expect("a directory");
            dir = rustix::fs::openat(&dir, &*long, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty())
                .expect("it");
        }
        let refused = snapshot::scan(&bench.code()).err().map(|refused| refused.to_string());
        assert!(refused.is_some(), "a path of 4,266 bytes is taken");
    });
}
