//! A row of the table of faults: a promise, how it is tried, and how often it was kept.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use agent_tests::chance::Chance;
use agent_tests::fleet::keep_evidence;

/// One line of the table.
pub(crate) struct Row {
    /// As in the table of faults, for example `A4`.
    pub(crate) id: &'static str,
    /// What is promised, in one line.
    pub(crate) promise: &'static str,
    /// Tries it.
    pub(crate) run: fn(&Scale) -> Tally,
}

/// How much is tried.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    /// The numbers of the table instead of those that fit into a merge.
    pub(crate) full: bool,
    /// Where every random instant comes from.
    pub(crate) seed: u64,
}

impl Scale {
    /// How much: this for a merge, that for the whole table.
    pub(crate) fn of<T>(&self, short: T, full: T) -> T {
        if self.full { full } else { short }
    }

    /// The chance of this run.
    pub(crate) fn chance(&self) -> Chance {
        Chance::new(self.seed)
    }
}

/// What came of a row.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// How often something was done that must be survived.
    pub(crate) tried: u32,
    /// How often it was.
    pub(crate) survived: u32,
    /// What was measured, for the table.
    pub(crate) notes: Vec<String>,
    /// What was not survived, and what it looked like.
    pub(crate) failures: Vec<String>,
}

impl Tally {
    /// Tries one case; a panic in it is a case that was not survived. What it used should be made in it, so
    /// that it can be looked at afterwards.
    pub(crate) fn case<T>(&mut self, name: &str, case: impl FnOnce() -> T) -> Option<T> {
        self.tried += 1;
        match catch_unwind(AssertUnwindSafe(case)) {
            Ok(value) => {
                self.survived += 1;
                Some(value)
            }
            Err(panic) => {
                self.fail(name, &said(&*panic));
                None
            }
        }
    }

    /// Counts `tried` cases of one kind at once, of which so many failed as complaints are given.
    pub(crate) fn count(&mut self, tried: u32, what: &str, complaints: &[String]) {
        let failed = u32::try_from(complaints.len()).unwrap_or(u32::MAX).min(tried.max(1));
        self.tried += tried.max(failed);
        self.survived += tried.saturating_sub(failed);
        if !complaints.is_empty() {
            self.fail(what, &complaints[..complaints.len().min(20)].join("\n  "));
        }
    }

    /// Takes in what came of a part.
    pub(crate) fn add(&mut self, part: Tally) {
        self.tried += part.tried;
        self.survived += part.survived;
        self.notes.extend(part.notes);
        self.failures.extend(part.failures);
    }

    /// Something to be told in the table.
    pub(crate) fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    fn fail(&mut self, name: &str, why: &str) {
        keep_evidence(true);
        let why: String = why.chars().take(1500).collect();
        self.failures.push(format!("{name}: {why}"));
    }
}

/// What a panic said.
pub(crate) fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
}
