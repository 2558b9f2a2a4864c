use std::time::Duration;

use agent_model::job::{OnDisconnect, Priority, Resources};
use agent_model::node::Inventory;
use agent_model::protocol::gang::{RankPlace, Ready, Secret};
use agent_model::protocol::orders::Obeyed;
use agent_model::{JobDraft, ReplicaId};

use super::super::tests::{START, held, moment, report, submission};
use super::*;
use crate::lease::{Desired, Order};
use crate::queue::book::Standing;
use crate::store::{Document, Loaded};
use agent_model::lease::Terms;

fn ready(rank: u32, met: u64) -> Ready {
    let place = RankPlace {
        address: [10, 0, 0, 1].into(),
        network: "10.0.0.0/8".into(),
        first_port: 100 + rank as u16,
        ports: 1,
    };
    let secret = Secret::new(if rank == 0 { "secret" } else { "" });
    Ready { place, environment: "e".into(), secret, met }
}

struct Bed {
    book: Book,
    seconds: u64,
    sent: u64,
}

impl Bed {
    /// Two nodes that are heard, and a job of two ranks that is placed on them.
    fn new() -> Bed {
        let book = Book::new(Loaded::default(), Duration::from_secs(15), Terms::default(), 7, START);
        let mut bed = Bed { book, seconds: 1, sent: 0 };
        bed.hear(0, None);
        bed.hear(1, None);
        bed.book.link(|_| true);
        let mut new = submission("a", Priority::Medium, 3);
        let resources = Resources { nodes: 2, ..Resources::default() };
        let limits = agent_model::job::Limits { on_disconnect: OnDisconnect::Hold, ..Default::default() };
        new.spec = JobDraft { resources, limits, ..new.spec.into() }.validate().unwrap();
        bed.book.submit(new, bed.now());
        bed.book.schedule(bed.now());
        assert_eq!(bed.job().state, JobState::Preparing);
        bed
    }

    fn now(&self) -> Moment {
        moment(self.seconds, START)
    }

    fn job(&self) -> JobRecord {
        (**self.book.job(&"a".parse().unwrap()).unwrap()).clone()
    }

    /// A node reports what it holds, after it obeyed the latest orders.
    fn hear(&mut self, node: usize, holds: Option<(ReplicaStep, Option<Ready>)>) {
        let id = format!("n{node}").parse().unwrap();
        let replica = || ReplicaId { rank: node as u32, ..self.job().replica(0) };
        let replicas: Vec<Held> =
            holds.map(|(step, ready)| Held { ready, ..held(replica(), step) }).into_iter().collect();
        for _ in 0..2 {
            self.sent += 1000;
            let orders = self.book.orders(&id);
            let report = Report {
                node: format!("n{node}").parse().unwrap(),
                sent: Boot::from_millis(self.sent),
                obeyed: Some(Obeyed { controller_epoch: orders.controller_epoch, answers: orders.answers }),
                inventory: Some(Inventory { slots: 1, gangs: true, ..Inventory::default() }),
                ..report(1, "b", replicas.clone())
            };
            self.book.report(&report, self.now());
        }
    }

    /// The gang in the order of a rank.
    fn told(&self, rank: usize) -> Option<Gang> {
        let orders = self.book.orders(&format!("n{rank}").parse().unwrap());
        orders.list.into_iter().find_map(|Order { desired, .. }| match desired {
            Desired::Run { gang, .. } => gang,
            _ => None,
        })
    }

    fn is_stopped(&self, rank: usize) -> bool {
        let orders = self.book.orders(&format!("n{rank}").parse().unwrap());
        orders.list.iter().any(|order| matches!(order.desired, Desired::Stop { .. }))
    }
}

const LAUNCHING: ReplicaStep = ReplicaStep::Launching;

