//! Changes the owner of files between the daemon and the users it works for, in trees that both may change meanwhile.
//!
//! Each entry is opened below an open directory, through no link, and is examined only once it is open. So nothing
//! outside of the tree changes its owner, and where owners are named, only their files do.

use std::ffi::CStr;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;

use crate::wire::GivenPart;

/// No tree is deeper, since the length of a path is limited.
pub(crate) const DEEPEST: usize = 2048;

/// The bits that a file never has once it was taken: set-id and sticky ones, and writing by others.
const NEVER: u32 = 0o7022;

/// The owner's rights that it always has then.
const FILE: u32 = 0o600;
const DIRECTORY: u32 = 0o700;

/// Gives files of the `from` users to another user.
pub(crate) fn give(
    root: &OwnedFd,
    to: (u32, u32),
    from: &dyn Fn(u32) -> bool,
    kind: GivenPart,
) -> io::Result<()> {
    let is_due = |seen: &Stat| seen.st_uid != to.0 && from(seen.st_uid);
    let mut act = |entry: &OwnedFd, seen: &Stat| {
        let is_directory = FileType::from_raw_mode(seen.st_mode).is_dir();
        // A file with a second name keeps its owner: that name may be outside of the tree.
        let is_whole =
            is_directory || (kind == GivenPart::Everything && (seen.st_nlink <= 1 || is_link(seen)));
        if is_due(seen) && is_whole { change(entry, to) } else { Ok(()) }
    };
    each(root, 0, false, &mut act)
}

/// Takes files of the `from` users.
pub(crate) fn take(root: &OwnedFd, to: (u32, u32), from: &dyn Fn(u32) -> bool) -> io::Result<()> {
    let mut act = |entry: &OwnedFd, seen: &Stat| {
        if !from(seen.st_uid) {
            return Ok(());
        }
        change(entry, to)?;
        let least = match FileType::from_raw_mode(seen.st_mode) {
            FileType::Directory => DIRECTORY,
            FileType::RegularFile => FILE,
            _ => return Ok(()),
        };
        let mode = (seen.st_mode & 0o7777 & !NEVER) | least;
        // An `O_PATH` descriptor is changed through its name in `/proc`.
        Ok(rustix::fs::chmod(place(entry), Mode::from_raw_mode(mode))?)
    };
    each(root, 0, true, &mut act)
}

fn is_link(seen: &Stat) -> bool {
    FileType::from_raw_mode(seen.st_mode) == FileType::Symlink
}

fn change(entry: &OwnedFd, to: (u32, u32)) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(to.0), Gid::from_raw(to.1));
    Ok(rustix::fs::chownat(entry, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?)
}

fn place(entry: &OwnedFd) -> String {
    use std::os::fd::AsRawFd as _;
    format!("/proc/self/fd/{}", entry.as_raw_fd())
}

type Act<'a> = &'a mut dyn FnMut(&OwnedFd, &Stat) -> io::Result<()>;

/// Acts on the content of a directory and on the directory itself; the order (`first`) decides who may enter it.
fn each(directory: &OwnedFd, depth: usize, first: bool, act: Act<'_>) -> io::Result<()> {
    if depth > DEEPEST {
        return Err(ErrorKind::InvalidFilename.into());
    }
    let seen = rustix::fs::fstat(directory)?;
    if first {
        act(directory, &seen)?;
    }
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            one(directory, entry.file_name(), depth, first, act)?;
        }
    }
    if first { Ok(()) } else { act(directory, &seen) }
}

