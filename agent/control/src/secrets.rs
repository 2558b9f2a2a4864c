//! Secrets: values that only the jobs of their owner receive.
//!
//! Owns the directory `controller/secrets`: one directory for each owner, one file for each secret, which nobody but
//! the controller's own user can read. They are in no database, no backup of one, and no answer to a client.
//!
//! Invariant: a secret belongs to one owner for ever, and for everybody else it does not exist.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use agent_model::access::is_secret_name;
use agent_model::{Principal, Timestamp, ids};

/// The largest value, in bytes: it is sent in one line to the supervisor of a job, and is an environment variable.
pub(crate) const LARGEST: usize = 8 << 10;

/// The most bytes of the secrets of one job, with the names of their variables: they go to its node in one message, and
/// with its other variables (1 MiB at most) they must fit what Linux gives a program, 2 MiB.
const LARGEST_TOGETHER: usize = 256 << 10;

/// How many an owner may have.
const MOST: usize = 200;

/// Why a secret is not kept.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SecretError {
    #[error("`{0}` cannot be the name of a secret")]
    Name(String),
    #[error("its value is not text of at most {LARGEST} bytes, and not empty")]
    Value,
    #[error("you have {MOST} secrets already")]
    Many,
    #[error("the job's secrets have {0} bytes together, and at most {LARGEST_TOGETHER} are allowed")]
    Together(usize),
    #[error("you have no secret `{0}`")]
    Unknown(String),
    #[error("the secrets in {} cannot be used", path.display())]
    Store { path: PathBuf, source: io::Error },
}

/// The secrets of all owners. Clones share them. Every call blocks, briefly.
#[derive(Debug, Clone)]
pub(crate) struct Secrets {
    dir: PathBuf,
}

impl Secrets {
    /// Those below the controller's own directory.
    pub(crate) fn new(home: &Path) -> Secrets {
        Secrets { dir: home.join("secrets") }
    }

    fn of(&self, owner: &Principal) -> PathBuf {
        self.dir.join(ids::hex(owner.to_string().as_bytes()))
    }

    /// The file of a secret.
    fn at(&self, owner: &Principal, name: &str) -> Result<PathBuf, SecretError> {
        match is_secret_name(name) {
            true => Ok(self.of(owner).join(name)),
            false => Err(SecretError::Name(name.escape_debug().to_string())),
        }
    }

