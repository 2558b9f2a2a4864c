//! `cancel`: ask jobs to end. Asking twice, or asking of a job that ended, changes nothing.

use std::path::Path;

use agent_proto::v1;
use futures_util::StreamExt;

use super::view::JobView;
use crate::cli::CancelArgs;
use crate::client::{self, Client, answer};
use crate::failure::Failure;
use crate::output::Output;

/// Asks each job to end, and waits for that if wanted. Every job is asked; the first failure is given.
pub(super) async fn cancel(
    args: &CancelArgs,
    socket: Option<&Path>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(socket).await?;
    let mut first = None;
    let mut asked = Vec::new();
    for given in &args.jobs {
        match ask(&client, given, output).await {
            Ok(job) => asked.push(job),
            Err(Failure::Fault(fault)) if first.is_some() => output.fault(&fault),
            Err(failure) => first = Some(failure),
        }
    }
    if args.wait {
        for job in asked {
            wait(&client, &job, output).await?;
        }
    }
    first.map_or(Ok(()), Err)
}

/// Gives the job's whole name.
async fn ask(client: &Client, given: &str, output: &mut Output) -> Result<String, Failure> {
    let name = client.named(given).await?;
    let request = v1::CancelJobRequest { job: name.clone() };
    let job = JobView::try_from(answer(client.jobs().cancel(request)).await?)?;
    output.note(&match job.has_ended() {
        true => format!("{name}: {}", job.state),
        false if job.is_storing() => {
            format!("{name}: asked to end; outputs that are not stored yet stay on its machine")
        }
        false => format!("{name}: asked to end; it has {} for it", grace(&job)),
    });
    Ok(name)
}

fn grace(job: &JobView) -> String {
    crate::output::text::duration(job.spec.limits.grace())
}

async fn wait(client: &Client, name: &str, output: &mut Output) -> Result<(), Failure> {
    output.busy(&format!("waiting for {name} to end"));
    let request = v1::GetJobRequest { job: name.to_owned() };
    let mut changes = answer(client.jobs().watch(request)).await?;
    let mut state = String::new();
    while let Some(job) = changes.next().await {
        state = job.map_err(|status| client::fault(&status))?.state;
    }
    output.note(&format!("{name}: {state}"));
    Ok(())
}
