//! Group I: what is laid out belongs to its job alone. Whatever happens in one tree, the store and every other tree
//! stay as they are, and a tree is there whole or not at all.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use agent_cas::snapshot::{self, Laid, MaterializeError, PrestagedTree};
use agent_cas::{BlobStore, Disk, Remote};
use agent_model::{Digest, JobDraft};
use agent_tests::client::runtime;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::table::{Row, Scale, Tally};

use crate::snapshots::forge::{Forge, directory, file};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "I1",
        promise: "what a job does to its files, as root, the next job does not see",
        run: mistreated,
    },
    Row { id: "I2", promise: "70,000 files of one content are 70,000 files", run: many_alike },
    Row { id: "I3", promise: "one content is executable here and not there", run: both_modes },
    Row { id: "I4", promise: "given up at any moment, a tree is there whole or not at all", run: given_up },
    Row {
        id: "I5",
        promise: "a tree that is taken apart while it is laid out leads nowhere else",
        run: taken_apart,
    },
    Row { id: "I6", promise: "what stands in the way is not followed, and not lost", run: in_the_way },
    Row {
        id: "I7",
        promise: "a job that names a hostile snapshot fails at once, says so, and harms nobody",
        run: jobs,
    },
    Row {
        id: "I8",
        promise: "directories that a job swaps for links at any moment lead no step of its node elsewhere",
        run: raced,
    },
    Row {
        id: "I9",
        promise: "a tree that was laid out ahead of time shows nothing of what any job did",
        run: spared,
    },
];

/// A store with a tree of every kind of file in it, and the directory that holds all of it.
struct Bench {
    home: tempfile::TempDir,
    disk: Disk,
    root: Digest,
}

