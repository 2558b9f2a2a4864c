//! The records of a job directory. Each is one JSON object with a version and a checksum ([`crate::seal`]); unknown
//! fields are ignored, so a daemon and a shim of neighbouring releases understand each other.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use agent_model::{Boot, ExitStatus, ReplicaId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::gang::GangLaunch;
use crate::sys::User;
use crate::view::View;

/// The version of the records and of the socket protocol written by this release.
pub const VERSION: u32 = 2;

/// What to run. Complete: the command gets this environment and inherits no other.
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
    /// Where the command starts; a relative path is relative to the job's part of its directory.
    pub cwd: PathBuf,
    /// From the polite signal to the final one when the shim stops the job without a stop order.
    #[serde(rename = "grace_ms", with = "millis")]
    pub grace: Duration,
    /// How long the command may run; time the machine sleeps counts.
    #[serde(rename = "timeout_ms", default, with = "optional_millis")]
    pub timeout: Option<Duration>,
    /// The user to run as; the shim's own when absent.
    #[serde(default)]
    pub user: Option<User>,
    /// What the log may take, and what happens when it would take more.
    #[serde(default)]
    pub log: LogPolicy,
    /// What the job may take of the machine.
    #[serde(default)]
    pub limits: Limits,
    /// How many files each process of the job may have open, unless it raises that itself; as many as the shim when
    /// absent.
    #[serde(default)]
    pub open_files: Option<u64>,
    /// Until when the job may run without its lease being renewed, in the boot that writes this; for ever
    /// when absent. The shim ends the job then, whether or not a daemon is there.
    #[serde(rename = "lease_until_ms", default)]
    pub lease_until: Option<Boot>,
    /// How the processes of the job are kept together; as well as the machine can when absent.
    #[serde(default)]
    pub cgroup: Option<CgroupRequest>,
    /// The shim is the first process of a container, and everything else in the container is the job. `limits` are
    /// the container's then, and `cgroup` is ignored.
    #[serde(default)]
    pub container: bool,
    /// The directory that it has as `/tmp`; then it has a `/dev/shm` of its own too, and sees only processes of its
    /// user. The machine's own when absent.
    #[serde(default)]
    pub tmp: Option<PathBuf>,
    /// The machine has no account of its user, who is known in the job by the name in the variable `USER`.
    #[serde(default)]
    pub nameless: bool,
    /// What it sees in another way than the machine; ignored in a container.
    #[serde(default)]
    pub view: Option<View>,
    /// It may ask the cloud for the machine's identity, where systemd could keep it from that.
    #[serde(default)]
    pub metadata: bool,
    /// A port of loopback at which the job finds the daemon: held, so that nobody else takes it while that is away.
    #[serde(default)]
    pub hold_port: Option<u16>,
    /// The device nodes that it may not open: those of GPUs that it was not given. Ignored in a container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub denied: Vec<DeviceNode>,
    /// The command is that of a rank of several, and is started by the process that this is handed to.
    #[serde(default)]
    pub gang: Option<GangLaunch>,
    /// More variables, which are sent to the supervisor and written to no file.
    #[serde(skip)]
    pub secrets: BTreeMap<String, Hidden>,
}

/// Text that no log and no error may show.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Hidden(pub String);

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// What a job may take of the machine; what is absent is not limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Bytes of memory, for all its processes together.
    pub memory: Option<u64>,
    /// Processes and threads at a time.
    pub pids: Option<u64>,
}

/// How the processes of a job are kept together.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CgroupRequest {
    /// The control group (version 2) below which that of the job is made, by its path in the file system;
    /// without it, the shim's own.
    pub root: Option<PathBuf>,
    /// Controllers not to use although the machine has them.
    pub without: Vec<Controller>,
}

/// What a control group can do for a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Controller {
    /// The unified hierarchy, whatever its controllers: it kills a group at once.
    Unified,
    /// Limits memory and reports when it ran out (version 1).
    Memory,
    /// Limits the number of processes (version 1).
    Pids,
    /// Stops a group, so that nothing can start while it is killed (version 1).
    Freezer,
}

