use std::time::Duration;

use agent_model::job::{JobDraft, Predecessor, Priority};
use agent_model::lease::Terms;
use agent_model::{Code, NodeId};

use super::super::tests::{START, book, ended, moment, submission};
use super::super::{Standing, Submission};
use super::*;
use crate::store::Loaded;

fn name(text: &str) -> JobId {
    text.parse().unwrap()
}

fn after(job: &str, predecessors: &[(&str, WantedEnd)]) -> Submission {
    let one = submission(job, Priority::Medium, 1);
    let predecessors = predecessors.iter().map(|(job, end)| Predecessor { job: name(job), end: *end });
    let draft = JobDraft { predecessors: predecessors.collect(), ..JobDraft::from(one.spec) };
    Submission { spec: draft.validate().unwrap(), ..one }
}

fn state(book: &Book, job: &str) -> JobState {
    book.job(&name(job)).unwrap().state
}

/// The job, which has a node, ends there.
fn end(book: &mut Book, job: &str, verdict: Verdict) {
    let (node, now): (NodeId, _) = ("box".parse().unwrap(), moment(1, START));
    let replica = book.job(&name(job)).unwrap().replica(0);
    assert_eq!(book.settle(&replica, &node, ended(verdict, None), now), Standing::Open);
    book.schedule(now);
}

/// A job `a` that runs, on a node with room for two.
fn running() -> (Book, Moment) {
    let (mut book, now) = (book(2, START), moment(1, START));
    book.submit(submission("a", Priority::Medium, 1), now).unwrap();
    book.schedule(now);
    (book, now)
}

#[test]
fn test_job_starts_when_those_it_comes_after_have_ended_as_wanted() {
    for verdict in [Verdict::Completed, Verdict::Failed] {
        let (mut book, now) = running();
        for (job, wanted) in
            [("good", WantedEnd::Completed), ("bad", WantedEnd::Failed), ("both", WantedEnd::Any)]
        {
            book.submit(after(job, &[("a", wanted)]), now).unwrap();
        }
        book.submit(after("then", &[("good", WantedEnd::Completed), ("both", WantedEnd::Completed)]), now);
        book.schedule(now);
        assert_eq!(book.detail(book.job(&name("bad")).unwrap()), "is to start when a has failed");
        assert!(["good", "bad", "both"].iter().all(|job| state(&book, job) == JobState::Queued));
        end(&mut book, "a", verdict);
        let [met, unmet] = match verdict {
            Verdict::Completed => ["good", "bad"],
            _ => ["bad", "good"],
        };
        assert_eq!((state(&book, met), state(&book, "both")), (JobState::Preparing, JobState::Preparing));
        assert_eq!(state(&book, unmet), JobState::Failed);
        let outcome = book.job(&name(unmet)).unwrap().outcome.clone().unwrap();
        assert_eq!(outcome.fault.unwrap().code, Code::JobNeverDue);
        // A job that comes after a failed one fails too; otherwise it still waits for the other.
        let then = if verdict == Verdict::Completed { JobState::Queued } else { JobState::Failed };
        assert_eq!(state(&book, "then"), then);
        if then == JobState::Queued {
            end(&mut book, "good", Verdict::Completed);
            let waits = book.detail(book.job(&name("then")).unwrap());
            assert_eq!(waits, "is to start when both has completed");
            end(&mut book, "both", Verdict::Completed);
            assert_eq!(state(&book, "then"), JobState::Preparing);
        }
    }
}

#[test]
fn test_job_that_comes_after_a_canceled_one_starts_only_if_any_end_will_do() {
    let (mut book, now) = running();
    book.submit(submission("b", Priority::Medium, 1), now).unwrap();
    book.hold(&name("b"), true, "uid 1", now);
    book.submit(after("c", &[("b", WantedEnd::Completed)]), now).unwrap();
    book.submit(after("d", &[("b", WantedEnd::Any)]), now).unwrap();
    book.cancel(&name("b"), "uid 1", now);
    book.schedule(now);
    assert_eq!((state(&book, "c"), state(&book, "d")), (JobState::Failed, JobState::Preparing));
}

#[test]
fn test_end_that_crossed_the_submission_counts() {
    let (mut book, now) = running();
    end(&mut book, "a", Verdict::Completed);
    book.submit(after("b", &[("a", WantedEnd::Completed)]), now).unwrap();
    book.schedule(now);
    assert_eq!(state(&book, "b"), JobState::Preparing);
    // The same when only the store has it.
    book.submit(after("c", &[("old", WantedEnd::Completed)]), now).unwrap();
    book.schedule(now);
    assert_eq!(state(&book, "c"), JobState::Queued);
    assert_eq!(book.unknown_predecessors(), [name("old")]);
    let old = JobRecord { state: JobState::Completed, ..crate::store::tests::job("old", 9) };
    book.resolve_predecessor(&name("old"), Some(&old));
    book.schedule(now);
    assert_eq!((state(&book, "c"), book.unknown_predecessors().len()), (JobState::Preparing, 0));
}

#[test]
fn test_what_a_job_waits_for_and_who_holds_it_outlive_the_controller() {
    let (mut book, now) = running();
    book.submit(after("b", &[("a", WantedEnd::Completed)]), now).unwrap();
    book.submit(after("c", &[("lost", WantedEnd::Any)]), now).unwrap();
    book.submit(submission("d", Priority::Medium, 1), now).unwrap();
    assert!(book.hold(&name("d"), true, "uid 1", now));
    book.schedule(now);
    let changes = book.changes();
    let jobs = changes.jobs.iter().map(|job| JobRecord::clone(job)).collect();
    let loaded = Loaded { jobs, documents: changes.documents, ..Loaded::default() };
    let mut book = Book::new(loaded, Duration::from_secs(15), Terms::default(), 8, START);
    book.schedule(now);
    assert!(["b", "c", "d"].iter().all(|job| state(&book, job) == JobState::Queued));
    assert_eq!(book.detail(book.job(&name("d")).unwrap()), "held by uid 1; `agentctl release` lets it go");
    // It is not known how that one ended.
    assert_eq!(book.unknown_predecessors(), [name("lost")]);
    book.resolve_predecessor(&name("lost"), None);
    end(&mut book, "a", Verdict::Failed);
    assert_eq!((state(&book, "b"), state(&book, "c")), (JobState::Failed, JobState::Failed));
}

#[test]
fn test_held_job_starts_when_it_is_released_and_what_does_not_wait_is_not_held() {
    let (mut book, now) = running();
    assert!(!book.hold(&name("a"), true, "uid 1", now), "it has a node");
    assert!(!book.hold(&name("none"), true, "uid 1", now));
    book.submit(submission("b", Priority::Medium, 1), now).unwrap();
    assert!(book.hold(&name("b"), true, "uid 1", now) && book.hold(&name("b"), true, "uid 1", now));
    book.schedule(now);
    assert_eq!(state(&book, "b"), JobState::Queued);
    assert!(book.hold(&name("b"), false, "uid 1", now));
    book.schedule(now);
    assert_eq!(state(&book, "b"), JobState::Preparing);
    let told: Vec<String> = book.changes().events.into_iter().map(|event| event.text).collect();
    let of = |text: &str| told.iter().filter(|told| *told == text).count();
    assert_eq!((of("held by uid 1"), of("released by uid 1")), (1, 1), "{told:?}");
}
