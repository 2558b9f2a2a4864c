//! The operations for jobs and builders that need root: seven verbs, and two ways to have them done.
//!
//! A daemon that runs as root, or as a user for that user alone, does them itself. A daemon with an account of its
//! own asks the helper, the program of this crate, through a socket: [`use_helper`] sets this once, when the daemon
//! starts, because privileges belong to the whole process. Both ways share one implementation ([`files`], [`scope`],
//! [`start`]); the helper first checks [`limits`], which do not trust the daemon at all.
//!
//! | RootVerb | Does |
//! |---|---|
//! | greet | nothing: it shows that the helper is there |
//! | give | gives files of the daemon to a job's user, or lends their directories to a builder |
//! | take | gives what one such user left in a tree to the daemon |
//! | copy | copies what such a user has written so far into a directory of the daemon |
//! | supervise | starts a supervisor for the job of a user |
//! | build | starts a program as the user of builders, with a limit on its memory |
//! | enclose | puts a supervisor into a scope of systemd |
//! | kill | kills the remaining processes of a job or a builder |
//!
//! Invariants: nothing here parses data of a job or a package; whatever the daemon asks, nothing outside of the state
//! directory is given, taken, copied or used as a job directory, and no process runs as a user that the limits do not allow.
//! A file that has a second name may be outside of it by that: it never changes hands.

mod client;
mod copies;
mod files;
pub mod helper;
pub mod limits;
mod memory;
mod owners;
mod scope;
mod silent;
mod start;
mod walk;
mod wire;

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::OnceLock;
use std::time::Duration;

use agent_shim::cgroup::Groups;
use agent_shim::process;
use nix::unistd::{Gid, Uid};
use rustix::fs::{Mode, OFlags};

pub use scope::{Scope, ScopeError, is_possible as can_make_scopes};
pub use start::{give_way, supervisor};
pub use wire::GivenPart;
use wire::TakenPart;

static HELPER: OnceLock<client::Helper> = OnceLock::new();

/// From here on, operations that need root for this state directory are asked of the helper that listens at `socket`.
pub fn use_helper(socket: &Path, state_dir: &Path) {
    let _ = HELPER.set(client::Helper { socket: socket.to_owned(), state_dir: state_dir.to_owned() });
}

/// From here on, orphans of jobs and builders become children of this process, so that it finds them, too. A helper
/// has control groups that it made for that.
pub fn take_in_orphans() -> io::Result<()> {
    process::take_in_orphans()
}

/// Switches to the owner of the state directory, if that is not root: the daemon could not read files that root wrote
/// there, and could have put a link there. For a process of one thread, which does nothing else afterwards.
pub fn become_owner(state_dir: &Path) -> io::Result<()> {
    let Ok(found) = state_dir.metadata() else { return Ok(()) }; // it is made by this user
    if !nix::unistd::geteuid().is_root() || found.uid() == 0 {
        return Ok(());
    }
    nix::unistd::setgroups(&[])?;
    nix::unistd::setgid(Gid::from_raw(found.gid()))?;
    Ok(nix::unistd::setuid(Uid::from_raw(found.uid()))?)
}

/// Operations that need root are asked of a helper.
pub fn has_helper() -> bool {
    HELPER.get().is_some()
}

/// Asks the helper, if there is one, whether it is there; if not, what is wrong. Blocks for some seconds at most.
pub fn what_is_wrong() -> Option<String> {
    client::what_is_wrong(HELPER.get()?)
}

/// What is known to be wrong with the helper: an operation of this process, or [`what_is_wrong`], waits for it.
pub fn is_waited_for() -> Option<String> {
    client::away()
}

/// Jobs of this process can run as users other than its own.
pub fn serves_others() -> bool {
    has_helper() || nix::unistd::geteuid().is_root()
}

/// Gives all files at `path` that have one name, or only its directories, to the user; a helper gives only those of the
/// daemon and of users of single jobs.
pub fn give(path: &Path, uid: u32, gid: u32, kind: GivenPart) -> io::Result<()> {
    match HELPER.get() {
        Some(helper) => client::give(helper, path, uid, kind),
        None => files::give(&agent_fs::open_directory(path)?, (uid, gid), &|_| true, kind),
    }
}

/// Takes what a builder left at `path`: its directories and files are the daemon's from then on, no other user may
/// write to them, and none has a set-id bit. A copy takes the place of each file that has other names, which stay the
/// builder's.
pub fn take(path: &Path, uid: u32) -> io::Result<()> {
    let part = TakenPart::Whole { uid };
    match HELPER.get() {
        Some(helper) => client::take(helper, path, part),
        None => {
            let own = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
            files::take(&agent_fs::open_directory(path)?, own, part, &|_| false)
        }
    }
}

