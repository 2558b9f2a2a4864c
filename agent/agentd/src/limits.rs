//! How many file descriptors the daemon may have, and how many of them its clients may hold.
//!
//! The daemon raises its soft limit to the hard one; jobs get the old one back, because programs that still use
//! `select` fail with more than 1,024. Clients hold at most two thirds of the limit in all, so that some are always
//! left for the daemon's own files: the database, the journal, blobs, logs.

use std::sync::Arc;

use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The most connections of clients at one listener, however many descriptors there are.
const CONNECTIONS: u64 = 1024;
/// The same for the listener of a fleet.
const FLEET_CONNECTIONS: u64 = 16 * 1024;
/// The same for the listener for other nodes: each is there for the time of a fetch.
const PEER_CONNECTIONS: u64 = 64;
/// The same for those at a TLS listener of which it is not known yet whose they are: each handshake takes milliseconds.
const STRANGERS: u64 = 256;
/// The same for those that look whether they reach the ports of one rank: each is there for the time of a greeting.
const GUESTS: u64 = 64;

/// Raises the soft limit; returns the old one.
pub(crate) fn raise() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, ?limit.current, "cannot raise the limit of open files");
    }
    limit.current
}

/// The connections that one listener accepts at a time; clones share the count.
#[derive(Clone)]
pub(crate) struct Connections {
    left: Arc<Semaphore>,
    most: usize,
}

impl Connections {
    /// For a listener of this machine. There are three listeners, so each has a sixth of all descriptors.
    pub(crate) fn new() -> Connections {
        Connections::at_most(CONNECTIONS, 6)
    }

    /// For the listener for other machines: each node has a few.
    pub(crate) fn of_a_fleet() -> Connections {
        Connections::at_most(FLEET_CONNECTIONS, 6)
    }

    /// For other nodes, which read blobs of this one.
    pub(crate) fn of_peers() -> Connections {
        Connections::at_most(PEER_CONNECTIONS, 24)
    }

    /// For those at a TLS listener that have shown no certificate, or not yet.
    pub(crate) fn of_strangers() -> Connections {
        Connections::at_most(STRANGERS, 24)
    }

    /// For the ports of a rank that has not begun.
    pub(crate) fn of_a_rank() -> Connections {
        Connections::at_most(GUESTS, 24)
    }

    /// For a listener that is tried with few.
    #[cfg(test)]
    pub(crate) fn of_a_test() -> Connections {
        Connections::at_most(8, 6)
    }

    /// At most so many, and that part of all descriptors.
    fn at_most(most: u64, part: u64) -> Connections {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = usize::try_from((limit / part).clamp(8, most)).unwrap_or(usize::MAX);
        Connections { left: Arc::new(Semaphore::new(most)), most }
    }

    /// Fewer than half of them are left.
    pub(crate) fn are_scarce(&self) -> bool {
        self.left.available_permits() < self.most / 2
    }

    /// Room for one more, as soon as there is some.
    pub(crate) async fn next(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.left).acquire_owned().await.ok()
    }

    /// Room for one more, if there is any.
    pub(crate) fn permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.left).try_acquire_owned().ok()
    }
}
