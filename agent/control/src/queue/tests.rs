use super::*;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use agent_model::{JobState, ManualClock, Timestamp};
use async_trait::async_trait;
use tokio::task::JoinSet;

use crate::store::tests::job;
use crate::store::{self, Among, Changes, Event, Recovery, StoreError};

/// A store on a disk that can be made to refuse writes.
#[derive(Debug)]
struct Moody {
    inner: Arc<dyn Store>,
    refuses: AtomicBool,
    is_harmed: AtomicBool,
    commits: AtomicUsize,
}

#[async_trait]
impl Store for Moody {
    async fn load(&self) -> Result<Loaded, StoreError> {
        self.inner.load().await
    }
    async fn commit(&self, changes: &Changes) -> Result<(), StoreError> {
        self.commits.fetch_add(1, Ordering::SeqCst);
        if self.refuses.load(Ordering::SeqCst) {
            let source = sqlx::Error::Io(std::io::ErrorKind::StorageFull.into());
            return Err(StoreError::Commit { jobs: changes.jobs.len(), events: 0, full: true, source });
        }
        if self.is_harmed.load(Ordering::SeqCst) {
            return Err(StoreError::Behind);
        }
        self.inner.commit(changes).await
    }
    async fn job(&self, id: &JobId) -> Result<Option<JobRecord>, StoreError> {
        self.inner.job(id).await
    }
    async fn submitted(&self, request: &str) -> Result<Option<JobRecord>, StoreError> {
        self.inner.submitted(request).await
    }
    async fn page(
        &self,
        among: Among<'_>,
        before: Option<u64>,
        limit: u32,
    ) -> Result<Vec<JobRecord>, StoreError> {
        self.inner.page(among, before, limit).await
    }
    async fn oldest(&self, after: u64, limit: u32) -> Result<Vec<JobRecord>, StoreError> {
        self.inner.oldest(after, limit).await
    }
    async fn history(&self, id: &JobId) -> Result<Vec<Event>, StoreError> {
        self.inner.history(id).await
    }
    fn has_room(&self) -> bool {
        self.inner.has_room()
    }
    fn incarnation(&self) -> &str {
        self.inner.incarnation()
    }
    fn recovery(&self) -> Option<&Recovery> {
        self.inner.recovery()
    }
    async fn check_rest(&self) {
        self.inner.check_rest().await;
    }
    fn damage(&self) -> Option<&str> {
        self.inner.damage()
    }
    async fn close(&self) {
        self.inner.close().await;
    }
}

async fn start(dir: &std::path::Path) -> (Queue, Arc<Moody>, JoinSet<Result<(), HarmedDatabase>>) {
    let inner = store::open(&dir.join("db"), &dir.join("archive")).await.unwrap();
    let loaded = inner.load().await.unwrap();
    let store = Arc::new(Moody {
        inner,
        refuses: AtomicBool::new(false),
        is_harmed: AtomicBool::new(false),
        commits: AtomicUsize::new(0),
    });
    let clock = Arc::new(ManualClock::new(Timestamp(1000)));
    let (contact, terms) = (Duration::from_secs(15), Terms::default());
    let (queue, task) = queue(loaded, contact, terms, UserLimits::default(), 7, store.clone(), clock);
    let tasks = JoinSet::from_iter([task.run(std::future::pending())]);
    (queue, store, tasks)
}

fn submission(name: &str) -> Submission {
    let job = job(name, 0);
    let after = agent_model::Epoch::default();
    Submission { request: job.request, id: job.id, spec: job.spec, after, earlier: Vec::new() }
}

#[tokio::test]
async fn test_failed_commit_is_told_hidden_and_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let (queue, store, _tasks) = start(dir.path()).await;
    let first: JobId = "first".parse().unwrap();
    queue.submit(submission("first")).await.unwrap().unwrap().unwrap();
    let mut watch = queue.watch(&first).await.unwrap().unwrap();
    watch.mark_unchanged();

    store.refuses.store(true, Ordering::SeqCst);
    let refused = queue.cancel(&first, "uid 1".into()).await;
    assert!(matches!(refused, Err(AskError::DiskFull)));
    assert!(!watch.has_changed().unwrap(), "nobody hears of what is not on disk");
    assert_eq!(store.job(&first).await.unwrap().unwrap().state, JobState::Queued);

    store.refuses.store(false, Ordering::SeqCst);
    let changed = tokio::time::timeout(Duration::from_secs(10), watch.changed()).await;
    changed.expect("the commit is tried again by itself").unwrap();
    assert_eq!(watch.borrow().job.state, JobState::Canceled);
    assert_eq!(store.job(&first).await.unwrap().unwrap().state, JobState::Canceled);
}

