//! From a digest to checked bytes, wherever they are stored.
//!
//! Records of a batch that are near each other in a segment are read at once. A blob that does not match is read
//! again alone: it may have been moved meanwhile, or it is damaged and is quarantined.

use std::fs::File;
use std::io::Read;
use std::sync::atomic::Ordering;

use agent_model::Digest;
use bytes::Bytes;

use super::home::{blob_name, is_proof, now};
use super::index::BlobLocation;
use super::record;
use super::{BlobState, ReadError, Shared};
use crate::{digest_of, parallel};

/// Bytes of a segment that are read at once.
const RUN: u64 = 1024 * 1024;

/// Most unwanted bytes between two records that are read rather than reading twice.
const GAP: u64 = 16 * 1024;

/// Bytes that one thread hashes faster than a second one starts.
const BYTES_PER_THREAD: u64 = 256 * 1024;

/// How often a blob that is moved while it is read is looked up again.
const CHASES: usize = 16;

/// Where the bytes of a blob come from.
pub(super) enum Opened {
    /// A file that holds exactly the blob, unchecked.
    File(File),
    /// All of it, checked.
    Bytes(Bytes),
}

/// Neighbours in a segment that are wanted: position in the batch, and where the record begins.
struct Run {
    segment: u32,
    start: u64,
    end: u64,
    wanted: Vec<(usize, u64)>,
}

impl Shared {
    /// Marks a blob as used now; where it is stored.
    pub(super) fn touch(&self, digest: &Digest) -> Option<BlobLocation> {
        self.index.lock().touch(digest, now())
    }

    /// Opens a blob to be read.
    pub(super) fn open_blob(&self, digest: Digest) -> Result<Opened, ReadError> {
        match self.touch(&digest) {
            Some(BlobLocation::Loose) => self.open_loose(digest).map(Opened::File),
            _ => self.read_whole(digest).map(Opened::Bytes),
        }
    }

    fn open_loose(&self, digest: Digest) -> Result<File, ReadError> {
        // Its length may not be that of the blob.
        self.loose.open_blob(digest)?.ok_or_else(|| match self.judge(digest) {
            BlobState::Unread => {
                let path = self.home.at(&blob_name(&digest));
                ReadError::Disk { path, source: std::io::Error::other("it cannot be checked now") }
            }
            _ => ReadError::Absent { digest },
        })
    }

    /// The file of a blob that has one of its own.
    pub(super) fn file(&self, digest: Digest) -> Option<File> {
        let loose = self.touch(&digest) == Some(BlobLocation::Loose);
        loose.then(|| self.open_loose(digest).ok()).flatten()
    }

    /// A whole blob, checked.
    pub(super) fn read_whole(&self, digest: Digest) -> Result<Bytes, ReadError> {
        if digest == Digest::EMPTY {
            return Ok(Bytes::new());
        }
        for _ in 0..CHASES {
            let Some(place) = self.touch(&digest) else { break };
            let (path, read) = match place {
                BlobLocation::Loose => {
                    let mut content = Vec::with_capacity(usize::try_from(digest.size).unwrap_or(0));
                    let read = self.open_loose(digest)?.read_to_end(&mut content);
                    (blob_name(&digest), read.map(|_| Bytes::from(content)))
                }
                BlobLocation::Record { segment, offset } => {
                    ("segments".to_owned(), self.segments.read(segment, offset, &digest))
                }
            };
            let error = match read {
                Ok(bytes) => match digest_of(&bytes) {
                    actual if actual == digest => return Ok(bytes),
                    actual => ReadError::Corrupt { digest, actual },
                },
                Err(source) => ReadError::Disk { path: self.home.at(&path), source },
            };
            let unread = matches!(&error, ReadError::Disk { source, .. } if !is_proof(source));
            if unread || matches!(self.judge(digest), BlobState::Damaged | BlobState::Unread) {
                return Err(error);
            }
        }
        Err(ReadError::Absent { digest })
    }

