//! The registry of a job in the file store of MLflow.
//!
//! Each job has a registry of its own, whose versions begin with 1; a store has one. So a name belongs to the job that
//! was written first with it, and the models of other jobs have the name of the job behind theirs.

use std::collections::BTreeMap;
use std::{fs, io};

use serde_json::{Value, json};

use super::super::names;
use super::super::recorded::Recording;
use super::{ExportedJob, JOB, describe, pairs, write_texts};

/// Writes the models that the job registered.
pub(super) fn write(entry: &ExportedJob<'_>, recording: &Recording) -> io::Result<()> {
    let models = recording.runs[""].documents("registered-model");
    models.iter().try_for_each(|model| write_model(entry, model))
}

fn write_model(entry: &ExportedJob<'_>, model: &Value) -> io::Result<()> {
    let name = name_here(entry, model["name"].as_str().unwrap_or_default());
    let made = entry.store.fresh()?;
    let meta = json!({
        "name": name,
        "creation_timestamp": model["creation_timestamp"],
        "last_updated_timestamp": model["last_updated_timestamp"],
        "description": model["description"],
    });
    describe(&made, &meta)?;
    let mut tags = pairs(&model["tags"]);
    tags.insert(JOB.to_owned(), entry.facts.job.clone());
    write_texts(&made.join("tags"), &tags)?;
    let aliases = model["aliases"].as_array().map(Vec::as_slice).unwrap_or_default();
    let named =
        |alias: &Value| Some((alias["alias"].as_str()?.to_owned(), alias["version"].as_str()?.to_owned()));
    let aliases: BTreeMap<String, String> = aliases.iter().filter_map(named).collect();
    write_texts(&made.join("aliases"), &aliases)?;
    for version in model["versions"].as_array().into_iter().flatten() {
        let Some(number) = version["version"].as_str().and_then(|number| number.parse::<u64>().ok()) else {
            continue;
        };
        let folder = made.join(format!("version-{number}"));
        fs::create_dir(&folder)?;
        describe(&folder, &meta_of_version(entry, &name, number, version))?;
        write_texts(&folder.join("tags"), &pairs(&version["tags"]))?;
    }
    entry.store.put(&made, &entry.store.at(&format!("models/{name}")))
}

fn meta_of_version(entry: &ExportedJob<'_>, name: &str, number: u64, version: &Value) -> Value {
    let files = entry.address(version["source"].as_str().unwrap_or_default());
    let mut meta = json!({
        "name": name,
        "version": number,
        "creation_timestamp": version["creation_timestamp"],
        "last_updated_timestamp": version["last_updated_timestamp"],
        "description": version["description"],
        "user_id": null,
        "current_stage": version["current_stage"],
        "source": files,
        "run_id": version["run_id"].as_str().filter(|run| !run.is_empty()).map(names::id),
        "run_link": version["run_link"],
        "status": "READY",
        "status_message": null,
        "storage_location": files,
    });
    if let Some(model) = version["model_id"].as_str().filter(|model| !model.is_empty()) {
        meta["model_id"] = json!(model);
    }
    meta
}

/// The name of a model in the store.
fn name_here(entry: &ExportedJob<'_>, name: &str) -> String {
    let plain: String =
        name.chars().map(|c| if matches!(c, '/' | '\\' | '%' | ':') { '_' } else { c }).collect();
    let plain = plain.trim_start_matches('.');
    let owner = fs::read_to_string(entry.store.at(&format!("models/{plain}/tags/{JOB}")));
    let is_free = !entry.store.at(&format!("models/{plain}")).exists();
    match is_free || owner.is_ok_and(|owner| owner == entry.facts.job) {
        true if !plain.is_empty() => plain.to_owned(),
        _ => format!("{plain}-{}", entry.run_id("")),
    }
}
