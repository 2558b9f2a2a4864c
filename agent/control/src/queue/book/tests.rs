use std::collections::BTreeMap;

use super::*;
use agent_model::job::{Priority, Resources, RetryPolicy};
use agent_model::node::{Inventory, Load};
use agent_model::protocol::orders::Obeyed;
use agent_model::{ExitStatus, JobDraft, ReplicaStep, Retry};
use proptest::prelude::*;

use crate::lease;
use crate::queue::Work;

/// When the controller of these tests was started.
pub(super) const START: Boot = Boot(Duration::from_secs(1000));

pub(super) fn moment(seconds: u64, start: Boot) -> Moment {
    Moment { wall: Timestamp(1_000_000 + seconds * 1000), boot: start + Duration::from_secs(seconds) }
}

pub(super) fn submission(name: &str, priority: Priority, attempts: u32) -> Submission {
    let draft = JobDraft {
        command: "true".into(),
        owner: Some(agent_model::Principal::Local { uid: 1 }),
        priority,
        resources: Resources::default(),
        retry: RetryPolicy { max_attempts: attempts, backoff: Duration::from_secs(10) },
        ..JobDraft::default()
    };
    let spec = draft.validate().unwrap();
    Submission {
        request: format!("r-{name}"),
        id: name.parse().unwrap(),
        spec,
        after: Epoch::default(),
        earlier: Vec::new(),
    }
}

pub(super) fn report(slots: u32, boot: &str, replicas: Vec<Held>) -> Report {
    Report {
        node: "box".parse().unwrap(),
        boot_id: boot.into(),
        sent: Boot::default(),
        obeyed: None,
        inventory: Some(Inventory { slots, ..Inventory::default() }),
        load: Load::default(),
        replicas,
        preemption: None,
        own: false,
    }
}

/// A node reports, and once more when it has heard the orders that answer the first report.
pub(super) fn hear(book: &mut Book, mut report: Report, now: Moment) {
    book.report(&report, now);
    let orders = book.orders(&report.node);
    report.obeyed = Some(Obeyed { controller_epoch: orders.controller_epoch, answers: orders.answers });
    book.report(&report, now);
}

pub(super) fn held(replica: ReplicaId, step: ReplicaStep) -> Held {
    Held {
        replica,
        step,
        detail: String::new(),
        started_at: None,
        alive: true,
        described: None,
        ready: None,
        preempted: false,
    }
}

pub(super) fn ended(verdict: Verdict, fault: Option<Fault>) -> Outcome {
    Outcome { exit: Some(ExitStatus::Code(0)), ..without_run(verdict, fault, Timestamp(7)) }
}

pub(super) fn book(slots: u32, start: Boot) -> Book {
    let mut book = Book::new(Loaded::default(), Duration::from_secs(15), Terms::default(), 7, start);
    hear(&mut book, report(slots, "b1", Vec::new()), moment(0, start));
    book.link(|_| true);
    book
}

#[test]
fn test_priority_goes_first_then_the_order_of_submission() {
    let start = START;
    let mut book = book(1, start);
    let now = moment(1, start);
    let names = [("a", Priority::Low), ("b", Priority::Medium), ("c", Priority::High), ("d", Priority::High)];
    for (name, priority) in names {
        book.submit(submission(name, priority, 1), now).unwrap();
    }
    let mut ran = Vec::new();
    for _ in names {
        book.schedule(now);
        let job = book.jobs().find(|job| job.state == JobState::Preparing).unwrap().clone();
        ran.push(job.id.to_string());
        book.settle(&job.replica(0), &"box".parse().unwrap(), ended(Verdict::Completed, None), now);
        book.retire();
    }
    assert_eq!(ran, ["c", "d", "b", "a"]);
}

#[test]
fn test_machine_that_is_about_to_go_starts_no_job_and_keeps_those_that_come() {
    let mut book = book(1, START);
    let now = moment(1, START);
    assert_eq!(book.close("it goes", Some(Work::Any)), None);
    let late = book.submit(submission("late", Priority::Medium, 1), now).unwrap();
    book.schedule(now);
    let job = book.job(&late).unwrap().clone();
    assert_eq!(
        (job.state, book.detail(&job).as_str()),
        (JobState::Queued, "no node takes work now: it goes")
    );
    assert_eq!(book.close("it goes", Some(Work::Placed)), None, "one that waits runs another day");
    book.open();
    book.schedule(now);
    assert_eq!(book.job(&late).unwrap().state, JobState::Preparing);
    assert_eq!(book.kept_up_by(Work::Placed).as_deref(), Some("late runs"));

    let next = book.submit(submission("next", Priority::Medium, 1), now).unwrap();
    book.settle(
        &book.job(&late).unwrap().replica(0),
        &"box".parse().unwrap(),
        ended(Verdict::Completed, None),
        now,
    );
    book.retire();
    assert_eq!(book.kept_up_by(Work::Placed), None);
    assert_eq!(book.close("it goes", Some(Work::Any)).as_deref(), Some("next waits"));
    book.hold(&next, true, "ada", now);
    assert_eq!(book.kept_up_by(Work::Any), None, "nothing starts it by itself");
    book.hold(&next, false, "ada", now);
    book.schedule(now);
    assert_eq!(book.job(&next).unwrap().state, JobState::Preparing, "it was not closed");
    assert_eq!(book.close("it goes", None), None);
}

