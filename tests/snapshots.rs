//! The table of snapshots: what strangers, broken disks, odd servers and the jobs themselves may do to them, tried
//! against the real store, the real controller and the real client. How rows are chosen and told:
//! [`agent_tests::table`].
//!
//! What could take too much memory or time is done by a process of its own, which is measured: [`probe`].

mod cases;
mod corpus;
mod crash;
mod elsewhere;
mod forge;
mod fuzz;
mod hostile;
mod isolation;
mod oddities;
mod oddstore;
mod peers;
pub(crate) mod probe;
mod raw;
mod room;
mod scans;

use agent_tests::table::{CLIPPY, Part, Row, Suite};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    let groups = [
        hostile::ROWS,
        isolation::ROWS,
        crash::ROWS,
        peers::ROWS,
        elsewhere::ROWS,
        oddities::ROWS,
        scans::ROWS,
        fuzz::ROWS,
        room::ROWS,
        cases::ROWS,
    ];
    groups.into_iter().flatten().collect()
}

/// Makes what the rows need, so that none is charged for it.
fn prepare() {
    agent_tests::binaries();
    peers::python();
}

pub(crate) fn suite() -> Suite {
    Suite {
        name: "snapshots",
        rows: rows(),
        cases: cases::CASES,
        prepare,
        merge: Part::All,
        after: &[(CLIPPY, Part::Rows(&["U1"]))],
        long: &[
            ("U1", 200),
            ("P2", 110),
            ("E3", 110),
            ("E2", 70),
            ("I8", 60),
            ("O2", 50),
            ("H5", 45),
            ("H1", 40),
        ],
    }
}
