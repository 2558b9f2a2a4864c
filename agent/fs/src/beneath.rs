//! Opens files in places where another user may put anything and change it at any time: links, pipes, devices.
//!
//! The daemon opens files of a job in no other way. Invariants: a file opened beneath a directory is below it, and no
//! link led out of it; opening never blocks; only regular files are read, and no more bytes than the caller allows.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Which symbolic links may be followed on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// None.
    Never,
    /// Those that stay below the directory.
    Inside,
}

/// Opens the directory at `path`, which may not be a link itself; the directories above it are trusted.
pub fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Opens the file at `path` below `root`; an empty path is `root` itself. A pipe does not block, and a terminal does
/// not become the controlling one.
pub fn open_beneath(
    root: impl AsFd,
    path: impl AsRef<Path>,
    flags: OFlags,
    mode: Mode,
    links: Links,
) -> Result<OwnedFd, Errno> {
    let path = path.as_ref();
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let flags = flags | OFlags::CLOEXEC | waits_for_nobody(flags);
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let resolve = if links == Links::Never { resolve | ResolveFlags::NO_SYMLINKS } else { resolve };
    match rustix::fs::openat2(&root, path, flags, mode, resolve) {
        // A kernel, or a filter of system calls, that does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => step_by_step(root.as_fd().try_clone_to_owned(), path, flags, mode),
        opened => opened,
    }
}

/// Flags that keep an open from blocking; `O_PATH` does not take them.
fn waits_for_nobody(flags: OFlags) -> OFlags {
    if flags.contains(OFlags::PATH) { OFlags::empty() } else { OFlags::NONBLOCK | OFlags::NOCTTY }
}

/// The same as the kernel's call, one name at a time, but no link is followed, even one that stays inside.
fn step_by_step(root: io::Result<OwnedFd>, path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let mut at = root.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::BADF))?;
    let mut names = path.components().filter(|name| *name != Component::CurDir).peekable();
    if names.peek().is_none() {
        return rustix::fs::openat(at, ".", flags, mode);
    }
    while let Some(name) = names.next() {
        let Component::Normal(name) = name else { return Err(Errno::XDEV) };
        if names.peek().is_none() {
            return rustix::fs::openat(at, name, flags | OFlags::NOFOLLOW, mode);
        }
        let way = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        at = rustix::fs::openat(at, name, way, Mode::empty())?;
    }
    Err(Errno::NOENT)
}

/// Opens the file at `path` below `root` for reading; anything else, or a file behind a link, counts as absent.
pub fn open_file_beneath(root: impl AsFd, path: impl AsRef<Path>) -> io::Result<File> {
    plain(open_beneath(root, path, OFlags::RDONLY, Mode::empty(), Links::Never))
}

/// Opens a file for reading where another user may have put something else: anything but a regular file counts as
/// absent. The directories above it are trusted.
pub fn open_plain(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    plain(rustix::fs::openat(CWD, path, flags, Mode::empty()))
}

fn plain(opened: Result<OwnedFd, Errno>) -> io::Result<File> {
    match opened {
        Ok(opened) if FileType::from_raw_mode(rustix::fs::fstat(&opened)?.st_mode).is_file() => {
            Ok(opened.into())
        }
        // A link, and a socket.
        Ok(_) | Err(Errno::LOOP | Errno::NXIO) => Err(ErrorKind::NotFound.into()),
        Err(error) => Err(error.into()),
    }
}

/// Opens the file at `path` for appending and creates it if needed; anything but a regular file is an error. The
/// directories above it are trusted.
pub fn append_plain(path: &Path) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mode = Mode::from_raw_mode(0o666);
    let opened = rustix::fs::openat(CWD, path, flags | OFlags::NOCTTY | OFlags::CLOEXEC, mode)?;
    match FileType::from_raw_mode(rustix::fs::fstat(&opened)?.st_mode) {
        FileType::RegularFile => Ok(opened.into()),
        _ => Err(io::Error::other("something that is no file stands in its place")),
    }
}

/// Reads the small file at `path`; the directories above it are trusted. Anything but a regular file, and a file of
/// more than `most` bytes, is an error other than "not found".
pub fn read_plain(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = match open_plain(path) {
        Err(error) if error.kind() == ErrorKind::NotFound && path.symlink_metadata().is_ok() => {
            return Err(io::Error::other("something that is no file stands in its place"));
        }
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most { Err(ErrorKind::FileTooLarge.into()) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A folder of a job, and a secret beside it.
    fn bench() -> (tempfile::TempDir, OwnedFd) {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir_all(temp.path().join("job/d")).unwrap();
        fs::write(temp.path().join("secret"), "secret").unwrap();
        fs::write(temp.path().join("job/d/a"), "a").unwrap();
        let root = open_directory(&temp.path().join("job")).unwrap();
        (temp, root)
    }

    #[test]
    fn test_nothing_leads_out_and_nothing_waits() {
        let (temp, root) = bench();
        let at = |name: &str| temp.path().join("job").join(name);
        symlink("../secret", at("file")).unwrap();
        symlink("..", at("folder")).unwrap();
        symlink("d", at("inside")).unwrap();
        rustix::fs::mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        drop(std::os::unix::net::UnixListener::bind(at("socket")).unwrap());
        for name in ["file", "folder/secret", "../secret", "inside/a", "pipe", "socket", "d", "/etc/passwd"] {
            open_file_beneath(&root, name).unwrap_err();
            let steps = step_by_step(
                root.try_clone(),
                Path::new(name),
                OFlags::RDONLY | OFlags::NONBLOCK,
                Mode::empty(),
            );
            assert!(plain(steps).is_err(), "{name}, step by step");
        }
        for plainly in ["file", "pipe", "socket", "d"] {
            open_plain(&at(plainly)).unwrap_err();
            append_plain(&at(plainly)).unwrap_err();
            let error = read_plain(&at(plainly), 10).unwrap_err();
            assert_ne!(error.kind(), ErrorKind::NotFound, "{plainly}: something is there");
        }
        open_file_beneath(&root, "d/a").unwrap();
        open_beneath(&root, "inside/a", OFlags::RDONLY, Mode::empty(), Links::Inside).unwrap();
        open_beneath(&root, "folder/secret", OFlags::RDONLY, Mode::empty(), Links::Inside).unwrap_err();
        let steps =
            |path: &str| step_by_step(root.try_clone(), Path::new(path), OFlags::RDONLY, Mode::empty());
        steps("d/a").unwrap();
        steps(".").unwrap();
        assert_eq!(fs::read_to_string(temp.path().join("secret")).unwrap(), "secret");
    }

    #[test]
    fn test_small_file_is_read_whole_or_not_at_all() {
        let (temp, _) = bench();
        let path = temp.path().join("secret");
        assert_eq!(read_plain(&path, 6).unwrap(), b"secret");
        assert_eq!(read_plain(&path, 5).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert_eq!(read_plain(&temp.path().join("none"), 5).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
