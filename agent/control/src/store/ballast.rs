//! Reserved room on the disk for the most important records: how jobs end, and cancels.
//!
//! Owns the file `db.ballast`. When the database finds the disk full the file is removed, so that such records can be
//! written; until it is there again, new jobs are refused. It is created again once the disk has three times its size
//! free.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use agent_model::failpoint;
use rustix::fs::{FallocateFlags, fallocate, statvfs};

/// The reserved room, in bytes.
const SIZE: u64 = 8 * 1024 * 1024;

#[derive(Debug)]
pub(super) struct Ballast {
    path: PathBuf,
    held: AtomicBool,
}

impl Ballast {
    /// Reserves the room if the disk has it.
    pub(super) fn new(path: &Path) -> Ballast {
        let ballast = Ballast { path: path.to_owned(), held: AtomicBool::new(false) };
        ballast.take();
        ballast
    }

    /// There is no shortage: the room is reserved, or the reservation failed for another reason than lack of room.
    pub(super) fn is_held(&self) -> bool {
        self.held.load(Ordering::Relaxed)
    }

    /// Frees the room; false when that happened before.
    pub(super) fn give(&self) -> bool {
        let gave = self.held.swap(false, Ordering::Relaxed);
        if gave {
            tracing::error!(path = %self.path.display(), "using last reserve: the disk is full");
            if let Err(error) = std::fs::remove_file(&self.path) {
                tracing::error!(path = %self.path.display(), %error, "cannot give up the reserve");
            }
        }
        gave
    }

    /// Reserves the room again, if there is plenty. True when there is no shortage now.
    pub(super) fn take(&self) -> bool {
        if self.is_held() {
            return true;
        }
        let filled = self.fill().inspect_err(|error| {
            tracing::debug!(path = %self.path.display(), %error, "cannot take the reserve");
            // A partial file only takes room, and a directory in its place blocks it.
            let _ = std::fs::remove_file(&self.path).or_else(|_| std::fs::remove_dir(&self.path));
        });
        // A failure for another reason than lack of room means less safety, and is no reason to refuse jobs.
        let enough = filled.unwrap_or_else(|error| !agent_fs::is_full(&error));
        self.held.store(enough, Ordering::Relaxed);
        enough
    }

    /// Creates the file; false when there is no room for it.
    fn fill(&self) -> io::Result<bool> {
        let directory = self.path.parent().unwrap_or(Path::new("."));
        let disk = statvfs(directory)?;
        let file = File::options().create(true).append(true).open(&self.path)?;
        if file.metadata()?.len() >= SIZE {
            return Ok(true);
        }
        if disk.f_bavail.saturating_mul(disk.f_frsize) < 3 * SIZE {
            drop(file);
            std::fs::remove_file(&self.path)?;
            return Ok(false);
        }
        failpoint::hit("control.ballast.fill")?;
        fallocate(&file, FallocateFlags::empty(), 0, SIZE)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_room_is_given_once_and_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ballast");
        let ballast = Ballast::new(&path);
        assert!(ballast.is_held() && path.metadata().unwrap().len() == SIZE);
        assert!(ballast.give() && !path.exists());
        assert!(!ballast.give() && !ballast.is_held());
        assert!(ballast.take() && Ballast::new(&path).is_held());
    }

    #[test]
    fn test_what_stands_in_its_place_refuses_no_jobs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ballast");
        std::fs::create_dir(&path).unwrap();
        assert!(Ballast::new(&path).is_held(), "there is room");
        assert!(Ballast::new(&path).is_held() && path.is_file(), "and it is taken again");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir_all(path.join("somebody's")).unwrap();
        assert!(Ballast::new(&path).is_held());
    }
}
