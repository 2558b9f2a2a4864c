//! `show`: everything about one job.

use agent_model::job::Input;
use agent_model::node::Gpu;
use agent_model::outcome::Usage;
use agent_model::system::SystemLine;
use agent_model::{Clock, SystemClock, Timestamp, size};
use serde_json::{Value, json};

use super::download::left_out_of;
use super::jobs::watch;
use super::metrics::system;
use super::view::{JobView, NodeView, environment_words};
use super::{as_job, gpus, pipelines, sweeps};
use crate::cli::ShowArgs;
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::text::{Tone, ago, clean, count, duration, moment, wrap};
use crate::output::{Output, Paper, fault};

/// Shows one job.
pub(super) async fn show(args: &ShowArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let job = JobView::try_from(client.job(&args.job).await?)?;
    if args.as_job {
        let text = as_job::text(&client, &job, args.locked, output).await?;
        return output.print(&text);
    }
    let nodes = match job.spec.resources.gpus > 0 && !job.has_ended() {
        true => client.machines().await?.nodes,
        false => Vec::new(),
    };
    let nodes = nodes.into_iter().map(NodeView::try_from).collect::<Result<Vec<_>, _>>()?;
    let gpus = gpus::of_job(&job.job, &nodes);
    let takes = system::now(&client, &job).await;
    if args.json {
        let mut document = document(&job, &gpus);
        document["takes"] = takes.as_ref().map(system::values).into();
        if job.spec.sweep.is_some() {
            let trial = |trial: &JobView| json!({ "job": trial.job, "index": trial.index, "state": trial.state, "trial": trial.trial });
            document["trials"] = sweeps::trials(&client, &job).await?.iter().map(trial).collect();
        }
        return output.json(&document);
    }
    if args.watch {
        return watch(&client, output, async |paper| whole(&client, &args.job, paper).await).await;
    }
    let paper = output.paper();
    let text = render(&job, &gpus, takes.as_ref(), SystemClock.now(), paper)
        + &of_parts(&client, &job, paper).await?;
    output.print(&text)
}

/// A job as it stands, with the trials of a sweep or the steps of a pipeline.
async fn whole(client: &Client, given: &str, paper: Paper) -> Result<String, Failure> {
    let job = JobView::try_from(client.job(given).await?)?;
    let takes = system::now(client, &job).await;
    Ok(render(&job, &[], takes.as_ref(), SystemClock.now(), paper) + &of_parts(client, &job, paper).await?)
}

/// The trials of a sweep, or the steps of a pipeline, as a table; of any other job nothing.
async fn of_parts(client: &Client, job: &JobView, paper: Paper) -> Result<String, Failure> {
    let Some(sweep) = &job.spec.sweep else { return pipelines::steps(client, job, paper).await };
    Ok(format!("\n{}", sweeps::table(sweep, &sweeps::trials(client, job).await?, paper)))
}

fn document(job: &JobView, gpus: &[(&str, &Gpu)]) -> Value {
    let mut document = serde_json::to_value(job).unwrap_or_default(); // our own plain struct
    document["spec"] = job.spec_json();
    document["usage"] = match job.usage() {
        Some(usage) => json!({
            "cpu_s": usage.cpu.as_secs_f64(),
            "memory_peak_bytes": usage.memory_peak,
            "memory_limit_bytes": usage.memory_limit,
        }),
        None => Value::Null,
    };
    let used = job.outcome.as_ref().and_then(|outcome| outcome.environment.as_ref());
    document["environment"] =
        used.map(|used| json!({ "key": used.key, "lock": used.lock.map(|lock| lock.to_string()) })).into();
    document["left_out"] = left_out_of(job).into();
    let gpu = |(node, gpu): &(&str, &Gpu)| json!({ "node": node, "gpu": gpu });
    document["gpus"] = gpus.iter().map(gpu).collect();
    document
}

