//! The table of environments: what the conda engine must do, and must survive, tried against the real program.
//! How rows are chosen and told: [`agent_tests::table`].
//!
//! The engine is driven by its protocol alone, as the daemon does. Every failure must be of the kind that was
//! promised, and nothing half-built may be usable.

mod bench;
mod channels;
mod disk;
mod packages;
mod runtime;
mod servers;
mod specs;
mod together;

use agent_tests::table::{ENGINE, Part, Row, Suite};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    [specs::ROWS, channels::ROWS, servers::ROWS, packages::ROWS, disk::ROWS, together::ROWS, runtime::ROWS]
        .into_iter()
        .flatten()
        .collect()
}

pub(crate) fn suite() -> Suite {
    Suite {
        name: "environments",
        rows: rows(),
        cases: &[],
        prepare: bench::prepare,
        merge: Part::All,
        after: &[(ENGINE, Part::All)],
        long: &[("K3", 125)],
    }
}
