//! Copies what jobs are writing, from a tree that they may change meanwhile.
//!
//! Each entry is opened below an open directory, through no link, and is examined only once it is open. A file is copied
//! as it is when it is read, to the length that it has then; where the file system can, the copy shares its blocks.
//! Links are copied as links, anything else that is no file is left out, and so is what vanishes meanwhile.

use std::ffi::{CStr, CString};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, SeekFrom, Stat, Uid};
use rustix::io::Errno;

use crate::walk::{self, Ladder, Walk};

/// Most paths that are named as left out; more would not fit into an answer.
const MOST_NAMED: usize = 100;

/// The longest path that is named, in bytes; of a longer one, the part that fits.
const LONGEST_NAMED: usize = 200;

/// The largest part of a file that is copied at a time, in bytes.
const PART: usize = 16 << 20;

/// One copy.
struct Copy<'a> {
    /// Who owns the copies, where that is not this process's user.
    to: Option<(u32, u32)>,
    /// Which files are copied.
    from: &'a dyn Fn(&Stat) -> bool,
    /// The bytes that may still be written.
    left: u64,
    left_out: Vec<PathBuf>,
}

/// What a job with this user may have copied of its directory: what that user owns, and what the daemon (`keeper`) put
/// there. A file of the daemon that has a second name may be any of its files.
pub(crate) fn is_of_the_run(seen: &Stat, keeper: u32, uid: u32) -> bool {
    let is_directory = FileType::from_raw_mode(seen.st_mode).is_dir();
    seen.st_uid == uid || (seen.st_uid == keeper && (is_directory || seen.st_nlink <= 1))
}

/// Copies what is in the directory `source` and is one of those in `from` into `target`.
pub(crate) fn copy(
    source: &OwnedFd,
    target: &OwnedFd,
    to: Option<(u32, u32)>,
    from: &dyn Fn(&Stat) -> bool,
    most: u64,
) -> io::Result<Vec<PathBuf>> {
    let mut copy = Copy { to, from, left: most, left_out: Vec::new() };
    copy.tree(source.try_clone()?, target.try_clone()?)?;
    Ok(copy.left_out)
}

