//! The configuration of the daemon: one value for each key, and its origin.
//!
//! Owns: the keys, their defaults, the order of precedence (flag, then `AGENTD_*` variable, then file, then
//! default), and the only access to the process environment. Hides: YAML, units, users and groups.
//!
//! Invariants: every key has exactly one value and one origin; an unknown key of the file is an error with
//! its line and column; a [`Config`] that exists is usable, so nothing is checked later.

mod data;
mod devices;
mod environments;
mod gangs;
mod jobs;
mod keeping;
mod member;
mod people;
mod pools;
mod preemption;
mod read;
pub(crate) mod schedule;
mod sharing;
mod shutdown;
mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_identity::Proxy;
use agent_model::clock::WrongClock;
use agent_model::paths::Places;
use agent_model::{Address, Clock, NodeId, SystemClock};
use agent_node::Sharing;

use crate::cli::Flags;
pub(crate) use data::DataSettings;
pub(crate) use devices::DeviceSettings;
pub(crate) use environments::{EnvironmentSettings, UvChoice};
pub(crate) use gangs::GangSettings;
pub(crate) use jobs::{JobSettings, RunAs};
pub(crate) use keeping::KeepSettings;
use member::Member;
pub(crate) use member::identity_file;
pub(crate) use people::{Group, is_user, user_of};
pub(crate) use pools::PoolSettings;
pub(crate) use preemption::{PreemptionSettings, Provider};
use read::Layers;
pub(crate) use shutdown::ShutdownSettings;
pub(crate) use values::{FarStore, Share};

/// The file of a daemon installed on the machine.
pub(crate) const SYSTEM_FILE: &str = "/etc/agentd/agentd.yaml";

/// A key of the configuration.
struct Key {
    name: &'static str,
    /// The value when no layer sets one; computed ones are filled in by [`Config::resolve`].
    default: &'static str,
}

const KEYS: &[Key] = &[
    Key { name: "state_dir", default: "" },
    Key { name: "socket", default: "" },
    Key { name: "roles", default: "controller, node" },
    Key { name: "controller", default: "" },
    Key { name: "listen", default: "" },
    Key { name: "blob_store", default: "" },
    Key { name: "node_name", default: "" },
    Key { name: "slots", default: "2" },
    Key { name: "job_cpus", default: "1" },
    Key { name: "reserved_cpus", default: "0" },
    Key { name: "reserved_memory", default: "512MiB" },
    Key { name: "idle_after", default: "off" },
    Key { name: "stop_at", default: "" },
    Key { name: "shutdown_run", default: "" },
    Key { name: "log", default: "info" },
    Key { name: "tracking_port", default: "0" },
    Key { name: "metrics_listen", default: "" },
    Key { name: "keep_jobs", default: "0s" },
    Key { name: "keep_records", default: "forever" },
    Key { name: "disk_reserve", default: "1GiB" },
    Key { name: "store_size", default: "25%" },
    Key { name: "lease", default: "60s" },
    Key { name: "log_quota", default: "4GiB" },
    Key { name: "archive_quota", default: "16GiB" },
    Key { name: "socket_group", default: "" },
    Key { name: "operator_group", default: "" },
    Key { name: "job_user", default: "" },
    Key { name: "job_uids", default: "2000000000-2000065535" },
    Key { name: "root_jobs", default: "" },
    Key { name: "spawn_socket", default: "" },
    Key { name: "private_tmp", default: "true" },
    Key { name: "private_view", default: "true" },
    Key { name: "job_memory", default: "90%" },
    Key { name: "allow_metadata", default: "false" },
    Key { name: "outputs_every", default: "5m" },
    Key { name: "conda_channels", default: "conda-forge" },
    Key { name: "conda_alias", default: "https://conda.anaconda.org" },
    Key { name: "conda_mirrors", default: "" },
    Key { name: "conda_credentials", default: "" },
    Key { name: "conda_priority", default: "strict" },
    Key { name: "offline", default: "false" },
    Key { name: "uv", default: "auto" },
    Key { name: "pip_index_url", default: "" },
    Key { name: "pip_extra_index_url", default: "" },
    Key { name: "pip_find_links", default: "" },
    Key { name: "curated_environments", default: "" },
    Key { name: "environments_size", default: "50GiB" },
    Key { name: "environments_age", default: "30d" },
    Key { name: "builder_memory", default: "0" },
    Key { name: "data_stores", default: "" },
    Key { name: "providers", default: "" },
    Key { name: "provider_programs", default: "" },
    Key { name: "data_size", default: "50GiB" },
    Key { name: "docker_socket", default: "/var/run/docker.sock" },
    Key { name: "docker_credentials", default: "" },
    Key { name: "docker_build_ca", default: "" },
    Key { name: "container_user", default: "" },
    Key { name: "nvml_library", default: "" },
    Key { name: "node_address", default: "" },
    Key { name: "gang_ports", default: "20000-20999" },
    Key { name: "peer_port", default: "0" },
    Key { name: "gang_wait", default: "30m" },
    Key { name: "labels", default: "" },
    Key { name: "limits_per_user", default: "" },
    Key { name: "preemption", default: "auto" },
    Key { name: "preemption_endpoint", default: "http://169.254.169.254" },
    Key { name: "preemption_margin", default: "15s" },
];

