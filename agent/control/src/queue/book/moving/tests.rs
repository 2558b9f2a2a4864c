use std::time::Duration;

use agent_model::job::{Array, OnDisconnect, Predecessor, Priority, WantedEnd};
use agent_model::{Epoch, JobDraft, JobState, ReplicaStep, Timestamp, Verdict};

use super::super::tests::{START, book, ended, hear, held, moment, report};
use super::*;
use crate::store::tests::job;
use crate::store::{ArrayRecord, ReplicaRecord};

fn node() -> NodeId {
    "joiner".parse().unwrap()
}

fn with(name: &str, change: impl FnOnce(&mut JobDraft)) -> JobRecord {
    let mut draft = JobDraft { command: "true".into(), ..JobDraft::default() };
    change(&mut draft);
    JobRecord { spec: draft.validate().unwrap(), ..job(name, 1) }
}

fn running(name: &str) -> JobRecord {
    let replica = ReplicaRecord { step: Some(ReplicaStep::Running), ..ReplicaRecord::on(&node(), "b1") };
    let replaced = |draft: &mut JobDraft| draft.limits.on_disconnect = OnDisconnect::Replace;
    JobRecord { state: JobState::Running, epoch: Epoch(3), replicas: vec![replica], ..with(name, replaced) }
}

fn after(name: &str, first: &str) -> JobRecord {
    let predecessor = Predecessor { job: first.parse().unwrap(), end: WantedEnd::Completed };
    let waits_for = vec![predecessor.clone()];
    JobRecord { waits_for, ..with(name, |draft| draft.predecessors = vec![predecessor]) }
}

fn state(book: &Book, name: &str) -> Option<JobState> {
    book.job(&name.parse().unwrap()).map(|job| job.state)
}

/// The jobs that the other node of the fleet was given, in their order; each completes at once.
fn run_all(book: &mut Book, seconds: u64) -> Vec<String> {
    let (mut ran, other) = (Vec::new(), "box".parse().unwrap());
    for second in seconds..seconds + 20 {
        let now = moment(second, START);
        book.settle_predecessors(now);
        book.schedule(now);
        let placed = book.jobs().find(|job| job.replicas.iter().any(|replica| replica.node == other));
        let Some(placed) = placed.cloned() else { continue };
        ran.push(placed.id.to_string());
        book.settle(&placed.replica(0), &other, ended(Verdict::Completed, None), now);
        book.retire();
    }
    ran
}

#[test]
fn test_jobs_that_come_keep_their_order_and_come_once() {
    let mut book = book(1, START);
    let now = moment(1, START);
    let array: Array = "0-2".parse().unwrap();
    let mut tasks = ArrayRecord::new(&array, Epoch(0));
    tasks.begin(0);
    tasks.settle(0, Verdict::Completed, None);
    let array = JobRecord {
        state: JobState::Running,
        tasks: Some(Box::new(tasks)),
        ..with("array", |draft| draft.array = Some(array))
    };
    let late = JobRecord { not_before: Some(moment(9, START).wall), epoch: Epoch(1), ..job("late", 1) };
    let high = with("high", |draft| draft.priority = Priority::High);
    let held = JobRecord { held: Some("held by uid 1".into()), ..job("held", 1) };
    let jobs = vec![job("first", 1), after("second", "first"), late, array, high, held];
    assert_eq!(book.move_in(jobs.clone(), &node(), now), None);
    assert_eq!(book.move_in(jobs, &node(), now), None, "an answer that was lost");
    assert_eq!(run_all(&mut book, 2), ["high", "first", "second", "array--1", "array--2", "late"]);
    assert_eq!(state(&book, "held"), Some(JobState::Queued));
    assert_eq!(book.job(&"late".parse().unwrap()).unwrap().epoch, Epoch(2), "its attempts go on");
    assert_eq!(state(&book, "array"), Some(JobState::Completed));
}

#[test]
fn test_a_job_that_runs_is_there_before_its_node_and_goes_on_when_that_is_heard() {
    let mut book = book(1, START);
    assert_eq!(book.move_in(vec![running("runs")], &node(), moment(1, START)), None);
    let replica = running("runs").replica(0);
    assert_eq!(state(&book, "runs"), Some(JobState::Running));
    book.expire(moment(20, START));
    assert_eq!(state(&book, "runs"), Some(JobState::Running), "its node was never heard");
    let mut report = report(1, "b1", vec![held(replica.clone(), ReplicaStep::Running)]);
    report.node = node();
    hear(&mut book, report, moment(30, START));
    let job = book.job(&replica.job).unwrap();
    assert_eq!((job.state, job.epoch, job.replicas.len()), (JobState::Running, Epoch(3), 1));
    book.settle(&replica, &node(), ended(Verdict::Completed, None), moment(40, START));
    assert_eq!(state(&book, "runs"), Some(JobState::Completed));
}

#[test]
fn test_a_job_that_may_be_replaced_is_replaced_when_its_node_never_comes_and_others_are_not() {
    let mut book = book(2, START);
    let kept = JobRecord { spec: job("x", 1).spec, ..running("kept") };
    assert_eq!(book.move_in(vec![running("replaced"), kept], &node(), moment(1, START)), None);
    let later = moment(1, START + Duration::from_secs(300));
    book.expire(later);
    assert_eq!(state(&book, "kept"), Some(JobState::Running));
    assert_ne!(state(&book, "replaced"), Some(JobState::Running), "its lease on the machine is over");
}

#[test]
fn test_one_name_that_is_taken_keeps_all_out() {
    let mut book = book(1, START);
    let other = JobRecord { request: "another".into(), submitted_at: Timestamp(1), ..job("taken", 1) };
    let now = moment(1, START);
    assert_eq!(book.move_in(vec![other], &node(), now), None);
    let taken = book.move_in(vec![job("free", 1), job("taken", 2)], &node(), now);
    assert_eq!(taken.as_ref().map(JobId::as_str), Some("taken"));
    assert_eq!(state(&book, "free"), None);
}
