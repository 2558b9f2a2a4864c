//! What a job wants of those who run it besides a place: when it is ended, what happens after a failure, and which jobs
//! go first.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What ends a job early.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// The longest time the command may run.
    pub timeout: Option<Duration>,
    /// How long the command may take to end after it was asked to; [`Limits::DEFAULT_GRACE`] when absent.
    pub grace: Option<Duration>,
    /// What happens to the job while its node does not report.
    pub on_disconnect: OnDisconnect,
}

impl Limits {
    /// Time between the request to end and the kill.
    pub const DEFAULT_GRACE: Duration = Duration::from_secs(30);

    /// The grace that applies.
    pub fn grace(&self) -> Duration {
        self.grace.unwrap_or(Self::DEFAULT_GRACE)
    }
}

/// What happens to a job while its node does not report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnDisconnect {
    /// It continues there, and is given to no other node before there is proof that it ended.
    #[default]
    Hold,
    /// It ends there when its lease is over, and another attempt may start elsewhere after that.
    Replace,
}

impl OnDisconnect {
    /// Every word users write.
    pub const WORDS: [&'static str; 2] = ["hold", "replace"];

    /// From the word users write, in any case.
    pub fn parse(word: &str) -> Option<OnDisconnect> {
        match word.to_ascii_lowercase().as_str() {
            "hold" => Some(OnDisconnect::Hold),
            "replace" => Some(OnDisconnect::Replace),
            _ => None,
        }
    }

    /// The word users write.
    pub fn name(self) -> &'static str {
        match self {
            OnDisconnect::Hold => "hold",
            OnDisconnect::Replace => "replace",
        }
    }
}

/// What happens after a failure that the fault itself allows to retry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RetryPolicy {
    /// Attempts in all, the first included.
    pub max_attempts: u32,
    /// The wait before the second attempt; it doubles each time, up to an hour.
    pub backoff: Duration,
}

impl Default for RetryPolicy {
    fn default() -> RetryPolicy {
        RetryPolicy { max_attempts: 1, backoff: Duration::from_secs(10) }
    }
}

impl RetryPolicy {
    /// The wait before attempt `attempt` (the second is 2).
    pub fn wait_before(&self, attempt: u32) -> Duration {
        let doublings = attempt.saturating_sub(2).min(16);
        self.backoff.saturating_mul(1 << doublings).min(Duration::from_secs(3600))
    }
}

/// Which jobs start first. Jobs of one priority start in the order of their submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// After all others.
    Low,
    /// The usual one.
    #[default]
    Medium,
    /// Before all others.
    High,
}

impl Priority {
    /// From the word users write, in any case.
    pub fn parse(word: &str) -> Option<Priority> {
        match word.to_ascii_lowercase().as_str() {
            "low" => Some(Priority::Low),
            "medium" => Some(Priority::Medium),
            "high" => Some(Priority::High),
            _ => None,
        }
    }

    /// The word users write.
    pub fn name(self) -> &'static str {
        match self {
            Priority::Low => "low",
            Priority::Medium => "medium",
            Priority::High => "high",
        }
    }
}
