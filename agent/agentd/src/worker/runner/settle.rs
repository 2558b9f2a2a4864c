//! From the end of a command to the removal of the replica: `Releasing`, `Uploading`, `Reported`, forgotten.
//!
//! Owns the ending of the command ([`Ending`], decided once), the outcome, and the hand-over of the directory to the
//! retention. No step here fails or is left out, whatever happened before: what is not stored is named in the
//! outcome, and is kept in the directory. A step is taken even if it cannot be journaled.
//!
//! Outputs are safe in the directory as long as they wait for a store; the wait ends when they are stored, when
//! somebody cancels the job, or when the disk runs short.

use std::convert::Infallible;
use std::io;
use std::ops::ControlFlow::{Break, Continue};
use std::time::Duration;

use agent_cas::snapshot::Unread;
use agent_model::machine::ReplicaEvent;
use agent_model::outcome::{UsedEnvironment, first_left_out};
use agent_model::protocol::orders::Desired;
use agent_model::{Fault, Outcome, ReplicaStep, Verdict, causes, last_lines};
use agent_runtime::exec::is_stopping;
use agent_shim::ExitRecord;
use tokio::time::Instant;
use tracing::warn;

use super::shipping::Shipped;
use super::{End, Runner};
use crate::worker::backoff::Backoff;
use crate::worker::faults::{self, Ending};
use crate::worker::journal::JournalError;
use crate::worker::outputs;
use crate::worker::outputs::{CollectError, Collected};
use crate::worker::report::Delivered;
use crate::worker::retention::Stay;

/// How often storing outputs is tried when the store is not the cause of the failure.
const ATTEMPTS: u32 = 3;

/// How long outputs wait for room in a store on this disk: while they wait, they take room themselves, and a slot.
/// After that they are kept in the directory, and can be stored later.
const FOR_ROOM: Duration = Duration::from_secs(10 * 60);

/// How many files that change each time they are read are left out. With more, the outputs would not be those that
/// the job left.
const UNSTEADY: usize = 16;

/// How often the logs are sent again to a controller that finds them incomplete. If they still differ then, another
/// try would not help.
const REFUSALS: u32 = 5;

/// How long the controller may take to store the rest of the logs before the view shows the wait.
const QUIET: Duration = Duration::from_secs(5);

/// The job did not complete, for this reason too: what was wrong before stays the first.
fn add_fault(outcome: &mut Outcome, fault: Fault) {
    if outcome.verdict == Verdict::Completed {
        outcome.verdict = Verdict::Failed;
    }
    outcome.fault = Some(match outcome.fault.take() {
        Some(first) => first.and(&fault),
        None => fault,
    });
}

impl Runner {
    /// Releases what the command used, and decides its ending.
    pub(super) async fn release(&mut self, end: End) -> Ending {
        let has_run = match end {
            End::Settled(_) => false, // it was released before
            End::Exited(_) | End::EndedHere(_) => true,
            End::Failed(_) | End::Stopped | End::Preempted(_) => self.record.step >= ReplicaStep::Running,
        };
        if has_run {
            self.enter_anyway(ReplicaEvent::Ended, "").await;
        }
        let (now, stopped) = (self.worker.clock.now(), was_stopped(&end));
        let ending = match end {
            End::Settled(ending) => {
                self.give_gpus_back().await;
                return ending;
            }
            End::Stopped => Ending::canceled(now),
            End::Preempted(notice) => {
                let ending = Ending::failed(faults::preempted(&notice, self.worker.outbox.node()), now);
                self.record.preempted = Some(notice);
                ending
            }
            End::EndedHere(ending) => ending,
            End::Failed(fault) if faults::may_be_of_the_machine(&fault) && self.went_down().await => {
                Ending::failed(faults::rebooted().why(fault.what), now)
            }
            End::Failed(fault) => Ending::failed(fault, now),
            End::Exited(exit) => self.judge(&exit).await,
        };
        let trouble = self.give_gpus_back().await;
        let ending = self.with_notice(faults::gpu_lost(ending, &trouble), stopped);
        self.tracked = None;
        self.record.ending = Some(ending.clone());
        let event = if has_run { ReplicaEvent::StepDone } else { ReplicaEvent::GaveUp };
        self.enter_anyway(event, "").await;
        ending
    }

    /// The ending, with the notice of the machine as the reason where it is that: what was asked to end by it did not
    /// come to its own end, whatever it returned.
    fn with_notice(&self, ending: Ending, stopped: bool) -> Ending {
        let wanted = self.desired.borrow().is_run();
        match &self.record.preempted {
            Some(notice) if wanted && (stopped || faults::is_of_the_machine(&ending)) => {
                let fault = faults::preempted(notice, self.worker.outbox.node());
                let fault = match &ending.fault {
                    Some(other) if other.code != fault.code => fault.why(other.line()),
                    _ => fault,
                };
                Ending { verdict: Verdict::Failed, fault: Some(fault), ..ending }
            }
            _ => ending,
        }
    }

