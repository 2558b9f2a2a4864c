//! The controller's end of TLS.
//!
//! One listener accepts all clients: a certificate of the authority identifies a client, and a client without one has
//! no identity. The listener's own certificate is replaced while it listens. Sessions are not resumed: each handshake
//! presents the certificates again.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use agent_model::{Clock, Timestamp};
use parking_lot::RwLock;
use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{PrivateKeyDer, UnixTime};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::time_provider::TimeProvider;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::authority::{Authority, IssueError};
use crate::{Certified, renew_at, validity};

/// The protocol over TLS: HTTP/2.
pub(crate) const ALPN: &[u8] = b"h2";

/// The cryptography of TLS.
pub(crate) fn provider() -> CryptoProvider {
    rustls::crypto::ring::default_provider()
}

/// Certificates are checked by the clock of the daemon.
pub(crate) struct Time(pub(crate) Arc<dyn Clock>);

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Time")
    }
}

impl TimeProvider for Time {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_millis(self.0.now().0)))
    }
}

/// Why there is no listener.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum TlsError {
    #[error("the controller's own certificate could not be made")]
    Issue(#[from] IssueError),
    #[error("TLS cannot be set up")]
    Setup(#[source] rustls::Error),
    #[error("the certificate of the authority cannot be used")]
    Verifier(#[source] rustls::server::VerifierBuilderError),
}

/// A connection to the controller.
pub type ServerStream = TlsStream<TcpStream>;

/// What a client presented.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Presented {
    /// No certificate.
    Nothing,
    /// One of the authority, valid now.
    Certificate(Certified),
}

/// See the module. Clones share it.
#[derive(Clone)]
pub struct ServerTls {
    authority: Arc<Authority>,
    clock: Arc<dyn Clock>,
    shown: Arc<Shown>,
    acceptor: TlsAcceptor,
    life: Duration,
}

/// The certificate that is presented now.
struct Shown(RwLock<Arc<CertifiedKey>>);

impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shown")
    }
}

impl ResolvesServerCert for Shown {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.read()))
    }
}

impl ServerTls {
    /// `life` is how long each certificate of its own is valid.
    pub fn new(
        authority: Arc<Authority>,
        clock: Arc<dyn Clock>,
        life: Duration,
    ) -> Result<ServerTls, TlsError> {
        let shown = Arc::new(Shown(RwLock::new(make(&authority, &*clock, life)?)));
        let mut roots = RootCertStore::empty();
        roots.add(authority.certificate().clone()).map_err(TlsError::Setup)?;
        let provider = Arc::new(provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .allow_unauthenticated()
            .build()
            .map_err(TlsError::Verifier)?;
        let time = Arc::new(Time(Arc::clone(&clock)));
        let mut config = rustls::ServerConfig::builder_with_details(provider, time)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(TlsError::Setup)?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::clone(&shown) as _);
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(ServerTls { authority, clock, shown, acceptor: TlsAcceptor::from(Arc::new(config)), life })
    }

    /// When its certificate should be replaced.
    pub fn renew_at(&self) -> Timestamp {
        let key = Arc::clone(&self.shown.0.read());
        let (from, until) = key.cert.first().and_then(|leaf| validity(leaf)).unwrap_or_default();
        renew_at(from, until)
    }

    /// Presents a new certificate from now on; open connections go on.
    pub fn renew(&self) -> Result<(), TlsError> {
        *self.shown.0.write() = make(&self.authority, &*self.clock, self.life)?;
        Ok(())
    }

    /// The handshake with a client.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<(ServerStream, Presented)> {
        let stream = self.acceptor.accept(stream).await?;
        let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let presented = match shown {
            None => Presented::Nothing,
            Some(leaf) => Presented::Certificate(Certified::read(leaf).map_err(io::Error::other)?),
        };
        Ok((stream, presented))
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTls").field("authority", &self.authority).finish_non_exhaustive()
    }
}

/// A certificate to show, with that of the authority behind it: a joining client checks it against its token.
fn make(authority: &Authority, clock: &dyn Clock, life: Duration) -> Result<Arc<CertifiedKey>, TlsError> {
    let (leaf, key) = authority.issue_server(clock.now(), life)?;
    let chain = vec![leaf, authority.certificate().clone()];
    let key = CertifiedKey::from_der(chain, PrivateKeyDer::Pkcs8(key), &provider());
    key.map(Arc::new).map_err(TlsError::Setup)
}
