use std::fs;
use std::os::unix::fs::symlink;

use super::super::scan::tests::{paths, tree};
use super::*;
use crate::digest_of;

#[tokio::test]
async fn test_scan_outputs_joins_parts_below_their_prefixes_without_ignore_rules() {
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
    let snapshot =
        scan_outputs(base.path(), &parts, &[], &Elsewhere::default(), &AtomicBool::new(false)).unwrap();
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
    let told = "outputs/model exists twice: what the job wrote is kept, and what it logged is not";
    assert_eq!(snapshot.left_out, [told]);
    assert!(!snapshot.digests().contains(&digest_of(b"another")));
}

/// What becomes of a folder that is something else, by what stands in its place.
#[test]
fn test_a_folder_that_is_none_is_read_elsewhere_or_told() {
    let outside = tree(&[("secret", "1"), ("deep/x", "2")]);
    let base = tree(&[("in/model", "2"), ("file", "3"), ("tmp/scratch/kept", "4")]);
    let link = |to: &Path, name: &str| symlink(to, base.path().join(name)).unwrap();
    link(outside.path(), "absolute");
    link(&Path::new("..").join(outside.path().file_name().unwrap()), "relative");
    link(Path::new("circle"), "circle");
    link(Path::new("in"), "inside");
    link(Path::new("/nowhere/at/all"), "dangling");
    link(&outside.path().join("secret"), "to-a-file");
    link(base.path(), "above");
    link(Path::new("/private/scratch"), "private");
    link(Path::new("/dev/shm/scratch"), "gone");
    rustix::fs::mknodat(rustix::fs::CWD, base.path().join("pipe"), FileType::Fifo, 0o600.into(), 0).unwrap();
    let read = |name: &str, elsewhere: &Elsewhere| {
        let parts = [("outputs", Path::new(name))];
        let snapshot = scan_outputs(base.path(), &parts, &[], elsewhere, &AtomicBool::new(false)).unwrap();
        let lost = snapshot.unread.iter().map(|unread| unread.why.clone());
        (snapshot.files, lost.collect::<Vec<_>>().join(", "), snapshot.left_out.join(", "))
    };
    let moved = vec![("/private".into(), Some(base.path().join("tmp"))), ("/dev/shm".into(), None)];
    let own = Elsewhere { moved, ..Elsewhere::default() };
    let stranger = Elsewhere { owner: Some(4_000_000_000), ..Elsewhere::default() };
    let closed = Elsewhere { closed: Some("and closed".to_owned()), ..Elsewhere::default() };
    let is = |name: &str, elsewhere: &Elsewhere, files: u64, lost: &str, nothing: &str| {
        let found = read(name, elsewhere);
        assert_eq!(found.0, files, "{name}: {found:?}");
        for (told, expected) in [(&found.1, lost), (&found.2, nothing)] {
            assert!(told.contains(expected) && told.is_empty() == expected.is_empty(), "{name}: {found:?}");
        }
    };
    for name in ["absolute", "relative"] {
        is(name, &own, 2, "", "");
        is(name, &stranger, 0, "no directory of the job's user", "");
        is(name, &closed, 0, "and closed", "");
    }
    is("inside", &closed, 1, "", "");
    is("private", &own, 1, "", "");
    is("gone", &own, 0, "to /dev/shm/scratch, which was the job's own", "");
    is("above", &own, 0, "the job's own directory is in it", "");
    is("file", &own, 0, "is a file in the place of a folder", "");
    is("to-a-file", &own, 0, "which is no directory", "");
    is("circle", &own, 0, "", "outputs is a link to circle, which does not exist");
    is("dangling", &own, 0, "", "outputs is a link to /nowhere/at/all, which does not exist");
    is("pipe", &own, 0, "", "outputs is neither file, directory nor link");
    is("absent", &own, 0, "", "");
}

#[test]
fn test_files_of_others_elsewhere_are_told_and_not_read() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let (outside, base) = (tree(&[("own", "1"), ("other", "2")]), tree(&[]));
    for name in ["", "own"] {
        std::os::unix::fs::chown(outside.path().join(name), Some(4321), None).unwrap();
    }
    symlink(outside.path(), base.path().join("outputs")).unwrap();
    let (parts, elsewhere) =
        ([("outputs", Path::new("outputs"))], Elsewhere { owner: Some(4321), ..Elsewhere::default() });
    let snapshot = scan_outputs(base.path(), &parts, &[], &elsewhere, &AtomicBool::new(false)).unwrap();
    let other = Unread { path: base.path().join("outputs/other"), why: "belongs to another user".to_owned() };
    assert_eq!((snapshot.files, &snapshot.unread[..]), (1, &[other][..]));
}

