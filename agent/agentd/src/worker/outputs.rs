//! Stores the outputs of a job as one snapshot, and measures its logs.
//!
//! Stored are `outputs/…` and `logs/…` of the working directory, each named output below `named-outputs/NAME/`, and
//! artifacts that were logged through the tracking endpoint at the top. Everything else in the working directory is
//! dropped.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use agent_cas::snapshot::{self, Elsewhere, PushError, ScanError, Snapshot, Unread};
use agent_cas::{Hasher, Store};
use agent_fs::open_plain;
use agent_model::job::JobDraft;
use agent_model::{Artifacts, Digest, failpoint};
use agent_shim::segments::Reader;
use agent_shim::tracking::Intake;
use agent_shim::{ExitRecord, JobDir, LogPolicy};
use tracing::warn;

/// Why the outputs could not be stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CollectError {
    #[error("the outputs could not be read")]
    Scan(#[source] ScanError),
    #[error("the outputs could not be copied")]
    Copy(#[source] io::Error),
    #[error("the outputs could not be sent to the store")]
    Push(#[source] PushError),
    #[error("they were being stored")]
    Stopped,
    #[error("{why}")]
    GivenUp {
        /// A text for users.
        why: String,
        source: Box<CollectError>,
    },
}

impl CollectError {
    /// The wait until `error` is over was given up.
    pub(crate) fn given_up(why: impl Into<String>, error: CollectError) -> CollectError {
        CollectError::GivenUp { why: why.into(), source: Box::new(error) }
    }
}

impl CollectError {
    /// The file that was changed or removed while it was read.
    pub(crate) fn unsteady(&self) -> Option<&Path> {
        match self {
            CollectError::Scan(ScanError::Changed { path })
            | CollectError::Push(PushError::Changed { path }) => Some(path),
            CollectError::Push(PushError::Read { path, source })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                Some(path)
            }
            CollectError::Scan(_)
            | CollectError::Copy(_)
            | CollectError::Push(_)
            | CollectError::Stopped
            | CollectError::GivenUp { .. } => None,
        }
    }
}

/// What was stored of the outputs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Collected {
    /// `None` when there was nothing to store.
    pub(crate) artifacts: Option<Artifacts>,
    /// What could not be stored.
    pub(crate) missing: Vec<Unread>,
    /// What is no content of the job, each path with the reason.
    pub(crate) left_out: Vec<String>,
}

