use agent_model::job::JobDraft;
use agent_model::outcome::UsedEnvironment;
use agent_model::pipeline::{Pipeline, PipelineStep};
use agent_model::{JobState, NodeId, Outcome, Principal};

use super::super::pipelines::tests::{left, step, submit};
use super::super::tests::{START, book, ended, moment};
use super::super::{Standing, Submission};
use super::*;
use crate::queue::assets::FoundOutputs;

fn name(text: &str) -> JobId {
    text.parse().unwrap()
}

/// `prep`, and `train`, which reads what it leaves and runs this command.
fn pipeline(job: &str, command: &str, owner: u32) -> Submission {
    let reusable = |name: &str, command: &str, reads: &[u32]| {
        let step = step(name, reads);
        let draft = JobDraft { command: command.to_owned(), ..JobDraft::from(step.job) };
        PipelineStep { job: draft.validate().unwrap(), reuse: true, ..step }
    };
    let steps = vec![reusable("prep", "prep", &[]), reusable("train", command, &[0])];
    let of = Pipeline {
        steps,
        outputs: BTreeMap::new(),
        continue_on_failure: true,
        force_rerun: false,
        again: None,
    };
    let one = submit(job, of);
    let owner = Some(Principal::Local { uid: owner });
    let draft = JobDraft { owner, ..JobDraft::from(one.spec) };
    Submission { spec: draft.validate().unwrap(), ..one }
}

/// A controller with a store that forgets nothing.
struct Bed {
    book: Book,
    kept: Vec<JobRecord>,
    /// The snapshots that are gone.
    gone: Vec<Input>,
}

impl Bed {
    fn new() -> Bed {
        Bed { book: book(4, START), kept: Vec::new(), gone: Vec::new() }
    }

    fn submit(&mut self, new: Submission) {
        self.book.submit(new, moment(0, START)).unwrap();
        self.look();
    }

    /// Answers all that is asked, as the task of the queue does.
    fn look(&mut self) {
        self.book.schedule(moment(0, START));
        while !self.book.reuse_questions().is_empty() || !self.book.reuse_candidates().is_empty() {
            for (step, record) in self.book.reuse_questions() {
                let newest = |like: &dyn Fn(&ReuseRecord) -> bool| {
                    let alike = |job: &&JobRecord| job.reuse.as_ref().is_some_and(|known| like(known));
                    self.kept.iter().rev().find(alike).cloned()
                };
                let similar = Similar {
                    same: newest(&|known| known.key == record.key),
                    resolved: newest(&|known| known.environment == record.environment),
                    last: newest(&|known| known.step == record.step),
                };
                self.book.resolve_reuse(&step, judge(&record, similar), moment(0, START));
            }
            for (step, roots) in self.book.reuse_candidates() {
                let gone: Vec<Digest> = self.gone.iter().filter_map(Input::snapshot).collect();
                let is_whole = !roots.iter().any(|root| gone.contains(root));
                self.book.reuse_checked(&step, is_whole, moment(0, START));
            }
            self.book.schedule(moment(0, START));
        }
    }

    /// A step that runs completes in this environment, and leaves this.
    fn end(&mut self, step: &str, verdict: Verdict, environment: &str, what: &str) {
        let (node, now): (NodeId, _) = ("box".parse().unwrap(), moment(1, START));
        let replica = self.book.job(&name(step)).unwrap().replica(0);
        let made = BTreeMap::from([("out".to_owned(), left(what))]);
        self.book.note_found(&replica, &node, FoundOutputs { named: BTreeMap::new(), made });
        let used = Some(Box::new(UsedEnvironment { key: environment.to_owned(), lock: None }));
        let outcome = Outcome { environment: used, ..ended(verdict, None) };
        assert_eq!(self.book.settle(&replica, &node, outcome, now), Standing::Open, "{step}");
        let record = JobRecord::clone(self.book.job(&name(step)).unwrap());
        if record.state == JobState::Completed {
            self.kept.push(record);
        }
        self.look();
    }

    fn state(&self, job: &str) -> Option<JobState> {
        self.book.job(&name(job)).map(|job| job.state)
    }

    fn told(&self, job: &str) -> String {
        let events = self.book.changes().events.into_iter().filter(|event| event.job == name(job));
        events.map(|event| event.text).collect::<Vec<_>>().join("\n")
    }

    /// Both steps of a first pipeline ran.
    fn ran() -> Bed {
        let mut bed = Bed::new();
        bed.submit(pipeline("one", "train", 1));
        bed.end("one--0", Verdict::Completed, "e", "prepared");
        bed.end("one--1", Verdict::Completed, "e", "trained");
        assert_eq!(bed.state("one"), Some(JobState::Completed));
        bed
    }
}

