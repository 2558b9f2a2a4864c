//! `schema`: the JSON Schema of a kind of job file.

use agent_jobfile::{Dialect, schema};

use crate::cli::SchemaOf;
use crate::failure::Failure;
use crate::output::Output;

/// Prints it.
pub(super) fn print(of: SchemaOf, output: &mut Output) -> Result<(), Failure> {
    output.json(&schema(match of {
        SchemaOf::Job => Dialect::Job,
        SchemaOf::Runconfig => Dialect::Runconfig,
    }))
}
