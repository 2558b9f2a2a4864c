//! `jobs`: lists the jobs that run, wait or have ended, in this order.

use std::cmp::Ordering;

use agent_model::{Clock, Code, Fault, SystemClock, Timestamp, size};
use agent_proto::v1;
use serde_json::json;
use tokio::time::{Duration, Instant, sleep};

use super::recorded::{self, RunFacts};
use super::view::JobView;
use crate::cli::{Column, JobsArgs, SortKey, WhichJobs};
use crate::client::{Client, Target, answer, owners_called, person};
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::{Tone, clock, short};
use crate::output::{Output, Paper};

/// Jobs asked for at a time.
const PAGE: u32 = 500;
/// Time between two queries of `--watch`.
const BETWEEN: Duration = Duration::from_secs(1);
/// How long to wait for a daemon that is away.
const AWAY: Duration = Duration::from_secs(60);

/// Which jobs are asked for. The controller finds them; one of an earlier release shows more, which is left out here.
#[derive(Debug, Clone, Default)]
pub(super) struct JobQuery {
    /// At most so many; 0 is all.
    pub(super) limit: u32,
    /// Only those that have not ended.
    pub(super) active: bool,
    /// The tasks of this array that have a record; of none, the jobs that are no tasks.
    pub(super) array: String,
    /// Of these, as a controller writes them; of all where there is none.
    pub(super) owners: Vec<String>,
    /// In one of these; in any where there is none.
    pub(super) states: Vec<String>,
    pub(super) experiment: Option<String>,
    /// What runs, what waits, what ended; otherwise newest first.
    pub(super) standing: bool,
}

impl JobQuery {
    /// Of what the command line chooses; `standing` is the order for people.
    pub(super) fn of(args: &WhichJobs, standing: bool, client: &Client) -> JobQuery {
        let mut owners = args.user.as_deref().map(owners_called).unwrap_or_default();
        owners.extend(args.mine.then(|| client.own()));
        JobQuery {
            limit: if args.all { 0 } else { args.limit },
            active: args.active,
            array: String::new(),
            owners,
            states: args.state.iter().cloned().collect(),
            experiment: args.experiment.clone(),
            standing,
        }
    }

    fn has(&self, job: &v1::Job) -> bool {
        let experiment = job.spec.as_ref().map(|spec| spec.experiment.as_str());
        (self.owners.is_empty() || self.owners.contains(&job.owner))
            && (self.states.is_empty() || self.states.contains(&job.state))
            && self.experiment.as_deref().is_none_or(|one| experiment == Some(one))
    }
}

/// Lists jobs: what runs, what waits, what ended.
pub(super) async fn jobs(args: &JobsArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    // The order of the JSON was promised before there was another.
    let wanted = JobQuery::of(&args.listed, !args.json, &client);
    if let Some(array) = &args.array {
        return of_array(&client, array, args, wanted, output).await;
    }
    let own = person(&client.own());
    let columns = Columns::of(args);
    if args.watch {
        return watch(&client, output, async |paper| {
            let lines = columns.lines(&client, list(&client, &wanted).await?.0).await?;
            Ok(match lines.is_empty() {
                true => "no jobs\n".to_owned(),
                false => render(&lines, &own, &columns, SystemClock.now(), paper),
            })
        })
        .await;
    }
    let (jobs, more) = list(&client, &wanted).await?;
    if args.json {
        return output.json(&json!({ "jobs": jobs, "more": more }));
    }
    if jobs.is_empty() {
        output.note(match args.listed.is_narrowed() {
            true => "there is no such job; all there are: agentctl jobs",
            false => "no jobs; submit one with `agentctl run DIR -- python train.py`",
        });
        return Ok(());
    }
    let (lines, paper) = (columns.lines(&client, jobs).await?, output.paper());
    output.print(&render(&lines, &own, &columns, SystemClock.now(), paper))?;
    if more {
        output.note("there are more: --limit N or --all shows them");
    }
    Ok(())
}

