//! `submit`: a directory or job file becomes a waiting job.
//!
//! draft → validate → ingest → one call.

use std::path::PathBuf;

use agent_model::job::{Predecessor, Resources, WantedEnd};
use agent_model::node::Inventory;
use agent_model::{Code, Fault, size};
use serde_json::json;

use super::view::NodeView;
use super::{as_job, files};
use crate::cli::{SubmitArgs, SubmitOnlyArgs, variable};
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::{clean, count};
use crate::prepare::{Care, Changes, Plan, make_sweep};

/// Submits and prints the job's name.
pub(super) async fn submit(
    args: SubmitOnlyArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    if args.submit.dry_run {
        return dry_run(args.submit, to, output).await;
    }
    let Placed { job, .. } = place(args.submit, to, output).await?;
    tell_name(&job, args.json, output)
}

/// Prints the name of a new job.
pub(super) fn tell_name(job: &str, json: bool, output: &mut Output) -> Result<(), Failure> {
    if json { output.json(&json!({ "job": job })) } else { output.print(&format!("{job}\n")) }
}

/// Lists what would be sent, and sends nothing.
pub(super) async fn dry_run(
    args: SubmitArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    files::list(&plan(&args)?, false, to, output).await
}

fn plan(args: &SubmitArgs) -> Result<Plan, Fault> {
    let SubmitArgs { target, config, source_directory: source, experiment, name, .. } = args.clone();
    let SubmitArgs { set, env, secret: secrets, command, needs, .. } = args.clone();
    let SubmitArgs { force_rerun, allow_unknown, env_file, .. } = args.clone();
    let changes = Changes {
        config,
        source,
        experiment,
        name,
        command,
        set,
        env,
        secrets,
        needs,
        force_rerun,
        allow_unknown,
        env_file,
    };
    let plan = Plan::read(&target, changes)?;
    match args.of_one_process().first().filter(|_| plan.pipeline.is_some()) {
        None => Ok(plan),
        Some(option) => Err(Fault::new(Code::JobInvalid, format!("a pipeline takes no {option}"))
            .why("each of its steps is a job of its own")
            .fix("leave it out, and write in the file what a step needs")),
    }
}

/// A variable of arrays in a command of several words, which no shell sees.
fn unreplaced(command: &[String]) -> Option<&str> {
    let is_one = |word: &&String| word.contains("$AGENTD_ARRAY_") || word.contains("${AGENTD_ARRAY_");
    command.iter().find(is_one).filter(|_| command.len() > 1).map(String::as_str)
}

/// Says what no machine that is here can ever give, or refuses the job for it. Where pools make machines nobody knows.
async fn fitting(client: &Client, plan: &Plan, strict: bool, output: &mut Output) -> Result<(), Failure> {
    let wanted = plan.resources();
    let asks = |wants: &&Resources| wants.nodes > 1 || wants.gpus > 0 || wants.cpus > 0 || wants.memory > 0;
    if !wanted.iter().any(asks) {
        return Ok(());
    }
    client.settle().await?;
    let nodes = client.machines().await?.nodes;
    let nodes = nodes.into_iter().map(NodeView::try_from).collect::<Result<Vec<_>, _>>()?;
    let Some(lacks) = wanted.iter().find_map(|wants| too_large(wants, &nodes)) else { return Ok(()) };
    if !client.all_pools().await?.pools.is_empty() {
        return Ok(());
    }
    if strict {
        return Err(Failure::refused(format!("the job would wait for ever: {lacks}"), "ask for less"));
    }
    output.warn(&format!("{lacks}: the job waits until one can (--strict refuses such a job)"));
    Ok(())
}

/// What none of the machines has for jobs, or too few.
fn too_large(wants: &Resources, nodes: &[NodeView]) -> Option<String> {
    let largest = |of: fn(&Inventory) -> u64| {
        let all = nodes.iter().map(|node| (of(&node.inventory), node.node.as_str()));
        all.max_by_key(|(most, _)| *most).unwrap_or((0, "none"))
    };
    let gpus = largest(|inventory| inventory.gpus.len() as u64);
    let cpus = largest(|inventory| inventory.cpus.saturating_sub(inventory.reserved_cpus).into());
    let memory = largest(|inventory| inventory.memory.saturating_sub(inventory.reserved_memory));
    let told = |wants: String, (most, node): (u64, &str), word: &dyn Fn(u64) -> String| {
        let most = if most == 0 { "none".to_owned() } else { word(most) };
        format!("no machine here has {wants} for jobs: {} has {most}", clean(node))
    };
    if nodes.is_empty() {
        return None;
    }
    if u64::from(wants.gpus) > gpus.0 {
        return Some(told(count(wants.gpus.into(), "GPU"), gpus, &|most| most.to_string()));
    }
    if u64::from(wants.cpus) > cpus.0 {
        return Some(told(count(wants.cpus.into(), "CPU"), cpus, &|most| most.to_string()));
    }
    if wants.memory > memory.0 {
        return Some(told(format!("{} of memory", size::binary(wants.memory)), memory, &size::binary));
    }
    let there = nodes.len();
    let few = || format!("it asks for {} machines at once, and there is {there}", wants.nodes);
    (wants.nodes as usize > there).then(few)
}

