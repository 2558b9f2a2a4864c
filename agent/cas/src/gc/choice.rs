//! Which blobs are removed. Pure: no clock, no disk.
//!
//! The least recently used are removed first, and only as many as make the wanted room. Never chosen are blobs that
//! somebody holds, and those used within the lease. A last use that is in the future by more than the lease was
//! recorded before the clock was set back: it means nothing, and protects nothing.

use std::time::{Duration, SystemTime};

use agent_model::Digest;
use agent_model::disk::Watermarks;

use super::Holder;
use crate::Kept;

/// What the store may take of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLimits {
    /// Of the store, in bytes. Above nine tenths of it blobs are removed, down to eight.
    pub size: u64,
    /// Of the disk. Blobs are removed as soon as it is tight: they can be sent again; other users of the disk cannot
    /// wait.
    pub marks: Watermarks,
    /// How long a blob is kept after it was sent, read or asked for.
    pub lease: Duration,
}

/// How much room is taken, and how much is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes the store takes.
    pub taken: u64,
    /// Bytes of the disk that are free.
    pub free: u64,
}

/// What a collection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// The store within its limits.
    Limits,
    /// Also, so many bytes of the disk free beyond the reserve.
    Free(u64),
    /// Everything removed that may be.
    All,
}

/// Why a blob is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Somebody needs it.
    Held(Holder),
    /// It was used within the lease.
    Recent,
    /// Nobody needs it, and there is room.
    Room,
}

/// How many blobs and bytes are kept for one reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stay {
    /// The reason.
    pub reason: Reason,
    /// Blobs.
    pub blobs: u64,
    /// Bytes in them.
    pub bytes: u64,
}

/// What is removed, in order, and what is kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) victims: Vec<Kept>,
    /// Once for each reason, most bytes first.
    pub(crate) stays: Vec<Stay>,
}

/// Bytes to remove for the store to be within its limits.
pub(crate) fn excess(room: Room, limits: &StoreLimits) -> u64 {
    let (high, low) = (limits.size / 10 * 9, limits.size / 10 * 8);
    let too_much = if room.taken > high { room.taken - low } else { 0 };
    let marks = limits.marks;
    let too_full = if room.free < marks.tight() { marks.ample() - room.free } else { 0 };
    too_much.max(too_full)
}

/// Bytes to remove.
pub(crate) fn wanted(room: Room, limits: &StoreLimits, goal: Goal) -> u64 {
    match goal {
        Goal::Limits => excess(room, limits),
        Goal::Free(bytes) => {
            excess(room, limits).max(limits.marks.reserve().saturating_add(bytes).saturating_sub(room.free))
        }
        Goal::All => u64::MAX,
    }
}

/// Chooses `wanted` bytes of all that is `kept`, or as many as may be removed.
pub(crate) fn choose(
    kept: Vec<Kept>,
    holder: impl Fn(&Digest) -> Option<Holder>,
    now: SystemTime,
    lease: Duration,
    wanted: u64,
) -> Choice {
    let (mut choice, mut idle) = (Choice::default(), Vec::new());
    for kept in kept {
        match holder(&kept.digest) {
            Some(holder) => choice.stay(Reason::Held(holder), &kept),
            None if is_recent(kept.used, now, lease) => choice.stay(Reason::Recent, &kept),
            None => idle.push(kept),
        }
    }
    idle.sort_unstable_by_key(|kept| (kept.used, kept.listings, kept.digest));
    let mut chosen: u64 = 0;
    for kept in idle {
        // An empty blob makes no room.
        if chosen < wanted && (kept.digest.size > 0 || wanted == u64::MAX) {
            chosen = chosen.saturating_add(kept.digest.size);
            choice.victims.push(kept);
        } else {
            choice.stay(Reason::Room, &kept);
        }
    }
    choice.stays.sort_by_key(|stay| (std::cmp::Reverse(stay.bytes), stay.reason));
    choice
}

/// Whether the lease of a blob is still valid, as far as the clock can tell.
fn is_recent(used: SystemTime, now: SystemTime, lease: Duration) -> bool {
    let apart = now.duration_since(used).unwrap_or_else(|ahead| ahead.duration());
    apart < lease
}

