//! Parsers of the values of settings. Each returns `None` for an invalid text.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing_subscriber::filter::{LevelFilter, Targets};

use agent_model::Address;

use super::{Roles, UvChoice};

/// A part of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Share {
    /// In bytes.
    Bytes(u64),
    /// In percent of it.
    Percent(u64),
}

impl Share {
    /// In bytes, of a disk of this size. If the size is unknown (0), there is no limit.
    pub(crate) fn of(self, disk: u64) -> u64 {
        match self {
            Share::Bytes(bytes) => bytes,
            Share::Percent(_) if disk == 0 => u64::MAX,
            Share::Percent(part) => disk / 100 * part,
        }
    }
}

pub(super) fn absolute(text: &str) -> Option<PathBuf> {
    Some(PathBuf::from(text)).filter(|path| path.is_absolute())
}

pub(super) fn socket(text: &str) -> Option<PathBuf> {
    match Address::unix(Path::new(text)).ok()? {
        Address::Unix(path) => Some(path),
        Address::Tls { .. } => None,
    }
}

/// None for an empty text, otherwise a host and a port.
pub(super) fn listen(text: &str) -> Option<Option<(String, u16)>> {
    if text.is_empty() {
        return Some(None);
    }
    agent_model::address::host_and_port(text).map(Some)
}

pub(super) fn loopback(text: &str) -> Option<Option<SocketAddr>> {
    if text.is_empty() {
        return Some(None);
    }
    let place: SocketAddr = text.parse().ok()?;
    (place.ip().is_loopback() && place.port() > 0).then_some(Some(place))
}

pub(super) fn address(text: &str) -> Option<Address> {
    text.parse().ok()
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

/// Directives, each a level or `target=level`; `Targets` would take any other word for a target.
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

/// A lease is longer than the error of rounding and timers, and short enough for a job to be moved.
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

/// A size, or a part of the disk: `25%`.
pub(super) fn share(text: &str) -> Option<Share> {
    match text.strip_suffix('%') {
        Some(part) => part.trim().parse().ok().filter(|part| *part <= 100).map(Share::Percent),
        None => size(text).map(Share::Bytes),
    }
}

/// A store of blobs on another server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FarStore {
    /// `http://host:port`, or `https:`.
    pub(crate) server: String,
    /// Which of the server's stores; empty where it has only one.
    pub(crate) instance: String,
}

/// None for an empty text, otherwise `http://host:port` or `https:`, and an optional instance name after it.
pub(super) fn far_store(text: &str) -> Option<Option<FarStore>> {
    if text.is_empty() {
        return Some(None);
    }
    let url = url(text)?;
    let (scheme, rest) = url.split_once("://").filter(|(scheme, _)| matches!(*scheme, "http" | "https"))?;
    let rest = rest.trim_end_matches('/');
    let (host, instance) = rest.split_once('/').unwrap_or((rest, ""));
    let (name, port) = host.rsplit_once(':')?;
    let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
    let plain = |segment: &str| {
        // Reserved words of resource names are not allowed in an instance name.
        const RESERVED: &[&str] = &["", "blobs", "uploads", "actions", "compressed-blobs", "capabilities"];
        !RESERVED.contains(&segment) && !segment.contains(['?', '#'])
    };
    let is_instance = instance.is_empty() || instance.split('/').all(plain);
    let server = format!("{scheme}://{host}");
    (is_port && !name.is_empty() && is_instance)
        .then(|| Some(FarStore { server, instance: instance.to_owned() }))
}

/// The parts of a list, without blanks and empty ones.
fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty())
}

/// One of these words.
pub(super) fn word<T: Copy>(text: &str, words: &[(&str, T)]) -> Option<T> {
    words.iter().find(|(word, _)| word.eq_ignore_ascii_case(text)).map(|(_, value)| *value)
}

pub(super) fn path_or_none(text: &str) -> Option<Option<PathBuf>> {
    if text.is_empty() { Some(None) } else { absolute(text).map(Some) }
}

pub(super) fn uv(text: &str) -> Option<UvChoice> {
    match text {
        "auto" => Some(UvChoice::Auto),
        "never" => Some(UvChoice::Never),
        path => absolute(path).map(UvChoice::At),
    }
}

/// Where the scheme of an address ends, if it has one.
fn scheme(text: &str) -> Option<usize> {
    let end = text.find("://")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
    (end > 0 && text[..end].chars().all(plain)).then_some(end + 3)
}

/// An address without secrets: no user before the host, no `/t/TOKEN`.
pub(super) fn url(text: &str) -> Option<String> {
    let rest = &text[scheme(text)?..];
    let host = rest.split('/').next().unwrap_or_default();
    let secret = host.contains('@') || format!("/{rest}/").contains("/t/");
    (!secret && !rest.is_empty() && !text.contains(char::is_whitespace)).then(|| text.to_owned())
}

