//! The records of a job directory. Each is one JSON object with a version; unknown fields are ignored, so a
//! daemon and a shim of neighbouring releases understand each other.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use agent_model::{ExitStatus, ReplicaId, Timestamp};
use serde::{Deserialize, Serialize};

/// The version of the records and of the socket protocol written by this release.
pub const VERSION: u32 = 1;

/// What to run. Complete: the command gets this environment and nothing of anybody else's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// The version of this record.
    pub version: u32,
    /// The replica this is.
    pub replica: ReplicaId,
    /// The program and its arguments; the program is looked up in the `PATH` of `env`.
    pub argv: Vec<String>,
    /// The whole environment of the command.
    pub env: BTreeMap<String, String>,
    /// Where the command starts; a relative path is relative to the job directory.
    pub cwd: PathBuf,
    /// From the polite signal to the final one when the job is stopped because of `timeout`.
    #[serde(rename = "grace_ms", with = "millis")]
    pub grace: Duration,
    /// How long the command may run; time the machine sleeps does not count.
    #[serde(rename = "timeout_ms", default, with = "optional_millis")]
    pub timeout: Option<Duration>,
    /// The user to run as; the shim's own when absent.
    #[serde(default)]
    pub user: Option<User>,
}

/// A user and a group by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// User number.
    pub uid: u32,
    /// Group number.
    pub gid: u32,
}

/// Which shim stands at a job directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The version of this record.
    pub version: u32,
    /// Random for every shim; also the mark of the job's processes.
    pub instance: String,
    /// The replica it was started for.
    pub replica: ReplicaId,
    /// Its process number, for people.
    pub pid: i32,
    /// The boot it belongs to; in a later one nothing of the job can be left.
    pub boot_id: String,
    /// When it was ready.
    pub at: Timestamp,
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// The version of this record.
    pub version: u32,
    /// The shim that wrote it.
    pub instance: String,
    /// The replica.
    pub replica: ReplicaId,
    /// What became of the command.
    pub end: End,
    /// When the command was executed.
    pub started_at: Option<Timestamp>,
    /// When the command ended, or when the shim gave up.
    pub ended_at: Timestamp,
    /// The reason of whoever asked for a stop before the end.
    pub stopped: Option<String>,
    /// It was stopped because its time was over.
    pub timed_out: bool,
    /// The kernel killed it for want of memory, as far as that can be told.
    pub oom: bool,
    /// Final length of the log, in bytes.
    pub log_bytes: u64,
    /// Bytes of output that could not be written to the log.
    pub log_dropped: u64,
    /// The first error met on the log.
    pub log_error: Option<String>,
    /// Final length of the tracking file, in bytes.
    pub tracking_bytes: u64,
    /// Largest resident memory of any one of its processes, in bytes.
    pub max_rss: u64,
    /// Processor time of all its processes, in milliseconds.
    pub cpu_ms: u64,
    /// Processes that were still there when the command ended, and were ended too.
    pub leftovers: u32,
    /// Processes that not even the final signal ended in time: the kernel holds them.
    pub unkilled: u32,
}

/// What became of the command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// It ran, and ended so.
    Exited(ExitStatus),
    /// It never ran.
    NeverStarted(NotStarted),
}

/// Why a command never ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NotStarted {
    /// Nobody said go in time. The replica may still be started, by another shim.
    NoGo,
    /// It was stopped before.
    Stopped,
    /// The program could not be executed.
    Exec {
        /// The program, as it was asked for.
        program: String,
        /// The error number: 2 when there is no such program, 13 when it may not be executed.
        os_error: i32,
    },
    /// Something that must be there before the program is executed could not be done.
    Setup {
        /// What could not be done.
        step: String,
        /// The error number, 0 when it has none.
        os_error: i32,
    },
}

impl ExitRecord {
    /// How the command ended, if it ran.
    pub fn status(&self) -> Option<ExitStatus> {
        match self.end {
            End::Exited(status) => Some(status),
            End::NeverStarted(_) => None,
        }
    }
}

mod millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(u64::try_from(value.as_millis()).unwrap_or(u64::MAX))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_millis)
    }
}

mod optional_millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => super::millis::serialize(value, to),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<u64>::deserialize(from)?.map(Duration::from_millis))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_launch_of_a_later_release_is_read_without_what_is_unknown() {
        let text = r#"{"version":1,"replica":"train.1.0","argv":["true"],"env":{},"cwd":"work",
            "grace_ms":1500,"colour":"red"}"#;
        let launch: Launch = serde_json::from_str(text).unwrap();
        assert_eq!((launch.grace, launch.timeout), (Duration::from_millis(1500), None));
        let again: Launch = serde_json::from_str(&serde_json::to_string(&launch).unwrap()).unwrap();
        assert_eq!(again, launch);
    }
}
