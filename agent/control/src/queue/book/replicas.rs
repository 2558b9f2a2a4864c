//! Replicas between a decision and its confirmation by their node.
//!
//! Owns two lists: those whose outcome is in and that their node may still hold, and those of canceled jobs that
//! their node never reported and might still start. Invariant: a replica is *forgotten* (a change to be written)
//! once, when its node does not hold it any more.

use std::collections::BTreeMap;

use agent_model::protocol::orders::Obeyed;
use agent_model::{Boot, JobId, NodeId, ReplicaId};

use super::Report;
use crate::store::{Changes, Document, SettledRecord};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Replicas {
    settled: BTreeMap<ReplicaId, Settled>,
    /// When, by its clock, the node of a canceled replica sent the first report after the cancel.
    withdrawn: BTreeMap<ReplicaId, Boot>,
    unwritten: Vec<SettledRecord>,
    forgotten: Vec<ReplicaId>,
}

/// A replica whose outcome is in and that its node may still hold.
#[derive(Debug)]
struct Settled {
    node: NodeId,
    /// The node named it in a report.
    named: bool,
    /// Reports without it since the last one with it.
    absent: u8,
}

impl Settled {
    /// Takes in a report; true when the node does not hold the replica any more.
    ///
    /// One report without a replica that was never named may be older than its outcome; two are not.
    fn hear(&mut self, held: bool) -> bool {
        self.named |= held;
        self.absent = if held { 0 } else { self.absent.saturating_add(1) };
        self.absent >= if self.named { 1 } else { 2 }
    }
}

impl Replicas {
    /// Those that are settled on disk.
    pub(super) fn new(settled: Vec<SettledRecord>) -> Replicas {
        let named = |SettledRecord { replica, node }| (replica, Settled { node, named: true, absent: 0 });
        Replicas { settled: settled.into_iter().map(named).collect(), ..Replicas::default() }
    }

    /// The outcome of a replica is in. `named`: its node reported it before.
    pub(super) fn settle(&mut self, replica: &ReplicaId, node: &NodeId, named: bool) {
        self.settled.insert(replica.clone(), Settled { node: node.clone(), named, absent: 0 });
        self.unwritten.push(SettledRecord { replica: replica.clone(), node: node.clone() });
    }

    pub(super) fn is_settled(&self, replica: &ReplicaId) -> bool {
        self.settled.contains_key(replica)
    }

    /// Those that a node may forget.
    pub(super) fn settled_on(&self, node: &NodeId) -> impl Iterator<Item = &ReplicaId> {
        self.settled.iter().filter(move |(_, settled)| settled.node == *node).map(|(replica, _)| replica)
    }

    /// Takes in which replicas a node holds, and, if that is `believed`, which it does not hold.
    pub(super) fn hear(&mut self, report: &Report, believed: bool) {
        let forgotten = &mut self.forgotten;
        self.settled.retain(|replica, settled| {
            let held = report.holds(replica);
            let gone = settled.node == report.node && (held || believed) && settled.hear(held);
            if gone {
                forgotten.push(replica.clone());
            }
            !gone
        });
    }

    /// Whether the node of a canceled replica that it never reported cannot start it any more: it `obeyed` orders
    /// that were made after the cancel.
    pub(super) fn is_withdrawn(
        &mut self,
        replica: &ReplicaId,
        report: &Report,
        obeyed: Option<Obeyed>,
    ) -> bool {
        match self.withdrawn.get(replica) {
            Some(since) => obeyed.is_some_and(|obeyed| obeyed.answers > *since),
            None if broken!(CancelWithoutProof) => true,
            None => {
                self.withdrawn.insert(replica.clone(), report.sent);
                false
            }
        }
    }

    /// The node of a canceled replica was restarted: its clock starts again.
    pub(super) fn rebooted(&mut self, replica: &ReplicaId) {
        self.withdrawn.remove(replica);
    }

    /// The job has no run any more.
    pub(super) fn end(&mut self, job: &JobId) {
        self.withdrawn.retain(|replica, _| replica.job != *job);
    }

    pub(super) fn is_written(&self) -> bool {
        self.unwritten.is_empty() && self.forgotten.is_empty()
    }

    /// Adds what is not on disk yet to `changes`.
    pub(super) fn collect(&self, changes: &mut Changes) {
        changes.documents.extend(self.unwritten.iter().cloned().map(Document::Settled));
        changes.dropped.extend(self.forgotten.iter().map(Document::name_of_settled));
    }

    /// Everything is on disk.
    pub(super) fn written(&mut self) {
        self.unwritten.clear();
        self.forgotten.clear();
    }
}
