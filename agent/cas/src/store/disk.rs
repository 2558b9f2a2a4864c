//! Blobs in one directory of this machine.
//!
//! Owns the directory it is given: nobody else may write there, and a lock ensures that one process has it
//! open at a time.
//!
//! | Below it | Holds |
//! |---|---|
//! | `segments/` | blobs up to [`SMALL`] bytes, one after another in large files ([`segments`]) |
//! | `blobs/` | larger ones, each in a file of its own ([`loose`]) |
//! | `temp/` | unfinished files; those that a crash left are removed when the store is opened |
//! | `quarantine/` | damaged blobs, for someone to look at |
//! | `uses` | when blobs were used last ([`uses`]) |
//!
//! The list of blobs is in memory ([`index`]) and read from the disk once, when the store is opened.
//!
//! **Durability rule: `write`, `write_batch` and [`Ingest::commit`] return after the flush that makes the blobs
//! survive a power failure, and no blob is reported as present before that.** A crash leaves files in `temp/`,
//! bytes after the last whole record of a segment, or blobs that were never acknowledged; each of these still
//! matches its digest.
//!
//! Every read from the start of a blob is hashed. A blob that does not match is checked once more and
//! quarantined: from then on it is missing, and can be sent again.

mod arrivals;
#[cfg(any(test, feature = "fakes"))]
pub(super) mod damage;
mod home;
mod index;
mod ingest;
pub(super) mod listing;
mod loose;
mod reading;
mod record;
mod segments;
mod uses;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use agent_blocking::blocking;
use agent_model::Digest;
use bytes::{Bytes, BytesMut};
use futures_util::stream::StreamExt;
use parking_lot::Mutex;
use tokio::sync::watch;

pub use self::index::Kept;
pub use self::ingest::Ingest;

use self::arrivals::Arrivals;
use self::home::{Home, blob_name};
use self::index::{BlobLocation, Index};
use self::loose::Loose;
use self::reading::Opened;
use self::segments::Segments;
use super::{BlobStore, CHUNK, Chunks, MissingError, ReadError, WriteError, batches, verified};
use crate::parallel;
use crate::{digest_of, holes};

/// Blobs up to this size, in bytes, are stored in segments.
const SMALL: u64 = 128 * 1024;

/// A store in a directory. Clones share it.
#[derive(Debug, Clone)]
pub struct Disk {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    home: Arc<Home>,
    index: Arc<Mutex<Index>>,
    loose: Loose,
    segments: Segments,
    /// Damaged blobs found since the store was opened.
    damaged: AtomicU64,
    /// The second at which last uses were noted.
    noted: AtomicU32,
    /// Held while segments are copied forward.
    compacting: Mutex<()>,
    arrivals: Arrivals,
}

/// The result of checking a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlobState {
    Good,
    /// It did not match its digest, and was quarantined.
    Damaged,
    /// It was removed or moved meanwhile.
    Changed,
    /// It could not be read, which proves nothing about it. It is kept.
    Unread,
}

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum OpenError {
    #[error("cannot open the store directory {path}")]
    Directory { path: PathBuf, source: io::Error },
    #[error("cannot remove unfinished files in {path}")]
    Clean { path: PathBuf, source: io::Error },
    #[error("another process uses the store directory {path}")]
    InUse { path: PathBuf },
}

impl Disk {
    /// Opens the store in `dir`, which is made if need be. Blocks; for some seconds while an earlier process that
    /// uses it is about to end.
    pub fn open(dir: &Path) -> Result<Disk, OpenError> {
        Disk::open_with_reserve(dir, 0)
    }

    /// Opens the store in `dir`. A blob that would leave less than `reserve` bytes of the disk free is
    /// refused as if the disk were full, so that blobs never take the room that logs and results need.
    pub fn open_with_reserve(dir: &Path, reserve: u64) -> Result<Disk, OpenError> {
        Disk::open_with(dir, reserve, segments::SEGMENT)
    }

