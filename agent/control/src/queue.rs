//! The one task that decides: it owns the [`Book`] (through its [`Publisher`]), writes the changes, and publishes
//! them.
//!
//! Owns the order of events: messages that wait together are applied together, the scheduler runs once, one
//! transaction makes everything durable, and only then answers, orders and updates for watchers are sent. A change
//! that the next report would repeat (a replica's step) is published at once and written with the next commit, or
//! within [`LAZY`]. Invariants: a submission, a placement, a cancel or an outcome is not reported before it is
//! durable; when a commit fails no change is lost, the commit is tried again, and the callers get an error.
//!
//! Channel: one bounded queue of [`Request`]s, from the handlers of `api`. Timer: to the next lease end, retry date
//! or lazy write; none when there is none of these. After a sleep of the machine it fires within [`AWAKE`].

pub(crate) mod assets;
mod book;
mod picture;
mod publisher;

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use agent_model::asset::Asset;
use agent_model::job::Change;
use agent_model::lease::Terms;
use agent_model::machine::EligibilityEvent;
use agent_model::node::CachedEnvironment;
use agent_model::sweep::Logged;
use agent_model::{Artifacts, Clock, Digest, Fault, JobId, NodeId, Outcome, ReplicaId, failpoint};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use self::assets::{AssetChange, AssetError, FoundOutputs, Register};
use crate::counts::Counts;
use crate::lease::Orders;
use crate::scheduler::{Prospect, UserLimits};
use crate::store::{Alike, Among, Document, JobRecord, Loaded, ReuseRecord, Store, StoreError};
pub(crate) use book::{
    Book, DeclaredLost, Described, Doubt, Held, Judgement, Moment, NodeState, Outlook, RemovedNode, Report,
    Retirement, Similar, Standing, Submission, Unproved, Wish, WishState, judge,
};
use picture::Showing;
pub(crate) use picture::Stall;
use publisher::Publisher;

/// How long a change that need not be durable at once may stay unwritten.
const LAZY: Duration = Duration::from_secs(1);
/// The wait before a failed commit is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// How long commits may fail on a harmed database before the controller ends.
const HARMED: Duration = Duration::from_secs(2);
/// The longest the task sleeps while a date or the end of a lease is awaited.
const AWAKE: Duration = Duration::from_secs(5);
/// Messages that may wait for the task.
const WAITING: usize = 1024;
/// The most steps that the store is asked about in a row.
const ALIKE_AT_ONCE: usize = 50;
/// The most messages that share one transaction.
const BATCH: usize = 256;

/// Why the queue gave no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AskError {
    #[error("the controller is stopping")]
    Stopping,
    #[error("the controller could not write to its database")]
    NotWritten,
    #[error("the controller could not write to its database: its disk is full")]
    DiskFull,
    #[error("the controller's database was removed or replaced, and could not be written back")]
    Moved,
    #[error("the controller could not read its database")]
    NotRead,
}

/// A job and the text that is shown about it now.
#[derive(Debug, Clone)]
pub(crate) struct JobView {
    pub(crate) job: Arc<JobRecord>,
    /// Why it waits, or what its node does for it now.
    pub(crate) detail: String,
}

impl JobView {
    fn same(&self, other: &JobView) -> bool {
        // A task that waits has no record, and so a new one at each look.
        (Arc::ptr_eq(&self.job, &other.job) || self.job == other.job) && self.detail == other.detail
    }
}

/// The orders of one node, as they change.
pub(crate) type OrdersReceiver = watch::Receiver<Arc<Orders>>;

/// The channel to a caller that waits.
struct Reply<T>(oneshot::Sender<Result<T, AskError>>);

/// An answer that is held back until everything it depends on is durable; it gets the result of the commit.
type Answer = Box<dyn FnOnce(Result<(), AskError>) + Send>;

impl<T> Reply<T> {
    fn send(self, answer: Result<T, AskError>) {
        let _ = self.0.send(answer); // the caller may be gone; that changes nothing
    }
}

impl<T: Send + 'static> Reply<T> {
    fn hold(self, result: T) -> Answer {
        Box::new(move |written| self.send(written.map(|()| result)))
    }
}

