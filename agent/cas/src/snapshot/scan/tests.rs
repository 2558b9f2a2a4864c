use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};

use super::super::left_out::is_kept_back;
use super::super::tree::TreeError;
use super::super::walk::{GIT, Rules, walk};
use super::super::{Elsewhere, MAX_DEPTH, list, push, scan_outputs};
use super::*;
use crate::{Memory, digest_of};

pub(in crate::snapshot) fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    dir
}

pub(in crate::snapshot) async fn paths(snapshot: &Snapshot) -> Vec<String> {
    let store = Memory::new();
    push(snapshot, &store, |_| {}).await.unwrap();
    list(&store, snapshot.root).await.unwrap().into_iter().map(|entry| entry.path).collect()
}

#[tokio::test]
async fn test_scan_of_an_empty_directory_is_the_empty_tree() {
    let snapshot = scan(tree(&[]).path()).unwrap();
    assert_eq!((snapshot.root, snapshot.files, snapshot.skipped), (Digest::EMPTY, 0, 0));
    assert!(paths(&snapshot).await.is_empty());
}

#[test]
fn test_scan_depends_on_names_contents_and_the_executable_bit_alone() {
    let one = tree(&[("a/x", "1"), ("b", "2")]);
    let two = tree(&[("b", "2"), ("a/x", "1")]);
    let root = scan(one.path()).unwrap().root;
    assert_eq!(root, scan(two.path()).unwrap().root);
    fs::rename(two.path().join("a"), two.path().join("c")).unwrap();
    assert_ne!(root, scan(two.path()).unwrap().root, "a renamed directory is another tree");
    fs::set_permissions(one.path().join("b"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_ne!(root, scan(one.path()).unwrap().root);
}

#[tokio::test]
async fn test_amlignore_wins_over_gitignore_and_git_is_never_included() {
    let files = [
        (".gitignore", "train.py\n"),
        (".amlignore", "\u{feff}# comment\r\n*.log\r\nbuild/\r\n!keep.log\r\n/top\r\n"),
        (".git/config", "x"),
        ("sub/.git/config", "x"),
        ("train.py", "x"),
        ("a.log", "x"),
        ("sub/keep.log", "x"),
        ("sub/build/x", "x"),
        ("top", "x"),
        ("sub/top", "x"),
        ("sub/.gitignore", "top\n"),
    ];
    let dir = tree(&files);
    let snapshot = scan(dir.path()).unwrap();
    let expected = [".amlignore", ".gitignore", "train.py", "sub/.gitignore", "sub/keep.log", "sub/top"]
        .map(String::from);
    assert_eq!(paths(&snapshot).await, expected);
    assert_eq!(snapshot.skipped, 5);
    fs::remove_file(dir.path().join(".amlignore")).unwrap();
    assert!(!paths(&scan(dir.path()).unwrap()).await.contains(&"train.py".to_owned()));
}

#[tokio::test]
async fn test_ignore_files_are_read_as_git_reads_its_own() {
    for (rules, left) in [
        ("a  \n", &["a ", "b/c", "b/d", "e"][..]),
        ("a\\ \n", &["a", "b/c", "b/d", "e"]),
        ("b/\n!b/c\n", &["a", "a ", "e"]),
        ("b/*\n!b/c\n", &["a", "a ", "b/c", "e"]),
        ("*\n!b\n!b/**\n", &["b/c", "b/d"]),
        ("\u{feff}e\r\n\r\n", &["a", "a ", "b/c", "b/d"]),
    ] {
        let dir = tree(&[("a", "1"), ("a ", "2"), ("b/c", "3"), ("b/d", "4"), ("e", "5")]);
        let elsewhere = tree(&[("rules", rules)]);
        symlink(elsewhere.path().join("rules"), dir.path().join(".amlignore")).unwrap();
        let mut found = paths(&scan(dir.path()).unwrap()).await;
        found.sort();
        assert_eq!(found, left, "{rules:?}");
    }
}

#[test]
fn test_an_ignore_file_that_is_none_does_not_hang_the_scan() {
    let dir = tree(&[("a", "1")]);
    let pipe = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, dir.path().join(".amlignore"), pipe, 0o600.into(), 0).unwrap();
    assert_eq!(scan(dir.path()).unwrap().files, 1);
    fs::remove_file(dir.path().join(".amlignore")).unwrap();
    fs::create_dir(dir.path().join(".amlignore")).unwrap();
    assert!(matches!(scan(dir.path()), Err(ScanError::Read { path, .. }) if path.ends_with(".amlignore")));
}

#[test]
fn test_links_that_stay_inside_are_kept_and_others_left_out_with_a_warning() {
    let dir = tree(&[("a/x", "1"), ("b/y", "2")]);
    let link = |target: &str, path: &str| symlink(target, dir.path().join(path)).unwrap();
    link("../b/y", "a/good");
    link("a", "folder");
    // By way of directories and of other links, and to what is not there yet.
    link("a/../b", "winding");
    link("../b/../a/x", "b/round");
    link("../folder/../b/y", "a/through");
    link("outputs/last.ckpt", "latest");
    let root = scan(dir.path()).unwrap();
    assert_eq!((root.skipped, root.warnings.len()), (0, 0), "{:?}", root.warnings);
    link("/etc/passwd", "absolute");
    link("../../etc", "a/outside");
    link("folder/../../etc", "behind");
    link("loop", "loop");
    link("outside/passwd", "a/second");
    let snapshot = scan(dir.path()).unwrap();
    assert_eq!(snapshot.root, root.root);
    assert_eq!(snapshot.skipped, 5);
    for (warning, text) in snapshot.warnings.iter().zip([
        "a/outside -> ../../etc points outside",
        "a/second -> outside/passwd points outside",
        "absolute -> /etc/passwd points outside",
        "behind -> folder/../../etc points outside",
        "loop -> loop cannot be followed",
    ]) {
        assert!(warning.starts_with(text), "{warning}");
    }
}

/// What a program finds where the tree is laid out is what it found where it came from.
#[tokio::test]
async fn test_links_that_are_kept_lead_to_the_same_when_laid_out() {
    let dir = tree(&[("a/x", "1"), ("b/y", "2")]);
    let links = [("../b/../a/x", "b/round"), ("a", "folder"), ("../folder/../b/y", "a/through")];
    links.iter().for_each(|(target, path)| symlink(target, dir.path().join(path)).unwrap());
    let store = crate::Memory::new();
    let snapshot = scan(dir.path()).unwrap();
    super::super::push(&snapshot, &store, |_| {}).await.unwrap();
    let laid = tempfile::tempdir().unwrap();
    super::super::materialize(&store, snapshot.root, &laid.path().join("t"), None, &[]).await.unwrap();
    for (target, path) in links {
        let at = laid.path().join("t").join(path);
        assert_eq!(fs::read_link(&at).unwrap(), Path::new(target));
        assert_eq!(at.canonicalize().unwrap().is_dir(), path == "folder");
    }
}

#[test]
fn test_what_is_no_file_is_left_out_with_a_warning() {
    let dir = tree(&[("a", "1")]);
    let expected = scan(dir.path()).unwrap().root;
    let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
    let flags = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, dir.path().join("pipe"), flags, 0o600.into(), 0).unwrap();
    let snapshot = scan(dir.path()).unwrap();
    assert_eq!((snapshot.root, snapshot.skipped, snapshot.warnings.len()), (expected, 2, 2));
}

