//! What keeps a job from starting however much room there is: somebody holds it, or it comes after other jobs.
//!
//! Owns who waits for the end of whom. What a job still waits for is in its record ([`JobRecord::waits_for`]) and is
//! struck off in the very commit that has the end it waited for; what never comes ends the job in that commit. So an end
//! counts once, over every restart, and nothing waits for a job that has ended. Invariant: whoever waits for a job that
//! the book does not have is asked about at the store, which only a record that was lost and mended, or an end that
//! crossed the submission, brings about.

use std::collections::{BTreeMap, BTreeSet};

use agent_model::job::WantedEnd;
use agent_model::{JobEvent, JobId, JobState, Verdict};

use super::{Book, Moment, without_run};
use crate::store::JobRecord;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Predecessors {
    /// Those who wait, by the job whose end they wait for.
    followers: BTreeMap<JobId, BTreeSet<JobId>>,
    /// Ends that were not told to followers yet; nobody knows how a job without a verdict ended.
    ends: Vec<(JobId, Option<Verdict>)>,
    /// Waited for, and not in the book.
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
    /// Keeps a job that waits from starting, or lets it go; false when it does not wait. Asking again changes nothing.
    pub(crate) fn hold(&mut self, id: &JobId, held: bool, who: &str, now: Moment) -> bool {
        let Some(job) = self.jobs.get(id).filter(|job| job.state == JobState::Queued) else { return false };
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

    /// Has a job that waits told of the ends of those it comes after.
    pub(super) fn await_predecessors(&mut self, id: &JobId) {
        let Some(job) = self.jobs.get(id).filter(|job| job.state == JobState::Queued) else { return };
        for wanted in &job.waits_for {
            let known = &mut self.predecessors;
            known.followers.entry(wanted.job.clone()).or_default().insert(id.clone());
            match self.jobs.find(&wanted.job).map(|job| job.state) {
                None => drop(known.unknown.insert(wanted.job.clone())),
                // Its end crossed the submission.
                Some(state) if state.is_terminal() => {
                    known.ends.push((wanted.job.clone(), state.verdict()));
                }
                Some(_) => {}
            }
        }
    }

    /// The same for all of them, after a start.
    pub(super) fn await_predecessors_again(&mut self) {
        let waiting: Vec<JobId> = self.line.iter().cloned().collect();
        waiting.iter().for_each(|id| self.await_predecessors(id));
    }

    /// Jobs about whose end the store must be asked. A node that was not heard yet may still run one that is on no record.
    pub(crate) fn unknown_predecessors(&mut self) -> Vec<JobId> {
        if self.fleet.unheard().is_some() {
            return Vec::new();
        }
        let (jobs, known) = (&self.jobs, &mut self.predecessors);
        known.unknown.retain(|id| jobs.get(id).is_none());
        known.unknown.iter().cloned().collect()
    }

    /// Takes in what the store said.
    pub(crate) fn resolve_predecessor(&mut self, id: &JobId, job: Option<&JobRecord>) {
        self.predecessors.unknown.remove(id);
        self.predecessors.ends.push((id.clone(), job.and_then(|job| job.state.verdict())));
    }

    /// Tells the followers of every job that ended. What ends by that has followers too.
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
