//! What the daemon and the conda engine tell each other.
//!
//! `agent-env` is a program of its own, so that it can be killed: it reads one [`EngineRequest`] from its standard
//! input, writes an [`EngineEvent`] as a line of JSON to its standard output whenever there is something to tell, and
//! ends. The last event says what came of it. What it writes to its standard error is for people.
//!
//! Invariants: a request holds no secret, only where secrets are kept; whatever moment the engine is killed at,
//! the same request succeeds later.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Grows when an older engine would misunderstand a request.
pub const VERSION: u32 = 1;

/// What the engine is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineRequest {
    /// [`VERSION`] of whoever asks.
    pub version: u32,
    /// The rest.
    pub task: Task,
}

/// One task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Task {
    /// Say what this machine offers to packages. Answered by [`EngineEvent::Probed`].
    Probe,
    /// Make an environment. Answered by [`EngineEvent::Built`].
    Build(Box<Build>),
    /// Remove what no environment needs from the package cache. Answered by [`EngineEvent::Swept`].
    Sweep(Sweep),
}

/// An environment to make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// Where: an absolute directory that exists and is empty. It stays there.
    pub prefix: PathBuf,
    /// The package cache, shared by all builds; on the same file system as the prefix, or every file is copied.
    pub cache: PathBuf,
    /// The channels, best first.
    pub channels: Vec<Channel>,
    /// What is wanted. Ignored when there is a lock.
    pub specs: Vec<Spec>,
    /// Exactly these packages: the text of an explicit list, see `agent_model::condafile`.
    pub lock: Option<String>,
    /// What a package of a better channel means for the others.
    pub priority: Priority,
    /// Only what is in the cache; the network is not touched.
    pub offline: bool,
    /// What packages may rely on, as [`EngineEvent::Probed`] said it or as somebody decided.
    pub platform: Platform,
    /// The file of credentials, in the form that conda's newer tools share: a JSON object of host names, each
    /// with `BearerToken`, `CondaToken` or `BasicHTTP {username, password}`.
    pub credentials: Option<PathBuf>,
    /// How long solving may take, in seconds.
    pub solve_within_s: u64,
    /// A download that makes no progress for this long is begun anew, and given up after some times, in seconds.
    pub stall_s: u64,
    /// Whether its files may be one with those of the package cache: only where no job can write them, or a job
    /// would change what other environments are made of. Where the file system can share blocks, that is done
    /// instead; otherwise files are copied.
    #[serde(default)]
    pub hard_links: bool,
}

/// Where packages come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channel {
    /// What a specification calls it, as in `conda-forge::numpy`.
    pub name: String,
    /// Its address, without credentials. The environment is recorded as coming from here.
    pub url: String,
    /// Where its files are fetched instead, in this order; none for the address itself.
    pub mirrors: Vec<String>,
}

/// One line of what is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// For example `conda-forge::numpy >=1.26`.
    pub text: String,
    /// Its line in the file of the user; 0 for what nobody wrote.
    pub line: usize,
}

/// What a package of a better channel means for packages of the same name elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// The others are not looked at.
    #[default]
    Strict,
    /// The others are looked at as well.
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
    /// Packages that no environment shares and that were not used for this long are removed, in seconds; what a
    /// killed build left half-made always is.
    pub unused_for_s: u64,
}

/// What the engine has to tell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum EngineEvent {
    /// How far it is.
    Progress(Progress),
    /// A line for the build log.
    Say {
        /// The line.
        line: String,
    },
    /// The environment is made, but for its marker and its pip part.
    Built(Built),
    /// What the machine offers.
    Probed(Platform),
    /// The cache was swept.
    Swept {
        /// Bytes that are free now.
        freed: u64,
    },
    /// It was not done.
    Failed(Failure),
}

/// What a build is busy with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It waits for something that others hold.
    Waiting,
    /// Fetching the lists of what channels offer.
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
}

/// How far a build is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// What it is busy with.
    pub phase: Phase,
    /// How many of [`Progress::total`] things are done.
    pub done: u64,
    /// How many there are; 0 while unknown.
    pub total: u64,
    /// How many of [`Progress::bytes_total`] bytes are done.
    pub bytes: u64,
    /// How many there are; 0 while unknown, or where bytes mean nothing.
    pub bytes_total: u64,
    /// What is being worked on, for example the name of a package.
    pub what: String,
}

impl Progress {
    /// Busy with something of which there are no numbers.
    pub fn of(phase: Phase, what: impl Into<String>) -> Progress {
        Progress { phase, done: 0, total: 0, bytes: 0, bytes_total: 0, what: what.into() }
    }
}

/// A made environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Built {
    /// The version of its Python; `None` when it has none.
    pub python_version: Option<String>,
    /// What activating it sets, besides `PATH`.
    pub vars: BTreeMap<String, String>,
    /// What activating it puts first on `PATH`.
    pub path_entries: Vec<PathBuf>,
    /// The explicit list that makes the same environment again.
    pub lock: String,
    /// How many packages it has.
    pub packages: u32,
    /// How many files were linked.
    pub files: u64,
}

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind of failure it is.
    pub kind: FailureKind,
    /// What happened, in one or more lines, nearest cause first.
    pub message: String,
    /// The lines ([`Spec::line`]) that are at fault, as far as known.
    pub lines: Vec<usize>,
    /// What to do about it, when something particular can be done.
    pub hint: Option<String>,
}

/// The kinds of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// What is wanted cannot be understood.
    Spec,
    /// A channel, or a package of a lock, is not there.
    NotFound,
    /// No choice of packages satisfies everything.
    Unsatisfiable,
    /// The network, or a server, does not work; later it may.
    Network,
    /// A server wants other credentials.
    Denied,
    /// What arrived is not what was announced.
    Damaged,
    /// The disk is full.
    DiskFull,
    /// A package is not one that may be installed.
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
        })
    }
}
