//! A client of a controller, for tests that are plain threads: every call waits for its answer.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use agent_cas::remote;
use agent_cas::{Remote, snapshot};
use agent_model::{Digest, JobDraft};
use agent_proto::v1;
use agent_proto::v1::jobs_client::JobsClient;
use agent_proto::v1::nodes_client::NodesClient;
use agent_proto::v1::telemetry_client::TelemetryClient;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::{SOON, binaries};

/// What all clients and links of this process run on.
pub fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let built = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        built.expect("a runtime")
    })
}

/// A connection to the socket, made when it is used.
pub fn channel(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let connect = move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    };
    let _inside = runtime().enter();
    // As `agentctl` sets it, so that a transfer costs what it costs there.
    remote::near(Endpoint::from_static("http://agentd"))
        .connect_with_connector_lazy(tower::service_fn(connect))
}

/// The states a job ends in.
pub const TERMINAL: [&str; 3] = ["Completed", "Failed", "Canceled"];

/// Whether a job has ended.
pub fn is_over(job: &v1::Job) -> bool {
    TERMINAL.contains(&job.state.as_str())
}

/// A client of the controller at a socket.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    patience: Duration,
}

impl Client {
    /// Of the controller that listens there, now or later.
    pub fn new(socket: impl Into<PathBuf>) -> Client {
        Client { socket: socket.into(), patience: Duration::from_secs(20) }
    }

    /// One that waits no longer than this for an answer.
    pub fn hasty(&self, patience: Duration) -> Client {
        Client { patience, ..self.clone() }
    }

    /// A connection of its own, which costs little and is never a broken one of before.
    pub fn channel(&self) -> Channel {
        channel(&self.socket)
    }

    /// A token with which so many machines can join.
    #[track_caller]
    pub fn token(&self, uses: u32) -> String {
        let request = v1::CreateTokenRequest { uses, ..v1::CreateTokenRequest::default() };
        let mut identity = v1::identity_client::IdentityClient::new(self.channel());
        self.wait(identity.create_token(request)).expect("a token").into_inner().token
    }

    /// Waits for an answer, and not for ever.
    pub fn wait<T>(&self, answer: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        runtime().block_on(async {
            let limited = tokio::time::timeout(self.patience, answer).await;
            limited.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")))
        })
    }

    /// A request id nobody used before.
    pub fn request_id() -> String {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        format!("{}-{}-{number}", std::process::id(), crate::witness::boottime())
    }

