//! The nodes: the last report of each, whether it answers, the jobs placed on it, and the changes that are not on
//! disk yet.
//!
//! A report may be an old copy, from before this controller or its node started, and its other fields do not show
//! that. So each node has a *controller epoch*: a number that no other controller process gives, and a new one
//! whenever the node is heard under another boot. Orders contain it, and reports echo that of the orders that were
//! obeyed. A report that echoes the present one was made under it, and only such a report is believed about what it
//! does not name ([`Fleet::believes`]). From the others only what the node is and holds is taken: that was true once,
//! and at worst a lease ends later because of it.
//!
//! Invariants: a report that a later one overtook changes nothing; a draining node that has no more jobs is cordoned;
//! every change of a record lists it as unwritten. Methods that return `bool` say whether something changed that
//! decides where jobs are placed.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use agent_model::machine::{Eligibility, EligibilityEvent, Liveness, LivenessEvent};
use agent_model::node::{Finding, Gpu, Grade, Inventory, Load};
use agent_model::protocol::gang::Ready;
use agent_model::protocol::orders::Obeyed;
use agent_model::words::count;
use agent_model::{Boot, Breaker, JobId, JobSpec, NodeId, Preemption, ReplicaId, ReplicaStep, Timestamp};

use super::adopt::{Described, Unproved};
use super::jobs::Jobs;
use super::{DeclaredLost, Moment, Retirement};
use crate::lease::Contacts;
use crate::scheduler::{JobNeeds, NodeCache, Presence, Pythons, Room, Size, Taken};
use crate::store::{Changes, Document, NodePreemption, NodeRecord, ReplicaRecord};

/// A report of a node: its state and the replicas it holds.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    pub(crate) node: NodeId,
    pub(crate) boot_id: String,
    /// When it was sent, by the node's clock.
    pub(crate) sent: Boot,
    /// The latest orders it obeyed; `None` before the first, or if it does not say.
    pub(crate) obeyed: Option<Obeyed>,
    pub(crate) inventory: Option<Inventory>,
    pub(crate) load: Load,
    pub(crate) replicas: Vec<Held>,
    /// Its machine will be taken away, as its provider says.
    pub(crate) preemption: Option<Preemption>,
    /// It is the node of the controller's own machine, which is believed about what it was given.
    pub(crate) own: bool,
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
    /// The node has evidence that it is running.
    pub(crate) alive: bool,
    /// What was ordered, if the node was asked for it.
    pub(crate) described: Option<Described>,
    /// Of a rank of a gang, from when it could start.
    pub(crate) ready: Option<Ready>,
    /// It ends because the machine will be taken away.
    pub(crate) preempted: bool,
}

impl Held {
    /// What its node says that it runs.
    pub(super) fn described_spec(&self) -> Option<JobSpec> {
        self.described.as_ref()?.spec.clone()
    }
}

/// A node, with the part of its state that is not stored.
#[derive(Debug, Clone)]
pub(crate) struct NodeState {
    pub(crate) record: NodeRecord,
    pub(crate) load: Load,
    /// When it sent the latest report, by its own clock.
    pub(crate) sent: Option<Boot>,
    /// From when on, should it be silent, everything is over that it ends because its machine will be taken away.
    pub(super) gone_at: Option<Boot>,
    /// See the module.
    controller_epoch: u64,
    /// Its Sync stream is open.
    pub(crate) linked: bool,
    /// The jobs placed on it.
    pub(crate) jobs: BTreeSet<JobId>,
    /// What it holds and cannot prove that it was given.
    pub(crate) unproved: Vec<Unproved>,
    /// What it has of what jobs need.
    kept: Arc<NodeCache>,
    leaving: Leaving,
    /// It was held back when that was last looked at.
    pub(super) held_back: bool,
}

/// Whether a node retires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaving {
    No,
    /// Since after the report that it sent then.
    Asked(Boot),
    /// It has said that it holds nothing.
    Clear,
}

impl NodeState {
    fn new(record: NodeRecord, controller_epoch: u64) -> NodeState {
        NodeState {
            record,
            load: Load::default(),
            sent: None,
            gone_at: None,
            controller_epoch,
            linked: false,
            jobs: BTreeSet::new(),
            unproved: Vec::new(),
            kept: Arc::default(),
            leaving: Leaving::No,
            held_back: false,
        }
    }

