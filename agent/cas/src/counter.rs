//! How many bytes of a task are done, for whoever shows it meanwhile.
//!
//! Invariant: what [`ByteCounter::part`] says never falls before the task begins again, and never exceeds the whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};

use crate::store::Chunks;

/// How far the writing of a tree has come, in bytes of its files.
#[derive(Debug, Default)]
pub struct ByteCounter {
    written: AtomicU64,
    /// Of files that come from another machine and are not written yet.
    arriving: Arc<AtomicU64>,
    /// The most that was told.
    told: AtomicU64,
    total: AtomicU64,
}

impl ByteCounter {
    /// How many bytes are done, and how many there are to do: 0 while that is unknown.
    pub fn part(&self) -> (u64, u64) {
        // A file that has arrived is counted again while it is written, and so is one that was damaged.
        let done = self.written.load(Relaxed).saturating_add(self.arriving.load(Relaxed));
        let total = self.total.load(Relaxed);
        (self.told.fetch_max(done, Relaxed).max(done).min(total), total)
    }

    pub(crate) fn begin(&self, total: u64) {
        self.written.store(0, Relaxed);
        self.told.store(0, Relaxed);
        self.total.store(total, Relaxed);
    }

    pub(crate) fn add(&self, bytes: usize) {
        self.written.fetch_add(bytes as u64, Relaxed);
    }

    /// For one file that comes from another machine.
    pub(crate) fn meter(&self) -> Meter {
        Meter::new(&self.arriving)
    }
}

/// Counts the bytes of a file that are on their way, as long as this exists.
pub(crate) struct Meter {
    all: Arc<AtomicU64>,
    own: Arc<AtomicU64>,
}

impl Meter {
    /// Adds to `all`.
    pub(crate) fn new(all: &Arc<AtomicU64>) -> Meter {
        Meter { all: Arc::clone(all), own: Arc::default() }
    }

    /// These chunks, each counted when it is taken.
    pub(crate) fn count(&self, chunks: Chunks) -> Chunks {
        let (all, own) = (Arc::clone(&self.all), Arc::clone(&self.own));
        let count = move |chunk: &Bytes| {
            own.fetch_add(chunk.len() as u64, Relaxed);
            all.fetch_add(chunk.len() as u64, Relaxed);
        };
        chunks.inspect_ok(count).boxed()
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.all.fetch_sub(self.own.load(Relaxed), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn test_what_is_told_never_falls_and_never_exceeds_the_whole() {
        let counter = ByteCounter::default();
        assert_eq!(counter.part(), (0, 0));
        counter.begin(10);
        let meter = counter.meter();
        let chunks = futures_util::stream::iter([Ok(Bytes::from_static(b"123456"))]).boxed();
        meter.count(chunks).try_for_each(|_| async { Ok(()) }).await.unwrap();
        assert_eq!(counter.part(), (6, 10));
        drop(meter);
        assert_eq!(counter.part(), (6, 10), "it has arrived, and is being written");
        counter.add(6);
        assert_eq!(counter.part(), (6, 10));
        counter.add(9);
        assert_eq!(counter.part(), (10, 10));
        counter.begin(20);
        assert_eq!(counter.part(), (0, 20));
    }
}
