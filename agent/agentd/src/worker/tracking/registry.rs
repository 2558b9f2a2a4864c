//! The calls about registered models.
//!
//! A job has a registry of its own, which begins empty: its script can find, load and rename what it registered, and
//! the registry is part of the job's records. Nothing is shared between jobs, so versions begin with 1 in each. A
//! registered model is a document of the job ([`OpenRun::document`]), which contains its versions.

use axum::Json;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Caller;
use super::answer::{Answer, Asked, Integer, Pair, Refusal};
use super::models::{self, merge, pairs, remove};
use super::run::OpenRun;
use super::search::{self, Filter, Searched, SortKey};

const REGISTERED: &str = "registered-model";
const IS_PROMPT: &str = "mlflow.prompt.is_prompt";
/// The default page size of a search.
const PAGE: usize = 100;

/// A registered model, as its document stores it.
#[derive(Serialize, Deserialize)]
struct Registered {
    name: String,
    description: String,
    creation_timestamp: u64,
    last_updated_timestamp: u64,
    tags: Value,
    aliases: Vec<Alias>,
    /// In the form for clients, the oldest first.
    versions: Vec<Value>,
    /// The number of the last version that was made, which may be deleted: no number is given twice.
    #[serde(default)]
    last_version: u64,
}

#[derive(Serialize, Deserialize)]
struct Alias {
    alias: String,
    version: String,
}

/// The arguments of all calls: the model or version, and the change. Each call uses a part of them.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Named {
    name: String,
    new_name: String,
    description: Option<String>,
    version: String,
    alias: String,
    stage: String,
    stages: Vec<String>,
    archive_existing_versions: bool,
    key: String,
    value: String,
    tags: Vec<Pair>,
    source: String,
    run_id: String,
    run_link: String,
    model_id: String,
}

pub(super) async fn create(Caller(run): Caller, Asked(asked): Asked<Named>) -> Answer {
    run.with(move |open| {
        check_name(&asked.name)?;
        if open.document("", REGISTERED, &asked.name)?.is_some() {
            let message = format!("Registered Model (name={}) already exists.", asked.name);
            return Err(Refusal::exists(message));
        }
        let now = open.now().0;
        let model = Registered {
            name: asked.name,
            description: asked.description.unwrap_or_default(),
            creation_timestamp: now,
            last_updated_timestamp: now,
            tags: Value::Array(pairs(&asked.tags)),
            aliases: Vec::new(),
            versions: Vec::new(),
            last_version: 0,
        };
        keep(open, model).map(|model| Json(json!({ "registered_model": model.shown() })))
    })
    .await
}

/// Fails unless this can be the name of a registered model.
fn check_name(name: &str) -> Result<(), Refusal> {
    match name {
        "" => Err(Refusal::invalid("Registered model name cannot be empty.")),
        name if name.contains(['/', ':']) => Err(Refusal::invalid(format!(
            "Invalid Registered Model name: '{name}'. Names cannot contain '/' or ':'."
        ))),
        _ => Ok(()),
    }
}

pub(super) async fn get(Caller(run): Caller, Asked(asked): Asked<Named>) -> Answer {
    run.with(move |open| Ok(Json(json!({ "registered_model": model(open, &asked.name)?.shown() })))).await
}

/// Changes a registered model, and returns it.
async fn change(
    Caller(run): Caller,
    asked: Named,
    how: impl FnOnce(&mut Registered, Named) -> Result<(), Refusal> + Send + 'static,
) -> Answer {
    run.with(move |open| {
        let mut model = model(open, &asked.name)?;
        how(&mut model, asked)?;
        keep(open, model).map(|model| Json(json!({ "registered_model": model.shown() })))
    })
    .await
}

pub(super) async fn update(caller: Caller, Asked(asked): Asked<Named>) -> Answer {
    change(caller, asked, |model, asked| {
        model.description = asked.description.unwrap_or_default();
        Ok(())
    })
    .await
}

