//! What came of a command, and what went wrong before it could start: errors become faults here.
//!
//! Pure. An [`ExitRecord`] becomes an [`Ending`] by one rule ([`judge`]); each error of a step becomes a
//! [`Fault`] in the words of the person who submitted the job. Called by `worker::runner` and
//! `worker::late`.

use std::error::Error;
use std::io;
use std::path::Path;
use std::time::Duration;

use agent_cas::remote::told;
use agent_cas::snapshot::{TreeError, Unread};
use agent_cas::{MissingError, ReadError, WriteError};
use agent_model::disk::Shortfall;
use agent_model::{Blame, Code, ExitStatus, Fault, JobId, JobSpec, Retry, Timestamp, Verdict, causes, size};
use agent_runtime::env::AcquireError;
use agent_runtime::exec::{self, LaunchError, Lost};
use agent_shim::cgroup::Containment;
use agent_shim::{End, ExitRecord, NotStarted, OomScope, Sender};
use serde::{Deserialize, Serialize};
use tonic::Status;

use super::fetch::FetchError;
use super::outputs::CollectError;

/// What came of a command; certain from here on, while its logs and outputs are still to be stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ending {
    pub(crate) verdict: Verdict,
    pub(crate) exit: Option<ExitStatus>,
    pub(crate) fault: Option<Fault>,
    pub(crate) started_at: Option<Timestamp>,
    pub(crate) ended_at: Timestamp,
}

impl Ending {
    /// Of a command that never ran because something failed.
    pub(crate) fn failed(fault: Fault, at: Timestamp) -> Ending {
        Ending { verdict: Verdict::Failed, exit: None, fault: Some(fault), started_at: None, ended_at: at }
    }

    /// Of a command that never ran because someone asked for the end.
    pub(crate) fn canceled(at: Timestamp) -> Ending {
        Ending { verdict: Verdict::Canceled, exit: None, fault: None, started_at: None, ended_at: at }
    }
}

/// What an exit record means. `tail` are the last lines of the log, oldest first.
/// The machine `went_down`: it was restarted since, or is being stopped.
pub(crate) fn judge(record: &ExitRecord, spec: &JobSpec, tail: Vec<String>, went_down: bool) -> Ending {
    let (verdict, fault) = match &record.end {
        _ if went_down && is_from_elsewhere(record) => (Verdict::Failed, Some(rebooted())),
        _ if let Some(signal) = record.stop_signal => {
            (Verdict::Failed, Some(ended_from_elsewhere(record, signal)))
        }
        _ if record.lease_over || record.stopped.as_deref() == Some(LEASE_OVER) => {
            (Verdict::Failed, Some(lease_over()))
        }
        // Nobody but the controller has a stop ordered in words.
        _ if record.stopped.is_some() => (Verdict::Canceled, None),
        End::NeverStarted(NotStarted::Stopped) => (Verdict::Canceled, None),
        End::NeverStarted(reason) => (Verdict::Failed, Some(never_started(reason, in_container(record)))),
        End::Exited(_) if record.timed_out => (Verdict::Failed, Some(time_limit(spec, tail))),
        End::Exited(status) if status.is_success() => (
            Verdict::Completed,
            cut_log(record).or_else(|| cut_metrics(record)).or_else(|| survived_kills(record)),
        ),
        End::Exited(_) if record.oom.is_some() => (Verdict::Failed, Some(out_of_memory(record))),
        End::Exited(ExitStatus::Signal(signal)) => (Verdict::Failed, Some(signaled(*signal, tail))),
        End::Exited(ExitStatus::Code(code)) => {
            (Verdict::Failed, Some(returned(*code, tail, spec.code.is_some())))
        }
    };
    let fault = match (fault, record.unkilled) {
        (fault, 0) => fault,
        (Some(fault), left) => Some(fault.why(survivors(left))),
        (None, left) => Some(unkilled(left)),
    };
    let (started_at, ended_at) = (record.started_at, record.ended_at);
    Ending { verdict, exit: record.status(), fault, started_at, ended_at }
}

fn survivors(left: u32) -> String {
    format!("{left} of its processes survived the final signal")
}

/// The kernel holds what is left, for example in a file system that does not answer.
fn unkilled(left: u32) -> Fault {
    Fault::new(Code::Unkilled, "the job ended, but not all of it")
        .why(survivors(left))
        .fix("look on the node for processes in state D, and for the file system or device they wait for")
}

/// The job did what it should, but not all it said could be kept.
fn cut_log(record: &ExitRecord) -> Option<Fault> {
    let error = record.log_error.as_deref()?;
    Some(
        Fault::new(Code::DiskFull, "part of the log could not be written")
            .why(format!("{} are missing: {error}", size::binary(record.log_dropped)))
            .fix("free space on the node's disk, or raise `log_quota` in its configuration; the log says where it is cut"),
    )
}

/// The same for its metrics.
fn cut_metrics(record: &ExitRecord) -> Option<Fault> {
    let error = record.tracking_error.as_deref()?;
    Some(Fault::new(Code::DiskFull, "part of the metrics could not be kept").why(error).fix(
        "record less, or raise `log_quota` in the node's configuration; metrics may take a quarter of it",
    ))
}

/// The controller does not have all that was to be stored. A job that failed failed for another reason.
pub(crate) fn unstored(fault: Option<Fault>, missing: &[String], dir: &Path) -> Fault {
    let lost = || {
        Fault::new(Code::ControllerStore, "the controller does not have all of the log or metrics")
            .fix(format!("what the node still has is in `{}`", dir.join("log").display()))
    };
    missing.iter().fold(fault.unwrap_or_else(lost), Fault::why)
}

fn in_container(record: &ExitRecord) -> bool {
    record.containment == Containment::Container.to_string()
}

/// The reason with which the agent stops a job whose supervisor knows of no leases.
pub(crate) const LEASE_OVER: &str = "the node has not heard from the controller for too long";

/// A signal that nobody ordered ended the job. A machine that goes down sends it to all processes at one moment, so the
/// command may have ended of it before its supervisor did anything.
pub(crate) fn is_from_elsewhere(record: &ExitRecord) -> bool {
    const TERM: i32 = 15;
    let by_itself =
        record.stopped.is_none() && !record.lease_over && !record.timed_out && record.oom.is_none();
    let asked = record.status().is_some_and(|status| status.shell_code() == 128 + TERM);
    record.stop_signal.is_some() || by_itself && asked
}

