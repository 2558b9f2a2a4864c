use super::*;
use agent_model::job::JobDraft;
use agent_model::{Code, Digest, Fault, Verdict};

/// A job that waits.
pub(crate) fn job(name: &str, seq: u64) -> JobRecord {
    JobRecord {
        id: name.parse().unwrap(),
        seq,
        request: format!("request-{name}"),
        spec: JobDraft { command: "true".into(), ..JobDraft::default() }.validate().unwrap(),
        state: JobState::Queued,
        epoch: Epoch(0),
        not_before: None,
        avoid: None,
        submitted_at: Timestamp(seq),
        started_at: None,
        ended_at: None,
        cancel: None,
        replicas: Vec::new(),
        outcome: None,
    }
}

fn event(job: &str, text: &str) -> Event {
    Event { job: job.parse().unwrap(), at: Timestamp(7), epoch: Epoch(1), node: None, text: text.into() }
}

async fn open(dir: &std::path::Path) -> Result<Sqlite, OpenStoreError> {
    Sqlite::open(&dir.join("db"), &dir.join("archive")).await
}

fn full(name: &str, seq: u64) -> JobRecord {
    JobRecord {
        state: JobState::NotResponding(agent_model::machine::Before::Finalizing(Verdict::Canceled)),
        epoch: Epoch(4),
        not_before: Some(Timestamp(9)),
        avoid: Some("box".parse().unwrap()),
        cancel: Some("canceled by uid 1".into()),
        replicas: vec![ReplicaRecord {
            rank: 0,
            node: "box".parse().unwrap(),
            boot_id: "b".into(),
            step: Some(ReplicaStep::Uploading),
            detail: "x".into(),
        }],
        outcome: Some(Outcome {
            verdict: Verdict::Failed,
            exit: None,
            fault: Some(Fault::new(Code::RunLost, "x")),
            started_at: None,
            ended_at: Timestamp(3),
            streams: vec![agent_model::StreamEnd { stream: agent_model::Stream::Job, digest: Digest::EMPTY }],
            tracking_bytes: 0,
            artifacts: None,
        }),
        ..job(name, seq)
    }
}

#[tokio::test]
async fn test_everything_committed_is_there_after_reopen() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    let (a, mut b) = (full("a", 1), job("b", 2));
    let node = NodeRecord {
        id: "box".parse().unwrap(),
        boot_id: "b".into(),
        liveness: Liveness::Ready,
        eligibility: Eligibility::Open,
        last_seen: Timestamp(5),
        inventory: Inventory { slots: 2, ..Inventory::default() },
    };
    let settled = ("b.1.0".parse().unwrap(), node.id.clone());
    let changes = Changes {
        jobs: vec![Arc::new(a.clone()), Arc::new(b.clone())],
        nodes: vec![node.clone()],
        events: vec![event("a", "one"), event("b", "other"), event("a", "two")],
        settled: vec![settled.clone()],
        forgotten: Vec::new(),
    };
    store.commit(&changes).await.unwrap();
    b.state = JobState::Completed;
    store.commit(&Changes { jobs: vec![Arc::new(b.clone())], ..Changes::default() }).await.unwrap();
    store.close().await;

    let store = open(dir.path()).await.unwrap();
    let loaded = store.load().await.unwrap();
    assert_eq!((loaded.jobs, loaded.nodes), (vec![a.clone()], vec![node]));
    assert_eq!((loaded.settled, loaded.last_seq), (vec![settled.clone()], 2));
    assert_eq!(store.job(&b.id).await.unwrap(), Some(b.clone()));
    assert_eq!(store.submitted("request-a").await.unwrap(), Some(a.clone()));
    assert_eq!(store.job(&"c".parse().unwrap()).await.unwrap(), None);
    assert_eq!(store.page(None, 9).await.unwrap(), [b, a.clone()]);
    assert_eq!(store.page(Some(2), 9).await.unwrap(), std::slice::from_ref(&a));
    let texts: Vec<String> = store.history(&a.id).await.unwrap().into_iter().map(|e| e.text).collect();
    assert_eq!(texts, ["one", "two"]);

    store.commit(&Changes { forgotten: vec![settled.0], ..Changes::default() }).await.unwrap();
    assert_eq!(store.load().await.unwrap().settled, []);
}

#[tokio::test]
async fn test_a_commit_that_fails_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    let changes = Changes {
        jobs: vec![Arc::new(job("a", 1))],
        events: vec![event("nobody", "refers to a job that is not there")],
        ..Changes::default()
    };
    store.commit(&changes).await.unwrap_err();
    assert_eq!(store.load().await.unwrap().jobs, []);
}

#[tokio::test]
async fn test_open_refuses_what_would_forget_jobs() {
    let dir = tempfile::tempdir().unwrap();
    let database = dir.path().join("db");
    let store = open(dir.path()).await.unwrap();
    let many = (1..200).map(|i| Arc::new(full(&format!("j{i}"), i))).collect();
    store.commit(&Changes { jobs: many, ..Changes::default() }).await.unwrap();
    store.close().await;

    let whole = std::fs::read(&database).unwrap();
    let mut torn = whole.clone();
    let middle = torn.len() / 2;
    torn[middle..middle + 4096].fill(0xa5);
    std::fs::write(&database, &torn).unwrap();
    open(dir.path()).await.unwrap_err();
    std::fs::write(&database, b"this is no database at all, it is a text of some length").unwrap();
    assert!(matches!(open(dir.path()).await.unwrap_err(), OpenStoreError::File { .. }));
    assert_eq!(std::fs::read(&database).unwrap().len(), 55, "a refused file is left as it was");

    std::fs::write(&database, &whole).unwrap();
    let store = open(dir.path()).await.unwrap();
    sqlx::raw_sql("PRAGMA user_version = 99").execute(store.pool()).await.unwrap();
    store.close().await;
    assert!(matches!(open(dir.path()).await.unwrap_err(), OpenStoreError::Newer { found: 99, .. }));

    std::fs::create_dir(dir.path().join("archive")).unwrap();
    for empty in [true, false] {
        std::fs::remove_file(&database).unwrap();
        if empty {
            std::fs::write(&database, b"").unwrap();
        }
        assert!(matches!(open(dir.path()).await.unwrap_err(), OpenStoreError::Gone { .. }));
        if !empty {
            assert!(!database.exists());
        }
    }
}
