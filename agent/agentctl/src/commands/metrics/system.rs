//! What jobs take of their machines: processors, memory, disks and GPUs, as their nodes measure it.
//!
//! Names and units are those of the records ([`agent_model::system`]); of a job on several nodes, the rank stands between
//! `system/` and the name, as MLflow has it. A value that is not known is told with its reason, and is never 0.

use std::collections::BTreeMap;

use agent_model::Channel;
use agent_model::system::{PREFIX, Spread, SystemLine, rounded};
use agent_proto::v1;
use serde_json::{Value, json};

use super::history::{self, Point};
use super::{documents, each_below_its_name};
use crate::cli::MetricsArgs;
use crate::client::{Client, answer, next};
use crate::commands::arrays::tasks_or_self;
use crate::commands::view::JobView;
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::{number, wrap};
use crate::output::{Output, Paper};

/// What one job took, by rank.
struct SystemUse {
    job: String,
    ranks: Vec<Vec<SystemLine>>,
}

/// One value over the whole time.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Summary {
    spread: Spread,
    last: f64,
    seconds: u64,
}

/// Shows it, of each job.
pub(super) async fn show(client: &Client, args: &MetricsArgs, output: &mut Output) -> Result<(), Failure> {
    let mut all = Vec::new();
    for job in &args.jobs {
        let view = JobView::try_from(client.job(job).await?)?;
        for view in tasks_or_self(client, view).await? {
            let mut ranks = Vec::new();
            for rank in 0..view.ranks() {
                ranks.push(read(client, &view.job, rank, 0).await?);
            }
            all.push(SystemUse { job: view.job, ranks });
        }
    }
    if args.history {
        let points: Vec<Point> = all.iter().flat_map(|taken| taken.points(&args.metric)).collect();
        return match (args.json, args.csv) {
            (true, _) => output.json(&history::json(&points)),
            (_, true) => output.print(&history::csv(&points)),
            _ => output.print(&history::table(&points, output.paper())),
        };
    }
    if args.json {
        return documents(all.iter().map(|taken| taken.json(&args.metric)).collect(), output);
    }
    let paper = output.paper();
    let told = all.iter().map(|taken| {
        let text = taken.render(&args.metric, paper).ok_or_else(|| {
            format!("nothing was measured of {}: its node looks at a job first after 2 s", taken.job)
        });
        (taken.job.as_str(), text)
    });
    each_below_its_name(told.collect(), output)
}

/// What it takes now, of a job that runs on one node: the last line, if there is one.
pub(in crate::commands) async fn now(client: &Client, job: &JobView) -> Option<SystemLine> {
    if job.has_ended() || job.ranks() > 1 || job.state != "Running" {
        return None;
    }
    // It is there or not: a job is shown in any case.
    read(client, &job.job, 0, 1).await.ok()?.pop()
}

/// The means of a line, by name.
pub(in crate::commands) fn values(line: &SystemLine) -> Value {
    let means: BTreeMap<&String, f64> =
        line.values.iter().map(|(name, spread)| (name, spread.mean)).collect();
    json!(means)
}

/// A line in words, of what is known.
pub(in crate::commands) fn words(line: &SystemLine) -> String {
    let mean = |name: &str| line.values.get(name).map(|spread| spread.mean);
    let mut words = Vec::new();
    words.extend(mean("cpu_cores").map(|cores| format!("{} cores", number(cores))));
    words.extend(mean("system_memory_usage_megabytes").map(|memory| {
        let part =
            mean("system_memory_usage_percentage").map(|part| format!(" ({} % of its limit)", number(part)));
        let peak = mean("memory_peak_megabytes").map(|peak| format!(", at most {} MB so far", number(peak)));
        format!("{} MB of memory{}{}", number(memory), part.unwrap_or_default(), peak.unwrap_or_default())
    }));
    for gpu in 0.. {
        let of = |name: &str| mean(&format!("gpu_{gpu}_{name}"));
        let (busy, memory) = (of("utilization_percentage"), of("memory_usage_megabytes"));
        if busy.is_none() && memory.is_none() {
            break;
        }
        let known = [
            busy.map(|busy| format!("{} %", number(busy))),
            memory.map(|used| format!("{} MB", number(used))),
        ];
        words.push(format!("GPU {gpu} {}", known.into_iter().flatten().collect::<Vec<_>>().join(" and ")));
    }
    words.join("\n")
}

