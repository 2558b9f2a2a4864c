//! Connections through a proxy: `HTTPS_PROXY` and `NO_PROXY`, as other programs read them.
//!
//! A connection through a proxy is a tunnel (CONNECT): the proxy sees the name of the controller and nothing else.
//! Hosts on this machine are never reached through a proxy.

use std::fmt;
use std::io;
use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The longest answer a proxy may give.
const LONGEST_ANSWER: usize = 8 * 1024;

/// The proxy settings of the environment.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Proxy {
    server: Option<Server>,
    /// Hosts that are reached without it.
    direct: Vec<String>,
}

#[derive(Clone, PartialEq, Eq)]
struct Server {
    host: String,
    port: u16,
    /// The value of `Proxy-Authorization`.
    credentials: Option<String>,
}

impl Proxy {
    /// From environment variables; `variable` returns the value of one. An address that cannot be read counts as
    /// none.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Proxy {
        let either = |upper: &str| {
            let found = variable(upper).or_else(|| variable(&upper.to_ascii_lowercase()));
            found.filter(|value| !value.trim().is_empty())
        };
        let direct = either("NO_PROXY").unwrap_or_default();
        Proxy {
            server: either("HTTPS_PROXY").and_then(|url| Server::read(url.trim())),
            direct: direct.split(',').map(|host| host.trim().to_ascii_lowercase()).collect(),
        }
    }

    /// The proxy for a host, if it is not reached directly.
    fn for_host(&self, host: &str, port: u16) -> Option<&Server> {
        let host = host.to_ascii_lowercase();
        let address = host.parse::<IpAddr>().ok();
        let here = host == "localhost"
            || host.ends_with(".localhost")
            || address.is_some_and(|a| a.is_loopback() || a.is_unspecified());
        let excepted = |rule: &String| is_direct(rule, &host, port, address);
        self.server.as_ref().filter(|_| !here && !self.direct.iter().any(excepted))
    }

    /// A connection to a host, directly or through the proxy.
    pub(crate) async fn connect(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let Some(server) = self.for_host(host, port) else { return TcpStream::connect((host, port)).await };
        let through = |error: io::Error| {
            let proxy = format!("through the proxy {}:{}: {error}", server.host, server.port);
            io::Error::new(error.kind(), proxy)
        };
        let connected = TcpStream::connect((server.host.as_str(), server.port)).await;
        let mut stream = connected.map_err(through)?;
        tunnel(&mut stream, server, host, port).await.map_err(through)?;
        Ok(stream)
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let server = self.server.as_ref().map(|server| format!("{}:{}", server.host, server.port));
        f.debug_struct("Proxy").field("server", &server).field("direct", &self.direct).finish()
    }
}

impl Server {
    /// `http://user:password@host:port`, of which only the host is required.
    fn read(url: &str) -> Option<Server> {
        let rest = match url.split_once("://") {
            Some(("http", rest)) => rest,
            Some(_) => return None,
            None => url,
        };
        let rest = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let (user, place) = rest.rsplit_once('@').map_or((None, rest), |(user, place)| (Some(user), place));
        let (host, port) = match place.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => (host, port.parse().ok()?),
            _ => (place, 80),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let credentials = user.map(|user| format!("Basic {}", STANDARD.encode(decoded(user))));
        (!host.is_empty()).then(|| Server { host: host.to_owned(), port, credentials })
    }
}

