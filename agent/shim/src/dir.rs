//! The directory of one replica: where each file is, how records are read and written, and whether a shim
//! is running for it.
//!
//! ```text
//! jobs/train.1.0/        control: what the daemon and the shim trust; nobody else can write there, or list it
//! jobs/train.1.0/job/    data: what the job may change as it likes, and all of it that its container sees
//! ```
//!
//! Earlier releases had both in one. Such a directory, if something was started in it, stays so until it is removed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use agent_model::{ReplicaId, Stream, failpoint};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, Flock, FlockArg, fcntl};
use nix::libc;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::record::{ExitRecord, Hello, Launch, OfReplica, VERSION};
use crate::sealed::{is_sound, seal};

/// The directory of one replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobDir {
    path: PathBuf,
    data: PathBuf,
}

/// The folder that belongs to the job.
const DATA: &str = "job";

/// The code of the job, in that folder; in the directory itself where an earlier release made it.
const WORK: &str = "work";

/// More than any record takes, in bytes: a larger file is no record.
const LARGEST: u64 = 4 << 20;

/// Why a job directory could not be made.
#[derive(Debug, thiserror::Error)]
#[error("could not create the directory {}", path.display())]
pub struct CreateError {
    /// The directory.
    pub path: PathBuf,
    /// The system's error.
    source: io::Error,
}

/// Why a record could not be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum RecordError {
    #[error("could not read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} does not hold a valid record", path.display())]
    Parse { path: PathBuf, source: serde_json::Error },
    #[error("{} {why}", path.display())]
    Unproven { path: PathBuf, why: String },
    #[error("{} has version {found}; this release understands up to {VERSION}", path.display())]
    Version { path: PathBuf, found: u32 },
}

impl RecordError {
    /// There is a file, and nothing in it is known to be true: it is as if there were none.
    pub fn is_damage(&self) -> bool {
        match self {
            RecordError::Parse { .. } | RecordError::Unproven { .. } => true,
            RecordError::Version { .. } => false,
            RecordError::Read { source, .. } => source.kind() == io::ErrorKind::IsADirectory,
        }
    }
}

/// Why a record could not be written.
#[derive(Debug, thiserror::Error)]
#[error("could not write {}", path.display())]
pub struct WriteError {
    /// The file.
    pub path: PathBuf,
    /// The system's error.
    source: io::Error,
}

