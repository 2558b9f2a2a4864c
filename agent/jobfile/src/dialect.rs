//! Which of the two forms a job file has.

use super::command_job::keys::JOB;
use super::keys::Keys;
use super::runconfig::LEGACY;
use super::runconfig::keys::RUNCONFIG;
use crate::yaml::{self, Value};

/// A form of job files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// The command job of the CLI v2.
    Job,
    /// The run configuration of the SDK and CLI v1.
    Runconfig,
}

impl Dialect {
    /// From the name of a file, and from its text where the name does not say.
    pub fn of(name: &str, text: &str) -> Dialect {
        match name {
            "job.yml" | "job.yaml" => Dialect::Job,
            name if name.ends_with(".runconfig") => Dialect::Runconfig,
            _ => Dialect::of_text(text),
        }
    }

    /// The form whose keys are more of those that only one form has.
    fn of_text(text: &str) -> Dialect {
        let Ok(yaml::Node { value: Value::Map(entries), .. }) = yaml::parse(text) else {
            return Dialect::Job;
        };
        let written = || entries.iter().map(|(key, _)| key.text.as_str());
        let only = |own: &Keys, other: &Keys| {
            written().filter(|key| own.find(key).is_some() && other.find(key).is_none()).count()
        };
        let legacy = written().filter(|key| LEGACY.contains(key)).count();
        match only(&RUNCONFIG, &JOB) + legacy > only(&JOB, &RUNCONFIG) {
            true => Dialect::Runconfig,
            false => Dialect::Job,
        }
    }

    /// The keys of the document.
    pub(super) fn keys(self) -> &'static Keys {
        match self {
            Dialect::Job => &JOB,
            Dialect::Runconfig => &RUNCONFIG,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_form_is_known_by_its_name_or_its_keys() {
        for (name, text, expected) in [
            ("local.runconfig", "command: x", Dialect::Runconfig),
            ("job.yml", "script: x\ntarget: y", Dialect::Job),
            ("a.yml", "command: x\ncode: .\nframework: y", Dialect::Job),
            ("a.yml", "command: x\nenvironment: {}", Dialect::Job),
            ("a.json", "{\"script\": \"x\", \"node_count\": 2}", Dialect::Runconfig),
            ("a.yml", "ArgumentVector: [x]\nEnvironmentVariables: {}", Dialect::Runconfig),
            ("a.yml", "[", Dialect::Job),
        ] {
            assert_eq!(Dialect::of(name, text), expected, "{name} {text}");
        }
    }
}
