//! The result of a replica.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::words::count;
use crate::{Digest, Fault, Stream, Timestamp, Verdict, size};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitStatus {
    /// It returned this code.
    Code(i32),
    /// A signal of this number ended it.
    Signal(i32),
}

impl ExitStatus {
    /// The one number a shell would show: 128 + n for a signal.
    pub fn shell_code(self) -> i32 {
        match self {
            ExitStatus::Code(code) => code,
            ExitStatus::Signal(signal) => 128 + signal,
        }
    }

    /// It returned 0.
    pub fn is_success(self) -> bool {
        self == ExitStatus::Code(0)
    }
}

/// The final length and content of one log of a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamEnd {
    /// Which log.
    pub stream: Stream,
    /// SHA-256 and length of everything in it.
    pub digest: Digest,
}

/// What a replica left behind, stored as one snapshot: `outputs/…`, `logs/…`, `named-outputs/NAME/…`, and
/// the artifacts logged through the tracking endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifacts {
    /// The snapshot.
    pub root: Digest,
    /// Files in it.
    pub files: u64,
    /// Bytes in them.
    pub bytes: u64,
}

impl fmt::Display for Artifacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", count(self.files, "file"), size::binary(self.bytes))
    }
}

/// The resources that a command used, with all that it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Time of processors.
    pub cpu: Duration,
    /// The most memory it had at a time, in bytes; of its largest process alone where no more is known.
    pub memory_peak: u64,
    /// How much memory it could have had, in bytes; `None` where that was not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<u64>,
}

/// The environment that a command was started in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsedEnvironment {
    /// Its key, as `agentctl envs` shows it.
    pub key: String,
    /// The text of the list of its packages, in the store of blobs; `None` where nothing in it was chosen for it.
    #[serde(default)]
    pub lock: Option<Digest>,
}

/// The result of a replica. Kept by the node until the controller has it; the same for every delivery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Completed, failed or canceled.
    pub verdict: Verdict,
    /// How the command ended, if it was started.
    pub exit: Option<ExitStatus>,
    /// What went wrong, if anything did.
    pub fault: Option<Fault>,
    /// When the command was started.
    pub started_at: Option<Timestamp>,
    /// When it ended, or when the replica gave up.
    pub ended_at: Timestamp,
    /// The ends of the logs.
    pub streams: Vec<StreamEnd>,
    /// How many bytes of tracking records there are.
    pub tracking_bytes: u64,
    /// What the controller has of them, taken by itself when it had them all; `None` where it took none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracking: Option<Box<Digest>>,
    /// The stored outputs; `None` when there were none.
    pub artifacts: Option<Artifacts>,
    /// What it used, if it ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Box<Usage>>,
    /// What it ran in, if it ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<Box<UsedEnvironment>>,
    /// What stands among its outputs and is no content of the job, so that nothing was lost with it: links that lead out
    /// of them or nowhere, pipes, sockets. Each path with the target and the reason; the first of them, for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
}

/// How many lines name what was left out of a job's outputs; more are only counted.
const MOST_LEFT_OUT: usize = 20;

/// The first of these, and how many more there are.
pub fn first_left_out(mut all: Vec<String>) -> Vec<String> {
    let more = all.len().saturating_sub(MOST_LEFT_OUT);
    all.truncate(MOST_LEFT_OUT);
    all.extend((more > 0).then(|| format!("and {more} more")));
    all
}

/// The most lines of a log that a fault has.
const LAST_LINES: usize = 5;
/// The most characters of each.
const LAST_LINE_WIDTH: usize = 300;

/// The last lines of a log that are not blank, from its last bytes, as a fault has them. Text that a progress bar
/// overwrote is left out.
pub fn last_lines(end_of_log: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(end_of_log);
    let shown = |line: &str| -> String {
        let last = line.trim_end().rsplit('\r').next().unwrap_or_default();
        last.chars().filter(|c| !c.is_control() || *c == '\t').take(LAST_LINE_WIDTH).collect()
    };
    let mut lines: Vec<String> =
        text.lines().rev().map(shown).filter(|line| !line.trim().is_empty()).take(LAST_LINES).collect();
    lines.reverse();
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_what_was_left_out_is_named_up_to_a_limit_and_counted_beyond() {
        let lines = |count: usize| (0..count).map(|at| at.to_string()).collect::<Vec<_>>();
        assert_eq!(first_left_out(lines(MOST_LEFT_OUT)), lines(MOST_LEFT_OUT));
        let first = first_left_out(lines(MOST_LEFT_OUT + 7));
        assert_eq!((first.len(), first.last().unwrap().as_str()), (MOST_LEFT_OUT + 1, "and 7 more"));
    }

    #[test]
    fn test_last_lines_are_few_short_and_plain() {
        let log = b"one\ntwo\n\nthree\n10%\r50%\r100%\nfour\n\x1b[31mred\x1b[0m\xff\n";
        assert_eq!(last_lines(log), ["two", "three", "100%", "four", "[31mred[0m\u{fffd}"]);
        assert_eq!(last_lines(&[b'x'; 9000])[0].len(), LAST_LINE_WIDTH);
        assert!(last_lines(b"\n\n").is_empty());
    }
}
