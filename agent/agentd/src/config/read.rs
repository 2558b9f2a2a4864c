//! The layers of the configuration: reads each, and the highest one wins.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use agent_jobfile::nearest;
use agent_jobfile::yaml::{self, At, Node, Value};

use super::{ConfigError, KEYS, Origin, SYSTEM_FILE, Setting, Variables};
use crate::cli::Flags;

/// The value of each key that is set, of the highest layer only.
pub(super) struct Layers(BTreeMap<&'static str, (String, Origin)>);

impl Layers {
    /// Reads all layers, lowest first, so that a higher one replaces the values of a lower one.
    pub(super) fn read(flags: &Flags, variables: &Variables) -> Result<Layers, ConfigError> {
        let mut layers = Layers(BTreeMap::new());
        if let Some((path, text)) = file(flags, variables)? {
            layers.add_file(&path, &text).map_err(|at| ConfigError::File { path, at })?;
        }
        for key in KEYS {
            let name = format!("AGENTD_{}", key.name.to_ascii_uppercase());
            if let Some(value) = variables.get(&name) {
                layers.0.insert(key.name, (value, Origin::Variable(name)));
            }
        }
        let on_command_line = [
            ("state_dir", "--state-dir", &flags.state_dir),
            ("socket", "--socket", &flags.socket),
            ("slots", "--slots", &flags.slots),
        ];
        for (key, flag, value) in on_command_line {
            if let Some(value) = value {
                layers.0.insert(key, (value.clone(), Origin::Flag(flag)));
            }
        }
        Ok(layers)
    }

    fn add_file(&mut self, path: &Path, text: &str) -> Result<(), At> {
        let document = yaml::parse(text)?;
        if document.value == Value::Null {
            return Ok(());
        }
        let mut entries = document.map()?;
        for key in KEYS {
            if let Some(node) = entries.take(key.name) {
                let origin = Origin::File { path: path.to_owned(), place: node.place };
                self.0.insert(key.name, (scalar(&node)?, origin));
            }
        }
        match entries.rest().into_iter().find(|(key, _)| KEYS.iter().all(|known| known.name != key.text)) {
            Some((key, _)) => Err(At { place: key.place, message: unknown(&key.text) }),
            None => Ok(()),
        }
    }

    /// The value of `key`, if it is set.
    pub(super) fn said(&self, key: &'static str) -> Option<Setting> {
        let (value, origin) = self.0.get(key)?;
        Some(Setting { key, value: value.clone(), origin: origin.clone() })
    }

    /// The value of `key`, or else a default that depends on the machine.
    pub(super) fn or(&self, key: &'static str, default: impl FnOnce() -> String) -> Setting {
        self.said(key).unwrap_or_else(|| Setting { key, value: default(), origin: Origin::Default })
    }

    /// The value of `key`, or else its default.
    pub(super) fn get(&self, key: &'static str) -> Setting {
        let fixed = || KEYS.iter().find(|known| known.name == key).map_or("", |known| known.default);
        self.or(key, || fixed().to_owned())
    }

    /// The values of several keys, or else their defaults.
    pub(super) fn all<const N: usize>(&self, keys: [&'static str; N]) -> [Setting; N] {
        keys.map(|key| self.get(key))
    }
}

/// The configuration file and its text. A file named by the user must exist; the default one may be absent.
fn file(flags: &Flags, variables: &Variables) -> Result<Option<(PathBuf, String)>, ConfigError> {
    let usual = || match flags.user {
        false => Some(PathBuf::from(SYSTEM_FILE)),
        true => variables.config_home().map(|config| config.join("agentd/agentd.yaml")),
    };
    let named = flags.config.clone().or_else(|| variables.get("AGENTD_CONFIG").map(PathBuf::from));
    let must_exist = named.is_some();
    let Some(path) = named.or_else(usual) else { return Ok(None) };
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some((path, text))),
        Err(error) if error.kind() == ErrorKind::NotFound && !must_exist => Ok(None),
        Err(source) => Err(ConfigError::Read { path, source }),
    }
}

/// A plain value, a list of plain values joined by commas, or a mapping as such a list of `key=value`.
fn scalar(node: &Node) -> Result<String, At> {
    let pair = |(key, value): &(yaml::Key, Node)| Ok(format!("{}={}", key.text, value.text()?));
    match &node.value {
        Value::Map(entries) => Ok(entries.iter().map(pair).collect::<Result<Vec<_>, _>>()?.join(", ")),
        Value::List(items) => Ok(items.iter().map(Node::text).collect::<Result<Vec<_>, _>>()?.join(", ")),
        _ => node.text().map(str::to_owned),
    }
}

fn unknown(key: &str) -> String {
    let known: Vec<&str> = KEYS.iter().map(|known| known.name).collect();
    let meant = nearest(key, &known).map(|meant| format!("did you mean `{meant}`? ")).unwrap_or_default();
    format!("unknown key `{key}`; {meant}the keys are {}", known.join(", "))
}