/// Lists the tasks of an array, by their indices.
async fn of_array(
    client: &Client,
    given: &str,
    args: &JobsArgs,
    wanted: JobQuery,
    output: &mut Output,
) -> Result<(), Failure> {
    let array = JobView::try_from(client.job(given).await?)?;
    let Some(stand) = &array.tasks else {
        let fix = format!("see it: agentctl show {}", array.job);
        return Err(Failure::refused(format!("{} is no array", array.job), fix));
    };
    let wanted = JobQuery { array: array.job.clone(), standing: false, ..wanted };
    let (own, columns) = (person(&client.own()), Columns::of(args));
    let look = async || -> Result<_, Failure> {
        let (mut found, more) = list(client, &wanted).await?;
        found.sort_by_key(|task| task.index);
        Ok((found, more))
    };
    let shown = async |found: Vec<JobView>, paper| {
        let lines = columns.lines(client, found).await?;
        Ok::<_, Failure>(render(&lines, &own, &columns, SystemClock.now(), paper))
    };
    if args.watch {
        return watch(client, output, async |paper| shown(look().await?.0, paper).await).await;
    }
    let (found, more) = look().await?;
    if args.json {
        return output.json(&json!({ "array": array, "jobs": found, "more": more }));
    }
    let paper = output.paper();
    let text = shown(found, paper).await?;
    output.print(&text)?;
    output.note(&format!("{} {}: {}", array.job, array.state, stand.counts()));
    if !stand.waiting.is_empty() {
        output.note(&format!("not started: {}", stand.waiting));
    }
    if more {
        output.note("tasks that were started earlier are not shown: --limit N or --all shows them");
    }
    Ok(())
}

/// Shows a text again whenever it changed. Ends when the reader closes the output, or when the daemon stays away.
pub(super) async fn watch(
    client: &Client,
    output: &mut Output,
    look: impl AsyncFn(Paper) -> Result<String, Failure>,
) -> Result<(), Failure> {
    let mut shown = String::new();
    loop {
        match look(output.paper()).await {
            Ok(text) => {
                if text != shown {
                    output.print_anew(&text)?;
                    shown = text;
                }
            }
            Err(Failure::Fault(fault)) if fault.code == Code::Unreachable => {
                if !client.until_back(Instant::now() + AWAY).await {
                    return Err(Failure::Fault(fault));
                }
            }
            Err(failure) => return Err(failure),
        }
        sleep(BETWEEN).await;
    }
}

/// The jobs that are wanted, and whether there may be more.
pub(super) async fn list(client: &Client, wanted: &JobQuery) -> Result<(Vec<JobView>, bool), Failure> {
    let limit = if wanted.limit == 0 { usize::MAX } else { wanted.limit as usize };
    let mut request = v1::ListJobsRequest {
        limit: if wanted.limit == 0 { PAGE } else { wanted.limit.min(PAGE) },
        active: wanted.active,
        array: wanted.array.clone(),
        owners: wanted.owners.clone(),
        states: wanted.states.clone(),
        experiment: wanted.experiment.clone().unwrap_or_default(),
        standing: wanted.standing,
        ..v1::ListJobsRequest::default()
    };
    let mut jobs: Vec<JobView> = Vec::new();
    loop {
        let page = answer(client.jobs().list(request.clone())).await?;
        let Some(last) = page.jobs.last() else { return Ok((jobs, false)) };
        request.after = last.job.clone();
        for job in page.jobs.into_iter().filter(|job| wanted.has(job)) {
            jobs.push(JobView::try_from(job)?);
        }
        let enough = jobs.len() >= limit;
        let more = page.more || jobs.len() > limit;
        jobs.truncate(limit);
        if enough || !page.more {
            return Ok((jobs, more));
        }
    }
}

/// What a table shows of each job, and in which order.
#[derive(Debug, Clone, Default)]
pub(super) struct Columns {
    shown: Vec<Column>,
    sort: Option<SortKey>,
}

/// A job, and what it recorded where that is asked for.
pub(super) struct RecordedJob {
    pub(super) job: JobView,
    pub(super) facts: RunFacts,
}

