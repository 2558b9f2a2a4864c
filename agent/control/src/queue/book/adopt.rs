//! The part of the book about unknown replicas: those that nodes hold and this controller has no record of.
//!
//! Either this controller's database is out of date (it was rebuilt after damage, or restored from a backup), or the
//! node says what is not true. A node proves what it was given: it is asked, and shows the document and the grant of its
//! order. A grant counts only for what the book cannot know ([`Lives::is_news`](super::lives::Lives::is_news)).
//!
//! | The node holds | The record says | With a proof that is news | Without |
//! |---|---|---|---|
//! | an attempt of a job | nothing at all | the job is taken over | *unproved* |
//! | a rank of an attempt | other ranks of it, taken over | it belongs to them | *unproved* |
//! | a later attempt | an earlier one, or none yet | the later one counts; it was placed as the earlier was over | *unproved* |
//! | the same attempt | it was given to another node | it is left alone until the job has ended: a person decides | the same |
//! | an earlier attempt | a later one, or an end | it is not named in the orders, so the node ends it | the same |
//!
//! What is unproved is neither adopted nor ended: it goes on, takes room on its node alone, no job of its name is placed
//! there, and an administrator adopts or ends it by name. The controller's own node is believed without a proof: its
//! files are this controller's files.
//!
//! Invariants: nothing is ended because a record is missing; after a loss of records nothing is placed and no replica
//! is called lost before every node on record has said what it runs and what it was given, or was declared lost, so that
//! no attempt number is given twice, and no job ends that goes on elsewhere; what is adopted gets no secrets, and is begun
//! anew if its command had not started.
//!
//! The store is asked by the task of `queue`, between [`Book::unresolved`] and [`Book::resolve`].

use std::collections::BTreeMap;
use std::fmt;

use agent_model::machine::Before;
use agent_model::protocol::grant::PlacedAt;
use agent_model::{
    Boot, Code, Fault, JobEvent, JobId, JobSpec, JobState, NodeId, ReplicaId, ReplicaStep, Retry,
};

use super::{Book, Held, Moment, Report, Standing};
use crate::lease::{Desired, Order};
use crate::store::{Broken, JobRecord, ReplicaRecord};

/// What a node says it was given, when it is asked.
#[derive(Debug, Clone)]
pub(crate) struct Described {
    /// `None` where its document cannot be read.
    pub(crate) spec: Option<JobSpec>,
    /// When it was placed, as its grant says.
    pub(crate) proof: Result<PlacedAt, Doubt>,
}

/// Why a replica is not adopted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Doubt {
    /// The node was asked, and did not say what it was given.
    Silent,
    /// It has no grant: it was given by a release before grants, or by nobody.
    NoGrant,
    /// Its grant does not fit; why, as text for users.
    Grant(String),
    /// Its grant is of a commit that the database has.
    NoNews,
    /// The records say something else of this attempt.
    Contradicts,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Doubt::Silent => f.write_str("its node does not say what it was given"),
            Doubt::NoGrant => f.write_str("its node shows no grant for it"),
            Doubt::Grant(why) => write!(f, "the grant that its node shows does not count: {why}"),
            Doubt::NoNews => {
                f.write_str("its grant is older than the records, which do not have it: it was removed")
            }
            Doubt::Contradicts => {
                f.write_str("the records say that another node has this attempt, or that its job ended")
            }
        }
    }
}

/// A replica that nobody here gave, as far as can be told.
#[derive(Debug, Clone)]
pub(crate) struct Unproved {
    pub(crate) replica: ReplicaId,
    /// What its node says that it runs.
    pub(crate) spec: Option<JobSpec>,
    pub(crate) why: Doubt,
}

/// What an administrator decides about an unproved replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Judgement {
    /// It is taken over as if it were proved.
    Adopt,
    /// Its node ends it and keeps its directory for a while.
    End,
}

/// A replica that a node holds and that belongs to no job of the book.
#[derive(Debug)]
struct Stranger {
    known: Known,
    /// When its node sent the report with which it was found.
    asked: Boot,
    doubt: Option<(Doubt, Option<JobSpec>)>,
    /// An administrator vouches for it.
    vouched: bool,
}

impl Stranger {
    /// It is still being found out what its node was given.
    fn is_open(&self) -> bool {
        self.known != Known::Ended && self.doubt.is_none()
    }
}

