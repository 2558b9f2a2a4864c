//! The pipeline job of the Azure ML CLI v2.
//!
//! Owns what a step is made from: its own keys, the component that it names, the inputs of the pipeline, and the outputs
//! of other steps. All of that is put together as the document of a command job, so that a step is read by the rules of
//! every job. Everything is checked here, before anything is sent; a mistake names the file that it is in.

mod bindings;
mod component;
mod keys;
mod step;

use std::collections::BTreeMap;

use agent_model::Fault;
use agent_model::job::JobDraft;
use agent_model::pipeline::{ARTIFACTS, MAX_STEPS, StepOutput, in_order};

use crate::command_job::{self, JobFile};
use crate::section::{Mistakes, Refused, Rejection, Section, Warning, nearest, within};
use crate::yaml::{self, Key, Node, Place};
use bindings::PipelineInput;
use component::{Component, Port};

/// A pipeline as read.
#[derive(Debug)]
pub struct PipelineFile {
    /// What is said of the pipeline as a whole.
    pub draft: JobDraft,
    /// Its steps, in the order of the file.
    pub steps: Vec<StepFile>,
    /// Which output of which step an output of the pipeline is.
    pub outputs: BTreeMap<String, StepOutput>,
    /// How its steps go on.
    pub settings: PipelineSettings,
    /// Entries that were ignored, each with its file; `None` is the pipeline's.
    pub warnings: Vec<(Option<String>, Warning)>,
}

/// How the steps of a pipeline go on.
#[derive(Debug, Clone, Copy)]
pub struct PipelineSettings {
    /// After a failure the steps that do not need the failed one go on.
    pub continue_on_failure: bool,
    /// Every step is run, also where the same ran before.
    pub force_rerun: bool,
}

impl Default for PipelineSettings {
    fn default() -> PipelineSettings {
        PipelineSettings { continue_on_failure: true, force_rerun: false }
    }
}

/// A step as read.
#[derive(Debug)]
pub struct StepFile {
    /// Its name in the pipeline.
    pub name: String,
    /// The job that it is. What its inputs name is relative to the pipeline.
    pub job: JobFile,
    /// The component that it is made from, relative to the pipeline. What its code is, is relative to that.
    pub component: Option<String>,
    /// Its environment is the component's, and relative to that.
    pub is_environment_of_component: bool,
    /// It need not run where the same ran before.
    pub reuse: bool,
    /// Its inputs that are outputs of other steps.
    pub bound: BTreeMap<String, StepOutput>,
    /// Steps that come before it without giving it anything.
    pub after: Vec<u32>,
}

/// What is wrong in one file; `file` is that of a component, or `None` for the pipeline.
#[derive(Debug)]
pub struct Misread {
    /// The file, relative to the pipeline.
    pub file: Option<String>,
    /// The mistakes.
    pub refused: Refused,
}

/// Reads the file of a component, which is relative to the pipeline.
pub type OpenFile<'a> = dyn FnMut(&str) -> Result<String, Fault> + 'a;

/// Whether a document is a pipeline: it says so, or has steps.
pub fn is_pipeline(text: &str) -> bool {
    let Ok(Ok(entries)) = yaml::parse(text).map(Node::map) else { return false };
    let says = |key: &str, word: &str| {
        entries.get(key).and_then(|node| node.text().ok()).is_some_and(|text| text.trim().contains(word))
    };
    says("type", "pipeline") || says("$schema", "pipelineJob") || entries.get("jobs").is_some()
}

/// Reads a pipeline, with other values for some of its inputs: `("inputs.lr", "0.1")`.
pub fn pipeline(
    text: &str,
    given: &[(String, String)],
    open: &mut OpenFile<'_>,
) -> Result<PipelineFile, Vec<Misread>> {
    let mistaken = |rejection: Rejection| vec![Misread { file: None, refused: rejection.into() }];
    let node = command_job::document(text).map_err(mistaken)?;
    let mut top = Section::open(node, "", &keys::PIPELINE).map_err(mistaken)?;
    let mut reader = PipelineReader::new(given, open);
    let (draft, settings) = reader.head(&mut top).map_err(mistaken)?;
    let steps = reader.steps();
    reader.check_outputs_have_writers();
    reader.check_bound(&steps);
    reader.check_order(&steps);
    let PipelineReader { wrong, mut warnings, others, writers, .. } = reader;
    top.close(&mut warnings, &mut Mistakes::default());
    let told = match (wrong.told(warnings), others.is_empty()) {
        (Ok(warnings), true) => Ok(warnings),
        (own, _) => {
            let own = own.err().map(|refused| Misread { file: None, refused });
            let others = others.into_iter().map(|(file, refused)| Misread { file: Some(file), refused });
            Err(own.into_iter().chain(others).collect::<Vec<_>>())
        }
    };
    let mut warnings: Vec<_> = told?.into_iter().map(|warning| (None, warning)).collect();
    warnings.extend(reader.component_warnings);
    let outputs = writers.into_iter().map(|(output, (from, _))| (output, from)).collect();
    let steps = steps.into_iter().filter_map(|read| read.step).collect();
    Ok(PipelineFile { draft, steps, outputs, settings, warnings })
}

