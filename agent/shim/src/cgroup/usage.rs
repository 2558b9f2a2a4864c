//! What the processes of a job use together, as the kernel counts it for their groups. Only reads; what a group does
//! not count is `None`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::Groups;
use super::places::choose;
use crate::process::of_container;
use crate::record::CgroupRequest;

/// What the processes in the groups of a job use, and have used, together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GroupUsage {
    /// Time of processors so far.
    pub cpu: Option<Duration>,
    /// Memory now, in bytes, without files in memory that were not used lately (as Kubernetes counts it).
    pub memory: Option<u64>,
    /// The most memory at a time so far, in bytes, with all files in memory.
    pub peak: Option<u64>,
    /// How much memory it may have, in bytes; `None` too where that is not limited.
    pub limit: Option<u64>,
    /// Bytes read from disks so far.
    pub read: Option<u64>,
    /// Bytes written to disks so far.
    pub written: Option<u64>,
    /// Processes and threads now.
    pub tasks: Option<u64>,
}

/// A limit in bytes above this is none: version 1 shows the largest number that it has.
const UNLIMITED: u64 = 1 << 60;

impl Groups {
    /// The groups of a container, seen from outside, by those of one of its processes; none when it has ended.
    pub fn of_running_container(id: &str) -> Groups {
        let Some(first) = of_container(id).into_iter().next() else { return Groups::default() };
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let request = CgroupRequest::default();
        let places =
            choose(&read(&format!("/proc/{}/cgroup", first.pid)), &read("/proc/self/mountinfo"), &request);
        let dirs = places.into_iter().map(|place| place.parent);
        Groups::new(dirs.filter(|dir| dir.to_string_lossy().contains(id)).collect())
    }

    /// What they use.
    pub fn usage(&self) -> GroupUsage {
        let one = |files: &[&str]| files.iter().find_map(|file| number(&self.with(file)?.join(file)));
        let cpu = self.with("cpu.stat").and_then(|dir| counter(&dir.join("cpu.stat"), "usage_usec"));
        let memory = one(&["memory.current", "memory.usage_in_bytes"]).map(|all| {
            let unused = self.with("memory.stat").and_then(|dir| {
                let file = dir.join("memory.stat");
                counter(&file, "total_inactive_file").or_else(|| counter(&file, "inactive_file"))
            });
            all.saturating_sub(unused.unwrap_or(0))
        });
        let disk = self.with("io.stat").map(|dir| dir.join("io.stat"));
        let disk = disk.and_then(|file| fs::read_to_string(file).ok());
        let bytes = |key: &str| disk.as_deref().map(|text| sum(text, key));
        GroupUsage {
            cpu: cpu.map(Duration::from_micros),
            memory,
            peak: one(&["memory.peak", "memory.max_usage_in_bytes"]),
            limit: one(&["memory.max", "memory.limit_in_bytes"]).filter(|limit| *limit < UNLIMITED),
            read: bytes("rbytes="),
            written: bytes("wbytes="),
            tasks: one(&["pids.current"]),
        }
    }
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// A number from a file that has a name and a number in each line.
pub fn counter(file: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The sum over the devices, each of which has a line such as `8:0 rbytes=1 wbytes=2`.
fn sum(text: &str, key: &str) -> u64 {
    text.split_whitespace().filter_map(|word| word.strip_prefix(key)?.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn group(at: &Path, files: &[(&str, &str)]) -> PathBuf {
        fs::create_dir_all(at).unwrap();
        files.iter().for_each(|(name, text)| fs::write(at.join(name), text).unwrap());
        at.to_owned()
    }

    #[test]
    fn test_usage_of_version_2() {
        let root = tempfile::tempdir().unwrap();
        let files = [
            ("cpu.stat", "usage_usec 2500000\nuser_usec 2000000\n"),
            ("memory.current", "1000\n"),
            ("memory.stat", "anon 600\ninactive_file 300\nworkingset_refault_file 9\n"),
            ("memory.peak", "1200\n"),
            ("memory.max", "max\n"),
            ("io.stat", "8:0 rbytes=10 wbytes=20 rios=1\n8:16 rbytes=1 wbytes=2 rios=1\n"),
            ("pids.current", "3\n"),
        ];
        let groups = Groups::new(vec![group(&root.path().join("agentd-j"), &files)]);
        let expected = GroupUsage {
            cpu: Some(Duration::from_millis(2500)),
            memory: Some(700),
            peak: Some(1200),
            limit: None,
            read: Some(11),
            written: Some(22),
            tasks: Some(3),
        };
        assert_eq!(groups.usage(), expected);
    }

    #[test]
    fn test_usage_of_version_1_beside_the_unified_hierarchy_and_of_none() {
        let root = tempfile::tempdir().unwrap();
        let unified = group(&root.path().join("unified/agentd-j"), &[("cpu.stat", "usage_usec 7\n")]);
        let files = [
            ("memory.usage_in_bytes", "500"),
            ("memory.stat", "cache 1\ninactive_file 400\ntotal_inactive_file 100\n"),
            ("memory.max_usage_in_bytes", "800"),
            ("memory.limit_in_bytes", "9223372036854771712"),
        ];
        let memory = group(&root.path().join("memory/agentd-j"), &files);
        let usage = Groups::new(vec![unified, memory]).usage();
        let expected = GroupUsage {
            cpu: Some(Duration::from_micros(7)),
            memory: Some(400),
            peak: Some(800),
            ..GroupUsage::default()
        };
        assert_eq!(usage, expected);
        assert_eq!(Groups::default().usage(), GroupUsage::default(), "nothing is known, and nothing is 0");
    }
}