impl Choice {
    fn stay(&mut self, reason: Reason, kept: &Kept) {
        let known = self.stays.iter().position(|stay| stay.reason == reason);
        let at = known.unwrap_or_else(|| {
            self.stays.push(Stay { reason, blobs: 0, bytes: 0 });
            self.stays.len() - 1
        });
        self.stays[at].blobs += 1;
        self.stays[at].bytes += kept.digest.size;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::UNIX_EPOCH;

    use proptest::prelude::*;

    use super::*;

    const LEASE: Duration = Duration::from_secs(1800);

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn kept(number: u8, size: u64, used: u64) -> Kept {
        Kept { digest: Digest { hash: [number; 32], size }, used: at(used), listings: 0 }
    }

    #[test]
    fn test_limits_have_a_high_and_a_low_water_mark() {
        let limits = StoreLimits { size: 1000, marks: Watermarks::new(100), lease: LEASE };
        let excess = |taken, free| excess(Room { taken, free }, &limits);
        assert_eq!((excess(900, 150), excess(901, 150), excess(2000, 150)), (0, 101, 1200));
        assert_eq!((excess(0, 149), excess(0, 0), excess(950, 0)), (51, 200, 200));
        let goal = |free, goal| wanted(Room { taken: 0, free }, &limits, goal);
        assert_eq!(
            (goal(500, Goal::Limits), goal(500, Goal::Free(600)), goal(500, Goal::Free(10))),
            (0, 200, 0)
        );
        assert_eq!(goal(500, Goal::All), u64::MAX);
        let nothing = StoreLimits { size: 0, marks: Watermarks::new(0), lease: LEASE };
        assert_eq!(wanted(Room { taken: 7, free: 0 }, &nothing, Goal::Limits), 7);
    }

    #[test]
    fn test_the_least_recently_used_go_first_and_reasons_are_told() {
        let all = vec![kept(1, 10, 5_000), kept(2, 10, 1_000), kept(3, 20, 9_500), kept(4, 30, 900)];
        let holder = |digest: &Digest| (digest.hash[0] == 4).then_some(Holder::Outputs);
        let choice = choose(all, holder, at(10_000), LEASE, 1);
        assert_eq!(choice.victims, [kept(2, 10, 1_000)]);
        let reasons = [(Reason::Held(Holder::Outputs), 30), (Reason::Recent, 20), (Reason::Room, 10)];
        assert_eq!(choice.stays, reasons.map(|(reason, bytes)| Stay { reason, blobs: 1, bytes }));
    }

    #[test]
    fn test_a_clock_that_jumps_neither_keeps_for_ever_nor_loses_what_is_held() {
        let all = || vec![kept(1, 10, 1_000_000), kept(2, 10, 1_000_000)];
        let holder = |digest: &Digest| (digest.hash[0] == 2).then_some(Holder::Jobs);
        for (now, gone) in
            [(1_000_000, 0), (1_001_799, 0), (999_000, 0), (1_001_800, 1), (9_000_000, 1), (0, 1)]
        {
            let victims = choose(all(), holder, at(now), LEASE, u64::MAX).victims;
            assert_eq!(victims.len(), gone, "{now}");
            assert!(victims.iter().all(|kept| kept.digest.hash[0] == 1));
        }
    }

    proptest! {
        #[test]
        fn test_choice_keeps_its_rules(
            blobs in prop::collection::vec((0u64..1000, 0u64..20_000, 0u8..4), 0..60),
            wanted in prop_oneof![0u64..30_000, Just(u64::MAX)],
            now in 0u64..20_000,
        ) {
            let all: Vec<Kept> =
                blobs.iter().enumerate().map(|(n, (size, used, _))| kept(n as u8, *size, *used)).collect();
            let held: HashMap<Digest, bool> =
                all.iter().zip(&blobs).map(|(kept, (.., held))| (kept.digest, *held == 0)).collect();
            let holder = |digest: &Digest| held[digest].then_some(Holder::Jobs);
            let choice = choose(all.clone(), holder, at(now), LEASE, wanted);
            let may_go = |kept: &Kept| !held[&kept.digest] && !is_recent(kept.used, at(now), LEASE);
            let freed: u64 = choice.victims.iter().map(|kept| kept.digest.size).sum();
            // Nothing that is held or recent is removed.
            prop_assert!(choice.victims.iter().all(may_go));
            // Enough is removed, or all that may be.
            let possible: u64 = all.iter().filter(|kept| may_go(kept)).map(|kept| kept.digest.size).sum();
            prop_assert!(freed >= wanted.min(possible));
            // No more than needed: without the last one it would be too little.
            if let Some(last) = choice.victims.last().filter(|_| wanted < u64::MAX) {
                prop_assert!(freed - last.digest.size < wanted);
            }
            // In the order of use, and nothing older with bytes in it is kept.
            prop_assert!(choice.victims.is_sorted_by_key(|kept| (kept.used, kept.digest)));
            if let Some(last) = choice.victims.last() {
                let passed = all.iter().filter(|kept| may_go(kept) && kept.digest.size > 0 && kept.used < last.used);
                prop_assert!(passed.into_iter().all(|kept| choice.victims.contains(kept)));
            }
            // Every blob is counted once.
            let stays: u64 = choice.stays.iter().map(|stay| stay.blobs).sum();
            prop_assert_eq!(stays + choice.victims.len() as u64, all.len() as u64);
        }
    }
}