    /// Stores a value, in place of an earlier one; it is on disk when this returns.
    pub(crate) fn set(&self, owner: &Principal, name: &str, value: &[u8]) -> Result<(), SecretError> {
        let path = self.at(owner, name)?;
        if value.is_empty()
            || value.len() > LARGEST
            || value.contains(&0)
            || std::str::from_utf8(value).is_err()
        {
            return Err(SecretError::Value);
        }
        if !path.exists() && self.list(owner)?.len() >= MOST {
            return Err(SecretError::Many);
        }
        let dir = self.of(owner);
        let keep = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
            agent_fs::write_durable(&path, value)
        };
        keep().map_err(|source| SecretError::Store { path: dir.clone(), source })
    }

    /// The names of an owner's secrets, and when each was set.
    pub(crate) fn list(&self, owner: &Principal) -> Result<Vec<(String, Timestamp)>, SecretError> {
        let dir = self.of(owner);
        let fail = |source| SecretError::Store { path: dir.clone(), source };
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(fail)?,
        };
        let mut list = Vec::new();
        for entry in entries {
            let entry = entry.map_err(fail)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let set = entry.metadata().and_then(|seen| seen.modified()).unwrap_or(UNIX_EPOCH);
            let since = set.duration_since(UNIX_EPOCH).unwrap_or_default();
            list.push((name, Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))));
        }
        list.sort_unstable();
        Ok(list)
    }

    /// Removes one.
    pub(crate) fn remove(&self, owner: &Principal, name: &str) -> Result<(), SecretError> {
        let path = self.at(owner, name)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(SecretError::Unknown(name.to_owned()))
            }
            removed => removed.map_err(|source| SecretError::Store { path, source }),
        }
    }

    /// Removes all of an owner's.
    pub(crate) fn remove_all(&self, owner: &Principal) -> Result<(), SecretError> {
        let path = self.of(owner);
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(|source| SecretError::Store { path, source }),
        }
    }

    /// The value of one of an owner's secrets.
    pub(crate) fn read(&self, owner: &Principal, name: &str) -> Result<String, SecretError> {
        let path = self.at(owner, name)?;
        match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(SecretError::Unknown(name.to_owned()))
            }
            read => read.map_err(|source| SecretError::Store { path, source }),
        }
    }

    /// The values of the secrets that a job of this owner names, by variable. Asked when the job is submitted and when it
    /// starts, because a value may have been replaced by a longer one.
    pub(crate) fn of_job(
        &self,
        owner: &Principal,
        named: &BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, SecretError> {
        let mut values = BTreeMap::new();
        for (variable, name) in named {
            values.insert(variable.clone(), self.read(owner, name)?);
        }
        match values.iter().map(|(variable, value)| variable.len() + value.len()).sum() {
            bytes if bytes > LARGEST_TOGETHER => Err(SecretError::Together(bytes)),
            _ => Ok(values),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn test_a_secret_is_its_owners_and_nobody_elses() {
        let temp = tempfile::tempdir().unwrap();
        let secrets = Secrets::new(temp.path());
        let [ada, eve] = [1000, 1001].map(|uid| Principal::Local { uid });
        assert!(secrets.list(&ada).unwrap().is_empty());
        secrets.set(&ada, "wandb", b"one").unwrap();
        secrets.set(&ada, "wandb", b"two").unwrap();
        assert_eq!(secrets.read(&ada, "wandb").unwrap(), "two");
        let file = secrets.at(&ada, "wandb").unwrap();
        for (path, mode) in [(file.as_path(), 0o600), (file.parent().unwrap(), 0o700), (&secrets.dir, 0o700)]
        {
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, mode, "{}", path.display());
        }
        let list = secrets.list(&ada).unwrap();
        assert!(matches!(&list[..], [(name, set)] if name == "wandb" && set.0 > 0), "{list:?}");

        assert!(matches!(secrets.read(&eve, "wandb"), Err(SecretError::Unknown(_))));
        assert!(matches!(secrets.remove(&eve, "wandb"), Err(SecretError::Unknown(_))));
        assert!(secrets.list(&eve).unwrap().is_empty());
        for name in ["../../db", "", ".x", "a/b"] {
            assert!(matches!(secrets.read(&ada, name), Err(SecretError::Name(_))), "{name}");
            assert!(matches!(secrets.set(&ada, name, b"x"), Err(SecretError::Name(_))), "{name}");
        }
        let long = vec![b'x'; LARGEST + 1];
        for value in [&b""[..], b"a\0b", b"\xff", &long] {
            assert!(matches!(secrets.set(&ada, "v", value), Err(SecretError::Value)));
        }
        secrets.set(&ada, "v", &long[1..]).unwrap();
        secrets.remove(&ada, "wandb").unwrap();
        assert!(matches!(secrets.read(&ada, "wandb"), Err(SecretError::Unknown(_))));
        for number in 1..MOST {
            secrets.set(&ada, &format!("n{number}"), b"x").unwrap();
        }
        assert!(matches!(secrets.set(&ada, "more", b"x"), Err(SecretError::Many)));
        secrets.set(&ada, "v", b"y").unwrap();
    }

    #[test]
    fn test_the_secrets_of_one_job_have_a_limit_together() {
        let temp = tempfile::tempdir().unwrap();
        let (secrets, ada) = (Secrets::new(temp.path()), Principal::Local { uid: 1000 });
        let named = |count: usize| (0..count).map(|n| (format!("V{n:03}"), "large".to_owned())).collect();
        // One secret may be named many times, and each variable has a copy of it.
        secrets.set(&ada, "large", &[b'x'; LARGEST - 4]).unwrap();
        let most = LARGEST_TOGETHER / LARGEST;
        assert_eq!(secrets.of_job(&ada, &named(most)).unwrap().len(), most);
        // A longer value, set after the job was submitted, counts as it is.
        secrets.set(&ada, "large", &[b'x'; LARGEST]).unwrap();
        for count in [most, most + 1] {
            let refused = secrets.of_job(&ada, &named(count)).unwrap_err();
            assert!(
                matches!(refused, SecretError::Together(bytes) if bytes == count * (LARGEST + 4)),
                "{refused}"
            );
        }
        assert_eq!(secrets.of_job(&ada, &named(most - 1)).unwrap().len(), most - 1);
        assert!(matches!(
            secrets.of_job(&ada, &[("K".to_owned(), "none".to_owned())].into()),
            Err(SecretError::Unknown(_))
        ));
    }
}
