//! Real jobs under real shims.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use agent_model::ExitStatus;
use agent_shim::process::{Process as Member, marked};
use agent_shim::segments::Reader;
use agent_shim::{End, ExitRecord, JobDir, Launch, MARK, NotStarted};
use nix::sys::signal::Signal;

use super::conformance::{Subject, check, launch_of, log_of};
use super::*;
use crate::docker::Docker;

mod cgroups;
mod containers;
mod engines;
mod leases;
mod old_shim;
mod trees;

const LONG: Duration = Duration::from_secs(60);

/// The shim of this build; built here if these tests are run alone. Who built everything says where it is, because
/// cargo may be at work on something else, for which this would wait.
#[allow(clippy::disallowed_methods, reason = "asks for what it is to test")]
fn shim() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT
        .get_or_init(|| {
            if let Some(built) = std::env::var_os("AGENTD_TEST_BINARIES") {
                return PathBuf::from(built).join(SHIM);
            }
            let target = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_owned();
            let mut cargo = std::process::Command::new(env!("CARGO"));
            cargo.args(["build", "--quiet", "--package", "agent-shim", "--manifest-path"]);
            cargo.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml"));
            cargo.args(target.ends_with("release").then_some("--release"));
            assert!(cargo.status().unwrap().success());
            target.join(SHIM)
        })
        .clone()
}

/// An executor of jobs that need no container.
fn local(shim: PathBuf) -> Local {
    Local::new(shim.clone(), Containers::new(Docker::at("/nowhere"), shim, "test"))
}

/// A job directory and an executor; the job's remaining processes are killed when the test ends.
struct Bench {
    dir: JobDir,
    executor: Local,
    _keep: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        let keep = tempfile::tempdir().unwrap();
        // Longer than a socket address can be.
        let dir = JobDir::new(keep.path().join("d".repeat(120)).join("train.1.0"));
        dir.create().unwrap();
        std::fs::create_dir(dir.work()).unwrap();
        Bench { dir, executor: local(shim()), _keep: keep }
    }

    /// An executor whose shim is started by a shell after this script, and inherits its effects.
    fn executor_after(&self, script: &str) -> Local {
        use std::os::unix::fs::PermissionsExt as _;
        let shim = self.dir.path().join("prepared-shim");
        let text = format!("#!/bin/sh\n{script}\nexec {} \"$@\"\n", self.executor.shim.display());
        fs::write(&shim, text).unwrap();
        fs::set_permissions(&shim, fs::Permissions::from_mode(0o755)).unwrap();
        local(shim)
    }

    async fn start(&self, script: &str) -> Running {
        self.executor.launch(&self.dir, &launch_of(&["bash", "-c", script]), None).await.unwrap()
    }

    async fn run(&self, script: &str) -> ExitRecord {
        ended(&self.start(script).await).await
    }

    fn log(&self) -> Vec<u8> {
        log_of(&self.dir)
    }

    fn members(&self) -> Vec<Member> {
        let hello = self.dir.read_hello().unwrap().unwrap();
        marked(MARK, &hello.instance)
    }

    async fn until_log_has(&self, text: &str) {
        until(|| String::from_utf8_lossy(&self.log()).contains(text)).await;
    }

    fn kill_shim(&self) {
        let hello = self.dir.read_hello().unwrap().unwrap();
        assert!(Member::find(hello.pid).unwrap().signal(Signal::SIGKILL).unwrap());
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if let Ok(Some(hello)) = self.dir.read_hello() {
            if let Some(shim) = Member::find(hello.pid).filter(|_| self.dir.has_shim().unwrap_or(false)) {
                let _ = shim.signal(Signal::SIGKILL);
            }
            let groups = agent_shim::cgroup::Groups::of(&hello);
            agent_shim::cgroup::kill_all(&groups, MARK, &hello.instance, LONG);
            groups.remove();
        }
    }
}

async fn ended(running: &Running) -> ExitRecord {
    tokio::time::timeout(LONG, running.wait()).await.expect("the job ends").unwrap()
}

