//! How a client reaches a daemon.
//!
//! Hides what kind of way it is: [`connect`] makes a channel at once, [`dial`] one that is made when it is first
//! used, and again whenever it broke. Deadlines, windows and keepalive are the endpoint's, which the caller sets.

use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};

use agent_identity::Dialer;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Error, Uri};

/// Before the name of the process in the agent of a node's connections.
pub const SESSION: &str = "session/";

/// A way to a daemon. Clones go the same way.
#[derive(Debug, Clone)]
pub enum Way {
    /// By a socket of this machine.
    Unix(PathBuf),
    /// Over TLS.
    Tls(Dialer),
}

/// An endpoint with nothing set.
pub fn endpoint() -> Endpoint {
    // The host is not used: the connector knows where to go.
    Endpoint::from_static("http://agentd")
}

/// A channel to whoever listens there now.
pub async fn connect(endpoint: Endpoint, way: Way) -> Result<Channel, Error> {
    endpoint.connect_with_connector(connector(way)).await
}

/// A channel to whoever will listen there.
pub fn dial(endpoint: Endpoint, way: Way) -> Channel {
    endpoint.connect_with_connector_lazy(connector(way))
}

fn connector(
    way: Way,
) -> impl tower::Service<Uri, Response = TokioIo<Wire>, Error = io::Error, Future: Send> + Send {
    tower::service_fn(move |_| {
        let way = way.clone();
        async move {
            let stream: Box<dyn Bytes> = match way {
                Way::Unix(socket) => Box::new(UnixStream::connect(socket).await?),
                Way::Tls(dialer) => Box::new(dialer.connect().await?),
            };
            Ok(TokioIo::new(Wire(stream)))
        }
    })
}

/// What bytes go over.
trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

/// A connection, whatever it goes over.
struct Wire(Box<dyn Bytes>);

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
