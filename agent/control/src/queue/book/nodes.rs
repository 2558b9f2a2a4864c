//! The half of the book that hears nodes: reports, lost replicas, ended leases, room and orders.
//!
//! Invariants: a report is the whole truth about its node, unless a later one overtook it; a replica that the
//! node once named and names no more is lost, also when the machine was restarted; silence takes a job from
//! its node only when the job may be replaced and its lease is over.
//!
//! A report may also be a copy of one from before this controller started, or from before its machine did,
//! and nothing heard since tells. So each node has a *life*: a number that no other controller process gives,
//! and another one whenever the node is heard under another boot. Orders carry it, and reports echo that of the
//! orders that were obeyed. One that echoes the present life was made in it, and only such a report is believed
//! about what it does not name ([`Book::believes`]). The others say what the node is and what it holds: that
//! was so once, and at worst a lease ends later for it.

use std::borrow::Cow;
use std::collections::BTreeSet;

use agent_model::machine::{Before, Eligibility, EligibilityEvent, Liveness, LivenessEvent};
use agent_model::node::{Finding, Grade, Inventory, Load};
use agent_model::protocol::orders::Obeyed;
use agent_model::{
    Boot, Code, Fault, JobEvent, JobId, JobSpec, JobState, NodeId, ReplicaId, ReplicaStep, Timestamp, Verdict,
};

use super::{Book, Moment, Standing, may_retry, without_run};
use crate::lease::{self, Orders};
use crate::scheduler::{Room, Taken};
use crate::store::{NodeRecord, ReplicaRecord};

/// What a node says about itself and what it holds.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    pub(crate) node: NodeId,
    pub(crate) boot_id: String,
    /// When it said so, by its own clock.
    pub(crate) sent: Boot,
    /// The latest orders it obeyed; none yet, or it does not say.
    pub(crate) obeyed: Option<Obeyed>,
    pub(crate) inventory: Option<Inventory>,
    pub(crate) load: Load,
    pub(crate) replicas: Vec<Held>,
}

impl Report {
    pub(super) fn holds(&self, replica: &ReplicaId) -> bool {
        self.replicas.iter().any(|held| held.replica == *replica)
    }
}

/// A replica a node holds.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    pub(crate) replica: ReplicaId,
    pub(crate) step: ReplicaStep,
    pub(crate) detail: String,
    pub(crate) started_at: Option<Timestamp>,
    /// The node has evidence that it goes on.
    pub(crate) alive: bool,
    /// What was ordered, when the node was asked for it.
    pub(crate) spec: Option<JobSpec>,
}

/// What came of declaring a node lost.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DeclaredLost {
    /// There is no such node.
    Unknown,
    /// It answers; nobody needs to declare anything.
    Answers,
    /// These jobs were taken from it.
    Done(Vec<JobId>),
}

/// A node and what is only known while the controller runs.
#[derive(Debug, Clone)]
pub(crate) struct NodeState {
    pub(crate) record: NodeRecord,
    pub(crate) load: Load,
    /// When it sent the latest report, by its own clock.
    pub(crate) sent: Option<Boot>,
    /// See the module.
    life: u64,
    /// Its Sync stream is open.
    pub(crate) linked: bool,
    /// The jobs placed on it.
    pub(crate) jobs: BTreeSet<JobId>,
}

impl NodeState {
    pub(super) fn new(record: NodeRecord, life: u64) -> NodeState {
        NodeState { record, load: Load::default(), sent: None, life, linked: false, jobs: BTreeSet::new() }
    }

