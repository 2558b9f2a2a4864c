//! The whole controller over a real socket, with a node that does what the test says.

mod access;
mod blobs;
mod environments;
mod loss;
mod named;
mod outputs;
mod removal;
mod rig;

use std::time::{Duration, Instant};

use agent_model::{Code, Digest, Fault, ReplicaStep, Retry};
use agent_proto::v1;
use futures_util::{StreamExt, stream};
use tokio::task::JoinSet;
use tonic::Status;

use rig::{Node, Rig, follow, outcome, request, within};

fn code(status: &Status) -> Code {
    agent_proto::fault(status).code
}

/// A failure after which another attempt may succeed.
fn mendable() -> v1::Outcome {
    let fault = Fault::new(Code::LaunchFailed, "no luck").with_retry(Retry::SameNode);
    v1::Outcome { fault: Some(fault.into()), ..outcome(1, b"first\n") }
}

fn retrying(name: &str) -> v1::JobSpec {
    let backoff = Some(prost_types::Duration { seconds: 0, nanos: 0 });
    v1::JobSpec { retry: Some(v1::Retry { max_attempts: 2, backoff }), ..request(name) }
}

#[tokio::test]
async fn test_one_job_from_submission_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    rig.submit("a").await;
    assert_eq!(rig.get("a").await.detail, "no node has joined yet");
    let mut watch = rig.watch("a").await;
    let mut node = Node::join(&rig, 2).await;
    node.ordered("a.1.0").await;
    let mut reader = JoinSet::from_iter([rig.read_log(follow("a"))]);

    for step in [ReplicaStep::Accepted, ReplicaStep::Fetching, ReplicaStep::Building, ReplicaStep::Running] {
        node.step("a.1.0", step).await;
    }
    let running = rig.until("a", |job| job.state == "Running").await;
    assert_eq!((running.epoch, running.started_ms, running.detail.as_str()), (1, 5, "running"));
    assert_eq!((running.replicas[0].node.as_str(), running.replicas[0].step.as_str()), ("box", "Running"));
    assert_eq!(node.append("a.1.0", "job", 0, b"hello\n").await, 6);
    node.deliver("a.1.0", outcome(0, b"hello\n")).await.unwrap();

    let mut states = Vec::new();
    while let Some(job) = within("the watch to end", watch.message()).await.unwrap() {
        states.push(job.state);
    }
    assert_eq!(states.last().unwrap(), "Completed");
    let (epochs, log) = reader.join_next().await.unwrap().unwrap().unwrap();
    assert_eq!((epochs, log), (vec![1], b"hello\n".to_vec()));
    let ended = rig.get("a").await;
    assert_eq!(ended.outcome.unwrap().exit.unwrap().kind, Some(v1::exit::Kind::Code(0)));
    node.forgets("a.1.0").await;
    let history = rig.history("a").await;
    for said in
        ["queued by uid ", "waits: no node", "placed on box as attempt 1", "running", "ended: Completed"]
    {
        assert!(history.iter().any(|text| text.starts_with(said)), "{said:?} is not in {history:?}");
    }
    rig.stop().await;
}