    /// Sends a directory with these files once.
    pub fn try_push(&self, files: &[(&str, &str)]) -> Result<Digest, Status> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a file has a parent")).expect("a directory");
            std::fs::write(path, text).expect("a file");
        }
        self.try_push_of(dir.path())
    }

    /// Sends what is in a directory; the digest of its root.
    pub fn try_push_of(&self, dir: &Path) -> Result<Digest, Status> {
        let scanned = snapshot::scan(dir).expect("a directory can be scanned");
        let remote = Remote::new(self.channel());
        let push = snapshot::push(&scanned, &remote, |_| {});
        self.wait(async { push.await.map_err(|error| Status::unavailable(error.to_string())) })?;
        Ok(scanned.root)
    }

    /// Submits once; the job's name.
    pub fn try_submit(&self, request_id: &str, draft: &JobDraft) -> Result<String, Status> {
        let spec = draft.clone().validate().expect("a valid job");
        let request = v1::SubmitRequest {
            request_id: request_id.to_owned(),
            spec: Some(spec.into()),
            name_hint: String::new(),
        };
        let answer = self.wait(JobsClient::new(self.channel()).submit(request))?;
        Ok(answer.into_inner().job)
    }

    /// Submits until that is acknowledged, as every good client does.
    #[track_caller]
    pub fn submit(&self, draft: &JobDraft) -> String {
        let id = Client::request_id();
        crate::eventually("the job is taken", SOON, || self.try_submit(&id, draft).ok())
    }

    /// Submits a shell command.
    #[track_caller]
    pub fn run(&self, command: &str) -> String {
        self.submit(&JobDraft { command: command.to_owned(), ..JobDraft::default() })
    }

    /// A job as it stands.
    pub fn try_job(&self, job: &str) -> Result<v1::Job, Status> {
        let request = v1::GetJobRequest { job: job.to_owned(), ..Default::default() };
        Ok(self.wait(JobsClient::new(self.channel()).get(request))?.into_inner())
    }

    /// A job as it stands, asked until the controller answers.
    #[track_caller]
    pub fn job(&self, job: &str) -> v1::Job {
        crate::eventually("the controller answers", SOON, || self.try_job(job).ok())
    }

    /// Every job there is, oldest first.
    pub fn jobs(&self, active: bool) -> Result<Vec<v1::Job>, Status> {
        let (mut all, mut after) = (Vec::<v1::Job>::new(), String::new());
        loop {
            let request = v1::ListJobsRequest { limit: 200, active, after, ..Default::default() };
            let page = self.wait(JobsClient::new(self.channel()).list(request))?.into_inner();
            after = page.jobs.last().map(|job| job.job.clone()).unwrap_or_default();
            all.extend(page.jobs);
            if !page.more {
                all.reverse();
                return Ok(all);
            }
        }
    }

    /// Asks for the end of a job.
    pub fn cancel(&self, job: &str) -> Result<v1::Job, Status> {
        let request = v1::CancelJobRequest { job: job.to_owned() };
        Ok(self.wait(JobsClient::new(self.channel()).cancel(request))?.into_inner())
    }

    /// What happened to a job, in order.
    pub fn history(&self, job: &str) -> Vec<v1::HistoryEvent> {
        let request = v1::GetJobRequest { job: job.to_owned(), ..Default::default() };
        let answer = self.wait(JobsClient::new(self.channel()).history(request));
        answer.map(|answer| answer.into_inner().events).unwrap_or_default()
    }

    /// The job once it is in one of these states.
    #[track_caller]
    pub fn reached(&self, job: &str, states: &[&str]) -> v1::Job {
        self.reached_within(SOON, job, states)
    }

    /// The job once it is in one of these states, which takes at most this long.
    #[track_caller]
    pub fn reached_within(&self, deadline: Duration, job: &str, states: &[&str]) -> v1::Job {
        let mut last = None;
        let reached = crate::within(deadline, || {
            last = self.try_job(job).ok().or(last.take());
            last.take_if(|now| states.contains(&now.state.as_str()))
        });
        let Some(reached) = reached else {
            panic!("after {deadline:?} {job} is not {states:?} but {last:?}")
        };
        reached
    }

    /// The job once it has ended.
    #[track_caller]
    pub fn ended(&self, job: &str) -> v1::Job {
        self.reached(job, &TERMINAL)
    }

    /// The bytes of one log of the latest attempt.
    #[track_caller]
    pub fn log(&self, job: &str, stream: &str) -> Vec<u8> {
        crate::eventually("the log is read", SOON, || self.try_log(job, 0, stream).ok())
    }

    /// The bytes of one log of an attempt, of the latest for epoch 0.
    pub fn try_log(&self, job: &str, epoch: u64, stream: &str) -> Result<Vec<u8>, Status> {
        let request = v1::ReadLogRequest {
            job: job.to_owned(),
            epoch,
            stream: stream.to_owned(),
            ..v1::ReadLogRequest::default()
        };
        let read = async {
            let mut chunks = TelemetryClient::new(self.channel()).read_log(request).await?.into_inner();
            let mut text = Vec::new();
            while let Some(chunk) = chunks.message().await? {
                text.extend(chunk.data);
            }
            Ok(text)
        };
        self.wait(read)
    }

    /// All that a job has written so far, in its latest attempt.
    #[track_caller]
    pub fn text(&self, job: &str) -> String {
        String::from_utf8(self.log(job, "job")).expect("UTF-8")
    }

    /// Waits until this is all that a job has written.
    #[track_caller]
    pub fn wrote(&self, job: &str, text: &str) {
        crate::eventually(&format!("{job} writes {text:?}"), SOON, || (self.text(job) == text).then_some(()));
    }

    /// The records of a job's metrics file, as lines.
    #[track_caller]
    pub fn records(&self, job: &str) -> Vec<String> {
        let request = v1::ReadTrackingRequest { job: job.to_owned(), ..Default::default() };
        let read = async {
            let mut chunks = TelemetryClient::new(self.channel()).read_tracking(request).await?.into_inner();
            let mut text = Vec::new();
            while let Some(chunk) = chunks.message().await? {
                text.extend(chunk.lines);
            }
            Ok(text)
        };
        let text = String::from_utf8(self.wait(read).expect("the records are read")).expect("UTF-8");
        text.lines().map(str::to_owned).collect()
    }

    /// The paths of what a job left, in order, and their contents; nothing where nothing was stored.
    #[track_caller]
    pub fn outputs(&self, job: &v1::Job) -> Vec<(String, String)> {
        let Some(artifacts) = job.outcome.as_ref().and_then(|outcome| outcome.artifacts.as_ref()) else {
            return Vec::new();
        };
        let to = tempfile::tempdir().expect("a temporary directory");
        let (root, dest) = (artifacts.root.parse().expect("a digest"), to.path().join("got"));
        let (store, failed) = (Remote::new(self.channel()), |error: &dyn std::fmt::Display| {
            Status::unavailable(error.to_string())
        });
        let got = self.wait(async {
            snapshot::download(&store, root, &dest).await.map_err(|error| failed(&error))?;
            snapshot::list(&store, root).await.map_err(|error| failed(&error))
        });
        let text = |path: &str| std::fs::read_to_string(dest.join(path)).expect("a file of text");
        let entries = got.expect("the outputs arrive").into_iter();
        let mut files: Vec<_> = entries.map(|entry| (entry.path.clone(), text(&entry.path))).collect();
        files.sort();
        files
    }

    /// Submits a directory as people do, which sends what the store says it lacks; the job, if it was taken.
    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    pub fn try_submit_dir(&self, dir: &Path) -> Result<String, String> {
        let mut ctl = Command::new(binaries().join("agentctl"));
        let ran = ctl.arg("--socket").arg(&self.socket).arg("submit").arg(dir).output();
        let ran = ran.expect("agentctl starts");
        match ran.status.success() {
            true => Ok(String::from_utf8_lossy(&ran.stdout).trim().to_owned()),
            false => Err(String::from_utf8_lossy(&ran.stderr).into_owned()),
        }
    }

    /// Removes the blobs that nobody needs: as many as the rule says, or all.
    pub fn collect(&self, all: bool) -> Result<v1::CollectBlobsResponse, Status> {
        let request = v1::CollectBlobsRequest { all, dry_run: false };
        Ok(self.wait(NodesClient::new(self.channel()).collect_blobs(request))?.into_inner())
    }

    /// Lets new work onto a node, or keeps it off: `drain`, `cordon` or `uncordon`.
    pub fn set_eligibility(&self, node: &str, want: &str) -> Result<v1::Node, Status> {
        let request = v1::SetEligibilityRequest { node: node.to_owned(), want: want.to_owned() };
        Ok(self.wait(NodesClient::new(self.channel()).set_eligibility(request))?.into_inner())
    }

    /// What an operator should know, as the controller says it.
    pub fn notices(&self) -> Result<Vec<String>, Status> {
        let listed =
            self.wait(NodesClient::new(self.channel()).list(v1::ListNodesRequest::default()))?.into_inner();
        let notices = listed.controller.map(|controller| controller.notices).unwrap_or_default();
        Ok(notices.into_iter().map(|notice| notice.what).collect())
    }

    /// The machines of the controller.
    pub fn nodes(&self) -> Result<Vec<v1::Node>, Status> {
        let listed = self.wait(NodesClient::new(self.channel()).list(v1::ListNodesRequest::default()))?;
        Ok(listed.into_inner().nodes)
    }
}
