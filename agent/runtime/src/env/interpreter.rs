//! Finds the file that the name of a Python stands for, and the properties of that interpreter.
//!
//! A name may lead to a script of a version manager, which takes a tenth of a second to find the real file; so it is
//! asked once, and again only after a change of a file that could change its answer. The answers are kept across
//! restarts in `ROOT/interpreters.json`; without that file everything is asked again.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_command::{Command, CommandError};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::build_workspace::Deaths;
use super::{AcquireError, EnvConfig};

/// How long an interpreter may take to answer, on a machine that is busy with other jobs.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

const QUESTION: &str = "import json, sys, sysconfig
print(json.dumps(dict(
    executable=sys.executable, version='%d.%d.%d' % sys.version_info[:3], prefix=sys.prefix,
    base_prefix=sys.base_prefix, stdlib=sysconfig.get_path('stdlib'), implementation=sys.implementation.name, platform=sysconfig.get_platform())))";

/// The properties that an interpreter reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Interpreter {
    /// The real file, behind wrappers of version managers.
    pub(super) executable: PathBuf,
    /// For example `3.10.12`.
    pub(super) version: String,
    /// Where its packages are.
    pub(super) prefix: PathBuf,
    /// Where its library is; differs from the prefix in a virtual environment.
    pub(super) base_prefix: PathBuf,
    /// Where its own modules are.
    #[serde(default)]
    pub(super) stdlib: PathBuf,
    implementation: String,
    platform: String,
}

impl Interpreter {
    /// Its part of the identity of an environment.
    pub(super) fn identity(&self) -> String {
        let Interpreter { executable, version, prefix, implementation, platform, .. } = self;
        format!("{} {} {implementation} {version} {platform}", executable.display(), prefix.display())
    }

    /// The package of Debian and Ubuntu that enables virtual environments for it.
    pub(super) fn venv_package(&self) -> String {
        let minor: Vec<&str> = self.version.splitn(3, '.').take(2).collect();
        format!("python{}-venv", minor.join("."))
    }
}

/// Identifies a file and its version: path, device, inode, modification time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Known {
    stamps: Vec<Stamp>,
    interpreter: Interpreter,
}

impl Known {
    fn still_holds(&self) -> bool {
        still_hold(&self.stamps)
    }
}

/// The known answers, as kept for the next start of the daemon.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Saved {
    /// A digest of what every answer depends on: the search path, the variables, and the user.
    asked_with: String,
    known: BTreeMap<String, Known>,
    /// Names whose files do not work.
    broken: BTreeMap<String, Vec<Stamp>>,
}

impl Saved {
    fn read(path: &Path, asked_with: String) -> Saved {
        let read = || -> Option<Saved> { serde_json::from_slice(&fs::read(path).ok()?).ok() };
        let found = read().filter(|saved| saved.asked_with == asked_with);
        found.unwrap_or_else(|| Saved { asked_with, ..Saved::default() })
    }

    fn write(&self, path: &Path) {
        let text = serde_json::to_vec(self).map_err(io::Error::other);
        if let Err(error) = text.and_then(|text| agent_fs::write_whole(path, &text)) {
            tracing::debug!(path = %path.display(), %error, "cannot note interpreters");
        }
    }
}

/// The interpreters of this node, each asked once.
pub(super) struct Interpreters {
    config: Arc<EnvConfig>,
    /// Held while a name is asked, so that each is asked once for all callers; other names are not delayed.
    asking: tokio::sync::Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    saved: Mutex<Saved>,
}

impl Interpreters {
    pub(super) fn new(config: Arc<EnvConfig>) -> Interpreters {
        let asker = config.builder.as_ref().map(|builder| builder.id);
        // Variables may be secret, such as a proxy's password, so only their digest is kept.
        let asked_with = format!("{} {:?} {asker:?}", config.path, config.vars_of_questions());
        let asked_with = agent_model::ids::hex(&Sha256::digest(asked_with));
        let saved = Mutex::new(Saved::read(&place(&config), asked_with));
        Interpreters { config, asking: tokio::sync::Mutex::default(), saved }
    }

