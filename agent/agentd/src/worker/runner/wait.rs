//! How the steps of a runner wait for resources: room, a store, a container engine, memory.
//!
//! One way for all: the view shows the reason ([`Runner::wait`]), the pause before the next try grows, and a stop
//! ends the wait where the caller allows it ([`Runner::unless_stopped`]). Each step decides with `worker::faults`
//! which errors are worth a wait. The wait for room is different: it checks the disk instead of trying again.

use std::error::Error;
use std::ops::ControlFlow::{Break, Continue};
use std::time::Duration;

use agent_model::causes;
use tokio::time::Instant;
use tracing::warn;

use super::{End, Runner, Step};
use crate::disk::Failing;
use crate::worker::backoff::Backoff;
use crate::worker::faults;

/// How long a build or a start waits for descriptors, processes or memory before it is left to another node.
pub(super) const LACK_PATIENCE: Duration = Duration::from_secs(60);

/// How long one waits for a disk that fails before it is left to another node, and this one gets no more jobs.
pub(super) const DISK_PATIENCE: Duration = Duration::from_secs(5 * 60);

/// The wait before the next try of a write that failed for lack of room although there is some.
const ROOM_EVERY: Duration = Duration::from_secs(1);

/// How often such a write is tried again.
const IN_VAIN: u32 = 3;

/// A write of the node's own records that is tried until it succeeds, or there is no hope.
pub(super) struct Tries {
    begun: Instant,
    backoff: Backoff,
    /// How often there was no room although there is some.
    in_vain: u32,
    /// The disk fails: until the write succeeds or is given up.
    failing: Option<Failing>,
}

impl Tries {
    pub(super) fn begin() -> Tries {
        Tries { begun: Instant::now(), backoff: Backoff::default(), in_vain: 0, failing: None }
    }
}

impl Runner {
    /// Publishes that it waits, and for `what`, and sleeps, longer each time.
    pub(super) async fn wait(&self, backoff: &mut Backoff, what: &str) {
        self.wait_telling(backoff, what, |what| self.say(&format!("waiting {what}"))).await;
    }

    /// The same for a step that publishes its state in another way.
    pub(super) async fn wait_telling(&self, backoff: &mut Backoff, what: &str, tell: impl FnOnce(&str)) {
        warn!(replica = %self.record.replica, "waiting {what}");
        tell(what);
        tokio::time::sleep(backoff.next()).await;
    }

    /// The same for a store of blobs that is unreachable or damaged.
    pub(super) async fn wait_for_store(
        &self,
        backoff: &mut Backoff,
        error: &(dyn Error + Send + Sync + 'static),
    ) {
        self.wait(backoff, &format!("for the store of blobs: {}", faults::store_says(error))).await;
    }

    /// Does `work`, but drops it when the controller does not want the replica to run any more, or the machine will be
    /// taken away.
    pub(super) async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Step<T> {
        tokio::select! {
            biased;
            notice = self.noticed() => Break(End::Preempted(notice)),
            done = self.unless_canceled(work) => done,
        }
    }

    /// Does `work`, but drops it when the controller does not want the replica to run any more.
    pub(super) async fn unless_canceled<T>(&self, work: impl Future<Output = T>) -> Step<T> {
        let mut desired = self.desired.clone();
        // A closed channel (the daemon stops) is no stop of the replica.
        let stopped = async { desired.wait_for(|wanted| !wanted.is_run()).await.is_ok() };
        tokio::select! {
            biased;
            true = stopped => Break(End::Stopped),
            done = work => Continue(done),
        }
    }

    /// Waits while the disk is too full to go on.
    pub(super) async fn admit(&self) -> Step<()> {
        self.unless_stopped(self.until_room()).await
    }

    /// Returns when root's helper is there, if there is one; the view shows the wait.
    pub(super) async fn until_helped(&self) -> Step<()> {
        if !agent_spawn::has_helper() {
            return Continue(());
        }
        let (usual, mut backoff) = (self.view.borrow().detail.clone(), Backoff::default());
        loop {
            let Some(wrong) = agent_blocking::blocking(agent_spawn::what_is_wrong).await else {
                self.say(&usual);
                return Continue(());
            };
            self.unless_stopped(self.wait(&mut backoff, &for_helper(&wrong))).await?;
        }
    }

    /// Returns when there is room; the view shows the wait. A stop does not end it.
    pub(super) async fn until_room(&self) {
        let Err(shortfall) = self.worker.disk.room() else { return };
        let fault = faults::disk_full(&shortfall, &self.worker.config.state_dir);
        warn!(replica = %self.record.replica, %fault, "waiting for room");
        let detail = self.view.borrow().detail.clone();
        self.say(&format!("waiting for room: {fault}"));
        self.worker.disk.until_room().await;
        self.say(&detail);
    }

    /// Returns when the write that failed with `error` may be tried again: when there is room, or, of one that failed
    /// otherwise, after a while, for [`DISK_PATIENCE`]. After a few failures although there is room, it needs more than
    /// there ever is.
    pub(super) async fn write_again(
        &self,
        error: &(dyn Error + Send + Sync + 'static),
        tries: &mut Tries,
    ) -> Step<()> {
        if !faults::is_no_space(error) && tries.begun.elapsed() < DISK_PATIENCE {
            let why = causes::tell(error);
            tries.failing.get_or_insert_with(|| self.worker.disk.is_waited_for(&why));
            let what = format!("for the disk of the node: {why}");
            return self.unless_stopped(self.wait(&mut tries.backoff, &what)).await;
        }
        if !faults::is_no_space(error) || tries.in_vain == IN_VAIN {
            return Break(End::Failed(faults::unusable(error)));
        }
        if self.worker.disk.give_way() {
            return Continue(());
        }
        if self.worker.disk.room().is_err() {
            return self.admit().await;
        }
        // The room may have been freed since the failure.
        tries.in_vain += 1;
        self.unless_stopped(tokio::time::sleep(ROOM_EVERY)).await
    }
}

/// What a step waits for that cannot go on without root's helper.
pub(super) fn for_helper(wrong: &str) -> String {
    format!("for root's helper: {wrong}; `sudo systemctl restart agent-spawn.socket agent-spawn.service`")
}
