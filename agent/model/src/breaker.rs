//! When a machine that fails to start jobs is held back, and for how long: one pure rule.
//!
//! Owns the count of what failed on one machine since a command last ran there. A machine that fails at once has room
//! at once: without this it would take one waiting job after another and fail them all.
//!
//! What the job may have caused holds nothing back before it has met a second owner: one user's broken image, or his
//! own limit of processes, closes no machine to others. Two things need no second owner: a fault in which the job had
//! no part ([`Code::NodeUnfit`]), and another failed start after a hold, because the first job after one is the probe
//! of the machine. Each hold in a row lasts twice as long as the one before.
//!
//! Invariants, held by a property test: one owner alone closes no machine, a hold has an end that is never further than
//! [`LONGEST`] away, also when the clock is set, and a command that runs ends every hold.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Blame, Code, Fault, Principal, Timestamp};

/// The first hold.
const FIRST: Duration = Duration::from_secs(60);
/// The longest one.
pub const LONGEST: Duration = Duration::from_secs(30 * 60);
/// For how long the failed start of one owner waits for that of another.
const TOGETHER: Duration = Duration::from_secs(30 * 60);

/// What is known of failed starts on one machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Breaker {
    /// Since a command last ran: whose start failed last, and when.
    suspect: Option<Suspect>,
    /// The latest hold, which may be over; no command has run since.
    hold: Option<Hold>,
    /// Holds since a command last ran.
    holds: u32,
}

/// A failed start that the job may have caused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Suspect {
    owner: Option<Principal>,
    at: Timestamp,
}

/// Why and until when a machine gets no work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// When it began.
    pub since: Timestamp,
    /// How long it lasts.
    pub length: Duration,
    /// The last fault, for people.
    pub why: String,
}

impl Hold {
    /// When it ends.
    pub fn until(&self) -> Timestamp {
        self.since + self.length
    }

    /// See [`describe`].
    pub fn describe(&self) -> String {
        describe(self.until(), &self.why)
    }

    /// A clock that was set back makes no hold longer.
    fn is_on(&self, now: Timestamp) -> bool {
        self.since <= now && now < self.until()
    }
}

/// What users read of a machine that is held back: `could not start jobs and is tried again at 08:00:00 UTC: …`.
pub fn describe(until: Timestamp, why: &str) -> String {
    format!("could not start jobs and is tried again at {}: {why}", until.time_of_day())
}

impl Breaker {
    /// Takes in that an attempt of `owner` ended before its command ran. True if that changed something.
    pub fn failed(&mut self, owner: Option<&Principal>, fault: &Fault, now: Timestamp) -> bool {
        if !blames_start(fault) || self.hold(now).is_some() {
            return false;
        }
        let other = |suspect: &Suspect| suspect.owner.as_ref() != owner && now.since(suspect.at) < TOGETHER;
        let certain = fault.code == Code::NodeUnfit || self.is_on_trial(now);
        if certain || self.suspect.as_ref().is_some_and(other) {
            let length = FIRST.saturating_mul(1 << self.holds.min(16)).min(LONGEST);
            self.hold = Some(Hold { since: now, length, why: fault.line() });
            self.holds = self.holds.saturating_add(1);
        }
        self.suspect = Some(Suspect { owner: owner.cloned(), at: now });
        true
    }

    /// A command ran, or an operator says that the machine is well. True if that changed something.
    pub fn clear(&mut self) -> bool {
        let was = std::mem::take(self);
        was != Breaker::default()
    }

    /// The hold that is on now.
    pub fn hold(&self, now: Timestamp) -> Option<&Hold> {
        self.hold.as_ref().filter(|hold| hold.is_on(now))
    }

    /// The last hold is over, and nothing has shown yet that the machine works: one job at a time is its probe.
    pub fn is_on_trial(&self, now: Timestamp) -> bool {
        self.hold.as_ref().is_some_and(|hold| !hold.is_on(now))
    }
}

