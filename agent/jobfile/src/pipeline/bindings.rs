//! What the values of a pipeline's inputs are, and what the expressions in its steps stand for.

use agent_model::pipeline::StepOutput;

use super::{PipelineReader, meant};
use crate::command_job::{self, ReadInput};
use crate::section::{Rejection, Warning, within};
use crate::yaml::{Key, Node, Place, Value};

/// How far a value may be handed on from step to step.
const FAR: usize = 50;

/// What an expression in a step names.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Binding {
    /// `${{parent.inputs.NAME}}`
    Input(String),
    /// `${{parent.outputs.NAME}}`
    Output(String),
    /// `${{parent.jobs.STEP.outputs.NAME}}`
    StepOutput(String, String),
    /// `${{parent.jobs.STEP.inputs.NAME}}`
    StepInput(String, String),
}

/// What a text that is one expression names; `Err` with the expression if that is nothing of a pipeline.
pub(super) fn expression(text: &str) -> Option<Result<Binding, String>> {
    let inner = text.trim().strip_prefix("${{")?.strip_suffix("}}")?;
    if inner.contains("}}") {
        return None;
    }
    let inner = inner.trim();
    let named = |rest: &str| Some(rest.to_owned()).filter(|name| !name.is_empty() && !name.contains(' '));
    let of_step = |rest: &str| {
        let (step, rest) = rest.split_once('.')?;
        let (kind, name) = rest.split_once('.')?;
        match kind {
            "outputs" => Some(Binding::StepOutput(step.to_owned(), named(name)?)),
            "inputs" => Some(Binding::StepInput(step.to_owned(), named(name)?)),
            _ => None,
        }
    };
    let binding = inner.strip_prefix("parent.").and_then(|rest| match rest.split_once('.')? {
        ("inputs", name) => named(name).map(Binding::Input),
        ("outputs", name) => named(name).map(Binding::Output),
        ("jobs", rest) => of_step(rest),
        _ => None,
    });
    Some(binding.ok_or_else(|| inner.to_owned()))
}

/// An input of a pipeline.
#[derive(Debug, Clone)]
pub(super) struct PipelineInput {
    node: Node,
    /// The command line gives it this value.
    set: Option<String>,
    is_absent: bool,
}

impl PipelineInput {
    /// Reads and checks one.
    pub(super) fn read(
        name: &str,
        node: Node,
        set: Option<String>,
        warnings: &mut Vec<Warning>,
    ) -> Result<PipelineInput, Rejection> {
        let read = command_job::read_input(name.to_owned(), node.clone(), set.as_deref(), warnings)?;
        let is_absent = matches!(read, ReadInput::Absent);
        if let (Value::Map(_), ReadInput::Literal(_, text)) = (&node.value, &read) {
            let port = super::Port::read(&format!("inputs.{name}"), node.clone())?;
            port.check(&format!("inputs.{name}"), text, node.place)?;
        }
        Ok(PipelineInput { node, set, is_absent })
    }

    /// Its value, if it is no data.
    fn text(&self) -> Option<&str> {
        let literal = |key: &str| match &self.node.value {
            Value::Map(entries) => entries.iter().find(|(known, _)| known.text == key)?.1.text().ok(),
            _ => None,
        };
        let own = self.node.text().ok().or_else(|| literal("value")).or_else(|| literal("default"));
        self.set.as_deref().or(own)
    }
}

/// What an input of a step is given.
pub(super) enum Resolved {
    /// As it is written here, or in the inputs of the pipeline.
    Node(Node),
    /// The input of the pipeline that is so has this value from the command line.
    Set(Node, String),
    /// It is optional, and nothing was given.
    Absent,
    /// An output of another step, and where it is named.
    Bound(StepOutput, Place),
}

/// An input that is there and has no value.
pub(super) fn absent(place: Place) -> Node {
    let entry = |key: &str, text: &str| {
        (Key { place, text: key.to_owned() }, Node { place, value: Value::Scalar(text.to_owned()) })
    };
    Node { place, value: Value::Map(vec![entry("type", "string"), entry("optional", "true")]) }
}

/// A mapping with the entries of another put over its own; anything else is replaced, except by nothing.
pub(super) fn over(base: Node, other: Node) -> Node {
    match (base, other) {
        (base, Node { value: Value::Null, .. }) => base,
        (Node { value: Value::Map(mut entries), .. }, Node { place, value: Value::Map(others) }) => {
            entries.retain(|(key, _)| !others.iter().any(|(other, _)| other.text == key.text));
            entries.extend(others);
            Node { place, value: Value::Map(entries) }
        }
        (_, other) => other,
    }
}

/// A mapping without one of its keys.
pub(super) fn without(mut node: Node, key: &str) -> Node {
    if let Value::Map(entries) = &mut node.value {
        entries.retain(|(known, _)| known.text != key);
    }
    node
}

/// The `type` of a mapping.
pub(super) fn kind_of(node: &Node) -> Option<&str> {
    let Value::Map(entries) = &node.value else { return None };
    entries.iter().find(|(key, _)| key.text == "type").and_then(|(_, kind)| kind.text().ok())
}

