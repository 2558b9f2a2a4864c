//! The directory of environments: who may write, what is ready, what is half-built.
//!
//! ```text
//! ROOT/pip-3f0a…/            an environment, in the place it was built for
//! ROOT/pip-3f0a…/ready.json  its marker, written last: without it, it does not exist; see [`marker`](super::marker)
//! ROOT/pip-3f0a…/environment.lock  the explicit list of its packages, where there can be one
//! ROOT/pip-3f0a….lock        held shared by leases, exclusively by a builder; the kernel frees it
//! ROOT/pip-3f0a….log         the output of its last builder
//! ROOT/pip-3f0a….used        when it was last used, see [`marker`](super::marker)
//! ROOT/image-3f0a….image     the images that were brought for it, see [`held`](super::image)
//! ROOT/pip-3f0a….pin         present if it is not removed to make room
//! ROOT/.trash-pip-3f0a…-7.0  a removed one, until its files are deleted
//! ROOT/interpreters.json     the answers of interpreters, see [`interpreter`](super::interpreter)
//! ```
//!
//! Lock files are never removed: a lock on a removed file locks nothing.

mod lease;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use agent_blocking::blocking_io;
use agent_model::failpoint;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

pub use self::lease::EnvLease;
use super::marker::{LOCK_LIST, MARKER, Marker, Seen};
use super::trash::{TRASH, empty_trash};
use super::{AcquireError, Built, OpenEnvError};

/// How long killing the processes of an earlier builder may take.
const KILL_WITHIN: Duration = Duration::from_secs(10);
/// Pause between tries of a lock that another process holds. The kernel does not notify when it is released, and a
/// thread that waits in the kernel cannot be cancelled.
const LOCK_EVERY: Duration = Duration::from_millis(100);
/// A use is noted at most this often.
const NOTE_EVERY: Duration = Duration::from_secs(60);

/// The directory of environments.
#[derive(Debug, Clone)]
pub(super) struct EnvCache {
    root: PathBuf,
    /// Jobs can write to environments.
    writable: bool,
    uses: Uses,
}

/// How many leases this process has, by environment.
#[derive(Debug, Clone, Default)]
pub(super) struct Uses(Arc<Mutex<HashMap<String, u32>>>);

impl Uses {
    pub(super) fn of(&self, name: &str) -> u32 {
        self.0.lock().get(name).copied().unwrap_or(0)
    }

    fn add(&self, name: &str) -> Use {
        *self.0.lock().entry(name.to_owned()).or_default() += 1;
        Use { uses: self.clone(), name: name.to_owned() }
    }
}

/// Counts one lease.
#[derive(Debug)]
struct Use {
    uses: Uses,
    name: String,
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut uses = self.uses.0.lock();
        match uses.get_mut(&self.name) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(uses.remove(&self.name)),
        }
    }
}

impl EnvCache {
    /// Makes the directory and wipes environments that are neither ready nor being built.
    pub(super) fn open(root: &Path, writable: bool) -> Result<EnvCache, OpenEnvError> {
        let fail = |path: &Path| {
            let path = path.to_owned();
            move |source| OpenEnvError { path, source }
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(root).map_err(fail(root))?;
        for entry in root.read_dir().map_err(fail(root))? {
            let path = entry.map_err(fail(root))?.path();
            if let Err(error) = sweep(&path) {
                tracing::warn!(path = %path.display(), %error, "cannot clean up after killed builder");
            }
        }
        let cache = EnvCache { root: root.to_owned(), writable, uses: Uses::default() };
        empty_trash(cache.trash());
        Ok(cache)
    }

    /// Removed environments whose files are not yet deleted.
    pub(super) fn trash(&self) -> Vec<PathBuf> {
        let entries = self.root.read_dir().into_iter().flatten().flatten();
        let trash = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(TRASH));
        trash.map(|entry| entry.path()).collect()
    }

    /// The directories that contain an environment.
    pub(super) fn places(&self) -> Vec<EnvDir> {
        let entries = self.root.read_dir().into_iter().flatten().flatten();
        let names = entries.filter(|entry| entry.path().join(MARKER).exists());
        let mut places: Vec<EnvDir> =
            names.filter_map(|entry| self.found(entry.file_name().to_str()?)).collect();
        places.sort_by(|one, other| one.name.cmp(&other.name));
        places
    }

