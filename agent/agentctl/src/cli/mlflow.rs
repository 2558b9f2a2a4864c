//! The arguments of `mlflow`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum MlflowVerb {
    /// Write what jobs recorded into a directory that MLflow reads; again, to bring it up to date.
    #[command(
        after_help = "Every value with its step and time, parameters, tags, runs beside that of the job, data, \
                            models and files. Of an array, every task.\n\nExample:\n  \
                            agentctl mlflow export train-a train-b --to mlruns\n  \
                            MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri mlruns"
    )]
    Export(ExportArgs),
    /// Export jobs and show them with the `mlflow ui` that you have installed.
    #[command(after_help = "Needs MLflow: pip install mlflow. Words after -- are for it.\n\nExample:\n  \
                            agentctl mlflow ui train-a train-b -- --port 5001")]
    Ui(UiArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// The jobs' names, or the beginnings of them; `-` is your last one.
    #[arg(required = true, value_name = "JOB")]
    pub(crate) jobs: Vec<String>,
    /// The directory; it is made if it does not exist.
    #[arg(long, value_name = "DIR")]
    pub(crate) to: PathBuf,
    /// Leave out the files of jobs; those that were exported before stay.
    #[arg(long)]
    pub(crate) no_artifacts: bool,
}

#[derive(Debug, Args)]
pub(crate) struct UiArgs {
    /// The jobs' names, or the beginnings of them; otherwise your latest 20.
    #[arg(value_name = "JOB")]
    pub(crate) jobs: Vec<String>,
    /// The directory to export to; otherwise a new one, whose name is told.
    #[arg(long, value_name = "DIR")]
    pub(crate) to: Option<PathBuf>,
    /// Leave out the files of jobs; those that were exported before stay.
    #[arg(long)]
    pub(crate) no_artifacts: bool,
    /// For `mlflow ui`.
    #[arg(last = true, value_name = "ARGUMENT")]
    pub(crate) arguments: Vec<String>,
}
