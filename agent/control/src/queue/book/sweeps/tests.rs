use std::collections::{BTreeMap, BTreeSet};

use agent_model::job::{JobDraft, Priority};
use agent_model::sweep::{
    CurvePoint, Distribution, Goal, Objective, Policy, PolicyKind, Scalar, Space, Tally,
};
use agent_model::{Epoch, NodeId, ReplicaStep};
use proptest::prelude::*;

use super::super::tests::{START, book, ended, hear, held, moment, report, submission};
use super::super::{Standing, Submission};
use super::*;
use crate::store::{Document, Loaded};

fn name(text: &str) -> JobId {
    text.parse().unwrap()
}

fn sweep_of(policy: Option<Policy>) -> Sweep {
    Sweep {
        space: Space([("lr".to_owned(), Distribution::Uniform { min: 0.0, max: 1.0 })].into()),
        sampling: Sampling::usual(),
        objective: Objective { goal: Goal::Maximize, metric: "acc".to_owned() },
        policy,
        timeout: None,
        given: BTreeMap::new(),
        extends: None,
    }
}

fn bandit() -> Option<Policy> {
    Some(Policy { kind: PolicyKind::BanditAmount(0.2), every: 1, delay: 0 })
}

fn submit(job: &str, array: &str, sweep: Sweep) -> Submission {
    let one = submission(job, Priority::Medium, 3);
    let draft = JobDraft {
        array: Some(array.parse::<Array>().unwrap()),
        sweep: Some(Box::new(sweep)),
        command: "t --lr ${{search_space.lr}}".into(),
        ..JobDraft::from(one.spec)
    };
    Submission { spec: draft.validate().unwrap(), ..one }
}

/// What a trial logged, from its first value on.
fn logged(values: &[f64]) -> Logged {
    let mut tally = Tally::new(Goal::Maximize, 1);
    let points: Vec<CurvePoint> = values.iter().filter_map(|value| tally.log(*value)).collect();
    Logged { anew: true, tally, points, names: BTreeSet::from(["loss".to_owned()]), is_over: false }
}

fn see(book: &mut Book, trial: &str, values: &[f64]) {
    let replica = book.job(&name(trial)).unwrap().replica(0);
    book.observe(&replica, logged(values), moment(1, START));
}

fn end(book: &mut Book, trial: &str, verdict: Verdict) {
    let (node, now): (NodeId, _) = ("box".parse().unwrap(), moment(1, START));
    let replica = book.job(&name(trial)).unwrap().replica(0);
    assert_eq!(book.settle(&replica, &node, ended(verdict, None), now), Standing::Open, "{trial}");
    book.schedule(now);
}

fn values(book: &Book, trial: &str) -> Values {
    book.job(&name(trial)).unwrap().trial.as_ref().unwrap().values.clone()
}

fn told(book: &Book, job: &str) -> String {
    let events = book.changes().events.into_iter().filter(|event| event.job == name(job));
    events.map(|event| event.text).collect::<Vec<_>>().join("\n")
}

/// A controller that loads what this one has written: jobs that ended are trials on disk.
fn restarted(book: &Book) -> Book {
    let changes = book.changes();
    let (jobs, ended): (Vec<_>, Vec<_>) =
        changes.jobs.iter().map(|job| (**job).clone()).partition(|job| !job.state.is_terminal());
    let json = |job: &JobRecord| serde_json::from_str(&serde_json::to_string(job).unwrap()).unwrap();
    let loaded = Loaded {
        jobs: jobs.iter().map(json).collect(),
        trials: ended.iter().filter_map(|job| Some((job.task()?.0, json(job)))).collect(),
        documents: changes
            .documents
            .into_iter()
            .filter(|one| matches!(one, Document::Node(_) | Document::Life(_)))
            .collect(),
        last_seq: 100,
        ..Loaded::default()
    };
    let terms = agent_model::lease::Terms::default();
    Book::new(loaded, std::time::Duration::from_secs(15), terms, 2, moment(1, START).boot)
}

