//! `wait`: waits until jobs have ended; the exit code is that of the first that did not complete.

use std::process::ExitCode;

use serde_json::json;
use tokio::time::{Duration, Instant, timeout_at};

use super::follow::{Ended, Wants, follow};
use crate::cli::WaitArgs;
use crate::client::{Client, Target};
use crate::failure::{Failure, TIMED_OUT};
use crate::output::Output;

/// A wait without a limit: longer than any machine stays up.
const FOR_EVER: u64 = 100 * 365 * 24 * 3600;

/// Waits for one job after the other; jobs that ended meanwhile are reported at once.
pub(super) async fn wait(
    args: &WaitArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let client = Client::find_or_await(to).await?;
    let end = Instant::now() + Duration::from_secs(args.timeout.unwrap_or(FOR_EVER).min(FOR_EVER));
    let (mut first, mut all) = (ExitCode::SUCCESS, Vec::new());
    for given in &args.jobs {
        let job = &client.named(given).await?;
        output.busy(&format!("waiting for {job} to end"));
        let wants = Wants { log: None, story: false, tail: 0, attempt: 0, rank: 0 };
        let Ok(ended) = timeout_at(end, follow(&client, job, wants, output)).await else {
            output.note(&format!("{job} goes on: it has not ended within {} s", args.timeout.unwrap_or(0)));
            return Ok(ExitCode::from(TIMED_OUT));
        };
        let ended = ended?;
        output.rest();
        ended.tell(output);
        match &ended {
            Ended::Detached => return Ok(ended.exit_code()),
            Ended::Job(_) if first == ExitCode::SUCCESS => first = ended.exit_code(),
            Ended::Job(_) => {}
        }
        if let Ended::Job(job) = ended {
            all.push(job);
        }
    }
    if args.json {
        output.json(&json!({ "jobs": all }))?;
    }
    Ok(first)
}
