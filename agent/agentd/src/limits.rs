//! How many descriptors the daemon may have, and how many of them its clients may hold.
//!
//! The daemon raises its soft limit to the hard one; jobs get the old one back, because programs that still use
//! `select` fail with more than 1,024. Of what it may have, clients hold at most a half in all, so that there are
//! always some left for its own files: the database, the journal, blobs, logs.
//!
//! Called by `main` and by whoever listens.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Connections of clients at one listener, however many descriptors there are.
const CONNECTIONS: u64 = 1024;

/// Raises the soft limit; gives what it was.
pub(crate) fn raise() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, ?limit.current, "cannot raise the limit of open files");
    }
    limit.current
}

/// How many connections a listener takes at a time: there are two, so each has a quarter of all descriptors.
pub(crate) fn connections() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from((limit / 4).clamp(8, CONNECTIONS)).unwrap_or(usize::MAX)
}
