use std::time::Duration;

use agent_model::job::{Priority, Resources};
use agent_model::node::Inventory;
use agent_model::protocol::orders::Obeyed;
use agent_model::{JobDraft, JobState, Preemption, Timestamp, Verdict};

use super::super::tests::{START, ended, held, moment, report, submission};
use super::*;
use crate::store::{Document, Loaded};

const BOX: &str = "box";

/// Nodes with a slot each; each report is made after the orders before it were obeyed.
struct Bed {
    book: Book,
    seconds: u64,
}

impl Bed {
    fn new(nodes: &[&str]) -> Bed {
        let book = Book::new(Loaded::default(), Duration::from_secs(15), Terms::default(), 7, START);
        let mut bed = Bed { book, seconds: 1 };
        nodes.iter().for_each(|node| bed.hear(node, Vec::new(), None));
        bed.book.link(|_| true);
        bed
    }

    fn now(&self) -> Moment {
        moment(self.seconds, START)
    }

    /// A node reports what it holds, and in how many seconds it will be taken away.
    fn hear(&mut self, node: &str, replicas: Vec<Held>, goes: Option<u64>) {
        self.hear_in("b1", node, replicas, goes);
    }

    fn hear_in(&mut self, boot: &str, node: &str, replicas: Vec<Held>, goes: Option<u64>) {
        let id: NodeId = node.parse().unwrap();
        for _ in 0..2 {
            let orders = self.book.orders(&id);
            let sent = Boot(Duration::from_secs(50 + self.seconds));
            let preemption = goes.map(|seconds| Preemption {
                until: sent + Duration::from_secs(seconds),
                deadline: Timestamp::default(),
                reason: "reclaimed".into(),
            });
            let report = Report {
                node: id.clone(),
                sent,
                obeyed: Some(Obeyed { controller_epoch: orders.controller_epoch, answers: orders.answers }),
                inventory: Some(Inventory { slots: 1, gangs: true, ..Inventory::default() }),
                preemption,
                ..report(1, boot, replicas.clone())
            };
            self.book.report(&report, self.now());
        }
        self.book.link(|_| true);
        self.book.expire(self.now());
        self.book.schedule(self.now());
    }

    fn submit(&mut self, name: &str, attempts: u32, nodes: u32) -> JobId {
        let mut new = submission(name, Priority::Medium, attempts);
        let resources = Resources { nodes, ..Resources::default() };
        new.spec = JobDraft { resources, ..new.spec.into() }.validate().unwrap();
        let id = self.book.submit(new, self.now()).unwrap();
        self.book.schedule(self.now());
        id
    }

    fn job(&self, id: &JobId) -> JobRecord {
        (**self.book.job(id).unwrap()).clone()
    }

    fn running(&self, id: &JobId) -> Held {
        held(self.job(id).replica(0), ReplicaStep::Running)
    }

    fn detail(&self, id: &JobId) -> String {
        self.book.detail(&self.job(id))
    }

    fn settle(&mut self, id: &JobId, node: &str, code: Code) {
        let outcome = ended(Verdict::Failed, Some(Fault::new(code, "x")));
        let replica = self.job(id).replica(0);
        self.book.settle(&replica, &node.parse().unwrap(), outcome, self.now());
        self.book.schedule(self.now());
    }
}

#[test]
fn test_nothing_is_placed_on_a_machine_with_a_notice_until_it_is_withdrawn() {
    let mut bed = Bed::new(&[BOX]);
    bed.hear(BOX, Vec::new(), Some(120));
    assert!(bed.book.is_urgent());
    let id = bed.submit("a", 1, 1);
    let detail = bed.detail(&id);
    assert!(detail.contains("box will be taken away at 00:18:41 UTC: reclaimed"), "{detail}");
    let noticed = bed.book.nodes().next().unwrap().record.preemption.clone();
    bed.seconds += 5;
    bed.hear(BOX, Vec::new(), Some(116));
    assert_eq!(bed.book.nodes().next().unwrap().record.preemption, noticed, "the same one, told again");
    bed.hear(BOX, Vec::new(), None);
    assert_eq!(bed.job(&id).state, JobState::Preparing);
}

