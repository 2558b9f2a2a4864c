//! The arguments of a job that is submitted, and of a sweep.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use agent_model::Timestamp;
use agent_model::job::{Array, ArrayError, WantedEnd};
use agent_model::sweep::Sampling;
use clap::{Args, Subcommand};

use super::{lasting, moment, variable};

#[derive(Debug, Clone, Args)]
pub(crate) struct SubmitArgs {
    /// A directory (with a job.yml, a run configuration, or neither), a job file, or a script.
    #[arg(default_value = ".")]
    pub(crate) target: PathBuf,
    /// The run configuration of the directory: a file, or NAME of `.azureml/NAME.runconfig`; a script and its
    /// arguments may follow.
    #[arg(long, short, value_name = "NAME", alias = "run-configuration-name")]
    pub(crate) config: Option<String>,
    /// The experiment that the job belongs to.
    #[arg(long, short, value_name = "NAME", alias = "experiment-name")]
    pub(crate) experiment: Option<String>,
    /// The job's name; otherwise one is made.
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Another value for an input, for example `inputs.lr=0.2`.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) set: Vec<(String, String)>,
    /// A variable for the command; with its name alone it has the value that it has here.
    #[arg(long, value_name = "NAME=VALUE", value_parser = own_or_given)]
    pub(crate) env: Vec<(String, String)>,
    /// A variable that holds a secret of yours, of the same name or of another; see agentctl secret.
    #[arg(long, value_name = "VARIABLE=NAME", value_parser = secret)]
    pub(crate) secret: Vec<(String, String)>,
    #[command(flatten)]
    pub(crate) needs: Needs,
    /// Run it once for each of these indices, for example 0-199, 1,3,5-9:2 or, at most 8 at a time, 0-199%8. A task has
    /// its index in AGENTD_ARRAY_INDEX.
    #[arg(long, value_name = "INDICES", value_parser = array)]
    array: Option<Array>,
    /// Run it so many times, with the indices from 0 on.
    #[arg(long, value_name = "NUMBER", value_parser = counted, conflicts_with = "array")]
    count: Option<Array>,
    #[command(flatten)]
    pub(crate) after: After,
    #[command(flatten)]
    pub(crate) dates: Dates,
    /// Read every file again, also those that look as they did at the last submit.
    #[arg(long)]
    pub(crate) rehash: bool,
    /// Send nothing: list what would be sent, and which rule leaves out the rest.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Send a home directory, or the root of the machine, all the same.
    #[arg(long)]
    pub(crate) yes: bool,
    /// Refuse a job that no machine here is large enough for, instead of letting it wait.
    #[arg(long)]
    pub(crate) strict: bool,
    /// Run the job although its file has keys that look like slips, and leave those out.
    #[arg(long)]
    pub(crate) allow_unknown: bool,
    /// Of a pipeline: run every step, also where the same ran before.
    #[arg(long)]
    pub(crate) force_rerun: bool,
    /// The file that says its environment, where there is no job file: requirements, a conda file, or a lock.
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub(crate) env_file: Option<PathBuf>,
    /// With -c, the directory with the script, which is sent in place of the project.
    #[arg(long, value_name = "DIR", requires = "config")]
    pub(crate) source_directory: Option<PathBuf>,
    /// What makes it a sweep.
    #[arg(skip)]
    pub(crate) sweep: Option<SweepSettings>,
    /// The distributions of hyperparameters, as they were written.
    #[arg(skip)]
    pub(crate) drawn: Vec<(String, String)>,
    /// The command, instead of the job file's; for a script, its arguments; with -c, a script and its arguments.
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

impl SubmitArgs {
    /// The array that it is to be.
    pub(crate) fn array(&self) -> Option<Array> {
        self.array.clone().or_else(|| self.count.clone())
    }

    /// The options that say something of one process, and so nothing of a pipeline.
    pub(crate) fn of_one_process(&self) -> Vec<&'static str> {
        let Needs { gpus, cpus, memory, time } = &self.needs;
        let options = [
            (!self.command.is_empty(), "a command"),
            (gpus.is_some(), "--gpus"),
            (cpus.is_some(), "--cpus"),
            (memory.is_some(), "--memory"),
            (time.is_some(), "--time"),
            (self.array().is_some(), "--array"),
            (self.sweep.is_some(), "a search space"),
        ];
        options.into_iter().filter(|(is_given, _)| *is_given).map(|(_, option)| option).collect()
    }
}

#[derive(Debug, Args)]
pub(crate) struct SubmitOnlyArgs {
    #[command(flatten)]
    pub(crate) submit: SubmitArgs,
    /// As JSON.
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) submit: SubmitArgs,
    /// Do not follow: print the job's name and return.
    #[arg(long, short)]
    pub(crate) detach: bool,
}

/// What the job needs, instead of what its file says.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Needs {
    /// GPUs on each machine.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) gpus: Option<u32>,
    /// Processors on each machine that no other job counts on.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) cpus: Option<u32>,
    /// Memory on each machine, for example 8g.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) memory: Option<u64>,
    /// The longest time the command may run, for example 90s, 30m or 2h.
    #[arg(long, value_name = "TIME", value_parser = lasting)]
    pub(crate) time: Option<Duration>,
}

