//! Group C, the rows about the machine: what the daemon holds, what it shares, and what it bears.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use agent_model::JobDraft;
use agent_tests::bounds::{Group, SmallDisk};
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::{SOON, eventually, resident, signal, within};
use rustix::process::Signal;

use crate::look::{PYTHON, broken_databases, descriptors, files_below, panics};
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this part of the group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "C2", promise: "want of memory is called so, and nothing else is", run: memory },
    Row { id: "C3", promise: "the daemon outlives a machine that a job has used up", run: pressure },
    Row { id: "C9", promise: "what jobs took is given back, down to the last descriptor", run: leaks },
    Row { id: "C11", promise: "a state directory has one daemon at a time", run: one_holder },
];

/// How memory runs out, or does not, and what the job must be said to have come to.
const MEMORY: &[(&str, &str, &str, &str)] = &[
    ("the command is ended by the kernel", "exec FIX --allocate 200 --seconds 1", "Failed", "RUN-104"),
    ("a child is, and the command gives up", "FIX --allocate 200 --seconds 1; exit 1", "Failed", "RUN-104"),
    ("a child is, and the command goes on", "FIX --allocate 200 --seconds 1; exit 0", "Completed", "RUN-104"),
    ("somebody kills the command", "kill -9 $$", "Failed", "RUN-103"),
    ("the command returns 137 by itself", "exit 137", "Failed", "RUN-101"),
    ("the command just fails", "exit 3", "Failed", "RUN-101"),
    ("it stays within its limit", "FIX --allocate 20 --seconds 0.2", "Completed", ""),
];

fn memory(tally: &mut Tally, scale: &Scale) {
    let fleet = Fleet::started(&Setup { slots: 7, ..Setup::default() });
    let fix = agent_tests::binaries().join("fix").display().to_string();
    for _ in 0..scale.of(1, 10) {
        let jobs: Vec<String> = MEMORY
            .iter()
            .map(|(_, command, _, _)| {
                let mut draft = JobDraft { command: command.replace("FIX", &fix), ..JobDraft::default() };
                draft.resources.memory = 100 << 20;
                fleet.client.submit(&draft)
            })
            .collect();
        for ((name, _, state, code), job) in MEMORY.iter().zip(jobs) {
            tally.case(name, || {
                let ended = fleet.client.ended(&job);
                let fault = ended.outcome.clone().and_then(|outcome| outcome.fault);
                let said = fault.map(|fault| fault.code).unwrap_or_default();
                assert_eq!((ended.state.as_str(), said.as_str()), (*state, *code), "{:?}", ended.outcome);
            });
        }
    }
}

/// What a node was like while something pressed on it.
fn watch(fleet: &Fleet, time: Duration) -> (Duration, u32, u32) {
    let (mut slowest, mut asked, mut unready) = (Duration::ZERO, 0, 0);
    let begun = Instant::now();
    while begun.elapsed() < time {
        let asking = Instant::now();
        let nodes = fleet.client.nodes();
        slowest = slowest.max(asking.elapsed());
        asked += 1;
        let ready = nodes
            .is_ok_and(|nodes| nodes.iter().all(|n| matches!(n.liveness.as_str(), "ready" | "degraded")));
        unready += u32::from(!ready);
        std::thread::sleep(Duration::from_millis(100));
    }
    (slowest, asked, unready)
}

/// Takes all there is of something, again and again, until it is killed.
const TAKE: &[(&str, &str)] = &[
    (
        "processes",
        "import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except OSError:
        print('all taken', flush=True)
        time.sleep(1)",
    ),
    (
        "descriptors",
        "import time
held = []
while True:
    try:
        held.append(open('/dev/null'))
    except OSError:
        break
print('all taken', flush=True)
time.sleep(1000)",
    ),
    (
        "inodes",
        "import time
number = 0
while True:
    try:
        open(f'f{number}', 'x').close()
        number += 1
    except OSError:
        print('all taken', flush=True)
        time.sleep(0.2)",
    ),
    (
        "memory",
        "import os, time
while True:
    pid = os.fork()
    if pid == 0:
        held = []
        while True:
            held.append(bytearray(8 << 20))
    if os.waitpid(pid, 0)[1] == 9:
        print('all taken', flush=True)",
    ),
];

