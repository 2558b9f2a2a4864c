//! The connections of the tracking endpoint: how many there are, and for how long a silent one stays.
//!
//! Any process of the machine may connect, so no number of silent connections may keep a job from its endpoint or the
//! daemon from its files. A connection on which nothing came for a while is closed, sooner if no request ever came
//! whole up to its body; a stranger's ends with the refusal, and any with its answer when more than half are taken.
//! One too many is told to come later (503), which clients of MLflow do by themselves.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep, sleep};

use crate::limits::{Connection, Connections, Reads};

/// How long a connection stays on which the head of a request has not come yet.
const UNHEARD: Duration = Duration::from_secs(10);
/// How long one stays on which nothing more comes. The longest call is done by then.
const SILENT: Duration = Duration::from_secs(300);
/// The wait after an accept that failed, for want of descriptors most likely.
const PAUSE: Duration = Duration::from_millis(100);

const COME_LATER: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// The listener of the endpoint.
pub(super) struct LimitedListener {
    listener: TcpListener,
    taken: Connections,
}

impl LimitedListener {
    pub(super) fn new(listener: TcpListener) -> LimitedListener {
        LimitedListener { listener, taken: Connections::new() }
    }

    /// The connections, to be asked how many are left.
    pub(super) fn taken(&self) -> Connections {
        self.taken.clone()
    }
}

impl Listener for LimitedListener {
    type Io = Connection<TcpStream, Silence>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let (stream, address) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connection to tracking endpoint");
                    sleep(PAUSE).await;
                    continue;
                }
            };
            match self.taken.admit(stream, Silence::new()) {
                Ok(connection) => return (connection, address),
                // Whoever cannot take even this sees the connection closed.
                Err(stream) => drop(stream.try_write(COME_LATER)),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Ends a connection that is silent for too long.
pub(super) struct Silence {
    until: Pin<Box<Sleep>>,
    head: Head,
}

impl Silence {
    fn new() -> Silence {
        Silence { until: Box::pin(sleep(UNHEARD)), head: Head::default() }
    }
}

/// How far the head of the first request has come: it ends with an empty line.
#[derive(Debug, Default)]
struct Head {
    /// Line feeds at the end of what came, but for carriage returns.
    feeds: u8,
}

impl Head {
    /// Takes in what comes next; whether it is whole.
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

impl<S: AsyncRead> Reads<S> for Silence {
    fn poll_read(
        &mut self,
        stream: Pin<&mut S>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = stream.poll_read(cx, buffer);
        if read.is_ready() {
            if self.head.is_whole_with(&buffer.filled()[before..]) {
                self.until.as_mut().reset(Instant::now() + SILENT);
            }
            return read;
        }
        self.until.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
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