/// What a machine that goes down does to jobs whose supervisor leaves no record, or could not start them.
pub(crate) fn may_be_of_the_machine(fault: &Fault) -> bool {
    matches!(fault.code, Code::RunLost | Code::LaunchFailed | Code::OutOfMemory)
}

fn ended_from_elsewhere(record: &ExitRecord, signal: i32) -> Fault {
    let what = if in_container(record) { "its container" } else { "it" };
    let fault = Fault::new(Code::RunLost, "the running command was ended by somebody else than its user")
        .why(format!("{what} was stopped from outside, by {}", signal_text(signal)));
    let fault = match &record.stop_sender {
        None => fault,
        Some(Sender { pid: 0, .. }) => fault.why("the kernel sent it, or somebody outside the container"),
        Some(Sender { pid, uid, name }) if name.is_empty() => {
            fault.why(format!("process {pid} of user {uid} sent it, which is gone"))
        }
        Some(Sender { pid, uid, name }) => {
            fault.why(format!("process {pid} (`{name}`) of user {uid} sent it"))
        }
    };
    fault.fix(match in_container(record) {
        true => "look whether the container engine of the node was stopped or restarted, or who stopped the container",
        false => "look on the node for who stopped it: `journalctl` names the units that were stopped",
    })
}

fn never_started(reason: &NotStarted, in_container: bool) -> Fault {
    let system = |error: i32| io::Error::from_raw_os_error(error).to_string();
    if let NotStarted::Exec { program, os_error } = reason
        && in_container
    {
        return Fault::new(Code::CommandNotFound, "the image cannot run the command")
            .why(format!("`{program}` of the image: {}", system(*os_error)))
            .fix("commands are given to a shell of the image: use an image that has `sh` or `bash`");
    }
    let fault = Fault::new(Code::LaunchFailed, "the command could not be started");
    let fault = match reason {
        NotStarted::Exec { program, os_error } => fault.why(format!("{program}: {}", system(*os_error))),
        NotStarted::Setup { step, os_error: 0 } => fault.why(step.clone()),
        NotStarted::Setup { step, os_error } => fault.why(format!("{step}: {}", system(*os_error))),
        NotStarted::NoGo => fault.why("the daemon did not say go in time"),
        NotStarted::Stopped | NotStarted::LeaseOver => fault.why("it was stopped before"),
    };
    fault.fix("run `agentctl doctor` on the node; what it marks as bad keeps jobs from starting")
}

fn time_limit(spec: &JobSpec, tail: Vec<String>) -> Fault {
    let limit = spec.limits.timeout.unwrap_or_default().as_secs_f64();
    let fault = Fault::new(Code::TimeLimit, format!("the command ran longer than its limit of {limit} s"));
    with_tail(fault, tail).fix("raise `limits.timeout`, or let the script do less or go on from a checkpoint")
}

/// The kernel ended the command, or what it depended on, for want of memory.
fn out_of_memory(record: &ExitRecord) -> Fault {
    match record.oom {
        None | Some(OomScope::Own) => Fault::new(Code::OutOfMemory, "the command ran out of memory")
            .why(format!("the kernel ended it{}; {}", at_its_limit(record), peak(record)))
            .fix("raise `resources.memory`, or lower the batch size"),
        // Others had used it up, or the node promised more than it has.
        Some(scope) => {
            let whose = match scope {
                OomScope::Host => "the machine had no memory left",
                _ => "all that runs under the daemon's memory limit took too much together",
            };
            let why = format!("the kernel ended it because {whose}; {}", peak(record));
            node_out_of_memory(why).fix(
                "say in `resources.memory` what the job needs, or run fewer jobs at a time: `slots` of the node",
            )
        }
    }
}

fn node_out_of_memory(why: String) -> Fault {
    let fault = Fault::new(Code::OutOfMemory, "the node ran out of memory under the command");
    Fault { blame: Blame::Node, ..fault }.why(why).with_retry(Retry::OtherNode)
}

/// The job did what it should, although it lost processes on the way.
fn survived_kills(record: &ExitRecord) -> Option<Fault> {
    let what = match record.oom_kills {
        0 => return None,
        1 => "a process of the command ran out of memory, and the command went on".to_owned(),
        kills => format!("{kills} processes of the command ran out of memory, and the command went on"),
    };
    Some(
        Fault::new(Code::OutOfMemory, what)
            .why(format!("the kernel ended them{}; {}", at_its_limit(record), peak(record)))
            .fix("raise `resources.memory` if the command should have had them"),
    )
}

fn at_its_limit(record: &ExitRecord) -> String {
    let limit = record.limits.memory.map(|limit| format!(" at its {} memory limit", size::binary(limit)));
    limit.unwrap_or_else(|| " for want of memory".to_owned())
}

fn peak(record: &ExitRecord) -> String {
    match record.memory_peak {
        Some(peak) => format!("peak seen {}", size::binary(peak)),
        None => format!("its largest process had {} in memory", size::binary(record.max_rss)),
    }
}

/// The lease of an attempt was over, so it was ended: another node may have the job by now.
pub(crate) fn lease_over() -> Fault {
    Fault::new(Code::LeaseOver, "the node lost contact for longer than the job allows")
        .why("the job says `on_disconnect: replace`, and no word came from the controller in time")
        .fix("see with `agentctl nodes` whether the node is connected again; `retry` gives the job more attempts")
}

fn signaled(signal: i32, tail: Vec<String>) -> Fault {
    let fault =
        Fault::new(Code::CommandSignaled, format!("the command was killed by {}", signal_text(signal)));
    let fix = match signal {
        4 | 7 | 8 | 11 => "native code of the script or of one of its packages crashed; look at the log",
        6 => "the script or one of its packages aborted; look at the log",
        _ => "nobody asked agentd for this: look for who did, for example the kernel with `dmesg`",
    };
    with_tail(fault, tail).fix(fix)
}

fn returned(code: i32, tail: Vec<String>, has_code: bool) -> Fault {
    let says = |words: &[&str]| tail.iter().any(|line| words.iter().any(|word| line.contains(word)));
    let not_found = match code {
        126 | 127 => {
            says(&["not found", "No such file", "Permission denied", "cannot execute", "Is a directory"])
        }
        2 => says(&["can't open file"]),
        _ => false,
    };
    if not_found {
        let fault = Fault::new(Code::CommandNotFound, "the command or its script was not found");
        return with_tail(fault, tail).fix(match has_code {
            true => "correct the path in `command`: it is relative to the code directory, and ignored files are not there",
            false => {
                "the job has no code: the command starts in an empty directory. If a file of yours is missing, add \
                 `code: .` to the job file, which sends the folder that it is in"
            }
        });
    }
    let absent = tail.iter().find_map(|line| absent_module(line)).map(str::to_owned);
    let fault = with_tail(Fault::new(Code::CommandFailed, format!("the command returned {code}")), tail);
    let fault = match code - 128 {
        signal @ 1..=31 => fault.why(format!("{code} is what a shell says after {}", signal_text(signal))),
        _ => fault,
    };
    fault.fix(match absent {
        Some(module) => format!(
            "the environment lacks `{module}`: add the package that has it to the requirements or the conda file of the \
             job; if it is a file of yours, it must be in the code directory"
        ),
        None => "the end of the log says why; read all of it with `agentctl logs`".to_owned(),
    })
}

