//! What the messages of a controller mean, also of one of another release.
//!
//! Pure. Invariant: an order that is not understood changes nothing about its replica.

use std::collections::BTreeSet;

use agent_model::job::Limits;
use agent_model::protocol::grant::Given;
use agent_model::protocol::orders::{Desired, EnvironmentWant, Wanted};
use agent_model::{Boot, JobSpec, ReplicaId};
use agent_proto::{WireError, v1};
use tracing::{error, warn};

use crate::worker::environments::Wish;

/// The replicas that the controller wants described.
pub(super) fn asked(orders: &v1::NodeOrders) -> BTreeSet<ReplicaId> {
    let describe = |order: &&v1::Order| matches!(order.desired, Some(v1::order::Desired::Describe(_)));
    orders.orders.iter().filter(describe).filter_map(|order| order.replica.parse().ok()).collect()
}

/// The wish for an environment; `None` for an unknown wish of another release.
pub(super) fn wish(order: &v1::EnvironmentOrder) -> Option<Wish> {
    let want = EnvironmentWant::parse(&order.want)?;
    Some(Wish { key: order.key.clone(), want })
}

/// What an order gives, and the proof of it, if it brings one.
pub(super) fn given_by(order: &v1::Order) -> Option<(ReplicaId, Given)> {
    let Some(v1::order::Desired::Run(run)) = &order.desired else { return None };
    let given = Given { document: run.document.clone(), grant: run.grant.clone()?.into() };
    Some((order.replica.parse().ok()?, given))
}

/// The meaning of an order; `None` when it does not even name a replica.
pub(super) fn understand(order: v1::Order) -> Option<(ReplicaId, Wanted)> {
    let replica =
        order.replica.parse::<ReplicaId>().inspect_err(|error| warn!(%error, "a strange order")).ok()?;
    let wanted = wanted(order.desired).unwrap_or_else(|error| {
        error!(%replica, %error, "cannot understand order: it is left undone");
        Wanted::Unclear
    });
    Some((replica, wanted))
}

fn wanted(desired: Option<v1::order::Desired>) -> Result<Wanted, WireError> {
    use v1::order::Desired as Wire;
    Ok(match desired.ok_or(WireError::Missing("order.desired"))? {
        Wire::Run(run) => {
            let until = (run.until_ms > 0).then(|| Boot::from_millis(run.until_ms));
            let gang = run.gang.map(TryInto::try_into).transpose()?;
            Wanted::Run(ordered(&run.document, run.spec)?, until, gang)
        }
        Wire::Stop(stop) => {
            let grace = stop.grace.and_then(|grace| grace.try_into().ok()).unwrap_or(Limits::DEFAULT_GRACE);
            Wanted::Other(Desired::Stop { grace, reason: stop.reason })
        }
        Wire::Forget(_) => Wanted::Other(Desired::Forget),
        Wire::Describe(_) => Wanted::Other(Desired::Run { until: None, gang: None }),
    })
}

/// The job of an order: its document, or the message of a controller of the release before.
fn ordered(document: &str, message: Option<v1::JobSpec>) -> Result<JobSpec, WireError> {
    if document.is_empty() {
        return message.ok_or(WireError::Missing("run.spec"))?.try_into();
    }
    let odd = |error: serde_json::Error| WireError::Value { field: "run.document", value: error.to_string() };
    serde_json::from_str(document).map_err(odd)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> ReplicaId {
        text.parse().unwrap()
    }

    #[test]
    fn test_order_of_a_stranger_release_changes_nothing() {
        let order = v1::Order {
            replica: "a.1.0".into(),
            desired: Some(v1::order::Desired::Run(v1::RunOrder::default())),
        };
        assert_eq!(understand(order), Some((id("a.1.0"), Wanted::Unclear)));
        assert_eq!(understand(v1::Order { replica: "a".into(), desired: None }), None);
    }
}
