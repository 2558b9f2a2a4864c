//! The state machines, as pure functions.
//!
//! ```text
//! Job      Queued ─▶ Preparing ─▶ Running ─▶ Finalizing ─▶ Completed | Failed | Canceled
//!             ▲          │           │            │
//!             └─ retry ──┴───────────┴── lease ──▶ NotResponding ─▶ (where it was) | Queued | Failed | Canceled
//!
//! Replica  Accepted ─▶ Fetching ─▶ Building ─▶ Launching ─▶ Running ─▶ Releasing ─▶ Uploading ─▶ Reported
//!             └────────────┴────────────┴── failed or stopped ─────────────────────────▲
//!
//! Node     liveness × eligibility: placed on only when Ready and Open
//! ```
//!
//! Invariants: a terminal state never changes; a verdict, once fixed, never becomes another one (when a node is lost
//! before the outputs are stored, the attempt may be discarded and a new one started); an event that does not apply
//! leaves the state as it was (each report carries the whole current state, so late and repeated ones are normal).

use std::fmt;

use serde::{Deserialize, Serialize};

/// The result of a job. Fixed when its last process ended, before outputs are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every replica exited 0.
    Completed,
    /// A replica failed and no attempt is left.
    Failed,
    /// A user or operator asked for the end.
    Canceled,
}

/// The state of a job, as users see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Waits for a node.
    Queued,
    /// Has a node, which fetches code and builds the environment.
    Preparing,
    /// The command runs.
    Running,
    /// The command ended; logs and outputs are being stored.
    Finalizing(Verdict),
    /// The node stopped answering; remembers where the job was.
    NotResponding(Before),
    /// Ended with success.
    Completed,
    /// Ended without success.
    Failed,
    /// Ended because someone asked.
    Canceled,
}

/// What a job that is not responding was doing before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Before {
    /// [`JobState::Preparing`].
    Preparing,
    /// [`JobState::Running`].
    Running,
    /// [`JobState::Finalizing`].
    Finalizing(Verdict),
}

/// What can happen to a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum JobEvent {
    /// The scheduler found a node; the epoch grew.
    Placed,
    /// Someone asked for the end.
    CancelRequested,
    /// A job that it comes after ended otherwise than it must.
    NeverDue,
    /// Every replica's command runs.
    AllRunning,
    /// Every replica exited 0.
    AllSucceeded,
    /// A replica failed; `retry` tells whether its policy and its fault allow another attempt.
    ReplicaFailed {
        /// Another attempt is allowed.
        retry: bool,
    },
    /// The command of a stopped replica ended because of a cancel.
    ReplicaCanceled,
    /// The lease expired without a report of the node.
    LeaseExpired,
    /// The node answered again, with the same epoch.
    SeenAgain,
    /// The time to wait for a silent node is over.
    GraceOver {
        /// Another attempt is allowed.
        retry: bool,
    },
    /// Logs are complete, outputs are stored, every report is in.
    OutputsStored,
    /// Outputs could not be stored; the node keeps them.
    OutputsLost,
}

impl JobState {
    /// The state after `event`, or `None` when the event does not apply here.
    #[must_use]
    pub fn after(self, event: JobEvent) -> Option<JobState> {
        use JobEvent as E;
        use JobState as S;
        let next = match (self, event) {
            (S::Queued, E::Placed) => S::Preparing,
            (S::Queued, E::CancelRequested) => S::Canceled,
            (S::Queued, E::NeverDue) => S::Failed,
            (S::Preparing, E::AllRunning) => S::Running,
            (S::Preparing | S::Running, E::ReplicaFailed { retry: true }) => S::Queued,
            (S::Preparing | S::Running, E::ReplicaFailed { retry: false }) => S::Finalizing(Verdict::Failed),
            (S::Preparing | S::Running, E::AllSucceeded) => S::Finalizing(Verdict::Completed),
            (S::Preparing | S::Running, E::CancelRequested | E::ReplicaCanceled) => {
                S::Finalizing(Verdict::Canceled)
            }
            (S::Preparing, E::LeaseExpired) => S::NotResponding(Before::Preparing),
            (S::Running, E::LeaseExpired) => S::NotResponding(Before::Running),
            (S::Finalizing(verdict), E::LeaseExpired) => S::NotResponding(Before::Finalizing(verdict)),
            (S::Finalizing(verdict), E::OutputsStored) => verdict.into(),
            (S::Finalizing(Verdict::Canceled), E::OutputsLost) => S::Canceled,
            (S::Finalizing(_), E::OutputsLost) => S::Failed,
            (S::NotResponding(before), E::SeenAgain) => before.into(),
            (S::NotResponding(Before::Preparing | Before::Running), E::CancelRequested) => {
                S::NotResponding(Before::Finalizing(Verdict::Canceled))
            }
            (S::NotResponding(Before::Finalizing(Verdict::Canceled)), E::GraceOver { .. }) => S::Canceled,
            (S::NotResponding(_), E::GraceOver { retry: true }) => S::Queued,
            (S::NotResponding(_), E::GraceOver { retry: false }) => S::Failed,
            _ => return None,
        };
        (next != self).then_some(next)
    }

