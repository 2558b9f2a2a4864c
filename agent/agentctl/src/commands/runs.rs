//! `runs`: jobs with their parameters and the last value of each metric, side by side.
//!
//! Shows what differs: a parameter that is the same in all is told below the table. Where the paper is too narrow, metrics
//! and parameters are left out in turn and named; documents for programs have all.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use agent_model::sweep::{Goal, Objective};
use agent_model::{Clock, SystemClock, Timestamp};
use serde_json::{Value, json};
use unicode_width::UnicodeWidthStr;

use super::arrays::tasks_or_self;
use super::jobs::{JobQuery, RecordedJob, list, recorded_by};
use super::recorded::{RunFacts, quoted, value};
use super::view::JobView;
use crate::cli::RunsArgs;
use crate::client::{Client, Target, person};
use crate::failure::Failure;
use crate::output::table::{Cell, LONG_NAME, Table};
use crate::output::text::{Ink, clean, clock, cut_middle};
use crate::output::{Output, Paper};

/// A value that is longer is cut, in columns: it is a path or a document.
const LONGEST: usize = 24;

/// The states of jobs whose command has begun, or never will.
const BEGUN: [&str; 6] = ["Running", "Finalizing", "NotResponding", "Completed", "Failed", "Canceled"];

/// A column beside those that every table has.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Extra {
    Metric(String),
    Param(String),
}

/// Compares runs.
pub(super) async fn runs(args: &RunsArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let (jobs, objective, more) = chosen(&client, args).await?;
    output.busy("reading what they recorded");
    let (mut runs, lost) = recorded_by(&client, jobs).await?;
    output.rest();
    lost.iter().for_each(|lost| output.fault(lost));
    let has = |facts: &RunFacts| args.tag.iter().all(|(name, text)| facts.tags.get(name) == Some(text));
    runs.retain(|run| has(&run.facts));
    if let Some(objective) = &objective {
        runs.sort_by(|one, other| better(one, other, objective));
    }
    let now = SystemClock.now();
    if args.json {
        let all: Vec<Value> = runs.iter().map(|run| run.json(now)).collect();
        return output.json(&json!({ "runs": all, "more": more }));
    }
    if runs.is_empty() {
        output.note("there is no such run; all jobs there are: agentctl jobs");
        return Ok(());
    }
    if args.csv {
        return output.print(&csv(&runs, now));
    }
    let paper = output.paper();
    let shown = RunTable::of(&runs, args, objective.as_ref(), &person(&client.own()), now, paper);
    output.print(&shown.table)?;
    shown.notes.iter().for_each(|note| output.note(note));
    if objective.is_none() && runs.iter().any(|run| !run.facts.metrics.is_empty()) {
        output.note("the best first: --minimize METRIC or --maximize METRIC");
    }
    if more {
        output.note("there are more: --limit N or --all shows them");
    }
    Ok(())
}

/// The runs that are meant, what makes one of them better, and whether there are more.
async fn chosen(
    client: &Client,
    args: &RunsArgs,
) -> Result<(Vec<JobView>, Option<Objective>, bool), Failure> {
    let asked = |goal, metric: &String| Objective { goal, metric: metric.clone() };
    let least = args.minimize.as_ref().map(|metric| asked(Goal::Minimize, metric));
    let mut objective = least.or_else(|| args.maximize.as_ref().map(|metric| asked(Goal::Maximize, metric)));
    if args.jobs.is_empty() {
        let mut wanted = JobQuery::of(&args.listed, false, client);
        if wanted.states.is_empty() && !args.listed.active {
            wanted.states = BEGUN.map(str::to_owned).to_vec(); // what only waits has nothing to compare
        }
        let (jobs, more) = list(client, &wanted).await?;
        return Ok((jobs, objective, more));
    }
    let mut runs = Vec::new();
    for given in &args.jobs {
        let job = JobView::try_from(client.job(given).await?)?;
        let of_sweep = job.spec.sweep.as_ref().map(|sweep| sweep.objective.clone());
        objective = objective.or(of_sweep);
        runs.extend(tasks_or_self(client, job).await?);
    }
    Ok((runs, objective, false))
}

/// The better one first; one without a value last.
fn better(one: &RecordedJob, other: &RecordedJob, objective: &Objective) -> Ordering {
    let of = |run: &RecordedJob| run.facts.metrics.get(&objective.metric).copied().unwrap_or(f64::NAN);
    match (of(one), of(other)) {
        (one, other) if objective.goal.is_better(one, other) => Ordering::Less,
        (one, other) if objective.goal.is_better(other, one) => Ordering::Greater,
        _ => Ordering::Equal,
    }
}

impl RecordedJob {
    fn json(&self, now: Timestamp) -> Value {
        let RunFacts { params, metrics, tags } = &self.facts;
        let metrics: BTreeMap<&String, Value> =
            metrics.iter().map(|(name, last)| (name, value(*last))).collect();
        json!({
            "job": self.job.job,
            "state": self.job.state,
            "owner": self.job.owner,
            "experiment": self.job.experiment,
            "submitted_ms": self.job.submitted_ms,
            "duration_ms": self.job.duration(now).map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
            "params": params,
            "metrics": metrics,
            "tags": tags,
        })
    }