impl<T> fmt::Debug for Reply<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reply")
    }
}

/// All requests to the task. The methods of [`Queue`] describe them.
#[derive(Debug)]
enum Request {
    Submit(Submission, Reply<Result<Option<JobId>, Fault>>),
    Cancel { job: JobId, who: String, reply: Reply<Option<JobView>> },
    Hold { job: JobId, held: bool, who: String, reply: Reply<Option<JobView>> },
    Change { job: JobId, change: Change, who: String, reply: Reply<Option<Result<JobView, Fault>>> },
    Job(JobId, Reply<Option<JobView>>),
    Jobs(Reply<Vec<JobView>>),
    Showing(picture::Showing),
    ComeRound(Reply<()>),
    Nodes(Reply<Vec<NodeState>>),
    SetEligibility { node: NodeId, event: EligibilityEvent, who: String, reply: Reply<Option<NodeState>> },
    Outlook { prospects: Vec<Prospect>, reply: Reply<Outlook> },
    Retire(NodeId, Reply<Retirement>),
    Preempt { node: NodeId, said: Option<(Duration, String)>, who: String, reply: Reply<Option<NodeState>> },
    DeclareLost { node: NodeId, who: String, reply: Reply<DeclaredLost> },
    Judge { node: NodeId, replica: ReplicaId, judgement: Judgement, who: String, reply: Reply<bool> },
    Wish { wish: Wish, who: String, reply: Reply<Wished> },
    Flush(Reply<()>),
    RemoveNode { node: NodeId, lose_jobs: bool, who: String, reply: Reply<RemovedNode> },
    Write { documents: Vec<Document>, dropped: Vec<String>, reply: Reply<()> },
    AddAsset(Box<Asset>, Reply<Result<Asset, AssetError>>),
    ChangeAssets(AssetChange, Reply<Result<Vec<Asset>, AssetError>>),
    Link(Report, Reply<(u64, OrdersReceiver)>),
    Report { link: u64, report: Report, reply: Reply<bool> },
    Standing { replica: ReplicaId, node: NodeId, reply: Reply<Standing> },
    WantsLog(ReplicaId, Reply<Standing>),
    Observe { replica: ReplicaId, logged: Box<Logged>, reply: Reply<bool> },
    Settle { replica: ReplicaId, node: NodeId, outcome: Outcome, found: FoundOutputs, reply: Reply<Standing> },
    WantOutputs { wanted: WantedOutputs, reply: Reply<Option<oneshot::Receiver<Saved>>> },
    TellOutputs { wanted: WantedOutputs, saved: Saved, reply: Reply<()> },
    NoteSoFar { replica: ReplicaId, node: NodeId, artifacts: Artifacts, reply: Reply<()> },
    ReuseChecked(JobId, bool, Reply<bool>),
    OutputsStored { job: Box<JobRecord>, node: NodeId, artifacts: Artifacts, reply: Reply<()> },
    Remove { job: Box<JobRecord>, reply: Reply<bool> },
    KeptUpBy(Work, Reply<Option<String>>),
    Close { why: String, work: Option<Work>, reply: Reply<Option<String>> },
    Open(Reply<()>),
}

/// An environment as its node reported it before a wish, and the state of the wish from then on.
type Wished = (Option<CachedEnvironment>, watch::Receiver<WishState>);

/// The handle the API holds. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Queue {
    requests: mpsc::Sender<Request>,
    stall: Arc<Mutex<Option<Stall>>>,
    candidates: watch::Receiver<Vec<ReuseCandidate>>,
}

/// The task's own side, handed to [`Task::run`].
pub(crate) struct Task {
    publisher: Publisher,
    requests: mpsc::Receiver<Request>,
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    /// When unwritten levels must be written.
    flush: Option<Instant>,
    /// Set while commits fail.
    stall: Arc<Mutex<Option<Stall>>>,
    /// Since when the database takes nothing because its content was harmed.
    harmed: Option<Instant>,
    /// See [`Queue::reuse_candidates`].
    candidates: watch::Sender<Vec<ReuseCandidate>>,
    /// What is counted of commits.
    counts: Arc<Mutex<Counts>>,
}

