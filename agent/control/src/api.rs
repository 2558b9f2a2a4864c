//! The gRPC services: each call checks the caller, translates the message, and calls one function.
//!
//! Owns the mapping between wire and model for all messages of the controller, and the only place where an internal
//! error becomes a fault for users. Hides tonic from the rest of the crate. Streams end by themselves when the
//! queue's task ends.

mod access;
mod assets;
mod blobs;
mod cas;
mod grants;
mod identity;
mod inside;
mod jobs;
mod listing;
mod namesakes;
mod naming;
mod nodes;
mod observe;
mod outputs;
mod pages;
mod peers;
mod pools;
mod reuse;
mod secrets;
mod telemetry;
mod tunnels;
mod worker;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_cas::BlobStore;
use agent_cas::gc::{Collector, WholeError};
use agent_model::{Blame, Clock, Code, Digest, Fault, JobId, JobState, Principal, Timestamp};
use agent_proto::{MAX_MESSAGE, Unwritten, v1};
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tonic::service::Routes;

use access::Caller;
pub(crate) use access::Gate;
pub use access::{Operators, Peer};
pub(crate) use grants::Grants;
pub(crate) use inside::Offers;
pub(crate) use observe::Observer;
pub use telemetry::LogIntake;

use crate::archive::Archive;
use crate::members::{IdentityConfig, Members};
use crate::pools::Pools;
use crate::queue::assets::Assets;
use crate::queue::{AskError, JobView, Queue, Stall};
pub(crate) use crate::refusal::{Refusal, invalid};
use crate::secrets::Secrets;
use crate::standby::Board;
use crate::store::Naming;
use crate::store::{JobRecord, RankEnd, ReplicaRecord, StepsRecord, Store};

/// Everything the services work with. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Services {
    pub(crate) queue: Queue,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) archive: Archive,
    pub(crate) blobs: agent_cas::Store,
    /// Makes room in the part of the store that is on this disk.
    pub(crate) collector: Collector,
    pub(crate) lease: Duration,
    /// Checks every call first.
    pub(crate) gate: Gate,
    pub(crate) secrets: Secrets,
    pub(crate) grants: Grants,
    /// Names that users gave to data.
    pub(crate) assets: Assets,
    /// What trials of sweeps were seen to log.
    pub(crate) observer: Observer,
    /// What nodes offer to users who want into a job.
    pub(crate) offers: Offers,
    pub(crate) pools: Pools,
    /// The names of data that the operator gave.
    pub(crate) mapped: crate::MappedNames,
    /// Takes machines out of the fleet.
    pub(crate) members: Members,
    /// The authority that signs certificates, if other machines are served.
    pub(crate) identity: Option<IdentityConfig>,
    /// When the machine is shut down, if anything does that.
    pub(crate) board: Board,
    pub(crate) about: About,
}

/// Information about the controller itself.
#[derive(Debug, Clone)]
pub(crate) struct About {
    state_dir: PathBuf,
    started_at: Timestamp,
}

impl About {
    pub(crate) fn new(state_dir: &Path, clock: &dyn Clock) -> About {
        About { state_dir: state_dir.to_owned(), started_at: clock.now() }
    }
}

impl Services {
    /// A blob that one of these trees needs and the store lacks. In a remote store only the roots are looked up: it
    /// removes blobs by its own rules, so a deeper answer would not stay true for long. A root that it reports
    /// missing may be there all the same: then it can be read.
    pub(crate) async fn first_missing(&self, roots: &[Digest]) -> Result<Option<Digest>, WholeError> {
        match &self.blobs {
            agent_cas::Store::Disk(_) => self.collector.first_missing(roots).await,
            agent_cas::Store::Tiered(far) => {
                let missing = far.missing(roots).await.map_err(WholeError::Missing)?;
                let read = far.read_batch(missing.clone()).await;
                Ok(missing.into_iter().zip(read).find(|(_, read)| read.is_err()).map(|(root, _)| root))
            }
        }
    }

    /// All services, as one router that checks who may call what.
    pub(crate) fn routes(&self) -> Routes {
        let routes = self.add_blobs(self.add_nodes(self.add_clients(Routes::default())));
        let guard = axum::middleware::from_fn_with_state(self.gate.clone(), access::guard);
        let age = axum::middleware::from_fn_with_state(self.queue.clone(), say_how_old);
        routes.into_axum_router().layer(guard).layer(age).into()
    }

    /// The services that users call; of telemetry they call only the reads.
    fn add_clients(&self, routes: Routes) -> Routes {
        let jobs = v1::jobs_server::JobsServer::new(self.clone());
        let telemetry = v1::telemetry_server::TelemetryServer::new(self.clone());
        routes
            .add_service(jobs.max_decoding_message_size(MAX_MESSAGE))
            .add_service(v1::secrets_server::SecretsServer::new(self.clone()))
            .add_service(v1::assets_server::AssetsServer::new(self.clone()))
            .add_service(v1::nodes_server::NodesServer::new(self.clone()))
            .add_service(v1::identity_server::IdentityServer::new(self.clone()))
            .add_service(v1::pools_server::PoolsServer::new(self.clone()))
            .add_service(telemetry.max_decoding_message_size(MAX_MESSAGE))
    }

