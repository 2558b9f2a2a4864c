//! Which blobs are here, where each is stored, and when it was last used.
//!
//! Owns the map from digest to place and the sums of each segment. All of it is in memory, so that a query for
//! twenty thousand blobs does not touch the disk; some 100 bytes for each blob. It does no I/O and reads no clock:
//! its lock is held only for moments.
//!
//! Invariants: **a blob that is in the index survives a power failure**; it is put in after the flush that
//! makes it so. A segment with appends under way (`pending`) is neither listed in a note nor removed, because
//! what they wrote is not in the index yet.
//!
//! Last use is in whole seconds of a clock that may be set back. That no blob is removed because of a listing from
//! before its last use is therefore a matter of counted listings, not of time.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime};

use agent_model::Digest;

use super::record;

/// What a loose file takes at least, in bytes: a block of most file systems.
const BLOCK: u64 = 4096;

/// How far the second of a use may be ahead of the clock. One further ahead comes from a wrong clock.
const AHEAD: u32 = 60;

/// Where a blob is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BlobLocation {
    /// In a file of its own.
    Loose,
    /// In the record that begins at this byte of a segment.
    Record { segment: u32, offset: u32 },
}

/// A blob as the collector sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// The blob.
    pub digest: Digest,
    /// When it was last written, read or asked for, in whole seconds.
    pub used: SystemTime,
    /// How many listings there were before that use.
    pub(crate) listings: u32,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    place: BlobLocation,
    /// Seconds since 1970.
    used: u32,
    /// How many listings there were before its last use.
    listings: u32,
}

/// What a segment holds.
#[derive(Debug, Clone, Copy, Default)]
struct Segment {
    /// Bytes of the file.
    length: u64,
    /// Bytes in records of blobs that are in the index.
    live: u64,
    /// Appends that are written and not in the index yet.
    pending: u32,
    /// Nothing is appended any more.
    sealed: bool,
    /// There is a note of its records, or one is being written.
    noted: bool,
}

impl Segment {
    fn is_settled(&self) -> bool {
        self.sealed && self.pending == 0
    }

    fn is_sparse(&self) -> bool {
        self.live * 4 < 3 * self.length.saturating_sub(record::PREFACE as u64)
    }
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Index {
    blobs: HashMap<Digest, Entry>,
    segments: BTreeMap<u32, Segment>,
    /// Bytes that loose files take of the disk.
    loose: u64,
    /// Listings so far.
    listings: u32,
}

/// Bytes that a blob in this place takes of the disk.
fn weight(digest: &Digest, place: BlobLocation) -> u64 {
    match place {
        BlobLocation::Loose => digest.size.div_ceil(BLOCK).saturating_mul(BLOCK),
        BlobLocation::Record { .. } => record::length(digest.size),
    }
}

impl Index {
    /// Where a blob is stored.
    pub(super) fn find(&self, digest: &Digest) -> Option<BlobLocation> {
        self.blobs.get(digest).map(|entry| entry.place)
    }

    /// Marks a blob as used now; where it is stored.
    pub(super) fn touch(&mut self, digest: &Digest, now: u32) -> Option<BlobLocation> {
        let listings = self.listings;
        self.blobs.get_mut(digest).map(|entry| {
            *entry = Entry { used: now, listings, ..*entry };
            entry.place
        })
    }

    /// A blob was made durable in this place. One that is here already keeps its place.
    pub(super) fn insert(&mut self, digest: Digest, place: BlobLocation, now: u32) {
        if self.touch(&digest, now).is_none() {
            self.put(digest, Entry { place, used: now, listings: self.listings });
        }
    }

    /// A blob that was taken for missing is in this place after all; false when it is in the index by now.
    pub(super) fn take_back(&mut self, digest: Digest, place: BlobLocation, now: u32) -> bool {
        let new = self.find(&digest).is_none();
        self.insert(digest, place, now);
        if let BlobLocation::Record { segment, .. } = place {
            self.segments.entry(segment).or_default().noted = false;
        }
        new
    }

    /// A blob was found when the store was opened. A file of its own counts more than a record, and a later
    /// segment more than an earlier one.
    pub(super) fn load(&mut self, digest: Digest, place: BlobLocation, used: u32) {
        let rank = |place: BlobLocation| match place {
            BlobLocation::Loose => u64::MAX,
            BlobLocation::Record { segment, offset } => u64::from(segment) << 32 | u64::from(offset),
        };
        match self.find(&digest) {
            Some(known) if rank(known) >= rank(place) => return,
            Some(known) => drop(self.remove(&digest, known)),
            None => {}
        }
        self.put(digest, Entry { place, used, listings: self.listings });
    }

    fn put(&mut self, digest: Digest, entry: Entry) {
        *self.live(entry.place) += weight(&digest, entry.place);
        self.blobs.insert(digest, entry);
    }

    /// The sum that counts blobs in this place.
    fn live(&mut self, place: BlobLocation) -> &mut u64 {
        match place {
            BlobLocation::Loose => &mut self.loose,
            BlobLocation::Record { segment, .. } => &mut self.segments.entry(segment).or_default().live,
        }
    }

