//! Conda environments: resolves a user's file for this node, and lets the engine build it and, for its pip part, the
//! installer of pip packages.
//!
//! The cache key of an environment: the platform, the channels, the packages asked for, and the machine's virtual
//! packages in versions that do not change with every update. With a lock file the key is the lock file alone. Names,
//! variables and comments of the file are not part of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use agent_env::{Channel, Phase, Platform, Progress, Spec};
use agent_jobfile::condafile::{self, CondaFile, Line, Lock};
use agent_model::EnvSpec;
use agent_model::fault::Fault;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use sha2::{Digest as _, Sha256};

use super::channels::channels;
use super::dists;
use super::engine::{self, Engine};
use super::glibc::Glibc;
use super::install::{InstallSpec, Installer, indexes, local_files};
use super::{AcquireError, BuildWorkspace, Built, EnvBuilder, EnvConfig};

/// Increased when the same identity would be built differently.
const VERSION: u32 = 1;

/// Builds conda environments.
pub(super) struct Conda {
    config: Arc<EnvConfig>,
    engine: Arc<Engine>,
    installer: Arc<Installer>,
    /// The C library that packages find where commands run, if it is not this machine's.
    glibc: Option<Glibc>,
}

/// A parsed specification.
struct Order<'a> {
    /// The user's name of the file.
    name: &'a str,
    file: CondaFile,
    lock: Option<Lock>,
}

impl<'a> Order<'a> {
    fn read(spec: &'a EnvSpec) -> Result<Order<'a>, AcquireError> {
        let EnvSpec::Conda { file, document, lock } = spec else {
            return Err(AcquireError::Unsupported { kind: spec.kind() });
        };
        let name = if file.is_empty() { "the conda file" } else { file.as_str() };
        let locked = lock.is_some();
        let lock = lock.as_deref().map(condafile::parse_lock).transpose();
        let lock = lock.map_err(|fault| refused("the lock", &fault))?;
        let file = match document.trim() {
            "" if locked => CondaFile::default(),
            _ => condafile::parse(document).map_err(|fault| refused(name, &fault))?.0,
        };
        Ok(Order { name, file, lock })
    }

    /// The lines of the pip part.
    fn pip(&self) -> Vec<String> {
        match &self.lock {
            Some(lock) => lock.pip.clone(),
            None => self.file.pip.iter().map(|line| line.text.clone()).collect(),
        }
    }

    /// The description of a line of the file: ``conda.yml, line 7: `numpy=99` ``.
    fn at(&self, number: usize) -> String {
        let lines = self.file.specs.iter().chain(&self.file.pip).chain(&self.file.channels);
        match lines.into_iter().find(|line| line.line == number) {
            Some(line) => self.line(line),
            None => format!("{}, line {number}", self.name),
        }
    }

    fn line(&self, line: &Line) -> String {
        format!("{}, line {}: `{}`", self.name, line.line, line.text)
    }

    /// An error of the pip part, with the lines of the file.
    fn blame(&self, error: AcquireError) -> AcquireError {
        let AcquireError::Unsatisfied { requirement, detail } = error else { return error };
        let is_named = |line: &&Line| requirement.split(" and ").any(|part| concerns(part, &line.text));
        let at: Vec<String> = self.file.pip.iter().filter(is_named).map(|line| self.line(line)).collect();
        if at.is_empty() {
            return AcquireError::Unsatisfied { requirement, detail };
        }
        AcquireError::Unsolvable { at, detail, hint: None }
    }

    fn summary(&self) -> String {
        match &self.lock {
            Some(lock) => {
                let name = if self.name.is_empty() { "a lock" } else { self.name };
                format!("{name}: {} locked packages", lock.packages.len() + lock.pip.len())
            }
            None => format!("{}: {}", self.name, self.file),
        }
    }
}

/// Whether an installer's name of a requirement means this line of the file.
fn concerns(part: &str, line: &str) -> bool {
    let package = super::uv::package;
    part == line || (!package(line).is_empty() && dists::same(package(part)) == dists::same(package(line)))
}

fn refused(name: &str, fault: &Fault) -> AcquireError {
    let why = fault.why.join(": ");
    let detail = if why.is_empty() { fault.what.clone() } else { format!("{}: {why}", fault.what) };
    AcquireError::Refused { at: vec![name.to_owned()], detail, hint: fault.fix.clone() }
}

impl Conda {
    pub(super) fn new(config: Arc<EnvConfig>, engine: Arc<Engine>, installer: Arc<Installer>) -> Conda {
        Conda { config, engine, installer, glibc: None }
    }