#[test]
fn test_retry_waits_for_its_date_and_takes_a_new_epoch() {
    let start = START;
    let mut book = book(1, start);
    let now = moment(1, start);
    let id = book.submit(submission("a", Priority::Medium, 2), now).unwrap();
    book.schedule(now);
    let first = book.job(&id).unwrap().replica(0);
    let fault = Fault::new(Code::EnvNetwork, "no index").with_retry(Retry::After(Duration::from_secs(30)));
    let node = "box".parse().unwrap();
    assert_eq!(book.settle(&first, &node, ended(Verdict::Failed, Some(fault)), now), Standing::Open);
    book.schedule(now);
    let job = book.job(&id).unwrap().clone();
    assert_eq!(
        (job.state, book.detail(&job).as_str()),
        (JobState::Queued, "waits for the date of its next attempt")
    );
    assert_eq!(
        book.next_alarm(now),
        Some((now.boot + Duration::from_secs(30)).min(start + Duration::from_secs(15)))
    );
    book.schedule(moment(30, start));
    assert_eq!(book.job(&id).unwrap().state, JobState::Queued);
    book.schedule(moment(31, start));
    let job = book.job(&id).unwrap();
    assert_eq!((job.state, job.epoch), (JobState::Preparing, Epoch(2)));
    assert_eq!(book.standing(&first, &node), Standing::Settled);
    for _ in 0..2 {
        hear(&mut book, report(1, "b1", Vec::new()), moment(32, start));
    }
    assert_eq!(book.standing(&first, &node), Standing::Fenced);
}

#[test]
fn test_full_line_with_a_date_does_not_spin() {
    let start = START;
    let mut book = book(1, start);
    let now = moment(1, start);
    let a = book.submit(submission("a", Priority::Medium, 2), now).unwrap();
    book.schedule(now);
    let replica = book.job(&a).unwrap().replica(0);
    let fault = Fault::new(Code::RunLost, "x");
    book.settle(&replica, &"box".parse().unwrap(), ended(Verdict::Failed, Some(fault)), now);
    book.submit(submission("b", Priority::Medium, 1), now).unwrap();
    book.schedule(now);
    let due = moment(12, start);
    book.schedule(due);
    assert_eq!(book.job(&a).unwrap().state, JobState::Queued, "the slot is taken");
    assert!(book.next_alarm(due).unwrap() > due.boot);
}

#[test]
fn test_report_older_than_an_outcome_does_not_forget_the_replica() {
    let start = START;
    let mut book = book(1, start);
    let now = moment(1, start);
    let node = "box".parse().unwrap();
    let id = book.submit(submission("a", Priority::Medium, 1), now).unwrap();
    book.schedule(now);
    let replica = book.job(&id).unwrap().replica(0);
    book.settle(&replica, &node, ended(Verdict::Completed, None), now);
    book.retire();
    let forget = [lease::Order { replica: replica.clone(), desired: lease::Desired::Forget }];
    hear(&mut book, report(1, "b1", Vec::new()), now); // made before the node got the order
    assert_eq!(book.orders(&node).list, forget);
    book.report(&report(1, "b1", vec![held(replica, ReplicaStep::Reported)]), now);
    assert_eq!(book.orders(&node).list, forget);
    book.report(&report(1, "b1", Vec::new()), now); // perhaps an old copy
    assert_eq!(book.orders(&node).list, forget);
    hear(&mut book, report(1, "b1", Vec::new()), now);
    assert_eq!(book.orders(&node).list, []);
    assert_eq!(book.changes().dropped.len(), 1);
}

