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

/// How long the job must write nothing before bytes with which a secret may begin are written. Who follows the log
/// sees such bytes that much later; a secret that is printed with longer pauses is hidden from the pause on only.
const PAUSE: Duration = Duration::from_secs(1);

/// The pipe and the log.
#[derive(Debug)]
pub(crate) struct JobLog {
    writer: Writer,
    output: Option<File>,
    roomy: bool,
    buffer: Vec<u8>,
    /// The part of the buffer that was read and waits for room.
    held: Range<usize>,
    /// Bytes after it with which a secret may begin: fewer than the longest one has. Here they are as they were read.
    open: usize,
    /// How many of them were written, after a pause. If there are any, nothing is held.
    told: usize,
    /// When the others are written too.
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
            told: 0,
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

    /// Writes its file again if somebody removed it.
    pub(crate) fn keep_name(&mut self) -> io::Result<()> {
        self.writer.keep_name()
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
        let open = self.open;
        let moved = self.move_some(TURN);
        match self.open_until {
            Some(at) if moved == 0 && self.open == open => {
                if at <= now {
                    self.tell_open(now);
                }
            }
            _ => self.open_until = (self.open > self.told).then(|| now + PAUSE),
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
                    let settled = self.mask.hide(&mut self.buffer[..length], false);
                    self.open = length - settled;
                    let told = self.told.min(settled);
                    self.told -= told;
                    self.held = told..settled;
                    moved += self.put_held();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break, // nothing there
            }
        }
        moved
    }

    /// Writes the bytes with which a secret may begin, as far as it is decided what is hidden in them, but keeps what
    /// they were: when the rest of the secret comes, at least that is hidden.
    fn tell_open(&mut self, now: Instant) {
        if self.held.is_empty() {
            let mut text = self.buffer[self.held.end..][..self.open].to_vec();
            self.mask.hide(&mut text, true);
            self.told += self.writer.append(&text[self.told..], now);
        }
        self.open_until = (self.told < self.open).then(|| now + LOOK);
    }

    /// Takes the bytes with which a secret may begin as they are: nothing comes after them.
    fn settle(&mut self) -> usize {
        let end = self.held.end + std::mem::take(&mut self.open);
        self.mask.hide(&mut self.buffer[self.held.end..end], true);
        self.held.start += std::mem::take(&mut self.told);
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

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use agent_shim::LogPolicy;
    use nix::fcntl::OFlag;
    use proptest::prelude::*;

    use super::*;

    /// What is in the log after the job wrote each piece and then nothing for so many milliseconds.
    fn written(secrets: &[&str], pieces: &[(&str, u64)]) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let policy = LogPolicy { quota: 1 << 20, segment: 1 << 20, block: false };
        let mut log = JobLog::new(Writer::open(dir.path(), policy).unwrap());
        let (output, input) = nix::unistd::pipe2(OFlag::O_NONBLOCK).unwrap();
        let mut input = File::from(input);
        log.connect(Started { pid: 0, output, capacity: 0 }, Mask::of(secrets.iter().copied()));
        let text = || std::fs::read_to_string(dir.path().join(format!("{:020}.seg", 0))).unwrap();
        let mut now = Instant::now();
        let mut texts = Vec::new();
        for (piece, pause) in pieces {
            input.write_all(piece.as_bytes()).unwrap();
            log.pump(now);
            now += Duration::from_millis(*pause);
            if log.is_due(now) {
                log.pump(now);
            }
            texts.push(text());
        }
        drop(input);
        log.drain();
        texts.push(text());
        texts
    }

    #[test]
    fn test_a_secret_is_hidden_when_it_is_printed_with_pauses() {
        let slow: Vec<(&str, u64)> = ["h", "u", "n", "t", "e", "r", "2", "2"].map(|byte| (byte, 999)).into();
        let texts = written(&["hunter22"], &slow);
        assert_eq!(texts.last().unwrap(), "********");
        assert!(texts[..7].iter().all(String::is_empty), "{texts:?}");
        assert_eq!(
            written(&["hunter22"], &[("key hunt", 900), ("er22\n", 0)]),
            ["key ", "key ********\n", "key ********\n"]
        );
    }

    #[test]
    fn test_after_a_longer_pause_what_is_decided_is_written_and_the_rest_of_a_secret_hidden() {
        // One of them begins with the other, so what is the shorter one is not decided by its last byte.
        for (pieces, expected) in [
            (&[("key hunt", 1000), ("er22.", 0)][..], &["key hunt", "key hunt****.", "key hunt****."][..]),
            (&[("hunt", 1000), ("ing", 0)], &["hunt", "hunting", "hunting"]),
            (&[("hunt", 1000), ("er", 0), ("22", 0)], &["hunt", "hunt", "hunt", "hunt****"]),
            (&[("hunt", 1000), ("er", 1000), ("22", 0)], &["hunt", "hunter", "hunter", "hunter**"]),
            (&[("hunt", 1000), ("hunter22", 0)], &["hunt", "hunt", "hunt********"]),
            (&[("hunter22-lon", 1000), ("ger", 0)], &["********-lon", "********-lon***", "********-lon***"]),
            (&[("hunt", 1000), ("er", 0)], &["hunt", "hunt", "hunter"]),
        ] {
            assert_eq!(written(&["hunter22", "hunter22-longer"], pieces), expected, "{pieces:?}");
        }
    }

    proptest! {
        #[test]
        fn test_every_byte_is_written_once_and_no_secret_stands_whole_whatever_the_pauses(
            pieces in prop::collection::vec(("[ab ]{0,9}", 0..1500_u64), 0..9),
            secrets in prop::collection::vec("[ab]{4,7}", 0..4),
        ) {
            let secrets: Vec<&str> = secrets.iter().map(String::as_str).collect();
            let pieces: Vec<(&str, u64)> = pieces.iter().map(|(piece, pause)| (piece.as_str(), *pause)).collect();
            let texts = written(&secrets, &pieces);
            let produced: String = pieces.iter().map(|(piece, _)| *piece).collect();
            let last = texts.last().unwrap();
            prop_assert_eq!(last.len(), produced.len());
            prop_assert!(last.chars().zip(produced.chars()).all(|(is, was)| is == was || is == '*'), "{}", last);
            prop_assert!(secrets.iter().all(|secret| !last.contains(secret)), "{}", last);
            prop_assert!(texts.windows(2).all(|pair| pair[1].starts_with(&pair[0])), "{:?}", texts);
        }
    }
}