    /// Why it takes no new work, for people.
    fn closed(&self) -> Option<Cow<'static, str>> {
        let why = match (self.record.eligibility, self.record.liveness) {
            (Eligibility::Draining, _) => "is being drained",
            (Eligibility::Cordoned, _) => "is cordoned",
            (_, Liveness::Degraded) => return Some(self.failed_check().into()),
            (_, Liveness::NotResponding | Liveness::Down) => "does not answer",
            (_, Liveness::Removed) => "was removed",
            (_, Liveness::Enrolling | Liveness::Ready) if self.linked => return None,
            (_, Liveness::Enrolling | Liveness::Ready) => "is not connected",
        };
        Some(why.into())
    }

    /// What is wrong with a node that answers.
    fn failed_check(&self) -> String {
        match self.record.inventory.findings.iter().find(|finding| finding.grade == Grade::Bad) {
            Some(Finding { topic, found, means, .. }) => {
                format!("fails the check `{topic}`: {found}; {means}")
            }
            None => "fails a check, see `agentctl doctor`".to_owned(),
        }
    }
}

impl Book {
    /// Takes in what a node says, whole.
    pub(crate) fn report(&mut self, report: &Report, now: Moment) {
        let id = &report.node;
        let mut node = self.nodes.remove(id).unwrap_or_else(|| {
            let record = NodeRecord {
                id: id.clone(),
                boot_id: String::new(),
                liveness: Liveness::Enrolling,
                eligibility: Eligibility::Open,
                last_seen: now.wall,
                inventory: Inventory::default(),
            };
            NodeState::new(record, self.life)
        });
        let rebooted = node.record.boot_id != report.boot_id;
        if !rebooted && node.sent.is_some_and(|latest| report.sent < latest) && !broken!(OvertakenReports) {
            self.nodes.insert(id.clone(), node); // a later report overtook it
            return;
        }
        node.sent = Some(report.sent);
        if rebooted && !broken!(LifeOfAnotherBoot) {
            self.life = self.life.wrapping_add(1);
            node.life = self.life;
        }
        let before = NodeRecord { last_seen: now.wall, ..node.record.clone() };
        if let Some(inventory) = &report.inventory {
            node.record.inventory = inventory.clone();
        }
        let healthy = node.record.inventory.findings.iter().all(|finding| finding.grade != Grade::Bad);
        node.record.liveness = node.record.liveness.after(LivenessEvent::Synced { healthy });
        node.record.boot_id = report.boot_id.clone();
        node.record.last_seen = now.wall;
        node.load = report.load;
        if node.record != before {
            self.dirty_nodes.insert(id.clone());
            self.replan = true;
        }
        let jobs: Vec<JobId> = node.jobs.iter().cloned().collect();
        self.nodes.insert(id.clone(), node);
        self.contacts.renew(id, now.boot);
        if rebooted {
            self.forget_boot(id, &jobs);
        }

        self.meet(report, now);
        for held in &report.replicas {
            self.see(report, held, now);
        }
        for job in jobs {
            if self.awaited.is_empty() {
                self.miss(&job, report, now);
            }
            self.withdraw(&job, report, now);
        }
        let believed = self.believes(report);
        self.settled.retain(|replica, settled| {
            let held = report.holds(replica);
            let gone = settled.node == *id && (held || believed) && settled.hear(held);
            if gone {
                self.changes.forgotten.push(replica.clone());
            }
            !gone
        });
    }

    /// Whether what a report does not name is not there: it was made after its node obeyed orders of its present
    /// life, so it is no copy of before.
    pub(crate) fn believes(&self, report: &Report) -> bool {
        let present = |life| self.nodes.get(&report.node).is_some_and(|node| node.life == life);
        report.obeyed.is_some_and(|obeyed| present(obeyed.life) || broken!(LifeNotChecked))
    }

    /// The node was restarted: no time of its clock from before means anything to it now.
    fn forget_boot(&mut self, node: &NodeId, jobs: &[JobId]) {
        for job in jobs.iter().filter_map(|id| self.jobs.get(id)) {
            for replica in job.replicas.iter().filter(|replica| replica.node == *node) {
                let replica = job.replica(replica.rank);
                self.leases.rebooted(&replica);
                self.withdrawn.remove(&replica);
            }
        }
    }

