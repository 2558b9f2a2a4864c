//! Drives one replica through its steps; [`Runner::live`] is the whole life of a replica.
//!
//! ```text
//! Accepted ─▶ Fetching ─▶ Building ─▶ Launching ─▶ Running ─▶ Releasing ─▶ Uploading ─▶ Reported
//!    └────────────┴────────────┴── failed or stopped ─────────────────────────▲
//! ```
//!
//! Owns: the replica's journal record and its directory, except for what the shim writes. Hides: what is
//! retried, what a stop means in each step.
//!
//! Invariants: the record of a step is on disk before its work begins; the future may be dropped at any
//! point (the daemon stops or is killed) and another one goes on from the record; a stop that comes before
//! the command was started means that it never is; what came of the command is decided once, and its logs
//! and outputs are stored whatever it was.
//!
//! Channels: [`Desired`] in, [`ReplicaView`] out, both as watched levels. Spawned by `worker::reconcile`.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use agent_model::{Fault, Outcome, ReplicaStep, Stream, StreamEnd, Timestamp, Verdict};
use agent_runtime::env::EnvLease;
use agent_runtime::exec::{Executor, Found, ReattachError, Running, WaitError};
use agent_shim::{ExitRecord, JobDir};
use tokio::sync::{Notify, watch};
use tracing::{error, info, warn};

use super::backoff::Backoff;
use super::faults::{self, Ending};
use super::journal::{Journal, JournalError, Record};
use super::launch::Facts;
use super::report::Delivered;
use super::telemetry::{Content, Shipper};
use super::tracking::{Registration, TrackedRun};
use super::{Worker, attic, budget, fetch, outputs, recover};

/// What the controller wants of a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Desired {
    /// Run it to its end.
    Run,
    /// End it.
    Stop {
        /// Between the polite signal and the final one.
        grace: Duration,
        /// For people.
        reason: String,
    },
    /// Its outcome is stored; remove it.
    Forget,
    /// The controller does not know it: end it and keep what it left for a while.
    Disown,
}

/// A replica as the node reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReplicaView {
    /// The step it is in; `None` until its first record is written.
    pub(crate) step: Option<ReplicaStep>,
    /// What the step is doing, for people.
    pub(crate) detail: String,
    /// When the command was started.
    pub(crate) started_at: Option<Timestamp>,
    /// The controller has the outcome and nothing of the replica is left to do.
    pub(crate) over: bool,
}

/// Why the command is not, or no longer, to be waited for.
enum Interrupted {
    /// An earlier life of the daemon already saw its end.
    Settled(Ending),
    /// It ended while no daemon looked.
    Ended(Box<ExitRecord>),
    /// Someone asked for the end before it was started.
    Stopped,
    /// Something failed before it was started, or it was lost.
    Failed(Fault),
}

impl From<Fault> for Interrupted {
    fn from(fault: Fault) -> Interrupted {
        Interrupted::Failed(fault)
    }
}

impl From<JournalError> for Interrupted {
    fn from(error: JournalError) -> Interrupted {
        Interrupted::Failed(faults::unusable(&error))
    }
}

/// The files of a replica that are shipped.
struct Shipping {
    job: Shipper,
    build: Shipper,
    tracking: Shipper,
}

/// Drives one replica.
pub(crate) struct Runner<J> {
    worker: Arc<Worker<J>>,
    record: Record,
    dir: JobDir,
    desired: watch::Receiver<Desired>,
    view: watch::Sender<ReplicaView>,
    changed: Arc<Notify>,
    shipping: Shipping,
    /// The tracking endpoint answers for the replica while this lives: from before the command can ask
    /// until it has ended.
    tracked: Option<Registration>,
}

/// How often a build log is looked at, and only while something is built: everything else announces itself.
const BUILD_LOG_EVERY: Duration = Duration::from_millis(200);