#[test]
fn test_a_trial_has_its_values_from_the_commit_that_places_it_and_for_ever() {
    let (mut book, now) = (book(2, START), moment(1, START));
    book.submit(submit("s", "0-4", sweep_of(None)), now).unwrap();
    book.schedule(now);
    let drawn = [values(&book, "s--0"), values(&book, "s--1")];
    assert_ne!(drawn[0], drawn[1]);
    let first = book.job(&name("s--0")).unwrap();
    let lr = drawn[0]["lr"].to_string();
    assert_eq!(first.spec.command, format!("t --lr {lr}"));
    assert_eq!(first.spec.environment_variables["AZUREML_SWEEP_lr"], lr);
    assert!(told(&book, "s").contains(&format!("trial 0: lr={lr}")), "{}", told(&book, "s"));
    assert_eq!(values(&restarted(&book), "s--0"), drawn[0]);
    // A retry keeps them.
    let (node, replica) = ("box".parse().unwrap(), first.replica(0));
    let fault = Fault::new(Code::RunLost, "gone");
    book.settle(&replica, &node, ended(Verdict::Failed, Some(fault)), now);
    assert_eq!(book.job(&name("s--0")).unwrap().state, JobState::Queued);
    assert_eq!(values(&book, "s--0"), drawn[0]);
}

#[test]
fn test_a_policy_ends_a_trial_with_its_numbers_on_record_before_its_node_hears_of_it() {
    let (mut book, now) = (book(3, START), moment(1, START));
    book.submit(submit("s", "0-2", sweep_of(bandit())), now).unwrap();
    book.schedule(now);
    book.retire();
    see(&mut book, "s--0", &[0.9]);
    assert!(!book.is_urgent(), "what is logged needs no commit");
    see(&mut book, "s--1", &[0.1]);
    assert!(book.is_urgent());
    let trial = book.job(&name("s--1")).unwrap();
    assert_eq!(trial.state, JobState::Finalizing(Verdict::Canceled));
    let stop = trial.trial.as_ref().unwrap().stop.clone().unwrap();
    assert_eq!((stop.interval, stop.had, stop.needed), (1, Some(0.1), 0.7));
    let changed = book
        .changes()
        .jobs
        .iter()
        .any(|job| job.id == name("s--1") && job.trial.as_ref().unwrap().stop.is_some());
    assert!(changed, "it is written with the order");
    assert!(
        told(&book, "s--1").contains("canceled by the policy bandit at interval 1"),
        "{}",
        told(&book, "s--1")
    );
    // It says no more, whatever it logs, and the others go on.
    see(&mut book, "s--1", &[0.1, 0.1]);
    assert_eq!(told(&book, "s").matches("is ended by").count(), 1);
    end(&mut book, "s--1", Verdict::Canceled);
    end(&mut book, "s--0", Verdict::Completed);
    see(&mut book, "s--2", &[0.95]);
    end(&mut book, "s--2", Verdict::Failed);
    let sweep = book.job(&name("s")).unwrap();
    assert_eq!((sweep.state, sweep.best.unwrap().trial), (JobState::Completed, 0));
    let stored = book.job(&name("s--0")).unwrap().trial.clone().unwrap();
    assert_eq!(
        (stored.curve.count, stored.curve.points.len()),
        (1, 1),
        "an ended trial has all that it logged"
    );
}

#[test]
fn test_after_a_restart_trials_are_compared_with_those_that_ended_before() {
    let (mut book, now) = (book(1, START), moment(1, START));
    book.submit(submit("s", "0-2", sweep_of(bandit())), now).unwrap();
    book.schedule(now);
    see(&mut book, "s--0", &[0.5, 0.9]);
    end(&mut book, "s--0", Verdict::Completed);
    assert_eq!(book.job(&name("s--1")).unwrap().state, JobState::Preparing);
    let mut book = restarted(&book);
    let trials = || ["s--0", "s--1", "s--2"].map(|trial| book.job(&name(trial)).is_some());
    assert_eq!(trials(), [false, true, false], "no trial is made again");
    // What it had logged before counts as judged; what comes now is compared.
    see(&mut book, "s--1", &[0.1]);
    assert_eq!(book.job(&name("s--1")).unwrap().state, JobState::Preparing);
    let replica = book.job(&name("s--1")).unwrap().replica(0);
    let mut tally = Tally::new(Goal::Maximize, 1);
    tally.log(0.1);
    let point = tally.log(0.1);
    let more = Logged {
        anew: false,
        tally,
        points: point.into_iter().collect(),
        names: BTreeSet::new(),
        is_over: false,
    };
    book.observe(&replica, more, now);
    let stop = book.job(&name("s--1")).unwrap().trial.as_ref().unwrap().stop.clone().unwrap();
    assert_eq!((stop.interval, stop.needed), (2, 0.7));
}

