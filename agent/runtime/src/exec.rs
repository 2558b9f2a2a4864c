//! Running jobs, which outlive the daemon.
//!
//! A job runs under a shim ([`Local`]): [`Executor::launch`] makes sure it is started exactly once,
//! [`Executor::reattach`] finds out from the job directory alone what became of it, and a [`Running`] follows it.
//!
//! Tests have a second executor, `Fake`, whose shims are tasks. `conformance` tests the promises of both.
//!
//! Hides: how shims are started and recognised, their socket protocol, process groups, reaping.
//!
//! Invariants: no process is identified by its number alone; a command is executed at most once for a job directory;
//! a replica is reported lost only after its remaining processes were killed; dropping a [`Running`] never touches
//! the job.
//!
//! Tasks: one per [`Running`], owned by it, that follows the shim's socket and reaps the shim.

#[cfg(test)]
mod conformance;
mod connection;
mod container;
mod containment;
#[cfg(any(test, feature = "fakes"))]
mod fake;
mod fate;
mod local;
mod note;
mod running;
mod scope;
mod session;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::docker::DockerError;
use agent_shim::cgroup::Groups;
use agent_shim::{ExitRecord, JobDir, Launch, RecordError, WriteError};
use futures_util::future::BoxFuture;

pub use agent_shim::wire::Progress;
pub use container::{ContainerSpec, Containers, SupervisorError};
pub use containment::{Containment, containment, sweep_groups};
#[cfg(any(test, feature = "fakes"))]
pub use fake::Fake;
pub use local::Local;
pub use running::{LimitError, RenewError, Running, StopError, WaitError};
pub use scope::is_stopping;
pub use session::{SessionError, SessionReader, SessionWriter, open_session};

/// Characters reported of a last line.
const MOST_WORDS: usize = 500;

/// The last line of an output, without control characters and cut to a length for messages.
fn last_line(said: &str) -> String {
    let last = said.lines().last().unwrap_or_default().trim();
    last.chars().filter(|c| !c.is_control()).take(MOST_WORDS).collect()
}

/// Starts jobs, finds them again and ends them, by their directories. A job with a [`ContainerSpec`] runs in a
/// container, any other as processes of the machine.
pub trait Executor: std::fmt::Debug + Send + Sync {
    /// Does the slow part, which may have to wait for others, before a command is started in a container; does not
    /// start the command. Changes nothing if it was done already, or if the job has ended or was lost. May be dropped
    /// and repeated.
    fn prepare<'a>(
        &'a self,
        dir: &'a JobDir,
        launch: &'a Launch,
        container_spec: &'a ContainerSpec,
    ) -> BoxFuture<'a, Result<(), LaunchError>>;

    /// Starts the command of a job, or finds that it was started already: a shim that is running is adopted, and an
    /// ended job is a [`Running`] that has ended. Never executes the command twice.
    fn launch<'a>(
        &'a self,
        dir: &'a JobDir,
        launch: &'a Launch,
        container_spec: Option<&'a ContainerSpec>,
    ) -> BoxFuture<'a, Result<Running, LaunchError>>;

    /// What became of a job, according to its directory. If it is lost, its remaining processes are killed first.
    fn reattach<'a>(&'a self, dir: &'a JobDir) -> BoxFuture<'a, Result<Found, ReattachError>>;

    /// The supervisor of a job was stopped or frozen: it does nothing until it is continued.
    fn is_halted(&self, dir: &JobDir) -> bool;

    /// The control groups that count what a job uses; none where it has none, or has ended. Reads files of the kernel.
    fn groups(&self, dir: &JobDir) -> Groups;

    /// Kills a job from outside, together with its supervisor, which does not obey. Returns how many processes there
    /// were, and how many are left.
    fn end<'a>(
        &'a self,
        dir: &'a JobDir,
        within: Duration,
    ) -> BoxFuture<'a, Result<(usize, usize), ReattachError>>;

    /// Removes what exists outside the directory of a job that is over, or that will not be started any more. Does
    /// nothing for a job that runs.
    fn clear<'a>(&'a self, dir: &'a JobDir) -> BoxFuture<'a, Result<(), DockerError>>;
}

