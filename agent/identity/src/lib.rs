//! Identities over TLS: certificates, keys and tokens.
//!
//! Owns the controller's authority ([`Authority`]), the key and certificates of a node or a user ([`Credentials`]),
//! the tokens that admit them ([`Token`]), both ends of a TLS connection ([`ServerTls`], [`Dialer`], and [`PeerTls`]
//! between nodes), connections through a proxy, and the keys of the proofs that orders carry ([`GrantKeys`]). Hides
//! X.509, rustls and base64.
//!
//! Invariants: TLS 1.3 only; there is no trust on first use: a token contains the fingerprint of the authority, and
//! after that the authority's certificate is on this disk; the authority decides the name in a certificate, never the
//! requester; no private key leaves the machine that made it; nothing secret is shown by `Debug`.

mod authority;
mod contexts;
mod credentials;
mod dial;
mod grants;
mod peers;
mod proxy;
mod tls;
mod token;

use std::fmt;
use std::str::FromStr;

use agent_model::{NodeId, Principal, Timestamp, UserName};
use sha2::{Digest as _, Sha256};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

pub use authority::{Authority, AuthorityError, IssueError, SigningRequest};
pub use contexts::Contexts;
pub use credentials::{Credentials, KeyError, PrivateKey, ShownIdentity};
pub use dial::{DialError, Dialer, Trust};
pub use grants::{GrantKeys, GrantKeysError, GrantRefused};
pub use peers::PeerTls;
pub use proxy::Proxy;
pub use tls::{Presented, ServerStream, ServerTls, TlsError};
pub use token::{Token, TokenError, TokenKind};

/// The name in every controller's certificate: the authority alone proves which controller is behind an address.
pub(crate) const SERVER_NAME: &str = "controller.agentd";

/// The beginning of a name in a certificate.
const SCHEME: &str = "agentd://";

/// The subject of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// The node or the user.
    pub who: Principal,
    /// Random, made when the node or user was admitted; another one after a removal.
    pub enrollment: String,
}

impl Subject {
    /// A node or a user under an enrollment; nobody else has certificates.
    pub fn new(who: Principal, enrollment: impl Into<String>) -> Option<Subject> {
        let enrollment = enrollment.into();
        let plain = !enrollment.is_empty() && enrollment.bytes().all(|byte| byte.is_ascii_alphanumeric());
        (plain && !matches!(who, Principal::Local { .. })).then_some(Subject { who, enrollment })
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.who {
            Principal::Node { name } => write!(f, "{SCHEME}node/{name}/{}", self.enrollment),
            Principal::User { name } => write!(f, "{SCHEME}user/{name}/{}", self.enrollment),
            Principal::Local { uid } => write!(f, "{SCHEME}local/{uid}"),
        }
    }
}

/// The text is not a name as an authority writes it into certificates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the certificate names nobody of a controller")]
pub struct SubjectError;

impl FromStr for Subject {
    type Err = SubjectError;

    fn from_str(text: &str) -> Result<Subject, SubjectError> {
        let parts: Vec<&str> = text.strip_prefix(SCHEME).ok_or(SubjectError)?.split('/').collect();
        let [kind, name, enrollment] = parts[..] else { return Err(SubjectError) };
        let who = match kind {
            "node" => Principal::Node { name: name.parse::<NodeId>().map_err(|_| SubjectError)? },
            "user" => Principal::User { name: name.parse::<UserName>().map_err(|_| SubjectError)? },
            _ => return Err(SubjectError),
        };
        Subject::new(who, enrollment).ok_or(SubjectError)
    }
}

/// The content of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certified {
    /// Its subject.
    pub subject: Subject,
    /// Since when it is valid.
    pub from: Timestamp,
    /// Until when it is valid.
    pub until: Timestamp,
    /// The digest of its key, as [`SigningRequest::key`] gives it.
    pub key: String,
}

impl Certified {
    /// Reads a certificate without checking who signed it: the handshake does that.
    pub fn read(der: &[u8]) -> Result<Certified, SubjectError> {
        let (from, until) = validity(der).ok_or(SubjectError)?;
        let (_, certificate) = X509Certificate::from_der(der).map_err(|_| SubjectError)?;
        let names = certificate.subject_alternative_name().ok().flatten().ok_or(SubjectError)?;
        let [GeneralName::URI(uri)] = names.value.general_names[..] else { return Err(SubjectError) };
        let key = agent_model::ids::hex(&Sha256::digest(&certificate.public_key().subject_public_key.data));
        Ok(Certified { subject: uri.parse()?, from, until, key })
    }

    /// When it should be replaced: after two thirds of its lifetime.
    pub fn renew_at(&self) -> Timestamp {
        renew_at(self.from, self.until)
    }
}

/// A certificate is made [`CLOCK_TOLERANCE`] after its `from`.
fn renew_at(from: Timestamp, until: Timestamp) -> Timestamp {
    let made = from + CLOCK_TOLERANCE;
    made + until.since(made) * 2 / 3
}

/// From when until when a certificate is valid.
fn validity(der: &[u8]) -> Option<(Timestamp, Timestamp)> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let validity = certificate.validity();
    let millis = |at: i64| Some(Timestamp(u64::try_from(at).ok()?.checked_mul(1000)?));
    Some((millis(validity.not_before.timestamp())?, millis(validity.not_after.timestamp())?))
}

/// Random bytes in hexadecimal, for names that nobody can guess.
pub fn random_name() -> Result<String, getrandom::Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(agent_model::ids::hex(&bytes))
}

/// Whether both are the same, in a time that does not depend on where they differ.
pub fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && std::hint::black_box(a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b))) == 0
}

/// Whether the certificate of an authority has this fingerprint.
pub fn is_fingerprint(authority: &[u8], of: &[u8; 32]) -> bool {
    same(&authority::fingerprint(authority), of)
}

/// How long before it was made a certificate is valid, for clocks that are behind.
pub const CLOCK_TOLERANCE: std::time::Duration = std::time::Duration::from_secs(60 * 60);

#[cfg(test)]
mod tests;
