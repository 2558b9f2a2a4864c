//! The verbs, one file each.
//!
//! A verb asks the [`Client`](crate::client::Client), makes a text of the answer with a pure function, and
//! hands it to the [`Output`]. `view` is the one reading of wire jobs and nodes, and the schema of every
//! `--json`; `follow` is how `run`, `wait` and `logs -f` stay with a job.

mod cancel;
mod doctor;
mod download;
mod drain;
mod envs;
mod explain;
mod files;
mod follow;
mod gc;
mod gpus;
mod jobs;
mod logs;
mod lost;
mod metrics;
mod nodes;
mod outputs;
mod run;
mod show;
mod status;
mod stop;
mod submit;
mod view;
mod wait;
mod why;

use std::process::ExitCode;

use clap::CommandFactory;

use crate::cli::{Cli, NodeVerb, Verb};
use crate::failure::{Failure, NOT_THE_JOBS};
use crate::output::Output;

/// Does what was asked and gives the exit code; what went wrong has been said by then.
pub(crate) async fn perform(cli: Cli, output: &mut Output) -> ExitCode {
    let of_a_job = cli.verb.is_about_a_jobs_end();
    let performed = dispatch(cli, output).await;
    performed.unwrap_or_else(|failure| {
        match &failure {
            Failure::Fault(fault) => output.fault(fault),
            Failure::Refused { what, fix } => output.refusal(what, fix),
            Failure::PipeClosed => {}
        }
        if of_a_job { ExitCode::from(NOT_THE_JOBS) } else { failure.exit_code() }
    })
}

async fn dispatch(cli: Cli, output: &mut Output) -> Result<ExitCode, Failure> {
    let socket = cli.socket.as_deref();
    match cli.verb {
        Verb::Run(args) => return Box::pin(run::run(args, socket, output)).await,
        Verb::Doctor(args) => return doctor::doctor(&args, socket, output).await,
        Verb::Submit(args) => Box::pin(submit::submit(args, socket, output)).await?,
        Verb::Jobs(args) => jobs::jobs(&args, socket, output).await?,
        Verb::Files { target } => files::files(&target, socket, output).await?,
        Verb::Show(args) => show::show(&args, socket, output).await?,
        Verb::Why(args) => why::why(&args, socket, output).await?,
        Verb::Logs(args) => return logs::logs(args, socket, output).await,
        Verb::Wait(args) => return wait::wait(&args, socket, output).await,
        Verb::Metrics(args) => metrics::metrics(&args, socket, output).await?,
        Verb::Cancel(args) => cancel::cancel(&args, socket, output).await?,
        Verb::Download(args) => download::download(&args, socket, output).await?,
        Verb::Status(args) => status::status(&args, socket, output).await?,
        Verb::Nodes(args) => nodes::nodes(&args, socket, output).await?,
        Verb::Drain(args) => return drain::drain(&args, socket, output).await,
        Verb::Undrain(args) => drain::set(&args, "uncordon", socket, output).await?,
        Verb::Cordon(args) => drain::set(&args, "cordon", socket, output).await?,
        Verb::Node(NodeVerb::Lost { node, yes, json }) => {
            lost::lost(&node, yes, json, socket, output).await?
        }
        Verb::Node(NodeVerb::Outputs(args)) => outputs::store(&args, socket, output).await?,
        Verb::Envs(verb) => return Box::pin(envs::envs(verb, socket, output)).await,
        Verb::Gc(args) => return gc::gc(&args, socket, output).await,
        Verb::Explain { code } => explain::explain(code.as_deref(), output)?,
        Verb::Stop => stop::stop(socket, output).await?,
        Verb::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "agentctl", &mut script);
            output.print(&String::from_utf8_lossy(&script))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
