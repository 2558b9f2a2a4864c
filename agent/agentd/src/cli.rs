//! The command line of `agentd`. Values are kept as text here; [`crate::config`] parses them, so that the same rules
//! apply to a flag, a variable and a line of the file.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// What was asked of the program.
#[derive(Debug, Parser)]
#[command(name = "agentd", version, about = "Turns this machine into a place where jobs run")]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) flags: Flags,
    /// What to do; `run` when left out.
    #[command(subcommand)]
    pub(crate) verb: Option<Verb>,
}

/// The configuration that may stand on the command line.
#[derive(Debug, Default, Clone, Args)]
pub(crate) struct Flags {
    /// Keep everything in the user's data directory; no privileges are needed
    #[arg(long, global = true)]
    pub(crate) user: bool,
    /// Read this configuration file
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Keep everything the daemon remembers in this directory
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state_dir: Option<String>,
    /// Serve clients at this unix socket
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) socket: Option<String>,
    /// Run at most this many jobs at a time
    #[arg(long, global = true, value_name = "N")]
    pub(crate) slots: Option<String>,
    /// The controller that the machine joins; set by `join`.
    #[arg(skip)]
    pub(crate) controller: Option<String>,
    /// It does nothing that the identity of the machine matters for, and may be called by somebody who cannot read it;
    /// set by `probe`.
    #[arg(skip)]
    pub(crate) without_identity: bool,
}

/// How a machine joins.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub(crate) struct JoinArgs {
    /// The controller: https://HOST:7443
    pub(crate) controller: String,
    /// The file that holds the token; `-` is standard input, which is also asked when neither is given
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    pub(crate) token_file: Option<PathBuf>,
    /// The token itself; everybody on this machine can read it here while the command runs
    #[arg(long, value_name = "TOKEN")]
    pub(crate) token: Option<String>,
    /// Join although the machine has jobs of its own that have not ended; those that wait are not run
    #[arg(long)]
    pub(crate) lose_jobs: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub(crate) enum Verb {
    /// Run the daemon
    Run,
    /// Make this machine a node of a controller, with a token that an operator made there
    Join(JoinArgs),
    /// Make it a machine of its own again
    Leave,
    /// Read the configuration and say what is wrong with it
    CheckConfig,
    /// Print every setting and where its value comes from
    ShowConfig,
    /// Say what this machine can do, without a running daemon
    Probe {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print what the GPU driver says, as one line of JSON. The daemon runs this in a process of its own,
    /// because the driver may hang.
    #[command(hide = true)]
    GpuLook {
        /// The driver's library, by path or by the name under which the system finds it; without it the
        /// configuration is asked
        #[arg(long, value_name = "LIBRARY")]
        library: Option<PathBuf>,
    },
    /// Write the manual pages, for whoever makes a package.
    #[command(hide = true)]
    Man {
        /// The directory to write them into.
        into: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn test_flags_stand_before_or_after_the_verb() {
        for line in ["agentd --user --slots 3 run", "agentd run --slots 3 --user", "agentd --slots=3 --user"]
        {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            assert!(cli.flags.user && matches!(cli.verb, None | Some(Verb::Run)));
            assert_eq!(cli.flags.slots.as_deref(), Some("3"));
        }
    }

    #[test]
    fn test_verbs_that_nobody_types_are_not_shown() {
        let cli = Cli::try_parse_from(["agentd", "gpu-look", "--library", "/x"]).unwrap();
        assert_eq!(cli.verb, Some(Verb::GpuLook { library: Some("/x".into()) }));
        let help = Cli::command().render_long_help().to_string();
        assert!(!help.contains("gpu-look") && !help.contains("manual pages"));
    }
}