fn render(
    job: &JobView,
    gpus: &[(&str, &Gpu)],
    takes: Option<&SystemLine>,
    now: Timestamp,
    paper: Paper,
) -> String {
    let mut text = String::new();
    let gpus: Vec<String> = gpus.iter().map(|(_, gpu)| gpus::line(gpu)).collect();
    let gpus = (!gpus.is_empty()).then(|| ("gpus", gpus.join("\n")));
    let takes = takes.map(|line| ("takes now", system::words(line)));
    for (label, value) in facts(job, now).into_iter().chain(takes).chain(gpus) {
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

/// Label and value of every fact about a job.
fn facts(job: &JobView, now: Timestamp) -> Vec<(&'static str, String)> {
    let spec = &job.spec;
    let mut facts = vec![("job", job.job.clone()), ("state", state(job)), ("title", job.title.clone())];
    let mut add = |label, value: Option<String>| facts.extend(value.map(|value| (label, value)));
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let pairs = |map: &std::collections::BTreeMap<String, String>| {
        some(&map.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("\n"))
    };
    // The environment of a command that runs is made.
    let is_over = job.state == "Running" && job.detail.starts_with("environment ");
    add("now", some(&job.detail).filter(|_| !is_over));
    if spec.sweep.is_none() && spec.pipeline.is_none() {
        add("array", spec.array.as_ref().map(ToString::to_string));
    }
    add("best", sweeps::best_words(job));
    add("trial", sweeps::trial_words(job));
    match &spec.pipeline {
        // The table below has each of them.
        Some(_) => add("steps", job.tasks.as_ref().map(|tasks| tasks.counts())),
        None => {
            let label = if spec.sweep.is_some() { "trials" } else { "tasks" };
            add(label, job.tasks.as_ref().map(|tasks| tasks.lines()));
        }
    }
    add("begin", spec.begin.map(|at| format!("not before {}", moment(at))));
    add("deadline", spec.deadline.map(|at| format!("to have ended by {}", moment(at))));
    add("description", some(spec.description.trim()));
    add("experiment", some(&job.experiment));
    add("tags", pairs(&spec.tags));
    add("command", some(spec.command.trim()));
    let inputs: Vec<String> = spec.inputs.iter().map(|(name, input)| input_words(name, input)).collect();
    add("inputs", some(&inputs.join("\n")));
    let writes = spec.outputs.iter().map(|(name, output)| match output.is_file() {
        true => format!("{name} (a file)"),
        false => name.clone(),
    });
    add("writes", some(&writes.collect::<Vec<_>>().join(", ")));
    add("code", spec.code.map(|digest| digest.hex()[..12].to_owned()));
    add("environment", spec.pipeline.is_none().then(|| environment_words(&spec.environment)));
    add("variables", pairs(&spec.environment_variables));
    add("needs", needs(job));
    let after: Vec<String> = spec.predecessors.iter().map(ToString::to_string).collect();
    add("is to", some(&after.join("\n")));
    add("resumes", spec.resumes.map(|left| left.to_string()));
    let submitted = Timestamp(job.submitted_ms);
    let by = if job.owner.is_empty() { String::new() } else { format!(" by {}", job.owner) };
    add("submitted", Some(format!("{} ({}){by}", moment(submitted), ago(submitted, now))));
    add("ran for", job.duration(now).map(duration));
    let used = |usage: Usage| {
        let each = if job.ranks() > 1 { " on a node" } else { "" };
        let peak = match usage.memory_limit {
            Some(limit) => format!("{} of {} memory", size::binary(usage.memory_peak), size::binary(limit)),
            None => format!("{} of memory", size::binary(usage.memory_peak)),
        };
        format!("{} of CPU time, at most {peak}{each}", duration(usage.cpu))
    };
    add("used", job.usage().map(used));
    let alone = job.replicas.first().filter(|_| job.ranks() == 1);
    let node = alone.map(|replica| format!(" on {}", replica.node)).unwrap_or_default();
    add("attempt", (job.attempt > 0 && job.tasks.is_none()).then(|| format!("{}{node}", job.attempt)));
    add("ranks", ranks(job));
    let stored =
        |a: &super::view::ArtifactsView| format!("{}, {}", count(a.files, "file"), size::binary(a.bytes));
    add("outputs", job.artifacts.as_ref().map(stored));
    add("left out", some(&left_out_of(job).join("\n")));
    let sent: Vec<String> = job.sent_to().map(|(name, uri)| format!("{name} to {uri}")).collect();
    add("sends", some(&sent.join("\n")));
    let named: Vec<String> = job.named.iter().map(ToString::to_string).collect();
    add("named", some(&named.join("\n")));
    facts
}

/// An input in a line.
fn input_words(name: &str, input: &Input) -> String {
    match input {
        Input::Literal(value) => format!("{name} = {value}"),
        Input::Folder(root) => format!("{name}: a folder that was sent, {}", &root.hex()[..12]),
        Input::File { name: file, .. } => format!("{name}: {file}, which was sent"),
        Input::Data(data) => format!("{name}: {}", data.uri),
    }
}

/// Each rank of a job on several nodes in a line.
fn ranks(job: &JobView) -> Option<String> {
    let line = |replica: &super::view::ReplicaView| {
        let now = match (&replica.verdict, replica.exit_code) {
            (verdict, Some(code)) if !verdict.is_empty() => format!("{verdict}, exit code {code}"),
            (verdict, None) if !verdict.is_empty() => verdict.clone(),
            _ if replica.step.is_empty() => "not taken yet".to_owned(),
            _ if replica.detail.is_empty() => replica.step.clone(),
            _ => format!("{}: {}", replica.step, replica.detail),
        };
        let at = if replica.address.is_empty() { String::new() } else { format!(" at {}", replica.address) };
        format!("{} on {}{at}: {now}", replica.rank, replica.node)
    };
    let lines: Vec<String> = job.replicas.iter().map(line).collect();
    (job.ranks() > 1 && !lines.is_empty()).then(|| lines.join("\n"))
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
    needs.extend(job.spec.distribution.as_ref().map(|distribution| distribution.name().to_owned()));
    if resources.gpus > 0 {
        needs.push(count(resources.gpus.into(), "GPU"));
    }
    if resources.memory > 0 {
        needs.push(format!("{} of memory", size::binary(resources.memory)));
    }
    if resources.cpus > 0 {
        needs.push(count(resources.cpus.into(), "CPU"));
    }
    needs.extend(resources.labels.iter().map(|(key, value)| format!("{key}={value}")));
    needs.extend(job.spec.limits.timeout.map(|limit| format!("at most {}", duration(limit))));
    (!needs.is_empty()).then(|| needs.join(", "))
}

#[cfg(test)]
mod tests {
    use super::super::view::tests::{ended, failed};
    use super::*;
    use crate::output::pretty;
    use crate::output::text::Ink;

    const PAPER: Paper = Paper { ink: Ink::PLAIN, width: 80 };

    #[test]
    fn test_a_failed_job_is_shown_with_its_fault() {
        insta::assert_snapshot!(render(&failed(), &[], None, Timestamp(1_059_000), PAPER), @r"
            job          train-1
            state        Failed, exit code 3
            title        python t.py
            experiment   Default
            command      python t.py
            environment  python3 of the machine, as it is
            submitted    1970-01-01 00:16:39 UTC (1 min ago) by root
            ran for      0.4 s
            used         0.7 s of CPU time, at most 143.1 MiB of 1 GiB memory
            attempt      1 on box

            error[RUN-101]: the command returned 3
              fix: see the log
        ");
    }

    #[test]
    fn test_inputs_are_shown_with_their_values() {
        let mut draft = agent_model::JobDraft::from(ended().spec);
        draft.command = "python t.py --C ${{inputs.C}}".into();
        draft.inputs.insert("C".into(), Input::Literal("0.5".into()));
        draft.inputs.insert("iris".into(), Input::Folder(agent_model::Digest::EMPTY));
        let job = JobView { spec: draft.validate().unwrap(), ..ended() };
        let text = render(&job, &[], None, Timestamp(1_059_000), PAPER);
        let folder = format!("iris: a folder that was sent, {}", &agent_model::Digest::EMPTY.hex()[..12]);
        assert!(text.contains(&format!("inputs       C = 0.5\n             {folder}\n")), "{text}");
        assert_eq!(JobView { title: "python t.py".into(), ..job }.what(), "python t.py --C 0.5");
    }

    #[test]
    fn test_document_holds_the_specification() {
        let gpu = Gpu { index: 3, held: Some("train-1.1.0".into()), ..Gpu::default() };
        insta::assert_snapshot!("json", pretty(&document(&ended(), &[("box", &gpu)])));
    }
}
