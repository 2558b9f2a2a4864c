//! A longer time limit for a command that runs.

use agent_model::protocol::grant::{Grant, PlacedAt};

use super::*;

#[tokio::test]
async fn test_a_job_that_runs_is_given_more_time_by_another_order() {
    let state = tempfile::tempdir().unwrap();
    let worker = node(state.path(), usize::MAX).await;
    let limited = |limit: Duration| {
        let draft = JobDraft { command: "sleep 1000".into(), ..JobDraft::default() };
        JobDraft { limits: Limits { timeout: Some(limit), ..Limits::default() }, ..draft }.validate().unwrap()
    };
    let (short, long) = (Duration::from_millis(500), Duration::from_secs(600));
    let record = Record { spec: limited(short), ..record() };
    let (mut runner, desired, mut view) = runner(&worker, record);
    let (order, given) = watch::channel(None);
    runner.given = given;
    let follow = async {
        view.wait_for(|view| view.step == Some(ReplicaStep::Running)).await.unwrap();
        let mark = PlacedAt { life: "a".into(), commit: 1 };
        let grant = Grant { key: "k".into(), mark, mac: String::new() };
        let document = serde_json::to_string(&limited(long)).unwrap();
        order.send_replace(Some(Given { document, grant }));
        tokio::time::sleep(2 * short).await;
        let known = worker.journal.open_replicas().await.unwrap().pop().unwrap();
        assert_eq!(known.spec.limits.timeout, Some(long), "the next daemon knows it too");
        let (grace, reason) = (Duration::ZERO, "enough".to_owned());
        desired.send_replace(Desired::Stop { grace, reason });
        view.wait_for(|view| view.step == Some(ReplicaStep::Reported)).await.map(drop).unwrap();
    };
    tokio::select! {
        () = runner.live() => panic!("nobody gave leave to go"),
        () = follow => {}
    }
    // Its time was not over.
    assert_eq!(outcome(&worker).await.unwrap().verdict, Verdict::Canceled);
}
