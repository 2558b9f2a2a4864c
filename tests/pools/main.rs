//! The table of pools: machines that providers make become nodes, and go again. Each program that we ship is tried
//! against the real thing where there is one. How rows are chosen and told: [`agent_tests::table`].

mod bed;
mod command;
mod docker;
mod grow;
mod kubernetes;
mod slurm;
mod ssh;

use std::process::ExitCode;

use agent_tests::engine::end_shared;
use agent_tests::table::{Row, Table};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    [grow::ROWS, command::ROWS, docker::ROWS, ssh::ROWS, slurm::ROWS, kubernetes::ROWS]
        .into_iter()
        .flatten()
        .collect()
}

/// Makes what every row needs, so that no row is charged for it.
fn prepare() {
    agent_tests::binaries();
}

fn main() -> ExitCode {
    agent_tests::table::show_panics_by_place();
    let code = Table { name: "pools", rows: rows(), cases: &[], prepare }.main();
    end_shared();
    code
}
