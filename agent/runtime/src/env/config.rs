//! What the environments of a node are made with.
//!
//! Plain values: who reads them from where is the daemon's business. Nothing here is a secret; credentials are
//! named by the file they are in.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use agent_model::Digest;
use futures_util::future::BoxFuture;
use tokio::sync::watch;

use super::builder::Builder;
use crate::docker::Docker;
use crate::exec::Command;

/// Where environments live, and what their builders are given.
#[derive(Debug, Clone)]
pub struct EnvConfig {
    /// The directory that holds them, absolute; made when absent.
    pub root: PathBuf,
    /// The packages that builds share: `conda/`, `uv/` and `pip/` below it. On the file system of the root, or
    /// every file of an environment is a copy.
    pub packages: PathBuf,
    /// Where interpreters are looked for, as in `PATH`; also the `PATH` of builders.
    pub path: String,
    /// Variables of builders: `HOME`, `PIP_*`, `CONDA_OVERRIDE_*`, proxies, certificates.
    pub vars: BTreeMap<String, String>,
    /// A builder that prints nothing for this long is ended.
    pub stall: Duration,
    /// The conda engine, the program `agent-env`; without it conda environments are refused.
    pub engine: Option<PathBuf>,
    /// Where packages of conda come from.
    pub conda: CondaConfig,
    /// Who installs the packages of pip.
    pub uv: Uv,
    /// The directory of the definitions of named environments, `NAME.yml`.
    pub curated: Option<PathBuf>,
    /// Definitions of named environments that the directory may replace: name and text.
    pub curated_builtin: &'static [(&'static str, &'static str)],
    /// The memory a builder may take, in bytes; 0 for any amount.
    pub memory: u64,
    /// Files of environments may be the very files of the package cache. Only where jobs cannot write to them,
    /// because they run as another user: what a job changed would be changed for all.
    pub hard_links: bool,
    /// Whom installers and interpreters run as; the daemon's own user when absent.
    pub builder: Option<Builder>,
    /// The container engine; without it environments that are images are refused.
    pub docker: Option<Docker>,
    /// A file of the form of Docker's own `config.json`, with credentials of registries.
    pub registry_credentials: Option<PathBuf>,
    /// A file of certificates that builds of images may trust as well.
    pub build_ca: Option<PathBuf>,
    /// How the contexts of image builds are had; without it such builds are refused.
    pub contexts: Option<Contexts>,
    /// Whether this machine has GPUs; `None` while nobody knows.
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
    /// A command that runs code of others: as whoever builds.
    pub(super) fn apart(&self, command: Command) -> Command {
        match &self.builder {
            Some(builder) => command.run_as(&builder.shim, builder.id),
            None => command,
        }
    }

    /// What a program may see that is only asked a question: no settings of installers, which may hold credentials, and
    /// no home that it could not enter.
    pub(super) fn vars_of_questions(&self) -> BTreeMap<String, String> {
        let apart = self.builder.is_some();
        let seen = |name: &str| !(name.starts_with("PIP_") || apart && name == "HOME");
        self.vars
            .iter()
            .filter(|(name, _)| seen(name))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    }

    /// Environments below `root` with nothing configured: packages beside them, no conda engine, pip.
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
            builder: None,
            docker: None,
            registry_credentials: None,
            build_ca: None,
            contexts: None,
            gpus: watch::channel(None).1,
        }
    }
}

/// Where packages of conda come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CondaConfig {
    /// The channels of a file that names none, best first.
    pub channels: Vec<String>,
    /// What a channel's bare name is below.
    pub alias: String,
    /// Where the files of a channel are fetched instead, by the beginning of its address, best first.
    pub mirrors: BTreeMap<String, Vec<String>>,
    /// The file of credentials of channels.
    pub credentials: Option<PathBuf>,
    /// Nothing is fetched: what is not in the package caches is not there.
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

/// Who installs the packages of pip.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Uv {
    /// `uv` where it is found and works, else pip.
    #[default]
    Auto,
    /// Always pip.
    Never,
    /// The `uv` of this path; pip where it does not work.
    At(PathBuf),
}
