//! `drain`, `undrain`, `cordon`: whether a machine gets new jobs, and waiting until the old ones have ended.

use std::process::ExitCode;
use std::time::Duration;

use agent_model::{Code, Fault};
use agent_proto::v1;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::jobs;
use super::status::another;
use super::view::{JobView, NodeView};
use crate::cli::{DrainArgs, NodeArgs};
use crate::client::{Client, Target, Whom, answer};
use crate::failure::{DETACHED, Failure};
use crate::output::Output;
use crate::output::text::count;

/// Time between two checks of the jobs that are left.
const LOOK: Duration = Duration::from_millis(500);
/// How long to wait for a daemon that is away.
const AWAY: Duration = Duration::from_secs(60);

/// Lets new jobs onto a machine, or keeps them off.
pub(super) async fn set(
    args: &NodeArgs,
    want: &str,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let whom = introduce(&client, output).await?;
    let node = ask(&client, args.node.as_deref(), want).await?;
    if args.json {
        let jobs = jobs_on(&client, &node.node).await?;
        return output.json(&json!({ "daemon": whom, "node": node, "jobs": jobs }));
    }
    output.note(&match want {
        "uncordon" => format!("{} takes new jobs again", node.node),
        _ => format!("{} takes no new jobs; those it has go on. Open it again: agentctl undrain", node.node),
    });
    Ok(())
}

/// Keeps new jobs off a machine and waits until those it has are gone.
pub(super) async fn drain(
    args: &DrainArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let client = Client::find(to).await?;
    let whom = introduce(&client, output).await?;
    let node = ask(&client, args.node.node.as_deref(), "drain").await?;
    if !args.no_wait {
        output.note(&format!("{} takes no new jobs; open it again with: agentctl undrain", node.node));
        tokio::select! {
            emptied = until_empty(&client, &node.node, args.timeout, output) => emptied?,
            _ = tokio::signal::ctrl_c() => {
                output.note("no longer waiting; the drain goes on");
                return Ok(ExitCode::from(DETACHED));
            }
        }
    }
    let left = jobs_on(&client, &node.node).await?;
    if args.node.json {
        let node = find(&client, &node.node).await?;
        output.json(&json!({ "daemon": whom, "node": node, "jobs": left }))?;
    } else if left.is_empty() {
        output.note(&format!("{} is empty", node.node));
    } else {
        output.note(&format!("{} is being drained: {}", node.node, names(&left)));
    }
    Ok(ExitCode::SUCCESS)
}

/// Reports which daemon is used, and which others run here.
pub(super) async fn introduce(client: &Client, output: &mut Output) -> Result<Whom, Failure> {
    let whom = client.whom().await?;
    output.note(&format!("speaking to {whom}"));
    client.others().await.iter().for_each(|other| output.warn(&another(other)));
    Ok(whom)
}

async fn ask(client: &Client, node: Option<&str>, want: &str) -> Result<NodeView, Failure> {
    let node = match node {
        Some(node) => node.to_owned(),
        None => the_only_one(client).await?,
    };
    let request = v1::SetEligibilityRequest { node, want: want.to_owned() };
    Ok(NodeView::try_from(answer(client.nodes().set_eligibility(request)).await?)?)
}

pub(super) async fn the_only_one(client: &Client) -> Result<String, Failure> {
    let nodes = client.machines().await?.nodes;
    match &nodes[..] {
        [only] => Ok(only.node.clone()),
        [] => Err(Failure::refused("no machine has joined yet", "look again with: agentctl nodes")),
        several => {
            let names: Vec<_> = several.iter().map(|node| node.node.as_str()).collect();
            Err(Failure::refused("which machine?", format!("name one of: {}", names.join(", "))))
        }
    }
}

async fn find(client: &Client, name: &str) -> Result<NodeView, Failure> {
    let nodes = client.machines().await?.nodes;
    let gone = || Fault::new(Code::NodeUnknown, format!("there is no machine `{name}` any more"));
    Ok(NodeView::try_from(nodes.into_iter().find(|node| node.node == name).ok_or_else(gone)?)?)
}

/// The jobs that have not ended and are on this machine.
pub(super) async fn jobs_on(client: &Client, node: &str) -> Result<Vec<JobView>, Failure> {
    let wanted = jobs::JobQuery { active: true, ..jobs::JobQuery::default() };
    let (mut all, _) = jobs::list(client, &wanted).await?;
    all.retain(|job| job.replicas.iter().any(|replica| replica.node == node));
    Ok(all)
}

/// Waits until no job is left on a machine, or this is over; those that are left then. `look` sees them each time.
pub(super) async fn left_on(
    client: &Client,
    node: &str,
    end: Option<Instant>,
    look: &mut dyn FnMut(&[JobView]),
) -> Result<Vec<JobView>, Failure> {
    loop {
        let left = jobs_on(client, node).await?;
        if left.is_empty() {
            return Ok(left);
        }
        look(&left);
        if end.is_some_and(|end| Instant::now() >= end) {
            return Ok(left);
        }
        sleep(LOOK).await;
    }
}

/// Reports the jobs that are waited for whenever they change, until none is left.
async fn until_empty(
    client: &Client,
    node: &str,
    timeout: Option<u64>,
    output: &mut Output,
) -> Result<(), Failure> {
    let end = timeout.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut said = String::new();
    loop {
        let mut tell = |left: &[JobView]| {
            let waits = waits_for(left);
            if waits != said && !output.is_lively() {
                output.note(&waits);
            }
            output.busy(&waits);
            said = waits;
        };
        let left = match left_on(client, node, end, &mut tell).await {
            Ok(left) => left,
            Err(Failure::Fault(fault)) if fault.code == Code::Unreachable => {
                output.note("the daemon went away; its jobs go on; waiting for it to come back");
                if !client.until_back(Instant::now() + AWAY).await {
                    return Err(Failure::Fault(fault));
                }
                continue;
            }
            Err(failure) => return Err(failure),
        };
        if left.is_empty() {
            return Ok(());
        }
        output.rest();
        let what = format!("{node} is not empty after {} s: {}", timeout.unwrap_or(0), names(&left));
        return Err(Failure::refused(
            what,
            "the drain goes on; wait longer, or end them: agentctl cancel JOB",
        ));
    }
}

fn waits_for(left: &[JobView]) -> String {
    format!("waiting for {}: {}", count(left.len() as u64, "job"), names(left))
}

/// The first few jobs, with their states.
pub(super) fn names(jobs: &[JobView]) -> String {
    const SHOWN: usize = 4;
    let mut names: Vec<String> =
        jobs.iter().take(SHOWN).map(|job| format!("{} ({})", job.job, job.state)).collect();
    if jobs.len() > SHOWN {
        names.push(format!("and {} more", jobs.len() - SHOWN));
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::view::tests::failed;
    use super::*;

    #[test]
    fn test_what_is_waited_for_is_named() {
        let jobs: Vec<JobView> = (0..6).map(|_| failed()).collect();
        assert_eq!(waits_for(&jobs[..1]), "waiting for 1 job: train-1 (Failed)");
        assert!(waits_for(&jobs).starts_with("waiting for 6 jobs: train-1"));
        assert!(waits_for(&jobs).ends_with("and 2 more"));
    }
}
