//! What the controller counts of its commits. Pure.
//!
//! Nothing counted here names a user or a job, and every label has a few values.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_model::Blame;
use agent_model::exposition::{Histogram, MetricsPage, NumberKind};

use crate::store::{Changes, JobRecord};

const WAITS: &[f64] = &[0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0, 43_200.0, 172_800.0];
const COMMITS: &[f64] = &[0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0];

/// How a job ends, and whose fault that is.
const ENDS: [&str; 3] = ["Completed", "Failed", "Canceled"];
const NOBODYS: &str = "none";

/// Counts since the controller started.
#[derive(Debug)]
pub(crate) struct Counts {
    /// Jobs that ended, by their state and whose fault that was.
    ended: BTreeMap<(&'static str, &'static str), u64>,
    waited: Histogram,
    commits: Histogram,
    commits_failed: u64,
}

impl Default for Counts {
    fn default() -> Counts {
        Counts {
            // All of them from the beginning: Prometheus sees no increase in a number that was not there before.
            ended: ENDS
                .into_iter()
                .flat_map(|end| {
                    [NOBODYS]
                        .into_iter()
                        .chain(Blame::ALL.map(Blame::name))
                        .map(move |blame| ((end, blame), 0))
                })
                .collect(),
            waited: Histogram::new(WAITS),
            commits: Histogram::new(COMMITS),
            commits_failed: 0,
        }
    }
}

impl Counts {
    /// Takes in a commit that succeeded.
    pub(crate) fn committed(&mut self, changes: &Changes, took: Duration) {
        self.commits.observe(took);
        for event in &changes.events {
            let job = || changes.jobs.iter().find(|job| job.id == event.job);
            if event.text.starts_with("ended: ")
                && let Some(job) = job()
            {
                *self.ended.entry((job.state.name(), blame(job))).or_default() += 1;
            } else if event.text.starts_with("placed on ")
                && let Some(job) = job().filter(|job| job.earlier.is_empty())
            {
                self.waited.observe(event.at.since(job.submitted_at));
            }
        }
    }

    /// A commit failed, and is tried again.
    pub(crate) fn failed(&mut self) {
        self.commits_failed += 1;
    }
}

/// Whose fault the end of a job was.
fn blame(job: &JobRecord) -> &'static str {
    let fault = job.outcome.as_ref().and_then(|outcome| outcome.fault.as_ref());
    fault.map_or(NOBODYS, |fault| fault.blame.name())
}

impl Counts {
    /// Adds them to a page.
    pub(crate) fn write(&self, page: &mut MetricsPage) {
        let ended = self.ended.iter().map(|((state, blame), count)| {
            ([("outcome", (*state).to_owned()), ("blame", (*blame).to_owned())], *count as f64)
        });
        page.family(
            "agent_jobs_ended_total",
            NumberKind::Counter,
            "Jobs that ended since the controller started, by how and by whose fault.",
            ended,
        );
        page.histogram(
            "agent_queue_wait_seconds",
            "From the submission of a job to its first placement.",
            &self.waited,
        );
        page.histogram(
            "agent_commit_seconds",
            "How long the controller took to make changes durable.",
            &self.commits,
        );
        page.one(
            "agent_commits_failed_total",
            NumberKind::Counter,
            "Commits that failed and were tried again.",
            self.commits_failed as f64,
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use agent_model::{Epoch, JobState, Timestamp};

    use super::*;
    use crate::store::Event;
    use crate::store::tests::job;

    #[test]
    fn test_an_end_and_a_first_place_are_counted_once_however_often_a_job_is_written() {
        let job = Arc::new(JobRecord {
            state: JobState::Failed,
            submitted_at: Timestamp(1000),
            ..job("train-1", 1)
        });
        let event = |text: &str| {
            let at = Timestamp(3000);
            Event { job: job.id.clone(), at, epoch: Epoch(1), node: None, text: text.to_owned() }
        };
        let with = |events: Vec<Event>| Changes { jobs: vec![job.clone()], events, ..Changes::default() };
        let mut counts = Counts::default();
        counts.committed(&with(vec![event("placed on box as attempt 1"), event("running")]), Duration::ZERO);
        counts.committed(&with(vec![event("ended: Failed, exit code 3")]), Duration::ZERO);
        counts.committed(&with(Vec::new()), Duration::ZERO);
        counts.failed();
        let mut page = MetricsPage::default();
        counts.write(&mut page);
        let text = page.into_text();
        for line in [
            "agent_jobs_ended_total{outcome=\"Failed\",blame=\"none\"} 1\n",
            "agent_queue_wait_seconds_sum 2\n",
            "agent_queue_wait_seconds_count 1\n",
            "agent_commit_seconds_count 3\n",
            "agent_commits_failed_total 1\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
    }
}
