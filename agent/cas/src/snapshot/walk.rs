//! The content of a directory: names, kinds and stamps, without reading a file.
//!
//! Every step is relative to the open root and follows no link, so a directory that is swapped for a link during
//! the walk cannot lead it elsewhere. Names are the text of what the disk has ([`text_of_name`]). Directories are listed
//! by several threads, each by one of them; the result is put together afterwards and sorted, so it does not depend on
//! their order.
//!
//! A tree may have a million files, and all of it is in memory until it is sent: a file costs its name, a stamp, a
//! hash, and a pointer to what it shares with its neighbours.

use std::borrow::Cow;
use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use agent_fs::{Links, text_of_name};
use agent_model::Digest;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, Stat};
use rustix::io::Errno;

use super::ignore::Ignore;
use super::left_out::{LeftOut, ScanError, Unread, is_kept_back};
use super::links::{Leads, LinkTarget, Steps, follow};
use super::stamp::Stamp;
use super::tree::join;
use super::{MAX_DEPTH, open_text_beneath, usual};
use crate::parallel;

/// Bytes of a listing that are fetched at once: some hundred names.
const LISTING: usize = 32 * 1024;

/// How many entries of a job's outputs are kept, all together: each takes memory until all are sent.
const MOST_OUTPUTS: usize = 1_000_000;

/// A directory that files are opened below.
#[derive(Debug)]
pub(super) struct Root {
    fd: OwnedFd,
    path: PathBuf,
    /// The one file in it that counts, whatever name it is given.
    only: Option<String>,
    /// Of a file that grows while it is read, as a log does, what was there at first is taken. Not of what a job left:
    /// there it would be lost.
    pub(super) may_grow: bool,
    /// Only files of this user count.
    pub(super) owner: Option<u32>,
}

impl Root {
    pub(super) fn open(path: &Path) -> Result<Root, ScanError> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|source| ScanError::Directory { path: path.to_owned(), source: source.into() })?;
        Ok(Root { fd, path: path.to_owned(), only: None, may_grow: true, owner: None })
    }

    /// Represents the file `name` in it alone.
    pub(super) fn only(self, name: String) -> Root {
        Root { only: Some(name), ..self }
    }

    /// Opens the directory at `relative` below `base`. A link on the way must stay below `base`: a program that
    /// writes there must not lead the walk elsewhere.
    pub(super) fn open_below(base: &Path, relative: &Path) -> Result<Root, ScanError> {
        let path = base.join(relative);
        let open = || -> Result<OwnedFd, Errno> {
            let base = rustix::fs::open(base, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
            agent_fs::open_beneath(base, relative, OFlags::DIRECTORY, Mode::empty(), Links::Inside)
        };
        match open() {
            Ok(fd) => Ok(Root { fd, path, only: None, may_grow: false, owner: None }),
            Err(source) => Err(ScanError::Directory { path, source: source.into() }),
        }
    }

    /// Opens the directory at `path`, which may be a link or lie behind one, for files of `owner` alone if it is one of
    /// that user.
    pub(super) fn open_foreign(path: &Path, owner: Option<u32>) -> Result<Root, Errno> {
        let fd = rustix::fs::open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        match owner {
            Some(owner) if rustix::fs::fstat(&fd)?.st_uid != owner => Err(Errno::ACCESS),
            _ => Ok(Root { fd, path: path.to_owned(), only: None, may_grow: false, owner }),
        }
    }

    /// Opens the entry at `relative`, following no link on the way.
    fn open_beneath(&self, relative: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        open_text_beneath(&self.fd, relative, flags, Mode::empty())
    }

    /// The path of `relative` for people.
    pub(super) fn shown(&self, relative: &str) -> PathBuf {
        if relative.is_empty() { self.path.clone() } else { self.path.join(relative) }
    }
}

/// A directory below a root, as the files in it know it.
#[derive(Debug)]
pub(super) struct Dir {
    pub(super) root: Arc<Root>,
    pub(super) path: String,
}

/// A file to read: where it is.
#[derive(Debug, Clone)]
pub(super) struct FilePlace {
    pub(super) dir: Arc<Dir>,
    pub(super) name: Box<str>,
}

