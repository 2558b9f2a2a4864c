//! What came of a command, and what went wrong before it could start: errors become faults here.
//!
//! Pure. An [`ExitRecord`] becomes an [`Ending`] by one rule ([`judge`]); each error of a step becomes a
//! [`Fault`] in the words of the person who submitted the job. Called by `worker::runner` alone.

use std::error::Error;
use std::io;
use std::path::Path;

use agent_cas::ReadError;
use agent_model::{Blame, Code, ExitStatus, Fault, JobSpec, Retry, Timestamp, Verdict};
use agent_runtime::env::AcquireError;
use agent_runtime::exec::{LaunchError, Lost};
use agent_shim::{End, ExitRecord, NotStarted, OomScope};
use serde::{Deserialize, Serialize};

use super::budget::{Shortfall, bytes};
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
pub(crate) fn judge(record: &ExitRecord, spec: &JobSpec, tail: Vec<String>) -> Ending {
    let (verdict, fault) = match &record.end {
        _ if record.stopped.is_some() => (Verdict::Canceled, None),
        End::NeverStarted(NotStarted::Stopped) => (Verdict::Canceled, None),
        _ if record.lease_over => (Verdict::Failed, Some(lease_over())),
        End::NeverStarted(reason) => (Verdict::Failed, Some(never_started(reason))),
        End::Exited(_) if record.timed_out => (Verdict::Failed, Some(time_limit(spec, tail))),
        End::Exited(status) if status.is_success() => {
            (Verdict::Completed, cut_log(record).or_else(|| survived_kills(record)))
        }
        End::Exited(_) if record.oom.is_some() => (Verdict::Failed, Some(out_of_memory(record))),
        End::Exited(ExitStatus::Signal(signal)) => (Verdict::Failed, Some(signaled(*signal, tail))),
        End::Exited(ExitStatus::Code(code)) => (Verdict::Failed, Some(returned(*code, tail))),
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
            .why(format!("{} are missing: {error}", bytes(record.log_dropped)))
            .fix("free space on the node's disk, or raise `log_quota` in its configuration; the log says where it is cut"),
    )
}

/// The controller does not have the log as it was written, and it cannot be sent again.
pub(crate) fn log_lost(bytes_lost: u64, dir: &Path) -> Fault {
    let why = match bytes_lost {
        0 => "what it stores is not what the job wrote, however often it is sent".to_owned(),
        lost => format!("{} are gone that it had acknowledged", bytes(lost)),
    };
    Fault::new(Code::ControllerStore, "the controller does not have the whole log")
        .why(why)
        .fix(format!("what the node still has is in `{}`", dir.join("log").display()))
}

fn never_started(reason: &NotStarted) -> Fault {
    let system = |error: i32| io::Error::from_raw_os_error(error).to_string();
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
        Some(OomScope::Parent) => node_out_of_memory(
            "the kernel ended it because all that runs under the daemon's memory limit took too much together",
            record,
        ),
        Some(OomScope::Host) => {
            node_out_of_memory("the kernel ended it because the machine had no memory left", record)
        }
    }
}

fn node_out_of_memory(why: &str, record: &ExitRecord) -> Fault {
    let fault = Fault {
        blame: Blame::Node,
        ..Fault::new(Code::OutOfMemory, "the node ran out of memory under the command")
    };
    fault
        .why(format!("{why}; {}", peak(record)))
        .fix("say in `resources.memory` what the job needs, or run fewer jobs at a time: `slots` of the node")
        .with_retry(Retry::OtherNode)
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
    let limit = record
        .limits
        .memory
        .map(|limit| format!(" at its {} memory limit", bytes(limit).replace(".0 ", " ")));
    limit.unwrap_or_else(|| " for want of memory".to_owned())
}

