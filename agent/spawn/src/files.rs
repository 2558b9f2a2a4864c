//! Changes the owner of files between the daemon and the users it works for, in trees that both may change meanwhile.
//!
//! Each entry is opened below an open directory, through no link, and is examined only once it is open. So nothing
//! outside of the tree changes its owner, and where owners are named, only their files do. A file that has a second name,
//! which may be outside, never does: it can be a link that somebody made to what he keeps elsewhere, or a colleague does.

use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;

use crate::copies::Replacer;
use crate::walk::{self, Walk};
use crate::wire::{GivenPart, TakenPart};

/// The bits that a file never has once it was taken: set-id and sticky ones, and writing by others.
const NEVER: u32 = 0o7022;

/// The owner's rights that it always has then.
const FILE: u32 = 0o600;
const DIRECTORY: u32 = 0o700;

/// Whoever has a way to the file may read it.
const BY_ALL: u32 = 0o004;

/// Gives files of the `from` users to another user.
pub(crate) fn give(
    root: &OwnedFd,
    to: (u32, u32),
    from: &dyn Fn(u32) -> bool,
    kind: GivenPart,
) -> io::Result<()> {
    let mut act = |entry: &TreeEntry<'_>, seen: &Stat| {
        let is_due = seen.st_uid != to.0 && from(seen.st_uid);
        let is_whole = is_directory(seen) || (kind == GivenPart::Everything && seen.st_nlink <= 1);
        if is_due && is_whole { change(entry.at, to) } else { Ok(()) }
    };
    each(root, false, &mut act)
}

/// Takes files of one user, or the directories of those whom this `serves`.
pub(crate) fn take(
    root: &OwnedFd,
    to: (u32, u32),
    part: TakenPart,
    serves: &dyn Fn(u32) -> bool,
) -> io::Result<()> {
    let (from, most) = match part {
        TakenPart::Directories => (None, 0),
        TakenPart::Readable { uid, most } => (Some(uid), most),
        TakenPart::Whole { uid } => (Some(uid), u64::MAX),
    };
    let mut replacer = Replacer::new(to, most);
    let mut act = |entry: &TreeEntry<'_>, seen: &Stat| {
        let is_due = match from {
            Some(uid) => seen.st_uid == uid,
            None => is_directory(seen) && serves(seen.st_uid),
        };
        match is_due {
            false => Ok(()),
            true if is_directory(seen) || seen.st_nlink <= 1 => take_one(entry.at, seen, to),
            true => take_copy(entry, seen, to, part, &mut replacer),
        }
    };
    each(root, true, &mut act)
}

fn take_one(entry: &OwnedFd, seen: &Stat, to: (u32, u32)) -> io::Result<()> {
    change(entry, to)?;
    let Some(mode) = mode_when_taken(seen) else { return Ok(()) };
    // An `O_PATH` descriptor is changed through its name in `/proc`.
    Ok(rustix::fs::chmod(place(entry), Mode::from_raw_mode(mode))?)
}

/// What a file or directory may have once it was taken.
fn mode_when_taken(seen: &Stat) -> Option<u32> {
    let least = match FileType::from_raw_mode(seen.st_mode) {
        FileType::Directory => DIRECTORY,
        FileType::RegularFile => FILE,
        _ => return None,
    };
    Some((seen.st_mode & 0o7777 & !NEVER) | least)
}

/// A file with a second name stays its owner's: that name may be in his home. Only in a directory that was taken before
/// can nobody else change what stands at the name here.
fn take_copy(
    entry: &TreeEntry<'_>,
    seen: &Stat,
    to: (u32, u32),
    part: TakenPart,
    replacer: &mut Replacer,
) -> io::Result<()> {
    let Some((dir, name)) = entry.named else { return Ok(()) };
    let is_file = FileType::from_raw_mode(seen.st_mode).is_file();
    let may_stay = matches!(part, TakenPart::Readable { .. });
    if !is_file || (may_stay && seen.st_mode & BY_ALL != 0) || rustix::fs::fstat(dir)?.st_uid != to.0 {
        return Ok(());
    }
    match replacer.replace(entry.at, dir, name, mode_when_taken(seen).unwrap_or(FILE)) {
        Err(error) if may_stay && agent_fs::is_full(&error) => Ok(()),
        replaced => replaced,
    }
}

fn is_directory(seen: &Stat) -> bool {
    FileType::from_raw_mode(seen.st_mode).is_dir()
}

