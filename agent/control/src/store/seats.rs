//! Where the ranks of a job are, and where those of earlier attempts were.
//!
//! The replicas of an attempt are forgotten when it is over; their nodes are noted for a while, because a node may still
//! have something to say of one.

use agent_model::{Epoch, NodeId, ReplicaId};
use serde::{Deserialize, Serialize};

use super::JobRecord;

/// Where a rank is or was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RankPlace<'a> {
    On(&'a NodeId),
    /// It has no place yet.
    NotYet,
    /// There is no such rank, or the attempt was too long ago.
    Nowhere,
    /// In an attempt of a release that did not write it down.
    Unrecorded,
}

/// How many attempts before the latest are noted.
const EARLIER: usize = 8;

/// Where an attempt was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Earlier {
    pub(crate) epoch: Epoch,
    /// By rank.
    pub(crate) nodes: Vec<NodeId>,
}

impl JobRecord {
    /// The attempt is over: notes where its ranks were, and forgets the rest of them.
    pub(crate) fn leave_replicas(&mut self) {
        let nodes: Vec<NodeId> = self.replicas.drain(..).map(|replica| replica.node).collect();
        if !nodes.is_empty() {
            self.earlier.push(Earlier { epoch: self.epoch, nodes });
            let too_many = self.earlier.len().saturating_sub(EARLIER);
            self.earlier.drain(..too_many);
        }
    }

    /// Where a rank of an attempt up to the latest is or was.
    pub(crate) fn seat(&self, replica: &ReplicaId) -> RankPlace<'_> {
        if replica.rank >= self.spec.resources.nodes {
            return RankPlace::Nowhere;
        }
        if replica.epoch == self.epoch && !self.replicas.is_empty() {
            // Of a gang that was adopted some ranks may not have been reported yet.
            return self.rank(replica.rank).map_or(RankPlace::NotYet, |known| RankPlace::On(&known.node));
        }
        let rank = usize::try_from(replica.rank).unwrap_or(usize::MAX);
        match self.earlier.iter().find(|earlier| earlier.epoch == replica.epoch) {
            Some(earlier) => earlier.nodes.get(rank).map_or(RankPlace::Nowhere, RankPlace::On),
            None if self.earlier.is_empty() => RankPlace::Unrecorded,
            None => RankPlace::Nowhere,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ReplicaRecord;
    use super::*;

    #[test]
    fn test_a_rank_has_one_node_in_each_attempt_and_others_have_none() {
        let spec =
            serde_json::from_value(serde_json::json!({ "command": "true", "resources": { "nodes": 2 } }));
        let now = agent_model::Timestamp::default();
        let mut job = JobRecord::new("a".parse().unwrap(), "r".into(), spec.unwrap(), now);
        let place = |job: &mut JobRecord, nodes: &[&str]| {
            job.epoch = job.epoch.next();
            let node = |name: &&str| name.parse::<NodeId>().unwrap();
            let replica = |(rank, name)| ReplicaRecord { rank, ..ReplicaRecord::on(&node(name), "") };
            job.replicas = (0..).zip(nodes).map(replica).collect();
        };
        let told = |job: &JobRecord, replica: &str| match job.seat(&replica.parse().unwrap()) {
            RankPlace::On(node) => node.to_string(),
            other => format!("{other:?}"),
        };
        place(&mut job, &["n1", "n2"]);
        assert_eq!([told(&job, "a.1.0"), told(&job, "a.1.1"), told(&job, "a.1.2")], ["n1", "n2", "Nowhere"]);
        job.leave_replicas();
        assert_eq!(told(&job, "a.1.1"), "n2", "while it waits for the next attempt");
        place(&mut job, &["n3"]);
        assert_eq!([told(&job, "a.1.0"), told(&job, "a.2.0"), told(&job, "a.2.1")], ["n1", "n3", "NotYet"]);
        for _ in 0..EARLIER {
            job.leave_replicas();
            place(&mut job, &["n4", "n5"]);
        }
        assert_eq!([told(&job, "a.1.0"), told(&job, "a.3.1")], ["Nowhere", "n5"]);
        job.earlier.clear();
        assert_eq!([told(&job, "a.1.0"), told(&job, "a.1.2")], ["Unrecorded", "Nowhere"]);
    }
}
