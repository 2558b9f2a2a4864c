//! Data that jobs read and nobody sends: the file that says where it is, and how much of it is kept.

use std::path::PathBuf;

use super::read::Layers;
use super::{ConfigError, Flags, Setting, Variables, values};

/// Where a daemon of the machine looks for the file of data stores.
const SYSTEM_STORES: &str = "/etc/agentd/data.yaml";

/// Data that jobs read and nobody sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DataSettings {
    /// The file of data stores; it may be absent. It is a file of its own because it holds credentials.
    pub(crate) stores: PathBuf,
    /// How much of the disk all fetched data may take together, in bytes.
    pub(crate) size: u64,
}

impl DataSettings {
    /// Reads its keys; returns them with their settings.
    pub(super) fn resolve(
        flags: &Flags,
        variables: &Variables,
        layers: &Layers,
    ) -> Result<(DataSettings, Vec<Setting>), ConfigError> {
        let own = || Some(variables.config_home()?.join("agentd/data.yaml").display().to_string());
        let usual = || own().filter(|_| flags.user).unwrap_or_else(|| SYSTEM_STORES.to_owned());
        let (stores, size) = (layers.or("data_stores", usual), layers.get("data_size"));
        let settings = DataSettings {
            stores: stores.parse("an absolute path", values::absolute)?,
            size: size.parse("a size such as `50GiB`", values::size)?,
        };
        Ok((settings, vec![stores, size]))
    }
}
