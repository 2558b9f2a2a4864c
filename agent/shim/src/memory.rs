//! Whether the kernel ended processes of the job for want of memory, and whose memory it was.
//!
//! The kernel counts the processes it ended in each memory group, whichever limit was met. So the count of the
//! job's own group shows exactly *that* it was memory; *whose* is known from the group whose limit was met:
//! version 2 counts that too, version 1 sends a notice to a group when its limit is met or one above it. If no
//! group's limit was met, it was the machine's memory.
//!
//! Without a group of the job's own, the counts of the group it shares with others, or of the machine, are
//! evidence only together with an end that looks like such a kill.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use agent_model::ExitStatus;
use agent_shim::OomScope;
use agent_shim::cgroup::{GroupPlace, Groups, counter};
use agent_shim::kills;
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Watches the memory of one job, from before it starts.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The job's own group.
    own: Option<PathBuf>,
    /// The group around it, which others share.
    around: Option<PathBuf>,
    notices: Option<Notices>,
    before: Counts,
}

/// Version 1: counts each time the limit of the group, or one above it, was met.
#[derive(Debug)]
struct Notices {
    own: Option<EventFd>,
    around: EventFd,
}

/// What has been counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    /// Kills in the job's group, or else in the group around it, or else on the machine.
    kills: u64,
    /// Times the job's own limit was met.
    own: u64,
    /// Times a limit above it was met.
    above: u64,
}

/// What is known when the job has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Evidence {
    /// Processes the kernel ended for want of memory.
    kills: u64,
    /// All of them were the job's.
    exact: bool,
    scope: OomScope,
}

impl Memory {
    /// Watches the job's `groups`, which are still empty, or the groups in which they would have been made.
    pub(crate) fn watch(groups: &Groups, places: &[GroupPlace]) -> Memory {
        let files = ["memory.events", "memory.oom_control"];
        let own = files.iter().find_map(|file| groups.with(file)).map(Path::to_owned);
        let counts = |dir: &&PathBuf| files.iter().any(|file| dir.join(file).exists());
        let around = match &own {
            Some(own) => own.parent().map(Path::to_owned),
            None => places.iter().map(|place| &place.parent).find(counts).cloned(),
        };
        let notices = around.as_deref().and_then(|around| Notices::ask(own.as_deref(), around));
        let mut memory = Memory { own, around, notices, before: Counts::default() };
        memory.before = memory.counts();
        memory
    }

    /// Watches the container this process is in, whose memory is the job's.
    pub(crate) fn of_container(groups: &Groups) -> Memory {
        let own = ["memory.events", "memory.oom_control"].iter().find_map(|file| groups.with(file));
        let mut memory =
            Memory { own: own.map(Path::to_owned), around: None, notices: None, before: Counts::default() };
        memory.before = memory.counts();
        memory
    }

    /// What has happened since.
    pub(crate) fn evidence(&self) -> Evidence {
        let now = self.counts();
        let kills = now.kills.saturating_sub(self.before.kills);
        let scope = scope(now.own > self.before.own, now.above > self.before.above);
        Evidence { kills, exact: self.own.is_some(), scope }
    }

    /// The most memory the job used at a time, in bytes.
    pub(crate) fn peak(&self) -> Option<u64> {
        let own = self.own.as_deref()?;
        number(&own.join("memory.peak")).or_else(|| number(&own.join("memory.max_usage_in_bytes")))
    }

    fn counts(&self) -> Counts {
        let around = self.around.as_deref();
        let of_group = self.own.as_deref().or(around).and_then(kills::in_group);
        let kills = of_group.or_else(kills::on_machine).unwrap_or(0);
        if let Some(notices) = &self.notices {
            let (all, above) = notices.counts();
            return Counts { kills, own: all.saturating_sub(above), above };
        }
        let met = |dir: &Path| counter(&dir.join("memory.events.local"), "oom");
        let own = self
            .own
            .as_deref()
            .and_then(|own| counter(&own.join("memory.events"), "oom").or_else(|| times_met(own)));
        let above = around.into_iter().flat_map(Path::ancestors).map_while(met).sum();
        Counts { kills, own: own.unwrap_or(0), above }
    }
}

/// A group gets a notice for its own limit and for those above it.
fn scope(own: bool, above: bool) -> OomScope {
    match (own, above) {
        (true, _) => OomScope::Own,
        (false, true) => OomScope::Parent,
        (false, false) => OomScope::Host,
    }
}

