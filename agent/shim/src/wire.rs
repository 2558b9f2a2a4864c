//! The socket protocol of a shim: one JSON object a line, each way.
//!
//! The shim greets every connection with [`Event::Hello`]. A client may then send requests; each is answered
//! once, in order. `watch` is answered by [`Event::Progress`] at once and whenever the numbers have changed
//! (many changes may become one event), and by [`Event::Ended`] after the exit record is durable. A closed
//! connection means nothing by itself: the job directory shows whether the shim still runs.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::record::Hidden;

/// The longest line either side sends or accepts, in bytes.
pub const MAX_LINE: usize = 64 * 1024;

/// A request of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "snake_case")]
pub enum Request {
    /// Execute the command. Repeated, it changes nothing.
    Go,
    /// Give the command one more variable. Refused when it was executed already.
    Secret {
        /// The variable.
        name: String,
        /// Its value, which is in no file.
        value: Hidden,
    },
    /// End the job: the polite signal to every process of it, the final one after the grace. When repeated, a
    /// shorter grace counts and the first reason is kept.
    Stop {
        /// Milliseconds between the two.
        grace_ms: u64,
        /// Why, for the exit record.
        reason: String,
    },
    /// Let the job run until then at least, in milliseconds since the machine was started. An earlier
    /// moment changes nothing; it is refused for a job that has no lease or is being ended, and by a shim
    /// of version 1, which knows no leases.
    Renew {
        /// Until when.
        until_ms: u64,
    },
    /// Let the command run so long in all, in milliseconds. A shorter time than before changes nothing; it is refused for
    /// a job that has no time limit or is being ended.
    Limit {
        /// How long in all.
        timeout_ms: u64,
    },
    /// Send progress until the end.
    Watch,
    /// Hand this connection over to the attendant of the job. Sent alone: what follows the answer is the attendant's
    /// ([`crate::session`]). A shim of an earlier release refuses what it does not understand.
    Session,
}

/// A message of a shim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The greeting.
    Hello {
        /// The version the shim speaks.
        version: u32,
        /// The same as in the hello record, or this is not the shim of that job.
        instance: String,
        /// `go` was received before.
        gone: bool,
    },
    /// `go` was received, and the command is started; if that failed, [`Ended`](Event::Ended) follows.
    Going,
    /// `secret` was received.
    Taken,
    /// `stop` was received.
    Stopping,
    /// `renew` was received.
    Renewed {
        /// Until when the job may run now.
        until_ms: u64,
    },
    /// `limit` was received.
    Limited {
        /// How long the command may run in all now.
        timeout_ms: u64,
    },
    /// `session` was received; the next byte is for the attendant.
    Attached,
    /// How far the job has come.
    Progress(Progress),
    /// The request was not understood, or cannot be fulfilled.
    Refused {
        /// Why not.
        why: String,
    },
    /// The job ended and its exit record is durable.
    Ended,
    /// Something of a later release.
    #[serde(other)]
    Unknown,
}

/// How much a job has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Length of its log in bytes.
    pub log_bytes: u64,
    /// Length of its stream of tracking records in bytes.
    pub tracking_bytes: u64,
}

impl Request {
    /// A stop.
    pub fn stop(grace: Duration, reason: &str) -> Request {
        // A reason that does not fit a line would make the whole stop be refused.
        let mut end = reason.len().min(MAX_LINE / 8);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        Request::Stop { grace_ms, reason: reason[..end].to_owned() }
    }

    /// The request as a line, with its line feed.
    pub fn to_line(&self) -> String {
        to_line(self)
    }
}

impl Event {
    /// The event as a line, with its line feed.
    pub fn to_line(&self) -> String {
        to_line(self)
    }
}

fn to_line(message: &impl Serialize) -> String {
    let mut line = serde_json::to_string(message).unwrap_or_default(); // strings and numbers always serialise
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_lines_are_as_documented() {
        let progress = Event::Progress(Progress { log_bytes: 1, tracking_bytes: 2 });
        assert_eq!(progress.to_line(), "{\"event\":\"progress\",\"log_bytes\":1,\"tracking_bytes\":2}\n");
        assert_eq!(Request::Go.to_line(), "{\"verb\":\"go\"}\n");
        assert_eq!(Request::Session.to_line(), "{\"verb\":\"session\"}\n");
        let renew = Request::Renew { until_ms: 60_000 };
        assert_eq!(renew.to_line(), "{\"verb\":\"renew\",\"until_ms\":60000}\n");
        let limit = Request::Limit { timeout_ms: 7 };
        assert_eq!(limit.to_line(), "{\"verb\":\"limit\",\"timeout_ms\":7}\n");
        let stop = Request::stop(Duration::from_secs(1), "canceled by\nuid 7");
        assert_eq!(serde_json::from_str::<Request>(&stop.to_line()).unwrap(), stop);
        assert_eq!(serde_json::from_str::<Event>(r#"{"event":"new","x":1}"#).unwrap(), Event::Unknown);
    }

    #[test]
    fn test_a_secret_travels_and_is_never_shown() {
        let secret = Request::Secret { name: "KEY".into(), value: Hidden("hunter2\u{1}".repeat(1000)) };
        let line = secret.to_line();
        assert!(line.len() <= MAX_LINE && line.contains("hunter2"), "8 KiB fit, however they are written");
        assert_eq!(serde_json::from_str::<Request>(&line).unwrap(), secret);
        assert!(!format!("{secret:?}").contains("hunter2"), "{secret:?}");
    }

    #[test]
    fn test_longest_reason_still_fits_a_line() {
        let line = Request::stop(Duration::MAX, &"\u{1}é".repeat(MAX_LINE)).to_line();
        assert!(line.len() <= MAX_LINE);
    }
}
