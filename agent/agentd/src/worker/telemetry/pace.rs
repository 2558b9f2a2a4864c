//! How many bytes may be in flight: as many as the controller takes in a moment.
//!
//! Without this, when the controller is slow, a line of one job would wait for minutes behind the output of a loud
//! one. The window is the measured rate of the controller times the time that an answer may take: the time of a lone
//! answer, with nothing else in flight, plus the time that bytes may wait. So a slow answer, such as after an fsync
//! on a busy disk, costs nothing, and an answer that is late because of earlier bytes makes the window smaller. After
//! that, the time of a lone answer is measured again now and then, when all other requests are answered.
//!
//! Pure: the caller passes the time.

use std::time::Duration;

use tokio::time::Instant;

/// The most bytes of one request.
pub(super) const CHUNK: u64 = 256 * 1024;
/// The most bytes of all files in flight: the upper limit of the window.
const LARGEST: u64 = 64 * CHUNK;
/// The lower limit of the window.
const SMALLEST: u64 = 2 * PROBE;
/// The window at the start of a connection.
const FIRST: u64 = 2 * SMALLEST;
/// A request of at most this many bytes measures the time of a lone answer.
const PROBE: u64 = 256;
/// How long bytes may wait for those before them.
const QUEUE: Duration = Duration::from_millis(500);
/// How long the time of a lone answer is valid after the window was made smaller.
const STALE: Duration = Duration::from_secs(5);
/// How long the best measured rate is valid.
const RECENT: Duration = Duration::from_secs(2);

/// The window of one connection.
#[derive(Debug)]
pub(super) struct Pace {
    window: u64,
    in_flight: u64,
    pending: usize,
    /// How many bytes were answered so far.
    taken: u64,
    /// The most bytes a second that the controller took recently, and when that was measured.
    rate: Option<(f64, Instant)>,
    /// The time of an answer when nothing else is in flight, and when that was measured.
    base: Option<(Duration, Instant)>,
    probing: bool,
}

/// When a request was sent, and the state at that time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    pub(super) at: Instant,
    bytes: u64,
    alone: bool,
    /// How many bytes were answered before.
    taken: u64,
}

impl Pace {
    pub(super) fn new() -> Pace {
        Pace { window: FIRST, in_flight: 0, pending: 0, taken: 0, rate: None, base: None, probing: true }
    }

    /// How many bytes may be sent now.
    pub(super) fn budget(&self) -> u64 {
        match self.probing {
            true if self.pending > 0 => 0,
            true => PROBE,
            false => self.window.saturating_sub(self.in_flight),
        }
    }

    /// The most bytes of one request.
    pub(super) fn chunk(&self) -> u64 {
        (self.window / 4).clamp(PROBE, CHUNK)
    }

    /// The most bytes of one file in flight.
    pub(super) fn share(&self) -> u64 {
        self.window / 2
    }

    pub(super) fn sent(&mut self, bytes: u64, now: Instant) -> Sent {
        let alone = self.pending == 0 && bytes <= PROBE;
        self.in_flight += bytes;
        self.pending += 1;
        Sent { at: now, bytes, alone, taken: self.taken }
    }

    pub(super) fn answered(&mut self, sent: Sent, now: Instant) {
        let full = self.in_flight >= self.window / 4;
        self.in_flight = self.in_flight.saturating_sub(sent.bytes);
        self.pending = self.pending.saturating_sub(1);
        self.taken += sent.bytes;
        let took = now.saturating_duration_since(sent.at);
        if sent.alone {
            self.base = Some((took, now));
            self.probing = false;
            return;
        }
        let Some((base, measured)) = self.base else { return };
        let may_take = base + base.max(QUEUE);
        let fits = self.rate(sent, took, now) * may_take.as_secs_f64();
        if took > may_take {
            self.window = self.within(fits, self.window / 2, self.window);
            self.probing |= now.saturating_duration_since(measured) > STALE;
        } else if full {
            self.window = self.within(fits, self.window, self.window * 2);
        }
    }

