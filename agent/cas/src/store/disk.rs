//! Blobs as files of one directory.
//!
//! Owns `blobs/xx/<hash>-<size>`, `temp/` and `quarantine/` below the directory it is given; nobody else may
//! write there, and one process has it open at a time (the daemon holds the lock of its state directory).
//!
//! A blob is written to `temp/`, hashed on the way, flushed, renamed, and then the directory it was renamed
//! into is flushed. **Durability rule: `write`, `write_batch` and [`Ingest::commit`] return after that last
//! flush, so what they acknowledged survives a power failure, and a name below `blobs/` never stands for
//! bytes that do not.** A batch pays for it as a group: all its files are written, then flushed by several
//! threads at once, which the file system joins into few commits of its journal, and each directory is
//! flushed once. Files of `temp/` are what a crash interrupted; opening the store removes them.
//!
//! Every read from the start of a blob is hashed. A blob that turns out to be something else is looked at
//! once more and moved to `quarantine/`: from then on it is missing, and whoever has it can send it again.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent_model::{Digest, failpoint};
use bytes::{Bytes, BytesMut};
use futures_util::stream::StreamExt;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::{BlobStore, CHUNK, Chunks, MissingError, ReadError, WriteError, verified};
use crate::parallel::{self, blocking};
use crate::{Hasher, digest_of};

/// Flushes in flight for one batch. They wait for the disk, not for the processor.
const FLUSHES: usize = 8;

/// Damaged blobs that are kept for someone to look at; later ones are removed.
const QUARANTINED: usize = 64;

/// Lookups that one thread does faster than a second one starts.
const LOOKUPS_PER_THREAD: usize = 512;

/// A store in a directory. Clones share it.
#[derive(Debug, Clone)]
pub struct Disk {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    root: OwnedFd,
    reserve: u64,
    next_temp: AtomicU64,
    /// Damaged blobs found since the store was opened.
    damaged: AtomicU64,
    /// Held while a blob is judged, so that a good one that took a bad one's place is not put away for it.
    judging: Mutex<()>,
}

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A directory could not be made or entered.
    #[error("cannot open the store directory {path}")]
    Directory {
        /// The directory.
        path: PathBuf,
        #[source]
        /// What the system said.
        source: io::Error,
    },
    /// What a crash left behind could not be removed.
    #[error("cannot remove unfinished files in {path}")]
    Clean {
        /// The directory that holds them.
        path: PathBuf,
        #[source]
        /// What the system said.
        source: io::Error,
    },
}

impl Disk {
    /// Opens the store in `dir`, which is made if need be. Blocks.
    pub fn open(dir: &Path) -> Result<Disk, OpenError> {
        Disk::open_with_reserve(dir, 0)
    }

    /// Opens the store in `dir`. A blob that would leave less than `reserve` bytes of the disk free is
    /// refused as if the disk were full, so that blobs never take the room that logs and results need.
    pub fn open_with_reserve(dir: &Path, reserve: u64) -> Result<Disk, OpenError> {
        let fail = |path: PathBuf| move |source| OpenError::Directory { path, source };
        let temp = dir.join("temp");
        match std::fs::remove_dir_all(&temp) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(OpenError::Clean { path: temp, source });
            }
            _ => {}
        }
        for path in [dir.to_owned(), temp, dir.join("blobs"), dir.join("quarantine")] {
            private_directory(&path).map_err(fail(path))?;
        }
        for prefix in 0..=u8::MAX {
            let path = dir.join(prefix_name(prefix));
            private_directory(&path).map_err(fail(path))?;
        }
        let blobs = dir.join("blobs");
        flush_directory(&blobs).map_err(fail(blobs))?;
        let root = rustix::fs::open(dir, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|source| OpenError::Directory { path: dir.to_owned(), source: source.into() })?;
        let shared = Shared {
            path: dir.to_owned(),
            root,
            reserve,
            next_temp: AtomicU64::new(0),
            damaged: AtomicU64::new(0),
            judging: Mutex::new(()),
        };
        Ok(Disk { shared: Arc::new(shared) })
    }

    /// Damaged blobs found since the store was opened.
    pub fn damaged(&self) -> u64 {
        self.shared.damaged.load(Ordering::Relaxed)
    }

    /// Begins a blob whose bytes come bit by bit.
    pub async fn ingest(&self, digest: Digest) -> Result<Ingest, WriteError> {
        let shared = Arc::clone(&self.shared);
        let temp = blocking(move || Temp::create(&shared, digest.size)).await?;
        let growing = Growing { temp, hasher: Hasher::new() };
        Ok(Ingest { digest, growing: Arc::new(Mutex::new(Some(growing))) })
    }
}

