//! When to signal the processes of a job that must end. Pure: time is passed in; time in suspend
//! counts, because the controller keeps waiting.
//!
//! ```text
//! quiet ──stop──▶ Term once ──grace over──▶ Kill, again and again ──30 s──▶ GiveUp
//! ```
//!
//! A stop during the grace may shorten it, never lengthen it. A grace of zero skips SIGTERM.

use std::time::Duration;

use agent_model::Boot;

/// How long processes may survive the final signal before they are reported rather than waited for.
const GIVE_UP: Duration = Duration::from_secs(30);

/// Between two rounds of the final signal: at first, and at most.
const ROUND: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));

/// The longest grace, so that dates stay representable.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// What is to be done now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KillStep {
    /// Ask every process to end.
    Term,
    /// Kill every process.
    Kill,
    /// Stop waiting for them.
    GiveUp,
}

/// How far a stop has come.
#[derive(Debug, Clone, Default)]
pub(crate) struct KillEscalation {
    ask: bool,
    kill_at: Option<Boot>,
    killing: Option<Killing>,
}

#[derive(Debug, Clone)]
struct Killing {
    next: Boot,
    pause: Duration,
    give_up: Boot,
}

impl KillEscalation {
    /// A stop was asked for before.
    pub(crate) fn is_begun(&self) -> bool {
        self.kill_at.is_some()
    }

    /// The final signal was sent.
    pub(crate) fn has_killed(&self) -> bool {
        self.killing.is_some()
    }

    /// Ends the job: politely now, finally after `grace`.
    pub(crate) fn stop(&mut self, now: Boot, grace: Duration) {
        let kill_at = now + grace.min(LONGEST);
        self.ask |= self.kill_at.is_none() && !grace.is_zero();
        self.kill_at = Some(self.kill_at.map_or(kill_at, |before| before.min(kill_at)));
    }

    /// The next thing to do, if its time has come.
    pub(crate) fn due(&mut self, now: Boot) -> Option<KillStep> {
        let kill_at = self.kill_at?;
        if let Some(killing) = &mut self.killing {
            if now >= killing.give_up {
                return Some(KillStep::GiveUp);
            }
            if now < killing.next {
                return None;
            }
            killing.pause = (killing.pause * 2).min(ROUND.1);
            killing.next = now + killing.pause;
            return Some(KillStep::Kill);
        }
        if now >= kill_at {
            self.killing = Some(Killing { next: now + ROUND.0, pause: ROUND.0, give_up: now + GIVE_UP });
            return Some(KillStep::Kill);
        }
        std::mem::take(&mut self.ask).then_some(KillStep::Term)
    }

    /// When to ask [`due`](Self::due) again.
    pub(crate) fn next(&self) -> Option<Boot> {
        self.killing.as_ref().map(|killing| killing.next.min(killing.give_up)).or(self.kill_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn test_escalation_asks_once_then_kills_until_it_gives_up() {
        let start = Boot::from_millis(5_000);
        let mut escalation = KillEscalation::default();
        assert_eq!((escalation.due(start), escalation.next()), (None, None));
        escalation.stop(start, SECOND);
        assert_eq!(escalation.due(start), Some(KillStep::Term));
        assert_eq!(escalation.due(start), None);
        assert_eq!(escalation.next(), Some(start + SECOND));
        let mut now = start + SECOND;
        let mut kills = 0;
        while escalation.due(now) == Some(KillStep::Kill) {
            kills += 1;
            assert_eq!(escalation.due(now), None);
            now = escalation.next().unwrap();
        }
        assert_eq!(escalation.due(now), Some(KillStep::GiveUp));
        assert!(now <= start + SECOND + GIVE_UP && (100..200).contains(&kills), "{kills}");
    }

    #[test]
    fn test_second_stop_shortens_and_never_lengthens() {
        let start = Boot::from_millis(5_000);
        let mut escalation = KillEscalation::default();
        escalation.stop(start, 10 * SECOND);
        assert_eq!(escalation.due(start), Some(KillStep::Term));
        escalation.stop(start + SECOND, 60 * SECOND);
        assert_eq!(escalation.next(), Some(start + 10 * SECOND));
        escalation.stop(start + SECOND, Duration::ZERO);
        assert_eq!(escalation.due(start + SECOND), Some(KillStep::Kill));
    }

    #[test]
    fn test_no_grace_kills_at_once_and_endless_grace_does_not_overflow() {
        let start = Boot::from_millis(5_000);
        let mut escalation = KillEscalation::default();
        escalation.stop(start, Duration::ZERO);
        assert_eq!(escalation.due(start), Some(KillStep::Kill));
        let mut patient = KillEscalation::default();
        patient.stop(start, Duration::MAX);
        assert_eq!(patient.due(start), Some(KillStep::Term));
    }
}