pub(super) async fn rename(Caller(run): Caller, Asked(asked): Asked<Named>) -> Answer {
    run.with(move |open| {
        let mut model = model(open, &asked.name)?;
        check_name(&asked.new_name)?;
        if open.document("", REGISTERED, &asked.new_name)?.is_some() {
            return Err(Refusal::exists(format!("`{}` cannot be its name", asked.new_name)));
        }
        for version in &mut model.versions {
            version["name"] = json!(asked.new_name);
        }
        model.name = asked.new_name;
        let model = keep(open, model)?;
        open.drop_document("", REGISTERED, &asked.name)?;
        Ok(Json(json!({ "registered_model": model.shown() })))
    })
    .await
}

pub(super) async fn delete(Caller(run): Caller, Asked(asked): Asked<Named>) -> Answer {
    run.with(move |open| {
        model(open, &asked.name)?;
        open.drop_document("", REGISTERED, &asked.name)?;
        Ok(Json(json!({})))
    })
    .await
}

pub(super) async fn set_tag(caller: Caller, Asked(asked): Asked<Named>) -> Answer {
    change(caller, asked, |model, asked| {
        merge(&mut model.tags, vec![Pair { key: asked.key, value: asked.value }]);
        Ok(())
    })
    .await
}

pub(super) async fn delete_tag(caller: Caller, Asked(asked): Asked<Named>) -> Answer {
    change(caller, asked, |model, asked| {
        remove(&mut model.tags, &asked.key);
        Ok(())
    })
    .await
}

pub(super) async fn set_alias(caller: Caller, Asked(asked): Asked<Named>) -> Answer {
    change(caller, asked, |model, asked| {
        model.version(&asked.version)?;
        model.aliases.retain(|known| known.alias != asked.alias);
        model.aliases.push(Alias { alias: asked.alias, version: asked.version });
        Ok(())
    })
    .await
}

pub(super) async fn delete_alias(caller: Caller, Asked(asked): Asked<Named>) -> Answer {
    change(caller, asked, |model, asked| {
        model.aliases.retain(|known| known.alias != asked.alias);
        Ok(())
    })
    .await
}

pub(super) async fn by_alias(Caller(run): Caller, Asked(asked): Asked<Named>) -> Answer {
    run.with(move |open| {
        let mut model = model(open, &asked.name)?;
        let named = model.aliases.iter().find(|known| known.alias == asked.alias);
        let missing = || Refusal::invalid(format!("Registered model alias {} not found.", asked.alias));
        let version = named.ok_or_else(missing)?.version.clone();
        let found = model.version(&version)?.clone();
        Ok(Json(json!({ "model_version": model.with_aliases(found) })))
    })
    .await
}

