//! Large blobs, each in a file of its own.
//!
//! Owns `blobs/xx/<hash>-<size>` and `temp/`. A blob is written to `temp/`, flushed, renamed, and then the
//! directory it was renamed into is flushed; only after that it enters the index. A batch shares the cost: its
//! files are flushed by several threads at once, which the file system joins into few commits of its journal, and
//! each directory is flushed once. Small blobs of stores of an earlier release are here too.
//!
//! A thread that removes a name below `blobs/` holds the `names` lock exclusively while it reads the index; one that
//! makes a name holds it shared until the blob is in the index. So no newer copy is ever removed for an older one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use agent_model::{Digest, failpoint};
use bytes::Bytes;
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use rustix::fs::Mode;
use rustix::io::Errno;

use super::home::{Home, blob_name, hit, is_proof, now, prefix_name};
use super::index::{BlobLocation, Index, Kept};
use super::{BlobState, CHUNK, OpenError, ReadError, WriteError};
use crate::{Hasher, holes, parallel};

/// Flushes in flight for one batch. They wait for the disk, not for the processor.
const FLUSHES: usize = 8;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Loose {
    home: Arc<Home>,
    index: Arc<Mutex<Index>>,
    names: RwLock<()>,
}

impl Loose {
    /// Puts all files of blobs into the index; returns those that cannot match their names.
    pub(super) fn open(
        home: &Arc<Home>,
        index: &Arc<Mutex<Index>>,
    ) -> Result<(Loose, Vec<Digest>), OpenError> {
        let loose = Loose { home: Arc::clone(home), index: Arc::clone(index), names: RwLock::default() };
        let prefixes: Vec<u8> = (0..=u8::MAX).collect();
        let listed = parallel::map(&prefixes, FLUSHES, |prefix| {
            let name = prefix_name(*prefix);
            loose.list(&name).map_err(|source| OpenError::Directory { path: home.at(&name), source })
        });
        let mut suspects = Vec::new();
        for found in listed {
            suspects.extend(found?);
        }
        Ok((loose, suspects))
    }

    fn list(&self, directory: &str) -> io::Result<Vec<Digest>> {
        let (mut found, mut suspects) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(self.home.at(directory))? {
            let entry = entry?;
            let Some(digest) = entry.file_name().to_str().and_then(digest_named) else { continue };
            if !blob_name(&digest).starts_with(directory) {
                continue;
            }
            match entry.metadata() {
                Ok(meta) if meta.is_file() && meta.len() == digest.size => {
                    found.push((digest, u32::try_from(meta.mtime()).unwrap_or(0)));
                }
                Ok(_) => suspects.push(digest),
                Err(error) if is_proof(&error) => {}
                Err(_) => found.push((digest, 0)), // it is there; whoever reads it looks closer
            }
        }
        if !found.is_empty() {
            // They may have been renamed by a process that was killed before it flushed the directory.
            self.home.flush_directory(directory)?;
        }
        let mut index = self.index.lock();
        for (digest, used) in found {
            index.load(digest, BlobLocation::Loose, used);
        }
        Ok(suspects)
    }

