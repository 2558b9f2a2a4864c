//! The rule that nothing is placed while the controller's machine is about to be shut down.

use std::sync::Arc;

use agent_model::JobState;

use super::Book;
use crate::queue::Work;

impl Book {
    /// The first job that keeps the machine up, as text for users. One that a user holds does not.
    pub(crate) fn kept_up_by(&self, work: Work) -> Option<String> {
        let mut jobs = self.jobs.iter().filter(|job| !job.state.is_terminal());
        let placed = jobs.find(|job| job.state != JobState::Queued);
        if let Some(job) = placed {
            return Some(format!("{} runs", job.id));
        }
        let mut waiting =
            self.line.iter().filter_map(|id| self.jobs.get(id)).filter(|job| job.held.is_none());
        waiting.next().filter(|_| work == Work::Any).map(|job| format!("{} waits", job.id))
    }

    /// Places nothing from now on, unless `work` keeps the machine up: then that is returned and nothing changes.
    pub(crate) fn close(&mut self, why: &str, work: Option<Work>) -> Option<String> {
        let kept = work.and_then(|work| self.kept_up_by(work));
        if kept.is_none() {
            self.closed = Some(Arc::from(why));
            self.replan = true;
        }
        kept
    }

    /// Places again what can be placed.
    pub(crate) fn open(&mut self) {
        self.replan |= self.closed.take().is_some();
    }
}
