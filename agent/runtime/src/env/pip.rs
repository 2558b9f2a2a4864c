//! Pip requirements on top of an interpreter of the host: a virtual environment of its own.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use agent_command::Command;
use agent_jobfile::condafile::Lock;
use agent_model::EnvSpec;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::build_workspace::Ran;
use super::dists;
use super::install::{InstallSpec, Installer, indexes, local_files};
use super::interpreter::{Interpreter, Interpreters};
use super::{AcquireError, BuildWorkspace, Built, EnvBuilder, EnvConfig};

/// Increased when the same identity would be built differently.
const VERSION: u32 = 2;

const MAKE: &str = "making a virtual environment";

/// Pauses before it is made again after a failure without a reason.
const AGAIN: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4)];

/// Builds virtual environments.
pub(super) struct Pip {
    config: Arc<EnvConfig>,
    interpreters: Arc<Interpreters>,
    installer: Arc<Installer>,
}

impl Pip {
    pub(super) fn new(
        config: Arc<EnvConfig>,
        interpreters: Arc<Interpreters>,
        installer: Arc<Installer>,
    ) -> Pip {
        Pip { config, interpreters, installer }
    }

    /// Makes the environment; without pip if that is installed separately, which is faster.
    async fn make(
        &self,
        python: &Interpreter,
        pip: bool,
        workspace: &BuildWorkspace,
    ) -> Result<(), AcquireError> {
        workspace.say(&format!("{MAKE} with {} ({})", python.executable.display(), python.version));
        let mut pauses = AGAIN.iter();
        loop {
            let mut command = Command::new(&python.executable).args(["-I", "-m", "venv"]);
            if !pip {
                command = command.arg("--without-pip");
            }
            let command =
                self.installer.clean(command.arg(workspace.prefix()), &InstallSpec::default(), workspace);
            let ran = workspace.run(MAKE, command).await?;
            if ran.success {
                return Ok(());
            }
            match pauses.next().filter(|_| is_mute(&ran.text)) {
                Some(pause) => tokio::time::sleep(*pause).await,
                None => return Err(judge_venv(&ran, python, workspace.prefix())),
            }
        }
    }
}

impl EnvBuilder for Pip {
    fn handles(&self, spec: &EnvSpec) -> bool {
        matches!(spec, EnvSpec::Pip { .. })
    }

    fn runs_packages(&self, _: &EnvSpec) -> bool {
        true
    }

    fn identity<'a>(&'a self, spec: &'a EnvSpec) -> BoxFuture<'a, Result<String, AcquireError>> {
        async move {
            let (python, requirements) = parts(spec)?;
            let python = self.interpreters.find(python).await?;
            let files = local_files(requirements);
            let (python, indexes) = (python.identity(), indexes(&self.config));
            Ok(format!("pip {VERSION}\n{python}\n{files}{indexes}{}", agent_jobfile::env::normalized(spec)))
        }
        .boxed()
    }

    fn build<'a>(
        &'a self,
        spec: &'a EnvSpec,
        workspace: &'a BuildWorkspace,
    ) -> BoxFuture<'a, Result<Built, AcquireError>> {
        async move {
            let (python, requirements) = parts(spec)?;
            let python = self.interpreters.find(python).await?;
            let uv = match requirements {
                [] => None,
                lines => self.installer.uv(lines, workspace).await,
            };
            let scratch = workspace.prefix().join("tmp");
            std::fs::create_dir(&scratch).map_err(AcquireError::io("create", &scratch))?;
            self.make(&python, uv.is_none(), workspace).await?;
            if let Some(uv) = &uv {
                self.installer.seed(uv, &python.stdlib, workspace).await?;
            }
            let mut lock = Lock::default();
            if !requirements.is_empty() {
                let wanted = InstallSpec { lines: requirements.to_vec(), ..InstallSpec::default() };
                lock.pip = self.installer.install(uv.as_ref(), &wanted, workspace).await?;
            } else {
                agent_spawn::remove_tree(&scratch).map_err(AcquireError::io("remove", &scratch))?;
            }
            let vars = [("VIRTUAL_ENV".to_owned(), workspace.prefix().display().to_string())];
            Ok(Built {
                vars: BTreeMap::from(vars),
                path_entries: vec![workspace.prefix().join("bin")],
                python_version: python.version.clone(),
                summary: summary(&python, requirements),
                packages: u32::try_from(dists::dists(workspace.prefix()).len()).unwrap_or(u32::MAX),
                lock: (!lock.pip.is_empty()).then(|| lock.to_string()),
                holds_files: true,
                compiled: uv.is_none(), // pip compiles what it installs
                ..Built::default()
            })
        }
        .boxed()
    }
}

/// A description for people: `python 3.11.7: numpy, scipy and 3 more`.
fn summary(python: &Interpreter, requirements: &[String]) -> String {
    let packages: Vec<&str> =
        requirements.iter().map(String::as_str).filter(|line| !line.starts_with('-')).collect();
    let listed = match packages.len() {
        0 => "no packages".to_owned(),
        count @ 1..=3 => packages[..count].join(", "),
        count => format!("{} and {} more", packages[..2].join(", "), count - 2),
    };
    format!("python {}: {listed}", python.version)
}

fn parts(spec: &EnvSpec) -> Result<(&str, &[String]), AcquireError> {
    match spec {
        EnvSpec::Pip { python, requirements } => Ok((python, requirements)),
        other => Err(AcquireError::Unsupported { kind: other.kind() }),
    }
}

/// `venv` hides the output of its `ensurepip`, which may lack its wheels for good, or a thread for a moment.
fn is_mute(text: &str) -> bool {
    text.contains("ensurepip") && (text.contains("returned non-zero") || text.contains("died with"))
}

/// Why a virtual environment was not made.
fn judge_venv(ran: &Ran, python: &Interpreter, prefix: &Path) -> AcquireError {
    let says = |text| ran.text.contains(text);
    if agent_fs::says_full(&ran.text) {
        return AcquireError::DiskFull { path: prefix.to_owned() };
    }
    if let Some(lack) = ran.lack(MAKE) {
        return lack;
    }
    // Distributions leave out `ensurepip`, or `venv`, or the wheels that `ensurepip` installs.
    if says("No module named") || says("ensurepip") {
        let package = python.venv_package();
        return AcquireError::VenvMissing { python: python.executable.clone(), package };
    }
    AcquireError::Failed { step: MAKE, detail: ran.tail() }
}
