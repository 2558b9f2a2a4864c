use std::time::Duration;

use agent_model::job::Resources;
use agent_model::lease::Terms;
use agent_model::machine::{Eligibility, Liveness};
use agent_model::node::{Inventory, Load};
use agent_model::protocol::orders::Obeyed;
use agent_model::{Boot, Code, Fault, JobDraft, Outcome, ReplicaStep, Timestamp, Verdict};

use super::*;
use crate::store::tests::job;
use crate::store::{Document, Loaded, Missing, NodeRecord};

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
        breaker: Default::default(),
    }
}

/// A controller that starts from these jobs and nodes after its database was mended.
fn mended(jobs: Vec<JobRecord>, nodes: &[&str]) -> Book {
    let last_seq = jobs.len() as u64;
    let documents = nodes.iter().map(|name| Document::Node(Box::new(node(name)))).collect();
    let missing = Missing::Later;
    let loaded = Loaded { jobs, documents, last_seq, mended: true, missing, ..Loaded::default() };
    Book::new(loaded, Duration::from_secs(15), Terms::default(), 7, now(0).boot)
}

fn holding(replica: &str, step: ReplicaStep) -> Held {
    Held {
        replica: replica.parse().unwrap(),
        step,
        detail: String::new(),
        started_at: Some(Timestamp(5)),
        alive: true,
        described: None,
        ready: None,
        preempted: false,
    }
}

/// What a node shows that was given something by a life that the database never heard of.
fn news(spec: &JobSpec) -> Option<Described> {
    shown(spec, Ok(PlacedAt { life: "lost".into(), commit: 1 }))
}

fn shown(spec: &JobSpec, proof: Result<PlacedAt, Doubt>) -> Option<Described> {
    Some(Described { spec: Some(spec.clone()), proof })
}

fn report(from: &str, at: u64, replicas: Vec<Held>) -> Report {
    Report {
        node: from.parse().unwrap(),
        boot_id: "b".into(),
        sent: Boot(Duration::from_secs(at)),
        obeyed: None,
        inventory: Some(Inventory { slots: 2, ..Inventory::default() }),
        load: Load::default(),
        replicas,
        preemption: None,
        own: false,
    }
}

/// A node reports, and once more when it has heard the orders that answer the first report.
fn hear(book: &mut Book, from: &str, at: u64, replicas: Vec<Held>) {
    let mut report = report(from, at, replicas);
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
            Desired::Run { .. } => "run",
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
    let told = Held { described: news(&spec), ..holding("train.3.0", ReplicaStep::Running) };
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
        let told = Held { described: news(&spec), ..holding(replica, ReplicaStep::Running) };
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
        placed: None,
        adopted: false,
    }];
    for old_first in [true, false] {
        let mut book = mended(vec![waiting.clone(), placed.clone()], &["old", "box"]);
        if old_first {
            hear(&mut book, "old", 1, Vec::new());
        }
        let described = news(&waiting.spec);
        let replicas = [("a.1.0", ReplicaStep::Running), ("b.2.0", ReplicaStep::Launching)];
        let replicas =
            replicas.map(|(replica, step)| Held { described: described.clone(), ..holding(replica, step) });
        hear(&mut book, "box", 2, replicas.into());
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
    let report = report("far", 2, vec![holding("a.1.0", ReplicaStep::Running)]);
    book.report(&report, now(2));
    assert!(waits(&book).contains("far must first say"), "what it was given is still asked for");
    let spec = job("a", 1).spec;
    let told = Held { described: news(&spec), ..holding("a.1.0", ReplicaStep::Running) };
    hear(&mut book, "far", 3, vec![told]);
    assert_eq!((orders(&book, "box"), orders(&book, "far").len()), (vec![], 1), "it runs there already");

    let mut book = mended(vec![job("a", 1)], &["far", "box"]);
    hear(&mut book, "box", 1, Vec::new());
    book.expire(now(100));
    hear(&mut book, "box", 101, Vec::new());
    book.declare_lost(&"far".parse().unwrap(), "uid 0", now(102));
    hear(&mut book, "box", 103, Vec::new());
    assert_eq!(orders(&book, "box"), [("a.1001.0".into(), "run")], "above a gap");
    let job = book.job(&"a".parse().unwrap()).unwrap();
    assert_eq!(job.epoch.0 - job.uncharged, 1, "the gap is no failure");
}

#[test]
fn test_two_nodes_with_the_same_attempt_are_left_to_a_person() {
    let mut book = mended(vec![job("a", 1)], &["box"]);
    hear(&mut book, "box", 1, Vec::new());
    hear(&mut book, "box", 2, vec![holding("a.1001.0", ReplicaStep::Running)]);
    hear(&mut book, "stray", 3, vec![holding("a.1001.0", ReplicaStep::Running)]);
    assert_eq!(orders(&book, "box"), [("a.1001.0".into(), "run")]);
    assert_eq!(orders(&book, "stray"), [("a.1001.0".into(), "describe")]);
    let told =
        book.changes().events.into_iter().any(|event| event.text.contains("stray has attempt 1001 too"));
    assert!(told);
}