    /// A node that was never heard before.
    fn unknown(id: &NodeId, controller_epoch: u64, now: Moment) -> NodeState {
        let record = NodeRecord {
            id: id.clone(),
            boot_id: String::new(),
            liveness: Liveness::Enrolling,
            eligibility: Eligibility::Open,
            last_seen: now.wall,
            inventory: Inventory::default(),
            preemption: NodePreemption::default(),
            breaker: Breaker::default(),
        };
        NodeState::new(record, controller_epoch)
    }

    /// Takes in the node's report about itself; true when its record changed.
    fn hear(&mut self, report: &Report, now: Moment) -> bool {
        (self.sent, self.load) = (Some(report.sent), report.load);
        let before = NodeRecord { last_seen: now.wall, ..self.record.clone() };
        self.hear_preemption(report, self.record.boot_id != report.boot_id, now);
        let record = &mut self.record;
        if let Some(inventory) = &report.inventory {
            record.inventory = inventory.clone();
        }
        let healthy = record.inventory.findings.iter().all(|finding| finding.grade != Grade::Bad);
        record.liveness = record.liveness.after(LivenessEvent::Synced { healthy });
        record.boot_id = report.boot_id.clone();
        record.last_seen = now.wall;
        *record != before
    }

    /// It does not take work only because it has not connected yet, or again.
    pub(super) fn is_expected(&self) -> bool {
        let answers = matches!(self.record.liveness, Liveness::Enrolling | Liveness::Ready);
        answers && !self.linked && self.record.eligibility == Eligibility::Open
    }

    /// Takes in what a report says about its retirement.
    fn hear_leaving(&mut self, report: &Report, rebooted: bool) {
        let Leaving::Asked(since) = self.leaving else { return };
        let present = report.obeyed.filter(|obeyed| obeyed.controller_epoch == self.controller_epoch);
        if rebooted {
            self.leaving = Leaving::Asked(report.sent); // its clock began anew
        } else if present.is_some_and(|obeyed| obeyed.answers > since) && report.replicas.is_empty() {
            self.leaving = Leaving::Clear;
        }
    }

    /// Its size, and what takes room on it.
    fn room(&self, jobs: &Jobs, now: Timestamp) -> Room {
        let inventory = &self.record.inventory;
        let taken = |id: &JobId| {
            let job = jobs.get(id)?;
            let longest = super::longest(&job.spec).zip(job.started_at);
            let ends = longest.map(|(longest, started)| longest.saturating_sub(now.since(started)));
            let owner = job.owner().map(ToString::to_string);
            Some(Taken { job: id.clone(), owner, size: Size::of(&job.spec.resources), ends })
        };
        // They take what they say that they were given, and nobody is charged for it.
        let unproved = |one: &Unproved| Taken {
            job: one.replica.job.clone(),
            owner: None,
            size: one.spec.as_ref().map(|spec| Size::of(&spec.resources)).unwrap_or_default(),
            ends: None,
        };
        Room {
            node: self.record.id.clone(),
            presence: Presence::There,
            closed: self.closed(now),
            slots: self.slots(jobs, now),
            size: Size::given_by(inventory),
            job_cpus: inventory.job_cpus,
            unfit: unfit(inventory),
            labels: inventory.labels.clone(),
            gangs: inventory.gangs,
            lacking: inventory
                .findings
                .iter()
                .filter_map(|finding| Some((finding.lacks?, finding.found.clone())))
                .collect(),
            kept: Arc::clone(&self.kept),
            taken: self.jobs.iter().filter_map(taken).chain(self.unproved.iter().map(unproved)).collect(),
            barred: self.unproved.iter().map(|one| one.replica.job.clone()).collect(),
        }
    }

    /// Why it takes no new work, as text for users.
    fn closed(&self, now: Timestamp) -> Option<Cow<'static, str>> {
        if let Some(notice) = self.record.preemption.notice() {
            return Some(notice.describe().into());
        }