#[test]
fn test_what_an_earlier_attempt_logs_late_does_not_count() {
    let (mut book, now) = (book(1, START), moment(1, START));
    book.submit(submit("s", "0-1", sweep_of(bandit())), now).unwrap();
    book.schedule(now);
    let replica = book.job(&name("s--0")).unwrap().replica(0);
    let stale = ReplicaId { epoch: Epoch(replica.epoch.0 + 1), ..replica };
    book.observe(&stale, logged(&[0.9]), now);
    assert_eq!(book.job(&name("s--0")).unwrap().trial.as_ref().unwrap().curve.count, 0);
}

#[test]
fn test_a_metric_that_nobody_logs_is_told_after_the_first_trial_and_is_the_fault_of_the_sweep() {
    let (mut book, now) = (book(1, START), moment(1, START));
    book.submit(submit("s", "0-1", sweep_of(None)), now).unwrap();
    book.schedule(now);
    see(&mut book, "s--0", &[]);
    end(&mut book, "s--0", Verdict::Completed);
    let said = "trial 0 completed and logged no metric `acc`";
    assert!(told(&book, "s").contains(said) && told(&book, "s").contains("`loss`"), "{}", told(&book, "s"));
    see(&mut book, "s--1", &[]);
    end(&mut book, "s--1", Verdict::Completed);
    assert_eq!(told(&book, "s").matches("logged no metric `acc`").count(), 1);
    let sweep = book.job(&name("s")).unwrap();
    let fault = sweep.outcome.as_ref().unwrap().fault.clone().unwrap();
    assert_eq!((sweep.state, fault.code), (JobState::Failed, Code::MetricMissing));
    assert_eq!(fault.why, ["they logged `loss`"]);
}

#[test]
fn test_a_cancel_leaves_no_trial() {
    let (mut book, now) = (book(2, START), moment(1, START));
    book.submit(submit("s", "0-9", sweep_of(bandit())), now).unwrap();
    book.schedule(now);
    book.cancel(&name("s"), "ada", now).unwrap();
    for trial in ["s--0", "s--1"] {
        assert_eq!(book.job(&name(trial)).unwrap().state, JobState::Finalizing(Verdict::Canceled));
        end(&mut book, trial, Verdict::Canceled);
    }
    let sweep = book.job(&name("s")).unwrap();
    assert_eq!(sweep.state, JobState::Canceled);
    assert!(book.job(&name("s--2")).is_none());
}

#[test]
fn test_a_sweep_ends_its_trials_when_its_time_is_over() {
    let (mut book, now) = (book(1, START), moment(1, START));
    let timeout = Some(std::time::Duration::from_secs(60));
    book.submit(submit("s", "0-9", Sweep { timeout, ..sweep_of(None) }), now).unwrap();
    assert_eq!(book.next_sweep_end(now), None, "it has not begun");
    book.schedule(now);
    let due = book.next_sweep_end(now).unwrap();
    assert_eq!(due.since(now.boot).as_secs(), 60);
    let late = Moment { wall: now.wall + std::time::Duration::from_secs(60), boot: due };
    book.expire_sweeps(now);
    assert_eq!(book.job(&name("s--0")).unwrap().state, JobState::Preparing);
    book.expire_sweeps(late);
    assert_eq!(book.next_sweep_end(late), None);
    assert_eq!(book.job(&name("s--0")).unwrap().state, JobState::Finalizing(Verdict::Canceled));
    end(&mut book, "s--0", Verdict::Canceled);
    let fault = book.job(&name("s")).unwrap().outcome.as_ref().unwrap().fault.clone().unwrap();
    assert_eq!(fault.code, Code::TimeLimit);
}

#[test]
fn test_given_values_are_taken_and_a_grid_is_worked_off_in_order() {
    let (mut book, now) = (book(3, START), moment(1, START));
    let given: Values = [("lr".to_owned(), Scalar::Number(0.25))].into();
    let sweep = Sweep { given: [(1, given.clone())].into(), ..sweep_of(None) };
    book.submit(submit("s", "1,4", sweep), now).unwrap();
    book.schedule(now);
    assert_eq!(values(&book, "s--1"), given);
    assert_ne!(values(&book, "s--4"), given);
}

