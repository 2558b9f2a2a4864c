//! Changes that users make to jobs that have not ended.
//!
//! What may change when is decided by [`Change`]. Here it is applied: to a job, or to an array and each of its tasks that
//! has a record, in one commit. Invariants: all of a change is done or nothing; who made it, and each difference, is in
//! the history; a job keeps its place in the line among those of its priority. The order of a job that has a machine is
//! made of its record, so the node hears of a longer time with the next orders.

use agent_model::job::{Change, refused_of_pipeline};
use agent_model::{Fault, JobId, JobState};

use super::{Book, Moment};
use crate::store::JobRecord;

impl JobRecord {
    /// It waits as a whole, or some task of it does.
    fn waits(&self) -> bool {
        self.state == JobState::Queued || self.has_waiting_tasks()
    }

    /// Nothing about it changes any more but how it ends.
    fn is_ending(&self) -> bool {
        self.state.is_terminal() || matches!(self.state, JobState::Finalizing(_)) || self.cancel.is_some()
    }
}

impl Book {
    /// Changes a job; false when there is none of that name, or it ends. A fault says why it does not take the change.
    pub(crate) fn change(
        &mut self,
        id: &JobId,
        change: &Change,
        who: &str,
        now: Moment,
    ) -> Result<bool, Fault> {
        let Some(job) = self.jobs.get(id).filter(|job| !job.is_ending()) else { return Ok(false) };
        if let Some(pipeline) = &job.spec.pipeline
            && !change.is_only_of_hold()
        {
            return Err(refused_of_pipeline(pipeline.steps.len()));
        }
        match job.waits() {
            true => drop(change.applied_to(&job.spec, false)?),
            false => {
                change.refused_while_placed(&job.spec).map_or(Ok(()), Err)?;
                drop(change.while_placed(&job.spec).applied_to(&job.spec, true)?);
            }
        }
        if let Some(held) = change.held {
            self.hold(id, held, who, now);
        }
        self.apply_change(id, change, who, now);
        Ok(true)
    }

    /// Gives a job, and its tasks, what they take of a change.
    fn apply_change(&mut self, id: &JobId, change: &Change, who: &str, now: Moment) {
        let Some(job) = self.jobs.get(id).filter(|job| !job.is_ending()).cloned() else { return };
        let part = if job.waits() { change.clone() } else { change.while_placed(&job.spec) };
        if let Ok((spec, told)) = part.applied_to(&job.spec, !job.waits())
            && !told.is_empty()
        {
            self.line.leave(&job); // its place is by its priority
            self.jobs.edit(id, |job| job.spec = spec);
            self.jobs.get(id).filter(|job| job.waits()).into_iter().for_each(|job| self.line.join(job));
            self.jobs.tell(id, None, now, format!("changed by {who}: {}", told.join(", ")));
            (self.urgent, self.replan) = (true, true);
        }
        let active = job.tasks.iter().flat_map(|tasks| tasks.active.iter());
        for task in active.filter_map(|index| id.task(index)) {
            self.apply_change(&task, change, who, now);
        }
    }
}

