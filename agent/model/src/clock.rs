//! Time as a value that is passed in.
//!
//! Wall time ([`Timestamp`]) is for people: displayed times, and the dates they set. Leases and limits count
//! [`Boot`] time, which no administrator sets and which continues while the machine sleeps. Nothing compares the
//! clocks of two machines.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// A moment of wall time, in milliseconds since 1970-01-01 UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// For people of any time zone: `2027-01-15 08:00:00 UTC`.
    pub fn utc(self) -> String {
        let (days, seconds) = (self.0 / 1000 / 86_400, self.0 / 1000 % 86_400);
        // Days to civil date, counted in eras of 400 years that begin on 1 March of year 0.
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
        let month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month + 2) / 5 + 1;
        let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        let year = era * 400 + year + next;
        format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
    }

    /// The same without the date: `08:00:00 UTC`.
    pub fn time_of_day(self) -> String {
        self.utc().split_once(' ').map_or_else(String::new, |(_, time)| time.to_owned())
    }

    /// For programs: `2027-01-15T08:00:00Z`.
    pub fn rfc3339(self) -> String {
        self.utc().replacen(' ', "T", 1).replace(" UTC", "Z")
    }

    /// The time from `earlier` to `self`; zero if the clock went back.
    pub fn since(self, earlier: Timestamp) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl std::ops::Add<Duration> for Timestamp {
    type Output = Timestamp;
    fn add(self, duration: Duration) -> Timestamp {
        Timestamp(self.0.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }
}

/// A moment of one boot of one machine: the time since that boot, sleep included. On disk and on the wire it is
/// in milliseconds, rounded down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Boot(pub Duration);

impl Boot {
    /// The time from `earlier` to `self`; zero when it is the later one.
    pub fn since(self, earlier: Boot) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Whole milliseconds since boot.
    pub fn millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }

    /// From whole milliseconds since boot.
    pub fn from_millis(millis: u64) -> Boot {
        Boot(Duration::from_millis(millis))
    }
}

impl std::ops::Add<Duration> for Boot {
    type Output = Boot;
    fn add(self, duration: Duration) -> Boot {
        Boot(self.0.saturating_add(duration))
    }
}

impl Serialize for Boot {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(self.millis())
    }
}

impl<'de> Deserialize<'de> for Boot {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Boot, D::Error> {
        u64::deserialize(from).map(Boot::from_millis)
    }
}

/// Where the time comes from.
pub trait Clock: Send + Sync + 'static {
    /// Wall time now.
    fn now(&self) -> Timestamp;

    /// Boot time now.
    fn boot(&self) -> Boot;
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods, reason = "this is the one place that reads the wall clock")]
    fn now(&self) -> Timestamp {
        let since = std::time::SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    fn boot(&self) -> Boot {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        Boot(Duration::try_from(now).unwrap_or_default())
    }
}

/// The machine's clock, wrong by so many milliseconds: to test the effects.
#[derive(Debug, Clone, Copy)]
pub struct WrongClock(pub i64);

impl Clock for WrongClock {
    fn now(&self) -> Timestamp {
        Timestamp(SystemClock.now().0.saturating_add_signed(self.0))
    }

    fn boot(&self) -> Boot {
        SystemClock.boot()
    }
}

/// A clock that is stopped until a test moves it; wall and boot time move together.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that shows `start`.
    pub fn new(start: Timestamp) -> ManualClock {
        ManualClock(AtomicU64::new(start.0))
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(u64::try_from(by.as_millis()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }

    fn boot(&self) -> Boot {
        Boot::from_millis(self.0.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_moments_are_civil() {
        for (millis, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399_999, "2000-02-28 23:59:59 UTC"),
            (951_868_800_000, "2000-03-01 00:00:00 UTC"),
            (1_800_000_000_000, "2027-01-15 08:00:00 UTC"),
        ] {
            assert_eq!(Timestamp(millis).utc(), text);
        }
    }
}