    /// The names that jobs can use, best first: `python3`, `python`, then the versions, the newest first. Names that
    /// do not work are left out, and tried again only after their files have changed. They are asked one after the
    /// other, so that the one a job waits for is not slowed down by all others.
    pub(super) async fn all(&self) -> Vec<agent_model::node::Interpreter> {
        let path = self.config.path.clone();
        let names = agent_blocking::spawn_blocking(move || names(&path)).await.unwrap_or_default();
        let broken = self.saved.lock().broken.clone();
        let mut all = Vec::new();
        for name in names.iter().filter(|name| !is_broken(&broken, name)) {
            match self.find(name).await {
                Ok(found) => all.push(shown(name, &found)),
                Err(AcquireError::PythonUnusable { .. } | AcquireError::PythonMissing { .. }) => {
                    let stamps = candidates(name, &self.config.path).into_iter().map(Stamp::of).collect();
                    self.note(|saved| drop(saved.broken.insert(name.clone(), stamps)));
                }
                Err(error) => tracing::debug!(name, %error, "cannot ask interpreter now"),
            }
        }
        all
    }

    /// The same, if every answer is known from an earlier start; nothing is asked. Blocking.
    pub(super) fn all_known(&self) -> Option<Vec<agent_model::node::Interpreter>> {
        let saved = self.saved.lock();
        let known = |name: &String| {
            let known = saved.known.get(name).filter(|known| known.still_holds())?;
            Some(shown(name, &known.interpreter))
        };
        let names = names(&self.config.path);
        names.iter().filter(|name| !is_broken(&saved.broken, name)).map(known).collect()
    }

    /// The interpreter of this name or absolute path.
    pub(super) async fn find(&self, name: &str) -> Result<Interpreter, AcquireError> {
        let turn = self.asking.lock().await.entry(name.to_owned()).or_default().clone();
        let _turn = turn.lock().await;
        let known = self.saved.lock().known.get(name).cloned();
        if let Some(known) = known.filter(Known::still_holds) {
            return Ok(known.interpreter);
        }
        let mut refusal = AcquireError::PythonMissing { name: name.to_owned() };
        for candidate in candidates(name, &self.config.path) {
            match self.ask(&candidate).await {
                Ok(interpreter) => {
                    let stamps = stamps(&candidate, &interpreter);
                    let known = Known { stamps, interpreter: interpreter.clone() };
                    self.note(|saved| {
                        saved.broken.remove(name);
                        saved.known.insert(name.to_owned(), known);
                    });
                    return Ok(interpreter);
                }
                Err(AcquireError::PythonUnusable { path, detail }) => {
                    refusal = AcquireError::PythonUnusable { path, detail };
                }
                // Another interpreter in its place would give another environment, just for this moment.
                Err(other) => return Err(other),
            }
        }
        Err(refusal)
    }

    async fn ask(&self, path: &Path) -> Result<Interpreter, AcquireError> {
        const STEP: &str = "asking a Python what it is";
        let unusable = |detail| AcquireError::PythonUnusable { path: path.to_owned(), detail };
        let deaths = Deaths::watch();
        let command = Command::new(path).args(["-I", "-c", QUESTION]).stall(PATIENCE);
        let command = command.envs(self.config.vars_of_questions());
        let command = self.config.apart(command.envs([("PATH", &self.config.path)]));
        let output = command.capture().await.map_err(|error| match error {
            CommandError::Stalled { .. } => unusable(error.to_string()),
            CommandError::Spawn { ref source, .. } if is_of_the_file(source) => unusable(error.to_string()),
            error => AcquireError::command(STEP)(error),
        })?;
        deaths.check(STEP, output.status)?;
        let text = String::from_utf8_lossy(&output.text);
        let last = text.lines().last().unwrap_or_default();
        serde_json::from_str(last).map_err(|_| match last {
            "" => unusable(format!("it printed nothing and ended with {}", output.status)),
            said => unusable(said.to_owned()),
        })
    }

    /// Changes the known answers, here and for the next start. Blocks briefly.
    fn note(&self, change: impl FnOnce(&mut Saved)) {
        let mut saved = self.saved.lock();
        change(&mut saved);
        saved.write(&place(&self.config));
    }
}

fn shown(name: &str, found: &Interpreter) -> agent_model::node::Interpreter {
    agent_model::node::Interpreter { name: name.to_owned(), version: found.version.clone() }
}

/// Whether a name did not work, and its files are still the same.
fn is_broken(broken: &BTreeMap<String, Vec<Stamp>>, name: &str) -> bool {
    broken.get(name).is_some_and(|stamps| still_hold(stamps))
}

/// Whether a program could not be started because of its file, and not for lack of a resource of the machine.
fn is_of_the_file(error: &io::Error) -> bool {
    use rustix::io::Errno;
    const OF_THE_FILE: [Errno; 5] = [Errno::NOENT, Errno::ACCESS, Errno::NOEXEC, Errno::NOTDIR, Errno::LOOP];
    Errno::from_io_error(error).is_some_and(|error| OF_THE_FILE.contains(&error))
}