fn one(directory: &OwnedFd, name: &CStr, depth: usize, first: bool, act: Act<'_>) -> io::Result<()> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(directory, name, flags, Mode::empty()) {
        Ok(below) => return each(&below, depth + 1, first, act),
        Err(Errno::NOTDIR | Errno::LOOP) => {}
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(directory, name, flags, Mode::empty()) {
        Ok(entry) => {
            let seen = rustix::fs::fstat(&entry)?;
            // It became a directory meanwhile, and belongs to the user who made it.
            if FileType::from_raw_mode(seen.st_mode).is_dir() { Ok(()) } else { act(&entry, &seen) }
        }
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::CWD;

    use super::*;

    const KEEPER: u32 = 2_000_000_001;

    fn give_to(tree: &Path, uid: u32) {
        give(&agent_fs::open_directory(tree).unwrap(), (uid, uid), &|_| true, GivenPart::Everything).unwrap();
    }

    fn owner(path: &Path) -> u32 {
        path.symlink_metadata().unwrap().uid()
    }

    /// The owner of a part of the tree swaps a folder for a link all the time, while the tree is given away.
    #[test]
    fn test_tree_is_given_away_and_nothing_beyond_it() {
        const OTHER: u32 = 65_534;
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let temp = tempfile::tempdir().unwrap();
        let (beyond, tree) = (temp.path().join("beyond"), temp.path().join("tree"));
        for dir in [&beyond, &tree.join("d/e"), &tree.join("d/f")] {
            fs::create_dir_all(dir).unwrap();
            fs::write(dir.join("a"), "a").unwrap();
        }
        fs::hard_link(beyond.join("a"), tree.join("d/hard")).unwrap();
        symlink(&beyond, tree.join("link")).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let (from, to) = (tree.join("d/e"), tree.join("link"));
                    let _ =
                        rustix::fs::renameat_with(CWD, &from, CWD, &to, rustix::fs::RenameFlags::EXCHANGE);
                }
            });
            for _ in 0..300 {
                give_to(&tree, OTHER);
                give_to(&tree, 0);
            }
            over.store(true, Ordering::Relaxed);
        });
        give_to(&tree, OTHER);
        assert_eq!(
            (owner(&tree), owner(&tree.join("d/f/a")), owner(&tree.join("link"))),
            (OTHER, OTHER, OTHER)
        );
        assert_eq!((owner(&beyond), owner(&beyond.join("a"))), (0, 0));
    }

    #[test]
    fn test_only_files_of_those_who_are_named_change_hands() {
        const JOB: u32 = 2_000_000_002;
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let temp = tempfile::tempdir().unwrap();
        let tree = temp.path().join("tree");
        fs::create_dir_all(tree.join("d")).unwrap();
        for (name, uid) in [("keepers", KEEPER), ("roots", 0), ("strangers", 3)] {
            fs::write(tree.join("d").join(name), name).unwrap();
            chown(tree.join("d").join(name), Some(uid), Some(uid)).unwrap();
        }
        for dir in [&tree, &tree.join("d")] {
            chown(dir, Some(KEEPER), Some(KEEPER)).unwrap();
        }
        let open = || agent_fs::open_directory(&tree).unwrap();
        let owners = || ["keepers", "roots", "strangers"].map(|name| owner(&tree.join("d").join(name)));
        give(&open(), (JOB, JOB), &|uid| uid == KEEPER, GivenPart::Directories).unwrap();
        assert_eq!(
            (owner(&tree), owners()),
            (JOB, [KEEPER, 0, 3]),
            "directories are lent without their files"
        );
        give(&open(), (JOB, JOB), &|uid| uid == KEEPER, GivenPart::Everything).unwrap();
        assert_eq!((owner(&tree), owners()), (JOB, [JOB, 0, 3]));

        let closed = tree.join("d/keepers");
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o4022)).unwrap();
        fs::set_permissions(tree.join("d"), fs::Permissions::from_mode(0o0)).unwrap();
        take(&open(), (KEEPER, KEEPER), &|uid| uid == JOB).unwrap();
        assert_eq!((owner(&tree.join("d")), owners()), (KEEPER, [KEEPER, 0, 3]));
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o7777;
        assert_eq!(
            (mode(&closed), mode(&tree.join("d"))),
            (0o600, 0o700),
            "what is taken can be read and removed"
        );
    }
}
