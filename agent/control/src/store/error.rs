//! What may fail when the database is read or written.

use std::io;
use std::path::PathBuf;

use agent_model::words::count;

use super::Changes;
use super::file::is_malformed;

/// Which access to the controller's database failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum StoreError {
    #[error("cannot write {} and {} to the controller's database", count(*jobs as u64, "job"), count(*events as u64, "event"))]
    Commit {
        /// Jobs in it.
        jobs: usize,
        /// Events in it.
        events: usize,
        full: bool,
        source: sqlx::Error,
    },
    #[error("{} was removed or replaced while it was open, and could not be written back", path.display())]
    Moved { path: PathBuf, source: sqlx::Error },
    #[error(
        "the controller's database lacks commits that were made: it goes back to an earlier state of itself"
    )]
    Behind,
    #[error("another controller has taken over the database of this one, which writes nothing any more")]
    Taken,
    #[error("cannot read {what} from the controller's database")]
    Read { what: &'static str, source: sqlx::Error },
    #[error("the {what} `{id}` in the controller's database cannot be understood")]
    Document { what: &'static str, id: String, source: serde_json::Error },
    #[error("the {what} `{id}` in the controller's database is damaged")]
    Damaged {
        what: &'static str,
        /// Its name, as far as it can be trusted.
        id: String,
    },
    #[error("the {what} `{id}` in the controller's database has a name that is not valid")]
    Name { what: &'static str, id: String, source: agent_model::ids::IdError },
}

impl StoreError {
    /// A commit that failed before anything was written.
    pub(crate) fn not_tried(changes: &Changes, error: io::Error) -> StoreError {
        let (jobs, events, full) = (changes.jobs.len(), changes.events.len(), agent_fs::is_full(&error));
        StoreError::Commit { jobs, events, full, source: sqlx::Error::Io(error) }
    }

    /// The content of the database was harmed while it was open: trying again does not help, opening it anew mends it.
    pub(crate) fn is_harm(&self) -> bool {
        match self {
            StoreError::Behind => true,
            StoreError::Commit { source, .. } => is_malformed(source),
            _ => false,
        }
    }

    /// The disk had no room for a transaction.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, StoreError::Commit { full: true, .. })
    }
}
