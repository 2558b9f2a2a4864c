//! `Secrets`: users store their own, and nodes read those of the jobs they run.
//!
//! A value is returned to nodes only.

use std::collections::BTreeMap;

use agent_model::{Code, Fault, JobSpec, NodeId, Principal, ReplicaId};
use agent_proto::v1;
use tonic::{Request, Response, Status};

use super::pages::Page;
use super::{Caller, Refusal, Services, unknown_job};
use crate::queue::Standing;
use crate::secrets::{SecretError, Secrets};

impl From<SecretError> for Refusal {
    fn from(error: SecretError) -> Refusal {
        let fix = match &error {
            SecretError::Name(_) => {
                "use at most 100 letters, digits, `_`, `-` and `.`, not starting with `.`"
            }
            SecretError::Value => {
                "put what is larger, or no text, into a file that the job reads as its user"
            }
            SecretError::Together(_) => {
                "name fewer, or put what is large into a file that the job reads as its user"
            }
            SecretError::Many => "remove some with `agentctl secret rm`",
            SecretError::Unknown(_) => {
                "set it with `agentctl secret set NAME`; `agentctl secret list` shows yours"
            }
            SecretError::Store { .. } => "look for a full or failing disk in the daemon's log",
        };
        let code = match &error {
            SecretError::Store { .. } => Code::ControllerStore,
            SecretError::Together(_) => Code::JobTooLarge,
            _ => Code::JobInvalid,
        };
        let what = error.to_string();
        let why = std::error::Error::source(&error).map(ToString::to_string);
        why.into_iter().fold(Fault::new(code, what).fix(fix), Fault::why).into()
    }
}

impl Services {
    pub(super) async fn with_secrets<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Secrets) -> Result<T, SecretError> + Send + 'static,
    ) -> Result<T, Refusal> {
        let secrets = self.secrets.clone();
        Ok(agent_blocking::blocking(move || work(&secrets)).await?)
    }

    /// Every secret that a job or a step of it names must exist for its owner before the job counts as submitted.
    pub(super) async fn require_secrets(&self, spec: &JobSpec, owner: &Principal) -> Result<(), Refusal> {
        let of_steps = spec.steps().map(|step| step.secrets.clone());
        let named: Vec<_> = std::iter::once(spec.secrets.clone()).chain(of_steps).collect();
        let owner = owner.clone();
        let look = move |secrets: &Secrets| {
            named.iter().try_for_each(|named| secrets.of_job(&owner, named).map(drop))
        };
        self.with_secrets(look).await
    }

    /// The secrets of a replica, for the node that is to run it.
    pub(super) async fn secrets_of(
        &self,
        request: v1::ReadSecretsRequest,
    ) -> Result<v1::ReadSecretsResponse, Refusal> {
        let replica: ReplicaId = request.replica.parse()?;
        let node: NodeId = request.node.parse()?;
        if self.queue.standing(&replica, &node).await? != Standing::Open {
            return Err(Fault::new(Code::Fenced, format!("`{replica}` is not this node's to run")).into());
        }
        let view = self.queue.job(&replica.job).await?.ok_or_else(|| unknown_job(&replica.job))?;
        let job = view.job;
        if job.rank(replica.rank).is_some_and(|rank| rank.adopted) && !job.spec.secrets.is_empty() {
            let what = format!("`{replica}` was taken over from what its node showed, and gets no secrets");
            return Err(Fault::new(Code::Fenced, what).into());
        }
        let read = move |secrets: &Secrets| {
            job.owner().map_or(Ok(BTreeMap::new()), |owner| secrets.of_job(owner, &job.spec.secrets))
        };
        let values = self.with_secrets(read).await?;
        Ok(v1::ReadSecretsResponse { values: values.into_iter().collect() })
    }
}

#[tonic::async_trait]
impl v1::secrets_server::Secrets for Services {
    async fn set(
        &self,
        request: Request<v1::SetSecretRequest>,
    ) -> Result<Response<v1::SetSecretResponse>, Status> {
        let owner = Caller::of(&request)?.who().clone();
        let v1::SetSecretRequest { name, value } = request.into_inner();
        self.with_secrets(move |secrets| secrets.set(&owner, &name, &value)).await?;
        Ok(Response::new(v1::SetSecretResponse {}))
    }

    async fn list(
        &self,
        request: Request<v1::ListSecretsRequest>,
    ) -> Result<Response<v1::ListSecretsResponse>, Status> {
        let owner = Caller::of(&request)?.who().clone();
        let after = request.into_inner().after;
        let list = self.with_secrets(move |secrets| secrets.list(&owner)).await?;
        let secrets = list.into_iter().map(|(name, set)| v1::SecretName { name, set_ms: set.0 });
        let page = Page::after(&after, secrets, |secret| secret.name.clone());
        Ok(Response::new(v1::ListSecretsResponse { secrets: page.entries, more: page.more }))
    }

    async fn remove(
        &self,
        request: Request<v1::RemoveSecretRequest>,
    ) -> Result<Response<v1::RemoveSecretResponse>, Status> {
        let owner = Caller::of(&request)?.who().clone();
        let name = request.into_inner().name;
        self.with_secrets(move |secrets| secrets.remove(&owner, &name)).await?;
        Ok(Response::new(v1::RemoveSecretResponse {}))
    }
}
