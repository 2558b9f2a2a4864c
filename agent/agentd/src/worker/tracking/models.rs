//! The calls about logged models, with which MLflow 3 stores a model beside its run.
//!
//! A model is a document of the job ([`OpenRun::document`]); its files are artifacts below `models/`. Metrics of a
//! model are one document for each metric and data set, and are added to the model in answers.

use axum::Json;
use axum::extract::Path;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Caller;
use super::answer::{self, Answer, Asked, Integer, Metric, Pair, Refusal, number};
use super::artifacts::Artifacts;
use super::run::{MODEL, OpenRun};
use super::search::{self, Filter, Searched, SortKey};

/// The default page size of a search.
const PAGE: usize = 100;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Create {
    name: String,
    model_type: String,
    source_run_id: String,
    params: Vec<Pair>,
    tags: Vec<Pair>,
}

pub(super) async fn create(Caller(run): Caller, Asked(asked): Asked<Create>) -> Answer {
    run.with(move |open| {
        let number = open.documents("", MODEL)?.len() + 1;
        // Clients tell an id from a name by the prefix `m-`.
        let model_id = format!("m-{}-{number}", open.run.facts.run_id);
        let now = open.now().0;
        let model = json!({
            "info": {
                "model_id": model_id,
                "experiment_id": open.run.experiment_id,
                "name": if asked.name.is_empty() { &model_id } else { &asked.name },
                "creation_timestamp_ms": now,
                "last_updated_timestamp_ms": now,
                "artifact_uri": open.run.artifact_uri(&format!("models/{model_id}")),
                "status": "LOGGED_MODEL_PENDING",
                "model_type": asked.model_type,
                "source_run_id": asked.source_run_id,
                "tags": pairs(&asked.tags),
            },
            "data": { "params": pairs(&asked.params), "metrics": [] },
        });
        keep(open, model)
    })
    .await
}

