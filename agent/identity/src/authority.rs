//! The authority of a controller: it signs all certificates.
//!
//! Owns a key that never leaves its directory, and the certificate that all nodes and users of this controller trust.
//! Both are in one file, written once and atomically. The controller decides the content of a certificate: of a
//! request only the key is used.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_model::Timestamp;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
};
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer, PrivatePkcs8KeyDer};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;

use crate::{CLOCK_TOLERANCE, SERVER_NAME, Subject};

/// Longer than any controller of today will be used.
const LIFE: Duration = Duration::from_secs(20 * 365 * 24 * 3600);

/// Why there is no authority.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum AuthorityError {
    #[error("cannot use {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{} is damaged: put back a copy of it; every node and user trusts the key in it", path.display())]
    Damaged { path: PathBuf },
    #[error("cannot make the key of the authority")]
    Make(#[source] rcgen::Error),
}

/// Why nothing was signed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum IssueError {
    #[error("the signing request is not valid")]
    Request(#[source] rcgen::Error),
    #[error("the certificate could not be made")]
    Sign(#[source] rcgen::Error),
}

/// A request for a certificate, which is proved to be signed with its own key.
pub struct SigningRequest(CertificateSigningRequestParams);

impl SigningRequest {
    /// Reads one and checks that it is signed with its own key.
    pub fn read(der: &[u8]) -> Result<SigningRequest, IssueError> {
        let der = CertificateSigningRequestDer::from(der);
        CertificateSigningRequestParams::from_der(&der).map(SigningRequest).map_err(IssueError::Request)
    }

    /// The digest of the key, by which keys are compared.
    pub fn key(&self) -> String {
        agent_model::ids::hex(&Sha256::digest(self.0.public_key.der_bytes()))
    }
}

impl fmt::Debug for SigningRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SigningRequest").field("key", &self.key()).finish()
    }
}

/// The content of the file.
#[derive(Serialize, Deserialize)]
struct AuthorityFile {
    version: u32,
    certificate: String,
    key: String,
}

/// See the module.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
}

impl Authority {
    /// The one in this file, which is created if there is none.
    pub fn open(path: &Path, now: Timestamp) -> Result<Authority, AuthorityError> {
        match std::fs::read(path) {
            Ok(bytes) => {
                Authority::from_kept(&bytes).ok_or_else(|| AuthorityError::Damaged { path: path.to_owned() })
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Authority::make(path, now),
            Err(source) => Err(AuthorityError::File { path: path.to_owned(), source }),
        }
    }

    fn from_kept(bytes: &[u8]) -> Option<Authority> {
        let kept: AuthorityFile = serde_json::from_slice(bytes).ok()?;
        let certificate = CertificateDer::from(STANDARD.decode(kept.certificate).ok()?);
        let key = PrivatePkcs8KeyDer::from(STANDARD.decode(kept.key).ok()?);
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&key, &rcgen::PKCS_ECDSA_P256_SHA256).ok()?;
        let issuer = Issuer::from_ca_cert_der(&certificate, key).ok()?;
        (kept.version == 1).then_some(Authority { issuer, certificate })
    }

    fn make(path: &Path, now: Timestamp) -> Result<Authority, AuthorityError> {
        let key = KeyPair::generate().map_err(AuthorityError::Make)?;
        let mut params = params("agentd", now, LIFE);
        let number = agent_model::ids::hex(&Sha256::digest(key.public_key_raw())[..4]);
        params.distinguished_name.push(DnType::CommonName, format!("agentd authority {number}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let certificate = params.self_signed(&key).map_err(AuthorityError::Make)?.der().clone();
        let kept = AuthorityFile {
            version: 1,
            certificate: STANDARD.encode(&certificate),
            key: STANDARD.encode(key.serialized_der()),
        };
        let failed = |source| AuthorityError::File { path: path.to_owned(), source };
        let text = serde_json::to_vec_pretty(&kept).map_err(|error| failed(io::Error::other(error)))?;
        agent_fs::write_durable(path, &text).map_err(failed)?;
        Ok(Authority { issuer: Issuer::new(params, key), certificate })
    }

    /// Its certificate.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// Its fingerprint, which tokens contain.
    pub fn fingerprint(&self) -> [u8; 32] {
        fingerprint(&self.certificate)
    }

    /// A certificate for the key of a request and a subject.
    pub fn issue(
        &self,
        request: &SigningRequest,
        subject: &Subject,
        now: Timestamp,
        life: Duration,
    ) -> Result<Vec<u8>, IssueError> {
        let mut params = params(&subject.who.to_string(), now, life);
        let uri = subject.to_string().try_into().map_err(IssueError::Sign)?;
        params.subject_alt_names = vec![SanType::URI(uri)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let made = params.signed_by(&request.0.public_key, &self.issuer).map_err(IssueError::Sign)?;
        Ok(made.der().to_vec())
    }

    /// A key and a certificate for the controller's own listener.
    pub(crate) fn issue_server(
        &self,
        now: Timestamp,
        life: Duration,
    ) -> Result<(CertificateDer<'static>, PrivatePkcs8KeyDer<'static>), IssueError> {
        let key = KeyPair::generate().map_err(IssueError::Sign)?;
        let mut params = params(SERVER_NAME, now, life);
        params.subject_alt_names = vec![SanType::DnsName(SERVER_NAME.try_into().map_err(IssueError::Sign)?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let made = params.signed_by(&key, &self.issuer).map_err(IssueError::Sign)?;
        Ok((made.der().clone(), PrivatePkcs8KeyDer::from(key.serialize_der())))
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fingerprint = agent_model::ids::hex(&self.fingerprint());
        f.debug_struct("Authority").field("fingerprint", &fingerprint).finish_non_exhaustive()
    }
}

/// The digest of an authority's certificate.
pub(crate) fn fingerprint(certificate: &[u8]) -> [u8; 32] {
    Sha256::digest(certificate).into()
}

fn params(name: &str, now: Timestamp, life: Duration) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = date(Timestamp(now.0.saturating_sub(CLOCK_TOLERANCE.as_millis() as u64)));
    params.not_after = date(now + life);
    params.use_authority_key_identifier_extension = true;
    params
}

fn date(at: Timestamp) -> OffsetDateTime {
    let seconds = i64::try_from(at.0 / 1000).unwrap_or(i64::MAX);
    OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}
