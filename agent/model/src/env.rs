//! What software a job asks for.
//!
//! The name under which an environment is cached is its *content*: [`EnvSpec::normalized`] is the part of
//! the key that comes from the job; the node adds its platform and interpreter.

use serde::{Deserialize, Serialize};

use crate::Digest;

/// The software stack of a job.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EnvSpec {
    /// An interpreter that is already on the node.
    Host {
        /// Name or path of the interpreter.
        python: String,
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
        /// The text of the environment file.
        document: String,
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
    /// The interpreter when a job names none.
    pub const DEFAULT_PYTHON: &'static str = "python3";

    /// The host's own interpreter, unchanged.
    pub fn host() -> EnvSpec {
        EnvSpec::Host { python: Self::DEFAULT_PYTHON.to_owned() }
    }

    /// A text that is equal for two specifications that mean the same environment.
    ///
    /// Requirement lines keep their order where it matters to pip (options first, then packages sorted).
    pub fn normalized(&self) -> String {
        match self {
            EnvSpec::Pip { python, requirements } => {
                let (mut options, mut packages): (Vec<_>, Vec<_>) =
                    requirements.iter().map(|line| line.trim()).partition(|line| line.starts_with('-'));
                options.dedup();
                packages.sort_unstable();
                packages.dedup();
                format!("pip\n{python}\n{}\n{}", options.join("\n"), packages.join("\n"))
            }
            other => serde_json::to_string(other).unwrap_or_default(), // strings and enums always serialise
        }
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pip(lines: &[&str]) -> String {
        let requirements = lines.iter().map(|l| (*l).to_owned()).collect();
        EnvSpec::Pip { python: "python3".into(), requirements }.normalized()
    }

    #[test]
    fn test_order_of_packages_does_not_matter_but_options_do() {
        assert_eq!(pip(&["numpy", "scipy==1.2"]), pip(&["scipy==1.2", "numpy", "numpy"]));
        assert_ne!(pip(&["numpy"]), pip(&["numpy==2"]));
        assert_ne!(pip(&["--pre", "numpy"]), pip(&["numpy"]));
        assert_ne!(pip(&["-i a", "-f b"]), pip(&["-f b", "-i a"]));
    }
}
