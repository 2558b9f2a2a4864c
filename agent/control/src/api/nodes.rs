//! `Nodes`: what clients ask about the machines, and about the controller itself.

use agent_model::JobState;
use agent_model::machine::{Eligibility, Liveness};
use agent_proto::v1;
use tonic::{Request, Response, Status};

use super::{Refusal, Services};
use crate::queue::NodeState;

impl Services {
    async fn list_nodes(&self) -> Result<v1::ListNodesResponse, Refusal> {
        let nodes = self.queue.nodes().await?;
        let jobs = self.queue.jobs().await?;
        let queued = jobs.iter().filter(|view| view.job.state == JobState::Queued).count();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(v1::ListNodesResponse {
            nodes: nodes.into_iter().map(to_wire).collect(),
            controller: Some(v1::Controller {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                started_ms: self.about.started_at.0,
                state_dir: self.about.state_dir.display().to_string(),
                queued: count(queued),
                running: count(jobs.len() - queued),
                pid: u64::from(std::process::id()),
                incarnation: String::new(),
                notices: Vec::new(),
            }),
        })
    }
}

fn to_wire(node: NodeState) -> v1::Node {
    v1::Node {
        node: node.record.id.to_string(),
        liveness: match node.record.liveness {
            Liveness::Enrolling => "enrolling",
            Liveness::Ready => "ready",
            Liveness::Degraded => "degraded",
            Liveness::NotResponding => "not_responding",
            Liveness::Down => "down",
            Liveness::Removed => "removed",
        }
        .to_owned(),
        eligibility: match node.record.eligibility {
            Eligibility::Open => "open",
            Eligibility::Draining => "draining",
            Eligibility::Cordoned => "cordoned",
        }
        .to_owned(),
        last_seen_ms: node.record.last_seen.0,
        inventory: Some(node.record.inventory.into()),
        load: Some(node.load.into()),
        slots_used: u32::try_from(node.jobs.len()).unwrap_or(u32::MAX),
    }
}

#[tonic::async_trait]
impl v1::nodes_server::Nodes for Services {
    async fn list(
        &self,
        _: Request<v1::ListNodesRequest>,
    ) -> Result<Response<v1::ListNodesResponse>, Status> {
        Ok(Response::new(self.list_nodes().await?))
    }

    async fn set_eligibility(
        &self,
        _: Request<v1::SetEligibilityRequest>,
    ) -> Result<Response<v1::Node>, Status> {
        Err(Status::unimplemented("not yet"))
    }

    async fn declare_lost(
        &self,
        _: Request<v1::DeclareLostRequest>,
    ) -> Result<Response<v1::DeclareLostResponse>, Status> {
        Err(Status::unimplemented("not yet"))
    }
}