impl JobDir {
    /// The job directory at `path`, which need not exist yet.
    pub fn new(path: impl Into<PathBuf>) -> JobDir {
        let path = path.into();
        let dir = JobDir { data: path.join(DATA), path };
        let is_former = !dir.data.exists()
            && dir.path.join(WORK).exists()
            // Where nothing was started, everything is laid out anew.
            && (dir.is_started() || dir.exit().exists() || dir.has_shim().unwrap_or(true));
        if is_former { JobDir { data: dir.path.clone(), path: dir.path } } else { dir }
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The part of it that is the job's, which may have put anything there.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// An earlier release made it, and the job may have written its records.
    pub fn is_shared(&self) -> bool {
        self.data == self.path
    }

    /// What to run.
    pub fn launch(&self) -> PathBuf {
        self.path.join("launch.json")
    }

    /// Which shim runs for this directory.
    pub fn hello(&self) -> PathBuf {
        self.path.join("hello.json")
    }

    /// Exists from just before the command is executed, for ever.
    pub fn started(&self) -> PathBuf {
        self.path.join("started")
    }

    /// How it ended.
    pub fn exit(&self) -> PathBuf {
        self.path.join("exit.json")
    }

    /// Where the shim listens.
    pub fn socket(&self) -> PathBuf {
        self.path.join("shim.sock")
    }

    /// Messages of the shim, for people; locked for as long as a shim runs, as is the directory itself.
    pub fn shim_log(&self) -> PathBuf {
        self.path.join("shim.log")
    }

    /// Metrics, parameters and tags, one record a line: where the job and the daemon write them.
    pub fn tracking(&self) -> PathBuf {
        self.data.join("tracking.jsonl")
    }

    /// When its machine will be taken away, and why; there once that is known. The daemon writes it.
    pub fn preemption(&self) -> PathBuf {
        self.data.join("preemption.json")
    }

    /// The segments of everything that was ever read of that file, which the job may cut or replace.
    pub fn tracking_stream(&self) -> PathBuf {
        self.log_dir().join("tracking")
    }

    /// The code of the job.
    pub fn work(&self) -> PathBuf {
        self.data.join(WORK)
    }

    /// The directory that its user has as `/tmp`.
    pub fn tmp(&self) -> PathBuf {
        self.data.join("tmp")
    }

    /// Its own layer over its environment.
    pub fn layer(&self) -> PathBuf {
        self.path.join("layer")
    }

    /// Where `pip install --user` installs for it.
    pub fn user_base(&self) -> PathBuf {
        self.data.join("python")
    }

    /// Where it finds the stand-in for `azureml.core`, if it asked for that.
    pub fn stand_in(&self) -> PathBuf {
        self.data.join("azureml")
    }

    /// Where a batch script of Slurm finds the programs that such scripts call.
    pub fn slurm(&self) -> PathBuf {
        self.data.join("slurm")
    }

    /// The home of its user, where that has none: in a container.
    pub fn home(&self) -> PathBuf {
        self.data.join("home")
    }

    /// Its inputs.
    pub fn inputs(&self) -> PathBuf {
        self.data.join("inputs")
    }

    /// Its outputs.
    pub fn out(&self) -> PathBuf {
        self.data.join("out")
    }

    /// Artifacts logged through the tracking endpoint.
    pub fn artifacts(&self) -> PathBuf {
        self.data.join("artifacts")
    }

    /// The folder of the logs.
    pub fn log_dir(&self) -> PathBuf {
        self.path.join("log")
    }

    /// The segments of the job's log.
    pub fn segments(&self) -> PathBuf {
        self.log_dir().join("job")
    }

    /// One log. Only earlier releases wrote the job's log as one file.
    pub fn log(&self, stream: Stream) -> PathBuf {
        self.log_dir().join(stream.file_name())
    }

    /// What it takes of its machine, one interval a line: where the daemon writes it.
    pub fn system(&self) -> PathBuf {
        self.log_dir().join("system.jsonl")
    }

    /// Makes the directory, the job's folder and that of the logs; those that exist are left as they are. Whoever needs
    /// another folder makes it.
    pub fn create(&self) -> Result<(), CreateError> {
        let make = |path: &Path| {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .map_err(|source| CreateError { path: path.to_owned(), source })
        };
        [&self.path, &self.data, &self.log_dir()].into_iter().try_for_each(|path| make(path))
    }

    /// What to run; `None` when nothing was asked for yet.
    pub fn read_launch(&self) -> Result<Option<Launch>, RecordError> {
        self.read(self.launch())
    }

    /// Which shim ran here last; `None` when none ever did.
    pub fn read_hello(&self) -> Result<Option<Hello>, RecordError> {
        self.read(self.hello())
    }

    /// How it ended; `None` while that is not known.
    pub fn read_exit(&self) -> Result<Option<ExitRecord>, RecordError> {
        self.read(self.exit())
    }

    fn read<T: DeserializeOwned + OfReplica>(&self, path: PathBuf) -> Result<Option<T>, RecordError> {
        let Some(record) = read::<T>(&path)? else { return Ok(None) };
        let own = self.path.file_name().and_then(|name| name.to_str()?.parse::<ReplicaId>().ok());
        match own.filter(|own| own != record.replica()) {
            None => Ok(Some(record)),
            Some(_) => {
                let why = format!("is a record of {}", record.replica());
                Err(RecordError::Unproven { path, why })
            }
        }
    }

    /// Records what to run. Whole or not at all, but not durable: after a power cut there is no shim that
    /// could have read it, and the program that starts one writes it again.
    pub fn write_launch(&self, launch: &Launch) -> Result<(), WriteError> {
        write_whole("shim.launch.write", &self.launch(), launch)
    }

    /// Records which shim runs here. Whole or not at all; of no use in another boot, so not durable.
    pub fn write_hello(&self, hello: &Hello) -> Result<(), WriteError> {
        write_whole("shim.hello.write", &self.hello(), hello)
    }

    /// The command was executed, or was about to be. From here on it may never be started again.
    pub fn is_started(&self) -> bool {
        // An unreadable directory must not look like permission to start.
        self.started().try_exists().unwrap_or(true)
    }

    /// Makes the mark of [`is_started`](Self::is_started). Fails when it exists. It is not forced to the disk: after a
    /// power cut nothing is started, whatever there is of the mark, since the machine has another boot id.
    pub fn mark_started(&self, instance: &str) -> io::Result<()> {
        failpoint::hit("shim.started.write")?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.started())?;
        file.write_all(instance.as_bytes())?;
        failpoint::hit("shim.started.written")
    }

    /// Makes creations and renames in the directory durable.
    pub fn sync(&self) -> io::Result<()> {
        failpoint::hit("shim.dir.sync")?;
        agent_fs::flush_directory(&self.path)
    }

