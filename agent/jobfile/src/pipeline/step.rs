//! One step: what its component, the pipeline and other steps give it, put together as the document of a job.

use std::collections::BTreeMap;

use agent_model::pipeline::StepOutput;

use super::bindings::{self, Binding, Resolved, expression};
use super::component::{Component, Port};
use super::{PipelineReader, StepFile, keys, meant};
use crate::command_job::{self, JobFile};
use crate::section::{Rejection, within};
use crate::yaml::{Entries, Key, Node, Place, Value};

/// What a step is made from.
struct MadeFrom {
    component: Option<Component>,
    /// It is a sweep, whose trials are of the component.
    is_trial: bool,
}

/// The inputs of a step while they are read.
struct StepInputs<'a> {
    path: &'a str,
    given: Vec<(String, String)>,
    bound: BTreeMap<String, StepOutput>,
    places: &'a mut BTreeMap<String, Place>,
    entries: Vec<(Key, Node)>,
}

impl StepInputs<'_> {
    /// Binds an input; its value is the expression until the other step has completed.
    fn bind(&mut self, key: &Key, place: Place, output: StepOutput, jobs: &[(Key, Node)]) -> Node {
        let from = jobs.get(output.step as usize).map(|(key, _)| key.text.as_str()).unwrap_or_default();
        let text = output.expression(from);
        self.places.insert(key.text.clone(), place);
        self.bound.insert(key.text.clone(), output);
        Node { place, value: Value::Scalar(text) }
    }
}

impl PipelineReader<'_, '_> {
    /// Reads a step; `None` where its mistakes are noted already.
    pub(super) fn step(
        &mut self,
        key: &Key,
        node: Node,
        index: u32,
        places: &mut BTreeMap<String, Place>,
    ) -> Result<Option<StepFile>, Rejection> {
        check_name(key)?;
        let (path, place) = (format!("jobs.{}", key.text), node.place);
        let mut own = node.map().map_err(|at| within(&path, at))?;
        let is_sweep = keys::refuse_other_steps(&path, &own)?;
        let after = self.read_after(&path, &mut own)?;
        let reuse = read_reuse(&path, &mut own)?;
        let (inputs, outputs) = (take_map(&path, "inputs", &mut own)?, take_map(&path, "outputs", &mut own)?);
        let Some(MadeFrom { component, is_trial }) = self.made(&path, &mut own, is_sweep)? else {
            return Ok(None);
        };
        for (key, node) in own.values_mut() {
            if key.text != "command" {
                self.fill(node)?; // a command has expressions of its own
            }
        }
        let before = self.wrong.count();
        let mut inputs =
            StepInputs { path: &path, given: Vec::new(), bound: BTreeMap::new(), places, entries: inputs };
        let read = match &component {
            Some(component) => self.inputs_of_component(component, key, &mut inputs)?,
            None => self.inputs_of_inline(&mut inputs)?,
        };
        let StepInputs { given, bound, .. } = inputs;
        let outputs = self.outputs_of(&path, index, component.as_ref(), outputs)?;
        if self.wrong.count() > before {
            return Ok(None); // without them its command would be wrong, too
        }
        let has_environment = own.get("environment").is_some();
        let mut entries = match &component {
            Some(component) if is_trial => component.as_trial(place, own),
            Some(component) => component.beneath(&path, own)?,
            None => own.rest(),
        };
        let at = |text: &str| Key { place, text: text.to_owned() };
        entries.push((at("inputs"), Node { place, value: Value::Map(read) }));
        entries.push((at("outputs"), Node { place, value: Value::Map(outputs) }));
        let Some(job) = self.job(place, entries, &given) else { return Ok(None) };
        Ok(Some(StepFile {
            name: key.text.clone(),
            job: named(job, &key.text),
            is_environment_of_component: component.is_some() && !has_environment,
            reuse: reuse
                .unwrap_or_else(|| component.as_ref().is_none_or(|component| component.is_deterministic)),
            component: component.map(|component| component.file),
            bound,
            after,
        }))
    }

