//! `preempt`: an operator says that a machine will be taken away, or that it will not.

use agent_model::Timestamp;
use agent_proto::v1;
use serde::Serialize;
use serde_json::json;

use super::drain::{introduce, jobs_on, names, the_only_one};
use super::view::NodeView;
use crate::cli::PreemptArgs;
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::clean;

/// The notice that a machine will be taken away.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct PreemptionView {
    pub(crate) deadline_ms: u64,
    pub(crate) reason: String,
}

impl PreemptionView {
    /// `will be taken away at 08:00:00 UTC: maintenance`
    pub(crate) fn describe(&self) -> String {
        clean(&agent_model::preemption::describe(Timestamp(self.deadline_ms), &self.reason)).into_owned()
    }
}

impl From<v1::Preemption> for PreemptionView {
    fn from(wire: v1::Preemption) -> PreemptionView {
        PreemptionView { deadline_ms: wire.deadline_ms, reason: wire.reason }
    }
}

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