    /// Takes the lock of the shim; `None` when another one has it. Held until the place is dropped, which
    /// the kernel does however the process ends.
    pub fn take_place(&self) -> io::Result<Option<ShimPlace>> {
        let mut options = OpenOptions::new();
        let log =
            options.append(true).create(true).mode(0o600).custom_flags(NO_WAIT).open(self.shim_log())?;
        match fcntl(&log, FcntlArg::F_OFD_SETLK(&whole_file())) {
            Ok(_) => {}
            Err(Errno::EAGAIN | Errno::EACCES) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        // A check holds it for a moment; a shim whose log was removed holds it as long as it runs.
        for _ in 0..LOOKS {
            match Flock::lock(File::open(&self.path)?, FlockArg::LockExclusiveNonblock) {
                Ok(dir) => return Ok(Some(ShimPlace { log, _dir: Some(dir) })),
                Err((_, Errno::EAGAIN)) => thread::sleep(LOOK),
                Err(_) => return Ok(Some(ShimPlace { log, _dir: None })), // a file system that locks no directory
            }
        }
        Ok(None)
    }

    /// Whether a shim runs here now. The check never keeps a shim from taking its lock. A missing file proves
    /// nothing: the lock of the directory lasts as long as the shim.
    pub fn has_shim(&self) -> io::Result<bool> {
        let dir = match File::open(&self.path) {
            Ok(dir) => dir,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        if let Err((_, Errno::EAGAIN)) = Flock::lock(dir, FlockArg::LockSharedNonblock) {
            return Ok(true);
        }
        // Shims of earlier releases lock their log alone.
        let log = OpenOptions::new().read(true).custom_flags(NO_WAIT).open(self.shim_log());
        let file = match log {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let mut lock = whole_file();
        match fcntl(&file, FcntlArg::F_OFD_GETLK(&mut lock)) {
            Ok(_) => Ok(lock.l_type != libc::F_UNLCK as libc::c_short),
            Err(Errno::EINVAL | Errno::EISDIR) => Ok(false), // a directory in its place, which nobody locks
            Err(error) => Err(error.into()),
        }
    }

    /// Moves a directory that somebody put in the place of a record out of the way; `false` when that fails.
    pub fn clear_way(path: &Path) -> bool {
        !path.is_dir() || fs::rename(path, path.with_added_extension("aside")).is_ok()
    }

    /// The instance for which the command was started, as the mark of the start has it.
    pub fn started_instance(&self) -> Option<String> {
        fs::read_to_string(self.started()).ok().filter(|instance| !instance.is_empty())
    }

    /// A path to the socket short enough for a socket address, however long the directory's path is. It is
    /// valid while the returned descriptor is open.
    pub fn short_socket_path(&self) -> io::Result<(File, PathBuf)> {
        let dir = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC)
            .open(&self.path)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}/shim.sock", dir.as_raw_fd()));
        Ok((dir, path))
    }
}

/// Opens whatever stands in the place of a file without waiting: a pipe that nobody has open would be waited for.
const NO_WAIT: libc::c_int = libc::O_NONBLOCK;

/// The lock of a shim, for as long as it runs.
#[derive(Debug)]
pub struct ShimPlace {
    /// Its open log, for its messages.
    pub log: File,
    _dir: Option<Flock<File>>,
}

/// How often, and with which pauses, the lock of a directory is tried.
const LOOKS: u32 = 100;
const LOOK: Duration = Duration::from_millis(10);

fn whole_file() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, RecordError> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        version: u32,
    }
    let at = || path.to_owned();
    let text = match agent_fs::read_plain(path, LARGEST) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(RecordError::Read { path: at(), source }),
    };
    if !is_sound(&text) {
        let why = "is not as it was written: its checksum does not match".to_owned();
        return Err(RecordError::Unproven { path: at(), why });
    }
    match serde_json::from_slice::<Versioned>(&text) {
        Ok(Versioned { version }) if version > VERSION => {
            return Err(RecordError::Version { path: at(), found: version });
        }
        Ok(_) => {}
        Err(source) => return Err(RecordError::Parse { path: at(), source }),
    }
    serde_json::from_slice(&text).map(Some).map_err(|source| RecordError::Parse { path: at(), source })
}

