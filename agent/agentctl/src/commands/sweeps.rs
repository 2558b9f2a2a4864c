//! What is shown of sweeps and their trials, and `sweep`, which makes one on the command line.
//!
//! A sweep is an array, so what an array can, a sweep can. Here is what it has besides: a table of its trials, sorted by
//! what is better, the story of them while they run, and its best trial.

use std::cmp::Ordering;
use std::process::ExitCode;

use agent_model::job::Array;
use agent_model::sweep::{Goal, Objective, Sampling, Sweep};
use agent_model::{Code, Fault, Timestamp};
use agent_proto::v1;
use tokio::time::{Duration, Instant, sleep};

use super::arrays::tasks;
use super::follow::Ended;
use super::view::JobView;
use super::{as_job, submit};
use crate::cli::{ExtendArgs, SweepArgs, SweepVerb};
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::{clean, moment, number};
use crate::output::{Output, Paper};
use crate::prepare::job_name;

/// Between two looks at the story.
const BETWEEN: Duration = Duration::from_millis(500);
/// How long to wait for a daemon that is away.
const AWAY: Duration = Duration::from_secs(60);

/// The trials of a sweep that have a record, the best first; those without a value of the metric come last.
pub(super) async fn trials(client: &Client, sweep: &JobView) -> Result<Vec<JobView>, Failure> {
    let mut trials = tasks(client, sweep).await?;
    let goal = sweep.spec.sweep.as_ref().map_or(Goal::Minimize, |sweep| sweep.objective.goal);
    let best = |job: &JobView| job.trial.as_ref().and_then(|trial| trial.best).unwrap_or(f64::NAN);
    trials.sort_by(|one, other| match (best(one), best(other)) {
        (one, other) if goal.is_better(one, other) => Ordering::Less,
        (one, other) if goal.is_better(other, one) => Ordering::Greater,
        _ => one.index.cmp(&other.index),
    });
    Ok(trials)
}

/// The trials as a table: values, metric, and who ended it.
pub(super) fn table(sweep: &Sweep, trials: &[JobView], paper: Paper) -> String {
    let mut table = Table::new(&["TRIAL", "STATE", "BEST", "LAST", "LOGGED", "VALUES"], &[0, 2, 3, 4]);
    for job in trials {
        let index = job.index.map(|index| index.to_string()).unwrap_or_default();
        let Some(trial) = &job.trial else { continue };
        let values = trial.values.iter().map(|(name, value)| format!("{name}={value}"));
        let values = values.collect::<Vec<_>>().join(" ");
        let stopped = if trial.stopped.is_empty() { String::new() } else { format!(" ({})", trial.stopped) };
        table.row([
            Cell::from(index),
            Cell::new(job.tone(), &job.state),
            Cell::from(trial.best.map(number).unwrap_or_default()),
            Cell::from(trial.last.map(number).unwrap_or_default()),
            Cell::from(trial.count.to_string()),
            Cell::from(format!("{values}{stopped}")),
        ]);
    }
    let Objective { goal, metric } = &sweep.objective;
    format!("{} {}\n{}", goal.name(), clean(metric), table.render(paper))
}

/// `trial 3: loss 0.21`
pub(super) fn best_words(job: &JobView) -> Option<String> {
    let (best, sweep) = (job.best?, job.spec.sweep.as_ref()?);
    Some(format!("trial {}: {} {}", best.trial, sweep.objective.metric, number(best.value)))
}

/// What is told of a trial.
pub(super) fn trial_words(job: &JobView) -> Option<String> {
    let trial = job.trial.as_ref()?;
    let mut lines: Vec<String> = trial.values.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let text = |value: Option<f64>| value.map_or_else(|| "no number".to_owned(), number);
    lines.push(match trial.count {
        0 => "the metric was not logged".to_owned(),
        count => {
            format!("metric: best {}, last {}, logged {count} times", text(trial.best), text(trial.last))
        }
    });
    if !trial.stopped.is_empty() {
        lines.push(format!("ended by {}", trial.stopped));
    }
    Some(lines.join("\n"))
}

/// More trials of a sweep that has ended, as a new one.
async fn extend(args: &ExtendArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let old = JobView::try_from(client.job(&args.sweep).await?)?;
    let last = old.spec.array.as_ref().and_then(|array| array.indices().last());
    let (Some(known), Some(last)) = (&old.spec.sweep, last) else {
        return Err(Failure::refused(
            format!("{} is no sweep", old.job),
            "name one: agentctl jobs lists them",
        ));
    };
    let (points, first) = (known.space.points(), u64::from(last) + 1);
    let most =
        if known.sampling == Sampling::Grid { points.saturating_sub(first) } else { u64::from(u32::MAX) };
    let more = u64::from(args.trials.get()).min(most);
    if more == 0 {
        return Err(Failure::refused(
            format!("the grid of {} has no point left", old.job),
            "make a sweep with more values",
        ));
    }
    let mut draft = as_job::draft(&client, &old, false, output).await?;
    draft.name = args.name.as_deref().map(job_name).transpose()?;
    draft.predecessors.clear();
    let at_once = draft.array.as_ref().and_then(Array::at_once);
    let indices =
        format!("{first}-{}", first + more - 1).parse::<Array>().map(|array| array.indices().clone());
    let array = indices.and_then(|indices| Array::new(indices, at_once));
    draft.array = Some(array.map_err(|error| {
        Failure::refused(format!("--trials {more}: {error}"), "make fewer of them at a time, or a new sweep")
    })?);
    if let Some(sweep) = &mut draft.sweep {
        // The same seed, so that it goes on where the old one ended.
        let seed = sweep.sampling.seed(&old.job);
        if let Sampling::Random { seed: known, .. } | Sampling::Bayesian { seed: known } = &mut sweep.sampling
        {
            *known = Some(seed);
        }
        sweep.given.clear();
        sweep.extends = Some(old.job.parse().map_err(|error| {
            Fault::new(Code::Bug, "the daemon told of a job without a name").because(&error)
        })?);
    }
    let name = Box::pin(client.enqueue(draft.validate()?, old.title.clone(), output)).await;
    output.print(&format!("{}\n", name.map_err(|failure| as_job::explain_gone(failure, &old.job))?))
}

