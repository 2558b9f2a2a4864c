//! Decides what to do next for one file; pure, except for reading and trimming the file.
//!
//! Owns the progress of the hub with a file on this connection.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use agent_model::protocol::log::unsent;
use agent_model::{Channel, ReplicaId, failpoint, size};
use agent_shim::JobDir;
use agent_shim::is_lack;
use agent_shim::segments::Reader;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{error, warn};

/// A file up to this length was never trimmed, so shipping starts at 0 without asking the controller.
const SHORT: u64 = 4096;
/// Segments to trim are looked for whenever the stored part has grown by this much,
const TRIM_EVERY: u64 = 1 << 20;
/// and by this much when there is nothing left to ship.
const TRIM_IDLE: u64 = 4096;
/// No more than this is read between other work, in bytes.
const LINES: usize = 256 << 10;
/// So many requests of a file may be in flight before small ones are collected.
const FEW: usize = 8;
/// The pause of a file after the controller could not store it.
const REST: Duration = Duration::from_secs(1);

/// How long a controller that answers may store nothing of a file that has ended. The node tries every second; a
/// failure that lasts a minute, for lack of room for example, may last days, and nobody must wait that long for the
/// end of a job. A controller that does not answer is different: it is waited for.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// The same, after somebody asked for the end of the job.
pub(super) const PATIENCE_WITH_STOPPED: Duration = Duration::from_secs(10);

/// Where the bytes of a file are.
#[derive(Debug)]
pub(super) enum FilePosition {
    /// The log of a job; stored segments are trimmed.
    Job(JobDir),
    /// The tracking records of a job, which are kept: they are also read on this node.
    Tracking(JobDir),
    /// A file.
    Plain(PathBuf),
}

impl FilePosition {
    fn open(&self) -> io::Result<Reader> {
        match self {
            FilePosition::Job(dir) => Reader::of(dir),
            FilePosition::Tracking(dir) => Reader::of_tracking(dir),
            FilePosition::Plain(path) => Reader::plain(path),
        }
    }
}

/// What the controller has of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Stored {
    pub(super) bytes: u64,
    /// How many of them are blanks, because the node has them no more.
    pub(super) gone: u64,
    /// Nothing more of it is sent, for this reason.
    pub(super) given_up: Option<String>,
}

/// The state of a file that runner and hub share.
#[derive(Debug)]
pub(super) struct Feed {
    pub(super) replica: ReplicaId,
    pub(super) channel: Channel,
    pub(super) place: FilePosition,
    pub(super) reader: Mutex<Option<Reader>>,
    /// How much of the file may be shipped.
    pub(super) written: AtomicU64,
    /// What the controller has of it.
    pub(super) stored: watch::Sender<Stored>,
    /// How long the controller may answer and store nothing before the file is given up, in milliseconds.
    pub(super) patience: AtomicU64,
    /// The controller reported that it lacks bytes that it had acknowledged.
    pub(super) doubted: AtomicBool,
    /// `written` will not be raised any more.
    pub(super) closed: AtomicBool,
}

