//! Drives one replica through its steps; [`Runner::live`] is the whole sequence.
//!
//! ```text
//! Accepted ─▶ Fetching ─▶ Building ─▶ Launching ─▶ Running ─▶ Releasing ─▶ Uploading ─▶ Reported
//!    └────────────┴────────────┴── failed or stopped ─────────────────────────▲
//! ```
//!
//! Owns: the replica's journal record and its directory, except for what the shim writes. Hides: what is
//! retried, what a stop means in each step.
//!
//! Invariants: the record of a step is written before its work begins; the future may be dropped at any
//! point (the daemon stops or is killed) and another one goes on from the record; after a stop that arrives before
//! the start, the command is never started; how the command ended is decided once, and its logs and outputs are
//! stored in any case; once a notice that the machine will be taken away is in the record, the replica ends because of
//! it, also if it is withdrawn; a job that may be replaced is never started, and never goes on, after its lease, which a
//! restart of the daemon does not extend.
//!
//! Channels: [`Desired`] in, [`ReplicaView`] out, both as watch channels, which hold the latest value. Spawned by
//! `worker::reconcile`.

mod follow;
mod gang;
mod launch;
mod measure;
mod notice;
mod prepare;
mod send;
mod settle;
mod shipping;
mod supply;
mod wait;

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::ops::ControlFlow::{Break, Continue};
use std::sync::Arc;
use std::time::Duration;

use agent_model::machine::ReplicaEvent;
use agent_model::protocol::gang::Ready;
use agent_model::protocol::grant::Given;
use agent_model::protocol::orders::Desired;
use agent_model::{Fault, JobSpec, Outcome, Preemption, ReplicaStep, Timestamp};
use agent_shim::{ExitRecord, JobDir};
use tokio::sync::{Notify, watch};
use tracing::error;

use self::follow::{Silence, Stop};
use self::shipping::Shipping;
use self::wait::Tries;
use super::faults::Ending;
use super::journal::{JournalError, Record};
use super::prestaged_trees::Wish;
use super::tracking::{Registration, TrackedRun};
use super::{Worker, containers};

/// A replica as the node reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReplicaView {
    /// Its step; `None` until its first record is written.
    pub(crate) step: Option<ReplicaStep>,
    /// What the step is doing, as text for users.
    pub(crate) detail: String,
    /// When the command was started.
    pub(crate) started_at: Option<Timestamp>,
    /// There is evidence that it runs: this node works on it itself, or its shim answers.
    pub(crate) alive: bool,
    /// The controller has the outcome and nothing of the replica is left to do.
    pub(crate) over: bool,
    /// Set for a rank of a gang from the moment it could start.
    pub(crate) ready: Option<Ready>,
    /// It ends because the machine will be taken away, and nothing changes that any more.
    pub(crate) preempted: bool,
    /// What came of it, from when that is certain.
    pub(crate) outcome: Option<Outcome>,
}

/// What the controller says about a replica, as it changes.
pub(crate) struct Orders {
    pub(crate) desired: watch::Receiver<Desired>,
    /// What it proves to have given.
    pub(crate) given: watch::Receiver<Option<Given>>,
}

/// Why the command does not run any more, or never will.
enum End {
    /// Its supervisor wrote an exit record.
    Exited(Box<ExitRecord>),
    /// The daemon ended it, because its supervisor did not answer.
    EndedHere(Ending),
    /// A stop arrived before it was started.
    Stopped,
    /// The machine will be taken away; the command was not started.
    Preempted(Preemption),
    /// Something failed before it was started, or it was lost.
    Failed(Fault),
    /// An earlier process of the daemon has already decided how it ended.
    Settled(Ending),
}

/// The result of a step: the replica goes on with its value, or its command has ended.
type Step<T> = ControlFlow<End, T>;

/// Turns a fault into an end.
fn or_end<T>(done: Result<T, Fault>) -> Step<T> {
    match done {
        Ok(done) => Continue(done),
        Err(fault) => Break(End::Failed(fault)),
    }
}

/// Drives one replica.
pub(crate) struct Runner {
    worker: Arc<Worker>,
    record: Record,
    dir: JobDir,
    desired: watch::Receiver<Desired>,
    given: watch::Receiver<Option<Given>>,
    view: watch::Sender<ReplicaView>,
    changed: Arc<Notify>,
    shipping: Shipping,
    /// The tracking endpoint serves the replica while this is held: from before the command can call it until it has
    /// ended.
    tracked: Option<Registration>,
    /// How often the controller found the outcome incomplete.
    refusals: u32,
    /// The stop that the shim has acknowledged.
    told_to_stop: Option<Stop>,
    /// The stop because of a notice, once the command was to be told of it.
    notice_stop: Option<Stop>,
    /// Since when the shim does not answer, or is to end the job, and what was done about it.
    silence: Silence,
    /// The time limit that its supervisor has; not known of a command that an earlier process of the daemon started.
    limit_told: Option<Duration>,
    /// What is wrong with the GPUs of the command, as it was last reported.
    trouble: Vec<String>,
    /// The trees that were laid out for it.
    laid: Vec<Wish>,
    /// What a rank of a gang reports when it could start.
    ready: Option<Ready>,
}

