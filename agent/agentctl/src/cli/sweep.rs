//! The arguments of sweeps.

use std::num::NonZeroU32;

use agent_model::sweep::Sampling;
use clap::{Args, Subcommand};

use super::submit::SubmitArgs;

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

fn sampling(word: &str) -> Result<Sampling, &'static str> {
    match word {
        "random" => Ok(Sampling::usual()),
        "sobol" => Ok(Sampling::Random { seed: None, sobol: true, logbase: None }),
        "grid" => Ok(Sampling::Grid),
        "bayesian" => Ok(Sampling::Bayesian { seed: None }),
        _ => Err("write random, sobol, grid or bayesian"),
    }
}