    /// Whether the machine was rebooted since the job was accepted, or is being stopped now.
    async fn went_down(&self) -> bool {
        self.record.boot_id != self.worker.boot_id || is_stopping().await
    }

    /// Checks that the GPUs of the command are empty, or leaves them to the GPU task; returns what was wrong with
    /// them.
    async fn give_gpus_back(&mut self) -> Vec<String> {
        if !self.record.gpus.is_empty() {
            self.say("waiting until its GPUs are empty");
        }
        let mut trouble = self.worker.gpus.give_back(&self.record.replica).await;
        if trouble.is_empty() {
            // A GPU that was reset while the command failed looks healthy again.
            trouble = std::mem::take(&mut self.trouble);
        }
        self.record.gpus.clear();
        trouble
    }

    async fn judge(&mut self, exit: &ExitRecord) -> Ending {
        let tail = outputs::tail(self.dir.clone()).await;
        let went_down = faults::is_from_elsewhere(exit) && self.went_down().await;
        faults::judge(exit, &self.record.spec, last_lines(&tail), went_down)
    }

    /// Stores logs and outputs, and journals the outcome.
    pub(super) async fn upload(&mut self, ending: &Ending) {
        if self.record.outcome.is_some() {
            return;
        }
        let kept_and_sent = async { (self.collect().await, self.send_outputs(ending).await) };
        let (Shipped { streams, tracking_bytes, missing }, (artifacts, (unsent, not_sent))) =
            tokio::join!(self.ship_rest(), kept_and_sent);
        let mut outcome = Outcome {
            verdict: ending.verdict,
            exit: ending.exit,
            fault: ending.fault.clone(),
            started_at: ending.started_at,
            ended_at: ending.ended_at,
            streams,
            tracking_bytes,
            tracking: None,
            artifacts: None,
            usage: ending.usage.map(Box::new),
            environment: self.used_environment(ending),
            left_out: Vec::new(),
        };
        if !missing.is_empty() {
            self.record.precious = true;
            outcome.fault = Some(faults::unstored(outcome.fault.take(), &missing, self.dir.path()));
        }
        match artifacts {
            Ok(Collected { artifacts, missing, left_out }) => {
                outcome.artifacts = artifacts;
                outcome.left_out = first_left_out([left_out, not_sent].concat());
                if !missing.is_empty() {
                    self.keep_outputs(&mut outcome, faults::outputs_missing(&missing, self.dir.data()));
                }
            }
            Err(error) => {
                let fault = faults::outputs(&error, self.dir.data(), &self.record.replica.job);
                self.keep_outputs(&mut outcome, fault);
            }
        }
        if let Some(unsent) = unsent {
            // They are with the controller, but not where the job wants them.
            add_fault(&mut outcome, unsent);
        }
        self.record.outcome = Some(outcome);
        self.enter_anyway(ReplicaEvent::StepDone, "").await;
    }

    /// The environment that the command was started in.
    fn used_environment(&self, ending: &Ending) -> Option<Box<UsedEnvironment>> {
        let key = self.record.environment.clone().filter(|_| ending.started_at.is_some())?;
        Some(Box::new(UsedEnvironment { key, lock: self.record.lock }))
    }

    /// Not all outputs are stored, so the job did not complete; they are kept here.
    fn keep_outputs(&mut self, outcome: &mut Outcome, fault: Fault) {
        warn!(replica = %self.record.replica, %fault, "keeping outputs on this node");
        self.record.precious = true;
        add_fault(outcome, fault);
    }

