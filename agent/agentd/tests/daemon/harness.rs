//! One daemon under test: the real program in a directory of its own, spoken to as any client does.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use agent_cas::{Remote, snapshot};
use agent_model::{Digest, JobDraft};
use agent_proto::v1;
use agent_proto::v1::jobs_client::JobsClient;
use agent_proto::v1::nodes_client::NodesClient;
use agent_proto::v1::telemetry_client::TelemetryClient;
use hyper_util::rt::TokioIo;
use rustix::process::{Pid, Signal, kill_process};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// How long anything may take that normally takes a moment.
const SOON: Duration = Duration::from_secs(120);

/// The supervisor of jobs stands beside the daemon; it is built when the first test needs it.
#[allow(clippy::disallowed_methods, reason = "builds what it tests")]
fn agentd() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let agentd = PathBuf::from(env!("CARGO_BIN_EXE_agentd"));
        let profile = agentd.parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "-p", "agent-shim", "--target-dir"]).arg(profile.join(".."));
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
        agentd
    })
}

/// Waits until `ready` gives something.
pub(crate) async fn eventually<T>(what: &str, mut ready: impl AsyncFnMut() -> Option<T>) -> T {
    let end = Instant::now() + SOON;
    loop {
        if let Some(value) = ready().await {
            return value;
        }
        assert!(Instant::now() < end, "still waiting: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A daemon and its state directory, which goes with it.
pub(crate) struct Daemon {
    home: tempfile::TempDir,
    config: String,
    variables: Vec<(String, String)>,
    child: Option<Child>,
}

impl Daemon {
    /// One that is not started; `config` is its configuration file.
    pub(crate) fn new(config: &str) -> Daemon {
        let home = tempfile::Builder::new().prefix("agentd-").tempdir().unwrap();
        Daemon { home, config: config.to_owned(), variables: Vec::new(), child: None }
    }

    /// Gives it an environment variable from its next start on; an empty one is none.
    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.variables.retain(|(known, _)| known != name);
        self.variables.push((name.to_owned(), value.to_owned()));
    }

    /// A file beside its state.
    pub(crate) fn beside(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// What it has said so far.
    pub(crate) fn said(&self) -> String {
        fs::read_to_string(self.beside("agentd.log")).unwrap_or_default()
    }

    /// How it ended by itself.
    pub(crate) async fn exited(&mut self) -> ExitStatus {
        let mut child = self.child.take().unwrap();
        eventually("the daemon ends", async || child.try_wait().unwrap()).await
    }

    /// Lets it stand still, or go on.
    pub(crate) fn signal(&self, which: Signal) {
        signal(self.process(), which);
    }

    /// One that answers.
    pub(crate) async fn started(config: &str) -> Daemon {
        let mut daemon = Daemon::new(config);
        daemon.start().await;
        daemon
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.home.path().join("state")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.state().join("agentd.sock")
    }

    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    pub(crate) fn command(&self) -> Command {
        let config = self.home.path().join("agentd.yaml");
        fs::write(&config, &self.config).unwrap();
        let mut command = Command::new(agentd());
        command.arg("--user").arg("--config").arg(config).arg("--state-dir").arg(self.state());
        command.env("AGENTD_LOG", "info,agentd=debug").stdin(Stdio::null()).stdout(Stdio::null());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Lets other users through to its state; `false` unless the test runs as root.
    pub(crate) fn opens_to_everybody(&self) -> bool {
        let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
        fs::set_permissions(self.home.path(), fs::Permissions::from_mode(0o755)).unwrap();
        is_root
    }

    /// Starts the program, which may take a while to answer.
    pub(crate) fn spawn(&mut self) {
        let log = fs::File::options().create(true).append(true).open(self.home.path().join("agentd.log"));
        self.child = Some(self.command().arg("run").stderr(log.unwrap()).spawn().unwrap());
    }

    pub(crate) async fn start(&mut self) {
        self.spawn();
        eventually("the daemon answers", async || self.nodes().await.ok()).await;
    }

    /// Ends it as a crash does.
    pub(crate) fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Ends it as an operator does.
    pub(crate) async fn stop(&mut self) -> ExitStatus {
        let mut child = self.child.take().unwrap();
        signal(child.id(), Signal::TERM);
        eventually("the daemon stops", async || child.try_wait().unwrap()).await
    }

    /// A connection of its own.
    pub(crate) fn channel(&self) -> Channel {
        let socket = self.socket();
        let connect = move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        };
        Endpoint::from_static("http://agentd").connect_with_connector_lazy(tower::service_fn(connect))
    }

    pub(crate) async fn nodes(&self) -> Result<Vec<v1::Node>, tonic::Status> {
        let listed = NodesClient::new(self.channel()).list(v1::ListNodesRequest {}).await?;
        Ok(listed.into_inner().nodes)
    }

    /// Sends a directory with these files.
    pub(crate) async fn push(&self, files: &[(&str, &str)]) -> Digest {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let scanned = snapshot::scan(dir.path()).unwrap();
        snapshot::push(&scanned, &Remote::new(self.channel()), |_| {}).await.unwrap();
        scanned.root
    }

    /// Submits a job and gives its name.
    pub(crate) async fn submit(&self, draft: JobDraft) -> String {
        let spec = draft.validate().unwrap();
        let id: u64 = std::process::id().into();
        let request_id = format!("{id}-{:?}-{}", Instant::now(), spec.command.len());
        let request = v1::SubmitRequest { request_id, spec: Some(spec.into()), name_hint: String::new() };
        JobsClient::new(self.channel()).submit(request).await.unwrap().into_inner().job
    }

    /// Submits a shell command.
    pub(crate) async fn run(&self, command: &str) -> String {
        self.submit(JobDraft { command: command.to_owned(), ..JobDraft::default() }).await
    }

    pub(crate) async fn job(&self, job: &str) -> Option<v1::Job> {
        let request = v1::GetJobRequest { job: job.to_owned() };
        Some(JobsClient::new(self.channel()).get(request).await.ok()?.into_inner())
    }

    pub(crate) async fn cancel(&self, job: &str) {
        let request = v1::CancelJobRequest { job: job.to_owned() };
        JobsClient::new(self.channel()).cancel(request).await.unwrap();
    }

    /// The job once it is in one of these states.
    pub(crate) async fn reached(&self, job: &str, states: &[&str]) -> v1::Job {
        eventually(&format!("{job} to be {states:?}"), async || {
            self.job(job).await.filter(|job| states.contains(&job.state.as_str()))
        })
        .await
    }

    /// The job once it has ended.
    pub(crate) async fn ended(&self, job: &str) -> v1::Job {
        self.reached(job, &["Completed", "Failed", "Canceled"]).await
    }

    /// What a job has written so far.
    pub(crate) async fn log(&self, job: &str, stream: &str) -> String {
        let request =
            v1::ReadLogRequest { job: job.to_owned(), stream: stream.to_owned(), ..Default::default() };
        let mut chunks = TelemetryClient::new(self.channel()).read_log(request).await.unwrap().into_inner();
        let mut text = Vec::new();
        while let Some(chunk) = chunks.message().await.unwrap() {
            text.extend(chunk.data);
        }
        String::from_utf8(text).unwrap()
    }

    /// The tracking records of a job, as lines.
    pub(crate) async fn records(&self, job: &str) -> Vec<String> {
        let request = v1::ReadTrackingRequest { job: job.to_owned(), ..Default::default() };
        let mut chunks =
            TelemetryClient::new(self.channel()).read_tracking(request).await.unwrap().into_inner();
        let mut text = Vec::new();
        while let Some(chunk) = chunks.message().await.unwrap() {
            text.extend(chunk.lines);
        }
        String::from_utf8(text).unwrap().lines().map(str::to_owned).collect()
    }

    /// The paths of what a job left, and their contents.
    pub(crate) async fn outputs(&self, job: &v1::Job) -> Vec<(String, String)> {
        let Some(artifacts) = job.outcome.as_ref().and_then(|outcome| outcome.artifacts.as_ref()) else {
            return Vec::new();
        };
        let to = tempfile::tempdir().unwrap();
        let (root, dest) = (artifacts.root.parse().unwrap(), to.path().join("got"));
        let store = Remote::new(self.channel());
        snapshot::download(&store, root, &dest).await.unwrap();
        let entries = snapshot::list(&store, root).await.unwrap();
        let text = |path: &str| fs::read_to_string(dest.join(path)).unwrap();
        entries.into_iter().map(|entry| (entry.path.clone(), text(&entry.path))).collect()
    }

    /// The job directories that are there.
    pub(crate) fn job_dirs(&self) -> Vec<PathBuf> {
        fs::read_dir(self.state().join("jobs")).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// The process of the daemon.
    pub(crate) fn process(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }
}

impl Drop for Daemon {
    #[allow(clippy::print_stderr, reason = "what the daemon said belongs to a failing test")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", fs::read_to_string(self.home.path().join("agentd.log")).unwrap_or_default());
        }
        if self.child.is_some() {
            self.kill();
        }
        // Jobs are made to outlive their daemon.
        for _ in 0..50 {
            let left = processes_below(self.home.path());
            if left.is_empty() {
                return;
            }
            left.into_iter().for_each(|pid| signal(pid, Signal::KILL));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The processes that were started, or run, below a directory.
pub(crate) fn processes_below(dir: &Path) -> Vec<u32> {
    let dir = dir.to_string_lossy().into_owned();
    let belongs = |pid: &u32| {
        let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        [read("cmdline"), read("environ")].iter().any(|text| String::from_utf8_lossy(text).contains(&dir))
    };
    let names = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.to_str()?.parse().ok()).filter(belongs).collect()
}

/// Sends a signal; a process that is gone already is fine.
pub(crate) fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}
