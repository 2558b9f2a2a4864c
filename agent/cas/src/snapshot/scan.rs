//! From directories to a [`Snapshot`]: walk, recall known hashes, hash the rest on all processors, encode bottom-up.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use agent_model::{Digest, size};
use bytes::Bytes;

use super::left_out::{LeftOut, Ruled, ScanError, Unread};
use super::links::{Leads, LinkTarget, Steps, follow};
use super::stamp::Stamp;
use super::statcache::StatCache;
use super::tree::{Directory, Tally};
use super::walk::{Dir, FilePlace, Folder, Leaf, Root, Rules, is_executable, walk};
use crate::{Hasher, holes, parallel};

/// Times a file is read again when it changed while it was read.
const ATTEMPTS: usize = 3;

/// Bytes read at once, at most.
const BUFFER: usize = 256 * 1024;

/// Files from this size on, in bytes, are hashed before all others, so that no processor is left alone with one.
const LARGE: u64 = 1024 * 1024;

/// Entries of [`Snapshot::largest`].
const LARGEST: usize = 10;

/// A directory as it was, by digest. The contents stay where they are until [`push`](super::push).
#[derive(Debug)]
pub struct Snapshot {
    /// The digest of the root directory.
    pub root: Digest,
    /// Files in it.
    pub files: u64,
    /// Bytes in these files.
    pub bytes: u64,
    /// Files whose content was read for it; the hashes of the others were cached.
    pub read: u64,
    /// Entries left out, by ignore rules or because they cannot be kept. A directory counts once.
    pub skipped: u64,
    /// The largest files and their sizes in bytes, largest first.
    pub largest: Vec<(String, u64)>,
    /// What was left out or doubtful, one sentence each.
    pub warnings: Vec<String>,
    /// The entries that cannot be kept, each with the reason. They are among the warnings, too.
    pub left_out: Vec<String>,
    /// Files and directories in it that could not be read; set by [`scan_outputs`](super::scan_outputs) alone.
    pub unread: Vec<Unread>,
    /// Everything by name, each digest known.
    pub(super) top: Folder,
}

impl Snapshot {
    /// Each content once, with one place to read it from.
    pub(super) fn contents(&self) -> Vec<&Leaf> {
        let mut seen = HashSet::new();
        let mut contents = Vec::new();
        self.top.each_file(&mut |leaf| {
            if leaf.hash.as_ref().is_some_and(|hash| seen.insert(hash)) {
                contents.push(leaf);
            }
        });
        contents
    }

    /// Each directory message once, children before parents, the root last.
    pub(super) fn directories(&self) -> Vec<&Folder> {
        fn collect<'a>(folder: &'a Folder, seen: &mut HashSet<&'a Digest>, into: &mut Vec<&'a Folder>) {
            folder.folders.iter().for_each(|(_, child)| collect(child, seen, into));
            if seen.insert(&folder.digest) {
                into.push(folder);
            }
        }
        let mut directories = Vec::new();
        collect(&self.top, &mut HashSet::new(), &mut directories);
        directories
    }

    /// Why a directory of this name cannot be made or used in it: what has the name already, for people.
    pub fn in_the_way(&self, name: &str) -> Option<&'static str> {
        if self.top.files.iter().any(|leaf| &*leaf.place.name == name) {
            return Some("a file");
        }
        let LinkTarget::Link(target) = self.top.find(name) else { return None };
        match follow(&[&self.top], target, &mut Steps::for_links(1), Folder::find) {
            Leads::Inside(Some(_)) => None,
            _ => Some("a link to no directory"),
        }
    }

    /// The entries of its root and their sizes in bytes, a folder with all below it, the largest first.
    pub fn heaviest(&self) -> Vec<(String, u64)> {
        let files = self.top.files.iter().map(|leaf| (leaf.place.name.to_string(), leaf.stamp.size));
        let folders = self.top.folders.iter().map(|(name, folder)| (format!("{name}/"), sums(folder).1));
        let mut entries: Vec<(String, u64)> = files.chain(folders).collect();
        entries.sort_by_key(|(_, size)| Reverse(*size));
        entries
    }

    /// The files whose directory and name are `wanted`.
    pub fn named(&self, wanted: impl Fn(&str, &str) -> bool) -> Vec<String> {
        self.top.named(wanted)
    }

    /// The digest of every content.
    #[cfg(test)]
    pub(crate) fn digests(&self) -> Vec<Digest> {
        self.contents().iter().map(|leaf| leaf.digest()).collect()
    }
}