fn change(entry: &OwnedFd, to: (u32, u32)) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(to.0), Gid::from_raw(to.1));
    Ok(rustix::fs::chownat(entry, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?)
}

fn place(entry: &OwnedFd) -> String {
    use std::os::fd::AsRawFd as _;
    format!("/proc/self/fd/{}", entry.as_raw_fd())
}

/// Something in the tree, opened.
struct TreeEntry<'a> {
    at: &'a OwnedFd,
    /// Its directory and its name there; not of a directory.
    named: Option<(&'a OwnedFd, &'a CStr)>,
}

type Act<'a> = &'a mut dyn FnMut(&TreeEntry<'_>, &Stat) -> io::Result<()>;

/// Acts on every directory and all that is in it; the order (`first`: before its content) decides who may enter it.
fn each(root: &OwnedFd, first: bool, act: Act<'_>) -> io::Result<()> {
    let mut walk = Walk::of(root.try_clone()?);
    on_directory(walk.at(), first, act)?;
    loop {
        let Some(name) = walk.next()? else {
            on_directory(walk.at(), !first, act)?;
            match walk.up()? {
                true => continue,
                false => return Ok(()),
            }
        };
        match walk::open(walk.at(), &name) {
            Ok(below) => {
                on_directory(&below, first, act)?;
                walk.enter(below)?;
            }
            Err(Errno::NOTDIR | Errno::LOOP) => on_other(walk.at(), &name, act)?,
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn on_directory(at: &OwnedFd, is_due: bool, act: Act<'_>) -> io::Result<()> {
    if is_due { act(&TreeEntry { at, named: None }, &rustix::fs::fstat(at)?) } else { Ok(()) }
}

fn on_other(directory: &OwnedFd, name: &CStr, act: Act<'_>) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(directory, name, flags, Mode::empty()) {
        Ok(entry) => {
            let seen = rustix::fs::fstat(&entry)?;
            // It became a directory meanwhile, and belongs to the user who made it.
            match is_directory(&seen) {
                true => Ok(()),
                false => act(&TreeEntry { at: &entry, named: Some((directory, name)) }, &seen),
            }
        }
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// How often a directory is listed anew while something is removed from it.
const MOST_LISTINGS: u32 = 100;

/// Removes what is at `name`, with all that is in it. This user's own directories are opened for that.
pub(crate) fn remove(parent: &OwnedFd, name: &CStr) -> io::Result<()> {
    let Some(root) = unlink(parent, name)? else { return Ok(()) };
    let mut walk = Walk::of(root);
    let mut names = Vec::new();
    let mut removed_some = false;
    loop {
        if let Some(entry) = walk.next()? {
            match unlink(walk.at(), &entry)? {
                None => removed_some = true,
                Some(below) => {
                    walk.enter(below)?;
                    names.push(entry);
                    removed_some = false;
                }
            }
        } else if removed_some && walk.again() < MOST_LISTINGS {
            removed_some = false; // some file systems leave names out of a listing while others are removed
        } else {
            let Some(left) = names.pop() else {
                return gone(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR));
            };
            walk.up()?;
            gone(rustix::fs::unlinkat(walk.at(), &left, AtFlags::REMOVEDIR))?;
            removed_some = true;
        }
    }
}

fn gone(removed: Result<(), Errno>) -> io::Result<()> {
    match removed {
        Err(Errno::NOENT) => Ok(()),
        removed => Ok(removed?),
    }
}

/// Removes what is no directory; a directory is opened.
fn unlink(parent: &OwnedFd, name: &CStr) -> io::Result<Option<OwnedFd>> {
    let refused = match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(None),
        Err(error @ (Errno::ISDIR | Errno::PERM)) => error,
        Err(error) => return Err(error.into()),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = match rustix::fs::openat(parent, name, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        Err(_) => return Err(refused.into()),
        Ok(found) => found,
    };
    let seen = rustix::fs::fstat(&found)?;
    if seen.st_mode & DIRECTORY != DIRECTORY && seen.st_uid == rustix::process::geteuid().as_raw() {
        rustix::fs::chmod(place(&found), Mode::from_raw_mode(seen.st_mode & 0o7777 | DIRECTORY))?;
    }
    Ok(Some(walk::open(&found, c".")?))
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
        take(&open(), (KEEPER, KEEPER), TakenPart::Whole { uid: JOB }, &|_| false).unwrap();
        assert_eq!((owner(&tree.join("d")), owners()), (KEEPER, [KEEPER, 0, 3]));
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o7777;
        assert_eq!(
            (mode(&closed), mode(&tree.join("d"))),
            (0o600, 0o700),
            "what is taken can be read and removed"
        );
    }

    /// A home whose owner, and whose colleague, have linked files of theirs into the tree of a job.
    struct Linked {
        temp: tempfile::TempDir,
    }

    const JOB: u32 = 2_000_000_002;
    const COLLEAGUE: u32 = 2_000_000_003;
    const FILES: [(&str, u32, u32); 3] =
        [("open", JOB, 0o644), ("key", JOB, 0o600), ("shared", COLLEAGUE, 0o666)];

    impl Linked {
        fn make() -> Linked {
            let linked = Linked { temp: tempfile::tempdir().unwrap() };
            for part in ["home", "tree/d"] {
                fs::create_dir_all(linked.temp.path().join(part)).unwrap();
            }
            for (name, uid, mode) in FILES {
                let file = linked.temp.path().join("home").join(name);
                fs::write(&file, name).unwrap();
                chown(&file, Some(uid), Some(uid)).unwrap();
                fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
                fs::hard_link(&file, linked.temp.path().join("tree/d").join(name)).unwrap();
            }
            for dir in ["tree", "tree/d"] {
                chown(linked.temp.path().join(dir), Some(JOB), Some(JOB)).unwrap();
            }
            linked
        }

        fn tree(&self) -> OwnedFd {
            agent_fs::open_directory(&self.temp.path().join("tree")).unwrap()
        }

        /// Who owns the files of the tree; those at home are as they were.
        fn owners(&self) -> [u32; 3] {
            FILES.map(|(name, uid, mode)| {
                let (home, tree) =
                    (self.temp.path().join("home").join(name), self.temp.path().join("tree/d").join(name));
                let found = home.metadata().unwrap();
                assert_eq!((found.uid(), found.mode() & 0o7777), (uid, mode), "{name}");
                assert_eq!(fs::read_to_string(home).unwrap(), name);
                assert_eq!(fs::read_to_string(&tree).unwrap(), name);
                owner(&tree)
            })
        }
    }

    #[test]
    fn test_a_file_with_another_name_never_changes_hands() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let parts = [
            (TakenPart::Directories, [JOB, JOB, COLLEAGUE]),
            (TakenPart::Readable { uid: JOB, most: 1 << 20 }, [JOB, KEEPER, COLLEAGUE]),
            (TakenPart::Readable { uid: COLLEAGUE, most: 1 << 20 }, [JOB, JOB, COLLEAGUE]),
            (TakenPart::Whole { uid: JOB }, [KEEPER, KEEPER, COLLEAGUE]),
        ];
        for (part, expected) in parts {
            let linked = Linked::make();
            take(&linked.tree(), (KEEPER, KEEPER), part, &|uid| uid == JOB).unwrap();
            assert_eq!(linked.owners(), expected, "{part:?}");
            assert_eq!(fs::read_dir(linked.temp.path().join("tree/d")).unwrap().count(), 3);
        }
        let linked = Linked::make();
        give(&linked.tree(), (KEEPER, KEEPER), &|_| true, GivenPart::Everything).unwrap();
        assert_eq!(
            (owner(&linked.temp.path().join("tree/d")), linked.owners()),
            (KEEPER, [JOB, JOB, COLLEAGUE])
        );
    }

    #[test]
    fn test_copies_end_where_there_is_no_room_for_them_and_the_file_stays() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let linked = Linked::make();
        let key = linked.temp.path().join("home/key");
        fs::write(&key, vec![1; 4 << 20]).unwrap();
        let part = TakenPart::Readable { uid: JOB, most: 1 << 20 };
        take(&linked.tree(), (KEEPER, KEEPER), part, &|_| false).unwrap();
        let there = linked.temp.path().join("tree/d/key");
        // A file system that shares the blocks of copies needs no room.
        assert!(owner(&there) == KEEPER || there.metadata().unwrap().ino() == key.metadata().unwrap().ino());
        assert_eq!(fs::read_dir(linked.temp.path().join("tree/d")).unwrap().count(), 3);
    }

    /// Deeper than a path can be long, and than a process may have files open.
    const DEEP: usize = 3000;

    /// A tree of one user, with a file at its end.
    fn deep(root: &Path, uid: u32) {
        fs::create_dir(root).unwrap();
        let mut at = agent_fs::open_directory(root).unwrap();
        for _ in 0..DEEP {
            rustix::fs::mkdirat(&at, c"d", Mode::RWXU).unwrap();
            let (owner, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
            rustix::fs::chownat(&at, c"d", Some(owner), Some(group), AtFlags::empty()).unwrap();
            at = walk::open(&at, c"d").unwrap();
        }
        let flags = OFlags::CREATE | OFlags::WRONLY;
        drop(rustix::fs::openat(&at, c"last", flags, Mode::RUSR).unwrap());
        chown(root, Some(uid), Some(uid)).unwrap();
    }

    /// How many directories are one in another, and who owns the last.
    fn bottom(root: &Path) -> (usize, u32) {
        let mut at = agent_fs::open_directory(root).unwrap();
        let mut depth = 0;
        while let Ok(below) = walk::open(&at, c"d") {
            (at, depth) = (below, depth + 1);
        }
        (depth, rustix::fs::fstat(at).unwrap().st_uid)
    }

    #[test]
    fn test_a_tree_of_any_depth_is_given_taken_copied_and_removed_with_few_descriptors() {
        let root = nix::unistd::geteuid().is_root();
        let uid = if root { JOB } else { nix::unistd::geteuid().as_raw() };
        let temp = tempfile::tempdir().unwrap();
        let [tree, copy] = ["tree", "copy"].map(|name| temp.path().join(name));
        deep(&tree, uid);
        fs::create_dir(&copy).unwrap();
        let open = |path: &Path| agent_fs::open_directory(path).unwrap();
        // Other tests of this process have some open, too.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let few = rustix::process::Rlimit { current: Some(256), ..limit };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
        let left_out = crate::copies::copy(&open(&tree), &open(&copy), None, &|_| true, 1 << 20).unwrap();
        assert_eq!((left_out.len(), bottom(&copy).0), (0, DEEP));
        if root {
            let part = TakenPart::Whole { uid: JOB };
            take(&open(&tree), (KEEPER, KEEPER), part, &|_| false).unwrap();
            assert_eq!(bottom(&tree), (DEEP, KEEPER));
            give(&open(&tree), (JOB, JOB), &|_| true, GivenPart::Everything).unwrap();
            assert_eq!(bottom(&tree), (DEEP, JOB));
        }
        for name in [c"tree", c"copy", c"none"] {
            remove(&open(temp.path()), name).unwrap();
        }
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0);
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    }

    #[test]
    fn test_a_wide_tree_is_removed_and_what_its_links_lead_to_stays() {
        let temp = tempfile::tempdir().unwrap();
        let (tree, beyond) = (temp.path().join("tree"), temp.path().join("beyond"));
        fs::create_dir(&beyond).unwrap();
        fs::write(beyond.join("a"), "a").unwrap();
        for number in 0..50 {
            let dir = tree.join(format!("d{number}/e/f"));
            fs::create_dir_all(&dir).unwrap();
            (0..50).for_each(|file| fs::write(dir.join(file.to_string()), "x").unwrap());
            symlink(&beyond, dir.join("link")).unwrap();
        }
        fs::set_permissions(tree.join("d7/e"), fs::Permissions::from_mode(0o0)).unwrap();
        remove(&agent_fs::open_directory(temp.path()).unwrap(), c"tree").unwrap();
        assert!(!tree.exists() && beyond.join("a").exists());
    }

    /// Where `..` leads elsewhere, nothing there is touched.
    #[test]
    fn test_a_deep_directory_that_is_moved_away_ends_the_walk() {
        let temp = tempfile::tempdir().unwrap();
        let (tree, away) = (temp.path().join("tree"), temp.path().join("away"));
        deep(&tree, nix::unistd::geteuid().as_raw());
        fs::create_dir(&away).unwrap();
        let (mut ladder, mut names) = (crate::walk::Ladder::new(agent_fs::open_directory(&tree).unwrap()), 0);
        while let Ok(below) = walk::open(ladder.at(), c"d") {
            ladder.down(below).unwrap();
            names += 1;
        }
        assert!(ladder.up().unwrap());
        let above = walk::open(ladder.at(), c"..").unwrap();
        rustix::fs::renameat(&above, c"d", agent_fs::open_directory(&away).unwrap(), c"d").unwrap();
        assert_eq!(names, DEEP);
        ladder.up().unwrap_err();
        for name in [c"tree", c"away"] {
            remove(&agent_fs::open_directory(temp.path()).unwrap(), name).unwrap();
        }
    }
}