    /// The best recent rate, including this answer's: the bytes that were answered since its request was sent are
    /// what the controller took meanwhile.
    fn rate(&mut self, sent: Sent, took: Duration, now: Instant) -> f64 {
        let seen = (self.taken - sent.taken) as f64 / took.as_secs_f64().max(1e-6);
        let best = self.rate.filter(|(best, at)| *best > seen && now.saturating_duration_since(*at) < RECENT);
        self.rate.insert(best.unwrap_or((seen, now))).0
    }

    fn within(&self, bytes: f64, least: u64, most: u64) -> u64 {
        (bytes as u64).clamp(least, most).clamp(SMALLEST, LARGEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A controller that needs `fixed` for every answer, whatever its size, and takes `rate` bytes a second. Returns
    /// when it ended, and how long the last answer within `seconds` took.
    fn simulate(
        pace: &mut Pace,
        from: Instant,
        seconds: u64,
        fixed: Duration,
        rate: u64,
    ) -> (Instant, Duration) {
        let (mut now, mut free_at, mut waited) = (from, from, Duration::ZERO);
        let mut line: std::collections::VecDeque<(Sent, Instant)> = std::collections::VecDeque::new();
        while now < from + Duration::from_secs(seconds) {
            while pace.budget() > 0 {
                let bytes = pace.budget().min(pace.chunk());
                let served = Duration::from_secs_f64(bytes as f64 / rate as f64);
                free_at = free_at.max(now) + served;
                line.push_back((pace.sent(bytes, now), free_at + fixed));
            }
            let (sent, at) = line.pop_front().unwrap();
            now = at;
            waited = now - sent.at;
            pace.answered(sent, now);
        }
        while let Some((sent, at)) = line.pop_front() {
            now = at;
            pace.answered(sent, now);
        }
        (now, waited)
    }

    #[test]
    fn test_quick_controller_gets_the_largest_window() {
        let mut pace = Pace::new();
        simulate(&mut pace, Instant::now(), 1, Duration::from_millis(2), 500_000_000);
        assert_eq!(pace.window, LARGEST);
        assert_eq!((pace.chunk(), pace.share()), (CHUNK, LARGEST / 2));
    }

    #[test]
    fn test_slow_forced_writes_do_not_shrink_the_window() {
        let mut pace = Pace::new();
        let (now, _) = simulate(&mut pace, Instant::now(), 1, Duration::from_millis(2), 500_000_000);
        simulate(&mut pace, now, 60, Duration::from_secs(2), 500_000_000);
        assert!(pace.window >= LARGEST / 2, "{}", pace.window);
    }

    #[test]
    fn test_answers_that_are_late_by_chance_do_not_keep_the_window_small() {
        let (mut pace, mut now) = (Pace::new(), Instant::now());
        let lone = pace.sent(PROBE, now);
        now += Duration::from_millis(3);
        pace.answered(lone, now);
        for turn in 0..20 {
            (now, _) = simulate(&mut pace, now, 1, Duration::from_millis(150 + turn * 97 % 350), 500_000_000);
        }
        assert_eq!(pace.window, LARGEST);
    }

    #[test]
    fn test_what_waits_before_a_slow_controller_is_about_a_second_of_its_work() {
        let mut pace = Pace::new();
        let (_, waited) = simulate(&mut pace, Instant::now(), 60, Duration::from_millis(1), 1024);
        assert!(pace.window <= 2048 && waited < Duration::from_secs(2), "{} {waited:?}", pace.window);
    }

    #[test]
    fn test_controller_that_recovers_is_given_more_again() {
        let mut pace = Pace::new();
        let (now, _) = simulate(&mut pace, Instant::now(), 60, Duration::from_millis(1), 1024);
        simulate(&mut pace, now, 2, Duration::from_millis(1), 500_000_000);
        assert_eq!(pace.window, LARGEST);
    }
}
