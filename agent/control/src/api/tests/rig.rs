//! A controller on a real socket, its clients, and a node that does what a test tells it.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use agent_cas::digest_of;
use agent_cas::gc::{Collector, StoreLimits};
use agent_model::disk::Watermarks;
use agent_model::{Principal, ReplicaStep, SystemClock};
use agent_proto::v1;
use futures_util::stream::select;
use futures_util::{Stream, TryStreamExt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Status, Streaming};

use crate::{Controller, ControllerConfig, LogIntake, OpenError, Operators, Peer};

/// The user that the controller and every test run as.
pub(super) const OWN: u32 = 7000;
/// A user of the machine without other rights.
pub(super) const STRANGER: u32 = 7001;
/// Another user, who is an operator.
pub(super) const OPERATOR: u32 = 7002;

/// Everything a test waits for happens within this time, or the test fails.
const DEADLINE: Duration = Duration::from_secs(60);

pub(super) async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, work).await {
        Ok(value) => value,
        Err(_) => panic!("waited too long for {what}"),
    }
}

pub(super) struct Rig {
    socket: PathBuf,
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
    pub(super) jobs: v1::jobs_client::JobsClient<Channel>,
    pub(super) telemetry: v1::telemetry_client::TelemetryClient<Channel>,
    pub(super) nodes: v1::nodes_client::NodesClient<Channel>,
    pub(super) intake: LogIntake,
}

impl Rig {
    pub(super) async fn start(dir: &Path) -> Rig {
        Rig::with_lease(dir, ControllerConfig::DEFAULT_LEASE).await
    }

    pub(super) async fn with_lease(dir: &Path, lease: Duration) -> Rig {
        let controller = open(dir, lease).await.unwrap();
        let socket = dir.join("sock");
        let incoming = select(
            listen(&socket, OWN),
            select(listen(&dir.join("stranger"), STRANGER), listen(&dir.join("operator"), OPERATOR)),
        );
        let (stop, stopped) = watch::channel(false);
        let until = |mut stopped: watch::Receiver<bool>| async move {
            let _ = stopped.wait_for(|stop| *stop).await;
        };
        let server = Server::builder()
            .initial_stream_window_size(4 << 20)
            .initial_connection_window_size(8 << 20)
            .add_routes(controller.routes())
            .serve_with_incoming_shutdown(incoming, until(stopped.clone()));
        let intake = controller.log_intake();
        let mut tasks = JoinSet::new();
        tasks.spawn(async { server.await.unwrap() });
        let works = controller.run(until(stopped));
        tasks.spawn(async { works.await.unwrap() });
        let channel = connect(&socket).await;
        Rig {
            socket,
            stop,
            tasks,
            jobs: v1::jobs_client::JobsClient::new(channel.clone()),
            telemetry: v1::telemetry_client::TelemetryClient::new(channel.clone()),
            nodes: v1::nodes_client::NodesClient::new(channel),
            intake,
        }
    }

    /// The controller's store of blobs, as clients see it.
    pub(super) async fn blobs(&self) -> agent_cas::Remote {
        agent_cas::Remote::new(connect(&self.socket).await)
    }

    /// Names of data, as their owner sees them.
    pub(super) async fn assets(&self) -> v1::assets_client::AssetsClient<Channel> {
        v1::assets_client::AssetsClient::new(connect(&self.socket).await)
    }

    /// Stops in order: every stream ends, the server drains.
    pub(super) async fn stop(mut self) {
        self.stop.send_replace(true);
        within("the controller to stop", async { while self.tasks.join_next().await.is_some() {} }).await;
    }

    /// Ends everything between two instructions.
    pub(super) async fn kill(mut self) {
        self.tasks.shutdown().await;
    }

    pub(super) async fn submit(&mut self, name: &str) -> String {
        self.try_submit(name, request(name)).await.unwrap()
    }