#[derive(Debug, Clone)]
enum Step {
    Submit(u8),
    Cancel(u8),
    Advance(u8, u8),
    Lose(u8),
    Settle(u8, bool, bool),
    Reboot,
    Pass(u64),
    Commit,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0u8..8).prop_map(Step::Submit),
        (0u8..8).prop_map(Step::Cancel),
        (0u8..8, 0u8..8).prop_map(|(job, step)| Step::Advance(job, step)),
        (0u8..8).prop_map(Step::Lose),
        (0u8..8, any::<bool>(), any::<bool>()).prop_map(|(job, good, retry)| Step::Settle(job, good, retry)),
        Just(Step::Reboot),
        (0u64..20).prop_map(Step::Pass),
        Just(Step::Commit),
    ]
}

/// What an honest node holds, and how far what the book decided is known to the test.
struct World {
    book: Book,
    start: Boot,
    seconds: u64,
    boots: u32,
    held: BTreeMap<ReplicaId, ReplicaStep>,
    known_ends: BTreeMap<JobId, JobState>,
    epochs: BTreeMap<JobId, Epoch>,
}

impl World {
    fn now(&self) -> Moment {
        moment(self.seconds, self.start)
    }

    fn tell(&mut self) {
        let replicas = self.held.iter().map(|(replica, step)| held(replica.clone(), *step)).collect();
        let now = self.now();
        hear(&mut self.book, report(2, &format!("b{}", self.boots), replicas), now);
    }

    fn take(&mut self, step: Step) {
        let name = |n: u8| -> JobId { format!("j{n}").parse().unwrap() };
        let now = self.now();
        let current = |world: &World, n| {
            let job = world.book.job(&name(n))?;
            (!job.replicas.is_empty()).then(|| job.replica(0))
        };
        match step {
            Step::Submit(n) => drop(self.book.submit(submission(&format!("j{n}"), Priority::Medium, 3), now)),
            Step::Cancel(n) => drop(self.book.cancel(&name(n), "uid 1", now)),
            Step::Advance(n, step) => {
                if let Some(replica) = current(self, n) {
                    self.held.insert(replica, ReplicaStep::ALL[usize::from(step)]);
                    self.tell();
                }
            }
            Step::Lose(n) => {
                self.held.retain(|replica, _| replica.job != name(n));
                self.tell();
            }
            Step::Settle(n, good, retry) => {
                if let Some(replica) = current(self, n) {
                    let retry = if retry { Retry::SameNode } else { Retry::Never };
                    let fault = (!good).then(|| Fault::new(Code::RunLost, "x").with_retry(retry));
                    let verdict = if good { Verdict::Completed } else { Verdict::Failed };
                    self.book.settle(&replica, &"box".parse().unwrap(), ended(verdict, fault), now);
                    self.held.insert(replica, ReplicaStep::Reported);
                }
            }
            Step::Reboot => {
                self.boots += 1;
                self.held.clear();
                self.tell();
            }
            Step::Pass(seconds) => self.seconds += seconds,
            Step::Commit => self.book.retire(),
        }
        let now = self.now();
        self.book.expire(now);
        self.book.schedule(now);
    }

