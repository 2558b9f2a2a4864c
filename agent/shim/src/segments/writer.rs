//! The writing half: appends, counts what it cannot append, and hashes what it did.
//!
//! Hides: segments, the quota, errors of the disk. Nothing here waits.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, io};

use agent_model::words::count;
use agent_model::{failpoint, size};
use nix::fcntl::OFlag;
use nix::sys::statvfs::statvfs;
use sha2::{Digest as _, Sha256};

use super::{SMALLEST, path_of, starts};
use crate::record::{Gaps, LogPolicy};

/// After an error, how long output is dropped before the disk is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// The disk is not tried again before so many bytes are free: a gap for every page that somebody frees
/// would bury the log in notes about itself.
const WORTH_IT: u64 = 256 << 10;

/// More than a gap line takes, in bytes.
const RESERVE: usize = 4096;

/// The log of one job, to be written. See the module.
#[derive(Debug)]
pub struct Writer {
    dir: PathBuf,
    quota: u64,
    segment: u64,
    block: bool,
    /// Segments found at the last check, oldest first; the last one is written.
    starts: VecDeque<u64>,
    /// The last segment; none when it cannot be used any more.
    file: Option<File>,
    reserve: Option<File>,
    end: u64,
    /// The last byte is a line feed, or there is none.
    at_line_start: bool,
    hash: Sha256,
    gap: Option<Gap>,
    gaps: Gaps,
    retry_at: Option<Instant>,
    error: Option<String>,
    /// Formats a message about the stream itself as a line, with its line feed.
    tell: fn(&str) -> String,
}

/// Output that is being dropped.
#[derive(Debug)]
struct Gap {
    bytes: u64,
    lines: u64,
    reason: String,
}

/// Why something could not be written.
#[derive(Debug)]
enum Refused {
    Quota,
    Error(io::Error),
}

impl Writer {
    /// The log in `dir`, which is made. Bytes that an earlier shim left there are kept.
    pub fn open(dir: impl Into<PathBuf>, policy: LogPolicy) -> io::Result<Writer> {
        let dir = dir.into();
        fs::create_dir_all(&dir)?;
        let starts: VecDeque<u64> = starts(&dir)?.into();
        let mut writer = Writer {
            quota: policy.quota.max(2 * SMALLEST),
            // So that trimming one makes room while others are still on their way.
            segment: policy.segment.min(policy.quota / 4).max(SMALLEST),
            block: policy.block,
            end: starts.back().copied().unwrap_or(0),
            starts,
            file: None,
            reserve: None,
            at_line_start: true,
            hash: Sha256::new(),
            gap: None,
            gaps: Gaps::default(),
            retry_at: None,
            error: None,
            tell: |text| format!("[agentd: {text}]\n"),
            dir,
        };
        writer.take_over()?;
        let path = writer.dir.join("reserve");
        let reserve = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
        failpoint::hit("shim.log.prepare")?;
        reserve.write_all_at(&[b' '; RESERVE], 0)?;
        writer.reserve = Some(reserve);
        Ok(writer)
    }

    /// The same, but messages about the stream itself are formatted by `tell`.
    pub fn telling(mut self, tell: fn(&str) -> String) -> Writer {
        self.tell = tell;
        self
    }

    /// Reads the existing segments, because the hash is that of the whole stream.
    fn take_over(&mut self) -> io::Result<()> {
        if self.starts.is_empty() {
            return self.next_segment();
        }
        for start in &self.starts {
            let bytes = fs::read(path_of(&self.dir, *start))?;
            self.hash.update(&bytes);
            self.end = start + bytes.len() as u64;
            self.at_line_start = bytes.last().is_none_or(|last| *last == b'\n');
        }
        let last = self.starts.back().copied().unwrap_or(0);
        self.file = Some(OpenOptions::new().read(true).write(true).open(path_of(&self.dir, last))?);
        Ok(())
    }

    /// Length of the stream, in bytes.
    pub fn len(&self) -> u64 {
        self.end
    }

    /// Nothing was written yet.
    pub fn is_empty(&self) -> bool {
        self.end == 0
    }

    /// What was dropped, gaps that are still open included.
    pub fn gaps(&self) -> Gaps {
        let mut gaps = self.gaps;
        if let Some(gap) = &self.gap {
            gaps.count += 1;
            gaps.bytes += gap.bytes;
            gaps.lines += gap.lines;
        }
        gaps
    }

    /// The first reason why output could not be written or made durable.
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// SHA-256 of the whole stream, in lower-case hexadecimal.
    pub fn sha256(&self) -> String {
        agent_model::ids::hex(&self.hash.clone().finalize())
    }

