//! Group C, the rows about process trees: all of a job dies, in time, and nobody else does.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use agent_model::JobDraft;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::{SOON, eventually, signal};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::faults::look::{PYTHON, command, lives, living_below, state_and_start};
use agent_tests::queue::said;
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this part of the group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "C1", promise: "of a job that ended no process is left, whatever it started", run: trees },
    Row {
        id: "C4",
        promise: "no process is signalled that only has the number of one of a job",
        run: numbers,
    },
    Row { id: "C5", promise: "a job has its grace, all of it and no more", run: grace },
];

const SCRIPT: &str = include_str!("nasty.py");

const KINDS: &[&str] = &[
    "plain",
    "inherited",
    "daemon",
    "stopped",
    "traced",
    "pid-namespace",
    "user-namespace",
    "cleared",
    "deep",
    "threads",
    "on-term",
    "guards",
    "reaper",
    "named",
    "nobody",
    "escaped",
    "rolling",
    "bomb",
];

/// How a tree is brought to its end, and the state its job must be in then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Cancel,
    /// The main process leaves by itself.
    Leave,
    TimeLimit,
    /// Its supervisor is killed.
    Orphan,
}

impl End {
    fn state(self) -> &'static str {
        match self {
            End::Cancel => "Canceled",
            End::Leave => "Completed",
            End::TimeLimit | End::Orphan => "Failed",
        }
    }
}

/// Submits `case` to so many threads at a time and gives what came of each.
pub(crate) fn at_once<C: Send, T: Send>(
    threads: usize,
    cases: Vec<C>,
    run: impl Fn(&C) -> T + Sync,
) -> Vec<(C, Result<T, String>)> {
    let (cases, done) = (Mutex::new(cases), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some(case) = cases.lock().expect("nobody panics here").pop() else { return };
                    let came = catch_unwind(AssertUnwindSafe(|| run(&case))).map_err(|panic| said(&*panic));
                    done.lock().expect("nobody panics here").push((case, came));
                }
            });
        }
    });
    done.into_inner().expect("nobody panics here")
}

fn trees(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    let mut cases: Vec<(&str, End)> = KINDS.iter().map(|kind| (*kind, End::Cancel)).collect();
    let others =
        KINDS.iter().flat_map(|kind| [End::Leave, End::Orphan, End::TimeLimit].map(|end| (*kind, end)));
    let mut others: Vec<(&str, End)> = others.collect();
    while others.len() > scale.of(31, usize::MAX) {
        others.remove(usize::try_from(chance.below(others.len() as u64)).unwrap_or(0));
    }
    cases.extend(others);
    cases.push(("cleared", End::Orphan)); // the hardest to find: no mark, no parent, no directory
    let rounds = scale.of(1, 3);
    let cases: Vec<(&str, End)> = (0..rounds).flat_map(|_| cases.clone()).collect();

    let fleet = Fleet::started(&Setup { slots: 8, ..Setup::default() });
    let numbered: Vec<(usize, (&str, End))> = cases.into_iter().enumerate().collect();
    let frozen = std::thread::scope(|scope| {
        let frozen = scope.spawn(|| catch_unwind(AssertUnwindSafe(|| frozen(&fleet))));
        let done = at_once(6, numbered, |(number, (kind, end))| tree(&fleet, *number, kind, *end));
        let mut slowest = Duration::ZERO;
        for ((_, (kind, end)), came) in done {
            let took = tally.case(&format!("{kind}, {end:?}"), || came.unwrap_or_else(|why| panic!("{why}")));
            slowest = slowest.max(took.unwrap_or_default());
        }
        tally.note(format!("slowest end after the order, with 1 s of grace: {:.1} s", slowest.as_secs_f64()));
        frozen.join()
    });
    tally.case("inside a file system that never answers", || {
        let said = frozen.expect("a thread").unwrap_or_else(|panic| panic!("{}", said(&*panic)));
        assert!(said.contains("process"), "what cannot be killed is not told of:\n{said}");
    });
}

