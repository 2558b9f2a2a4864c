//! Why an environment is not there.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_model::size;

use crate::docker::DockerError;
use crate::exec::{CommandError, is_lack, says_lack};

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
    /// The program that makes conda environments is not installed.
    #[error("the conda engine `agent-env` is not installed on this node")]
    EngineMissing {
        /// Where it was looked for.
        looked: Option<PathBuf>,
    },
    /// No choice of packages satisfies the file of the user.
    #[error("{}{detail}", at_of(at))]
    Unsolvable {
        /// The lines at fault, for example ``conda.yml, line 7: `numpy=99` ``; empty when none is known.
        at: Vec<String>,
        /// What the solver said.
        detail: String,
        /// What to do about it, when something particular can be done.
        hint: Option<String>,
    },
    /// The file of the user cannot be understood, or asks for what is not installed.
    #[error("{}{detail}", at_of(at))]
    Refused {
        /// The lines at fault; empty when none is known.
        at: Vec<String>,
        /// Why.
        detail: String,
        /// What to do about it, when something particular can be done.
        hint: Option<String>,
    },
    /// Choosing packages took too long.
    #[error("choosing packages took too long: {detail}")]
    TooLong {
        /// What the solver said.
        detail: String,
    },
    /// A server wants other credentials.
    #[error("a server refused the packages: {detail}")]
    Denied {
        /// What the engine said.
        detail: String,
    },
    /// What arrived is not what was announced.
    #[error("a package is damaged: {detail}")]
    Damaged {
        /// What the engine said.
        detail: String,
    },
    /// The interpreter of the host has not what the job lists.
    #[error("the Python at {} lacks {}", python.display(), missing.join(", "))]
    Lacks {
        /// The interpreter.
        python: PathBuf,
        /// What is missing or of another version, for example `scipy>=1.9 (1.8.0 is installed)`.
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
    /// The container engine did not answer, or broke off: nothing is known, and asking again later may help.
    #[error("{0}")]
    Engine(DockerError),
    /// The container engine broke off what it had begun, again and again.
    #[error("the container engine broke it off {times} times without getting further: {error}")]
    BrokenOff {
        /// What it said, or how it fell silent.
        error: DockerError,
        /// How many steps or layers were done.
        done: u64,
        /// How often it came no further.
        times: u32,
    },
    /// A registry has no such image, or not for us.
    #[error("the image `{image}` is not to be had from {registry}: {detail}")]
    ImageMissing {
        /// Its name.
        image: String,
        /// The host that was asked.
        registry: String,
        /// It wants other credentials, as far as it says; it may not say so of what it hides.
        denied: bool,
        /// What it said.
        detail: String,
    },
    /// A registry cannot be reached, or does not go on.
    #[error("the registry {registry} cannot be used: {detail}")]
    Registry {
        /// The host.
        registry: String,
        /// What the engine said.
        detail: String,
    },
    /// An image could not be built.
    #[error("{step} failed: {detail}{}", lines_of(tail))]
    ImageBuild {
        /// The step of the Dockerfile, for example ``step 2 of 5, `RUN make` ``.
        step: String,
        /// What the engine said.
        detail: String,
        /// The last lines it printed.
        tail: Vec<String>,
    },
    /// The image is for other machines.
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
    /// A builder was ended because it took too much memory.
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
    /// Somebody killed a command, time and again.
    #[error("{step} was killed by {}{}", signal_name(*signal), if *starved { STARVED } else { "" })]
    Killed {
        /// What the command was to do.
        step: &'static str,
        /// With what.
        signal: i32,
        /// The kernel ended processes for want of memory meanwhile.
        starved: bool,
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
    /// It failed so a while ago, and nobody looked again since.
    #[error("{error}")]
    Remembered {
        /// Why it failed then.
        error: Box<AcquireError>,
        /// How long ago.
        ago: Duration,
        /// When it is looked at again.
        left: Duration,
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

/// Said of a command that was killed while the kernel ended processes.
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

/// The lines at fault as the beginning of a message.
fn at_of(at: &[String]) -> String {
    if at.is_empty() { String::new() } else { format!("{}: ", at.join("; ")) }
}

impl AcquireError {
    /// Turns a refusal of the file system into the error it is.
    pub(super) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AcquireError {
        let path = path.to_owned();
        move |source| match agent_fs::is_full(&source) {
            true => AcquireError::DiskFull { path },
            false => AcquireError::Io { what, path, source: Arc::new(source) },
        }
    }

    /// Turns a command that did not run to its end into the error it is.
    pub(super) fn command(step: &'static str) -> impl FnOnce(CommandError) -> AcquireError {
        move |error| match error {
            CommandError::Stalled { after, .. } => AcquireError::Stalled { step, after },
            CommandError::OutOfMemory { limit, .. } => AcquireError::OutOfMemory { step, limit },
            other => AcquireError::Command { step, source: Arc::new(other) },
        }
    }

    /// Turns an answer of the container engine, or its silence, into the error it is.
    pub(super) fn engine(step: &'static str) -> impl FnOnce(DockerError) -> AcquireError {
        move |error| match error {
            DockerError::Refused { message, .. } => AcquireError::Failed { step, detail: message },
            unknown => AcquireError::Engine(unknown),
        }
    }

    /// What it means that the engine does not go on with what it had begun; other errors stay as they are.
    pub(super) fn midway(self, done: u64) -> AcquireError {
        match self {
            AcquireError::Engine(error) if error.is_unknown() => {
                AcquireError::BrokenOff { error, done, times: 1 }
            }
            other => other,
        }
    }

    /// Nobody knows, and waiting may help: the container engine is not there, or silent.
    pub fn is_waiting(&self) -> bool {
        matches!(self, AcquireError::Engine(error) if error.is_unknown())
    }

    /// The node lacked what others may give back in a moment: descriptors, processes, memory.
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

    /// The same would happen at once again, so it is remembered for a while. What is cheap to look at, and what
    /// somebody mends on the node before he tries again, is not.
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
