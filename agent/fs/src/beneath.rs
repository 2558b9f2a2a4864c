//! Opens files in places where another user may put anything and change it at any time: links, pipes, devices.
//!
//! The daemon opens files of a job in no other way. Invariants: a file opened beneath a directory is below it, and no
//! link led out of it; opening never blocks; only regular files are read, and no more bytes than the caller allows.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags};
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
    for _ in 0..TRIES {
        match rustix::fs::openat2(&root, path, flags, mode, resolve) {
            // Something was renamed somewhere on the machine while the kernel looked at a `..`.
            Err(Errno::AGAIN) => {}
            // A kernel, or a filter of system calls, that does not know the call.
            Err(Errno::NOSYS | Errno::PERM) => break,
            opened => return opened,
        }
    }
    step_by_step(root.as_fd().try_clone_to_owned(), path, flags, mode, links)
}

/// How often the kernel is asked before names are looked up one by one.
const TRIES: usize = 16;

/// Flags that keep an open from blocking; `O_PATH` does not take them.
fn waits_for_nobody(flags: OFlags) -> OFlags {
    if flags.contains(OFlags::PATH) { OFlags::empty() } else { OFlags::NONBLOCK | OFlags::NOCTTY }
}

/// As many links as the kernel follows.
const MOST_LINKS: usize = 40;

/// The same as the kernel's call, one name at a time. A directory that is moved meanwhile is no way out: `..` leads to
/// where this came from.
fn step_by_step(
    root: io::Result<OwnedFd>,
    path: &Path,
    flags: OFlags,
    mode: Mode,
    links: Links,
) -> Result<OwnedFd, Errno> {
    let root = root.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::BADF))?;
    let mut above = vec![root];
    let mut names = names_of(path, links)?;
    let mut followed = 0;
    while let Some(name) = names.pop() {
        let is_last = names.is_empty();
        if name == ".." {
            above.pop();
        }
        let at = above.last().ok_or(Errno::XDEV)?;
        if name == ".." {
            continue;
        }
        let is_wanted_itself = is_last && flags.contains(OFlags::NOFOLLOW);
        if links == Links::Inside
            && !is_wanted_itself
            && let Ok(target) = rustix::fs::readlinkat(at, &name, Vec::new())
        {
            followed += 1;
            if followed > MOST_LINKS {
                return Err(Errno::LOOP);
            }
            names.extend(names_of(Path::new(OsStr::from_bytes(target.to_bytes())), links)?);
            continue;
        }
        if is_last {
            return rustix::fs::openat(at, &name, flags | OFlags::NOFOLLOW, mode);
        }
        let way = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let next = rustix::fs::openat(at, &name, way, Mode::empty())?;
        above.push(next);
    }
    rustix::fs::openat(above.last().ok_or(Errno::XDEV)?, ".", flags, mode)
}

/// The names of a relative path, the last one first.
fn names_of(path: &Path, links: Links) -> Result<Vec<OsString>, Errno> {
    let name = |part| match part {
        Component::CurDir => None,
        Component::Normal(name) => Some(Ok(name.to_owned())),
        Component::ParentDir if links == Links::Inside => Some(Ok(OsString::from(".."))),
        _ => Some(Err(Errno::XDEV)),
    };
    let mut names: Vec<OsString> = path.components().filter_map(name).collect::<Result<_, _>>()?;
    names.reverse();
    Ok(names)
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

/// Makes the file `name` in the directory `dir`, where another user may have put something else: that is removed, unless
/// it is a directory. The directories above `dir` are trusted.
pub fn make_anew(dir: &Path, name: &str, mode: u32) -> io::Result<File> {
    let dir = open_directory(dir)?;
    match rustix::fs::unlinkat(&dir, name, AtFlags::empty()) {
        Err(error) if error != Errno::NOENT => return Err(error.into()),
        _ => {}
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    Ok(open_beneath(dir, name, flags, Mode::from_raw_mode(mode), Links::Never)?.into())
}

/// Reads the file at `path` below `root`, in whatever user's hands both are: at most `most` bytes of a regular file,
/// through no link that leads out.
pub fn read_beneath(root: impl AsFd, path: impl AsRef<Path>, most: u64) -> io::Result<Vec<u8>> {
    read_whole(plain(open_beneath(root, path, OFlags::RDONLY, Mode::empty(), Links::Inside))?, most)
}

/// The names in the directory at `path` below `root`, reached through no link that leads out.
pub fn names_beneath(root: impl AsFd, path: impl AsRef<Path>) -> io::Result<Vec<OsString>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let dir = open_beneath(root, path, flags, Mode::empty(), Links::Inside)?;
    let mut names = Vec::new();
    for entry in Dir::read_from(&dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            names.push(OsStr::from_bytes(name).to_owned());
        }
    }
    Ok(names)
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
    read_whole(file, most)
}

