//! Contact with nodes, leases of runs, and the orders of each node.
//!
//! These are three separate things. A node is *in contact* for a while after each report ([`Contacts`]); when that
//! time is over, users see it and the node gets no new work, but its runs go on. A run that may be replaced has a
//! *lease* ([`Leases`]), which is extended only by a report that the run is alive; when it is over the run has ended,
//! wherever it was, and the job may be placed again. A run that is held has no lease. *Orders* are the whole set of
//! replicas a node should hold.
//!
//! Pure: the caller passes the records and the time (this machine's boot time; the time of another machine is never
//! compared with it, only sent back to that machine). Invariants: for the same report, the lease starts on the
//! controller at or after its start on the node; a controller that just started counts every lease as answered now;
//! the time until which a node may run something is valid for one boot of it; only the latest epoch of a job is ever
//! ordered to run.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_model::job::OnDisconnect;
use agent_model::lease::Terms;
use agent_model::machine::Eligibility;
use agent_model::protocol::gang::Gang;
use agent_model::protocol::grant::PlacedAt;
use agent_model::protocol::orders::{EnvironmentWant, UNHEARD};
use agent_model::{Boot, Code, JobId, JobSpec, NodeId, ReplicaId};

use crate::store::{JobRecord, ReplicaRecord};

/// What a node should do with one replica.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Desired {
    /// Run it to its end.
    Run {
        spec: JobSpec,
        /// Until this moment of the node's boot time; `None` is without limit.
        until: Option<Boot>,
        /// Of a rank of several.
        gang: Option<Gang>,
        /// When it was placed.
        placed: Option<PlacedAt>,
    },
    /// End it.
    Stop { grace: Duration, reason: String },
    /// Its outcome is stored; remove it.
    Forget,
    /// Leave it as it is, and report what it was ordered to do.
    Describe,
}

/// One line of a node's orders.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Order {
    pub(crate) replica: ReplicaId,
    pub(crate) desired: Desired,
}

/// Everything a node should hold.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Orders {
    /// Echoed by the node, which proves that it received orders of this controller epoch.
    pub(crate) controller_epoch: u64,
    /// The `sent` of the latest report that arrived before these orders were made.
    pub(crate) answers: Boot,
    /// Increases with every message of one stream.
    pub(crate) revision: u64,
    pub(crate) list: Vec<Order>,
    /// The changes that are wanted to environments, by key.
    pub(crate) environments: Vec<(String, EnvironmentWant)>,
    /// Ended replicas whose outputs are to be stored.
    pub(crate) outputs: Vec<ReplicaId>,
    /// Running replicas whose outputs so far are to be stored.
    pub(crate) running_outputs: Vec<ReplicaId>,
    /// Ended replicas of removed jobs, of which the node keeps something that is to go.
    pub(crate) discard: Vec<ReplicaId>,
    /// The machine will be taken away, as an operator said: when, by its own clock, and why.
    pub(crate) preemption: Option<(Boot, String)>,
    /// Whether new work is let onto the node, for people there; `None` for a node that is not on record.
    pub(crate) eligibility: Option<Eligibility>,
}

/// Until when each node counts as connected.
#[derive(Debug)]
pub(crate) struct Contacts {
    length: Duration,
    until: BTreeMap<NodeId, Boot>,
}

impl Contacts {
    pub(crate) fn new(length: Duration) -> Contacts {
        Contacts { length, until: BTreeMap::new() }
    }

    /// A report of the node arrived at `now`.
    pub(crate) fn renew(&mut self, node: &NodeId, now: Boot) {
        self.until.insert(node.clone(), now + self.length);
    }

    /// The nodes that were silent for too long at `now`; each is named once.
    pub(crate) fn tick(&mut self, now: Boot) -> Vec<NodeId> {
        let over: Vec<NodeId> =
            self.until.iter().filter(|(_, until)| **until <= now).map(|(node, _)| node.clone()).collect();
        for node in &over {
            self.until.remove(node);
        }
        over
    }

    /// When the next one counts as silent.
    pub(crate) fn next(&self) -> Option<Boot> {
        self.until.values().min().copied()
    }
}

/// The lease of one run.
#[derive(Debug, Clone, Copy)]
struct Lease {
    /// When the node sent the report that the lease is counted from; `None` before one of its present boot.
    sent: Option<Boot>,
    /// When that report arrived.
    answered: Boot,
    /// How long the run may take to end.
    grace: Duration,
}

/// The leases of all runs that may be replaced.
#[derive(Debug)]
pub(crate) struct Leases {
    terms: Terms,
    of: BTreeMap<ReplicaId, Lease>,
}

