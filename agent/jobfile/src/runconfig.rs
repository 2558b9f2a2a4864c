//! The run configuration of the Azure ML SDK and CLI v1: `.azureml/NAME.runconfig`, in YAML or JSON.
//!
//! It becomes the same [`JobFile`] as a command job. Owns what each of its keys means here; `agent/docs/runconfig.md`
//! says it to users.
//!
//! Invariants: paths are relative to the project, not to the file. Every key has an effect, or is told of, or has the
//! value that the old tools wrote into every file.

mod command;
mod data;
mod environment;
pub(crate) mod keys;
mod launch;

use std::time::Duration;

use super::command_job::{JobFile, document, read_target, read_timeout};
use super::section::{Mistakes, Refused, Rejection, Section, Warning, within};
use crate::yaml::{Node, Place, Value};
use agent_model::job::{INSTANCE_TYPE, JobDraft, Limits, Priority, Resources};

/// A run configuration as read.
#[derive(Debug, Clone, PartialEq)]
pub struct Runconfig {
    /// The job.
    pub job: JobFile,
    /// The script, relative to the project, and where it is named; the caller looks whether it is there.
    pub script: Option<(String, Place)>,
}

/// Reads a run configuration. `given` are a script and its arguments, in place of those of the file; `folder` is where
/// the file is, relative to the project.
pub fn runconfig(text: &str, given: &[String], folder: &str) -> Result<Runconfig, Refused> {
    let node = document(text)?;
    refuse_legacy(&node)?;
    read(node, given, folder)
}

/// Keys of the form of 2018, which no later one has.
pub(super) const LEGACY: [&str; 4] =
    ["ArgumentVector", "CondaDependenciesFile", "SparkDependenciesFile", "TrackedRun"];

fn refuse_legacy(node: &Node) -> Result<(), Rejection> {
    let Value::Map(entries) = &node.value else { return Ok(()) };
    match entries.iter().find(|(key, _)| LEGACY.contains(&key.text.as_str())) {
        Some((key, _)) => Err(Rejection::unsupported(
            key.place,
            format!("`{}` is of the oldest form of run configurations, which is not read", key.text),
            "write `script` and `arguments` for `ArgumentVector`, small first letters (`target`, `framework`), and \
             `environment: {python: {condaDependenciesFile: …}}`; `agentctl init --runconfig` writes an example",
        )),
        None => Ok(()),
    }
}

/// Names for where a job runs that change nothing here.
const HERE: [&str; 3] = ["local", "amlcompute", "containerinstance"];

fn read(node: Node, given: &[String], folder: &str) -> Result<Runconfig, Refused> {
    let (mut warnings, mut wrong) = (Vec::new(), Mistakes::default());
    let mut top = Section::open(node, "", &keys::RUNCONFIG)?;
    let target = wrong.note(read_target(&mut top, "target")).unwrap_or_default();
    let launch = launch::launch(&mut top, &mut warnings, &mut wrong);
    let in_container = target == "containerinstance";
    let software = environment::software(&mut top, in_container, folder, &mut warnings, &mut wrong);
    let data = data::data(&mut top, &mut warnings, &mut wrong);
    let command = command::command(&mut top, given, &launch, &software, &data, &mut warnings, &mut wrong);
    let mut resources = Resources {
        nodes: launch.nodes,
        shm: software.shm,
        docker_args: software.docker_args,
        ..Resources::default()
    };
    read_machine(&mut top, &target, &mut resources, &mut warnings, &mut wrong);
    let mut environment_variables = software.variables;
    environment_variables.extend(wrong.note(top.texts("environmentVariables")));
    let draft = JobDraft {
        display_name: wrong.note(top.text("jobName")).unwrap_or(command.title),
        command: command.line,
        compute: Some(target).filter(|name| !name.is_empty() && !HERE.contains(&name.as_str())),
        environment_variables,
        inputs: data.ready,
        // A file of the SDK v1 starts scripts of the SDK v1.
        azureml_stand_in: true,
        resources,
        distribution: launch.distribution,
        limits: Limits { timeout: wrong.note(read_limit(&mut top)), ..Limits::default() },
        priority: wrong.note(read_priority(&mut top)),
        ..JobDraft::default()
    };
    if let Some(history) = wrong.note(top.section("history")) {
        history.close(&mut warnings, &mut wrong);
    }
    top.close(&mut warnings, &mut wrong);
    let warnings = wrong.told(warnings)?;
    let (code, environment, inputs) = (Some(".".to_owned()), software.environment, data.inputs);
    Ok(Runconfig { job: JobFile { draft, code, environment, inputs, warnings }, script: command.script })
}

fn read_limit(top: &mut Section) -> Result<Option<Duration>, Rejection> {
    read_timeout(top, "maxRunDurationSeconds")
}

/// A number here, of which only the sign counts.
fn read_priority(top: &mut Section) -> Result<Priority, Rejection> {
    let Some(node) = top.node("priority") else { return Ok(Priority::default()) };
    let number: i64 = node.parsed("a whole number").map_err(|at| within("priority", at))?;
    Ok(match number {
        ..0 => Priority::Low,
        0 => Priority::Medium,
        1.. => Priority::High,
    })
}

/// What the sections of each target say about the machine.
fn read_machine(
    top: &mut Section,
    target: &str,
    resources: &mut Resources,
    warnings: &mut Vec<Warning>,
    wrong: &mut Mistakes,
) {
    if target == "amlcompute"
        && let Some(mut section) = wrong.note(top.section("amlcompute"))
    {
        let kind = wrong.note(section.text("vmSize")).filter(|kind| !kind.is_empty());
        resources.labels.extend(kind.map(|kind| (INSTANCE_TYPE.to_owned(), kind)));
        section.close(warnings, wrong);
    }
    if target == "containerinstance"
        && let Some(mut section) = wrong.note(top.section("containerInstance"))
    {
        resources.cpus =
            wrong.note(read_amount(&mut section, "cpuCores", 1.0)).try_into().unwrap_or(u32::MAX);
        resources.memory = wrong.note(read_amount(&mut section, "memoryGb", f64::from(1 << 30)));
        section.close(warnings, wrong);
    }
    if let Some(mut section) = wrong.note(top.section("kubernetescompute")) {
        let kind = wrong.note(section.text("instanceType")).filter(|kind| !kind.is_empty());
        resources.labels.extend(kind.map(|kind| (INSTANCE_TYPE.to_owned(), kind)));
        section.close(warnings, wrong);
    }
    top.skip(&["amlcompute", "containerInstance"]);
}

/// A number with a fraction, in units of so many, rounded up; 0 when nothing is said.
fn read_amount(section: &mut Section, key: &'static str, unit: f64) -> Result<u64, Rejection> {
    let path = section.name(key);
    let Some(node) = section.node(key) else { return Ok(0) };
    let number: f64 = node.parsed("a number").map_err(|at| within(&path, at))?;
    if !(0.0..=1e6).contains(&number) {
        return Err(Rejection::invalid(node.place, format!("`{path}`: {number} is too much, or too little")));
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked before")]
    Ok((number * unit).ceil() as u64)
}

#[cfg(test)]
mod tests;
