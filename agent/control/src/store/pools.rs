//! The records of pools and of their machines.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_model::node::Interpreter;
use agent_model::{NodeId, PoolName, Timestamp};
use serde::{Deserialize, Serialize};

/// A pool: machines that are made when jobs wait for them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PoolRecord {
    pub(crate) name: PoolName,
    /// The provider that makes its machines, by its name in the configuration.
    pub(crate) provider: String,
    pub(crate) min: u32,
    pub(crate) max: u32,
    /// How long a machine may be idle.
    pub(crate) idle: Duration,
    /// Its machines may be taken away by their provider.
    pub(crate) low_priority: bool,
    /// Those of its machines, beside the name of the pool.
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) created_at: Timestamp,
    pub(crate) modified_at: Timestamp,
    /// It is removed when its last machine is.
    pub(crate) deleting: bool,
    /// What the latest machine that joined has: the next ones are expected to be like it.
    #[serde(default)]
    pub(crate) seen: Option<Box<SeenMachine>>,
}

/// The part of an inventory that decides which jobs a machine can run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SeenMachine {
    pub(crate) slots: u32,
    #[serde(default)]
    pub(crate) job_cpus: u32,
    pub(crate) gpus: u32,
    pub(crate) cpus: u32,
    /// Of these and the processors, what jobs can be given.
    pub(crate) memory: u64,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) gangs: bool,
    pub(crate) interpreters: Vec<Interpreter>,
}

/// A machine of a pool, from before it is asked for until its provider has removed it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MachineRecord {
    /// The name of its node, and of the request to its provider: no other machine ever has it.
    pub(crate) name: NodeId,
    pub(crate) pool: PoolName,
    /// The provider's name for it.
    #[serde(default)]
    pub(crate) id: Option<String>,
    pub(crate) step: MachineStep,
    pub(crate) since: Timestamp,
    /// Why it is where it is, as text for users.
    #[serde(default)]
    pub(crate) why: String,
}

/// Where a machine of a pool stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MachineStep {
    /// Its provider is to make it; whether it has is not known.
    Asked,
    /// Its provider has made it, and it has not joined.
    Created,
    /// It is a node.
    Joined,
    /// It gets no more work, and is to say that it has none.
    Leaving,
    /// It is no node any more, and its provider is to remove it.
    Deleting,
}

impl MachineStep {
    pub(crate) fn name(self) -> &'static str {
        match self {
            MachineStep::Asked => "asked",
            MachineStep::Created => "created",
            MachineStep::Joined => "joined",
            MachineStep::Leaving => "leaving",
            MachineStep::Deleting => "deleting",
        }
    }
}
