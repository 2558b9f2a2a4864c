//! The table of containers: what jobs in images are promised, tried with the real programs and a real engine.
//! How rows are chosen and told: [`agent_tests::table`].
//!
//! The engine is one of the suite's own ([`agent_tests::engine`]), so that it may be killed, frozen and started again;
//! the images are made on the machine and nothing is pulled but from a registry on loopback.

mod away;
mod bed;
mod contract;
mod pulls;
mod same;
mod site;
mod torn;

use agent_tests::engine::Engine;
use agent_tests::images::Image;
use agent_tests::table::{ENGINE, Part, Row, Suite};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    [bed::ROWS, same::ROWS, contract::ROWS, pulls::ROWS, away::ROWS, torn::ROWS]
        .into_iter()
        .flatten()
        .collect()
}

/// Makes what every row needs, so that no row is charged for it.
fn prepare() {
    agent_tests::binaries();
    let docker = Engine::shared();
    for image in [Image::Busybox, Image::Scratch, Image::Python] {
        image.on(&docker);
    }
}

pub(crate) fn suite() -> Suite {
    Suite {
        name: "containers",
        rows: rows(),
        cases: &[],
        prepare,
        merge: Part::Rows(&[
            "B1", "B2", "B3", "S1", "S2", "S3", "C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10",
            "C11", "C12", "I1", "I2", "I3", "I5", "I6", "E1A", "E1B", "E1C", "E1D", "E1E", "E1F", "T1", "T2",
            "T3", "T4", "T5", "T6",
        ]),
        after: &[(ENGINE, Part::Rows(&["S1", "S2", "S3"]))],
        long: &[("S1", 45)],
    }
}
