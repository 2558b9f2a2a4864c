//! `files`, and `run` and `submit` with `--dry-run`: list what would be sent, what not, and why.

use std::path::Path;

use crate::client::{Client, Target, own_directories};
use crate::failure::Failure;
use crate::output::Output;
use crate::prepare::{Changes, Plan};

/// Lists what a job of this target would send, whatever its command.
pub(super) async fn files(target: &Path, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let command = vec!["true".to_owned()];
    list(&Plan::read(target, Changes { command, ..Changes::default() })?, to, output).await
}

/// Lists what a plan would send. No daemon is needed; a running one names its own directories, which are never sent.
pub(super) async fn list(plan: &Plan, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let never = match Client::find(to).await {
        Ok(client) => client.own_directories().await?,
        Err(_) => own_directories(None),
    };
    let paper = output.paper();
    output.busy("looking");
    let listed = plan.survey(&never, paper).await;
    output.rest();
    output.print(&listed?)
}
