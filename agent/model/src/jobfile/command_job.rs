//! The Azure ML CLI v2 command job.

use crate::EnvSpec;
use crate::fault::Fault;
use crate::job::JobDraft;
use crate::yaml::Place;

/// A command job as read: the draft, and the files the document names, which the caller brings.
#[derive(Debug, Clone, PartialEq)]
pub struct CommandJob {
    /// Everything that needs no file. Its `code`, `environment` and file inputs are still to be filled in.
    pub draft: JobDraft,
    /// The code directory as written, relative to the document.
    pub code: Option<String>,
    /// The environment.
    pub environment: EnvironmentRef,
    /// Inputs that name a local path.
    pub inputs: Vec<InputRef>,
    /// What was read over; the job runs without it.
    pub warnings: Vec<Warning>,
}

/// The environment of a command job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnvironmentRef {
    /// Complete as written.
    Spec(EnvSpec),
    /// A requirements file.
    Requirements {
        /// The interpreter.
        python: String,
        /// The file, relative to the document.
        path: String,
    },
    /// A conda environment file.
    CondaFile {
        /// The image it goes into, if any.
        image: Option<String>,
        /// The file, relative to the document.
        path: String,
    },
    /// An image build context.
    BuildContext {
        /// The directory, relative to the document.
        path: String,
        /// The Dockerfile, relative to the directory.
        dockerfile: String,
    },
    /// An environment document of its own, `file:./env.yml`.
    Document {
        /// The file, relative to the document.
        path: String,
    },
}

/// An input that names a local path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputRef {
    /// The input's name.
    pub name: String,
    /// The path, relative to the document.
    pub path: String,
    /// It was declared as one file.
    pub is_file: bool,
}

/// Something in a document that has no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Where it stands.
    pub place: Place,
    /// What it is and that it is read over.
    pub message: String,
}

/// Reads a command job. The fault names the line and the column.
pub fn command_job(text: &str) -> Result<CommandJob, Fault> {
    let _ = text;
    unreadable()
}

fn unreadable() -> Result<CommandJob, Fault> {
    Err(Fault::new(crate::Code::JobFile, "not written yet"))
}
