//! `files`, and `run` and `submit` with `--dry-run`: list what would be sent, what not, and why.

use std::path::Path;

use serde_json::json;

use crate::client::{Client, Target, own_directories};
use crate::failure::Failure;
use crate::output::Output;
use crate::prepare::{Changes, Plan, SentPart, describe};

/// Lists what a job of this target would send, whatever its command.
pub(super) async fn files(
    target: &Path,
    json: bool,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let command = vec!["true".to_owned()];
    list(&Plan::read(target, Changes { command, ..Changes::default() })?, json, to, output).await
}

/// Lists what a plan would send. No daemon is needed; a running one names its own directories, which are never sent.
pub(super) async fn list(
    plan: &Plan,
    json: bool,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let never = match Client::find(to).await {
        Ok(client) => client.own_directories().await?,
        Err(_) => own_directories(None),
    };
    output.busy("looking");
    let parts = plan.survey(&never).await;
    output.rest();
    let parts = parts?;
    if json {
        return output.json(&json!({ "parts": parts.iter().map(SentPart::json).collect::<Vec<_>>() }));
    }
    let paper = output.paper();
    output.print(&describe(&parts, paper))
}