impl Feed {
    pub(super) fn new(replica: ReplicaId, channel: Channel, place: FilePosition) -> Feed {
        Feed {
            replica,
            channel,
            place,
            reader: Mutex::new(None),
            written: AtomicU64::new(0),
            stored: watch::Sender::new(Stored::default()),
            patience: AtomicU64::new(u64::MAX),
            doubted: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    /// Ends the shipping of the file. The first reason is kept.
    pub(super) fn give_up(&self, why: impl Into<String>) {
        self.stored.send_if_modified(|stored| {
            let first = stored.given_up.is_none();
            stored.given_up.get_or_insert_with(|| why.into());
            first
        });
    }

    fn with_reader<T>(&self, work: impl FnOnce(&mut Reader) -> io::Result<T>) -> io::Result<T> {
        let mut reader = self.reader.lock();
        let reader = match &mut *reader {
            Some(reader) => reader,
            none => none.insert(self.place.open()?),
        };
        work(reader)
    }

    /// What is gone of the file, because somebody harmed it or the controller had it once, is blanks, and counted.
    fn read(&self, offset: u64, length: u64) -> io::Result<Vec<u8>> {
        let mut data = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
        self.with_reader(|reader| {
            let count = reader.read_at(offset, &mut data)?;
            data.truncate(count);
            let gone = reader.missing();
            self.stored.send_if_modified(|stored| std::mem::replace(&mut stored.gone, gone) != gone);
            Ok(data)
        })
    }

    /// The part if it is in memory: a line that somebody waits for takes no way over another thread, and to copy a
    /// chunk takes no longer than to wake one.
    fn read_cached(&self, offset: u64, length: u64) -> Option<Vec<u8>> {
        let length = usize::try_from(length).ok().filter(|length| *length <= LINES)?;
        let reader = self.reader.try_lock()?;
        let mut data = vec![0; length];
        reader.as_ref()?.read_cached(offset, &mut data).then_some(data)
    }

    fn trim(&self, stored: u64) -> io::Result<()> {
        failpoint::hit("node.log.trim")?;
        self.with_reader(|reader| reader.trim_below(stored)).map(drop)
    }
}

/// The progress of the hub with a file.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) feed: Arc<Feed>,
    /// Where the next chunk begins; unknown until the controller answered on this connection.
    pub(super) next: Option<u64>,
    /// Bytes in flight.
    pub(super) in_flight: u64,
    /// Requests in flight.
    pub(super) pending: usize,
    /// Nothing is sent until every request in flight is answered: the controller's length was asked for, or differed
    /// from what was expected.
    settling: bool,
    /// The controller could not store it: when to try again.
    resting: Option<Instant>,
    /// How long the controller has stored nothing since the file ended, although it answered; and the last such
    /// answer on this connection.
    failing: (Duration, Option<Instant>),
    /// How much was stored when segments to trim were last looked for.
    trimmed_at: u64,
}

/// How much the connection allows to send now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Allowance {
    /// Bytes of all files.
    pub(super) budget: u64,
    /// Bytes of one request.
    pub(super) chunk: u64,
    /// Bytes of one file in flight.
    pub(super) share: u64,
}

/// What is sent next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FlowRequest {
    /// Ask what the controller has.
    Ask,
    /// Send a part of the file.
    Send { offset: u64, length: u64 },
}

impl Flow {
    pub(super) fn new(feed: Arc<Feed>) -> Flow {
        Flow {
            feed,
            next: None,
            in_flight: 0,
            pending: 0,
            settling: false,
            resting: None,
            failing: (Duration::ZERO, None),
            trimmed_at: 0,
        }
    }

    fn written(&self) -> u64 {
        self.feed.written.load(Ordering::Acquire)
    }

    pub(super) fn is_behind(&self) -> bool {
        let stored = self.feed.stored.borrow();
        let is_sent = stored.given_up.is_some() || stored.bytes >= self.written();
        !is_sent || self.feed.doubted.load(Ordering::Acquire)
    }

    /// Resets the state that belongs to a connection.
    pub(super) fn reconnect(&mut self) {
        (self.next, self.in_flight, self.pending, self.settling) = (None, 0, 0, false);
        self.failing.1 = None; // it did not answer meanwhile
    }

    /// When to try again although nothing else happens.
    pub(super) fn resting(&self) -> Option<Instant> {
        self.resting.filter(|_| self.is_behind())
    }

    /// What to do next; `None` means nothing now.
    pub(super) fn plan(&mut self, allowed: Allowance, now: Instant) -> Option<FlowRequest> {
        if self.feed.doubted.swap(false, Ordering::AcqRel) {
            (self.next, self.settling) = (None, true);
            return Some(FlowRequest::Ask);
        }
        if self.resting.is_some_and(|until| now < until) {
            return None;
        }
        self.resting = None;
        if self.settling || !self.is_behind() || (self.in_flight > 0 && self.in_flight >= allowed.share) {
            return None;
        }
        let written = self.written();
        let Some(next) = self.next else {
            if written <= SHORT {
                self.next = Some(0); // no need to ask: the answer says what it has
                return self.plan(allowed, now);
            }
            self.settling = true;
            return Some(FlowRequest::Ask);
        };
        let unsent = unsent(next, written, allowed.chunk.min(allowed.budget));
        let length = unsent.map_or(0, |range| range.end - range.start);
        // A few pieces are sent at once, so that no line waits until the one before it is forced to a disk; later ones
        // are collected.
        let worth_it = length == allowed.chunk || (length > 0 && self.pending < FEW);
        worth_it.then_some(FlowRequest::Send { offset: next, length })
    }

