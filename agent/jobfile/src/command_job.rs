//! The Azure ML CLI v2 command job.

mod bounds;
pub(crate) mod environment;
pub(crate) mod keys;
mod services;
mod sweep;

use std::num::NonZeroU32;

pub(super) use self::bounds::read_timeout;
use self::bounds::{COUNT, read_codes, read_limits, read_retry, warn_of_no_replacement};
use self::environment::{EnvironmentRef, environment, local};
use self::services::services;
use super::distribution::distribution;
use super::section::{Mistakes, Refused, Rejection, Section, UnknownKey, Warning, nearest, within};
use crate::yaml::{self, Key, Node, Place, Value};
use agent_model::container::{ArgumentError, Options};
use agent_model::data::is_asset_word;
use agent_model::data::{DataUriError, NoSnapshot, SnapshotRef};
use agent_model::expr::{self, Reference};
use agent_model::job::{
    Array, ArrayError, INSTANCE_TYPE, Input, JobDraft, Output, OutputName, Priority, Resources,
};
use agent_model::{DataInput, DataOutput, DataUri, Digest, EnvSpec};

/// A job file as read: the draft, and the files the document names, which the caller reads.
#[derive(Debug, Clone, PartialEq)]
pub struct JobFile {
    /// Everything that needs no file. Its `code`, `environment` and file inputs are still to be filled in.
    pub draft: JobDraft,
    /// The code directory as written.
    pub code: Option<String>,
    /// The environment.
    pub environment: EnvironmentRef,
    /// Inputs that name a local path.
    pub inputs: Vec<InputRef>,
    /// Entries that were ignored; the job runs without them.
    pub warnings: Vec<Warning>,
}

/// An input that names a local path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputRef {
    /// The input's name.
    pub name: String,
    /// The section that it is in.
    pub key: &'static str,
    /// The path, relative to the document, or to the caller's directory if it was given.
    pub path: String,
    /// It was declared as one file.
    pub is_file: bool,
    /// The caller gave the path: the document has none, or another.
    pub is_given: bool,
    /// Where the input is in the document.
    pub place: Place,
}

/// Reads a command job, with other values for some of its inputs: `("inputs.lr", "0.1")`. A value that is replaced
/// is not checked.
pub fn command_job(text: &str, given: &[(String, String)]) -> Result<JobFile, Refused> {
    read(document(text)?, given)
}

pub use sweep::written;

/// The text as a tree; an empty one is refused.
pub(super) fn document(text: &str) -> Result<Node, Rejection> {
    let node = yaml::parse(text).map_err(Rejection::syntax)?;
    match node.value {
        Value::Null => Err(Rejection::invalid(node.place, "the job file is empty")
            .fix("write at least a `command`, for example `command: python train.py`")),
        _ => Ok(node),
    }
}

