//! Storing outputs later: of a job that ended without them, from the directory that its node keeps for a while.
//!
//! A user asks for them ([`Services::store_outputs`]), the node gets an order, and its report
//! ([`Services::take_outputs`]) is stored and returned to the user. The verdict of the job does not change.

use agent_model::{Artifacts, Blame, Code, Fault, JobId, NodeId, Outcome, ReplicaId};
use agent_proto::v1;
use tonic::Status;

use super::{Caller, Refusal, Services, invalid};
use crate::pins;
use crate::store::JobRecord;

impl Services {
    /// Has the outputs of a job stored; answers when its node has done it, or could not.
    pub(super) async fn store_outputs(
        &self,
        request: v1::StoreOutputsRequest,
        caller: &Caller,
    ) -> Result<v1::StoreOutputsResponse, Refusal> {
        let id: JobId = request.job.parse()?;
        let job = self.owned(&id, caller).await?.job;
        if !job.state.is_terminal() {
            return Err(invalid(format!("{id} has not ended: its node stores the outputs by itself")).into());
        }
        let Some(held) = job.replicas.first() else {
            return Err(unkept(&id, "no node has anything of its last attempt").into());
        };
        let (replica, node) = (job.replica(held.rank), held.node.clone());
        tracing::info!(%replica, %node, who = %caller, "asked to store outputs");
        let Some(told) = self.queue.want_outputs(replica, node.clone()).await? else {
            return Err(Fault::new(
                Code::NodeLost,
                format!("{node}, which keeps the outputs, is not connected"),
            )
            .fix("see with `agentctl nodes` when it is, and try again")
            .into());
        };
        let stored = told.await.map_err(|_| Refusal::Stopping)??;
        Ok(stored.map_or_else(Default::default, |stored| v1::StoreOutputsResponse {
            files: stored.files,
            bytes: stored.bytes,
        }))
    }

    /// Takes in the report of a node about outputs that it was to store.
    pub(super) async fn take_outputs(&self, request: v1::ReportOutputsRequest) -> Result<(), Status> {
        let replica: ReplicaId = request.replica.parse().map_err(Refusal::from)?;
        let node: NodeId = request.node.parse().map_err(Refusal::from)?;
        let fault = request.fault.map(Fault::try_from).transpose().map_err(Refusal::from)?;
        let artifacts = request.artifacts.map(Artifacts::try_from).transpose().map_err(Refusal::from)?;
        let job = self.ended_on(&replica, &node).await?;
        let stored = match (fault, artifacts, job.outcome.clone()) {
            (Some(fault), ..) => Err(fault),
            (None, Some(artifacts), Some(outcome)) => {
                let outcome = Outcome { artifacts: Some(artifacts), ..outcome };
                // From here until the outcome is on disk no blob that it names is removed.
                let _relied = self.collector.rely_on(pins::of_outcome(&outcome).into_iter().collect()).await;
                match self.require_outputs(&outcome).await {
                    Err(status) => Err(agent_proto::fault(&status)),
                    Ok(()) => {
                        self.queue.outputs_stored(job, node, artifacts).await.map_err(Refusal::from)?;
                        Ok(Some(artifacts))
                    }
                }
            }
            (None, ..) => Ok(None),
        };
        self.queue.tell_outputs(replica, stored).await.map_err(Refusal::from)?;
        Ok(())
    }

    /// The job that ended with this replica on this node.
    async fn ended_on(&self, replica: &ReplicaId, node: &NodeId) -> Result<JobRecord, Refusal> {
        let job = self.on_record(&replica.job).await?;
        let ours = |held: &crate::store::ReplicaRecord| held.rank == replica.rank && held.node == *node;
        match job.state.is_terminal() && job.epoch == replica.epoch && job.replicas.iter().any(ours) {
            true => Ok(job),
            false => Err(Fault::new(Code::Fenced, format!("`{replica}` did not end its job")).into()),
        }
    }
}

fn unkept(job: &JobId, why: &str) -> Fault {
    let fault = Fault::new(Code::OutputsUnstored, format!("the outputs of {job} cannot be stored"));
    Fault { blame: Blame::Node, ..fault }.why(why).fix("submit the job again")
}
