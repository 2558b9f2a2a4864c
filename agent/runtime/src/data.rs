//! Data that jobs read and nobody sends: fetched once, kept, and given to each job as files of its own. And what jobs
//! leave, which is sent to stores ([`upload`]).
//!
//! Owns one directory: an entry for each address, beside it the unfinished ones and those that are being removed. Hides the
//! program that fetches and sends, and how an interrupted fetch goes on.
//!
//! ```text
//! data/KEY/entry.json   what it is; written last
//! data/KEY/data/...     its files
//! data/.part-KEY/       an unfinished one, which the next fetch goes on with
//! data/.trash-...       removed
//! ```
//!
//! Invariants: an entry is complete, because it gets its name by a rename; its source is asked at each use whether it is
//! still the same; one fetch of an address runs at a time, and goes on only while a job waits for it; no job can write to
//! an entry: it gets copies, or second names of files that belong to another user than its own; nothing that is being
//! used is removed.

mod entry;
mod place;
mod upload;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use agent_blocking::blocking;
use agent_command::Command;
use agent_env::{EngineEvent, EngineRequest, Failure, FailureKind, Fetch, Fetched, Task};
use agent_model::failpoint;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::env::{Builder, Ear, Progress};
use entry::Entry;

pub use agent_env::{Options, UploadTarget, Uploaded};
pub use upload::DataUpload;

/// A download without progress for this long is begun again where it stopped.
const STALL: Duration = Duration::from_secs(30);
/// A program that says nothing for this long hangs.
const SILENCE: Duration = Duration::from_secs(120);
/// How much nicer a fetch is than the daemon.
const NICE: i32 = 5;
/// How long an unfinished fetch that nobody waits for is kept.
const PARTS_STAY: Duration = Duration::from_secs(7 * 24 * 3600);
/// The prefix of the name of an unfinished entry.
const PART: &str = ".part-";

/// Where data is fetched from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataSource {
    /// The address, without credentials.
    pub url: String,
    /// It is one file.
    pub is_file: bool,
    /// The settings of its store, credentials among them.
    pub options: BTreeMap<String, String>,
}

/// Why data cannot be had.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum DataError {
    #[error("the program that fetches and sends data is missing: {}", looked.display())]
    ProgramMissing { looked: PathBuf },
    #[error("{0}")]
    Absent(String),
    #[error("{0}")]
    Denied(String),
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Unreachable(String),
    #[error("{0}")]
    Damaged(String),
    #[error("{0}")]
    NoRoom(String),
    #[error("could not {doing} {}", path.display())]
    File {
        doing: &'static str,
        /// With what.
        path: PathBuf,
        source: io::Error,
    },
    #[error("{0}")]
    Failed(String),
}

impl DataError {
    fn file(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DataError {
        let path = path.to_owned();
        move |source| DataError::File { doing, path, source }
    }
}

impl From<Failure> for DataError {
    fn from(failure: Failure) -> DataError {
        let Failure { kind, message, hint, .. } = failure;
        let said = hint.map_or_else(|| message.clone(), |hint| format!("{message} ({hint})"));
        match kind {
            FailureKind::NotFound => DataError::Absent(said),
            FailureKind::Denied => DataError::Denied(said),
            FailureKind::Spec | FailureKind::Refused => DataError::Refused(said),
            FailureKind::Network | FailureKind::TooLong => DataError::Unreachable(said),
            FailureKind::Damaged => DataError::Damaged(said),
            FailureKind::DiskFull => DataError::NoRoom(message),
            FailureKind::Unsatisfiable | FailureKind::Other => DataError::Failed(said),
        }
    }
}

/// How the cache works.
#[derive(Debug, Clone)]
pub struct DataConfig {
    /// Its directory.
    pub root: PathBuf,
    /// The program that fetches.
    pub program: PathBuf,
    /// The variables of that program: proxies and certificates among them.
    pub vars: BTreeMap<String, String>,
    /// The user it runs as, if not the daemon's own.
    pub builder: Option<Builder>,
    /// Nothing is fetched or asked; only what is there can be used.
    pub offline: bool,
}

/// An entry of the cache, for the choice of what is removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptData {
    /// The name of its directory.
    pub key: String,
    /// The address of the data.
    pub url: String,
    /// How much of the disk it takes, in bytes.
    pub bytes: u64,
    /// When it was last used.
    pub used: SystemTime,
    /// A job is just being given it.
    pub is_in_use: bool,
}

/// The cache. Clones share its state.
#[derive(Debug, Clone)]
pub struct DataCache(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: DataConfig,
    slots: Mutex<HashMap<String, Arc<Slot>>>,
}

