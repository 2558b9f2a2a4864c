//! Group A, leases: how long a run may go on without its controller, and who may give it away when.

use std::time::{Duration, Instant};

use agent_model::JobDraft;
use agent_model::job::{Limits, OnDisconnect, RetryPolicy};
use agent_tests::chance::Chance;
use agent_tests::fleet::{Fleet, Setup, keep_evidence};
use agent_tests::link::Way;
use agent_tests::witness::boottime;
use agent_tests::{SOON, eventually, signal};
use rustix::process::Signal;

use agent_tests::table::{Row, Scale, Tally};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "A2",
        promise: "a job that may be replaced never runs twice at once, and soon runs again",
        run: |tally, scale| {
            tally.add(side_by_side(scale, &Fault::ALL, scale.of(6, 70), (LEASE / 2, LEASE * 5)));
            both_begin_anew(tally, scale);
        },
    },
    Row {
        id: "A11",
        promise: "after a long partition a held job was not touched, a replaceable one runs once",
        run: |tally, scale| {
            let long = scale.of(Duration::from_secs(20), Duration::from_secs(600));
            tally.add(side_by_side(scale, &Fault::PARTITIONS, scale.of(2, 3), (long, long)));
        },
    },
];

/// The lease of these fleets, and the grace of their jobs.
const LEASE: Duration = Duration::from_secs(3);
const GRACE: Duration = Duration::from_secs(1);

/// What goes wrong for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Cut(Way),
    Agent,
    Shims,
    Controller,
}

impl Fault {
    const ALL: [Fault; 6] = [
        Fault::Cut(Way::Both),
        Fault::Cut(Way::Up),
        Fault::Cut(Way::Down),
        Fault::Agent,
        Fault::Shims,
        Fault::Controller,
    ];
    const PARTITIONS: [Fault; 3] = [Fault::Cut(Way::Both), Fault::Cut(Way::Up), Fault::Cut(Way::Down)];
}

