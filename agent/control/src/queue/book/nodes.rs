//! The part of the book about nodes: reports, lost replicas, ended leases and orders.
//!
//! Invariants: a report describes its node completely, unless a later one overtook it; a replica that the node once
//! reported and does not report any more is lost, also when the machine was restarted; silence takes a job from its
//! node only when the job may be replaced and its lease is over.

use agent_model::machine::EligibilityEvent;
use agent_model::{Code, Fault, JobEvent, JobId, NodeId, ReplicaId, ReplicaStep, Verdict};

use super::{Book, Held, Moment, NodeState, Report, Standing, without_run};
use crate::lease::{self, Orders};
use crate::store::{RankEnd, ReplicaRecord};

/// The result of declaring a node lost.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DeclaredLost {
    /// There is no such node.
    Unknown,
    /// It answers, so it is not lost.
    Answers,
    /// These jobs were taken from it.
    Done(Vec<JobId>),
}

/// The result of removing a node.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RemovedNode {
    /// There is no such node.
    Unknown,
    /// It has these jobs.
    Busy(Vec<JobId>),
    /// It is removed; these jobs were taken from it.
    Done(Vec<JobId>),
}

impl Book {
    /// Takes in a report of a node.
    pub(crate) fn report(&mut self, report: &Report, now: Moment) {
        let Some(heard) = self.fleet.hear(report, now) else { return };
        self.replan |= heard.changed;
        if heard.rebooted {
            self.forget_boot(&report.node, &heard.jobs);
        }
        if heard.rebooted && heard.had_notice {
            self.restarted_with_notice(&report.node, &heard.jobs);
        }
        if heard.noticed {
            self.urgent = true;
            self.break_gangs_on(&report.node, now);
        }
        self.meet(report, now);
        for held in &report.replicas {
            self.see(report, held, now);
        }
        let all_heard = self.fleet.unheard().is_none();
        for job in heard.jobs {
            if all_heard {
                self.miss(&job, report, now);
            }
            self.withdraw(&job, report, now);
        }
        self.replicas.hear(report, self.believes(report));
    }

    /// Whether a replica that a report does not name is not on the node.
    pub(crate) fn believes(&self, report: &Report) -> bool {
        self.fleet.believes(report)
    }

    /// The node was restarted: no time of its clock from before is valid now.
    fn forget_boot(&mut self, node: &NodeId, jobs: &[JobId]) {
        for job in jobs.iter().filter_map(|id| self.jobs.get(id)) {
            for replica in job.replicas.iter().filter(|replica| replica.node == *node) {
                let replica = job.replica(replica.rank);
                self.leases.rebooted(&replica);
                self.replicas.rebooted(&replica);
            }
        }
    }

    /// The node holds this replica: takes in its step, and the evidence that it is alive, if there is any.
    fn see(&mut self, report: &Report, held: &Held, now: Moment) {
        let (node, boot_id, id) = (&report.node, report.boot_id.as_str(), &held.replica.job);
        if self.standing(&held.replica, node) != Standing::Open {
            return;
        }
        if held.alive || broken!(LeaseWithoutEvidence) {
            self.leases.renew(&held.replica, report.sent, now.boot);
        }
        let Some(job) = self.jobs.get(id) else { return };
        let mut open = job.replicas.iter().filter(|replica| replica.end.is_none());
        if open.all(|replica| self.fleet.is_heard(&replica.node))
            && self.jobs.advance(id, JobEvent::SeenAgain)
        {
            self.jobs.tell(id, Some(node), now, format!("{node} answers again"));
        }
        let Some(replica) = self.jobs.get(id).and_then(|job| job.rank(held.replica.rank)) else { return };
        let (stepped, gang) = (
            replica.step != Some(held.step),
            self.jobs.get(id).is_some_and(|job| job.spec.resources.nodes > 1),
        );
        if stepped || replica.detail != held.detail || replica.boot_id != boot_id {
            self.jobs.edit(id, |job| {
                job.started_at = held.started_at.or(job.started_at);
                for replica in job.replicas.iter_mut().filter(|replica| replica.rank == held.replica.rank) {
                    replica.step = Some(held.step);
                    replica.detail.clone_from(&held.detail);
                    boot_id.clone_into(&mut replica.boot_id);
                }
            });
        }
        if held.started_at.is_some() {
            self.has_started(node);
        }
        if stepped {
            let mut text = held.step.describe_with(&held.detail);
            if gang {
                text = format!("rank {}: {text}", held.replica.rank);
            }
            self.jobs.tell(id, Some(node), now, text);
            if let Some(job) = self.jobs.get(id) {
                job.rank(held.replica.rank).into_iter().for_each(|rank| self.fleet.note(rank, &job.spec));
            }
        }
        let running = |replica: &ReplicaRecord| replica.step >= Some(ReplicaStep::Running);
        if self.jobs.get(id).is_some_and(|job| job.replicas.iter().all(running)) {
            self.jobs.advance(id, JobEvent::AllRunning);
        }
        self.see_preempted(report, held, now);
        self.hear_ready(report, held, now);
    }

