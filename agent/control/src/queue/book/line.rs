//! The line of waiting jobs: their order, their dates, and the reason why each waits.
//!
//! Invariant: a job that is not in line has neither a date nor a reason here.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use agent_model::job::Priority;
use agent_model::{JobId, Principal, Timestamp};

use crate::scheduler::{self, JobNeeds, Pending, Wait};
use crate::store::JobRecord;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// High priority first, then in the order of submission.
    order: BTreeSet<(Reverse<Priority>, u64, JobId)>,
    /// Those that may not start before a date.
    dates: BTreeMap<JobId, Timestamp>,
    /// From when on it is too late for one to start.
    deadlines: BTreeMap<JobId, Timestamp>,
    reasons: HashMap<JobId, Wait>,
}

impl Line {
    /// Adds a job in its order. It is not placed before its date.
    pub(super) fn join(&mut self, job: &JobRecord) {
        self.order.insert(place(job));
        if let Some(date) = job.not_before.max(job.spec.begin) {
            self.dates.insert(job.id.clone(), date);
        }
        if let Some(latest) = job.spec.latest_start() {
            self.deadlines.insert(job.id.clone(), Timestamp(latest.0.saturating_add(1)));
        }
    }

    /// Takes a job out of the line.
    pub(super) fn leave(&mut self, job: &JobRecord) {
        self.order.remove(&place(job));
        self.dates.remove(&job.id);
        self.deadlines.remove(&job.id);
        self.reasons.remove(&job.id);
    }

    /// Removes the dates that have passed; true when there were any.
    pub(super) fn come(&mut self, now: Timestamp) -> bool {
        let before = self.dates.len();
        self.dates.retain(|_, date| *date > now);
        self.dates.len() < before
    }

    /// The next date; that of a deadline only if it is followed.
    pub(super) fn next_date(&self, with_deadlines: bool) -> Option<Timestamp> {
        let deadlines = self.deadlines.values().filter(|_| with_deadlines);
        self.dates.values().chain(deadlines).min().copied()
    }

    /// Those whose date to start is over.
    pub(super) fn overdue(&self, now: Timestamp) -> Vec<JobId> {
        let over = self.deadlines.iter().filter(|(_, late)| now >= **late);
        over.map(|(id, _)| id.clone()).collect()
    }

    pub(super) fn has_date(&self, id: &JobId) -> bool {
        self.dates.contains_key(id)
    }

    /// The waiting jobs, in their order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &JobId> {
        self.order.iter().map(|(_, _, id)| id)
    }

    /// Notes why a job waits; returns the reason when it is of another kind than before.
    pub(super) fn explain(&mut self, id: &JobId, reason: Wait) -> Option<&Wait> {
        let new = self.reasons.get(id).is_none_or(|before| before.differs_in_kind(&reason));
        let known = self.reasons.entry(id.clone()).insert_entry(reason).into_mut();
        new.then_some(known)
    }

    /// Why a job waits, as text for users.
    pub(super) fn reason(&self, id: &JobId) -> String {
        self.reasons.get(id).map(Wait::to_string).unwrap_or_default()
    }
}

/// A job that may start now, as it is placed.
pub(super) fn pending(job: &JobRecord) -> Pending {
    Pending {
        job: job.id.clone(),
        wants: job.spec.resources.clone(),
        needs: JobNeeds::of(&job.spec),
        priority: job.spec.priority,
        owner: job.owner().map(Principal::to_string),
        longest: super::longest(&job.spec),
        python: scheduler::python_of(&job.spec.environment).map(str::to_owned),
        requires: job.spec.environment.requires(),
        avoid: job.avoid.clone(),
    }
}

fn place(job: &JobRecord) -> (Reverse<Priority>, u64, JobId) {
    (Reverse(job.spec.priority), job.seq, job.id.clone())
}
