//! What is shown of arrays: how their tasks stand, as counts and as indices.

use agent_model::Fault;
use agent_model::job::Indices;
use agent_proto::v1;
use serde::{Serialize, Serializer};

use super::jobs;
use super::view::JobView;
use crate::client::Client;
use crate::failure::Failure;

/// How the tasks of an array stand. Every task is counted once.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct TasksView {
    pub(crate) total: u32,
    pub(crate) completed: u32,
    /// They have not been started.
    #[serde(serialize_with = "text")]
    pub(crate) waiting: Indices,
    /// They run, or wait for another attempt.
    #[serde(serialize_with = "text")]
    pub(crate) active: Indices,
    #[serde(serialize_with = "text")]
    pub(crate) failed: Indices,
    #[serde(serialize_with = "text")]
    pub(crate) canceled: Indices,
}

fn text<S: Serializer>(indices: &Indices, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(indices)
}

impl TasksView {
    /// Of an array with so many tasks.
    pub(crate) fn read(wire: &v1::ArrayStatus, total: u32) -> Result<TasksView, Fault> {
        let read = |text: &str| {
            let fault = |error: agent_model::job::ArrayError| {
                let what = "the daemon told of indices that are none";
                Fault::new(agent_model::Code::RequestInvalid, what).because(&error)
            };
            text.parse::<Indices>().map_err(fault)
        };
        let (waiting, active) = (read(&wire.waiting)?, read(&wire.active)?);
        let (failed, canceled) = (read(&wire.failed)?, read(&wire.canceled)?);
        let others = [&waiting, &active, &failed, &canceled].map(Indices::len).iter().sum();
        let completed = total.saturating_sub(others);
        Ok(TasksView { total, completed, waiting, active, failed, canceled })
    }

    /// `3 of 200 completed, 1 failed, 8 active, 188 waiting`
    pub(crate) fn counts(&self) -> String {
        let mut text = format!("{} of {} completed", self.completed, self.total);
        for (indices, word) in self.sets() {
            text.push_str(&format!(", {} {word}", indices.len()));
        }
        text
    }

    /// The same in lines, with the indices.
    pub(crate) fn lines(&self) -> String {
        let sets = self.sets().map(|(indices, word)| format!("\n{word}: {indices}"));
        format!("{}{}", self.counts(), sets.collect::<String>())
    }

    /// Those of the sets that are not empty, with their words.
    fn sets(&self) -> impl Iterator<Item = (&Indices, &'static str)> {
        let sets = [
            (&self.failed, "failed"),
            (&self.canceled, "canceled"),
            (&self.active, "active"),
            (&self.waiting, "waiting"),
        ];
        sets.into_iter().filter(|(indices, _)| !indices.is_empty())
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_every_task_is_counted_once() {
        let wire = v1::ArrayStatus {
            waiting: "12-199".to_owned(),
            active: "4-11".to_owned(),
            failed: "2".to_owned(),
            canceled: String::new(),
        };
        let tasks = TasksView::read(&wire, 200).unwrap();
        assert_eq!(tasks.counts(), "3 of 200 completed, 1 failed, 8 active, 188 waiting");
        assert_eq!(tasks.lines(), format!("{}\nfailed: 2\nactive: 4-11\nwaiting: 12-199", tasks.counts()));
        assert_eq!(serde_json::to_value(&tasks).unwrap()["waiting"], "12-199");
        assert!(TasksView::read(&v1::ArrayStatus { failed: "x".to_owned(), ..wire }, 200).is_err());
    }
}
