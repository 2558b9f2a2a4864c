//! `shim.log`: what happened to the job's supervisor, one line each, for people. Best effort: a full disk
//! must not disturb the job. It is open as long as the shim runs, and holds the shim's lock.

use std::error::Error;
use std::io::Write as _;

use agent_model::{Clock as _, SystemClock, causes};
use agent_shim::ShimPlace;

/// The open log.
#[derive(Debug)]
pub(crate) struct Notes {
    place: ShimPlace,
}

impl Notes {
    /// Notes into the log of the place.
    pub(crate) fn new(place: ShimPlace) -> Notes {
        Notes { place }
    }

    /// Adds a line.
    pub(crate) fn say(&self, what: impl std::fmt::Display) {
        let line = format!("{} {what}\n", SystemClock.now().0);
        let _ = (&self.place.log).write_all(line.as_bytes());
    }

    /// Adds a line with an error and its sources.
    pub(crate) fn error(&self, error: &(dyn Error + 'static)) {
        self.say(causes::tell(error));
    }
}