    pub(super) async fn try_submit(&mut self, request_id: &str, spec: v1::JobSpec) -> Result<String, Status> {
        let request = v1::SubmitRequest {
            request_id: request_id.to_owned(),
            spec: Some(spec),
            name_hint: "hint".into(),
        };
        Box::pin(within("a submission", self.jobs.submit(request)))
            .await
            .map(|answer| answer.into_inner().job)
    }

    pub(super) async fn get(&mut self, job: &str) -> v1::Job {
        self.jobs.get(v1::GetJobRequest { job: job.into(), ..Default::default() }).await.unwrap().into_inner()
    }

    pub(super) async fn cancel(&mut self, job: &str) -> v1::Job {
        self.jobs.cancel(v1::CancelJobRequest { job: job.into() }).await.unwrap().into_inner()
    }

    pub(super) async fn history(&mut self, job: &str) -> Vec<String> {
        let answer =
            self.jobs.history(v1::GetJobRequest { job: job.into(), ..Default::default() }).await.unwrap();
        answer.into_inner().events.into_iter().map(|event| event.text).collect()
    }

    pub(super) async fn watch(&mut self, job: &str) -> Streaming<v1::Job> {
        self.jobs
            .watch(v1::GetJobRequest { job: job.into(), ..Default::default() })
            .await
            .unwrap()
            .into_inner()
    }

    /// Waits until the job looks as wanted.
    pub(super) async fn until(&mut self, job: &str, wanted: impl Fn(&v1::Job) -> bool) -> v1::Job {
        let mut watch = self.watch(job).await;
        within(&format!("{job} to change"), async {
            loop {
                let job = watch.message().await.unwrap().expect("the job ended otherwise");
                if wanted(&job) {
                    return job;
                }
            }
        })
        .await
    }

    pub(super) async fn ended(&mut self, job: &str) -> v1::Job {
        self.until(job, |job| job.ended_ms != 0).await
    }

    /// Reads a log to its end: its attempts, and all bytes.
    pub(super) fn read_log(
        &self,
        request: v1::ReadLogRequest,
    ) -> impl Future<Output = Result<(Vec<u64>, Vec<u8>), Status>> + use<> {
        let mut telemetry = self.telemetry.clone();
        async move {
            let mut stream = telemetry.read_log(request).await?.into_inner();
            let (mut epochs, mut bytes) = (Vec::new(), Vec::new());
            while let Some(chunk) = within("a piece of log", stream.message()).await? {
                epochs.push(chunk.epoch);
                bytes.extend(chunk.data);
            }
            epochs.dedup();
            Ok((epochs, bytes))
        }
    }
}

pub(super) async fn open(dir: &Path, lease: Duration) -> Result<Controller, OpenError> {
    let blobs = dir.join("cas");
    // It waits for the store of the earlier controller, whose connections end meanwhile.
    let disk = tokio::task::spawn_blocking(move || agent_cas::Disk::open(&blobs)).await.unwrap().unwrap();
    let limits = StoreLimits { size: 1 << 40, marks: Watermarks::new(0), lease: Duration::ZERO };
    let clock = Arc::new(SystemClock);
    let collector = Collector::new(disk.clone(), limits, &[Controller::BLOB_USER], clock);
    let operators = Operators::new(OWN, |who| *who == Principal::Local { uid: OPERATOR });
    let config = ControllerConfig { lease, ..ControllerConfig::new(dir, operators) };
    Controller::open(config, Arc::new(SystemClock), agent_cas::Store::Disk(disk), collector).await
}

/// Connections whose peer counts as this user.
fn listen(socket: &Path, uid: u32) -> impl Stream<Item = io::Result<Connection>> + use<> {
    let _ = std::fs::remove_file(socket); // of an earlier controller
    let listener = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
    listener.map_ok(move |stream| Connection { stream, uid })
}

