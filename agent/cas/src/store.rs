//! Stores of bytes by digest.
//!
//! Owns the trait all stores obey, its errors, and the choice between stores at run time. Bytes that a store
//! returns were written under their own digest; bytes it is given are checked before anybody can see them.
//!
//! Small blobs are sent in batches, because a round trip and a disk flush are most of their cost; large ones
//! as a stream. A caller keeps a batch to [`BATCH_BYTES`] and [`BATCH_BLOBS`]; a store splits it further when
//! its medium demands that.

#[cfg(any(test, feature = "fakes"))]
pub mod conformance;
mod disk;
#[cfg(any(test, feature = "fakes"))]
pub(crate) mod memory;

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};

use agent_model::Digest;
use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt};

#[cfg(any(test, feature = "fakes"))]
pub use disk::damage::{damage, place_of};
pub(crate) use disk::file_chunks;
pub use disk::listing::{Checked, Evicted};
pub use disk::{Disk, Ingest, Kept, OpenError};

use crate::Hasher;

/// The content of a blob, piece by piece. It ends early with an error, never silently.
pub type Chunks = BoxStream<'static, Result<Bytes, ReadError>>;

/// Bytes a caller puts into one batch, unless a single blob is larger. More would not be faster, and several
/// batches are in the memory of both ends at once.
pub const BATCH_BYTES: u64 = 1024 * 1024;

/// Blobs a caller puts into one batch.
pub const BATCH_BLOBS: usize = 1000;

/// Blobs above this size, in bytes, are better streamed than put into a batch.
pub const SMALL_BLOB: u64 = 1024 * 1024;

/// The size of the pieces a blob is cut into when it is streamed, in bytes.
pub(crate) const CHUNK: usize = 256 * 1024;

/// A store of bytes by digest. The empty blob is always there.
pub trait BlobStore: Send + Sync + 'static {
    /// Those of `digests` that are not here, each once, in the order asked.
    fn missing(&self, digests: &[Digest]) -> impl Future<Output = Result<Vec<Digest>, MissingError>> + Send;

    /// The content of a blob from `offset` on. From offset 0 it is checked against the digest, at the latest
    /// when the stream ends; from a later offset only the caller can check it.
    fn read(&self, digest: Digest, offset: u64) -> impl Future<Output = Result<Chunks, ReadError>> + Send;

    /// Whole blobs, one answer for each digest, in the order asked.
    fn read_batch(&self, digests: Vec<Digest>) -> impl Future<Output = Vec<Result<Bytes, ReadError>>> + Send;

    /// Keeps the bytes of `source`, if they are the blob named `digest`. Returns when they would survive a power
    /// failure. If the blob is here already, `source` is not read to its end.
    fn write(&self, digest: Digest, source: Chunks) -> impl Future<Output = Result<(), WriteError>> + Send;

    /// Keeps whole blobs under the rules of [`write`](Self::write), one answer for each, in order.
    fn write_batch(
        &self,
        blobs: Vec<(Digest, Bytes)>,
    ) -> impl Future<Output = Vec<Result<(), WriteError>>> + Send;

    /// Reports that other bytes were read than the digest names. The store checks this itself, and removes a
    /// damaged blob: so it is missing, and can be sent or fetched again.
    fn quarantine(&self, digest: Digest) -> impl Future<Output = ()> + Send;

    /// An open file that holds exactly the blob, if this store has one at hand, to make a copy-on-write clone
    /// from. Its content is not checked. `None` does not mean that the blob is not here.
    fn file(&self, digest: Digest) -> impl Future<Output = Option<std::fs::File>> + Send;

    /// Whether its server finds whatever is missing of a snapshot before a job counts as submitted.
    fn checks_trees(&self) -> impl Future<Output = bool> + Send {
        std::future::ready(false)
    }
}

/// Why a store could not report what it lacks.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum MissingError {
    #[error("the remote store does not say what it lacks")]
    Remote { source: Box<tonic::Status> },
    #[error("the remote store says it lacks blobs it was not asked about")]
    Answer,
}

