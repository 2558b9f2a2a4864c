//! A tree of files that others made, or that is made of such files, beneath a descriptor.
//!
//! Owns every way in which the engine touches what a package holds and what an environment consists of: looking,
//! reading, walking, making. Hides descriptors, and how the kernel is made to stay in a directory.
//!
//! Invariants: a [`PlainPath`] consists of plain names. No link is followed on a way, and none at its end; only
//! [`OpenTree::leads_out`] and what reads for people follow links, and only those that the kernel finds to stay in the
//! tree. Only regular files are read. Nothing is made in the place of something that is there. Modes are changed by
//! descriptor.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use agent_fs::{Links, open_beneath};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// No sound tree is deeper.
const DEEPEST: usize = 512;

/// Looks at something without opening it.
const LOOK: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW);

/// A relative path of plain names, at least one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PlainPath(PathBuf);

impl PlainPath {
    /// The way that a path describes: `./a//b` is `a/b`. `None` for a path that is absolute, is empty or has `..`.
    pub(crate) fn of(path: impl AsRef<Path>) -> Option<PlainPath> {
        let mut way = PathBuf::new();
        for part in path.as_ref().components() {
            match part {
                Component::Normal(name) => way.push(name),
                Component::CurDir => {}
                _ => return None,
            }
        }
        (!way.as_os_str().is_empty()).then_some(PlainPath(way))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Whether it is this name, or something below.
    pub(crate) fn is_in(&self, name: &str) -> bool {
        self.0.starts_with(name)
    }

    /// The directory that it is in; `None` at the top.
    pub(crate) fn parent(&self) -> Option<PlainPath> {
        self.0.parent().and_then(PlainPath::of)
    }

    /// All directories that it is in, the nearest first.
    pub(crate) fn parents(&self) -> impl Iterator<Item = PlainPath> {
        std::iter::successors(self.parent(), PlainPath::parent)
    }

    fn name(&self) -> &OsStr {
        self.0.file_name().unwrap_or_default()
    }
}

/// What is at the end of a way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EntryKind {
    /// A regular file of this length, in bytes.
    File(u64),
    /// A symbolic link.
    Link,
    /// A directory.
    Directory,
    /// A device, a pipe or a socket.
    Other,
}

/// Something that a walk met.
pub(crate) struct Met<'a> {
    /// Where it is.
    pub(crate) way: &'a PlainPath,
    /// What it is.
    pub(crate) kind: EntryKind,
    /// What the system knows of it.
    pub(crate) stat: &'a Stat,
    handle: &'a OwnedFd,
}

impl Met<'_> {
    /// Sets its mode. It cannot have become something else since it was looked at.
    pub(crate) fn set_mode(&self, mode: u32) -> io::Result<()> {
        chmod(self.handle, mode)
    }
}

/// A directory that is open.
#[derive(Debug)]
pub(crate) struct OpenTree(OwnedFd);

impl OpenTree {
    /// Opens the directory at `path`, which is no link; the directories above it are trusted.
    pub(crate) fn open(path: &Path) -> io::Result<OpenTree> {
        agent_fs::open_directory(path).map(OpenTree)
    }

    /// When something was last made or removed at its top.
    pub(crate) fn changed(&self) -> io::Result<SystemTime> {
        File::from(self.0.try_clone()?).metadata()?.modified()
    }

    /// What is there.
    pub(crate) fn kind(&self, way: &PlainPath) -> io::Result<EntryKind> {
        let handle = open_beneath(&self.0, way.path(), LOOK, Mode::empty(), Links::Never)?;
        Ok(kind(&rustix::fs::fstat(handle)?))
    }

    /// Opens a regular file for reading.
    pub(crate) fn file(&self, way: &PlainPath) -> io::Result<File> {
        agent_fs::open_file_beneath(&self.0, way.path())
    }

    /// The content of a file of at most `most` bytes.
    pub(crate) fn read(&self, way: impl AsRef<Path>, most: u64) -> io::Result<Vec<u8>> {
        let way = PlainPath::of(way).ok_or(io::ErrorKind::InvalidFilename)?;
        agent_fs::read_whole(self.file(&way)?, most)
    }

