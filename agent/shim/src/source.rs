//! A file that its writer may replace, cut or remove, read as one stream that only grows.
//!
//! Owns the rule. The last bytes before the current position are remembered. A file that has the same bytes there
//! continues the stream, whether it is the same file or another one of its name. Any other file begins anew, which
//! is reported ([`Piece::Restart`]). A file that is replaced is read to its end first: it stays open here, so that
//! it can be removed and still be read. A file that is shorter than what was read may be in the middle of being
//! rewritten, so it is given [`SETTLE`]; after that it counts as begun anew.
//!
//! Invariants: a link is not followed, a pipe does not block, and only files are read; holes are skipped, however
//! large; one call reads at most [`TURN`] bytes. Bytes that are cut or removed before they were read are lost
//! unnoticed.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use agent_fs::open_plain;
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

/// How long a file that is shorter than before may take to become as long again: as long as it takes to write a file
/// anew in one go, and no longer than somebody who looks at metrics may wait.
const SETTLE: Duration = Duration::from_secs(1);

/// How many bytes are read in one call, so that others get their turn.
const TURN: u64 = 4 << 20;

/// How many of the last bytes are remembered.
const TAIL: usize = 4096;

/// The next part of a stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// These bytes, without those that are 0: no text has any.
    Bytes(&'a [u8]),
    /// A hole of so many bytes, which is left out.
    Hole(u64),
    /// The next bytes do not continue the last ones.
    Restart,
    /// In the place of the file is something that is not read.
    Strange(&'static str),
}

/// See the module.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    /// The files that are read one after the other; the last one has, or had, the name.
    files: VecDeque<Plain>,
    /// Up to here the first of them was read.
    position: u64,
    /// The last bytes before that.
    tail: Vec<u8>,
    /// Since when the file is shorter than what was read, but not empty.
    short_since: Option<Instant>,
    /// What is in its place instead of a file, as it was last reported.
    strange: Option<&'static str>,
}

#[derive(Debug)]
struct Plain {
    file: File,
    device: u64,
    inode: u64,
}

impl Source {
    /// The stream of the file at `path`, which need not exist yet, from `position` on, before which `tail` was read.
    pub fn new(path: PathBuf, position: u64, tail: Vec<u8>) -> Source {
        Source { path, files: VecDeque::new(), position, tail, short_since: None, strange: None }
    }

    /// When to read again even if no change is reported.
    pub fn due(&self) -> Option<Instant> {
        self.short_since.map(|since| since + SETTLE)
    }

    /// Passes new parts to `take`. `at` is now, or `None` if the file will not become longer any more. Returns
    /// whether there is more to be read at once.
    pub fn read(&mut self, at: Option<Instant>, mut take: impl FnMut(Piece<'_>)) -> io::Result<bool> {
        let looked = self.look(&mut take);
        let mut left = TURN;
        while let Some(first) = self.files.front() {
            let file = first.file.try_clone()?;
            let is_replaced = self.files.len() > 1;
            let at = at.filter(|_| !is_replaced);
            if self.is_in_order(&file, at, &mut take)? && self.copy(&file, &mut left, &mut take)? {
                return Ok(true);
            }
            if !is_replaced {
                break;
            }
            self.files.pop_front();
            self.short_since = None;
        }
        looked.map(|()| false)
    }

    /// Checks whether another file has the name now.
    fn look(&mut self, take: &mut impl FnMut(Piece<'_>)) -> io::Result<()> {
        let found = match fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        let kind = found.file_type();
        let strange = match () {
            () if kind.is_file() => None,
            () if kind.is_dir() => Some("a directory"),
            () if kind.is_symlink() => Some("a link"),
            () if kind.is_fifo() => Some("a pipe"),
            () => Some("something that is no file"),
        };
        if std::mem::replace(&mut self.strange, strange) != strange
            && let Some(what) = strange
        {
            take(Piece::Strange(what));
        }
        let is_known =
            self.files.back().is_some_and(|last| (last.device, last.inode) == (found.dev(), found.ino()));
        if strange.is_some() || is_known {
            return Ok(());
        }
        match open_plain(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()), // it went just now
            file => {
                let file = file?;
                let opened = file.metadata()?;
                self.files.push_back(Plain { file, device: opened.dev(), inode: opened.ino() });
                Ok(())
            }
        }
    }

    /// Whether to continue reading the file now, at `position`, which this may reset.
    fn is_in_order(
        &mut self,
        file: &File,
        at: Option<Instant>,
        take: &mut impl FnMut(Piece<'_>),
    ) -> io::Result<bool> {
        let length = file.metadata()?.len();
        let is_short = length < self.position;
        if !is_short && self.has_tail(file)? {
            self.short_since = None;
            return Ok(true);
        }
        if length == 0 {
            self.short_since = None; // it was cut, and nothing was written since
            return Ok(false);
        }
        if let Some(now) = at.filter(|_| is_short)
            && now < *self.short_since.get_or_insert(now) + SETTLE
        {
            return Ok(false);
        }
        take(Piece::Restart);
        self.short_since = None;
        self.position = 0;
        self.tail.clear();
        Ok(true)
    }

    fn has_tail(&self, file: &File) -> io::Result<bool> {
        let mut found = vec![0; self.tail.len()];
        match file.read_exact_at(&mut found, self.position - self.tail.len() as u64) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false), // it was cut just now
            read => read.map(|()| found == self.tail),
        }
    }

    /// Reads to the end of the file; whether there may be more than `left` bytes.
    fn copy(&mut self, file: &File, left: &mut u64, take: &mut impl FnMut(Piece<'_>)) -> io::Result<bool> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let Some(data) = next_data(file, self.position)? else { return Ok(false) };
            if *left == 0 {
                return Ok(true);
            }
            if data > self.position {
                take(Piece::Hole(data - self.position));
                let zeros = usize::try_from(data - self.position).unwrap_or(TAIL).min(TAIL);
                self.position = data;
                self.remember(&[0; TAIL][..zeros]);
            }
            let count = match file.read_at(&mut buffer, self.position) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read?,
            };
            if count == 0 {
                return Ok(false);
            }
            self.position += count as u64;
            self.remember(&buffer[..count]);
            *left = left.saturating_sub(count as u64);
            for part in buffer[..count].split(|byte| *byte == 0).filter(|part| !part.is_empty()) {
                take(Piece::Bytes(part));
            }
        }
    }

    fn remember(&mut self, bytes: &[u8]) {
        self.tail.extend_from_slice(&bytes[bytes.len().saturating_sub(TAIL)..]);
        let surplus = self.tail.len().saturating_sub(TAIL);
        self.tail.drain(..surplus);
    }
}

/// The offset of the next data, not a hole, from `position` on; `None` after the last.
fn next_data(file: &File, position: u64) -> io::Result<Option<u64>> {
    let from = i64::try_from(position).map_err(io::Error::other)?;
    match lseek(file, from, Whence::SeekData) {
        Ok(at) => Ok(Some(u64::try_from(at).unwrap_or(position))),
        Err(Errno::ENXIO) => Ok(None),
        Err(Errno::EINVAL | Errno::EOPNOTSUPP) => Ok(Some(position)), // this file system knows no holes
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests;