    /// The services that only nodes call.
    fn add_nodes(&self, routes: Routes) -> Routes {
        let worker = v1::worker_server::WorkerServer::new(self.clone());
        routes.add_service(worker.max_decoding_message_size(MAX_MESSAGE))
    }

    /// The services that both call: a blob store that other programs can use, too.
    fn add_blobs(&self, routes: Routes) -> Routes {
        cas::add(routes, self.blobs.clone(), self.collector.clone())
    }

    /// The present state of a job, ended or not.
    async fn view(&self, id: &JobId) -> Result<JobView, Refusal> {
        if let Some(view) = self.queue.shown_job(id).await? {
            return Ok(view);
        }
        match self.on_record(id).await {
            Ok(job) => Ok(ended(job)),
            Err(refusal) => Err(self.unknown_task(id).await?.unwrap_or(refusal)),
        }
    }

    /// Why there is no job of this name, if it is that of a task of an array.
    async fn unknown_task(&self, id: &JobId) -> Result<Option<Refusal>, Refusal> {
        let Some((array, index)) = id.as_task() else { return Ok(None) };
        let Some(array) = self.store.job(&array).await?.filter(|job| !job.is_removed()) else {
            return Ok(None);
        };
        let Some(spec) = &array.spec.array else { return Ok(None) };
        let what = format!("there is no record of task {index} of `{}`", array.id);
        let fault = Fault::new(Code::JobNotFound, what);
        let like = array.steps.as_ref().and_then(|steps| steps.reused.get(&index));
        let fault = match (spec.indices().contains(index), like) {
            (_, Some(like)) => fault.why(format!("it was not run: {like} did the same")),
            (true, None) => fault.why("it was never started, because the array was to end"),
            (false, None) => fault.why(format!("the indices of the array are {}", spec.indices())),
        };
        Ok(Some(fault.fix(format!("list its tasks: agentctl jobs {}", array.id)).into()))
    }

    /// A job as it is on the disk, unless it was removed.
    async fn on_record(&self, id: &JobId) -> Result<JobRecord, Refusal> {
        let job = self.store.job(id).await?.filter(|job| !job.is_removed());
        job.ok_or_else(|| unknown_job(id).into())
    }
}

/// Says beside each answer since when nothing can be written, while that is so.
async fn say_how_old(State(queue): State<Queue>, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if let Some(Stall { since, why }) = queue.stall() {
        let why = match why {
            AskError::DiskFull => "its disk is full",
            AskError::Moved => "its file was removed or replaced, and cannot be written back",
            _ => "the disk fails or may only be read",
        };
        let said = Unwritten { since, why: why.to_owned() }.to_header();
        let value = HeaderValue::try_from(said).ok(); // plain words always are one
        response.headers_mut().extend(value.map(|value| (HeaderName::from_static(Unwritten::HEADER), value)));
    }
    response
}

/// The store could not be searched for a blob.
fn unsearched(error: &WholeError) -> Fault {
    let what = "the blob store could not be searched";
    match error {
        WholeError::Missing(_) => far_fault(what).because(error),
        WholeError::Read(_) => Fault::new(Code::SnapshotStore, what).because(error),
    }
}

fn ended(job: JobRecord) -> JobView {
    JobView { job: Arc::new(job), detail: String::new() }
}

fn unknown_job(id: &JobId) -> Fault {
    Fault::new(Code::JobNotFound, format!("there is no job `{id}`")).fix("list them with `agentctl jobs`")
}

/// The fault for a failure of another server that keeps the blobs.
fn far_fault(what: &str) -> Fault {
    let fault = Fault { blame: Blame::Network, ..Fault::new(Code::SnapshotStore, what) };
    fault.fix("try again later; look at the server that `blob_store` names: `agentd show-config` prints it")
}

