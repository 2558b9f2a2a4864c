//! Inputs and outputs of a job.

use std::collections::{BTreeMap, HashMap};

use agent_model::{DataInput, DataOutput, job};

use super::WireError;
use crate::v1;

impl From<job::Input> for v1::Input {
    fn from(input: job::Input) -> v1::Input {
        use v1::input::Kind;
        let kind = match input {
            job::Input::Literal(text) => Kind::Literal(text),
            job::Input::Folder(root) => Kind::Folder(root.into()),
            job::Input::File { root, name } => Kind::File(v1::FileInput { root: root.into(), name }),
            job::Input::Data(DataInput { uri, is_file, is_own_copy }) => {
                Kind::Data(v1::DataInput { uri: uri.into(), is_file, is_own_copy })
            }
        };
        v1::Input { kind: Some(kind) }
    }
}

impl TryFrom<v1::Input> for job::Input {
    type Error = WireError;
    fn try_from(wire: v1::Input) -> Result<job::Input, WireError> {
        use v1::input::Kind;
        Ok(match wire.kind.ok_or(WireError::Missing("input.kind"))? {
            Kind::Literal(text) => job::Input::Literal(text),
            Kind::Folder(root) => job::Input::Folder(root.parse()?),
            Kind::File(file) => job::Input::File { root: file.root.parse()?, name: file.name },
            Kind::Data(data) => job::Input::Data(DataInput {
                uri: data
                    .uri
                    .parse()
                    .map_err(|_| WireError::Value { field: "input.data.uri", value: data.uri })?,
                is_file: data.is_file,
                is_own_copy: data.is_own_copy,
            }),
        })
    }
}

/// The outputs of a job, each with the name that it gets as data.
pub(super) fn outputs_to_wire(
    outputs: BTreeMap<String, job::Output>,
    names: &BTreeMap<String, job::OutputName>,
) -> HashMap<String, v1::Output> {
    let to_wire = |(key, output): (String, job::Output)| {
        let uri = output.data().map(|data| data.uri.to_string()).unwrap_or_default();
        let named = names.get(&key).cloned();
        let (name, version) = named.map(|named| (named.name, named.version)).unwrap_or_default();
        let version = version.unwrap_or_default();
        (key, v1::Output { is_file: output.is_file(), uri, name, version })
    };
    outputs.into_iter().map(to_wire).collect()
}

/// The names that outputs get as data.
pub(super) fn output_names(outputs: &HashMap<String, v1::Output>) -> BTreeMap<String, job::OutputName> {
    let named = outputs.iter().filter(|(_, output)| !output.name.is_empty());
    let of_output = |output: &v1::Output| job::OutputName {
        name: output.name.clone(),
        version: Some(output.version.clone()).filter(|version| !version.is_empty()),
    };
    named.map(|(key, output)| (key.clone(), of_output(output))).collect()
}

impl TryFrom<v1::Output> for job::Output {
    type Error = WireError;
    fn try_from(v1::Output { is_file, uri, .. }: v1::Output) -> Result<job::Output, WireError> {
        Ok(match (uri.is_empty(), is_file) {
            (true, false) => job::Output::Folder,
            (true, true) => job::Output::File,
            (false, _) => {
                let uri =
                    uri.parse().map_err(|_| WireError::Value { field: "output.uri", value: uri.clone() })?;
                job::Output::Data(DataOutput { uri, is_file })
            }
        })
    }
}
