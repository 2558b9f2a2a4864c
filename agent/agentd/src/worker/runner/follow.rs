//! A command and its supervisor: `Running`, and commands of an earlier process of the daemon.
//!
//! Owns what is passed to the supervisor, how long it has not answered, and the end of its job in that case. An
//! existing command is looked for before anything is prepared ([`Runner::recall`]), so that none is started twice;
//! its end is certain only when its supervisor wrote an exit record, or when the daemon ended all its processes.
//!
//! A supervisor that does not answer may still run; the view shows since when it is silent. But a job that must end,
//! because a stop was ordered or its lease is over, ends also when its supervisor is stopped or frozen: after the
//! time for that ([`due_after`]), the daemon ends the job and its supervisor.

use std::convert::Infallible;
use std::ops::ControlFlow::{Break, Continue};
use std::time::Duration;

use agent_model::job::OnDisconnect;
use agent_model::lease::Terms;
use agent_model::machine::ReplicaEvent;
use agent_model::protocol::orders::{Desired, UNHEARD};
use agent_model::protocol::start::Deadline;
use agent_model::{Boot, Fault, Verdict};
use agent_runtime::env::EnvLease;
use agent_runtime::exec::{Found, LimitError, ReattachError, RenewError, Running, WaitError};
use agent_shim::{ExitRecord, RecordError};
use tokio::time::{Instant, timeout};
use tracing::{error, info, warn};

use super::{End, Runner, Step, or_end};
use crate::worker::backoff::Backoff;
use crate::worker::faults::{self, Ending};

/// How often the current order is sent to a shim, which also shows whether it answers.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// How long the answer may take.
const ASK_WITHIN: Duration = Duration::from_secs(5);

/// How long a running shim may need to receive a stop: it fsyncs, and training machines are busy.
const BUSY: Duration = Duration::from_secs(60);

/// How long one that has received it may need, beyond the grace, to write the exit record to a full disk.
const RECORD: Duration = Duration::from_secs(700);

/// A stop, as a supervisor is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stop {
    /// Between the polite signal and the final one.
    pub(super) grace: Duration,
    /// For people.
    pub(super) reason: String,
}

/// The state of a supervisor that does not answer.
#[derive(Debug, Default)]
pub(super) struct Silence {
    /// Since when it does not answer.
    since: Option<Boot>,
    /// Since when the job must end.
    stop_since: Option<Boot>,
    /// Why the daemon ended the job.
    ended: Option<Why>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Ordered,
    LeaseOver,
}

/// How long, beyond the grace, a silent supervisor has to end a job. One that is `halted` gets little: it cannot use
/// it.
fn due_after(halted: bool, heard: bool) -> Duration {
    match (halted, heard) {
        (true, _) => Terms::default().kill,
        (false, false) => BUSY,
        (false, true) => RECORD,
    }
}

/// A write costs an fsync, so it is made only when the written lease covers less than half of the remaining time.
fn is_worth_writing(written: Option<Boot>, until: Boot, now: Boot) -> bool {
    let covered = written.unwrap_or_default().since(now);
    until > UNHEARD && covered * 2 < until.since(now)
}

impl Runner {
    /// Finds what an earlier process of the daemon left: a running command, one that ended, or nothing.
    pub(super) async fn recall(&mut self) -> Step<Option<Running>> {
        if let Some(ending) = self.record.ending.clone() {
            return Break(End::Settled(ending));
        }
        let (mut backoff, mut desired) = (Backoff::default(), self.desired.clone());
        loop {
            match timeout(ASK_WITHIN, self.worker.executor.reattach(&self.dir)).await {
                Ok(Ok(Found::Running(running))) => {
                    info!(replica = %self.record.replica, "found job running");
                    self.silence.since = None;
                    return Continue(Some(running));
                }
                Ok(Ok(Found::Ended(exit))) => return Break(End::Exited(Box::new(exit))),
                Ok(Ok(Found::NotStarted)) => return or_end(self.may_start().map(|()| None)),
                Ok(Ok(Found::Lost(lost))) => return Break(self.lost(faults::lost(&lost))),
                Ok(Err(ReattachError::Record(error))) if is_final(&error) => {
                    self.advance(ReplicaEvent::Started);
                    return Break(End::Failed(faults::record_lost(&error)));
                }
                Ok(Err(error @ (ReattachError::Record(_) | ReattachError::Look { .. }))) => {
                    self.say(&format!(
                        "waiting until what became of the command can be read: {}",
                        told(&error)
                    ));
                    warn!(replica = %self.record.replica, error = told(&error), "cannot tell what became of job");
                }
                Ok(Err(ReattachError::Silent { .. })) | Err(_) => {
                    warn!(replica = %self.record.replica, "cannot reach supervisor");
                    self.bear_silence("").await;
                }
            }
            self.prove(false);
            let pause = backoff.next();
            if let Ok(Err(_)) = timeout(pause, desired.changed()).await {
                tokio::time::sleep(pause).await; // there are no more orders: the daemon stops
            }
        }
    }

