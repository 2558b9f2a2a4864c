//! A tunnel: logs in to a host and has its SSH server listen on a port of the host's loopback; what connects there is
//! carried to the controller. For hosts that cannot connect to it themselves.
//!
//! Owns the connection, also after it was cut: [`hold`] never gives up. Invariants: the host must show the one key
//! that is known of it; whatever the host asks for, it reaches nothing but the controller.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use agent_model::{TunnelSpec, TunnelState, causes};
use ring::rand::{SecureRandom, SystemRandom};
use russh::client::{self, ChannelOpenHandle, Config, Handle, Msg};
use russh::keys::ssh_key::LineEnding;
use russh::keys::ssh_key::private::Ed25519Keypair;
use russh::keys::{Algorithm, PrivateKey, PrivateKeyWithHashAlg, PublicKey, PublicKeyOrCertificate};
use russh::{Channel, ChannelMsg, ChannelOpenFailure};
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::{is_same_kind, usual_config};

/// Where a host's SSH server listens.
pub(super) const LOOPBACK: &str = "127.0.0.1";
/// The line of `tunnel.sh` by which the host says that earlier connections are gone.
const READY: &str = "agentd-tunnel ready";
/// The longest line that is waited for, with what a shell's own files print before it.
const LONGEST_GREETING: usize = 64 * 1024;
/// The longest time to open a tunnel.
const OPENS: Duration = Duration::from_secs(30);
/// Between attempts, at first and at most. A host may punish whoever comes too often.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// After this time a tunnel counts as stable, and the next attempt is soon.
const STABLE: Duration = Duration::from_secs(20);
/// Connections that wait to be carried.
const WAITING: usize = 64;

/// Why the key of tunnels cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum TunnelKeyError {
    #[error("the system gave no random numbers")]
    Chance,
    #[error("the key of tunnels cannot be understood")]
    Format(#[source] russh::keys::ssh_key::Error),
}

/// The key with which the controller logs in to hosts.
#[derive(Clone)]
pub struct TunnelKey(Arc<PrivateKey>);

impl TunnelKey {
    /// A new one.
    pub fn generate() -> Result<TunnelKey, TunnelKeyError> {
        let mut seed = [0; 32];
        SystemRandom::new().fill(&mut seed).map_err(|_| TunnelKeyError::Chance)?;
        Ok(TunnelKey(Arc::new(Ed25519Keypair::from_seed(&seed).into())))
    }

    /// Reads what [`TunnelKey::to_text`] wrote.
    pub fn read(text: &str) -> Result<TunnelKey, TunnelKeyError> {
        PrivateKey::from_openssh(text).map(Arc::new).map(TunnelKey).map_err(TunnelKeyError::Format)
    }

    /// As a file of OpenSSH. Secret.
    pub fn to_text(&self) -> Result<String, TunnelKeyError> {
        let text = self.0.to_openssh(LineEnding::LF).map_err(TunnelKeyError::Format)?;
        Ok(text.as_str().to_owned())
    }

    /// What a host must know to let it in: `ssh-ed25519 AAAA...`.
    pub fn public(&self) -> Result<String, TunnelKeyError> {
        self.0.public_key().to_openssh().map_err(TunnelKeyError::Format)
    }
}

/// Why a tunnel is not open.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum TunnelError {
    #[error("it does not answer")]
    Unreachable(#[source] io::Error),
    #[error("it was not open within {} s", OPENS.as_secs())]
    Late,
    #[error("the recorded key of the host cannot be read")]
    Recorded(#[source] russh::keys::ssh_key::Error),
    #[error("the host shows another key than before")]
    KeyChanged,
    #[error("the host does not accept the controller's key; attach it again")]
    Refused,
    #[error("the host says nothing that can be understood: {0:?}")]
    Odd(String),
    #[error("its SSH server does not listen on port {0} of its loopback: it may not, or the port is in use")]
    NoPort(u16),
    #[error("the connection ended")]
    Cut,
    #[error("the connection to its SSH server failed")]
    Protocol(#[from] russh::Error),
}

/// Keeps a tunnel open for ever: opens it again, with growing pauses, whenever it was cut. `controller` is where what
/// connects is carried to; `report` is told how it goes.
pub fn hold<'a>(
    spec: &'a TunnelSpec,
    key: &'a TunnelKey,
    controller: &'a str,
    report: &'a (dyn Fn(TunnelState) + Sync),
) -> Pin<Box<dyn Future<Output = Infallible> + Send + 'a>> {
    Box::pin(async move {
        let mut pause = PAUSE.0;
        loop {
            let error = match timeout(OPENS, Open::new(spec, key)).await {
                Ok(Ok(open)) => {
                    report(TunnelState::Up);
                    let since = Instant::now();
                    let error = open.carry(controller).await;
                    if since.elapsed() >= STABLE {
                        pause = PAUSE.0;
                    }
                    error
                }
                Ok(Err(error)) => error,
                Err(_) => TunnelError::Late,
            };
            report(TunnelState::Down { why: causes::tell(&error) });
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE.1);
        }
    })
}

