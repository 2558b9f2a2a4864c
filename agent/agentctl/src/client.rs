//! The connection to the daemon.
//!
//! Owns finding it (a named socket or context, else the user's own daemon, else the machine's), connecting to it,
//! starting one in user mode when that is wanted, and the deadline of every call. Hides tonic: a
//! command sees answers or a [`Failure`].
//!
//! The channel connects again by itself, so a [`Client`] stays usable after the daemon restarts; see
//! [`Client::until_back`].

mod lists;
mod start;
mod submit;
pub(crate) mod target;

use std::error::Error;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, io};

use agent_cas::remote;
use agent_model::address::AddressError;
use agent_model::paths::{Places, user_cache};
use agent_model::pipeline::Pipeline;
use agent_model::{Address, Blame, Code, Fault, JobId, Principal, causes};
use agent_proto::transport::Way;
use agent_proto::v1::assets_client::AssetsClient;
use agent_proto::v1::identity_client::IdentityClient;
use agent_proto::v1::jobs_client::JobsClient;
use agent_proto::v1::nodes_client::NodesClient;
use agent_proto::v1::pools_client::PoolsClient;
use agent_proto::v1::secrets_client::SecretsClient;
use agent_proto::v1::telemetry_client::TelemetryClient;
use agent_proto::{MAX_MESSAGE, transport, v1};
use nix::unistd::{Gid, Group, Uid, User};
use serde::Serialize;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status, Streaming};

use crate::cli::variable;
use crate::failure::Failure;
use crate::output::{Output, age};

pub(crate) use start::probe;
use target::Context;
pub(crate) use target::Target;

/// The longest a single answer may take.
const CALL: Duration = Duration::from_secs(20);
/// How long to wait for the node of a new daemon to join; after that a job is queued anyway.
const SETTLE: Duration = Duration::from_secs(2);
/// How often it is checked that the daemon still answers, while a stream is open.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// Stands for the job that was submitted last.
const LAST: &str = "-";
/// How many jobs of a beginning are counted.
const LIKE: u32 = 100;

/// A daemon, with the user that the system reports for its socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Whom {
    /// Where it listens.
    pub(crate) socket: PathBuf,
    /// The user it runs as, by name if this machine has one; for a controller elsewhere, the caller's identity there.
    pub(crate) user: String,
    /// What the user calls a controller elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) context: Option<String>,
}

impl fmt::Display for Whom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.context {
            None => write!(f, "the daemon of {} at {}", self.user, self.socket.display()),
            Some(_) => write!(f, "the controller at {}, as {}", self.socket.display(), self.user),
        }
    }
}

/// A connection to a daemon.
#[derive(Clone)]
pub(crate) struct Client {
    channel: Channel,
    way: Way,
    /// The context it was found by.
    context: Option<Box<Context>>,
}

/// Why a socket cannot be used.
enum NoWay {
    /// Nothing listens there.
    Absent(String),
    /// It exists, but this user has no access.
    Denied,
    /// Connecting failed for another reason.
    Broken(String),
}

impl Client {
    /// Connects to a daemon that runs.
    pub(crate) async fn find(named: Option<&Target>) -> Result<Client, Failure> {
        let named = match named {
            Some(Target::Context(context)) => return elsewhere(context).await,
            Some(Target::Socket(socket)) => Some(socket.as_path()),
            None => None,
        };
        let mut tried = Vec::new();
        for socket in candidates(named) {
            match connect(&socket).await {
                Ok(client) => return Ok(client),
                Err(NoWay::Denied) => return Err(denied(&socket).into()),
                Err(NoWay::Absent(why) | NoWay::Broken(why)) => {
                    tried.push(format!("{}: {why}", socket.display()));
                }
            }
        }
        let installed = named.is_none().then(|| start::installed(Path::new("/"))).flatten();
        let fix = match (named, &installed) {
            (Some(_), _) => {
                "check the socket's path and start the daemon there, for example with `agentd run`"
            }
            (None, None) => "start one with `agentctl start`, or name its socket with --socket",
            (None, Some(_)) => {
                "start the service: `sudo systemctl start agentd`; or, if you mean one of your own, start that: \
                 `agentd run --user`"
            }
        };
        let fault = Fault::new(Code::Unreachable, "no daemon answers").fix(fix);
        tried.extend(installed.map(|sign| {
            format!(
                "agentd is installed here as a service, so no other one is started by itself: {}",
                sign.display()
            )
        }));
        Err(tried.into_iter().fold(fault, Fault::why).into())
    }

