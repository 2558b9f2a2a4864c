//! What is shown of pipelines: a line for each step, with its state, its time and what it comes after; what they leave;
//! and where one goes on that ended.

use std::collections::{BTreeMap, BTreeSet};

use agent_cas::snapshot;
use agent_model::job::JobDraft;
use agent_model::pipeline::{Again, Pipeline, StepOutput};
use agent_model::{Clock, Code, Digest, Fault, SystemClock, Timestamp};

use super::jobs::{self, JobQuery};
use super::sweeps;
use super::view::{JobView, StepView};
use crate::cli::RerunArgs;
use crate::client::Client;
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::{Tone, duration};
use crate::output::{Output, Paper};

/// The jobs of the steps that have one, by their indices.
pub(super) async fn jobs_of(client: &Client, pipeline: &str) -> Result<BTreeMap<u32, JobView>, Failure> {
    let wanted = JobQuery { array: pipeline.to_owned(), ..JobQuery::default() };
    let jobs = jobs::list(client, &wanted).await?.0;
    Ok(jobs.into_iter().filter_map(|job| Some((job.index?, job))).collect())
}

/// What is told of a step that has no job.
fn told<'a>(job: &'a JobView, step: &str) -> Option<&'a StepView> {
    job.steps.iter().find(|told| told.step == step)
}

/// The steps as a table, each below those that it comes after.
pub(super) fn table(job: &JobView, jobs: &BTreeMap<u32, JobView>, now: Timestamp, paper: Paper) -> String {
    let Some(pipeline) = &job.spec.pipeline else { return String::new() };
    let mut table = Table::new(&["STEP", "STATE", "DURATION", "JOB", "AFTER"], &[2]).with_names(&[0, 3]);
    for step in pipeline.order().unwrap_or_default() {
        let name = pipeline.name(step);
        let told = told(job, &name);
        let needs: BTreeSet<u32> = pipeline.needs(step).collect();
        let needs: Vec<String> = needs.into_iter().map(|need| pipeline.name(need)).collect();
        let after = needs.join(", ");
        let cells = match (told, jobs.get(&step)) {
            (Some(StepView { reused_from, .. }), _) if !reused_from.is_empty() => [
                Cell::new(Tone::Good, "Completed"),
                Cell::from(""),
                Cell::from(reused_from),
                Cell::from(format!("{after} (before)").trim_start()),
            ],
            (Some(StepView { not_run, .. }), _) if !not_run.is_empty() => {
                [Cell::new(Tone::Dim, "NotRun"), Cell::from(""), Cell::from(""), Cell::from(not_run)]
            }
            (_, Some(job)) => {
                let detail =
                    if job.detail.is_empty() || job.has_ended() { String::new() } else { job.work() };
                let more = [after, detail].into_iter().filter(|text| !text.is_empty());
                [
                    Cell::new(job.tone(), &job.state),
                    Cell::from(job.duration(now).map(duration).unwrap_or_default()),
                    Cell::from(&job.job),
                    Cell::from(more.collect::<Vec<_>>().join(": ")),
                ]
            }
            (_, None) => [Cell::from("Waiting"), Cell::from(""), Cell::from(""), Cell::from(after)],
        };
        table.row([Cell::from(name)].into_iter().chain(cells));
    }
    table.render(paper)
}

/// The steps of a pipeline as they stand; of any other job nothing.
pub(super) async fn steps(client: &Client, job: &JobView, paper: Paper) -> Result<String, Failure> {
    if job.spec.pipeline.is_none() {
        return Ok(String::new());
    }
    Ok(format!("\n{}", table(job, &jobs_of(client, &job.job).await?, SystemClock.now(), paper)))
}

/// Prints the steps of a pipeline that ended.
pub(super) async fn finish(client: &Client, job: &JobView, output: &mut Output) -> Result<(), Failure> {
    let text = steps(client, job, output.paper()).await?;
    output.print(&text)?;
    let paper = output.note_paper();
    output.say(&format!("\n{}\n", job.verdict(paper)));
    if let Some(fault) = job.cause() {
        output.fault(fault);
    }
    if job.spec.pipeline.as_ref().is_some_and(|pipeline| !pipeline.outputs.is_empty()) {
        output.note(&format!("get what it left: agentctl download {}", job.job));
    }
    Ok(())
}