impl Copy<'_> {
    fn tree(&mut self, source: OwnedFd, target: OwnedFd) -> io::Result<()> {
        let (mut walk, mut into, mut path) = (Walk::of(source), Ladder::new(target), PathBuf::new());
        loop {
            let next = match walk.next() {
                Err(error) if error.kind() == ErrorKind::NotFound => None, // the directory was removed meanwhile
                Err(error) if is_kept_back(&error) => {
                    self.leave_out(&path);
                    None
                }
                next => next?,
            };
            let Some(name) = next else {
                path.pop();
                match walk.up()? && into.up()? {
                    true => continue,
                    false => return Ok(()),
                }
            };
            path.push(path_of(&name));
            match self.entry(walk.at(), into.at(), &name, &path) {
                Ok(Some((below, made))) => {
                    walk.enter(below)?;
                    into.down(made)?;
                    continue;
                }
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => {} // removed meanwhile
                Err(error) if is_kept_back(&error) => self.leave_out(&path),
                Err(error) => return Err(error),
            }
            path.pop();
        }
    }

    /// Copies what is no directory; a directory is made, and both are returned.
    fn entry(
        &mut self,
        source: &OwnedFd,
        target: &OwnedFd,
        name: &CStr,
        path: &Path,
    ) -> io::Result<Option<(OwnedFd, OwnedFd)>> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let entry = rustix::fs::openat(source, name, flags, Mode::empty())?;
        let seen = rustix::fs::fstat(&entry)?;
        if !(self.from)(&seen) {
            self.leave_out(path);
            return Ok(None);
        }
        match FileType::from_raw_mode(seen.st_mode) {
            FileType::Directory => {
                let below = open(&entry, OFlags::RDONLY | OFlags::DIRECTORY)?;
                rustix::fs::mkdirat(target, name, Mode::RWXU)?;
                let made = walk::open(target, name)?;
                self.own(made.as_fd())?;
                return Ok(Some((below, made)));
            }
            FileType::RegularFile => self.file(&open(&entry, OFlags::RDONLY)?, target, name)?,
            FileType::Symlink => {
                let leads_to = rustix::fs::readlinkat(&entry, c"", Vec::new())?;
                rustix::fs::symlinkat(&leads_to, target, name)?;
            }
            _ => {}
        }
        Ok(None)
    }

    fn file(&mut self, source: &OwnedFd, target: &OwnedFd, name: &CStr) -> io::Result<()> {
        let seen = rustix::fs::fstat(source)?;
        self.file_with(source, &seen, target, name, 0o600 | (seen.st_mode & 0o100))
    }

    fn file_with(
        &mut self,
        source: &OwnedFd,
        seen: &Stat,
        target: &OwnedFd,
        name: &CStr,
        mode: u32,
    ) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(target, name, flags, Mode::from_raw_mode(mode))?;
        self.own(made.as_fd())?;
        match rustix::fs::ioctl_ficlone(&made, source) {
            Ok(()) => Ok(()),
            Err(_) => self.content(source, &made, seen),
        }
    }

    /// Copies the parts of a file that are written; the holes between them stay holes.
    fn content(&mut self, source: &OwnedFd, made: &OwnedFd, seen: &Stat) -> io::Result<()> {
        let size = u64::try_from(seen.st_size).unwrap_or(0);
        let mut at = 0;
        while at < size {
            let start = match rustix::fs::seek(source, SeekFrom::Data(at)) {
                Ok(start) => start,
                Err(Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            let end = rustix::fs::seek(source, SeekFrom::Hole(start))?.min(size);
            at = self.part(source, made, start, end)?;
            if at < end {
                break; // it was made shorter meanwhile
            }
        }
        Ok(rustix::fs::ftruncate(made, size)?)
    }

    /// Returns where it ended: before `end` only where the file does.
    fn part(&mut self, source: &OwnedFd, made: &OwnedFd, mut at: u64, end: u64) -> io::Result<u64> {
        while at < end {
            let length = usize::try_from(end - at).unwrap_or(PART).min(PART);
            if (length as u64) > self.left {
                return Err(ErrorKind::StorageFull.into());
            }
            let (mut from, mut to) = (at, at);
            match rustix::fs::copy_file_range(source, Some(&mut from), made, Some(&mut to), length)? {
                0 => break,
                copied => (at, self.left) = (at + copied as u64, self.left - copied as u64),
            }
        }
        Ok(at)
    }

    fn own(&self, made: BorrowedFd<'_>) -> io::Result<()> {
        let Some((uid, gid)) = self.to else { return Ok(()) };
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        Ok(rustix::fs::chownat(made, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?)
    }

    fn leave_out(&mut self, path: &Path) {
        if self.left_out.len() < MOST_NAMED {
            let is_short = |path: &&Path| path.as_os_str().len() <= LONGEST_NAMED;
            let named = path.ancestors().find(is_short).unwrap_or(Path::new(""));
            // An answer is text, and a job gives names as it likes.
            self.left_out.push(PathBuf::from(named.to_string_lossy().into_owned()));
        }
    }
}

/// Puts copies in the places of files that have other names, which stay as they are.
pub(crate) struct Replacer {
    copy: Copy<'static>,
    number: u64,
}

impl Replacer {
    /// The copies are `to`'s, and take `most` bytes at most.
    pub(crate) fn new(to: (u32, u32), most: u64) -> Replacer {
        Replacer { copy: Copy { to: Some(to), from: &|_| true, left: most, left_out: Vec::new() }, number: 0 }
    }

    /// The copy of the file at `entry` takes the place of `name` in a directory that nobody else changes, with this mode.
    /// With [`ErrorKind::StorageFull`] the file is still there.
    pub(crate) fn replace(
        &mut self,
        entry: &OwnedFd,
        dir: &OwnedFd,
        name: &CStr,
        mode: u32,
    ) -> io::Result<()> {
        let source = open(entry, OFlags::RDONLY)?;
        let seen = rustix::fs::fstat(&source)?;
        let copied = loop {
            self.number += 1;
            let apart = CString::new(format!(".agent-copy-{}", self.number))?;
            match self.copy.file_with(&source, &seen, dir, &apart, mode) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                copied => break copied.map(|()| apart.clone()).map_err(|error| (error, apart)),
            }
        };
        let renamed = copied.and_then(|apart| {
            rustix::fs::renameat(dir, &apart, dir, name).map_err(|error| (error.into(), apart))
        });
        renamed.map_err(|(error, apart)| {
            let _ = rustix::fs::unlinkat(dir, &apart, AtFlags::empty()); // it may not have been made
            error
        })
    }
}

/// Opens what an `O_PATH` descriptor stands for, and nothing else: its name in `/proc` leads to it alone.
fn open(entry: &OwnedFd, flags: OFlags) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd as _;
    let path = format!("/proc/self/fd/{}", entry.as_raw_fd());
    Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?)
}

fn path_of(name: &CStr) -> PathBuf {
    use std::os::unix::ffi::OsStrExt as _;
    PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes()))
}

