//! The controllers that a user has logged in to, by names that the user chose.
//!
//! One file of mode 0600 in the user's configuration directory, replaced atomically. Other files there are not
//! touched.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Credentials;

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contexts {
    version: u32,
    /// The one that is used when none is named.
    #[serde(default)]
    pub current: Option<String>,
    /// The user's credentials for each.
    #[serde(default)]
    pub contexts: BTreeMap<String, Credentials>,
}

impl Contexts {
    /// Those in a file; none if there is no file.
    pub fn read(path: &Path) -> io::Result<Contexts> {
        match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::other),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Ok(Contexts { version: 1, ..Contexts::default() })
            }
            Err(error) => Err(error),
        }
    }

    /// Replaces the file; it is on disk when this returns.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        if let Some(parent) = path.parent() {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
        }
        agent_fs::write_durable(path, &serde_json::to_vec_pretty(self).map_err(io::Error::other)?)
    }
}
