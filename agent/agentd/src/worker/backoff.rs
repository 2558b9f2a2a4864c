//! The wait before the next attempt to reach the controller: it doubles up to a limit, and half of it is random, so
//! that many nodes do not reconnect at the same instant.

use std::time::Duration;

/// Waits of 100 ms to 5 s.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    attempt: u32,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(5);

    /// How long to wait now.
    pub(crate) fn next(&mut self) -> Duration {
        let whole = Self::FIRST.saturating_mul(1 << self.attempt.min(10)).min(Self::LONGEST);
        self.attempt = self.attempt.saturating_add(1);
        // Without a source of randomness every node waits the whole time, which only spreads the load less.
        let chance = getrandom::u32().unwrap_or(u32::MAX);
        whole / 2 + whole.mul_f64(f64::from(chance) / f64::from(u32::MAX) / 2.0)
    }

    /// It worked: the next failure is a first one.
    pub(crate) fn reset(&mut self) {
        self.attempt = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_waits_grow_within_their_limits() {
        let mut backoff = Backoff::default();
        for attempt in 0..40 {
            let wait = backoff.next();
            assert!(wait >= Backoff::FIRST / 2 && wait <= Backoff::LONGEST, "{wait:?}");
            assert!(attempt < 6 || wait >= Backoff::LONGEST / 2, "{wait:?}");
        }
        backoff.reset();
        assert!(backoff.next() <= Backoff::FIRST);
    }
}
