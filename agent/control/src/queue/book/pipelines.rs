//! Pipelines: arrays whose tasks are steps, each with a job of its own kind.
//!
//! A step gets its record when all that it needs has completed, and is then in line like any other job. What a step left
//! is in the record of the pipeline from the commit in which the step ends; the same commit has the records of the
//! steps that start by that. So a controller that is killed between any two commits goes on with the same steps, and
//! makes none twice. What follows from how the steps stand is decided by [`Pipeline::next`]; here it is done.

use std::sync::Arc;

use agent_model::job::JobSpec;
use agent_model::pipeline::{NotRun, Pipeline, StepDecision, StepOutput, StepState};
use agent_model::words::count;
use agent_model::{Code, Fault, JobEvent, JobId, JobState, Verdict};

use super::{Book, Moment};
use crate::scheduler;
use crate::store::{ArrayRecord, JobRecord, StepsRecord};

/// Steps that are named in one line.
const SHOWN: usize = 5;

/// The record of the steps of a pipeline that is submitted; `None` of any other job. Steps that completed in the earlier
/// one do not wait.
pub(super) fn begin(
    spec: &JobSpec,
    earlier: &[JobRecord],
    tasks: &mut ArrayRecord,
) -> Option<Box<StepsRecord>> {
    let pipeline = spec.pipeline.as_ref()?;
    let mut steps = StepsRecord::default();
    if let (Some(again), Some(before)) = (&pipeline.again, earlier.first())
        && let Some(known) = &before.steps
    {
        for step in &again.steps {
            let job = known.reused.get(step).cloned().or_else(|| before.id.task(*step));
            if let Some(made) = known.made.get(step).filter(|_| tasks.waiting.remove(*step)) {
                steps.complete(*step, made.clone(), job);
            }
        }
    }
    Some(Box::new(steps))
}

/// The steps that a pipeline waits for, in words; `None` of any other job.
pub(super) fn running(job: &JobRecord) -> Option<String> {
    let (pipeline, tasks) = (job.spec.pipeline.as_ref()?, job.tasks.as_ref()?);
    let verb = if tasks.active.len() == 1 { "has" } else { "have" };
    Some(format!("{} {verb}", listed(pipeline, tasks.active.iter(), tasks.active.len())))
}

