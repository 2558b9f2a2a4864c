//! A node that speaks the protocol over TLS and runs nothing: for controllers with many nodes, and for nodes that
//! behave as no real one does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use agent_cas::remote;
use agent_identity::{Credentials, Dialer, PrivateKey, Proxy, ShownIdentity, Token, Trust};
use agent_model::{Clock, SystemClock};
use agent_proto::transport::{self, Way};
use agent_proto::v1;
use agent_proto::v1::identity_client::IdentityClient;
use agent_proto::v1::worker_client::WorkerClient;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_stream::wrappers::WatchStream;
use tonic::Status;
use tonic::transport::Channel;

use crate::chance::Chance;

/// As `agentd` sets them.
const KEEPALIVE: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(10);
const REPORT_EVERY: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug, Clone)]
pub struct Simulated {
    /// Its name.
    pub name: String,
    /// What it got when it joined.
    pub credentials: Credentials,
    session: String,
    controller: (String, u16),
}

fn clock_ms() -> u64 {
    SystemClock.now().0
}

impl Simulated {
    /// Joins a controller as a node of this name.
    ///
    /// # Errors
    ///
    /// What the controller, or the way to it, says.
    pub async fn join(controller: (&str, u16), token: &str, name: &str) -> Result<Simulated, Status> {
        let odd = |error: &dyn std::fmt::Display| Status::internal(error.to_string());
        let token: Token = token.trim().parse().map_err(|_| Status::internal("no token"))?;
        let key = PrivateKey::generate().map_err(|error| odd(&error))?;
        let dialer = Dialer::new(
            controller,
            Trust::Fingerprint(token.authority()),
            None,
            Proxy::default(),
            Arc::new(SystemClock),
        )
        .map_err(|error| odd(&error))?;
        let authority = dialer.authority().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let request = v1::JoinRequest {
            node: name.to_owned(),
            secret: token.secret(),
            request: key.request().map_err(|error| odd(&error))?,
            clock_ms: clock_ms(),
            jobs: Vec::new(),
        };
        let channel = transport::dial(transport::endpoint(), Way::Tls(dialer));
        let joined = IdentityClient::new(channel).join(request).await?.into_inner();
        let address = format!("https://{}:{}", controller.0, controller.1);
        Ok(Simulated {
            name: name.to_owned(),
            credentials: Credentials::new(&address, &authority, &joined.certificate, &key),
            session: agent_identity::random_name().map_err(|error| odd(&error))?,
            controller: (controller.0.to_owned(), controller.1),
        })
    }

    /// A connection to the controller, made when it is used.
    pub fn channel(&self) -> Channel {
        let authority = self.credentials.authority().expect("an authority");
        let shown = ShownIdentity::new(&self.credentials).expect("an identity");
        let to = (self.controller.0.as_str(), self.controller.1);
        let clock = Arc::new(SystemClock);
        let dialer = Dialer::new(to, Trust::Authority(authority), Some(shown), Proxy::default(), clock);
        let agent = format!("agentd/simulated {}{}", transport::SESSION, self.session);
        let endpoint = remote::far(transport::endpoint()).user_agent(agent).expect("a header");
        let endpoint = endpoint
            .connect_timeout(CONNECT)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .keep_alive_while_idle(true);
        transport::dial(endpoint, Way::Tls(dialer.expect("a way")))
    }

    /// Speaks with the controller for ever, as `agentd` does: reports what it is ordered to run as running, and begins
    /// again when the stream ends. `seen` is told whenever orders came.
    pub async fn live(self, slots: u32, seen: watch::Sender<Seen>) {
        let channel = self.channel();
        let mut life = Life { slots, ..Life::default() };
        let (mut wait, mut chance) = (Duration::from_millis(100), Chance::new(Chance::seed()));
        loop {
            if self.converse(&channel, &mut life, &seen).await {
                wait = Duration::from_millis(100);
            }
            seen.send_modify(|seen| seen.is_connected = false);
            // As `agentd` waits: half of it is random.
            sleep(wait / 2 + chance.millis(0, wait.as_millis() as u64 / 2)).await;
            wait = (wait * 2).min(Duration::from_secs(5));
        }
    }

