//! Every fault in every phase: the attempt ends whole, nothing of it stays, and another one runs whole.

use std::path::Path;
use std::time::Duration;

use agent_model::{EnvSpec, JobDraft};
use agent_tests::fleet::{Fleet, keep_evidence};
use agent_tests::link::Way;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually, signal};
use rustix::process::Signal;

use crate::gangs::bed::{
    beating, beats, check_beats, completed, draft, history, nothing_left, replaced, setup,
};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "M1",
    promise: "whatever happens to a rank in whatever phase, all end, nothing stays, all run anew",
    run: matrix,
}];

/// What the victim is at when it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Fetch,
    Build,
    /// It could start, and waits for the other.
    Barrier,
    Running,
    Teardown,
}

/// What happens to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Exit,
    KillRank,
    KillShim,
    KillAgent,
    Partition,
    Freeze,
}

const PHASES: [Phase; 5] = [Phase::Fetch, Phase::Build, Phase::Barrier, Phase::Running, Phase::Teardown];
const FAULTS: [Fault; 6] =
    [Fault::Exit, Fault::KillRank, Fault::KillShim, Fault::KillAgent, Fault::Partition, Fault::Freeze];

/// What takes a moment, so that it can be met.
const DELAY: &str = "delay:2500";

impl Phase {
    /// The failpoint that makes the victim stay in it; that of the other rank where the victim waits for it.
    fn failpoint(self) -> (&'static str, bool) {
        match self {
            Phase::Fetch => ("cas.tree.write", true),
            Phase::Build => ("env.build.spawn", true),
            Phase::Barrier => ("cas.tree.write", false),
            Phase::Running => ("", true),
            Phase::Teardown => ("node.outputs.collect", true),
        }
    }

    /// Whether a fault can happen to it there: before the start there is no process of the job.
    fn has(self, fault: Fault) -> bool {
        let process = matches!(fault, Fault::Exit | Fault::KillRank | Fault::KillShim);
        !process || self == Phase::Running
    }
}

