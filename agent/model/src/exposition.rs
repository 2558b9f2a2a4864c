//! Numbers for Prometheus: its text format, version 0.0.4, and histograms.
//!
//! Pure. A family has its HELP and TYPE once, before its samples; label values are escaped; a family without samples is
//! left out. `promtool check metrics` reads what comes of it in a test of the system.

use std::fmt::{Display, Write as _};
use std::time::Duration;

/// The content type of a page.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What a family counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum NumberKind {
    Counter,
    Gauge,
    Histogram,
}

/// Labels of a sample and their values.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

/// A page of families.
#[derive(Debug, Default)]
pub struct MetricsPage {
    text: String,
}

impl MetricsPage {
    /// Adds a family with these samples.
    pub fn family<L, V>(
        &mut self,
        name: &str,
        kind: NumberKind,
        help: &str,
        samples: impl IntoIterator<Item = (L, V)>,
    ) where
        L: AsRef<[(&'static str, String)]>,
        V: Into<f64>,
    {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return;
        }
        self.head(name, kind, help);
        for (labels, value) in samples {
            let labels: Vec<(&str, &str)> =
                labels.as_ref().iter().map(|(name, value)| (*name, value.as_str())).collect();
            self.sample(name, &labels, value.into());
        }
    }

    /// Adds a family with one sample that has no labels.
    pub fn one(&mut self, name: &str, kind: NumberKind, help: &str, value: impl Into<f64>) {
        self.family(name, kind, help, [([], value)]);
    }

    /// Adds a histogram without labels.
    pub fn histogram(&mut self, name: &str, help: &str, of: &Histogram) {
        self.head(name, NumberKind::Histogram, help);
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        for (bound, count) in of.bounds.iter().zip(&of.counts) {
            below += count;
            self.sample(&bucket, &[("le", &bound.to_string())], below as f64);
        }
        self.sample(&bucket, &[("le", "+Inf")], of.count as f64);
        self.sample(&format!("{name}_sum"), &[], of.sum);
        self.sample(&format!("{name}_count"), &[], of.count as f64);
    }

    /// The text.
    pub fn into_text(self) -> String {
        self.text
    }

    fn head(&mut self, name: &str, kind: NumberKind, help: &str) {
        let kind = match kind {
            NumberKind::Counter => "counter",
            NumberKind::Gauge => "gauge",
            NumberKind::Histogram => "histogram",
        };
        let help = help.replace('\\', r"\\").replace('\n', r"\n");
        self.line(format_args!("# HELP {name} {help}"));
        self.line(format_args!("# TYPE {name} {kind}"));
    }

    fn sample(&mut self, name: &str, labels: Labels<'_>, value: f64) {
        let labels: Vec<String> =
            labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
        match labels.is_empty() {
            true => self.line(format_args!("{name} {value}")),
            false => self.line(format_args!("{name}{{{}}} {value}", labels.join(","))),
        }
    }

    fn line(&mut self, line: impl Display) {
        let _ = writeln!(self.text, "{line}"); // into memory
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

/// How many times something took at most so many seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    count: u64,
    sum: f64,
}

impl Histogram {
    /// With these bounds, in seconds, which grow.
    pub fn new(bounds: &'static [f64]) -> Histogram {
        Histogram { bounds, counts: vec![0; bounds.len()], count: 0, sum: 0.0 }
    }

    /// Counts one.
    pub fn observe(&mut self, took: Duration) {
        let seconds = took.as_secs_f64();
        if let Some(place) = self.bounds.iter().position(|bound| seconds <= *bound) {
            self.counts[place] += 1;
        }
        self.count += 1;
        self.sum += seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_families_have_one_head_escaped_labels_and_are_left_out_when_empty() {
        let mut page = MetricsPage::default();
        let hostile = vec![("name", "a\\b\"c\nd{}".to_owned())];
        page.family("agent_x", NumberKind::Gauge, "What \\ is\nit.", [(hostile, 1.5), (vec![], 2.0)]);
        page.family::<[(&str, String); 0], f64>("agent_none", NumberKind::Gauge, "None.", []);
        page.one("agent_y_total", NumberKind::Counter, "So many.", 3_u32);
        let text = r#"# HELP agent_x What \\ is\nit.
# TYPE agent_x gauge
agent_x{name="a\\b\"c\nd{}"} 1.5
agent_x 2
# HELP agent_y_total So many.
# TYPE agent_y_total counter
agent_y_total 3
"#;
        assert_eq!(page.into_text(), text);
    }

    #[test]
    fn test_buckets_of_a_histogram_add_up() {
        let mut histogram = Histogram::new(&[0.5, 2.0]);
        for seconds in [0.1, 0.5, 1.0, 60.0] {
            histogram.observe(Duration::from_secs_f64(seconds));
        }
        let mut page = MetricsPage::default();
        page.histogram("agent_h_seconds", "H.", &histogram);
        let text = "# HELP agent_h_seconds H.\n# TYPE agent_h_seconds histogram\nagent_h_seconds_bucket{le=\"0.5\"} 2\n\
                    agent_h_seconds_bucket{le=\"2\"} 3\nagent_h_seconds_bucket{le=\"+Inf\"} 4\nagent_h_seconds_sum 61.6\n\
                    agent_h_seconds_count 4\n";
        assert_eq!(page.into_text(), text);
    }
}