    fn check(&mut self) {
        let mut on_node = 0;
        for job in self.book.jobs() {
            if let Some(state) = self.known_ends.get(&job.id) {
                assert_eq!(*state, job.state, "a terminal state changed");
            }
            if job.state.is_terminal() {
                self.known_ends.insert(job.id.clone(), job.state);
                assert!(job.outcome.is_some() && job.ended_at.is_some());
                let cause = job.outcome.as_ref().and_then(|outcome| outcome.fault.as_ref());
                assert!(job.state != JobState::Failed || cause.is_some(), "it failed for no reason");
            }
            let before = self.epochs.insert(job.id.clone(), job.epoch).unwrap_or_default();
            assert!(job.epoch == before || job.epoch == before.next(), "an epoch was skipped or went back");
            on_node += usize::from(job.state.is_placed());
            assert_eq!(job.state.is_placed(), !job.replicas.is_empty() && !job.state.is_terminal());
            if job.state == JobState::Queued {
                assert!(!self.book.detail(job).is_empty(), "{} waits without a reason", job.id);
            }
        }
        assert!(on_node <= 2, "more jobs than slots");
        let node = self.book.nodes().next().unwrap();
        assert_eq!(node.jobs.len(), on_node);
        for order in self.book.orders(&node.record.id).list {
            if order.desired == lease::Desired::Describe {
                continue; // there is no store here to look it up
            }
            let forget = order.desired == lease::Desired::Forget;
            let standing = self.book.standing(&order.replica, &node.record.id);
            assert_eq!(standing, if forget { Standing::Settled } else { Standing::Open });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn test_book_keeps_its_promises_whatever_happens(steps in prop::collection::vec(any_step(), 1..80)) {
        let start = START;
        let book = book(2, start);
        let (held, known_ends, epochs) = Default::default();
        let mut world = World { book, start, seconds: 1, boots: 1, held, known_ends, epochs };
        for step in steps {
            world.take(step);
            world.check();
        }
        // With faults over, every job ends.
        for _ in 0..60 {
            world.seconds += 40;
            world.held.clear();
            world.tell();
            world.book.schedule(world.now());
            let placed: Vec<_> = world.book.jobs().filter(|job| job.state.is_placed()).map(|job| job.replica(0)).collect();
            for replica in placed {
                world.book.settle(&replica, &"box".parse().unwrap(), ended(Verdict::Completed, None), world.now());
            }
            world.check();
            world.book.retire();
        }
        prop_assert_eq!(world.book.jobs().count(), 0);
    }
}

#[test]
fn test_job_whose_node_gives_no_reason_still_has_one() {
    let mut book = book(1, START);
    let now = moment(1, START);
    book.submit(submission("a", Priority::Medium, 1), now);
    book.schedule(now);
    let replica: ReplicaId = "a.1.0".parse().unwrap();
    book.settle(&replica, &"box".parse().unwrap(), ended(Verdict::Failed, None), now);
    let job = book.job(&replica.job).unwrap();
    assert_eq!(job.state, JobState::Failed);
    assert_eq!(job.outcome.as_ref().unwrap().fault.as_ref().unwrap().code, Code::Bug);
}

/// A book with the job `a` running on `box`, and the controller after it.
fn restarted() -> (Book, ReplicaId) {
    let mut book = book(1, START);
    let id = book.submit(submission("a", Priority::Medium, 1), moment(1, START)).unwrap();
    book.schedule(moment(1, START));
    let replica = book.job(&id).unwrap().replica(0);
    hear(&mut book, report(1, "b1", vec![held(replica.clone(), ReplicaStep::Running)]), moment(2, START));
    let jobs = book.jobs().map(|job| (**job).clone()).collect();
    let documents = book.nodes().map(|node| Document::Node(Box::new(node.record.clone()))).collect();
    let loaded = Loaded { jobs, documents, ..Loaded::default() };
    let mut book = Book::new(loaded, Duration::from_secs(15), Terms::default(), 1000, START);
    book.link(|_| true);
    (book, replica)
}

fn echoing(orders: &lease::Orders, report: Report) -> Report {
    Report {
        obeyed: Some(Obeyed { controller_epoch: orders.controller_epoch, answers: orders.answers }),
        ..report
    }
}

#[test]
fn test_copy_of_a_report_from_before_the_controller_started_costs_no_job() {
    let (mut book, replica) = restarted();
    let (now, state) = (moment(3, START), |book: &Book| book.job(&replica.job).unwrap().state);
    let before = lease::Orders { controller_epoch: 7, ..lease::Orders::default() };
    for boot in ["b1", "b0", "b1"] {
        book.report(&echoing(&before, report(1, boot, Vec::new())), now);
        book.report(&report(1, boot, Vec::new()), now);
        assert_eq!(state(&book), JobState::Running, "{boot}");
    }
    hear(&mut book, report(1, "b1", vec![held(replica.clone(), ReplicaStep::Running)]), now);
    assert_eq!(state(&book), JobState::Running);
    hear(&mut book, report(1, "b1", Vec::new()), now);
    assert_eq!(state(&book), JobState::Failed, "now it is known to be gone");
}

#[test]
fn test_copy_of_a_report_from_before_the_machine_started_costs_no_job() {
    let (mut book, replica) = restarted();
    let (now, state) = (moment(3, START), |book: &Book| book.job(&replica.job).unwrap().state);
    let node = "box".parse().unwrap();
    book.report(&report(1, "b1", vec![held(replica.clone(), ReplicaStep::Running)]), now);
    let earlier = echoing(&book.orders(&node), report(1, "b1", Vec::new()));
    hear(&mut book, report(1, "b2", vec![held(replica.clone(), ReplicaStep::Uploading)]), now);
    let later = echoing(&book.orders(&node), report(1, "b2", Vec::new()));
    book.report(&earlier, now);
    assert_eq!(state(&book), JobState::Running);
    book.report(&later, now);
    assert_eq!(state(&book), JobState::Running, "nobody knows which of the two boots is the present one");
    let orders = book.orders(&node);
    book.report(&echoing(&orders, report(1, "b2", Vec::new())), now);
    assert_eq!(state(&book), JobState::Failed);
}