/// Names that are no UTF-8, or that look like the text of such a name, are laid out with their bytes: of files,
/// directories and links, from a new copy and from one that was prepared.
#[tokio::test]
async fn test_names_keep_their_bytes() {
    let (dir, store, laid) = (tree(&[]), crate::Memory::new(), tempfile::tempdir().unwrap());
    let at = |root: &Path, name: &[u8]| root.join(std::ffi::OsStr::from_bytes(name));
    let long = [&b"\xe9"[..], &[b'x'; 254]].concat();
    let names: [&[u8]; 6] =
        [b"caf\xe9", b"d\xff/r\xe9s\xc3\xa9.csv", b"d\xff/\xb4\xfa", b"\\xe9", b"\\x5cxe9", &long];
    for name in names {
        fs::create_dir_all(at(dir.path(), name).parent().unwrap()).unwrap();
        fs::write(at(dir.path(), name), name).unwrap();
    }
    symlink(at(Path::new(""), b"d\xff/r\xe9s\xc3\xa9.csv"), at(dir.path(), b"lien\xe9")).unwrap();
    let snapshot = scan(dir.path()).unwrap();
    assert_eq!((snapshot.files, snapshot.warnings.len()), (6, 0), "{:?}", snapshot.warnings);
    super::super::push(&snapshot, &store, |_| {}).await.unwrap();
    let check = |root: &Path| {
        for name in names {
            assert_eq!(fs::read(at(root, name)).unwrap(), name, "{}", name.escape_ascii());
        }
        assert_eq!(fs::read(at(root, b"lien\xe9")).unwrap(), names[1]);
    };
    let new = laid.path().join("new");
    super::super::materialize(&store, snapshot.root, &new, None, &[]).await.unwrap();
    check(&new);
    let (ready, tick) = (laid.path().join("ready"), std::time::Duration::from_millis(30));
    let ready = super::super::PrestagedTree::lay_settled(&store, snapshot.root, &ready, None, tick);
    let (ready, taken) = ([Arc::new(ready.await.unwrap())], laid.path().join("taken"));
    super::super::materialize(&store, snapshot.root, &taken, None, &ready).await.unwrap();
    check(&taken);
    super::super::download(&store, snapshot.root, &laid.path().join("fetched")).await.unwrap();
    check(&laid.path().join("fetched"));
    assert_eq!(scan(&laid.path().join("fetched")).unwrap().root, snapshot.root);
}