fn private_directory(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn flush_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn prefix_name(prefix: u8) -> String {
    format!("blobs/{prefix:02x}")
}

fn blob_name(digest: &Digest) -> String {
    format!("{}/{}-{}", prefix_name(digest.hash[0]), digest.hex(), digest.size)
}

impl Shared {
    /// The blob is here, with the length its name says.
    fn holds(&self, digest: &Digest) -> Result<bool, Errno> {
        match rustix::fs::statat(&self.root, blob_name(digest), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode).is_file()
                && u64::try_from(stat.st_size) == Ok(digest.size)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn missing(&self, digests: &[Digest]) -> Result<Vec<Digest>, MissingError> {
        let mut seen = HashSet::with_capacity(digests.len());
        seen.insert(Digest::EMPTY);
        let asked: Vec<Digest> = digests.iter().copied().filter(|digest| seen.insert(*digest)).collect();
        let threads = parallel::cores().min(asked.len() / LOOKUPS_PER_THREAD);
        let found = parallel::map(&asked, threads, |digest| self.holds(digest));
        let mut missing = Vec::new();
        for (digest, found) in asked.into_iter().zip(found) {
            let path = || self.path.join(blob_name(&digest));
            if !found.map_err(|source| MissingError::Disk { path: path(), source: source.into() })? {
                missing.push(digest);
            }
        }
        Ok(missing)
    }

    fn open_blob(&self, digest: Digest) -> Result<File, ReadError> {
        let name = blob_name(&digest);
        let fail = |source| ReadError::Disk { path: self.path.join(&name), source };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.root, &name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Err(ReadError::Absent { digest }),
            Err(source) => return Err(fail(source.into())),
        };
        if file.metadata().map_err(fail)?.len() == digest.size {
            return Ok(file);
        }
        self.judge(digest);
        Err(ReadError::Absent { digest })
    }

    /// Reads a blob and puts it away if it is not what its name says.
    fn judge(&self, digest: Digest) {
        let _one_at_a_time = self.judging.lock().unwrap_or_else(PoisonError::into_inner);
        let name = blob_name(&digest);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::openat(&self.root, &name, flags, Mode::empty()) else { return };
        let actual = hash_of(file.into());
        if actual.as_ref().is_ok_and(|actual| *actual == digest) {
            return;
        }
        self.damaged.fetch_add(1, Ordering::Relaxed);
        let full = || std::fs::read_dir(self.path.join("quarantine")).map(|all| all.count() >= QUARANTINED);
        let put_away = || {
            if full().unwrap_or(true) {
                return rustix::fs::unlinkat(&self.root, &name, AtFlags::empty());
            }
            let number = self.next_temp.fetch_add(1, Ordering::Relaxed);
            let to = format!("quarantine/{}-{}.{number}", digest.hex(), digest.size);
            rustix::fs::renameat(&self.root, &name, &self.root, to)
        };
        match hit("cas.blob.quarantine").and_then(|()| put_away()) {
            Ok(()) => tracing::error!(%digest, ?actual, "a blob is damaged: it was taken out of the store"),
            Err(error) => tracing::error!(%digest, ?actual, %error, "a damaged blob cannot be taken away"),
        }
    }

    fn read_whole(&self, digest: Digest) -> Result<Bytes, ReadError> {
        if digest == Digest::EMPTY {
            return Ok(Bytes::new());
        }
        let mut file = self.open_blob(digest)?;
        let mut content = Vec::with_capacity(usize::try_from(digest.size).unwrap_or(0));
        file.read_to_end(&mut content).map_err(|source| {
            self.judge(digest); // what cannot be read is as good as damaged
            ReadError::Disk { path: self.path.join(blob_name(&digest)), source }
        })?;
        match digest_of(&content) {
            actual if actual == digest => Ok(content.into()),
            actual => {
                self.judge(digest);
                Err(ReadError::Corrupt { digest, actual })
            }
        }
    }

    /// Writes a file of these bytes, unless the blob is here.
    fn stage(self: &Arc<Self>, digest: Digest, bytes: &[u8]) -> Result<Option<TempName>, WriteError> {
        let actual = digest_of(bytes);
        if actual != digest {
            return Err(WriteError::Mismatch { digest, actual });
        }
        if digest == Digest::EMPTY || self.holds(&digest).unwrap_or(false) {
            return Ok(None);
        }
        let mut temp = Temp::create(self, digest.size)?;
        temp.append(bytes)?;
        Ok(Some(temp.name))
    }

    fn write_batch(self: &Arc<Self>, blobs: &[(Digest, Bytes)]) -> Vec<Result<(), WriteError>> {
        let staged = parallel::map(blobs, parallel::cores(), |(digest, bytes)| self.stage(*digest, bytes));
        let flushed = parallel::map(&staged, FLUSHES, |staged| match staged {
            Ok(Some(name)) => name.flush(),
            _ => Ok(()),
        });
        let publish = |(((digest, _), staged), flushed): ((&(Digest, Bytes), _), _)| {
            let staged: Option<TempName> = staged?;
            flushed?;
            staged.map_or(Ok(()), |name| name.publish(digest))
        };
        let published: Vec<Result<(), WriteError>> =
            blobs.iter().zip(staged).zip(flushed).map(publish).collect();
        // Also those of blobs that were here: whoever wrote one may not have flushed its directory yet.
        let directories: BTreeSet<u8> = blobs.iter().map(|(digest, _)| digest.hash[0]).collect();
        let directories: Vec<u8> = directories.into_iter().collect();
        let flushed = parallel::map(&directories, FLUSHES, |prefix| self.flush_prefix(*prefix));
        let flushed: BTreeMap<u8, Result<(), Errno>> = directories.into_iter().zip(flushed).collect();
        blobs
            .iter()
            .zip(published)
            .map(|((digest, _), published)| {
                published.and_then(|()| match flushed.get(&digest.hash[0]) {
                    Some(Err(errno)) => Err(self.write_error(&prefix_name(digest.hash[0]), *errno)),
                    _ => Ok(()),
                })
            })
            .collect()
    }

    fn flush_prefix(&self, prefix: u8) -> Result<(), Errno> {
        hit("cas.directory.sync")?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(&self.root, prefix_name(prefix), flags, Mode::empty())?;
        rustix::io::retry_on_intr(|| rustix::fs::fsync(&directory))
    }

    /// The reserve stays free after `size` more bytes. A disk that does not say is tried.
    fn has_room(&self, size: u64) -> bool {
        rustix::fs::fstatvfs(&self.root).map_or(true, |disk| {
            disk.f_bavail.saturating_mul(disk.f_frsize) >= size.saturating_add(self.reserve)
        })
    }

    fn write_error(&self, name: &str, source: impl Into<io::Error>) -> WriteError {
        WriteError::Disk { path: self.path.join(name), source: source.into() }
    }
}

/// A file below `temp/`, removed when dropped before it was published.
#[derive(Debug)]
struct TempName {
    shared: Arc<Shared>,
    name: String,
    published: bool,
}

impl TempName {
    /// Waits until the bytes are on disk. Opens the file again: a batch has more of them than may be open.
    fn flush(&self) -> Result<(), WriteError> {
        let open = |()| {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            rustix::fs::openat(&self.shared.root, &self.name, flags, Mode::empty())
        };
        hit("cas.blob.sync")
            .and_then(open)
            .and_then(|file| rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&file)))
            .map_err(|source| self.shared.write_error(&self.name, source))
    }

    /// Makes the file the blob. It is found from now on, and durable when its directory is flushed.
    fn publish(mut self, digest: &Digest) -> Result<(), WriteError> {
        let root = &self.shared.root;
        hit("cas.blob.rename")
            .and_then(|()| rustix::fs::renameat(root, &self.name, root, blob_name(digest)))
            .map_err(|source| self.shared.write_error(&blob_name(digest), source))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for TempName {
    fn drop(&mut self) {
        if !self.published {
            // What cannot be removed now is removed when the store is opened the next time.
            let _ = rustix::fs::unlinkat(&self.shared.root, &self.name, AtFlags::empty());
        }
    }
}

/// An open [`TempName`].
#[derive(Debug)]
struct Temp {
    file: File,
    name: TempName,
}

impl Temp {
    fn create(shared: &Arc<Shared>, size: u64) -> Result<Temp, WriteError> {
        let name = format!("temp/{}", shared.next_temp.fetch_add(1, Ordering::Relaxed));
        if !shared.has_room(size) {
            return Err(shared.write_error(&name, Errno::NOSPC));
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = hit("cas.blob.create")
            .and_then(|()| rustix::fs::openat(&shared.root, &name, flags, Mode::RUSR))
            .map_err(|source| shared.write_error(&name, source))?;
        let name = TempName { shared: Arc::clone(shared), name, published: false };
        Ok(Temp { file: file.into(), name })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        let written = failpoint::hit("cas.blob.write").and_then(|()| self.file.write_all(bytes));
        written.map_err(|source| self.name.shared.write_error(&self.name.name, source))
    }
}

/// A blob of a [`Disk`] whose bytes come bit by bit. Dropped before [`commit`](Self::commit), it was never
/// there. A call that is given up halfway has still appended everything it was given.
#[derive(Debug)]
pub struct Ingest {
    digest: Digest,
    /// Nothing after an error. Shared with the thread that appends, so that a dropped call loses no bytes.
    growing: Arc<Mutex<Option<Growing>>>,
}

#[derive(Debug)]
struct Growing {
    temp: Temp,
    hasher: Hasher,
}

impl Ingest {
    /// Bytes taken so far.
    pub fn written(&self) -> u64 {
        lock(&self.growing).as_ref().map_or(0, |growing| growing.hasher.size())
    }

    /// Takes the bytes that follow. After an error nothing more can be added.
    pub async fn append(&mut self, bytes: Bytes) -> Result<(), WriteError> {
        let (digest, growing) = (self.digest, Arc::clone(&self.growing));
        blocking(move || {
            let mut slot = lock(&growing);
            let Some(mut growing) = slot.take() else { return Err(WriteError::Abandoned { digest }) };
            growing.hasher.update(&bytes);
            if growing.hasher.size() > digest.size {
                return Err(WriteError::Mismatch { digest, actual: growing.hasher.finish() });
            }
            growing.temp.append(&bytes)?;
            *slot = Some(growing);
            Ok(())
        })
        .await
    }

    /// Checks the bytes and keeps them.
    pub async fn commit(self) -> Result<(), WriteError> {
        let (digest, growing) = (self.digest, self.growing);
        blocking(move || {
            let Some(Growing { temp, hasher }) = lock(&growing).take() else {
                return Err(WriteError::Abandoned { digest });
            };
            let actual = hasher.finish();
            if actual != digest {
                return Err(WriteError::Mismatch { digest, actual });
            }
            let Temp { name, .. } = temp;
            name.flush()?;
            let shared = Arc::clone(&name.shared);
            name.publish(&digest)?;
            let prefix = digest.hash[0];
            shared.flush_prefix(prefix).map_err(|source| shared.write_error(&prefix_name(prefix), source))
        })
        .await
    }
}

fn lock(growing: &Mutex<Option<Growing>>) -> MutexGuard<'_, Option<Growing>> {
    growing.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BlobStore for Disk {
    async fn missing(&self, digests: &[Digest]) -> Result<Vec<Digest>, MissingError> {
        let (shared, digests) = (Arc::clone(&self.shared), digests.to_vec());
        blocking(move || shared.missing(&digests)).await
    }

    async fn read(&self, digest: Digest, offset: u64) -> Result<Chunks, ReadError> {
        if offset > digest.size {
            return Err(ReadError::Offset { digest, offset });
        }
        if digest == Digest::EMPTY {
            return Ok(futures_util::stream::empty().boxed());
        }
        let path = self.shared.path.join(blob_name(&digest));
        let shared = Arc::clone(&self.shared);
        let mut file = blocking(move || shared.open_blob(digest)).await?;
        file.seek(SeekFrom::Start(offset))
            .map_err(|source| ReadError::Disk { path: path.clone(), source })?;
        let chunks = file_chunks(file, path);
        Ok(if offset == 0 { guarded(&self.shared, digest, chunks) } else { chunks })
    }

    async fn read_batch(&self, digests: Vec<Digest>) -> Vec<Result<Bytes, ReadError>> {
        let shared = Arc::clone(&self.shared);
        blocking(move || digests.iter().map(|digest| shared.read_whole(*digest)).collect()).await
    }

    async fn write(&self, digest: Digest, mut source: Chunks) -> Result<(), WriteError> {
        if self.shared.holds(&digest).unwrap_or(false) {
            let shared = Arc::clone(&self.shared);
            return blocking(move || {
                let prefix = digest.hash[0];
                shared.flush_prefix(prefix).map_err(|source| shared.write_error(&prefix_name(prefix), source))
            })
            .await;
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
        blocking(move || shared.write_batch(&blobs)).await
    }

    async fn distrust(&self, digest: Digest) {
        let shared = Arc::clone(&self.shared);
        blocking(move || shared.judge(digest)).await;
    }

    async fn file(&self, digest: Digest) -> Option<File> {
        let shared = Arc::clone(&self.shared);
        blocking(move || shared.open_blob(digest).ok()).await
    }
}

/// A failpoint where the system's own error is the error.
fn hit(name: &'static str) -> Result<(), Errno> {
    failpoint::hit(name).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// The blob as it is read; one that turns out to be something else is put away.
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

fn hash_of(mut file: File) -> io::Result<Digest> {
    let (mut hasher, mut chunk) = (Hasher::new(), vec![0; CHUNK]);
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hasher.finish()),
            length => hasher.update(&chunk[..length]),
        }
    }
}

/// What follows in `file`, read where it may block.
pub(crate) fn file_chunks(file: File, path: PathBuf) -> Chunks {
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
