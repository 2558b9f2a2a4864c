//! What a job directory means after a restart, and how long a command may run.

use std::time::Duration;

use crate::Boot;
use crate::job::OnDisconnect;
use crate::lease::Terms;

/// What a daemon finds in a job directory after a restart. The lock must be checked first: a supervisor writes its
/// record, or is killed, before its lock is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traces {
    /// Somebody holds the lock of the supervisor.
    pub supervised: bool,
    /// The mark of a start exists: the command may have run.
    pub started: bool,
    /// The record of how it ended exists.
    pub ended: bool,
    /// According to that record the command was never started, and still may be.
    pub may_start: bool,
}

/// What happened to a command while no daemon ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// It was never started, and may be.
    Fresh,
    /// Its supervisor is running: ask it.
    Live,
    /// It ended, and there is a record of how.
    Ended,
    /// It was started, and no more is known: it is not started again.
    Lost,
}

impl Traces {
    /// What they mean. An attempt is started at most once: the mark alone rules out another start.
    pub fn found(self) -> Found {
        match self {
            Traces { ended: true, may_start: true, started: false, .. } => Found::Fresh,
            Traces { ended: true, .. } => Found::Ended,
            Traces { supervised: true, .. } => Found::Live,
            Traces { started: true, .. } => Found::Lost,
            _ => Found::Fresh,
        }
    }
}

/// Until when a node may run a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Deadline(Option<Boot>);

impl Deadline {
    /// The deadline of an order; `None` is without limit.
    pub fn new(until: Option<Boot>) -> Deadline {
        Deadline(until)
    }

    /// The deadline of a replica that a daemon finds when it starts: for a job that may be replaced, one in the past,
    /// so that nothing is started before the controller has sent a later one.
    pub fn found(policy: OnDisconnect) -> Deadline {
        Deadline((policy == OnDisconnect::Replace).then(Boot::default))
    }

    /// A time was received: the latest one ever received counts. A deadline without a limit keeps none. Returns
    /// whether the deadline moved.
    pub fn hear(&mut self, until: Boot) -> bool {
        let moved = self.0.is_some_and(|known| known < until);
        if moved {
            self.0 = Some(until);
        }
        moved
    }

    /// When it is, if there is one.
    pub fn at(self) -> Option<Boot> {
        self.0
    }

    /// It has passed: nothing is started until a later time is received, and a running command is asked to end.
    pub fn is_over(self, now: Boot) -> bool {
        self.0.is_some_and(|until| until <= now)
    }

    /// When others than the supervisor kill the remaining processes: the supervisor has had its time by then.
    pub fn kill_at(self, grace: Duration, terms: Terms) -> Option<Boot> {
        self.0.map(|until| until + grace + terms.kill)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn test_every_directory_means_one_thing() {
        let found =
            |supervised, started, ended, may_start| Traces { supervised, started, ended, may_start }.found();
        for (traces, meaning) in [
            ((false, false, false, false), Found::Fresh),
            ((true, false, false, false), Found::Live),
            ((true, true, false, false), Found::Live),
            ((false, true, false, false), Found::Lost),
            ((false, true, true, false), Found::Ended),
            ((true, true, true, false), Found::Ended),
            ((false, false, true, false), Found::Ended),
            ((false, false, true, true), Found::Fresh),
            ((false, true, true, true), Found::Ended),
        ] {
            let (supervised, started, ended, may_start) = traces;
            assert_eq!(found(supervised, started, ended, may_start), meaning, "{traces:?}");
        }
    }

    proptest! {
        #[test]
        fn test_a_started_command_is_never_fresh(supervised: bool, ended: bool, may_start: bool) {
            let traces = Traces { supervised, started: true, ended, may_start };
            prop_assert_ne!(traces.found(), Found::Fresh);
        }

        #[test]
        fn test_a_deadline_only_moves_on(heard in prop::collection::vec(0u64..1000, 1..20)) {
            let mut deadline = Deadline::new(Some(Boot::from_millis(500)));
            let mut latest = Boot::from_millis(500);
            for until in heard.into_iter().map(Boot::from_millis) {
                prop_assert_eq!(deadline.hear(until), until > latest);
                latest = latest.max(until);
                prop_assert_eq!(deadline.at(), Some(latest));
                prop_assert!(deadline.is_over(latest));
            }
            let mut none = Deadline::default();
            prop_assert!(!none.hear(latest) && !none.is_over(latest));
        }
    }
}