#[test]
fn test_directories_may_be_as_deep_as_the_limit_and_no_deeper() {
    let dir = tree(&[]);
    let deepest = vec!["d"; MAX_DEPTH - 1].join("/");
    fs::create_dir_all(dir.path().join(&deepest)).unwrap();
    scan(dir.path()).unwrap();
    fs::create_dir(dir.path().join(deepest).join("d")).unwrap();
    assert!(matches!(scan(dir.path()), Err(ScanError::TooDeep { limit: MAX_DEPTH, .. })));
}

#[test]
fn test_largest_files_are_named_first() {
    let many: Vec<(String, String)> = (0..50).map(|i| (format!("f{i}"), "x".repeat(i))).collect();
    let files: Vec<(&str, &str)> =
        many.iter().map(|(name, content)| (name.as_str(), content.as_str())).collect();
    let snapshot = scan(tree(&files).path()).unwrap();
    assert_eq!((snapshot.files, snapshot.bytes), (50, 1225));
    assert_eq!(snapshot.largest.len(), LARGEST);
    assert_eq!(snapshot.largest[0], ("f49".to_owned(), 49));
    assert_eq!(snapshot.largest[9], ("f40".to_owned(), 40));
}

#[test]
fn test_scan_file_holds_that_file_alone_also_through_a_link() {
    let dir = tree(&[("real.py", "1"), ("other", "2")]);
    symlink("real.py", dir.path().join("main.py")).unwrap();
    let direct = scan_file(&dir.path().join("real.py")).unwrap();
    assert_eq!((direct.files, direct.bytes), (1, 1));
    let same = scan(tree(&[("main.py", "1")]).path()).unwrap();
    assert_eq!(scan_file(&dir.path().join("main.py")).unwrap().root, same.root);
    assert!(matches!(scan_file(dir.path()), Err(ScanError::NotAFile { .. })));
    assert!(matches!(scan_file(&dir.path().join("absent")), Err(ScanError::Read { .. })));
}