/// A step that the same may have done before, and the snapshots that must be there for it.
pub(crate) type ReuseCandidate = (JobId, Vec<Digest>);

/// Outputs that a node is to store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WantedOutputs {
    pub(crate) replica: ReplicaId,
    pub(crate) node: NodeId,
    /// It runs: what it has written so far.
    pub(crate) running: bool,
}

/// Outputs that a node has stored.
#[derive(Debug, Clone, Default)]
pub(crate) struct StoredOutputs {
    /// `None` where there was nothing.
    pub(crate) artifacts: Option<Artifacts>,
    /// What is not among them, each path with the reason.
    pub(crate) left_out: Vec<String>,
}

/// Which jobs count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Those that have been placed on a machine.
    Placed,
    /// Those too that wait for room; not those that a user holds.
    Any,
}

/// The result of storing outputs.
type Saved = Result<StoredOutputs, Fault>;

/// The queue of a controller that starts from `loaded`; `controller_epoch` is random, and distinguishes it from
/// earlier ones.
pub(crate) fn queue(
    loaded: Loaded,
    contact: Duration,
    terms: Terms,
    limits: UserLimits,
    controller_epoch: u64,
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
) -> (Queue, Task) {
    let (sender, requests) = mpsc::channel(WAITING);
    let book = Book::new(loaded, contact, terms, controller_epoch, clock.boot()).with_limits(limits);
    let publisher = Publisher::new(book);
    let stall = Arc::default();
    let (candidates, found) = watch::channel(Vec::new());
    let queue = Queue { requests: sender, stall: Arc::clone(&stall), candidates: found };
    let counts = Arc::default();
    (queue, Task { publisher, requests, store, clock, flush: None, stall, harmed: None, candidates, counts })
}

impl Queue {
    async fn ask<T>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Result<T, AskError> {
        let (sender, receiver) = oneshot::channel();
        self.requests.send(request(Reply(sender))).await.map_err(|_| AskError::Stopping)?;
        receiver.await.map_err(|_| AskError::Stopping)?
    }

    /// Waits until the task has ended.
    pub(crate) async fn closed(&self) {
        self.requests.closed().await;
    }

    /// Puts a job in line; `None` when its name is taken, a fault when too much of its owner waits.
    pub(crate) async fn submit(&self, new: Submission) -> Result<Result<Option<JobId>, Fault>, AskError> {
        self.ask(|reply| Request::Submit(new, reply)).await
    }

    /// Asks for the end of a job; `None` when it is not active.
    pub(crate) async fn cancel(&self, id: &JobId, who: String) -> Result<Option<JobView>, AskError> {
        self.ask(|reply| Request::Cancel { job: id.clone(), who, reply }).await
    }

    /// Holds a job that waits, or releases it; `None` when it does not wait.
    pub(crate) async fn hold(
        &self,
        id: &JobId,
        held: bool,
        who: String,
    ) -> Result<Option<JobView>, AskError> {
        self.ask(|reply| Request::Hold { job: id.clone(), held, who, reply }).await
    }

    /// Changes a job; a fault when it does not take that as it stands, `None` when it has ended.
    pub(crate) async fn change(
        &self,
        id: &JobId,
        change: Change,
        who: String,
    ) -> Result<Option<Result<JobView, Fault>>, AskError> {
        self.ask(|reply| Request::Change { job: id.clone(), change, who, reply }).await
    }

    /// A job that has not ended, or ended just now.
    pub(crate) async fn job(&self, id: &JobId) -> Result<Option<JobView>, AskError> {
        self.ask(|reply| Request::Job(id.clone(), reply)).await
    }

    /// Every job that has not ended.
    pub(crate) async fn jobs(&self) -> Result<Vec<JobView>, AskError> {
        self.ask(Request::Jobs).await
    }

    /// Returns when the task of the queue has completed one more round, or has ended.
    pub(crate) async fn come_round(&self) {
        let _ = self.ask(Request::ComeRound).await;
    }

