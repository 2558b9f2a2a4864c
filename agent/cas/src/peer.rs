//! Blobs from other nodes: both ends of it.
//!
//! A node serves what its disk has ([`service`]), by the two calls of the Remote Execution API that read blobs, and
//! also what only arrives there: a large blob as it grows, and what belongs to a tree that the node itself is fetching,
//! once it is there. So nodes that want the same tree at the same time form a chain in which each byte travels once
//! between two of them. The name of the instance in a call is the digest of the root of the tree.
//!
//! A node fetches from a [`Peer`], which a [`TreeSources`] names for a tree, before it goes to the far store. Nothing
//! is repeated and nobody is waited for as long as for a controller: who fails is reported to the [`TreeSources`],
//! which names another one or none. Bytes are verified as always.

mod client;
mod service;

use std::fmt;
use std::sync::Arc;

use agent_model::Digest;
use agent_model::protocol::peers::PeerFailure;
use futures_util::future::BoxFuture;

use crate::ReadError;
pub use client::Peer;
pub use service::{IsAwaited, service};

/// Which nodes have what, for each tree that is fetched.
pub trait Peers: fmt::Debug + Send + Sync + 'static {
    /// For the fetch of one tree, which begins now and ends when the result is dropped.
    fn tree(&self, root: Digest) -> Arc<dyn TreeSources>;
}

/// Which nodes have the blobs of one tree.
pub trait TreeSources: fmt::Debug + Send + Sync + 'static {
    /// Whom to ask for so many bytes; `None`: the far store.
    fn next(&self, bytes: u64) -> BoxFuture<'_, Option<Arc<Peer>>>;

    /// Told what a peer did instead of sending a blob.
    fn failed<'a>(&'a self, peer: &'a Arc<Peer>, error: &'a ReadError) -> BoxFuture<'a, ()>;
}

/// What a node did instead of sending a blob.
pub fn failure(error: &ReadError) -> PeerFailure {
    match error {
        ReadError::Absent { .. } => PeerFailure::Lacks,
        error if error.is_damage() => PeerFailure::Lies,
        ReadError::Remote { source, .. } => match source.code() {
            tonic::Code::DeadlineExceeded => PeerFailure::Stalls,
            tonic::Code::ResourceExhausted => PeerFailure::Busy,
            tonic::Code::Aborted => PeerFailure::Waits,
            _ => PeerFailure::Away,
        },
        _ => PeerFailure::Away,
    }
}

#[cfg(test)]
mod tests;
