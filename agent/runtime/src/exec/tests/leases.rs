//! The shim keeps the lease of a job, whether or not a daemon runs.

use agent_model::{Boot, Clock as _, SystemClock};

use super::*;

fn soon(millis: u64) -> Option<Boot> {
    Some(SystemClock.boot() + Duration::from_millis(millis))
}

#[tokio::test]
async fn test_end_of_the_lease_ends_the_tree_without_a_daemon() {
    let bench = Bench::new();
    let script = "trap '' TERM; setsid sleep 1000 & echo ready; while :; do sleep 0.05; done";
    let until = soon(1000);
    let launch = Launch {
        grace: Duration::from_millis(300),
        lease_until: until,
        ..launch_of(&["bash", "-c", script])
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (dir, executor, handle) = (bench.dir.clone(), bench.executor.clone(), runtime.handle().clone());
    tokio::task::spawn_blocking(move || {
        std::mem::forget(handle.block_on(executor.launch(&dir, &launch, None)).unwrap());
        runtime.shutdown_background(); // as when a daemon is killed
    })
    .await
    .unwrap();
    bench.until_log_has("ready").await;
    super::until(|| bench.dir.exit().exists()).await;
    assert!(SystemClock.boot() >= until.unwrap() + Duration::from_millis(300));
    let record = bench.dir.read_exit().unwrap().unwrap();
    assert_eq!((record.lease_over, record.end), (true, End::Exited(ExitStatus::Signal(9))));
    assert!(record.stopped.is_none() && !record.timed_out && bench.members().is_empty());
}

#[tokio::test]
async fn test_renewed_lease_lets_the_job_run_and_is_never_shortened() {
    let bench = Bench::new();
    let first = soon(1500);
    let launch = Launch { lease_until: first, ..launch_of(&["bash", "-c", "echo ready; exec sleep 1000"]) };
    let running = bench.executor.launch(&bench.dir, &launch, None).await.unwrap();
    running.renew(soon(600_000).unwrap()).await.unwrap();
    running.renew(Boot::from_millis(1)).await.unwrap();
    while SystemClock.boot() < first.unwrap() + Duration::from_millis(300) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(bench.dir.has_shim().unwrap() && !bench.dir.exit().exists());
    // A daemon that adopts the job continues to renew.
    let Found::Running(adopted) = bench.executor.reattach(&bench.dir).await.unwrap() else {
        panic!("it runs")
    };
    adopted.renew(soon(700_000).unwrap()).await.unwrap();
    adopted.stop(Duration::ZERO, "enough").await.unwrap();
    let record = ended(&running).await;
    assert!(!record.lease_over && record.stopped.is_some());
    adopted.renew(soon(800_000).unwrap()).await.unwrap();
}

#[tokio::test]
async fn test_shim_of_an_earlier_daemon_takes_the_lease_of_the_present_one() {
    let bench = Bench::new();
    let old = Launch { lease_until: Some(Boot::from_millis(1)), ..launch_of(&["true"]) };
    drop(bench.executor.start_shim(&bench.dir, &old).await.unwrap().unwrap());
    let new = Launch { lease_until: soon(600_000), ..old };
    let record = ended(&bench.executor.launch(&bench.dir, &new, None).await.unwrap()).await;
    assert_eq!((record.lease_over, record.end), (false, End::Exited(ExitStatus::Code(0))));
}

#[tokio::test]
async fn test_time_limit_and_lease_are_told_apart() {
    let bench = Bench::new();
    let launch = Launch {
        timeout: Some(Duration::from_millis(300)),
        lease_until: soon(600_000),
        ..launch_of(&["sleep", "1000"])
    };
    let record = ended(&bench.executor.launch(&bench.dir, &launch, None).await.unwrap()).await;
    assert_eq!((record.timed_out, record.lease_over), (true, false));
    assert_eq!(record.end, End::Exited(ExitStatus::Signal(15)));
}
