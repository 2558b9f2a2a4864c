//! Keeps disk for what must always work: logs, records of outcomes, the journal.
//!
//! Three rules. Environments that nobody used for long, or that are too many, make room ([`choose_victims`]). No
//! work that fills the disk begins below the low-water mark ([`admit`]). And a file of ballast, [`super::ballast`],
//! holds room that is given up piece by piece when the disk is full all the same, because jobs filled it: enough
//! for terminal states, exit records, outcomes and the ends of logs.
//!
//! Pure; `worker::runner`, `worker::upkeep` and `worker::environments` measure and ask.

use std::time::{Duration, SystemTime};

use agent_model::size;

/// There is too little room to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Shortfall {
    /// Of bytes.
    #[error("{} are free and {} must stay free", size::binary(*.free), size::binary(*.reserve))]
    Bytes {
        /// Bytes free.
        free: u64,
        /// Bytes that must stay free.
        reserve: u64,
    },
    /// Of inodes.
    #[error("only {left} more files can be made (`df -i`), too few for a job")]
    Files {
        /// Files that can still be made.
        left: u64,
    },
}

/// Whether work that fills the disk may begin, given the bytes that are free, those that must stay so, and how many
/// files can still be made if that is too few.
pub(crate) fn admit(free: u64, reserve: u64, few_files: Option<u64>) -> Result<(), Shortfall> {
    match few_files {
        _ if free < reserve => Err(Shortfall::Bytes { free, reserve }),
        Some(left) => Err(Shortfall::Files { left }),
        None => Ok(()),
    }
}

/// What environments may take of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Together, in bytes.
    pub(crate) size: u64,
    /// How long one stays that nobody uses.
    pub(crate) age: Duration,
    /// Bytes of the disk that must stay free.
    pub(crate) reserve: u64,
}

/// An environment as the rule sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate<'a> {
    pub(crate) key: &'a str,
    /// What it takes of the disk, in bytes.
    pub(crate) bytes: u64,
    /// When it was last used, or made.
    pub(crate) used: SystemTime,
    /// It is pinned, or jobs use it.
    pub(crate) spared: bool,
}

/// The environments that go, the least recently used first: those that nobody used for too long, and as many more
/// as are too much. When less of the disk is free than must stay so, as many go as make it twice that much, so that
/// the next job does not find it low again.
pub(crate) fn choose_victims(
    kept: &[Candidate<'_>],
    limits: &Limits,
    now: SystemTime,
    free: u64,
) -> Vec<String> {
    let mut taken: u64 = kept.iter().map(|kept| kept.bytes).sum();
    let wanted = if free < limits.reserve { limits.reserve.saturating_mul(2) } else { 0 };
    let mut free = free;
    let mut idle: Vec<&Candidate<'_>> = kept.iter().filter(|kept| !kept.spared).collect();
    idle.sort_by_key(|kept| (kept.used, kept.key));
    let mut victims = Vec::new();
    for kept in idle {
        let unused = now.duration_since(kept.used).unwrap_or_default();
        let too_much = kept.bytes > 0 && (taken > limits.size || free < wanted);
        if too_much || unused > limits.age {
            taken -= kept.bytes;
            free = free.saturating_add(kept.bytes);
            victims.push(kept.key.to_owned());
        }
    }
    victims
}

/// The most ballast there is.
const BALLAST: u64 = 16 << 20;
/// In how many pieces it is given up.
const PIECES: u64 = 4;

/// How much ballast a disk of this size should hold.
pub(crate) fn ballast_wanted(disk: u64) -> u64 {
    BALLAST.min(disk / 16)
}

/// How much ballast should be left once a piece of it is given up.
pub(crate) fn lighter(held: u64, wanted: u64) -> u64 {
    held.saturating_sub(wanted.div_ceil(PIECES))
}

/// How much ballast there should be, given what is held, what is wanted, and the bytes that are free beside
/// it. It is taken again only when there is room for it twice over, so that it does not come and go.
pub(crate) fn ballast(held: u64, wanted: u64, free: u64) -> u64 {
    let full = wanted / PIECES / 2;
    if free < full {
        lighter(held, wanted)
    } else if held < wanted && free >= (wanted - held).saturating_add(wanted) {
        wanted
    } else {
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_reserve_is_kept() {
        assert_eq!(admit(10, 10, None), Ok(()));
        assert_eq!(admit(10, 10, Some(7)), Err(Shortfall::Files { left: 7 }));
        let refused = admit(3 << 20, 1 << 30, None).unwrap_err();
        assert_eq!(refused.to_string(), "3 MiB are free and 1 GiB must stay free");
    }

    /// `key`, bytes, seconds since it was used, spared.
    fn victims(kept: &[(&'static str, u64, u64, bool)], limits: Limits, free: u64) -> Vec<String> {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let candidate = |(key, bytes, ago, spared): &(&'static str, u64, u64, bool)| Candidate {
            key,
            bytes: *bytes,
            used: now - Duration::from_secs(*ago),
            spared: *spared,
        };
        let kept: Vec<_> = kept.iter().map(candidate).collect();
        choose_victims(&kept, &limits, now, free)
    }

    #[test]
    fn test_environments_go_by_age_and_size_and_never_when_spared() {
        let limits = Limits { size: 100, age: Duration::from_secs(50), reserve: 10 };
        let kept = [
            ("new", 40, 1, false),
            ("used", 60, 90, true),
            ("old", 10, 60, false),
            ("middle", 30, 20, false),
        ];
        assert_eq!(victims(&kept, limits, 1000), ["old", "middle"]);
        assert_eq!(victims(&kept, Limits { size: 130, ..limits }, 1000), ["old"], "by age alone");
        assert_eq!(victims(&kept, Limits { size: 0, ..limits }, 1000), ["old", "middle", "new"]);
        let young = Limits { size: 1000, age: Duration::from_secs(1000), reserve: 10 };
        assert!(victims(&kept, young, 1000).is_empty());
        // A disk below its reserve gets it back twice; what has no bytes would not help.
        let empty = ("empty", 0, 99, false);
        assert_eq!(victims(&[&kept[..], &[empty]].concat(), young, 9), ["old", "middle"]);
        assert_eq!(victims(&[("future", 10, 0, false)], Limits { size: 0, ..young }, 0), ["future"]);
    }

    #[test]
    fn test_ballast_goes_piece_by_piece_and_comes_back_whole() {
        const MIB: u64 = 1 << 20;
        let wanted = ballast_wanted(1 << 40);
        assert_eq!((wanted, ballast_wanted(64 * MIB)), (16 * MIB, 4 * MIB));
        let mut held = wanted;
        for left in [12, 8, 4, 0, 0] {
            held = ballast(held, wanted, MIB);
            assert_eq!(held, left * MIB);
        }
        assert_eq!(ballast(4 * MIB, wanted, 2 * MIB), 4 * MIB, "a little room is enough to write records");
        assert_eq!(ballast(4 * MIB, wanted, 27 * MIB), 4 * MIB, "not while that would fill the disk again");
        assert_eq!(ballast(4 * MIB, wanted, 28 * MIB), wanted);
        assert_eq!(ballast(wanted, wanted, u64::MAX), wanted);
        assert_eq!(ballast(0, 0, 0), 0);
    }
}