pub(super) async fn get(Caller(run): Caller, Path(id): Path<String>) -> Answer {
    run.with(move |open| {
        let model = model(open, &id)?;
        Ok(Json(json!({ "model": with_metrics(open, model)? })))
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Finalize {
    status: Value,
}

pub(super) async fn finalize(
    Caller(run): Caller,
    Path(id): Path<String>,
    Asked(asked): Asked<Finalize>,
) -> Answer {
    run.with(move |open| {
        let mut model = model(open, &id)?;
        model["info"]["status"] = asked.status;
        keep(open, model)
    })
    .await
}

/// Forgets a model; its files are kept, so its number is not reused: another model would find them.
pub(super) async fn delete(Caller(run): Caller, Path(id): Path<String>) -> Answer {
    run.with(move |open| {
        model(open, &id)?;
        open.keep_document("", MODEL, &id, &Value::Null)?;
        Ok(Json(json!({})))
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Pairs {
    tags: Vec<Pair>,
    params: Vec<Pair>,
}

/// Adds tags or parameters.
pub(super) async fn extend(
    Caller(run): Caller,
    Path(id): Path<String>,
    Asked(asked): Asked<Pairs>,
) -> Answer {
    run.with(move |open| {
        let mut model = model(open, &id)?;
        merge(&mut model["info"]["tags"], asked.tags);
        merge(&mut model["data"]["params"], asked.params);
        keep(open, model)
    })
    .await
}

pub(super) async fn delete_tag(Caller(run): Caller, Path((id, tag)): Path<(String, String)>) -> Answer {
    run.with(move |open| {
        let mut model = model(open, &id)?;
        remove(&mut model["info"]["tags"], &tag);
        keep(open, model)
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Search {
    filter: String,
    datasets: Vec<DataSet>,
    order_by: Vec<OrderBy>,
    max_results: Integer,
    page_token: String,
}

/// A data set whose metrics count.
#[derive(Default, Deserialize)]
#[serde(default)]
struct DataSet {
    dataset_name: String,
    dataset_digest: String,
}

#[derive(Deserialize)]
struct OrderBy {
    field_name: String,
    #[serde(default = "yes")]
    ascending: bool,
    #[serde(default)]
    dataset_name: String,
    #[serde(default)]
    dataset_digest: String,
}

fn yes() -> bool {
    true
}

/// Searches models; the newest first unless the client gives an order.
pub(super) async fn search(Caller(run): Caller, Asked(asked): Asked<Search>) -> Answer {
    run.with(move |open| {
        let filter = Filter::parse(&asked.filter)?;
        let mut found = Vec::new();
        for model in open.documents("", MODEL)?.into_iter().filter(|model| !model.is_null()) {
            let model = with_metrics(open, model)?;
            let of_data = on_data(&model, &asked.datasets);
            if filter.accepts(Searched::MODEL, &of_data) {
                found.push(model);
            }
        }
        found.sort_by(newest_first);
        for order in asked.order_by.iter().rev() {
            let key = [SortKey::of(&order.field_name, !order.ascending)?];
            let data = DataSet {
                dataset_name: order.dataset_name.clone(),
                dataset_digest: order.dataset_digest.clone(),
            };
            if data.dataset_name.is_empty() {
                search::sort(&mut found, Searched::MODEL, &key);
            } else {
                let mut of_data: Vec<Value> =
                    found.iter().map(|model| on_data(model, std::slice::from_ref(&data))).collect();
                search::sort(&mut of_data, Searched::MODEL, &key);
                let place = |model: &Value| {
                    of_data.iter().position(|at| at["info"]["model_id"] == model["info"]["model_id"])
                };
                found.sort_by_key(place);
            }
        }
        let (models, token) = search::page(found, &asked.page_token, asked.max_results, PAGE)?;
        Ok(Json(json!({ "models": models, "next_page_token": token })))
    })
    .await
}

fn newest_first(a: &Value, b: &Value) -> std::cmp::Ordering {
    let age = |model: &Value| {
        let id = model["info"]["model_id"].as_str().unwrap_or_default();
        let number: u64 = id.rsplit('-').next().and_then(|number| number.parse().ok()).unwrap_or(0);
        (model["info"]["creation_timestamp_ms"].as_u64(), number)
    };
    age(b).cmp(&age(a))
}

/// The model with only the metrics on these data sets; with all metrics if there are none.
fn on_data(model: &Value, data: &[DataSet]) -> Value {
    let mut model = model.clone();
    let counts = |metric: &Value| {
        data.iter().any(|data| {
            metric["dataset_name"] == data.dataset_name.as_str()
                && (data.dataset_digest.is_empty()
                    || metric["dataset_digest"] == data.dataset_digest.as_str())
        })
    };
    if let Some(metrics) = model["data"]["metrics"].as_array_mut()
        && !data.is_empty()
    {
        metrics.retain(counts);
    }
    model
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Directory {
    artifact_directory_path: String,
}

pub(super) async fn directory(
    Caller(run): Caller,
    Path(id): Path<String>,
    Asked(asked): Asked<Directory>,
) -> Answer {
    run.with(move |open| {
        let model = model(open, &id)?;
        let path = asked.artifact_directory_path;
        let files = Artifacts::of(open.run).list(&format!("models/{id}"), &path, &path)?;
        Ok(Json(json!({ "root_uri": model["info"]["artifact_uri"], "files": files })))
    })
    .await
}

/// Stores these metrics with the models that they name.
pub(super) fn link(open: &mut OpenRun<'_>, run_id: &str, metrics: &[Metric]) -> Result<(), Refusal> {
    for metric in metrics {
        if metric.model_id.is_empty() {
            continue;
        }
        model(open, &metric.model_id)?;
        let measured = json!({
            "key": metric.key,
            "value": number(metric.value.0),
            "timestamp": metric.timestamp.0,
            "step": metric.step.0,
            "run_id": run_id,
            "model_id": metric.model_id,
            "dataset_name": metric.dataset_name,
            "dataset_digest": metric.dataset_digest,
        });
        let id = [&metric.key, &metric.dataset_name, &metric.dataset_digest].map(String::as_str);
        open.keep_document("", &measured_of(&metric.model_id), &id.join("\t"), &measured)?;
    }
    Ok(())
}

/// The address of a model's files; `id` is the part after `models:/` in its URI.
pub(super) fn artifact_uri(open: &mut OpenRun<'_>, id: &str) -> Result<Value, Refusal> {
    Ok(model(open, id)?["info"]["artifact_uri"].take())
}

/// The kind of the documents with a model's metrics.
fn measured_of(id: &str) -> String {
    format!("model-metric.{id}")
}

/// The run that made a model.
pub(super) fn source_run(open: &mut OpenRun<'_>, id: &str) -> Result<Value, Refusal> {
    Ok(model(open, id)?["info"]["source_run_id"].take())
}

fn with_metrics(open: &mut OpenRun<'_>, mut model: Value) -> Result<Value, Refusal> {
    let id = model["info"]["model_id"].as_str().unwrap_or_default();
    let mut metrics = open.documents("", &measured_of(id))?;
    metrics.sort_by_key(|metric| metric["timestamp"].as_i64());
    model["data"]["metrics"] = Value::Array(metrics);
    Ok(model)
}

pub(super) fn pairs(pairs: &[Pair]) -> Vec<Value> {
    answer::pairs(pairs.iter().map(|pair| (&pair.key, &pair.value)))
}

/// Removes an entry from a list of keys and values.
pub(super) fn remove(list: &mut Value, key: &str) {
    if let Some(list) = list.as_array_mut() {
        list.retain(|entry| entry["key"] != key);
    }
}

/// Sets entries of a list of keys and values.
pub(super) fn merge(list: &mut Value, new: Vec<Pair>) {
    let Some(list) = list.as_array_mut() else { return };
    for pair in new {
        list.retain(|old| old["key"] != pair.key.as_str());
        list.push(json!({ "key": pair.key, "value": pair.value }));
    }
}

fn model(open: &mut OpenRun<'_>, id: &str) -> Result<Value, Refusal> {
    let model = open.document("", MODEL, id)?.filter(|model| !model.is_null());
    model.ok_or_else(|| Refusal::missing(format!("Logged model with ID '{id}' not found.")))
}

fn keep(open: &mut OpenRun<'_>, mut model: Value) -> Answer {
    model["info"]["last_updated_timestamp_ms"] = json!(open.now().0);
    let id = model["info"]["model_id"].as_str().unwrap_or_default().to_owned();
    open.keep_document("", MODEL, &id, &model)?;
    Ok(Json(json!({ "model": with_metrics(open, model)? })))
}
