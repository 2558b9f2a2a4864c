//! The table of gangs: what jobs on several nodes are promised, tried with the real programs on hosts of their own.
//! How rows are chosen and told: [`agent_tests::table`].

mod bed;
mod chaos;
mod cloud;
mod fanout;
mod frameworks;
mod matrix;
mod mpi;
mod networks;
mod plain;

use std::process::ExitCode;

use agent_tests::table::{Row, Table};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    [
        plain::ROWS,
        matrix::ROWS,
        mpi::ROWS,
        networks::ROWS,
        frameworks::ROWS,
        cloud::ROWS,
        fanout::ROWS,
        chaos::ROWS,
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn main() -> ExitCode {
    agent_tests::table::show_panics_by_place();
    Table { name: "gangs", rows: rows(), cases: &[], prepare: || _ = agent_tests::binaries() }.main()
}