#[test]
fn test_name_of_a_stranger_is_taken() {
    let mut book = mended(Vec::new(), &[]);
    hear(&mut book, "box", 1, vec![holding("train.1.0", ReplicaStep::Running)]);
    assert_eq!(book.submit(submission("train"), now(2)), None, "it is still asked for");
}

fn submission(id: &str) -> super::super::Submission {
    super::super::Submission {
        request: format!("r-{id}"),
        id: id.parse().unwrap(),
        spec: job(id, 1).spec,
        after: agent_model::Epoch::default(),
        earlier: Vec::new(),
    }
}

/// A book of one job that runs on `box` as attempt 1, after a start at which nothing was lost.
fn sound() -> Book {
    let mut placed = job("a", 1);
    (placed.state, placed.epoch) = (JobState::Running, agent_model::Epoch(1));
    let replica = ReplicaRecord::on(&"box".parse().unwrap(), "b");
    placed.replicas = vec![ReplicaRecord { step: Some(ReplicaStep::Running), ..replica }];
    let documents = ["box", "rogue"].map(|name| Document::Node(Box::new(node(name)))).into();
    let loaded = Loaded { jobs: vec![placed], documents, last_seq: 1, ..Loaded::default() };
    Book::new(loaded, Duration::from_secs(15), Terms::default(), 7, now(0).boot)
}

/// The unproved replicas of a node, each with the reason.
fn unproved(book: &Book, node: &str) -> Vec<(String, Doubt)> {
    let node = book.fleet.get(&node.parse().unwrap()).unwrap();
    node.unproved.iter().map(|one| (one.replica.to_string(), one.why.clone())).collect()
}

#[test]
fn test_what_is_not_proved_is_neither_adopted_nor_ended_and_takes_room_there() {
    let spec = job("a", 1).spec;
    let own = PlacedAt { life: format!("{:016x}", 7), commit: 1 };
    let doubts = [
        (None, Doubt::Silent),
        (shown(&spec, Err(Doubt::NoGrant)), Doubt::NoGrant),
        (shown(&spec, Err(Doubt::Grant("another node".into()))), Doubt::Grant("another node".into())),
        (shown(&spec, Ok(own)), Doubt::NoNews),
    ];
    for (described, doubt) in doubts {
        for replica in ["a.2.0", "planted.1.0"] {
            let mut book = sound();
            hear(&mut book, "box", 1, vec![holding("a.1.0", ReplicaStep::Running)]);
            let told = || Held { described: described.clone(), ..holding(replica, ReplicaStep::Running) };
            hear(&mut book, "rogue", 1, vec![told()]);
            book.unresolved().iter().for_each(|unasked| book.resolve(unasked, None));
            hear(&mut book, "rogue", 2, vec![told()]);
            assert_eq!(unproved(&book, "rogue"), [(replica.to_owned(), doubt.clone())]);
            assert_eq!(orders(&book, "rogue"), [(replica.to_owned(), "describe")], "it goes on");
            assert_eq!(orders(&book, "box"), [("a.1.0".into(), "run")], "and so does the real one");
            assert!(book.job(&"planted".parse().unwrap()).is_none());
            let replica: ReplicaId = replica.parse().unwrap();
            let rogue = "rogue".parse().unwrap();
            assert_ne!(book.standing(&replica, &rogue), Standing::Open, "no outcome of it counts");
            // It takes one of the two slots, and no job of its name comes there.
            let (rooms, _) = book.rooms(now(3));
            let room = rooms.iter().find(|room| room.node == rogue).unwrap();
            assert_eq!((room.free_slots(), room.barred.contains(&replica.job)), (1, true));
            // Other jobs and the name are free.
            book.submit(submission("other"), now(3)).unwrap();
            let named = book.submit(submission("planted"), now(3));
            assert!(named.is_some());
        }
    }
}

