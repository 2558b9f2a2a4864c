//! The unix socket for clients of this machine: a controller serves everything there, a daemon that is only a node
//! what it knows of itself.
//!
//! Invariant: a node never takes the socket of another daemon; it runs its jobs without one.

use std::fs::Permissions;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{PermissionsExt, chown};
use std::task::Context;

use agent_cas::remote::{CONNECTION_WINDOW, FRAME, STREAM_WINDOW};
use agent_control::{Operators, Peer};
use agent_model::Principal;
use futures_util::{StreamExt, TryStreamExt};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::Router;
use tracing::{info, warn};

use super::{KEEPALIVE, StartError};
use crate::authority::AnyAuthority;
use crate::config::Config;
use crate::incoming::{self, Connection, Reads};
use crate::limits::Connections;
use crate::node_api::NodeApi;
use crate::open_connections::{OpenConnection, OpenConnections};
use crate::supervisor::Supervisor;

/// Who are operators of this machine.
pub(super) fn operators(config: &Config) -> Operators {
    let group = config.operator_group;
    Operators::new(rustix::process::geteuid().as_raw(), move |who| match who {
        Principal::Local { uid } => group.is_some_and(|group| group.has(*uid)),
        Principal::Node { .. } | Principal::User { .. } => false,
    })
}

/// A server of these services, for a socket and for a fleet.
pub(super) fn server(routes: Routes) -> Router {
    Server::builder()
        .initial_connection_window_size(CONNECTION_WINDOW)
        .initial_stream_window_size(STREAM_WINDOW)
        .max_frame_size(FRAME)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .add_routes(routes)
}

/// Replaces the socket that an earlier daemon left; the lock of the state directory proves that it has ended.
pub(super) fn listen(config: &Config) -> Result<UnixListener, StartError> {
    let socket = &config.socket;
    let bind = || -> io::Result<UnixListener> {
        if let Some(parent) = socket.parent() {
            std::fs::create_dir_all(parent)?;
        }
        match std::fs::remove_file(socket) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(socket)?;
        let mode = if config.user_mode { 0o600 } else { 0o660 };
        if let Some(group) = config.socket_group.filter(|_| !config.user_mode) {
            chown(socket, None, Some(group.id()))?;
        }
        std::fs::set_permissions(socket, Permissions::from_mode(mode))?;
        Ok(listener)
    };
    bind().map_err(|source| StartError::Listen { at: socket.display().to_string(), source })
}

/// Serves clients that connect to the socket.
pub(super) fn serve(listener: UnixListener, server: Router, config: &Config, supervisor: &Supervisor) {
    let places = OpenConnections::new(Connections::new());
    // Descriptors are left for the daemon's own files; however many a user holds, others get a connection.
    let admit = move |stream| {
        let (places, peer) = (places.clone(), peer(&stream));
        async move {
            let holder = match &peer {
                Peer::Local { uid } => Some(uid.to_string()),
                _ => None,
            };
            let place = places.take(holder.as_deref()).await;
            let reads = |place| OfThisMachine { place, authority: AnyAuthority::default() };
            Ok(place.map(|place| Connection::new(stream, peer, reads(place))))
        }
    };
    let connections = UnixListenerStream::new(listener).try_filter_map(admit);
    incoming::serve(supervisor, "api", server, connections.boxed());
    info!(socket = %config.socket.display(), "serving");
}

/// What is done with a connection of this machine.
struct OfThisMachine {
    place: OpenConnection,
    authority: AnyAuthority,
}

impl Reads for OfThisMachine {
    fn saw(&mut self, bytes: &mut [u8]) {
        self.place.heard();
        self.authority.saw(bytes);
    }

    fn over(&mut self, cx: &mut Context<'_>) -> Option<io::Error> {
        self.place.is_over(cx).then(|| io::ErrorKind::ConnectionAborted.into())
    }
}

/// The user whose process connected.
fn peer(stream: &UnixStream) -> Peer {
    let credentials = stream.peer_cred().ok();
    credentials.map_or(Peer::Nobody { from: String::new() }, |process| Peer::Local { uid: process.uid() })
}

/// Serves what a node knows of itself, and returns whether it does: jobs run also where that is not possible.
pub(super) async fn serve_node(config: &Config, api: NodeApi, supervisor: &Supervisor) -> bool {
    // It may be that of the node's own controller, or of any other daemon with another state directory.
    if UnixStream::connect(&config.socket).await.is_ok() {
        warn!(socket = %config.socket.display(), "left socket to another daemon, `agentctl status` shows that one");
        return false;
    }
    match listen(config) {
        Ok(listener) => {
            serve(listener, server(api.routes()), config, supervisor);
            true
        }
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            warn!(error, "cannot serve clients of this machine, jobs run nevertheless");
            false
        }
    }
}
