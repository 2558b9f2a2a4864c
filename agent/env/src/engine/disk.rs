//! Disks: how full they are, and which errors mean that a disk is full.
//!
//! Owns these measurements. Hides the many layers of error types around an error of the disk.
//!
//! Invariants: none.

use std::error::Error;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use agent_env::{Failure, FailureKind};
use agent_model::causes;

use super::tree::{EntryKind, OpenTree};
use super::{Advise, failed};

/// Bytes that may still be written below a directory, if known.
pub(crate) fn free(at: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(at).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Bytes on disk of everything below a path, and how many of its regular files have other hard links.
pub(crate) fn measure(at: &Path) -> io::Result<(u64, u64)> {
    let meta = std::fs::symlink_metadata(at)?;
    let mut bytes = meta.blocks() * 512;
    let mut shared = u64::from(meta.is_file() && meta.nlink() > 1);
    if meta.is_dir() {
        OpenTree::open(at)?.walk::<io::Error>(&mut |met| {
            bytes += u64::try_from(met.stat.st_blocks).unwrap_or(0) * 512;
            shared += u64::from(matches!(met.kind, EntryKind::File(_)) && met.stat.st_nlink > 1);
            Ok(())
        })?;
    }
    Ok((bytes, shared))
}

/// Whether an error, or one of its causes, means a full disk.
pub(crate) fn is_full(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| {
        cause.downcast_ref().is_some_and(agent_fs::is_full) || agent_fs::says_full(&cause.to_string())
    })
}

/// The failure of a full disk.
pub(crate) fn full(at: &Path, doing: &str) -> Failure {
    failed(FailureKind::DiskFull, format!("the disk of {} is full: {doing}", at.display())).advise(
        "Make room there, for example with `agentctl gc` on the node, or give environments a larger disk.",
    )
}

/// The failure of an operation on files.
pub(crate) fn trouble(at: &Path, doing: &str, error: &(dyn Error + 'static)) -> Failure {
    if is_full(error) {
        return full(at, doing);
    }
    failed(FailureKind::Other, format!("{doing} ({}): {}", at.display(), causes::tell(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] io::Error);

    #[test]
    fn test_a_full_disk_is_seen_through_layers() {
        assert!(is_full(&Outer(io::Error::from(io::ErrorKind::StorageFull))));
        assert!(is_full(&Outer(io::Error::other("writing a: No space left on device (os error 28)"))));
        assert!(!is_full(&Outer(io::Error::from(io::ErrorKind::PermissionDenied))));
    }

    #[test]
    fn test_measure_counts_files_with_a_second_name() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), [1; 8192]).unwrap();
        std::fs::create_dir(dir.path().join("d")).unwrap();
        std::fs::hard_link(dir.path().join("a"), dir.path().join("d/b")).unwrap();
        let (bytes, shared) = measure(dir.path()).unwrap();
        assert!(bytes >= 8192);
        assert_eq!(shared, 2);
    }
}