/// The newest version of each stage.
pub(super) async fn latest(Caller(run): Caller, Asked(asked): Asked<Named>) -> Answer {
    run.with(move |open| {
        let model = model(open, &asked.name)?;
        let mut latest = model.latest();
        let wanted = |stage: &Value| {
            asked.stages.iter().any(|wanted| stage.as_str().is_some_and(|it| it.eq_ignore_ascii_case(wanted)))
        };
        latest.retain(|version| asked.stages.is_empty() || wanted(&version["current_stage"]));
        Ok(Json(json!({ "model_versions": latest })))
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Search {
    filter: String,
    order_by: Option<String>,
    max_results: Integer,
    page_token: String,
}

pub(super) async fn search_models(Caller(run): Caller, Asked(asked): Asked<Search>) -> Answer {
    run.with(move |open| {
        let models = all(open)?.iter().map(Registered::shown).collect();
        let (models, token) = found(models, &asked)?;
        Ok(Json(json!({ "registered_models": models, "next_page_token": token })))
    })
    .await
}

pub(super) async fn search_versions(Caller(run): Caller, Asked(asked): Asked<Search>) -> Answer {
    run.with(move |open| {
        let of = |model: &Registered| -> Vec<Value> {
            model.versions.iter().rev().map(|version| model.with_aliases(version.clone())).collect()
        };
        let (versions, token) = found(all(open)?.iter().flat_map(of).collect(), &asked)?;
        Ok(Json(json!({ "model_versions": versions, "next_page_token": token })))
    })
    .await
}

fn found(mut all: Vec<Value>, asked: &Search) -> Result<(Vec<Value>, String), Refusal> {
    let filter = Filter::parse(&asked.filter)?;
    all.retain(|one| {
        // Clients exclude prompts by this tag, which only prompts have.
        let mut one = one.clone();
        if let Some(tags) = one["tags"].as_array_mut()
            && !tags.iter().any(|tag| tag["key"] == IS_PROMPT)
        {
            tags.push(json!({ "key": IS_PROMPT, "value": "false" }));
        }
        filter.accepts(Searched::REGISTERED, &one)
    });
    if let Some(order) = &asked.order_by {
        search::sort(&mut all, Searched::REGISTERED, &[SortKey::parse(order)?]);
    }
    search::page(all, &asked.page_token, asked.max_results, PAGE)
}

pub(super) async fn create_version(Caller(run): Caller, Asked(asked): Asked<Named>) -> Answer {
    run.with(move |open| {
        let mut model = model(open, &asked.name)?;
        let now = open.now().0;
        let last = model.versions.last().and_then(number_of).unwrap_or(0).max(model.last_version);
        model.last_version = last + 1;
        let run_id = match asked.source.strip_prefix("models:/") {
            Some(id) if asked.run_id.is_empty() => models::source_run(open, id)?,
            _ => json!(asked.run_id),
        };
        let version = json!({
            "name": asked.name,
            "version": (last + 1).to_string(),
            "creation_timestamp": now,
            "last_updated_timestamp": now,
            "current_stage": "None",
            "description": asked.description.unwrap_or_default(),
            "source": asked.source,
            "run_id": run_id,
            "run_link": asked.run_link,
            "model_id": asked.model_id,
            "status": "READY",
            "tags": pairs(&asked.tags),
        });
        model.versions.push(version.clone());
        keep(open, model)?;
        Ok(Json(json!({ "model_version": version })))
    })
    .await
}

/// Changes a version, and returns it.
async fn change_version(
    Caller(run): Caller,
    asked: Named,
    how: impl FnOnce(&mut Value, &Named) + Send + 'static,
) -> Answer {
    run.with(move |open| {
        let (mut model, now) = (model(open, &asked.name)?, open.now().0);
        let version = model.version(&asked.version)?;
        how(version, &asked);
        version["last_updated_timestamp"] = json!(now);
        let changed = version.clone();
        let model = keep(open, model)?;
        Ok(Json(json!({ "model_version": model.with_aliases(changed) })))
    })
    .await
}

pub(super) async fn get_version(Caller(run): Caller, Asked(asked): Asked<Named>) -> Answer {
    run.with(move |open| {
        let mut model = model(open, &asked.name)?;
        let version = model.version(&asked.version)?.clone();
        Ok(Json(json!({ "model_version": model.with_aliases(version) })))
    })
    .await
}

pub(super) async fn update_version(caller: Caller, Asked(asked): Asked<Named>) -> Answer {
    change_version(caller, asked, |version, asked| {
        version["description"] = json!(asked.description.clone().unwrap_or_default());
    })
    .await
}

pub(super) async fn set_version_tag(caller: Caller, Asked(asked): Asked<Named>) -> Answer {
    change_version(caller, asked, |version, asked| {
        merge(&mut version["tags"], vec![Pair { key: asked.key.clone(), value: asked.value.clone() }]);
    })
    .await
}

pub(super) async fn delete_version_tag(caller: Caller, Asked(asked): Asked<Named>) -> Answer {
    change_version(caller, asked, |version, asked| remove(&mut version["tags"], &asked.key)).await
}

/// Moves a version to a stage; the others of that stage are archived if that is asked for.
pub(super) async fn set_stage(Caller(run): Caller, Asked(asked): Asked<Named>) -> Answer {
    run.with(move |open| {
        let mut model = model(open, &asked.name)?;
        let stages = ["None", "Staging", "Production", "Archived"];
        let known = stages.into_iter().find(|stage| stage.eq_ignore_ascii_case(&asked.stage));
        let stage = known.ok_or_else(|| {
            Refusal::invalid(format!("`{}` is no stage: choose from {}", asked.stage, stages.join(", ")))
        })?;
        model.version(&asked.version)?;
        for version in &mut model.versions {
            if version["version"] == asked.version.as_str() {
                version["current_stage"] = json!(stage);
            } else if asked.archive_existing_versions && version["current_stage"] == stage {
                version["current_stage"] = json!("Archived");
            }
        }
        let mut model = keep(open, model)?;
        let version = model.version(&asked.version)?.clone();
        Ok(Json(json!({ "model_version": version })))
    })
    .await
}

pub(super) async fn delete_version(Caller(run): Caller, Asked(asked): Asked<Named>) -> Answer {
    run.with(move |open| {
        let mut model = model(open, &asked.name)?;
        model.version(&asked.version)?;
        model.versions.retain(|version| version["version"] != asked.version.as_str());
        model.aliases.retain(|known| known.version != asked.version);
        keep(open, model)?;
        Ok(Json(json!({})))
    })
    .await
}

/// The address of a version's files.
pub(super) async fn download_uri(Caller(run): Caller, Asked(asked): Asked<Named>) -> Answer {
    run.with(move |open| {
        let mut model = model(open, &asked.name)?;
        let source = model.version(&asked.version)?["source"].clone();
        let logged = source.as_str().and_then(|source| source.strip_prefix("models:/")).map(str::to_owned);
        let uri = match logged {
            Some(id) => models::artifact_uri(open, &id)?,
            None => source,
        };
        Ok(Json(json!({ "artifact_uri": uri })))
    })
    .await
}

impl Registered {
    /// In the form for clients.
    fn shown(&self) -> Value {
        json!({
            "name": self.name,
            "description": self.description,
            "creation_timestamp": self.creation_timestamp,
            "last_updated_timestamp": self.last_updated_timestamp,
            "tags": self.tags,
            "aliases": self.aliases,
            "latest_versions": self.latest(),
        })
    }

    /// The newest version of each stage.
    fn latest(&self) -> Vec<Value> {
        let mut latest: Vec<Value> = Vec::new();
        for version in &self.versions {
            latest.retain(|older| older["current_stage"] != version["current_stage"]);
            latest.push(self.with_aliases(version.clone()));
        }
        latest
    }

    fn with_aliases(&self, mut version: Value) -> Value {
        let of_it = self.aliases.iter().filter(|known| version["version"] == known.version.as_str());
        version["aliases"] = of_it.map(|known| json!(known.alias)).collect();
        version
    }

    fn version(&mut self, version: &str) -> Result<&mut Value, Refusal> {
        let missing = format!("Model Version (name={}, version={version}) not found", self.name);
        let found = self.versions.iter_mut().find(|known| known["version"] == version);
        found.ok_or_else(|| Refusal::missing(missing))
    }
}

fn all(open: &mut OpenRun<'_>) -> Result<Vec<Registered>, Refusal> {
    let documents = open.documents("", REGISTERED)?;
    Ok(documents.into_iter().filter_map(|document| serde_json::from_value(document).ok()).collect())
}

fn model(open: &mut OpenRun<'_>, name: &str) -> Result<Registered, Refusal> {
    let document = open.document("", REGISTERED, name)?;
    document.and_then(|document| serde_json::from_value(document).ok()).ok_or_else(|| {
        Refusal::missing(format!(
            "Registered Model with name={name} not found: a job's registry has what the job registered itself"
        ))
    })
}

fn keep(open: &mut OpenRun<'_>, mut model: Registered) -> Result<Registered, Refusal> {
    model.last_updated_timestamp = open.now().0;
    let document = serde_json::to_value(&model).map_err(|error| Refusal::invalid(error.to_string()))?;
    open.keep_document("", REGISTERED, &model.name, &document)?;
    Ok(model)
}

fn number_of(version: &Value) -> Option<u64> {
    version["version"].as_str()?.parse().ok()
}
