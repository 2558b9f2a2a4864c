//! Other nodes of the controller as sources of blobs, and this node as one of theirs.
//!
//! Owns the choice of a source for each tree that is fetched: the controller names it, and another one when it failed.
//! What failed is remembered for a while, so that a firewall between two nodes costs two seconds once and not for each
//! job. Hides connections and their identities. What is served, and to whom: [`serve`].
//!
//! Invariants: a node that is not reached through TLS (on one box) asks nobody and listens nowhere; whatever a peer
//! does, the blob comes from elsewhere; small trees are not asked about.

mod serve;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use agent_cas::peer::{self, Peer, TreeSources};
use agent_cas::{Disk, ReadError, remote};
use agent_identity::{Dialer, PeerTls, Proxy, ShownIdentity, Trust};
use agent_model::protocol::peers::PeerFailure;
use agent_model::{Address, Clock, Digest, NodeId};
use agent_proto::transport::{self, Way};
use agent_proto::v1;
use agent_proto::v1::worker_client::WorkerClient;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tonic::transport::Channel;
use tracing::{debug, info, warn};

use super::rendezvous;
use crate::config::Config;
use crate::supervisor::{Supervisor, TaskKind};

/// Of each tree so many bytes come from the store before anybody is asked.
const FREE: u64 = 4 << 20;
/// How long the controller may take to answer.
const ANSWER: Duration = Duration::from_secs(3);
/// How long a connection to a peer may take.
const CONNECT: Duration = Duration::from_secs(2);
/// How often a silent peer is pinged, and how long the answer may take.
const KEEPALIVE: Duration = Duration::from_secs(3);
/// After so many failures a tree comes from the store.
const FAILURES: usize = 5;

/// The part of a joined machine's identity that connections between nodes need.
#[derive(Debug, Clone)]
pub(crate) struct PeerIdentity {
    /// The certificate of the authority.
    pub(crate) authority: Vec<u8>,
    pub(crate) shown: ShownIdentity,
}

/// See the module. Clones share it.
#[derive(Clone)]
pub(crate) struct NodePeers(Arc<Shared>);

struct Shared {
    controller: Channel,
    controller_address: Address,
    node: NodeId,
    /// The address that the operator named.
    address: Option<IpAddr>,
    identity: PeerIdentity,
    clock: Arc<dyn Clock>,
    /// Where this node listens; 0: nowhere.
    port: AtomicU16,
    /// How many fetches of a tree there are, by the digest of its root.
    fetching: Mutex<HashMap<String, usize>>,
    /// Until when a node is not asked.
    avoided: Mutex<BTreeMap<NodeId, Instant>>,
    /// Trees that are here, or were given up, and what was not told before about those asked for them.
    over: mpsc::UnboundedSender<(Digest, Failed)>,
}

/// Nodes that are not wanted, and what they did, unless the controller knows it.
type Failed = BTreeMap<NodeId, Option<PeerFailure>>;

/// The controller gave no answer: what it was told is perhaps not known there.
struct Unanswered;

impl fmt::Debug for NodePeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodePeers").field("node", &self.0.node).finish_non_exhaustive()
    }
}

impl NodePeers {
    /// Starts to listen at `peer_port`, if that can be had, and to tell the controller which trees are here.
    pub(crate) fn start(
        config: &Config,
        identity: PeerIdentity,
        controller: Channel,
        clock: &Arc<dyn Clock>,
        supervisor: &Supervisor,
    ) -> NodePeers {
        let (over, mut trees) = mpsc::unbounded_channel();
        let peers = NodePeers(Arc::new(Shared {
            controller,
            controller_address: config.controller.clone(),
            node: config.node_name.clone(),
            address: config.gangs.address,
            identity,
            clock: Arc::clone(clock),
            port: AtomicU16::new(0),
            fetching: Mutex::default(),
            avoided: Mutex::default(),
            over,
        }));
        let shared = Arc::downgrade(&peers.0);
        supervisor.spawn_infallible(TaskKind::Api, "fetched trees", async move {
            while let Some((root, failed)) = trees.recv().await {
                let Some(shared) = shared.upgrade() else { return };
                // If it is lost, the controller knows of one source less.
                let _ = shared.ask(root, &failed, true).await;
            }
        });
        peers
    }

