//! The words of `preempt`.

use std::time::Duration;

use clap::Args;

use super::{NodeArgs, lasting};

/// Says that a machine will be taken away.
#[derive(Debug, Args)]
pub(crate) struct PreemptArgs {
    #[command(flatten)]
    pub(crate) node: NodeArgs,
    /// In how long; its jobs have ended before, and their outputs are stored.
    #[arg(long = "in", value_name = "TIME", value_parser = lasting, default_value = "2m")]
    pub(crate) after: Duration,
    /// What users read as the reason.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) reason: String,
    /// It stays after all: take new jobs again. Those that were told go on elsewhere.
    #[arg(long, conflicts_with_all = ["after", "reason"])]
    pub(crate) withdraw: bool,
}
