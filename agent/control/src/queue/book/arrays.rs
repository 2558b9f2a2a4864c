//! Arrays: jobs whose command runs once for each of many indices.
//!
//! An array waits in line as one record ([`ArrayRecord`]), however many indices it has: a pass of the scheduler is
//! offered only as many of its tasks as there is room for. A task that is placed gets a record of its own and is from
//! then on a job like any other. Its end is moved into the record of the array in the same commit, and with the last
//! one the array ends. Invariants: an index gets a record once; no more tasks have records than may run at a time,
//! those between two attempts among them; an array leaves the line with its last index.

use std::collections::BTreeMap;
use std::sync::Arc;

use agent_model::job::{Array, Indices};
use agent_model::sweep::{Trial, Values};
use agent_model::words::count;
use agent_model::{Code, Fault, JobEvent, JobId, JobState, Outcome, Verdict};

use super::{Book, Moment, line, pipelines, without_run};
use crate::scheduler::{Pending, Room, Wait};
use crate::store::{ArrayRecord, JobRecord};

/// The failed tasks whose end the history of an array has.
const TOLD: u32 = 10;
/// The most characters of a list of indices in a message.
const SHOWN: usize = 40;

impl JobRecord {
    /// The array and the index, if this is a task of one.
    pub(crate) fn task(&self) -> Option<(JobId, u32)> {
        self.is_task.then(|| self.id.as_task()).flatten()
    }

    /// An array of which some index waits, and may start sooner or later.
    pub(crate) fn has_waiting_tasks(&self) -> bool {
        !self.state.is_terminal() && self.tasks.as_ref().is_some_and(|tasks| !tasks.waiting.is_empty())
    }

    /// The record of the task of an index that waits; of a trial with its values, of a step with what others made.
    pub(crate) fn waiting_task(&self, index: u32, values: Option<Values>) -> Option<JobRecord> {
        let tasks = self.tasks.as_ref().filter(|tasks| tasks.waiting.contains(index))?;
        let spec = match (&self.steps, &values) {
            (Some(steps), _) => self.spec.step(&self.id, index, |output| steps.made(output).cloned())?,
            (None, Some(values)) => self.spec.trial(&self.id, index, values),
            (None, None) => self.spec.task(&self.id, index),
        };
        let own_tasks = spec.array.as_ref().map(|array| Box::new(ArrayRecord::new(array, tasks.after)));
        let request = format!("{}/{index}", self.request);
        Some(JobRecord {
            epoch: tasks.after,
            uncharged: tasks.after.0,
            is_task: true,
            seq: self.seq,
            tasks: own_tasks,
            // Of a sweep that is a step, what its best trial left is what it left.
            made: (self.steps.is_some() || self.made.is_some()).then(BTreeMap::new),
            trial: values.map(|values| Box::new(Trial { values, ..Trial::default() })),
            ..JobRecord::new(self.id.task(index)?, request, spec, self.submitted_at)
        })
    }
}

/// How many jobs could be placed at the most.
pub(super) fn most(rooms: &[Room]) -> usize {
    rooms.iter().map(|room| room.free_slots() as usize).sum()
}

/// The tasks of an array that may start now, one more than there is room for, so that the reason is known why not all
/// of them do; or why none may.
pub(super) fn offered(job: &JobRecord, tasks: &ArrayRecord, room: usize) -> Result<Vec<Pending>, Wait> {
    let at_once = job.spec.array.as_ref().and_then(Array::at_once);
    let like = line::pending(job);
    let names = tasks.startable(at_once, room.saturating_add(1)).filter_map(|index| job.id.task(index));
    let offered: Vec<Pending> = names.map(|name| Pending { job: name, ..like.clone() }).collect();
    match at_once {
        Some(most) if offered.is_empty() => Err(Wait::AtOnce { most: most.get() }),
        _ => Ok(offered),
    }
}

impl Book {
    /// The record that a task would begin with, of an index that waits.
    pub(crate) fn waiting_task(&self, id: &JobId) -> Option<Arc<JobRecord>> {
        let (array, index) = id.as_task()?;
        let array = self.jobs.get(&array).filter(|array| !array.state.is_terminal())?;
        array.waiting_task(index, self.sweeps.draw(array, index)).map(Arc::new)
    }

    /// The job whose place in the line is that of `id`: the array, of an index that waits.
    pub(super) fn in_line(&self, id: JobId) -> JobId {
        match self.jobs.get(&id) {
            Some(_) => id,
            None => id.as_task().map_or(id, |(array, _)| array),
        }
    }

