//! A near store in front of a far one.

use agent_model::Digest;
use bytes::Bytes;

use super::{BlobStore, Chunks, MissingError, ReadError, WriteError};

/// Reads go through the near store and leave a copy there. Writes and questions go to the far one alone: it
/// is what others see, and what must be complete. A near blob that is damaged counts as absent: the near store
/// has put it away by the time it says so, and a copy of the far one takes its place.
#[derive(Debug, Clone)]
pub struct Tiered<N, F> {
    near: N,
    far: F,
}

impl<N: BlobStore, F: BlobStore> Tiered<N, F> {
    /// `near` in front of `far`.
    pub fn new(near: N, far: F) -> Tiered<N, F> {
        Tiered { near, far }
    }

    /// The near store.
    pub(super) fn near(&self) -> &N {
        &self.near
    }

    /// Gives the far store a blob that the near one has.
    pub(super) async fn pass_on(&self, digest: Digest) -> Result<(), WriteError> {
        let source = self.near.read(digest, 0).await;
        let source = source.map_err(|source| WriteError::Source { digest, source: source.into() })?;
        self.far.write(digest, source).await
    }

    /// Sees to it that the near store has the blob.
    async fn fetch(&self, digest: Digest) -> Result<(), ReadError> {
        let source = self.far.read(digest, 0).await?;
        self.near.write(digest, source).await.map_err(|error| match error {
            WriteError::Source { source, .. } => *source,
            error => ReadError::Keep { digest, source: Box::new(error) },
        })
    }
}

impl<N: BlobStore, F: BlobStore> BlobStore for Tiered<N, F> {
    async fn missing(&self, digests: &[Digest]) -> Result<Vec<Digest>, MissingError> {
        self.far.missing(digests).await
    }

    async fn read(&self, digest: Digest, offset: u64) -> Result<Chunks, ReadError> {
        match self.near.read(digest, offset).await {
            Err(ReadError::Absent { .. } | ReadError::Corrupt { .. } | ReadError::Disk { .. }) => {
                self.fetch(digest).await?;
                self.near.read(digest, offset).await
            }
            other => other,
        }
    }

    async fn read_batch(&self, digests: Vec<Digest>) -> Vec<Result<Bytes, ReadError>> {
        let asked = digests.clone();
        let mut results = self.near.read_batch(digests).await;
        let absent: Vec<(usize, Digest)> =
            asked.into_iter().enumerate().filter(|(index, _)| results[*index].is_err()).collect();
        if absent.is_empty() {
            return results;
        }
        let fetched = self.far.read_batch(absent.iter().map(|(_, digest)| *digest).collect()).await;
        let mut copies = Vec::new();
        for ((index, digest), result) in absent.into_iter().zip(fetched) {
            if let Ok(bytes) = &result {
                copies.push((digest, bytes.clone()));
            }
            results[index] = result;
        }
        // The bytes are at hand and checked; a copy that cannot be kept only costs another fetch.
        self.near.write_batch(copies).await;
        results
    }

    async fn write(&self, digest: Digest, source: Chunks) -> Result<(), WriteError> {
        self.far.write(digest, source).await
    }

    async fn write_batch(&self, blobs: Vec<(Digest, Bytes)>) -> Vec<Result<(), WriteError>> {
        self.far.write_batch(blobs).await
    }

    async fn distrust(&self, digest: Digest) {
        self.near.distrust(digest).await;
    }

    async fn file(&self, digest: Digest) -> Option<std::fs::File> {
        if let Some(file) = self.near.file(digest).await {
            return Some(file);
        }
        self.fetch(digest).await.ok()?;
        self.near.file(digest).await
    }
}
