//! What a node was given: an order as a document, and the controller's proof that it gave exactly that.
//!
//! A node keeps both and returns them only when a controller that has no record of the attempt asks. The proof is a
//! message authentication code over a [`Claim`]; only a controller can make or check one (`agent_identity::GrantKeys`).
//! Invariant: the document is passed on byte for byte, so what is checked is what was ordered, whatever release reads it.

use serde::{Deserialize, Serialize};

use crate::{NodeId, ReplicaId};

/// When a replica was placed: the number of the commit, and the life of the controller that it counts in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedAt {
    /// Random, drawn at each start of a controller.
    pub life: String,
    /// From 1 in each life.
    pub commit: u64,
}

/// The proof that goes with an order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The name of the key that it was made with.
    pub key: String,
    /// When the replica was placed.
    pub mark: PlacedAt,
    /// The code, in hexadecimal.
    pub mac: String,
}

/// What a node was given for one replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Given {
    /// The job to run, as JSON.
    pub document: String,
    /// The proof of it.
    pub grant: Grant,
}

/// Everything that a grant vouches for. The owner of the job is part of the document.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// The job, the attempt and the rank.
    pub replica: &'a ReplicaId,
    /// The node that it was given to.
    pub node: &'a NodeId,
    /// The node's enrollment; empty for one that is known by the socket of the controller's machine.
    pub enrollment: &'a str,
    /// The document of the order.
    pub document: &'a str,
    /// When it was placed.
    pub mark: &'a PlacedAt,
}

impl Claim<'_> {
    /// The bytes that are authenticated: every part with its length before it, so that no two claims are equal.
    pub fn content(&self) -> Vec<u8> {
        let (replica, commit) = (self.replica.to_string(), self.mark.commit.to_string());
        let parts = [
            "agentd grant 1",
            &replica,
            self.node.as_str(),
            self.enrollment,
            self.document,
            &self.mark.life,
            &commit,
        ];
        let sized =
            parts.iter().flat_map(|part| [&(part.len() as u64).to_le_bytes()[..], part.as_bytes()].concat());
        sized.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_no_two_claims_have_the_same_bytes() {
        let (replica, node): (ReplicaId, NodeId) = ("a.1.0".parse().unwrap(), "n".parse().unwrap());
        let mark = |life: &str, commit| PlacedAt { life: life.into(), commit };
        let (one, two, other) = (mark("l", 11), mark("l1", 1), mark("l", 1));
        let claim =
            |enrollment, document, mark| Claim { replica: &replica, node: &node, enrollment, document, mark };
        let claims = [
            claim("e", "{}", &one),
            claim("e", "{}", &two),
            claim("e", "{}", &other),
            claim("e{", "}", &one),
            claim("", "e{}", &one),
        ];
        let contents: std::collections::BTreeSet<_> = claims.iter().map(Claim::content).collect();
        assert_eq!(contents.len(), claims.len());
    }
}
