//! The credentials of a node or a user: a key, its certificate, and the authority it trusts.
//!
//! All of it is in one file of mode 0600, replaced atomically. [`ShownIdentity`] is the part that a connection
//! presents; it can be replaced at any time, and each new connection presents the latest one.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parking_lot::RwLock;
use rcgen::{CertificateParams, KeyPair};
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use serde::{Deserialize, Serialize};

use crate::{Certified, SubjectError};

/// Why a key cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum KeyError {
    #[error("the key cannot be made or read")]
    Key(#[source] rcgen::Error),
    #[error("the file of the identity is damaged")]
    Damaged,
    #[error(transparent)]
    Subject(#[from] SubjectError),
    #[error("the key of the identity does not fit its certificate")]
    Mismatch(#[source] rustls::Error),
}

/// A private key.
pub struct PrivateKey(KeyPair);

impl PrivateKey {
    /// A new one.
    pub fn generate() -> Result<PrivateKey, KeyError> {
        KeyPair::generate().map(PrivateKey).map_err(KeyError::Key)
    }

    /// The one that [`PrivateKey::to_text`] wrote.
    pub fn from_text(text: &str) -> Result<PrivateKey, KeyError> {
        let der = STANDARD.decode(text.trim()).map_err(|_| KeyError::Damaged)?;
        let der = PrivatePkcs8KeyDer::from(der);
        KeyPair::from_pkcs8_der_and_sign_algo(&der, &rcgen::PKCS_ECDSA_P256_SHA256)
            .map(PrivateKey)
            .map_err(KeyError::Key)
    }

    /// For the file that keeps it.
    pub fn to_text(&self) -> String {
        STANDARD.encode(self.0.serialized_der())
    }

    /// A request for a certificate of this key.
    pub fn request(&self) -> Result<Vec<u8>, KeyError> {
        let request = CertificateParams::default().serialize_request(&self.0).map_err(KeyError::Key)?;
        Ok(request.der().to_vec())
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrivateKey").finish_non_exhaustive()
    }
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    version: u32,
    /// The address of the controller, as it was given: `https://host:port`.
    pub controller: String,
    authority: String,
    certificate: String,
    key: String,
}

impl Credentials {
    /// The credentials for a key, from the answer of a controller.
    pub fn new(controller: &str, authority: &[u8], certificate: &[u8], key: &PrivateKey) -> Credentials {
        Credentials {
            version: 1,
            controller: controller.to_owned(),
            authority: STANDARD.encode(authority),
            certificate: STANDARD.encode(certificate),
            key: key.to_text(),
        }
    }

    /// Those in a file, if there is one.
    pub fn read(path: &Path) -> io::Result<Option<Credentials>> {
        match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(io::Error::other),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Replaces the file; it is on disk when this returns.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        agent_fs::write_durable(path, &serde_json::to_vec_pretty(self).map_err(io::Error::other)?)
    }

    /// The content of the certificate.
    pub fn certified(&self) -> Result<Certified, KeyError> {
        Ok(Certified::read(&decode(&self.certificate)?)?)
    }

    /// The certificate of the authority.
    pub fn authority(&self) -> Result<Vec<u8>, KeyError> {
        decode(&self.authority)
    }

    /// The private key.
    pub fn key(&self) -> Result<PrivateKey, KeyError> {
        PrivateKey::from_text(&self.key)
    }

    fn shown(&self) -> Result<CertifiedKey, KeyError> {
        let chain = vec![CertificateDer::from(decode(&self.certificate)?)];
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(decode(&self.key)?));
        CertifiedKey::from_der(chain, key, &crate::tls::provider()).map_err(KeyError::Mismatch)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("controller", &self.controller).finish_non_exhaustive()
    }
}

fn decode(text: &str) -> Result<Vec<u8>, KeyError> {
    STANDARD.decode(text).map_err(|_| KeyError::Damaged)
}

/// The identity that new connections present. Clones share it.
#[derive(Clone)]
pub struct ShownIdentity(Arc<RwLock<Arc<CertifiedKey>>>);

impl ShownIdentity {
    /// Presents these.
    pub fn new(credentials: &Credentials) -> Result<ShownIdentity, KeyError> {
        Ok(ShownIdentity(Arc::new(RwLock::new(Arc::new(credentials.shown()?)))))
    }

    #[cfg(test)]
    pub(crate) fn shown(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.0.read())
    }

    /// Presents others from now on.
    pub fn replace(&self, credentials: &Credentials) -> Result<(), KeyError> {
        *self.0.write() = Arc::new(credentials.shown()?);
        Ok(())
    }
}

impl fmt::Debug for ShownIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShownIdentity").finish_non_exhaustive()
    }
}

/// To other nodes.
impl ResolvesServerCert for ShownIdentity {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.read()))
    }
}

impl ResolvesClientCert for ShownIdentity {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.read()))
    }

    fn has_certs(&self) -> bool {
        true
    }
}
