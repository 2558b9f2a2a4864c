use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use agent_model::job::{JobDraft, Predecessor, Priority, WantedEnd};
use agent_model::lease::Terms;
use agent_model::{NodeId, ReplicaStep};
use proptest::prelude::*;

use super::super::tests::{START, book, ended, hear, held, moment, report, submission};
use super::super::{Standing, Submission};
use super::*;
use crate::store::{Document, Loaded};

fn name(text: &str) -> JobId {
    text.parse().unwrap()
}

fn array(job: &str, array: &str, attempts: u32) -> Submission {
    let one = submission(job, Priority::Medium, attempts);
    let draft = JobDraft { array: Some(array.parse().unwrap()), ..JobDraft::from(one.spec) };
    Submission { spec: draft.validate().unwrap(), ..one }
}

fn detail(book: &Book, job: &str) -> String {
    book.detail(book.job(&name(job)).unwrap())
}

fn tasks(book: &Book, job: &str) -> [String; 4] {
    let tasks = book.job(&name(job)).unwrap().tasks.clone().unwrap();
    [&tasks.waiting, &tasks.active, &tasks.failed, &tasks.canceled].map(ToString::to_string)
}

/// A task that has a node ends there.
fn end(book: &mut Book, task: &str, verdict: Verdict) {
    let (node, now): (NodeId, _) = ("box".parse().unwrap(), moment(1, START));
    let replica = book.job(&name(task)).unwrap().replica(0);
    assert_eq!(book.settle(&replica, &node, ended(verdict, None), now), Standing::Open, "{task}");
    book.schedule(now);
}

#[test]
fn test_tasks_get_records_as_they_are_placed_and_the_array_has_one_result() {
    let (mut book, now) = (book(3, START), moment(1, START));
    book.submit(array("a", "0-4%2", 1), now).unwrap();
    assert_eq!(book.jobs().count(), 1);
    book.schedule(now);
    assert_eq!(tasks(&book, "a"), ["2-4", "0-1", "", ""]);
    assert_eq!((book.jobs().count(), book.job(&name("a")).unwrap().state), (3, JobState::Running));
    assert_eq!(detail(&book, "a"), "2 tasks of it run at a time");
    let first = book.job(&name("a--0")).unwrap();
    assert_eq!(first.spec.environment_variables["AGENTD_ARRAY_INDEX"], "0");
    assert_eq!(first.state, JobState::Preparing);
    end(&mut book, "a--1", Verdict::Completed);
    end(&mut book, "a--0", Verdict::Failed);
    assert_eq!(tasks(&book, "a"), ["4", "2-3", "0", ""]);
    for task in ["a--2", "a--3", "a--4"] {
        end(&mut book, task, Verdict::Completed);
    }
    let job = book.job(&name("a")).unwrap();
    let outcome = job.outcome.clone().unwrap();
    assert_eq!(job.state, JobState::Failed);
    let fault = outcome.fault.unwrap();
    assert_eq!((fault.code, fault.what.as_str()), (Code::TasksFailed, "1 task of 5 failed"));
    assert_eq!(fault.why, ["index 0"]);
    book.retire();
    assert_eq!(book.jobs().count(), 0);
}

/// Whoever is asked about an array is told whose fault it was that its tasks failed.
#[test]
fn test_the_blame_of_an_array_is_that_of_its_tasks() {
    use agent_model::Blame::{Network, Node, User};
    for (blames, expected) in [
        (vec![Node, Node], Node),
        (vec![Network, Node], Network),
        (vec![Node, User], User),
        (vec![User, Node], User),
    ] {
        let (mut book, now) = (book(3, START), moment(1, START));
        book.submit(array("a", &format!("0-{}", blames.len() - 1), 1), now).unwrap();
        book.schedule(now);
        for (index, blame) in blames.iter().enumerate() {
            let replica = book.job(&name(&format!("a--{index}"))).unwrap().replica(0);
            let node = book.job(&replica.job).unwrap().replicas[0].node.clone();
            let fault = Fault { blame: *blame, ..Fault::new(Code::LaunchFailed, "x") };
            let outcome = super::super::without_run(Verdict::Failed, Some(fault), now.wall);
            assert_eq!(book.settle(&replica, &node, outcome, now), super::super::Standing::Open);
        }
        let fault = book.job(&name("a")).unwrap().outcome.clone().unwrap().fault.unwrap();
        assert_eq!((fault.code, fault.blame), (Code::TasksFailed, expected), "{blames:?}");
    }
}