    /// Held while names are made.
    fn making(&self) -> RwLockReadGuard<'_, ()> {
        self.names.read()
    }

    /// Held while names are removed.
    fn removing(&self) -> RwLockWriteGuard<'_, ()> {
        self.names.write()
    }

    /// An open file of the blob. A missing one is removed from the index; one of another length is `None`.
    pub(super) fn open_blob(&self, digest: Digest) -> Result<Option<File>, ReadError> {
        let name = blob_name(&digest);
        let fail = |source| ReadError::Disk { path: self.home.at(&name), source };
        match self.home.open_file(&name) {
            Ok(file) => {
                let length = file.metadata().map_err(fail)?.len();
                Ok((length == digest.size).then_some(file))
            }
            Err(Errno::NOENT) => {
                let _alone = self.removing();
                if matches!(self.home.open_file(&name), Err(Errno::NOENT)) {
                    self.index.lock().remove(&digest, BlobLocation::Loose);
                }
                Err(ReadError::Absent { digest })
            }
            Err(source) => Err(fail(source.into())),
        }
    }

    /// Keeps blobs whose bytes are right, one answer for each.
    pub(super) fn write(&self, blobs: &[(Digest, Bytes)]) -> Vec<Result<(), WriteError>> {
        let staged = parallel::map(blobs, parallel::cores(), |(digest, bytes)| self.stage(*digest, bytes));
        let (mut whole, mut results) = (Vec::new(), Vec::with_capacity(blobs.len()));
        for ((digest, _), staged) in blobs.iter().zip(staged) {
            results.push(staged.map(|name| whole.push((*digest, name))));
        }
        let mut published = self.publish(whole).into_iter();
        results.into_iter().map(|staged| staged.and_then(|()| published.next().unwrap_or(Ok(())))).collect()
    }

    fn stage(&self, digest: Digest, bytes: &[u8]) -> Result<TempName, WriteError> {
        let mut temp = Temp::create(&self.home, digest.size)?;
        temp.append(bytes)?;
        temp.finish()
    }

    /// Keeps files that are written. Each is durable when this returns.
    pub(super) fn publish(&self, staged: Vec<(Digest, TempName)>) -> Vec<Result<(), WriteError>> {
        let flushed = parallel::map(&staged, FLUSHES, |(_, name)| name.flush());
        let _making = self.making();
        let mut renamed = Vec::with_capacity(staged.len());
        for ((digest, name), flushed) in staged.into_iter().zip(flushed) {
            renamed.push((digest, flushed.and_then(|()| name.publish(&digest))));
        }
        let directories: BTreeSet<u8> = renamed.iter().map(|(digest, _)| digest.hash[0]).collect();
        let directories: Vec<u8> = directories.into_iter().collect();
        let flush = |prefix: &u8| {
            hit("cas.directory.sync")?;
            self.home.flush_directory(&prefix_name(*prefix))
        };
        let flushed = parallel::map(&directories, FLUSHES, flush);
        let flushed: BTreeMap<u8, Result<(), Errno>> = directories.into_iter().zip(flushed).collect();
        let keep = |(digest, renamed): (Digest, Result<(), WriteError>)| {
            renamed?;
            let prefix = digest.hash[0];
            let flushed = flushed.get(&prefix).copied().unwrap_or(Ok(()));
            flushed.map_err(|source| self.home.write_error(&prefix_name(prefix), source))?;
            self.index.lock().insert(digest, BlobLocation::Loose, now());
            Ok(())
        };
        renamed.into_iter().map(keep).collect()
    }

    /// Reads a blob and moves its file to the quarantine if its bytes do not match its name.
    pub(super) fn judge(&self, digest: &Digest) -> io::Result<BlobState> {
        let name = blob_name(digest);
        let inode = |file: &File| file.metadata().map(|meta| meta.ino());
        let open = || self.home.open_file(&name).map_err(io::Error::from);
        let judged = match open() {
            Ok(file) => {
                let inode = inode(&file)?;
                match hash_of(file) {
                    Ok(actual) if actual == *digest => return Ok(BlobState::Good),
                    Err(error) if !is_proof(&error) => return Err(error),
                    _ => Some(inode),
                }
            }
            Err(error) if is_proof(&error) => None,
            Err(error) => return Err(error),
        };
        let _alone = self.removing();
        match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.index.lock().remove(digest, BlobLocation::Loose);
                return Ok(BlobState::Changed);
            }
            Err(error) if !is_proof(&error) => return Err(error),
            // Another file took its place while this one was read.
            Ok(file) if judged != Some(inode(&file)?) => return Ok(BlobState::Changed),
            _ => {}
        }
        let moved = hit("cas.blob.quarantine").and_then(|()| match self.home.quarantine_name(digest) {
            Some(to) => rustix::fs::renameat(&self.home.root, &name, &self.home.root, to),
            None => self.home.remove_file(&name),
        });
        if let Err(error) = moved {
            tracing::warn!(%digest, %error, "cannot move damaged blob away: a good one takes its place");
        }
        self.index.lock().remove(digest, BlobLocation::Loose);
        Ok(BlobState::Damaged)
    }

    /// Files that match their blob and are not in the index; those in quarantine are moved back to their places. A
    /// file that cannot be read is left where it is.
    pub(super) fn strays(&self) -> Vec<(Digest, BlobLocation)> {
        let names = |directory: String| {
            let entries = std::fs::read_dir(self.home.at(&directory)).into_iter().flatten().flatten();
            entries.map(move |entry| format!("{directory}/{}", entry.file_name().to_string_lossy()))
        };
        let loose = (0..=u8::MAX).map(prefix_name).flat_map(names);
        let mut strays = Vec::new();
        for name in loose.chain(names("quarantine".to_owned())) {
            let file = name.rsplit('/').next().unwrap_or_default();
            let Some(digest) = digest_named(file.split('.').next().unwrap_or_default()) else { continue };
            let known = || self.index.lock().find(&digest).is_some();
            let right =
                || self.home.open_file(&name).ok().and_then(|file| hash_of(file).ok()) == Some(digest);
            if known() || !right() {
                continue;
            }
            let (to, _alone) = (blob_name(&digest), self.removing());
            let root = &self.home.root;
            let back = known() || name == to || rustix::fs::renameat(root, &name, root, &to).is_ok();
            if back && self.home.flush_directory(&prefix_name(digest.hash[0])).is_ok() {
                strays.push((digest, BlobLocation::Loose));
            }
        }
        strays
    }

    /// Removes those that were not used since they were listed: how many, and the bytes they took.
    /// Those in segments are removed from the index only.
    pub(super) fn evict(&self, victims: &[Kept]) -> (u64, u64) {
        let _alone = self.removing();
        let mut gone = (0, 0);
        for kept in victims {
            let evicted = self.index.lock().evict(kept);
            let Some((place, bytes)) = evicted else { continue };
            if place == BlobLocation::Loose {
                let name = blob_name(&kept.digest);
                if let Err(error) = hit("cas.blob.evict").and_then(|()| self.home.remove_file(&name)) {
                    tracing::warn!(digest = %kept.digest, %error, "cannot remove unneeded blob");
                    self.index.lock().insert(kept.digest, place, 0);
                    continue;
                }
            }
            gone = (gone.0 + 1, gone.1 + bytes);
        }
        gone
    }
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

