//! The verbs about pools of machines.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::{lasting, pair};

#[derive(Debug, Subcommand)]
pub(crate) enum PoolVerb {
    /// Make one: its machines are made when jobs wait for them, and removed when they are idle.
    #[command(after_help = "Providers are in the controller's configuration: agent/docs/pools.md.\n\n\
                            Example:\n  agentctl pool create gpu --provider lab --max 8 --idle 10m")]
    Create {
        /// Its name, which job files call `compute`: 3 to 24 letters, digits and `-`.
        name: String,
        /// Who makes its machines: a name in the controller's configuration.
        #[arg(long)]
        provider: String,
        #[command(flatten)]
        settings: PoolSettings,
    },
    /// Change one; what is not named stays.
    Set {
        /// Its name.
        name: String,
        /// Who makes its machines from now on; those that it has stay.
        #[arg(long)]
        provider: Option<String>,
        #[command(flatten)]
        settings: PoolSettings,
    },
    /// List them.
    List {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show one and its machines.
    Show {
        /// Its name.
        name: String,
        /// As JSON, with the fields that the cloud's command line prints.
        #[arg(long)]
        json: bool,
    },
    /// Wait until it has so many machines that take jobs.
    Wait {
        /// Its name.
        name: String,
        /// How many.
        #[arg(long, value_name = "N", default_value_t = 1)]
        min_nodes: u32,
        /// How long at most.
        #[arg(long, value_name = "TIME", default_value = "25m", value_parser = lasting)]
        timeout: Duration,
    },
    /// Remove one: its machines take no new jobs, and go when those they have are over.
    Delete {
        /// Its name.
        name: String,
        /// Do not wait until its last machine is gone.
        #[arg(long)]
        no_wait: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct PoolSettings {
    /// How many machines it always has; 0 at first.
    #[arg(long, value_name = "N")]
    pub(crate) min: Option<u32>,
    /// How many machines it has at most; as many as `--min` at first.
    #[arg(long, value_name = "N")]
    pub(crate) max: Option<u32>,
    /// How long a machine may be idle before it is removed; 2 minutes at first.
    #[arg(long, value_name = "TIME", value_parser = lasting)]
    pub(crate) idle: Option<Duration>,
    /// Whether its machines are its own, or cheaper ones that may be taken away: dedicated at first.
    #[arg(long, value_parser = ["dedicated", "low"])]
    pub(crate) priority: Option<String>,
    /// What its machines are known by, beside `pool=NAME`; all of them.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) label: Vec<(String, String)>,
}
