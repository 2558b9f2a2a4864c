//! The table of faults: every promise is tried against the real programs, and the table says what held.
//!
//! ```text
//! faults [ROW...] [--full] [--seed N] [--list] [--at-once N]
//! ```
//!
//! A row may be named by its beginning: `A` is every row of that group. Two rows run at a time, because
//! most of their time is waiting. What fails is told with its evidence, and its files are kept; the seed
//! makes the same again. The exit code is 0 when everything that was tried was survived.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the table is what this program is for")]

mod a_jobs;
mod a_lease;
mod a_races;
mod a_store;
mod a_wire;
mod b_logs;
mod c_disk;
mod c_host;
mod c_trees;
mod d_data;
mod judge;
mod look;
mod row;
mod sweep;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use agent_tests::chance::Chance;
use agent_tests::fleet::keep_evidence;
use row::{Row, Scale, Tally};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    [
        a_jobs::ROWS,
        a_lease::ROWS,
        a_store::ROWS,
        a_wire::ROWS,
        a_races::ROWS,
        sweep::ROWS,
        b_logs::ROWS,
        c_trees::ROWS,
        c_host::ROWS,
        c_disk::ROWS,
        d_data::ROWS,
    ]
    .into_iter()
    .flatten()
    .collect()
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

fn main() -> ExitCode {
    let wishes = match wishes() {
        Ok(Some(wishes)) => wishes,
        Ok(None) => return ExitCode::SUCCESS,
        Err(complaint) => {
            eprintln!("faults: {complaint}");
            return ExitCode::from(2);
        }
    };
    let begun = Instant::now();
    agent_tests::binaries();
    println!("seed {}; {} scale", wishes.scale.seed, if wishes.scale.full { "full" } else { "short" });
    let done = run_all(&wishes);
    let failed = print(&done, wishes.scale);
    let passed = done.len() - failed;
    println!(
        "test result: {}. {passed} passed; {failed} failed; 0 ignored; finished in {:.0}s",
        if failed == 0 { "ok" } else { "FAILED" },
        begun.elapsed().as_secs_f64()
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn wishes() -> Result<Option<Wishes>, String> {
    let (mut names, mut full, mut seed, mut at_once) = (Vec::new(), false, Chance::seed(), 2);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|text| text.parse::<u64>().ok());
        match word.as_str() {
            "--full" => full = true,
            "--seed" => seed = number().ok_or("--seed needs a number")?,
            "--at-once" => at_once = number().ok_or("--at-once needs a number")?,
            "--list" => {
                rows().iter().for_each(|row| println!("{:<6} {}", row.id, row.promise));
                return Ok(None);
            }
            name if name.starts_with('-') => return Err(format!("there is no `{name}`")),
            name => names.push(name.to_uppercase()),
        }
    }
    let mut chosen = Vec::new();
    for name in &names {
        let known = rows();
        let exact: Vec<_> = known.iter().filter(|row| row.id == name).copied().collect();
        let alike: Vec<_> = known.iter().filter(|row| row.id.starts_with(name.as_str())).copied().collect();
        match (exact.is_empty(), alike.is_empty()) {
            (false, _) => chosen.extend(exact),
            (true, false) => chosen.extend(alike),
            (true, true) => return Err(format!("there is no row `{name}`; --list names them")),
        }
    }
    let rows = if names.is_empty() { rows() } else { chosen };
    let at_once = usize::try_from(at_once).unwrap_or(1).max(1);
    Ok(Some(Wishes { rows, scale: Scale { full, seed }, at_once }))
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
    let begun = Instant::now();
    let tally = catch_unwind(AssertUnwindSafe(|| (row.run)(scale))).unwrap_or_else(|panic| Tally {
        tried: 1,
        failures: vec![format!("the row broke off: {}", row::said(&*panic))],
        ..Tally::default()
    });
    let took = begun.elapsed();
    println!("{} ended: {} of {} in {:.0} s", row.id, tally.survived, tally.tried, took.as_secs_f64());
    for failure in &tally.failures {
        println!("{} FAILED {failure}", row.id);
    }
    Done { row, tally, took }
}

/// Prints the table; how many rows failed.
fn print(done: &[Done], scale: Scale) -> usize {
    println!("\n{:<6} {:<76} {:>7} {:>8} {:>7}", "row", "what", "tried", "survived", "seconds");
    let mut failed = 0;
    for Done { row, tally, took } in done {
        let seconds = took.as_secs_f64();
        let Tally { tried, survived, .. } = tally;
        println!("{:<6} {:<76} {tried:>7} {survived:>8} {seconds:>7.0}", row.id, row.promise);
        tally.notes.iter().for_each(|note| println!("{:<6}   {note}", ""));
        let kept = tried == survived && *tried > 0 && tally.failures.is_empty();
        failed += usize::from(!kept);
    }
    for Done { row, tally, .. } in done {
        for failure in &tally.failures {
            println!("\n{} FAILED with --seed {}\n  {failure}", row.id, scale.seed);
        }
    }
    println!();
    failed
}
