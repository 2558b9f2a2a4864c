//! `logs`: the bytes a job wrote, as it wrote them.

use std::path::Path;
use std::process::ExitCode;

use agent_model::Stream;
use agent_proto::v1;

use super::follow::{Wants, follow};
use crate::cli::LogsArgs;
use crate::client::{Client, answer, next};
use crate::failure::Failure;
use crate::output::Output;

/// Prints a log, as far as it is there or until the job has ended.
pub(super) async fn logs(
    args: LogsArgs,
    socket: Option<&Path>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let log = if args.build { Stream::Build } else { Stream::Job };
    let tail = args.tail.unwrap_or(0);
    if args.follow {
        let client = Client::find_or_await(socket).await?;
        let wants = Wants { log: Some(log), story: false, tail, attempt: args.attempt };
        let ended = follow(&client, &client.named(&args.job).await?, wants, output).await?;
        ended.tell(output);
        return Ok(ended.exit_code());
    }
    let client = Client::find(socket).await?;
    let request = v1::ReadLogRequest {
        job: client.named(&args.job).await?,
        epoch: args.attempt,
        rank: 0,
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
