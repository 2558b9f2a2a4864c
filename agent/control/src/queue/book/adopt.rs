//! The part of the book about unknown replicas: those that nodes hold and this controller has no record of.
//!
//! A node holds only what a controller ordered. So a replica of a job that is not on record, or of an attempt later
//! than the record's, proves that this controller's database is out of date: it was rebuilt after damage, or restored
//! from a backup. The replica counts as evidence:
//!
//! | The node holds | The record says | What follows |
//! |---|---|---|
//! | an attempt of a job | nothing at all | the node is asked what was ordered, and the job is taken over |
//! | a rank of an attempt | other ranks of it, taken over | it belongs to them |
//! | a later attempt | an earlier one, or none yet | the later one counts; it was placed as the earlier was over |
//! | the same attempt | it was given to another node | it is left alone until the job has ended: a person decides |
//! | an earlier attempt | a later one, or an end | it is not named in the orders, so the node ends it |
//!
//! Invariants: nothing is ended because a record is missing; after a loss of records nothing is placed and no replica
//! is called lost before every node on record has reported what it runs, or was declared lost, so that no attempt
//! number is given twice, and no job ends that goes on elsewhere.
//!
//! The store is asked by the task of `queue`, between [`Book::unresolved`] and [`Book::resolve`].

use std::collections::BTreeMap;

use agent_model::machine::Before;
use agent_model::{JobEvent, JobId, JobSpec, JobState, NodeId, ReplicaId};

use super::{Book, Held, Moment, Report, Standing};
use crate::lease::{Desired, Order};
use crate::store::{JobRecord, ReplicaRecord};

/// A replica that a node holds and that belongs to no job of the book.
#[derive(Debug)]
pub(super) struct Stranger {
    node: NodeId,
    known: Known,
}

/// What is known about it from the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// The store was not asked yet.
    Unasked,
    /// Its job ended, with this attempt or a later one.
    Ended,
    /// There is no such job.
    Not,
    /// The record and the node contradict each other: a person has to decide.
    Odd,
}

/// All of them, by replica.
#[derive(Debug, Default)]
pub(super) struct Strangers(BTreeMap<ReplicaId, Stranger>);

impl Strangers {
    /// Removes those that the node of a report does not hold any more.
    fn hear(&mut self, report: &Report) {
        self.0.retain(|replica, stranger| stranger.node != report.node || report.holds(replica));
    }

    fn known(&self, replica: &ReplicaId) -> Known {
        self.0.get(replica).map_or(Known::Unasked, |stranger| stranger.known)
    }

    /// Notes one; true when it is a new one.
    fn note(&mut self, replica: &ReplicaId, node: &NodeId, known: Known) -> bool {
        self.0.insert(replica.clone(), Stranger { node: node.clone(), known }).is_none()
    }

    fn forget(&mut self, replica: &ReplicaId) {
        self.0.remove(replica);
    }

    /// Those that must be looked up in the store.
    fn unasked(&self) -> Vec<ReplicaId> {
        let unasked = self.0.iter().filter(|(_, stranger)| stranger.known == Known::Unasked);
        unasked.map(|(replica, _)| replica.clone()).collect()
    }

    /// The orders for the unknown replicas that `node` holds: go on, and report what was ordered.
    pub(super) fn questions(&self, node: &NodeId) -> impl Iterator<Item = Order> {
        let ours = move |stranger: &Stranger| stranger.node == *node && stranger.known != Known::Ended;
        let ours = self.0.iter().filter(move |(_, stranger)| ours(stranger));
        ours.map(|(replica, _)| Order { replica: replica.clone(), desired: Desired::Describe })
    }

    /// Whether a node holds an unknown replica of this job.
    pub(super) fn have(&self, id: &JobId) -> bool {
        self.0.keys().any(|replica| replica.job == *id)
    }
}

impl Book {
    /// Takes in the replicas of a report that are not as on record.
    pub(super) fn meet(&mut self, report: &Report, now: Moment) {
        if self.believes(report) {
            self.replan |= self.fleet.has_told(&report.node);
        }
        self.strangers.hear(report);
        for held in &report.replicas {
            match self.standing(&held.replica, &report.node) {
                Standing::Unknown => self.meet_unknown(report, held, now),
                Standing::Ahead => self.meet_later(report, held, now),
                Standing::Fenced if self.is_unheard(&held.replica) => self.meet_rank(report, held, now),
                Standing::Fenced if self.is_double(&held.replica, &report.node) => {
                    self.meet_double(report, held, now)
                }
                Standing::Fenced | Standing::Open | Standing::Settled => {
                    self.strangers.forget(&held.replica);
                }
            }
        }
    }

    fn meet_unknown(&mut self, report: &Report, held: &Held, now: Moment) {
        let known = self.strangers.known(&held.replica);
        match &held.spec {
            Some(spec) if known == Known::Not => self.take_over(report, held, spec, now),
            _ => {
                self.strangers.note(&held.replica, &report.node, known);
            }
        }
    }

