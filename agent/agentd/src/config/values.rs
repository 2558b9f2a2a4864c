//! What the text of a setting means. Each reader gives `None` for a text that means nothing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing_subscriber::filter::{LevelFilter, Targets};

use super::{MAX_SOCKET_PATH, Roles};

/// Whom jobs run as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JobUser {
    /// The login name.
    pub(crate) name: String,
    /// The user id.
    pub(crate) uid: u32,
    /// The group id.
    pub(crate) gid: u32,
    /// The home directory.
    pub(crate) home: String,
}

pub(super) fn absolute(text: &str) -> Option<PathBuf> {
    Some(PathBuf::from(text)).filter(|path| path.is_absolute())
}

pub(super) fn socket(text: &str) -> Option<PathBuf> {
    absolute(text).filter(|_| text.len() <= MAX_SOCKET_PATH)
}

pub(super) fn unix_address(text: &str) -> Option<PathBuf> {
    socket(text.strip_prefix("unix:")?)
}

pub(super) fn roles(text: &str) -> Option<Roles> {
    let mut roles = Roles { controller: false, node: false };
    for word in text.split(',').map(str::trim) {
        match word {
            "controller" => roles.controller = true,
            "node" => roles.node = true,
            _ => return None,
        }
    }
    Some(roles)
}

pub(super) fn slots(text: &str) -> Option<u32> {
    text.parse().ok().filter(|slots| (1..=1000).contains(slots))
}

/// Directives, each a level or `target=level`; a word that is neither would be taken for a target.
pub(super) fn log(text: &str) -> Option<String> {
    let level = |directive: &str| directive.trim().parse::<LevelFilter>().is_ok();
    let understood = text.split(',').all(|directive| directive.contains('=') || level(directive));
    text.parse::<Targets>().ok().filter(|_| understood).map(|_| text.to_owned())
}

/// A whole number and a unit out of `units`, each with its factor; no unit is a factor of 1.
fn measured(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim();
    let factor = match unit {
        "" => 1,
        _ => units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?.1,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

pub(super) fn duration(text: &str) -> Option<Duration> {
    measured(text, &[("s", 1), ("m", 60), ("h", 3600), ("d", 86400)]).map(Duration::from_secs)
}

/// A lease is longer than what rounding and timers may cost, and short enough for a job to move on.
pub(super) fn lease(text: &str) -> Option<Duration> {
    duration(text).filter(|lease| (Duration::from_secs(2)..=Duration::from_secs(3600)).contains(lease))
}

pub(super) fn size(text: &str) -> Option<u64> {
    const UNITS: &[(&str, u64)] = &[
        ("B", 1),
        ("kB", 1000),
        ("MB", 1000 * 1000),
        ("GB", 1000 * 1000 * 1000),
        ("TB", 1_000_000_000_000),
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("k", 1 << 10),
        ("m", 1 << 20),
        ("g", 1 << 30),
        ("t", 1 << 40),
    ];
    measured(text, UNITS)
}

/// Nobody for an empty text, otherwise the user of that name.
pub(super) fn job_user(text: &str) -> Option<Option<JobUser>> {
    if text.is_empty() {
        return Some(None);
    }
    find_user(&std::fs::read_to_string("/etc/passwd").ok()?, text).map(Some)
}

fn find_user(passwd: &str, name: &str) -> Option<JobUser> {
    let line = passwd.lines().find(|line| line.split(':').next() == Some(name))?;
    let fields: Vec<&str> = line.split(':').collect();
    Some(JobUser {
        name: name.to_owned(),
        uid: fields.get(2)?.parse().ok()?,
        gid: fields.get(3)?.parse().ok()?,
        home: (*fields.get(5)?).to_owned(),
    })
}

/// The host's name as a node name: what may not stand in one becomes `-`.
pub(super) fn host_name() -> String {
    let name = std::fs::read_to_string(Path::new("/proc/sys/kernel/hostname")).unwrap_or_default();
    node_name(name.trim())
}

fn node_name(host: &str) -> String {
    let host = host.split('.').next().unwrap_or_default();
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
    let name: String = host.chars().map(plain).take(agent_model::ids::MAX_NAME).collect();
    let name = name.trim_start_matches(['-', '_']);
    if name.is_empty() { "node".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_units_are_read() {
        assert_eq!(duration("10m"), Some(Duration::from_secs(600)));
        assert_eq!(duration("0"), Some(Duration::ZERO));
        assert_eq!((duration("1.5h"), duration("m"), duration("-1s")), (None, None, None));
        assert_eq!((size("2GB"), size("1 GiB"), size("7")), (Some(2_000_000_000), Some(1 << 30), Some(7)));
        assert_eq!((size("1 parsec"), size("99999999TB")), (None, None));
    }

    #[test]
    fn test_host_name_becomes_a_node_name() {
        for (host, node) in [("box", "box"), ("gpu-07.lab.local", "gpu-07"), ("", "node"), ("-ä.b", "node")]
        {
            assert_eq!(node_name(host), node, "{host}");
            node_name(host).parse::<agent_model::NodeId>().unwrap();
        }
    }

    #[test]
    fn test_user_is_found_by_whole_name() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\njob:x:900:901::/var/empty:/bin/false\nbroken:x\n";
        let found = find_user(passwd, "job").unwrap();
        assert_eq!((found.uid, found.gid, found.home.as_str()), (900, 901, "/var/empty"));
        assert_eq!((find_user(passwd, "jo"), find_user(passwd, "broken")), (None, None));
    }
}