    fn text(&self, column: &Extra) -> String {
        match column {
            Extra::Metric(name) => self.facts.metric(name),
            Extra::Param(name) => {
                let text = self.facts.params.get(name).map(|text| clean(text)).unwrap_or_default();
                cut_middle(&text, LONGEST)
            }
        }
    }
}

impl Extra {
    fn name(&self) -> &str {
        match self {
            Extra::Metric(name) | Extra::Param(name) => name,
        }
    }
}

/// Every name in any of the runs.
fn names<V>(runs: &[RecordedJob], of: impl Fn(&RunFacts) -> &BTreeMap<String, V>) -> BTreeSet<String> {
    runs.iter().flat_map(|run| of(&run.facts).keys().cloned()).collect()
}

/// For spreadsheets and data frames; a metric reads back as the same number.
fn csv(runs: &[RecordedJob], now: Timestamp) -> String {
    let (params, metrics) = (names(runs, |facts| &facts.params), names(runs, |facts| &facts.metrics));
    let mut text = "job,state,owner,experiment,seconds".to_owned();
    let headings = params.iter().map(|name| format!("param.{name}"));
    for heading in headings.chain(metrics.iter().map(|name| format!("metric.{name}"))) {
        let _ = write!(text, ",{}", quoted(&heading)); // into memory
    }
    text.push('\n');
    for RecordedJob { job, facts } in runs {
        let took = job.duration(now).map(|took| took.as_secs_f64().to_string()).unwrap_or_default();
        let (owner, experiment) = (quoted(&job.owner), quoted(&job.experiment));
        let _ = write!(text, "{},{},{owner},{experiment},{took}", job.job, job.state);
        for name in &params {
            let _ = write!(text, ",{}", quoted(facts.params.get(name).map_or("", String::as_str)));
        }
        for name in &metrics {
            let last = facts.metrics.get(name).map(f64::to_string).unwrap_or_default();
            let _ = write!(text, ",{last}");
        }
        text.push('\n');
    }
    text
}

/// The table for people, and what is told below it.
struct RunTable {
    table: String,
    notes: Vec<String>,
}

impl RunTable {
    fn of(
        runs: &[RecordedJob],
        args: &RunsArgs,
        objective: Option<&Objective>,
        own: &str,
        now: Timestamp,
        paper: Paper,
    ) -> RunTable {
        let mut metrics: Vec<String> = match args.metric.is_empty() {
            true => names(runs, |facts| &facts.metrics).into_iter().collect(),
            false => args.metric.clone(),
        };
        if let Some(objective) = objective {
            metrics.retain(|name| *name != objective.metric);
            metrics.insert(0, objective.metric.clone());
        }
        let all = names(runs, |facts| &facts.params);
        let is_same = |name: &String| {
            let mut values = runs.iter().map(|run| run.facts.params.get(name));
            let first = values.next();
            runs.len() > 1 && values.all(|value| Some(value) == first)
        };
        let (same, differ): (Vec<String>, Vec<String>) = all.into_iter().partition(is_same);
        let params = if args.param.is_empty() { differ } else { args.param.clone() };
        let mut notes = Vec::new();
        if !same.is_empty() && args.param.is_empty() {
            let of = |name: &String| format!("{name}={}", runs[0].text(&Extra::Param(name.clone())));
            notes.push(format!("the same in all: {}", same.iter().map(of).collect::<Vec<_>>().join(", ")));
        }
        let has_owner = runs.iter().any(|run| run.job.owner != own);
        let wanted = in_turn(metrics, params);
        let (shown, left_out) = fitting(runs, wanted, has_owner, now, paper);
        if !left_out.is_empty() {
            notes.push(format!(
                "no room for {}: --metric and --param choose, --csv and --json have all",
                left_out.iter().map(Extra::name).collect::<Vec<_>>().join(", ")
            ));
        }
        RunTable { table: table(runs, &shown, has_owner, now).render(paper), notes }
    }
}

/// A metric, a parameter, a metric, and so on: of both something is shown.
fn in_turn(metrics: Vec<String>, params: Vec<String>) -> Vec<Extra> {
    let most = metrics.len().max(params.len());
    let (metrics, params) = (metrics.into_iter().map(Extra::Metric), params.into_iter().map(Extra::Param));
    let mut metrics = metrics.collect::<Vec<_>>().into_iter();
    let mut params = params.collect::<Vec<_>>().into_iter();
    (0..most).flat_map(|_| [metrics.next(), params.next()]).flatten().collect()
}