    /// Every node.
    pub(crate) async fn nodes(&self) -> Result<Vec<NodeState>, AskError> {
        self.ask(Request::Nodes).await
    }

    /// Allows new work on a node, or stops it; `None` when there is no such node. After the answer of a stop nothing
    /// more is placed there; the answer lists the jobs that were placed before.
    pub(crate) async fn set_eligibility(
        &self,
        node: &NodeId,
        event: EligibilityEvent,
        who: &str,
    ) -> Result<Option<NodeState>, AskError> {
        let (node, who) = (node.clone(), who.to_owned());
        self.ask(|reply| Request::SetEligibility { node, event, who, reply }).await
    }

    /// Takes in which machines may be expected; answers what the waiting jobs would use if they were there.
    pub(crate) async fn outlook(&self, prospects: Vec<Prospect>) -> Result<Outlook, AskError> {
        self.ask(|reply| Request::Outlook { prospects, reply }).await
    }

    /// Asks a node without jobs to retire, or how far it is. Once it was asked nothing more is placed there.
    pub(crate) async fn retire(&self, node: &NodeId) -> Result<Retirement, AskError> {
        self.ask(|reply| Request::Retire(node.clone(), reply)).await
    }

    /// Records the statement of `who` that a machine will be taken away after this time and for this reason, or with
    /// `None` that it will not; `None` when there is no such node. After the answer nothing more is placed there.
    pub(crate) async fn preempt(
        &self,
        node: &NodeId,
        said: Option<(Duration, String)>,
        who: &str,
    ) -> Result<Option<NodeState>, AskError> {
        let (node, who) = (node.clone(), who.to_owned());
        self.ask(|reply| Request::Preempt { node, said, who, reply }).await
    }

    /// Decides about a replica that is not proved; false when there is none that this can be said of.
    pub(crate) async fn judge(
        &self,
        node: &NodeId,
        replica: &ReplicaId,
        judgement: Judgement,
        who: &str,
    ) -> Result<bool, AskError> {
        let (node, replica, who) = (node.clone(), replica.clone(), who.to_owned());
        self.ask(|reply| Request::Judge { node, replica, judgement, who, reply }).await
    }

    /// Records the statement of `who` that a silent node is gone for good.
    pub(crate) async fn declare_lost(&self, node: &NodeId, who: &str) -> Result<DeclaredLost, AskError> {
        let (node, who) = (node.clone(), who.to_owned());
        self.ask(|reply| Request::DeclareLost { node, who, reply }).await
    }

    /// Makes a wish about an environment of a node. Returns the environment as reported before, and the state of the
    /// wish from now on. The wish is withdrawn when the answer is dropped.
    pub(crate) async fn wish(&self, wish: Wish, who: &str) -> Result<Wished, AskError> {
        self.ask(|reply| Request::Wish { wish, who: who.to_owned(), reply }).await
    }

    /// Has a node store outputs: returns a receiver of the result, or `None` when the node is not connected. Dropping
    /// the receiver ends the request.
    pub(crate) async fn want_outputs(
        &self,
        wanted: WantedOutputs,
    ) -> Result<Option<oneshot::Receiver<Saved>>, AskError> {
        self.ask(|reply| Request::WantOutputs { wanted, reply }).await
    }

    /// Passes the result of storing outputs to those who wait for it.
    pub(crate) async fn tell_outputs(&self, wanted: WantedOutputs, saved: Saved) -> Result<(), AskError> {
        self.ask(|reply| Request::TellOutputs { wanted, saved, reply }).await
    }

    /// Records what a running replica stored of its outputs, for the attempt after it.
    pub(crate) async fn note_so_far(
        &self,
        replica: &ReplicaId,
        node: &NodeId,
        artifacts: Artifacts,
    ) -> Result<(), AskError> {
        let (replica, node) = (replica.clone(), node.clone());
        self.ask(|reply| Request::NoteSoFar { replica, node, artifacts, reply }).await
    }

    /// Records that the outputs of a job that ended have been stored.
    pub(crate) async fn outputs_stored(
        &self,
        job: JobRecord,
        node: NodeId,
        artifacts: Artifacts,
    ) -> Result<(), AskError> {
        self.ask(|reply| Request::OutputsStored { job: Box::new(job), node, artifacts, reply }).await
    }

