//! The memory limit of a builder: a control group that its commands run in.
//!
//! Made like the groups of jobs (see [`agent_shim::cgroup`]). Where systemd makes scopes it is asked for one around each
//! command instead, because a service may not limit a part of itself. What root's helper starts, it limits itself. Where
//! none of these can be done, each process has the limit by itself (`RLIMIT_DATA`): one on address space would fail
//! builders that only map much memory. A command enters its group, or waits until it is in its scope, before it starts
//! anything: what it starts while it is being moved would stay outside.
//!
//! Invariant: on drop, all processes in the group are killed and the group is removed; a group left by a killed
//! daemon is removed with those of jobs, once it is empty.

use std::io::{self, PipeReader, PipeWriter};
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
    unmet: Option<String>,
}

static NUMBER: AtomicU64 = AtomicU64::new(0);

/// What a command does before it becomes its program.
pub(super) enum GroupEntry {
    /// It writes its number to these files.
    Groups(Vec<PathBuf>),
    /// It waits for the end of the pipe.
    Waits(PipeReader, PipeWriter),
    /// It limits its own memory, and so that of each process that it starts.
    Each,
}

impl MemoryGroup {
    /// Makes a group whose processes may use this much memory together, in bytes. Blocks for a moment.
    pub fn make(limit: u64) -> MemoryGroup {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("agentd-builder-{}-{number}", std::process::id());
        let places = cgroup::places(&agent_shim::CgroupRequest::default());
        let made = cgroup::make(&places, &name, Limits { memory: Some(limit), pids: None });
        let mut group = MemoryGroup { groups: made.groups, limit, scope: None, unmet: None };
        match made.limits.memory {
            Some(_) => {}
            None if agent_spawn::can_make_scopes() && !agent_spawn::has_helper() => {
                group.scope = Some(Mutex::default())
            }
            None if group.groups.dirs().is_empty() => {
                group.unmet = Some("no control group can be made here".to_owned());
            }
            None => group.unmet = Some(made.unmet.join("; ")),
        }
        group
    }

    /// Why own children have a limit each, and none together.
    pub fn unmet(&self) -> Option<&str> {
        self.unmet.as_deref()
    }

    pub(crate) fn entry(&self) -> io::Result<GroupEntry> {
        if self.scope.is_some() {
            return io::pipe().map(|(inside, outside)| GroupEntry::Waits(inside, outside));
        }
        match self.unmet {
            Some(_) => Ok(GroupEntry::Each),
            None => Ok(GroupEntry::Groups(
                self.groups.dirs().iter().map(|dir| dir.join("cgroup.procs")).collect(),
            )),
        }
    }

    /// The limit, in bytes.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Puts a process that waits at its gate into a scope of its own.
    pub(crate) async fn enclose(&self, pid: i32) {
        let Some(known) = &self.scope else { return };
        let scope = Scope::Builder { number: NUMBER.fetch_add(1, Ordering::Relaxed), memory: self.limit };
        match agent_blocking::blocking(move || agent_spawn::enclose(pid, &scope)).await {
            Ok(group) => *known.lock() = group,
            Err(error) => tracing::warn!(%error, "the memory of a builder is not limited"),
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
