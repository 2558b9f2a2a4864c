//! The interface between the daemon and the shim of a job: on disk and over a socket.
//!
//! A job's directory ([`JobDir`]) is the only record of it: the daemon may die at any instruction and a
//! new one must know from the directory alone whether the job may be started, runs, has ended or was lost.
//!
//! | File | Written by | Means |
//! |---|---|---|
//! | `launch.json` | the daemon, before it starts a shim | what to run ([`Launch`]) |
//! | `shim.log`, locked | the shim, for as long as it runs | a shim runs here; the lock ends with it |
//! | `hello.json` | the shim, before it listens, and before it makes control groups | which shim this is, and where the job's processes are kept ([`Hello`]) |
//! | `started`, created exclusively | the shim, before the command is executed | never start it again |
//! | `exit.json` | the shim, durable, last | how it ended ([`ExitRecord`]) |
//!
//! Invariants: a command is executed at most once for a directory; a process is never identified by its number alone
//! (a shim by its lock and the instance in its greeting, a process of the job by its control group, or by the mark in
//! its environment and its start time); records carry a version and unknown fields in them are ignored; a record is
//! believed only if it is as it was written ([`is_sound`]) and of the replica whose directory it is in, and another is
//! as a missing one.
//!
//! The library does no async and starts no process; `agent-shim`, the binary, is the supervisor itself.

pub mod apart;
pub mod cgroup;
mod dir;
pub mod door;
pub mod gang;
pub mod kills;
pub mod process;
mod record;
pub mod room;
mod sealed;
pub mod segments;
pub mod session;
pub mod source;
#[allow(unsafe_code, reason = "the few system calls that have no safe wrapper")]
pub mod sys;
pub mod tracking;
pub mod view;
pub mod wire;

pub use dir::{CreateError, JobDir, RecordError, ShimPlace, WriteError};
pub use record::{
    CgroupRequest, Controller, DeviceNode, End, ExitRecord, Gaps, Hello, Hidden, KillCount, Launch, Limits,
    LogPolicy, NotStarted, OomScope, Sender, VERSION,
};
pub use sealed::{is_sound, seal};
pub use sys::User;

/// The variable by which a process of a job is recognised when its supervisor is gone: its value is the
/// instance of the shim, which no other run shares. It is the one variable a shim adds.
pub const MARK: &str = "AGENTD_MARK";

/// The first argument of a shim that starts the command of a rank, and of one that asks another rank to start
/// something; a job directory has an absolute path.
pub const RANK: &str = "rank";
/// See [`RANK`].
pub const RSH: &str = "rsh";

/// The first argument of a shim that opens sessions in a job, as a process of the job.
pub const ATTEND: &str = "attend";

/// The first argument of a shim that only finds out whether jobs can have a [`view`] of their own.
pub const TRY_VIEW: &str = "try-view";

/// The exit code of a shim that could not begin for want of something that others may free: a lack ([`is_lack`]), or no
/// room on a disk.
pub const LACKS: i32 = 71;

/// The exit code of a shim that could not begin because the disk of its job directory fails.
pub const DISK_FAILS: i32 = 72;

/// A lack of descriptors, processes, watches of files or memory, which others may free in a moment.
pub fn is_lack(error: &std::io::Error) -> bool {
    use nix::errno::Errno;
    const LACKS: [Errno; 4] = [Errno::EMFILE, Errno::ENFILE, Errno::EAGAIN, Errno::ENOMEM];
    error.raw_os_error().is_some_and(|errno| LACKS.contains(&Errno::from_raw(errno)))
}

/// Whether the output of a program reports a lack ([`is_lack`]).
pub fn says_lack(text: &str) -> bool {
    // The messages of the C library, of Go and of Python, and the numbers in messages of Rust programs.
    let words = [
        "esource temporarily unavailable",
        "oo many open files",
        "annot allocate memory",
        "start new thread",
    ];
    let numbers = ["(os error 11)", "(os error 12)", "(os error 23)", "(os error 24)"];
    words.iter().chain(&numbers).any(|sign| text.contains(sign))
}

/// The exit code of a shim that found another one running for its job directory.
pub const PLACE_TAKEN: i32 = 75;
