//! This machine as a node of a remote controller: how it joins, what it keeps, and how its certificate is renewed.
//!
//! Owns one file of the state directory, which holds the machine's identity and its controller: where it exists, the
//! daemon is a node of that controller unless the configuration says otherwise. Hides tokens and certificates.
//!
//! Invariants: the key of a join is on the disk before it is used, so that a lost answer can be requested again; an
//! identity is removed only when the machine leaves, or replaced by the next one of the same controller.

use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_identity::{Certified, Credentials, Dialer, PrivateKey, ShownIdentity, Token, TokenKind, Trust};
use agent_model::words::count;
use agent_model::{Address, Clock, Code, Fault, Principal};
use agent_proto::transport::{self, Way};
use agent_proto::v1;
use agent_proto::v1::identity_client::IdentityClient;
use tokio::time::{sleep, timeout};
use tonic::transport::Channel;
use tonic::{Response, Status};
use tracing::{info, warn};

use crate::cli::JoinArgs;
use crate::config::{Config, identity_file};
use crate::supervisor::{Supervisor, TaskKind};
use crate::worker::peers::PeerIdentity;

/// The longest a controller may take to answer.
const CALL: Duration = Duration::from_secs(20);
/// The longest time between two checks whether a renewal is due, and the shortest.
const LOOK: Duration = Duration::from_secs(60);
const AGAIN: Duration = Duration::from_secs(1);
/// In bytes; longer than any token.
const LONGEST_TOKEN: u64 = 4096;

fn pending(state_dir: &Path) -> PathBuf {
    state_dir.join("identity.key")
}

/// How a node reaches its controller.
#[derive(Debug, Clone)]
pub(crate) struct Uplink {
    pub(crate) way: Way,
    /// A random name of this process.
    pub(crate) session: String,
    /// The identity it presents, if the controller is remote.
    held: Option<PeerIdentity>,
}

impl Uplink {
    /// Fails if the controller is remote and this machine has no identity.
    pub(crate) fn new(config: &Config, clock: &Arc<dyn Clock>) -> io::Result<Uplink> {
        let session = agent_identity::random_name().map_err(|error| io::Error::other(error.to_string()))?;
        let (host, port) = match &config.controller {
            Address::Unix(socket) => {
                return Ok(Uplink { way: Way::Unix(socket.clone()), session, held: None });
            }
            Address::Tls { host, port } => (host.as_str(), *port),
        };
        let missing = || {
            io::Error::new(io::ErrorKind::NotFound, "this machine has not joined; `agentd join` does that")
        };
        let credentials = Credentials::read(&identity_file(&config.state_dir))?.ok_or_else(missing)?;
        let held = ShownIdentity::new(&credentials).map_err(io::Error::other)?;
        let authority = credentials.authority().map_err(io::Error::other)?;
        let trust = Trust::Authority(authority.clone());
        let dialer =
            Dialer::new((host, port), trust, Some(held.clone()), config.proxy.clone(), Arc::clone(clock));
        let held = PeerIdentity { authority, shown: held };
        Ok(Uplink { way: Way::Tls(dialer.map_err(io::Error::other)?), session, held: Some(held) })
    }

    /// The identity for connections to other nodes, of a machine that joined.
    pub(crate) fn peer_identity(&self) -> Option<PeerIdentity> {
        self.held.clone()
    }
}

/// Starts the task that renews the certificate of this machine.
pub(crate) fn look_after(
    supervisor: &Supervisor,
    uplink: &Uplink,
    config: &Config,
    controller: &Channel,
    clock: &Arc<dyn Clock>,
) {
    let (uplink, state_dir) = (uplink.clone(), config.state_dir.clone());
    let (controller, clock) = (controller.clone(), Arc::clone(clock));
    supervisor.spawn_again(TaskKind::Upkeep, "certificate", move || {
        stay(uplink.clone(), state_dir.clone(), controller.clone(), Arc::clone(&clock))
    });
}

/// Renews the certificate of a node whenever two thirds of its lifetime are over.
async fn stay(uplink: Uplink, state_dir: PathBuf, controller: Channel, clock: Arc<dyn Clock>) {
    let Some(PeerIdentity { shown: held, .. }) = uplink.held else { return std::future::pending().await };
    loop {
        match renew_if_due(&state_dir, &controller, &held, &*clock).await {
            Ok(left) => sleep(left.clamp(AGAIN, LOOK)).await,
            Err(fault) => {
                warn!(%fault, "the certificate of this machine is not renewed yet");
                sleep(AGAIN * 5).await;
            }
        }
    }
}

