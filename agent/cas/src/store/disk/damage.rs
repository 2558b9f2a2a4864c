//! Finds and damages a blob on the disk, wherever it is stored, for tests.

#![allow(clippy::unwrap_used, reason = "this is a part of tests")]

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use agent_model::Digest;

use super::home::blob_name;
use super::record;

/// The file in which the store in `dir` keeps a blob, and the byte at which its content begins; of several
/// copies the one that counts.
pub fn place_of(dir: &Path, digest: &Digest) -> Option<(PathBuf, u64)> {
    let loose = dir.join(blob_name(digest));
    if loose.exists() {
        return Some((loose, 0));
    }
    let mut segments: Vec<PathBuf> =
        fs::read_dir(dir.join("segments")).ok()?.map(|entry| entry.unwrap().path()).collect();
    segments.sort_unstable();
    segments.into_iter().rev().find_map(|path| {
        let number = u32::from_str_radix(path.file_name()?.to_str()?, 16).ok()?;
        let bytes = fs::read(&path).ok()?;
        let is_record = |at: &usize| {
            let offset = u32::try_from(*at).unwrap_or(u32::MAX);
            record::parse(&bytes[*at..], number, offset) == Some(*digest)
        };
        let at = (0..bytes.len().saturating_sub(record::HEADER - 1)).rev().find(is_record)?;
        Some((path, (at + record::HEADER) as u64))
    })
}

/// Changes the bytes of a blob on the disk. In a file shared with other blobs, bytes that `change` removes are
/// garbled instead. It panics if the store in `dir` does not keep the blob.
pub fn damage(dir: &Path, digest: &Digest, change: impl FnOnce(&mut Vec<u8>)) {
    let (path, start) = place_of(dir, digest).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let length = match start {
        0 => file.metadata().unwrap().len(),
        _ => digest.size,
    };
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    file.read_exact_at(&mut bytes, start).unwrap();
    let mut damaged = bytes.clone();
    change(&mut damaged);
    if start == 0 {
        file.set_len(damaged.len() as u64).unwrap();
    } else {
        damaged.truncate(bytes.len());
        let rest = damaged.len();
        damaged.extend(bytes[rest..].iter().map(|byte| !byte));
    }
    file.write_all_at(&damaged, start).unwrap();
}
