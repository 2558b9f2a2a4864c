//! The arguments of `attach` and `detach`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::lasting;
use super::submit::pair;

/// How a machine is reached.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct SshArgs {
    /// The port of its SSH server.
    #[arg(long, value_name = "N")]
    pub(crate) port: Option<u16>,
    /// The file of the key to log in with; otherwise those of ~/.ssh/config, of the agent, and the usual ones.
    #[arg(long, value_name = "FILE")]
    pub(crate) key: Option<PathBuf>,
    /// Read the password, which is also that for sudo, from the first line of standard input.
    #[arg(long)]
    pub(crate) password_stdin: bool,
    /// Do not use sudo: it is then installed for that user alone.
    #[arg(long)]
    pub(crate) no_sudo: bool,
    /// Go by way of this host; several with commas.
    #[arg(long, value_name = "USER@HOST")]
    pub(crate) jump: Option<String>,
    /// Take a host of which nothing is known at its word, and write down its key.
    #[arg(long)]
    pub(crate) accept_new: bool,
    /// The fingerprint that its key must have, as `SHA256:...`.
    #[arg(long, value_name = "FINGERPRINT")]
    pub(crate) fingerprint: Option<String>,
    /// For how long to try to connect.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = lasting)]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// The machine: [USER@]HOST[:PORT], or a name of ~/.ssh/config.
    #[arg(value_name = "USER@HOST", required_unless_present = "file")]
    pub(crate) place: Option<String>,
    /// Attach all machines of a file at once; see agent/docs/attach.md.
    #[arg(long, short, value_name = "FILE", conflicts_with_all = ["place", "name", "fingerprint"])]
    pub(crate) file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) ssh: SshArgs,
    /// What the machine is known by.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) label: Vec<(String, String)>,
    /// What the node is called; otherwise as its machine calls itself.
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// The `.tar.gz` of a release to install; otherwise the programs that lie beside agentctl.
    #[arg(long, value_name = "FILE")]
    pub(crate) package: Option<PathBuf>,
    /// The controller as the machine knows it; otherwise as it is known here.
    #[arg(long, value_name = "URL")]
    pub(crate) controller: Option<String>,
    /// Have the controller keep an SSH connection to the machine, by which that reaches it: for a machine that cannot
    /// connect to the controller.
    #[arg(long)]
    pub(crate) tunnel: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DetachArgs {
    /// The machine: [USER@]HOST[:PORT], or a name of ~/.ssh/config.
    #[arg(value_name = "USER@HOST")]
    pub(crate) place: String,
    #[command(flatten)]
    pub(crate) ssh: SshArgs,
    /// Take what it still runs for lost.
    #[arg(long)]
    pub(crate) lose_jobs: bool,
    /// The controller as the machine knows it; otherwise as it is known here.
    #[arg(long, value_name = "URL")]
    pub(crate) controller: Option<String>,
}
