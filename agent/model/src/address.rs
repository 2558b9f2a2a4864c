//! Where a daemon listens.
//!
//! Owns how an address is written, and what makes one valid. The transport proves who listens there; the caller is
//! a [`Principal`](crate::Principal).

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The longest path a unix socket may have, in bytes.
pub const MAX_SOCKET_PATH: usize = 107;

/// Where a daemon listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// At a socket of the same machine: `unix:/run/agentd/agentd.sock`.
    Unix(PathBuf),
    /// Over TLS, at a port of a machine: `https://controller.lab:7443`.
    Tls {
        /// Its name, or its address without brackets.
        host: String,
        /// The port.
        port: u16,
    },
}

/// Why a text is no address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum AddressError {
    #[error("an address begins with `unix:` or `https://`")]
    Kind,
    #[error("a socket's path is absolute")]
    Relative,
    #[error("a socket's path has at most {MAX_SOCKET_PATH} bytes")]
    Long,
    #[error("an address elsewhere is written `https://HOST:PORT`")]
    Place,
}

impl Address {
    /// A socket of this machine.
    pub fn unix(path: &Path) -> Result<Address, AddressError> {
        match path {
            path if path.as_os_str().len() > MAX_SOCKET_PATH => Err(AddressError::Long),
            path if !path.is_absolute() => Err(AddressError::Relative),
            path => Ok(Address::Unix(path.to_owned())),
        }
    }

    /// `HOST:PORT`, the host in brackets if it has colons of its own.
    fn tls(text: &str) -> Result<Address, AddressError> {
        let (host, port) = host_and_port(text.trim_end_matches('/')).ok_or(AddressError::Place)?;
        if port == 0 {
            return Err(AddressError::Place);
        }
        Ok(Address::Tls { host, port })
    }
}

/// Takes `HOST:PORT` apart; the port may be 0.
pub fn host_and_port(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let is_host = match bare {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.chars().all(plain),
    };
    let port = port.parse().ok().filter(|_| is_host && !port.starts_with('+'))?;
    Some((bare.unwrap_or(host).to_owned(), port))
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Address, AddressError> {
        match text.strip_prefix("https://") {
            Some(place) => Address::tls(place),
            None => Address::unix(Path::new(text.strip_prefix("unix:").ok_or(AddressError::Kind)?)),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tls { host, port } if host.contains(':') => write!(f, "https://[{host}]:{port}"),
            Address::Tls { host, port } => write!(f, "https://{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_addresses_are_read_as_they_are_written() {
        let socket = Address::Unix("/run/agentd/agentd.sock".into());
        assert_eq!(socket.to_string().parse(), Ok(socket));
        for text in ["https://controller.lab:7443", "https://10.0.0.7:1", "https://[fd00::7]:7443"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for odd in [
            "https://a",
            "https://a:0",
            "https://a:70000",
            "https://u@a:1",
            "https://a:1/b",
            "https://:1",
            "https://[a]:1",
            "https://fd00::7:1",
        ] {
            assert_eq!(odd.parse::<Address>(), Err(AddressError::Place), "{odd}");
        }
        assert_eq!("/run/agentd/agentd.sock".parse::<Address>(), Err(AddressError::Kind));
        assert_eq!("unix:agentd.sock".parse::<Address>(), Err(AddressError::Relative));
        assert_eq!(format!("unix:/{}", "x".repeat(107)).parse::<Address>(), Err(AddressError::Long));
    }
}