/// A fault of a start that speaks against the machine.
fn blames_start(fault: &Fault) -> bool {
    let of_start = matches!(fault.code, Code::NodeUnfit | Code::LaunchFailed | Code::EnvBuild);
    of_start && fault.blame == Blame::Node
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn owner(uid: u32) -> Principal {
        Principal::Local { uid }
    }

    fn launch() -> Fault {
        Fault::new(Code::LaunchFailed, "no")
    }

    fn held(breaker: &Breaker, now: Timestamp) -> Option<Duration> {
        breaker.hold(now).map(|hold| hold.length)
    }

    #[test]
    fn test_two_owners_hold_a_machine_back_and_one_alone_does_not() {
        let (mut breaker, now) = (Breaker::default(), Timestamp(1_000_000));
        for _ in 0..100 {
            breaker.failed(Some(&owner(1)), &launch(), now);
        }
        assert_eq!(held(&breaker, now), None, "his image may be broken");
        assert!(!breaker.failed(Some(&owner(2)), &Fault::new(Code::CommandFailed, "exit 1"), now));
        let users = Fault { blame: Blame::User, ..launch() };
        assert!(!breaker.failed(Some(&owner(2)), &users, now), "nobody blames the machine");
        let mut late = breaker.clone();
        late.failed(Some(&owner(2)), &launch(), now + TOGETHER);
        assert_eq!(held(&late, now + TOGETHER), None, "they have nothing to do with each other");
        breaker.failed(Some(&owner(2)), &launch(), now);
        assert_eq!(held(&breaker, now), Some(MINUTE));
    }

    #[test]
    fn test_what_the_job_has_no_part_in_needs_one_and_each_hold_is_longer() {
        let (mut breaker, mut now) = (Breaker::default(), Timestamp(1_000_000));
        breaker.failed(Some(&owner(1)), &Fault::new(Code::NodeUnfit, "its disk fails"), now);
        let mut lengths = Vec::new();
        while lengths.len() < 7 {
            let hold = breaker.hold(now).expect("it is on").clone();
            lengths.push(hold.length.as_secs() / 60);
            assert!(!breaker.failed(Some(&owner(2)), &launch(), now), "these were placed before it");
            now = hold.until();
            assert!(breaker.hold(now).is_none() && breaker.is_on_trial(now));
            breaker.failed(Some(&owner(1)), &launch(), now);
        }
        assert_eq!(lengths, [1, 2, 4, 8, 16, 30, 30]);
        assert!(breaker.clear() && !breaker.clear());
        assert!(!breaker.is_on_trial(now));
        breaker.failed(Some(&owner(1)), &launch(), now);
        assert_eq!(held(&breaker, now), None, "it works, so he is the first again");
    }

    proptest! {
        #[test]
        fn test_one_owner_closes_no_machine_and_every_hold_ends(
            steps in prop::collection::vec((0_u32..3, 0_u8..4, -120_i64..3600), 1..60),
        ) {
            let (mut breaker, mut now) = (Breaker::default(), 10_000_000_i64);
            let (mut owners, mut certain) = (std::collections::BTreeSet::new(), false);
            for (who, what, seconds) in steps {
                now += seconds * 1000;
                let at = Timestamp(now.unsigned_abs());
                match what {
                    0 => {
                        breaker.clear();
                        prop_assert!(breaker.hold(at).is_none());
                        (owners, certain) = (Default::default(), false);
                    }
                    1 => {
                        breaker.failed(Some(&owner(who)), &Fault::new(Code::NodeUnfit, "unfit"), at);
                        certain = true;
                    }
                    _ => {
                        breaker.failed(Some(&owner(who)), &launch(), at);
                        owners.insert(who);
                    }
                }
                if let Some(hold) = breaker.hold(at) {
                    prop_assert!(certain || owners.len() > 1);
                    prop_assert!(hold.until().since(at) <= LONGEST);
                }
                prop_assert!(breaker.hold(at + LONGEST).is_none());
            }
        }
    }
}
