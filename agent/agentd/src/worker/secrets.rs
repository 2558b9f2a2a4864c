//! The secrets of a job, on their way from the controller to the supervisor, which gives them to the command.
//!
//! Invariant: on a node they are only in memory, and only while a command is being started: no record and no log
//! contains them.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_model::{Fault, NodeId, ReplicaId};
use agent_proto::v1;
use agent_proto::v1::worker_client::WorkerClient;
use agent_shim::Hidden;
use tonic::transport::Channel;

/// How long the controller may take to answer.
const ANSWER: Duration = Duration::from_secs(20);

/// The result of a request.
pub(crate) enum Answer {
    /// The secrets, by variable.
    Are(BTreeMap<String, Hidden>),
    /// The controller refused to send them.
    Refused(Fault),
    /// The controller could not be reached.
    Away(String),
}

/// Asks the controller for the secrets of a replica. Clones share the connection.
#[derive(Debug, Clone)]
pub(crate) struct Secrets {
    controller: Channel,
    node: NodeId,
}

impl Secrets {
    pub(crate) fn new(controller: Channel, node: NodeId) -> Secrets {
        Secrets { controller, node }
    }

    /// Asks once; does not retry.
    pub(crate) async fn read(&self, replica: &ReplicaId) -> Answer {
        let request = v1::ReadSecretsRequest { node: self.node.to_string(), replica: replica.to_string() };
        let mut client = WorkerClient::new(self.controller.clone());
        match tokio::time::timeout(ANSWER, client.read_secrets(request)).await {
            Ok(Ok(answer)) => {
                let values = answer.into_inner().values;
                Answer::Are(values.into_iter().map(|(name, value)| (name, Hidden(value))).collect())
            }
            // An error of the controller itself has a fault in its details.
            Ok(Err(status)) if status.details().is_empty() => Answer::Away(status.message().to_owned()),
            Ok(Err(status)) => Answer::Refused(agent_proto::fault(&status)),
            Err(_) => Answer::Away(format!("it did not answer for {ANSWER:?}")),
        }
    }
}
