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

use agent_tests::table::{Part, Row, Suite};

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

pub(crate) fn suite() -> Suite {
    Suite {
        name: "gangs",
        rows: rows(),
        cases: &[],
        prepare: || _ = agent_tests::binaries(),
        merge: Part::Rows(&["P1", "P2", "P3", "P4", "M1", "A1", "X1", "X2", "X3", "D1", "D3", "R1", "J1"]),
        after: &[],
        long: &[("M1", 75), ("D1", 70), ("X2", 60), ("X1", 60), ("X3", 50), ("P3", 45)],
    }
}
