use std::collections::{BTreeMap, BTreeSet};

use agent_model::job::{Array, Input, JobDraft, Output, Priority};
use agent_model::lease::Terms;
use agent_model::pipeline::{Again, PipelineStep};
use agent_model::sweep::{Distribution, Goal, Logged, Objective, Sampling, Space, Sweep, Tally};
use agent_model::{Boot, NodeId};
use proptest::prelude::*;

use super::super::tests::{START, book, ended, moment, submission};
use super::super::{Standing, Submission};
use super::*;
use crate::queue::assets::FoundOutputs;
use crate::store::{Document, Loaded};

fn name(text: &str) -> JobId {
    text.parse().unwrap()
}

fn output(step: u32) -> StepOutput {
    StepOutput { step, output: "out".to_owned() }
}

pub(in crate::queue::book) fn step(name: &str, reads: &[u32]) -> PipelineStep {
    let bound: BTreeMap<String, StepOutput> =
        reads.iter().map(|read| (format!("in{read}"), output(*read))).collect();
    let job = JobDraft {
        command: "true".to_owned(),
        inputs: bound.keys().map(|name| (name.clone(), Input::Literal("later".to_owned()))).collect(),
        outputs: [("out".to_owned(), Output::Folder)].into(),
        ..JobDraft::default()
    };
    PipelineStep {
        name: name.to_owned(),
        job: job.validate().unwrap(),
        bound,
        after: Vec::new(),
        reuse: false,
    }
}

/// `prep` → `train`, `eval` → `report`; `side` for itself.
fn pipeline() -> Pipeline {
    let steps = vec![
        step("prep", &[]),
        step("train", &[0]),
        step("eval", &[0]),
        step("report", &[1, 2]),
        step("side", &[]),
    ];
    Pipeline { steps, outputs: BTreeMap::new(), continue_on_failure: true, force_rerun: false, again: None }
}

pub(in crate::queue::book) fn submit(job: &str, pipeline: Pipeline) -> Submission {
    let one = submission(job, Priority::High, 1);
    let draft = JobDraft {
        command: String::new(),
        array: Some(Array::counted(pipeline.steps.len() as u32).unwrap()),
        pipeline: Some(Box::new(pipeline)),
        ..JobDraft::from(one.spec)
    };
    Submission { spec: draft.validate().unwrap(), ..one }
}

/// What a step leaves: a folder of its own.
pub(in crate::queue::book) fn left(step: &str) -> Input {
    let mut hasher = agent_cas::Hasher::new();
    hasher.update(step.as_bytes());
    Input::Folder(hasher.finish())
}

/// A step that has a node ends there, and leaves something if it completes.
fn end(book: &mut Book, step: &str, verdict: Verdict) {
    let made = BTreeMap::from([("out".to_owned(), left(step))]);
    end_with(book, step, verdict, made);
}

fn end_with(book: &mut Book, step: &str, verdict: Verdict, made: BTreeMap<String, Input>) {
    let (node, now): (NodeId, _) = ("box".parse().unwrap(), moment(1, START));
    let replica = book.job(&name(step)).unwrap().replica(0);
    book.note_found(&replica, &node, FoundOutputs { named: BTreeMap::new(), made });
    assert_eq!(book.settle(&replica, &node, ended(verdict, None), now), Standing::Open, "{step}");
    book.schedule(now);
}

/// The steps that wait, run, failed, and were canceled or are not run.
fn steps(book: &Book, job: &str) -> [String; 4] {
    let tasks = book.job(&name(job)).unwrap().tasks.clone().unwrap();
    [&tasks.waiting, &tasks.active, &tasks.failed, &tasks.canceled].map(ToString::to_string)
}

fn told(book: &Book, job: &str) -> String {
    let events = book.changes().events.into_iter().filter(|event| event.job == name(job));
    events.map(|event| event.text).collect::<Vec<_>>().join("\n")
}

fn state(book: &Book, job: &str) -> JobState {
    book.job(&name(job)).unwrap().state
}

/// A controller that loads what this one knows of jobs that have not ended.
fn restarted(book: &Book) -> Book {
    let jobs = book.jobs().filter(|job| !job.state.is_terminal());
    let json = |job: &Arc<JobRecord>| serde_json::from_str(&serde_json::to_string(&**job).unwrap()).unwrap();
    let nodes = book.nodes().map(|node| Document::Node(Box::new(node.record.clone())));
    let lives = book.changes().documents.into_iter().filter(|one| matches!(one, Document::Life(_)));
    let loaded = Loaded {
        jobs: jobs.map(json).collect(),
        documents: nodes.chain(lives).collect(),
        last_seq: 100,
        ..Loaded::default()
    };
    let mut book =
        Book::new(loaded, std::time::Duration::from_secs(15), Terms::default(), 2, Boot::default());
    book.link(|_| true);
    book
}

