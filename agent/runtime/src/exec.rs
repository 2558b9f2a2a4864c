//! Running commands: jobs that outlive the daemon, and short children that must not.
//!
//! Owns every process start of the daemon. A job runs under a shim ([`Local`]): [`Executor::launch`] makes
//! sure it is started exactly once, [`Executor::reattach`] says from the job directory alone what became of
//! it, and a [`Running`] follows it. A short child ([`Command`]) is killed with its whole group as soon as
//! nobody waits for it.
//!
//! Tests have a second executor, `Fake`, whose shims are tasks. What both promise is `conformance`.
//!
//! Hides: how shims are started and recognised, their socket protocol, process groups, reaping.
//!
//! Invariants: no process is identified by its number alone; a command is executed at most once for a job
//! directory; a replica is called lost only after what was left of it has been killed; dropping a
//! [`Running`] never touches the job.
//!
//! Tasks: one per [`Running`], owned by it, that follows the shim's socket and reaps the shim.

mod child;
mod command;
#[cfg(test)]
mod conformance;
mod connection;
mod container;
mod containment;
#[cfg(any(test, feature = "fakes"))]
mod fake;
mod local;
mod memory_group;
mod process;
mod running;
mod scope;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::docker::DockerError;
use agent_shim::{ExitRecord, JobDir, Launch, RecordError, WriteError};
use futures_util::future::BoxFuture;
use nix::errno::Errno;

pub use agent_shim::wire::Progress;
pub use command::{Command, CommandError, CommandOutput, Leash};
pub use container::{ContainerSpec, Containers, SupervisorError, own_user};
pub use containment::{Containment, containment, sweep_groups};
#[cfg(any(test, feature = "fakes"))]
pub use fake::Fake;
pub use local::Local;
pub(crate) use memory_group::MemoryGroup;
pub use running::{RenewError, Running, StopError, WaitError};
pub use scope::is_stopping;

/// A lack of descriptors, processes or memory: others may give them back in a moment.
pub fn is_lack(error: &io::Error) -> bool {
    const LACKS: [Errno; 4] = [Errno::EMFILE, Errno::ENFILE, Errno::EAGAIN, Errno::ENOMEM];
    error.raw_os_error().is_some_and(|errno| LACKS.contains(&Errno::from_raw(errno)))
}

/// A program says that it lacked one of these, in what it printed.
pub fn says_lack(text: &str) -> bool {
    // The words of the C library, of Go and of Python, and the numbers as programs in Rust say them.
    let words = [
        "esource temporarily unavailable",
        "oo many open files",
        "annot allocate memory",
        "start new thread",
    ];
    let numbers = ["(os error 11)", "(os error 12)", "(os error 23)", "(os error 24)"];
    words.iter().chain(&numbers).any(|sign| text.contains(sign))
}

/// Starts jobs, finds them again and ends them, by their directories. A job that has a [`ContainerSpec`] runs in a
/// container, any other as processes of the machine.
pub trait Executor: std::fmt::Debug + Send + Sync {
    /// Does what takes long and may have to wait for others before a command is started in a container; the command is
    /// not. Changes nothing where it was done already, and where the job has ended or was lost. May be dropped, and
    /// done again.
    fn prepare<'a>(
        &'a self,
        dir: &'a JobDir,
        launch: &'a Launch,
        container_spec: &'a ContainerSpec,
    ) -> BoxFuture<'a, Result<(), LaunchError>>;

    /// Starts the command of a job, or finds that it is started already: a shim that stands there is
    /// adopted, an ended job is a [`Running`] that has ended. Never executes the command twice.
    fn launch<'a>(
        &'a self,
        dir: &'a JobDir,
        launch: &'a Launch,
        container_spec: Option<&'a ContainerSpec>,
    ) -> BoxFuture<'a, Result<Running, LaunchError>>;

    /// What became of a job, told by its directory. Of a job that is lost, whatever is left is killed first.
    fn reattach<'a>(&'a self, dir: &'a JobDir) -> BoxFuture<'a, Result<Found, ReattachError>>;

    /// Somebody stopped the supervisor of a job, or froze it: it does nothing until it is let go on.
    fn is_halted(&self, dir: &JobDir) -> bool;

    /// Ends a job from outside, its supervisor with it, which does not do what it was told. Returns how many processes
    /// of it there were, and how many are left.
    fn end<'a>(
        &'a self,
        dir: &'a JobDir,
        within: Duration,
    ) -> BoxFuture<'a, Result<(usize, usize), ReattachError>>;

    /// Removes what is left beyond its directory of a job that is over, or that nobody will start any more. There is
    /// nothing to do for a job that runs.
    fn clear<'a>(&'a self, dir: &'a JobDir) -> BoxFuture<'a, Result<(), DockerError>>;
}

