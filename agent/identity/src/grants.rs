//! The keys with which a controller proves to itself what it gave to its nodes.
//!
//! Owns one file: a key in each line, as 64 lower-case hexadecimal digits, the newest first. Grants are made with the newest and
//! checked with any; a line that an operator adds above the others takes effect at the next start. Hides the code (HMAC
//! with SHA-256). Invariants: the keys are in no database and no message; without the file all earlier grants prove
//! nothing, and nothing else is lost.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use agent_model::protocol::grant::{Claim, Grant};
use agent_model::{Digest, ids};
use ring::hmac;
use sha2::{Digest as _, Sha256};

/// The length of a key, in bytes.
const LENGTH: usize = 32;

/// Why there are no keys.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum GrantKeysError {
    #[error("cannot use {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("line {line} of {} is not a key of {} lower-case hexadecimal digits", path.display(), 2 * LENGTH)]
    Line {
        path: PathBuf,
        /// Counted from 1.
        line: usize,
    },
}

/// Why a grant proves nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum GrantRefused {
    #[error("it was made with the key {0}, which this controller does not have")]
    Key(String),
    #[error("it is of another order, another node, or another enrollment of this node")]
    Mac,
}

struct GrantKey {
    name: String,
    hmac: hmac::Key,
}

impl GrantKey {
    fn new(bytes: &[u8; LENGTH]) -> GrantKey {
        let name = ids::hex(&Sha256::digest(bytes)[..4]);
        GrantKey { name, hmac: hmac::Key::new(hmac::HMAC_SHA256, bytes) }
    }

    fn parse(line: &str) -> Option<GrantKey> {
        Some(GrantKey::new(&bytes_of(line)?))
    }
}

/// The bytes that 64 lower-case hexadecimal digits stand for.
fn bytes_of(text: &str) -> Option<[u8; LENGTH]> {
    Some(Digest::from_parts(text, 0).ok()?.hash)
}

/// See the module.
pub struct GrantKeys {
    /// The newest first; never empty.
    keys: Vec<GrantKey>,
}

impl GrantKeys {
    /// Reads the keys, or makes the first one where there is no file.
    pub fn open(path: &Path) -> Result<GrantKeys, GrantKeysError> {
        let failed = |source| GrantKeysError::File { path: path.to_owned(), source };
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mut key = [0; LENGTH];
                getrandom::fill(&mut key).map_err(|error| failed(io::Error::other(error.to_string())))?;
                let text = format!("{}\n", ids::hex(&key));
                agent_fs::write_durable(path, text.as_bytes()).map_err(failed)?;
                text
            }
            Err(source) => return Err(failed(source)),
        };
        let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
        let no_key = |line| GrantKeysError::Line { path: path.to_owned(), line };
        let keys: Vec<GrantKey> = lines
            .map(|(number, line)| GrantKey::parse(line.trim()).ok_or_else(|| no_key(number)))
            .collect::<Result<_, _>>()?;
        if keys.is_empty() { Err(no_key(1)) } else { Ok(GrantKeys { keys }) }
    }

    /// The grant for a claim.
    pub fn grant(&self, claim: &Claim<'_>) -> Grant {
        let key = &self.keys[0];
        let mac = ids::hex(hmac::sign(&key.hmac, &claim.content()).as_ref());
        Grant { key: key.name.clone(), mark: claim.mark.clone(), mac }
    }

    /// Fails unless the grant was made for this claim.
    pub fn check(&self, claim: &Claim<'_>, grant: &Grant) -> Result<(), GrantRefused> {
        let named = self.keys.iter().find(|key| key.name == grant.key);
        let key = named.ok_or_else(|| GrantRefused::Key(grant.key.clone()))?;
        let mac = bytes_of(&grant.mac).ok_or(GrantRefused::Mac)?;
        hmac::verify(&key.hmac, &claim.content(), &mac).map_err(|_| GrantRefused::Mac)
    }
}

impl fmt::Debug for GrantKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.keys.iter().map(|key| &key.name);
        f.debug_list().entries(names).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use agent_model::protocol::grant::PlacedAt;
    use agent_model::{NodeId, ReplicaId};

    use super::*;

    struct Facts {
        replica: ReplicaId,
        node: NodeId,
        mark: PlacedAt,
    }

    fn facts(replica: &str, node: &str, commit: u64) -> Facts {
        let mark = PlacedAt { life: "l".into(), commit };
        Facts { replica: replica.parse().unwrap(), node: node.parse().unwrap(), mark }
    }

    impl Facts {
        fn claim<'a>(&'a self, enrollment: &'a str, document: &'a str) -> Claim<'a> {
            Claim { replica: &self.replica, node: &self.node, enrollment, document, mark: &self.mark }
        }
    }

    #[test]
    fn test_a_grant_proves_what_it_was_made_for_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("grant.keys");
        let keys = GrantKeys::open(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let right = facts("a.1.0", "n", 3);
        let grant = keys.grant(&right.claim("e", "{}"));
        assert_eq!(keys.check(&right.claim("e", "{}"), &grant), Ok(()));
        for (facts, enrollment, document) in [
            (facts("a.2.0", "n", 3), "e", "{}"),
            (facts("a.1.1", "n", 3), "e", "{}"),
            (facts("a.1.0", "m", 3), "e", "{}"),
            (facts("a.1.0", "n", 4), "e", "{}"),
            (facts("a.1.0", "n", 3), "f", "{}"),
            (facts("a.1.0", "n", 3), "e", "{ }"),
        ] {
            assert_eq!(keys.check(&facts.claim(enrollment, document), &grant), Err(GrantRefused::Mac));
        }
        for mac in ["", "zz", &grant.mac[2..]] {
            let torn = Grant { mac: mac.to_owned(), ..grant.clone() };
            assert_eq!(keys.check(&right.claim("e", "{}"), &torn), Err(GrantRefused::Mac));
        }
    }

    #[test]
    fn test_old_keys_are_checked_new_ones_are_used_and_a_lost_file_proves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("grant.keys");
        let facts = facts("a.1.0", "n", 1);
        let claim = facts.claim("", "{}");
        let old = GrantKeys::open(&path).unwrap().grant(&claim);
        assert_eq!(GrantKeys::open(&path).unwrap().grant(&claim), old, "the key stays");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{}\n\n{text}", "ab".repeat(LENGTH))).unwrap();
        let both = GrantKeys::open(&path).unwrap();
        assert_eq!(both.check(&claim, &old), Ok(()));
        assert_ne!(both.grant(&claim).key, old.key);
        std::fs::remove_file(&path).unwrap();
        let lost = GrantKeys::open(&path).unwrap().check(&claim, &old);
        assert_eq!(lost, Err(GrantRefused::Key(old.key)));
    }

    #[test]
    fn test_a_file_that_holds_no_keys_is_refused_with_the_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("grant.keys");
        for (text, at) in [("", 1), ("\n\n", 1), ("ab\n", 1), (&format!("{}\nx\n", "ab".repeat(LENGTH)), 2)] {
            std::fs::write(&path, text).unwrap();
            let refused = GrantKeys::open(&path).unwrap_err();
            assert!(matches!(refused, GrantKeysError::Line { line, .. } if line == at), "{refused}");
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(GrantKeys::open(&path), Err(GrantKeysError::File { .. })));
    }
}
