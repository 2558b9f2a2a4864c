//! The arguments of the commands that look at jobs as they were made, and make them again.

use std::path::PathBuf;

use clap::Args;

use super::submit::pair;

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// The job's name, or the beginning of it; `-` is your last one.
    pub(crate) job: String,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Show it again whenever it changes, until Ctrl-C.
    #[arg(long, conflicts_with_all = ["json", "as_job"])]
    pub(crate) watch: bool,
    /// As a job file that makes the same job: code and inputs by their content, the environment as text.
    #[arg(long, conflicts_with = "json")]
    pub(crate) as_job: bool,
    /// With exactly the packages that it ran with.
    #[arg(long, requires = "as_job")]
    pub(crate) locked: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DiffArgs {
    /// A job's name, or the beginning of it; `-` is your last one.
    pub(crate) one: String,
    /// The other job's.
    pub(crate) other: String,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RerunArgs {
    /// The job's name, or the beginning of it; `-` is your last one.
    pub(crate) job: String,
    /// The name of the new job; otherwise one is made.
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Another value for an input, for example `inputs.lr=0.2`, or for an argument that the command has: `lr=0.2` for
    /// `--lr`.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) set: Vec<(String, String)>,
    /// With exactly the packages that it ran with.
    #[arg(long)]
    pub(crate) locked: bool,
    /// Of an array or a sweep: only the tasks that failed, with their indices and their values. Of a pipeline: what did not
    /// complete.
    #[arg(long)]
    pub(crate) failed: bool,
    /// Of a pipeline: this step and all that come after it. What completed before is not run again.
    #[arg(long, value_name = "STEP", conflicts_with = "failed")]
    pub(crate) from: Option<String>,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Other arguments for its program or script, in place of all that it has.
    #[arg(last = true, value_name = "ARGUMENTS")]
    pub(crate) arguments: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CodeArgs {
    /// The job's name, or the beginning of it; `-` is your last one.
    pub(crate) job: String,
    /// The directory to make; otherwise one of the job's name, with `-code`.
    #[arg(long, short, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
}
