//! The connections of clients, as the servers of the daemon see them: of one type whatever they go over, so that the
//! code of a server is compiled once and not once for each listener. See ADR 0071.
//!
//! What a listener does with incoming bytes is its [`Reads`], which also says when a connection is over; outgoing bytes
//! are unchanged.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use agent_control::Peer;
use futures_util::stream::BoxStream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::{Connected, Router};

use crate::supervisor::{Supervisor, TaskKind};

/// Serves these connections until the daemon stops. `name` is for the log.
pub(crate) fn serve(
    supervisor: &Supervisor,
    name: &str,
    server: Router,
    incoming: BoxStream<'static, io::Result<Connection>>,
) {
    let stop = supervisor.stopping(TaskKind::Api).cancelled_owned();
    supervisor.spawn(TaskKind::Api, name, server.serve_with_incoming_shutdown(incoming, stop));
}

/// What the bytes of a connection go over.
trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

/// What a listener does with a connection while bytes are read from it.
pub(crate) trait Reads: Send {
    /// Sees the bytes that have arrived, before the server does, and may change them. At their end there are none.
    fn saw(&mut self, bytes: &mut [u8]);

    /// Why the connection is over, if it is. Asked after every look for bytes, and before any are sent, so that a client
    /// that takes no answer keeps nothing; the task is woken when this changes.
    fn over(&mut self, cx: &mut Context<'_>) -> Option<io::Error>;
}

/// A connection of a client.
pub(crate) struct Connection {
    stream: Box<dyn Bytes>,
    reads: Box<dyn Reads>,
    peer: Peer,
    is_over: bool,
}

impl Connection {
    pub(crate) fn new(
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        peer: Peer,
        reads: impl Reads + 'static,
    ) -> Connection {
        Connection { stream: Box::new(stream), reads: Box::new(reads), peer, is_over: false }
    }

    /// Why it is over, if it is.
    fn over(&mut self, cx: &mut Context<'_>) -> Option<io::Error> {
        if self.is_over {
            return Some(io::ErrorKind::ConnectionAborted.into());
        }
        let error = self.reads.over(cx);
        self.is_over = error.is_some();
        error
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if matches!(read, Poll::Ready(Ok(()))) {
            self.reads.saw(&mut buffer.filled_mut()[before..]);
        }
        match self.over(cx) {
            Some(error) => Poll::Ready(Err(error)),
            None => read,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.over(cx) {
            Some(error) => Poll::Ready(Err(error)),
            None => Pin::new(&mut self.stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.over(cx) {
            Some(error) => Poll::Ready(Err(error)),
            None => Pin::new(&mut self.stream).poll_write_vectored(cx, slices),
        }
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
