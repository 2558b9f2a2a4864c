//! `node lost`, `adopt` and `end`: what only a person can know about a machine.
//!
//! That a silent one is gone for good is the only statement that can make a job run twice, so it warns and asks for
//! confirmation.

use std::io::{BufRead, IsTerminal};

use agent_model::{Clock, SystemClock, Timestamp};
use agent_proto::v1;
use serde_json::json;

use super::view::NodeView;
use crate::cli::UnprovedArgs;
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::{ago, clean};

/// Declares a machine lost.
pub(super) async fn lost(
    name: &str,
    yes: bool,
    json: bool,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let nodes = client.machines().await?.nodes;
    if !yes && let Some(node) = nodes.into_iter().find(|node| node.node == name) {
        confirm(&NodeView::try_from(node)?, output)?;
    }
    let request = v1::DeclareLostRequest { node: name.to_owned() };
    let jobs = answer(client.nodes().declare_lost(request)).await?.jobs;
    if json {
        return output.json(&json!({ "node": name, "jobs": jobs }));
    }
    output.note(&match jobs.len() {
        0 => format!("{name} counts as lost; it had no jobs"),
        _ => format!("{name} counts as lost, and with it what it ran of: {}", jobs.join(", ")),
    });
    if !jobs.is_empty() {
        output.note("jobs that may be tried again wait for another machine; the others have failed");
    }
    Ok(())
}

/// Decides about something that a machine cannot prove that it was given.
pub(super) async fn judge(
    args: &UnprovedArgs,
    adopt: bool,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let UnprovedArgs { node, replica, json } = args;
    let request = v1::JudgeReplicaRequest { node: node.clone(), replica: replica.clone(), adopt };
    answer(client.nodes().judge_replica(request)).await?;
    if *json {
        return output.json(&json!({ "node": node, "replica": replica, "adopted": adopt }));
    }
    let job = replica.split_once('.').map_or(replica.as_str(), |(job, _)| job);
    output.note(&match adopt {
        true => format!("{replica} is adopted from {node}; see it with: agentctl show {job}"),
        false => format!("{node} ends {replica}, and keeps its files for a week"),
    });
    Ok(())
}

/// Explains what may happen, and waits for the machine's name.
fn confirm(node: &NodeView, output: &mut Output) -> Result<(), Failure> {
    if node.liveness == "ready" || node.liveness == "degraded" {
        return Ok(()); // the controller refuses, and says why
    }
    let seen = ago(Timestamp(node.last_seen_ms), SystemClock.now());
    output.say(&explain(&clean(&node.node), &seen));
    let unconfirmed = format!("nobody confirmed that {} is gone", node.node);
    match await_word(&node.node, "", unconfirmed, output)? {
        true => Ok(()),
        false => Err(Failure::refused("nothing was changed", "type the machine's name to go on")),
    }
}

/// Asks the user to type a word before something that cannot be undone; returns whether it was typed. Without a
/// terminal this is the refusal `unconfirmed`, which says what was not done.
pub(super) fn await_word(
    word: &str,
    question: &str,
    unconfirmed: String,
    output: &mut Output,
) -> Result<bool, Failure> {
    if !std::io::stdin().is_terminal() {
        return Err(Failure::refused(unconfirmed, "make certain, then repeat the command with --yes"));
    }
    output.say(&format!("{question}Type {} to go on: ", clean(word)));
    let mut typed = String::new();
    let read = std::io::stdin().lock().read_line(&mut typed);
    Ok(read.is_ok() && typed.trim() == word)
}

fn explain(node: &str, seen: &str) -> String {
    format!(
        "{node} was last heard {seen}. If it still runs and only its network is broken, its jobs run too,\n\
         and every one that is tried again then runs twice: two processes write the same checkpoints.\n\
         Go on only if it is switched off, destroyed, or its jobs were ended by hand.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_the_danger_is_named() {
        let text = explain("gpu-07", "5 min ago");
        assert!(text.contains("gpu-07 was last heard 5 min ago") && text.contains("runs twice"));
        assert!(text.lines().all(|line| line.len() <= 110));
    }
}
