//! The controller's TLS listener for other machines.
//!
//! Owns which connections reach the services: a connection counts from before its handshake, has little time for it
//! and for its first bytes, and ends when its client certificate expires. A client without a certificate can only
//! present a token: few of those are connected at a time, and not for long.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use agent_control::{IdentityConfig, Peer};
use agent_identity::{Authority, Presented, ServerStream, ServerTls};
use agent_model::{Address, Clock};
use futures_util::{FutureExt, StreamExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Router;
use tracing::{debug, error, info, warn};

use super::StartError;
use crate::config::Config;
use crate::incoming::{self, Connection, Reads};
use crate::limits::Connections;
use crate::supervisor::{Supervisor, TaskKind};

/// How long a handshake may take, and then the first bytes.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Handshakes at a time.
const HANDSHAKES: usize = 256;
/// How long a client without a certificate may stay connected: it makes one call.
const STRANGER: Duration = Duration::from_secs(30);
/// How many of them may be connected at a time.
const STRANGERS: usize = 32;
/// The wait after `accept` failed.
const AGAIN: Duration = Duration::from_millis(200);
/// The longest time between two checks whether a renewal is due.
const LOOK: Duration = Duration::from_secs(60);

/// How long the controller's own certificate is valid.
const OWN_LIFE: Duration = Duration::from_secs(90 * 24 * 3600);

/// The authority that identifies callers, if other machines are served.
pub(crate) fn authority(
    config: &Config,
    clock: &Arc<dyn Clock>,
) -> Result<Option<IdentityConfig>, StartError> {
    let Some((host, port)) = &config.listen else { return Ok(None) };
    let path = config.state_dir.join("controller/authority.json");
    let authority = Authority::open(&path, clock.now()).map_err(StartError::Authority)?;
    // Clients cannot connect to the wildcard address, so the machine's name is given out.
    let host = match host.as_str() {
        "0.0.0.0" | "::" => config.host_name.clone(),
        host => host.to_owned(),
    };
    let usual = IdentityConfig::new(Arc::new(authority), Address::Tls { host, port: *port }.to_string());
    Ok(Some(match config.certificate_life {
        Some(life) => IdentityConfig { node_life: life, user_life: life, ..usual },
        None => usual,
    }))
}

/// Serves other machines with the same services.
pub(crate) async fn serve(
    (host, port): &(String, u16),
    identity: IdentityConfig,
    config: &Config,
    clock: &Arc<dyn Clock>,
    supervisor: &Supervisor,
    server: Router,
) -> Result<(), StartError> {
    let life = config.certificate_life.unwrap_or(OWN_LIFE);
    let tls = ServerTls::new(identity.authority, clock.clone(), life).map_err(StartError::Tls)?;
    let at = format!("{host}:{port}");
    let failed = |source| StartError::Listen { at: at.clone(), source };
    let listener = TcpListener::bind((host.as_str(), *port)).await.map_err(failed)?;
    let (shown, time) = (tls.clone(), clock.clone());
    supervisor.spawn_again(TaskKind::Upkeep, "own certificate", move || renew(shown.clone(), time.clone()));
    let listener = Listener { listener, tls, connections: Connections::of_a_fleet(), clock: clock.clone() };
    let (admitted, connections) = mpsc::channel(16);
    let stop = supervisor.stopping(TaskKind::Api);
    supervisor.spawn_infallible(TaskKind::Api, "listener", listener.run(admitted, stop));
    incoming::serve(supervisor, "fleet", server, ReceiverStream::new(connections).boxed());
    info!(at, "serving everybody who has a certificate");
    Ok(())
}

/// Accepts connections.
struct Listener {
    listener: TcpListener,
    tls: ServerTls,
    connections: Connections,
    clock: Arc<dyn Clock>,
}

impl Listener {
    /// Accepts connections until `stop`; those with a completed handshake are sent to `admitted`.
    async fn run(self, admitted: mpsc::Sender<io::Result<Connection>>, stop: CancellationToken) {
        let mut handshakes = JoinSet::new();
        let strangers = Arc::new(Semaphore::new(STRANGERS));
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Some(_) = handshakes.join_next() => {}
                accepted = self.listener.accept(), if handshakes.len() < HANDSHAKES => match accepted {
                    Ok((stream, from)) => {
                        // One too many is closed: descriptors are left for the daemon's own files.
                        let Some(permit) = self.connections.permit() else { continue };
                        let (tls, clock) = (self.tls.clone(), Arc::clone(&self.clock));
                        let (admitted, strangers) = (admitted.clone(), Arc::clone(&strangers));
                        let shake = async move {
                            let shaken = timeout(HANDSHAKE, shake(&tls, stream, from, &*clock, &strangers)).await;
                            match shaken.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                                Ok((stream, peer, until)) => {
                                    let connection = Connection::new(stream, peer, until, Some(permit));
                                    let _ = admitted.send(Ok(connection)).await;
                                }
                                Err(error) => debug!(%from, %error, "a connection was not taken"),
                            }
                        };
                        handshakes.spawn(shake.boxed());
                    }
                    Err(error) => {
                        warn!(%error, "the system gives no connection");
                        sleep(AGAIN).await;
                    }
                },
            }
        }
    }
}

/// Does the handshake, and determines how long the client may stay connected.
async fn shake(
    tls: &ServerTls,
    stream: TcpStream,
    from: SocketAddr,
    clock: &dyn Clock,
    strangers: &Arc<Semaphore>,
) -> io::Result<(ServerStream, Peer, Until)> {
    stream.set_nodelay(true)?;
    let (stream, presented) = tls.accept(stream).await?;
    let from = from.to_string();
    let (peer, stays, stranger) = match presented {
        Presented::Certificate(certificate) => {
            let stays = certificate.until.since(clock.now());
            (Peer::Certified { certificate, from }, stays, None)
        }
        Presented::Nothing => {
            let one = Arc::clone(strangers).try_acquire_owned();
            let one = one.map_err(|_| io::Error::other("there are too many without a certificate"))?;
            (Peer::Nobody { from }, STRANGER, Some(one))
        }
    };
    let now = Instant::now();
    let speaks = Box::pin(sleep_until(now + HANDSHAKE));
    Ok((stream, peer, Until { end: speaks, stays: Some(now + stays), _stranger: stranger }))
}

/// Ends a connection whose time is over.
struct Until {
    /// Until the first bytes: their deadline. After them: when the connection ends.
    end: Pin<Box<Sleep>>,
    /// When the connection ends; set until the first bytes arrived.
    stays: Option<Instant>,
    _stranger: Option<OwnedSemaphorePermit>,
}

impl Reads for Until {
    fn saw(&mut self, bytes: &mut [u8]) {
        if !bytes.is_empty()
            && let Some(stays) = self.stays.take()
        {
            self.end.as_mut().reset(stays);
        }
    }

    fn over(&mut self, cx: &mut Context<'_>) -> Option<io::Error> {
        let is_over = self.end.as_mut().poll(cx).is_ready();
        is_over.then(|| io::Error::new(io::ErrorKind::TimedOut, "its time is over"))
    }
}

/// Replaces the certificate before it expires; open connections are not affected.
async fn renew(tls: ServerTls, clock: Arc<dyn Clock>) {
    loop {
        let left = tls.renew_at().since(clock.now());
        if left.is_zero() {
            match tls.renew() {
                Ok(()) => debug!("the controller's own certificate was renewed"),
                Err(error) => {
                    error!(error = &error as &dyn std::error::Error, "the controller's certificate ends soon")
                }
            }
        }
        sleep(left.clamp(AGAIN, LOOK)).await;
    }
}
