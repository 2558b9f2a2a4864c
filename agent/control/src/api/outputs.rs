//! Outputs on request: of a job that ended without them, from the directory that its node keeps for a while; of a job
//! that runs, what it has written so far.
//!
//! A user asks for them ([`Services::store_outputs`]), the node gets an order, and its report
//! ([`Services::take_outputs`]) is returned to the user. Outputs of a job that ended are recorded, too; the verdict of
//! the job does not change. Those of a job that runs are only in the store, which removes them like anything that
//! nobody needs: not while they were used a moment ago. A job that resumes its outputs needs the last of them.

use agent_model::{Artifacts, Blame, Code, Fault, JobId, JobState, NodeId, Outcome, ReplicaId};
use agent_proto::v1;
use tonic::Status;

use super::{Caller, Refusal, Services, invalid};
use crate::pins;
use crate::queue::{StoredOutputs, WantedOutputs};
use crate::store::{JobRecord, ReplicaRecord};

impl Services {
    /// Has the outputs of a job stored; answers when its nodes have done it, or could not.
    pub(super) async fn store_outputs(
        &self,
        request: v1::StoreOutputsRequest,
        caller: &Caller,
    ) -> Result<v1::StoreOutputsResponse, Refusal> {
        let id: JobId = request.job.parse()?;
        let job = self.owned(&id, caller).await?.job;
        tracing::info!(job = %id, who = %caller, "asked to store outputs");
        match job.state {
            JobState::Running | JobState::Finalizing(_) | JobState::NotResponding(_) => {
                self.so_far(&job).await
            }
            state if state.is_terminal() => self.after_its_end(&id, &job).await,
            _ => Err(invalid(format!("{id} has not started yet: it has no outputs")).into()),
        }
    }

    async fn after_its_end(&self, id: &JobId, job: &JobRecord) -> Result<v1::StoreOutputsResponse, Refusal> {
        let Some(held) = job.replicas.first() else {
            return Err(unkept(id, "no node has anything of its last attempt").into());
        };
        let wanted = wanted(job, held, false);
        let StoredOutputs { artifacts, left_out } = self.stored(wanted).await?;
        let (files, bytes) = artifacts.map_or((0, 0), |stored| (stored.files, stored.bytes));
        Ok(v1::StoreOutputsResponse { files, bytes, so_far: Vec::new(), left_out })
    }

    async fn so_far(&self, job: &JobRecord) -> Result<v1::StoreOutputsResponse, Refusal> {
        let ranks = job.replicas.iter().map(|held| async {
            let StoredOutputs { artifacts, left_out } = self.stored(wanted(job, held, true)).await?;
            let artifacts = artifacts.map(Into::into);
            Ok::<_, Refusal>(v1::OutputsSoFar { rank: held.rank, artifacts, left_out })
        });
        let so_far = futures_util::future::try_join_all(ranks).await?;
        Ok(v1::StoreOutputsResponse { so_far, ..Default::default() })
    }

    /// Orders a node to store outputs, and waits for its report.
    async fn stored(&self, wanted: WantedOutputs) -> Result<StoredOutputs, Refusal> {
        let node = wanted.node.clone();
        let Some(told) = self.queue.want_outputs(wanted).await? else {
            return Err(Fault::new(
                Code::NodeLost,
                format!("{node}, which keeps the outputs, is not connected"),
            )
            .fix("see with `agentctl nodes` when it is, and try again")
            .into());
        };
        Ok(told.await.map_err(|_| Refusal::Stopping)??)
    }

    /// Takes in the report of a node about outputs that it was to store.
    pub(super) async fn take_outputs(&self, request: v1::ReportOutputsRequest) -> Result<(), Status> {
        let replica: ReplicaId = request.replica.parse().map_err(Refusal::from)?;
        let node: NodeId = request.node.parse().map_err(Refusal::from)?;
        let fault = request.fault.map(Fault::try_from).transpose().map_err(Refusal::from)?;
        let artifacts = request.artifacts.map(Artifacts::try_from).transpose().map_err(Refusal::from)?;
        let stored = match fault {
            Some(fault) => Err(fault),
            None => Ok(StoredOutputs { artifacts, left_out: request.left_out }),
        };
        let stored = match stored {
            Ok(stored) if !request.running => self.record_outputs(&replica, &node, stored).await?,
            stored => stored,
        };
        if let Ok(StoredOutputs { artifacts: Some(artifacts), .. }) = &stored
            && request.running
        {
            self.keep_so_far(&replica, &node, *artifacts).await?;
        }
        let wanted = WantedOutputs { replica, node, running: request.running };
        self.queue.tell_outputs(wanted, stored).await.map_err(Refusal::from)?;
        Ok(())
    }

    /// Keeps what a running job stored of its outputs, if the next attempt may need it.
    async fn keep_so_far(&self, replica: &ReplicaId, node: &NodeId, stored: Artifacts) -> Result<(), Status> {
        // From here until it is on disk no blob of it is removed.
        let _relied = self.collector.rely_on(vec![pins::of_outputs(stored)]).await;
        let missing = self.first_missing(&[stored.root]).await;
        if missing.map_err(|error| Refusal::from(super::unsearched(&error)))?.is_none() {
            self.queue.note_so_far(replica, node, stored).await.map_err(Refusal::from)?;
        }
        Ok(())
    }

    /// Records the outputs of a job that ended; what the user is told of them.
    async fn record_outputs(
        &self,
        replica: &ReplicaId,
        node: &NodeId,
        stored: StoredOutputs,
    ) -> Result<Result<StoredOutputs, Fault>, Status> {
        let mut job = self.ended_on(replica, node).await?;
        let (Some(artifacts), Some(outcome)) = (stored.artifacts, &mut job.outcome) else {
            return Ok(Ok(StoredOutputs { artifacts: None, ..stored }));
        };
        outcome.left_out.clone_from(&stored.left_out);
        let outcome = Outcome { artifacts: Some(artifacts), ..outcome.clone() };
        // From here until the outcome is on disk no blob that it names is removed.
        let _relied = self.collector.rely_on(pins::of_outcome(&outcome)).await;
        if let Err(status) = self.require_outputs(&outcome).await {
            return Ok(Err(agent_proto::fault(&status)));
        }
        self.queue.outputs_stored(job, node.clone(), artifacts).await.map_err(Refusal::from)?;
        Ok(Ok(stored))
    }

    /// The job that ended with this replica on this node.
    async fn ended_on(&self, replica: &ReplicaId, node: &NodeId) -> Result<JobRecord, Refusal> {
        let job = self.on_record(&replica.job).await?;
        let ours = |held: &ReplicaRecord| held.rank == replica.rank && held.node == *node;
        match job.state.is_terminal() && job.epoch == replica.epoch && job.replicas.iter().any(ours) {
            true => Ok(job),
            false => Err(Fault::new(Code::Fenced, format!("`{replica}` did not end its job")).into()),
        }
    }
}

fn wanted(job: &JobRecord, held: &ReplicaRecord, running: bool) -> WantedOutputs {
    WantedOutputs { replica: job.replica(held.rank), node: held.node.clone(), running }
}

fn unkept(job: &JobId, why: &str) -> Fault {
    let fault = Fault::new(Code::OutputsUnstored, format!("the outputs of {job} cannot be stored"));
    Fault { blame: Blame::Node, ..fault }.why(why).fix("submit the job again")
}
