//! Turns an [`ExitRecord`] into an [`Ending`] by one rule, [`judge`].
//!
//! Pure. The texts are for the user who submitted the job.

use std::io;
use std::path::Path;
use std::time::Duration;

use agent_model::outcome::Usage;
use agent_model::{Blame, Code, ExitStatus, Fault, JobSpec, Retry, Verdict, size};
use agent_shim::cgroup::Containment;
use agent_shim::{End, ExitRecord, NotStarted, OomScope, Sender};

use super::{Ending, rebooted};

/// The ending that follows from an exit record. `tail` are the last lines of the log, oldest first. `went_down`: the
/// machine was rebooted since, or is being stopped.
pub(crate) fn judge(record: &ExitRecord, spec: &JobSpec, tail: Vec<String>, went_down: bool) -> Ending {
    let (verdict, fault) = match &record.end {
        _ if went_down && is_from_elsewhere(record) => (Verdict::Failed, Some(rebooted())),
        _ if let Some(signal) = record.stop_signal => {
            (Verdict::Failed, Some(ended_from_elsewhere(record, signal)))
        }
        _ if record.lease_over || record.stopped.as_deref() == Some(LEASE_OVER) => {
            (Verdict::Failed, Some(lease_over()))
        }
        // Only a stop by the controller has a reason text.
        _ if record.stopped.is_some() => (Verdict::Canceled, None),
        End::NeverStarted(NotStarted::Stopped) => (Verdict::Canceled, None),
        End::NeverStarted(reason) => (Verdict::Failed, Some(never_started(reason, in_container(record)))),
        End::Exited(_) if record.timed_out => (Verdict::Failed, Some(time_limit(spec, tail))),
        End::Exited(status) if spec.is_success(*status) => (
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
    let usage = record.status().map(|_| Usage {
        cpu: Duration::from_millis(record.cpu_ms),
        memory_peak: record.memory_peak.unwrap_or(record.max_rss),
        // The peak of one process is no measure of it.
        memory_limit: record.limits.memory.filter(|_| record.memory_peak.is_some()),
    });
    Ending { verdict, exit: record.status(), fault, started_at, ended_at, usage }
}

fn survivors(left: u32) -> String {
    format!("{left} of its processes survived the final signal")
}

/// The kernel keeps these processes, for example in a file system that does not answer.
fn unkilled(left: u32) -> Fault {
    Fault::new(Code::Unkilled, "the job ended, but not all of it")
        .why(survivors(left))
        .fix("look on the node for processes in state D, and for the file system or device they wait for")
}

/// The job succeeded, but part of its log could not be kept.
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

/// Adds to the fault that the controller lacks part of the log or metrics. A failed job keeps its own fault.
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

/// The reason with which the agent stops a job whose supervisor does not support leases.
pub(crate) const LEASE_OVER: &str = "the node has not heard from the controller for too long";

/// Whether a signal from outside ended the job. A machine that shuts down sends SIGTERM to all processes at once, so
/// the command may have ended by it before its supervisor did anything.
pub(crate) fn is_from_elsewhere(record: &ExitRecord) -> bool {
    const TERM: i32 = 15;
    let by_itself =
        record.stopped.is_none() && !record.lease_over && !record.timed_out && record.oom.is_none();
    let asked = record.status().is_some_and(|status| status.shell_code() == 128 + TERM);
    record.stop_signal.is_some() || by_itself && asked
}

/// Whether a machine that shuts down can cause this fault: no exit record, or a failed start.
pub(crate) fn may_be_of_the_machine(fault: &Fault) -> bool {
    matches!(fault.code, Code::RunLost | Code::LaunchFailed | Code::NodeUnfit | Code::OutOfMemory)
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

/// The kernel ended the command, or a process it depended on, for lack of memory.
fn out_of_memory(record: &ExitRecord) -> Fault {
    match record.oom {
        None | Some(OomScope::Own) => Fault::new(Code::OutOfMemory, "the command ran out of memory")
            .why(format!("the kernel ended it{}; {}", at_its_limit(record), peak(record)))
            .fix("raise `resources.memory`, or lower the batch size"),
        // Other processes had used it up, or the node promised more than it has.
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

pub(super) fn node_out_of_memory(why: String) -> Fault {
    let fault = Fault::new(Code::OutOfMemory, "the node ran out of memory under the command");
    Fault { blame: Blame::Node, ..fault }.why(why).with_retry(Retry::OtherNode)
}

/// The job succeeded, although the kernel ended some of its processes.
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

/// The fault for an attempt that was ended because its lease was over: another node may have the job by now.
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

pub(super) fn returned(code: i32, tail: Vec<String>, has_code: bool) -> Fault {
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
    if tail.iter().any(|line| agent_fs::says_full(line)) {
        let fault = Fault::new(
            Code::DiskFull,
            format!("the command returned {code}, and said that its disk is full"),
        );
        return with_tail(fault, tail).fix(
            "make room on the disk of the node: `agentctl status` shows how full it is, and `agentctl gc` what takes it; or, \
             if the line above names another disk, on that",
        );
    }
    let absent = tail.iter().find_map(|line| absent_module(line)).map(str::to_owned);
    let fault = with_tail(Fault::new(Code::CommandFailed, format!("the command returned {code}")), tail);
    let fault = match code - 128 {
        signal @ 1..=31 => fault.why(format!("{code} is what a shell says after {}", signal_text(signal))),
        _ => fault,
    };
    fault.fix(match absent {
        Some(module) if module == "azureml" || module.starts_with("azureml.core") => {
            "the environment lacks `azureml.core`: add `azureml_core: stand_in` to the job file, and the script records \
             here (agent/docs/mlflow.md); or add the package azureml-core to the environment"
                .to_owned()
        }
        Some(module) => format!(
            "the environment lacks `{module}`: add the package that has it to the requirements or the conda file of the \
             job; if it is a file of yours, it must be in the code directory"
        ),
        None => "the end of the log says why; read all of it with `agentctl logs`".to_owned(),
    })
}

/// The module that Python did not find, if the line is such an error: `ModuleNotFoundError: No module named 'numpy'`.
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