#[tokio::test]
async fn test_cancel_ends_a_job_in_every_state() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    rig.submit("queued").await;
    let job = rig.cancel("queued").await;
    assert_eq!((job.state.as_str(), job.outcome.unwrap().verdict.as_str()), ("Canceled", "canceled"));
    assert!(rig.history("queued").await.iter().any(|text| text.starts_with("canceled by uid ")));

    let mut node = Node::join(&rig, 1).await;
    let steps = [None, Some(ReplicaStep::Building), Some(ReplicaStep::Running), Some(ReplicaStep::Uploading)];
    for (i, step) in steps.into_iter().enumerate() {
        let name = format!("j{i}");
        let replica = format!("{name}.1.0");
        rig.submit(&name).await;
        node.ordered(&replica).await;
        if let Some(step) = step {
            node.step(&replica, step).await;
            rig.until(&name, |job| job.replicas[0].step == step.to_string()).await;
        }
        let job = rig.cancel(&name).await;
        assert_eq!((job.state.as_str(), job.cancel_requested), ("Finalizing", true));
        let orders = node.until("the order to stop", |orders| {
            matches!(orders, [v1::Order { desired: Some(v1::order::Desired::Stop(_)), .. }])
        });
        let Some(v1::order::Desired::Stop(stop)) = &orders.await[0].desired else { unreachable!() };
        assert!(stop.reason.starts_with("canceled by uid "));
        assert_eq!(stop.grace, Some(prost_types::Duration { seconds: 30, nanos: 0 }));
        rig.cancel(&name).await; // again: nothing changes
        let late = v1::Outcome { streams: Vec::new(), ..outcome(0, b"") };
        node.deliver(&replica, late).await.unwrap();
        assert_eq!(rig.ended(&name).await.state, "Canceled", "a fixed verdict stays");
        assert_eq!(rig.cancel(&name).await.state, "Canceled");
        node.forgets(&replica).await;
        let asked = rig.history(&name).await.iter().filter(|text| text.contains("canceled by")).count();
        assert_eq!(asked, 1);
    }
    rig.stop().await;
}

#[tokio::test]
async fn test_submission_counts_once_and_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let first = rig.try_submit("r1", request("")).await.unwrap();
    assert!(first.starts_with("hint-"), "{first}");
    assert_eq!(rig.try_submit("r1", request("")).await.unwrap(), first);
    rig.cancel(&first).await;
    assert_eq!(rig.try_submit("r1", request("")).await.unwrap(), first, "also after its end");

    rig.submit("a").await;
    assert_eq!(code(&rig.try_submit("other", request("a")).await.unwrap_err()), Code::JobConflict);
    let lost = Digest { size: 7, ..Digest::EMPTY }.to_string();
    let spec = v1::JobSpec { code: lost, ..request("b") };
    assert_eq!(code(&rig.try_submit("r2", spec).await.unwrap_err()), Code::SnapshotMissing);
    assert_eq!(code(&rig.try_submit("", request("b")).await.unwrap_err()), Code::RequestInvalid);
    let spec = v1::JobSpec { command: String::new(), ..request("b") };
    assert_eq!(code(&rig.try_submit("r3", spec).await.unwrap_err()), Code::JobInvalid);
    let unknown =
        rig.jobs.get(v1::GetJobRequest { job: "b".into(), ..Default::default() }).await.unwrap_err();
    assert_eq!(code(&unknown), Code::JobNotFound);

    rig.kill().await;
    let mut rig = Rig::start(dir.path()).await;
    assert_eq!(rig.try_submit("r1", request("")).await.unwrap(), first, "also after a restart");
    assert_eq!(rig.get("a").await.state, "Queued");
    rig.stop().await;
}

