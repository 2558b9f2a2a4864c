//! The arguments of the commands that write, check and describe job files.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// The directory; it is made if it is not there.
    #[arg(default_value = ".")]
    pub(crate) directory: PathBuf,
    /// A run configuration, `.azureml/local.runconfig`, instead of a job.yml.
    #[arg(long)]
    pub(crate) runconfig: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Job files, run configurations, or directories with one.
    #[arg(default_value = ".")]
    pub(crate) targets: Vec<PathBuf>,
    /// Take warnings for mistakes.
    #[arg(long)]
    pub(crate) strict: bool,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum SchemaOf {
    /// job.yml, a command job.
    Job,
    /// A run configuration.
    Runconfig,
}
