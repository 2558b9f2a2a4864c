//! How many processes the kernel has ended for want of memory: in a control group, on the machine, and since a
//! moment.

use std::path::{Path, PathBuf};

use crate::cgroup::{GroupPlace, counter};
use crate::record::KillCount;

impl KillCount {
    /// For this process and those beside it, where a group of its `places` counts them; else for the whole machine.
    /// In version 2 only a group's own processes count, not those of groups in it: these are other jobs.
    pub fn beside(places: &[GroupPlace]) -> Option<KillCount> {
        let own = places.iter().flat_map(|place| [place.parent.join("shim"), place.parent.clone()]);
        let of_group = own.flat_map(|dir| [dir.join("memory.events.local"), dir.join("memory.oom_control")]);
        let mut files = of_group.chain([PathBuf::from(MACHINE)]);
        files.find_map(|file| counter(&file, NAME).map(|kills| KillCount { file, kills }))
    }

    /// How many there were since; none when the counter is gone.
    pub fn since(&self) -> u64 {
        counter(&self.file, NAME).map_or(0, |now| now.saturating_sub(self.kills))
    }
}

const NAME: &str = "oom_kill";
const MACHINE: &str = "/proc/vmstat";

/// In a group; of version 2 with the groups in it.
pub fn in_group(group: &Path) -> Option<u64> {
    ["memory.events", "memory.oom_control"].iter().find_map(|file| counter(&group.join(file), NAME))
}

/// On the whole machine.
pub fn on_machine() -> Option<u64> {
    counter(Path::new(MACHINE), NAME)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn test_kills_are_counted_since_and_only_beside() {
        let root = tempfile::tempdir().unwrap();
        let place = |v2| GroupPlace { parent: root.path().to_owned(), v2, scope: false };
        let write = |file: &str, kills: u64| {
            fs::write(root.path().join(file), format!("oom 7\noom_kill {kills}\noom_group_kill 0\n"))
                .unwrap();
        };
        assert_eq!(KillCount::beside(&[place(true)]).map(|count| count.file), Some(PathBuf::from(MACHINE)));
        for (file, v2) in [("memory.oom_control", false), ("memory.events.local", true)] {
            write("memory.events", 90); // those of others in it
            write(file, 3);
            let before = KillCount::beside(&[place(v2)]).unwrap();
            assert_eq!((before.file.clone(), before.since()), (root.path().join(file), 0));
            write(file, 5);
            assert_eq!(before.since(), 2);
            fs::remove_file(root.path().join(file)).unwrap();
            assert_eq!(before.since(), 0, "nobody can say");
        }
    }
}