/// A step while the pipeline is read; without `step` it is wrong.
struct ReadStep {
    step: Option<StepFile>,
    /// Where each bound input is.
    places: BTreeMap<String, Place>,
    at: Place,
}

/// What is known of a pipeline while it is read.
struct PipelineReader<'a, 'b> {
    given: &'a [(String, String)],
    open: &'a mut OpenFile<'b>,
    inputs: BTreeMap<String, PipelineInput>,
    outputs: BTreeMap<String, Node>,
    /// The steps as they are written.
    jobs: Vec<(Key, Node)>,
    default_compute: Option<(Key, Node)>,
    /// Which step writes an output of the pipeline, and where it says so.
    writers: BTreeMap<String, (StepOutput, Place)>,
    components: BTreeMap<String, Option<Component>>,
    wrong: Mistakes,
    warnings: Vec<Warning>,
    component_warnings: Vec<(Option<String>, Warning)>,
    /// Mistakes in components.
    others: Vec<(String, Refused)>,
}

impl<'a, 'b> PipelineReader<'a, 'b> {
    fn new(given: &'a [(String, String)], open: &'a mut OpenFile<'b>) -> PipelineReader<'a, 'b> {
        PipelineReader {
            given,
            open,
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            jobs: Vec::new(),
            default_compute: None,
            writers: BTreeMap::new(),
            components: BTreeMap::new(),
            wrong: Mistakes::default(),
            warnings: Vec::new(),
            component_warnings: Vec::new(),
            others: Vec::new(),
        }
    }

    /// Reads what is said of the pipeline as a whole, and takes its steps out.
    fn head(&mut self, top: &mut Section) -> Result<(JobDraft, PipelineSettings), Rejection> {
        top.skip(&["type"]);
        if let Some(node) = top.node("component") {
            return Err(Rejection::unsupported(
                node.place,
                "`component` of a pipeline is not read",
                "name the file of that pipeline itself: agentctl run FILE",
            ));
        }
        let Some(jobs) = top.node("jobs") else {
            return Err(Rejection::invalid(top.place(), "the pipeline has no `jobs`")
                .fix("write its steps under it: `jobs: {train: {command: python train.py}}`"));
        };
        let place = jobs.place;
        self.jobs = jobs.map().map_err(|at| within("jobs", at))?.rest();
        if self.jobs.is_empty() || self.jobs.len() > MAX_STEPS {
            return Err(Rejection::invalid(place, format!("the pipeline has {} steps", self.jobs.len()))
                .fix(format!("write between 1 and {MAX_STEPS} of them")));
        }
        let settings = self.settings(top);
        self.read_inputs(top);
        let outputs = self.wrong.note(top.section("outputs"));
        for (key, node) in outputs.map(Section::into_entries).unwrap_or_default() {
            self.outputs.insert(key.text, node);
        }
        let wrong = &mut self.wrong;
        let draft = JobDraft {
            name: wrong.note(command_job::read_name(top)),
            display_name: wrong.note(top.text("display_name")).unwrap_or_default(),
            description: wrong.note(top.text("description")).unwrap_or_default(),
            experiment: wrong.note(top.text("experiment_name")).unwrap_or_default(),
            tags: wrong.note(top.texts("tags")),
            priority: wrong.note(command_job::read_priority(top, &mut self.warnings)),
            visible_to_all: wrong.note(top.word("visibility")) == Some("all"),
            ..JobDraft::default()
        };
        Ok((draft, settings))
    }