/// The format of the address of the numbers.
const METRICS: &str =
    "an address of loopback and a port, such as `127.0.0.1:9465`: whoever reaches it may read it";

/// The format of the address of another store of blobs.
const BLOB_STORE: &str =
    "`http://host:port` or `https://host:port`, and the name of an instance behind it if it has one";

/// Where a value was set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Nowhere: it is the default.
    Default,
    /// In a file.
    File {
        /// The file.
        path: PathBuf,
        /// The place in it.
        place: agent_jobfile::yaml::Place,
    },
    /// In an environment variable of this name.
    Variable(String),
    /// By the identity that the machine got when it joined.
    Joined(PathBuf),
    /// On the command line, by this flag.
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File { path, place } => write!(f, "{}, {place}", path.display()),
            Origin::Variable(name) => write!(f, "environment variable {name}"),
            Origin::Joined(path) => write!(f, "joined, {}", path.display()),
            Origin::Flag(flag) => write!(f, "flag {flag}"),
        }
    }
}

/// One key as `show-config` prints it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Setting {
    /// The key.
    pub(crate) key: &'static str,
    /// Its value, as written.
    pub(crate) value: String,
    /// Where it was said.
    pub(crate) origin: Origin,
}

/// Why there is no usable configuration.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("cannot read the configuration file {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: {at}", path.display())]
    File { path: PathBuf, at: agent_jobfile::yaml::At },
    #[error("{key}: {problem} ({origin})")]
    Value { key: &'static str, problem: String, origin: Origin },
    #[error(
        "neither HOME nor XDG_DATA_HOME is set, so there is no place for a user's daemon; give --state-dir"
    )]
    NoHome,
}

/// The roles of this daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Roles {
    /// It queues and assigns jobs.
    pub(crate) controller: bool,
    /// It runs jobs.
    pub(crate) node: bool,
}

/// The environment variables of this process, read once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Variables(BTreeMap<String, String>);

impl Variables {
    /// Of this process. A variable that is not UTF-8 counts as absent.
    pub(crate) fn of_process() -> Variables {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Variables(std::env::vars_os().filter_map(text).collect())
    }

    fn get(&self, name: &str) -> Option<String> {
        self.0.get(name).filter(|value| !value.is_empty()).cloned()
    }

    /// Where the user's configuration files are.
    fn config_home(&self) -> Option<PathBuf> {
        let home = || Some(PathBuf::from(self.get("HOME")?).join(".config"));
        self.get("XDG_CONFIG_HOME").map(PathBuf::from).or_else(home)
    }

    fn select(&self, wanted: impl Fn(&str) -> bool) -> BTreeMap<String, String> {
        self.0.iter().filter(|(name, _)| wanted(name)).map(|(n, v)| (n.clone(), v.clone())).collect()
    }
}

/// The variables of the daemon's own environment that others may see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostVariables {
    /// The `PATH` of the daemon.
    pub(crate) path: String,
    /// Passed on to jobs: home, language, time zone, proxies and certificates.
    pub(crate) job: BTreeMap<String, String>,
    /// Passed on to builders of environments: the same, and pip's.
    pub(crate) builder: BTreeMap<String, String>,
    /// How many files a job may have open, unless it raises that itself: as many as the daemon was started with.
    pub(crate) open_files: Option<u64>,
}

const FALLBACK_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const JOB_VARIABLES: &[&str] = &["HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR"];
const NETWORK_VARIABLES: &[&str] = &[
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
];

