//! Outputs that are stored after their job ended.

use agent_cas::snapshot;

use super::*;

/// A job of this name that ended without its outputs, and its node.
async fn unstored(rig: &mut Rig, name: &str) -> Node {
    let mut node = Node::join(rig, 1).await;
    rig.submit(name).await;
    let replica = format!("{name}.1.0");
    node.ordered(&replica).await;
    node.step(&replica, ReplicaStep::Uploading).await;
    let fault = Fault::new(Code::OutputsUnstored, "the outputs could not be stored");
    let failed = v1::Outcome { verdict: "failed".into(), fault: Some(fault.into()), ..outcome(0, b"") };
    node.deliver(&replica, failed).await.unwrap();
    rig.ended(name).await;
    node
}

/// Asks for the outputs of a job.
fn ask(rig: &Rig, job: &str) -> JoinSet<Result<v1::StoreOutputsResponse, Status>> {
    let (mut nodes, request) = (rig.nodes.clone(), v1::StoreOutputsRequest { job: job.into() });
    let mut calls = JoinSet::new();
    calls.spawn(async move {
        let mut told = nodes.store_outputs(request).await?.into_inner();
        Ok(told.message().await?.expect("one message"))
    });
    calls
}

async fn answer(mut calls: JoinSet<Result<v1::StoreOutputsResponse, Status>>) -> Result<(u64, u64), Status> {
    let answer = within("an answer", calls.join_next()).await.unwrap().unwrap()?;
    Ok((answer.files, answer.bytes))
}

/// Waits until these outputs are wanted of the node.
async fn wanted(node: &mut Node, replicas: &[&str]) {
    within("orders about outputs", async {
        loop {
            node.report().await;
            let orders = node.orders.message().await.unwrap().expect("orders go on");
            if orders.outputs == replicas {
                return;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn test_outputs_that_are_stored_later_are_those_of_the_job_that_ended() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let mut node = Box::pin(unstored(&mut rig, "late")).await;
    let left = dir.path().join("outputs");
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("model"), "weights").unwrap();
    let scanned = snapshot::scan(&left).unwrap();

    // A failure is returned as the node reports it, and outputs that are not in the store are not accepted.
    let calls = ask(&rig, "late");
    wanted(&mut node, &["late.1.0"]).await;
    let fault = Fault::new(Code::OutputsUnstored, "still not");
    node.tell_outputs("late.1.0", Err(fault)).await.unwrap();
    assert_eq!(code_of(answer(calls).await), Code::OutputsUnstored);
    wanted(&mut node, &[]).await;
    let artifacts = v1::Artifacts { root: scanned.root.to_string(), files: 1, bytes: 7 };
    let calls = ask(&rig, "late");
    wanted(&mut node, &["late.1.0"]).await;
    node.tell_outputs("late.1.0", Ok(Some(artifacts.clone()))).await.unwrap();
    assert_eq!(code_of(answer(calls).await), Code::SnapshotMissing);
    wanted(&mut node, &[]).await; // or the order of this request is taken for that of the next

    snapshot::push(&scanned, &rig.blobs().await, |_| {}).await.unwrap();
    let calls = ask(&rig, "late");
    wanted(&mut node, &["late.1.0"]).await;
    node.tell_outputs("late.1.0", Ok(Some(artifacts.clone()))).await.unwrap();
    assert_eq!(answer(calls).await.unwrap(), (1, 7));
    rig.kill().await;
    let mut rig = Rig::start(dir.path()).await;
    let job = rig.get("late").await;
    let outcome = job.outcome.unwrap();
    assert_eq!((job.state.as_str(), outcome.artifacts), ("Failed", Some(artifacts)));
    assert!(outcome.fault.unwrap().fix.contains("agentctl download late"));
    assert!(rig.history("late").await.contains(&"stored 1 file, 7 B, later".to_owned()));
    rig.stop().await;
}

#[tokio::test]
async fn test_outputs_are_stored_later_only_where_they_may_be() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    assert_eq!(code_of(answer(ask(&rig, "nobody")).await), Code::JobNotFound);
    let mut node = Box::pin(unstored(&mut rig, "late")).await;
    rig.submit("waits").await;
    assert_eq!(code_of(answer(ask(&rig, "waits")).await), Code::RequestInvalid);
    // No outputs are accepted for an attempt that did not end its job.
    let fenced = node.tell_outputs("late.2.0", Ok(None)).await.unwrap_err();
    assert_eq!(code(&fenced), Code::Fenced);
    // A request that nobody waits for is withdrawn.
    let calls = ask(&rig, "late");
    wanted(&mut node, &["late.1.0"]).await;
    drop(calls);
    wanted(&mut node, &[]).await;
    drop(node);
    let away = within("the node to be gone", async {
        loop {
            let mut calls = ask(&rig, "late");
            let answer = tokio::time::timeout(Duration::from_millis(300), calls.join_next()).await;
            if let Ok(answer) = answer {
                return answer.unwrap().unwrap().unwrap_err();
            }
        }
    });
    assert_eq!(code(&away.await), Code::NodeLost);
    rig.stop().await;
}

#[tokio::test]
async fn test_outputs_so_far_are_only_told() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 1).await;
    rig.submit("runs").await;
    node.ordered("runs.1.0").await;
    assert_eq!(code_of(answer(ask(&rig, "runs")).await), Code::RequestInvalid, "it prepares");
    node.step("runs.1.0", ReplicaStep::Running).await;
    rig.until("runs", |job| job.state == "Running").await;
    let mut calls = ask(&rig, "runs");
    within("an order", async {
        loop {
            node.report().await;
            let orders = node.orders.message().await.unwrap().expect("orders go on");
            if orders.running_outputs == ["runs.1.0"] {
                assert!(orders.outputs.is_empty());
                return;
            }
        }
    })
    .await;
    // What a node says of outputs after the end is no answer to this.
    let fenced = node.tell_outputs("runs.1.0", Ok(None)).await.unwrap_err();
    assert_eq!(code(&fenced), Code::Fenced);
    let artifacts = v1::Artifacts { root: agent_cas::digest_of(b"tree").to_string(), files: 2, bytes: 9 };
    node.tell_outputs_so_far("runs.1.0", artifacts.clone(), "outputs/x cannot be read").await.unwrap();
    let told = within("an answer", calls.join_next()).await.unwrap().unwrap().unwrap();
    let [so_far] = &told.so_far[..] else { panic!("{told:?}") };
    assert_eq!((so_far.rank, so_far.artifacts.clone()), (0, Some(artifacts)));
    assert_eq!(so_far.left_out, ["outputs/x cannot be read"]);
    let job = rig.get("runs").await;
    assert!(job.outcome.is_none() && job.state == "Running", "{job:?}");
    rig.stop().await;
}

fn code_of(answer: Result<(u64, u64), Status>) -> Code {
    code(&answer.unwrap_err())
}
