//! The tracking endpoint. (Signatures first; the bodies follow.)

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use agent_model::{Clock, ReplicaId};
use tokio::net::TcpListener;

/// The endpoint; clones are the same endpoint.
#[derive(Clone)]
pub(crate) struct Tracking {
    address: SocketAddr,
}

/// A run the endpoint answers for.
#[derive(Debug, Clone)]
pub(crate) struct TrackedRun {
    /// Whose run it is.
    pub(crate) replica: ReplicaId,
    /// The run's id, the name of the job.
    pub(crate) run_id: String,
    /// The secret its requests carry (`MLFLOW_TRACKING_TOKEN`).
    pub(crate) token: String,
    /// The experiment's name; its id is [`experiment_id`] of it.
    pub(crate) experiment: String,
    /// Where records are appended.
    pub(crate) tracking_file: PathBuf,
    /// Where logged artifacts are stored; made when the first one comes.
    pub(crate) artifacts: PathBuf,
}

/// The run is answered for while this lives.
pub(crate) struct Registration;

/// The id of an experiment (`MLFLOW_EXPERIMENT_ID`), made from its name.
pub(crate) fn experiment_id(name: &str) -> String {
    name.to_owned()
}

impl Tracking {
    /// The endpoint on a loopback listener, and the future that serves it until `stop` completes; the caller
    /// runs it.
    pub(crate) fn start(
        listener: TcpListener,
        clock: Arc<dyn Clock>,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> std::io::Result<(Tracking, impl Future<Output = ()> + Send + 'static)> {
        let _ = clock;
        let address = listener.local_addr()?;
        Ok((Tracking { address }, stop))
    }

    /// Where it listens (`MLFLOW_TRACKING_URI`).
    pub(crate) fn uri(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Answers for a run from now on.
    pub(crate) fn register(&self, run: TrackedRun) -> Registration {
        let _ = run;
        Registration
    }
}