impl HostVariables {
    fn select(variables: &Variables) -> HostVariables {
        let for_job = |name: &str| {
            JOB_VARIABLES.contains(&name) || NETWORK_VARIABLES.contains(&name.to_ascii_uppercase().as_str())
        };
        let for_builder = |name: &str| for_job(name) || name.starts_with("PIP_");
        let mut job = variables.select(for_job);
        // A service, or a container, may be started without them, and `getpass` and others end without them.
        let own = people::user_of(rustix::process::geteuid().as_raw());
        let known = ["USER", "LOGNAME"].iter().find_map(|name| job.get(*name).cloned());
        if let Some(user) = known.or_else(|| own.map(|user| user.name)) {
            for name in ["USER", "LOGNAME"] {
                job.entry(name.to_owned()).or_insert_with(|| user.clone());
            }
        }
        HostVariables {
            path: variables.get("PATH").unwrap_or_else(|| FALLBACK_PATH.to_owned()),
            open_files: None,
            job,
            builder: variables.select(for_builder),
        }
    }

    /// With the configured values of pip, which win over inherited ones.
    fn and_of_pip(mut self, pip: &BTreeMap<String, String>) -> HostVariables {
        self.builder.extend(pip.clone());
        self
    }
}

/// The settings that a service manager passes to a service it starts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Manager {
    /// The socket for status messages.
    pub(crate) address: Option<String>,
    /// The watchdog timeout: how long the service may be silent.
    pub(crate) patience: Option<Duration>,
}

impl Manager {
    /// `WATCHDOG_PID` names the process that the watchdog is for; its children inherit the variables.
    fn select(variables: &Variables) -> Manager {
        let meant = variables.get("WATCHDOG_PID").is_none_or(|pid| pid == std::process::id().to_string());
        let micros = variables.get("WATCHDOG_USEC").and_then(|text| text.parse().ok());
        let patience = micros.filter(|micros| meant && *micros > 0).map(Duration::from_micros);
        Manager { address: variables.get("NOTIFY_SOCKET"), patience }
    }
}

/// The whole configuration, checked.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// The directory of everything the daemon keeps.
    pub(crate) state_dir: PathBuf,
    /// The unix socket that clients connect to.
    pub(crate) socket: PathBuf,
    /// The stream that systemd connected to the journal, which adds the time.
    pub(crate) journal_stream: Option<String>,
    /// A user's own daemon: the socket is for that user alone.
    pub(crate) user_mode: bool,
    /// Its roles.
    pub(crate) roles: Roles,
    /// The controller this node belongs to.
    pub(crate) controller: Address,
    /// Where the controller listens for other machines: a host and a port.
    pub(crate) listen: Option<(String, u16)>,
    /// The host name under which others reach the machine.
    pub(crate) host_name: String,
    /// The proxy for connections out of this network.
    pub(crate) proxy: Proxy,
    /// How long certificates are valid, if not as long as usual. In a debug build only.
    pub(crate) certificate_life: Option<Duration>,
    /// By how many milliseconds the clock of this daemon is wrong. In a debug build only.
    clock_ahead: i64,
    /// The store of blobs on another server; the controller's own when absent.
    pub(crate) blob_store: Option<FarStore>,
    /// The node's name.
    pub(crate) node_name: NodeId,
    /// How the machine is divided among jobs.
    pub(crate) sharing: Sharing,
    /// When the machine is shut down.
    pub(crate) shutdown: ShutdownSettings,
    /// What is logged, for example `info,agentd=debug`.
    pub(crate) log: String,
    /// The loopback port of the tracking endpoint; 0 means any.
    pub(crate) tracking_port: u16,
    /// The address of loopback at which numbers for Prometheus are served, if any.
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// What is kept of jobs.
    pub(crate) keep: KeepSettings,
    /// Free disk space below which no job is started, in bytes.
    pub(crate) disk_reserve: u64,
    /// How much of the disk the store of blobs may take.
    pub(crate) store_size: Share,
    /// How long a blob is kept after it was sent, read or asked for.
    pub(crate) blob_lease: Duration,
    /// How long a node without contact to the controller may go on with a job that may be replaced.
    pub(crate) lease: Duration,
    /// Which users jobs run as, and how jobs are isolated.
    pub(crate) jobs: JobSettings,
    /// The group that may connect beside the daemon's own user; not for a user's own daemon.
    pub(crate) socket_group: Option<Group>,
    /// The operators, beside root and the daemon's own user: they may do what affects all users.
    pub(crate) operator_group: Option<Group>,
    /// How environments are made and kept.
    pub(crate) environments: EnvironmentSettings,
    /// Data that jobs read and nobody sends.
    pub(crate) data: DataSettings,
    /// What makes the machines of pools.
    pub(crate) pools: PoolSettings,
    /// The container engine and the GPUs.
    pub(crate) devices: DeviceSettings,
    /// Jobs on several nodes.
    pub(crate) gangs: GangSettings,
    /// How the node learns that its machine will be taken away.
    pub(crate) preemption: PreemptionSettings,
    /// The daemon's environment variables that others may see.
    pub(crate) host: HostVariables,
    /// The settings of the service manager.
    pub(crate) manager: Manager,
    /// Every key with its value as written, in the order of the documentation.
    pub(crate) settings: Vec<Setting>,
}

