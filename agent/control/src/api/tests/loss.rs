//! What a controller keeps when its database is damaged, restored, or on a full disk.

use std::path::Path;

use super::*;

/// Damages the database so badly that nothing of it can be read.
fn wipe(dir: &Path) {
    for name in ["db", "db-wal", "db-shm", "db.redo"] {
        let path = dir.join("controller").join(name);
        if let Ok(file) = path.metadata() {
            std::fs::write(path, vec![0xa5; usize::try_from(file.len()).unwrap()]).unwrap();
        }
    }
}

fn is_describe(order: &v1::Order) -> bool {
    matches!(order.desired, Some(v1::order::Desired::Describe(_)))
}

/// Reports what was ordered, when the controller asks.
async fn describe(node: &mut Node, replica: &str, spec: v1::JobSpec) {
    node.until("the question what it is", |orders| {
        assert!(!orders.is_empty(), "orders that do not name it would end it");
        orders.iter().any(|order| order.replica == replica && is_describe(order))
    })
    .await;
    for held in &mut node.held {
        held.spec = Some(spec.clone());
    }
    node.report().await;
}

#[tokio::test]
async fn test_job_outlives_the_loss_of_everything_the_controller_knew() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    rig.submit("a").await;
    let mut node = Node::join(&rig, 2).await;
    node.ordered("a.1.0").await;
    node.step("a.1.0", ReplicaStep::Running).await;
    rig.until("a", |job| job.state == "Running").await;
    let held = node.held.clone();
    rig.kill().await;
    wipe(dir.path());

    let mut rig = Rig::start(dir.path()).await;
    let about =
        rig.nodes.list(v1::ListNodesRequest::default()).await.unwrap().into_inner().controller.unwrap();
    let [notice] = &about.notices[..] else { panic!("{:?}", about.notices) };
    assert!(notice.what.contains("damaged") && notice.fix.contains("db.damaged-1"), "{notice:?}");
    let mut node = Node::rejoin(&rig, 2, "boot-1", held).await;
    let early = node.deliver("a.1.0", outcome(0, b"")).await.unwrap_err();
    assert_eq!(early.code(), tonic::Code::Unavailable, "it may come again: {early}");
    describe(&mut node, "a.1.0", request("a")).await;
    node.ordered("a.1.0").await;
    assert_eq!(rig.get("a").await.state, "Running");
    assert!(rig.history("a").await[0].contains("no record of this job, but box has attempt 1"));
    node.deliver("a.1.0", outcome(0, b"")).await.unwrap();
    assert_eq!(rig.ended("a").await.state, "Completed");
    rig.stop().await;

    let mut rig = Rig::start(dir.path()).await;
    let again =
        rig.nodes.list(v1::ListNodesRequest::default()).await.unwrap().into_inner().controller.unwrap();
    assert_eq!((again.incarnation, again.notices), (about.incarnation, about.notices));
    std::fs::remove_file(dir.path().join("controller/db.damaged-1")).unwrap();
    let again =
        rig.nodes.list(v1::ListNodesRequest::default()).await.unwrap().into_inner().controller.unwrap();
    assert_eq!(again.notices, [], "who removed it has seen it");
    assert_eq!(rig.get("a").await.state, "Completed");
    rig.stop().await;
}

#[tokio::test]
async fn test_backup_that_is_older_than_a_running_job_ends_and_doubles_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 0).await; // it has no slot for it
    node.until("orders", |_| true).await;
    drop(node);
    rig.submit("a").await;
    rig.stop().await;
    let home = dir.path().join("controller");
    let backup = std::fs::read(home.join("db")).unwrap();

    let mut rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 2).await;
    node.ordered("a.1.0").await;
    node.step("a.1.0", ReplicaStep::Running).await;
    rig.until("a", |job| job.state == "Running").await;
    let held = node.held.clone();
    let known =
        rig.nodes.list(v1::ListNodesRequest::default()).await.unwrap().into_inner().controller.unwrap();
    rig.kill().await;
    // As if on another machine: the files of the one that was killed are still in use here.
    let other = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(other.path().join("controller/archive")).unwrap();
    std::fs::write(other.path().join("controller/db"), backup).unwrap();

    let mut rig = Rig::start(other.path()).await;
    let about =
        rig.nodes.list(v1::ListNodesRequest::default()).await.unwrap().into_inner().controller.unwrap();
    assert_ne!(about.incarnation, known.incarnation);
    assert!(about.notices[0].what.contains("restored from a backup"), "{:?}", about.notices);
    assert!(rig.get("a").await.detail.contains("box must first say"), "{}", rig.get("a").await.detail);
    let mut node = Node::rejoin(&rig, 2, "boot-1", held).await;
    node.ordered("a.1.0").await;
    let job = rig.get("a").await;
    assert_eq!((job.state.as_str(), job.epoch), ("Running", 1), "it was never started again");
    node.deliver("a.1.0", outcome(0, b"")).await.unwrap();
    assert_eq!(rig.ended("a").await.state, "Completed");
    rig.stop().await;
}