    /// The node holds this replica: where it stands, and perhaps evidence that it is alive.
    fn see(&mut self, report: &Report, held: &Held, now: Moment) {
        let (node, boot_id, id) = (&report.node, report.boot_id.as_str(), &held.replica.job);
        if self.standing(&held.replica, node) != Standing::Open {
            return;
        }
        if held.alive || broken!(LeaseWithoutEvidence) {
            self.leases.renew(&held.replica, report.sent, now.boot);
        }
        if self.advance(id, JobEvent::SeenAgain) {
            self.tell(id, Some(node), now, format!("{node} answers again"));
        }
        let Some(replica) = self
            .jobs
            .get(id)
            .and_then(|job| job.replicas.iter().find(|replica| replica.rank == held.replica.rank))
        else {
            return;
        };
        let stepped = replica.step != Some(held.step);
        if stepped || replica.detail != held.detail || replica.boot_id != boot_id {
            self.edit(id, |job| {
                job.started_at = held.started_at.or(job.started_at);
                for replica in job.replicas.iter_mut().filter(|replica| replica.rank == held.replica.rank) {
                    replica.step = Some(held.step);
                    replica.detail.clone_from(&held.detail);
                    boot_id.clone_into(&mut replica.boot_id);
                }
            });
        }
        if stepped {
            let mut text = held.step.describe().to_owned();
            if !held.detail.is_empty() && held.detail != text {
                text = format!("{text}: {}", held.detail);
            }
            self.tell(id, Some(node), now, text);
        }
        let running = |replica: &ReplicaRecord| replica.step >= Some(ReplicaStep::Running);
        if self.jobs.get(id).is_some_and(|job| job.replicas.iter().all(running)) {
            self.advance(id, JobEvent::AllRunning);
        }
    }

    /// Declares the replicas of `job` lost that the node had and now has not. Those it never had are offered
    /// again.
    fn miss(&mut self, id: &JobId, report: &Report, now: Moment) {
        let Some(job) = self.jobs.get(id) else { return };
        let missing = job
            .replicas
            .iter()
            .filter(|replica| replica.node == report.node && !report.holds(&job.replica(replica.rank)));
        let believed = self.believes(report);
        let mut lost = None;
        for replica in missing {
            lost = lost.or_else(|| lease::lost(replica, &report.boot_id).filter(|_| believed));
            if replica.step.is_none() {
                self.leases.offer(&job.replica(replica.rank), report.sent, now.boot);
            }
        }
        let Some(code) = lost else { return };
        let what = match code {
            Code::NodeRebooted => format!("{} was restarted while the job was there", report.node),
            _ => format!("{} does not know the job any more", report.node),
        };
        self.lose(id, &report.node, Fault::new(code, what), now);
    }

    /// Ends a canceled job that its node never took up, once the node cannot take it up any more: it obeyed
    /// orders that were made after the cancel, and will obey no earlier ones.
    fn withdraw(&mut self, id: &JobId, report: &Report, now: Moment) {
        let canceled = JobState::Finalizing(Verdict::Canceled);
        let silent = JobState::NotResponding(Before::Finalizing(Verdict::Canceled));
        let Some(job) = self.jobs.get(id).filter(|job| job.state == canceled || job.state == silent) else {
            return;
        };
        let obeyed = report.obeyed.filter(|_| self.believes(report));
        let mut untaken = true;
        for replica in &job.replicas {
            let name = job.replica(replica.rank);
            let gone = match self.withdrawn.get(&name) {
                Some(since) => obeyed.is_some_and(|obeyed| obeyed.answers > *since),
                None if broken!(CancelWithoutProof) => true,
                None => {
                    self.withdrawn.insert(name.clone(), report.sent);
                    false
                }
            };
            untaken &= gone && replica.step.is_none() && replica.node == report.node && !report.holds(&name);
        }
        if untaken {
            self.advance(id, JobEvent::SeenAgain);
            self.advance(id, JobEvent::OutputsStored);
            self.urgent = true;
            self.end(id, without_run(Verdict::Canceled, None, now.wall), now);
        }
    }

