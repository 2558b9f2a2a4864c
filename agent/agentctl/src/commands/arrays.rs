//! What is shown of arrays: how their tasks stand, as counts and as indices.

use super::jobs;
use super::view::JobView;
use crate::client::Client;
use crate::failure::Failure;

/// The tasks of an array that have a record, by their indices; of any other job itself.
pub(super) async fn tasks_or_self(client: &Client, job: JobView) -> Result<Vec<JobView>, Failure> {
    if job.tasks.is_none() {
        return Ok(vec![job]);
    }
    let mut tasks = tasks(client, &job).await?;
    tasks.sort_by_key(|task| task.index);
    Ok(tasks)
}

/// The tasks of an array that have a record.
pub(super) async fn tasks(client: &Client, array: &JobView) -> Result<Vec<JobView>, Failure> {
    let wanted = jobs::JobQuery { array: array.job.clone(), ..jobs::JobQuery::default() };
    Ok(jobs::list(client, &wanted).await?.0)
}

/// Refuses an array where only one task can be meant.
pub(super) fn require_one(job: &JobView) -> Result<(), Failure> {
    let Some(tasks) = &job.tasks else { return Ok(()) };
    let first = job.spec.array.as_ref().and_then(|array| array.indices().first()).unwrap_or_default();
    let of = |what: &str, parts: &str| format!("{} is {what} of {} {parts}", job.job, tasks.total);
    let (what, first) = match (&job.spec.sweep, &job.spec.pipeline) {
        (Some(_), _) => (of("a sweep", "trials"), first.to_string()),
        (None, Some(pipeline)) => (of("a pipeline", "steps"), pipeline.name(first)),
        (None, None) => (of("an array", "tasks"), first.to_string()),
    };
    Err(Failure::refused(
        what,
        format!("name one of them, for example '{0}[{first}]'; list them: agentctl jobs {0}", job.job),
    ))
}
