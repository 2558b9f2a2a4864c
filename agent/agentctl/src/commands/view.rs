//! Jobs and machines, decoded from the daemon's messages: the schema of every `--json` (see `agent/docs/json.md`) and
//! the source of the tables.

mod machine;
mod parents;
mod spec;

use std::fmt;

use agent_model::job::Input;
use agent_model::outcome::{Outcome, Usage};
use agent_model::{Clock, Code, EnvSpec, Fault, JobId, JobSpec, ReplicaStep, Retry, SystemClock, Timestamp};
use agent_proto::v1;
use serde::Serialize;

use crate::client::{person, with_people};
use crate::output::Paper;
use crate::output::text::{Tone, duration, soon};
pub(crate) use machine::{ControllerView, EnvironmentView, NodeView, NoticeView, ShutdownView, grade};
pub(crate) use parents::{BestView, StepView, TasksView, TrialView};

/// The state of a job.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct JobView {
    pub(crate) job: String,
    pub(crate) state: String,
    pub(crate) title: String,
    pub(crate) experiment: String,
    pub(crate) priority: &'static str,
    /// Why it waits, or what is done for it now.
    pub(crate) detail: String,
    /// Who submitted it; empty if unknown.
    pub(crate) owner: String,
    pub(crate) attempt: u64,
    pub(crate) cancel_requested: bool,
    pub(crate) submitted_ms: u64,
    /// It may not start before.
    pub(crate) begin_ms: Option<u64>,
    /// One that could not end by then is not started.
    pub(crate) deadline_ms: Option<u64>,
    pub(crate) started_ms: Option<u64>,
    pub(crate) ended_ms: Option<u64>,
    /// As a shell shows it: 128 + n for a signal.
    pub(crate) exit_code: Option<i32>,
    pub(crate) fault: Option<FaultView>,
    pub(crate) artifacts: Option<ArtifactsView>,
    /// Outputs that were to get a name as data, once it has completed.
    pub(crate) named: Vec<NamedView>,
    pub(crate) replicas: Vec<ReplicaView>,
    /// Of an array: how its tasks stand.
    pub(crate) tasks: Option<TasksView>,
    /// Of a task of an array: its index.
    pub(crate) index: Option<u32>,
    /// Of a trial of a sweep: its values, and what it logged.
    pub(crate) trial: Option<TrialView>,
    /// Of a sweep: the best of the trials that completed.
    pub(crate) best: Option<BestView>,
    /// Of a pipeline: the steps that are not run.
    pub(crate) steps: Vec<StepView>,
    #[serde(skip)]
    pub(crate) spec: JobSpec,
    #[serde(skip)]
    pub(crate) outcome: Option<Outcome>,
}

/// What came of the name of an output.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct NamedView {
    pub(crate) output: String,
    pub(crate) name: String,
    /// Empty if it got none.
    pub(crate) version: String,
    /// Why it got no name.
    pub(crate) why: String,
}

impl From<v1::NamedOutput> for NamedView {
    fn from(wire: v1::NamedOutput) -> NamedView {
        let v1::NamedOutput { output, name, version, why } = wire;
        NamedView { output, name, version, why }
    }
}

/// `model is azureml:iris-model:3`
impl fmt::Display for NamedView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NamedView { output, name, version, why } = self;
        match version.is_empty() {
            false => write!(f, "{output} is azureml:{name}:{version}"),
            true => write!(f, "{output} is not named {name}: {why}"),
        }
    }
}

/// A fault.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct FaultView {
    code: &'static str,
    what: String,
    why: Vec<String>,
    fix: Option<String>,
    blame: &'static str,
    retry: &'static str,
}

/// A job's stored outputs.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ArtifactsView {
    pub(crate) root: String,
    pub(crate) files: u64,
    pub(crate) bytes: u64,
}

/// A rank of the latest attempt.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ReplicaView {
    pub(crate) rank: u32,
    pub(crate) node: String,
    pub(crate) step: String,
    pub(crate) detail: String,
    /// The address at which the other ranks of its gang reach it; empty for a job on one node.
    pub(crate) address: String,
    /// Its own verdict: `completed`, `failed` or `canceled`; empty until it has ended.
    pub(crate) verdict: String,
    /// As a shell shows it.
    pub(crate) exit_code: Option<i32>,
    #[serde(skip)]
    pub(crate) outcome: Option<Outcome>,
}