#[test]
fn test_steps_start_with_what_others_left_and_the_pipeline_has_one_result() {
    let (mut book, now) = (book(5, START), moment(1, START));
    book.submit(submit("p", pipeline()), now).unwrap();
    book.schedule(now);
    assert_eq!(steps(&book, "p"), ["1-3", "0,4", "", ""]);
    assert_eq!(state(&book, "p"), JobState::Running);
    let detail = book.detail(book.job(&name("p")).unwrap());
    assert_eq!(detail, "the next steps start when prep, side have ended");
    let prep = book.job(&name("p--0")).unwrap();
    assert_eq!((prep.spec.priority, prep.owner()), (Priority::High, book.job(&name("p")).unwrap().owner()));
    let later = book.waiting_task(&name("p--1")).unwrap();
    assert_eq!(later.spec.inputs["in0"], Input::Literal("later".to_owned()), "it is not made yet");
    end(&mut book, "p--0", Verdict::Completed);
    assert_eq!(steps(&book, "p"), ["3", "1-2,4", "", ""]);
    assert_eq!(book.job(&name("p--1")).unwrap().spec.inputs["in0"], left("p--0"));
    for done in ["p--4", "p--2", "p--1"] {
        end(&mut book, done, Verdict::Completed);
    }
    let report = book.job(&name("p--3")).unwrap().spec.inputs.clone();
    assert_eq!((&report["in1"], &report["in2"]), (&left("p--1"), &left("p--2")));
    assert!(!state(&book, "p").is_terminal());
    end(&mut book, "p--3", Verdict::Completed);
    assert_eq!(state(&book, "p"), JobState::Completed);
    let story = told(&book, "p");
    for line in ["prep starts: p--0", "prep Completed", "report starts: p--3", "ended: Completed"] {
        assert!(story.lines().any(|told| told == line), "{line}: {story}");
    }
}

#[test]
fn test_after_a_failure_what_does_not_need_the_step_goes_on() {
    let (mut book, now) = (book(5, START), moment(1, START));
    book.submit(submit("p", pipeline()), now).unwrap();
    book.schedule(now);
    end(&mut book, "p--0", Verdict::Completed);
    end(&mut book, "p--1", Verdict::Failed);
    assert_eq!(steps(&book, "p"), ["", "2,4", "1", "3"]);
    assert!(told(&book, "p").contains("report is not run, because train did not complete"));
    end(&mut book, "p--2", Verdict::Completed);
    end(&mut book, "p--4", Verdict::Completed);
    let job = book.job(&name("p")).unwrap();
    let fault = job.outcome.as_ref().unwrap().fault.clone().unwrap();
    assert_eq!((job.state, fault.code), (JobState::Failed, Code::TasksFailed));
    let text = fault.to_string();
    assert!(text.contains("1 step of 5 failed: train: 1 step was not run after that"), "{text}");
    assert!(fault.fix.unwrap().contains("agentctl rerun p --from train"));
}

#[test]
fn test_where_a_failure_ends_all_the_steps_that_run_are_asked_to_end() {
    let (mut book, now) = (book(5, START), moment(1, START));
    book.submit(submit("p", Pipeline { continue_on_failure: false, ..pipeline() }), now).unwrap();
    book.schedule(now);
    end(&mut book, "p--0", Verdict::Failed);
    assert_eq!(steps(&book, "p"), ["", "4", "0", "1-3"]);
    assert_eq!(state(&book, "p--4"), JobState::Finalizing(Verdict::Canceled));
    assert!(
        book.job(&name("p--4")).unwrap().cancel.as_ref().unwrap().contains("because prep did not complete")
    );
    let before = told(&book, "p");
    (book.replan, _) = (true, book.schedule(now));
    assert_eq!(told(&book, "p"), before, "it is told once");
    end(&mut book, "p--4", Verdict::Canceled);
    assert_eq!(state(&book, "p"), JobState::Failed);
}

#[test]
fn test_a_step_that_left_nothing_fails_the_pipeline_with_the_reason() {
    let (mut book, now) = (book(5, START), moment(1, START));
    book.submit(submit("p", pipeline()), now).unwrap();
    book.schedule(now);
    end(&mut book, "p--4", Verdict::Completed);
    end_with(&mut book, "p--0", Verdict::Completed, BTreeMap::new());
    assert_eq!(steps(&book, "p"), ["", "", "", "1-3"]);
    let job = book.job(&name("p")).unwrap();
    let fault = job.outcome.as_ref().unwrap().fault.clone().unwrap();
    assert_eq!(job.state, JobState::Failed);
    let said = "the step train could not run, because prep left nothing in its output `out`";
    assert!(fault.what.contains(said), "{fault}");
}

