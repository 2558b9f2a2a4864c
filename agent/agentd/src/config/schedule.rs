//! Times of the week as operators write them: `19:00 mon-fri, 14:00 sat`, in the machine's local time.

use std::fmt;
use std::str::FromStr;

use agent_model::Timestamp;
use jiff::civil::{DateTime, Time};
use jiff::tz::TimeZone;

const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];

/// One time of some days.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Moments {
    time: Time,
    /// From Monday on.
    days: [bool; 7],
}

/// See the module; without a time there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Schedule {
    said: String,
    moments: Vec<Moments>,
}

/// What a valid text is.
pub(crate) const EXPECTED: &str =
    "times and days such as `19:00 mon-fri, 14:00 sat`; without days it is every day";

impl FromStr for Schedule {
    type Err = ();
    fn from_str(text: &str) -> Result<Schedule, ()> {
        let said = text.trim().to_owned();
        let parts = said.split(',').map(str::trim).filter(|part| !part.is_empty());
        let moments = parts.map(|part| moments(part).ok_or(())).collect::<Result<_, ()>>()?;
        Ok(Schedule { said, moments })
    }
}

fn moments(text: &str) -> Option<Moments> {
    let mut words = text.split_whitespace();
    let (hour, minute) = words.next()?.split_once(':')?;
    let number = |text: &str| (text.len() == 2).then(|| text.parse::<i8>().ok()).flatten();
    let time = Time::new(number(hour)?, number(minute)?, 0, 0).ok()?;
    let days = match (words.next(), words.next()) {
        (None, _) => [true; 7],
        (Some(word), None) => days(word)?,
        _ => return None,
    };
    Some(Moments { time, days })
}

fn days(word: &str) -> Option<[bool; 7]> {
    let day = |word: &str| DAYS.iter().position(|day| day.eq_ignore_ascii_case(word));
    let (first, last) = match word.split_once('-') {
        Some((first, last)) => (day(first)?, day(last)?),
        None => (day(word)?, day(word)?),
    };
    let mut all = [false; 7];
    // A range may go over the end of the week.
    (0..=(last + 7 - first) % 7).for_each(|more| all[(first + more) % 7] = true);
    Some(all)
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.said)
    }
}

impl Schedule {
    pub(crate) fn is_empty(&self) -> bool {
        self.moments.is_empty()
    }

    /// The last time that has come, of the last week.
    pub(crate) fn last(&self, now: Timestamp) -> Option<Timestamp> {
        self.around(now, &TimeZone::system(), -7..=0).filter(|at| *at <= now).max()
    }

    /// The next one.
    pub(crate) fn next(&self, now: Timestamp) -> Option<Timestamp> {
        self.around(now, &TimeZone::system(), 0..=7).filter(|at| *at > now).min()
    }

    /// All of these days, counted from today. A time that the clock leaves out, in spring, is the one after it.
    fn around(
        &self,
        now: Timestamp,
        zone: &TimeZone,
        days: std::ops::RangeInclusive<i8>,
    ) -> impl Iterator<Item = Timestamp> {
        let now = jiff::Timestamp::from_millisecond(i64::try_from(now.0).unwrap_or(i64::MAX));
        let today = now.map(|now| now.to_zoned(zone.clone()).date()).unwrap_or_default();
        let dates =
            days.filter_map(move |day| today.checked_add(jiff::Span::new().days(i64::from(day))).ok());
        dates.flat_map(move |date| {
            let weekday = usize::from(date.weekday().to_monday_zero_offset().unsigned_abs());
            let here = self.moments.iter().filter(move |moments| moments.days[weekday]);
            here.filter_map(move |moments| {
                let at = zone.to_timestamp(DateTime::from_parts(date, moments.time)).ok()?;
                u64::try_from(at.as_millisecond()).ok().map(Timestamp)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        let at: jiff::Timestamp = text.parse().unwrap();
        Timestamp(u64::try_from(at.as_millisecond()).unwrap())
    }

    #[test]
    fn test_times_are_of_days() {
        let schedule: Schedule = "19:00 mon-fri, 14:00 sat".parse().unwrap();
        let of = |from, to, now| schedule.around(at(now), &TimeZone::UTC, from..=to).collect::<Vec<_>>();
        // 2026-11-26 is a Thursday.
        assert_eq!(
            of(0, 3, "2026-11-26T12:00:00Z"),
            [at("2026-11-26T19:00:00Z"), at("2026-11-27T19:00:00Z"), at("2026-11-28T14:00:00Z"),]
        );
        assert_eq!(
            of(-2, 0, "2026-11-29T12:00:00Z"),
            [at("2026-11-27T19:00:00Z"), at("2026-11-28T14:00:00Z")]
        );
        let over: Schedule = "00:30 sun-mon".parse().unwrap();
        assert_eq!(over.moments[0].days, [true, false, false, false, false, false, true]);
        assert_eq!("07:05".parse::<Schedule>().unwrap().moments[0].days, [true; 7]);
        assert!("".parse::<Schedule>().unwrap().is_empty());
    }

    #[test]
    fn test_local_time_counts() {
        let schedule: Schedule = "19:00".parse().unwrap();
        let zone = TimeZone::fixed(jiff::tz::offset(2));
        let of = schedule.around(at("2026-11-26T23:30:00Z"), &zone, 0..=0).collect::<Vec<_>>();
        assert_eq!(of, [at("2026-11-27T17:00:00Z")], "there it is the next day already");
    }

    #[test]
    fn test_other_words_are_refused() {
        for bad in [
            "19",
            "7:00",
            "24:00",
            "19:60",
            "19:00 weekdays x",
            "19:00 mo",
            "19:00 mon-",
            "mon 19:00",
            "-1:00",
        ] {
            assert_eq!(bad.parse::<Schedule>(), Err(()), "{bad}");
        }
    }
}
