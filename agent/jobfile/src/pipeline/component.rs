//! A command component: the file that a step names, its parameters and ports, and the values that they take.

use super::bindings::{absent, is_data, kind_of, over};
use super::keys;
use crate::command_job;
use crate::section::{Mistakes, Refused, Rejection, Section, Warning, within};
use crate::yaml::{Entries, Key, Node, Place, Value};
use agent_model::expr::{self, Reference};

/// A component as read.
#[derive(Debug, Clone)]
pub(super) struct Component {
    /// Its file, as the pipeline names it; for messages, if it is written in the step.
    pub(super) file: String,
    /// What a step takes of it.
    entries: Vec<(Key, Node)>,
    /// What it reads, in the order of the file.
    pub(super) ports: Vec<(String, Port)>,
    /// What it leaves.
    pub(super) outputs: Vec<(Key, Node)>,
    /// The same inputs give the same outputs.
    pub(super) is_deterministic: bool,
}

/// A parameter, or an input that is data.
#[derive(Debug, Clone)]
pub(super) struct Port {
    /// Its type, as written.
    pub(super) kind: String,
    optional: bool,
    default: Option<Node>,
    mode: Option<(Key, Node)>,
    least: Option<f64>,
    most: Option<f64>,
    choices: Vec<String>,
}

impl Component {
    /// Reads the file of one; what is wrong in it is told of it alone.
    pub(super) fn read(file: &str, text: &str, warnings: &mut Vec<Warning>) -> Result<Component, Refused> {
        let node = command_job::document(text)?;
        let place = node.place;
        let component = Component::of(file, "", node, warnings)?;
        component.check(place)?;
        Ok(component)
    }

    /// One that is written in its step.
    pub(super) fn inline(
        path: &str,
        node: Node,
        warnings: &mut Vec<Warning>,
    ) -> Result<Component, Rejection> {
        let path = format!("{path}.component");
        Component::of(&path, &path, node, warnings)
    }

    fn of(file: &str, path: &str, node: Node, warnings: &mut Vec<Warning>) -> Result<Component, Rejection> {
        let mut top = Section::open(node, path, &keys::COMPONENT)?;
        if let Some(node) = top.node("type") {
            let kind = node.text().map_err(|at| within("type", at))?;
            keys::refuse_other_components(node.place, kind)?;
        }
        let mut entries: Vec<(Key, Node)> = Vec::new();
        for key in keys::TAKEN {
            if let Some(node) = top.node(key) {
                entries.push((Key { place: node.place, text: key.to_owned() }, node));
            }
        }
        top.skip(&["display_name", "description"]);
        let inputs = top.section("inputs")?.map(Section::into_entries).unwrap_or_default();
        let ports = inputs.into_iter().map(|(key, node)| {
            let name = format!("inputs.{}", key.text);
            Ok((key.text, Port::read(&name, node)?))
        });
        let ports = ports.collect::<Result<_, Rejection>>()?;
        let outputs = top.section("outputs")?.map(Section::into_entries).unwrap_or_default();
        let is_deterministic = top.flag("is_deterministic")?.unwrap_or(true);
        let mut wrong = Mistakes::default();
        top.close(warnings, &mut wrong);
        wrong.told(Vec::new()).map_err(first)?;
        Ok(Component { file: file.to_owned(), entries, ports, outputs, is_deterministic })
    }

    /// Reads it as a job that is given something for every input.
    fn check(&self, place: Place) -> Result<(), Refused> {
        let at = |text: &str| Key { place, text: text.to_owned() };
        let inputs = self.ports.iter().map(|(name, port)| {
            let given = match &port.default {
                Some(node) => node.clone(),
                None if port.optional => absent(place),
                None => Node { place, value: Value::Scalar(String::new()) },
            };
            (at(name), given)
        });
        let mut entries = self.entries.clone();
        entries.push((at("inputs"), Node { place, value: Value::Map(inputs.collect()) }));
        entries.push((at("outputs"), Node { place, value: Value::Map(self.outputs.clone()) }));
        command_job::read(Node { place, value: Value::Map(entries) }, &[]).map(drop)
    }