    /// Connects to a daemon for a caller that waits while it is away: a socket on which nothing listens, because the
    /// daemon crashed or is being replaced, counts as a daemon that is away.
    pub(crate) async fn find_or_await(named: Option<&Target>) -> Result<Client, Failure> {
        let at = match named {
            Some(Target::Context(context)) => {
                return Ok(Client::lazily(context.way()?, Some(context.clone())));
            }
            Some(Target::Socket(socket)) => Some(socket.as_path()),
            None => None,
        };
        match Client::find(named).await {
            Err(Failure::Fault(fault)) if fault.code == Code::Unreachable => {
                let left = candidates(at).into_iter().find(|socket| socket.exists());
                let Some(socket) = left else { return Err(Failure::Fault(fault)) };
                Ok(Client::lazily(way_of(&socket).map_err(|_| Failure::Fault(fault))?, None))
            }
            found => found,
        }
    }

    fn lazily(way: Way, context: Option<Box<Context>>) -> Client {
        Client { channel: transport::dial(endpoint(), way.clone()), way, context }
    }

    /// Connects to a daemon, and starts one in user mode when none runs, none was named, and the machine has no
    /// agentd service: a user who means the service must not be moved to another daemon.
    pub(crate) async fn find_or_start(
        named: Option<&Target>,
        output: &mut Output,
    ) -> Result<Client, Failure> {
        match Client::find(named).await {
            Err(Failure::Fault(fault))
                if fault.code == Code::Unreachable
                    && named.is_none()
                    && start::installed(Path::new("/")).is_none() =>
            {
                let places = Places::user(variable).ok_or_else(start::no_home)?;
                start::start(&places, output).await?;
                let client = Client::find(Some(&Target::Socket(places.socket))).await?;
                client.settle().await?;
                Ok(client)
            }
            found => found,
        }
    }

    /// Starts the caller's own daemon where it is away and its state is there, and no daemon of the machine is meant.
    pub(crate) async fn revive(named: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
        let has_state =
            || Places::user(variable).is_some_and(|places| places.state_dir.join("lock").is_file());
        if named.is_none() && has_state() {
            Client::find_or_start(None, output).await?;
        }
        Ok(())
    }

    /// Waits a moment for the node of a newly started daemon to join, so that a job does not report that there is
    /// none. If it does not join, that is shown as the reason why jobs wait.
    pub(crate) async fn settle(&self) -> Result<(), Failure> {
        let end = Instant::now() + SETTLE;
        while Instant::now() < end {
            if self.machines().await?.nodes.iter().any(|node| node.liveness == "ready") {
                break;
            }
            sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Its socket, if it is one of this machine's.
    pub(crate) fn socket(&self) -> Option<&Path> {
        match &self.way {
            Way::Unix(socket) => Some(socket),
            Way::Tls(_) => None,
        }
    }

    /// The caller, as the controller writes principals.
    pub(crate) fn own(&self) -> String {
        let elsewhere = self.context.as_ref().and_then(|context| context.who());
        let here = || Principal::Local { uid: nix::unistd::geteuid().as_raw() };
        elsewhere.unwrap_or_else(here).to_string()
    }

    /// The daemon that answers.
    pub(crate) async fn whom(&self) -> Result<Whom, Failure> {
        if let Some(context) = &self.context {
            let (socket, name) = (context.credentials.controller.clone().into(), context.name.clone());
            return Ok(Whom { socket, user: self.own(), context: Some(name) });
        }
        let asked = whom(self.socket().unwrap_or(Path::new(""))).await;
        Ok(asked.map_err(|error| Fault::new(Code::Unreachable, "the daemon went away").because(&error))?)
    }

    /// The daemons at the other default sockets. They answer other users who name no socket, or this user when the
    /// preferred daemon ends.
    pub(crate) async fn others(&self) -> Vec<Whom> {
        let mut others = Vec::new();
        let Some(own) = self.socket() else { return others };
        for socket in candidates(None) {
            if !is_one(&socket, own) {
                others.extend(whom(&socket).await.ok());
            }
        }
        others
    }

    /// The jobs service.
    pub(crate) fn jobs(&self) -> JobsClient<Channel> {
        JobsClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE)
    }

    /// The nodes service.
    pub(crate) fn nodes(&self) -> NodesClient<Channel> {
        NodesClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE)
    }