impl Runner {
    /// The runner of a replica that was just accepted or found in the journal. `changed` is notified after
    /// each change of `view`.
    pub(crate) fn new(
        worker: Arc<Worker>,
        record: Record,
        orders: Orders,
        view: watch::Sender<ReplicaView>,
        changed: Arc<Notify>,
    ) -> Runner {
        let dir = worker.job_dir(&record.replica);
        let shipping = Shipping::new(&worker.telemetry, &record.replica, &dir);
        let tracked = worker.tracking.register(TrackedRun {
            replica: record.replica.clone(),
            run_id: record.replica.job.to_string(),
            token: record.token.clone(),
            experiment: record.spec.experiment.clone(),
            tracking_file: dir.tracking(),
            tracking_stream: dir.tracking_stream(),
            artifacts: dir.artifacts(),
        });
        Runner {
            worker,
            record,
            dir,
            desired: orders.desired,
            given: orders.given,
            view,
            changed,
            shipping,
            tracked: Some(tracked),
            refusals: 0,
            told_to_stop: None,
            notice_stop: None,
            silence: Silence::default(),
            limit_told: None,
            trouble: Vec::new(),
            laid: Vec::new(),
            ready: None,
        }
    }

    /// Runs all steps of a replica.
    pub(crate) async fn live(mut self) {
        let Break(end) = self.work().await;
        let ending = self.release(end).await;
        let (worker, dir) = (self.worker.clone(), self.dir.clone());
        let told = async {
            self.upload(&ending).await;
            self.report(&ending).await;
        };
        // A container engine that does not answer must not delay the outcome.
        tokio::join!(told, containers::clear(&*worker.executor, &dir));
        self.forget().await;
    }

    /// The steps until the end of the command.
    async fn work(&mut self) -> Step<Infallible> {
        self.accept().await?;
        if let Some(running) = self.recall().await? {
            let _environment = self.hold_environment();
            return self.run(running).await;
        }
        self.advance(ReplicaEvent::Resumed);
        self.fetch().await?;
        let environment = self.build().await?;
        let running = self.launch(&environment).await?;
        // The next job may want the same trees; making copies earlier would have delayed this one.
        self.laid.drain(..).for_each(|wish| self.worker.prestaged_trees.wish(wish));
        self.run(running).await
    }

    /// Takes the replica to its next step, journals it as soon as there is room, and publishes it.
    async fn enter(&mut self, event: ReplicaEvent, detail: &str) -> Step<()> {
        self.advance(event);
        self.note(detail).await
    }

    /// Takes in what the controller proves to have given: another proof than before after an upgrade, or once its key
    /// or the enrollment of this node is another one, and another job once somebody gave it more time. True if it is
    /// another one.
    fn take_given(&mut self) -> bool {
        let given = self.given.borrow_and_update().clone();
        let Some(new) = given.filter(|new| self.record.given.as_ref() != Some(new)) else { return false };
        // What cannot be read is no reason to run it otherwise.
        if let Ok(spec) = serde_json::from_str::<JobSpec>(&new.document)
            && spec.limits.timeout != self.record.spec.limits.timeout
        {
            self.record.spec = spec;
        }
        self.record.given = Some(new);
        true
    }

    /// Journals the state of the current step as soon as there is room, and publishes it.
    async fn note(&mut self, detail: &str) -> Step<()> {
        self.take_given();
        let mut tries = Tries::begin();
        while let Err(error) = self.worker.journal.enter(&self.record).await {
            self.write_again(&error, &mut tries).await?;
        }
        self.show(detail);
        Continue(())
    }

    /// Enters a step even if it cannot be journaled: the command was started, so the next daemon finds all it needs
    /// in the directory.
    async fn enter_anyway(&mut self, event: ReplicaEvent, detail: &str) {
        self.advance(event);
        self.take_given();
        let mut written = self.worker.journal.enter(&self.record).await;
        while written.as_ref().is_err_and(JournalError::is_full) && self.worker.disk.give_way() {
            written = self.worker.journal.enter(&self.record).await;
        }
        self.show(detail);
        if let Err(error) = written {
            let (replica, step) = (&self.record.replica, self.record.step);
            error!(%replica, %step, %error, "going on without a journal record");
        }
    }

    /// Takes the replica to its next step. If there is none, that is a bug, and the step does not change.
    fn advance(&mut self, event: ReplicaEvent) {
        let next = self.record.step.after(event);
        debug_assert!(next.is_some(), "{event:?} means nothing in step {}", self.record.step);
        self.record.step = next.unwrap_or(self.record.step);
    }

    /// Publishes the current step.
    fn show(&self, detail: &str) {
        self.view.send_replace(ReplicaView {
            step: Some(self.record.step),
            detail: detail.to_owned(),
            started_at: self.record.started_at,
            alive: true,
            over: false,
            ready: self.ready.clone(),
            preempted: self.is_preempted(),
            outcome: self.record.outcome.clone(),
        });
        self.changed.notify_one();
    }

    /// Publishes what the step is doing.
    fn say(&self, detail: &str) {
        let changed = self.view.send_if_modified(|view| {
            let differs = view.detail != detail;
            detail.clone_into(&mut view.detail);
            differs
        });
        if changed {
            self.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests;