#[tokio::test]
async fn test_outcome_counts_only_with_its_whole_log() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    rig.submit("a").await;
    let mut node = Node::join(&rig, 1).await;
    node.ordered("a.1.0").await;
    node.step("a.1.0", ReplicaStep::Uploading).await;
    let whole = v1::Outcome { tracking_bytes: 3, ..outcome(0, b"hello world\n") };

    let refused = |status: Status| {
        assert_eq!(status.code(), tonic::Code::FailedPrecondition);
        assert_ne!(code(&status), Code::Fenced);
        status.message().to_owned()
    };
    assert_eq!(node.append("a.1.0", "job", 0, b"hello").await, 5);
    assert!(refused(node.deliver("a.1.0", whole.clone()).await.unwrap_err()).contains("5 of 12"));
    assert_eq!(node.append("a.1.0", "job", 9, b"ld\n").await, 5, "a gap stores nothing");
    assert_eq!(node.append("a.1.0", "job", 0, b"hello_world\n").await, 12, "an overlap is trimmed");
    assert!(refused(node.deliver("a.1.0", whole.clone()).await.unwrap_err()).contains("0 of 12"));
    assert_eq!(node.append("a.1.0", "job", 12, b"").await, 0, "wrong content is dropped");
    assert_eq!(node.append("a.1.0", "job", 0, b"hello world\n").await, 12);
    assert!(refused(node.deliver("a.1.0", whole.clone()).await.unwrap_err()).contains("tracking"));
    assert_eq!(node.append("a.1.0", "tracking", 0, b"{}\n").await, 3);
    let root = Digest { size: 9, ..Digest::EMPTY }.to_string();
    let artifacts = Some(v1::Artifacts { root, files: 1, bytes: 9 });
    let early = v1::Outcome { artifacts, ..whole.clone() };
    assert!(refused(node.deliver("a.1.0", early).await.unwrap_err()).contains("outputs"));

    node.deliver("a.1.0", whole.clone()).await.unwrap();
    node.deliver("a.1.0", whole.clone()).await.unwrap();
    node.forgets("a.1.0").await;
    node.deliver("a.1.0", whole).await.unwrap();
    assert_eq!(node.append("a.1.0", "job", 12, b"more").await, 12, "a finished log stays as it is");
    assert_eq!(rig.get("a").await.state, "Completed");
    let (_, log) = rig.read_log(follow("a")).await.unwrap();
    assert_eq!(log, b"hello world\n");
    rig.stop().await;
}

#[tokio::test]
async fn test_second_attempt_fences_the_first_and_its_log_follows() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    rig.try_submit("r", retrying("a")).await.unwrap();
    let mut node = Node::join(&rig, 1).await;
    node.ordered("a.1.0").await;
    let mut reader = JoinSet::from_iter([rig.read_log(follow("a"))]);
    node.append("a.1.0", "job", 0, b"first\n").await;
    node.step("a.1.0", ReplicaStep::Running).await;
    node.deliver("a.1.0", mendable()).await.unwrap();
    node.ordered("a.2.0").await;
    node.deliver("a.1.0", mendable()).await.unwrap(); // still held: repeated, not stale
    node.forgets("a.1.0").await;
    node.until("the first to be forgotten", |orders| orders.len() == 1).await;
    let stale = node.deliver("a.1.0", outcome(0, b"first\n")).await.unwrap_err();
    assert_eq!((stale.code(), code(&stale)), (tonic::Code::FailedPrecondition, Code::Fenced));

    node.append("a.2.0", "job", 0, b"second\n").await;
    node.deliver("a.2.0", outcome(3, b"second\n")).await.unwrap();
    let job = rig.ended("a").await;
    assert_eq!((job.state.as_str(), job.epoch), ("Failed", 2));
    let stale = node.deliver("a.1.0", outcome(0, b"first\n")).await.unwrap_err();
    assert_eq!(code(&stale), Code::Fenced);
    let (epochs, log) = reader.join_next().await.unwrap().unwrap().unwrap();
    assert_eq!((epochs, log), (vec![1, 2], b"first\nsecond\n".to_vec()));
    let first = v1::ReadLogRequest { epoch: 1, follow: false, ..follow("a") };
    assert_eq!(rig.read_log(first).await.unwrap().1, b"first\n");
    rig.stop().await;
}