    /// The component of a step, or of the trials of a sweep; `None` where its own mistakes are noted.
    fn made(&mut self, path: &str, own: &mut Entries, is_sweep: bool) -> Result<Option<MadeFrom>, Rejection> {
        let is_trial = own.get("trial").is_some_and(|node| matches!(node.value, Value::Scalar(_)));
        let Some(node) = own.take(if is_trial { "trial" } else { "component" }) else {
            return Ok(Some(MadeFrom { component: None, is_trial: false }));
        };
        if is_sweep && !is_trial {
            return Err(Rejection::invalid(
                node.place,
                format!("`{path}` is a sweep, and has a `component`"),
            )
            .fix("name the component as `trial`"));
        }
        let component = match self.component(path, node)? {
            Some(component) if is_trial => component.drawn(own)?,
            Some(component) => component,
            None => return Ok(None),
        };
        Ok(Some(MadeFrom { component: Some(component), is_trial }))
    }

    /// Reads what was put together as a job; `None` where its mistakes are noted.
    fn job(
        &mut self,
        place: Place,
        mut entries: Vec<(Key, Node)>,
        given: &[(String, String)],
    ) -> Option<JobFile> {
        if let Some((key, node)) = self.default_compute.clone()
            && !entries.iter().any(|(key, _)| key.text == "compute")
        {
            entries.push((key, node));
        }
        match command_job::read(Node { place, value: Value::Map(entries) }, given) {
            Ok(job) => {
                self.warnings.extend(job.warnings.iter().cloned());
                Some(job)
            }
            Err(refused) => {
                refused.mistakes.into_iter().for_each(|mistake| self.wrong.add(mistake));
                self.warnings.extend(refused.warnings);
                None
            }
        }
    }

    /// The steps that it comes after without reading anything of them.
    fn read_after(&mut self, path: &str, own: &mut Entries) -> Result<Vec<u32>, Rejection> {
        let Some(node) = own.take("after") else { return Ok(Vec::new()) };
        let items = match &node.value {
            Value::List(items) => items.clone(),
            _ => vec![node],
        };
        let mut after = Vec::new();
        for item in items {
            let name = item.text().map_err(|at| within(&format!("{path}.after"), at))?;
            after.push(self.index(name.trim(), item.place)?);
        }
        Ok(after)
    }

    /// The component of a step, read once; `None` where its own mistakes are noted.
    fn component(&mut self, path: &str, node: Node) -> Result<Option<Component>, Rejection> {
        let file = match &node.value {
            Value::Scalar(text) => keys::component_file(node.place, text)?,
            _ => return Component::inline(path, node, &mut self.warnings).map(Some),
        };
        if let Some(known) = self.components.get(&file) {
            return Ok(known.clone());
        }
        let text = (self.open)(&file).map_err(|fault| {
            let rejection = Rejection::invalid(node.place, fault.what.clone());
            rejection.fix(fault.fix.clone().unwrap_or_default())
        })?;
        let mut warnings = Vec::new();
        let read = Component::read(&file, &text, &mut warnings);
        self.component_warnings.extend(warnings.into_iter().map(|warning| (Some(file.clone()), warning)));
        let component = match read {
            Ok(component) => Some(component),
            Err(refused) => {
                self.others.push((file.clone(), refused));
                None
            }
        };
        self.components.insert(file, component.clone());
        Ok(component)
    }

    /// The inputs of a step that is a job of its own.
    fn inputs_of_inline(&mut self, of: &mut StepInputs<'_>) -> Result<Vec<(Key, Node)>, Rejection> {
        let mut inputs = Vec::new();
        for (key, node) in std::mem::take(&mut of.entries) {
            let place = node.place;
            let node = match self.resolve(&node, 0)? {
                Resolved::Node(node) => node,
                Resolved::Set(node, value) => {
                    of.given.push((format!("inputs.{}", key.text), value));
                    node
                }
                Resolved::Absent => bindings::absent(place),
                Resolved::Bound(output, place) => of.bind(&key, place, output, &self.jobs),
            };
            inputs.push((key, node));
        }
        Ok(inputs)
    }

