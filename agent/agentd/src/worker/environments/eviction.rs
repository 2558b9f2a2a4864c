//! Chooses which environments are removed. Pure: no clock, no disk.

use std::time::{Duration, SystemTime};

/// How much of the disk environments may take, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EnvLimits {
    /// Together, in bytes.
    pub(crate) size: u64,
    /// How long an unused one is kept.
    pub(crate) age: Duration,
}

/// An environment as the rule sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate<'a> {
    pub(crate) key: &'a str,
    /// How much of the disk it takes, in bytes.
    pub(crate) bytes: u64,
    /// When it was last used, or made.
    pub(crate) used: SystemTime,
    /// It is pinned, or jobs use it.
    pub(crate) spared: bool,
}

/// The environments to remove, the least recently used first: those that were unused for too long, and more until the
/// rest is within the limit and `wanted` bytes are freed.
pub(crate) fn choose_victims(
    kept: &[Candidate<'_>],
    limits: &EnvLimits,
    now: SystemTime,
    wanted: u64,
) -> Vec<String> {
    let mut taken: u64 = kept.iter().map(|kept| kept.bytes).sum();
    let mut freed: u64 = 0;
    let mut idle: Vec<&Candidate<'_>> = kept.iter().filter(|kept| !kept.spared).collect();
    idle.sort_by_key(|kept| (kept.used, kept.key));
    let mut victims = Vec::new();
    for kept in idle {
        let unused = now.duration_since(kept.used).unwrap_or_default();
        let too_much = kept.bytes > 0 && (taken > limits.size || freed < wanted);
        if too_much || unused > limits.age {
            taken -= kept.bytes;
            freed = freed.saturating_add(kept.bytes);
            victims.push(kept.key.to_owned());
        }
    }
    victims
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `key`, bytes, seconds since it was used, spared.
    fn victims(kept: &[(&'static str, u64, u64, bool)], limits: EnvLimits, wanted: u64) -> Vec<String> {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let candidate = |(key, bytes, ago, spared): &(&'static str, u64, u64, bool)| Candidate {
            key,
            bytes: *bytes,
            used: now - Duration::from_secs(*ago),
            spared: *spared,
        };
        let kept: Vec<_> = kept.iter().map(candidate).collect();
        choose_victims(&kept, &limits, now, wanted)
    }

    #[test]
    fn test_environments_go_by_age_and_size_and_never_when_spared() {
        let limits = EnvLimits { size: 100, age: Duration::from_secs(50) };
        let kept = [
            ("new", 40, 1, false),
            ("used", 60, 90, true),
            ("old", 10, 60, false),
            ("middle", 30, 20, false),
        ];
        assert_eq!(victims(&kept, limits, 0), ["old", "middle"]);
        assert_eq!(victims(&kept, EnvLimits { size: 130, ..limits }, 0), ["old"], "by age alone");
        assert_eq!(victims(&kept, EnvLimits { size: 0, ..limits }, 0), ["old", "middle", "new"]);
        let young = EnvLimits { size: 1000, age: Duration::from_secs(1000) };
        assert!(victims(&kept, young, 0).is_empty());
        // Removing one without bytes would not help.
        let empty = ("empty", 0, 99, false);
        assert_eq!(victims(&[&kept[..], &[empty]].concat(), young, 11), ["old", "middle"]);
        assert_eq!(victims(&[("future", 10, 0, false)], EnvLimits { size: 0, ..young }, 1), ["future"]);
    }
}
