//! Group A, jobs that somebody else ends: a machine that goes down, a signal from elsewhere, and supervisors that are
//! stopped or frozen when the job must end.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_model::JobDraft;
use agent_model::job::{Limits, OnDisconnect, RetryPolicy};
use agent_proto::v1;
use agent_tests::client::TERMINAL;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::link::Way;
use agent_tests::{SOON, eventually, signal, within};
use rustix::process::Signal;

use crate::faults::look::lives;
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "A20",
        promise: "a signal from elsewhere cancels no job: the machine went down, or who sent it is named",
        run: signals,
    },
    Row {
        id: "A21",
        promise: "a job whose supervisor is stopped or frozen ends when it must, and is told of meanwhile",
        run: halted,
    },
];

/// Whom the signal hits.
const TARGETS: [&str; 3] = ["all processes", "the supervisor", "the command"];

/// What a command does with it.
const COMMANDS: [(&str, &str); 3] = [
    ("sleeps", "exec sleep 1000"),
    ("saves its state and returns 0", "trap 'exit 0' TERM; while :; do sleep 0.1; done"),
    ("is a shell that waits", "sleep 1000; exit 5"),
];

fn signals(tally: &mut Tally, scale: &Scale) {
    let mut number = 0;
    for target in TARGETS {
        for (what, command) in COMMANDS.into_iter().take(scale.of(2, 3)) {
            for (reboots, retries) in [(true, false), (true, true), (false, false)] {
                if target == "the command" && (!reboots || what != "sleeps") {
                    continue; // it ended by itself, whoever told it to
                }
                number += 1;
                let name = format!("{target} of a job that {what}, reboot: {reboots}, retries: {retries}");
                tally.case(&name, || one_signal(target, command, reboots, retries, number));
            }
        }
    }
}

fn one_signal(target: &str, command: &str, reboots: bool, retries: bool, number: u32) {
    let mut fleet = Fleet::started(&Setup { nodes: 1, ..Setup::default() });
    let again = fleet.home().join("again");
    let once = format!("[ ! -e {0} ] || exit 0; touch {0}; {command}", again.display());
    let retry = RetryPolicy { max_attempts: if retries { 3 } else { 1 }, backoff: Duration::ZERO };
    let job = fleet.client.submit(&JobDraft { command: once, retry, ..JobDraft::default() });
    fleet.client.reached(&job, &["Running"]);
    eventually("the command runs", SOON, || again.exists().then_some(()));
    std::thread::sleep(Duration::from_millis(300)); // until a shell has its trap
    // Which of them a machine that goes down ends first must not matter.
    if reboots {
        fleet.nodes[0].kill();
    }
    let (dir, shim) = fleet.nodes[0].shims().pop().expect("a supervisor");
    let mut victims = if target == "the supervisor" { Vec::new() } else { below(shim) };
    if target != "the command" {
        victims.push(shim);
    }
    victims.into_iter().for_each(|pid| signal(pid, Signal::TERM));
    eventually("the supervisor ends", SOON, || (!lives(shim)).then_some(()));
    assert!(!reboots || dir.join("exit.json").exists(), "it left no record");
    if reboots {
        fleet.nodes[0].reboot(&format!("00000000-0000-4000-8000-{number:012}"));
        fleet.nodes[0].spawn();
    }
    let ended = fleet.client.ended(&job);
    let (state, code) = (ended.state.as_str(), code(&ended));
    match (reboots, retries) {
        (true, true) => assert_eq!((state, ended.epoch), ("Completed", 2), "{ended:?}"),
        (true, false) => assert_eq!((state, code.as_str()), ("Failed", "NODE-103"), "{ended:?}"),
        // It returned 0 before its supervisor got the signal, and an agent that waits is told at once: nobody can
        // tell it from one that was done.
        (false, _) if state == "Completed" && command.starts_with("trap") => {}
        (false, _) => {
            assert_eq!((state, code.as_str()), ("Failed", "RUN-107"), "{ended:?}");
            let why = ended.outcome.and_then(|outcome| outcome.fault).expect("a fault").why.join("\n");
            let sender = format!("process {} ", std::process::id());
            assert!(why.contains("signal 15 (TERM)") && why.contains(&sender), "{why}");
        }
    }
}

fn code(job: &v1::Job) -> String {
    let fault = job.outcome.clone().and_then(|outcome| outcome.fault);
    fault.map(|fault| fault.code).unwrap_or_default()
}

/// The processes of a job, which are the descendants of its supervisor.
fn below(shim: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
    children.flat_map(|pid| [below(pid), vec![pid]].concat()).collect()
}

/// What keeps a supervisor from doing anything.
enum Halt {
    Stopped(u32),
    Frozen(PathBuf),
}