    /// One stream to its end; whether orders came.
    async fn converse(&self, channel: &Channel, life: &mut Life, seen: &watch::Sender<Seen>) -> bool {
        let (reports, stream) = watch::channel(self.report(life, true));
        let opened = WorkerClient::new(channel.clone()).sync(WatchStream::new(stream)).await;
        let Ok(orders) = opened else { return false };
        let (mut orders, mut heard) = (orders.into_inner(), false);
        let mut report_at = Instant::now() + REPORT_EVERY;
        loop {
            tokio::select! {
                order = orders.message() => {
                    let Ok(Some(order)) = order else { return heard };
                    let has_changed = life.obey(&order);
                    if !heard || has_changed {
                        heard = true;
                        seen.send_modify(|seen| {
                            *seen = Seen { is_connected: true, replicas: life.runs.keys().cloned().collect() };
                        });
                        reports.send_replace(self.report(life, false));
                    }
                }
                () = sleep_until(report_at) => {
                    reports.send_replace(self.report(life, false));
                    report_at = Instant::now() + REPORT_EVERY;
                }
            }
        }
    }

    fn report(&self, life: &mut Life, whole: bool) -> v1::NodeReport {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let sent = u64::try_from(now.tv_sec * 1000 + now.tv_nsec / 1_000_000).unwrap_or(0);
        life.sent = sent.max(life.sent + 1);
        let inventory = v1::Inventory {
            hostname: self.name.clone(),
            os: "simulated".into(),
            cpus: 8,
            memory_bytes: 64 << 30,
            disk_bytes: 1 << 40,
            slots: life.slots,
            gangs: true,
            ..v1::Inventory::default()
        };
        v1::NodeReport {
            node: self.name.clone(),
            boot_id: "00000000-0000-4000-8000-000000000000".into(),
            session: self.session.clone(),
            clock_ms: clock_ms(),
            sent_ms: life.sent,
            obeyed_ms: life.answers,
            obeyed_controller_epoch: life.epoch,
            inventory: whole.then_some(inventory),
            load: Some(v1::Load { disk_free_bytes: 1 << 39, ..v1::Load::default() }),
            preemption: None,
            replicas: life.runs.values().cloned().collect(),
        }
    }
}

/// What others see of a simulated node.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// It has a stream on which orders came.
    pub is_connected: bool,
    /// The replicas that it says it runs.
    pub replicas: Vec<String>,
}

/// What a node remembers between streams.
#[derive(Debug, Default)]
struct Life {
    slots: u32,
    sent: u64,
    answers: u64,
    epoch: u64,
    runs: BTreeMap<String, v1::HeldReplica>,
}

impl Life {
    /// Runs what it is ordered to run, and nothing else; whether that changed anything.
    fn obey(&mut self, orders: &v1::NodeOrders) -> bool {
        use v1::order::Desired;
        let (epoch, before) = (self.epoch, self.runs.len());
        (self.answers, self.epoch) = (orders.answers_ms, orders.controller_epoch);
        let mut changed = epoch != self.epoch;
        for order in &orders.orders {
            match (&order.desired, self.runs.get_mut(&order.replica)) {
                (Some(Desired::Run(_)), None) => {
                    let held = v1::HeldReplica {
                        replica: order.replica.clone(),
                        step: "Running".into(),
                        started_ms: clock_ms(),
                        alive: true,
                        ..v1::HeldReplica::default()
                    };
                    self.runs.insert(order.replica.clone(), held);
                }
                (Some(Desired::Stop(_) | Desired::Forget(_)), Some(_)) => {
                    self.runs.remove(&order.replica);
                }
                _ => {}
            }
        }
        changed |= before != self.runs.len();
        changed
    }
}
