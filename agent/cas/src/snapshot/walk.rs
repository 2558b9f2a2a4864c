//! What is in a directory: names and kinds, without reading a file.
//!
//! Every step is relative to an open directory and follows no link, so a directory that is swapped for a
//! link while the walk goes on cannot lead it elsewhere.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ignore::gitignore::{Gitignore, GitignoreBuilder};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::MAX_DEPTH;
use super::scan::ScanError;
use super::tree::{join, stays_inside};

/// A directory that files are opened below.
#[derive(Debug)]
pub(super) struct Root {
    fd: OwnedFd,
    path: PathBuf,
}

impl Root {
    pub(super) fn open(path: &Path) -> Result<Root, ScanError> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|source| ScanError::Directory { path: path.to_owned(), source: source.into() })?;
        Ok(Root { fd, path: path.to_owned() })
    }

    /// Opens the directory at `relative` below `base`. A link on the way must stay below `base`: whoever writes
    /// there must not lead the walk elsewhere.
    pub(super) fn open_below(base: &Path, relative: &Path) -> Result<Root, ScanError> {
        let path = base.join(relative);
        let open = || -> Result<OwnedFd, Errno> {
            let base = rustix::fs::open(base, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
            let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::openat2(base, relative, flags, Mode::empty(), ResolveFlags::BENEATH)
        };
        match open() {
            Ok(fd) => Ok(Root { fd, path }),
            Err(source) => Err(ScanError::Directory { path, source: source.into() }),
        }
    }

    /// Opens the file at `relative`, passing no link on the way. A pipe in its place does not block.
    pub(super) fn open_file(&self, relative: &str) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        Ok(rustix::fs::openat2(&self.fd, relative, flags, Mode::empty(), resolve)?.into())
    }

    /// The path of `relative` for people.
    pub(super) fn shown(&self, relative: &str) -> PathBuf {
        self.path.join(relative)
    }
}

/// A file to read: where it is.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) root: Arc<Root>,
    pub(super) relative: String,
}

impl Place {
    pub(super) fn open(&self) -> io::Result<File> {
        self.root.open_file(&self.relative)
    }

    /// The path for people.
    pub(super) fn shown(&self) -> PathBuf {
        self.root.shown(&self.relative)
    }
}

/// One entry of a directory.
#[derive(Debug)]
pub(super) enum Node {
    File(Place),
    Directory(Folder),
    Link(String),
}

/// A directory: its entries by name.
pub(super) type Folder = BTreeMap<String, Node>;

/// What was left out.
#[derive(Debug, Default)]
pub(super) struct LeftOut {
    pub(super) count: u64,
    pub(super) warnings: Vec<String>,
}

impl LeftOut {
    pub(super) fn warn(&mut self, path: &str, why: &str) {
        self.count += 1;
        self.warnings.push(format!("{path} {why}"));
    }
}

/// Which entries of a directory count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rules {
    /// Code: by `.amlignore` or else `.gitignore` in the root, and nothing named `.git`.
    Code,
    /// What a job produced: everything.
    Everything,
}

/// Everything below `root`, sorted by name.
pub(super) fn walk(root: &Arc<Root>, rules: Rules, left_out: &mut LeftOut) -> Result<Folder, ScanError> {
    let ignore = match rules {
        Rules::Code => read_ignore_file(root, left_out)?,
        Rules::Everything => Gitignore::empty(),
    };
    let mut walker = Walker { root, rules, ignore, left_out };
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top = rustix::fs::openat(&root.fd, ".", flags, Mode::empty()).map_err(|e| walker.fail("", e))?;
    walker.folder(top, "", 0)
}

/// The first of the two ignore files that exists; they are never merged.
fn read_ignore_file(root: &Root, left_out: &mut LeftOut) -> Result<Gitignore, ScanError> {
    let mut builder = GitignoreBuilder::new("");
    for name in [".amlignore", ".gitignore"] {
        let path = root.shown(name);
        let mut text = Vec::new();
        let read = rustix::fs::openat(&root.fd, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(io::Error::from)
            .and_then(|file| File::from(file).read_to_end(&mut text));
        match read {
            Err(source) if source.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(ScanError::Read { path, source }),
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&text);
        for line in text.trim_start_matches('\u{feff}').lines() {
            if builder.add_line(None, line).is_err() {
                left_out.warnings.push(format!("{name}: the line {line:?} is no pattern"));
            }
        }
        break;
    }
    builder.build().map_err(|source| ScanError::Ignore { source: Box::new(source) })
}

struct Walker<'a> {
    root: &'a Arc<Root>,
    rules: Rules,
    ignore: Gitignore,
    left_out: &'a mut LeftOut,
}