/// One tree from its birth to its end; how long the end took.
fn tree(fleet: &Fleet, number: usize, kind: &str, end: End) -> Duration {
    let dir = fleet.home().join(format!("tree-{number}"));
    let witness = dir.join("w");
    fs::create_dir_all(&witness).expect("a directory");
    fs::set_permissions(&witness, fs::Permissions::from_mode(0o777)).expect("a mode");
    fs::write(dir.join("nasty.py"), SCRIPT).expect("a script");
    let group = format!("faults-{}-{number}", std::process::id());
    let mut draft = JobDraft {
        command: format!("exec {PYTHON} {} {kind}", dir.join("nasty.py").display()),
        ..JobDraft::default()
    };
    draft.limits.grace = Some(Duration::from_secs(1));
    draft.limits.timeout = (end == End::TimeLimit).then(|| Duration::from_secs(4));
    let mut set = |name: &str, value: &str| draft.environment_variables.insert(name.into(), value.into());
    set("WITNESS", &witness.display().to_string());
    set("GROUP", &group);
    set("LEAVE", if end == End::Leave { "1" } else { "" });
    let job = fleet.client.submit(&draft);
    let came = catch_unwind(AssertUnwindSafe(|| end_tree(fleet, &job, &dir, end)));
    // Whatever the product left: nothing of a case may disturb the next one.
    if kind == "rolling" {
        let numbers =
            witnessed(&witness).into_iter().filter_map(|(pid, _)| Pid::from_raw(i32::try_from(pid).ok()?));
        numbers.for_each(|pid| {
            let _ = kill_process_group(pid, Signal::KILL);
        });
    }
    for _ in 0..100 {
        let left = living_below(&dir);
        if left.is_empty() {
            break;
        }
        left.into_iter().for_each(|pid| signal(pid, Signal::KILL));
    }
    let _ = fs::remove_dir(Path::new("/sys/fs/cgroup/pids").join(&group));
    came.unwrap_or_else(|panic| panic!("{}", said(&*panic)))
}

fn end_tree(fleet: &Fleet, job: &str, dir: &Path, end: End) -> Duration {
    let log = || fleet.client.try_log(job, 0, "job").unwrap_or_default();
    eventually(&format!("{job} is up"), SOON, || log().starts_with(b"up\n").then_some(()));
    let begun = Instant::now();
    match end {
        End::Cancel => drop(fleet.client.cancel(job).expect("an answer")),
        End::Orphan => {
            let shims = fleet.controller.shims();
            let of =
                |dir: &PathBuf| dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with(job));
            let (_, pid) = shims.iter().find(|(dir, _)| of(dir)).expect("a running job has a shim");
            signal(*pid, Signal::KILL);
        }
        End::Leave | End::TimeLimit => {}
    }
    let ended =
        fleet.client.reached_within(Duration::from_secs(90), job, &["Completed", "Failed", "Canceled"]);
    let took = begun.elapsed();
    let left: Vec<u32> = witnessed(&dir.join("w"))
        .into_iter()
        .filter(|(pid, start)| {
            state_and_start(*pid).is_some_and(|(state, now)| now == *start && state != 'Z')
        })
        .map(|(pid, _)| pid)
        .chain(living_below(dir))
        .collect();
    assert!(left.is_empty(), "{} processes are left after {took:?}, for example {:?}", left.len(), left[0]);
    assert_eq!(ended.state, end.state(), "{ended:?}");
    took
}

/// Every process that must have been there, and when it started.
fn witnessed(dir: &Path) -> Vec<(u32, u64)> {
    let listed = fs::read_dir(dir).into_iter().flatten().flatten();
    let read = |entry: fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, fs::read_to_string(entry.path()).ok()?.trim().parse().ok()?))
    };
    listed.filter_map(read).collect()
}

