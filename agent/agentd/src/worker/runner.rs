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
//! and outputs are stored whatever it was; a job that may be replaced is never started, and never goes on,
//! beyond the time the controller granted, which a restart of the daemon does not prolong.
//!
//! Channels: [`Desired`] in, [`ReplicaView`] out, both as watched levels. Spawned by `worker::reconcile`.

mod blobs;
mod command;
mod shipping;

use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use agent_model::EnvSpec;
use agent_model::disk::Shortfall;
use agent_model::protocol::orders::Desired;
use agent_model::protocol::start::Deadline;
use agent_model::{Boot, Fault, Outcome, ReplicaStep, Stream, Timestamp, Verdict};
use agent_runtime::env::{AcquireError, EnvLease, GpuVerdict, Phase, Progress, describe, judge_gpu, note};
use agent_runtime::exec::{Enclosure, LaunchError, Running};
use agent_shim::{ExitRecord, JobDir, Launch};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::{error, warn};

use self::command::Silence;
use super::attic::Stay;
use super::backoff::Backoff;
use super::faults::{self, Ending};
use super::journal::{Journal, JournalError, Record};
use super::launch::Facts;
use super::outputs::Collected;
use super::report::Delivered;
use super::spares::Wish;
use super::tracking::{Registration, TrackedRun};
use super::{Worker, enclosure, fetch, outputs, recover};
use crate::config::JobUser;
use shipping::{Shipped, Shipping};

/// A replica as the node reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReplicaView {
    /// The step it is in; `None` until its first record is written.
    pub(crate) step: Option<ReplicaStep>,
    /// What the step is doing, for people.
    pub(crate) detail: String,
    /// When the command was started.
    pub(crate) started_at: Option<Timestamp>,
    /// There is evidence that it goes on: this node works on it itself, or its shim answers.
    pub(crate) alive: bool,
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
    /// It was ended from here, because its supervisor did not answer.
    EndedHere(Ending),
    /// Something failed before it was started, or it was lost.
    Failed(Fault),
}

impl From<Fault> for Interrupted {
    fn from(fault: Fault) -> Interrupted {
        Interrupted::Failed(fault)
    }
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
    /// How often the controller found the outcome incomplete.
    refusals: u32,
    /// The stop that the shim has heard.
    told_to_stop: Option<Desired>,
    /// The shim does not answer, or is to end the job: since when, and what was done about it.
    silence: Silence,
    /// What is wrong with the GPUs of the command, as it was last told.
    trouble: Vec<String>,
    /// The trees that were laid out for it.
    laid: Vec<Wish>,
}

/// How often the logs are sent again to a controller that finds them incomplete. What differs still will not be
/// the same after one more time.
const REFUSALS: u32 = 5;

/// How long the controller may take to store the rest of the logs before people are told that it is waited for.
const QUIET: Duration = Duration::from_secs(5);

/// How often a build log is looked at, and only while something is built: everything else announces itself.
const BUILD_LOG_EVERY: Duration = Duration::from_millis(200);

/// How often the numbers of a build are told.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// How long it is waited before a write is tried again that found no room though there is some.
const ROOM_EVERY: Duration = Duration::from_secs(1);

/// How often it is tried again.
const IN_VAIN: u32 = 3;

/// How long a start waits for descriptors, processes or memory before it is for another node.
const LACK_PATIENCE: Duration = Duration::from_secs(60);

