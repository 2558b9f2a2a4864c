//! The table of attach: machines with nothing but an SSH server become nodes, and are afterwards as they were before.
//! How rows are chosen and told: [`agent_tests::table`].

mod bed;
mod cuts;
mod logins;
mod machines;
mod nodes;
mod tunnels;

use std::process::ExitCode;

use agent_tests::table::{Row, Table};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    [nodes::ROWS, logins::ROWS, machines::ROWS, cuts::ROWS, tunnels::ROWS].into_iter().flatten().collect()
}

/// Makes what every row needs, so that no row is charged for it.
fn prepare() {
    bed::package();
}

fn main() -> ExitCode {
    agent_tests::table::show_panics_by_place();
    Table { name: "attach", rows: rows(), cases: &[], prepare }.main()
}