pub(super) fn read(node: Node, given: &[(String, String)]) -> Result<JobFile, Refused> {
    let (mut warnings, mut wrong) = (Vec::new(), Mistakes::default());
    let mut top = Section::open(node, "", &keys::JOB)?;
    // A job of another kind has other rules: nothing else is reported about it.
    let is_sweep = refuse_other_kinds(&mut top)?;
    let (sweep, trials) =
        if is_sweep { sweep::sweep(&mut top, &mut warnings, &mut wrong)? } else { (None, None) };
    let compute = wrong.note(read_target(&mut top, "compute")).filter(|name| !HERE.contains(&name.as_str()));
    let (code, snapshot) = wrong.note(read_code(&mut top));
    let environment =
        top.node("environment").and_then(|node| wrong.note(environment(node, &mut warnings).map(Some)));
    let (limits, limits_at) = read_limits(&mut top, &mut warnings, &mut wrong);
    let resources = read_resources(&mut top, &mut warnings, &mut wrong);
    let distribution = wrong.note(distribution(&mut top, resources.nodes, &mut warnings));
    let services = services(&mut top, resources.nodes, &mut warnings, &mut wrong);
    let mut draft = JobDraft {
        name: wrong.note(read_name(&mut top)),
        display_name: wrong.note(top.text("display_name")).unwrap_or_default(),
        description: wrong.note(top.text("description")).unwrap_or_default(),
        experiment: wrong.note(top.text("experiment_name")).unwrap_or_default(),
        code: snapshot,
        tags: wrong.note(top.texts("tags")),
        environment_variables: wrong.note(top.texts("environment_variables")),
        secrets: wrong.note(top.texts("secrets")),
        compute,
        array: wrong.note(read_array(&mut top)).or(trials),
        sweep,
        resources,
        distribution,
        services,
        limits,
        retry: read_retry(&mut top, &mut warnings, &mut wrong),
        priority: wrong.note(read_priority(&mut top, &mut warnings)),
        visible_to_all: wrong.note(top.word("visibility")) == Some("all"),
        resume_outputs: wrong.note(top.word("resume")) == Some("outputs"),
        azureml_stand_in: wrong.note(top.word("azureml_core")) == Some("stand_in"),
        success_exit_codes: wrong.note(read_codes(&mut top)),
        ..JobDraft::default()
    };
    warn_of_no_replacement(limits_at, &draft, &mut warnings);
    let before = wrong.count();
    let (inputs, absent) = read_inputs(&mut top, given, &mut draft, &mut warnings, &mut wrong);
    read_outputs(&mut top, &mut draft, &mut warnings, &mut wrong);
    // For an input that is wrong it is not known whether the command may use it.
    let known = (wrong.count() == before).then_some((inputs.as_slice(), absent.as_slice()));
    draft.command = wrong.note(read_command(top, &draft, known, &mut warnings));
    let warnings = wrong.told(warnings)?;
    let environment = environment.unwrap_or_else(|| EnvironmentRef::Spec(EnvSpec::host()));
    Ok(JobFile { draft, code, environment, inputs, warnings })
}

const KINDS: [&str; 8] =
    ["command", "sweep", "pipeline", "spark", "automl", "parallel", "finetuning", "import"];

/// Whether it is a sweep, and not a job on its own.
fn refuse_other_kinds(top: &mut Section) -> Result<bool, Rejection> {
    let fix = keys::KINDS;
    let place = top.node("type").map(|node| (node.place, node));
    let mut is_sweep = top.at_node("trial").is_some();
    if let Some((place, node)) = place {
        let text = node.text().map_err(|at| within("type", at))?.trim().to_ascii_lowercase();
        if !KINDS.contains(&text.as_str()) {
            let message = format!("`type: {text}` is not a kind of job");
            return Err(Rejection::invalid(place, message).fix("write `type: command`, or leave the key out"));
        }
        is_sweep |= text == "sweep";
        if text != "command" && text != "sweep" {
            return Err(Rejection::unsupported(place, format!("`type: {text}` is not run"), fix));
        }
    }
    if let Some(node) = top.node("jobs") {
        let message = "`jobs` makes this a pipeline job, which is not run";
        return Err(Rejection::unsupported(node.place, message, fix));
    }
    for key in ["primary_metric_name", "max_total_runs"] {
        if let Some(node) = top.node(key) {
            let message =
                format!("`{key}` makes this a HyperDrive configuration of the SDK v1, which is not read");
            return Err(Rejection::unsupported(node.place, message, keys::HYPERDRIVE));
        }
    }
    Ok(is_sweep)
}

/// The name of the machines that are to run it.
pub(super) fn read_target(top: &mut Section, key: &'static str) -> Result<Option<String>, Rejection> {
    let Some(node) = top.node(key) else { return Ok(None) };
    let target = node.text().map_err(|at| within(key, at))?.trim();
    Ok(Some(target.strip_prefix("azureml:").unwrap_or(target).to_owned()))
}

/// Targets that name no pool: where the file is, and whatever there is.
const HERE: [&str; 2] = ["local", "serverless"];

/// A directory, or the snapshot of one.
fn read_code(top: &mut Section) -> Result<(Option<String>, Option<Digest>), Rejection> {
    let Some(node) = top.node("code") else { return Ok((None, None)) };
    let path = node.text().map_err(|at| within("code", at))?;
    match scheme(path) {
        None => Ok((Some(local(path).to_owned()), None)),
        Some(SnapshotRef::SCHEME) => Ok((None, Some(read_snapshot("code", path, node.place)?))),
        Some(_) => Err(Rejection::unsupported(
            node.place,
            format!("`code: {path}` is not fetched"),
            "bring the code here and name its folder, for example `code: ./src`",
        )),
    }
}