async fn until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < deadline, "the condition never came true");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn test_shims_keep_what_executors_promise() {
    let signal = |dir: &JobDir, signal| {
        let hello = dir.read_hello().unwrap().unwrap();
        assert!(Member::find(hello.pid).unwrap().signal(signal).unwrap());
    };
    let kill = |dir: &JobDir| signal(dir, Signal::SIGKILL);
    check(&Subject { executor: &local(shim()), kill: &kill, halt: &|dir| signal(dir, Signal::SIGSTOP) })
        .await;
}

#[tokio::test]
async fn test_the_fake_keeps_what_executors_promise() {
    let fake = Fake::default();
    check(&Subject { executor: &fake, kill: &|dir| assert!(fake.kill(dir)), halt: &|dir| fake.halt(dir) })
        .await;
}

#[tokio::test]
async fn test_exit_codes_and_signals_are_told_as_they_were() {
    for (script, status) in [
        ("exit 0", ExitStatus::Code(0)),
        ("exit 42", ExitStatus::Code(42)),
        ("no-such-program", ExitStatus::Code(127)),
        ("/", ExitStatus::Code(126)),
        ("kill -KILL $$", ExitStatus::Signal(9)),
        ("kill -34 $$", ExitStatus::Signal(34)),
    ] {
        let bench = Bench::new();
        let record = bench.run(script).await;
        assert_eq!(record.end, End::Exited(status), "{script}");
        assert!(record.oom.is_none() && !record.timed_out && record.stopped.is_none());
        assert!(record.started_at.unwrap() <= record.ended_at);
    }
}

#[tokio::test]
async fn test_program_that_cannot_be_executed_is_a_record_and_not_a_mystery() {
    let bench = Bench::new();
    let launch = launch_of(&["no-such-program", "x"]);
    let running = bench.executor.launch(&bench.dir, &launch, None).await.unwrap();
    let why = NotStarted::Exec { program: "no-such-program".into(), os_error: 2 };
    assert_eq!(ended(&running).await.end, End::NeverStarted(why));

    let bench = Bench::new();
    let launch = Launch { cwd: "nowhere".into(), ..launch_of(&["true"]) };
    let running = bench.executor.launch(&bench.dir, &launch, None).await.unwrap();
    let why = NotStarted::Setup { step: "enter nowhere".into(), os_error: 2 };
    assert_eq!(ended(&running).await.end, End::NeverStarted(why));
    assert!(!bench.dir.is_started());
}

#[tokio::test]
async fn test_job_gets_its_environment_and_nothing_else() {
    let bench = Bench::new();
    let mut launch = launch_of(&[
        "bash",
        "-c",
        "env -0 | tr '\\0' '\\n'; echo; ls /proc/self/fd | tr '\\n' ' '; readlink /proc/self/fd/0; umask; \
         grep -E 'SigBlk|NoNewPrivs' /proc/self/status; cat /proc/self/oom_score_adj; pwd",
    ]);
    launch.env.insert("GREETING".into(), "two\nlines".into());
    let record = ended(&bench.executor.launch(&bench.dir, &launch, None).await.unwrap()).await;
    assert_eq!(record.end, End::Exited(ExitStatus::Code(0)));
    let log = String::from_utf8(bench.log()).unwrap();
    assert!(log.contains("GREETING=two\nlines\n"), "{log}");
    assert!(log.contains(&format!("{MARK}={}\n", record.instance)), "{log}");
    assert!(!log.contains("CARGO"), "{log}");
    // Descriptor 3 is the directory that ls reads.
    assert!(log.contains("\n0 1 2 3 /dev/null\n0022\n"), "{log}");
    assert!(log.contains("SigBlk:\t0000000000000000\nNoNewPrivs:\t1\n300\n"), "{log}");
    assert!(log.ends_with("/train.1.0/job/work\n"), "{log}");
}

#[tokio::test]
async fn test_output_is_kept_byte_for_byte() {
    let bench = Bench::new();
    // Both streams in one order, a NUL, invalid UTF-8, a line of 10 MB, no line feed at the end.
    let record = bench
        .run(
            "for i in 1 2 3; do echo out $i; echo err $i >&2; done; printf 'a\\0b\\xff\\r'; \
              head -c 10000000 /dev/zero | tr '\\0' x; printf end",
        )
        .await;
    let mut expected = b"out 1\nerr 1\nout 2\nerr 2\nout 3\nerr 3\na\0b\xff\r".to_vec();
    expected.resize(expected.len() + 10_000_000, b'x');
    expected.extend_from_slice(b"end");
    assert!(bench.log() == expected);
    assert_eq!((record.log_bytes, record.log_dropped), (expected.len() as u64, 0));
}

