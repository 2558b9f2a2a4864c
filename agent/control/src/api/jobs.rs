//! `Jobs`: the calls of clients about jobs.
//!
//! A submission is answered when it is on disk. A watcher gets the present state of the job, then its changes: a slow
//! one may miss some in between, never the last.

use std::collections::BTreeSet;
use std::pin::Pin;

use agent_model::job::MAX_TASKS;
use agent_model::pipeline::Again;
use agent_model::{Code, Digest, Fault, JobDraft, JobId, JobSpec, Principal};
use agent_proto::v1;
use futures_util::{Stream, StreamExt, stream};
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming};

use super::inside::SessionStream;
use super::pages::Page;
use super::{Caller, Refusal, Services, invalid, to_wire};
use crate::pins;
use crate::queue::{JobView, Submission};
use crate::store::{Among, JobRecord};

/// Tasks of an array that are removed at a time.
const REMOVALS: usize = 64;
/// Names tried before a collision is called a bug.
const NAME_TRIES: usize = 8;

impl Services {
    async fn submit_job(
        &self,
        request: v1::SubmitRequest,
        caller: &Caller,
    ) -> Result<(JobId, Vec<String>), Refusal> {
        let owner = caller.who();
        if request.request_id.is_empty() {
            return Err(invalid("`request_id` is empty").into());
        }
        let spec = JobSpec::try_from(request.spec.ok_or_else(|| invalid("`spec` is missing"))?)?;
        let spec = spec.owned_by(Some(owner.clone()), self.gate.registry.owns_since(owner));
        if let Some(job) = self.store.submitted(&request.request_id).await? {
            return Ok((job.id, Vec::new()));
        }
        if let Some(name) = spec.name.as_ref().filter(|name| name.as_task().is_some()) {
            return Err(Fault::new(Code::JobInvalid, format!("`{name}` cannot be the name of a job"))
                .why("names that end in `--` and a number are those of the tasks of arrays")
                .fix("give the job another `name`, or none")
                .into());
        }
        self.require_room()?;
        let (spec, notes) = self.settled(spec, owner).await?;
        // From here until the job is on disk nothing that it names is removed.
        let before = self.earlier_pipeline(&spec, caller).await?;
        let read = pins::of_spec(&spec).into_iter().chain(before.iter().flat_map(pins::of_job));
        let _relied = self.collector.rely_on(read.collect()).await;
        self.require_snapshots(&spec.snapshots()).await?;
        self.require_secrets(&spec, owner).await?;
        self.require_predecessors(&spec, caller).await?;
        let earlier = match before {
            Some(pipeline) => vec![pipeline],
            None => self.earlier_trials(&spec, caller).await?,
        };
        let hint = [&request.name_hint, &spec.display_name].into_iter().find(|text| !text.is_empty());
        let hint = hint.cloned().unwrap_or_default();
        for _ in 0..NAME_TRIES {
            let id = match &spec.name {
                Some(name) => name.clone(),
                None => JobId::generate(&hint, random()?),
            };
            let known = self.store.job(&id).await?.filter(|job| job.request != request.request_id);
            let new = Submission {
                request: request.request_id.clone(),
                id: id.clone(),
                spec: spec.clone(),
                after: known.as_ref().map(|job| job.epoch).unwrap_or_default(),
                earlier: earlier.clone(),
            };
            let taken = known.is_some_and(|job| !job.is_removed()) || self.has_tasks(&id, &spec).await?;
            let accepted = if taken { None } else { self.queue.submit(new).await?? };
            match accepted {
                Some(id) => {
                    tracing::info!(job = %id, who = %caller, "queued job");
                    return Ok((id, notes));
                }
                None if spec.name.is_some() => {
                    return Err(Fault::new(Code::JobConflict, format!("there is a job `{id}` already"))
                        .fix(format!(
                            "give the job another `name`, or none; or remove that one: agentctl rm {id}"
                        ))
                        .into());
                }
                None => {}
            }
        }
        Err(Fault::new(Code::Bug, "no free job name was found").into())
    }

