//! How old the picture is that a daemon's answers show.
//!
//! Owns what the answers of this process said of that ([`Unwritten`]). Any answer may say it, and it concerns whatever
//! is then printed, so it is kept in one place and not handed through every command.

use std::sync::{Mutex, PoisonError};

use agent_model::Timestamp;
use agent_proto::Unwritten;
use tonic::metadata::MetadataMap;

use super::text::{ago, moment};

static SAID: Mutex<Option<Unwritten>> = Mutex::new(None);

/// Takes note of an answer.
pub(crate) fn note(metadata: &MetadataMap) {
    *SAID.lock().unwrap_or_else(PoisonError::into_inner) = Unwritten::of(metadata);
}

/// What the latest answer said.
pub(crate) fn said() -> Option<Unwritten> {
    SAID.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The same as a line for people.
pub(crate) fn describe(said: &Unwritten, now: Timestamp) -> String {
    format!(
        "the controller cannot write its database since {} ({}): {}; what is shown is from then, jobs go on, and \
         nothing new is taken",
        moment(said.since),
        ago(said.since, now),
        said.why
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_the_age_of_a_picture_is_said_in_a_line() {
        let said = Unwritten { since: Timestamp(1_000_000), why: "its disk is full".to_owned() };
        assert_eq!(
            describe(&said, Timestamp(1_300_000)),
            "the controller cannot write its database since 1970-01-01 00:16:40 UTC (5 min ago): its disk is full; what \
             is shown is from then, jobs go on, and nothing new is taken"
        );
    }
}
