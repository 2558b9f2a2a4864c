//! The jobs that have not ended, and the changes to them that are not on disk yet.
//!
//! Owns: their records, the requests that made them, and the history that is still to be written. Invariants: the
//! state of a job changes through `JobState::after` only; every change of a record lists it as unwritten; a job that
//! ended is kept until that is written, and is still found for a while after.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use agent_model::{Epoch, JobEvent, JobId, JobState, NodeId, Verdict};

use super::Moment;
use super::waiting::Amounts;
use crate::store::{Changes, Event, JobRecord};

/// How many ended jobs stay in memory, so that a repeated submission that arrives just after the end of its job still
/// finds it.
const RECENT: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    active: BTreeMap<JobId, Arc<JobRecord>>,
    requests: HashMap<String, JobId>,
    recent: VecDeque<Arc<JobRecord>>,
    last_seq: u64,
    unwritten: BTreeSet<JobId>,
    /// Jobs that ended before, whose records changed since.
    amended: BTreeMap<JobId, Arc<JobRecord>>,
    events: Vec<Event>,
    /// How large they are.
    pub(super) amounts: Amounts,
}

impl Jobs {
    /// No jobs; the last place given in the order of submission was `last_seq`.
    pub(super) fn new(last_seq: u64) -> Jobs {
        Jobs { last_seq, ..Jobs::default() }
    }

    /// Takes in a job as it is on disk.
    pub(super) fn load(&mut self, job: JobRecord) {
        self.amounts.add(&job);
        self.requests.insert(job.request.clone(), job.id.clone());
        self.active.insert(job.id.clone(), Arc::new(job));
    }

    /// Takes in a job that is not on disk yet, and gives it the next place in the order of submission.
    pub(super) fn add(&mut self, job: JobRecord) -> &Arc<JobRecord> {
        self.last_seq += 1;
        self.amounts.add(&job);
        self.unwritten.insert(job.id.clone());
        self.requests.insert(job.request.clone(), job.id.clone());
        let job = Arc::new(JobRecord { seq: self.last_seq, ..job });
        self.active.entry(job.id.clone()).insert_entry(job).into_mut()
    }

    /// A job that has not ended, or whose end is not written yet.
    pub(super) fn get(&self, id: &JobId) -> Option<&Arc<JobRecord>> {
        self.active.get(id)
    }

    /// The same, or one that ended just now.
    pub(super) fn find(&self, id: &JobId) -> Option<&Arc<JobRecord>> {
        self.get(id).or_else(|| self.recent.iter().find(|job| job.id == *id))
    }

    /// The job that a request made, if it has not ended or ended just now.
    pub(super) fn submitted(&self, request: &str) -> Option<&JobId> {
        let recent = || self.recent.iter().find(|job| job.request == request).map(|job| &job.id);
        self.requests.get(request).or_else(recent)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<JobRecord>> {
        self.active.values()
    }

    pub(super) fn state(&self, id: &JobId) -> Option<JobState> {
        self.get(id).map(|job| job.state)
    }

    /// The verdict of a job that ended.
    pub(super) fn verdict(&self, id: &JobId) -> Verdict {
        match self.state(id) {
            Some(JobState::Completed) => Verdict::Completed,
            Some(JobState::Canceled) => Verdict::Canceled,
            _ => Verdict::Failed,
        }
    }

    /// Moves a job's state; false when the event does not apply.
    pub(super) fn advance(&mut self, id: &JobId, event: JobEvent) -> bool {
        let Some(next) = self.state(id).and_then(|state| state.after(event)) else { return false };
        self.edit(id, |job| job.state = next);
        true
    }

    pub(super) fn edit(&mut self, id: &JobId, change: impl FnOnce(&mut JobRecord)) {
        if let Some(job) = self.active.get_mut(id) {
            change(Arc::make_mut(job));
            self.unwritten.insert(id.clone());
        }
    }

    /// Changes what is only shown of a job, and written when something else of it is.
    pub(super) fn note(&mut self, id: &JobId, change: impl FnOnce(&mut JobRecord)) {
        if let Some(job) = self.active.get_mut(id) {
            change(Arc::make_mut(job));
        }
    }

    /// Adds a line to the history of a job.
    pub(super) fn tell(&mut self, id: &JobId, node: Option<&NodeId>, now: Moment, text: String) {
        let epoch = self.get(id).map_or(Epoch::default(), |job| job.epoch);
        self.events.push(Event { job: id.clone(), at: now.wall, epoch, node: node.cloned(), text });
    }

    /// Takes in the changed record of a job that ended before.
    pub(super) fn amend(&mut self, job: JobRecord, node: &NodeId, now: Moment, text: String) {
        let (id, epoch) = (job.id.clone(), job.epoch);
        self.events.push(Event { job: id, at: now.wall, epoch, node: Some(node.clone()), text });
        let job = Arc::new(job);
        for known in self.recent.iter_mut().filter(|known| known.id == job.id) {
            *known = Arc::clone(&job);
        }
        self.amended.insert(job.id.clone(), job);
    }

    /// Marks an ended job as removed.
    pub(super) fn remove(&mut self, job: JobRecord, now: Moment) {
        self.recent.retain(|known| known.id != job.id);
        self.amended.insert(job.id.clone(), Arc::new(job.removed(now.wall)));
    }

    pub(super) fn is_written(&self) -> bool {
        self.unwritten.is_empty() && self.amended.is_empty() && self.events.is_empty()
    }

    /// Adds what is not on disk yet to `changes`.
    pub(super) fn collect(&self, changes: &mut Changes) {
        // Removed jobs come first: each frees its name for a later one.
        changes.jobs.extend(self.amended.values().cloned());
        changes.jobs.extend(self.unwritten.iter().filter_map(|id| self.get(id)).cloned());
        changes.events.extend(self.events.iter().cloned());
    }

    /// Everything is on disk: jobs that ended move to the recent ones.
    pub(super) fn written(&mut self) {
        self.events.clear();
        self.amended.clear();
        for id in std::mem::take(&mut self.unwritten) {
            if self.state(&id).is_some_and(JobState::is_terminal)
                && let Some(job) = self.active.remove(&id)
            {
                self.requests.remove(&job.request);
                self.amounts.remove(&job);
                let exit =
                    job.outcome.as_ref().and_then(|outcome| outcome.exit).map(|exit| exit.shell_code());
                tracing::info!(job = %id, state = job.state.name(), exit, "ended job");
                self.recent.push_back(job);
            }
        }
        while self.recent.len() > RECENT {
            self.recent.pop_front();
        }
    }
}
