//! `set`: change jobs that were submitted.

use agent_model::job::Change;
use agent_proto::change_request;
use serde_json::{Value, json};

use super::cancel::{choose, each};
use super::view::JobView;
use crate::cli::SetArgs;
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::{count, duration, moment};

/// Changes each job. Every job is asked; the first failure is returned.
pub(super) async fn set(args: &SetArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let change = args.change();
    let fits = |job: &JobView| job.state == "Queued" || job.tasks.is_some() || change.held.is_none();
    let names = choose(&client, &args.choice, true, fits, output).await?;
    let (changed, first) =
        each(&names, output, async |given, output| ask(&client, given, &change, output).await).await;
    if args.json {
        let changed: Vec<Value> = changed.iter().map(document).collect();
        output.json(&json!({ "jobs": changed }))?;
    }
    first.map_or(Ok(()), Err)
}

async fn ask(client: &Client, given: &str, change: &Change, output: &mut Output) -> Result<JobView, Failure> {
    let name = client.named(given).await?;
    let asked = answer(client.jobs().change(change_request(name.clone(), change))).await;
    let job = JobView::try_from(asked.map_err(|failure| named(failure, &name))?)?;
    output.note(&format!("{name}: {}", words(&job, change)));
    Ok(job)
}

/// A fault that says which job it is about: several may be asked.
fn named(failure: Failure, name: &str) -> Failure {
    match failure {
        Failure::Fault(mut fault) if !fault.what.contains(name) => {
            fault.what = format!("{name}: {}", fault.what);
            Failure::Fault(fault)
        }
        failure => failure,
    }
}

/// How it stands now, of what was to be changed: `priority high, at most 8 h, 2 GPUs, held`.
fn words(job: &JobView, change: &Change) -> String {
    let needs = &job.spec.resources;
    let held = change.held.map(|held| if held { "held" } else { "released" }.to_owned());
    let parts = [
        change.priority.map(|_| format!("priority {}", job.priority)),
        change.timeout.and(job.spec.limits.timeout).map(|limit| format!("at most {}", duration(limit))),
        change.gpus.map(|_| count(needs.gpus.into(), "GPU")),
        change.cpus.map(|_| count(needs.cpus.into(), "CPU")),
        change.memory.map(|_| agent_model::size::binary(needs.memory) + " of memory"),
        change.begin.map(|_| {
            job.spec.begin.map_or("starts at once".to_owned(), |at| format!("not before {}", moment(at)))
        }),
        change.deadline.map(|_| {
            job.spec
                .deadline
                .map_or("no deadline".to_owned(), |at| format!("to have ended by {}", moment(at)))
        }),
        held,
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn document(job: &JobView) -> Value {
    let needs = &job.spec.resources;
    json!({
        "job": job.job,
        "state": job.state,
        "detail": job.detail,
        "priority": job.priority,
        "timeout_s": job.spec.limits.timeout.map(|limit| limit.as_secs_f64()),
        "begin_ms": job.begin_ms,
        "deadline_ms": job.deadline_ms,
        "gpus": needs.gpus,
        "cpus": needs.cpus,
        "memory_bytes": needs.memory,
    })
}