    /// Declares the replicas of a job lost that the node had and has no more. Those it never had are offered again.
    fn miss(&mut self, id: &JobId, report: &Report, now: Moment) {
        let Some(job) = self.jobs.get(id).cloned() else { return };
        let believed = self.believes(report);
        for replica in
            job.replicas.iter().filter(|replica| replica.node == report.node && replica.end.is_none())
        {
            let name = job.replica(replica.rank);
            if report.holds(&name) {
                continue;
            }
            if replica.step.is_none() {
                self.leases.offer(&name, report.sent, now.boot);
            }
            if let Some(code) = lease::lost(replica, &report.boot_id).filter(|_| believed) {
                let what = match code {
                    Code::NodeRebooted => format!("{} was restarted while the job was there", report.node),
                    _ => format!("{} does not know the job any more", report.node),
                };
                self.lose(&name, Fault::new(code, what), now);
            }
        }
    }

    /// Ends those replicas of a stopped job that this node never reported, once it cannot start them any more: it
    /// obeyed orders that were made after the stop, and will obey no earlier ones.
    fn withdraw(&mut self, id: &JobId, report: &Report, now: Moment) {
        let Some(job) = self.jobs.get(id).filter(|job| job.why_stopped().is_some()).cloned() else { return };
        let obeyed = report.obeyed.filter(|_| self.believes(report));
        let ours = |replica: &&ReplicaRecord| replica.node == report.node && replica.end.is_none();
        for replica in job.replicas.iter().filter(ours) {
            let name = job.replica(replica.rank);
            let gone = self.replicas.is_withdrawn(&name, report, obeyed);
            if gone && replica.step.is_none() && !report.holds(&name) {
                self.end_rank(&name, RankEnd::Told(without_run(Verdict::Canceled, None, now.wall)), now);
            }
        }
    }

    /// Takes a replica from its node, where it can have no run any more. An attempt that no node ever reported does
    /// not count against the limit.
    pub(super) fn lose(&mut self, replica: &ReplicaId, fault: Fault, now: Moment) {
        let id = &replica.job;
        let Some(job) = self.jobs.get(id).filter(|job| job.epoch == replica.epoch) else { return };
        let Some(rank) = job.rank(replica.rank).filter(|rank| rank.end.is_none()) else { return };
        let node = rank.node.clone();
        let heard = self.fleet.get(&node).map_or(now.wall, |node| node.record.last_seen);
        let unseen = job.replicas.iter().all(|replica| replica.step.is_none() && replica.end.is_none());
        if unseen && fault.code != Code::Preempted {
            self.jobs.edit(id, |job| job.uncharged += 1);
        }
        self.jobs.tell(id, Some(&node), now, format!("lost: {fault}"));
        self.end_rank(replica, RankEnd::Lost { fault, heard }, now);
    }

    /// Takes all replicas of a job from a node.
    fn lose_on(&mut self, id: &JobId, node: &NodeId, fault: &Fault, now: Moment) {
        let Some(job) = self.jobs.get(id).cloned() else { return };
        for replica in job.replicas.iter().filter(|replica| replica.node == *node) {
            self.lose(&job.replica(replica.rank), fault.clone(), now);
        }
    }

