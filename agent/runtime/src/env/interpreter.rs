//! Which file is behind the name of a Python, and what does it say about itself?
//!
//! A name may lead to a script of a version manager, which takes a tenth of a second to find the real file; so it
//! is asked once, and again only when one of the files that could change its answer changed.

use std::collections::HashMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;

use super::{AcquireError, EnvConfig};
use crate::exec::Command;

/// How long an interpreter may take to say what it is.
const PATIENCE: Duration = Duration::from_secs(10);

const QUESTION: &str = "import json, sys, sysconfig
print(json.dumps(dict(
    executable=sys.executable, version='%d.%d.%d' % sys.version_info[:3], prefix=sys.prefix,
    base_prefix=sys.base_prefix, implementation=sys.implementation.name, platform=sysconfig.get_platform())))";

/// What an interpreter says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Interpreter {
    /// The real file, behind wrappers of version managers.
    pub(super) executable: PathBuf,
    /// For example `3.10.12`.
    pub(super) version: String,
    /// Where its packages are.
    pub(super) prefix: PathBuf,
    /// Where its library is; differs from the prefix in a virtual environment.
    pub(super) base_prefix: PathBuf,
    implementation: String,
    platform: String,
}

impl Interpreter {
    /// The part it has in the identity of an environment.
    pub(super) fn identity(&self) -> String {
        let Interpreter { executable, version, prefix, implementation, platform, .. } = self;
        format!("{} {} {implementation} {version} {platform}", executable.display(), prefix.display())
    }

    /// The package of Debian and Ubuntu that lets it make virtual environments.
    pub(super) fn venv_package(&self) -> String {
        let minor: Vec<&str> = self.version.splitn(3, '.').take(2).collect();
        format!("python{}-venv", minor.join("."))
    }
}

/// Which file it is, and whether it changed: path, device, inode, modification time.
#[derive(Debug, PartialEq, Eq)]
struct Stamp(PathBuf, Option<(u64, u64, i64, i64)>);

impl Stamp {
    fn of(path: PathBuf) -> Stamp {
        let seen = path.metadata().ok();
        let seen = seen.map(|seen| (seen.dev(), seen.ino(), seen.mtime(), seen.mtime_nsec()));
        Stamp(path, seen)
    }

    fn still_holds(&self) -> bool {
        self.1.is_some() && *self == Stamp::of(self.0.clone())
    }
}

struct Known {
    stamps: Vec<Stamp>,
    interpreter: Arc<Interpreter>,
}

/// The interpreters of this node, each asked once.
pub(super) struct Interpreters {
    config: Arc<EnvConfig>,
    known: tokio::sync::Mutex<HashMap<String, Known>>,
}

impl Interpreters {
    pub(super) fn new(config: Arc<EnvConfig>) -> Interpreters {
        Interpreters { config, known: tokio::sync::Mutex::default() }
    }

    /// The interpreter of this name or absolute path.
    pub(super) async fn find(&self, name: &str) -> Result<Arc<Interpreter>, AcquireError> {
        let mut known = self.known.lock().await;
        if let Some(found) = known.get(name)
            && found.stamps.iter().all(Stamp::still_holds)
        {
            return Ok(found.interpreter.clone());
        }
        let mut refusal = AcquireError::PythonMissing { name: name.to_owned() };
        for candidate in candidates(name, &self.config.path) {
            match self.ask(&candidate).await {
                Ok(interpreter) => {
                    let interpreter = Arc::new(interpreter);
                    let stamps = stamps(&candidate, &interpreter);
                    known.insert(name.to_owned(), Known { stamps, interpreter: interpreter.clone() });
                    return Ok(interpreter);
                }
                Err(detail) => refusal = AcquireError::PythonUnusable { path: candidate, detail },
            }
        }
        Err(refusal)
    }

    async fn ask(&self, path: &Path) -> Result<Interpreter, String> {
        let command = Command::new(path).args(["-I", "-c", QUESTION]).stall(PATIENCE);
        let command =
            command.cwd(&self.config.root).envs(&self.config.vars).envs([("PATH", &self.config.path)]);
        let output = command.capture().await.map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&output.text);
        let last = text.lines().last().unwrap_or_default();
        serde_json::from_str(last).map_err(|_| match last {
            "" => format!("it printed nothing and ended with {}", output.status),
            said => said.to_owned(),
        })
    }
}

/// The files a name may mean, best first.
fn candidates(name: &str, search: &str) -> Vec<PathBuf> {
    let places: Vec<PathBuf> = if name.starts_with('/') {
        vec![PathBuf::from(name)]
    } else if name.contains('/') {
        Vec::new() // relative to what?
    } else {
        search.split(':').filter(|dir| dir.starts_with('/')).map(|dir| Path::new(dir).join(name)).collect()
    };
    places.into_iter().filter(|path| is_executable(path)).collect()
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|seen| seen.is_file() && seen.permissions().mode() & 0o111 != 0)
}

/// What could change the answer: the file found, the file behind it, and, for the script of a version manager
/// in its folder `shims`, the file that chooses the version.
fn stamps(found: &Path, interpreter: &Interpreter) -> Vec<Stamp> {
    let mut stamps = vec![Stamp::of(found.to_owned()), Stamp::of(interpreter.executable.clone())];
    let manager = found.parent().filter(|folder| folder.ends_with("shims")).and_then(Path::parent);
    stamps
        .extend(manager.map(|manager| Stamp::of(manager.join("version"))).filter(|stamp| stamp.1.is_some()));
    stamps
}
