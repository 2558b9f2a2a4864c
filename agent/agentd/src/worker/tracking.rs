//! The tracking endpoint: the server at `MLFLOW_TRACKING_URI` for MLflow's client inside a job.
//!
//! Owns: an HTTP server on loopback that implements the part of MLflow's REST protocol that scripts use, for the jobs
//! that run here. Each request has its job's token and has access only to that job. Hides the protocol: for the rest
//! of the daemon, a script that uses MLflow appends lines to its tracking file, as any script may.
//!
//! Invariants: a record is on the disk, in that file, before the call is answered; the state of a run is the fold of
//! that file ([`book`]), so nothing is lost when the daemon ends; a call is never refused with a status on which
//! clients retry, because they retry for minutes (except for too many connections and calls: [`listener`], [`run`]);
//! artifacts never leave the job's folder ([`artifacts`]).
//!
//! Tasks: the future that [`Tracking::start`] returns, run by `roles`.

mod answer;
mod artifacts;
mod book;
mod calls;
mod listener;
mod models;
mod registry;
mod run;
mod search;
#[cfg(test)]
mod tests;
mod traces;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use agent_model::{Clock, ReplicaId};
use axum::Router;
use axum::extract::{ConnectInfo, FromRequestParts};
use axum::http::HeaderValue;
use axum::http::header::{AUTHORIZATION, CONNECTION};
use axum::http::request::Parts;
use axum::middleware::map_response;
use axum::response::Response;
use axum::routing::{delete, get, patch, post, put};
use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use answer::Refusal;
use listener::{ConnectionNumber, LimitedListener};
use run::Run;

use crate::limits::Connections;
use crate::open_connections::OpenConnections;

/// The most threads for the calls of all jobs together; the daemon needs others for its own work.
const THREADS: usize = 16;

/// How long calls in progress may take after the daemon begins to stop.
const LAST_CALLS: Duration = Duration::from_secs(2);

/// The endpoint. Clones share it.
#[derive(Clone)]
pub(crate) struct Tracking {
    address: SocketAddr,
    clock: Arc<dyn Clock>,
    runs: Runs,
    threads: Arc<Semaphore>,
}

/// A run that the endpoint serves.
#[derive(Debug, Clone)]
pub(crate) struct TrackedRun {
    /// The replica of the run.
    pub(crate) replica: ReplicaId,
    /// The run's id, the name of the job.
    pub(crate) run_id: String,
    /// The secret in its requests (`MLFLOW_TRACKING_TOKEN`).
    pub(crate) token: String,
    /// The experiment's name; its id is [`experiment_id`] of it.
    pub(crate) experiment: String,
    /// Where records are appended.
    pub(crate) tracking_file: PathBuf,
    /// The stream of everything that was ever in that file.
    pub(crate) tracking_stream: PathBuf,
    /// The folder of logged artifacts; made for the first one.
    pub(crate) artifacts: PathBuf,
}

/// The id of an experiment (`MLFLOW_EXPERIMENT_ID`): up to 18 digits, made from its name.
pub(crate) fn experiment_id(name: &str) -> String {
    // FNV-1a: the id must not change between versions of the daemon.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash % 1_000_000_000_000_000_000).to_string()
}

