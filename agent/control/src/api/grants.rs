//! Grants on the wire: one is made for each order that goes out, and checked for each replica that a node describes.
//!
//! Hides the keys, and which enrollment a node has. A node that is known by the socket alone has none.

use std::sync::Arc;

use agent_identity::GrantKeys;
use agent_model::protocol::grant::{Claim, Grant, PlacedAt};
use agent_model::{JobSpec, NodeId, ReplicaId};
use agent_proto::v1;

use crate::queue::{Described, Doubt};
use crate::registry::Registry;

/// See the module. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Grants {
    keys: Arc<GrantKeys>,
    registry: Registry,
}

impl Grants {
    pub(crate) fn new(keys: GrantKeys, registry: Registry) -> Grants {
        Grants { keys: Arc::new(keys), registry }
    }

    /// The document of an order and its grant.
    pub(super) fn give(
        &self,
        node: &NodeId,
        replica: &ReplicaId,
        spec: &JobSpec,
        placed: &PlacedAt,
    ) -> (String, v1::Grant) {
        let document = serde_json::to_string(spec).unwrap_or_default(); // plain data always serialises
        let enrollment = self.registry.enrollment(node);
        let claim = Claim { replica, node, enrollment: &enrollment, document: &document, mark: placed };
        let grant = self.keys.grant(&claim);
        (document, grant.into())
    }

    /// What a node says that it was given, and whether that is so; `None` when it says nothing.
    pub(super) fn check(
        &self,
        node: &NodeId,
        replica: &ReplicaId,
        wire: &v1::HeldReplica,
    ) -> Option<Described> {
        let Some(grant) = wire.grant.clone() else {
            let spec = wire.spec.clone()?;
            return Some(Described { spec: spec.try_into().ok(), proof: Err(Doubt::NoGrant) });
        };
        let (document, grant) = (wire.document.as_str(), Grant::from(grant));
        let enrollment = self.registry.enrollment(node);
        let claim = Claim { replica, node, enrollment: &enrollment, document, mark: &grant.mark };
        let unfit = |why: &dyn std::error::Error| Doubt::Grant(why.to_string());
        let checked = self.keys.check(&claim, &grant).map_err(|refused| unfit(&refused));
        let read = serde_json::from_str::<JobSpec>(document);
        let spec = read.as_ref().ok().cloned();
        let proof = checked.and_then(|()| read.map(|_| grant.mark.clone()).map_err(|error| unfit(&error)));
        Some(Described { spec, proof })
    }
}
