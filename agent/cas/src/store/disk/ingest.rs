//! Streaming ingest of one blob.
//!
//! A small one is gathered in memory, because it ends up in a segment; a large one grows in a file below `temp/`.

use std::sync::Arc;

use agent_blocking::blocking;
use agent_model::Digest;
use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;

use super::arrivals::Growth;
use super::loose::Temp;
use super::{SMALL, Shared, WriteError};
use crate::Hasher;

/// A blob of a [`Disk`](super::Disk) whose bytes arrive in pieces. Dropped before [`commit`](Self::commit), it
/// leaves nothing. A call that is dropped halfway still appends everything it was given.
#[derive(Debug)]
pub struct Ingest {
    shared: Arc<Shared>,
    digest: Digest,
    /// `None` after an error. Shared with the thread that appends, so that a dropped call loses no bytes.
    growing: Arc<Mutex<Option<Growing>>>,
}

#[derive(Debug)]
struct Growing {
    bytes: Gathered,
    hasher: Hasher,
}

#[derive(Debug)]
enum Gathered {
    Memory(BytesMut),
    File(Temp, Growth),
}

impl Ingest {
    /// An empty ingest. Blocks.
    pub(super) fn begin(shared: Arc<Shared>, digest: Digest) -> Result<Ingest, WriteError> {
        let bytes = match digest.size <= SMALL {
            true if !shared.home.has_room(digest.size) => {
                return Err(shared.home.write_error("segments", rustix::io::Errno::NOSPC));
            }
            true => Gathered::Memory(BytesMut::new()),
            false => {
                let temp = Temp::create(&shared.home, digest.size)?;
                let growth = Growth::begin(&shared, digest, temp.name().to_owned());
                Gathered::File(temp, growth)
            }
        };
        let growing = Growing { bytes, hasher: Hasher::new() };
        Ok(Ingest { shared, digest, growing: Arc::new(Mutex::new(Some(growing))) })
    }

    /// The blob that the bytes should be.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Bytes taken so far.
    pub fn written(&self) -> u64 {
        self.growing.lock().as_ref().map_or(0, |growing| growing.hasher.size())
    }

    /// Adds the next bytes. After an error nothing more can be added.
    pub async fn append(&mut self, bytes: Bytes) -> Result<(), WriteError> {
        let (digest, growing) = (self.digest, Arc::clone(&self.growing));
        blocking(move || {
            let mut slot = growing.lock();
            let Some(mut growing) = slot.take() else { return Err(WriteError::Abandoned { digest }) };
            growing.hasher.update(&bytes);
            if growing.hasher.size() > digest.size {
                return Err(WriteError::Mismatch { digest, actual: growing.hasher.finish() });
            }
            match &mut growing.bytes {
                Gathered::Memory(gathered) => gathered.extend_from_slice(&bytes),
                Gathered::File(temp, growth) => {
                    temp.append(&bytes)?;
                    growth.reached(growing.hasher.size());
                }
            }
            *slot = Some(growing);
            Ok(())
        })
        .await
    }

    /// Checks the bytes and keeps them.
    pub async fn commit(self) -> Result<(), WriteError> {
        let Ingest { shared, digest, growing } = self;
        blocking(move || {
            let Some(Growing { bytes, hasher }) = growing.lock().take() else {
                return Err(WriteError::Abandoned { digest });
            };
            let actual = hasher.finish();
            if actual != digest {
                return Err(WriteError::Mismatch { digest, actual });
            }
            match bytes {
                Gathered::Memory(bytes) => {
                    let written = shared.segments.write(&[(digest, bytes.freeze())]);
                    shared.arrivals.tell();
                    written
                }
                Gathered::File(temp, _growth) => {
                    let published = shared.loose.publish(vec![(digest, temp.finish()?)]);
                    published.into_iter().collect()
                }
            }
        })
        .await
    }
}
