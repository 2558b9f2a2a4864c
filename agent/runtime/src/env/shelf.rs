//! The directory of environments: who may write, what is ready, what is half-built.
//!
//! ```text
//! ROOT/pip-3f0a…/            an environment, in the place it was built for
//! ROOT/pip-3f0a…/ready.json  its marker, written last: without it, it does not exist
//! ROOT/pip-3f0a….lock        held shared by leases, exclusively by a builder; the kernel frees it
//! ROOT/pip-3f0a….log         what its last builder printed
//! ```
//!
//! Lock files are never removed: a lock on a removed file locks nothing.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_model::failpoint;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{AcquireError, Built, OpenEnvError};

const MARKER: &str = "ready.json";
const MARKER_VERSION: u32 = 1;
/// How long ending the processes of an earlier builder may take.
const KILL_WITHIN: Duration = Duration::from_secs(10);
/// How often a lock that another process holds is tried. The kernel tells nobody that it became free, and a
/// thread that waits in the kernel cannot be called back.
const LOCK_EVERY: Duration = Duration::from_millis(100);

/// The directory of environments.
#[derive(Debug, Clone)]
pub(super) struct Shelf {
    root: PathBuf,
}

impl Shelf {
    /// Makes the directory and wipes what no builder works on and is not ready.
    pub(super) fn open(root: &Path) -> Result<Shelf, OpenEnvError> {
        let fail = |path: &Path| {
            let path = path.to_owned();
            move |source| OpenEnvError { path, source }
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(root).map_err(fail(root))?;
        for entry in root.read_dir().map_err(fail(root))? {
            let path = entry.map_err(fail(root))?.path();
            if let Err(error) = sweep(&path) {
                tracing::warn!(path = %path.display(), %error, "a killed builder's leavings stay");
            }
        }
        Ok(Shelf { root: root.to_owned() })
    }

    /// The place of the environment with this identity.
    pub(super) fn place(&self, kind: &str, identity: &str) -> Place {
        let key = agent_model::ids::hex(&Sha256::digest(format!("{kind}\n{identity}")));
        let name = format!("{}-{}", kind.replace(' ', "-"), &key[..12]);
        Place { prefix: self.root.join(&name), key: Some(key), name }
    }
}

impl Shelf {
    /// The place of this name, if it can be the name of one.
    pub(super) fn found(&self, name: &str) -> Option<Place> {
        let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        (plain && !name.is_empty()).then(|| Place {
            prefix: self.root.join(name),
            key: None,
            name: name.to_owned(),
        })
    }
}

/// Removes an entry that nobody works on and that is not part of an environment.
fn sweep(path: &Path) -> io::Result<()> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return Ok(()) };
    if name.contains(".log.") {
        return fs::remove_file(path); // a transcript that never became a log; who still writes it, keeps it open
    }
    let place = Place { prefix: path.to_owned(), key: None, name: name.to_owned() };
    if !path.is_dir() || place.marker().is_some() {
        return Ok(());
    }
    place.try_exclusive()?.map_or(Ok(()), |lock| lock.wipe())
}

/// The place of one environment, built or not.
#[derive(Debug, Clone)]
pub(super) struct Place {
    prefix: PathBuf,
    /// Unknown for what was merely found.
    key: Option<String>,
    name: String,
}

/// What a marker says.
#[derive(Debug, Serialize, Deserialize)]
struct Marker {
    version: u32,
    key: String,
    prefix: PathBuf,
    vars: BTreeMap<String, String>,
    path_entries: Vec<PathBuf>,
    python_version: String,
}

impl Place {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// A lease, if the environment is there and nobody works on it.
    pub(super) fn lease(&self, reused: bool) -> Result<Option<EnvLease>, AcquireError> {
        // Looked at before it is locked as well: a lock for nothing would keep a builder waiting.
        if self.marker().is_none() {
            return Ok(None);
        }
        let path = self.beside("lock");
        let lock = open_lock(&path).map_err(AcquireError::io("open", &path))?;
        match lock.try_lock_shared() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(AcquireError::io("lock", &path)(error)),
            Ok(()) => {}
        }
        let marker = self.marker();
        Ok(marker.map(|marker| EnvLease { name: self.name.clone(), marker, reused, _lock: lock }))
    }

    /// The sole right to this place, once those who hold it let go; `None` when another process made the
    /// environment ready meanwhile. `waiting` is called once if it takes a while.
    pub(super) async fn exclusive(&self, waiting: impl FnOnce()) -> Result<Option<Exclusive>, AcquireError> {
        let mut waiting = Some(waiting);
        loop {
            if self.lease(false)?.is_some() {
                return Ok(None);
            }
            if let Some(lock) = self.try_exclusive().map_err(AcquireError::io("lock", &self.prefix))? {
                return Ok(Some(lock));
            }
            if let Some(waiting) = waiting.take() {
                waiting();
            }
            tokio::time::sleep(LOCK_EVERY).await;
        }
    }

    pub(super) fn try_exclusive(&self) -> io::Result<Option<Exclusive>> {
        let lock = open_lock(&self.beside("lock"))?;
        match lock.try_lock() {
            Ok(()) => Ok(Some(Exclusive { place: self.clone(), _lock: Arc::new(lock) })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Where the last builder's log is kept.
    pub(super) fn log(&self) -> PathBuf {
        self.beside("log")
    }

    fn beside(&self, ending: &str) -> PathBuf {
        self.prefix.with_file_name(format!("{}.{ending}", self.name))
    }

    /// The marker, if it is for this environment in this place and a quick look finds no damage.
    fn marker(&self) -> Option<Marker> {
        let marker: Marker = serde_json::from_slice(&fs::read(self.prefix.join(MARKER)).ok()?).ok()?;
        let same = marker.version == MARKER_VERSION
            && marker.prefix == self.prefix
            && self.key.as_ref().is_none_or(|key| *key == marker.key);
        // `exists` follows links: an interpreter that was removed from the machine is seen.
        let usable = marker.path_entries.iter().all(|bin| bin.join("python").exists());
        (same && usable).then_some(marker)
    }
}

fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)
}