#[test]
fn test_unreadable_places_are_named() {
    let dir = tree(&[("a", "1")]);
    let absent = dir.path().join("absent");
    let error = scan(&absent).unwrap_err();
    assert!(matches!(&error, ScanError::Directory { path, .. } if *path == absent), "{error}");
}

#[test]
fn test_walk_passes_no_link_that_took_the_place_of_a_directory() {
    let outside = tree(&[("secret/x", "1")]);
    let dir = tree(&[("a/b/x", "1")]);
    let root = Arc::new(Root::open(dir.path()).unwrap());
    fs::rename(dir.path().join("a"), dir.path().join("moved")).unwrap();
    symlink(outside.path(), dir.path().join("a")).unwrap();
    let file = FilePlace { dir: Arc::new(Dir { root, path: "a/secret".to_owned() }), name: "x".into() };
    assert_eq!(rustix::io::Errno::from_io_error(&file.open().unwrap_err()), Some(rustix::io::Errno::LOOP));
    let snapshot = scan(dir.path()).unwrap();
    assert_eq!((snapshot.files, snapshot.warnings.len()), (1, 1));
    assert!(snapshot.warnings[0].starts_with("a -> "), "{:?}", snapshot.warnings);
}

#[test]
fn test_a_tree_of_many_directories_is_the_same_each_time() {
    let many: Vec<(String, String)> =
        (0..600).map(|i| (format!("d{}/e{}/f{i}", i % 31, i % 7), i.to_string())).collect();
    let files: Vec<(&str, &str)> = many.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    let dir = tree(&files);
    let first = scan(dir.path()).unwrap();
    assert_eq!((first.files, first.directories().len()), (600, 1 + 31 + 217));
    for _ in 0..5 {
        assert_eq!(scan(dir.path()).unwrap().root, first.root);
    }
}

/// What is wrong with a file between the walk and the reading.
#[test]
fn test_a_file_that_is_another_when_it_is_read_is_taken_as_it_is_or_named() {
    let top = |dir: &Path| {
        let root = Arc::new(Root::open(dir).unwrap());
        walk(&root, Rules::Everything, &[], &mut LeftOut::default()).unwrap()
    };
    for (change, content) in [("shorter", "a"), ("longer", "a longer one"), ("", ""), ("same size", "xyz")] {
        let dir = tree(&[("x", "abc")]);
        let mut found = top(dir.path());
        fs::write(dir.path().join("x"), content).unwrap();
        hash_all(&mut found, &AtomicBool::new(false)).unwrap();
        assert_eq!(found.files[0].digest(), digest_of(content.as_bytes()), "{change}");
    }
    let dir = tree(&[("gone", "1")]);
    let mut found = top(dir.path());
    fs::remove_file(dir.path().join("gone")).unwrap();
    assert!(
        matches!(hash_all(&mut found, &AtomicBool::new(false)), Err(ScanError::Read { path, .. }) if path.ends_with("gone"))
    );
    symlink("/etc/passwd", dir.path().join("gone")).unwrap();
    assert!(
        matches!(hash_all(&mut found, &AtomicBool::new(false)), Err(ScanError::Read { path, .. }) if path.ends_with("gone"))
    );
    fs::remove_file(dir.path().join("gone")).unwrap();
    let pipe = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, dir.path().join("gone"), pipe, 0o600.into(), 0).unwrap();
    assert!(
        matches!(hash_all(&mut found, &AtomicBool::new(false)), Err(ScanError::NotAFile { path }) if path.ends_with("gone"))
    );
}

