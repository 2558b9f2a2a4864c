//! A job into the queue, and what the daemon stored for jobs as text.

use std::time::Duration;

use agent_cas::BlobStore;
use agent_model::{Code, Digest, Fault, JobSpec};
use agent_proto::v1;
use tokio::time::Instant;

use super::{Client, answer};
use crate::failure::Failure;
use crate::output::Output;

/// How long a daemon that went away while a job is submitted may stay away.
const PATIENCE: Duration = Duration::from_secs(30);

impl Client {
    /// Puts the job into the queue. The request has an id, so that a repeated request submits only once.
    pub(crate) async fn enqueue(
        &self,
        spec: JobSpec,
        name_hint: String,
        output: &mut Output,
    ) -> Result<String, Failure> {
        let request = v1::SubmitRequest { request_id: random_id()?, spec: Some(spec.into()), name_hint };
        let end = Instant::now() + PATIENCE;
        loop {
            match Box::pin(answer(self.jobs().submit(request.clone()))).await {
                Ok(response) => {
                    response.notes.iter().for_each(|note| output.warn(note));
                    return Ok(response.job);
                }
                Err(Failure::Fault(fault)) if fault.code == Code::Unreachable => {
                    if !self.until_back(end).await {
                        return Err(Failure::Fault(fault));
                    }
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// A blob as text.
    pub(crate) async fn text(&self, digest: Digest) -> Result<String, Failure> {
        let read = self.blobs().read_batch(vec![digest]).await.into_iter().next();
        match read {
            Some(Ok(bytes)) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Some(Err(error)) => {
                let what = "the daemon does not give what it stored of the environment";
                let fault = Fault::new(Code::SnapshotStore, what);
                Err(fault.because(&error).fix("see the daemon's log").into())
            }
            None => Ok(String::new()),
        }
    }
}

fn random_id() -> Result<String, Fault> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Fault::new(Code::Bug, "the system gives no random numbers").because(&error))?;
    Ok(agent_model::ids::hex(&bytes))
}
