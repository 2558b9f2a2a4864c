//! The calls of `Nodes` about tunnels. Whoever keeps them does the work; here are the rules: which one may take
//! another's place, and that one counts as kept only when it was open once.

use std::time::Duration;

use agent_model::{Code, Fault, NodeId, TunnelSpec, TunnelState};
use agent_proto::v1;
use tokio::time::{Instant, sleep_until};

use super::{Refusal, Services, invalid};
use crate::tunnels::{KeptTunnel, TunnelRequest, Tunnels};

/// How long a tunnel may take to open. Less than a client waits for an answer.
const OPENS: Duration = Duration::from_secs(15);

impl Services {
    fn tunnels(&self) -> Result<&Tunnels, Refusal> {
        self.members.tunnels.as_ref().ok_or_else(|| {
            Fault::new(Code::NoListener, "this controller serves its own machine alone")
                .fix("set `listen: 0.0.0.0:7443` in its configuration and start it again")
                .into()
        })
    }

    pub(super) async fn tunnel_key(&self) -> Result<String, Refusal> {
        Ok(self.tunnels()?.ask(TunnelRequest::Key).await.ok_or(Refusal::Stopping)??)
    }

    pub(super) async fn keep_tunnel(&self, asked: v1::KeepTunnelRequest) -> Result<(), Refusal> {
        let tunnels = self.tunnels()?;
        let node: NodeId = asked.node.parse()?;
        let port = |port: u32| {
            u16::try_from(port)
                .ok()
                .filter(|port| *port > 0)
                .ok_or_else(|| invalid(format!("{port} is no port")))
        };
        let (port, listens) = (port(asked.port)?, port(asked.listens)?);
        let v1::KeepTunnelRequest { host, user, host_key, .. } = asked;
        if host.is_empty() || user.is_empty() || host_key.is_empty() {
            return Err(invalid("a tunnel needs a host, a user there, and the host's key").into());
        }
        let spec = TunnelSpec { host, port, user, host_key, listens };
        let known = tunnels.kept.borrow().get(&node).cloned();
        if known.as_ref().is_some_and(|known| known.spec.host_key != spec.host_key) {
            return Err(taken(&node).into());
        }
        let keep = |answer| TunnelRequest::Keep(node.clone(), spec.clone(), answer);
        tunnels.ask(keep).await.ok_or(Refusal::Stopping)??;
        let why = match await_open(tunnels, &node).await {
            Ok(()) => return Ok(()),
            Err(why) => why,
        };
        // One that was open before stays: it may be open again.
        if known.is_none() {
            self.members.drop_tunnel(&node).await?;
        }
        Err(Fault::new(Code::HostLogin, format!("the controller has no tunnel to {spec}"))
            .why(why)
            .fix("the controller must reach its SSH server, with this address, port and user")
            .into())
    }

    /// The tunnel of a node, if it has one.
    pub(super) fn tunnel_of(&self, node: &NodeId) -> Option<v1::Tunnel> {
        let kept = self.members.tunnels.as_ref()?.kept.borrow().get(node).cloned()?;
        Some(v1::Tunnel {
            through: kept.spec.to_string(),
            up: kept.state == TunnelState::Up,
            why: match kept.state {
                TunnelState::Up => String::new(),
                TunnelState::Opening => "it is being opened".to_owned(),
                TunnelState::Down { why } => why,
            },
        })
    }

    /// Those that are not open, for operators.
    pub(super) fn tunnels_down(&self) -> Vec<v1::Notice> {
        let Some(tunnels) = &self.members.tunnels else { return Vec::new() };
        let down = |(node, KeptTunnel { spec, state }): (&NodeId, &KeptTunnel)| match state {
            TunnelState::Down { why } => Some(v1::Notice {
                what: format!("the tunnel to {node} ({spec}) is down: {why}"),
                fix: format!(
                    "it is opened again by itself; attach the machine again, or if it is gone: agentctl node remove {node}"
                ),
            }),
            TunnelState::Up | TunnelState::Opening => None,
        };
        tunnels.kept.borrow().iter().filter_map(down).collect()
    }
}

/// Waits until a tunnel is open; returns the reason if it is not.
async fn await_open(tunnels: &Tunnels, node: &NodeId) -> Result<(), String> {
    let (mut kept, end) = (tunnels.kept.clone(), Instant::now() + OPENS);
    let mut last = format!("it was not open within {} s", OPENS.as_secs());
    loop {
        match kept.borrow_and_update().get(node).map(|kept| kept.state.clone()) {
            Some(TunnelState::Up) => return Ok(()),
            Some(TunnelState::Down { why }) => last = why,
            Some(TunnelState::Opening) => {}
            None => return Err("it was given up meanwhile".to_owned()),
        }
        tokio::select! {
            changed = kept.changed() => changed.map_err(|_| "the daemon stops".to_owned())?,
            () = sleep_until(end) => return Err(last),
        }
    }
}

fn taken(node: &NodeId) -> Fault {
    Fault::new(Code::NodeTaken, format!("there is a tunnel to `{node}` already, and this is another machine"))
        .why("it shows another key: either it is another machine, or this one was installed anew")
        .fix(format!(
            "give this machine another --name; or, if the old one is gone: agentctl node remove {node}"
        ))
}