/// How often storing outputs is tried.
const OUTPUT_ATTEMPTS: u32 = 3;

impl<J: Journal> Runner<J> {
    /// The runner of a replica that was just accepted or found in the journal. `changed` is notified after
    /// each change of `view`.
    pub(crate) fn new(
        worker: Arc<Worker<J>>,
        record: Record,
        desired: watch::Receiver<Desired>,
        view: watch::Sender<ReplicaView>,
        changed: Arc<Notify>,
    ) -> Runner<J> {
        let dir = worker.job_dir(&record.replica);
        let ship = |content, path| worker.telemetry.ship(&record.replica, content, path);
        let shipping = Shipping {
            job: ship(Content::Log(Stream::Job), dir.log(Stream::Job)),
            build: ship(Content::Log(Stream::Build), dir.log(Stream::Build)),
            tracking: ship(Content::Tracking, dir.tracking()),
        };
        let tracked = worker.tracking.register(TrackedRun {
            replica: record.replica.clone(),
            run_id: record.replica.job.to_string(),
            token: record.token.clone(),
            experiment: record.spec.experiment.clone(),
            tracking_file: dir.tracking(),
            artifacts: dir.artifacts(),
        });
        Runner { worker, record, dir, desired, view, changed, shipping, tracked: Some(tracked) }
    }

    /// The whole life of a replica.
    pub(crate) async fn live(mut self) {
        let ended = async {
            self.accept().await?;
            if let Some(running) = self.recall().await? {
                return self.run(running).await;
            }
            self.fetch().await?;
            let environment = self.build().await?;
            let running = self.launch(&environment).await?;
            self.run(running).await
        }
        .await;
        let ending = self.release(ended).await;
        self.upload(&ending).await;
        self.report(&ending).await;
        self.forget().await;
    }

    /// Makes the directory and the first record; changes nothing for a replica that was accepted before.
    async fn accept(&mut self) -> Result<(), Interrupted> {
        if self.record.step == ReplicaStep::Accepted {
            recover::prepare(&self.dir, &self.record).await.map_err(|error| faults::unusable(&error))?;
            self.enter(ReplicaStep::Accepted, "").await?;
        }
        Ok(())
    }

    /// Finds what an earlier life of the daemon left: a command that runs, one that ended, or nothing.
    async fn recall(&mut self) -> Result<Option<Running>, Interrupted> {
        if let Some(ending) = self.record.ending.clone() {
            return Err(Interrupted::Settled(ending));
        }
        let mut backoff = Backoff::default();
        loop {
            match self.worker.executor.reattach(&self.dir).await {
                Ok(Found::Running(running)) => {
                    info!(replica = %self.record.replica, "found the command running");
                    return Ok(Some(running));
                }
                Ok(Found::Ended(exit)) => return Err(Interrupted::Ended(Box::new(exit))),
                Ok(Found::NotStarted) => return self.may_start().map(|()| None).map_err(Interrupted::Failed),
                Ok(Found::Lost(lost)) => return Err(faults::lost(lost).into()),
                Err(error @ ReattachError::Record(_)) => return Err(faults::unusable(&error).into()),
                // Silence is not death: whoever is silent may run.
                Err(error) => {
                    warn!(replica = %self.record.replica, %error, "cannot tell what became of the command");
                    self.say("waiting for the supervisor of the command to answer");
                    tokio::time::sleep(backoff.next()).await;
                }
            }
        }
    }

    /// After a restart of the machine the controller decides anew; nothing starts because of an old order.
    fn may_start(&self) -> Result<(), Fault> {
        match self.record.boot_id == self.worker.boot_id {
            true => Ok(()),
            false => Err(faults::rebooted()),
        }
    }

    /// Lays out the code and the inputs.
    async fn fetch(&mut self) -> Result<(), Interrupted> {
        self.enter(ReplicaStep::Fetching, "").await?;
        self.admit()?;
        let user = self.worker.config.job_user.as_ref();
        let laid = fetch::lay_out(&self.worker.store, &self.record.spec, &self.dir, user);
        unless_stopped(self.desired.clone(), laid).await?.map_err(|error| faults::fetch(&error).into())
    }

