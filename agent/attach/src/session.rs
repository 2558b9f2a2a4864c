//! One SSH connection to a host, through jump hosts if needed: tries until it answers, checks its key, logs in, runs
//! commands.
//!
//! Hides russh. Invariant: nothing is sent to a host, in particular no password, before its key was found to be the
//! known one or the user accepted it. One command runs at a time, because a host may allow no more.

mod greeting;
mod login;
mod tunnel;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use agent_model::{Clock, SystemClock};
use russh::client::{self, Config, Handle};
use russh::keys::{Algorithm, HashAlg, PublicKey, PublicKeyOrCertificate};
use russh::{ChannelMsg, Disconnect};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::known_hosts::{KeyVerdict, KnownHosts, Place};
use crate::target::{Hop, Route};
use crate::{Desk, HostKey};
use greeting::TurnedAway;
pub use tunnel::{TunnelError, TunnelKey, TunnelKeyError, hold};

/// A dead peer is noticed after three of these.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// One try to connect and to agree on keys.
const HANDSHAKE: Duration = Duration::from_secs(20);
/// Between tries, at first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));
/// The same, while each try may make a penalty last longer.
const PENALTY_PAUSE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(60));
/// The most bytes kept of a command's output; our script prints less.
const LONGEST_ANSWER: usize = 256 * 1024;
/// A host that sends more for one command is not listened to any longer.
const ENDLESS: usize = 4 * LONGEST_ANSWER;
/// The bytes of a file that are sent at a time.
const PIECE: usize = 128 * 1024;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ConnectError {
    #[error("{host} does not answer as an SSH server within {} s", waited.as_secs())]
    Unreachable {
        host: String,
        /// For how long it was tried.
        waited: Duration,
        source: russh::Error,
    },
    #[error("{host} drops connections from here, for {} s now: {why}", waited.as_secs())]
    TurnedAway {
        host: String,
        /// For how long it was tried.
        waited: Duration,
        why: &'static str,
    },
    #[error("{host} shows another key than the one that is known of it: {shown}")]
    KeyChanged { host: String, shown: String, known: Place },
    #[error("{host} shows a key that is revoked: {shown}")]
    KeyRevoked { host: String, shown: String, said: Place },
    #[error("the key of {host} is not known: {shown}")]
    KeyUnknown { host: String, shown: String },
    #[error("a file of ssh cannot be read")]
    File(#[source] std::io::Error),
    #[error("{host} lets nobody in as {user}")]
    Refused {
        host: String,
        user: String,
        /// What was tried, and what the host accepts.
        tried: String,
    },
    #[error("the connection to {host} ended while logging in")]
    Ended { host: String, source: russh::Error },
    #[error(transparent)]
    Protocol(#[from] russh::Error),
}

/// Why a command has no result.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum CommandError {
    #[error("the connection ended while {doing}")]
    Cut { doing: &'static str },
    #[error("{doing} was not done within {} s", limit.as_secs())]
    TooLong { doing: &'static str, limit: Duration },
    #[error("the host sent more than {} KiB while {doing}", ENDLESS / 1024)]
    TooMuch { doing: &'static str },
    #[error("cannot read what is to be sent")]
    Source(#[source] std::io::Error),
}

/// The result of a command.
#[derive(Debug, Default)]
pub(crate) struct Ran {
    /// `None` if it was killed.
    pub(crate) code: Option<u32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// A command and its input.
pub(crate) struct Command<'a> {
    pub(crate) line: &'a str,
    /// What it reads first.
    pub(crate) input: &'a [u8],
    /// A file that it reads next, and a callback that gets the number of bytes sent so far.
    pub(crate) file: Option<(tokio::fs::File, &'a dyn Fn(u64))>,
    pub(crate) doing: &'static str,
    pub(crate) limit: Duration,
}

/// A host that is logged in to.
pub(crate) struct Session {
    handle: Handle<Judge>,
    /// The key that the host showed, as a line of OpenSSH.
    pub(crate) host_key: String,
    /// The connections to the jump hosts, which must stay open as long.
    _before: Vec<Handle<Judge>>,
}

impl Session {
    /// Connects and logs in, through the jump hosts.
    pub(crate) async fn open(target: &Route, desk: &dyn Desk) -> Result<Session, ConnectError> {
        let end = Instant::now() + target.deadline;
        let mut before: Vec<Handle<Judge>> = Vec::new();
        let mut host_key = String::new();
        for (index, hop) in target.hops.iter().enumerate() {
            let is_last = index + 1 == target.hops.len();
            let (mut handle, key) = connect(target, hop, before.last(), end, desk).await?;
            host_key = key.and_then(|key| key.to_openssh().ok()).unwrap_or_default();
            login::login(&mut handle, hop, is_last.then_some(target), desk).await?;
            before.push(handle);
        }
        let handle = before.pop().ok_or(russh::Error::Disconnect)?;
        Ok(Session { handle, host_key, _before: before })
    }

    /// Runs a command to its end.
    pub(crate) async fn run(&self, command: Command<'_>) -> Result<Ran, CommandError> {
        let (doing, limit) = (command.doing, command.limit);
        match timeout(limit, self.run_unlimited(command)).await {
            Ok(ran) => ran,
            Err(_) => Err(CommandError::TooLong { doing, limit }),
        }
    }

    async fn run_unlimited(&self, command: Command<'_>) -> Result<Ran, CommandError> {
        let cut = |_| CommandError::Cut { doing: command.doing };
        let channel = self.channel(command.doing).await?;
        channel.exec(true, command.line).await.map_err(cut)?;
        let (mut read, write) = channel.split();
        let send = async {
            if !command.input.is_empty() && write.data_bytes(command.input.to_vec()).await.is_err() {
                return Ok(()); // how it ended is told below
            }
            if let Some((mut file, taken)) = command.file {
                let (mut piece, mut sent) = (vec![0; PIECE], 0);
                loop {
                    let length = file.read(&mut piece).await.map_err(CommandError::Source)?;
                    if length == 0 || write.data_bytes(piece[..length].to_vec()).await.is_err() {
                        break;
                    }
                    sent += length as u64;
                    taken(sent);
                }
            }
            let _ = write.eof().await;
            Ok(())
        };
        let receive = async {
            let (mut ran, mut has_ended) = (Ran::default(), false);
            let (mut out, mut err, mut came) = (Vec::new(), Vec::new(), 0);
            let keep = |kept: &mut Vec<u8>, data: &[u8]| {
                kept.extend_from_slice(&data[..data.len().min(LONGEST_ANSWER.saturating_sub(kept.len()))]);
            };
            while let Some(message) = read.wait().await {
                if let ChannelMsg::Data { data } | ChannelMsg::ExtendedData { data, .. } = &message {
                    came += data.len();
                }
                if came > ENDLESS {
                    return Err(CommandError::TooMuch { doing: command.doing });
                }
                match message {
                    ChannelMsg::Data { data } => keep(&mut out, &data),
                    ChannelMsg::ExtendedData { data, ext: 1 } => keep(&mut err, &data),
                    ChannelMsg::ExitStatus { exit_status } => {
                        (ran.code, has_ended) = (Some(exit_status), true)
                    }
                    ChannelMsg::ExitSignal { .. } => has_ended = true,
                    ChannelMsg::Close => break,
                    _ => {}
                }
            }
            ran.out = String::from_utf8_lossy(&out).into_owned();
            ran.err = String::from_utf8_lossy(&err).into_owned();
            if has_ended { Ok(ran) } else { Err(CommandError::Cut { doing: command.doing }) }
        };
        // A command that ended early reads no more input, so its end is waited for, and not the end of sending.
        let (mut send, mut receive) = (std::pin::pin!(send), std::pin::pin!(receive));
        tokio::select! {
            biased;
            ran = &mut receive => ran,
            sent = &mut send => {
                sent?;
                receive.await
            }
        }
    }

    /// A channel for one command. A host that allows one channel at a time may not have closed the last one yet.
    async fn channel(&self, doing: &'static str) -> Result<russh::Channel<client::Msg>, CommandError> {
        for _ in 0..20 {
            match self.handle.channel_open_session().await {
                Ok(channel) => return Ok(channel),
                Err(russh::Error::ChannelOpenFailure(_)) => sleep(PAUSE.0).await,
                Err(_) => break,
            }
        }
        Err(CommandError::Cut { doing })
    }

    /// The first of these ports of the host's loopback at which its SSH server listens for us; `None` if it does so at
    /// none of them.
    pub(crate) async fn free_port(&self, ports: RangeInclusive<u16>) -> Option<u16> {
        for port in ports {
            let asked = self.handle.tcpip_forward(tunnel::LOOPBACK, u32::from(port));
            if timeout(HANDSHAKE, asked).await.is_ok_and(|answer| answer.is_ok()) {
                let _ = self.handle.cancel_tcpip_forward(tunnel::LOOPBACK, u32::from(port)).await;
                return Some(port);
            }
        }
        None
    }

    /// Disconnects.
    pub(crate) async fn close(self) {
        let _ = self.handle.disconnect(Disconnect::ByApplication, "", "en").await;
    }
}

/// Tries until a host answers, and returns the key it showed; a refused key is final.
async fn connect(
    target: &Route,
    hop: &Hop,
    by: Option<&Handle<Judge>>,
    end: Instant,
    desk: &dyn Desk,
) -> Result<(Handle<Judge>, Option<PublicKey>), ConnectError> {
    let (started, mut pause) = (Instant::now(), PAUSE.0);
    loop {
        let known = KnownHosts::read(&hop.known_hosts).map_err(ConnectError::File)?;
        let limit = end.min(Instant::now() + HANDSHAKE);
        let judge = Judge::new(target, hop, known);
        let config = Arc::new(config(&judge));
        let shown_key = Arc::clone(&judge.seen);
        let tried = timeout_at(limit, dial(hop, by, config, judge)).await;
        let key = shown_key.lock().ok().and_then(|mut key| key.take());
        let miss = match tried {
            Ok(Ok(Dialed::Greeted(handle))) => return Ok((handle, key)),
            Ok(Ok(Dialed::TurnedAway(why))) => Miss::TurnedAway(why),
            Ok(Err(ConnectError::Protocol(error))) => Miss::Silent(error),
            // The user may take longer to answer than the host waits, so the question is asked between two tries.
            Ok(Err(ConnectError::KeyUnknown { host, shown })) => {
                // A host of which another key was expected is not asked about.
                let key = key.filter(|_| target.fingerprint.is_none() || !is_last(target, hop));
                let Some(key) = key.filter(|_| desk.trusts(&HostKey { host: &host, fingerprint: &shown }))
                else {
                    return Err(ConnectError::KeyUnknown { host, shown });
                };
                learn(hop, &key).map_err(ConnectError::File)?;
                continue;
            }
            Ok(Err(other)) => return Err(other),
            Err(_) => Miss::Silent(russh::Error::ConnectionTimeout),
        };
        let (least, most) = miss.pauses();
        pause = pause.max(least);
        if Instant::now() + pause >= end {
            return Err(miss.after(hop.to_string(), started.elapsed()));
        }
        match &miss {
            Miss::Silent(error) => desk.waits(&format!("{hop} does not answer yet ({error})")),
            Miss::TurnedAway(why) => {
                desk.waits(&format!("{hop} drops connections from here: {}", why.describe()))
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(most);
    }
}

/// Why one try gave no connection, while another may.
enum Miss {
    /// There is no SSH server.
    Silent(russh::Error),
    /// There is one, which turned this connection away.
    TurnedAway(TurnedAway),
}

impl Miss {
    /// The least and the most time until the next try.
    fn pauses(&self) -> (Duration, Duration) {
        match self {
            Miss::TurnedAway(TurnedAway::Penalty) => PENALTY_PAUSE,
            Miss::TurnedAway(_) | Miss::Silent(_) => PAUSE,
        }
    }

    /// The error when there is no time for another try.
    fn after(self, host: String, waited: Duration) -> ConnectError {
        match self {
            Miss::Silent(source) => ConnectError::Unreachable { host, waited, source },
            Miss::TurnedAway(why) => ConnectError::TurnedAway { host, waited, why: why.describe() },
        }
    }
}

/// Whether a hop is the host itself.
fn is_last(target: &Route, hop: &Hop) -> bool {
    target.hops.last().is_some_and(|last| std::ptr::eq(last, hop))
}

/// The result of a connection to a host.
enum Dialed {
    Greeted(Handle<Judge>),
    TurnedAway(TurnedAway),
}

async fn dial(
    hop: &Hop,
    by: Option<&Handle<Judge>>,
    config: Arc<Config>,
    judge: Judge,
) -> Result<Dialed, ConnectError> {
    match by {
        None => {
            let stream = TcpStream::connect((hop.host.as_str(), hop.port)).await.map_err(russh::Error::IO)?;
            let _ = stream.set_nodelay(true);
            if let Some(why) = greeting::awaited(&stream).await.map_err(russh::Error::IO)? {
                return Ok(Dialed::TurnedAway(why));
            }
            client::connect_stream(config, stream, judge).await.map(Dialed::Greeted)
        }
        Some(gate) => {
            let channel = gate.channel_open_direct_tcpip(&hop.host, hop.port.into(), "127.0.0.1", 0).await?;
            client::connect_stream(config, channel.into_stream(), judge).await.map(Dialed::Greeted)
        }
    }
}

fn usual_config() -> Config {
    Config {
        keepalive_interval: Some(KEEPALIVE),
        keepalive_max: 3,
        inactivity_timeout: None,
        nodelay: true,
        ..Config::default()
    }
}

/// Whether two algorithms are of one kind of key.
fn is_same_kind(one: &Algorithm, other: &Algorithm) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
}

fn config(judge: &Judge) -> Config {
    let mut config = usual_config();
    // A host with several keys is asked for one of a known kind.
    let kinds = judge.known.kinds(&judge.host, judge.port);
    let mut wanted: Vec<Algorithm> = config.preferred.key.to_vec();
    let is_known = |wanted: &Algorithm| kinds.iter().any(|kind| is_same_kind(kind, wanted));
    wanted.sort_by_key(|algorithm| !is_known(algorithm));
    if judge.known.has_authority(&judge.host, judge.port) {
        config.preferred.host_key_certificates = wanted.clone().into();
    }
    config.preferred.key = wanted.into();
    config
}

/// Records the key of a host.
fn learn(hop: &Hop, key: &PublicKey) -> std::io::Result<()> {
    let Some(file) = hop.known_hosts.first() else { return Ok(()) };
    let (host, port) = hop.known_as();
    russh::keys::known_hosts::learn_known_hosts_path(host, port, key, file).map_err(std::io::Error::other)
}

/// Judges the key of one host.
struct Judge {
    host: String,
    port: u16,
    shown_as: String,
    known: KnownHosts,
    /// The fingerprint it must have, whatever is known.
    expected: Option<String>,
    /// The key that was shown.
    seen: Arc<std::sync::Mutex<Option<PublicKey>>>,
}

impl Judge {
    fn new(target: &Route, hop: &Hop, known: KnownHosts) -> Judge {
        let (is_last, (host, port)) = (is_last(target, hop), hop.known_as());
        Judge {
            host: host.to_owned(),
            port,
            shown_as: hop.to_string(),
            known,
            expected: target.fingerprint.clone().filter(|_| is_last),
            seen: Arc::default(),
        }
    }
}

impl client::Handler for Judge {
    type Error = ConnectError;

    async fn check_server_key(&mut self, key: &PublicKeyOrCertificate) -> Result<bool, ConnectError> {
        let plain = key.public_key();
        if let Ok(mut seen) = self.seen.lock() {
            *seen = Some(plain.clone());
        }
        let shown = plain.fingerprint(HashAlg::Sha256).to_string();
        let host = self.shown_as.clone();
        let now = SystemClock.now().0 / 1000;
        let verdict = match key.certificate() {
            Some(certificate) => self.known.judge_certificate(&self.host, self.port, certificate, now),
            None => self.known.judge(&self.host, self.port, &plain),
        };
        match verdict {
            KeyVerdict::Revoked(said) => Err(ConnectError::KeyRevoked { host, shown, said }),
            KeyVerdict::Known => Ok(true),
            _ if self.expected.as_ref() == Some(&shown) => Ok(true),
            KeyVerdict::Changed(known) | KeyVerdict::OtherKind(known) => {
                Err(ConnectError::KeyChanged { host, shown, known })
            }
            KeyVerdict::Unknown => Err(ConnectError::KeyUnknown { host, shown }),
        }
    }
}