    /// Takes a job from its node, where it can have no run any more. An attempt that the node never took up
    /// counts against no limit.
    fn lose(&mut self, id: &JobId, node: &NodeId, fault: Fault, now: Moment) {
        if self.jobs.get(id).is_some_and(|job| job.replicas.iter().all(|replica| replica.step.is_none())) {
            self.edit(id, |job| job.uncharged += 1);
        }
        let Some(job) = self.jobs.get(id) else { return };
        let retry = may_retry(job, &fault);
        self.tell(id, Some(node), now, format!("lost: {fault}"));
        self.advance(id, JobEvent::LeaseExpired);
        self.advance(id, JobEvent::GraceOver { retry });
        self.urgent = true;
        if self.state(id) == Some(JobState::Queued) {
            self.requeue(id, &fault, now);
        } else {
            let verdict = self.verdict(id);
            self.end(id, without_run(verdict, Some(fault), now.wall), now);
            self.edit(id, |job| job.replicas.clear()); // what the node may still deliver is fenced
        }
    }

    /// Notes which nodes fell silent, and gives away the jobs whose lease is over.
    pub(crate) fn expire(&mut self, now: Moment) {
        for id in self.contacts.tick(now.boot) {
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            node.record.liveness = node.record.liveness.after(LivenessEvent::LeaseOver);
            self.dirty_nodes.insert(id.clone());
            self.replan = true;
            for job in node.jobs.clone() {
                if self.advance(&job, JobEvent::LeaseExpired) {
                    self.tell(&job, Some(&id), now, format!("{id} stopped answering"));
                }
                if broken!(HoldGivenAway) {
                    self.lose(&job, &id, Fault::new(Code::NodeLost, "silence"), now);
                }
            }
        }
        for replica in self.leases.over(now.boot) {
            let Some(job) = self.jobs.get(&replica.job).filter(|job| job.epoch == replica.epoch) else {
                continue;
            };
            let Some(node) = job.replicas.iter().find(|r| r.rank == replica.rank).map(|r| r.node.clone())
            else {
                continue;
            };
            let what = format!("{node} gave no sign of the job for longer than it may run unheard");
            self.lose(&replica.job, &node, Fault::new(Code::NodeLost, what), now);
        }
    }

    /// Takes the word of an operator that a silent node, and everything that ran on it, is gone for good.
    pub(crate) fn declare_lost(&mut self, id: &NodeId, who: &str, now: Moment) -> DeclaredLost {
        let Some(node) = self.nodes.get_mut(id) else { return DeclaredLost::Unknown };
        if matches!(node.record.liveness, Liveness::Ready | Liveness::Degraded) {
            return DeclaredLost::Answers;
        }
        let down = node.record.liveness.after(LivenessEvent::LeaseOver).after(LivenessEvent::GraceOver);
        node.record.liveness = down;
        let jobs: Vec<JobId> = node.jobs.iter().cloned().collect();
        self.dirty_nodes.insert(id.clone());
        self.awaited.remove(id);
        (self.urgent, self.replan) = (true, true);
        for job in &jobs {
            let fault = Fault::new(Code::NodeLost, format!("{id} was declared lost by {who}"));
            self.lose(job, id, fault, now);
        }
        DeclaredLost::Done(jobs)
    }

    /// Lets new work onto a node, or keeps it off; `None` when there is no such node. What was placed before
    /// stays, and nothing is placed after.
    pub(crate) fn set_eligibility(&mut self, id: &NodeId, event: EligibilityEvent) -> Option<&NodeState> {
        let node = self.nodes.get_mut(id)?;
        let next = node.record.eligibility.after(event);
        if next != node.record.eligibility {
            node.record.eligibility = next;
            self.dirty_nodes.insert(id.clone());
            (self.urgent, self.replan) = (true, true);
        }
        self.rest(id);
        self.nodes.get(id)
    }