impl FilePlace {
    /// Opens the file, following no link on the way. A pipe in its place does not block.
    pub(super) fn open(&self) -> io::Result<File> {
        let relative = self.relative();
        Ok(self
            .dir
            .root
            .open_beneath(self.dir.root.only.as_ref().unwrap_or(&relative), OFlags::RDONLY)?
            .into())
    }

    /// The path below the root.
    pub(super) fn relative(&self) -> String {
        join(&self.dir.path, &self.name)
    }

    /// The path for people.
    pub(super) fn shown(&self) -> PathBuf {
        let relative = self.relative();
        self.dir.root.shown(self.dir.root.only.as_ref().unwrap_or(&relative))
    }
}

/// A file.
#[derive(Debug)]
pub(super) struct Leaf {
    pub(super) place: FilePlace,
    pub(super) stamp: Stamp,
    pub(super) executable: bool,
    /// Of its content, once it is known.
    pub(super) hash: Option<[u8; 32]>,
    /// Its content was read for this snapshot; the hash of another was cached.
    pub(super) read: bool,
    /// It grew meanwhile: its content is only what was there at first, as long as its stamp says.
    pub(super) grown: bool,
}

impl Leaf {
    pub(super) fn new(place: FilePlace, stat: &Stat) -> Leaf {
        Leaf {
            place,
            stamp: Stamp::of(stat),
            executable: is_executable(stat),
            hash: None,
            read: false,
            grown: false,
        }
    }

    /// The content's digest; the empty one before the file was read.
    pub(super) fn digest(&self) -> Digest {
        self.hash.map_or(Digest::EMPTY, |hash| Digest { hash, size: self.stamp.size })
    }
}

pub(super) fn is_executable(stat: &Stat) -> bool {
    Mode::from_raw_mode(stat.st_mode).contains(Mode::XUSR)
}

/// A directory: its entries, each kind sorted by name.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) files: Vec<Leaf>,
    pub(super) folders: Vec<(Box<str>, Folder)>,
    /// Name, target.
    pub(super) links: Vec<(Box<str>, Box<str>)>,
    /// Of its message, once all below it is known.
    pub(super) digest: Digest,
}

impl Folder {
    pub(super) fn new() -> Folder {
        Folder { files: Vec::new(), folders: Vec::new(), links: Vec::new(), digest: Digest::EMPTY }
    }

    /// The names of all its entries.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let files = self.files.iter().map(|leaf| &*leaf.place.name);
        let folders = self.folders.iter().map(|(name, _)| &**name);
        files.chain(folders).chain(self.links.iter().map(|(name, _)| &**name))
    }

    fn count_links(&self) -> u64 {
        let below: u64 = self.folders.iter().map(|(_, child)| child.count_links()).sum();
        self.links.len() as u64 + below
    }

    fn retain_links(&mut self, path: &str, keep: &impl Fn(&str) -> bool) {
        self.links.retain(|(name, _)| keep(&join(path, name)));
        for (name, child) in &mut self.folders {
            child.retain_links(&join(path, name), keep);
        }
    }

    /// Its entry with a name; it must be sorted.
    pub(super) fn find<'a>(&'a self, name: &str) -> LinkTarget<'a, &'a Folder> {
        if let Ok(at) = self.folders.binary_search_by(|(known, _)| (**known).cmp(name)) {
            return LinkTarget::Directory(&self.folders[at].1);
        }
        match self.links.binary_search_by(|(known, _)| (**known).cmp(name)) {
            Ok(at) => LinkTarget::Link(&self.links[at].1),
            Err(_) => LinkTarget::Other,
        }
    }

    pub(super) fn sort(&mut self) {
        self.files.sort_unstable_by(|one, other| one.place.name.cmp(&other.place.name));
        self.folders.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        self.links.sort_unstable();
        self.files.shrink_to_fit();
    }
}

/// Left out of every snapshot of code.
pub(super) const GIT: &str = "nothing named .git is sent";

/// The same of code.
const VENV: &str = "a virtual environment (pyvenv.cfg)";

/// Which entries of a directory count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rules {
    /// Code: by `.amlignore` or else `.gitignore` in the root, and nothing named `.git`.
    Code,
    /// The code of a job: the same without what earlier jobs left and what tools make again.
    Project,
    /// Everything.
    Everything,
    /// What a job produced: everything that can be read.
    Outputs,
}