/// A whole directory that was sent before.
pub(super) fn read_snapshot(key: &str, text: &str, place: Place) -> Result<Digest, Rejection> {
    match text.parse() {
        Ok(SnapshotRef { root, file: None }) => Ok(root),
        Ok(SnapshotRef { file: Some(name), .. }) => {
            let message = format!("`{key}` is a directory, and `{text}` the file `{name}` of one");
            Err(Rejection::invalid(place, message).fix("leave out the name at its end"))
        }
        Err(error) => Err(no_snapshot(key, &error, place)),
    }
}

fn no_snapshot(key: &str, error: &NoSnapshot, place: Place) -> Rejection {
    Rejection::invalid(place, format!("`{key}`: {error}"))
        .fix("copy it from what `agentctl show JOB --as-job` prints, or name a local path")
}

pub(super) fn read_name(top: &mut Section) -> Result<Option<agent_model::JobId>, Rejection> {
    let Some(node) = top.node("name") else { return Ok(None) };
    let text = node.text().map_err(|at| within("name", at))?;
    let refuse = |error: agent_model::ids::IdError| {
        Rejection::invalid(node.place, format!("`name`: {error}"))
            .fix("leave `name` out and set `display_name`: the job then gets a name made from it")
    };
    text.parse().map(Some).map_err(refuse)
}

fn read_array(top: &mut Section) -> Result<Option<Array>, Rejection> {
    let Some(node) = top.node("array") else { return Ok(None) };
    let text = node.text().map_err(|at| within("array", at))?;
    let refuse =
        |error: ArrayError| Rejection::invalid(node.place, format!("`array`: {error}")).fix(ArrayError::FORM);
    text.parse().map(Some).map_err(refuse)
}

fn read_resources(top: &mut Section, warnings: &mut Vec<Warning>, wrong: &mut Mistakes) -> Resources {
    let Some(mut section) = wrong.note(top.section("resources")) else { return Resources::default() };
    let nodes = wrong.note(section.parsed::<NonZeroU32>("instance_count", COUNT));
    let mut labels = wrong.note(section.texts("labels"));
    // Nodes have their provider's name for the kind of machine as a label.
    let kind = wrong.note(section.text("instance_type"));
    labels.extend(kind.filter(|kind| !kind.is_empty()).map(|kind| (INSTANCE_TYPE.to_owned(), kind)));
    let resources = Resources {
        nodes: nodes.map_or(1, NonZeroU32::get),
        gpus: wrong.note(section.parsed("gpus", "a whole number")).unwrap_or(0),
        memory: wrong.note(section.bytes("memory")).unwrap_or(0),
        cpus: wrong.note(section.parsed("cpus", "a whole number")).unwrap_or(0),
        labels,
        shm: wrong.note(section.bytes("shm_size")).unwrap_or(0),
        docker_args: wrong.note(read_docker_args(&mut section, "docker_args")),
    };
    section.finish(warnings);
    resources
}

/// One text, or several. The rules for arguments are those of the job; a broken one is reported at this place.
pub(super) fn read_docker_args(section: &mut Section, key: &'static str) -> Result<Vec<String>, Rejection> {
    let Some((texts, place)) = section.lines(key)? else { return Ok(Vec::new()) };
    let refuse = |error: ArgumentError| {
        Rejection::invalid(place, format!("`{}`: {error}", section.name(key))).fix("leave it out")
    };
    Options::parse(&texts).map_err(refuse)?;
    Ok(texts)
}

pub(super) fn read_priority(top: &mut Section, warnings: &mut Vec<Warning>) -> Result<Priority, Rejection> {
    let Some(mut section) = top.section("queue_settings")? else { return Ok(Priority::default()) };
    let word = section.word("priority")?;
    section.finish(warnings);
    Ok(word.and_then(Priority::parse).unwrap_or_default())
}

