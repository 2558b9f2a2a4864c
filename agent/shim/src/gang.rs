//! The order that a supervisor passes to the process that starts the command of a rank of several.

use std::collections::BTreeMap;
use std::net::IpAddr;

use agent_model::protocol::gang::Secret;
use serde::{Deserialize, Serialize};

/// How the command of a rank of several is started. It is passed in a file without a name, because of the secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangLaunch {
    /// Which rank this is.
    pub rank: u32,
    /// Every rank, in their order.
    pub hosts: Vec<Host>,
    /// What all ranks know.
    #[serde(with = "secret")]
    pub secret: Secret,
    /// How the command is started.
    pub way: Way,
}

/// The machine of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Where it is reached.
    pub address: IpAddr,
    /// Where it listens if it lends itself to the first rank.
    pub port: u16,
    /// The first and the last of the ports for processes of the command.
    pub ports: (u16, u16),
    /// How many processes of the command it runs.
    pub slots: u32,
}

/// How the command of a rank is started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Once.
    Once,
    /// Once for each set of variables.
    Each(Vec<BTreeMap<String, String>>),
    /// By `mpirun`, on all ranks.
    Lead(Mpi),
    /// By the `mpirun` of the first rank.
    Lend,
}

/// The network of the ranks, for `mpirun`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mpi {
    /// The networks of the ranks, each `address/bits`.
    pub networks: Vec<String>,
    /// The interface of the first rank; empty where it has no name.
    pub interface: String,
    /// The ports for its daemons and for the processes, first and last of each, where all ranks have the same.
    pub ports: Option<[(u16, u16); 2]>,
}

mod secret {
    use agent_model::protocol::gang::Secret;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(secret: &Secret, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(secret.reveal())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Secret, D::Error> {
        String::deserialize(from).map(Secret::new)
    }
}
