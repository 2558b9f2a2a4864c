//! Keeps the tunnels of the controller: SSH connections to nodes that cannot connect to it.
//!
//! Owns `controller/tunnels`: a file for each, and the key with which the controller logs in to all of them, which
//! nobody but its own user can read. One task owns the connections; the services ask it ([`TunnelDesk`]).
//!
//! Invariant: a tunnel that was confirmed is on disk, and is opened again after a restart.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_attach::{TunnelKey, hold};
use agent_control::{KeptTunnel, TunnelDesk, TunnelRequest};
use agent_model::{Code, Fault, NodeId, TunnelSpec, TunnelState};
use futures_util::FutureExt;
use tokio::sync::{Mutex, watch};
use tokio::task::{AbortHandle, JoinSet};
use tracing::{info, warn};

/// The name of the key's file; no node is called so, because of the dot.
const KEY: &str = "key.openssh";

/// Where what connects on a host is carried to: the controller's own listener.
pub(crate) fn listener((host, port): &(String, u16)) -> String {
    match host.as_str() {
        "0.0.0.0" => format!("127.0.0.1:{port}"),
        "::" => format!("[::1]:{port}"),
        host if host.contains(':') => format!("[{host}]:{port}"),
        host => format!("{host}:{port}"),
    }
}

/// Opens the tunnels on disk and does what the services ask, for ever. After a failure it is called again.
pub(crate) async fn keep(desk: Arc<Mutex<TunnelDesk>>, directory: PathBuf, controller: String) {
    let mut desk = desk.lock().await;
    let mut keeper = Keeper {
        directory,
        controller,
        kept: desk.kept.clone(),
        key: None,
        held: BTreeMap::new(),
        holders: JoinSet::new(),
    };
    keeper.kept.send_replace(BTreeMap::new());
    keeper.open_all();
    while let Some(request) = desk.requests.recv().await {
        // Nobody may wait for the answer any more.
        match request {
            TunnelRequest::Key(answer) => drop(answer.send(keeper.public_key())),
            TunnelRequest::Keep(node, spec, answer) => drop(answer.send(keeper.keep(&node, spec))),
            TunnelRequest::Drop(node, answer) => drop(answer.send(keeper.drop(&node))),
        }
    }
}

struct Keeper {
    directory: PathBuf,
    controller: String,
    kept: watch::Sender<BTreeMap<NodeId, KeptTunnel>>,
    key: Option<TunnelKey>,
    held: BTreeMap<NodeId, AbortHandle>,
    /// Ends them all when it is dropped.
    holders: JoinSet<()>,
}

impl Keeper {
    fn open_all(&mut self) {
        for (node, spec) in self.read_all() {
            if let Err(fault) = self.hold(&node, spec) {
                warn!(%node, %fault, "cannot open a tunnel");
            }
        }
    }

    /// The tunnels on disk. One that cannot be read is reported, and is no reason to keep none.
    fn read_all(&self) -> Vec<(NodeId, TunnelSpec)> {
        let files = match std::fs::read_dir(&self.directory) {
            Ok(files) => files,
            Err(error) if error.kind() == ErrorKind::NotFound => return Vec::new(),
            Err(error) => {
                warn!(directory = %self.directory.display(), %error, "cannot read tunnels");
                return Vec::new();
            }
        };
        let paths = files.flatten().map(|file| file.path());
        let paths = paths.filter(|path| path.extension().is_some_and(|end| end == "json"));
        paths
            .filter_map(|path| {
                read(&path)
                    .inspect_err(|error| warn!(path = %path.display(), %error, "cannot read a tunnel"))
                    .ok()
            })
            .collect()
    }

    /// The key, which is made when it is needed first.
    fn key(&mut self) -> Result<TunnelKey, Fault> {
        if let Some(key) = &self.key {
            return Ok(key.clone());
        }
        let path = self.directory.join(KEY);
        let unusable = |error: &dyn std::error::Error| unusable(&path, error);
        let key = match std::fs::read_to_string(&path) {
            Ok(text) => TunnelKey::read(&text).map_err(|error| unusable(&error))?,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let key = TunnelKey::generate().map_err(|error| unusable(&error))?;
                let text = key.to_text().map_err(|error| unusable(&error))?;
                self.write(&path, text.as_bytes())?;
                key
            }
            Err(error) => return Err(unusable(&error)),
        };
        self.key = Some(key.clone());
        Ok(key)
    }

    fn public_key(&mut self) -> Result<String, Fault> {
        let key = self.key()?;
        key.public().map_err(|error| unusable(&self.directory.join(KEY), &error))
    }

    fn keep(&mut self, node: &NodeId, spec: TunnelSpec) -> Result<(), Fault> {
        let is_open = |kept: &KeptTunnel| kept.spec == spec && kept.state == TunnelState::Up;
        if self.kept.borrow().get(node).is_some_and(is_open) {
            return Ok(());
        }
        let path = self.path(node);
        let text = serde_json::to_vec(&spec).map_err(|error| unusable(&path, &error))?;
        self.write(&path, &text)?;
        self.hold(node, spec)
    }

    fn hold(&mut self, node: &NodeId, spec: TunnelSpec) -> Result<(), Fault> {
        let key = self.key()?;
        self.end(node);
        let first = KeptTunnel { spec: spec.clone(), state: TunnelState::Opening };
        self.kept.send_modify(|kept| drop(kept.insert(node.clone(), first)));
        let (controller, kept, name) = (self.controller.clone(), self.kept.clone(), node.clone());
        let holder = async move {
            hold(&spec, &key, &controller, &|state| show(&kept, &name, &spec, state)).await;
        };
        self.held.insert(node.clone(), self.holders.spawn(holder.boxed()));
        Ok(())
    }

    fn drop(&mut self, node: &NodeId) -> Result<bool, Fault> {
        let path = self.path(node);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(unusable(&path, &error)),
            _ => {}
        }
        let had = self.end(node);
        if had {
            info!(%node, "closed the tunnel");
        }
        Ok(had)
    }

    /// Ends the connection, if there is one.
    fn end(&mut self, node: &NodeId) -> bool {
        let held = self.held.remove(node);
        held.iter().for_each(AbortHandle::abort);
        while self.holders.try_join_next().is_some() {}
        self.kept.send_modify(|kept| drop(kept.remove(node)));
        held.is_some()
    }

    fn path(&self, node: &NodeId) -> PathBuf {
        self.directory.join(format!("{node}.json"))
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> Result<(), Fault> {
        let write = || {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
            agent_fs::write_durable(path, bytes)
        };
        write().map_err(|error| unusable(path, &error))
    }
}

