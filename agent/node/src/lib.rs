//! Knows this machine. (Signatures first; the bodies follow.)

use std::path::{Path, PathBuf};

use agent_model::node::{Inventory, Load};

/// What the probe needs to know.
#[derive(Debug, Clone)]
pub struct ProbeConfig {
    /// The state directory of the daemon, whose disk is looked at.
    pub state_dir: PathBuf,
    /// How many replicas run at a time.
    pub slots: u32,
    /// Where interpreters are looked for, as in `PATH`.
    pub path: String,
}

/// Looks at this machine. Blocking, but never for longer than a second; starts no process.
pub fn probe(config: &ProbeConfig) -> Inventory {
    Inventory { slots: config.slots, ..Inventory::default() }
}

/// The load now.
pub fn load(state_dir: &Path) -> Load {
    let _ = state_dir;
    Load::default()
}

/// What names this boot: it changes when every process of the machine, or of the container, was ended.
pub fn boot_id() -> Result<String, BootIdError> {
    Err(BootIdError { source: std::io::ErrorKind::Unsupported.into() })
}

/// The kernel does not tell which boot this is.
#[derive(Debug, thiserror::Error)]
#[error("the kernel does not tell which boot this is")]
pub struct BootIdError {
    #[source]
    source: std::io::Error,
}