/// Literals are put into the draft; inputs that name a local path are returned, and the names of those without a value.
fn read_inputs(
    top: &mut Section,
    given: &[(String, String)],
    draft: &mut JobDraft,
    warnings: &mut Vec<Warning>,
    wrong: &mut Mistakes,
) -> (Vec<InputRef>, Vec<String>) {
    let entries = wrong.note(top.section("inputs")).map(Section::into_entries).unwrap_or_default();
    wrong.note(refuse_unknown(given, &entries));
    let (mut paths, mut absent) = (Vec::new(), Vec::new());
    for (key, node) in entries {
        let name = key.text.clone();
        let full = format!("inputs.{}", key.text);
        let given = given.iter().rev().find(|(name, _)| *name == full).map(|(_, value)| value.as_str());
        match wrong.note(read_input(key.text, node, given, warnings)) {
            ReadInput::Literal(name, text) => drop(draft.inputs.insert(name, Input::Literal(text))),
            ReadInput::Known(name, input) => drop(draft.inputs.insert(name, input)),
            ReadInput::Path(input) => paths.push(input),
            ReadInput::Absent => absent.push(name),
        }
    }
    (paths, absent)
}

/// What an input was found to be.
#[derive(Default)]
pub(super) enum ReadInput {
    Literal(String, String),
    Path(InputRef),
    /// Data that is not sent, or was sent before.
    Known(String, Input),
    /// Optional, and nothing was given.
    #[default]
    Absent,
}

pub(super) fn refuse_unknown(given: &[(String, String)], entries: &[(Key, Node)]) -> Result<(), Rejection> {
    let known: Vec<String> = entries.iter().map(|(key, _)| format!("inputs.{}", key.text)).collect();
    let Some((unknown, _)) = given.iter().find(|(name, _)| !known.contains(name)) else { return Ok(()) };
    let place = entries.first().map_or(Place { line: 1, column: 1 }, |(key, _)| key.place);
    Err(Rejection::invalid(place, format!("`{unknown}` is given a value, but names nothing of this job"))
        .fix(match known.is_empty() {
            true => "the job has no inputs; add them to its job file".to_owned(),
            false => format!("what can be set: {}", known.join(", ")),
        }))
}

pub(super) fn read_input(
    name: String,
    node: Node,
    given: Option<&str>,
    warnings: &mut Vec<Warning>,
) -> Result<ReadInput, Rejection> {
    if let Value::Scalar(text) = node.value {
        return Ok(ReadInput::Literal(name, given.map_or(text, str::to_owned)));
    }
    let place = node.place;
    let full = format!("inputs.{name}");
    let mut section = Section::open(node, &full, &keys::INPUT)?;
    let kind = section.word("type")?;
    let mode = section.word("mode")?;
    let path = section.node("path");
    let literal = section.text("value")?.or(section.text("default")?);
    let optional = section.node("optional").is_some_and(|node| node.flag().unwrap_or(false));
    section.finish(warnings);
    let mode = mode.unwrap_or("ro_mount");
    let file = |name: String, path: &str, place: Place| InputRef {
        name,
        key: "inputs",
        path: path.trim().to_owned(),
        is_file: kind == Some("uri_file"),
        is_given: given.is_some(),
        place,
    };
    if let Some(given) = given {
        let is_data = kind.map_or(path.is_some(), |kind| keys::DATA_TYPES.contains(&kind));
        return match is_data {
            true => read_path(file(name, given, place), mode),
            false => Ok(ReadInput::Literal(name, given.to_owned())),
        };
    }
    match (path, literal) {
        (Some(path), None) => {
            let text = path.text().map_err(|at| within(&format!("{full}.path"), at))?;
            read_path(file(name, text, path.place), mode)
        }
        (None, Some(text)) => Ok(ReadInput::Literal(name, text)),
        (None, None) if optional => Ok(ReadInput::Absent),
        (None, None) => Err(Rejection::invalid(place, format!("`{full}` has no value"))
            .fix("give it a `path`, or write the value itself after its name")),
        (Some(_), Some(_)) => Err(Rejection::invalid(place, format!("`{full}` has both a path and a value"))
            .fix("keep one of `path` and `value`")),
    }
}

