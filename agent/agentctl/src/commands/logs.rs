//! `logs`: prints the bytes that a job wrote, unchanged, or the lines of all its ranks.

use std::process::ExitCode;

use agent_model::Stream;
use agent_proto::v1;
use futures_util::stream::{SelectAll, StreamExt};

use super::arrays::require_one;
use super::follow::{Ended, Wants, follow};
use super::sweeps;
use super::view::JobView;
use crate::cli::LogsArgs;
use crate::client::{self, Client, Target, answer, next};
use crate::failure::Failure;
use crate::output::Output;

/// Prints a log, as far as it exists or until the job has ended.
pub(super) async fn logs(
    args: LogsArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let log = if args.build { Stream::Build } else { Stream::Job };
    let tail = args.tail.unwrap_or(0);
    if let Some(code) = of_story(&args, to, output).await? {
        return Ok(code);
    }
    if args.merge {
        return merge(&args, log, to, output).await;
    }
    if args.follow {
        let client = Client::find_or_await(to).await?;
        let (job, story) = (one(&client, &args.job).await?, !args.build && waits(&client, &args.job).await);
        let wants = Wants { log: Some(log), story, tail, attempt: args.attempt, rank: args.rank };
        let ended = follow(&client, &job, wants, output).await?;
        ended.tell(output);
        return Ok(ended.exit_code());
    }
    let client = Client::find(to).await?;
    let request = v1::ReadLogRequest {
        job: one(&client, &args.job).await?,
        epoch: args.attempt,
        rank: args.rank,
        stream: log.to_string(),
        offset: 0,
        follow: false,
        tail_lines: tail,
    };
    let mut chunks = answer(client.telemetry().read_log(request)).await?;
    while let Some(chunk) = next(&mut chunks).await? {
        output.job_bytes(&chunk.data)?;
    }
    output.job_ended()?;
    Ok(ExitCode::SUCCESS)
}

/// The story of a sweep or a pipeline, which has no log; `None` of any other job.
async fn of_story(
    args: &LogsArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<Option<ExitCode>, Failure> {
    let client = if args.follow { Client::find_or_await(to).await? } else { Client::find(to).await? };
    let Ok(job) = client.job(&args.job).await else { return Ok(None) };
    let job = JobView::try_from(job)?;
    if job.spec.sweep.is_none() && job.spec.pipeline.is_none() {
        return Ok(None);
    }
    let ended = sweeps::story(&client, &job.job, args.follow, output).await?;
    if !args.follow {
        return Ok(Some(ExitCode::SUCCESS));
    }
    ended.tell(output);
    Ok(Some(ended.exit_code()))
}

/// The whole name of a job that has a log: no array.
async fn one(client: &Client, given: &str) -> Result<String, Failure> {
    match client.job(given).await {
        Ok(job) => {
            let job = JobView::try_from(job)?;
            require_one(&job).map(|()| job.job)
        }
        // While the daemon is away, it is followed by this name.
        Err(_) => client.named(given).await,
    }
}

/// Whether its command has not begun: until then there is no log, but something to tell.
async fn waits(client: &Client, given: &str) -> bool {
    client.job(given).await.is_ok_and(|job| matches!(job.state.as_str(), "Queued" | "Preparing"))
}

/// Prints the lines of all ranks as they arrive, each with its rank before it.
async fn merge(
    args: &LogsArgs,
    log: Stream,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let client = Client::find(to).await?;
    let job = JobView::try_from(client.job(&args.job).await?)?;
    require_one(&job)?;
    let mut all = SelectAll::new();
    for rank in 0..job.ranks() {
        let request = v1::ReadLogRequest {
            job: job.job.clone(),
            epoch: args.attempt,
            rank,
            stream: log.to_string(),
            follow: args.follow,
            ..v1::ReadLogRequest::default()
        };
        let chunks = answer(client.telemetry().read_log(request)).await?;
        all.push(chunks.map(move |chunk| (rank, chunk)).boxed_local());
    }
    let (mut lines, mut gone) = (RankLines::new(job.ranks()), None);
    while let Some((rank, chunk)) = all.next().await {
        match chunk {
            Ok(chunk) => output.job_bytes(&lines.take(rank, &chunk.data))?,
            Err(status) if client::is_loss(&status) => gone = Some(client::fault(&status)),
            Err(status) => return Err(client::fault(&status).into()),
        }
    }
    output.job_bytes(&lines.rest())?;
    output.job_ended()?;
    if let Some(gone) = gone {
        return Err(gone.into());
    }
    if !args.follow {
        return Ok(ExitCode::SUCCESS);
    }
    let ended = Ended::Job(Box::new(JobView::try_from(client.job(&job.job).await?)?));
    ended.tell(output);
    Ok(ended.exit_code())
}

/// The incomplete last line of each rank.
struct RankLines(Vec<Vec<u8>>);

impl RankLines {
    fn new(ranks: u32) -> RankLines {
        RankLines((0..ranks).map(|_| Vec::new()).collect())
    }

    /// Adds bytes of a rank and returns the lines that are complete now.
    fn take(&mut self, rank: u32, bytes: &[u8]) -> Vec<u8> {
        let Some(held) = self.0.get_mut(rank as usize) else { return Vec::new() };
        held.extend_from_slice(bytes);
        let end = held.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let whole: Vec<u8> = held.drain(..end).collect();
        prefixed(rank, &whole)
    }

    /// What is left at the end.
    fn rest(&mut self) -> Vec<u8> {
        let held = std::mem::take(&mut self.0);
        (0..)
            .zip(held)
            .filter(|(_, held)| !held.is_empty())
            .flat_map(|(rank, mut held)| {
                held.push(b'\n');
                prefixed(rank, &held)
            })
            .collect()
    }
}

fn prefixed(rank: u32, lines: &[u8]) -> Vec<u8> {
    let mut shown = Vec::with_capacity(lines.len());
    for line in lines.split_inclusive(|byte| *byte == b'\n') {
        shown.extend_from_slice(format!("[{rank}] ").as_bytes());
        shown.extend_from_slice(line);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_lines_of_ranks_stay_whole() {
        let mut lines = RankLines::new(2);
        assert_eq!(lines.take(0, b"a"), b"");
        assert_eq!(lines.take(1, b"x\ny"), b"[1] x\n");
        assert_eq!(lines.take(0, b"b\n\nc\n"), b"[0] ab\n[0] \n[0] c\n");
        assert_eq!(lines.rest(), b"[1] y\n");
    }
}
