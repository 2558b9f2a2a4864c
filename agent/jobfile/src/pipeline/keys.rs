//! The keys of a pipeline and of a component, and the kinds of steps and components that are not run.

use crate::command_job::keys::{ENVIRONMENT, OUTPUT};
use crate::keys::{Keys, ValueKind, ignored, read, refused, unused};
use crate::section::{Rejection, within};
use crate::yaml::{Entries, Place};

/// Of the document.
pub(crate) static PIPELINE: Keys = Keys::exact(&[
    read("type", ValueKind::Word(&["pipeline"])),
    read("jobs", ValueKind::Free)
        .about("its steps by their names: each a job, or a `component` with `inputs`"),
    read("component", ValueKind::Free),
    read("inputs", ValueKind::Free).about("values and data that steps read as `${{parent.inputs.NAME}}`"),
    read("outputs", ValueKind::Named(&ValueKind::Mapping(&OUTPUT))),
    read("settings", ValueKind::Mapping(&SETTINGS)),
    read("compute", ValueKind::Text),
    read("name", ValueKind::Text),
    read("display_name", ValueKind::Text),
    read("description", ValueKind::Text),
    read("experiment_name", ValueKind::Text),
    read("tags", ValueKind::Texts),
    read("visibility", ValueKind::Word(&["owner", "all"])),
    read("queue_settings", ValueKind::Mapping(&QUEUE)),
    ignored("$schema"),
    ignored("version"),
    ignored("is_deterministic"),
    unused("properties", &[], "only `tags` are kept of what a job file says about its job"),
    unused("identity", &["aml_token"], "a job has no identity of the cloud"),
    unused("schedule", &[], "run it from a timer: agentctl submit FILE"),
]);

static QUEUE: Keys =
    Keys::exact(&[read("priority", ValueKind::Word(&["low", "medium", "high"])), ignored("job_tier")]);

static SETTINGS: Keys = Keys::exact(&[
    read("default_compute", ValueKind::Text),
    read("continue_on_step_failure", ValueKind::Flag),
    unused("default_datastore", &[], "outputs stay with their jobs; an output with a `path` is sent there"),
    read("force_rerun", ValueKind::Flag).about("run every step, also where the same ran before"),
]);

/// Of a component.
pub(crate) static COMPONENT: Keys = Keys::exact(&[
    read("type", ValueKind::Text),
    read("command", ValueKind::Text),
    read("code", ValueKind::Text),
    read("environment", ValueKind::Either(&[ValueKind::Text, ValueKind::Mapping(&ENVIRONMENT)])),
    read("environment_variables", ValueKind::Free),
    read("resources", ValueKind::Free),
    read("distribution", ValueKind::Free),
    read("limits", ValueKind::Free),
    read("inputs", ValueKind::Free),
    read("outputs", ValueKind::Free),
    read("is_deterministic", ValueKind::Flag)
        .about("false: run it each time, also where the same ran before"),
    read("display_name", ValueKind::Text),
    read("description", ValueKind::Text),
    ignored("$schema"),
    ignored("name"),
    ignored("version"),
    ignored("tags"),
    unused("properties", &[], "only `tags` are kept of what a job file says about its job"),
    refused("additional_includes", &[], "copy those files into the folder of `code`"),
    refused("task", &[], PARALLEL),
    refused("jobs", &[], NESTED),
]);

/// Keys of a component that a step may say otherwise; mappings are joined.
pub(super) const TAKEN: [&str; 8] = [
    "command",
    "code",
    "environment",
    "environment_variables",
    "resources",
    "distribution",
    "limits",
    "description",
];

/// Those of them that a sweep takes of its trial.
pub(super) const TRIED: [&str; 6] =
    ["command", "code", "environment", "environment_variables", "resources", "distribution"];

/// Of a parameter or a port of a component.
pub(super) static PORT: Keys = Keys::exact(&[
    read("type", ValueKind::Text),
    read("optional", ValueKind::Flag),
    read("default", ValueKind::Text),
    read("mode", ValueKind::Text),
    read("min", ValueKind::Text),
    read("max", ValueKind::Text),
    read("enum", ValueKind::Free),
    ignored("description"),
    ignored("value"),
    ignored("path"),
]);

const PARALLEL: &str =
    "make it a command step that reads its files itself, or an array: agent/docs/arrays.md";
const NESTED: &str = "put its steps beside the others, in `jobs` of one pipeline";

/// Kinds of steps that are not run, and what to do.
const OTHER_STEPS: [(&str, &str); 12] = [
    ("pipeline", NESTED),
    ("parallel", PARALLEL),
    ("spark", "make it a command step with `distribution: {type: spark}`"),
    (
        "automl",
        "AutoML runs in the cloud only; make it a sweep of your own training script: agent/docs/sweeps.md",
    ),
    ("import", "fetch the data with a command step, or name them by address: agent/docs/data.md"),
    ("data_transfer", "copy the data with a command step whose output has a `path`: agent/docs/data.md"),
    ("if_else", "decide in the script of a step"),
    ("do_while", "loop in the script of a step"),
    ("parallel_for", "make it an array, or a step for each: agent/docs/arrays.md"),
    ("finetuning", "make it a command step with your own script"),
    ("distillation", "make it a command step with your own script"),
    ("base", "write `type: command`"),
];

/// Refuses a step of a kind that is not run; whether it is a sweep.
pub(super) fn refuse_other_steps(path: &str, step: &Entries) -> Result<bool, Rejection> {
    let is_sweep = step.get("trial").is_some();
    let Some(node) = step.get("type") else { return Ok(is_sweep) };
    let word = node.text().map_err(|at| within(&format!("{path}.type"), at))?.trim().to_ascii_lowercase();
    match OTHER_STEPS.iter().find(|(kind, _)| *kind == word) {
        Some((_, fix)) => {
            Err(Rejection::unsupported(node.place, format!("a step of `type: {word}` is not run"), fix))
        }
        None => Ok(is_sweep || word == "sweep"),
    }
}

/// Refuses a component of another kind than a command.
pub(super) fn refuse_other_components(place: Place, kind: &str) -> Result<(), Rejection> {
    let kind = kind.trim().to_ascii_lowercase();
    if matches!(kind.as_str(), "command" | "commandcomponent" | "") {
        return Ok(());
    }
    let fix = OTHER_STEPS.iter().find(|(other, _)| *other == kind).map(|(_, fix)| *fix);
    let fix = fix.unwrap_or("write `type: command`, or leave the key out");
    Err(Rejection::unsupported(place, format!("a component of `type: {kind}` is not run"), fix))
}

/// The file of a component, as it is written in a step.
pub(super) fn component_file(place: Place, text: &str) -> Result<String, Rejection> {
    let text = text.trim();
    let refused = |what: &str, fix: &str| {
        Err(Rejection::unsupported(place, format!("`component: {text}` {what}"), fix))
    };
    match text.split_once(':') {
        Some(("file", path)) => Ok(path.to_owned()),
        Some(("azureml", rest)) if rest.starts_with("//registries") => refused(
            "is kept by a registry of the cloud, which gives it only to the cloud",
            "write the component as a file, and name it: `component: ./NAME.yml`",
        ),
        Some(("azureml", _)) => refused(
            "is registered in a workspace of the cloud, and here are no registered components",
            "name its file: `component: ./NAME.yml`",
        ),
        Some(_) => refused("is no file", "name a file: `component: ./NAME.yml`"),
        None => Ok(text.to_owned()),
    }
}