/// The sole right to a place. Clones hold it together, so that work on another thread keeps it when those who
/// wait for that work are gone.
#[derive(Debug, Clone)]
pub(super) struct Exclusive {
    place: Place,
    _lock: Arc<File>,
}

impl Exclusive {
    /// An empty directory to build in. What stands there goes when it is dropped before [`Scaffold::finish`].
    pub(super) async fn scaffold(self) -> Result<Scaffold, AcquireError> {
        let scaffold = Scaffold { lock: Some(self) };
        scaffold.clear().await?;
        Ok(scaffold)
    }

    /// Ends what an earlier builder left running, and removes what it left lying.
    fn wipe(&self) -> io::Result<()> {
        let prefix = &self.place.prefix;
        if !prefix.exists() {
            return Ok(());
        }
        let mark = prefix.to_string_lossy();
        let (_, left) = agent_shim::process::kill_marked(agent_shim::MARK, &mark, KILL_WITHIN);
        if left > 0 {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "an earlier builder cannot be ended"));
        }
        // The marker goes first: whatever is left when this is cut short is no environment.
        match fs::remove_file(prefix.join(MARKER)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        failpoint::hit("env.place.wipe")?;
        fs::remove_dir_all(prefix)
    }

    fn write_marker(&self, built: Built) -> io::Result<()> {
        let Built { vars, path_entries, python_version } = built;
        let (prefix, key) = (self.place.prefix.clone(), self.place.key.clone().unwrap_or_default());
        let marker = Marker { version: MARKER_VERSION, key, prefix, vars, path_entries, python_version };
        let (path, new) = (self.place.prefix.join(MARKER), self.place.prefix.join("ready.json.new"));
        let directory = File::open(&self.place.prefix)?;
        // The packages first: a marker must not outlive a power cut that they do not.
        // On a stacked file system, such as a container's, any signal of a child interrupts it.
        failpoint::hit("env.ready.sync")?;
        rustix::io::retry_on_intr(|| rustix::fs::syncfs(&directory))?;
        failpoint::hit("env.ready.write")?;
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec_pretty(&marker)?)?;
        file.sync_all()?;
        failpoint::hit("env.ready.rename")?;
        fs::rename(new, path)?;
        failpoint::hit("env.ready.done")?;
        directory.sync_all()
    }
}

/// A directory that is being built in.
#[derive(Debug)]
pub(super) struct Scaffold {
    lock: Option<Exclusive>,
}

impl Scaffold {
    /// Makes the directory empty.
    pub(super) async fn clear(&self) -> Result<(), AcquireError> {
        let Some(lock) = self.lock.clone() else { return Ok(()) };
        let prefix = lock.place.prefix.clone();
        let clear = move || {
            lock.wipe()?;
            failpoint::hit("env.place.make")?;
            fs::DirBuilder::new().mode(0o755).create(&lock.place.prefix)
        };
        blocking(clear).await.map_err(AcquireError::io("clear", &prefix))
    }

    /// Declares the environment ready.
    pub(super) async fn finish(mut self, built: Built) -> Result<(), AcquireError> {
        let Some(lock) = self.lock.clone() else { return Ok(()) };
        let place = lock.place.clone();
        blocking(move || lock.write_marker(built))
            .await
            .map_err(AcquireError::io("finish", &place.prefix))?;
        if place.marker().is_none() {
            let detail = "there is no `python` where the builder says it is".to_owned();
            return Err(AcquireError::Failed { step: "looking at the new environment", detail });
        }
        self.lock = None;
        Ok(())
    }
}

impl Drop for Scaffold {
    /// Removes what was built, in the background and with the lock held. If the runtime is gone as well, the
    /// next life does it.
    fn drop(&mut self) {
        let (Some(lock), Ok(runtime)) = (self.lock.take(), tokio::runtime::Handle::try_current()) else {
            return;
        };
        runtime.spawn_blocking(move || {
            if let Err(error) = lock.wipe() {
                tracing::warn!(path = %lock.place.prefix.display(), %error, "half an environment is left behind");
            }
        });
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// A ready environment. It is neither rebuilt nor removed while this lives.
#[derive(Debug)]
pub struct EnvLease {
    name: String,
    marker: Marker,
    reused: bool,
    _lock: File,
}

impl EnvLease {
    /// What the environment is called on this node: its kind and the start of its digest.
    pub fn key(&self) -> &str {
        &self.name
    }

    /// Its directory.
    pub fn prefix(&self) -> &Path {
        &self.marker.prefix
    }

    /// The variables a command needs to use it, besides `PATH`.
    pub fn vars(&self) -> &BTreeMap<String, String> {
        &self.marker.vars
    }

    /// What goes first on `PATH`.
    pub fn path_entries(&self) -> &[PathBuf] {
        &self.marker.path_entries
    }

    /// It was there already: nothing was built, and nobody was waited for.
    pub fn reused(&self) -> bool {
        self.reused
    }

    /// The version of its interpreter, for example `3.10.12`.
    pub fn python_version(&self) -> &str {
        &self.marker.python_version
    }
}