    /// Gets the environment, and ships what its builder prints meanwhile.
    async fn build(&mut self) -> Result<EnvLease, Interrupted> {
        let wanted = self.record.spec.environment.clone();
        self.enter(ReplicaStep::Building, wanted.kind()).await?;
        self.admit()?;
        let log = self.dir.log(Stream::Build);
        let acquire = self.worker.environments.acquire(&wanted, &log);
        let acquired = tokio::select! {
            acquired = unless_stopped(self.desired.clone(), acquire) => acquired?,
            never = self.follow_build_log() => match never {},
        };
        self.shipping.build.written(outputs::length(&log));
        acquired.map_err(|error| faults::environment(&error, wanted.kind()).into())
    }

    /// Ships a build log as it grows.
    async fn follow_build_log(&self) -> Infallible {
        let log = self.dir.log(Stream::Build);
        loop {
            tokio::time::sleep(BUILD_LOG_EVERY).await;
            self.shipping.build.written(outputs::length(&log));
        }
    }

    /// Starts the command under its shim. From here on only the shim ends it.
    async fn launch(&mut self, environment: &EnvLease) -> Result<Running, Interrupted> {
        self.enter(ReplicaStep::Launching, &about(environment)).await?;
        if *self.desired.borrow() != Desired::Run {
            return Err(Interrupted::Stopped);
        }
        let facts = Facts {
            replica: &self.record.replica,
            spec: &self.record.spec,
            dir: &self.dir,
            host: &self.worker.config.host,
            user: self.worker.config.job_user.as_ref(),
            path_entries: environment.path_entries(),
            environment: environment.vars(),
            tracking_uri: &self.worker.tracking.uri(),
            tracking_token: &self.record.token,
        };
        match self.worker.executor.launch(&self.dir, &facts.launch()?).await {
            Ok(running) => Ok(running),
            // Nobody may say that it failed while it may run.
            Err(error) if faults::is_unsure(&error) => {
                self.recall().await?.ok_or_else(|| faults::launch(&error).into())
            }
            Err(error) => Err(faults::launch(&error).into()),
        }
    }

    /// Follows the command to its end: ships what it writes, passes on what the controller wants.
    async fn run(&mut self, running: Running) -> Result<ExitRecord, Interrupted> {
        let now = self.worker.clock.now();
        self.record.started_at.get_or_insert(now);
        let detail = self.view.borrow().detail.clone(); // what the launch said about the environment
        self.enter_anyway(ReplicaStep::Running, &detail).await;
        let (mut progress, mut desired) = (running.progress(), self.desired.clone());
        let mut wanted = desired.borrow_and_update().clone();
        let mut unheard = !self.obey(&running, &wanted).await;
        let mut backoff = Backoff::default();
        let exit = loop {
            let written = *progress.borrow_and_update();
            self.shipping.job.written(written.log_bytes);
            self.shipping.tracking.written(written.tracking_bytes);
            tokio::select! {
                exit = running.wait() => break exit,
                Ok(()) = progress.changed() => continue,
                Ok(()) = desired.changed() => backoff.reset(),
                () = tokio::time::sleep(backoff.next()), if unheard => {}
            }
            wanted.clone_from(&desired.borrow_and_update());
            unheard = !self.obey(&running, &wanted).await;
        };
        exit.map_err(|error| match error {
            WaitError::Lost { lost, .. } => faults::lost(lost).into(),
            WaitError::Look(error) => faults::unusable(&error).into(),
        })
    }

