//! The arguments that choose jobs by name, state or experiment.

use std::time::Duration;

use clap::Args;

use super::lasting;

#[derive(Debug, Args)]
pub(crate) struct JobsArgs {
    /// The tasks of this array that were started.
    #[arg(value_name = "JOB")]
    pub(crate) array: Option<String>,
    /// Every job there is.
    #[arg(long, conflicts_with = "limit")]
    pub(crate) all: bool,
    /// At most this many.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: u32,
    /// Only jobs that have not ended.
    #[arg(long)]
    pub(crate) active: bool,
    /// Only yours.
    #[arg(long)]
    pub(crate) mine: bool,
    /// Only those in this state.
    #[arg(long, value_name = "STATE", ignore_case = true, value_parser = STATES)]
    pub(crate) state: Option<String>,
    /// Only those of this experiment.
    #[arg(long, value_name = "NAME")]
    pub(crate) experiment: Option<String>,
    /// Show them anew whenever something changes, until Ctrl-C.
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) watch: bool,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Some of the caller's own jobs: by name, or by what they are.
#[derive(Debug, Args)]
#[group(id = "chosen", required = true, multiple = true)]
pub(crate) struct Selection {
    /// The jobs' names, or the beginnings of them; `-` is your last one.
    #[arg(conflicts_with_all = ["all", "state", "experiment"])]
    pub(crate) jobs: Vec<String>,
    /// Every one of yours.
    #[arg(long)]
    pub(crate) all: bool,
    /// Those of yours in this state.
    #[arg(long, value_name = "STATE", ignore_case = true, value_parser = STATES)]
    pub(crate) state: Option<String>,
    /// Those of yours of this experiment.
    #[arg(long, value_name = "NAME")]
    pub(crate) experiment: Option<String>,
}

/// What `agentctl jobs` shows as a job's state.
const STATES: [&str; 8] =
    ["Queued", "Preparing", "Running", "Finalizing", "NotResponding", "Completed", "Failed", "Canceled"];

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    #[command(flatten)]
    pub(crate) choice: Selection,
    /// Of those only jobs that ended so long ago, for example 12h or 30d.
    #[arg(long, value_name = "TIME", value_parser = lasting, group = "chosen", conflicts_with = "jobs")]
    pub(crate) older_than: Option<Duration>,
    /// Do not ask before several are removed.
    #[arg(long)]
    pub(crate) yes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CancelArgs {
    #[command(flatten)]
    pub(crate) choice: Selection,
    /// Return when they have ended.
    #[arg(long)]
    pub(crate) wait: bool,
}
