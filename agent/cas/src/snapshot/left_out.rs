//! What a snapshot is made without, and why: entries that rules leave out, that cannot be kept, or that cannot be read.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use super::tree::TreeError;

/// How many of the entries that one rule left out are named.
const EXAMPLES: usize = 3;

/// The entries that were left out.
#[derive(Debug, Default)]
pub(super) struct LeftOut {
    pub(super) count: u64,
    /// Each entry that cannot be kept, with the reason.
    pub(super) entries: Vec<String>,
    /// What else is to be told.
    pub(super) warnings: Vec<String>,
    pub(super) unread: Vec<Unread>,
    /// What rules left out, by the rule.
    pub(super) rules: BTreeMap<String, Ruled>,
}

impl LeftOut {
    pub(super) fn warn(&mut self, path: &str, why: &str) {
        self.count += 1;
        self.entries.push(format!("{path} {why}"));
    }

    /// All that is to be told, one sentence each.
    pub(super) fn told(&self) -> Vec<String> {
        let entries = self.entries.iter().map(|entry| format!("{entry}; left out"));
        self.warnings.iter().cloned().chain(entries).collect()
    }

    pub(super) fn by_rule(&mut self, rule: &str, count: u64, paths: impl IntoIterator<Item = String>) {
        match self.rules.get_mut(rule) {
            Some(ruled) => ruled.add(count, paths),
            None => self.rules.entry(rule.to_owned()).or_default().add(count, paths),
        }
    }
}

/// What one rule left out. A directory counts once.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Ruled {
    /// How many.
    pub count: u64,
    /// The first few by name.
    pub examples: Vec<String>,
}

impl Ruled {
    fn add(&mut self, count: u64, paths: impl IntoIterator<Item = String>) {
        self.count += count;
        self.examples.extend(paths);
        // The same ones are named whichever thread was first.
        self.examples.sort_unstable();
        self.examples.truncate(EXAMPLES);
    }
}

/// A file or directory that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unread {
    /// Which.
    pub path: PathBuf,
    /// Why, for people.
    pub why: String,
}

impl Unread {
    pub(super) fn because(path: PathBuf, source: &io::Error) -> Unread {
        Unread { path, why: format!("cannot be read: {source}") }
    }

    pub(super) fn of_another(path: PathBuf) -> Unread {
        Unread { path, why: "belongs to another user".to_owned() }
    }
}

/// Why a directory could not become a snapshot.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ScanError {
    #[error("cannot read the directory {path}")]
    Directory { path: PathBuf, source: io::Error },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} changes while it is read")]
    Changed { path: PathBuf },
    #[error("{path} is more than {limit} directories deep")]
    TooDeep {
        path: PathBuf,
        /// The limit.
        limit: usize,
    },
    #[error("{path} is more than a snapshot may hold")]
    TooLarge {
        /// The directory at which that was found.
        path: PathBuf,
        source: TreeError,
    },
    #[error("{} {}", .0.path.display(), .0.why)]
    Unfit(Unread),
    #[error("the reading was ended")]
    Stopped,
    #[error("{path} is not a file with a UTF-8 name")]
    NotAFile { path: PathBuf },
}

/// It cannot be read, now or later, until its owner changes that.
pub(super) fn is_kept_back(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errors = [Errno::ACCESS, Errno::PERM, Errno::IO, Errno::STALE];
    Errno::from_io_error(error).is_some_and(|error| errors.contains(&error))
}
