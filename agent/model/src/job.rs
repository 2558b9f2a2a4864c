//! The definition of a valid job.
//!
//! A [`JobDraft`] is a job as someone wrote it; a [`JobSpec`] is a draft that passed [`JobDraft::validate`], with
//! every default filled in. Only a `JobSpec` is passed on from where it was read, and the only way to make one,
//! also when reading it back from a wire or a disk, is validation.

mod array;
mod change;
mod distribution;
mod extent;
mod naming;
pub mod pipeline;
mod policy;
pub mod reuse;
mod service;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::container::{ArgumentError, Options};
use crate::expr::{self, Reference};
use crate::fault::{Code, Fault};
use crate::{
    Artifacts, DataInput, Digest, EnvSpec, Epoch, ExitStatus, JobId, JobState, PoolName, Principal,
    Timestamp, Verdict,
};

pub use crate::data::Output;
pub use array::{Array, ArrayError, Indices, MAX_TASKS};
pub use change::{Change, refused_of_pipeline};
pub use distribution::{Distribution, MAX_PROCESSES};
pub use naming::OutputName;
pub use policy::{Limits, OnDisconnect, Priority, RetryPolicy};
pub use service::{JobService, ServiceKind};

/// A job as someone wrote it; see [`JobDraft::validate`] for what must hold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct JobDraft {
    /// The job's name; made from the title when absent.
    pub name: Option<JobId>,
    /// The title people see.
    pub display_name: String,
    /// Free text.
    pub description: String,
    /// What the job belongs to.
    pub experiment: String,
    /// Free labels.
    pub tags: BTreeMap<String, String>,
    /// The command line, given to a shell after expressions are replaced.
    pub command: String,
    /// The code directory, as a snapshot; an empty working directory when absent.
    pub code: Option<Digest>,
    /// The software stack.
    pub environment: EnvSpec,
    /// Variables for the command.
    pub environment_variables: BTreeMap<String, String>,
    /// What the command reads, by name.
    pub inputs: BTreeMap<String, Input>,
    /// The directories the command writes besides `./outputs`, by name.
    pub outputs: BTreeMap<String, Output>,
    /// Those of them that get a name as data when the job has completed.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub output_names: BTreeMap<String, OutputName>,
    /// The pool that it names. It has no effect where there are no pools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute: Option<String>,
    /// What the job needs of a node.
    pub resources: Resources,
    /// How its processes are started; the command once on each node when absent.
    pub distribution: Option<Distribution>,
    /// What ends the job early.
    pub limits: Limits,
    /// What happens after a failure.
    pub retry: RetryPolicy,
    /// Which jobs go first.
    pub priority: Priority,
    /// Variables for the command whose values the controller keeps: the variable, and the name of the secret. The
    /// values are in no record of the job.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, String>,
    /// The owner of the job, as set by the controller. A value from a client is ignored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<Principal>,
    /// Since when the name is the owner's, where somebody else had it before: then nodes keep what packages of both
    /// wrote apart. The controller sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner_since: Option<Timestamp>,
    /// Every user may read it, not only its owner.
    pub visible_to_all: bool,
    /// Jobs that must have ended before it may start.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub predecessors: Vec<Predecessor>,
    /// It may not start before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub begin: Option<Timestamp>,
    /// By then it is to have ended: one that could not any more is not started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Timestamp>,
    /// It runs once for each of these indices, each time as a task of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub array: Option<Array>,
    /// Its tasks are trials, each with values of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sweep: Option<Box<crate::sweep::Sweep>>,
    /// Its tasks are steps, each another job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline: Option<Box<pipeline::Pipeline>>,
    /// What can be opened in it while it runs, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub services: BTreeMap<String, JobService>,
    /// An attempt finds in `./outputs` what the one before left there.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub resume_outputs: bool,
    /// Python in it finds a stand-in for `azureml.core` where that is not installed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub azureml_stand_in: bool,
    /// Codes of the command, beside 0, with which the job has completed.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub success_exit_codes: BTreeSet<u8>,
    /// What an earlier attempt left, as set by the controller. A value from a client is ignored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumes: Option<LeftOutputs>,
}

