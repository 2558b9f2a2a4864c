//! What a job recorded, by run: every value, and the documents that the tracking endpoint keeps as tags.

use std::collections::BTreeMap;

use agent_model::Timestamp;
use agent_model::tracking::{EXPERIMENT, OWN, TrackingLine, TrackingRecord};
use serde_json::Value;

/// The runs of a job, by label; the label of the job's own run is empty.
#[derive(Debug)]
pub(super) struct Recording {
    pub(super) runs: BTreeMap<String, RecordedRun>,
}

/// What one run recorded.
#[derive(Debug, Default)]
pub(super) struct RecordedRun {
    /// The values of each metric, in the order of recording.
    pub(super) metrics: BTreeMap<String, Vec<MetricValue>>,
    pub(super) params: BTreeMap<String, String>,
    /// Those of the endpoint among them.
    all_tags: BTreeMap<String, String>,
}

/// One value of a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct MetricValue {
    pub(super) value: f64,
    pub(super) step: i64,
    /// Unknown in records that another program wrote without it.
    pub(super) time: Option<Timestamp>,
}

impl Recording {
    /// Reads tracking records, one a line; other lines are skipped.
    pub(super) fn read(lines: &[u8]) -> Recording {
        let mut runs = BTreeMap::from([(String::new(), RecordedRun::default())]);
        for TrackingLine { run, record } in lines.split(|byte| *byte == b'\n').filter_map(TrackingLine::parse)
        {
            let run: &mut RecordedRun = runs.entry(run).or_default();
            match record {
                TrackingRecord::Metric { metric, value, step, time } => {
                    run.metrics.entry(metric).or_default().push(MetricValue { value, step, time });
                }
                TrackingRecord::Param { param, text } => drop(run.params.insert(param, text)),
                TrackingRecord::Tag { tag, text } => drop(run.all_tags.insert(tag, text)),
                TrackingRecord::Untag { untag } => drop(run.all_tags.remove(&untag)),
                TrackingRecord::Note { .. } => {}
            }
        }
        Recording { runs }
    }
}

impl RecordedRun {
    /// The tags that the script set, and its name for its experiment.
    pub(super) fn tags(&self) -> impl Iterator<Item = (&String, &String)> {
        self.all_tags.iter().filter(|(name, _)| !name.starts_with(OWN) || *name == EXPERIMENT)
    }

    /// The text of a tag, also of one that the endpoint keeps.
    pub(super) fn tag(&self, name: &str) -> Option<&str> {
        self.all_tags.get(name).map(String::as_str)
    }

    /// A moment that the endpoint keeps.
    pub(super) fn moment(&self, name: &str) -> Option<u64> {
        self.tag(name)?.parse().ok()
    }

    /// The documents of one kind that the endpoint keeps, without those that were deleted.
    pub(super) fn documents(&self, kind: &str) -> Vec<Value> {
        let from = format!("{OWN}{kind}.");
        let of_kind = self.all_tags.range(from.clone()..).take_while(|(name, _)| name.starts_with(&from));
        let read = of_kind.filter_map(|(_, text)| serde_json::from_str(text).ok());
        read.filter(|document: &Value| !document.is_null()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_every_value_and_document_is_with_its_run() {
        let lines = br#"{"metric":"loss","value":0.1,"step":2,"time":5}
{"metric":"loss","value":"NaN"}
nonsense
{"param":"lr","text":"0.1"}
{"tag":"team","text":"a"}
{"tag":"team","text":"b"}
{"tag":"gone","text":"c"}
{"untag":"gone"}
{"tag":"agentd.experiment","text":"birds"}
{"tag":"agentd.model.m-1","text":"{\"info\":1}"}
{"tag":"agentd.model.m-2","text":"null"}
{"tag":"agentd.model-metric.m-1.acc","text":"{}"}
{"run":"kid","tag":"agentd.run","text":"Kid"}
{"run":"kid","tag":"agentd.started","text":"17"}
{"run":"kid","metric":"loss","value":7}
"#;
        let recording = Recording::read(lines);
        let run = &recording.runs[""];
        assert_eq!(run.metrics["loss"][0], MetricValue { value: 0.1, step: 2, time: Some(Timestamp(5)) });
        assert!(run.metrics["loss"][1].value.is_nan());
        let tags: Vec<_> = run.tags().map(|(name, text)| (name.as_str(), text.as_str())).collect();
        assert_eq!(tags, [("agentd.experiment", "birds"), ("team", "b")]);
        assert_eq!(run.documents("model"), [serde_json::json!({"info": 1})]);
        let kid = &recording.runs["kid"];
        assert_eq!((kid.tag("agentd.run"), kid.moment("agentd.started")), (Some("Kid"), Some(17)));
        assert_eq!(kid.metrics["loss"].len(), 1);
    }
}
