//! How the processes of a job are kept together on this machine, found out by trying.

use std::path::Path;
use std::time::Duration;

use agent_shim::Limits;
use agent_shim::cgroup::{self, GroupPlace};

use super::scope;

/// How the processes of a job are kept together here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Containment {
    /// `systemd scope`, `cgroup v2`, `cgroup v1` or `process group`, as in exit records.
    pub kind: String,
    /// A job's memory can be limited, and running out of it distinguished from any other end.
    pub memory: bool,
    /// The number of a job's processes can be limited.
    pub pids: bool,
    /// All processes of a job are killed at once.
    pub at_once: bool,
}

/// Makes the groups of a job, checks what they can do and removes them. Blocks for well under a second. Where systemd
/// makes scopes, the controllers that a scope gets count, too.
pub fn containment() -> Containment {
    let places = cgroup::places(&agent_shim::CgroupRequest::default());
    let name = format!("agentd-probe-{}", std::process::id());
    let limits = Limits { memory: Some(1 << 40), pids: Some(1 << 15) };
    let made = cgroup::make(&places, &name, limits);
    let kind = match scope::is_possible() {
        true => cgroup::Containment::Scope,
        false => made.containment,
    };
    let in_scope = |controller: &str| kind == cgroup::Containment::Scope && is_delegated(&places, controller);
    let found = Containment {
        kind: kind.to_string(),
        memory: made.limits.memory.is_some() || in_scope("memory"),
        pids: made.limits.pids.is_some() || in_scope("pids"),
        at_once: made.groups.with("cgroup.kill").is_some(),
    };
    made.groups.remove();
    found
}

/// Removes groups of jobs that have no other owner: those of a shim that was killed and whose job directory is gone
/// as well. Only empty groups of some age are removed: a group that is about to be entered is empty too. Blocks for a
/// moment; returns how many were removed.
pub fn sweep_groups() -> usize {
    let places = cgroup::places(&agent_shim::CgroupRequest::default());
    places.iter().map(|place| cgroup::sweep(&place.parent, ABANDONED)).sum()
}

/// The age from which an empty group counts as abandoned.
const ABANDONED: Duration = Duration::from_secs(600);

/// The unified hierarchy has the controller, which a scope of a job then gets.
fn is_delegated(places: &[GroupPlace], controller: &str) -> bool {
    let of = |dir: &Path| std::fs::read_to_string(dir.join("cgroup.controllers")).ok();
    let of_unified = places.iter().filter(|place| place.v2).flat_map(|place| place.parent.ancestors());
    of_unified.filter_map(of).any(|has| has.split_whitespace().any(|name| name == controller))
}
