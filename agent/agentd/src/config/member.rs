//! The settings that follow from the identity of a machine that joined a controller.
//!
//! They are below all other layers: a key in the file, a variable or a flag wins. A name other than the one that the
//! controller knows is an error.

use std::io;
use std::path::{Path, PathBuf};

use agent_identity::Credentials;
use agent_model::Principal;

use super::read::Layers;
use super::{ConfigError, Origin, Setting, values};
use crate::cli::Flags;

/// The file of the identity.
pub(crate) fn identity_file(state_dir: &Path) -> PathBuf {
    state_dir.join("identity.json")
}

/// The controller and the name in the identity of a joined machine.
fn said(state_dir: &Path) -> io::Result<Option<(String, String)>> {
    let Some(credentials) = Credentials::read(&identity_file(state_dir))? else { return Ok(None) };
    let name = match credentials.certified().map_err(io::Error::other)?.subject.who {
        Principal::Node { name } => name.to_string(),
        who => return Err(io::Error::other(format!("it is the identity of {who}, and not of a node"))),
    };
    Ok(Some((credentials.controller, name)))
}

/// See the module; empty for a machine of its own.
pub(super) struct Member {
    path: PathBuf,
    controller: Option<String>,
    name: Option<String>,
}

impl Member {
    /// Reads it from the disk; a machine that is about to join counts as joined.
    pub(super) fn read(flags: &Flags, state_dir: &Path) -> Result<Member, ConfigError> {
        let path = identity_file(state_dir);
        let said = match flags.without_identity {
            true => None,
            false => said(state_dir).map_err(|source| ConfigError::Read { path: path.clone(), source })?,
        };
        let (controller, name) = said.unzip();
        let joining =
            flags.controller.as_deref().map(|controller| controller.trim_end_matches('/').to_owned());
        Ok(Member { path, controller: joining.or(controller), name })
    }

    fn setting(&self, key: &'static str, value: &str) -> Setting {
        Setting { key, value: value.to_owned(), origin: Origin::Joined(self.path.clone()) }
    }

    /// Its controller, if that is remote.
    pub(super) fn controller(&self) -> Option<Setting> {
        self.controller.as_deref().map(|controller| self.setting("controller", controller))
    }

    /// A joined machine has only the role `node`, unless the key is set.
    pub(super) fn roles(&self, layers: &Layers) -> Setting {
        match (layers.said("roles"), &self.controller) {
            (None, Some(_)) => self.setting("roles", "node"),
            _ => layers.get("roles"),
        }
    }

    /// The controller accepts the node only under the name in its certificate.
    pub(super) fn name(&self, layers: &Layers) -> Result<Setting, ConfigError> {
        let Some(name) = &self.name else { return Ok(layers.or("node_name", values::host_name)) };
        match layers.said("node_name") {
            Some(said) if said.value != *name => Err(said.wrong(format!(
                "this machine joined as `{name}`; to give it another name: `agentd leave`, then join again"
            ))),
            _ => Ok(self.setting("node_name", name)),
        }
    }
}
