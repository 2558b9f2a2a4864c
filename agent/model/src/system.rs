//! What a job took of its machine, as lines of the file that its node keeps about that.
//!
//! One JSON object a line, each for an interval: `{"time":1700000000000,"seconds":10,"values":{"cpu_cores":[0.1,0.5,1.0]}}`.
//! Names and units are those of the system metrics of MLflow where it has them (`_megabytes` are 10⁶ bytes), and values
//! have one digit after the point. A value that cannot be had is never 0: it is named in `absent` with the reason,
//! which holds until a later line has the value or another `absent`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Timestamp;

/// What MLflow has before the name of each of them.
pub const PREFIX: &str = "system/";

/// The least, the mean and the greatest of the samples of an interval. One number where they are the same.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(from = "SpreadForm", into = "SpreadForm")]
#[allow(missing_docs, reason = "the names say it")]
pub struct Spread {
    pub min: f64,
    pub mean: f64,
    pub max: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum SpreadForm {
    One(f64),
    Three([f64; 3]),
}

impl From<SpreadForm> for Spread {
    fn from(written: SpreadForm) -> Spread {
        match written {
            SpreadForm::One(all) => Spread { min: all, mean: all, max: all },
            SpreadForm::Three([min, mean, max]) => Spread { min, mean, max },
        }
    }
}

impl From<Spread> for SpreadForm {
    fn from(spread: Spread) -> SpreadForm {
        let Spread { min, mean, max } = spread;
        if min == max { SpreadForm::One(mean) } else { SpreadForm::Three([min, mean, max]) }
    }
}

/// One line: an interval.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SystemLine {
    /// Its end.
    pub time: Timestamp,
    /// Its length.
    pub seconds: u64,
    /// What was measured.
    #[serde(default)]
    pub values: BTreeMap<String, Spread>,
    /// What could not be, with the reason; `None` when that is as in the line before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub absent: Option<BTreeMap<String, String>>,
}

impl SystemLine {
    /// The line, with its line feed.
    pub fn to_line(&self) -> String {
        let mut line = serde_json::to_string(self).unwrap_or_default(); // strings and finite numbers always serialise
        line.push('\n');
        line
    }

    /// All lines of a file, in their order. What is none is left out: a part that a killed daemon wrote, or something
    /// that a later release writes.
    pub fn read(file: &[u8]) -> Vec<SystemLine> {
        let lines = file.split(|byte| *byte == b'\n');
        lines.filter_map(|line| serde_json::from_slice(line).ok()).collect()
    }
}

/// What is known at one moment.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SystemSample {
    /// By name.
    pub values: BTreeMap<String, f64>,
    /// Why a name has no value.
    pub absent: BTreeMap<String, String>,
}

impl SystemSample {
    /// Adds a value, or the reason why there is none. A number that is none is not known either.
    pub fn set(&mut self, name: impl Into<String>, value: Result<f64, &str>) {
        match value {
            Ok(value) if value.is_finite() => drop(self.values.insert(name.into(), value)),
            Ok(_) => drop(self.absent.insert(name.into(), "it is no number".to_owned())),
            Err(why) => drop(self.absent.insert(name.into(), why.to_owned())),
        }
    }
}

/// The samples of an interval that is not over.
#[derive(Debug, Default)]
pub struct SystemInterval {
    sums: BTreeMap<String, (Spread, u32)>,
    absent: BTreeMap<String, String>,
    /// What the last line said.
    told: Option<BTreeMap<String, String>>,
}

impl SystemInterval {
    /// Takes in a sample. A name that had a value once in the interval is not absent from it.
    pub fn add(&mut self, sample: SystemSample) {
        for (name, value) in sample.values {
            let (sum, count) =
                self.sums.entry(name).or_insert((Spread { min: value, mean: 0.0, max: value }, 0));
            (sum.min, sum.max) = (sum.min.min(value), sum.max.max(value));
            sum.mean += value;
            *count += 1;
        }
        self.absent.extend(sample.absent);
    }

    /// Ends the interval; `None` when there was no sample in it.
    pub fn end(&mut self, time: Timestamp, seconds: u64) -> Option<SystemLine> {
        let (sums, mut absent) = (std::mem::take(&mut self.sums), std::mem::take(&mut self.absent));
        if sums.is_empty() && absent.is_empty() {
            return None;
        }
        absent.retain(|name, _| !sums.contains_key(name));
        let values = sums.into_iter().map(|(name, (sum, count))| {
            let mean = rounded(sum.mean / f64::from(count));
            (name, Spread { min: rounded(sum.min), mean, max: rounded(sum.max) })
        });
        let is_told = self.told.as_ref() == Some(&absent);
        let absent = (!is_told).then(|| self.told.insert(absent).clone());
        Some(SystemLine { time, seconds, values: values.collect(), absent })
    }
}

/// To one digit after the point.
pub fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(values: &[(&str, Result<f64, &str>)]) -> SystemSample {
        let mut sample = SystemSample::default();
        values.iter().for_each(|(name, value)| sample.set(*name, *value));
        sample
    }

    #[test]
    fn test_an_interval_has_least_mean_and_greatest_of_its_samples_and_what_is_absent_once() {
        let mut interval = SystemInterval::default();
        interval.add(sample(&[("cpu", Ok(1.0)), ("disk", Err("not counted")), ("gpu", Err("no driver"))]));
        interval.add(sample(&[("cpu", Ok(2.26)), ("gpu", Ok(50.0))]));
        let first = interval.end(Timestamp(10), 20).unwrap().to_line();
        assert_eq!(
            first,
            "{\"time\":10,\"seconds\":20,\"values\":{\"cpu\":[1.0,1.6,2.3],\"gpu\":50.0},\
             \"absent\":{\"disk\":\"not counted\"}}\n"
        );
        interval.add(sample(&[("cpu", Ok(3.0)), ("disk", Err("not counted"))]));
        let second = interval.end(Timestamp(20), 10).unwrap().to_line();
        assert_eq!(second, "{\"time\":20,\"seconds\":10,\"values\":{\"cpu\":3.0}}\n");
        interval.add(sample(&[("cpu", Ok(f64::NAN)), ("disk", Ok(0.0))]));
        let third = interval.end(Timestamp(30), 10).unwrap();
        assert_eq!(third.values["disk"], Spread { min: 0.0, mean: 0.0, max: 0.0 });
        assert_eq!(third.absent.unwrap()["cpu"], "it is no number", "and never 0");
        assert_eq!(interval.end(Timestamp(40), 10), None);
    }

    #[test]
    fn test_lines_round_trip_and_what_is_none_is_left_out() {
        let mut interval = SystemInterval::default();
        interval.add(sample(&[("a", Ok(0.5)), ("b", Err("why"))]));
        let line = interval.end(Timestamp(7), 1).unwrap();
        let file = format!("{{\"time\":3,\"seco\n\n{}nonsense", line.to_line());
        assert_eq!(SystemLine::read(file.as_bytes()), [line]);
    }
}
