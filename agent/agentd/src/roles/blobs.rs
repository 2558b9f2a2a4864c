//! Where this daemon keeps and gets blobs: its disk, a server, the controller, and other nodes.

use std::sync::Arc;
use std::time::Duration;

use agent_cas::gc::{Collector, StoreLimits};
use agent_cas::{Disk, Remote, Store, Tiered, remote};
use agent_control::Controller;
use agent_model::Clock;
use agent_model::disk::Watermarks;
use tonic::transport::{ClientTlsConfig, Endpoint};
use tracing::info;

use super::{CONNECT, StartError, dial};
use crate::config::{Config, FarStore};
use crate::membership::Uplink;
use crate::supervisor::Supervisor;
use crate::worker::peers::NodePeers;
use crate::worker::pins;

/// How often a silent connection to a server that is not ours is pinged, and how long the answer may take.
const FAR_KEEPALIVE: Duration = Duration::from_secs(30);

/// The store of blobs, and the collector that keeps its part on this disk small.
pub(super) struct Blobs {
    pub(super) store: Store,
    pub(super) collector: Collector,
}

/// Opens the store of blobs, which both roles share, and serves it to other nodes where those are used.
pub(super) async fn start(
    config: &Config,
    supervisor: &Supervisor,
    clock: &Arc<dyn Clock>,
    uplink: &Uplink,
) -> Result<Blobs, StartError> {
    let peers = start_peers(config, supervisor, clock, uplink);
    let blobs = open(config, clock, uplink, peers.as_ref())?;
    if let Some((peers, port)) = peers.zip(config.gangs.peer_port) {
        peers.listen(port, blobs.collector.disk().clone(), supervisor).await;
    }
    Ok(blobs)
}

/// The store of blobs, which both roles share.
fn open(
    config: &Config,
    clock: &Arc<dyn Clock>,
    uplink: &Uplink,
    peers: Option<&NodePeers>,
) -> Result<Blobs, StartError> {
    let dir = config.state_dir.join("cas");
    let disk = Disk::open_with_reserve(&dir, config.disk_reserve).map_err(StartError::Blobs)?;
    let size = config.store_size.of(agent_node::disk_size(&dir));
    let limits = StoreLimits { size, marks: Watermarks::new(config.disk_reserve), lease: config.blob_lease };
    let controller = config.roles.controller.then_some(Controller::BLOB_USER);
    let users: Vec<_> = controller.into_iter().chain(config.roles.node.then_some(pins::USER)).collect();
    let collector = Collector::new(disk.clone(), limits, &users, clock.clone());
    Ok(Blobs { store: choose_store(disk, config, uplink, peers)?, collector })
}

/// Other nodes as sources of blobs, for a node of a fleet that may use them.
fn start_peers(
    config: &Config,
    supervisor: &Supervisor,
    clock: &Arc<dyn Clock>,
    uplink: &Uplink,
) -> Option<NodePeers> {
    let identity =
        uplink.peer_identity().filter(|_| config.roles.node && config.gangs.peer_port.is_some())?;
    Some(NodePeers::start(config, identity, dial(uplink), clock, supervisor))
}

/// Where blobs are: on this machine, at the configured server, or at the controller, which a node also asks for blobs
/// that the server lacks. An unreachable server is no error here: the reader of a blob waits for it.
fn choose_store(
    disk: Disk,
    config: &Config,
    uplink: &Uplink,
    peers: Option<&NodePeers>,
) -> Result<Store, StartError> {
    let far = match &config.blob_store {
        Some(FarStore { server, instance }) => {
            let failed = |source| StartError::FarBlobs { server: server.clone(), source };
            let mut endpoint = Endpoint::from_shared(server.clone()).map_err(failed)?;
            if server.starts_with("https://") {
                let trusted = ClientTlsConfig::new().with_native_roots();
                endpoint = endpoint.tls_config(trusted).map_err(failed)?;
            }
            let channel = remote::far(endpoint)
                .connect_timeout(CONNECT)
                // Not while idle: some servers close connections that send too many pings.
                .http2_keep_alive_interval(FAR_KEEPALIVE)
                .keep_alive_timeout(FAR_KEEPALIVE)
                .connect_lazy();
            info!(server, instance, "using remote blob store");
            Remote::far(channel, instance)
        }
        None if config.roles.controller => return Ok(Store::Disk(disk)),
        None => Remote::new(dial(uplink)),
    };
    let tiered = match peers {
        Some(peers) => Tiered::new(disk, far).beside(Arc::new(peers.clone())),
        None => Tiered::new(disk, far),
    };
    Ok(Store::Tiered(Box::new(match config.blob_store.is_some() && !config.roles.controller {
        true => tiered.or_from(Remote::new(dial(uplink))),
        false => tiered,
    })))
}