fn peak(record: &ExitRecord) -> String {
    match record.memory_peak {
        Some(peak) => format!("peak seen {}", bytes(peak)),
        None => format!("its largest process had {} in memory", bytes(record.max_rss)),
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

fn returned(code: i32, tail: Vec<String>) -> Fault {
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
        return with_tail(fault, tail).fix(
            "correct the path in `command`: it is relative to the code directory, and ignored files are not there",
        );
    }
    let fault = with_tail(Fault::new(Code::CommandFailed, format!("the command returned {code}")), tail);
    let fault = match code - 128 {
        signal @ 1..=31 => fault.why(format!("{code} is what a shell says after {}", signal_text(signal))),
        _ => fault,
    };
    fault.fix("the end of the log says why; read all of it with `agentctl logs`")
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
pub(crate) fn fetch(error: &FetchError) -> Fault {
    let code = match error {
        _ if is_no_space(error) => Code::DiskFull,
        _ if is_damaged(error) => Code::SnapshotDamaged,
        _ if is_absent(error) => Code::SnapshotMissing,
        _ => Code::SnapshotStore,
    };
    let fault = Fault::new(code, error.to_string());
    let fault = error.source().into_iter().fold(fault, Fault::because);
    match code {
        Code::DiskFull => {
            fault.fix("free space on the node's disk; `agentctl doctor` shows how much there is")
        }
        Code::SnapshotMissing => fault.fix("submit the job again: what is missing is then sent again"),
        Code::SnapshotDamaged => fault.fix("submit the job again: what was damaged is then sent again"),
        _ => fault.fix("look at the log of agentd on the node"),
    }
}

/// The environment could not be had. `name` is what users call it.
pub(crate) fn environment(error: &AcquireError, kind: &str) -> Fault {
    use AcquireError as E;
    let what = format!("could not prepare the {kind} environment");
    let fault = |code| Fault::new(code, what.clone()).because(error);
    match error {
        E::Unsupported { .. } => fault(Code::EnvUnsupported)
            .fix("use `environment: host`, or `{python, requirements}` for pip packages"),
        E::PythonMissing { name } => fault(Code::PythonMissing)
            .fix(format!("install `{name}` on the node, or name a Python it has under `environment.python`")),
        E::PythonUnusable { .. } => fault(Code::PythonIncomplete)
            .fix("repair that interpreter, or name another under `environment.python`"),
        E::VenvMissing { package, .. } => fault(Code::PythonIncomplete)
            .fix(format!("install it on the node: sudo apt-get install {package}")),
        E::Unsatisfied { requirement, .. } => fault(Code::EnvUnsatisfied)
            .fix(format!("correct `{requirement}` in the requirements; the build log says what there is")),
        E::Network { .. } => {
            fault(Code::EnvNetwork).fix("check the node's network, proxy variables and PIP_INDEX_URL")
        }
        E::DiskFull { .. } => fault(Code::DiskFull).fix("free space on the node's disk"),
        E::Stalled { .. } | E::Killed { .. } | E::Failed { .. } => {
            fault(Code::EnvBuild).fix("the build log says more: `agentctl logs --build`")
        }
        E::Command { .. } | E::Io { .. } => {
            fault(Code::EnvBuild).fix("look at the log of agentd on the node")
        }
    }
}

/// The shim may have heard `go` all the same.
pub(crate) fn is_unsure(error: &LaunchError) -> bool {
    matches!(error, LaunchError::Look { .. } | LaunchError::Silent { .. } | LaunchError::Talk { .. })
}

/// The shim or the command could not be started.
pub(crate) fn launch(error: &LaunchError) -> Fault {
    match error {
        LaunchError::Lost { lost: found, .. } => lost(*found),
        other => Fault::new(Code::LaunchFailed, "the command could not be started")
            .because(other)
            .fix("run `agentctl doctor` on the node; what it marks as bad keeps jobs from starting"),
    }
}

/// The command was started, and nobody can say how it ended.
pub(crate) fn lost(lost: Lost) -> Fault {
    if lost.rebooted {
        return rebooted();
    }
    let fault = Fault::new(Code::RunLost, "the running command was lost")
        .why("the process that watched over it is gone and left no record");
    let fault = match (lost.killed, lost.left) {
        (0, 0) => fault.why("no process of the job was left"),
        (killed, 0) => fault.why(format!("{killed} processes of the job were left and were ended")),
        (_, left) => fault.why(format!("{left} processes of the job are left and cannot be ended")),
    };
    fault.fix("look for what killed `agent-shim` on the node, for example the kernel with `dmesg`")
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

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| (*error).source())
}

/// The disk has no room.
pub(crate) fn is_no_space(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| {
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
    })
}

/// The store had something else under the name of a part of it.
fn is_damaged(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| cause.downcast_ref().is_some_and(ReadError::is_damage))
}

/// The store does not have all of it.
fn is_absent(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| matches!(cause.downcast_ref(), Some(ReadError::Absent { .. })))
}

/// The outputs stay on the node.
pub(crate) fn outputs(error: &CollectError, kept: &Path) -> Fault {
    Fault::new(Code::OutputsUnstored, "the outputs could not be stored")
        .because(error)
        .fix(format!("they are kept on the node in {}", kept.display()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use agent_model::JobDraft;
    use agent_model::job::Limits;

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
        let ending = judge(record, &spec(), tail_lines(tail.as_bytes()));
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
    fn test_user_blamed_faults_say_what_to_do() {
        for (record, tail) in
            [(code(3), ""), (code(127), "not found"), (record(End::Exited(ExitStatus::Signal(11))), "")]
        {
            let fault = judge(&record, &spec(), tail_lines(tail.as_bytes())).fault.unwrap();
            assert!(fault.fix.is_some_and(|fix| !fix.is_empty()), "{}", fault.code);
        }
        let fault = judge(&code(137), &spec(), Vec::new()).fault.unwrap();
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
        let fault = judge(&killed, &spec(), Vec::new()).fault.unwrap();
        assert_eq!(fault.why, ["the kernel ended it at its 64 MiB memory limit; peak seen 63.9 MiB"]);
        assert_eq!((fault.blame, fault.retry), (Blame::User, Retry::Never));
        for scope in [OomScope::Parent, OomScope::Host] {
            let record = ExitRecord { oom: Some(scope), ..killed.clone() };
            let fault = judge(&record, &spec(), Vec::new()).fault.unwrap();
            assert_eq!((fault.blame, fault.retry), (Blame::Node, Retry::OtherNode), "{fault}");
        }
    }

    #[test]
    fn test_tail_is_short_and_plain() {
        let log = b"one\ntwo\n\nthree\n10%\r50%\r100%\nfour\n\x1b[31mred\x1b[0m\xff\n";
        assert_eq!(tail_lines(log), ["two", "three", "100%", "four", "[31mred[0m\u{fffd}"]);
        assert_eq!(tail_lines(&[b'x'; 9000])[0].len(), TAIL_WIDTH);
        assert!(tail_lines(b"\n\n").is_empty());
    }

    #[test]
    fn test_ending_survives_the_journal() {
        let ending = judge(&code(3), &spec(), vec!["last words".into()]);
        let text = serde_json::to_string(&ending).unwrap();
        assert_eq!(serde_json::from_str::<Ending>(&text).unwrap(), ending);
    }
}