/// What jobs that want the same address share.
#[derive(Debug)]
struct Slot {
    key: String,
    /// Held while the entry is fetched, copied or removed.
    turn: tokio::sync::Mutex<()>,
    told: watch::Sender<Option<Progress>>,
}

/// A run of the program.
struct EngineRun<'a> {
    task: Task,
    cwd: &'a Path,
    /// By which its processes are found; nothing else has this mark.
    mark: &'a Path,
    /// The user it runs as, if not the daemon's own.
    user: Option<&'a Builder>,
}

/// An entry that is not removed while this is held.
#[derive(Debug)]
pub struct HeldData {
    cache: DataCache,
    slot: Arc<Slot>,
    /// Whether it was fetched just now, and not kept from before.
    pub is_new: bool,
    /// How many files it has, and their length together.
    pub size: (u64, u64),
}

impl DataCache {
    /// Opens the cache, and removes what was to be removed.
    pub fn open(config: DataConfig) -> io::Result<DataCache> {
        std::fs::create_dir_all(&config.root)?;
        entry::pass_only(&config.root)?;
        entry::empty_trash(&config.root)?;
        Ok(DataCache(Arc::new(Inner { config, slots: Mutex::default() })))
    }

    /// Makes sure that the data is here as it is at its source. `told` is sent the progress, whoever fetches.
    pub fn obtain<'a>(
        &'a self,
        source: &'a DataSource,
        told: &'a watch::Sender<Option<Progress>>,
    ) -> BoxFuture<'a, Result<HeldData, DataError>> {
        async move {
            let slot = self.slot(&key_of(source));
            let mut further = slot.told.subscribe();
            let fetched = {
                let obtained = self.obtain_in(&slot, source);
                tokio::pin!(obtained);
                loop {
                    tokio::select! {
                        done = &mut obtained => break done?,
                        _ = further.changed() => drop(told.send_replace(further.borrow_and_update().clone())),
                    }
                }
            };
            let size = (fetched.files, fetched.bytes);
            Ok(HeldData { cache: self.clone(), slot, is_new: fetched.is_new, size })
        }
        .boxed()
    }

    async fn obtain_in(&self, slot: &Slot, source: &DataSource) -> Result<Fetched, DataError> {
        let _turn = slot.turn.lock().await;
        let place = self.0.config.root.join(&slot.key);
        let entry = blocking({
            let place = place.clone();
            move || Entry::read(&place)
        })
        .await;
        if self.0.config.offline {
            let Some(entry) = entry else {
                return Err(DataError::Refused(
                    "the node is offline, and it does not have the data yet".to_owned(),
                ));
            };
            entry.touch(&place);
            return Ok(entry.fetched());
        }
        let known = entry.as_ref().and_then(|entry| entry.version.clone());
        let fetched = self.fetch(slot, source, known).await;
        slot.told.send_replace(None);
        let (fetched, root) = (fetched?, self.0.config.root.clone());
        match entry {
            Some(entry) if !fetched.is_new => entry.touch(&place),
            _ => {
                let (entry, key) = (Entry::of(source, &fetched), slot.key.clone());
                let builder = self.0.config.builder.clone();
                blocking(move || entry.keep(&root, &key, builder.as_ref())).await?;
            }
        }
        Ok(fetched)
    }

    /// Runs the program that fetches, below the part of this slot.
    async fn fetch(
        &self,
        slot: &Slot,
        source: &DataSource,
        known: Option<String>,
    ) -> Result<Fetched, DataError> {
        let DataConfig { root, builder, .. } = &self.0.config;
        let part = root.join(format!("{PART}{}", slot.key));
        let lend = {
            let (part, builder) = (part.clone(), builder.clone());
            move || -> io::Result<()> {
                failpoint::hit("env.data.spawn")?;
                std::fs::create_dir_all(&part)?;
                builder.map_or(Ok(()), |builder| builder.own(&part))
            }
        };
        blocking(lend).await.map_err(DataError::file("prepare", &part))?;
        let fetch = Fetch {
            url: source.url.clone(),
            is_file: source.is_file,
            options: Options(source.options.clone()),
            to: part.clone(),
            known,
            stall_s: STALL.as_secs(),
        };
        let run =
            EngineRun { task: Task::Fetch(Box::new(fetch)), cwd: &part, mark: &part, user: builder.as_ref() };
        match self.run(run, &slot.told).await? {
            EngineEvent::Fetched(fetched) => Ok(fetched),
            other => Err(DataError::Failed(format!("the program answered something else: {other:?}"))),
        }
    }

    /// Runs the program; `told` is sent its progress. Dropping the future ends it.
    async fn run(
        &self,
        EngineRun { task, cwd, mark, user }: EngineRun<'_>,
        told: &watch::Sender<Option<Progress>>,
    ) -> Result<EngineEvent, DataError> {
        let DataConfig { program, vars, .. } = &self.0.config;
        if !program.is_file() {
            return Err(DataError::ProgramMissing { looked: program.clone() });
        }
        let request = EngineRequest { version: agent_env::VERSION, task };
        let request = serde_json::to_vec(&request).map_err(|error| DataError::Failed(error.to_string()))?;
        let command = Command::new(program).envs(vars).envs([("LC_ALL", "C.UTF-8")]).input(request);
        let command = command.cwd(cwd).mark(&mark.to_string_lossy()).stall(SILENCE).nice(NICE);
        let command = match user {
            Some(builder) => builder.runs(command),
            None => command,
        };
        let (mut ear, mut complaint) = (Ear::default(), Vec::new());
        let mut hear = |event: Option<EngineEvent>, _: &str| {
            if let Some(EngineEvent::Progress(progress)) = event {
                told.send_replace(Some(progress));
            }
        };
        let keep = |bytes: &[u8]| complaint.extend_from_slice(&bytes[..bytes.len().min(4096)]);
        let ran = command.talk(|bytes| ear.hear(bytes, &mut hear), keep).await;
        ran.map_err(|error| DataError::Unreachable(agent_model::causes::tell(&error)))?;
        ear.end(&mut hear);
        match ear.last {
            Some(EngineEvent::Failed(failure)) => Err(failure.into()),
            Some(done @ (EngineEvent::Fetched(_) | EngineEvent::Uploaded(_))) => Ok(done),
            other => {
                let said = String::from_utf8_lossy(&complaint).trim().to_owned();
                Err(DataError::Failed(format!(
                    "the program that fetches and sends data ended without a result: {other:?} {said}"
                )))
            }
        }
    }

    fn slot(&self, key: &str) -> Arc<Slot> {
        let mut slots = self.0.slots.lock();
        // Those that nobody uses any more hold nothing.
        slots.retain(|_, slot| Arc::strong_count(slot) > 1);
        let made = || {
            let told = watch::Sender::new(None);
            Arc::new(Slot { key: key.to_owned(), turn: tokio::sync::Mutex::default(), told })
        };
        slots.entry(key.to_owned()).or_insert_with(made).clone()
    }

    /// What is kept, unfinished fetches among it. Blocks: looks at every file.
    pub fn list(&self) -> io::Result<Vec<KeptData>> {
        let in_use: Vec<String> = {
            let slots = self.0.slots.lock();
            slots.iter().filter(|(_, slot)| Arc::strong_count(slot) > 1).map(|(key, _)| key.clone()).collect()
        };
        let mut kept = entry::list(&self.0.config.root)?;
        for data in &mut kept {
            let key = data.key.strip_prefix(PART).unwrap_or(&data.key);
            data.is_in_use = in_use.iter().any(|used| used == key);
        }
        Ok(kept)
    }

    /// Removes what [`DataCache::list`] calls so; `false` if it is in use.
    pub async fn remove(&self, name: &str) -> Result<bool, DataError> {
        let slot = self.slot(name.strip_prefix(PART).unwrap_or(name));
        let Ok(_turn) = slot.turn.try_lock() else { return Ok(false) };
        // One for the table, one here: more are jobs that wait to be given it.
        if Arc::strong_count(&slot) > 2 {
            return Ok(false);
        }
        let (root, name) = (self.0.config.root.clone(), name.to_owned());
        blocking(move || entry::remove(&root, &name)).await?;
        Ok(true)
    }

    /// How long something unused is kept at most; entries have no such limit.
    pub fn is_stale(kept: &KeptData, now: SystemTime) -> bool {
        kept.key.starts_with(PART) && now.duration_since(kept.used).unwrap_or_default() > PARTS_STAY
    }
}

impl HeldData {
    /// Lays the data out at `to`, a file or a folder that does not exist yet, for the user and the group `owner`. With `may_link` the job cannot write to
    /// files of this process's user, and may be given second names of them.
    pub async fn place(&self, to: &Path, owner: Option<(u32, u32)>, may_link: bool) -> Result<(), DataError> {
        let _turn = self.slot.turn.lock().await;
        let (from, to) = (self.cache.0.config.root.join(&self.slot.key), to.to_owned());
        blocking(move || {
            let entry =
                Entry::read(&from).ok_or_else(|| DataError::Unreachable("it was just removed".to_owned()))?;
            let data = from.join(Fetch::DATA);
            let data = if entry.is_file { entry::only_file(&data) } else { data };
            place::place(&data, &to, owner, may_link).map_err(DataError::file("lay out", &to))
        })
        .await
    }
}

/// The name of an entry.
fn key_of(source: &DataSource) -> String {
    let kind = if source.is_file { "file" } else { "folder" };
    let hash = Sha256::digest(format!("{kind}\n{}", source.url));
    hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
