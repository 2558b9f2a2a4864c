//! Group A, races: whatever happens at the same time, one of the allowed results comes out.

use std::fs;
use std::time::Duration;

use agent_model::JobDraft;
use agent_model::job::Limits;
use agent_tests::client::TERMINAL;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::witness::boottime;
use agent_tests::{SOON, eventually};

use crate::faults::judge::{truthful, whole};
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "A14",
        promise: "cancel, end, time limit and kill at one moment give one result that is true",
        run: cancels,
    },
    Row { id: "A16", promise: "nothing is placed on a node after its drain was acknowledged", run: drains },
    Row {
        id: "A18",
        promise: "stop, start, kill and drain in every state of a job: it ends well",
        run: stops,
    },
];

const LINES: u64 = 20;

/// Jobs are canceled at random instants around their end, their limit and the death of their daemon.
fn cancels(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    let mut fleet = Fleet::started(&Setup { nodes: 1, slots: 6, ..Setup::default() });
    let go = fleet.home().join("go");
    let bystander = fleet.submit(&format!("--lines {LINES} --until {}", go.display()));
    for round in 0..scale.of(8, 200) {
        let batch: Vec<(String, Duration)> = (0..5)
            .map(|_| {
                let timeout = chance.percent(30).then(|| Duration::from_millis(400));
                let limits = Limits { timeout, grace: Some(Duration::from_secs(2)), ..Limits::default() };
                let draft = fleet.draft(&format!("--lines {LINES} --seconds 0.4"));
                (fleet.client.submit(&JobDraft { limits, ..draft }), chance.millis(0, 1200))
            })
            .collect();
        let (begun, mut open) = (std::time::Instant::now(), batch.clone());
        let kill = chance.percent(30).then(|| chance.millis(0, 1200));
        let mut killed = false;
        while !open.is_empty() {
            let (due, later) = open.into_iter().partition(|(_, at)| begun.elapsed() >= *at);
            open = later;
            let due: Vec<(String, Duration)> = due;
            due.iter().for_each(|(job, _)| drop(fleet.client.cancel(job)));
            if !killed && kill.is_some_and(|at| begun.elapsed() >= at) {
                killed = true;
                fleet.node().bounce();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        for (job, at) in &batch {
            tally.case(&format!("round {round}: {job} canceled after {at:?}, kill {kill:?}"), || {
                let first = truthful(&fleet, job, LINES);
                let over = boottime();
                // Nothing of it lives on, and nothing changes its mind.
                assert_eq!(fleet.client.job(job).state, first.state);
                let late = fleet.witness.of(job).into_iter().find(|seen| seen.at > over + 200);
                assert_eq!(late, None, "{job} is over and lives");
            });
        }
    }
    tally.case("the job that nobody canceled", || {
        fs::write(go, "").expect("the sign to end");
        whole(&fleet, &bystander, LINES);
    });
}

/// Jobs come in while nodes are drained and opened again.
fn drains(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    let mut fleet = Fleet::started(&Setup { nodes: 2, slots: 2, ..Setup::default() });
    let mut jobs = Vec::new();
    for round in 0..scale.of(12, 200) {
        let victim = format!("n{}", chance.below(2));
        let early: Vec<String> = (0..3).map(|_| fleet.submit("--lines 20 --seconds 0.2")).collect();
        std::thread::sleep(chance.millis(0, 150));
        let kill = chance.percent(30);
        tally.case(&format!("drain {round} of {victim}"), || {
            fleet.client.set_eligibility(&victim, "drain").expect("the drain is acknowledged");
            if kill {
                fleet.controller.bounce();
            }
            let late: Vec<String> = (0..3).map(|_| fleet.submit("--lines 20 --seconds 0.1")).collect();
            for job in &late {
                let ended = fleet.client.ended(job);
                let at = ended.replicas.first().map(|at| at.node.clone()).unwrap_or_default();
                assert!(at != victim, "{job} was placed on {victim} after its drain: {ended:?}");
            }
            early.iter().chain(&late).for_each(|job| whole(&fleet, job, 20));
            eventually("the node is empty and cordoned", SOON, || {
                let nodes = fleet.client.nodes().ok()?;
                nodes.iter().find(|node| node.node == victim)?.eligibility.eq("cordoned").then_some(())
            });
            fleet.client.set_eligibility(&victim, "uncordon").expect("the node is open again");
            jobs.extend(early.iter().chain(&late).cloned());
        });
    }
    tally.note(format!("{} jobs around drains", jobs.len()));
}

/// A state of a job, and the place that is slow so that it can be met there.
const STATES: [(&str, &str); 5] = [
    ("queued", ""),
    ("staging", "node.journal.enter=delay:700=2"),
    ("building", "node.journal.enter=delay:700=3"),
    ("running", ""),
    ("finalizing", "node.outputs.collect=delay:700"),
];

/// Each state meets each verb.
fn stops(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    for _ in 0..scale.of(1, 5) {
        for (state, slow) in STATES {
            for verb in ["stop", "kill", "drain"] {
                let pause = chance.millis(0, 100);
                tally.case(&format!("{verb} while {state}, {pause:?} into it"), || {
                    meet(state, slow, verb, pause)
                });
            }
        }
    }
}

fn meet(state: &str, slow: &str, verb: &str, pause: Duration) {
    let mut fleet = Fleet::new(&Setup { nodes: 1, slots: 1, ..Setup::default() });
    fleet.node().set(agent_model::failpoint::VARIABLE, slow);
    fleet.start();
    let first = (state == "queued").then(|| fleet.submit("--lines 20 --seconds 1"));
    let job = fleet.submit("--lines 20 --seconds 0.6");
    let wait = |what: &str, states: &[&str]| {
        eventually(what, SOON, || states.contains(&fleet.client.job(&job).state.as_str()).then_some(()));
    };
    match state {
        "queued" => wait("it waits", &["Queued"]),
        "staging" | "building" => wait("it is prepared", &["Preparing", "Running"]),
        "running" => wait("it runs", &["Running"]),
        _ => eventually("its command has ended", SOON, || {
            fleet.witness.of(&job).iter().any(|seen| seen.kind == "end").then_some(())
        }),
    }
    std::thread::sleep(pause);
    match verb {
        "stop" => {
            assert!(fleet.node().stop().success(), "the daemon did not stop well");
            fleet.node().set(agent_model::failpoint::VARIABLE, "");
            fleet.node().spawn();
        }
        "kill" => fleet.node().bounce(),
        _ => drop(fleet.client.set_eligibility("n0", "drain").expect("the drain is acknowledged")),
    }
    if verb == "drain" && state == "queued" {
        std::thread::sleep(Duration::from_millis(1500));
        assert_eq!(fleet.client.job(&job).state, "Queued", "it was placed on a node that is drained");
        fleet.client.set_eligibility("n0", "uncordon").expect("the node is open again");
    }
    let ended = fleet.client.reached(&job, &TERMINAL);
    assert_eq!(ended.state, "Completed", "{ended:?}");
    whole(&fleet, &job, 20);
    first.iter().for_each(|job| whole(&fleet, job, 20));
}
