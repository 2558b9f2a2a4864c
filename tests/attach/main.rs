//! The table of attach: machines with nothing but an SSH server become nodes, and are afterwards as they were before.
//! How rows are chosen and told: [`agent_tests::table`].

#![allow(clippy::print_stderr, reason = "says where a case failed")]

mod bed;
mod cuts;
mod logins;
mod machines;
mod nodes;

use std::process::ExitCode;

use agent_tests::table::{Row, Table};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    [nodes::ROWS, logins::ROWS, machines::ROWS, cuts::ROWS].into_iter().flatten().collect()
}

/// Makes what every row needs, so that no row is charged for it.
fn prepare() {
    bed::package();
}

fn main() -> ExitCode {
    // What a panic says is told with its case; here it is only where.
    std::panic::set_hook(Box::new(|panic| {
        if let Some(place) = panic.location() {
            eprintln!("  at {place}");
        }
    }));
    Table { name: "attach", rows: rows(), cases: &[], prepare }.main()
}