/// Why a blob could not be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ReadError {
    #[error("blob {digest} is not in the store")]
    Absent { digest: Digest },
    #[error("blob {digest} has no byte {offset}")]
    Offset {
        digest: Digest,
        /// The place asked for, in bytes.
        offset: u64,
    },
    #[error("cannot read {path}")]
    Disk { path: PathBuf, source: io::Error },
    #[error("the remote store does not send blob {digest}")]
    Remote { digest: Digest, source: Box<tonic::Status> },
    #[error("what came as blob {digest} is {actual}")]
    Corrupt {
        digest: Digest,
        /// The digest of the bytes received, up to where they were too many.
        actual: Digest,
    },
    #[error("what came as blob {digest} is not its compressed form")]
    Inflate { digest: Digest, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("cannot compress blob {digest}")]
    Compress { digest: Digest, source: io::Error },
    #[error("cannot keep a copy of blob {digest}")]
    Keep { digest: Digest, source: Box<WriteError> },
}

/// Why a blob could not be kept.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum WriteError {
    #[error("the bytes given as blob {digest} are {actual}")]
    Mismatch {
        digest: Digest,
        /// What the bytes are, or what they were when there were too many of them.
        actual: Digest,
    },
    #[error("cannot get the bytes of blob {digest}")]
    Source { digest: Digest, source: Box<ReadError> },
    #[error("cannot write {path}")]
    Disk { path: PathBuf, source: io::Error },
    #[error("the remote store does not take blob {digest}")]
    Remote { digest: Digest, source: Box<tonic::Status> },
    #[error("an earlier part of blob {digest} could not be kept")]
    Abandoned { digest: Digest },
    #[error("the remote store took blob {digest} and does not have it")]
    Vanished { digest: Digest },
}

impl MissingError {
    /// The store at the other end of a connection does not answer as it should now: the same may succeed later.
    pub fn is_away(&self) -> bool {
        match self {
            MissingError::Remote { source } => is_away(source),
            MissingError::Answer => true,
        }
    }
}

/// The machine is short of something now (descriptors, memory), or a file system is unavailable for a moment.
pub fn is_scarce(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let passing = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::AGAIN, Errno::INTR, Errno::STALE];
    Errno::from_io_error(error).is_some_and(|errno| passing.contains(&errno))
}

impl ReadError {
    /// The store at the other end of a connection does not answer as it should now, or this machine is short of the
    /// resources to read: the same may succeed later.
    pub fn is_away(&self) -> bool {
        match self {
            ReadError::Remote { source, .. } => is_away(source),
            ReadError::Disk { source, .. } => is_scarce(source),
            _ => false,
        }
    }

    /// The store reported that the blob is absent, or sent something else.
    pub fn is_unsound(&self) -> bool {
        matches!(self, ReadError::Absent { .. }) || self.is_damage()
    }

    /// The bytes there are not those the digest names.
    pub fn is_damage(&self) -> bool {
        match self {
            ReadError::Corrupt { .. } | ReadError::Inflate { .. } => true,
            ReadError::Remote { source, .. } => source.code() == tonic::Code::DataLoss,
            _ => false,
        }
    }
}

impl WriteError {
    /// The store at the other end of a connection does not work as it should now: the same may succeed later.
    pub fn is_away(&self) -> bool {
        match self {
            WriteError::Remote { source, .. } => is_away(source),
            WriteError::Source { source, .. } => source.is_away(),
            WriteError::Vanished { .. } => true,
            _ => false,
        }
    }

    /// The disk of this machine has no room left.
    pub fn is_no_space(&self) -> bool {
        match self {
            WriteError::Disk { source, .. } => agent_fs::is_full(source),
            _ => false,
        }
    }
}

