//! Processes as `/proc` shows them, and signals that never reach another process.
//!
//! A process number may be reused as soon as its process is reaped. So a process is always identified by its
//! number *and* its start time, and a signal is sent through a descriptor that was opened before the start time
//! was compared.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{Pid, getsid};

use crate::sys;

/// One process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// The number of its parent.
    pub parent: i32,
    /// When it started, in clock ticks since boot.
    pub started: u64,
}

impl Process {
    /// The process that has this number now, unless it is dead and only waits to be reaped.
    pub fn find(pid: i32) -> Option<Process> {
        parse_stat(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Sends it a signal. `false` when it is gone already.
    pub fn signal(&self, signal: Signal) -> io::Result<bool> {
        let descriptor = match sys::pidfd_open(self.pid) {
            Ok(descriptor) => descriptor,
            Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => return Ok(false),
            Err(error) => return Err(error),
        };
        if Process::find(self.pid).is_none_or(|now| now.started != self.started) {
            return Ok(false);
        }
        match sys::pidfd_send_signal(descriptor.as_fd(), signal) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Its current directory is this one.
    pub fn works_at(&self, dir: &Path) -> bool {
        let at = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
        let cwd = at(Path::new(&format!("/proc/{}/cwd", self.pid)));
        cwd.is_some() && cwd == at(dir)
    }

    fn has_mark(&self, name: &str, value: &str) -> bool {
        // Unreadable: another user's, or gone. Neither is ours.
        let environment = fs::read(format!("/proc/{}/environ", self.pid)).unwrap_or_default();
        environment
            .split(|byte| *byte == 0)
            .filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='))
            .any(|pair| pair == (name, value))
    }
}

/// Name and arguments may hold anything, so the fields are counted from the last parenthesis.
fn parse_stat(pid: i32, text: &str) -> Option<Process> {
    let (state, parent, started) = parse_fields(text)?;
    (!matches!(state, "Z" | "X")).then_some(Process { pid, parent, started })
}

/// Its state, its parent, and when it started.
fn parse_fields(text: &str) -> Option<(&str, i32, u64)> {
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace();
    Some((fields.next()?, fields.next()?.parse().ok()?, fields.nth(17)?.parse().ok()?))
}

/// The processor time that the processes of a group, and children they waited for, have used so far.
pub fn processor_time(group: i32) -> Duration {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let stats = entries.filter_map(|entry| {
        entry.file_name().to_str()?.parse::<i32>().ok()?;
        fs::read_to_string(entry.path().join("stat")).ok()
    });
    stats.filter_map(|stat| ticks_in(&stat, group)).sum::<u32>() * TICK
}

/// The kernel counts in these for programs, whatever it uses itself.
const TICK: Duration = Duration::from_millis(10);

/// Of one process, its children included, if it is of that group.
fn ticks_in(stat: &str, group: i32) -> Option<u32> {
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
    let ours = fields.nth(2)?.parse() == Ok(group);
    ours.then(|| fields.skip(8).take(4).filter_map(|ticks| ticks.parse::<u32>().ok()).sum())
}

/// Every process of the machine that is not dead, as far as it can be seen.
pub(crate) fn all() -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Process::find(entry.file_name().to_str()?.parse().ok()?)).collect()
}

/// Somebody stopped a process, or froze it with its control group: it does nothing until it is continued.
pub fn is_halted(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let is_stopped =
        stat.rsplit(')').next().is_some_and(|rest| matches!(rest.trim_start().get(..1), Some("T" | "t")));
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let unified = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    let frozen = |path: &str| {
        let events = fs::read_to_string(Path::new("/sys/fs/cgroup").join(path).join("cgroup.events"));
        events.is_ok_and(|events| events.lines().any(|line| line == "frozen 1"))
    };
    let v1 = freezer(pid).and_then(|state| fs::read_to_string(state).ok());
    is_stopped || unified.is_some_and(frozen) || v1.is_some_and(|state| state.trim() != "THAWED")
}

/// Thaws a process that is frozen with its control group. For version 1 alone, where not even the final signal takes
/// effect before.
pub fn thaw(pid: i32) {
    if let Some(state) = freezer(pid) {
        let _ = fs::write(state, "THAWED"); // not ours to write, or not frozen: the signal waits
    }
}

/// The state of the freezer (version 1) that a process is in; the root has none.
fn freezer(pid: i32) -> Option<PathBuf> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let path = groups.lines().find_map(|line| line.split_once(":freezer:/"))?.1;
    (!path.is_empty()).then(|| Path::new("/sys/fs/cgroup/freezer").join(path).join("freezer.state"))
}

/// The name of the program of a process; empty when there is no such process.
pub fn name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

/// Every visible process but this one.
pub fn others() -> Vec<Process> {
    let own = std::process::id() as i32;
    all().into_iter().filter(|process| process.pid != own).collect()
}

/// The processes of the container that its engine calls `id`, its first one among them, as seen from outside.
pub fn of_container(id: &str) -> Vec<Process> {
    const SHORTEST: usize = 32; // what is shorter could name something else
    let holds = |process: &Process| {
        let groups = fs::read_to_string(format!("/proc/{}/cgroup", process.pid)).unwrap_or_default();
        groups.contains(id)
    };
    if id.len() < SHORTEST { Vec::new() } else { all().into_iter().filter(holds).collect() }
}

