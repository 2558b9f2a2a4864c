//! From a root digest to a directory.
//!
//! The tree is written into `<dest>.partial` ([`Ground`]) and renamed when it is complete, so `dest` is whole
//! or absent; links are made last.
//! A partial directory that a crash, an error or a dropped call leaves is removed by the next call or with
//! the parent directory. Nothing is flushed: after a power failure the job is started over anyway.
//!
//! Small files are read in batches and written by blocking threads while the next batch is read. For a large
//! one a store may return an open file, which is cloned where the file system can (a clone shares blocks,
//! never the inode) and copied elsewhere. A tree that is larger than the room for it is refused before anything
//! is written. The memory this takes does not grow with the number of files: paths are made from the tree as they
//! are needed, and equal contents are read once only where they are near each other.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use agent_blocking::blocking;
use agent_model::{Digest, failpoint};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};

use super::ground::{Ground, Manner, MaterializeError, Target};
use super::tree::{self, Entry, Tree};
use crate::counter::ByteCounter;
use crate::holes;
use crate::store::{BATCH_BLOBS, BATCH_BYTES, BlobStore, ReadError, SMALL_BLOB, batches};

/// Batches and large files read at once.
const IN_FLIGHT: usize = 4;

/// Files that are looked at together for equal contents.
const WINDOW: usize = 10_000;

/// What was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Laid {
    /// Files.
    pub files: u64,
    /// Bytes in them.
    pub bytes: u64,
}

impl Laid {
    pub(super) fn of(tree: &Tree) -> Laid {
        Laid { files: tree.extent().files, bytes: tree.extent().bytes }
    }
}

/// Writes the tree to `dest` for a person: executable files stay so, all others are not, and the process's
/// file mode mask applies. `dest` must not exist, or be empty.
pub async fn download(store: &impl BlobStore, root: Digest, dest: &Path) -> Result<Laid, MaterializeError> {
    download_parts(store, root, &[], dest, &Arc::default()).await
}

/// As [`download`], but only these files and directories of it, each the path below the root; all of it if none is
/// named. A link to a place that is left out leads nowhere. What is written is counted.
pub async fn download_parts(
    store: &impl BlobStore,
    root: Digest,
    parts: &[String],
    dest: &Path,
    counter: &Arc<ByteCounter>,
) -> Result<Laid, MaterializeError> {
    let mut tree = Arc::new(tree::fetch(store, root).await.map_err(MaterializeError::Tree)?);
    if !parts.is_empty() {
        let pruned =
            tree.only(parts).map_err(|path| MaterializeError::NoSuchPart { path: path.to_owned() })?;
        tree = Arc::new(blocking(move || pruned.check()).await.map_err(MaterializeError::Tree)?);
    }
    lay(store, &tree, dest, Manner::Person, counter).await
}

/// Writes the tree to `dest`.
pub(super) async fn lay(
    store: &impl BlobStore,
    tree: &Arc<Tree>,
    dest: &Path,
    manner: Manner,
    counter: &Arc<ByteCounter>,
) -> Result<Laid, MaterializeError> {
    let staging = staging_path(dest)?;
    let result = fill(store, tree, &staging, manner, counter).await;
    let dest = dest.to_owned();
    blocking(move || {
        result.and_then(|()| publish(&staging, &dest)).inspect_err(|_| {
            // The first error is more useful than one of the clean-up, which the next call repeats.
            let _ = std::fs::remove_dir_all(&staging);
        })
    })
    .await?;
    Ok(Laid::of(tree))
}

pub(super) fn staging_path(dest: &Path) -> Result<PathBuf, MaterializeError> {
    let name = dest.file_name().ok_or_else(|| MaterializeError::Destination { path: dest.to_owned() })?;
    let mut staging = OsString::from(name);
    staging.push(".partial");
    Ok(dest.with_file_name(staging))
}

/// Renames a complete tree to its final name.
pub(super) fn publish(staging: &Path, dest: &Path) -> Result<(), MaterializeError> {
    let renamed = failpoint::hit("cas.tree.rename").and_then(|()| std::fs::rename(staging, dest));
    renamed.map_err(|source| match source.kind() {
        io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            MaterializeError::Exists { path: dest.to_owned() }
        }
        _ => MaterializeError::Write { path: dest.to_owned(), source },
    })
}

/// Writes everything below `staging`, which is made anew.
async fn fill(
    store: &impl BlobStore,
    tree: &Arc<Tree>,
    staging: &Path,
    manner: Manner,
    counter: &Arc<ByteCounter>,
) -> Result<(), MaterializeError> {
    let (path, shared, counter) = (staging.to_owned(), Arc::clone(tree), Arc::clone(counter));
    let ground = Arc::new(blocking(move || Ground::prepare(path, manner, &shared, counter)).await?);
    lay_files(store, &ground, tree.files()).await?;
    let shared = Arc::clone(tree);
    blocking(move || shared.links().try_for_each(|(path, to)| ground.link(&path, to))).await
}

