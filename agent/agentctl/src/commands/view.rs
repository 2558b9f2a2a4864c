//! Jobs and machines, decoded from the daemon's messages: the schema of every `--json` (see `agent/docs/json.md`) and
//! the source of the tables.

mod spec;

use agent_model::node::{CachedEnvironment, Inventory, Load};
use agent_model::outcome::{Outcome, Usage};
use agent_model::pipeline::Pipeline;
use agent_model::{
    Blame, Clock, Code, EnvSpec, Fault, JobId, JobSpec, ReplicaStep, Retry, SystemClock, Timestamp,
};
use agent_proto::v1;
use serde::Serialize;
use serde_json::json;

use super::arrays::TasksView;
use super::awake::ShutdownView;
use super::named::NamedView;
use super::nodes::TunnelView;
use super::preempt::PreemptionView;
use super::recorded::with_values;
use super::sweeps::{BestView, TrialView};
use crate::client::{person, with_people};
use crate::output::Paper;
use crate::output::text::{Tone, clean, duration};

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

/// A step that is not run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct StepView {
    pub(crate) step: String,
    /// The job as which it completed before; empty for none.
    pub(crate) reused_from: String,
    /// Why it never runs; empty if it does.
    pub(crate) not_run: String,
}

impl StepView {
    pub(crate) fn of(pipeline: &Pipeline, wire: v1::StepStatus) -> StepView {
        let v1::StepStatus { step, reused_from, not_run } = wire;
        StepView { step: pipeline.name(step), reused_from, not_run }
    }
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
            detail: with_people(&wire.detail),
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
            blame: match fault.blame {
                Blame::User => "user",
                Blame::Node => "node",
                Blame::Platform => "platform",
                Blame::Network => "network",
            },
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
        let of_ranks = (0..self.ranks()).filter_map(|rank| self.outcome_of(rank)?.usage);
        of_ranks.reduce(|one, other| Usage {
            cpu: one.cpu + other.cpu,
            memory_peak: one.memory_peak.max(other.memory_peak),
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

/// A machine.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct NodeView {
    pub(crate) node: String,
    pub(crate) liveness: String,
    pub(crate) eligibility: String,
    pub(crate) last_seen_ms: u64,
    pub(crate) slots_used: u32,
    pub(crate) cpus_used: u32,
    pub(crate) memory_used_bytes: u64,
    pub(crate) disk_free_bytes: u64,
    pub(crate) memory_free_bytes: u64,
    /// The SSH connection of the controller by which it reaches the controller, if there is one.
    pub(crate) tunnel: Option<TunnelView>,
    /// That it will be taken away, if so.
    pub(crate) preemption: Option<PreemptionView>,
    /// That it could not start jobs and gets none for a while, if so.
    pub(crate) held_back: Option<HeldBackView>,
    #[serde(serialize_with = "inventory_json")]
    pub(crate) inventory: Inventory,
}

/// An inventory whose environments have the same form as everywhere else.
fn inventory_json<S: serde::Serializer>(inventory: &Inventory, to: S) -> Result<S::Ok, S::Error> {
    let mut document = serde_json::to_value(inventory).map_err(serde::ser::Error::custom)?;
    let kept = inventory.environments.iter().map(EnvironmentView::from);
    document["environments"] = json!(kept.collect::<Vec<_>>());
    document.serialize(to)
}

/// Until when a machine gets no jobs because it could not start some.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct HeldBackView {
    pub(crate) until_ms: u64,
    pub(crate) reason: String,
}

impl HeldBackView {
    /// `could not start jobs and is tried again at 08:00:00 UTC: …`
    pub(crate) fn describe(&self) -> String {
        clean(&agent_model::breaker::describe(Timestamp(self.until_ms), &self.reason)).into_owned()
    }
}

impl From<v1::HeldBack> for HeldBackView {
    fn from(wire: v1::HeldBack) -> HeldBackView {
        HeldBackView { until_ms: wire.until_ms, reason: wire.reason }
    }
}

/// An environment that a machine keeps.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct EnvironmentView {
    pub(crate) key: String,
    pub(crate) summary: String,
    pub(crate) python: Option<String>,
    pub(crate) packages: u32,
    pub(crate) bytes: u64,
    pub(crate) built_ms: u64,
    pub(crate) used_ms: u64,
    pub(crate) uses: u32,
    pub(crate) pinned: bool,
    pub(crate) lock: Option<String>,
    pub(crate) log: Option<String>,
}

