//! What goes wrong with snapshots elsewhere, by number, and what tries it here: a row of this table or part of one.
//! Where it takes the inside of a store to bring it about, that is a unit test, which a row of its own runs.

use std::collections::BTreeSet;
use std::process::Command;

use agent_tests::table::{Case, Row, Scale, Tally};
use agent_tests::{binaries, root};

/// The rows of this group.
pub(crate) const ROWS: &[Row] =
    &[Row { id: "U1", promise: "what only a unit test can bring about is survived as well", run: units }];

/// In the order of the ways a blob goes: the wire, its life in a store, the disk, the scan, the job.
pub(crate) const CASES: &[Case] = &[
    Case { number: 1, what: "limits of a server that are odd or lies", by: &[("P2", "limit-")] },
    Case { number: 2, what: "answers over 4 MiB", by: &[("P2", "large-answers")] },
    Case {
        number: 3,
        what: "one bad item in a batch",
        by: &[("P1", "one wrong blob"), ("P1", "absent blobs"), ("P2", "leaves-out")],
    },
    Case {
        number: 4,
        what: "trees that are incomplete, doubled, cyclic or huge",
        by: &[("H5", ""), ("P1", "tree")],
    },
    Case {
        number: 5,
        what: "exponential trees",
        by: &[("H5", ""), ("P1", "billion"), ("U1", "test_exponential_trees_are_refused_by_their_sums")],
    },
    Case {
        number: 6,
        what: "directories with odd names or encodings",
        by: &[("H1", ""), ("H3", ""), ("F1", ""), ("F2", "")],
    },
    Case {
        number: 7,
        what: "odd digests",
        by: &[("P1", "digest"), ("P1", "hash and size"), ("P2", "bad-digests")],
    },
    Case { number: 8, what: "the empty blob in every call", by: &[("P1", "empty"), ("P1", "nothing")] },
    Case {
        number: 9,
        what: "committed sizes that are odd, early answers, streams reset",
        by: &[
            ("P2", "committed"),
            ("P2", "early-answer"),
            ("P2", "dies-in-writes"),
            ("P2", "breaks-streams"),
        ],
    },
    Case {
        number: 10,
        what: "cuts at every message; two writers",
        by: &[("P1", "cut"), ("P1", "two writers")],
    },
    Case {
        number: 11,
        what: "offsets of every kind, also where they are ignored",
        by: &[("P1", "where they are told"), ("P1", "break off"), ("P2", "ignores-offsets")],
    },
    Case { number: 12, what: "hostile compression", by: &[("P1", "hostile compressed"), ("P3", "zstd")] },
    Case {
        number: 13,
        what: "wrong bytes of the right size",
        by: &[("P2", "flips"), ("P2", "swaps"), ("H4", "")],
    },
    Case {
        number: 14,
        what: "other hash functions",
        by: &[("P1", "functions"), ("P2", "other-function"), ("E3", "function")],
    },
    Case {
        number: 15,
        what: "slow, silent and restless peers",
        by: &[("P1", "slow"), ("P2", "dribbles"), ("P2", "endless"), ("P2", "restless"), ("E2", "")],
    },
    Case {
        number: 16,
        what: "eviction between any two steps",
        by: &[
            ("G1", ""),
            ("P2", "evicts"),
            ("P2", "forgetful"),
            ("U1", "test_what_is_relied_on_during_a_collection_stays"),
        ],
    },
    Case {
        number: 17,
        what: "a store smaller than a snapshot",
        by: &[("K3", "fills up"), ("U1", "test_the_limit_of_the_store_is_kept")],
    },
    Case { number: 18, what: "chunks evicted without their blob (there are none)", by: &[] },
    Case {
        number: 19,
        what: "a late eviction of what was sent again",
        by: &[
            ("U1", "test_what_is_used_after_a_listing_is_not_removed_for_it"),
            ("U1", "test_what_is_held_stays_while_others_are_removed"),
        ],
    },
    Case {
        number: 20,
        what: "pins after a crash; jumps of the clock",
        by: &[
            ("G1", "every result"),
            ("U1", "test_a_clock_that_jumps_neither_keeps_for_ever_nor_loses_what_is_held"),
        ],
    },
    Case {
        number: 21,
        what: "kills at every step of storing",
        by: &[("K1", ""), ("U1", "test_killed_at_any_step_the_next_life_has_what_was_acknowledged")],
    },
    Case {
        number: 22,
        what: "errors of the disk at every step, no room, no inodes",
        by: &[("K2", ""), ("K3", "")],
    },
    Case {
        number: 23,
        what: "torn tails, flipped bits, files of the store removed",
        by: &[
            ("U1", "test_torn_tail_costs_nothing_that_was_acknowledged"),
            ("U1", "test_flipped_bit_costs_one_record_and_none_that_follows"),
            ("U1", "test_notes_that_are_gone_damaged_or_of_another_segment_are_made_anew"),
            ("U1", "test_a_damaged_page_costs_time_alone"),
        ],
    },
    Case { number: 24, what: "a disk that turns read-only", by: &[("K3", "read-only")] },
    Case { number: 25, what: "two agents on one store", by: &[("K5", "")] },
    Case { number: 26, what: "files that change while they are hashed", by: &[("S1", "")] },
    Case {
        number: 27,
        what: "changes that hide from a cache of stamps",
        by: &[
            ("U1", "test_a_file_changed_shortly_before_the_scan_is_never_remembered"),
            ("U1", "test_a_time_that_was_put_back_does_not_hide_a_change"),
            ("U1", "test_a_file_that_took_the_place_or_the_inode_of_another_is_read"),
            ("U1", "test_times_of_the_future_and_pages_of_the_future_are_not_believed"),
        ],
    },
    Case { number: 28, what: "a directory that becomes a link during the walk", by: &[("S2", "")] },
    Case { number: 29, what: "loops, escaping links, huge, deep, unreadable", by: &[("S3", ""), ("S5", "")] },
    Case { number: 30, what: "ignore files that are hard to read", by: &[("S4", ""), ("F3", "")] },
    Case { number: 31, what: "a job mistreats its files as root", by: &[("I1", ""), ("I9", "")] },
    Case {
        number: 32,
        what: "a job links, renames and swaps what it reaches",
        by: &[("I1", "second name"), ("I1", "moves"), ("I8", "")],
    },
    Case { number: 33, what: "70,000 files of one content", by: &[("I2", "")] },
    Case { number: 34, what: "one content, executable and not", by: &[("I3", "")] },
    Case { number: 35, what: "a link out, and a file below it", by: &[("H2", ""), ("I6", ""), ("I7", "")] },
    Case { number: 36, what: "taken apart or given up while it is laid out", by: &[("I4", ""), ("I5", "")] },
];

/// The unit tests that the cases name, each once.
#[allow(clippy::disallowed_methods, reason = "runs what it tests")]
fn units(tally: &mut Tally, _: &Scale) {
    let by = CASES.iter().flat_map(|case| case.by);
    let names: BTreeSet<&str> = by.filter(|(row, _)| *row == "U1").map(|(_, name)| *name).collect();
    // As the suite of unit tests compiles them, so that nothing is compiled anew after it.
    let mut cargo = Command::new("cargo");
    cargo.args(["test", "--locked", "--workspace", "--lib", "--no-fail-fast", "--target-dir"]);
    cargo.arg(binaries().join("..")).arg("--").args(&names);
    let said = cargo.current_dir(root()).output().expect("cargo runs");
    let text = String::from_utf8_lossy(&said.stdout);
    for name in names {
        tally.case(name, || {
            let mut results = text.lines().filter(|line| line.contains(&format!("::{name} ... ")));
            assert!(
                results.next().is_some_and(|line| line.ends_with(" ok")),
                "it did not pass:\n{text}\n{}",
                String::from_utf8_lossy(&said.stderr)
            );
        });
    }
}