#[tokio::test]
async fn test_restart_in_the_middle_changes_nothing_for_the_job() {
    for orderly in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let mut rig = Rig::start(dir.path()).await;
        rig.submit("a").await;
        rig.submit("b").await;
        let mut node = Node::join(&rig, 1).await;
        node.ordered("a.1.0").await;
        node.step("a.1.0", ReplicaStep::Running).await;
        rig.until("a", |job| job.state == "Running").await;
        node.append("a.1.0", "job", 0, b"before\n").await;
        let held = node.held.clone();
        if orderly {
            rig.stop().await
        } else {
            rig.kill().await
        }

        let mut rig = Rig::start(dir.path()).await;
        assert!(["Preparing", "Running"].contains(&rig.get("a").await.state.as_str()));
        assert!(rig.get("b").await.detail.contains("box is not connected"));
        let mut node = Node::rejoin(&rig, 1, "boot-1", held).await;
        node.ordered("a.1.0").await;
        rig.until("a", |job| job.state == "Running" && job.epoch == 1).await;
        assert_eq!(node.append("a.1.0", "job", 0, b"").await, 7);
        assert_eq!(node.append("a.1.0", "job", 7, b"after\n").await, 13);
        node.deliver("a.1.0", outcome(0, b"before\nafter\n")).await.unwrap();
        rig.kill().await;

        let mut rig = Rig::start(dir.path()).await;
        assert_eq!(rig.get("a").await.state, "Completed");
        let mut node = Node::rejoin(&rig, 1, "boot-1", node.held).await;
        node.deliver("a.1.0", outcome(0, b"before\nafter\n")).await.unwrap();
        node.forgets("a.1.0").await;
        node.until("the next job", |orders| orders.len() == 1 && orders[0].replica == "b.1.0").await;
        let history = rig.history("a").await;
        let once = |word: &str| history.iter().filter(|text| text.starts_with(word)).count();
        assert_eq!((once("queued"), once("placed"), once("ended")), (1, 1, 1), "{history:?}");
        rig.stop().await;
    }
}

#[tokio::test]
async fn test_node_that_restarted_without_the_job_loses_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    rig.try_submit("r", retrying("a")).await.unwrap();
    let mut node = Node::join(&rig, 1).await;
    node.ordered("a.1.0").await;
    node.step("a.1.0", ReplicaStep::Running).await;
    rig.until("a", |job| job.state == "Running").await;

    let mut node = Node::rejoin(&rig, 1, "boot-2", Vec::new()).await;
    let wait = rig.until("a", |job| job.epoch == 2).await;
    assert_eq!(wait.state, "Preparing");
    node.ordered("a.2.0").await;
    let stale = node.deliver("a.1.0", v1::Outcome { streams: vec![], ..outcome(0, b"") }).await.unwrap_err();
    assert_eq!(code(&stale), Code::Fenced);
    node.step("a.2.0", ReplicaStep::Running).await;
    node.drop_replica("a.2.0").await; // same boot, but it does not know the job any more
    let job = rig.ended("a").await;
    assert_eq!(job.state, "Failed");
    assert_eq!(job.outcome.unwrap().fault.unwrap().code, Code::NodeLost.as_str());
    let stale = node.deliver("a.2.0", v1::Outcome { streams: vec![], ..outcome(0, b"") }).await.unwrap_err();
    assert_eq!(code(&stale), Code::Fenced);
    assert!(rig.history("a").await.iter().any(|text| text.contains(Code::NodeRebooted.as_str())));
    rig.stop().await;
}

