//! A tunnel: the SSH connection by which a host reaches a controller that it cannot connect to itself.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How the controller logs in to a host, and where on that host it is found then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunnelSpec {
    /// The address of the host, as the controller reaches it.
    pub host: String,
    /// The port of its SSH server.
    pub port: u16,
    /// The user to log in as.
    pub user: String,
    /// The key that the host must show, as a line of OpenSSH: `ssh-ed25519 AAAA...`.
    pub host_key: String,
    /// The port of the host's loopback that leads to the controller.
    pub listens: u16,
}

impl fmt::Display for TunnelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            22 => write!(f, "{}@{}", self.user, self.host),
            port if self.host.contains(':') => write!(f, "{}@[{}]:{port}", self.user, self.host),
            port => write!(f, "{}@{}:{port}", self.user, self.host),
        }
    }
}

/// Whether a tunnel carries connections now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TunnelState {
    /// It is being opened for the first time.
    Opening,
    /// It carries connections.
    Up,
    /// It does not, for this reason; it is opened again.
    Down {
        /// The error of the last attempt.
        why: String,
    },
}
