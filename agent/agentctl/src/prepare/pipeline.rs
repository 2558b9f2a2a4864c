//! A pipeline: a plan for each step, and what they read of each other.
//!
//! Owns which paths of a step are relative to what: its inputs to the pipeline, its code and its environment to the
//! component that it is made from. What several steps name is sent once.

use std::collections::BTreeMap;
use std::path::Path;

use agent_jobfile::{self as jobfile, Misread, PipelineFile, PipelineSettings, StepFile};
use agent_model::job::{Array, Input, JobDraft, Resources};
use agent_model::pipeline::{Pipeline, PipelineStep, StepOutput};
use agent_model::{Digest, Fault, JobSpec};

use super::plan::{Home, Wrong, directory_name};
use super::{Changes, Plan, Remark, in_file, read};

/// The steps of a pipeline.
#[derive(Debug, Clone)]
pub(crate) struct PipelinePlan {
    pub(super) steps: Vec<StepPlan>,
    outputs: BTreeMap<String, StepOutput>,
    settings: PipelineSettings,
}

/// One step.
#[derive(Debug, Clone)]
pub(super) struct StepPlan {
    pub(super) name: String,
    pub(super) plan: Plan,
    reuse: bool,
    bound: BTreeMap<String, StepOutput>,
    after: Vec<u32>,
}

/// Reads a pipeline and the components that it names.
pub(super) fn parse(
    file: &Path,
    text: &str,
    given: &[(String, String)],
) -> Result<PipelineFile, Vec<Misread>> {
    let base = file.parent().unwrap_or(Path::new(""));
    jobfile::pipeline(text, given, &mut |path| read(&base.join(path), "the component"))
}

impl Plan {
    pub(super) fn of_pipeline(file: &Path, text: &str, changes: &Changes) -> Result<Plan, Wrong> {
        let base = file.parent().unwrap_or(Path::new(""));
        // The file of a component, or else of the pipeline.
        let place =
            |component: Option<String>| component.map_or_else(|| file.to_owned(), |file| base.join(file));
        let read = parse(file, text, &changes.set).map_err(|misread| {
            let fault = |Misread { file: component, refused }| in_file(&place(component), refused.into());
            Wrong { faults: misread.into_iter().map(fault).collect(), warnings: Vec::new() }
        })?;
        let warnings = read.warnings.into_iter();
        let mut warnings: Vec<Remark> =
            warnings.map(|(component, warning)| Remark::at(&place(component), warning)).collect();
        let (mut steps, mut faults) = (Vec::new(), Vec::new());
        for StepFile { name, job, component, is_environment_of_component, reuse, bound, after } in read.steps
        {
            let component = Some(place(component)).filter(|component| component.is_file());
            let component = component.unwrap_or_else(|| file.to_owned());
            let environment = if is_environment_of_component { component.as_path() } else { file };
            let homes = [file, &component, environment].map(Home::of);
            match Plan::of_homes(job, homes) {
                Ok(mut plan) => {
                    warnings.append(&mut plan.warnings);
                    plan.draft.environment_variables.extend(changes.env.iter().cloned());
                    plan.draft.secrets.extend(changes.secrets.iter().cloned());
                    steps.push(StepPlan { name, plan, reuse, bound, after });
                }
                Err(wrong) => {
                    faults.extend(wrong.faults);
                    warnings.extend(wrong.warnings);
                }
            }
        }
        if !faults.is_empty() {
            return Err(Wrong { faults, warnings });
        }
        let name = directory_name(base);
        let mut draft = read.draft;
        if draft.experiment.is_empty() {
            draft.experiment.clone_from(&name);
        }
        let stem = file.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        if draft.display_name.is_empty() {
            draft.display_name = stem.unwrap_or(name);
        }
        let (outputs, mut settings) = (read.outputs, read.settings);
        settings.force_rerun |= changes.force_rerun;
        let pipeline = Some(Box::new(PipelinePlan { steps, outputs, settings }));
        let hint = draft.display_name.clone();
        Ok(Plan {
            draft,
            code: None,
            inputs: Vec::new(),
            context: None,
            pipeline,
            after: Vec::new(),
            hint,
            environment: None,
            warnings,
        })
    }

    /// What it asks for, of a pipeline each of its steps.
    pub(crate) fn resources(&self) -> Vec<&Resources> {
        match &self.pipeline {
            None => vec![&self.draft.resources],
            Some(pipeline) => pipeline.steps.iter().map(|step| &step.plan.draft.resources).collect(),
        }
    }

    /// The job as far as it is known before anything is sent, with something in the place of each file: all rules but
    /// those about files hold for it.
    pub(super) fn stand_in(&self) -> Result<JobDraft, Fault> {
        let mut draft = self.draft.clone();
        let inputs = self.inputs.iter().map(|(name, _)| (name.clone(), Input::Folder(Digest::EMPTY)));
        draft.inputs.extend(inputs);
        let Some(pipeline) = &self.pipeline else { return Ok(draft) };
        let steps = pipeline.steps.iter().map(|step| {
            let job = step.plan.stand_in().and_then(JobDraft::validate);
            job.map_err(|fault| of_step(&step.name, fault))
        });
        Ok(pipeline.of_jobs(draft, steps.collect::<Result<_, _>>()?))
    }
}

/// A fault about a step.
pub(super) fn of_step(name: &str, fault: Fault) -> Fault {
    Fault { what: format!("step {name}: {}", fault.what), ..fault }
}

impl PipelinePlan {
    /// The pipeline whose steps are these jobs.
    pub(super) fn of_jobs(&self, draft: JobDraft, jobs: Vec<JobSpec>) -> JobDraft {
        let steps = self.steps.iter().zip(jobs).map(|(step, job)| PipelineStep {
            name: step.name.clone(),
            job,
            bound: step.bound.clone(),
            after: step.after.clone(),
            reuse: step.reuse,
        });
        let pipeline = Pipeline {
            steps: steps.collect(),
            outputs: self.outputs.clone(),
            continue_on_failure: self.settings.continue_on_failure,
            force_rerun: self.settings.force_rerun,
            again: None,
        };
        let count = u32::try_from(pipeline.steps.len()).unwrap_or(u32::MAX);
        JobDraft { array: Array::counted(count).ok(), pipeline: Some(Box::new(pipeline)), ..draft }
    }
}
