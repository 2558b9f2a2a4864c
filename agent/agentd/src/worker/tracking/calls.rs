//! The calls about runs, metrics and experiments.
//!
//! A job sees one experiment, its own, under any name it asks for, and in it the job's run and those that its script
//! began. The script cannot set the status of the job's run: the exit code decides.

use std::sync::Arc;

use agent_model::tracking::{EXPERIMENT, TrackingRecord};
use axum::Json;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Caller;
use super::answer::{self, Answer, Asked, Integer, Metric, Pair, Refusal, moment};
use super::artifacts::Artifacts;
use super::models;
use super::run::{self, OpenRun, Run, tag};
use super::search::{self, Filter, Searched, SortKey};

/// The longest name of a metric, parameter or tag, in characters, as MLflow counts.
const MAX_KEY: usize = 250;
/// The longest value of a parameter, in characters; MLflow shortens a longer one.
const MAX_PARAM: usize = 6000;
/// The longest value of a tag, in characters; MLflow shortens a longer one.
const MAX_TAG: usize = 8000;
/// The tag that says whether a run was deleted.
const LIFECYCLE: &str = "agentd.lifecycle";
/// The default and largest number of entries in one page.
const PAGE: usize = 25_000;

/// The id of a run; older clients use the second field.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Which {
    run_id: String,
    run_uuid: String,
}

impl Which {
    pub(super) fn id(&self) -> &str {
        if self.run_id.is_empty() { &self.run_uuid } else { &self.run_id }
    }
}

