//! Group A: jobs survive the death of everything but themselves.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use agent_proto::v1;
use agent_proto::v1::worker_client::WorkerClient;
use agent_tests::client::Client;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::{SOON, eventually};

use crate::faults::judge::{Every, Samples, broken, instances, lost_and_unexpected, percentile, whole};
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "A1",
        promise: "no job is lost or invented while controller and nodes are killed",
        run: |tally, scale| tally.add(keep_jobs(scale, 2)),
    },
    Row {
        id: "A4",
        promise: "a daemon killed at any instant costs its jobs nothing: not a line, not a restart",
        run: |tally, scale| tally.add(kill_agent(scale, 1)),
    },
    Row {
        id: "A6",
        promise: "results of jobs that end while the controller is away count, once",
        run: |tally, scale| tally.add(controller_away(scale, 1)),
    },
    Row {
        id: "A8",
        promise: "a controller that is killed stops, moves and restarts nothing",
        run: |tally, scale| tally.add(kill_controller(scale, 1)),
    },
    Row { id: "A19", promise: "one box keeps the promises of A1, A4, A6 and A8 as well", run: on_one_box },
];

/// Jobs come in while everything is killed; the client writes down what was acknowledged.
fn keep_jobs(scale: &Scale, nodes: usize) -> Tally {
    let (mut tally, mut chance) = (Tally::default(), scale.chance());
    let (wanted, every) = (scale.of(60, 1000), scale.of(200, 500));
    let slots = scale.of(6, 8) * if nodes == 0 { 2 } else { 1 };
    let mut fleet = Fleet::started(&Setup { nodes, slots, ..Setup::default() });
    let (mut acknowledged, mut pending) = (Vec::new(), None::<(String, agent_model::JobDraft)>);
    let (mut samples, mut kills) = (Samples::default(), 0);
    let mut submit = Every::new(&mut chance, every / 2, every);
    let mut controller = Every::new(&mut chance, scale.of(1500, 3000), scale.of(4000, 8000));
    let mut node = Every::new(&mut chance, scale.of(1500, 4000), scale.of(3000, 6000));
    let mut sample = Every::new(&mut chance, 1000, 1000);
    let deadline = Instant::now() + scale.of(Duration::from_secs(120), Duration::from_secs(1200));
    while acknowledged.len() < wanted {
        assert!(Instant::now() < deadline, "only {} jobs were acknowledged", acknowledged.len());
        if pending.is_none() && submit.is_due(&mut chance) {
            let seconds = chance.millis(scale.of(300, 1000), scale.of(1500, 5000)).as_secs_f64();
            pending = Some((Client::request_id(), fleet.draft(&format!("--lines 20 --seconds {seconds}"))));
        }
        // A call that broke is repeated with the same request id until it is acknowledged.
        if let Some(job) = pending.as_ref().and_then(|(id, draft)| fleet.client.try_submit(id, draft).ok()) {
            acknowledged.push(job);
            pending = None;
        }
        if controller.is_due(&mut chance) {
            fleet.controller.bounce();
            kills += 1;
        }
        if nodes > 0 && node.is_due(&mut chance) {
            let victim = usize::try_from(chance.below(nodes as u64)).unwrap_or(0);
            fleet.nodes[victim].bounce();
            kills += 1;
        }
        if sample.is_due(&mut chance) {
            samples.take(&fleet);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let drain = scale.of(SOON, Duration::from_secs(600));
    eventually("every job has ended", drain, || {
        samples.take(&fleet);
        std::thread::sleep(Duration::from_millis(500));
        fleet.client.jobs(true).ok()?.is_empty().then_some(())
    });
    for job in &acknowledged {
        tally.case(&format!("the end of {job}"), || whole(&fleet, job, 20));
    }
    tally.count(0, "jobs that came and went", &lost_and_unexpected(&fleet, &acknowledged));
    tally.count(0, "what was seen meanwhile", &samples.complaints);
    tally.note(format!("{wanted} jobs, {kills} kills, {} looks at all jobs", samples.taken));
    tally
}

/// Kills over live jobs: the same supervisors, no line lost or doubled.
fn kill_agent(scale: &Scale, nodes: usize) -> Tally {
    const LINES: u64 = 20_000;
    let (mut tally, mut chance) = (Tally::default(), scale.chance());
    let (count, kills) = (scale.of(4, 20), scale.of(20, 200));
    let (mut fleet, jobs, go) = live_jobs(nodes, count, LINES);
    let before = instances(fleet.node());
    let mut adopted = Vec::new();
    for kill in 0..kills {
        let pause = chance.millis(0, 900);
        std::thread::sleep(pause);
        tally.case(&format!("kill {kill} after {pause:?}"), || {
            fleet.node().kill();
            let (logged, begun) = (fleet.node().log().len(), Instant::now());
            fleet.node().spawn();
            eventually("every command is found", SOON, || {
                let found = fleet.node().log()[logged..].matches("found job running").count();
                (found >= count).then_some(())
            });
            adopted.push(begun.elapsed());
            assert_eq!(instances(fleet.node()), before, "the supervisors changed");
        });
    }
    fs::write(go, "").expect("the sign to end");
    for job in &jobs {
        tally.case(&format!("the end of {job}"), || whole(&fleet, job, LINES));
    }
    let [middle, most] = [50, 99].map(|of| percentile(&mut adopted, of));
    tally.note(format!("adoption of {count} jobs after {kills} kills: p50 {middle}, p99 {most}"));
    tally
}

/// A fleet with jobs that run until a file exists.
fn live_jobs(nodes: usize, count: usize, lines: u64) -> (Fleet, Vec<String>, PathBuf) {
    let fleet = Fleet::started(&Setup { nodes, slots: count, ..Setup::default() });
    let go = fleet.home().join("go");
    let wishes = format!("--lines {lines} --rate 100 --until {}", go.display());
    let jobs: Vec<String> = (0..count).map(|_| fleet.submit(&wishes)).collect();
    for job in &jobs {
        fleet.client.reached(job, &["Running"]);
    }
    (fleet, jobs, go)
}

/// The controller is killed over live jobs; its database is whole each time and it answers soon.
fn kill_controller(scale: &Scale, nodes: usize) -> Tally {
    const LINES: u64 = 20_000;
    let (mut tally, mut chance) = (Tally::default(), scale.chance());
    let (count, kills) = (scale.of(4, 20), scale.of(15, 100));
    let (mut fleet, jobs, go) = live_jobs(nodes, count, LINES);
    let before = instances(fleet.node());
    let mut answered = Vec::new();
    for kill in 0..kills {
        let pause = chance.millis(0, 900);
        std::thread::sleep(pause);
        tally.case(&format!("kill {kill} after {pause:?}"), || {
            fleet.controller.kill();
            let damage = broken(&fleet.controller.state().join("controller/db"));
            let begun = Instant::now();
            fleet.controller.spawn();
            eventually("the controller answers", SOON, || fleet.client.nodes().ok());
            answered.push(begun.elapsed());
            assert_eq!(damage, None, "the database");
            for job in &jobs {
                // How far it is may be told again by its node; that it goes on where it was may not change.
                let now = fleet.client.job(job);
                let goes_on = ["Preparing", "Running"].contains(&now.state.as_str());
                assert!(now.epoch == 1 && goes_on, "{now:?}");
            }
        });
    }
    assert_eq!(instances(fleet.node()), before, "the supervisors changed");
    fs::write(go, "").expect("the sign to end");
    for job in &jobs {
        tally.case(&format!("the end of {job}"), || whole(&fleet, job, LINES));
    }
    let [middle, most] = [50, 99].map(|of| percentile(&mut answered, of));
    tally.note(format!("first answer after {kills} kills: p50 {middle}, p99 {most}"));
    tally
}

/// Jobs end while nobody takes their results, and the daemon that keeps these is killed twice.
fn controller_away(scale: &Scale, nodes: usize) -> Tally {
    const LINES: u64 = 50;
    let mut tally = Tally::default();
    let count = scale.of(12, 100);
    let away = scale.of(Duration::from_secs(4), Duration::from_secs(300));
    let mut fleet = Fleet::started(&Setup { nodes, slots: count, ..Setup::default() });
    let go = fleet.home().join("go");
    let wishes = format!("--lines {LINES} --until {}", go.display());
    let jobs: Vec<String> = (0..count).map(|_| fleet.submit(&wishes)).collect();
    for job in &jobs {
        fleet.client.reached(job, &["Running"]);
    }
    fleet.controller.kill();
    let begun = Instant::now();
    fs::write(&go, "").expect("the sign to end");
    eventually("every job has ended by itself", SOON, || {
        (fleet.witness.records().iter().filter(|seen| seen.kind == "end").count() == count).then_some(())
    });
    if nodes > 0 {
        for _ in 0..2 {
            std::thread::sleep(Duration::from_millis(300));
            fleet.node().bounce();
        }
    }
    std::thread::sleep(away.saturating_sub(begun.elapsed()));
    fleet.controller.spawn();
    for job in &jobs {
        tally.case(&format!("the result of {job}"), || whole(&fleet, job, LINES));
    }
    // Whoever comes late, or from nowhere, changes nothing.
    for (index, job) in jobs.iter().enumerate() {
        tally.case(&format!("another result of {job}"), || {
            let before = fleet.client.job(job);
            let epoch = if index % 2 == 0 { 0 } else { 1 };
            let node = before.replicas.first().map_or("n0".to_owned(), |replica| replica.node.clone());
            let outcome =
                v1::Outcome { verdict: "failed".into(), ..before.outcome.clone().unwrap_or_default() };
            let request = v1::ReportOutcomeRequest {
                node,
                replica: format!("{job}.{epoch}.0"),
                outcome: Some(outcome),
            };
            let _ = fleet.client.wait(WorkerClient::new(fleet.client.channel()).report_outcome(request));
            let after = fleet.client.job(job);
            assert_eq!((after.state, after.outcome), (before.state, before.outcome));
        });
    }
    tally
}

/// The same on one box, where the daemon is both; smaller, because it is the same code.
fn on_one_box(tally: &mut Tally, scale: &Scale) {
    let small = Scale { full: false, ..*scale };
    for (name, run) in [
        ("A1", keep_jobs as fn(&Scale, usize) -> Tally),
        ("A4", kill_agent),
        ("A6", controller_away),
        ("A8", kill_controller),
    ] {
        tally.add(run(&small, 0).within(name));
    }
}