#[test]
fn test_a_job_after_an_array_waits_for_all_of_it_and_one_after_a_task_for_that() {
    let (mut book, now) = (book(1, START), moment(1, START));
    book.submit(array("a", "3-4", 1), now).unwrap();
    for (job, after) in [("b", "a"), ("c", "a--4")] {
        let one = submission(job, Priority::Low, 1);
        let predecessors = vec![Predecessor { job: name(after), end: WantedEnd::Completed }];
        let draft = JobDraft { predecessors, ..JobDraft::from(one.spec) };
        book.submit(Submission { spec: draft.validate().unwrap(), ..one }, now).unwrap();
    }
    book.schedule(now);
    assert!(book.unknown_predecessors().is_empty(), "a task that waits is known");
    assert_eq!(detail(&book, "a"), "next in line, the slot of box busy: a--3");
    end(&mut book, "a--3", Verdict::Completed);
    assert_eq!(detail(&book, "b"), "is to start when a has completed");
    end(&mut book, "a--4", Verdict::Failed);
    let state = |job: &str| book.job(&name(job)).unwrap().state;
    assert_eq!([state("a"), state("b"), state("c")], [JobState::Failed; 3]);
}

#[test]
fn test_one_task_is_canceled_or_all_of_them() {
    let (mut book, now) = (book(1, START), moment(1, START));
    book.submit(array("a", "0-9", 1), now).unwrap();
    book.submit(array("b", "0-9", 1), now).unwrap();
    book.schedule(now);
    let waiting = book.waiting_task(&name("a--7")).unwrap();
    assert_eq!((waiting.state, waiting.is_task), (JobState::Queued, true));
    assert_eq!(book.detail(&waiting), detail(&book, "a"));
    book.cancel(&name("a--7"), "ada", now).unwrap();
    assert_eq!(tasks(&book, "a"), ["1-6,8-9", "0", "", "7"]);
    assert_eq!(book.job(&name("a--7")).unwrap().state, JobState::Canceled);
    book.cancel(&name("a"), "ada", now).unwrap();
    assert_eq!(tasks(&book, "a"), ["", "0", "", "1-9"]);
    assert_eq!(book.job(&name("a")).unwrap().state, JobState::Finalizing(Verdict::Canceled));
    end(&mut book, "a--0", Verdict::Failed);
    let job = book.job(&name("a")).unwrap();
    assert_eq!((job.state, job.outcome.clone().unwrap().fault), (JobState::Canceled, None));
    assert_eq!(book.cancel(&name("a--3"), "ada", now), None, "it was never started");
    // None of the tasks of the other one were placed.
    for index in 1..10 {
        book.cancel(&name(&format!("b--{index}")), "ada", now).unwrap();
    }
    end(&mut book, "b--0", Verdict::Completed);
    assert_eq!(book.job(&name("b")).unwrap().state, JobState::Canceled);
}

#[test]
fn test_an_array_that_waits_is_canceled_at_once_and_held() {
    let (mut book, now) = (book(1, START), moment(1, START));
    book.submit(array("a", "0-3%1", 1), now).unwrap();
    book.schedule(now);
    assert!(book.hold(&name("a"), true, "ada", now), "some of it waits");
    end(&mut book, "a--0", Verdict::Completed);
    assert_eq!(tasks(&book, "a"), ["1-3", "", "", ""]);
    assert!(detail(&book, "a").starts_with("held by ada"));
    assert!(book.hold(&name("a"), false, "ada", now));
    book.schedule(now);
    assert_eq!(tasks(&book, "a"), ["2-3", "1", "", ""]);
    book.submit(array("b", "0-3", 1), now).unwrap();
    let after = submission("c", Priority::Medium, 1);
    let predecessors = vec![Predecessor { job: name("b--2"), end: WantedEnd::Completed }];
    let draft = JobDraft { predecessors, ..JobDraft::from(after.spec) };
    book.submit(Submission { spec: draft.validate().unwrap(), ..after }, now).unwrap();
    book.cancel(&name("b"), "ada", now).unwrap();
    book.schedule(now);
    assert_eq!(book.job(&name("c")).unwrap().state, JobState::Failed, "that task is never started");
    assert_eq!(book.job(&name("b")).unwrap().state, JobState::Canceled);
    assert_eq!(tasks(&book, "b")[3], "0-3");
}

/// A pass costs what there is room for, not what waits.
#[test]
fn test_ten_thousand_tasks_are_one_record_and_a_pass_is_offered_only_what_there_is_room_for() {
    let (mut book, now) = (book(4, START), moment(1, START));
    let begun = Instant::now();
    book.submit(array("a", "0-9999", 1), now).unwrap();
    let (rooms, _) = book.rooms(now);
    assert_eq!(book.waiting(most(&rooms)).0.len(), 5);
    assert_eq!(book.changes().jobs.len(), 1);
    book.schedule(now);
    assert_eq!(book.changes().jobs.len(), 5);
    for index in 0..10_000 {
        end(&mut book, &format!("a--{index}"), Verdict::Completed);
        book.retire();
    }
    assert_eq!(book.jobs().count(), 0);
    println!("10,000 tasks in {:?}", begun.elapsed());
}

