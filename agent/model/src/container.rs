//! Options of the container engine that have no keys of their own in a job file: `docker_args`.
//!
//! Pure. A list of what is allowed, and for everything else a reason why not: the effects of the engine's arguments
//! range from harmless to control of the whole machine.

use serde::{Deserialize, Serialize};

use crate::size;

/// What was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Options {
    /// Processor time, in billionths of one processor.
    pub cpus: Option<u64>,
    /// Shared memory, in bytes; `shm_size` has precedence.
    pub shm: Option<u64>,
    /// Limits of each process.
    pub ulimits: Vec<Ulimit>,
}

/// A limit of each process; -1 is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ulimit {
    /// What is limited, `memlock` for example.
    pub name: String,
    /// The limit.
    pub soft: i64,
    /// How far a process may raise it.
    pub hard: i64,
}

/// An argument that is not allowed or cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{argument}`: {why}")]
pub struct ArgumentError {
    /// The argument.
    pub argument: String,
    /// Why not.
    pub why: String,
}

/// Arguments that change nothing: jobs run like that anyway.
const AS_IT_IS: &[&str] = &["--rm", "--init", "--network=host", "--net=host", "--ipc=private"];

/// Arguments that are refused for a reason of their own.
const REFUSED: &[(&str, &str)] = &[
    ("--privileged", "a job may not have the rights of the machine"),
    ("--cap-add", "a job has no capabilities"),
    ("--security-opt", "how jobs are confined is not the job's to say"),
    ("--device", "a job gets the GPUs it asks for with `resources.gpus`, and no other devices"),
    ("--gpus", "say `resources.gpus`"),
    ("--volume", "name data as inputs and outputs of the job; nothing else of the machine is mounted"),
    ("-v", "name data as inputs and outputs of the job; nothing else of the machine is mounted"),
    ("--mount", "name data as inputs and outputs of the job; nothing else of the machine is mounted"),
    ("--user", "whom jobs in containers run as is the node's to say: `container_user` in its configuration"),
    ("-u", "whom jobs in containers run as is the node's to say: `container_user` in its configuration"),
    ("--ipc", "shared memory is the job's own; say its size with `resources.shm_size`"),
    ("--network", "a job uses the network of the machine"),
    ("--net", "a job uses the network of the machine"),
    ("--pid", "a job sees its own processes only"),
    ("--memory", "say `resources.memory`"),
    ("-m", "say `resources.memory`"),
    ("--env", "say `environment_variables`"),
    ("-e", "say `environment_variables`"),
    ("--entrypoint", "the command of a job is its `command`; the image's own entry point is not run"),
    ("--workdir", "a job starts in its code directory"),
    ("-w", "a job starts in its code directory"),
];

impl Options {
    /// Reads arguments as the engine's own client takes them.
    pub fn parse(arguments: &[impl AsRef<str>]) -> Result<Options, ArgumentError> {
        let mut options = Options::default();
        let mut words = arguments.iter().flat_map(|argument| argument.as_ref().split_whitespace());
        while let Some(word) = words.next() {
            if AS_IT_IS.contains(&word) {
                continue;
            }
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (word, None),
            };
            let refuse = |why: &str| ArgumentError { argument: word.to_owned(), why: why.to_owned() };
            if !["--cpus", "--shm-size", "--ulimit", "--network", "--net", "--ipc"].contains(&name) {
                let own = REFUSED.iter().find(|(refused, _)| *refused == name).map(|(_, why)| *why);
                return Err(refuse(own.unwrap_or("only `--cpus`, `--shm-size` and `--ulimit` are allowed")));
            }
            let value = value.or_else(|| words.next()).ok_or_else(|| refuse("its value is missing"))?;
            match name {
                "--cpus" => {
                    options.cpus = Some(cpus(value).ok_or_else(|| refuse("it is no number of processors"))?)
                }
                "--shm-size" => {
                    options.shm =
                        Some(size::parse(value).ok_or_else(|| refuse("it is no size, such as `4g`"))?);
                }
                "--ulimit" => {
                    let limit =
                        ulimit(value).ok_or_else(|| refuse("it is no limit, such as `memlock=-1`"))?;
                    options.ulimits.push(limit);
                }
                _ if AS_IT_IS.contains(&format!("{name}={value}").as_str()) => {}
                _ => {
                    let own =
                        REFUSED.iter().find(|(refused, _)| *refused == name).map_or("", |(_, why)| *why);
                    return Err(refuse(own));
                }
            }
        }
        Ok(options)
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked before")]
fn cpus(text: &str) -> Option<u64> {
    let number: f64 = text.parse().ok()?;
    (0.01..=1e6).contains(&number).then_some((number * 1e9) as u64)
}

fn ulimit(text: &str) -> Option<Ulimit> {
    let (name, limits) = text.split_once('=')?;
    let (soft, hard) = limits.split_once(':').unwrap_or((limits, limits));
    let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase());
    let limit = |text: &str| text.parse::<i64>().ok().filter(|limit| *limit >= -1);
    Some(Ulimit { name: is_name.then(|| name.to_owned())?, soft: limit(soft)?, hard: limit(hard)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_allowed_arguments_are_read_in_either_form() {
        let options =
            Options::parse(&["--shm-size 4g --cpus=1.5", "--ulimit", "memlock=-1:-1", "--network=host"]);
        let ulimits = vec![Ulimit { name: "memlock".into(), soft: -1, hard: -1 }];
        let expected = Options { cpus: Some(1_500_000_000), shm: Some(4 << 30), ulimits };
        assert_eq!(options.unwrap(), expected);
        assert_eq!(Options::parse(&["--net host --rm --init"]).unwrap(), Options::default());
    }

    #[test]
    fn test_everything_else_is_refused_with_a_reason() {
        for (argument, why) in [
            ("--privileged", "rights of the machine"),
            ("--cap-add=SYS_ADMIN", "no capabilities"),
            ("-v /:/host", "inputs and outputs"),
            ("--network=bridge", "network of the machine"),
            ("--ipc host", "shm_size"),
            ("--frobnicate", "are allowed"),
            ("--cpus many", "number of processors"),
            ("--ulimit nofile", "no limit"),
            ("--shm-size", "missing"),
        ] {
            let error = Options::parse(&[argument]).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
