//! The programs of a merge that are not tables: what cargo built with tests in it, and checks that pass or fail as a
//! whole. Each is run with what it says kept in a file, of which only what failed is told.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use agent_tests::{binaries, cargo, cost, root};
use serde_json::Value;

/// After so many minutes a program is ended, and has failed.
const PATIENCE: u32 = 40;

/// Characters of what a program said that are told when it failed.
const TOLD: usize = 12_000;

/// A program with tests in it.
#[derive(Debug, Clone)]
pub(super) struct Program {
    /// The crate, or the program of its own.
    pub(super) name: String,
    /// Whether it is a program of its own, and not the tests inside a crate.
    pub(super) is_its_own: bool,
    path: PathBuf,
    /// The directory of its package, where cargo would run it.
    dir: PathBuf,
}

/// What came of a program.
#[derive(Debug)]
pub(super) struct Ran {
    pub(super) passed: usize,
    pub(super) failed: usize,
    /// What it said of those that failed.
    pub(super) said: Option<String>,
}

impl Ran {
    /// Both.
    pub(super) fn and(self, other: Ran) -> Ran {
        let said = match (self.said, other.said) {
            (Some(one), Some(another)) => Some(format!("{one}\n{another}")),
            (one, another) => one.or(another),
        };
        Ran { passed: self.passed + other.passed, failed: self.failed + other.failed, said }
    }
}

/// Builds these, with every test, and gives the programs with tests in them.
///
/// # Errors
///
/// What the compiler said.
pub(super) fn build(what: &[&str]) -> Result<Vec<Program>, String> {
    let mut build = cargo();
    build.args(["build", "--locked", "--bins", "--tests", "--message-format=json-render-diagnostics"]);
    build.args(what).arg("--target-dir").arg(binaries().join("..")).current_dir(root());
    let built = build.output().map_err(|error| format!("cargo does not start: {error}"))?;
    if !built.status.success() {
        return Err(String::from_utf8_lossy(&built.stderr).into_owned());
    }
    let said = String::from_utf8_lossy(&built.stdout).into_owned();
    Ok(said.lines().filter_map(|line| program(&serde_json::from_str(line).ok()?)).collect())
}

/// A message of cargo: nothing where it is of something else.
fn program(message: &Value) -> Option<Program> {
    message["profile"]["test"].as_bool()?.then_some(())?;
    let kind = message["target"]["kind"][0].as_str()?;
    Some(Program {
        name: message["target"]["name"].as_str()?.to_owned(),
        is_its_own: kind == "test",
        path: message["executable"].as_str()?.into(),
        dir: Path::new(message["manifest_path"].as_str()?).parent()?.to_owned(),
    })
}

impl Program {
    /// Runs it with these arguments, for a suite.
    pub(super) fn run(&self, suite: &'static str, arguments: &[&str]) -> Ran {
        let mut command = limited();
        command.arg(&self.path).args(arguments).current_dir(&self.dir).env("CARGO_MANIFEST_DIR", &self.dir);
        let (log, code) = logged(suite, &self.name, &mut command);
        let (passed, failed) = sums(&log);
        if code == Some(0) && failed == 0 {
            return Ran { passed, failed, said: None };
        }
        let failures = log.find("\nfailures:\n").map_or_else(|| tail(&log), |at| head(&log[at..]));
        Ran { passed, failed: failed.max(1), said: Some(format!("it ended with {}\n{failures}", told(code))) }
    }
}

/// A check that passes or fails as a whole.
pub(super) fn check(suite: &'static str, name: &str, command: &mut Command) -> Ran {
    match logged(suite, name, command.current_dir(root())) {
        (_, Some(0)) => Ran { passed: 1, failed: 0, said: None },
        (log, code) => {
            Ran { passed: 0, failed: 1, said: Some(format!("it ended with {}\n{}", told(code), tail(&log))) }
        }
    }
}

/// What computes for minutes and nobody waits for: everything else goes first, and what the product itself puts last
/// gets as much.
#[allow(clippy::disallowed_methods, reason = "runs what tests are made with")]
pub(super) fn quiet() -> Command {
    let mut command = Command::new("nice");
    command.args(["-n", "19"]);
    command
}

#[allow(clippy::disallowed_methods, reason = "runs what tests are made with")]
pub(super) fn limited() -> Command {
    let mut command = Command::new("timeout");
    command.arg("--kill-after=10").arg(format!("{PATIENCE}m"));
    command
}

/// Runs it to its end; what it said, which stays in a file, and its exit code.
fn logged(suite: &'static str, name: &str, command: &mut Command) -> (String, Option<i32>) {
    let dir = binaries().join("../merge");
    fs::create_dir_all(&dir).expect("a directory");
    let (log, waits) = (dir.join(format!("{name}.log")), dir.join(format!("{name}.waits")));
    let _ = fs::remove_file(&waits);
    let file = File::create(&log).expect("a log");
    command.env(cost::WAITS, &waits).stdin(Stdio::null());
    command.stdout(file.try_clone().expect("a log")).stderr(file);
    let status = command.status();
    cost::take_in(suite, &waits);
    let said = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
    match status {
        Ok(status) => (said, status.code()),
        Err(error) => (format!("it does not start: {error}"), None),
    }
}

/// How many tests passed and failed, by the closing lines of the programs.
fn sums(log: &str) -> (usize, usize) {
    let closing = log.lines().filter(|line| line.starts_with("test result:"));
    closing.fold((0, 0), |(passed, failed), line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<usize>().ok()).unwrap_or(0);
        (passed + number(3), failed + number(5))
    })
}

fn told(code: Option<i32>) -> String {
    match code {
        Some(124 | 137) => format!("no result within {PATIENCE} minutes"),
        Some(code) => format!("exit code {code}"),
        None => "a signal".to_owned(),
    }
}

fn head(text: &str) -> String {
    text.chars().take(TOLD).collect()
}

fn tail(text: &str) -> String {
    let skipped = text.chars().count().saturating_sub(TOLD / 3);
    text.chars().skip(skipped).collect()
}
