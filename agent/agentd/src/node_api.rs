//! What a daemon that is only a node tells clients on its own machine: `Nodes/List` and `Jobs/List`, the messages
//! that a controller answers, about this machine alone.
//!
//! It changes nothing. Every other call is refused with the address of the controller. What a job does is shown to
//! operators of this machine, to its owner where the users are the same ones, and to all if the job says so.
//!
//! Invariant: an answer waits for nobody: not for the controller, and not for the tasks that run jobs.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use agent_cas::gc::Collector;
use agent_control::{Operators, Peer, hide_what_it_does};
use agent_model::node::{Grade, Inventory};
use agent_model::{Clock, Code, Fault, JobId, Principal, ReplicaStep, Timestamp, Verdict};
use agent_proto::v1;
use tokio::sync::watch;
use tonic::codegen::{Body, Service, StdError, http};
use tonic::server::{Grpc, UnaryService};
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use crate::config::Config;
use crate::worker::Worker;
use crate::worker::preemption::Preemptions;
use crate::worker::standing::{FailedReplica, NodeStanding, StandingReplica};

/// The most jobs of one answer, as a controller has it.
const PAGE: usize = 500;

/// See the module. Cheap to clone.
#[derive(Clone)]
pub(crate) struct NodeApi(Arc<Shared>);

struct Shared {
    config: Config,
    clock: Arc<dyn Clock>,
    started_at: Timestamp,
    operators: Operators,
    collector: Collector,
    preemptions: Preemptions,
    inventory: watch::Receiver<Inventory>,
    standing: watch::Receiver<NodeStanding>,
}

impl NodeApi {
    pub(crate) fn new(
        worker: &Worker,
        operators: Operators,
        inventory: watch::Receiver<Inventory>,
        standing: watch::Receiver<NodeStanding>,
    ) -> NodeApi {
        NodeApi(Arc::new(Shared {
            config: worker.config.clone(),
            clock: worker.clock.clone(),
            started_at: worker.clock.now(),
            operators,
            collector: worker.collector.clone(),
            preemptions: worker.preemptions.clone(),
            inventory,
            standing,
        }))
    }

    /// As a service for every path.
    pub(crate) fn routes(self) -> Routes {
        let mut routes = Routes::builder().routes();
        let router = std::mem::take(routes.axum_router_mut());
        *routes.axum_router_mut() = router.fallback_service(self);
        routes
    }

    /// The refusal of what only a controller does.
    fn elsewhere(&self) -> Fault {
        let controller = &self.0.config.controller;
        let fault = Fault::new(
            Code::JoinedElsewhere,
            "this machine is a node: it takes no jobs and no orders itself",
        )
        .why(format!("its controller is {controller}"));
        match self.0.config.knows_owners() {
            true => fault.fix(format!(
                "speak to the controller: `agentctl --socket {}`",
                controller.to_string().trim_start_matches("unix:")
            )),
            false => {
                fault.fix(format!("speak to the controller: `agentctl login {controller}` once, then again"))
            }
        }
    }

    async fn nodes(&self) -> v1::ListNodesResponse {
        let standing = self.0.standing.borrow().clone();
        let room = self.0.collector.room().await;
        let jobs = job_count(&standing);
        let config = &self.0.config;
        v1::ListNodesResponse {
            nodes: vec![self.node(&standing, jobs)],
            controller: Some(v1::Controller {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                started_ms: self.0.started_at.0,
                state_dir: config.state_dir.display().to_string(),
                running: jobs,
                pid: u64::from(std::process::id()),
                store_bytes: room.taken,
                store_limit_bytes: self.0.collector.limits().size,
                ..v1::Controller::default()
            }),
            uplink: Some(v1::Uplink {
                controller: config.controller.to_string(),
                up: standing.up,
                since_ms: standing.since.0,
                heard_ms: standing.heard.map_or(0, |at| at.0),
                why: standing.why,
            }),
            more: false,
        }
    }

    fn node(&self, standing: &NodeStanding, jobs: u32) -> v1::Node {
        let inventory = self.0.inventory.borrow().clone();
        let held = standing.held.iter().map(|held| &held.spec.resources);
        let (cpus_used, memory_used_bytes) = agent_control::used_by(&inventory, held);
        let healthy = inventory.findings.iter().all(|finding| finding.grade != Grade::Bad);
        let (now, boot) = (self.0.clock.now(), self.0.clock.boot());
        let preemption = self.0.preemptions.notice().map(|notice| v1::Preemption {
            deadline_ms: now.0 + u64::try_from(notice.until.since(boot).as_millis()).unwrap_or(u64::MAX),
            reason: notice.reason,
        });
        v1::Node {
            node: self.0.config.node_name.to_string(),
            liveness: match (standing.up, healthy, standing.heard) {
                (true, true, _) => "ready",
                (true, false, _) => "degraded",
                (false, _, Some(_)) => "not_responding",
                (false, _, None) => "enrolling",
            }
            .to_owned(),
            eligibility: match standing.eligibility.as_str() {
                "" => "open",
                said => said,
            }
            .to_owned(),
            last_seen_ms: now.0,
            load: Some(agent_node::load(&self.0.config.state_dir).into()),
            slots_used: jobs,
            cpus_used,
            memory_used_bytes,
            inventory: Some(inventory.into()),
            labels: Default::default(),
            tunnel: None,
            preemption,
            held_back: None, // the controller alone knows
        }
    }