impl Bench {
    fn new() -> Bench {
        let home = tempfile::tempdir().expect("a directory");
        let code = home.path().join("code");
        fs::create_dir_all(code.join("d/e")).expect("a directory");
        fs::write(code.join("empty"), "").expect("a file");
        fs::write(code.join("d/also-empty"), "").expect("a file");
        fs::write(code.join("small"), "small\n".repeat(100)).expect("a file");
        fs::write(code.join("d/e/large"), vec![7; 3 << 20]).expect("a file");
        fs::write(code.join("run.sh"), "#!/bin/sh\n").expect("a file");
        fs::set_permissions(code.join("run.sh"), fs::Permissions::from_mode(0o755)).expect("its mode");
        symlink("d/e/large", code.join("link")).expect("a link");
        for i in 0..150 {
            fs::write(code.join(format!("d/{i}")), format!("{i}\n").repeat(300)).expect("a file");
        }
        let disk = Disk::open(&home.path().join("store")).expect("a store");
        let scanned = snapshot::scan(&code).expect("a directory can be scanned");
        let root = scanned.root;
        runtime().block_on(snapshot::push(&scanned, &disk, |_| {})).expect("the store takes it");
        Bench { home, disk, root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn lay(&self, name: &str) -> Result<Laid, MaterializeError> {
        runtime().block_on(snapshot::materialize(&self.disk, self.root, &self.path(name), None, &[]))
    }

    /// The tree at `name` is exactly the one that was sent.
    fn is_right(&self, name: &str) {
        // As it was sent some files were executable, and as it is laid out all are: compare contents.
        let right = self.path("code");
        for entry in files(&right) {
            let relative = entry.strip_prefix(&right).expect("it is below");
            let laid = self.path(name).join(relative);
            assert_eq!(fs::read(&entry).expect("a file"), fs::read(&laid).expect("a file"), "{relative:?}");
            assert_eq!(fs::metadata(&laid).expect("a file").mode() & 0o7777, 0o775, "{relative:?}");
        }
        assert_eq!(files(&right).len(), files(&self.path(name)).len(), "no more and no fewer");
    }

    /// Every blob is still what its name says.
    fn store_is_sound(&self) {
        assert_eq!(runtime().block_on(self.disk.check(|_| {})).damaged, 0);
        for blob in files(&self.path("store/blobs")) {
            let name = blob.file_name().expect("a name").to_string_lossy().into_owned();
            let digest = agent_cas::digest_of(&fs::read(&blob).expect("a blob"));
            assert_eq!(name, format!("{}-{}", digest.hex(), digest.size));
            let meta = fs::metadata(&blob).expect("a blob");
            assert_eq!((meta.nlink(), meta.mode() & 0o7777), (1, 0o400), "{name}");
        }
    }
}

/// Every file below a directory, links not followed.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry")) {
        match entry.file_type().expect("a type") {
            kind if kind.is_dir() => found.extend(files(&entry.path())),
            kind if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
    found.sort();
    found
}

/// Ways to treat a file that is named `$1`.
const TREATMENTS: &[(&str, &str)] = &[
    ("writes in its place", r#"printf X | dd of="$1" conv=notrunc status=none"#),
    ("writes it anew", r#"echo mine > "$1""#),
    ("appends", r#"echo more >> "$1""#),
    ("truncates it", r#"truncate -s 1 "$1""#),
    ("makes it larger", r#"truncate -s 10M "$1""#),
    ("changes its mode", r#"chmod 0 "$1""#),
    ("makes it setuid", r#"chmod 4777 "$1""#),
    ("gives it away", r#"chown 12345:12345 "$1""#),
    ("changes its time", r#"touch -d @0 "$1""#),
    ("writes through a second name", r#"ln "$1" "$1.twin" && echo mine > "$1.twin""#),
    ("moves another in its place", r#"echo other > "$1.new" && mv "$1.new" "$1""#),
    ("removes it", r#"rm "$1""#),
    (
        "maps it and writes there",
        r#"python3 -c 'import mmap, os, sys
f = os.open(sys.argv[1], os.O_RDWR)
if os.fstat(f).st_size == 0: os.ftruncate(f, 1)
m = mmap.mmap(f, 0); m[0:1] = b"M"; m.flush()' "$1""#,
    ),
];

/// As root: whoever may do this may do anything to what it can reach.
fn mistreated(tally: &mut Tally, _: &Scale) {
    let bench = Bench::new();
    for (number, (treatment, script)) in TREATMENTS.iter().enumerate() {
        tally.case(&format!("a job {treatment}"), || {
            let (first, second) = (format!("first-{number}"), format!("second-{number}"));
            bench.lay(&first).expect("it is laid out");
            bench.is_right(&first);
            treat(script, &bench.path(&first));
            bench.lay(&second).expect("it is laid out");
            bench.is_right(&second);
            bench.store_is_sound();
        });
    }
}

/// Does this to some files of every kind in a tree.
#[allow(clippy::disallowed_methods, reason = "does what a job may do")]
fn treat(script: &str, tree: &Path) {
    for file in files(tree).into_iter().take(3).chain([tree.join("d/e/large")]) {
        let done = Command::new("sh").args(["-c", script, "sh"]).arg(&file).status();
        assert!(done.expect("a shell").success(), "{script}: {}", file.display());
    }
}

/// For each treatment three trees are laid out ahead of time. A job has the first and treats it; the next has the
/// second. The third is treated where it lies, by somebody who should not get there; nobody has that.
fn spared(tally: &mut Tally, _: &Scale) {
    let bench = Bench::new();
    fs::create_dir(bench.path("prestaged")).expect("a directory");
    let place = |number: usize, which: usize| bench.path(&format!("prestaged/{number}-{which}"));
    let prestaged_trees = runtime().block_on(async {
        let mut laying = tokio::task::JoinSet::new();
        for index in 0..3 * TREATMENTS.len() {
            let (disk, root, place) = (bench.disk.clone(), bench.root, place(index / 3, index % 3));
            laying.spawn(async move { (index, PrestagedTree::lay(&disk, root, &place, None).await) });
        }
        let mut laid = laying.join_all().await;
        laid.sort_by_key(|(index, _)| *index);
        laid.into_iter()
            .map(|(_, prestaged)| Arc::new(prestaged.expect("it is laid out")))
            .collect::<Vec<_>>()
    });
    let inode = |path: &Path| fs::metadata(path).expect("a directory").ino();
    for (number, (treatment, script)) in TREATMENTS.iter().enumerate() {
        tally.case(&format!("a job {treatment}"), || {
            let own = &prestaged_trees[3 * number..3 * number + 3];
            let lay = |name: &str, prestaged: &Arc<PrestagedTree>| {
                let (dest, near) = (bench.path(name), [Arc::clone(prestaged)]);
                let laid = snapshot::materialize(&bench.disk, bench.root, &dest, None, &near);
                runtime().block_on(laid).expect("it is laid out");
                assert!(prestaged.is_claimed());
                bench.is_right(name);
                inode(&dest)
            };
            let inodes = [0, 1, 2].map(|which| inode(&place(number, which)));
            let names = ["first", "second", "third"].map(|name| format!("{name}-spared-{number}"));
            assert_eq!(lay(&names[0], &own[0]), inodes[0], "it is the one that was laid out");
            treat(script, &bench.path(&names[0]));
            assert_eq!(lay(&names[1], &own[1]), inodes[1], "it is the one that was laid out");
            treat(script, &place(number, 2));
            lay(&names[2], &own[2]);
            assert!(!place(number, 2).exists(), "it is of no use to anybody");
            bench.store_is_sound();
        });
    }
}

fn many_alike(tally: &mut Tally, scale: &Scale) {
    // More than ext4 lets one file have names.
    let (groups, each) = scale.of((70, 1000), (200, 1000));
    let contents: &[(&str, &[u8])] = &[("tiny", b"x"), ("empty", b"")];
    for (what, bytes) in &contents[..scale.of(1, 2)] {
        tally.case(&format!("{} {what} files", groups * each), || {
            let home = tempfile::tempdir().expect("a directory");
            let disk = Disk::open(&home.path().join("store")).expect("a store");
            let mut forge = Forge::new();
            let content = forge.keep(bytes.to_vec());
            let inner: Vec<_> = (0..each).map(|i| file(&format!("{i:04}"), &content)).collect();
            let inner = forge.directory(&inner);
            let all: Vec<_> = (0..groups).map(|i| directory(&format!("{i:04}"), &inner)).collect();
            let root = forge.directory(&all);
            let blobs =
                forge.blobs.iter().map(|bytes| (agent_cas::digest_of(bytes), bytes.clone())).collect();
            for kept in runtime().block_on(disk.write_batch(blobs)) {
                kept.expect("the store takes it");
            }
            let dest = home.path().join("work");
            let laid = runtime()
                .block_on(snapshot::materialize(&disk, root, &dest, None, &[]))
                .expect("it is laid out");
            assert_eq!((laid.files, laid.bytes), (groups * each, groups * each * bytes.len() as u64));
            fs::write(dest.join("0000/0000"), "mine").expect("a file of the job");
            assert_eq!(fs::read(dest.join("0000/0001")).expect("another"), *bytes);
            for place in ["0000/0000", "0069/0999"] {
                assert_eq!(fs::metadata(dest.join(place)).expect("a file").nlink(), 1);
            }
            assert_eq!(files(&dest).len() as u64, groups * each);
        });
    }
}

fn both_modes(tally: &mut Tally, _: &Scale) {
    let home = tempfile::tempdir().expect("a directory");
    let code = home.path().join("code");
    fs::create_dir(&code).expect("a directory");
    for size in [0, 10, 3 << 20] {
        for (name, mode) in [("tool", 0o755), ("text", 0o644)] {
            let path = code.join(format!("{name}-{size}"));
            fs::write(&path, vec![b'#'; size]).expect("a file");
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("its mode");
        }
    }
    let disk = Disk::open(&home.path().join("store")).expect("a store");
    let scanned = snapshot::scan(&code).expect("a directory can be scanned");
    runtime().block_on(snapshot::push(&scanned, &disk, |_| {})).expect("the store takes it");
    let dest = home.path().join("dest");
    runtime().block_on(snapshot::download(&disk, scanned.root, &dest)).expect("it is laid out");
    for size in [0, 10, 3 << 20] {
        tally.case(&format!("two files of {size} bytes"), || {
            let of = |name: &str| fs::metadata(dest.join(format!("{name}-{size}"))).expect("a file");
            assert_ne!(of("tool").mode() & 0o100, 0);
            assert_eq!(of("text").mode() & 0o111, 0);
            assert_ne!(of("tool").ino(), of("text").ino());
        });
    }
}

/// Drops the call at a random moment, as a canceled job does. With the store near and with it behind a wire.
fn given_up(tally: &mut Tally, scale: &Scale) {
    let (bench, mut chance) = (Bench::new(), scale.chance());
    let fleet = Fleet::started(&Setup::default());
    let remote = Remote::new(fleet.client.channel());
    let scanned = snapshot::scan(&bench.path("code")).expect("a directory can be scanned");
    runtime().block_on(snapshot::push(&scanned, &remote, |_| {})).expect("the controller takes it");
    for round in 0..scale.of(40, 400) {
        let (after, near) = (chance.millis(0, 60), round % 2 == 0);
        let name = format!("given-up-{round}");
        tally.case(&format!("given up after {after:?}, {}", if near { "near" } else { "far" }), || {
            let dest = bench.path(&name);
            let ended = runtime().block_on(async {
                match near {
                    true => {
                        tokio::time::timeout(
                            after,
                            snapshot::materialize(&bench.disk, bench.root, &dest, None, &[]),
                        )
                        .await
                    }
                    false => {
                        tokio::time::timeout(
                            after,
                            snapshot::materialize(&remote, bench.root, &dest, None, &[]),
                        )
                        .await
                    }
                }
            });
            // What was begun on a thread may end by itself a moment later, and the tree is whole then.
            if let Ok(laid) = ended {
                laid.expect("it is laid out");
            }
            if dest.exists() {
                bench.is_right(&name);
            }
            let again = bench.path(&format!("{name}-again"));
            runtime()
                .block_on(snapshot::materialize(&bench.disk, bench.root, &again, None, &[]))
                .expect("it is laid out");
            fs::remove_dir_all(again).expect("it is removed");
        });
    }
    tally.case("the store", || bench.store_is_sound());
}

/// Somebody removes directories of the tree, and puts links to others in their place, while it is written.
fn taken_apart(tally: &mut Tally, scale: &Scale) {
    let bench = Bench::new();
    let outside = bench.path("outside");
    fs::create_dir_all(outside.join("e")).expect("a directory");
    fs::write(outside.join("precious"), "precious").expect("a file");
    let (over, swaps) = (AtomicBool::new(false), AtomicU64::new(0));
    let partial = bench.path("work.partial");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for path in [partial.join("d"), partial.join("d/e"), partial.clone()] {
                    let aside = bench.path("aside");
                    if fs::rename(&path, &aside).is_ok() && symlink(&outside, &path).is_ok() {
                        swaps.fetch_add(1, Ordering::Relaxed);
                        std::thread::yield_now();
                        let _ = fs::remove_file(&path);
                        let _ = fs::rename(&aside, &path);
                    }
                    let _ = fs::remove_dir_all(&aside);
                }
            }
        });
        for round in 0..scale.of(60, 1000) {
            tally.case(&format!("round {round}"), || {
                // It may fail, and it may succeed: with the right bytes, and nowhere else.
                let _ = bench.lay("work");
                let left: Vec<_> = files(&outside);
                assert_eq!(left, [outside.join("precious")], "files outside of the tree");
                assert_eq!(fs::read(outside.join("precious")).expect("a file"), b"precious");
                assert_eq!(fs::metadata(&outside).expect("it").mode() & 0o7777, mode_of_new_directories());
                let work = bench.path("work");
                if work.is_symlink() {
                    fs::remove_file(&work).expect("the link is removed");
                } else if work.exists() {
                    fs::remove_dir_all(&work).expect("the tree is removed");
                }
            });
        }
        over.store(true, Ordering::Relaxed);
    });
    let swaps = swaps.load(Ordering::Relaxed);
    tally.note(format!("{swaps} swaps"));
    tally.case("there were swaps", || assert!(swaps > 0));
    tally.case("the store", || bench.store_is_sound());
}

/// What `create_dir` gives here, under this process's mask.
fn mode_of_new_directories() -> u32 {
    let dir = tempfile::tempdir().expect("a directory");
    let made = dir.path().join("made");
    fs::create_dir(&made).expect("a directory");
    fs::metadata(made).expect("it").mode() & 0o7777
}

fn in_the_way(tally: &mut Tally, _: &Scale) {
    let bench = Bench::new();
    let precious = bench.path("precious");
    fs::create_dir(&precious).expect("a directory");
    fs::write(precious.join("file"), "precious").expect("a file");
    let is_kept = || assert_eq!(fs::read(precious.join("file")).expect("it is kept"), b"precious");
    let exists = |result: Result<Laid, MaterializeError>| {
        assert!(matches!(result, Err(MaterializeError::Exists { .. })), "{result:?}");
    };
    tally.case("a link with the partial name", || {
        symlink(&precious, bench.path("one.partial")).expect("a link");
        bench.lay("one").expect("it is laid out");
        bench.is_right("one");
        is_kept();
    });
    tally.case("a link with the name of the tree", || {
        symlink(&precious, bench.path("two")).expect("a link");
        exists(bench.lay("two"));
        is_kept();
        assert!(bench.path("two").is_symlink() && !bench.path("two.partial").exists());
    });
    tally.case("a full directory", || {
        exists(bench.lay("precious"));
        is_kept();
    });
    tally.case("a file", || {
        fs::write(bench.path("three"), "mine").expect("a file");
        exists(bench.lay("three"));
        assert_eq!(fs::read(bench.path("three")).expect("it is kept"), b"mine");
    });
    tally.case("what a crash left, with a link in it", || {
        fs::create_dir_all(bench.path("four.partial/d")).expect("a directory");
        symlink(&precious, bench.path("four.partial/d/e")).expect("a link");
        bench.lay("four").expect("it is laid out");
        bench.is_right("four");
        is_kept();
    });
    tally.case("no parent", || {
        let refused = bench.lay("nowhere/at/all");
        assert!(matches!(refused, Err(MaterializeError::Write { .. })), "{refused:?}");
    });
}

/// The whole product: a box, and jobs whose code nobody should run.
fn jobs(tally: &mut Tally, _: &Scale) {
    let fleet = Fleet::started(&Setup::default());
    let remote = Remote::new(fleet.client.channel());
    let cases = [
        crate::snapshots::corpus::names().remove(2),
        crate::snapshots::corpus::links().remove(3),
        crate::snapshots::corpus::encodings().remove(0),
        crate::snapshots::corpus::shapes().remove(8),
    ];
    for case in cases {
        tally.case(&case.name, || {
            let blobs = case.blobs.iter().map(|bytes| (agent_cas::digest_of(bytes), bytes.clone())).collect();
            for kept in runtime().block_on(remote.write_batch(blobs)) {
                kept.expect("the controller takes it");
            }
            let draft = JobDraft { command: "true".into(), code: Some(case.root), ..JobDraft::default() };
            let job = fleet.client.ended(&fleet.client.submit(&draft));
            let fault = job.outcome.and_then(|outcome| outcome.fault).unwrap_or_default();
            assert_eq!((job.state.as_str(), fault.code.as_str()), ("Failed", "SNP-102"), "{fault:?}");
        });
    }
    tally.case("a good job after them", || {
        let job = fleet.client.run("true");
        assert_eq!(fleet.client.ended(&job).state, "Completed");
    });
}

/// Whoever a job runs as exchanges its directories with links to what is root's, from its start until after its
/// directory is removed.
fn raced(tally: &mut Tally, scale: &Scale) {
    let mut fleet = Fleet::new(&Setup { controller: "job_user: nobody\n".into(), ..Setup::default() });
    fs::set_permissions(fleet.home(), fs::Permissions::from_mode(0o755)).expect("its mode");
    fs::set_permissions(fleet.controller.state().join(".."), fs::Permissions::from_mode(0o755))
        .expect("its mode");
    fleet.start();
    let secret = fleet.home().join("secret");
    fs::create_dir_all(secret.join("d")).expect("a directory");
    for path in [secret.join("f"), secret.join("d/f")] {
        fs::write(&path, SECRET).expect("a file");
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("its mode");
    }
    let before = told(&secret);
    let (over, swaps, known) = (AtomicBool::new(false), AtomicU64::new(0), Mutex::new(Vec::new()));
    let wanted = scale.of(100_000, 1_000_000);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            become_nobody();
            while !over.load(Ordering::Relaxed) {
                let jobs: Vec<PathBuf> = known.lock().expect("a list").clone();
                jobs.iter().for_each(|job| swap_all(job, &secret, &swaps));
                std::thread::yield_now();
            }
        });
        // Its directory cannot be listed by that user, who knows the name of the job all the same.
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                *known.lock().expect("a list") = fleet.controller.job_dirs();
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let begun = Instant::now();
        let mut round = 0;
        while round < 5 || (swaps.load(Ordering::Relaxed) < wanted && begun.elapsed() < RACE) {
            round += 1;
            tally.case(&format!("job {round}"), || {
                let ended = fleet.client.ended(&fleet.client.run(RACED));
                // What it stored may be anything that was in its own directory at some moment.
                if let Some(artifacts) = ended.outcome.and_then(|outcome| outcome.artifacts) {
                    let remote = Remote::new(fleet.client.channel());
                    let root: Digest = artifacts.root.parse().expect("a digest");
                    let listed = runtime().block_on(snapshot::list(&remote, root)).expect("it is listed");
                    let secret = agent_cas::digest_of(SECRET);
                    assert!(
                        listed.iter().all(|entry| entry.digest != secret),
                        "taken from outside: {listed:?}"
                    );
                }
                assert_eq!(told(&secret), before, "what is outside was changed");
            });
        }
        over.store(true, Ordering::Relaxed);
    });
    let swaps = swaps.load(Ordering::Relaxed);
    tally.note(format!("{swaps} swaps"));
    tally.case("there were swaps", || assert!(swaps > 1000, "{swaps}"));
    let remote = Remote::new(fleet.client.channel());
    tally.case("the store has nothing from outside", || {
        let secret = agent_cas::digest_of(SECRET);
        let missing = runtime().block_on(remote.missing(&[secret])).expect("it says so");
        assert_eq!(missing, [secret]);
    });
}

const SECRET: &[u8] = b"what is not for jobs";

/// What the jobs do that are raced.
const RACED: &str =
    "mkdir -p outputs/d logs/d 2>/dev/null; echo mine > outputs/d/f; echo mine > outputs/f; sleep 0.3; true";

/// How long is tried for the swaps that are wanted, on however slow a machine.
const RACE: Duration = Duration::from_secs(60);

/// User and group of the jobs that are raced.
const NOBODY: (u32, u32) = (65_534, 65_534);

/// This thread and those that it starts have the rights of the jobs from now on, and no other.
pub(crate) fn become_nobody() {
    use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
    let (uid, gid) = (rustix::process::Uid::from_raw(NOBODY.0), rustix::process::Gid::from_raw(NOBODY.1));
    set_thread_groups(&[]).expect("root may leave any group");
    set_thread_res_gid(gid, gid, gid).expect("root may become anybody");
    set_thread_res_uid(uid, uid, uid).expect("root may become anybody");
}

/// Everything at `dir` that somebody could have changed.
fn told(dir: &Path) -> Vec<(PathBuf, u32, u32, u64, i64, Vec<u8>)> {
    let mut all = vec![dir.to_owned(), dir.join("d")];
    all.extend(files(dir));
    let look = |path: PathBuf| {
        let meta = fs::symlink_metadata(&path).expect("it is there");
        let content = if meta.is_file() { fs::read(&path).expect("a file") } else { Vec::new() };
        (path, meta.mode(), meta.uid(), meta.nlink(), meta.mtime_nsec(), content)
    };
    all.into_iter().map(look).collect()
}

/// Each directory of a job, twice, so that it is in its place half of the time.
fn swap_all(job: &Path, secret: &Path, swaps: &AtomicU64) {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let link = job.join("job/work/.link");
    let _ = symlink(secret, &link);
    for place in ["outputs", "outputs/d", "logs", "logs/d"] {
        let path = job.join("job/work").join(place);
        for _ in 0..2 {
            let swapped = renameat_with(CWD, &path, CWD, &link, RenameFlags::EXCHANGE);
            swaps.fetch_add(u64::from(swapped.is_ok()), Ordering::Relaxed);
        }
    }
}