    /// Stores the outputs, also those of a job that was canceled. If a job is canceled only while they are stored,
    /// this is given up.
    async fn collect(&self) -> Result<Collected, CollectError> {
        let (store, spec) = (&self.worker.store, &self.record.spec);
        let canceled = |error| CollectError::given_up("the job was canceled meanwhile", error);
        let (mut backoff, mut attempts, begun) = (Backoff::default(), 1, Instant::now());
        let (mut unsteady, ends_anyway) = (Vec::new(), !self.desired.borrow().is_run());
        // The error of the store, while it is waited for.
        let mut away: Option<CollectError> = None;
        loop {
            let collect = Box::pin(outputs::collect(store, &self.dir, spec, unsteady.clone()));
            let attempt = async {
                if let Some(error) = &away {
                    self.wait_for_store(&mut backoff, error).await;
                }
                collect.await
            };
            let collected = match ends_anyway && away.is_none() {
                true => attempt.await,
                false => match self.unless_canceled(attempt).await {
                    Continue(collected) => collected,
                    Break(_) => return Err(canceled(away.unwrap_or(CollectError::Stopped))),
                },
            };
            away = None;
            let error = match collected {
                Err(error) => error,
                collected => return collected,
            };
            if faults::is_away(&error) {
                match self.short_of_room().await {
                    Some(why) => return Err(CollectError::given_up(why, error)),
                    None => away = Some(error),
                }
            } else if attempts < ATTEMPTS {
                attempts += 1;
                warn!(replica = %self.record.replica, %error, "cannot store outputs yet");
                self.make_room_for(&error).await;
                tokio::time::sleep(backoff.next()).await;
            } else if faults::is_no_space(&error) && begun.elapsed() < FOR_ROOM {
                let what = format!("for room to store the outputs: {}", causes::tell(&error));
                if self.unless_canceled(self.wait(&mut backoff, &what)).await.is_break() {
                    return Err(canceled(error));
                }
            } else if let Some(path) = error.unsteady().filter(|_| unsteady.len() < UNSTEADY) {
                let why = "changed each time it was read: end what still writes to it".to_owned();
                unsteady.push(Unread { path: path.to_owned(), why });
            } else {
                return Err(error);
            }
        }
    }

    /// The outputs need more than what is free: each time, makes twice the free room.
    async fn make_room_for(&self, error: &CollectError) {
        if faults::is_no_space(error) {
            let free = agent_node::disk_free(&self.worker.config.state_dir);
            self.worker.collector.make_room(free.saturating_mul(2)).await;
        }
    }

    /// Why outputs cannot wait here any longer: the node needs the room on its disk for other jobs.
    async fn short_of_room(&self) -> Option<String> {
        self.worker.disk.room().err()?;
        self.worker.collector.make_room(self.worker.config.disk_reserve.saturating_mul(2)).await;
        Some(format!("the node needs the room: {}", self.worker.disk.room().err()?))
    }

    /// Waits until the controller has all logs and records, or will not get more of them.
    async fn ship_rest(&self) -> Shipped {
        tokio::select! {
            shipped = self.shipping.rest(&self.dir, self.refusals > REFUSALS) => shipped,
            never = self.tell_of_shipping() => match never {},
            never = self.hurry_when_stopped() => match never {},
        }
    }

    /// Publishes that the end waits for the controller, after it has waited for [`QUIET`].
    async fn tell_of_shipping(&self) -> Infallible {
        tokio::time::sleep(QUIET).await;
        self.say("waiting for the controller to store the rest of log and metrics");
        std::future::pending().await
    }

    /// Gives the logs up sooner when somebody wants the job to end.
    async fn hurry_when_stopped(&self) -> Infallible {
        let mut desired = self.desired.clone();
        if desired.wait_for(|wanted| !wanted.is_run()).await.is_ok() {
            self.shipping.hurry();
        }
        std::future::pending().await
    }

    /// Delivers the outcome. If the controller lacks bytes that it had acknowledged, they are sent again.
    pub(super) async fn report(&mut self, ending: &Ending) {
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
                    self.advance(ReplicaEvent::Refused);
                    self.upload(ending).await;
                }
            }
        }
    }

    /// Waits for the order to forget the replica, and cleans up.
    pub(super) async fn forget(mut self) {
        // If that order cannot arrive any more, the daemon stops; the next one waits again.
        let leave =
            self.desired.wait_for(|wanted| matches!(wanted, Desired::Forget | Desired::Disown)).await.is_ok();
        if !leave {
            return;
        }
        let stay =
            if self.record.precious { Stay::Original } else { Stay::Copy(self.worker.config.keep.jobs) };
        if let Err(error) = self.put_away(stay).await {
            // Its record is kept, so that the next process of the daemon tries again.
            warn!(dir = %self.dir.path().display(), %error, "cannot retire job directory");
        } else if let Err(error) = self.strike_off().await {
            warn!(replica = %self.record.replica, %error, "cannot remove replica from journal");
        } else {
            self.worker.users.give_back(&self.record.replica);
        }
        self.view.send_modify(|view| view.over = true);
        self.changed.notify_one();
    }

    async fn put_away(&self, stay: Stay) -> io::Result<()> {
        match self.worker.retention.put(&self.dir, stay).await {
            Err(error) if faults::is_no_space(&error) && self.worker.disk.give_way() => {
                self.worker.retention.put(&self.dir, stay).await
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
}

/// Whether its supervisor, or the daemon, was told to end the command before that ended.
fn was_stopped(end: &End) -> bool {
    match end {
        End::Exited(exit) => exit.stopped.is_some(),
        End::EndedHere(_) => true,
        End::Stopped | End::Preempted(_) | End::Failed(_) | End::Settled(_) => false,
    }
}