    /// Notes which nodes fell silent, and takes replicas whose lease is over from their nodes.
    pub(crate) fn expire(&mut self, now: Moment) {
        self.end_holds(now);
        for (id, jobs) in self.fleet.silent(now.boot) {
            self.replan = true;
            for job in jobs {
                if self.jobs.advance(&job, JobEvent::LeaseExpired) {
                    self.jobs.tell(&job, Some(&id), now, format!("{id} stopped answering"));
                }
                if broken!(HoldGivenAway) {
                    self.lose_on(&job, &id, &Fault::new(Code::NodeLost, "silence"), now);
                }
            }
        }
        for replica in self.leases.over(now.boot) {
            let rank = self.jobs.get(&replica.job).and_then(|job| job.rank(replica.rank));
            let Some(node) = rank.map(|rank| rank.node.clone()) else { continue };
            let what = format!("{node} gave no sign of the job for longer than it may run unheard");
            self.lose(&replica, Fault::new(Code::NodeLost, what), now);
        }
        self.expire_preemptions(now);
        self.expire_gangs(now);
        self.expire_sweeps(now);
        self.expire_reuse(now);
    }

    /// Takes in the statement of an operator that a silent node, and everything that ran on it, is gone for good.
    pub(crate) fn declare_lost(&mut self, id: &NodeId, who: &str, now: Moment) -> DeclaredLost {
        let declared = self.fleet.declare_lost(id);
        if let DeclaredLost::Done(jobs) = &declared {
            (self.urgent, self.replan) = (true, true);
            for job in jobs {
                let fault = Fault::new(Code::NodeLost, format!("{id} was declared lost by {who}"));
                self.lose_on(job, id, &fault, now);
            }
        }
        declared
    }

    /// Removes a node. If it has jobs it is not removed, unless `lose_jobs`: then they count as lost.
    pub(crate) fn remove_node(
        &mut self,
        id: &NodeId,
        lose_jobs: bool,
        who: &str,
        now: Moment,
    ) -> RemovedNode {
        let Some(node) = self.fleet.get(id) else { return RemovedNode::Unknown };
        let jobs: Vec<JobId> = node.jobs.iter().cloned().collect();
        if !jobs.is_empty() && !lose_jobs {
            return RemovedNode::Busy(jobs);
        }
        (self.urgent, self.replan) = (true, true);
        for job in &jobs {
            self.lose_on(job, id, &Fault::new(Code::NodeLost, format!("{id} was removed by {who}")), now);
        }
        self.fleet.remove(id);
        self.strangers.forget_node(id);
        RemovedNode::Done(jobs)
    }

    /// Allows new work on a node, or stops it; `None` when there is no such node. Jobs that were placed before stay.
    pub(crate) fn set_eligibility(&mut self, id: &NodeId, event: EligibilityEvent) -> Option<&NodeState> {
        if self.fleet.set_eligibility(id, event)? {
            (self.urgent, self.replan) = (true, true);
        }
        self.fleet.get(id)
    }

    /// Takes in which nodes have an open stream.
    pub(crate) fn link(&mut self, linked: impl Fn(&NodeId) -> bool) {
        self.replan |= self.fleet.link(linked);
    }

    /// What `node` should hold now.
    pub(crate) fn orders(&self, node: &NodeId) -> Orders {
        let state = self.fleet.get(node);
        let jobs = state.into_iter().flat_map(|node| &node.jobs).filter_map(|id| self.jobs.get(id));
        let settled = self.replicas.settled_on(node);
        Orders {
            controller_epoch: self.fleet.controller_epoch_of(node),
            answers: state.and_then(|node| node.sent).unwrap_or_default(),
            revision: 0,
            list: lease::orders(node, &self.leases, jobs.map(|job| &**job), settled)
                .into_iter()
                .chain(self.strangers.questions(node))
                .collect(),
            environments: self.wishes_for(node),
            preemption: state.and_then(NodeState::asked_preemption),
            eligibility: state.map(|node| node.record.eligibility),
            outputs: Vec::new(),
            running_outputs: Vec::new(),
            discard: state.map(|node| self.discarded_on(node)).unwrap_or_default(),
        }
    }
}