#[test]
fn test_a_cancel_goes_down_and_leaves_no_step() {
    let (mut book, now) = (book(1, START), moment(1, START));
    book.submit(submit("p", pipeline()), now).unwrap();
    book.schedule(now);
    // One runs, the other waits for the slot.
    let first = book.jobs().find(|job| job.state == JobState::Preparing).unwrap().id.clone();
    book.cancel(&name("p"), "ada", now);
    assert_eq!(steps(&book, "p")[0], "");
    let waiting = if first == name("p--0") { "p--4" } else { "p--0" };
    assert_eq!(state(&book, waiting), JobState::Canceled);
    assert_eq!(state(&book, first.as_str()), JobState::Finalizing(Verdict::Canceled));
    book.schedule(now);
    assert_eq!(state(&book, "p"), JobState::Finalizing(Verdict::Canceled));
    end(&mut book, first.as_str(), Verdict::Canceled);
    assert_eq!(state(&book, "p"), JobState::Canceled);
    assert!(book.job(&name("p--1")).is_none() && book.waiting_task(&name("p--1")).is_none());
}

#[test]
fn test_while_a_pipeline_is_held_none_of_its_steps_starts() {
    let (mut book, now) = (book(1, START), moment(1, START));
    book.submit(submit("p", pipeline()), now).unwrap();
    book.schedule(now);
    let runs = book.jobs().find(|job| job.state == JobState::Preparing).unwrap().id.clone();
    assert!(book.hold(&name("p"), true, "ada", now));
    end(&mut book, runs.as_str(), Verdict::Completed);
    assert!(book.jobs().all(|job| job.state != JobState::Preparing), "the other step waits, too");
    assert!(book.hold(&name("p"), false, "ada", now));
    book.schedule(now);
    assert_eq!(book.jobs().filter(|job| job.state == JobState::Preparing).count(), 1);
}

#[test]
fn test_a_pipeline_goes_on_where_another_ended() {
    let (mut book, now) = (book(5, START), moment(1, START));
    book.submit(submit("p", pipeline()), now).unwrap();
    book.schedule(now);
    for (step, verdict) in
        [("p--0", Verdict::Completed), ("p--4", Verdict::Completed), ("p--2", Verdict::Completed)]
    {
        end(&mut book, step, verdict);
    }
    end(&mut book, "p--1", Verdict::Failed);
    let old = (**book.job(&name("p")).unwrap()).clone();
    assert_eq!(old.state, JobState::Failed);
    let again = |of: &str| Some(Again { pipeline: name(of), steps: vec![0, 2, 4] });
    let new = submit("q", Pipeline { again: again("p"), ..pipeline() });
    book.submit(Submission { earlier: vec![old], ..new }, now).unwrap();
    book.schedule(now);
    assert_eq!(steps(&book, "q"), ["3", "1", "", ""]);
    assert_eq!(book.job(&name("q--1")).unwrap().spec.inputs["in0"], left("p--0"));
    end(&mut book, "q--1", Verdict::Failed);
    // What is used a third time is named by the job that ran.
    let old = (**book.job(&name("q")).unwrap()).clone();
    let new = submit("r", Pipeline { again: again("q"), ..pipeline() });
    book.submit(Submission { earlier: vec![old], ..new }, now).unwrap();
    book.schedule(now);
    assert_eq!(book.job(&name("r")).unwrap().steps.as_ref().unwrap().reused[&2], name("p--2"));
    end(&mut book, "r--1", Verdict::Completed);
    assert_eq!(book.job(&name("r--3")).unwrap().spec.inputs["in2"], left("p--2"));
    end(&mut book, "r--3", Verdict::Completed);
    assert_eq!(state(&book, "r"), JobState::Completed);
    // Where nothing is left to be run, it ends at once.
    let old = (**book.job(&name("r")).unwrap()).clone();
    let all = Some(Again { pipeline: name("r"), steps: vec![0, 1, 2, 3, 4] });
    let new = submit("s", Pipeline { again: all, ..pipeline() });
    book.submit(Submission { earlier: vec![old], ..new }, now).unwrap();
    book.schedule(now);
    assert_eq!(state(&book, "s"), JobState::Completed);
}