/// The module that Python did not find, if a line says so: `ModuleNotFoundError: No module named 'numpy'`.
fn absent_module(line: &str) -> Option<&str> {
    let (_, quoted) = line.split_once("ModuleNotFoundError: No module named '")?;
    quoted.split('\'').next()
}

fn with_tail(fault: Fault, tail: Vec<String>) -> Fault {
    tail.into_iter().fold(fault, Fault::why)
}

fn signal_text(signal: i32) -> String {
    const NAMES: [(i32, &str); 14] = [
        (1, "HUP"),
        (2, "INT"),
        (3, "QUIT"),
        (4, "ILL"),
        (6, "ABRT"),
        (7, "BUS"),
        (8, "FPE"),
        (9, "KILL"),
        (11, "SEGV"),
        (13, "PIPE"),
        (14, "ALRM"),
        (15, "TERM"),
        (24, "XCPU"),
        (25, "XFSZ"),
    ];
    match NAMES.iter().find(|(number, _)| *number == signal) {
        Some((_, name)) => format!("signal {signal} ({name})"),
        None => format!("signal {signal}"),
    }
}

/// Most lines of a log that a fault shows.
const TAIL_LINES: usize = 5;
/// Most characters of a line that a fault shows.
const TAIL_WIDTH: usize = 300;

/// The last lines of a log that say something, from its last bytes. What a progress bar wrote over is left
/// out.
pub(crate) fn tail_lines(end_of_log: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(end_of_log);
    let shown = |line: &str| -> String {
        let last = line.trim_end().rsplit('\r').next().unwrap_or_default();
        last.chars().filter(|c| !c.is_control() || *c == '\t').take(TAIL_WIDTH).collect()
    };
    let mut lines: Vec<String> =
        text.lines().rev().map(shown).filter(|line| !line.trim().is_empty()).take(TAIL_LINES).collect();
    lines.reverse();
    lines
}

/// There is too little room to go on.
pub(crate) fn disk_full(shortfall: &Shortfall, path: &Path) -> Fault {
    Fault::new(Code::DiskFull, format!("the disk of {} is full", path.display()))
        .because(shortfall)
        .fix("free space there, or lower `disk_reserve` in the node's configuration")
}

