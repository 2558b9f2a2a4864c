//! The calls about logged models, with which MLflow 3 stores a model beside its run.
//!
//! A model is remembered as one tag of the job's run whose text is the model as clients read it; its files are
//! artifacts below `models/`.

use axum::Json;
use axum::extract::Path;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Caller;
use super::answer::{Answer, Asked, Pair, Refusal};
use super::run::{Desk, tag};

/// The name of the tag of a model begins so.
const MODEL: &str = "agentd.model.";

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
    run.with(move |desk| {
        let number = models(desk)?.len() + 1;
        // Clients know an id from a name by its beginning.
        let model_id = format!("m-{}-{number}", desk.run.facts.run_id);
        let now = desk.now().0;
        let model = json!({
            "info": {
                "model_id": model_id,
                "experiment_id": desk.run.experiment_id,
                "name": if asked.name.is_empty() { &model_id } else { &asked.name },
                "creation_timestamp_ms": now,
                "last_updated_timestamp_ms": now,
                "artifact_uri": desk.run.artifact_uri(&format!("models/{model_id}")),
                "status": "LOGGED_MODEL_PENDING",
                "model_type": asked.model_type,
                "source_run_id": asked.source_run_id,
                "tags": pairs(&asked.tags),
            },
            "data": { "params": pairs(&asked.params), "metrics": [] },
        });
        keep(desk, model)
    })
    .await
}

pub(super) async fn get(Caller(run): Caller, Path(id): Path<String>) -> Answer {
    run.with(move |desk| Ok(Json(json!({ "model": model(desk, &id)? })))).await
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
    run.with(move |desk| {
        let mut model = model(desk, &id)?;
        model["info"]["status"] = asked.status;
        model["info"]["last_updated_timestamp_ms"] = json!(desk.now().0);
        keep(desk, model)
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
    run.with(move |desk| {
        let mut model = model(desk, &id)?;
        merge(&mut model["info"]["tags"], asked.tags);
        merge(&mut model["data"]["params"], asked.params);
        keep(desk, model)
    })
    .await
}

/// Every model of the job, oldest first; what a client filters by is not looked at when there is one job.
pub(super) async fn search(Caller(run): Caller) -> Answer {
    run.with(|desk| Ok(Json(json!({ "models": models(desk)? })))).await
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
    run.with(move |desk| {
        let model = model(desk, &id)?;
        let path = asked.artifact_directory_path;
        let files = desk.run.artifacts.list(&format!("models/{id}"), &path, &path)?;
        Ok(Json(json!({ "root_uri": model["info"]["artifact_uri"], "files": files })))
    })
    .await
}

fn pairs(pairs: &[Pair]) -> Vec<Value> {
    pairs.iter().map(|pair| json!({ "key": pair.key, "value": pair.value })).collect()
}

fn merge(list: &mut Value, new: Vec<Pair>) {
    let Some(list) = list.as_array_mut() else { return };
    for pair in new {
        list.retain(|old| old["key"] != pair.key.as_str());
        list.push(json!({ "key": pair.key, "value": pair.value }));
    }
}

fn models(desk: &mut Desk<'_>) -> Result<Vec<Value>, Refusal> {
    let tags = desk.data("")?.tags.iter().filter(|(name, _)| name.starts_with(MODEL));
    let mut models: Vec<Value> = tags.filter_map(|(_, text)| serde_json::from_str(text).ok()).collect();
    models.sort_by_key(|model| model["info"]["creation_timestamp_ms"].as_u64());
    Ok(models)
}

fn model(desk: &mut Desk<'_>, id: &str) -> Result<Value, Refusal> {
    let text = desk.data("")?.own(&format!("{MODEL}{id}"));
    let model = text.and_then(|text| serde_json::from_str(text).ok());
    model.ok_or_else(|| Refusal::missing(format!("Logged model with ID '{id}' not found.")))
}

fn keep(desk: &mut Desk<'_>, model: Value) -> Answer {
    let name = format!("{MODEL}{}", model["info"]["model_id"].as_str().unwrap_or_default());
    desk.record("", vec![tag(&name, &model.to_string())])?;
    Ok(Json(json!({ "model": model })))
}