/// A local path, which is sent, or the address of data; `direct` gives the address itself to the command.
pub(super) fn read_path(input: InputRef, mode: &str) -> Result<ReadInput, Rejection> {
    let (InputRef { name, key, path, place, .. }, is_file) = (&input, input.is_file);
    if scheme(path).is_none() {
        return Ok(ReadInput::Path(InputRef { path: local(path).to_owned(), ..input }));
    }
    if scheme(path) == Some(SnapshotRef::SCHEME) {
        let key = format!("{key}.{name}");
        return match path.parse() {
            Ok(SnapshotRef { file: None, .. }) if is_file => {
                Err(Rejection::invalid(*place, format!("`{key}` is one file, but `{path}` is a directory"))
                    .fix("write `/NAME` of the file behind it, or `type: uri_folder`"))
            }
            Ok(SnapshotRef { root, file: None }) => Ok(ReadInput::Known(input.name, Input::Folder(root))),
            Ok(SnapshotRef { root, file: Some(name) }) => {
                Ok(ReadInput::Known(input.name, Input::File { root, name }))
            }
            Err(error) => Err(no_snapshot(&key, &error, *place)),
        };
    }
    let uri = path.parse::<DataUri>().map_err(|error| {
        let message = match &error {
            DataUriError::Credentials => format!("`{key}.{name}` is not fetched from its address: {error}"),
            _ => format!("`{key}.{name}` is not fetched from `{path}`: {error}"),
        };
        Rejection::unsupported(*place, message, error.fix())
    })?;
    if mode == "direct" {
        return Ok(ReadInput::Literal(input.name, uri.to_string()));
    }
    if is_file && uri.file_name().is_none() {
        let message = format!("`{key}.{name}` is one file, but `{path}` names none");
        return Err(Rejection::invalid(*place, message)
            .fix("add the name of the file to the address, or write `type: uri_folder`"));
    }
    let is_own_copy = matches!(mode, "download" | "eval_download");
    Ok(ReadInput::Known(input.name, Input::Data(DataInput { uri, is_file, is_own_copy })))
}

/// The text before the colon of something that is not a local path.
fn scheme(path: &str) -> Option<&str> {
    let path = path.trim();
    if path.contains("${{") {
        return Some("expression");
    }
    let (scheme, rest) = path.split_once(':')?;
    let known = matches!(scheme, "azureml" | "runs" | SnapshotRef::SCHEME) || scheme.starts_with("git+");
    (known || (rest.starts_with("//") && scheme != "file")).then_some(scheme)
}

fn read_outputs(top: &mut Section, draft: &mut JobDraft, warnings: &mut Vec<Warning>, wrong: &mut Mistakes) {
    let Some(section) = wrong.note(top.section("outputs")) else { return };
    for (key, node) in section.into_entries() {
        let output = match node.value {
            Value::Null => Some(Output::Folder),
            _ => match wrong.note(read_output(&key.text, node, warnings).map(Some)) {
                Some((output, name)) => {
                    draft.output_names.extend(name.map(|name| (key.text.clone(), name)));
                    Some(output)
                }
                None => None,
            },
        };
        draft.outputs.extend(output.map(|output| (key.text, output)));
    }
}

/// The output, and the name that it gets as data.
fn read_output(
    name: &str,
    node: Node,
    warnings: &mut Vec<Warning>,
) -> Result<(Output, Option<OutputName>), Rejection> {
    let key = format!("outputs.{name}");
    let mut section = Section::open(node, &key, &keys::OUTPUT)?;
    let named = read_output_name(&key, &mut section, warnings)?;
    let is_file = section.word("type")? == Some("uri_file");
    let (mode_at, mode) = (section.at("mode"), section.word("mode")?);
    let (path_at, path) = (section.at("path"), section.text("path")?);
    section.finish(warnings);
    let Some(path) = path else { return Ok((if is_file { Output::File } else { Output::Folder }, named)) };
    let output = DataOutput::parse(&path, name, is_file).map_err(|error| {
        Rejection::unsupported(path_at, format!("`{key}` cannot be sent there: {error}"), error.fix())
    })?;
    if mode == Some("direct") {
        let message = format!(
            "`{key}.mode: direct`: the command gets a path of this machine, and what it leaves there is sent when it has ended"
        );
        warnings.push(Warning::new(mode_at, message));
    }
    Ok((Output::Data(output), named))
}

