//! Whether a step of a pipeline would do what another one did.
//!
//! Owns what decides that ([`JobSpec::reuse_parts`]): everything that can change what a step leaves, each part as a text
//! that two equal parts have in common. Not in it are where and when it runs, how often it is tried, how urgent it is and
//! what it is called. Inputs count by their content, so a step that left the same as before lets those after it be reused.
//! Pure.
//!
//! Of the environment the definition counts here; what it resolved to is known with the outcome alone, and is compared
//! there.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::{Input, JobSpec};

/// Raised when the same parts lead to something else: when outputs are collected by other rules, or a part comes.
const VERSION: &str = "1";

/// Variables that the pipeline itself sets.
const OF_PIPELINE: [&str; 2] = ["AGENTD_PIPELINE", "AGENTD_STEP"];

/// What decides what a step leaves: the part's name for people, and its text.
pub type ReuseParts = BTreeMap<&'static str, String>;

/// The part that is the environment as it is defined.
pub const ENVIRONMENT: &str = "environment";

/// Why a step is run whatever ran before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoReuse {
    /// It gets a secret, whose value nobody compares.
    Secrets,
    /// This input is named by address, and what is there may be something else now.
    Address(String),
    /// This output is sent to a data store or gets a name, which would not happen.
    Leaves(String),
    /// It is a sweep, an array or a service, and no single command.
    Many,
}

/// As text for people, after "it is always run: ".
impl fmt::Display for NoReuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoReuse::Secrets => f.write_str("it gets secrets"),
            NoReuse::Address(input) => {
                write!(f, "what is at the address of its input `{input}` may have changed")
            }
            NoReuse::Leaves(output) => write!(f, "its output `{output}` is sent somewhere or gets a name"),
            NoReuse::Many => f.write_str("it is more than one command"),
        }
    }
}

impl JobSpec {
    /// What decides what this step leaves. Its inputs that are bound must be known.
    ///
    /// # Errors
    ///
    /// Why it cannot be taken for another one.
    pub fn reuse_parts(&self) -> Result<ReuseParts, NoReuse> {
        if self.array.is_some()
            || self.sweep.is_some()
            || self.pipeline.is_some()
            || !self.services.is_empty()
        {
            return Err(NoReuse::Many);
        }
        if !self.secrets.is_empty() {
            return Err(NoReuse::Secrets);
        }
        if let Some((name, _)) = self.inputs.iter().find(|(_, input)| matches!(input, Input::Data(_))) {
            return Err(NoReuse::Address(name.clone()));
        }
        let is_sent =
            |name: &&String| self.outputs[*name].data().is_some() || self.output_names.contains_key(*name);
        if let Some(name) = self.outputs.keys().find(is_sent) {
            return Err(NoReuse::Leaves(name.clone()));
        }
        let variables: BTreeMap<_, _> = self
            .environment_variables
            .iter()
            .filter(|(name, _)| !OF_PIPELINE.contains(&name.as_str()))
            .collect();
        let (resources, platform) = (&self.resources, (std::env::consts::OS, std::env::consts::ARCH));
        Ok(ReuseParts::from([
            ("version", VERSION.to_owned()),
            ("command", self.command.clone()),
            ("code", text(&self.code)),
            (
                ENVIRONMENT,
                text(&(&self.environment, platform, &resources.docker_args, self.azureml_stand_in)),
            ),
            ("inputs", text(&self.inputs)),
            ("outputs", text(&self.outputs)),
            ("variables", text(&variables)),
            ("distribution", text(&self.distribution)),
            ("number of nodes or GPUs", text(&(resources.nodes, resources.gpus))),
            ("exit codes", text(&self.success_exit_codes)),
            ("owner", text(&(&self.owner, self.owner_since))),
        ]))
    }
}

/// The same for values that are the same, and for no others.
fn text(value: &impl Serialize) -> String {
    // Names are texts and numbers are finite, so it always serialises.
    serde_json::to_string(value).unwrap_or_default()
}

