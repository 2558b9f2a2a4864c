//! Makes what this node holds match the orders of the controller.
//!
//! Owns: the `Sync` stream, and the set of runners. Hides: reconnects, repeated orders, coalesced reports.
//!
//! Invariants: orders and reports are levels, so losing or repeating one does no harm; a replica is reported
//! from the moment its first record is written until its outcome is acknowledged and it may be forgotten; a
//! replica that the orders do not name is ended, and what it left is kept for a while.
//!
//! | Order | Held | Not held |
//! |---|---|---|
//! | run | go on | start |
//! | stop | stop | – |
//! | forget | clean up | – |
//! | describe | go on, report what was ordered | – |
//! | not named | stop, keep what it left | – |
//!
//! One task ([`Reconciler::run`]) mutates. Each runner is told by a watched [`Desired`] and tells by a
//! watched [`ReplicaView`]; `changed` wakes this task. Started by `crate::roles`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use agent_model::job::Limits;
use agent_model::node::Inventory;
use agent_model::{JobSpec, ReplicaId, ReplicaStep, ids};
use agent_proto::v1::worker_client::WorkerClient;
use agent_proto::{WireError, v1};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Status, Streaming};
use tracing::{debug, error, info, warn};

use super::backoff::Backoff;
use super::journal::{Journal, Record};
use super::runner::{Desired, ReplicaView, Runner};
use super::{Worker, recover};
use crate::supervisor::{Supervisor, TaskKind};

/// What an order wants done.
#[derive(Debug, Clone, PartialEq)]
enum Wanted {
    Run(Box<JobSpec>),
    Other(Desired),
    /// Not understood, so nothing is changed.
    Unclear,
}

/// What to do about a replica.
#[derive(Debug, Clone, PartialEq)]
enum Action {
    Start(ReplicaId, Box<JobSpec>),
    Tell(ReplicaId, Desired),
}

/// What has to be done so that the replicas `held` match the orders. Pure.
fn decide(orders: BTreeMap<ReplicaId, Wanted>, held: &BTreeSet<ReplicaId>) -> Vec<Action> {
    let unnamed: Vec<ReplicaId> = held.iter().filter(|id| !orders.contains_key(*id)).cloned().collect();
    let named = orders.into_iter().filter_map(|(replica, wanted)| match (wanted, held.contains(&replica)) {
        (Wanted::Run(spec), false) => Some(Action::Start(replica, spec)),
        (Wanted::Run(_), true) => Some(Action::Tell(replica, Desired::Run)),
        (Wanted::Other(desired), true) => Some(Action::Tell(replica, desired)),
        (Wanted::Other(_), false) | (Wanted::Unclear, _) => None,
    });
    named.chain(unnamed.into_iter().map(|replica| Action::Tell(replica, Desired::Disown))).collect()
}

/// A replica and the channels to its runner.
struct Held {
    desired: watch::Sender<Desired>,
    spec: Box<JobSpec>,
    view: watch::Receiver<ReplicaView>,
    /// Its runner ended without being done: a bug, which costs this replica a while.
    dead: bool,
}

/// Why a conversation ended.
#[derive(Debug, thiserror::Error)]
enum SyncError {
    #[error("the controller ended the conversation: {0}")]
    Ended(Status),
    #[error("the controller closed the conversation")]
    Closed,
    #[error("the controller said nothing for {0:?}")]
    Silent(Duration),
}

/// The lease until the controller states one.
const FIRST_LEASE: Duration = Duration::from_secs(15);

/// The task that talks to the controller and holds the runners.
pub(crate) struct Reconciler<J> {
    worker: Arc<Worker<J>>,
    supervisor: Supervisor,
    controller: Channel,
    inventory: Inventory,
    /// Random, made at each start of the daemon.
    session: String,
    held: BTreeMap<ReplicaId, Held>,
    /// Those that the controller does not know, and asks about.
    asked: BTreeSet<ReplicaId>,
    changed: Arc<Notify>,
}

/// One Sync stream.
struct Conversation {
    reports: watch::Sender<v1::NodeReport>,
    orders: Streaming<v1::NodeOrders>,
    lease: Duration,
    /// When the controller was last heard; `None` before the first time.
    heard: Option<Instant>,
    reported: Instant,
}

