//! The table of pools: machines that providers make become nodes, and go again. Each program that we ship is tried
//! against the real thing where there is one. How rows are chosen and told: [`agent_tests::table`].

mod bed;
mod command;
mod docker;
mod grow;
mod kubernetes;
mod slurm;
mod ssh;

use agent_tests::table::{Part, Row, Suite};

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

pub(crate) fn suite() -> Suite {
    Suite {
        name: "pools",
        rows: rows(),
        cases: &[],
        prepare,
        merge: Part::Rows(&["P1", "P3", "P4", "P5", "C1", "C2", "C3", "D1", "H1", "S1", "K1"]),
        after: &[],
        long: &[("P4", 130), ("P3", 40)],
    }
}