#[tokio::test]
async fn test_fast_output_of_short_lines_is_complete() {
    let bench = Bench::new();
    let line = "x".repeat(99);
    let running = bench.start(&format!("yes {line} | head -c 200000000")).await;
    let begun = Instant::now();
    let mut progress = running.progress();
    let record = ended(&running).await;
    let rate = 200.0 / begun.elapsed().as_secs_f64();
    println!("200 MB in lines of 100 bytes: {rate:.0} MB/s");
    assert_eq!((record.end, record.log_bytes), (End::Exited(ExitStatus::Code(0)), 200_000_000));
    while progress.changed().await.is_ok() {}
    assert_eq!(progress.borrow().log_bytes, 200_000_000);
    assert!(bench.log().chunks(100).all(|chunk| chunk == format!("{line}\n").as_bytes()));
}

#[tokio::test]
async fn test_progress_tells_of_log_and_tracking_file_while_the_job_runs() {
    let bench = Bench::new();
    let running = bench.start("echo hello; exec 1>&- 2>&-; read line < <(sleep 1000)").await;
    let mut progress = running.progress();
    tokio::time::timeout(LONG, progress.wait_for(|now| now.log_bytes == 6)).await.unwrap().unwrap();
    fs::write(bench.dir.tracking(), "{}\n").unwrap();
    tokio::time::timeout(LONG, progress.wait_for(|now| now.tracking_bytes == 3)).await.unwrap().unwrap();
    running.stop(Duration::ZERO, "enough").await.unwrap();
    assert_eq!(ended(&running).await.tracking_bytes, 3);
}

#[tokio::test]
async fn test_stop_ends_the_whole_tree_however_it_hides() {
    let bench = Bench::new();
    let hide = "trap '' TERM HUP INT; (setsid bash -c 'trap \"\" TERM; (setsid sleep 1000 & ) ; sleep 1000' &) ; \
                (trap '' TERM; setsid sleep 1000 &) ; env -i sleep 1000 & echo hidden; sleep 1000; sleep 1000";
    let running = bench.start(hide).await;
    bench.until_log_has("hidden").await;
    let shim = bench.dir.read_hello().unwrap().unwrap().pid;
    until(|| agent_shim::process::descendants(shim).len() >= 5).await;
    let members = agent_shim::process::descendants(shim);
    let begun = Instant::now();
    running.stop(Duration::from_millis(500), "canceled by uid 7").await.unwrap();
    running.stop(LONG, "too late").await.unwrap();
    let record = ended(&running).await;
    assert!(begun.elapsed() >= Duration::from_millis(500) && begun.elapsed() < Duration::from_secs(5));
    assert_eq!(record.end, End::Exited(ExitStatus::Signal(9)));
    assert_eq!(record.stopped.as_deref(), Some("canceled by uid 7"));
    assert!(!record.timed_out && record.oom.is_none() && record.unkilled == 0);
    let alive = |member: &Member| Member::find(member.pid).is_some_and(|now| now.started == member.started);
    assert!(!members.iter().any(alive));
    running.stop(LONG, "after the end").await.unwrap();
}

#[tokio::test]
async fn test_job_may_use_its_grace_after_its_shell_is_gone() {
    let bench = Bench::new();
    let script = "(trap 'sleep 3; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done) & \
                  trap - TERM; wait";
    let running = bench.start(script).await;
    bench.until_log_has("ready").await;
    running.stop(LONG, "make room").await.unwrap();
    let record = ended(&running).await;
    assert_eq!(record.end, End::Exited(ExitStatus::Signal(15)));
    assert!(String::from_utf8(bench.log()).unwrap().ends_with("saved\n"));
}

#[tokio::test]
async fn test_leftovers_are_ended_after_the_command() {
    let bench = Bench::new();
    // One keeps the pipe open and ignores SIGTERM.
    let begun = Instant::now();
    let record =
        bench.run("(trap '' TERM; exec sleep 1000) & (exec 1>&- 2>&-; setsid sleep 1000) & exit 3").await;
    assert_eq!(record.end, End::Exited(ExitStatus::Code(3)));
    assert_eq!((record.leftovers, record.unkilled, record.stopped), (2, 0, None));
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert!(bench.members().is_empty());
}

