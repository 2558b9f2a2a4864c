//! Why an environment could not be provided.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_command::CommandError;
use agent_model::size;

use crate::docker::DockerError;
use agent_shim::{is_lack, says_lack};

/// Why environments cannot be kept in a directory.
#[derive(Debug, thiserror::Error)]
#[error("environments cannot be kept in `{}`", path.display())]
pub struct OpenEnvError {
    /// The directory, or the file below it that is in the way.
    pub path: PathBuf,
    /// The error of the system.
    pub source: io::Error,
}

/// Why an environment could not be provided. All waiters of a build get the same error.
#[derive(Debug, Clone, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum AcquireError {
    #[error("environments of the kind `{kind}` are not made on this node")]
    Unsupported {
        /// See [`EnvSpec::kind`](agent_model::EnvSpec::kind).
        kind: &'static str,
    },
    #[error("there is no Python called `{name}`")]
    PythonMissing {
        /// The name or path in the specification.
        name: String,
    },
    #[error("the Python at {} does not work: {detail}", path.display())]
    PythonUnusable { path: PathBuf, detail: String },
    #[error("the Python at {} cannot make virtual environments", python.display())]
    VenvMissing {
        python: PathBuf,
        /// The package of Debian and Ubuntu that contains the missing part, for example `python3.10-venv`.
        package: String,
    },
    #[error("no package satisfies `{requirement}`: {detail}")]
    Unsatisfied {
        /// The requirement, or the requirements that exclude each other.
        requirement: String,
        detail: String,
    },
    #[error("the package index cannot be reached: {detail}")]
    Network { detail: String },
    #[error("the conda engine `agent-env` is not installed on this node")]
    EngineMissing { looked: Option<PathBuf> },
    #[error("{}{detail}", at_of(at))]
    Unsolvable {
        /// The lines that caused it, for example ``conda.yml, line 7: `numpy=99` ``; empty when none is known.
        at: Vec<String>,
        detail: String,
        /// What to do about it, if there is something specific.
        hint: Option<String>,
    },
    #[error("{}{detail}", at_of(at))]
    Refused {
        /// The lines that caused it; empty when none is known.
        at: Vec<String>,
        detail: String,
        /// What to do about it, if there is something specific.
        hint: Option<String>,
    },
    #[error("choosing packages took too long: {detail}")]
    TooLong { detail: String },
    #[error("a server refused the packages: {detail}")]
    Denied { detail: String },
    #[error("a package is damaged: {detail}")]
    Damaged { detail: String },
    #[error("the Python at {} lacks {}", python.display(), missing.join(", "))]
    Lacks {
        python: PathBuf,
        /// What is missing or has another version, for example `scipy>=1.9 (1.8.0 is installed)`.
        missing: Vec<String>,
    },
    #[error("the environment `{reference}` is not defined on this node")]
    NameUnknown {
        /// As written.
        reference: String,
        known: Vec<String>,
    },
    #[error("{0}")]
    Engine(DockerError),
    #[error("the container engine broke it off {times} times without getting further: {error}")]
    BrokenOff { error: DockerError, done: u64, times: u32 },
    #[error("the image `{image}` is not to be had from {registry}: {detail}")]
    ImageMissing {
        image: String,
        registry: String,
        /// It wants other credentials, as far as known; a registry may hide this for an image that it conceals.
        denied: bool,
        detail: String,
    },
    #[error("the registry {registry} cannot be used: {detail}")]
    Registry { registry: String, detail: String },
    #[error("{step} failed: {detail}{}", lines_of(tail))]
    ImageBuild {
        /// The step of the Dockerfile, for example ``step 2 of 5, `RUN make` ``.
        step: String,
        detail: String,
        tail: Vec<String>,
    },
    #[error("the image `{image}` is for {has}, and this node is {node}")]
    WrongPlatform {
        image: String,
        /// For example `linux/arm64`.
        has: String,
        node: String,
    },
    #[error("the image `{image}` cannot carry a conda environment: {why}")]
    CannotCarry { image: String, why: String },
    #[error("the image `{image}` cannot be used: {why}")]
    NeedsGpu { image: String, why: String },
    #[error("the builder was ended at its memory limit of {}: {step}", size::binary(*limit))]
    OutOfMemory {
        step: &'static str,
        /// The limit, in bytes.
        limit: u64,
    },
    #[error("no space is left for {}", path.display())]
    DiskFull {
        /// The file or directory that was written.
        path: PathBuf,
    },
    #[error("{step} was given up after {} s of silence", after.as_secs())]
    Stalled {
        step: &'static str,
        /// The longest silence allowed.
        after: Duration,
    },
    #[error("{step} was killed by {}{}", signal_name(*signal), if *starved { STARVED } else { "" })]
    Killed {
        step: &'static str,
        signal: i32,
        /// Meanwhile the kernel killed processes for lack of memory.
        starved: bool,
    },
    #[error("{step} failed: {detail}")]
    Failed { step: &'static str, detail: String },
    #[error("{step} could not be run")]
    Command { step: &'static str, source: Arc<CommandError> },
    #[error("{error}")]
    Remembered { error: Box<AcquireError>, ago: Duration, left: Duration },
    #[error("could not {what} {}", path.display())]
    Io { what: &'static str, path: PathBuf, source: Arc<io::Error> },
}

/// Added to the message of a command that was killed while the kernel killed processes.
const STARVED: &str = ", while the kernel ended processes because the machine had no memory left";

fn signal_name(signal: i32) -> String {
    match signal {
        9 => "signal 9 (KILL)".to_owned(),
        15 => "signal 15 (TERM)".to_owned(),
        other => format!("signal {other}"),
    }
}

/// The last lines of a log as the end of a message.
fn lines_of(tail: &[String]) -> String {
    if tail.is_empty() { String::new() } else { format!(" ({})", tail.join(" | ")) }
}

/// The lines that caused it, as the beginning of a message.
fn at_of(at: &[String]) -> String {
    if at.is_empty() { String::new() } else { format!("{}: ", at.join("; ")) }
}

impl AcquireError {
    /// Converts an error of the file system.
    pub(super) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AcquireError {
        let path = path.to_owned();
        move |source| match agent_fs::is_full(&source) {
            true => AcquireError::DiskFull { path },
            false => AcquireError::Io { what, path, source: Arc::new(source) },
        }
    }

    /// Converts the error of a command that did not run to its end.
    pub(super) fn command(step: &'static str) -> impl FnOnce(CommandError) -> AcquireError {
        move |error| match error {
            CommandError::Stalled { after, .. } => AcquireError::Stalled { step, after },
            CommandError::OutOfMemory { limit, .. } => AcquireError::OutOfMemory { step, limit },
            other => AcquireError::Command { step, source: Arc::new(other) },
        }
    }

    /// Converts an error of the container engine.
    pub(super) fn engine(step: &'static str) -> impl FnOnce(DockerError) -> AcquireError {
        move |error| match error {
            DockerError::Refused { message, .. } => AcquireError::Failed { step, detail: message },
            unknown => AcquireError::Engine(unknown),
        }
    }

    /// For an engine that broke off its work midway; other errors stay as they are.
    pub(super) fn midway(self, done: u64) -> AcquireError {
        match self {
            AcquireError::Engine(error) if error.is_unknown() => {
                AcquireError::BrokenOff { error, done, times: 1 }
            }
            other => other,
        }
    }

    /// Nothing is known, and waiting may help: the container engine is absent, or does not answer.
    pub fn is_waiting(&self) -> bool {
        matches!(self, AcquireError::Engine(error) if error.is_unknown())
    }

    /// The node lacked something that others may free in a moment: descriptors, processes, memory.
    pub fn is_lack(&self) -> bool {
        match self {
            AcquireError::Command { source, .. } => match &**source {
                CommandError::Spawn { source, .. } | CommandError::Follow { source, .. } => is_lack(source),
                _ => false,
            },
            AcquireError::Io { source, .. } => is_lack(source),
            AcquireError::Failed { detail, .. } => says_lack(detail),
            _ => false,
        }
    }

    /// The same would happen again at once, so it is remembered for a while. Errors that are cheap to check again, or
    /// that an operator fixes on the node before the next try, are not.
    pub(super) fn is_lasting(&self) -> bool {
        use AcquireError as E;
        if self.is_lack() {
            return false;
        }
        !matches!(
            self,
            E::PythonMissing { .. }
                | E::PythonUnusable { .. }
                | E::VenvMissing { .. }
                | E::EngineMissing { .. }
                | E::Lacks { .. }
                | E::Network { .. }
                | E::Denied { .. }
                | E::Damaged { .. }
                | E::DiskFull { .. }
                | E::Engine(_)
                | E::BrokenOff { .. }
                | E::ImageMissing { denied: true, .. }
                | E::Registry { .. }
                | E::Killed { .. }
                | E::Command { .. }
                | E::Io { .. }
        )
    }
}
