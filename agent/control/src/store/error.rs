//! What may fail when the database is read or written.

use std::io;
use std::path::PathBuf;

use agent_model::words::count;

use super::Changes;

/// Which access to the controller's database failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A transaction was not committed.
    #[error("cannot write {} and {} to the controller's database", count(*jobs as u64, "job"), count(*events as u64, "event"))]
    Commit {
        /// Jobs in it.
        jobs: usize,
        /// Events in it.
        events: usize,
        /// The disk had no room for it.
        full: bool,
        /// What SQLite said.
        source: sqlx::Error,
    },
    /// Somebody removed its file, or put another in its place, and it could not be written back.
    #[error("{} was removed or replaced while it was open, and could not be written back", path.display())]
    Moved {
        /// The file.
        path: PathBuf,
        /// Why.
        source: sqlx::Error,
    },
    /// Another controller has written since.
    #[error("another controller has taken over the database of this one, which writes nothing any more")]
    Taken,
    /// Something cannot be read.
    #[error("cannot read {what} from the controller's database")]
    Read {
        /// What was asked for.
        what: &'static str,
        /// What SQLite said.
        source: sqlx::Error,
    },
    /// A document is not what this program writes.
    #[error("the {what} `{id}` in the controller's database cannot be understood")]
    Document {
        /// What it describes.
        what: &'static str,
        /// Its name.
        id: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A row is not what was written.
    #[error("the {what} `{id}` in the controller's database is damaged")]
    Damaged {
        /// What it describes.
        what: &'static str,
        /// Its name, as far as it can be trusted.
        id: String,
    },
    /// A name breaks the rules for names.
    #[error("the {what} `{id}` in the controller's database has a name that is not valid")]
    Name {
        /// What it names.
        what: &'static str,
        /// The name.
        id: String,
        /// The rule.
        source: agent_model::ids::IdError,
    },
}

impl StoreError {
    /// A commit that failed before anything was written.
    pub(crate) fn not_tried(changes: &Changes, error: io::Error) -> StoreError {
        let (jobs, events, full) = (changes.jobs.len(), changes.events.len(), agent_fs::is_full(&error));
        StoreError::Commit { jobs, events, full, source: sqlx::Error::Io(error) }
    }

    /// The disk had no room for a transaction.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, StoreError::Commit { full: true, .. })
    }
}