/// Lets the daemon read what the user of a job that is over left at `path`; copies of files that have other names, too,
/// and that not everybody may read, take `most` bytes at most. Does nothing without a helper: root reads everything.
pub fn take_outputs(path: &Path, uid: u32, most: u64) -> io::Result<()> {
    let Some(helper) = HELPER.get() else { return Ok(()) };
    client::take(helper, path, TakenPart::Readable { uid, most })
}

/// Copies what is in the directory `below` of the directory `base`, which others may change meanwhile, into the
/// directory `to` of the daemon: at most `most` bytes, or [`io::ErrorKind::StorageFull`]. Where `uid` says whose job it
/// is, only files of that user are copied, and of the daemon those that have no other name. Returns the paths, relative
/// to `below`, that it could not copy.
pub fn copy(base: &Path, below: &Path, to: &Path, uid: Option<u32>, most: u64) -> io::Result<Vec<PathBuf>> {
    match (HELPER.get(), uid) {
        (Some(helper), Some(uid)) => client::copy(helper, &base.join(below), to, uid, most),
        _ => {
            let (base, to) = (agent_fs::open_directory(base)?, agent_fs::open_directory(to)?);
            let from = agent_fs::open_beneath(
                base,
                below,
                OFlags::DIRECTORY,
                Mode::empty(),
                agent_fs::Links::Never,
            )?;
            let own = nix::unistd::geteuid().as_raw();
            let is_due =
                |seen: &rustix::fs::Stat| uid.is_none_or(|uid| copies::is_of_the_run(seen, own, uid));
            copies::copy(&from, &to, None, &is_due, most)
        }
    }
}

/// Removes a tree, whichever users own its files, however deep it is, also if some of its directories are closed. A tree
/// that does not exist is no error. What stands at `path` instead of a tree is removed, too.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let above = path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let parent = match rustix::fs::open(above, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        parent => parent?,
    };
    let name = CString::new(name.as_bytes())?;
    match (files::remove(&parent, &name), HELPER.get()) {
        (Err(error), Some(helper)) if error.kind() == io::ErrorKind::PermissionDenied => {
            client::take(helper, path, TakenPart::Directories)?;
            files::remove(&parent, &name)
        }
        (removed, _) => removed,
    }
}

/// Kills the processes that are in the groups or bear the mark, until none is left or the time is over. Returns how
/// many there were, and how many are left; 1 each if a helper does not answer. Blocks for as long.
pub fn kill(groups: &[PathBuf], mark: &str, within: Duration) -> (usize, usize) {
    match HELPER.get() {
        Some(helper) => client::kill(helper, groups, mark, within).unwrap_or((1, 1)),
        None => agent_shim::cgroup::kill_all(&Groups::new(groups.to_vec()), agent_shim::MARK, mark, within),
    }
}

/// Puts a process into a scope of its own, and returns the scope's control group. Blocks for some seconds at most.
pub fn enclose(pid: i32, scope: &Scope) -> Result<PathBuf, ScopeError> {
    match HELPER.get() {
        Some(helper) => client::enclose(helper, pid, scope),
        None => scope::make(pid, scope),
    }
}

/// A process that the helper started.
#[derive(Debug)]
pub struct Started {
    /// Its number.
    pub pid: i32,
    /// Readable once it has ended.
    pub pidfd: OwnedFd,
    /// The connection on which its end is reported. A builder is killed when this is closed, and when its helper ends.
    end: OwnedFd,
}

impl Started {
    /// How it ended; where its helper ended first, as if it had been killed. Blocks until it has.
    pub fn wait(&self) -> io::Result<Ended> {
        client::wait(self)
    }
}

/// How a process ended that the helper started.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    /// As the kernel says it.
    pub status: ExitStatus,
    /// One of its processes was killed because they took more memory together than they may.
    pub out_of_memory: bool,
}

/// Has the helper start a supervisor at a job directory for a job of this user; `None` without a helper.
pub fn ask_for_supervisor(dir: &Path, uid: u32, greeting: OwnedFd) -> Option<io::Result<Started>> {
    Some(client::supervise(HELPER.get()?, dir, uid, &greeting))
}

/// The command of a builder.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct Program {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Its whole environment.
    pub env: Vec<(String, String)>,
    /// Where it runs.
    pub cwd: PathBuf,
    /// How much nicer than the daemon it is.
    pub nice: i32,
    /// The most memory that it and all that it starts may take together, in bytes.
    pub memory: Option<u64>,
    /// What it sees of the state directory, relative to that.
    #[serde(default)]
    pub sees: Vec<PathBuf>,
    /// The directory in `packages/of` of the owner whose builder runs it; absent, it is the first of all builders.
    #[serde(default)]
    pub owner: Option<String>,
}

/// Has the helper run a program as the user of builders, with these as its standard streams; `None` without a helper.
pub fn ask_for_builder(program: &Program, streams: [OwnedFd; 3]) -> Option<io::Result<Started>> {
    Some(client::build(HELPER.get()?, program, &streams))
}
