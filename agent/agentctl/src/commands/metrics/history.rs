//! Every point of the metrics of jobs, in the order in which they were recorded.

use std::fmt::Write as _;

use agent_model::Timestamp;
use agent_model::tracking::{TrackingLine, TrackingRecord};
use serde_json::{Value, json};

use super::{full_name, quoted, value};
use crate::output::Paper;
use crate::output::table::{Cell, Table};
use crate::output::text::{moment, number};

/// One value of one metric.
#[derive(Debug, PartialEq)]
pub(super) struct Point {
    job: String,
    metric: String,
    step: i64,
    /// Unknown in records that another program wrote without it.
    time: Option<Timestamp>,
    value: f64,
}

impl Point {
    /// The points in the tracking records of a job, one record a line, of these metrics; of all if none is named.
    pub(super) fn read(job: &str, lines: &[u8], wanted: &[String]) -> Vec<Point> {
        let point = |line: TrackingLine| {
            let TrackingLine { run, record: TrackingRecord::Metric { metric, value, step, time } } = line
            else {
                return None;
            };
            let metric = full_name(&run, metric);
            let is_wanted = wanted.is_empty() || wanted.contains(&metric);
            is_wanted.then(|| Point { job: job.to_owned(), metric, step, time, value })
        };
        lines.split(|byte| *byte == b'\n').filter_map(TrackingLine::parse).filter_map(point).collect()
    }

    /// The mean of an interval in which the use of a machine was measured.
    pub(super) fn of_system(job: &str, metric: String, step: i64, time: Timestamp, value: f64) -> Point {
        Point { job: job.to_owned(), metric, step, time: Some(time), value }
    }

    fn json(&self) -> Value {
        let Point { job, metric, step, time, value: number } = self;
        json!({ "job": job, "metric": metric, "step": step, "time_ms": time.map(|time| time.0), "value": value(*number) })
    }
}

/// For programs: a list, in the order of the points.
pub(super) fn json(points: &[Point]) -> Value {
    points.iter().map(Point::json).collect()
}

/// For spreadsheets and data frames (RFC 4180); a value reads back as the same number.
pub(super) fn csv(points: &[Point]) -> String {
    let mut text = "job,metric,step,time_ms,value\n".to_owned();
    for Point { job, metric, step, time, value } in points {
        let time = time.map(|time| time.0.to_string()).unwrap_or_default();
        let _ = writeln!(text, "{job},{},{step},{time},{value}", quoted(metric)); // into memory
    }
    text
}

/// For people; the job is named when there are several.
pub(super) fn table(points: &[Point], paper: Paper) -> String {
    let several = points.iter().any(|point| point.job != points[0].job);
    let (headings, right): (&[&str], &[usize]) = match several {
        true => (&["JOB", "METRIC", "STEP", "TIME", "VALUE"], &[2, 4]),
        false => (&["METRIC", "STEP", "TIME", "VALUE"], &[1, 3]),
    };
    let names: &[usize] = if several { &[0, 1] } else { &[0] };
    let mut table = Table::new(headings, right).with_names(names);
    for Point { job, metric, step, time, value } in points {
        let time = time.map(moment).unwrap_or_default();
        let point = [metric.clone(), step.to_string(), time, number(*value)].map(Cell::from);
        table.row(several.then(|| Cell::from(job)).into_iter().chain(point));
    }
    table.render(paper)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::pretty;
    use crate::output::text::Ink;

    const LINES: &[u8] = br#"{"metric":"loss","value":0.1,"step":0,"time":1700000000000}
{"param":"lr","text":"0.1"}
{"metric":"a \"b\", c","value":"-Infinity","step":-1}
nonsense
{"metric":"loss","value":0.9800000000000001,"step":1,"time":1700000001000}
"#;

    fn points() -> Vec<Point> {
        Point::read("j", LINES, &[])
    }

    #[test]
    fn test_every_point_is_there_in_its_order_to_the_last_bit() {
        insta::assert_snapshot!(csv(&points()), @r#"
        job,metric,step,time_ms,value
        j,loss,0,1700000000000,0.1
        j,"a ""b"", c",-1,,-inf
        j,loss,1,1700000001000,0.9800000000000001
        "#);
        insta::assert_snapshot!("history_json", pretty(&json(&points())));
    }

    #[test]
    fn test_only_what_is_named_and_jobs_where_there_are_several() {
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        let loss = ["loss".to_owned()];
        insta::assert_snapshot!(table(&Point::read("j", LINES, &loss), paper), @r"
        METRIC  STEP  TIME                     VALUE
        loss       0  2023-11-14 22:13:20 UTC    0.1
        loss       1  2023-11-14 22:13:21 UTC   0.98
        ");
        let two: Vec<_> = [Point::read("i", LINES, &loss), points()].into_iter().flatten().collect();
        insta::assert_snapshot!(table(&two, paper), @r#"
        JOB  METRIC    STEP  TIME                     VALUE
        i    loss         0  2023-11-14 22:13:20 UTC    0.1
        i    loss         1  2023-11-14 22:13:21 UTC   0.98
        j    loss         0  2023-11-14 22:13:20 UTC    0.1
        j    a "b", c    -1                            -inf
        j    loss         1  2023-11-14 22:13:21 UTC   0.98
        "#);
        let long = |job: &str| Point::read(job, LINES, &loss);
        let names =
            ["resnet50-imagenet-large-batch-warmup-x7k2p", "resnet50-imagenet-large-batch-warmup-q3m9z"];
        let mut points: Vec<Point> = names.into_iter().flat_map(long).collect();
        points.iter_mut().for_each(|point| point.metric = "validation/head/macro-averaged/loss".into());
        insta::assert_snapshot!(table(&points, paper), @r"
            JOB                   METRIC                STEP  TIME                     VALUE
            resnet50-i…mup-x7k2p  validation…aged/loss     0  2023-11-14 22:13:20 UTC    0.1
            resnet50-i…mup-x7k2p  validation…aged/loss     1  2023-11-14 22:13:21 UTC   0.98
            resnet50-i…mup-q3m9z  validation…aged/loss     0  2023-11-14 22:13:20 UTC    0.1
            resnet50-i…mup-q3m9z  validation…aged/loss     1  2023-11-14 22:13:21 UTC   0.98
        ");
        assert_eq!(table(&[], paper).lines().count(), 1);
    }
}
