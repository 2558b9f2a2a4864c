//! The connections of the tracking endpoint: how many there are, and for how long a silent one stays.
//!
//! Any process of the machine may connect, so no number of silent connections may keep a job from its endpoint or
//! the daemon from its files. A connection on which nothing came for a while is closed, sooner if nothing ever
//! came. One too many is told to come later (503), which clients of MLflow do by themselves.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

/// How long a connection stays on which nothing has come yet.
const UNHEARD: Duration = Duration::from_secs(10);
/// How long one stays on which nothing more comes. The longest call is done by then.
const SILENT: Duration = Duration::from_secs(300);
/// The wait after an accept that failed, for want of descriptors most likely.
const PAUSE: Duration = Duration::from_millis(100);

const COME_LATER: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// The listener of the endpoint.
pub(super) struct Doors {
    listener: TcpListener,
    free: Arc<Semaphore>,
}

impl Doors {
    /// Takes `most` connections at a time.
    pub(super) fn new(listener: TcpListener, most: usize) -> Doors {
        Doors { listener, free: Arc::new(Semaphore::new(most)) }
    }
}

impl Listener for Doors {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            let (stream, address) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection of the tracking endpoint");
                    sleep(PAUSE).await;
                    continue;
                }
            };
            match Arc::clone(&self.free).try_acquire_owned() {
                Ok(permit) => return (Connection::new(stream, permit), address),
                // Whoever cannot take even this sees the connection closed.
                Err(_) => drop(stream.try_write(COME_LATER)),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that ends when it is silent for too long.
pub(super) struct Connection {
    stream: TcpStream,
    silence: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    fn new(stream: TcpStream, permit: OwnedSemaphorePermit) -> Connection {
        Connection { stream, silence: Box::pin(sleep(UNHEARD)), _permit: permit }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if read.is_ready() {
            self.silence.as_mut().reset(Instant::now() + SILENT);
            return read;
        }
        self.silence.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
