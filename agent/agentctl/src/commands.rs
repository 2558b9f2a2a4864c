//! The verbs, one file each.
//!
//! A verb asks the [`Client`](crate::client::Client), formats the answer with a pure function, and passes the text to
//! the [`Output`]. `view` decodes jobs and nodes from the wire and is the schema of every `--json`; `follow` follows
//! a job for `run`, `wait` and `logs -f`.

mod arrays;
mod as_job;
mod attach;
mod awake;
mod cancel;
mod check;
mod completions;
mod data;
mod diff;
mod doctor;
mod download;
mod drain;
mod envs;
mod explain;
mod files;
mod follow;
mod gc;
mod gpus;
mod hold;
mod init;
mod jobs;
mod kept;
mod login;
mod logs;
mod lost;
mod metrics;
mod mlflow;
mod nodes;
mod outputs;
mod people;
mod pipelines;
mod pool;
mod preempt;
mod recorded;
mod rerun;
mod rm;
mod run;
mod runs;
mod schema;
mod secret;
mod session;
mod set;
mod show;
mod status;
mod stop;
mod submit;
mod sweeps;
mod top;
mod view;
mod wait;
mod why;

use std::path::Path;
use std::process::ExitCode;

use agent_model::{Clock, SystemClock};
use clap::CommandFactory;

use crate::cli::{Cli, MachineVerb, NodeVerb, Verb};
use crate::client::{Client, Target};
use crate::failure::{Failure, NOT_THE_JOBS};
use crate::output::{Output, age};

/// Performs the command and returns its exit code; errors are printed before it returns.
pub(crate) async fn perform(cli: Cli, output: &mut Output) -> ExitCode {
    let of_a_job = cli.verb.is_about_a_jobs_end();
    let performed = Box::pin(dispatch(cli, output)).await;
    if let Some(said) = age::said() {
        output.warn(&age::describe(&said, SystemClock.now()));
    }
    performed.unwrap_or_else(|failure| {
        match &failure {
            Failure::Fault(fault) => output.fault(fault),
            Failure::Refused { what, fix } => output.refusal(what, fix),
            // At a terminal somebody wrote `| head -1`, and knows; the log of a script needs the word beside the code.
            Failure::PipeClosed if output.is_lively() => {}
            Failure::PipeClosed => output.note("nobody reads the output any more"),
            Failure::Interrupted => output.note(
                "interrupted; no job was submitted. What was sent stays with the daemon for a while: the next \
                 submit sends the rest",
            ),
        }
        match failure {
            Failure::Interrupted => failure.exit_code(),
            _ if of_a_job => ExitCode::from(NOT_THE_JOBS),
            _ => failure.exit_code(),
        }
    })
}

