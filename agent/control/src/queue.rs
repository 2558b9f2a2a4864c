//! The one task that decides: it owns the [`Book`], writes what follows, and tells everybody.
//!
//! Owns the order of events: messages that wait together are applied together, the scheduler runs once, one
//! transaction makes everything durable, and only then are answers, orders and watchers served. A message
//! that is only a level (a replica's step) is shown at once and written with the next commit, or within
//! [`LAZY`]. Invariants: nobody hears of a submission, a placement, a cancel or an outcome that a power cut
//! could take back; when a commit fails nothing is forgotten, the commit is tried again, and whoever asked
//! is told that it failed.
//!
//! Channel: one bounded queue of [`Ask`]s, from the handlers of `api`. Timer: to the next lease end, retry
//! date or lazy write; none when there is none of these. A machine that slept is noticed within [`AWAKE`].

mod book;

use std::collections::{BTreeMap, HashMap};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use agent_model::lease::Terms;
use agent_model::machine::EligibilityEvent;
use agent_model::node::CachedEnvironment;
use agent_model::{Artifacts, Clock, Fault, JobId, NodeId, Outcome, ReplicaId, failpoint};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use crate::lease::Orders;
use crate::store::{JobRecord, Loaded, Store};
pub(crate) use book::{
    Book, DeclaredLost, Held, Moment, NodeState, Report, Standing, Submission, Wish, WishState,
};

/// How long a level may stay unwritten.
const LAZY: Duration = Duration::from_secs(1);
/// The wait before a failed commit is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// The longest the task sleeps while a date or the end of a lease is awaited.
const AWAKE: Duration = Duration::from_secs(5);
/// Messages that may wait for the task.
const WAITING: usize = 1024;
/// Messages that share one transaction at most.
const BATCH: usize = 256;

/// Why the queue gave no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AskError {
    #[error("the controller is stopping")]
    Stopping,
    #[error("the controller could not write to its database")]
    NotWritten,
}

/// A job and what to say about it now.
#[derive(Debug, Clone)]
pub(crate) struct JobView {
    pub(crate) job: Arc<JobRecord>,
    /// Why it waits, or what its node does for it now.
    pub(crate) detail: String,
}

impl JobView {
    fn same(&self, other: &JobView) -> bool {
        Arc::ptr_eq(&self.job, &other.job) && self.detail == other.detail
    }
}

/// The orders of one node, as they change.
pub(crate) type OrdersReceiver = watch::Receiver<Arc<Orders>>;

/// A message: changes or reads the desk, and leaves behind how to answer once that is durable.
type Ask = Box<dyn FnOnce(&mut Desk, Moment) -> Answer + Send>;
type Answer = Box<dyn FnOnce(bool) + Send>;

/// The handle the API holds. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Queue {
    asks: mpsc::Sender<Ask>,
}

/// The task's own side, handed to [`Task::run`].
pub(crate) struct Task<S> {
    desk: Desk,
    asks: mpsc::Receiver<Ask>,
    store: Arc<S>,
    clock: Arc<dyn Clock>,
    /// When unwritten levels must be written.
    flush: Option<Instant>,
}

/// Everything a message may touch.
struct Desk {
    book: Book,
    watchers: HashMap<JobId, watch::Sender<JobView>>,
    links: BTreeMap<NodeId, Link>,
    last_link: u64,
    /// Those who wait until something became of an environment.
    wishers: Vec<(Wish, watch::Sender<WishState>)>,
    /// Those who wait until a node has stored the outputs of a replica that is over.
    savers: Vec<Saver>,
}

/// What came of storing outputs: nothing for a job that left nothing.
type Saved = Result<Option<Artifacts>, Fault>;

/// Somebody who waits for outputs.
struct Saver {
    replica: ReplicaId,
    node: NodeId,
    told: oneshot::Sender<Saved>,
}

/// One open Sync stream.
struct Link {
    id: u64,
    orders: watch::Sender<Arc<Orders>>,
    /// A report came that was not answered yet.
    owed: bool,
}

/// The queue of a controller that starts from `loaded`; `life` is random, and tells it from those before.
pub(crate) fn queue<S: Store>(
    loaded: Loaded,
    contact: Duration,
    terms: Terms,
    life: u64,
    store: Arc<S>,
    clock: Arc<dyn Clock>,
) -> (Queue, Task<S>) {
    let (sender, asks) = mpsc::channel(WAITING);
    let book = Book::new(loaded, contact, terms, life, clock.boot());
    let desk = Desk {
        book,
        watchers: HashMap::new(),
        links: BTreeMap::new(),
        last_link: 0,
        wishers: Vec::new(),
        savers: Vec::new(),
    };
    (Queue { asks: sender }, Task { desk, asks, store, clock, flush: None })
}

