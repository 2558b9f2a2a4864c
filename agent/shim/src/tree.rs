//! The processes of the job: every descendant of this process, which is where orphans of the job end up.
//!
//! The one place that knows how the whole of a job is found and signalled.

use agent_shim::process::{self, Process};
use nix::sys::signal::Signal;

fn members() -> Vec<Process> {
    process::descendants(std::process::id() as i32)
}

/// How many there are.
pub(crate) fn count() -> u32 {
    u32::try_from(members().len()).unwrap_or(u32::MAX)
}

/// Asks each of them to end. A stopped one is continued, or it could not hear.
pub(crate) fn ask() {
    for member in members() {
        let _ = member.signal(Signal::SIGTERM); // one that is gone, or not ours to signal, is counted later
        let _ = member.signal(Signal::SIGCONT);
    }
}

/// Kills each of them.
pub(crate) fn kill() {
    for member in members() {
        let _ = member.signal(Signal::SIGKILL);
    }
}
