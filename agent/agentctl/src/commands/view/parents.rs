//! What jobs have that make jobs, decoded: how the tasks of an array stand, trials of a sweep, steps of a pipeline.

use std::collections::BTreeMap;

use agent_model::Fault;
use agent_model::job::Indices;
use agent_model::pipeline::Pipeline;
use agent_model::sweep::Scalar;
use agent_proto::v1;
use serde::{Serialize, Serializer};

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

/// A trial: its values, and what it logged of the metric.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct TrialView {
    pub(crate) values: BTreeMap<String, Scalar>,
    /// How many values of the metric it logged.
    pub(crate) count: u64,
    pub(crate) last: Option<f64>,
    pub(crate) best: Option<f64>,
    /// Which policy ended it, with the numbers; empty for none.
    pub(crate) stopped: String,
}

impl From<v1::TrialStatus> for TrialView {
    fn from(wire: v1::TrialStatus) -> TrialView {
        let values = wire.values.into_iter().map(|(name, json)| (name, Scalar::from_json(&json)));
        TrialView {
            values: values.collect(),
            count: wire.count,
            last: wire.last,
            best: wire.best,
            stopped: wire.stopped,
        }
    }
}

/// The best of the trials that completed.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct BestView {
    pub(crate) trial: u32,
    pub(crate) value: f64,
}

impl From<v1::BestTrial> for BestView {
    fn from(wire: v1::BestTrial) -> BestView {
        BestView { trial: wire.trial, value: wire.value }
    }
}

/// A step that is not run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct StepView {
    pub(crate) step: String,
    /// The job as which it completed before; empty for none.
    pub(crate) reused_from: String,
    /// Why it never runs; empty if it does.
    pub(crate) not_run: String,
}

impl StepView {
    pub(crate) fn of(pipeline: &Pipeline, wire: v1::StepStatus) -> StepView {
        let v1::StepStatus { step, reused_from, not_run } = wire;
        StepView { step: pipeline.name(step), reused_from, not_run }
    }
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