impl Queue {
    async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Desk, Moment) -> T + Send + 'static,
    ) -> Result<T, AskError> {
        let (sender, receiver) = oneshot::channel();
        let ask: Ask = Box::new(move |desk, now| {
            let result = work(desk, now);
            Box::new(move |written| {
                // Whoever asked may have gone; that changes nothing.
                let _ = sender.send(if written { Ok(result) } else { Err(AskError::NotWritten) });
            })
        });
        self.asks.send(ask).await.map_err(|_| AskError::Stopping)?;
        receiver.await.map_err(|_| AskError::Stopping)?
    }

    /// Waits until the task has ended.
    pub(crate) async fn closed(&self) {
        self.asks.closed().await;
    }

    /// Puts a job in line; `None` when its name is taken.
    pub(crate) async fn submit(&self, new: Submission) -> Result<Option<JobId>, AskError> {
        self.ask(move |desk, now| desk.book.submit(new, now)).await
    }

    /// Asks for the end of a job; `None` when it is not active.
    pub(crate) async fn cancel(&self, id: &JobId, who: String) -> Result<Option<JobView>, AskError> {
        let id = id.clone();
        self.ask(move |desk, now| {
            desk.book.cancel(&id, &who, now)?;
            desk.view(&id)
        })
        .await
    }

    /// A job that has not ended, or ended just now.
    pub(crate) async fn job(&self, id: &JobId) -> Result<Option<JobView>, AskError> {
        let id = id.clone();
        self.ask(move |desk, _| desk.view(&id)).await
    }

    /// Every job that has not ended.
    pub(crate) async fn jobs(&self) -> Result<Vec<JobView>, AskError> {
        self.ask(|desk, _| desk.book.jobs().map(|job| desk.show(job)).collect()).await
    }

    /// A job that has not ended, as it changes; its last value is the terminal one.
    pub(crate) async fn watch(&self, id: &JobId) -> Result<Option<watch::Receiver<JobView>>, AskError> {
        let id = id.clone();
        self.ask(move |desk, _| desk.watch(&id)).await
    }

    /// Returns when the task of the queue has come round once more, or has ended.
    pub(crate) async fn come_round(&self) {
        let _ = self.ask(|_, _| ()).await;
    }

    /// Every node.
    pub(crate) async fn nodes(&self) -> Result<Vec<NodeState>, AskError> {
        self.ask(|desk, _| desk.book.nodes().cloned().collect()).await
    }

    /// Lets new work onto a node, or keeps it off; `None` when there is no such node. Once this is answered
    /// nothing is placed there that was not before; the answer names what was.
    pub(crate) async fn set_eligibility(
        &self,
        node: &NodeId,
        event: EligibilityEvent,
        who: &str,
    ) -> Result<Option<NodeState>, AskError> {
        let (id, who) = (node.clone(), who.to_owned());
        self.ask(move |desk, _| {
            let node = desk.book.set_eligibility(&id, event)?.clone();
            tracing::info!(node = %id, who, eligibility = ?node.record.eligibility, "asked");
            Some(node)
        })
        .await
    }

    /// Takes the word of `who` that a silent node is gone for good.
    pub(crate) async fn declare_lost(&self, node: &NodeId, who: &str) -> Result<DeclaredLost, AskError> {
        let (id, who) = (node.clone(), who.to_owned());
        self.ask(move |desk, now| {
            let answer = desk.book.declare_lost(&id, &who, now);
            tracing::warn!(node = %id, who, ?answer, "asked to declare the node lost");
            answer
        })
        .await
    }

    /// Wishes something of an environment of a node: as the node showed it before, and how the wish stands from now
    /// on. It is withdrawn when nobody holds the answer any more.
    pub(crate) async fn wish(
        &self,
        wish: Wish,
        who: &str,
    ) -> Result<(Option<CachedEnvironment>, watch::Receiver<WishState>), AskError> {
        let who = who.to_owned();
        self.ask(move |desk, _| {
            let Wish { node, key, want } = &wish;
            let before = desk.book.environment(node, key).cloned();
            let state = desk.book.wish(&wish);
            tracing::info!(%node, key, who, want = want.name(), ?state, "asked of an environment");
            let (sender, receiver) = watch::channel(state);
            desk.wishers.push((wish, sender));
            (before, receiver)
        })
        .await
    }

    /// Wants the outputs of a replica stored that is over: what its node says of it, `None` when it is not connected.
    /// It is wanted no longer than somebody holds the answer.
    pub(crate) async fn want_outputs(
        &self,
        replica: ReplicaId,
        node: NodeId,
    ) -> Result<Option<oneshot::Receiver<Saved>>, AskError> {
        self.ask(move |desk, _| {
            desk.links.get(&node).filter(|link| !link.orders.is_closed())?;
            let (told, receiver) = oneshot::channel();
            desk.savers.push(Saver { replica, node, told });
            Some(receiver)
        })
        .await
    }

    /// Tells whoever waits for the outputs of a replica what came of it.
    pub(crate) async fn tell_outputs(&self, replica: ReplicaId, saved: Saved) -> Result<(), AskError> {
        self.ask(move |desk, _| {
            for saver in desk.savers.extract_if(.., |saver| saver.replica == replica) {
                let _ = saver.told.send(saved.clone()); // whoever waited may have gone
            }
        })
        .await
    }

    /// Takes in that the outputs of a job that ended are stored by now.
    pub(crate) async fn outputs_stored(
        &self,
        job: JobRecord,
        node: NodeId,
        artifacts: Artifacts,
    ) -> Result<(), AskError> {
        self.ask(move |desk, now| desk.book.stored_later(job, &node, artifacts, now)).await
    }

    /// Writes what is not written yet, so that the store has everything that was said so far.
    pub(crate) async fn flush(&self) -> Result<(), AskError> {
        self.ask(|desk, _| desk.book.hurry()).await
    }

    /// The first report of a stream: from now on this stream speaks for the node.
    pub(crate) async fn link(&self, report: Report) -> Result<(u64, OrdersReceiver), AskError> {
        self.ask(move |desk, now| desk.link(&report, now)).await
    }

    /// A further report; false when another stream speaks for the node by now.
    pub(crate) async fn report(&self, link: u64, report: Report) -> Result<bool, AskError> {
        self.ask(move |desk, now| desk.report(link, &report, now)).await
    }

    /// How a replica stands.
    pub(crate) async fn standing(&self, replica: &ReplicaId, node: &NodeId) -> Result<Standing, AskError> {
        let (replica, node) = (replica.clone(), node.clone());
        self.ask(move |desk, _| desk.book.standing(&replica, &node)).await
    }

    /// Whether logs of a replica are wanted.
    pub(crate) async fn wants_log(&self, replica: &ReplicaId) -> Result<Standing, AskError> {
        let replica = replica.clone();
        self.ask(move |desk, _| desk.book.wants_log(&replica)).await
    }

    /// Takes in what came of a replica; the answer is how it stood before.
    pub(crate) async fn settle(
        &self,
        replica: &ReplicaId,
        node: &NodeId,
        outcome: Outcome,
    ) -> Result<Standing, AskError> {
        let (replica, node) = (replica.clone(), node.clone());
        self.ask(move |desk, now| desk.book.settle(&replica, &node, outcome, now)).await
    }
}