/// What the log of a job may take, and what happens when it would take more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogPolicy {
    /// Bytes that may be on the disk at a time: those that the daemon has not trimmed.
    pub quota: u64,
    /// Bytes of one segment.
    pub segment: u64,
    /// The job waits for room; otherwise output without room is dropped and counted.
    pub block: bool,
}

impl Default for LogPolicy {
    fn default() -> LogPolicy {
        LogPolicy { quota: 4 << 30, segment: 16 << 20, block: false }
    }
}

/// Output that is not in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Gaps {
    /// Places at which some is missing; the log has a line about it at each.
    pub count: u64,
    /// How many bytes are missing.
    pub bytes: u64,
    /// How many line feeds are among them.
    pub lines: u64,
}

/// Which shim runs for a job directory.
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
    /// What keeps the job's processes together, once they are there; see [`ExitRecord::containment`].
    #[serde(default)]
    pub containment: String,
    /// The job's control groups, by their paths in the file system; named here before they are made.
    #[serde(default)]
    pub groups: Vec<PathBuf>,
    /// It is the first process of a container: `pid` is from the container's own numbering.
    #[serde(default)]
    pub container: bool,
    /// How many processes beside it the kernel had ended for want of memory before the command was started.
    #[serde(default)]
    pub kills: Option<KillCount>,
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
    /// The result of the command.
    pub end: End,
    /// When the command was executed.
    pub started_at: Option<Timestamp>,
    /// When the command ended, or when the shim gave up.
    pub ended_at: Timestamp,
    /// The reason given for a stop order before the end, in words.
    pub stopped: Option<String>,
    /// The signal that ended the job because another program sent it to the shim, when nobody ordered a stop.
    #[serde(default)]
    pub stop_signal: Option<i32>,
    /// Who sent that signal, where it is known.
    #[serde(default)]
    pub stop_sender: Option<Sender>,
    /// It was stopped because its time was over.
    pub timed_out: bool,
    /// It was stopped because its lease was over.
    #[serde(default)]
    pub lease_over: bool,
    /// The kernel ended it for want of memory, and whose memory that was. Version 1 recorded yes or no.
    #[serde(default, deserialize_with = "oom::scope")]
    pub oom: Option<OomScope>,
    /// Processes of it that the kernel ended for want of memory, whether or not it ended for that.
    #[serde(default)]
    pub oom_kills: u64,
    /// The most memory it used at a time, in bytes, where that is known.
    #[serde(default)]
    pub memory_peak: Option<u64>,
    /// The limits that were in effect.
    #[serde(default)]
    pub limits: Limits,
    /// The limits that were asked for and not in effect, and why.
    #[serde(default)]
    pub limits_unmet: Vec<String>,
    /// What kept its processes together: `container`, `systemd scope`, `cgroup v2`, `cgroup v1` or `process group`.
    #[serde(default)]
    pub containment: String,
    /// Final length of the log, in bytes.
    pub log_bytes: u64,
    /// Bytes of output that could not be written to the log.
    pub log_dropped: u64,
    /// The first error met on the log.
    pub log_error: Option<String>,
    /// What is missing in the log.
    #[serde(default)]
    pub gaps: Gaps,
    /// SHA-256 of the log, in lower-case hexadecimal; earlier releases left it to the daemon.
    #[serde(default)]
    pub log_sha256: Option<String>,
    /// Final length of the stream of tracking records, in bytes.
    pub tracking_bytes: u64,
    /// Why some of them are not in it.
    #[serde(default)]
    pub tracking_error: Option<String>,
    /// Largest resident memory of any one of its processes, in bytes.
    pub max_rss: u64,
    /// Processor time of all its processes, in milliseconds.
    pub cpu_ms: u64,
    /// Processes that were still there when the command ended, and were ended too.
    pub leftovers: u32,
    /// Processes that not even the final signal ended in time: the kernel holds them.
    pub unkilled: u32,
}