    /// A node that is being drained and has run empty is cordoned.
    pub(super) fn rest(&mut self, id: &NodeId) {
        if let Some(node) = self.nodes.get_mut(id).filter(|node| node.jobs.is_empty())
            && node.record.eligibility == Eligibility::Draining
        {
            node.record.eligibility = node.record.eligibility.after(EligibilityEvent::Empty);
            self.dirty_nodes.insert(id.clone());
        }
    }

    /// Says which nodes have an open stream.
    pub(crate) fn link(&mut self, linked: impl Fn(&NodeId) -> bool) {
        for (id, node) in &mut self.nodes {
            let now = linked(id);
            self.replan |= node.linked != now;
            node.linked = now;
        }
    }

    /// The size of a node, and what takes room on it.
    pub(super) fn room(&self, node: &NodeState) -> Room {
        let inventory = &node.record.inventory;
        Room {
            node: node.record.id.clone(),
            closed: node.closed(),
            slots: inventory.slots,
            gpus: u32::try_from(inventory.gpus.iter().filter(|gpu| gpu.counts()).count()).unwrap_or(u32::MAX),
            unfit: unfit(inventory),
            memory: inventory.memory,
            taken: node
                .jobs
                .iter()
                .filter_map(|id| self.jobs.get(id))
                .map(|job| Taken {
                    job: job.id.clone(),
                    gpus: job.spec.resources.gpus,
                    memory: job.spec.resources.memory,
                })
                .collect(),
        }
    }

    /// What `node` should hold now.
    pub(crate) fn orders(&self, node: &NodeId) -> Orders {
        let state = self.nodes.get(node);
        let jobs = state.into_iter().flat_map(|node| &node.jobs).filter_map(|id| self.jobs.get(id));
        let settled =
            self.settled.iter().filter(|(_, settled)| settled.node == *node).map(|(replica, _)| replica);
        Orders {
            life: state.map_or(self.life, |node| node.life),
            answers: state.and_then(|node| node.sent).unwrap_or_default(),
            revision: 0,
            list: lease::orders(node, &self.leases, jobs.map(|job| &**job), settled)
                .into_iter()
                .chain(self.questions(node))
                .collect(),
            environments: self.wishes_for(node),
            outputs: Vec::new(),
        }
    }
}

/// What of its GPUs a node does not hand out, and why, for people; empty when it hands out all of them.
fn unfit(inventory: &Inventory) -> String {
    const SHOWN: usize = 3;
    let unfit: Vec<_> = inventory.gpus.iter().filter(|gpu| !gpu.counts()).collect();
    if unfit.is_empty() {
        return String::new();
    }
    let why = |gpu: &&agent_model::node::Gpu| {
        format!("GPU {}: {}", gpu.index, gpu.unfit.as_deref().unwrap_or_default())
    };
    let reasons: Vec<String> = unfit.iter().take(SHOWN).map(why).collect();
    let more = match unfit.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    let (all, count) = (inventory.gpus.len(), unfit.len());
    format!("{count} of its {all} GPUs not handed out: {}{more}", reasons.join("; "))
}

#[cfg(test)]
mod tests {
    use agent_model::node::Gpu;

    use super::*;

    #[test]
    fn test_unfit_gpus_are_named_and_a_held_one_counts() {
        let gpu = |index, held: Option<&str>, unfit: Option<&str>| Gpu {
            index,
            held: held.map(str::to_owned),
            unfit: unfit.map(str::to_owned),
            ..Gpu::default()
        };
        let with = |gpus| Inventory { gpus, ..Inventory::default() };
        let lost = || Some("it fell off the bus");
        assert_eq!(unfit(&with(vec![gpu(0, None, None), gpu(1, Some("a.1.0"), lost())])), "");
        let mut gpus: Vec<Gpu> = (0..5).map(|index| gpu(index, None, lost())).collect();
        gpus.push(gpu(5, None, None));
        assert_eq!(
            unfit(&with(gpus)),
            "5 of its 6 GPUs not handed out: GPU 0: it fell off the bus; GPU 1: it fell off the bus; \
             GPU 2: it fell off the bus; and 2 more"
        );
    }
}
