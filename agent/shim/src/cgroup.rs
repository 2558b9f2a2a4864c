//! Control groups: the groups a job's processes are kept in, so that none escapes, all are limited
//! together and all are killed together.
//!
//! The processes of one job are in a group of their own ([`Groups`]), apart from their supervisor, in each
//! hierarchy that is of use: the unified one (version 2), and memory, pids and freezer of version 1. A
//! machine may have the one, the other, both or none, and may let us make groups in some of them only; groups
//! that cannot be made are left out, and limits without effect are reported ([`Made::unmet`]). Where a group can
//! be made at all is decided in [`places`], from files of procfs alone.
//!
//! Hides: the files of both versions, mounts, namespaces. The files of a group show what it can do, so that
//! its path is enough to use it when its supervisor is gone.
//!
//! Invariants: nothing outside a group that was made here is ever written but `cgroup.subtree_control` of
//! its parent, and for a scope the group of the shim itself; a process is signalled only through a
//! descriptor, and only while it is seen in the group.

pub mod devices;
mod groups;
mod places;
mod usage;

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_model::{ReplicaId, failpoint};

pub use groups::{Groups, kill_all, kill_container, kill_marked};
pub use places::{GroupPlace, can_deny, place_of_devices, places, places_of};
pub use usage::{GroupUsage, counter};

use crate::record::DeviceNode;
use crate::record::Limits;
use crate::sys::Entrances;

/// The name of a scope that holds one job: this, the replica and the instance, and `.scope`.
pub const SCOPE_PREFIX: &str = "agent-job-";

/// The prefix of the name of every group of a job.
pub const NAME_PREFIX: &str = "agentd-";

/// How the processes of a job are kept together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Containment {
    /// A scope that systemd made for the job.
    Scope,
    /// A group of version 2.
    V2,
    /// Groups of version 1, perhaps with one of version 2 beside them.
    V1,
    /// No group: the descendants of the shim.
    ProcessGroup,
    /// A container of which the shim is the first process.
    Container,
}

impl Containment {
    /// What groups at all these places give.
    pub fn of(places: &[GroupPlace]) -> Containment {
        match places {
            [] => Containment::ProcessGroup,
            places if places.iter().any(|place| place.scope) => Containment::Scope,
            [GroupPlace { v2: true, .. }] => Containment::V2,
            _ => Containment::V1,
        }
    }
}

impl std::fmt::Display for Containment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Containment::Scope => "systemd scope",
            Containment::V2 => "cgroup v2",
            Containment::V1 => "cgroup v1",
            Containment::ProcessGroup => "process group",
            Containment::Container => "container",
        })
    }
}

/// Groups that were made, and what they do.
#[derive(Debug)]
pub struct Made {
    /// The groups.
    pub groups: Groups,
    /// The kind of containment they give.
    pub containment: Containment,
    /// The limits that are in effect, as read back.
    pub limits: Limits,
    /// The limits that were asked for and are not, each with the reason.
    pub unmet: Vec<String>,
    /// How a process is started in them.
    pub entrances: Entrances,
}

impl Made {
    /// The same, and what will be in the groups cannot open these nodes.
    #[must_use]
    pub fn kept_from(mut self, nodes: &[DeviceNode]) -> Made {
        if let Err(error) = devices::deny(&self.groups, nodes) {
            self.unmet.push(format!("GPUs of others out of reach: {error}"));
        }
        self
    }
}

/// The name of the groups of one run. The instance makes it unique, the replica is for people.
pub fn name_of(replica: &ReplicaId, instance: &str) -> String {
    format!("{NAME_PREFIX}{replica}-{}", instance.get(..8).unwrap_or(instance))
}

/// The paths of the groups that [`make`] would make.
pub fn paths(places: &[GroupPlace], name: &str) -> Vec<PathBuf> {
    places.iter().map(|place| place.parent.join(name)).collect()
}

/// Makes the groups called `name` at `places` and sets their limits. What cannot be made is left out.
pub fn make(places: &[GroupPlace], name: &str, limits: Limits) -> Made {
    let mut made = Vec::new();
    let mut entrances = Entrances::default();
    for place in places {
        if place.v2 {
            open_to_children(place);
        }
        match make_one(&place.parent.join(name), place.v2) {
            Ok(entrance) => {
                made.push(place.clone());
                match place.v2 {
                    true => entrances.birth = Some(entrance),
                    false => entrances.files.push(entrance),
                }
            }
            Err(_) => drop(fs::remove_dir(place.parent.join(name))), // read-only, not ours, or out of groups
        }
    }
    let groups = Groups::new(made.iter().map(|place| place.parent.join(name)).collect());
    let containment = Containment::of(&made);
    let mut unmet = Vec::new();
    let mut set = |what: &str, limit: Option<u64>, by: fn(&Path, u64) -> io::Result<()>| {
        let limit = limit?;
        match groups.try_each(|group| by(group, limit)) {
            Ok(()) => Some(limit),
            Err(error) => {
                unmet.push(format!("{what} {limit}: {error}"));
                None
            }
        }
    };
    let limits = Limits {
        memory: set("memory", limits.memory, limit_memory),
        pids: set("pids", limits.pids.map(|limit| limit.min(half_of_all_pids())), limit_pids),
    };
    Made { groups, containment, limits, unmet, entrances }
}

