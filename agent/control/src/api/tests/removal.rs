//! Jobs that are removed.

use super::*;
use crate::ControllerConfig;

async fn remove(rig: &Rig, job: &str) -> Result<v1::RemoveJobResponse, Status> {
    let called = rig.jobs.clone().remove(v1::RemoveJobRequest { job: job.into() }).await;
    called.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn test_a_removed_job_is_gone_and_its_name_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 1).await;
    rig.submit("a").await;
    node.ordered("a.1.0").await;
    node.step("a.1.0", ReplicaStep::Running).await;
    let refused = remove(&rig, "a").await.unwrap_err();
    assert_eq!(code(&refused), Code::JobActive, "{refused}");

    node.append("a.1.0", "job", 0, b"line\n").await;
    node.deliver("a.1.0", outcome(0, b"line\n")).await.unwrap();
    rig.ended("a").await;
    node.forgets("a.1.0").await;
    let logs = dir.path().join("controller/archive/a");
    assert!(logs.exists());
    remove(&rig, "a").await.unwrap();
    assert!(!logs.exists());
    assert_eq!(code(&remove(&rig, "a").await.unwrap_err()), Code::JobNotFound);
    let get = v1::GetJobRequest { job: "a".into(), ..Default::default() };
    assert_eq!(code(&rig.jobs.get(get).await.unwrap_err()), Code::JobNotFound);
    let left = rig.jobs.list(v1::ListJobsRequest::default()).await.unwrap().into_inner().jobs;
    assert!(left.is_empty(), "{left:?}");

    // No node confuses the new job of this name with the one that it had, not even after a restart.
    rig.kill().await;
    let mut rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 1).await;
    rig.try_submit("again", request("a")).await.unwrap();
    node.ordered("a.2.0").await;
    node.deliver("a.2.0", outcome(0, b"")).await.unwrap();
    assert_eq!(rig.ended("a").await.state, "Completed");
    rig.stop().await;
}

/// What a node keeps because it is stored nowhere else goes with its job, and nothing else does.
#[tokio::test]
async fn test_what_a_node_keeps_of_a_removed_job_is_let_go() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 2).await;
    for job in ["a", "b"] {
        let replica = format!("{job}.1.0");
        rig.submit(job).await;
        node.ordered(&replica).await;
        node.deliver(&replica, outcome(0, b"")).await.unwrap();
        rig.ended(job).await;
        node.forgets(&replica).await;
    }
    let kept = |job: &str| v1::KeptResult { replica: format!("{job}.1.0"), owner: "ada".into(), bytes: 7 };
    let inventory = || v1::Inventory {
        slots: 2,
        kept: ["a", "b", "of-another-life"].map(kept).into(),
        ..v1::Inventory::default()
    };
    let discards = async |node: &mut Node, expected: &[&str]| {
        within("orders about what is kept", async {
            loop {
                let orders = node.orders.message().await.unwrap().expect("orders go on");
                if orders.discard == expected {
                    return;
                }
                node.report().await;
            }
        })
        .await;
    };
    node.send(Some(inventory())).await;
    discards(&mut node, &[]).await;
    remove(&rig, "a").await.unwrap();
    node.report().await;
    discards(&mut node, &["a.1.0"]).await;
    rig.kill().await;
    let rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 2).await;
    node.send(Some(inventory())).await;
    discards(&mut node, &["a.1.0"]).await;
    node.send(Some(v1::Inventory { slots: 2, ..v1::Inventory::default() })).await;
    discards(&mut node, &[]).await;
    rig.stop().await;
}

#[tokio::test]
async fn test_jobs_that_ended_long_ago_are_removed_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 1).await;
    for job in ["a", "b"] {
        rig.submit(job).await;
    }
    node.ordered("a.1.0").await;
    node.append("a.1.0", "job", 0, b"line\n").await;
    node.deliver("a.1.0", outcome(0, b"line\n")).await.unwrap();
    rig.ended("a").await;
    rig.stop().await;

    let controller = super::rig::open(dir.path(), ControllerConfig::DEFAULT_LEASE).await.unwrap();
    let services = controller.services.clone();
    let mut works = JoinSet::new();
    works.spawn(controller.run(std::future::pending()));
    let hour = Duration::from_secs(3600);
    assert_eq!(crate::aging::sweep(&services, hour).await.unwrap(), 0, "it ended just now");
    assert_eq!(crate::aging::sweep(&services, Duration::ZERO).await.unwrap(), 1);
    assert_eq!(crate::aging::sweep(&services, Duration::ZERO).await.unwrap(), 0);
    let left = services.store.page(crate::store::Among::All, None, 9).await.unwrap();
    assert_eq!(left.iter().map(|job| job.id.as_str()).collect::<Vec<_>>(), ["b"]);
    assert!(!dir.path().join("controller/archive/a").exists());
}
