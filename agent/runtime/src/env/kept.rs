//! The environments that are kept: listing, pinning and removing them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use agent_model::words::count;

use super::cache::{EnvCache, EnvDir};
use super::marker::{LOCK_LIST, MARKER, own_bytes};

/// An environment that is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// Its kind and the start of its digest, for example `conda-3f0a9c1b2d4e`.
    pub key: String,
    /// A description of what it was built from, for people: `conda.yml: python=3.11, scikit-learn, 2 pip packages`.
    pub summary: String,
    /// The version of its Python; empty for none.
    pub python: String,
    /// How many packages it has.
    pub packages: u32,
    /// Bytes on the disk that nothing else shares, at the time it was ready.
    pub bytes: u64,
    /// When it was ready.
    pub built: SystemTime,
    /// When its last use began, to the minute.
    pub used: SystemTime,
    /// How many leases this process has given out.
    pub uses: u32,
    /// It is never removed to make room.
    pub pinned: bool,
    pub(super) lock: Option<PathBuf>,
    pub(super) log: PathBuf,
}

impl Kept {
    /// The explicit list of its packages; `None` when nothing can be locked.
    pub fn lock_file(&self) -> Option<&Path> {
        self.lock.as_deref()
    }

    /// The output of its builder. The file may be missing.
    pub fn log_file(&self) -> &Path {
        &self.log
    }
}

/// Why an environment was not removed, or its pin not changed.
#[derive(Debug, Clone, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum RemoveError {
    #[error("there is no environment `{key}`")]
    Unknown { key: String },
    #[error("the environment `{key}` is in use ({})", count((*uses).into(), "job"))]
    InUse {
        key: String,
        /// How many leases there are; 0 when another process, or a builder, has it.
        uses: u32,
    },
    #[error("could not change {}", path.display())]
    Io { path: PathBuf, source: Arc<io::Error> },
}

impl EnvCache {
    /// The kept environments, by key. Blocks.
    pub(super) fn list(&self) -> Vec<Kept> {
        self.places().iter().filter_map(kept).collect()
    }

    /// Removes an environment that is not in use; returns how many bytes that frees. Blocks.
    pub(super) fn remove(&self, key: &str) -> Result<u64, RemoveError> {
        let place = self.known(key)?;
        let in_use = || RemoveError::InUse { key: key.to_owned(), uses: place.uses() };
        let lock = place.try_exclusive().map_err(RemoveError::io(place.prefix()))?.ok_or_else(in_use)?;
        let elsewhere = place.marker().map_or(0, |marker| marker.elsewhere);
        let bytes = own_bytes(place.prefix()) + elsewhere;
        lock.remove().map_err(RemoveError::io(place.prefix()))?;
        Ok(bytes)
    }

    /// Sets or removes a pin. Blocks.
    pub(super) fn pin(&self, key: &str, pinned: bool) -> Result<(), RemoveError> {
        let pin = self.known(key)?.pin();
        let done = if pinned { fs::write(&pin, "") } else { fs::remove_file(&pin) };
        match done {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(RemoveError::io(&pin)(error)),
            _ => Ok(()),
        }
    }

    fn known(&self, key: &str) -> Result<EnvDir, RemoveError> {
        let known = self.found(key).filter(|place| place.marker().is_some());
        known.ok_or_else(|| RemoveError::Unknown { key: key.to_owned() })
    }
}

fn kept(place: &EnvDir) -> Option<Kept> {
    let marker = place.marker()?;
    let time = |path: &Path| path.metadata().and_then(|found| found.modified()).ok();
    let built = time(&place.prefix().join(MARKER))?;
    Some(Kept {
        key: place.name().to_owned(),
        summary: marker.summary,
        python: marker.python_version,
        packages: marker.packages,
        bytes: marker.bytes,
        built,
        used: time(&place.used()).unwrap_or(built),
        uses: place.uses(),
        pinned: place.pin().exists(),
        lock: marker.locked.then(|| place.prefix().join(LOCK_LIST)),
        log: place.log(),
    })
}

impl RemoveError {
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> RemoveError {
        let path = path.to_owned();
        move |source| RemoveError::Io { path, source: Arc::new(source) }
    }
}
