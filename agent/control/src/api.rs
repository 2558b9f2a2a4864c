//! The gRPC services: check the caller, translate, call one function.
//!
//! Owns the mapping between wire and model for everything the controller says, and the only place where an
//! error inside becomes a fault for people. Hides tonic from the rest of the crate. Streams end by
//! themselves when the queue's task ends.

mod access;
mod blobs;
mod cas;
mod jobs;
mod nodes;
mod outputs;
mod telemetry;
mod worker;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_cas::BlobStore;
use agent_cas::gc::{Collector, WholeError};
use agent_model::{Blame, Clock, Code, Digest, Fault, JobId, JobState, Principal, Timestamp};
use agent_proto::{MAX_MESSAGE, v1};
use tonic::Status;
use tonic::service::Routes;

use access::Caller;
pub use access::{Operators, Peer};

use crate::archive::{Archive, ArchiveError};
use crate::queue::{AskError, JobView, Queue};
use crate::store::{JobRecord, Sqlite, Store, StoreError};

/// Everything the services work with. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Services {
    pub(crate) queue: Queue,
    pub(crate) store: Arc<Sqlite>,
    pub(crate) archive: Archive,
    pub(crate) blobs: agent_cas::Store,
    /// Makes room in the part of it that is on this disk.
    pub(crate) collector: Collector,
    pub(crate) lease: Duration,
    pub(crate) operators: Operators,
    pub(crate) about: About,
}

/// What the controller says about itself.
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
    /// A blob that one of these trees needs and the store lacks. Of a store elsewhere only the roots are asked for: it
    /// lets blobs go by rules of its own, so nothing more would be known of it for long. One that it says it lacks may
    /// be there all the same: then it can be read.
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

    /// All of them, as one router that knows who may call what.
    pub(crate) fn routes(&self) -> Routes {
        let services = || self.clone();
        let routes =
            Routes::new(v1::jobs_server::JobsServer::new(services()).max_decoding_message_size(MAX_MESSAGE))
                .add_service(v1::nodes_server::NodesServer::new(services()))
                .add_service(
                    v1::worker_server::WorkerServer::new(services()).max_decoding_message_size(MAX_MESSAGE),
                )
                .add_service(
                    v1::telemetry_server::TelemetryServer::new(services())
                        .max_decoding_message_size(MAX_MESSAGE),
                );
        let actions = self.about.state_dir.join("controller/actions");
        let routes = cas::add(routes, self.blobs.clone(), self.collector.clone(), actions);
        let guard = axum::middleware::from_fn_with_state(self.operators.clone(), access::guard);
        routes.into_axum_router().layer(guard).into()
    }

    /// A job as it stands, ended or not.
    async fn view(&self, id: &JobId) -> Result<JobView, Refusal> {
        if let Some(view) = self.queue.job(id).await? {
            return Ok(view);
        }
        let job = self.store.job(id).await?.ok_or_else(|| unknown_job(id))?;
        Ok(ended(job))
    }
}

/// The store does not say whether it has something.
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

/// What a caller is told instead of an answer.
#[derive(Debug)]
enum Refusal {
    /// Something he can read.
    Fault(Box<Fault>),
    /// The controller is going down; the call may be repeated elsewhere or later.
    Stopping,
    /// A node speaks of an attempt that is not on record; it is being asked about it, and may come again.
    Unheard,
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Refusal {
        Refusal::Fault(Box::new(fault))
    }
}

impl From<agent_proto::WireError> for Refusal {
    fn from(error: agent_proto::WireError) -> Refusal {
        Fault::from(error).into()
    }
}

impl From<agent_model::ids::IdError> for Refusal {
    fn from(error: agent_model::ids::IdError) -> Refusal {
        agent_proto::WireError::from(error).into()
    }
}

impl From<AskError> for Refusal {
    fn from(error: AskError) -> Refusal {
        match error {
            AskError::Stopping => Refusal::Stopping,
            unwritten @ (AskError::NotWritten | AskError::DiskFull) => {
                Fault::new(Code::ControllerStore, "the controller could not store the change")
                    .because(&unwritten)
                    .fix("look for a full or failing disk in the daemon's log; the change is tried again")
                    .into()
            }
        }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Refusal {
        Fault::new(Code::ControllerStore, "the controller could not read its database").because(&error).into()
    }
}

impl From<ArchiveError> for Refusal {
    fn from(error: ArchiveError) -> Refusal {
        match error {
            ArchiveError::Stopping => Refusal::Stopping,
            error => {
                let code = if error.is_full() { Code::DiskFull } else { Code::ControllerStore };
                Fault::new(code, "the controller could not use its archive of logs").because(&error).into()
            }
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Status {
        match refusal {
            Refusal::Fault(fault) => agent_proto::status(&fault),
            Refusal::Stopping => Status::unavailable("the controller is stopping"),
            Refusal::Unheard => {
                Status::unavailable("the attempt is not on record; it is taken over with the next report")
            }
        }
    }
}

/// What another server that keeps the blobs did to a call.
fn far_fault(what: &str) -> Fault {
    let fault = Fault { blame: Blame::Network, ..Fault::new(Code::SnapshotStore, what) };
    fault.fix("try again later; look at the server that `blob_store` names: `agentd show-config` prints it")
}

/// A request that does not follow the protocol.
fn invalid(why: impl Into<String>) -> Fault {
    Fault::new(Code::RequestInvalid, "the request is not valid").why(why)
}

/// A job for the wire.
fn to_wire(view: &JobView) -> v1::Job {
    let job = &view.job;
    v1::Job {
        job: job.id.to_string(),
        spec: Some(job.spec.clone().into()),
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
            })
            .collect(),
        outcome: job.outcome.clone().map(v1::Outcome::from),
        owner: job.owner.as_ref().map(Principal::to_string).unwrap_or_default(),
    }
}

/// A job of somebody else: that it is there, where it stands and what it needs, and nothing of what it does.
fn to_wire_for_others(view: &JobView) -> v1::Job {
    const PRIVATE: &str = "(private)";
    let whole = to_wire(view);
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
    let replica = |replica: v1::ReplicaStatus| v1::ReplicaStatus { detail: String::new(), ..replica };
    v1::Job {
        spec: Some(hidden),
        detail: if view.job.state == JobState::Queued { whole.detail } else { String::new() },
        replicas: whole.replicas.into_iter().map(replica).collect(),
        outcome: whole.outcome.map(verdict),
        ..whole
    }
}

#[cfg(test)]
mod tests;