/// What is known about it from the records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// The store was not asked yet.
    Unasked,
    /// Its job ended, with this attempt or a later one; or it is to end.
    Ended,
    /// There is no such job.
    Not,
    /// There is an earlier attempt, or other ranks of the same one.
    Earlier,
    /// The record and the node contradict each other: a person has to decide.
    Odd,
}

/// All of them, by node and replica: two nodes may say that they have the same one.
#[derive(Debug, Default)]
pub(super) struct Strangers(BTreeMap<(NodeId, ReplicaId), Stranger>);

impl Strangers {
    /// Removes those that the node of a report does not hold any more.
    fn hear(&mut self, report: &Report) {
        self.0.retain(|(node, replica), _| *node != report.node || report.holds(replica));
    }

    /// The node is removed, and with it what it holds.
    pub(super) fn forget_node(&mut self, node: &NodeId) {
        self.0.retain(|(of, _), _| of != node);
    }

    /// Notes one; true when it is a new one. What the store said about it stays.
    fn note(&mut self, replica: &ReplicaId, report: &Report, known: Known) -> bool {
        let key = (report.node.clone(), replica.clone());
        if let Some(stranger) = self.0.get_mut(&key) {
            if known != Known::Unasked && stranger.known != Known::Ended {
                stranger.known = known;
            }
            return false;
        }
        let stranger = Stranger { known, asked: report.sent, doubt: None, vouched: false };
        self.0.insert(key, stranger).is_none()
    }

    fn of(&self, node: &NodeId) -> impl Iterator<Item = (&ReplicaId, &Stranger)> {
        self.0
            .iter()
            .filter(move |((of, _), _)| of == node)
            .map(|((_, replica), stranger)| (replica, stranger))
    }

    fn is_doubted(&self, node: &NodeId, replica: &ReplicaId) -> bool {
        self.0.get(&(node.clone(), replica.clone())).is_some_and(|stranger| stranger.doubt.is_some())
    }

    fn forget(&mut self, node: &NodeId, replica: &ReplicaId) {
        self.0.remove(&(node.clone(), replica.clone()));
    }

    /// Those that must be looked up in the store.
    fn unasked(&self) -> Vec<ReplicaId> {
        let unasked = self.0.iter().filter(|(_, stranger)| stranger.known == Known::Unasked);
        unasked.map(|((_, replica), _)| replica.clone()).collect()
    }

    /// The orders for the unknown replicas that `node` holds: go on, and report what was ordered.
    pub(super) fn questions(&self, node: &NodeId) -> impl Iterator<Item = Order> {
        let ours = self.of(node).filter(|(_, stranger)| stranger.known != Known::Ended);
        ours.map(|(replica, _)| Order { replica: replica.clone(), desired: Desired::Describe })
    }

    /// Whether it is still being found out what a node has of this job.
    pub(super) fn have(&self, id: &JobId) -> bool {
        self.0.iter().any(|((_, replica), stranger)| replica.job == *id && stranger.is_open())
    }

    /// The unproved ones of a node.
    fn unproved(&self, node: &NodeId) -> Vec<Unproved> {
        let of = |(replica, stranger): (&ReplicaId, &Stranger)| {
            let (why, spec) = stranger.doubt.clone().filter(|_| stranger.known != Known::Ended)?;
            Some(Unproved { replica: replica.clone(), spec, why })
        };
        self.of(node).filter_map(of).collect()
    }
}

impl Book {
    /// Takes in the replicas of a report that are not as on record.
    pub(super) fn meet(&mut self, report: &Report, now: Moment) {
        self.strangers.hear(report);
        for held in &report.replicas {
            match self.standing(&held.replica, &report.node) {
                Standing::Unknown => self.meet_stranger(report, held, Known::Unasked, now),
                Standing::Ahead => self.meet_stranger(report, held, Known::Earlier, now),
                Standing::Fenced if self.is_unheard(&held.replica) => {
                    self.meet_stranger(report, held, Known::Earlier, now);
                }
                Standing::Fenced if self.is_double(&held.replica, &report.node) => {
                    self.meet_double(report, held, now)
                }
                // A later job of the name changes nothing about what was not proved.
                Standing::Fenced if self.strangers.is_doubted(&report.node, &held.replica) => {}
                Standing::Fenced | Standing::Open | Standing::Settled => {
                    self.strangers.forget(&report.node, &held.replica);
                }
            }
        }
        if self.fleet.set_unproved(&report.node, self.strangers.unproved(&report.node)) {
            self.replan = true;
        }
        if self.believes(report) && !self.strangers.of(&report.node).any(|(_, stranger)| stranger.is_open()) {
            self.replan |= self.fleet.has_told(&report.node);
        }
    }

