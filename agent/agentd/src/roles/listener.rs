//! The controller's TLS listener for other machines.
//!
//! Owns which connections reach the services: a connection counts from before its handshake, has little time for it
//! and for its first bytes, and ends when its client certificate expires. A client without a certificate can only
//! present a token: few of those are connected at a time, not for long, and the next one closes the one that was silent
//! for longest ([`handshakes`]). Of who has a certificate, whoever has most gives one back when all are taken.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use agent_control::{IdentityConfig, Peer};
use agent_identity::{Authority, Presented, ServerTls};
use agent_model::{Address, Clock};
use futures_util::{FutureExt, StreamExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Router;
use tracing::{debug, error, info};

use super::StartError;
use crate::config::Config;
use crate::handshakes::{self, Shake};
use crate::incoming::{self, Connection, Reads};
use crate::limits::Connections;
use crate::open_connections::{OpenConnection, OpenConnections};
use crate::supervisor::{Supervisor, TaskKind};

/// How long a handshake may take, and then the first bytes.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long a client without a certificate may stay connected: it makes one call.
const STRANGER: Duration = Duration::from_secs(30);
/// The longest time between two checks whether a renewal is due.
const LOOK: Duration = Duration::from_secs(60);
/// The shortest one.
const AGAIN: Duration = Duration::from_millis(200);

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
    let (members, clock) = (OpenConnections::new(Connections::of_a_fleet()), clock.clone());
    let shake: Shake = Box::new(move |stream, from, stranger| {
        shake(tls.clone(), stream, from, clock.clone(), stranger, members.clone()).boxed()
    });
    let (admitted, connections) = mpsc::channel(16);
    let stop = supervisor.stopping(TaskKind::Api);
    let admit = handshakes::admit(listener, HANDSHAKE, admitted, stop, shake);
    supervisor.spawn_infallible(TaskKind::Api, "listener", admit);
    incoming::serve(supervisor, "fleet", server, ReceiverStream::new(connections).boxed());
    info!(at, "serving everybody who has a certificate");
    Ok(())
}

/// Does the handshake, and determines how long the client may stay connected.
async fn shake(
    tls: ServerTls,
    stream: TcpStream,
    from: SocketAddr,
    clock: Arc<dyn Clock>,
    stranger: OpenConnection,
    members: OpenConnections,
) -> io::Result<Connection> {
    stream.set_nodelay(true)?;
    let (stream, presented) = tls.accept(stream).await?;
    let from = from.to_string();
    let (peer, stays, place) = match presented {
        Presented::Certificate(certificate) => {
            let stays = certificate.until.since(clock.now());
            let place = handshakes::place_of(&members, &certificate.subject.who.to_string()).await?;
            (Peer::Certified { certificate, from }, stays, place)
        }
        Presented::Nothing => (Peer::Nobody { from }, STRANGER, stranger),
    };
    let now = Instant::now();
    let speaks = Box::pin(sleep_until(now + HANDSHAKE));
    Ok(Connection::new(stream, peer, Until { end: speaks, stays: Some(now + stays), place }))
}

/// Ends a connection whose time is over, or whose place another gets.
struct Until {
    /// Until the first bytes: their deadline. After them: when the connection ends.
    end: Pin<Box<Sleep>>,
    /// When the connection ends; set until the first bytes arrived.
    stays: Option<Instant>,
    place: OpenConnection,
}

impl Reads for Until {
    fn saw(&mut self, bytes: &mut [u8]) {
        self.place.heard();
        if !bytes.is_empty()
            && let Some(stays) = self.stays.take()
        {
            self.end.as_mut().reset(stays);
        }
    }

    fn over(&mut self, cx: &mut Context<'_>) -> Option<io::Error> {
        // Both are asked, so that either wakes the task.
        let is_over = self.end.as_mut().poll(cx).is_ready();
        (self.place.is_over(cx) || is_over)
            .then(|| io::Error::new(io::ErrorKind::TimedOut, "its time is over"))
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