    /// The same, through links that stay in the tree.
    pub(crate) fn read_through(&self, way: &PlainPath, most: u64) -> io::Result<Vec<u8>> {
        agent_fs::read_beneath(&self.0, way.path(), most)
    }

    /// The names in a directory, sorted, through links that stay in the tree; none if there is no such directory.
    pub(crate) fn names_through(&self, way: &PlainPath) -> Vec<OsString> {
        let mut names = agent_fs::names_beneath(&self.0, way.path()).unwrap_or_default();
        names.sort();
        names
    }

    /// The text of a link.
    pub(crate) fn target(&self, way: &PlainPath) -> io::Result<PathBuf> {
        let handle = open_beneath(&self.0, way.path(), LOOK, Mode::empty(), Links::Never)?;
        let text = rustix::fs::readlinkat(&handle, c"", Vec::new())?;
        Ok(OsStr::from_bytes(text.to_bytes()).into())
    }

    /// Whether the link there leads out of the tree, over whatever other links, or nowhere for ever. Of a link to
    /// something that is missing, the text decides: it must be asked again once that is there.
    pub(crate) fn leads_out(&self, way: &PlainPath) -> io::Result<bool> {
        match open_beneath(&self.0, way.path(), OFlags::PATH, Mode::empty(), Links::Inside) {
            Ok(_) => Ok(false),
            Err(Errno::XDEV | Errno::LOOP) => Ok(true),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(!seems_inside(way.path(), &self.target(way)?)),
            Err(error) => Err(error.into()),
        }
    }

    /// Visits everything in the tree, directories before what they hold. A directory that is closed to its owner is
    /// opened; what vanishes meanwhile is passed over.
    pub(crate) fn walk<E: From<io::Error>>(
        &self,
        visit: &mut dyn FnMut(&Met<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        walk(&self.0, None, 0, visit)
    }

    /// Makes a directory, unless it is there; its parent is there.
    pub(crate) fn make_directory(&self, way: &PlainPath) -> io::Result<()> {
        match rustix::fs::mkdirat(self.parent(way)?, way.name(), Mode::from_raw_mode(0o755)) {
            Err(Errno::EXIST) if self.kind(way)? == EntryKind::Directory => Ok(()),
            made => Ok(made?),
        }
    }

    /// Makes an empty file, for its owner alone so far.
    pub(crate) fn make_file(&self, way: &PlainPath) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        Ok(open_beneath(&self.0, way.path(), flags, Mode::from_raw_mode(0o600), Links::Never)?.into())
    }

    /// Makes a symbolic link with this text.
    pub(crate) fn make_link(&self, way: &PlainPath, text: &Path) -> io::Result<()> {
        Ok(rustix::fs::symlinkat(text, self.parent(way)?, way.name())?)
    }

    /// Gives an open file another name, which is in this tree.
    pub(crate) fn make_name(&self, way: &PlainPath, of: &File) -> io::Result<()> {
        let (here, follow) = (rustix::fs::CWD, AtFlags::SYMLINK_FOLLOW); // what is followed is the descriptor
        Ok(rustix::fs::linkat(here, place(of), self.parent(way)?, way.name(), follow)?)
    }

    /// Removes something that is no directory.
    pub(crate) fn remove(&self, way: &PlainPath) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(self.parent(way)?, way.name(), AtFlags::empty())?)
    }

    /// The directory that something is in.
    fn parent(&self, way: &PlainPath) -> io::Result<OwnedFd> {
        let parent = way.parent();
        let path = parent.as_ref().map_or(Path::new(""), PlainPath::path);
        Ok(open_beneath(&self.0, path, OFlags::PATH | OFlags::DIRECTORY, Mode::empty(), Links::Never)?)
    }
}

