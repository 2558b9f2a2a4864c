//! `preempt`: an operator says that a machine will be taken away, or that it will not.

use std::time::Duration;

use agent_proto::v1;
use serde_json::json;
use tokio::time::Instant;

use super::drain::{introduce, jobs_on, left_on, names, the_only_one};
use super::view::NodeView;
use crate::cli::PreemptArgs;
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::Output;

/// The notice that the jobs of a machine get which is to be removed with them.
const LAST_WORD: Duration = Duration::from_secs(20);
/// How much longer they are waited for.
const IN_DOUBT: Duration = Duration::from_secs(20);

/// Says so to the controller.
pub(super) async fn preempt(
    args: &PreemptArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let whom = introduce(&client, output).await?;
    let name = match &args.node.node {
        Some(node) => node.clone(),
        None => the_only_one(&client).await?,
    };
    let request = v1::PreemptRequest {
        node: name,
        in_ms: u64::try_from(args.after.as_millis()).unwrap_or(u64::MAX),
        reason: args.reason.clone(),
        withdraw: args.withdraw,
    };
    let node = NodeView::try_from(answer(client.nodes().preempt(request)).await?)?;
    let jobs = jobs_on(&client, &node.node).await?;
    if args.node.json {
        return output.json(&json!({ "daemon": whom, "node": node, "jobs": jobs }));
    }
    output.note(&match &node.preemption {
        None => format!("{} stays: it takes new jobs again", node.node),
        Some(told) if args.withdraw => {
            format!(
                "its provider says so too, and only that can withdraw it: {} {}",
                node.node,
                told.describe()
            )
        }
        Some(told) => format!("{} {}", node.node, told.describe()),
    });
    if !jobs.is_empty() && !args.withdraw {
        let told = "they are told, and start again elsewhere";
        output.note(&format!("it has {}: {told}", names(&jobs)));
    }
    Ok(())
}

/// Before a machine that answers is removed with its jobs: has them end there, so that none starts elsewhere while it still
/// runs here. One that does not answer, or jobs that do not end, are left to what follows, which is said.
pub(super) async fn end_jobs(client: &Client, name: &str, say: &mut dyn FnMut(&str)) -> Result<(), Failure> {
    let node = client.machines().await?.nodes.into_iter().find(|node| node.node == name);
    let Some(node) = node.map(NodeView::try_from).transpose()? else { return Ok(()) };
    let jobs = jobs_on(client, name).await?;
    if jobs.is_empty() {
        return Ok(());
    }
    if !matches!(node.liveness.as_str(), "ready" | "degraded") {
        say(&format!("{name} does not answer: it ends {} when it hears of its removal", names(&jobs)));
        return Ok(());
    }
    let seconds = LAST_WORD.as_secs();
    say(&format!("{} on {name} get {seconds} s to end, and start elsewhere if they may", names(&jobs)));
    let request = v1::PreemptRequest {
        node: name.to_owned(),
        in_ms: seconds * 1000,
        reason: "it is being removed".to_owned(),
        withdraw: false,
    };
    answer(client.nodes().preempt(request)).await?;
    let patience = LAST_WORD + IN_DOUBT;
    let left = left_on(client, name, Some(Instant::now() + patience), &mut |_| {}).await?;
    if !left.is_empty() {
        say(&format!(
            "{} did not end in {} s: {name} ends what is left when it hears of its removal, and for some seconds \
             it may run twice",
            names(&left),
            patience.as_secs()
        ));
    }
    Ok(())
}