#[test]
fn test_gang_goes_when_all_could_start_and_have_met_and_not_before() {
    let mut bed = Bed::new();
    bed.hear(0, Some((LAUNCHING, Some(ready(0, 0)))));
    bed.hear(1, Some((ReplicaStep::Building, None)));
    assert_eq!((bed.told(0), bed.told(1)), (None, None));
    assert!(bed.book.detail(&bed.job()).starts_with("rank 1 of 2:"), "{}", bed.book.detail(&bed.job()));
    bed.hear(1, Some((LAUNCHING, Some(ready(1, 0)))));
    let meeting = bed.told(1).unwrap();
    assert_eq!((meeting.go, meeting.secret.reveal(), meeting.roster.0.len()), (None, "secret", 2));
    let digest = meeting.roster.digest();
    bed.hear(0, Some((LAUNCHING, Some(ready(0, digest)))));
    bed.hear(1, Some((LAUNCHING, Some(ready(1, digest + 1)))));
    assert!(bed.job().go.is_none(), "it has met another roster");
    bed.hear(1, Some((LAUNCHING, Some(ready(1, digest)))));
    let go = bed.job().go.unwrap();
    assert!(bed.book.is_urgent() && bed.told(0).unwrap().go == Some(go.until[0]));
    // A rank that has to start again changes nothing any more.
    bed.hear(1, Some((LAUNCHING, None)));
    assert_eq!(bed.told(1).unwrap().go, Some(go.until[1]));
}

#[test]
fn test_ranks_with_other_packages_do_not_start() {
    let mut bed = Bed::new();
    bed.hear(0, Some((LAUNCHING, Some(ready(0, 0)))));
    bed.hear(1, Some((LAUNCHING, Some(Ready { environment: "other".into(), ..ready(1, 0) }))));
    let broken = bed.job().broken.unwrap();
    assert_eq!((broken.rank, broken.fault.code), (1, Code::GangUnlike));
    assert!(bed.is_stopped(0) && bed.is_stopped(1));
}

#[test]
fn test_a_rank_that_is_not_ready_in_time_is_named_and_waited_for_no_longer() {
    let mut bed = Bed::new();
    bed.hear(0, Some((LAUNCHING, Some(ready(0, 0)))));
    bed.hear(1, Some((ReplicaStep::Building, None)));
    bed.seconds += 30 * 60;
    bed.hear(0, Some((LAUNCHING, Some(ready(0, 0)))));
    assert!(bed.book.next_alarm(bed.now()).is_some());
    bed.book.expire(bed.now());
    let job = bed.job();
    let broken = job.broken.as_ref().unwrap();
    assert_eq!((broken.rank, broken.fault.code), (1, Code::GangIncomplete));
    assert!(broken.fault.what.contains("rank 1 on n1"), "{}", broken.fault);
    // Its node is silent by now, and it never got a go.
    let end = |rank: u32| bed.job().rank(rank).and_then(|rank| rank.end.clone());
    assert!(end(1).is_some() && end(0).is_none());
    let stopped = without_run(Verdict::Canceled, None, bed.now().wall);
    let standing = bed.book.settle(&job.replica(0), &"n0".parse().unwrap(), stopped, bed.now());
    assert_eq!(standing, Standing::Open);
    assert_eq!(bed.job().state, JobState::Queued, "another attempt");
    assert!(bed.job().replicas.is_empty());
}

#[test]
fn test_a_gang_that_went_waits_for_the_silent_and_a_restart_forgets_nothing() {
    let mut bed = Bed::new();
    for met in [0, 1] {
        for rank in 0..2 {
            let digest = bed.told(0).map_or(0, |gang| gang.roster.digest()) * met;
            bed.hear(rank, Some((LAUNCHING, Some(ready(rank as u32, digest)))));
        }
    }
    let job = bed.job();
    assert!(job.go.is_some());
    let text = serde_json::to_string(&job).unwrap();
    assert!(!text.contains("secret"), "it is on no disk: {text}");
    let loaded: JobRecord = serde_json::from_str(&text).unwrap();
    let documents = bed.book.nodes().map(|node| Document::Node(Box::new(node.record.clone()))).collect();
    let loaded = Loaded { jobs: vec![loaded], documents, ..Loaded::default() };
    bed.book = Book::new(loaded, Duration::from_secs(15), Terms::default(), 1000, START);
    bed.hear(0, Some((ReplicaStep::Running, Some(ready(0, 0)))));
    assert_eq!(bed.told(1).unwrap().go, Some(job.go.unwrap().until[1]));
    assert_eq!(bed.told(1).unwrap().secret.reveal(), "secret");
    bed.seconds += 120;
    bed.hear(0, Some((ReplicaStep::Running, Some(ready(0, 0)))));
    bed.book.expire(bed.now());
    assert_eq!(bed.job().broken.unwrap().fault.code, Code::GangLate);
    assert!(bed.job().rank(1).unwrap().end.is_none(), "it may have started");
}
