//! The table of upgrades: what the release before left, its nodes, its clients, its supervisors and its helper of root
//! meet this one; and the way back is refused in words. What is promised: `agent/docs/adr/0072-one-release-back.md`.
//!
//! Rows K and B1 need no program of the release before, but the state that one left, as `fixtures` has it; the others
//! run its programs. That the messages of both releases agree is a test of the repository, `wire`. How rows are chosen
//! and told: [`agent_tests::table`].

mod back;
mod clients;
mod helper;
mod kept;
mod nodes;
mod replaced;
mod states;

use agent_tests::table::{Part, Row, Suite};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    [kept::ROWS, back::ROWS, replaced::ROWS, nodes::ROWS, clients::ROWS, helper::ROWS]
        .into_iter()
        .flatten()
        .collect()
}

/// Makes what every row needs, so that no row is charged for it.
fn prepare() {
    agent_tests::binaries();
    kept::record_if_asked();
}

pub(crate) fn suite() -> Suite {
    Suite {
        name: "upgrade",
        rows: rows(),
        cases: &[],
        prepare,
        // Without those that build the release before, whose history a clone need not have.
        merge: Part::Rows(&["K1", "B1"]),
        after: &[],
        long: &[],
    }
}