    /// Passes a stop on to the shim; `false` when it did not hear.
    async fn obey(&self, running: &Running, desired: &Desired) -> bool {
        let usual = self.record.spec.limits.grace();
        let (grace, reason) = match desired {
            Desired::Run => return true,
            Desired::Stop { grace, reason } => (*grace, reason.as_str()),
            Desired::Forget | Desired::Disown => {
                (usual, "the controller does not know this attempt any more")
            }
        };
        self.say(&format!("stopping: {reason}"));
        let heard = running.stop(grace, reason).await;
        if let Err(error) = &heard {
            warn!(replica = %self.record.replica, %error, "the supervisor did not hear the stop");
        }
        heard.is_ok()
    }

    /// Lets go of what the command used, and decides what came of it.
    async fn release(&mut self, ended: Result<ExitRecord, Interrupted>) -> Ending {
        let now = self.worker.clock.now();
        let ending = match ended {
            Err(Interrupted::Settled(ending)) => return ending,
            Err(Interrupted::Stopped) => Ending::canceled(now),
            Err(Interrupted::Failed(fault)) => Ending::failed(fault, now),
            Err(Interrupted::Ended(exit)) => self.judge(&exit).await,
            Ok(exit) => self.judge(&exit).await,
        };
        self.tracked = None;
        self.record.ending = Some(ending.clone());
        self.enter_anyway(ReplicaStep::Uploading, "").await;
        ending
    }

    async fn judge(&mut self, exit: &ExitRecord) -> Ending {
        self.enter_anyway(ReplicaStep::Releasing, "").await;
        let tail = outputs::tail(self.dir.log(Stream::Job)).await;
        faults::judge(exit, &self.record.spec, faults::tail_lines(&tail))
    }

    /// Stores logs and outputs, and writes the outcome down.
    async fn upload(&mut self, ending: &Ending) {
        if self.record.outcome.is_some() {
            return;
        }
        let ((streams, tracking_bytes), artifacts) = tokio::join!(self.ship_rest(), self.collect());
        let mut outcome = Outcome {
            verdict: ending.verdict,
            exit: ending.exit,
            fault: ending.fault.clone(),
            started_at: ending.started_at,
            ended_at: ending.ended_at,
            streams,
            tracking_bytes,
            artifacts: None,
        };
        match artifacts {
            Ok(artifacts) => outcome.artifacts = artifacts,
            Err(error) => {
                self.record.precious = true;
                let fault = faults::outputs(&error, self.dir.path());
                warn!(replica = %self.record.replica, %fault, "the outputs are kept here");
                if outcome.verdict == Verdict::Completed {
                    outcome.verdict = Verdict::Failed;
                }
                outcome.fault.get_or_insert(fault);
            }
        }
        self.record.outcome = Some(outcome);
        self.enter_anyway(ReplicaStep::Reported, "").await;
    }

    /// Waits until the controller has every log whole; gives their ends and the bytes of tracking records.
    async fn ship_rest(&self) -> (Vec<StreamEnd>, u64) {
        let mut ends = Vec::new();
        for (stream, shipper) in [(Stream::Job, &self.shipping.job), (Stream::Build, &self.shipping.build)] {
            let digest = outputs::measure(self.dir.log(stream)).await;
            shipper.stored(digest.size).await;
            ends.push(StreamEnd { stream, digest });
        }
        // A job may cut its own tracking file; what was stored before stays stored.
        let tracking = self.shipping.tracking.stored(outputs::length(&self.dir.tracking())).await;
        (ends, tracking)
    }

    async fn collect(&self) -> Result<Option<agent_model::Artifacts>, outputs::CollectError> {
        let mut backoff = Backoff::default();
        for _ in 1..OUTPUT_ATTEMPTS {
            match outputs::collect(&self.worker.store, &self.dir, &self.record.spec).await {
                Ok(artifacts) => return Ok(artifacts),
                Err(error) => {
                    warn!(replica = %self.record.replica, %error, "the outputs are not stored yet");
                    tokio::time::sleep(backoff.next()).await;
                }
            }
        }
        outputs::collect(&self.worker.store, &self.dir, &self.record.spec).await
    }

