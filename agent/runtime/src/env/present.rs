//! Whether an interpreter of the host has what a job lists. Nothing is installed or changed.
//!
//! The interpreter itself is asked, since only it knows where it looks for packages. It is asked again when one of
//! those directories has changed.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_command::Command;
use serde::Deserialize;

use super::interpreter::{Interpreter, PATIENCE};
use super::{AcquireError, EnvConfig};

/// Reads requirements, one per line. Without the library that parses them only names are looked up.
const QUESTION: &str = r##"
import json, re, sys
try:
    from importlib import metadata
except ImportError:
    metadata = None
try:
    from packaging.requirements import Requirement
except Exception:
    try:
        from pip._vendor.packaging.requirements import Requirement
    except Exception:
        Requirement = None

def version(name):
    if metadata is None:
        import pkg_resources
        try:
            return pkg_resources.get_distribution(name).version
        except Exception:
            return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

missing = []
for line in sys.stdin.read().splitlines():
    line = line.split(" --")[0].strip()
    if not line or line.startswith(("-", "#")):
        continue
    wanted = None
    if Requirement is not None:
        try:
            wanted = Requirement(line)
        except Exception:
            pass
    if wanted is not None and wanted.marker is not None and not wanted.marker.evaluate():
        continue
    name = wanted.name if wanted is not None else re.split(r"[^A-Za-z0-9._-]", line)[0]
    if not name:
        continue
    found = version(name)
    if found is None:
        missing.append(line)
    elif wanted is not None and not wanted.specifier.contains(found, prereleases=True):
        missing.append("%s (%s is installed)" % (line, found))
print(json.dumps(dict(missing=missing, path=[part for part in sys.path if part])))
"##;

#[derive(Debug, Clone, Deserialize)]
struct ProbeAnswer {
    missing: Vec<String>,
    path: Vec<PathBuf>,
}

/// A directory, and when it was changed.
type Stamp = (PathBuf, Option<(i64, i64)>);

fn stamp(dir: &Path) -> Stamp {
    let seen = fs::metadata(dir).ok().map(|seen| (seen.mtime(), seen.mtime_nsec()));
    (dir.to_owned(), seen)
}

/// The answers by question; each is valid as long as the directories do not change.
type Known = HashMap<(PathBuf, Vec<String>), (Vec<Stamp>, Vec<String>)>;

/// How many answers are remembered.
const REMEMBERED: usize = 256;

/// Asks interpreters.
pub(super) struct Present {
    config: Arc<EnvConfig>,
    known: tokio::sync::Mutex<Known>,
}

impl Present {
    pub(super) fn new(config: Arc<EnvConfig>) -> Present {
        Present { config, known: tokio::sync::Mutex::default() }
    }

    /// Reports everything that the interpreter lacks, at once.
    pub(super) async fn check(
        &self,
        python: &Interpreter,
        requirements: &[String],
    ) -> Result<(), AcquireError> {
        if requirements.is_empty() {
            return Ok(());
        }
        let key = (python.executable.clone(), requirements.to_vec());
        let known = self.known.lock().await.get(&key).cloned();
        let current = known.filter(|(stamps, _)| stamps.iter().all(|then| *then == stamp(&then.0)));
        let missing = match current {
            Some((_, missing)) => missing,
            None => {
                let answer = self.ask(python, requirements).await?;
                let stamps = answer.path.iter().map(|dir| stamp(dir)).collect();
                let mut known = self.known.lock().await;
                if known.len() >= REMEMBERED {
                    known.clear();
                }
                known.insert(key, (stamps, answer.missing.clone()));
                answer.missing
            }
        };
        match missing.is_empty() {
            true => Ok(()),
            false => Err(AcquireError::Lacks { python: python.executable.clone(), missing }),
        }
    }

    async fn ask(&self, python: &Interpreter, requirements: &[String]) -> Result<ProbeAnswer, AcquireError> {
        const STEP: &str = "asking the interpreter for its packages";
        // Not through a link to it, which in a virtual environment would find other packages.
        let command = Command::new(&python.executable).args(["-I", "-c", QUESTION]).stall(PATIENCE);
        let command = command.envs([("PATH", &self.config.path)]);
        let command = self.config.apart(command.input(requirements.join("\n")));
        let (mut answer, mut complaint) = (Vec::new(), Vec::new());
        let status = command
            .talk(|bytes| answer.extend_from_slice(bytes), |bytes| complaint.extend_from_slice(bytes))
            .await
            .map_err(AcquireError::command(STEP))?;
        let answer = String::from_utf8_lossy(&answer);
        serde_json::from_str(answer.lines().last().unwrap_or_default()).map_err(|_| {
            let said = String::from_utf8_lossy(&complaint);
            let detail = said.lines().last().map_or_else(|| format!("it ended with {status}"), str::to_owned);
            AcquireError::Failed { step: STEP, detail }
        })
    }
}
