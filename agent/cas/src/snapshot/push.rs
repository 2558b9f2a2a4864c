//! Sends what a store lacks of a snapshot.
//!
//! Contents first, then directories, the root last, so that a store which has the root has the tree. Each
//! file is hashed again while it is sent: the store never gets other bytes than those that were scanned.
//!
//! Afterwards the store is asked again, and blobs that it took and does not have are sent again. A blob that it
//! reports missing but that can be read from it counts as present.
//!
//! Each of these steps is a round trip. Where somebody checks the whole tree afterwards, [`push_lightly`] saves most of
//! them.

use std::collections::HashSet;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use agent_blocking::blocking;
use agent_model::Digest;
use bytes::Bytes;
use futures_util::future::ready;
use futures_util::stream::{FuturesUnordered, StreamExt, TryStreamExt};
use tonic::Status;

use super::scan::Snapshot;
use super::walk::{FilePlace, Folder, Leaf};
use crate::counter::Meter;
use crate::digest_of;
use crate::remote::RetryPolicy;
use crate::store::{
    BATCH_BLOBS, BATCH_BYTES, BlobStore, MissingError, SMALL_BLOB, WriteError, batches, file_chunks,
};

/// Batches and streams on their way at once.
const IN_FLIGHT: usize = 4;

/// How often progress is told within a large file.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// Digests in one question to the store. They are in memory several times until it is answered.
const QUESTION: usize = 40_000;