/// Parts that differ, in words: `code and inputs`.
pub fn differing(now: &BTreeMap<String, String>, before: &BTreeMap<String, String>) -> String {
    let names: Vec<&str> = now
        .iter()
        .filter(|(name, text)| before.get(*name) != Some(*text))
        .map(|(name, _)| name.as_str())
        .collect();
    match names.split_last() {
        None => String::new(),
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{DataOutput, Output};
    use crate::env::EnvSpec;
    use crate::job::{Distribution, JobDraft, OutputName, Priority};
    use crate::{DataInput, Digest, Principal, Timestamp};

    fn digest(hash: char) -> Digest {
        format!("{}/1", hash.to_string().repeat(64)).parse().unwrap()
    }

    fn draft() -> JobDraft {
        JobDraft {
            command: "python t.py ${{inputs.data}} ${{inputs.lr}}".into(),
            code: Some(digest('a')),
            inputs: [("data".into(), Input::Folder(digest('b'))), ("lr".into(), Input::Literal("1".into()))]
                .into(),
            outputs: [("model".into(), Output::Folder)].into(),
            environment_variables: [("MODE".into(), "fast".into())].into(),
            owner: Some(Principal::Local { uid: 7 }),
            ..JobDraft::default()
        }
    }

    fn parts(change: impl FnOnce(&mut JobDraft)) -> Result<ReuseParts, NoReuse> {
        let mut draft = draft();
        change(&mut draft);
        draft.validate().unwrap().reuse_parts()
    }

    /// What differs from a step that ran, by part; nothing where it is the same.
    fn differs(change: impl FnOnce(&mut JobDraft)) -> String {
        let texts = |parts: ReuseParts| {
            parts.into_iter().map(|(name, text)| (name.to_owned(), text)).collect::<BTreeMap<_, _>>()
        };
        differing(&texts(parts(change).unwrap()), &texts(parts(|_| {}).unwrap()))
    }

    /// Each row is one change of a step and the part by which it is another one.
    #[test]
    fn test_what_changes_what_a_step_leaves_makes_it_another_one_and_nothing_else_does() {
        type Change = (fn(&mut JobDraft), &'static str);
        let hits: &[fn(&mut JobDraft)] = &[
            |_| {},
            |job| job.display_name = "another title".into(),
            |job| job.description = "text".into(),
            |job| job.experiment = "another".into(),
            |job| drop(job.tags.insert("team".into(), "a".into())),
            |job| job.compute = Some("gpu".into()),
            |job| job.priority = Priority::High,
            |job| job.retry.max_attempts = 5,
            |job| job.limits.timeout = Some(std::time::Duration::from_secs(60)),
            |job| job.resources.memory = 1 << 30,
            |job| job.resources.cpus = 4,
            |job| job.resources.shm = 1 << 30,
            |job| drop(job.resources.labels.insert("rack".into(), "7".into())),
            |job| job.resume_outputs = true,
            |job| job.visible_to_all = true,
            |job| drop(job.environment_variables.insert("AGENTD_PIPELINE".into(), "p-2".into())),
            |job| drop(job.environment_variables.insert("AGENTD_STEP".into(), "other".into())),
        ];
        for (row, change) in hits.iter().enumerate() {
            assert_eq!(differs(change), "", "hit {row}");
        }
        let misses: &[Change] = &[
            (|job| job.command.push_str(" -v"), "command"),
            (|job| job.code = Some(digest('c')), "code"),
            (|job| job.code = None, "code"),
            (|job| drop(job.inputs.insert("data".into(), Input::Folder(digest('c')))), "inputs"),
            (|job| drop(job.inputs.insert("lr".into(), Input::Literal("1.0".into()))), "inputs"),
            (|job| drop(job.inputs.insert("more".into(), Input::Literal("1".into()))), "inputs"),
            (
                |job| {
                    let file = Input::File { root: digest('b'), name: "x".into() };
                    drop(job.inputs.insert("data".into(), file));
                },
                "inputs",
            ),
            (|job| drop(job.outputs.insert("model".into(), Output::File)), "outputs"),
            (|job| drop(job.outputs.insert("plots".into(), Output::Folder)), "outputs"),
            (|job| drop(job.environment_variables.insert("MODE".into(), "slow".into())), "variables"),
            (|job| drop(job.environment_variables.remove("MODE")), "variables"),
            (
                |job| job.environment = EnvSpec::Host { python: "python3.12".into(), requirements: vec![] },
                ENVIRONMENT,
            ),
            (|job| job.environment = EnvSpec::Image { image: "a:1".into(), conda: None }, ENVIRONMENT),
            (|job| job.azureml_stand_in = true, ENVIRONMENT),
            (|job| job.resources.nodes = 2, "number of nodes or GPUs"),
            (|job| job.resources.gpus = 1, "number of nodes or GPUs"),
            (|job| job.distribution = Some(Distribution::Mpi { processes: 2 }), "distribution"),
            (|job| job.success_exit_codes = [3].into(), "exit codes"),
            (|job| job.owner = Some(Principal::Local { uid: 8 }), "owner"),
            (|job| job.owner_since = Some(Timestamp(1)), "owner"),
            (
                |job| {
                    job.command.push_str(" -v");
                    job.code = None;
                },
                "code and command",
            ),
        ];
        for (row, (change, part)) in misses.iter().enumerate() {
            assert_eq!(differs(change), *part, "miss {row}");
        }
    }

    #[test]
    fn test_what_cannot_be_compared_is_always_run() {
        let uri = || "https://data.example/x".parse().unwrap();
        type Change<'a> = (&'a dyn Fn(&mut JobDraft), NoReuse);
        let rows: &[Change<'_>] = &[
            (&|job| drop(job.secrets.insert("TOKEN".into(), "token".into())), NoReuse::Secrets),
            (
                &|job| {
                    let data = DataInput { uri: uri(), is_file: true, is_own_copy: false };
                    drop(job.inputs.insert("data".into(), Input::Data(data)));
                },
                NoReuse::Address("data".into()),
            ),
            (
                &|job| {
                    let sent = DataOutput {
                        uri: "azureml://datastores/lab/paths/x".parse().unwrap(),
                        is_file: false,
                    };
                    drop(job.outputs.insert("model".into(), Output::Data(sent)));
                },
                NoReuse::Leaves("model".into()),
            ),
            (
                &|job| {
                    drop(
                        job.output_names
                            .insert("model".into(), OutputName { name: "m".into(), version: None }),
                    );
                },
                NoReuse::Leaves("model".into()),
            ),
            (&|job| job.array = Some("0-3".parse().unwrap()), NoReuse::Many),
        ];
        for (change, why) in rows {
            assert_eq!(parts(change), Err(why.clone()));
            assert!(!why.to_string().is_empty());
        }
    }
}