#[allow(clippy::cognitive_complexity, reason = "a line for each verb")]
async fn dispatch(cli: Cli, output: &mut Output) -> Result<ExitCode, Failure> {
    let context = cli.context.as_deref();
    let found = if needs_target(&cli.verb) { Target::resolve(context, cli.socket)? } else { None };
    let to = found.as_ref();
    if is_look(&cli.verb) && output.is_one_screen() {
        Client::revive(to, output).await?;
    }
    match cli.verb {
        Verb::Run(args) => return Box::pin(run::run(*args, to, output)).await,
        Verb::Doctor(args) => return doctor::doctor(&args, to, output).await,
        Verb::Sweep(args) => return Box::pin(sweeps::sweep(*args, to, output)).await,
        Verb::Submit(args) => Box::pin(submit::submit(*args, to, output)).await?,
        Verb::Jobs(args) => jobs::jobs(&args, to, output).await?,
        Verb::Files { target, json } => files::files(&target, json, to, output).await?,
        Verb::Init(args) => init::init(&args, output)?,
        Verb::Check(args) => return check::files(&args, output),
        Verb::Schema { of } => schema::print(of, output)?,
        Verb::Show(args) => show::show(&args, to, output).await?,
        Verb::Diff(args) => Box::pin(diff::diff(&args, to, output)).await?,
        Verb::Why(args) => why::why(&args, to, output).await?,
        Verb::Logs(args) => return logs::logs(args, to, output).await,
        Verb::Wait(args) => return wait::wait(&args, to, output).await,
        Verb::Metrics(args) => metrics::metrics(&args, to, output).await?,
        Verb::Runs(args) => runs::runs(&args, to, output).await?,
        Verb::Mlflow(verb) => return Box::pin(mlflow::mlflow(verb, to, output)).await,
        Verb::Cancel(args) => cancel::cancel(&args, to, output).await?,
        Verb::Hold(choice) => hold::hold(&choice, true, to, output).await?,
        Verb::Release(choice) => hold::hold(&choice, false, to, output).await?,
        Verb::Set(args) => set::set(&args, to, output).await?,
        Verb::Rm(args) => rm::rm(&args, to, output).await?,
        Verb::Download(args) => Box::pin(download::download(&args, to, output)).await?,
        Verb::Inside(verb) => return Box::pin(session::perform(verb, to, output)).await,
        Verb::Rerun(args) => rerun::rerun(&args, to, output).await?,
        Verb::Code(args) => rerun::code(&args, to, output).await?,
        Verb::Status(args) => status::status(&args, to, output).await?,
        Verb::Nodes(args) => Box::pin(top::nodes(&args, to, output)).await?,
        Verb::Top(args) => Box::pin(top::top(&args, to, output)).await?,
        Verb::Machine(verb) => return act_on_machine(verb, to, output).await,
        Verb::Login(args) => Box::pin(login::login(&args, context, output)).await?,
        Verb::Context(verb) => login::context(&verb, output).await?,
        Verb::Attach(args) => return Box::pin(attach::attach(args, to, output)).await,
        Verb::Detach(args) => Box::pin(attach::detach(args, to, output)).await?,
        Verb::Token(verb) => people::token(verb, to, output).await?,
        Verb::Pool(verb) => Box::pin(pool::pool(verb, to, output)).await?,
        Verb::User(verb) => people::user(verb, to, output).await?,
        Verb::Envs(verb) => return Box::pin(envs::envs(verb, to, output)).await,
        Verb::Data(verb) => Box::pin(data::data(verb, to, output)).await?,
        Verb::Secret(verb) => secret::secret(verb, to, output).await?,
        Verb::Gc(args) => return gc::gc(&args, to, output).await,
        Verb::Explain { code, json } => explain::explain(code.as_deref(), json, output)?,
        Verb::Start => stop::start(to, output).await?,
        Verb::Stop => stop::stop(to, output).await?,
        Verb::Completions { shell } => completions::script(shell, output)?,
        Verb::JobNames => completions::job_names(to, output).await?,
        Verb::Man { into } => write_manual(&into)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether a person looks at jobs: a daemon of his own that is away is started for that. Programs get an error.
fn is_look(verb: &Verb) -> bool {
    match verb {
        Verb::Jobs(args) => !args.json,
        Verb::Runs(args) => !args.json,
        Verb::Show(args) => !args.json,
        Verb::Metrics(args) => !args.json,
        Verb::Why(args) => !args.json,
        Verb::Diff(args) => !args.json,
        Verb::Top(args) => !args.json,
        Verb::Logs(_) | Verb::Download(_) | Verb::Code(_) => true,
        _ => false,
    }
}

async fn act_on_machine(
    verb: MachineVerb,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    match verb {
        MachineVerb::Drain(args) => return drain::drain(&args, to, output).await,
        MachineVerb::Undrain(args) => drain::set(&args, "uncordon", to, output).await?,
        MachineVerb::Cordon(args) => drain::set(&args, "cordon", to, output).await?,
        MachineVerb::KeepAwake(args) => awake::keep_awake(&args, to, output).await?,
        MachineVerb::Preempt(args) => preempt::preempt(&args, to, output).await?,
        MachineVerb::Node(NodeVerb::Lost { node, yes, json }) => {
            lost::lost(&node, yes, json, to, output).await?
        }
        MachineVerb::Node(NodeVerb::Remove { node, lose_jobs, json }) => {
            people::remove(&node, lose_jobs, json, to, output).await?
        }
        MachineVerb::Node(NodeVerb::Adopt(args)) => lost::judge(&args, true, to, output).await?,
        MachineVerb::Node(NodeVerb::End(args)) => lost::judge(&args, false, to, output).await?,
        MachineVerb::Node(NodeVerb::Outputs(args)) => outputs::store(&args, to, output).await?,
    }
    Ok(ExitCode::SUCCESS)
}

fn write_manual(into: &Path) -> Result<(), Failure> {
    clap_mangen::generate_to(Cli::command(), into).map_err(|error| {
        let what = format!("the manual pages cannot be written into {}: {error}", into.display());
        Failure::refused(what, "name a directory that is yours")
    })
}

/// Whether a verb is about a daemon that is already known.
fn needs_target(verb: &Verb) -> bool {
    !matches!(
        verb,
        Verb::Login(_)
            | Verb::Context(_)
            | Verb::Explain { .. }
            | Verb::Init(_)
            | Verb::Check(_)
            | Verb::Schema { .. }
            | Verb::Completions { .. }
            | Verb::Man { .. }
    )
}
