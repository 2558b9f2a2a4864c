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
    #[source]
    pub source: io::Error,
}

/// Why an environment could not be provided. All waiters of a build get the same error.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AcquireError {
    /// This version cannot build it.
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
    /// The interpreter exists, but does not work.
    #[error("the Python at {} does not work: {detail}", path.display())]
    PythonUnusable {
        /// Where it was found.
        path: PathBuf,
        /// Its output.
        detail: String,
    },
    /// The interpreter cannot make virtual environments.
    #[error("the Python at {} cannot make virtual environments", python.display())]
    VenvMissing {
        /// The interpreter.
        python: PathBuf,
        /// The package of Debian and Ubuntu that contains the missing part, for example `python3.10-venv`.
        package: String,
    },
    /// No package satisfies a requirement.
    #[error("no package satisfies `{requirement}`: {detail}")]
    Unsatisfied {
        /// The requirement, or the requirements that exclude each other.
        requirement: String,
        /// The installer's message.
        detail: String,
    },
    /// The package index cannot be reached.
    #[error("the package index cannot be reached: {detail}")]
    Network {
        /// The installer's message.
        detail: String,
    },
    /// The program that makes conda environments is not installed.
    #[error("the conda engine `agent-env` is not installed on this node")]
    EngineMissing {
        /// Where it was looked for.
        looked: Option<PathBuf>,
    },
    /// No choice of packages satisfies the user's file.
    #[error("{}{detail}", at_of(at))]
    Unsolvable {
        /// The lines that caused it, for example ``conda.yml, line 7: `numpy=99` ``; empty when none is known.
        at: Vec<String>,
        /// The solver's message.
        detail: String,
        /// What to do about it, if there is something specific.
        hint: Option<String>,
    },
    /// The user's file cannot be understood, or asks for a package that must not be installed.
    #[error("{}{detail}", at_of(at))]
    Refused {
        /// The lines that caused it; empty when none is known.
        at: Vec<String>,
        /// Why.
        detail: String,
        /// What to do about it, if there is something specific.
        hint: Option<String>,
    },
    /// Choosing packages took too long.
    #[error("choosing packages took too long: {detail}")]
    TooLong {
        /// The solver's message.
        detail: String,
    },
    /// A server wants other credentials.
    #[error("a server refused the packages: {detail}")]
    Denied {
        /// The engine's message.
        detail: String,
    },
    /// The data received is not the data announced.
    #[error("a package is damaged: {detail}")]
    Damaged {
        /// The engine's message.
        detail: String,
    },
    /// The interpreter of the host lacks packages that the job lists.
    #[error("the Python at {} lacks {}", python.display(), missing.join(", "))]
    Lacks {
        /// The interpreter.
        python: PathBuf,
        /// What is missing or has another version, for example `scipy>=1.9 (1.8.0 is installed)`.
        missing: Vec<String>,
    },
    /// A named environment is not defined on this node.
    #[error("the environment `{reference}` is not defined on this node")]
    NameUnknown {
        /// As written.
        reference: String,
        /// The names that are defined.
        known: Vec<String>,
    },
    /// The container engine did not answer, or broke off: nothing is known, and a later try may help.
    #[error("{0}")]
    Engine(DockerError),
    /// The container engine broke off its work, again and again.
    #[error("the container engine broke it off {times} times without getting further: {error}")]
    BrokenOff {
        /// The last error.
        error: DockerError,
        /// How many steps or layers were done.
        done: u64,
        /// How often it got no further.
        times: u32,
    },
    /// A registry has no such image, or refuses it to us.
    #[error("the image `{image}` is not to be had from {registry}: {detail}")]
    ImageMissing {
        /// Its name.
        image: String,
        /// The host that was asked.
        registry: String,
        /// It wants other credentials, as far as known; a registry may hide this for an image that it conceals.
        denied: bool,
        /// Its message.
        detail: String,
    },
    /// A registry cannot be reached, or stopped sending.
    #[error("the registry {registry} cannot be used: {detail}")]
    Registry {
        /// The host.
        registry: String,
        /// The engine's message.
        detail: String,
    },
    /// An image could not be built.
    #[error("{step} failed: {detail}{}", lines_of(tail))]
    ImageBuild {
        /// The step of the Dockerfile, for example ``step 2 of 5, `RUN make` ``.
        step: String,
        /// The engine's message.
        detail: String,
        /// The last lines it printed.
        tail: Vec<String>,
    },
    /// The image is for another platform.
    #[error("the image `{image}` is for {has}, and this node is {node}")]
    WrongPlatform {
        /// Its name.
        image: String,
        /// For example `linux/arm64`.
        has: String,
        /// The same of this machine.
        node: String,
    },
    /// No conda environment of this machine works in the image.
    #[error("the image `{image}` cannot carry a conda environment: {why}")]
    CannotCarry {
        /// Its name.
        image: String,
        /// Why not.
        why: String,
    },
    /// The image is for machines with GPUs.
    #[error("the image `{image}` cannot be used: {why}")]
    NeedsGpu {
        /// Its name.
        image: String,
        /// Why not.
        why: String,
    },
    /// A builder was killed because it used too much memory.
    #[error("the builder was ended at its memory limit of {}: {step}", size::binary(*limit))]
    OutOfMemory {
        /// What the command was to do.
        step: &'static str,
        /// The limit, in bytes.
        limit: u64,
    },
    /// The disk is full.
    #[error("no space is left for {}", path.display())]
    DiskFull {
        /// The file or directory that was written.
        path: PathBuf,
    },
    /// A command of the builder printed nothing for too long and was killed.
    #[error("{step} was given up after {} s of silence", after.as_secs())]
    Stalled {
        /// What the command was to do.
        step: &'static str,
        /// The longest silence allowed.
        after: Duration,
    },
    /// A command was killed from outside, time and again.
    #[error("{step} was killed by {}{}", signal_name(*signal), if *starved { STARVED } else { "" })]
    Killed {
        /// What the command was to do.
        step: &'static str,
        /// The signal.
        signal: i32,
        /// Meanwhile the kernel killed processes for lack of memory.
        starved: bool,
    },
    /// A command of the builder failed for a reason of its own.
    #[error("{step} failed: {detail}")]
    Failed {
        /// What the command was to do.
        step: &'static str,
        /// The last lines of its output.
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
    /// It failed a while ago, and was not tried again since.
    #[error("{error}")]
    Remembered {
        /// The error of that time.
        error: Box<AcquireError>,
        /// How long ago.
        ago: Duration,
        /// How long until it is tried again.
        left: Duration,
    },
    /// An operation on files failed.
    #[error("could not {what} {}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: Arc<io::Error>,
    },
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