/// A connection of a user.
struct Connection {
    stream: UnixStream,
    uid: u32,
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        Peer::Local { uid: self.uid }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

pub(super) async fn connect(socket: &Path) -> Channel {
    let endpoint = Endpoint::try_from(format!("unix:{}", socket.display())).unwrap();
    endpoint
        .initial_stream_window_size(4 << 20)
        .initial_connection_window_size(8 << 20)
        .connect()
        .await
        .unwrap()
}

/// A small valid job of this name.
pub(super) fn request(name: &str) -> v1::JobSpec {
    v1::JobSpec {
        name: name.into(),
        command: "true".into(),
        environment: Some(agent_model::EnvSpec::host().into()),
        ..v1::JobSpec::default()
    }
}

/// A log request that follows from the start of the latest attempt.
pub(super) fn follow(job: &str) -> v1::ReadLogRequest {
    v1::ReadLogRequest { job: job.into(), stream: "job".into(), follow: true, ..Default::default() }
}

/// A node that a test drives.
pub(super) struct Node {
    name: String,
    pub(super) boot_id: String,
    pub(super) held: Vec<v1::HeldReplica>,
    /// Of the latest orders that it received.
    controller_epoch: u64,
    reports: mpsc::Sender<v1::NodeReport>,
    pub(super) orders: Streaming<v1::NodeOrders>,
    appends: mpsc::Sender<v1::AppendRequest>,
    stored: Streaming<v1::AppendResponse>,
    worker: v1::worker_client::WorkerClient<Channel>,
}

impl Node {
    /// A node named `box` with `slots` slots that holds nothing.
    pub(super) async fn join(rig: &Rig, slots: u32) -> Node {
        Node::rejoin(rig, slots, "boot-1", Vec::new()).await
    }

