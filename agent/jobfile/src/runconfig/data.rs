//! The data of a run configuration: `data`, and the older `dataReferences`. Both become inputs of the job.

use std::collections::{BTreeMap, BTreeSet};

use crate::command_job::{InputRef, ReadInput, read_path};
use crate::section::{Mistakes, Rejection, Section, Warning};
use crate::yaml::{Key, Node, Place};
use agent_model::job::Input;

/// What the script reads.
#[derive(Debug, Default)]
pub(super) struct Data {
    pub(super) inputs: Vec<InputRef>,
    /// Those of which nothing is sent.
    pub(super) ready: BTreeMap<String, Input>,
    /// Variables, each with the input whose path it holds.
    pub(super) variables: Vec<(String, String)>,
    /// All that the file has under `data`, also what cannot be used.
    named: BTreeSet<String>,
}

/// Reads both sections.
pub(super) fn data(top: &mut Section, warnings: &mut Vec<Warning>, wrong: &mut Mistakes) -> Data {
    let mut data = Data::default();
    for (kind, read) in [("data", read_data as Read), ("dataReferences", read_reference)] {
        let entries = wrong.note(top.section(kind)).map(Section::into_entries).unwrap_or_default();
        for (key, node) in entries {
            data.named.insert(key.text.clone());
            wrong.note(read(key, node, &mut data, warnings));
        }
    }
    data
}

type Read = fn(Key, Node, &mut Data, &mut Vec<Warning>) -> Result<(), Rejection>;

fn read_data(key: Key, node: Node, data: &mut Data, warnings: &mut Vec<Warning>) -> Result<(), Rejection> {
    let name = key.text;
    let mut section = Section::open(node, &format!("data.{name}"), &super::keys::DATA)?;
    let place = section.place();
    let at = section.at("mechanism");
    let mechanism = section.word("mechanism")?;
    if let Some(word @ ("upload" | "hdfs")) = mechanism {
        return Err(not_written(at, &section.name("mechanism"), word));
    }
    let variable = section.text("environmentVariableName")?.filter(|variable| !variable.is_empty());
    let location = section.section("dataLocation")?;
    section.finish(warnings);
    let Some(mut location) = location else {
        return Err(Rejection::invalid(place, format!("`data.{name}` has no `dataLocation`"))
            .fix("name where the data is, for example `dataLocation: {uri: {path: data/train.csv}}`"));
    };
    let (path, is_file) = read_location(&name, &mut location, warnings)?;
    location.finish(warnings);
    let input = InputRef { name: name.clone(), key: "data", path, is_file, is_given: false, place };
    data.add(input, mechanism.unwrap_or("mount"))?;
    data.export(variable, name.clone(), at)?;
    data.export_reference(name);
    Ok(())
}

/// A path, and whether it is one file.
fn read_location(
    entry: &str,
    location: &mut Section,
    warnings: &mut Vec<Warning>,
) -> Result<(String, bool), Rejection> {
    let place = location.place();
    if let Some(mut uri) = location.section("uri")? {
        let (path, is_file) = (uri.text("path")?, uri.flag("isFile")?.unwrap_or(false));
        uri.finish(warnings);
        return match path {
            Some(path) => Ok((path, is_file)),
            None => Err(nowhere(place, &location.name("uri"), "`path`")),
        };
    }
    if let Some(mut path) = location.section("dataPath")? {
        let (store, relative) = (path.text("datastoreName")?, path.text("relativePath")?);
        path.finish(warnings);
        return match store {
            Some(store) => Ok((in_store(&store, relative.as_deref()), false)),
            None => Err(nowhere(place, &location.name("dataPath"), "`datastoreName`")),
        };
    }
    if let Some(mut set) = location.section("dataset")? {
        let (name, version, id) = (set.text("name")?, set.text("version")?, set.text("id")?);
        set.finish(warnings);
        let registered = |name: &str| match &version {
            Some(version) => format!("azureml:{name}:{version}"),
            None => format!("azureml:{name}@latest"),
        };
        return match (name, id) {
            (Some(name), _) => Ok((registered(&name), false)),
            (None, Some(_)) => {
                // Files of the cloud's own command line have nothing else. Whose name the data gets here is a choice.
                let at = location.name("dataset");
                let message = format!(
                    "`{at}` has an id, which only the cloud knows: the data registered here as `{entry}` is used"
                );
                warnings.push(Warning::new(place, message));
                Ok((registered(entry), false))
            }
            (None, None) => Err(nowhere(place, &location.name("dataset"), "`name`")),
        };
    }
    Err(nowhere(place, "dataLocation", "`uri: {path: …}`"))
}