impl Desk {
    fn show(&self, job: &Arc<JobRecord>) -> JobView {
        JobView { job: Arc::clone(job), detail: self.book.detail(job) }
    }

    fn view(&self, id: &JobId) -> Option<JobView> {
        self.book.job(id).map(|job| self.show(job))
    }

    fn watch(&mut self, id: &JobId) -> Option<watch::Receiver<JobView>> {
        let view = self.view(id)?;
        if view.job.state.is_terminal() {
            return Some(watch::channel(view).1);
        }
        Some(self.watchers.entry(id.clone()).or_insert_with(|| watch::channel(view).0).subscribe())
    }

    fn link(&mut self, report: &Report, now: Moment) -> (u64, OrdersReceiver) {
        self.last_link += 1;
        let (orders, receiver) = watch::channel(Arc::default());
        self.links.insert(report.node.clone(), Link { id: self.last_link, orders, owed: true });
        self.book.report(report, now);
        (self.last_link, receiver)
    }

    fn report(&mut self, id: u64, report: &Report, now: Moment) -> bool {
        let Some(link) = self.links.get_mut(&report.node).filter(|link| link.id == id) else { return false };
        link.owed = true;
        self.book.report(report, now);
        true
    }

    /// Rules that need no message, then the scheduler.
    fn settle_rules(&mut self, now: Moment) {
        self.book.expire(now);
        self.links.retain(|_, link| !link.orders.is_closed());
        let links = &self.links;
        self.book.link(|node| links.contains_key(node));
        self.book.schedule(now);
    }