fn pressure(tally: &mut Tally, scale: &Scale) {
    let mut slowest = Duration::ZERO;
    for (what, script) in TAKE {
        let limit = match *what {
            "processes" => Group::new("pids", ("pids.max", "250")),
            "memory" => Group::new("memory", ("memory.limit_in_bytes", "400M")),
            _ => None,
        };
        if limit.is_none() && matches!(*what, "processes" | "memory") {
            tally.note(format!("{what}: not tried, this machine has no such control group"));
            continue;
        }
        tally.case(&format!("a job takes all {what}"), || {
            let small = (*what == "inodes").then(|| SmallDisk::mount("size=256m,nr_inodes=3000"));
            let mut fleet = Fleet::new(&Setup::default());
            if let Some(small) = &small {
                small.hold(&fleet.controller);
            }
            fleet.start();
            if let Some(limit) = &limit {
                limit.take(fleet.controller.pid());
            }
            let pid = fleet.controller.pid();
            let command = format!("exec {PYTHON} -c \"$SCRIPT\"");
            let mut draft = JobDraft { command, ..JobDraft::default() };
            draft.environment_variables.insert("SCRIPT".into(), (*script).into());
            draft.limits.grace = Some(Duration::ZERO);
            let job = fleet.client.submit(&draft);
            // Not by its log, which needs an inode where it is stored.
            eventually("it has taken everything", SOON, || {
                let logs =
                    fleet.controller.job_dirs().into_iter().flat_map(|dir| files_below(&dir.join("log")));
                let said = logs.filter_map(|log| fs::read(log).ok()).any(|log| log.starts_with(b"all taken"));
                said.then_some(())
            });
            let (slow, asked, unready) = watch(&fleet, Duration::from_secs(scale.of(3, 120)));
            slowest = slowest.max(slow);
            assert_eq!(unready, 0, "of {asked} questions, so many were answered badly");
            fleet.client.cancel(&job).expect("an answer");
            assert_eq!(fleet.client.ended(&job).state, "Canceled");
            assert!(fleet.controller.ended().is_none() && fleet.controller.pid() == pid, "the daemon ended");
            let next = fleet.client.run("echo next");
            assert_eq!(fleet.client.ended(&next).state, "Completed", "{:?}", fleet.client.job(&next));
            assert_eq!(panics(&fleet.controller), Vec::<String>::new());
            fleet.controller.kill();
            assert_eq!(broken_databases(&fleet.controller.state()), Vec::<String>::new());
        });
    }
    tally.note(format!("slowest answer meanwhile: {:.2} s", slowest.as_secs_f64()));
}

/// So many logs the controller keeps open at most, and one more is too many.
const OPEN_LOGS: usize = 65;

/// What must be the same before and after many jobs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd)]
struct Held {
    descriptors: usize,
    /// Open logs of the archive, in units of as many as there may be.
    archived: usize,
    threads: usize,
    mounts: usize,
    groups: Vec<PathBuf>,
    job_directories: usize,
    temporary: Vec<PathBuf>,
    processes: usize,
}

/// The runtime keeps as many threads for blocking work as had some at one time of late; jobs that leaked one each
/// would have leaked many more.
const POOL: usize = 4;

impl Held {
    fn now(fleet: &Fleet) -> Held {
        let daemon = &fleet.controller;
        // The controller keeps the last logs it wrote open, up to a number.
        let (archived, descriptors): (Vec<PathBuf>, Vec<PathBuf>) = descriptors(daemon.pid())
            .into_iter()
            .partition(|path| path.starts_with(daemon.state().join("controller/archive")));
        let threads = fs::read_dir(format!("/proc/{}/task", daemon.pid())).map_or(0, Iterator::count);
        let mounts = fs::read_to_string(format!("/proc/{}/mounts", daemon.pid())).unwrap_or_default();
        let (state, home) = (daemon.state(), fleet.home().display().to_string());
        let is_temporary = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.contains("tmp") || path.parent().is_some_and(|dir| dir.ends_with("tmp"))
        };
        let jobs = fleet.client.jobs(false).unwrap_or_default();
        let names: BTreeSet<String> = jobs.into_iter().map(|job| job.job).collect();
        Held {
            descriptors: descriptors.len(),
            archived: archived.len() / OPEN_LOGS,
            threads,
            mounts: mounts.lines().filter(|line| line.contains(&home)).count(),
            groups: groups_of(Path::new("/sys/fs/cgroup"), &names),
            job_directories: daemon.job_dirs().len(),
            temporary: files_below(&state).into_iter().filter(is_temporary).collect(),
            processes: daemon.processes().len(),
        }
    }

    fn is_no_more_than(&self, before: &Held) -> bool {
        self.descriptors <= before.descriptors
            && self.archived == 0
            && self.threads <= before.threads + POOL
            && self.mounts <= before.mounts
            && self.groups.len() <= before.groups.len()
            && self.job_directories <= before.job_directories
            && self.temporary.len() <= before.temporary.len()
            && self.processes <= before.processes
    }
}

/// The control groups whose name tells of one of these jobs.
fn groups_of(dir: &Path, jobs: &BTreeSet<String>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if !path.is_dir() || path.is_symlink() {
            continue;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if jobs.iter().any(|job| name.contains(job.as_str())) {
            found.push(path.clone());
        }
        found.extend(groups_of(&path, jobs));
    }
    found
}

