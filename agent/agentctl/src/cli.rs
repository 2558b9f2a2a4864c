//! The command line as types, and reading of environment variables.

mod again;
mod attach;
mod choose;
mod data;
mod files;
mod inside;
mod metrics;
mod mlflow;
mod moments;
mod node;
mod pool;
mod preempt;
mod set;
mod submit;
mod token;
mod words;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::failure::{EXIT_CODES, JOB_CODES};

pub(crate) use again::{CodeArgs, DiffArgs, RerunArgs, ShowArgs};
pub(crate) use attach::{AttachArgs, DetachArgs, SshArgs};
pub(crate) use choose::{CancelArgs, Column, JobsArgs, RmArgs, RunsArgs, Selection, SortKey, WhichJobs};
pub(crate) use data::{DataCreateArgs, DataVerb, DataVersionArgs};
pub(crate) use files::{CheckArgs, InitArgs, SchemaOf};
pub(crate) use inside::{ExecArgs, ForwardArgs, InsideVerb, OpenArgs, Ports};
pub(crate) use metrics::MetricsArgs;
pub(crate) use mlflow::{ExportArgs, MlflowVerb, UiArgs};
pub(crate) use moments::moment;
pub(crate) use node::{DrainArgs, KeepAwakeArgs, MachineVerb, NodeArgs, NodeVerb, UnprovedArgs};
pub(crate) use pool::{PoolSettings, PoolVerb};
pub(crate) use preempt::PreemptArgs;
pub(crate) use set::SetArgs;
use submit::pair;
pub(crate) use submit::{
    ExtendArgs, Needs, RunArgs, SubmitArgs, SubmitOnlyArgs, SweepArgs, SweepSettings, SweepVerb,
};
pub(crate) use token::TokenVerb;
pub(crate) use words::separate;

/// Above the options that every command has.
const EVERYWHERE: &str = "Options of every command";