    /// The job ended; nothing changes any more.
    pub fn is_terminal(self) -> bool {
        matches!(self, JobState::Completed | JobState::Failed | JobState::Canceled)
    }

    /// How the job ended, if it has.
    pub fn verdict(self) -> Option<Verdict> {
        match self {
            JobState::Completed => Some(Verdict::Completed),
            JobState::Failed => Some(Verdict::Failed),
            JobState::Canceled => Some(Verdict::Canceled),
            _ => None,
        }
    }

    /// The job holds resources on a node.
    pub fn is_placed(self) -> bool {
        !self.is_terminal() && self != JobState::Queued
    }

    /// The one-word name users see; also the stored form, without what it remembers.
    pub fn name(self) -> &'static str {
        match self {
            JobState::Queued => "Queued",
            JobState::Preparing => "Preparing",
            JobState::Running => "Running",
            JobState::Finalizing(_) => "Finalizing",
            JobState::NotResponding(_) => "NotResponding",
            JobState::Completed => "Completed",
            JobState::Failed => "Failed",
            JobState::Canceled => "Canceled",
        }
    }
}

impl From<Verdict> for JobState {
    fn from(verdict: Verdict) -> JobState {
        match verdict {
            Verdict::Completed => JobState::Completed,
            Verdict::Failed => JobState::Failed,
            Verdict::Canceled => JobState::Canceled,
        }
    }
}

impl From<Before> for JobState {
    fn from(before: Before) -> JobState {
        match before {
            Before::Preparing => JobState::Preparing,
            Before::Running => JobState::Running,
            Before::Finalizing(verdict) => JobState::Finalizing(verdict),
        }
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The step of a replica on its node; written only by the runner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplicaStep {
    /// The order is journaled and the job directory exists.
    Accepted,
    /// The snapshot is being fetched and laid out.
    Fetching,
    /// The environment is being built, or waited for.
    Building,
    /// The shim is being started.
    Launching,
    /// The command runs.
    Running,
    /// Processes that the command left behind are being ended.
    Releasing,
    /// Outputs and the rest of the log are being stored.
    Uploading,
    /// The outcome is with the controller, or on its way until acknowledged.
    Reported,
}

/// What can happen to a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReplicaEvent {
    /// The work of the present step is done.
    StepDone,
    /// The daemon was restarted before the command was started: the steps before the command are done anew.
    Resumed,
    /// The command was started: just now, or before the daemon was restarted, which a lost journal does not show.
    Started,
    /// The step failed, or a stop came, before the command was started.
    GaveUp,
    /// The command that was started does not run any more, or it is unknown whether it does.
    Ended,
    /// The controller does not have all that the outcome names: logs are stored once more.
    Refused,
}

impl ReplicaStep {
    /// Every step, in order.
    pub const ALL: [ReplicaStep; 8] = [
        ReplicaStep::Accepted,
        ReplicaStep::Fetching,
        ReplicaStep::Building,
        ReplicaStep::Launching,
        ReplicaStep::Running,
        ReplicaStep::Releasing,
        ReplicaStep::Uploading,
        ReplicaStep::Reported,
    ];

    /// The step after `event`, or `None` when the event does not apply here.
    ///
    /// Giving up skips to [`ReplicaStep::Uploading`]: there may be a build log to store. A command that was
    /// started is always released first.
    #[must_use]
    pub fn after(self, event: ReplicaEvent) -> Option<ReplicaStep> {
        use ReplicaEvent as E;
        use ReplicaStep as S;
        match (self, event) {
            (S::Reported, E::Refused) => Some(S::Uploading),
            (S::Reported, _) => None,
            (step, E::StepDone) => Some(Self::ALL[step as usize + 1]),
            (S::Accepted | S::Fetching | S::Building | S::Launching, E::GaveUp) => Some(S::Uploading),
            (S::Accepted | S::Fetching | S::Building | S::Launching, E::Resumed) => Some(S::Accepted),
            (step, E::Started) if step <= S::Running => Some(S::Running),
            (S::Releasing, E::Started) => Some(S::Releasing),
            (step, E::Ended) if step <= S::Releasing => Some(S::Releasing),
            _ => None,
        }
    }

