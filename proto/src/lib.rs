//! The agentd gRPC protocol.
//!
//! Owns the generated code of `agent/v1/*.proto` and the only translation between wire messages and the
//! types of `agent_model`. Model → wire cannot fail (`From`); wire → model can (`TryFrom`, [`WireError`]),
//! because a message is whatever a peer sent. A [`Fault`](agent_model::Fault) crosses a gRPC status
//! unharmed: [`status`] packs it, [`fault`] unpacks it.

mod convert;
#[cfg(feature = "fakes")]
mod declared;
mod status;
pub mod transport;
mod unwritten;

/// Wire messages, clients and servers.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::too_many_lines, reason = "generated code")]
pub mod v1 {
    include!("generated/agent.v1.rs");
}

pub use convert::{WireError, change_request};
#[cfg(feature = "fakes")]
pub use declared::declared_calls;
pub use status::{fault, status};
pub use unwritten::Unwritten;

/// The largest message either side accepts, in bytes: a batch of blobs of 4 MiB and its frame.
pub const MAX_MESSAGE: usize = 4 * 1024 * 1024 + 64 * 1024;