/// The best trial of a sweep: the one whose outputs are those of the sweep. It may be one of a sweep that it extends.
pub(super) async fn best_of(client: &Client, sweep: &JobView) -> Result<JobView, Failure> {
    let Some(best) = sweep.best else {
        let fix = format!(
            "see its trials: agentctl show {0}; fetch what all of them left: agentctl download {0} --all",
            sweep.job
        );
        return Err(Failure::refused(
            format!("no trial of {} has completed with a value of its metric", sweep.job),
            fix,
        ));
    };
    let (mut name, mut spec) = (sweep.job.clone(), sweep.spec.clone());
    while !spec.array.as_ref().is_some_and(|array| array.indices().contains(best.trial)) {
        let Some(extends) = spec.sweep.as_ref().and_then(|sweep| sweep.extends.as_ref()) else { break };
        name = extends.to_string();
        spec = JobView::try_from(client.job(&name).await?)?.spec;
    }
    Ok(JobView::try_from(client.job(&format!("{name}[{}]", best.trial)).await?)?)
}

/// Prints what happens to the trials of a sweep or the steps of a pipeline, until it has ended.
pub(super) async fn story(
    client: &Client,
    sweep: &str,
    follow: bool,
    output: &mut Output,
) -> Result<Ended, Failure> {
    let mut told = 0;
    loop {
        match look(client, sweep, &mut told, output).await {
            Ok(job) if job.has_ended() || !follow => return Ok(Ended::Job(Box::new(job))),
            Ok(_) => {}
            Err(Failure::Fault(fault)) if fault.code == Code::Unreachable && follow => {
                if !client.until_back(Instant::now() + AWAY).await {
                    return Err(Failure::Fault(fault));
                }
            }
            Err(failure) => return Err(failure),
        }
        tokio::select! {
            () = sleep(BETWEEN) => {}
            _ = tokio::signal::ctrl_c() => return Ok(Ended::Detached),
        }
    }
}

/// Prints what happened since the last look. What ended is asked for first, so that nothing is missed of its end.
async fn look(client: &Client, sweep: &str, told: &mut u64, output: &mut Output) -> Result<JobView, Failure> {
    let job = JobView::try_from(
        answer(client.jobs().get(v1::GetJobRequest { job: sweep.to_owned(), ..Default::default() })).await?,
    )?;
    loop {
        let request = v1::GetJobRequest { job: sweep.to_owned(), after_events: *told };
        let page = answer(client.jobs().history(request)).await?;
        for event in &page.events {
            output.print(&format!("{}  {}\n", moment(Timestamp(event.at_ms)), clean(&event.text)))?;
        }
        *told += page.events.len() as u64;
        if !page.more || page.events.is_empty() {
            return Ok(job);
        }
    }
}

/// Submits a sweep and follows it, unless it is to be left alone.
pub(super) async fn sweep(
    args: SweepArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let SweepArgs { verb, mut submit, settings, detach } = args;
    if let Some(SweepVerb::Extend(args)) = verb {
        extend(&args, to, output).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let (inputs, drawn) = std::mem::take(&mut submit.set).into_iter().partition(|(key, _)| key.contains('.'));
    submit.set = inputs;
    submit.sweep = Some(settings);
    submit.drawn = drawn;
    if submit.dry_run {
        submit::dry_run(submit, to, output).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let submit::Placed { client, job, .. } = submit::place(submit, to, output).await?;
    if detach {
        output.print(&format!("{job}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    output.note(&format!("sweep: {job}"));
    let ended = story(&client, &job, true, output).await?;
    finish(&client, &ended, output).await?;
    Ok(ended.exit_code())
}

/// Prints the table of a sweep that ended.
pub(super) async fn finish(client: &Client, ended: &Ended, output: &mut Output) -> Result<(), Failure> {
    let Ended::Job(job) = ended else {
        output.note("detached; it goes on");
        return Ok(());
    };
    if let Some(sweep) = &job.spec.sweep {
        let trials = trials(client, job).await?;
        let text = table(sweep, &trials, output.paper());
        output.print(&format!("\n{text}"))?;
    }
    ended.tell(output);
    if let Some(best) = best_words(job) {
        output.note(&format!("best: {best}; get what it left: agentctl download {}", job.job));
    }
    Ok(())
}