#[test]
fn test_a_record_of_the_release_before_is_read_and_an_array_is_written_as_it_was() {
    let (mut book, now) = (book(1, START), moment(1, START));
    let array = submission("a", Priority::Medium, 1);
    let draft = JobDraft { array: Some("0-3".parse().unwrap()), ..JobDraft::from(array.spec) };
    book.submit(Submission { spec: draft.validate().unwrap(), ..array }, now).unwrap();
    book.schedule(now);
    for job in book.changes().jobs {
        let text = serde_json::to_string(&*job).unwrap();
        assert!(!["sweep", "trial", "best"].iter().any(|key| text.contains(&format!("\"{key}\""))), "{text}");
        let back: JobRecord = serde_json::from_str(&text).unwrap();
        assert_eq!((&back.tasks, &back.trial, back.best), (&job.tasks, &None, None));
    }
}

/// A controller, one node, and the disk; trials log, fail, are canceled, and the controller is killed.
struct World {
    book: Book,
    disk: BTreeMap<JobId, JobRecord>,
    seconds: u64,
    /// What was placed, with the values it had, as the node saw it.
    ran: BTreeMap<JobId, Values>,
    /// What each attempt of a trial has logged.
    logs: BTreeMap<ReplicaId, Vec<f64>>,
    folded: BTreeMap<ReplicaId, (Tally, usize)>,
    stops: BTreeMap<JobId, String>,
}

impl World {
    fn new(slots: u32) -> World {
        let mut world = World {
            book: book(slots, START),
            disk: BTreeMap::new(),
            seconds: 1,
            ran: BTreeMap::new(),
            logs: BTreeMap::new(),
            folded: BTreeMap::new(),
            stops: BTreeMap::new(),
        };
        let now = world.now();
        world.book.submit(submit("s", "0-7%3", sweep_of(bandit())), now).unwrap();
        world.commit();
        world
    }

    fn now(&self) -> Moment {
        moment(self.seconds, START)
    }

    fn commit(&mut self) {
        let now = self.now();
        self.book.schedule(now);
        for job in self.book.changes().jobs {
            let job: JobRecord = serde_json::from_str(&serde_json::to_string(&*job).unwrap()).unwrap();
            if let Some(trial) = &job.trial {
                if job.state.is_placed() {
                    let drawn = self.ran.entry(job.id.clone()).or_insert_with(|| trial.values.clone());
                    assert_eq!(*drawn, trial.values, "{} was drawn again", job.id);
                }
                if let Some(stop) = &trial.stop {
                    let first = self.stops.entry(job.id.clone()).or_insert_with(|| stop.to_string());
                    assert_eq!(*first, stop.to_string(), "{} was ended twice", job.id);
                    let ending = matches!(
                        job.state,
                        JobState::Finalizing(Verdict::Canceled) | JobState::NotResponding(_)
                    );
                    assert!(ending || job.state.is_terminal(), "{} is {}", job.id, job.state);
                }
            }
            self.disk.insert(job.id.clone(), job);
        }
        self.book.retire();
    }

    fn placed(&self) -> Vec<JobRecord> {
        let placed = self.book.jobs().filter(|job| job.is_task && job.state.is_placed());
        placed.map(|job| (**job).clone()).collect()
    }

    /// Tells the controller what a replica has logged since the last time, as its archive would.
    fn tell(&mut self, replica: &ReplicaId) {
        let values = self.logs.get(replica).cloned().unwrap_or_default();
        let anew = !self.folded.contains_key(replica);
        let (tally, read) = self.folded.entry(replica.clone()).or_insert((Tally::new(Goal::Maximize, 1), 0));
        let points: Vec<CurvePoint> = values[*read..].iter().filter_map(|value| tally.log(*value)).collect();
        *read = values.len();
        let logged = Logged { anew, tally: *tally, points, names: BTreeSet::new(), is_over: false };
        let now = self.now();
        self.book.observe(replica, logged, now);
    }

    fn end(&mut self, job: &JobRecord, verdict: Verdict) {
        let (now, replica) = (self.now(), job.replica(0));
        self.tell(&replica);
        let fault = (verdict == Verdict::Failed).then(|| Fault::new(Code::RunLost, "x"));
        self.book.settle(&replica, &"box".parse().unwrap(), ended(verdict, fault), now);
    }

