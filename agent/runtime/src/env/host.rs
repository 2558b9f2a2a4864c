//! An interpreter of the host, with the packages it has.
//!
//! The environment is a directory with `python` and `python3`, whatever their names on the host, so that
//! `python train.py` works everywhere. Nothing of the host is changed.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use agent_command::Command;
use agent_model::EnvSpec;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::interpreter::{Interpreter, Interpreters};
use super::present::Present;
use super::{AcquireError, BuildWorkspace, Built, EnvBuilder, EnvConfig};

/// Increased when the same identity would be built differently.
const VERSION: u32 = 2;

/// Finds interpreters of the host.
pub(super) struct Host {
    interpreters: Arc<Interpreters>,
    present: Present,
}

impl Host {
    pub(super) fn new(config: Arc<EnvConfig>, interpreters: Arc<Interpreters>) -> Host {
        Host { interpreters, present: Present::new(config) }
    }

    /// The interpreter, after checking that it has what the job lists.
    async fn interpreter(&self, spec: &EnvSpec) -> Result<Interpreter, AcquireError> {
        let EnvSpec::Host { python, requirements } = spec else {
            return Err(AcquireError::Unsupported { kind: spec.kind() });
        };
        let python = self.interpreters.find(python).await?;
        self.present.check(&python, requirements).await?;
        Ok(python)
    }
}

impl EnvBuilder for Host {
    fn handles(&self, spec: &EnvSpec) -> bool {
        matches!(spec, EnvSpec::Host { .. })
    }

    fn identity<'a>(&'a self, spec: &'a EnvSpec) -> BoxFuture<'a, Result<String, AcquireError>> {
        async move { Ok(format!("host {VERSION}\n{}", self.interpreter(spec).await?.identity())) }.boxed()
    }

    fn build<'a>(
        &'a self,
        spec: &'a EnvSpec,
        workspace: &'a BuildWorkspace,
    ) -> BoxFuture<'a, Result<Built, AcquireError>> {
        async move {
            let python = self.interpreter(spec).await?;
            workspace.say(&format!("using {} ({})", python.executable.display(), python.version));
            let built = Built {
                vars: BTreeMap::new(),
                path_entries: vec![workspace.prefix().join("bin")],
                python_version: python.version.clone(),
                summary: format!("{} {}", python.executable.display(), python.version),
                elsewhere_prefix: Some(python.prefix.clone()),
                ..Built::default()
            };
            if python.prefix != python.base_prefix {
                return Ok(in_place(&python, built));
            }
            link(&python, &built.path_entries[0])?;
            check(&python, workspace).await?;
            Ok(built)
        }
        .boxed()
    }
}

/// A virtual environment works only from its own directory.
fn in_place(python: &Interpreter, built: Built) -> Built {
    let vars = [("VIRTUAL_ENV".to_owned(), python.prefix.display().to_string())];
    Built { vars: vars.into(), path_entries: vec![python.prefix.join("bin")], ..built }
}

fn link(python: &Interpreter, bin: &Path) -> Result<(), AcquireError> {
    std::fs::create_dir(bin).map_err(AcquireError::io("create", bin))?;
    for name in ["python", "python3"] {
        let link = bin.join(name);
        symlink(&python.executable, &link).map_err(AcquireError::io("create", &link))?;
    }
    Ok(())
}

/// An interpreter finds its packages from its start path; this checks that the link does not mislead it.
async fn check(python: &Interpreter, workspace: &BuildWorkspace) -> Result<(), AcquireError> {
    const STEP: &str = "starting the interpreter through a link";
    let question = "import sys; sys.exit(None if sys.prefix == sys.argv[1] else sys.prefix)";
    let command =
        Command::new(workspace.prefix().join("bin/python")).args(["-I", "-c", question]).arg(&python.prefix);
    let ran = workspace.run(STEP, workspace.apart(command)).await?;
    if ran.success { Ok(()) } else { Err(AcquireError::Failed { step: STEP, detail: ran.tail() }) }
}
