//! Ready environments. (Signatures first; the bodies follow.)

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_model::EnvSpec;

/// What builders are given, and where environments live.
#[derive(Debug, Clone)]
pub struct EnvConfig {
    /// The directory that holds them; made when absent.
    pub root: PathBuf,
    /// Where interpreters are looked for, as in `PATH`; also the `PATH` of builders.
    pub path: String,
    /// Variables of builders: `HOME`, `PIP_*`, proxies, certificates.
    pub vars: BTreeMap<String, String>,
    /// A builder that prints nothing for this long is ended.
    pub stall: Duration,
}

/// Why environments cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum OpenEnvError {
    /// The directory cannot be used.
    #[error("environments cannot be kept in `{}`", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

/// Why an environment is not there.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AcquireError {
    /// This version does not build it.
    #[error("this node cannot make environments of the kind `{kind}`")]
    Unsupported {
        /// See [`EnvSpec::kind`].
        kind: &'static str,
    },
    /// The node has no such interpreter.
    #[error("the node has no Python called `{name}`")]
    PythonMissing {
        /// The name or path in the specification.
        name: String,
    },
    /// The interpreter is there, but does not work.
    #[error("the Python at `{}` does not work: {detail}", path.display())]
    PythonUnusable {
        /// Where it was found.
        path: PathBuf,
        /// What it said.
        detail: String,
    },
    /// The interpreter cannot make virtual environments.
    #[error("the Python at `{}` cannot make virtual environments", python.display())]
    VenvMissing {
        /// The interpreter.
        python: PathBuf,
        /// The Debian or Ubuntu package that brings what is missing.
        package: String,
    },
    /// No package satisfies a requirement.
    #[error("no package satisfies `{requirement}`: {detail}")]
    Unsatisfied {
        /// The requirement, or requirements, that cannot be met.
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
    #[error("the disk of `{}` is full", path.display())]
    DiskFull {
        /// Where the environment was to be.
        path: PathBuf,
    },
    /// The builder printed nothing for too long and was ended.
    #[error("`{step}` printed nothing for {} s", after.as_secs())]
    Stalled {
        /// The command.
        step: String,
        /// How long it was silent.
        after: Duration,
    },
    /// A command of the builder failed for another reason.
    #[error("`{step}` failed: {tail}")]
    Failed {
        /// The command.
        step: String,
        /// The last lines it printed.
        tail: String,
    },
    /// The file system refused something.
    #[error("{what} `{}`", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: Arc<std::io::Error>,
    },
}

/// The environments of a node.
#[derive(Debug, Clone)]
pub struct Environments {
    config: EnvConfig,
}

impl Environments {
    /// Takes charge of the directory and removes what earlier builders left half-built.
    pub fn open(config: EnvConfig) -> Result<Environments, OpenEnvError> {
        Ok(Environments { config })
    }

    /// A ready environment; built when it is not there. What the builder prints is appended to `log`.
    pub async fn acquire(&self, spec: &EnvSpec, log: &Path) -> Result<EnvLease, AcquireError> {
        let _ = (log, &self.config);
        Err(AcquireError::Unsupported { kind: spec.kind() })
    }
}

/// A ready environment; it is not touched while this lives.
#[derive(Debug)]
pub struct EnvLease {
    key: String,
    prefix: PathBuf,
    vars: BTreeMap<String, String>,
    path_entries: Vec<PathBuf>,
    python_version: String,
    reused: bool,
}

impl EnvLease {
    /// What it is called: kind and key.
    pub fn key(&self) -> &str {
        &self.key
    }
    /// Its directory.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }
    /// The variables a command needs to use it, besides `PATH`.
    pub fn vars(&self) -> &BTreeMap<String, String> {
        &self.vars
    }
    /// What goes first on `PATH`.
    pub fn path_entries(&self) -> &[PathBuf] {
        &self.path_entries
    }
    /// It was there already.
    pub fn reused(&self) -> bool {
        self.reused
    }
    /// The version of its interpreter, for example `3.10.12`.
    pub fn python_version(&self) -> &str {
        &self.python_version
    }
}
