//! Why an environment is not there.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::exec::CommandError;

/// Why environments cannot be kept in a directory.
#[derive(Debug, thiserror::Error)]
#[error("environments cannot be kept in `{}`", path.display())]
pub struct OpenEnvError {
    /// The directory, or the file below it that is in the way.
    pub path: PathBuf,
    /// What the system says.
    #[source]
    pub source: io::Error,
}

/// Why an environment is not there. Everybody who waited for a build gets the same answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AcquireError {
    /// This version does not make it.
    #[error("environments of the kind `{kind}` are not made on this node")]
    Unsupported {
        /// See [`EnvSpec::kind`](agent_model::EnvSpec::kind).
        kind: &'static str,
    },
    /// The node has no such interpreter.
    #[error("there is no Python called `{name}`")]
    PythonMissing {
        /// The name or path in the specification.
        name: String,
    },
    /// The interpreter is there, but does not work.
    #[error("the Python at {} does not work: {detail}", path.display())]
    PythonUnusable {
        /// Where it was found.
        path: PathBuf,
        /// What it said.
        detail: String,
    },
    /// The interpreter cannot make virtual environments.
    #[error("the Python at {} cannot make virtual environments", python.display())]
    VenvMissing {
        /// The interpreter.
        python: PathBuf,
        /// The package of Debian and Ubuntu that brings what is missing, for example `python3.10-venv`.
        package: String,
    },
    /// No package satisfies a requirement.
    #[error("no package satisfies `{requirement}`: {detail}")]
    Unsatisfied {
        /// The requirement, or the requirements that exclude each other.
        requirement: String,
        /// What the installer said.
        detail: String,
    },
    /// The package index cannot be reached.
    #[error("the package index cannot be reached: {detail}")]
    Network {
        /// What the installer said.
        detail: String,
    },
    /// The disk is full.
    #[error("no space is left for {}", path.display())]
    DiskFull {
        /// What was to be written.
        path: PathBuf,
    },
    /// A command of the builder printed nothing for too long and was ended.
    #[error("{step} was given up after {} s of silence", after.as_secs())]
    Stalled {
        /// What the command was to do.
        step: &'static str,
        /// How long it was silent.
        after: Duration,
    },
    /// Somebody killed a command of the builder, time and again.
    #[error("{step} was killed by signal {signal}")]
    Killed {
        /// What the command was to do.
        step: &'static str,
        /// With what.
        signal: i32,
    },
    /// A command of the builder failed for a reason of its own.
    #[error("{step} failed: {detail}")]
    Failed {
        /// What the command was to do.
        step: &'static str,
        /// The last lines it printed.
        detail: String,
    },
    /// A command of the builder could not be run.
    #[error("{step} could not be run")]
    Command {
        /// What the command was to do.
        step: &'static str,
        /// Why not.
        #[source]
        source: Arc<CommandError>,
    },
    /// The file system refused something.
    #[error("could not {what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: Arc<io::Error>,
    },
}

impl AcquireError {
    /// Turns a refusal of the file system into the error it is.
    pub(super) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AcquireError {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => AcquireError::DiskFull { path },
            _ => AcquireError::Io { what, path, source: Arc::new(source) },
        }
    }

    /// Turns a command that did not run to its end into the error it is.
    pub(super) fn command(step: &'static str) -> impl FnOnce(CommandError) -> AcquireError {
        move |error| match error {
            CommandError::Stalled { after, .. } => AcquireError::Stalled { step, after },
            other => AcquireError::Command { step, source: Arc::new(other) },
        }
    }

    /// The same would happen at once again, so it is remembered for a while.
    pub(super) fn is_lasting(&self) -> bool {
        use AcquireError as E;
        !matches!(
            self,
            E::Network { .. } | E::DiskFull { .. } | E::Killed { .. } | E::Command { .. } | E::Io { .. }
        )
    }
}
