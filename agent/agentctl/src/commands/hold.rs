//! `hold` and `release`: keep waiting jobs from starting, and release them.

use agent_proto::v1;

use super::cancel::{choose, each};
use super::view::JobView;
use crate::cli::Selection;
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::Output;

/// Holds each job, or releases it. Every job is asked; the first failure is returned.
pub(super) async fn hold(
    choice: &Selection,
    held: bool,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let waits = |job: &JobView| job.state == "Queued";
    let names = choose(&client, choice, true, waits, output).await?;
    let (_, first) =
        each(&names, output, async |given, output| set(&client, given, held, output).await).await;
    first.map_or(Ok(()), Err)
}

async fn set(client: &Client, given: &str, held: bool, output: &mut Output) -> Result<(), Failure> {
    let job = client.named(given).await?;
    answer(client.jobs().hold(v1::HoldJobRequest { job: job.clone(), held })).await?;
    output.note(&match held {
        true => format!("{job}: held; let it start with: agentctl release {job}"),
        false => format!("{job}: released"),
    });
    Ok(())
}
