//! Pipelines: jobs that read what earlier ones of them left, each a step.
//!
//! Owns what a valid pipeline is ([`Pipeline`]), which steps may start, which never run and when all of them end
//! ([`Pipeline::next`]), and the job that a step is once its inputs are known ([`JobSpec::step`]). Pure.
//!
//! A pipeline is also an array: the index of a task is that of its step. An input that is bound to an output of another
//! step holds the expression as its value until that step has completed; then it is what the step left, by content.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Array, Input, JobDraft, JobSpec};
use crate::fault::{Code, Fault};
use crate::{JobId, Verdict};

/// The most steps of a pipeline.
pub const MAX_STEPS: usize = 500;

/// The output that every step has: all that it left.
pub const ARTIFACTS: &str = "artifacts";

/// What makes a job a pipeline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pipeline {
    /// Its steps, in the order of the file.
    pub steps: Vec<PipelineStep>,
    /// What it leaves: which output of which step.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outputs: BTreeMap<String, StepOutput>,
    /// After a failure the steps that do not need the failed one go on; otherwise all end.
    pub continue_on_failure: bool,
    /// Every step is run, also where the same ran before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force_rerun: bool,
    /// The pipeline whose steps are not run again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again: Option<Again>,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PipelineStep {
    /// Its name in the pipeline.
    pub name: String,
    /// The job that it is. Inputs that are bound hold an expression.
    pub job: JobSpec,
    /// Its inputs that are outputs of other steps.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub bound: BTreeMap<String, StepOutput>,
    /// Steps that must have completed before, although it reads nothing of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<u32>,
    /// The same gives the same: it need not run where the same has run before ([`super::reuse`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reuse: bool,
}

/// An output of a step.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StepOutput {
    /// The index of the step.
    pub step: u32,
    /// The name of the output.
    pub output: String,
}

/// Steps of a pipeline that was run before, whose results count in this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Again {
    /// That pipeline.
    pub pipeline: JobId,
    /// The indices of the steps, the same in both.
    pub steps: Vec<u32>,
}

/// How a step stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepState {
    /// It has not been started.
    Waiting,
    /// It has a job of its own, which has not ended.
    Active,
    /// It has ended so.
    Ended(Verdict),
    /// It will never run.
    NotRun,
}

/// Something that follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepDecision {
    /// All that this step needs is there.
    Start(u32),
    /// This step can never run.
    Skip(u32, NotRun),
    /// All steps that have not ended end, because this one did not complete.
    StopAll(u32),
}

/// Why a step is not run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NotRun {
    /// A step that it comes after did not complete.
    After(String),
    /// A step completed and left nothing in an output that this one reads.
    Nothing {
        /// The step.
        step: String,
        /// The output.
        output: String,
    },
    /// The pipeline ended before its turn came.
    PipelineEnds,
}

/// As text for people: `because prep did not complete`.
impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotRun::After(step) => write!(f, "because {step} did not complete"),
            NotRun::Nothing { step, output } => {
                write!(f, "because {step} left nothing in its output `{output}`")
            }
            NotRun::PipelineEnds => f.write_str("because the pipeline was to end"),
        }
    }
}

/// Steps, each after those that it needs; where that is not possible, steps that need each other in a circle.
pub fn in_order(count: usize, needs: impl Fn(u32) -> Vec<u32>) -> Result<Vec<u32>, Vec<u32>> {
    let mut walk = StepWalk { needs, path: Vec::new(), order: Vec::new(), seen: BTreeSet::new() };
    let mut all = 0..u32::try_from(count).unwrap_or(u32::MAX);
    all.try_for_each(|step| walk.visit(step)).map(|()| walk.order)
}

/// A walk from steps to those that they need.
struct StepWalk<Needs> {
    needs: Needs,
    /// From the step that was begun with.
    path: Vec<u32>,
    order: Vec<u32>,
    seen: BTreeSet<u32>,
}

impl<Needs: Fn(u32) -> Vec<u32>> StepWalk<Needs> {
    fn visit(&mut self, step: u32) -> Result<(), Vec<u32>> {
        if let Some(at) = self.path.iter().position(|known| *known == step) {
            return Err(self.path.split_off(at));
        }
        if self.seen.insert(step) {
            self.path.push(step);
            (self.needs)(step).into_iter().try_for_each(|need| self.visit(need))?;
            self.path.pop();
            self.order.push(step);
        }
        Ok(())
    }
}

impl StepOutput {
    /// The expression that names it, by the name of its step: `${{parent.jobs.prep.outputs.data}}`.
    pub fn expression(&self, step: &str) -> String {
        format!("${{{{parent.jobs.{step}.outputs.{}}}}}", self.output)
    }
}