/// `prep, train and 3 more`
fn listed(pipeline: &Pipeline, steps: impl Iterator<Item = u32>, all: u32) -> String {
    let names: Vec<String> = steps.take(SHOWN).map(|step| pipeline.name(step)).collect();
    match all as usize - names.len() {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

/// Of a pipeline that ends: its steps that were not started never are.
pub(super) fn give_up(job: &mut JobRecord) {
    if let (Some(steps), Some(tasks)) = (&mut job.steps, &job.tasks) {
        steps.not_run.extend(tasks.waiting.iter().map(|step| (step, NotRun::PipelineEnds)));
    }
}

/// Which steps of a pipeline failed.
pub(super) fn failed(job: &JobRecord, steps: &StepsRecord, tasks: &ArrayRecord) -> Option<Fault> {
    let pipeline = job.spec.pipeline.as_ref()?;
    let all = pipeline.steps.len();
    let not_run = |fault: Fault| match steps.not_run.len() {
        0 => fault,
        more => fault.why(format!(
            "{} not run after that",
            if more == 1 { "1 step was".to_owned() } else { format!("{more} steps were") }
        )),
    };
    let Some(first) = tasks.failed.first() else {
        let (step, why) = steps.not_run.iter().find(|(_, why)| matches!(why, NotRun::Nothing { .. }))?;
        let what = format!("the step {} could not run, {why}", pipeline.name(*step));
        let fix = "let the step write into the path that `${{outputs.NAME}}` gives it";
        return Some(not_run(Fault::new(Code::TasksFailed, what)).fix(fix));
    };
    let what = format!("{} of {all} failed", count(tasks.failed.len().into(), "step"));
    let fault = Fault::new(Code::TasksFailed, what);
    let fault = Fault { blame: tasks.blame.unwrap_or(fault.blame), ..fault };
    let fault = fault.why(listed(pipeline, tasks.failed.iter(), tasks.failed.len()));
    let (name, id) = (pipeline.name(first), &job.id);
    Some(not_run(fault).fix(format!(
        "see it: agentctl why '{id}[{name}]'; go on from there: agentctl rerun {id} --from {name}"
    )))
}

impl Book {
    /// Why a job must not start: it is held, or the pipeline that it is a step of.
    pub(super) fn held_by<'a>(&'a self, job: &'a JobRecord) -> Option<&'a str> {
        let pipeline = || {
            let (pipeline, _) = job.task().filter(|_| job.made.is_some())?;
            self.jobs.get(&pipeline)?.held.as_deref()
        };
        job.held.as_deref().or_else(pipeline)
    }

    /// Does what follows in all pipelines from how their steps stand.
    pub(super) fn follow_pipelines(&mut self, now: Moment) {
        if self.fleet.unheard().is_some() {
            return; // a step may run of which there is no record
        }
        let may_go_on = |job: &&Arc<JobRecord>| {
            job.steps.is_some()
                && !matches!(job.state, JobState::Finalizing(_))
                && !job.state.is_terminal()
                && scheduler::blocked(job.held.as_deref(), &job.waits_for).is_none()
                && !self.line.has_date(&job.id)
        };
        let pipelines: Vec<Arc<JobRecord>> = self.jobs.iter().filter(may_go_on).cloned().collect();
        for job in pipelines {
            let (Some(pipeline), Some(steps), Some(tasks)) = (&job.spec.pipeline, &job.steps, &job.tasks)
            else {
                continue;
            };
            let state = |step| match steps.state(tasks, step) {
                StepState::Active if broken!(StepBeforeInput) => StepState::Ended(Verdict::Completed),
                state => state,
            };
            let has_made = |output: &StepOutput| steps.made(output).is_some() || broken!(StepBeforeInput);
            for decision in pipeline.next(state, has_made) {
                self.follow_step(&job, pipeline, decision, now);
            }
        }
    }

    fn follow_step(&mut self, job: &JobRecord, pipeline: &Pipeline, decision: StepDecision, now: Moment) {
        if let StepDecision::Start(step) = decision
            && self.is_looked_for(job, step, now)
        {
            return;
        }
        self.urgent = true;
        match decision {
            StepDecision::Start(step) => {
                job.id.task(step).iter().for_each(|step| self.begin_task(step, now));
            }
            StepDecision::Skip(step, why) => {
                self.jobs.tell(&job.id, None, now, format!("{} is not run, {why}", pipeline.name(step)));
                self.jobs.edit(&job.id, |job| {
                    if let (Some(tasks), Some(steps)) = (&mut job.tasks, &mut job.steps)
                        && tasks.skip(step)
                    {
                        steps.not_run.insert(step, why);
                    }
                });
                job.id.task(step).iter().for_each(|id| self.predecessors.has_ended(id, Verdict::Canceled));
                self.leave_line_if_begun(&job.id);
            }
            StepDecision::StopAll(because) => {
                let name = pipeline.name(because);
                if job.has_waiting_tasks() || self.has_going_steps(job) {
                    let told = format!("{name} did not complete: all other steps are ended");
                    self.jobs.tell(&job.id, None, now, told);
                    self.cancel_tasks(&job.id, &format!("{}, because {name} did not complete", job.id), now);
                }
            }
        }
    }

    /// Tells that a step has a record, and why the same is run that may have run before.
    pub(super) fn tell_of_step(
        &mut self,
        id: &JobId,
        (pipeline, index): (&JobId, u32),
        why: Option<String>,
        now: Moment,
    ) {
        let Some(of) = self.jobs.get(pipeline).and_then(|job| job.spec.pipeline.as_ref()) else { return };
        let name = of.name(index);
        self.jobs.tell(id, None, now, format!("step {name} of {pipeline}"));
        why.into_iter().for_each(|why| self.jobs.tell(id, None, now, format!("it is run: {why}")));
        self.jobs.tell(pipeline, None, now, format!("{name} starts: {id}"));
    }

    /// Tells that a step has ended; false of any other task. What comes after it starts, or is not run, before the next
    /// commit.
    pub(super) fn tell_end_of_step(&mut self, id: &JobId, pipeline: &JobId, index: u32, now: Moment) -> bool {
        let Some(of) = self.jobs.get(pipeline).and_then(|job| job.spec.pipeline.as_ref()) else {
            return false;
        };
        let (name, verdict) = (of.name(index), self.jobs.verdict(id));
        let more = if verdict == Verdict::Failed { format!(": agentctl why {id}") } else { String::new() };
        self.jobs.tell(pipeline, None, now, format!("{name} {}{more}", JobState::from(verdict).name()));
        true
    }

    /// Some step of it runs or waits that was not asked to end.
    fn has_going_steps(&self, job: &JobRecord) -> bool {
        let active = job.tasks.iter().flat_map(|tasks| tasks.active.iter());
        let state = |step: u32| self.jobs.state(&job.id.task(step)?);
        active.filter_map(state).any(|state| state.after(JobEvent::CancelRequested).is_some())
    }
}

#[cfg(test)]
pub(super) mod tests;