    async fn jobs(&self, request: &v1::ListJobsRequest, who: Option<Principal>) -> v1::ListJobsResponse {
        let standing = self.0.standing.borrow().clone();
        let all = match &who {
            Some(who) => self.0.operators.have(who).await,
            None => false,
        };
        let node = self.0.config.node_name.to_string();
        let mut held: BTreeMap<JobId, Vec<&StandingReplica>> = BTreeMap::new();
        for replica in &standing.held {
            held.entry(replica.replica.job.clone()).or_default().push(replica);
        }
        let mut jobs: Vec<(v1::Job, bool)> = Vec::new();
        for replicas in held.values() {
            jobs.extend(running(replicas, &node).map(|job| (job, replicas[0].spec.visible_to_all)));
        }
        if !request.active {
            jobs.extend(standing.failed.iter().map(|gone| (failed(gone, &node), gone.spec.visible_to_all)));
        }
        // This machine's users are those of the controller only where it is the controller's machine too.
        let own = who.filter(|_| self.0.config.knows_owners()).map(|who| who.to_string());
        let shown = |(job, visible): (v1::Job, bool)| match all || visible || own.as_ref() == Some(&job.owner)
        {
            true => job,
            false => hide_what_it_does(job),
        };
        // A node holds few jobs, so there is one page.
        let jobs = match request.after.is_empty() {
            true => jobs.into_iter().take(PAGE).map(shown).collect(),
            false => Vec::new(),
        };
        v1::ListJobsResponse { jobs, more: false }
    }
}

fn job_count(standing: &NodeStanding) -> u32 {
    let jobs: std::collections::BTreeSet<_> = standing.held.iter().map(|held| &held.replica.job).collect();
    u32::try_from(jobs.len()).unwrap_or(u32::MAX)
}

/// A job whose ranks on this node are `replicas`; `None` before the first record of one was written.
fn running(replicas: &[&StandingReplica], node: &str) -> Option<v1::Job> {
    let views: Vec<_> = replicas.iter().map(|held| (held, held.view.borrow().clone())).collect();
    let (first, view) = views.iter().find(|(_, view)| view.step.is_some())?;
    let ranks = views.iter().filter_map(|(held, view)| {
        Some(v1::ReplicaStatus {
            rank: held.replica.rank,
            node: node.to_owned(),
            step: view.step?.to_string(),
            detail: view.detail.clone(),
            outcome: view.outcome.clone().map(Into::into),
            address: String::new(),
        })
    });
    Some(v1::Job {
        job: first.replica.job.to_string(),
        state: state_in(view.step?).to_owned(),
        epoch: first.replica.epoch.0,
        detail: view.step?.describe_with(&view.detail),
        submitted_ms: first.since.0,
        started_ms: view.started_at.map_or(0, |at| at.0),
        replicas: ranks.collect(),
        owner: first.spec.owner.as_ref().map(Principal::to_string).unwrap_or_default(),
        spec: Some(first.spec.clone().into()),
        ..v1::Job::default()
    })
}

/// The state that a job is in while its rank here is in this step.
fn state_in(step: ReplicaStep) -> &'static str {
    match step {
        ReplicaStep::Accepted | ReplicaStep::Fetching | ReplicaStep::Building | ReplicaStep::Launching => {
            "Preparing"
        }
        ReplicaStep::Running => "Running",
        ReplicaStep::Releasing | ReplicaStep::Uploading | ReplicaStep::Reported => "Finalizing",
    }
}

fn failed(FailedReplica { replica, spec, outcome }: &FailedReplica, node: &str) -> v1::Job {
    let state = if outcome.verdict == Verdict::Canceled { "Canceled" } else { "Failed" };
    let status = v1::ReplicaStatus {
        rank: replica.rank,
        node: node.to_owned(),
        step: ReplicaStep::Reported.to_string(),
        ..v1::ReplicaStatus::default()
    };
    v1::Job {
        job: replica.job.to_string(),
        spec: Some(spec.clone().into()),
        state: state.to_owned(),
        epoch: replica.epoch.0,
        submitted_ms: outcome.started_at.unwrap_or(outcome.ended_at).0,
        started_ms: outcome.started_at.map_or(0, |at| at.0),
        ended_ms: outcome.ended_at.0,
        replicas: vec![status],
        outcome: Some(outcome.clone().into()),
        owner: spec.owner.as_ref().map(Principal::to_string).unwrap_or_default(),
        ..v1::Job::default()
    }
}

type Answer<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl<B> Service<http::Request<B>> for NodeApi
where
    B: Body + Send + 'static,
    B::Error: Into<StdError> + Send,
{
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Answer<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let api = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/agent.v1.Nodes/List" => {
                    Grpc::new(ProstCodec::default()).unary(ListNodes(api), request).await
                }
                "/agent.v1.Jobs/List" => Grpc::new(ProstCodec::default()).unary(ListJobs(api), request).await,
                _ => agent_proto::status(&api.elsewhere()).into_http(),
            })
        })
    }
}

struct ListNodes(NodeApi);

impl UnaryService<v1::ListNodesRequest> for ListNodes {
    type Response = v1::ListNodesResponse;
    type Future = Answer<Result<Response<v1::ListNodesResponse>, Status>>;

    fn call(&mut self, _: Request<v1::ListNodesRequest>) -> Self::Future {
        let api = self.0.clone();
        Box::pin(async move { Ok(Response::new(api.nodes().await)) })
    }
}

struct ListJobs(NodeApi);

impl UnaryService<v1::ListJobsRequest> for ListJobs {
    type Response = v1::ListJobsResponse;
    type Future = Answer<Result<Response<v1::ListJobsResponse>, Status>>;

    fn call(&mut self, request: Request<v1::ListJobsRequest>) -> Self::Future {
        let (api, who) = (self.0.clone(), request.extensions().get::<Peer>().and_then(Peer::who));
        Box::pin(async move { Ok(Response::new(api.jobs(request.get_ref(), who).await)) })
    }
}