    /// The component as the trial of a sweep: what is in its search space is drawn, and no input any more.
    pub(super) fn drawn(mut self, sweep: &Entries) -> Result<Component, Rejection> {
        let space = match sweep.get("search_space").map(|node| &node.value) {
            Some(Value::Map(entries)) => entries.iter().map(|(key, _)| key.text.as_str()).collect(),
            _ => Vec::new(),
        };
        self.ports.retain(|(name, _)| !space.contains(&name.as_str()));
        if let Some((_, node)) = self.entries.iter_mut().find(|(key, _)| key.text == "command") {
            let command = node.text().map_err(|at| within("command", at))?;
            let drawn = expr::substitute(command, |reference| match reference {
                Reference::Input(name) if space.contains(&name.as_str()) => {
                    Reference::Drawn(name.clone()).to_string()
                }
                other => other.to_string(),
            });
            // A command that is no template was refused when the component was read.
            node.value = Value::Scalar(drawn.unwrap_or_else(|_| command.to_owned()));
        }
        Ok(self)
    }

    /// The entries of a sweep, with the component as its trial.
    pub(super) fn as_trial(&self, place: Place, sweep: Entries) -> Vec<(Key, Node)> {
        let of_trial = self.entries.iter().filter(|(key, _)| keys::TRIED.contains(&key.text.as_str()));
        let trial = Node { place, value: Value::Map(of_trial.cloned().collect()) };
        let mut entries = sweep.rest();
        entries.push((Key { place, text: "trial".to_owned() }, trial));
        entries
    }

    /// Its entries with those of a step over them.
    pub(super) fn beneath(&self, path: &str, step: Entries) -> Result<Vec<(Key, Node)>, Rejection> {
        let mut entries = self.entries.clone();
        for (key, node) in step.rest() {
            if matches!(key.text.as_str(), "command" | "code") {
                let message = format!("`{path}.{}` stands beside a component, which has its own", key.text);
                return Err(Rejection::invalid(key.place, message).fix("leave one of them out"));
            }
            // An environment is one or the other.
            let is_joined = matches!(key.text.as_str(), "resources" | "environment_variables" | "limits");
            let at = entries.iter().position(|(known, _)| known.text == key.text);
            match at {
                Some(at) if is_joined => entries[at].1 = over(entries[at].1.clone(), node),
                Some(at) => entries[at] = (key, node),
                None => entries.push((key, node)),
            }
        }
        Ok(entries)
    }
}

/// The first of several mistakes.
fn first(refused: Refused) -> Rejection {
    let none = || Rejection::invalid(Place::default(), "the component was refused");
    refused.mistakes.into_iter().next().unwrap_or_else(none)
}

impl Port {
    /// Reads one as it is declared.
    pub(super) fn read(path: &str, node: Node) -> Result<Port, Rejection> {
        if let Value::Scalar(_) = node.value {
            let place = node.place;
            return Err(Rejection::invalid(place, format!("`{path}` is to be a mapping"))
                .fix("write its type: `{type: number, default: 0.1}`, or `{type: uri_folder}`"));
        }
        let mut section = match node.value {
            Value::Null => return Ok(Port::of("uri_folder")),
            _ => Section::open(node, path, &keys::PORT)?,
        };
        let number = |section: &mut Section, key| section.parsed::<f64>(key, "a number");
        let choices = match section.node("enum") {
            None => Vec::new(),
            Some(node) => {
                let texts =
                    node.list().and_then(|all| all.iter().map(|one| one.text().map(str::to_owned)).collect());
                texts.map_err(|at| within(&format!("{path}.enum"), at))?
            }
        };
        let kind = section
            .text("type")?
            .map_or_else(|| "uri_folder".to_owned(), |kind| kind.trim().to_ascii_lowercase());
        let mode =
            section.node("mode").map(|node| (Key { place: node.place, text: "mode".to_owned() }, node));
        Ok(Port {
            optional: section.flag("optional")?.unwrap_or(false),
            default: section.node("default"),
            mode,
            least: number(&mut section, "min")?,
            most: number(&mut section, "max")?,
            choices,
            kind,
        })
    }

    fn of(kind: &str) -> Port {
        Port {
            kind: kind.to_owned(),
            optional: false,
            default: None,
            mode: None,
            least: None,
            most: None,
            choices: Vec::new(),
        }
    }

    /// It takes files.
    pub(super) fn is_data(&self) -> bool {
        is_data(&self.kind)
    }

