//! Moments as people name them on a command line: `22:00`, `+2h`, `2026-12-01 08:00`, or as programs do.
//!
//! Pure but for [`moment`], which asks the clock and the time zone of the machine. A time of day is the next one; a time
//! that the clocks leave out, in spring, is the one after it, and of two, in autumn, the first.

use std::time::Duration;

use agent_model::{Clock, SystemClock, Timestamp};
use jiff::civil::{Date, DateTime, Time};
use jiff::tz::TimeZone;

/// What can be written.
const FORMS: &str = "write 22:00, +2h, 2026-12-01 08:00, or 2026-12-01T08:00:00+01:00";

/// Reads a moment that is to come.
pub(crate) fn moment(text: &str) -> Result<Timestamp, String> {
    moment_from(text, SystemClock.now(), &TimeZone::system())
}

fn moment_from(text: &str, now: Timestamp, zone: &TimeZone) -> Result<Timestamp, String> {
    let text = text.trim();
    let at = read(text, now, zone).ok_or(FORMS)?;
    match at > now {
        true => Ok(at),
        false => Err(format!("{} is over already", at.utc())),
    }
}

fn read(text: &str, now: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
    if let Some(length) = text.strip_prefix("now").unwrap_or(text).strip_prefix('+') {
        return Some(now + length_of(length)?);
    }
    if let Ok(moment) = text.parse::<jiff::Timestamp>() {
        return timestamp(moment);
    }
    let local = |civil: DateTime| timestamp(zone.to_timestamp(civil).ok()?);
    // A time is found in a date with one, too, so that comes first.
    if let Ok(civil) = text.parse::<DateTime>() {
        return local(civil);
    }
    if let Ok(time) = text.parse::<Time>() {
        let here = jiff::Timestamp::from_millisecond(i64::try_from(now.0).ok()?).ok()?;
        let today = here.to_zoned(zone.clone()).date();
        let days = [Some(today), today.tomorrow().ok()].into_iter().flatten();
        return days.filter_map(|day| local(day.to_datetime(time))).find(|at| *at > now);
    }
    local(text.parse::<Date>().ok()?.to_datetime(Time::midnight()))
}

/// `90s`, `30m`, `2h`, `7d`, or a word for the unit as Slurm has it; a bare number is seconds.
fn length_of(text: &str) -> Option<Duration> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit {
        "" | "s" | "sec" | "second" | "seconds" => 1,
        "m" | "min" | "minute" | "minutes" => 60,
        "h" | "hour" | "hours" => 3600,
        "d" | "day" | "days" => 86_400,
        "week" | "weeks" => 604_800,
        _ => return None,
    };
    Some(Duration::from_secs(number.parse::<u32>().ok()?.into()) * factor)
}

fn timestamp(moment: jiff::Timestamp) -> Option<Timestamp> {
    u64::try_from(moment.as_millisecond()).ok().map(Timestamp)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        timestamp(text.parse().unwrap()).unwrap()
    }

    #[test]
    fn test_moments_are_read_as_people_mean_them() {
        // Clocks go from 2 to 3 on 29 March, and from 3 to 2 on 25 October.
        let berlin = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap();
        let york = TimeZone::posix("EST5EDT,M3.2.0,M11.1.0").unwrap();
        for (zone, now, text, expected) in [
            (&berlin, "2026-11-29T20:40:00+01:00", "22:00", "2026-11-29T22:00:00+01:00"),
            (&berlin, "2026-11-29T22:00:00+01:00", "22:00", "2026-11-30T22:00:00+01:00"),
            (&berlin, "2026-11-29T22:00:00+01:00", "+2h", "2026-11-30T00:00:00+01:00"),
            (&berlin, "2026-11-29T22:00:00+01:00", "now+90minutes", "2026-11-29T23:30:00+01:00"),
            (&berlin, "2026-11-29T22:00:00+01:00", "+45", "2026-11-29T22:00:45+01:00"),
            (&berlin, "2026-11-29T22:00:00+01:00", "2026-12-01 08:00", "2026-12-01T08:00:00+01:00"),
            (&berlin, "2026-11-29T22:00:00+01:00", "2026-12-01T08:00", "2026-12-01T08:00:00+01:00"),
            (&berlin, "2026-11-29T22:00:00+01:00", "2026-12-01", "2026-12-01T00:00:00+01:00"),
            (&berlin, "2026-11-29T22:00:00+01:00", "2026-12-01T08:00:00Z", "2026-12-01T09:00:00+01:00"),
            (&york, "2026-11-29T22:00:00-05:00", "07:30", "2026-11-30T07:30:00-05:00"),
            // Over the changes of the clocks.
            (&berlin, "2026-03-28T22:00:00+01:00", "02:30", "2026-03-29T03:30:00+02:00"),
            (&berlin, "2026-03-28T22:00:00+01:00", "08:00", "2026-03-29T08:00:00+02:00"),
            (&berlin, "2026-03-28T22:00:00+01:00", "+10h", "2026-03-29T09:00:00+02:00"),
            (&berlin, "2026-10-24T22:00:00+02:00", "02:30", "2026-10-25T02:30:00+02:00"),
            (&berlin, "2026-10-24T22:00:00+02:00", "08:00", "2026-10-25T08:00:00+01:00"),
            (&york, "2026-03-07T22:00:00-05:00", "02:30", "2026-03-08T03:30:00-04:00"),
            (&york, "2026-10-31T22:00:00-04:00", "01:30", "2026-11-01T01:30:00-04:00"),
            (&york, "2026-10-31T22:00:00-04:00", "06:00", "2026-11-01T06:00:00-05:00"),
        ] {
            assert_eq!(moment_from(text, at(now), zone), Ok(at(expected)), "{text} at {now}");
        }
        let wrong = |text: &str| moment_from(text, at("2026-11-29T22:00:00Z"), &TimeZone::UTC).unwrap_err();
        for text in ["", "soon", "25:00", "+2 fortnights", "+", "2026-13-01", "+99999999999h"] {
            assert_eq!(wrong(text), FORMS, "{text}");
        }
        assert_eq!(wrong("2026-11-29T21:00:00Z"), "2026-11-29 21:00:00 UTC is over already");
    }
}
