//! Room on the disk for the last words: how jobs end, and that somebody wants them to.
//!
//! Owns the file `ballast`. When the database finds the disk full the file gives its room away, so that what
//! must be remembered is; until it is back, new jobs are refused. It comes back by itself once the disk has
//! several times its size free.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use agent_model::failpoint;
use rustix::fs::{FallocateFlags, fallocate, statvfs};

/// The room kept.
const SIZE: u64 = 8 * 1024 * 1024;

#[derive(Debug)]
pub(super) struct Ballast {
    path: PathBuf,
    held: AtomicBool,
}

impl Ballast {
    /// Takes the room if it is there.
    pub(super) fn new(path: &Path) -> Ballast {
        let ballast = Ballast { path: path.to_owned(), held: AtomicBool::new(false) };
        ballast.take();
        ballast
    }

    /// There is no shortage: the room is kept, or nothing but a lack of room keeps it from being.
    pub(super) fn is_held(&self) -> bool {
        self.held.load(Ordering::Relaxed)
    }

    /// Gives the room away; false when that happened before.
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

    /// Takes the room again, if there is plenty. True when it is kept now.
    pub(super) fn take(&self) -> bool {
        if self.is_held() {
            return true;
        }
        let filled = self.fill().inspect_err(|error| {
            tracing::debug!(path = %self.path.display(), %error, "cannot take the reserve");
            // Half of one only takes room, and what is no file stands in the way of one.
            let _ = std::fs::remove_file(&self.path).or_else(|_| std::fs::remove_dir(&self.path));
        });
        // What fails for another reason than want of room means less safety, and is no reason to refuse jobs.
        let enough = filled.unwrap_or_else(|error| !agent_fs::is_full(&error));
        self.held.store(enough, Ordering::Relaxed);
        enough
    }

    /// Whether there is room for it.
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