    /// Whole blobs, checked, in the order asked.
    pub(super) fn read_batch(&self, digests: &[Digest]) -> Vec<Result<Bytes, ReadError>> {
        let total: u64 = digests.iter().map(|digest| digest.size).sum();
        let threads = parallel::cores().min(usize::try_from(total / BYTES_PER_THREAD).unwrap_or(usize::MAX));
        let mut results: Vec<Option<Bytes>> = vec![None; digests.len()];
        let read = |run: &Run| self.read_run(run, digests);
        for (at, bytes) in parallel::map(&self.runs(digests), threads, read).into_iter().flatten() {
            results[at] = Some(bytes);
        }
        let rest = |(digest, result): (&Digest, Option<Bytes>)| match result {
            Some(bytes) => Ok(bytes),
            None => self.read_whole(*digest),
        };
        digests.iter().zip(results).map(rest).collect()
    }

    /// Those in segments, neighbours together.
    fn runs(&self, digests: &[Digest]) -> Vec<Run> {
        let mut places: Vec<(u32, u64, usize)> = Vec::with_capacity(digests.len());
        {
            let (mut index, now) = (self.index.lock(), now());
            for (at, digest) in digests.iter().enumerate() {
                if let Some(BlobLocation::Record { segment, offset }) = index.touch(digest, now) {
                    places.push((segment, offset.into(), at));
                }
            }
        }
        places.sort_unstable();
        let mut runs: Vec<Run> = Vec::new();
        for (segment, offset, at) in places {
            let end = offset + record::length(digests[at].size);
            match runs.last_mut() {
                Some(run) if run.segment == segment && offset <= run.end + GAP && end <= run.start + RUN => {
                    run.end = run.end.max(end);
                    run.wanted.push((at, offset));
                }
                _ => runs.push(Run { segment, start: offset, end, wanted: vec![(at, offset)] }),
            }
        }
        runs
    }

    /// Those of a run that match their digests.
    fn read_run(&self, run: &Run, digests: &[Digest]) -> Vec<(usize, Bytes)> {
        let Ok(bytes) = self.segments.read_range(run.segment, run.start, run.end) else { return Vec::new() };
        let cut = |(at, offset): &(usize, u64)| {
            let start = usize::try_from(offset - run.start).ok()? + record::HEADER;
            let blob = bytes.slice(start..start + usize::try_from(digests[*at].size).ok()?);
            (digest_of(&blob) == digests[*at]).then_some((*at, blob))
        };
        run.wanted.iter().filter_map(cut).collect()
    }

    /// Reads a blob and quarantines it if its bytes do not match its digest.
    pub(super) fn judge(&self, digest: Digest) -> BlobState {
        for _ in 0..CHASES {
            let Some(place) = self.index.lock().find(&digest) else { break };
            match self.judge_at(&digest, place) {
                BlobState::Changed => {}
                verdict => return verdict,
            }
        }
        BlobState::Changed
    }

    /// As [`judge`](Self::judge), in one place.
    pub(super) fn judge_at(&self, digest: &Digest, place: BlobLocation) -> BlobState {
        let judged = match place {
            BlobLocation::Loose => self.loose.judge(digest),
            BlobLocation::Record { segment, offset } => match self.segments.read(segment, offset, digest) {
                Ok(bytes) if digest_of(&bytes) == *digest => Ok(BlobState::Good),
                Err(error) if !is_proof(&error) => Err(error),
                _ if self.segments.put_away(digest, segment, offset) => Ok(BlobState::Damaged),
                _ => Ok(BlobState::Changed),
            },
        };
        let verdict = judged.unwrap_or_else(|error| {
            tracing::error!(%digest, %error, "cannot read blob to check it: it stays in the store");
            BlobState::Unread
        });
        if verdict == BlobState::Damaged {
            self.damaged.fetch_add(1, Ordering::Relaxed);
            tracing::error!(%digest, "quarantined damaged blob");
        }
        verdict
    }
}