fn fill(path: &Path) {
    use std::io::Write;
    let mut file = std::fs::File::create(path).unwrap();
    for size in [65536, 4096, 1] {
        while file.write_all(&vec![1; size]).is_ok() {}
    }
}

#[tokio::test]
async fn test_full_disk_takes_no_new_job_and_ends_those_there_are() {
    let Some(small) = agent_fs::SmallDisk::mount("size=48m") else { return };
    let dir = small.path();
    let mut rig = Rig::start(dir).await;
    let mut node = Node::join(&rig, 2).await;
    for name in ["a", "b"] {
        rig.submit(name).await;
        node.ordered(&format!("{name}.1.0")).await;
        node.step(&format!("{name}.1.0"), ReplicaStep::Running).await;
    }
    fill(&dir.join("filler"));
    // Until the database itself has no room left.
    let mut last = None;
    for i in 0..2000 {
        let big = v1::JobSpec { command: "x".repeat(60_000), ..request(&format!("big-{i}")) };
        match rig.try_submit(&format!("big-{i}"), big).await {
            Ok(_) => {}
            Err(status) => {
                last = Some(agent_proto::fault(&status));
                break;
            }
        }
    }
    let fault = last.expect("the disk is full at some time");
    assert_eq!(fault.code, Code::ControllerStore, "{fault}");
    assert!(matches!(fault.retry, Retry::After(_)) && fault.fix.is_some(), "{fault:?}");

    assert_eq!(rig.get("a").await.state, "Running", "reads go on");
    assert!(rig.cancel("b").await.cancel_requested, "and so do cancels");
    node.deliver("a.1.0", outcome(0, b"")).await.unwrap();
    assert_eq!(rig.ended("a").await.state, "Completed");
    let about =
        rig.nodes.list(v1::ListNodesRequest::default()).await.unwrap().into_inner().controller.unwrap();
    assert!(about.notices[0].what.contains("disk of the controller is full"), "{:?}", about.notices);

    std::fs::remove_file(dir.join("filler")).unwrap();
    rig.submit("after").await;
    let about =
        rig.nodes.list(v1::ListNodesRequest::default()).await.unwrap().into_inner().controller.unwrap();
    assert_eq!(about.notices, [], "all is well again without a restart");
    rig.kill().await;

    let mut rig = Rig::start(dir).await;
    assert_eq!(rig.get("a").await.state, "Completed");
    assert!(rig.get("b").await.cancel_requested);
    assert_eq!(rig.get("after").await.state, "Queued");
    rig.stop().await;
}

#[tokio::test]
async fn test_nodes_are_drained_opened_and_written_off() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::with_lease(dir.path(), Duration::from_millis(600)).await;
    let mut node = Node::join(&rig, 2).await;
    let mut nodes = rig.nodes.clone();
    let mut want = async |node: &str, want: &str| {
        let request = v1::SetEligibilityRequest { node: node.into(), want: want.into() };
        nodes.set_eligibility(request).await.map(|node| node.into_inner().eligibility)
    };
    rig.submit("a").await;
    node.ordered("a.1.0").await;
    node.step("a.1.0", ReplicaStep::Running).await;
    rig.until("a", |job| job.state == "Running").await;
    assert_eq!(want("box", "drain").await.unwrap(), "draining");
    rig.submit("b").await;
    assert!(rig.get("b").await.detail.contains("is being drained"), "{}", rig.get("b").await.detail);
    assert_eq!(code(&want("nobody", "drain").await.unwrap_err()), Code::NodeUnknown);
    assert_eq!(code(&want("box", "dance").await.unwrap_err()), Code::RequestInvalid);
    let lost = v1::DeclareLostRequest { node: "box".into() };
    let refused = rig.nodes.declare_lost(lost.clone()).await.unwrap_err();
    assert_eq!(code(&refused), Code::NodeAnswers, "it answers");
    assert_eq!(want("box", "uncordon").await.unwrap(), "open");
    node.ordered("b.1.0").await;

    drop(node);
    rig.until("a", |job| job.state == "NotResponding").await;
    let asked = rig.cancel("b").await;
    assert!(asked.cancel_requested && asked.ended_ms == 0, "remembered, and answered at once");
    let mut jobs = rig.nodes.declare_lost(lost).await.unwrap().into_inner().jobs;
    jobs.sort();
    assert_eq!(jobs, ["a", "b"]);
    let a = rig.ended("a").await;
    assert_eq!((a.state.as_str(), a.outcome.unwrap().fault.unwrap().code.as_str()), ("Failed", "NODE-102"));
    assert_eq!(rig.ended("b").await.state, "Canceled");
    rig.stop().await;
}