    /// Gives an index that waits a record of its own. Any other job is left as it is.
    pub(super) fn begin_task(&mut self, id: &JobId, now: Moment) {
        let Some((array, index)) = id.as_task().filter(|_| self.jobs.get(id).is_none()) else { return };
        let Some(record) = self.jobs.get(&array) else { return };
        let Some(mut task) = record.waiting_task(index, self.sweeps.draw(record, index)) else { return };
        if task.made.is_some() {
            task.submitted_at = now.wall; // it is made when its turn comes
        }
        if task.made.is_none() || !broken!(StepMadeTwice) {
            self.claim_index(&array, index);
        }
        let why = self.begin_reusable(&mut task, &array, index);
        let task = Arc::clone(self.jobs.add(task));
        self.sweeps.begin(id, &task.spec);
        self.line.join(&task);
        match (&task.trial, &task.made) {
            (Some(trial), _) => self.begin_trial(id, &array, index, trial, now),
            (None, Some(_)) => self.tell_of_step(id, (&array, index), why, now),
            (None, None) => self.jobs.tell(id, None, now, format!("task {index} of {array}")),
        }
    }

    /// Notes that an index has a record of its own; false when it does not wait.
    pub(super) fn claim_index(&mut self, array: &JobId, index: u32) -> bool {
        let mut begun = false;
        self.jobs.edit(array, |array| begun = array.tasks.as_mut().is_some_and(|tasks| tasks.begin(index)));
        self.leave_line_if_begun(array);
        begun
    }

    /// An array of which no task waits is not in line any more.
    pub(super) fn leave_line_if_begun(&mut self, array: &JobId) {
        let left = self.jobs.get(array).filter(|array| !array.has_waiting_tasks()).cloned();
        left.into_iter().for_each(|array| self.line.leave(&array));
    }

    /// A task is about to be placed: from the first one on, its array runs.
    pub(super) fn start_task(&mut self, id: &JobId, now: Moment) {
        self.begin_task(id, now);
        let Some((array, _)) = self.jobs.get(id).and_then(|job| job.task()) else { return };
        if self.jobs.state(&array) == Some(JobState::Queued) {
            self.start_array(&array, now);
            self.jobs.tell(&array, None, now, "its first task was placed".to_owned());
            self.start_task(&array, now); // it may be a task itself
        }
    }

    /// From now on an array runs.
    fn start_array(&mut self, id: &JobId, now: Moment) {
        self.jobs.advance(id, JobEvent::Placed);
        self.jobs.advance(id, JobEvent::AllRunning);
        self.jobs.edit(id, |array| array.started_at = Some(now.wall));
    }

    /// Why the arrays wait of which all that may run at a time were placed just now.
    pub(super) fn explain_full_arrays(&mut self, placed: &[JobId], now: Moment) {
        for id in placed {
            let Some((id, _)) = id.as_task() else { continue };
            let Some(array) = self.jobs.get(&id).filter(|array| array.has_waiting_tasks()) else { continue };
            let offered = array.tasks.as_ref().map(|tasks| offered(array, tasks, 1));
            if let Some(Err(wait)) = offered {
                self.explain(&id, wait, now);
            }
        }
    }

    /// Asks all tasks of an array to end, of which nothing more is started.
    pub(super) fn cancel_tasks(&mut self, id: &JobId, who: &str, now: Moment) {
        let Some(active) = self.jobs.get(id).and_then(|job| Some(job.tasks.as_ref()?.active.clone())) else {
            return;
        };
        self.leave_line(id);
        self.jobs.edit(id, |job| {
            pipelines::give_up(job);
            job.tasks.iter_mut().for_each(|tasks| tasks.give_up());
        });
        let active = if broken!(CancelLeavesStep) { Indices::default() } else { active };
        for task in active.iter().filter_map(|index| id.task(index)) {
            self.cancel(&task, who, now);
        }
        self.end_array(id, now);
    }

    /// An array has ended: those of its tasks that were never started have no end of their own for others to wait for.
    pub(super) fn end_unstarted(&mut self, id: &JobId) {
        let tasks = self.jobs.get(id).and_then(|job| job.tasks.as_ref());
        for index in tasks.into_iter().flat_map(|tasks| tasks.canceled.iter()) {
            id.task(index).iter().for_each(|task| self.predecessors.has_ended(task, Verdict::Canceled));
        }
    }

    /// A job has ended: if it is a task, its array takes note of it.
    pub(super) fn settle_task(&mut self, id: &JobId, now: Moment) {
        self.end_trial(id, now);
        self.end_reusable(id);
        let Some(job) = self.jobs.get(id) else { return };
        let Some((array, index)) = job.task() else { return };
        let exit = job.outcome.as_ref().and_then(|outcome| outcome.exit);
        let fault = job.outcome.as_ref().and_then(|outcome| outcome.fault.as_ref());
        let blame = fault.map(|fault| fault.blame);
        let (verdict, attempt) = (self.jobs.verdict(id), job.epoch);
        let made = job.made.clone().filter(|_| verdict == Verdict::Completed);
        let mut told = false;
        self.jobs.edit(&array, |array| {
            // A later job of the array's name has later attempts than any of its tasks.
            array.epoch = array.epoch.max(attempt);
            let Some(tasks) = array.tasks.as_mut() else { return };
            let settled = tasks.settle(index, verdict, exit);
            if settled && verdict == Verdict::Failed {
                blame.into_iter().for_each(|blame| tasks.blame(blame));
            }
            told = settled && verdict == Verdict::Failed && tasks.failed.len() <= TOLD;
            if let (Some(steps), Some(made)) = (&mut array.steps, made) {
                steps.complete(index, made, None);
            }
        });
        if !self.tell_end_of_step(id, &array, index, now) && told {
            let kind = if self.sweeps.has(&array) { "trial" } else { "task" };
            self.jobs.tell(&array, None, now, format!("{kind} {index} failed: agentctl why {id}"));
        }
        self.end_array(&array, now);
    }

