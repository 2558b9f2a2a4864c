//! `cancel`: ask jobs to end. Asking twice, or asking of a job that ended, changes nothing.
//!
//! [`choose`] finds the jobs by name, state or experiment, and [`each`] does something with each of them, for every
//! command that takes many jobs.

use agent_proto::v1;
use futures_util::StreamExt;
use serde_json::json;

use super::jobs::{JobQuery, list};
use super::view::JobView;
use crate::cli::{CancelArgs, Selection};
use crate::client::{self, Client, Target, answer, owners_called};
use crate::failure::Failure;
use crate::output::Output;

/// Asks each job to end, and waits for that if wanted. Every job is asked; the first failure is returned.
pub(super) async fn cancel(
    args: &CancelArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let names = choose(&client, &args.choice, true, |_| true, output).await?;
    let (mut asked, first) =
        each(&names, output, async |given, output| ask(&client, given, output).await).await;
    if args.wait {
        for (job, state) in &mut asked {
            *state = wait(&client, job, output).await?;
        }
    }
    if args.json {
        let jobs = asked.iter().map(|(job, state)| json!({ "job": job, "state": state }));
        output.json(&json!({ "jobs": jobs.collect::<Vec<_>>() }))?;
    }
    first.map_or(Ok(()), Err)
}

/// The given names; if there are none, the jobs of the caller, or of the one who is named, that match `choice` and `fit`;
/// with `active` only those that have not ended.
pub(super) async fn choose(
    client: &Client,
    choice: &Selection,
    active: bool,
    fit: impl Fn(&JobView) -> bool,
    output: &mut Output,
) -> Result<Vec<String>, Failure> {
    if !choice.jobs.is_empty() {
        return Ok(choice.jobs.clone());
    }
    let wanted = JobQuery {
        owners: choice.user.as_deref().map_or_else(|| vec![client.own()], owners_called),
        states: choice.state.iter().cloned().collect(),
        experiment: choice.experiment.clone(),
        active,
        ..JobQuery::default()
    };
    let jobs = list(client, &wanted).await?.0.into_iter().filter(fit);
    let names: Vec<String> = jobs.map(|job| job.job).collect();
    if names.is_empty() {
        output.note(&match &choice.user {
            Some(user) => format!("{user} has no such job"),
            None => "you have no such job".to_owned(),
        });
    }
    Ok(names)
}

/// Does something with each of these jobs. Returns what came of it, and the first failure; the faults after that are told.
pub(super) async fn each<T>(
    names: &[String],
    output: &mut Output,
    work: impl AsyncFn(&str, &mut Output) -> Result<T, Failure>,
) -> (Vec<T>, Option<Failure>) {
    let (mut done, mut first) = (Vec::new(), None);
    for given in names {
        match work(given, output).await {
            Ok(one) => done.push(one),
            Err(Failure::Fault(fault)) if first.is_some() => output.fault(&fault),
            Err(failure) => first = Some(failure),
        }
    }
    (done, first)
}

/// Returns the job's whole name and its state.
async fn ask(client: &Client, given: &str, output: &mut Output) -> Result<(String, String), Failure> {
    let name = client.named(given).await?;
    let request = v1::CancelJobRequest { job: name.clone() };
    let job = JobView::try_from(answer(client.jobs().cancel(request)).await?)?;
    output.note(&match job.has_ended() {
        true => format!("{name}: {}", job.state),
        false if job.started_ms.is_none() => format!("{name}: asked to end before its command begins"),
        false if job.is_storing() => {
            format!("{name}: asked to end; outputs that are not stored yet stay on its machine")
        }
        false => format!("{name}: asked to end; it has {} for it", grace(&job)),
    });
    Ok((name, job.state))
}

fn grace(job: &JobView) -> String {
    crate::output::text::duration(job.spec.limits.grace())
}

/// Returns the state in which it ended.
async fn wait(client: &Client, name: &str, output: &mut Output) -> Result<String, Failure> {
    output.busy(&format!("waiting for {name} to end"));
    let request = v1::GetJobRequest { job: name.to_owned(), ..Default::default() };
    let mut changes = answer(client.jobs().watch(request)).await?;
    let mut state = String::new();
    while let Some(job) = changes.next().await {
        state = job.map_err(|status| client::fault(&status))?.state;
    }
    output.note(&format!("{name}: {state}"));
    Ok(state)
}