    /// Serves the blobs of `disk` to other nodes. A port that cannot be had is no reason not to run jobs.
    pub(crate) async fn listen(&self, port: u16, disk: Disk, supervisor: &Supervisor) {
        let shared = &self.0;
        let tls = PeerTls::new(
            &shared.identity.authority,
            shared.identity.shown.clone(),
            Arc::clone(&shared.clock),
        );
        let bound = match tls {
            Ok(tls) => bind(port).await.map(|listener| (tls, listener)),
            Err(error) => Err(io::Error::other(error)),
        };
        match bound {
            Ok((tls, (listener, port))) => {
                shared.port.store(port, Ordering::Relaxed);
                info!(port, "serving blobs to other nodes");
                serve::start(Arc::clone(shared), listener, tls, disk, supervisor);
            }
            Err(error) => {
                warn!(port, %error, "cannot listen at `peer_port`: other nodes get no blobs from here")
            }
        }
    }
}

async fn bind(port: u16) -> io::Result<(TcpListener, u16)> {
    let all = |any: IpAddr| TcpListener::bind(SocketAddr::new(any, port));
    let listener = match all(IpAddr::from([0u16; 8])).await {
        Ok(listener) => listener,
        // A machine without IPv6.
        Err(_) => all(IpAddr::from([0u8; 4])).await?,
    };
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

impl peer::Peers for NodePeers {
    fn tree(&self, root: Digest) -> Arc<dyn TreeSources> {
        *self.0.fetching.lock().entry(root.hex()).or_default() += 1;
        Arc::new(TreeFetch { shared: Arc::clone(&self.0), root, state: tokio::sync::Mutex::default() })
    }
}

impl Shared {
    fn is_fetching(&self, tree: &str) -> bool {
        self.fetching.lock().contains_key(tree)
    }

    /// Where others reach this node; empty if nowhere.
    async fn own_address(&self) -> String {
        let port = self.port.load(Ordering::Relaxed);
        let address = match self.address {
            _ if port == 0 => None,
            Some(address) => Some(address),
            None => rendezvous::outward(&self.controller_address).await,
        };
        address.map(|address| SocketAddr::new(address, port).to_string()).unwrap_or_default()
    }

    /// The node that the controller names for a tree.
    async fn ask(
        &self,
        root: Digest,
        failed: &Failed,
        over: bool,
    ) -> Result<Option<(NodeId, SocketAddr)>, Unanswered> {
        let failed = failed.iter().map(|(node, what)| v1::FailedPeer {
            node: node.to_string(),
            what: what.map(|what| what.name().to_owned()).unwrap_or_default(),
        });
        let request = v1::FindPeerRequest {
            node: self.node.to_string(),
            tree: root.to_string(),
            address: self.own_address().await,
            failed: failed.collect(),
            over,
        };
        let mut client = WorkerClient::new(self.controller.clone());
        let answer = match timeout(ANSWER, client.find_peer(request)).await {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => {
                debug!(%status, "the controller names no peer");
                return Err(Unanswered);
            }
            Err(_) => return Err(Unanswered),
        };
        Ok(answer.node.parse().ok().zip(answer.address.parse().ok()))
    }

    fn connect(&self, node: NodeId, at: SocketAddr, root: Digest) -> Option<Arc<Peer>> {
        let (host, trust) = (at.ip().to_string(), Trust::Node(self.identity.authority.clone(), node));
        let shown = Some(self.identity.shown.clone());
        let to = (host.as_str(), at.port());
        let dialer = Dialer::new(to, trust, shown, Proxy::default(), Arc::clone(&self.clock)).ok()?;
        let endpoint = remote::far(transport::endpoint())
            .connect_timeout(CONNECT)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE);
        Some(Arc::new(Peer::new(transport::dial(endpoint, Way::Tls(dialer)), root)))
    }

    /// Those that failed lately.
    fn avoided(&self) -> Failed {
        let mut avoided = self.avoided.lock();
        avoided.retain(|_, until| *until > Instant::now());
        avoided.keys().map(|node| (node.clone(), None)).collect()
    }

    fn avoid(&self, node: &NodeId, failure: PeerFailure) {
        if let Some(time) = avoided_for(failure) {
            self.avoided.lock().insert(node.clone(), Instant::now() + time);
        }
    }
}

