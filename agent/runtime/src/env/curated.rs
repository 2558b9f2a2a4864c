//! Environments that jobs name instead of defining them.
//!
//! A name resolves to a file in a directory of the node, else to a definition that comes with the program. The cache
//! key is that of the definition, so two names of one definition are one environment.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use agent_jobfile::{EnvironmentRef, condafile, environment_document, requirement};
use agent_model::{EnvSpec, curated};

use super::{AcquireError, EnvConfig};

/// The definitions of this node.
pub(super) struct Curated {
    dir: Option<PathBuf>,
    builtin: &'static [(&'static str, &'static str)],
}

impl Curated {
    pub(super) fn new(config: &EnvConfig) -> Curated {
        Curated { dir: config.curated.clone(), builtin: config.curated_builtin }
    }

    /// The specification that a name stands for. Reads a small file, so a change takes effect at once.
    pub(super) fn resolve(&self, reference: &str) -> Result<EnvSpec, AcquireError> {
        let unknown = || AcquireError::NameUnknown { reference: reference.to_owned(), known: self.known() };
        let name = curated::name(reference).ok_or_else(unknown)?;
        if let Some(dir) = &self.dir {
            let path = dir.join(format!("{name}.yml"));
            match fs::read_to_string(&path) {
                Ok(text) => return specification(&text, &path.display().to_string(), Some(dir)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(AcquireError::io("read", &path)(error)),
            }
        }
        let builtin = self.builtin.iter().find(|(known, _)| *known == name);
        let (_, text) = builtin.ok_or_else(unknown)?;
        specification(text, &format!("{name}.yml"), None)
    }

    /// The defined names, sorted.
    fn known(&self) -> Vec<String> {
        let entries = self.dir.iter().filter_map(|dir| dir.read_dir().ok()).flatten().flatten();
        let files =
            entries.filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".yml")?.to_owned()));
        let names = files.chain(self.builtin.iter().map(|(name, _)| (*name).to_owned()));
        names.collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// The environment of a definition. `dir` has the files that it names.
fn specification(text: &str, file: &str, dir: Option<&Path>) -> Result<EnvSpec, AcquireError> {
    let refuse = |detail: String| AcquireError::Refused {
        at: vec![file.to_owned()],
        detail,
        hint: Some("the operator of the node corrects that definition".to_owned()),
    };
    let (environment, _) = environment_document(text).map_err(|fault| refuse(told(&fault)))?;
    let read = |path: &str| {
        let dir = dir.ok_or_else(|| refuse(format!("it names a file, `{path}`, and has none beside it")))?;
        let path = dir.join(path);
        fs::read_to_string(&path).map_err(AcquireError::io("read", &path))
    };
    let spec = match environment {
        EnvironmentRef::Spec(EnvSpec::Conda { document, lock, .. }) => {
            EnvSpec::Conda { file: file.to_owned(), document, lock }
        }
        EnvironmentRef::Spec(spec) => spec,
        EnvironmentRef::CondaFile { image: None, path, lock } => {
            let lock = lock.map(|lock| read(&lock)).transpose()?;
            EnvSpec::Conda { document: read(&path)?, file: path, lock }
        }
        EnvironmentRef::CondaLock { document, path } => {
            let lock = Some(read(&path)?);
            EnvSpec::Conda { file: file.to_owned(), document: document.unwrap_or_default(), lock }
        }
        EnvironmentRef::Requirements { python, path, user_managed } => {
            let lines = requirement::logical_lines(&read(&path)?).into_iter();
            let requirements = lines.map(|(_, line)| line).collect();
            match user_managed {
                true => EnvSpec::Host { python, requirements },
                false => EnvSpec::Pip { python, requirements },
            }
        }
        _ => return Err(refuse("it does not say what is installed".to_owned())),
    };
    match &spec {
        EnvSpec::Named { .. } => {
            Err(refuse("it names another environment instead of defining one".to_owned()))
        }
        EnvSpec::Conda { document, lock: None, .. } => {
            condafile::parse(document).map(|_| ()).map_err(|fault| refuse(told(&fault)))?;
            Ok(spec)
        }
        _ => Ok(spec),
    }
}

fn told(fault: &agent_model::fault::Fault) -> String {
    std::iter::once(&fault.what).chain(&fault.why).cloned().collect::<Vec<_>>().join(": ")
}