fn read_reference(
    key: Key,
    node: Node,
    data: &mut Data,
    warnings: &mut Vec<Warning>,
) -> Result<(), Rejection> {
    let name = key.text;
    let mut section = Section::open(node, &format!("dataReferences.{name}"), &super::keys::REFERENCE)?;
    let place = section.place();
    let at = section.at("mode");
    let mode = section.word("mode")?;
    if let Some(word @ "upload") = mode {
        return Err(not_written(at, &section.name("mode"), word));
    }
    let (store, path) = (section.text("dataStoreName")?, section.text("pathOnDataStore")?);
    section.finish(warnings);
    let Some(store) = store else {
        return Err(nowhere(place, &format!("dataReferences.{name}"), "`dataStoreName`"));
    };
    let path = in_store(&store, path.as_deref());
    let input =
        InputRef { name: name.clone(), key: "dataReferences", path, is_file: false, is_given: false, place };
    data.add(input, mode.unwrap_or("mount"))?;
    data.export_reference(name);
    Ok(())
}

impl Data {
    fn add(&mut self, input: InputRef, mode: &str) -> Result<(), Rejection> {
        if self.knows(&input.name) {
            let message = format!("`{}.{}` is the name of other data already", input.key, input.name);
            return Err(Rejection::invalid(input.place, message).fix("give it another name"));
        }
        match read_path(input, mode)? {
            ReadInput::Literal(name, text) => drop(self.ready.insert(name, Input::Literal(text))),
            ReadInput::Known(name, input) => drop(self.ready.insert(name, input)),
            ReadInput::Path(input) => self.inputs.push(input),
            ReadInput::Absent => {}
        }
        Ok(())
    }

    /// Whether the file has data of this name; what is wrong with it is told where it stands.
    pub(super) fn names(&self, name: &str) -> bool {
        self.named.contains(name)
    }

    /// Whether there is data of this name that can be used.
    fn knows(&self, name: &str) -> bool {
        self.ready.contains_key(name) || self.inputs.iter().any(|input| input.name == name)
    }

    fn export(&mut self, variable: Option<String>, name: String, place: Place) -> Result<(), Rejection> {
        match variable {
            Some(variable) if !is_variable(&variable) => {
                let message = format!("`{variable}` cannot be the name of an environment variable");
                Err(Rejection::invalid(place, message).fix("use letters, digits and `_`"))
            }
            variable => {
                self.variables.extend(variable.map(|variable| (variable, name)));
                Ok(())
            }
        }
    }

    /// The variable that scripts know without being told.
    fn export_reference(&mut self, name: String) {
        let variable = format!("AZUREML_DATAREFERENCE_{name}");
        if is_variable(&variable) {
            self.variables.push((variable, name));
        }
    }
}

/// Whether a shell takes it as the name of a variable.
pub(super) fn is_variable(text: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphabetic() || c == '_';
    text.starts_with(letter) && text.chars().all(|c| letter(c) || c.is_ascii_digit())
}

fn in_store(store: &str, path: Option<&str>) -> String {
    format!("azureml://datastores/{store}/paths/{}", path.unwrap_or_default().trim_start_matches('/'))
}

fn nowhere(place: Place, key: &str, lacks: &str) -> Rejection {
    Rejection::invalid(place, format!("`{key}` does not say where the data is")).fix(format!("add {lacks}"))
}

fn not_written(place: Place, key: &str, word: &str) -> Rejection {
    Rejection::unsupported(
        place,
        format!("`{key}: {word}` is not done"),
        "write to `./outputs`, which is kept; fetch it with `agentctl download`",
    )
}
