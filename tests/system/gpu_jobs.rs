//! Jobs that ask for GPUs, with a driver that does what the test says: who gets which, and what keeps one from being
//! handed out.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use agent_model::JobDraft;
use agent_model::job::Resources;
use agent_proto::v1;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::nvml::{Card, FakeNvml, State, uuid};
use agent_tests::{SOON, eventually};

/// The GPU driver of a fleet.
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

    /// A box of this driver, running.
    fn started(&self, slots: usize) -> Fleet {
        let controller = format!("nvml_library: {}\n", self.library.display());
        Fleet::started(&Setup { slots, controller, ..Setup::default() })
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

fn gpus(fleet: &Fleet) -> Vec<v1::Gpu> {
    let nodes = fleet.client.nodes().unwrap_or_default();
    nodes.into_iter().next().and_then(|node| node.inventory).unwrap_or_default().gpus
}

/// Waits until so many GPUs are listed, and all of them are free.
fn all_free(fleet: &Fleet, count: usize) {
    eventually("all GPUs to be free", SOON, || {
        let gpus = gpus(fleet);
        (gpus.len() == count && gpus.iter().all(|gpu| gpu.held.is_empty() && gpu.unfit.is_empty()))
            .then_some(())
    });
}

fn listed(fleet: &Fleet, count: usize) {
    eventually("the GPUs are listed", SOON, || (gpus(fleet).len() == count).then_some(()));
}

/// What is said of a job: why it waits, or what is done for it.
fn says(fleet: &Fleet, job: &str, words: &str) {
    eventually(&format!("{job} to say `{words}`"), SOON, || {
        let job = fleet.client.try_job(job).ok()?;
        let said = job.replicas.iter().map(|replica| &replica.detail).chain([&job.detail]);
        said.into_iter().any(|said| said.contains(words)).then_some(())
    });
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

#[test]
fn test_a_hundred_jobs_never_share_a_gpu_and_leak_none() {
    let driver = Driver::new(8);
    let mut fleet = driver.started(12);
    let witness = driver.witness();
    listed(&fleet, 8);
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
        let job = fleet.client.submit(&wants(wanted, &command));
        if chance(7) == 0 {
            fleet.client.cancel(&job).unwrap();
        }
        jobs.insert(job, wanted);
        if number % 40 == 39 {
            fleet.bounce();
        }
    }
    for (number, (job, _)) in jobs.iter().enumerate() {
        if number % 9 == 0 {
            fleet.client.cancel(job).unwrap();
        }
        if number % 30 == 20 {
            fleet.bounce();
        }
        fleet.client.ended(job);
    }
    let twice = fs::read_to_string(witness.join("twice")).unwrap_or_default();
    assert_eq!(twice, "", "GPUs that two jobs had at a time");
    for line in fs::read_to_string(witness.join("given")).unwrap().lines() {
        let (job, uuids) = line.split_once(' ').unwrap();
        let uuids: Vec<&str> = uuids.split(',').filter(|uuid| !uuid.is_empty()).collect();
        assert_eq!(uuids.len(), jobs[job] as usize, "{line}");
    }
    all_free(&fleet, 8);
    // What is free can be had.
    let last = fleet.client.submit(&wants(8, "echo $CUDA_VISIBLE_DEVICES"));
    assert_eq!(fleet.client.ended(&last).state, "Completed");
    let all = (0..8).map(uuid).collect::<Vec<_>>().join(",");
    assert_eq!(fleet.client.text(&last).trim(), all);
}

#[test]
fn test_driver_that_hangs_delays_nothing_else() {
    let driver = Driver::new(2);
    let fleet = driver.started(4);
    listed(&fleet, 2);
    let go = driver.path().join("go");
    let wait = format!("until [ -e {} ]; do sleep 0.05; done", go.display());
    let running = fleet.client.submit(&wants(1, &wait));
    fleet.client.reached(&running, &["Running"]);
    driver.shows(State::with(2).say("hang nvmlInit_v2").say("stubborn"));
    eventually("the GPUs are kept", SOON, || {
        let gpus = gpus(&fleet);
        gpus.iter().all(|gpu| gpu.unfit.contains("did not answer within")).then_some(())
    });
    let finding = fleet.client.nodes().unwrap()[0].inventory.clone().unwrap().findings;
    let finding = finding.into_iter().find(|finding| finding.topic == "gpu").unwrap();
    assert!(finding.found.contains("did not answer") && finding.grade == "limited", "{finding:?}");
    // Jobs that want no GPU come and go; one that had one gets its outcome; one that wants one waits, and can be
    // canceled.
    assert_eq!(fleet.client.ended(&fleet.client.run("true")).state, "Completed");
    assert_eq!(fleet.client.nodes().unwrap()[0].liveness, "ready");
    let waiting = fleet.client.submit(&wants(1, "true"));
    says(&fleet, &waiting, "did not answer within");
    let unwanted = fleet.client.submit(&wants(1, "true"));
    fleet.client.cancel(&unwanted).unwrap();
    assert_eq!(fleet.client.ended(&unwanted).state, "Canceled");
    fs::write(&go, "").unwrap();
    assert_eq!(fleet.client.ended(&running).state, "Completed");
    driver.shows(State::with(2));
    assert_eq!(fleet.client.ended(&waiting).state, "Completed");
    all_free(&fleet, 2);
}

#[test]
fn test_stranger_keeps_its_gpu_from_jobs_until_it_is_gone() {
    let driver = Driver::new(2);
    driver.shows(State::with(2).card(0, used_by_me));
    let fleet = driver.started(4);
    listed(&fleet, 2);
    let go = driver.path().join("go");
    let wait = format!("echo $CUDA_VISIBLE_DEVICES; until [ -e {} ]; do sleep 0.05; done", go.display());
    let first = fleet.client.submit(&wants(1, &wait));
    eventually("the first runs", SOON, || (fleet.client.text(&first).trim() == uuid(1)).then_some(()));
    let second = fleet.client.submit(&wants(1, "echo $CUDA_VISIBLE_DEVICES"));
    says(&fleet, &second, "GPU 0: quarantined: process");
    says(&fleet, &second, "of nobody's job uses 3.2 GiB of it");
    driver.shows(State::with(2));
    assert_eq!(fleet.client.ended(&second).state, "Completed");
    assert_eq!(fleet.client.text(&second).trim(), uuid(0));
    // What a job leaves behind is no better than a stranger, and does not keep its outcome back for ever.
    driver.shows(State::with(2).card(1, used_by_me));
    fs::write(&go, "").unwrap();
    assert_eq!(fleet.client.ended(&first).state, "Completed");
    eventually("the GPU is quarantined", SOON, || {
        let gpus = gpus(&fleet);
        (gpus[1].held.is_empty() && gpus[1].unfit.starts_with("quarantined: process")).then_some(())
    });
    driver.shows(State::with(2));
    all_free(&fleet, 2);
}

#[test]
fn test_lost_gpu_is_told_while_the_job_runs_and_when_it_fails() {
    let driver = Driver::new(2);
    let fleet = driver.started(4);
    listed(&fleet, 2);
    let go = driver.path().join("go");
    let wait = format!("until [ -e {} ]; do sleep 0.05; done; exit $CODE", go.display());
    let job = fleet.client.submit(&wants(1, &format!("CODE=5; {wait}")));
    let other = fleet.client.submit(&wants(1, &format!("CODE=0; {wait}")));
    for job in [&job, &other] {
        fleet.client.reached(job, &["Running"]);
    }
    let held = gpus(&fleet).into_iter().find(|gpu| gpu.held.starts_with(job.as_str())).unwrap();
    driver.shows(State::with(2).lost(held.index as usize));
    says(&fleet, &job, &format!("GPU {} ({}):", held.index, held.uuid));
    fs::write(&go, "").unwrap();
    let failed = fleet.client.ended(&job);
    let fault = failed.outcome.and_then(|outcome| outcome.fault).unwrap();
    assert_eq!(fault.code, "NODE-107", "{fault:?}");
    assert!(fault.why.iter().any(|why| why.contains(&held.uuid)), "{fault:?}");
    assert!(fault.why.iter().any(|why| why == "the command returned 5"), "{fault:?}");
    assert_eq!(fleet.client.ended(&other).state, "Completed");
    // The controller counts one less, and says which.
    let large = fleet.client.submit(&wants(2, "true"));
    says(&fleet, &large, "1 of its 2 GPUs not handed out");
    driver.shows(State::with(2));
    assert_eq!(fleet.client.ended(&large).state, "Completed");
}

#[test]
fn test_running_job_keeps_its_gpu_through_every_loss_of_memory() {
    let driver = Driver::new(2);
    let mut fleet = driver.started(4);
    listed(&fleet, 2);
    let go = driver.path().join("go");
    let wait = format!("echo $CUDA_VISIBLE_DEVICES; until [ -e {} ]; do sleep 0.05; done", go.display());
    let first = fleet.client.submit(&wants(1, &wait));
    eventually("the job runs", SOON, || (fleet.client.text(&first).trim() == uuid(0)).then_some(()));
    for lose_journal in [false, true] {
        fleet.controller.kill();
        if lose_journal {
            for file in ["journal.db", "journal.db-wal"] {
                let _ = fs::remove_file(fleet.controller.state().join(file));
            }
        }
        fleet.serve();
        eventually("the GPU is held", SOON, || {
            gpus(&fleet).first().filter(|gpu| gpu.held.starts_with(first.as_str())).map(drop)
        });
        let next = fleet.client.submit(&wants(1, "echo $CUDA_VISIBLE_DEVICES $NVIDIA_VISIBLE_DEVICES"));
        assert_eq!(fleet.client.ended(&next).state, "Completed");
        assert_eq!(fleet.client.text(&next), format!("{0} {0}\n", uuid(1)));
    }
    fs::write(&go, "").unwrap();
    assert_eq!(fleet.client.ended(&first).state, "Completed");
    all_free(&fleet, 2);
}
