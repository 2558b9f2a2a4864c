//! The processes of the job. On the machine itself: all in its control groups, and every descendant of this process,
//! which orphans of the job become; each finds processes that could escape the other. In a container of which this is
//! the first process: all others in it.
//!
//! The one place that knows how the whole of a job is found and signalled.

use agent_shim::cgroup::Groups;
use agent_shim::process::{self, Process};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Everybody but this process and, in a container, its first one, which is this.
const EVERYBODY: Pid = Pid::from_raw(-1);

/// Where the processes of the job are.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    groups: Groups,
    container: bool,
}

impl Tree {
    /// The processes in `groups`, and the descendants of this one.
    pub(crate) fn new(groups: Groups) -> Tree {
        Tree { groups, container: false }
    }

    /// All other processes of the container of which this is the first process. If it is not the first, only its
    /// descendants: all others would be the whole machine.
    pub(crate) fn of_container() -> Tree {
        Tree { groups: Groups::default(), container: std::process::id() == 1 }
    }

    fn members(&self) -> Vec<Process> {
        if self.container {
            return process::others();
        }
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

    /// No process is left that is no descendant; the end of descendants is known when they are reaped.
    pub(crate) fn is_vacant(&self) -> bool {
        if self.container { process::others().is_empty() } else { self.groups.is_empty() }
    }

    /// Asks each of them to end. A stopped one is continued, or it could not react.
    pub(crate) fn ask(&self) {
        if self.container {
            return [Signal::SIGTERM, Signal::SIGCONT].into_iter().for_each(tell_everybody);
        }
        for member in self.members() {
            let _ = member.signal(Signal::SIGTERM); // one that is gone, or not ours to signal, is counted later
            let _ = member.signal(Signal::SIGCONT);
        }
        self.groups.thaw();
    }

    /// Kills each of them. To be repeated until there is none.
    pub(crate) fn kill(&self) {
        if self.container {
            return tell_everybody(Signal::SIGKILL);
        }
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

/// All at once, so that none can start another one unseen.
fn tell_everybody(signal: Signal) {
    let _ = kill(EVERYBODY, signal); // nobody there is what it is for
}

fn descendants() -> Vec<Process> {
    process::descendants(std::process::id() as i32)
}
