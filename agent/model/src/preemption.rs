//! A machine that will be taken away, and how the time until then is divided.
//!
//! Who says so is the machine's provider, by its metadata service, or an operator. What follows is decided here, and
//! the node acts on it without its controller:
//!
//! ```text
//! notice ├──────────── the command ends: TERM … KILL ───────────┤ outputs are stored ├ deadline
//!          at once a signal and a file with the deadline          margin
//! ```
//!
//! A replica that was told ends, also if the notice is withdrawn. So when a node with a notice falls silent, what it
//! had told is over after the deadline, as if a lease were.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Boot, Timestamp};

/// How much two notices of one deadline may differ: they are told relative to messages that take a while.
const SAME: Duration = Duration::from_secs(2);

/// A notice, as its node knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preemption {
    /// When the machine goes, on the clock of its present boot.
    pub until: Boot,
    /// The same for people, and for the job.
    pub deadline: Timestamp,
    /// Who says so and why, for people.
    pub reason: String,
}

impl Preemption {
    /// What users read: `will be taken away at 08:00:00 UTC: AWS reclaims the spot instance`.
    pub fn describe(&self) -> String {
        describe(self.deadline, &self.reason)
    }

    /// How long a command that is told at `now` may take to end, so that `margin` is left for its outputs; of a short
    /// notice half.
    pub fn grace(&self, now: Boot, margin: Duration) -> Duration {
        let left = self.until.since(now);
        left - margin.min(left / 2)
    }

    /// Whether this is `known`, told again.
    pub fn repeats(&self, known: &Preemption) -> bool {
        let apart = self.until.since(known.until) + known.until.since(self.until);
        self.reason == known.reason && apart < SAME
    }

    /// The one that comes first.
    #[must_use]
    pub fn first(one: Option<Preemption>, other: Option<Preemption>) -> Option<Preemption> {
        [one, other].into_iter().flatten().min_by_key(|notice| notice.until)
    }
}

/// A notice in words.
pub fn describe(deadline: Timestamp, reason: &str) -> String {
    format!("will be taken away at {}: {reason}", deadline.time_of_day())
}

/// Whether two deadlines on one clock are the same one, told again.
pub fn same_deadline(one: Timestamp, other: Timestamp) -> bool {
    one.since(other) + other.since(one) < SAME
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Preemption {
        Preemption {
            until: Boot(Duration::from_secs(seconds)),
            deadline: Timestamp(1_800_000_000_000),
            reason: "maintenance".into(),
        }
    }

    #[test]
    fn test_the_margin_is_kept_and_never_takes_more_than_half() {
        let (now, margin) = (Boot(Duration::from_secs(100)), Duration::from_secs(15));
        assert_eq!(at(220).grace(now, margin), Duration::from_secs(105));
        assert_eq!(at(130).grace(now, margin), Duration::from_secs(15));
        assert_eq!(at(110).grace(now, margin), Duration::from_secs(5));
        assert_eq!(at(90).grace(now, margin), Duration::ZERO);
    }

    #[test]
    fn test_a_notice_told_again_is_no_other_one() {
        let later = |millis| Preemption { until: Boot::from_millis(millis), ..at(0) };
        assert!(later(101_900).repeats(&later(100_000)) && later(100_000).repeats(&later(101_900)));
        assert!(!later(102_000).repeats(&later(100_000)));
        assert!(!Preemption { reason: "another".into(), ..at(5) }.repeats(&at(5)));
        assert_eq!(Preemption::first(Some(at(9)), Some(at(7))), Some(at(7)));
        assert_eq!(Preemption::first(None, Some(at(7))), Some(at(7)));
        assert_eq!(at(1).describe(), "will be taken away at 08:00:00 UTC: maintenance");
    }
}