fn write_whole(point: &'static str, path: &Path, record: &impl Serialize) -> Result<(), WriteError> {
    let attempt = || {
        failpoint::hit(point)?;
        let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(&seal(record)?)?;
        fs::rename(&temporary, path)
    };
    attempt().map_err(|source| WriteError { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job_dir() -> (tempfile::TempDir, JobDir) {
        let temporary = tempfile::tempdir().unwrap();
        let dir = JobDir::new(temporary.path().join("train.1.0"));
        dir.create().unwrap();
        (temporary, dir)
    }

    #[test]
    fn test_place_is_held_once_and_freed_on_close() {
        let (_temporary, dir) = job_dir();
        assert!(!dir.has_shim().unwrap());
        let place = dir.take_place().unwrap().unwrap();
        assert!(dir.has_shim().unwrap());
        assert!(dir.take_place().unwrap().is_none());
        for harm in [fs::remove_file, |log: PathBuf| fs::create_dir(log)] {
            harm(dir.shim_log()).unwrap();
            assert!(dir.has_shim().unwrap(), "a missing file is not a death");
        }
        fs::remove_dir(dir.shim_log()).unwrap();
        assert!(dir.take_place().unwrap().is_none(), "nor is a new one a place");
        drop(place);
        assert!(!dir.has_shim().unwrap());
        fs::remove_file(dir.shim_log()).unwrap();
        nix::unistd::mkfifo(&dir.shim_log(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(!dir.has_shim().unwrap(), "a pipe is not waited for");
        assert!(dir.take_place().is_err(), "nor are messages written to one that nobody reads");
    }

    #[test]
    fn test_directory_of_an_earlier_release_stays_as_it_is_once_something_was_started() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("train.1.0");
        fs::create_dir_all(path.join("work")).unwrap();
        assert_eq!(JobDir::new(&path).work(), path.join("job/work"), "it is laid out anew");
        for mark in ["started", "exit.json"] {
            fs::write(path.join(mark), "i").unwrap();
            let dir = JobDir::new(&path);
            assert!(
                dir.is_shared() && dir.work() == path.join("work") && dir.tracking().parent() == Some(&path)
            );
            fs::remove_file(path.join(mark)).unwrap();
        }
        let place = JobDir::new(&path).take_place().unwrap();
        assert!(JobDir::new(&path).is_shared(), "a shim stands there");
        drop(place);
        JobDir::new(&path).create().unwrap();
        fs::write(path.join("started"), "i").unwrap();
        assert!(!JobDir::new(&path).is_shared());
    }

    #[test]
    fn test_record_is_no_link_and_no_pipe() {
        let (temporary, dir) = job_dir();
        let other = temporary.path().join("other");
        fs::write(&other, "{}").unwrap();
        std::os::unix::fs::symlink(&other, dir.exit()).unwrap();
        assert!(matches!(dir.read_exit(), Err(RecordError::Read { .. })));
        nix::unistd::mkfifo(&dir.hello(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(matches!(dir.read_hello(), Err(RecordError::Read { .. })));
    }

    #[test]
    fn test_record_that_does_not_prove_itself_is_damage() {
        let (temporary, dir) = job_dir();
        let hello = |replica: &str| Hello {
            version: VERSION,
            instance: "i".into(),
            replica: replica.parse().unwrap(),
            pid: 7,
            boot_id: "b".into(),
            at: agent_model::Timestamp(5),
            containment: String::new(),
            groups: Vec::new(),
            container: false,
            kills: None,
        };
        dir.write_hello(&hello("train.1.0")).unwrap();
        assert_eq!(dir.read_hello().unwrap().unwrap(), hello("train.1.0"));
        let text = fs::read_to_string(dir.hello()).unwrap();
        fs::write(dir.hello(), text.replace("\"pid\":7", "\"pid\":8")).unwrap();
        let error = dir.read_hello().unwrap_err();
        assert!(error.is_damage() && error.to_string().contains("checksum"), "{error}");
        // Of the release before, and of another job.
        fs::write(dir.hello(), serde_json::to_vec(&hello("train.1.0")).unwrap()).unwrap();
        assert!(dir.read_hello().unwrap().is_some());
        let other = JobDir::new(temporary.path().join("other.1.0"));
        other.create().unwrap();
        other.write_hello(&hello("other.1.0")).unwrap();
        fs::copy(other.hello(), dir.hello()).unwrap();
        let error = dir.read_hello().unwrap_err();
        assert!(error.is_damage() && error.to_string().contains("is a record of other.1.0"), "{error}");
    }

    #[test]
    fn test_started_is_marked_once() {
        let (_temporary, dir) = job_dir();
        assert!(!dir.is_started());
        dir.mark_started("a").unwrap();
        assert!(dir.is_started());
        assert_eq!(dir.mark_started("b").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn test_record_that_is_missing_broken_or_newer() {
        let (_temporary, dir) = job_dir();
        assert!(dir.read_hello().unwrap().is_none());
        fs::write(dir.hello(), "{").unwrap();
        assert!(matches!(dir.read_hello(), Err(RecordError::Parse { .. })));
        fs::write(dir.hello(), r#"{"version": 3}"#).unwrap();
        assert!(matches!(dir.read_hello(), Err(RecordError::Version { found: 3, .. })));
    }
}
