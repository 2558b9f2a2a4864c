//! The part of the book about machines that will be taken away.
//!
//! A node has a notice from its provider, which it reports, or from an operator, whose word is sent to it. Nothing more
//! is placed there. The node ends what it has by itself, and reports each replica from when that cannot be taken back;
//! so once it is silent and the deadline is over, those have ended. So have those whose command had ended by its last
//! word: what they had not stored by then is lost with the machine. An attempt that ends because of a notice does not
//! count against the limit of attempts, and the job is queued again at once.
//!
//! Invariants: a machine that answers is put back when its notice is withdrawn, or some time after the deadline; a
//! replica whose command may run is never taken from a silent node because of a notice alone.

use std::time::Duration;

use agent_model::lease::Terms;
use agent_model::preemption::{self, same_deadline};
use agent_model::{Boot, Code, Fault, JobId, NodeId, ReplicaId, ReplicaStep};

use super::fleet::Fleet;
use super::{Book, Held, Moment, NodeState, Report};
use crate::store::{JobRecord, NodePreemption, Notice, RankEnd, ReplicaRecord};

impl Notice {
    /// As text for users: `will be taken away at 08:00:00 UTC: maintenance`.
    pub(crate) fn describe(&self) -> String {
        preemption::describe(self.deadline, &self.reason)
    }

    fn fault(&self, node: &NodeId) -> Fault {
        taken_away(node).why(format!("it {}", self.describe()))
    }
}

/// The fault of an attempt whose machine was taken away.
fn taken_away(node: &NodeId) -> Fault {
    Fault::new(Code::Preempted, format!("{node} was taken away under the job"))
        .fix("nothing: the job is queued again, and this attempt does not count against `retry`")
}

impl NodePreemption {
    /// Takes in what the node reports.
    fn hear(&mut self, report: &Report, rebooted: bool, now: Moment) {
        if rebooted {
            self.asked.take_if(|notice| notice.deadline <= now.wall); // it was taken away, and is back
        }
        let found = report.preemption.as_ref().map(|found| Notice {
            noticed_at: now.wall,
            deadline: now.wall + found.until.since(report.sent),
            reason: found.reason.clone(),
        });
        let again = self.found.as_ref().zip(found.as_ref()).is_some_and(|(known, found)| {
            known.reason == found.reason && same_deadline(known.deadline, found.deadline)
        });
        if !again {
            self.found = found;
        }
    }
}

impl NodeState {
    /// Takes in the notice that a report contains.
    pub(super) fn hear_preemption(&mut self, report: &Report, rebooted: bool, now: Moment) {
        self.change_preemption(now, |known| known.hear(report, rebooted, now));
    }

    fn change_preemption(&mut self, now: Moment, change: impl FnOnce(&mut NodePreemption)) -> bool {
        let before = self.record.preemption.clone();
        change(&mut self.record.preemption);
        let changed = self.record.preemption != before;
        if changed {
            let after = |notice: &Notice| notice.deadline.since(now.wall);
            let notice = self.record.preemption.notice();
            self.gone_at = notice.map(|notice| Terms::default().gone_at(now.boot, after(notice)));
        }
        changed
    }

    /// The same for a node as it is on disk: its whole notice counts anew, as no clock says how much of it is left.
    pub(super) fn await_gone(&mut self, now: Boot) {
        let length = |notice: &Notice| notice.deadline.since(notice.noticed_at);
        let notice = self.record.preemption.notice();
        self.gone_at = notice.map(|notice| Terms::default().gone_at(now, length(notice)));
    }

    /// What an operator said, for its orders: when by its clock, and why.
    pub(super) fn asked_preemption(&self) -> Option<(Boot, String)> {
        let (asked, sent) = self.record.preemption.asked.as_ref().zip(self.sent)?;
        // The date as it was when the latest report arrived, so that it stays the same until the next one.
        Some((sent + asked.deadline.since(self.record.last_seen), asked.reason.clone()))
    }
}