/// When a job may start.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Dates {
    /// Not before this moment: 22:00, +2h, 2026-12-01 08:00, or with its offset 2026-12-01T08:00:00+01:00.
    #[arg(long, value_name = "TIME", value_parser = moment)]
    pub(crate) begin: Option<Timestamp>,
    /// By this moment it is to have ended: once it could not any more, as far as its time limit says, it is not started
    /// and fails (JOB-108).
    #[arg(long, value_name = "TIME", value_parser = moment)]
    pub(crate) deadline: Option<Timestamp>,
}

/// Jobs that must have ended before this one may start.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct After {
    /// Start when these jobs have completed; if one ends otherwise, this one fails (JOB-108).
    #[arg(long, value_name = "JOB", value_delimiter = ',')]
    after: Vec<String>,
    /// Start when these jobs have ended, however they ended.
    #[arg(long, value_name = "JOB", value_delimiter = ',')]
    after_any: Vec<String>,
    /// Start when these jobs have failed; if one ends otherwise, this one fails.
    #[arg(long, value_name = "JOB", value_delimiter = ',')]
    after_failed: Vec<String>,
}

impl After {
    /// Each of them, as it was given, and how it must end.
    pub(crate) fn jobs(&self) -> impl Iterator<Item = (&str, WantedEnd)> {
        let all = [
            (&self.after, WantedEnd::Completed),
            (&self.after_any, WantedEnd::Any),
            (&self.after_failed, WantedEnd::Failed),
        ];
        all.into_iter().flat_map(|(jobs, end)| jobs.iter().map(move |job| (job.as_str(), end)))
    }
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct SweepArgs {
    #[command(subcommand)]
    pub(crate) verb: Option<SweepVerb>,
    #[command(flatten)]
    pub(crate) submit: SubmitArgs,
    #[command(flatten)]
    pub(crate) settings: SweepSettings,
    /// Do not follow: print the sweep's name and return.
    #[arg(long, short)]
    pub(crate) detach: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SweepVerb {
    /// Make more trials of a sweep that has ended, as a new sweep: what the old one learned is kept.
    Extend(ExtendArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ExtendArgs {
    /// The sweep's name, or the beginning of it; `-` is your last job.
    pub(crate) sweep: String,
    /// How many more.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) trials: NonZeroU32,
    /// The name of the new sweep; otherwise one is made.
    #[arg(long)]
    pub(crate) name: Option<String>,
}

/// What makes a job a sweep, besides the distributions that `--set` names.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct SweepSettings {
    /// How many trials.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) max: Option<u32>,
    /// How many of them may run at a time; as many as there is room for if nothing is said.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) at_once: Option<NonZeroU32>,
    /// The metric that is to become low.
    #[arg(long, value_name = "METRIC", conflicts_with = "maximize")]
    pub(crate) minimize: Option<String>,
    /// The metric that is to become high.
    #[arg(long, value_name = "METRIC")]
    pub(crate) maximize: Option<String>,
    /// How values are drawn: random, sobol, grid or bayesian.
    #[arg(long, value_name = "HOW", value_parser = sampling)]
    pub(crate) sampling: Option<Sampling>,
    /// The same values again.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) seed: Option<u64>,
}

pub(super) fn pair(text: &str) -> Result<(String, String), &'static str> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write it as NAME=VALUE"),
    }
}

/// `NAME=VALUE`, or a variable of the caller.
fn own_or_given(text: &str) -> Result<(String, String), String> {
    if text.contains('=') {
        return pair(text).map_err(str::to_owned);
    }
    let value = variable(text).ok_or_else(|| format!("{text} is not set here: write {text}=VALUE"))?;
    Ok((text.to_owned(), value))
}

/// `VARIABLE=NAME`, or a name for both.
fn secret(text: &str) -> Result<(String, String), &'static str> {
    match text.contains('=') {
        true => pair(text).map_err(|_| "write it as VARIABLE=NAME, where NAME is that of the secret"),
        false => Ok((text.to_owned(), text.to_owned())),
    }
}

fn array(text: &str) -> Result<Array, String> {
    text.parse().map_err(|error: ArrayError| format!("{error}; {}", ArrayError::FORM))
}

fn counted(text: &str) -> Result<Array, String> {
    let number = text.parse().map_err(|_| "write a whole number of at least 1".to_owned())?;
    Array::counted(number).map_err(|error| error.to_string())
}

fn bytes(text: &str) -> Result<u64, String> {
    agent_model::size::meant(text)
}

fn sampling(word: &str) -> Result<Sampling, &'static str> {
    match word {
        "random" => Ok(Sampling::usual()),
        "sobol" => Ok(Sampling::Random { seed: None, sobol: true, logbase: None }),
        "grid" => Ok(Sampling::Grid),
        "bayesian" => Ok(Sampling::Bayesian { seed: None }),
        _ => Err("write random, sobol, grid or bayesian"),
    }
}
