//! The table of boundaries: what a hostile job, image or user of the machine tries, done for real against the real
//! programs, and whether it held. How rows are chosen and told: [`agent_tests::table`].
//!
//! | File | What is tried |
//! |---|---|
//! | `links` | what a job puts in the place of its files, before, while and after the daemon looks |
//! | `containers` | images and jobs in containers against the supervisor, the machine and other containers |
//! | `users` | whom jobs and builders run as, and what they reach of others; secrets |
//! | `builds` | what packages, interpreters and builders leave where environments are made |
//! | `namesakes` | what somebody with the name of a removed user gets of that one |
//! | `split` | a daemon that is an ordinary user, and what it could have its helper do if it were taken over |
//! | `helper` | the helper itself: links, odd and silent connections, deep trees, its absence in the middle of work |
//! | `gpus` | the device nodes of GPUs of others |
//! | `own` | a user's own daemon: what hides from it |
//! | `ports` | who takes the daemon's place at its port |
//! | `beside` | a job that attacks all it finds, beside those of others |
//! | `quotas` | what one job takes of the daemon: memory, threads, connections, disk |
//!
//! A row runs jobs that attack, and looks at the machine from outside afterwards: a secret that only root may read must
//! be nowhere, a file that only root may write must be as it was. Races are tried some hundred times, and a thousand
//! with `--full`.

mod beside;
mod builds;
mod containers;
mod gpus;
mod helper;
mod links;
mod namesakes;
mod own;
mod ports;
mod prey;
mod quotas;
mod split;
mod users;

use agent_tests::table::{ENGINE, Part, Row, Suite};

/// Every row, in the order of the table.
fn rows() -> Vec<&'static Row> {
    [
        links::ROWS,
        containers::ROWS,
        quotas::ROWS,
        users::ROWS,
        builds::ROWS,
        namesakes::ROWS,
        split::ROWS,
        helper::ROWS,
        gpus::ROWS,
        own::ROWS,
        ports::ROWS,
        beside::ROWS,
    ]
    .into_iter()
    .flatten()
    .collect()
}

pub(crate) fn suite() -> Suite {
    Suite {
        name: "boundaries",
        rows: rows(),
        cases: &[],
        prepare: || _ = agent_tests::binaries(),
        merge: Part::Rows(&[
            "L1", "L2", "C1", "C2", "U1", "U2", "U10", "U11", "U12", "U13", "H1", "H2", "H3", "K1", "K2",
            "K3", "K4", "G1", "O1", "O3", "O4", "A1",
        ]),
        after: &[(ENGINE, Part::Rows(&["U10", "H4", "H5"]))],
        long: &[("O3", 105), ("H1", 45)],
    }
}