/// Jobs of all kinds, so many.
fn churn(fleet: &Fleet, jobs: usize) {
    let kinds = [
        "echo fine; printf x > outputs/x",
        "exit 3",
        "sleep 1000",
        "echo '{\"metric\": \"m\", \"value\": 1}' >> $AGENTD_METRICS",
        "(sleep 1000 & ) ; echo left one behind",
        "kill -9 $$",
    ];
    for first in (0..jobs).step_by(24) {
        let draft = |number: usize| {
            let mut draft = JobDraft { command: kinds[number % kinds.len()].into(), ..JobDraft::default() };
            draft.limits.grace = Some(Duration::ZERO);
            draft
        };
        let batch: Vec<(usize, String)> = (first..jobs.min(first + 24))
            .map(|number| (number, fleet.client.submit(&draft(number))))
            .collect();
        for (number, job) in batch {
            if kinds[number % kinds.len()].starts_with("sleep") {
                let _ = fleet.client.cancel(&job);
            }
            fleet.client.ended(&job);
        }
    }
}

fn leaks(tally: &mut Tally, scale: &Scale) {
    let fleet = Fleet::started(&Setup { controller: "keep_jobs: 0s\n".into(), ..Setup::default() });
    let pid = fleet.controller.pid();
    churn(&fleet, 24); // what is made once and kept is made now
    let settled = |before: &Held| {
        let no_more = || Some(Held::now(&fleet)).filter(|now| now.is_no_more_than(before));
        within(SOON, no_more).unwrap_or_else(|| Held::now(&fleet))
    };
    std::thread::sleep(Duration::from_secs(2));
    let (before, memory) = (Held::now(&fleet), resident(pid));
    let jobs = scale.of(72, 300);
    churn(&fleet, jobs);
    let after = settled(&before);
    let grown = resident(pid).saturating_sub(memory);
    tally.case("everything is given back", || {
        assert!(after.is_no_more_than(&before), "before:\n{before:#?}\nafter {jobs} jobs:\n{after:#?}");
    });
    tally.case("memory does not grow", || {
        assert!(grown <= 5 << 20, "{} KiB more after {jobs} jobs", grown >> 10);
    });
    tally.note(format!(
        "after {jobs} jobs: {} descriptors, {} threads, {} processes, {} KiB more memory",
        after.descriptors,
        after.threads,
        after.processes,
        grown >> 10
    ));
}

/// So many daemons on one state directory, and the one that has it is killed while the others try.
fn one_holder(tally: &mut Tally, scale: &Scale) {
    const DAEMONS: usize = 20;
    let mut fleet = Fleet::new(&Setup::default());
    let (mut taken, mut most) = (Vec::new(), 0);
    for round in 0..scale.of(4, 50) {
        // Each command writes the configuration, so none is started before all are made.
        let commands: Vec<_> = (0..DAEMONS).map(|_| fleet.controller.command()).collect();
        let mut daemons: Vec<Child> =
            commands.into_iter().map(|mut command| command.spawn().expect("agentd starts")).collect();
        tally.case(&format!("round {round}"), || {
            // The first that has it is killed while the others still try.
            let first = eventually("one of them has it", SOON, || {
                most = most.max(holders(&fleet, &daemons).len());
                holders(&fleet, &daemons).first().copied()
            });
            signal(first, Signal::KILL);
            let (mut over, begun) = (vec![None; DAEMONS], Instant::now());
            while over.iter().filter(|status| status.is_none()).count() > 1 {
                assert!(begun.elapsed() < SOON, "more than one daemon goes on: {over:?}");
                most = most.max(holders(&fleet, &daemons).len());
                for (daemon, over) in daemons.iter_mut().zip(&mut over) {
                    *over = daemon.try_wait().expect("its own child");
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let codes: Vec<Option<i32>> = over.iter().flatten().map(ExitStatus::code).collect();
            let in_use = codes.iter().filter(|code| **code == Some(75)).count();
            // One was killed; the others say that the directory is in use.
            assert_eq!(in_use, codes.len() - 1, "{codes:?}");
            if over.iter().any(Option::is_none) {
                taken.push(fleet.client.run(&format!("echo {round}")));
            }
        });
        for daemon in &mut daemons {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
    tally.case("at most one daemon at a time", || assert_eq!(most, 1));
    tally.case("what was taken is still there and ends well", || {
        assert_eq!(broken_databases(&fleet.controller.state()), Vec::<String>::new());
        fleet.start();
        taken.iter().for_each(|job| assert_eq!(fleet.client.ended(job).state, "Completed"));
        let files = files_below(&fleet.controller.state());
        let damaged: Vec<_> =
            files.iter().filter(|file| file.to_string_lossy().contains(".damaged-")).collect();
        assert!(damaged.is_empty(), "{damaged:?}");
        assert!(fleet.controller.stop().success());
    });
    tally.note(format!("jobs taken in between: {}", taken.len()));
}

/// Those that have opened the journal.
fn holders(fleet: &Fleet, daemons: &[Child]) -> Vec<u32> {
    let journal = fleet.controller.state().join("journal.db");
    let holds = |pid: &u32| descriptors(*pid).contains(&journal);
    daemons.iter().map(Child::id).filter(holds).collect()
}
