//! Jobs that may not start before a date, or have to start by one.
//!
//! The dates are part of the job; [`super::line`] has them while it waits. Invariants: a job that could not end by its
//! deadline any more is not started: it ends as failed, and of an array, a sweep or a pipeline that runs what was not
//! started is given up; what has a machine is not touched.

use agent_model::words::duration;
use agent_model::{Code, Fault, JobEvent, JobId, JobState, Verdict};

use super::{Book, Moment, pipelines, without_run};
use crate::scheduler::Wait;
use crate::store::JobRecord;

/// Why a job waits that has a date.
pub(super) fn wait(job: &JobRecord) -> Wait {
    match job.spec.begin {
        Some(at) if job.not_before.is_none_or(|retry| retry < at) => Wait::Begin { at },
        _ => Wait::Date,
    }
}

fn overdue(job: &JobRecord) -> Fault {
    let deadline = job.spec.deadline.unwrap_or_default().utc();
    let fault =
        Fault::new(Code::JobNeverDue, format!("its deadline, {deadline}, passed before it could start"));
    let fault = match (job.spec.limits.timeout, job.spec.latest_start()) {
        (Some(limit), Some(latest)) => {
            fault.why(format!("it may run for {}, so it had to start by {}", duration(limit), latest.utc()))
        }
        _ => fault,
    };
    fault.fix("submit it again with a later --deadline; a shorter --time lets it start later")
}

impl Book {
    /// Ends what waits and could not end in time any more; not while a node that may run it has yet to be heard.
    pub(super) fn end_overdue(&mut self, now: Moment) {
        if self.fleet.unheard().is_some() {
            return;
        }
        for id in self.line.overdue(now.wall) {
            let Some(job) = self.jobs.get(&id).cloned() else { continue };
            let fault = overdue(&job);
            (self.urgent, self.replan) = (true, true);
            self.jobs.tell(&id, None, now, fault.what.clone());
            match job.state {
                // A pipeline waits until its first step runs, and the steps before that are jobs already.
                JobState::Queued if job.tasks.as_ref().is_none_or(|tasks| tasks.active.is_empty()) => {
                    self.jobs.advance(&id, JobEvent::NeverDue);
                    self.end(&id, without_run(Verdict::Failed, Some(fault), now.wall), now);
                }
                _ => self.give_up_waiting(&id, now),
            }
        }
    }

