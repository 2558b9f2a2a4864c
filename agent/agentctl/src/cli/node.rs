//! The verbs about one machine.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::{JobJsonArgs, PreemptArgs, lasting};

#[derive(Debug, Subcommand)]
pub(crate) enum MachineVerb {
    /// Let a machine run empty: no new jobs, and wait for those it has.
    Drain(DrainArgs),
    /// Let new jobs onto a machine again.
    #[command(visible_alias = "uncordon")]
    Undrain(NodeArgs),
    /// Keep new jobs off a machine; those it has go on.
    Cordon(NodeArgs),
    /// Say that a machine will be taken away: its jobs store what they have, and start again elsewhere.
    Preempt(PreemptArgs),
    /// Keep a machine up that shuts itself down when it is idle or at set times.
    KeepAwake(KeepAwakeArgs),
    /// Act on one machine.
    #[command(subcommand)]
    Node(NodeVerb),
}

#[derive(Debug, Args)]
pub(crate) struct KeepAwakeArgs {
    /// For how long, at most 7d.
    #[arg(value_name = "TIME", value_parser = lasting, default_value = "8h")]
    pub(crate) length: Duration,
    /// No longer: it shuts down as configured.
    #[arg(long, conflicts_with = "length")]
    pub(crate) off: bool,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct NodeArgs {
    /// The machine; may be left out when there is only one.
    pub(crate) node: Option<String>,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    pub(crate) node: NodeArgs,
    /// Do not wait until its jobs have ended.
    #[arg(long, conflicts_with = "timeout")]
    pub(crate) no_wait: bool,
    /// Wait at most so long, such as `90s` or `30m`; a bare number is seconds. The drain goes on afterwards.
    #[arg(long, value_name = "TIME", value_parser = super::patience)]
    pub(crate) timeout: Option<u64>,
}

/// A replica that is not proved.
#[derive(Debug, Args)]
pub(crate) struct UnprovedArgs {
    /// The machine.
    pub(crate) node: String,
    /// What it runs: JOB.ATTEMPT.RANK.
    pub(crate) replica: String,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NodeVerb {
    /// Take a silent machine for gone: its jobs end, or start anew elsewhere.
    Lost {
        /// The machine.
        node: String,
        /// Do not ask; you are certain that nothing it ran runs any more.
        #[arg(long)]
        yes: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove a machine from the controller: its certificates are good for nothing from then on.
    #[command(after_help = "Refused while it has jobs: let it run empty first (agentctl drain).")]
    Remove {
        /// The machine.
        node: String,
        /// End what it still runs: a machine that answers gives it 20 seconds, one that does not ends it when it hears
        /// of its removal.
        #[arg(long)]
        lose_jobs: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Take over what a machine runs and cannot prove that it was given, as if it were proved. It gets no secrets.
    #[command(after_help = "`agentctl status` names what there is. Its owner, code and command are as the \
                            machine tells them: adopt only what you know.")]
    Adopt(UnprovedArgs),
    /// End what a machine runs and cannot prove that it was given; the machine keeps its files for a week.
    #[command(after_help = "`agentctl status` names what there is.")]
    End(UnprovedArgs),
    /// Store the outputs of a job that ended without (OUT-101), from what its machine keeps of it.
    #[command(
        after_help = "A machine keeps them for a week. How the job ended stays as it is; its outputs can be \
                            fetched afterwards.\n\nExample:\n  \
                            agentctl node outputs train-1 && agentctl download train-1"
    )]
    Outputs(JobJsonArgs),
}
