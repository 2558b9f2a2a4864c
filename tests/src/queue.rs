//! One line of pieces of work, some at a time.
//!
//! The longest begin first, so that none is left for the end. A piece has a weight, because some wait and some compute:
//! together those that run never weigh more than the machine is given. What runs is told every minute, so that a log
//! says what everybody waits for. A piece that does not end is given up, and the others go on: its thread ends with the
//! program.

#![allow(clippy::print_stdout, reason = "the log of the run is what it is for")]

use std::any::Any;
use std::cmp::Reverse;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::cost;

/// Something to be done.
pub struct Piece<T> {
    /// Of which suite.
    pub suite: &'static str,
    /// Its name in the suite.
    pub name: String,
    /// About how many seconds it takes: the longest is begun first.
    pub seconds: u32,
    /// How much of the machine it takes; what mostly waits takes 1.
    pub weight: usize,
    /// The piece of its name must have ended before.
    pub after: Option<&'static str>,
    /// Does it.
    pub run: Box<dyn FnOnce() -> T + Send>,
}

impl<T> Piece<T> {
    /// The same, once the piece of this name has ended.
    #[must_use]
    pub fn after(self, name: &'static str) -> Self {
        Piece { after: Some(name), ..self }
    }
}

/// What came of a piece.
#[derive(Debug)]
pub struct Done<T> {
    /// Of which suite.
    pub suite: &'static str,
    /// Its name in the suite.
    pub name: String,
    /// When it began, after the first of all.
    pub begun: Duration,
    /// How long it took.
    pub took: Duration,
    /// What it gave, why it panicked, or that it did not end.
    pub came: Result<T, String>,
}

struct Running {
    suite: &'static str,
    name: String,
    since: Instant,
    weight: usize,
    /// It is given up after this.
    patience: Duration,
}

struct Line<T> {
    waiting: Vec<Piece<T>>,
    running: Vec<Running>,
    done: Vec<Done<T>>,
}

impl<T> Line<T> {
    /// The first that may begin: it fits beside those that run, and what it needs is there.
    fn next(&mut self, capacity: usize) -> Option<Piece<T>> {
        let taken: usize = self.running.iter().map(|running| running.weight).sum();
        let is_open = |name: &str| {
            self.waiting.iter().any(|piece| piece.name == name)
                || self.running.iter().any(|running| running.name == name)
        };
        let fits = |piece: &Piece<T>| taken == 0 || taken + piece.weight <= capacity;
        let at = self.waiting.iter().position(|piece| fits(piece) && !piece.after.is_some_and(is_open))?;
        Some(self.waiting.remove(at))
    }

    /// It has ended, unless it was given up before.
    fn end(&mut self, done: Done<T>) {
        if let Some(at) = self.running.iter().position(|running| running.name == done.name) {
            self.running.remove(at);
            self.done.push(done);
        }
    }

    /// Gives up what has run for too long.
    fn give_up(&mut self, start: Instant) {
        for late in self.running.extract_if(.., |running| running.since.elapsed() > running.patience) {
            let came = Err(format!("it had not ended after {} s, and was given up", late.patience.as_secs()));
            let (begun, took) = (late.since - start, late.since.elapsed());
            self.done.push(Done { suite: late.suite, name: late.name, begun, took, came });
        }
    }
}

/// Does all of it, no more than `capacity` at a time by weight; in the order in which they ended. A piece is given up
/// after `patience`, or three times what it takes as a rule.
pub fn run<T: Send + 'static>(
    mut pieces: Vec<Piece<T>>,
    capacity: usize,
    patience: Duration,
) -> Vec<Done<T>> {
    pieces.sort_by_key(|piece| Reverse(piece.seconds));
    let (ended, ends) = mpsc::channel();
    let mut line = Line { waiting: pieces, running: Vec::new(), done: Vec::new() };
    let (begun, mut told) = (Instant::now(), Instant::now());
    loop {
        while let Some(piece) = line.next(capacity) {
            line.running.push(Running {
                suite: piece.suite,
                name: piece.name.clone(),
                since: Instant::now(),
                weight: piece.weight,
                patience: patience.max(3 * Duration::from_secs(piece.seconds.into())),
            });
            let ended = ended.clone();
            // Nobody takes it where it was the last, and was given up.
            std::thread::spawn(move || drop(ended.send(one(piece, begun))));
        }
        if line.running.is_empty() {
            return line.done;
        }
        if let Ok(done) = ends.recv_timeout(Duration::from_secs(1)) {
            line.end(done);
        }
        line.give_up(begun);
        if told.elapsed() >= Duration::from_secs(60) {
            told = Instant::now();
            tell(&line, begun);
        }
    }
}

