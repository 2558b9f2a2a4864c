//! `node outputs`: has the machine of a job that ended without its outputs store them now.

use agent_model::size;
use agent_proto::v1;
use serde_json::json;

use super::download::tell_left_out;
use super::view::JobView;
use crate::cli::JobJsonArgs;
use crate::client::{self, Client, Target, answer};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::{clean, count};

/// Has them stored, and waits for it.
pub(super) async fn store(
    args: &JobJsonArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let job = JobView::try_from(client.job(&args.job).await?)?;
    if !job.has_ended() {
        return Err(Failure::refused(
            format!("{} has not ended: its machine stores the outputs by itself", job.job),
            format!("see what it waits for: agentctl why {}", job.job),
        ));
    }
    let node = job.replicas.first().map_or("its machine", |replica| replica.node.as_str());
    output.busy(&format!("waiting for {} to store the outputs of {}", clean(node), job.job));
    let request = v1::StoreOutputsRequest { job: job.job.clone() };
    let mut told = answer(client.nodes().store_outputs(request)).await?;
    // No deadline, because large outputs take long; the connection notices a daemon that is gone.
    let stored = told.message().await.map_err(|status| client::fault(&status))?.unwrap_or_default();
    output.rest();
    let v1::StoreOutputsResponse { files, bytes, left_out, .. } = stored;
    if args.json {
        return output.json(&json!({ "job": job.job, "files": files, "bytes": bytes, "left_out": left_out }));
    }
    output.note(&match files {
        0 => format!("{} left no outputs", job.job),
        _ => format!(
            "stored {}, {}; get them: agentctl download {}",
            count(files, "file"),
            size::binary(bytes),
            job.job
        ),
    });
    tell_left_out(&left_out, output);
    Ok(())
}
