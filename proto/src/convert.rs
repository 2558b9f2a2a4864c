//! Wire ↔ model. One block per message, in the order of the `.proto` files.

mod assets;
mod change;
mod data;
mod gang;
mod grant;
mod left;
mod predecessor;
mod service;

use std::collections::BTreeSet;
use std::time::Duration;

use agent_model::job::{self, JobDraft};
use agent_model::node::{
    CachedEnvironment, Capability, Finding, Gpu, Grade, Interpreter, Inventory, KeptResult, Load,
};
use agent_model::outcome::{Artifacts, ExitStatus, Outcome, StreamEnd, Usage};
use agent_model::{Blame, Code, Digest, EnvSpec, Fault, JobSpec, Retry, Stream, Timestamp, Verdict};

use crate::v1;

pub use change::change_request;

/// Why a message is not what it should be.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum WireError {
    #[error("`{0}` is missing")]
    Missing(&'static str),
    #[error("`{field}` cannot be `{value}`")]
    Value { field: &'static str, value: String },
    #[error(transparent)]
    Id(#[from] agent_model::ids::IdError),
    #[error(transparent)]
    Job(#[from] Fault),
}

/// A malformed message as the fault its sender is told.
impl From<WireError> for Fault {
    fn from(error: WireError) -> Fault {
        match error {
            WireError::Job(fault) => fault,
            other => Fault::new(Code::RequestInvalid, "the request is not valid").because(&other),
        }
    }
}

fn value(field: &'static str, value: &str) -> WireError {
    WireError::Value { field, value: value.to_owned() }
}

fn to_wire(duration: Duration) -> prost_types::Duration {
    let seconds = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    // Below 1e9, so it fits.
    let nanos = i32::try_from(duration.subsec_nanos()).unwrap_or_default();
    prost_types::Duration { seconds, nanos }
}

fn from_wire(duration: prost_types::Duration) -> Duration {
    Duration::try_from(duration).unwrap_or_default() // a negative duration is none
}

fn optional(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

fn optional_time(ms: u64) -> Option<Timestamp> {
    (ms != 0).then_some(Timestamp(ms))
}

impl From<JobSpec> for v1::JobSpec {
    fn from(spec: JobSpec) -> v1::JobSpec {
        let draft = JobDraft::from(spec);
        v1::JobSpec {
            name: draft.name.map(String::from).unwrap_or_default(),
            display_name: draft.display_name,
            description: draft.description,
            experiment: draft.experiment,
            tags: draft.tags.into_iter().collect(),
            command: draft.command,
            code: draft.code.map(String::from).unwrap_or_default(),
            environment: Some(draft.environment.into()),
            environment_variables: draft.environment_variables.into_iter().collect(),
            inputs: draft.inputs.into_iter().map(|(name, input)| (name, input.into())).collect(),
            outputs: data::outputs_to_wire(draft.outputs, &draft.output_names),
            resources: Some(v1::Resources {
                nodes: draft.resources.nodes,
                gpus: draft.resources.gpus,
                memory_bytes: draft.resources.memory,
                shm_bytes: draft.resources.shm,
                docker_args: draft.resources.docker_args,
                cpus: draft.resources.cpus,
                labels: draft.resources.labels.into_iter().collect(),
            }),
            limits: Some(v1::Limits {
                timeout: draft.limits.timeout.map(to_wire),
                grace: draft.limits.grace.map(to_wire),
                on_disconnect: draft.limits.on_disconnect.name().to_owned(),
            }),
            retry: Some(v1::Retry {
                max_attempts: draft.retry.max_attempts,
                backoff: Some(to_wire(draft.retry.backoff)),
            }),
            priority: draft.priority.name().to_owned(),
            secrets: draft.secrets.into_iter().collect(),
            owner: draft.owner.map(String::from).unwrap_or_default(),
            owner_since_ms: draft.owner_since.map_or(0, |since| since.0),
            distribution: draft.distribution.map(Into::into),
            compute: draft.compute.unwrap_or_default(),
            array: draft.array.map(String::from).unwrap_or_default(),
            sweep: draft.sweep.map(|sweep| sweep.to_string()).unwrap_or_default(),
            pipeline: draft.pipeline.map(|pipeline| pipeline.to_string()).unwrap_or_default(),
            visible_to_all: draft.visible_to_all,
            predecessors: draft.predecessors.into_iter().map(Into::into).collect(),
            services: draft.services.into_iter().map(|(name, service)| (name, service.into())).collect(),
            resume_outputs: draft.resume_outputs,
            azureml_stand_in: draft.azureml_stand_in,
            begin_ms: draft.begin.map_or(0, |at| at.0),
            deadline_ms: draft.deadline.map_or(0, |at| at.0),
            success_exit_codes: draft.success_exit_codes.into_iter().map(u32::from).collect(),
            resumes: draft.resumes.map(Into::into),
        }
    }
}

impl TryFrom<v1::JobSpec> for JobSpec {
    type Error = WireError;
    fn try_from(wire: v1::JobSpec) -> Result<JobSpec, WireError> {
        let digest = |text: String| optional(text).map(|text| text.parse::<Digest>()).transpose();
        let resources = wire.resources.unwrap_or_default();
        let limits = wire.limits.unwrap_or_default();
        let retry = wire.retry.unwrap_or_default();
        let draft = JobDraft {
            name: optional(wire.name).map(|name| name.parse()).transpose()?,
            display_name: wire.display_name,
            description: wire.description,
            experiment: wire.experiment,
            tags: wire.tags.into_iter().collect(),
            command: wire.command,
            code: digest(wire.code)?,
            environment: wire.environment.ok_or(WireError::Missing("environment"))?.try_into()?,
            environment_variables: wire.environment_variables.into_iter().collect(),
            inputs: wire
                .inputs
                .into_iter()
                .map(|(name, input)| Ok((name, input.try_into()?)))
                .collect::<Result<_, WireError>>()?,
            output_names: data::output_names(&wire.outputs),
            outputs: wire
                .outputs
                .into_iter()
                .map(|(name, output)| Ok((name, output.try_into()?)))
                .collect::<Result<_, WireError>>()?,
            resources: job::Resources {
                nodes: resources.nodes.max(1),
                gpus: resources.gpus,
                memory: resources.memory_bytes,
                shm: resources.shm_bytes,
                docker_args: resources.docker_args,
                cpus: resources.cpus,
                labels: resources.labels.into_iter().collect(),
            },
            limits: job::Limits {
                timeout: limits.timeout.map(from_wire),
                grace: limits.grace.map(from_wire),
                on_disconnect: match limits.on_disconnect.as_str() {
                    "" => job::OnDisconnect::default(),
                    word => job::OnDisconnect::parse(word).ok_or_else(|| value("on_disconnect", word))?,
                },
            },
            retry: job::RetryPolicy {
                max_attempts: retry.max_attempts,
                backoff: retry.backoff.map_or(job::RetryPolicy::default().backoff, from_wire),
            },
            priority: match wire.priority.as_str() {
                "" => job::Priority::default(),
                word => job::Priority::parse(word).ok_or_else(|| value("priority", word))?,
            },
            secrets: wire.secrets.into_iter().collect(),
            // One that this release does not know is nobody it could name.
            owner: optional(wire.owner).and_then(|owner| owner.parse().ok()),
            owner_since: Some(Timestamp(wire.owner_since_ms)).filter(|since| since.0 > 0),
            distribution: wire.distribution.map(TryInto::try_into).transpose()?,
            compute: Some(wire.compute).filter(|name| !name.is_empty()),
            array: optional(wire.array).map(|a| a.parse().map_err(|_| value("array", &a))).transpose()?,
            sweep: optional(wire.sweep)
                .map(|sweep| sweep.parse().map(Box::new).map_err(|_| value("sweep", &sweep)))
                .transpose()?,
            pipeline: optional(wire.pipeline)
                .map(|json| json.parse().map(Box::new).map_err(|_| value("pipeline", &json)))
                .transpose()?,
            visible_to_all: wire.visible_to_all,
            predecessors: wire.predecessors.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            services: wire
                .services
                .into_iter()
                .map(|(name, service)| Ok((name, service.try_into()?)))
                .collect::<Result<_, WireError>>()?,
            resume_outputs: wire.resume_outputs,
            azureml_stand_in: wire.azureml_stand_in,
            begin: optional_time(wire.begin_ms),
            deadline: optional_time(wire.deadline_ms),
            success_exit_codes: exit_codes(wire.success_exit_codes)?,
            resumes: wire.resumes.map(TryInto::try_into).transpose()?,
        };
        Ok(JobSpec::try_from(draft)?)
    }
}

fn exit_codes(codes: Vec<u32>) -> Result<BTreeSet<u8>, WireError> {
    let code = |code: u32| u8::try_from(code).map_err(|_| value("success_exit_codes", &code.to_string()));
    codes.into_iter().map(code).collect()
}

impl From<EnvSpec> for v1::Environment {
    fn from(spec: EnvSpec) -> v1::Environment {
        use v1::environment::Kind;
        let kind = match spec {
            EnvSpec::Host { python, requirements } => {
                Kind::Host(v1::HostEnvironment { python, requirements })
            }
            EnvSpec::Pip { python, requirements } => Kind::Pip(v1::PipEnvironment { python, requirements }),
            EnvSpec::Conda { file, document, lock } => {
                Kind::Conda(v1::CondaEnvironment { document, file, lock: lock.unwrap_or_default() })
            }
            EnvSpec::Image { image, conda } => {
                Kind::Image(v1::ImageEnvironment { image, conda: conda.unwrap_or_default() })
            }
            EnvSpec::Build { context, dockerfile } => {
                Kind::Build(v1::BuildEnvironment { context: context.into(), dockerfile })
            }
            EnvSpec::Named { reference } => Kind::Named(v1::NamedEnvironment { reference }),
        };
        v1::Environment { kind: Some(kind) }
    }
}

impl TryFrom<v1::Environment> for EnvSpec {
    type Error = WireError;
    fn try_from(wire: v1::Environment) -> Result<EnvSpec, WireError> {
        use v1::environment::Kind;
        Ok(match wire.kind.ok_or(WireError::Missing("environment.kind"))? {
            Kind::Host(host) => EnvSpec::Host { python: host.python, requirements: host.requirements },
            Kind::Pip(pip) => EnvSpec::Pip { python: pip.python, requirements: pip.requirements },
            Kind::Conda(conda) => {
                EnvSpec::Conda { file: conda.file, document: conda.document, lock: optional(conda.lock) }
            }
            Kind::Image(image) => EnvSpec::Image { image: image.image, conda: optional(image.conda) },
            Kind::Build(build) => {
                EnvSpec::Build { context: build.context.parse()?, dockerfile: build.dockerfile }
            }
            Kind::Named(named) => EnvSpec::Named { reference: named.reference },
        })
    }
}

/// The wire word of a verdict.
fn verdict_word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Completed => "completed",
        Verdict::Failed => "failed",
        Verdict::Canceled => "canceled",
    }
}

impl From<Outcome> for v1::Outcome {
    fn from(outcome: Outcome) -> v1::Outcome {
        use v1::exit::Kind;
        v1::Outcome {
            verdict: verdict_word(outcome.verdict).to_owned(),
            exit: outcome.exit.map(|exit| v1::Exit {
                kind: Some(match exit {
                    ExitStatus::Code(code) => Kind::Code(code),
                    ExitStatus::Signal(signal) => Kind::Signal(signal),
                }),
            }),
            fault: outcome.fault.map(v1::Fault::from),
            started_ms: outcome.started_at.map_or(0, |at| at.0),
            ended_ms: outcome.ended_at.0,
            streams: outcome
                .streams
                .into_iter()
                .map(|end| v1::StreamEnd { stream: end.stream.to_string(), digest: end.digest.into() })
                .collect(),
            tracking_bytes: outcome.tracking_bytes,
            artifacts: outcome.artifacts.map(v1::Artifacts::from),
            usage: outcome.usage.map(|usage| v1::Usage {
                cpu_ms: u64::try_from(usage.cpu.as_millis()).unwrap_or(u64::MAX),
                memory_peak_bytes: usage.memory_peak,
                memory_limit_bytes: usage.memory_limit.unwrap_or(0),
            }),
            environment: outcome.environment.map(|used| v1::UsedEnvironment {
                key: used.key,
                lock: used.lock.map(String::from).unwrap_or_default(),
            }),
            left_out: outcome.left_out,
        }
    }
}

impl From<Artifacts> for v1::Artifacts {
    fn from(a: Artifacts) -> v1::Artifacts {
        v1::Artifacts { root: a.root.into(), files: a.files, bytes: a.bytes }
    }
}

impl TryFrom<v1::Artifacts> for Artifacts {
    type Error = WireError;
    fn try_from(wire: v1::Artifacts) -> Result<Artifacts, WireError> {
        Ok(Artifacts { root: wire.root.parse()?, files: wire.files, bytes: wire.bytes })
    }
}

impl TryFrom<v1::Outcome> for Outcome {
    type Error = WireError;
    fn try_from(wire: v1::Outcome) -> Result<Outcome, WireError> {
        use v1::exit::Kind;
        Ok(Outcome {
            verdict: match wire.verdict.as_str() {
                "completed" => Verdict::Completed,
                "failed" => Verdict::Failed,
                "canceled" => Verdict::Canceled,
                other => return Err(value("verdict", other)),
            },
            exit: wire.exit.and_then(|exit| exit.kind).map(|kind| match kind {
                Kind::Code(code) => ExitStatus::Code(code),
                Kind::Signal(signal) => ExitStatus::Signal(signal),
            }),
            fault: wire.fault.map(Fault::try_from).transpose()?,
            started_at: optional_time(wire.started_ms),
            ended_at: Timestamp(wire.ended_ms),
            streams: wire
                .streams
                .into_iter()
                .map(|end| Ok(StreamEnd { stream: stream(&end.stream)?, digest: end.digest.parse()? }))
                .collect::<Result<_, WireError>>()?,
            tracking_bytes: wire.tracking_bytes,
            tracking: None,
            artifacts: wire.artifacts.map(Artifacts::try_from).transpose()?,
            usage: wire.usage.map(|usage| {
                Box::new(Usage {
                    cpu: Duration::from_millis(usage.cpu_ms),
                    memory_peak: usage.memory_peak_bytes,
                    memory_limit: (usage.memory_limit_bytes > 0).then_some(usage.memory_limit_bytes),
                })
            }),
            environment: wire.environment.map(left::used_environment).transpose()?,
            left_out: wire.left_out,
        })
    }
}

fn stream(word: &str) -> Result<Stream, WireError> {
    Stream::ALL.into_iter().find(|s| s.to_string() == word).ok_or_else(|| value("stream", word))
}

impl From<Fault> for v1::Fault {
    fn from(fault: Fault) -> v1::Fault {
        use v1::fault::Retry as Wire;
        v1::Fault {
            code: fault.code.as_str().to_owned(),
            what: fault.what,
            why: fault.why,
            fix: fault.fix.unwrap_or_default(),
            blame: fault.blame.name().to_owned(),
            retry: Some(match fault.retry {
                Retry::Never => Wire::Never(true),
                Retry::SameNode => Wire::SameNode(true),
                Retry::OtherNode => Wire::OtherNode(true),
                Retry::After(wait) => Wire::After(to_wire(wait)),
            }),
        }
    }
}

impl TryFrom<v1::Fault> for Fault {
    type Error = WireError;
    fn try_from(wire: v1::Fault) -> Result<Fault, WireError> {
        use v1::fault::Retry as Wire;
        let code = Code::parse(&wire.code).ok_or_else(|| value("code", &wire.code))?;
        let mut fault = Fault::new(code, wire.what);
        fault.why = wire.why;
        fault.fix = optional(wire.fix);
        let blame = Blame::ALL.into_iter().find(|blame| blame.name() == wire.blame);
        fault.blame = blame.ok_or_else(|| value("blame", &wire.blame))?;
        fault.retry = match wire.retry.ok_or(WireError::Missing("retry"))? {
            Wire::Never(_) => Retry::Never,
            Wire::SameNode(_) => Retry::SameNode,
            Wire::OtherNode(_) => Retry::OtherNode,
            Wire::After(wait) => Retry::After(from_wire(wait)),
        };
        Ok(fault)
    }
}

impl From<Inventory> for v1::Inventory {
    fn from(inventory: Inventory) -> v1::Inventory {
        let python = |python: Interpreter| v1::Interpreter { name: python.name, version: python.version };
        v1::Inventory {
            hostname: inventory.hostname,
            os: inventory.os,
            kernel: inventory.kernel,
            arch: inventory.arch,
            cpus: inventory.cpus,
            memory_bytes: inventory.memory,
            disk_bytes: inventory.disk,
            gpus: inventory.gpus.into_iter().map(v1::Gpu::from).collect(),
            gpu_driver: inventory.gpu_driver,
            cuda: inventory.cuda,
            slots: inventory.slots,
            reserved_cpus: inventory.reserved_cpus,
            reserved_memory_bytes: inventory.reserved_memory,
            job_cpus: inventory.job_cpus,
            gangs: inventory.gangs,
            labels: inventory.labels.into_iter().collect(),
            findings: inventory.findings.into_iter().map(v1::Finding::from).collect(),
            interpreters: inventory.interpreters.into_iter().map(python).collect(),
            environments: inventory.environments.into_iter().map(Into::into).collect(),
            kept: inventory
                .kept
                .into_iter()
                .map(|kept| v1::KeptResult {
                    replica: kept.replica.to_string(),
                    owner: kept.owner,
                    bytes: kept.bytes,
                })
                .collect(),
        }
    }
}

impl TryFrom<v1::Inventory> for Inventory {
    type Error = WireError;
    fn try_from(wire: v1::Inventory) -> Result<Inventory, WireError> {
        let python = |python: v1::Interpreter| Interpreter { name: python.name, version: python.version };
        Ok(Inventory {
            hostname: wire.hostname,
            os: wire.os,
            kernel: wire.kernel,
            arch: wire.arch,
            cpus: wire.cpus,
            memory: wire.memory_bytes,
            disk: wire.disk_bytes,
            gpus: wire.gpus.into_iter().map(Gpu::from).collect(),
            gpu_driver: wire.gpu_driver,
            cuda: wire.cuda,
            slots: wire.slots,
            reserved_cpus: wire.reserved_cpus,
            reserved_memory: wire.reserved_memory_bytes,
            job_cpus: wire.job_cpus,
            gangs: wire.gangs,
            labels: wire.labels.into_iter().collect(),
            findings: wire.findings.into_iter().map(Finding::try_from).collect::<Result<_, _>>()?,
            interpreters: wire.interpreters.into_iter().map(python).collect(),
            environments: wire.environments.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            kept: wire
                .kept
                .into_iter()
                .map(|kept| {
                    Ok(KeptResult { replica: kept.replica.parse()?, owner: kept.owner, bytes: kept.bytes })
                })
                .collect::<Result<_, WireError>>()?,
        })
    }
}

impl From<Gpu> for v1::Gpu {
    fn from(gpu: Gpu) -> v1::Gpu {
        v1::Gpu {
            uuid: gpu.uuid,
            name: gpu.name,
            memory_bytes: gpu.memory,
            index: gpu.index,
            held: gpu.held.unwrap_or_default(),
            unfit: gpu.unfit.unwrap_or_default(),
        }
    }
}

impl From<v1::Gpu> for Gpu {
    fn from(wire: v1::Gpu) -> Gpu {
        let said = |text: String| Some(text).filter(|text| !text.is_empty());
        Gpu {
            index: wire.index,
            uuid: wire.uuid,
            name: wire.name,
            memory: wire.memory_bytes,
            held: said(wire.held),
            unfit: said(wire.unfit),
        }
    }
}

impl From<CachedEnvironment> for v1::CachedEnvironment {
    fn from(kept: CachedEnvironment) -> v1::CachedEnvironment {
        let digest = |digest: Option<Digest>| digest.map(String::from).unwrap_or_default();
        v1::CachedEnvironment {
            key: kept.key,
            summary: kept.summary,
            python: kept.python,
            packages: kept.packages,
            bytes: kept.bytes,
            built_ms: kept.built.0,
            used_ms: kept.used.0,
            uses: kept.uses,
            pinned: kept.pinned,
            lock: digest(kept.lock),
            log: digest(kept.log),
        }
    }
}

impl TryFrom<v1::CachedEnvironment> for CachedEnvironment {
    type Error = WireError;
    fn try_from(wire: v1::CachedEnvironment) -> Result<CachedEnvironment, WireError> {
        let digest = |text: String| optional(text).map(|text| text.parse()).transpose();
        Ok(CachedEnvironment {
            key: wire.key,
            summary: wire.summary,
            python: wire.python,
            packages: wire.packages,
            bytes: wire.bytes,
            built: Timestamp(wire.built_ms),
            used: Timestamp(wire.used_ms),
            uses: wire.uses,
            pinned: wire.pinned,
            lock: digest(wire.lock)?,
            log: digest(wire.log)?,
        })
    }
}

impl From<Finding> for v1::Finding {
    fn from(finding: Finding) -> v1::Finding {
        v1::Finding {
            topic: finding.topic,
            grade: match finding.grade {
                Grade::Good => "good",
                Grade::Limited => "limited",
                Grade::Bad => "bad",
            }
            .to_owned(),
            found: finding.found,
            means: finding.means,
            fix: finding.fix.unwrap_or_default(),
            lacks: finding.lacks.map(Capability::name).unwrap_or_default().to_owned(),
        }
    }
}

impl TryFrom<v1::Finding> for Finding {
    type Error = WireError;
    fn try_from(wire: v1::Finding) -> Result<Finding, WireError> {
        Ok(Finding {
            topic: wire.topic,
            grade: match wire.grade.as_str() {
                "good" => Grade::Good,
                "limited" => Grade::Limited,
                "bad" => Grade::Bad,
                other => return Err(value("grade", other)),
            },
            found: wire.found,
            means: wire.means,
            fix: optional(wire.fix),
            // What a later release calls lacking, this one does not ask for.
            lacks: Capability::ALL.into_iter().find(|what| what.name() == wire.lacks),
        })
    }
}

impl From<Load> for v1::Load {
    fn from(load: Load) -> v1::Load {
        v1::Load { disk_free_bytes: load.disk_free, memory_free_bytes: load.memory_free }
    }
}

impl From<v1::Load> for Load {
    fn from(wire: v1::Load) -> Load {
        Load { disk_free: wire.disk_free_bytes, memory_free: wire.memory_free_bytes }
    }
}

#[cfg(test)]
mod tests {
    use agent_model::{DataInput, DataOutput};

    use super::*;

    fn full_job() -> JobSpec {
        let draft = JobDraft {
            name: Some("train-1".parse().unwrap()),
            command: "python t.py ${{inputs.lr}} ${{inputs.d}} ${{outputs.m}}".into(),
            code: Some(Digest::EMPTY),
            environment: EnvSpec::Pip { python: "python3".into(), requirements: vec!["numpy".into()] },
            environment_variables: [("A".into(), "1".into())].into(),
            inputs: [
                ("lr".into(), job::Input::Literal("0.1".into())),
                ("d".into(), job::Input::Folder(Digest::EMPTY)),
                ("f".into(), job::Input::File { root: Digest::EMPTY, name: "x".into() }),
                (
                    "s".into(),
                    job::Input::Data(DataInput {
                        uri: "azureml://datastores/blob/paths/a".parse().unwrap(),
                        is_file: true,
                        is_own_copy: true,
                    }),
                ),
            ]
            .into(),
            output_names: [
                ("m".into(), job::OutputName { name: "iris".into(), version: None }),
                ("s".into(), job::OutputName { name: "roses".into(), version: None }),
            ]
            .into(),
            outputs: [
                ("m".into(), job::Output::File),
                (
                    "s".into(),
                    job::Output::Data(DataOutput {
                        uri: "azureml://datastores/blob/paths/${{name}}".parse().unwrap(),
                        is_file: false,
                    }),
                ),
            ]
            .into(),
            limits: job::Limits {
                timeout: Some(Duration::from_millis(1500)),
                grace: None,
                on_disconnect: job::OnDisconnect::Replace,
            },
            priority: job::Priority::High,
            distribution: Some(job::Distribution::Spark),
            secrets: [("KEY".to_owned(), "wandb".to_owned())].into(),
            owner: Some(agent_model::Principal::Local { uid: 1000 }),
            compute: Some("gpu".to_owned()),
            array: Some("0-9:2%3".parse().unwrap()),
            visible_to_all: true,
            services: [job::ServiceKind::TensorBoard, job::ServiceKind::Custom]
                .map(|kind| {
                    let port = (kind == job::ServiceKind::Custom).then_some(8080);
                    (kind.name().to_owned(), job::JobService { kind, port, log_dir: "runs".into(), rank: 1 })
                })
                .into(),
            predecessors: job::WantedEnd::ALL
                .map(|end| job::Predecessor { job: "train-0".parse().unwrap(), end })
                .into(),
            resume_outputs: true,
            azureml_stand_in: true,
            begin: Some(Timestamp(7)),
            deadline: Some(Timestamp(8_000)),
            success_exit_codes: [3, 75].into(),
            resumes: Some(job::LeftOutputs {
                attempt: agent_model::Epoch(2),
                artifacts: Artifacts { root: Digest::EMPTY, files: 3, bytes: 7 },
                is_earlier: true,
            }),
            ..JobDraft::default()
        };
        draft.validate().unwrap()
    }

    #[test]
    fn test_job_spec_round_trips() {
        let spec = full_job();
        assert_eq!(JobSpec::try_from(v1::JobSpec::from(spec.clone())).unwrap(), spec);
        let sweep = JobDraft {
            output_names: [].into(),
            sweep: Some(Box::new(
                r#"{"space":{"lr":{"uniform":{"min":0.1,"max":1.0}}},"sampling":{"bayesian":{"seed":3}},
                    "objective":{"goal":"maximize","metric":"m"},"given":{"2":{"lr":1}}}"#
                    .parse()
                    .unwrap(),
            )),
            ..spec.clone().into()
        };
        let sweep = sweep.validate().unwrap();
        assert_eq!(JobSpec::try_from(v1::JobSpec::from(sweep.clone())).unwrap(), sweep);
        // A version is for a job that is no array.
        let mut one = JobDraft { array: None, ..spec.into() };
        one.output_names
            .insert("m".into(), job::OutputName { name: "iris".into(), version: Some("3".into()) });
        let one = one.validate().unwrap();
        assert_eq!(JobSpec::try_from(v1::JobSpec::from(one.clone())).unwrap(), one);
    }

    #[test]
    fn test_every_environment_round_trips() {
        for spec in [
            EnvSpec::host(),
            EnvSpec::Conda { file: "conda.yml".into(), document: "x".into(), lock: Some("@EXPLICIT".into()) },
            EnvSpec::Image { image: "i".into(), conda: Some("c".into()) },
            EnvSpec::Build { context: Digest::EMPTY, dockerfile: "Dockerfile".into() },
            EnvSpec::Named { reference: "azureml:x:1".into() },
        ] {
            assert_eq!(EnvSpec::try_from(v1::Environment::from(spec.clone())).unwrap(), spec);
        }
    }

    #[test]
    fn test_outcome_round_trips() {
        let outcome = Outcome {
            verdict: Verdict::Failed,
            exit: Some(ExitStatus::Signal(9)),
            fault: Some(Fault::new(Code::OutOfMemory, "x").with_retry(Retry::After(Duration::from_secs(3)))),
            started_at: Some(Timestamp(5)),
            ended_at: Timestamp(9),
            streams: vec![StreamEnd { stream: Stream::Job, digest: Digest::EMPTY }],
            tracking_bytes: 12,
            tracking: None,
            artifacts: Some(Artifacts { root: Digest::EMPTY, files: 1, bytes: 2 }),
            usage: Some(Box::new(Usage {
                cpu: Duration::from_millis(1234),
                memory_peak: 5,
                memory_limit: Some(9),
            })),
            environment: Some(Box::new(agent_model::outcome::UsedEnvironment {
                key: "pip-1".into(),
                lock: Some(Digest::EMPTY),
            })),
            left_out: vec!["outputs/latest -> /x points outside the directory".into()],
        };
        assert_eq!(Outcome::try_from(v1::Outcome::from(outcome.clone())).unwrap(), outcome);
    }

    #[test]
    fn test_wire_that_breaks_a_rule_is_refused() {
        let mut wire = v1::JobSpec::from(full_job());
        wire.command.clear();
        assert_eq!(Fault::from(JobSpec::try_from(wire).unwrap_err()).code, Code::JobInvalid);
        let mut wire = v1::JobSpec::from(full_job());
        wire.code = "nonsense".into();
        assert_eq!(Fault::from(JobSpec::try_from(wire).unwrap_err()).code, Code::RequestInvalid);
    }
}
