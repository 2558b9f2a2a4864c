//! What the control groups of this machine do for a job: limits, accounting, and correct reports about memory.

use agent_shim::{CgroupRequest, Controller, Limits, OomScope};

use super::*;

const MIB: u64 = 1 << 20;

/// A bench on a machine where memory can be limited; prints a note elsewhere.
fn limited_bench() -> Option<Bench> {
    if containment().memory && containment().kind != "systemd scope" {
        return Some(Bench::new());
    }
    println!("SKIPPED: memory cannot be limited on this machine");
    None
}

fn limited(limit: u64, script: &str) -> Launch {
    let limits = Limits { memory: Some(limit), pids: Some(200) };
    Launch { limits, ..launch_of(&["bash", "-c", script]) }
}

#[tokio::test]
async fn test_limits_are_in_effect_and_groups_are_removed() {
    let Some(bench) = limited_bench() else { return };
    let script = "for g in /sys/fs/cgroup/*/agentd-* $(awk -F: '$2==\"memory\" {print \"/sys/fs/cgroup/memory\"$3}' \
                  /proc/self/cgroup); do grep -qx $$ $g/cgroup.procs && cat $g/pids.max $g/memory.limit_in_bytes; done \
                  2>/dev/null; echo ready; while [ ! -e go ]; do sleep 0.05; done";
    let running = bench.executor.launch(&bench.dir, &limited(64 * MIB, script), None).await.unwrap();
    bench.until_log_has("ready").await;
    let hello = bench.dir.read_hello().unwrap().unwrap();
    assert!(hello.groups.iter().any(|group| group.exists()), "{hello:?}");
    assert_eq!(hello.containment, containment().kind);
    fs::write(bench.dir.work().join("go"), "").unwrap();
    let record = ended(&running).await;
    assert_eq!(record.limits, Limits { memory: Some(64 * MIB), pids: Some(200) });
    assert_eq!((record.limits_unmet.len(), record.containment), (0, hello.containment.clone()));
    assert!(record.memory_peak.is_some_and(|peak| peak > 0 && peak <= 64 * MIB), "{:?}", record.memory_peak);
    assert!(!hello.groups.iter().any(|group| group.exists()), "{hello:?}");
    let log = String::from_utf8(bench.log()).unwrap();
    if hello.containment == "cgroup v1" {
        assert!(log.contains("200\n") && log.contains("67108864\n"), "{log}");
    }
}

#[tokio::test]
async fn test_out_of_memory_is_told_from_every_other_end() {
    // `tail` keeps an endless line in memory, because it cannot print it before its end.
    for (script, end, oom, kills) in [
        ("exec tail /dev/zero", ExitStatus::Signal(9), Some(OomScope::Own), 1),
        ("tail /dev/zero; exit $?", ExitStatus::Code(137), Some(OomScope::Own), 1),
        ("tail /dev/zero || exit 1", ExitStatus::Code(1), Some(OomScope::Own), 1),
        (
            "setsid bash -c '(tail /dev/zero &) ; sleep 2' || true; exit 1",
            ExitStatus::Code(1),
            Some(OomScope::Own),
            1,
        ),
        ("tail /dev/zero; tail /dev/zero; echo never mind", ExitStatus::Code(0), None, 2),
        ("kill -KILL $$", ExitStatus::Signal(9), None, 0),
        ("sh -c 'kill -KILL $$'; exit $?", ExitStatus::Code(137), None, 0),
        ("exit 137", ExitStatus::Code(137), None, 0),
        ("exit 1", ExitStatus::Code(1), None, 0),
    ] {
        for _ in 0..3 {
            let Some(bench) = limited_bench() else { return };
            let launch = limited(24 * MIB, script);
            let record = ended(&bench.executor.launch(&bench.dir, &launch, None).await.unwrap()).await;
            assert_eq!((record.end, record.oom), (End::Exited(end), oom), "{script}");
            assert_eq!(record.oom_kills, kills, "{script}");
            let peak = record.memory_peak.unwrap();
            assert!(peak <= 24 * MIB && (kills == 0 || peak > 20 * MIB), "{script} {peak}");
        }
    }
}

#[tokio::test]
async fn test_memory_of_others_is_not_the_jobs_fault() {
    let Some(bench) = limited_bench() else { return };
    if containment().kind != "cgroup v1" {
        println!("SKIPPED: this test lays out groups of version 1");
        return;
    }
    // The shim, and with it the job, is put into a group with a lower limit than the job's.
    let own = fs::read_to_string("/proc/self/cgroup").unwrap();
    let own = own.lines().find_map(|line| line.split_once(":memory:")).unwrap().1;
    let around = format!("/sys/fs/cgroup/memory{own}/around-{}", std::process::id());
    fs::create_dir(&around).unwrap();
    fs::write(format!("{around}/memory.limit_in_bytes"), (48 * MIB).to_string()).unwrap();
    let executor = bench.executor_after(&format!("echo $$ > {around}/cgroup.procs"));
    let launch = limited(200 * MIB, "tail /dev/zero; exit 1");
    let record = ended(&executor.launch(&bench.dir, &launch, None).await.unwrap()).await;
    assert_eq!((record.end.clone(), record.oom), (End::Exited(ExitStatus::Code(1)), Some(OomScope::Parent)));

    // Without its own group the job shares the count with others: only an end that looks like such a kill counts.
    for (script, oom) in [("exec tail /dev/zero", Some(OomScope::Parent)), ("tail /dev/zero; exit 1", None)] {
        let bench = Bench::new();
        let executor = bench.executor_after(&format!("echo $$ > {around}/cgroup.procs"));
        let cgroup = Some(CgroupRequest { root: None, without: vec![Controller::Memory] });
        let launch = Launch { cgroup, ..limited(200 * MIB, script) };
        let record = ended(&executor.launch(&bench.dir, &launch, None).await.unwrap()).await;
        assert_eq!((record.oom, record.oom_kills), (oom, 0), "{script} {record:?}");
        assert_eq!(record.limits_unmet, ["memory 209715200: no control group here can limit it"]);
    }
    until(|| fs::remove_dir(&around).is_ok()).await;
}