impl Leases {
    pub(crate) fn new(terms: Terms) -> Leases {
        Leases { terms, of: BTreeMap::new() }
    }

    pub(crate) fn terms(&self) -> Terms {
        self.terms
    }

    /// Starts the lease of every replica of a placed job at `answered`; `sent` is that of the report on which the
    /// placement is based, if there is one. A job that is held gets no lease.
    pub(crate) fn grant(&mut self, job: &JobRecord, sent: Option<Boot>, answered: Boot) {
        for replica in job.replicas.iter().filter(|replica| replica.end.is_none()) {
            self.grant_run(job, replica.rank, sent, answered);
        }
    }

    /// The same for one rank.
    pub(crate) fn grant_run(&mut self, job: &JobRecord, rank: u32, sent: Option<Boot>, answered: Boot) {
        if job.spec.limits.on_disconnect == OnDisconnect::Replace {
            let grace = job.spec.limits.grace();
            self.of.insert(job.replica(rank), Lease { sent, answered, grace });
        }
    }

    /// A report, sent at `sent` by the node's clock, contained evidence that the run is alive.
    pub(crate) fn renew(&mut self, replica: &ReplicaId, sent: Boot, answered: Boot) {
        if let Some(lease) = self.of.get_mut(replica) {
            (lease.sent, lease.answered) = (Some(sent), answered);
        }
    }

    /// Renews the lease of a run that was ordered and never reported, once for each boot of its node and each
    /// controller process: the order may have been lost, and obeying it takes time.
    pub(crate) fn offer(&mut self, replica: &ReplicaId, sent: Boot, answered: Boot) {
        if self.of.get(replica).is_some_and(|lease| lease.sent.is_none()) {
            self.renew(replica, sent, answered);
        }
    }

    /// The node was restarted: its clock starts again, so no time granted before is valid on it.
    pub(crate) fn rebooted(&mut self, replica: &ReplicaId) {
        if let Some(lease) = self.of.get_mut(replica).filter(|_| !broken!(LeaseOfAnotherBoot)) {
            lease.sent = None;
        }
    }

    /// This run of the job has ended.
    pub(crate) fn end_run(&mut self, replica: &ReplicaId) {
        self.of.remove(replica);
    }

    /// The job has no run any more.
    pub(crate) fn end(&mut self, job: &JobId) {
        if !self.of.is_empty() {
            self.of.retain(|replica, _| replica.job != *job);
        }
    }

    /// Until when the node may run it: `None` is without limit.
    pub(crate) fn until(&self, replica: &ReplicaId) -> Option<Boot> {
        let lease = self.of.get(replica)?;
        Some(lease.sent.map_or(UNHEARD, |sent| self.terms.held_until(sent)))
    }

    /// The runs whose lease is over at `now`: they have ended, wherever they were.
    pub(crate) fn over(&self, now: Boot) -> Vec<ReplicaId> {
        let over = self.of.iter().filter(|(_, lease)| self.ends(lease) <= now);
        over.map(|(replica, _)| replica.clone()).collect()
    }

    /// When the next lease is over.
    pub(crate) fn next(&self) -> Option<Boot> {
        self.of.values().map(|lease| self.ends(lease)).min()
    }

    fn ends(&self, lease: &Lease) -> Boot {
        if broken!(NoKillGrace) {
            return lease.answered + self.terms.length;
        }
        self.terms.granted_until(lease.answered, lease.grace)
    }
}

/// Everything `node` should hold: its replicas of `jobs`, and those it may forget.
pub(crate) fn orders<'a>(
    node: &NodeId,
    leases: &Leases,
    jobs: impl Iterator<Item = &'a JobRecord>,
    settled: impl Iterator<Item = &'a ReplicaId>,
) -> Vec<Order> {
    let current = jobs.filter(|job| job.state.is_placed()).flat_map(|job| {
        let ours = job.replicas.iter().filter(|replica| replica.node == *node && replica.end.is_none());
        ours.map(|replica| Order {
            replica: job.replica(replica.rank),
            desired: desired(job, leases, replica.rank),
        })
    });
    current
        .chain(settled.map(|replica| Order { replica: replica.clone(), desired: Desired::Forget }))
        .collect()
}

