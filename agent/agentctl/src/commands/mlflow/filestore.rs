//! The file store of MLflow, as its clients of versions 2 and 3 read it.
//!
//! ```text
//! DIR/EXPERIMENT/meta.yaml                      its name
//! DIR/EXPERIMENT/RUN/meta.yaml                  name, times, status
//! DIR/EXPERIMENT/RUN/metrics/NAME               a line for each value: time, value, step
//! DIR/EXPERIMENT/RUN/{params,tags}/NAME         the text
//! DIR/EXPERIMENT/RUN/artifacts/…                files
//! DIR/EXPERIMENT/RUN/{inputs,outputs}/ID        data it read, models it made
//! DIR/EXPERIMENT/datasets/ID                    that data
//! DIR/EXPERIMENT/models/ID/…                    logged models, of MLflow 3
//! DIR/EXPERIMENT/traces/ID/…                    traces, of MLflow 3
//! DIR/models/NAME/…                             registered models
//! ```
//!
//! Invariants: a directory of a run or model is made beside the store, and has its place when it is complete, so
//! whoever reads meanwhile finds the old one or the new one. What is written depends on the job alone, so the same job written
//! again changes nothing. A value is written with as many digits as it takes to read the same number.

mod registry;
mod traces;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use agent_cas::digest_of;
use serde_json::{Value, json};

use super::names;
use super::recorded::{MetricValue, RecordedRun, Recording};

/// The tag that makes a run one of another.
const PARENT: &str = "mlflow.parentRunId";

/// The name of a description in a directory.
const META: &str = "meta.yaml";
/// The tag with the job that an entry is of.
pub(super) const JOB: &str = "agentd.job";
/// How the id of a run that the script began follows that of the job.
const BESIDE: &str = "--";

/// The numbers of MLflow for how a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RunStatus {
    Running = 1,
    Scheduled = 2,
    Finished = 3,
    Failed = 4,
    Killed = 5,
}

impl RunStatus {
    fn parse(word: &str) -> Option<RunStatus> {
        Some(match word {
            "SCHEDULED" => RunStatus::Scheduled,
            "FINISHED" => RunStatus::Finished,
            "FAILED" => RunStatus::Failed,
            "KILLED" => RunStatus::Killed,
            _ => return None,
        })
    }
}

/// What the store says of a job besides what it recorded.
#[derive(Debug)]
pub(super) struct JobFacts {
    pub(super) job: String,
    pub(super) title: String,
    pub(super) owner: String,
    pub(super) experiment: String,
    pub(super) command: String,
    pub(super) tags: BTreeMap<String, String>,
    /// In milliseconds since 1970, as are all times here.
    pub(super) started: u64,
    pub(super) ended: Option<u64>,
    pub(super) status: RunStatus,
    /// The sweep that it is a trial of.
    pub(super) sweep: Option<String>,
    /// Its values, which count as parameters that it recorded.
    pub(super) values: BTreeMap<String, String>,
}

/// A store on the disk.
#[derive(Debug)]
pub(super) struct FileStore {
    root: PathBuf,
    /// On the same file system, where directories are made; removed by whoever made it.
    room: PathBuf,
}

impl FileStore {
    /// The store in the directory `root`, an absolute path; it is made if it does not exist.
    pub(super) fn open(root: PathBuf, room: PathBuf) -> io::Result<FileStore> {
        fs::create_dir_all(root.join(".trash"))?;
        Ok(FileStore { root, room })
    }

    /// Writes a job with all its runs and models. `artifacts` has its files, which are moved away; without them those
    /// stay that were written before. Returns how many runs there are.
    pub(super) fn write(
        &self,
        facts: &JobFacts,
        recording: &Recording,
        artifacts: Option<&Path>,
    ) -> io::Result<usize> {
        let entry =
            ExportedJob { store: self, facts, experiment: names::experiment(&facts.experiment), artifacts };
        entry.describe_experiment()?;
        entry.write_models(recording)?;
        traces::write(&entry, recording)?;
        let (own, others): (Vec<_>, Vec<_>) = recording.runs.iter().partition(|(label, _)| label.is_empty());
        // The files of the others are in folders among those of the job.
        others.into_iter().chain(own).try_for_each(|(label, run)| entry.write_run(label, run))?;
        registry::write(&entry, recording)?;
        Ok(recording.runs.len())
    }

