//! How the steps of a runner wait for what others must give: room, a store, a container engine, memory.
//!
//! One way for all. Whoever asks is told what for ([`Runner::wait`]), the next try comes after a pause that grows, and
//! a stop ends the wait where the caller lets it ([`Runner::unless_stopped`]). What is worth a wait each step knows
//! itself, and `worker::faults` tells it. Room has a wait of its own: it is looked at, not tried.

use std::error::Error;
use std::ops::ControlFlow::{Break, Continue};
use std::time::Duration;

use tracing::warn;

use super::{End, Runner, Step};
use crate::worker::backoff::Backoff;
use crate::worker::faults;
use crate::worker::journal::Journal;

/// How long a build or a start waits for descriptors, processes or memory before it is for another node.
pub(super) const LACK_PATIENCE: Duration = Duration::from_secs(60);

/// How long it is waited before a write is tried again that found no room though there is some.
const ROOM_EVERY: Duration = Duration::from_secs(1);

/// How often it is tried again.
const IN_VAIN: u32 = 3;

impl<J: Journal> Runner<J> {
    /// Says that it waits, and `what` for, and lets a while pass, a longer one each time.
    pub(super) async fn wait(&self, backoff: &mut Backoff, what: &str) {
        self.wait_telling(backoff, what, |what| self.say(&format!("waiting {what}"))).await;
    }

    /// The same for a step that speaks in another way.
    pub(super) async fn wait_telling(&self, backoff: &mut Backoff, what: &str, tell: impl FnOnce(&str)) {
        warn!(replica = %self.record.replica, "waiting {what}");
        tell(what);
        tokio::time::sleep(backoff.next()).await;
    }

    /// The same for a store of blobs that is away, or not sound.
    pub(super) async fn wait_for_store(
        &self,
        backoff: &mut Backoff,
        error: &(dyn Error + Send + Sync + 'static),
    ) {
        self.wait(backoff, &format!("for the store of blobs: {}", faults::store_says(error))).await;
    }

    /// Work that is dropped when the controller wants something else than that the replica runs.
    pub(super) async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Step<T> {
        let mut desired = self.desired.clone();
        // A controller that is gone stops nothing.
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

    /// Returns when there is room. Whoever asks why it waits is told. Knows of no stop.
    pub(super) async fn until_room(&self) {
        let Err(shortfall) = self.worker.disk.room() else { return };
        let fault = faults::disk_full(&shortfall, &self.worker.config.state_dir);
        warn!(replica = %self.record.replica, %fault, "waiting for room");
        let detail = self.view.borrow().detail.clone();
        self.say(&format!("waiting for room: {fault}"));
        self.worker.disk.until_room().await;
        self.say(&detail);
    }

    /// Returns when what was refused with `error` may be tried again: there was no room, and there may be now. What is
    /// refused `in_vain` while there is room wants more than there ever is.
    pub(super) async fn room_for(
        &self,
        error: &(dyn Error + Send + Sync + 'static),
        in_vain: &mut u32,
    ) -> Step<()> {
        if !faults::is_no_space(error) || *in_vain == IN_VAIN {
            return Break(End::Failed(faults::unusable(error)));
        }
        if self.worker.disk.give_way() {
            return Continue(());
        }
        if self.worker.disk.room().is_err() {
            return self.admit().await;
        }
        // Somebody may have freed it only since.
        *in_vain += 1;
        self.unless_stopped(tokio::time::sleep(ROOM_EVERY)).await
    }
}
