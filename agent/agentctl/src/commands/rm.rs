//! `rm`: removes jobs that have ended.

use std::time::Duration;

use agent_model::{Clock, SystemClock, Timestamp, size};
use agent_proto::v1;
use serde_json::json;

use super::cancel::{choose, each};
use super::lost::await_word;
use super::view::JobView;
use crate::cli::RmArgs;
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::count;

/// Removes each job. Every one is tried; the first failure is returned.
pub(super) async fn rm(args: &RmArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let fits = |job: &JobView| is_older(job, args.older_than, SystemClock.now());
    let names = choose(&client, &args.choice, false, fits, output).await?;
    if args.choice.jobs.is_empty() && !args.yes {
        confirm(&names, output)?;
    }
    let (removed, first) =
        each(&names, output, async |given, output| remove(&client, given, output).await).await;
    let (removed, sizes): (Vec<String>, Vec<u64>) = removed.into_iter().unzip();
    let left: u64 = sizes.iter().sum();
    if removed.len() > 1 {
        output.note(&format!("removed {}", count(removed.len() as u64, "job")));
    }
    let left_bytes = left;
    if left > 0 {
        let left = size::binary(left);
        output.note(&format!("{left} of outputs go when room is needed, or with: agentctl gc --all"));
    }
    if args.json {
        output.json(&json!({ "removed": removed, "output_bytes": left_bytes }))?;
    }
    first.map_or(Ok(()), Err)
}

/// Removes a job and returns its name and the size of what it left, in bytes.
async fn remove(client: &Client, given: &str, output: &mut Output) -> Result<(String, u64), Failure> {
    let job = client.named(given).await?;
    let request = v1::RemoveJobRequest { job: job.clone() };
    let left = answer(client.jobs().remove(request)).await?.output_bytes;
    output.note(&format!("{job}: removed"));
    Ok((job, left))
}

/// Whether it has ended, at least `than` ago.
fn is_older(job: &JobView, than: Option<Duration>, now: Timestamp) -> bool {
    job.has_ended()
        && than.is_none_or(|than| job.ended_ms.is_some_and(|ended| now.since(Timestamp(ended)) >= than))
}

/// Says how many jobs are meant, and waits for a yes.
fn confirm(names: &[String], output: &mut Output) -> Result<(), Failure> {
    let some = match names {
        [] => return Ok(()),
        [first, .., last] if names.len() > 3 => format!("{first} ... {last}"),
        names => names.join(", "),
    };
    let what = format!("{}, with logs, metrics and outputs: {some}", count(names.len() as u64, "job"));
    let unconfirmed = format!("nobody confirmed the removal of {what}");
    match await_word("yes", &format!("This removes {what}.\n"), unconfirmed, output)? {
        true => Ok(()),
        false => Err(Failure::refused("nothing was removed", "type yes to go on")),
    }
}