impl RecordedJob {
    /// One whose records are not read.
    pub(super) fn unread(job: JobView) -> RecordedJob {
        RecordedJob { job, facts: RunFacts::default() }
    }
}

impl Columns {
    fn of(args: &JobsArgs) -> Columns {
        let shown = args.output.clone().map(|columns| columns.0).unwrap_or_default();
        Columns { shown, sort: args.sort.clone() }
    }

    /// The lines of these jobs, in their order.
    async fn lines(&self, client: &Client, jobs: Vec<JobView>) -> Result<Vec<RecordedJob>, Failure> {
        let sorted_by = self.sort.iter().map(|sort| &sort.column);
        let mut lines = match self.shown.iter().chain(sorted_by).any(Column::is_recorded) {
            true => recorded_by(client, jobs).await?.0,
            false => jobs.into_iter().map(RecordedJob::unread).collect(),
        };
        if let Some(sort) = &self.sort {
            let now = SystemClock.now();
            lines.sort_by(|one, other| ordered(one, other, sort, now));
        }
        Ok(lines)
    }
}

/// These jobs with what tells them from others, and what is to be told of records that are gone.
pub(super) async fn recorded_by(
    client: &Client,
    jobs: Vec<JobView>,
) -> Result<(Vec<RecordedJob>, Vec<Fault>), Failure> {
    // An array recorded nothing itself.
    let ranks = |job: &JobView| (job.job.clone(), if job.tasks.is_some() { 0 } else { job.ranks() });
    let (recorded, lost) = recorded::of_jobs(client, jobs.iter().map(ranks).collect()).await?;
    let all = jobs.into_iter().zip(recorded).map(|(job, recorded)| {
        let drawn = job.trial.as_ref().map(|trial| trial.values.clone()).unwrap_or_default();
        let mut facts = RunFacts::of(&job.spec, &drawn, recorded);
        if let (Some(best), Some(sweep)) = (job.best, &job.spec.sweep) {
            facts.metrics.insert(sweep.objective.metric.clone(), best.value);
        }
        RecordedJob { job, facts }
    });
    Ok((all.collect(), lost))
}

/// Numbers before texts, and what is not known last.
fn ordered(one: &RecordedJob, other: &RecordedJob, sort: &SortKey, now: Timestamp) -> Ordering {
    let (one, other) = (key(one, &sort.column, now), key(other, &sort.column, now));
    let order = match (&one, &other) {
        (None, None) => return Ordering::Equal,
        (None, Some(_)) => return Ordering::Greater,
        (Some(_), None) => return Ordering::Less,
        (Some(one), Some(other)) => match (one.parse::<f64>(), other.parse::<f64>()) {
            (Ok(one), Ok(other)) => one.total_cmp(&other),
            (Ok(_), Err(_)) => Ordering::Less,
            (Err(_), Ok(_)) => Ordering::Greater,
            (Err(_), Err(_)) => one.cmp(other),
        },
    };
    if sort.greatest { order.reverse() } else { order }
}

/// By what a line is sorted; a number is written as one.
fn key(line: &RecordedJob, column: &Column, now: Timestamp) -> Option<String> {
    let (job, resources) = (&line.job, &line.job.spec.resources);
    match column {
        Column::Age => Some(now.since(Timestamp(job.submitted_ms)).as_millis().to_string()),
        Column::Time => job.duration(now).map(|time| time.as_millis().to_string()),
        Column::Memory => Some(resources.memory.to_string()),
        Column::Gpus => Some(resources.gpus.to_string()),
        Column::Cpus => Some(resources.cpus.to_string()),
        Column::Metric(name) => {
            line.facts.metrics.get(name).filter(|value| !value.is_nan()).map(f64::to_string)
        }
        Column::Param(name) => line.facts.params.get(name).cloned(),
        other => Some(text(line, other, now)).filter(|text| !text.is_empty()),
    }
}

