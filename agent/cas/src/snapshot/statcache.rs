//! The hashes of files when they were read last, so that an unchanged file is not read again.
//!
//! Owns one directory, the cache, with a page for each directory that was scanned. A page is a list of stamps
//! and hashes; a file with exactly the stamp on its page is assumed to have the same content. The cache is never in
//! the scanned directory, and losing it costs only time: whatever is wrong with a page, the files are read.
//!
//! ```text
//! page    magic, when its scan began, checksum                                   block*
//! block   length, checksum          path of a directory                          record*
//! record  name, device, inode, size, modified, changed, hash                     all in the order of the tree
//! ```
//!
//! Invariants, which make a stamp identify a content:
//! - A file is put on a page only if both its times are older than [`SETTLED`] before the scan began. A file that is
//!   written after that has another change time, which no program can put back; within the same tick of a clock it
//!   might not, nor while a page of it that is mapped into memory is yet to be written back.
//! - A page from the future is ignored: the clock was wrong when it was written, or is now.
//! - A page appears whole, by a rename; a checksum detects damage by a crash or a disk. Two scans at once each write
//!   their own, and either is good.
//! - Only pages of this very user are read, and never through a link.
//!
//! It cannot detect writes through a mapping on a file system that keeps no times for them (tmpfs), nor writes of
//! another machine before this one learns of them (NFS). [`StatCache::forget`] is for these.

use std::cmp::Ordering;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_model::ids::hex;
use agent_model::{Clock, SystemClock};
use rustix::fs::{Mode, OFlags};

use super::stamp::Stamp;
use super::walk::{Folder, Leaf, Rules};
use crate::digest_of;

/// How old the last change of a file must be, in nanoseconds, before its stamp is trusted. The coarsest clock
/// of a file system ticks every two seconds; a page that was written through a mapping is written to the disk, and
/// its next change to the times, after 35 seconds at most unless someone raised that.
const SETTLED: i64 = 60_000_000_000;

/// How a page begins. The last byte is the version of all that follows.
const MAGIC: [u8; 8] = *b"agentst\x01";

/// Bytes of records after which a block ends.
const BLOCK: usize = 64 * 1024;

/// Bytes of a block that is read at most: its records, and one name and one path beyond them.
const LONGEST: usize = 2 * BLOCK;

/// Pages kept, and their bytes: those written last, and at least one.
const PAGES: usize = 32;
const BYTES: u64 = 256 * 1024 * 1024;

/// Records that may be out of date before a page is written for that alone.
const STALE: u64 = 1000;

/// A cache of stamps in a directory of its own.
#[derive(Clone)]
pub struct StatCache {
    dir: PathBuf,
    clock: Arc<dyn Clock>,
}

impl StatCache {
    /// The cache in `dir`, which is made when there is something to keep.
    pub fn at(dir: PathBuf) -> StatCache {
        StatCache::with_clock(dir, Arc::new(SystemClock))
    }

    pub(super) fn with_clock(dir: PathBuf, clock: Arc<dyn Clock>) -> StatCache {
        StatCache { dir, clock }
    }

    /// Has every file of `dir` read again by the next scan.
    pub fn forget(&self, dir: &Path) {
        for rules in [Rules::Code, Rules::Everything] {
            let path = self.page(rules, dir).path();
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %path.display(), %error, "cannot remove page of stat cache");
                }
                _ => {}
            }
        }
    }

    /// The page of a scan that begins now.
    pub(super) fn page(&self, rules: Rules, dir: &Path) -> Page<'_> {
        let whole = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let kind: &[u8] = match rules {
            Rules::Code | Rules::Project => b"code\0",
            Rules::Everything | Rules::Outputs => b"everything\0",
        };
        let name = digest_of(&[kind, whole.as_os_str().as_bytes()].concat());
        let begun = i64::try_from(self.clock.now().0).unwrap_or(i64::MAX).saturating_mul(1_000_000);
        Page { dir: &self.dir, name: hex(&name.hash[..16]), begun }
    }
}

/// The cached stamps and hashes of one directory.
pub(super) struct Page<'a> {
    dir: &'a Path,
    name: String,
    /// When the scan began, in nanoseconds since 1970.
    begun: i64,
}

/// How useful a page was.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Recalled {
    /// Files whose hashes it had.
    hits: u64,
    /// Records it had.
    records: u64,
    /// It was present, and whole.
    intact: bool,
}