    /// Marks a job that ended as removed; false when it, or another job of its name, has not ended.
    pub(crate) async fn remove(&self, job: JobRecord) -> Result<bool, AskError> {
        self.ask(|reply| Request::Remove { job: Box::new(job), reply }).await
    }

    /// What keeps the machine up; `None` when nothing does.
    pub(crate) async fn kept_up_by(&self, work: Work) -> Result<Option<String>, AskError> {
        self.ask(|reply| Request::KeptUpBy(work, reply)).await
    }

    /// Places nothing after the answer, for this reason, unless `work` keeps the machine up: then that is returned.
    pub(crate) async fn close(&self, why: &str, work: Option<Work>) -> Result<Option<String>, AskError> {
        self.ask(|reply| Request::Close { why: why.to_owned(), work, reply }).await
    }

    /// Places again what can be placed.
    pub(crate) async fn open(&self) -> Result<(), AskError> {
        self.ask(Request::Open).await
    }

    /// Writes all unwritten changes, so that the store has everything that was published so far.
    pub(crate) async fn flush(&self) -> Result<(), AskError> {
        self.ask(Request::Flush).await
    }

    /// Removes a node, and ends its stream. If it has jobs it is not removed, unless `lose_jobs`: then they count as
    /// lost.
    pub(crate) async fn remove_node(
        &self,
        node: &NodeId,
        lose_jobs: bool,
        who: &str,
    ) -> Result<RemovedNode, AskError> {
        let (node, who) = (node.clone(), who.to_owned());
        self.ask(|reply| Request::RemoveNode { node, lose_jobs, who, reply }).await
    }

    /// Writes documents that the queue itself knows nothing of, and removes others.
    pub(crate) async fn write(&self, documents: Vec<Document>, dropped: Vec<String>) -> Result<(), AskError> {
        self.ask(|reply| Request::Write { documents, dropped, reply }).await
    }

    /// Gives a name to data.
    pub(crate) async fn add_asset(&self, asset: Asset) -> Result<Result<Asset, AssetError>, AskError> {
        self.ask(|reply| Request::AddAsset(Box::new(asset), reply)).await
    }

    /// Changes names of data; returns those that were meant.
    pub(crate) async fn change_assets(
        &self,
        change: AssetChange,
    ) -> Result<Result<Vec<Asset>, AssetError>, AskError> {
        self.ask(|reply| Request::ChangeAssets(change, reply)).await
    }

    /// The first report of a stream: from now on only this stream's reports count for the node.
    pub(crate) async fn link(&self, report: Report) -> Result<(u64, OrdersReceiver), AskError> {
        self.ask(|reply| Request::Link(report, reply)).await
    }

    /// A further report; false when the stream is not the node's present one any more.
    pub(crate) async fn report(&self, link: u64, report: Report) -> Result<bool, AskError> {
        self.ask(|reply| Request::Report { link, report, reply }).await
    }

    /// The standing of a replica.
    pub(crate) async fn standing(&self, replica: &ReplicaId, node: &NodeId) -> Result<Standing, AskError> {
        let (replica, node) = (replica.clone(), node.clone());
        self.ask(|reply| Request::Standing { replica, node, reply }).await
    }

    /// Whether logs of a replica are wanted.
    pub(crate) async fn wants_log(&self, replica: &ReplicaId) -> Result<Standing, AskError> {
        self.ask(|reply| Request::WantsLog(replica.clone(), reply)).await
    }

    /// The steps that the same may have done before, as they change. Of each it is to be looked at whether all that is
    /// there still, and told by [`Queue::reuse_checked`].
    pub(crate) fn reuse_candidates(&self) -> watch::Receiver<Vec<ReuseCandidate>> {
        self.candidates.clone()
    }

    /// Whether all that a step may take is there; returns whether it has completed by that.
    pub(crate) async fn reuse_checked(&self, step: JobId, is_whole: bool) -> Result<bool, AskError> {
        self.ask(|reply| Request::ReuseChecked(step, is_whole, reply)).await
    }

