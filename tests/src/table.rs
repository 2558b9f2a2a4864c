//! A suite whose result is a table: rows that are promises, how often each was tried, and how often it held.
//!
//! ```text
//! SUITE [ROW...] [--full] [--seed N] [--list] [--at-once N]
//! ```
//!
//! A row may be named by its beginning: `A` is every row of that group. Two rows run at a time, because most of
//! their time is waiting. What fails is told with its evidence, and its files are kept; the seed makes the same
//! again. The exit code is 0 when everything that was tried held.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the table is what such a suite is for")]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::chance::Chance;
use crate::fleet::keep_evidence;

/// A suite.
#[derive(Debug)]
pub struct Table {
    /// The program.
    pub name: &'static str,
    /// Every row, in the order of the table.
    pub rows: Vec<&'static Row>,
    /// What is told by number as well, in whatever rows it is tried.
    pub cases: &'static [Case],
    /// Makes what all rows need, before the first begins.
    pub prepare: fn(),
}

/// Something that goes wrong elsewhere.
#[derive(Debug)]
pub struct Case {
    /// Its number.
    pub number: u32,
    /// In a line.
    pub what: &'static str,
    /// What tries it: a row, and what is in the names of its tries. Nothing where it cannot come about.
    pub by: &'static [(&'static str, &'static str)],
}

/// One line of the table.
#[derive(Debug)]
pub struct Row {
    /// For example `A4`.
    pub id: &'static str,
    /// What is promised, in one line.
    pub promise: &'static str,
    /// Tries it.
    pub run: fn(&mut Tally, &Scale),
}

/// How much is tried.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    /// All of it instead of what fits into a merge.
    pub full: bool,
    /// Where every random instant comes from.
    pub seed: u64,
}

impl Scale {
    /// How much: this for a merge, that for the whole table.
    pub fn of<T>(&self, short: T, full: T) -> T {
        if self.full { full } else { short }
    }

    /// The chance of this run.
    pub fn chance(&self) -> Chance {
        Chance::new(self.seed)
    }
}

/// What came of a row.
#[derive(Debug, Default)]
pub struct Tally {
    /// What was tried, how often, and how often it held.
    parts: Vec<(String, u32, u32)>,
    /// What was measured, for the table.
    pub notes: Vec<String>,
    /// What did not hold, and what it looked like.
    pub failures: Vec<String>,
}

impl Tally {
    /// Tries one case; a panic in it is a case that did not hold. What it used should be made in it, so that it
    /// can be looked at afterwards.
    pub fn case<T>(&mut self, name: &str, case: impl FnOnce() -> T) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(case)) {
            Ok(value) => {
                self.part(name, 1, 1);
                Some(value)
            }
            Err(panic) => {
                self.part(name, 1, 0);
                self.fail(name, &said(&*panic));
                None
            }
        }
    }

    /// Counts `tried` cases of one kind at once, of which so many failed as complaints are given.
    pub fn count(&mut self, tried: u32, what: &str, complaints: &[String]) {
        let failed = u32::try_from(complaints.len()).unwrap_or(u32::MAX).min(tried.max(1));
        self.part(what, tried.max(failed), tried.saturating_sub(failed));
        if !complaints.is_empty() {
            self.fail(what, &complaints[..complaints.len().min(20)].join("\n  "));
        }
    }

    /// Takes in what came of a part.
    pub fn add(&mut self, part: Tally) {
        self.parts.extend(part.parts);
        self.notes.extend(part.notes);
        self.failures.extend(part.failures);
    }

    /// How often something was tried.
    pub fn tried(&self) -> u32 {
        self.parts.iter().map(|part| part.1).sum()
    }

    /// How often it held.
    pub fn held(&self) -> u32 {
        self.parts.iter().map(|part| part.2).sum()
    }

    /// With `name` before all that it tells, because it is a part of something.
    pub fn within(mut self, name: &str) -> Tally {
        let told = self.notes.iter_mut().chain(&mut self.failures);
        told.for_each(|told| *told = format!("{name}: {told}"));
        self
    }

    /// Something to be told in the table.
    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    fn part(&mut self, name: &str, tried: u32, held: u32) {
        self.parts.push((name.to_owned(), tried, held));
    }

    fn fail(&mut self, name: &str, why: &str) {
        keep_evidence(true);
        let why: String = why.chars().take(2500).collect();
        self.failures.push(format!("{name}: {why}"));
    }

    /// Something was tried, and all of it held.
    fn all_held(&self) -> bool {
        self.tried() > 0 && self.tried() == self.held() && self.failures.is_empty()
    }
}

/// What a panic said.
pub fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
}

struct Wishes {
    rows: Vec<&'static Row>,
    scale: Scale,
    at_once: usize,
}

/// What one row came to.
struct Done {
    row: &'static Row,
    tally: Tally,
    took: Duration,
}

/// Prints only the place of each panic from here on: its message is printed with the case that it failed.
pub fn show_panics_by_place() {
    std::panic::set_hook(Box::new(|panic| {
        if let Some(place) = panic.location() {
            eprintln!("  at {place}");
        }
    }));
}