    /// Tells those who wait for an environment how their wishes stand; a wish nobody waits for is forgotten.
    fn attend_wishers(&mut self) {
        let book = &mut self.book;
        self.wishers.retain(|(wish, told)| {
            let state = book.wish_state(wish, false);
            let open = matches!(state, WishState::Open { .. }) && told.receiver_count() > 0;
            told.send_if_modified(|known| {
                let settled = !matches!(known, WishState::Open { .. });
                let changed = !settled && *known != state;
                if changed {
                    *known = state;
                }
                changed
            });
            if !open {
                book.unwish(wish);
            }
            open
        });
    }

    /// Tells watchers and nodes what changed.
    fn publish(&mut self) {
        self.attend_wishers();
        let book = &self.book;
        self.watchers.retain(|id, watcher| {
            let Some(job) = book.job(id) else { return false };
            let view = JobView { job: Arc::clone(job), detail: book.detail(job) };
            let over = view.job.state.is_terminal();
            watcher.send_if_modified(|shown| {
                let changed = !shown.same(&view);
                *shown = view;
                changed
            });
            !over && watcher.receiver_count() > 0
        });
        self.savers.retain(|saver| !saver.told.is_closed());
        for (node, link) in &mut self.links {
            let mut orders = book.orders(node);
            let wanted = self.savers.iter().filter(|saver| saver.node == *node);
            orders.outputs = wanted.map(|saver| saver.replica.clone()).collect();
            let owed = std::mem::take(&mut link.owed);
            let revision = link.orders.borrow().revision;
            let same = {
                let told = link.orders.borrow();
                told.list == orders.list
                    && told.environments == orders.environments
                    && told.outputs == orders.outputs
            };
            if owed || !same {
                link.orders.send_replace(Arc::new(Orders { revision: revision + 1, ..orders }));
            }
        }
    }
}

impl<S: Store> Task<S> {
    /// Works until `shutdown`, then writes what is left.
    pub(crate) async fn run(mut self, shutdown: impl Future<Output = ()>) {
        let mut shutdown = pin!(shutdown);
        let mut batch = Vec::new();
        loop {
            let alarm = self.alarm();
            tokio::select! {
                biased;
                () = &mut shutdown => break,
                received = self.asks.recv_many(&mut batch, BATCH) => {
                    if received == 0 {
                        break;
                    }
                }
                () = sleep_until(alarm.unwrap_or_else(Instant::now)), if alarm.is_some() => {}
            }
            self.turn(&mut batch).await;
        }
        self.desk.book.hurry();
        self.turn(&mut Vec::new()).await;
    }

    /// When to look again without a message.
    ///
    /// The runtime's timers stand still while the machine sleeps, leases do not: so while anything is
    /// awaited the task looks again soon.
    fn alarm(&self) -> Option<Instant> {
        let now = self.now();
        let rule = self.desk.book.next_alarm(now);
        let rule = rule.map(|at| Instant::now() + at.since(now.boot).min(AWAKE));
        rule.into_iter().chain(self.flush).min()
    }

    async fn turn(&mut self, batch: &mut Vec<Ask>) {
        let now = self.now();
        let answers: Vec<Answer> = batch.drain(..).map(|ask| ask(&mut self.desk, now)).collect();
        self.look_up_strangers().await;
        self.desk.settle_rules(now);
        let due = self.flush.is_some_and(|at| at <= Instant::now());
        let heard = if self.desk.book.is_urgent() || due {
            self.commit().await
        } else {
            if self.flush.is_none() && self.desk.book.is_dirty() {
                self.flush = Some(Instant::now() + LAZY);
            }
            self.desk.publish();
            true
        };
        for answer in answers {
            answer(heard);
        }
    }

    /// Asks the store about replicas that nodes hold and that no active job has.
    async fn look_up_strangers(&mut self) {
        for replica in self.desk.book.unresolved() {
            match self.store.job(&replica.job).await {
                Ok(job) => self.desk.book.resolve(&replica, job.as_ref()),
                Err(error) => {
                    tracing::error!(%replica, error = &error as &dyn std::error::Error, "will look again");
                }
            }
        }
    }

    async fn commit(&mut self) -> bool {
        let changes = self.desk.book.changes();
        if let Err(error) = failpoint::hit("control.commit") {
            tracing::error!(%error, "will try again");
            self.flush = Some(Instant::now() + AGAIN);
            return false;
        }
        match self.store.commit(&changes).await {
            Ok(()) => {
                self.flush = None;
                self.desk.publish(); // watchers see how a job ended before it leaves the book
                self.desk.book.retire();
                true
            }
            Err(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "will try again");
                self.flush = Some(Instant::now() + AGAIN);
                false
            }
        }
    }

    fn now(&self) -> Moment {
        Moment { wall: self.clock.now(), boot: self.clock.boot() }
    }
}

#[cfg(test)]
mod tests;
