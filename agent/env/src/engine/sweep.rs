//! Sweeps the package cache.
//!
//! Owns the choice of what is removed. Hides what the libraries leave behind when they are killed.
//!
//! Invariants: a package that a build works on or uses is not touched, because the build holds its lock; any other
//! directory in `pkgs` that is not a whole package is removed.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use agent_env::{FailureKind, Sweep};

use super::cache::{Cache, PackageDir, Wanted};
use super::{Done, disk, failed, tree};

/// How many letters the libraries add to the name of a package for the directory in which they unpack it.
const SUFFIX: usize = 6;

/// Sweeps a cache; returns the bytes that were freed.
pub(crate) fn sweep(sweep: &Sweep) -> Done<u64> {
    if !sweep.cache.is_dir() {
        return Ok(0);
    }
    let run = || -> io::Result<u64> {
        let cache = Cache::open(&sweep.cache)?;
        let now = now(&sweep.cache)?;
        let mut freed = 0;
        for entry in std::fs::read_dir(&cache.pkgs)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type()?.is_dir() {
                freed += one(&cache, &name, now, sweep)?;
            }
        }
        Ok(freed + scraps(&cache, &sweep.cache.join("repodata"))?)
    };
    run().map_err(|error| failed(FailureKind::Other, format!("sweeping {}: {error}", sweep.cache.display())))
}

/// The time by the file system's clock, which also gives the ages.
fn now(at: &Path) -> io::Result<std::time::SystemTime> {
    tempfile::tempfile_in(at)?.metadata()?.modified()
}

/// Removes remains of package lists that were being fetched, unless a build fetches one now.
fn scraps(cache: &Cache, dir: &Path) -> io::Result<u64> {
    let lock = cache.lists()?;
    if lock.try_lock().is_err() {
        return Ok(0);
    }
    let mut freed = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_file() && entry.file_name().to_string_lossy().starts_with(".tmp") {
            freed += bytes(&entry.path());
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(freed)
}

fn one(cache: &Cache, name: &str, now: std::time::SystemTime, sweep: &Sweep) -> io::Result<u64> {
    if let Some(half) = name.strip_prefix('.') {
        // `.name-version-build` and some letters; the package's lock is held while it is unpacked there.
        let package = half.len().checked_sub(SUFFIX).and_then(|end| half.get(..end)).unwrap_or_default();
        let Some(_lock) = locked(&cache.named(package))? else { return Ok(0) };
        return remove(&cache.pkgs.join(name));
    }
    let place = cache.named(name);
    let Some(lock) = locked(&place)? else { return Ok(0) };
    if place.check(&Wanted::Any).is_none() {
        let bytes = bytes(&place.dir);
        place.evict()?;
        return Ok(bytes);
    }
    let used = lock.metadata()?.modified()?;
    let age = now.duration_since(used).unwrap_or(Duration::ZERO);
    let (bytes, shared) = disk::measure(&place.dir)?;
    if shared > 0 || age < Duration::from_secs(sweep.unused_for_s) {
        return Ok(0);
    }
    place.evict()?;
    Ok(bytes)
}

/// The exclusive lock of a package, unless it is in use. The lock file's modification time is the last use.
fn locked(place: &PackageDir) -> io::Result<Option<File>> {
    let lock = place.lock_file()?;
    Ok(lock.try_lock().is_ok().then_some(lock))
}

fn bytes(path: &Path) -> u64 {
    disk::measure(path).map_or(0, |(bytes, _)| bytes)
}

fn remove(path: &Path) -> io::Result<u64> {
    let bytes = bytes(path);
    tree::remove(path).map(|()| bytes)
}
