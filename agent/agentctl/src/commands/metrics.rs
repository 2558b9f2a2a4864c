//! `metrics`: shows what jobs recorded.

mod history;
pub(super) mod system;

use serde_json::Value;

use self::history::Point;
use super::arrays::tasks_or_self;
use super::recorded::{Recorded, full_name, quoted, value};
use super::view::JobView;
use crate::cli::MetricsArgs;
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::Output;

/// Shows metrics, parameters and tags.
pub(super) async fn metrics(
    args: &MetricsArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    if args.system {
        return system::show(&client, args, output).await;
    }
    let mut jobs = Vec::new();
    for job in &args.jobs {
        let view = JobView::try_from(client.job(job).await?)?;
        for view in tasks_or_self(&client, view).await? {
            let records = client.tracking(&view.job, view.ranks(), output).await?;
            jobs.push((view.job, records));
        }
    }
    if args.history {
        return every_point(&jobs, args, output);
    }
    let summed = jobs.iter().map(|(job, records)| (job, Recorded::read(records, &args.metric)));
    let summed: Vec<_> = summed.collect();
    if args.json {
        return documents(summed.iter().map(|(job, recorded)| recorded.json(job)).collect(), output);
    }
    let paper = output.paper();
    let told = summed.iter().map(|(job, recorded)| {
        let tables = recorded.render(paper);
        let tables = if tables.is_empty() { Err(nothing(job, &args.metric)) } else { Ok(tables) };
        (job.as_str(), tables)
    });
    each_below_its_name(told.collect(), output)
}

/// One document by itself, several as a list.
fn documents(mut all: Vec<Value>, output: &mut Output) -> Result<(), Failure> {
    match all.len() {
        1 => output.json(&all.remove(0)),
        _ => output.json(&all),
    }
}

/// A text for each job, below its name where there are several; or a note in its place.
fn each_below_its_name(all: Vec<(&str, Result<String, String>)>, output: &mut Output) -> Result<(), Failure> {
    let are_several = all.len() > 1;
    for (place, (job, text)) in all.into_iter().enumerate() {
        if are_several {
            output.print(&format!("{}{job}\n", if place > 0 { "\n" } else { "" }))?;
        }
        match text {
            Ok(text) => output.print(&text)?,
            Err(note) => output.note(&note),
        }
    }
    Ok(())
}

/// Shows every point of the metrics.
fn every_point(jobs: &[(String, Vec<u8>)], args: &MetricsArgs, output: &mut Output) -> Result<(), Failure> {
    let points = jobs.iter().flat_map(|(job, records)| Point::read(job, records, &args.metric));
    let points: Vec<Point> = points.collect();
    if args.json {
        return output.json(&history::json(&points));
    }
    if args.csv {
        return output.print(&history::csv(&points));
    }
    if points.is_empty() {
        let names: Vec<&str> = jobs.iter().map(|(job, _)| job.as_str()).collect();
        output.note(&nothing(&names.join(", "), &args.metric));
        return Ok(());
    }
    let paper = output.paper();
    output.print(&history::table(&points, paper))
}

fn nothing(job: &str, wanted: &[String]) -> String {
    match wanted {
        [] => {
            format!("{job} has recorded nothing; scripts use mlflow.log_metric, or append to $AGENTD_METRICS")
        }
        names => format!("{job} has recorded nothing called {}", names.join(" or ")),
    }
}
