//! Blobs on their way into the store: others read them as they grow.
//!
//! A reader gets the bytes in the order in which they come, and the last one only when all of them were checked: what
//! it was given to the end is the blob.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use agent_blocking::blocking;
use agent_model::Digest;
use bytes::{Bytes, BytesMut};
use futures_util::stream::{self, StreamExt};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::timeout;

use super::{CHUNK, Chunks, ReadError, Shared};

/// After so long without new bytes a reader gets an empty piece: the blob is still awaited.
const QUIET: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    growing: Mutex<HashMap<Digest, (String, watch::Receiver<u64>)>>,
    news: watch::Sender<()>,
}

impl Arrivals {
    /// Notified when a blob begins to arrive, and when some have arrived.
    pub(super) fn news(&self) -> watch::Receiver<()> {
        self.news.subscribe()
    }

    pub(super) fn tell(&self) {
        self.news.send_replace(());
    }
}

/// A large blob that grows in a file; dropped when it is in the store, or will not be.
#[derive(Debug)]
pub(super) struct Growth {
    shared: Arc<Shared>,
    digest: Digest,
    length: watch::Sender<u64>,
}

impl Growth {
    /// Of the blob that grows in the file of this name.
    pub(super) fn begin(shared: &Arc<Shared>, digest: Digest, name: String) -> Growth {
        let (length, seen) = watch::channel(0);
        shared.arrivals.growing.lock().insert(digest, (name, seen));
        shared.arrivals.tell();
        Growth { shared: Arc::clone(shared), digest, length }
    }

    /// The file has so many bytes now.
    pub(super) fn reached(&self, length: u64) {
        self.length.send_replace(length);
    }
}

impl Drop for Growth {
    fn drop(&mut self) {
        let mut growing = self.shared.arrivals.growing.lock();
        // The same blob may arrive twice at a time.
        if growing.get(&self.digest).is_some_and(|(_, seen)| seen.same_channel(&self.length.subscribe())) {
            growing.remove(&self.digest);
        }
        drop(growing);
        self.shared.arrivals.tell();
    }
}

struct Follower {
    shared: Arc<Shared>,
    digest: Digest,
    file: Arc<File>,
    seen: watch::Receiver<u64>,
    at: u64,
}

/// The bytes of a blob that arrives now, as they come; an empty piece whenever there are none for a while.
pub(super) fn follow(shared: &Arc<Shared>, digest: Digest) -> Option<Chunks> {
    let (name, seen) = shared.arrivals.growing.lock().get(&digest)?.clone();
    let file = Arc::new(shared.home.open_file(&name).ok()?);
    let follower = Follower { shared: Arc::clone(shared), digest, file, seen, at: 0 };
    let pieces = stream::try_unfold(follower, |mut follower| async move {
        Ok(follower.next().await?.map(|piece| (piece, follower)))
    });
    Some(pieces.boxed())
}

impl Follower {
    async fn next(&mut self) -> Result<Option<Bytes>, ReadError> {
        if self.at == self.digest.size {
            return Ok(None);
        }
        let mut length = *self.seen.borrow_and_update();
        if length.min(self.digest.size - 1) <= self.at {
            match timeout(QUIET, self.seen.changed()).await {
                Err(_) => return Ok(Some(Bytes::new())),
                Ok(Ok(())) => length = *self.seen.borrow_and_update(),
                Ok(Err(_)) if self.shared.holds(&self.digest) => length = self.digest.size + 1,
                Ok(Err(_)) => return Err(ReadError::Absent { digest: self.digest }),
            }
        }
        Ok(Some(self.piece(length).await?))
    }

    /// The next bytes of a file that has `length` of them; more than all means that it is whole and checked.
    async fn piece(&mut self, length: u64) -> Result<Bytes, ReadError> {
        let end = if length > self.digest.size { self.digest.size } else { length.min(self.digest.size - 1) };
        let most = usize::try_from(end.saturating_sub(self.at)).unwrap_or(CHUNK).min(CHUNK);
        let (file, at) = (Arc::clone(&self.file), self.at);
        let read = blocking(move || read_so_far(&file, at, most)).await;
        let path = || self.shared.home.at(&super::blob_name(&self.digest));
        let piece = read.map_err(|source| ReadError::Disk { path: path(), source })?;
        self.at += piece.len() as u64;
        Ok(piece)
    }
}

/// So many bytes; those beyond the end of the file are a hole that is not there yet.
fn read_so_far(file: &File, at: u64, length: usize) -> io::Result<Bytes> {
    let mut piece = BytesMut::zeroed(length);
    let mut filled = 0;
    while filled < length {
        match file.read_at(&mut piece[filled..], at + filled as u64)? {
            0 => break,
            more => filled += more,
        }
    }
    Ok(piece.freeze())
}