#[test]
fn test_a_preempted_attempt_is_not_charged_and_starts_at_once_elsewhere() {
    let mut bed = Bed::new(&["n0", "n1"]);
    let id = bed.submit("a", 1, 1);
    let first = bed.job(&id).replicas[0].node.to_string();
    for round in 1..=5 {
        let on = bed.job(&id).replicas[0].node.to_string();
        let runs = bed.running(&id);
        bed.hear(&on, vec![runs], Some(60));
        bed.settle(&id, &on, Code::Preempted);
        let job = bed.job(&id);
        assert_eq!((job.state, job.epoch.0, job.uncharged), (JobState::Preparing, round + 1, round));
        assert_ne!(job.replicas[0].node.as_str(), on);
        bed.hear(&on, Vec::new(), None);
    }
    let on = bed.job(&id).replicas[0].node.to_string();
    assert_ne!(on, first);
    bed.settle(&id, &on, Code::RunLost);
    assert_eq!(bed.book.job(&id).unwrap().state, JobState::Failed, "the one attempt that counts");
}

#[test]
fn test_a_canceled_job_is_not_queued_again() {
    let mut bed = Bed::new(&[BOX]);
    let id = bed.submit("a", 3, 1);
    let runs = bed.running(&id);
    bed.hear(BOX, vec![runs], Some(60));
    bed.book.cancel(&id, "ada", bed.now());
    bed.settle(&id, BOX, Code::Preempted);
    assert_eq!(bed.job(&id).state, JobState::Canceled);
}

#[test]
fn test_a_machine_that_goes_without_another_word_has_the_same_reason() {
    let mut bed = Bed::new(&[BOX]);
    let id = bed.submit("a", 1, 1);
    let told = Held { preempted: true, ..bed.running(&id) };
    bed.hear(BOX, vec![told], Some(60));
    // It is silent from now on. Until the deadline it may run.
    bed.seconds += 50;
    bed.book.expire(bed.now());
    assert_eq!(bed.job(&id).state.name(), "NotResponding");
    bed.seconds += 15;
    bed.book.expire(bed.now());
    assert_eq!(bed.job(&id).state.name(), "NotResponding", "the time to kill it is not over");
    assert!(
        bed.book.next_alarm(bed.now()).is_some_and(|at| at.since(bed.now().boot) < Duration::from_secs(5))
    );
    bed.seconds += 5;
    bed.book.expire(bed.now());
    assert_eq!((bed.job(&id).state, bed.job(&id).uncharged), (JobState::Queued, 1));
    // Its late outcome is of no use.
    let replica = bed.job(&id).replica(0);
    let late = bed.book.settle(&replica, &BOX.parse().unwrap(), ended(Verdict::Completed, None), bed.now());
    assert_ne!(late, super::super::Standing::Open);
}

#[test]
fn test_a_machine_that_goes_while_outputs_are_stored_takes_them_with_it() {
    let mut bed = Bed::new(&[BOX]);
    let id = bed.submit("a", 1, 1);
    let stores = Held { step: ReplicaStep::Uploading, ..bed.running(&id) };
    bed.hear(BOX, vec![stores], Some(60));
    bed.seconds += 24 * 3600;
    bed.book.expire(bed.now());
    assert_eq!((bed.job(&id).state, bed.job(&id).uncharged), (JobState::Queued, 1));
    assert!(!bed.job(&id).replicas.iter().any(|rank| rank.preempted), "nobody said that it was told to end");
}

