//! How fast a connection is, measured by its traffic, and whether compression gains anything on it.
//!
//! One core compresses a few hundred megabytes per second; on a faster connection it only costs time. The system
//! is not asked: what counts is how long the batches took so far. A connection is assumed to be fast until it was
//! measured.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Compression pays below this rate, in bytes per second: a little more than a wire of 1 Gbit/s carries.
const SLOW: f64 = 150e6;

/// Bytes that a connection must have carried before its rate means something.
const ENOUGH: u64 = 1024 * 1024;

/// Traffic is counted half whenever it covers more time than this, so that newer traffic weighs more.
const MEMORY: Duration = Duration::from_secs(5);

/// What is known of a connection.
#[derive(Debug, Default)]
pub(super) struct Link {
    /// It leads to another machine, and the store there has refused or damaged no compressed blob.
    may_compress: AtomicBool,
    flow: Mutex<Flow>,
}

/// The traffic of a connection.
#[derive(Debug, Default)]
struct Flow {
    bytes: u64,
    /// For how long at least one message was in flight.
    busy: Duration,
    on_their_way: u32,
    since: Option<Instant>,
}

impl Flow {
    fn begin(&mut self, now: Instant) {
        if self.on_their_way == 0 {
            self.since = Some(now);
        }
        self.on_their_way += 1;
    }

    fn end(&mut self, now: Instant, bytes: u64) {
        // Messages overlap: time counts once for all that are in flight.
        if let Some(since) = self.since.replace(now) {
            self.busy += now.saturating_duration_since(since);
        }
        self.bytes += bytes;
        self.on_their_way = self.on_their_way.saturating_sub(1);
        while self.busy > MEMORY {
            self.busy /= 2;
            self.bytes /= 2;
        }
    }

    fn is_slow(&self) -> bool {
        self.bytes >= ENOUGH && (self.bytes as f64) < SLOW * self.busy.as_secs_f64()
    }
}

impl Link {
    /// A connection to another machine.
    pub(super) fn far() -> Link {
        Link { may_compress: AtomicBool::new(true), flow: Mutex::default() }
    }

    /// One over which much went slowly.
    #[cfg(test)]
    pub(super) fn slow() -> Link {
        let flow = Flow { bytes: 20_000_000, busy: Duration::from_secs(4), ..Flow::default() };
        Link { flow: Mutex::new(flow), ..Link::far() }
    }

    /// It is so slow that compression is worth the work.
    pub(super) fn is_worth_compression(&self) -> bool {
        self.may_compress.load(Ordering::Relaxed) && self.flow.lock().is_slow()
    }

    /// The other end cannot be trusted with compressed blobs.
    pub(super) fn give_up_compression(&self) {
        if self.may_compress.swap(false, Ordering::Relaxed) {
            tracing::warn!("sending blobs uncompressed: the remote store spoils or refuses compressed ones");
        }
    }

    /// A message is sent.
    pub(super) fn begin(&self) -> Trip<'_> {
        self.flow.lock().begin(Instant::now());
        Trip { link: self, bytes: 0 }
    }
}

/// A message in flight. One that is dropped without [`Trip::arrived`] took time and carried nothing.
pub(super) struct Trip<'a> {
    link: &'a Link,
    bytes: u64,
}

impl Trip<'_> {
    /// It arrived, with so many bytes of blobs in it.
    pub(super) fn arrived(mut self, bytes: u64) {
        self.bytes = bytes;
    }
}

impl Drop for Trip<'_> {
    fn drop(&mut self) {
        self.link.flow.lock().end(Instant::now(), self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After messages of so many bytes, each from one millisecond to another.
    fn after(messages: &[(u64, u64, u64)]) -> Flow {
        let (start, mut flow) = (Instant::now(), Flow::default());
        let mut events: Vec<(u64, Option<u64>)> = Vec::new();
        for (from, to, bytes) in messages {
            events.extend([(*from, None), (*to, Some(*bytes))]);
        }
        events.sort();
        for (at, ended) in events {
            let now = start + Duration::from_millis(at);
            match ended {
                None => flow.begin(now),
                Some(bytes) => flow.end(now, bytes),
            }
        }
        flow
    }

    #[test]
    fn test_little_says_nothing() {
        assert!(!after(&[]).is_slow());
        assert!(!after(&[(0, 4000, ENOUGH - 1)]).is_slow());
        assert!(after(&[(0, 4000, ENOUGH)]).is_slow());
    }

    #[test]
    fn test_rate_is_of_all_messages_together_and_only_while_there_are_some() {
        // Four at once, each at 50 MB/s; then silence; then one more.
        let four: Vec<_> = (0..4).map(|_| (0, 100, 5_000_000)).collect();
        assert!(!after(&four).is_slow());
        assert!(!after(&[&four[..], &[(4000, 4010, 2_000_000)]].concat()).is_slow());
        assert!(after(&four[..2]).is_slow());
    }

    #[test]
    fn test_what_was_long_ago_is_forgotten() {
        let fast = (0, 100, 100_000_000);
        assert!(!after(&[fast]).is_slow());
        let slow: Vec<_> = (0..30).map(|i| (1000 * (i + 1), 1000 * (i + 2) - 1, 1_000_000)).collect();
        assert!(after(&[&[fast][..], &slow].concat()).is_slow());
    }

    #[test]
    fn test_local_connections_and_refusals_end_it() {
        let local = Link { flow: Link::slow().flow, ..Link::default() };
        assert!(!local.is_worth_compression());
        let far = Link::slow();
        assert!(far.is_worth_compression());
        far.give_up_compression();
        assert!(!far.is_worth_compression());
    }
}
