//! What nodes keep of jobs that are off the record.
//!
//! A node keeps outputs that could not be stored. Once somebody has removed their job nobody will ask for them, and the
//! node is told to let them go, until its inventory does not name them. A job that is not on record at all, as after an
//! old backup, was removed by nobody: what is kept of it stays.

use std::collections::{BTreeMap, BTreeSet};

use agent_model::{Epoch, JobId, ReplicaId};

use super::{Book, NodeState};
use crate::store::JobRecord;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct KeptResults {
    /// Removed jobs, with their last attempts.
    removed: BTreeMap<JobId, Epoch>,
    /// The store was asked about these.
    asked: BTreeSet<JobId>,
}

impl KeptResults {
    pub(super) fn has_been_removed(&mut self, job: &JobId, last: Epoch) {
        self.removed.insert(job.clone(), last);
    }
}

impl Book {
    /// Jobs of which nodes keep something, and that must be looked up in the store.
    pub(crate) fn unknown_kept(&self) -> Vec<JobId> {
        let of_nodes = self.nodes().flat_map(|node| &node.record.inventory.kept);
        let jobs: BTreeSet<&JobId> = of_nodes.map(|kept| &kept.replica.job).collect();
        let known = |id: &JobId| {
            self.jobs.get(id).is_some() || self.kept.removed.contains_key(id) || self.kept.asked.contains(id)
        };
        jobs.into_iter().filter(|id| !known(id)).cloned().collect()
    }

    /// Takes in the record from the store, if there is one.
    pub(crate) fn resolve_kept(&mut self, id: &JobId, job: Option<&JobRecord>) {
        self.kept.asked.insert(id.clone());
        if let Some(job) = job.filter(|job| job.is_removed()) {
            self.kept.has_been_removed(id, job.epoch);
        }
    }

    /// What a node keeps of removed jobs.
    pub(super) fn discarded_on(&self, node: &NodeState) -> Vec<ReplicaId> {
        let of_removed = |replica: &&ReplicaId| {
            self.kept.removed.get(&replica.job).is_some_and(|last| replica.epoch <= *last)
        };
        let kept = node.record.inventory.kept.iter().map(|kept| &kept.replica);
        kept.filter(of_removed).cloned().collect()
    }
}
