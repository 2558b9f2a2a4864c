//! Numbers of this daemon for Prometheus, at `http://127.0.0.1:PORT/metrics`.
//!
//! Owns the listener, which is on loopback, and the numbers about this machine ([`NodePage`]); those of the controller
//! are [`Vitals`]. Nothing listens unless `metrics_listen` is set.
//!
//! Invariants: a page is made of what is in memory, beside two reads of files: it asks neither the controller nor a
//! driver, and is answered while they are stuck. At most [`CONNECTIONS`] are served at a time, each for at most
//! [`WITHIN`]; what comes beyond waits. Labels have few values: a job is named on the page of its node alone, while it
//! runs there, and no user anywhere.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use agent_control::Vitals;
use agent_identity::Credentials;
use agent_model::ReplicaId;
use agent_model::exposition::{CONTENT_TYPE, MetricsPage, NumberKind};
use agent_shim::cgroup::GroupUsage;
use futures_util::FutureExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::config::identity_file;
use crate::supervisor::{Supervisor, TaskKind};
use crate::worker::Worker;
use crate::worker::gpus::GpuNumbers;

/// How long a connection is served, with its request.
const WITHIN: Duration = Duration::from_secs(5);
/// How long a page waits for the disk of the state directory.
const DISK_WITHIN: Duration = Duration::from_secs(1);
/// How many are served at a time.
const CONNECTIONS: usize = 16;
/// The longest head of a request, in bytes.
const HEAD: usize = 8 << 10;
/// How often the controller is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// The wait after a failed accept.
const PAUSE: Duration = Duration::from_millis(100);

/// The numbers of this daemon. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Numbers {
    /// Of the controller, once it is there, if this is one.
    pub(crate) controller: Arc<OnceLock<Vitals>>,
    /// Of the node, once it is there, if this is one.
    pub(crate) node: Arc<OnceLock<NodePage>>,
}

/// The numbers of this machine.
#[derive(Clone)]
pub(crate) struct NodePage {
    worker: Arc<Worker>,
    identity: PathBuf,
    /// One look at the disk at a time.
    looks: Arc<Semaphore>,
}

/// Serves them where the configuration says, if it does. Whatever is there by then is shown.
pub(crate) fn serve(place: Option<SocketAddr>, numbers: Numbers, supervisor: &Supervisor) {
    let Some(place) = place else { return };
    if let Some(vitals) = numbers.controller.get().cloned() {
        supervisor.spawn_again(TaskKind::Upkeep, "numbers of the controller", move || look(vitals.clone()));
    }
    // A port that somebody else has is no reason to run no jobs: it is tried again.
    supervisor.spawn_again(TaskKind::Upkeep, "metrics", move || listen(place, numbers.clone()));
}

async fn look(vitals: Vitals) {
    loop {
        vitals.look().await;
        sleep(LOOK_EVERY).await;
    }
}

async fn listen(place: SocketAddr, numbers: Numbers) {
    let listener = match TcpListener::bind(place).await {
        Ok(listener) => listener,
        Err(error) => return warn!(%place, %error, "cannot serve metrics: trying again"),
    };
    info!(%place, "serving metrics");
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let mut served = JoinSet::new();
    loop {
        // The semaphore is never closed.
        let held = places.clone().acquire_owned().await;
        while served.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                let numbers = numbers.clone();
                let one = async move {
                    if let Ok(Err(error)) = timeout(WITHIN, answer(stream, &numbers)).await {
                        debug!(%error, "cannot answer with metrics");
                    }
                    drop(held);
                };
                served.spawn(one.boxed());
            }
            Err(error) => {
                warn!(%error, "cannot accept connection for metrics");
                sleep(PAUSE).await;
            }
        }
    }
}

