use proptest::prelude::*;

use super::*;
use crate::Digest;
use crate::job::Output;

fn output(step: u32, name: &str) -> StepOutput {
    StepOutput { step, output: name.to_owned() }
}

/// A step that reads output `out` of others and leaves one itself.
fn step(name: &str, reads: &[u32], after: &[u32]) -> PipelineStep {
    let bound: BTreeMap<String, StepOutput> =
        reads.iter().map(|read| (format!("in{read}"), output(*read, "out"))).collect();
    let job = JobDraft {
        command: "cat > ${{outputs.out}}/x".to_owned(),
        inputs: bound.keys().map(|name| (name.clone(), Input::Literal("later".to_owned()))).collect(),
        outputs: [("out".to_owned(), Output::Folder)].into(),
        ..JobDraft::default()
    };
    PipelineStep {
        name: name.to_owned(),
        job: job.validate().unwrap(),
        bound,
        after: after.to_vec(),
        reuse: false,
    }
}

/// `prep` → `train`, `eval` → `report`; `side` for itself; `last` after `report`, reading nothing of it.
fn pipeline() -> Pipeline {
    let steps = vec![
        step("prep", &[], &[]),
        step("train", &[0], &[]),
        step("eval", &[0], &[]),
        step("report", &[1, 2], &[]),
        step("side", &[], &[]),
        step("last", &[], &[3]),
    ];
    Pipeline { steps, outputs: BTreeMap::new(), continue_on_failure: true, force_rerun: false, again: None }
}

use StepDecision::{Skip, Start, StopAll};
use StepState::{Active, Ended, NotRun as Never, Waiting};
use Verdict::{Canceled, Completed, Failed};

const DONE: StepState = Ended(Completed);

fn decided(pipeline: &Pipeline, states: [StepState; 6]) -> Vec<StepDecision> {
    pipeline.next(|step| states[step as usize], |_| true)
}

fn after(step: u32, lost: &str) -> StepDecision {
    Skip(step, NotRun::After(lost.to_owned()))
}

#[test]
fn test_a_step_starts_when_all_that_it_needs_is_there_and_once() {
    let pipeline = pipeline();
    for (states, expected) in [
        ([Waiting; 6], vec![Start(0), Start(4)]),
        ([Active, Waiting, Waiting, Waiting, Active, Waiting], vec![]),
        ([DONE, Waiting, Waiting, Waiting, Active, Waiting], vec![Start(1), Start(2)]),
        ([DONE, DONE, Active, Waiting, DONE, Waiting], vec![]),
        ([DONE, DONE, DONE, Waiting, DONE, Waiting], vec![Start(3)]),
        ([DONE, DONE, DONE, Active, DONE, Waiting], vec![]),
        ([DONE, DONE, DONE, DONE, DONE, Waiting], vec![Start(5)]),
        ([DONE; 6], vec![]),
    ] {
        assert_eq!(decided(&pipeline, states), expected, "{states:?}");
    }
}

#[test]
fn test_what_comes_after_a_failure_never_runs_and_the_rest_goes_on() {
    let pipeline = pipeline();
    for end in [Failed, Canceled] {
        let states = [DONE, Ended(end), Waiting, Waiting, Waiting, Waiting];
        let expected = [Start(2), after(3, "train"), Start(4), after(5, "report")];
        let mut found = decided(&pipeline, states);
        found.sort_by_key(|decision| match decision {
            Start(step) | Skip(step, _) | StopAll(step) => *step,
        });
        assert_eq!(found, expected);
        let later = [DONE, Ended(end), DONE, Never, DONE, Waiting];
        assert_eq!(decided(&pipeline, later), [after(5, "report")]);
    }
}

#[test]
fn test_where_a_failure_ends_all_nothing_is_started_any_more() {
    let pipeline = Pipeline { continue_on_failure: false, ..pipeline() };
    let states = [DONE, Ended(Failed), Waiting, Waiting, Active, Waiting];
    assert_eq!(decided(&pipeline, states), [StopAll(1)]);
    assert_eq!(decided(&pipeline, [Waiting; 6]), [Start(0), Start(4)]);
}