/// Users are shown what is on disk, and since when, whatever was decided after that.
#[tokio::test]
async fn test_what_cannot_be_written_is_not_shown() {
    let dir = tempfile::tempdir().unwrap();
    let (queue, store, _tasks) = start(dir.path()).await;
    let names = async || {
        let shown = queue.shown_jobs().await.unwrap();
        shown.into_iter().map(|view| (view.job.id.to_string(), view.job.state)).collect::<Vec<_>>()
    };
    let (first, sweep): (JobId, JobId) = ("first".parse().unwrap(), "sweep--1".parse().unwrap());
    queue.submit(submission("first")).await.unwrap().unwrap().unwrap();
    let mut array = submission("sweep");
    array.spec =
        agent_model::JobDraft { array: "0-3".parse().ok(), ..array.spec.clone().into() }.validate().unwrap();
    queue.submit(array).await.unwrap().unwrap().unwrap();
    let before = names().await;
    let waits = queue.shown_job(&first).await.unwrap().unwrap().detail;
    assert_eq!((before.len(), queue.stall()), (2, None));

    store.refuses.store(true, Ordering::SeqCst);
    assert!(queue.submit(submission("second")).await.is_err());
    assert!(queue.cancel(&first, "uid 1".into()).await.is_err());
    assert_eq!(names().await, before);
    assert!(queue.shown_nodes().await.unwrap().is_empty());
    assert!(queue.shown_job(&"second".parse().unwrap()).await.unwrap().is_none());
    assert!(queue.shown_job(&sweep).await.unwrap().is_some_and(|task| task.job.is_task));
    let shown = queue.shown_job(&first).await.unwrap().unwrap();
    assert_eq!((shown.job.state, shown.detail.as_str()), (JobState::Queued, ""), "{waits}");
    let mut watch = queue.watch(&first).await.unwrap().unwrap();
    assert_eq!(watch.borrow_and_update().job.state, JobState::Queued);
    assert!(queue.jobs().await.is_err(), "what decides by the jobs there are hears of none");
    assert!(queue.flush().await.is_err() && queue.flush_if_possible().await.is_ok());
    assert_eq!(queue.stall(), Some(Stall { since: Timestamp(1000), why: AskError::DiskFull }));

    store.refuses.store(false, Ordering::SeqCst);
    let changed = tokio::time::timeout(Duration::from_secs(10), watch.changed()).await;
    changed.expect("what was decided is written by itself").unwrap();
    assert_eq!((watch.borrow().job.state, queue.stall()), (JobState::Canceled, None));
    assert!(queue.shown_job(&"second".parse().unwrap()).await.unwrap().is_some());
}

#[tokio::test]
async fn test_messages_that_wait_together_share_a_commit() {
    let dir = tempfile::tempdir().unwrap();
    let (queue, store, _tasks) = start(dir.path()).await;
    let mut all = JoinSet::new();
    for i in 0..200 {
        let queue = queue.clone();
        all.spawn(async move { queue.submit(submission(&format!("j{i}"))).await.unwrap().unwrap().unwrap() });
    }
    assert_eq!(all.join_all().await.len(), 200);
    assert!(store.commits.load(Ordering::SeqCst) <= 20, "{:?}", store.commits);
    assert_eq!(store.load().await.unwrap().jobs.len(), 200);
}

#[tokio::test]
async fn test_queue_says_when_it_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let (queue, _store, mut tasks) = start(dir.path()).await;
    queue.submit(submission("a")).await.unwrap().unwrap();
    let mut watch = queue.watch(&"a".parse().unwrap()).await.unwrap().unwrap();
    watch.mark_unchanged();
    tasks.shutdown().await;
    assert!(watch.changed().await.is_err());
    assert_eq!(queue.flush().await, Err(AskError::Stopping));
    queue.closed().await;
}

#[tokio::test]
async fn test_a_controller_ends_when_its_database_was_harmed_and_not_when_its_disk_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let (queue, store, mut tasks) = start(dir.path()).await;
    store.refuses.store(true, Ordering::SeqCst);
    assert_eq!(queue.submit(submission("a")).await.unwrap_err(), AskError::DiskFull);
    assert!(tokio::time::timeout(HARMED * 2, tasks.join_next()).await.is_err(), "a full disk can be mended");
    store.refuses.store(false, Ordering::SeqCst);
    store.is_harmed.store(true, Ordering::SeqCst);
    assert_eq!(queue.submit(submission("b")).await.unwrap_err(), AskError::NotWritten);
    let ended = tokio::time::timeout(Duration::from_secs(60), tasks.join_next()).await.expect("it ends");
    assert!(matches!(ended, Some(Ok(Err(HarmedDatabase)))), "{ended:?}");
}
