//! Metrics, parameters and tags a job records, as lines of its tracking file.
//!
//! One JSON object a line. The tracking endpoint writes them for scripts that use MLflow; other scripts may
//! append them to the file that `AGENTD_METRICS` names. The byte offset of a line is its sequence number:
//! (replica, offset) identifies a record for ever, so a record that is delivered twice counts once.

use serde::{Deserialize, Serialize};

use crate::Timestamp;

/// The prefix of tags that the tracking endpoint of a node reserves for itself.
pub const OWN: &str = "agentd.";

/// The one reserved tag that is for people: the script's name for its experiment.
pub const EXPERIMENT: &str = "agentd.experiment";

/// One line of a tracking file: what was recorded, and by which run of the job.
///
/// The job's own run has no name here. A run that the script began beside it is named in each of its records
/// (`"run": "trial-1"`), so a metric whose name has slashes is never taken for one of another run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrackingLine {
    /// The run that recorded it; empty for the job's own.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub run: String,
    /// What it recorded.
    #[serde(flatten)]
    pub record: TrackingRecord,
}

/// What a run records.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TrackingRecord {
    /// `{"metric": "loss", "value": 0.25, "step": 3}`
    Metric {
        /// Its name.
        metric: String,
        /// Its value; `"NaN"`, `"Infinity"` and `"-Infinity"` are written as strings.
        #[serde(with = "float")]
        value: f64,
        /// The step it belongs to.
        #[serde(default)]
        step: i64,
        /// When it was recorded; not known when absent.
        #[serde(default)]
        time: Option<Timestamp>,
    },
    /// `{"param": "lr", "text": "0.1"}`
    Param {
        /// Its name.
        param: String,
        /// Its value.
        text: String,
    },
    /// `{"tag": "team", "text": "vision"}`
    Tag {
        /// Its name.
        tag: String,
        /// Its value.
        text: String,
    },
    /// `{"untag": "team"}`: the tag is removed.
    Untag {
        /// Its name.
        untag: String,
    },
    /// `{"note": "the file was replaced"}`: a message of agentd about the records around it, for people.
    Note {
        /// The message.
        note: String,
    },
}

impl From<TrackingRecord> for TrackingLine {
    /// A record of the job's own run.
    fn from(record: TrackingRecord) -> TrackingLine {
        TrackingLine { run: String::new(), record }
    }
}

impl TrackingLine {
    /// Reads one line; `None` when it is not a record.
    pub fn parse(line: &[u8]) -> Option<TrackingLine> {
        serde_json::from_slice(line).ok()
    }

    /// The line, with its line feed.
    pub fn to_line(&self) -> String {
        let mut line = serde_json::to_string(self).unwrap_or_default(); // strings and numbers always serialise
        line.push('\n');
        line
    }
}

mod float {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
        if value.is_finite() {
            to.serialize_f64(*value)
        } else if value.is_nan() {
            to.serialize_str("NaN")
        } else {
            to.serialize_str(if *value > 0.0 { "Infinity" } else { "-Infinity" })
        }
    }

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Number(f64),
        Text(String),
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        match Written::deserialize(from)? {
            Written::Number(value) => Ok(value),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &[u8]) -> Option<TrackingRecord> {
        TrackingLine::parse(line).map(|line| line.record)
    }

    #[test]
    fn test_lines_round_trip() {
        for value in [0.0, -1.5e300, f64::INFINITY, f64::NEG_INFINITY] {
            let record = TrackingRecord::Metric { metric: "m".into(), value, step: -3, time: None };
            for run in ["", "trial/1"] {
                let line = TrackingLine { run: run.into(), record: record.clone() };
                assert_eq!(TrackingLine::parse(line.to_line().as_bytes()), Some(line));
            }
        }
        let nan = parse(br#"{"metric":"m","value":"NaN"}"#);
        for record in [
            TrackingRecord::Note { note: "cut".into() },
            TrackingRecord::Untag { untag: "team".into() },
            TrackingRecord::Tag { tag: "team".into(), text: String::new() },
        ] {
            assert_eq!(parse(TrackingLine::from(record.clone()).to_line().as_bytes()), Some(record));
        }
        assert!(matches!(nan, Some(TrackingRecord::Metric { value, step: 0, .. }) if value.is_nan()));
    }

    /// A script that stops at the best value, or compares with it, needs the one it recorded.
    #[test]
    fn test_values_come_back_to_the_last_bit() {
        let mut bits = 0x9e37_79b9_7f4a_7c15_u64;
        let numbers = std::iter::repeat_with(|| {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            f64::from_bits(bits)
        });
        let usual = [0.980_000_000_000_000_1, 0.1 + 0.2, 1.0 / 3.0, f64::MIN_POSITIVE, 5e-324, f64::MAX];
        for value in usual.into_iter().chain(numbers.filter(|value| value.is_finite()).take(10_000)) {
            let record = TrackingRecord::Metric { metric: "m".into(), value, step: 0, time: None };
            let Some(TrackingRecord::Metric { value: back, .. }) =
                parse(TrackingLine::from(record).to_line().as_bytes())
            else {
                panic!("{value} is no record")
            };
            assert_eq!(back.to_bits(), value.to_bits(), "{value}");
        }
    }

    #[test]
    fn test_what_is_not_a_record_is_none() {
        for bad in [&b""[..], b"{}", b"loss=3", b"{\"metric\":3}", b"\xff"] {
            assert_eq!(TrackingLine::parse(bad), None);
        }
    }
}