/// What `read` says while somebody calls `write` on `log` all the time. The writer may be kept from its work for a
/// moment, so it is read until `wanted`.
fn read_while(
    write: impl Fn(&fs::File) + Sync,
    read: impl Fn(&Path) -> Result<Snapshot, ScanError>,
    wanted: impl Fn(&Result<Snapshot, ScanError>) -> bool,
) -> Result<Snapshot, ScanError> {
    let dir = tree(&[("o/log", "begun\n")]);
    let file = fs::File::options().write(true).open(dir.path().join("o/log")).unwrap();
    file.set_len(16 * 1024 * 1024).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                write(&file);
            }
        });
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let mut outcome = read(dir.path());
        while !wanted(&outcome) && std::time::Instant::now() < end {
            outcome = read(dir.path());
        }
        stop.store(true, Ordering::Relaxed);
        outcome
    })
}

fn append(file: &fs::File) {
    file.write_all_at(b"x", file.metadata().unwrap().len()).unwrap();
}

#[test]
fn test_a_file_that_is_written_all_the_time_is_named() {
    let turn = std::sync::atomic::AtomicU8::new(0);
    let overwrite = |file: &fs::File| file.write_all_at(&[turn.fetch_add(1, Ordering::Relaxed)], 0).unwrap();
    let named = |outcome: &Result<Snapshot, ScanError>| matches!(outcome, Err(ScanError::Changed { path }) if path.ends_with("log"));
    assert!(named(&read_while(overwrite, scan, named)));
    // What a job left must not be cut.
    let outputs = |dir: &Path| {
        scan_outputs(dir, &[("outputs", Path::new("o"))], &[], &Elsewhere::default(), &AtomicBool::new(false))
    };
    assert!(named(&read_while(append, outputs, named)));
}

#[test]
fn test_a_file_that_only_grows_is_taken_as_long_as_it_was_with_a_word() {
    let told = |outcome: &Result<Snapshot, ScanError>| match outcome {
        Ok(snapshot) => snapshot.warnings.iter().any(|warning| warning.contains("o/log grows; it is taken")),
        Err(error) => panic!("{error}"),
    };
    let snapshot = read_while(append, scan, told).unwrap();
    assert!(told(&Ok(snapshot)));
}

#[tokio::test]
async fn test_a_sparse_file_is_what_it_would_be_without_holes() {
    let dir = tree(&[]);
    fs::File::create(dir.path().join("x")).unwrap().set_len(3_000_000).unwrap();
    let snapshot = scan(dir.path()).unwrap();
    assert_eq!(snapshot.digests(), [digest_of(&vec![0; 3_000_000])]);
}

#[test]
fn test_a_directory_that_no_node_would_lay_out_is_named_before_anything_is_sent() {
    let link = |n| (format!("{n:0>255}").into(), "x".repeat(4000).into());
    let large = Folder { links: (0..8000).map(link).collect(), ..Folder::new() };
    let parent = Folder { folders: vec![("b".into(), large)], ..Folder::new() };
    let top = Folder { folders: vec![("a".into(), parent)], ..Folder::new() };
    let refused = complete(Path::new("/project"), top, 0, LeftOut::default()).unwrap_err();
    let ScanError::TooLarge { path, source } = refused else { panic!("{refused}") };
    assert_eq!(path, Path::new("/project/a/b"));
    assert!(matches!(source, TreeError::TooLarge { .. }), "{source}");
}

#[test]
fn test_what_is_kept_back_is_told_by_its_error() {
    for (error, is) in [
        (libc_error(rustix::io::Errno::ACCESS), true),
        (libc_error(rustix::io::Errno::IO), true),
        (libc_error(rustix::io::Errno::STALE), true),
        (libc_error(rustix::io::Errno::MFILE), false),
        (libc_error(rustix::io::Errno::NOMEM), false),
        (io::Error::other("?"), false),
    ] {
        assert_eq!(is_kept_back(&error), is, "{error}");
    }
}

fn libc_error(errno: rustix::io::Errno) -> io::Error {
    errno.into()
}