    /// A command without any trace may start if it was not started before. After a reboot of the machine the
    /// controller decides again: an old order starts nothing.
    fn may_start(&self) -> Result<(), Fault> {
        if self.record.started_at.is_some() {
            return Err(faults::traces_lost(self.dir.path()));
        }
        match self.record.boot_id == self.worker.boot_id {
            true => Ok(()),
            false => Err(faults::rebooted()),
        }
    }

    /// The environment that an earlier process started the command in; it is not removed while this is held.
    pub(super) fn hold_environment(&self) -> Option<EnvLease> {
        let key = self.record.environment.as_deref()?;
        let held = self.worker.environments.hold(key);
        if held.is_none() {
            warn!(replica = %self.record.replica, key, "cannot hold environment of running job");
        }
        held
    }

    /// The end of a command whose supervisor is gone without an exit record.
    fn lost(&mut self, fault: Fault) -> End {
        self.advance(ReplicaEvent::Started);
        let ended = |fault| Ending {
            started_at: self.record.started_at,
            ..Ending::failed(fault, self.worker.clock.now())
        };
        match self.silence.ended {
            None => End::Failed(fault),
            Some(Why::Ordered) => {
                End::EndedHere(Ending { verdict: Verdict::Canceled, fault: None, ..ended(fault) })
            }
            Some(Why::LeaseOver) => {
                let fault = faults::lease_over().why("its supervisor did not answer: the agent ended it");
                End::EndedHere(ended(fault))
            }
        }
    }

    /// Follows the command to its end: ships what it writes, passes on the controller's orders.
    pub(super) async fn run(&mut self, mut running: Running) -> Step<Infallible> {
        let now = self.worker.clock.now();
        self.record.started_at.get_or_insert(now);
        let detail = self.view.borrow().detail.clone(); // the text of the launch about the environment
        self.enter_anyway(ReplicaEvent::Started, &detail).await;
        loop {
            match self.follow(&running, &detail).await {
                Ok(exit) => return Break(End::Exited(Box::new(exit))),
                Err(WaitError::Lost { lost, .. }) => return Break(self.lost(faults::lost(&lost))),
                Err(WaitError::Look(error)) => {
                    warn!(replica = %self.record.replica, error = told(&error), "lost sight of job");
                    let again = self.recall().await?;
                    running = or_end(again.ok_or_else(|| faults::traces_lost(self.dir.path())))?;
                }
            }
        }
    }

    async fn follow(&mut self, running: &Running, detail: &str) -> Result<ExitRecord, WaitError> {
        let (mut progress, mut desired) = (running.progress(), self.desired.clone());
        let (mut backoff, mut again) = (Backoff::default(), Instant::now());
        let mut measuring = self.measure();
        let mut gpus = self.worker.gpus.changes();
        let mut notices = self.worker.preemptions.changes();
        let mut given = self.given.clone();
        self.tell_trouble(detail);
        loop {
            let written = *progress.borrow_and_update();
            self.shipping.job.written(written.log_bytes);
            self.shipping.tracking.written(written.tracking_bytes);
            tokio::select! {
                exit = running.wait() => {
                    measuring.end().await;
                    return exit;
                }
                length = measuring.next() => {
                    self.shipping.system.written(length);
                    continue;
                }
                Ok(()) = progress.changed() => continue,
                Ok(()) = gpus.changed() => {
                    self.tell_trouble(detail);
                    continue;
                }
                Ok(()) = desired.changed() => backoff.reset(),
                Ok(()) = notices.changed() => backoff.reset(),
                Ok(()) = given.changed() => {
                    self.keep_given().await;
                    again = Instant::now(); // it may have more time
                    continue;
                }
                () = tokio::time::sleep_until(again) => {}
            }
            let wanted = desired.borrow_and_update().clone();
            self.heed_notice().await;
            let heard = self.obey(running, &wanted, detail).await;
            again = Instant::now() + if heard { ASK_EVERY } else { backoff.next() };
        }
    }

    /// Journals another proof of what runs. The controller brings it again if this cannot be written.
    async fn keep_given(&mut self) {
        if self.take_given()
            && let Err(error) = self.worker.journal.enter(&self.record).await
        {
            warn!(replica = %self.record.replica, %error, "cannot keep the proof of what runs");
        }
    }