/// A job with a process that the kernel does not let die; what is said about it in the end.
fn frozen(fleet: &Fleet) -> String {
    let mount = fleet.home().join("frozen");
    fs::create_dir_all(&mount).expect("a directory");
    let mut server = command(PYTHON)
        .arg("-c")
        .arg(include_str!("frozen.py"))
        .arg(&mount)
        .stdout(Stdio::piped())
        .spawn()
        .expect("Python starts");
    let command = format!("stat {} & echo up; wait", mount.join("x").display());
    let mut draft = JobDraft { command, ..JobDraft::default() };
    draft.limits.grace = Some(Duration::from_secs(1));
    let came = catch_unwind(AssertUnwindSafe(|| {
        let mut told = std::io::BufReader::new(server.stdout.take().expect("a pipe"));
        for _ in ["mounted", "ready"] {
            std::io::BufRead::read_line(&mut told, &mut String::new()).expect("the server speaks");
        }
        let job = fleet.client.submit(&draft);
        eventually("the job is stuck", SOON, || {
            let looks =
                |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c == "stat\n");
            living_below(&mount).iter().any(looks).then_some(())
        });
        std::thread::sleep(Duration::from_millis(300)); // it asks at once
        fleet.client.cancel(&job).expect("an answer");
        let ended = fleet.client.reached_within(Duration::from_secs(120), &job, &["Failed", "Canceled"]);
        format!("{:?}", ended.outcome)
    }));
    let _ = server.kill(); // the kernel ends what waits for it
    let _ = server.wait();
    let path = std::ffi::CString::new(mount.display().to_string()).expect("a path");
    let _ = rustix::mount::unmount(path.as_c_str(), rustix::mount::UnmountFlags::DETACH);
    came.unwrap_or_else(|panic| panic!("{}", said(&*panic)))
}

/// Sleeps as process number `argv[1]`, and says so.
const INNOCENT: &str = "
import ctypes, os, sys, time
wanted = int(sys.argv[1])
number = (ctypes.c_int * 1)(wanted)
# flags, pidfd, child_tid, parent_tid, exit_signal (SIGCHLD), stack, its size, tls, set_tid, its length, cgroup
arguments = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17, 0, 0, 0, ctypes.addressof(number), 1, 0)
libc = ctypes.CDLL(None, use_errno=True)
for _ in range(500):
    pid = libc.syscall(435, arguments, ctypes.sizeof(arguments))
    if pid == 0:
        os.execv('/usr/bin/sleep', ['sleep', '1000'])
    if pid > 0:
        break
    time.sleep(0.01)
print(pid, os.strerror(ctypes.get_errno()) if pid < 0 else '', flush=True)
";

/// The numbers of a supervisor and of its command are given to others while no daemon looks; then the
/// daemon comes back, finds the job lost and clears it up, or is told to cancel it.
fn numbers(tally: &mut Tally, scale: &Scale) {
    let mut fleet = Fleet::started(&Setup { slots: 8, ..Setup::default() });
    let (rounds, jobs) = (scale.of(2, 25), 8);
    let mut recycled = 0;
    for _ in 0..rounds {
        let names: Vec<String> =
            (0..jobs).map(|_| fleet.client.run("echo $$; trap '' TERM; exec sleep 1000")).collect();
        let mains = names.iter().map(|job| {
            eventually("the job is up", SOON, || {
                let log = fleet.client.try_log(job, 0, "job").ok()?;
                String::from_utf8(log).ok()?.trim().parse::<u32>().ok()
            })
        });
        let mains: Vec<u32> = mains.collect();
        let shims: Vec<u32> = fleet.controller.shims().into_iter().map(|(_, pid)| pid).collect();
        assert_eq!(shims.len(), jobs, "each job has a supervisor");
        fleet.controller.kill();
        let dying: Vec<u32> = shims.iter().chain(&mains).copied().collect();
        dying.iter().for_each(|pid| signal(*pid, Signal::KILL));
        eventually("they are gone", SOON, || {
            dying.iter().all(|pid| state_and_start(*pid).is_none()).then_some(())
        });
        let innocents: Vec<u32> = dying.iter().copied().filter(|pid| innocent(*pid)).collect();
        recycled += innocents.len();
        fleet.controller.spawn();
        fleet.ready();
        names.iter().for_each(|job| drop(fleet.client.cancel(job)));
        names.iter().for_each(|job| drop(fleet.client.ended(job)));
        let hit = innocents.iter().filter(|pid| !lives(**pid)).map(|pid| format!("process {pid} was killed"));
        let hit: Vec<String> = hit.collect();
        tally.count(u32::try_from(innocents.len()).unwrap_or(0), "a stranger was signalled", &hit);
        innocents.iter().for_each(|pid| signal(*pid, Signal::KILL));
    }
    tally.note(format!("numbers given to a stranger: {recycled} of {}", rounds * jobs * 2));
}

