//! What jobs recorded: metrics, parameters and tags, read from their tracking records.
//!
//! Owns what counts as a parameter of a job, wherever it was said: an option of the command, an input that is a value, what
//! a trial of a sweep drew, what the script logged. Hides how records are read, of several jobs at a time.

use std::borrow::Cow;
use std::collections::BTreeMap;

use agent_model::job::Input;
use agent_model::sweep::Scalar;
use agent_model::tracking::{EXPERIMENT, OWN, TrackingLine, TrackingRecord};
use agent_model::{Fault, JobSpec};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use serde_json::{Value, json};

use super::view::with_values;
use crate::client::Client;
use crate::failure::Failure;
use crate::output::Paper;
use crate::output::table::{Cell, Table};
use crate::output::text::number;

/// Jobs whose records are read at a time.
const AT_ONCE: usize = 8;

/// What tells one run from another, and what came of it.
#[derive(Debug, Clone, Default)]
pub(super) struct RunFacts {
    pub(super) params: BTreeMap<String, String>,
    /// The last value of each.
    pub(super) metrics: BTreeMap<String, f64>,
    pub(super) tags: BTreeMap<String, String>,
}

impl RunFacts {
    /// Of a job with this specification. What was said later counts more: the script has the last word.
    pub(super) fn of(spec: &JobSpec, drawn: &BTreeMap<String, Scalar>, recorded: Recorded) -> RunFacts {
        let mut params: BTreeMap<String, String> = options(&with_values(spec)).into_iter().collect();
        let values = spec.inputs.iter().filter_map(|(name, input)| match input {
            Input::Literal(value) => Some((name.clone(), value.clone())),
            _ => None,
        });
        params.extend(values);
        params.extend(drawn.iter().map(|(name, value)| (name.clone(), value.to_string())));
        params.extend(recorded.params.clone());
        let mut tags = spec.tags.clone();
        tags.extend(recorded.tags.clone());
        RunFacts { params, metrics: recorded.last().collect(), tags }
    }

    /// The last value of a metric, for people; nothing where there is none.
    pub(super) fn metric(&self, name: &str) -> String {
        self.metrics.get(name).copied().map(number).unwrap_or_default()
    }
}

/// The options of a command that is one program with its arguments: `--lr 0.1`, `--lr=0.1` and `model.lr=0.1`. A name is
/// written as a script sees it, with `_`. Of a line for a shell there are none.
fn options(command: &str) -> Vec<(String, String)> {
    let words = words(command).unwrap_or_default();
    let mut found = Vec::new();
    let mut rest = words.iter().skip(1).map(String::as_str).peekable();
    while let Some(word) = rest.next() {
        let (name, value) = match (word.strip_prefix("--"), word.split_once('=')) {
            (Some(_), Some((name, value))) => (&name[2..], value),
            (Some(name), None) => {
                let is_value = |next: &&str| !next.starts_with('-') || next.parse::<f64>().is_ok();
                (name, rest.next_if(is_value).unwrap_or("true"))
            }
            (None, Some((name, value))) if !name.starts_with('-') && !value.contains(' ') => (name, value),
            _ => continue,
        };
        let is_name = |c: char| c.is_alphanumeric() || "_-./".contains(c);
        if !name.is_empty() && name.chars().all(is_name) && !value.contains("${{") {
            found.push((name.replace('-', "_"), value.to_owned()));
        }
    }
    found
}

/// The words of a command as a shell reads them; `None` where the shell does more than that.
fn words(command: &str) -> Option<Vec<String>> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut chars = command.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None | Some('"'), '\\') => word.get_or_insert_default().push(chars.next()?),
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '|' | ';' | '&' | '<' | '>' | '(' | ')' | '`' | '\n') => return None,
            (None, ' ' | '\t') => words.extend(word.take()),
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    quote.is_none().then_some(words)
}

/// What each of these jobs recorded, given by name and number of ranks, in their order, and what is to be told of records
/// that are gone.
pub(super) async fn of_jobs(
    client: &Client,
    jobs: Vec<(String, u32)>,
) -> Result<(Vec<Recorded>, Vec<Fault>), Failure> {
    let read = jobs.into_iter().map(|(job, ranks)| async move {
        let (lines, lost) = client.records(&job, ranks).await?;
        Ok::<_, Failure>((Recorded::read(&lines, &[]), lost))
    });
    let read: Vec<_> = stream::iter(read).buffered(AT_ONCE).try_collect().await?;
    let (recorded, lost): (Vec<_>, Vec<_>) = read.into_iter().unzip();
    Ok((recorded, lost.into_iter().flatten().collect()))
}

/// What a job recorded, summed up.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    pub(super) metrics: BTreeMap<String, Series>,
    pub(super) params: BTreeMap<String, String>,
    pub(super) tags: BTreeMap<String, String>,
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

    pub(super) fn render(&self, paper: Paper) -> String {
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

    pub(super) fn json(&self, job: &str) -> Value {
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
pub(super) fn full_name(run: &str, name: String) -> String {
    if run.is_empty() { name } else { format!("{run}/{name}") }
}

/// A number, or a string for values that JSON has no number for.
pub(super) fn value(value: f64) -> Value {
    match value {
        value if value.is_finite() => json!(value),
        value if value.is_nan() => json!("NaN"),
        value if value > 0.0 => json!("Infinity"),
        _ => json!("-Infinity"),
    }
}

/// A field of a table in CSV (RFC 4180).
pub(super) fn quoted(field: &str) -> Cow<'_, str> {
    match field.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")).into(),
        false => field.into(),
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
    fn test_options_of_a_command_are_parameters() {
        let shown = |command: &str| {
            let found = options(command).into_iter().map(|(name, value)| format!("{name}={value}"));
            found.collect::<Vec<_>>().join(" ")
        };
        for (command, expected) in [
            ("python train.py --lr 0.1 --batch-size=32 --fast -v", "lr=0.1 batch_size=32 fast=true"),
            ("python -u t.py --shift -1 --title 'a b' optim.lr=3e-4", "shift=-1 title=a b optim.lr=3e-4"),
            ("python t.py --data ${{inputs.d}} --a --b", "a=true b=true"),
            ("A=1 python t.py --lr 1 | tee log", ""),
            ("sh -c 'x=1; y'", ""),
            ("python t.py 'open", ""),
        ] {
            assert_eq!(shown(command), expected, "{command}");
        }
    }

    #[test]
    fn test_json_has_words_for_what_is_no_number() {
        insta::assert_snapshot!("json", pretty(&Recorded::read(LINES, &[]).json("j")));
    }
}