#[test]
fn test_an_administrator_adopts_or_ends_what_is_not_proved() {
    let spec = job("a", 1).spec;
    let (rogue, planted): (NodeId, ReplicaId) = ("rogue".parse().unwrap(), "planted.3.0".parse().unwrap());
    let told = || Held {
        described: shown(&spec, Err(Doubt::NoGrant)),
        ..holding("planted.3.0", ReplicaStep::Running)
    };
    let doubted = || {
        let mut book = sound();
        hear(&mut book, "rogue", 1, vec![told()]);
        book.resolve(&planted, None);
        hear(&mut book, "rogue", 2, vec![told()]);
        book
    };
    let mut book = doubted();
    assert!(!book.judge(&"box".parse().unwrap(), &planted, Judgement::End), "another node");
    assert!(book.judge(&rogue, &planted, Judgement::End));
    assert_eq!((orders(&book, "rogue"), unproved(&book, "rogue")), (vec![], vec![]));

    let mut book = doubted();
    assert!(book.judge(&rogue, &planted, Judgement::Adopt));
    hear(&mut book, "rogue", 3, vec![told()]);
    let adopted = book.job(&planted.job).unwrap();
    assert_eq!((adopted.epoch.0, adopted.replicas[0].adopted), (3, true));
    assert_eq!(orders(&book, "rogue"), [("planted.3.0".into(), "run")]);
    assert!(!book.judge(&rogue, &planted, Judgement::End), "it is a job now");
}

#[test]
fn test_what_is_adopted_before_its_command_was_started_is_begun_anew() {
    let spec = job("a", 1).spec;
    let mut book = mended(Vec::new(), &[]);
    let held = Held { described: news(&spec), ..holding("train.3.0", ReplicaStep::Building) };
    hear(&mut book, "box", 1, vec![held.clone()]);
    book.resolve(&"train.3.0".parse().unwrap(), None);
    hear(&mut book, "box", 2, vec![held]);
    assert_eq!(orders(&book, "box"), [("train.3.0".into(), "stop")]);
    let canceled = super::super::without_run(Verdict::Canceled, None, Timestamp(9));
    book.settle(&"train.3.0".parse().unwrap(), &"box".parse().unwrap(), canceled, now(3));
    let job = book.job(&"train".parse().unwrap()).unwrap();
    assert_eq!((job.state, job.epoch.0, job.uncharged), (JobState::Queued, 3, 3), "no attempt is charged");
    book.retire();
    hear(&mut book, "box", 4, Vec::new());
    let job = book.job(&"train".parse().unwrap()).unwrap();
    assert!(job.epoch.0 > 1000 && !job.replicas[0].adopted && job.replicas[0].placed.is_some(), "{job:?}");
}

#[test]
fn test_a_gang_of_which_one_rank_proves_itself_waits_for_the_other() {
    let resources = Resources { nodes: 2, ..Resources::default() };
    let spec = JobDraft { command: "true".into(), resources, ..JobDraft::default() }.validate().unwrap();
    let mut book = mended(Vec::new(), &[]);
    for (at, node, replica, described) in
        [(1, "a", "g.4.0", news(&spec)), (2, "b", "g.4.1", shown(&spec, Err(Doubt::NoGrant)))]
    {
        let held = Held { described, ..holding(replica, ReplicaStep::Running) };
        hear(&mut book, node, at, vec![held.clone()]);
        book.unresolved().iter().for_each(|unasked| book.resolve(unasked, None));
        hear(&mut book, node, at, vec![held]);
    }
    assert_eq!(
        (orders(&book, "a"), orders(&book, "b")),
        (vec![("g.4.0".into(), "run")], vec![("g.4.1".into(), "describe")])
    );
    assert_eq!(unproved(&book, "b"), [("g.4.1".into(), Doubt::NoGrant)]);
}

#[test]
fn test_of_two_nodes_that_show_one_attempt_the_first_has_it_and_the_other_stays_unproved() {
    let spec = job("a", 1).spec;
    let mut book = mended(Vec::new(), &[]);
    for (at, node) in [(1, "first"), (2, "second")] {
        let held = Held { described: news(&spec), ..holding("x.2.0", ReplicaStep::Running) };
        hear(&mut book, node, at, vec![held.clone()]);
        book.unresolved().iter().for_each(|unasked| book.resolve(unasked, None));
        hear(&mut book, node, at, vec![held]);
    }
    assert_eq!(orders(&book, "first"), [("x.2.0".into(), "run")]);
    assert_eq!(orders(&book, "second"), [("x.2.0".into(), "describe")]);
    assert_eq!(unproved(&book, "second"), [("x.2.0".into(), Doubt::Contradicts)]);
    assert!(!book.judge(&"second".parse().unwrap(), &"x.2.0".parse().unwrap(), Judgement::Adopt));
    assert!(book.judge(&"second".parse().unwrap(), &"x.2.0".parse().unwrap(), Judgement::End));
    assert_eq!(orders(&book, "second"), []);
}

#[test]
fn test_the_controllers_own_node_is_believed() {
    let mut book = sound();
    let report = Report { own: true, ..report("rogue", 1, vec![holding("a.2.0", ReplicaStep::Running)]) };
    book.report(&report, now(1));
    assert_eq!(book.job(&"a".parse().unwrap()).unwrap().epoch.0, 2);
    assert!(!book.job(&"a".parse().unwrap()).unwrap().replicas[0].adopted);
}