    /// The job with what its names of data and of a pool mean here, of a pipeline each of its steps; and what is to be
    /// told to who submits it.
    async fn settled(&self, spec: JobSpec, owner: &Principal) -> Result<(JobSpec, Vec<String>), Refusal> {
        let again = spec.pipeline.as_ref().and_then(|pipeline| pipeline.again.clone());
        let (spec, mut notes) = self.with_assets(spec, owner).await?;
        let (spec, told) = self.pools.demand(spec)?;
        let mut told: BTreeSet<String> = told.into_iter().collect();
        let mut steps = Vec::new();
        for (index, step) in (0..).zip(spec.steps()) {
            // One that is not run again stays as it was.
            let is_new = again.as_ref().is_none_or(|again| !again.steps.contains(&index));
            let (step, more) = match is_new {
                true => self.with_assets(step.clone(), owner).await?,
                false => (step.clone(), Vec::new()),
            };
            let (step, of_pool) = if is_new { self.pools.demand(step)? } else { (step, None) };
            notes.extend(more);
            told.extend(of_pool);
            steps.push(step);
        }
        if !told.is_empty() {
            // Where one machine without GPUs is all there is, the job misses nothing that a pool could be meant for.
            let nodes = self.queue.nodes().await?;
            let plain = nodes.iter().all(|node| node.record.inventory.gpus.is_empty());
            notes.extend(told.into_iter().filter(|_| nodes.len() > 1 || !plain));
        }
        match steps.is_empty() {
            true => Ok((spec, notes)),
            false => Ok((JobDraft::from(spec).with_steps(steps).validate()?, notes)),
        }
    }

    /// The pipeline of which some steps are not run again: they completed, and are the same.
    async fn earlier_pipeline(&self, spec: &JobSpec, caller: &Caller) -> Result<Option<JobRecord>, Refusal> {
        let Some(pipeline) = &spec.pipeline else { return Ok(None) };
        let Some(Again { pipeline: id, steps }) = &pipeline.again else { return Ok(None) };
        let before = (*self.readable(id, caller).await?.job).clone();
        let is_same = |step: &u32| {
            let known = before.spec.pipeline.as_ref()?.steps.get(*step as usize)?;
            let made = before.steps.as_ref()?.made.contains_key(step);
            Some(made && pipeline.steps.get(*step as usize) == Some(known))
        };
        match steps.iter().find(|step| is_same(step) != Some(true)) {
            None => Ok(Some(before)),
            Some(other) => Err(Fault::new(
                Code::JobInvalid,
                format!("the step {} did not complete in {id}, or is another one now", pipeline.name(*other)),
            )
            .fix("go on from an earlier step, or submit the pipeline again")
            .into()),
        }
    }

    /// There are jobs with the names of the tasks that an array of this name would have.
    async fn has_tasks(&self, id: &JobId, spec: &JobSpec) -> Result<bool, Refusal> {
        Ok(spec.array.is_some() && !self.store.page(Among::TasksOf(id), None, 1).await?.is_empty())
    }

    /// The last room on the disk is for the jobs that were accepted before.
    pub(super) fn require_room(&self) -> Result<(), Refusal> {
        if self.store.has_room() {
            return Ok(());
        }
        let place = self.about.state_dir.display();
        Err(Fault::new(Code::ControllerStore, "the controller takes no new jobs: its disk is full")
            .fix(format!("make room on the disk that holds {place}, then submit again; jobs it has go on"))
            .into())
    }

    /// Every snapshot that a job names must be in the store, and complete, before the job counts as submitted.
    pub(super) async fn require_snapshots(&self, snapshots: &[Digest]) -> Result<(), Refusal> {
        let missing = self.first_missing(snapshots).await.map_err(|error| super::unsearched(&error))?;
        match missing {
            None => Ok(()),
            Some(digest) => Err(Fault::new(
                Code::SnapshotMissing,
                "the job names a snapshot that is not here, or not all of it",
            )
            .why(format!("`{digest}` was never uploaded, or was removed since"))
            .fix("submit the job again: `agentctl` uploads what is missing")
            .into()),
        }
    }

    /// The predecessors of a job must exist, and none may have ended otherwise than wanted. The queue handles ends
    /// from now on.
    async fn require_predecessors(&self, spec: &JobSpec, caller: &Caller) -> Result<(), Refusal> {
        for wanted in &spec.predecessors {
            let state = self.readable(&wanted.job, caller).await?.job.state;
            let verdict = state.verdict();
            if verdict.is_some_and(|verdict| !wanted.end.is_met_by(verdict)) {
                return Err(wanted.never_due(verdict).into());
            }
        }
        Ok(())
    }

    /// The trials of the sweep that this one extends, which must have ended.
    async fn earlier_trials(&self, spec: &JobSpec, caller: &Caller) -> Result<Vec<JobRecord>, Refusal> {
        let Some(extends) = spec.sweep.as_ref().and_then(|sweep| sweep.extends.as_ref()) else {
            return Ok(Vec::new());
        };
        let before = self.readable(extends, caller).await?.job;
        if before.spec.sweep.is_none() || !before.state.is_terminal() {
            return Err(Fault::new(Code::JobInvalid, format!("`{extends}` is no sweep that has ended"))
                .why(format!("it is {}", before.state))
                .fix("extend a sweep when all of its trials have ended")
                .into());
        }
        self.queue.flush().await?;
        Ok(crate::store::earlier_trials(&*self.store, spec).await?)
    }

