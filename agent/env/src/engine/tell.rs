//! Reports events as lines, and not more of them than anybody reads.
//!
//! Owns standard output. Hides how often progress is reported: always at the beginning of a phase and where it is
//! asked for, a few times a second in between, and every second if nothing has changed. Every step here has a time
//! limit, so the reader may take silence for a process that hangs.
//!
//! Invariants: each line is written whole, at once and flushed; nothing but events is written.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_env::{EngineEvent, Phase, Progress};
use parking_lot::Mutex;

/// Pause between two reports of the progress of one phase.
const PAUSE: Duration = Duration::from_millis(200);

/// The longest silence.
const BEAT: Duration = Duration::from_secs(1);

/// The writer of events.
pub(crate) struct Teller {
    last: Mutex<Option<(Progress, Instant)>>,
    out: Mutex<Box<dyn Write + Send>>,
}

impl Teller {
    /// To standard output.
    pub(crate) fn to_stdout() -> Arc<Self> {
        Arc::new(Self { last: Mutex::default(), out: Mutex::new(Box::new(std::io::stdout())) })
    }

    /// Writes an event. An error is ignored: if nobody reads, the process ends soon, see [`super::orphan`].
    pub(crate) fn tell(&self, event: &EngineEvent) {
        if let Ok(mut line) = serde_json::to_vec(event) {
            line.push(b'\n');
            let mut out = self.out.lock();
            let _ = out.write_all(&line).and_then(|()| out.flush());
        }
    }

    /// A line for the build log.
    pub(crate) fn say(&self, line: impl Into<String>) {
        self.tell(&EngineEvent::Say { line: line.into() });
    }

    /// Progress that must be reported: the beginning and the end of a phase.
    pub(crate) fn mark(&self, progress: Progress) {
        *self.last.lock() = Some((progress.clone(), Instant::now()));
        self.tell(&EngineEvent::Progress(progress));
    }

    /// Repeats the last progress whenever there was none for some time, for as long as this is kept.
    pub(crate) fn beat(self: &Arc<Self>) {
        let teller = Arc::downgrade(self);
        let beat = move || {
            loop {
                std::thread::sleep(BEAT / 3);
                let Some(teller) = teller.upgrade() else { return };
                let last = teller.last.lock().clone();
                if let Some((progress, at)) = last
                    && at.elapsed() >= BEAT
                {
                    teller.mark(progress);
                }
            }
        };
        // Without the thread there are no repeats.
        let _ = std::thread::Builder::new().name("beat".into()).spawn(beat);
    }

    /// Progress that may be left out.
    pub(crate) fn pass(&self, progress: impl FnOnce() -> Progress) {
        let mut last = self.last.lock();
        if last.as_ref().is_some_and(|(_, at)| at.elapsed() < PAUSE) {
            return;
        }
        let progress = progress();
        *last = Some((progress.clone(), Instant::now()));
        drop(last);
        self.tell(&EngineEvent::Progress(progress));
    }
}

/// Progress without counts.
pub(crate) fn busy(phase: Phase, what: impl Into<String>) -> Progress {
    Progress { phase, done: 0, total: 0, bytes: 0, bytes_total: 0, what: what.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn test_passing_progress_is_told_now_and_then_and_marks_always() {
        let kept = Kept::default();
        let teller = Teller { last: Mutex::default(), out: Mutex::new(Box::new(kept.clone())) };
        teller.mark(busy(Phase::Link, "a"));
        for _ in 0..50 {
            teller.pass(|| busy(Phase::Link, "b"));
        }
        teller.mark(busy(Phase::Link, "c"));
        let text = String::from_utf8(kept.0.lock().clone()).unwrap();
        let lines: Vec<EngineEvent> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.first(), Some(&EngineEvent::Progress(busy(Phase::Link, "a"))));
        assert_eq!(lines.last(), Some(&EngineEvent::Progress(busy(Phase::Link, "c"))));
        assert!(lines.len() < 10, "{} lines", lines.len());
    }
}
