use std::time::Duration;

use agent_model::job::Limits;
use agent_model::{JobDraft, JobSpec, last_lines};
use agent_shim::{End, ExitRecord, NotStarted, OomScope, Sender};
use rustix::io::Errno;

use super::exit::returned;
use agent_model::{ExitStatus, Timestamp, Verdict};

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
    let ending = judge(record, &spec(), last_lines(tail.as_bytes()), false);
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
        (ExitRecord { oom: Some(OomScope::Own), ..killed.clone() }, "", (Failed, Some(Code::OutOfMemory))),
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
        // As earlier releases reported it.
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
        (ExitRecord { log_error: Some("ENOSPC".into()), ..code(0) }, "", (Completed, Some(Code::DiskFull))),
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
    let fix =
        |code: i32, tail: &str, has_code| returned(code, last_lines(tail.as_bytes()), has_code).fix.unwrap();
    let lost = "python: can't open file '/w/t.py': [Errno 2]";
    assert!(fix(2, lost, false).contains("`code: .`") && !fix(2, lost, true).contains("`code: .`"));
    let lacks = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'sklearn.svm'\n";
    let said = fix(1, lacks, true);
    assert!(said.contains("`sklearn.svm`") && said.contains("requirements"), "{said}");
    for module in ["azureml", "azureml.core"] {
        let lacks = format!("ModuleNotFoundError: No module named '{module}'\n");
        assert!(fix(1, &lacks, true).contains("`azureml_core: stand_in`"));
    }
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
        (E::NameUnknown { reference: "a".into(), known: none() }, Code::EnvUnknown, "curated_environments"),
        (E::NameUnknown { reference: "a".into(), known: vec!["b".into()] }, Code::EnvUnknown, "defined: b"),
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
    assert_eq!((broken.code, broken.blame, broken.retry), (Code::EnvBuild, Blame::Node, Retry::After(SOON)));
    assert!(broken.why[0].contains("3 times") && broken.why[0].contains(&detail()), "{broken}");
    // What the system refuses to the daemon itself is no fault of the job.
    let disk = std::sync::Arc::new(std::io::Error::from_raw_os_error(5));
    let unwritten =
        environment(&E::Io { what: "write the build log", path: "/x".into(), source: disk }, "pip");
    assert_eq!(
        (unwritten.code, unwritten.blame, unwritten.retry),
        (Code::EnvBuild, Blame::Node, Retry::OtherNode)
    );
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
        let fault = judge(&record, &spec(), last_lines(tail.as_bytes()), false).fault.unwrap();
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
    let gone =
        Lost { rebooted: false, killed: 1, left: 0, loose: false, starved: 0, why: None, damaged: None };
    let starved = Lost { starved: 3, ..gone.clone() };
    assert_eq!(lost(&gone).code, Code::RunLost);
    let fault = lost(&starved);
    assert_eq!((fault.code, fault.blame, fault.retry), (Code::OutOfMemory, Blame::Node, Retry::OtherNode));
    assert!(fault.why[0].ends_with("for want of memory: 3"), "{fault}");
    assert!(fault.why.iter().any(|why| why.starts_with("1 process of the job was left")), "{fault}");
    assert!(!fault.why.iter().any(|why| why.contains("may run on")), "{fault}");
    let fault = lost(&Lost { killed: 0, loose: true, ..gone.clone() });
    assert_eq!(fault.why[1], "no process of the job was found", "{fault}");
    assert!(fault.why[2].contains("may run on"), "{fault}");
    assert_eq!(lost(&Lost { rebooted: true, ..starved }).code, Code::NodeRebooted);
}

#[test]
fn test_lack_is_not_blamed_on_who_asked_for_an_environment() {
    let cannot = |errno: Errno| {
        let source = agent_command::CommandError::Spawn { program: "python3".into(), source: errno.into() };
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
    assert_eq!((lack, blame), (false, Blame::Node), "nothing of the job is in it");
    let io =
        AcquireError::Io { what: "make", path: "x".into(), source: std::sync::Arc::new(Errno::NFILE.into()) };
    assert!(io.is_lack());
    let failed = |detail: &str| AcquireError::Failed { step: "making", detail: detail.to_owned() };
    for said in ["Error: [Errno 11] Resource temporarily unavailable", "RuntimeError: can't start new thread"]
    {
        assert!(failed(said).is_lack(), "{said}");
    }
    assert!(!failed("error: command 'gcc' failed").is_lack());
}

#[test]
fn test_a_disk_that_fails_is_the_fault_of_the_node_alone() {
    let refused = |status: i32| LaunchError::Refused {
        dir: "job".into(),
        status: std::os::unix::process::ExitStatusExt::from_raw(status << 8),
        said: String::new(),
    };
    let unready = LaunchError::Unready { dir: "job".into(), status: 72, said: String::new() };
    let clean = |errno: Errno| LaunchError::Clean { path: "exit.json".into(), source: errno.into() };
    for failing in [refused(agent_shim::DISK_FAILS), unready, clean(Errno::IO), clean(Errno::ROFS)] {
        assert!(disk_fails(&failing) && !is_lack(&failing), "{failing}");
        let fault = launch(&failing);
        assert_eq!((fault.code, fault.blame, fault.is_free()), (Code::NodeUnfit, Blame::Node, true));
        assert!(fault.fix.is_some_and(|fix| fix.contains("`sudo dmesg`")));
    }
    assert!(!disk_fails(&refused(70)) && !disk_fails(&clean(Errno::NOSPC)));
    let missing = LaunchError::Spawn { shim: "agent-shim".into(), source: Errno::NOENT.into() };
    assert_eq!(launch(&missing).code, Code::NodeUnfit, "every job fails for want of it");
    assert_eq!(launch(&clean(Errno::NOSPC)).code, Code::DiskFull);
    let record = std::io::Error::from(Errno::ACCESS);
    assert_eq!(unusable(&record).code, Code::NodeUnfit);
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
    assert!(is_lack(&refused(71 << 8)), "it found the lack itself");
    let contained = |status| LaunchError::Unready { dir: "job".into(), status, said: String::new() };
    assert_eq!([71, 70].map(|status| is_lack(&contained(status))), [true, false]);
    let fix = |error| launch(&error).fix.unwrap();
    assert!(
        fix(refused(71 << 8)).contains("what holds so much")
            && fix(refused(70 << 8)).contains("marks as bad")
    );
    assert_eq!((code(Errno::NOSPC), code(Errno::MFILE)), (Code::DiskFull, Code::LaunchFailed));
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

#[test]
fn test_what_a_command_took_is_told_if_it_ran() {
    let spec = JobDraft { command: "x".into(), ..JobDraft::default() }.validate().unwrap();
    let used = |record: &ExitRecord| {
        judge(record, &spec, Vec::new(), false).usage.map(|usage| (usage.cpu.as_millis(), usage.memory_peak))
    };
    let ran = ExitRecord { cpu_ms: 7, max_rss: 5, ..code(3) };
    assert_eq!(used(&ran), Some((7, 5)));
    assert_eq!(used(&ExitRecord { memory_peak: Some(9), ..ran }), Some((7, 9)), "of all its processes");
    assert_eq!(used(&record(End::NeverStarted(NotStarted::Stopped))), None);
}
