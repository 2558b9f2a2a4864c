//! The container engine of this machine, called so that its silence costs a caller no more than a deadline.
//!
//! Owns the connection and the agreement on a version of the engine's API. Hides that the engine may be restarted,
//! upgraded or frozen at any time: the next call connects anew.
//!
//! Invariants: each call has a deadline of its own; no answer is an error of its own ([`DockerError::Silent`],
//! [`DockerError::Absent`]) and never means that a container, or an image, does not exist.
//!
//! No tasks.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_model::causes;
use bollard::errors::Error;
use bollard::query_parameters::RemoveContainerOptionsBuilder;
use bollard::{API_DEFAULT_VERSION, Docker as Client};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// How long the engine may take to report which versions of its API it speaks.
const AGREE: Duration = Duration::from_secs(5);

/// Longer than any deadline of ours: the library must not give up before us.
const LIBRARY_DEADLINE: Duration = Duration::from_secs(24 * 3600);

/// A container engine; clones share its connection.
#[derive(Debug, Clone)]
pub struct Docker {
    socket: PathBuf,
    client: Arc<Mutex<Option<Client>>>,
}

/// An image on this machine, and what commands find in it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Image {
    /// The engine's ID of its content, `sha256:` and so on.
    pub id: String,
    /// Its name in the job, for people.
    pub reference: String,
    /// The variables that the image sets, `PATH` among them.
    pub env: BTreeMap<String, String>,
    /// Directories of this machine that are mounted into its containers at the same path, read-only.
    pub mounts: Vec<PathBuf>,
    /// Whether it is made for GPUs, if known.
    pub gpu: Option<bool>,
}

/// Why the engine did not do what it was asked.
#[derive(Debug, Clone, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum DockerError {
    #[error("no container engine answers at {}: {detail}", socket.display())]
    Absent { socket: PathBuf, detail: String },
    #[error("the container engine did not answer within {after:?} when asked to {step}")]
    Silent { step: &'static str, after: Duration },
    #[error("the container engine refused to {step}: {message}")]
    Refused {
        step: &'static str,
        /// The status of its answer, as in HTTP; 0 when it failed midway.
        status: u16,
        message: String,
    },
    #[error("the conversation with the container engine broke when asked to {step}: {detail}")]
    Broken { step: &'static str, detail: String },
}

impl DockerError {
    /// The engine answered that there is no such container, image or network.
    pub fn is_missing(&self) -> bool {
        matches!(self, DockerError::Refused { status: 404, .. })
    }

    /// The engine answered that there is a conflict: a name that is taken, a container that is being removed.
    pub fn is_conflict(&self) -> bool {
        matches!(self, DockerError::Refused { status: 409, .. })
    }

    /// There was no answer, so nothing is known: a later try may help.
    pub fn is_unknown(&self) -> bool {
        matches!(self, DockerError::Absent { .. } | DockerError::Silent { .. } | DockerError::Broken { .. })
    }

    /// A failure that a test planned.
    pub(crate) fn planned(step: &'static str) -> impl FnOnce(std::io::Error) -> DockerError {
        move |error| DockerError::Broken { step, detail: error.to_string() }
    }

    pub(crate) fn of(step: &'static str, error: Error) -> DockerError {
        match error {
            Error::DockerResponseServerError { status_code, message } => {
                DockerError::Refused { step, status: status_code, message }
            }
            Error::DockerStreamError { error } => DockerError::Refused { step, status: 0, message: error },
            other => DockerError::Broken { step, detail: causes::tell(&other) },
        }
    }
}

impl Docker {
    /// The engine behind a socket, which need not exist yet.
    pub fn at(socket: impl Into<PathBuf>) -> Docker {
        Docker { socket: socket.into(), client: Arc::default() }
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks the engine to do a `step`, and waits for the whole answer, but no longer than `within`.
    pub(crate) async fn ask<T, Answer>(
        &self,
        step: &'static str,
        within: Duration,
        call: impl FnOnce(Client) -> Answer,
    ) -> Result<T, DockerError>
    where
        Answer: Future<Output = Result<T, Error>>,
    {
        let client = self.client(step).await?;
        // Boxed: the library's futures are large.
        match tokio::time::timeout(within, Box::pin(call(client))).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(self.judge(step, error)),
            Err(_) => {
                self.forget();
                Err(DockerError::Silent { step, after: within })
            }
        }
    }

    /// Waits until the engine answers.
    pub(crate) async fn ping(&self, within: Duration) -> Result<(), DockerError> {
        self.ask("say that it is there", within, |client| async move { client.ping().await }).await.map(drop)
    }

    /// Removes a container with its volumes; one that does not exist, or is being removed, is no error.
    pub(crate) async fn remove_container(&self, key: &str, within: Duration) -> Result<(), DockerError> {
        let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
        let remove = |client: Client| async move { client.remove_container(key, Some(options)).await };
        match self.ask("remove a container", within, remove).await {
            Err(error) if error.is_missing() || error.is_conflict() => Ok(()),
            result => result,
        }
    }

    /// A connection with an agreed version.
    pub(crate) async fn client(&self, step: &'static str) -> Result<Client, DockerError> {
        let known = self.client.lock().clone();
        if let Some(client) = known {
            return Ok(client);
        }
        let connect = Client::connect_with_unix(
            &self.socket.to_string_lossy(),
            LIBRARY_DEADLINE.as_secs(),
            API_DEFAULT_VERSION,
        )
        .map_err(|error| self.absent(&error))?;
        let agreed = tokio::time::timeout(AGREE, connect.negotiate_version()).await;
        let client = agreed
            .map_err(|_| DockerError::Silent { step, after: AGREE })?
            .map_err(|error| self.judge(step, error))?;
        *self.client.lock() = Some(client.clone());
        Ok(client)
    }

    /// Translates an error of the library. After one that is no answer the next call connects anew: the engine may be
    /// another one by then.
    pub(crate) fn judge(&self, step: &'static str, error: Error) -> DockerError {
        if is_nobody(&error) {
            self.forget();
            return self.absent(&error);
        }
        let judged = DockerError::of(step, error);
        let outdated = |message: &str| message.contains("client version");
        match &judged {
            DockerError::Refused { status: 400, message, .. } if outdated(message) => self.forget(),
            DockerError::Refused { .. } => {}
            _ => self.forget(),
        }
        judged
    }

    fn absent(&self, error: &Error) -> DockerError {
        DockerError::Absent { socket: self.socket.clone(), detail: causes::tell(error) }
    }

    fn forget(&self) {
        *self.client.lock() = None;
    }
}

/// Nobody listens at the socket, or this user may not connect.
fn is_nobody(error: &Error) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied};
    causes(error).any(|cause| {
        let kind = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        matches!(kind, Some(NotFound | ConnectionRefused | PermissionDenied))
    })
}