impl Folder {
    /// Calls `work` with every file below, in the order of the tree.
    pub(super) fn each_file<'a>(&'a self, work: &mut impl FnMut(&'a Leaf)) {
        self.files.iter().for_each(&mut *work);
        self.folders.iter().for_each(|(_, child)| child.each_file(work));
    }

    /// The files whose directory and name are `wanted`.
    pub(super) fn named(&self, wanted: impl Fn(&str, &str) -> bool) -> Vec<String> {
        let mut named = Vec::new();
        self.each_file(&mut |leaf| {
            if wanted(&leaf.place.dir.path, &leaf.place.name) {
                named.push(leaf.place.relative());
            }
        });
        named
    }

    fn each_file_mut<'a>(&'a mut self, work: &mut impl FnMut(&'a mut Leaf)) {
        self.files.iter_mut().for_each(&mut *work);
        self.folders.iter_mut().for_each(|(_, child)| child.each_file_mut(work));
    }

    pub(super) fn retain_files(&mut self, keep: &impl Fn(&Leaf) -> bool) {
        self.files.retain(keep);
        self.folders.iter_mut().for_each(|(_, child)| child.retain_files(keep));
    }

    /// Its message, once all below it is known. It is not kept: most messages are never sent.
    pub(super) fn message(&self) -> (Digest, Bytes) {
        self.directory().encode()
    }

    fn directory(&self) -> Directory {
        let file = |leaf: &Leaf| (leaf.place.name.to_string(), leaf.digest(), leaf.executable);
        Directory {
            files: self.files.iter().map(file).collect(),
            directories: self.folders.iter().map(|(name, child)| (name.to_string(), child.digest)).collect(),
            links: self.links.iter().map(|(name, target)| (name.to_string(), target.to_string())).collect(),
        }
    }

    /// Computes the digest of every directory; this one is at `path`.
    fn seal(&mut self, path: &Path, tally: &mut Tally) -> Result<(), ScanError> {
        for (name, child) in &mut self.folders {
            child.seal(&path.join(&**name), tally)?;
        }
        let too_large = |source| ScanError::TooLarge { path: path.to_owned(), source };
        (self.digest, _) = tally.encode(self.directory()).map_err(too_large)?;
        Ok(())
    }
}

/// Which part of a directory counts, and how it is read.
#[derive(Clone, Copy, Default)]
pub struct Choice<'a> {
    /// All it holds: no ignore rules, because the caller has rules of its own for it.
    pub whole: bool,
    /// It is the code of a job: what earlier jobs left and what tools make again is left out.
    pub code: bool,
    /// Hashes of files that were read before.
    pub cache: Option<&'a StatCache>,
    /// Directories that are never entered, by whatever path the walk reaches them. A missing one is ignored.
    pub never: &'a [PathBuf],
}

impl Choice<'_> {
    /// Reads the directory. Blocks.
    pub fn scan(&self, dir: &Path) -> Result<Snapshot, ScanError> {
        let page = self.cache.map(|cache| cache.page(self.rules(), dir));
        let mut left_out = LeftOut::default();
        let mut top = self.walk(dir, &mut left_out)?;
        let recalled = page.as_ref().map(|page| page.recall(&mut top));
        let read = hash_all(&mut top, &AtomicBool::new(false))?;
        if let Some((page, recalled)) = page.zip(recalled) {
            page.keep(&top, recalled);
        }
        complete(dir, top, read, left_out)
    }

    /// What a scan would contain; no file is read. Blocks.
    pub fn survey(&self, dir: &Path) -> Result<Survey, ScanError> {
        let mut left_out = LeftOut::default();
        let top = self.walk(dir, &mut left_out)?;
        let (files, bytes, largest) = sums(&top);
        let warnings = left_out.told();
        let rules = left_out.rules;
        Ok(Survey { files, bytes, largest, rules, warnings, top })
    }

    pub(super) fn rules(&self) -> Rules {
        match (self.whole, self.code) {
            (true, _) => Rules::Everything,
            (false, true) => Rules::Project,
            (false, false) => Rules::Code,
        }
    }

    pub(super) fn walk(&self, dir: &Path, left_out: &mut LeftOut) -> Result<Folder, ScanError> {
        let identity = |path: &PathBuf| rustix::fs::stat(path).ok().map(|stat| (stat.st_dev, stat.st_ino));
        let never: Vec<_> = self.never.iter().filter_map(identity).collect();
        walk(&Arc::new(Root::open(dir)?), self.rules(), &never, left_out)
    }
}