    /// As [`open_with_reserve`](Self::open_with_reserve), with segments of at most this size.
    fn open_with(dir: &Path, reserve: u64, segment: u64) -> Result<Disk, OpenError> {
        let home = Arc::new(Home::open(dir, reserve)?);
        let index = Arc::default();
        let segments = Segments::open(&home, &index, segment)?;
        let (loose, suspects) = Loose::open(&home, &index)?;
        uses::recall(&home, &index);
        let shared = Shared {
            home,
            index,
            loose,
            segments,
            damaged: AtomicU64::new(0),
            noted: AtomicU32::new(home::now()),
            compacting: Mutex::new(()),
            arrivals: Arrivals::default(),
        };
        for digest in suspects {
            shared.judge_at(&digest, BlobLocation::Loose);
        }
        Ok(Disk { shared: Arc::new(shared) })
    }

    /// Damaged blobs found since the store was opened.
    pub fn damaged(&self) -> u64 {
        self.shared.damaged.load(Ordering::Relaxed)
    }

    /// Begins a blob whose bytes arrive in pieces.
    pub async fn ingest(&self, digest: Digest) -> Result<Ingest, WriteError> {
        let shared = Arc::clone(&self.shared);
        blocking(move || Ingest::begin(shared, digest)).await
    }

    /// The bytes of a large blob that somebody writes now, as they come, and an empty piece whenever none came for a
    /// second. It ends without an error only when the blob is in the store.
    pub fn arriving(&self, digest: Digest) -> Option<Chunks> {
        arrivals::follow(&self.shared, digest)
    }

    /// Notified when a blob begins to arrive, and when blobs have arrived.
    pub fn arrivals(&self) -> watch::Receiver<()> {
        self.shared.arrivals.news()
    }
}

impl Drop for Shared {
    /// With these notes the next start need not read the last segment.
    fn drop(&mut self) {
        self.segments.write_notes(true);
        uses::note(&self.home, &self.index);
    }
}

impl Shared {
    fn missing(&self, digests: &[Digest]) -> Vec<Digest> {
        let mut seen = HashSet::with_capacity(digests.len() + 1);
        seen.insert(Digest::EMPTY);
        let mut asked: Vec<Digest> = digests.iter().copied().filter(|digest| seen.insert(*digest)).collect();
        let (mut index, now) = (self.index.lock(), home::now());
        asked.retain(|digest| index.touch(digest, now).is_none());
        asked
    }

    /// The blob is here. It counts as used now, so that it is kept.
    fn holds(&self, digest: &Digest) -> bool {
        *digest == Digest::EMPTY || self.touch(digest).is_some()
    }

    fn write_batch(&self, blobs: Vec<(Digest, Bytes)>) -> Vec<Result<(), WriteError>> {
        let hashed = parallel::map(&blobs, parallel::cores(), |(_, bytes)| digest_of(bytes));
        let mut results = Vec::with_capacity(blobs.len());
        let (mut small, mut large) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
        let (mut first, mut repeated) = (HashMap::new(), Vec::new());
        for (at, ((digest, bytes), actual)) in blobs.into_iter().zip(hashed).enumerate() {
            results.push(match actual == digest {
                true => Ok(()),
                false => Err(WriteError::Mismatch { digest, actual }),
            });
            if actual != digest || self.holds(&digest) {
                continue;
            }
            if let Some(first) = first.get(&digest) {
                repeated.push((at, *first));
            } else {
                first.insert(digest, at);
                let (places, new) = if digest.size <= SMALL { &mut small } else { &mut large };
                places.push(at);
                new.push((digest, bytes));
            }
        }
        if let Err(error) = self.segments.write(&small.1) {
            small.0.iter().for_each(|at| results[*at] = Err(again(&error)));
        }
        for (at, result) in large.0.iter().zip(self.loose.write(&large.1)) {
            results[*at] = result;
        }
        for (at, first) in repeated {
            if let Err(error) = &results[first] {
                results[at] = Err(again(error));
            }
        }
        results
    }
}

/// The error of a batch, for another blob of it.
fn again(error: &WriteError) -> WriteError {
    let (path, source) = match error {
        WriteError::Disk { path, source } => (path.clone(), source),
        other => {
            return WriteError::Disk { path: PathBuf::new(), source: io::Error::other(other.to_string()) };
        }
    };
    let source = match source.raw_os_error() {
        Some(number) => io::Error::from_raw_os_error(number),
        None => io::Error::new(source.kind(), source.to_string()),
    };
    WriteError::Disk { path, source }
}