impl Default for JobDraft {
    fn default() -> JobDraft {
        JobDraft {
            name: None,
            display_name: String::new(),
            description: String::new(),
            experiment: String::new(),
            tags: BTreeMap::new(),
            command: String::new(),
            code: None,
            environment: EnvSpec::host(),
            environment_variables: BTreeMap::new(),
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            output_names: BTreeMap::new(),
            compute: None,
            resources: Resources::default(),
            distribution: None,
            limits: Limits::default(),
            retry: RetryPolicy::default(),
            priority: Priority::default(),
            secrets: BTreeMap::new(),
            owner: None,
            owner_since: None,
            visible_to_all: false,
            predecessors: Vec::new(),
            begin: None,
            deadline: None,
            array: None,
            sweep: None,
            pipeline: None,
            services: BTreeMap::new(),
            resume_outputs: false,
            azureml_stand_in: false,
            success_exit_codes: BTreeSet::new(),
            resumes: None,
        }
    }
}

impl JobDraft {
    /// The first of several ranks leads the others: the job is over when that rank is.
    pub fn is_led(&self) -> bool {
        self.resources.nodes > 1 && self.distribution.as_ref().is_some_and(Distribution::is_led)
    }

    /// A command that ended so has done what it was to do.
    pub fn is_success(&self, exit: ExitStatus) -> bool {
        let named = |code: i32| u8::try_from(code).is_ok_and(|code| self.success_exit_codes.contains(&code));
        exit.is_success() || matches!(exit, ExitStatus::Code(code) if named(code))
    }

    /// Every snapshot the job reads: its code, its inputs, and what its image is built from; of a pipeline those of all
    /// steps.
    pub fn snapshots(&self) -> Vec<Digest> {
        let of_steps = self.steps().flat_map(|step| step.snapshots());
        let inputs = self.inputs.values().filter_map(Input::snapshot);
        let context = match &self.environment {
            EnvSpec::Build { context, .. } => Some(*context),
            _ => None,
        };
        let resumed = self.resumes.map(|left| left.artifacts.root);
        let all = self.code.into_iter().chain(inputs).chain(context).chain(resumed).chain(of_steps);
        all.collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// What an attempt left, for the one after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOutputs {
    /// Of which attempt it is.
    pub attempt: Epoch,
    /// All that it stored, `./outputs` among it.
    pub artifacts: Artifacts,
    /// The attempt went on after that: its machine was gone before it could store what it had at its end.
    pub is_earlier: bool,
}

/// `what attempt 2 left: 3 files, 12 MiB`
impl fmt::Display for LeftOutputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let when = if self.is_earlier { "what was stored last of attempt" } else { "what attempt" };
        let left = if self.is_earlier { "" } else { " left" };
        write!(f, "{when} {}{left}: {}", self.attempt, self.artifacts)
    }
}

/// A job that another one comes after.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Predecessor {
    /// Its name.
    pub job: JobId,
    /// How it must end.
    pub end: WantedEnd,
}

/// How a job must end so that its successor may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WantedEnd {
    /// It completes.
    Completed,
    /// It fails.
    Failed,
    /// However it ends.
    Any,
}

impl WantedEnd {
    /// Every word for it.
    pub const ALL: [WantedEnd; 3] = [WantedEnd::Completed, WantedEnd::Failed, WantedEnd::Any];