#[test]
fn test_an_output_in_which_nothing_is_left_starts_no_step() {
    let pipeline = pipeline();
    let states = [DONE, DONE, DONE, Waiting, DONE, Waiting];
    let decisions = pipeline.next(|step| states[step as usize], |made| *made != output(2, "out"));
    let nothing = NotRun::Nothing { step: "eval".to_owned(), output: "out".to_owned() };
    assert_eq!(nothing.to_string(), "because eval left nothing in its output `out`");
    assert_eq!(decisions, [Skip(3, nothing), after(5, "report")]);
}

#[test]
fn test_a_pipeline_that_cannot_be_run_is_refused_with_the_reason() {
    type Change = fn(&mut Pipeline);
    let table: [(Change, &str); 7] = [
        (|p| p.steps.clear(), "has 0 steps"),
        (|p| p.steps[1].name = "prep".to_owned(), "two steps are called `prep`"),
        (|p| p.steps[0].after = vec![5], "wait for each other: prep, last, report, train"),
        (|p| p.steps[3].after = vec![9], "comes after step 9, which is not there"),
        (
            |p| drop(p.steps[1].bound.insert("in0".to_owned(), output(0, "gone"))),
            "`prep` has no output `gone`",
        ),
        (
            |p| drop(p.steps[1].bound.insert("gone".to_owned(), output(0, "out"))),
            "`train` has no input `gone`",
        ),
        (|p| drop(p.outputs.insert("model".to_owned(), output(7, "out"))), "`7` has no output `out`"),
    ];
    for (change, said) in table {
        let mut pipeline = pipeline();
        pipeline.check().unwrap();
        change(&mut pipeline);
        let fault = pipeline.check().unwrap_err();
        assert!(fault.what.contains(said), "{fault}");
    }
    let mut whole = pipeline();
    whole.steps[1].bound.insert("in0".to_owned(), output(0, ARTIFACTS));
    whole.check().unwrap();
}

fn job(pipeline: Pipeline) -> JobDraft {
    let array = Some(Array::counted(pipeline.steps.len() as u32).unwrap());
    JobDraft { array, pipeline: Some(Box::new(pipeline)), ..JobDraft::default() }
}

#[test]
fn test_a_step_is_a_job_of_who_submitted_the_pipeline_with_what_others_made_as_inputs() {
    let owner = Some(crate::Principal::Local { uid: 7 });
    let spec = JobDraft { experiment: "e".to_owned(), ..job(pipeline()) }.validate().unwrap();
    let spec = spec.owned_by(owner.clone(), None);
    assert_eq!(JobSpec::try_from(JobDraft::from(spec.clone())).unwrap(), spec);
    let made = |made: &StepOutput| (made.step == 1).then_some(Input::Folder(Digest::EMPTY));
    let report = spec.step(&"p".parse().unwrap(), 3, made).unwrap();
    assert_eq!(report.inputs["in1"], Input::Folder(Digest::EMPTY));
    assert_eq!(report.inputs["in2"], Input::Literal("later".to_owned()), "it is not made yet");
    assert_eq!((&report.owner, report.experiment.as_str()), (&owner, "e"));
    assert_eq!(report.environment_variables["AGENTD_STEP"], "report");
    assert!(report.pipeline.is_none() && report.array.is_none());
    assert_eq!(spec.step(&"p".parse().unwrap(), 9, |_| None), None);
    assert_eq!(output(1, "out").expression(&pipeline().name(1)), "${{parent.jobs.train.outputs.out}}");
}

