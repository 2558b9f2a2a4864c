use std::fs;
use std::path::Path;

use super::look::tests::scripted;
use super::*;

/// More than anything here takes.
const LONG: Duration = Duration::from_secs(120);

/// GPUs whose looks are read from a file.
fn gpus(dir: &Path, within: Duration) -> (Gpus, watch::Receiver<Inventory>) {
    let script = format!("[ -e {0}/hang ] && exec sleep 1000; cat {0}/look", dir.display());
    let inventory = watch::Sender::new(Inventory::default());
    let told = inventory.subscribe();
    (Gpus::new(scripted(dir, &script, within), inventory, watch::Sender::default(), []), told)
}

/// Lets the driver report two GPUs, of which the second is used by the process.
fn tell_of(dir: &Path, stranger: Option<u32>) {
    let processes =
        stranger.map(|pid| format!(r#"{{"pid": {pid}, "memory": 3435973837}}"#)).unwrap_or_default();
    let gpu = |index: u32, processes: &str| {
        format!(
            r#"{{"index": {index}, "uuid": "GPU-{index}", "name": "T", "memory": 17179869184, "used": 0, "processes": [{processes}]}}"#
        )
    };
    let text = format!(
        r#"{{"driver": {{"state": "works", "version": "1", "cuda": ""}}, "gpus": [{}, {}]}}"#,
        gpu(0, ""),
        gpu(1, &processes)
    );
    fs::write(dir.join("new"), text).unwrap();
    fs::rename(dir.join("new"), dir.join("look")).unwrap();
}

/// Runs a future while the task of the GPUs runs.
async fn with<T>(gpus: &Gpus, work: impl Future<Output = T>) -> T {
    tokio::select! {
        () = gpus.clone().run() => panic!("it never ends"),
        done = tokio::time::timeout(LONG, work) => done.expect("it takes too long"),
    }
}

#[tokio::test]
async fn test_a_stranger_is_seen_before_the_start_and_after_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let (gpus, told) = gpus(dir.path(), LONG);
    let (a, b) = ("a.1.0".parse().unwrap(), "b.1.0".parse().unwrap());
    let me = std::process::id();
    with(&gpus, async {
        tell_of(dir.path(), Some(me));
        assert_eq!(gpus.take(&a, 1).await.unwrap(), ["GPU-0"]);
        let wait = gpus.take(&b, 1).await.unwrap_err().to_string();
        assert!(wait.contains(&format!("quarantined: process {me} (")), "{wait}");
        assert!(wait.contains("of nobody's job uses 3.2 GiB of it"), "{wait}");
        tell_of(dir.path(), None);
        assert_eq!(gpus.take(&b, 1).await.unwrap(), ["GPU-1"]);
        assert_eq!(gpus.give_back(&a).await, Vec::<String>::new());
        // The job's left process ends during the wait.
        tell_of(dir.path(), Some(me));
        let clean = async {
            tokio::time::sleep(PROVE_EVERY * 2).await;
            tell_of(dir.path(), None);
        };
        tokio::join!(gpus.give_back(&b), clean);
    })
    .await;
    let inventory = told.borrow();
    assert!(inventory.gpus.iter().all(|gpu| gpu.held.is_none() && gpu.unfit.is_none()), "{inventory:?}");
    assert_eq!((inventory.gpu_driver.as_str(), inventory.findings[0].topic.as_str()), ("1", "gpu"));
}

#[tokio::test]
async fn test_driver_that_hangs_keeps_nobody_waiting_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let (gpus, told) = gpus(dir.path(), Duration::from_secs(1));
    let (a, b) = ("a.1.0".parse().unwrap(), "b.1.0".parse().unwrap());
    tell_of(dir.path(), None);
    with(&gpus, async {
        while gpus.take(&a, 1).await.is_err() {} // a slow machine may take longer than the helper is given
        fs::write(dir.path().join("hang"), "").unwrap();
        let wait = gpus.take(&b, 1).await.unwrap_err().to_string();
        assert!(wait.contains("did not answer within 1 s"), "{wait}");
        assert_eq!(gpus.give_back(&a).await, Vec::<String>::new());
        let unfit = |inventory: &Inventory| inventory.gpus.iter().filter(|gpu| gpu.unfit.is_some()).count();
        assert_eq!(unfit(&told.borrow()), 2);
        assert!(told.borrow().gpus.iter().all(|gpu| gpu.held.is_none()));
        fs::remove_file(dir.path().join("hang")).unwrap();
        while gpus.take(&b, 2).await.is_err() {}
        assert_eq!(unfit(&told.borrow()), 0);
    })
    .await;
}

#[tokio::test]
async fn test_machine_that_is_looked_at_anew_keeps_its_gpus() {
    let finding = |means: &str| Finding {
        topic: "gpu".into(),
        grade: agent_model::node::Grade::Good,
        found: String::new(),
        means: means.into(),
        fix: None,
        lacks: None,
    };
    let known = Inventory {
        gpus: vec![Gpu::default()],
        gpu_driver: "1".into(),
        cuda: "2".into(),
        findings: vec![finding("told")],
        ..Inventory::default()
    };
    let mut found = Inventory { cpus: 3, findings: vec![finding("probed")], ..Inventory::default() };
    keep_known(&known, &mut found);
    assert_eq!(found, Inventory { cpus: 3, ..known });
}