/// The record as a controller that forgets changes would load it.
#[cfg(test)]
pub(super) fn forgotten(mut job: JobRecord) -> JobRecord {
    let usual = Change { priority: Some(Default::default()), ..Change::default() };
    job.spec = usual.applied_to(&job.spec, false).map_or(job.spec, |(spec, _)| spec);
    job
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use agent_model::job::{Array, JobDraft, Priority};
    use agent_model::{Code, NodeId, Timestamp};

    use super::super::Submission;
    use super::super::tests::{START, book, moment, submission};
    use super::*;
    use crate::lease::Desired;

    fn name(text: &str) -> JobId {
        text.parse().unwrap()
    }

    fn submit(book: &mut Book, job: &str, seconds: u64, array: Option<u32>) {
        let one = submission(job, Priority::Medium, 1);
        let mut draft = JobDraft::from(one.spec);
        draft.limits.timeout = Some(Duration::from_secs(seconds));
        draft.array = array.map(|tasks| Array::counted(tasks).unwrap());
        book.submit(Submission { spec: draft.validate().unwrap(), ..one }, moment(1, START)).unwrap();
    }

    fn change(book: &mut Book, job: &str, change: &Change) -> Result<bool, Fault> {
        let changed = book.change(&name(job), change, "ada", moment(2, START));
        book.schedule(moment(2, START));
        changed
    }

    fn told(book: &Book, job: &str) -> Vec<String> {
        let events = book.changes().events.into_iter().filter(|event| event.job == name(job));
        events.map(|event| event.text).filter(|text| text.starts_with("changed")).collect()
    }

    fn limit(book: &Book, job: &str) -> u64 {
        book.job(&name(job)).unwrap().spec.limits.timeout.unwrap().as_secs()
    }

    fn of_time(seconds: u64) -> Change {
        Change { timeout: Some(Duration::from_secs(seconds)), ..Change::default() }
    }

    #[test]
    fn test_a_job_that_waits_goes_first_once_its_priority_is_higher() {
        let mut book = book(1, START);
        ["a", "b", "c"].iter().for_each(|job| submit(&mut book, job, 60, None));
        book.schedule(moment(1, START));
        let high = Change { priority: Some(Priority::High), gpus: Some(0), ..Change::default() };
        assert!(change(&mut book, "c", &high).unwrap());
        assert_eq!(told(&book, "c"), ["changed by ada: priority from medium to high"]);
        assert!(change(&mut book, "c", &high).unwrap());
        assert_eq!(told(&book, "c").len(), 1, "the second time nothing is different");
        let line: Vec<&str> = book.line.iter().map(JobId::as_str).collect();
        assert_eq!(line, ["c", "b"]);
        let needs = Change { cpus: Some(4), held: Some(true), ..Change::default() };
        assert!(change(&mut book, "b", &needs).unwrap());
        let b = book.job(&name("b")).unwrap();
        assert_eq!((b.spec.resources.cpus, b.held.as_deref()), (4, Some("held by ada")));
        assert_eq!(book.detail(b), "held by ada; `agentctl release` lets it go");
        assert!(change(&mut book, "b", &Change { held: Some(false), ..Change::default() }).unwrap());
        assert_eq!(book.job(&name("b")).unwrap().held, None);
    }

    #[test]
    fn test_a_job_that_runs_gets_more_time_with_its_orders_and_is_refused_the_rest() {
        let mut book = book(1, START);
        submit(&mut book, "a", 60, None);
        book.schedule(moment(1, START));
        let ordered = |book: &Book| {
            let node: NodeId = "box".parse().unwrap();
            let orders = book.orders(&node).list;
            let Desired::Run { spec, .. } = &orders[0].desired else { panic!("{orders:?}") };
            spec.limits.timeout.unwrap().as_secs()
        };
        assert!(change(&mut book, "a", &of_time(90)).unwrap());
        assert_eq!((limit(&book, "a"), ordered(&book)), (90, 90));
        assert_eq!(told(&book, "a"), ["changed by ada: time limit from 1 min to 1 min 30 s"]);
        let more = Change { gpus: Some(1), priority: Some(Priority::High), ..of_time(120) };
        for refused in [of_time(30), more, Change { held: Some(true), ..Change::default() }] {
            assert_eq!(change(&mut book, "a", &refused).unwrap_err().code, Code::JobNotWaiting);
        }
        assert_eq!((limit(&book, "a"), told(&book, "a").len()), (90, 1), "all of it or nothing");
        book.cancel(&name("a"), "ada", moment(3, START));
        assert!(!change(&mut book, "a", &of_time(200)).unwrap(), "it ends");
        assert!(!change(&mut book, "nobody", &of_time(200)).unwrap());
    }

    #[test]
    fn test_the_dates_of_a_job_that_runs_keep_no_time_from_it() {
        let mut book = book(1, START);
        let one = submission("a", Priority::Medium, 1);
        let mut draft = JobDraft::from(one.spec);
        draft.limits.timeout = Some(Duration::from_secs(60));
        let now = moment(1, START).wall;
        (draft.begin, draft.deadline) = (Some(now), Some(Timestamp(now.0 + 70_000)));
        book.submit(Submission { spec: draft.validate().unwrap(), ..one }, moment(1, START)).unwrap();
        book.schedule(moment(1, START));
        assert_eq!(book.job(&name("a")).unwrap().state, JobState::Preparing);
        assert!(change(&mut book, "a", &of_time(90)).unwrap());
        assert_eq!((limit(&book, "a"), told(&book, "a").len()), (90, 1));
    }

    #[test]
    fn test_a_change_of_an_array_reaches_its_tasks_as_far_as_each_takes_it() {
        let mut book = book(1, START);
        submit(&mut book, "a", 60, Some(3));
        book.schedule(moment(1, START));
        assert!(change(&mut book, "a", &Change { cpus: Some(2), ..of_time(90) }).unwrap());
        let running = book.job(&name("a--0")).unwrap();
        assert_eq!((limit(&book, "a--0"), running.spec.resources.cpus), (90, 0), "it has its machine");
        let waiting = book.waiting_task(&name("a--1")).unwrap();
        assert_eq!((waiting.spec.limits.timeout.unwrap().as_secs(), waiting.spec.resources.cpus), (90, 2));
        assert!(change(&mut book, "a", &of_time(30)).unwrap());
        assert_eq!((limit(&book, "a"), limit(&book, "a--0")), (30, 90), "one that runs is not cut short");
        assert_eq!(told(&book, "a--0").len(), 1);
    }

    #[test]
    fn test_a_change_does_not_touch_a_job_whose_end_is_decided() {
        let mut book = book(1, START);
        submit(&mut book, "a", 60, None);
        let id = name("a");
        book.cancel(&id, "ada", moment(1, START));
        assert!(!book.change(&id, &of_time(90), "ada", moment(2, START)).unwrap());
        assert_eq!(limit(&book, "a"), 60);
    }
}