#[test]
fn test_a_pipeline_is_sent_as_json_and_its_tasks_are_its_steps() {
    let pipeline = Pipeline {
        outputs: [("model".to_owned(), output(1, "out"))].into(),
        again: Some(Again { pipeline: "old".parse().unwrap(), steps: vec![0] }),
        ..pipeline()
    };
    assert_eq!(pipeline.to_string().parse::<Pipeline>().unwrap(), pipeline);
    let draft = job(pipeline);
    for array in [None, Some("0-4".parse().unwrap()), Some("0-5%2".parse().unwrap())] {
        let fault = JobDraft { array, ..draft.clone() }.validate().unwrap_err();
        assert!(fault.what.contains("other tasks than its steps"), "{fault}");
    }
}

#[test]
fn test_the_name_of_a_pipeline_leaves_room_for_those_of_its_steps() {
    let named =
        |length: usize| JobDraft { name: Some("n".repeat(length).parse().unwrap()), ..job(pipeline()) };
    named(93).validate().unwrap();
    let mut sweeps = named(93);
    let steps = &mut sweeps.pipeline.as_mut().unwrap().steps;
    let array = Some("0-9".parse().unwrap());
    steps[4].job = JobDraft { array, ..JobDraft::from(steps[4].job.clone()) }.validate().unwrap();
    let fault = sweeps.validate().unwrap_err();
    assert!(
        fault.what.contains("too long a name for a pipeline") && fault.why[0].contains("side"),
        "{fault}"
    );
}

/// A pipeline in which a step reads and comes after only steps before it.
fn any_pipeline() -> impl Strategy<Value = Pipeline> {
    let needs = proptest::collection::vec((proptest::collection::vec(0..8_u32, 0..3), 0..8_u32), 1..8);
    (needs, any::<bool>()).prop_map(|(needs, continue_on_failure)| {
        let step = |(index, (reads, last)): (u32, (Vec<u32>, u32))| {
            let reads: Vec<u32> = reads.into_iter().filter(|read| *read < index).collect();
            let last: Vec<u32> = Some(last).filter(|last| *last < index).into_iter().collect();
            step(&format!("s{index}"), &reads, &last)
        };
        let steps = (0..).zip(needs).map(step).collect();
        Pipeline { steps, outputs: BTreeMap::new(), continue_on_failure, force_rerun: false, again: None }
    })
}

proptest! {
    /// However steps end, and whatever is decided in whatever order: all come to an end, none starts before what it
    /// needs has completed, and none is decided twice.
    #[test]
    fn test_every_history_ends_and_no_step_runs_before_its_input(
        pipeline in any_pipeline(),
        ends in proptest::collection::vec((0..4_u8, 0..100_usize), 30),
    ) {
        let count = pipeline.steps.len();
        let mut states = vec![Waiting; count];
        for (end, which) in ends {
            for decision in pipeline.next(|step| states[step as usize], |_| true) {
                match decision {
                    Start(step) => {
                        prop_assert_eq!(states[step as usize], Waiting);
                        prop_assert!(pipeline.needs(step).all(|need| states[need as usize] == DONE));
                        states[step as usize] = Active;
                    }
                    Skip(step, _) => {
                        prop_assert_eq!(states[step as usize], Waiting);
                        states[step as usize] = Never;
                    }
                    StopAll(because) => {
                        prop_assert!(!pipeline.continue_on_failure);
                        prop_assert!(matches!(states[because as usize], Ended(Failed | Canceled)));
                        let ended = |state: &StepState| match state {
                            Waiting => Never,
                            Active => Ended(Canceled),
                            other => *other,
                        };
                        states = states.iter().map(ended).collect();
                    }
                }
            }
            let active: Vec<usize> = (0..count).filter(|step| states[*step] == Active).collect();
            prop_assert!(!active.is_empty() || !states.contains(&Waiting), "it stands still");
            if let Some(step) = active.get(which % active.len().max(1)) {
                states[*step] = Ended(if end == 0 { Failed } else { Completed });
            }
        }
        prop_assert!(!states.contains(&Waiting) && !states.contains(&Active));
    }
}