    /// What users read: the work of the step in their words.
    pub fn describe(self) -> &'static str {
        match self {
            ReplicaStep::Accepted => "accepted by the node",
            ReplicaStep::Fetching => "fetching the code",
            ReplicaStep::Building => "preparing the environment",
            ReplicaStep::Launching => "starting the command",
            ReplicaStep::Running => "running",
            ReplicaStep::Releasing => "cleaning up after the command",
            ReplicaStep::Uploading => "storing logs and outputs",
            ReplicaStep::Reported => "reported",
        }
    }

    /// The same with what the node says of it: `preparing the environment: linking packages, 3 of 40`.
    pub fn describe_with(self, detail: &str) -> String {
        match self {
            _ if detail.is_empty() || detail == self.describe() => self.describe().to_owned(),
            // It may be an input that is fetched: the node says which.
            ReplicaStep::Fetching => detail.to_owned(),
            _ => format!("{}: {detail}", self.describe()),
        }
    }
}

impl fmt::Display for ReplicaStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ReplicaStep::Accepted => "Accepted",
            ReplicaStep::Fetching => "Fetching",
            ReplicaStep::Building => "Building",
            ReplicaStep::Launching => "Launching",
            ReplicaStep::Running => "Running",
            ReplicaStep::Releasing => "Releasing",
            ReplicaStep::Uploading => "Uploading",
            ReplicaStep::Reported => "Reported",
        })
    }
}

/// Whether a node answers and is fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Liveness {
    /// It has an identity but never synced.
    Enrolling,
    /// It syncs in time and its checks pass.
    Ready,
    /// It syncs, but a disk, GPU, clock or driver check fails.
    Degraded,
    /// Its lease is over.
    NotResponding,
    /// Its replicas were declared lost.
    Down,
    /// An operator took it out for good.
    Removed,
}

/// What can happen to a node's liveness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LivenessEvent {
    /// A report arrived; `healthy` says whether every check passes.
    Synced {
        /// Every check passes.
        healthy: bool,
    },
    /// The lease is over.
    LeaseOver,
    /// The time to wait for it is over too.
    GraceOver,
    /// An operator removed it.
    Remove,
}

impl Liveness {
    /// Its name on the wire and in documents.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Liveness::Enrolling => "enrolling",
            Liveness::Ready => "ready",
            Liveness::Degraded => "degraded",
            Liveness::NotResponding => "not_responding",
            Liveness::Down => "down",
            Liveness::Removed => "removed",
        }
    }

    /// The liveness after `event`.
    #[must_use]
    pub fn after(self, event: LivenessEvent) -> Liveness {
        use Liveness as L;
        use LivenessEvent as E;
        match (self, event) {
            (L::Removed, _) | (_, E::Remove) => L::Removed,
            (_, E::Synced { healthy: true }) => L::Ready,
            (_, E::Synced { healthy: false }) => L::Degraded,
            (L::Ready | L::Degraded, E::LeaseOver) => L::NotResponding,
            (L::NotResponding, E::GraceOver) => L::Down,
            (same, _) => same,
        }
    }
}

/// Whether an operator lets new work onto a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Eligibility {
    /// New work may be placed.
    Open,
    /// No new work; running work may end.
    Draining,
    /// No new work.
    Cordoned,
}

/// What can happen to a node's eligibility.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EligibilityEvent {
    /// Let it run empty.
    Drain,
    /// It ran empty.
    Empty,
    /// Take no new work, now.
    Cordon,
    /// Take work again.
    Uncordon,
}

impl Eligibility {
    /// Its name on the wire and in documents.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Eligibility::Open => "open",
            Eligibility::Draining => "draining",
            Eligibility::Cordoned => "cordoned",
        }
    }

    /// The eligibility after `event`.
    #[must_use]
    pub fn after(self, event: EligibilityEvent) -> Eligibility {
        match (self, event) {
            (_, EligibilityEvent::Uncordon) => Eligibility::Open,
            (_, EligibilityEvent::Cordon) => Eligibility::Cordoned,
            (Eligibility::Open, EligibilityEvent::Drain) => Eligibility::Draining,
            (Eligibility::Draining, EligibilityEvent::Empty) => Eligibility::Cordoned,
            (same, _) => same,
        }
    }
}

#[cfg(test)]
mod tests;