/// What a snapshot of a directory would have.
#[derive(Debug)]
pub struct Survey {
    /// Files in it.
    pub files: u64,
    /// Bytes in these files.
    pub bytes: u64,
    /// The largest files and their sizes in bytes, largest first.
    pub largest: Vec<(String, u64)>,
    /// What ignore rules left out, by the rule: `.amlignore:3: *.ckpt`.
    pub rules: BTreeMap<String, Ruled>,
    /// What else was left out or is doubtful, one sentence each.
    pub warnings: Vec<String>,
    top: Folder,
}

impl Survey {
    /// The files whose directory and name are `wanted`.
    pub fn named(&self, wanted: impl Fn(&str, &str) -> bool) -> Vec<String> {
        self.top.named(wanted)
    }
}

/// A code directory: without what `.amlignore`, or else `.gitignore`, in its root excludes, and without
/// anything named `.git`. Blocks.
pub fn scan(dir: &Path) -> Result<Snapshot, ScanError> {
    Choice::default().scan(dir)
}

/// A directory with all it holds: no ignore rules, because the caller has rules of its own for it. Blocks.
pub fn scan_whole(dir: &Path) -> Result<Snapshot, ScanError> {
    Choice { whole: true, ..Choice::default() }.scan(dir)
}

/// One file, under its own name. Blocks.
pub fn scan_file(path: &Path) -> Result<Snapshot, ScanError> {
    let not_a_file = || ScanError::NotAFile { path: path.to_owned() };
    // The file may be reached through a link; the snapshot holds the target of the link.
    let real = path.canonicalize().map_err(|source| ScanError::Read { path: path.to_owned(), source })?;
    let text = |path: &Path| path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let (name, relative) = (text(path).ok_or_else(not_a_file)?, text(&real).ok_or_else(not_a_file)?);
    let parent = real.parent().ok_or_else(not_a_file)?;
    if !real.is_file() {
        return Err(not_a_file());
    }
    let root = Arc::new(Root::open(parent)?.only(relative));
    let place = FilePlace { dir: Arc::new(Dir { root, path: String::new() }), name: name.into() };
    let read = |source: io::Error| ScanError::Read { path: path.to_owned(), source };
    let stat = place.open().and_then(|file| Ok(rustix::fs::fstat(file)?)).map_err(read)?;
    let mut top = Folder::new();
    top.files.push(Leaf::new(place, &stat));
    let read = hash_all(&mut top, &AtomicBool::new(false))?;
    complete(path, top, read, LeftOut::default())
}

/// Hashes the files whose content is not known yet; returns how many these were.
fn hash_all(top: &mut Folder, stop: &AtomicBool) -> Result<u64, ScanError> {
    each_unknown(top, |buffer, leaf| hash(leaf, buffer, u64::MAX, stop))
}

/// Does `work` on the files whose content is not known yet; returns how many these were.
pub(super) fn each_unknown(
    top: &mut Folder,
    work: impl Fn(&mut Vec<u8>, &mut Leaf) -> Result<(), ScanError> + Sync,
) -> Result<u64, ScanError> {
    let mut unknown = Vec::new();
    top.each_file_mut(&mut |leaf| {
        if leaf.hash.is_none() {
            unknown.push(leaf);
        }
    });
    // The small ones stay in the order of the tree, which is often that of the disk.
    unknown.sort_by_key(|leaf| Reverse(if leaf.stamp.size < LARGE { 0 } else { leaf.stamp.size }));
    parallel::each(&mut unknown, parallel::cores(), Vec::new, |buffer, leaf| work(buffer, leaf))?;
    Ok(unknown.len() as u64)
}

