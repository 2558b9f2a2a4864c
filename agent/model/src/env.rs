//! The software that a job asks for.
//!
//! The name under which an environment is cached is its *content*: what it installs, as `agent-jobfile` reads it, is
//! the part of the key that comes from the job; the node adds its platform and interpreter.

use serde::{Deserialize, Serialize};

use crate::Digest;
use crate::node::Capability;

/// The software stack of a job.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EnvSpec {
    /// An interpreter that is already on the node.
    Host {
        /// Name or path of the interpreter.
        python: String,
        /// Packages that must be installed there already; they are checked and never changed.
        #[serde(default)]
        requirements: Vec<String>,
    },
    /// A list of pip requirements on top of a node's interpreter.
    Pip {
        /// Name or path of the interpreter.
        python: String,
        /// The lines of the requirements file, without comments and blanks.
        requirements: Vec<String>,
    },
    /// A conda environment.
    Conda {
        /// The name of the environment file, for messages.
        #[serde(default)]
        file: String,
        /// The text of the environment file, see the module of the reader.
        document: String,
        /// The text of a lock, see the module of the reader: exactly these packages instead of what the file asks for.
        #[serde(default)]
        lock: Option<String>,
    },
    /// A container image, with a conda environment inside if there is a document.
    Image {
        /// The image reference.
        image: String,
        /// The text of the environment file.
        conda: Option<String>,
    },
    /// An image built from a context directory.
    Build {
        /// The context, as a snapshot.
        context: Digest,
        /// The Dockerfile, relative to the context.
        dockerfile: String,
    },
    /// A registered environment: `azureml:NAME:VERSION`, a curated name or a registry path.
    Named {
        /// The reference as written.
        reference: String,
    },
}

impl EnvSpec {
    /// What a machine must have to make it, beside an interpreter. What a curated name stands for, only a machine knows.
    pub fn requires(&self) -> Vec<Capability> {
        match self {
            EnvSpec::Conda { .. } => vec![Capability::Conda],
            EnvSpec::Image { conda: Some(_), .. } => vec![Capability::Containers, Capability::Conda],
            EnvSpec::Image { .. } => vec![Capability::Containers],
            _ => Vec::new(),
        }
    }

    /// The interpreter when a job names none.
    pub const DEFAULT_PYTHON: &'static str = "python3";

    /// The host's own interpreter, unchanged.
    pub fn host() -> EnvSpec {
        EnvSpec::Host { python: Self::DEFAULT_PYTHON.to_owned(), requirements: Vec::new() }
    }

    /// What users call this form.
    pub fn kind(&self) -> &'static str {
        match self {
            EnvSpec::Host { .. } => "host",
            EnvSpec::Pip { .. } => "pip",
            EnvSpec::Conda { .. } => "conda",
            EnvSpec::Image { .. } => "image",
            EnvSpec::Build { .. } => "image build",
            EnvSpec::Named { .. } => "named",
        }
    }

    /// What a job that waits for it is told: its kind, or the name under which the node defines it.
    pub fn called(&self) -> String {
        match self {
            EnvSpec::Named { reference } => crate::curated::name(reference).unwrap_or(reference.clone()),
            other => other.kind().to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_what_a_waiting_job_is_told() {
        let named = |reference: &str| EnvSpec::Named { reference: reference.into() }.called();
        assert_eq!([named("azureml:AzureML-a@latest"), EnvSpec::host().called()], ["a", "host"]);
    }
}