/// A tunnel that is open.
struct Open {
    _handle: Handle<Ends>,
    /// Runs as long as the connection lives.
    guard: Channel<Msg>,
    connections: mpsc::Receiver<Channel<Msg>>,
}

impl Open {
    async fn new(spec: &TunnelSpec, key: &TunnelKey) -> Result<Open, TunnelError> {
        let known = PublicKey::from_openssh(&spec.host_key).map_err(TunnelError::Recorded)?;
        let to = (spec.host.as_str(), spec.port);
        let stream = TcpStream::connect(to).await.map_err(TunnelError::Unreachable)?;
        let _ = stream.set_nodelay(true);
        let (connects, connections) = mpsc::channel(WAITING);
        let config = Arc::new(config(&known));
        let mut handle = client::connect_stream(config, stream, Ends { known, connects }).await?;
        let key = PrivateKeyWithHashAlg::new(Arc::clone(&key.0), None);
        if !handle.authenticate_publickey(&spec.user, key).await?.success() {
            return Err(TunnelError::Refused);
        }
        let mut guard = handle.channel_open_session().await?;
        // What runs is up to the host: the key is good for its `tunnel.sh` alone.
        guard.exec(true, "agentd-tunnel").await?;
        greeted(&mut guard).await?;
        let listens = handle.tcpip_forward(LOOPBACK, spec.listens.into()).await;
        listens.map_err(|_| TunnelError::NoPort(spec.listens))?;
        Ok(Open { _handle: handle, guard, connections })
    }

    /// Carries what connects on the host, until the tunnel is cut.
    async fn carry(mut self, controller: &str) -> TunnelError {
        let mut carried = JoinSet::new();
        loop {
            tokio::select! {
                message = self.guard.wait() => match message {
                    None | Some(ChannelMsg::Eof | ChannelMsg::Close) => return TunnelError::Cut,
                    Some(_) => {}
                },
                Some(connection) = self.connections.recv() => {
                    carried.spawn(carry(connection, controller.to_owned()));
                }
                Some(_) = carried.join_next() => {}
            }
        }
    }
}

/// Waits until the host says that the port is free.
async fn greeted(guard: &mut Channel<Msg>) -> Result<(), TunnelError> {
    let mut said = Vec::new();
    while let Some(message) = guard.wait().await {
        match message {
            ChannelMsg::Data { data } | ChannelMsg::ExtendedData { data, .. } => {
                said.extend_from_slice(&data)
            }
            ChannelMsg::Close => break,
            _ => {}
        }
        if String::from_utf8_lossy(&said).lines().any(|line| line == READY) {
            return Ok(());
        }
        if said.len() > LONGEST_GREETING {
            break;
        }
    }
    let said = String::from_utf8_lossy(&said).into_owned();
    Err(TunnelError::Odd(said.lines().last().unwrap_or_default().to_owned()))
}

async fn carry(connection: Channel<Msg>, controller: String) {
    let Ok(mut there) = TcpStream::connect(&controller).await else {
        let _ = connection.close().await;
        return;
    };
    let _ = there.set_nodelay(true);
    // How it ended is seen by both ends.
    let _ = copy_bidirectional(&mut connection.into_stream(), &mut there).await;
}

/// Asks for the kind of key that is known.
fn config(known: &PublicKey) -> Config {
    let mut config = usual_config();
    let kind = known.algorithm();
    let wanted: Vec<Algorithm> =
        config.preferred.key.iter().filter(|algorithm| is_same_kind(algorithm, &kind)).cloned().collect();
    config.preferred.key = wanted.into();
    config
}

/// Judges the host's key, and hands on what connects.
struct Ends {
    known: PublicKey,
    connects: mpsc::Sender<Channel<Msg>>,
}

impl client::Handler for Ends {
    type Error = TunnelError;

    async fn check_server_key(&mut self, key: &PublicKeyOrCertificate) -> Result<bool, TunnelError> {
        if key.public_key().key_data() == self.known.key_data() {
            return Ok(true);
        }
        Err(TunnelError::KeyChanged)
    }

    async fn server_channel_open_forwarded_tcpip(
        &mut self,
        channel: Channel<Msg>,
        _: &str,
        _: u32,
        _: &str,
        _: u32,
        reply: ChannelOpenHandle,
        _: &mut client::Session,
    ) -> Result<(), TunnelError> {
        match self.connects.try_reserve() {
            Ok(place) => {
                reply.accept().await;
                place.send(channel);
            }
            Err(_) => reply.reject(ChannelOpenFailure::ResourceShortage).await,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_key_is_read_as_it_was_written() {
        let key = TunnelKey::generate().unwrap();
        let read = TunnelKey::read(&key.to_text().unwrap()).unwrap();
        assert_eq!(read.public().unwrap(), key.public().unwrap());
        assert!(key.public().unwrap().starts_with("ssh-ed25519 "));
        assert!(TunnelKey::read("nothing").is_err());
    }

    #[test]
    fn test_a_host_is_asked_for_the_kind_of_key_that_is_known() {
        let known = TunnelKey::generate().unwrap();
        let known = PublicKey::from_openssh(&known.public().unwrap()).unwrap();
        assert_eq!(config(&known).preferred.key.to_vec(), [Algorithm::Ed25519]);
    }
}