    /// Appends as much of `data` as can be. The rest is dropped and counted, unless the policy is to wait for
    /// room: then it is not taken. Returns how much was taken.
    pub fn append(&mut self, data: &[u8], now: Instant) -> usize {
        if self.gap.is_some() && !self.has_room_again(now) {
            self.skip(data);
            return data.len();
        }
        let mut taken = 0;
        while taken < data.len() {
            match self.put(&data[taken..]) {
                Ok(count) => taken += count,
                Err(refused) => {
                    self.retry_at = matches!(refused, Refused::Error(_)).then(|| now + RETRY);
                    if self.block {
                        return taken;
                    }
                    let reason = self.reason(&refused);
                    self.error.get_or_insert_with(|| reason.clone());
                    self.gap = Some(Gap { bytes: 0, lines: 0, reason });
                    self.skip(&data[taken..]);
                    return data.len();
                }
            }
        }
        taken
    }

    /// Appends a message about the stream itself.
    pub fn note(&mut self, text: &str, now: Instant) {
        let line = self.line(text);
        self.append(line.as_bytes(), now);
    }

    /// The last byte is a line feed, or there is none.
    pub fn is_at_line_start(&self) -> bool {
        self.at_line_start
    }

    /// From now on bytes that cannot be appended are dropped, whatever the policy.
    pub fn wait_no_more(&mut self) {
        self.block = false;
    }

    /// Whether [`append`](Self::append) would rather wait than take a byte for want of quota.
    pub fn must_wait(&mut self) -> bool {
        self.block && self.room() == 0
    }

    /// Ends the stream: an open gap is reported in it, in room that was reserved for that.
    pub fn finish(&mut self) {
        if let Some(gap) = self.gap.take() {
            let line = self.gap_line(&gap);
            let told = self
                .put_line(&line)
                .or_else(|_| self.next_segment().and_then(|()| self.put_line(&line)))
                .or_else(|_| self.use_reserve(&line));
            if let Err(error) = told {
                self.error.get_or_insert_with(|| error.to_string());
            }
            self.close(gap);
        }
        self.reserve = None;
        let _ = fs::remove_file(self.dir.join("reserve")); // it may have become a segment
    }