fn one<T>(piece: Piece<T>, start: Instant) -> Done<T> {
    cost::enter(piece.suite);
    let begun = Instant::now();
    let came = catch_unwind(AssertUnwindSafe(piece.run)).map_err(|panic| said(&*panic));
    Done { suite: piece.suite, name: piece.name, begun: begun - start, took: begun.elapsed(), came }
}

fn tell<T>(line: &Line<T>, begun: Instant) {
    let running: Vec<String> = line
        .running
        .iter()
        .map(|running| format!("{} for {} s", running.name, running.since.elapsed().as_secs()))
        .collect();
    let minutes = begun.elapsed().as_secs() / 60;
    println!(
        "after {minutes} min: {} ended, {} wait, running: {}",
        line.done.len(),
        line.waiting.len(),
        running.join(", ")
    );
}

/// What a panic said.
pub fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn piece<T>(
        name: &str,
        seconds: u32,
        weight: usize,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> Piece<T> {
        let run = Box::new(run);
        Piece { suite: "queue", name: name.to_owned(), seconds, weight, after: None, run }
    }

    #[test]
    fn test_what_runs_never_weighs_more_than_there_is_room_for() {
        let weights = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
        let work = |weight: usize| {
            let weights = Arc::clone(&weights);
            move || {
                let (now, most) = &*weights;
                most.fetch_max(now.fetch_add(weight, Ordering::SeqCst) + weight, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(5));
                now.fetch_sub(weight, Ordering::SeqCst);
            }
        };
        let pieces = (0..20).map(|n| piece(&n.to_string(), 0, 1 + n % 3, work(1 + n % 3))).collect();
        assert_eq!(run(pieces, 4, LONG).len(), 20);
        assert!((2..=4).contains(&weights.1.load(Ordering::SeqCst)));
    }

    #[test]
    fn test_the_longest_is_first_and_what_is_waited_for_has_ended() {
        let order = Arc::new(Mutex::new(Vec::new()));
        let note = |name: &'static str| {
            let order = Arc::clone(&order);
            move || order.lock().expect("nobody panics here").push(name)
        };
        let needy = piece("needy", 90, 1, note("needy")).after("needed");
        run(vec![piece("short", 1, 1, note("short")), needy, piece("needed", 5, 1, note("needed"))], 1, LONG);
        assert_eq!(*order.lock().expect("nobody panics here"), ["needed", "needy", "short"]);
    }

    fn came<T: Clone>(done: &[Done<T>], name: &str) -> Result<T, String> {
        done.iter().find(|done| done.name == name).expect("it ended").came.clone()
    }

    #[test]
    fn test_what_is_too_heavy_runs_alone_and_a_panic_is_told() {
        let done =
            run(vec![piece("heavy", 0, 9, || panic!("too much")), piece("light", 0, 1, || 7)], 2, LONG);
        assert_eq!(came(&done, "heavy"), Err("too much".to_owned()));
        assert_eq!(came(&done, "light"), Ok(7));
    }

    #[test]
    fn test_what_does_not_end_is_given_up_and_makes_room() {
        let (_open, never) = mpsc::channel::<()>();
        let stuck = piece("stuck", 0, 2, move || never.recv().unwrap_or_default());
        let done = run(vec![stuck, piece("next", 0, 1, || ())], 2, Duration::from_millis(50));
        assert_eq!(came(&done, "next"), Ok(()));
        assert!(came(&done, "stuck").is_err_and(|why| why.contains("had not ended")));
    }
}
