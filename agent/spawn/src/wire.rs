//! The protocol between a daemon and its helper: one message for a request, one or two for an answer.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;

use agent_shim::sys;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Program, Scope};

/// The longest message, in bytes; a longer one is refused.
pub(crate) const LONGEST: usize = 128 << 10;

/// Which part of a tree is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GivenPart {
    /// All of it.
    Everything,
    /// Its directories: files may be shared with others.
    Directories,
}

/// Which part of a tree is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum TakenPart {
    /// Its directories, whichever users own them: so much is needed to remove it.
    Directories,
    /// The directories and files of one user. A file that has other names stays as it is where everybody may read it;
    /// otherwise a copy takes its place, of at most so many bytes for all.
    Readable {
        /// The user.
        uid: u32,
        /// The bytes.
        most: u64,
    },
    /// The directories and files of one user. A copy takes the place of each file that has other names.
    Whole {
        /// The user.
        uid: u32,
    },
}

/// A request. Paths of trees are relative to the state directory.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum RootVerb {
    /// Shows that the helper is there.
    Greet,
    Give {
        path: PathBuf,
        uid: u32,
        kind: GivenPart,
    },
    Take {
        path: PathBuf,
        part: TakenPart,
    },
    /// What is the daemon's or this user's, of at most so many bytes, into a directory of the daemon.
    Copy {
        from: PathBuf,
        to: PathBuf,
        uid: u32,
        most: u64,
    },
    /// With the pipe for its greeting.
    Supervise {
        replica: String,
        uid: u32,
    },
    /// With its standard streams.
    Build(Program),
    Enclose {
        pid: i32,
        scope: Scope,
    },
    Kill {
        groups: Vec<PathBuf>,
        mark: String,
        within_ms: u32,
    },
}

/// An answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RootAnswer {
    Done,
    Copied {
        left_out: Vec<PathBuf>,
    },
    /// With a descriptor of the process; [`RootAnswer::Ended`] follows.
    Started {
        pid: i32,
    },
    Ended {
        status: i32,
        out_of_memory: bool,
    },
    Enclosed {
        group: PathBuf,
    },
    Killed {
        found: usize,
        left: usize,
    },
    /// The limits do not allow it.
    Refused {
        why: String,
    },
    /// It was tried and did not work.
    Failed {
        what: String,
        os_error: Option<i32>,
    },
}

impl RootAnswer {
    pub(crate) fn failed(error: &io::Error) -> RootAnswer {
        RootAnswer::Failed { what: error.to_string(), os_error: error.raw_os_error() }
    }
}

pub(crate) fn send(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is too long for the helper"));
    }
    sys::send_message(socket, &bytes, descriptors)
}

/// `None` when the other side has closed the connection.
pub(crate) fn receive<T: DeserializeOwned>(socket: BorrowedFd<'_>) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let Some((bytes, descriptors)) = sys::receive_message(socket, LONGEST)? else { return Ok(None) };
    Ok(Some((serde_json::from_slice(&bytes)?, descriptors)))
}