impl Config {
    /// The clock of this daemon.
    pub(crate) fn clock(&self) -> Arc<dyn Clock> {
        match self.clock_ahead {
            0 => Arc::new(SystemClock),
            ahead => Arc::new(WrongClock(ahead)),
        }
    }

    /// Merges flags, variables, the file and the identity of a joined machine.
    pub(crate) fn resolve(flags: &Flags, variables: &Variables) -> Result<Config, ConfigError> {
        let layers = Layers::read(flags, variables)?;
        let places = places(flags, variables, &layers)?;
        let state_dir = layers.or("state_dir", || places.state_dir.display().to_string());
        let socket = layers.or("socket", || places.socket.display().to_string());
        let directory = state_dir.parse("an absolute path", values::absolute)?;
        let member = Member::read(flags, &directory)?;
        let (node_name, roles_said) = (member.name(&layers)?, member.roles(&layers));
        let roles = roles_said.parse("`controller`, `node` or both", values::roles)?;
        let controller = controller_socket(&layers, &member, roles, &socket)?;
        let [log, disk_reserve, listen] = layers.all(["log", "disk_reserve", "listen"]);
        let [tracking_port, blob_store, store_size, metrics_listen] =
            layers.all(["tracking_port", "blob_store", "store_size", "metrics_listen"]);
        let [lease, socket_group, operator_group] = layers.all(["lease", "socket_group", "operator_group"]);
        let mut parts = Vec::new();
        let sharing = take(sharing::resolve(&layers)?, &mut parts);
        let keep = take(KeepSettings::resolve(&layers)?, &mut parts);
        let shutdown = take(ShutdownSettings::resolve(roles, variables, &layers)?, &mut parts);
        let environments = take(EnvironmentSettings::resolve(flags, variables, &layers)?, &mut parts);
        let data = take(DataSettings::resolve(flags, variables, &layers)?, &mut parts);
        let pools = take(PoolSettings::resolve(flags, variables, &layers)?, &mut parts);
        let devices = take(DeviceSettings::resolve(&layers)?, &mut parts);
        let jobs = take(JobSettings::resolve(&layers, flags.user)?, &mut parts);
        let gangs = take(GangSettings::resolve(&layers)?, &mut parts);
        let preemption = take(PreemptionSettings::resolve(variables, &layers)?, &mut parts);
        let mut config = Config {
            host: HostVariables::select(variables).and_of_pip(&environments.pip),
            state_dir: directory,
            socket: socket.parse("an absolute path of at most 107 bytes", values::socket)?,
            journal_stream: variables.get("JOURNAL_STREAM"),
            user_mode: flags.user,
            roles,
            controller: controller
                .parse("`unix:` and an absolute path, or `https://HOST:PORT`", values::address)?,
            listen: listen.parse("an address and a port, such as `0.0.0.0:7443`", values::listen)?,
            host_name: values::full_host_name(),
            proxy: Proxy::from_variables(|name| variables.get(name)),
            certificate_life: of_tests(variables, "AGENTD_TEST_CERTIFICATE_LIFE", values::duration),
            clock_ahead: clock_ahead(variables),
            blob_store: blob_store.parse(BLOB_STORE, values::far_store)?,
            node_name: node_name.parse("letters, digits, `-` and `_`", |text| text.parse().ok())?,
            sharing,
            shutdown,
            log: log.parse("a level such as `info`, or `info,agentd=debug`", values::log)?,
            tracking_port: tracking_port.parse("a port, or 0 for any", |text| text.parse().ok())?,
            metrics_listen: metrics_listen.parse(METRICS, values::loopback)?,
            keep,
            disk_reserve: disk_reserve.parse("a size such as `500MiB` or `2GB`", values::size)?,
            store_size: store_size.parse("a size such as `50GiB`, or a part such as `25%`", values::share)?,
            blob_lease: blob_lease(variables),
            lease: lease.parse("a duration from `2s` to `1h`", values::lease)?,
            jobs,
            socket_group: socket_group.parse("a group of this machine", people::group)?,
            operator_group: operator_group.parse("a group of this machine", people::group)?,
            environments,
            data,
            pools,
            devices,
            gangs,
            preemption,
            manager: Manager::select(variables),
            settings: vec![
                state_dir,
                socket,
                roles_said,
                controller,
                listen,
                blob_store,
                node_name,
                log,
                tracking_port,
                metrics_listen,
                disk_reserve,
                store_size,
                lease,
                socket_group,
                operator_group,
            ],
        };
        config.settings.extend(parts);
        Ok(config)
    }