/// Jobs as a table of the usual columns.
pub(super) fn table(jobs: Vec<JobView>, own: &str, now: Timestamp, paper: Paper) -> String {
    let lines: Vec<RecordedJob> = jobs.into_iter().map(RecordedJob::unread).collect();
    render(&lines, own, &Columns::default(), now, paper)
}

/// Lines as a table. An owner is shown where he is not `own`, or where no columns are chosen.
fn render(lines: &[RecordedJob], own: &str, columns: &Columns, now: Timestamp, paper: Paper) -> String {
    let has = |is: fn(&JobView, &str) -> bool| lines.iter().any(|line| is(&line.job, own));
    let usual: Vec<Column> = [Column::Name, Column::State, Column::Age, Column::Time]
        .into_iter()
        .chain(has(|job, _| job.exit_code.is_some_and(|code| code != 0)).then_some(Column::Exit))
        .chain(has(|job, own| job.owner != own).then_some(Column::Owner))
        .chain([Column::What])
        .collect();
    let columns = if columns.shown.is_empty() { &usual } else { &columns.shown };
    let headings: Vec<&str> = columns.iter().map(Column::heading).collect();
    let at = |is: fn(&Column) -> bool| -> Vec<usize> {
        columns.iter().enumerate().filter(|(_, column)| is(column)).map(|(at, _)| at).collect()
    };
    let names = at(|column| matches!(column, Column::Name | Column::Owner | Column::Node));
    let mut table = Table::new(&headings, &at(Column::is_number)).with_names(&names).whole_first();
    for line in lines {
        table.row(columns.iter().map(|column| cell(line, column, now)));
    }
    table.render(paper)
}

fn cell(line: &RecordedJob, column: &Column, now: Timestamp) -> Cell {
    match column {
        Column::State => Cell::new(line.job.tone(), &line.job.state),
        Column::Exit if line.job.exit_code.is_some_and(|code| code != 0) => {
            Cell::new(Tone::Bad, text(line, column, now))
        }
        _ => Cell::from(text(line, column, now)),
    }
}

fn text(line: &RecordedJob, column: &Column, now: Timestamp) -> String {
    let (job, resources) = (&line.job, &line.job.spec.resources);
    let some = |number: u32| if number == 0 { String::new() } else { number.to_string() };
    match column {
        Column::Name => job.job.clone(),
        Column::State => job.state.clone(),
        Column::Age => short(now.since(Timestamp(job.submitted_ms))),
        Column::Time => job.duration(now).map(clock).unwrap_or_default(),
        Column::Exit => job.exit_code.map(|code| code.to_string()).unwrap_or_default(),
        Column::Owner => job.owner.clone(),
        Column::Node => {
            let nodes: Vec<&str> = job.replicas.iter().map(|replica| replica.node.as_str()).collect();
            nodes.join(",")
        }
        Column::Gpus => some(resources.gpus),
        Column::Cpus => some(resources.cpus),
        Column::Memory if resources.memory == 0 => String::new(),
        Column::Memory => size::binary(resources.memory),
        Column::Experiment => job.experiment.clone(),
        Column::Title => job.what(),
        Column::What => what(job),
        Column::Metric(name) => line.facts.metric(name),
        Column::Param(name) => line.facts.params.get(name).cloned().unwrap_or_default(),
    }
}