    /// The service of pools.
    pub(crate) fn pools(&self) -> PoolsClient<Channel> {
        PoolsClient::new(self.channel.clone())
    }

    /// The service of secrets.
    pub(crate) fn secrets(&self) -> SecretsClient<Channel> {
        SecretsClient::new(self.channel.clone())
    }

    /// The service of names for data.
    pub(crate) fn assets(&self) -> AssetsClient<Channel> {
        AssetsClient::new(self.channel.clone())
    }

    /// The identity service.
    pub(crate) fn identity(&self) -> IdentityClient<Channel> {
        IdentityClient::new(self.channel.clone())
    }

    /// The telemetry service.
    pub(crate) fn telemetry(&self) -> TelemetryClient<Channel> {
        TelemetryClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE)
    }

    /// The daemon's blob store.
    pub(crate) fn blobs(&self) -> agent_cas::Remote {
        agent_cas::Remote::new(self.channel.clone())
    }

    /// The current state of one job, by any name that [`Client::named`] understands.
    pub(crate) async fn job(&self, given: &str) -> Result<v1::Job, Failure> {
        let Some((array, part)) = named_part(given) else {
            let got = self.whole_job(given).await;
            let Some((sweep, index)) = named_trial(given).filter(|_| is_absent(&got)) else { return got };
            // The name that the cloud gives to a trial.
            let trial = sweep.parse::<JobId>().ok().and_then(|sweep| sweep.task(index));
            let Some(job) = trial.map(String::from) else { return got };
            let trial = answer(self.jobs().get(v1::GetJobRequest { job, ..Default::default() })).await;
            return if is_absent(&trial) { got } else { trial };
        };
        let array = self.whole_job(array).await?;
        let step = || array.spec.as_ref()?.pipeline.parse::<Pipeline>().ok()?.index(part);
        let Some(index) = part.parse().ok().or_else(step) else {
            return Err(Fault::new(Code::JobNotFound, format!("{} has no step `{part}`", array.job))
                .fix(format!("see which it has: agentctl show {}", array.job))
                .into());
        };
        // A step that was not run is the job that did the same.
        let reused = array.steps.iter().find(|step| step.step == index && !step.reused_from.is_empty());
        let task = reused.map(|step| step.reused_from.parse::<JobId>().ok());
        let task = task.unwrap_or_else(|| array.job.parse::<JobId>().ok()?.task(index));
        let job = task.map_or_else(|| given.to_owned(), String::from);
        answer(self.jobs().get(v1::GetJobRequest { job, ..Default::default() })).await
    }

    async fn whole_job(&self, given: &str) -> Result<v1::Job, Failure> {
        let get = |job: String| async {
            answer(self.jobs().get(v1::GetJobRequest { job, ..Default::default() })).await
        };
        if given != LAST {
            match get(given.to_owned()).await {
                Err(Failure::Fault(fault)) if fault.code == Code::JobNotFound => {}
                got => return got,
            }
        }
        get(self.found(given).await?).await
    }

    /// The whole name of a job: as it is, by its beginning where only one job has it, or `-` for the caller's latest
    /// job.
    pub(crate) async fn named(&self, given: &str) -> Result<String, Failure> {
        match self.job(given).await {
            Ok(job) => Ok(job.job),
            // If the daemon is away, or the caller may not see the job, the caller's next call reports that.
            Err(Failure::Fault(fault)) if fault.code != Code::JobNotFound && given != LAST => {
                Ok(given.to_owned())
            }
            Err(failure) => Err(failure),
        }
    }

    async fn found(&self, given: &str) -> Result<String, Failure> {
        let request = match given {
            LAST => v1::ListJobsRequest { limit: 1, owners: vec![self.own()], ..Default::default() },
            _ => v1::ListJobsRequest { limit: LIKE, begins: given.to_owned(), ..Default::default() },
        };
        let jobs = answer(self.jobs().list(request)).await?.jobs;
        Ok(find(given, &jobs, &self.own())?.to_owned())
    }

    /// Directories that are never part of a snapshot, among them this daemon's own. Those of a controller elsewhere are
    /// on its machine, so it is not asked.
    pub(crate) async fn own_directories(&self) -> Result<Vec<PathBuf>, Failure> {
        if self.context.is_some() {
            return Ok(own_directories(None));
        }
        Ok(own_directories(self.machines().await?.controller))
    }

    /// All tracking records of the first `ranks` ranks of a job, from its latest attempt, as lines of JSON. What is gone
    /// of them is told.
    pub(crate) async fn tracking(
        &self,
        job: &str,
        ranks: u32,
        output: &mut Output,
    ) -> Result<Vec<u8>, Failure> {
        let (lines, lost) = self.records(job, ranks).await?;
        lost.iter().for_each(|lost| output.fault(lost));
        Ok(lines)
    }

    /// The same, with what is to be told of records that are gone.
    pub(crate) async fn records(&self, job: &str, ranks: u32) -> Result<(Vec<u8>, Vec<Fault>), Failure> {
        let (mut lines, mut lost) = (Vec::new(), Vec::new());
        for rank in 0..ranks {
            let request = v1::ReadTrackingRequest { job: job.to_owned(), rank, ..Default::default() };
            let mut stream = answer(self.telemetry().read_tracking(request)).await?;
            loop {
                match in_time(&mut stream).await? {
                    Ok(Some(chunk)) => lines.extend_from_slice(&chunk.lines),
                    Ok(None) => break,
                    Err(status) if is_loss(&status) && !lines.is_empty() => {
                        lost.push(fault(&status));
                        break;
                    }
                    Err(status) => return Err(fault(&status).into()),
                }
            }
        }
        Ok((lines, lost))
    }

    /// Waits until the daemon takes connections again, at most until `end`.
    pub(crate) async fn until_back(&self, end: Instant) -> bool {
        let mut pause = Duration::from_millis(10);
        while Instant::now() < end {
            if transport::connect(endpoint(), self.way.clone()).await.is_ok() {
                return true;
            }
            sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(500));
        }
        false
    }
}