    /// The inputs that a component has, with what the step gives it. All mistakes are noted.
    fn inputs_of_component(
        &mut self,
        component: &Component,
        step: &Key,
        of: &mut StepInputs<'_>,
    ) -> Result<Vec<(Key, Node)>, Rejection> {
        let mut written = std::mem::take(&mut of.entries);
        let mut inputs = Vec::new();
        for (name, port) in &component.ports {
            let at = written.iter().position(|(key, _)| key.text == *name);
            let node = match at.map(|at| written.remove(at)) {
                Some((key, node)) if node.value != Value::Null => self.input_of_port(port, key, &node, of),
                Some((key, _)) => port.usual(&format!("{}.inputs.{name}", of.path), key.place),
                None => port.usual(&format!("{}.inputs.{name}", of.path), step.place),
            };
            let node = self.wrong.note(node.map(Some));
            inputs.extend(node.map(|node| (Key { place: node.place, text: name.clone() }, node)));
        }
        let known: Vec<&str> = component.ports.iter().map(|(name, _)| name.as_str()).collect();
        for (key, _) in written {
            let message = format!("`{}.inputs.{}` is no input of {}", of.path, key.text, component.file);
            let fix = meant(&key.text, &known, "its inputs are");
            self.wrong.add(Rejection::invalid(key.place, message).fix(fix));
        }
        Ok(inputs)
    }

    fn input_of_port(
        &mut self,
        port: &Port,
        key: Key,
        node: &Node,
        of: &mut StepInputs<'_>,
    ) -> Result<Node, Rejection> {
        let (path, place) = (format!("{}.inputs.{}", of.path, key.text), node.place);
        match self.resolve(node, 0)? {
            Resolved::Node(node) => port.take(&path, node, place),
            Resolved::Set(node, value) => {
                let node = port.set(&path, &node, &value, place)?;
                of.given.push((format!("inputs.{}", key.text), value));
                Ok(node)
            }
            Resolved::Absent => port.usual(&path, place),
            Resolved::Bound(..) if !port.is_data() => {
                let message = format!("`{path}` is a value of type {}, and an output is data", port.kind);
                Err(Rejection::invalid(place, message)
                    .fix("bind it to an input of the pipeline, or write a value"))
            }
            Resolved::Bound(output, place) => Ok(of.bind(&key, place, output, &self.jobs)),
        }
    }

    /// The outputs of a step: as its component has them, as the pipeline has those that are its own, and as the step says.
    fn outputs_of(
        &mut self,
        path: &str,
        index: u32,
        component: Option<&Component>,
        written: Vec<(Key, Node)>,
    ) -> Result<Vec<(Key, Node)>, Rejection> {
        let mut outputs = component.map(|component| component.outputs.clone()).unwrap_or_default();
        let known: Vec<String> = outputs.iter().map(|(key, _)| key.text.clone()).collect();
        for (key, node) in written {
            if let Some(component) = component
                && !known.contains(&key.text)
            {
                let known: Vec<&str> = known.iter().map(String::as_str).collect();
                let message = format!("`{path}.outputs.{}` is no output of {}", key.text, component.file);
                let fix = meant(&key.text, &known, "its outputs are");
                self.wrong.add(Rejection::invalid(key.place, message).fix(fix));
                continue;
            }
            let node = self.output_of(index, &key, node)?;
            let at = outputs.iter().position(|(known, _)| known.text == key.text);
            let node = match at.map(|at| outputs.remove(at).1) {
                Some(base) => bindings::over(base, node),
                None => node,
            };
            outputs.push((key, node));
        }
        Ok(outputs)
    }

