//! The calls about traces, in the form of MLflow 3.
//!
//! The information about a trace is a document of the job ([`OpenRun::document`]); its spans are a file that the
//! client stores and reads below the job's artifacts, at the address in the trace.

use agent_model::Timestamp;
use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, Query};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Caller;
use super::answer::{Answer, Asked, Integer, Refusal};
use super::run::{OpenRun, TRACE};
use super::search::{self, Filter, Searched, SortKey};

/// The tag with the address of the spans.
const FILES: &str = "mlflow.artifactLocation";
/// How long the part of a time is that has the seconds: `2027-01-15T08:00:00`.
const SECONDS: usize = 19;
/// The default page size of a search.
const PAGE: usize = 100;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Start {
    trace: Trace,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Trace {
    trace_info: Value,
}

/// Stores a trace, which has ended by then.
pub(super) async fn start(Caller(run): Caller, Asked(asked): Asked<Start>) -> Answer {
    run.with(move |open| {
        let mut info = asked.trace.trace_info;
        let id = info["trace_id"].as_str().unwrap_or_default().to_owned();
        let is_id = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if id.is_empty() || id.len() > 64 || !id.chars().all(is_id) {
            return Err(Refusal::invalid(format!("`{id}` is no id of a trace")));
        }
        let files = open.run.artifact_uri(&format!("traces/{id}"));
        if !info["tags"].is_object() {
            info["tags"] = json!({});
        }
        info["tags"][FILES] = json!(files);
        open.keep_document("", TRACE, &id, &info)?;
        Ok(Json(json!({ "trace": { "trace_info": info } })))
    })
    .await
}

pub(super) async fn get(Caller(run): Caller, Path(id): Path<String>) -> Answer {
    run.with(move |open| Ok(Json(json!({ "trace": { "trace_info": trace(open, &id)? } })))).await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Search {
    filter: String,
    order_by: Vec<String>,
    max_results: Integer,
    page_token: String,
}

/// Searches traces; the newest first unless the client gives an order.
pub(super) async fn search(Caller(run): Caller, Asked(asked): Asked<Search>) -> Answer {
    run.with(move |open| {
        let filter = Filter::parse(&asked.filter)?;
        let mut found = open.documents("", TRACE)?;
        found.retain(|trace| filter.accepts(Searched::TRACE, trace));
        let mut keys = Vec::new();
        for order in asked.order_by.iter().map(String::as_str).chain(["request_time DESC"]) {
            keys.push(SortKey::parse(order)?);
        }
        search::sort(&mut found, Searched::TRACE, &keys);
        let (traces, token) = search::page(found, &asked.page_token, asked.max_results, PAGE)?;
        Ok(Json(json!({ "traces": traces, "next_page_token": token })))
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Tag {
    key: String,
    value: String,
}

/// Sets a tag.
pub(super) async fn tag(Caller(run): Caller, Path(id): Path<String>, Asked(asked): Asked<Tag>) -> Answer {
    run.with(move |open| {
        let mut trace = trace(open, &id)?;
        trace["tags"][asked.key] = json!(asked.value);
        open.keep_document("", TRACE, &id, &trace)?;
        Ok(Json(json!({})))
    })
    .await
}

/// Removes a tag.
pub(super) async fn drop_tag(
    Caller(run): Caller,
    Path(id): Path<String>,
    Query(asked): Query<Tag>,
    body: Bytes,
) -> Answer {
    // Clients put the name into the address or into the body.
    let said: Tag = serde_json::from_slice(&body).unwrap_or_default();
    let key = if asked.key.is_empty() { said.key } else { asked.key };
    run.with(move |open| {
        let mut trace = trace(open, &id)?;
        trace["tags"].as_object_mut().and_then(|tags| tags.remove(&key));
        open.keep_document("", TRACE, &id, &trace)?;
        Ok(Json(json!({})))
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Delete {
    max_timestamp_millis: Option<Integer>,
    max_traces: Option<Integer>,
    request_ids: Vec<String>,
    trace_ids: Vec<String>,
}

/// Removes traces: those that are named, or the oldest until a time. Their files stay with the job.
pub(super) async fn delete(Caller(run): Caller, Asked(asked): Asked<Delete>) -> Answer {
    run.with(move |open| {
        let named = [asked.request_ids, asked.trace_ids].concat();
        if named.is_empty() && asked.max_timestamp_millis.is_none() {
            return Err(Refusal::invalid("Either `max_timestamp_millis` or `trace_ids` must be specified."));
        }
        let mut found = open.documents("", TRACE)?;
        search::sort(&mut found, Searched::TRACE, &[SortKey::parse("request_time")?]);
        let id = |trace: &Value| trace["trace_id"].as_str().unwrap_or_default().to_owned();
        let mut old: Vec<String> = found
            .iter()
            .filter(|trace| match asked.max_timestamp_millis {
                _ if !named.is_empty() => named.contains(&id(trace)),
                Some(most) => began_by(trace, most),
                None => false,
            })
            .map(id)
            .collect();
        if let Some(most) = asked.max_traces.and_then(|most| usize::try_from(most.0).ok()) {
            old.truncate(most);
        }
        for id in &old {
            open.drop_document("", TRACE, id)?;
        }
        Ok(Json(json!({ "traces_deleted": old.len() })))
    })
    .await
}

/// Whether a trace began at this time or before it, to the second.
fn began_by(trace: &Value, most: Integer) -> bool {
    let until = Timestamp(u64::try_from(most.0).unwrap_or(0)).rfc3339();
    let began = trace["request_time"].as_str().and_then(|time| time.get(..SECONDS));
    began.zip(until.get(..SECONDS)).is_some_and(|(began, until)| began <= until)
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Assess {
    assessment: Value,
}

/// Adds feedback or an expectation to a trace.
pub(super) async fn assess(
    Caller(run): Caller,
    Path(id): Path<String>,
    Asked(asked): Asked<Assess>,
) -> Answer {
    run.with(move |open| {
        let mut trace = trace(open, &id)?;
        let mut assessment = asked.assessment;
        if assessment["assessment_name"].as_str().is_none_or(str::is_empty) {
            return Err(Refusal::invalid("an assessment needs a name"));
        }
        let known = trace["assessments"].as_array().cloned().unwrap_or_default();
        let last =
            known.last().and_then(|last| last["assessment_id"].as_str()?.rsplit('-').next()?.parse().ok());
        assessment["assessment_id"] = json!(format!("a-{}", last.unwrap_or(0_u64) + 1));
        assessment["trace_id"] = json!(id);
        trace["assessments"] = known.into_iter().chain([assessment.clone()]).collect();
        open.keep_document("", TRACE, &id, &trace)?;
        Ok(Json(json!({ "assessment": assessment })))
    })
    .await
}

/// An assessment.
pub(super) async fn assessment(Caller(run): Caller, Path((id, which)): Path<(String, String)>) -> Answer {
    run.with(move |open| {
        let trace = trace(open, &id)?;
        let known = trace["assessments"].as_array().into_iter().flatten();
        let found = known.into_iter().find(|known| known["assessment_id"] == which.as_str());
        let missing = || Refusal::missing(format!("Assessment with ID '{which}' not found."));
        Ok(Json(json!({ "assessment": found.ok_or_else(missing)? })))
    })
    .await
}

/// Changes what the call names of an assessment.
pub(super) async fn reassess(
    Caller(run): Caller,
    Path((id, which)): Path<(String, String)>,
    Asked(asked): Asked<Assess>,
) -> Answer {
    run.with(move |open| {
        let mut trace = trace(open, &id)?;
        let known = trace["assessments"].as_array_mut().into_iter().flatten();
        let found = known.into_iter().find(|known| known["assessment_id"] == which.as_str());
        let missing = || Refusal::missing(format!("Assessment with ID '{which}' not found."));
        let found = found.ok_or_else(missing)?;
        for (key, value) in asked.assessment.as_object().into_iter().flatten() {
            if !matches!(key.as_str(), "assessment_id" | "trace_id") {
                found[key] = value.clone();
            }
        }
        let changed = found.clone();
        open.keep_document("", TRACE, &id, &trace)?;
        Ok(Json(json!({ "assessment": changed })))
    })
    .await
}

/// Takes an assessment back.
pub(super) async fn unassess(Caller(run): Caller, Path((id, which)): Path<(String, String)>) -> Answer {
    run.with(move |open| {
        let mut trace = trace(open, &id)?;
        if let Some(known) = trace["assessments"].as_array_mut() {
            known.retain(|known| known["assessment_id"] != which.as_str());
        }
        open.keep_document("", TRACE, &id, &trace)?;
        Ok(Json(json!({})))
    })
    .await
}

fn trace(open: &mut OpenRun<'_>, id: &str) -> Result<Value, Refusal> {
    let trace = open.document("", TRACE, id)?;
    trace.ok_or_else(|| Refusal::missing(format!("Trace with ID '{id}' not found.")))
}