impl TryFrom<v1::Job> for JobView {
    type Error = Fault;
    fn try_from(wire: v1::Job) -> Result<JobView, Fault> {
        let missing =
            || Fault::new(Code::RequestInvalid, "the daemon told of a job without its specification");
        let spec = JobSpec::try_from(wire.spec.ok_or_else(missing)?)?;
        let mut outcome = wire.outcome.map(Outcome::try_from).transpose()?;
        if let Some(fault) = outcome.as_mut().and_then(|outcome| outcome.fault.as_mut()) {
            fault.fix = fault.fix.take().map(|fix| for_this_job(&fix, &wire.job));
        }
        let artifacts = outcome.as_ref().and_then(|outcome| outcome.artifacts);
        let total = spec.array.as_ref().map_or(0, |array| array.indices().len());
        let index = spec.environment_variables.get("AGENTD_ARRAY_INDEX").and_then(|index| index.parse().ok());
        let is_step = spec.environment_variables.contains_key("AGENTD_STEP");
        let of_step = || wire.job.parse::<JobId>().ok()?.as_task().map(|(_, step)| step);
        let index = index.or_else(|| of_step().filter(|_| is_step));
        let told = |step| spec.pipeline.as_ref().map(|pipeline| StepView::of(pipeline, step));
        Ok(JobView {
            steps: wire.steps.into_iter().filter_map(told).collect(),
            tasks: wire.tasks.map(|tasks| TasksView::read(&tasks, total)).transpose()?,
            index,
            trial: wire.trial.map(TrialView::from),
            best: wire.best.map(BestView::from),
            job: wire.job,
            state: wire.state,
            title: spec.display_name.clone(),
            experiment: spec.experiment.clone(),
            priority: spec.priority.name(),
            detail: dated(with_people(&wire.detail), spec.begin, SystemClock.now()),
            begin_ms: spec.begin.map(|at| at.0),
            deadline_ms: spec.deadline.map(|at| at.0),
            owner: person(&wire.owner),
            attempt: wire.epoch,
            cancel_requested: wire.cancel_requested,
            submitted_ms: wire.submitted_ms,
            started_ms: (wire.started_ms != 0).then_some(wire.started_ms),
            ended_ms: (wire.ended_ms != 0).then_some(wire.ended_ms),
            exit_code: outcome.as_ref().and_then(|o| o.exit).map(|exit| exit.shell_code()),
            fault: outcome.as_ref().and_then(|o| o.fault.as_ref()).map(FaultView::from),
            artifacts: artifacts.map(|a| ArtifactsView {
                root: a.root.to_string(),
                files: a.files,
                bytes: a.bytes,
            }),
            named: wire.named_outputs.into_iter().map(NamedView::from).collect(),
            replicas: wire.replicas.into_iter().map(ReplicaView::try_from).collect::<Result<_, _>>()?,
            spec,
            outcome,
        })
    }
}

impl TryFrom<v1::ReplicaStatus> for ReplicaView {
    type Error = Fault;
    fn try_from(wire: v1::ReplicaStatus) -> Result<ReplicaView, Fault> {
        let verdict = wire.outcome.as_ref().map(|outcome| outcome.verdict.clone()).unwrap_or_default();
        let outcome = wire.outcome.map(Outcome::try_from).transpose()?;
        Ok(ReplicaView {
            rank: wire.rank,
            node: wire.node,
            step: wire.step,
            detail: wire.detail,
            address: wire.address,
            verdict,
            exit_code: outcome.as_ref().and_then(|outcome| outcome.exit).map(|exit| exit.shell_code()),
            outcome,
        })
    }
}

/// `waits until 22:00, in 1 h 20 min`: the moment that a controller tells is that of no time zone.
fn dated(detail: String, begin: Option<Timestamp>, now: Timestamp) -> String {
    match begin.filter(|at| *at > now && detail == format!("waits until {}", at.utc())) {
        Some(at) => format!("waits until {}, in {}", soon(at, now), duration(at.since(now))),
        None => detail,
    }
}

/// Adds the job's name to commands in an advice, because the node that gave it meant this job.
fn for_this_job(fix: &str, job: &str) -> String {
    ["logs", "logs --build", "why"].iter().fold(fix.to_owned(), |fix, verb| {
        fix.replace(&format!("`agentctl {verb}`"), &format!("`agentctl {verb} {job}`"))
    })
}

impl From<&Fault> for FaultView {
    fn from(fault: &Fault) -> FaultView {
        FaultView {
            code: fault.code.as_str(),
            what: fault.what.clone(),
            why: fault.why.clone(),
            fix: fault.fix.clone(),
            blame: fault.blame.name(),
            retry: match fault.retry {
                Retry::Never => "never",
                Retry::SameNode => "same_node",
                Retry::OtherNode => "other_node",
                Retry::After(_) => "after",
            },
        }
    }
}

