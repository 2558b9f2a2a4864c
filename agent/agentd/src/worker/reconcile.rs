//! Makes the replicas of this node match the orders of the controller.
//!
//! Owns: the `Sync` stream, and the set of runners. Hides: reconnects, repeated orders, coalesced reports.
//!
//! Invariants: orders and reports state the current state, not changes, so losing or repeating one does no harm; a
//! replica is reported from the moment its first record is written until its outcome is acknowledged and it may be
//! forgotten; a replica that the orders do not name is ended, and its directory is kept for a while.
//!
//! [`agent_model::protocol::orders`] decides what an order means for the replicas here; an order to describe a
//! replica lets it go on, and adds its spec to the reports.
//!
//! Only one task ([`Reconciler::run`]) changes state. Each runner receives a watched [`Desired`] and publishes a
//! watched [`ReplicaView`]; `changed` wakes this task. Started by `crate::roles`.

mod conversation;
mod meaning;

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::sync::{Arc, Weak};
use std::time::Duration;

use agent_model::node::{Inventory, Load};
use agent_model::protocol::grant::Given;
use agent_model::protocol::orders::{Action, Desired, OrderFence, Stamps, decide};
use agent_model::{Boot, Code, Fault, JobSpec, ReplicaId, ReplicaStep, Timestamp, causes, failpoint, ids};
use agent_proto::v1;
use agent_proto::v1::worker_client::WorkerClient;
use agent_shim::JobDir;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Channel;
use tracing::{debug, error, info, warn};

use self::conversation::Conversation;
use self::meaning::{asked, given_by, understand, wish};
use super::backoff::Backoff;
use super::environments::Wish;
use super::journal::Record;
use super::report::OutputsWanted;
use super::runner::{Orders, ReplicaView, Runner};
use super::standing::{FailedReplica, NodeStanding, StandingReplica};
use super::{Worker, late, recover};
use crate::notify::Pulse;
use crate::supervisor::{Supervisor, TaskKind};

/// A replica and the channels to its runner.
struct HeldReplica {
    desired: watch::Sender<Desired>,
    /// What the controller proves to have given.
    given: watch::Sender<Option<Given>>,
    spec: JobSpec,
    /// Since when it is here.
    since: Timestamp,
    view: watch::Receiver<ReplicaView>,
    /// Its runner ended too early: a bug, which delays this replica.
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

impl SyncError {
    /// The fault of a controller that is reachable and refuses this machine.
    fn refusal(&self) -> Option<Fault> {
        let SyncError::Ended(status) = self else { return None };
        let refused = matches!(status.code(), tonic::Code::PermissionDenied | tonic::Code::Unauthenticated);
        refused.then(|| agent_proto::fault(status))
    }

    /// The cause in a line, for people on this machine.
    fn why(&self) -> String {
        match (self.refusal(), self) {
            (Some(fault), _) => fault.to_string(),
            // The last cause says what happened; those before it say only that something did.
            (None, SyncError::Ended(status)) => match causes(status).skip(1).last() {
                None => status.message().to_owned(),
                Some(cause) => match cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind) {
                    Some(ErrorKind::UnexpectedEof) => "the connection broke".to_owned(),
                    _ => cause.to_string(),
                },
            },
            _ => self.to_string(),
        }
    }
}

/// The lease until the controller states one.
const FIRST_LEASE: Duration = Duration::from_secs(15);
/// The most bytes of the orders to a node: each job in them may have a megabyte, as its document and as its message.
const MOST_ORDERS: usize = 64 * 1024 * 1024;
/// For how long a measurement of the machine is reported.
const LOAD_KEPT: Duration = Duration::from_secs(1);
/// How often an unchanged refusal is logged.
const TOLD: Duration = Duration::from_secs(600);
/// The longest iteration of the task, whatever the controller does: it waits for no answer longer than
/// [`FIRST_LEASE`].
pub(crate) const SYNC_COMES_ROUND: Duration = Duration::from_secs(25);

/// What the task needs in addition to the runners' [`Worker`].
pub(crate) struct ControllerLink {
    pub(crate) controller: Channel,
    /// A random name of this process.
    pub(crate) session: String,
    pub(crate) inventory: watch::Receiver<Inventory>,
    /// The operators' wishes, for [`super::environments`].
    pub(crate) wishes: watch::Sender<Vec<Wish>>,
    /// What this node knows of itself, for whoever asks on this machine.
    pub(crate) standing: watch::Sender<NodeStanding>,
    pub(crate) pulse: Pulse,
}

