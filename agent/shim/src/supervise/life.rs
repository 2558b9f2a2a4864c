//! What has happened to a job, and when its supervisor must look again.
//!
//! Data and rules; the loop that acts on them is [`super::Supervisor`].

use std::time::Duration;

use agent_model::protocol::start::Deadline;
use agent_model::{Boot, ExitStatus, Timestamp};
use agent_shim::{End, Limits, OomScope, Sender};
use nix::sys::signal::Signal;

use super::GO;
use crate::kill_escalation::KillEscalation;
use crate::memory::Memory;

/// What has happened to the job.
#[derive(Debug)]
pub(crate) struct Life {
    pub(super) phase: Phase,
    pub(super) escalation: KillEscalation,
    pub(super) started_at: Option<Timestamp>,
    pub(super) ended_at: Option<Timestamp>,
    pub(super) stopped: Option<String>,
    pub(super) signaled: Option<(Signal, Sender)>,
    pub(super) timed_out: bool,
    pub(super) lease: Deadline,
    pub(super) lease_over: bool,
    pub(super) limits: Limits,
    pub(super) limits_unmet: Vec<String>,
    pub(super) memory: Option<Memory>,
    pub(super) oom: Option<OomScope>,
    pub(super) leftovers: u32,
    pub(super) unkilled: u32,
}

#[derive(Debug)]
pub(super) enum Phase {
    Waiting { until: Boot },
    Running { main: i32, until: Option<Boot> },
    Clearing { status: ExitStatus, look: Option<Boot> },
    Over { end: End },
}

impl Life {
    /// Nothing yet.
    pub(crate) fn new(now: Boot, lease: Option<Boot>) -> Life {
        Life {
            phase: Phase::Waiting { until: now + GO },
            escalation: KillEscalation::default(),
            started_at: None,
            ended_at: None,
            stopped: None,
            signaled: None,
            timed_out: false,
            lease: Deadline::new(lease),
            lease_over: false,
            limits: Limits::default(),
            limits_unmet: Vec::new(),
            memory: None,
            oom: None,
            leftovers: 0,
            unkilled: 0,
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waiting { .. })
    }

    pub(super) fn next_date(&self) -> Option<Boot> {
        let of_phase = match self.phase {
            Phase::Waiting { until } => Some(until),
            Phase::Running { until, .. } => earliest(until, self.lease_end()),
            Phase::Clearing { look, .. } => look,
            Phase::Over { .. } => None,
        };
        earliest(of_phase, self.escalation.next())
    }

    /// When the lease ends the job; never once it is being ended.
    pub(super) fn lease_end(&self) -> Option<Boot> {
        self.lease.at().filter(|_| !self.escalation.is_begun())
    }

    /// Lets the job run until `until` at least. Returns until when it may run now, or why this was refused.
    pub(super) fn renew(&mut self, until: Boot) -> Result<Boot, &'static str> {
        let dying =
            self.escalation.is_begun() || matches!(self.phase, Phase::Clearing { .. } | Phase::Over { .. });
        self.lease.at().ok_or("this job has no lease")?;
        if dying {
            return Err("the job is being ended");
        }
        self.lease.hear(until);
        Ok(self.lease.at().unwrap_or(until))
    }

    /// Lets the command run so long in all; `known` is how long it could so far. Returns how long it may now, or why this
    /// was refused.
    pub(super) fn raise_limit(
        &mut self,
        known: &mut Option<Duration>,
        limit: Duration,
    ) -> Result<Duration, &'static str> {
        let before = known.ok_or("this job has no time limit")?;
        let more = limit.saturating_sub(before);
        match &mut self.phase {
            Phase::Waiting { .. } => {}
            Phase::Running { until: Some(until), .. } if !self.escalation.is_begun() => {
                *until = *until + more
            }
            Phase::Running { .. } | Phase::Clearing { .. } | Phase::Over { .. } => {
                return Err("the job is being ended");
            }
        }
        *known = Some(before + more);
        Ok(before + more)
    }
}

pub(super) fn earliest<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
    one.into_iter().chain(other).min()
}