#[tokio::test]
async fn test_silent_node_keeps_its_job_until_it_speaks_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::with_lease(dir.path(), Duration::from_secs(1)).await;
    rig.submit("a").await;
    let mut node = Node::join(&rig, 1).await;
    node.ordered("a.1.0").await;
    node.step("a.1.0", ReplicaStep::Running).await;
    let silent = rig.until("a", |job| job.state == "NotResponding").await;
    assert!(silent.detail.contains("does not answer"));
    let nodes = rig.nodes.list(v1::ListNodesRequest::default()).await.unwrap().into_inner();
    assert_eq!((nodes.nodes[0].liveness.as_str(), nodes.nodes[0].slots_used), ("not_responding", 1));
    assert_eq!((nodes.controller.unwrap().running, nodes.nodes.len()), (1, 1));
    node.report().await;
    let again = rig.until("a", |job| job.state == "Running").await;
    assert_eq!(again.epoch, 1);
    rig.until("a", |job| job.state == "NotResponding").await;
    node.deliver("a.1.0", v1::Outcome { streams: vec![], ..outcome(0, b"") }).await.unwrap();
    assert_eq!(rig.ended("a").await.state, "Completed");
    rig.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn test_two_hundred_jobs_on_two_slots_run_once_and_in_order() {
    const JOBS: usize = 200;
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 2).await;
    let begun = Instant::now();
    let mut submissions = JoinSet::new();
    for i in 0..JOBS {
        let mut jobs = rig.jobs.clone();
        let spec = Some(request(&format!("j{i:03}")));
        submissions.spawn(async move {
            let request = v1::SubmitRequest { request_id: format!("r{i}"), spec, name_hint: String::new() };
            jobs.submit(request).await.unwrap();
        });
    }
    let mut ran: Vec<String> = Vec::new();
    let mut frames: Vec<usize> = Vec::new(); // how many jobs were given at once: among those there is no order
    while ran.len() < JOBS || !node.held.is_empty() {
        let orders = within("orders", node.orders.message()).await.unwrap().unwrap().orders;
        assert!(
            orders.iter().filter(|order| matches!(order.desired, Some(v1::order::Desired::Run(_)))).count()
                <= 2
        );
        let forgotten = |held: &v1::HeldReplica| {
            orders.iter().any(|order| {
                order.replica == held.replica && matches!(order.desired, Some(v1::order::Desired::Forget(_)))
            })
        };
        let before = node.held.len();
        node.held.retain(|held| !forgotten(held));
        if node.held.len() != before {
            node.report().await;
        }
        let known = ran.len();
        for order in &orders {
            if matches!(order.desired, Some(v1::order::Desired::Run(_))) && !ran.contains(&order.replica) {
                ran.push(order.replica.clone());
                node.step(&order.replica, ReplicaStep::Running).await;
                node.append(&order.replica, "job", 0, order.replica.as_bytes()).await;
                node.deliver(&order.replica, outcome(0, order.replica.as_bytes())).await.unwrap();
            }
        }
        frames.push(ran.len() - known);
    }
    println!("{JOBS} jobs in {:?}", begun.elapsed());
    let page = v1::ListJobsRequest { limit: 1000, ..Default::default() };
    let listed = rig.jobs.list(page).await.unwrap().into_inner();
    let mut oldest_first: Vec<String> =
        listed.jobs.iter().rev().map(|job| format!("{}.1.0", job.job)).collect();
    let mut from = 0;
    for together in frames {
        ran[from..from + together].sort();
        oldest_first[from..from + together].sort();
        from += together;
    }
    assert_eq!(ran, oldest_first, "each once, in the order of submission");
    assert!(listed.jobs.iter().all(|job| job.state == "Completed") && !listed.more);
    rig.stop().await;
}

#[tokio::test]
async fn test_list_goes_newest_first_in_pages() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    for name in ["a", "b", "c", "d"] {
        rig.submit(name).await;
    }
    rig.cancel("b").await;
    let mut page = async |limit, active, after: &str| {
        let request = v1::ListJobsRequest { limit, active, after: after.into(), ..Default::default() };
        let answer = rig.jobs.list(request).await.unwrap().into_inner();
        (answer.jobs.into_iter().map(|job| job.job).collect::<Vec<_>>().join(""), answer.more)
    };
    assert_eq!(page(3, false, "").await, ("dcb".into(), true));
    assert_eq!(page(3, false, "b").await, ("a".into(), false));
    assert_eq!(page(2, true, "").await, ("dc".into(), true));
    assert_eq!(page(0, true, "c").await, ("a".into(), false));
    rig.stop().await;
}