/// What is to be known of a job beside its state. Why it waits comes first, because that differs from job to job.
fn what(job: &JobView) -> String {
    let stands = job.tasks.as_ref().map(|tasks| tasks.counts());
    let said = match job.state.as_str() {
        _ if stands.is_some() => stands.unwrap_or_default(),
        "Queued" => job.detail.clone(),
        "Preparing" | "Finalizing" | "NotResponding" => job.work(),
        _ => String::new(),
    };
    // A title that is the name says nothing more.
    let title = job.what();
    let title = if title == job.job { job.spec.command.lines().next().unwrap_or_default() } else { &title };
    match said.is_empty() {
        true => title.to_owned(),
        false => format!("{said} · {title}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::view::tests::{ended, failed};
    use super::*;
    use crate::output::text::Ink;

    fn line(job: &JobView, metrics: &[(&str, f64)], params: &[(&str, &str)]) -> RecordedJob {
        let metrics = metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let params = params.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        RecordedJob { job: job.clone(), facts: RunFacts { metrics, params, ..RunFacts::default() } }
    }

    #[test]
    fn test_lines_are_sorted_by_any_column_and_what_is_unknown_is_last() {
        let named = |name: &str| JobView { job: name.into(), ..ended() };
        let lines = [
            line(&named("b"), &[("loss", 10.0)], &[("lr", "1e-2")]),
            line(&named("a"), &[("loss", f64::NAN)], &[]),
            line(&named("c"), &[("loss", 9.0)], &[("lr", "auto")]),
            line(&named("d"), &[], &[("lr", "0.001")]),
        ];
        let order = |key: &str| {
            let (sort, mut lines) = (key.parse().unwrap(), lines.iter().collect::<Vec<_>>());
            lines.sort_by(|one, other| ordered(one, other, &sort, Timestamp(1_200_000)));
            lines.iter().map(|line| line.job.job.as_str()).collect::<String>()
        };
        let sorted = ["name", "-name", "metric:loss", "-metric:loss", "param:lr", "age"].map(order);
        assert_eq!(sorted, ["abcd", "dcba", "cbad", "bcad", "dbca", "bacd"]);
        let text = render(
            &lines,
            "root",
            &Columns {
                shown: "name,metric:loss,param:lr".parse::<crate::cli::ColumnList>().unwrap().0,
                sort: None,
            },
            Timestamp(0),
            Paper { ink: Ink::PLAIN, width: 80 },
        );
        assert_eq!(
            text,
            "NAME  loss     lr\nb       10   1e-2\na      NaN\nc        9   auto\nd           0.001\n"
        );
    }

    fn shown(jobs: &[JobView], columns: &str, width: usize) -> String {
        let shown = columns.parse().map(|columns: crate::cli::ColumnList| columns.0).unwrap_or_default();
        let lines: Vec<RecordedJob> = jobs.iter().map(|job| line(job, &[], &[])).collect();
        let columns = Columns { shown, sort: None };
        render(&lines, "root", &columns, Timestamp(1_200_000), Paper { ink: Ink::PLAIN, width })
    }

    #[test]
    fn test_table_fits_80_columns() {
        let mut waiting = failed();
        waiting.state = "Queued".into();
        (waiting.outcome, waiting.exit_code, waiting.started_ms) = (None, None, None);
        waiting.detail = "1 job ahead, both slots of box busy: train-a, train-b".into();
        insta::assert_snapshot!("waiting", shown(&[waiting, failed(), ended()], "", 80));
        let long = |name: &str, owner: &str| JobView { job: name.into(), owner: owner.into(), ..ended() };
        let mut silent =
            long("resnet50-imagenet-large-batch-warmup-cosine-x7k2p", "somebody-with-a-long-name@lab");
        silent.state = "NotResponding".into();
        let jobs = [silent, long("resnet50-imagenet-large-batch-warmup-linear-q3m9z", "ada"), ended()];
        insta::assert_snapshot!("long", shown(&jobs, "", 80));
    }

    #[test]
    fn test_columns_are_chosen() {
        insta::assert_snapshot!("wide", shown(&[ended(), failed()], "wide", 120));
        insta::assert_snapshot!("chosen", shown(&[failed()], "name,exit,title", 80));
        let refused = "name,metric".parse::<crate::cli::ColumnList>().unwrap_err();
        assert!(refused.starts_with("there is no column `metric`; there are name, state"), "{refused}");
    }

    #[test]
    fn test_an_owner_is_shown_where_it_is_not_the_one_who_asks() {
        let theirs = JobView { owner: "eve".into(), ..ended() };
        assert!(!shown(&[ended()], "", 80).contains("OWNER"));
        assert!(shown(&[theirs], "", 80).contains("OWNER"));
    }
}
