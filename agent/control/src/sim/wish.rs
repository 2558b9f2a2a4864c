//! The jobs that users of the simulated cluster want.

use std::time::Duration;

use agent_model::job::{Array, Input, Limits, OnDisconnect, Output, Resources, RetryPolicy};
use agent_model::pipeline::{Pipeline, PipelineStep, StepOutput};
use agent_model::{JobDraft, JobId, JobSpec};

use super::chance::Chance;
use super::world::GRACE;

/// A job that a user wants, and what was answered.
#[derive(Debug, Clone)]
pub(super) struct Wish {
    pub(super) id: JobId,
    pub(super) spec: JobSpec,
    pub(super) submitted: bool,
    /// The controller confirmed the cancel.
    pub(super) canceled: bool,
    /// The controller confirmed another priority.
    pub(super) changed: bool,
}

pub(super) fn wish(index: u64, gangs: bool, chance: &mut Chance) -> Wish {
    let nodes = if gangs && chance.per_mille(400) { 2 } else { 1 };
    let replace = chance.per_mille(500);
    let draft = JobDraft {
        command: "true".into(),
        resources: Resources { nodes, ..Resources::default() },
        limits: Limits {
            timeout: None,
            grace: Some(GRACE),
            on_disconnect: if replace { OnDisconnect::Replace } else { OnDisconnect::Hold },
        },
        retry: RetryPolicy {
            max_attempts: if chance.per_mille(200) { 2 } else { 1000 },
            backoff: Duration::ZERO,
        },
        ..JobDraft::default()
    };
    let spec = match index % 4 {
        3 => pipeline_of(&draft, chance.per_mille(500)),
        _ => draft.validate().unwrap(),
    };
    Wish { id: format!("j{index}").parse().unwrap(), spec, submitted: false, canceled: false, changed: false }
}

/// The one output of each step.
pub(super) const OUT: &str = "out";

/// A pipeline of such jobs: the second step reads what the first one left, the third runs for itself. They may be taken
/// from other pipelines with `reuse`.
fn pipeline_of(draft: &JobDraft, reuse: bool) -> JobSpec {
    let step = |name: &str, reads: &[u32]| {
        let bound = reads.iter().map(|step| {
            let output = StepOutput { step: *step, output: OUT.to_owned() };
            (format!("in{step}"), output)
        });
        let bound: std::collections::BTreeMap<_, _> = bound.collect();
        let later = |name: &String| (name.clone(), Input::Literal("${{parent.jobs".to_owned()));
        // One step of several ranks is enough: all histories have the same time to end what they began.
        let nodes = if name == "first" { draft.resources.nodes } else { 1 };
        let job = JobDraft {
            resources: Resources { nodes, ..draft.resources.clone() },
            inputs: bound.keys().map(later).collect(),
            outputs: [(OUT.to_owned(), Output::Folder)].into(),
            ..draft.clone()
        };
        PipelineStep { name: name.to_owned(), job: job.validate().unwrap(), bound, after: Vec::new(), reuse }
    };
    let steps = vec![step("first", &[]), step("second", &[0]), step("aside", &[])];
    let pipeline = Pipeline {
        steps,
        outputs: Default::default(),
        continue_on_failure: true,
        force_rerun: false,
        again: None,
    };
    let array = Some(Array::counted(3).unwrap());
    JobDraft { array, pipeline: Some(Box::new(pipeline)), ..JobDraft::default() }.validate().unwrap()
}