impl From<&CachedEnvironment> for EnvironmentView {
    fn from(kept: &CachedEnvironment) -> EnvironmentView {
        EnvironmentView {
            key: kept.key.clone(),
            summary: kept.summary.clone(),
            python: Some(kept.python.clone()).filter(|version| !version.is_empty()),
            packages: kept.packages,
            bytes: kept.bytes,
            built_ms: kept.built.0,
            used_ms: kept.used.0,
            uses: kept.uses,
            pinned: kept.pinned,
            lock: kept.lock.map(|digest| digest.to_string()),
            log: kept.log.map(|digest| digest.to_string()),
        }
    }
}

impl TryFrom<v1::Node> for NodeView {
    type Error = Fault;
    fn try_from(wire: v1::Node) -> Result<NodeView, Fault> {
        let load = Load::from(wire.load.unwrap_or_default());
        Ok(NodeView {
            node: wire.node,
            liveness: wire.liveness,
            eligibility: wire.eligibility,
            last_seen_ms: wire.last_seen_ms,
            slots_used: wire.slots_used,
            cpus_used: wire.cpus_used,
            memory_used_bytes: wire.memory_used_bytes,
            disk_free_bytes: load.disk_free,
            memory_free_bytes: load.memory_free,
            tunnel: wire.tunnel.map(TunnelView::from),
            preemption: wire.preemption.map(PreemptionView::from),
            held_back: wire.held_back.map(HeldBackView::from),
            inventory: Inventory::try_from(wire.inventory.unwrap_or_default())?,
        })
    }
}

impl NodeView {
    /// `instance_type=Standard_NC6, rack=7`
    pub(crate) fn labels(&self) -> String {
        let pairs: Vec<String> =
            self.inventory.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        clean(&pairs.join(", ")).into_owned()
    }

    /// Whether it gets new work, in one word: `ready`, or what prevents it.
    pub(crate) fn condition(&self) -> &str {
        match self.eligibility.as_str() {
            _ if self.preemption.is_some() && self.liveness == "ready" => "preempted",
            "open" if self.held_back.is_some() && self.liveness == "ready" => "held_back",
            "open" => &self.liveness,
            closed => closed,
        }
    }

    /// Why it gets no new work for a while, or for ever, where it says so itself.
    pub(crate) fn notices(&self) -> impl Iterator<Item = String> {
        let goes = self.preemption.as_ref().map(PreemptionView::describe);
        goes.into_iter().chain(self.held_back.as_ref().map(HeldBackView::describe))
    }

    /// The colour of that word.
    pub(crate) fn tone(&self) -> Tone {
        match self.condition() {
            "ready" => Tone::Good,
            "degraded" | "draining" | "cordoned" | "enrolling" | "preempted" | "held_back" => Tone::Warn,
            _ => Tone::Bad,
        }
    }
}

/// The controller.
#[derive(Debug, Serialize)]
pub(crate) struct ControllerView {
    pub(crate) version: String,
    pub(crate) started_ms: u64,
    pub(crate) state_dir: String,
    pub(crate) queued: u32,
    pub(crate) running: u32,
    pub(crate) pid: u64,
    /// Changes when the database is rebuilt or restored.
    pub(crate) incarnation: String,
    /// The size of its blob store, and the limit.
    pub(crate) store_bytes: u64,
    pub(crate) store_limit_bytes: u64,
    pub(crate) notices: Vec<NoticeView>,
    /// How its machine is shut down, if anything does that.
    pub(crate) shutdown: Option<ShutdownView>,
}

/// A problem that the controller reports.
#[derive(Debug, Serialize)]
pub(crate) struct NoticeView {
    pub(crate) what: String,
    pub(crate) fix: String,
}

impl From<v1::Controller> for ControllerView {
    fn from(wire: v1::Controller) -> ControllerView {
        ControllerView {
            version: wire.version,
            started_ms: wire.started_ms,
            state_dir: wire.state_dir,
            queued: wire.queued,
            running: wire.running,
            pid: wire.pid,
            incarnation: wire.incarnation,
            store_bytes: wire.store_bytes,
            store_limit_bytes: wire.store_limit_bytes,
            notices: wire.notices.into_iter().map(|n| NoticeView { what: n.what, fix: n.fix }).collect(),
            shutdown: wire.shutdown.map(ShutdownView::from),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use agent_model::{Digest, JobDraft};

    use super::*;
    use crate::output::pretty;

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
                usage: Some(v1::Usage { cpu_ms: 700, memory_peak_bytes: 150_000_000 }),
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