    /// Puts a complete directory in its place.
    pub(super) fn put(&self, made: &Path, place: &Path) -> io::Result<()> {
        fs::create_dir_all(place.parent().unwrap_or(&self.root))?;
        if place.exists() {
            let replaced = self.room.join("replaced");
            let _ = fs::remove_dir_all(&replaced); // where it cannot go, the next line says so
            fs::rename(place, &replaced)?;
        }
        fs::rename(made, place)
    }

    /// The path of something in the store.
    pub(super) fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// A new, empty directory that gets its place later.
    pub(super) fn fresh(&self) -> io::Result<PathBuf> {
        let made = self.room.join("made");
        if made.exists() {
            fs::remove_dir_all(&made)?;
        }
        fs::create_dir_all(&made)?;
        Ok(made)
    }

    pub(super) fn uri(&self, path: &str) -> String {
        let mut uri = "file://".to_owned();
        for byte in self.at(path).display().to_string().bytes() {
            match byte {
                b'/' | b'-' | b'_' | b'.' | b'~' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => {
                    uri.push(byte.into())
                }
                byte => drop(write!(uri, "%{byte:02X}")), // into memory
            }
        }
        uri
    }
}

/// A job that is written to the store.
pub(super) struct ExportedJob<'a> {
    pub(super) store: &'a FileStore,
    pub(super) facts: &'a JobFacts,
    pub(super) experiment: String,
    artifacts: Option<&'a Path>,
}

