//! What root alone can do for jobs and builders: six verbs, and two ways to have them done.
//!
//! A daemon that is root, or that of a user for himself, does them itself. A daemon that is a user of its own asks the
//! helper, the program of this crate, through a socket: [`use_helper`] says so once, when the daemon starts, as what a
//! process may do is a fact about the process. Behind both ways is one implementation ([`files`], [`scope`],
//! [`start`]); before it the helper asks [`limits`], which trust the daemon with nothing.
//!
//! | RootVerb | Does |
//! |---|---|
//! | give | makes files of the daemon those of a job's user, or lends their directories to a builder |
//! | take | makes what such users left in a tree the daemon's again |
//! | supervise | starts a supervisor for the job of a user |
//! | build | starts a program as the user of builders |
//! | scope | puts a supervisor or a builder into a scope of systemd |
//! | kill | ends what is left of a job or a builder |
//!
//! Invariants: nothing here parses what a job or a package wrote; whatever the daemon says, nothing outside of the state
//! directory is given, taken or started at, and nobody is started as whom the limits do not name.

mod client;
mod files;
pub mod helper;
pub mod limits;
mod scope;
mod start;
mod wire;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::OnceLock;
use std::time::Duration;

use agent_shim::cgroup::Groups;
use agent_shim::process;
use nix::unistd::{Gid, Uid};

pub use scope::{Scope, ScopeError, is_possible as can_make_scopes};
pub use start::{give_way, supervisor};
pub use wire::GivenPart;

static HELPER: OnceLock<client::Helper> = OnceLock::new();

/// From here on, root's work for this state directory is asked of the helper that listens at `socket`.
pub fn use_helper(socket: &Path, state_dir: &Path) {
    let _ = HELPER.set(client::Helper { socket: socket.to_owned(), state_dir: state_dir.to_owned() });
}

/// From here on, what is left of a job or a builder is found by being an orphan of this process, too. A helper has groups
/// of its own making for that.
pub fn take_in_orphans() -> io::Result<()> {
    process::take_in_orphans()
}

/// Becomes the user whose the state directory is, where that is not root: what root wrote there, the daemon could not
/// read, and it could have laid a link in the way. For a process of one thread, which goes on with nothing else.
pub fn become_owner(state_dir: &Path) -> io::Result<()> {
    let Ok(found) = state_dir.metadata() else { return Ok(()) }; // it is made by this user
    if !nix::unistd::geteuid().is_root() || found.uid() == 0 {
        return Ok(());
    }
    nix::unistd::setgroups(&[])?;
    nix::unistd::setgid(Gid::from_raw(found.gid()))?;
    Ok(nix::unistd::setuid(Uid::from_raw(found.uid()))?)
}

/// Root's work is asked of a helper.
pub fn has_helper() -> bool {
    HELPER.get().is_some()
}

/// Jobs of this process can run as others than its own user.
pub fn serves_others() -> bool {
    has_helper() || nix::unistd::geteuid().is_root()
}

/// Makes everything at `path` the user's, or its directories alone; of a helper only what is the daemon's.
pub fn give(path: &Path, uid: u32, gid: u32, kind: GivenPart) -> io::Result<()> {
    match HELPER.get() {
        Some(helper) => client::give(helper, path, uid, kind),
        None => files::give(&agent_fs::open_directory(path)?, (uid, gid), &|_| true, kind),
    }
}

/// Makes what is the user's at `path` the daemon's, or what is of anybody for whom a helper works: without set-id bits
/// and writing by others, and so that the daemon can read and remove it. What a daemon without one can read it can read.
pub fn take(path: &Path, uid: Option<u32>) -> io::Result<()> {
    match (HELPER.get(), uid) {
        (Some(helper), _) => client::take(helper, path),
        (None, Some(from)) => {
            let own = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
            files::take(&agent_fs::open_directory(path)?, own, &|uid| uid == from)
        }
        (None, None) => Ok(()),
    }
}

/// Removes a tree, whoever made what is in it. It is no error when it is not there.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let removed = match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && has_helper() => {
            take(path, None)?;
            std::fs::remove_dir_all(path)
        }
        removed => removed,
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Kills who is in the groups or bears the mark, until nobody is left or the time is over. Returns how many there were,
/// and how many are left; a helper that does not answer leaves one. Blocking for as long.
pub fn kill(groups: &[PathBuf], mark: &str, within: Duration) -> (usize, usize) {
    match HELPER.get() {
        Some(helper) => client::kill(helper, groups, mark, within).unwrap_or((1, 1)),
        None => process::kill_all(&Groups::new(groups.to_vec()), agent_shim::MARK, mark, within),
    }
}

/// Puts a process into a scope of its own, and returns the control group of the scope. Blocking for some seconds at most.
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
    /// Through which its end is told. A builder ends when this is closed.
    end: OwnedFd,
}

impl Started {
    /// How it ended. Blocks until it has.
    pub fn wait(&self) -> io::Result<ExitStatus> {
        client::wait(self)
    }
}

/// Has the helper start a supervisor at a job directory for a job of this user; `None` without a helper.
pub fn ask_for_supervisor(dir: &Path, uid: u32, greeting: OwnedFd) -> Option<io::Result<Started>> {
    Some(client::supervise(HELPER.get()?, dir, uid, &greeting))
}

/// What a builder is to run.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct Program {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Its whole environment.
    pub env: Vec<(String, String)>,
    /// Where it runs.
    pub cwd: PathBuf,
    /// How much more than the daemon it gives way to others.
    pub nice: i32,
}

/// Has the helper run a program as the user of builders, with these as its standard streams; `None` without a helper.
pub fn ask_for_builder(program: &Program, streams: [OwnedFd; 3]) -> Option<io::Result<Started>> {
    Some(client::build(HELPER.get()?, program, &streams))
}
