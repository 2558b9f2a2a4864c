//! The owner of a process, as text for users: `(python) of job train-3`.
//!
//! Reads `/proc`. A read there may block on a process that the driver holds, so it is done on a separate thread and
//! given up after a moment; then the text is less detailed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::Duration;

use agent_model::ReplicaId;
use agent_shim::process::Process;

/// How long the lookup of all owners may take.
const WITHIN: Duration = Duration::from_secs(2);
/// Programs that draw on the screen, by their names in the kernel (`comm`). They may share a GPU with jobs.
const SCREENS: &[&str] = &[
    "Xorg",
    "Xwayland",
    "X",
    "gnome-shell",
    "kwin_x11",
    "kwin_wayland",
    "plasmashell",
    "sway",
    "weston",
    "mutter",
    "cinnamon",
    "xfwm4",
    "gdm-x-session",
];
/// How many parents are checked.
const GENERATIONS: usize = 32;

/// The owners of processes, as text; `None` for one that only draws on the screen.
pub(super) type Owners = BTreeMap<u32, Option<String>>;

/// Finds the owners of these processes.
pub(super) async fn owners(pids: BTreeSet<u32>) -> Owners {
    if pids.is_empty() {
        return BTreeMap::new();
    }
    let names: BTreeMap<u32, String> = pids.iter().map(|pid| (*pid, name(*pid))).collect();
    let asked =
        agent_blocking::spawn_blocking(move || pids.into_iter().map(|pid| (pid, owner(pid))).collect());
    let found: BTreeMap<u32, String> = match tokio::time::timeout(WITHIN, asked).await {
        Ok(Ok(found)) => found,
        _ => BTreeMap::new(),
    };
    let words = |(pid, name): (u32, String)| {
        let owner = found.get(&pid).cloned().unwrap_or_else(|| "of somebody".to_owned());
        let draws = SCREENS.iter().any(|screen| name == format!("({screen})"));
        (pid, (!draws).then(|| format!("{name} {owner}").trim().to_owned()))
    };
    names.into_iter().map(words).collect()
}

/// `(python)`; empty when it cannot be seen from here.
fn name(pid: u32) -> String {
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let shown: String = comm.trim().chars().filter(|c| !c.is_control()).collect();
    if shown.is_empty() { String::new() } else { format!("({shown})") }
}

fn owner(pid: u32) -> String {
    let Ok(groups) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else {
        return "that cannot be seen from here".to_owned();
    };
    if let Some(job) = job_of(pid) {
        return format!("of job {job}");
    }
    match container(&groups) {
        Some(container) => format!("in container {container}"),
        None => "of nobody's job".to_owned(),
    }
}

/// The job of a process, from its environment or that of one of its parents.
fn job_of(pid: u32) -> Option<String> {
    let mut next = i32::try_from(pid).ok()?;
    for _ in 0..GENERATIONS {
        let environment = fs::read(format!("/proc/{next}/environ")).unwrap_or_default();
        if let Some(replica) = replica(&environment) {
            return Some(replica.job.to_string());
        }
        next = Process::find(next)?.parent;
        if next <= 1 {
            return None;
        }
    }
    None
}

fn replica(environment: &[u8]) -> Option<ReplicaId> {
    let mut entries =
        environment.split(|byte| *byte == 0).filter_map(|entry| std::str::from_utf8(entry).ok());
    entries.find_map(|entry| entry.strip_prefix("AGENTD_REPLICA="))?.parse().ok()
}

/// The first characters of the id of a process's container, which engines put into the names of control groups.
fn container(groups: &str) -> Option<String> {
    const LENGTH: usize = 64;
    const SHOWN: usize = 12;
    let parts = groups.split(|c: char| !c.is_ascii_alphanumeric());
    let is_name = |part: &&str| part.len() == LENGTH && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    parts.filter(is_name).map(|name| name[..SHOWN].to_owned()).next_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_container_is_read_from_the_groups() {
        let name = "0123456789ab".to_owned() + &"c".repeat(52);
        for groups in [
            format!("12:pids:/docker/{name}\n0::/x\n"),
            format!("0::/system.slice/docker-{name}.scope\n"),
            format!("0::/kubepods.slice/pod1/cri-containerd-{name}.scope"),
        ] {
            assert_eq!(container(&groups).as_deref(), Some("0123456789ab"), "{groups}");
        }
        assert_eq!(container("0::/user.slice/user-1000.slice"), None);
    }

    #[test]
    fn test_job_is_read_from_the_environment() {
        assert_eq!(replica(b"A=1\0AGENTD_REPLICA=train.3.0\0B=\xff\0").unwrap().job.as_str(), "train");
        assert!(replica(b"AGENTD_REPLICA=\0").is_none() && replica(b"").is_none());
    }

    #[tokio::test]
    async fn test_own_process_is_named() {
        let me = std::process::id();
        let found = owners([me, u32::MAX].into()).await;
        assert!(found[&me].as_ref().is_some_and(|words| words.starts_with('(')), "{found:?}");
        assert_eq!(found[&u32::MAX].as_deref(), Some("that cannot be seen from here"));
    }
}
