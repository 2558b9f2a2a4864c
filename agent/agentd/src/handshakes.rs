//! The connections of a TLS listener, from before their handshake until they are served.
//!
//! Owns the time that a handshake has, and the places of those of which it is not known whose they are: there are few, and
//! when all are taken the one that was silent for longest is closed for the next ([`open_connections`]). So nobody holds up
//! others by connecting and saying nothing. Who shows a certificate gets a place among those who did, which no stranger
//! takes.
//!
//! [`open_connections`]: crate::open_connections

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::incoming::Connection;
use crate::limits::Connections;
use crate::open_connections::{OpenConnection, OpenConnections};

/// The wait after `accept` failed, most likely for lack of descriptors.
const AGAIN: Duration = Duration::from_millis(200);

/// Does the handshake of a connection. It gets the place of a stranger, which it keeps for one, and gives back for one that
/// it knows. In a box, so that what follows is compiled once.
pub(crate) type Shake = Box<
    dyn Fn(TcpStream, SocketAddr, OpenConnection) -> BoxFuture<'static, io::Result<Connection>> + Send + Sync,
>;

/// Accepts connections until `stop`, and sends those to `admitted` that `shake` admits within this time.
pub(crate) async fn admit(
    listener: TcpListener,
    within: Duration,
    admitted: mpsc::Sender<io::Result<Connection>>,
    stop: CancellationToken,
    shake: Shake,
) {
    let strangers = OpenConnections::new(Connections::of_strangers());
    let mut shaking = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            Some(_) = shaking.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "the system gives no connection");
                sleep(AGAIN).await;
                continue;
            }
        };
        // Without a place it is closed: descriptors are left for the daemon's own files.
        let Some(place) = strangers.take(None).await else { continue };
        let over = place.until_over();
        let shaken = timeout(within, shake(stream, from, place));
        let admitted = admitted.clone();
        shaking.spawn(async move {
            let shaken = tokio::select! {
                () = over => Err(io::Error::other("others came, and it was silent for longest")),
                shaken = shaken => shaken.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())),
            };
            match shaken {
                Ok(connection) => _ = admitted.send(Ok(connection)).await, // else the server has ended
                Err(error) => debug!(%from, %error, "a connection was not taken"),
            }
        });
    }
}

/// A place among those whose holders are known, for this one.
pub(crate) async fn place_of(known: &OpenConnections, holder: &str) -> io::Result<OpenConnection> {
    known.take(Some(holder)).await.ok_or_else(|| io::Error::other("too many others are connected"))
}
