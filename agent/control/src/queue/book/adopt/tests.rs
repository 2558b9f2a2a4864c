use std::time::Duration;

use agent_model::job::Resources;
use agent_model::lease::Terms;
use agent_model::machine::{Eligibility, Liveness};
use agent_model::node::{Inventory, Load};
use agent_model::protocol::orders::Obeyed;
use agent_model::{Boot, Code, Fault, JobDraft, Outcome, ReplicaStep, Timestamp, Verdict};

use super::*;
use crate::store::tests::job;
use crate::store::{Document, Loaded, NodeRecord};

fn now(seconds: u64) -> Moment {
    Moment { wall: Timestamp(seconds * 1000), boot: Boot(Duration::from_secs(1000 + seconds)) }
}

fn node(name: &str) -> NodeRecord {
    NodeRecord {
        id: name.parse().unwrap(),
        boot_id: "b".into(),
        liveness: Liveness::Ready,
        eligibility: Eligibility::Open,
        last_seen: Timestamp(0),
        inventory: Inventory { slots: 2, ..Inventory::default() },
        preemption: Default::default(),
    }
}

/// A controller that starts from these jobs and nodes after its database was mended.
fn mended(jobs: Vec<JobRecord>, nodes: &[&str]) -> Book {
    let last_seq = jobs.len() as u64;
    let documents = nodes.iter().map(|name| Document::Node(Box::new(node(name)))).collect();
    let loaded = Loaded { jobs, documents, last_seq, mended: true };
    Book::new(loaded, Duration::from_secs(15), Terms::default(), 7, now(0).boot)
}

fn holding(replica: &str, step: ReplicaStep) -> Held {
    Held {
        replica: replica.parse().unwrap(),
        step,
        detail: String::new(),
        started_at: Some(Timestamp(5)),
        alive: true,
        spec: None,
        ready: None,
        preempted: false,
    }
}

/// A node reports, and once more when it has heard the orders that answer the first report.
fn hear(book: &mut Book, from: &str, at: u64, replicas: Vec<Held>) {
    let mut report = Report {
        node: from.parse().unwrap(),
        boot_id: "b".into(),
        sent: Boot(Duration::from_secs(at)),
        obeyed: None,
        inventory: Some(Inventory { slots: 2, ..Inventory::default() }),
        load: Load::default(),
        replicas,
        preemption: None,
    };
    book.report(&report, now(at));
    let orders = book.orders(&report.node);
    report.obeyed = Some(Obeyed { controller_epoch: orders.controller_epoch, answers: orders.answers });
    book.report(&report, now(at));
    book.link(|_| true);
    book.schedule(now(at));
}

fn orders(book: &Book, node: &str) -> Vec<(String, &'static str)> {
    let word = |order: Order| {
        let word = match order.desired {
            Desired::Run(..) => "run",
            Desired::Stop { .. } => "stop",
            Desired::Forget => "forget",
            Desired::Describe => "describe",
        };
        (order.replica.to_string(), word)
    };
    book.orders(&node.parse().unwrap()).list.into_iter().map(word).collect()
}

#[test]
fn test_job_without_any_record_is_asked_for_and_taken_over() {
    let mut book = mended(Vec::new(), &[]);
    hear(&mut book, "box", 1, vec![holding("train.3.0", ReplicaStep::Running)]);
    assert_eq!(orders(&book, "box"), [("train.3.0".into(), "describe")], "nothing is ended meanwhile");
    let unasked = book.unresolved();
    assert_eq!(unasked, ["train.3.0".parse().unwrap()]);
    book.resolve(&unasked[0], None);

    let spec = job("train", 1).spec;
    let told = Held { spec: Some(spec.clone()), ..holding("train.3.0", ReplicaStep::Running) };
    hear(&mut book, "box", 2, vec![told]);
    let known = book.job(&"train".parse().unwrap()).unwrap();
    assert_eq!((known.state, known.epoch.0, &known.spec), (JobState::Running, 3, &spec));
    assert_eq!(known.started_at, Some(Timestamp(5)));
    assert_eq!(orders(&book, "box"), [("train.3.0".into(), "run")]);
    assert!(book.is_urgent() && book.unresolved().is_empty());

    let id = "train.3.0".parse().unwrap();
    let outcome = Outcome {
        verdict: Verdict::Completed,
        ..super::super::without_run(Verdict::Completed, None, Timestamp(9))
    };
    assert_eq!(book.settle(&id, &"box".parse().unwrap(), outcome, now(3)), Standing::Open);
    assert_eq!(book.job(&"train".parse().unwrap()).unwrap().state, JobState::Completed);
}

#[test]
fn test_ranks_without_any_record_are_put_together_and_end_together() {
    let resources = Resources { nodes: 2, ..Resources::default() };
    let spec = JobDraft { command: "true".into(), resources, ..JobDraft::default() }.validate().unwrap();
    let mut book = mended(Vec::new(), &[]);
    for (at, (node, replica)) in (1..).zip([("a", "g.4.0"), ("b", "g.4.1")]) {
        hear(&mut book, node, at, vec![holding(replica, ReplicaStep::Running)]);
        book.unresolved().iter().for_each(|unasked| book.resolve(unasked, None));
        let told = Held { spec: Some(spec.clone()), ..holding(replica, ReplicaStep::Running) };
        hear(&mut book, node, at, vec![told]);
        assert_eq!(orders(&book, node), [(replica.to_owned(), "run")]);
    }
    let id = "g".parse().unwrap();
    assert_eq!(book.job(&id).unwrap().replicas.len(), 2);

    let outcome = |verdict, fault| super::super::without_run(verdict, fault, Timestamp(9));
    let failed = outcome(Verdict::Failed, Some(Fault::new(Code::CommandFailed, "exit 1")));
    let settle = |book: &mut Book, replica: &str, node: &str, outcome| {
        book.settle(&replica.parse().unwrap(), &node.parse().unwrap(), outcome, now(3))
    };
    assert_eq!(settle(&mut book, "g.4.1", "b", failed.clone()), Standing::Open);
    assert_eq!(settle(&mut book, "g.4.1", "b", failed), Standing::Settled, "it counts once");
    assert_eq!(orders(&book, "a"), [("g.4.0".into(), "stop")]);
    assert_eq!(book.job(&id).unwrap().state, JobState::Running, "the other rank runs still");
    assert_eq!(settle(&mut book, "g.4.0", "a", outcome(Verdict::Canceled, None)), Standing::Open);
    let job = book.job(&id).unwrap();
    let fault = job.outcome.as_ref().and_then(|outcome| outcome.fault.clone()).unwrap();
    assert_eq!((job.state, fault.what.as_str()), (JobState::Failed, "rank 1 of 2, on b: exit 1"));
}