    /// Ends an array of which no task is left.
    pub(super) fn end_array(&mut self, id: &JobId, now: Moment) {
        let Some(job) = self.jobs.get(id).filter(|job| !job.state.is_terminal()) else { return };
        let Some(tasks) = job.tasks.as_ref().filter(|tasks| tasks.is_over()) else { return };
        let (verdict, fault) = match (&job.spec.sweep, &job.steps) {
            (Some(sweep), _) => self.sweeps.verdict(job, sweep, tasks),
            (None, Some(steps)) => (steps.verdict(tasks), pipelines::failed(job, steps, tasks)),
            (None, None) => (tasks.verdict(), failed(job, tasks)),
        };
        let started_at = job.started_at;
        let exit = match verdict {
            Verdict::Completed => Some(agent_model::ExitStatus::Code(0)),
            Verdict::Failed => tasks.exit,
            Verdict::Canceled => None,
        };
        let is_queued = job.state == JobState::Queued;
        if is_queued && verdict == Verdict::Canceled {
            self.jobs.advance(id, JobEvent::CancelRequested); // no task was ever started, so each was canceled
        } else {
            if is_queued {
                self.start_array(id, now); // all that it needed was there already
            }
            self.jobs.advance(
                id,
                match verdict {
                    Verdict::Completed => JobEvent::AllSucceeded,
                    Verdict::Failed => JobEvent::ReplicaFailed { retry: false },
                    Verdict::Canceled => JobEvent::ReplicaCanceled,
                },
            );
            self.jobs.advance(id, JobEvent::OutputsStored);
        }
        // That it was canceled counts more than how its tasks ended.
        let verdict = self.jobs.verdict(id);
        let (exit, fault) = if verdict == Verdict::Canceled { (None, None) } else { (exit, fault) };
        self.end(id, Outcome { started_at, exit, ..without_run(verdict, fault, now.wall) }, now);
    }

    /// After a start: an index whose task has a record does not wait, whatever the record of the array says.
    pub(super) fn claim_indices_again(&mut self) {
        let tasks: Vec<_> = self.jobs.iter().filter_map(|job| job.task()).collect();
        for (array, index) in tasks {
            let waits = |array: &Arc<JobRecord>| {
                array.tasks.as_ref().is_some_and(|tasks| tasks.waiting.contains(index))
            };
            if self.jobs.get(&array).is_some_and(waits) {
                self.claim_index(&array, index);
            }
        }
    }

    /// Ends arrays whose last tasks ended before a loss of records.
    pub(super) fn end_arrays_again(&mut self, now: Moment) {
        let over = |job: &&Arc<JobRecord>| job.tasks.as_ref().is_some_and(|tasks| tasks.is_over());
        let over: Vec<JobId> = self.jobs.iter().filter(over).map(|job| job.id.clone()).collect();
        over.iter().for_each(|id| self.end_array(id, now));
    }
}

/// Which tasks of an array failed.
pub(super) fn failed(job: &JobRecord, tasks: &ArrayRecord) -> Option<Fault> {
    let all = job.spec.array.as_ref().map_or(0, |array| array.indices().len());
    let first = job.id.task(tasks.failed.first()?)?;
    let mut failed = tasks.failed.to_string();
    if failed.len() > SHOWN {
        failed.truncate(failed[..SHOWN].rfind(',').unwrap_or(SHOWN));
        failed.push_str(", …");
    }
    let what = format!("{} of {all} failed", count(tasks.failed.len().into(), "task"));
    let indices = if tasks.failed.len() == 1 { "index" } else { "indices" };
    let fault = Fault::new(Code::TasksFailed, what);
    let fault =
        Fault { blame: tasks.blame.unwrap_or(fault.blame), ..fault }.why(format!("{indices} {failed}"));
    let fault = match tasks.canceled.len() {
        0 => fault,
        canceled => fault.why(format!("{canceled} more were canceled")),
    };
    Some(fault.fix(format!(
        "see the first: agentctl why {first}; run them again: agentctl rerun {} --failed",
        job.id
    )))
}

#[cfg(test)]
mod tests;