/// Everything below `root`; directories that are one of `never`, by device and number, are not entered.
pub(super) fn walk(
    root: &Arc<Root>,
    rules: Rules,
    never: &[(u64, u64)],
    left_out: &mut LeftOut,
) -> Result<Folder, ScanError> {
    let ignore = match rules {
        Rules::Code => read_ignore_file(root, left_out)?,
        Rules::Project => usual::rules(&root.path, read_ignore_file(root, left_out)?, left_out),
        Rules::Everything | Rules::Outputs => Ignore::default(),
    };
    let walker = Walker { root, rules, never, ignore, last: AtomicUsize::new(0), seen: AtomicUsize::new(0) };
    let top = DirectoryTask { number: 0, parent: None, name: "".into(), path: String::new(), depth: 0 };
    let mut listed = parallel::grow(top, parallel::cores(), |task, found| walker.list(task, found))?;
    // By number: a directory after the one that names it.
    listed.sort_unstable_by_key(|listed| listed.number);
    let mut entries: Vec<String> =
        listed.iter_mut().flat_map(|listed| std::mem::take(&mut listed.left_out.entries)).collect();
    entries.sort_unstable();
    left_out.unread.extend(listed.iter_mut().flat_map(|listed| std::mem::take(&mut listed.left_out.unread)));
    for (rule, ruled) in listed.iter_mut().flat_map(|listed| std::mem::take(&mut listed.left_out.rules)) {
        left_out.by_rule(&rule, ruled.count, ruled.examples);
    }
    left_out.entries.append(&mut entries);
    left_out.count += listed.iter().map(|listed| listed.left_out.count).sum::<u64>();
    let mut top = put_together(listed);
    leave_links_out(&mut top, left_out);
    Ok(top)
}

/// Leaves out the links that lead out of the tree, or that cannot be followed to an end.
fn leave_links_out(top: &mut Folder, left_out: &mut LeftOut) {
    let mut steps = Steps::for_links(top.count_links());
    let mut leading_out = Vec::new();
    judge_links(&mut vec![top], "", &mut steps, &mut leading_out);
    if leading_out.is_empty() {
        return;
    }
    leading_out.sort_unstable();
    for (path, target, why) in &leading_out {
        left_out.warn(&format!("{path} -> {target}"), why);
    }
    top.retain_links("", &|path| {
        leading_out.binary_search_by(|(known, ..)| known.as_str().cmp(path)).is_err()
    });
}

/// The links below the last directory of `way` that cannot be kept: path, target, reason.
fn judge_links(
    way: &mut Vec<&Folder>,
    path: &str,
    steps: &mut Steps,
    into: &mut Vec<(String, String, &'static str)>,
) {
    let Some(folder) = way.last().copied() else { return };
    for (name, target) in &folder.links {
        let why = match follow(way, target, steps, Folder::find) {
            Leads::Inside(_) => continue,
            Leads::Outside => "points outside the directory",
            Leads::Round | Leads::Unknown => "cannot be followed",
        };
        into.push((join(path, name), target.to_string(), why));
    }
    for (name, child) in &folder.folders {
        way.push(child);
        judge_links(way, &join(path, name), steps, into);
        way.pop();
    }
}

/// One tree from directories in the order of their numbers, 0 to the last.
fn put_together(mut listed: Vec<Listed>) -> Folder {
    while let Some(Listed { parent, name, folder, .. }) = listed.pop() {
        let Some(mut folder) = folder else { continue };
        folder.sort();
        match parent.and_then(|parent| listed.get_mut(parent)).and_then(|parent| parent.folder.as_mut()) {
            Some(parent) => parent.folders.push((name, folder)),
            None => return folder,
        }
    }
    Folder::new()
}

/// The first of the two ignore files that exists; they are never merged.
fn read_ignore_file(root: &Root, left_out: &mut LeftOut) -> Result<Ignore, ScanError> {
    const AML: &str = ".amlignore";
    const IGNORE: &str = ".gitignore";
    let Some(text) = read_text(root, AML)? else {
        return Ok(Ignore::parse(IGNORE, read_text(root, IGNORE)?.unwrap_or_default()));
    };
    let other = read_text(root, IGNORE).ok().flatten().unwrap_or_default();
    if text != other && !Ignore::parse(IGNORE, other).is_empty() {
        left_out.warnings.push(format!("{AML} is there, so {IGNORE} has no effect"));
    }
    Ok(Ignore::parse(AML, text))
}

fn read_text(root: &Root, name: &str) -> Result<Option<Vec<u8>>, ScanError> {
    let mut text = Vec::new();
    // A pipe in its place does not block, and reads as empty.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let read = rustix::fs::openat(&root.fd, name, flags, Mode::empty())
        .map_err(io::Error::from)
        .and_then(|file| File::from(file).read_to_end(&mut text));
    match read {
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ScanError::Read { path: root.shown(name), source }),
        Ok(_) => Ok(Some(text)),
    }
}