impl JobView {
    /// It ended; nothing about it changes any more.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.state.as_str(), "Completed" | "Failed" | "Canceled")
    }

    /// Its title with what tells it from others of that title: the arguments of its command, and its inputs that are
    /// values.
    pub(crate) fn what(&self) -> String {
        let command = self.spec.command.trim();
        let is_made = !self.title.is_empty() && command.starts_with(&self.title);
        if !is_made || command.contains('\n') {
            return self.title.clone();
        }
        with_values(&self.spec)
    }

    /// What went wrong, if it is known.
    pub(crate) fn cause(&self) -> Option<&Fault> {
        self.outcome.as_ref()?.fault.as_ref()
    }

    /// Leaves lines out of what is told about the cause, because the user has just seen them.
    pub(crate) fn leave_out_of_cause(&mut self, seen: &[String]) {
        if let Some(fault) = self.outcome.as_mut().and_then(|outcome| outcome.fault.as_mut()) {
            fault.why.retain(|line| !seen.contains(line));
        }
    }

    /// How long its command ran, or has been running.
    pub(crate) fn duration(&self, now: Timestamp) -> Option<std::time::Duration> {
        let outcome = self.outcome.as_ref();
        let started = outcome.and_then(|o| o.started_at).or(self.started_ms.map(Timestamp))?;
        let ended = outcome.map(|o| o.ended_at).or(self.ended_ms.map(Timestamp)).unwrap_or(now);
        Some(ended.since(started))
    }

    /// The resources its command used: the CPU time of all ranks together, and the highest memory peak of a rank.
    pub(crate) fn usage(&self) -> Option<Usage> {
        let of_ranks = (0..self.ranks()).filter_map(|rank| self.outcome_of(rank)?.usage.as_deref().copied());
        of_ranks.reduce(|one, other| Usage {
            cpu: one.cpu + other.cpu,
            ..if one.memory_peak >= other.memory_peak { one } else { other }
        })
    }

    /// How many ranks it has.
    pub(crate) fn ranks(&self) -> u32 {
        self.spec.resources.nodes
    }

    /// The outcome of one rank, as far as it is known.
    pub(crate) fn outcome_of(&self, rank: u32) -> Option<&Outcome> {
        match self.ranks() {
            1 => self.outcome.as_ref(),
            _ => self.replicas.iter().find(|replica| replica.rank == rank)?.outcome.as_ref(),
        }
    }

    /// What its node does for it now: `building the environment: linking packages, 3 of 40`.
    pub(crate) fn work(&self) -> String {
        if self.ranks() > 1 {
            return self.detail.clone(); // it names the rank that the others wait for
        }
        let Some(replica) = self.replicas.first() else { return self.detail.clone() };
        let step = ReplicaStep::ALL.into_iter().find(|step| step.to_string() == replica.step);
        step.map_or_else(|| self.detail.clone(), |step| step.describe_with(&replica.detail))
    }

    /// How it ended, in a line: `train-1 Failed after 12 s, exit code 3`.
    pub(crate) fn verdict(&self, paper: Paper) -> String {
        let took = self.duration(SystemClock.now()).map(|took| format!(" after {}", duration(took)));
        let code = match self.exit_code {
            Some(code) => format!(", exit code {code}"),
            None if self.started_ms.is_some() => ", how its command ended is not known".to_owned(),
            None => ", the command never ran".to_owned(),
        };
        let state = paper.ink.paint(self.tone(), &self.state);
        format!("{} {state}{}{code}", self.job, took.unwrap_or_default())
    }

    /// Whether its command has ended and its outputs are being stored.
    pub(crate) fn is_storing(&self) -> bool {
        self.replicas.first().is_some_and(|replica| {
            let over = [ReplicaStep::Releasing, ReplicaStep::Uploading, ReplicaStep::Reported];
            over.iter().any(|step| step.to_string() == replica.step)
        })
    }

    /// The colour of its state.
    pub(crate) fn tone(&self) -> Tone {
        match self.state.as_str() {
            "Completed" => Tone::Good,
            "Failed" => Tone::Bad,
            "NotResponding" => Tone::Warn,
            "Canceled" => Tone::Dim,
            "Preparing" | "Running" | "Finalizing" => Tone::Live,
            _ => Tone::Plain,
        }
    }

    /// Where each output goes that is sent to a data store.
    pub(crate) fn sent_to(&self) -> impl Iterator<Item = (&str, String)> {
        let job = self.job.parse().ok();
        self.spec.outputs.iter().filter_map(move |(name, output)| {
            let output = output.data()?;
            let uri = job.as_ref().map_or_else(|| output.uri.clone(), |job| output.uri_of(job));
            Some((name.as_str(), uri.to_string()))
        })
    }
}