/// Each entry that is no content is told with its place among all outputs, and where it leads.
#[test]
fn test_entries_that_are_no_content_are_named_below_their_prefix() {
    let base = tree(&[("o/a", "1"), ("n/x", "2")]);
    symlink("/abs/v1.ckpt", base.path().join("o/latest")).unwrap();
    symlink("../../up", base.path().join("n/link")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, base.path().join("o/f"), FileType::Fifo, 0o600.into(), 0).unwrap();
    let parts = [("outputs", Path::new("o")), ("named-outputs/m", Path::new("n"))];
    let elsewhere = Elsewhere::default();
    let snapshot = scan_outputs(base.path(), &parts, &[], &elsewhere, &AtomicBool::new(false)).unwrap();
    assert_eq!((snapshot.files, &snapshot.unread[..]), (2, &[][..]));
    assert_eq!(
        snapshot.left_out,
        [
            "outputs/f is neither file, directory nor link",
            "outputs/latest -> /abs/v1.ckpt points outside the directory",
            "named-outputs/m/link -> ../../up points outside the directory",
        ]
    );
}

/// The outputs of a job: everything in `base/outputs` and `base/logs`.
fn outputs(base: &Path) -> Snapshot {
    let parts = [("outputs", Path::new("outputs")), ("logs", Path::new("logs"))];
    scan_outputs(base, &parts, &[], &Elsewhere::default(), &AtomicBool::new(false)).unwrap()
}

fn unread(snapshot: &Snapshot, base: &Path) -> Vec<(String, String)> {
    let relative = |unread: &Unread| {
        let path = unread.path.strip_prefix(base).unwrap().display().to_string();
        (path, unread.why.clone())
    };
    snapshot.unread.iter().map(relative).collect()
}

#[test]
fn test_outputs_larger_than_their_disk_are_told_and_the_rest_is_read() {
    let dir = tree(&[("outputs/model", "1"), ("outputs/b/c", "2")]);
    let hollow = fs::File::create(dir.path().join("outputs/hollow")).unwrap();
    // More than the file system holds, as far as it allows such a file at all.
    hollow.set_len(disk_size(dir.path()) + 1).unwrap();
    let snapshot = outputs(dir.path());
    assert_eq!(snapshot.files, 2);
    let [(path, why)] = &unread(&snapshot, dir.path())[..] else { panic!("{:?}", snapshot.unread) };
    assert_eq!(path, "outputs/hollow");
    assert!(why.contains("more than the whole disk") && why.ends_with("0 B of it are written"), "{why}");
}

#[test]
fn test_outputs_named_as_unread_are_left_out_and_told() {
    let dir = tree(&[("outputs/a", "1"), ("outputs/b", "2")]);
    let without = [Unread { path: dir.path().join("outputs/b"), why: "changes".into() }];
    let parts = [("outputs", Path::new("outputs"))];
    let snapshot =
        scan_outputs(dir.path(), &parts, &without, &Elsewhere::default(), &AtomicBool::new(false)).unwrap();
    assert_eq!((snapshot.files, &snapshot.unread[..]), (1, &without[..]));
}

#[test]
fn test_reading_ends_when_nobody_wants_it_any_more() {
    let dir = tree(&[]);
    fs::create_dir(dir.path().join("outputs")).unwrap();
    // An hour of zeros, at the speed of a processor.
    let file = fs::File::create(dir.path().join("outputs/hollow")).unwrap();
    let (stop, parts) = (AtomicBool::new(false), [("outputs", Path::new("outputs"))]);
    file.set_len((4 << 40).min(disk_size(dir.path()))).unwrap();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| scan_outputs(dir.path(), &parts, &[], &Elsewhere::default(), &stop));
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(!reading.is_finished(), "the file was read already");
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(matches!(reading.join().unwrap(), Err(ScanError::Stopped)));
    });
}