/// The jobs that it waits for, by their whole names.
async fn predecessors(
    client: &Client,
    after: impl Iterator<Item = (&str, WantedEnd)>,
) -> Result<Vec<Predecessor>, Failure> {
    let mut predecessors = Vec::new();
    for (given, end) in after {
        let job = client.named(given).await?.parse().map_err(|error| {
            Fault::new(Code::JobNotFound, format!("there is no job `{given}`")).because(&error)
        })?;
        predecessors.push(Predecessor { job, end });
    }
    Ok(predecessors)
}

/// A job that was submitted.
pub(super) struct Placed {
    /// Of the daemon that has it.
    pub(super) client: Client,
    /// Its name.
    pub(super) job: String,
    pub(super) is_array: bool,
    /// It is a sweep or a pipeline: what happens to its parts is told.
    pub(super) has_story: bool,
}

/// Submits.
pub(super) async fn place(
    args: SubmitArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<Placed, Failure> {
    let mut plan = plan(&args)?;
    if !args.yes {
        plan.refuse_homes(variable("HOME").map(PathBuf::from).as_deref())?;
    }
    plan.warnings.iter().for_each(|warning| output.warn(&warning.to_string()));
    let client = Client::find_or_start(to, output).await?;
    if let Some(chosen) = &plan.environment {
        output.note(&format!("environment: {chosen}"));
    }
    fitting(&client, &plan, args.strict, output).await?;
    let named = plan.after.iter().map(|(job, end)| (job.as_str(), *end));
    plan.draft.predecessors = predecessors(&client, named.chain(args.after.jobs())).await?;
    plan.draft.begin = args.dates.begin.or(plan.draft.begin);
    plan.draft.deadline = args.dates.deadline.or(plan.draft.deadline);
    if let Some(array) = args.array() {
        if let Some(word) = unreplaced(&args.command) {
            output.warn(&format!(
                "`{word}` reaches the command as it stands: only a shell replaces it. Write the whole command as one \
                 word: -- '{}'",
                args.command.join(" ")
            ));
        }
        plan.draft.array = Some(array);
    }
    if let Some(settings) = &args.sweep {
        make_sweep(&mut plan.draft, settings, &args.drawn)?;
    }
    let is_array = plan.draft.array.is_some();
    let has_dates = plan.draft.begin.or(plan.draft.deadline).is_some();
    let has_story = plan.draft.sweep.is_some() || plan.pipeline.is_some();
    let care = if args.rehash { Care::Rehash } else { Care::Light };
    let hint = plan.hint.clone();
    let never = client.own_directories().await?;
    let blobs = client.blobs();
    let spec = tokio::select! {
        spec = Box::pin(plan.clone().ship(&blobs, &never, care, output)) => spec?,
        _ = tokio::signal::ctrl_c() => return Err(Failure::Interrupted),
    };
    output.busy("submitting");
    let job = match Box::pin(client.enqueue(spec, hint.clone(), output)).await {
        Err(Failure::Fault(fault)) if fault.code == Code::SnapshotMissing => {
            output.note("the daemon lacks part of the snapshot; it is sent again");
            let spec = Box::pin(plan.ship(&blobs, &never, care.max(Care::Usual), output)).await?;
            let again = Box::pin(client.enqueue(spec, hint, output)).await;
            again.map_err(|failure| as_job::explain_gone(failure, "the job"))?
        }
        enqueued => enqueued?,
    };
    output.rest();
    if has_dates && client.job(&job).await?.spec.is_none_or(|spec| spec.begin_ms + spec.deadline_ms == 0) {
        output.warn(&format!(
            "the controller is of an earlier release and knows neither --begin nor --deadline: {job} starts as soon as there \
             is room. Keep it from that: agentctl hold {job}"
        ));
    }
    Ok(Placed { client, job, is_array, has_story })
}

#[cfg(test)]
mod tests {
    use super::super::nodes::tests::small;
    use super::*;

    #[test]
    fn test_what_no_machine_has_is_told() {
        let told = |wants: Resources| too_large(&wants, &[small()]);
        let wants = Resources::default;
        assert_eq!(told(Resources { cpus: 8, memory: 16 << 30, ..wants() }), None);
        let expected = [
            (Resources { gpus: 2, ..wants() }, "no machine here has 2 GPUs for jobs: box has none"),
            (Resources { cpus: 64, ..wants() }, "no machine here has 64 CPUs for jobs: box has 8"),
            (
                Resources { memory: 400 << 30, ..wants() },
                "no machine here has 400 GiB of memory for jobs: box has 16 GiB",
            ),
            (Resources { nodes: 3, ..wants() }, "it asks for 3 machines at once, and there is 1"),
        ];
        for (wants, text) in expected {
            assert_eq!(told(wants).as_deref(), Some(text));
        }
        assert_eq!(too_large(&Resources { gpus: 2, ..wants() }, &[]), None);
    }

    #[test]
    fn test_an_index_that_no_shell_replaces_is_found() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let split = words("python t.py --seed $AGENTD_ARRAY_INDEX");
        assert_eq!(unreplaced(&split), Some("$AGENTD_ARRAY_INDEX"));
        assert_eq!(unreplaced(&[split.join(" ")]), None);
        assert_eq!(unreplaced(&words("python t.py --seed 3")), None);
    }
}