impl Table {
    /// Runs what the command line asks for, and prints the table.
    pub fn main(&self) -> ExitCode {
        let wishes = match self.wishes() {
            Ok(Some(wishes)) => wishes,
            Ok(None) => return ExitCode::SUCCESS,
            Err(complaint) => {
                eprintln!("{}: {complaint}", self.name);
                return ExitCode::from(2);
            }
        };
        let begun = Instant::now();
        (self.prepare)();
        println!("seed {}; {} scale", wishes.scale.seed, wishes.scale.of("short", "full"));
        let done = run_all(&wishes);
        print_cases(self.cases, &done);
        let failed = print(&done, wishes.scale);
        let passed = done.len() - failed;
        println!(
            "test result: {}. {passed} passed; {failed} failed; 0 ignored; finished in {:.0}s",
            if failed == 0 { "ok" } else { "FAILED" },
            begun.elapsed().as_secs_f64()
        );
        if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    fn wishes(&self) -> Result<Option<Wishes>, String> {
        let (mut names, mut full, mut seed, mut at_once) = (Vec::new(), false, Chance::seed(), 2);
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut number = || words.next().and_then(|text| text.parse::<u64>().ok());
            match word.as_str() {
                "--full" => full = true,
                "--seed" => seed = number().ok_or("--seed needs a number")?,
                "--at-once" => at_once = number().ok_or("--at-once needs a number")?,
                "--list" => {
                    self.rows.iter().for_each(|row| println!("{:<6} {}", row.id, row.promise));
                    return Ok(None);
                }
                name if name.starts_with('-') => return Err(format!("there is no `{name}`")),
                name => names.push(name.to_uppercase()),
            }
        }
        let rows = if names.is_empty() { self.rows.clone() } else { self.named(&names)? };
        let at_once = usize::try_from(at_once).unwrap_or(1).max(1);
        Ok(Some(Wishes { rows, scale: Scale { full, seed }, at_once }))
    }

    /// The rows of these names, or those that begin so.
    fn named(&self, names: &[String]) -> Result<Vec<&'static Row>, String> {
        let mut chosen = Vec::new();
        for name in names {
            let begun: Vec<_> =
                self.rows.iter().filter(|row| row.id.starts_with(name.as_str())).copied().collect();
            match begun.iter().find(|row| row.id == name) {
                Some(row) => chosen.push(*row),
                None if begun.is_empty() => {
                    return Err(format!("there is no row `{name}`; --list names them"));
                }
                None => chosen.extend(begun),
            }
        }
        Ok(chosen)
    }
}

/// Runs the rows, some at a time.
fn run_all(wishes: &Wishes) -> Vec<Done> {
    let (next, done) = (Mutex::new(wishes.rows.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..wishes.at_once {
            scope.spawn(|| {
                loop {
                    let Some(row) = next.lock().expect("nobody panics here").next() else { return };
                    let one = run_one(row, &wishes.scale);
                    done.lock().expect("nobody panics here").push(one);
                }
            });
        }
    });
    let mut done = done.into_inner().expect("nobody panics here");
    done.sort_by_key(|one: &Done| wishes.rows.iter().position(|row| row.id == one.row.id));
    done
}

fn run_one(row: &'static Row, scale: &Scale) -> Done {
    println!("{} begins: {}", row.id, row.promise);
    keep_evidence(false);
    let (begun, mut tally) = (Instant::now(), Tally::default());
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (row.run)(&mut tally, scale))) {
        tally.part("the row broke off", 1, 0);
        tally.fail("the row broke off", &said(&*panic));
    }
    let took = begun.elapsed();
    println!("{} ended: {} of {} in {:.1} s", row.id, tally.held(), tally.tried(), took.as_secs_f64());
    for failure in &tally.failures {
        println!("{} FAILED {failure}", row.id);
    }
    Done { row, tally, took }
}

/// Prints the cases by number. What names a try that there is not, in a row that ran, is an error of the suite.
fn print_cases(cases: &[Case], done: &[Done]) {
    if !cases.is_empty() {
        println!("\n{:<6} {:<64} {:>7} {:>7}  by", "case", "what", "tried", "held");
    }
    for Case { number, what, by } in cases {
        let (mut tried, mut held, mut rows) = (0, 0, Vec::new());
        for (id, part) in *by {
            rows.push(*id);
            let Some(row) = done.iter().find(|one| one.row.id == *id) else { continue };
            let parts = || row.tally.parts.iter().filter(|(name, ..)| name.contains(*part));
            assert!(parts().count() > 0, "case {number}: row {id} tries nothing with `{part}`");
            tried += parts().map(|part| part.1).sum::<u32>();
            held += parts().map(|part| part.2).sum::<u32>();
        }
        rows.dedup();
        println!("{number:<6} {what:<64} {tried:>7} {held:>7}  {}", rows.join(" "));
    }
}

/// Prints the table; how many rows failed.
fn print(done: &[Done], scale: Scale) -> usize {
    println!("\n{:<6} {:<84} {:>7} {:>7} {:>8}", "row", "what", "tried", "held", "seconds");
    let mut failed = 0;
    for Done { row, tally, took } in done {
        let (tried, held, seconds) = (tally.tried(), tally.held(), took.as_secs_f64());
        println!("{:<6} {:<84} {tried:>7} {held:>7} {seconds:>8.1}", row.id, row.promise);
        tally.notes.iter().for_each(|note| println!("{:<6}   {note}", ""));
        failed += usize::from(!tally.all_held());
    }
    for Done { row, tally, .. } in done {
        for failure in &tally.failures {
            println!("\n{} FAILED with --seed {}\n  {failure}", row.id, scale.seed);
        }
    }
    println!();
    failed
}
