//! Tunnels: connections of the controller to hosts that cannot connect to it, by which they reach it.
//!
//! This crate does not know how they are made: the services ask whoever keeps them, by [`Tunnels`], and see how they
//! are. Whoever keeps them has the other end, [`TunnelDesk`].

use std::collections::BTreeMap;

use agent_model::{Fault, NodeId, TunnelSpec, TunnelState};
use tokio::sync::{mpsc, oneshot, watch};

/// How many requests may wait.
const WAITING: usize = 16;

/// A tunnel that is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptTunnel {
    /// What it is.
    pub spec: TunnelSpec,
    /// How it is.
    pub state: TunnelState,
}

/// What is asked of whoever keeps the tunnels.
#[derive(Debug)]
pub enum TunnelRequest {
    /// The key that hosts must accept, as a line of OpenSSH.
    Key(oneshot::Sender<Result<String, Fault>>),
    /// To keep this one; answered when that is on disk and before it is open.
    Keep(NodeId, TunnelSpec, oneshot::Sender<Result<(), Fault>>),
    /// To keep it no more; answered with whether there was one.
    Drop(NodeId, oneshot::Sender<Result<bool, Fault>>),
}

/// Asks whoever keeps the tunnels. Clones ask the same one.
#[derive(Debug, Clone)]
pub struct Tunnels {
    requests: mpsc::Sender<TunnelRequest>,
    /// All that are kept.
    pub(crate) kept: watch::Receiver<BTreeMap<NodeId, KeptTunnel>>,
}

/// Where whoever keeps the tunnels is asked, and shows them.
#[derive(Debug)]
pub struct TunnelDesk {
    /// What is asked.
    pub requests: mpsc::Receiver<TunnelRequest>,
    /// All that are kept.
    pub kept: watch::Sender<BTreeMap<NodeId, KeptTunnel>>,
}

impl Tunnels {
    /// Both ends.
    pub fn new() -> (Tunnels, TunnelDesk) {
        let (ask, requests) = mpsc::channel(WAITING);
        let (show, kept) = watch::channel(BTreeMap::new());
        (Tunnels { requests: ask, kept }, TunnelDesk { requests, kept: show })
    }

    /// The answer to a request; `None` while the daemon stops.
    pub(crate) async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> TunnelRequest,
    ) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        self.requests.send(request(answer)).await.ok()?;
        answered.await.ok()
    }
}