/// The children of `root`, their children, and so on.
pub fn descendants(root: i32) -> Vec<Process> {
    below(&all(), HashSet::from([root]))
}

/// Kills the processes that this one has below it, until none is left. For a process that takes in its orphans.
pub(crate) fn end_descendants() {
    use nix::sys::wait::{WaitPidFlag, waitpid};
    let own = std::process::id() as i32;
    while waitpid(None, Some(WaitPidFlag::WNOHANG)) != Err(nix::errno::Errno::ECHILD) {
        for process in descendants(own) {
            let _ = process.signal(Signal::SIGKILL); // it is gone, or found again
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// The processes whose environment has `name=value`, and their descendants.
pub fn marked(name: &str, value: &str) -> Vec<Process> {
    let all = all();
    let mut found: Vec<Process> =
        all.iter().filter(|process| process.has_mark(name, value)).copied().collect();
    let roots: HashSet<i32> = found.iter().map(|process| process.pid).collect();
    found.extend(below(&all, roots));
    found
}

/// Makes this process the parent of the orphans of a supervisor that ends, or of a builder. For a process that starts
/// those, and nothing else that leaves its session.
pub fn take_in_orphans() -> io::Result<()> {
    Ok(nix::sys::prctl::set_child_subreaper(true)?)
}

/// The supervisors that this process started, each by its number and its start. Locked while one is being started, and
/// while orphans are looked for.
static SUPERVISORS: Mutex<Vec<(i32, u64)>> = Mutex::new(Vec::new());

/// Starts a supervisor, which leaves the session of this process, so that it is not taken for an orphan. `number`
/// is that of what `start` returns.
pub fn start_supervisor<C>(
    start: impl FnOnce() -> io::Result<C>,
    number: impl FnOnce(&C) -> Option<i32>,
) -> io::Result<C> {
    let mut known = SUPERVISORS.lock().unwrap_or_else(PoisonError::into_inner);
    let supervisor = start()?;
    known.retain(|(pid, started)| start_of(*pid) == Some(*started));
    known.extend(number(&supervisor).and_then(|pid| Some((pid, start_of(pid)?))));
    Ok(supervisor)
}

/// When a process started, also of one that has ended and was not reaped.
fn start_of(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse_fields(&stat).map(|(_, _, started)| started)
}

/// The children that this process did not start. No process can enter the session of another: a child that was
/// started here is in this session, unless it is a supervisor, which has left it. Reaps those that ended.
pub(crate) fn orphans() -> Vec<Process> {
    if !nix::sys::prctl::get_child_subreaper().unwrap_or(false) {
        return Vec::new();
    }
    let supervisors = SUPERVISORS.lock().unwrap_or_else(PoisonError::into_inner);
    let (own, session) = (std::process::id() as i32, getsid(None).ok());
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let mut found = Vec::new();
    for pid in numbers {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let Some((_, parent, started)) = parse_fields(&stat) else { continue };
        let is_foreign = || getsid(Some(Pid::from_raw(pid))).ok() != session;
        if parent != own || supervisors.contains(&(pid, started)) || !is_foreign() {
            continue;
        }
        match parse_stat(pid, &stat) {
            Some(process) => found.push(process),
            // It is gone otherwise.
            None => drop(waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG))),
        }
    }
    found
}

pub(crate) fn below(all: &[Process], mut roots: HashSet<i32>) -> Vec<Process> {
    let mut found = Vec::new();
    loop {
        let before = found.len();
        for process in all {
            if roots.contains(&process.parent) && roots.insert(process.pid) {
                found.push(*process);
            }
        }
        if found.len() == before {
            return found;
        }
    }
}

/// The identity of this boot of the machine; empty when unknown.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_stat_with_a_hostile_name() {
        let tail = "S 7 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        let process = parse_stat(9, &format!("9 (a) Z 1 (b) {tail}")).unwrap();
        assert_eq!(process, Process { pid: 9, parent: 7, started: 4242 });
        assert!(parse_stat(9, &format!("9 (x) {}", tail.replacen('S', "Z", 1))).is_none());
        assert!(parse_stat(9, "9 (x").is_none());
    }

    #[test]
    fn test_descendants_follow_parents_in_any_order() {
        let process = |pid, parent| Process { pid, parent, started: 0 };
        let all = [process(5, 4), process(4, 3), process(3, 1), process(6, 1)];
        let mut found: Vec<i32> = below(&all, HashSet::from([3])).iter().map(|p| p.pid).collect();
        found.sort_unstable();
        assert_eq!(found, [4, 5]);
    }

    #[test]
    fn test_signal_spares_a_process_that_took_the_number() {
        let me = Process::find(std::process::id() as i32).unwrap();
        let former = Process { started: me.started + 1, ..me };
        assert!(!former.signal(Signal::SIGKILL).unwrap());
        assert!(all().contains(&me));
    }
}