    /// Forgets a blob if it is still in this place.
    pub(super) fn remove(&mut self, digest: &Digest, place: BlobLocation) -> bool {
        let there = self.find(digest) == Some(place);
        if there {
            self.blobs.remove(digest);
            *self.live(place) -= weight(digest, place);
            if let BlobLocation::Record { segment, .. } = place {
                self.segments.entry(segment).or_default().noted = false;
            }
        }
        there
    }

    /// A record was copied. A blob that was removed or moved meanwhile is not changed.
    pub(super) fn moved(&mut self, digest: &Digest, from: BlobLocation, to: BlobLocation) {
        let Some(entry) = self.blobs.get(digest).copied().filter(|entry| entry.place == from) else { return };
        self.remove(digest, from);
        self.put(*digest, Entry { place: to, ..entry });
    }

    /// Every blob and when it was used last.
    pub(super) fn listing(&mut self, now: u32) -> Vec<Kept> {
        let tell = |(digest, entry): (&Digest, &mut Entry)| {
            if entry.used > now.saturating_add(AHEAD) {
                entry.used = now;
            }
            let used = SystemTime::UNIX_EPOCH + Duration::from_secs(entry.used.into());
            Kept { digest: *digest, used, listings: entry.listings }
        };
        let all = self.blobs.iter_mut().map(tell).collect();
        self.listings += 1;
        all
    }

    /// Forgets a blob if it was not used since the listing; returns where it is stored and the bytes it took.
    pub(super) fn evict(&mut self, kept: &Kept) -> Option<(BlobLocation, u64)> {
        let entry = *self.blobs.get(&kept.digest)?;
        let unused = entry.listings == kept.listings && self.remove(&kept.digest, entry.place);
        unused.then(|| (entry.place, weight(&kept.digest, entry.place)))
    }

    /// Every blob and where it is stored, those of a segment in their order.
    pub(super) fn places(&self) -> Vec<(BlobLocation, Digest)> {
        let mut all: Vec<_> = self.blobs.iter().map(|(digest, entry)| (entry.place, *digest)).collect();
        all.sort_unstable();
        all
    }

    /// Every blob and the second it was used last.
    pub(super) fn uses(&self) -> impl Iterator<Item = (&Digest, u32)> {
        self.blobs.iter().map(|(digest, entry)| (digest, entry.used))
    }

    /// Sets when each blob was used last, where `known` knows.
    pub(super) fn remember(&mut self, known: impl Fn(&Digest) -> Option<u32>) {
        for (digest, entry) in &mut self.blobs {
            entry.used = known(digest).unwrap_or(entry.used);
        }
    }

    /// Bytes of the disk that the blobs take.
    pub(super) fn taken(&self) -> u64 {
        self.loose + self.segments.values().map(|segment| segment.live).sum::<u64>()
    }

    /// The same with the unwanted bytes of segments.
    #[cfg(test)]
    pub(super) fn on_disk(&self) -> u64 {
        self.loose + self.segments.values().map(|segment| segment.length).sum::<u64>()
    }

    /// Registers a segment.
    pub(super) fn open_segment(&mut self, number: u32, length: u64, sealed: bool, noted: bool) {
        let segment = self.segments.entry(number).or_default();
        *segment = Segment { length, sealed, noted, ..*segment };
    }

    /// A segment has grown by records that are in the index when [`settle`](Self::settle) is called.
    pub(super) fn grow(&mut self, number: u32, length: u64) {
        let segment = self.segments.entry(number).or_default();
        *segment = Segment { length, noted: false, pending: segment.pending + 1, ..*segment };
    }

    /// An append is over.
    pub(super) fn settle(&mut self, number: u32) {
        if let Some(segment) = self.segments.get_mut(&number) {
            segment.pending = segment.pending.saturating_sub(1);
        }
    }

    /// Nothing is appended to a segment any more.
    pub(super) fn seal(&mut self, number: u32) {
        if let Some(segment) = self.segments.get_mut(&number) {
            segment.sealed = true;
        }
    }

    /// The content of each segment that needs a note, by segment; they count as noted. With `open`, also the one
    /// that grows.
    pub(super) fn take_unnoted(&mut self, open: bool) -> BTreeMap<u32, (u64, Vec<(Digest, u32)>)> {
        let mut notes = BTreeMap::new();
        for (number, segment) in &mut self.segments {
            if !segment.noted && segment.pending == 0 && (segment.sealed || open) {
                segment.noted = true;
                notes.insert(*number, (segment.length, Vec::new()));
            }
        }
        if !notes.is_empty() {
            for (digest, entry) in &self.blobs {
                if let BlobLocation::Record { segment, offset } = entry.place
                    && let Some((_, records)) = notes.get_mut(&segment)
                {
                    records.push((*digest, offset));
                }
            }
        }
        notes
    }

    /// Segments of which less than three quarters are wanted, the emptiest first, so that each frees more room than
    /// its copy needs.
    pub(super) fn sparse(&self) -> Vec<u32> {
        let waste = |segment: &Segment| segment.live == 0 || segment.is_sparse();
        let sparse = self.segments.iter().filter(|(_, segment)| segment.is_settled() && waste(segment));
        let mut sparse: Vec<(u64, u32)> = sparse.map(|(number, segment)| (segment.live, *number)).collect();
        sparse.sort_unstable();
        sparse.into_iter().map(|(_, number)| number).collect()
    }

