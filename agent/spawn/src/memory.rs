//! The memory limit of a builder of the helper: for all its processes together, whatever the daemon's rights are.
//!
//! A builder waits at a [`BuilderGate`] until it is limited, before it starts anything: what a process starts while it is put
//! into a group would stay outside. The limit is that of a scope of systemd, or of a control group made here, or, where
//! neither can be made, one that each of its processes has for itself, which the builder sets for itself.
//!
//! Invariant: a group that was made here is removed when the builder has ended, with all that is in it.

use std::io::{self, PipeReader, PipeWriter, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use agent_shim::Limits;
use agent_shim::cgroup::{self, Groups};
use agent_shim::kills;

use crate::Scope;
use crate::scope;

/// Where a process waits until it may go on: it opens a pipe by a path, and reads to its end. It may come late, so this
/// is kept for as long as it may.
pub(crate) struct BuilderGate {
    inside: PipeReader,
    outside: Option<PipeWriter>,
}

impl BuilderGate {
    pub(crate) fn new() -> io::Result<BuilderGate> {
        let (inside, outside) = io::pipe()?;
        Ok(BuilderGate { inside, outside: Some(outside) })
    }

    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.inside.as_raw_fd()).into()
    }

    /// Lets it go on, perhaps with this limit for each process.
    pub(crate) fn open(&mut self, each: Option<u64>) -> io::Result<()> {
        match (self.outside.take(), each) {
            (Some(mut outside), Some(each)) => outside.write_all(each.to_string().as_bytes()),
            _ => Ok(()),
        }
    }
}

/// What limits a builder.
pub(crate) enum Limit {
    Groups(Groups),
    /// Of systemd, which removes it.
    Scope(PathBuf),
    /// Each process by itself.
    Each(u64),
}

static NUMBER: AtomicU64 = AtomicU64::new(0);

impl Limit {
    /// Limits a process that waits at its gate.
    pub(crate) fn of(pid: i32, bytes: u64) -> Limit {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        if scope::is_possible() {
            match scope::make(pid, &Scope::Builder { number, memory: bytes }) {
                Ok(group) => return Limit::Scope(group),
                Err(error) => say(&format!("no scope for a builder: {error}")),
            }
        }
        let name = format!("{}builder-{}-{number}", cgroup::NAME_PREFIX, std::process::id());
        let places = cgroup::places(&agent_shim::CgroupRequest::default());
        let made = cgroup::make(&places, &name, Limits { memory: Some(bytes), pids: None });
        let enter = || {
            let files = made.groups.dirs().iter().map(|dir| dir.join("cgroup.procs"));
            files.into_iter().try_for_each(|file| std::fs::write(file, pid.to_string()))
        };
        match made.limits.memory.map(|_| enter()) {
            Some(Ok(())) => return Limit::Groups(made.groups),
            Some(Err(error)) => say(&format!("a builder does not enter its control group: {error}")),
            None => say(&format!("no control group limits a builder: {}", made.unmet.join("; "))),
        }
        finish(&made.groups);
        Limit::Each(bytes)
    }

    /// The limit that each process of the builder sets for itself.
    pub(crate) fn each(&self) -> Option<u64> {
        if let Limit::Each(bytes) = self { Some(*bytes) } else { None }
    }

    /// The kernel has killed one of its processes; known until it is dropped.
    pub(crate) fn was_exceeded(&self) -> bool {
        match self {
            Limit::Groups(groups) => {
                groups.dirs().iter().find_map(|dir| kills::in_group(dir)).is_some_and(|kills| kills > 0)
            }
            Limit::Scope(group) => kills::in_group(group).is_some_and(|kills| kills > 0),
            Limit::Each(_) => false,
        }
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        if let Limit::Groups(groups) = self {
            finish(groups);
        }
    }
}

fn finish(groups: &Groups) {
    groups.kill();
    groups.remove(); // one that is not empty is removed with those of jobs
}

/// To the log of the service.
fn say(what: &str) {
    let _ = writeln!(io::stderr(), "agent-spawn: {what}");
}