    /// Takes in what a trial of a sweep logged of its metric; false when it does not count any more.
    pub(crate) async fn observe(&self, replica: &ReplicaId, logged: Logged) -> Result<bool, AskError> {
        let (replica, logged) = (replica.clone(), Box::new(logged));
        self.ask(|reply| Request::Observe { replica, logged, reply }).await
    }

    /// Takes in the outcome of a replica, and which of its outputs get names; returns its standing before that.
    pub(crate) async fn settle(
        &self,
        replica: &ReplicaId,
        node: &NodeId,
        outcome: Outcome,
        found: FoundOutputs,
    ) -> Result<Standing, AskError> {
        let (replica, node) = (replica.clone(), node.clone());
        self.ask(|reply| Request::Settle { replica, node, outcome, found, reply }).await
    }
}

/// The newest that are like a step, as far as they decide.
async fn similar(store: &dyn Store, step: &ReuseRecord) -> Result<Similar, StoreError> {
    let newest = async |alike| Ok(store.page(Among::Alike(alike), None, 1).await?.pop());
    let same = newest(Alike::Key(&step.key)).await?;
    // What is compared with it, or else what says why there is none.
    Ok(match same {
        Some(_) => {
            let resolved = newest(Alike::Environment(&step.environment)).await?;
            Similar { same, resolved, last: None }
        }
        None => Similar { same, resolved: None, last: newest(Alike::Step(&step.step)).await? },
    })
}

/// The controller ended because its database was harmed while it was open.
#[derive(Debug, thiserror::Error)]
#[error("the controller's database was harmed while it was open; it is mended at the next start")]
pub struct HarmedDatabase;

impl Task {
    /// The names of data, for whoever reads them.
    pub(crate) fn names(&self) -> Register {
        self.publisher.book.names()
    }

    /// What it counts.
    pub(crate) fn counts(&self) -> Arc<Mutex<Counts>> {
        Arc::clone(&self.counts)
    }

    /// Works until `shutdown`, then writes all unwritten changes; or until the database is so harmed that only opening
    /// it anew helps. What was acknowledged is in its second copy then.
    pub(crate) async fn run(mut self, shutdown: impl Future<Output = ()>) -> Result<(), HarmedDatabase> {
        let mut shutdown = pin!(shutdown);
        let mut batch = Vec::new();
        loop {
            let alarm = self.alarm();
            tokio::select! {
                biased;
                () = &mut shutdown => break,
                received = self.requests.recv_many(&mut batch, BATCH) => {
                    if received == 0 {
                        break;
                    }
                }
                () = sleep_until(alarm.unwrap_or_else(Instant::now)), if alarm.is_some() => {}
            }
            self.turn(&mut batch).await;
            if self.harmed.is_some_and(|since| since.elapsed() >= HARMED) {
                return Err(HarmedDatabase);
            }
        }
        self.publisher.book.hurry();
        self.turn(&mut Vec::new()).await;
        Ok(())
    }

    /// When to apply the rules again without a message.
    ///
    /// The runtime's timers stop while the machine sleeps, leases do not: so while anything is awaited the task wakes
    /// up often.
    fn alarm(&self) -> Option<Instant> {
        let now = self.now();
        let rule = self.publisher.book.next_alarm(now);
        let rule = rule.map(|at| Instant::now() + at.since(now.boot).min(AWAKE));
        rule.into_iter().chain(self.flush).min()
    }

    async fn turn(&mut self, batch: &mut Vec<Request>) {
        let now = self.now();
        let (mut answers, mut looks): (Vec<Answer>, Vec<Showing>) = (Vec::new(), Vec::new());
        for request in batch.drain(..) {
            match request {
                Request::Showing(look) => looks.push(look),
                request => answers.push(self.publisher.handle(request, now)),
            }
        }
        self.look_up_strangers().await;
        self.look_up_kept().await;
        self.look_up_alike(now).await;
        self.publisher.settle_rules(now);
        self.tell_candidates();
        let due = self.flush.is_some_and(|at| at <= Instant::now());
        let heard = if self.publisher.book.is_urgent() || due || self.store.is_moved() {
            self.commit().await
        } else {
            if self.flush.is_none() && self.publisher.book.is_dirty() {
                self.flush = Some(Instant::now() + LAZY);
            }
            self.publisher.publish();
            Ok(())
        };
        for answer in answers {
            answer(heard);
        }
        for look in looks {
            match heard {
                Ok(()) => self.show(look),
                Err(_) => self.show_durable(look).await,
            }
        }
    }

