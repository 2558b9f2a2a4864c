//! The output of the job on its way into the log, byte for byte but for the values of secrets. The job waits for
//! nothing but the disk, and for that only while the pipe is full. Output without room is counted and dropped, unless
//! the job asked to wait instead.

use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use agent_shim::Gaps;
use agent_shim::segments::Writer;

use crate::job::Started;
use crate::mask::Mask;

/// How much is read at once, in bytes. Only as much of the buffer as was ever used is in memory.
const BUFFER: usize = 256 << 10;

/// How much is moved before others get their turn, in bytes.
const TURN: usize = 4 << 20;

/// A job that writes many small pieces is read in rounds of this length. Waking up for each piece would
/// slow both down many times.
const ROUND: Duration = Duration::from_millis(1);

/// A pipe must hold at least this much for the job not to feel those rounds, in bytes.
const ROOMY: usize = 512 << 10;

/// How long output that never ends may come from processes that are not the job's.
const DRAIN: Duration = Duration::from_secs(2);

/// How often room is looked for while the job waits for some.
const LOOK: Duration = Duration::from_millis(100);

/// The pipe and the log.
#[derive(Debug)]
pub(crate) struct JobLog {
    writer: Writer,
    output: Option<File>,
    roomy: bool,
    buffer: Vec<u8>,
    /// The part of the buffer that was read and waits for room.
    held: Range<usize>,
    /// Bytes after it with which a secret may begin.
    open: usize,
    /// When they are taken as they are.
    open_until: Option<Instant>,
    mask: Mask,
    last: Option<Instant>,
    resume_at: Option<Instant>,
}

impl JobLog {
    /// Into `writer`.
    pub(crate) fn new(writer: Writer) -> JobLog {
        JobLog {
            writer,
            output: None,
            roomy: false,
            buffer: vec![0; BUFFER],
            held: 0..0,
            open: 0,
            open_until: None,
            mask: Mask::default(),
            last: None,
            resume_at: None,
        }
    }

    /// Takes the output of a command, in which `mask` hides the secrets.
    pub(crate) fn connect(&mut self, started: Started, mask: Mask) {
        self.mask = mask;
        self.roomy = started.capacity >= ROOMY;
        self.output = Some(File::from(started.output));
    }

    /// Length of the log, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.writer.len()
    }

    /// It ends within a line.
    pub(crate) fn is_in_line(&self) -> bool {
        !self.writer.is_at_line_start()
    }

    /// What was dropped.
    pub(crate) fn gaps(&self) -> Gaps {
        self.writer.gaps()
    }

    /// The first error met.
    pub(crate) fn error(&self) -> Option<&str> {
        self.writer.error()
    }

    /// SHA-256 of the log, in lower-case hexadecimal.
    pub(crate) fn sha256(&self) -> String {
        self.writer.sha256()
    }

    /// What to wait for: the pipe, or a time at which to look at it again.
    pub(crate) fn interest(&self, now: Instant) -> (Option<BorrowedFd<'_>>, Option<Instant>) {
        match (&self.output, self.resume_at) {
            (None, _) => (None, None),
            (Some(_), Some(at)) if at > now => (None, Some(at)),
            (Some(output), _) => (Some(output.as_fd()), self.open_until),
        }
    }

    /// Whether to move something even though the pipe is not ready.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let waited = self.open_until.is_some_and(|at| at <= now);
        (waited || !self.held.is_empty()) && self.resume_at.is_none_or(|at| at <= now)
    }

    /// Moves the available output.
    pub(crate) fn pump(&mut self, now: Instant) {
        let moved = self.move_some(TURN);
        match self.open_until {
            Some(at) if moved == 0 && at <= now => {
                self.settle();
            }
            Some(_) if moved == 0 => {}
            _ => self.open_until = (self.open > 0).then(|| now + LOOK),
        }
        let small_and_quick =
            moved < self.buffer.len() / 2 && self.last.is_some_and(|last| now - last < 2 * ROUND);
        self.resume_at = (self.roomy && small_and_quick).then(|| now + ROUND);
        if !self.held.is_empty() || self.writer.must_wait() {
            self.resume_at = Some(now + LOOK);
        }
        self.last = Some(now);
    }

    /// Moves everything that the job's processes, all gone by now, have written, and ends the log.
    pub(crate) fn drain(&mut self) {
        self.writer.wait_no_more();
        let deadline = Instant::now() + DRAIN;
        while self.move_some(TURN) > 0 && Instant::now() < deadline {}
        self.settle();
        self.output = None;
        self.writer.finish();
    }

    /// Makes the log durable.
    pub(crate) fn sync(&mut self) {
        self.writer.sync();
    }

    /// Moves up to about `most` bytes; 0 when there is nothing now.
    fn move_some(&mut self, most: usize) -> usize {
        let mut moved = self.put_held();
        while moved < most
            && self.held.is_empty()
            && !self.writer.must_wait()
            && let Some(output) = &mut self.output
        {
            self.buffer.copy_within(self.held.end..self.held.end + self.open, 0);
            self.held = 0..0;
            match output.read(&mut self.buffer[self.open..]) {
                Ok(0) => {
                    self.output = None;
                    moved += self.settle();
                }
                Ok(length) => {
                    let length = self.open + length;
                    self.held = 0..self.mask.hide(&mut self.buffer[..length], false);
                    self.open = length - self.held.end;
                    moved += self.put_held();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break, // nothing there
            }
        }
        moved
    }

    /// Takes the bytes with which a secret may begin as they are: nothing came after them.
    fn settle(&mut self) -> usize {
        let end = self.held.end + std::mem::take(&mut self.open);
        self.mask.hide(&mut self.buffer[self.held.end..end], true);
        self.held.end = end;
        self.open_until = None;
        self.put_held()
    }

    fn put_held(&mut self) -> usize {
        let taken = self.writer.append(&self.buffer[self.held.clone()], Instant::now());
        self.held.start += taken;
        taken
    }
}