impl Walker<'_> {
    fn fail(&self, path: &str, source: Errno) -> ScanError {
        ScanError::Directory { path: self.root.shown(path), source: source.into() }
    }

    /// The entries of the open directory `fd` at `path`, which is `depth` levels below the root.
    fn folder(&mut self, fd: OwnedFd, path: &str, depth: usize) -> Result<Folder, ScanError> {
        if depth >= MAX_DEPTH {
            return Err(ScanError::TooDeep { path: self.root.shown(path), limit: MAX_DEPTH });
        }
        let mut folder = Folder::new();
        for (name, kind) in self.entries(fd.as_fd(), path)? {
            let below = join(path, &name);
            if self.is_ignored(&name, &below, kind) {
                self.left_out.count += 1;
                continue;
            }
            let node = match kind {
                FileType::RegularFile => {
                    Some(Node::File(Place { root: Arc::clone(self.root), relative: below }))
                }
                FileType::Directory => {
                    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                    match rustix::fs::openat(&fd, &name, flags, Mode::empty()) {
                        Ok(child) => Some(Node::Directory(self.folder(child, &below, depth + 1)?)),
                        Err(Errno::NOENT) => None,
                        Err(error) => return Err(self.fail(&below, error)),
                    }
                }
                FileType::Symlink => self.link(fd.as_fd(), &name, &below, depth).map(Node::Link),
                _ => {
                    self.left_out.warn(&below, "is neither file, directory nor link; left out");
                    None
                }
            };
            folder.extend(node.map(|node| (name, node)));
        }
        Ok(folder)
    }

    fn is_ignored(&self, name: &str, below: &str, kind: FileType) -> bool {
        self.rules == Rules::Code && (name == ".git" || self.ignore.matched(below, kind.is_dir()).is_ignore())
    }

    /// Names and kinds, sorted; what vanishes meanwhile was never there.
    fn entries(&mut self, fd: BorrowedFd<'_>, path: &str) -> Result<Vec<(String, FileType)>, ScanError> {
        let mut entries = Vec::new();
        for entry in Dir::read_from(fd).map_err(|error| self.fail(path, error))? {
            let entry = entry.map_err(|error| self.fail(path, error))?;
            let raw = entry.file_name();
            if matches!(raw.to_bytes(), b"." | b"..") {
                continue;
            }
            let Ok(name) = raw.to_str() else {
                let shown = join(path, &raw.to_bytes().escape_ascii().to_string());
                self.left_out.warn(&shown, "has a name that is not UTF-8; left out");
                continue;
            };
            let kind = match entry.file_type() {
                FileType::Unknown => match rustix::fs::statat(fd, raw, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                    Err(Errno::NOENT) => continue,
                    Err(error) => return Err(self.fail(&join(path, name), error)),
                },
                kind => kind,
            };
            entries.push((name.to_owned(), kind));
        }
        entries.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        Ok(entries)
    }

    /// The target of a link that can be kept.
    fn link(&mut self, fd: BorrowedFd<'_>, name: &str, below: &str, depth: usize) -> Option<String> {
        let target = rustix::fs::readlinkat(fd, name, Vec::new()).ok().and_then(|t| t.into_string().ok());
        let Some(target) = target else {
            self.left_out.warn(below, "is a link that cannot be read; left out");
            return None;
        };
        // The system resolves the link the way a program would, but never past the root.
        let found = rustix::fs::openat2(
            &self.root.fd,
            below,
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::BENEATH,
        );
        let why = match found {
            Ok(_) if stays_inside(depth, &target) => return Some(target),
            Ok(_) | Err(Errno::XDEV) => "points outside the directory; left out",
            Err(Errno::NOENT) => "points to nothing; left out",
            Err(_) => "cannot be followed; left out",
        };
        self.left_out.warn(&format!("{below} -> {target}"), why);
        None
    }
}
