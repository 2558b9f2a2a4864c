//! How long a node counts as alive, and what it should hold: leases, orders, lost replicas.
//!
//! Pure: the caller brings the time (its own monotonic clock; the wall clocks of two machines are never
//! compared) and the records. Invariants: a lease is extended by a report and by nothing else, except that a
//! controller that just started counts every node as just heard; orders name the whole set a node should
//! hold; only the latest epoch of a job is ever ordered to run.
//!
//! Called by `queue::book`.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_model::{Code, JobSpec, JobState, NodeId, ReplicaId, Verdict, machine::Before};
use tokio::time::Instant;

use crate::store::{JobRecord, ReplicaRecord};

/// What a node should do with one replica.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Desired {
    /// Run it to its end.
    Run(Box<JobSpec>),
    /// End it.
    Stop { grace: Duration, reason: String },
    /// Its outcome is stored; remove it.
    Forget,
}

/// One line of a node's orders.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Order {
    pub(crate) replica: ReplicaId,
    pub(crate) desired: Desired,
}

/// Until when each node counts as alive.
#[derive(Debug)]
pub(crate) struct Leases {
    length: Duration,
    until: BTreeMap<NodeId, Instant>,
}

impl Leases {
    pub(crate) fn new(length: Duration) -> Leases {
        Leases { length, until: BTreeMap::new() }
    }

    /// The node was heard at `now`.
    pub(crate) fn renew(&mut self, node: &NodeId, now: Instant) {
        self.until.insert(node.clone(), now + self.length);
    }

    /// The nodes whose lease is over at `now`; each is named once.
    pub(crate) fn tick(&mut self, now: Instant) -> Vec<NodeId> {
        let over: Vec<NodeId> =
            self.until.iter().filter(|(_, until)| **until <= now).map(|(node, _)| node.clone()).collect();
        for node in &over {
            self.until.remove(node);
        }
        over
    }

    /// When the next lease ends.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.until.values().min().copied()
    }
}

/// Everything `node` should hold: its replicas of `jobs`, and those it may forget.
pub(crate) fn orders<'a>(
    node: &NodeId,
    jobs: impl Iterator<Item = &'a JobRecord>,
    settled: impl Iterator<Item = &'a ReplicaId>,
) -> Vec<Order> {
    let current = jobs.filter(|job| job.state.is_placed()).flat_map(|job| {
        let ours = job.replicas.iter().filter(|replica| replica.node == *node);
        ours.map(|replica| Order { replica: job.replica(replica.rank), desired: desired(job) })
    });
    current
        .chain(settled.map(|replica| Order { replica: replica.clone(), desired: Desired::Forget }))
        .collect()
}

fn desired(job: &JobRecord) -> Desired {
    let canceled = Verdict::Canceled;
    match job.state {
        JobState::Finalizing(verdict) | JobState::NotResponding(Before::Finalizing(verdict))
            if verdict == canceled =>
        {
            Desired::Stop {
                grace: job.spec.limits.grace(),
                reason: job.cancel.clone().unwrap_or_else(|| "canceled".to_owned()),
            }
        }
        _ => Desired::Run(Box::new(job.spec.clone())),
    }
}

/// Whether a replica is lost, given that its node just reported under `boot_id` and did not name it.
///
/// A replica that the node never named may not have reached it yet: the order is repeated instead.
pub(crate) fn lost(replica: &ReplicaRecord, boot_id: &str) -> Option<Code> {
    replica.step?;
    Some(if replica.boot_id == boot_id { Code::NodeLost } else { Code::NodeRebooted })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    use crate::store::tests::job;

    fn node(name: &str) -> NodeId {
        name.parse().unwrap()
    }

    fn placed(state: JobState, on: &str) -> JobRecord {
        let mut record = job("a", 1);
        record.state = state;
        record.epoch = agent_model::Epoch(3);
        record.replicas = vec![ReplicaRecord {
            rank: 0,
            node: node(on),
            boot_id: "b1".into(),
            step: None,
            detail: String::new(),
        }];
        record
    }

    #[test]
    fn test_orders_run_until_the_verdict_is_canceled() {
        for state in [JobState::Preparing, JobState::Running, JobState::NotResponding(Before::Running)] {
            let orders = orders(&node("n"), [&placed(state, "n")].into_iter(), std::iter::empty());
            assert!(matches!(&orders[..], [Order { desired: Desired::Run(_), .. }]), "{state}");
            assert_eq!(orders[0].replica.to_string(), "a.3.0");
        }
        for state in [
            JobState::Finalizing(Verdict::Canceled),
            JobState::NotResponding(Before::Finalizing(Verdict::Canceled)),
        ] {
            let orders = orders(&node("n"), [&placed(state, "n")].into_iter(), std::iter::empty());
            assert!(matches!(&orders[..], [Order { desired: Desired::Stop { .. }, .. }]), "{state}");
        }
    }

    #[test]
    fn test_orders_name_neither_foreign_nor_ended_jobs() {
        let jobs = [placed(JobState::Running, "other"), placed(JobState::Completed, "n")];
        let settled: ReplicaId = "b.1.0".parse().unwrap();
        let orders = orders(&node("n"), jobs.iter(), [&settled].into_iter());
        assert_eq!(orders, [Order { replica: settled, desired: Desired::Forget }]);
    }

    #[test]
    fn test_replica_is_lost_only_after_the_node_once_had_it() {
        let mut replica = placed(JobState::Preparing, "n").replicas.remove(0);
        assert_eq!(lost(&replica, "b2"), None);
        replica.step = Some(agent_model::ReplicaStep::Running);
        assert_eq!(lost(&replica, "b1"), Some(Code::NodeLost));
        assert_eq!(lost(&replica, "b2"), Some(Code::NodeRebooted));
    }

    proptest! {
        #[test]
        fn test_lease_ends_once_and_only_after_silence(steps in prop::collection::vec((0u8..3, 0u64..40), 1..60)) {
            let length = Duration::from_secs(15);
            let (mut leases, mut now) = (Leases::new(length), Instant::now());
            let mut heard: BTreeMap<NodeId, Instant> = BTreeMap::new();
            for (who, seconds) in steps {
                now += Duration::from_secs(seconds);
                for over in leases.tick(now) {
                    let last = heard.remove(&over);
                    prop_assert!(last.is_some_and(|last| now >= last + length));
                }
                prop_assert!(heard.values().all(|last| now < *last + length));
                prop_assert_eq!(leases.next(), heard.values().min().map(|last| *last + length));
                let name = node(["x", "y", "z"][usize::from(who)]);
                leases.renew(&name, now);
                heard.insert(name, now);
            }
        }
    }
}