/// Returns the time until the next renewal is due.
async fn renew_if_due(
    state_dir: &Path,
    controller: &Channel,
    held: &ShownIdentity,
    clock: &dyn Clock,
) -> Result<Duration, Fault> {
    let path = identity_file(state_dir);
    let unreadable = |error: &dyn std::fmt::Display| {
        Fault::new(Code::StateUnusable, format!("cannot use {}", path.display())).why(error.to_string())
    };
    let credentials = Credentials::read(&path).map_err(|error| unreadable(&error))?;
    let credentials = credentials.ok_or_else(|| unreadable(&"it is gone"))?;
    let due = credentials.certified().map_err(|error| unreadable(&error))?.renew_at();
    let left = due.since(clock.now());
    if !left.is_zero() {
        return Ok(left);
    }
    let new = renew(&credentials, controller).await?;
    new.write(&path).map_err(|error| unreadable(&error))?;
    held.replace(&new).map_err(|error| unreadable(&error))?;
    info!("the certificate of this machine was renewed");
    Ok(AGAIN)
}

/// Another certificate for another key.
async fn renew(credentials: &Credentials, controller: &Channel) -> Result<Credentials, Fault> {
    let odd = |error: &agent_identity::KeyError| {
        Fault::new(Code::Bug, "the identity cannot be renewed").because(error)
    };
    let key = PrivateKey::generate().map_err(|error| odd(&error))?;
    let request = v1::RenewRequest { request: key.request().map_err(|error| odd(&error))? };
    let answer = within(IdentityClient::new(controller.clone()).renew(request)).await?;
    let authority = credentials.authority().map_err(|error| odd(&error))?;
    Ok(Credentials::new(&credentials.controller, &authority, &answer.certificate, &key))
}

async fn within<T>(call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Fault> {
    match timeout(CALL, call).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(agent_proto::fault(&status)),
        Err(_) => Err(Fault::new(
            Code::Unreachable,
            format!("the controller did not answer within {} s", CALL.as_secs()),
        )),
    }
}

/// The contents of the token file, which root may have written for root alone. A machine that is a node already needs
/// none.
pub(crate) fn token_of_file(args: &JoinArgs) -> Option<io::Result<String>> {
    let path = args.token_file.as_deref().filter(|path| *path != Path::new("-"))?;
    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(LONGEST_TOKEN).read_to_string(&mut text));
    Some(read.map(|_| text))
}

/// Makes this machine a node; returns the message for the user. `token` is that of the file. Doing it again changes
/// nothing.
pub(crate) async fn join(
    config: &Config,
    args: &JoinArgs,
    token: Option<io::Result<String>>,
    clock: Arc<dyn Clock>,
) -> Result<String, Fault> {
    let place = match args.controller.parse::<Address>() {
        Ok(Address::Tls { host, port }) => (host, port),
        _ => {
            return Err(Fault::new(Code::ConfigInvalid, format!("`{}` is no controller", args.controller))
                .fix("write it as `https://HOST:7443`"));
        }
    };
    require_node(config, args)?;
    require_no_begun_move(&config.state_dir)?;
    let path = identity_file(&config.state_dir);
    let unusable = |error: &dyn std::fmt::Display| {
        Fault::new(Code::StateUnusable, format!("cannot use {}", path.display())).why(error.to_string())
    };
    let known = Credentials::read(&path).map_err(|error| unusable(&error))?;
    let same_place = known.as_ref().is_some_and(|known| known.controller == address(&place));
    // A machine that is a node already needs no token to find that out. Whoever proves to be its authority is its
    // controller, at whatever address.
    if let Some(known) = known.as_ref()
        && let Ok(certified) = known.certified()
    {
        match still_member(config, known, &certified, &place, &clock).await {
            Ok(true) => {
                let (place, name) = (address(&place), name_of(&certified));
                return Ok(format!("this machine is a node of {place} already, as {name}"));
            }
            Err(fault) if same_place => return Err(fault),
            // Somebody else answers there, or nobody: the token says who should.
            Ok(false) | Err(_) => {}
        }
    }
    if !args.lose_jobs {
        require_no_jobs(config).await?;
    }
    let token = read_token(args, token)?;
    let ours = |known: &Credentials| {
        known
            .authority()
            .is_ok_and(|authority| agent_identity::is_fingerprint(&authority, &token.authority()))
    };
    if let Some(known) = known.as_ref().filter(|known| !ours(known)) {
        return Err(Fault::new(
            Code::JoinedElsewhere,
            format!("this machine belongs to {}", known.controller),
        )
        .fix("if it should leave that one: drain it there, run `agentd leave` here, then join again"));
    }
    let key = pending_key(config, known.as_ref()).map_err(|error| unusable(&error))?;
    let trust = Trust::Fingerprint(token.authority());
    // With it the machine keeps its enrollment, where the controller has lost the record of it.
    let is_valid = |known: &&Credentials| known.certified().is_ok_and(|known| known.until >= clock.now());
    let held = known.as_ref().filter(is_valid).and_then(|known| ShownIdentity::new(known).ok());
    let dialer = dialer(&place, trust, held, config, &clock)?;
    let authority = dialer.authority().await.map_err(|error| unreachable(&place, &error))?;
    let request = v1::JoinRequest {
        node: config.node_name.to_string(),
        secret: token.secret(),
        request: key.request().map_err(|error| unusable(&error))?,
        clock_ms: clock.now().0,
        jobs: Vec::new(),
    };
    let channel = transport::dial(transport::endpoint(), Way::Tls(dialer));
    let answer = within(IdentityClient::new(channel).join(request)).await?;
    let credentials = Credentials::new(&address(&place), &authority, &answer.certificate, &key);
    credentials.write(&path).map_err(|error| {
        Fault::new(Code::StateUnusable, format!("cannot write {}", path.display())).because(&error)
    })?;
    let _ = std::fs::remove_file(pending(&config.state_dir)); // it is in the identity now
    Ok(format!("joined {} as {}; from now on `agentd run` is its node", address(&place), answer.name))
}