    /// A replica that is not on record, or not yet: it is adopted if the node proves that it was given.
    fn meet_stranger(&mut self, report: &Report, held: &Held, known: Known, now: Moment) {
        let replica = &held.replica;
        if self.strangers.note(replica, report, known) {
            tracing::warn!(%replica, node = %report.node, "found replica on node that is not on record");
        }
        let Some(stranger) = self.strangers.0.get(&(report.node.clone(), replica.clone())) else { return };
        let (known, asked, trusted) = (stranger.known, stranger.asked, report.own || stranger.vouched);
        let spec = held.described_spec();
        let proved = match &held.described {
            _ if matches!(known, Known::Ended | Known::Unasked) => return,
            _ if known == Known::Odd => Err(Doubt::Contradicts),
            // The records say what an earlier attempt of the job was given.
            None if trusted && known == Known::Earlier => Ok(()),
            None if self.has_obeyed(report, asked) => Err(Doubt::Silent),
            None => return,
            Some(_) if trusted => Ok(()),
            Some(Described { proof: Ok(mark), .. }) if self.lives.is_news(mark) => Ok(()),
            Some(Described { proof: Ok(_), .. }) => Err(Doubt::NoNews),
            Some(Described { proof: Err(doubt), .. }) => Err(doubt.clone()),
        };
        let adopted = proved.and_then(|()| match (known, &spec) {
            (Known::Earlier, _) if self.is_unheard(replica) => {
                self.meet_rank(report, held, now);
                Ok(())
            }
            (Known::Earlier, _) => self.meet_later(report, held, now),
            (_, Some(spec)) => {
                self.take_over(report, held, spec, now);
                Ok(())
            }
            (_, None) => Err(Doubt::Silent),
        });
        if let Err(doubt) = adopted {
            self.doubt(&report.node, replica, doubt, spec);
        }
    }

    /// Notes why a replica is not adopted.
    fn doubt(&mut self, node: &NodeId, replica: &ReplicaId, doubt: Doubt, spec: Option<JobSpec>) {
        let Some(stranger) = self.strangers.0.get_mut(&(node.clone(), replica.clone())) else { return };
        if stranger.doubt.as_ref().is_none_or(|(known, _)| *known != doubt) {
            tracing::warn!(%replica, %node, why = %doubt, "found replica that is not proved");
        }
        stranger.doubt = Some((doubt, spec));
    }

    /// The node obeyed orders that answer a report which it sent at `asked`, or a later one.
    fn has_obeyed(&self, report: &Report, asked: Boot) -> bool {
        self.believes(report) && report.obeyed.is_some_and(|obeyed| obeyed.answers >= asked)
    }

    /// Takes in what an administrator decides about a replica of a node; false when it is not unproved, or is to be
    /// adopted against the records.
    pub(crate) fn judge(&mut self, node: &NodeId, replica: &ReplicaId, judgement: Judgement) -> bool {
        let key = (node.clone(), replica.clone());
        let Some(stranger) = self.strangers.0.get_mut(&key).filter(|stranger| stranger.doubt.is_some())
        else {
            return false;
        };
        match judgement {
            Judgement::Adopt if stranger.known == Known::Odd => return false,
            Judgement::Adopt => stranger.vouched = true,
            Judgement::End => stranger.known = Known::Ended,
        }
        self.fleet.set_unproved(node, self.strangers.unproved(node));
        (self.urgent, self.replan) = (true, true);
        true
    }

    /// Adds a job that is not on record, and that continues as if it always had been.
    fn take_over(&mut self, report: &Report, held: &Held, spec: &JobSpec, now: Moment) {
        let id = &held.replica.job;
        let request = format!("taken over: {}", held.replica);
        let job = JobRecord {
            state: JobState::Preparing,
            epoch: held.replica.epoch,
            // What became of the attempts before is not known, so none of them counts against the limit.
            uncharged: held.replica.epoch.0.saturating_sub(1),
            started_at: held.started_at,
            replicas: vec![self.replica_of(report, held)],
            is_task: id.as_task().is_some_and(|(array, index)| self.claim_index(&array, index)),
            made: id
                .as_task()
                .and_then(|(pipeline, _)| self.jobs.get(&pipeline)?.steps.as_ref())
                .map(|_| BTreeMap::new()),
            ..JobRecord::new(id.clone(), request, spec.clone(), held.started_at.unwrap_or(now.wall))
        };
        self.leases.grant(self.jobs.add(job), Some(report.sent), now.boot);
        self.adopted(report, held, now, "the controller has no record of this job, but");
    }

