//! The calls about traces, in the form of MLflow 3.
//!
//! The information about a trace is a document of the job ([`OpenRun::document`]); its spans are a file that the
//! client stores and reads below the job's artifacts, at the address in the trace.

use axum::Json;
use axum::extract::Path;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Caller;
use super::answer::{Answer, Asked, Integer, Refusal};
use super::run::OpenRun;
use super::search::{self, Filter, Searched, SortKey};

const TRACE: &str = "trace";
/// The tag with the address of the spans.
const FILES: &str = "mlflow.artifactLocation";
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
        let (traces, token) = search::page(found, &asked.page_token, asked.max_results, PAGE);
        Ok(Json(json!({ "traces": traces, "next_page_token": token })))
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Tag {
    key: String,
    value: Option<String>,
}

/// Sets a tag; removes it if the call has no value.
pub(super) async fn tag(Caller(run): Caller, Path(id): Path<String>, Asked(asked): Asked<Tag>) -> Answer {
    run.with(move |open| {
        let mut trace = trace(open, &id)?;
        if let Some(tags) = trace["tags"].as_object_mut() {
            match asked.value {
                Some(value) => drop(tags.insert(asked.key, json!(value))),
                None => drop(tags.remove(&asked.key)),
            }
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
