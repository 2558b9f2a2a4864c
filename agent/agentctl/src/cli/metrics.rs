//! The arguments of `metrics`.

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct MetricsArgs {
    /// The jobs' names, or the beginnings of them; `-` is your last one.
    #[arg(required = true, value_name = "JOB")]
    pub(crate) jobs: Vec<String>,
    /// Every point that was recorded, with its step and time.
    #[arg(long)]
    pub(crate) history: bool,
    /// Only this metric; may be repeated.
    #[arg(long, value_name = "NAME")]
    pub(crate) metric: Vec<String>,
    /// What the jobs take of their machines, instead of what they recorded: processors, memory, disks, GPUs.
    #[arg(long)]
    pub(crate) system: bool,
    /// The points as CSV.
    #[arg(long, requires = "history", conflicts_with = "json")]
    pub(crate) csv: bool,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