/// Decodes the `%` escapes of an address.
fn decoded(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let (mut out, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let hex = text.get(at + 1..at + 3).filter(|_| bytes[at] == b'%');
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    out
}

/// Whether an entry of `NO_PROXY` matches a host: all, a name and its subdomains, an address, or a network.
fn is_direct(rule: &str, host: &str, port: u16, address: Option<IpAddr>) -> bool {
    if rule == "*" {
        return true;
    }
    if let (Some((network, bits)), Some(address)) = (rule.split_once('/'), address) {
        let parsed = network.parse::<IpAddr>().ok().zip(bits.parse::<u32>().ok());
        return parsed.is_some_and(|(network, bits)| is_in(address, network, bits));
    }
    let (name, wanted) = match rule.rsplit_once(':') {
        Some((name, of)) if !name.contains(':') || name.ends_with(']') => (name, of.parse::<u16>().ok()),
        _ => (rule, None),
    };
    let name = name.trim_start_matches('[').trim_end_matches(']').trim_start_matches("*.");
    let name = name.trim_start_matches('.');
    let below = || host.strip_suffix(name).is_some_and(|before| before.ends_with('.'));
    !name.is_empty() && wanted.is_none_or(|wanted| wanted == port) && (host == name || below())
}

fn is_in(address: IpAddr, network: IpAddr, bits: u32) -> bool {
    match (address, network) {
        (IpAddr::V4(address), IpAddr::V4(network)) if bits <= 32 => {
            let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
            u32::from(address) & mask == u32::from(network) & mask
        }
        (IpAddr::V6(address), IpAddr::V6(network)) if bits <= 128 => {
            let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
            u128::from(address) & mask == u128::from(network) & mask
        }
        _ => false,
    }
}

/// Asks a proxy for a tunnel.
async fn tunnel(stream: &mut TcpStream, server: &Server, host: &str, port: u16) -> io::Result<()> {
    let place = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let mut request = format!("CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n");
    if let Some(credentials) = &server.credentials {
        request.push_str(&format!("Proxy-Authorization: {credentials}\r\n"));
    }
    request.push_str("\r\n");
    stream.write_all(request.as_bytes()).await?;
    // Byte by byte: the bytes after the answer are from the controller.
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        if answer.len() >= LONGEST_ANSWER {
            return Err(io::Error::other("it answered with more than a proxy says"));
        }
        answer.push(stream.read_u8().await?);
    }
    let line = String::from_utf8_lossy(&answer);
    let line = line.lines().next().unwrap_or_default();
    match line.split_whitespace().nth(1) {
        Some(code) if code.starts_with('2') => Ok(()),
        Some("407") => Err(io::Error::other("it wants other credentials (407)")),
        _ => Err(io::Error::other(format!("it refused: {}", line.chars().take(100).collect::<String>()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxy(https: &str, no: &str) -> Proxy {
        let said = [("HTTPS_PROXY", https), ("no_proxy", no)];
        Proxy::from_variables(|name| {
            said.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn test_hosts_are_reached_the_way_variables_say() {
        let through = |no: &str, host: &str| proxy("http://p:3128", no).for_host(host, 7443).is_some();
        assert!(through("", "controller.lab") && through("", "10.0.0.7"));
        for host in ["localhost", "127.0.0.2", "::1", "a.localhost"] {
            assert!(!through("", host), "{host} is this machine");
        }
        for (no, host) in [
            ("*", "a.b"),
            ("lab", "controller.lab"),
            (".lab", "controller.lab"),
            ("*.lab", "controller.lab"),
            ("controller.lab:7443", "controller.lab"),
            ("x, Controller.LAB", "controller.lab"),
            ("10.0.0.0/8", "10.1.2.3"),
            ("10.0.0.7", "10.0.0.7"),
            ("fd00::/8", "fd00::7"),
        ] {
            assert!(!through(no, host), "{no} means {host}");
        }
        for (no, host) in [
            ("lab", "xlab"),
            ("controller.lab:443", "controller.lab"),
            ("10.0.0.0/8", "11.0.0.1"),
            ("", "controller.lab"),
            (",", "controller.lab"),
        ] {
            assert!(through(no, host), "{no} does not mean {host}");
        }
        assert!(proxy("", "").for_host("a", 1).is_none());
    }

    #[test]
    fn test_address_of_a_proxy_is_taken_apart_and_its_word_is_not_shown() {
        let server = |url: &str| Server::read(url).map(|s| (s.host, s.port, s.credentials));
        assert_eq!(server("http://p"), Some(("p".into(), 80, None)));
        assert_eq!(server("p:3128/"), Some(("p".into(), 3128, None)));
        assert_eq!(server("http://[::1]:81"), Some(("::1".into(), 81, None)));
        let basic = Some(format!("Basic {}", STANDARD.encode("ada:a@b")));
        assert_eq!(server("http://ada:a%40b@p:81"), Some(("p".into(), 81, basic)));
        assert_eq!((server("https://p:81"), server("http://")), (None, None));
        let shown = format!("{:?}", proxy("http://ada:hunter2@p:81", "lab"));
        assert!(!shown.contains("hunter2") && shown.contains("p:81"), "{shown}");
    }
}