/// Version 1 without notices: whether the limit of a group was met, which its peak usage shows. Not every kernel
/// counts how often.
fn times_met(group: &Path) -> Option<u64> {
    const NEAR: u64 = 1 << 20; // the kernel charges some pages at a time
    let limits = ["memory.memsw.limit_in_bytes", "memory.limit_in_bytes"];
    let limit = limits.iter().filter_map(|file| number(&group.join(file))).min()?;
    let most = number(&group.join("memory.max_usage_in_bytes"))?;
    Some(u64::from(most.saturating_add(NEAR) >= limit))
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

impl Notices {
    fn ask(own: Option<&Path>, around: &Path) -> Option<Notices> {
        let own = match own {
            Some(own) => Some(notice_of(own)?),
            None => None,
        };
        Some(Notices { own, around: notice_of(around)? })
    }

    /// The number of all notices to the job, and of those for a limit above its own. Reading a descriptor
    /// resets it, so the number is written back.
    fn counts(&self) -> (u64, u64) {
        let count = |notice: &EventFd| {
            let count = notice.read().unwrap_or(0);
            if count > 0 {
                let _ = notice.write(count); // it had room for it
            }
            count
        };
        let above = count(&self.around);
        (self.own.as_ref().map_or(above, count), above)
    }
}

fn notice_of(group: &Path) -> Option<EventFd> {
    let control = File::open(group.join("memory.oom_control")).ok()?;
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let notice = EventFd::from_value_and_flags(0, flags).ok()?;
    let request = format!("{} {}", notice.as_raw_fd(), control.as_raw_fd());
    let mut events = File::options().write(true).open(group.join("cgroup.event_control")).ok()?;
    std::io::Write::write_all(&mut events, request.as_bytes()).ok()?;
    Some(notice)
}

impl Evidence {
    /// Whose memory ran out, if that ended the job: it failed, was not killed here, and the kernel ended a
    /// process of it. Where that process may have been another's, the exit status must look like such a kill,
    /// directly or as a shell reports it of its child.
    pub(crate) fn blames(self, status: ExitStatus, killed_here: bool) -> Option<OomScope> {
        let looks_like_it = status.shell_code() == 137;
        let failed = if self.exact { !status.is_success() } else { looks_like_it };
        (self.kills > 0 && failed && !killed_here).then_some(self.scope)
    }

    /// How many processes of the job the kernel ended, as far as they were surely the job's.
    pub(crate) fn kills(self) -> u64 {
        if self.exact { self.kills } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_memory_is_blamed_only_for_a_kill_of_nobody_else() {
        use ExitStatus::{Code, Signal};
        let own = Some(OomScope::Own);
        for (kills, exact, status, killed_here, blamed) in [
            (1, true, Signal(9), false, own),
            (1, true, Code(137), false, own),
            (1, true, Code(1), false, own),
            (1, true, Code(0), false, None),
            (1, true, Signal(9), true, None),
            (0, true, Signal(9), false, None),
            (0, true, Code(137), false, None),
            (1, false, Signal(9), false, own),
            (1, false, Code(137), false, own),
            (1, false, Code(1), false, None),
            (0, false, Signal(9), false, None),
            (1, false, Signal(9), true, None),
        ] {
            let evidence = Evidence { kills, exact, scope: OomScope::Own };
            assert_eq!(evidence.blames(status, killed_here), blamed, "{evidence:?} {status:?}");
        }
    }

    #[test]
    fn test_limit_that_was_met_says_whose_memory_it_was() {
        assert_eq!(scope(true, false), OomScope::Own);
        assert_eq!(scope(true, true), OomScope::Own);
        assert_eq!(scope(false, true), OomScope::Parent);
        assert_eq!(scope(false, false), OomScope::Host);
    }

    #[test]
    fn test_counts_of_version_2_are_read_from_the_group_and_those_above() {
        let root = tempfile::tempdir().unwrap();
        let slice = root.path().join("slice");
        let group = slice.join("agentd-x");
        fs::create_dir_all(&group).unwrap();
        let write = |dir: &Path, oom: u64, kill: u64| {
            let text = format!("low 0\nhigh 0\nmax 7\noom {oom}\noom_kill {kill}\noom_group_kill 0\n");
            fs::write(dir.join("memory.events"), &text).unwrap();
            fs::write(dir.join("memory.events.local"), &text).unwrap();
        };
        write(&slice, 3, 3);
        write(&group, 0, 0);
        let memory = Memory::watch(&Groups::new(vec![group.clone()]), &[]);
        assert_eq!(memory.evidence(), Evidence { kills: 0, exact: true, scope: OomScope::Host });
        write(&group, 0, 1);
        assert_eq!(memory.evidence(), Evidence { kills: 1, exact: true, scope: OomScope::Host });
        write(&slice, 4, 4);
        assert_eq!(memory.evidence(), Evidence { kills: 1, exact: true, scope: OomScope::Parent });
        write(&group, 1, 1);
        assert_eq!(memory.evidence(), Evidence { kills: 1, exact: true, scope: OomScope::Own });
    }
}