    /// The same for commands that find another C library: the older one of both counts.
    pub(super) fn on(&self, glibc: Glibc) -> Conda {
        let (config, engine) = (self.config.clone(), self.engine.clone());
        Conda { config, engine, installer: self.installer.clone(), glibc: Some(glibc) }
    }

    /// What packages may rely on.
    async fn platform(&self) -> Result<Platform, AcquireError> {
        let platform = self.engine.platform().await?;
        Ok(match self.glibc {
            Some(glibc) => limited(platform, glibc),
            None => platform,
        })
    }

    fn channels(&self, file: &CondaFile) -> Vec<Channel> {
        let of_specs = file.channels_of_specs();
        let written: Vec<&str> = file.channels.iter().map(|line| line.text.as_str()).collect();
        let words: Vec<&str> = match written.is_empty() {
            true => self.config.conda.channels.iter().map(String::as_str).collect(),
            false => written,
        };
        channels(words.into_iter().chain(of_specs.iter().map(|line| line.text.as_str())), &self.config.conda)
    }

    fn identity_of(&self, order: &Order<'_>, platform: &Platform) -> String {
        let pip = order.pip();
        let pip_part = match pip.is_empty() {
            true => String::new(),
            false => format!("{}\n{}{}", pip.join("\n"), local_files(&pip), indexes(&self.config)),
        };
        let head = format!("conda {VERSION} {} {}", agent_env::VERSION, platform.subdir);
        if let Some(lock) = &order.lock {
            let packages = Lock { pip: Vec::new(), ..lock.clone() }.to_string();
            let digest = agent_model::ids::hex(&Sha256::digest(packages));
            return format!("{head}\nlock {digest}\n{pip_part}");
        }
        let urls: Vec<String> = self.channels(&order.file).into_iter().map(|channel| channel.url).collect();
        let priority = if self.config.conda.flexible { "flexible" } else { "strict" };
        let offers = platform.virtual_packages.iter().filter_map(|package| lasting(package));
        format!(
            "{head}\n{}\n{priority}\n{}\n{}\n{pip_part}",
            urls.join("\n"),
            order.file.normalized_specs().join("\n"),
            offers.collect::<Vec<_>>().join("\n"),
        )
    }

    async fn install_conda(
        &self,
        order: &Order<'_>,
        text: Option<String>,
        workspace: &BuildWorkspace,
    ) -> Result<agent_env::Built, AcquireError> {
        let platform = self.platform().await?;
        let mut build = engine::blank(&self.config, &self.engine, workspace.prefix(), platform);
        build.lock = text;
        build.channels = self.channels(&order.file);
        let spec = |line: &Line| Spec { text: line.text.clone(), line: line.line };
        build.specs = order.file.specs.iter().map(spec).collect();
        if order.lock.is_none() && order.file.lacks_pip() {
            for name in ["python", "pip"].into_iter().filter(|name| order.file.spec_of(name).is_none()) {
                workspace.say(&format!(
                    "warning: {} has pip packages and no `{name}`; the newest that fits is added",
                    order.name
                ));
                build.specs.push(Spec { text: name.to_owned(), line: 0 });
            }
        }
        self.engine.build(build, workspace, |line| order.at(line)).await
    }

    async fn install_pip(
        &self,
        order: &Order<'_>,
        lines: Vec<String>,
        vars: &BTreeMap<String, String>,
        workspace: &BuildWorkspace,
    ) -> Result<Vec<String>, AcquireError> {
        if !workspace.prefix().join("bin/python").exists() {
            let detail = "it has pip packages, and nothing in it brings a Python".to_owned();
            let hint = Some("add `python` to its dependencies".to_owned());
            return Err(AcquireError::Refused { at: vec![order.name.to_owned()], detail, hint });
        }
        let uv = self.installer.uv(&lines, workspace).await;
        let hashed =
            |line: &String| line.contains("--hash=") || line.contains("#sha256=") || line.starts_with('-');
        let all_hashed = order.lock.is_some() && lines.iter().all(hashed);
        let mut wanted =
            InstallSpec { lines, exact: order.lock.is_some(), compiled_later: true, vars: vars.clone() };
        if all_hashed {
            wanted.lines.insert(0, "--require-hashes".to_owned());
        }
        wanted.vars.insert("CONDA_PREFIX".to_owned(), workspace.prefix().display().to_string());
        let mut locked = self
            .installer
            .install(uv.as_ref(), &wanted, workspace)
            .await
            .map_err(|error| order.blame(error))?;
        locked.retain(|line| line != "--require-hashes");
        Ok(locked)
    }
}

impl EnvBuilder for Conda {
    fn handles(&self, spec: &EnvSpec) -> bool {
        matches!(spec, EnvSpec::Conda { .. })
    }

