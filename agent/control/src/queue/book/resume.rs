//! The part of the book about jobs whose attempts go on with the outputs of the one before.
//!
//! What an attempt stored at its end is what the next one begins with; of one that ended without a word, what it stored
//! last while it ran; of one that stored nothing, what it began with itself.

use agent_model::job::LeftOutputs;
use agent_model::{Artifacts, JobId, JobSpec, NodeId, ReplicaId};

use super::{Book, Moment, Standing};
use crate::store::{JobRecord, RankEnd};

impl JobRecord {
    /// The job as its node is to run it.
    pub(crate) fn spec_to_run(&self) -> JobSpec {
        self.spec.clone().resuming(self.left)
    }
}

impl Book {
    /// The attempt of a job has ended: notes what it left for the next one. Of several ranks the first counts.
    pub(super) fn keep_left(&mut self, id: &JobId, now: Moment) {
        let Some(job) = self.jobs.get(id).filter(|job| job.spec.resume_outputs) else { return };
        let told = match job.rank(0).and_then(|first| first.end.as_ref()) {
            Some(RankEnd::Told(outcome)) => outcome.artifacts,
            _ => None,
        };
        let at_end = told.map(|artifacts| LeftOutputs { attempt: job.epoch, artifacts, is_earlier: false });
        let Some(left) = at_end.or(job.so_far) else { return };
        self.jobs.edit(id, |job| (job.left, job.so_far) = (Some(left), None));
        self.jobs.tell(id, None, now, format!("the next attempt begins with {left}"));
    }

    /// A running attempt stored its outputs so far.
    pub(crate) fn note_so_far(&mut self, replica: &ReplicaId, node: &NodeId, artifacts: Artifacts) {
        let wanted = |job: &&std::sync::Arc<JobRecord>| job.spec.resume_outputs && replica.rank == 0;
        let open = self.standing(replica, node) == Standing::Open;
        if open && self.jobs.get(&replica.job).filter(wanted).is_some() {
            let so_far = LeftOutputs { attempt: replica.epoch, artifacts, is_earlier: true };
            self.jobs.edit(&replica.job, |job| job.so_far = Some(so_far));
            self.urgent = true;
        }
    }
}
