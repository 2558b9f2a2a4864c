//! The groups of one job: their processes, how all of these are signalled, and the removal of the groups.

use std::collections::{BTreeSet, HashSet};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use agent_model::failpoint;
use nix::sys::signal::Signal;

use crate::process::{Process, all, below, marked, of_container, orphans, thaw};
use crate::record::Hello;
use crate::sys;

/// How long to wait for a group of version 1 to freeze before it is killed all the same.
const FREEZE: Duration = Duration::from_millis(50);

/// How long a group that lost its last process may take to be removable.
const SETTLE: Duration = Duration::from_secs(1);

/// The control groups of one job, one in each hierarchy. There may be none, which then have no processes.
#[derive(Debug, Clone, Default)]
pub struct Groups {
    dirs: Vec<PathBuf>,
    /// The last part of their paths, which names this run and no other.
    name: String,
}

impl Groups {
    /// The groups at `dirs`, all of one name.
    pub fn new(dirs: Vec<PathBuf>) -> Groups {
        let name = dirs.first().and_then(|dir| dir.file_name()?.to_str()).unwrap_or_default().to_owned();
        Groups { dirs, name }
    }

    /// The groups that a shim recorded; those without its name are not its own.
    pub fn of(hello: &Hello) -> Groups {
        let name = super::name_of(&hello.replica, &hello.instance);
        let is_its = |dir: &&PathBuf| dir.file_name().is_some_and(|last| last == name.as_str());
        Groups { dirs: hello.groups.iter().filter(is_its).cloned().collect(), name }
    }

    /// Their paths.
    pub fn dirs(&self) -> &[PathBuf] {
        &self.dirs
    }

    /// The group that has this file.
    pub fn with(&self, file: &str) -> Option<&Path> {
        self.dirs.iter().map(PathBuf::as_path).find(|dir| dir.join(file).exists())
    }

