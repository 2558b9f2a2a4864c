//! `show`: everything about one job.

use std::path::Path;

use agent_model::node::Gpu;
use agent_model::{Clock, SystemClock, Timestamp, size};
use serde_json::{Value, json};

use super::gpus;
use super::view::{JobView, NodeView, environment_words};
use crate::cli::JobJsonArgs;
use crate::client::Client;
use crate::failure::Failure;
use crate::output::text::{Tone, age, clean, count, duration, moment, wrap};
use crate::output::{Output, Paper, fault};

/// Shows one job.
pub(super) async fn show(
    args: &JobJsonArgs,
    socket: Option<&Path>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(socket).await?;
    let job = JobView::try_from(client.job(&args.job).await?)?;
    let nodes = match job.spec.resources.gpus > 0 && !job.has_ended() {
        true => client.machines().await?.nodes,
        false => Vec::new(),
    };
    let nodes = nodes.into_iter().map(NodeView::try_from).collect::<Result<Vec<_>, _>>()?;
    let gpus = gpus::of_job(&job.job, &nodes);
    if args.json {
        return output.json(&document(&job, &gpus));
    }
    let paper = output.paper();
    output.print(&render(&job, &gpus, SystemClock.now(), paper))
}

fn document(job: &JobView, gpus: &[(&str, &Gpu)]) -> Value {
    let mut document = serde_json::to_value(job).unwrap_or_default(); // our own plain struct
    document["spec"] = job.spec_json();
    let gpu = |(node, gpu): &(&str, &Gpu)| json!({ "node": node, "gpu": gpu });
    document["gpus"] = gpus.iter().map(gpu).collect();
    document
}

fn render(job: &JobView, gpus: &[(&str, &Gpu)], now: Timestamp, paper: Paper) -> String {
    let mut text = String::new();
    let gpus: Vec<String> = gpus.iter().map(|(_, gpu)| gpus::line(gpu)).collect();
    let gpus = (!gpus.is_empty()).then(|| ("gpus", gpus.join("\n")));
    for (label, value) in facts(job, now).into_iter().chain(gpus) {
        let label = paper.ink.paint(Tone::Strong, &format!("{label:<12}")).into_owned();
        let lines: Vec<String> = value.lines().map(|line| wrap(&clean(line), paper.width, 13)).collect();
        text.push_str(&format!("{label} {}\n", lines.join(&format!("\n{:13}", ""))));
    }
    if let Some(cause) = job.cause() {
        text.push('\n');
        text.push_str(&fault::render(cause, paper));
    }
    text
}

/// Label and value of all there is to say.
fn facts(job: &JobView, now: Timestamp) -> Vec<(&'static str, String)> {
    let spec = &job.spec;
    let mut facts = vec![("job", job.job.clone()), ("state", state(job)), ("title", job.title.clone())];
    let mut add = |label, value: Option<String>| facts.extend(value.map(|value| (label, value)));
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let pairs = |map: &std::collections::BTreeMap<String, String>| {
        some(&map.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("\n"))
    };
    add("now", some(&job.detail));
    add("description", some(spec.description.trim()));
    add("experiment", some(&job.experiment));
    add("tags", pairs(&spec.tags));
    add("command", some(spec.command.trim()));
    add("code", spec.code.map(|digest| digest.hex()[..12].to_owned()));
    add("environment", Some(environment_words(&spec.environment)));
    add("variables", pairs(&spec.environment_variables));
    add("needs", needs(job));
    let submitted = Timestamp(job.submitted_ms);
    let by = if job.owner.is_empty() { String::new() } else { format!(" by {}", job.owner) };
    add("submitted", Some(format!("{} ({} ago){by}", moment(submitted), age(submitted, now))));
    add("ran for", job.duration(now).map(duration));
    let node = job.replicas.first().map(|replica| format!(" on {}", replica.node)).unwrap_or_default();
    add("attempt", (job.attempt > 0).then(|| format!("{}{node}", job.attempt)));
    let stored =
        |a: &super::view::ArtifactsView| format!("{}, {}", count(a.files, "file"), size::decimal(a.bytes));
    add("outputs", job.artifacts.as_ref().map(stored));
    facts
}

fn state(job: &JobView) -> String {
    let canceling = if job.cancel_requested && !job.has_ended() { ", cancel requested" } else { "" };
    match job.exit_code {
        Some(code) => format!("{}, exit code {code}{canceling}", job.state),
        None => format!("{}{canceling}", job.state),
    }
}

fn needs(job: &JobView) -> Option<String> {
    let resources = &job.spec.resources;
    let mut needs = Vec::new();
    if resources.nodes > 1 {
        needs.push(count(resources.nodes.into(), "node"));
    }
    if resources.gpus > 0 {
        needs.push(count(resources.gpus.into(), "GPU"));
    }
    if resources.memory > 0 {
        needs.push(format!("{} of memory", size::binary(resources.memory)));
    }
    needs.extend(job.spec.limits.timeout.map(|limit| format!("at most {}", duration(limit))));
    (!needs.is_empty()).then(|| needs.join(", "))
}

#[cfg(test)]
mod tests {
    use super::super::view::tests::{ended, failed};
    use super::*;
    use crate::output::text::Ink;

    const PAPER: Paper = Paper { ink: Ink::PLAIN, width: 80 };

    #[test]
    fn test_a_failed_job_is_shown_with_its_fault() {
        assert_eq!(
            render(&failed(), &[], Timestamp(1_059_000), PAPER),
            "job          train-1\n\
             state        Failed, exit code 3\n\
             title        python t.py\n\
             experiment   Default\n\
             command      python t.py\n\
             environment  python3 of the machine, as it is\n\
             submitted    1970-01-01 00:16:39 UTC (1 min ago) by root\n\
             ran for      0.4 s\n\
             attempt      1 on box\n\
             \n\
             error[RUN-101]: the command returned 3\n\
             \x20 fix: see the log\n"
        );
    }

    #[test]
    fn test_document_holds_the_specification() {
        let gpu = Gpu { index: 3, held: Some("train-1.1.0".into()), ..Gpu::default() };
        let document = document(&ended(), &[("box", &gpu)]);
        assert_eq!(
            (&document["gpus"][0]["node"], &document["gpus"][0]["gpu"]["index"]),
            (&json!("box"), &json!(3))
        );
        assert_eq!(document["spec"]["command"], "python t.py");
        assert_eq!(document["spec"]["environment"]["kind"], "host");
        assert_eq!(document["spec"]["limits"]["grace_s"], 30.0);
        assert_eq!(document["artifacts"]["files"], 2);
    }
}
