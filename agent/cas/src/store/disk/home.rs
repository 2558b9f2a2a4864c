//! The directory of a store: its names, its lock, and how much may be written there.
//!
//! Owns the lock of the directory: one process has a store open, because two would append to the same file.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use agent_model::{Clock, Digest, SystemClock, failpoint};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::super::{WriteError, remove_tree};
use super::OpenError;
use crate::digest_of;

/// Damaged blobs that are kept for someone to look at; later ones are removed.
pub(super) const QUARANTINED: usize = 64;

/// An open directory of a store.
#[derive(Debug)]
pub(super) struct Home {
    path: PathBuf,
    pub(super) root: File,
    /// Bytes of the disk that no blob may take.
    reserve: u64,
    next: AtomicU64,
}

impl Home {
    /// Opens the directory, which is made if need be, and removes what a crash left unfinished.
    pub(super) fn open(path: &Path, reserve: u64) -> Result<Home, OpenError> {
        let fail = |path: PathBuf| move |source| OpenError::Directory { path, source };
        private_directory(path).map_err(fail(path.to_owned()))?;
        let root = File::open(path).map_err(fail(path.to_owned()))?;
        let home = Home { path: path.to_owned(), root, reserve, next: AtomicU64::new(0) };
        home.lock()?;
        let temp = home.at("temp");
        remove_tree(&temp).map_err(|source| OpenError::Clean { path: temp, source })?;
        let below = ["temp", "blobs", "segments", "quarantine"].map(str::to_owned);
        for name in below.into_iter().chain((0..=u8::MAX).map(prefix_name)) {
            private_directory(&home.at(&name)).map_err(fail(home.at(&name)))?;
        }
        for name in ["", "blobs"] {
            home.flush_directory(name).map_err(|source| fail(home.at(name))(source.into()))?;
        }
        Ok(home)
    }

    fn lock(&self) -> Result<(), OpenError> {
        match agent_fs::lock_soon(&self.root) {
            Ok(true) => Ok(()),
            Ok(false) => Err(OpenError::InUse { path: self.path.clone() }),
            // On a file system without locks a second process cannot be detected.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            Err(source) => Err(OpenError::Directory { path: self.path.clone(), source }),
        }
    }

    /// The path of something in the store.
    pub(super) fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A name below `temp/` that nobody else has.
    pub(super) fn temp_name(&self) -> String {
        format!("temp/{}", self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// A name for a damaged blob, if another one may be kept.
    pub(super) fn quarantine_name(&self, digest: &Digest) -> Option<String> {
        // If it cannot be read now, it is assumed to have room.
        let kept = std::fs::read_dir(self.at("quarantine")).map_or(0, Iterator::count);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        (kept < QUARANTINED).then(|| format!("quarantine/{}-{}.{number}", digest.hex(), digest.size))
    }

    /// Opens a file of the store to be read.
    pub(super) fn open_file(&self, name: &str) -> Result<File, Errno> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(&self.root, name, flags, Mode::empty()).map(File::from)
    }

    /// Makes a new file of the store, to be written.
    pub(super) fn create_file(&self, name: &str, mode: Mode) -> Result<File, Errno> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::openat(&self.root, name, flags, mode).map(File::from)
    }

    /// Replaces a file by one of these bytes, whole or not at all, unless it fails at `failpoint`. It is not flushed.
    pub(super) fn replace_file(&self, name: &str, bytes: &[u8], failpoint: &'static str) -> io::Result<()> {
        let temp = self.temp_name();
        let replace = || {
            failpoint::hit(failpoint)?;
            self.create_file(&temp, Mode::RUSR)?.write_all(bytes)?;
            Ok(rustix::fs::renameat(&self.root, &temp, &self.root, name)?)
        };
        replace().inspect_err(|_| {
            let _ = self.remove_file(&temp);
        })
    }

    /// Removes a file of the store; one that does not exist is no error.
    pub(super) fn remove_file(&self, name: &str) -> Result<(), Errno> {
        match rustix::fs::unlinkat(&self.root, name, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            other => other,
        }
    }

    /// Waits until the names in a directory of the store are on the disk.
    pub(super) fn flush_directory(&self, name: &str) -> Result<(), Errno> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let name = if name.is_empty() { "." } else { name };
        let directory = rustix::fs::openat(&self.root, name, flags, Mode::empty())?;
        rustix::io::retry_on_intr(|| rustix::fs::fsync(&directory))
    }

    /// The reserve stays free after `size` more bytes; also true when the free space is unknown.
    pub(super) fn has_room(&self, size: u64) -> bool {
        self.free().is_none_or(|free| free >= size.saturating_add(self.reserve))
    }

    /// Bytes of the disk that are free; `None` when that is unknown.
    pub(super) fn free(&self) -> Option<u64> {
        let disk = rustix::fs::fstatvfs(&self.root).ok()?;
        Some(disk.f_bavail.saturating_mul(disk.f_frsize))
    }

    pub(super) fn write_error(&self, name: &str, source: impl Into<io::Error>) -> WriteError {
        WriteError::Disk { path: self.at(name), source: source.into() }
    }
}

fn private_directory(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// The directory of loose blobs whose hash begins with this byte.
pub(super) fn prefix_name(prefix: u8) -> String {
    format!("blobs/{prefix:02x}")
}

/// The file of a loose blob.
pub(super) fn blob_name(digest: &Digest) -> String {
    format!("{}/{}-{}", prefix_name(digest.hash[0]), digest.hex(), digest.size)
}

/// Bytes of a file that is never flushed, with a SHA-256 that proves it whole.
pub(super) fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let check = digest_of(&bytes).hash;
    bytes.extend(check);
    bytes
}

/// The bytes that were [`sealed`], if they are whole.
pub(super) fn unsealed(bytes: &[u8]) -> Option<&[u8]> {
    let (bytes, check) = bytes.split_last_chunk()?;
    (digest_of(bytes).hash == *check).then_some(bytes)
}

/// Whether a read that failed proves that the blob is not there: its file is gone, cut, or something else. Any other
/// failure (no descriptor or memory left, a disk that does not answer) proves nothing: the blob is kept.
pub(super) fn is_proof(error: &io::Error) -> bool {
    use io::ErrorKind::{IsADirectory, NotADirectory, NotFound, UnexpectedEof};
    matches!(error.kind(), NotFound | UnexpectedEof | IsADirectory | NotADirectory)
        || Errno::from_io_error(error) == Some(Errno::LOOP) // a link: links are not followed
}

/// A failpoint that returns an error of the system.
pub(super) fn hit(name: &'static str) -> Result<(), Errno> {
    failpoint::hit(name).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// The current time, in seconds since 1970.
pub(super) fn now() -> u32 {
    u32::try_from(SystemClock.now().0 / 1000).unwrap_or(u32::MAX)
}