/// Answers one request, and closes the connection.
async fn answer(mut stream: TcpStream, numbers: &Numbers) -> io::Result<()> {
    let head = head(&mut stream).await?;
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let (status, kind, body) = match wanted(line) {
        MetricsRequest::Page => ("200 OK", CONTENT_TYPE, numbers.page().await),
        MetricsRequest::Elsewhere => ("404 Not Found", PLAIN, "the numbers are at /metrics\n".to_owned()),
        MetricsRequest::Otherwise => ("405 Method Not Allowed", PLAIN, "only GET is answered\n".to_owned()),
    };
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

const PLAIN: &str = "text/plain; charset=utf-8";

/// What a request asks for.
#[derive(Debug, PartialEq, Eq)]
enum MetricsRequest {
    Page,
    Elsewhere,
    Otherwise,
}

/// By the first line of a request.
fn wanted(line: &[u8]) -> MetricsRequest {
    let mut words = line.split(|byte| byte.is_ascii_whitespace());
    match (words.next(), words.next()) {
        (Some(b"GET"), Some(path)) => match path.split(|byte| *byte == b'?').next() {
            Some(b"/metrics") => MetricsRequest::Page,
            _ => MetricsRequest::Elsewhere,
        },
        _ => MetricsRequest::Otherwise,
    }
}

/// The head of a request, as far as its empty line.
async fn head(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") && !head.ends_with(b"\n\n") {
        let mut part = [0; 1024];
        let count = stream.read(&mut part).await?;
        if count == 0 || head.len() + count > HEAD {
            return Err(io::ErrorKind::InvalidData.into());
        }
        head.extend_from_slice(&part[..count]);
    }
    Ok(head)
}

impl Numbers {
    async fn page(&self) -> String {
        let mut page = MetricsPage::default();
        let version = [("version", env!("CARGO_PKG_VERSION").to_owned())];
        page.family(
            "agent_build_info",
            NumberKind::Gauge,
            "1, with the release of this daemon.",
            [(version, 1_u32)],
        );
        if let Some(vitals) = self.controller.get() {
            vitals.write(&mut page);
        }
        if let Some(node) = self.node.get() {
            node.write(&mut page).await;
        }
        page.into_text()
    }
}

impl NodePage {
    /// Of the machine of these runners.
    pub(crate) fn new(worker: &Arc<Worker>) -> NodePage {
        NodePage {
            worker: Arc::clone(worker),
            identity: identity_file(&worker.config.state_dir),
            looks: Arc::new(Semaphore::new(1)),
        }
    }

    async fn write(&self, page: &mut MetricsPage) {
        self.jobs(page);
        self.gpus(page);
        let (state, identity) = (self.worker.config.state_dir.clone(), self.identity.clone());
        // A disk that hangs costs these numbers, one thread, and a moment.
        let Ok(looks) = Arc::clone(&self.looks).try_acquire_owned() else { return };
        let read = agent_blocking::spawn_blocking(move || {
            let until = Credentials::read(&identity).ok().flatten().and_then(|held| held.certified().ok());
            let found = (agent_node::disk_free(&state), until.map(|held| held.until));
            drop(looks);
            found
        });
        let Ok(Ok((free, until))) = timeout(DISK_WITHIN, read).await else { return };
        let reserve = self.worker.config.disk_reserve as f64;
        let help = "Free bytes on the disk of the state directory.";
        page.one("agent_disk_free_bytes", NumberKind::Gauge, help, free as f64);
        let help = "Below so many free bytes no job is started.";
        page.one("agent_disk_reserve_bytes", NumberKind::Gauge, help, reserve);
        if let Some(until) = until {
            let help = "When the certificate of this machine ends, in seconds since 1970.";
            page.one(
                "agent_certificate_end_timestamp_seconds",
                NumberKind::Gauge,
                help,
                until.0 as f64 / 1000.0,
            );
        }
    }

