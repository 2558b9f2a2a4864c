//! The connections of the tracking endpoint: their number, and how long a silent one is kept.
//!
//! Any process of the machine may connect, so no number of connections may block a job's calls or use up the daemon's
//! descriptors. Where all are taken, one that no job is known to hold is closed for the next, and then one of the job
//! that has most ([`open_connections`](crate::open_connections)). A silent connection is closed after a while, sooner
//! if it never sent a whole request head; one without a valid token is closed after the refusal, and any one after its
//! answer while more than half are taken. One that gets no place all the same gets status 503, on which MLflow's
//! clients retry by themselves.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use agent_control::Peer;
use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::net::TcpListener;
use tokio::time::{Instant, Sleep, sleep};

use crate::incoming::{Connection, Reads};
use crate::open_connections::{OpenConnection, OpenConnections};

/// How long a connection is kept before its first whole request head.
const UNHEARD: Duration = Duration::from_secs(10);
/// How long a silent one is kept after that. The longest call is done by then.
const SILENT: Duration = Duration::from_secs(300);
/// The wait after a failed accept, most likely for lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

const COME_LATER: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// The listener of the endpoint.
pub(super) struct LimitedListener {
    listener: TcpListener,
    places: OpenConnections,
}

impl LimitedListener {
    pub(super) fn new(listener: TcpListener, places: OpenConnections) -> LimitedListener {
        LimitedListener { listener, places }
    }
}

/// The number of the place that a connection has; see [`OpenConnection::number`].
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionNumber(pub(super) u64);

impl Connected<IncomingStream<'_, LimitedListener>> for ConnectionNumber {
    fn connect_info(stream: IncomingStream<'_, LimitedListener>) -> ConnectionNumber {
        ConnectionNumber(stream.remote_addr().1)
    }
}

impl Listener for LimitedListener {
    type Io = Connection;
    /// With the number of the place.
    type Addr = (SocketAddr, u64);

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let (stream, address) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connection to tracking endpoint");
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let Some(place) = self.places.take(None).await else {
                // If even this cannot be sent, the client sees a closed connection.
                drop(stream.try_write(COME_LATER));
                continue;
            };
            // Who calls is told by the token of each request.
            let peer = Peer::Nobody { from: address.to_string() };
            let number = place.number();
            return (Connection::new(stream, peer, Silence::new(place)), (address, number));
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok((self.listener.local_addr()?, 0))
    }
}

/// Closes a connection that is silent for too long, or whose place another gets.
struct Silence {
    place: OpenConnection,
    until: Pin<Box<Sleep>>,
    head: Head,
}

impl Silence {
    fn new(place: OpenConnection) -> Silence {
        Silence { place, until: Box::pin(sleep(UNHEARD)), head: Head::default() }
    }
}

/// How much of the first request's head has arrived: it ends with an empty line.
#[derive(Debug, Default)]
struct Head {
    /// The number of line feeds at the end, not counting carriage returns.
    feeds: u8,
}

impl Head {
    /// Adds the next bytes; returns whether the head is whole.
    fn is_whole_with(&mut self, bytes: &[u8]) -> bool {
        for byte in bytes {
            match byte {
                _ if self.feeds >= 2 => break,
                b'\n' => self.feeds += 1,
                b'\r' => {}
                _ => self.feeds = 0,
            }
        }
        self.feeds >= 2
    }
}

impl Reads for Silence {
    fn saw(&mut self, bytes: &mut [u8]) {
        self.place.heard();
        if self.head.is_whole_with(bytes) {
            self.until.as_mut().reset(Instant::now() + SILENT);
        }
    }

    fn over(&mut self, cx: &mut Context<'_>) -> Option<io::Error> {
        // Both are asked, so that either wakes the task.
        let silent = self.until.as_mut().poll(cx).is_ready();
        (self.place.is_over(cx) || silent).then(|| io::ErrorKind::TimedOut.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_head_is_whole_with_its_empty_line() {
        let whole = |parts: &[&str]| {
            let mut head = Head::default();
            parts.iter().any(|part| head.is_whole_with(part.as_bytes()))
        };
        assert!(whole(&["GET / HTTP/1.1\r\nHost: x\r\n\r\n"]) && whole(&["GET /\n", "\n"]));
        assert!(whole(&["GET /\r", "\n\r", "\n", "body"]));
        assert!(!whole(&["GET / HTTP/1.1\r\n", "Host: x\r\n"]) && !whole(&["\r\r\r"]));
    }
}
