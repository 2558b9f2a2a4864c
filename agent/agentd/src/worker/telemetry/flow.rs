//! What to do next for one file: pure, but for the reading at the end.
//!
//! Owns how far the hub is with a file on this connection.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use agent_model::protocol::log::unsent;
use agent_model::{ReplicaId, size};
use agent_runtime::exec::is_lack;
use agent_shim::JobDir;
use agent_shim::segments::Reader;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{error, warn};

use super::Content;

/// A file up to this long was never trimmed, so the controller need not be asked where to go on.
const SHORT: u64 = 4096;
/// What is stored is looked through for segments to trim whenever it has grown so much,
const TRIM_EVERY: u64 = 1 << 20;
/// and so much when there is nothing left to ship.
const TRIM_IDLE: u64 = 4096;
/// How long a file rests that the controller could not store.
const REST: Duration = Duration::from_secs(1);

/// How long a controller that answers may store nothing of a file that has ended. It tries every second; what it could
/// not do in a minute, for want of room for example, it may not be able to do for days, and nobody must wait for the
/// end of a job until then. A controller that does not answer is another matter: it is waited for.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// The same, once somebody asked for the end of the job.
pub(super) const PATIENCE_WITH_STOPPED: Duration = Duration::from_secs(10);

/// Where the bytes are.
#[derive(Debug)]
pub(super) enum FilePosition {
    /// The log of a job, which is trimmed as it is stored.
    Job(JobDir),
    /// The tracking records of a job, which stay: what a run recorded is asked for here too.
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
    /// Nothing more of it is sent, for this reason.
    pub(super) given_up: Option<String>,
}

/// What runner and hub both know about a file.
#[derive(Debug)]
pub(super) struct Feed {
    pub(super) replica: ReplicaId,
    pub(super) content: Content,
    pub(super) place: FilePosition,
    pub(super) reader: Mutex<Option<Reader>>,
    /// How much of the file may be shipped.
    pub(super) written: AtomicU64,
    /// What the controller has of it.
    pub(super) stored: watch::Sender<Stored>,
    /// For how long the controller may answer and store nothing, in milliseconds, before the file is given up.
    pub(super) patience: AtomicU64,
    /// The controller said that it lacks what it had acknowledged.
    pub(super) doubted: AtomicBool,
    /// Nobody will raise `written` any more.
    pub(super) closed: AtomicBool,
}

impl Feed {
    pub(super) fn new(replica: ReplicaId, content: Content, place: FilePosition) -> Feed {
        Feed {
            replica,
            content,
            place,
            reader: Mutex::new(None),
            written: AtomicU64::new(0),
            stored: watch::Sender::new(Stored::default()),
            patience: AtomicU64::new(u64::MAX),
            doubted: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    /// Nothing more of it is sent. The first reason stays.
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

    fn read(&self, offset: u64, length: u64) -> io::Result<Read> {
        let mut data = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
        self.with_reader(|reader| {
            if reader.start() <= offset {
                let count = reader.read_at(offset, &mut data);
                if reader.start() <= offset {
                    data.truncate(count?);
                    return Ok(Read::Data(data));
                }
            }
            Ok(Read::Trimmed(reader.start()))
        })
    }

    fn trim(&self, stored: u64) -> io::Result<()> {
        agent_model::failpoint::hit("node.log.trim")?;
        self.with_reader(|reader| reader.trim_below(stored)).map(drop)
    }
}

enum Read {
    Data(Vec<u8>),
    /// It begins only here.
    Trimmed(u64),
}

/// How far the hub is with a file.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) feed: Arc<Feed>,
    /// Where the next chunk begins; unknown until the controller said so on this connection.
    pub(super) next: Option<u64>,
    /// Bytes on their way.
    pub(super) in_flight: u64,
    /// Requests on their way.
    pub(super) pending: usize,
    /// Nothing is sent until every request on its way is answered: the controller is asked, or was ahead of
    /// or behind what was thought.
    settling: bool,
    /// The controller could not store it; not before this time again.
    resting: Option<Instant>,
    /// For how long it has stored nothing since the file ended, although it answered; and when it said so last on this
    /// connection.
    failing: (Duration, Option<Instant>),
    /// How much was stored when segments to trim were looked for.
    trimmed_at: u64,
}

/// What the connection lets through now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Allowance {
    /// Bytes of all files.
    pub(super) budget: u64,
    /// Bytes of one request.
    pub(super) chunk: u64,
    /// Bytes of one file on their way.
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

    /// A new connection knows nothing.
    pub(super) fn reconnect(&mut self) {
        (self.next, self.in_flight, self.pending, self.settling) = (None, 0, 0, false);
        self.failing.1 = None; // it did not answer meanwhile
    }

    /// When it is worth looking at again although nothing happens.
    pub(super) fn resting(&self) -> Option<Instant> {
        self.resting.filter(|_| self.is_behind())
    }

    /// What to do next: `None` is nothing now.
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
                self.next = Some(0); // sending is asking: what is there already is trimmed
                return self.plan(allowed, now);
            }
            self.settling = true;
            return Some(FlowRequest::Ask);
        };
        let unsent = unsent(next, written, allowed.chunk.min(allowed.budget));
        let length = unsent.map_or(0, |range| range.end - range.start);
        // The first bytes go at once; while they are being stored, what comes after them gathers.
        let worth_it = length == allowed.chunk || (length > 0 && self.pending == 0);
        worth_it.then_some(FlowRequest::Send { offset: next, length })
    }

    /// The controller has `stored` bytes, after a request of `bytes` that ended at `expected`.
    pub(super) fn answered(&mut self, bytes: u64, expected: u64, stored: u64) {
        self.arrived(bytes);
        if bytes > 0 && stored == expected - bytes {
            self.has(stored);
            // It was offered just what comes next, and did not take it.
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

    /// It comes no further now: it is tried again after a rest, and given up when that has been so for too long.
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
        tokio::task::spawn_blocking(move || {
            if let Err(error) = feed.trim(stored) {
                warn!(replica = %feed.replica, %error, "cannot trim stored log");
            }
        });
    }

    /// A part of the file; `None` when it cannot be read now, or is not there, which is said once by giving the file
    /// up.
    pub(super) async fn read(&mut self, offset: u64, length: u64) -> Option<Vec<u8>> {
        let feed = self.feed.clone();
        let reading = tokio::task::spawn_blocking(move || {
            agent_model::failpoint::hit("node.log.read")?;
            feed.read(offset, length)
        });
        let why = match reading.await.map_err(io::Error::other).flatten() {
            Ok(Read::Data(data)) if !data.is_empty() => return Some(data),
            Ok(Read::Data(_)) => format!("the node has no more than {}", size::binary(offset)),
            Ok(Read::Trimmed(start)) => {
                format!("{} are gone that the controller had acknowledged", size::binary(start - offset))
            }
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