    /// Passes the order on to the shim; `false` when the shim did not answer.
    async fn obey(&mut self, running: &Running, desired: &Desired, usual: &str) -> bool {
        let leased = match desired {
            Desired::Run { until: Some(until), .. } => self.renew(running, *until, usual).await,
            _ => true,
        };
        let Some(stop) = self.stop_wanted(desired) else {
            self.raise_limit(running).await;
            return leased;
        };
        let reason = &stop.reason;
        let now = self.worker.clock.boot();
        self.silence.stop_since.get_or_insert(now);
        if self.told_to_stop.as_ref() != Some(&stop) {
            self.say(&format!("stopping: {reason}"));
        }
        // Repeated to see whether the shim answers: it may have been stopped (SIGSTOP) since.
        let heard = timeout(ASK_WITHIN, running.stop(stop.grace, reason)).await;
        if let Ok(Ok(())) = heard {
            self.told_to_stop = Some(stop);
            self.silence.since = None;
            self.show_preempted();
            return leased;
        }
        warn!(replica = %self.record.replica, ?heard, "cannot pass stop to supervisor");
        self.bear_silence(&format!("stopping: {reason}; ")).await;
        false
    }

    /// Tells the supervisor how long the command may run, where that is not what it knows. One that does not answer is
    /// told again with the next orders; one of an earlier release refuses, and keeps what it knows.
    async fn raise_limit(&mut self, running: &Running) {
        let Some(limit) = self.record.spec.limits.timeout.filter(|limit| self.limit_told != Some(*limit))
        else {
            return;
        };
        match timeout(ASK_WITHIN, running.limit(limit)).await {
            Ok(Ok(_)) => self.limit_told = Some(limit),
            Ok(Err(LimitError::Refused { why, .. })) => {
                warn!(replica = %self.record.replica, why, "cannot change time limit of job");
                self.limit_told = Some(limit);
            }
            heard => {
                warn!(replica = %self.record.replica, ?heard, "cannot tell supervisor the time limit");
            }
        }
    }

    /// What the supervisor is to be told; `None` while the command is to run.
    fn stop_wanted(&self, desired: &Desired) -> Option<Stop> {
        match desired {
            Desired::Run { .. } => self.notice_stop.clone(),
            Desired::Stop { grace, reason } => Some(Stop { grace: *grace, reason: reason.clone() }),
            Desired::Forget | Desired::Disown => {
                let reason = "the controller does not know this attempt any more".to_owned();
                Some(Stop { grace: self.record.spec.limits.grace(), reason })
            }
        }
    }

    /// The supervisor does not answer: publishes that, after `before`, and ends the job if the supervisor's time is
    /// over.
    async fn bear_silence(&mut self, before: &str) {
        self.prove(false);
        let now = self.worker.clock.boot();
        let since = *self.silence.since.get_or_insert(now);
        let halted = self.worker.executor.is_halted(&self.dir);
        let due = self.due(halted, since, now);
        let state = if halted { "is stopped or frozen" } else { "does not answer" };
        let minutes = now.since(since).as_secs() / 60;
        let so_far = if minutes == 0 { String::new() } else { format!(", for {minutes} min now") };
        match due {
            Some((at, why)) if at <= now => {
                error!(replica = %self.record.replica, ?why, "ending job without its supervisor, which {state}");
                self.say(&format!("{before}its supervisor {state}: ended by the agent"));
                self.silence.ended = Some(why);
                self.end_tree().await;
            }
            Some((at, _)) => {
                let left = at.since(now).as_secs() + 1;
                let when = if left >= 60 { format!("{} min", left / 60) } else { "a minute at most".to_owned() };
                self.say(&format!("{before}its supervisor {state}{so_far}; in {when} the agent ends the job itself"));
            }
            None => self.say(&format!(
                "{before}waiting for the supervisor of the command, which {state}{so_far}; the command may go on"
            )),
        }
    }

