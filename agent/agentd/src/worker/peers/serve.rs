//! The port at which other nodes read blobs of this one.
//!
//! A connection is of a node with a certificate of the authority. The controller is asked whether the node still
//! belongs to it, before the first call and every [`AGAIN`] after that: a removed node loses what it has within that
//! time. While the controller cannot be asked nobody new is served, and who is served is for [`GRACE`] more.
//! Connections and calls are bounded: what this node does for others leaves its jobs theirs.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use agent_cas::Disk;
use agent_cas::peer::service;
use agent_cas::remote::{FRAME, STREAM_WINDOW};
use agent_control::Peer;
use agent_identity::{PeerTls, ServerStream, Subject};
use agent_model::Code;
use agent_proto::v1;
use agent_proto::v1::worker_client::WorkerClient;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned};
use tonic::transport::Server;
use tracing::{debug, info};

use super::{ANSWER, KEEPALIVE, Shared};
use crate::incoming::{self, Connection, Reads};
use crate::limits::Connections;
use crate::supervisor::{Supervisor, TaskKind};

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Handshakes at a time.
const HANDSHAKES: usize = 32;
/// The wait after `accept` failed.
const PAUSE: Duration = Duration::from_millis(200);
/// How often the controller is asked about a node that is connected.
const AGAIN: Duration = Duration::from_secs(10);
/// For how long a connection lasts while the controller cannot be asked.
const GRACE: Duration = Duration::from_secs(60);

/// Serves until the daemon stops.
pub(super) fn start(
    shared: Arc<Shared>,
    listener: TcpListener,
    tls: PeerTls,
    disk: Disk,
    supervisor: &Supervisor,
) {
    let awaited = Arc::clone(&shared);
    let routes = service(disk, Arc::new(move |tree| awaited.is_fetching(tree)));
    let (admitted, connections) = mpsc::channel(16);
    let stop = supervisor.stopping(TaskKind::Api);
    let server = Server::builder()
        .initial_connection_window_size(STREAM_WINDOW)
        .max_frame_size(FRAME)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .add_routes(routes);
    incoming::serve(supervisor, "blobs for other nodes", server, ReceiverStream::new(connections).boxed());
    let door = Door { shared, listener, tls, connections: Connections::of_peers() };
    supervisor.spawn_infallible(TaskKind::Api, "peer port", door.run(admitted, stop));
}

struct Door {
    shared: Arc<Shared>,
    listener: TcpListener,
    tls: PeerTls,
    connections: Connections,
}

impl Door {
    async fn run(self, admitted: mpsc::Sender<io::Result<Connection>>, stop: CancellationToken) {
        let (mut handshakes, mut watches) = (JoinSet::new(), JoinSet::new());
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Some(_) = watches.join_next() => {}
                Some(shaken) = handshakes.join_next() => {
                    let Ok(Some((connection, watch))) = shaken else { continue };
                    watches.spawn(watch);
                    let _ = admitted.send(Ok(connection)).await; // else the server has ended
                }
                accepted = self.listener.accept(), if handshakes.len() < HANDSHAKES => match accepted {
                    Ok((stream, from)) => {
                        // One too many is closed: the node goes elsewhere.
                        let Some(permit) = self.connections.permit() else { continue };
                        let (tls, shared) = (self.tls.clone(), Arc::clone(&self.shared));
                        handshakes.spawn(async move {
                            let shaken = timeout(HANDSHAKE + ANSWER, shake(&tls, stream, from, shared));
                            match shaken.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                                Ok((stream, peer, admission, watch)) => {
                                    Some((Connection::new(stream, peer, admission, Some(permit)), watch))
                                }
                                Err(error) => {
                                    info!(%from, %error, "refused connection at the peer port");
                                    None
                                }
                            }
                        });
                    }
                    Err(error) => {
                        debug!(%error, "the system gives no connection");
                        sleep(PAUSE).await;
                    }
                },
            }
        }
    }
}

/// Does the handshake, and asks the controller; also returns what asks it again and again.
async fn shake(
    tls: &PeerTls,
    stream: TcpStream,
    from: SocketAddr,
    shared: Arc<Shared>,
) -> io::Result<(ServerStream, Peer, Admission, BoxFuture<'static, ()>)> {
    stream.set_nodelay(true)?;
    let (stream, certified) = tls.accept(stream).await?;
    match ask(&shared, &certified.subject).await {
        PeerVerdict::Member => {}
        PeerVerdict::Stranger => {
            let what = format!("{} belongs to the controller no more", certified.subject.who);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        PeerVerdict::Unknown => {
            return Err(io::Error::other("the controller does not say who belongs to it"));
        }
    }
    let (revoked, gone) = (CancellationToken::new(), CancellationToken::new());
    let admission =
        Admission { revoked: Box::pin(revoked.clone().cancelled_owned()), _gone: gone.clone().drop_guard() };
    let peer = Peer::Certified { certificate: certified.clone(), from: from.to_string() };
    let watch = async move {
        let valid = certified.until.since(shared.clock.now());
        tokio::select! {
            () = gone.cancelled() => {}
            () = sleep(valid) => {}
            () = until_refused(&shared, &certified.subject) => {
                info!(who = %certified.subject.who, "ended a connection at the peer port");
            }
        }
        revoked.cancel();
    };
    Ok((stream, peer, admission, watch.boxed()))
}

/// Returns when a node does not belong to the controller any more, or nobody could say so for long.
async fn until_refused(shared: &Shared, subject: &Subject) {
    let mut told = Instant::now();
    loop {
        sleep(AGAIN).await;
        match ask(shared, subject).await {
            PeerVerdict::Member => told = Instant::now(),
            PeerVerdict::Stranger => return,
            PeerVerdict::Unknown if told.elapsed() > GRACE => return,
            PeerVerdict::Unknown => {}
        }
    }
}

/// What the controller says of a node.
enum PeerVerdict {
    Member,
    Stranger,
    Unknown,
}

async fn ask(shared: &Shared, subject: &Subject) -> PeerVerdict {
    let request = v1::AdmitPeerRequest { node: shared.node.to_string(), subject: subject.to_string() };
    let mut client = WorkerClient::new(shared.controller.clone());
    match timeout(ANSWER, client.admit_peer(request)).await {
        Ok(Ok(_)) => PeerVerdict::Member,
        Ok(Err(status))
            if matches!(agent_proto::fault(&status).code, Code::Unidentified | Code::NodeRemoved) =>
        {
            PeerVerdict::Stranger
        }
        _ => PeerVerdict::Unknown,
    }
}

/// Ends a connection when it is revoked.
struct Admission {
    revoked: Pin<Box<WaitForCancellationFutureOwned>>,
    _gone: DropGuard,
}

impl Reads for Admission {
    fn saw(&mut self, _: &mut [u8]) {}

    fn over(&mut self, cx: &mut Context<'_>) -> Option<io::Error> {
        let is_revoked = self.revoked.as_mut().poll(cx).is_ready();
        is_revoked.then(|| io::Error::new(io::ErrorKind::PermissionDenied, "it was revoked"))
    }
}
