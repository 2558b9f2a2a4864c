//! The table of faults: every promise is tried against the real programs, and the table says what held.
//! How rows are chosen and told: [`agent_tests::table`].

mod a_jobs;
mod a_lease;
mod a_races;
mod a_stops;
mod a_store;
mod a_taken;
mod a_wire;
mod b_lengths;
mod b_logs;
mod c_damage;
mod c_disk;
mod c_files;
mod c_host;
mod c_lost;
mod c_trees;
mod d_data;
mod d_envs;
mod judge;
mod look;
mod sweep;

use agent_tests::table::{ENGINE, Part, Row, Suite};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    [
        a_jobs::ROWS,
        a_lease::ROWS,
        a_store::ROWS,
        a_wire::ROWS,
        a_races::ROWS,
        a_stops::ROWS,
        a_taken::ROWS,
        sweep::ROWS,
        b_logs::ROWS,
        b_lengths::ROWS,
        c_trees::ROWS,
        c_host::ROWS,
        c_files::ROWS,
        c_lost::ROWS,
        c_damage::ROWS,
        c_disk::ROWS,
        d_data::ROWS,
        d_envs::ROWS,
    ]
    .into_iter()
    .flatten()
    .collect()
}

pub(crate) fn suite() -> Suite {
    Suite {
        name: "faults",
        rows: rows(),
        cases: &[],
        prepare: || _ = agent_tests::binaries(),
        merge: Part::Rows(&[
            "A1", "A2", "A3", "A4", "A6", "A8", "A14", "A17", "A19", "A20", "A21", "SWEEP", "B1", "B2", "B3",
            "B4", "B8", "B9", "B10", "C1", "C2", "C5", "C7", "C9", "C11", "C12", "C13", "C14", "C15", "C16",
            "C17", "C18", "C19", "C20", "D1", "D2", "D3",
        ]),
        after: &[(ENGINE, Part::Rows(&["D2", "D3"]))],
        long: &[
            ("SWEEP", 400),
            ("D2", 300),
            ("C7", 280),
            ("D3", 190),
            ("A17", 110),
            ("A2", 80),
            ("B9", 70),
            ("C13", 50),
            ("A19", 45),
            ("C1", 40),
            ("C17", 60),
        ],
    }
}
