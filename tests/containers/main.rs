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

use std::process::ExitCode;

use agent_tests::engine::{Engine, end_shared};
use agent_tests::images::Image;
use agent_tests::table::{Row, Table};

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

fn main() -> ExitCode {
    agent_tests::table::show_panics_by_place();
    let code = Table { name: "containers", rows: rows(), cases: &[], prepare }.main();
    end_shared();
    code
}
