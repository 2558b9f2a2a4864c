//! Who is at the other end of a connection.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Whoever makes a call, as the transport proved it; what somebody says of himself never makes one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Principal {
    /// A process of the controller's own machine: the user that the kernel names for its socket.
    Local {
        /// The user id.
        uid: u32,
    },
}

/// Not the name of a principal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a user as the controller writes them, like `uid 1000`")]
pub struct PrincipalError(String);

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Principal::Local { uid } => write!(f, "uid {uid}"),
        }
    }
}

impl FromStr for Principal {
    type Err = PrincipalError;

    fn from_str(text: &str) -> Result<Principal, PrincipalError> {
        let uid = text.strip_prefix("uid ").and_then(|uid| uid.parse().ok());
        uid.map(|uid| Principal::Local { uid }).ok_or_else(|| PrincipalError(text.to_owned()))
    }
}

impl From<Principal> for String {
    fn from(principal: Principal) -> String {
        principal.to_string()
    }
}

impl TryFrom<String> for Principal {
    type Error = PrincipalError;

    fn try_from(text: String) -> Result<Principal, PrincipalError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_principals_are_read_as_they_are_written() {
        let somebody = Principal::Local { uid: 4_294_967_294 };
        assert_eq!(somebody.to_string().parse(), Ok(somebody.clone()));
        assert_eq!(serde_json::to_string(&somebody).unwrap(), "\"uid 4294967294\"");
        for odd in ["", "uid", "uid ", "uid -1", "uid 4294967296", "1000", "root"] {
            assert!(odd.parse::<Principal>().is_err(), "{odd}");
        }
    }
}
