//! The store of tests: blobs in a map.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use agent_model::Digest;
use bytes::{Bytes, BytesMut};
use futures_util::stream::StreamExt;
use parking_lot::Mutex;

use super::{BlobStore, CHUNK, Chunks, MissingError, ReadError, WriteError};
use crate::digest_of;

/// Blobs in memory. Clones share them. A test may break the rules with [`remove`](Self::remove) and
/// [`corrupt`](Self::corrupt).
#[derive(Debug, Clone, Default)]
pub struct Memory {
    blobs: Arc<Mutex<HashMap<Digest, Bytes>>>,
}

impl Memory {
    /// An empty store.
    pub fn new() -> Memory {
        Memory::default()
    }

    /// Forgets a blob, as eviction would.
    pub fn remove(&self, digest: &Digest) {
        self.with(|blobs| blobs.remove(digest));
    }

    /// Puts other bytes under a digest, as a store that verifies nothing would.
    pub fn corrupt(&self, digest: Digest, bytes: impl Into<Bytes>) {
        self.with(|blobs| blobs.insert(digest, bytes.into()));
    }

    /// What is kept under a digest, unchecked.
    pub fn get(&self, digest: &Digest) -> Option<Bytes> {
        if *digest == Digest::EMPTY {
            return Some(Bytes::new());
        }
        self.with(|blobs| blobs.get(digest).cloned())
    }

    fn with<R>(&self, work: impl FnOnce(&mut HashMap<Digest, Bytes>) -> R) -> R {
        work(&mut self.blobs.lock())
    }

    fn checked(&self, digest: Digest) -> Result<Bytes, ReadError> {
        let bytes = self.get(&digest).ok_or(ReadError::Absent { digest })?;
        match digest_of(&bytes) {
            actual if actual == digest => Ok(bytes),
            actual => Err(ReadError::Corrupt { digest, actual }),
        }
    }
}

impl BlobStore for Memory {
    async fn missing(&self, digests: &[Digest]) -> Result<Vec<Digest>, MissingError> {
        let mut seen = HashSet::new();
        Ok(digests.iter().copied().filter(|d| seen.insert(*d) && self.get(d).is_none()).collect())
    }

    async fn read(&self, digest: Digest, offset: u64) -> Result<Chunks, ReadError> {
        let bytes = self.checked(digest)?;
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        if start > bytes.len() {
            return Err(ReadError::Offset { digest, offset });
        }
        let mut rest = bytes.slice(start..);
        let pieces =
            std::iter::from_fn(move || (!rest.is_empty()).then(|| Ok(rest.split_to(rest.len().min(CHUNK)))));
        Ok(futures_util::stream::iter(pieces).boxed())
    }

    async fn read_batch(&self, digests: Vec<Digest>) -> Vec<Result<Bytes, ReadError>> {
        digests.into_iter().map(|digest| self.checked(digest)).collect()
    }

    async fn write(&self, digest: Digest, mut source: Chunks) -> Result<(), WriteError> {
        let mut content = BytesMut::new();
        while let Some(chunk) = source.next().await {
            let chunk = chunk.map_err(|source| WriteError::Source { digest, source: Box::new(source) })?;
            content.extend_from_slice(&chunk);
        }
        self.write_batch(vec![(digest, content.freeze())]).await.remove(0)
    }

    async fn write_batch(&self, blobs: Vec<(Digest, Bytes)>) -> Vec<Result<(), WriteError>> {
        let keep = |(digest, bytes): (Digest, Bytes)| {
            let actual = digest_of(&bytes);
            if actual != digest {
                return Err(WriteError::Mismatch { digest, actual });
            }
            self.with(|kept| kept.insert(digest, bytes));
            Ok(())
        };
        blobs.into_iter().map(keep).collect()
    }

    async fn quarantine(&self, digest: Digest) {
        if matches!(self.checked(digest), Err(ReadError::Corrupt { .. })) {
            self.remove(&digest);
        }
    }

    async fn file(&self, _: Digest) -> Option<std::fs::File> {
        None
    }
}
