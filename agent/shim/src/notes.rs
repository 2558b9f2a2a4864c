//! `shim.log`: what happened to the job's supervisor, one line each, for people. Best effort: a full disk
//! must not disturb the job. Holding the file open is also what holds the shim's place.

use std::error::Error;
use std::fs::File;
use std::io::Write as _;

use agent_model::{Clock as _, SystemClock, causes};

/// The open log.
#[derive(Debug)]
pub(crate) struct Notes {
    place: File,
}

impl Notes {
    /// Notes into the file that holds the place.
    pub(crate) fn new(place: File) -> Notes {
        Notes { place }
    }

    /// Adds a line.
    pub(crate) fn say(&self, what: impl std::fmt::Display) {
        let line = format!("{} {what}\n", SystemClock.now().0);
        let _ = (&self.place).write_all(line.as_bytes());
    }

    /// Adds a line with an error and its sources.
    pub(crate) fn error(&self, error: &(dyn Error + 'static)) {
        self.say(causes::tell(error));
    }
}