/// Reads a file of at most `most` bytes, until it is the same before and after; or, where it may grow, until all that
/// an earlier reading found is still there at its beginning: then it is taken as long as it was.
pub(super) fn hash(
    leaf: &mut Leaf,
    buffer: &mut Vec<u8>,
    most: u64,
    stop: &AtomicBool,
) -> Result<(), ScanError> {
    let fail = |source| ScanError::Read { path: leaf.place.shown(), source };
    // What an earlier reading found; no empty file, because that may be one which was just made to be filled.
    let mut earlier: Option<(Stamp, Digest)> = None;
    for _ in 0..ATTEMPTS {
        let mut file = holes::Reader::new(leaf.place.open().map_err(fail)?);
        let before = rustix::fs::fstat(file.file()).map_err(|errno| fail(errno.into()))?;
        if !rustix::fs::FileType::from_raw_mode(before.st_mode).is_file() {
            return Err(ScanError::NotAFile { path: leaf.place.shown() });
        }
        if leaf.place.dir.root.owner.is_some_and(|owner| owner != before.st_uid) {
            return Err(ScanError::Unfit(Unread::of_another(leaf.place.shown())));
        }
        let stamp = Stamp::of(&before);
        if stamp.size > most {
            let path = leaf.place.shown();
            let blocks = u64::try_from(before.st_blocks).unwrap_or(0).saturating_mul(512);
            let (size, blocks) = (size::binary(stamp.size), size::binary(blocks));
            let why = format!("is {size} long, more than the whole disk; {blocks} of it are written");
            return Err(ScanError::Unfit(Unread { path, why }));
        }
        let grown_from = earlier.take().filter(|(known, _)| stamp.is_longer(known));
        let expected = grown_from.map_or(stamp.size, |(known, _)| known.size);
        // What comes behind it is of interest only as a sign of a change.
        let most = if leaf.place.dir.root.may_grow && expected > 0 { expected } else { u64::MAX };
        let Some(digest) =
            hash_content(&mut file.by_ref().take(most), expected, buffer, stop).map_err(fail)?
        else {
            return Err(ScanError::Stopped);
        };
        let after = rustix::fs::fstat(file.file()).map_err(|errno| fail(errno.into()))?;
        match grown_from {
            Some((known, found)) if found == digest => {
                (leaf.stamp, leaf.executable) = (known, is_executable(&after));
                (leaf.hash, leaf.read, leaf.grown) = (Some(digest.hash), true, true);
                return Ok(());
            }
            None if digest.size != stamp.size => {}
            None if stamp == Stamp::of(&after) => {
                (leaf.stamp, leaf.executable, leaf.hash) = (stamp, is_executable(&after), Some(digest.hash));
                leaf.read = true;
                return Ok(());
            }
            None if leaf.place.dir.root.may_grow && stamp.size > 0 => earlier = Some((stamp, digest)),
            _ => {}
        }
    }
    Err(ScanError::Changed { path: leaf.place.shown() })
}

/// The digest of the content of `file`, which should have `expected` bytes; `None` when `stop` was set meanwhile. It
/// does not look for more, because the size would show them; only a file of size 0 is read all the same, because its
/// file system may not know the size.
pub(super) fn hash_content(
    file: &mut impl Read,
    expected: u64,
    buffer: &mut Vec<u8>,
    stop: &AtomicBool,
) -> io::Result<Option<Digest>> {
    buffer.resize(BUFFER, 0);
    let mut hasher = Hasher::new();
    loop {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        match file.read(buffer) {
            Ok(0) => break,
            Ok(length) => hasher.update(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        if hasher.size() >= expected {
            break;
        }
    }
    Ok(Some(hasher.finish()))
}

pub(super) fn complete(
    dir: &Path,
    mut top: Folder,
    read: u64,
    mut left_out: LeftOut,
) -> Result<Snapshot, ScanError> {
    top.each_file(&mut |leaf| {
        if leaf.grown {
            let (path, size) = (leaf.place.relative(), size::binary(leaf.stamp.size));
            left_out.warnings.push(format!("{path} grows; it is taken as long as it was: {size}"));
        }
    });
    top.seal(dir, &mut Tally::default())?;
    let (files, bytes, largest) = sums(&top);
    Ok(Snapshot {
        root: top.digest,
        files,
        bytes,
        read,
        skipped: left_out.count,
        largest,
        warnings: left_out.told(),
        left_out: left_out.entries,
        unread: left_out.unread,
        top,
    })
}

/// How many files there are below, their bytes, and the largest of them.
pub(super) fn sums(top: &Folder) -> (u64, u64, Vec<(String, u64)>) {
    let (mut files, mut bytes, mut sizes) = (0, 0, Vec::new());
    top.each_file(&mut |leaf| {
        files += 1;
        bytes += leaf.stamp.size;
        sizes.push(leaf);
    });
    (files, bytes, largest(sizes))
}

fn largest(mut files: Vec<&Leaf>) -> Vec<(String, u64)> {
    let most = files.len().min(LARGEST);
    if most < files.len() {
        files.select_nth_unstable_by_key(most, |leaf| Reverse(leaf.stamp.size));
    }
    let sized = |leaf: &&Leaf| (leaf.place.relative(), leaf.stamp.size);
    let mut named: Vec<(String, u64)> = files.iter().take(most).map(sized).collect();
    named.sort_unstable_by(|(one, small), (other, big)| big.cmp(small).then_with(|| one.cmp(other)));
    named
}

#[cfg(test)]
pub(super) mod tests;
