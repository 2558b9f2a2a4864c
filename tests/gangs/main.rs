//! The table of gangs: what jobs on several nodes are promised, tried with the real programs on hosts of their own.
//! How rows are chosen and told: [`agent_tests::table`].

#![allow(clippy::print_stderr, reason = "says where a case failed")]

mod bed;
mod chaos;
mod frameworks;
mod matrix;
mod mpi;
mod networks;
mod plain;

use std::process::ExitCode;

use agent_tests::table::{Row, Table};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    [plain::ROWS, matrix::ROWS, mpi::ROWS, networks::ROWS, frameworks::ROWS, chaos::ROWS]
        .into_iter()
        .flatten()
        .collect()
}

/// Makes what every row needs, so that no row is charged for it.
fn prepare() {
    agent_tests::binaries();
}

fn main() -> ExitCode {
    // What a panic says is told with its case; here it is only where.
    std::panic::set_hook(Box::new(|panic| {
        if let Some(place) = panic.location() {
            eprintln!("  at {place}");
        }
    }));
    Table { name: "gangs", rows: rows(), cases: &[], prepare }.main()
}