    /// Makes the log durable. An error is final for its file: the system does not write later what it has
    /// dropped, and another flush would only report success. An empty one has nothing that a power cut could take.
    pub fn sync(&mut self) {
        if self.is_empty() {
            return;
        }
        if let Err(error) = self.keep_name() {
            self.error.get_or_insert_with(|| error.to_string());
        }
        self.forget_trimmed();
        let force = |start: &u64| -> io::Result<()> {
            failpoint::hit("shim.log.sync")?;
            match File::open(path_of(&self.dir, *start)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()), // trimmed just now
                file => file?.sync_all(),
            }
        };
        let forced: io::Result<()> = self.starts.iter().map(force).fold(Ok(()), Result::and).and_then(|()| {
            failpoint::hit("shim.log.sync")?;
            agent_fs::flush_directory(&self.dir)
        });
        if let Err(error) = forced {
            self.error.get_or_insert_with(|| error.to_string());
        }
    }

    /// Appends a part of `data`, at least one byte.
    fn put(&mut self, data: &[u8]) -> Result<usize, Refused> {
        let room = self.room();
        if room == 0 {
            return Err(Refused::Quota);
        }
        self.keep_name().map_err(Refused::Error)?;
        let start = self.starts.back().copied().unwrap_or(0);
        if self.file.is_none() || self.end - start >= self.segment {
            self.next_segment().map_err(Refused::Error)?;
        }
        let start = self.starts.back().copied().unwrap_or(0);
        let left = (self.segment.saturating_sub(self.end - start)).max(1).min(room);
        let part = &data[..data.len().min(usize::try_from(left).unwrap_or(usize::MAX))];
        let written = self.write(part, self.end - start).map_err(|error| {
            self.give_up_file(&error);
            Refused::Error(error)
        })?;
        self.took(&part[..written]);
        Ok(written)
    }

    /// Writes the file that grows again if somebody removed it: nobody else can open what is only here.
    pub fn keep_name(&mut self) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        if file.metadata()?.nlink() > 0 {
            return Ok(());
        }
        let start = self.starts.back().copied().unwrap_or(0);
        failpoint::hit("shim.log.again")?;
        fs::create_dir_all(&self.dir)?;
        let again = new_file().open(path_of(&self.dir, start))?;
        let mut block = vec![0; 256 << 10];
        let mut at = 0;
        while at < self.end - start {
            match file.read_at(&mut block, at)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => again.write_all_at(&block[..count], at)?,
            }
            at = again.metadata()?.len();
        }
        self.file = Some(again);
        Ok(())
    }

    /// One write, which may be short.
    fn write(&self, part: &[u8], at: u64) -> io::Result<usize> {
        let Some(file) = &self.file else { return Err(io::ErrorKind::NotFound.into()) };
        loop {
            match failpoint::hit("shim.log.write").and_then(|()| file.write_at(part, at)) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    fn took(&mut self, part: &[u8]) {
        self.hash.update(part);
        self.end += part.len() as u64;
        if let Some(last) = part.last() {
            self.at_line_start = *last == b'\n';
        }
    }

    /// A file whose disk is full takes more when there is room again. One that failed otherwise may fail for
    /// ever, so the next bytes are written to another.
    fn give_up_file(&mut self, error: &io::Error) {
        let start = self.starts.back().copied().unwrap_or(0);
        if let Some(file) = &self.file {
            let _ = file.set_len(self.end - start); // of no weight: readers stop at the end they are told
        }
        if !agent_fs::is_full(error) {
            self.file = None;
        }
    }

    /// Begins a segment at the end of the stream.
    fn next_segment(&mut self) -> io::Result<()> {
        failpoint::hit("shim.log.open")?;
        let path = path_of(&self.dir, self.end);
        if self.starts.back() == Some(&self.end) {
            fs::remove_file(&path).or_else(unless_missing)?; // empty, and refuses to be written
        }
        self.file = Some(new_file().open(path)?);
        if self.starts.back() != Some(&self.end) {
            self.starts.push_back(self.end);
        }
        Ok(())
    }

    /// Bytes that the quota has room for.
    fn room(&mut self) -> u64 {
        let room = self.room_known();
        if room > 0 {
            return room;
        }
        self.forget_trimmed();
        self.room_known()
    }

    fn room_known(&self) -> u64 {
        let oldest = self.starts.front().copied().unwrap_or(self.end);
        self.quota.saturating_sub(self.end - oldest)
    }

    /// The daemon trims from the oldest on.
    fn forget_trimmed(&mut self) {
        while self.starts.len() > 1
            && self.starts.front().is_some_and(|start| !path_of(&self.dir, *start).exists())
        {
            self.starts.pop_front();
        }
    }

    fn skip(&mut self, data: &[u8]) {
        if let Some(gap) = &mut self.gap {
            gap.bytes += data.len() as u64;
            gap.lines += data.iter().filter(|byte| **byte == b'\n').count() as u64;
        }
    }

    /// Whether the gap is over, and was reported in the stream.
    fn has_room_again(&mut self, now: Instant) -> bool {
        let wait = self
            .retry_at
            .is_some_and(|at| now < at || statvfs(&self.dir).is_ok_and(|disk| free_bytes(&disk) < WORTH_IT));
        if wait || self.room() < RESERVE as u64 {
            return false;
        }
        let Some(gap) = self.gap.take() else { return true };
        let line = self.gap_line(&gap);
        let ready = if self.file.is_none() { self.next_segment() } else { Ok(()) };
        match ready.and_then(|()| self.put_line(&line)) {
            Ok(()) => {
                self.close(gap);
                self.retry_at = None;
                true
            }
            Err(_) => {
                self.gap = Some(gap);
                self.retry_at = Some(now + RETRY);
                false
            }
        }
    }

    fn close(&mut self, gap: Gap) {
        self.gaps.count += 1;
        self.gaps.bytes += gap.bytes;
        self.gaps.lines += gap.lines;
    }

    fn gap_line(&self, gap: &Gap) -> String {
        let Gap { bytes, lines, reason } = gap;
        self.line(&format!(
            "{}, {} of output were dropped here: {reason}",
            count(*bytes, "byte"),
            count(*lines, "line")
        ))
    }

    fn line(&self, text: &str) -> String {
        let begin = if self.at_line_start { "" } else { "\n" };
        format!("{begin}{}", (self.tell)(text))
    }

    /// Appends a whole line or nothing.
    fn put_line(&mut self, line: &str) -> io::Result<()> {
        let start = self.starts.back().copied().unwrap_or(0);
        let mut written = 0;
        while written < line.len() {
            let at = self.end - start + written as u64;
            match self.write(&line.as_bytes()[written..], at) {
                Ok(count) => written += count,
                Err(error) => {
                    self.give_up_file(&error);
                    return Err(error);
                }
            }
        }
        self.took(line.as_bytes());
        Ok(())
    }

    /// Makes the reserve the next segment, with nothing but `line` in it.
    fn use_reserve(&mut self, line: &str) -> io::Result<()> {
        let Some(reserve) = &self.reserve else { return Err(io::ErrorKind::NotFound.into()) };
        failpoint::hit("shim.log.reserve")?;
        let line = &line[..line.len().min(RESERVE)];
        reserve.write_all_at(line.as_bytes(), 0)?;
        reserve.set_len(line.len() as u64)?;
        fs::rename(self.dir.join("reserve"), path_of(&self.dir, self.end))?;
        if self.starts.back() != Some(&self.end) {
            self.starts.push_back(self.end);
        }
        self.file = self.reserve.take();
        self.took(line.as_bytes());
        Ok(())
    }

    fn reason(&self, refused: &Refused) -> String {
        match refused {
            Refused::Quota => format!("its quota of {} was full", size::binary(self.quota)),
            Refused::Error(error) => error.to_string(),
        }
    }
}

/// How the file of a segment is made.
fn new_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).mode(0o600);
    options.custom_flags(OFlag::O_NOFOLLOW.bits());
    options
}

fn free_bytes(disk: &nix::sys::statvfs::Statvfs) -> u64 {
    disk.blocks_available().saturating_mul(disk.fragment_size())
}

fn unless_missing(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}
