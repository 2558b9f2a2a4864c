//! The processes of the job: everybody in its control groups, and every descendant of this process, which
//! is where orphans of the job end up. Each way finds what could leave the other.
//!
//! The one place that knows how the whole of a job is found and signalled.

use agent_shim::cgroup::Groups;
use agent_shim::process::{self, Process};
use nix::sys::signal::Signal;

/// Where the processes of the job are.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    groups: Groups,
}

impl Tree {
    /// The processes in `groups`, and the descendants of this one.
    pub(crate) fn new(groups: Groups) -> Tree {
        Tree { groups }
    }

    fn members(&self) -> Vec<Process> {
        let mut members = self.groups.members();
        members.extend(descendants());
        members.sort_unstable_by_key(|member| member.pid);
        members.dedup_by_key(|member| member.pid);
        members
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.members().len()).unwrap_or(u32::MAX)
    }

    /// Nobody is in the groups; descendants are known by being reaped.
    pub(crate) fn is_vacant(&self) -> bool {
        self.groups.is_empty()
    }

    /// Asks each of them to end. A stopped one is continued, or it could not hear.
    pub(crate) fn ask(&self) {
        for member in self.members() {
            let _ = member.signal(Signal::SIGTERM); // one that is gone, or not ours to signal, is counted later
            let _ = member.signal(Signal::SIGCONT);
        }
        self.groups.thaw();
    }

    /// Kills each of them. To be said again until there is none.
    pub(crate) fn kill(&self) {
        self.groups.kill();
        for member in descendants() {
            let _ = member.signal(Signal::SIGKILL);
        }
    }

    /// Removes the groups. `false` when one could not be removed.
    pub(crate) fn clear(&self) -> bool {
        self.groups.remove()
    }
}

fn descendants() -> Vec<Process> {
    process::descendants(std::process::id() as i32)
}