/// What a pipeline left in its outputs: a tree for each, by its name; and those in which nothing is.
pub(super) async fn outputs_of(
    client: &Client,
    job: &JobView,
    pipeline: &Pipeline,
) -> Result<(Vec<(String, Digest)>, Vec<String>), Failure> {
    let jobs = jobs_of(client, &job.job).await?;
    let (mut trees, mut none) = (Vec::new(), Vec::new());
    for (name, StepOutput { step, output }) in &pipeline.outputs {
        let step_name = pipeline.name(*step);
        let before = match told(job, &step_name).filter(|told| !told.reused_from.is_empty()) {
            Some(told) => Some(JobView::try_from(client.job(&told.reused_from).await?)?),
            None => None,
        };
        let of = before.as_ref().or_else(|| jobs.get(step));
        let best = match of.filter(|of| of.best.is_some()) {
            Some(sweep) => Some(sweeps::best_of(client, sweep).await?),
            None => None,
        };
        let artifacts = best.as_ref().or(of).and_then(|of| of.outcome.as_ref()?.artifacts);
        let path = format!("named-outputs/{output}");
        let found = match artifacts {
            Some(artifacts) => {
                snapshot::part(&client.blobs(), artifacts.root, &path).await.map_err(|error| {
                    Fault::new(Code::SnapshotStore, format!("output {name} of {} cannot be read", job.job))
                        .because(&error)
                })?
            }
            None => None,
        };
        match found {
            Some(root) => trees.push((name.clone(), root)),
            None => none.push(format!("{name}: the step {step_name} left nothing there")),
        }
    }
    Ok((trees, none))
}

/// Makes of a pipeline one that goes on at a step, or at all that did not complete: what completed before is not run again.
/// Where neither is asked for, all of it is run.
pub(super) fn again(draft: &mut JobDraft, job: &JobView, args: &RerunArgs) -> Result<(), Failure> {
    let (Some(pipeline), Some(tasks)) = (&mut draft.pipeline, &job.tasks) else {
        return Err(Failure::refused(
            format!("{} is no pipeline", job.job),
            format!("run all of it again: agentctl rerun {}", job.job),
        ));
    };
    let mut again: Vec<u32> = Vec::new();
    let not_run = |step: u32| told(job, &pipeline.name(step)).is_some_and(|told| !told.not_run.is_empty());
    for step in (0..).take(pipeline.steps.len()) {
        let others = [&tasks.waiting, &tasks.active, &tasks.failed, &tasks.canceled];
        if !others.iter().any(|indices| indices.contains(step)) && !not_run(step) {
            again.push(step);
        }
    }
    if !args.failed && args.from.is_none() {
        again.clear();
    }
    if let Some(from) = &args.from {
        let Some(first) = pipeline.index(from) else {
            let names: Vec<&str> = pipeline.steps.iter().map(|step| step.name.as_str()).collect();
            let fix = format!("the steps are {}", names.join(", "));
            return Err(Failure::refused(format!("{} has no step `{from}`", job.job), fix));
        };
        let repeated = pipeline.from(first);
        again.retain(|step| !repeated.contains(step));
    }
    let mut jobs: Vec<_> = pipeline.steps.iter().map(|step| step.job.clone()).collect();
    for (step, spec) in (0..).zip(&mut jobs) {
        if !again.contains(&step) {
            let mut draft = JobDraft::from(spec.clone());
            // A version is given once: what is made now gets the next one.
            draft.output_names.values_mut().for_each(|name| name.version = None);
            *spec = draft.validate()?;
        }
    }
    let name = job
        .job
        .parse()
        .map_err(|error| Fault::new(Code::Bug, "the daemon told of a job without a name").because(&error))?;
    pipeline.force_rerun = true;
    pipeline.again = (!again.is_empty()).then_some(Again { pipeline: name, steps: again });
    *draft = std::mem::take(draft).with_steps(jobs);
    Ok(())
}