impl Pipeline {
    /// The name of the step of an index; its number where there is none.
    pub fn name(&self, step: u32) -> String {
        self.step(step).map_or_else(|| step.to_string(), |step| step.name.clone())
    }

    /// The index of the step of a name.
    pub fn index(&self, name: &str) -> Option<u32> {
        (0..).zip(&self.steps).find(|(_, step)| step.name == name).map(|(index, _)| index)
    }

    /// The step of an index.
    pub fn step(&self, index: u32) -> Option<&PipelineStep> {
        self.steps.get(usize::try_from(index).ok()?)
    }

    /// The steps that must have completed before this one starts.
    pub fn needs(&self, step: u32) -> impl Iterator<Item = u32> {
        let of_step = self.step(step).into_iter();
        of_step.flat_map(|step| step.bound.values().map(|bound| bound.step).chain(step.after.iter().copied()))
    }

    /// The step and all that come after it, by data or by order.
    pub fn from(&self, step: u32) -> BTreeSet<u32> {
        let mut found = BTreeSet::from([step]);
        for next in self.order().unwrap_or_default() {
            if self.needs(next).any(|need| found.contains(&need)) {
                found.insert(next);
            }
        }
        found
    }

    /// All steps, each after those that it needs; where that is not possible, steps that need each other in a circle.
    pub fn order(&self) -> Result<Vec<u32>, Vec<u32>> {
        in_order(self.steps.len(), |step| self.needs(step).collect())
    }

    /// What follows from how the steps stand: at most one decision for each. `has_made` says whether a step that
    /// completed left something in an output.
    pub fn next(
        &self,
        state: impl Fn(u32) -> StepState,
        has_made: impl Fn(&StepOutput) -> bool,
    ) -> Vec<StepDecision> {
        let failed = |step: u32| matches!(state(step), StepState::Ended(end) if end != Verdict::Completed);
        let order = self.order().unwrap_or_default();
        if !self.continue_on_failure
            && let Some(first) = order.iter().find(|step| failed(**step))
        {
            return vec![StepDecision::StopAll(*first)];
        }
        let (mut decisions, mut skipped) = (Vec::new(), BTreeSet::new());
        for step in order {
            if state(step) != StepState::Waiting {
                continue;
            }
            let is_over = |need: &u32| failed(*need) || state(*need) == StepState::NotRun;
            let lost = self.needs(step).find(|need| is_over(need) || skipped.contains(need));
            let is_done = |need: u32| state(need) == StepState::Ended(Verdict::Completed);
            if let Some(need) = lost {
                skipped.insert(step);
                decisions.push(StepDecision::Skip(step, NotRun::After(self.name(need))));
            } else if self.needs(step).all(is_done) {
                let bound = self.step(step).into_iter().flat_map(|step| step.bound.values());
                match bound.into_iter().find(|bound| !has_made(bound)) {
                    None => decisions.push(StepDecision::Start(step)),
                    Some(StepOutput { step: from, output }) => {
                        skipped.insert(step);
                        let (from, output) = (self.name(*from), output.clone());
                        decisions.push(StepDecision::Skip(step, NotRun::Nothing { step: from, output }));
                    }
                }
            }
        }
        decisions
    }

    /// Checks every rule.
    pub fn check(&self) -> Result<(), Fault> {
        let invalid = |what: String| Fault::new(Code::JobInvalid, what);
        if self.steps.is_empty() || self.steps.len() > MAX_STEPS {
            return Err(invalid(format!("the pipeline has {} steps", self.steps.len()))
                .fix(format!("write between 1 and {MAX_STEPS} of them under `jobs`")));
        }
        for (index, step) in self.steps.iter().enumerate() {
            if self.steps[..index].iter().any(|other| other.name == step.name) {
                return Err(invalid(format!("two steps are called `{}`", step.name))
                    .fix("give one of them another name"));
            }
            if step.job.pipeline.is_some() || step.job.name.is_some() || !step.job.predecessors.is_empty() {
                return Err(invalid(format!("the step `{}` is no job of its own", step.name))
                    .fix("leave out its `name`, and put the steps of another pipeline beside it"));
            }
            for (input, bound) in &step.bound {
                self.check_output(bound)?;
                if !step.job.inputs.contains_key(input) {
                    return Err(invalid(format!("the step `{}` has no input `{input}`", step.name)));
                }
            }
            if let Some(gone) = step.after.iter().find(|after| self.step(**after).is_none()) {
                return Err(invalid(format!(
                    "the step `{}` comes after step {gone}, which is not there",
                    step.name
                )));
            }
        }
        self.outputs.values().try_for_each(|output| self.check_output(output))?;
        self.order().map(drop).map_err(|circle| {
            let names: Vec<String> = circle.iter().map(|step| self.name(*step)).collect();
            invalid(format!("steps wait for each other: {}", names.join(", ")))
                .fix("let one of them read something else")
        })
    }

