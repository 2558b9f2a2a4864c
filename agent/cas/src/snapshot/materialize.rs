//! From a root digest to a directory.
//!
//! The tree is written into `<dest>.partial` and renamed when it is complete, so `dest` is whole or not
//! there. Everything is created exclusively below an open directory, passing no link; links come last.
//! What a crash, an error or a dropped call leaves under the partial name goes with the next call or with
//! the parent directory. Nothing is flushed: after a power failure the job is started over anyway.
//!
//! Small files travel in batches and are written by blocking threads while the next batch is read. Of large
//! ones a store with files at hand gives an open file, which is cloned where the file system can (a clone
//! shares blocks, never the inode) and copied elsewhere. A tree that is larger than the room for it is refused
//! before anything is written. The memory this takes does not grow with the number of files: paths are made
//! of the tree as they are needed, and equal contents are read once only where they are near each other.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use agent_model::{Digest, failpoint};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use rustix::fs::{Mode, OFlags, ResolveFlags};

use super::tree::{self, Entry, Extent, Tree, TreeError};
use crate::Hasher;
use crate::parallel::blocking;
use crate::store::{BATCH_BLOBS, BATCH_BYTES, BlobStore, CHUNK, ReadError, SMALL_BLOB, batches};

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

/// Why a tree could not be written.
#[derive(Debug, thiserror::Error)]
pub enum MaterializeError {
    /// The tree itself cannot be used.
    #[error("the snapshot cannot be used")]
    Tree(#[source] TreeError),
    /// There is something at the destination.
    #[error("{path} exists and is not an empty directory")]
    Exists {
        /// The destination.
        path: PathBuf,
    },
    /// The destination is not a place for a directory.
    #[error("{path} does not name a directory to be made")]
    Destination {
        /// The destination.
        path: PathBuf,
    },
    /// The content of a file could not be read.
    #[error("cannot read the content of {path}")]
    Read {
        /// The file, relative to the destination.
        path: String,
        #[source]
        /// What the store said.
        source: ReadError,
    },
    /// A file, directory or link could not be written.
    #[error("cannot write {path}")]
    Write {
        /// The file, directory or link.
        path: PathBuf,
        #[source]
        /// What the system said.
        source: io::Error,
    },
}

/// Writes the tree to `dest` for a job to work in: directories and files have mode 0775, so that a script
/// runs whether or not it was executable where it came from. `dest` must not exist, or be empty.
pub async fn materialize(
    store: &impl BlobStore,
    root: Digest,
    dest: &Path,
) -> Result<Laid, MaterializeError> {
    lay(store, root, dest, Modes::Job).await
}

/// Writes the tree to `dest` for a person: executable files stay so, all others are not, and the process's
/// file mode mask applies. `dest` must not exist, or be empty.
pub async fn download(store: &impl BlobStore, root: Digest, dest: &Path) -> Result<Laid, MaterializeError> {
    lay(store, root, dest, Modes::Recorded).await
}

/// The permissions of what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Modes {
    Job,
    Recorded,
}

async fn lay(
    store: &impl BlobStore,
    root: Digest,
    dest: &Path,
    modes: Modes,
) -> Result<Laid, MaterializeError> {
    let tree = Arc::new(tree::fetch(store, root).await.map_err(MaterializeError::Tree)?);
    let laid = Laid { files: tree.extent().files, bytes: tree.extent().bytes };
    let staging = staging_path(dest)?;
    let result = fill(store, &tree, &staging, modes).await;
    let dest = dest.to_owned();
    blocking(move || {
        result.and_then(|()| publish(&staging, &dest)).inspect_err(|_| {
            // The error at hand says more than one about the clean-up, which the next call repeats.
            let _ = std::fs::remove_dir_all(&staging);
        })
    })
    .await?;
    Ok(laid)
}

fn staging_path(dest: &Path) -> Result<PathBuf, MaterializeError> {
    let name = dest.file_name().ok_or_else(|| MaterializeError::Destination { path: dest.to_owned() })?;
    let mut staging = OsString::from(name);
    staging.push(".partial");
    Ok(dest.with_file_name(staging))
}

fn publish(staging: &Path, dest: &Path) -> Result<(), MaterializeError> {
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
    modes: Modes,
) -> Result<(), MaterializeError> {
    let (path, shared) = (staging.to_owned(), Arc::clone(tree));
    let ground = Arc::new(blocking(move || Ground::prepare(path, modes, &shared)).await?);

    let mut files = tree.files();
    let windows = std::iter::from_fn(|| {
        let window: Vec<Entry> = files.by_ref().take(WINDOW).collect();
        (!window.is_empty()).then_some(window)
    });
    // After a failure nothing more is begun, and what was begun is waited for: a thread that still writes
    // would put files back while they are removed.
    let failed = AtomicBool::new(false);
    let work = windows.flat_map(by_content).take_while(|_| !failed.load(Ordering::Relaxed));
    let mut laying =
        stream::iter(work.map(|batch| lay_batch(store, &ground, batch))).buffer_unordered(IN_FLIGHT);
    let mut result = Ok(());
    while let Some(done) = laying.next().await {
        failed.fetch_or(done.is_err(), Ordering::Relaxed);
        result = result.and(done);
    }
    drop(laying);
    result?;
    let shared = Arc::clone(tree);
    blocking(move || ground.links(&shared)).await
}

/// These files by content, in what is read together: batches of small contents, then large ones one by one.
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

