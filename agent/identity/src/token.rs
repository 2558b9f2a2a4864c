//! Tokens: each makes a machine a node, or gives a user a certificate.
//!
//! A token is 256 random bits and the fingerprint of the authority that issued it. The controller stores only a hash
//! of the bits. The client verifies the controller by the fingerprint before it sends the bits.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// It makes a machine a node.
    Join,
    /// It gives a user a certificate.
    Login,
}

impl TokenKind {
    fn prefix(self) -> &'static str {
        match self {
            TokenKind::Join => "agentd-join-",
            TokenKind::Login => "agentd-login-",
        }
    }
}

/// See the module.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    kind: TokenKind,
    secret: [u8; 32],
    authority: [u8; 32],
}

/// Why a text is no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum TokenError {
    #[error("a token begins with `agentd-join-`, and the code of a user with `agentd-login-`")]
    Kind,
    #[error("it is not whole: copy all of it, and nothing else")]
    Torn,
}

impl Token {
    /// A new one for an authority with this fingerprint.
    pub fn generate(kind: TokenKind, authority: [u8; 32]) -> Result<Token, getrandom::Error> {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret)?;
        Ok(Token { kind, secret, authority })
    }

    /// What it is for.
    pub fn kind(&self) -> TokenKind {
        self.kind
    }

    /// The fingerprint of the authority that issued it.
    pub fn authority(&self) -> [u8; 32] {
        self.authority
    }

    /// The secret part, only for the controller that issued it.
    pub fn secret(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.secret)
    }

    /// The hash of a token's secret part, which the controller stores.
    pub fn hash(secret: &str) -> [u8; 32] {
        Sha256::digest(secret.as_bytes()).into()
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = self.secret.to_vec();
        bytes.extend(self.authority);
        // A checksum of the content at the end detects a text that is not whole.
        bytes.extend(&Sha256::digest(&bytes)[..2]);
        write!(f, "{}{}", self.kind.prefix(), URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Token, TokenError> {
        let text = text.trim();
        let kinds = [TokenKind::Join, TokenKind::Login];
        let read = |kind: TokenKind| Some((kind, text.strip_prefix(kind.prefix())?));
        let (kind, rest) = kinds.into_iter().find_map(read).ok_or(TokenError::Kind)?;
        let bytes = URL_SAFE_NO_PAD.decode(rest).map_err(|_| TokenError::Torn)?;
        let (content, check) = bytes.split_at_checked(64).ok_or(TokenError::Torn)?;
        if check != &Sha256::digest(content)[..2] {
            return Err(TokenError::Torn);
        }
        let half = |part: &[u8]| <[u8; 32]>::try_from(part).map_err(|_| TokenError::Torn);
        Ok(Token { kind, secret: half(&content[..32])?, authority: half(&content[32..])? })
    }
}
