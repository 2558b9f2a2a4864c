//! The operations for a collector: to list blobs, to report the room they take, to remove some, and to check all.
//!
//! A victim is removed only if nobody used it since it was listed, decided under the locks that writes take: a
//! blob that is sent again during an eviction is kept. Loose blobs free their bytes at once; those in segments when
//! less than three quarters of a segment are wanted, by copying those forward.

use std::sync::atomic::Ordering;

use agent_blocking::blocking;
use agent_model::Digest;

use super::index::Kept;
use super::{BlobState, Disk, Shared, home, uses};
use crate::parallel;

/// Victims removed under one lock.
const TOGETHER: usize = 64;

/// Seconds between two notes of last uses.
const HOUR: u32 = 3600;

/// Bytes read between two reports of progress, unless a blob is larger.
const STRIDE: u64 = 32 * 1024 * 1024;

/// What an eviction removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Blobs that are no longer here.
    pub blobs: u64,
    /// Bytes of the disk that they took. Those in segments are freed when enough of a segment is unwanted.
    pub bytes: u64,
}

/// What a check has read so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Checked {
    /// Blobs.
    pub blobs: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Blobs that were damaged and quarantined.
    pub damaged: u64,
    /// Blobs that could not be read now, which proves nothing about them. They are kept.
    pub unread: u64,
    /// Blobs that were in the store, whole, and were taken for missing.
    pub found: u64,
}

impl Disk {
    /// Every blob that is here, and when it was last written, read or asked for.
    pub async fn listing(&self) -> Vec<Kept> {
        let shared = std::sync::Arc::clone(&self.shared);
        blocking(move || {
            let now = home::now();
            let told = shared.index.lock().listing(now);
            if now.saturating_sub(shared.noted.load(Ordering::Relaxed)) >= HOUR {
                shared.noted.store(now, Ordering::Relaxed);
                uses::note(&shared.home, &shared.index);
            }
            told
        })
        .await
    }

    /// Bytes of the disk that the blobs take. Segments may hold a third as much beside them that nobody wants.
    pub fn taken(&self) -> u64 {
        self.shared.index.lock().taken()
    }

    /// Bytes of the disk that are free; `None` when that is unknown. Blocks.
    pub fn free(&self) -> Option<u64> {
        self.shared.home.free()
    }

    /// As [`taken`](Self::taken), with the bytes that nobody wants.
    #[cfg(test)]
    pub(super) fn on_disk(&self) -> u64 {
        self.shared.index.lock().on_disk()
    }

    /// Removes those of `victims` that were not used since they were listed; returns what was freed.
    pub async fn evict(&self, victims: Vec<Kept>) -> Evicted {
        let shared = std::sync::Arc::clone(&self.shared);
        blocking(move || {
            let mut evicted = Evicted::default();
            for some in victims.chunks(TOGETHER) {
                let (blobs, bytes) = shared.loose.evict(some);
                evicted.blobs += blobs;
                evicted.bytes += bytes;
            }
            evicted
        })
        .await
    }

    /// Frees the bytes of segments that nobody wants: once after many evictions, because the rest of a segment is
    /// copied.
    pub async fn compact(&self) {
        let shared = std::sync::Arc::clone(&self.shared);
        blocking(move || shared.compact()).await;
    }

    /// Takes back whole blobs that were taken for missing, then reads every blob and quarantines damaged ones;
    /// calls `progress` now and then, and at the end.
    pub async fn check(&self, progress: impl Fn(Checked) + Send + 'static) -> Checked {
        let shared = std::sync::Arc::clone(&self.shared);
        blocking(move || {
            let mut checked = Checked { found: shared.take_back(), ..Checked::default() };
            let all = shared.index.lock().places();
            for some in super::batches(all, STRIDE, usize::MAX, |(_, digest)| digest.size) {
                let judged = parallel::map(&some, parallel::cores(), |(_, digest)| shared.judge(*digest));
                for ((_, digest), verdict) in some.iter().zip(judged) {
                    checked.blobs += 1;
                    checked.bytes += digest.size;
                    checked.damaged += u64::from(verdict == BlobState::Damaged);
                    checked.unread += u64::from(verdict == BlobState::Unread);
                }
                progress(checked);
            }
            checked
        })
        .await
    }
}

impl Shared {
    /// Puts blobs into the index that are in the store, whole, and not in the index; returns how many. Quarantined
    /// blobs are taken back as well if their bytes are right after all.
    fn take_back(&self) -> u64 {
        // Nothing is copied or removed meanwhile.
        let _alone = self.compacting.lock();
        let in_segments = self.segments.strays().unwrap_or_else(|error| {
            tracing::error!(%error, "cannot look for blobs that were taken for missing");
            Vec::new()
        });
        let strays = in_segments.into_iter().chain(self.loose.strays());
        let (mut index, now) = (self.index.lock(), home::now());
        let mut found = 0;
        for (digest, place) in strays {
            found += u64::from(index.take_back(digest, place, now));
        }
        drop(index);
        self.segments.write_notes(false);
        if found > 0 {
            tracing::warn!(found, "found blobs that were taken for missing");
        }
        found
    }

    fn compact(&self) {
        let _alone = self.compacting.lock();
        for segment in self.segments.sparse() {
            // A second time when damaged blobs were quarantined.
            for _ in 0..2 {
                let wanted: Vec<(Digest, u32)> = self.index.lock().wanted(segment);
                match self.segments.copy_forward(segment, &wanted) {
                    Ok(damaged) if damaged.is_empty() => break,
                    Ok(damaged) => {
                        damaged.into_iter().for_each(|bad| _ = self.judge(bad));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot copy rest of segment: it stays");
                        break;
                    }
                }
            }
        }
        self.segments.write_notes(false);
    }
}
