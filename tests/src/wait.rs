//! Waiting for something, by looking at it again and again.
//!
//! The pause between two looks begins short and grows: what takes a moment is seen at once, and many who wait leave the
//! processors to what they wait for. So a time that was measured by looking is late by up to half of itself, and by at
//! most [`LONGEST`]; and what is there for less than that may be missed.

use std::time::{Duration, Instant};

use crate::cost;

/// The pause after the first look.
const FIRST: Duration = Duration::from_millis(5);

/// No pause is longer.
const LONGEST: Duration = Duration::from_millis(250);

/// The pauses between looks: each is half as long again as the one before.
fn pauses() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(FIRST), |pause| Some((*pause * 3 / 2).min(LONGEST)))
}

/// What `ready` gives once it gives something; nothing when `deadline` is over before that. It looks at least once.
pub fn within<T>(deadline: Duration, mut ready: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + deadline;
    for pause in pauses() {
        let found = ready();
        if found.is_some() || Instant::now() >= end {
            return found;
        }
        std::thread::sleep(pause);
    }
    None
}

/// Waits until `ready` gives something; panics with `what` after `deadline`.
#[track_caller]
pub fn eventually<T>(what: &str, deadline: Duration, ready: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    let Some(found) = within(deadline, ready) else { panic!("after {deadline:?} still waiting: {what}") };
    cost::waited(what, begun.elapsed());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_pauses_grow_to_the_longest_and_stay_there() {
        let seen: Vec<u128> = pauses().take(14).map(|pause| pause.as_micros()).collect();
        assert_eq!(seen[..4], [5_000, 7_500, 11_250, 16_875]);
        assert!(seen.windows(2).all(|pair| pair[0] <= pair[1]), "{seen:?}");
        assert_eq!(seen[11..], [250_000; 3]);
    }

    #[test]
    fn test_what_comes_is_given_and_what_does_not_is_given_up() {
        let mut looks = 0;
        let third = within(Duration::from_secs(60), || {
            looks += 1;
            (looks == 3).then_some(looks)
        });
        assert_eq!((third, within(Duration::ZERO, || None::<()>)), (Some(3), None));
    }
}
