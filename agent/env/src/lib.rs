//! The protocol between the daemon and the engine: the program that fetches data, uploads outputs, and builds conda
//! environments.
//!
//! `agent-env` is a program of its own, so that it can be killed: it reads one [`EngineRequest`] from its standard
//! input, writes each [`EngineEvent`] as a line of JSON to its standard output, and ends. The last event is the
//! outcome. Its standard error is for people.
//!
//! Invariants: a build names the file of its credentials; a fetch and an upload hold the credentials of their one
//! store, which are printed by no [`fmt::Debug`]. After the engine was killed at any moment, the same request can still
//! succeed later.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Increased when an older engine would misunderstand a request.
pub const VERSION: u32 = 2;

/// What the engine is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineRequest {
    /// [`VERSION`] of the caller.
    pub version: u32,
    /// The rest.
    pub task: Task,
}

/// One task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Task {
    /// Report what this machine offers to packages. Answered by [`EngineEvent::Probed`].
    Probe,
    /// Build an environment. Answered by [`EngineEvent::Built`].
    Build(Box<Build>),
    /// Run the activation scripts of an environment that was built: code of its packages, so this is no task for a
    /// process that may more than who uses the environment. Answered by [`EngineEvent::Activated`].
    Activate {
        /// Where the environment is.
        prefix: PathBuf,
    },
    /// Remove packages that no environment needs from the package cache. Answered by [`EngineEvent::Swept`].
    Sweep(Sweep),
    /// Fetch data, unless it is known already. Answered by [`EngineEvent::Fetched`].
    Fetch(Box<Fetch>),
    /// Send files to a store. Answered by [`EngineEvent::Uploaded`].
    Upload(Box<StoreUpload>),
}

/// Data to fetch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    /// The address, without credentials.
    pub url: String,
    /// It is one file; otherwise all files below the address.
    pub is_file: bool,
    /// The settings of the store, credentials among them, by the names that `object_store` gives them.
    pub options: Options,
    /// Where: an absolute path, empty or left by an unfinished fetch of the same address. The data is in
    /// [`Fetch::DATA`] there, beside what is needed to go on after an interruption.
    pub to: PathBuf,
    /// The version that is there already; if the data still has it, nothing is fetched.
    pub known: Option<String>,
    /// A download without progress for this long, in seconds, is begun again where it stopped.
    pub stall_s: u64,
}

impl Fetch {
    /// The folder with the data: a file has its own name in it.
    pub const DATA: &str = "data";
}

/// The settings of a store.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Options(pub BTreeMap<String, String>);

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.keys()).finish()
    }
}

/// Data that was fetched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetched {
    /// False if it still has the version that was known; then nothing was fetched.
    pub is_new: bool,
    /// Its version; `None` if the server gives none, so that it is fetched anew each time.
    pub version: Option<String>,
    /// How many files it has.
    pub files: u64,
    /// Their length together.
    pub bytes: u64,
}

/// Files to send to a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreUpload {
    /// A directory of this machine: an absolute path. What is below may have been put there by anybody.
    pub base: PathBuf,
    /// The folder with the files, relative to `base`. No link on the way is followed.
    pub folder: PathBuf,
    /// This file of the folder alone, which gets exactly the address; otherwise all files, each below the address.
    pub file: Option<String>,
    /// Where to.
    pub to: UploadTarget,
    /// A file that notes what has arrived: a repetition of the same request goes on from there.
    pub notes: PathBuf,
    /// A request without an answer for this long, in seconds, is repeated.
    pub stall_s: u64,
}

/// Where files are sent to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum UploadTarget {
    /// A store of objects.
    Store {
        /// An address, without credentials.
        url: String,
        /// The path below it, not escaped; empty for the address itself.
        path: String,
        /// The settings of the store, credentials among them, by the names that `object_store` gives them.
        options: Options,
    },
    /// A directory of this machine, which may be a share.
    Folder {
        /// The directory: an absolute path. No link below it is followed.
        root: PathBuf,
        /// The path below it; empty for the directory itself.
        path: String,
        /// The user and the group that are to own what is made there, where that is allowed.
        owner: Option<(u32, u32)>,
    },
}

/// Files that were sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uploaded {
    /// How many, with those that had arrived before.
    pub files: u64,
    /// Their length together.
    pub bytes: u64,
    /// What is no file and was left out, with the reason.
    pub left_out: Vec<String>,
}

/// An environment to build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// Where: an absolute path; empty or absent, or left by an unfinished build. It stays there.
    pub prefix: PathBuf,
    /// The package cache, shared by all builds; on the same file system as the prefix, or every file is copied.
    pub cache: PathBuf,
    /// The channels, best first.
    pub channels: Vec<Channel>,
    /// The wanted packages. Ignored when there is a lock.
    pub specs: Vec<Spec>,
    /// The exact packages: the text of an explicit list, see `agent_jobfile::condafile`.
    pub lock: Option<String>,
    /// How channels are preferred.
    pub priority: Priority,
    /// Use only what is in the cache, and not the network.
    pub offline: bool,
    /// What packages may rely on, as reported by [`EngineEvent::Probed`] or as configured.
    pub platform: Platform,
    /// The credentials file, in the format that conda's newer tools share: a JSON object of host names, each with
    /// `BearerToken`, `CondaToken` or `BasicHTTP {username, password}`.
    pub credentials: Option<PathBuf>,
    /// How long solving may take, in seconds.
    pub solve_within_s: u64,
    /// A download without progress for this long, in seconds, is restarted, and given up after some tries.
    pub stall_s: u64,
    /// Whether its files may be hard links of those in the package cache: only where no job can write them, or a job
    /// would change the files of other environments. Where the file system can share blocks, that is done instead;
    /// otherwise files are copied.
    #[serde(default)]
    pub hard_links: bool,
    /// Of this machine it reads only what everybody may read: whoever asks for it may be another user than this process.
    #[serde(default)]
    pub for_everybody: bool,
}