/// Fails if the release before began to move the machine's own jobs to its controller and was cut off: some of them are
/// on record in both places, and only that release can tell which.
pub(crate) fn require_no_begun_move(state_dir: &Path) -> Result<(), Fault> {
    let begun = state_dir.join("moving");
    match begun.exists() && identity_file(state_dir).exists() {
        false => Ok(()),
        true => Err(Fault::new(
            Code::JobActive,
            "a join that brings the jobs of this machine along was cut off, and this release cannot finish it",
        )
        .why(format!("{} says so", begun.display()))
        .fix(format!(
            "install the release before, run `agentd join` again, then upgrade; only if that controller is gone for \
             good, remove {}: then this machine runs them itself",
            begun.display()
        ))),
    }
}

/// Forgets the controller; the data of jobs stays on this machine.
pub(crate) fn leave(config: &Config) -> Result<String, Fault> {
    let path = identity_file(&config.state_dir);
    require_no_begun_move(&config.state_dir)?;
    match std::fs::remove_file(&path) {
        Ok(()) => {
            let _ = std::fs::remove_file(pending(&config.state_dir));
            Ok("this machine belongs to no controller any more; tell an operator: `agentctl node remove`"
                .to_owned())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Ok("this machine belonged to no controller".to_owned())
        }
        Err(error) => {
            Err(Fault::new(Code::StateUnusable, format!("cannot remove {}", path.display())).because(&error))
        }
    }
}

/// Fails if the configuration contradicts joining.
fn require_node(config: &Config, args: &JoinArgs) -> Result<(), Fault> {
    let said =
        |key: &str| config.settings.iter().find(|setting| setting.key == key).map(|s| s.origin.to_string());
    let against = |key: &str, what: &str| {
        Fault::new(Code::ConfigInvalid, format!("the configuration says that this machine {what}"))
            .why(format!("{key}: {}", said(key).unwrap_or_default()))
            .fix(format!("remove `{key}` there; joining says it"))
    };
    if config.roles.controller {
        return Err(against("roles", "is a controller itself"));
    }
    if config.controller.to_string() != args.controller.trim_end_matches('/') {
        return Err(against("controller", "belongs to another controller"));
    }
    Ok(())
}

/// Fails if the machine's own controller has jobs that have not ended: as a node it has no controller of its own, and
/// nobody would run those that wait.
async fn require_no_jobs(config: &Config) -> Result<(), Fault> {
    let all_the_same = "or join without those that wait: `--lose-jobs`";
    let jobs = agent_control::unfinished_jobs(&config.state_dir).await.map_err(|error| {
        Fault::new(Code::StateUnusable, "cannot tell whether this machine has jobs of its own")
            .because(&error)
            .fix(all_the_same)
    })?;
    let Some(first) = jobs.first() else { return Ok(()) };
    let what = format!("this machine has {} of its own that have not ended", count(jobs.len() as u64, "job"));
    Err(Fault::new(Code::JobActive, what)
        .why(format!("the oldest is {first}"))
        .fix(format!("let them end, or end them: agentctl cancel --wait {first}; {all_the_same}")))
}