impl BlobStore for Disk {
    async fn missing(&self, digests: &[Digest]) -> Result<Vec<Digest>, MissingError> {
        let (shared, digests) = (Arc::clone(&self.shared), digests.to_vec());
        Ok(blocking(move || shared.missing(&digests)).await)
    }

    async fn read(&self, digest: Digest, offset: u64) -> Result<Chunks, ReadError> {
        if offset > digest.size {
            return Err(ReadError::Offset { digest, offset });
        }
        if digest == Digest::EMPTY {
            return Ok(futures_util::stream::empty().boxed());
        }
        let path = self.shared.home.at(&blob_name(&digest));
        let shared = Arc::clone(&self.shared);
        let mut file = match blocking(move || shared.open_blob(digest)).await? {
            Opened::File(file) => file,
            Opened::Bytes(bytes) => {
                let rest = bytes.slice(usize::try_from(offset).unwrap_or(bytes.len())..);
                return Ok(futures_util::stream::iter((!rest.is_empty()).then_some(Ok(rest))).boxed());
            }
        };
        file.seek(SeekFrom::Start(offset))
            .map_err(|source| ReadError::Disk { path: path.clone(), source })?;
        let chunks = file_chunks(file, path, u64::MAX);
        Ok(if offset == 0 { guarded(&self.shared, digest, chunks) } else { chunks })
    }

    async fn read_batch(&self, digests: Vec<Digest>) -> Vec<Result<Bytes, ReadError>> {
        let shared = Arc::clone(&self.shared);
        blocking(move || shared.read_batch(&digests)).await
    }

    async fn write(&self, digest: Digest, mut source: Chunks) -> Result<(), WriteError> {
        if self.shared.holds(&digest) {
            return Ok(());
        }
        let mut ingest = self.ingest(digest).await?;
        while let Some(chunk) = source.next().await {
            let chunk = chunk.map_err(|source| WriteError::Source { digest, source: Box::new(source) })?;
            ingest.append(chunk).await?;
        }
        ingest.commit().await
    }

    async fn write_batch(&self, blobs: Vec<(Digest, Bytes)>) -> Vec<Result<(), WriteError>> {
        let shared = Arc::clone(&self.shared);
        blocking(move || {
            let written = shared.write_batch(blobs);
            shared.arrivals.tell();
            written
        })
        .await
    }

    async fn quarantine(&self, digest: Digest) {
        let shared = Arc::clone(&self.shared);
        blocking(move || shared.judge(digest)).await;
    }

    async fn file(&self, digest: Digest) -> Option<File> {
        let shared = Arc::clone(&self.shared);
        blocking(move || shared.file(digest)).await
    }
}

/// The blob as it is read; one that does not match its digest is quarantined.
fn guarded(shared: &Arc<Shared>, digest: Digest, chunks: Chunks) -> Chunks {
    let shared = Arc::clone(shared);
    let check = move |chunk: Result<Bytes, ReadError>| {
        let shared = Arc::clone(&shared);
        async move {
            if let Err(ReadError::Corrupt { .. }) = chunk {
                blocking(move || shared.judge(digest)).await;
            }
            chunk
        }
    };
    verified(digest, chunks).then(check).boxed()
}

/// The rest of `file`, at most `most` bytes of it, read where it may block.
pub(crate) fn file_chunks(file: File, path: PathBuf, most: u64) -> Chunks {
    let file = holes::Reader::new(file).take(most);
    futures_util::stream::try_unfold((file, path), |(mut file, path)| async move {
        blocking(move || {
            let mut chunk = BytesMut::zeroed(CHUNK);
            let length =
                file.read(&mut chunk).map_err(|source| ReadError::Disk { path: path.clone(), source })?;
            chunk.truncate(length);
            Ok((length > 0).then(|| (chunk.freeze(), (file, path))))
        })
        .await
    })
    .boxed()
}

#[cfg(test)]
mod tests;