/// What became of a job.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one at a time, taken apart at once")]
pub enum Found {
    /// It runs.
    Running(Running),
    /// It ended, or could not be started for a reason that will not go away.
    Ended(ExitRecord),
    /// It was never started; [`Executor::launch`] may start it.
    NotStarted,
    /// It was started, and nobody knows how it ended.
    Lost(Lost),
}

/// What is known of a lost job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// The machine was restarted since it was started.
    pub rebooted: bool,
    /// Processes of it that were found and killed.
    pub killed: usize,
    /// Processes of it that could not be killed in time; they may still be there.
    pub left: usize,
    /// Nothing kept its processes together that they cannot leave, as control groups and containers do.
    pub loose: bool,
    /// Processes beside its supervisor that the kernel has ended for want of memory since the start.
    pub starved: u64,
    /// Why its container ended, as far as that can be told; of a job that had one.
    pub why: Option<String>,
}

/// Why a job could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// What is there already could not be told.
    #[error("could not look for the job at {}", dir.display())]
    Look {
        /// The job directory.
        dir: PathBuf,
        /// Why not.
        #[source]
        source: ReattachError,
    },
    /// The command was started before, and nobody knows how it ended.
    #[error("the job at {} was started before and then lost", dir.display())]
    Lost {
        /// The job directory.
        dir: PathBuf,
        /// What is known of it.
        lost: Lost,
    },
    /// The old exit record of a shim that was never told to go could not be removed.
    #[error("could not remove {}", path.display())]
    Clean {
        /// The record.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The launch record could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The shim could not be started.
    #[error("could not start {}", shim.display())]
    Spawn {
        /// The shim's program.
        shim: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The shim ended before it was ready; its `shim.log` says why.
    #[error("the supervisor of {} ended before it was ready, with {status}: {said}", dir.display())]
    Refused {
        /// The job directory.
        dir: PathBuf,
        /// How it ended.
        status: std::process::ExitStatus,
        /// The last line of its log.
        said: String,
    },
    /// The shim did not get ready, or did not answer, in time.
    #[error("the supervisor of {} did not answer for {after:?}", dir.display())]
    Silent {
        /// The job directory.
        dir: PathBuf,
        /// How long it was waited for.
        after: Duration,
    },
    /// The conversation with the shim failed.
    #[error("could not talk to the supervisor of {}", dir.display())]
    Talk {
        /// The job directory.
        dir: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The container engine did not do its part.
    #[error(transparent)]
    Engine(#[from] DockerError),
    /// The image is not there any more.
    #[error("the image `{reference}` is not on this machine any more")]
    ImageGone {
        /// What it is called.
        reference: String,
        /// What the engine says.
        #[source]
        source: DockerError,
    },
    /// Somebody else has a container of the name.
    #[error("a container called `{name}` is there already, and not this job's: {id}")]
    NameTaken {
        /// The name.
        name: String,
        /// The engine's own name for the one that is there.
        id: String,
        /// The job directory it is of; empty for one that is no job's.
        of: String,
    },
    /// Which container it is could not be written down.
    #[error("could not write down which container is that of {}", dir.display())]
    Note {
        /// The job directory.
        dir: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The shim cannot be brought into a container.
    #[error("could not bring the supervisor into a container")]
    Supervisor(#[from] SupervisorError),
    /// The container ended before the shim in it was ready.
    #[error("the container of {} ended with {status} before its supervisor was ready: {said}", dir.display())]
    Unready {
        /// The job directory.
        dir: PathBuf,
        /// How it ended.
        status: i64,
        /// What it, or the engine, says.
        said: String,
    },
}

impl LaunchError {
    /// The container engine did not answer, or cannot do anything now: another try, later, may succeed.
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

/// Why it cannot be told what became of a job.
#[derive(Debug, thiserror::Error)]
pub enum ReattachError {
    /// A record of the job directory is unusable.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Whether a shim stands there cannot be seen.
    #[error("could not look at the job directory {}", dir.display())]
    Look {
        /// The job directory.
        dir: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// A shim stands there but does not answer.
    #[error("the supervisor of {} did not answer for {after:?}", dir.display())]
    Silent {
        /// The job directory.
        dir: PathBuf,
        /// How long it was waited for.
        after: Duration,
        /// The last attempt's error, if it failed rather than hang.
        #[source]
        source: Option<io::Error>,
    },
}

/// No shim program was found.
#[derive(Debug, thiserror::Error)]
#[error("`{SHIM}` is neither beside this program nor in the search path")]
pub struct FindShimError;

const SHIM: &str = "agent-shim";

/// The shim's program: beside the running program, else in `search_path` (directories separated by colons).
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
