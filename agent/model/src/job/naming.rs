//! Names that outputs get as data when their job has completed.
//!
//! Owns which names a job may want. Invariant: of the outputs of a job, and of the tasks of an array, no two want the
//! same version, because only the first of them could get it.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::JobDraft;
use crate::data::{AssetRef, Which, is_asset_word};
use crate::fault::{Code, Fault};

/// The name that an output gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputName {
    /// The name.
    pub name: String,
    /// Its version; the next number when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

impl OutputName {
    /// The version that it wants to be, if it names one.
    pub fn reference(&self) -> Option<AssetRef> {
        let which = Which::Version(self.version.clone()?);
        Some(AssetRef { name: self.name.clone(), which })
    }
}

impl JobDraft {
    pub(super) fn check_output_names(&self) -> Result<(), Fault> {
        let mut wanted = BTreeSet::new();
        for (output, OutputName { name, version }) in &self.output_names {
            let key = format!("outputs.{output}");
            let wrong = |what: String, fix: &str| Err(Fault::new(Code::JobInvalid, what).fix(fix));
            if !self.outputs.contains_key(output) {
                return wrong(
                    format!("`{key}` has a name, and the job has no such output"),
                    "define the output",
                );
            }
            if let Some(word) =
                [Some(name), version.as_ref()].into_iter().flatten().find(|word| !is_asset_word(word))
            {
                return wrong(
                    format!("`{key}`: `{}` cannot be the name or the version of data", word.escape_debug()),
                    "use at most 100 letters, digits, `_`, `-` and `.`, not starting with `.`",
                );
            }
            let Some(version) = version else { continue };
            if self.array.is_some() {
                return wrong(
                    format!("`{key}.version`: each task of the array would have to be version `{version}`"),
                    "leave out the version: each task gets the next number",
                );
            }
            if !wanted.insert((name, version)) {
                return wrong(
                    format!("two outputs are to be `azureml:{name}:{version}`"),
                    "give them different names or versions, or leave out the version",
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Output;

    #[test]
    fn test_only_names_that_can_all_be_given_are_taken() {
        let name = |name: &str, version: Option<&str>| OutputName {
            name: name.to_owned(),
            version: version.map(str::to_owned),
        };
        let draft = |names: &[(&str, OutputName)], array: Option<&str>| JobDraft {
            command: "true".into(),
            outputs: ["a", "b"].map(|output| (output.to_owned(), Output::Folder)).into(),
            output_names: names.iter().map(|(output, name)| ((*output).to_owned(), name.clone())).collect(),
            array: array.map(|array| array.parse().unwrap()),
            ..JobDraft::default()
        };
        let refused = |names: &[(&str, OutputName)], array| {
            draft(names, array).validate().err().map(|fault| fault.what).unwrap_or_default()
        };
        let twice = [("a", name("m", Some("1"))), ("b", name("m", Some("1")))];
        assert!(refused(&twice, None).contains("two outputs are to be `azureml:m:1`"));
        assert!(refused(&[("c", name("m", None))], None).contains("no such output"));
        assert!(refused(&[("a", name("../m", None))], None).contains("cannot be the name"));
        assert!(refused(&[("a", name("m", Some("a b")))], None).contains("cannot be the name"));
        assert!(refused(&[("a", name("m", Some("1")))], Some("0-3")).contains("each task"));
        for good in [
            [("a", name("m", None)), ("b", name("m", None))],
            [("a", name("m", Some("1"))), ("b", name("m", Some("2")))],
        ] {
            assert_eq!(refused(&good, None), "");
        }
        assert_eq!(refused(&[("a", name("m", None))], Some("0-3")), "");
    }
}