/// The code or an input could not be laid out.
///
/// What a store that is `elsewhere` lacks may be there again later; who submits the job again sends it what it said to
/// lack, and what turned out so when somebody read it.
pub(crate) fn fetch(error: &FetchError, elsewhere: bool) -> Fault {
    let code = match error {
        _ if is_no_space(error) => Code::DiskFull,
        _ if is_damaged(error) => Code::SnapshotDamaged,
        _ if is_absent(error) => Code::SnapshotMissing,
        _ if is_unusable(error) => Code::SnapshotUnsafe,
        FetchError::Folder { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => {
            Code::SnapshotUnsafe
        }
        _ => Code::SnapshotStore,
    };
    let fault = Fault::new(code, error.to_string());
    let fault = error.source().into_iter().fold(fault, Fault::because);
    match code {
        Code::DiskFull => {
            fault.fix("free space on the node's disk; `agentctl doctor` shows how much there is")
        }
        Code::SnapshotMissing | Code::SnapshotDamaged if elsewhere => {
            let fix = "submit the job again with `agentctl`: it sends what the store lacks or holds damaged; look at \
                       the server that `blob_store` names";
            Fault { blame: Blame::Network, ..fault }.with_retry(Retry::After(LATER)).fix(fix)
        }
        Code::SnapshotMissing => fault.fix("submit the job again: what is missing is then sent again"),
        Code::SnapshotDamaged => fault.fix("submit the job again: what was damaged is then sent again"),
        Code::SnapshotUnsafe => {
            fault.fix("submit the job with `agentctl`, which says what is wrong before anything is sent")
        }
        _ => fault.fix("look at the log of agentd on the node"),
    }
}

/// When what somebody ended may be tried again.
const SOON: Duration = Duration::from_secs(30);

/// The environment could not be had. `kind` is what users call it.
pub(crate) fn environment(error: &AcquireError, kind: &str) -> Fault {
    use AcquireError as E;
    let what = format!("could not prepare the {kind} environment");
    let fault = |code| Fault::new(code, what.clone()).because(error);
    let advised = |code, hint: &Option<String>, usual: &str| {
        fault(code).fix(hint.clone().unwrap_or_else(|| usual.to_owned()))
    };
    match error {
        lack if lack.is_lack() => Fault { blame: Blame::Node, ..fault(Code::EnvBuild) }
            .with_retry(Retry::OtherNode)
            .fix("find what holds so much of it on the node, or raise the limit of its service"),
        E::Unsupported { .. } => fault(Code::EnvUnsupported)
            .fix("use a `conda_file`, `{python, requirements}` for pip packages, or `environment: host`"),
        E::EngineMissing { .. } => fault(Code::EnvUnsupported)
            .fix("install `agent-env` beside `agentd` on the node; `agentctl doctor` says whether it is there"),
        E::PythonMissing { name } => fault(Code::PythonMissing)
            .fix(format!("install `{name}` on the node, or name a Python it has under `environment.python`")),
        E::PythonUnusable { .. } => fault(Code::PythonIncomplete)
            .fix("repair that interpreter, or name another under `environment.python`"),
        E::VenvMissing { package, .. } => fault(Code::PythonIncomplete)
            .fix(format!("install it on the node: sudo apt-get install {package}")),
        E::Unsatisfied { requirement, .. } => fault(Code::EnvUnsatisfied)
            .fix(format!("correct `{requirement}` in the requirements; the build log says what there is")),
        E::Unsolvable { at, hint, .. } => {
            let usual = match at.is_empty() {
                true => "relax a version in the conda file, or add the channel that has the package",
                false => "relax these lines, or add the channel that has the packages",
            };
            advised(Code::EnvUnsatisfied, hint, usual)
        }
        E::Refused { hint, .. } => advised(Code::EnvBuild, hint, "correct what it names in the conda file"),
        E::TooLong { .. } => {
            fault(Code::EnvBuild).fix("give versions for the largest packages: then there is less to choose from")
        }
        E::Denied { .. } => fault(Code::EnvDenied).fix(
            "put credentials for that host into the file that `conda_credentials` names in the node's configuration",
        ),
        E::Damaged { .. } => fault(Code::EnvDamaged)
            .fix("it is tried again; if it stays so, compare the channel or its mirror with its origin"),
        E::Lacks { missing, .. } => fault(Code::EnvLacks).fix(format!(
            "install them on the node ({}), or let an environment be made: leave out `user_managed_dependencies`",
            shortly(missing)
        )),
        E::NameUnknown { known, .. } => fault(Code::EnvUnknown).fix(match known.is_empty() {
            true => "put its definition into the folder of `curated_environments` on the node".to_owned(),
            false => format!("name one that is defined: {}", shortly(known)),
        }),
        E::Network { .. } => fault(Code::EnvNetwork)
            .fix("check the node's network and proxy variables, and where packages come from: `agentd show-config`"),
        E::BrokenOff { .. } => Fault { blame: Blame::Node, ..fault(Code::EnvBuild) }
            .with_retry(Retry::After(SOON))
            .fix("look on the node why its container engine ends or restarts: `journalctl -u docker`"),
        E::Engine(_) | E::ImageMissing { .. } | E::Registry { .. } | E::ImageBuild { .. } => image(error, &what),
        E::WrongPlatform { .. } | E::CannotCarry { .. } | E::NeedsGpu { .. } => image(error, &what),
        E::DiskFull { .. } => fault(Code::DiskFull)
            .fix("free space on the node's disk; `agentctl envs list` shows what environments take of it"),
        E::OutOfMemory { limit, .. } => fault(Code::EnvBuild)
            .why(format!("builders may take {}", size::binary(*limit)))
            .fix("raise `builder_memory` in the node's configuration, or ask for fewer packages"),
        E::Killed { .. } => Fault { blame: Blame::Platform, ..fault(Code::EnvBuild) }
            .with_retry(Retry::After(SOON))
            .fix("it was begun anew several times; look on the node for who ends it, for example the kernel with `dmesg`"),
        E::Stalled { .. } | E::Failed { .. } => {
            fault(Code::EnvBuild).fix("the build log says more: `agentctl logs --build`")
        }
        E::Remembered { error, ago, left } => environment(error, kind).why(format!(
            "this is remembered from a build {} s ago; a job that begins in {} s or later tries again",
            ago.as_secs(),
            left.as_secs() + 1
        )),
        E::Command { .. } | E::Io { .. } => {
            fault(Code::EnvBuild).fix("look at the log of agentd on the node")
        }
    }
}

/// The image of an environment could not be had, or is of no use here.
fn image(error: &AcquireError, what: &str) -> Fault {
    use AcquireError as E;
    let fault = |code| Fault::new(code, what.to_owned()).because(error);
    match error {
        E::ImageMissing { registry, denied: true, .. } => fault(Code::ImageMissing).fix(format!(
            "check the spelling; if it is private, put credentials for {registry} into the file that \
             `docker_credentials` names in the node's configuration"
        )),
        E::ImageMissing { image, .. } => fault(Code::ImageMissing).fix(format!(
            "correct `image` or its tag: `docker pull {image}` must work for whoever may see it"
        )),
        E::Registry { registry, .. } => fault(Code::EnvNetwork).fix(format!(
            "it is tried again; check from the node whether {registry} answers, and the proxy of its container engine"
        )),
        E::ImageBuild { .. } => fault(Code::ImageBuild)
            .fix("correct that step of the Dockerfile; the build log has all of it: `agentctl logs --build`"),
        E::CannotCarry { .. } => fault(Code::ImageCarrier).fix(
            "use an image with a newer glibc, such as `ubuntu:22.04` or `debian:12`, or install the packages in a \
             Dockerfile: `build: {path: …}`",
        ),
        E::NeedsGpu { .. } => fault(Code::ImagePlatform)
            .fix("ask for GPUs in `resources.gpus`, so that a node with GPUs is chosen, or name an image for processors"),
        E::WrongPlatform { node, .. } => fault(Code::ImagePlatform)
            .fix(format!("name an image that is made for {node}, or for several platforms")),
        _ => fault(Code::EnvBuild).fix("look at the container engine on the node: `agentctl doctor`"),
    }
}

/// The first few of a list.
fn shortly(list: &[String]) -> String {
    const SHOWN: usize = 8;
    let more = list.len().saturating_sub(SHOWN);
    let shown = list[..list.len() - more].join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}

/// The shim may have heard `go` all the same.
pub(crate) fn is_unsure(error: &LaunchError) -> bool {
    matches!(error, LaunchError::Look { .. } | LaunchError::Silent { .. } | LaunchError::Talk { .. })
}

/// No shim was started, for want of something that others may give back in a moment, or it was killed before it heard
/// that it may begin.
pub(crate) fn is_lack(error: &LaunchError) -> bool {
    if let LaunchError::Refused { status, .. } = error {
        return status.code().is_none();
    }
    let is_early =
        matches!(error, LaunchError::Clean { .. } | LaunchError::Write(_) | LaunchError::Spawn { .. });
    is_early
        && (is_no_space(error) || causes(error).filter_map(|cause| cause.downcast_ref()).any(exec::is_lack))
}

/// The shim or the command could not be started.
pub(crate) fn launch(error: &LaunchError) -> Fault {
    match error {
        LaunchError::Lost { lost: found, .. } => lost(found),
        LaunchError::NameTaken { name, .. } => {
            Fault::new(Code::LaunchFailed, "the container could not be made")
                .because(error)
                .fix(format!("remove or rename it on the node: `docker rm --force {name}`"))
        }
        LaunchError::ImageGone { .. } => Fault::new(Code::LaunchFailed, "the container could not be made")
            .because(error)
            .fix("somebody removed the image on the node; the next attempt gets it again")
            .with_retry(Retry::SameNode),
        LaunchError::Engine(_) | LaunchError::Unready { .. } | LaunchError::Carry(_) => {
            Fault::new(Code::LaunchFailed, "the container could not be started")
                .because(error)
                .fix("run `agentctl doctor` on the node; the container engine's own log says more")
        }
        full if is_no_space(full) => Fault::new(Code::DiskFull, "the command could not be started")
            .because(full)
            .fix("free space on the disk of agentd's state directory on the node"),
        other => Fault::new(Code::LaunchFailed, "the command could not be started")
            .because(other)
            .fix("run `agentctl doctor` on the node; what it marks as bad keeps jobs from starting"),
    }
}

/// The command was started, and nobody can say how it ended. Where the kernel has ended processes beside its supervisor
/// meanwhile, that is why: who may not lower its own score is ended like any other.
pub(crate) fn lost(lost: &Lost) -> Fault {
    if lost.rebooted {
        return rebooted();
    }
    let (fault, fix) = match (lost.starved, &lost.why) {
        (0, None) => (
            Fault::new(Code::RunLost, "the running command was lost"),
            "look for what killed `agent-shim` on the node, for example the kernel with `dmesg`",
        ),
        (0, Some(_)) => (
            Fault::new(Code::RunLost, "the running command was lost"),
            "look on the node for who ended the container, and at the log of its container engine",
        ),
        (kills, _) => (
            node_out_of_memory(format!(
                "since it was started the kernel has ended processes beside it for want of memory: {kills}"
            )),
            "see with `dmesg` on the node what took the memory; run fewer jobs at a time: `slots` of the node",
        ),
    };
    let fault = fault.why("the process that watched over it is gone and left no record");
    let fault = lost.why.iter().cloned().fold(fault, Fault::why);
    let fault = match (lost.killed, lost.left) {
        (0, 0) => fault.why("no process of the job was left"),
        (killed, 0) => fault.why(format!("{killed} processes of the job were left and were ended")),
        (_, left) => fault.why(format!("{left} processes of the job are left and cannot be ended")),
    };
    fault.fix(fix)
}

/// The supervisor is gone, and what it left cannot be read.
pub(crate) fn record_lost(error: &(dyn Error + 'static)) -> Fault {
    Fault::new(Code::RunLost, "how the command ended cannot be known")
        .why("the process that watched over it has ended, and its record is damaged")
        .because(error)
        .fix("look on the node for who changed files in the job's directory; `agentctl logs` has what was logged")
}

/// The command was started, and its directory says nothing of it any more.
pub(crate) fn traces_lost(dir: &Path) -> Fault {
    Fault::new(Code::RunLost, "how the command ended cannot be known")
        .why(format!("it was started, and nothing in {} says so any more", dir.display()))
        .fix("look on the node for who removed files there, and for processes of the job that are left")
}

/// The command failed after a GPU that it had was lost: that is the better reason, and its own is kept below it.
pub(crate) fn gpu_lost(ending: Ending, trouble: &[String]) -> Ending {
    let own = |code| matches!(code, Code::CommandFailed | Code::CommandSignaled);
    match ending.fault {
        Some(fault) if !trouble.is_empty() && own(fault.code) => {
            let lost = Fault::new(Code::GpuLost, "the command failed after a GPU of it was lost");
            let lost = trouble.iter().cloned().fold(lost, Fault::why).why(fault.what);
            let lost = fault.why.into_iter().fold(lost, Fault::why);
            let lost = lost.fix("look on the node for `Xid` in the kernel's log (`sudo dmesg`); `retry` gives the job more attempts");
            Ending { fault: Some(lost), ..ending }
        }
        fault => Ending { fault, ..ending },
    }
}

/// The machine was restarted under the job.
pub(crate) fn rebooted() -> Fault {
    Fault::new(Code::NodeRebooted, "the node was restarted while it held the job")
        .fix("nothing is wrong with the job: submit it again, or allow retries")
}

/// What the node keeps about a replica cannot be read or written.
pub(crate) fn unusable(error: &(dyn Error + 'static)) -> Fault {
    let code = if is_no_space(error) { Code::DiskFull } else { Code::LaunchFailed };
    Fault::new(code, "the node cannot keep track of the job")
        .because(error)
        .fix("check space and permissions of agentd's state directory on the node")
}

/// When another attempt may find the store elsewhere as it should be.
const LATER: Duration = Duration::from_secs(30);

/// The disk has no room.
pub(crate) fn is_no_space(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| cause.downcast_ref().is_some_and(agent_fs::is_full))
}

/// The store had something else under the name of a part of it.
fn is_damaged(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| cause.downcast_ref().is_some_and(ReadError::is_damage))
}

/// The store does not have all of it.
fn is_absent(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| matches!(cause.downcast_ref(), Some(ReadError::Absent { .. })))
}