    /// The record is of an earlier attempt: the one on the node counts.
    fn meet_later(&mut self, report: &Report, held: &Held, now: Moment) -> Result<(), Doubt> {
        let id = &held.replica.job;
        let decided =
            |state| matches!(state, JobState::Finalizing(_) | JobState::NotResponding(Before::Finalizing(_)));
        if self.jobs.state(id).is_some_and(|state| state.is_terminal() || decided(state)) {
            return Err(Doubt::Contradicts);
        }
        self.leave_line(id);
        self.leave_node(id);
        self.jobs.advance(id, JobEvent::Placed);
        let replica = self.replica_of(report, held);
        self.jobs.edit(id, |job| {
            job.uncharged += held.replica.epoch.0.saturating_sub(job.epoch.0 + 1); // of which nothing is known
            job.epoch = held.replica.epoch;
            (job.not_before, job.go, job.broken, job.held) = (None, None, None, None);
            job.waits_for.clear();
            job.replicas = vec![replica];
        });
        if let Some(job) = self.jobs.get(id) {
            self.leases.grant(job, Some(report.sent), now.boot);
        }
        self.adopted(report, held, now, "the record of this job is older than the truth:");
        Ok(())
    }

    fn adopted(&mut self, report: &Report, held: &Held, now: Moment, why: &str) {
        let (node, replica) = (&report.node, &held.replica);
        let id = &replica.job;
        self.fleet.assign(node, id);
        self.strangers.forget(node, replica);
        (self.urgent, self.replan) = (true, true);
        tracing::warn!(%replica, %node, "adopting attempt that is not on record");
        self.jobs.tell(id, Some(node), now, format!("{why} {node} has attempt {} of it", replica.epoch));
        if report.own {
            return;
        }
        // Other decisions of the same time may be missing too.
        self.lives.leave_gap(replica.epoch);
        if held.step < ReplicaStep::Launching {
            let what = "it was taken over before its command was started, and gets no secrets";
            let fault = Fault::new(Code::NodeLost, what).with_retry(Retry::SameNode);
            self.jobs.edit(id, |job| {
                job.uncharged += u64::from(job.broken.is_none());
                job.broken.get_or_insert(Broken { rank: replica.rank, fault });
            });
        }
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
        let (id, replica) = (&held.replica.job, self.replica_of(report, held));
        self.jobs.edit(id, |job| job.replicas.push(replica));
        if let Some(job) = self.jobs.get(id) {
            self.leases.grant_run(job, held.replica.rank, Some(report.sent), now.boot);
        }
        self.adopted(report, held, now, "the record of this job is older than the truth:");
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
        if self.strangers.note(&held.replica, report, Known::Odd) {
            tracing::error!(replica = %held.replica, %node, "found same attempt on two nodes");
            let text = format!(
                "{node} has attempt {} too: both go on; cancel the job, and start it again, if that is not wanted",
                held.replica.epoch
            );
            self.jobs.tell(id, Some(node), now, text);
        }
        let spec = held.described_spec();
        self.doubt(node, &held.replica, Doubt::Contradicts, spec);
    }

    /// The record of a replica that is adopted; it gets a grant of this life.
    fn replica_of(&mut self, report: &Report, held: &Held) -> ReplicaRecord {
        // Its step is taken in like any other, right after.
        ReplicaRecord {
            rank: held.replica.rank,
            adopted: !report.own,
            placed: Some(self.lives.mark()),
            ..ReplicaRecord::on(&report.node, &report.boot_id)
        }
    }

    /// The replicas that must be looked up in the store.
    pub(crate) fn unresolved(&self) -> Vec<ReplicaId> {
        self.strangers.unasked()
    }

    /// Takes in the record from the store, if there is one.
    pub(crate) fn resolve(&mut self, replica: &ReplicaId, job: Option<&JobRecord>) {
        for (_, stranger) in self.strangers.0.iter_mut().filter(|((_, of), _)| of == replica) {
            stranger.known = match job {
                Some(job) if job.state.is_terminal() && !is_ahead(job, replica) => Known::Ended,
                Some(_) => Known::Odd,
                None => Known::Not,
            };
        }
    }
}

/// Whether `replica` is of an attempt after the latest of `job`, as far as this controller knows.
pub(super) fn is_ahead(job: &JobRecord, replica: &ReplicaId) -> bool {
    replica.epoch > job.epoch
}

#[cfg(test)]
mod tests;
