//! Connections to a controller: through a proxy where there is one, then TLS.
//!
//! The caller decides whom to trust ([`Trust`]): the authority on this disk, or, with only a token, the one whose
//! fingerprint the token contains. For the latter the time is not checked, because a wrong clock must be reported as
//! such and not as a bad certificate; all later connections check it.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use agent_model::{Clock, NodeId};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::authority::fingerprint;
use crate::credentials::ShownIdentity;
use crate::peers::OneNode;
use crate::tls::{ALPN, Time, TlsError, provider};
use crate::{Proxy, SERVER_NAME, same, validity};

/// How long everything up to the end of the handshake may take.
const CONNECT: Duration = Duration::from_secs(10);

/// Why no connection can be made, to any peer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum DialError {
    #[error("the certificate of the authority cannot be used")]
    Authority(#[source] rustls::Error),
    #[error("TLS cannot be set up")]
    Setup(#[source] rustls::Error),
    #[error("another node cannot be recognised")]
    Peer(#[source] TlsError),
}

/// Which authority to trust.
#[derive(Debug, Clone)]
pub enum Trust {
    /// This certificate of an authority.
    Authority(Vec<u8>),
    /// The authority that has this fingerprint.
    Fingerprint([u8; 32]),
    /// The node of this name, with this certificate of its authority.
    Node(Vec<u8>, NodeId),
}

/// See the module.
#[derive(Clone)]
pub struct Dialer {
    host: String,
    port: u16,
    proxy: Proxy,
    config: Arc<ClientConfig>,
}

impl Dialer {
    /// Makes connections to a host; `held` is the identity that they present, if any.
    pub fn new(
        (host, port): (&str, u16),
        trust: Trust,
        held: Option<ShownIdentity>,
        proxy: Proxy,
        clock: Arc<dyn Clock>,
    ) -> Result<Dialer, DialError> {
        let provider = Arc::new(provider());
        let verifier: Arc<dyn ServerCertVerifier> = match trust {
            Trust::Authority(certificate) => verifier(certificate.into(), &provider)?,
            Trust::Fingerprint(fingerprint) => {
                Arc::new(Pinned { fingerprint, provider: Arc::clone(&provider) })
            }
            Trust::Node(authority, node) => {
                Arc::new(OneNode::new(&authority, node, &provider).map_err(DialError::Peer)?)
            }
        };
        let builder = ClientConfig::builder_with_details(provider, Arc::new(Time(clock)))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(DialError::Setup)?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let mut config = match held {
            Some(held) => builder.with_client_cert_resolver(Arc::new(held)),
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![ALPN.to_vec()];
        // No session is resumed: the present certificate is shown each time.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Dialer { host: host.to_owned(), port, proxy, config: Arc::new(config) })
    }

    /// A connection, once the peer has proved to be the controller.
    pub async fn connect(&self) -> io::Result<TlsStream<TcpStream>> {
        let connected = timeout(CONNECT, async {
            let stream = self.proxy.connect(&self.host, self.port).await?;
            stream.set_nodelay(true)?;
            let name = ServerName::try_from(SERVER_NAME).map_err(io::Error::other)?;
            TlsConnector::from(Arc::clone(&self.config)).connect(name, stream).await
        });
        let late =
            || io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} s", CONNECT.as_secs()));
        connected.await.map_err(|_| late())?
    }

    /// Connects, and returns the certificate of the authority that the peer presented.
    pub async fn authority(&self) -> io::Result<Vec<u8>> {
        let stream = self.connect().await?;
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let last = chain.last().ok_or_else(|| io::Error::other("it showed no certificate"))?;
        Ok(last.to_vec())
    }
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer").field("host", &self.host).field("port", &self.port).finish_non_exhaustive()
    }
}

fn verifier(
    authority: CertificateDer<'static>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<WebPkiServerVerifier>, DialError> {
    let mut roots = RootCertStore::empty();
    roots.add(authority).map_err(DialError::Authority)?;
    let built = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider)).build();
    built.map_err(|error| DialError::Authority(rustls::Error::General(error.to_string())))
}

/// Trusts the authority with one fingerprint, and the certificates it signed.
#[derive(Debug)]
struct Pinned {
    fingerprint: [u8; 32],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let unknown = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let authority = chain.last().filter(|last| same(&fingerprint(last), &self.fingerprint));
        let authority = authority.ok_or_else(|| unknown.clone())?.clone().into_owned();
        let verifier = verifier(authority, &self.provider).map_err(|_| unknown.clone())?;
        let (from, _) = validity(leaf).ok_or(unknown)?;
        let then = UnixTime::since_unix_epoch(Duration::from_millis(from.0));
        verifier.verify_server_cert(leaf, &[], name, ocsp, then)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::PeerIncompatible(rustls::PeerIncompatible::Tls12NotOffered))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, leaf, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