    /// No more tasks are started of an array that runs.
    fn give_up_waiting(&mut self, id: &JobId, now: Moment) {
        self.leave_line(id);
        self.jobs.edit(id, |job| {
            pipelines::give_up(job);
            job.tasks.iter_mut().for_each(|tasks| tasks.give_up());
        });
        self.end_array(id, now);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use agent_model::job::{Array, JobDraft, Priority};
    use agent_model::{Boot, NodeId, Timestamp};

    use agent_model::pipeline::Pipeline;

    use super::super::pipelines::tests::step;
    use super::super::tests::{START, book, ended, moment, submission};
    use super::super::{Standing, Submission};
    use super::*;

    /// The moment so many seconds after the begin.
    fn after(seconds: u64) -> Moment {
        moment(seconds, Boot(START.0 + Duration::from_secs(seconds)))
    }

    fn name(text: &str) -> JobId {
        text.parse().unwrap()
    }

    fn submit(book: &mut Book, job: &str, change: impl FnOnce(&mut JobDraft)) {
        let one = submission(job, Priority::Medium, 1);
        let mut draft = JobDraft::from(one.spec);
        change(&mut draft);
        book.submit(Submission { spec: draft.validate().unwrap(), ..one }, after(0)).unwrap();
        book.schedule(after(0));
    }

    fn state(book: &Book, job: &str) -> JobState {
        book.job(&name(job)).unwrap().state
    }

    fn at(seconds: u64) -> Option<Timestamp> {
        Some(after(seconds).wall)
    }

    #[test]
    fn test_a_job_starts_when_its_begin_comes_over_a_restart_and_says_until_when_it_waits() {
        let mut book = book(1, START);
        submit(&mut book, "a", |job| job.begin = at(60));
        let begins = format!("waits until {}", at(60).unwrap().utc());
        assert_eq!(book.detail(book.job(&name("a")).unwrap()), begins);
        assert_eq!(book.next_alarm(after(0)).map(|alarm| alarm <= after(60).boot), Some(true));
        book.schedule(after(59));
        assert_eq!(state(&book, "a"), JobState::Queued);
        book.schedule(after(60));
        assert_eq!(state(&book, "a"), JobState::Preparing);
    }

    #[test]
    fn test_a_job_that_could_not_end_by_its_deadline_is_not_started() {
        let mut book = book(1, START);
        submit(&mut book, "runs", |job| job.deadline = at(60));
        submit(&mut book, "waits", |job| job.deadline = at(60));
        submit(&mut book, "limited", |job| {
            job.deadline = at(60);
            job.limits.timeout = Some(Duration::from_secs(20));
        });
        book.schedule(after(40));
        assert_eq!(state(&book, "limited"), JobState::Queued, "it could just end in time");
        book.schedule(after(41));
        assert_eq!([state(&book, "waits"), state(&book, "limited")], [JobState::Queued, JobState::Failed]);
        let told = book.job(&name("limited")).unwrap().outcome.clone().unwrap().fault.unwrap();
        assert!(told.code == Code::JobNeverDue && told.why[0].starts_with("it may run for 20 s"), "{told}");
        book.schedule(after(61));
        assert_eq!([state(&book, "runs"), state(&book, "waits")], [JobState::Preparing, JobState::Failed]);
    }

    #[test]
    fn test_a_pipeline_begins_no_step_before_its_begin() {
        let mut book = book(2, START);
        let steps = vec![step("prep", &[]), step("train", &[0])];
        let outputs = std::collections::BTreeMap::new();
        let whole = Pipeline { steps, outputs, continue_on_failure: true, force_rerun: false, again: None };
        let one = pipelines::tests::submit("p", whole);
        let spec = JobDraft { begin: at(60), ..JobDraft::from(one.spec) }.validate().unwrap();
        book.submit(Submission { spec, ..one }, after(0)).unwrap();
        book.schedule(after(59));
        assert!(book.job(&name("p--0")).is_none() && state(&book, "p") == JobState::Queued);
        book.schedule(after(60));
        assert_eq!(state(&book, "p--0"), JobState::Preparing);
    }

    #[test]
    fn test_a_pipeline_of_which_a_step_waits_ends_with_it_at_its_deadline() {
        let mut book = book(1, START);
        submit(&mut book, "busy", |_| ());
        let steps = vec![step("prep", &[]), step("train", &[0])];
        let outputs = std::collections::BTreeMap::new();
        let whole = Pipeline { steps, outputs, continue_on_failure: true, force_rerun: false, again: None };
        let one = pipelines::tests::submit("p", whole);
        let spec = JobDraft { deadline: at(60), ..JobDraft::from(one.spec) }.validate().unwrap();
        book.submit(Submission { spec, ..one }, after(0)).unwrap();
        book.schedule(after(1));
        assert_eq!(state(&book, "p--0"), JobState::Queued);
        book.schedule(after(61));
        assert_eq!([state(&book, "p--0"), state(&book, "p")], [JobState::Failed; 2]);
        assert_eq!(book.line.iter().count(), 0);
    }

    #[test]
    fn test_of_an_array_that_runs_the_tasks_that_wait_are_given_up() {
        let mut book = book(1, START);
        submit(&mut book, "a", |job| {
            job.deadline = at(60);
            job.array = Some(Array::counted(3).unwrap());
        });
        assert_eq!(state(&book, "a--0"), JobState::Preparing);
        book.schedule(after(61));
        let tasks = book.job(&name("a")).unwrap().tasks.clone().unwrap();
        assert_eq!((tasks.waiting.len(), tasks.canceled.to_string().as_str()), (0, "1-2"));
        let (node, now): (NodeId, _) = ("box".parse().unwrap(), after(62));
        let replica = book.job(&name("a--0")).unwrap().replica(0);
        assert_eq!(book.settle(&replica, &node, ended(Verdict::Completed, None), now), Standing::Open);
        book.schedule(now);
        assert!(state(&book, "a").is_terminal());
    }
}
