//! Running commands: jobs that outlive the daemon, and short children that must not.
//!
//! Owns every process start of the daemon. A job runs under a shim ([`Process`]): [`Executor::launch`] makes
//! sure it is started exactly once, [`Executor::reattach`] says from the job directory alone what became of
//! it, and a [`Running`] follows it. A short child ([`Command`]) is killed with its whole group as soon as
//! nobody waits for it.
//!
//! Hides: how shims are started and recognised, their socket protocol, process groups, reaping.
//!
//! Invariants: no process is identified by its number alone; a command is executed at most once for a job
//! directory; a replica is called lost only after what was left of it has been killed; dropping a
//! [`Running`] never touches the job.
//!
//! Tasks: one per [`Running`], owned by it, that follows the shim's socket and reaps the shim. Callers: the
//! runner of `agentd`, and the environment builders next door.

mod command;
mod connection;
mod containment;
mod process;
mod running;
mod scope;

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_shim::{ExitRecord, JobDir, Launch, RecordError, WriteError};

pub use agent_shim::wire::Progress;
pub use command::{Command, CommandError, Output};
pub use containment::{Containment, containment, sweep_groups};
pub use process::Process;
pub use running::{RenewError, Running, StopError, WaitError};

/// Starts jobs and finds them again.
pub trait Executor: Send + Sync + 'static {
    /// Starts the command of a job, or finds that it is started already: a shim that stands there is
    /// adopted, an ended job is a [`Running`] that has ended. Never executes the command twice.
    fn launch(
        &self,
        dir: &JobDir,
        launch: &Launch,
    ) -> impl Future<Output = Result<Running, LaunchError>> + Send;

    /// What became of a job, told by its directory. Of a job that is lost, whatever is left is killed first.
    fn reattach(&self, dir: &JobDir) -> impl Future<Output = Result<Found, ReattachError>> + Send;
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost {
    /// The machine was restarted since it was started.
    pub rebooted: bool,
    /// Processes of it that were found and killed.
    pub killed: usize,
    /// Processes of it that could not be killed in time; they may still be there.
    pub left: usize,
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