/// Removes a tree of the engine, even if its directories are closed. One that is not there is no error.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let removed = match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            OpenTree::open(path)?.walk::<io::Error>(&mut |_| Ok(()))?;
            std::fs::remove_dir_all(path)
        }
        removed => removed,
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The mode of a file of this mode that all may read and its owner may write; a program stays one.
pub(crate) fn mode_for_all(mode: u32) -> u32 {
    if mode & 0o111 == 0 { 0o644 } else { 0o755 }
}

fn kind(stat: &Stat) -> EntryKind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => EntryKind::File(u64::try_from(stat.st_size).unwrap_or(0)),
        FileType::Symlink => EntryKind::Link,
        FileType::Directory => EntryKind::Directory,
        _ => EntryKind::Other,
    }
}

/// The name by which the system knows an open file, also one that was only looked at.
fn place(handle: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", handle.as_raw_fd())
}

fn chmod(handle: &OwnedFd, mode: u32) -> io::Result<()> {
    Ok(rustix::fs::chmod(place(handle), Mode::from_raw_mode(mode))?)
}

fn walk<E: From<io::Error>>(
    dir: &OwnedFd,
    way: Option<&PlainPath>,
    depth: usize,
    visit: &mut dyn FnMut(&Met<'_>) -> Result<(), E>,
) -> Result<(), E> {
    if depth > DEEPEST {
        return Err(io::Error::from(io::ErrorKind::InvalidFilename).into());
    }
    for name in agent_fs::names_beneath(dir, "")? {
        let handle = match rustix::fs::openat(dir, &name, LOOK | OFlags::CLOEXEC, Mode::empty()) {
            Err(Errno::NOENT) => continue,
            opened => opened.map_err(io::Error::from)?,
        };
        let stat = rustix::fs::fstat(&handle).map_err(io::Error::from)?;
        let below = PlainPath(way.map_or_else(|| PathBuf::from(&name), |way| way.0.join(&name)));
        let kind = kind(&stat);
        visit(&Met { way: &below, kind, stat: &stat, handle: &handle })?;
        if kind == EntryKind::Directory {
            walk(&enter(&handle)?, Some(&below), depth + 1, visit)?;
        }
    }
    Ok(())
}

/// Opens a directory that was looked at.
fn enter(handle: &OwnedFd) -> io::Result<OwnedFd> {
    let open = || {
        rustix::fs::openat(handle, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    };
    match open() {
        Err(Errno::ACCESS) => {
            chmod(handle, 0o755)?;
            Ok(open()?)
        }
        opened => Ok(opened?),
    }
}

/// Whether the link at `link` stays in the tree, judged by its text alone, as if there were no other links.
fn seems_inside(link: &Path, target: &Path) -> bool {
    let mut depth = link.components().count().saturating_sub(1);
    for component in target.components() {
        match component {
            Component::Normal(_) => depth += 1,
            Component::CurDir => {}
            Component::ParentDir if depth > 0 => depth -= 1,
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    fn way(path: &str) -> PlainPath {
        PlainPath::of(path).unwrap()
    }

    /// A tree with a file, and a secret beside it.
    fn bench() -> (tempfile::TempDir, OpenTree) {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir_all(temp.path().join("tree/d")).unwrap();
        fs::write(temp.path().join("secret"), "secret").unwrap();
        fs::write(temp.path().join("tree/d/a"), "a").unwrap();
        let tree = OpenTree::open(&temp.path().join("tree")).unwrap();
        (temp, tree)
    }

    #[test]
    fn test_ways_are_plain_names() {
        for (path, names) in [("a/b", "a/b"), ("./a//b/.", "a/b"), ("a/./b/", "a/b"), (".a", ".a")] {
            assert_eq!(way(path).path(), Path::new(names), "{path}");
        }
        for path in ["", ".", "./", "/", "/a", "..", "a/..", "a/../b", "./../a"] {
            assert_eq!(PlainPath::of(path), None, "{path}");
        }
        assert!(way("./conda-meta/x").is_in("conda-meta") && !way("conda-meta2").is_in("conda-meta"));
        assert_eq!(way("a/b/c").parents().collect::<Vec<_>>(), [way("a/b"), way("a")]);
    }

    #[test]
    fn test_links_lead_out_by_where_they_lead_and_not_by_their_text() {
        let (temp, tree) = bench();
        symlink(".", temp.path().join("tree/d/l1")).unwrap();
        let links = [
            ("d/in", "a", false),
            ("d/over", "l1/../d/a", false),
            ("d/to-come", "none/x", false),
            ("d/later", "none/../../../secret", true),
            ("d/out", "l1/l1/l1/../../../secret", true),
            ("d/up", "../../secret", true),
            ("d/root", "/etc/passwd", true),
            ("d/loop", "loop", true),
            ("top", "..", true),
        ];
        for (link, text, out) in links {
            symlink(text, temp.path().join("tree").join(link)).unwrap();
            assert_eq!(tree.leads_out(&way(link)).unwrap(), out, "{link} -> {text}");
        }
        assert_eq!(tree.target(&way("d/in")).unwrap(), Path::new("a"));
        assert_eq!(tree.read_through(&way("d/over"), 9).unwrap(), b"a");
        tree.read_through(&way("d/out"), 9).unwrap_err();
        assert_eq!(tree.names_through(&way("top")), Vec::<OsString>::new());
    }

    #[test]
    fn test_nothing_is_read_or_made_through_a_link_or_in_the_place_of_something() {
        let (temp, tree) = bench();
        let at = |name: &str| temp.path().join("tree").join(name);
        symlink("d", at("inside")).unwrap();
        symlink("../secret", at("file")).unwrap();
        symlink("..", at("above")).unwrap();
        for name in ["inside/a", "file", "above/secret", "d"] {
            tree.file(&way(name)).unwrap_err();
        }
        assert_eq!(tree.read("./d//a", 1).unwrap(), b"a");
        assert_eq!(tree.read("d/a", 0).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        let open = tree.file(&way("d/a")).unwrap();
        for name in ["file", "above/new", "inside/new", "d/a", "d"] {
            let way = way(name);
            tree.make_file(&way).unwrap_err();
            tree.make_link(&way, Path::new("x")).unwrap_err();
            tree.make_name(&way, &open).unwrap_err();
        }
        tree.make_directory(&way("inside")).unwrap_err();
        tree.make_directory(&way("d")).unwrap();
        tree.make_directory(&way("d/e")).unwrap();
        tree.make_name(&way("d/e/again"), &open).unwrap();
        assert_eq!(at("d/e/again").metadata().unwrap().nlink(), 2);
        tree.make_link(&way("d/e/link"), Path::new("again")).unwrap();
        tree.remove(&way("d/e/link")).unwrap();
        assert_eq!(fs::read_to_string(temp.path().join("secret")).unwrap(), "secret");
        assert!(!temp.path().join("new").exists() && !at("d/new").exists());
    }

    #[test]
    fn test_a_walk_meets_all_and_modes_are_changed_of_what_was_met() {
        let (temp, tree) = bench();
        let at = |name: &str| temp.path().join("tree").join(name);
        symlink("../../secret", at("d/out")).unwrap();
        fs::set_permissions(at("d"), fs::Permissions::from_mode(0o000)).unwrap();
        let mut met = Vec::new();
        tree.walk::<io::Error>(&mut |found| {
            met.push((found.way.clone(), found.kind));
            if found.kind == EntryKind::File(1) { found.set_mode(0o4755) } else { Ok(()) }
        })
        .unwrap();
        met.sort_by(|a, b| a.0.cmp(&b.0));
        let expected = [("d", EntryKind::Directory), ("d/a", EntryKind::File(1)), ("d/out", EntryKind::Link)]
            .map(|(n, k)| (way(n), k));
        assert_eq!(met, expected);
        assert_eq!(at("d/a").metadata().unwrap().mode() & 0o7777, 0o4755);
        remove(&at("")).unwrap();
        remove(&at("")).unwrap();
        assert_eq!(fs::read_to_string(temp.path().join("secret")).unwrap(), "secret");
    }
}
