//! The output of the job on its way into the log, byte for byte. The job never waits for anybody but the
//! disk, and for that only while the pipe is full. What cannot be written is counted and dropped: a full
//! disk never stops the job.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use crate::job::Started;

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

/// The pipe and the log.
#[derive(Debug)]
pub(crate) struct JobLog {
    file: File,
    bytes: u64,
    dropped: u64,
    error: Option<String>,
    output: Option<File>,
    roomy: bool,
    buffer: Vec<u8>,
    last: Option<Instant>,
    resume_at: Option<Instant>,
}

impl JobLog {
    /// A log that holds `bytes` bytes already.
    pub(crate) fn new(bytes: u64, file: File) -> JobLog {
        JobLog {
            file,
            bytes,
            dropped: 0,
            error: None,
            output: None,
            roomy: false,
            buffer: vec![0; BUFFER],
            last: None,
            resume_at: None,
        }
    }

    /// Takes the output of a command.
    pub(crate) fn connect(&mut self, started: Started) {
        self.roomy = started.capacity >= ROOMY;
        self.output = Some(File::from(started.output));
    }

    /// Length of the log, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that could not be written.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The first error met.
    pub(crate) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// What to wait for: the pipe, or a time at which to look at it again.
    pub(crate) fn interest(&self, now: Instant) -> (Option<BorrowedFd<'_>>, Option<Instant>) {
        match (&self.output, self.resume_at) {
            (None, _) => (None, None),
            (Some(_), Some(at)) if at > now => (None, Some(at)),
            (Some(output), _) => (Some(output.as_fd()), None),
        }
    }

    /// Moves what is there.
    pub(crate) fn pump(&mut self, now: Instant) {
        let moved = self.move_some(TURN);
        let small_and_quick =
            moved < self.buffer.len() / 2 && self.last.is_some_and(|last| now - last < 2 * ROUND);
        self.resume_at = (self.roomy && small_and_quick).then(|| now + ROUND);
        self.last = Some(now);
    }

    /// Moves everything that the job's processes, all gone by now, have written.
    pub(crate) fn drain(&mut self) {
        let deadline = Instant::now() + DRAIN;
        while self.move_some(TURN) > 0 && Instant::now() < deadline {}
        self.output = None;
    }

    /// Makes the log durable. An error is final: what the system has dropped it will not write later.
    pub(crate) fn sync(&mut self) {
        if let Err(error) = self.file.sync_all() {
            self.fail(&error);
        }
    }

    /// Moves up to about `most` bytes; 0 when there is nothing now.
    fn move_some(&mut self, most: usize) -> usize {
        let mut moved = 0;
        while moved < most
            && let Some(output) = &mut self.output
        {
            match output.read(&mut self.buffer) {
                Ok(0) => self.output = None,
                Ok(length) => {
                    moved += length;
                    self.write(length);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break, // nothing there
            }
        }
        moved
    }

    fn write(&mut self, length: usize) {
        let mut written = 0;
        while written < length {
            match self.file.write(&self.buffer[written..length]) {
                Ok(0) => return self.drop_rest(length - written, &io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    written += count;
                    self.bytes += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return self.drop_rest(length - written, &error),
            }
        }
    }

    fn drop_rest(&mut self, length: usize, error: &io::Error) {
        self.dropped += length as u64;
        self.fail(error);
    }

    fn fail(&mut self, error: &io::Error) {
        self.error.get_or_insert_with(|| error.to_string());
    }
}