/// Writes these files, none of which exists yet.
pub(super) async fn lay_files(
    store: &impl BlobStore,
    ground: &Arc<Ground>,
    mut files: impl Iterator<Item = Entry>,
) -> Result<(), MaterializeError> {
    let windows = std::iter::from_fn(|| {
        let window: Vec<Entry> = files.by_ref().take(WINDOW).collect();
        (!window.is_empty()).then_some(window)
    });
    // After a failure nothing more is begun, and what was begun is waited for: a thread that still writes
    // would put files back while they are removed.
    let failed = AtomicBool::new(false);
    let work = windows.flat_map(by_content).take_while(|_| !failed.load(Ordering::Relaxed));
    let mut laying =
        stream::iter(work.map(|batch| lay_batch(store, ground, batch))).buffer_unordered(IN_FLIGHT);
    let mut result = Ok(());
    while let Some(done) = laying.next().await {
        failed.fetch_or(done.is_err(), Ordering::Relaxed);
        result = result.and(done);
    }
    result
}

/// These files by content, in batches that are read together: small contents first, then large ones one by one.
fn by_content(files: Vec<Entry>) -> impl Iterator<Item = Vec<Content>> {
    let mut places: HashMap<Digest, Vec<Target>> = HashMap::new();
    let mut order = Vec::new();
    for file in files {
        let targets = places.entry(file.digest).or_default();
        if targets.is_empty() {
            order.push(file.digest);
        }
        targets.push(Target { path: file.path, executable: file.executable });
    }
    let contents = order.into_iter().filter_map(|digest| Some((digest, places.remove(&digest)?)));
    let (small, large): (Vec<Content>, Vec<Content>) =
        contents.partition(|(digest, _)| digest.size <= SMALL_BLOB);
    let small = batches(small, BATCH_BYTES, BATCH_BLOBS, |(digest, _)| digest.size);
    small.into_iter().chain(large.into_iter().map(|content| vec![content]))
}

/// A content and all its places.
type Content = (Digest, Vec<Target>);

async fn lay_batch(
    store: &impl BlobStore,
    ground: &Arc<Ground>,
    mut batch: Vec<Content>,
) -> Result<(), MaterializeError> {
    if batch.len() == 1 && batch[0].0.size > SMALL_BLOB {
        let (digest, targets) = batch.remove(0);
        return lay_large(store, ground, digest, targets).await;
    }
    let answers = store.read_batch(batch.iter().map(|(digest, _)| *digest).collect()).await;
    let ground = Arc::clone(ground);
    blocking(move || {
        for ((_, targets), answer) in batch.iter().zip(answers) {
            let bytes: Bytes =
                answer.map_err(|source| MaterializeError::Read { path: targets[0].path.clone(), source })?;
            for target in targets {
                let mut file = holes::Writer::new(ground.create(target)?);
                let written = ground.write(&mut file, &bytes).and_then(|()| file.finish());
                written.map_err(|source| ground.fail(&target.path, source))?;
            }
        }
        Ok(())
    })
    .await
}

async fn lay_large(
    store: &impl BlobStore,
    ground: &Arc<Ground>,
    digest: Digest,
    targets: Vec<Target>,
) -> Result<(), MaterializeError> {
    for target in targets {
        let target = Arc::new(target);
        let Err(error) = lay_one(store, ground, digest, &target).await else { continue };
        if !matches!(&error, MaterializeError::Read { source, .. } if source.is_damage()) {
            return Err(error);
        }
        // Once the store has quarantined the damaged blob, it may fetch a good one.
        store.quarantine(digest).await;
        ground.unlink(&target.path)?;
        match lay_one(store, ground, digest, &target).await {
            Err(MaterializeError::Read { source: ReadError::Absent { .. }, .. }) => return Err(error),
            again => again?,
        }
    }
    Ok(())
}

async fn lay_one(
    store: &impl BlobStore,
    ground: &Arc<Ground>,
    digest: Digest,
    target: &Arc<Target>,
) -> Result<(), MaterializeError> {
    if let Some(source) = store.file(digest).await {
        let (ground, target) = (Arc::clone(ground), Arc::clone(target));
        return blocking(move || ground.copy(digest, source, &target)).await;
    }
    let fail = |source| MaterializeError::Read { path: target.path.clone(), source };
    let mut chunks = store.read(digest, 0).await.map_err(fail)?;
    let mut file = holes::Writer::new(ground.create(target)?);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(fail)?;
        let shared = Arc::clone(ground);
        let (written, same) = blocking(move || (shared.write(&mut file, &chunk), file)).await;
        written.map_err(|source| ground.fail(&target.path, source))?;
        file = same;
    }
    blocking(move || file.finish()).await.map_err(|source| ground.fail(&target.path, source))
}

#[cfg(test)]
mod tests;