/// The answer to a call, in time.
pub(crate) async fn answer<T>(call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Failure> {
    answer_within(CALL, call).await
}

/// The answer to a call that may take longer than most.
pub(crate) async fn answer_within<T>(
    limit: Duration,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Failure> {
    match timeout(limit, call).await {
        Ok(Ok(response)) => {
            age::note(response.metadata());
            Ok(response.into_inner())
        }
        Ok(Err(status)) => Err(fault(&status).into()),
        Err(_) => Err(silent(limit).into()),
    }
}

/// The next message of a stream that only delivers data that exists already.
pub(crate) async fn next<T>(stream: &mut Streaming<T>) -> Result<Option<T>, Failure> {
    in_time(stream).await?.map_err(|status| fault(&status).into())
}

async fn in_time<T>(stream: &mut Streaming<T>) -> Result<Result<Option<T>, Status>, Failure> {
    timeout(CALL, stream.message()).await.map_err(|_| silent(CALL).into())
}

/// What was asked for came as far as it is there; the rest is gone.
pub(crate) fn is_loss(status: &Status) -> bool {
    status.code() == tonic::Code::DataLoss
}

/// The fault of a status. A status made in this process, because the connection broke, has a source; one that the
/// daemon sent has none.
pub(crate) fn fault(status: &Status) -> Fault {
    if status.source().is_some() && status.details().is_empty() {
        return Fault::new(Code::Unreachable, "the connection to the daemon broke")
            .why(status.message())
            .fix("check that it runs: `agentctl status`");
    }
    let fault = agent_proto::fault(status);
    let (what, fix) = (with_people(&fault.what), fault.fix.as_deref().map(with_people));
    let why = fault.why.iter().map(|why| with_people(why)).collect();
    Fault { what, why, fix, ..fault }
}

/// Advice about a blob store that fails.
pub(crate) const LOOK_AT_STORE: &str = "try again later; if it stays so, see the daemon's log, and look at the server \
                                        that `blob_store` names if it names one";

/// A daemon's error about a blob, as the fault of the operation `what`. For one blob of a batch there is only a
/// message.
pub(crate) fn refused(what: String, status: &Status) -> Fault {
    let said = match status.details().is_empty() && status.source().is_none() {
        true => {
            let blame = Blame::Network;
            Fault { blame, ..Fault::new(Code::SnapshotStore, remote::told(status)) }
        }
        false => fault(status),
    };
    let why = [said.what].into_iter().chain(said.why).collect();
    let fix = said.fix.or_else(|| Some(LOOK_AT_STORE.to_owned()));
    Fault { what, why, fix, ..said }
}

fn silent(limit: Duration) -> Fault {
    Fault::new(Code::Unreachable, format!("the daemon did not answer within {} s", limit.as_secs()))
        .fix("look at its log; if it hangs, stop and start it: jobs go on meanwhile")
}

/// The job that the user `own` means among `jobs`, which are sorted newest first.
/// The array and the index of a task that is named as `JOB[7]`, or the pipeline and the name of a step: `JOB[train]`.
fn named_part(given: &str) -> Option<(&str, &str)> {
    given.strip_suffix(']')?.rsplit_once('[')
}

/// The sweep and the index of a trial that is named as the cloud does it, `SWEEP_7`.
fn named_trial(given: &str) -> Option<(&str, u32)> {
    let (sweep, index) = given.rsplit_once('_')?;
    Some((sweep, index.parse().ok()?))
}

fn is_absent(got: &Result<v1::Job, Failure>) -> bool {
    matches!(got, Err(Failure::Fault(fault)) if fault.code == Code::JobNotFound)
}

fn find<'a>(given: &str, jobs: &'a [v1::Job], own: &str) -> Result<&'a str, Fault> {
    let none = |what: String| Fault::new(Code::JobNotFound, what).fix("list them with `agentctl jobs`");
    if given == LAST {
        let last = jobs.iter().find(|job| job.owner == own);
        return last.map(|job| job.job.as_str()).ok_or_else(|| none("you have submitted no job".to_owned()));
    }
    let begins: Vec<&str> =
        jobs.iter().map(|job| job.job.as_str()).filter(|name| name.starts_with(given)).collect();
    match begins[..] {
        [] => Err(none(format!("there is no job `{given}`, and none begins so"))),
        [name] => Ok(name),
        _ => {
            let most = if begins.len() < LIKE as usize { "" } else { "at least " };
            let several = none(format!("`{given}` may be one of {most}{} jobs", begins.len()));
            let told = begins.iter().take(5).fold(several, |fault, name| fault.why(*name));
            Err(match begins.len().saturating_sub(5) {
                0 => told,
                left => told.why(format!("and {left} more")),
            })
        }
    }
}

