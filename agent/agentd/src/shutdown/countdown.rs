//! When the machine is shut down: pure, from what is seen at one moment after the other.

use std::time::Duration;

use agent_model::{Boot, Timestamp};

/// The wait after the first command that failed; it doubles with each, up to the longest.
const FIRST_WAIT: Duration = Duration::from_secs(60);
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// Why the machine is shut down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// Nothing has kept it up for long enough.
    Idle,
    /// It is a set time.
    Time,
}

impl Reason {
    /// As the command is told.
    pub(super) fn word(self) -> &'static str {
        match self {
            Reason::Idle => "idle",
            Reason::Time => "schedule",
        }
    }
}

/// What is seen at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sight {
    pub(super) boot: Boot,
    /// Users want the machine up.
    pub(super) awake: bool,
    /// A job runs or waits, or files are being sent.
    pub(super) busy: bool,
    /// A job has been placed on a machine.
    pub(super) placed: bool,
    /// The last set time that has passed since the machine was started.
    pub(super) due: Option<Timestamp>,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Stay,
    /// Have no more jobs started: it is a set time, and some run.
    Close,
    /// Have jobs started again.
    Open,
    /// Run the command.
    Run(Reason),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Countdown {
    idle_after: Option<Duration>,
    idle_since: Option<Boot>,
    /// No more jobs are started.
    closed: bool,
    /// The set time that was dealt with.
    done: Option<Timestamp>,
    failures: u32,
    failure: String,
    /// The command is not run before.
    not_before: Boot,
}

impl Countdown {
    pub(super) fn new(idle_after: Option<Duration>) -> Countdown {
        let (failure, not_before) = (String::new(), Boot::default());
        Countdown {
            idle_after,
            idle_since: None,
            closed: false,
            done: None,
            failures: 0,
            failure,
            not_before,
        }
    }

    /// What is to be done now.
    pub(super) fn next(&mut self, seen: Sight) -> Step {
        if seen.busy || seen.awake {
            self.idle_since = None;
        } else {
            self.idle_since.get_or_insert(seen.boot);
        }
        let due = seen.due.filter(|due| !seen.awake && self.done.is_none_or(|done| done < *due));
        let may_run = seen.boot >= self.not_before;
        if due.is_some() && seen.placed {
            return if std::mem::replace(&mut self.closed, true) { Step::Stay } else { Step::Close };
        }
        if due.is_some() && may_run {
            return Step::Run(Reason::Time);
        }
        if due.is_none() && std::mem::take(&mut self.closed) {
            return Step::Open;
        }
        match self.due_in(seen.boot) {
            Some(Duration::ZERO) => Step::Run(Reason::Idle),
            _ => Step::Stay,
        }
    }

    /// The command ended, and the machine is there; jobs are started again.
    pub(super) fn failed(&mut self, reason: Reason, why: String, boot: Boot, now: Timestamp) {
        let wait = FIRST_WAIT.saturating_mul(1 << self.failures.min(10)).min(LONGEST_WAIT);
        self.failures += 1;
        (self.closed, self.idle_since, self.failure, self.not_before) = (false, None, why, boot + wait);
        if reason == Reason::Time && wait == LONGEST_WAIT {
            self.done = Some(now); // until the next one
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// How long nothing has kept the machine up, if so.
    pub(super) fn idle_for(&self, boot: Boot) -> Option<Duration> {
        self.idle_since.map(|since| boot.since(since))
    }

    /// In how long it is shut down if nothing comes in between.
    pub(super) fn due_in(&self, boot: Boot) -> Option<Duration> {
        let idle = self.idle_after?.saturating_sub(self.idle_for(boot)?);
        Some(idle.max(self.not_before.since(boot)))
    }

    /// Why the command failed the last time; empty when it did not.
    pub(super) fn failure(&self) -> &str {
        &self.failure
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Sight =
        Sight { boot: Boot(Duration::ZERO), awake: false, busy: false, placed: false, due: None };
    const WAITS: Sight = Sight { busy: true, ..IDLE };
    const RUNS: Sight = Sight { placed: true, ..WAITS };

    fn at(minutes: u64, seen: Sight) -> Sight {
        Sight { boot: Boot(Duration::from_secs(60 * minutes)), ..seen }
    }

    fn half_an_hour() -> Countdown {
        Countdown::new(Some(Duration::from_secs(1800)))
    }

    #[test]
    fn test_machine_goes_when_nothing_has_kept_it_up_for_long_enough() {
        let mut plan = half_an_hour();
        assert_eq!(plan.next(at(0, IDLE)), Step::Stay);
        assert_eq!(plan.next(at(29, WAITS)), Step::Stay);
        assert_eq!(plan.next(at(30, IDLE)), Step::Stay);
        assert_eq!(plan.next(at(42, IDLE)), Step::Stay);
        let minutes = |minutes: u64| Some(Duration::from_secs(60 * minutes));
        let now = at(42, IDLE).boot;
        assert_eq!((plan.idle_for(now), plan.due_in(now)), (minutes(12), minutes(18)));
        assert_eq!(plan.next(at(59, Sight { awake: true, ..IDLE })), Step::Stay);
        assert_eq!(plan.next(at(60, IDLE)), Step::Stay);
        assert_eq!(plan.next(at(90, IDLE)), Step::Run(Reason::Idle));
        assert_eq!(Countdown::new(None).next(at(9000, IDLE)), Step::Stay);
    }

    #[test]
    fn test_command_that_fails_is_repeated_ever_more_seldom() {
        let mut plan = Countdown::new(Some(Duration::from_secs(60)));
        let (mut minute, mut runs) = (0, Vec::new());
        while runs.len() < 9 {
            if plan.next(at(minute, IDLE)) == Step::Run(Reason::Idle) {
                plan.failed(Reason::Idle, "no".into(), at(minute, IDLE).boot, Timestamp(0));
                runs.push(minute);
            }
            minute += 1;
        }
        let waits: Vec<u64> = runs.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(waits, [2, 2, 4, 8, 16, 32, 60, 60]); // idle for a minute from the next look on
        assert_eq!(plan.failure(), "no");
    }

    #[test]
    fn test_set_time_ends_no_job_and_starts_none() {
        let due = |seen| Sight { due: Some(Timestamp(1000)), ..seen };
        let mut plan = half_an_hour();
        assert_eq!(plan.next(at(0, RUNS)), Step::Stay);
        assert_eq!(plan.next(at(1, due(RUNS))), Step::Close);
        assert_eq!(plan.next(at(2, due(RUNS))), Step::Stay);
        // Somebody wants it up; then no more.
        assert_eq!(plan.next(at(3, Sight { awake: true, ..due(RUNS) })), Step::Open);
        assert_eq!(plan.next(at(4, due(RUNS))), Step::Close);
        // Those that wait stay in line.
        assert_eq!(plan.next(at(5, due(WAITS))), Step::Run(Reason::Time));
        plan.failed(Reason::Time, "no".into(), at(5, IDLE).boot, Timestamp(2000));
        assert_eq!(plan.next(at(5, due(WAITS))), Step::Stay);
        assert_eq!(plan.next(at(6, due(WAITS))), Step::Run(Reason::Time));
        // Without an end it is given up until the next time.
        for minute in [10, 20, 40, 80, 160, 320] {
            plan.failed(Reason::Time, "no".into(), at(minute, IDLE).boot, Timestamp(3000));
        }
        assert_eq!(plan.next(at(900, due(WAITS))), Step::Stay);
        assert_eq!(
            plan.next(at(900, Sight { due: Some(Timestamp(4000)), ..WAITS })),
            Step::Run(Reason::Time)
        );
    }
}
