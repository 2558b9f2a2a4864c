//! The settings for environments of a node.
//!
//! Plain values, which the daemon reads from its configuration. Nothing here is a secret; of credentials only the
//! file is named.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use agent_command::Command;
use agent_model::Digest;
use futures_util::future::BoxFuture;
use tokio::sync::watch;

use super::builder::Builder;
use super::owners::OwnerBuilders;
use crate::docker::Docker;

/// The directory of environments, and the settings of their builders.
#[derive(Debug, Clone)]
pub struct EnvConfig {
    /// The directory that contains them, absolute; created if absent.
    pub root: PathBuf,
    /// The packages: `conda/`, which environments share, and the caches of installers, in `of/` those of each owner, or
    /// `uv/` and `pip/` of the daemon's own user. On the same file system as the root, or
    /// every file of an environment is a copy.
    pub packages: PathBuf,
    /// Where interpreters are looked for, as in `PATH`; also the `PATH` of builders.
    pub path: String,
    /// Variables of builders: `HOME`, `PIP_*`, `CONDA_OVERRIDE_*`, proxies, certificates.
    pub vars: BTreeMap<String, String>,
    /// A builder that prints nothing for this long is killed.
    pub stall: Duration,
    /// The conda engine, the program `agent-env`; without it conda environments are refused.
    pub engine: Option<PathBuf>,
    /// Where packages of conda come from.
    pub conda: CondaConfig,
    /// Which program installs the packages of pip.
    pub uv: Uv,
    /// The directory with definitions of named environments, `NAME.yml`.
    pub curated: Option<PathBuf>,
    /// Built-in definitions of named environments, which the directory may replace: name and text.
    pub curated_builtin: &'static [(&'static str, &'static str)],
    /// The memory a builder may use, in bytes; 0 for no limit.
    pub memory: u64,
    /// Files of environments may be hard links of the package cache's files. Only if jobs cannot write to them,
    /// because they run as another user: a job's change would affect all environments.
    pub hard_links: bool,
    /// Jobs can write to environments, so each is compared with its recorded content before it is used.
    pub writable: bool,
    /// The user that interpreters run as, and what works for no owner of jobs; the daemon's own user when absent.
    pub builder: Option<Builder>,
    /// The users that installers run as, one for each owner of jobs; the daemon's own user when absent.
    pub owners: Option<Arc<OwnerBuilders>>,
    /// The supervisor's program, which ends all that an installer of the daemon's own user leaves; absent, nobody does.
    pub shim: Option<PathBuf>,
    /// The container engine; without it environments that are images are refused.
    pub docker: Option<Docker>,
    /// A file in the format of Docker's own `config.json`, with credentials of registries.
    pub registry_credentials: Option<PathBuf>,
    /// A file of certificates that image builds may trust as well.
    pub build_ca: Option<PathBuf>,
    /// How the contexts of image builds are laid out; without it such builds are refused.
    pub contexts: Option<Contexts>,
    /// Whether this machine has GPUs; `None` while unknown.
    pub gpus: watch::Receiver<Option<bool>>,
}

type LayOut = dyn Fn(Digest, PathBuf) -> BoxFuture<'static, Result<(), String>> + Send + Sync;

/// Lays out the context of an image build in a directory that does not exist yet.
#[derive(Clone)]
pub struct Contexts(pub Arc<LayOut>);

impl fmt::Debug for Contexts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Contexts")
    }
}

impl EnvConfig {
    /// Makes a command that runs other people's code run as the builders' user; and nothing of it runs afterwards.
    pub(super) fn apart(&self, command: Command) -> Command {
        match (&self.builder, &self.shim) {
            (Some(builder), _) => builder.runs(command),
            (None, Some(shim)) => command.alone(shim),
            (None, None) => command,
        }
    }

    /// The variables for a program that only answers a question: no settings of installers, which may contain
    /// credentials, and no home that its user cannot enter.
    pub(super) fn vars_of_questions(&self) -> BTreeMap<String, String> {
        let apart = self.builder.is_some();
        let seen = |name: &str| !(name.starts_with("PIP_") || apart && name == "HOME");
        self.vars
            .iter()
            .filter(|(name, _)| seen(name))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    }

    /// Environments below `root` with defaults: packages beside them, no conda engine, pip.
    pub fn plain(root: PathBuf, path: String) -> EnvConfig {
        EnvConfig {
            packages: root.with_file_name("packages"),
            root,
            path,
            vars: BTreeMap::new(),
            stall: Duration::from_secs(600),
            engine: None,
            conda: CondaConfig::default(),
            uv: Uv::Never,
            curated: None,
            curated_builtin: &[],
            memory: 0,
            hard_links: false,
            writable: !agent_spawn::serves_others(),
            builder: None,
            owners: None,
            shim: None,
            docker: None,
            registry_credentials: None,
            build_ca: None,
            contexts: None,
            gpus: watch::channel(None).1,
        }
    }
}

/// The settings for channels of conda packages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CondaConfig {
    /// The channels of a file that names none, best first.
    pub channels: Vec<String>,
    /// The address that a channel's bare name is appended to.
    pub alias: String,
    /// Mirrors of a channel's files, by prefixes of its address, best first.
    pub mirrors: BTreeMap<String, Vec<String>>,
    /// The file of credentials of channels.
    pub credentials: Option<PathBuf>,
    /// Nothing is fetched: only packages in the caches are available.
    pub offline: bool,
    /// Packages of a better channel do not hide those of others.
    pub flexible: bool,
}

impl Default for CondaConfig {
    fn default() -> CondaConfig {
        CondaConfig {
            channels: vec!["conda-forge".to_owned()],
            alias: "https://conda.anaconda.org".to_owned(),
            mirrors: BTreeMap::new(),
            credentials: None,
            offline: false,
            flexible: false,
        }
    }
}

/// Which program installs the packages of pip.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Uv {
    /// `uv` where it is found and works, else pip.
    #[default]
    Auto,
    /// Always pip.
    Never,
    /// The `uv` at this path; pip if it does not work.
    At(PathBuf),
}
