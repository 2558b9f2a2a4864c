//! Connections between two nodes of a controller.
//!
//! Both ends present the certificates that the controller gave them. The end that listens takes nodes only; the end
//! that dials knows which node it wants. Whether a node was removed since, no certificate says: the caller asks.

use std::fmt;
use std::io;
use std::sync::Arc;

use agent_model::{Clock, NodeId, Principal};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{CertificateError, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

use crate::tls::{ALPN, ServerStream, Time, TlsError, provider};
use crate::{Certified, ShownIdentity};

/// The end that listens. Clones share it.
#[derive(Clone)]
pub struct PeerTls(TlsAcceptor);

impl PeerTls {
    /// Presents `shown`, and trusts nodes with a certificate of the authority.
    pub fn new(authority: &[u8], shown: ShownIdentity, clock: Arc<dyn Clock>) -> Result<PeerTls, TlsError> {
        let provider = Arc::new(provider());
        let verifier = verifier(authority, &provider)?;
        let mut config = rustls::ServerConfig::builder_with_details(provider, Arc::new(Time(clock)))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(TlsError::Setup)?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(shown));
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(PeerTls(TlsAcceptor::from(Arc::new(config))))
    }

    /// The handshake with another node; whoever is none is an error.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<(ServerStream, Certified)> {
        let stream = self.0.accept(stream).await?;
        let leaf = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let leaf = leaf.ok_or_else(|| io::Error::other("it showed no certificate"))?;
        let certified = Certified::read(leaf).map_err(io::Error::other)?;
        match &certified.subject.who {
            Principal::Node { .. } => Ok((stream, certified)),
            who => Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("{who} is no node"))),
        }
    }
}

impl fmt::Debug for PeerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerTls").finish_non_exhaustive()
    }
}

/// Checks that a certificate is one of the authority and valid now. Nodes have certificates for clients only.
fn verifier(
    authority: &[u8],
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(authority.to_vec())).map_err(TlsError::Setup)?;
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .build()
        .map_err(TlsError::Verifier)
}

/// Trusts one node.
#[derive(Debug)]
pub(crate) struct OneNode {
    node: NodeId,
    chain: Arc<dyn ClientCertVerifier>,
    provider: Arc<CryptoProvider>,
}

impl OneNode {
    pub(crate) fn new(
        authority: &[u8],
        node: NodeId,
        provider: &Arc<CryptoProvider>,
    ) -> Result<OneNode, TlsError> {
        Ok(OneNode { node, chain: verifier(authority, provider)?, provider: Arc::clone(provider) })
    }
}

impl ServerCertVerifier for OneNode {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.chain.verify_client_cert(leaf, chain, now)?;
        let wrong = rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure);
        match Certified::read(leaf).map(|certified| certified.subject.who) {
            Ok(Principal::Node { name }) if name == self.node => Ok(ServerCertVerified::assertion()),
            _ => Err(wrong),
        }
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