#[tokio::test]
async fn test_time_limit_stops_the_job() {
    let bench = Bench::new();
    let launch = Launch {
        timeout: Some(Duration::from_millis(300)),
        ..launch_of(&["bash", "-c", "trap 'echo bye; exit 0' TERM; while :; do sleep 0.05; done"])
    };
    let record = ended(&bench.executor.launch(&bench.dir, &launch, None).await.unwrap()).await;
    assert!(record.timed_out && record.stopped.is_none());
    assert_eq!(record.end, End::Exited(ExitStatus::Code(0)));
    assert!(bench.log().ends_with(b"bye\n"));
}

#[tokio::test]
async fn test_job_outlives_its_daemon_and_is_found_again() {
    let bench = Bench::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (dir, executor) = (bench.dir.clone(), bench.executor.clone());
    let launch =
        launch_of(&["bash", "-c", "echo one; while [ ! -e go ]; do sleep 0.05; done; echo two; exit 7"]);
    let handle = runtime.handle().clone();
    tokio::task::spawn_blocking(move || {
        let running = handle.block_on(executor.launch(&dir, &launch, None)).unwrap();
        std::mem::forget(running); // as when a daemon is killed: no message is sent
        runtime.shutdown_background();
    })
    .await
    .unwrap();
    let before = bench.dir.read_hello().unwrap().unwrap();
    let Found::Running(running) = bench.executor.reattach(&bench.dir).await.unwrap() else {
        panic!("the job runs");
    };
    assert_eq!(bench.dir.read_hello().unwrap().unwrap(), before);
    bench.until_log_has("one").await;
    fs::write(bench.dir.work().join("go"), "").unwrap();
    assert_eq!(ended(&running).await.end, End::Exited(ExitStatus::Code(7)));
    assert_eq!(bench.log(), b"one\ntwo\n");
    let again = bench.executor.reattach(&bench.dir).await.unwrap();
    assert!(matches!(again, Found::Ended(ExitRecord { end: End::Exited(ExitStatus::Code(7)), .. })));
    let launched_again = bench.start("echo never").await;
    assert_eq!(ended(&launched_again).await.end, End::Exited(ExitStatus::Code(7)));
    assert_eq!(bench.log(), b"one\ntwo\n");
}

#[tokio::test]
async fn test_shim_left_before_go_is_adopted() {
    let bench = Bench::new();
    assert!(matches!(bench.executor.reattach(&bench.dir).await.unwrap(), Found::NotStarted));
    let launch = launch_of(&["bash", "-c", "echo once"]);
    let started = bench.executor.start_shim(&bench.dir, &launch).await.unwrap().unwrap();
    drop(started);
    let waiting = bench.dir.read_hello().unwrap().unwrap();
    assert!(matches!(bench.executor.reattach(&bench.dir).await.unwrap(), Found::NotStarted));
    let record = ended(&bench.executor.launch(&bench.dir, &launch, None).await.unwrap()).await;
    assert_eq!((record.instance, bench.log()), (waiting.instance, b"once\n".to_vec()));
}

#[tokio::test]
async fn test_killed_shim_loses_the_job_and_what_is_left_is_killed() {
    let bench = Bench::new();
    let running = bench.start("setsid sleep 1000 & echo ready; sleep 1000; true").await;
    bench.until_log_has("ready").await;
    until(|| bench.members().len() == 4).await; // with the process that opens sessions
    bench.kill_shim();
    let lost = tokio::time::timeout(LONG, running.wait()).await.unwrap().unwrap_err();
    let WaitError::Lost { lost, .. } = lost else { panic!("{lost}") };
    assert_eq!((lost.left, lost.rebooted, lost.why), (0, false, None));
    assert!((3..=4).contains(&lost.killed), "{} killed; that process may end by itself", lost.killed);
    assert!(bench.members().is_empty());
    assert!(matches!(bench.executor.reattach(&bench.dir).await.unwrap(), Found::Lost(_)));
    let launch = launch_of(&["true"]);
    assert!(matches!(bench.executor.launch(&bench.dir, &launch, None).await, Err(LaunchError::Lost { .. })));
}

