//! What proves to a controller that it gave an order.

use agent_model::protocol::grant::{Grant, PlacedAt};

use crate::v1;

impl From<Grant> for v1::Grant {
    fn from(grant: Grant) -> v1::Grant {
        let Grant { key, mark: PlacedAt { life, commit }, mac } = grant;
        v1::Grant { key, life, commit, mac }
    }
}

impl From<v1::Grant> for Grant {
    fn from(wire: v1::Grant) -> Grant {
        let v1::Grant { key, life, commit, mac } = wire;
        Grant { key, mark: PlacedAt { life, commit }, mac }
    }
}