/// A book, its disk, and what truly ran.
struct World {
    book: Book,
    disk: BTreeMap<JobId, JobRecord>,
    /// Indices whose task has ended, and how.
    ends: BTreeMap<u32, Verdict>,
    seconds: u64,
}

impl World {
    fn new(slots: u32, indices: &str, attempts: u32) -> World {
        let mut book = book(slots, START);
        book.submit(array("a", indices, attempts), moment(1, START)).unwrap();
        World { book, disk: BTreeMap::new(), ends: BTreeMap::new(), seconds: 1 }
    }

    fn now(&self) -> Moment {
        moment(self.seconds, START)
    }

    fn commit(&mut self) {
        self.book.schedule(self.now());
        for job in self.book.changes().jobs {
            let before = self.disk.insert(job.id.clone(), (*job).clone());
            if let (Some((_, index)), Some(verdict)) = (job.task(), job.state.verdict())
                && before.is_none_or(|before| !before.state.is_terminal())
            {
                assert_eq!(self.ends.insert(index, verdict), None, "{} ended twice", job.id);
            }
        }
        self.book.retire();
    }

    fn placed(&self) -> Vec<JobRecord> {
        let placed = self.book.jobs().filter(|job| job.is_task && job.state.is_placed());
        placed.map(|job| (**job).clone()).collect()
    }

    /// The controller is killed: what it had not written is lost, and the node reports what it runs.
    fn restart(&mut self, slots: u32) {
        let jobs = self.disk.values().filter(|job| !job.state.is_terminal()).cloned().collect();
        let documents = self.book.nodes().map(|node| Document::Node(Box::new(node.record.clone()))).collect();
        let last_seq = self.disk.values().map(|job| job.seq).max().unwrap_or_default();
        let loaded = Loaded { jobs, documents, last_seq, ..Loaded::default() };
        self.book = Book::new(loaded, Duration::from_secs(15), Terms::default(), 1000, self.now().boot);
        self.book.link(|_| true);
        let runs = self.placed().iter().map(|job| held(job.replica(0), ReplicaStep::Running)).collect();
        let now = self.now();
        hear(&mut self.book, report(slots, "b1", runs), now);
    }
}

proptest! {
    #[test]
    fn test_no_index_is_lost_or_runs_twice_and_never_more_than_may_at_a_time(
        slots in 1_u32..5, most in 0_u32..4, attempts in 1_u32..3,
        steps in proptest::collection::vec((0_u8..8, 0_usize..6), 0..60),
    ) {
        let at_once = if most == 0 { String::new() } else { format!("%{most}") };
        let all = "2-9,20-40:5";
        let mut world = World::new(slots, &format!("{all}{at_once}"), attempts);
        let mut canceled = BTreeSet::new();
        let end = |world: &mut World, which: usize, verdict: Verdict| {
            let placed = world.placed();
            let Some(job) = placed.get(which % placed.len().max(1)) else { return };
            let fault = (verdict == Verdict::Failed).then(|| Fault::new(Code::RunLost, "x"));
            let now = world.now();
            world.book.settle(&job.replica(0), &"box".parse().unwrap(), ended(verdict, fault), now);
        };
        world.commit();
        for (step, which) in steps {
            world.seconds += 1;
            match step {
                0..=2 => end(&mut world, which, Verdict::Completed),
                3..=4 => end(&mut world, which, Verdict::Failed),
                5 => world.seconds += 20,
                6 => {
                    let index = 2 + which as u32;
                    let now = world.now();
                    if world.book.cancel(&name(&format!("a--{index}")), "ada", now).is_some() {
                        canceled.insert(index);
                    }
                }
                _ => world.restart(slots),
            }
            world.commit();
            let open = world.book.jobs().filter(|job| job.is_task).count() as u32;
            prop_assert!(most == 0 || open <= most + canceled.len() as u32);
            prop_assert!(world.placed().len() as u32 <= slots);
            if let Some(array) = world.book.job(&name("a")).filter(|job| !job.state.is_terminal()) {
                let tasks = array.tasks.clone().unwrap();
                prop_assert_eq!(tasks.active.len(), open);
                prop_assert!(most == 0 || world.placed().len() as u32 <= most);
            }
        }
        for _ in 0..100 {
            world.seconds += 20;
            end(&mut world, 0, Verdict::Completed);
            world.commit();
        }
        let indices: Vec<u32> = all.parse::<agent_model::job::Indices>().unwrap().iter().collect();
        prop_assert_eq!(world.ends.keys().copied().collect::<Vec<_>>(), indices);
        let array = &world.disk[&name("a")];
        let ends: BTreeSet<String> = world.ends.values().map(|end| JobState::from(*end).name().to_owned()).collect();
        let whole = ["Failed", "Canceled", "Completed"].into_iter().find(|end| ends.contains(*end));
        prop_assert_eq!(Some(array.state.name()), whole);
    }
}