impl Tracking {
    /// The endpoint on a loopback listener, and the future that serves it until `stop` completes, which the
    /// caller runs.
    pub(crate) fn start(
        listener: TcpListener,
        clock: Arc<dyn Clock>,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<(Tracking, impl Future<Output = ()> + Send + 'static)> {
        Tracking::start_with(listener, Connections::new(), clock, stop)
    }

    /// The same, with so many connections.
    fn start_with(
        listener: TcpListener,
        connections: Connections,
        clock: Arc<dyn Clock>,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<(Tracking, impl Future<Output = ()> + Send + 'static)> {
        let threads = Arc::new(Semaphore::new(THREADS));
        let places = OpenConnections::new(connections);
        let runs = Runs { by_token: Arc::default(), places: places.clone() };
        let tracking = Tracking { address: listener.local_addr()?, clock, runs, threads };
        let router = router(tracking.runs.clone());
        let serve = async move {
            let stop = stop.shared();
            let limited = LimitedListener::new(listener, places.clone());
            let router = router.layer(map_response(move |mut answer: Response| {
                if places.connections().are_scarce() {
                    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                std::future::ready(answer)
            }));
            let router = router.into_make_service_with_connect_info::<ConnectionNumber>();
            let serve = axum::serve(limited, router).with_graceful_shutdown(stop.clone());
            tokio::select! {
                _ = serve.into_future() => {} // it never fails
                () = stop.then(|()| tokio::time::sleep(LAST_CALLS)) => {}
            }
        };
        Ok((tracking, serve))
    }

    /// The port it listens at.
    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// Where it listens (`MLFLOW_TRACKING_URI`).
    pub(crate) fn uri(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Serves a run from now on, until the registration is dropped.
    pub(crate) fn register(&self, run: TrackedRun) -> Registration {
        let token = run.token.clone();
        tracing::debug!(replica = %run.replica, "serving tracking endpoint of job");
        let run = Arc::new(Run::new(run, self.clock.clone(), Arc::clone(&self.threads)));
        self.runs.by_token.lock().insert(token.clone(), run.clone());
        Registration { runs: self.runs.clone(), token, run }
    }
}

/// The run is served until this is dropped.
pub(crate) struct Registration {
    runs: Runs,
    token: String,
    run: Arc<Run>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut runs = self.runs.by_token.lock();
        if runs.get(&self.token).is_some_and(|run| Arc::ptr_eq(run, &self.run)) {
            runs.remove(&self.token);
        }
    }
}

/// The runs that are served, and the connections over which that is.
#[derive(Clone)]
struct Runs {
    by_token: Arc<Mutex<HashMap<String, Arc<Run>>>>,
    places: OpenConnections,
}

/// The run whose token is in a request.
struct Caller(Arc<Run>);

impl FromRequestParts<Runs> for Caller {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, runs: &Runs) -> Result<Caller, Refusal> {
        let header = parts.headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let token = header.and_then(|value| value.strip_prefix("Bearer ")).ok_or_else(Refusal::stranger)?;
        let run = runs.by_token.lock().get(token).cloned().ok_or_else(Refusal::stranger)?;
        if let Some(ConnectInfo(ConnectionNumber(number))) = parts.extensions.get() {
            runs.places.belongs(*number, &run.facts.replica.to_string());
        }
        Ok(Caller(run))
    }
}

fn router(runs: Runs) -> Router {
    let api = Router::new()
        .route("/runs/get", get(calls::get))
        .route("/runs/create", post(calls::create))
        .route("/runs/update", post(calls::update))
        .route("/runs/delete", post(calls::delete))
        .route("/runs/restore", post(calls::restore))
        .route("/runs/search", post(calls::search_runs))
        .route("/runs/log-metric", post(calls::log_metric))
        .route("/runs/log-parameter", post(calls::log_parameter))
        .route("/runs/log-batch", post(calls::log_batch))
        .route("/runs/set-tag", post(calls::set_tag))
        .route("/runs/delete-tag", post(calls::delete_tag))
        .route("/runs/log-inputs", post(calls::log_inputs))
        .route("/runs/log-model", post(calls::log_model))
        .route("/runs/outputs", post(calls::log_outputs))
        .route("/metrics/get-history", get(calls::history))
        .route("/experiments/get", get(calls::experiment_by_id))
        .route("/experiments/get-by-name", get(calls::experiment_by_name))
        .route("/experiments/create", post(calls::create_experiment))
        .route("/experiments/search", get(calls::search_experiments).post(calls::search_experiments))
        .route("/experiments/update", post(calls::label_experiment))
        .route("/experiments/set-experiment-tag", post(calls::label_experiment))
        .route("/experiments/delete", post(calls::delete_experiment))
        .route("/artifacts/list", get(calls::list_artifacts))
        .route("/logged-models", post(models::create))
        .route("/logged-models/search", post(models::search))
        .route("/logged-models/{id}", get(models::get).patch(models::finalize).delete(models::delete))
        .route("/logged-models/{id}/tags", patch(models::extend))
        .route("/logged-models/{id}/tags/{tag}", delete(models::delete_tag))
        .route("/logged-models/{id}/params", post(models::extend))
        .route("/logged-models/{id}/artifacts/directories", get(models::directory));
    let registered = Router::new()
        .route("/create", post(registry::create))
        .route("/get", get(registry::get))
        .route("/rename", post(registry::rename))
        .route("/update", patch(registry::update))
        .route("/delete", delete(registry::delete))
        .route("/search", get(registry::search_models))
        .route("/get-latest-versions", get(registry::latest).post(registry::latest))
        .route("/set-tag", post(registry::set_tag))
        .route("/delete-tag", delete(registry::delete_tag))
        .route("/alias", get(registry::by_alias).post(registry::set_alias).delete(registry::delete_alias));
    let versions = Router::new()
        .route("/create", post(registry::create_version))
        .route("/get", get(registry::get_version))
        .route("/update", patch(registry::update_version))
        .route("/delete", delete(registry::delete_version))
        .route("/search", get(registry::search_versions))
        .route("/get-download-uri", get(registry::download_uri))
        .route("/transition-stage", post(registry::set_stage))
        .route("/set-tag", post(registry::set_version_tag))
        .route("/delete-tag", delete(registry::delete_version_tag));
    let traces = Router::new()
        .route("/", post(traces::start))
        .route("/search", post(traces::search))
        .route("/{id}", get(traces::get))
        .route("/delete-traces", post(traces::delete))
        .route("/{id}/tags", patch(traces::tag).delete(traces::drop_tag))
        .route("/{id}/assessments", post(traces::assess))
        .route(
            "/{id}/assessments/{assessment}",
            get(traces::assessment).patch(traces::reassess).delete(traces::unassess),
        );
    let bytes = Router::new()
        .route("/artifacts", get(artifacts::list))
        .route("/artifacts/{*address}", put(artifacts::put).get(artifacts::fetch).delete(artifacts::delete));
    Router::new()
        .nest("/api/2.0/mlflow", api)
        .nest("/api/2.0/mlflow/registered-models", registered)
        .nest("/api/2.0/mlflow/model-versions", versions)
        // Clients of MLflow 3 make some of these calls under the older version.
        .nest("/api/2.0/mlflow/traces", traces.clone())
        .nest("/api/3.0/mlflow/traces", traces)
        .nest("/api/2.0/mlflow-artifacts", bytes)
        .fallback(async || Refusal::unknown_call())
        .with_state(runs)
}