/// Starts a sleeping process of exactly this number; `false` when somebody else was given it.
fn innocent(pid: u32) -> bool {
    let mut started = command(PYTHON)
        .arg("-c")
        .arg(INNOCENT)
        .arg(pid.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("Python starts");
    let mut told = String::new();
    let mut output = std::io::BufReader::new(started.stdout.take().expect("a pipe"));
    std::io::BufRead::read_line(&mut output, &mut told).expect("it speaks");
    let _ = started.wait();
    told.trim() == pid.to_string()
}

/// How a job takes the polite signal.
const MANNERS: [(&str, &str); 4] = [
    ("obeys", "echo $$; exec sleep 1000"),
    ("cleans up", "trap 'exit 3' TERM; echo $$; while :; do sleep 0.05; done"),
    ("takes 0.5 s", "trap 'trap \"\" TERM; sleep 0.5; exit 3' TERM; echo $$; while :; do sleep 0.05; done"),
    ("ignores it", "trap '' TERM; echo $$; exec sleep 1000"),
];

fn grace(tally: &mut Tally, scale: &Scale) {
    let graces: &[u64] = scale.of(&[0, 1, 4], &[0, 1, 10, 120]);
    let cases: Vec<(u64, usize)> =
        graces.iter().flat_map(|grace| (0..MANNERS.len()).map(|m| (*grace, m))).collect();
    let fleet = Fleet::started(&Setup { slots: cases.len(), ..Setup::default() });
    let done = at_once(cases.len(), cases, |(grace, manner)| {
        let mut draft = JobDraft { command: MANNERS[*manner].1.to_owned(), ..JobDraft::default() };
        draft.limits.grace = Some(Duration::from_secs(*grace));
        let job = fleet.client.submit(&draft);
        let main: u32 = eventually("the job is up", SOON, || {
            String::from_utf8(fleet.client.try_log(&job, 0, "job").ok()?).ok()?.trim().parse().ok()
        });
        let begun = Instant::now();
        fleet.client.cancel(&job).expect("an answer");
        eventually("the command ends", Duration::from_secs(grace + 60), || (!lives(main)).then_some(()));
        let took = begun.elapsed();
        (took, fleet.client.ended(&job))
    });
    let mut worst = Duration::ZERO;
    for ((grace, manner), came) in done {
        let name = MANNERS[manner].0;
        tally.case(&format!("grace of {grace} s, a job that {name}"), || {
            let (took, job) = came.unwrap_or_else(|why| panic!("{why}"));
            let due = match name {
                "ignores it" => Duration::from_secs(grace),
                "takes 0.5 s" if grace > 0 => Duration::from_millis(500),
                _ => Duration::ZERO,
            };
            let off = took.abs_diff(due);
            worst = worst.max(off);
            assert_eq!(job.state, "Canceled");
            assert!(took + Duration::from_millis(50) >= due, "it was killed {off:?} early");
            // Half a second is the promise; the rest is for a machine that others keep busy.
            assert!(
                off <= scale.of(Duration::from_secs(3), Duration::from_millis(500)),
                "{off:?} off {due:?}"
            );
        });
    }
    tally.note(format!("farthest from the second it was due: {:.2} s", worst.as_secs_f64()));
}