/// The state of the task that talks to the controller and owns the runners.
pub(crate) struct Reconciler {
    worker: Arc<Worker>,
    supervisor: Supervisor,
    link: ControllerLink,
    held: BTreeMap<ReplicaId, HeldReplica>,
    /// Those that the controller does not know and wants described.
    asked: BTreeSet<ReplicaId>,
    /// Replicas whose outputs are being stored on request, each as long as its token is held.
    saving: BTreeMap<(ReplicaId, OutputsWanted), Weak<()>>,
    /// When the outputs so far of running replicas were stored last, for the attempts after them.
    kept: BTreeMap<ReplicaId, Instant>,
    order_fence: OrderFence,
    stamps: Stamps,
    /// How full the machine is, and when that was measured.
    load: Option<(Instant, Load)>,
    changed: Arc<Notify>,
}

impl Reconciler {
    /// Adopts the replicas that were `found`.
    pub(crate) fn new(
        worker: Arc<Worker>,
        supervisor: Supervisor,
        link: ControllerLink,
        found: Vec<Record>,
    ) -> Reconciler {
        let (changed, held) = (Arc::new(Notify::new()), BTreeMap::new());
        let order_fence = OrderFence::new(worker.clock.boot());
        let (asked, saving, stamps) = (BTreeSet::new(), BTreeMap::new(), Stamps::default());
        let (kept, load) = (BTreeMap::new(), None);
        let mut reconciler = Reconciler {
            worker,
            supervisor,
            link,
            held,
            asked,
            saving,
            kept,
            order_fence,
            stamps,
            load,
            changed,
        };
        for record in found {
            info!(replica = %record.replica, step = %record.step, "going on with a replica");
            let step = Some(record.step);
            reconciler.start(record, step, Desired::Run { until: None, gang: None });
        }
        reconciler
    }

    /// Keeps the stream open until `stop`, then sends a last report. Orders are obeyed until `intake` is canceled.
    pub(crate) async fn run(mut self, intake: CancellationToken, stop: CancellationToken) {
        let (mut backoff, mut told) = (Backoff::default(), None);
        while !stop.is_cancelled() {
            let Err(error) = self.converse(&mut backoff, &intake, &stop).await else { return };
            self.link.pulse.beat();
            let now = self.worker.clock.now();
            self.link.standing.send_modify(|standing| standing.broke(now, error.why()));
            let wait = backoff.next();
            let refusal = error.refusal();
            if refusal.as_ref().is_some_and(|fault| fault.code == Code::NodeRemoved) {
                self.disown_all();
            }
            match refusal {
                Some(fault)
                    if told.is_none_or(|(code, at): (Code, Instant)| {
                        code != fault.code || at.elapsed() > TOLD
                    }) =>
                {
                    told = Some((fault.code, Instant::now()));
                    warn!(%fault, jobs = self.held.len(), "the controller refuses this machine");
                }
                _ => debug!(%error, ?wait, "connecting to the controller again"),
            }
            let until = Instant::now() + wait;
            loop {
                tokio::select! {
                    // Runners may also end while there is no stream.
                    () = self.changed.notified() => self.sweep(&intake),
                    () = tokio::time::sleep_until(until) => break,
                    () = stop.cancelled() => break,
                }
            }
            self.revive(&intake);
        }
    }

