//! A job as it was made: the draft on record, with exactly the packages that it ran with if that is wanted, and the
//! text of a job file for it.

use agent_jobfile::{job_text, locked};
use agent_model::job::{JobDraft, OutputName};
use agent_model::{Code, Fault, Timestamp};

use super::view::JobView;
use crate::client::Client;
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::{clean, moment};

/// The text of a job file that makes the job again.
pub(super) async fn text(
    client: &Client,
    job: &JobView,
    is_locked: bool,
    output: &mut Output,
) -> Result<String, Failure> {
    if job.spec.pipeline.is_some() {
        return Err(Failure::refused(
            format!("{} is a pipeline, which is made of several files", job.job),
            format!(
                "run it again as it is on record: agentctl rerun {}; or show a step: agentctl show '{}[STEP]' --as-job",
                job.job, job.job
            ),
        ));
    }
    let mut lost = lost_with_submission(&job.spec);
    let draft = draft(client, job, is_locked, output).await?;
    lost.extend(given_versions(&job.spec));
    if !lost.is_empty() {
        output.note(&format!("not in the file, because it was for that submission: {}", lost.join(", ")));
    }
    let submitted = moment(Timestamp(job.submitted_ms));
    Ok(format!("# {}, submitted {submitted}\n{}", clean(&job.job), job_text(&draft)))
}

/// The draft of the job; `is_locked`: with the packages that it ran with, where its environment has a list of them.
pub(super) async fn draft(
    client: &Client,
    job: &JobView,
    is_locked: bool,
    output: &mut Output,
) -> Result<JobDraft, Failure> {
    let mut draft = JobDraft::from(job.spec.clone());
    // A version is given once: the outputs of the job that is made get the next ones.
    (draft.begin, draft.deadline) = (None, None);
    draft.output_names.values_mut().for_each(|name| name.version = None);
    if !is_locked {
        return Ok(draft);
    }
    let used = job.outcome.as_ref().and_then(|outcome| outcome.environment.as_ref());
    let Some(used) = used else {
        return Err(Failure::refused(
            format!("it is not known with which packages {} ran: it has not run to an end", job.job),
            "wait for its end, or leave out --locked",
        ));
    };
    let exact = match used.lock {
        Some(lock) => locked(&draft.environment, &client.text(lock).await?),
        None => None,
    };
    match exact {
        Some(exact) => draft.environment = exact,
        None => output.note("its environment has no list of packages: it stays as it was asked for"),
    }
    Ok(draft)
}

/// What was of one submission only, in words.
fn lost_with_submission(draft: &JobDraft) -> Vec<String> {
    let name = draft.name.as_ref().map(|name| format!("the name `{name}`, which is taken"));
    let after = draft.predecessors.iter().map(|before| format!("that it was to {before}"));
    let dates = [("begin", draft.begin), ("deadline", draft.deadline)];
    let dates = dates.into_iter().filter_map(|(what, at)| Some(format!("its {what}, {}", moment(at?))));
    name.into_iter().chain(after).chain(dates).collect()
}

/// The versions that its outputs got, in words.
fn given_versions(draft: &JobDraft) -> impl Iterator<Item = String> {
    let given = draft.output_names.values().filter_map(OutputName::reference);
    given.map(|reference| format!("the version of `{reference}`, which is given once"))
}

/// A snapshot that is named by its content is sent by nobody: if it is gone, the files themselves are needed.
pub(super) fn explain_gone(failure: Failure, whose: &str) -> Failure {
    match failure {
        Failure::Fault(fault) if fault.code == Code::SnapshotMissing => {
            let what = format!("the code or an input of {whose} is not in the store any more");
            Fault::new(Code::SnapshotMissing, what).fix("submit it again from its directory").into()
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_what_cannot_be_made_again_is_told() {
        let before = agent_model::job::Predecessor {
            job: "a-1".parse().unwrap(),
            end: agent_model::job::WantedEnd::Completed,
        };
        let draft =
            JobDraft { name: Some("b".parse().unwrap()), predecessors: vec![before], ..JobDraft::default() };
        let expected = ["the name `b`, which is taken", "that it was to start when a-1 has completed"]
            .map(str::to_owned);
        assert_eq!(lost_with_submission(&draft), expected);
        assert!(lost_with_submission(&JobDraft::default()).is_empty());
    }
}
