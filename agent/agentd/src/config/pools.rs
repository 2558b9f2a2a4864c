//! What makes the machines of pools: the file that says what there is, and where the programs are.

use std::path::{Path, PathBuf};

use super::read::Layers;
use super::{ConfigError, Flags, Setting, Variables, values};

/// Where a daemon of the machine looks for the file of providers.
const SYSTEM_PROVIDERS: &str = "/etc/agentd/providers.yaml";

/// What makes the machines of pools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PoolSettings {
    /// The file of providers; it may be absent. It is a file of its own because it may hold credentials.
    pub(crate) providers: PathBuf,
    /// The directory of the programs that are named by a word.
    pub(crate) programs: PathBuf,
}

impl PoolSettings {
    /// Reads its keys; returns them with their settings.
    pub(super) fn resolve(
        flags: &Flags,
        variables: &Variables,
        layers: &Layers,
    ) -> Result<(PoolSettings, Vec<Setting>), ConfigError> {
        let own = || Some(variables.config_home()?.join("agentd/providers.yaml").display().to_string());
        let usual = || own().filter(|_| flags.user).unwrap_or_else(|| SYSTEM_PROVIDERS.to_owned());
        let beside = || {
            let own = std::env::current_exe().unwrap_or_default();
            own.parent().unwrap_or(Path::new("/usr/lib/agentd")).join("providers").display().to_string()
        };
        let (providers, programs) = (layers.or("providers", usual), layers.or("provider_programs", beside));
        let settings = PoolSettings {
            providers: providers.parse("an absolute path", values::absolute)?,
            programs: programs.parse("an absolute path", values::absolute)?,
        };
        Ok((settings, vec![providers, programs]))
    }
}