    fn restart(&mut self, slots: u32) {
        let open = self.disk.values().filter(|job| !job.state.is_terminal()).cloned().collect();
        let trials = self.disk.values().filter(|job| job.is_task && job.state.is_terminal());
        let trials = trials.map(|job| (name("s"), job.clone())).collect();
        let documents = self.book.nodes().map(|node| Document::Node(Box::new(node.record.clone()))).collect();
        let last_seq = self.disk.values().map(|job| job.seq).max().unwrap_or_default();
        let loaded = Loaded { jobs: open, trials, documents, last_seq, ..Loaded::default() };
        let terms = agent_model::lease::Terms::default();
        self.book = Book::new(loaded, std::time::Duration::from_secs(15), terms, 1000, self.now().boot);
        self.folded.clear();
        self.book.link(|_| true);
        let runs = self.placed().iter().map(|job| held(job.replica(0), ReplicaStep::Running)).collect();
        let now = self.now();
        hear(&mut self.book, report(slots, "b1", runs), now);
    }
}

proptest! {
    #[test]
    fn test_no_trial_is_drawn_made_or_ended_twice_whatever_is_killed(
        slots in 1_u32..4,
        steps in proptest::collection::vec((0_u8..10, 0_usize..4, 0_u32..10), 0..80),
    ) {
        let mut world = World::new(slots);
        for (step, which, value) in steps {
            world.seconds += 1;
            let placed = world.placed();
            let job = placed.get(which % placed.len().max(1)).cloned();
            match (step, job) {
                (0..=4, Some(job)) => {
                    let replica = job.replica(0);
                    world.logs.entry(replica.clone()).or_default().push(f64::from(value) / 10.0);
                    world.tell(&replica);
                }
                (5, Some(job)) if !matches!(job.state, JobState::Finalizing(_)) => world.end(&job, Verdict::Completed),
                (6, Some(job)) => world.end(&job, Verdict::Failed),
                (7, _) => world.seconds += 20,
                (8, _) => world.restart(slots),
                (_, Some(job)) if matches!(job.state, JobState::Finalizing(_)) => world.end(&job, Verdict::Canceled),
                _ => {}
            }
            world.commit();
        }
        for _ in 0..60 {
            world.seconds += 20;
            for job in world.placed() {
                let canceled = matches!(job.state, JobState::Finalizing(_));
                world.end(&job, if canceled { Verdict::Canceled } else { Verdict::Completed });
            }
            world.commit();
        }
        let trials: Vec<&JobRecord> = world.disk.values().filter(|job| job.is_task).collect();
        prop_assert_eq!(trials.len(), 8);
        prop_assert!(trials.iter().all(|job| job.state.is_terminal()));
        for job in trials {
            let trial = job.trial.as_ref().unwrap();
            let logged = world.logs.get(&job.replica(0)).map_or(0, Vec::len);
            prop_assert_eq!(trial.curve.count as usize, logged, "{} lost what it logged", job.id);
            prop_assert_eq!(trial.stop.is_some(), world.stops.contains_key(&job.id));
        }
        let sweep = &world.disk[&name("s")];
        prop_assert!(sweep.state.is_terminal());
        let completed = |job: &&JobRecord| job.is_task && job.state == JobState::Completed;
        let bests = world.disk.values().filter(completed).filter_map(|job| job.trial.as_ref()?.curve.best);
        prop_assert_eq!(sweep.best.map(|best| best.value), bests.reduce(f64::max));
    }
}

/// Prints what a point costs; the time is not asserted, that no commit is needed is.
#[test]
fn test_what_trials_log_costs_no_commit() {
    for (trials, points) in [(10_u32, 1000_usize), (100, 1000), (1000, 100)] {
        let (mut book, now) = (book(trials, START), moment(1, START));
        let median = Policy { kind: PolicyKind::MedianStopping, every: 1, delay: 0 };
        book.submit(submit("s", &format!("0-{}", trials - 1), sweep_of(Some(median))), now).unwrap();
        book.schedule(now);
        book.retire();
        let replicas: Vec<ReplicaId> =
            (0..trials).map(|index| book.job(&name(&format!("s--{index}"))).unwrap().replica(0)).collect();
        let mut tallies = vec![Tally::new(Goal::Maximize, 1); replicas.len()];
        let begun = std::time::Instant::now();
        for step in 0..points {
            for (replica, tally) in replicas.iter().zip(&mut tallies) {
                // All are alike, so that none is worse than the median.
                let point = tally.log(step as f64);
                let points = point.into_iter().collect();
                book.observe(
                    replica,
                    Logged { anew: step == 0, tally: *tally, points, names: BTreeSet::new(), is_over: false },
                    now,
                );
            }
        }
        let spent = begun.elapsed() / (trials * points as u32);
        println!("{trials} trials x {points} points: {spent:?} a point, as built for tests");
        assert!(!book.is_urgent() && book.changes().jobs.is_empty() && book.changes().events.is_empty());
    }
}