/// Channels by name or address, at least one.
pub(super) fn channels(text: &str) -> Option<Vec<String>> {
    let channel = |part: &str| match part.contains("://") {
        true => url(part),
        false => (!part.contains(['@', ' '])).then(|| part.to_owned()),
    };
    let channels: Option<Vec<String>> = parts(text).map(channel).collect();
    channels.filter(|channels| !channels.is_empty())
}

/// `URL=URL` pairs; several for one address are tried in order.
pub(super) fn mirrors(text: &str) -> Option<BTreeMap<String, Vec<String>>> {
    let mut mirrors: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for pair in parts(text) {
        // An address may contain `=` too: the separator is the first one followed by an address.
        let (at, _) = pair.match_indices('=').find(|(at, _)| scheme(pair[at + 1..].trim()).is_some())?;
        let (from, to) = (url(pair[..at].trim().trim_end_matches('/'))?, url(pair[at + 1..].trim())?);
        mirrors.entry(from).or_default().push(to.trim_end_matches('/').to_owned());
    }
    Some(mirrors)
}

/// A value without credentials: in `https://user:word@host`, the part before the host is replaced.
pub(super) fn without_credentials(value: &str) -> String {
    let mut shown = String::with_capacity(value.len());
    let mut rest = value;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        let end = after.find(['/', ' ', ',']).unwrap_or(after.len());
        let host = after[..end].rfind('@').map_or(0, |at| at + 1);
        shown.push_str(before);
        shown.push_str(if host > 0 { "***@" } else { "" });
        rest = &after[host..];
    }
    shown + rest
}

/// The host's name as a node name: characters that are not allowed become `-`.
pub(super) fn host_name() -> String {
    let name = std::fs::read_to_string(Path::new("/proc/sys/kernel/hostname")).unwrap_or_default();
    node_name(name.trim())
}

/// The host's name as others may know it.
pub(super) fn full_host_name() -> String {
    let name = std::fs::read_to_string(Path::new("/proc/sys/kernel/hostname")).unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
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
        assert_eq!(
            (share("25%"), share("2GB")),
            (Some(Share::Percent(25)), Some(Share::Bytes(2_000_000_000)))
        );
        assert_eq!((share("101%"), share("%"), share("-1%"), share("a lot")), (None, None, None, None));
        assert_eq!(
            (Share::Percent(25).of(1000), Share::Percent(25).of(0), Share::Bytes(7).of(0)),
            (250, u64::MAX, 7)
        );
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
    fn test_addresses_hold_no_secrets() {
        assert_eq!(url("https://host:8080/a/b"), Some("https://host:8080/a/b".into()));
        assert_eq!(url("file:///srv/channel"), Some("file:///srv/channel".into()));
        for text in
            ["host/a", "https://", "https://u:p@host/a", "https://host/t/tk-1/a", "https://a b", "://x"]
        {
            assert_eq!(url(text), None, "{text}");
        }
        for (value, shown) in [
            ("https://u:p@host/s, https://host/x@y", "https://***@host/s, https://host/x@y"),
            ("plain", "plain"),
            ("a://u@p@h", "a://***@h"),
        ] {
            assert_eq!(without_credentials(value), shown);
        }
    }

    #[test]
    fn test_far_stores_are_a_server_and_an_instance() {
        let store = |server: &str, instance: &str| {
            Some(Some(FarStore { server: server.into(), instance: instance.into() }))
        };
        assert_eq!(far_store(""), Some(None));
        assert_eq!(far_store("http://cas:8980"), store("http://cas:8980", ""));
        assert_eq!(far_store("http://[::1]:8980/"), store("http://[::1]:8980", ""));
        assert_eq!(far_store("https://cas:443/main"), store("https://cas:443", "main"));
        assert_eq!(far_store("http://10.0.0.7:1/a/b"), store("http://10.0.0.7:1", "a/b"));
        for text in [
            "grpc://cas:8980",
            "https://cas",
            "cas:8980",
            "http://cas",
            "http://cas:0",
            "http://:8980",
            "http://u:p@cas:8980",
            "http://cas:8980/a//b",
            "http://cas:8980/a/blobs",
            "http://cas:8980/a?b",
        ] {
            assert_eq!(far_store(text), None, "{text}");
        }
    }

    #[test]
    fn test_channels_and_mirrors_are_lists() {
        assert_eq!(
            channels("conda-forge,  https://h/c,"),
            Some(vec!["conda-forge".into(), "https://h/c".into()])
        );
        assert_eq!((channels(" , "), channels("u@h"), channels("https://u:p@h/c")), (None, None, None));
        let of = mirrors("https://a/c/=https://m/c, https://a/c=file:///m?x=1").unwrap();
        assert_eq!(of["https://a/c"], ["https://m/c", "file:///m?x=1"]);
        assert_eq!(mirrors(""), Some(BTreeMap::new()));
        assert_eq!(
            (mirrors("https://a"), mirrors("a=https://b"), mirrors("https://a=https://u@b")),
            (None, None, None)
        );
    }
}