    /// The machine was removed: what it still runs is lost to the controller, and may run elsewhere.
    fn disown_all(&mut self) {
        for held in self.held.values() {
            held.desired.send_if_modified(|known| {
                let differs = known.is_run();
                if differs {
                    *known = Desired::Disown;
                }
                differs
            });
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
        let mut notices = self.worker.preemptions.changes();
        loop {
            self.link.pulse.beat();
            let report_at = with.report_at();
            tokio::select! {
                orders = with.orders.message() => {
                    let orders = orders.map_err(SyncError::Ended)?.ok_or(SyncError::Closed)?;
                    with.hear(&orders);
                    backoff.reset();
                    let now = self.worker.clock.now();
                    self.link.standing.send_modify(|standing| standing.heard(now, &orders.eligibility));
                    let controller_epoch = self.order_fence.controller_epoch();
                    if !intake.is_cancelled() {
                        self.obey(orders);
                    }
                    // A restarted controller believes that a replica is missing only by a report after this.
                    with.changed |= self.order_fence.controller_epoch() != controller_epoch;
                }
                () = self.changed.notified() => {
                    self.sweep(intake);
                    with.changed = true;
                }
                Ok(()) = notices.changed() => with.changed = true,
                Ok(()) = self.link.inventory.changed() => with.owe_inventory(),
                () = tokio::time::sleep_until(report_at) => {
                    if let Some(patience) = with.silence() {
                        return Err(SyncError::Silent(patience));
                    }
                    if with.is_round_due() {
                        self.revive(intake);
                        self.keep_so_far();
                    }
                    self.tell(&mut with);
                }
                () = stop.cancelled() => break,
            }
        }
        self.tell(&mut with);
        with.end().await;
        Ok(())
    }

    async fn open(&mut self) -> Result<Conversation, SyncError> {
        self.link.pulse.beat();
        let failed = |error: std::io::Error| SyncError::Ended(Status::unavailable(error.to_string()));
        failpoint::hit("node.sync.open").map_err(failed)?;
        self.link.inventory.mark_unchanged();
        self.link.wishes.send_if_modified(|known| !std::mem::take(known).is_empty()); // may be withdrawn now
        // A report states the current state: one that is replaced before it is sent need not be sent.
        let (reports, stream) = watch::channel(self.report(true));
        let client = WorkerClient::new(self.link.controller.clone());
        let mut client = client.max_decoding_message_size(MOST_ORDERS);
        let opened = tokio::time::timeout(FIRST_LEASE, client.sync(WatchStream::new(stream))).await;
        let orders = opened.map_err(|_| SyncError::Silent(FIRST_LEASE))?.map_err(SyncError::Ended)?;
        Ok(Conversation::new(reports, orders.into_inner()))
    }

    fn tell(&mut self, with: &mut Conversation) {
        with.tell(self.report(with.owes_inventory()));
    }

    /// The report of this node and its replicas.
    fn report(&mut self, whole: bool) -> v1::NodeReport {
        let load = self.load();
        let held = self.held.iter().filter_map(|(replica, held)| {
            let wire = to_wire(replica, &held.view.borrow(), !held.dead)?;
            if !self.asked.contains(replica) {
                return Some(wire);
            }
            let (document, grant) =
                held.given.borrow().clone().map(|given| (given.document, given.grant)).unzip();
            Some(v1::HeldReplica {
                spec: Some(held.spec.clone().into()),
                document: document.unwrap_or_default(),
                grant: grant.map(Into::into),
                ..wire
            })
        });
        let obeyed = self.order_fence.obeyed();
        v1::NodeReport {
            node: self.worker.config.node_name.to_string(),
            boot_id: self.worker.boot_id.clone(),
            session: self.link.session.clone(),
            clock_ms: self.worker.clock.now().0,
            sent_ms: self.stamps.next(self.worker.clock.boot()).millis(),
            obeyed_ms: obeyed.map_or(0, |latest| latest.answers.millis()),
            obeyed_controller_epoch: self.order_fence.controller_epoch(),
            inventory: whole.then(|| self.link.inventory.borrow().clone().into()),
            load: Some(load.into()),
            replicas: held.collect(),
            preemption: self.worker.preemptions.found().map(|notice| v1::PreemptionNotice {
                until_ms: notice.until.millis(),
                reason: notice.reason,
            }),
        }
    }

    /// How full the machine is, or was a moment ago: a job is reported many times a second, and to look takes twenty
    /// system calls.
    fn load(&mut self) -> Load {
        match self.load {
            Some((at, load)) if at.elapsed() < LOAD_KEPT => load,
            _ => self.load.insert((Instant::now(), agent_node::load(&self.worker.config.state_dir))).1,
        }
    }

    fn obey(&mut self, orders: v1::NodeOrders) {
        let answers = Boot::from_millis(orders.answers_ms);
        if !self.order_fence.admits(orders.controller_epoch, answers, orders.revision) {
            debug!(orders.answers_ms, "orders that were overtaken");
            return;
        }
        let asked = asked(&orders);
        if asked != self.asked {
            self.asked = asked;
            self.changed.notify_one();
        }
        let said = orders.preemption.as_ref();
        self.worker.preemptions.ask(said.map(|said| (Boot::from_millis(said.until_ms), said.reason.clone())));
        let wishes: Vec<Wish> = orders.environments.iter().filter_map(wish).collect();
        self.link.wishes.send_if_modified(|known| {
            let differs = *known != wishes;
            *known = wishes;
            differs
        });
        let after = orders.outputs.iter().map(|replica| (replica, OutputsWanted::AfterItsEnd));
        let so_far = orders.running_outputs.iter().map(|replica| (replica, OutputsWanted::SoFar));
        for (replica, wanted) in after.chain(so_far) {
            if let Ok(replica) = replica.parse() {
                self.save(replica, wanted);
            }
        }
        for replica in orders.discard.iter().filter_map(|replica| replica.parse().ok()) {
            self.discard(replica);
        }
        let mut given = self.keep_given(&orders);
        let orders = orders.orders.into_iter().filter_map(understand).collect();
        for action in decide(orders, &self.held.keys().cloned().collect()) {
            match action {
                Action::Start(replica, spec, until, gang) => {
                    info!(%replica, "accepted replica");
                    let given = given.remove(&replica);
                    let record = Record::accepted(replica, spec, &self.worker.boot_id, random_text());
                    let record = Record { given, ..record };
                    self.start(record, None, Desired::Run { until, gang });
                }
                Action::Tell(replica, desired) => {
                    if let Some(held) = self.held.get(&replica) {
                        held.desired.send_if_modified(|known| {
                            let desired = desired.after_go(known);
                            let differs = *known != desired;
                            *known = desired;
                            differs
                        });
                    }
                }
                Action::Refuse(replica) => {
                    error!(%replica, "refused order of an attempt that a later one replaced");
                }
            }
        }
    }

    /// Passes what the orders prove on to the runners there are; returns that of other replicas.
    fn keep_given(&self, orders: &v1::NodeOrders) -> BTreeMap<ReplicaId, Given> {
        let mut given: BTreeMap<ReplicaId, Given> = orders.orders.iter().filter_map(given_by).collect();
        for (replica, held) in &self.held {
            if let Some(given) = given.remove(replica) {
                held.given.send_if_modified(|known| {
                    let differs = known.as_ref() != Some(&given);
                    if differs {
                        *known = Some(given);
                    }
                    differs
                });
            }
        }
        given
    }

    /// Removes what is kept of a replica whose job was removed.
    fn discard(&self, replica: ReplicaId) {
        if self.held.contains_key(&replica) {
            return;
        }
        let (retention, dir) = (self.worker.retention.clone(), self.worker.job_dir(&replica));
        let name = format!("results of {replica}");
        self.supervisor.spawn_infallible(
            TaskKind::Runner,
            &name,
            async move { retention.discard(&dir).await },
        );
    }

    /// Stores the outputs of a replica, unless that is in progress.
    fn save(&mut self, replica: ReplicaId, wanted: OutputsWanted) {
        self.saving.retain(|_, token| token.strong_count() > 0);
        let saving = (replica.clone(), wanted);
        if self.saving.contains_key(&saving) {
            return;
        }
        let (token, name) = (Arc::new(()), format!("outputs of {replica}"));
        self.saving.insert(saving, Arc::downgrade(&token));
        let Worker { store, outbox, disk, .. } = &*self.worker;
        let (store, outbox, disk) = (store.clone(), outbox.clone(), disk.clone());
        let keep = (self.worker.retention.clone(), self.worker.config.keep.jobs);
        let saved = late::store(store, outbox, disk, self.worker.job_dir(&replica), replica, wanted, keep);
        self.supervisor.spawn_infallible(TaskKind::Runner, &name, async move {
            saved.await;
            drop(token);
        });
    }

    /// Stores from time to time what running jobs have written, if their next attempt would go on with it.
    fn keep_so_far(&mut self) {
        let (now, every) = (Instant::now(), self.worker.config.jobs.outputs_every);
        let runs = |(replica, held): &(&ReplicaId, &HeldReplica)| {
            let running = held.view.borrow().step == Some(ReplicaStep::Running);
            running && held.spec.resume_outputs && replica.rank == 0
        };
        let running: Vec<ReplicaId> =
            self.held.iter().filter(runs).map(|(replica, _)| replica.clone()).collect();
        self.kept.retain(|replica, _| running.contains(replica));
        for replica in running {
            let last = *self.kept.entry(replica.clone()).or_insert(now);
            if now >= last + every {
                self.kept.insert(replica.clone(), now);
                self.save(replica, OutputsWanted::SoFar);
            }
        }
    }

    /// Starts the runner of a replica; `step` is reported to the controller at once.
    fn start(&mut self, record: Record, step: Option<ReplicaStep>, desired: Desired) {
        let replica = record.replica.clone();
        let spec = record.spec.clone();
        // Whether a command that was started before still runs is not known yet.
        let alive = step.is_none_or(|step| !matches!(step, ReplicaStep::Launching | ReplicaStep::Running));
        let started_at = record.started_at;
        let since = arrived(&self.worker.job_dir(&replica)).unwrap_or_else(|| self.worker.clock.now());
        let preempted = record.preempted.is_some()
            && !matches!(record.step, ReplicaStep::Launching | ReplicaStep::Running);
        let view = ReplicaView {
            step,
            detail: String::new(),
            started_at,
            alive,
            over: false,
            ready: None,
            preempted,
            outcome: record.outcome.clone(),
        };
        let (desired, wanted) = watch::channel(desired);
        let (publish, view) = watch::channel(view);
        let (given, proof) = watch::channel(record.given.clone());
        let orders = Orders { desired: wanted, given: proof };
        let runner = Runner::new(self.worker.clone(), record, orders, publish, self.changed.clone());
        let wake = WakeOnDrop(self.changed.clone());
        self.supervisor.spawn_infallible(TaskKind::Runner, &replica.to_string(), async move {
            runner.live().await;
            drop(wake);
        });
        self.held.insert(replica, HeldReplica { desired, given, spec, since, view, dead: false });
        self.publish();
    }

    /// Publishes which replicas are here.
    fn publish(&self) {
        let known = |(replica, held): (&ReplicaId, &HeldReplica)| StandingReplica {
            replica: replica.clone(),
            spec: held.spec.clone(),
            since: held.since,
            view: held.view.clone(),
        };
        let held = self.held.iter().map(known).collect();
        self.link.standing.send_modify(|standing| standing.held = held);
    }

    /// Removes replicas that are over, and marks those whose runner ended too early.
    fn sweep(&mut self, intake: &CancellationToken) {
        let over: Vec<_> = self.held.extract_if(.., |_, held| held.view.borrow().over).collect();
        if !over.is_empty() {
            self.publish();
        }
        for (replica, HeldReplica { spec, view, .. }) in over {
            let Some(outcome) = view.borrow().outcome.clone().filter(|outcome| outcome.fault.is_some())
            else {
                continue;
            };
            let failed = FailedReplica { replica, spec, outcome };
            self.link.standing.send_modify(|standing| standing.fails(failed));
        }
        for (replica, held) in &mut self.held {
            // At a stop the runners are dropped; that is no error.
            if held.view.has_changed().is_err() && !held.dead && !intake.is_cancelled() {
                error!(%replica, "lost runner of replica");
                held.dead = true;
            }
        }
    }

    /// Starts another runner for each replica whose runner ended too early.
    fn revive(&mut self, intake: &CancellationToken) {
        if intake.is_cancelled() {
            return;
        }
        let dead = self.held.iter().filter(|(_, held)| held.dead);
        let dead: Vec<_> =
            dead.map(|(replica, held)| (replica.clone(), held.desired.borrow().clone())).collect();
        for (replica, desired) in dead {
            if let Some(record) = recover::accepted(&self.worker.job_dir(&replica), &replica) {
                info!(%replica, "restarting runner of replica");
                self.start(record, Some(ReplicaStep::Accepted), desired);
            } else {
                // Without a record on disk, nothing of it exists; the order is repeated.
                self.held.remove(&replica);
                self.publish();
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

/// When the directory of a replica was made; `None` before that, and where the file system does not say.
fn arrived(dir: &JobDir) -> Option<Timestamp> {
    let made = std::fs::metadata(dir.path()).ok()?.created().ok()?;
    let since = made.duration_since(std::time::UNIX_EPOCH).ok()?;
    Some(Timestamp(u64::try_from(since.as_millis()).ok()?))
}

fn random_text() -> String {
    let mut bytes = [0; 16];
    // Without a source of randomness the tracking token is no secret; jobs still run.
    if let Err(error) = getrandom::fill(&mut bytes) {
        warn!(%error, "cannot get random numbers of the system");
    }
    ids::hex(&bytes)
}

/// A replica as it is reported to the controller; `None` before its first record is written.
fn to_wire(replica: &ReplicaId, view: &ReplicaView, has_runner: bool) -> Option<v1::HeldReplica> {
    Some(v1::HeldReplica {
        replica: replica.to_string(),
        step: view.step?.to_string(),
        detail: view.detail.clone(),
        started_ms: view.started_at.map_or(0, |at| at.0),
        alive: view.alive && has_runner,
        ready: view.ready.clone().map(Into::into),
        preempted: view.preempted,
        ..v1::HeldReplica::default()
    })
}