/// For how long a node that failed is not asked for any tree.
fn avoided_for(failure: PeerFailure) -> Option<Duration> {
    match failure {
        PeerFailure::Lacks | PeerFailure::Waits => None,
        PeerFailure::Busy => Some(Duration::from_secs(30)),
        PeerFailure::Away | PeerFailure::Stalls => Some(Duration::from_secs(600)),
        PeerFailure::Lies => Some(Duration::from_secs(3600)),
    }
}

/// One fetch of a tree.
struct TreeFetch {
    shared: Arc<Shared>,
    root: Digest,
    /// Held while the controller is asked, so that all calls of the fetch wait for one answer.
    state: tokio::sync::Mutex<FetchState>,
}

#[derive(Default)]
struct FetchState {
    /// What came, or was wanted, so far.
    bytes: u64,
    is_asked: bool,
    source: Option<(NodeId, Arc<Peer>)>,
    failed: Failed,
    failures: usize,
}

impl fmt::Debug for TreeFetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeFetch").field("root", &self.root).finish_non_exhaustive()
    }
}

impl TreeFetch {
    async fn choose(&self, state: &mut FetchState) {
        state.is_asked = true;
        let mut failed = self.shared.avoided();
        failed.append(&mut state.failed.clone());
        let named = self.shared.ask(self.root, &failed, false).await;
        if named.is_ok() {
            // What was told once is not told again.
            state.failed.values_mut().for_each(|what| *what = None);
        }
        state.source = named.unwrap_or_default().and_then(|(node, at)| {
            debug!(root = %self.root, %node, %at, "fetching tree from another node");
            Some((node.clone(), self.shared.connect(node, at, self.root)?))
        });
    }
}

impl TreeSources for TreeFetch {
    fn next(&self, bytes: u64) -> BoxFuture<'_, Option<Arc<Peer>>> {
        async move {
            let mut state = self.state.lock().await;
            state.bytes = state.bytes.saturating_add(bytes);
            if !state.is_asked && state.bytes >= FREE {
                self.choose(&mut state).await;
            }
            state.source.as_ref().map(|(_, peer)| Arc::clone(peer))
        }
        .boxed()
    }

    fn failed<'a>(&'a self, peer: &'a Arc<Peer>, error: &'a ReadError) -> BoxFuture<'a, ()> {
        async move {
            let mut state = self.state.lock().await;
            // Another call of the fetch may have reported it.
            let Some((node, _)) = state.source.take_if(|(_, source)| Arc::ptr_eq(source, peer)) else {
                return;
            };
            let failure = peer::failure(error);
            match failure.is_fault() {
                true => warn!(%node, %error, "another node {}: fetching elsewhere", failure.name()),
                false => debug!(%node, %error, "another node {}: fetching elsewhere", failure.name()),
            }
            self.shared.avoid(&node, failure);
            state.failed.insert(node, Some(failure));
            state.failures += 1;
            match state.failures < FAILURES {
                true => self.choose(&mut state).await,
                false => info!(root = %self.root, "fetching the rest of the tree from the store"),
            }
        }
        .boxed()
    }
}

impl Drop for TreeFetch {
    fn drop(&mut self) {
        let mut fetching = self.shared.fetching.lock();
        if let Some(fetches) = fetching.get_mut(&self.root.hex()) {
            *fetches -= 1;
            if *fetches == 0 {
                fetching.remove(&self.root.hex());
            }
        }
        let state = self.state.get_mut();
        if state.is_asked {
            let failed = std::mem::take(&mut state.failed);
            let _ = self.shared.over.send((self.root, failed)); // nobody listens when the daemon stops
        }
    }
}
