//! How long a node may run a job without hearing from the controller, and when the controller may give the
//! job to another one.
//!
//! Two machines never compare clocks. The node counts from the moment it *sent* the report that was answered
//! and uses the shorter time; the controller counts from the moment it *answered* and uses the longer one.
//! So however the network delays the answer, the node's time is over first, and by the time the controller's
//! is over the job has had its grace and has been killed. Both count time that the machine sleeps ([`Boot`]).
//!
//! ```text
//! node        sent ├────────── length · (1−ρ) − margin ──┤ TERM ├── grace ──┤ KILL
//! controller     answered ├────────── length · (1+ρ) + margin + grace + kill ──────────┤ a new epoch
//! ```
//!
//! Used by `control::lease`, which computes both times, and by `worker::runner`, which kills what is left.

use std::time::Duration;

use crate::Boot;

/// The length of a lease and what surrounds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// How long a lease lasts.
    pub length: Duration,
    /// How much two clocks may drift apart during a lease, in parts of [`Terms::DRIFT_PARTS`].
    pub drift: u32,
    /// How late rounding, timers and scheduling may make either side.
    pub margin: Duration,
    /// From the final signal to the last process being gone.
    pub kill: Duration,
    /// How long ranks of a gang that could start wait for those that could not yet.
    pub gather: Duration,
    /// How long after its date a machine that was to be taken away, and still answers, gets no new job.
    pub passed: Duration,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms {
            length: Duration::from_secs(60),
            drift: 1,
            margin: Duration::from_secs(1),
            kill: Duration::from_secs(5),
            gather: Duration::from_secs(30 * 60),
            passed: Duration::from_secs(5 * 60),
        }
    }
}

impl Terms {
    /// The unit of [`Terms::drift`].
    pub const DRIFT_PARTS: u32 = 1000;

    /// Until when the node may run a job, by its own clock, if the answered report was sent at `sent`.
    #[must_use]
    pub fn held_until(self, sent: Boot) -> Boot {
        sent + (self.length - self.length * self.drift / Terms::DRIFT_PARTS).saturating_sub(self.margin)
    }

    /// From when on the controller, by its own clock, may give a job with this `grace` to another node, if its
    /// last answer was sent at `answered`.
    #[must_use]
    pub fn granted_until(self, answered: Boot, grace: Duration) -> Boot {
        let drift = self.length * self.drift / Terms::DRIFT_PARTS;
        answered + self.length + drift + self.margin + grace + self.kill
    }

    /// From when on the controller, by its own clock, knows that nothing runs any more of what a silent node ends
    /// because it will be taken away `after` so long.
    #[must_use]
    pub fn gone_at(self, now: Boot, after: Duration) -> Boot {
        now + after + after * self.drift / Terms::DRIFT_PARTS + self.margin + self.kill
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_node_is_through_before_the_controller_goes_on() {
        let terms = Terms::default();
        let at = Boot(Duration::from_secs(1000));
        let grace = Duration::from_secs(10);
        let (held, granted) = (terms.held_until(at), terms.granted_until(at, grace));
        assert_eq!(held.since(at), Duration::from_millis(58_940));
        assert_eq!(granted.since(at), Duration::from_millis(76_060));
        assert!(held + grace + terms.kill < granted);
    }
}