    fn check_output(&self, StepOutput { step, output }: &StepOutput) -> Result<(), Fault> {
        let known = self.step(*step).is_some_and(|step| step.job.outputs.contains_key(output));
        match known || (self.step(*step).is_some() && output == ARTIFACTS) {
            true => Ok(()),
            false => {
                let what = format!("the step `{}` has no output `{output}`", self.name(*step));
                Err(Fault::new(Code::JobInvalid, what).fix("add it under `outputs` of that step"))
            }
        }
    }
}

/// As it is sent: JSON.
impl fmt::Display for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Names are texts and numbers are finite, so it always serialises.
        f.write_str(&serde_json::to_string(self).unwrap_or_default())
    }
}

impl FromStr for Pipeline {
    type Err = serde_json::Error;
    fn from_str(text: &str) -> Result<Pipeline, serde_json::Error> {
        serde_json::from_str(text)
    }
}

impl JobDraft {
    /// What must hold between a pipeline and the job that it is.
    pub(crate) fn check_pipeline(&self) -> Result<(), Fault> {
        let Some(pipeline) = &self.pipeline else { return Ok(()) };
        let count = u32::try_from(pipeline.steps.len()).unwrap_or(u32::MAX);
        let is_one_each = |array: &Array| Array::counted(count).is_ok_and(|counted| counted == *array);
        if self.sweep.is_some() || !self.array.as_ref().is_some_and(is_one_each) {
            return Err(Fault::new(Code::JobInvalid, "the pipeline has other tasks than its steps")
                .fix("leave `array` and `search_space` to its steps"));
        }
        // A task of a step that is an array has the longest name.
        let tasks = |step: &PipelineStep| step.job.array.as_ref().and_then(|array| array.indices().last());
        let fits = |id: &JobId, index: u32, step: &PipelineStep| {
            let job = id.task(index)?;
            tasks(step).map_or(Some(job.clone()), |last| job.task(last))
        };
        if let Some(name) = &self.name
            && let Some((_, step)) =
                (0..).zip(&pipeline.steps).find(|(index, step)| fits(name, *index, step).is_none())
        {
            let what = format!("`{name}` is too long a name for a pipeline");
            return Err(Fault::new(Code::JobInvalid, what)
                .why(format!("the jobs of the step {} are called like it, with more behind it", step.name))
                .fix("give it a shorter `name`"));
        }
        pipeline.check()
    }

    /// The jobs that its steps are; none of any other job.
    pub fn steps(&self) -> impl Iterator<Item = &JobSpec> {
        self.pipeline.iter().flat_map(|pipeline| &pipeline.steps).map(|step| &step.job)
    }

    /// The same pipeline, with these jobs in place of those that its steps are, in their order.
    #[must_use]
    pub fn with_steps(mut self, jobs: Vec<JobSpec>) -> JobDraft {
        let steps = self.pipeline.iter_mut().flat_map(|pipeline| &mut pipeline.steps);
        steps.zip(jobs).for_each(|(step, job)| step.job = job);
        self
    }
}

impl JobSpec {
    /// The job that a step of the pipeline `id` is, with what other steps made in the place of its bound inputs; what
    /// is not made yet stays an expression. It belongs to whom the pipeline belongs to, and is as urgent.
    #[must_use]
    pub fn step(
        &self,
        id: &JobId,
        index: u32,
        made: impl Fn(&StepOutput) -> Option<Input>,
    ) -> Option<JobSpec> {
        let step = self.pipeline.as_ref()?.step(index)?;
        let mut draft = JobDraft {
            owner: self.owner.clone(),
            owner_since: self.owner_since,
            visible_to_all: self.visible_to_all,
            priority: self.priority,
            deadline: self.deadline,
            experiment: self.experiment.clone(),
            ..JobDraft::from(step.job.clone())
        };
        for (variable, value) in [("AGENTD_PIPELINE", id.as_str()), ("AGENTD_STEP", &step.name)] {
            if !draft.secrets.contains_key(variable) {
                draft.environment_variables.insert(variable.to_owned(), value.to_owned());
            }
        }
        for (input, bound) in &step.bound {
            draft.inputs.extend(made(bound).map(|made| (input.clone(), made)));
        }
        // Only values of inputs are other ones, so it is as valid as it was.
        JobSpec::try_from(draft).ok()
    }
}

#[cfg(test)]
mod tests;