    /// Asks the store about replicas that nodes hold and that no active job has, and about jobs that others wait for.
    async fn look_up_strangers(&mut self) {
        for replica in self.publisher.book.unresolved() {
            match self.store.job(&replica.job).await {
                Ok(job) => self.publisher.book.resolve(&replica, job.as_ref()),
                Err(error) => {
                    tracing::error!(%replica, error = &error as &dyn std::error::Error, "cannot read job of replica: looking again soon");
                }
            }
        }
        for id in self.publisher.book.unknown_predecessors() {
            match self.store.job(&id).await {
                Ok(job) => self.publisher.book.resolve_predecessor(&id, job.as_ref()),
                Err(error) => {
                    tracing::error!(job = %id, error = &error as &dyn std::error::Error, "cannot read job that others wait for: looking again soon");
                }
            }
        }
    }

    /// Asks the store about jobs of which nodes keep results.
    async fn look_up_kept(&mut self) {
        for id in self.publisher.book.unknown_kept() {
            match self.store.job(&id).await {
                Ok(job) => self.publisher.book.resolve_kept(&id, job.as_ref()),
                Err(error) => {
                    tracing::error!(job = %id, error = &error as &dyn std::error::Error, "cannot read job of kept results: looking again soon");
                }
            }
        }
    }

    /// Asks the store for steps like those whose turn has come.
    async fn look_up_alike(&mut self, now: Moment) {
        for (step, record) in self.publisher.book.reuse_questions().into_iter().take(ALIKE_AT_ONCE) {
            let found = match similar(&*self.store, &record).await {
                Ok(similar) => judge(&record, similar),
                Err(error) => {
                    tracing::error!(%step, error = &error as &dyn std::error::Error, "cannot read jobs like step: running it");
                    Err("what ran before cannot be read".to_owned())
                }
            };
            self.publisher.book.resolve_reuse(&step, found, now);
        }
    }

    fn tell_candidates(&self) {
        let now = self.publisher.book.reuse_candidates();
        self.candidates.send_if_modified(|told| {
            let changed = *told != now;
            *told = now;
            changed
        });
    }

    async fn commit(&mut self) -> Result<(), AskError> {
        let (changes, begun) = (self.publisher.book.changes(), Instant::now());
        let written = match failpoint::hit("control.commit") {
            Ok(()) => self.store.commit(&changes).await,
            Err(error) => Err(StoreError::not_tried(&changes, error)),
        };
        if let Err(error) = written {
            tracing::error!(error = &error as &dyn std::error::Error, "cannot commit: trying again soon");
            self.counts.lock().failed();
            self.flush = Some(Instant::now() + AGAIN);
            self.harmed = error.is_harm().then(|| self.harmed.unwrap_or_else(Instant::now));
            let why = match error {
                StoreError::Moved { .. } => AskError::Moved,
                _ if error.is_full() => AskError::DiskFull,
                _ => AskError::NotWritten,
            };
            let since = self.clock.now();
            let mut stall = self.stall.lock();
            *stall = Some(Stall { since: stall.map_or(since, |stall| stall.since), why });
            return Err(why);
        }
        self.counts.lock().committed(&changes, begun.elapsed());
        (self.flush, *self.stall.lock()) = (None, None);
        (self.flush, self.harmed, *self.stall.lock()) = (None, None, None);
        self.publisher.book.show_names(); // whoever sees that a job ended sees its outputs' names
        self.publisher.publish(); // watchers see how a job ended before it leaves the book
        self.publisher.book.retire();
        Ok(())
    }

    fn now(&self) -> Moment {
        Moment { wall: self.clock.now(), boot: self.clock.boot() }
    }
}

#[cfg(test)]
mod tests;