/// A source of packages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channel {
    /// Its name in a specification, as in `conda-forge::numpy`.
    pub name: String,
    /// Its address, without credentials. The environment is recorded as coming from here.
    pub url: String,
    /// Mirrors to fetch its files from instead, in this order; none for the address itself.
    pub mirrors: Vec<String>,
}

/// One specification of wanted packages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// For example `conda-forge::numpy >=1.26`.
    pub text: String,
    /// Its line in the user's file; 0 if it is not from there.
    pub line: usize,
}

/// Whether channels after the first that has a package are considered for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// They are not.
    #[default]
    Strict,
    /// They are.
    Flexible,
}

/// What a machine offers to packages.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Platform {
    /// The platform of packages, for example `linux-64`.
    pub subdir: String,
    /// The virtual packages, for example `__glibc=2.36=0`, sorted.
    pub virtual_packages: Vec<String>,
}

/// What to remove from the package cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sweep {
    /// The package cache.
    pub cache: PathBuf,
    /// Packages that no environment shares and that were unused for this long, in seconds, are removed; remains of
    /// killed builds always are.
    pub unused_for_s: u64,
}

/// A message of the engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum EngineEvent {
    /// How far the build is.
    Progress(Progress),
    /// A line for the build log.
    Say {
        /// The line.
        line: String,
    },
    /// The environment is built, but for its marker and its pip part.
    Built(Built),
    /// The activation scripts have run.
    Activated(Activation),
    /// What the machine offers.
    Probed(Platform),
    /// The cache was swept.
    Swept {
        /// Bytes that were freed.
        freed: u64,
    },
    /// The data is there.
    Fetched(Fetched),
    /// The files have arrived.
    Uploaded(Uploaded),
    /// The task failed.
    Failed(Failure),
}

/// The phases of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Waiting for something that others hold.
    Waiting,
    /// Fetching the package lists of channels.
    Repodata,
    /// Choosing packages.
    Solve,
    /// Fetching packages.
    Download,
    /// Linking packages into the environment.
    Link,
    /// Installing packages of pip.
    Pip,
    /// Checking the result.
    Check,
    /// Fetching the layers of an image.
    Pull,
    /// Building an image.
    Image,
    /// Fetching data that a job reads.
    Data,
    /// Sending what a job left.
    Upload,
}

/// How far a build is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The current phase.
    pub phase: Phase,
    /// How many of [`Progress::total`] things are done.
    pub done: u64,
    /// How many there are; 0 while unknown.
    pub total: u64,
    /// How many of [`Progress::bytes_total`] bytes are done.
    pub bytes: u64,
    /// How many there are; 0 while unknown, or where bytes are not counted.
    pub bytes_total: u64,
    /// What is being worked on, for example the name of a package.
    pub what: String,
}

impl Progress {
    /// Progress without counts.
    pub fn of(phase: Phase, what: impl Into<String>) -> Progress {
        Progress { phase, done: 0, total: 0, bytes: 0, bytes_total: 0, what: what.into() }
    }
}

/// An environment that was built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Built {
    /// The version of its Python; `None` when it has none.
    pub python_version: Option<String>,
    /// What activating it does, as far as that takes no script.
    #[serde(flatten)]
    pub activation: Activation,
    /// It has activation scripts, which were not run: see [`Task::Activate`].
    #[serde(default)]
    pub has_scripts: bool,
    /// The explicit list that makes the same environment again.
    pub lock: String,
    /// How many packages it has.
    pub packages: u32,
    /// How many files were linked.
    pub files: u64,
}

/// What activating an environment does.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Activation {
    /// The variables that it sets, besides `PATH`.
    pub vars: BTreeMap<String, String>,
    /// The directories that it puts first on `PATH`.
    pub path_entries: Vec<PathBuf>,
}

/// Why a task failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind of failure.
    pub kind: FailureKind,
    /// What happened, in one or more lines, nearest cause first.
    pub message: String,
    /// The lines ([`Spec::line`]) that caused it, as far as known.
    pub lines: Vec<usize>,
    /// What to do about it, if there is something specific.
    pub hint: Option<String>,
}

/// The kinds of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The request cannot be understood.
    Spec,
    /// A channel, or a package of a lock, does not exist.
    NotFound,
    /// No choice of packages satisfies everything.
    Unsatisfiable,
    /// The network, or a server, does not work; it may work later.
    Network,
    /// A server wants other credentials.
    Denied,
    /// The data received is not the data announced.
    Damaged,
    /// The disk is full.
    DiskFull,
    /// A package must not be installed.
    Refused,
    /// Solving took too long.
    TooLong,
    /// Anything else.
    Other,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Phase::Waiting => "waiting",
            Phase::Repodata => "reading what channels offer",
            Phase::Solve => "choosing packages",
            Phase::Download => "downloading packages",
            Phase::Link => "linking packages",
            Phase::Pip => "installing pip packages",
            Phase::Check => "checking the environment",
            Phase::Pull => "pulling the image",
            Phase::Image => "building the image",
            Phase::Data => "downloading data",
            Phase::Upload => "uploading outputs",
        })
    }
}