fn candidates(named: Option<&Path>) -> Vec<PathBuf> {
    match named {
        Some(socket) => vec![socket.to_owned()],
        None => Places::user(variable).into_iter().chain([Places::system()]).map(|p| p.socket).collect(),
    }
}

/// Directories of daemons and of this program, as far as they are known here.
pub(crate) fn own_directories(controller: Option<v1::Controller>) -> Vec<PathBuf> {
    let told = controller.map(|controller| controller.state_dir.into()).into_iter();
    let usual = Places::user(variable).into_iter().chain([Places::system()]).map(|places| places.state_dir);
    told.chain(usual).chain(user_cache(variable)).collect()
}

async fn whom(socket: &Path) -> io::Result<Whom> {
    let uid = UnixStream::connect(socket).await?.peer_cred()?.uid();
    let user = person(&Principal::Local { uid }.to_string());
    Ok(Whom { socket: socket.to_owned(), user, context: None })
}

/// Whether two paths are the same socket, directly or through links.
fn is_one(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    real(one) == real(other)
}

/// The owner of a job for display: a local uid by its name on this machine, any other as the controller writes it.
pub(crate) fn person(owner: &str) -> String {
    let Ok(Principal::Local { uid }) = owner.parse() else { return owner.to_owned() };
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| owner.to_owned(), |user| user.name)
}

/// A text of the controller with the names of accounts of this machine in place of their numbers: `held by uid 1004`.
pub(crate) fn with_people(text: &str) -> String {
    let mut parts = text.split("uid ");
    let mut named = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        let is_word = named.chars().next_back().is_none_or(|before| !before.is_alphanumeric());
        let uid = format!("uid {}", &part[..end]);
        named.push_str(&if is_word { person(&uid) } else { uid });
        named.push_str(&part[end..]);
    }
    named
}

