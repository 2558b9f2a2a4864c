//! Which host to reach and how: the command line overrides `~/.ssh/config`, which overrides the defaults.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, mem};

use crate::config::{self, ConfigError, DiskFiles, Files, Said};

/// A host as the command line gives it.
#[derive(Debug, Clone, Default)]
pub struct SshWish {
    /// `[user@]host[:port]`, where the host may be a name of `~/.ssh/config`.
    pub place: String,
    /// Overrides the port in `place`.
    pub port: Option<u16>,
    /// Tried before the keys of `~/.ssh/config`.
    pub key: Option<PathBuf>,
    /// Jump hosts, separated by commas; overrides `~/.ssh/config`.
    pub jump: Option<String>,
    /// The password of the user, also for sudo.
    pub password: Option<String>,
    /// Sudo is not used, so that it is installed for the user alone.
    pub no_sudo: bool,
    /// The fingerprint that the host's key must have.
    pub fingerprint: Option<String>,
    /// For how long to try to connect.
    pub deadline: Duration,
}

/// The user who attaches, and their settings on this machine.
#[derive(Debug, Clone)]
pub struct Person {
    /// The home directory.
    pub home: PathBuf,
    /// The user name to log in with if none is given.
    pub user: String,
    /// The socket of the SSH agent.
    pub agent: Option<PathBuf>,
}

/// A host and the jump hosts before it, in the order of connecting.
pub(crate) struct Route {
    pub(crate) hops: Vec<Hop>,
    pub(crate) password: Option<String>,
    pub(crate) fingerprint: Option<String>,
    pub(crate) deadline: Duration,
}

/// One host of a route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hop {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) user: String,
    /// In the order in which they are tried.
    pub(crate) keys: Vec<PathBuf>,
    /// Those of them that were named by the user, and that should exist.
    pub(crate) named: Vec<PathBuf>,
    pub(crate) keys_only: bool,
    pub(crate) agent: Option<PathBuf>,
    /// New keys are written to the first.
    pub(crate) known_hosts: Vec<PathBuf>,
    /// The name under which its key is known there, if that is another.
    pub(crate) key_alias: Option<String>,
}

impl Hop {
    /// What its key is known as: an alias stands for the host at any port.
    pub(crate) fn known_as(&self) -> (&str, u16) {
        self.key_alias.as_deref().map_or((self.host.as_str(), self.port), |alias| (alias, 22))
    }
}

impl fmt::Display for Hop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            22 => f.write_str(&self.host),
            port if self.host.contains(':') => write!(f, "[{}]:{port}", self.host),
            port => write!(f, "{}:{port}", self.host),
        }
    }
}

/// Why it is not clear which host to reach.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum TargetError {
    #[error("`{0}` names no host")]
    NoHost(String),
    #[error("the way to `{0}` leads through itself")]
    Circle(String),
    #[error("~/.ssh/config cannot be followed: {0}")]
    Config(#[from] ConfigError),
}

/// How many hosts may be in between.
const MOST_HOPS: usize = 8;
const USUAL_KEYS: [&str; 4] = ["id_ed25519", "id_ecdsa", "id_rsa", "id_ed25519_sk"];

impl Route {
    pub(crate) fn new(wish: &SshWish, person: &Person) -> Result<Route, TargetError> {
        Route::with(wish, person, &DiskFiles)
    }

    fn with(wish: &SshWish, person: &Person, files: &dyn Files) -> Result<Route, TargetError> {
        let place = Place::parse(&wish.place)?;
        let said = read(person, &place.host, files)?;
        let mut jumps = match &wish.jump {
            Some(jump) => jump.split(',').map(|jump| jump.trim().to_owned()).collect(),
            None => said.jumps.clone().unwrap_or_default(),
        };
        let place = Place { port: wish.port.or(place.port), ..place };
        let mut hops = vec![hop(&place, &said, wish.key.as_deref(), person)];
        // The jump hosts before the first of them are those of the file, and so on.
        while let Some(jump) = jumps.pop() {
            if hops.len() > MOST_HOPS {
                return Err(TargetError::Circle(place.host));
            }
            let gate = Place::parse(jump.strip_prefix("ssh://").unwrap_or(&jump))?;
            let said = read(person, &gate.host, files)?;
            if jumps.is_empty() {
                jumps = said.jumps.clone().unwrap_or_default();
            }
            hops.push(hop(&gate, &said, wish.key.as_deref(), person));
        }
        hops.reverse();
        let SshWish { password, fingerprint, deadline, .. } = wish.clone();
        Ok(Route { hops, password, fingerprint, deadline })
    }

    /// The host itself.
    pub(crate) fn host(&self) -> &Hop {
        &self.hops[self.hops.len() - 1]
    }
}

fn read(person: &Person, host: &str, files: &dyn Files) -> Result<Said, ConfigError> {
    config::read(&person.home, host, files)
}