/// It cannot be read, now or later.
fn is_kept_back(error: &io::Error) -> bool {
    let errors = [Errno::ACCESS, Errno::PERM, Errno::IO, Errno::STALE];
    Errno::from_io_error(error).is_some_and(|error| errors.contains(&error))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::CWD;

    use super::*;

    fn copy_of(source: &Path, target: &Path, most: u64) -> io::Result<Vec<PathBuf>> {
        fs::create_dir_all(target).unwrap();
        let open = |path| agent_fs::open_directory(path).unwrap();
        copy(&open(source), &open(target), None, &|_| true, most)
    }

    #[test]
    fn test_files_links_and_holes_are_copied_and_nothing_else() {
        let temp = tempfile::tempdir().unwrap();
        let (source, target) = (temp.path().join("source"), temp.path().join("target"));
        fs::create_dir_all(source.join("deep/er")).unwrap();
        fs::write(source.join("deep/er/model"), "weights").unwrap();
        fs::write(source.join("run"), "#!").unwrap();
        fs::set_permissions(source.join("run"), fs::Permissions::from_mode(0o4755)).unwrap();
        symlink("/etc/passwd", source.join("link")).unwrap();
        nix::unistd::mkfifo(&source.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let sparse = fs::File::create(source.join("sparse")).unwrap();
        sparse.set_len(1 << 40).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&sparse, b"end", (1 << 40) - 3).unwrap();
        assert_eq!(copy_of(&source, &target, 1 << 20).unwrap(), Vec::<PathBuf>::new());
        assert_eq!(fs::read_to_string(target.join("deep/er/model")).unwrap(), "weights");
        assert_eq!(fs::read_link(target.join("link")).unwrap(), Path::new("/etc/passwd"));
        assert_eq!(target.join("run").metadata().unwrap().mode() & 0o7777, 0o700);
        assert!(!target.join("fifo").exists());
        let copied = target.join("sparse").metadata().unwrap();
        assert_eq!(copied.len(), 1 << 40);
        assert!(copied.blocks() * 512 < 1 << 20, "{} blocks", copied.blocks());
    }

    #[test]
    fn test_copy_ends_where_there_is_no_room_for_it() {
        let temp = tempfile::tempdir().unwrap();
        let source = temp.path().join("source");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("large"), vec![1; 4 << 20]).unwrap();
        // A file system that shares the blocks of copies needs no room.
        if let Err(error) = copy_of(&source, &temp.path().join("target"), 1 << 20) {
            assert_eq!(error.kind(), ErrorKind::StorageFull);
        }
        assert_eq!(copy_of(&source, &temp.path().join("whole"), 4 << 20).unwrap(), Vec::<PathBuf>::new());
        assert_eq!(fs::read(temp.path().join("whole/large")).unwrap(), vec![1; 4 << 20]);
    }

    /// The owner of the tree swaps a folder for a link out of it all the time.
    #[test]
    fn test_nothing_beyond_the_tree_is_copied() {
        let temp = tempfile::tempdir().unwrap();
        let (beyond, source) = (temp.path().join("beyond"), temp.path().join("source"));
        fs::create_dir_all(source.join("d")).unwrap();
        fs::create_dir(&beyond).unwrap();
        fs::write(beyond.join("secret"), "secret").unwrap();
        fs::write(source.join("d/a"), "a").unwrap();
        symlink(&beyond, source.join("link")).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let (from, to) = (source.join("d"), source.join("link"));
                    let _ =
                        rustix::fs::renameat_with(CWD, &from, CWD, &to, rustix::fs::RenameFlags::EXCHANGE);
                }
            });
            for round in 0..300 {
                let target = temp.path().join(format!("target{round}"));
                copy_of(&source, &target, 1 << 20).unwrap();
                for found in ["d", "link"] {
                    let copied = target.join(found);
                    let is_link = copied.symlink_metadata().is_ok_and(|seen| seen.is_symlink());
                    assert!(is_link || !copied.join("secret").exists());
                }
            }
            over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn test_only_files_of_those_who_are_named_are_copied_and_they_change_hands() {
        const KEEPER: u32 = 2_000_000_001;
        const JOB: u32 = 2_000_000_002;
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let temp = tempfile::tempdir().unwrap();
        let (source, target) = (temp.path().join("source"), temp.path().join("target"));
        fs::create_dir(&source).unwrap();
        fs::create_dir(&target).unwrap();
        for (name, uid) in [("jobs", JOB), ("roots", 0)] {
            fs::write(source.join(name), name).unwrap();
            chown(source.join(name), Some(uid), Some(uid)).unwrap();
        }
        let open = |path: &Path| agent_fs::open_directory(path).unwrap();
        let keeper = Some((KEEPER, KEEPER));
        let left_out =
            copy(&open(&source), &open(&target), keeper, &|seen| seen.st_uid == JOB, 1 << 20).unwrap();
        assert_eq!(left_out, [PathBuf::from("roots")]);
        assert_eq!(target.join("jobs").metadata().unwrap().uid(), KEEPER);
        assert!(!target.join("roots").exists());
    }
}