    /// From the word for it.
    pub fn parse(word: &str) -> Option<WantedEnd> {
        WantedEnd::ALL.into_iter().find(|end| end.name() == word)
    }

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            WantedEnd::Completed => "completed",
            WantedEnd::Failed => "failed",
            WantedEnd::Any => "any",
        }
    }

    /// Whether a job that ended with this verdict fulfils it.
    pub fn is_met_by(self, verdict: Verdict) -> bool {
        match self {
            WantedEnd::Completed => verdict == Verdict::Completed,
            WantedEnd::Failed => verdict == Verdict::Failed,
            WantedEnd::Any => true,
        }
    }
}

impl Predecessor {
    /// The fault of a job that will never start because this one ended so; `None` when the verdict is unknown.
    pub fn never_due(&self, verdict: Option<Verdict>) -> Fault {
        let ended = match verdict {
            Some(verdict) => JobState::from(verdict).name(),
            None => "not on record any more",
        };
        Fault::new(Code::JobNeverDue, format!("it was to {self}, and that job is {ended}"))
            .why("so its turn never comes")
            .fix(format!("see `agentctl why {}`; run that job again and submit this one after it", self.job))
    }
}

/// `start when train-a has completed`
impl fmt::Display for Predecessor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.end {
            WantedEnd::Completed => "has completed",
            WantedEnd::Failed => "has failed",
            WantedEnd::Any => "has ended",
        };
        write!(f, "start when {} {how}", self.job)
    }
}

/// Something a command reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Input {
    /// A value, put into the command as text.
    Literal(String),
    /// A directory, laid out on the node before the command starts.
    Folder(Digest),
    /// One file: a snapshot that holds just it, and its name.
    File {
        /// The snapshot.
        root: Digest,
        /// The file's name in it.
        name: String,
    },
    /// Data that is not sent: the node fetches it, or has it.
    Data(DataInput),
}

impl Input {
    /// The snapshot that it is, or is in.
    pub fn snapshot(&self) -> Option<Digest> {
        match self {
            Input::Folder(root) | Input::File { root, .. } => Some(*root),
            Input::Literal(_) | Input::Data(_) => None,
        }
    }
}

/// The label with the kind of a machine, as its provider names it.
pub const INSTANCE_TYPE: &str = "instance_type";

/// The label with the pool of a machine.
pub const POOL: &str = "pool";

/// What a job needs of a node. One replica takes one slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// How many nodes run the command together.
    pub nodes: u32,
    /// GPUs on each node.
    pub gpus: u32,
    /// Memory on each node, in bytes; 0 is no requirement.
    pub memory: u64,
    /// Processors on each node that no other job counts on; 0 is no requirement. They are counted, not assigned.
    pub cpus: u32,
    /// Labels that a node must have.
    pub labels: BTreeMap<String, String>,
    /// Size of shared memory in a container, in bytes; 0 is the default.
    pub shm: u64,
    /// More options of the container engine, see [`crate::container`].
    pub docker_args: Vec<String>,
}

impl Default for Resources {
    fn default() -> Resources {
        Resources {
            nodes: 1,
            gpus: 0,
            memory: 0,
            cpus: 0,
            labels: BTreeMap::new(),
            shm: 0,
            docker_args: Vec::new(),
        }
    }
}

/// A job that may run: a draft that was validated and completed. Read it like the draft it holds. Cheap to
/// clone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "JobDraft", into = "JobDraft")]
pub struct JobSpec(Arc<JobDraft>);

impl JobSpec {
    /// The same job, of this owner, who has that name since then, if somebody had it before.
    #[must_use]
    pub fn owned_by(self, owner: Option<Principal>, owner_since: Option<Timestamp>) -> JobSpec {
        JobSpec(Arc::new(JobDraft { owner, owner_since, resumes: None, ..JobDraft::from(self) }))
    }

    /// The same job, whose attempt begins with what an earlier one left.
    #[must_use]
    pub fn resuming(self, left: Option<LeftOutputs>) -> JobSpec {
        match left == self.resumes {
            true => self,
            false => JobSpec(Arc::new(JobDraft { resumes: left, ..JobDraft::from(self) })),
        }
    }