#[test]
fn test_what_the_best_trial_left_is_what_a_sweep_left() {
    let (mut book, now) = (book(5, START), moment(1, START));
    let mut pipeline = pipeline();
    let sweep = Sweep {
        space: Space([("x".to_owned(), Distribution::Uniform { min: 0.0, max: 1.0 })].into()),
        sampling: Sampling::usual(),
        objective: Objective { goal: Goal::Maximize, metric: "acc".to_owned() },
        policy: None,
        timeout: None,
        given: BTreeMap::new(),
        extends: None,
    };
    pipeline.steps[0].job = JobDraft {
        array: Some("0-1".parse().unwrap()),
        sweep: Some(Box::new(sweep)),
        ..JobDraft::from(pipeline.steps[0].job.clone())
    }
    .validate()
    .unwrap();
    book.submit(submit("p", pipeline), now).unwrap();
    book.schedule(now);
    for (trial, value) in [("p--0--0", 0.9), ("p--0--1", 0.4)] {
        let mut tally = Tally::new(Goal::Maximize, 1);
        let points = tally.log(value).into_iter().collect();
        let logged = Logged { anew: true, tally, points, names: BTreeSet::new(), is_over: false };
        let replica = book.job(&name(trial)).unwrap().replica(0);
        book.observe(&replica, logged, now);
        end(&mut book, trial, Verdict::Completed);
    }
    assert_eq!(state(&book, "p--0"), JobState::Completed);
    assert_eq!(book.job(&name("p--1")).unwrap().spec.inputs["in0"], left("p--0--0"));
}

#[test]
fn test_a_sweep_may_be_a_step() {
    let (mut book, now) = (book(5, START), moment(1, START));
    let mut pipeline = pipeline();
    let array = Some("0-2%1".parse().unwrap());
    pipeline.steps[4].job =
        JobDraft { array, ..JobDraft::from(pipeline.steps[4].job.clone()) }.validate().unwrap();
    book.submit(submit("p", pipeline), now).unwrap();
    book.schedule(now);
    assert_eq!((state(&book, "p--4"), state(&book, "p--4--0")), (JobState::Running, JobState::Preparing));
    end(&mut book, "p--4--0", Verdict::Completed);
    assert_eq!(state(&book, "p--4--1"), JobState::Preparing);
    book.cancel(&name("p"), "ada", now);
    assert_eq!(state(&book, "p--4--1"), JobState::Finalizing(Verdict::Canceled));
    end(&mut book, "p--4--1", Verdict::Canceled);
    end(&mut book, "p--0", Verdict::Canceled);
    assert_eq!((state(&book, "p--4"), state(&book, "p")), (JobState::Canceled, JobState::Canceled));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Killed and started again after any commit, a controller goes on with the same steps: each is made once, in
    /// whatever order they end, and starts with what the others left.
    #[test]
    fn test_a_controller_that_is_killed_makes_no_step_twice(
        ends in proptest::collection::vec((0..6_u8, 0..8_usize, any::<bool>()), 12),
        continue_on_failure in any::<bool>(),
    ) {
        let (mut book, now) = (book(2, START), moment(1, START));
        book.submit(submit("p", Pipeline { continue_on_failure, ..pipeline() }), now).unwrap();
        let mut made = BTreeSet::new();
        let mut ends = ends.into_iter().chain(std::iter::repeat((1, 0, false)));
        book.schedule(now);
        for _ in 0..40 {
            for job in book.jobs().filter(|job| job.is_task && job.state == JobState::Preparing) {
                let index = job.task().unwrap().1;
                let is_new = made.insert((index, job.epoch));
                let others = made.iter().filter(|(made, epoch)| *made == index && *epoch != job.epoch);
                prop_assert!(!is_new || others.count() == 0, "{} was made twice", job.id);
                for (input, bound) in &pipeline().steps[index as usize].bound {
                    prop_assert_eq!(&job.spec.inputs[input], &left(&format!("p--{}", bound.step)));
                }
            }
            let run: Vec<JobId> = book
                .jobs()
                .filter(|job| job.is_task && !job.state.is_terminal() && !job.replicas.is_empty())
                .map(|job| job.id.clone())
                .collect();
            let (how, which, kill) = ends.next().unwrap();
            let Some(step) = run.get(which % run.len().max(1)) else { break };
            let asked = book.job(step).unwrap().state == JobState::Finalizing(Verdict::Canceled);
            let verdict = match how {
                _ if asked => Verdict::Canceled,
                0 => Verdict::Failed,
                _ => Verdict::Completed,
            };
            end(&mut book, step.as_str(), verdict);
            if kill && !state(&book, "p").is_terminal() {
                book = restarted(&book);
                book.schedule(now);
            }
        }
        prop_assert!(state(&book, "p").is_terminal(), "{:?}", steps(&book, "p"));
    }
}