/// The record of a job knows how long its log was, so what is gone of the archive is told and not shown as nothing.
#[tokio::test]
async fn test_what_is_gone_of_the_archive_is_told_after_what_there_is() {
    for (left, follows) in [(None, false), (None, true), (Some(4), false), (Some(4), true)] {
        let dir = tempfile::tempdir().unwrap();
        let mut rig = Rig::start(dir.path()).await;
        rig.submit("a").await;
        let mut node = Node::join(&rig, 1).await;
        node.ordered("a.1.0").await;
        node.append("a.1.0", "job", 0, b"one\ntwo\n").await;
        node.append("a.1.0", "tracking", 0, b"{1}\n{2}\n").await;
        node.deliver("a.1.0", v1::Outcome { tracking_bytes: 8, ..outcome(0, b"one\ntwo\n") }).await.unwrap();
        rig.ended("a").await;
        let read = v1::ReadLogRequest { follow: follows, ..follow("a") };
        assert_eq!(rig.read_log(read.clone()).await.unwrap().1, b"one\ntwo\n");
        rig.stop().await;

        for channel in ["job", "tracking"] {
            let file = dir.path().join(format!("controller/archive/a/1.0.{channel}"));
            match left {
                Some(left) => std::fs::File::options().write(true).open(file).unwrap().set_len(left).unwrap(),
                None => std::fs::remove_file(file).unwrap(),
            }
        }
        let mut rig = Rig::start(dir.path()).await;
        let mut stream = rig.telemetry.read_log(read).await.unwrap().into_inner();
        let (mut shown, mut end) = (Vec::new(), None);
        while end.is_none() {
            match within("the rest of the log", stream.message()).await {
                Ok(Some(chunk)) => shown.extend(chunk.data),
                Ok(None) => panic!("nothing was told"),
                Err(status) => end = Some(status),
            }
        }
        let (end, gone) = (end.unwrap(), if left.is_some() { "4 B" } else { "8 B" });
        assert_eq!(shown, if left.is_some() { &b"one\n"[..] } else { b"" });
        assert_eq!((end.code(), code(&end)), (tonic::Code::DataLoss, Code::ControllerStore), "{end}");
        assert!(end.message().contains(&format!("{gone} of 8 B of the job log are gone")), "{end}");
        let request = v1::ReadTrackingRequest { job: "a".into(), ..Default::default() };
        let mut stream = rig.telemetry.read_tracking(request).await.unwrap().into_inner();
        let told = loop {
            match within("the rest of the metrics", stream.message()).await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("nothing was told"),
                Err(status) => break status,
            }
        };
        assert!(told.message().contains("of the metrics are gone"), "{told}");
        rig.stop().await;
    }
}

/// A byte that was changed in the archive is told, wherever it is: also in the last end of a line, and in a rest that is
/// no line.
#[tokio::test]
async fn test_changed_metrics_are_told_after_what_there_is() {
    for (wrote, changed) in
        [("{1}\n{2}\n", Some(1)), ("{1}\n{2}\n", Some(7)), ("{1}\n{2", Some(5)), ("{1}\n{2", None)]
    {
        let dir = tempfile::tempdir().unwrap();
        let mut rig = Rig::start(dir.path()).await;
        rig.submit("a").await;
        let mut node = Node::join(&rig, 1).await;
        node.ordered("a.1.0").await;
        node.append("a.1.0", "job", 0, b"one\n").await;
        node.append("a.1.0", "tracking", 0, wrote.as_bytes()).await;
        let tracking_bytes = wrote.len() as u64;
        node.deliver("a.1.0", v1::Outcome { tracking_bytes, ..outcome(0, b"one\n") }).await.unwrap();
        rig.ended("a").await;
        if let Some(at) = changed {
            let file = std::fs::File::options()
                .write(true)
                .open(dir.path().join("controller/archive/a/1.0.tracking"));
            std::os::unix::fs::FileExt::write_all_at(&file.unwrap(), b"9", at).unwrap();
        }
        for follow in [false, true] {
            let request = v1::ReadTrackingRequest { job: "a".into(), follow, ..Default::default() };
            let mut stream = rig.telemetry.read_tracking(request).await.unwrap().into_inner();
            let end = loop {
                match within("the end of the metrics", stream.message()).await {
                    Ok(Some(_)) => {}
                    end => break end,
                }
            };
            match changed {
                None => assert!(end.is_ok(), "{end:?}"),
                Some(at) => {
                    let told = end.expect_err(&format!("{wrote:?} changed at {at}"));
                    assert!(told.message().contains("of the metrics are not what the job wrote"), "{told}");
                }
            }
        }
        rig.stop().await;
    }
}
