//! What a job leaves under a name, and where it is sent when its job has ended.
//!
//! Owns which addresses can be written to, and what `${{…}}` means in one: the name of the output and that of the
//! default store are put in when the job file is read, the name of the job only on its node, so that the same job made
//! again is sent to a place of its own.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{DataUri, DataUriError};
use crate::JobId;

/// The expression for the name of the job, as it is kept.
const NAME: &str = "${{name}}";

/// The name that the cloud gives to the default store of a workspace.
const DEFAULT_STORE: &str = "workspaceblobstore";

/// A named output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    /// The command is given the path of an empty directory.
    Folder,
    /// The command is given the path of a file to write.
    File,
    /// One of these, and the node sends what is there to a data store when the command has ended.
    Data(DataOutput),
}

impl Output {
    /// It is one file; otherwise a folder.
    pub fn is_file(&self) -> bool {
        match self {
            Output::Folder => false,
            Output::File => true,
            Output::Data(output) => output.is_file,
        }
    }

    /// Where it is sent, if it is.
    pub fn data(&self) -> Option<&DataOutput> {
        match self {
            Output::Folder | Output::File => None,
            Output::Data(output) => Some(output),
        }
    }
}

/// An output that its node sends to a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataOutput {
    /// Where to; [`DataOutput::uri_of`] puts the name of the job in.
    pub uri: DataUri,
    /// It is one file, which gets exactly this address; otherwise a folder, and its files go below the address.
    pub is_file: bool,
}

/// Why a text is no address that an output can be sent to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum DataOutputError {
    #[error(transparent)]
    Address(#[from] DataUriError),
    #[error("it is no address of a data store")]
    Local,
    #[error("a web server takes no files")]
    Web,
    #[error("a name stands for data that is there already")]
    Name,
    #[error("`${{{{{0}}}}}` means nothing there")]
    Expression(String),
    #[error("it names no file")]
    NoFile,
}

impl DataOutputError {
    /// What to do about it.
    pub fn fix(&self) -> &'static str {
        match self {
            DataOutputError::Address(error) => error.fix(),
            DataOutputError::Local | DataOutputError::Web | DataOutputError::Name => {
                "write `azureml://datastores/NAME/paths/PATH`, or leave `path` out: `agentctl download` fetches every output"
            }
            DataOutputError::Expression(_) => {
                "only `${{name}}`, `${{output_name}}` and `${{default_datastore}}` may stand in the `path` of an output"
            }
            DataOutputError::NoFile => "add the name of the file to the address, or write `type: uri_folder`",
        }
    }
}

impl DataOutput {
    /// Reads the address of the output with this name.
    pub fn parse(text: &str, output: &str, is_file: bool) -> Result<DataOutput, DataOutputError> {
        let text = filled_in(text.trim(), output)?;
        if !text.contains(':') {
            return Err(DataOutputError::Local);
        }
        let is_folder = text.ends_with('/');
        let uri: DataUri = text.parse()?;
        match &uri {
            DataUri::Asset(_) => Err(DataOutputError::Name),
            DataUri::Url(url) if url.starts_with("http:") || url.starts_with("https:") => {
                Err(DataOutputError::Web)
            }
            _ if is_file && (is_folder || uri.file_name().is_none()) => Err(DataOutputError::NoFile),
            DataUri::Url(_) | DataUri::Stored { .. } => Ok(DataOutput { uri, is_file }),
        }
    }

    /// Where the output of this job goes.
    pub fn uri_of(&self, job: &JobId) -> DataUri {
        let put = |text: &str| text.replace(NAME, &job.to_string());
        match &self.uri {
            DataUri::Url(url) => DataUri::Url(put(url)),
            DataUri::Stored { store, path } => DataUri::Stored { store: put(store), path: put(path) },
            DataUri::Asset(name) => DataUri::Asset(name.clone()),
        }
    }
}

impl fmt::Display for DataOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.uri.fmt(f)
    }
}

/// The text with what is known of its expressions put in, and the name of the job in its one form.
fn filled_in(text: &str, output: &str) -> Result<String, DataOutputError> {
    let (mut done, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("${{") {
        let (name, after) =
            after.split_once("}}").ok_or(DataUriError::Incomplete("where an expression ends: `}}`"))?;
        done.push_str(before);
        done.push_str(match name.trim() {
            "name" => NAME,
            "output_name" => output,
            "default_datastore" => DEFAULT_STORE,
            other => return Err(DataOutputError::Expression(other.to_owned())),
        });
        rest = after;
    }
    Ok(done + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(text: &str, is_file: bool) -> Result<String, DataOutputError> {
        let job = "train-7".parse().unwrap();
        Ok(DataOutput::parse(text, "model", is_file)?.uri_of(&job).to_string())
    }

    #[test]
    fn test_expressions_are_put_in_when_they_are_known() {
        let text = "azureml://datastores/${{default_datastore}}/paths/runs/${{ name }}/${{output_name}}";
        let output = DataOutput::parse(text, "model", false).unwrap();
        let kept = "azureml://datastores/workspaceblobstore/paths/runs/${{name}}/model";
        assert_eq!(output.to_string(), kept);
        assert_eq!(DataOutput::parse(kept, "other", false).unwrap(), output, "it is read as it is written");
        let written = serde_json::to_string(&output).unwrap();
        assert_eq!(serde_json::from_str::<DataOutput>(&written).unwrap(), output);
        let of_job = output.uri_of(&"train-7".parse().unwrap());
        assert_eq!(of_job.to_string(), "azureml://datastores/workspaceblobstore/paths/runs/train-7/model");
    }

    #[test]
    fn test_every_store_is_an_address_for_outputs_and_nothing_else_is() {
        for text in ["s3://bucket/a", "gs://bucket", "abfss://data@acc.dfs.core.windows.net/a"] {
            assert_eq!(sent(text, false), Ok(text.to_owned()));
        }
        let name = || "azureml://datastores/share/paths/model.pkl".to_owned();
        assert_eq!(sent(&name(), true), Ok(name()));
        for (text, is_file, what) in [
            ("./out", false, "no address of a data store"),
            ("https://h.example/a", false, "a web server"),
            ("azureml:iris:1", false, "a name stands for data"),
            ("azureml://datastores/a/paths/${{inputs.x}}", false, "`${{inputs.x}}` means nothing"),
            ("azureml://datastores/a/paths/${{name", false, "where an expression ends"),
            ("azureml://datastores/a/paths/../b", false, "`..`"),
            ("azureml://datastores/a", true, "names no file"),
            ("azureml://datastores/a/paths/b/", true, "names no file"),
            ("s3://key:secret@bucket/a", false, "credentials"),
        ] {
            let error = sent(text, is_file).unwrap_err();
            assert!(error.to_string().contains(what), "{text}: {error}");
            assert!(!error.fix().is_empty());
        }
    }
}