fn desired(job: &JobRecord, leases: &Leases, rank: u32) -> Desired {
    match job.why_stopped() {
        Some(reason) => Desired::Stop { grace: job.spec.limits.grace(), reason },
        None => Desired::Run {
            spec: job.spec_to_run(),
            until: leases.until(&job.replica(rank)),
            gang: job.gang(rank),
            placed: job.rank(rank).and_then(|rank| rank.placed.clone()),
        },
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
    use agent_model::job::Limits;
    use agent_model::machine::Before;
    use agent_model::{JobDraft, JobState, Verdict};
    use proptest::prelude::*;

    use crate::store::tests::job;

    fn node(name: &str) -> NodeId {
        name.parse().unwrap()
    }

    fn placed(state: JobState, on: &str) -> JobRecord {
        let mut record = job("a", 1);
        record.state = state;
        record.epoch = agent_model::Epoch(3);
        record.replicas = vec![ReplicaRecord::on(&node(on), "b1")];
        record
    }

    #[test]
    fn test_orders_run_until_the_verdict_is_canceled() {
        let none = Leases::new(Terms::default());
        for state in [JobState::Preparing, JobState::Running, JobState::NotResponding(Before::Running)] {
            let orders = orders(&node("n"), &none, [&placed(state, "n")].into_iter(), std::iter::empty());
            assert!(
                matches!(&orders[..], [Order { desired: Desired::Run { until: None, gang: None, .. }, .. }]),
                "{state}"
            );
            assert_eq!(orders[0].replica.to_string(), "a.3.0");
        }
        for state in [
            JobState::Finalizing(Verdict::Canceled),
            JobState::NotResponding(Before::Finalizing(Verdict::Canceled)),
        ] {
            let orders = orders(&node("n"), &none, [&placed(state, "n")].into_iter(), std::iter::empty());
            assert!(matches!(&orders[..], [Order { desired: Desired::Stop { .. }, .. }]), "{state}");
        }
    }

    #[test]
    fn test_orders_name_neither_foreign_nor_ended_jobs() {
        let jobs = [placed(JobState::Running, "other"), placed(JobState::Completed, "n")];
        let settled: ReplicaId = "b.1.0".parse().unwrap();
        let none = Leases::new(Terms::default());
        let orders = orders(&node("n"), &none, jobs.iter(), [&settled].into_iter());
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

    fn replaced() -> JobRecord {
        let mut record = placed(JobState::Running, "n");
        let limits = Limits { on_disconnect: OnDisconnect::Replace, ..Limits::default() };
        record.spec = JobDraft { limits, ..record.spec.into() }.validate().unwrap();
        record
    }

    #[test]
    fn test_only_a_run_that_may_be_replaced_has_a_lease_and_evidence_alone_makes_it_longer() {
        let at = |seconds| Boot(Duration::from_secs(seconds));
        let mut leases = Leases::new(Terms::default());
        leases.grant(&placed(JobState::Running, "n"), Some(at(5)), at(100));
        assert_eq!((leases.next(), leases.until(&placed(JobState::Running, "n").replica(0))), (None, None));
        let job = replaced();
        let replica = job.replica(0);
        leases.grant(&job, Some(at(5)), at(100));
        let held = |sent| Some(Terms::default().held_until(at(sent)));
        let ends = |heard| Some(Terms::default().granted_until(at(heard), Limits::DEFAULT_GRACE));
        assert_eq!((leases.until(&replica), leases.next()), (held(5), ends(100)));
        leases.offer(&replica, at(6), at(101));
        assert_eq!((leases.until(&replica), leases.next()), (held(5), ends(100)));
        leases.renew(&replica, at(7), at(102));
        assert_eq!((leases.until(&replica), leases.next()), (held(7), ends(102)));
        leases.rebooted(&replica);
        assert_eq!((leases.until(&replica), leases.next()), (Some(UNHEARD), ends(102)));
        leases.offer(&replica, at(1), at(103));
        assert_eq!((leases.until(&replica), leases.next()), (held(1), ends(103)));
        assert!(leases.over(at(103)).is_empty());
        assert_eq!(leases.over(leases.next().unwrap()), [replica]);
        leases.end(&job.id);
        assert_eq!(leases.next(), None);
    }

    proptest! {
        #[test]
        fn test_contact_ends_once_and_only_after_silence(steps in prop::collection::vec((0u8..3, 0u64..40), 1..60)) {
            let length = Duration::from_secs(15);
            let (mut contacts, mut now) = (Contacts::new(length), Boot::from_millis(7));
            let mut heard: BTreeMap<NodeId, Boot> = BTreeMap::new();
            for (who, seconds) in steps {
                now = now + Duration::from_secs(seconds);
                for over in contacts.tick(now) {
                    let last = heard.remove(&over);
                    prop_assert!(last.is_some_and(|last| now >= last + length));
                }
                prop_assert!(heard.values().all(|last| now < *last + length));
                prop_assert_eq!(contacts.next(), heard.values().min().map(|last| *last + length));
                let name = node(["x", "y", "z"][usize::from(who)]);
                contacts.renew(&name, now);
                heard.insert(name, now);
            }
        }
    }
}