/// A directory to list.
struct DirectoryTask {
    number: usize,
    /// The number of the directory it is in.
    parent: Option<usize>,
    name: Box<str>,
    path: String,
    /// Levels below the root.
    depth: usize,
}

/// A directory that was listed.
struct Listed {
    number: usize,
    parent: Option<usize>,
    name: Box<str>,
    /// Without its directories. `None` for one that vanished meanwhile, or was not entered.
    folder: Option<Folder>,
    left_out: LeftOut,
}

struct Walker<'a> {
    root: &'a Arc<Root>,
    rules: Rules,
    never: &'a [(u64, u64)],
    ignore: Ignore,
    /// The highest number of a directory so far.
    last: AtomicUsize,
    /// How many entries were seen.
    seen: AtomicUsize,
}

impl Walker<'_> {
    fn fail(&self, path: &str, source: Errno) -> ScanError {
        ScanError::Directory { path: self.root.shown(path), source: source.into() }
    }

    /// Skips an entry that cannot be read, where that is allowed.
    fn pass_over(&self, path: &str, source: Errno, left_out: &mut LeftOut) -> Result<(), ScanError> {
        let error = io::Error::from(source);
        match self.rules == Rules::Outputs && is_kept_back(&error) {
            true => left_out.unread.push(Unread::because(self.root.shown(path), &error)),
            false => return Err(self.fail(path, source)),
        }
        Ok(())
    }

    /// Lists one directory; those in it are `found`.
    fn list(&self, task: DirectoryTask, found: &mut Vec<DirectoryTask>) -> Result<Listed, ScanError> {
        if task.depth >= MAX_DEPTH {
            return Err(ScanError::TooDeep { path: self.root.shown(&task.path), limit: MAX_DEPTH });
        }
        let DirectoryTask { number, parent, name, path, depth } = task;
        let relative = if path.is_empty() { "." } else { &path };
        let mut left_out = LeftOut::default();
        let folder = match self.root.open_beneath(relative, OFlags::RDONLY | OFlags::DIRECTORY) {
            Err(Errno::NOENT) => None,
            Err(error) => {
                self.pass_over(&path, error, &mut left_out)?;
                None
            }
            Ok(fd) if self.is_barred(&fd) => {
                left_out.warn(&path, "was made by agentd");
                None
            }
            Ok(fd) => {
                let dir = Arc::new(Dir { root: Arc::clone(self.root), path });
                let mut listing = Listing { walker: self, fd: fd.as_fd(), dir, left_out: &mut left_out };
                let (folder, names) = listing.read()?;
                if self.is_python(&folder, &name, &listing.dir.path) {
                    let path = listing.dir.path.clone();
                    left_out.by_rule(VENV, 1, [path]);
                    return Ok(Listed { number, parent, name, folder: None, left_out });
                }
                found.extend(names.into_iter().map(|name| DirectoryTask {
                    number: self.last.fetch_add(1, Ordering::Relaxed) + 1,
                    parent: Some(number),
                    path: join(&listing.dir.path, &name),
                    name,
                    depth: depth + 1,
                }));
                Some(folder)
            }
        };
        Ok(Listed { number, parent, name, folder, left_out })
    }

    /// Whether a directory is a virtual environment that nobody asks for: where the job runs, it does not work.
    fn is_python(&self, folder: &Folder, name: &str, path: &str) -> bool {
        let has = |file: &str| folder.files.iter().any(|leaf| &*leaf.place.name == file);
        self.rules == Rules::Project
            && !path.is_empty()
            && has("pyvenv.cfg")
            && !self.ignore.asks_for(name, path, true)
    }

    fn is_barred(&self, dir: &OwnedFd) -> bool {
        let is = |stat: Stat| self.never.contains(&(stat.st_dev, stat.st_ino));
        !self.never.is_empty() && rustix::fs::fstat(dir).is_ok_and(is)
    }

    /// The rule that leaves an entry out, for people.
    fn ignored_by(&self, name: &str, below: &str, kind: FileType) -> Option<Cow<'static, str>> {
        match self.rules {
            Rules::Code | Rules::Project if name == ".git" => Some(GIT.into()),
            Rules::Code | Rules::Project => self.ignore.rule(name, below, kind.is_dir()).map(Cow::from),
            Rules::Everything | Rules::Outputs => None,
        }
    }
}

