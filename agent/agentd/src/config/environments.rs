//! How environments are made and kept: the keys for the sources of packages, and for how much is kept how long.
//!
//! Hides the forms of the values. A secret is never part of one: addresses with credentials are refused, and the
//! error names the file for credentials.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::read::Layers;
use super::{ConfigError, Flags, Setting, Variables, values};

/// Where definitions of curated environments are looked for by a daemon of the machine.
const SYSTEM_CURATED: &str = "/etc/agentd/environments";

/// Which installer makes the pip part of an environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum UvChoice {
    /// uv if it is found, else pip.
    Auto,
    /// Always pip.
    Never,
    /// The uv of this path.
    At(PathBuf),
}

/// How environments are made and kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EnvironmentSettings {
    /// The channels of a conda file that names none.
    pub(crate) channels: Vec<String>,
    /// The base address of channels that are given by name.
    pub(crate) alias: String,
    /// The mirrors of a channel, best first.
    pub(crate) mirrors: BTreeMap<String, Vec<String>>,
    /// The file of credentials of channels.
    pub(crate) credentials: Option<PathBuf>,
    /// Flexible channel priority: packages of a better channel do not hide those of others.
    pub(crate) flexible: bool,
    /// Nothing is fetched.
    pub(crate) offline: bool,
    pub(crate) uv: UvChoice,
    /// The settings of pip in the configuration, as pip's environment variables.
    pub(crate) pip: BTreeMap<String, String>,
    /// Where definitions of curated environments are looked for.
    pub(crate) curated: PathBuf,
    /// How much of the disk all environments may take together, in bytes.
    pub(crate) size: u64,
    /// How long an unused one is kept.
    pub(crate) age: Duration,
    /// The memory of a builder, in bytes; 0 is three quarters of the machine's.
    pub(crate) builder_memory: u64,
}

const URL: &str = "an address such as `https://host/path`, without credentials (those of channels belong into \
                   the file of `conda_credentials`)";

impl EnvironmentSettings {
    /// Reads its keys; returns them with their settings.
    pub(super) fn resolve(
        flags: &Flags,
        variables: &Variables,
        layers: &Layers,
    ) -> Result<(EnvironmentSettings, Vec<Setting>), ConfigError> {
        let [channels, alias] = [layers.get("conda_channels"), layers.get("conda_alias")];
        let [mirrors, credentials] = [layers.get("conda_mirrors"), layers.get("conda_credentials")];
        let [priority, offline, uv] = [layers.get("conda_priority"), layers.get("offline"), layers.get("uv")];
        let pip = ["pip_index_url", "pip_extra_index_url", "pip_find_links"].map(|key| layers.get(key));
        let curated = layers.or("curated_environments", || curated_below(flags, variables));
        let [size, age] = [layers.get("environments_size"), layers.get("environments_age")];
        let memory = layers.get("builder_memory");
        let settings = EnvironmentSettings {
            channels: channels
                .parse("names or addresses of channels, without credentials", values::channels)?,
            alias: alias.parse(URL, |text| values::url(text.trim_end_matches('/')))?,
            mirrors: mirrors.parse("`URL=URL` pairs, without credentials", values::mirrors)?,
            credentials: credentials.parse("an absolute path, or nothing", values::path_or_none)?,
            flexible: priority.parse("`strict` or `flexible`", |text| {
                values::word(text, &[("strict", false), ("flexible", true)])
            })?,
            offline: offline
                .parse("`true` or `false`", |text| values::word(text, &[("false", false), ("true", true)]))?,
            uv: uv.parse("`auto`, `never` or an absolute path", values::uv)?,
            pip: pip.iter().filter(|said| !said.value.trim().is_empty()).map(pip_variable).collect(),
            curated: curated.parse("an absolute path", values::absolute)?,
            size: size.parse("a size such as `50GiB`", values::size)?,
            age: age.parse("a duration such as `12h` or `30d`", values::duration)?,
            builder_memory: memory.parse("a size such as `8GiB`, or 0", values::size)?,
        };
        let said = [channels, alias, mirrors, credentials, priority, offline, uv].into_iter();
        Ok((settings, said.chain(pip).chain([curated, size, age, memory]).collect()))
    }
}

/// The setting as an environment variable of pip.
fn pip_variable(said: &Setting) -> (String, String) {
    (said.key.to_ascii_uppercase(), said.value.trim().replace(", ", " "))
}

/// The default: beside the default configuration file of this mode.
fn curated_below(flags: &Flags, variables: &Variables) -> String {
    let own = || Some(variables.config_home()?.join("agentd/environments").display().to_string());
    match flags.user {
        true => own().unwrap_or_else(|| SYSTEM_CURATED.to_owned()),
        false => SYSTEM_CURATED.to_owned(),
    }
}