/// A place for a content.
#[derive(Debug)]
struct Target {
    path: String,
    executable: bool,
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
                let mut file = ground.create(target)?;
                write(&mut file, &bytes).map_err(|source| ground.fail(&target.path, source))?;
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
        // Once the store has put the damaged blob away, it may know where to get a good one.
        store.distrust(digest).await;
        ground.remove(&target).map_err(|source| ground.fail(&target.path, source))?;
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
    let mut file = ground.create(target)?;
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(fail)?;
        let (written, same) = blocking(move || (write(&mut file, &chunk), file)).await;
        written.map_err(|source| ground.fail(&target.path, source))?;
        file = same;
    }
    Ok(())
}

fn write(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    failpoint::hit("cas.tree.write")?;
    file.write_all(bytes)
}

/// The directory that is being filled.
#[derive(Debug)]
struct Ground {
    path: PathBuf,
    root: OwnedFd,
    modes: Modes,
}

impl Ground {
    /// An empty directory at `path` with all directories of `tree` in it, if there is room for the tree.
    fn prepare(path: PathBuf, modes: Modes, tree: &Tree) -> Result<Ground, MaterializeError> {
        let fail = |source| MaterializeError::Write { path: path.clone(), source };
        match std::fs::remove_dir_all(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(fail(source)),
            _ => {}
        }
        std::fs::create_dir(&path).map_err(fail)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = rustix::fs::open(&path, flags, Mode::empty()).map_err(|source| fail(source.into()))?;
        let ground = Ground { path, root, modes };
        if !ground.has_room(tree.extent()) {
            return Err(ground.fail("", io::ErrorKind::StorageFull.into()));
        }
        for branch in tree.branches() {
            ground.directory(&branch.path).map_err(|source| ground.fail(&branch.path, source))?;
        }
        Ok(ground)
    }

    /// The file system has room for all of it; one that does not say is tried.
    fn has_room(&self, extent: Extent) -> bool {
        let Ok(disk) = rustix::fs::fstatvfs(&self.root) else { return true };
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        let inodes = extent.directories + extent.files + extent.links;
        // File systems that make inodes as they need them say that there are none.
        (disk.f_files == 0 || inodes <= disk.f_favail) && (extent.bytes <= free || self.can_clone())
    }

    /// Files may share their blocks here, so that what they sum up to says little of the room they need.
    fn can_clone(&self) -> bool {
        let unnamed = || self.open("", OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR | Mode::WUSR);
        let cloned = || Ok::<_, io::Error>(rustix::fs::ioctl_ficlone(unnamed()?, unnamed()?)?);
        cloned().is_ok()
    }

    fn fail(&self, path: &str, source: io::Error) -> MaterializeError {
        MaterializeError::Write { path: self.path.join(path), source }
    }

    fn open(&self, path: &str, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        let path = if path.is_empty() { "." } else { path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        Ok(rustix::fs::openat2(&self.root, path, flags | OFlags::CLOEXEC, mode, resolve)?)
    }

    /// The open parent of `path`, and its last segment.
    fn parent<'a>(&self, path: &'a str) -> io::Result<(OwnedFd, &'a str)> {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.open(parent, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?, name))
    }

    fn directory(&self, path: &str) -> io::Result<()> {
        let mode = Mode::from_raw_mode(0o775);
        if !path.is_empty() {
            let (parent, name) = self.parent(path)?;
            rustix::fs::mkdirat(parent, name, mode)?;
        }
        if self.modes == Modes::Job {
            rustix::fs::fchmod(self.open(path, OFlags::DIRECTORY, Mode::empty())?, mode)?;
        }
        Ok(())
    }

    fn create(&self, target: &Target) -> Result<File, MaterializeError> {
        let job = self.modes == Modes::Job;
        let mode = Mode::from_raw_mode(if job || target.executable { 0o777 } else { 0o666 });
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let create = || {
            let file = self.open(&target.path, flags, mode)?;
            if job {
                rustix::fs::fchmod(&file, Mode::from_raw_mode(0o775))?;
            }
            Ok(file.into())
        };
        create().map_err(|source| self.fail(&target.path, source))
    }

    /// Takes back a file that was created, if it was.
    fn remove(&self, target: &Target) -> io::Result<()> {
        let (parent, name) = self.parent(&target.path)?;
        match rustix::fs::unlinkat(parent, name, rustix::fs::AtFlags::empty()) {
            Err(error) if error != rustix::io::Errno::NOENT => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Writes a file with the content of `source`, which is checked, as its own copy.
    fn copy(&self, digest: Digest, mut source: File, target: &Target) -> Result<(), MaterializeError> {
        let mut file = self.create(target)?;
        let unread = |source| MaterializeError::Read { path: target.path.clone(), source };
        let is_clone = rustix::fs::ioctl_ficlone(&file, &source).is_ok();
        let mut hasher = Hasher::new();
        let mut chunk = vec![0; CHUNK];
        loop {
            let length = match source.read(&mut chunk) {
                Ok(0) => break,
                Ok(length) => length,
                Err(source) => return Err(self.fail(&target.path, source)),
            };
            hasher.update(&chunk[..length]);
            if !is_clone {
                write(&mut file, &chunk[..length]).map_err(|source| self.fail(&target.path, source))?;
            }
        }
        match hasher.finish() {
            actual if actual == digest => Ok(()),
            actual => Err(unread(ReadError::Corrupt { digest, actual })),
        }
    }

    fn links(&self, tree: &Tree) -> Result<(), MaterializeError> {
        for (path, target) in tree.links() {
            let link = || {
                let (parent, name) = self.parent(&path)?;
                Ok(rustix::fs::symlinkat(target, parent, name)?)
            };
            link().map_err(|source| self.fail(&path, source))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