impl Page<'_> {
    fn path(&self) -> PathBuf {
        self.dir.join(&self.name)
    }

    /// Fills in the hashes of the files that are on the page as they are now.
    pub(super) fn recall(&self, top: &mut Folder) -> Recalled {
        let page = match self.open() {
            Ok(page) => page,
            Err(error) => {
                tracing::debug!(path = %self.path().display(), %error, "cannot read stat cache");
                return Recalled::default();
            }
        };
        let recalled = Recalled { intact: true, ..Recalled::default() };
        let mut recall = Recall { page, block: None, recalled };
        recall.advance();
        recall.folder(top, &mut String::new());
        while recall.block.is_some() {
            recall.skip();
        }
        recall.recalled
    }

    fn open(&self) -> io::Result<BufReader<File>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = File::from(rustix::fs::open(self.path(), flags, Mode::empty())?);
        let about = file.metadata()?;
        if !about.is_file() || about.uid() != rustix::process::geteuid().as_raw() {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "not a file of this user"));
        }
        let mut page = BufReader::with_capacity(LONGEST, file);
        let mut head = [0; 24];
        page.read_exact(&mut head)?;
        let begun = i64::from_le_bytes(part(&head, 8));
        let good = head[..8] == MAGIC && head[16..] == sum(&head[..16]);
        if good && begun <= self.begun { Ok(page) } else { Err(no_page()) }
    }

    /// Writes the page anew if that is worth it. A cache that cannot be written is no reason to fail.
    pub(super) fn keep(&self, top: &Folder, recalled: Recalled) {
        let mut settled = 0;
        top.each_file(&mut |leaf| settled += u64::from(self.is_settled(&leaf.stamp)));
        let stale = recalled.records > 2 * recalled.hits + STALE;
        let learned = settled > recalled.hits || (settled > 0 && !recalled.intact);
        if !learned && !stale {
            return;
        }
        if let Err(error) = self.write(top).and_then(|()| prune(self.dir)) {
            tracing::debug!(path = %self.path().display(), %error, "cannot remember what was read");
        }
    }

    fn is_settled(&self, stamp: &Stamp) -> bool {
        let old = self.begun.saturating_sub(SETTLED);
        stamp.modified < old && stamp.changed < old
    }

    fn write(&self, top: &Folder) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(self.dir)?;
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| io::Error::other(error.to_string()))?;
        let temp = self.dir.join(format!("{}.{}", self.name, hex(&random)));
        let file = File::options().write(true).create_new(true).mode(0o600).open(&temp)?;
        // Not flushed: after a power failure the checksums show whether it reached the disk.
        let written = self.write_to(file, top).and_then(|()| fs::rename(&temp, self.path()));
        if written.is_err() {
            let _ = fs::remove_file(&temp); // it would be pruned in time anyway
        }
        written
    }

    fn write_to(&self, file: File, top: &Folder) -> io::Result<()> {
        let mut page = BufWriter::with_capacity(LONGEST, file);
        let head = [MAGIC, self.begun.to_le_bytes()].concat();
        page.write_all(&head)?;
        page.write_all(&sum(&head))?;
        self.write_folder(&mut page, top, &mut String::new())?;
        page.flush()
    }

    fn write_folder(&self, page: &mut impl Write, folder: &Folder, path: &mut String) -> io::Result<()> {
        let mut block = Vec::new();
        for leaf in folder.files.iter().filter(|leaf| self.is_settled(&leaf.stamp)) {
            let Some(hash) = &leaf.hash else { continue };
            if block.is_empty() {
                put_text(&mut block, path)?;
            }
            put_text(&mut block, &leaf.place.name)?;
            block.extend_from_slice(&bytes_of(&leaf.stamp));
            block.extend_from_slice(hash);
            if block.len() >= BLOCK {
                write_block(page, &mut block)?;
            }
        }
        if !block.is_empty() {
            write_block(page, &mut block)?;
        }
        for (name, child) in &folder.folders {
            let length = path.len();
            enter(path, name);
            self.write_folder(page, child, path)?;
            path.truncate(length);
        }
        Ok(())
    }
}

/// A walk through a page and a tree side by side: both are in the same order.
struct Recall<R> {
    page: R,
    /// The current block; `None` after the last one, or a bad one.
    block: Option<Block>,
    recalled: Recalled,
}

/// One directory, or part of a large one.
struct Block {
    path: String,
    bytes: Vec<u8>,
    /// Where its records begin.
    at: usize,
}

impl<R: Read> Recall<R> {
    fn folder(&mut self, folder: &mut Folder, path: &mut String) {
        let mut files = folder.files.iter_mut().peekable();
        while let Some(block) = &self.block {
            match block.path.split('/').cmp(path.split('/')) {
                Ordering::Less => self.skip(),
                Ordering::Equal => {
                    self.records(|record, recalled| {
                        let before = |leaf: &&mut Leaf| leaf.place.name.as_bytes() < record.name;
                        while files.next_if(before).is_some() {}
                        let same = |leaf: &&mut Leaf| leaf.place.name.as_bytes() == record.name;
                        if let Some(leaf) = files.next_if(same)
                            && bytes_of(&leaf.stamp) == record.stamp
                        {
                            leaf.hash = Some(record.hash);
                            recalled.hits += 1;
                        }
                    });
                }
                Ordering::Greater => break,
            }
        }
        for (name, child) in &mut folder.folders {
            let length = path.len();
            enter(path, name);
            self.folder(child, path);
            path.truncate(length);
        }
    }