/// Who sent a signal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sender {
    /// Its process number; 0 is the kernel, or a process that the container of the shim does not see.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// The name of its program; empty when it was gone already.
    pub name: String,
}

/// Whose memory was used up when the kernel ended a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OomScope {
    /// The job's: it reached its own limit.
    Own,
    /// That of a group the job is in together with others, such as all jobs of the node.
    Parent,
    /// The machine's.
    Host,
}

/// A record, which names the replica that it is of.
pub(crate) trait OfReplica {
    fn replica(&self) -> &ReplicaId;
}

impl OfReplica for Launch {
    fn replica(&self) -> &ReplicaId {
        &self.replica
    }
}

impl OfReplica for Hello {
    fn replica(&self) -> &ReplicaId {
        &self.replica
    }
}

impl OfReplica for ExitRecord {
    fn replica(&self) -> &ReplicaId {
        &self.replica
    }
}

/// The result of the command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// It ran, and ended with this status.
    Exited(ExitStatus),
    /// It never ran.
    NeverStarted(NotStarted),
}

/// Why a command never ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NotStarted {
    /// No `go` came in time. The replica may still be started, by another shim.
    NoGo,
    /// It was stopped before.
    Stopped,
    /// Its lease was over when it was to start.
    LeaseOver,
    /// The program could not be executed.
    Exec {
        /// The program, as it was asked for.
        program: String,
        /// The error number: 2 when there is no such program, 13 when it may not be executed.
        os_error: i32,
    },
    /// A step before the execution of the program could not be done.
    Setup {
        /// The step.
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

mod oom {
    use serde::{Deserialize, Deserializer};

    use super::OomScope;

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Told {
        Whether(bool),
        Whose(Option<OomScope>),
    }

    pub(super) fn scope<'de, D: Deserializer<'de>>(from: D) -> Result<Option<OomScope>, D::Error> {
        Ok(match Told::deserialize(from)? {
            // Version 1 did not determine whose memory it was, and reported it as the job's own.
            Told::Whether(killed) => killed.then_some(OomScope::Own),
            Told::Whose(scope) => scope,
        })
    }
}

/// The value of a counter at one moment, to compare with later.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KillCount {
    /// The file of the counter.
    pub file: PathBuf,
    /// The value.
    pub kills: u64,
}

/// A character device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceNode {
    /// Of its driver.
    pub major: u32,
    /// Of this one.
    pub minor: u32,
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
        assert_eq!(
            (launch.limits, launch.lease_until, launch.cgroup.as_ref()),
            (Limits::default(), None, None)
        );
        let again: Launch = serde_json::from_str(&serde_json::to_string(&launch).unwrap()).unwrap();
        assert_eq!(again, launch);
    }

    #[test]
    fn test_records_of_version_1_are_read() {
        let hello = r#"{"version":1,"instance":"i","replica":"train.1.0","pid":7,"boot_id":"b","at":5}"#;
        let hello: Hello = serde_json::from_str(hello).unwrap();
        assert_eq!((hello.version, hello.containment.as_str(), hello.groups.len()), (1, "", 0));
        for (oom, scope) in [("true", Some(OomScope::Own)), ("false", None)] {
            let exit = format!(
                r#"{{"version":1,"instance":"i","replica":"train.1.0","end":{{"exited":{{"signal":9}}}},
                "started_at":5,"ended_at":6,"stopped":null,"timed_out":false,"oom":{oom},"log_bytes":3,
                "log_dropped":0,"log_error":null,"tracking_bytes":0,"max_rss":4096,"cpu_ms":1,
                "leftovers":0,"unkilled":0}}"#
            );
            let exit: ExitRecord = serde_json::from_str(&exit).unwrap();
            assert_eq!((exit.oom, exit.status()), (scope, Some(ExitStatus::Signal(9))));
            assert!(!exit.lease_over && exit.limits_unmet.is_empty() && exit.log_sha256.is_none());
            let again: ExitRecord = serde_json::from_str(&serde_json::to_string(&exit).unwrap()).unwrap();
            assert_eq!(again, exit);
        }
    }
}