#[test]
fn test_what_is_left_of_a_job_that_ended_is_no_news() {
    let mut book = mended(Vec::new(), &[]);
    hear(&mut book, "box", 1, vec![holding("done.2.0", ReplicaStep::Running)]);
    let mut ended = job("done", 1);
    (ended.state, ended.epoch) = (JobState::Completed, agent_model::Epoch(2));
    book.resolve(&"done.2.0".parse().unwrap(), Some(&ended));
    assert_eq!(orders(&book, "box"), []);
    hear(&mut book, "box", 2, vec![holding("done.2.0", ReplicaStep::Running)]);
    assert_eq!((orders(&book, "box"), book.unresolved()), (vec![], vec![]));
}

#[test]
fn test_later_attempt_than_the_record_counts_wherever_the_record_has_the_job() {
    let waiting = job("a", 1);
    let mut placed = job("b", 2);
    (placed.state, placed.epoch) = (JobState::Running, agent_model::Epoch(1));
    placed.replicas = vec![ReplicaRecord {
        end: None,
        rank: 0,
        node: "old".parse().unwrap(),
        boot_id: "b".into(),
        step: Some(ReplicaStep::Running),
        detail: String::new(),
        ready: None,
        preempted: false,
    }];
    for old_first in [true, false] {
        let mut book = mended(vec![waiting.clone(), placed.clone()], &["old", "box"]);
        if old_first {
            hear(&mut book, "old", 1, Vec::new());
        }
        let replicas = vec![holding("a.1.0", ReplicaStep::Running), holding("b.2.0", ReplicaStep::Building)];
        hear(&mut book, "box", 2, replicas);
        if !old_first {
            hear(&mut book, "old", 3, vec![holding("b.1.0", ReplicaStep::Running)]);
        }
        let of = |id: &str| book.job(&id.parse().unwrap()).map(|job| (job.state, job.epoch.0)).unwrap();
        assert_eq!(of("a"), (JobState::Running, 1));
        assert_eq!(of("b").1, 2);
        assert_eq!(orders(&book, "box"), [("a.1.0".into(), "run"), ("b.2.0".into(), "run")]);
        assert_eq!(orders(&book, "old"), [], "the earlier attempt is fenced");
    }
}

#[test]
fn test_nothing_is_placed_before_every_node_has_spoken() {
    let mut book = mended(vec![job("a", 1)], &["far", "box"]);
    hear(&mut book, "box", 1, Vec::new());
    let waits = |book: &Book| book.detail(book.job(&"a".parse().unwrap()).unwrap());
    assert!(waits(&book).contains("far must first say what runs there"), "{}", waits(&book));
    assert_eq!(orders(&book, "box"), []);
    hear(&mut book, "far", 2, vec![holding("a.1.0", ReplicaStep::Running)]);
    assert_eq!((orders(&book, "box"), orders(&book, "far").len()), (vec![], 1), "it runs there already");

    let mut book = mended(vec![job("a", 1)], &["far", "box"]);
    hear(&mut book, "box", 1, Vec::new());
    book.expire(now(100));
    hear(&mut book, "box", 101, Vec::new());
    book.declare_lost(&"far".parse().unwrap(), "uid 0", now(102));
    hear(&mut book, "box", 103, Vec::new());
    assert_eq!(orders(&book, "box"), [("a.1.0".into(), "run")]);
}

#[test]
fn test_two_nodes_with_the_same_attempt_are_left_to_a_person() {
    let mut book = mended(vec![job("a", 1)], &["box"]);
    hear(&mut book, "box", 1, Vec::new());
    hear(&mut book, "box", 2, vec![holding("a.1.0", ReplicaStep::Running)]);
    hear(&mut book, "stray", 3, vec![holding("a.1.0", ReplicaStep::Running)]);
    assert_eq!(orders(&book, "box"), [("a.1.0".into(), "run")]);
    assert_eq!(orders(&book, "stray"), [("a.1.0".into(), "describe")]);
    let told = book.changes().events.into_iter().any(|event| event.text.contains("stray has attempt 1 too"));
    assert!(told);
}

#[test]
fn test_name_of_a_stranger_is_taken() {
    let mut book = mended(Vec::new(), &[]);
    hear(&mut book, "box", 1, vec![holding("train.1.0", ReplicaStep::Running)]);
    let spec = job("train", 1).spec;
    let new = super::super::Submission {
        request: "r".into(),
        id: "train".parse().unwrap(),
        spec,
        owner: agent_model::Principal::Local { uid: 1 },
        after: agent_model::Epoch::default(),
    };
    assert_eq!(book.submit(new, now(2)), None);
}