/// Those that have room beside the other columns, metrics first, and those that have none.
fn fitting(
    runs: &[RecordedJob],
    wanted: Vec<Extra>,
    has_owner: bool,
    now: Timestamp,
    paper: Paper,
) -> (Vec<Extra>, Vec<Extra>) {
    // A long name has a line of its own.
    let names = runs.iter().filter(|run| run.job.job.len() <= LONG_NAME);
    let names: Vec<RecordedJob> = names.map(|run| RecordedJob::unread(run.job.clone())).collect();
    let plain = table(&names, &[], has_owner, now).render(Paper { ink: Ink::new(false), width: 10_000 });
    let taken = plain.lines().map(UnicodeWidthStr::width).max().unwrap_or(0);
    let mut left = paper.width.saturating_sub(taken);
    let (mut shown, mut left_out) = (Vec::new(), Vec::new());
    for column in wanted {
        let cells = runs.iter().map(|run| run.text(&column).width());
        let width = 2 + cells.max().unwrap_or(0).max(column.name().width());
        match left.checked_sub(width) {
            Some(rest) => {
                left = rest;
                shown.push(column);
            }
            None => left_out.push(column),
        }
    }
    shown.sort_by_key(|column| matches!(column, Extra::Param(_)));
    (shown, left_out)
}

fn table(runs: &[RecordedJob], columns: &[Extra], has_owner: bool, now: Timestamp) -> Table {
    let owner = has_owner.then_some("OWNER");
    let fixed = ["NAME", "STATE", "TIME"].into_iter().chain(owner);
    let headings: Vec<&str> = fixed.chain(columns.iter().map(Extra::name)).collect();
    let first = headings.len() - columns.len();
    let right: Vec<usize> = [2].into_iter().chain(first..headings.len()).collect();
    let mut table = Table::new(&headings, &right).whole_first();
    for run in runs {
        let job = &run.job;
        let cells = [
            Cell::from(&job.job),
            Cell::new(job.tone(), &job.state),
            Cell::from(job.duration(now).map(clock).unwrap_or_default()),
        ];
        let owner = has_owner.then(|| Cell::from(&job.owner));
        let more = columns.iter().map(|column| Cell::from(run.text(column)));
        table.row(cells.into_iter().chain(owner).chain(more));
    }
    table
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::view::tests::ended;
    use super::*;
    use crate::cli::{Cli, Verb};
    use crate::output::text::Ink;

    fn run(name: &str, params: &[(&str, &str)], metrics: &[(&str, f64)]) -> RecordedJob {
        let params = params.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        let metrics = metrics.iter().map(|(name, last)| ((*name).to_owned(), *last)).collect();
        let facts = RunFacts { params, metrics, ..RunFacts::default() };
        RecordedJob { job: JobView { job: name.into(), ..ended() }, facts }
    }

    fn three() -> Vec<RecordedJob> {
        let mut runs = vec![
            run("train-a", &[("lr", "0.1"), ("epochs", "5")], &[("loss", 0.5), ("accuracy", 0.8)]),
            run("train-b", &[("lr", "0.01"), ("epochs", "5")], &[]),
            run("train-c", &[("lr", "0.5"), ("epochs", "5")], &[("loss", 0.25), ("accuracy", 0.91)]),
        ];
        let objective = Objective { goal: Goal::Minimize, metric: "loss".into() };
        runs.sort_by(|one, other| better(one, other, &objective));
        runs
    }

    fn shown(width: usize) -> String {
        let Ok(Cli { verb: Verb::Runs(args), .. }) = Cli::try_parse_from(["agentctl", "runs"]) else {
            panic!("not runs")
        };
        let objective = Objective { goal: Goal::Minimize, metric: "loss".into() };
        let paper = Paper { ink: Ink::PLAIN, width };
        let shown = RunTable::of(&three(), &args, Some(&objective), "root", Timestamp(0), paper);
        format!("{}{}", shown.table, shown.notes.join("\n"))
    }

    #[test]
    fn test_the_best_comes_first_and_what_differs_is_a_column() {
        insta::assert_snapshot!(shown(80), @r"
        NAME     STATE      TIME  loss  accuracy    lr
        train-c  Completed  0:12  0.25      0.91   0.5
        train-a  Completed  0:12   0.5       0.8   0.1
        train-b  Completed  0:12                  0.01
        the same in all: epochs=5
        ");
        insta::assert_snapshot!(shown(40), @r"
        NAME     STATE      TIME  loss    lr
        train-c  Completed  0:12  0.25   0.5
        train-a  Completed  0:12   0.5   0.1
        train-b  Completed  0:12        0.01
        the same in all: epochs=5
        no room for accuracy: --metric and --param choose, --csv and --json have all
        ");
    }

    #[test]
    fn test_csv_has_everything() {
        insta::assert_snapshot!(csv(&three(), Timestamp(0)), @r"
        job,state,owner,experiment,seconds,param.epochs,param.lr,metric.accuracy,metric.loss
        train-c,Completed,root,Default,12,5,0.5,0.91,0.25
        train-a,Completed,root,Default,12,5,0.1,0.8,0.5
        train-b,Completed,root,Default,12,5,0.01,,
        ");
    }
}