#[test]
fn test_what_ran_before_is_not_run_again_and_the_pipeline_has_what_it_left() {
    let mut bed = Bed::ran();
    assert!(bed.told("one--0").contains("it is run: no earlier run of this step"), "{}", bed.told("one--0"));
    bed.submit(pipeline("two", "train", 1));
    assert_eq!(bed.state("two"), Some(JobState::Completed));
    assert_eq!((bed.state("two--0"), bed.state("two--1")), (None, None), "no step has a record");
    assert!(bed.told("two").contains("train is not run: one--1 did the same"), "{}", bed.told("two"));
    let steps = bed.book.job(&name("two")).unwrap().steps.clone().unwrap();
    assert_eq!(steps.made[&1]["out"], left("trained"));
    assert_eq!(steps.reused[&0], name("one--0"));
}

#[test]
fn test_a_step_that_is_another_one_runs_and_says_by_what() {
    let mut bed = Bed::ran();
    bed.submit(pipeline("two", "train --fast", 1));
    assert_eq!((bed.state("two--0"), bed.state("two--1").is_some()), (None, true));
    assert!(bed.told("two--1").contains("it is run: another command than when one--1 ran"));
    bed.submit(pipeline("three", "train", 2));
    assert!(bed.state("three--0").is_some(), "of another owner nothing is taken");
    assert!(bed.told("three--0").contains("no earlier run of this step is on record"));
}

#[test]
fn test_a_step_that_leaves_the_same_as_before_lets_those_after_it_be_reused() {
    let mut bed = Bed::ran();
    let mut again = pipeline("two", "train", 1);
    let mut of = *again.spec.pipeline.clone().unwrap();
    of.steps[0].job =
        JobDraft { command: "prep # in other words".into(), ..JobDraft::from(of.steps[0].job.clone()) }
            .validate()
            .unwrap();
    again.spec = JobDraft { pipeline: Some(Box::new(of)), ..JobDraft::from(again.spec) }.validate().unwrap();
    bed.submit(again);
    bed.end("two--0", Verdict::Completed, "e", "prepared");
    assert_eq!((bed.state("two"), bed.state("two--1")), (Some(JobState::Completed), None));
}

#[test]
fn test_an_environment_that_became_another_one_and_blobs_that_are_gone_are_told() {
    let mut bed = Bed::ran();
    bed.submit(pipeline("two", "train --fast", 1));
    bed.end("two--1", Verdict::Completed, "newer", "fast");
    bed.submit(pipeline("three", "train", 1));
    let told = bed.told("three--0");
    assert!(
        told.contains("its environment has become another one since one--0 ran: two--1 has it"),
        "{told}"
    );

    let mut bed = Bed::ran();
    bed.gone.push(left("trained"));
    bed.submit(pipeline("two", "train", 1));
    assert_eq!(bed.state("two--0"), None);
    assert!(bed.told("two--1").contains("what one--1 left is not all in the store any more"));
}

#[test]
fn test_of_two_that_are_alike_one_runs_and_the_other_takes_what_it_left_or_runs_too() {
    for verdict in [Verdict::Completed, Verdict::Failed] {
        let mut bed = Bed::new();
        bed.submit(pipeline("one", "train", 1));
        bed.submit(pipeline("two", "train", 1));
        assert_eq!((bed.state("one--0").is_some(), bed.state("two--0")), (true, None));
        assert!(
            bed.told("two").contains("prep waits for one--0, which does the same"),
            "{}",
            bed.told("two")
        );
        bed.end("one--0", verdict, "e", "prepared");
        match verdict {
            Verdict::Completed => assert_eq!(bed.state("two--0"), None, "{}", bed.told("two")),
            _ => assert!(bed.state("two--0").is_some(), "{}", bed.told("two")),
        }
    }
}

#[test]
fn test_a_step_that_nobody_answers_for_is_run_and_one_of_a_pipeline_that_ends_is_forgotten() {
    let mut bed = Bed::new();
    bed.book.submit(pipeline("one", "train", 1), moment(0, START)).unwrap();
    bed.book.schedule(moment(0, START));
    assert_eq!((bed.book.reuse_questions().len(), bed.state("one--0")), (1, None));
    assert_eq!(
        bed.book.next_alarm(moment(0, START)),
        Some(moment(0, START).boot),
        "the store is asked at once"
    );
    let late = moment(PATIENCE.as_secs() + 1, START);
    bed.book.expire(late);
    bed.book.schedule(late);
    assert!(bed.state("one--0").is_some());

    bed.book.submit(pipeline("two", "train", 2), late).unwrap();
    bed.book.schedule(late);
    assert_eq!(bed.book.reuse_questions().len(), 1);
    bed.book.cancel(&name("two"), "u", late);
    bed.book.expire(late);
    assert!(bed.book.reuse_questions().is_empty());
}