    fn identity<'a>(&'a self, spec: &'a EnvSpec) -> BoxFuture<'a, Result<String, AcquireError>> {
        async move {
            let order = Order::read(spec)?;
            Ok(self.identity_of(&order, &self.platform().await?))
        }
        .boxed()
    }

    fn runs_packages(&self, spec: &EnvSpec) -> bool {
        Order::read(spec).is_ok_and(|order| !order.pip().is_empty())
    }

    fn variables(&self, spec: &EnvSpec) -> BTreeMap<String, String> {
        Order::read(spec).map(|order| order.file.variables).unwrap_or_default()
    }

    fn build<'a>(
        &'a self,
        spec: &'a EnvSpec,
        workspace: &'a BuildWorkspace,
    ) -> BoxFuture<'a, Result<Built, AcquireError>> {
        async move {
            let order = Order::read(spec)?;
            let text = match spec {
                EnvSpec::Conda { lock, .. } => lock.clone(),
                _ => None,
            };
            if let Some(lacks) = order.lock.as_ref().and_then(|lock| lock.lacks(&order.file)) {
                workspace.say(&format!("warning: {}: {lacks}", order.name));
            }
            let made = self.install_conda(&order, text, workspace).await?;
            let pip = order.pip();
            let (mut lock, mut count) = (made.lock, made.packages);
            if !pip.is_empty() {
                let before = dists::dists(workspace.prefix());
                let lines = self.install_pip(&order, pip, &made.activation.vars, workspace).await?;
                let after = dists::dists(workspace.prefix());
                let (new, replaced) = dists::changes(&before, &after);
                count += u32::try_from(new.len() - replaced.len()).unwrap_or(0);
                lines.iter().for_each(|line| lock.push_str(&format!("# pip {line}\n")));
            }
            workspace.tell(Progress::of(Phase::Check, ""));
            Ok(Built {
                vars: made.activation.vars,
                path_entries: made.activation.path_entries,
                python_version: made.python_version.unwrap_or_default(),
                summary: order.summary(),
                packages: count,
                lock: Some(lock),
                holds_files: true,
                compiled: false,
                ..Built::default()
            })
        }
        .boxed()
    }
}

/// The platform with this C library, unless its own is older.
fn limited(mut platform: Platform, glibc: Glibc) -> Platform {
    const NAME: &str = "__glibc=";
    for package in &mut platform.virtual_packages {
        let own = package.strip_prefix(NAME).and_then(|rest| Glibc::parse(rest.split('=').next()?));
        if own.is_some_and(|own| glibc < own) {
            *package = format!("{NAME}{glibc}=0");
        }
    }
    platform
}

/// The part of a virtual package that is part of the identity: `__cuda=12.4=0` is `__cuda=12.4`. A new kernel, or a
/// bug fix of the C library, is no reason to build again.
fn lasting(package: &str) -> Option<String> {
    let mut parts = package.splitn(3, '=');
    let (name, version, build) = (parts.next()?, parts.next().unwrap_or_default(), parts.next());
    let minor: Vec<&str> = version.splitn(3, '.').take(2).collect();
    match name {
        "__glibc" | "__cuda" => Some(format!("{name}={}", minor.join("."))),
        "__archspec" => Some(format!("{name}={}", build.unwrap_or(version))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_updates_of_the_machine_make_no_other_environment() {
        assert_eq!(lasting("__glibc=2.36=0").as_deref(), Some("__glibc=2.36"));
        assert_eq!(lasting("__cuda=12.4.1=0").as_deref(), Some("__cuda=12.4"));
        assert_eq!(lasting("__archspec=1=x86_64_v3").as_deref(), Some("__archspec=x86_64_v3"));
        assert_eq!(lasting("__linux=6.1.0=0"), None);
        assert_eq!(lasting("__unix=0=0"), None);
    }

    #[test]
    fn test_the_older_c_library_counts() {
        let packages = || ["__glibc=2.36=0", "__linux=6.1=0"].map(str::to_owned).to_vec();
        let platform = || Platform { subdir: "linux-64".into(), virtual_packages: packages() };
        let older = limited(platform(), Glibc::parse("2.31").unwrap()).virtual_packages;
        assert_eq!(older, ["__glibc=2.31=0", "__linux=6.1=0"]);
        assert_eq!(limited(platform(), Glibc::parse("2.39").unwrap()), platform());
    }
}