    /// Does something in the first group that can; an error if none can.
    pub(super) fn try_each(&self, mut what: impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
        let mut why = io::Error::other("no control group here can limit it");
        for dir in &self.dirs {
            match what(dir) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    /// The processes in them, and in groups that these have made below.
    pub fn members(&self) -> Vec<Process> {
        self.pids().into_iter().filter_map(Process::find).filter(|process| self.holds(process.pid)).collect()
    }

    /// No process is in them.
    pub fn is_empty(&self) -> bool {
        self.dirs.iter().all(|dir| match fs::read_to_string(dir.join("cgroup.events")) {
            Ok(events) => !events.lines().any(|line| line == "populated 1"),
            Err(_) => each(dir).iter().all(|dir| pids_in(dir).next().is_none()),
        })
    }

    /// Sends a signal to each process in them, and thaws them.
    pub fn signal(&self, signal: Signal) {
        for pid in self.pids() {
            // One that is gone, or not ours to signal, is counted later.
            let Ok(process) = sys::pidfd_open(pid) else { continue };
            // Checked after the descriptor was opened: a number that was reused is in no group of ours.
            if self.holds(pid) {
                let _ = sys::pidfd_send_signal(process.as_fd(), signal);
            }
        }
        self.thaw();
    }

    /// Kills all processes in them, at once where the kernel can, else while they are frozen, else one by one.
    /// To be repeated until they are empty.
    pub fn kill(&self) {
        if failpoint::hit("shim.cgroup.kill").is_err() {
            return;
        }
        let mut at_once = false;
        for dir in &self.dirs {
            at_once |= put(&dir.join("cgroup.kill"), "1").is_ok();
        }
        if !at_once {
            self.freeze();
        }
        self.signal(Signal::SIGKILL);
    }

    /// Removes them, with all groups below. `false` when one could not be removed.
    pub fn remove(&self) -> bool {
        if failpoint::hit("shim.cgroup.remove").is_err() {
            return false;
        }
        let deadline = Instant::now() + SETTLE;
        let gone = |dir: &PathBuf| match fs::remove_dir(dir) {
            Ok(()) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        loop {
            let mut all = true;
            for dir in &self.dirs {
                all &= each(dir).iter().rev().map(gone).fold(true, |all, one| all & one);
            }
            if all || Instant::now() >= deadline {
                return all;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn pids(&self) -> BTreeSet<i32> {
        self.dirs.iter().flat_map(|dir| each(dir)).flat_map(|dir| pids_in(&dir).collect::<Vec<_>>()).collect()
    }

    fn holds(&self, pid: i32) -> bool {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        !self.name.is_empty() && groups.split(['/', '\n']).any(|part| part == self.name)
    }

    fn freeze(&self) {
        let deadline = Instant::now() + FREEZE;
        for dir in &self.dirs {
            let state = dir.join("freezer.state");
            if put(&state, "FROZEN").is_err() {
                continue;
            }
            while Instant::now() < deadline
                && fs::read_to_string(&state).is_ok_and(|state| state.trim() == "FREEZING")
            {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Thaws them: a frozen process does not react to signals, and in version 1 does not even die.
    pub fn thaw(&self) {
        for dir in self.dirs.iter().flat_map(|dir| each(dir)) {
            let _ = put(&dir.join("freezer.state"), "THAWED");
            let _ = put(&dir.join("cgroup.freeze"), "0");
        }
    }
}

fn put(file: &Path, text: &str) -> io::Result<()> {
    File::options().write(true).open(file)?.write_all(text.as_bytes())
}

/// A group and all below it, each before those below it.
fn each(dir: &Path) -> Vec<PathBuf> {
    let mut all = vec![dir.to_owned()];
    let mut next = 0;
    while let Some(dir) = all.get(next) {
        let below = fs::read_dir(dir).into_iter().flatten().flatten();
        let below = below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let below: Vec<PathBuf> = below.map(|entry| entry.path()).collect();
        all.extend(below);
        next += 1;
    }
    all
}

/// Processes that a PID namespace hides are shown as 0, which is skipped.
fn pids_in(dir: &Path) -> impl Iterator<Item = i32> + use<> {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    let pids: Vec<i32> = text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0).collect();
    pids.into_iter()
}

/// How long no marked process must be seen before there is none: one that is being started has its mark
/// only once its program is executed.
const QUIET: Duration = Duration::from_millis(50);

/// Kills the processes that [`marked`] finds until none is left or the time is over. Returns how many there
/// were, and how many are still there.
pub fn kill_marked(name: &str, value: &str, within: Duration) -> (usize, usize) {
    kill_all(&Groups::default(), name, value, within)
}

/// As [`kill_marked`], and everybody else in the container that its engine calls `id`.
pub fn kill_container(id: &str, name: &str, value: &str, within: Duration) -> (usize, usize) {
    kill_found(&Groups::default(), name, value, within, || of_container(id))
}

/// As [`kill_marked`], and the processes in a group of the job, which may have removed the mark, or that this process
/// took in as orphans, which may have escaped both.
pub fn kill_all(groups: &Groups, name: &str, value: &str, within: Duration) -> (usize, usize) {
    kill_found(groups, name, value, within, || {
        let orphans = orphans();
        let roots: HashSet<i32> = orphans.iter().map(|orphan| orphan.pid).collect();
        let more = if roots.is_empty() { Vec::new() } else { below(&all(), roots) };
        [groups.members(), orphans, more].concat()
    })
}

fn kill_found(
    groups: &Groups,
    name: &str,
    value: &str,
    within: Duration,
    find: impl Fn() -> Vec<Process>,
) -> (usize, usize) {
    let deadline = Instant::now() + within;
    let mut seen = HashSet::new();
    let mut quiet_since = None;
    loop {
        let mut found = find();
        found.extend(marked(name, value));
        found.sort_unstable_by_key(|process| process.pid);
        found.dedup_by_key(|process| process.pid);
        let now = Instant::now();
        seen.extend(found.iter().map(|process| (process.pid, process.started)));
        if found.is_empty() {
            if now - *quiet_since.get_or_insert(now) >= QUIET {
                return (seen.len(), 0);
            }
        } else if now >= deadline {
            return (seen.len(), found.len());
        } else {
            quiet_since = None;
        }
        groups.kill();
        for process in &found {
            let _ = process.signal(Signal::SIGKILL); // what cannot be signalled is found again
            thaw(process.pid);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
