//! A merge: everything that must hold before a change is taken, as one line of work.
//!
//! What is built is built once ([`programs`]); then the check of style, the test programs and the rows of all tables
//! begin as there is room for them, the longest first ([`agent_tests::queue`]). The conda engine is built while the
//! first rows wait, and the check of style comes after it, because both want the same directory of cargo.
//!
//! Printed are the tables, then what each suite cost and waited for, then everything that failed, then the sum.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the log of a merge is what it is for")]

mod programs;

use std::fs;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use agent_tests::queue::{self, Done, Piece};
use agent_tests::table::{CLIPPY, ENGINE, Scale, Suite, Told};
use agent_tests::{binaries, cost, root};

use programs::{Program, Ran, check, limited, quiet};

/// A merge tries the same every time.
const SCALE: Scale = Scale { full: false, seed: 1 };

/// How much runs at a time, by weight: most of what a row takes is waiting.
const AT_ONCE: usize = 8;

/// A row has ended by then, or something hangs.
const PATIENCE: Duration = Duration::from_secs(20 * 60);

/// The suites that are not tables, in the order in which their cost is told.
const OTHERS: [&str; 6] = ["style", "unit", "model", "repo", "system", "quickstart"];

/// What came of a piece.
enum Came {
    Row(Told),
    Tests(Ran),
}

/// What is asked for: suites, all where none is named; the names of the pieces alone; how much at a time.
struct Wishes {
    suites: Vec<String>,
    list: bool,
    at_once: usize,
}

/// Runs the suites that are named, or all; the exit code is 0 when everything held.
pub(crate) fn main(suites: &'static [Suite], words: &[String]) -> ExitCode {
    let begun = Instant::now();
    let complain = |complaint: String| {
        eprintln!("merge: {complaint}");
        ExitCode::from(2)
    };
    let wishes = match wishes(suites, words) {
        Ok(wishes) => wishes,
        Err(complaint) => return complain(complaint),
    };
    let programs = match programs::build(&["--workspace"]) {
        Ok(programs) => programs.leak(),
        Err(complaint) => return complain(complaint),
    };
    let mut pieces = others(programs);
    for suite in suites {
        let prepared = Box::leak(Box::new(OnceLock::new()));
        pieces.extend(suite.of_a_merge(SCALE, prepared).into_iter().map(row));
    }
    // The tests of the system need the engine too, but not from their begin.
    let waits = |suite: &Suite| suite.after.iter().any(|after| after.0 == ENGINE);
    let needs_engine =
        wishes.names("system") || suites.iter().any(|suite| wishes.names(suite.name) && waits(suite));
    pieces.retain(|piece| if piece.name == ENGINE { needs_engine } else { wishes.names(piece.suite) });
    if wishes.list {
        pieces.iter().for_each(|piece| println!("{}", piece.name));
        return ExitCode::SUCCESS;
    }
    let done = queue::run(pieces, wishes.at_once, PATIENCE);
    let (passed, failed) = tell(suites, done);
    println!("{} min {} s", begun.elapsed().as_secs() / 60, begun.elapsed().as_secs() % 60);
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn wishes(suites: &[Suite], words: &[String]) -> Result<Wishes, String> {
    let mut wishes = Wishes { suites: Vec::new(), list: false, at_once: AT_ONCE };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--list" => wishes.list = true,
            "--at-once" => {
                let number = words.next().and_then(|text| text.parse().ok());
                wishes.at_once = number.ok_or("--at-once needs a number")?;
            }
            name if OTHERS.contains(&name) || suites.iter().any(|suite| suite.name == name) => {
                wishes.suites.push(name.to_owned());
            }
            name => return Err(format!("there is no suite `{name}`")),
        }
    }
    Ok(wishes)
}

impl Wishes {
    fn names(&self, suite: &str) -> bool {
        self.suites.is_empty() || self.suites.iter().any(|name| name == suite)
    }
}

/// A row of a table.
fn row(piece: Piece<Told>) -> Piece<Came> {
    let Piece { suite, name, seconds, weight, after, run } = piece;
    Piece { suite, name, seconds, weight, after, run: Box::new(move || Came::Row(run())) }
}