    /// The same job, which only machines of this pool may run.
    #[must_use]
    pub fn on_pool(self, pool: &PoolName) -> JobSpec {
        let mut draft = JobDraft::from(self);
        draft.resources.labels.insert(POOL.to_owned(), pool.to_string());
        JobSpec(Arc::new(draft))
    }
}

impl std::ops::Deref for JobSpec {
    type Target = JobDraft;
    fn deref(&self) -> &JobDraft {
        &self.0
    }
}

impl TryFrom<JobDraft> for JobSpec {
    type Error = Fault;
    /// A job as it was accepted: how large it is does not matter any more.
    fn try_from(draft: JobDraft) -> Result<JobSpec, Fault> {
        draft.complete()
    }
}

impl From<JobSpec> for JobDraft {
    fn from(spec: JobSpec) -> JobDraft {
        Arc::unwrap_or_clone(spec.0)
    }
}

/// The longest command accepted, in bytes: what one argument of a process may hold.
pub const MAX_COMMAND: usize = 128 * 1024 - 1;

impl JobDraft {
    /// Checks every rule for a job that is submitted, and fills in every default. The first broken rule is the fault.
    pub fn validate(self) -> Result<JobSpec, Fault> {
        self.check_extent()?;
        self.complete()
    }

    fn complete(mut self) -> Result<JobSpec, Fault> {
        if self.pipeline.is_none() {
            self.check_command()?;
        }
        self.check_names()?;
        self.check_output_names()?;
        self.check_resources()?;
        self.check_sweep()?;
        self.check_pipeline()?;
        self.check_dates()?;
        if self.display_name.is_empty() {
            self.display_name = match &self.name {
                Some(name) => name.to_string(),
                None => first_words(&self.command),
            };
        }
        if self.experiment.is_empty() {
            self.experiment = "Default".to_owned();
        }
        self.retry.max_attempts = self.retry.max_attempts.max(1);
        Ok(JobSpec(Arc::new(self)))
    }

    fn check_dates(&self) -> Result<(), Fault> {
        match (self.begin, self.deadline, self.latest_start()) {
            (Some(begin), Some(deadline), Some(latest)) if begin >= deadline || begin > latest => {
                let what = format!(
                    "it is not to begin before {}, and its deadline is {}",
                    begin.utc(),
                    deadline.utc()
                );
                let fault = Fault::new(Code::JobInvalid, what);
                let fault = match self.limits.timeout {
                    Some(limit) => fault.why(format!("it may run for {}", crate::words::duration(limit))),
                    None => fault,
                };
                Err(fault.fix("give it a later deadline, an earlier begin, or a shorter time limit"))
            }
            _ => Ok(()),
        }
    }