    /// So little of this growing segment is wanted that it is better sealed and copied.
    pub(super) fn is_waste(&self, number: u32, worth: u64) -> bool {
        let worn = |segment: &Segment| segment.is_sparse() && (segment.live == 0 || segment.length >= worth);
        self.segments.get(&number).is_some_and(worn)
    }

    /// The blobs of a segment and where their records begin, in order.
    pub(super) fn wanted(&self, number: u32) -> Vec<(Digest, u32)> {
        let here = |(digest, entry): (&Digest, &Entry)| match entry.place {
            BlobLocation::Record { segment, offset } if segment == number => Some((*digest, offset)),
            _ => None,
        };
        let mut wanted: Vec<_> = self.blobs.iter().filter_map(here).collect();
        wanted.sort_unstable_by_key(|(_, offset)| *offset);
        wanted
    }

    /// Forgets a segment, if nothing in it is wanted.
    pub(super) fn drop_segment(&mut self, number: u32) -> bool {
        let empty = |segment: &Segment| segment.is_settled() && segment.live == 0;
        let goes = self.segments.get(&number).is_some_and(empty);
        if goes {
            self.segments.remove(&number);
        }
        goes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest_of;

    fn record(segment: u32, offset: u32) -> BlobLocation {
        BlobLocation::Record { segment, offset }
    }

    #[test]
    fn test_what_is_used_after_a_listing_is_not_removed_for_it() {
        let mut index = Index::default();
        let (a, b, c) = (digest_of(b"a"), digest_of(b"b"), digest_of(b"c"));
        for digest in [a, b, c] {
            index.insert(digest, BlobLocation::Loose, 100);
        }
        for _ in 0..100 {
            index.listing(100); // many within one second, and uses between them
            index.touch(&c, 100).unwrap();
        }
        let told = index.listing(100);
        index.touch(&a, 99).unwrap(); // by a clock that was set back
        index.insert(b, record(1, 0), 100); // as when it is sent again
        let gone: Vec<Digest> =
            told.iter().filter(|kept| index.evict(kept).is_some()).map(|k| k.digest).collect();
        assert_eq!(gone, [c]);
        assert_eq!((index.find(&b), index.taken()), (Some(BlobLocation::Loose), 2 * BLOCK));
        assert!(index.listing(100).iter().all(|kept| index.evict(kept).is_some()), "unused since then");
    }

    #[test]
    fn test_clock_that_was_wrong_holds_no_blob_for_ever() {
        let mut index = Index::default();
        let digest = digest_of(b"a");
        index.insert(digest, BlobLocation::Loose, 9000);
        assert_eq!(index.listing(100)[0].used, SystemTime::UNIX_EPOCH + Duration::from_secs(100));
        index.touch(&digest, 9000);
        index.listing(9000);
        index.touch(&digest, 100);
        assert_eq!(index.listing(100)[0].used, SystemTime::UNIX_EPOCH + Duration::from_secs(100));
    }

    #[test]
    fn test_segment_goes_when_nothing_in_it_is_wanted_or_under_way() {
        let mut index = Index::default();
        let (a, b) = (digest_of(b"a"), digest_of(b"b"));
        index.open_segment(1, record::PREFACE as u64, false, false);
        index.grow(1, 90);
        index.insert(a, record(1, 16), 1);
        index.seal(1);
        assert!(index.take_unnoted(true).is_empty() && index.sparse().is_empty(), "more may come");
        index.settle(1);
        assert_eq!(index.take_unnoted(false)[&1], (90, vec![(a, 16)]));
        assert!(index.take_unnoted(true).is_empty(), "it is noted");
        assert_eq!((index.drop_segment(1), index.sparse()), (false, vec![]));
        index.open_segment(2, 500, false, false);
        index.insert(b, record(2, 16), 1);
        index.moved(&b, record(1, 16), record(3, 16));
        assert_eq!(index.find(&b), Some(record(2, 16)), "it lay elsewhere");
        index.moved(&a, record(1, 16), record(2, 100));
        assert_eq!((index.sparse(), index.drop_segment(1), index.on_disk()), (vec![1], true, 500));
        assert!(!index.is_waste(2, 1000) && index.is_waste(2, 400));
    }

    #[test]
    fn test_of_two_copies_the_later_and_the_loose_one_count() {
        let mut index = Index::default();
        let digest = digest_of(b"a");
        for (place, counts) in [
            (record(2, 80), record(2, 80)),
            (record(1, 90), record(2, 80)),
            (record(2, 16), record(2, 80)),
            (record(3, 16), record(3, 16)),
            (BlobLocation::Loose, BlobLocation::Loose),
            (record(4, 16), BlobLocation::Loose),
        ] {
            index.load(digest, place, 7);
            assert_eq!(index.find(&digest), Some(counts));
        }
        assert_eq!(index.taken(), BLOCK);
    }
}