/// An environment in a few words.
pub(crate) fn environment_words(environment: &EnvSpec) -> String {
    match environment {
        EnvSpec::Host { python, requirements } if requirements.is_empty() => {
            format!("{python} of the machine, as it is")
        }
        EnvSpec::Host { python, requirements } => {
            format!("{python} of the machine, which must have {}", requirements.join(", "))
        }
        EnvSpec::Pip { python, requirements } => format!("{python} with {}", requirements.join(", ")),
        EnvSpec::Conda { file, lock, .. } => conda_words(file, lock.is_some()),
        EnvSpec::Image { image, conda: None } => format!("image {image}"),
        EnvSpec::Image { image, conda: Some(_) } => format!("image {image} with a conda file"),
        EnvSpec::Build { dockerfile, .. } => format!("an image built from {dockerfile}"),
        EnvSpec::Named { reference } => reference.clone(),
    }
}

fn conda_words(file: &str, locked: bool) -> String {
    let file = if file.is_empty() { "a conda file" } else { file };
    if locked { format!("{file}, exactly the packages of its lock") } else { file.to_owned() }
}

/// The command of a job with its inputs that are values in their places.
pub(crate) fn with_values(spec: &JobSpec) -> String {
    spec.inputs.iter().fold(spec.command.trim().to_owned(), |text, (name, input)| match input {
        Input::Literal(value) => text.replace(&format!("${{{{inputs.{name}}}}}"), value),
        _ => text,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use agent_model::{Digest, JobDraft};

    use super::*;
    use crate::output::pretty;

    #[test]
    fn test_until_when_a_job_waits_is_told_from_now_on() {
        let (now, hour) = (Timestamp(1_000_000), std::time::Duration::from_secs(3600));
        let told = |at: Timestamp| dated(format!("waits until {}", at.utc()), Some(at), now);
        assert_eq!(told(now + hour), "waits until 01:16, in 1 h");
        assert_eq!(told(now + 48 * hour), "waits until 1970-01-03 00:16:40 UTC, in 2 d");
        // One that waits for something else says that.
        for (detail, begin) in [("held by ada", Some(now + hour)), ("next in line", None)] {
            assert_eq!(dated(detail.to_owned(), begin, now), detail);
        }
    }

    /// `train-1`, which completed.
    pub(crate) fn ended() -> JobView {
        JobView::try_from(wire(
            "Completed",
            v1::Outcome {
                verdict: "completed".into(),
                exit: Some(v1::Exit { kind: Some(v1::exit::Kind::Code(0)) }),
                started_ms: 1_000_000,
                ended_ms: 1_012_000,
                artifacts: Some(v1::Artifacts {
                    root: Digest::EMPTY.to_string(),
                    files: 2,
                    bytes: 1_200_096,
                }),
                ..Default::default()
            },
        ))
        .unwrap()
    }

    /// `train-1`, which failed with code 3.
    pub(crate) fn failed() -> JobView {
        let fault = Fault::new(Code::CommandFailed, "the command returned 3").fix("see the log");
        JobView::try_from(wire(
            "Failed",
            v1::Outcome {
                verdict: "failed".into(),
                exit: Some(v1::Exit { kind: Some(v1::exit::Kind::Code(3)) }),
                fault: Some(fault.into()),
                started_ms: 1_000_000,
                ended_ms: 1_000_400,
                usage: Some(v1::Usage {
                    cpu_ms: 700,
                    memory_peak_bytes: 150_000_000,
                    memory_limit_bytes: 1 << 30,
                }),
                ..Default::default()
            },
        ))
        .unwrap()
    }

    fn wire(state: &str, outcome: v1::Outcome) -> v1::Job {
        let draft = JobDraft { command: "python t.py".into(), ..JobDraft::default() };
        v1::Job {
            job: "train-1".into(),
            owner: "uid 0".into(),
            spec: Some(draft.validate().unwrap().into()),
            state: state.into(),
            epoch: 1,
            submitted_ms: 999_000,
            started_ms: outcome.started_ms,
            ended_ms: outcome.ended_ms,
            replicas: vec![v1::ReplicaStatus { node: "box".into(), ..Default::default() }],
            outcome: Some(outcome),
            ..Default::default()
        }
    }

    #[test]
    fn test_json_of_a_job_is_as_documented() {
        insta::assert_snapshot!("job", pretty(&failed()));
        assert_eq!(ended().duration(Timestamp(0)).unwrap().as_secs(), 12);
    }

    #[test]
    fn test_commands_and_people_are_named_in_full() {
        let fix = "read `agentctl logs --build` and `agentctl logs`; `agentctl doctor`";
        assert_eq!(
            for_this_job(fix, "t-1"),
            "read `agentctl logs --build t-1` and `agentctl logs t-1`; `agentctl doctor`"
        );
        assert_eq!((person("uid 4000000000"), person("")), ("uid 4000000000".to_owned(), String::new()));
    }
}