/// What became of a job.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one at a time, taken apart at once")]
pub enum Found {
    /// It runs.
    Running(Running),
    /// It ended, or could not be started for a permanent reason.
    Ended(ExitRecord),
    /// It was never started; [`Executor::launch`] may start it.
    NotStarted,
    /// It was started, but how it ended is unknown.
    Lost(Lost),
}

/// What is known of a lost job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// The machine was restarted after its start.
    pub rebooted: bool,
    /// Processes of it that were found and killed.
    pub killed: usize,
    /// Processes of it that could not be killed in time; they may still be there.
    pub left: usize,
    /// Nothing that its processes cannot leave, such as a control group or a container, kept them together.
    pub loose: bool,
    /// Processes next to its supervisor that the kernel has killed for lack of memory since the start.
    pub starved: u64,
    /// Why its container ended, as far as known; only for a job in a container.
    pub why: Option<String>,
    /// What is wrong with the record of its end, if there is one.
    pub damaged: Option<String>,
}

/// Why a job could not be started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum LaunchError {
    #[error("could not look for the job at {}", dir.display())]
    Look { dir: PathBuf, source: ReattachError },
    #[error("the job at {} was started before and then lost", dir.display())]
    Lost { dir: PathBuf, lost: Lost },
    #[error("could not remove {}", path.display())]
    Clean { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("could not start {}", shim.display())]
    Spawn { shim: PathBuf, source: io::Error },
    #[error("the supervisor of {} ended before it was ready, with {status}: {said}", dir.display())]
    Refused { dir: PathBuf, status: std::process::ExitStatus, said: String },
    #[error("the supervisor of {} did not answer for {after:?}", dir.display())]
    Silent { dir: PathBuf, after: Duration },
    #[error("could not talk to the supervisor of {}", dir.display())]
    Talk { dir: PathBuf, source: io::Error },
    #[error(transparent)]
    Engine(#[from] DockerError),
    #[error("the image `{reference}` is not on this machine any more")]
    ImageGone { reference: String, source: DockerError },
    #[error("a container called `{name}` is there already, and not this job's: {id}")]
    NameTaken {
        name: String,
        id: String,
        /// The job directory it belongs to; empty if it is no job's.
        of: String,
    },
    #[error("could not write down which container is that of {}", dir.display())]
    Note { dir: PathBuf, source: io::Error },
    #[error("could not bring the supervisor into a container")]
    Supervisor(#[from] SupervisorError),
    #[error("the container of {} ended with {status} before its supervisor was ready: {said}", dir.display())]
    Unready {
        dir: PathBuf,
        status: i64,
        /// The message of the container or of the engine.
        said: String,
    },
}

impl LaunchError {
    /// The container engine did not answer, or can do nothing now: a later try may succeed.
    pub fn is_engine_away(&self) -> bool {
        const MIDWAY: &[&str] = &["containerd", "context canceled", "shutting down"];
        match self {
            LaunchError::Engine(DockerError::Refused { status, message, .. }) => {
                *status >= 500
                    && MIDWAY.iter().any(|word| message.contains(word))
                    && !message.contains("OCI runtime")
            }
            LaunchError::Engine(error) => error.is_unknown(),
            _ => false,
        }
    }
}

/// Why it is unknown what became of a job.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ReattachError {
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("could not look at the job directory {}", dir.display())]
    Look { dir: PathBuf, source: io::Error },
    #[error("the supervisor of {} did not answer for {after:?}", dir.display())]
    Silent {
        dir: PathBuf,
        after: Duration,
        /// The last attempt's error, if it failed rather than hang.
        source: Option<io::Error>,
    },
}

/// No shim program was found.
#[derive(Debug, thiserror::Error)]
#[error("`{SHIM}` is neither beside this program nor in the search path")]
pub struct FindShimError;

const SHIM: &str = "agent-shim";

/// The shim's program: next to the running program, else in `search_path` (directories separated by colons).
pub fn find_shim(search_path: &str) -> Result<PathBuf, FindShimError> {
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    let listed = std::env::split_paths(search_path).filter(|dir| dir.is_absolute());
    beside
        .into_iter()
        .chain(listed)
        .map(|dir| dir.join(SHIM))
        .find(|path| is_program(path))
        .ok_or(FindShimError)
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests;