    /// Delivers the outcome. When the controller lacks something it had acknowledged, that is sent again.
    async fn report(&mut self, ending: &Ending) {
        let mut backoff = Backoff::default();
        while let Some(outcome) = self.record.outcome.clone() {
            match self.worker.outbox.deliver(&self.record.replica, &outcome).await {
                Delivered::Stored => return,
                Delivered::Fenced => {
                    self.record.precious = true;
                    return;
                }
                Delivered::Incomplete => {
                    tokio::time::sleep(backoff.next()).await;
                    self.shipping.all().into_iter().for_each(Shipper::doubt);
                    self.record.outcome = None;
                    self.upload(ending).await;
                }
            }
        }
    }

    /// Waits for leave to go, and cleans up.
    async fn forget(mut self) {
        // When nobody can give leave any more the daemon stops; the next one waits again.
        let leave =
            self.desired.wait_for(|wanted| matches!(wanted, Desired::Forget | Desired::Disown)).await.is_ok();
        if !leave {
            return;
        }
        let stay = if self.record.precious { attic::ORPHANS_STAY } else { self.worker.config.keep_jobs };
        if let Err(error) = self.worker.attic.put(&self.dir, stay).await {
            warn!(dir = %self.dir.path().display(), %error, "the job directory cannot be put away");
        }
        if let Err(error) = self.worker.journal.done(&self.record.replica).await {
            warn!(replica = %self.record.replica, %error, "the replica cannot be struck off the journal");
        }
        self.view.send_modify(|view| view.over = true);
        self.changed.notify_one();
    }

    /// Refuses to go on while the disk is too full.
    fn admit(&self) -> Result<(), Fault> {
        let config = &self.worker.config;
        let free = agent_node::load(&config.state_dir).disk_free;
        budget::admit(free, config.disk_reserve)
            .map_err(|shortfall| faults::disk_full(&shortfall, &config.state_dir))
    }

    /// Writes down that a step begins, and says so.
    async fn enter(&mut self, step: ReplicaStep, detail: &str) -> Result<(), JournalError> {
        self.record.step = step;
        let written = self.worker.journal.enter(&self.record).await;
        let started_at = self.record.started_at;
        self.view.send_replace(ReplicaView {
            step: Some(step),
            detail: detail.to_owned(),
            started_at,
            over: false,
        });
        self.changed.notify_one();
        written
    }

    /// Enters a step that must be taken even if it cannot be written down: the command was started, so its
    /// directory tells the next daemon all it needs.
    async fn enter_anyway(&mut self, step: ReplicaStep, detail: &str) {
        if let Err(error) = self.enter(step, detail).await {
            error!(replica = %self.record.replica, %step, %error, "going on without a journal record");
        }
    }

    /// Says what the step is doing.
    fn say(&self, detail: &str) {
        self.view.send_modify(|view| detail.clone_into(&mut view.detail));
        self.changed.notify_one();
    }
}

impl Shipping {
    fn all(&self) -> [&Shipper; 3] {
        [&self.job, &self.build, &self.tracking]
    }
}

/// What users are told about an environment.
fn about(environment: &EnvLease) -> String {
    let how = if environment.reused() { "reused" } else { "built" };
    format!("environment {} {how}", environment.key())
}

/// Work that ends early when the controller wants something else than that the replica runs.
async fn unless_stopped<T>(
    mut desired: watch::Receiver<Desired>,
    work: impl Future<Output = T>,
) -> Result<T, Interrupted> {
    // A controller that is gone stops nothing.
    let stopped = async { desired.wait_for(|wanted| *wanted != Desired::Run).await.is_ok() };
    tokio::select! {
        biased;
        true = stopped => Err(Interrupted::Stopped),
        done = work => Ok(done),
    }
}

#[cfg(test)]
mod tests;
