//! The memory limit of a builder: a control group that its commands run in.
//!
//! Made like the groups of jobs (see [`agent_shim::cgroup`]), so a machine where jobs cannot be limited cannot limit
//! builders either. Where systemd makes scopes it is asked for one around each command instead, because a service may
//! not limit a part of itself. A limit on address space would fail builders that only map much memory.
//!
//! Invariant: on drop, all processes in the group are killed and the group is removed; a group left by a killed
//! daemon is removed with those of jobs, once it is empty.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use agent_shim::Limits;
use agent_shim::cgroup::{self, Groups};
use agent_shim::kills;
use agent_spawn::Scope;
use parking_lot::Mutex;

/// How many processes of a group the kernel has killed for lack of memory.
pub(crate) type Kills = u64;

/// A group that limits the memory of the commands that run in it ([`Command::within`](crate::Command::within)).
#[derive(Debug)]
pub struct MemoryGroup {
    groups: Groups,
    limit: u64,
    /// Made by systemd, one for each command: the group of the last.
    scope: Option<Mutex<PathBuf>>,
}

/// Why the memory of commands cannot be limited on this machine.
#[derive(Debug, thiserror::Error)]
pub enum MemoryGroupError {
    /// No hierarchy of control groups takes a group of this process.
    #[error("no control group can be made here")]
    NoGroup,
    /// The groups take no memory limit.
    #[error("{}", .0.join("; "))]
    Unlimited(
        /// Why not, for people: [`cgroup::Made::unmet`].
        Vec<String>,
    ),
}

static NUMBER: AtomicU64 = AtomicU64::new(0);

impl MemoryGroup {
    /// Makes a group whose processes may use this much memory together, in bytes. Blocks for a moment.
    pub fn make(limit: u64) -> Result<MemoryGroup, MemoryGroupError> {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("agentd-builder-{}-{number}", std::process::id());
        let places = cgroup::places(&agent_shim::CgroupRequest::default());
        let made = cgroup::make(&places, &name, Limits { memory: Some(limit), pids: None });
        let mut group = MemoryGroup { groups: made.groups, limit, scope: None };
        match made.limits.memory {
            Some(_) => Ok(group),
            None if agent_spawn::can_make_scopes() => {
                group.scope = Some(Mutex::default());
                Ok(group)
            }
            None if group.groups.dirs().is_empty() => Err(MemoryGroupError::NoGroup),
            None => Err(MemoryGroupError::Unlimited(made.unmet)),
        }
    }

    /// The limit, in bytes.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// The files through which a process enters the group, by writing its number.
    pub(crate) fn procs_files(&self) -> impl Iterator<Item = PathBuf> + '_ {
        self.groups.dirs().iter().map(|dir| dir.join("cgroup.procs"))
    }

    /// Puts a process into a scope of its own if systemd makes the groups, before it does much.
    pub(crate) async fn enclose(&self, pid: i32) {
        let Some(known) = &self.scope else { return };
        let scope = Scope::Builder { number: NUMBER.fetch_add(1, Ordering::Relaxed), memory: self.limit };
        match agent_blocking::blocking(move || agent_spawn::enclose(pid, &scope)).await {
            Ok(group) => *known.lock() = group,
            // A command that ends at once is gone before systemd receives the request.
            Err(error) => tracing::debug!(%error, "the memory of a builder is not limited"),
        }
    }

    /// Compared with an earlier answer, this tells whether the limit was exceeded meanwhile; 0 if it cannot be read.
    pub(crate) fn kills(&self) -> Kills {
        if let Some(scope) = &self.scope {
            return kills::in_group(&scope.lock()).unwrap_or(0);
        }
        self.groups.dirs().iter().find_map(|dir| kills::in_group(dir)).unwrap_or(0)
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let groups = std::mem::take(&mut self.groups);
        if groups.dirs().is_empty() {
            return;
        }
        groups.kill();
        let finish = move || {
            groups.kill(); // processes that were being started meanwhile
            groups.remove()
        };
        // It may take a moment until the group is empty; no caller waits for that.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(finish)),
            Err(_) => drop(finish()),
        }
    }
}
