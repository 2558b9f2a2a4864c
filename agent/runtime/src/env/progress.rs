//! The progress of a build as text: for the build log and for users who watch a job.

use std::time::{Duration, Instant};

use agent_env::{Phase, Progress};
use agent_model::size;
use agent_model::words::duration;

/// How often the build log gets the progress of a phase.
const EVERY: Duration = Duration::from_secs(2);

/// The progress of a build: `downloading packages, 12 of 40, 30 of 120 MiB: numpy`.
pub fn describe(progress: &Progress) -> String {
    let mut text = counted(progress);
    if !progress.what.is_empty() {
        text.push_str(": ");
        text.push_str(&progress.what);
    }
    text
}

fn counted(progress: &Progress) -> String {
    let mut text = progress.phase.to_string();
    if progress.total > 0 {
        text.push_str(&format!(", {} of {}", progress.done, progress.total));
    }
    if progress.bytes_total > 0 {
        text.push_str(&format!(", {}", size::part(progress.bytes, progress.bytes_total)));
    } else if progress.bytes > 0 {
        text.push_str(&format!(", {}", size::binary(progress.bytes)));
    }
    text
}

/// Chooses the lines of progress for the build log: the first of a phase, one now and then, and its end.
#[derive(Debug, Default)]
pub(super) struct Narrator {
    current: Option<Current>,
}

#[derive(Debug)]
struct Current {
    last: Progress,
    began: Instant,
    said: Instant,
}

impl Narrator {
    /// Takes a report of progress; returns the lines to log.
    pub(super) fn hear(&mut self, progress: &Progress, now: Instant) -> Vec<String> {
        match &mut self.current {
            Some(current) if current.last.phase == progress.phase => {
                current.last = progress.clone();
                if now - current.said < EVERY {
                    return Vec::new();
                }
                current.said = now;
                vec![describe(progress)]
            }
            _ => {
                let mut lines = self.end(now);
                self.current = Some(Current { last: progress.clone(), began: now, said: now });
                lines.push(describe(progress));
                lines
            }
        }
    }

    /// The line for the end of the last phase.
    pub(super) fn end(&mut self, now: Instant) -> Vec<String> {
        let Some(Current { last, began, .. }) = self.current.take() else { return Vec::new() };
        if last.phase == Phase::Waiting {
            return Vec::new();
        }
        vec![format!("{}: {}", counted(&last), duration(now.duration_since(began)))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(phase: Phase, done: u64, what: &str) -> Progress {
        let bytes = done << 20;
        Progress { phase, done, total: 40, bytes, bytes_total: 120 << 20, what: what.to_owned() }
    }

    #[test]
    fn test_phases_are_told_at_both_ends_and_now_and_then() {
        let (mut narrator, now) = (Narrator::default(), Instant::now());
        let first = narrator.hear(&progress(Phase::Download, 1, "numpy"), now);
        assert_eq!(first, ["downloading packages, 1 of 40, 1 of 120 MiB: numpy"]);
        assert!(narrator.hear(&progress(Phase::Download, 2, "scipy"), now).is_empty());
        let now = now + EVERY;
        let third = narrator.hear(&progress(Phase::Download, 3, ""), now);
        assert_eq!(third, ["downloading packages, 3 of 40, 3 of 120 MiB"]);
        let linking = Progress { bytes: 0, bytes_total: 0, ..progress(Phase::Link, 0, "") };
        let ends = narrator.hear(&linking, now);
        assert_eq!(ends, ["downloading packages, 3 of 40, 3 of 120 MiB: 2.0 s", "linking packages, 0 of 40"]);
        assert_eq!(narrator.end(now), ["linking packages, 0 of 40: 0 ms"]);
        assert!(narrator.end(now).is_empty());
    }
}
