//! The port at which other nodes read blobs of this one.
//!
//! A connection is of a node with a certificate of the authority. The controller is asked whether the node still
//! belongs to it, before the first call and every [`AGAIN`] after that: a removed node loses what it has within that
//! time. While the controller cannot be asked nobody new is served, and who is served is for [`GRACE`] more.
//! Connections and calls are bounded: what this node does for others leaves its jobs theirs, and strangers keep no node
//! out ([`handshakes`]).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use agent_cas::Disk;
use agent_cas::peer::service;
use agent_cas::remote::{FRAME, STREAM_WINDOW};
use agent_control::Peer;
use agent_identity::{PeerTls, Subject};
use agent_model::Code;
use agent_proto::v1;
use agent_proto::v1::worker_client::WorkerClient;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tracing::info;

use super::{ANSWER, KEEPALIVE, Shared};
use crate::handshakes::{self, Shake};
use crate::incoming::{self, Connection, Reads};
use crate::limits::Connections;
use crate::open_connections::{OpenConnection, OpenConnections};
use crate::supervisor::{Supervisor, TaskKind};

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);
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
    let members = OpenConnections::new(Connections::of_peers());
    let shake: Shake = Box::new(move |stream, from, _| {
        shake(tls.clone(), stream, from, Arc::clone(&shared), members.clone()).boxed()
    });
    let admit = handshakes::admit(listener, HANDSHAKE + ANSWER, admitted, stop, shake);
    supervisor.spawn_infallible(TaskKind::Api, "peer port", admit);
}

/// Does the handshake, and asks the controller, which is asked again and again while the connection lasts.
async fn shake(
    tls: PeerTls,
    stream: TcpStream,
    from: SocketAddr,
    shared: Arc<Shared>,
    members: OpenConnections,
) -> io::Result<Connection> {
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
    let place = handshakes::place_of(&members, &certified.subject.who.to_string()).await?;
    let peer = Peer::Certified { certificate: certified.clone(), from: from.to_string() };
    let revoked = async move {
        let valid = certified.until.since(shared.clock.now());
        tokio::select! {
            () = sleep(valid) => {}
            () = until_refused(&shared, &certified.subject) => {
                info!(who = %certified.subject.who, "ended a connection at the peer port");
            }
        }
    };
    Ok(Connection::new(stream, peer, Admission { revoked: revoked.boxed(), place }))
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

/// Ends a connection when it is revoked, or another gets its place.
struct Admission {
    revoked: BoxFuture<'static, ()>,
    place: OpenConnection,
}

impl Reads for Admission {
    fn saw(&mut self, _: &mut [u8]) {
        self.place.heard();
    }

    fn over(&mut self, cx: &mut Context<'_>) -> Option<io::Error> {
        // Both are asked, so that either wakes the task.
        let is_revoked = self.revoked.as_mut().poll(cx).is_ready();
        (self.place.is_over(cx) || is_revoked)
            .then(|| io::Error::new(io::ErrorKind::PermissionDenied, "it was revoked"))
    }
}
