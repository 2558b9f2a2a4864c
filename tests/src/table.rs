//! A suite whose result is a table: rows that are promises, how often each was tried, and how often it held.
//!
//! ```text
//! tables SUITE [ROW...] [--full] [--seed N] [--list] [--at-once N]
//! ```
//!
//! A row may be named by its beginning: `A` is every row of that group. Some rows run at a time, because most of
//! their time is waiting. What fails is told with its evidence, at the end, and its files are kept; the seed makes the
//! same again. The exit code is 0 when everything that was tried held.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the table is what such a suite is for")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::chance::Chance;
use crate::fleet::keep_evidence;
use crate::queue::{self, Piece, said};

/// A piece of a merge that rows wait for: what builds the conda engine.
pub const ENGINE: &str = "the conda engine";

/// Another: the check of style, which has the directory of cargo until it ends.
pub const CLIPPY: &str = "clippy";

/// A row that was named may take so long, because it may try all there is.
const ALL_OF_IT: Duration = Duration::from_secs(4 * 3600);

/// A suite.
#[derive(Debug)]
pub struct Suite {
    /// What it is called.
    pub name: &'static str,
    /// Every row, in the order of the table.
    pub rows: Vec<&'static Row>,
    /// What is told by number as well, in whatever rows it is tried.
    pub cases: &'static [Case],
    /// Makes what all rows need, before the first begins.
    pub prepare: fn(),
    /// What of it belongs into a merge; the others wait too long, or fill disks.
    pub merge: Part,
    /// What cannot begin before another piece of a merge has ended.
    pub after: &'static [(&'static str, Part)],
    /// Those that last, and about how many seconds of a merge: they begin before the others.
    pub long: &'static [(&'static str, u32)],
}

/// Some rows of a suite.
#[derive(Debug)]
pub enum Part {
    /// None.
    Nothing,
    /// Those of these names.
    Rows(&'static [&'static str]),
    /// Every one.
    All,
}