/// What is mostly a hole takes no more room in the store, and where it is laid out.
#[tokio::test]
async fn test_a_hollow_file_stays_hollow() {
    use std::os::unix::fs::MetadataExt;
    let dir = tree(&[]);
    let file = fs::File::create(dir.path().join("hollow")).unwrap();
    file.set_len(256 << 20).unwrap();
    file.write_all_at(&[7; 1 << 20], 100 << 20).unwrap();
    let home = tempfile::tempdir().unwrap();
    let store = crate::Disk::open(&home.path().join("cas")).unwrap();
    let snapshot = scan(dir.path()).unwrap();
    super::super::push(&snapshot, &store, |_| {}).await.unwrap();
    let laid = home.path().join("laid");
    super::super::materialize(&store, snapshot.root, &laid, None, &[]).await.unwrap();
    let about = fs::metadata(laid.join("hollow")).unwrap();
    assert_eq!(about.len(), 256 << 20);
    assert!(about.blocks() * 512 < 4 << 20, "{} blocks where it is laid out", about.blocks());
    let content = |dir: &Path| scan(dir).unwrap().digests();
    assert_eq!(content(&laid), content(dir.path()));
    let taken: u64 = walk_all(&home.path().join("cas")).iter().map(|about| about.blocks() * 512).sum();
    assert!(taken < 16 << 20, "{taken} bytes in the store");
}

fn walk_all(dir: &Path) -> Vec<fs::Metadata> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| match path.is_dir() {
            true => walk_all(&path),
            false => vec![fs::metadata(&path).unwrap()],
        })
        .collect()
}

#[test]
fn test_what_stands_where_a_job_writes_is_named() {
    let dir = tree(&[("outputs", "a file"), ("results/a", ""), ("kept/x", "")]);
    for (target, name) in [("results", "logs"), ("none", "late"), ("outputs", "odd")] {
        symlink(target, dir.path().join(name)).unwrap();
    }
    let snapshot = scan(dir.path()).unwrap();
    for (name, is) in [
        ("outputs", Some("a file")),
        ("logs", None),
        ("kept", None),
        ("new", None),
        ("late", Some("a link to no directory")),
        ("odd", Some("a link to no directory")),
    ] {
        assert_eq!(snapshot.in_the_way(name), is, "{name}");
    }
}

#[test]
fn test_a_survey_comes_to_what_a_scan_comes_to_and_names_the_rules() {
    let ignore = "# big things\r\n*.ckpt\n\nruns/\n!last.ckpt\n";
    let dir = tree(&[
        (".gitignore", ignore),
        (".git/config", "x"),
        ("train.py", "1234"),
        ("a/b.ckpt", "x"),
        ("a/c.ckpt", "x"),
        ("a/d.ckpt", "x"),
        ("e.ckpt", "x"),
        ("last.ckpt", "123456"),
        ("runs/1/log", "x"),
    ]);
    let choice = Choice::default();
    let (survey, scanned) = (choice.survey(dir.path()).unwrap(), choice.scan(dir.path()).unwrap());
    assert_eq!((survey.files, survey.bytes), (scanned.files, scanned.bytes));
    assert_eq!(survey.largest, scanned.largest);
    assert_eq!(survey.warnings, scanned.warnings);
    let told: Vec<_> = survey.rules.iter().map(|(rule, ruled)| (&**rule, ruled.count)).collect();
    assert_eq!(told, [(".gitignore:2: *.ckpt", 4), (".gitignore:4: runs/", 1), (GIT, 1)]);
    assert_eq!(survey.rules[".gitignore:2: *.ckpt"].examples, ["a/b.ckpt", "a/c.ckpt", "a/d.ckpt"]);
    assert_eq!(scanned.skipped, survey.rules.values().map(|ruled| ruled.count).sum::<u64>());
    let wanted = |dir: &str, name: &str| dir.is_empty() && name.ends_with(".ckpt");
    assert_eq!(survey.named(wanted), ["last.ckpt"]);
    assert_eq!(scanned.named(wanted), ["last.ckpt"]);

    let whole = Choice { whole: true, ..choice };
    assert_eq!(whole.survey(dir.path()).unwrap().files, 9);
}