fn place(config: &EnvConfig) -> PathBuf {
    config.root.join("interpreters.json")
}

fn still_hold(stamps: &[Stamp]) -> bool {
    stamps.iter().all(Stamp::still_holds)
}

/// The names of interpreters with files on the search path.
fn names(search: &str) -> Vec<String> {
    let mut versions = std::collections::BTreeSet::new();
    for dir in search.split(':').filter(|dir| dir.starts_with('/')) {
        for entry in Path::new(dir).read_dir().into_iter().flatten().flatten() {
            let minor =
                entry.file_name().to_str().and_then(|name| name.strip_prefix("python3.")?.parse().ok());
            versions.extend(minor.filter(|_: &u32| is_executable(&entry.path())));
        }
    }
    let plain = ["python3", "python"].map(str::to_owned).into_iter();
    let plain = plain.filter(|name| !candidates(name, search).is_empty());
    plain.chain(versions.into_iter().rev().map(|minor| format!("python3.{minor}"))).collect()
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

/// The files whose change could change the answer: the file found, the file behind it, and, for a version manager's
/// script in its folder `shims`, the file that selects the version.
fn stamps(found: &Path, interpreter: &Interpreter) -> Vec<Stamp> {
    let mut stamps = vec![Stamp::of(found.to_owned()), Stamp::of(interpreter.executable.clone())];
    let manager = found.parent().filter(|folder| folder.ends_with("shims")).and_then(Path::parent);
    stamps
        .extend(manager.map(|manager| Stamp::of(manager.join("version"))).filter(|stamp| stamp.1.is_some()));
    stamps
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    /// A script that answers like an interpreter of this version, and counts how often it was asked.
    fn python(dir: &Path, name: &str, version: &str) -> PathBuf {
        let path = dir.join(name);
        let said = format!(
            r#"{{"executable":"{}","version":"{version}","prefix":"/p","base_prefix":"/p","implementation":"cpython","platform":"x"}}"#,
            path.display()
        );
        write(&path, &format!("echo asked >> {}.asked\necho '{said}'\n", path.display()));
        path
    }

    fn write(path: &Path, script: &str) {
        let mut file =
            fs::File::options().create(true).truncate(true).write(true).mode(0o755).open(path).unwrap();
        std::io::Write::write_all(&mut file, format!("#!/bin/sh\n{script}").as_bytes()).unwrap();
    }

    #[tokio::test]
    async fn test_interpreters_are_listed_by_name_and_asked_once() {
        let dir = tempfile::tempdir().unwrap();
        let first = python(dir.path(), "python3", "3.11.7");
        for (name, version) in [("python3.9", "3.9.2"), ("python3.11", "3.11.7")] {
            python(dir.path(), name, version);
        }
        write(&dir.path().join("python3.8"), "echo asked >> $0.asked; exit 1\n");
        for other in ["python3-config", "python3.11-config", "python2.7"] {
            write(&dir.path().join(other), "exit 1\n");
        }
        fs::write(dir.path().join("python3.10"), "no program").unwrap();
        let path = format!("{}:relative:/nowhere", dir.path().display());
        let root = dir.path().join("envs");
        fs::create_dir(&root).unwrap();
        let interpreters = Interpreters::new(Arc::new(EnvConfig::plain(root, path)));
        for _ in 0..2 {
            let all = interpreters.all().await;
            let all: Vec<_> = all.iter().map(|one| (one.name.as_str(), one.version.as_str())).collect();
            assert_eq!(all, [("python3", "3.11.7"), ("python3.11", "3.11.7"), ("python3.9", "3.9.2")]);
        }
        // It is not asked after a restart of the daemon either, unless another user is to ask.
        let next = Interpreters::new(interpreters.config.clone());
        assert_eq!(next.all_known().map(|all| all.len()), Some(3), "an earlier start asked them");
        assert_eq!(next.all().await.len(), 3);
        for name in ["python3", "python3.8", "python3.11"] {
            let asked = fs::read_to_string(dir.path().join(format!("{name}.asked"))).unwrap();
            assert_eq!(asked, "asked\n", "{name}");
        }
        fs::remove_file(first).unwrap();
        python(dir.path(), "python3.8", "3.8.10");
        let all: Vec<String> = interpreters.all().await.into_iter().map(|one| one.name).collect();
        assert_eq!(all, ["python3.11", "python3.9", "python3.8"]);
    }
}
