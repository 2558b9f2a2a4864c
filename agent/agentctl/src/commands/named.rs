//! What came of the names that outputs were to get as data.

use std::fmt;

use agent_proto::v1;
use serde::Serialize;

/// What came of the name of an output.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct NamedView {
    pub(crate) output: String,
    pub(crate) name: String,
    /// Empty if it got none.
    pub(crate) version: String,
    /// Why it got no name.
    pub(crate) why: String,
}

impl From<v1::NamedOutput> for NamedView {
    fn from(wire: v1::NamedOutput) -> NamedView {
        let v1::NamedOutput { output, name, version, why } = wire;
        NamedView { output, name, version, why }
    }
}

/// `model is azureml:iris-model:3`
impl fmt::Display for NamedView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NamedView { output, name, version, why } = self;
        match version.is_empty() {
            false => write!(f, "{output} is azureml:{name}:{version}"),
            true => write!(f, "{output} is not named {name}: {why}"),
        }
    }
}