#[tokio::test]
async fn test_shim_killed_before_go_may_be_replaced() {
    let bench = Bench::new();
    let launch = launch_of(&["true"]);
    let started = bench.executor.start_shim(&bench.dir, &launch).await.unwrap().unwrap();
    bench.kill_shim();
    drop(started);
    until(|| !bench.dir.has_shim().unwrap()).await;
    let record = ended(&bench.executor.launch(&bench.dir, &launch, None).await.unwrap()).await;
    assert_eq!(record.end, End::Exited(ExitStatus::Code(0)));
}

#[tokio::test]
async fn test_shim_that_was_never_told_to_go_leaves_the_job_startable() {
    let bench = Bench::new();
    let stopped = bench.executor.start_shim(&bench.dir, &launch_of(&["true"])).await.unwrap().unwrap();
    let (mut connection, _child) = stopped;
    connection.send(&agent_shim::wire::Request::stop(LONG, "changed my mind")).await.unwrap();
    connection.until(|event| *event == agent_shim::wire::Event::Ended).await.unwrap();
    let record = bench.dir.read_exit().unwrap().unwrap();
    assert_eq!(record.end, End::NeverStarted(NotStarted::Stopped));
    assert!(matches!(bench.executor.reattach(&bench.dir).await.unwrap(), Found::Ended(_)));

    let no_go = ExitRecord { end: End::NeverStarted(NotStarted::NoGo), ..record };
    fs::write(bench.dir.exit(), serde_json::to_vec(&no_go).unwrap()).unwrap();
    assert!(matches!(bench.executor.reattach(&bench.dir).await.unwrap(), Found::NotStarted));
    assert_eq!(bench.run("exit 4").await.end, End::Exited(ExitStatus::Code(4)));
}

#[tokio::test]
async fn test_rude_clients_disturb_neither_the_job_nor_each_other() {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    let bench = Bench::new();
    let running =
        bench.start("echo ready; while [ ! -e go ]; do sleep 0.05; done; yes | head -c 50000000").await;
    let (_dir, path) = bench.dir.short_socket_path().unwrap();
    let connect = || UnixStream::connect(&path).unwrap();
    let mut deaf = connect();
    deaf.write_all(b"{\"verb\":\"watch\"}\n").unwrap();
    let mut confused = connect();
    confused.write_all(b"{\"verb\":\"dance\"}\n\0\n{\"verb\":\"go\"}\n").unwrap();
    let mut endless = connect();
    let _ = endless.write_all(&vec![b'x'; 1 << 20]);
    let crowd: Vec<UnixStream> = (0..40).map(|_| connect()).collect();
    drop(crowd);
    fs::write(bench.dir.work().join("go"), "").unwrap();
    let record = ended(&running).await;
    assert_eq!((record.end, record.log_bytes), (End::Exited(ExitStatus::Code(0)), 50_000_006));
    let mut said = String::new();
    confused.read_to_string(&mut said).unwrap();
    assert_eq!(said.matches("refused").count(), 2, "{said}");
    assert_eq!(said.matches("going").count(), 1, "{said}");
}

#[tokio::test]
async fn test_job_runs_as_another_user_when_told_to() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root may start a job as another user");
        return;
    }
    let bench = Bench::new();
    let script = "id -u; id -g; id -G; exec sleep 1000";
    let launch = Launch {
        cwd: "/".into(),
        user: Some(agent_shim::User { uid: 65534, gid: 65533, groups: Vec::new() }),
        ..launch_of(&["bash", "-c", script])
    };
    let running = bench.executor.launch(&bench.dir, &launch, None).await.unwrap();
    bench.until_log_has("65534\n65533\n65533\n").await;
    running.stop(LONG, "enough").await.unwrap();
    assert_eq!(ended(&running).await.end, End::Exited(ExitStatus::Signal(15)));
}