/// A directory while it is listed.
struct Listing<'a> {
    walker: &'a Walker<'a>,
    fd: BorrowedFd<'a>,
    dir: Arc<Dir>,
    left_out: &'a mut LeftOut,
}

impl Listing<'_> {
    /// Its content, and the names of the directories in it.
    fn read(&mut self) -> Result<(Folder, Vec<Box<str>>), ScanError> {
        let (mut folder, mut directories) = (Folder::new(), Vec::new());
        let mut below = join(&self.dir.path, "");
        let prefix = below.len();
        let mut buffer = Vec::with_capacity(LISTING);
        let mut entries = RawDir::new(self.fd, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    self.walker.pass_over(&self.dir.path, error, self.left_out)?;
                    break;
                }
            };
            let raw = entry.file_name();
            if matches!(raw.to_bytes(), b"." | b"..") {
                continue;
            }
            let seen = self.walker.seen.fetch_add(1, Ordering::Relaxed);
            if self.walker.rules == Rules::Outputs && seen >= MOST_OUTPUTS {
                let why = format!(
                    "has more than there is room for: at most {MOST_OUTPUTS} files and folders are kept"
                );
                self.left_out.unread.push(Unread { path: self.walker.root.shown(&self.dir.path), why });
                break;
            }
            let name = &*text_of_name(raw.to_bytes());
            below.truncate(prefix);
            below.push_str(name);
            // Its kind first: an entry that is left out needs no `stat`.
            let told = entry.file_type();
            if told != FileType::Unknown && self.leave_out(name, &below, told) {
                continue;
            }
            let stat = match told {
                FileType::RegularFile | FileType::Unknown => {
                    match rustix::fs::statat(self.fd, raw, AtFlags::SYMLINK_NOFOLLOW) {
                        Ok(stat) => Some(stat),
                        Err(Errno::NOENT) => continue, // what vanishes meanwhile was never there
                        Err(error) => {
                            self.walker.pass_over(&below, error, self.left_out)?;
                            continue;
                        }
                    }
                }
                _ => None,
            };
            let kind = stat.as_ref().map_or(told, |stat| FileType::from_raw_mode(stat.st_mode));
            if told == FileType::Unknown && self.leave_out(name, &below, kind) {
                continue;
            }
            match (kind, stat) {
                (FileType::RegularFile, Some(stat)) => {
                    let place = FilePlace { dir: Arc::clone(&self.dir), name: name.into() };
                    folder.files.push(Leaf::new(place, &stat));
                }
                (FileType::Directory, _) => directories.push(name.into()),
                (FileType::Symlink, _) => {
                    folder.links.extend(self.link(raw, &below)?.map(|target| (name.into(), target)));
                }
                _ => self.left_out.warn(&below, "is neither file, directory nor link"),
            }
        }
        Ok((folder, directories))
    }

    /// Counts an entry that the rules exclude.
    fn leave_out(&mut self, name: &str, below: &str, kind: FileType) -> bool {
        let Some(rule) = self.walker.ignored_by(name, below, kind) else { return false };
        self.left_out.count += 1;
        self.left_out.by_rule(&rule, 1, [below.to_owned()]);
        true
    }

    /// The target of a link; `None` if it cannot be read.
    fn link(&mut self, name: &CStr, below: &str) -> Result<Option<Box<str>>, ScanError> {
        match rustix::fs::readlinkat(self.fd, name, Vec::new()) {
            Ok(target) => Ok(Some((*text_of_name(target.to_bytes())).into())),
            // What vanishes, or becomes something else, meanwhile was never there.
            Err(Errno::NOENT | Errno::INVAL) => Ok(None),
            Err(error) => self.walker.pass_over(below, error, self.left_out).map(|()| None),
        }
    }
}