    fn skip(&mut self) {
        self.records(|_, _| {});
    }

    /// Does `work` on the records of the block, and goes on to the next block.
    fn records(&mut self, mut work: impl FnMut(FileRecord<'_>, &mut Recalled)) {
        let Some(Block { bytes, mut at, .. }) = self.block.take() else { return };
        while at < bytes.len() {
            let Some(record) = FileRecord::read(&bytes, &mut at) else {
                self.recalled.intact = false;
                return;
            };
            self.recalled.records += 1;
            work(record, &mut self.recalled);
        }
        self.advance();
    }

    /// Reads the next block. After a bad one the rest is ignored.
    fn advance(&mut self) {
        match self.read_block() {
            Ok(block) => self.block = block,
            Err(_) => (self.block, self.recalled.intact) = (None, false),
        }
    }

    fn read_block(&mut self) -> io::Result<Option<Block>> {
        let mut head = [0; 12];
        if self.page.read(&mut head[..1])? == 0 {
            return Ok(None);
        }
        self.page.read_exact(&mut head[1..])?;
        let length = u32::from_le_bytes(part(&head, 0)) as usize;
        if length > LONGEST {
            return Err(no_page());
        }
        let mut bytes = vec![0; length];
        self.page.read_exact(&mut bytes)?;
        if head[4..] != sum(&bytes) {
            return Err(no_page());
        }
        let mut at = 0;
        let path = take_text(&bytes, &mut at).and_then(|path| std::str::from_utf8(path).ok());
        let path = path.ok_or_else(no_page)?.to_owned();
        Ok(Some(Block { path, bytes, at }))
    }
}

/// The entry of one file on a page.
struct FileRecord<'a> {
    name: &'a [u8],
    stamp: [u8; 40],
    hash: [u8; 32],
}

impl FileRecord<'_> {
    fn read<'a>(bytes: &'a [u8], at: &mut usize) -> Option<FileRecord<'a>> {
        let name = take_text(bytes, at)?;
        let rest = bytes.get(*at..*at + 72)?;
        *at += 72;
        Some(FileRecord { name, stamp: part(rest, 0), hash: part(rest, 40) })
    }
}

fn bytes_of(stamp: &Stamp) -> [u8; 40] {
    let Stamp { device, inode, size, modified, changed } = *stamp;
    let mut bytes = [0; 40];
    let parts = [device, inode, size]
        .map(u64::to_le_bytes)
        .into_iter()
        .chain([modified, changed].map(i64::to_le_bytes));
    bytes.chunks_exact_mut(8).zip(parts).for_each(|(place, part)| place.copy_from_slice(&part));
    bytes
}

fn put_text(block: &mut Vec<u8>, text: &str) -> io::Result<()> {
    let length = u16::try_from(text.len()).map_err(|_| no_page())?;
    block.extend_from_slice(&length.to_le_bytes());
    block.extend_from_slice(text.as_bytes());
    Ok(())
}

fn take_text<'a>(bytes: &'a [u8], at: &mut usize) -> Option<&'a [u8]> {
    let length = usize::from(u16::from_le_bytes([*bytes.get(*at)?, *bytes.get(*at + 1)?]));
    let text = bytes.get(*at + 2..*at + 2 + length)?;
    *at += 2 + length;
    Some(text)
}

fn write_block(page: &mut impl Write, block: &mut Vec<u8>) -> io::Result<()> {
    let length = u32::try_from(block.len()).map_err(|_| no_page())?;
    page.write_all(&length.to_le_bytes())?;
    page.write_all(&sum(block))?;
    page.write_all(block)?;
    block.clear();
    Ok(())
}

/// `N` of the bytes from `at` on, which the caller knows to be there.
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

fn sum(bytes: &[u8]) -> [u8; 8] {
    part(&digest_of(bytes).hash, 0)
}

fn no_page() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "no page of this version, or a damaged one")
}

fn enter(path: &mut String, name: &str) {
    if !path.is_empty() {
        path.push('/');
    }
    path.push_str(name);
}

/// Removes the files that were written longest ago: pages, and what a crash left of one.
fn prune(dir: &Path) -> io::Result<()> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)?.flatten() {
        if let Ok(about) = entry.metadata() {
            files.push(((about.mtime(), about.mtime_nsec()), about.len(), entry.path()));
        }
    }
    files.sort_unstable_by(|one, other| other.cmp(one));
    let mut bytes = 0;
    for (index, (_, length, path)) in files.into_iter().enumerate() {
        bytes += length;
        if index > 0 && (index >= PAGES || bytes > BYTES) {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
