//! One line of pieces of work, some at a time.
//!
//! The longest begin first, so that none is left for the end. A piece has a weight, because some wait and some compute:
//! together those that run never weigh more than the machine is given. What runs is told every minute, so that a log
//! says what everybody waits for.

#![allow(clippy::print_stdout, reason = "the log of the run is what it is for")]

use std::any::Any;
use std::cmp::Reverse;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::cost;

/// Something to be done.
pub struct Piece<'a, T> {
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
    pub run: Box<dyn FnOnce() -> T + Send + 'a>,
}

impl<T> Piece<'_, T> {
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
    /// What it gave, or why it panicked.
    pub came: Result<T, String>,
}

struct Line<'a, T> {
    waiting: Vec<Piece<'a, T>>,
    /// By name, since when, and the weight.
    running: Vec<(String, Instant, usize)>,
    done: Vec<Done<T>>,
}

impl<'a, T> Line<'a, T> {
    /// The first that may begin: it fits beside those that run, and what it needs is there.
    fn next(&mut self, capacity: usize) -> Option<Piece<'a, T>> {
        let taken: usize = self.running.iter().map(|running| running.2).sum();
        let is_open = |name: &str| {
            self.waiting.iter().any(|piece| piece.name == name)
                || self.running.iter().any(|running| running.0 == name)
        };
        let fits = |piece: &Piece<'_, T>| taken == 0 || taken + piece.weight <= capacity;
        let at = self.waiting.iter().position(|piece| fits(piece) && !piece.after.is_some_and(is_open))?;
        Some(self.waiting.remove(at))
    }
}

/// Does all of it, no more than `capacity` at a time by weight; in the order in which they ended.
pub fn run<T: Send>(mut pieces: Vec<Piece<'_, T>>, capacity: usize) -> Vec<Done<T>> {
    pieces.sort_by_key(|piece| Reverse(piece.seconds));
    let line = Mutex::new(Line { waiting: pieces, running: Vec::new(), done: Vec::new() });
    let (changed, begun) = (Condvar::new(), Instant::now());
    let lock = || line.lock().unwrap_or_else(PoisonError::into_inner);
    std::thread::scope(|scope| {
        let mut told = Instant::now();
        let mut now = lock();
        loop {
            while let Some(piece) = now.next(capacity) {
                now.running.push((piece.name.clone(), Instant::now(), piece.weight));
                let (lock, changed) = (&lock, &changed);
                scope.spawn(move || {
                    let done = one(piece, begun);
                    let mut now = lock();
                    now.running.retain(|running| running.0 != done.name);
                    now.done.push(done);
                    changed.notify_one();
                });
            }
            if now.running.is_empty() {
                break;
            }
            now =
                changed.wait_timeout(now, Duration::from_secs(60)).unwrap_or_else(PoisonError::into_inner).0;
            if told.elapsed() >= Duration::from_secs(60) {
                told = Instant::now();
                tell(&now, begun);
            }
        }
    });
    line.into_inner().unwrap_or_else(PoisonError::into_inner).done
}

fn one<T>(piece: Piece<'_, T>, start: Instant) -> Done<T> {
    cost::enter(piece.suite);
    let begun = Instant::now();
    let came = catch_unwind(AssertUnwindSafe(piece.run)).map_err(|panic| said(&*panic));
    Done { suite: piece.suite, name: piece.name, begun: begun - start, took: begun.elapsed(), came }
}

fn tell<T>(line: &Line<'_, T>, begun: Instant) {
    let running: Vec<String> = line
        .running
        .iter()
        .map(|(name, since, _)| format!("{name} for {} s", since.elapsed().as_secs()))
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

    use super::*;

    fn piece<'a, T>(
        name: &str,
        seconds: u32,
        weight: usize,
        run: impl FnOnce() -> T + Send + 'a,
    ) -> Piece<'a, T> {
        let run = Box::new(run);
        Piece { suite: "queue", name: name.to_owned(), seconds, weight, after: None, run }
    }

    #[test]
    fn test_what_runs_never_weighs_more_than_there_is_room_for() {
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = |weight: usize| {
            let (now, most) = (&now, &most);
            move || {
                most.fetch_max(now.fetch_add(weight, Ordering::SeqCst) + weight, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(5));
                now.fetch_sub(weight, Ordering::SeqCst);
            }
        };
        let pieces = (0..20).map(|n| piece(&n.to_string(), 0, 1 + n % 3, work(1 + n % 3))).collect();
        assert_eq!(run(pieces, 4).len(), 20);
        assert!((2..=4).contains(&most.into_inner()));
    }

    #[test]
    fn test_the_longest_is_first_and_what_is_waited_for_has_ended() {
        let order = Mutex::new(Vec::new());
        let note = |name: &'static str| {
            let order = &order;
            move || order.lock().expect("nobody panics here").push(name)
        };
        let needy = piece("needy", 90, 1, note("needy")).after("needed");
        run(vec![piece("short", 1, 1, note("short")), needy, piece("needed", 5, 1, note("needed"))], 1);
        assert_eq!(order.into_inner().expect("nobody panics here"), ["needed", "needy", "short"]);
    }

    #[test]
    fn test_what_is_too_heavy_runs_alone_and_a_panic_is_told() {
        let done = run(vec![piece("heavy", 0, 9, || panic!("too much")), piece("light", 0, 1, || 7)], 2);
        let came = |name: &str| done.iter().find(|done| done.name == name).expect("it ended").came.clone();
        assert_eq!(came("heavy"), Err("too much".to_owned()));
        assert_eq!(came("light"), Ok(7));
    }
}
