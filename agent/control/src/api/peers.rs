//! The calls by which nodes become sources of blobs for each other, and what is told of that.

use agent_identity::Subject;
use agent_model::node::Finding;
use agent_model::protocol::peers::PeerFailure;
use agent_model::{Code, Digest, Fault, NodeId, Principal};
use agent_proto::v1;

use super::{Refusal, Services, invalid};
use crate::fanout::Asker;

/// The most nodes that one node may not want.
const FAILED: usize = 1000;

impl Services {
    pub(super) fn find_source(&self, request: &v1::FindPeerRequest) -> Result<v1::FindPeerResponse, Refusal> {
        let (node, tree): (NodeId, Digest) = (request.node.parse()?, request.tree.parse()?);
        let mut fanout = self.members.fanout.lock();
        let failed: Result<Vec<_>, Refusal> = request.failed.iter().take(FAILED).map(failed).collect();
        let failed = failed?;
        for (peer, what) in &failed {
            if let Some(what) = what.filter(|what| what.is_fault()) {
                tracing::warn!(%node, %peer, what = what.name(), "node found fault with another as a source of blobs");
            }
        }
        let asker = Asker { node: &node, address: &request.address, failed: &failed };
        let now = self.gate.clock.now();
        if request.over {
            fanout.over(&asker, tree, now);
            return Ok(v1::FindPeerResponse::default());
        }
        let is_connected = |node: &NodeId| self.gate.sessions.is_live(node);
        let named = fanout.find(&asker, tree, now, is_connected);
        let (node, address) = named.map(|(node, at)| (node.to_string(), at)).unwrap_or_default();
        Ok(v1::FindPeerResponse { node, address })
    }

    /// A removal counts at once for whoever asks; nodes ask again while they are connected.
    pub(super) fn admit_peer_of(&self, request: &v1::AdmitPeerRequest) -> Result<(), Refusal> {
        let subject: Subject = request.subject.parse().map_err(|_| invalid("`subject` names nobody"))?;
        let is_node = matches!(subject.who, Principal::Node { .. });
        match is_node && self.gate.registry.is_enrolled(&subject) {
            true => Ok(()),
            false => Err(Fault::new(Code::Unidentified, format!("{} is no node here", subject.who)).into()),
        }
    }

    /// What others could not get from a node, for those who look at it.
    pub(super) fn source_faults(&self, node: &NodeId) -> Option<Finding> {
        let faults = self.members.fanout.lock().faults(node, self.gate.clock.now());
        let worst = faults.iter().map(|(failure, ..)| *failure).max()?;
        let told: Vec<String> = faults
            .iter()
            .map(|(failure, by, times)| format!("{} ({by}, {times} times)", failure.name()))
            .collect();
        let fix = match worst {
            PeerFailure::Lies => "check the disk and the memory of this machine: `agentctl gc --check`",
            PeerFailure::Stalls => "look at the load and the network of this machine: `uptime`, `ip -s link`",
            _ => "open its `peer_port` to the other nodes, or set `peer_port: off` on it",
        };
        let means = "other nodes do not get blobs from it, but from others or the controller";
        Some(Finding::limited("peers", told.join("; "), means, fix))
    }
}

fn failed(wire: &v1::FailedPeer) -> Result<(NodeId, Option<PeerFailure>), Refusal> {
    let what = (!wire.what.is_empty()).then(|| PeerFailure::parse(&wire.what));
    Ok((wire.node.parse()?, what))
}
