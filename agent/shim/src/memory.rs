//! Whether the kernel killed the job for want of memory, as far as an unprivileged observer can tell.
//!
//! The kernel counts such kills for the memory group this process is in and for the machine. A count that
//! grew during the job is evidence only together with an end that looks like it, because the group may be
//! shared with others.

use std::fs;

use agent_model::ExitStatus;

/// How many processes the kernel has killed so far, in this memory group or else on the machine.
pub(crate) fn kills() -> u64 {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of_group = groups.lines().filter_map(counter_path).find_map(|path| counter(&path));
    of_group.or_else(|| counter("/proc/vmstat")).unwrap_or(0)
}

/// The file that counts the kills of a memory group, from a line `number:controllers:path`.
fn counter_path(line: &str) -> Option<String> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?.trim_end_matches('/'));
    match controllers {
        "" => Some(format!("/sys/fs/cgroup{path}/memory.events")),
        _ if controllers.split(',').any(|name| name == "memory") => {
            Some(format!("/sys/fs/cgroup/memory{path}/memory.oom_control"))
        }
        _ => None,
    }
}

fn counter(path: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())
}

/// The end was the kernel's doing: killed by nobody here, directly or as a shell reports it of its child,
/// while the count grew.
pub(crate) fn is_to_blame(status: ExitStatus, killed_here: bool, before: u64, after: u64) -> bool {
    !killed_here && after > before && status.shell_code() == 137
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_counter_path_of_both_hierarchies() {
        assert_eq!(counter_path("0::/a/b").unwrap(), "/sys/fs/cgroup/a/b/memory.events");
        assert_eq!(counter_path("0::/").unwrap(), "/sys/fs/cgroup/memory.events");
        assert_eq!(counter_path("7:cpu,memory:/x").unwrap(), "/sys/fs/cgroup/memory/x/memory.oom_control");
        assert!(counter_path("7:cpu:/x").is_none());
    }

    #[test]
    fn test_memory_is_blamed_only_for_a_kill_of_nobody_else() {
        assert!(is_to_blame(ExitStatus::Signal(9), false, 1, 2));
        assert!(is_to_blame(ExitStatus::Code(137), false, 1, 2));
        assert!(!is_to_blame(ExitStatus::Signal(9), false, 2, 2));
        assert!(!is_to_blame(ExitStatus::Signal(9), true, 1, 2));
        assert!(!is_to_blame(ExitStatus::Code(1), false, 1, 2));
    }
}
