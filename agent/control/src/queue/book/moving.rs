//! Jobs that a machine brings when it joins: each goes on as it was with the machine's own controller.
//!
//! Invariants: they keep their names, their attempts and their order; of one call all are taken, or none; a submission
//! is taken once. A job that runs is on record before its node is heard, and has the lease of one that was just placed:
//! what the machine's own controller granted before is over by then.

use agent_model::{JobId, NodeId, Principal};

use super::{Book, Moment};
use crate::store::JobRecord;

impl Book {
    /// Takes in jobs that `node` brings, in their order, except those that came before. Returns the first whose name
    /// another job has; then none is taken.
    pub(crate) fn move_in(&mut self, jobs: Vec<JobRecord>, node: &NodeId, now: Moment) -> Option<JobId> {
        let jobs: Vec<JobRecord> =
            jobs.into_iter().filter(|job| self.jobs.submitted(&job.request) != Some(&job.id)).collect();
        let is_taken = |job: &&JobRecord| {
            let request = self.jobs.submitted(&job.request).is_some();
            request || self.job(&job.id).is_some() || self.strangers.have(&job.id)
        };
        if let Some(taken) = jobs.iter().find(is_taken) {
            return Some(taken.id.clone());
        }
        self.fleet.expect(node, now);
        let ids: Vec<JobId> = jobs.iter().map(|job| job.id.clone()).collect();
        for job in jobs {
            let owner = job.owner.as_ref().map(Principal::to_string).unwrap_or_default();
            let job = self.jobs.add(job).clone();
            self.leases.grant(&job, None, now.boot);
            self.take_place(&job);
            self.jobs.tell(&job.id, Some(node), now, format!("moved here with {node}, for {owner}"));
        }
        self.claim_indices_again();
        ids.iter().for_each(|id| self.await_predecessors(id));
        (self.urgent, self.replan) = (true, true);
        None
    }
}

#[cfg(test)]
mod tests;