/// Reads an open file to its end. One of more than `most` bytes is an error of the kind `FileTooLarge`.
pub fn read_whole(file: File, most: u64) -> io::Result<Vec<u8>> {
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
                Links::Never,
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
        let steps = |path: &str, links| {
            step_by_step(root.try_clone(), Path::new(path), OFlags::RDONLY, Mode::empty(), links)
        };
        steps("d/a", Links::Never).unwrap();
        steps(".", Links::Never).unwrap();
        assert_eq!(fs::read_to_string(temp.path().join("secret")).unwrap(), "secret");
    }

    #[test]
    fn test_file_is_made_anew_in_the_place_of_a_link_and_never_through_it() {
        let (temp, root) = bench();
        let job = temp.path().join("job");
        for (name, target) in [("list", "../secret"), ("away", "nowhere"), ("plain", "d/a")] {
            symlink(target, job.join(name)).unwrap();
            drop(make_anew(&job, name, 0o644).unwrap());
            assert!(job.join(name).symlink_metadata().unwrap().is_file(), "{name}");
        }
        make_anew(&job, "d", 0o644).unwrap_err();
        assert_eq!(fs::read_to_string(temp.path().join("secret")).unwrap(), "secret");
        assert_eq!(read_beneath(&root, "d/a", 1).unwrap(), b"a");
        symlink("d", job.join("inside")).unwrap();
        symlink("../secret", job.join("out")).unwrap();
        rustix::fs::mknodat(CWD, job.join("pipe"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert_eq!(read_beneath(&root, "inside/a", 1).unwrap(), b"a");
        assert_eq!(names_beneath(&root, "inside").unwrap(), ["a"]);
        for name in ["out", "pipe", "d"] {
            read_beneath(&root, name, 10).unwrap_err();
        }
    }

    /// Each link is inside by its text. The kernel and the way of old kernels must see the same.
    #[test]
    fn test_link_over_a_link_leads_nowhere() {
        let (temp, root) = bench();
        let at = |name: &str| temp.path().join("job").join(name);
        symlink(".", at("d/l1")).unwrap();
        symlink("l1/l1/l1/../../../secret", at("d/out")).unwrap();
        symlink("l1/l1/../d/a", at("d/in")).unwrap();
        symlink("d/../d", at("folder")).unwrap();
        symlink("loop", at("loop")).unwrap();
        symlink("/etc/passwd", at("absolute")).unwrap();
        symlink("none/../../secret", at("dangling")).unwrap();
        let expected = [
            ("d/out", Err(Errno::XDEV)),
            ("d/in", Ok(())),
            ("folder/in", Ok(())),
            ("folder/out", Err(Errno::XDEV)),
            ("folder/l1", Ok(())),
            ("loop", Err(Errno::LOOP)),
            ("absolute", Err(Errno::XDEV)),
            ("dangling", Err(Errno::NOENT)),
        ];
        for (name, found) in expected {
            let opened = open_beneath(&root, name, OFlags::RDONLY, Mode::empty(), Links::Inside);
            assert_eq!(opened.map(drop), found, "{name}");
            let steps =
                step_by_step(root.try_clone(), Path::new(name), OFlags::RDONLY, Mode::empty(), Links::Inside);
            assert_eq!(steps.map(drop), found, "{name}, step by step");
            let itself = OFlags::PATH | OFlags::NOFOLLOW;
            step_by_step(root.try_clone(), Path::new(name), itself, Mode::empty(), Links::Inside).unwrap();
        }
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