impl Fleet {
    /// The silent nodes on which everything has ended that ends because of their notices.
    fn gone(&self, now: Boot) -> Vec<NodeId> {
        let gone = self.iter().filter(|node| node.gone_at.is_some_and(|at| at <= now));
        gone.filter(|node| !self.is_heard(&node.record.id)).map(|node| node.record.id.clone()).collect()
    }
}

impl Book {
    /// Takes in the word of an operator that a machine will be taken away after this time, or with `None` that it will
    /// not; `None` when there is no such node.
    pub(crate) fn preempt(
        &mut self,
        id: &NodeId,
        said: Option<(Duration, String)>,
        now: Moment,
    ) -> Option<&NodeState> {
        let asked =
            said.map(|(after, reason)| Notice { noticed_at: now.wall, deadline: now.wall + after, reason });
        let changed = self.fleet.edit(id, |node| node.change_preemption(now, |known| known.asked = asked))?;
        if changed {
            (self.urgent, self.replan) = (true, true);
            self.break_gangs_on(id, now);
        }
        self.fleet.get(id)
    }

    /// Ends the attempts of several ranks of which one is on a machine that will be taken away: the ranks elsewhere
    /// are asked to end at the same time, so that they can store their part of what they did.
    pub(super) fn break_gangs_on(&mut self, id: &NodeId, now: Moment) {
        let Some(node) = self.fleet.get(id) else { return };
        let Some(fault) = node.record.preemption.notice().map(|notice| notice.fault(id)) else { return };
        for job in node.jobs.clone() {
            let Some(record) = self.jobs.get(&job) else { continue };
            let several = record.spec.resources.nodes > 1 && record.state.is_placed();
            let rank = record.replicas.iter().find(|rank| rank.node == *id && rank.end.is_none());
            if let Some(rank) =
                rank.filter(|_| several && record.why_stopped().is_none()).map(|rank| rank.rank)
            {
                self.break_gang(&job, rank, fault.clone(), now);
            }
        }
    }

    /// Takes in that a node ends a replica because of its notice.
    pub(super) fn see_preempted(&mut self, report: &Report, held: &Held, now: Moment) {
        let id = &held.replica.job;
        let known = self.jobs.get(id).and_then(|job| job.rank(held.replica.rank));
        if !held.preempted || known.is_none_or(|known| known.preempted) {
            return;
        }
        self.mark_preempted(&held.replica);
        self.urgent = true;
        let notice = self.fleet.get(&report.node).and_then(|node| node.record.preemption.notice());
        let why = notice.map_or_else(|| "was to be taken away".to_owned(), Notice::describe);
        self.jobs.tell(id, Some(&report.node), now, format!("ends, because {} {why}", report.node));
    }

    fn mark_preempted(&mut self, replica: &ReplicaId) {
        self.jobs.edit(&replica.job, |job| {
            let ours = job.replicas.iter_mut().filter(|known| known.rank == replica.rank);
            ours.for_each(|known| known.preempted = true);
        });
    }

    /// The machine had a notice, and was restarted: whatever is lost by that was taken away.
    pub(super) fn restarted_with_notice(&mut self, node: &NodeId, jobs: &[JobId]) {
        let lost: Vec<ReplicaId> = jobs
            .iter()
            .filter_map(|id| self.jobs.get(id))
            .flat_map(|job| job.replicas.iter().map(|rank| (job.replica(rank.rank), rank)))
            .filter(|(_, rank)| rank.node == *node && rank.step.is_some() && rank.end.is_none())
            .map(|(replica, _)| replica)
            .collect();
        lost.iter().for_each(|replica| self.mark_preempted(replica));
    }