/// How often a job that waits for GPUs asks again though nothing is known to have changed.
const GPUS_EVERY: Duration = Duration::from_secs(10);

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
            desired,
            view,
            changed,
            shipping,
            tracked: Some(tracked),
            refusals: 0,
            told_to_stop: None,
            silence: Silence::default(),
            trouble: Vec::new(),
            laid: Vec::new(),
        }
    }

    /// The whole life of a replica.
    pub(crate) async fn live(mut self) {
        let ended = async {
            self.accept().await?;
            if let Some(running) = self.recall().await? {
                let _environment = self.hold_environment();
                return self.run(running).await;
            }
            self.fetch().await?;
            let environment = self.build().await?;
            let running = self.launch(&environment).await?;
            // What it has, the next one may want; only now does that keep nobody waiting.
            self.laid.drain(..).for_each(|wish| self.worker.spares.wish(wish));
            self.run(running).await
        }
        .await;
        let ending = self.release(ended).await;
        let (worker, dir) = (self.worker.clone(), self.dir.clone());
        let told = async {
            self.upload(&ending).await;
            self.report(&ending).await;
        };
        // An engine that is silent holds nobody's outcome up.
        tokio::join!(told, enclosure::clear(&worker, &dir));
        self.forget().await;
    }

    /// Makes the directory and the first record; changes nothing for a replica that was accepted before.
    async fn accept(&mut self) -> Result<(), Interrupted> {
        if self.record.step == ReplicaStep::Accepted {
            let mut in_vain = 0;
            while let Err(error) = recover::prepare(&self.dir, &self.record).await {
                self.room_for(&error, &mut in_vain).await?;
            }
            self.enter(ReplicaStep::Accepted, "").await?;
        }
        Ok(())
    }

    /// The environment that an earlier life started the command in: as long as this is held nobody removes it.
    fn hold_environment(&self) -> Option<EnvLease> {
        let key = self.record.environment.as_deref()?;
        let held = self.worker.environments.hold(key);
        if held.is_none() {
            warn!(replica = %self.record.replica, key, "the environment of a running command cannot be held");
        }
        held
    }

    /// Lays out the code and the inputs.
    async fn fetch(&mut self) -> Result<(), Interrupted> {
        self.enter(ReplicaStep::Fetching, "").await?;
        self.admit().await?;
        let user = self.user(enclosure::is_sure(&self.record.spec.environment));
        let laid = unless_stopped(self.desired.clone(), self.lay_out(user.as_ref())).await?;
        let laid = laid.map_err(|error| faults::fetch(&error, self.worker.store.is_elsewhere()))?;
        let owner = user.as_ref().map(fetch::owner);
        self.laid = laid.into_iter().map(|(root, laid)| Wish { root, laid, owner }).collect();
        Ok(())
    }

    /// Gets the environment, and ships what its builder prints meanwhile.
    async fn build(&mut self) -> Result<EnvLease, Interrupted> {
        let wanted = self.record.spec.environment.clone();
        self.enter(ReplicaStep::Building, wanted.kind()).await?;
        self.admit().await?;
        let log = self.dir.log(Stream::Build);
        let told = watch::Sender::new(None);
        let acquire = self.acquire(&wanted, &log, &told);
        let acquired = tokio::select! {
            acquired = unless_stopped(self.desired.clone(), acquire) => acquired?,
            never = self.follow_build_log() => match never {},
            never = self.follow_progress(told.subscribe()) => match never {},
        };
        self.shipping.build.written(outputs::length(&log));
        let environment = acquired.map_err(|error| faults::environment(&error, wanted.kind()))?;
        if !environment.reused() {
            self.worker.built.notify_one();
        }
        let wants = self.record.spec.resources.gpus > 0;
        let image =
            environment.image().map(|image| judge_gpu(image.gpu, self.worker.gpus.are_there(), wants));
        if let Some(GpuVerdict::Warn(why)) = image {
            note(&log, &format!("warning: {why}\n"));
            self.shipping.build.written(outputs::length(&log));
        }
        Ok(environment)
    }

    /// The environment, as soon as the container engine answers if it takes one, and the disk has room.
    async fn acquire(
        &self,
        wanted: &EnvSpec,
        log: &Path,
        told: &watch::Sender<Option<Progress>>,
    ) -> Result<EnvLease, AcquireError> {
        let mut backoff = Backoff::default();
        loop {
            let what = match self.worker.environments.acquire(wanted, log, told).await {
                Err(error) if error.is_waiting() => format!("for the container engine: {error}"),
                Err(AcquireError::DiskFull { path }) if self.room().is_err() => {
                    format!("for room: the disk of {} is full", path.display())
                }
                acquired => return acquired,
            };
            warn!(replica = %self.record.replica, "waiting {what}");
            told.send_replace(Some(Progress::of(Phase::Waiting, what)));
            tokio::time::sleep(backoff.next()).await;
        }
    }

    /// Says how far a build is: what it is busy with at once, the numbers now and then.
    async fn follow_progress(&self, mut told: watch::Receiver<Option<Progress>>) -> Infallible {
        let usual = self.view.borrow().detail.clone();
        loop {
            let progress = told.borrow_and_update().clone();
            self.say(&progress.as_ref().map_or_else(|| usual.clone(), describe));
            let phase = progress.map(|progress| progress.phase);
            let other = |told: &Option<Progress>| told.as_ref().map(|told| told.phase) != phase;
            let next = tokio::time::timeout(PROGRESS_EVERY, told.wait_for(other));
            let gone = matches!(next.await, Ok(Err(_)));
            if gone {
                std::future::pending::<()>().await; // what came of it is heard elsewhere
            }
        }
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
        self.record.environment = Some(environment.key().to_owned());
        self.enter(ReplicaStep::Launching, &about(environment)).await?;
        self.take_gpus(&about(environment)).await?;
        let lease_until = self.leave_to_start().await?;
        let enclosure = enclosure::of(environment, &self.record.spec, &self.record.gpus);
        let user = self.user(enclosure.is_some());
        let facts = Facts {
            replica: &self.record.replica,
            spec: &self.record.spec,
            dir: &self.dir,
            host: &self.worker.config.host,
            user: user.as_ref(),
            image: enclosure.as_ref().map(|enclosure| &enclosure.image),
            log_quota: self.worker.config.log_quota,
            path_entries: environment.path_entries(),
            environment: environment.vars(),
            tracking_uri: &self.worker.tracking.uri(),
            tracking_token: &self.record.token,
            gpus: &self.record.gpus,
            lease_until,
        };
        let mut launch = facts.launch()?;
        if enclosure.is_some() {
            self.settle(user).await?;
        }
        let (begun, mut backoff) = (Instant::now(), Backoff::default());
        loop {
            if let Some(enclosure) = &enclosure {
                self.prepare(&mut launch, enclosure).await?;
            }
            let error = match self.worker.executor.launch(&self.dir, &launch, enclosure.as_ref()).await {
                Ok(running) => return Ok(running),
                Err(error) => error,
            };
            let patient = begun.elapsed() < LACK_PATIENCE;
            if let Some(running) = self.after_failed_launch(&error, patient, backoff.next()).await? {
                return Ok(running);
            }
            launch.lease_until = self.leave_to_start().await?;
        }
    }

    /// A command that runs although its launch failed; nothing when it may be launched again, as then it did not begin
    /// and what it lacked may be there.
    async fn after_failed_launch(
        &mut self,
        error: &LaunchError,
        patient: bool,
        pause: Duration,
    ) -> Result<Option<Running>, Interrupted> {
        match error {
            // What stood there had gone, and the engine with it.
            error if error.is_engine_away() => return Ok(None),
            error if faults::is_lack(error) && patient => {
                self.say(&format!("waiting for what the node lacks: {}", faults::launch(error)));
            }
            // It found no room for what it writes first.
            LaunchError::Refused { .. } if self.room().is_err() => {
                return self.admit().await.map(|()| None);
            }
            // Nobody may say that it failed while it may run.
            error if faults::is_unsure(error) => match self.recall().await? {
                None if patient => {} // its supervisor was killed before it heard that it may begin
                found => return found.map(Some).ok_or_else(|| faults::launch(error).into()),
            },
            error => return Err(faults::launch(error).into()),
        }
        unless_stopped(self.desired.clone(), tokio::time::sleep(pause)).await?;
        Ok(None)
    }

    /// Whom the command runs as; the daemon's own user when nobody is named.
    fn user(&self, in_container: bool) -> Option<JobUser> {
        let config = &self.worker.config;
        if in_container { enclosure::user(config) } else { config.job_user.clone() }
    }

    /// Gives the user in a container a home, and the job's files where it was not known before that it would be one.
    async fn settle(&self, user: Option<JobUser>) -> Result<(), Fault> {
        let known = enclosure::is_sure(&self.record.spec.environment);
        fetch::settle(&self.dir, user, !known).await.map_err(|error| faults::fetch(&error, false))
    }

    /// Has the container stand there. An engine that is away is waited for; whoever asks why is told. It may take long,
    /// so until when the job may run is asked again.
    async fn prepare(&mut self, launch: &mut Launch, enclosure: &Enclosure) -> Result<(), Interrupted> {
        let (usual, mut backoff) = (self.view.borrow().detail.clone(), Backoff::default());
        loop {
            let prepare = self.worker.executor.prepare(&self.dir, launch, enclosure);
            let error = match unless_stopped(self.desired.clone(), prepare).await? {
                Ok(()) => break,
                Err(error) => error,
            };
            if !error.is_engine_away() && !matches!(error, LaunchError::Silent { .. }) {
                return Err(faults::launch(&error).into());
            }
            warn!(replica = %self.record.replica, %error, "waiting for the container engine");
            self.say(&format!("waiting for the container engine: {error}"));
            unless_stopped(self.desired.clone(), tokio::time::sleep(backoff.next())).await?;
        }
        self.say(&usual);
        launch.lease_until = self.leave_to_start().await?;
        Ok(())
    }

    /// Waits until it has the GPUs it asked for, each of them empty, and writes down which.
    async fn take_gpus(&mut self, detail: &str) -> Result<(), Interrupted> {
        let wanted = self.record.spec.resources.gpus;
        if wanted == 0 {
            return Ok(());
        }
        let mut changes = self.worker.gpus.changes();
        let gpus = loop {
            changes.mark_unchanged();
            let taken = self.worker.gpus.take(&self.record.replica, wanted);
            match unless_stopped(self.desired.clone(), taken).await? {
                Ok(gpus) => break gpus,
                Err(wait) => self.say(&wait.to_string()),
            }
            let changed = tokio::time::timeout(GPUS_EVERY, changes.changed());
            let _ = unless_stopped(self.desired.clone(), changed).await?;
        };
        self.record.gpus = gpus;
        let detail = format!("{detail}; on {}", self.record.gpus.join(", "));
        self.enter(ReplicaStep::Launching, &detail).await
    }

    /// Waits for leave to start; gives until when it holds. The lease of a job that may be replaced must be
    /// known, and an order that an earlier life of the daemon heard is not, and it must not be over: then the
    /// controller may have given the job to somebody else.
    async fn leave_to_start(&mut self) -> Result<Option<Boot>, Interrupted> {
        let (policy, detail) = (self.record.spec.limits.on_disconnect, self.view.borrow().detail.clone());
        loop {
            let until = match &*self.desired.borrow_and_update() {
                Desired::Run { until } => *until,
                _ => return Err(Interrupted::Stopped),
            };
            let deadline = until.map_or(Deadline::found(policy), |until| Deadline::new(Some(until)));
            if !deadline.is_over(self.worker.clock.boot()) {
                self.say(&detail);
                return Ok(deadline.at());
            }
            self.say("waiting for the controller to say until when it may run");
            if self.desired.changed().await.is_err() {
                // Nobody can say so any more: the daemon stops.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Says what is wrong with the GPUs of the command, which goes on as long as it can.
    fn tell_trouble(&mut self, usual: &str) {
        let trouble = self.worker.gpus.trouble(&self.record.replica);
        if trouble == self.trouble {
            return;
        }
        warn!(replica = %self.record.replica, ?trouble, "the GPUs of a running command");
        if self.told_to_stop.is_none() {
            let all = [usual].into_iter().chain(trouble.iter().map(String::as_str));
            self.say(&all.filter(|said| !said.is_empty()).collect::<Vec<_>>().join("; "));
        }
        self.trouble = trouble;
    }

    /// Says whether there is evidence that the replica goes on.
    fn prove(&self, alive: bool) {
        let changed = self.view.send_if_modified(|view| std::mem::replace(&mut view.alive, alive) != alive);
        if changed {
            self.changed.notify_one();
        }
    }

    /// Lets go of what the command used, and decides what came of it.
    async fn release(&mut self, ended: Result<ExitRecord, Interrupted>) -> Ending {
        let now = self.worker.clock.now();
        let ending = match ended {
            Err(Interrupted::Settled(ending)) => {
                self.give_gpus_back().await;
                return ending;
            }
            Err(Interrupted::Stopped) => Ending::canceled(now),
            Err(Interrupted::EndedHere(ending)) => ending,
            Err(Interrupted::Failed(fault))
                if faults::may_be_of_the_machine(&fault) && self.went_down().await =>
            {
                Ending::failed(faults::rebooted().why(fault.what), now)
            }
            Err(Interrupted::Failed(fault)) => Ending::failed(fault, now),
            Err(Interrupted::Ended(exit)) => self.judge(&exit).await,
            Ok(exit) => self.judge(&exit).await,
        };
        let trouble = self.give_gpus_back().await;
        let ending = faults::gpu_lost(ending, &trouble);
        self.tracked = None;
        self.record.ending = Some(ending.clone());
        self.enter_anyway(ReplicaStep::Uploading, "").await;
        ending
    }

    /// Proves that the GPUs of the command are empty, or leaves them to be looked after; gives what was wrong with
    /// them.
    async fn give_gpus_back(&mut self) -> Vec<String> {
        if !self.record.gpus.is_empty() {
            self.say("waiting until its GPUs are empty");
        }
        let mut trouble = self.worker.gpus.give_back(&self.record.replica).await;
        if trouble.is_empty() {
            // A GPU that was reset while the command failed looks well again.
            trouble = std::mem::take(&mut self.trouble);
        }
        self.record.gpus.clear();
        trouble
    }

    async fn judge(&mut self, exit: &ExitRecord) -> Ending {
        self.enter_anyway(ReplicaStep::Releasing, "").await;
        let tail = outputs::tail(self.dir.clone()).await;
        let went_down = faults::is_from_elsewhere(exit) && self.went_down().await;
        faults::judge(exit, &self.record.spec, faults::tail_lines(&tail), went_down)
    }

    /// Stores logs and outputs, and writes the outcome down.
    async fn upload(&mut self, ending: &Ending) {
        if self.record.outcome.is_some() {
            return;
        }
        let (Shipped { streams, tracking_bytes, missing }, artifacts) =
            tokio::join!(self.ship_rest(), self.collect());
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
        if !missing.is_empty() {
            self.record.precious = true;
            outcome.fault = Some(faults::unstored(outcome.fault.take(), &missing, self.dir.path()));
        }
        match artifacts {
            Ok(Collected { artifacts, missing }) => {
                outcome.artifacts = artifacts;
                if !missing.is_empty() {
                    self.keep_outputs(&mut outcome, faults::outputs_missing(&missing, self.dir.path()));
                }
            }
            Err(error) => {
                let fault = faults::outputs(&error, self.dir.path(), &self.record.replica.job);
                self.keep_outputs(&mut outcome, fault);
            }
        }
        self.record.outcome = Some(outcome);
        self.enter_anyway(ReplicaStep::Reported, "").await;
    }

    /// Not all outputs are stored, so the job did not complete; they are kept here.
    fn keep_outputs(&mut self, outcome: &mut Outcome, fault: Fault) {
        warn!(replica = %self.record.replica, %fault, "the outputs are kept here");
        self.record.precious = true;
        if outcome.verdict == Verdict::Completed {
            outcome.verdict = Verdict::Failed;
        }
        outcome.fault.get_or_insert(fault);
    }

    /// Waits until the controller has logs and records whole, or will not have more of them.
    async fn ship_rest(&self) -> Shipped {
        tokio::select! {
            shipped = self.shipping.rest(&self.dir, self.refusals > REFUSALS) => shipped,
            never = self.tell_of_shipping() => match never {},
            never = self.hurry_when_stopped() => match never {},
        }
    }

    /// Says that the end waits for the controller, once it does for long.
    async fn tell_of_shipping(&self) -> Infallible {
        tokio::time::sleep(QUIET).await;
        self.say("waiting for the controller to store the rest of log and metrics");
        std::future::pending().await
    }

    /// Lets the logs be given up sooner once somebody wants the job to end.
    async fn hurry_when_stopped(&self) -> Infallible {
        let mut desired = self.desired.clone();
        if desired.wait_for(|wanted| !wanted.is_run()).await.is_ok() {
            self.shipping.hurry();
        }
        std::future::pending().await
    }

    /// Delivers the outcome. When the controller lacks something it had acknowledged, that is sent again.
    async fn report(&mut self, ending: &Ending) {
        let mut backoff = Backoff::default();
        while let Some(outcome) = self.record.outcome.clone() {
            let waits =
                |why: &str| self.say(&format!("waiting for the controller to take the result: {why}"));
            match self.worker.outbox.deliver(&self.record.replica, &outcome, waits).await {
                Delivered::Stored => return,
                Delivered::Fenced => {
                    self.record.precious = true;
                    return;
                }
                Delivered::Incomplete => {
                    tokio::time::sleep(backoff.next()).await;
                    self.refusals += 1;
                    self.shipping.doubt();
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
        let stay =
            if self.record.precious { Stay::Original } else { Stay::Copy(self.worker.config.keep_jobs) };
        if let Err(error) = self.put_away(stay).await {
            // Its record stays, so that the next life of the daemon tries again.
            warn!(dir = %self.dir.path().display(), %error, "the job directory cannot be put away");
        } else if let Err(error) = self.strike_off().await {
            warn!(replica = %self.record.replica, %error, "the replica cannot be struck off the journal");
        }
        self.view.send_modify(|view| view.over = true);
        self.changed.notify_one();
    }

    async fn put_away(&self, stay: Stay) -> io::Result<()> {
        match self.worker.attic.put(&self.dir, stay).await {
            Err(error) if faults::is_no_space(&error) && self.worker.disk.give_way() => {
                self.worker.attic.put(&self.dir, stay).await
            }
            put => put,
        }
    }

    async fn strike_off(&self) -> Result<(), JournalError> {
        match self.worker.journal.done(&self.record.replica).await {
            Err(error) if error.is_full() && self.worker.disk.give_way() => {
                self.worker.journal.done(&self.record.replica).await
            }
            struck => struck,
        }
    }

    /// Whether the node's disk has the room that it keeps for what must always work.
    fn room(&self) -> Result<(), Shortfall> {
        self.worker.disk.room()
    }

    /// Waits while the disk is too full to go on.
    async fn admit(&self) -> Result<(), Interrupted> {
        unless_stopped(self.desired.clone(), self.until_room()).await
    }

    /// Returns when there is room. Whoever asks why it waits is told.
    async fn until_room(&self) {
        let Err(shortfall) = self.room() else { return };
        let fault = faults::disk_full(&shortfall, &self.worker.config.state_dir);
        warn!(replica = %self.record.replica, %fault, "waiting for room");
        let detail = self.view.borrow().detail.clone();
        self.say(&format!("waiting for room: {fault}"));
        self.worker.disk.until_room().await;
        self.say(&detail);
    }

    /// Returns when what was refused with `error` may be tried again: there was no room, and there may be now. What is
    /// refused `in_vain` while there is room wants more than there ever is.
    async fn room_for(
        &self,
        error: &(dyn Error + Send + Sync + 'static),
        in_vain: &mut u32,
    ) -> Result<(), Interrupted> {
        if !faults::is_no_space(error) || *in_vain == IN_VAIN {
            return Err(faults::unusable(error).into());
        }
        if self.worker.disk.give_way() {
            return Ok(());
        }
        if self.room().is_err() {
            return self.admit().await;
        }
        // Somebody may have freed it only since.
        *in_vain += 1;
        unless_stopped(self.desired.clone(), tokio::time::sleep(ROOM_EVERY)).await
    }

    /// Writes down that a step begins, as soon as there is room to do so, and says so.
    async fn enter(&mut self, step: ReplicaStep, detail: &str) -> Result<(), Interrupted> {
        self.record.step = step;
        let mut in_vain = 0;
        while let Err(error) = self.worker.journal.enter(&self.record).await {
            self.room_for(&error, &mut in_vain).await?;
        }
        self.show(step, detail);
        Ok(())
    }

    /// Enters a step that must be taken even if it cannot be written down: the command was started, so its
    /// directory tells the next daemon all it needs.
    async fn enter_anyway(&mut self, step: ReplicaStep, detail: &str) {
        self.record.step = step;
        let mut written = self.worker.journal.enter(&self.record).await;
        while written.as_ref().is_err_and(JournalError::is_full) && self.worker.disk.give_way() {
            written = self.worker.journal.enter(&self.record).await;
        }
        self.show(step, detail);
        if let Err(error) = written {
            error!(replica = %self.record.replica, %step, %error, "going on without a journal record");
        }
    }

    /// Says that a step has begun.
    fn show(&self, step: ReplicaStep, detail: &str) {
        self.view.send_replace(ReplicaView {
            step: Some(step),
            detail: detail.to_owned(),
            started_at: self.record.started_at,
            alive: true,
            over: false,
        });
        self.changed.notify_one();
    }

    /// Says what the step is doing.
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
    let stopped = async { desired.wait_for(|wanted| !wanted.is_run()).await.is_ok() };
    tokio::select! {
        biased;
        true = stopped => Err(Interrupted::Stopped),
        done = work => Ok(done),
    }
}

#[cfg(test)]
mod tests;
