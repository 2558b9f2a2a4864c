//! The machines that belong to the controller, as a whole: how one is taken out of the fleet.
//!
//! Each part of that has an owner of its own (certificates, sessions, tunnels, what a machine can send to others, its
//! jobs); here is the order. Invariant: a machine that is being taken out cannot connect again before it is off the
//! record.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use agent_identity::Authority;
use agent_model::{Clock, Code, Fault, JobId, NodeId};
use parking_lot::Mutex;

use crate::fanout::Fanout;
use crate::queue::{Queue, RemovedNode};
use crate::refusal::Refusal;
use crate::registry::Registry;
use crate::sessions::Sessions;
use crate::tunnels::{TunnelRequest, Tunnels};

/// The authority that signs certificates, and how long they are valid.
#[derive(Clone)]
pub struct IdentityConfig {
    /// The authority.
    pub authority: Arc<Authority>,
    /// The controller's address, which is given out with tokens: `https://host:port`.
    pub address: String,
    /// How long a node's certificate is valid.
    pub node_life: Duration,
    /// How long a user's certificate is valid.
    pub user_life: Duration,
}

impl IdentityConfig {
    /// The usual lifetimes of certificates.
    pub fn new(authority: Arc<Authority>, address: String) -> IdentityConfig {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        IdentityConfig { authority, address, node_life: DAY, user_life: DAY * 30 }
    }
}

impl fmt::Debug for IdentityConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdentityConfig").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Takes machines out of the fleet. Clones share everything.
#[derive(Clone)]
pub(crate) struct Members {
    pub(crate) queue: Queue,
    pub(crate) registry: Registry,
    pub(crate) sessions: Sessions,
    /// Which nodes have what.
    pub(crate) fanout: Arc<Mutex<Fanout>>,
    /// Whoever keeps the connections to hosts that cannot connect to this one.
    pub(crate) tunnels: Option<Tunnels>,
    pub(crate) clock: Arc<dyn Clock>,
}

impl Members {
    /// Revokes first its certificates, so that it cannot connect again; then removes the node, and its jobs count as
    /// lost. Returns those, and whether anything was known of the node.
    pub(crate) async fn forget(
        &self,
        node: &NodeId,
        lose_jobs: bool,
        by: &str,
    ) -> Result<(Vec<JobId>, bool), Refusal> {
        let was_member = self.registry.remove_node(node, self.clock.now()).await?;
        self.sessions.forget(node);
        let had_tunnel = self.drop_tunnel(node).await?;
        self.fanout.lock().forget(node);
        match self.queue.remove_node(node, lose_jobs || was_member, by).await? {
            RemovedNode::Done(jobs) => Ok((jobs, true)),
            RemovedNode::Unknown => Ok((Vec::new(), was_member || had_tunnel)),
            RemovedNode::Busy(jobs) => Err(busy(node, jobs.iter()).into()),
        }
    }

    /// Returns whether there was one.
    pub(crate) async fn drop_tunnel(&self, node: &NodeId) -> Result<bool, Refusal> {
        let Some(tunnels) = &self.tunnels else { return Ok(false) };
        let drop = |answer| TunnelRequest::Drop(node.clone(), answer);
        Ok(tunnels.ask(drop).await.ok_or(Refusal::Stopping)??)
    }
}

/// The refusal for a machine that still has jobs.
pub(crate) fn busy<'a>(node: &NodeId, jobs: impl Iterator<Item = &'a JobId>) -> Fault {
    let jobs: Vec<&str> = jobs.map(JobId::as_str).collect();
    Fault::new(Code::NodeBusy, format!("{node} still has jobs"))
        .why(jobs.join(", "))
        .fix(format!("let it run empty first: agentctl drain {node}; or take them for lost with --lose-jobs"))
}