impl<J: Journal> Reconciler<J> {
    /// Takes up the replicas that were `found`.
    pub(crate) fn new(
        worker: Arc<Worker<J>>,
        supervisor: Supervisor,
        controller: Channel,
        inventory: Inventory,
        found: Vec<Record>,
    ) -> Reconciler<J> {
        let (session, changed, held) = (random_text(), Arc::new(Notify::new()), BTreeMap::new());
        let asked = BTreeSet::new();
        let mut reconciler =
            Reconciler { worker, supervisor, controller, inventory, session, held, asked, changed };
        for record in found {
            info!(replica = %record.replica, step = %record.step, "going on with a replica");
            let step = Some(record.step);
            reconciler.start(record, step);
        }
        reconciler
    }

    /// Keeps up the conversation until `stop`, then says a last word. Orders count until `intake` ends.
    pub(crate) async fn run(mut self, intake: CancellationToken, stop: CancellationToken) {
        let mut backoff = Backoff::default();
        while !stop.is_cancelled() {
            let Err(error) = self.converse(&mut backoff, &intake, &stop).await else { return };
            let wait = backoff.next();
            debug!(%error, ?wait, "connecting to the controller again");
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = stop.cancelled() => {}
            }
        }
    }

    /// One Sync stream, from the first report to its end.
    async fn converse(
        &mut self,
        backoff: &mut Backoff,
        intake: &CancellationToken,
        stop: &CancellationToken,
    ) -> Result<(), SyncError> {
        let mut with = self.open().await?;
        loop {
            tokio::select! {
                orders = with.orders.message() => {
                    let orders = orders.map_err(SyncError::Ended)?.ok_or(SyncError::Closed)?;
                    with.heard = Some(Instant::now());
                    with.lease = orders.lease.and_then(|lease| lease.try_into().ok()).unwrap_or(with.lease);
                    backoff.reset();
                    if !intake.is_cancelled() {
                        self.obey(orders);
                    }
                    continue;
                }
                () = self.changed.notified() => self.sweep(intake),
                () = tokio::time::sleep_until(with.reported + with.lease / 3) => self.revive(intake),
                () = stop.cancelled() => break,
            }
            if with.heard.is_some_and(|heard| heard.elapsed() > with.lease) {
                return Err(SyncError::Silent(with.lease));
            }
            self.tell(&mut with);
        }
        self.tell(&mut with);
        drop(with.reports); // ends the stream after the last word
        while let Ok(Some(_)) = with.orders.message().await {}
        Ok(())
    }

    async fn open(&self) -> Result<Conversation, SyncError> {
        // Reports are a level: one that is overtaken before it is sent need not be sent.
        let (reports, stream) = watch::channel(self.report(true));
        let mut client = WorkerClient::new(self.controller.clone());
        let opened = tokio::time::timeout(FIRST_LEASE, client.sync(WatchStream::new(stream))).await;
        let orders = opened.map_err(|_| SyncError::Silent(FIRST_LEASE))?.map_err(SyncError::Ended)?;
        let orders = orders.into_inner();
        Ok(Conversation { reports, orders, lease: FIRST_LEASE, heard: None, reported: Instant::now() })
    }

    fn tell(&self, with: &mut Conversation) {
        // Until the controller has answered, a report may overtake the first one.
        with.reports.send_replace(self.report(with.heard.is_none()));
        with.reported = Instant::now();
    }

    /// What this node is and holds.
    fn report(&self, first: bool) -> v1::NodeReport {
        let held = self.held.iter().filter_map(|(replica, held)| {
            let spec = self.asked.contains(replica).then(|| (*held.spec).clone().into());
            Some(v1::HeldReplica { spec, ..to_wire(replica, &held.view.borrow())? })
        });
        v1::NodeReport {
            node: self.worker.config.node_name.to_string(),
            boot_id: self.worker.boot_id.clone(),
            session: self.session.clone(),
            clock_ms: self.worker.clock.now().0,
            sent_ms: self.worker.clock.boot().millis(),
            inventory: first.then(|| self.inventory.clone().into()),
            load: Some(agent_node::load(&self.worker.config.state_dir).into()),
            replicas: held.collect(),
        }
    }

    fn obey(&mut self, orders: v1::NodeOrders) {
        let asked = asked(&orders);
        if asked != self.asked {
            self.asked = asked;
            self.changed.notify_one();
        }
        let orders = orders.orders.into_iter().filter_map(understand).collect();
        for action in decide(orders, &self.held.keys().cloned().collect()) {
            match action {
                Action::Start(replica, spec) => {
                    info!(%replica, "accepted");
                    let record = Record::accepted(replica, *spec, &self.worker.boot_id, random_text());
                    self.start(record, None);
                }
                Action::Tell(replica, desired) => {
                    if let Some(held) = self.held.get(&replica) {
                        held.desired.send_if_modified(|known| {
                            let differs = *known != desired;
                            *known = desired;
                            differs
                        });
                    }
                }
            }
        }
    }

    /// Starts the runner of a replica; `step` is the one the controller may be told at once.
    fn start(&mut self, record: Record, step: Option<ReplicaStep>) {
        let replica = record.replica.clone();
        let spec = Box::new(record.spec.clone());
        let view = ReplicaView { step, detail: String::new(), started_at: record.started_at, over: false };
        let (desired, wanted) = watch::channel(Desired::Run);
        let (publish, view) = watch::channel(view);
        let runner = Runner::new(self.worker.clone(), record, wanted, publish, self.changed.clone());
        let wake = WakeOnDrop(self.changed.clone());
        self.supervisor.spawn_infallible(TaskKind::Runner, &replica.to_string(), async move {
            runner.live().await;
            drop(wake);
        });
        self.held.insert(replica, Held { desired, spec, view, dead: false });
    }

    /// Lets go of replicas that are over, and notices runners that ended before.
    fn sweep(&mut self, intake: &CancellationToken) {
        self.held.retain(|_, held| !held.view.borrow().over);
        for (replica, held) in &mut self.held {
            // At a stop the runners are dropped; that is no accident.
            if held.view.has_changed().is_err() && !held.dead && !intake.is_cancelled() {
                error!(%replica, "the runner of a replica ended before its time");
                held.dead = true;
            }
        }
    }

    /// Gives replicas whose runner ended before its time another one.
    fn revive(&mut self, intake: &CancellationToken) {
        if intake.is_cancelled() {
            return;
        }
        let dead: Vec<ReplicaId> =
            self.held.iter().filter(|(_, held)| held.dead).map(|(replica, _)| replica.clone()).collect();
        for replica in dead {
            if let Some(record) = recover::accepted(&self.worker.job_dir(&replica), &replica) {
                self.start(record, Some(ReplicaStep::Accepted));
            }
        }
    }
}