/// What runs or waits is first whatever ended since, and each filter is answered by the controller.
#[tokio::test]
async fn test_list_begins_with_what_stands_and_is_narrowed() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let of = |name: &str, experiment: &str| v1::JobSpec { experiment: experiment.into(), ..request(name) };
    rig.try_submit("1", of("train-a", "one")).await.unwrap();
    rig.try_submit("2", of("train-b", "two")).await.unwrap();
    for name in ["gone-1", "gone-2", "gone-3"] {
        rig.try_submit(name, of(name, "two")).await.unwrap();
        rig.cancel(name).await;
    }
    let hold = v1::HoldJobRequest { job: "train-a".into(), held: true };
    rig.jobs.hold(hold).await.unwrap();
    let own = rig.cancel("gone-1").await.owner;
    let mut ask = async |request: v1::ListJobsRequest| {
        let answer = rig.jobs.list(request).await.unwrap().into_inner();
        let names: Vec<String> = answer.jobs.into_iter().map(|job| job.job).collect();
        (names.join(" "), answer.more)
    };
    let all = || v1::ListJobsRequest { standing: true, ..Default::default() };
    assert_eq!(ask(all()).await.0, "train-b train-a gone-3 gone-2 gone-1");
    let two = v1::ListJobsRequest { limit: 2, ..all() };
    assert_eq!(ask(two.clone()).await, ("train-b train-a".into(), true));
    let next = v1::ListJobsRequest { after: "train-a".into(), ..two.clone() };
    assert_eq!(ask(next).await, ("gone-3 gone-2".into(), true));
    let last = v1::ListJobsRequest { after: "gone-2".into(), ..two };
    assert_eq!(ask(last).await, ("gone-1".into(), false));

    let canceled = v1::ListJobsRequest { states: vec!["Canceled".into()], limit: 2, ..all() };
    assert_eq!(ask(canceled).await, ("gone-3 gone-2".into(), true));
    let queued = v1::ListJobsRequest { states: vec!["Queued".into()], ..Default::default() };
    assert_eq!(ask(queued).await.0, "train-b train-a");
    let failed = v1::ListJobsRequest { states: vec!["Failed".into()], ..all() };
    assert_eq!(ask(failed).await, (String::new(), false));
    let of_two = v1::ListJobsRequest { experiment: "two".into(), ..Default::default() };
    assert_eq!(ask(of_two).await.0, "gone-3 gone-2 gone-1 train-b");
    let mine = v1::ListJobsRequest { owners: vec![own], limit: 1, ..Default::default() };
    assert_eq!(ask(mine).await, ("gone-3".into(), true));
    let theirs = v1::ListJobsRequest { owners: vec!["uid 4242".into(), "user ada".into()], ..all() };
    assert_eq!(ask(theirs).await, (String::new(), false));

    let begins = |begins: &str, limit| v1::ListJobsRequest { begins: begins.into(), limit, ..all() };
    assert_eq!(ask(begins("train", 9)).await, ("train-a train-b".into(), false));
    assert_eq!(ask(begins("gone", 2)).await, ("gone-1 gone-2".into(), true));
    assert_eq!(ask(begins("x", 2)).await, (String::new(), false));
    let wrong = v1::ListJobsRequest { owners: vec!["ada".into()], ..all() };
    let refused = rig.jobs.list(wrong).await.unwrap_err();
    assert!(refused.message().contains("`ada` is nobody"), "{refused}");
    rig.stop().await;
}

#[tokio::test]
async fn test_gang_waits_with_words_and_others_pass() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let resources = |nodes, gpus| Some(v1::Resources { nodes, gpus, ..Default::default() });
    rig.try_submit("r1", v1::JobSpec { resources: resources(2, 0), ..request("gang") }).await.unwrap();
    rig.try_submit("r2", v1::JobSpec { resources: resources(1, 4), ..request("gpus") }).await.unwrap();
    for name in ["a", "b", "c", "d"] {
        rig.submit(name).await;
    }
    let mut node = Node::join(&rig, 2).await;
    node.ordered("b.1.0").await;
    assert!(rig.get("gang").await.detail.contains("2 nodes at once"));
    assert!(rig.get("gpus").await.detail.contains("box has 2 slots, 0 GPUs"));
    assert_eq!(rig.get("c").await.detail, "next in line, both slots of box busy: a, b");
    assert_eq!(rig.get("d").await.detail, "1 job ahead, both slots of box busy: a, b");
    let mut watch = rig.watch("d").await;
    within("the first view", watch.message()).await.unwrap();
    node.deliver("a.1.0", v1::Outcome { streams: vec![], ..outcome(0, b"") }).await.unwrap();
    let moved = within("the reason to change", watch.message()).await.unwrap().unwrap();
    assert_eq!(moved.detail, "next in line, both slots of box busy: b, c");
    let said = rig.history("d").await.iter().filter(|text| text.starts_with("waits: 1 job ahead")).count();
    assert!(said <= 1, "numbers alone are no news");
    rig.stop().await;
}