        let why = match (self.record.eligibility, self.record.liveness) {
            (Eligibility::Draining, _) => "is being drained",
            (Eligibility::Cordoned, _) => "is cordoned",
            (_, Liveness::Degraded) => return self.failed_check().map(Cow::from),
            (_, Liveness::NotResponding | Liveness::Down) => "does not answer",
            (_, Liveness::Removed) => "was removed",
            (_, Liveness::Enrolling | Liveness::Ready) if self.linked => {
                let hold = self.record.breaker.hold(now)?;
                return Some(hold.describe().into());
            }
            (_, Liveness::Enrolling | Liveness::Ready) => "is not connected",
        };
        Some(why.into())
    }

    /// The failed check of a node that answers.
    pub(super) fn failed_check(&self) -> Option<String> {
        if self.record.liveness != Liveness::Degraded {
            return None;
        }
        let failed = self.record.inventory.findings.iter().find(|finding| finding.grade == Grade::Bad);
        Some(failed.map_or_else(
            || "fails a check, see `agentctl doctor`".to_owned(),
            |Finding { topic, found, means, .. }| format!("fails the check `{topic}`: {found}; {means}"),
        ))
    }
}

/// The GPUs that a node does not hand out, and why, as text for users; empty when it hands out all of them.
fn unfit(inventory: &Inventory) -> String {
    const SHOWN: usize = 3;
    let unfit: Vec<_> = inventory.gpus.iter().filter(|gpu| !gpu.counts()).collect();
    if unfit.is_empty() {
        return String::new();
    }
    let why = |gpu: &&Gpu| format!("GPU {}: {}", gpu.index, gpu.unfit.as_deref().unwrap_or_default());
    let reasons: Vec<String> = unfit.iter().take(SHOWN).map(why).collect();
    let more = match unfit.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    let (all, unfit) = (inventory.gpus.len(), unfit.len());
    format!("{unfit} of its {} not handed out: {}{more}", count(all as u64, "GPU"), reasons.join("; "))
}

/// A report that was taken in.
pub(super) struct Heard {
    /// The node was restarted since the report before.
    pub(super) rebooted: bool,
    /// Something changed that decides where jobs are placed.
    pub(super) changed: bool,
    /// Before the report, the node was to be taken away.
    pub(super) had_notice: bool,
    /// From this report on it is.
    pub(super) noticed: bool,
    /// The jobs that are placed on it.
    pub(super) jobs: Vec<JobId>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Fleet {
    nodes: BTreeMap<NodeId, NodeState>,
    contacts: Contacts,
    /// After a loss of records: those that must be heard before anything is placed.
    awaited: BTreeSet<NodeId>,
    /// The last one that a node was given.
    controller_epoch: u64,
    unwritten: BTreeSet<NodeId>,
    removed: BTreeSet<NodeId>,
}

impl Fleet {
    /// The nodes on record, each as if just heard. After a loss of records each must be heard again before anything
    /// is placed. `contact` is how long a node counts as connected after a report; `controller_epoch` is random.
    pub(super) fn new(
        records: Vec<NodeRecord>,
        lossy: bool,
        contact: Duration,
        controller_epoch: u64,
        now: Boot,
    ) -> Fleet {
        let (mut contacts, mut awaited) = (Contacts::new(contact), BTreeSet::new());
        for node in &records {
            if matches!(node.liveness, Liveness::Ready | Liveness::Degraded) {
                contacts.renew(&node.id, now);
            }
            if lossy && !matches!(node.liveness, Liveness::Down | Liveness::Removed) {
                awaited.insert(node.id.clone());
            }
        }
        let state = |node: NodeRecord| {
            let mut state = NodeState::new(node, controller_epoch);
            state.await_gone(now);
            (state.record.id.clone(), state)
        };
        let nodes = records.into_iter().map(state).collect();
        Fleet {
            nodes,
            contacts,
            awaited,
            controller_epoch,
            unwritten: BTreeSet::new(),
            removed: BTreeSet::new(),
        }
    }

