//! Files of an operator that the controller reads: that of providers, when it starts, and the names in that of data stores.

use std::collections::BTreeMap;
use std::io;

use agent_control::MappedNames;
use agent_control::provider::{self, Provider};
use agent_jobfile::yaml;

use super::StartError;
use crate::config::{Config, PoolSettings};
use crate::worker::data::stores::Stores;

/// What makes the machines of pools; nothing without the file.
pub(super) fn read(config: &Config) -> Result<BTreeMap<String, Provider>, StartError> {
    let PoolSettings { providers: path, programs } = &config.pools;
    let wrong = |what: String| StartError::Providers { path: path.clone(), what };
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(wrong(error.to_string())),
    };
    let read = yaml::parse(&text).and_then(provider::read_providers).map_err(|at| wrong(at.to_string()))?;
    let own = config.state_dir.join("controller/providers");
    let provider = |(name, settings): (String, _)| {
        let made = Provider::new(&name, settings, programs, &own.join(&name));
        (name, made)
    };
    Ok(read.into_iter().map(provider).collect())
}

/// What the file of data stores says at the time. A file that cannot be read says nothing here; jobs that need it say why.
pub(super) fn mapped_names(config: &Config) -> MappedNames {
    let file = config.data.stores.clone();
    MappedNames::new(move || Stores::read(&file).map(|stores| stores.names()).unwrap_or_default())
}