    /// A job as it changes; one that ended has a single value.
    pub(super) async fn watch_job(
        &self,
        id: &JobId,
        caller: &Caller,
    ) -> Result<watch::Receiver<JobView>, Refusal> {
        let now = self.readable(id, caller).await?;
        if let Some(changes) = self.queue.watch(id).await? {
            return Ok(changes);
        }
        Ok(watch::channel(now).1)
    }

    async fn cancel_job(&self, id: &JobId, caller: &Caller) -> Result<JobView, Refusal> {
        self.owned(id, caller).await?;
        match self.queue.cancel(id, caller.to_string()).await? {
            Some(view) => Ok(view),
            None => self.view(id).await,
        }
    }

    async fn hold_job(&self, id: &JobId, held: bool, caller: &Caller) -> Result<JobView, Refusal> {
        self.owned(id, caller).await?;
        match self.queue.hold(id, held, caller.to_string()).await? {
            Some(view) => Ok(view),
            None => Err(self.does_not_wait(id).await?),
        }
    }

    async fn change_job(&self, request: v1::ChangeJobRequest, caller: &Caller) -> Result<JobView, Refusal> {
        let id = &id(&request.job)?;
        self.owned(id, caller).await?;
        match self.queue.change(id, request.try_into()?, caller.to_string()).await? {
            Some(changed) => Ok(changed?),
            None => Err(self.does_not_wait(id).await?),
        }
    }

    async fn does_not_wait(&self, id: &JobId) -> Result<Refusal, Refusal> {
        let state = self.view(id).await?.job.state;
        Ok(Fault::new(Code::JobNotWaiting, format!("`{id}` does not wait"))
            .why(format!("it is {state}"))
            .fix(format!("see how it stands: agentctl show {id}"))
            .into())
    }

    async fn remove_job(&self, id: &JobId, caller: &Caller) -> Result<v1::RemoveJobResponse, Refusal> {
        let job = self.owned(id, caller).await?.job;
        if !job.state.is_terminal() {
            return Err(has_not_ended(id));
        }
        tracing::info!(job = %id, who = %caller, "removing job");
        Ok(v1::RemoveJobResponse { output_bytes: self.take_off_record(id).await? })
    }

    /// Removes an ended job, of an array its tasks first: if that is interrupted, it can be removed again. Returns the
    /// size of the outputs that it left, in bytes.
    pub(crate) async fn take_off_record(&self, id: &JobId) -> Result<u64, Refusal> {
        // The jobs on disk: an end may have been written after a job was looked up.
        self.queue.flush().await?;
        let job = self.on_record(id).await?;
        let mut tasks = Vec::new();
        let mut arrays = if job.tasks.is_some() { vec![id.clone()] } else { Vec::new() };
        while let Some(array) = arrays.pop() {
            let found = self.store.page(Among::TasksOf(&array), None, MAX_TASKS).await?;
            arrays.extend(found.iter().filter(|task| task.tasks.is_some()).map(|task| task.id.clone()));
            tasks.splice(0..0, found);
        }
        // Many at a time, for they share commits.
        let mut removals = stream::iter(tasks).map(|task| self.take_off(task)).buffer_unordered(REMOVALS);
        let mut output_bytes = 0;
        while let Some(left) = removals.next().await {
            output_bytes += left?;
        }
        Ok(output_bytes + self.take_off(job).await?)
    }

    /// Removes one job from the record, its logs first; returns the size of its outputs in bytes.
    async fn take_off(&self, job: JobRecord) -> Result<u64, Refusal> {
        let id = job.id.clone();
        self.archive.remove(&id).await?;
        let left = job.outcome.as_ref().and_then(|outcome| outcome.artifacts);
        match self.queue.remove(job).await? {
            true => Ok(left.map_or(0, |left| left.bytes)),
            false => Err(has_not_ended(&id)),
        }
    }

