//! The table of attach: machines with nothing but an SSH server become nodes, and are afterwards as they were before.
//! How rows are chosen and told: [`agent_tests::table`].

mod bed;
mod cuts;
mod logins;
mod machines;
mod nodes;
mod tunnels;

use agent_tests::table::{Part, Row, Suite};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    [nodes::ROWS, logins::ROWS, machines::ROWS, cuts::ROWS, tunnels::ROWS].into_iter().flatten().collect()
}

/// Makes what every row needs, so that no row is charged for it.
fn prepare() {
    bed::package();
}

pub(crate) fn suite() -> Suite {
    Suite {
        name: "attach",
        rows: rows(),
        cases: &[],
        prepare,
        merge: Part::Rows(&["N1", "L1", "M2", "C1", "T1"]),
        after: &[],
        long: &[("N1", 110), ("L1", 40)],
    }
}
