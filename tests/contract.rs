//! What people who come from Azure Machine Learning do, row by row, and which test shows that it works here.
//!
//! ```text
//! tables contract names         the tests, for cargo
//! tables contract table LOG     the table, with what a run of them (LOG) said
//! ```
//!
//! The numbers are those of the coverage table of the contract: 64 things that its documents let people do. A row that
//! needs machines of its own is tried by another suite; one that is not done says why.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the table is what such a program is for")]

mod rows;

use std::process::ExitCode;

use rows::{Proof, ROWS, Row};

/// What a run said about a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Held,
    Failed,
    /// A test that is named did not run.
    NotTried,
    /// Another suite tries it.
    Elsewhere,
    NotDone,
}

/// What the words of the command line ask for.
pub(crate) fn main(words: &[String]) -> ExitCode {
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["names"] => {
            let mut names: Vec<&str> = ROWS.iter().flat_map(|row| row.tests()).copied().collect();
            names.sort_unstable();
            names.dedup();
            println!("{}", names.join("\n"));
            ExitCode::SUCCESS
        }
        ["table", log] => match std::fs::read_to_string(log) {
            Ok(log) => table(&log),
            Err(error) => {
                eprintln!("{log} cannot be read: {error}");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!("tables contract names | tables contract table LOG");
            ExitCode::from(2)
        }
    }
}

fn table(log: &str) -> ExitCode {
    let found: Vec<Found> = ROWS.iter().map(|row| found(row, log)).collect();
    println!("{:>2}  {:<8}  {:<42}  shown by", "#", "result", "what people do");
    for (row, found) in ROWS.iter().zip(&found) {
        let result = match found {
            Found::Held => "ok",
            Found::Failed => "FAILED",
            Found::NotTried => "not run",
            Found::Elsewhere => "suite",
            Found::NotDone => "no",
        };
        let by = match row.proof {
            Proof::Tests(tests) => tests.join(", "),
            Proof::Suite(suite, ids) => format!("tests/run {suite} {}", ids.join(" ")),
            Proof::No(why) => why.to_owned(),
        };
        println!("{:>2}  {result:<8}  {:<42}  {by}", row.number, row.what);
    }
    let count = |wanted: Found| found.iter().filter(|found| **found == wanted).count();
    let bad = count(Found::Failed) + count(Found::NotTried);
    println!("{} shown by other suites, {} not done", count(Found::Elsewhere), count(Found::NotDone));
    let verdict = if bad == 0 { "ok" } else { "FAILED" };
    println!("test result: {verdict}. {} passed; {bad} failed", count(Found::Held));
    if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What the log of cargo says about the tests of a row.
fn found(row: &Row, log: &str) -> Found {
    let tests = match row.proof {
        Proof::Tests(tests) => tests,
        Proof::Suite(..) => return Found::Elsewhere,
        Proof::No(_) => return Found::NotDone,
    };
    let ended = |name: &str, how: &str| {
        log.lines().any(|line| {
            let Some((test, said)) = line.split_once(" ... ") else { return false };
            test.rsplit("::").next().is_some_and(|last| last == name || last.ends_with(&format!(" {name}")))
                && said.trim_end().ends_with(how)
        })
    };
    if tests.iter().any(|name| ended(name, "FAILED")) {
        return Found::Failed;
    }
    match tests.iter().all(|name| ended(name, "ok")) {
        true => Found::Held,
        false => Found::NotTried,
    }
}