/// Whom a user of this name may be to a controller: an account of the machine, or a user from elsewhere.
pub(crate) fn owners_called(name: &str) -> Vec<String> {
    if name.parse::<Principal>().is_ok() {
        return vec![name.to_owned()];
    }
    let account = User::from_name(name).ok().flatten();
    let account = account.map(|user| Principal::Local { uid: user.uid.as_raw() }.to_string());
    let elsewhere = name.parse().ok().map(|name| Principal::User { name }.to_string());
    account.into_iter().chain(elsewhere).collect()
}

fn denied(socket: &Path) -> Fault {
    let fault = Fault::new(Code::Denied, format!("the daemon at {} is not open to you", socket.display()));
    let group = std::fs::symlink_metadata(socket).ok().map(|file| Gid::from_raw(file.gid()));
    let group = group.and_then(|group| Group::from_gid(group).ok().flatten()).map(|group| group.name);
    let own = "use one of your own: start it with `agentd run --user` and name its socket with --socket";
    match group.filter(|name| name != "root") {
        Some(name) => fault
            .why(format!("it is open to members of the group `{name}`, operators among them"))
            .fix(format!("have yourself added: sudo usermod -aG {name} $USER, then log in again; or {own}")),
        None => fault.fix(format!("ask its operator for access, or {own}")),
    }
}

fn way_of(socket: &Path) -> Result<Way, AddressError> {
    // If the current directory was removed there is no absolute path, and then no socket either.
    let socket = std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
    Address::unix(&socket).map(|_| Way::Unix(socket))
}

/// Connects to a controller elsewhere.
async fn elsewhere(context: &Context) -> Result<Client, Failure> {
    let way = context.way()?;
    let at = &context.credentials.controller;
    let channel = transport::connect(endpoint(), way.clone()).await.map_err(|error| {
        Fault::new(Code::Unreachable, format!("the controller at {at} cannot be reached"))
            .because(&error)
            .fix("check the network and that it runs; `agentctl context list` shows what else there is")
    })?;
    // If this fails, the command goes on with the old certificate; the next one tries again.
    let _ = context.renew(&channel).await;
    Ok(Client { channel, way, context: Some(Box::new(context.clone())) })
}

async fn connect(socket: &Path) -> Result<Client, NoWay> {
    let way = way_of(socket).map_err(|error| NoWay::Absent(error.to_string()))?;
    match transport::connect(endpoint(), way.clone()).await {
        Ok(channel) => Ok(Client { channel, way, context: None }),
        Err(error) => Err(no_way(&error)),
    }
}

fn endpoint() -> Endpoint {
    remote::near(transport::endpoint())
        .connect_timeout(CALL)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
}