fn read_output_name(
    key: &str,
    section: &mut Section,
    warnings: &mut Vec<Warning>,
) -> Result<Option<OutputName>, Rejection> {
    let word = |section: &mut Section, part: &'static str| -> Result<Option<String>, Rejection> {
        let (at, word) = (section.at(part), section.text(part)?.filter(|word| !word.trim().is_empty()));
        match word {
            Some(word) if !is_asset_word(word.trim()) => {
                let what = format!("`{key}.{part}`: `{}` cannot be the {part} of data", word.escape_debug());
                let fix = "use at most 100 letters, digits, `_`, `-` and `.`, not starting with `.`";
                Err(Rejection::invalid(at, what).fix(fix))
            }
            word => Ok(word.map(|word| word.trim().to_owned())),
        }
    };
    let version_at = section.at("version");
    let (name, version) = (word(section, "name")?, word(section, "version")?);
    if name.is_none() && version.is_some() {
        let message = format!("`{key}.version` has no effect without a `name`");
        warnings.push(Warning::new(version_at, message));
    }
    Ok(name.map(|name| OutputName { name, version }))
}

/// The last key to be read: remaining keys are unknown, and one may be a misspelt `command`. Its optional parts are
/// decided and its references checked only if all inputs, with those that have no value, and outputs are known.
fn read_command(
    mut top: Section,
    draft: &JobDraft,
    inputs: Option<(&[InputRef], &[String])>,
    warnings: &mut Vec<Warning>,
) -> Result<String, Rejection> {
    let start = top.place();
    let command = top.node("command");
    let strangers = top.strangers(warnings);
    let slip = strangers.iter().find(|stranger| stranger.resembles == Some("command"));
    let Some(node) = command else {
        return Err(match slip {
            Some(slip) => Rejection::invalid(slip.place, format!("`{}` is not known", slip.name))
                .fix("write `command` instead"),
            None => Rejection::invalid(start, "the job has no `command`")
                .fix("add the line that starts your training, for example `command: python train.py`"),
        });
    };
    warnings.extend(strangers.into_iter().map(UnknownKey::into_warning));
    let command = node.text().map_err(|at| within("command", at))?;
    let Some((inputs, absent)) = inputs else { return Ok(command.to_owned()) };
    let absent: Vec<&str> = absent.iter().map(String::as_str).collect();
    let is_there = |reference: &Reference| match reference {
        Reference::Input(name) => Some(!absent.contains(&name.as_str())),
        Reference::Output(_) => Some(true),
        Reference::Drawn(_) => None, // each trial has values of its own
    };
    let command = expr::optional(command, is_there);
    let inputs = draft.inputs.keys().chain(inputs.iter().map(|input| &input.name)).map(String::as_str);
    check_references(&node, &command, &inputs.collect::<Vec<_>>(), &absent, draft)?;
    Ok(command)
}

fn check_references(
    node: &Node,
    command: &str,
    inputs: &[&str],
    absent: &[&str],
    draft: &JobDraft,
) -> Result<(), Rejection> {
    let references = expr::references(command)
        .map_err(|fault| Rejection::invalid(node.place, fault.what).fix(fault.fix.unwrap_or_default()))?;
    let outputs: Vec<&str> = draft.outputs.keys().map(String::as_str).collect();
    let drawn = draft.sweep.as_ref().map(|sweep| sweep.space.names().into_iter().collect::<Vec<_>>());
    for reference in &references {
        let (kind, name, known) = match reference {
            Reference::Input(name) => ("inputs", name, inputs),
            Reference::Output(name) => ("outputs", name, outputs.as_slice()),
            Reference::Drawn(name) => ("search_space", name, drawn.as_deref().unwrap_or_default()),
        };
        if known.contains(&name.as_str()) {
            continue;
        }
        if kind == "inputs" && absent.contains(&name.as_str()) {
            let message =
                format!("the command uses `${{{{inputs.{name}}}}}`, which is optional and has no value");
            return Err(Rejection::invalid(node.place, message).fix(format!(
                "give it one, or write `$[[... ${{{{inputs.{name}}}}}]]`, which goes without one"
            )));
        }
        let message = format!("the command uses `${{{{{kind}.{name}}}}}`, which the job does not define");
        return Err(Rejection::invalid(node.place, message).fix(match nearest(name, known) {
            Some(meant) => format!("did you mean `${{{{{kind}.{meant}}}}}`?"),
            None => format!("add `{name}` under `{kind}`, or correct the name in the command"),
        }));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