    /// Jobs that run here. Their label is that of dcgm-exporter, so that its numbers can be joined with these; `job` is
    /// the label that Prometheus itself gives every number.
    fn jobs(&self, page: &mut MetricsPage) {
        let jobs = self.worker.taken.all();
        let of = |value: fn(&GroupUsage) -> Option<f64>| {
            let known =
                jobs.iter().filter_map(move |(replica, usage)| Some((job_labels(replica), value(usage)?)));
            known.collect::<Vec<_>>()
        };
        page.one("agent_jobs_running", NumberKind::Gauge, "Jobs whose command runs here.", jobs.len() as f64);
        page.family(
            "agent_job_cpu_seconds_total",
            NumberKind::Counter,
            "Time of processors that a running job has used, all its processes together.",
            of(|usage| usage.cpu.map(|cpu| cpu.as_secs_f64())),
        );
        page.family(
            "agent_job_memory_bytes",
            NumberKind::Gauge,
            "Memory of a running job, without files in memory that were not used lately.",
            of(|usage| usage.memory.map(|bytes| bytes as f64)),
        );
        page.family(
            "agent_job_memory_peak_bytes",
            NumberKind::Gauge,
            "The most memory of a running job at a time so far, files in memory included.",
            of(|usage| usage.peak.map(|bytes| bytes as f64)),
        );
        page.family(
            "agent_job_memory_limit_bytes",
            NumberKind::Gauge,
            "How much memory a running job may have; absent where that is not limited.",
            of(|usage| usage.limit.map(|bytes| bytes as f64)),
        );
    }

    fn gpus(&self, page: &mut MetricsPage) {
        let gpus = self.worker.gpus.numbers();
        let of = |value: fn(&GpuNumbers) -> Option<f64>| {
            let known = gpus.iter().filter_map(move |gpu| Some((gpu_labels(gpu), value(gpu)?)));
            known.collect::<Vec<_>>()
        };
        page.family(
            "agent_gpu_given",
            NumberKind::Gauge,
            "1 for a GPU that a job has; the labels name it.",
            of(|gpu| Some(f64::from(u8::from(gpu.held.is_some())))),
        );
        page.family(
            "agent_gpu_unfit",
            NumberKind::Gauge,
            "1 for a GPU that is not handed out: broken, lost, or used by somebody else.",
            of(|gpu| Some(f64::from(u8::from(gpu.unfit)))),
        );
        page.family(
            "agent_gpu_utilization_ratio",
            NumberKind::Gauge,
            "How busy a GPU was lately, from 0 to 1; absent for a part of one, of which the driver does not measure it.",
            of(|gpu| gpu.utilization),
        );
        page.family(
            "agent_gpu_memory_bytes",
            NumberKind::Gauge,
            "Memory of a GPU in use.",
            of(|gpu| gpu.used.map(|bytes| bytes as f64)),
        );
        page.family(
            "agent_gpu_idle_held_seconds_total",
            NumberKind::Counter,
            "How long a GPU was given to jobs and not used at all, since the daemon started.",
            // A counter goes on over jobs.
            gpus.iter().filter_map(|gpu| Some(([("uuid", gpu.uuid.clone())], gpu.idle?.as_secs_f64()))),
        );
    }
}

fn job_labels(replica: &ReplicaId) -> Vec<(&'static str, String)> {
    vec![("hpc_job", replica.job.to_string()), ("rank", replica.rank.to_string())]
}

fn gpu_labels(gpu: &GpuNumbers) -> Vec<(&'static str, String)> {
    let job = gpu.held.as_ref().map(|replica| ("hpc_job", replica.job.to_string()));
    [("uuid", gpu.uuid.clone())].into_iter().chain(job).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_only_the_page_is_answered_and_only_to_get() {
        for (line, expected) in [
            (&b"GET /metrics HTTP/1.1\r"[..], MetricsRequest::Page),
            (b"GET /metrics?x=1 HTTP/1.1", MetricsRequest::Page),
            (b"GET / HTTP/1.1", MetricsRequest::Elsewhere),
            (b"GET /metrics/../x HTTP/1.1", MetricsRequest::Elsewhere),
            (b"POST /metrics HTTP/1.1", MetricsRequest::Otherwise),
            (b"", MetricsRequest::Otherwise),
            (b"\xff\xff", MetricsRequest::Otherwise),
        ] {
            assert_eq!(wanted(line), expected, "{}", String::from_utf8_lossy(line));
        }
    }
}