    async fn job_history(
        &self,
        request: v1::GetJobRequest,
        caller: &Caller,
    ) -> Result<v1::HistoryResponse, Refusal> {
        let id = &id(&request.job)?;
        self.readable(id, caller).await?;
        self.queue.flush_if_possible().await?;
        let events = self.store.history(id).await?;
        let before = usize::try_from(request.after_events).unwrap_or(usize::MAX);
        let mut events = events.into_iter().skip(before).map(|event| v1::HistoryEvent {
            at_ms: event.at.0,
            epoch: event.epoch.0,
            node: event.node.map(String::from).unwrap_or_default(),
            text: event.text,
        });
        let mut page = Page::new();
        let _ = events.all(|event| page.take(event));
        Ok(v1::HistoryResponse { events: page.entries, more: page.more })
    }
}

fn has_not_ended(id: &JobId) -> Refusal {
    Fault::new(Code::JobActive, format!("`{id}` has not ended"))
        .fix(format!("end it first: agentctl cancel --wait {id}"))
        .into()
}

fn random() -> Result<u32, Fault> {
    getrandom::u32()
        .map_err(|error| Fault::new(Code::Bug, "the system gave no random numbers").because(&error))
}

/// The job now, at each change, and at its end. Ends early, with an error, only if the controller does.
fn changes(mut receiver: watch::Receiver<JobView>) -> impl Stream<Item = Result<v1::Job, Status>> {
    receiver.mark_changed();
    stream::unfold(Some(receiver), |receiver| async {
        let mut receiver = receiver?;
        if receiver.changed().await.is_err() {
            return Some((Err(Refusal::Stopping.into()), None));
        }
        let view = receiver.borrow_and_update().clone();
        let rest = (!view.job.state.is_terminal()).then_some(receiver);
        Some((Ok(to_wire(&view)), rest))
    })
}

#[tonic::async_trait]
impl v1::jobs_server::Jobs for Services {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::Job, Status>> + Send>>;

    async fn submit(
        &self,
        request: Request<v1::SubmitRequest>,
    ) -> Result<Response<v1::SubmitResponse>, Status> {
        let caller = Caller::of(&request)?;
        let (job, notes) = self.submit_job(request.into_inner(), &caller).await?;
        caller.concerns(format!("job {job}"));
        Ok(Response::new(v1::SubmitResponse { job: job.into(), notes }))
    }

    async fn get(&self, request: Request<v1::GetJobRequest>) -> Result<Response<v1::Job>, Status> {
        let caller = Caller::of(&request)?;
        let view = self.readable(&id(&request.into_inner().job)?, &caller).await?;
        Ok(Response::new(to_wire(&view)))
    }

    async fn list(
        &self,
        request: Request<v1::ListJobsRequest>,
    ) -> Result<Response<v1::ListJobsResponse>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(self.list_jobs(request.into_inner(), &caller).await?))
    }

    async fn watch(
        &self,
        request: Request<v1::GetJobRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let caller = Caller::of(&request)?;
        let receiver = self.watch_job(&id(&request.into_inner().job)?, &caller).await?;
        Ok(Response::new(caller.while_allowed(changes(receiver))))
    }

    async fn cancel(&self, request: Request<v1::CancelJobRequest>) -> Result<Response<v1::Job>, Status> {
        let caller = Caller::of(&request)?;
        let view = self.cancel_job(&id(&request.into_inner().job)?, &caller).await?;
        Ok(Response::new(to_wire(&view)))
    }

    async fn hold(&self, request: Request<v1::HoldJobRequest>) -> Result<Response<v1::Job>, Status> {
        let caller = Caller::of(&request)?;
        let v1::HoldJobRequest { job, held } = request.into_inner();
        let view = self.hold_job(&id(&job)?, held, &caller).await?;
        Ok(Response::new(to_wire(&view)))
    }

    async fn change(&self, request: Request<v1::ChangeJobRequest>) -> Result<Response<v1::Job>, Status> {
        let caller = Caller::of(&request)?;
        let view = self.change_job(request.into_inner(), &caller).await?;
        Ok(Response::new(to_wire(&view)))
    }

    async fn remove(
        &self,
        request: Request<v1::RemoveJobRequest>,
    ) -> Result<Response<v1::RemoveJobResponse>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(self.remove_job(&id(&request.into_inner().job)?, &caller).await?))
    }

    async fn history(
        &self,
        request: Request<v1::GetJobRequest>,
    ) -> Result<Response<v1::HistoryResponse>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(self.job_history(request.into_inner(), &caller).await?))
    }

    type SessionStream = SessionStream;

    async fn session(
        &self,
        request: Request<Streaming<v1::SessionInput>>,
    ) -> Result<Response<SessionStream>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(self.open_session(caller, request.into_inner()).await?))
    }
}

fn id(name: &str) -> Result<JobId, Refusal> {
    Ok(name.parse()?)
}
