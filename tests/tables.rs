//! Every suite whose result is a table, and a merge, in one program.
//!
//! ```text
//! tables SUITE [ROW...] [--full] [--seed N] [--list] [--at-once N]
//! tables merge [SUITE...] [--list] [--at-once N]
//! tables contract names | tables contract table LOG
//! ```
//!
//! A suite is a module; its rows are functions ([`agent_tests::table`]). What a merge is beyond them: [`merge`].

mod attach;
mod boundaries;
mod containers;
mod contract;
mod environments;
mod faults;
mod gangs;
mod merge;
mod pools;
mod scarcity;
mod snapshots;
mod upgrade;

use std::process::ExitCode;

use agent_tests::engine::end_shared;
use agent_tests::table::{Suite, show_panics_by_place};

/// Every suite, in the order in which its table is printed; they stay, because rows run in threads of their own.
fn suites() -> &'static [Suite] {
    vec![
        snapshots::suite(),
        environments::suite(),
        containers::suite(),
        gangs::suite(),
        attach::suite(),
        pools::suite(),
        boundaries::suite(),
        faults::suite(),
        upgrade::suite(),
        scarcity::suite(),
    ]
    .leak()
}

#[allow(clippy::print_stderr, reason = "says what it cannot do")]
fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let Some((first, rest)) = words.split_first() else {
        eprintln!("tables: name a suite, or `merge`");
        return ExitCode::from(2);
    };
    match first.as_str() {
        "contract" => return contract::main(rest),
        "probe" => return snapshots::probe::main(rest),
        _ => show_panics_by_place(),
    }
    let suites = suites();
    let code = match suites.iter().find(|suite| suite.name == first) {
        Some(suite) => suite.main(rest),
        None if first == "merge" => merge::main(suites, rest),
        None => {
            eprintln!("tables: there is no suite `{first}`");
            ExitCode::from(2)
        }
    };
    end_shared();
    code
}
