//! How many file descriptors the daemon may have, and how many of them its clients may hold.
//!
//! The daemon raises its soft limit to the hard one; jobs get the old one back, because programs that still use
//! `select` fail with more than 1,024. Clients hold at most half of the limit in all, so that some are always left
//! for the daemon's own files: the database, the journal, blobs, logs.
//!
//! A [`Connection`] counts until it is dropped. What a listener does with incoming bytes is its [`Reads`]; outgoing
//! bytes are unchanged.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use agent_control::Peer;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::server::Connected;

/// The most connections of clients at one listener, however many descriptors there are.
const CONNECTIONS: u64 = 1024;
/// The same for the listener of a fleet.
const FLEET_CONNECTIONS: u64 = 16 * 1024;
/// The same for the listener for other nodes: each is there for the time of a fetch.
const PEER_CONNECTIONS: u64 = 64;

/// Raises the soft limit; returns the old one.
pub(crate) fn raise() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, ?limit.current, "cannot raise the limit of open files");
    }
    limit.current
}

/// The connections that one listener accepts at a time; clones share the count.
#[derive(Clone)]
pub(crate) struct Connections {
    left: Arc<Semaphore>,
    most: usize,
}

impl Connections {
    /// For a listener of this machine. There are three listeners, so each has a sixth of all descriptors.
    pub(crate) fn new() -> Connections {
        Connections::at_most(CONNECTIONS)
    }

    /// For the listener for other machines: each node has a few.
    pub(crate) fn of_a_fleet() -> Connections {
        Connections::at_most(FLEET_CONNECTIONS)
    }

    /// For other nodes, which read blobs of this one.
    pub(crate) fn of_peers() -> Connections {
        Connections::at_most(PEER_CONNECTIONS)
    }

    fn at_most(most: u64) -> Connections {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = usize::try_from((limit / 6).clamp(8, most)).unwrap_or(usize::MAX);
        Connections { left: Arc::new(Semaphore::new(most)), most }
    }

    /// Fewer than half of them are left.
    pub(crate) fn are_scarce(&self) -> bool {
        self.left.available_permits() < self.most / 2
    }

    /// Room for one more, if there is any.
    pub(crate) fn permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.left).try_acquire_owned().ok()
    }

    /// Accepts a connection, or returns it when it is one too many.
    pub(crate) fn admit<S, R>(&self, stream: S, reads: R) -> Result<Connection<S, R>, S> {
        match self.permit() {
            Some(permit) => Ok(Connection::new(stream, reads, permit)),
            None => Err(stream),
        }
    }
}

/// Processes the bytes of a connection as a listener reads them.
pub(crate) trait Reads<S> {
    fn poll_read(
        &mut self,
        stream: Pin<&mut S>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>>;
}

/// A connection of a client.
pub(crate) struct Connection<S, R> {
    stream: S,
    reads: R,
    _permit: OwnedSemaphorePermit,
}

impl<S, R> Connection<S, R> {
    pub(crate) fn new(stream: S, reads: R, permit: OwnedSemaphorePermit) -> Connection<S, R> {
        Connection { stream, reads, _permit: permit }
    }

    pub(crate) fn reads(&self) -> &R {
        &self.reads
    }
}

impl<R> Connected for Connection<UnixStream, R> {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        let credentials = self.stream.peer_cred().ok();
        credentials.map_or(Peer::Nobody { from: String::new() }, |process| Peer::Local { uid: process.uid() })
    }
}

impl<S: Unpin, R: Reads<S> + Unpin> AsyncRead for Connection<S, R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Connection { stream, reads, .. } = &mut *self;
        reads.poll_read(Pin::new(stream), cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin, R: Unpin> AsyncWrite for Connection<S, R> {
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