#[tokio::test]
async fn test_job_without_groups_is_a_tree_of_processes() {
    use Controller::{Freezer, Memory, Pids, Unified};
    let bench = Bench::new();
    let cgroup = Some(CgroupRequest { root: None, without: vec![Unified, Memory, Pids, Freezer] });
    let launch = Launch { cgroup, ..limited(64 * MIB, "true") };
    let record = ended(&bench.executor.launch(&bench.dir, &launch, None).await.unwrap()).await;
    assert_eq!((record.containment.as_str(), record.limits), ("process group", Limits::default()));
    assert_eq!(record.limits_unmet.len(), 2, "{record:?}");
    assert!(fs::read_to_string(bench.dir.shim_log()).unwrap().contains("limit not in effect: memory"));
}

#[tokio::test]
async fn test_groups_of_a_shim_that_died_before_the_start_are_removed_by_the_next() {
    let bench = Bench::new();
    let launch = launch_of(&["true"]);
    drop(bench.executor.start_shim(&bench.dir, &launch).await.unwrap().unwrap());
    bench.kill_shim();
    until(|| !bench.dir.has_shim().unwrap()).await;
    // As if it had been killed right after making them.
    let mut hello = bench.dir.read_hello().unwrap().unwrap();
    let places = agent_shim::cgroup::places(&CgroupRequest::default());
    let name = agent_shim::cgroup::name_of(&hello.replica, &hello.instance);
    let made = agent_shim::cgroup::make(&places, &name, Limits::default());
    hello.groups = made.groups.dirs().to_vec();
    bench.dir.write_hello(&hello).unwrap();
    ended(&bench.executor.launch(&bench.dir, &launch, None).await.unwrap()).await;
    assert!(!hello.groups.iter().any(|group| group.exists()), "{hello:?}");
}

#[cfg(debug_assertions)]
#[tokio::test]
async fn test_failures_of_the_shim_leave_the_job_started_at_most_once_and_honestly_told() {
    for (plan, expected) in [
        ("shim.cgroup.make=error", "ended"),
        ("shim.cgroup.limit=errno:22", "ended"),
        ("shim.cgroup.remove=error", "ended"),
        ("shim.exit.write=errno:28=1", "ended"),
        ("shim.exit.sync=errno:5=1", "ended"),
        ("shim.exit.rename=errno:30=1", "ended"),
        ("shim.socket.answer=error=1", "ended"),
        ("shim.started.write=errno:28", "never"),
        ("shim.started.written=errno:5", "never"),
        ("shim.exec=errno:12", "never"),
        ("shim.hello.write=errno:28=2", "never"),
        ("shim.hello.write=errno:28", "refused"),
        ("shim.exit.reserve=errno:28", "refused"),
        ("shim.socket.listen=error", "refused"),
        ("shim.started.written=kill", "lost"),
        ("shim.exec=kill", "lost"),
        ("shim.exit.write=kill", "lost"),
        ("shim.exit.rename=kill", "lost"),
        ("shim.cgroup.make=kill=1", "fresh"),
    ] {
        let bench = Bench::new();
        let executor = bench.executor_after(&format!("export AGENTD_FAILPOINTS='{plan}'"));
        let launch = Launch {
            limits: Limits { memory: None, pids: Some(100) },
            ..launch_of(&["bash", "-c", "echo x >> ../executions"])
        };
        let mut launched = executor.launch(&bench.dir, &launch, None).await;
        if matches!(launched, Err(LaunchError::Talk { .. })) {
            launched = bench.executor.launch(&bench.dir, &launch, None).await; // as a daemon that tries again
        }
        let told = match launched {
            Err(LaunchError::Refused { .. }) => "refused",
            Err(LaunchError::Lost { .. }) => "lost",
            Err(error) => panic!("{plan}: {error:?}"),
            Ok(running) => match tokio::time::timeout(LONG, running.wait()).await.unwrap() {
                Err(WaitError::Lost { .. }) => "lost",
                Err(error) => panic!("{plan}: {error:?}"),
                Ok(ExitRecord { end: End::NeverStarted(_), .. }) => "never",
                Ok(_) => "ended",
            },
        };
        let executions = fs::read_to_string(bench.dir.data().join("executions")).unwrap_or_default();
        let executions = executions.lines().count();
        let expected = if expected == "fresh" { "ended" } else { expected };
        assert_eq!(told, expected, "{plan}");
        match told {
            "ended" => assert_eq!(executions, 1, "{plan}"),
            "lost" => assert!(executions <= 1 && bench.dir.is_started(), "{plan}"),
            _ => assert_eq!(executions, 0, "{plan}"),
        }
    }
}