fn hop(place: &Place, said: &Said, key: Option<&Path>, person: &Person) -> Hop {
    let ssh = person.home.join(".ssh");
    let mut keys: Vec<PathBuf> = key.map(Path::to_owned).into_iter().chain(said.keys.clone()).collect();
    let named = keys.clone();
    if keys.is_empty() {
        keys = USUAL_KEYS.iter().map(|name| ssh.join(name)).collect();
    }
    let usual = || vec![ssh.join("known_hosts"), ssh.join("known_hosts2"), "/etc/ssh/ssh_known_hosts".into()];
    Hop {
        host: said.host_name.clone().unwrap_or_else(|| place.host.clone()),
        port: place.port.or(said.port).unwrap_or(22),
        user: place.user.clone().or_else(|| said.user.clone()).unwrap_or_else(|| person.user.clone()),
        keys,
        named,
        // With a key from the command line, other keys of the agent are not tried, because they could use up the
        // tries.
        keys_only: key.is_some() || said.keys_only.unwrap_or(false),
        agent: person.agent.clone(),
        known_hosts: said.known_hosts.clone().unwrap_or_else(usual),
        key_alias: said.key_alias.clone(),
    }
}

/// `[user@]host[:port]`
struct Place {
    user: Option<String>,
    host: String,
    port: Option<u16>,
}

impl Place {
    fn parse(text: &str) -> Result<Place, TargetError> {
        let none = || TargetError::NoHost(text.to_owned());
        let (user, rest) = match text.rsplit_once('@') {
            Some((user, rest)) if !user.is_empty() => (Some(user.to_owned()), rest),
            Some(_) => return Err(none()),
            None => (None, text),
        };
        let (mut host, mut port) = (rest, None);
        if let Some((inside, after)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            host = inside;
            port = after.strip_prefix(':');
        } else if rest.matches(':').count() == 1 {
            (host, port) = rest.split_once(':').map_or((rest, None), |(host, port)| (host, Some(port)));
        }
        let port = port.map(|port| port.parse().map_err(|_| none())).transpose()?;
        let is_plain = |c: char| c.is_alphanumeric() || ".-_:%".contains(c);
        if host.is_empty() || host.starts_with('-') || !host.chars().all(is_plain) {
            return Err(none());
        }
        Ok(Place { user, host: mem::take(&mut host.to_owned()), port })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn person() -> Person {
        Person { home: "/h".into(), user: "me".into(), agent: None }
    }

    fn target(wish: &SshWish, config: &str) -> Result<Route, TargetError> {
        let files = BTreeMap::from([(PathBuf::from("/h/.ssh/config"), config.to_owned())]);
        Route::with(wish, &person(), &files)
    }

    fn way(target: &Route) -> String {
        let hops: Vec<String> = target.hops.iter().map(|hop| format!("{}@{hop}", hop.user)).collect();
        hops.join(" > ")
    }

    #[test]
    fn test_ways() {
        let config = "Host box\nHostName 10.0.0.7\nUser ada\nProxyJump gate\nHost gate\nUser bob\nPort 2200\n\
                      ProxyJump outer\nHost loop\nProxyJump loop\n";
        let wish = |place: &str, port, jump: Option<&str>| SshWish {
            place: place.into(),
            port,
            jump: jump.map(str::to_owned),
            ..SshWish::default()
        };
        let rows = [
            (wish("x", None, None), "me@x"),
            (wish("eve@x:7", None, None), "eve@x:7"),
            (wish("eve@x:7", Some(8), None), "eve@x:8"),
            (wish("[fe80::1]:7", None, None), "me@[fe80::1]:7"),
            (wish("fe80::1", None, None), "me@fe80::1"),
            (wish("box", None, None), "me@outer > bob@gate:2200 > ada@10.0.0.7"),
            (wish("eve@box:5", None, Some("a, b:9")), "me@a > me@b:9 > eve@10.0.0.7:5"),
        ];
        for (wish, wanted) in rows {
            assert_eq!(way(&target(&wish, config).unwrap()), wanted, "{}", wish.place);
        }
        for place in ["", "@x", "a b", "-oProxyCommand=x", "x:y", "x:99999", "me@"] {
            assert!(matches!(target(&wish(place, None, None), ""), Err(TargetError::NoHost(_))), "{place}");
        }
        assert!(matches!(target(&wish("loop", None, None), config), Err(TargetError::Circle(_))));
    }

    #[test]
    fn test_keys() {
        let config = "Host box\nIdentityFile ~/.ssh/lab\nUserKnownHostsFile /k\n";
        let wish = |key: Option<&str>| SshWish {
            place: "box".into(),
            key: key.map(Into::into),
            ..SshWish::default()
        };
        let keyed = target(&wish(Some("/my/key")), config).unwrap();
        assert_eq!(keyed.host().keys, [PathBuf::from("/my/key"), "/h/.ssh/lab".into()]);
        assert!(keyed.host().keys_only);
        assert_eq!(keyed.host().known_hosts, [PathBuf::from("/k")]);
        let usual = target(&wish(None), "").unwrap();
        assert!(usual.host().keys[0] == Path::new("/h/.ssh/id_ed25519") && usual.host().named.is_empty());
    }
}