impl ExportedJob<'_> {
    fn describe_experiment(&self) -> io::Result<()> {
        let (id, facts) = (&self.experiment, self.facts);
        let place = self.store.at(id).join(META);
        if place.exists() {
            return Ok(()); // people may have renamed it since
        }
        let made = self.store.fresh()?;
        let meta = json!({
            "artifact_location": self.store.uri(id),
            "creation_time": facts.started,
            "experiment_id": id,
            "last_update_time": facts.started,
            "lifecycle_stage": "active",
            "name": facts.experiment,
        });
        describe(&made, &meta)?;
        self.store.put(&made, &self.store.at(id))
    }

    /// The id of a run, here: the one that clients of the job were told is that of the job, and a label.
    pub(super) fn run_id(&self, label: &str) -> String {
        match label {
            "" => names::id(&self.facts.job),
            label => names::id(&format!("{}{BESIDE}{label}", self.facts.job)),
        }
    }

    /// The address here of files that clients of the job have at `mlflow-artifacts:/EXPERIMENT/OWNER/artifacts/…`.
    pub(super) fn address(&self, told: &str) -> String {
        let parts = told.strip_prefix("mlflow-artifacts:/").and_then(|rest| rest.split_once('/'));
        match parts.and_then(|(_, rest)| rest.split_once("/artifacts")) {
            Some((owner, rest)) if owner.contains('/') => {
                self.store.uri(&format!("{}/{owner}/artifacts{rest}", self.experiment))
            }
            Some((owner, rest)) => {
                self.store.uri(&format!("{}/{}/artifacts{rest}", self.experiment, names::id(owner)))
            }
            None => match told.strip_prefix("models:/") {
                Some(model) if model.starts_with("m-") => {
                    self.store.uri(&format!("{}/models/{model}/artifacts", self.experiment))
                }
                _ => told.to_owned(),
            },
        }
    }

    fn write_run(&self, label: &str, run: &RecordedRun) -> io::Result<()> {
        let (made, id) = (self.store.fresh()?, self.run_id(label));
        let place = self.store.at(&self.experiment).join(&id);
        describe(&made, &self.meta(label, &id, run))?;
        let metrics = made.join("metrics");
        fs::create_dir(&metrics)?;
        for (name, fitted) in names::fit(run.metrics.keys()) {
            let lines: String = run.metrics[name].iter().map(|value| self.line(*value)).collect();
            write_file(&metrics, &fitted, &lines)?;
        }
        let mut params = if label.is_empty() { self.facts.values.clone() } else { BTreeMap::new() };
        params.extend(run.params.clone());
        write_texts(&made.join("params"), &params)?;
        write_texts(&made.join("tags"), &self.tags(label, run))?;
        self.write_inputs(&made, &id, run)?;
        for model in run.documents("output") {
            let step = model["step"].as_i64().unwrap_or(0);
            link_model(&made.join("outputs"), &model, ["RUN_OUTPUT", "MODEL_OUTPUT"], Some(step))?;
        }
        self.place_artifacts(label, &made, &place)?;
        self.store.put(&made, &place)
    }

    fn meta(&self, label: &str, id: &str, run: &RecordedRun) -> Value {
        let facts = self.facts;
        let is_own = label.is_empty();
        let own_name = is_own.then_some(facts.title.as_str());
        let name = run.tag("mlflow.runName").or(own_name).or(run.tag("agentd.run")).unwrap_or(label);
        // A run that its script did not end has ended with the job.
        let told = run.tag("agentd.status").filter(|_| !is_own).and_then(RunStatus::parse);
        let ended = run.moment("agentd.ended").filter(|_| !is_own && told.is_some()).or(facts.ended);
        json!({
            "artifact_uri": self.store.uri(&format!("{}/{id}/artifacts", self.experiment)),
            "end_time": ended,
            "entry_point_name": "",
            "experiment_id": self.experiment,
            "lifecycle_stage": run.tag("agentd.lifecycle").unwrap_or("active"),
            "run_id": id,
            "run_name": name,
            "run_uuid": id,
            "source_name": "",
            "source_type": 4,
            "source_version": "",
            "start_time": run.moment("agentd.started").unwrap_or(facts.started),
            "status": told.unwrap_or(facts.status) as u8,
            "tags": [],
            "user_id": run.tag("mlflow.user").unwrap_or(&facts.owner),
        })
    }

    /// `1700000000000 0.25 3`. Python reads the same number back, `NaN` and `inf` too.
    fn line(&self, MetricValue { value, step, time }: MetricValue) -> String {
        format!("{} {value:?} {step}\n", time.map_or(self.facts.started, |time| time.0))
    }

    fn tags(&self, label: &str, run: &RecordedRun) -> BTreeMap<String, String> {
        let facts = self.facts;
        let mut tags = BTreeMap::new();
        if label.is_empty() {
            tags.extend(facts.tags.clone());
            tags.insert("mlflow.runName".to_owned(), facts.title.clone());
            tags.insert("mlflow.source.name".to_owned(), facts.command.clone());
            tags.insert("mlflow.source.type".to_owned(), "JOB".to_owned());
            tags.extend(facts.sweep.iter().map(|sweep| (PARENT.to_owned(), sweep.clone())));
        } else {
            tags.insert("mlflow.runName".to_owned(), run.tag("agentd.run").unwrap_or(label).to_owned());
        }
        tags.insert("mlflow.user".to_owned(), facts.owner.clone());
        tags.extend(run.tags().map(|(name, text)| (name.clone(), text.clone())));
        if let Some(parent) = tags.get_mut(PARENT) {
            *parent = names::id(parent);
        }
        tags.insert(JOB.to_owned(), facts.job.clone());
        tags
    }

    /// The data and the models that a run read.
    fn write_inputs(&self, made: &Path, run: &str, recorded: &RecordedRun) -> io::Result<()> {
        for input in recorded.documents("input") {
            let data = &input["dataset"];
            let [name, digest] = ["name", "digest"].map(|key| data[key].as_str().unwrap_or_default());
            let id = digest_of(format!("{name}\t{digest}").as_bytes()).hex()[..32].to_owned();
            let place = self.store.at(&self.experiment).join("datasets").join(&id);
            if !place.exists() {
                fs::create_dir_all(&place)?;
                let [kind, source] =
                    ["source_type", "source"].map(|key| data[key].as_str().unwrap_or_default());
                let meta = json!({
                    "name": name, "digest": digest, "source_type": kind, "source": source,
                    "schema": data["schema"], "profile": data["profile"],
                });
                describe(&place, &meta)?;
            }
            let pairs = input["tags"].as_array().map(Vec::as_slice).unwrap_or_default();
            let tags: serde_json::Map<String, Value> = pairs
                .iter()
                .filter_map(|pair| Some((pair["key"].as_str()?.to_owned(), pair["value"].clone())))
                .collect();
            let link = made.join("inputs").join(&id);
            fs::create_dir_all(&link)?;
            let meta = json!({
                "source_type": "DATASET", "source_id": id,
                "destination_type": "RUN", "destination_id": run, "tags": tags,
            });
            describe(&link, &meta)?;
        }
        let models = recorded.documents("model-input");
        models.iter().try_for_each(|model| link_model(&made.join("inputs"), model, ["MODEL", "RUN"], None))
    }

    /// Moves the files of a run to it: new ones, or those that were written before.
    pub(super) fn place_artifacts(&self, from: &str, made: &Path, place: &Path) -> io::Result<()> {
        let to = made.join("artifacts");
        let source = match self.artifacts {
            Some(artifacts) => artifacts.join(from),
            None => place.join("artifacts"),
        };
        if source.is_dir() { fs::rename(source, to) } else { fs::create_dir(to) }
    }

    /// The models that MLflow 3 keeps beside runs.
    fn write_models(&self, recording: &Recording) -> io::Result<()> {
        let own = &recording.runs[""];
        for model in own.documents("model") {
            let info = &model["info"];
            let Some(id) = model_id(info) else { continue };
            let made = self.store.fresh()?;
            describe(&made, &self.meta_of_model(id, info))?;
            let mut lines: BTreeMap<String, String> = BTreeMap::new();
            for metric in own.documents(&format!("model-metric.{id}")) {
                let name = metric["key"].as_str().unwrap_or_default().to_owned();
                lines.entry(name).or_default().push_str(&self.line_of_model(&metric));
            }
            write_texts(&made.join("metrics"), &lines)?;
            write_texts(&made.join("params"), &pairs(&model["data"]["params"]))?;
            write_texts(&made.join("tags"), &pairs(&info["tags"]))?;
            let place = self.store.at(&self.experiment).join("models").join(id);
            self.place_artifacts(&format!("models/{id}"), &made, &place)?;
            self.store.put(&made, &place)?;
        }
        Ok(())
    }

    fn meta_of_model(&self, id: &str, info: &Value) -> Value {
        let status = match &info["status"] {
            Value::String(word) => match word.trim_start_matches("LOGGED_MODEL_") {
                "READY" => 2,
                "UPLOAD_FAILED" => 3,
                _ => 1,
            },
            number => number.as_u64().unwrap_or(1),
        };
        json!({
            "experiment_id": self.experiment,
            "model_id": id,
            "name": info["name"],
            "artifact_location": self.store.uri(&format!("{}/models/{id}/artifacts", self.experiment)),
            "creation_timestamp": info["creation_timestamp_ms"],
            "last_updated_timestamp": info["last_updated_timestamp_ms"],
            "source_run_id": info["source_run_id"].as_str().map(names::id),
            "status": status,
            "status_message": null,
            "model_type": info["model_type"],
            "lifecycle_stage": "active",
        })
    }

    /// The value of a model's metric, with the run that measured it and the data, unless their names have spaces, which
    /// end a field.
    fn line_of_model(&self, metric: &Value) -> String {
        let value = match &metric["value"] {
            Value::String(word) => word.clone(),
            number => format!("{:?}", number.as_f64().unwrap_or(f64::NAN)),
        };
        let (time, step) = (metric["timestamp"].as_i64().unwrap_or(0), metric["step"].as_i64().unwrap_or(0));
        let run = names::id(metric["run_id"].as_str().unwrap_or(&self.facts.job));
        let data = ["dataset_name", "dataset_digest"].map(|key| metric[key].as_str().unwrap_or_default());
        let is_field = |text: &&str| !text.is_empty() && !text.contains(char::is_whitespace);
        match data.iter().all(is_field) {
            true => format!("{time} {value} {step} {run} {} {}\n", data[0], data[1]),
            false => format!("{time} {value} {step} {run}\n"),
        }
    }
}