    /// The last moment at which it may start: by its deadline it is to have ended, if it is known how long it may run.
    pub fn latest_start(&self) -> Option<Timestamp> {
        let most =
            self.limits.timeout.map_or(0, |limit| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX));
        Some(Timestamp(self.deadline?.0.saturating_sub(most)))
    }

    fn check_command(&self) -> Result<(), Fault> {
        if self.command.trim().is_empty() {
            return Err(Fault::new(Code::JobInvalid, "the job has no `command`")
                .fix("add the line that starts your training, for example `command: python train.py`"));
        }
        if self.command.len() > MAX_COMMAND || self.command.contains('\0') {
            return Err(Fault::new(Code::JobInvalid, "the `command` cannot be given to a shell")
                .why(format!("it has {} bytes; at most {MAX_COMMAND} fit, and no NUL", self.command.len()))
                .fix("put the work into a script of the code directory and call that"));
        }
        let drawn = self.sweep.as_ref().map(|sweep| sweep.space.names()).unwrap_or_default();
        for reference in expr::references(&self.command)? {
            let (kind, name, known): (_, _, Vec<&str>) = match &reference {
                Reference::Input(name) => ("inputs", name, self.inputs.keys().map(String::as_str).collect()),
                Reference::Output(name) => {
                    ("outputs", name, self.outputs.keys().map(String::as_str).collect())
                }
                Reference::Drawn(name) => ("search_space", name, drawn.iter().copied().collect()),
            };
            if !known.contains(&name.as_str()) {
                return Err(Fault::new(
                    Code::JobInvalid,
                    format!("the command uses `${{{{{kind}.{name}}}}}`, which the job does not define"),
                )
                .why(format!("defined `{kind}`: {}", or_none(&known.join(", "))))
                .fix(format!("add `{name}` under `{kind}`, or correct the name in the command")));
            }
        }
        Ok(())
    }

    fn check_names(&self) -> Result<(), Fault> {
        let last = self.array.as_ref().and_then(|array| array.indices().last());
        if let (Some(name), Some(last)) = (&self.name, last)
            && name.task(last).is_none()
        {
            let what = format!("`{name}` is too long a name for an array");
            return Err(Fault::new(Code::JobInvalid, what)
                .why(format!("its tasks are called like it, with `--{last}` behind it"))
                .fix("give it a shorter `name`"));
        }
        for name in self.environment_variables.keys() {
            if name.is_empty() || name.contains(['=', '\0']) {
                return Err(Fault::new(
                    Code::JobInvalid,
                    format!("`{}` cannot be the name of an environment variable", name.escape_default()),
                )
                .fix("use a name without `=` under `environment_variables`"));
            }
        }
        for (variable, name) in &self.secrets {
            if variable.is_empty() || variable.contains(['=', '\0']) || !crate::access::is_secret_name(name) {
                let what =
                    format!("`{}: {}` names no secret", variable.escape_default(), name.escape_default());
                return Err(Fault::new(Code::JobInvalid, what).fix(
                    "under `secrets`, write a variable and the name of a secret: letters, digits, `_`, `-` and `.`",
                ));
            }
            if self.environment_variables.contains_key(variable) {
                let what = format!("`{variable}` is a variable and a secret at once");
                return Err(Fault::new(Code::JobInvalid, what)
                    .fix("leave it out of `environment_variables`, or of `secrets`"));
            }
        }
        for name in self.inputs.keys().chain(self.outputs.keys()) {
            let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
            if name.is_empty() || name.len() > 200 || name.starts_with('.') || !name.chars().all(plain) {
                return Err(Fault::new(
                    Code::JobInvalid,
                    format!("`{}` cannot be the name of an input or output", name.escape_default()),
                )
                .fix("use letters, digits, `_`, `-` and `.`, not starting with `.`"));
            }
        }
        Ok(())
    }

    fn check_resources(&self) -> Result<(), Fault> {
        if self.resources.nodes == 0 {
            return Err(Fault::new(Code::JobInvalid, "`resources.instance_count` is 0")
                .fix("ask for at least one node, or leave the key out"));
        }
        if let Some(distribution) = &self.distribution {
            distribution.check(self.resources.nodes)?;
        }
        if self.limits.timeout.is_some_and(|timeout| timeout.is_zero()) {
            return Err(Fault::new(Code::JobInvalid, "`limits.timeout` is 0 seconds")
                .fix("give the longest time the command may run, in seconds, or leave the key out"));
        }
        let refused = |error: ArgumentError| {
            Fault::new(Code::JobInvalid, "`resources.docker_args` asks for what is not allowed")
                .why(error.to_string())
                .fix("leave it out")
        };
        Options::parse(&self.resources.docker_args).map(drop).map_err(refused)
    }
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "none" } else { text }
}

/// Without quotes, because the words may be only a part of what these enclose.
fn first_words(command: &str) -> String {
    let words: Vec<&str> = command.split_whitespace().take(2).collect();
    let plain = words.join(" ").replace(['"', '\''], "");
    let title = if plain.trim().is_empty() { words.join(" ") } else { plain };
    title.chars().take(60).collect()
}

#[cfg(test)]
mod tests;
