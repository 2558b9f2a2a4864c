//! Reasons that keep a job from starting even if there is room: a user holds it, or it comes after other jobs.
//!
//! Owns the index of the jobs that wait for the end of another job. The predecessors that a job still waits for are
//! in its record ([`JobRecord::waits_for`]). One is removed in the same commit that contains its end; if it did not
//! end as wanted, the waiting job ends in that commit. So an end counts once, over every restart, and no job waits
//! for one that has ended. Invariant: a predecessor that is not in the book is looked up in the store; that happens
//! only after a loss of records, or when its end crossed the submission.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use agent_model::job::WantedEnd;
use agent_model::{JobEvent, JobId, JobState, Verdict};

use super::{Book, Moment, without_run};
use crate::store::JobRecord;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Predecessors {
    /// The waiting jobs, by the job whose end they wait for.
    followers: BTreeMap<JobId, BTreeSet<JobId>>,
    /// Ends that were not passed to followers yet; without a verdict where it is not known how the job ended.
    ends: Vec<(JobId, Option<Verdict>)>,
    /// Predecessors that are not in the book.
    unknown: BTreeSet<JobId>,
}

impl Predecessors {
    /// A job reached its terminal state.
    pub(super) fn has_ended(&mut self, id: &JobId, verdict: Verdict) {
        if self.followers.contains_key(id) {
            self.ends.push((id.clone(), Some(verdict)));
        }
    }
}

impl Book {
    /// Holds a job that waits, or releases it; false when it does not wait. Asking again changes nothing.
    pub(crate) fn hold(&mut self, id: &JobId, held: bool, who: &str, now: Moment) -> bool {
        let waits = |job: &&Arc<JobRecord>| job.state == JobState::Queued || job.has_waiting_tasks();
        let Some(job) = self.jobs.get(id).filter(waits) else { return false };
        if job.held.is_some() == held {
            return true;
        }
        let (done, reason) = match held {
            true => ("held", Some(format!("held by {who}"))),
            false => ("released", None),
        };
        self.jobs.edit(id, |job| job.held = reason);
        self.jobs.tell(id, None, now, format!("{done} by {who}"));
        (self.urgent, self.replan) = (true, true);
        true
    }

    /// Registers a waiting job for the ends of its predecessors.
    pub(super) fn await_predecessors(&mut self, id: &JobId) {
        let Some(job) = self.jobs.get(id).filter(|job| job.state == JobState::Queued) else { return };
        for wanted in &job.waits_for {
            let known = &mut self.predecessors;
            known.followers.entry(wanted.job.clone()).or_default().insert(id.clone());
            let of_array = wanted.job.as_task().and_then(|(array, index)| {
                self.jobs.get(&array)?.tasks.as_ref()?.waiting.contains(index).then_some(JobState::Queued)
            });
            match self.jobs.find(&wanted.job).map(|job| job.state).or(of_array) {
                None => drop(known.unknown.insert(wanted.job.clone())),
                // Its end crossed the submission.
                Some(state) if state.is_terminal() => {
                    known.ends.push((wanted.job.clone(), state.verdict()));
                }
                Some(_) => {}
            }
        }
    }

    /// The same for all waiting jobs, after a start of the controller.
    pub(super) fn await_predecessors_again(&mut self) {
        let waiting: Vec<JobId> = self.line.iter().cloned().collect();
        waiting.iter().for_each(|id| self.await_predecessors(id));
    }

    /// Predecessors to look up in the store. None while a node is unheard: it may run one that is not on record.
    pub(crate) fn unknown_predecessors(&mut self) -> Vec<JobId> {
        if self.fleet.unheard().is_some() {
            return Vec::new();
        }
        let (jobs, known) = (&self.jobs, &mut self.predecessors);
        known.unknown.retain(|id| jobs.get(id).is_none());
        known.unknown.iter().cloned().collect()
    }

    /// Takes in the record from the store, if there is one.
    pub(crate) fn resolve_predecessor(&mut self, id: &JobId, job: Option<&JobRecord>) {
        self.predecessors.unknown.remove(id);
        self.predecessors.ends.push((id.clone(), job.and_then(|job| job.state.verdict())));
    }

    /// Passes each end to the followers of the job. A follower that ends by that may have followers too.
    pub(super) fn settle_predecessors(&mut self, now: Moment) {
        while let Some((ended, verdict)) = self.predecessors.ends.pop() {
            for follower in self.predecessors.followers.remove(&ended).unwrap_or_default() {
                self.tell_follower(&follower, &ended, verdict, now);
            }
        }
    }

    fn tell_follower(&mut self, id: &JobId, ended: &JobId, verdict: Option<Verdict>, now: Moment) {
        let Some(job) = self.jobs.get(id).filter(|job| job.state == JobState::Queued) else { return };
        let met = |end: WantedEnd| verdict.is_some_and(|verdict| end.is_met_by(verdict));
        let unmet = job.waits_for.iter().find(|wanted| wanted.job == *ended && !met(wanted.end));
        let fault = unmet.map(|wanted| wanted.never_due(verdict));
        (self.urgent, self.replan) = (true, true);
        match fault {
            None => {
                self.jobs.edit(id, |job| job.waits_for.retain(|wanted| wanted.job != *ended));
                let state = verdict.map_or("", |verdict| JobState::from(verdict).name());
                self.jobs.tell(id, None, now, format!("{ended} is {state}: no need to wait for it any more"));
            }
            Some(fault) => {
                self.jobs.advance(id, JobEvent::NeverDue);
                self.jobs.tell(id, None, now, fault.to_string());
                self.end(id, without_run(Verdict::Failed, Some(fault), now.wall), now);
            }
        }
    }
}

#[cfg(test)]
mod tests;
