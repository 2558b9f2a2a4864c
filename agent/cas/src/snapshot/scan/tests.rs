use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::super::{MAX_DEPTH, list, push};
use super::*;
use crate::{Memory, digest_of};

fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    dir
}

async fn paths(snapshot: &Snapshot) -> Vec<String> {
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

#[test]
fn test_links_that_stay_inside_are_kept_and_others_left_out_with_a_warning() {
    let dir = tree(&[("a/x", "1"), ("b/y", "2")]);
    let link = |target: &str, path: &str| symlink(target, dir.path().join(path)).unwrap();
    link("../b/y", "a/good");
    link("a", "folder");
    let root = scan(dir.path()).unwrap();
    assert!(root.warnings.is_empty());
    link("/etc/passwd", "absolute");
    link("../../etc", "a/outside");
    link("nothing", "dangling");
    link("loop", "loop");
    link("a/../b", "winding");
    let snapshot = scan(dir.path()).unwrap();
    assert_eq!(snapshot.root, root.root);
    assert_eq!(snapshot.skipped, 5);
    for (warning, text) in snapshot.warnings.iter().zip([
        "a/outside -> ../../etc points outside",
        "absolute -> /etc/passwd points outside",
        "dangling -> nothing points to nothing",
        "loop -> loop cannot be followed",
        "winding -> a/../b points outside",
    ]) {
        assert!(warning.starts_with(text), "{warning}");
    }
}

#[test]
fn test_what_is_no_file_is_left_out_with_a_warning() {
    let dir = tree(&[("a", "1")]);
    let expected = scan(dir.path()).unwrap().root;
    let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
    let flags = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, dir.path().join("pipe"), flags, 0o600.into(), 0).unwrap();
    fs::write(dir.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9")), "x").unwrap();
    let snapshot = scan(dir.path()).unwrap();
    assert_eq!((snapshot.root, snapshot.skipped), (expected, 3));
    assert!(
        snapshot.warnings.iter().any(|warning| warning.starts_with("caf\\xe9 ")),
        "{:?}",
        snapshot.warnings
    );
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

#[tokio::test]
async fn test_scan_all_joins_parts_below_their_prefixes_without_ignore_rules() {
    let base = tree(&[
        ("o/.gitignore", "*"),
        ("o/model", "1"),
        ("o/.git/x", "2"),
        ("logged/outputs/model", "another"),
        ("logged/outputs/plot", "3"),
        ("logged/top", "4"),
    ]);
    let parts: [(&str, &Path); 4] = [
        ("outputs", Path::new("o")),
        ("", Path::new("logged")),
        ("named-outputs/data", Path::new("o")),
        ("logs", Path::new("absent")),
    ];
    let snapshot = scan_all(base.path(), &parts).unwrap();
    assert_eq!(
        paths(&snapshot).await,
        [
            "top",
            "named-outputs/data/.gitignore",
            "named-outputs/data/model",
            "named-outputs/data/.git/x",
            "outputs/.gitignore",
            "outputs/model",
            "outputs/plot",
            "outputs/.git/x",
        ]
    );
    assert_eq!(snapshot.warnings, ["outputs/model exists twice; the second one is left out"]);
    assert!(snapshot.contents.iter().all(|(digest, _)| *digest != digest_of(b"another")));
}

#[test]
fn test_unreadable_places_are_named() {
    let dir = tree(&[("a", "1")]);
    let absent = dir.path().join("absent");
    let error = scan(&absent).unwrap_err();
    assert!(matches!(&error, ScanError::Directory { path, .. } if *path == absent), "{error}");
}

#[test]
fn test_scan_all_is_not_led_out_of_the_base() {
    let outside = tree(&[("secret", "1")]);
    let base = tree(&[("in/model", "2"), ("file", "3")]);
    let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, base.path().join(name)).unwrap();
    link(outside.path(), "absolute");
    link(&Path::new("..").join(outside.path().file_name().unwrap()), "relative");
    link(Path::new("circle"), "circle");
    link(Path::new("in"), "inside");
    for name in ["absolute", "relative", "circle", "file"] {
        let snapshot = scan_all(base.path(), &[("outputs", Path::new(name))]).unwrap();
        assert_eq!((snapshot.files, snapshot.warnings.len()), (0, 1), "{name}: {:?}", snapshot.warnings);
    }
    assert_eq!(scan_all(base.path(), &[("outputs", Path::new("inside"))]).unwrap().files, 1);
}