    /// The environments for which images were brought.
    pub(super) fn with_images(&self) -> Vec<EnvDir> {
        let entries = self.root.read_dir().into_iter().flatten().flatten();
        let names =
            entries.filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".image")?.to_owned()));
        names.filter_map(|name| self.found(&name)).collect()
    }

    fn at(&self, name: String, key: Option<String>) -> EnvDir {
        EnvDir { prefix: self.root.join(&name), key, name, writable: self.writable, uses: self.uses.clone() }
    }

    /// The directory of the environment with this identity.
    pub(super) fn place(&self, kind: &str, identity: &str) -> EnvDir {
        let key = agent_model::ids::hex(&Sha256::digest(format!("{kind}\n{identity}")));
        let name = format!("{}-{}", kind.replace(' ', "-"), &key[..12]);
        self.at(name, Some(key))
    }

    /// The directory with this name, if an environment can have the name.
    pub(super) fn found(&self, name: &str) -> Option<EnvDir> {
        let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        (plain && !name.is_empty()).then(|| self.at(name.to_owned(), None))
    }
}

/// Removes an entry that no builder works on and that is not part of an environment.
fn sweep(path: &Path) -> io::Result<()> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return Ok(()) };
    if name.contains(".log.") {
        return fs::remove_file(path); // a transcript that never became a log; its writer, if any, still has it open
    }
    let place = EnvDir {
        prefix: path.to_owned(),
        key: None,
        name: name.to_owned(),
        writable: true,
        uses: Uses::default(),
    };
    if name.starts_with(TRASH) || !path.is_dir() || place.marker().is_some() {
        return Ok(());
    }
    place.try_exclusive()?.map_or(Ok(()), |lock| lock.wipe())
}

/// The remaining work on a ready environment, see [`super::aftercare`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Left {
    pub(super) settle: bool,
    pub(super) compile: bool,
}

/// The directory of one environment, built or not.
#[derive(Debug, Clone)]
pub(super) struct EnvDir {
    prefix: PathBuf,
    /// Unknown if only the directory was found.
    key: Option<String>,
    name: String,
    /// Jobs can write to it.
    writable: bool,
    uses: Uses,
}

impl EnvDir {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// A lease, if the environment exists and no builder works on it; `took` is how long its build took, if it was
    /// built for this lease.
    pub(super) fn lease(&self, took: Option<Duration>) -> Result<Option<EnvLease>, AcquireError> {
        let Some((marker, lock)) = self.shared()? else { return Ok(None) };
        Ok(Some(EnvLease {
            name: self.name.clone(),
            vars: marker.vars.clone(),
            took,
            lock_file: marker.locked.then(|| self.prefix.join(LOCK_LIST)),
            log_file: self.log(),
            marker,
            parts: Vec::new(),
            _use: self.uses.add(&self.name),
            _lock: lock,
        }))
    }

    /// A guard that keeps builders away: the exclusive lock, or a shared one. `None` when a builder works on it.
    pub(super) fn hold_off(&self) -> io::Result<Option<Guard>> {
        if let Some(sole) = self.try_exclusive()? {
            return Ok(Some(Guard { _sole: Some(sole), _shared: None }));
        }
        let shared = self.shared().map_err(io::Error::other)?;
        Ok(shared.map(|(_, lock)| Guard { _sole: None, _shared: Some(lock) }))
    }

    /// The marker and a shared lock that prevents changes; `None` if it does not exist or a builder works on it.
    fn shared(&self) -> Result<Option<(Marker, File)>, AcquireError> {
        // Checked before it is locked, too: a useless lock would delay a builder.
        if self.marker().is_none() {
            return Ok(None);
        }
        let path = self.beside("lock");
        let lock = agent_fs::open_lock(&path).map_err(AcquireError::io("open", &path))?;
        if !agent_fs::try_lock_shared(&lock).map_err(AcquireError::io("lock", &path))? {
            return Ok(None);
        }
        Ok(self.marker().map(|marker| (marker, lock)))
    }