async fn read(client: &Client, job: &str, rank: u32, last_lines: u64) -> Result<Vec<SystemLine>, Failure> {
    let request = v1::ReadLogRequest {
        job: job.to_owned(),
        rank,
        stream: Channel::System.to_string(),
        tail_lines: last_lines,
        ..Default::default()
    };
    let mut chunks = answer(client.telemetry().read_log(request)).await?;
    let mut file = Vec::new();
    while let Some(chunk) = next(&mut chunks).await? {
        file.extend_from_slice(&chunk.data);
    }
    Ok(SystemLine::read(&file))
}

impl SystemUse {
    /// The full names of a rank's values begin with this.
    fn prefix(&self, rank: usize) -> String {
        if self.ranks.len() > 1 { format!("{PREFIX}{rank}/") } else { PREFIX.to_owned() }
    }

    fn points(&self, wanted: &[String]) -> Vec<Point> {
        let mut points = Vec::new();
        for (rank, lines) in self.ranks.iter().enumerate() {
            let prefix = self.prefix(rank);
            for (step, line) in (0..).zip(lines) {
                for (name, spread) in &line.values {
                    if is_wanted(&prefix, name, wanted) {
                        points.push(Point::of_system(
                            &self.job,
                            format!("{prefix}{name}"),
                            step,
                            line.time,
                            spread.mean,
                        ));
                    }
                }
            }
        }
        points
    }

    /// Over the whole time, and what was not known at its end, by full names.
    fn summary(&self, wanted: &[String]) -> (BTreeMap<String, Summary>, BTreeMap<String, String>) {
        let (mut sums, mut absent) = (BTreeMap::<String, Summary>::new(), BTreeMap::new());
        for (rank, lines) in self.ranks.iter().enumerate() {
            let prefix = self.prefix(rank);
            let mut missing = None;
            for line in lines {
                missing = line.absent.as_ref().or(missing);
                for (name, spread) in line.values.iter().filter(|(name, _)| is_wanted(&prefix, name, wanted))
                {
                    let first = Summary { spread: *spread, last: 0.0, seconds: 0 };
                    sums.entry(format!("{prefix}{name}")).or_insert(first).add(*spread, line.seconds);
                }
            }
            let missing = missing.into_iter().flatten().filter(|(name, _)| is_wanted(&prefix, name, wanted));
            absent.extend(missing.map(|(name, why)| (format!("{prefix}{name}"), why.clone())));
        }
        (sums, absent)
    }

    fn json(&self, wanted: &[String]) -> Value {
        let (sums, absent) = self.summary(wanted);
        let value = |sum: &Summary| {
            let Spread { min, mean, max } = sum.spread;
            json!({ "min": min, "mean": rounded(mean), "max": max, "last": sum.last, "seconds": sum.seconds })
        };
        let metrics: BTreeMap<&String, Value> = sums.iter().map(|(name, sum)| (name, value(sum))).collect();
        json!({ "job": self.job, "metrics": metrics, "absent": absent })
    }

    /// `None` where nothing was measured.
    fn render(&self, wanted: &[String], paper: Paper) -> Option<String> {
        let (sums, absent) = self.summary(wanted);
        let mut table = Table::new(&["METRIC", "MEAN", "MIN", "MAX", "LAST"], &[1, 2, 3, 4]).with_names(&[0]);
        for (name, sum) in &sums {
            let Spread { min, mean, max } = sum.spread;
            let numbers = [rounded(mean), min, max, sum.last].map(|value| Cell::from(number(value)));
            table.row([Cell::from(name.clone())].into_iter().chain(numbers));
        }
        let mut text = if sums.is_empty() { String::new() } else { table.render(paper) };
        let mut why: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, reason) in &absent {
            why.entry(reason).or_default().push(name);
        }
        for (reason, names) in why {
            let line = format!("not known: {}: {reason}", names.join(", "));
            text.push_str(&format!("{}\n", wrap(&line, paper.width, 2)));
        }
        (!text.is_empty()).then_some(text)
    }
}