/// Everything that is no row of a table.
fn others(programs: &'static [Program]) -> Vec<Piece<Came>> {
    static ENGINES: OnceLock<Vec<Program>> = OnceLock::new();
    let mut pieces = vec![
        piece("environments", ENGINE, 2000, 1, || {
            // One of an earlier build is not to be taken for it.
            let _ = fs::remove_file(binaries().join("agent-env"));
            // In a build of its own: nothing else is to be compiled with what only the engine needs.
            match programs::build(&["-p", "agent-env", "--features", "agent-env/engine"]) {
                Ok(built) => {
                    let _ = ENGINES.set(built);
                    Ran { passed: 1, failed: 0, said: None }
                }
                Err(said) => Ran { passed: 0, failed: 1, said: Some(said) },
            }
        }),
        piece("environments", "the tests of the engine", 60, 2, || {
            let ran = ENGINES.get().into_iter().flatten().map(|program| program.run("environments", &[]));
            ran.fold(Ran { passed: 0, failed: 0, said: None }, Ran::and)
        })
        .after(ENGINE),
        piece("style", "formatted", 0, 1, || {
            check("style", "formatted", limited().args(["cargo", "fmt", "--all", "--check"]))
        }),
        piece("style", CLIPPY, 900, 1, || {
            let mut clippy = quiet();
            clippy.args(["cargo", "clippy", "--locked", "--workspace", "--all-targets", "--quiet"]);
            clippy.args(["--features", "agent-env/engine", "--", "-D", "warnings"]);
            check("style", CLIPPY, &mut clippy)
        })
        .after(ENGINE),
        piece("quickstart", "the example job, twice", 60, 1, || {
            let mut run = limited();
            run.arg(root().join("tests/run")).arg("quickstart").env("QUICKSTART_BIN", binaries());
            check("quickstart", "quickstart", &mut run)
        }),
    ];
    for program in programs {
        pieces.push(match program.name.as_str() {
            "repo" => piece("repo", "the rules of the repository", 10, 1, || program.run("repo", &[])),
            "system" => {
                piece("system", "system", 1500, 2, || program.run("system", &["--test-threads", "3"]))
            }
            "longlog" => piece("system", "a long log", 60, 1, || program.run("system", &["--nocapture"])),
            name => {
                let name = format!("the tests of {name}{}", if program.is_its_own { ", whole" } else { "" });
                piece("unit", &name, 90, 1, || program.run("unit", &[]))
            }
        });
        // 10,000 random histories of the protocol, and every deliberate mistake, which must be noticed.
        if program.name == "agent_control" {
            let histories = ["sim::test_every", "--include-ignored", "--nocapture"];
            pieces.push(piece("model", "histories", 500, 2, move || program.run("model", &histories)));
        }
    }
    pieces
}

fn piece(
    suite: &'static str,
    name: &str,
    seconds: u32,
    weight: usize,
    run: impl FnOnce() -> Ran + Send + 'static,
) -> Piece<Came> {
    let run = Box::new(move || Came::Tests(run()));
    Piece { suite, name: name.to_owned(), seconds, weight, after: None, run }
}

/// Prints all tables, what each suite cost, and then what failed; how many passed and failed.
fn tell(suites: &[Suite], done: Vec<Done<Came>>) -> (usize, usize) {
    let mut costs: Vec<Cost> = Vec::new();
    let (mut rows, mut failures): (Vec<Vec<Told>>, Vec<String>) =
        (suites.iter().map(|_| Vec::new()).collect(), vec![]);
    let (mut passed, mut failed) = (0, 0);
    for Done { suite, name, begun, took, came } in done {
        Cost::of(suite, &mut costs).add(begun, took);
        match came {
            Ok(Came::Row(told)) => {
                *(if told.held() { &mut passed } else { &mut failed }) += 1;
                let at = suites.iter().position(|table| table.name == suite);
                rows[at.expect("rows come from tables")].push(told);
            }
            Ok(Came::Tests(ran)) => {
                passed += ran.passed;
                failed += ran.failed;
                failures.extend(ran.said.map(|said| format!("{suite}: {name} FAILED: {said}")));
            }
            Err(panic) => {
                failed += 1;
                failures.push(format!("{suite}: {name} FAILED: {panic}"));
            }
        }
    }
    for (suite, told) in suites.iter().zip(rows).filter(|(_, told)| !told.is_empty()) {
        let told = suite.in_order(told);
        suite.print(&told);
        failures.extend(suite.failures(&told, SCALE));
    }
    let order = OTHERS.into_iter().chain(suites.iter().map(|suite| suite.name));
    println!(
        "\n{:<14} {:>6} {:>9} {:>9} {:>9}  waited longest for, in seconds",
        "suite", "pieces", "wall s", "busy s", "CPU s"
    );
    for suite in order {
        costs.iter().filter(|cost| cost.suite == suite).for_each(Cost::print);
    }
    cost::clear();
    failures.iter().for_each(|failure| println!("\n{failure}"));
    println!();
    (passed, failed)
}

/// What a suite cost.
struct Cost {
    suite: &'static str,
    pieces: usize,
    /// From the begin of its first piece to the end of its last.
    first: Duration,
    last: Duration,
    /// The sum of all.
    busy: Duration,
}

impl Cost {
    fn of<'a>(suite: &'static str, all: &'a mut Vec<Cost>) -> &'a mut Cost {
        let at = all.iter().position(|cost| cost.suite == suite).unwrap_or_else(|| {
            let (first, zero) = (Duration::MAX, Duration::ZERO);
            all.push(Cost { suite, pieces: 0, first, last: zero, busy: zero });
            all.len() - 1
        });
        &mut all[at]
    }

    fn add(&mut self, begun: Duration, took: Duration) {
        self.pieces += 1;
        self.first = self.first.min(begun);
        self.last = self.last.max(begun + took);
        self.busy += took;
    }

    fn print(&self) {
        let waits: Vec<_> = cost::waits(self.suite).into_iter().take(3).collect();
        let waits: Vec<String> = waits.iter().map(|(what, seconds)| format!("{what} {seconds:.0}")).collect();
        let cpu =
            cost::processor(self.suite).map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.0}"));
        let wall = (self.last - self.first).as_secs();
        println!(
            "{:<14} {:>6} {wall:>9} {:>9} {cpu:>9}  {}",
            self.suite,
            self.pieces,
            self.busy.as_secs(),
            waits.join(" · ")
        );
    }
}