    /// The exclusive lock, once the others have released theirs; `None` when another process made the environment
    /// ready meanwhile. `waiting` is called once if it takes a while.
    pub(super) async fn exclusive(&self, waiting: impl FnOnce()) -> Result<Option<Exclusive>, AcquireError> {
        let mut waiting = Some(waiting);
        loop {
            if self.lease(None)?.is_some() {
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
        let lock = agent_fs::open_lock(&self.beside("lock"))?;
        let taken = agent_fs::try_lock(&lock)?;
        Ok(taken.then(|| Exclusive { place: self.clone(), _lock: Arc::new(lock) }))
    }

    /// Where the last builder's log is kept.
    pub(super) fn log(&self) -> PathBuf {
        self.beside("log")
    }

    /// The note of the images that were brought for it.
    pub(super) fn images(&self) -> PathBuf {
        self.beside("image")
    }

    /// Where its byte code is made.
    pub(super) fn compiled(&self) -> PathBuf {
        self.beside("compiled")
    }

    fn beside(&self, ending: &str) -> PathBuf {
        self.prefix.with_file_name(format!("{}.{ending}", self.name))
    }

    /// The note of its last use.
    pub(super) fn used(&self) -> PathBuf {
        self.beside("used")
    }

    /// The file that keeps it from being removed to make room.
    pub(super) fn pin(&self) -> PathBuf {
        self.beside("pin")
    }

    /// How many leases of it this process has.
    pub(super) fn uses(&self) -> u32 {
        self.uses.of(&self.name)
    }

    /// The marker, if it is for this environment in this place and a quick look finds no damage.
    pub(super) fn marker(&self) -> Option<Marker> {
        let marker = Marker::read(&self.prefix)?;
        self.key.as_ref().is_none_or(|key| *key == marker.key).then_some(marker)
    }

    /// Notes that it is used, and returns how it is damaged, if it is. Looks at each file only if something has
    /// changed, or if jobs can write to it.
    pub(super) async fn inspect(&self, lease: &EnvLease) -> Result<Option<String>, AcquireError> {
        let path = self.used();
        let seen = Seen::read(&path);
        let open = self.writable;
        let noted = path.metadata().and_then(|noted| noted.modified());
        let lately = noted.is_ok_and(|noted| noted.elapsed().is_ok_and(|since| since < NOTE_EVERY));
        if !open && lease.marker.looks_like(seen.as_ref()) {
            if !lately {
                seen.unwrap_or_else(|| Seen::of(&lease.marker, false)).write(&path);
            }
            return Ok(None);
        }
        let marker = lease.marker.clone();
        let look = move || {
            // Its state is taken first, so that a change during the look is noticed the next time.
            let now = Seen::of(&marker, seen.as_ref().is_some_and(|seen| seen.compiled));
            let look = marker.look(seen.as_ref(), open);
            let now = now.with(look.stamps);
            if look.damage.is_none() && !(lately && seen.as_ref() == Some(&now)) {
                now.write(&path);
            }
            Ok(look.damage)
        };
        blocking_io(look).await.map_err(AcquireError::io("inspect", &self.prefix))
    }

    /// The work that remains to be done while it is used.
    pub(super) fn left(&self, lease: &EnvLease) -> Left {
        let compiled = || Seen::read(&self.used()).is_some_and(|seen| seen.compiled);
        Left { settle: lease.marker.boot.is_some(), compile: lease.marker.compiles && !compiled() }
    }

    /// Notes its state now that it is ready. Blocks briefly.
    fn note_ready(&self) {
        if let Some(marker) = self.marker() {
            Seen::of(&marker, false).write(&self.used());
        }
    }

    /// Notes its state after compiling, unless it was changed meanwhile. Blocks: looks at each file.
    pub(super) fn note_compiled(&self) {
        let Some(marker) = self.marker() else { return };
        let now = Seen::of(&marker, true);
        let look = marker.look(Seen::read(&self.used()).as_ref(), self.writable);
        if look.damage.is_none() {
            now.with(look.stamps).write(&self.used());
        }
    }

    /// Removes the marker, so that it is no longer an environment; leases stay valid.
    pub(super) fn condemn(&self) -> Result<(), AcquireError> {
        self.remove_marker().map_err(AcquireError::io("remove", &self.prefix.join(MARKER)))
    }

    /// Forces its files to the disk, so that it is valid after the next boot as well. Blocks for as long as the disk
    /// takes, which for gigabytes is too long for the start of a job, or for holding the lock.
    pub(super) fn settle(&self) -> Result<(), AcquireError> {
        let Some(marker) = self.marker().filter(|marker| marker.boot.is_some()) else { return Ok(()) };
        let path = self.prefix.join(MARKER);
        let built = || path.metadata().map(|seen| (seen.ino(), seen.mtime(), seen.mtime_nsec())).ok();
        let this = built();
        let force = || {
            let directory = File::open(&self.prefix)?;
            // On a stacked file system, such as a container's, any signal from a child interrupts `syncfs`.
            failpoint::hit("env.ready.sync")?;
            rustix::io::retry_on_intr(|| rustix::fs::syncfs(&directory))?;
            let new = self.draft(&marker.lasting(self.writable)?)?;
            // The time of its build stays. If another was built meanwhile, that one is not on the disk.
            File::options().write(true).open(&new)?.set_modified(path.metadata()?.modified()?)?;
            match self.shared() {
                Ok(Some(_lock)) if built() == this => self.declare(&new)?,
                _ => return fs::remove_file(new),
            }
            directory.sync_all()
        };
        match force() {
            // The environment was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            forced => forced.map_err(AcquireError::io("force to the disk", &self.prefix)),
        }
    }

    /// Writes a marker under a temporary name.
    fn draft(&self, marker: &Marker) -> io::Result<PathBuf> {
        let name = format!("{MARKER}.{}", std::process::id());
        failpoint::hit("env.ready.write")?;
        let mut file = agent_fs::make_anew(&self.prefix, &name, 0o644)?; // a builder may have guessed the name
        file.write_all(&serde_json::to_vec_pretty(marker)?)?;
        if marker.boot.is_none() {
            file.sync_all()?; // a marker for later boots must not be incomplete after a power cut
        }
        Ok(self.prefix.join(name))
    }

    fn declare(&self, draft: &Path) -> io::Result<()> {
        failpoint::hit("env.ready.rename")?;
        fs::rename(draft, self.prefix.join(MARKER))?;
        failpoint::hit("env.ready.done")
    }

    fn remove_marker(&self) -> io::Result<()> {
        match fs::remove_file(self.prefix.join(MARKER)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// While this is held, no builder works on the environment.
pub(super) struct Guard {
    _sole: Option<Exclusive>,
    _shared: Option<File>,
}

/// The exclusive lock of an environment. Clones share it, so that work on another thread keeps it when its waiters
/// are gone.
#[derive(Debug, Clone)]
pub(super) struct Exclusive {
    place: EnvDir,
    _lock: Arc<File>,
}

impl Exclusive {
    /// An empty directory to build in. It is removed if this is dropped before [`Scaffold::finish`].
    pub(super) async fn scaffold(self) -> Result<Scaffold, AcquireError> {
        let scaffold = Scaffold { lock: Some(self) };
        scaffold.clear().await?;
        Ok(scaffold)
    }

    /// Kills the remaining processes of an earlier builder, and removes its files.
    pub(super) fn wipe(&self) -> io::Result<()> {
        let prefix = &self.place.prefix;
        if !prefix.exists() {
            return Ok(());
        }
        let mark = prefix.to_string_lossy();
        let (_, left) = agent_spawn::kill(&[], &mark, KILL_WITHIN);
        if left > 0 {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "an earlier builder cannot be ended"));
        }
        // The marker is removed first: if this is interrupted, the rest is no environment.
        self.place.remove_marker()?;
        failpoint::hit("env.place.wipe")?;
        self.move_away()
    }

    /// The directory is gone at once, its files are deleted a little later.
    fn move_away(&self) -> io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        failpoint::hit("env.place.move")?;
        let (name, process) = (&self.place.name, std::process::id());
        loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let trash = self.place.prefix.with_file_name(format!("{TRASH}{name}-{process}.{number}"));
            match fs::rename(&self.place.prefix, &trash) {
                Ok(()) => {
                    empty_trash(vec![trash]);
                    return Ok(());
                }
                // Left by an earlier process with the same number.
                Err(error)
                    if [io::ErrorKind::DirectoryNotEmpty, io::ErrorKind::AlreadyExists]
                        .contains(&error.kind()) => {}
                Err(_) => return agent_spawn::remove_tree(&self.place.prefix),
            }
        }
    }

    /// Removes the environment and the files beside it, except the lock and the note of its images.
    pub(super) fn remove(&self) -> io::Result<()> {
        self.wipe()?;
        for path in [self.place.used(), self.place.pin(), self.place.log()] {
            let _ = fs::remove_file(path); // a remaining one does no harm
        }
        Ok(())
    }

    fn write_marker(&self, built: &Built) -> io::Result<()> {
        let (prefix, key) = (self.place.prefix.clone(), self.place.key.clone().unwrap_or_default());
        if let Some(lock) = &built.lock {
            failpoint::hit("env.lock.write")?;
            agent_fs::make_anew(&prefix, LOCK_LIST, 0o644)?.write_all(lock.as_bytes())?;
        }
        let draft = self.place.draft(&Marker::of(built, key, prefix)?)?;
        self.place.declare(&draft)
    }
}

/// The directory of a build.
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
        blocking_io(clear).await.map_err(AcquireError::io("clear", &prefix))
    }

    /// Marks the environment as ready.
    pub(super) async fn finish(mut self, built: Built) -> Result<(), AcquireError> {
        let Some(lock) = self.lock.clone() else { return Ok(()) };
        let place = lock.place.clone();
        blocking_io(move || {
            lock.write_marker(&built)?;
            lock.place.note_ready();
            Ok(())
        })
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
    /// Removes what was built, in the background and with the lock held. If the runtime is gone as well, the next
    /// start does it.
    fn drop(&mut self) {
        let (Some(lock), Ok(runtime)) = (self.lock.take(), tokio::runtime::Handle::try_current()) else {
            return;
        };
        runtime.spawn_blocking(move || {
            if let Err(error) = lock.wipe() {
                tracing::warn!(path = %lock.place.prefix.display(), %error, "cannot remove half-built environment");
            }
        });
    }
}
