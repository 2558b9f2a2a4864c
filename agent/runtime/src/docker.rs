//! The container engine of this machine, asked so that its silence costs nobody more than a deadline.
//!
//! Owns the connection and the agreement on a version of the engine's interface. Hides that the engine is
//! restarted, upgraded or frozen under our hands: what is asked next connects anew.
//!
//! Invariants: each question has a deadline of its own; silence is an error that says so ([`DockerError::Silent`],
//! [`DockerError::Absent`]) and never means that a container, or an image, is not there.
//!
//! No tasks.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_model::causes;
use bollard::errors::Error;
use bollard::query_parameters::RemoveContainerOptionsBuilder;
use bollard::{API_DEFAULT_VERSION, Docker as Client};
use parking_lot::Mutex;

/// How long the engine may take to say which versions of its interface it speaks.
const AGREE: Duration = Duration::from_secs(5);

/// More than any deadline of ours: the library must not give up before us.
const LIBRARY_DEADLINE: Duration = Duration::from_secs(24 * 3600);

/// A container engine; clones are the same one.
#[derive(Debug, Clone)]
pub struct Docker {
    socket: PathBuf,
    client: Arc<Mutex<Option<Client>>>,
}

/// Why the engine did not do what it was asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DockerError {
    /// Nobody listens at the socket, or this user may not ask.
    #[error("no container engine answers at {}: {detail}", socket.display())]
    Absent {
        /// The socket.
        socket: PathBuf,
        /// What the system says.
        detail: String,
    },
    /// It did not answer in time. Nothing is known.
    #[error("the container engine did not answer within {after:?} when asked to {step}")]
    Silent {
        /// What was asked.
        step: &'static str,
        /// How long it was waited for.
        after: Duration,
    },
    /// It answered that it would not.
    #[error("the container engine refused to {step}: {message}")]
    Refused {
        /// What was asked.
        step: &'static str,
        /// The status of its answer, as of HTTP; 0 when it failed midway.
        status: u16,
        /// Its words.
        message: String,
    },
    /// The conversation broke.
    #[error("the conversation with the container engine broke when asked to {step}: {detail}")]
    Broken {
        /// What was asked.
        step: &'static str,
        /// How.
        detail: String,
    },
}

impl DockerError {
    /// The engine answered that there is no such container, image or network.
    pub fn is_missing(&self) -> bool {
        matches!(self, DockerError::Refused { status: 404, .. })
    }

    /// The engine answered that something is in the way: a name that is taken, a container that is being removed.
    pub fn is_conflict(&self) -> bool {
        matches!(self, DockerError::Refused { status: 409, .. })
    }

    /// Nothing was answered, so nothing is known: asking again later may help.
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
    /// The engine behind a socket, which need not be there yet.
    pub fn at(socket: impl Into<PathBuf>) -> Docker {
        Docker { socket: socket.into(), client: Arc::default() }
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks the engine to do a `step`, and waits for the whole answer for as long as `within`.
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

    /// Waits until the engine says that it is there.
    pub(crate) async fn ping(&self, within: Duration) -> Result<(), DockerError> {
        self.ask("say that it is there", within, |client| async move { client.ping().await }).await.map(drop)
    }

    /// Removes a container with all that is in it; one that is not there, or is being removed, is fine.
    pub(crate) async fn remove_container(&self, key: &str, within: Duration) -> Result<(), DockerError> {
        let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
        let remove = |client: Client| async move { client.remove_container(key, Some(options)).await };
        match self.ask("remove a container", within, remove).await {
            Err(error) if error.is_missing() || error.is_conflict() => Ok(()),
            result => result,
        }
    }

    /// A connection that speaks a version both sides know.
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

    /// What an error of the library means. After one that is no answer everything is agreed on anew: the engine
    /// may be another one by then.
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

/// Nobody listens at the socket, or not to this user.
fn is_nobody(error: &Error) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied};
    causes(error).any(|cause| {
        let kind = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        matches!(kind, Some(NotFound | ConnectionRefused | PermissionDenied))
    })
}