    /// How steps go on; keeps the default target.
    fn settings(&mut self, top: &mut Section) -> PipelineSettings {
        let key = |place| Key { place, text: "compute".to_owned() };
        self.default_compute = top.node("compute").map(|node| (key(node.place), node));
        let Some(mut settings) = self.wrong.note(top.section("settings")) else {
            return PipelineSettings::default();
        };
        if let Some(node) = settings.node("default_compute") {
            self.default_compute = Some((key(node.place), node));
        }
        let continues = self.wrong.note(settings.flag("continue_on_step_failure"));
        let forced = self.wrong.note(settings.flag("force_rerun"));
        settings.finish(&mut self.warnings);
        let usual = PipelineSettings::default();
        PipelineSettings {
            continue_on_failure: continues.unwrap_or(usual.continue_on_failure),
            force_rerun: forced.unwrap_or(usual.force_rerun),
        }
    }

    fn read_inputs(&mut self, top: &mut Section) {
        let entries = self.wrong.note(top.section("inputs")).map(Section::into_entries).unwrap_or_default();
        self.wrong.note(command_job::refuse_unknown(self.given, &entries));
        for (key, node) in entries {
            let full = format!("inputs.{}", key.text);
            let set = self.given.iter().rev().find(|(name, _)| *name == full).map(|(_, value)| value.clone());
            let input = PipelineInput::read(&key.text, node, set, &mut self.warnings);
            let input = self.wrong.note(input.map(Some));
            self.inputs.extend(input.map(|input| (key.text, input)));
        }
    }

    fn steps(&mut self) -> Vec<ReadStep> {
        let jobs = self.jobs.clone();
        let read = jobs.into_iter().zip(0..).map(|((key, node), index)| {
            let mut places = BTreeMap::new();
            let at = key.place;
            let step = self.step(&key, node, index, &mut places);
            let step = self.wrong.note(step);
            ReadStep { step, places, at }
        });
        read.collect()
    }

    /// The index of a step.
    fn index(&self, name: &str, place: Place) -> Result<u32, Rejection> {
        let found = (0..).zip(&self.jobs).find(|(_, (key, _))| key.text == name).map(|(index, _)| index);
        let known: Vec<&str> = self.jobs.iter().map(|(key, _)| key.text.as_str()).collect();
        found.ok_or_else(|| {
            Rejection::invalid(place, format!("there is no step `{name}`")).fix(meant(
                name,
                &known,
                "the steps are",
            ))
        })
    }

    fn check_outputs_have_writers(&mut self) {
        for (name, node) in &self.outputs {
            if !self.writers.contains_key(name) {
                let message = format!("no step writes the output `{name}` of the pipeline");
                let fix = format!("let one say so: `outputs: {{model: '${{{{parent.outputs.{name}}}}}'}}`");
                self.wrong.add(Rejection::invalid(node.place, message).fix(fix));
            }
        }
    }

    /// Whether each output that a step reads is one of the other step.
    fn check_bound(&mut self, steps: &[ReadStep]) {
        for read in steps {
            let Some(step) = &read.step else { continue };
            for (input, StepOutput { step: from, output }) in &step.bound {
                let place = read.places.get(input).copied().unwrap_or(read.at);
                let Some(from) = steps.get(*from as usize).and_then(|read| read.step.as_ref()) else {
                    continue;
                };
                let known: Vec<&str> = from.job.draft.outputs.keys().map(String::as_str).collect();
                if !known.contains(&output.as_str()) && output != ARTIFACTS {
                    let message = format!("the step `{}` has no output `{output}`", from.name);
                    let fix = meant(output, &known, "its outputs are");
                    self.wrong.add(Rejection::invalid(place, message).fix(fix));
                }
            }
        }
    }

    /// Whether no steps wait for each other.
    fn check_order(&mut self, steps: &[ReadStep]) {
        let needs = |step: usize| {
            let read = steps.get(step).and_then(|read| read.step.as_ref()).into_iter();
            read.flat_map(|step| {
                step.bound.values().map(|bound| bound.step).chain(step.after.iter().copied())
            })
        };
        if let Err(circle) = in_order(steps.len(), |step| needs(step as usize).collect()) {
            let of_circle = circle.iter().filter_map(|step| self.jobs.get(*step as usize));
            let names: Vec<&str> = of_circle.map(|(key, _)| key.text.as_str()).collect();
            let first = circle.first().and_then(|step| steps.get(*step as usize));
            let at = first.map_or_else(Place::default, |read| read.at);
            let message = format!("steps wait for each other: {}", names.join(", "));
            self.wrong.add(Rejection::invalid(at, message).fix("let one of them read something else"));
        }
    }
}

/// `did you mean …?`, or what there is.
fn meant(written: &str, known: &[&str], there: &str) -> String {
    match nearest(written, known) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None if known.is_empty() => "there is none".to_owned(),
        None => format!("{there} {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests;