/// The groups of the container this process is in, as they are seen from inside: all hierarchies that count or limit
/// something. They are the container engine's; nothing is made or written there.
pub fn of_container() -> Groups {
    let root = Path::new("/sys/fs/cgroup");
    let dirs = [root.to_owned(), root.join("memory"), root.join("pids")].into_iter();
    let of_use = |dir: &PathBuf| {
        ["memory.events", "memory.oom_control", "pids.max"].iter().any(|file| dir.join(file).exists())
    };
    Groups::new(dirs.filter(of_use).collect())
}

/// Which of the `asked` limits the groups, set by others, have; and for those they do not have, why.
pub fn limits_of(groups: &Groups, asked: Limits) -> (Limits, Vec<String>) {
    let mut unmet = Vec::new();
    let mut look = |what: &str, limit: Option<u64>, files: [&str; 2], unit: u64| {
        let limit = limit?;
        let found = files.iter().find_map(|file| fs::read_to_string(groups.with(file)?.join(file)).ok());
        let found = found.as_deref().map_or("nothing", str::trim);
        let now = found.parse::<u64>().ok().filter(|now| *now <= limit && limit - now < unit);
        if now.is_none() {
            unmet.push(format!("{what} {limit}: it reads back as {found}"));
        }
        now.map(|_| limit)
    };
    let limits = Limits {
        memory: look("memory", asked.memory, ["memory.max", "memory.limit_in_bytes"], PAGE),
        pids: look("pids", asked.pids, ["pids.max", "pids.max"], 1),
    };
    (limits, unmet)
}

/// Removes groups below `parent` that have a name of ours, are empty and were made more than `age` ago.
/// Returns how many.
pub fn sweep(parent: &Path, age: Duration) -> usize {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let old = |path: &Path| {
        let made = path.metadata().and_then(|found| found.modified());
        made.is_ok_and(|made| made.elapsed().is_ok_and(|since| since > age))
    };
    let ours = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(NAME_PREFIX));
    let left = ours.map(|entry| entry.path()).filter(|path| old(path));
    left.map(|path| Groups::new(vec![path])).filter(|group| group.is_empty() && group.remove()).count()
}

/// Makes a group, and opens what a process enters it by: its directory, or the file of its threads.
fn make_one(group: &Path, v2: bool) -> io::Result<OwnedFd> {
    failpoint::hit("shim.cgroup.make")?;
    match fs::create_dir(group) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Programs of other users read their memory limit there. The supervisor's own files are closed to all.
    fs::set_permissions(group, fs::Permissions::from_mode(0o755))?;
    let entrance = if v2 { File::open(group) } else { File::options().write(true).open(group.join("tasks")) };
    Ok(entrance?.into())
}

/// Lets groups below a group of version 2 have its controllers. A group that is a scope of our own is
/// emptied first, because no group with processes in it may pass controllers on; for any other one that has
/// processes this fails, and the job's group has no limits.
fn open_to_children(place: &GroupPlace) {
    if place.scope {
        let shim = place.parent.join("shim");
        let _ = fs::create_dir(&shim); // an error shows in the next step
        let _ = fs::write(shim.join("cgroup.procs"), "0");
    }
    let has = fs::read_to_string(place.parent.join("cgroup.controllers")).unwrap_or_default();
    for controller in has.split_whitespace().filter(|name| ["memory", "pids", "io"].contains(name)) {
        let _ = fs::write(place.parent.join("cgroup.subtree_control"), format!("+{controller}"));
    }
}

/// Limits memory if the group can.
fn limit_memory(group: &Path, limit: u64) -> io::Result<()> {
    let v2 = group.join("memory.max");
    let file = if v2.exists() { v2 } else { group.join("memory.limit_in_bytes") };
    set(&file, limit, PAGE)?;
    // Memory that may be swapped out is not limited memory. Best effort: without swap there is no such file.
    let _ = fs::write(group.join("memory.swap.max"), "0");
    let _ = fs::write(group.join("memory.memsw.limit_in_bytes"), limit.to_string());
    Ok(())
}

/// No job may take more of the machine's process numbers, or nobody could start a process to inspect it.
fn half_of_all_pids() -> u64 {
    let all =
        fs::read_to_string("/proc/sys/kernel/pid_max").ok().and_then(|all| all.trim().parse::<u64>().ok());
    all.map_or(u64::MAX, |all| all / 2)
}

/// Limits the number of processes if the group can.
fn limit_pids(group: &Path, limit: u64) -> io::Result<()> {
    set(&group.join("pids.max"), limit, 1)
}

/// The largest page there is, in bytes: the kernel rounds limits of memory down to whole ones.
const PAGE: u64 = 64 << 10;

/// Writes a limit and reads it back, since a limit may be accepted and have no effect.
fn set(file: &Path, limit: u64, unit: u64) -> io::Result<()> {
    failpoint::hit("shim.cgroup.limit")?;
    // Opened, not created: a file that is not there must stay an error.
    let mut open = File::options().write(true).open(file)?;
    io::Write::write_all(&mut open, limit.to_string().as_bytes())?;
    let now = fs::read_to_string(file)?;
    match now.trim().parse::<u64>() {
        Ok(now) if now <= limit && limit - now < unit => Ok(()),
        _ => Err(io::Error::other(format!("it reads back as {}", now.trim()))),
    }
}

#[cfg(test)]
mod tests;
