//! The records of who belongs to the controller: nodes, users, and the tokens that admit them.

use std::collections::BTreeMap;

use agent_model::{NodeId, Role, Timestamp, UserName};
use serde::{Deserialize, Serialize};

/// A machine that was made a node; its certificates contain the enrollment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberRecord {
    pub(crate) node: NodeId,
    pub(crate) enrollment: String,
    /// The key that it presented last when it asked for a certificate, as a digest.
    pub(crate) key: String,
    /// The key that it got that certificate for. It may present either: the answer may have been lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) successor: Option<String>,
    #[serde(default)]
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) joined_at: Timestamp,
}

impl MemberRecord {
    /// Whether the machine may show this key.
    pub(crate) fn has_key(&self, key: &str) -> bool {
        self.key == key || self.successor.as_deref() == Some(key)
    }
}

/// A node that was removed: nothing that was given to it under this enrollment is proved any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemovedRecord {
    pub(crate) node: NodeId,
    pub(crate) enrollment: String,
    pub(crate) at: Timestamp,
}

/// A user from another machine, whose certificates contain the enrollment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UserRecord {
    pub(crate) name: UserName,
    pub(crate) role: Role,
    pub(crate) enrollment: String,
    pub(crate) added_at: Timestamp,
    /// Jobs of the name from before are of somebody else, who was called so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) owns_since: Option<Timestamp>,
    /// He is no user any more; what is kept is since when the name is his, should he come back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) is_removed: bool,
}

/// A token that was issued, by the hash of its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TokenRecord {
    pub(crate) hash: String,
    /// The user whose code it is; a token without one admits nodes.
    #[serde(default)]
    pub(crate) user: Option<UserName>,
    #[serde(default)]
    pub(crate) labels: BTreeMap<String, String>,
    /// The only node that it admits; any, if it names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) node: Option<NodeId>,
    pub(crate) uses_left: u32,
    pub(crate) until: Timestamp,
    /// Who made it.
    pub(crate) by: String,
}

impl TokenRecord {
    /// Its name in lists, which cannot be used as the token.
    pub(crate) fn id(&self) -> &str {
        self.hash.get(..12).unwrap_or(&self.hash)
    }
}