/// A job for the wire.
fn to_wire(view: &JobView) -> v1::Job {
    let job = &view.job;
    v1::Job {
        job: job.id.to_string(),
        spec: Some(job.spec_to_run().into()),
        state: job.state.name().to_owned(),
        epoch: job.epoch.0,
        detail: view.detail.clone(),
        submitted_ms: job.submitted_at.0,
        started_ms: job.started_at.map_or(0, |at| at.0),
        ended_ms: job.ended_at.map_or(0, |at| at.0),
        cancel_requested: job.cancel.is_some(),
        replicas: job
            .replicas
            .iter()
            .map(|replica| v1::ReplicaStatus {
                rank: replica.rank,
                node: replica.node.to_string(),
                step: replica.step.map(|step| step.to_string()).unwrap_or_default(),
                detail: replica.detail.clone(),
                outcome: end_of(replica),
                address: address_of(job, replica),
            })
            .collect(),
        outcome: job.outcome.clone().map(v1::Outcome::from),
        owner: job.owner().map(Principal::to_string).unwrap_or_default(),
        tasks: job.tasks.as_ref().map(|tasks| v1::ArrayStatus {
            waiting: tasks.waiting.to_string(),
            active: tasks.active.to_string(),
            failed: tasks.failed.to_string(),
            canceled: tasks.canceled.to_string(),
        }),
        named_outputs: named_outputs(job),
        trial: job.trial.as_ref().map(|trial| v1::TrialStatus {
            values: trial.values.iter().map(|(name, value)| (name.clone(), value.to_json())).collect(),
            count: trial.curve.count,
            last: trial.curve.last,
            best: trial.curve.best,
            stopped: trial.stop.as_ref().map(ToString::to_string).unwrap_or_default(),
        }),
        best: job.best.map(|best| v1::BestTrial { trial: best.trial, value: best.value }),
        steps: job.steps.iter().flat_map(|steps| steps_to_wire(steps)).collect(),
    }
}

/// The steps that are not run, each with the reason.
fn steps_to_wire(steps: &StepsRecord) -> impl Iterator<Item = v1::StepStatus> {
    let reused = steps.reused.iter().map(|(step, job)| v1::StepStatus {
        step: *step,
        reused_from: job.to_string(),
        not_run: String::new(),
    });
    let not_run = steps.not_run.iter().map(|(step, why)| v1::StepStatus {
        step: *step,
        reused_from: String::new(),
        not_run: why.to_string(),
    });
    reused.chain(not_run)
}

/// What came of the names of outputs; nothing before the job has ended.
fn named_outputs(job: &JobRecord) -> Vec<v1::NamedOutput> {
    let to_wire = |(output, naming): (&String, &Naming)| {
        let name = job.spec.output_names.get(output).map(|wanted| wanted.name.clone()).unwrap_or_default();
        let (version, why) = match naming {
            Naming::Found(_) => return None,
            Naming::Named(version) => (version.clone(), String::new()),
            Naming::Unnamed(why) => (String::new(), why.clone()),
        };
        Some(v1::NamedOutput { output: output.clone(), name, version, why })
    };
    job.named.iter().filter_map(to_wire).collect()
}

/// The outcome of a rank, if it has ended.
fn end_of(replica: &ReplicaRecord) -> Option<v1::Outcome> {
    Some(match replica.end.as_ref()? {
        RankEnd::Told(outcome) => outcome.clone().into(),
        RankEnd::Lost { fault, heard } => v1::Outcome {
            verdict: "failed".to_owned(),
            fault: Some(fault.clone().into()),
            ended_ms: heard.0,
            ..v1::Outcome::default()
        },
    })
}

/// The address at which the other ranks of its gang reach a rank; empty without other ranks, or before it could
/// start.
fn address_of(job: &JobRecord, replica: &ReplicaRecord) -> String {
    let gang = job.gang(replica.rank);
    let seat = gang.as_ref().and_then(|gang| gang.roster.seat(replica.rank));
    let place = seat.map(|seat| &seat.place).or(replica.ready.as_ref().map(|ready| &ready.place));
    place.map(|place| SocketAddr::new(place.address, place.first_port).to_string()).unwrap_or_default()
}

/// A job as users see it who may not read it: that it exists, its state and what it needs, and nothing of what it
/// does.
pub fn hide_what_it_does(whole: v1::Job) -> v1::Job {
    const PRIVATE: &str = "(private)";
    let spec = whole.spec.unwrap_or_default();
    let hidden = v1::JobSpec {
        name: spec.name,
        display_name: PRIVATE.to_owned(),
        command: PRIVATE.to_owned(),
        environment: Some(agent_model::EnvSpec::host().into()),
        resources: spec.resources,
        limits: spec.limits,
        priority: spec.priority,
        ..v1::JobSpec::default()
    };
    let verdict = |outcome: v1::Outcome| v1::Outcome { verdict: outcome.verdict, ..v1::Outcome::default() };
    let replica = |replica: v1::ReplicaStatus| v1::ReplicaStatus {
        detail: String::new(),
        outcome: None,
        address: String::new(),
        ..replica
    };
    v1::Job {
        spec: Some(hidden),
        detail: if whole.state == JobState::Queued.name() { whole.detail } else { String::new() },
        replicas: whole.replicas.into_iter().map(replica).collect(),
        outcome: whole.outcome.map(verdict),
        tasks: None,
        named_outputs: Vec::new(),
        ..whole
    }
}

#[cfg(test)]
mod tests;