pub(super) async fn get(Caller(run): Caller, Asked(which): Asked<Which>) -> Answer {
    run.with(move |open| {
        let label = open.label(which.id())?;
        Ok(Json(json!({ "run": open.show(&label, run::whole)? })))
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Create {
    run_name: String,
    start_time: Integer,
    tags: Vec<Pair>,
}

pub(super) async fn create(Caller(run): Caller, Asked(asked): Asked<Create>) -> Answer {
    run.with(move |open| {
        let tags = records_of(&[], &[], &asked.tags)?;
        let named = asked.tags.iter().find(|tag| tag.key == answer::RUN_NAME).map(|tag| tag.value.as_str());
        let name = if asked.run_name.is_empty() { named.unwrap_or_default() } else { &asked.run_name };
        let started = moment(asked.start_time).unwrap_or(open.now());
        let label = open.begin(name, started)?;
        open.record(&label, tags)?;
        Ok(Json(json!({ "run": open.show(&label, run::whole)? })))
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Update {
    #[serde(flatten)]
    which: Which,
    status: String,
    end_time: Integer,
    run_name: String,
}

pub(super) async fn update(Caller(run): Caller, Asked(asked): Asked<Update>) -> Answer {
    run.with(move |open| {
        let label = open.label(asked.which.id())?;
        let mut records = Vec::new();
        if !asked.run_name.is_empty() {
            records.push(tag(answer::RUN_NAME, &asked.run_name));
        }
        if !label.is_empty() {
            let ended = moment(asked.end_time).map(|at| at.0.to_string());
            let end = [("agentd.status", Some(asked.status)), ("agentd.ended", ended)];
            let end = end.into_iter().filter_map(|(name, text)| Some(tag(name, &text?)));
            records.extend(
                end.filter(|tag| !matches!(tag, TrackingRecord::Tag { text, .. } if text.is_empty())),
            );
        }
        open.record(&label, records)?;
        Ok(Json(json!({ "run_info": open.show(&label, run::info)? })))
    })
    .await
}

/// Deletes a run that the script began.
pub(super) async fn delete(Caller(run): Caller, Asked(which): Asked<Which>) -> Answer {
    set_lifecycle(run, which, "deleted").await
}

/// Restores a deleted run.
pub(super) async fn restore(Caller(run): Caller, Asked(which): Asked<Which>) -> Answer {
    set_lifecycle(run, which, "active").await
}

async fn set_lifecycle(run: Arc<Run>, which: Which, stage: &'static str) -> Answer {
    run.with(move |open| {
        let label = open.label(which.id())?;
        if label.is_empty() {
            return Err(Refusal::denied("the run of a job lives as long as the job"));
        }
        open.record(&label, vec![tag(LIFECYCLE, stage)])?;
        Ok(Json(json!({})))
    })
    .await
}

#[derive(Deserialize)]
pub(super) struct LogMetric {
    #[serde(flatten)]
    which: Which,
    #[serde(flatten)]
    metric: Metric,
}

pub(super) async fn log_metric(Caller(run): Caller, Asked(asked): Asked<LogMetric>) -> Answer {
    record(run, asked.which, vec![asked.metric], Vec::new(), Vec::new()).await
}

#[derive(Deserialize)]
pub(super) struct LogPair {
    #[serde(flatten)]
    which: Which,
    #[serde(flatten)]
    pair: Pair,
}

pub(super) async fn log_parameter(Caller(run): Caller, Asked(asked): Asked<LogPair>) -> Answer {
    record(run, asked.which, Vec::new(), vec![asked.pair], Vec::new()).await
}

pub(super) async fn set_tag(Caller(run): Caller, Asked(asked): Asked<LogPair>) -> Answer {
    record(run, asked.which, Vec::new(), Vec::new(), vec![asked.pair]).await
}

pub(super) async fn delete_tag(Caller(run): Caller, Asked(asked): Asked<LogPair>) -> Answer {
    run.with(move |open| {
        let label = open.label(asked.which.id())?;
        open.record(&label, vec![TrackingRecord::Untag { untag: asked.pair.key }])?;
        Ok(Json(json!({})))
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct LogBatch {
    #[serde(flatten)]
    which: Which,
    metrics: Vec<Metric>,
    params: Vec<Pair>,
    tags: Vec<Pair>,
}

pub(super) async fn log_batch(Caller(run): Caller, Asked(asked): Asked<LogBatch>) -> Answer {
    record(run, asked.which, asked.metrics, asked.params, asked.tags).await
}

async fn record(
    run: Arc<Run>,
    which: Which,
    metrics: Vec<Metric>,
    params: Vec<Pair>,
    tags: Vec<Pair>,
) -> Answer {
    let params =
        params.into_iter().map(|Pair { key, value }| Pair { key, value: shortened(value, MAX_PARAM) });
    let params: Vec<Pair> = params.collect();
    run.with(move |open| {
        let label = active(open, which.id())?;
        let params = new_params(open, &label, params)?;
        models::link(open, which.id(), &metrics)?;
        let metrics = new_metrics(open, &label, metrics)?;
        let records = records_of(&metrics, &params, &tags)?;
        open.record(&label, records)?;
        Ok(Json(json!({})))
    })
    .await
}

/// The label of a run that takes records: it exists and was not deleted.
fn active(open: &mut OpenRun<'_>, run_id: &str) -> Result<String, Refusal> {
    let label = open.label(run_id)?;
    if open.data(&label)?.tag(LIFECYCLE) == Some("deleted") {
        return Err(Refusal::invalid(format!(
            "The run {run_id} must be in the 'active' state. Current state is deleted."
        )));
    }
    Ok(label)
}

/// The metrics that are not recorded yet. When a client stores a model, it repeats earlier metrics with the model's
/// id; and the same point again is one point.
fn new_metrics(open: &mut OpenRun<'_>, label: &str, metrics: Vec<Metric>) -> Result<Vec<Metric>, Refusal> {
    let known = &open.data(label)?.metrics;
    let is_new = |metric: &Metric| match (known.get(&metric.key), moment(metric.timestamp)) {
        (Some(latest), Some(at)) => {
            let is_same = latest.value.to_bits() == metric.value.0.to_bits() && latest.step == metric.step.0;
            let is_repeated = at == latest.newest && is_same;
            !is_repeated && (metric.model_id.is_empty() || at >= latest.newest)
        }
        _ => true,
    };
    Ok(metrics.into_iter().filter(is_new).collect())
}

/// The parameters that are not known yet. The value of a parameter cannot change.
fn new_params(open: &mut OpenRun<'_>, label: &str, params: Vec<Pair>) -> Result<Vec<Pair>, Refusal> {
    let run_id = open.run.id_of(label);
    let known = &open.data(label)?.params;
    let mut new: Vec<Pair> = Vec::new();
    for param in params {
        let earlier = new.iter().find(|other| other.key == param.key).map(|other| &other.value);
        match known.get(&param.key).or(earlier) {
            None => new.push(param),
            Some(value) if *value == param.value => {}
            Some(value) => {
                return Err(Refusal::invalid(format!(
                    "Changing param values is not allowed. Param with key='{}' was already logged with \
                     value='{value}' for run ID='{run_id}'. Attempted logging new value '{}'.",
                    param.key, param.value
                )));
            }
        }
    }
    Ok(new)
}

fn records_of(metrics: &[Metric], params: &[Pair], tags: &[Pair]) -> Result<Vec<TrackingRecord>, Refusal> {
    let mut records = Vec::with_capacity(metrics.len() + params.len() + tags.len());
    for Metric { key, value, timestamp, step, .. } in metrics {
        names("a metric", key)?;
        if timestamp.0 < 0 {
            return Err(Refusal::invalid(format!(
                "Got invalid timestamp {} for metric '{key}' (timestamp must be a nonnegative integer)",
                timestamp.0
            )));
        }
        let (metric, value, step) = (key.clone(), value.0, step.0);
        records.push(TrackingRecord::Metric { metric, value, step, time: moment(*timestamp) });
    }
    for Pair { key, value } in params {
        names("a parameter", key)?;
        records.push(TrackingRecord::Param { param: key.clone(), text: value.clone() });
    }
    for Pair { key, value } in tags {
        names("a tag", key)?;
        records.push(tag(key, &shortened(value.clone(), MAX_TAG)));
    }
    Ok(records)
}

/// Fails unless this can be a name: MLflow keeps each as a file, so it must be a path that leads downwards.
fn names(what: &str, key: &str) -> Result<(), Refusal> {
    fits(&format!("the name of {what}"), key, MAX_KEY)?;
    let is_path = !key.is_empty() && key.split('/').all(|part| !matches!(part, "" | "." | ".."));
    match is_path {
        true => Ok(()),
        false => Err(Refusal::invalid(format!(
            "Invalid name: '{key}' cannot be the name of {what}: it is a path, which must be whole and lead downwards"
        ))),
    }
}

fn fits(what: &str, text: &str, most: usize) -> Result<(), Refusal> {
    match text.chars().count() {
        length if length > most => {
            Err(Refusal::invalid(format!("{what} may have {most} characters, this one has {length}")))
        }
        _ => Ok(()),
    }
}

/// The first so many characters of a text.
fn shortened(mut text: String, most: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(most) {
        text.truncate(end);
    }
    text
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct LogInputs {
    #[serde(flatten)]
    which: Which,
    datasets: Vec<Value>,
    models: Vec<Value>,
}

/// Records which data and models a run read.
pub(super) async fn log_inputs(Caller(run): Caller, Asked(asked): Asked<LogInputs>) -> Answer {
    run.with(move |open| {
        let label = open.label(asked.which.id())?;
        for input in &asked.datasets {
            let data = &input["dataset"];
            // One data set may be used for several things.
            let context = input["tags"].as_array().and_then(|tags| {
                tags.iter().find(|tag| tag["key"] == "mlflow.data.context").map(|tag| &tag["value"])
            });
            let id = [&data["name"], &data["digest"], context.unwrap_or(&Value::Null)];
            let id = id.map(|part| part.as_str().unwrap_or_default());
            open.keep_document(&label, answer::INPUT, &id.join("\t"), input)?;
        }
        keep_models(open, &label, answer::MODEL_INPUT, &asked.models)
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct LogOutputs {
    #[serde(flatten)]
    which: Which,
    models: Vec<Value>,
}

/// Records which models a run made.
pub(super) async fn log_outputs(Caller(run): Caller, Asked(asked): Asked<LogOutputs>) -> Answer {
    run.with(move |open| {
        let label = open.label(asked.which.id())?;
        keep_models(open, &label, answer::OUTPUT, &asked.models)
    })
    .await
}

fn keep_models(open: &mut OpenRun<'_>, label: &str, kind: &str, models: &[Value]) -> Answer {
    for model in models {
        let id = model["model_id"].as_str().unwrap_or_default();
        open.keep_document(label, kind, id, model)?;
    }
    Ok(Json(json!({})))
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct LogModel {
    #[serde(flatten)]
    which: Which,
    model_json: String,
}

/// Adds a model to the run's list of models, which clients before MLflow 3 read; the oldest ones are dropped if it is
/// too long.
pub(super) async fn log_model(Caller(run): Caller, Asked(asked): Asked<LogModel>) -> Answer {
    const HISTORY: &str = "mlflow.log-model.history";
    run.with(move |open| {
        let label = open.label(asked.which.id())?;
        let mut model: Value = serde_json::from_str(&asked.model_json)
            .map_err(|error| Refusal::invalid(format!("`model_json` is no model: {error}")))?;
        if let Some(fields) = model.as_object_mut() {
            fields.remove("signature");
        }
        let known = open.data(&label)?.tag(HISTORY).and_then(|text| serde_json::from_str(text).ok());
        let mut models: Vec<Value> = known.unwrap_or_default();
        models.push(model);
        let mut text = json!(models).to_string();
        while text.chars().count() > MAX_TAG && models.len() > 1 {
            models.remove(0);
            text = json!(models).to_string();
        }
        fits("a model's description", &text, MAX_TAG)?;
        open.record(&label, vec![tag(HISTORY, &text)])?;
        Ok(Json(json!({})))
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct History {
    #[serde(flatten)]
    which: Which,
    metric_key: String,
    page_token: String,
    max_results: Option<String>,
}

pub(super) async fn history(Caller(run): Caller, Asked(asked): Asked<History>) -> Answer {
    let History { which, metric_key, page_token, max_results } = asked;
    let (label, history) = Arc::clone(&run)
        .with(move |open| open.label(which.id()).map(|label| (label, open.history())))
        .await?;
    let from: u64 = page_token.parse().unwrap_or(0);
    let most = max_results.and_then(|most| most.parse().ok()).unwrap_or(PAGE).clamp(1, PAGE);
    let (points, next) = run.history(history, (label, metric_key.clone()), from, most).await?;
    let page: Vec<Value> = points.iter().map(|at| answer::point(&metric_key, at)).collect();
    let mut answer = json!({ "metrics": page });
    if let Some(next) = next {
        answer["next_page_token"] = json!(next.to_string());
    }
    Ok(Json(answer))
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Search {
    filter: String,
    run_view_type: String,
    order_by: Vec<String>,
    max_results: Integer,
    page_token: String,
}

pub(super) async fn search_runs(Caller(run): Caller, Asked(asked): Asked<Search>) -> Answer {
    run.with(move |open| {
        let filter = Filter::parse(&asked.filter)?;
        let labels: Vec<String> = open.runs()?.keys().cloned().collect();
        let mut runs = Vec::new();
        for label in labels {
            let run = open.show(&label, run::whole)?;
            let stage = run["info"]["lifecycle_stage"].as_str().unwrap_or_default();
            let wanted = match asked.run_view_type.as_str() {
                "ALL" => true,
                "DELETED_ONLY" => stage == "deleted",
                _ => stage == "active",
            };
            if wanted && filter.accepts(Searched::RUN, &run) {
                runs.push(run);
            }
        }
        let orders = asked.order_by.iter().map(String::as_str).chain(["start_time DESC", "run_id"]);
        let keys = orders.map(SortKey::parse).collect::<Result<Vec<_>, _>>()?;
        search::sort(&mut runs, Searched::RUN, &keys);
        let (runs, token) = search::page(runs, &asked.page_token, asked.max_results, PAGE)?;
        Ok(Json(json!({ "runs": runs, "next_page_token": token })))
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct WhichExperiment {
    experiment_id: String,
    experiment_name: String,
    name: String,
}

fn experiment(run: &Run, name: &str) -> Value {
    let name = if name.is_empty() { &run.facts.experiment } else { name };
    json!({
        "experiment_id": run.experiment_id,
        "name": name,
        "artifact_location": format!("mlflow-artifacts:/{}", run.experiment_id),
        "lifecycle_stage": "active",
        "tags": [],
    })
}

/// Fails unless this is the job's own experiment.
fn known(run: &Run, id: &str) -> Result<(), Refusal> {
    if id == run.experiment_id {
        return Ok(());
    }
    Err(Refusal::missing(format!("No Experiment with id={id} exists: a job sees its own alone")))
}

pub(super) async fn experiment_by_id(Caller(run): Caller, Asked(which): Asked<WhichExperiment>) -> Answer {
    known(&run, &which.experiment_id)?;
    Ok(Json(json!({ "experiment": experiment(&run, "") })))
}

/// Scripts name the experiment that they were written for; under any name, it is that of the job. The name is
/// recorded as a tag, so that users can see it.
pub(super) async fn experiment_by_name(Caller(run): Caller, Asked(which): Asked<WhichExperiment>) -> Answer {
    let answer = json!({ "experiment": experiment(&run, &which.experiment_name) });
    remember_name(run, which.experiment_name).await?;
    Ok(Json(answer))
}

pub(super) async fn create_experiment(Caller(run): Caller, Asked(which): Asked<WhichExperiment>) -> Answer {
    let answer = json!({ "experiment_id": run.experiment_id });
    remember_name(run, which.name).await?;
    Ok(Json(answer))
}

async fn remember_name(run: Arc<Run>, name: String) -> Result<(), Refusal> {
    if name.is_empty() || name == run.facts.experiment {
        return Ok(());
    }
    fits("an experiment's name", &name, MAX_TAG)?;
    run.with(move |open| {
        if open.data("")?.tag(EXPERIMENT) == Some(&name) {
            return Ok(());
        }
        open.record("", vec![tag(EXPERIMENT, &name)])
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct SearchExperiments {
    filter: String,
    view_type: String,
}

pub(super) async fn search_experiments(
    Caller(run): Caller,
    Asked(asked): Asked<SearchExperiments>,
) -> Answer {
    let filter = Filter::parse(&asked.filter)?;
    let mut found = vec![experiment(&run, "")];
    found.retain(|one| asked.view_type != "DELETED_ONLY" && filter.accepts(Searched::REGISTERED, one));
    Ok(Json(json!({ "experiments": found })))
}

/// Labels of an experiment are not stored, but a script that sets them must not fail.
pub(super) async fn label_experiment(Caller(run): Caller, Asked(which): Asked<WhichExperiment>) -> Answer {
    known(&run, &which.experiment_id)?;
    Ok(Json(json!({})))
}

pub(super) async fn delete_experiment(Caller(_): Caller) -> Answer {
    Err(Refusal::denied("a job cannot delete the experiment it belongs to"))
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct ListArtifacts {
    #[serde(flatten)]
    which: Which,
    path: String,
}

pub(super) async fn list_artifacts(Caller(run): Caller, Asked(asked): Asked<ListArtifacts>) -> Answer {
    run.with(move |open| {
        let label = open.label(asked.which.id())?;
        let root_uri = open.run.artifact_uri(asked.which.id());
        let mut files = Artifacts::of(open.run).list(&label, &asked.path, &asked.path)?;
        if label.is_empty() && asked.path.is_empty() {
            open.hide_folders_of_others(&mut files)?;
        }
        Ok(Json(json!({ "root_uri": root_uri, "files": files })))
    })
    .await
}