    /// Whether users other than root may run jobs here.
    pub(crate) fn is_shared(&self) -> bool {
        let elsewhere = self.listen.is_some() || !self.knows_owners();
        !self.user_mode && (self.socket_group.is_some() || elsewhere)
    }

    /// Whether the controller's machine is this one, so that it has the same users.
    pub(crate) fn knows_owners(&self) -> bool {
        matches!(self.controller, Address::Unix(_))
    }

    /// Whether jobs that root submits run as root: as `root_jobs` says, or if nobody else can submit any.
    pub(crate) fn runs_as_root(&self) -> bool {
        self.jobs.root.unwrap_or(!self.is_shared() && self.jobs.helper.is_none())
    }

    /// No job runs as the daemon's own user.
    pub(crate) fn keeps_jobs_out(&self) -> bool {
        match self.jobs.user {
            RunAs::Daemon => self.jobs.helper.is_some(),
            RunAs::Owner => !self.runs_as_root(),
            RunAs::PerRun | RunAs::Named(_) => true,
        }
    }

    /// Whether builders of environments run as a user of their own. Where only root has jobs, which run as root, that
    /// would protect nothing.
    pub(crate) fn builds_apart(&self) -> bool {
        self.jobs.helper.is_some()
            || (self.jobs.user != RunAs::Daemon && (self.keeps_jobs_out() || self.is_shared()))
    }
}

/// The values of a part; its settings join the others.
fn take<T>((values, settings): (T, Vec<Setting>), all: &mut Vec<Setting>) -> T {
    all.extend(settings);
    values
}

/// Long enough for all steps between a snapshot and its submission. Tests of a debug build may set less.
fn blob_lease(variables: &Variables) -> Duration {
    const LEASE: Duration = Duration::from_secs(30 * 60);
    of_tests(variables, "AGENTD_TEST_BLOB_LEASE", values::duration).unwrap_or(LEASE)
}

/// By how much a clock is wrong, in tests.
fn clock_ahead(variables: &Variables) -> i64 {
    of_tests(variables, "AGENTD_TEST_CLOCK_AHEAD", |text| text.parse().ok()).unwrap_or(0)
}

/// A value that tests of a debug build set.
fn of_tests<T>(variables: &Variables, name: &str, read: impl Fn(&str) -> Option<T>) -> Option<T> {
    variables.get(name).filter(|_| cfg!(debug_assertions)).and_then(|text| read(&text))
}

/// The default state directory and socket; the socket is below `state_dir` where that is set.
fn places(flags: &Flags, variables: &Variables, layers: &Layers) -> Result<Places, ConfigError> {
    if let Some(state_dir) = layers.said("state_dir") {
        return Ok(Places::below(Path::new(&state_dir.value)));
    }
    if flags.user {
        return Places::user(|name| variables.get(name)).ok_or(ConfigError::NoHome);
    }
    Ok(Places::system())
}

/// The controller's address: its own socket where this daemon is the controller.
fn controller_socket(
    layers: &Layers,
    member: &Member,
    roles: Roles,
    socket: &Setting,
) -> Result<Setting, ConfigError> {
    let said = layers.said("controller").or_else(|| member.controller().filter(|_| !roles.controller));
    match (roles.controller, said) {
        (true, None) => Ok(layers.or("controller", || format!("unix:{}", socket.value))),
        (true, Some(said)) => Err(said.wrong("this daemon is the controller itself; leave the key out")),
        (false, Some(said)) => Ok(said),
        (false, None) => {
            let none = layers.get("controller");
            Err(none.wrong("a node without the role `controller` needs the controller's address"))
        }
    }
}

impl Setting {
    /// The value as its type; `expected` describes a valid value, for the error.
    fn parse<T>(&self, expected: &str, read: impl Fn(&str) -> Option<T>) -> Result<T, ConfigError> {
        read(self.value.trim())
            .ok_or_else(|| self.wrong(format!("expected {expected}, found `{}`", self.value)))
    }

    fn wrong(&self, problem: impl Into<String>) -> ConfigError {
        ConfigError::Value { key: self.key, problem: problem.into(), origin: self.origin.clone() }
    }
}

/// The lines of `show-config`.
pub(crate) fn show(config: &Config) -> String {
    let line = |setting: &Setting| {
        let said = format!("{}: {}", setting.key, values::without_credentials(&setting.value));
        format!("{said:<48}  # {}\n", setting.origin)
    };
    config.settings.iter().map(line).collect()
}

#[cfg(test)]
mod tests;