impl Part {
    fn has(&self, row: &Row) -> bool {
        match self {
            Part::Nothing => false,
            Part::Rows(names) => names.contains(&row.id),
            Part::All => true,
        }
    }
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

struct Wishes {
    rows: Vec<&'static Row>,
    scale: Scale,
    at_once: usize,
}

/// What one row came to.
#[derive(Debug)]
pub struct Told {
    row: &'static Row,
    tally: Tally,
    /// Seconds, without what all rows need.
    took: f64,
}

impl Told {
    /// Something was tried, and all of it held.
    pub fn held(&self) -> bool {
        self.tally.all_held()
    }
}

/// Prints only the place of each panic from here on: its message is printed with the case that it failed.
pub fn show_panics_by_place() {
    std::panic::set_hook(Box::new(|panic| {
        if let Some(place) = panic.location() {
            eprintln!("  at {place}");
        }
    }));
}

impl Suite {
    /// Runs what the words of the command line ask for, and prints the table.
    pub fn main(&'static self, words: &[String]) -> ExitCode {
        let wishes = match self.wishes(words) {
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
        let prepared = Box::leak(Box::new(OnceLock::from(())));
        let pieces = wishes.rows.iter().map(|row| self.piece(row, wishes.scale, prepared)).collect();
        let (mut told, mut failures) = (Vec::new(), Vec::new());
        for done in queue::run(pieces, wishes.at_once, ALL_OF_IT) {
            match done.came {
                Ok(one) => told.push(one),
                Err(why) => failures.push(format!("{} FAILED: {why}", done.name)),
            }
        }
        let told = self.in_order(told);
        self.print(&told);
        failures.extend(self.failures(&told, wishes.scale));
        failures.iter().for_each(|failure| println!("\n{failure}"));
        let held = told.iter().filter(|one| one.held()).count();
        println!("\n{} s", begun.elapsed().as_secs());
        println!("{held} passed, {} failed", wishes.rows.len() - held);
        if held == wishes.rows.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    fn wishes(&self, words: &[String]) -> Result<Option<Wishes>, String> {
        let (mut names, mut full, mut seed, mut at_once) = (Vec::new(), false, Chance::seed(), 4);
        let mut words = words.iter();
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

    /// What a merge tries of it.
    ///
    /// # Panics
    ///
    /// Where the suite names a row that it does not have.
    pub fn of_a_merge(&'static self, scale: Scale, prepared: &'static OnceLock<()>) -> Vec<Piece<Told>> {
        let parts = std::iter::once(&self.merge).chain(self.after.iter().map(|after| &after.1));
        let named = parts.flat_map(|part| if let Part::Rows(names) = part { names } else { [].as_slice() });
        for name in named.chain(self.long.iter().map(|long| &long.0)) {
            assert!(self.rows.iter().any(|row| row.id == *name), "{} has no row {name}", self.name);
        }
        let rows = self.rows.iter().filter(|row| self.merge.has(row));
        rows.map(|row| self.piece(row, scale, prepared)).collect()
    }

    /// A row, to be tried when there is room for it.
    fn piece(&'static self, row: &'static Row, scale: Scale, prepared: &'static OnceLock<()>) -> Piece<Told> {
        let seconds = self.long.iter().find(|long| long.0 == row.id).map_or(0, |long| long.1);
        let run = Box::new(move || {
            prepared.get_or_init(self.prepare);
            self.one(row, scale)
        });
        let name = format!("{} {}", self.name, row.id);
        let after = self.after.iter().find(|after| after.1.has(row)).map(|after| after.0);
        Piece { suite: self.name, name, seconds, weight: 1, after, run }
    }

    fn one(&self, row: &'static Row, scale: Scale) -> Told {
        let name = format!("{} {}", self.name, row.id);
        println!("{name} begins: {}", row.promise);
        let (begun, mut tally) = (Instant::now(), Tally::default());
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (row.run)(&mut tally, &scale))) {
            tally.part("the row broke off", 1, 0);
            tally.fail("the row broke off", &said(&*panic));
        }
        let took = begun.elapsed().as_secs_f64();
        println!("{name} ended: {} of {} in {took:.1} s", tally.held(), tally.tried());
        Told { row, tally, took }
    }

    /// As the table has them.
    pub fn in_order(&self, mut told: Vec<Told>) -> Vec<Told> {
        told.sort_by_key(|one| self.rows.iter().position(|row| row.id == one.row.id));
        told
    }

    /// Prints the table. What names a try that there is not, in a row that ran, is an error of the suite.
    pub fn print(&self, told: &[Told]) {
        print_cases(self.cases, told);
        println!("\n{:<6} {:<84} {:>7} {:>7} {:>8}", "row", self.name, "tried", "held", "seconds");
        for Told { row, tally, took } in told {
            println!(
                "{:<6} {:<84} {:>7} {:>7} {took:>8.1}",
                row.id,
                row.promise,
                tally.tried(),
                tally.held()
            );
            tally.notes.iter().for_each(|note| println!("{:<6}   {note}", ""));
        }
    }

    /// Everything that did not hold, with what makes it again.
    pub fn failures(&self, told: &[Told], scale: Scale) -> Vec<String> {
        let mut failures = Vec::new();
        for one in told.iter().filter(|one| !one.held()) {
            let again = format!("{} {} FAILED with --seed {}", self.name, one.row.id, scale.seed);
            failures.extend(one.tally.failures.iter().map(|failure| format!("{again}\n  {failure}")));
            if one.tally.failures.is_empty() {
                failures.push(format!(
                    "{again}\n  it tried {} and {} held",
                    one.tally.tried(),
                    one.tally.held()
                ));
            }
        }
        failures
    }
}

/// Prints the cases by number.
fn print_cases(cases: &[Case], told: &[Told]) {
    if !cases.is_empty() {
        println!("\n{:<6} {:<64} {:>7} {:>7}  by", "case", "what", "tried", "held");
    }
    for Case { number, what, by } in cases {
        let (mut tried, mut held, mut rows) = (0, 0, Vec::new());
        for (id, part) in *by {
            rows.push(*id);
            let Some(row) = told.iter().find(|one| one.row.id == *id) else { continue };
            let parts = || row.tally.parts.iter().filter(|(name, ..)| name.contains(*part));
            assert!(parts().count() > 0, "case {number}: row {id} tries nothing with `{part}`");
            tried += parts().map(|part| part.1).sum::<u32>();
            held += parts().map(|part| part.2).sum::<u32>();
        }
        rows.dedup();
        println!("{number:<6} {what:<64} {tried:>7} {held:>7}  {}", rows.join(" "));
    }
}