#[test]
fn test_directories_that_are_never_entered_are_known_by_what_they_are() {
    let dir = tree(&[("train.py", "x"), (".local/share/agentd/cas/big", "x"), ("other/cas/x", "x")]);
    let elsewhere = tempfile::tempdir().unwrap();
    let link = elsewhere.path().join("state");
    symlink(dir.path().join(".local/share/agentd"), &link).unwrap();
    let never = [link, dir.path().join("not-there")];
    for whole in [false, true] {
        let choice = Choice { whole, never: &never, ..Choice::default() };
        let scanned = choice.scan(dir.path()).unwrap();
        assert_eq!((scanned.files, scanned.skipped), (2, 1));
        assert_eq!(scanned.warnings, [".local/share/agentd was made by agentd; left out"]);
        assert_eq!(choice.survey(dir.path()).unwrap().files, 2);
    }
}

#[test]
fn test_ignore_file_that_switches_the_other_one_off_says_so() {
    let warnings = |files: &[(&str, &str)]| Choice::default().survey(tree(files).path()).unwrap().warnings;
    let said = [".amlignore is there, so .gitignore has no effect"];
    assert_eq!(warnings(&[(".amlignore", "a\n"), (".gitignore", "*.bin\n")]), said);
    for quiet in [
        &[(".amlignore", "a\n")][..],
        &[(".gitignore", "a\n")],
        &[(".amlignore", "a\n"), (".gitignore", "a\n")],
        &[(".amlignore", "a\n"), (".gitignore", "# none\n\n")],
    ] {
        assert_eq!(warnings(quiet), [""; 0], "{quiet:?}");
    }
}

#[test]
fn test_code_is_sent_without_what_jobs_left_and_tools_make_again() {
    let dir = tempfile::tempdir().unwrap();
    let write = |path: &str| {
        let path = dir.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "x").unwrap();
    };
    for path in [
        "train.py",
        "outputs/old.ckpt",
        "logs/helper.py",
        "pkg/outputs/data.txt",
        "pkg/__pycache__/a.pyc",
        ".venv/pyvenv.cfg",
        ".venv/lib/x.py",
        "wandb/run",
        "pkg/wandb/run",
    ] {
        write(path);
    }
    let sent = |code: bool| {
        let survey = Choice { code, ..Choice::default() }.survey(dir.path()).unwrap();
        let mut names = survey.named(|_, _| true);
        names.sort_unstable();
        (names, survey.warnings, survey.rules.into_keys().collect::<Vec<_>>())
    };
    assert_eq!(sent(false).0.len(), 9, "data is sent whole");
    let (names, warnings, rules) = sent(true);
    assert_eq!(names, ["logs/helper.py", "pkg/outputs/data.txt", "pkg/wandb/run", "train.py"]);
    assert_eq!(
        warnings,
        ["outputs is not sent: a job begins with an empty one. The line !/outputs/ in .gitignore sends it"]
    );
    assert!(rules.iter().any(|rule| rule.starts_with("/outputs/ (always")), "{rules:?}");
    assert!(rules.iter().any(|rule| rule == "a virtual environment (pyvenv.cfg)"), "{rules:?}");
    // A line sends what is left out otherwise.
    std::fs::write(dir.path().join(".amlignore"), "!/outputs/\n!.venv/\n").unwrap();
    let (names, warnings, _) = sent(true);
    assert!(names.contains(&"outputs/old.ckpt".to_owned()) && names.contains(&".venv/lib/x.py".to_owned()));
    assert_eq!(warnings, [""; 0]);
    // So does git, which tracks it.
    std::fs::write(dir.path().join(".amlignore"), "*.pyc\n").unwrap();
    std::fs::create_dir(dir.path().join(".git")).unwrap();
    std::fs::write(dir.path().join(".git/index"), b"DIRC\0\0\0\x02...outputs/old.ckpt\0").unwrap();
    assert!(sent(true).0.contains(&"outputs/old.ckpt".to_owned()));
}