    /// The controller has `stored` bytes, after a request of `bytes` that ended at `expected`.
    pub(super) fn answered(&mut self, bytes: u64, expected: u64, stored: u64) {
        self.arrived(bytes);
        if bytes > 0 && stored == expected - bytes {
            self.has(stored);
            // It was sent exactly the next bytes, and did not take any.
            return self.feed.give_up(format!("it takes no more than {}", size::binary(stored)));
        }
        self.has(stored);
        if stored < expected {
            self.settling = true;
        }
        if self.pending == 0 && self.settling {
            (self.next, self.settling) = (Some(stored), false);
        }
        if self.next.is_some_and(|next| next < stored) {
            self.next = Some(stored);
        }
    }

    /// The controller could not store a request of `bytes` now.
    pub(super) fn failed(&mut self, bytes: u64, why: &str, now: Instant) {
        self.arrived(bytes);
        self.rest(why, now);
    }

    /// Pauses the file before the next try, or gives it up when it made no progress for too long.
    fn rest(&mut self, why: &str, now: Instant) {
        let patience = self.feed.patience.load(Ordering::Acquire);
        let (failing, before) = &mut self.failing;
        match before.replace(now) {
            Some(before) if patience < u64::MAX => *failing += now.saturating_duration_since(before),
            _ => {}
        }
        if failing.as_millis() >= u128::from(patience) {
            self.feed.give_up(why);
        }
        (self.next, self.settling) = (None, self.pending > 0);
        self.resting = Some(now + REST);
    }

    fn arrived(&mut self, bytes: u64) {
        self.in_flight -= bytes;
        self.pending -= 1;
    }

    fn has(&mut self, bytes: u64) {
        let known = |stored: &mut Stored| std::mem::replace(&mut stored.bytes, bytes) != bytes;
        if self.feed.stored.send_if_modified(known) {
            self.failing = (Duration::ZERO, None);
        }
    }

    /// Whether to look now for segments that are stored as a whole.
    fn should_trim(&mut self) -> Option<u64> {
        let stored = self.feed.stored.borrow().bytes;
        let step = if self.is_behind() { TRIM_EVERY } else { TRIM_IDLE };
        let due =
            matches!(self.feed.place, FilePosition::Job(_)) && stored >= self.trimmed_at.saturating_add(step);
        due.then(|| {
            self.trimmed_at = stored;
            stored
        })
    }

    /// Removes what the controller has, in the background.
    pub(super) fn trim(&mut self) {
        let Some(stored) = self.should_trim() else { return };
        let feed = self.feed.clone();
        agent_blocking::spawn_blocking(move || {
            if let Err(error) = feed.trim(stored) {
                warn!(replica = %feed.replica, %error, "cannot trim stored log");
            }
        });
    }

    /// A part of the file; `None` when it cannot be read now, or is missing, and then the file is given up.
    pub(super) async fn read(&mut self, offset: u64, length: u64) -> Option<Vec<u8>> {
        let feed = self.feed.clone();
        let read = match failpoint::hit("node.log.read") {
            Err(error) => Err(error),
            Ok(()) => match feed.read_cached(offset, length) {
                Some(data) => return Some(data),
                None => {
                    let reading = agent_blocking::spawn_blocking(move || feed.read(offset, length));
                    reading.await.map_err(io::Error::other).flatten()
                }
            },
        };
        let why = match read {
            Ok(data) if !data.is_empty() => return Some(data),
            Ok(_) => format!("the node has no more than {}", size::binary(offset)),
            Err(error) => {
                let why = format!("the node cannot read it: {error}");
                if is_lack(&error) {
                    warn!(replica = %self.feed.replica, why, "paused shipping of file");
                    self.rest(&why, Instant::now());
                    return None;
                }
                why
            }
        };
        error!(replica = %self.feed.replica, place = ?self.feed.place, offset, why, "stopped shipping of file");
        self.feed.give_up(why);
        None
    }
}

#[cfg(test)]
mod tests;