impl Halt {
    /// Of a supervisor; frozen together with its whole job.
    fn new(kind: &str, shim: u32) -> Halt {
        if kind == "stopped" {
            signal(shim, Signal::STOP);
            return Halt::Stopped(shim);
        }
        let group = Path::new("/sys/fs/cgroup/freezer").join(format!("faults-{shim}"));
        fs::create_dir(&group).expect("this machine can freeze");
        for pid in below(shim).into_iter().chain([shim]) {
            fs::write(group.join("cgroup.procs"), pid.to_string()).expect("it can be moved");
        }
        fs::write(group.join("freezer.state"), "FROZEN").expect("it can be frozen");
        Halt::Frozen(group)
    }
}

impl Drop for Halt {
    fn drop(&mut self) {
        match self {
            Halt::Stopped(shim) => {
                let _ = rustix::process::Pid::from_raw(i32::try_from(*shim).unwrap_or(0))
                    .map(|pid| rustix::process::kill_process(pid, Signal::CONT));
            }
            Halt::Frozen(group) => {
                let _ = fs::write(group.join("freezer.state"), "THAWED");
                let _ = within(Duration::from_secs(5), || fs::remove_dir(&*group).ok());
            }
        }
    }
}

/// What happens meanwhile.
const EVENTS: [&str; 5] = ["cancel", "restart", "lease", "cancel and restart", "all at once"];

fn halted(tally: &mut Tally, scale: &Scale) {
    let v1 = Path::new("/sys/fs/cgroup/freezer/cgroup.procs").exists();
    if !v1 {
        tally.note("frozen: not tried, this machine has no freezer of version 1".to_owned());
    }
    for kind in ["stopped", "frozen"].into_iter().filter(|kind| v1 || *kind == "stopped") {
        for event in EVENTS {
            // A merge tries what comes together: all that a single event can show is in there.
            if !scale.full && !matches!((kind, event), ("stopped", "restart") | ("frozen", "all at once")) {
                continue;
            }
            tally.case(&format!("{event} while {kind}"), || meet(kind, event));
        }
    }
}

fn meet(kind: &str, event: &str) {
    let controller = "lease: 3s\n".to_owned();
    let mut fleet = Fleet::started(&Setup { nodes: 1, slots: 1, controller, ..Setup::default() });
    let lease = matches!(event, "lease" | "all at once");
    let on_disconnect = if lease { OnDisconnect::Replace } else { OnDisconnect::Hold };
    let limits = Limits { grace: Some(Duration::from_secs(1)), on_disconnect, ..Limits::default() };
    let go = fleet.home().join("go");
    let command = format!("while [ ! -e {} ]; do sleep 0.1; done", go.display());
    let job = fleet.client.submit(&JobDraft { command, limits, ..JobDraft::default() });
    fleet.client.reached(&job, &["Running"]);
    let (_, shim) = eventually("a supervisor", SOON, || fleet.nodes[0].shims().pop());
    let processes: Vec<u32> = below(shim).into_iter().chain([shim]).collect();
    let halt = Halt::new(kind, shim);
    if event.contains("cancel") || event == "all at once" {
        fleet.client.cancel(&job).expect("an answer");
    }
    if lease {
        fleet.links[0].cut(Way::Both);
    }
    if event.contains("restart") || event == "all at once" {
        fleet.nodes[0].bounce();
    }
    if event == "restart" {
        eventually("it is told what is waited for", SOON, || {
            let said = fleet.client.job(&job).replicas.pop()?.detail;
            said.contains("supervisor of the command, which is stopped or frozen").then_some(())
        });
        drop(halt);
        fs::write(go, "").expect("the sign to end");
        let ended = fleet.client.ended(&job);
        assert_eq!((ended.state.as_str(), ended.epoch), ("Completed", 1), "{ended:?}");
        return;
    }
    if lease {
        // Its lease lasts three seconds, and not the minute that is usual.
        eventually("the job is ended while its node is cut off", Duration::from_secs(45), || {
            processes.iter().all(|pid| !lives(*pid)).then_some(())
        });
        fleet.links[0].heal();
        fleet.links[0].break_all();
    }
    let ended = fleet.client.reached_within(2 * SOON, &job, &TERMINAL);
    let due = if event == "lease" { "Failed" } else { "Canceled" };
    assert_eq!(ended.state, due, "{ended:?}");
    let left: Vec<u32> = processes.into_iter().filter(|pid| lives(*pid)).collect();
    assert!(left.is_empty(), "{left:?} live on");
    // Its slot is free again, and it is the only one.
    let next = fleet.client.run("true");
    assert_eq!(fleet.client.ended(&next).state, "Completed");
    drop(halt);
}