/// The store lacks a part of it, or had something else under its name.
pub(crate) fn is_unsound(error: &(dyn Error + 'static)) -> bool {
    is_absent(error) || is_damaged(error)
}

/// What the store of blobs said, or did, that something waits for.
pub(crate) fn store_says(error: &(dyn Error + 'static)) -> String {
    let status = |cause: &(dyn Error + 'static)| {
        let boxed = cause.downcast_ref::<Box<Status>>().map(Box::as_ref);
        boxed.or_else(|| cause.downcast_ref()).map(told)
    };
    let innermost = || causes(error).last().map(ToString::to_string).unwrap_or_default();
    causes(error).find_map(status).unwrap_or_else(innermost)
}

/// The store of blobs does not do as it should just now, and may do later.
pub(crate) fn is_away(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| {
        cause.downcast_ref().is_some_and(MissingError::is_away)
            || cause.downcast_ref().is_some_and(ReadError::is_away)
            || cause.downcast_ref().is_some_and(WriteError::is_away)
    })
}

/// The tree itself is at fault, wherever it is read.
fn is_unusable(error: &(dyn Error + 'static)) -> bool {
    let of_the_tree = |cause: &TreeError| !matches!(cause, TreeError::Read(_));
    causes(error).filter_map(|cause| cause.downcast_ref()).any(of_the_tree)
}

/// All outputs are stored but these, which change each time they are read.
pub(crate) fn outputs_missing(missing: &[Unread], kept: &Path) -> Fault {
    /// Paths that a fault names; more are only counted.
    const NAMED: usize = 5;
    let shown = |path: &Path| path.strip_prefix(kept.join("work")).unwrap_or(path).display().to_string();
    let fault = Fault::new(Code::OutputsUnstored, "part of the outputs could not be stored; the rest is");
    let named =
        missing.iter().take(NAMED).map(|missing| format!("`{}` {}", shown(&missing.path), missing.why));
    let more = missing.len().saturating_sub(NAMED);
    let more = (more > 0).then(|| format!("and {more} more"));
    let fix = format!("they are kept on the node in {}", kept.display());
    named.chain(more).fold(Fault { blame: Blame::User, ..fault }, Fault::why).fix(fix)
}

/// The outputs stay on the node.
pub(crate) fn outputs(error: &CollectError, kept: &Path, job: &JobId) -> Fault {
    let fault = Fault::new(Code::OutputsUnstored, "the outputs could not be stored").because(error);
    let blame = if is_away(error) { Blame::Network } else { fault.blame };
    Fault { blame, ..fault }.fix(format!(
        "they are kept on the node in {}; when what is wrong is mended: agentctl node outputs {job}",
        kept.display()
    ))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use agent_model::JobDraft;
    use agent_model::job::Limits;

    use rustix::io::Errno;

    use super::*;

    fn spec() -> JobSpec {
        let limits = Limits { timeout: Some(Duration::from_secs(60)), ..Limits::default() };
        JobDraft { command: "python t.py".into(), limits, ..JobDraft::default() }.validate().unwrap()
    }

    fn record(end: End) -> ExitRecord {
        ExitRecord {
            version: agent_shim::VERSION,
            instance: "i".into(),
            replica: "t.1.0".parse().unwrap(),
            end,
            started_at: Some(Timestamp(1)),
            ended_at: Timestamp(2),
            stopped: None,
            stop_signal: None,
            stop_sender: None,
            timed_out: false,
            lease_over: false,
            oom: None,
            oom_kills: 0,
            memory_peak: None,
            limits: agent_shim::Limits::default(),
            limits_unmet: Vec::new(),
            containment: "cgroup v1".into(),
            log_bytes: 0,
            log_dropped: 0,
            log_error: None,
            gaps: agent_shim::Gaps::default(),
            log_sha256: None,
            tracking_bytes: 0,
            tracking_error: None,
            max_rss: 3 << 30,
            cpu_ms: 0,
            leftovers: 0,
            unkilled: 0,
        }
    }

    fn code(code: i32) -> ExitRecord {
        record(End::Exited(ExitStatus::Code(code)))
    }

    fn judged(record: &ExitRecord, tail: &str) -> (Verdict, Option<Code>) {
        let ending = judge(record, &spec(), tail_lines(tail.as_bytes()), false);
        (ending.verdict, ending.fault.map(|fault| fault.code))
    }

    #[test]
    fn test_every_way_to_end_has_its_verdict_and_code() {
        use Verdict::{Canceled, Completed, Failed};
        let killed = record(End::Exited(ExitStatus::Signal(9)));
        let never = |reason| record(End::NeverStarted(reason));
        let exec = NotStarted::Exec { program: "bash".into(), os_error: 2 };
        for (record, tail, expected) in [
            (code(0), "", (Completed, None)),
            (code(3), "Traceback", (Failed, Some(Code::CommandFailed))),
            (code(127), "bash: line 1: trian: command not found", (Failed, Some(Code::CommandNotFound))),
            (code(127), "my own meaning of 127", (Failed, Some(Code::CommandFailed))),
            (code(2), "python: can't open file '/w/t.py': [Errno 2]", (Failed, Some(Code::CommandNotFound))),
            (code(2), "usage: t.py", (Failed, Some(Code::CommandFailed))),
            (killed.clone(), "", (Failed, Some(Code::CommandSignaled))),
            (
                ExitRecord { oom: Some(OomScope::Own), ..killed.clone() },
                "",
                (Failed, Some(Code::OutOfMemory)),
            ),
            (ExitRecord { oom: Some(OomScope::Host), ..code(1) }, "", (Failed, Some(Code::OutOfMemory))),
            (ExitRecord { oom_kills: 1, ..code(0) }, "", (Completed, Some(Code::OutOfMemory))),
            (ExitRecord { lease_over: true, ..killed.clone() }, "", (Failed, Some(Code::LeaseOver))),
            (ExitRecord { lease_over: true, ..code(0) }, "", (Failed, Some(Code::LeaseOver))),
            (
                ExitRecord { lease_over: true, ..never(NotStarted::LeaseOver) },
                "",
                (Failed, Some(Code::LeaseOver)),
            ),
            (ExitRecord { timed_out: true, ..killed.clone() }, "", (Failed, Some(Code::TimeLimit))),
            (ExitRecord { timed_out: true, ..code(0) }, "", (Failed, Some(Code::TimeLimit))),
            (ExitRecord { stop_signal: Some(15), ..killed.clone() }, "", (Failed, Some(Code::RunLost))),
            // As releases before this one told it.
            (
                ExitRecord { stopped: Some("TERM".into()), stop_signal: Some(15), ..killed.clone() },
                "",
                (Failed, Some(Code::RunLost)),
            ),
            (
                ExitRecord { stopped: Some(LEASE_OVER.into()), ..killed.clone() },
                "",
                (Failed, Some(Code::LeaseOver)),
            ),
            (
                ExitRecord {
                    stopped: Some("TERM".into()),
                    stop_signal: Some(15),
                    containment: "container".into(),
                    ..killed.clone()
                },
                "",
                (Failed, Some(Code::RunLost)),
            ),
            (
                ExitRecord {
                    containment: "container".into(),
                    ..never(NotStarted::Exec { program: "sh".into(), os_error: 2 })
                },
                "",
                (Failed, Some(Code::CommandNotFound)),
            ),
            (ExitRecord { stopped: Some("ada".into()), ..killed }, "", (Canceled, None)),
            (ExitRecord { stopped: Some("ada".into()), ..code(0) }, "", (Canceled, None)),
            (never(NotStarted::Stopped), "", (Canceled, None)),
            (never(exec), "", (Failed, Some(Code::LaunchFailed))),
            (
                ExitRecord { log_error: Some("ENOSPC".into()), ..code(0) },
                "",
                (Completed, Some(Code::DiskFull)),
            ),
        ] {
            assert_eq!(judged(&record, tail), expected, "{record:?}");
        }
    }

    #[test]
    fn test_machine_that_goes_down_cancels_nothing_and_excuses_no_failure() {
        let ended = |record: &ExitRecord| {
            let ending = judge(record, &spec(), Vec::new(), true);
            (ending.verdict, ending.fault.map(|fault| fault.code))
        };
        let term = record(End::Exited(ExitStatus::Signal(15)));
        let rebooted = (Verdict::Failed, Some(Code::NodeRebooted));
        for record in [
            ExitRecord { stop_signal: Some(15), ..code(0) },
            ExitRecord { stop_signal: Some(15), ..code(1) },
            code(143),
            term.clone(),
        ] {
            assert_eq!(ended(&record), rebooted, "{record:?}");
        }
        let ordered = ExitRecord { stopped: Some("ada".into()), ..term.clone() };
        assert_eq!(ended(&ordered), (Verdict::Canceled, None));
        assert_eq!(ended(&code(3)), (Verdict::Failed, Some(Code::CommandFailed)));
        assert_eq!(ended(&code(0)), (Verdict::Completed, None));
        assert_eq!(ended(&ExitRecord { timed_out: true, ..term }).1, Some(Code::TimeLimit));
    }

    #[test]
    fn test_advice_fits_what_is_missing() {
        let fix = |code: i32, tail: &str, has_code| {
            returned(code, tail_lines(tail.as_bytes()), has_code).fix.unwrap()
        };
        let lost = "python: can't open file '/w/t.py': [Errno 2]";
        assert!(fix(2, lost, false).contains("`code: .`") && !fix(2, lost, true).contains("`code: .`"));
        let lacks =
            "Traceback (most recent call last):\nModuleNotFoundError: No module named 'sklearn.svm'\n";
        let said = fix(1, lacks, true);
        assert!(said.contains("`sklearn.svm`") && said.contains("requirements"), "{said}");
        assert!(fix(1, "ValueError: no", true).contains("agentctl logs"));
    }

    #[test]
    fn test_who_ended_a_job_is_named() {
        let sender = Sender { pid: 812, uid: 1000, name: "bash".into() };
        let record = ExitRecord { stop_signal: Some(15), stop_sender: Some(sender), ..code(143) };
        let fault = judge(&record, &spec(), Vec::new(), false).fault.unwrap();
        assert_eq!(fault.why[1], "process 812 (`bash`) of user 1000 sent it");
        assert_eq!((fault.blame, fault.retry), (Blame::Node, Retry::OtherNode));
    }

    #[test]
    fn test_every_failure_of_an_environment_has_its_code_and_a_way_on() {
        use AcquireError as E;
        let (detail, none) = (|| "it said so".to_owned(), Vec::new);
        let at = vec!["conda.yml, line 7: `numpy=99`".to_owned()];
        let missing =
            |denied| E::ImageMissing { image: "a:1".into(), registry: "h".into(), denied, detail: detail() };
        for (error, code, fix) in [
            (E::Unsupported { kind: "image" }, Code::EnvUnsupported, "conda_file"),
            (E::EngineMissing { looked: None }, Code::EnvUnsupported, "agent-env"),
            (
                E::Unsolvable { at: at.clone(), detail: detail(), hint: None },
                Code::EnvUnsatisfied,
                "relax these lines",
            ),
            (
                E::Unsolvable { at: none(), detail: detail(), hint: Some("use `=`".into()) },
                Code::EnvUnsatisfied,
                "use `=`",
            ),
            (E::Refused { at, detail: detail(), hint: None }, Code::EnvBuild, "conda file"),
            (E::TooLong { detail: detail() }, Code::EnvBuild, "versions"),
            (E::Denied { detail: detail() }, Code::EnvDenied, "conda_credentials"),
            (E::Damaged { detail: detail() }, Code::EnvDamaged, "mirror"),
            (E::Lacks { python: "/p".into(), missing: vec!["x>1".into()] }, Code::EnvLacks, "(x>1)"),
            (
                E::NameUnknown { reference: "a".into(), known: none() },
                Code::EnvUnknown,
                "curated_environments",
            ),
            (
                E::NameUnknown { reference: "a".into(), known: vec!["b".into()] },
                Code::EnvUnknown,
                "defined: b",
            ),
            (E::Network { detail: detail() }, Code::EnvNetwork, "network"),
            (missing(true), Code::ImageMissing, "docker_credentials"),
            (missing(false), Code::ImageMissing, "docker pull a:1"),
            (E::Registry { registry: "h".into(), detail: detail() }, Code::EnvNetwork, "whether h answers"),
            (
                E::ImageBuild { step: "step 1 of 2".into(), detail: detail(), tail: none() },
                Code::ImageBuild,
                "Dockerfile",
            ),
            (E::CannotCarry { image: "a".into(), why: detail() }, Code::ImageCarrier, "glibc"),
            (E::NeedsGpu { image: "a".into(), why: detail() }, Code::ImagePlatform, "resources.gpus"),
            (
                E::WrongPlatform { image: "a".into(), has: "x".into(), node: "linux/amd64".into() },
                Code::ImagePlatform,
                "linux/amd64",
            ),
            (E::OutOfMemory { step: "solving", limit: 3 << 30 }, Code::EnvBuild, "builder_memory"),
            (E::Killed { step: "solving", signal: 9, starved: true }, Code::EnvBuild, "`dmesg`"),
        ] {
            let fault = environment(&error, "conda");
            assert_eq!(fault.code, code, "{fault}");
            assert!(fault.fix.as_ref().is_some_and(|said| said.contains(fix)), "{fault:?}");
            assert!(fault.why[0] == error.to_string(), "{fault:?}");
        }
        let error = agent_runtime::docker::DockerError::Broken { step: "build an image", detail: detail() };
        let broken = environment(&E::BrokenOff { error, done: 2, times: 3 }, "image");
        assert_eq!(
            (broken.code, broken.blame, broken.retry),
            (Code::EnvBuild, Blame::Node, Retry::After(SOON))
        );
        assert!(broken.why[0].contains("3 times") && broken.why[0].contains(&detail()), "{broken}");
        let killed = environment(&E::Killed { step: "solving", signal: 15, starved: false }, "conda");
        assert_eq!((killed.blame, killed.retry), (Blame::Platform, Retry::After(SOON)));
        let unmet = E::Unsatisfied { requirement: "tiny==9".into(), detail: detail() };
        let (ago, left) = (Duration::from_secs(12), Duration::from_millis(47_900));
        let remembered = environment(&E::Remembered { error: Box::new(unmet.clone()), ago, left }, "pip");
        let fresh = environment(&unmet, "pip");
        assert_eq!((remembered.code, &remembered.fix), (Code::EnvUnsatisfied, &fresh.fix));
        let said = remembered.why.last().unwrap();
        assert!(said.contains("a build 12 s ago") && said.contains("begins in 48 s"), "{said}");
        let many: Vec<String> = (0..10).map(|n| n.to_string()).collect();
        assert_eq!(shortly(&many), "0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
    }

    #[test]
    fn test_user_blamed_faults_say_what_to_do() {
        for (record, tail) in
            [(code(3), ""), (code(127), "not found"), (record(End::Exited(ExitStatus::Signal(11))), "")]
        {
            let fault = judge(&record, &spec(), tail_lines(tail.as_bytes()), false).fault.unwrap();
            assert!(fault.fix.is_some_and(|fix| !fix.is_empty()), "{}", fault.code);
        }
        let fault = judge(&code(137), &spec(), Vec::new(), false).fault.unwrap();
        assert_eq!(
            fault.to_string(),
            "RUN-101: the command returned 137: 137 is what a shell says after signal 9 (KILL)"
        );
    }

    #[test]
    fn test_out_of_memory_says_whose_limit_and_how_much_was_used() {
        let limits = agent_shim::Limits { memory: Some(64 << 20), pids: None };
        let killed = ExitRecord {
            oom: Some(OomScope::Own),
            limits,
            memory_peak: Some((64 << 20) - (104 << 10)),
            ..code(137)
        };
        let fault = judge(&killed, &spec(), Vec::new(), false).fault.unwrap();
        assert_eq!(fault.why, ["the kernel ended it at its 64 MiB memory limit; peak seen 63.9 MiB"]);
        assert_eq!((fault.blame, fault.retry), (Blame::User, Retry::Never));
        for scope in [OomScope::Parent, OomScope::Host] {
            let record = ExitRecord { oom: Some(scope), ..killed.clone() };
            let fault = judge(&record, &spec(), Vec::new(), false).fault.unwrap();
            assert_eq!((fault.blame, fault.retry), (Blame::Node, Retry::OtherNode), "{fault}");
        }
    }

    #[test]
    fn test_supervisor_that_the_kernel_ended_is_no_riddle() {
        let gone = Lost { rebooted: false, killed: 1, left: 0, starved: 0, why: None };
        let starved = Lost { starved: 3, ..gone.clone() };
        assert_eq!(lost(&gone).code, Code::RunLost);
        let fault = lost(&starved);
        assert_eq!(
            (fault.code, fault.blame, fault.retry),
            (Code::OutOfMemory, Blame::Node, Retry::OtherNode)
        );
        assert!(fault.why[0].ends_with("for want of memory: 3"), "{fault}");
        assert!(fault.why.iter().any(|why| why.starts_with("1 processes of the job were left")), "{fault}");
        assert_eq!(lost(&Lost { rebooted: true, ..starved }).code, Code::NodeRebooted);
    }

    #[test]
    fn test_lack_is_not_blamed_on_who_asked_for_an_environment() {
        let cannot = |errno: Errno| {
            let source = exec::CommandError::Spawn { program: "python3".into(), source: errno.into() };
            AcquireError::Command { step: "asking", source: std::sync::Arc::new(source) }
        };
        let judged = |errno| {
            let error = cannot(errno);
            let fault = environment(&error, "pip");
            (error.is_lack(), fault.blame, fault.retry)
        };
        assert_eq!(judged(Errno::MFILE), (true, Blame::Node, Retry::OtherNode));
        assert_eq!(judged(Errno::AGAIN), (true, Blame::Node, Retry::OtherNode));
        let (lack, blame, _) = judged(Errno::NOENT);
        assert_eq!((lack, blame), (false, Blame::User));
        let io = AcquireError::Io {
            what: "make",
            path: "x".into(),
            source: std::sync::Arc::new(Errno::NFILE.into()),
        };
        assert!(io.is_lack());
        let failed = |detail: &str| AcquireError::Failed { step: "making", detail: detail.to_owned() };
        for said in
            ["Error: [Errno 11] Resource temporarily unavailable", "RuntimeError: can't start new thread"]
        {
            assert!(failed(said).is_lack(), "{said}");
        }
        assert!(!failed("error: command 'gcc' failed").is_lack());
    }

    #[test]
    fn test_start_waits_for_what_is_given_back() {
        let spawn = |errno: Errno| LaunchError::Spawn { shim: "shim".into(), source: errno.into() };
        let code = |errno| launch(&spawn(errno)).code;
        assert!([Errno::MFILE, Errno::AGAIN, Errno::NOMEM, Errno::NOSPC].map(spawn).iter().all(is_lack));
        assert!(!is_lack(&spawn(Errno::NOENT)));
        let late = LaunchError::Talk { dir: "job".into(), source: Errno::MFILE.into() };
        assert!(!is_lack(&late), "the command may have begun");
        let refused = |status: i32| LaunchError::Refused {
            dir: "job".into(),
            status: std::os::unix::process::ExitStatusExt::from_raw(status),
            said: String::new(),
        };
        assert!(is_lack(&refused(9)), "it was killed");
        assert!(!is_lack(&refused(70 << 8)), "it says why");
        assert_eq!((code(Errno::NOSPC), code(Errno::MFILE)), (Code::DiskFull, Code::LaunchFailed));
    }

    #[test]
    fn test_tail_is_short_and_plain() {
        let log = b"one\ntwo\n\nthree\n10%\r50%\r100%\nfour\n\x1b[31mred\x1b[0m\xff\n";
        assert_eq!(tail_lines(log), ["two", "three", "100%", "four", "[31mred[0m\u{fffd}"]);
        assert_eq!(tail_lines(&[b'x'; 9000])[0].len(), TAIL_WIDTH);
        assert!(tail_lines(b"\n\n").is_empty());
    }

    #[test]
    fn test_lost_gpu_is_the_reason_of_a_failure_and_of_nothing_else() {
        let lost = vec!["GPU 3 (GPU-c): it fell off the bus".to_owned()];
        let failed = judge(&code(3), &spec(), vec!["last words".into()], false);
        let fault = gpu_lost(failed.clone(), &lost).fault.unwrap();
        assert_eq!((fault.code, fault.retry), (Code::GpuLost, Retry::OtherNode));
        assert_eq!(fault.why, [&*lost[0], "the command returned 3", "last words"]);
        assert_eq!(gpu_lost(failed.clone(), &[]), failed);
        let late = judge(&ExitRecord { timed_out: true, ..code(1) }, &spec(), Vec::new(), false);
        for other in [judge(&code(0), &spec(), Vec::new(), false), late] {
            assert_eq!(gpu_lost(other.clone(), &lost), other);
        }
    }

    #[test]
    fn test_ending_survives_the_journal() {
        let ending = judge(&code(3), &spec(), vec!["last words".into()], false);
        let text = serde_json::to_string(&ending).unwrap();
        assert_eq!(serde_json::from_str::<Ending>(&text).unwrap(), ending);
    }
}
