//! What keeps the processes of a job together on this machine, found out by trying it.

use std::path::Path;
use std::time::Duration;

use agent_shim::Limits;
use agent_shim::cgroup::{self, GroupPlace};

use super::scope;

/// What keeps the processes of a job together here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Containment {
    /// `systemd scope`, `cgroup v2`, `cgroup v1` or `process group`, as exit records say it.
    pub kind: String,
    /// A job's memory can be limited, and running out of it told from any other end.
    pub memory: bool,
    /// The number of a job's processes can be limited.
    pub pids: bool,
    /// All processes of a job are killed at once.
    pub at_once: bool,
}

/// Makes the groups of a job, looks what they do and removes them. Blocking, for well under a second. Where
/// systemd makes scopes, what they do is what its groups do.
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

/// Removes groups of jobs that nobody will remove: those of a shim that was killed and whose job directory
/// is gone as well. Only empty ones go, and only those that were there for a while: a group that is about to
/// be entered is empty too. Blocking, for a moment; returns how many there were.
pub fn sweep_groups() -> usize {
    let places = cgroup::places(&agent_shim::CgroupRequest::default());
    places.iter().map(|place| cgroup::sweep(&place.parent, ABANDONED)).sum()
}

/// For how long an empty group has been nobody's.
const ABANDONED: Duration = Duration::from_secs(600);

/// The unified hierarchy has the controller, which a scope of a job is then given.
fn is_delegated(places: &[GroupPlace], controller: &str) -> bool {
    let of = |dir: &Path| std::fs::read_to_string(dir.join("cgroup.controllers")).ok();
    let of_unified = places.iter().filter(|place| place.v2).flat_map(|place| place.parent.ancestors());
    of_unified.filter_map(of).any(|has| has.split_whitespace().any(|name| name == controller))
}