    /// Adds a job that is not on record, and that continues as if it always had been.
    fn take_over(&mut self, report: &Report, held: &Held, spec: &JobSpec, now: Moment) {
        let (id, node) = (&held.replica.job, &report.node);
        let request = format!("taken over: {}", held.replica);
        let job = JobRecord {
            state: JobState::Preparing,
            epoch: held.replica.epoch,
            started_at: held.started_at,
            replicas: vec![replica_of(report, held)],
            is_task: id.as_task().is_some_and(|(array, index)| self.claim_index(&array, index)),
            ..JobRecord::new(id.clone(), request, spec.clone(), held.started_at.unwrap_or(now.wall))
        };
        self.leases.grant(self.jobs.add(job), Some(report.sent), now.boot);
        self.fleet.assign(node, id);
        self.adopted(id, node, &held.replica, now, "the controller has no record of this job, but");
    }

    /// The record is of an earlier attempt: the one on the node counts.
    fn meet_later(&mut self, report: &Report, held: &Held, now: Moment) {
        let id = &held.replica.job;
        let decided =
            |state| matches!(state, JobState::Finalizing(_) | JobState::NotResponding(Before::Finalizing(_)));
        if self.jobs.state(id).is_some_and(|state| state.is_terminal() || decided(state)) {
            // How the job ends was decided, so there can be no later attempt of it.
            self.strangers.note(&held.replica, &report.node, Known::Odd);
            return;
        }
        self.leave_line(id);
        self.leave_node(id);
        self.jobs.advance(id, JobEvent::Placed);
        let replica = replica_of(report, held);
        self.jobs.edit(id, |job| {
            job.epoch = held.replica.epoch;
            (job.not_before, job.go, job.broken, job.held) = (None, None, None, None);
            job.waits_for.clear();
            job.replicas = vec![replica];
        });
        let Some(job) = self.jobs.get(id) else { return };
        self.leases.grant(job, Some(report.sent), now.boot);
        self.fleet.assign(&report.node, id);
        self.adopted(id, &report.node, &held.replica, now, "the record of this job is older than the truth:");
    }

    fn adopted(&mut self, id: &JobId, node: &NodeId, replica: &ReplicaId, now: Moment, why: &str) {
        self.strangers.forget(replica);
        (self.urgent, self.replan) = (true, true);
        tracing::warn!(%replica, %node, "adopting attempt that is not on record");
        self.jobs.tell(id, Some(node), now, format!("{why} {node} has attempt {} of it", replica.epoch));
    }

    /// The record of the attempt was made from the ranks on other nodes, and this rank is not in it yet.
    fn is_unheard(&self, replica: &ReplicaId) -> bool {
        self.jobs.get(&replica.job).is_some_and(|job| {
            let some = job.epoch == replica.epoch && !job.replicas.is_empty();
            some && replica.rank < job.spec.resources.nodes && job.rank(replica.rank).is_none()
        })
    }

    /// One more rank of an attempt that was taken over.
    fn meet_rank(&mut self, report: &Report, held: &Held, now: Moment) {
        let (id, node) = (&held.replica.job, &report.node);
        self.jobs.edit(id, |job| job.replicas.push(replica_of(report, held)));
        if let Some(job) = self.jobs.get(id) {
            self.leases.grant_run(job, held.replica.rank, Some(report.sent), now.boot);
        }
        self.fleet.assign(node, id);
        self.adopted(id, node, &held.replica, now, "the record of this job is older than the truth:");
    }

    /// On record, the same attempt is on another node.
    fn is_double(&self, replica: &ReplicaId, node: &NodeId) -> bool {
        // The last attempt of a waiting job is over: a node that still holds it is late, not a double.
        let known = self.jobs.get(&replica.job).filter(|job| job.epoch == replica.epoch);
        known.and_then(|job| job.rank(replica.rank)).is_some_and(|known| known.node != *node)
    }

    /// Two nodes have the same attempt, which no controller orders: one of them got it before a restore.
    fn meet_double(&mut self, report: &Report, held: &Held, now: Moment) {
        let (id, node) = (&held.replica.job, &report.node);
        if self.strangers.note(&held.replica, node, Known::Odd) {
            tracing::error!(replica = %held.replica, %node, "found same attempt on two nodes");
            let text = format!(
                "{node} has attempt {} too: both go on; cancel the job, and start it again, if that is not wanted",
                held.replica.epoch
            );
            self.jobs.tell(id, Some(node), now, text);
        }
    }

    /// The replicas that must be looked up in the store.
    pub(crate) fn unresolved(&self) -> Vec<ReplicaId> {
        self.strangers.unasked()
    }

    /// Takes in the record from the store, if there is one.
    pub(crate) fn resolve(&mut self, replica: &ReplicaId, job: Option<&JobRecord>) {
        if let Some(stranger) = self.strangers.0.get_mut(replica) {
            stranger.known = match job {
                Some(job) if job.state.is_terminal() && !is_ahead(job, replica) => Known::Ended,
                Some(_) => Known::Odd,
                None => Known::Not,
            };
            if stranger.known != Known::Ended {
                tracing::warn!(%replica, node = %stranger.node, "found replica on node that is not on record");
            }
        }
    }
}

fn replica_of(report: &Report, held: &Held) -> ReplicaRecord {
    // Its step is taken in like any other, right after.
    ReplicaRecord { rank: held.replica.rank, ..ReplicaRecord::on(&report.node, &report.boot_id) }
}

/// Whether `replica` is of an attempt after the latest of `job`, as far as this controller knows.
pub(super) fn is_ahead(job: &JobRecord, replica: &ReplicaId) -> bool {
    replica.epoch > job.epoch
}

#[cfg(test)]
mod tests;
