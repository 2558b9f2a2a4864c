//! `metrics`: shows what jobs recorded.

mod history;

use std::collections::BTreeMap;

use agent_model::tracking::{EXPERIMENT, OWN, TrackingLine, TrackingRecord};
use serde_json::{Value, json};

use self::history::Point;
use super::arrays::tasks_or_self;
use super::view::JobView;
use crate::cli::MetricsArgs;
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::number;
use crate::output::{Output, Paper};

/// Shows metrics, parameters and tags.
pub(super) async fn metrics(
    args: &MetricsArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
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
        let mut all: Vec<Value> = summed.iter().map(|(job, recorded)| recorded.json(job)).collect();
        return match all.len() {
            1 => output.json(&all.remove(0)),
            _ => output.json(&all),
        };
    }
    let paper = output.paper();
    for (place, (job, recorded)) in summed.iter().enumerate() {
        if summed.len() > 1 {
            output.print(&format!("{}{job}\n", if place > 0 { "\n" } else { "" }))?;
        }
        let tables = recorded.render(paper);
        match tables.is_empty() {
            true => output.note(&nothing(job, &args.metric)),
            false => output.print(&tables)?,
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

/// What a job recorded, summed up.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    pub(super) metrics: BTreeMap<String, Series>,
    pub(super) params: BTreeMap<String, String>,
    tags: BTreeMap<String, String>,
    /// Notes of agentd about the records, in their order.
    notes: Vec<String>,
}

/// The values of one metric.
#[derive(Debug)]
pub(super) struct Series {
    /// The value of the highest step; of several, the one recorded last.
    last: f64,
    last_step: i64,
    /// Of the values that are numbers.
    min: f64,
    max: f64,
    count: u64,
}

impl Recorded {
    /// Reads tracking records, one a line; other lines are skipped. If metrics are named, only those. In a run that
    /// the script began, names have the run's name and a slash before them.
    pub(super) fn read(lines: &[u8], wanted: &[String]) -> Recorded {
        let mut recorded = Recorded::default();
        for TrackingLine { run, record } in lines.split(|byte| *byte == b'\n').filter_map(TrackingLine::parse)
        {
            let full = |name: String| full_name(&run, name);
            match record {
                TrackingRecord::Metric { metric, value, step, .. } => {
                    let name = full(metric);
                    if wanted.is_empty() || wanted.contains(&name) {
                        recorded.metrics.entry(name).or_insert(Series::EMPTY).add(value, step);
                    }
                }
                _ if !wanted.is_empty() => {}
                TrackingRecord::Param { param, text } => drop(recorded.params.insert(full(param), text)),
                TrackingRecord::Tag { tag, .. } if tag.starts_with(OWN) && tag != EXPERIMENT => {}
                TrackingRecord::Tag { tag, text } => drop(recorded.tags.insert(full(tag), text)),
                TrackingRecord::Untag { untag } => drop(recorded.tags.remove(&full(untag))),
                TrackingRecord::Note { note } => recorded.notes.push(note),
            }
        }
        recorded
    }

    /// The last value of each metric.
    pub(super) fn last(&self) -> impl Iterator<Item = (String, f64)> {
        self.metrics.iter().map(|(name, series)| (name.clone(), series.last))
    }

    /// The metrics as a table.
    pub(super) fn table(&self, paper: Paper) -> String {
        let mut table = Table::new(&["METRIC", "LAST", "MIN", "MAX", "COUNT"], &[1, 2, 3, 4]);
        for (name, series) in &self.metrics {
            let numbers = [series.last, series.min, series.max].map(|value| Cell::from(number(value)));
            let count = Cell::from(series.count.to_string());
            table.row([Cell::from(name)].into_iter().chain(numbers).chain([count]));
        }
        table.render(paper)
    }

    fn render(&self, paper: Paper) -> String {
        let mut parts = Vec::new();
        if !self.metrics.is_empty() {
            parts.push(self.table(paper));
        }
        let params: Vec<_> = self.params.iter().collect();
        let tags: Vec<_> = self.tags.iter().filter(|(name, _)| !is_of_client(name)).collect();
        for (heading, pairs) in [("PARAMETER", params), ("TAG", tags)] {
            if pairs.is_empty() {
                continue;
            }
            let mut table = Table::new(&[heading, "VALUE"], &[]);
            pairs.into_iter().for_each(|(name, text)| table.row([Cell::from(name), Cell::from(text)]));
            parts.push(table.render(paper));
        }
        if !self.notes.is_empty() {
            let mut table = Table::new(&["NOTE", "TIMES"], &[1]);
            let mut times: BTreeMap<&String, u32> = BTreeMap::new();
            self.notes.iter().for_each(|note| *times.entry(note).or_default() += 1);
            times
                .iter()
                .for_each(|(note, times)| table.row([Cell::from(*note), Cell::from(times.to_string())]));
            parts.push(table.render(paper));
        }
        parts.join("\n")
    }

    fn json(&self, job: &str) -> Value {
        let metrics: Vec<Value> = self
            .metrics
            .iter()
            .map(|(name, series)| {
                json!({
                    "name": name,
                    "last": value(series.last),
                    "last_step": series.last_step,
                    "min": value(series.min),
                    "max": value(series.max),
                    "count": series.count,
                })
            })
            .collect();
        json!({ "job": job, "metrics": metrics, "params": self.params, "tags": self.tags, "notes": self.notes })
    }
}

impl Series {
    const EMPTY: Series =
        Series { last: f64::NAN, last_step: i64::MIN, min: f64::NAN, max: f64::NAN, count: 0 };

    fn add(&mut self, value: f64, step: i64) {
        if step >= self.last_step {
            (self.last, self.last_step) = (value, step);
        }
        // `min` and `max` ignore NaN.
        (self.min, self.max) = (self.min.min(value), self.max.max(value));
        self.count += 1;
    }
}

/// Whether MLflow's client set a tag by itself. Its pages do not show these either; one of them is a whole document for
/// each model.
fn is_of_client(tag: &str) -> bool {
    tag.rsplit('/').next().is_some_and(|name| name.starts_with("mlflow."))
}

/// The name of a record with that of its run; the job's own run has no name.
fn full_name(run: &str, name: String) -> String {
    if run.is_empty() { name } else { format!("{run}/{name}") }
}

/// A number, or a string for values that JSON has no number for.
fn value(value: f64) -> Value {
    match value {
        value if value.is_finite() => json!(value),
        value if value.is_nan() => json!("NaN"),
        value if value > 0.0 => json!("Infinity"),
        _ => json!("-Infinity"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::pretty;
    use crate::output::text::Ink;

    const LINES: &[u8] = br#"{"metric":"loss","value":0.5,"step":0}
{"metric":"loss","value":0.125,"step":2}
{"metric":"loss","value":0.25,"step":1}
nonsense
{"metric":"nothing","value":"NaN"}
{"param":"lr","text":"0.1"}
{"tag":"team","text":"vision"}
{"tag":"mlflow.log-model.history","text":"[{}]"}
{"note":"the file was replaced"}
{"note":"the file was replaced"}
{"metric":"cut"#;

    #[test]
    fn test_tables_show_last_least_and_greatest() {
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        insta::assert_snapshot!(Recorded::read(LINES, &[]).render(paper), @r"
            METRIC    LAST    MIN  MAX  COUNT
            loss     0.125  0.125  0.5      3
            nothing    NaN    NaN  NaN      1

            PARAMETER  VALUE
            lr         0.1

            TAG   VALUE
            team  vision

            NOTE                   TIMES
            the file was replaced      2
        ");
    }

    #[test]
    fn test_long_names_of_metrics_fit_80_columns() {
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        let name = "validation/classification-head/macro-averaged/f1-score/at-threshold";
        let lines: String = ["0.5", "0.7"]
            .map(|at| format!("{{\"metric\":\"{name}-{at}\",\"value\":0.123456,\"step\":7}}\n"))
            .concat();
        insta::assert_snapshot!(Recorded::read(lines.as_bytes(), &[]).render(paper), @r"
            METRIC                                           LAST       MIN       MAX  COUNT
            validation/classifica…core/at-threshold-0.5  0.123456  0.123456  0.123456      1
            validation/classifica…core/at-threshold-0.7  0.123456  0.123456  0.123456      1
        ");
    }

    #[test]
    fn test_json_has_words_for_what_is_no_number() {
        insta::assert_snapshot!("json", pretty(&Recorded::read(LINES, &[]).json("j")));
    }
}