impl PipelineReader<'_, '_> {
    /// What an input of a step is given; `far` steps have handed it on.
    pub(super) fn resolve(&self, node: &Node, far: usize) -> Result<Resolved, Rejection> {
        let (place, text, own) = match &node.value {
            Value::Scalar(text) => (node.place, text.as_str(), None),
            Value::Map(entries) => match entries.iter().find(|(key, _)| key.text == "path") {
                Some((_, path)) => {
                    let text = path.text().map_err(|at| within("path", at))?;
                    (path.place, text, Some(without(node.clone(), "path")))
                }
                None => return Ok(Resolved::Node(node.clone())),
            },
            _ => return Ok(Resolved::Node(node.clone())),
        };
        let binding = match expression(text) {
            Some(Ok(binding)) => binding,
            Some(Err(inner)) => {
                return Err(Rejection::invalid(
                    place,
                    format!("`${{{{{inner}}}}}` names nothing that a step can read"),
                )
                .fix("write `${{parent.inputs.NAME}}` or `${{parent.jobs.STEP.outputs.NAME}}`"));
            }
            None => {
                let mut node = node.clone();
                self.fill(&mut node)?;
                return Ok(Resolved::Node(node));
            }
        };
        match binding {
            Binding::Input(name) => {
                let input = self.input(&name, place)?;
                let base = Node { place, value: input.node.value.clone() };
                let node = match own {
                    Some(own) => over(base, own),
                    None => base,
                };
                Ok(match &input.set {
                    Some(value) => Resolved::Set(node, value.clone()),
                    None if input.is_absent => Resolved::Absent,
                    None => Resolved::Node(node),
                })
            }
            Binding::StepOutput(step, output) => {
                Ok(Resolved::Bound(StepOutput { step: self.index(&step, place)?, output }, place))
            }
            Binding::StepInput(step, input) => self.resolve_input_of(&step, &input, place, far),
            Binding::Output(name) => Err(Rejection::invalid(
                place,
                format!("the output `{name}` of the pipeline is read as an input"),
            )
            .fix("read it from the step that writes it: `${{parent.jobs.STEP.outputs.NAME}}`")),
        }
    }

    /// What another step was given.
    fn resolve_input_of(
        &self,
        step: &str,
        input: &str,
        place: Place,
        far: usize,
    ) -> Result<Resolved, Rejection> {
        let (_, of) = &self.jobs[self.index(step, place)? as usize];
        let entry = |node: &Node, key: &str| match &node.value {
            Value::Map(entries) => {
                entries.iter().find(|(known, _)| known.text == key).map(|(_, node)| node.clone())
            }
            _ => None,
        };
        let given = entry(of, "inputs").and_then(|inputs| entry(&inputs, input));
        let Some(given) = given.filter(|_| far < FAR) else {
            return Err(Rejection::invalid(
                place,
                format!("the step `{step}` is not given an input `{input}`"),
            )
            .fix("read what it reads itself, or an output of it"));
        };
        self.resolve(&Node { place, ..given }, far + 1)
    }

    fn input(&self, name: &str, place: Place) -> Result<&PipelineInput, Rejection> {
        self.inputs.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.inputs.keys().map(String::as_str).collect();
            Rejection::invalid(place, format!("the pipeline has no input `{name}`")).fix(meant(
                name,
                &known,
                "its inputs are",
            ))
        })
    }

    /// Puts the values of the pipeline's inputs into the texts of a node.
    pub(super) fn fill(&self, node: &mut Node) -> Result<(), Rejection> {
        let place = node.place;
        match &mut node.value {
            Value::Null => Ok(()),
            Value::List(items) => items.iter_mut().try_for_each(|item| self.fill(item)),
            Value::Map(entries) => entries.iter_mut().try_for_each(|(_, node)| self.fill(node)),
            Value::Scalar(text) => {
                *text = self.filled(text, place)?;
                Ok(())
            }
        }
    }

    fn filled(&self, text: &str, place: Place) -> Result<String, Rejection> {
        let (mut whole, mut rest) = (String::new(), text);
        while let Some(start) = rest.find("${{") {
            let Some(length) = rest[start..].find("}}").map(|end| end + 2) else { break };
            let written = &rest[start..start + length];
            whole.push_str(&rest[..start]);
            match expression(written) {
                Some(Ok(Binding::Input(name))) => {
                    let input = self.input(&name, place)?;
                    let value = input.text().filter(|_| !input.is_absent).ok_or_else(|| {
                        Rejection::invalid(
                            place,
                            format!("the input `{name}` is no value that a text can hold"),
                        )
                        .fix("give it to an input of the step, and use that in the command")
                    })?;
                    whole.push_str(value);
                }
                _ => whole.push_str(written),
            }
            rest = &rest[start + length..];
        }
        Ok(whole + rest)
    }
}

/// Whether a type is one of files.
pub(super) fn is_data(kind: &str) -> bool {
    crate::command_job::keys::DATA_TYPES.contains(&kind) || kind == "path"
}