#[tokio::test]
async fn test_newer_stream_speaks_for_the_node() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let mut old = Node::join(&rig, 1).await;
    old.until("first orders", |_| true).await;
    let mut new = Node::join(&rig, 1).await;
    rig.submit("a").await;
    new.ordered("a.1.0").await;
    new.step("a.1.0", ReplicaStep::Running).await;
    rig.until("a", |job| job.state == "Running").await;
    let ended = within("the old stream to end", async {
        loop {
            match old.orders.message().await {
                Ok(Some(_)) => {}
                other => return other,
            }
        }
    });
    assert_eq!(ended.await.unwrap_err().code(), tonic::Code::Aborted);
    assert_eq!(rig.get("a").await.state, "Running");
    rig.stop().await;
}

#[tokio::test]
async fn test_tail_and_tracking_give_whole_lines() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    rig.submit("a").await;
    let mut node = Node::join(&rig, 1).await;
    node.ordered("a.1.0").await;
    node.append("a.1.0", "job", 0, b"one\ntwo\nthree\nfo").await;
    for (lines, expected) in [(1, "fo"), (2, "three\nfo"), (9, "one\ntwo\nthree\nfo")] {
        let request = v1::ReadLogRequest { tail_lines: lines, follow: false, ..follow("a") };
        assert_eq!(String::from_utf8(rig.read_log(request).await.unwrap().1).unwrap(), expected);
    }
    node.append("a.1.0", "tracking", 0, b"{1}\n{2}\n{3").await;
    let request = v1::ReadTrackingRequest { job: "a".into(), follow: true, ..Default::default() };
    let mut stream = rig.telemetry.read_tracking(request).await.unwrap().into_inner();
    let mut next = async || within("tracking", stream.message()).await.unwrap();
    assert_eq!(next().await.unwrap().lines, &b"{1}\n{2}\n"[..]);
    node.append("a.1.0", "tracking", 10, b"}\n").await;
    let chunk = next().await.unwrap();
    assert_eq!((chunk.offset, &chunk.lines[..]), (8, &b"{3}\n"[..]));
    node.append("a.1.0", "tracking", 12, b"torn").await;
    let log = b"one\ntwo\nthree\nfo";
    node.deliver("a.1.0", v1::Outcome { tracking_bytes: 16, ..outcome(0, log) }).await.unwrap();
    assert_eq!(next().await, None, "half a line at the end is no record");
    rig.stop().await;
}

#[tokio::test]
async fn test_refused_append_is_the_one_after_the_last_answer() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    rig.submit("a").await;
    let mut node = Node::join(&rig, 1).await;
    node.ordered("a.1.0").await;
    node.send_append("a.1.0", "job", 0, b"one".to_vec()).await;
    node.send_append("a.1.0", "job", 3, b"two".to_vec()).await;
    node.send_append("a.0.0", "job", 0, b"never placed".to_vec()).await;
    node.send_append("a.1.0", "job", 6, b"behind".to_vec()).await;
    assert!(node.stored().await.unwrap() >= 3);
    assert_eq!(node.stored().await.unwrap(), 6);
    assert_eq!(code(&node.stored().await.unwrap_err()), Code::Fenced);
    rig.stop().await;
}

