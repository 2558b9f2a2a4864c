//! The bounds of a job: how long its command may run, how often it is tried, and which of its codes are a success.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::time::Duration;

use agent_model::JobDraft;
use agent_model::job::{Limits, OnDisconnect, RetryPolicy};

use crate::section::{Mistakes, Rejection, Section, Warning};
use crate::yaml::Place;

/// What a number of attempts or machines is.
pub(super) const COUNT: &str = "a whole number of at least 1";

pub(super) fn read_limits(
    top: &mut Section,
    warnings: &mut Vec<Warning>,
    wrong: &mut Mistakes,
) -> (Limits, Option<Place>) {
    let Some(mut section) = wrong.note(top.section("limits")) else { return (Limits::default(), None) };
    let place = section.place();
    let on_disconnect = wrong.note(section.word("on_disconnect"));
    let limits = Limits {
        timeout: wrong.note(read_timeout(&mut section, "timeout")),
        grace: wrong.note(section.duration("grace")),
        on_disconnect: on_disconnect.and_then(OnDisconnect::parse).unwrap_or_default(),
    };
    section.finish(warnings);
    (limits, Some(place))
}

/// The longest time that the command may run.
pub(crate) fn read_timeout(section: &mut Section, key: &'static str) -> Result<Option<Duration>, Rejection> {
    let place = section.place();
    match section.duration(key)? {
        Some(time) if time.is_zero() => {
            Err(Rejection::invalid(place, format!("`{}` is 0 seconds", section.name(key)))
                .fix("give the longest time the command may run, or leave the key out"))
        }
        time => Ok(time),
    }
}

/// A job that may not have a second attempt cannot be replaced.
pub(super) fn warn_of_no_replacement(place: Option<Place>, draft: &JobDraft, warnings: &mut Vec<Warning>) {
    if let Some(place) = place
        && draft.limits.on_disconnect == OnDisconnect::Replace
        && draft.retry.max_attempts < 2
    {
        let message = "`limits.on_disconnect: replace` ends the job as failed when its node falls silent, \
                       because `retry.max_attempts` allows no second attempt";
        warnings.push(Warning::new(place, message));
    }
}

pub(super) fn read_retry(
    top: &mut Section,
    warnings: &mut Vec<Warning>,
    wrong: &mut Mistakes,
) -> RetryPolicy {
    let usual = RetryPolicy::default();
    let Some(mut section) = wrong.note(top.section("retry")) else { return usual };
    let attempts = wrong.note(section.parsed::<NonZeroU32>("max_attempts", COUNT));
    let retry = RetryPolicy {
        max_attempts: attempts.map_or(usual.max_attempts, NonZeroU32::get),
        backoff: wrong.note(section.duration("backoff")).unwrap_or(usual.backoff),
    };
    section.finish(warnings);
    retry
}

/// Codes that a command can return.
pub(super) fn read_codes(top: &mut Section) -> Result<BTreeSet<u8>, Rejection> {
    let Some((codes, place)) = top.lines("success_exit_codes")? else { return Ok(BTreeSet::new()) };
    let read = |code: &String| {
        code.parse().map_err(|_| {
            Rejection::invalid(
                place,
                format!("`success_exit_codes`: `{code}` is no exit code; those are whole numbers up to 255"),
            )
        })
    };
    codes.iter().map(read).collect()
}