#[test]
fn test_a_replica_that_was_not_told_is_never_taken_from_a_silent_machine() {
    let mut bed = Bed::new(&[BOX]);
    let id = bed.submit("a", 1, 1);
    let runs = bed.running(&id);
    bed.hear(BOX, vec![runs], Some(60));
    bed.seconds += 24 * 3600;
    bed.book.expire(bed.now());
    assert_eq!(bed.job(&id).state.name(), "NotResponding");
    // An operator, or the provider of the machine, knows better.
    bed.book.declare_lost(&BOX.parse().unwrap(), "ada", bed.now());
    assert_eq!((bed.job(&id).state, bed.job(&id).uncharged), (JobState::Queued, 1));
}

#[test]
fn test_a_machine_that_was_restarted_by_its_provider_has_the_same_reason() {
    let mut bed = Bed::new(&[BOX]);
    let id = bed.submit("a", 1, 1);
    let runs = bed.running(&id);
    bed.hear(BOX, vec![runs], Some(60));
    bed.seconds += 90;
    bed.hear_in("b2", BOX, Vec::new(), None);
    // It was queued again, and the machine is back.
    assert_eq!(
        (bed.job(&id).state, bed.job(&id).epoch.0, bed.job(&id).uncharged),
        (JobState::Preparing, 2, 1)
    );
    // Where its directory outlived that, the node says so itself, and does not know why.
    let runs = bed.running(&id);
    bed.hear_in("b2", BOX, vec![runs.clone()], Some(60));
    bed.hear_in("b3", BOX, vec![runs], None);
    bed.settle(&id, BOX, Code::NodeRebooted);
    assert_eq!(bed.job(&id).uncharged, 2);
}

#[test]
fn test_the_word_of_an_operator_reaches_the_node_and_ends_by_itself() {
    let mut bed = Bed::new(&[BOX]);
    let node: NodeId = BOX.parse().unwrap();
    assert!(bed.book.preempt(&"nobody".parse().unwrap(), None, bed.now()).is_none());
    let said = Some((Duration::from_secs(120), "maintenance".to_owned()));
    bed.book.preempt(&node, said, bed.now()).unwrap();
    let sent = Boot(Duration::from_secs(51));
    let told = bed.book.orders(&node).preemption;
    assert_eq!(told, Some((sent + Duration::from_secs(120), "maintenance".to_owned())));
    bed.seconds += 10;
    bed.hear(BOX, Vec::new(), None);
    assert_eq!(bed.book.orders(&node).preemption, told, "its own clock has gone on as well");
    let id = bed.submit("a", 1, 1);
    bed.seconds += 120 + 280;
    bed.hear(BOX, Vec::new(), None);
    assert_eq!(bed.job(&id).state, JobState::Queued);
    let due = bed.book.next_alarm(bed.now()).unwrap().since(bed.now().boot);
    assert!(due <= Duration::from_secs(10), "{due:?}");
    bed.seconds += 10;
    bed.hear(BOX, Vec::new(), None);
    assert_eq!(bed.job(&id).state, JobState::Preparing, "it is still here");
    bed.book.preempt(&node, Some((Duration::ZERO, "now".into())), bed.now()).unwrap();
    bed.book.preempt(&node, None, bed.now()).unwrap();
    assert_eq!(bed.book.orders(&node).preemption, None);
}

#[test]
fn test_a_gang_ends_as_a_whole_and_because_of_the_machine() {
    let mut bed = Bed::new(&["n0", "n1"]);
    let id = bed.submit("a", 1, 2);
    let rank = |bed: &Bed, rank| held(bed.job(&id).replica(rank), ReplicaStep::Running);
    let on = |bed: &Bed, rank: usize| bed.job(&id).replicas[rank].node.to_string();
    for number in 0..2 {
        let (node, holds) = (on(&bed, number), rank(&bed, number as u32));
        bed.hear(&node, vec![holds], None);
    }
    let (first, second) = (on(&bed, 0), on(&bed, 1));
    let holds = rank(&bed, 1);
    bed.hear(&second, vec![holds], Some(60));
    assert_eq!(bed.job(&id).why_stopped().unwrap(), format!("{second} was taken away under the job"));
    // The other rank fails first, as its peer is gone.
    let replica = |rank| ReplicaId { rank, ..bed.job(&id).replica(0) };
    let (r0, r1) = (replica(0), replica(1));
    let failed = ended(Verdict::Failed, Some(Fault::new(Code::CommandFailed, "its peer is gone")));
    bed.book.settle(&r0, &first.parse().unwrap(), failed, bed.now());
    bed.book.settle(&r1, &second.parse().unwrap(), ended(Verdict::Canceled, None), bed.now());
    assert_eq!((bed.job(&id).state, bed.job(&id).uncharged), (JobState::Queued, 1));
}

