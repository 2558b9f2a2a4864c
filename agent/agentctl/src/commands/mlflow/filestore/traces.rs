//! The traces of a job in the file store of MLflow 3.
//!
//! ```text
//! DIR/EXPERIMENT/traces/ID/trace_info.yaml         what it is of, times, status
//! DIR/EXPERIMENT/traces/ID/request_metadata/NAME   the text
//! DIR/EXPERIMENT/traces/ID/tags/NAME               the text
//! DIR/EXPERIMENT/traces/ID/artifacts/traces.json   its spans
//! ```
//!
//! Times of the spans and their nesting are in the file that the client of the job wrote, which is not read here.

use std::collections::BTreeMap;
use std::io;

use serde_json::{Map, Value, json};

use super::super::names;
use super::super::recorded::Recording;
use super::{ExportedJob, JOB, describe_as, write_texts};

/// The name of the description of a trace.
const INFO: &str = "trace_info.yaml";
/// The tag with the address of the spans.
const FILES: &str = "mlflow.artifactLocation";
/// The metadata with the run that a trace is of.
const RUN: &str = "mlflow.sourceRun";
/// What of the description the clients take as it is; they refuse one with anything else.
const PLAIN: [&str; 6] =
    ["trace_id", "client_request_id", "request_preview", "response_preview", "request_time", "state"];

/// Writes the traces that the job recorded.
pub(super) fn write(entry: &ExportedJob<'_>, recording: &Recording) -> io::Result<()> {
    recording.runs[""].documents("trace").iter().try_for_each(|trace| write_trace(entry, trace))
}

fn write_trace(entry: &ExportedJob<'_>, trace: &Value) -> io::Result<()> {
    let is_name = |id: &&str| !id.is_empty() && !id.contains('/') && !id.starts_with('.');
    let Some(id) = trace["trace_id"].as_str().filter(is_name) else { return Ok(()) };
    let folder = format!("{}/traces/{id}", entry.experiment);
    let (made, place) = (entry.store.fresh()?, entry.store.at(&folder));
    describe_as(&made, INFO, &info(entry, trace))?;
    let mut metadata = texts(&trace["trace_metadata"]);
    metadata.get_mut(RUN).into_iter().for_each(|run| *run = names::id(run));
    write_texts(&made.join("request_metadata"), &metadata)?;
    let mut tags = texts(&trace["tags"]);
    tags.insert(FILES.to_owned(), entry.store.uri(&format!("{folder}/artifacts")));
    tags.insert(JOB.to_owned(), entry.facts.job.clone());
    write_texts(&made.join("tags"), &tags)?;
    entry.place_artifacts(&format!("traces/{id}"), &made, &place)?;
    entry.store.put(&made, &place)
}

fn info(entry: &ExportedJob<'_>, trace: &Value) -> Value {
    let told = PLAIN.iter().filter(|key| !trace[**key].is_null());
    let mut info: Map<String, Value> = told.map(|key| ((*key).to_owned(), trace[*key].clone())).collect();
    info.insert(
        "trace_location".to_owned(),
        json!({ "type": "MLFLOW_EXPERIMENT", "mlflow_experiment": { "experiment_id": entry.experiment } }),
    );
    let taken = trace["execution_duration"].as_str().and_then(milliseconds);
    info.extend(taken.map(|taken| ("execution_duration_ms".to_owned(), json!(taken))));
    Value::Object(info)
}

/// `1.234s`, as a length of time stands in JSON of protocol buffers.
fn milliseconds(text: &str) -> Option<u64> {
    let seconds: f64 = text.strip_suffix('s')?.parse().ok()?;
    // Lengths of computations are far below 2^53 ms.
    (seconds >= 0.0).then(|| (seconds * 1000.0).round() as u64)
}

fn texts(map: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    map.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), text(value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_lengths_of_time_are_milliseconds() {
        for (text, expected) in
            [("1.234s", Some(1234)), ("0s", Some(0)), ("0.0005s", Some(1)), ("-1s", None), ("x", None)]
        {
            assert_eq!(milliseconds(text), expected, "{text}");
        }
    }
}