/// Stores the outputs, except for `without`, which counts as missing. Dropping the future ends the reading.
pub(crate) async fn collect(
    store: &Store,
    dir: &JobDir,
    job: &JobDraft,
    without: Vec<Unread>,
) -> Result<Collected, CollectError> {
    let places = places(dir, job);
    let (base, stop) = (dir.data().to_owned(), Arc::new(AtomicBool::new(false)));
    let _stop_when_dropped = SetOnDrop(Arc::clone(&stop));
    let taken = dir.clone();
    let scanned = agent_blocking::spawn_blocking(move || {
        failpoint::hit("node.outputs.collect")
            .map_err(|source| ScanError::Read { path: base.clone(), source })?;
        if let Some(uid) = run_by(&taken) {
            for (_, place) in &places {
                let room = agent_node::disk_free(place) / 2;
                let _ = agent_spawn::take_outputs(place, uid, room); // the scan reports what it cannot read
            }
        }
        scan(&base, &places, &without, &elsewhere(&taken), &stop)
    });
    match scanned.await {
        Ok(scanned) => push(scanned.map_err(CollectError::Scan)?, store).await,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Stores what a running job has written so far. It is copied first, because what the job writes meanwhile would not be
/// what was read; the copy takes at most `room` bytes.
pub(crate) async fn collect_so_far(
    store: &Store,
    dir: &JobDir,
    job: &JobDraft,
    room: u64,
) -> Result<Collected, CollectError> {
    let (places, dir, stop) = (places(dir, job), dir.clone(), Arc::new(AtomicBool::new(false)));
    let _stop_when_dropped = SetOnDrop(Arc::clone(&stop));
    let copied = agent_blocking::spawn_blocking(move || {
        let copy = tempfile::Builder::new().prefix("outputs-").tempdir_in(dir.path())?;
        let (copies, left_out) = copy_places(dir.data(), &places, copy.path(), run_by(&dir), room)?;
        // The copy has no folder that is a link: it was not copied then.
        let scanned = scan(copy.path(), &copies, &left_out, &Elsewhere::default(), &stop);
        Ok((scanned, copy))
    });
    // The copy is removed when its files are in the store.
    let (scanned, _copy) = match copied.await {
        Ok(copied) => copied.map_err(CollectError::Copy)?,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    };
    push(scanned.map_err(CollectError::Scan)?, store).await
}

/// Where the job may have left its outputs instead, by a link in the place of a folder.
fn elsewhere(dir: &JobDir) -> Elsewhere {
    match dir.read_launch() {
        Ok(Some(launch)) => Elsewhere {
            closed: launch.container.then(|| "which was in the job's container".to_owned()),
            owner: launch.user.map(|user| user.uid),
            moved: match launch.tmp {
                Some(tmp) => vec![("/tmp".into(), Some(tmp)), ("/dev/shm".into(), None)],
                None => Vec::new(),
            },
        },
        _ => Elsewhere {
            closed: Some("and how the job was started cannot be read".to_owned()),
            ..Elsewhere::default()
        },
    }
}

/// The user that the job ran as, if it is not the daemon's own.
fn run_by(dir: &JobDir) -> Option<u32> {
    dir.read_launch().ok().flatten()?.user.map(|user| user.uid)
}

/// Copies each place into a directory of `to`; returns these directories, and what could not be copied.
fn copy_places(
    base: &Path,
    places: &[PrefixedDirectory],
    to: &Path,
    uid: Option<u32>,
    room: u64,
) -> io::Result<(Vec<PrefixedDirectory>, Vec<Unread>)> {
    failpoint::hit("node.outputs.copy")?;
    let (mut copies, mut left_out) = (Vec::new(), Vec::new());
    for (number, (prefix, place)) in places.iter().enumerate() {
        let (below, copy) = (place.strip_prefix(base).unwrap_or(place), to.join(number.to_string()));
        std::fs::create_dir(&copy)?;
        match agent_spawn::copy(base, below, &copy, uid, room) {
            Ok(paths) => {
                let why = "cannot be read".to_owned();
                left_out.extend(paths.iter().map(|path| Unread { path: below.join(path), why: why.clone() }));
                copies.push((prefix.clone(), copy));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::StorageFull => return Err(error),
            // The job may have put anything there.
            Err(error) => {
                left_out.push(Unread { path: below.to_owned(), why: format!("cannot be read: {error}") })
            }
        }
    }
    Ok((copies, left_out))
}

async fn push(mut scanned: Snapshot, store: &Store) -> Result<Collected, CollectError> {
    let (missing, left_out) = (std::mem::take(&mut scanned.unread), std::mem::take(&mut scanned.left_out));
    if scanned.files == 0 {
        return Ok(Collected { artifacts: None, missing, left_out });
    }
    snapshot::push(&scanned, store, |_| {}).await.map_err(CollectError::Push)?;
    let artifacts = Artifacts { root: scanned.root, files: scanned.files, bytes: scanned.bytes };
    Ok(Collected { artifacts: Some(artifacts), missing, left_out })
}

/// Signals a thread that nobody waits for it any more.
struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A directory of outputs, after the prefix below which it is stored.
type PrefixedDirectory = (String, PathBuf);

/// Where outputs are, and below which prefix each is stored. Files that the job wrote win over logged artifacts.
fn places(dir: &JobDir, job: &JobDraft) -> Vec<PrefixedDirectory> {
    let mut places = vec![
        ("outputs".to_owned(), dir.work().join("outputs")),
        ("logs".to_owned(), dir.work().join("logs")),
    ];
    places.extend(job.outputs.keys().map(|name| (format!("named-outputs/{name}"), dir.out().join(name))));
    places.push((String::new(), dir.artifacts()));
    places
}

/// The job may have replaced any of them by a link, which is followed out of its own directory only as `elsewhere` allows.
fn scan(
    base: &Path,
    places: &[PrefixedDirectory],
    without: &[Unread],
    elsewhere: &Elsewhere,
    stop: &AtomicBool,
) -> Result<Snapshot, ScanError> {
    let below = |path: &'_ PathBuf| path.strip_prefix(base).unwrap_or(path).to_owned();
    let places: Vec<(&str, PathBuf)> =
        places.iter().map(|(prefix, path)| (prefix.as_str(), below(path))).collect();
    let parts: Vec<(&str, &Path)> = places.iter().map(|(prefix, path)| (*prefix, path.as_path())).collect();
    snapshot::scan_outputs(base, &parts, without, elsewhere, stop)
}

/// The digest of a whole log. A log that does not exist, or cannot be read, is empty.
pub(crate) async fn measure(path: PathBuf) -> Digest {
    let shown = path.display().to_string();
    let measured = agent_blocking::spawn_blocking(move || digest(&path)).await;
    measured.map_err(io::Error::other).flatten().unwrap_or_else(|error| {
        warn!(path = shown, %error, "cannot read log");
        Digest::EMPTY
    })
}

/// The final length of a job's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogEnd {
    /// From its writer's exit record, or all of it is here and was measured.
    Proven(Digest),
    /// Its writer was lost: the known length; the controller may have more.
    Unproven(u64),
}

impl LogEnd {
    pub(crate) fn length(self) -> u64 {
        match self {
            LogEnd::Proven(digest) => digest.size,
            LogEnd::Unproven(length) => length,
        }
    }
}

/// The final length of the log of the job in `dir`, after its end.
pub(crate) async fn job_log_end(dir: JobDir) -> LogEnd {
    let shown = dir.path().display().to_string();
    let told = agent_blocking::spawn_blocking(move || log_end(&dir)).await;
    told.map_err(io::Error::other).flatten().unwrap_or_else(|error| {
        warn!(dir = shown, %error, "cannot measure log of job");
        LogEnd::Unproven(0)
    })
}

fn log_end(dir: &JobDir) -> io::Result<LogEnd> {
    let told = |record: &ExitRecord| {
        let hash = record.log_sha256.as_deref();
        hash.and_then(|hash| Digest::from_parts(hash, record.log_bytes).ok())
    };
    let mut log = match Reader::of(dir) {
        Ok(log) => log,
        // It never began, or somebody removed all of it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let record = dir.read_exit().ok().flatten();
            return Ok(LogEnd::Proven(record.as_ref().and_then(told).unwrap_or(Digest::EMPTY)));
        }
        Err(error) => return Err(error),
    };
    let record = match dir.read_exit() {
        Ok(Some(record)) => record,
        // What is in the segments is not less for that.
        Ok(None) => return Ok(LogEnd::Unproven(log.len()?)),
        Err(error) if error.is_damage() => return Ok(LogEnd::Unproven(log.len()?)),
        Err(error) => return Err(io::Error::other(error)),
    };
    let there = log.len()?;
    match told(&record) {
        // A record with a wrong length stops nothing of what there is.
        Some(digest) if digest.size < there => Ok(LogEnd::Unproven(there)),
        Some(digest) => Ok(LogEnd::Proven(digest)),
        // A shim of an earlier release did not measure it.
        None => {
            let (mut hasher, mut buffer) = (Hasher::new(), vec![0; 256 * 1024]);
            loop {
                match log.read_at(hasher.size(), &mut buffer)? {
                    0 => return Ok(LogEnd::Proven(hasher.finish())),
                    length => hasher.update(&buffer[..length]),
                }
            }
        }
    }
}

/// The length of the stream of tracking records, after the end of the job. If its supervisor was lost, the records
/// that it did not take in are taken in here.
pub(crate) async fn tracking_length(dir: JobDir) -> u64 {
    let shown = dir.path().display().to_string();
    let measured = agent_blocking::spawn_blocking(move || {
        let exit = dir.read_exit().ok().flatten();
        if dir.tracking_stream().is_dir() && exit.is_none() {
            Intake::open(&dir, LogPolicy::default())?.take_rest();
        }
        let told = exit.map_or(0, |exit| exit.tracking_bytes);
        match Reader::of_tracking(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && told > 0 => Ok(told), // somebody removed all of it
            there => Ok(there?.len()?.max(told)),
        }
    });
    match measured.await.map_err(io::Error::other).flatten() {
        Ok(length) => length,
        Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
        Err(error) => {
            warn!(dir = shown, %error, "cannot measure tracking records");
            0
        }
    }
}

/// The length of a file in bytes; 0 when there is none, or something else in its place.
pub(crate) fn length(path: &Path) -> u64 {
    path.symlink_metadata().map_or(0, |found| if found.is_file() { found.len() } else { 0 })
}

/// The last bytes of the job's log, enough for a few lines.
pub(crate) async fn tail(dir: JobDir) -> Vec<u8> {
    const BYTES: u64 = 8 * 1024;
    let read = move || -> io::Result<Vec<u8>> {
        let mut log = Reader::of(&dir)?;
        let end = log.len()?;
        let from = end.saturating_sub(BYTES).max(log.start());
        let mut tail = vec![0; usize::try_from(end - from).unwrap_or_default()];
        let count = log.read_at(from, &mut tail)?;
        tail.truncate(count);
        Ok(tail)
    };
    // Without the tail, a fault only has fewer details.
    agent_blocking::blocking_io(read).await.unwrap_or_default()
}

fn digest(path: &Path) -> io::Result<Digest> {
    let mut file = match open_plain(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Digest::EMPTY),
        Err(error) => return Err(error),
    };
    let (mut hasher, mut buffer) = (Hasher::new(), vec![0; 256 * 1024]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            length => hasher.update(&buffer[..length]),
        }
    }
}