#[test]
fn test_a_restarted_controller_counts_the_whole_notice_anew() {
    let mut bed = Bed::new(&[BOX]);
    let id = bed.submit("a", 1, 1);
    let told = Held { preempted: true, ..bed.running(&id) };
    bed.hear(BOX, vec![told], Some(60));
    let jobs = bed.book.jobs().map(|job| (**job).clone()).collect();
    let documents = bed.book.nodes().map(|node| Document::Node(Box::new(node.record.clone()))).collect();
    let loaded = Loaded { jobs, documents, ..Loaded::default() };
    bed.seconds += 55;
    bed.book = Book::new(loaded, Duration::from_secs(15), Terms::default(), 1000, bed.now().boot);
    bed.seconds += 60;
    bed.book.expire(bed.now());
    assert_eq!(bed.job(&id).state.name(), "NotResponding");
    bed.seconds += 7;
    bed.book.expire(bed.now());
    assert_eq!(bed.job(&id).state, JobState::Queued);
}

/// What the order of the present attempt says that it begins with.
fn begins_with(bed: &Bed, id: &JobId) -> Option<(u64, u64, bool)> {
    let job = bed.job(id);
    let orders = bed.book.orders(&job.replicas[0].node);
    orders.list.into_iter().find_map(|order| match order.desired {
        crate::lease::Desired::Run { spec, .. } => {
            spec.resumes.map(|left| (left.attempt.0, left.artifacts.files, left.is_earlier))
        }
        _ => None,
    })
}

#[test]
fn test_an_attempt_begins_with_what_the_last_one_stored() {
    let mut bed = Bed::new(&["n0", "n1"]);
    let mut new = submission("a", Priority::Medium, 9);
    new.spec = JobDraft { resume_outputs: true, ..new.spec.into() }.validate().unwrap();
    let id = bed.book.submit(new, bed.now()).unwrap();
    bed.book.schedule(bed.now());
    let stored = |files| agent_model::Artifacts { root: agent_model::Digest::EMPTY, files, bytes: 7 };
    let end = |bed: &mut Bed, artifacts| {
        let fault = Some(Fault::new(Code::Preempted, "x"));
        let outcome = agent_model::Outcome { artifacts, ..ended(Verdict::Failed, fault) };
        let (replica, node) = (bed.job(&id).replica(0), bed.job(&id).replicas[0].node.clone());
        bed.book.settle(&replica, &node, outcome, bed.now());
        bed.book.schedule(bed.now());
    };
    assert_eq!(begins_with(&bed, &id), None);
    end(&mut bed, Some(stored(1)));
    assert_eq!(begins_with(&bed, &id), Some((1, 1, false)));
    // An attempt that did not come so far changes nothing.
    end(&mut bed, None);
    assert_eq!(begins_with(&bed, &id), Some((1, 1, false)));
    // One that goes without a word leaves what it stored last.
    let (replica, node) = (bed.job(&id).replica(0), bed.job(&id).replicas[0].node.clone());
    bed.book.note_so_far(&replica, &node, stored(2));
    bed.book.note_so_far(&replica, &node, stored(3));
    assert!(bed.book.is_urgent());
    end(&mut bed, None);
    assert_eq!(begins_with(&bed, &id), Some((3, 3, true)));
    bed.book.note_so_far(&replica, &node, stored(4));
    assert_eq!(bed.job(&id).so_far, None, "that attempt is over");
}