/// Shows the state of a tunnel, and logs each change.
fn show(
    kept: &watch::Sender<BTreeMap<NodeId, KeptTunnel>>,
    node: &NodeId,
    spec: &TunnelSpec,
    state: TunnelState,
) {
    kept.send_if_modified(|kept| {
        // After its end, a tunnel has no say in what is shown of another one.
        let Some(shown) = kept.get_mut(node).filter(|shown| shown.spec == *spec && shown.state != state)
        else {
            return false;
        };
        match &state {
            TunnelState::Up => info!(%node, through = %spec, "opened the tunnel"),
            TunnelState::Down { why } => warn!(%node, through = %spec, why, "lost the tunnel"),
            TunnelState::Opening => {}
        }
        shown.state = state;
        true
    });
}

fn read(path: &Path) -> io::Result<(NodeId, TunnelSpec)> {
    let node = path.file_stem().unwrap_or_default().to_string_lossy();
    let node = node.parse().map_err(io::Error::other)?;
    Ok((node, serde_json::from_slice(&std::fs::read(path)?)?))
}

fn unusable(path: &Path, error: &dyn std::error::Error) -> Fault {
    Fault::new(Code::ControllerStore, format!("cannot use {}", path.display()))
        .why(error.to_string())
        .fix("look for a full or failing disk in the daemon's log")
}

#[cfg(test)]
mod tests {
    use agent_control::Tunnels;

    use super::*;

    fn spec() -> TunnelSpec {
        TunnelSpec {
            host: "127.0.0.1".to_owned(),
            port: 1,
            user: "root".to_owned(),
            host_key: TunnelKey::generate().unwrap().public().unwrap(),
            listens: 17443,
        }
    }

    fn keeper(directory: &Path) -> Keeper {
        let (_, desk) = Tunnels::new();
        let (directory, controller) = (directory.join("tunnels"), "127.0.0.1:2".to_owned());
        let (held, holders) = (BTreeMap::new(), JoinSet::new());
        Keeper { directory, controller, kept: desk.kept, key: None, held, holders }
    }

    #[test]
    fn test_the_listener_of_this_machine() {
        let rows = [("0.0.0.0", "127.0.0.1:7"), ("::", "[::1]:7"), ("10.0.0.1", "10.0.0.1:7"), ("c", "c:7")];
        for (host, wanted) in rows {
            assert_eq!(listener(&(host.to_owned(), 7)), wanted);
        }
    }

    #[tokio::test]
    async fn test_tunnels_and_their_key_outlive_the_daemon() {
        let home = tempfile::tempdir().unwrap();
        let (node, spec): (NodeId, _) = ("gpu-1".parse().unwrap(), spec());
        let mut first = keeper(home.path());
        let key = first.public_key().unwrap();
        first.keep(&node, spec.clone()).unwrap();
        drop(first);
        std::fs::write(home.path().join("tunnels/bad.json"), "no tunnel").unwrap();
        let mut second = keeper(home.path());
        second.open_all();
        assert_eq!(second.public_key().unwrap(), key);
        let shown = second.kept.borrow().clone();
        assert_eq!(shown.iter().map(|(node, kept)| (node, &kept.spec)).collect::<Vec<_>>(), [(&node, &spec)]);
        assert!(second.drop(&node).unwrap() && !second.drop(&node).unwrap());
        assert!(second.kept.borrow().is_empty() && second.held.is_empty());
        let mut third = keeper(home.path());
        third.open_all();
        assert!(third.kept.borrow().is_empty());
    }

    #[tokio::test]
    async fn test_why_a_tunnel_is_not_open_is_shown() {
        let home = tempfile::tempdir().unwrap();
        let node: NodeId = "gpu-1".parse().unwrap();
        let mut keeper = keeper(home.path());
        let mut kept = keeper.kept.subscribe();
        keeper.keep(&node, spec()).unwrap();
        let is_down = |kept: &BTreeMap<NodeId, KeptTunnel>| matches!(&kept[&node].state, TunnelState::Down { why } if why.starts_with("it does not answer: "));
        kept.wait_for(is_down).await.unwrap();
    }
}
