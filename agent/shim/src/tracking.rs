//! The tracking records of a job on their way from the file that the job writes into a stream that only grows.
//!
//! Owns that stream: segments like those of the job's log, but kept until the job directory is removed. Invariants:
//! every byte of it keeps its offset; where the file was replaced or cut, the stream has a record that reports it;
//! no more than a quota is kept, and the stream reports what is missing. See [`crate::source`] for what counts as
//! replaced.

use std::io;
use std::time::{Duration, Instant};

use agent_model::size;
use agent_model::tracking::{TrackingLine, TrackingRecord};

use crate::segments::{Reader, Writer};
use crate::source::{Piece, Source};
use crate::{JobDir, LogPolicy};

/// The quota of records is that of the job's log, divided by this.
const PART: u64 = 4;

/// How long the rest is read once nobody writes any more. Longer than any disk takes for the quota.
const REST: Duration = Duration::from_secs(60);

/// A larger hole is reported: somebody may look for its content.
const LARGE_HOLE: u64 = 1 << 20;

/// File and stream. See the module.
#[derive(Debug)]
pub struct Intake {
    source: Source,
    stream: Writer,
    error: Option<String>,
}

impl Intake {
    /// Continues where an earlier one stopped. `policy` is that of the job's log.
    pub fn open(dir: &JobDir, policy: LogPolicy) -> io::Result<Intake> {
        let policy = LogPolicy { quota: policy.quota / PART, block: false, ..policy };
        let stream = Writer::open(dir.tracking_stream(), policy)?.telling(note);
        let tail_from = stream.len().saturating_sub(4096);
        let mut tail = vec![0; usize::try_from(stream.len() - tail_from).unwrap_or_default()];
        let count = Reader::of_tracking(dir)?.read_at(tail_from, &mut tail)?;
        tail.truncate(count);
        let source = Source::new(dir.tracking(), stream.len(), tail);
        Ok(Intake { source, stream, error: None })
    }

    /// Writes the stream's file again if somebody removed it.
    pub fn keep_name(&mut self) -> io::Result<()> {
        self.stream.keep_name()
    }

    /// Length of the stream, in bytes.
    pub fn bytes(&self) -> u64 {
        self.stream.len()
    }

    /// What is not in it, or `None` if everything is.
    pub fn error(&self) -> Option<String> {
        let gaps = self.stream.gaps();
        let dropped = (gaps.bytes > 0).then(|| format!("{} are missing", size::binary(gaps.bytes)));
        let why = self.stream.error().or(self.error.as_deref()).map(str::to_owned);
        match (dropped, why) {
            (Some(dropped), Some(why)) => Some(format!("{dropped}: {why}")),
            (dropped, why) => dropped.or(why),
        }
    }

    /// When to take again even if no change is reported.
    pub fn due(&self) -> Option<Instant> {
        self.source.due()
    }

    /// Takes new records; returns whether there is more to be taken at once.
    pub fn take(&mut self, now: Instant) -> bool {
        self.take_at(Some(now))
    }

    /// Takes the rest, now that nobody writes any more. May be repeated after its time was over.
    pub fn take_rest(&mut self) {
        let deadline = Instant::now() + REST;
        while self.take_at(None) {
            if Instant::now() >= deadline {
                self.error.get_or_insert_with(|| format!("the rest could not be read within {REST:?}"));
                break;
            }
        }
    }

    /// Takes the rest and ends the stream.
    pub fn finish(&mut self) {
        self.take_rest();
        if !self.stream.is_at_line_start() {
            self.stream.append(b"\n", Instant::now());
        }
        self.stream.finish();
        self.stream.sync();
    }

    fn take_at(&mut self, at: Option<Instant>) -> bool {
        let (stream, now) = (&mut self.stream, at.unwrap_or_else(Instant::now));
        let read = self.source.read(at, |piece| match piece {
            Piece::Bytes(bytes) => {
                stream.append(bytes, now);
            }
            Piece::Hole(bytes) if bytes < LARGE_HOLE => {}
            Piece::Hole(bytes) => {
                stream.note(&format!("a hole of {} was left out of the file here", size::binary(bytes)), now);
            }
            Piece::Restart => {
                stream.note("the file was replaced or cut here; what follows was written after", now)
            }
            Piece::Strange(what) => {
                stream.note(&format!("{what} stands in the place of the file; it is not read"), now);
            }
        });
        read.unwrap_or_else(|error| {
            self.error.get_or_insert_with(|| format!("the file cannot be read: {error}"));
            false
        })
    }
}

fn note(text: &str) -> String {
    TrackingLine::from(TrackingRecord::Note { note: text.to_owned() }).to_line()
}

#[cfg(test)]
mod tests;