/// The id of a model, if it can be the name of a folder.
fn model_id(model: &Value) -> Option<&str> {
    model["model_id"].as_str().filter(|id| !id.contains('/') && *id != "..")
}

/// The link between a run and a model.
fn link_model(folder: &Path, model: &Value, kinds: [&str; 2], step: Option<i64>) -> io::Result<()> {
    let Some(id) = model_id(model) else { return Ok(()) };
    let link = folder.join(id);
    fs::create_dir_all(&link)?;
    let mut meta = json!({
        "source_type": kinds[0], "source_id": id, "destination_type": kinds[1], "destination_id": id, "tags": {},
    });
    if let Some(step) = step {
        meta["step"] = json!(step);
    }
    describe(&link, &meta)
}

/// A list of keys and values as texts.
pub(super) fn pairs(list: &Value) -> BTreeMap<String, String> {
    let entries = list.as_array().map(Vec::as_slice).unwrap_or_default();
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    entries
        .iter()
        .filter_map(|entry| Some((entry["key"].as_str()?.to_owned(), text(&entry["value"]))))
        .collect()
}

/// A file for each text, in a new folder.
pub(super) fn write_texts(folder: &Path, texts: &BTreeMap<String, String>) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    names::fit(texts.keys())
        .into_iter()
        .try_for_each(|(name, fitted)| write_file(folder, &fitted, &texts[name]))
}