    /// When the daemon must end the job, and why; `None` as long as it may go on. `since` is when its supervisor
    /// became silent.
    fn due(&mut self, halted: bool, since: Boot, now: Boot) -> Option<(Boot, Why)> {
        let desired = self.desired.borrow().clone();
        let ordered = self.stop_wanted(&desired).map(|stop| {
            let wanted = *self.silence.stop_since.get_or_insert(now);
            let heard = self.told_to_stop.is_some();
            (wanted + stop.grace + due_after(halted, heard), Why::Ordered)
        });
        let lease_over = match &desired {
            Desired::Run { until: Some(until), .. } if *until > UNHEARD => {
                let grace = self.record.spec.limits.grace();
                Deadline::new(Some(*until)).kill_at(grace, Terms::default()).map(|at| (at, Why::LeaseOver))
            }
            // An earlier process of this daemon passed on a lease, at least until the time it journaled.
            Desired::Run { .. }
                if halted && self.record.spec.limits.on_disconnect == OnDisconnect::Replace =>
            {
                let grace = self.record.spec.limits.grace();
                let until = self.record.leave.unwrap_or(since + Terms::default().length);
                Deadline::new(Some(until)).kill_at(grace, Terms::default()).map(|at| (at, Why::LeaseOver))
            }
            _ => None,
        };
        [ordered, lease_over].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    /// Sends the shim the end of the job's lease; `false` when it did not answer. The shim ends the job by itself
    /// when the lease is over; if it did not, the daemon does.
    async fn renew(&mut self, running: &Running, until: Boot, usual: &str) -> bool {
        let renewed = match timeout(ASK_WITHIN, running.renew(until)).await {
            Ok(renewed) => renewed.map_err(Some),
            Err(_) => Err(None),
        };
        let answered =
            matches!(renewed, Ok(_) | Err(Some(RenewError::Unsupported { .. } | RenewError::Refused { .. })));
        if !answered {
            warn!(replica = %self.record.replica, ?renewed, "cannot confirm lease with supervisor");
            self.bear_silence("").await;
            return false;
        }
        self.prove(true);
        if self.silence.since.take().is_some() {
            self.say(usual);
        }
        let knows_none = matches!(renewed, Err(Some(RenewError::Unsupported { .. })));
        // The supervisor knows the leases that earlier processes of this daemon passed on.
        let known = renewed.ok().flatten().unwrap_or_default().max(until);
        self.write_leave(known).await;
        self.enforce(running, known, knows_none).await;
        true
    }

    /// Journals the end of the lease, unless the journaled one is still good enough.
    async fn write_leave(&mut self, until: Boot) {
        if !is_worth_writing(self.record.leave, until, self.worker.clock.boot()) {
            return;
        }
        self.record.leave = Some(until);
        if let Err(error) = self.worker.journal.enter(&self.record).await {
            warn!(replica = %self.record.replica, %error, "cannot journal lease");
        }
    }

    /// Ends a job whose lease is over, when its supervisor should have done so by now, or does not support leases
    /// (`knows_none`).
    async fn enforce(&mut self, running: &Running, until: Boot, knows_none: bool) {
        if until <= UNHEARD {
            return; // the lease is from an earlier controller process, until a time unknown here
        }
        let deadline = Deadline::new(Some(until));
        let (now, grace) = (self.worker.clock.boot(), self.record.spec.limits.grace());
        if deadline.kill_at(grace, Terms::default()).is_some_and(|at| at <= now) {
            error!(replica = %self.record.replica, "ending job: its lease is over");
            self.say("ended by the agent: it ran on without leave");
            self.silence.ended = Some(Why::LeaseOver);
            self.end_tree().await;
        } else if deadline.is_over(now) && knows_none {
            let stopped = running.stop(grace, faults::LEASE_OVER).await;
            warn!(replica = %self.record.replica, ?stopped, "ending job: its lease is over and its supervisor knows of none");
        }
    }

    /// Publishes what is wrong with the GPUs of the command, which goes on as long as it can.
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

    /// Publishes whether there is evidence that the replica runs.
    fn prove(&self, alive: bool) {
        let changed = self.view.send_if_modified(|view| std::mem::replace(&mut view.alive, alive) != alive);
        if changed {
            self.changed.notify_one();
        }
    }

    /// Ends every process of the command that can be found, and its supervisor.
    async fn end_tree(&self) {
        let ended = self.worker.executor.end(&self.dir, Terms::default().kill).await;
        warn!(replica = %self.record.replica, ?ended, "processes of the job were ended: found, and left");
    }
}

/// Whether the record will never be readable.
fn is_final(error: &RecordError) -> bool {
    error.is_damage() || matches!(error, RecordError::Version { .. })
}

fn told(error: &(dyn std::error::Error + 'static)) -> String {
    agent_model::causes::tell(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_leave_is_written_about_twice_a_lease() {
        let at = |seconds| Boot(Duration::from_secs(seconds));
        let worth = |written: Option<u64>, until, now| is_worth_writing(written.map(at), at(until), at(now));
        assert!(worth(None, 160, 100) && worth(Some(100), 160, 100) && worth(Some(129), 160, 100));
        assert!(!worth(Some(130), 160, 100) && !worth(Some(160), 160, 100) && !worth(Some(200), 160, 100));
        assert!(!worth(None, 100, 100), "it is over");
        assert!(!is_worth_writing(None, UNHEARD, Boot::default()), "nobody knows until when");
    }
}