/// Wakes the reconciler however a runner ends.
struct WakeOnDrop(Arc<Notify>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

fn random_text() -> String {
    let mut bytes = [0; 16];
    // A node without a source of chance has no secrets, but still a name for this life of the daemon.
    if let Err(error) = getrandom::fill(&mut bytes) {
        warn!(%error, "the system has no random numbers");
    }
    ids::hex(&bytes)
}

/// A replica as the controller is told of it; nothing before its first record is written.
fn to_wire(replica: &ReplicaId, view: &ReplicaView) -> Option<v1::HeldReplica> {
    Some(v1::HeldReplica {
        replica: replica.to_string(),
        step: view.step?.to_string(),
        detail: view.detail.clone(),
        started_ms: view.started_at.map_or(0, |at| at.0),
        alive: true,
        spec: None,
    })
}

/// The replicas that the controller wants described.
fn asked(orders: &v1::NodeOrders) -> BTreeSet<ReplicaId> {
    let describe = |order: &&v1::Order| matches!(order.desired, Some(v1::order::Desired::Describe(_)));
    orders.orders.iter().filter(describe).filter_map(|order| order.replica.parse().ok()).collect()
}

/// An order, understood; `None` when it does not even name a replica.
fn understand(order: v1::Order) -> Option<(ReplicaId, Wanted)> {
    let replica =
        order.replica.parse::<ReplicaId>().inspect_err(|error| warn!(%error, "a strange order")).ok()?;
    let wanted = wanted(order.desired).unwrap_or_else(|error| {
        error!(%replica, %error, "an order cannot be understood and is left undone");
        Wanted::Unclear
    });
    Some((replica, wanted))
}

fn wanted(desired: Option<v1::order::Desired>) -> Result<Wanted, WireError> {
    use v1::order::Desired as Wire;
    Ok(match desired.ok_or(WireError::Missing("order.desired"))? {
        Wire::Run(run) => Wanted::Run(Box::new(run.spec.ok_or(WireError::Missing("run.spec"))?.try_into()?)),
        Wire::Stop(stop) => {
            let grace = stop.grace.and_then(|grace| grace.try_into().ok()).unwrap_or(Limits::DEFAULT_GRACE);
            Wanted::Other(Desired::Stop { grace, reason: stop.reason })
        }
        Wire::Forget(_) => Wanted::Other(Desired::Forget),
        Wire::Describe(_) => Wanted::Other(Desired::Run),
    })
}

#[cfg(test)]
mod tests {
    use agent_model::JobDraft;

    use super::*;

    fn id(text: &str) -> ReplicaId {
        text.parse().unwrap()
    }

    fn spec() -> Box<JobSpec> {
        Box::new(JobDraft { command: "true".into(), ..JobDraft::default() }.validate().unwrap())
    }

    fn held(ids: &[&str]) -> BTreeSet<ReplicaId> {
        ids.iter().map(|text| id(text)).collect()
    }

    #[test]
    fn test_orders_against_reality() {
        let stop = || Desired::Stop { grace: Duration::ZERO, reason: "canceled".into() };
        let orders = [
            ("new.1.0", Wanted::Run(spec())),
            ("known.1.0", Wanted::Run(spec())),
            ("stopped.1.0", Wanted::Other(stop())),
            ("gone.1.0", Wanted::Other(stop())),
            ("done.1.0", Wanted::Other(Desired::Forget)),
            ("forgotten.1.0", Wanted::Other(Desired::Forget)),
            ("odd.1.0", Wanted::Unclear),
        ];
        let orders = orders.into_iter().map(|(text, wanted)| (id(text), wanted)).collect();
        let held = held(&["known.1.0", "stopped.1.0", "done.1.0", "odd.1.0", "orphan.1.0"]);
        let mut expected = vec![
            Action::Tell(id("done.1.0"), Desired::Forget),
            Action::Tell(id("known.1.0"), Desired::Run),
            Action::Start(id("new.1.0"), spec()),
            Action::Tell(id("stopped.1.0"), stop()),
        ];
        expected.push(Action::Tell(id("orphan.1.0"), Desired::Disown));
        assert_eq!(decide(orders, &held), expected);
    }

    #[test]
    fn test_repeated_orders_start_nothing_twice() {
        let orders: BTreeMap<_, _> = [(id("a.1.0"), Wanted::Run(spec()))].into();
        assert_eq!(decide(orders.clone(), &held(&[])).len(), 1);
        assert_eq!(decide(orders, &held(&["a.1.0"])), [Action::Tell(id("a.1.0"), Desired::Run)]);
    }

    #[test]
    fn test_later_epoch_ends_the_earlier_one() {
        let orders: BTreeMap<_, _> = [(id("a.2.0"), Wanted::Run(spec()))].into();
        let expected = [Action::Start(id("a.2.0"), spec()), Action::Tell(id("a.1.0"), Desired::Disown)];
        assert_eq!(decide(orders, &held(&["a.1.0"])), expected);
    }

    #[test]
    fn test_order_of_a_stranger_release_changes_nothing() {
        let order = v1::Order {
            replica: "a.1.0".into(),
            desired: Some(v1::order::Desired::Run(v1::RunOrder { spec: None, until_ms: 0 })),
        };
        assert_eq!(understand(order), Some((id("a.1.0"), Wanted::Unclear)));
        assert_eq!(understand(v1::Order { replica: "a".into(), desired: None }), None);
    }
}