fn write_file(folder: &Path, name: &str, text: &str) -> io::Result<()> {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap_or(folder))?;
    fs::write(path, text)
}

/// Writes the description of a directory.
pub(super) fn describe(dir: &Path, meta: &Value) -> io::Result<()> {
    describe_as(dir, META, meta)
}

/// The same in a file of this name.
pub(super) fn describe_as(dir: &Path, name: &str, meta: &Value) -> io::Result<()> {
    let mut text = String::new();
    for (key, value) in meta.as_object().into_iter().flatten() {
        text.push_str(key);
        text.push_str(": ");
        inline(value, &mut text);
        text.push('\n');
    }
    fs::write(dir.join(name), text)
}

/// A value in the flow style of YAML, with all but plain characters escaped: readers of YAML refuse some.
fn inline(value: &Value, text: &mut String) {
    match value {
        Value::String(string) => quote(string, text),
        Value::Array(items) => {
            text.push('[');
            for (place, item) in items.iter().enumerate() {
                text.push_str(if place > 0 { ", " } else { "" });
                inline(item, text);
            }
            text.push(']');
        }
        Value::Object(entries) => {
            text.push('{');
            for (place, (key, item)) in entries.iter().enumerate() {
                text.push_str(if place > 0 { ", " } else { "" });
                quote(key, text);
                text.push_str(": ");
                inline(item, text);
            }
            text.push('}');
        }
        plain => text.push_str(&plain.to_string()),
    }
}

fn quote(string: &str, text: &mut String) {
    text.push('"');
    for c in string.chars() {
        match c {
            '"' | '\\' => text.extend(['\\', c]),
            ' '..='~' => text.push(c),
            c => drop(write!(text, "\\U{:08x}", u32::from(c))), // into memory
        }
    }
    text.push('"');
}

#[cfg(test)]
mod tests;