#[tokio::test(flavor = "multi_thread")]
async fn test_command_is_executed_at_most_once_whoever_dies_when() {
    let mut told = BTreeMap::<&str, u32>::new();
    for step in 0..40 {
        let bench = Bench::new();
        let script = "echo $$ >> ../executions";
        let launch = launch_of(&["bash", "-c", script]);
        let (executor, dir, of_task) = (bench.executor.clone(), bench.dir.clone(), launch.clone());
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(async move {
            if let Ok(running) = executor.launch(&dir, &of_task, None).await {
                let _ = running.wait().await;
            }
        });
        let _ = tokio::time::timeout(Duration::from_micros(400 * step), std::future::pending::<()>()).await;
        if step % 2 == 0
            && let Some(hello) = bench.dir.read_hello().unwrap()
            && let Some(shim) = Member::find(hello.pid).filter(|_| bench.dir.has_shim().unwrap())
        {
            let _ = shim.signal(Signal::SIGKILL);
        }
        tasks.shutdown().await; // and with it all that the first launch knew
        let outcome = match bench.executor.launch(&bench.dir, &launch, None).await {
            Ok(running) => tokio::time::timeout(LONG, running.wait()).await.expect("the job ends"),
            Err(LaunchError::Lost { dir, lost }) => Err(WaitError::Lost { dir, lost }),
            Err(error) => panic!("step {step}: {error:?}"),
        };
        let executions = fs::read_to_string(bench.dir.data().join("executions")).unwrap_or_default();
        let executions = executions.lines().count();
        match outcome {
            Ok(record) => {
                assert_eq!((record.end, executions), (End::Exited(ExitStatus::Code(0)), 1), "step {step}");
                *told.entry("ended").or_default() += 1;
            }
            Err(WaitError::Lost { .. }) => {
                assert!(executions <= 1 && bench.dir.is_started(), "step {step}");
                *told.entry("lost").or_default() += 1;
            }
            Err(error) => panic!("step {step}: {error:?}"),
        }
    }
    println!("of 40 launches that were cut short: {told:?}");
}

#[tokio::test]
async fn test_full_disk_under_the_log_is_counted_and_spares_the_job() {
    let bench = Bench::new();
    // For a shim that inherits it, a file size limit makes writes fail as a full disk does.
    let executor = bench.executor_after("ulimit -f 8");
    let launch = launch_of(&["bash", "-c", "head -c 1000000 /dev/zero; exit 5"]);
    let record = ended(&executor.launch(&bench.dir, &launch, None).await.unwrap()).await;
    assert_eq!(record.end, End::Exited(ExitStatus::Code(5)));
    assert!(record.log_dropped > 0 && record.log_error.is_some());
    assert_eq!((record.gaps.bytes, record.gaps.count), (record.log_dropped, 1));
    let log = bench.log();
    assert_eq!(log.len() as u64, record.log_bytes);
    let kept = log.iter().filter(|byte| **byte == 0).count() as u64;
    assert_eq!(kept + record.log_dropped, 1_000_000);
    let told = format!("\n[agentd: {} bytes, 0 lines of output were dropped here: ", record.log_dropped);
    assert!(String::from_utf8_lossy(&log[kept as usize..]).starts_with(&told));
}

#[tokio::test]
async fn test_shim_is_small_and_silent() {
    let bench = Bench::new();
    let running = bench.start("echo ready; sleep 1000").await;
    bench.until_log_has("ready").await;
    let pid = bench.dir.read_hello().unwrap().unwrap().pid;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| status.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    println!("{} {} {}", field("VmRSS"), field("RssAnon"), field("Threads"));
    if !cfg!(debug_assertions) {
        let kib: u64 = field("VmRSS").split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!(kib < 3 * 1024, "{kib} KiB");
    }
    running.stop(Duration::ZERO, "enough").await.unwrap();
    ended(&running).await;
}

#[tokio::test]
async fn test_shim_is_reaped_whether_or_not_somebody_waits() {
    for wait in [true, false] {
        let bench = Bench::new();
        let running = bench.start("true").await;
        let pid = bench.dir.read_hello().unwrap().unwrap().pid;
        if wait {
            ended(&running).await;
        } else {
            drop(running);
        }
        until(|| !Path::new(&format!("/proc/{pid}")).exists()).await;
    }
}

#[test]
fn test_shim_is_looked_for_in_the_search_path() {
    let dir = tempfile::tempdir().unwrap();
    let list = format!("relative:{}", dir.path().display());
    assert!(find_shim(&list).is_err());
    fs::write(dir.path().join(SHIM), "").unwrap();
    assert!(find_shim(&list).is_err());
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(dir.path().join(SHIM), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(find_shim(&list).unwrap(), dir.path().join(SHIM));
}