impl Summary {
    /// The mean is by time.
    fn add(&mut self, spread: Spread, seconds: u64) {
        let sum = self.spread.mean * self.seconds as f64 + spread.mean * seconds as f64;
        self.seconds += seconds;
        self.spread.mean = sum / self.seconds.max(1) as f64;
        self.spread.min = self.spread.min.min(spread.min);
        self.spread.max = self.spread.max.max(spread.max);
        self.last = spread.mean;
    }
}

/// A name is given with or without what stands before it.
fn is_wanted(prefix: &str, name: &str, wanted: &[String]) -> bool {
    wanted.is_empty() || wanted.iter().any(|one| one == name || one.strip_prefix(prefix) == Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::pretty;
    use crate::output::text::Ink;

    const FILE: &str = r#"{"time":1700000002000,"seconds":2,"values":{"cpu_cores":1.0,"memory_peak_megabytes":100.0,"gpu_0_memory_usage_megabytes":7.0},"absent":{"disk_read_megabytes":"not counted","gpu_0_utilization_percentage":"MIG"}}
{"time":1700000012000,"seconds":10,"values":{"cpu_cores":[0.5,2.2,4.0],"memory_peak_megabytes":250.5,"system_memory_usage_megabytes":90.0,"system_memory_usage_percentage":45.0}}
"#;
    const PAPER: Paper = Paper { ink: Ink::PLAIN, width: 80 };

    fn taken() -> SystemUse {
        SystemUse { job: "train-1".into(), ranks: vec![SystemLine::read(FILE.as_bytes())] }
    }

    #[test]
    fn test_the_whole_time_is_summed_up_by_time_with_what_is_not_known() {
        insta::assert_snapshot!(taken().render(&[], PAPER).unwrap(), @r"
        METRIC                                  MEAN  MIN    MAX   LAST
        system/cpu_cores                           2  0.5      4    2.2
        system/gpu_0_memory_usage_megabytes        7    7      7      7
        system/memory_peak_megabytes           225.4  100  250.5  250.5
        system/system_memory_usage_megabytes      90   90     90     90
        system/system_memory_usage_percentage     45   45     45     45
        not known: system/gpu_0_utilization_percentage: MIG
        not known: system/disk_read_megabytes: not counted
        ");
        insta::assert_snapshot!("system_json", pretty(&taken().json(&[])));
        let one = ["cpu_cores".to_owned()];
        assert_eq!(taken().render(&one, PAPER).unwrap().lines().count(), 2);
        assert_eq!(taken().render(&["system/cpu_cores".to_owned()], PAPER), taken().render(&one, PAPER));
        assert_eq!(SystemUse { ranks: vec![vec![]], ..taken() }.render(&[], PAPER), None);
    }

    #[test]
    fn test_ranks_have_their_number_in_the_name_and_every_interval_is_a_point() {
        let ranks = vec![SystemLine::read(FILE.as_bytes()); 2];
        let gang = SystemUse { ranks, ..taken() };
        let points = gang.points(&["system/1/cpu_cores".to_owned()]);
        insta::assert_snapshot!(history::csv(&points), @r"
        job,metric,step,time_ms,value
        train-1,system/1/cpu_cores,0,1700000002000,1
        train-1,system/1/cpu_cores,1,1700000012000,2.2
        ");
    }

    #[test]
    fn test_a_line_in_words_has_what_is_known() {
        let lines = SystemLine::read(FILE.as_bytes());
        insta::assert_snapshot!(words(&lines[0]), @r"
        1 cores
        GPU 0 7 MB
        ");
        insta::assert_snapshot!(words(&lines[1]), @r"
        2.2 cores
        90 MB of memory (45 % of its limit), at most 250.5 MB so far
        ");
    }
}
