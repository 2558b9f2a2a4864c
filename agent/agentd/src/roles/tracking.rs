//! The listener of the tracking endpoint. Running jobs know its port.
//!
//! A daemon takes the port of the one before it. While no daemon runs, supervisors of the same user hold the port, so
//! that nobody else receives the data of jobs.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use agent_model::Clock;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tracing::warn;

use super::StartError;
use crate::config::Config;
use crate::supervisor::{Supervisor, TaskKind};
use crate::worker::tracking::Tracking;

/// The tracking endpoint, and the task that serves it once the jobs of an earlier process are known.
pub(super) async fn start(
    config: &Config,
    supervisor: &Supervisor,
    clock: &Arc<dyn Clock>,
) -> Result<(Tracking, impl Future<Output = ()> + Send + use<>), StartError> {
    let listener = listen_for_tracking(config).await?;
    let stop = supervisor.stopping(TaskKind::Tracking).cancelled_owned();
    let failed = |source| StartError::Listen { at: "the tracking endpoint's port".to_owned(), source };
    Tracking::start(listener, clock.clone(), stop).map_err(failed)
}

/// The tracking endpoint's listener. Running jobs know its address, so a daemon takes the port of the one
/// before it.
async fn listen_for_tracking(config: &Config) -> Result<TcpListener, StartError> {
    let remembered = config.state_dir.join("tracking.port");
    let before = std::fs::read_to_string(&remembered).ok().and_then(|text| text.trim().parse().ok());
    let wanted = if config.tracking_port == 0 { before.unwrap_or(0) } else { config.tracking_port };
    let listen = |port| async move {
        listen_on_loopback(port)
            .await
            .map_err(|source| StartError::Listen { at: format!("127.0.0.1:{port}"), source })
    };
    let listener = match listen(wanted).await {
        Err(error) if config.tracking_port == 0 && wanted != 0 => {
            warn!(%error, "cannot bind tracking port of before: running jobs lose their connection to it");
            listen(0).await?
        }
        listener => listener?,
    };
    let failed = |source| StartError::State { path: remembered.clone(), source };
    let port = listener.local_addr().map_err(failed)?.port();
    if let Err(error) = agent_fs::write_whole(&remembered, port.to_string().as_bytes()) {
        warn!(%error, path = %remembered.display(), "cannot remember tracking port");
    }
    Ok(listener)
}

/// Listens at a port of loopback that supervisors of the same user may hold: while no daemon runs, they keep
/// everybody else from it.
async fn listen_on_loopback(port: u16) -> io::Result<TcpListener> {
    const BACKLOG: u32 = 1024;
    let place = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    // With SO_REUSEPORT the port could be shared with another daemon, which would get half of the calls.
    if port != 0 && TcpStream::connect(place).await.is_ok() {
        return Err(ErrorKind::AddrInUse.into());
    }
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(true)?;
    socket.bind(place)?;
    socket.listen(BACKLOG)
}