    /// Takes what has ended from machines that are gone, and puts those back that are not.
    pub(super) fn expire_preemptions(&mut self, now: Moment) {
        for node in self.fleet.gone(now.boot) {
            let jobs = self.fleet.get(&node).map(|state| state.jobs.clone()).unwrap_or_default();
            let notice = self.fleet.get(&node).and_then(|state| state.record.preemption.notice());
            let fault = notice.map_or_else(|| taken_away(&node), |notice| notice.fault(&node));
            for job in jobs.iter().filter_map(|id| self.jobs.get(id).cloned()).collect::<Vec<_>>() {
                let over = |rank: &&ReplicaRecord| rank.node == node && rank.ends_with_its_machine();
                for rank in job.replicas.iter().filter(over) {
                    self.lose(&job.replica(rank.rank), fault.clone(), now);
                }
            }
        }
        let passed = self.leases.terms().passed;
        let over = |notice: &Notice| notice.deadline + passed <= now.wall;
        let asked = self.fleet.iter().filter(|node| node.record.preemption.asked.as_ref().is_some_and(over));
        let asked = asked.map(|node| node.record.id.clone());
        let back: Vec<NodeId> = asked.filter(|id| self.fleet.is_heard(id)).collect();
        for id in back {
            tracing::info!(node = %id, "putting machine back that was to be taken away");
            self.preempt(&id, None, now);
        }
    }

    /// When the next of that is due.
    pub(super) fn next_preemption(&self, now: Moment) -> Option<Boot> {
        let passed = self.leases.terms().passed;
        let gone = |node: &NodeState| {
            node.gone_at.filter(|_| !node.jobs.is_empty() && !self.fleet.is_heard(&node.record.id))
        };
        let back = |node: &NodeState| {
            let asked = node.record.preemption.asked.as_ref()?;
            self.fleet.is_heard(&node.record.id).then(|| now.boot + (asked.deadline + passed).since(now.wall))
        };
        self.fleet.iter().flat_map(|node| [gone(node), back(node)]).flatten().min()
    }

    /// The end of a rank, with the notice of its machine as the reason where that explains it.
    pub(super) fn explain_end(&self, replica: &ReplicaId, mut end: RankEnd) -> RankEnd {
        let Some(rank) = self.jobs.get(&replica.job).and_then(|job| job.rank(replica.rank)) else {
            return end;
        };
        let notice = self.fleet.get(&rank.node).and_then(|node| node.record.preemption.notice());
        let fault = match &mut end {
            RankEnd::Told(outcome) => outcome.fault.as_mut(),
            RankEnd::Lost { fault, .. } => Some(fault),
        };
        let of_machine =
            |fault: &Fault| matches!(fault.code, Code::NodeLost | Code::NodeRebooted | Code::LeaseOver);
        if let Some(fault) = fault.filter(|fault| of_machine(fault) && (rank.preempted || notice.is_some())) {
            let why = std::mem::take(&mut fault.what);
            *fault =
                notice.map_or_else(|| taken_away(&rank.node), |notice| notice.fault(&rank.node)).why(why);
        }
        end
    }

    /// An attempt that ended because of its machine alone does not count against the limit of attempts.
    pub(super) fn uncharge(&mut self, id: &JobId, fault: Option<&Fault>) {
        if fault.is_some_and(Fault::is_free) {
            self.jobs.edit(id, |job| job.uncharged += 1);
        }
    }
}

impl ReplicaRecord {
    /// Whether nothing of it can run on a machine whose deadline is over: it was told to end before that, or its command
    /// had ended already.
    fn ends_with_its_machine(&self) -> bool {
        self.preempted || matches!(self.step, Some(ReplicaStep::Uploading | ReplicaStep::Reported))
    }
}

impl JobRecord {
    /// Whether another attempt is made after this fault.
    pub(super) fn may_retry(&self, fault: &Fault) -> bool {
        let counted = self.epoch.0 - self.uncharged;
        let allowed =
            fault.retry != agent_model::Retry::Never && counted < u64::from(self.spec.retry.max_attempts);
        self.cancel.is_none() && (allowed || fault.is_free())
    }
}

#[cfg(test)]
mod tests;