/// Two fleets at a time go through the faults, each as often as is asked for.
fn side_by_side(scale: &Scale, faults: &[Fault], cycles: usize, span: (Duration, Duration)) -> Tally {
    let mut all = Tally::default();
    let parts: Vec<_> = std::thread::scope(|scope| {
        let part = |number: u64| {
            scope.spawn(move || {
                keep_evidence(false);
                let mut chance = Chance::new(scale.seed + number);
                // Every kind of fault has its turn; where they begin differs.
                let turn = usize::try_from(number).unwrap_or(0) * faults.len().div_ceil(2);
                let order = faults.iter().cycle().skip(turn).take(cycles);
                suffer(&mut chance, order.copied(), span)
            })
        };
        let parts = [part(0), part(1)];
        parts
            .into_iter()
            .map(|part| part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    parts.into_iter().for_each(|part| all.add(part));
    all
}

/// One fleet with jobs of both policies goes through these faults.
fn suffer(chance: &mut Chance, faults: impl Iterator<Item = Fault>, span: (Duration, Duration)) -> Tally {
    let mut tally = Tally::default();
    let controller = format!("lease: {}s\n", LEASE.as_secs());
    let fleet = Fleet::started(&Setup { nodes: 2, slots: 4, controller, ..Setup::default() });
    let of = |policy| draft(&fleet, policy);
    let replaced = [0, 1].map(|_| fleet.client.submit(&of(OnDisconnect::Replace)));
    let held = [0, 1].map(|_| fleet.client.submit(&of(OnDisconnect::Hold)));
    for job in replaced.iter().chain(&held) {
        fleet.client.reached(job, &["Running"]);
    }
    let mut moves = 0;
    for fault in faults {
        let [from, to] = [span.0, span.1].map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        let length = chance.millis(from, to);
        let victim =
            fleet.client.job(&replaced[0]).replicas.first().map_or(0, |at| usize::from(at.node == "n1"));
        tally.case(&format!("{fault:?} of n{victim} for {length:?}"), || {
            let before: u64 = replaced.iter().map(|job| fleet.client.job(job).epoch).sum();
            cycle(&fleet, fault, victim, length, &replaced);
            moves += replaced.iter().map(|job| fleet.client.job(job).epoch).sum::<u64>() - before;
            for job in &held {
                let job = fleet.client.job(job);
                assert!(job.epoch == 1 && job.outcome.is_none(), "a held job was touched: {job:?}");
            }
            let overlaps = fleet.witness.overlaps();
            assert!(overlaps.is_empty(), "{overlaps:?}");
        });
    }
    let twice = fleet.witness.run_twice();
    tally.count(0, "runs of one epoch", &twice);
    let beats = fleet.witness.records();
    for job in &held {
        let alive = beats.iter().any(|seen| seen.job == *job && seen.at + 2000 > boottime());
        tally.count(1, "held jobs", if alive { &[] } else { std::slice::from_ref(job) });
    }
    tally.note(format!("{moves} new attempts, lease {} s", LEASE.as_secs()));
    tally
}

/// Agent and controller are killed and started at one moment: neither knows how long the run has leave, and the
/// supervisor does.
fn both_begin_anew(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    let controller = format!("lease: {}s\n", 4 * LEASE.as_secs());
    let mut fleet = Fleet::started(&Setup { nodes: 1, controller, ..Setup::default() });
    let job = fleet.client.submit(&draft(&fleet, OnDisconnect::Replace));
    fleet.client.reached(&job, &["Running"]);
    for round in 0..scale.of(6, 60) {
        std::thread::sleep(chance.millis(0, 1500));
        tally.case(&format!("agent and controller begin anew at once, {round}"), || {
            fleet.controller.kill();
            fleet.nodes[0].bounce();
            std::thread::sleep(chance.millis(0, 300));
            fleet.controller.spawn();
            fleet.ready();
            std::thread::sleep(Duration::from_millis(700));
            let job = fleet.client.job(&job);
            assert!(job.epoch == 1 && job.outcome.is_none(), "its run was ended: {job:?}");
        });
    }
}

/// A job that runs for as long as it is let.
fn draft(fleet: &Fleet, on_disconnect: OnDisconnect) -> JobDraft {
    let limits = Limits { grace: Some(GRACE), on_disconnect, ..Limits::default() };
    let retry = RetryPolicy { max_attempts: 1000, backoff: Duration::ZERO };
    JobDraft { limits, retry, ..fleet.draft("--seconds 86400") }
}

/// Lets something go wrong for a while, and waits until the jobs run again.
fn cycle(fleet: &Fleet, fault: Fault, victim: usize, length: Duration, replaced: &[String]) {
    let node = &fleet.nodes[victim];
    let begun = (boottime(), Instant::now());
    let shims: Vec<u32> = node.shims().into_iter().map(|(_, pid)| pid).collect();
    match fault {
        Fault::Cut(way) => fleet.links[victim].cut(way),
        Fault::Agent => node.freeze(),
        Fault::Shims => shims.iter().for_each(|pid| signal(*pid, Signal::STOP)),
        Fault::Controller => fleet.controller.freeze(),
    }
    // A job that nobody renews runs again elsewhere by then, whether the fault lasts or not.
    let bound = LEASE + GRACE + Duration::from_secs(10);
    std::thread::sleep(length.min(bound));
    if length >= bound && fault != Fault::Controller {
        run_again(fleet, replaced, begun.0 + 1000, Duration::from_secs(1));
        std::thread::sleep(length.saturating_sub(begun.1.elapsed()));
    }
    match fault {
        Fault::Cut(_) => fleet.links[victim].heal(),
        Fault::Agent => node.thaw(),
        Fault::Shims => shims.iter().for_each(|pid| signal(*pid, Signal::CONT)),
        Fault::Controller => fleet.controller.thaw(),
    }
    let healed = boottime();
    run_again(fleet, replaced, healed, bound);
    eventually("every node is ready", SOON, || {
        let nodes = fleet.client.nodes().ok()?;
        (nodes.iter().filter(|node| node.liveness == "ready").count() == fleet.nodes.len()).then_some(())
    });
    // What was frozen or cut off has had its time to find out.
    std::thread::sleep(Duration::from_millis(500));
}

/// Waits until each job has a beat after `since`, and the controller says that it runs.
fn run_again(fleet: &Fleet, jobs: &[String], since: u64, within: Duration) {
    for job in jobs {
        eventually(&format!("{job} runs again: {:?}", fleet.client.try_job(job)), within, || {
            let now = fleet.client.try_job(job).ok()?;
            let seen = fleet.witness.records();
            let alive =
                seen.iter().any(|seen| seen.job == *job && seen.epoch == now.epoch && seen.at > since);
            (alive && now.state == "Running").then_some(())
        });
    }
}