#[tokio::test]
async fn test_node_of_the_same_process_is_answered_and_refused_as_others_are() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    rig.submit("a").await;
    let mut node = Node::join(&rig, 1).await;
    node.ordered("a.1.0").await;
    let request = |replica: &str, offset, data: &'static str| v1::AppendRequest {
        replica: replica.into(),
        channel: "job".into(),
        offset,
        data: data.into(),
    };
    let all =
        [request("a.1.0", 0, "one\n"), request("a.1.0", 4, "two\n"), request("a.0.0", 0, "never placed")];
    let answers: Vec<_> = rig.intake.append(stream::iter(all)).collect().await;
    let stored: Vec<_> = answers[..2].iter().map(|answer| answer.as_ref().unwrap()).collect();
    assert_eq!((stored[0].end, stored[1].end, stored[1].stored), (4, 8, 8));
    assert!(stored[0].stored >= 4);
    assert_eq!((answers.len(), code(answers[2].as_ref().unwrap_err())), (3, Code::Fenced));
    let request = v1::ReadLogRequest { follow: false, ..follow("a") };
    assert_eq!(rig.read_log(request).await.unwrap().1, b"one\ntwo\n");
    rig.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn test_every_line_is_answered_and_followed_while_others_are_forced() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    let mut node = Node::join(&rig, 2).await;
    for job in ["a", "b"] {
        rig.submit(job).await;
        node.ordered(&format!("{job}.1.0")).await;
    }
    let mut streams = Vec::new();
    for job in ["a", "b"] {
        streams.push(rig.telemetry.read_log(follow(job)).await.unwrap().into_inner());
    }
    for round in 0..100_u64 {
        // Nobody waits for the answers: the follower has a line without any.
        for (job, stream) in ["a", "b"].into_iter().zip(&mut streams) {
            let line = format!("{round:04} {job}\n");
            node.send_append(&format!("{job}.1.0"), "job", round * 7, line.clone().into_bytes()).await;
            let chunk = within("a line", stream.message()).await.unwrap().unwrap();
            assert_eq!((chunk.offset, &chunk.data[..]), (round * 7, line.as_bytes()));
        }
        if round % 7 == 6 {
            for earlier in (round - 6..=round).flat_map(|round| [round, round]) {
                assert!(node.stored().await.unwrap() >= 7 * earlier + 7);
            }
        }
    }
    rig.stop().await;
}

/// How fast a log gets from a node, through the archive, to a follower. `--release` gives the figure.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn test_large_log_reaches_the_follower_whole() {
    let total: usize = if cfg!(debug_assertions) { 8 << 20 } else { 200 << 20 };
    const PIECE: usize = 256 << 10;
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(dir.path()).await;
    rig.submit("a").await;
    let mut node = Node::join(&rig, 1).await;
    node.ordered("a.1.0").await;
    let data: Vec<u8> =
        (0..total).map(|i| if i % 100 == 99 { b'\n' } else { (i / 100 % 251) as u8 }).collect();
    let mut reader = JoinSet::from_iter([rig.read_log(follow("a"))]);
    let begun = Instant::now();
    let (mut sent, mut stored) = (0, 0);
    while stored < total as u64 {
        if sent < total && sent as u64 - stored < 1 << 20 {
            let end = (sent + PIECE).min(total);
            node.send_append("a.1.0", "job", sent as u64, data[sent..end].to_vec()).await;
            sent = end;
        } else {
            stored = node.stored().await.unwrap();
        }
    }
    let appended = begun.elapsed();
    node.deliver("a.1.0", outcome(0, &data)).await.unwrap();
    let (_, log) = reader.join_next().await.unwrap().unwrap().unwrap();
    let took = begun.elapsed();
    assert!(log == data, "every byte, in order");
    let rate = |time: Duration| total as f64 / 1e6 / time.as_secs_f64();
    println!("{:.0} MB/s stored, {:.0} MB/s to the follower and settled", rate(appended), rate(took));
    rig.stop().await;
}