fn matrix(tally: &mut Tally, scale: &Scale) {
    let all: Vec<(Phase, Fault)> = PHASES
        .iter()
        .flat_map(|phase| FAULTS.map(|fault| (*phase, fault)))
        .filter(|(phase, fault)| phase.has(*fault))
        .collect();
    // A merge tries each fault, and each phase but the one that takes long to reach.
    let short = [
        (Phase::Fetch, Fault::KillAgent),
        (Phase::Fetch, Fault::Partition),
        (Phase::Barrier, Fault::Freeze),
        (Phase::Running, Fault::KillRank),
        (Phase::Running, Fault::KillShim),
        (Phase::Running, Fault::Exit),
        (Phase::Teardown, Fault::KillAgent),
    ];
    let chosen = scale.of(short.to_vec(), all);
    let parts: Vec<Tally> = std::thread::scope(|scope| {
        let halves = chosen.chunks(chosen.len().div_ceil(2));
        let work: Vec<_> = halves.map(|half| scope.spawn(move || try_all(half))).collect();
        work.into_iter()
            .map(|part| part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    parts.into_iter().for_each(|part| tally.add(part));
}

fn try_all(chosen: &[(Phase, Fault)]) -> Tally {
    keep_evidence(false);
    let mut tally = Tally::default();
    for (phase, fault) in chosen {
        tally.case(&format!("{phase:?}, {fault:?}"), || try_one(*phase, *fault));
    }
    tally
}

/// The job of a case: with code and an environment, so that there is something to be in the middle of.
fn job(fleet: &Fleet, file: &Path, phase: Phase, fault: Fault) -> JobDraft {
    let end = match fault {
        Fault::Exit => "[ $RANK = 0 ] && exit 1; sleep 600",
        _ => "echo done > outputs/x",
    };
    let code = fleet.client.try_push(&[("code.py", "print(1)")]).expect("the code is sent");
    let environment = match phase {
        Phase::Build => EnvSpec::Pip { python: "/usr/bin/python3".into(), requirements: Vec::new() },
        _ => EnvSpec::host(),
    };
    JobDraft { code: Some(code), environment, ..replaced(draft(2, &beating(file, 30, end), None)) }
}

fn try_one(phase: Phase, fault: Fault) {
    // A third node takes the place of one that does not come back in time.
    let mut fleet = Fleet::new(&setup(3));
    let (failpoint, at_victim) = phase.failpoint();
    if !failpoint.is_empty() {
        // Where it is placed is not known before; the others are as slow then, which does no harm.
        let slow = |index: usize| at_victim || index != 0;
        for (index, node) in fleet.nodes.iter_mut().enumerate() {
            if slow(index) {
                node.set("AGENTD_FAILPOINTS", &format!("{failpoint}={DELAY}"));
            }
        }
    }
    fleet.start();
    let file = fleet.home().join("beats");
    let new = job(&fleet, &file, phase, fault);
    let id = fleet.client.submit(&new);
    let victim = await_phase(&fleet, &id, phase, &file);
    strike(&mut fleet, victim, fault, &file, &id);
    // What a command does of itself it would do again.
    if matches!(fault, Fault::Exit | Fault::KillRank) {
        let ended = fleet.client.ended(&id);
        assert_eq!(ended.state, "Failed");
        let what =
            ended.outcome.and_then(|outcome| outcome.fault).map(|fault| fault.what).unwrap_or_default();
        assert!(what.starts_with("rank 0 of 2"), "the first cause is named: {what}");
    } else {
        completed(&fleet, &id);
    }
    check_beats(&fleet, &id, &file);
    fleet.links.iter().for_each(agent_tests::link::Link::heal);
    fleet.nodes.iter().for_each(agent_tests::fleet::Daemon::thaw);
    nothing_left(&fleet);
}

/// Waits until a rank is in the phase; gives the node of the victim.
fn await_phase(fleet: &Fleet, id: &str, phase: Phase, file: &Path) -> usize {
    let step = match phase {
        Phase::Fetch => "Fetching",
        Phase::Build => "Building",
        Phase::Barrier => "Launching",
        Phase::Running => "Running",
        Phase::Teardown => "Uploading",
    };
    let node = eventually("a rank is in the phase", SOON, || {
        let job = fleet.client.job(id);
        let there = job
            .replicas
            .iter()
            .find(|replica| replica.step == step && (phase != Phase::Running || replica.rank == 0));
        let there = there.filter(|_| phase != Phase::Running || beats(file).len() == 2);
        let waits = |text: &str| text.contains("could start, at");
        let there = there
            .filter(|_| phase != Phase::Barrier || history(fleet, id).iter().any(|(.., text)| waits(text)));
        there.map(|replica| replica.node.clone())
    });
    node.trim_start_matches('n').parse().expect("a node of the fleet")
}

fn strike(fleet: &mut Fleet, victim: usize, fault: Fault, file: &Path, id: &str) {
    match fault {
        Fault::Exit => {}
        Fault::KillRank => {
            let rank = beats(file).into_iter().find(|(replica, _)| replica == &format!("{id}.1.0"));
            signal(rank.expect("it runs").1.2, Signal::KILL);
        }
        Fault::KillShim => {
            let shims = fleet.nodes[victim].shims();
            shims.iter().for_each(|(_, pid)| signal(*pid, Signal::KILL));
            assert!(!shims.is_empty(), "there is a supervisor");
        }
        Fault::KillAgent => {
            fleet.nodes[victim].kill();
            std::thread::sleep(Duration::from_secs(1));
            fleet.nodes[victim].spawn();
        }
        Fault::Partition => {
            fleet.links[victim].cut(Way::Both);
            std::thread::sleep(Duration::from_secs(12));
            fleet.links[victim].heal();
            fleet.links[victim].break_all();
        }
        Fault::Freeze => {
            fleet.nodes[victim].freeze();
            std::thread::sleep(Duration::from_secs(12));
            fleet.nodes[victim].thaw();
        }
    }
}
