//! One `Sync` stream with the controller, and when the next report is due in it.
//!
//! Hides the lease, the inventory that is still owed, and the pace: a change is reported at once after a pause, and
//! otherwise [`GAP`] after the report before it. A job takes eight steps, those of a short one within milliseconds; each
//! report and its answer describe all replicas, so one report tells several steps. Nothing of a job waits for them.

use std::time::Duration;

use agent_proto::v1;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Streaming;

use super::FIRST_LEASE;

/// The shortest time between two reports.
const GAP: Duration = Duration::from_millis(10);
/// The longest time between two reports, however long the lease.
const EVERY: Duration = Duration::from_secs(5);
/// A controller that is silent for this long is unreachable, however long the lease: it answers each report.
const PATIENCE: Duration = Duration::from_secs(20);
/// Until how many answers a changed inventory is repeated: a report may be replaced by the next before it is sent.
const INVENTORY_TIMES: u32 = 3;

/// See the module.
pub(super) struct Conversation {
    reports: watch::Sender<v1::NodeReport>,
    pub(super) orders: Streaming<v1::NodeOrders>,
    lease: Duration,
    /// When the controller last sent orders.
    heard: Instant,
    reported: Instant,
    /// Something changed since then.
    pub(super) changed: bool,
    /// When a round over all replicas is due.
    round_at: Instant,
    /// How many more answers the inventory is repeated for.
    inventory_due: u32,
}

impl Conversation {
    /// One in which the first report was sent, with the inventory.
    pub(super) fn new(
        reports: watch::Sender<v1::NodeReport>,
        orders: Streaming<v1::NodeOrders>,
    ) -> Conversation {
        let now = Instant::now();
        Conversation {
            reports,
            orders,
            lease: FIRST_LEASE,
            heard: now,
            reported: now,
            changed: false,
            round_at: now,
            inventory_due: INVENTORY_TIMES,
        }
    }

    /// The controller sent these orders.
    pub(super) fn hear(&mut self, orders: &v1::NodeOrders) {
        self.heard = Instant::now();
        self.inventory_due = self.inventory_due.saturating_sub(1);
        self.lease = orders.lease.and_then(|lease| lease.try_into().ok()).unwrap_or(self.lease);
    }

    /// For how long the controller has been silent, once that is too long.
    pub(super) fn silence(&self) -> Option<Duration> {
        let patience = self.lease.min(PATIENCE);
        (self.heard.elapsed() > patience).then_some(patience)
    }

    /// The inventory changed.
    pub(super) fn owe_inventory(&mut self) {
        (self.inventory_due, self.changed) = (INVENTORY_TIMES, true);
    }

    /// Whether the next report should contain the inventory.
    pub(super) fn owes_inventory(&self) -> bool {
        self.inventory_due > 0
    }

    pub(super) fn report_at(&self) -> Instant {
        self.reported + if self.changed { GAP } else { self.period() }
    }

    /// The time between two reports that say nothing new.
    fn period(&self) -> Duration {
        (self.lease / 3).min(EVERY)
    }

    /// Whether a round over all replicas is due, which it is then not again for a while.
    pub(super) fn is_round_due(&mut self) -> bool {
        let (now, due) = (Instant::now(), self.round_at);
        if due <= now {
            self.round_at = now + self.period();
        }
        due <= now
    }

    /// Sends a report. It states the current state, so it may replace one that was not sent yet.
    pub(super) fn tell(&mut self, report: v1::NodeReport) {
        self.reports.send_replace(report);
        (self.reported, self.changed) = (Instant::now(), false);
    }

    /// Ends the stream after the last report was heard.
    pub(super) async fn end(self) {
        let Conversation { reports, mut orders, .. } = self;
        drop(reports);
        while let Ok(Some(_)) = orders.message().await {}
    }
}