    /// What it is where a step gives it nothing.
    pub(super) fn usual(&self, path: &str, place: Place) -> Result<Node, Rejection> {
        match &self.default {
            Some(node) => Ok(Node { place, ..node.clone() }),
            None if self.optional => Ok(absent(place)),
            None => Err(Rejection::invalid(
                place,
                format!("`{path}` has no value, and the component needs one of type {}", self.kind),
            )
            .fix("give it under `inputs` of the step")),
        }
    }

    /// What a step gives it.
    pub(super) fn take(&self, path: &str, node: Node, place: Place) -> Result<Node, Rejection> {
        let literal = match &node.value {
            Value::Scalar(text) => Some(text.clone()),
            Value::Map(entries) => {
                let value = entries.iter().find(|(key, _)| matches!(key.text.as_str(), "value" | "default"));
                value.and_then(|(_, node)| node.text().ok()).map(str::to_owned)
            }
            _ => None,
        };
        match (literal, self.is_data()) {
            (Some(text), false) => {
                self.check(path, &text, place)?;
                Ok(Node { place, value: Value::Scalar(text) })
            }
            (None, true) => Ok(self.as_data(node)),
            (Some(text), true) => Err(Rejection::invalid(
                place,
                format!("`{path}` is data of type {}, and `{text}` is a value", self.kind),
            )
            .fix(format!(
                "write `{{type: {}, path: {text}}}`, or bind it to an input that is data",
                self.kind
            ))),
            (None, false) => Err(Rejection::invalid(
                place,
                format!("`{path}` is a value of type {}, and is given data", self.kind),
            )
            .fix("write the value itself, or bind it to an input that is a value")),
        }
    }

    /// The same where the command line gives the value.
    pub(super) fn set(&self, path: &str, node: &Node, value: &str, place: Place) -> Result<Node, Rejection> {
        let is_data = kind_of(node).is_some_and(is_data)
            || matches!(&node.value, Value::Map(entries) if entries.iter().any(|(key, _)| key.text == "path"));
        let stand_in = match is_data {
            true => node.clone(),
            false => Node { place, value: Value::Scalar(value.to_owned()) },
        };
        self.take(path, stand_in, place)
    }

    /// Data, of the type and in the mode of the port where the step says none.
    fn as_data(&self, node: Node) -> Node {
        let place = node.place;
        let kind = if self.kind == "path" { "uri_folder" } else { &self.kind };
        let of_port = [("type", kind)].map(|(key, text)| {
            (Key { place, text: key.to_owned() }, Node { place, value: Value::Scalar(text.to_owned()) })
        });
        let base = Value::Map(of_port.into_iter().chain(self.mode.clone()).collect());
        over(Node { place, value: base }, node)
    }

    /// Whether a value is one that it takes.
    pub(super) fn check(&self, path: &str, text: &str, place: Place) -> Result<(), Rejection> {
        let wrong = |what: String| Err(Rejection::invalid(place, format!("`{path}`: {what}")));
        let number = text.trim().parse::<f64>().ok().filter(|number| number.is_finite());
        let is_such = match self.kind.as_str() {
            "integer" => text.trim().parse::<i64>().is_ok(),
            "number" => number.is_some(),
            "boolean" => matches!(text.trim().to_ascii_lowercase().as_str(), "true" | "false"),
            _ => true,
        };
        if !is_such {
            let article = if self.kind == "integer" { "an" } else { "a" };
            return wrong(format!("`{text}` is not {article} {}", self.kind))
                .map_err(|fault| fault.fix("write such a value"));
        }
        if let Some(least) = self.least.filter(|least| number.is_some_and(|number| number < *least)) {
            return wrong(format!("{text} is less than {least}"))
                .map_err(|fault| fault.fix(format!("write at least {least}")));
        }
        if let Some(most) = self.most.filter(|most| number.is_some_and(|number| number > *most)) {
            return wrong(format!("{text} is more than {most}"))
                .map_err(|fault| fault.fix(format!("write at most {most}")));
        }
        if !self.choices.is_empty() && !self.choices.iter().any(|choice| choice == text) {
            return wrong(format!("`{text}` is none of {}", self.choices.join(", ")))
                .map_err(|fault| fault.fix("write one of them"));
        }
        Ok(())
    }
}
