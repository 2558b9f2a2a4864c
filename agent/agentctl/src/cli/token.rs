//! The verbs about tokens, with which machines join.

use std::time::Duration;

use clap::Subcommand;

use super::lasting;
use super::submit::pair;

#[derive(Debug, Subcommand)]
pub(crate) enum TokenVerb {
    /// Make one, and print the line to run on the machine that is to join.
    #[command(after_help = "Examples:\n  agentctl token create --uses 8 --for 30m --label rack=7\n  \
                            agentctl token create --cloud-init https://packages.lab/agentd.deb >user-data")]
    Create {
        /// What machines that join with it are known by.
        #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
        label: Vec<(String, String)>,
        /// How many machines may join with it.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        uses: u32,
        /// For how long.
        #[arg(long = "for", value_name = "TIME", default_value = "1h", value_parser = lasting)]
        lasts: Duration,
        /// Print user data of cloud-init instead: new machines install this package and join at their first boot.
        /// Without URL their image has agentd.
        #[arg(long, value_name = "URL", num_args = 0..=1, default_missing_value = "", conflicts_with = "json")]
        cloud_init: Option<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// List them, those of users among them. None can be used by what is shown.
    List {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Take one back; machines that joined with it stay.
    Revoke {
        /// Its id, or the beginning of it.
        id: String,
    },
}
