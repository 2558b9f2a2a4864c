use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

const OLD: &[u8] = b"old";

fn rig() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("note.json");
    fs::write(&path, OLD).unwrap();
    (dir, path)
}

fn names(dir: &Path) -> Vec<String> {
    let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(name).collect();
    names.sort();
    names
}

#[test]
fn test_what_is_written_is_there_alone_and_private() {
    let (dir, path) = rig();
    for write in [write_durable, write_whole] {
        write(&path, b"a longer text").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"a longer text");
        write(&path, b"").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"", "nothing of the longer one is left");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(names(dir.path()), ["note.json"]);
        let missing = write(&dir.path().join("gone/note.json"), b"new");
        assert_eq!(missing.unwrap_err().kind(), ErrorKind::NotFound);
    }
}

#[test]
fn test_the_file_is_flushed_before_its_name_and_then_the_directory() {
    let (dir, path) = rig();
    let mut flushed = Vec::new();
    let mut flush = |file: &File| {
        let file = file.metadata()?;
        flushed.push((file.ino(), file.len(), fs::read(&path)?));
        Ok(())
    };
    replace(&path, b"newer", OWNER, &mut flush).unwrap();
    let (file, directory) = (path.metadata().unwrap(), dir.path().metadata().unwrap());
    assert_eq!(flushed[0], (file.ino(), 5, OLD.to_vec()), "all bytes, and the old one has the name");
    assert_eq!((flushed[1].0, &flushed[1].2[..]), (directory.ino(), &b"newer"[..]));
    assert_eq!(flushed.len(), 2);
}

#[test]
fn test_a_flush_that_fails_leaves_one_of_the_two_and_nothing_beside() {
    for (failing, left) in [(0, OLD), (1, b"new")] {
        let (dir, path) = rig();
        let mut visits = 0..;
        let mut flush = |_: &File| match visits.next() == Some(failing) {
            true => Err(ErrorKind::StorageFull.into()),
            false => Ok(()),
        };
        assert!(is_full(&replace(&path, b"new", OWNER, &mut flush).unwrap_err()));
        assert_eq!(fs::read(&path).unwrap(), left);
        assert_eq!(names(dir.path()), ["note.json"]);
    }
}

#[test]
fn test_who_dies_midway_leaves_the_old_one_and_the_next_takes_over() {
    let (dir, path) = rig();
    let died = std::panic::catch_unwind(|| replace(&path, b"half", OWNER, &mut |_| panic!("killed")));
    assert!(died.is_err());
    assert_eq!(fs::read(&path).unwrap(), OLD);
    assert_eq!(names(dir.path()), ["note.json", "note.json.new"]);
    write_durable(&path, b"n").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"n");
    assert_eq!(names(dir.path()), ["note.json"]);
}

#[test]
fn test_a_name_that_cannot_be_taken_leaves_nothing_beside() {
    let (dir, _) = rig();
    let taken = dir.path().join("taken");
    fs::create_dir_all(taken.join("full")).unwrap();
    write_durable(&taken, b"new").unwrap_err();
    assert_eq!(names(dir.path()), ["note.json", "taken"]);
}

#[test]
fn test_readers_see_one_of_the_two_and_never_a_mix() {
    let (_dir, path) = rig();
    let texts = [vec![b'a'; 100_000], vec![b'b'; 70_000]];
    write_whole(&path, &texts[0]).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..200 {
                write_whole(&path, &texts[round % 2]).unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            assert!(texts.contains(&fs::read(&path).unwrap()));
        }
    });
}

#[test]
fn test_a_full_disk_leaves_the_old_one_and_nothing_beside() {
    // One has too few bytes, the other too few inodes: the directory itself takes one of them, too.
    for (options, length) in [("size=16k", 100_000), ("size=1m,nr_inodes=2", 1)] {
        let Some(small) = SmallDisk::mount(options) else { return };
        let path = small.path().join("note.json");
        fs::write(&path, OLD).unwrap();
        for write in [write_durable, write_whole] {
            assert!(is_full(&write(&path, &vec![b'n'; length]).unwrap_err()));
            assert_eq!(fs::read(&path).unwrap(), OLD);
            assert_eq!(names(small.path()), ["note.json"]);
        }
    }
}

#[test]
fn test_one_holds_a_lock_or_many_share_it() {
    let (dir, path) = rig();
    let open = || open_lock(&path).unwrap();
    let (one, two) = (open(), open());
    assert!(try_lock_shared(&one).unwrap() && try_lock_shared(&two).unwrap());
    assert!(!try_lock(&open()).unwrap());
    drop((one, two));
    let sole = open();
    assert!(try_lock(&sole).unwrap());
    assert!(!try_lock_shared(&open()).unwrap());
    assert_eq!(fs::read(&path).unwrap(), OLD, "what a lock file holds stays");
    assert!(open_lock(&dir.path().join("gone/lock")).is_err());
}

#[test]
fn test_a_lock_is_waited_for_while_its_holder_may_be_about_to_end() {
    let (_dir, path) = rig();
    let (holder, file) = (open_lock(&path).unwrap(), open_lock(&path).unwrap());
    assert!(try_lock(&holder).unwrap());
    let begun = Instant::now();
    assert!(!lock_soon(&file).unwrap() && begun.elapsed() >= SOON);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(3 * AGAIN);
            drop(holder);
        });
        assert!(lock_soon(&file).unwrap());
    });
}

#[test]
fn test_a_full_disk_has_one_meaning() {
    const EIO: i32 = 5;
    const ENOSPC: i32 = 28;
    const EROFS: i32 = 30;
    const EDQUOT: i32 = 122;
    for (error, full) in [(ENOSPC, true), (EDQUOT, true), (EIO, false), (EROFS, false)] {
        let error = io::Error::from_raw_os_error(error);
        assert_eq!(is_full(&error), full, "{error}");
        assert_eq!(says_full(&format!("pip: {error}")), full, "{error}");
    }
    assert!(is_full(&io::Error::new(ErrorKind::StorageFull, "wrapped")));
    assert!(says_full("write /var/lib/x: no space left on device"), "as the engine says it");
    assert!(!says_full("a package named space"));
    let dir = tempfile::tempdir().unwrap();
    let full = |at: &Path| -> Vec<_> { (0..10_000).filter(|code| is_full_for_sqlite(*code, at)).collect() };
    assert_eq!(
        full(&dir.path().join("db")),
        [13],
        "a write that failed where there is room failed otherwise"
    );
    assert_eq!(full(&dir.path().join("absent/db")), [13], "and so did one where nothing can be written");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let Some(disk) = SmallDisk::mount("size=64k") else { return };
    let _ = fs::write(disk.path().join("all"), vec![7; 1 << 20]); // as much as there is room for
    assert_eq!(full(&disk.path().join("db")), [13, 778, 4874]);
}