fn no_way(error: &tonic::transport::Error) -> NoWay {
    match causes(error).find_map(|cause| cause.downcast_ref::<io::Error>()) {
        None => NoWay::Broken(error.to_string()),
        Some(io) => match io.kind() {
            io::ErrorKind::NotFound => NoWay::Absent("there is no such socket".to_owned()),
            io::ErrorKind::ConnectionRefused => NoWay::Absent("nothing listens there".to_owned()),
            io::ErrorKind::PermissionDenied => NoWay::Denied,
            _ => NoWay::Broken(io.to_string()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Paper;
    use crate::output::fault::render;
    use crate::output::text::Ink;

    /// The rendered faults, on paper that is wide enough for any path.
    fn shown(faults: &[Fault]) -> String {
        let paper = Paper { ink: Ink::PLAIN, width: 1000 };
        faults.iter().map(|fault| render(fault, paper)).collect()
    }

    async fn fault_of(socket: &Path) -> Fault {
        match Client::find(Some(&Target::Socket(socket.to_owned()))).await {
            Err(Failure::Fault(fault)) => *fault,
            _ => panic!("a daemon was found at {}", socket.display()),
        }
    }

    #[tokio::test]
    async fn test_socket_that_leads_nowhere_is_said_with_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let absent = dir.path().join("absent.sock");
        let mut told = vec![fault_of(&absent).await];

        let dead = dir.path().join("dead.sock");
        drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
        assert!(Client::find_or_await(Some(&Target::Socket(dead.clone()))).await.is_ok(), "it may come back");
        assert!(Client::find_or_await(Some(&Target::Socket(absent.clone()))).await.is_err());
        told.push(fault_of(&dead).await);

        let long = dir.path().join("x".repeat(120));
        told.push(fault_of(&long).await);
        told.extend([denied(Path::new("DIR/theirs.sock")), start::no_home()]);
        insta::assert_snapshot!("faults", shown(&told).replace(&dir.path().display().to_string(), "DIR"));
    }

    #[test]
    fn test_a_user_is_an_account_or_a_user_from_elsewhere() {
        assert_eq!(owners_called("root"), ["uid 0", "user root"]);
        assert_eq!(owners_called("uid 7"), ["uid 7"]);
        assert_eq!(
            with_people("held by uid 0, not by uid 4000000000"),
            "held by root, not by uid 4000000000"
        );
        assert_eq!(with_people("a fluid 0 and uid x"), "a fluid 0 and uid x");
        assert_eq!(owners_called("nobody-of-this-name"), ["user nobody-of-this-name"]);
    }

    #[test]
    fn test_a_task_is_named_by_its_array_and_index() {
        assert_eq!(named_part("sweep[7]"), Some(("sweep", "7")));
        assert_eq!(named_part("-[train]"), Some(("-", "train")));
        for other in ["sweep", "sweep[7", "sweep--7"] {
            assert_eq!(named_part(other), None, "{other}");
        }
        assert_eq!(named_trial("my_sweep_7"), Some(("my_sweep", 7)));
        assert_eq!(named_trial("my_sweep"), None);
    }

    #[test]
    fn test_jobs_are_found_by_their_beginning_and_the_last_one_by_a_dash() {
        let job =
            |job: &str, owner: &str| v1::Job { job: job.into(), owner: owner.into(), ..Default::default() };
        let jobs = [job("train-b7", "uid 7"), job("train-a1", "uid 8"), job("eval-1", "uid 8")];
        assert_eq!(find("-", &jobs, "uid 8").unwrap(), "train-a1");
        assert_eq!(find("e", &jobs, "uid 8").unwrap(), "eval-1");
        assert_eq!(find("train-b", &jobs, "uid 8").unwrap(), "train-b7");
        let refused = |given: &str, own: &str| find(given, &jobs, own).unwrap_err();
        let told = [refused("train", "uid 8"), refused("x", "uid 8"), refused("-", "uid 9")];
        insta::assert_snapshot!(shown(&told), @r"
            error[JOB-104]: `train` may be one of 2 jobs
              why: train-b7
                   train-a1
              fix: list them with `agentctl jobs`
            error[JOB-104]: there is no job `x`, and none begins so
              fix: list them with `agentctl jobs`
            error[JOB-104]: you have submitted no job
              fix: list them with `agentctl jobs`
        ");
    }

    #[tokio::test]
    async fn test_who_answers_is_told_by_socket_and_user() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("d.sock");
        let _listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let Ok(client) = Client::find(Some(&Target::Socket(socket.clone()))).await else {
            panic!("nothing listens")
        };
        let own = Principal::Local { uid: nix::unistd::geteuid().as_raw() }.to_string();
        let told = client.whom().await.unwrap().to_string();
        assert_eq!(told, format!("the daemon of {} at {}", person(&own), socket.display()));

        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        assert!(is_one(&socket, &link) && !is_one(&socket, &dir.path().join("other.sock")));
    }

    #[tokio::test]
    async fn test_connection_that_breaks_is_told_from_an_answer() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("rude.sock");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let Ok(client) = Client::find(Some(&Target::Socket(socket.clone()))).await else {
            panic!("nothing listens")
        };
        // Accepts the connection and closes it.
        drop(listener.accept().await.unwrap());
        drop(listener);
        let Err(Failure::Fault(fault)) = client.job("x").await else { panic!("an answer came") };
        assert_eq!(fault.code, Code::Unreachable, "{fault}");

        let told = agent_proto::status(&Fault::new(Code::JobNotFound, "no such job"));
        assert_eq!(super::fault(&told).code, Code::JobNotFound);
    }
}