    pub(super) fn get(&self, id: &NodeId) -> Option<&NodeState> {
        self.nodes.get(id)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut NodeState> {
        self.nodes.values_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.values()
    }

    /// The node answers: its last report is not older than a contact lasts.
    pub(super) fn is_heard(&self, id: &NodeId) -> bool {
        self.get(id).is_some_and(|node| matches!(node.record.liveness, Liveness::Ready | Liveness::Degraded))
    }

    /// The controller epoch of a node; for one that was never heard, the epoch it would get.
    pub(super) fn controller_epoch_of(&self, id: &NodeId) -> u64 {
        self.get(id).map_or(self.controller_epoch, |node| node.controller_epoch)
    }

    /// Takes in a node's report about itself; `None` when a later report overtook this one.
    pub(super) fn hear(&mut self, report: &Report, now: Moment) -> Option<Heard> {
        let (id, controller_epoch) = (&report.node, self.controller_epoch);
        let node =
            self.nodes.entry(id.clone()).or_insert_with(|| NodeState::unknown(id, controller_epoch, now));
        let (rebooted, had_notice) =
            (node.record.boot_id != report.boot_id, node.record.preemption.notice().is_some());
        if !rebooted && node.sent.is_some_and(|latest| report.sent < latest) && !broken!(OvertakenReports) {
            return None;
        }
        if rebooted && !broken!(LifeOfAnotherBoot) {
            self.controller_epoch = controller_epoch.wrapping_add(1);
            node.controller_epoch = self.controller_epoch;
        }
        node.hear_leaving(report, rebooted);
        let changed = node.hear(report, now);
        if changed {
            self.unwritten.insert(id.clone());
        }
        self.contacts.renew(id, now.boot);
        let has_notice = node.record.preemption.notice().is_some();
        let jobs = node.jobs.iter().cloned().collect();
        Some(Heard { rebooted, changed, had_notice, noticed: has_notice && !had_notice, jobs })
    }

    /// Whether a replica that a report does not name is not on the node: the report was made after the node obeyed
    /// orders of its present controller epoch, so it is no old copy.
    pub(super) fn believes(&self, report: &Report) -> bool {
        let present = |controller_epoch| {
            self.get(&report.node).is_some_and(|node| node.controller_epoch == controller_epoch)
        };
        report
            .obeyed
            .is_some_and(|obeyed| present(obeyed.controller_epoch) || broken!(ControllerEpochNotChecked))
    }

    /// What a node holds that is not proved; true if that changed.
    pub(super) fn set_unproved(&mut self, id: &NodeId, unproved: Vec<Unproved>) -> bool {
        let Some(node) = self.nodes.get_mut(id) else { return false };
        let [before, now] = [&node.unproved, &unproved].map(|list| list.iter().map(|one| &one.replica));
        let changed = !before.eq(now);
        node.unproved = unproved;
        changed
    }

    /// A node that was awaited has reported what it runs.
    pub(super) fn has_told(&mut self, id: &NodeId) -> bool {
        self.awaited.remove(id)
    }

    /// The nodes that must be heard before anything is placed, as text for users; `None` when there are none.
    pub(super) fn unheard(&self) -> Option<Arc<str>> {
        if self.awaited.is_empty() {
            return None;
        }
        let names: Vec<&str> = self.awaited.iter().map(NodeId::as_str).collect();
        Some(names.join(", ").into())
    }

    /// The nodes that fell silent at `now`, each returned once, with the jobs that are placed on it.
    pub(super) fn silent(&mut self, now: Boot) -> Vec<(NodeId, Vec<JobId>)> {
        let mut silent = Vec::new();
        for id in self.contacts.tick(now) {
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            node.record.liveness = node.record.liveness.after(LivenessEvent::LeaseOver);
            self.unwritten.insert(id.clone());
            silent.push((id, node.jobs.iter().cloned().collect()));
        }
        silent
    }

    /// When the next node counts as silent.
    pub(super) fn next_silence(&self) -> Option<Boot> {
        self.contacts.next()
    }

    /// A silent node is gone for good.
    pub(super) fn declare_lost(&mut self, id: &NodeId) -> DeclaredLost {
        if self.is_heard(id) {
            return DeclaredLost::Answers;
        }
        let Some(node) = self.nodes.get_mut(id) else { return DeclaredLost::Unknown };
        let down = node.record.liveness.after(LivenessEvent::LeaseOver).after(LivenessEvent::GraceOver);
        node.record.liveness = down;
        self.unwritten.insert(id.clone());
        self.awaited.remove(id);
        DeclaredLost::Done(node.jobs.iter().cloned().collect())
    }

    /// Allows new work on a node, or stops it; `None` when there is no such node.
    pub(super) fn set_eligibility(&mut self, id: &NodeId, event: EligibilityEvent) -> Option<bool> {
        let node = self.nodes.get_mut(id)?;
        let cleared = event == EligibilityEvent::Uncordon && node.record.breaker.clear();
        if event == EligibilityEvent::Uncordon {
            node.leaving = Leaving::No;
        }
        let next = node.record.eligibility.after(event);
        let changed = next != node.record.eligibility || cleared;
        if changed {
            node.record.eligibility = next;
            self.unwritten.insert(id.clone());
        }
        self.rest(id);
        Some(changed)
    }

    /// Asks a node without jobs to retire, or how far it is.
    pub(super) fn retire(&mut self, id: &NodeId) -> Retirement {
        let Some(node) = self.nodes.get_mut(id) else { return Retirement::Unknown };
        if broken!(BusyRetires) {
            return Retirement::Clear;
        }
        if !node.jobs.is_empty() {
            node.leaving = Leaving::No;
            return Retirement::Busy;
        }
        match node.leaving {
            Leaving::Clear => Retirement::Clear,
            Leaving::Asked(_) => Retirement::Asked,
            Leaving::No => {
                node.leaving = Leaving::Asked(node.sent.unwrap_or_default());
                Retirement::Asked
            }
        }
    }

    /// Changes a node; `change` says whether it did. `None` when there is no such node.
    pub(super) fn edit(&mut self, id: &NodeId, change: impl FnOnce(&mut NodeState) -> bool) -> Option<bool> {
        let changed = change(self.nodes.get_mut(id)?);
        if changed {
            self.unwritten.insert(id.clone());
        }
        Some(changed)
    }

    /// A draining node that has no more jobs is cordoned.
    fn rest(&mut self, id: &NodeId) {
        if let Some(node) = self.nodes.get_mut(id).filter(|node| node.jobs.is_empty())
            && node.record.eligibility == Eligibility::Draining
        {
            node.record.eligibility = node.record.eligibility.after(EligibilityEvent::Empty);
            self.unwritten.insert(id.clone());
        }
    }

    /// Notes that a job is placed on a node.
    pub(super) fn assign(&mut self, id: &NodeId, job: &JobId) {
        if let Some(node) = self.nodes.get_mut(id) {
            node.jobs.insert(job.clone());
        }
    }

    /// Notes what the node of a replica has once the job runs there.
    pub(super) fn note(&mut self, replica: &ReplicaRecord, spec: &JobSpec) {
        let runs = replica.step >= Some(ReplicaStep::Running);
        if let Some(node) = self.nodes.get_mut(&replica.node).filter(|_| runs) {
            Arc::make_mut(&mut node.kept).note(&JobNeeds::of(spec));
        }
    }

    /// Notes that a job has no run on a node any more.
    pub(super) fn release(&mut self, id: &NodeId, job: &JobId) {
        if let Some(node) = self.nodes.get_mut(id) {
            node.jobs.remove(job);
        }
        self.rest(id);
    }

    /// Takes in which nodes have an open stream.
    pub(super) fn link(&mut self, linked: impl Fn(&NodeId) -> bool) -> bool {
        let mut changed = false;
        for (id, node) in &mut self.nodes {
            let now = linked(id);
            changed |= node.linked != now;
            node.linked = now;
        }
        changed
    }

    /// The size of every node, and those of `jobs` that take room on it.
    pub(super) fn rooms(&self, jobs: &Jobs, now: Timestamp) -> Vec<Room> {
        self.iter().map(|node| node.room(jobs, now)).collect()
    }

    /// The interpreters that nodes report.
    pub(super) fn pythons(&self) -> Pythons<'_> {
        let said = self.nodes.iter().map(|(id, node)| (id, &node.record.inventory.interpreters[..]));
        said.filter(|(_, interpreters)| !interpreters.is_empty()).collect()
    }

    pub(super) fn is_written(&self) -> bool {
        self.unwritten.is_empty() && self.removed.is_empty()
    }

    /// Removes a node. One that is heard again is a new one.
    pub(super) fn remove(&mut self, id: &NodeId) {
        self.nodes.remove(id);
        self.awaited.remove(id);
        self.unwritten.remove(id);
        self.removed.insert(id.clone());
    }

    /// Adds what is not on disk yet to `changes`.
    pub(super) fn collect(&self, changes: &mut Changes) {
        let nodes = self.unwritten.iter().filter_map(|id| self.get(id));
        changes.documents.extend(nodes.map(|node| Document::Node(Box::new(node.record.clone()))));
        let gone = self.removed.iter().filter(|id| self.get(id).is_none());
        changes.dropped.extend(gone.map(Document::name_of_node));
    }

    /// Everything is on disk.
    pub(super) fn written(&mut self) {
        self.unwritten.clear();
        self.removed.clear();
    }
}

#[cfg(test)]
mod tests {
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