/// Renews with the existing identity. If it is refused, the machine must join again; any other failure is returned.
async fn still_member(
    config: &Config,
    known: &Credentials,
    certified: &Certified,
    place: &(String, u16),
    clock: &Arc<dyn Clock>,
) -> Result<bool, Fault> {
    if certified.until < clock.now() {
        return Ok(false);
    }
    let odd = |error: &agent_identity::KeyError| {
        Fault::new(Code::StateUnusable, "the identity cannot be used").because(error)
    };
    let trust = Trust::Authority(known.authority().map_err(|error| odd(&error))?);
    let held = ShownIdentity::new(known).map_err(|error| odd(&error))?;
    let dialer = dialer(place, trust, Some(held), config, clock)?;
    let channel = transport::dial(transport::endpoint(), Way::Tls(dialer));
    match renew(known, &channel).await {
        Ok(mut new) => {
            new.controller = address(place);
            let path = identity_file(&config.state_dir);
            let failed = |error: io::Error| {
                Fault::new(Code::StateUnusable, format!("cannot write {}", path.display())).because(&error)
            };
            new.write(&path).map_err(failed)?;
            Ok(true)
        }
        Err(fault) if matches!(fault.code, Code::Unidentified | Code::NodeRemoved) => Ok(false),
        Err(fault) => Err(fault),
    }
}

fn name_of(certified: &Certified) -> String {
    match &certified.subject.who {
        Principal::Node { name } => name.to_string(),
        who => who.to_string(),
    }
}

/// The key to join with: that of the existing identity, or of an attempt whose answer was lost, or a new one.
fn pending_key(config: &Config, known: Option<&Credentials>) -> Result<PrivateKey, io::Error> {
    if let Some(known) = known {
        return known.key().map_err(io::Error::other);
    }
    let path = pending(&config.state_dir);
    match std::fs::read_to_string(&path) {
        Ok(text) => return PrivateKey::from_text(&text).map_err(io::Error::other),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Err(_) => {}
    }
    let key = PrivateKey::generate().map_err(io::Error::other)?;
    agent_fs::write_durable(&path, key.to_text().as_bytes())?;
    Ok(key)
}

fn dialer(
    place: &(String, u16),
    trust: Trust,
    held: Option<ShownIdentity>,
    config: &Config,
    clock: &Arc<dyn Clock>,
) -> Result<Dialer, Fault> {
    let (host, port) = (place.0.as_str(), place.1);
    Dialer::new((host, port), trust, held, config.proxy.clone(), Arc::clone(clock))
        .map_err(|error| Fault::new(Code::StateUnusable, "the identity cannot be used").because(&error))
}

fn unreachable(place: &(String, u16), error: &io::Error) -> Fault {
    Fault::new(Code::Unreachable, format!("no controller that gave the token answers at {}", address(place)))
        .because(error)
        .fix("check the address, the firewall, and that the token is of this controller: `agentctl token create`")
}

fn address((host, port): &(String, u16)) -> String {
    Address::Tls { host: host.clone(), port: *port }.to_string()
}

/// The token: of a file, of standard input, or of the command line, where others can read it.
fn read_token(args: &JoinArgs, of_file: Option<io::Result<String>>) -> Result<Token, Fault> {
    let unreadable =
        |error: &io::Error| Fault::new(Code::TokenRefused, "the token cannot be read").because(error);
    let text = match (&args.token, of_file) {
        (Some(token), _) => {
            let _ = writeln!(
                io::stderr(),
                "warning: everybody on this machine can read a command line; next time use --token-file"
            );
            token.clone()
        }
        (None, Some(read)) => read.map_err(|error| unreadable(&error))?,
        (None, None) => {
            if io::stdin().is_terminal() {
                let _ = write!(io::stderr(), "Token: ");
            }
            let mut text = String::new();
            io::stdin()
                .lock()
                .take(LONGEST_TOKEN)
                .read_line(&mut text)
                .map_err(|error| unreadable(&error))?;
            text
        }
    };
    let fix = "an operator makes one: `agentctl token create`";
    let token: Token = text
        .parse()
        .map_err(|error| Fault::new(Code::TokenRefused, "this is no token").because(&error).fix(fix))?;
    match token.kind() {
        TokenKind::Join => Ok(token),
        TokenKind::Login => Err(Fault::new(Code::TokenRefused, "this is the code of a user").fix(
            "a user logs in with it: `agentctl login`; a machine joins with a token: `agentctl token create`",
        )),
    }
}
