//! What is to be said about a file although the job can run.

use std::fmt;
use std::path::{Path, PathBuf};

use agent_jobfile::Warning;
use agent_jobfile::yaml::Place;

/// Something about a file that has no effect or may surprise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Remark {
    pub(crate) file: PathBuf,
    pub(crate) place: Option<Place>,
    pub(crate) message: String,
}

impl Remark {
    /// About a file as a whole.
    pub(super) fn of(file: &Path, message: impl Into<String>) -> Remark {
        Remark { file: file.to_owned(), place: None, message: message.into() }
    }

    /// About a place of a file.
    pub(super) fn at(file: &Path, warning: Warning) -> Remark {
        Remark { file: file.to_owned(), place: Some(warning.place), message: warning.message }
    }
}

/// `job.yml: line 2, column 1: what`
impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.file.display())?;
        if let Some(place) = self.place {
            write!(f, "{place}: ")?;
        }
        f.write_str(&self.message)
    }
}
