//! Sends what a store lacks of a snapshot.
//!
//! Contents first, then directories, the root last, so that a store which has the root has the tree. Each
//! file is hashed again while it is sent: the store never gets other bytes than those that were scanned.

use std::collections::HashSet;
use std::io::Read;
use std::path::PathBuf;

use agent_model::Digest;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};

use super::scan::Snapshot;
use super::walk::Place;
use crate::digest_of;
use crate::parallel::blocking;
use crate::remote::Patience;
use crate::store::{
    BATCH_BLOBS, BATCH_BYTES, BlobStore, MissingError, SMALL_BLOB, WriteError, batches, file_chunks,
};

/// Batches and streams on their way at once.
const IN_FLIGHT: usize = 4;

/// How far a push has come. Only what the store lacked counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Files sent.
    pub files: u64,
    /// Files to send.
    pub files_total: u64,
    /// Bytes of them sent.
    pub bytes: u64,
    /// Bytes of them to send.
    pub bytes_total: u64,
}

/// What a push did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pushed {
    /// Files of the snapshot.
    pub files: u64,
    /// Files whose content the store lacked; files of equal content count once.
    pub files_sent: u64,
    /// Bytes sent, directories included.
    pub bytes_sent: u64,
}

/// Why a snapshot could not be sent.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    /// The store does not say what it lacks.
    #[error("cannot ask the store what it lacks")]
    Missing(#[source] MissingError),
    /// A file is no longer what was scanned.
    #[error("{path} has changed since it was scanned")]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// A file could not be read again.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        #[source]
        /// What the system said.
        source: std::io::Error,
    },
    /// The store does not take the content of a file.
    #[error("cannot send {path}")]
    File {
        /// The file.
        path: PathBuf,
        #[source]
        /// What the store said.
        source: WriteError,
    },
    /// The store does not take a directory.
    #[error("cannot send the directory listings")]
    Directory(#[source] WriteError),
}

/// Sends what `store` lacks of `snapshot`; `progress` is told after each batch and each large file.
pub async fn push(
    snapshot: &Snapshot,
    store: &impl BlobStore,
    progress: impl Fn(Progress) + Send + Sync,
) -> Result<Pushed, PushError> {
    let all: Vec<Digest> = snapshot
        .contents
        .iter()
        .map(|(d, _)| *d)
        .chain(snapshot.directories.iter().map(|(d, _)| *d))
        .collect();
    let missing: HashSet<Digest> =
        store.missing(&all).await.map_err(PushError::Missing)?.into_iter().collect();

    let contents: Vec<(Digest, Place)> =
        snapshot.contents.iter().filter(|(digest, _)| missing.contains(digest)).cloned().collect();
    let mut sent = Progress {
        files_total: contents.len() as u64,
        bytes_total: contents.iter().map(|(digest, _)| digest.size).sum(),
        ..Progress::default()
    };
    progress(sent);
    let (small, large): (Vec<_>, Vec<_>) =
        contents.into_iter().partition(|(digest, _)| digest.size <= SMALL_BLOB);
    let small = batches(small, BATCH_BYTES, BATCH_BLOBS, |(digest, _)| digest.size);
    let large = large.into_iter().map(|file| vec![file]);
    let mut sending = stream::iter(small.into_iter().chain(large).map(|files| send_files(store, files)))
        .buffer_unordered(IN_FLIGHT);
    while let Some(done) = sending.next().await {
        let (files, bytes) = done?;
        sent.files += files;
        sent.bytes += bytes;
        progress(sent);
    }
    let directories = send_directories(store, snapshot, &missing).await?;
    Ok(Pushed { files: snapshot.files, files_sent: sent.files, bytes_sent: sent.bytes + directories })
}

/// Sends a batch of small files or a single large one; returns how many files and bytes these were.
async fn send_files(store: &impl BlobStore, files: Vec<(Digest, Place)>) -> Result<(u64, u64), PushError> {
    let sum = (files.len() as u64, files.iter().map(|(digest, _)| digest.size).sum());
    match &files[..] {
        [(digest, place)] if digest.size > SMALL_BLOB => send_large(store, *digest, place.clone()).await?,
        _ => send_small(store, files).await?,
    }
    Ok(sum)
}

async fn send_small(store: &impl BlobStore, files: Vec<(Digest, Place)>) -> Result<(), PushError> {
    let (blobs, places) = blocking(move || {
        let mut blobs = Vec::with_capacity(files.len());
        for (digest, place) in &files {
            blobs.push((*digest, read_small(*digest, place)?));
        }
        Ok((blobs, files.into_iter().map(|(_, place)| place).collect::<Vec<_>>()))
    })
    .await?;
    let results = store.write_batch(blobs).await;
    for (place, result) in places.iter().zip(results) {
        result.map_err(|source| PushError::File { path: place.shown(), source })?;
    }
    Ok(())
}

fn read_small(digest: Digest, place: &Place) -> Result<Bytes, PushError> {
    let fail = |source| PushError::Read { path: place.shown(), source };
    let mut content = Vec::with_capacity(usize::try_from(digest.size).unwrap_or(0) + 1);
    // One byte more than expected tells that the file has grown, however large it is by now.
    place.open().map_err(fail)?.take(digest.size + 1).read_to_end(&mut content).map_err(fail)?;
    match digest_of(&content) == digest {
        true => Ok(content.into()),
        false => Err(PushError::Changed { path: place.shown() }),
    }
}

async fn send_large(store: &impl BlobStore, digest: Digest, place: Place) -> Result<(), PushError> {
    let path = place.shown();
    let mut patience = Patience::default();
    loop {
        let fail = |source| PushError::Read { path: path.clone(), source };
        let again = place.clone();
        let file = blocking(move || again.open()).await.map_err(fail)?;
        let fail = |source| PushError::File { path: path.clone(), source };
        match store.write(digest, file_chunks(file, path.clone())).await {
            Ok(()) => return Ok(()),
            Err(WriteError::Mismatch { .. }) => return Err(PushError::Changed { path }),
            Err(WriteError::Remote { digest, source }) => {
                let given_up = |status| fail(WriteError::Remote { digest, source: Box::new(status) });
                patience.wait(*source).await.map_err(given_up)?;
            }
            Err(error) => return Err(fail(error)),
        }
    }
}

/// Sends the missing directories, the root after all others; returns how many bytes these were.
async fn send_directories(
    store: &impl BlobStore,
    snapshot: &Snapshot,
    missing: &HashSet<Digest>,
) -> Result<u64, PushError> {
    let (root, others): (Vec<_>, Vec<_>) = snapshot
        .directories
        .iter()
        .filter(|(digest, _)| missing.contains(digest))
        .cloned()
        .partition(|(digest, _)| *digest == snapshot.root);
    let mut bytes = 0;
    for batch in
        batches(others, BATCH_BYTES, BATCH_BLOBS, |(digest, _)| digest.size).into_iter().chain([root])
    {
        bytes += batch.iter().map(|(digest, _)| digest.size).sum::<u64>();
        for result in store.write_batch(batch).await {
            result.map_err(PushError::Directory)?;
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
