//! The identity at the other end of a connection.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ids::{NodeId, UserName};

/// The caller, as the transport proved it; what a caller claims about itself is never used.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Principal {
    /// A process of the controller's own machine: the user that the kernel names for its socket.
    Local {
        /// The user id.
        uid: u32,
    },
    /// A node of the controller, by its certificate.
    Node {
        /// Its name.
        name: NodeId,
    },
    /// A user of the controller, by their certificate.
    User {
        /// Their name.
        name: UserName,
    },
}

/// What a user from elsewhere may do. The controller looks it up at every call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Submit jobs, and do anything with their own.
    Submit,
    /// Also what concerns everybody: jobs of others, and the machines.
    Operate,
    /// Also decide who is a node or a user.
    Admin,
}

impl Role {
    /// All there are, the least first.
    pub const ALL: [Role; 3] = [Role::Submit, Role::Operate, Role::Admin];

    /// How it is written.
    pub fn name(self) -> &'static str {
        match self {
            Role::Submit => "submit",
            Role::Operate => "operate",
            Role::Admin => "admin",
        }
    }

    /// From how it is written.
    pub fn parse(text: &str) -> Option<Role> {
        Role::ALL.into_iter().find(|role| role.name() == text)
    }
}

/// Whether a secret may have this name: it is a file's name where the secret is kept.
pub fn is_secret_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    (1..=100).contains(&name.len()) && !name.starts_with('.') && name.chars().all(plain)
}

/// Not the name of a principal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is nobody as the controller writes them, like `uid 1000` or `user ada`")]
pub struct PrincipalError(String);

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Principal::Local { uid } => write!(f, "uid {uid}"),
            Principal::Node { name } => write!(f, "node {name}"),
            Principal::User { name } => write!(f, "user {name}"),
        }
    }
}

impl FromStr for Principal {
    type Err = PrincipalError;

    fn from_str(text: &str) -> Result<Principal, PrincipalError> {
        let found = match text.split_once(' ') {
            Some(("uid", uid)) => uid.parse().ok().map(|uid| Principal::Local { uid }),
            Some(("node", name)) => name.parse().ok().map(|name| Principal::Node { name }),
            Some(("user", name)) => name.parse().ok().map(|name| Principal::User { name }),
            _ => None,
        };
        found.ok_or_else(|| PrincipalError(text.to_owned()))
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
    fn test_a_secret_is_called_what_a_file_may_be_called() {
        assert!(["wandb", "a.b-c_D9"].iter().all(|name| is_secret_name(name)));
        let long = "x".repeat(101);
        for odd in ["", ".", "..", ".x", "a/b", "a b", "ä", "a\0", &long] {
            assert!(!is_secret_name(odd), "{odd}");
        }
    }

    #[test]
    fn test_principals_are_read_as_they_are_written() {
        let somebody = Principal::Local { uid: 4_294_967_294 };
        assert_eq!(somebody.to_string().parse(), Ok(somebody.clone()));
        assert_eq!(serde_json::to_string(&somebody).unwrap(), "\"uid 4294967294\"");
        for text in ["node gpu-07", "user ada"] {
            assert_eq!(text.parse::<Principal>().unwrap().to_string(), text);
        }
        for odd in [
            "",
            "uid",
            "uid ",
            "user ",
            "user a b",
            "node",
            "root ada",
            "uid -1",
            "uid 4294967296",
            "1000",
            "root",
        ] {
            assert!(odd.parse::<Principal>().is_err(), "{odd}");
        }
    }
}