/// The same call may succeed later: the error is not about the blob, nor about the call.
pub fn is_away(status: &tonic::Status) -> bool {
    !matches!(
        status.code(),
        tonic::Code::Ok
            | tonic::Code::InvalidArgument
            | tonic::Code::NotFound
            | tonic::Code::AlreadyExists
            | tonic::Code::OutOfRange
            | tonic::Code::DataLoss
    )
}

/// Removes a tree; one that does not exist is no error.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(source),
        _ => Ok(()),
    }
}

/// `chunks`, which must be all of the blob, with an error in place of the end when they are not.
pub(crate) fn verified(digest: Digest, chunks: Chunks) -> Chunks {
    let state = Some((chunks, Hasher::new()));
    futures_util::stream::try_unfold(state, move |state| async move {
        let Some((mut chunks, mut hasher)) = state else { return Ok(None) };
        let chunk = chunks.next().await.transpose()?;
        if let Some(chunk) = &chunk {
            hasher.update(chunk);
        }
        match chunk {
            Some(chunk) if hasher.size() <= digest.size => Ok(Some((chunk, Some((chunks, hasher))))),
            _ => match hasher.finish() {
                actual if actual == digest => Ok(None),
                actual => Err(ReadError::Corrupt { digest, actual }),
            },
        }
    })
    .boxed()
}

/// How many of the first items, given by their sizes, fit into a batch of at most `bytes` and `count`; an item larger
/// than that is a batch of its own.
pub fn fitting(sizes: impl IntoIterator<Item = u64>, bytes: u64, count: usize) -> usize {
    let mut taken = 0;
    let fits = |(index, size): &(usize, u64)| {
        taken += size;
        *index == 0 || taken <= bytes
    };
    sizes.into_iter().take(count).enumerate().take_while(fits).count()
}

/// Cuts `items` into runs of at most `bytes` and `count`; an item larger than that gets a run of its own.
pub(crate) fn batches<T>(
    items: impl IntoIterator<Item = T>,
    bytes: u64,
    count: usize,
    size: impl Fn(&T) -> u64,
) -> Vec<Vec<T>> {
    let mut all: Vec<Vec<T>> = Vec::new();
    let mut room = 0;
    for item in items {
        let size = size(&item);
        match all.last_mut() {
            Some(last) if size <= room && last.len() < count => {
                room -= size;
                last.push(item);
            }
            _ => {
                room = bytes.saturating_sub(size);
                all.push(vec![item]);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest_of;

    fn chunks(parts: &[&'static [u8]]) -> Chunks {
        let parts: Vec<_> = parts.iter().map(|part| Ok(Bytes::from_static(part))).collect();
        futures_util::stream::iter(parts).boxed()
    }

    async fn outcome(digest: Digest, parts: &[&'static [u8]]) -> Result<usize, ReadError> {
        let mut stream = verified(digest, chunks(parts));
        let mut length = 0;
        while let Some(chunk) = stream.next().await {
            length += chunk?.len();
        }
        Ok(length)
    }

    #[tokio::test]
    async fn test_verified_passes_the_blob_and_refuses_all_else() {
        let digest = digest_of(b"abcd");
        assert_eq!(outcome(digest, &[b"ab", b"", b"cd"]).await.unwrap(), 4);
        for wrong in [vec![b"abc" as &[u8]], vec![b"abce"], vec![b"abcd", b"e"], vec![]] {
            assert!(matches!(outcome(digest, &wrong).await, Err(ReadError::Corrupt { .. })), "{wrong:?}");
        }
    }

    #[test]
    fn test_batches_keep_both_limits_and_every_item() {
        let runs = batches([3u64, 3, 3, 9, 1, 1, 1, 1], 6, 3, |n| *n);
        assert_eq!(runs, [vec![3, 3], vec![3], vec![9], vec![1, 1, 1], vec![1]]);
        for (sizes, fit) in [(&[3, 3, 3][..], 2), (&[9, 1], 1), (&[1; 5], 3), (&[0, 9], 1), (&[], 0)] {
            assert_eq!(fitting(sizes.iter().copied(), 6, 3), fit, "{sizes:?}");
        }
    }
}