#[cfg(test)]
mod tests {
    use agent_cas::Disk;
    use agent_model::job::Output;

    use super::*;

    #[tokio::test]
    async fn test_outputs_logs_named_outputs_and_artifacts_are_stored_together() {
        let temp = tempfile::tempdir().unwrap();
        let dir = JobDir::new(temp.path().join("j.1.0"));
        dir.create().unwrap();
        for (path, text) in [
            ("work/outputs/deep/model", "weights"),
            ("work/outputs/.gitignore", "*"),
            ("work/logs/x.log", "log"),
            ("work/dropped", "dropped"),
            ("out/table/a.csv", "a"),
            ("artifacts/notes/n.txt", "note"),
        ] {
            let path = dir.data().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let job = JobDraft { outputs: [("table".to_owned(), Output::Folder)].into(), ..JobDraft::default() };
        let store = Store::Disk(Disk::open(&temp.path().join("cas")).unwrap());
        let collected = collect(&store, &dir, &job, Vec::new()).await.unwrap();
        let artifacts = collected.artifacts.unwrap();
        let mut paths: Vec<String> = snapshot::list(&store, artifacts.root)
            .await
            .unwrap()
            .into_iter()
            .map(|entry| entry.path)
            .collect();
        paths.sort();
        let expected = [
            "logs/x.log",
            "named-outputs/table/a.csv",
            "notes/n.txt",
            "outputs/.gitignore",
            "outputs/deep/model",
        ];
        assert_eq!(paths, expected);
        assert_eq!(collect(&store, &dir, &job, Vec::new()).await.unwrap(), collected);
    }

    #[tokio::test]
    async fn test_job_that_left_nothing_has_no_artifacts() {
        let temp = tempfile::tempdir().unwrap();
        let dir = JobDir::new(temp.path().join("j.1.0"));
        dir.create().unwrap();
        let store = Store::Disk(Disk::open(&temp.path().join("cas")).unwrap());
        let collected = collect(&store, &dir, &JobDraft::default(), Vec::new()).await.unwrap();
        assert_eq!(collected, Collected::default());
    }

    #[tokio::test]
    async fn test_end_of_a_job_log_is_what_its_writer_says() {
        let temp = tempfile::tempdir().unwrap();
        let dir = JobDir::new(temp.path().join("j.1.0"));
        dir.create().unwrap();
        assert_eq!(job_log_end(dir.clone()).await, LogEnd::Proven(Digest::EMPTY), "it never ran");
        // A shim of the previous release wrote one file and no hash.
        let text = "line\n".repeat(100_000);
        std::fs::write(dir.log(agent_model::Stream::Job), &text).unwrap();
        assert_eq!(tail(dir.clone()).await.len(), 8 * 1024);
        assert_eq!(job_log_end(dir.clone()).await, LogEnd::Unproven(500_000), "its shim was lost");
        let old = r#"{"version":1,"instance":"a","replica":"j.1.0","end":{"exited":{"code":0}},"started_at":null,
            "ended_at":1,"stopped":null,"timed_out":false,"oom":false,"log_bytes":500000,"log_dropped":0,
            "log_error":null,"tracking_bytes":0,"max_rss":0,"cpu_ms":0,"leftovers":0,"unkilled":0}"#;
        std::fs::write(dir.exit(), old).unwrap();
        let whole = agent_cas::digest_of(text.as_bytes());
        assert_eq!(job_log_end(dir.clone()).await, LogEnd::Proven(whole));
        // One of this release: the beginning may be trimmed, as its record has the hash.
        let record =
            old.replace("\"log_dropped\"", &format!("\"log_sha256\":\"{}\",\"log_dropped\"", whole.hex()));
        std::fs::write(dir.exit(), record).unwrap();
        std::fs::create_dir(dir.segments()).unwrap();
        std::fs::write(dir.segments().join("00000000000000499995.seg"), "line\n").unwrap();
        assert_eq!(job_log_end(dir.clone()).await, LogEnd::Proven(whole));
        assert_eq!(tail(dir).await, b"line\n");
    }

    #[tokio::test]
    async fn test_log_is_measured_whole() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("log");
        assert_eq!(measure(path.clone()).await, Digest::EMPTY);
        let text = "line\n".repeat(100_000);
        std::fs::write(&path, &text).unwrap();
        assert_eq!(measure(path).await, agent_cas::digest_of(text.as_bytes()));
    }
}
