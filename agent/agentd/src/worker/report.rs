//! Delivers outcomes, effectively exactly once: repeats each until the controller has answered.
//!
//! Hides: retries and the meaning of refusals. The idempotency key is the replica's id, which holds the epoch.

use std::sync::Arc;
use std::time::Duration;

use agent_model::{Artifacts, Code, Fault, NodeId, Outcome, ReplicaId, failpoint};
use agent_proto::v1;
use agent_proto::v1::worker_client::WorkerClient;
use tonic::Status;
use tonic::transport::Channel;
use tracing::{debug, info};

use super::backoff::Backoff;

/// How long the controller may take to answer: it syncs its disk, and may be busy.
const ANSWER: Duration = Duration::from_secs(20);

/// Which outputs of a replica the controller asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum OutputsWanted {
    /// Those of a replica that has ended.
    AfterItsEnd,
    /// Those so far of a replica that runs.
    SoFar,
}

/// Outputs that were stored on request.
#[derive(Debug)]
pub(crate) struct StoredOutputs {
    /// `None` where there was nothing to store.
    pub(crate) artifacts: Option<Artifacts>,
    /// What could not be stored, each path with the reason.
    pub(crate) left_out: Vec<String>,
}

/// The controller's answer to an outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivered {
    /// It has stored it.
    Stored,
    /// It does not want it: a later attempt has taken over, or the job is unknown.
    Fenced,
    /// It lacks bytes of a log that it had acknowledged; they must be sent again first.
    Incomplete,
}

/// Delivers outcomes over one connection. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Outbox {
    controller: Channel,
    node: Arc<NodeId>,
}

impl Outbox {
    pub(crate) fn new(controller: Channel, node: NodeId) -> Outbox {
        Outbox { controller, node: Arc::new(node) }
    }

    /// The name of this node.
    pub(crate) fn node(&self) -> &NodeId {
        &self.node
    }

    /// Reports the result of storing outputs later, once: the order is repeated as long as somebody waits for it.
    pub(crate) async fn tell_outputs(
        &self,
        replica: &ReplicaId,
        wanted: OutputsWanted,
        stored: Result<StoredOutputs, Box<Fault>>,
    ) {
        let mut request = v1::ReportOutputsRequest {
            node: self.node.to_string(),
            replica: replica.to_string(),
            running: wanted == OutputsWanted::SoFar,
            ..Default::default()
        };
        match stored {
            Ok(StoredOutputs { artifacts, left_out }) => {
                request.artifacts = artifacts.map(Into::into);
                request.left_out = left_out;
            }
            Err(fault) => request.fault = Some((*fault).into()),
        }
        let mut client = WorkerClient::new(self.controller.clone());
        if let Err(status) = client.report_outputs(request).await {
            info!(%status, "cannot report outputs: refused");
        }
    }

    /// Delivers an outcome. Returns when the controller has answered, however long that takes; `waits` is called with
    /// each error until then.
    pub(crate) async fn deliver(
        &self,
        replica: &ReplicaId,
        outcome: &Outcome,
        waits: impl Fn(&str),
    ) -> Delivered {
        let request = v1::ReportOutcomeRequest {
            node: self.node.to_string(),
            replica: replica.to_string(),
            outcome: Some(outcome.clone().into()),
        };
        let mut client = WorkerClient::new(self.controller.clone());
        let mut backoff = Backoff::default();
        loop {
            let told = async {
                failpoint::hit("node.outcome.deliver")
                    .map_err(|error| Status::unavailable(error.to_string()))?;
                client.report_outcome(request.clone()).await
            };
            // Without an answer in time, the result is unknown, so it is sent again.
            let status = match tokio::time::timeout(ANSWER, told).await {
                Ok(Ok(_)) => return Delivered::Stored,
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded(format!("no answer for {ANSWER:?}")),
            };
            match answer(&status) {
                Some(delivered) => {
                    info!(%replica, ?delivered, %status, "cannot deliver outcome: refused");
                    return delivered;
                }
                None => {
                    let wait = backoff.next();
                    debug!(%replica, %status, ?wait, "cannot deliver outcome yet");
                    waits(status.message());
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }
}

/// The meaning of a refusal; `None` when it is not about the outcome.
fn answer(status: &Status) -> Option<Delivered> {
    match (agent_proto::fault(status).code, status.code()) {
        (Code::Fenced | Code::JobNotFound, _) => Some(Delivered::Fenced),
        (_, tonic::Code::FailedPrecondition) => Some(Delivered::Incomplete),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_only_an_answer_about_the_outcome_ends_the_delivery() {
        let fenced = agent_proto::status(&Fault::new(Code::Fenced, "an earlier attempt"));
        assert_eq!(answer(&fenced), Some(Delivered::Fenced));
        assert_eq!(answer(&Status::failed_precondition("the log lacks bytes")), Some(Delivered::Incomplete));
        for status in
            [Status::unavailable("gone"), Status::internal("bug"), Status::deadline_exceeded("slow")]
        {
            assert_eq!(answer(&status), None, "{status}");
        }
    }
}
