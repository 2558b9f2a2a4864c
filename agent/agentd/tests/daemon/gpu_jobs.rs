//! Jobs that ask for GPUs, with a driver that does what the test says: who gets which, and what keeps one from being
//! handed out.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent_model::JobDraft;
use agent_model::job::Resources;
use agent_proto::v1;

use crate::gpus::nvml::{Card, FakeNvml, State, uuid};
use crate::harness::Daemon;

/// How long anything may take that normally takes a moment.
const LONG: Duration = Duration::from_secs(120);

async fn eventually<T>(what: &str, mut ready: impl AsyncFnMut() -> Option<T>) -> T {
    let end = Instant::now() + LONG;
    loop {
        if let Some(value) = ready().await {
            return value;
        }
        assert!(Instant::now() < end, "still waiting: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The GPU driver of a daemon.
struct Driver {
    dir: tempfile::TempDir,
    library: PathBuf,
}

impl Driver {
    fn new(gpus: usize) -> Driver {
        let dir = tempfile::Builder::new().prefix("driver-").tempdir().unwrap();
        let driver = Driver { library: FakeNvml::build(dir.path()), dir };
        driver.shows(State::with(gpus));
        driver
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn shows(&self, state: State) {
        state.write(&self.library);
    }

    fn config(&self, slots: u32) -> String {
        format!("slots: {slots}\nnvml_library: {}\n", self.library.display())
    }

    /// Where jobs write down what they have.
    fn witness(&self) -> PathBuf {
        let witness = self.path().join("witness");
        fs::create_dir_all(&witness).unwrap();
        witness
    }
}

/// This process as one that uses a GPU.
fn used_by_me(card: Card) -> Card {
    card.set("processes", format!("{}:3435973837", std::process::id())).set("used", 3_435_973_837_u64)
}

fn wants(gpus: u32, command: &str) -> JobDraft {
    let resources = Resources { gpus, ..Resources::default() };
    JobDraft { command: command.to_owned(), resources, ..JobDraft::default() }
}

async fn ended(daemon: &Daemon, job: &str) -> v1::Job {
    eventually(&format!("{job} to end"), async || {
        let ended = ["Completed", "Failed", "Canceled"];
        daemon.job(job).await.filter(|job| ended.contains(&job.state.as_str()))
    })
    .await
}

async fn gpus(daemon: &Daemon) -> Vec<v1::Gpu> {
    let nodes = daemon.nodes().await.unwrap_or_default();
    nodes.into_iter().next().and_then(|node| node.inventory).unwrap_or_default().gpus
}

/// Waits until so many GPUs are listed, and all of them are free.
async fn all_free(daemon: &Daemon, count: usize) {
    eventually("all GPUs to be free", async || {
        let gpus = gpus(daemon).await;
        (gpus.len() == count && gpus.iter().all(|gpu| gpu.held.is_empty() && gpu.unfit.is_empty()))
            .then_some(())
    })
    .await;
}

async fn listed(daemon: &Daemon, count: usize) {
    eventually("the GPUs are listed", async || (gpus(daemon).await.len() == count).then_some(())).await;
}

/// What is said of a job: why it waits, or what is done for it.
async fn says(daemon: &Daemon, job: &str, words: &str) {
    eventually(&format!("{job} to say `{words}`"), async || {
        let job = daemon.job(job).await?;
        let said = job.replicas.iter().map(|replica| &replica.detail).chain([&job.detail]);
        said.into_iter().any(|said| said.contains(words)).then_some(())
    })
    .await;
}

/// Takes a place for each of its GPUs, which nobody else may have, and gives it up at its end, however that comes.
const WITNESS: &str = r#"
cd WITNESS || exit 99
each() { echo "$CUDA_VISIBLE_DEVICES" | tr , '\n' | grep .; }
each | while read -r uuid; do mkdir "held-$uuid" || echo "$AGENTD_JOB $uuid" >> twice; done
echo "$AGENTD_JOB $CUDA_VISIBLE_DEVICES" >> given
trap 'each | while read -r uuid; do rmdir "held-$uuid"; done' EXIT
trap 'exit 143' TERM
for i in ROUNDS; do sleep 0.05; done
exit CODE
"#;

#[tokio::test]
async fn test_a_hundred_jobs_never_share_a_gpu_and_leak_none() {
    let driver = Driver::new(8);
    let mut daemon = Daemon::started(&driver.config(12)).await;
    let witness = driver.witness();
    listed(&daemon, 8).await;
    let mut jobs = BTreeMap::new();
    let mut seed: u32 = 7;
    let mut chance = |below: u32| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 16) % below
    };
    for number in 0..100 {
        let wanted = [0, 1, 1, 1, 2, 3, 8][chance(7) as usize];
        let rounds = (0..chance(6)).map(|round| round.to_string()).collect::<Vec<_>>().join(" ");
        let code = if chance(5) == 0 { 3 } else { 0 };
        let command = WITNESS
            .replace("WITNESS", &witness.display().to_string())
            .replace("ROUNDS", &rounds)
            .replace("CODE", &code.to_string());
        let job = daemon.submit(wants(wanted, &command)).await;
        if chance(7) == 0 {
            daemon.cancel(&job).await;
        }
        jobs.insert(job, wanted);
        if number % 40 == 39 {
            daemon.kill();
            daemon.start().await;
        }
    }
    for (number, (job, _)) in jobs.iter().enumerate() {
        if number % 9 == 0 {
            daemon.cancel(job).await;
        }
        if number % 30 == 20 {
            daemon.kill();
            daemon.start().await;
        }
        ended(&daemon, job).await;
    }
    let twice = fs::read_to_string(witness.join("twice")).unwrap_or_default();
    assert_eq!(twice, "", "GPUs that two jobs had at a time");
    for line in fs::read_to_string(witness.join("given")).unwrap().lines() {
        let (job, uuids) = line.split_once(' ').unwrap();
        let uuids: Vec<&str> = uuids.split(',').filter(|uuid| !uuid.is_empty()).collect();
        assert_eq!(uuids.len(), jobs[job] as usize, "{line}");
    }
    all_free(&daemon, 8).await;
    // What is free can be had.
    let last = daemon.submit(wants(8, "echo $CUDA_VISIBLE_DEVICES")).await;
    assert_eq!(ended(&daemon, &last).await.state, "Completed");
    let all = (0..8).map(uuid).collect::<Vec<_>>().join(",");
    assert_eq!(daemon.log(&last, "job").await.trim(), all);
}

#[tokio::test]
async fn test_driver_that_hangs_delays_nothing_else() {
    let driver = Driver::new(2);
    let daemon = Daemon::started(&driver.config(4)).await;
    listed(&daemon, 2).await;
    let go = driver.path().join("go");
    let wait = format!("until [ -e {} ]; do sleep 0.05; done", go.display());
    let running = daemon.submit(wants(1, &wait)).await;
    eventually("the job runs", async || {
        daemon.job(&running).await.filter(|job| job.state == "Running").map(drop)
    })
    .await;
    driver.shows(State::with(2).say("hang nvmlInit_v2").say("stubborn"));
    eventually("the GPUs are kept", async || {
        let gpus = gpus(&daemon).await;
        gpus.iter().all(|gpu| gpu.unfit.contains("did not answer within")).then_some(())
    })
    .await;
    let finding = daemon.nodes().await.unwrap()[0].inventory.clone().unwrap().findings;
    let finding = finding.into_iter().find(|finding| finding.topic == "gpu").unwrap();
    assert!(finding.found.contains("did not answer") && finding.grade == "limited", "{finding:?}");
    // Jobs that want no GPU come and go; one that had one gets its outcome; one that wants one waits, and can be
    // canceled.
    assert_eq!(ended(&daemon, &daemon.run("true").await).await.state, "Completed");
    assert_eq!(daemon.nodes().await.unwrap()[0].liveness, "ready");
    let waiting = daemon.submit(wants(1, "true")).await;
    says(&daemon, &waiting, "did not answer within").await;
    let unwanted = daemon.submit(wants(1, "true")).await;
    daemon.cancel(&unwanted).await;
    assert_eq!(ended(&daemon, &unwanted).await.state, "Canceled");
    fs::write(&go, "").unwrap();
    assert_eq!(ended(&daemon, &running).await.state, "Completed");
    driver.shows(State::with(2));
    assert_eq!(ended(&daemon, &waiting).await.state, "Completed");
    all_free(&daemon, 2).await;
}

#[tokio::test]
async fn test_stranger_keeps_its_gpu_from_jobs_until_it_is_gone() {
    let driver = Driver::new(2);
    driver.shows(State::with(2).card(0, used_by_me));
    let daemon = Daemon::started(&driver.config(4)).await;
    listed(&daemon, 2).await;
    let go = driver.path().join("go");
    let wait = format!("echo $CUDA_VISIBLE_DEVICES; until [ -e {} ]; do sleep 0.05; done", go.display());
    let first = daemon.submit(wants(1, &wait)).await;
    eventually("the first runs", async || (daemon.log(&first, "job").await.trim() == uuid(1)).then_some(()))
        .await;
    let second = daemon.submit(wants(1, "echo $CUDA_VISIBLE_DEVICES")).await;
    says(&daemon, &second, "GPU 0: quarantined: process").await;
    says(&daemon, &second, "of nobody's job uses 3.2 GiB of it").await;
    driver.shows(State::with(2));
    assert_eq!(ended(&daemon, &second).await.state, "Completed");
    assert_eq!(daemon.log(&second, "job").await.trim(), uuid(0));
    // What a job leaves behind is no better than a stranger, and does not keep its outcome back for ever.
    driver.shows(State::with(2).card(1, used_by_me));
    fs::write(&go, "").unwrap();
    assert_eq!(ended(&daemon, &first).await.state, "Completed");
    eventually("the GPU is quarantined", async || {
        let gpus = gpus(&daemon).await;
        (gpus[1].held.is_empty() && gpus[1].unfit.starts_with("quarantined: process")).then_some(())
    })
    .await;
    driver.shows(State::with(2));
    all_free(&daemon, 2).await;
}

#[tokio::test]
async fn test_lost_gpu_is_told_while_the_job_runs_and_when_it_fails() {
    let driver = Driver::new(2);
    let daemon = Daemon::started(&driver.config(4)).await;
    listed(&daemon, 2).await;
    let go = driver.path().join("go");
    let wait = format!("until [ -e {} ]; do sleep 0.05; done; exit $CODE", go.display());
    let job = daemon.submit(wants(1, &format!("CODE=5; {wait}"))).await;
    let other = daemon.submit(wants(1, &format!("CODE=0; {wait}"))).await;
    for job in [&job, &other] {
        eventually("the job runs", async || {
            daemon.job(job).await.filter(|job| job.state == "Running").map(drop)
        })
        .await;
    }
    let held = gpus(&daemon).await.into_iter().find(|gpu| gpu.held.starts_with(job.as_str())).unwrap();
    driver.shows(State::with(2).lost(held.index as usize));
    says(&daemon, &job, &format!("GPU {} ({}):", held.index, held.uuid)).await;
    fs::write(&go, "").unwrap();
    let failed = ended(&daemon, &job).await;
    let fault = failed.outcome.and_then(|outcome| outcome.fault).unwrap();
    assert_eq!(fault.code, "NODE-107", "{fault:?}");
    assert!(fault.why.iter().any(|why| why.contains(&held.uuid)), "{fault:?}");
    assert!(fault.why.iter().any(|why| why == "the command returned 5"), "{fault:?}");
    assert_eq!(ended(&daemon, &other).await.state, "Completed");
    // The controller counts one less, and says which.
    let large = daemon.submit(wants(2, "true")).await;
    says(&daemon, &large, "1 of its 2 GPUs not handed out").await;
    driver.shows(State::with(2));
    assert_eq!(ended(&daemon, &large).await.state, "Completed");
}

#[tokio::test]
async fn test_running_job_keeps_its_gpu_through_every_loss_of_memory() {
    let driver = Driver::new(2);
    let mut daemon = Daemon::started(&driver.config(4)).await;
    listed(&daemon, 2).await;
    let go = driver.path().join("go");
    let wait = format!("echo $CUDA_VISIBLE_DEVICES; until [ -e {} ]; do sleep 0.05; done", go.display());
    let first = daemon.submit(wants(1, &wait)).await;
    eventually("the job runs", async || (daemon.log(&first, "job").await.trim() == uuid(0)).then_some(()))
        .await;
    for lose_journal in [false, true] {
        daemon.kill();
        if lose_journal {
            for file in ["journal.db", "journal.db-wal", "journal.db-shm"] {
                let _ = fs::remove_file(daemon.state().join(file));
            }
        }
        daemon.start().await;
        eventually("the GPU is held", async || {
            gpus(&daemon).await.first().filter(|gpu| gpu.held.starts_with(first.as_str())).map(drop)
        })
        .await;
        let next = daemon.submit(wants(1, "echo $CUDA_VISIBLE_DEVICES $NVIDIA_VISIBLE_DEVICES")).await;
        assert_eq!(ended(&daemon, &next).await.state, "Completed");
        assert_eq!(daemon.log(&next, "job").await, format!("{0} {0}\n", uuid(1)));
    }
    fs::write(&go, "").unwrap();
    assert_eq!(ended(&daemon, &first).await.state, "Completed");
    all_free(&daemon, 2).await;
}