    pub(super) async fn rejoin(rig: &Rig, slots: u32, boot_id: &str, held: Vec<v1::HeldReplica>) -> Node {
        let channel = connect(&rig.socket).await;
        let mut worker = v1::worker_client::WorkerClient::new(channel.clone());
        let (reports, receiver) = mpsc::channel(64);
        let orders = worker.sync(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        let (appends, receiver) = mpsc::channel(16);
        let mut telemetry = v1::telemetry_client::TelemetryClient::new(channel);
        let stored = telemetry.append(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        let (name, boot_id) = ("box".to_owned(), boot_id.to_owned());
        let mut node =
            Node { name, boot_id, held, controller_epoch: 0, reports, orders, appends, stored, worker };
        node.send(Some(v1::Inventory { slots, ..Default::default() })).await;
        // As the daemon does: it echoes the first orders at once, and is believed from then on.
        node.until("the answer to the first report", |_| true).await;
        node.report().await;
        node
    }

    pub(super) async fn send(&mut self, inventory: Option<v1::Inventory>) {
        let report = v1::NodeReport {
            obeyed_ms: 0,
            obeyed_controller_epoch: self.controller_epoch,
            sent_ms: 0,
            node: self.name.clone(),
            boot_id: self.boot_id.clone(),
            session: "s".into(),
            clock_ms: 0,
            inventory,
            load: None,
            replicas: self.held.clone(),
            preemption: None,
        };
        self.reports.send(report).await.unwrap();
    }

    pub(super) async fn report(&mut self) {
        self.send(None).await;
    }

    /// Sets the step of a replica, held from now on, and reports it.
    pub(super) async fn step(&mut self, replica: &str, step: ReplicaStep) {
        self.held.retain(|held| held.replica != replica);
        self.held.push(v1::HeldReplica {
            alive: true,
            replica: replica.into(),
            step: step.to_string(),
            detail: String::new(),
            started_ms: if step >= ReplicaStep::Running { 5 } else { 0 },
            ..v1::HeldReplica::default()
        });
        self.report().await;
    }

    pub(super) async fn drop_replica(&mut self, replica: &str) {
        self.held.retain(|held| held.replica != replica);
        self.report().await;
    }

    /// The next orders that are as wanted.
    pub(super) async fn until(
        &mut self,
        what: &str,
        wanted: impl Fn(&[v1::Order]) -> bool,
    ) -> Vec<v1::Order> {
        within(what, async {
            loop {
                let orders = self.orders.message().await.unwrap().expect("orders went on");
                self.controller_epoch = orders.controller_epoch;
                if wanted(&orders.orders) {
                    return orders.orders;
                }
            }
        })
        .await
    }

    /// Waits until the node is to run `replica`.
    pub(super) async fn ordered(&mut self, replica: &str) {
        self.until(&format!("an order for {replica}"), |orders| {
            orders.iter().any(|order| order.replica == replica && is_run(order))
        })
        .await;
    }

    pub(super) async fn forgets(&mut self, replica: &str) {
        self.report().await; // each report is answered with the whole orders
        self.until(&format!("leave to forget {replica}"), |orders| {
            let forget = |order: &v1::Order| matches!(order.desired, Some(v1::order::Desired::Forget(_)));
            orders.iter().any(|order| order.replica == replica && forget(order))
        })
        .await;
        self.drop_replica(replica).await;
    }

    /// Appends and waits for the answer.
    pub(super) async fn append(&mut self, replica: &str, channel: &str, offset: u64, data: &[u8]) -> u64 {
        self.send_append(replica, channel, offset, data.to_vec()).await;
        self.stored().await.unwrap()
    }

    pub(super) async fn send_append(&mut self, replica: &str, channel: &str, offset: u64, data: Vec<u8>) {
        let (replica, channel) = (replica.to_owned(), channel.to_owned());
        self.appends.send(v1::AppendRequest { replica, channel, offset, data: data.into() }).await.unwrap();
    }

    pub(super) async fn stored(&mut self) -> Result<u64, Status> {
        let answer = within("an append to be stored", self.stored.message()).await?;
        Ok(answer.expect("an answer for each append").stored)
    }

    /// Reports the result of storing outputs later.
    pub(super) async fn tell_outputs(
        &mut self,
        replica: &str,
        stored: Result<Option<v1::Artifacts>, agent_model::Fault>,
    ) -> Result<(), Status> {
        let (artifacts, fault) =
            stored.map_or_else(|fault| (None, Some(fault.into())), |stored| (stored, None));
        let (node, replica) = (self.name.clone(), replica.to_owned());
        let request = v1::ReportOutputsRequest { node, replica, artifacts, fault, ..Default::default() };
        within("outputs to be told", self.worker.report_outputs(request)).await.map(|_| ())
    }

    /// Reports the outputs so far of a replica that runs.
    pub(super) async fn tell_outputs_so_far(
        &mut self,
        replica: &str,
        artifacts: v1::Artifacts,
        left_out: &str,
    ) -> Result<(), Status> {
        let request = v1::ReportOutputsRequest {
            node: self.name.clone(),
            replica: replica.to_owned(),
            artifacts: Some(artifacts),
            running: true,
            left_out: vec![left_out.to_owned()],
            ..Default::default()
        };
        within("outputs to be told", self.worker.report_outputs(request)).await.map(|_| ())
    }

    pub(super) async fn deliver(&mut self, replica: &str, outcome: v1::Outcome) -> Result<(), Status> {
        let request = v1::ReportOutcomeRequest {
            node: self.name.clone(),
            replica: replica.into(),
            outcome: Some(outcome),
        };
        within("an outcome to be taken", self.worker.report_outcome(request)).await.map(|_| ())
    }
}

fn is_run(order: &v1::Order) -> bool {
    matches!(order.desired, Some(v1::order::Desired::Run(_)))
}

/// A command that returned `code` after it wrote `log`.
pub(super) fn outcome(code: i32, log: &[u8]) -> v1::Outcome {
    let fault = agent_model::Fault::new(agent_model::Code::CommandFailed, "it failed");
    v1::Outcome {
        verdict: if code == 0 { "completed" } else { "failed" }.into(),
        exit: Some(v1::Exit { kind: Some(v1::exit::Kind::Code(code)) }),
        fault: (code != 0).then(|| fault.into()),
        started_ms: 5,
        ended_ms: 9,
        streams: vec![v1::StreamEnd { stream: "job".into(), digest: digest_of(log).to_string() }],
        tracking_bytes: 0,
        artifacts: None,
        usage: None,
        environment: None,
        left_out: Vec::new(),
    }
}