/// Submit jobs to agentd, follow them, look at them, end them.
#[derive(Debug, Parser)]
#[command(name = "agentctl", version, max_term_width = 100, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// The daemon's socket; otherwise your own daemon's, then the machine's.
    #[arg(long, global = true, env = "AGENTD_SOCKET", value_name = "PATH", hide_env = true, help_heading = EVERYWHERE)]
    pub(crate) socket: Option<PathBuf>,
    /// The controller to speak to, by the name it has for you; otherwise `AGENTCTL_CONTEXT`, or the one in use.
    #[arg(long, global = true, value_name = "NAME", help_heading = EVERYWHERE)]
    pub(crate) context: Option<String>,
    /// Say only what was asked for, and what went wrong.
    #[arg(long, short, global = true, help_heading = EVERYWHERE)]
    pub(crate) quiet: bool,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Submit a job and follow it to its end; the exit code is the job's.
    #[command(after_help = JOB_CODES)]
    Run(Box<RunArgs>),
    /// Submit a job and print its name.
    #[command(after_help = "Examples:\n  \
                            agentctl submit my-project\n  \
                            agentctl submit -e diabetes -c local train.py --alpha 0.5   as with az ml run submit-script")]
    Submit(Box<SubmitOnlyArgs>),
    /// Run a job many times with other values of its hyperparameters, and follow it: the best trial is what counts.
    #[command(after_help = "Examples:\n  \
                            agentctl sweep sweep.yml\n  \
                            agentctl sweep job.yml --set 'lr=loguniform(-6,-1)' --set 'batch=choice(16,32)' \
                            --minimize loss --max 20\n  \
                            agentctl sweep extend sweep-x7k2p --trials 20")]
    Sweep(Box<SweepArgs>),
    /// List jobs: what runs, what waits in the order in which it starts, what ended.
    #[command(visible_aliases = ["ps", "ls", "queue"])]
    Jobs(JobsArgs),
    /// List what would be sent of a directory, and which rule leaves out the rest.
    Files {
        /// A directory (with a job.yml or without), a job file, or a script.
        #[arg(default_value = ".")]
        target: PathBuf,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Write the first job file of a directory; what is there already stays as it is.
    Init(InitArgs),
    /// Tell everything that is wrong with job files and run configurations; sends nothing.
    #[command(after_help = "The exit code is 1 where something is wrong.")]
    Check(CheckArgs),
    /// Print the JSON Schema of a kind of job file, for editors.
    Schema {
        /// Which kind.
        of: SchemaOf,
    },
    /// Show everything about one job, also as a job file that makes it again.
    #[command(
        alias = "describe",
        after_help = "Example:\n  agentctl show train-a --as-job --locked >again.yml && agentctl run again.yml"
    )]
    Show(ShowArgs),
    /// Show in what two jobs differ: code, packages, parameters, data, environment, machine, metrics.
    #[command(after_help = "Example:\n  agentctl diff train-a train-b")]
    Diff(DiffArgs),
    /// Tell the story of one job: what happened when, and whose fault it was.
    Why(JobJsonArgs),
    /// Print the output of a job; with -f the exit code is the job's.
    #[command(after_help = JOB_CODES, alias = "log")]
    Logs(LogsArgs),
    /// Show what jobs recorded: metrics, parameters and tags; with --history every point.
    Metrics(MetricsArgs),
    /// Compare runs: a table of jobs with their parameters and last metrics, the best first.
    #[command(after_help = "Examples:\n  \
                            agentctl runs --experiment digits --maximize accuracy\n  \
                            agentctl runs train-a train-b train-c\n  \
                            agentctl runs lr-sweep --csv >runs.csv\n\n\
                            A parameter is an option of the command, an input that is a value, what a trial of a sweep \
                            drew, or what the script logged.")]
    Runs(RunsArgs),
    /// What jobs recorded, for MLflow: export it, or show it in MLflow's pages.
    #[command(subcommand)]
    Mlflow(MlflowVerb),
    /// Wait until jobs have ended; the exit code is that of the first that did not complete.
    #[command(after_help = format!("Example:\n  agentctl wait train-a train-b && agentctl run report\n\n{JOB_CODES}"))]
    Wait(WaitArgs),
    /// Ask jobs to end, with everything they started.
    #[command(visible_alias = "kill")]
    Cancel(CancelArgs),
    /// Keep jobs that wait from starting, until they are released.
    Hold(Selection),
    /// Let jobs start that are held.
    Release(Selection),
    /// Change jobs that wait: priority, time, needs; of one that runs, its priority and a longer time.
    #[command(
        after_help = "Of an array it goes to the tasks that wait, and to those that run as far as they take it. Who \
                            changed what is in: agentctl why JOB\n\nExamples:\n  \
                            agentctl set train-a --priority high --time 8h\n  \
                            agentctl set train-a train-b --gpus 2 --hold\n  \
                            agentctl set --all --priority low"
    )]
    Set(SetArgs),
    /// Remove jobs that have ended, with their logs, metrics and outputs; their names are free again.
    #[command(
        alias = "delete",
        after_help = "What they left in the store goes when room is needed, or with: agentctl gc --all\n\n\
                            Examples:\n  \
                            agentctl rm train-a train-b\n  \
                            agentctl rm --state failed --older-than 30d"
    )]
    Rm(RmArgs),
    /// Fetch the outputs of a job; while it runs, what it has written so far.
    Download(DownloadArgs),
    #[command(flatten)]
    Inside(InsideVerb),
    /// Submit a job once more: the same code, inputs and environment, whatever its directory has now.
    #[command(
        after_help = "The environment is made from the same definition. If it is not kept any more, what \
                            the definition leaves open may be newer, but not with --locked.\n\n\
                            Example:\n  \
                            agentctl rerun train-a --set inputs.lr=0.2\n  \
                            agentctl rerun train-a -- --lr 0.2 --epochs 5"
    )]
    Rerun(RerunArgs),
    /// Fetch the code of a job, as it was sent.
    Code(CodeArgs),
    /// This box at a glance.
    Status(StatusArgs),
    /// Who uses what now: of each user what his jobs have, and of each machine what is left.
    Top(StatusArgs),
    /// List the machines: what they have, how much of it is used, and by whom.
    Nodes(JsonArgs),
    #[command(flatten)]
    Machine(MachineVerb),
    /// The environments that machines keep: list, show, build, export, remove and pin them.
    #[command(subcommand)]
    Envs(EnvsVerb),
    /// Make room: remove what no job needs from the daemon's store, and say what stays and why.
    #[command(after_help = "Outputs of jobs always stay, and so does what jobs that have not ended need. \
                            Snapshots of jobs that have ended go when the store is too large; the next submit \
                            sends them again. Environments go by a rule of their own: agentctl envs. The daemon \
                            that is spoken to is meant; machines that only run jobs make room by themselves.\n\n\
                            Examples:\n  \
                            agentctl gc --all --dry-run   what could go\n  \
                            agentctl gc --check           read every file of the store")]
    Gc(GcArgs),
    /// Names for data that jobs read: create, list, show, archive and remove them.
    #[command(subcommand)]
    Data(DataVerb),
    /// What only your jobs are told: set, list and remove secrets.
    #[command(subcommand)]
    Secret(SecretVerb),
    /// Log in to a controller elsewhere, with the code that its operator gave you.
    #[command(
        after_help = "The code is read from standard input, or asked for. --context names the controller for \
                            you; otherwise it has the name of its host.\n\nExample:\n  \
                            agentctl login https://controller.lab:7443"
    )]
    Login(LoginArgs),
    /// The controllers you logged in to: list, choose and forget them.
    #[command(subcommand)]
    Context(ContextVerb),
    /// Tokens with which machines join: make, list and take them back.
    #[command(subcommand)]
    Token(TokenVerb),
    /// Pools of machines that are made when jobs wait for them, and removed when they are idle.
    #[command(subcommand)]
    Pool(PoolVerb),
    /// Users who come from elsewhere: add, list and remove them.
    #[command(subcommand)]
    User(UserVerb),
    /// Make a machine that is reached by SSH a node: look at it, install agentd there, let it join.
    #[command(
        after_help = "Everything that stands against it is told before anything is changed. What is cut off is \
                            finished by running it again. Without root there it is installed for the user who logs \
                            in. ~/.ssh/config and known_hosts count as with ssh.\n\nExamples:\n  \
                            agentctl attach ada@gpu-1 --label rack=7\n  \
                            agentctl attach ada@10.0.0.7 --jump ada@gate --name gpu-7\n  \
                            agentctl attach -f hosts.yml"
    )]
    Attach(AttachArgs),
    /// Let a machine that was attached leave the controller, and take away all that attach installed there.
    #[command(after_help = "Refused while it has jobs: let it run empty first (agentctl drain).")]
    Detach(DetachArgs),
    /// Check this machine and say what each finding means for jobs.
    Doctor(DoctorArgs),
    /// Explain a fault code; without one, list them all.
    Explain {
        /// For example ENV-103.
        code: Option<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Start a daemon of your own, with the jobs that it had, where none of the machine is there.
    Start,
    /// End the daemon; running jobs go on.
    Stop,
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the names of jobs, for a shell that completes them.
    #[command(hide = true)]
    JobNames,
    /// Write the manual pages, for whoever makes a package.
    #[command(hide = true)]
    Man {
        /// The directory to write them into.
        into: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct LoginArgs {
    /// The controller: https://HOST:7443
    pub(crate) controller: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ContextVerb {
    /// List them; the one in use is marked.
    List {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Speak to this one from now on.
    Use {
        /// Its name.
        name: String,
    },
    /// Reach its controller under another address, to which that moved; it proves to be the same.
    #[command(after_help = "Example:\n  agentctl context move lab https://new.example:7443")]
    Move {
        /// Its name.
        name: String,
        /// The new address: `https://HOST:7443`.
        controller: String,
    },
    /// Forget one.
    Remove {
        /// Its name.
        name: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum UserVerb {
    /// Add a user, or let one log in on another machine; prints his code.
    #[command(
        after_help = "submit: his own jobs. operate: besides, the jobs of others and the machines. admin: besides, \
                            who is a node or a user.\n\nExample:\n  agentctl user add ada --role operate"
    )]
    Add {
        /// His name.
        name: String,
        /// What he may do; submit unless he is a user already.
        #[arg(long, value_parser = ["submit", "operate", "admin"])]
        role: Option<String>,
        /// For how long the code is good.
        #[arg(long = "for", value_name = "TIME", default_value = "1h", value_parser = lasting)]
        lasts: Duration,
        /// The one who had this name before and was removed: jobs, names of data and secrets are his again.
        #[arg(long)]
        same_person: bool,
        /// Somebody else than the one who had this name before: what that one left is the operators' from now on, and the
        /// secrets are removed.
        #[arg(long, conflicts_with = "same_person")]
        new_person: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// List them.
    List {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// End his certificates, after a machine of his was lost: he stays a user, and logs in again with a new code.
    #[command(after_help = "Example:\n  agentctl user revoke ada && agentctl user add ada")]
    Revoke {
        /// His name.
        name: String,
    },
    /// Remove one: none of his certificates and codes is good any more.
    Remove {
        /// His name.
        name: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum SecretVerb {
    /// Keep a value, typed or on standard input, under a name; a job gets it by `secrets: {VARIABLE: NAME}`.
    #[command(after_help = "Example:\n  agentctl secret set wandb <key.txt")]
    Set {
        /// Its name.
        name: String,
    },
    /// List the names of yours.
    List {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove one; a job that names it is refused from then on.
    Rm {
        /// Its name.
        name: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum EnvsVerb {
    /// List them, with their size and when they were last used.
    List {
        /// Only those of this machine.
        #[arg(long, value_name = "NODE")]
        node: Option<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show everything about one: what it was made of, its packages, the end of its build log.
    #[command(after_help = "Example:\n  agentctl envs show conda-3f0a")]
    Show(EnvArgs),
    /// Make an environment ahead of the jobs that need it, and print its key.
    #[command(after_help = "Examples:\n  agentctl envs build environment.yml    a conda file\n  \
                            agentctl envs build requirements.txt   packages for pip\n  \
                            agentctl envs build my-project         what its job.yml names\n  \
                            agentctl envs build env.lock           exactly the packages of a lock")]
    Build(EnvBuildArgs),
    /// Write down exactly which packages one has; a job can name that file as `conda_lock`.
    #[command(after_help = "Example:\n  agentctl envs export conda-3f0a -o env.lock")]
    Export {
        /// Its key, or the beginning of it.
        key: String,
        /// The machine that keeps it; may be left out when only one does.
        #[arg(long, value_name = "NODE")]
        node: Option<String>,
        /// The file to write; otherwise standard output.
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Remove one that no job uses; the next job that needs it builds it again.
    #[command(after_help = "Example:\n  agentctl envs rm conda-3f0a")]
    Rm(EnvArgs),
    /// Keep one, however little room there is.
    Pin(EnvArgs),
    /// Let one go when room is needed.
    Unpin(EnvArgs),
}

#[derive(Debug, Args)]
pub(crate) struct EnvArgs {
    /// Its key, or the beginning of it.
    pub(crate) key: String,
    /// The machine that keeps it; may be left out when only one does.
    #[arg(long, value_name = "NODE")]
    pub(crate) node: Option<String>,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EnvBuildArgs {
    /// A conda file, a requirements file, a lock, a job file, or a directory with one.
    pub(crate) target: PathBuf,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GcArgs {
    /// Everything that may go, however much room there is.
    #[arg(long)]
    pub(crate) all: bool,
    /// Remove nothing; only say what would go.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Instead, read everything in the store and take out what is damaged.
    #[arg(long, conflicts_with_all = ["all", "dry_run"])]
    pub(crate) check: bool,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct JsonArgs {
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Show it again whenever it changes, until Ctrl-C.
    #[arg(long, conflicts_with = "json")]
    pub(crate) watch: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write everything a maintainer would ask for into this .tar.gz, without secrets.
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    pub(crate) bundle: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct JobJsonArgs {
    /// The job's name, or the beginning of it; `-` is your last one.
    pub(crate) job: String,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// The job's name, or the beginning of it; `-` is your last one.
    pub(crate) job: String,
    /// Go on until the job has ended.
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// The log of building the environment instead.
    #[arg(long)]
    pub(crate) build: bool,
    /// Begin this many lines before the end.
    #[arg(long, short = 'n', value_name = "LINES", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) tail: Option<u64>,
    /// Of this attempt instead of the latest.
    #[arg(long, value_name = "NUMBER", default_value_t = 0, hide_default_value = true)]
    pub(crate) attempt: u64,
    /// Of this rank of a job on several nodes instead of the first.
    #[arg(long, value_name = "NUMBER", default_value_t = 0, hide_default_value = true)]
    pub(crate) rank: u32,
    /// Of all ranks, each line with its rank before it.
    #[arg(long, conflicts_with_all = ["rank", "tail"])]
    pub(crate) merge: bool,
}

#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// The jobs' names, or the beginnings of them; `-` is your last one.
    #[arg(required = true)]
    pub(crate) jobs: Vec<String>,
    /// Wait at most so long, such as `90s` or `30m`; a bare number is seconds. The jobs go on.
    #[arg(long, value_name = "TIME", value_parser = patience)]
    pub(crate) timeout: Option<u64>,
    /// As JSON: the jobs as they ended.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DownloadArgs {
    /// The job's name, or the beginning of it; `-` is your last one.
    pub(crate) job: String,
    /// Only these files and directories of it, for example `outputs/model.pkl`.
    #[arg(value_name = "PATH")]
    pub(crate) parts: Vec<String>,
    /// The directory to make; otherwise one of the job's name.
    #[arg(long, short, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
    /// The logs too, as `user_logs`.
    #[arg(long)]
    pub(crate) logs: bool,
    /// What all trials of a sweep left, not only the best one; or all steps of a pipeline, not only its outputs.
    #[arg(long)]
    pub(crate) all: bool,
    /// Replace the directory if it exists.
    #[arg(long)]
    pub(crate) force: bool,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

impl Verb {
    /// Whether its exit code is that of a job, so that its own failures need a separate code.
    pub(crate) fn is_about_a_jobs_end(&self) -> bool {
        match self {
            Verb::Run(args) => !args.detach && !args.submit.dry_run,
            Verb::Logs(args) => args.follow,
            Verb::Wait(_) | Verb::Inside(InsideVerb::Exec(_)) => true,
            _ => false,
        }
    }
}

/// The same for a command line that cannot be parsed: by the first word that names a verb, and `-f` after `logs`.
pub(crate) fn is_about_a_jobs_end(words: impl Iterator<Item = String>) -> bool {
    let command = Cli::command();
    let mut words = words.skip(1);
    match words.find_map(|word| Some(command.find_subcommand(word)?.get_name())) {
        Some("run" | "wait" | "exec") => true,
        Some("logs") => words.any(|word| matches!(&*word, "-f" | "--follow")),
        _ => false,
    }
}

/// A time such as `90s`, `30m`, `1h` or `7d`, of at least a second.
fn lasting(text: &str) -> Result<Duration, &'static str> {
    let wrong = "write it as 90s, 30m, 1h or 7d";
    let units = [('s', 1), ('m', 60), ('h', 3600), ('d', 86_400)];
    let factor = units.iter().find(|(unit, _)| text.ends_with(*unit)).ok_or(wrong)?.1;
    let number: u64 = text[..text.len() - 1].parse().map_err(|_| wrong)?;
    let seconds = number.checked_mul(factor).filter(|seconds| *seconds > 0).ok_or(wrong)?;
    Ok(Duration::from_secs(seconds))
}

/// The same in seconds, which may be written as a bare number.
fn patience(text: &str) -> Result<u64, &'static str> {
    match text.parse() {
        Ok(seconds) => Ok(seconds),
        Err(_) => lasting(text).map(|time| time.as_secs()),
    }
}

/// A variable of the environment, if it is set and not empty.
#[allow(clippy::disallowed_methods, reason = "this module is what reads the environment")]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
pub(crate) use choose::ColumnList;

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;

    #[test]
    fn test_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn test_help_of_every_command() {
        fn check(command: &mut Command) {
            let name = command.get_bin_name().unwrap_or("agentctl").replace(' ', "-");
            insta::assert_snapshot!(name, command.render_long_help());
            command.get_subcommands_mut().filter(|below| below.get_name() != "help").for_each(check);
        }
        let mut command = crate::help::command().term_width(100);
        command.build();
        let mut settings = insta::Settings::new();
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings.set_snapshot_path("snapshots/help");
        let _bound = settings.bind_to_scope();
        check(&mut command);
    }

    #[test]
    fn test_command_after_dashes_keeps_its_own_options() {
        let cli =
            Cli::try_parse_from(["agentctl", "run", "dir", "--env", "A=b=c", "--", "python", "-u", "t.py"]);
        let Verb::Run(run) = cli.unwrap().verb else { panic!("not run") };
        assert_eq!(run.submit.command, ["python", "-u", "t.py"]);
        assert_eq!(run.submit.env, [("A".to_owned(), "b=c".to_owned())]);
        assert!(Cli::try_parse_from(["agentctl", "run", "dir", "--set", "x"]).is_err());
    }

    #[test]
    fn test_a_wrong_command_line_is_not_taken_for_a_job_that_returned_2() {
        let is = |line: &str| is_about_a_jobs_end(line.split(' ').map(str::to_owned));
        for line in [
            "agentctl run --bogus",
            "agentctl log -f",
            "agentctl -q wait",
            "agentctl logs -f",
            "agentctl logs j --follow --x",
        ] {
            assert!(is(line), "{line}");
        }
        for line in ["agentctl logs --x", "agentctl jobs -f", "agentctl", "agentctl cancel run"] {
            assert!(!is(line), "{line}");
        }
    }
}