    /// An output as a step writes it. One that is the pipeline's has what the pipeline says of it, too.
    fn output_of(&mut self, index: u32, key: &Key, node: Node) -> Result<Node, Rejection> {
        let place = node.place;
        let (text, own) = match &node.value {
            Value::Scalar(text) => (Some(text.clone()), None),
            Value::Map(entries) => {
                let path = entries.iter().find(|(key, _)| key.text == "path");
                let text = path.and_then(|(_, path)| path.text().ok()).map(str::to_owned);
                (text, Some(node.clone()))
            }
            _ => (None, Some(node.clone())),
        };
        let Some(binding) = text.as_deref().and_then(expression) else {
            return match own {
                Some(own) => Ok(own),
                None => Err(Rejection::invalid(place, format!("`outputs.{}` is to be a mapping", key.text))
                    .fix("write `${{parent.outputs.NAME}}`, or a mapping such as `{type: uri_folder}`")),
            };
        };
        let name = match binding {
            Ok(Binding::Output(name)) => name,
            // `${{name}}` and the like, which mean something in an address.
            _ if own.is_some() => return Ok(node),
            _ => {
                return Err(Rejection::invalid(place, format!("`outputs.{}` names no output", key.text))
                    .fix("write `${{parent.outputs.NAME}}`"));
            }
        };
        let known: Vec<&str> = self.outputs.keys().map(String::as_str).collect();
        let Some(of_pipeline) = self.outputs.get(&name).cloned() else {
            return Err(Rejection::invalid(place, format!("the pipeline has no output `{name}`"))
                .fix(meant(&name, &known, "its outputs are")));
        };
        let from = StepOutput { step: index, output: key.text.clone() };
        if let Some((_, before)) = self.writers.insert(name.clone(), (from, place)) {
            return Err(Rejection::invalid(
                place,
                format!("two steps write the output `{name}`: one at {before}"),
            )
            .fix("give the pipeline another output for one of them"));
        }
        let own = own.map_or(Node { place, value: Value::Null }, |own| bindings::without(own, "path"));
        Ok(bindings::over(of_pipeline, own))
    }
}

/// A step is shown by its name, unless it says otherwise.
fn named(mut job: JobFile, step: &str) -> JobFile {
    job.draft.name = None;
    job.warnings.clear(); // they are told with those of the pipeline
    if job.draft.display_name.is_empty() {
        step.clone_into(&mut job.draft.display_name);
    }
    job
}

/// The entries of a mapping in a step.
fn take_map(path: &str, key: &str, own: &mut Entries) -> Result<Vec<(Key, Node)>, Rejection> {
    match own.take(key) {
        Some(node) => Ok(node.map().map_err(|at| within(&format!("{path}.{key}"), at))?.rest()),
        None => Ok(Vec::new()),
    }
}

/// The names that the cloud allows.
fn check_name(key: &Key) -> Result<(), Rejection> {
    let text = key.text.as_str();
    let begins = text.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    if begins && text.len() <= 60 && text.bytes().all(plain) {
        return Ok(());
    }
    Err(Rejection::invalid(key.place, format!("`{text}` cannot be the name of a step"))
        .fix("use lower-case letters, digits and `_`, at most 60, and no digit first"))
}

/// What a step says of itself: whether it need not run where the same ran before.
fn read_reuse(path: &str, own: &mut Entries) -> Result<Option<bool>, Rejection> {
    let Some(node) = own.take("reuse") else { return Ok(None) };
    let word = node.text().map_err(|at| within(&format!("{path}.reuse"), at))?.trim().to_ascii_lowercase();
    match word.as_str() {
        "true" => Ok(Some(true)),
        "false" => Ok(Some(false)),
        other => Err(Rejection::invalid(node.place, format!("`{path}.reuse` is `{other}`"))
            .fix("write `true` or `false`")),
    }
}