/// The blob whose file has this name.
fn digest_named(name: &str) -> Option<Digest> {
    let (hash, size) = name.split_once('-')?;
    let digest = Digest::from_parts(hash, size.parse().ok()?).ok()?;
    blob_name(&digest).ends_with(name).then_some(digest)
}

/// A file below `temp/`, removed when dropped before it was published.
#[derive(Debug)]
pub(super) struct TempName {
    home: Arc<Home>,
    name: String,
    published: bool,
}

impl TempName {
    /// Waits until the bytes are on disk. Opens the file again: a batch has more files than may be open.
    fn flush(&self) -> Result<(), WriteError> {
        hit("cas.blob.sync")
            .and_then(|()| self.home.open_file(&self.name))
            .and_then(|file| rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&file)))
            .map_err(|source| self.home.write_error(&self.name, source))
    }

    /// Makes the file the blob. It is durable when its directory is flushed.
    fn publish(mut self, digest: &Digest) -> Result<(), WriteError> {
        let root = &self.home.root;
        hit("cas.blob.rename")
            .and_then(|()| rustix::fs::renameat(root, &self.name, root, blob_name(digest)))
            .map_err(|source| self.home.write_error(&blob_name(digest), source))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for TempName {
    fn drop(&mut self) {
        if !self.published {
            // A file that cannot be removed now is removed when the store is opened the next time.
            let _ = self.home.remove_file(&self.name);
        }
    }
}

/// An open [`TempName`].
#[derive(Debug)]
pub(super) struct Temp {
    file: holes::Writer,
    name: TempName,
}

impl Temp {
    /// An empty file for a blob of this size, if there is room for it.
    pub(super) fn create(home: &Arc<Home>, size: u64) -> Result<Temp, WriteError> {
        let name = home.temp_name();
        if !home.has_room(size) {
            return Err(home.write_error(&name, Errno::NOSPC));
        }
        let file = hit("cas.blob.create")
            .and_then(|()| home.create_file(&name, Mode::RUSR))
            .map_err(|source| home.write_error(&name, source))?;
        let file = holes::Writer::new(file);
        Ok(Temp { file, name: TempName { home: Arc::clone(home), name, published: false } })
    }

    /// Its name.
    pub(super) fn name(&self) -> &str {
        &self.name.name
    }

    /// Adds the bytes that follow.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        let written = failpoint::hit("cas.blob.write").and_then(|()| self.file.append(bytes));
        written.map_err(|source| self.name.home.write_error(&self.name.name, source))
    }

    /// Ends it: all bytes were added.
    pub(super) fn finish(self) -> Result<TempName, WriteError> {
        let Temp { file, name } = self;
        file.finish().map_err(|source| name.home.write_error(&name.name, source))?;
        Ok(name)
    }
}