/// How far a push has come. Only what the store lacked counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PushProgress {
    /// Files sent.
    pub files: u64,
    /// Files to send.
    pub files_total: u64,
    /// Bytes of them sent, also of files that are only partly sent yet.
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
#[allow(missing_docs, reason = "the messages say it")]
pub enum PushError {
    #[error("cannot ask the store what it lacks")]
    Missing(#[source] MissingError),
    #[error("{path} has changed since it was scanned")]
    Changed { path: PathBuf },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot send {path}")]
    File { path: PathBuf, source: WriteError },
    #[error("cannot send the directory listings")]
    Directory(#[source] WriteError),
    #[error("the store does not keep what it takes")]
    Unkept(#[source] WriteError),
}

/// The same in two round trips, for a small change of a tree that `store` has: one small question, then everything that
/// it lacks at once.
///
/// It is asked for the files that were read anew, for the directories above them, and for those beside them. Files whose
/// hash was cached count as sent before if the store has any of these directories, and a directory that it has counts
/// as complete. So the caller must have the whole tree checked, and [`push`] if something is missing. A store that
/// offers no such check gets an ordinary push.
pub async fn push_lightly(
    snapshot: &Snapshot,
    store: &impl BlobStore,
    progress: impl Fn(PushProgress) + Send + Sync,
) -> Result<Pushed, PushError> {
    let (mut above, mut beside) = (HashSet::from([snapshot.root]), HashSet::new());
    survey(&snapshot.top, &mut above, &mut beside);
    let (read, cached): (Vec<_>, Vec<_>) = snapshot.contents().into_iter().partition(|leaf| leaf.read);
    let near = |folder: &&Folder| above.contains(&folder.digest) || beside.contains(&folder.digest);
    let (near, far): (Vec<_>, Vec<_>) = snapshot.directories().into_iter().partition(near);
    let files = |leaves: Vec<_>| leaves.into_iter().map(Blob::File);
    let folders = |folders: &[_]| folders.iter().copied().map(Blob::Folder).collect::<Vec<_>>();
    let mut open = missing(files(read).chain(folders(&near)).collect(), store).await?;
    if !store.checks_trees().await {
        return push(snapshot, store, progress).await;
    }
    let lacks: HashSet<Digest> = open.iter().filter(|blob| !blob.is_file()).map(Blob::digest).collect();
    // Every store has the empty directory.
    let is_known =
        near.iter().any(|folder| folder.digest != Digest::EMPTY && !lacks.contains(&folder.digest));
    let mut unsure = if is_known { Vec::new() } else { files(cached).collect() };
    if lacks.iter().any(|lacked| !above.contains(lacked)) {
        unsure.extend(folders(&far));
    }
    // Before those that were asked for first, so that the root stays the last.
    open.splice(0..0, missing(unsure, store).await?);
    let (sent, listings) = send_all(open, None, store, &progress).await?;
    Ok(Pushed { files: snapshot.files, files_sent: sent.files, bytes_sent: sent.bytes + listings })
}

/// Finds the directories with files below that were read anew, and the other directories in these.
fn survey(folder: &Folder, above: &mut HashSet<Digest>, beside: &mut HashSet<Digest>) -> bool {
    let below: Vec<bool> = folder.folders.iter().map(|(_, child)| survey(child, above, beside)).collect();
    let changed = below.contains(&true) || folder.files.iter().any(|leaf| leaf.read);
    if changed {
        above.insert(folder.digest);
    }
    if above.contains(&folder.digest) {
        beside.extend(folder.folders.iter().map(|(_, child)| child.digest));
    }
    changed
}

/// Sends what `store` lacks of `snapshot`; calls `progress` after each batch and each large file.
pub async fn push(
    snapshot: &Snapshot,
    store: &impl BlobStore,
    progress: impl Fn(PushProgress) + Send + Sync,
) -> Result<Pushed, PushError> {
    let all = snapshot.contents().into_iter().map(Blob::File);
    let all = all.chain(snapshot.directories().into_iter().map(Blob::Folder)).collect();
    let mut open = missing(all, store).await?;
    let mut pushed = Pushed { files: snapshot.files, files_sent: 0, bytes_sent: 0 };
    let mut retry = RetryPolicy::default();
    while !open.is_empty() {
        let (sent, directories) = send_all(open.clone(), Some(snapshot.root), store, &progress).await?;
        if pushed.bytes_sent == 0 {
            pushed = Pushed { files_sent: sent.files, bytes_sent: sent.bytes + directories, ..pushed };
        }
        open = missing(open, store).await?;
        let Some(digest) = not_there(&open, store).await else { break };
        let unkept = |_| PushError::Unkept(WriteError::Vanished { digest });
        retry.wait(Status::aborted("to be sent again")).await.map_err(unkept)?;
    }
    Ok(pushed)
}

/// One of these blobs, which the store reports missing, that cannot be read from it either.
async fn not_there(blobs: &[Blob<'_>], store: &impl BlobStore) -> Option<Digest> {
    for blob in blobs {
        let digest = blob.digest();
        let read = async { store.read(digest, 0).await?.try_for_each(|_| ready(Ok(()))).await };
        if read.await.is_err() {
            return Some(digest);
        }
    }
    None
}

/// Sends these, the root alone and last where one is named; returns the files sent, and the bytes of directories.
async fn send_all(
    mut missing: Vec<Blob<'_>>,
    root: Option<Digest>,
    store: &impl BlobStore,
    progress: &(impl Fn(PushProgress) + Send + Sync),
) -> Result<(PushProgress, u64), PushError> {
    let root = missing.pop_if(|blob| Some(blob.digest()) == root);
    let mut sent = PushProgress::default();
    for file in missing.iter().filter(|blob| blob.is_file()) {
        sent.files_total += 1;
        sent.bytes_total += file.digest().size;
    }
    progress(sent);
    // Directories are sent with the last small files: none of them is of use without the root.
    let (small, large): (Vec<_>, Vec<_>) =
        missing.into_iter().partition(|blob| !blob.is_file() || blob.digest().size <= SMALL_BLOB);
    let small = batches(small, BATCH_BYTES, BATCH_BLOBS, |blob| blob.digest().size);
    let mut waiting = [small, large.into_iter().map(|blob| vec![blob]).collect()].concat().into_iter();
    let under_way = Arc::new(AtomicU64::new(0));
    let start = |blobs| send(store, blobs, &under_way);
    let mut sending: FuturesUnordered<_> = waiting.by_ref().take(IN_FLIGHT).map(start).collect();
    let mut directories = 0;
    let mut tick = tokio::time::interval(PROGRESS_EVERY);
    loop {
        tokio::select! {
            part = sending.next() => {
                let Some(part) = part else { break };
                let part = part?;
                sending.extend(waiting.next().map(start));
                sent.files += part.files;
                sent.bytes += part.bytes;
                directories += part.directories;
            }
            _ = tick.tick() => {}
        }
        let bytes = sent.bytes.saturating_add(under_way.load(Ordering::Relaxed)).min(sent.bytes_total);
        progress(PushProgress { bytes, ..sent });
    }
    if let Some(root) = root {
        directories += send(store, vec![root], &under_way).await?.directories;
    }
    Ok((sent, directories))
}

/// Something the store may lack.
#[derive(Clone, Copy)]
enum Blob<'a> {
    File(&'a Leaf),
    Folder(&'a Folder),
}

impl Blob<'_> {
    fn digest(&self) -> Digest {
        match self {
            Blob::File(leaf) => leaf.digest(),
            Blob::Folder(folder) => folder.digest,
        }
    }

    fn is_file(&self) -> bool {
        matches!(self, Blob::File(_))
    }
}

/// What was sent: files and their bytes, and the bytes of directories.
struct Part {
    files: u64,
    bytes: u64,
    directories: u64,
}

impl Part {
    fn of(blobs: &[Blob<'_>]) -> Part {
        let mut part = Part { files: 0, bytes: 0, directories: 0 };
        for blob in blobs {
            if blob.is_file() {
                part.files += 1;
                part.bytes += blob.digest().size;
            } else {
                part.directories += blob.digest().size;
            }
        }
        part
    }
}

/// Those that the store lacks, in order.
async fn missing<'a>(all: Vec<Blob<'a>>, store: &impl BlobStore) -> Result<Vec<Blob<'a>>, PushError> {
    let mut lacked = Vec::new();
    for some in all.chunks(QUESTION) {
        let digests: Vec<Digest> = some.iter().map(Blob::digest).collect();
        let missing = store.missing(&digests).await.map_err(PushError::Missing)?;
        // It answers in the order asked. The same digest may be a file's and a directory's: then each is sent.
        let missing: HashSet<Digest> = missing.into_iter().collect();
        lacked.extend(some.iter().filter(|blob| missing.contains(&blob.digest())));
    }
    Ok(lacked)
}

/// Sends a batch of small blobs or a single large one.
async fn send(
    store: &impl BlobStore,
    blobs: Vec<Blob<'_>>,
    under_way: &Arc<AtomicU64>,
) -> Result<Part, PushError> {
    let part = Part::of(&blobs);
    match &blobs[..] {
        [Blob::File(leaf)] if leaf.stamp.size > SMALL_BLOB => {
            send_large(store, leaf.digest(), leaf.place.clone(), under_way).await?;
        }
        _ => send_small(store, blobs).await?,
    }
    Ok(part)
}

async fn send_small(store: &impl BlobStore, blobs: Vec<Blob<'_>>) -> Result<(), PushError> {
    let (mut places, mut contents) = (Vec::new(), Vec::new());
    for blob in blobs {
        match blob {
            Blob::File(leaf) => places.push((leaf.digest(), leaf.place.clone())),
            Blob::Folder(folder) => contents.push(folder.message()),
        }
    }
    let messages = contents.len();
    let (mut contents, places) = blocking(move || {
        for (digest, place) in &places {
            contents.push((*digest, read_small(*digest, place)?));
        }
        Ok((contents, places))
    })
    .await?;
    contents.rotate_left(messages);
    let mut results = store.write_batch(contents).await.into_iter();
    for ((_, place), result) in places.iter().zip(results.by_ref()) {
        result.map_err(|source| PushError::File { path: place.shown(), source })?;
    }
    results.try_for_each(|result| result.map_err(PushError::Directory))
}

fn read_small(digest: Digest, place: &FilePlace) -> Result<Bytes, PushError> {
    let fail = |source| PushError::Read { path: place.shown(), source };
    let mut content = Vec::with_capacity(usize::try_from(digest.size).unwrap_or(0) + 1);
    place.open().map_err(fail)?.take(most(digest, place)).read_to_end(&mut content).map_err(fail)?;
    match digest_of(&content) == digest {
        true => Ok(content.into()),
        false => Err(PushError::Changed { path: place.shown() }),
    }
}

/// How much is read of a file that was scanned. One byte more than it had shows that it has grown, however large it is
/// by now; where it may grow, nothing that follows is of interest.
fn most(digest: Digest, place: &FilePlace) -> u64 {
    digest.size.saturating_add(u64::from(!place.dir.root.may_grow))
}

async fn send_large(
    store: &impl BlobStore,
    digest: Digest,
    place: FilePlace,
    under_way: &Arc<AtomicU64>,
) -> Result<(), PushError> {
    let path = place.shown();
    let mut retry = RetryPolicy::default();
    loop {
        let fail = |source| PushError::Read { path: path.clone(), source };
        let again = place.clone();
        let file = blocking(move || again.open()).await.map_err(fail)?;
        let fail = |source| PushError::File { path: path.clone(), source };
        let meter = Meter::new(under_way);
        match store.write(digest, meter.count(file_chunks(file, path.clone(), most(digest, &place)))).await {
            Ok(()) => return Ok(()),
            Err(WriteError::Mismatch { .. }) => return Err(PushError::Changed { path }),
            Err(WriteError::Remote { digest, source }) => {
                let given_up = |status| fail(WriteError::Remote { digest, source: Box::new(status) });
                retry.wait(*source).await.map_err(given_up)?;
            }
            Err(WriteError::Vanished { digest }) => {
                let given_up = |_| fail(WriteError::Vanished { digest });
                retry.wait(Status::aborted("to be sent again")).await.map_err(given_up)?;
            }
            Err(error) => return Err(fail(error)),
        }
    }
}

#[cfg(test)]
mod tests;
