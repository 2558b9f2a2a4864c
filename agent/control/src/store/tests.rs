use super::sqlite::Sqlite;
use super::*;
use agent_model::job::{JobDraft, WantedEnd};
use agent_model::protocol::grant::PlacedAt;
use agent_model::{Code, Digest, Fault, Verdict};

/// A job that waits.
pub(crate) fn job(name: &str, seq: u64) -> JobRecord {
    let owner = Some(Principal::Local { uid: 1 });
    let spec = JobDraft { command: "true".into(), owner, ..JobDraft::default() }.validate().unwrap();
    let (id, request) = (name.parse().unwrap(), format!("request-{name}"));
    JobRecord { seq, ..JobRecord::new(id, request, spec, Timestamp(seq)) }
}

fn event(job: &str, text: &str) -> Event {
    Event { job: job.parse().unwrap(), at: Timestamp(7), epoch: Epoch(1), node: None, text: text.into() }
}

async fn open(dir: &std::path::Path) -> Result<Sqlite, OpenStoreError> {
    Sqlite::open(&dir.join("db"), &dir.join("archive"), opening::AT_ONCE).await
}

/// As a database that is too large to be checked as a whole.
async fn open_large(dir: &std::path::Path) -> Result<Sqlite, OpenStoreError> {
    Sqlite::open(&dir.join("db"), &dir.join("archive"), 0).await
}

fn full(name: &str, seq: u64) -> JobRecord {
    JobRecord {
        state: JobState::NotResponding(agent_model::machine::Before::Finalizing(Verdict::Canceled)),
        epoch: Epoch(4),
        not_before: Some(Timestamp(9)),
        avoid: Some("box".parse().unwrap()),
        cancel: Some("canceled by uid 1".into()),
        held: Some("held by uid 1".into()),
        waits_for: vec![Predecessor { job: "z".parse().unwrap(), end: WantedEnd::Any }],
        replicas: vec![ReplicaRecord {
            end: None,
            rank: 0,
            node: "box".parse().unwrap(),
            boot_id: "b".into(),
            step: Some(ReplicaStep::Uploading),
            detail: "x".into(),
            ready: None,
            preempted: true,
            placed: Some(PlacedAt { life: "l".into(), commit: 3 }),
            adopted: true,
        }],
        outcome: Some(Outcome {
            verdict: Verdict::Failed,
            exit: None,
            fault: Some(Fault::new(Code::RunLost, "x")),
            started_at: None,
            ended_at: Timestamp(3),
            streams: vec![agent_model::StreamEnd { stream: agent_model::Stream::Job, digest: Digest::EMPTY }],
            tracking_bytes: 0,
            tracking: None,
            artifacts: None,
            usage: Some(Box::new(agent_model::outcome::Usage {
                cpu: std::time::Duration::from_millis(7),
                memory_peak: 8,
                memory_limit: Some(9),
            })),
            environment: Some(Box::new(agent_model::outcome::UsedEnvironment {
                key: "pip-1".into(),
                lock: Some(Digest::EMPTY),
            })),
            left_out: vec!["outputs/pipe is neither file, directory nor link".into()],
        }),
        go: Some(Go { roster: Roster::default(), until: vec![Boot::from_millis(9)] }),
        broken: Some(Broken { rank: 1, fault: Fault::new(Code::GangLate, "x") }),
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
        preemption: NodePreemption {
            found: None,
            asked: Some(Notice {
                noticed_at: Timestamp(5),
                deadline: Timestamp(7),
                reason: "maintenance".into(),
            }),
        },
        breaker: Default::default(),
    };
    let settled = SettledRecord { replica: "b.1.0".parse().unwrap(), node: node.id.clone() };
    let documents = vec![Document::Node(Box::new(node)), Document::Settled(settled.clone())];
    let changes = Changes {
        jobs: vec![Arc::new(a.clone()), Arc::new(b.clone())],
        events: vec![event("a", "one"), event("b", "other"), event("a", "two")],
        documents: documents.clone(),
        dropped: Vec::new(),
    };
    store.commit(&changes).await.unwrap();
    b.state = JobState::Completed;
    store.commit(&Changes { jobs: vec![Arc::new(b.clone())], ..Changes::default() }).await.unwrap();
    store.close().await;

    let store = open(dir.path()).await.unwrap();
    let loaded = store.load().await.unwrap();
    assert_eq!((loaded.jobs, loaded.documents, loaded.last_seq), (vec![a.clone()], documents.clone(), 2));
    assert_eq!(store.job(&b.id).await.unwrap(), Some(b.clone()));
    assert_eq!(store.submitted("request-a").await.unwrap(), Some(a.clone()));
    assert_eq!(store.job(&"c".parse().unwrap()).await.unwrap(), None);
    assert_eq!(store.oldest(0, 9).await.unwrap(), [a.clone(), b.clone()]);
    assert_eq!(store.oldest(1, 9).await.unwrap(), std::slice::from_ref(&b));
    assert_eq!(store.page(Among::All, None, 9).await.unwrap(), [b, a.clone()]);
    assert_eq!(store.page(Among::All, Some(2), 9).await.unwrap(), std::slice::from_ref(&a));
    let texts: Vec<String> = store.history(&a.id).await.unwrap().into_iter().map(|e| e.text).collect();
    assert_eq!(texts, ["one", "two"]);

    let dropped = vec![Document::name_of_settled(&settled.replica)];
    store.commit(&Changes { dropped, ..Changes::default() }).await.unwrap();
    assert_eq!(store.load().await.unwrap().documents, documents[..1]);
}

/// What a store returns for a job that was removed: only that its name had attempts.
async fn assert_removed(store: &Sqlite, removed: &JobRecord) {
    let kept = store.job(&removed.id).await.unwrap().unwrap();
    assert_eq!((kept.is_removed(), kept.epoch, kept.outcome), (true, removed.epoch, None));
    assert!(!store.page(Among::All, None, 9).await.unwrap().iter().any(|job| job.id == removed.id));
    assert_eq!(store.history(&removed.id).await.unwrap(), []);
}

#[tokio::test]
async fn test_a_removed_job_leaves_its_name_and_another_may_have_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    let ended = JobRecord { state: JobState::Failed, ..full("a", 1) };
    let other = JobRecord { state: JobState::Completed, ..job("b", 2) };
    let jobs = vec![Arc::new(ended.clone()), Arc::new(other.clone())];
    let events = vec![event("a", "secret"), event("b", "other")];
    store.commit(&Changes { jobs, events, ..Changes::default() }).await.unwrap();
    let removed = ended.clone().removed(Timestamp(9));
    store.commit(&Changes { jobs: vec![Arc::new(removed.clone())], ..Changes::default() }).await.unwrap();
    assert_removed(&store, &ended).await;
    store.close().await;

    // Nothing of it is restored from the second copy, which has its earlier state.
    let database = dir.path().join("db");
    let mut bytes = std::fs::read(&database).unwrap();
    bytes[..16].fill(0);
    std::fs::write(&database, bytes).unwrap();
    let store = open(dir.path()).await.unwrap();
    assert_removed(&store, &ended).await;
    assert_eq!(store.history(&other.id).await.unwrap().len(), 1);

    // In one commit the name is freed and taken again.
    let removed_too = other.clone().removed(Timestamp(9));
    let again = JobRecord { request: "again".into(), ..job("b", 3) };
    let jobs = vec![Arc::new(removed_too), Arc::new(again.clone())];
    store.commit(&Changes { jobs, events: vec![event("b", "new")], ..Changes::default() }).await.unwrap();
    assert_eq!(store.page(Among::All, None, 9).await.unwrap(), std::slice::from_ref(&again));
    assert_eq!(store.history(&again.id).await.unwrap().len(), 1);
    store.close().await;
    assert_eq!(open(dir.path()).await.unwrap().load().await.unwrap().jobs, [again]);
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
async fn test_what_cannot_be_judged_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let database = dir.path().join("db");
    let store = open(dir.path()).await.unwrap();
    store.commit(&Changes { jobs: vec![Arc::new(full("a", 1))], ..Changes::default() }).await.unwrap();
    sqlx::raw_sql("PRAGMA user_version = 99").execute(&store.pool()).await.unwrap();
    store.close().await;
    let whole = std::fs::read(&database).unwrap();
    assert!(matches!(open(dir.path()).await.unwrap_err(), OpenStoreError::Newer { found: 99, .. }));
    assert_eq!(std::fs::read(&database).unwrap(), whole, "nothing touched it");
}

/// A database that is missing, emptied or damaged is one case.
#[tokio::test]
async fn test_a_missing_database_is_mended_from_its_second_copy() {
    for (log_stays, copy_stays) in [(true, true), (false, true), (true, false)] {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path()).await.unwrap();
        let jobs = filled(&store).await;
        let copy = tempfile::tempdir().unwrap();
        copy_files(dir.path(), copy.path()); // as a killed process leaves them
        std::fs::create_dir(copy.path().join("archive")).unwrap();
        let gone = ["db", "db-shm"].into_iter().chain((!log_stays).then_some("db-wal"));
        for name in gone.chain((!copy_stays).then_some("db.redo")) {
            let _ = std::fs::remove_file(copy.path().join(name));
        }
        let mended = open(copy.path()).await.unwrap();
        let told = mended.recovery().unwrap();
        assert_eq!((told.problem.as_str(), told.missing()), ("it is missing", Missing::Any), "{told:?}");
        let found = mended.page(Among::All, None, 1000).await.unwrap();
        assert_eq!(found.len(), if copy_stays { jobs.len() } else { 0 });
        assert!(jobs.iter().filter(|_| copy_stays).all(|job| found.contains(job)));
        mended.close().await;
        store.close().await;
    }
    let new = tempfile::tempdir().unwrap();
    assert_eq!(open(new.path()).await.unwrap().recovery(), None, "the first start misses nothing");
}

/// SQLite goes on with files that have no name any more.
#[tokio::test]
async fn test_a_database_removed_under_its_controller_is_written_back_before_the_next_answer() {
    type Harm = fn(&std::path::Path);
    let harms: [(&str, Harm); 5] = [
        ("all of it", |dir| {
            ["db", "db-wal", "db-shm"].iter().for_each(|f| std::fs::remove_file(dir.join(f)).unwrap())
        }),
        ("the file", |dir| std::fs::remove_file(dir.join("db")).unwrap()),
        ("the log", |dir| std::fs::remove_file(dir.join("db-wal")).unwrap()),
        ("another one in its place", |dir| {
            std::fs::write(dir.join("other"), "another's").unwrap();
            std::fs::rename(dir.join("other"), dir.join("db")).unwrap();
        }),
        ("a directory in its place", |dir| {
            std::fs::remove_file(dir.join("db")).unwrap();
            std::fs::create_dir(dir.join("db")).unwrap();
        }),
    ];
    for (what, harm) in harms {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path()).await.unwrap();
        store.commit(&one("a", 1)).await.unwrap();
        assert!(!store.is_moved());
        harm(dir.path());
        assert!(store.is_moved() && store.moved().is_none(), "{what}");
        assert!(store.job(&"a".parse().unwrap()).await.unwrap().is_some(), "{what}: reads go on");
        store.commit(&one("b", 2)).await.unwrap();
        assert!(!store.is_moved() && store.moved().is_some(), "{what}");
        store.commit(&one("c", 3)).await.unwrap();
        std::fs::remove_file(dir.path().join("db.redo")).unwrap();
        store.commit(&one("d", 4)).await.unwrap();
        let copy = tempfile::tempdir().unwrap();
        copy_files(dir.path(), copy.path()); // as a killed process leaves them
        let again = open(copy.path()).await.unwrap();
        assert_eq!(again.load().await.unwrap().jobs.len(), 4, "{what}");
        assert_eq!((again.recovery(), again.mended()), (None, false), "{what}");
        again.close().await;
        store.close().await;
    }
}

/// A database as `versions` of the schema left it.
async fn of_version(dir: &std::path::Path, versions: &[&'static str]) -> sqlx::SqlitePool {
    let url = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.join("db")).create_if_missing(true);
    let pool = sqlx::SqlitePool::connect_with(url).await.unwrap();
    for sql in versions {
        sqlx::raw_sql(*sql).execute(&pool).await.unwrap();
    }
    let stamp = sqlx::AssertSqlSafe(format!("PRAGMA user_version = {}", versions.len()));
    sqlx::raw_sql(stamp).execute(&pool).await.unwrap();
    pool
}

#[tokio::test]
async fn test_database_of_an_earlier_version_is_taken_over() {
    let versions = [include_str!("schema.sql"), include_str!("schema_2.sql")];
    for known_versions in [&versions[..1], &versions[..]] {
        let dir = tempfile::tempdir().unwrap();
        let pool = of_version(dir.path(), known_versions).await;
        let (known, node) = (full("a", 1), node_record());
        sqlx::query(
            "INSERT INTO jobs (seq, id, request, active, document) VALUES (1, 'a', 'request-a', 1, ?)",
        )
        .bind(serde_json::to_string(&known).unwrap())
        .execute(&pool)
        .await
        .unwrap();
        sqlx::query("INSERT INTO nodes (id, document) VALUES ('box', ?)")
            .bind(serde_json::to_string(&node).unwrap())
            .execute(&pool)
            .await
            .unwrap();
        sqlx::raw_sql("INSERT INTO settled (replica, node) VALUES ('b.1.0', 'box')")
            .execute(&pool)
            .await
            .unwrap();
        pool.close().await;
        let store = open(dir.path()).await.unwrap();
        let loaded = store.load().await.unwrap();
        let settled = SettledRecord { replica: "b.1.0".parse().unwrap(), node: node.id.clone() };
        assert_eq!(loaded.jobs, [known]);
        assert_eq!(loaded.documents, [Document::Node(Box::new(node)), Document::Settled(settled)]);
        assert!(store.recovery().is_none());
    }
}

#[tokio::test]
async fn test_controller_whose_database_was_taken_over_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let before = open(dir.path()).await.unwrap();
    before.commit(&one("a", 1)).await.unwrap();
    let after = open(dir.path()).await.unwrap();
    before.commit(&one("b", 2)).await.unwrap();
    // It was opened before the last commit, so it does not know everything.
    assert!(matches!(after.commit(&one("c", 3)).await, Err(StoreError::Taken)));
    let after = open(dir.path()).await.unwrap();
    after.commit(&one("d", 3)).await.unwrap();
    assert!(matches!(before.commit(&one("e", 4)).await, Err(StoreError::Taken)));
    let names: Vec<String> =
        after.load().await.unwrap().jobs.into_iter().map(|job| job.id.to_string()).collect();
    assert_eq!(names, ["a", "b", "d"]);
}

/// 30 jobs that go on, 90 that ended, and what belongs to them, over many commits.
async fn filled(store: &Sqlite) -> Vec<JobRecord> {
    let mut jobs = Vec::new();
    for seq in 1..=120 {
        let mut job = full(&format!("job-{seq}"), seq);
        job.spec = JobDraft { command: "x".repeat(300), ..JobDraft::default() }.validate().unwrap();
        let event = |text: &str| event(job.id.as_str(), text);
        let events = vec![event("queued by uid 1"), event("placed on box as attempt 1"), event("running")];
        let node = NodeRecord { last_seen: Timestamp(seq), ..node_record() };
        let documents = vec![Document::Node(Box::new(node))];
        let changes = Changes { jobs: vec![Arc::new(job.clone())], documents, events, ..Changes::default() };
        store.commit(&changes).await.unwrap();
        if seq > 30 {
            job.state = JobState::Completed;
            store.commit(&Changes { jobs: vec![Arc::new(job.clone())], ..Changes::default() }).await.unwrap();
        }
        jobs.push(job);
    }
    jobs
}

fn node_record() -> NodeRecord {
    NodeRecord {
        id: "box".parse().unwrap(),
        boot_id: "b".into(),
        liveness: Liveness::Ready,
        eligibility: Eligibility::Open,
        last_seen: Timestamp(5),
        inventory: Inventory::default(),
        preemption: NodePreemption::default(),
        breaker: Default::default(),
    }
}

fn copy_files(from: &std::path::Path, to: &std::path::Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

/// Damages a file: a flipped bit, a lost tail, or a lost sector.
fn damage(file: &std::path::Path, kind: u64, chance: u64) {
    let mut bytes = std::fs::read(file).unwrap();
    let at = usize::try_from(chance).unwrap() % bytes.len();
    match kind {
        0 => bytes[at] ^= 1 << (chance % 8),
        1 => bytes.truncate(at),
        _ => {
            let end = (at + 512).min(bytes.len());
            bytes[at..end].fill(0);
        }
    }
    std::fs::write(file, bytes).unwrap();
}

/// Copies of what a controller left, each with `file` damaged at another place; and what was done to them.
fn damaged(
    pristine: &std::path::Path,
    file: &str,
    cases: u64,
) -> impl Iterator<Item = (String, tempfile::TempDir)> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    (0..cases).map(move |case| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let dir = tempfile::tempdir().unwrap();
        copy_files(pristine, dir.path());
        damage(&dir.path().join(file), case % 3, state >> 16);
        std::fs::create_dir(dir.path().join("archive")).unwrap();
        (format!("{file}, case {case}, chance {}", state >> 16), dir)
    })
}

/// Every damage is repaired without the loss of a job, or does no harm at all.
async fn survives_damage(file: &str, pristine: &std::path::Path, jobs: &[JobRecord], cases: u64) -> usize {
    let mut told = 0;
    for (what, dir) in damaged(pristine, file, cases) {
        let store = match open(dir.path()).await {
            Ok(store) => store,
            Err(OpenStoreError::Newer { .. }) => continue, // the version itself was hit
            Err(error) => panic!("{what}: {error:?}"),
        };
        let found = store.page(Among::All, None, 1000).await.unwrap();
        let missing: Vec<_> =
            jobs.iter().filter(|job| !found.contains(job)).map(|job| job.id.as_str()).collect();
        assert!(missing.is_empty(), "{what}: {missing:?} are lost: {:?}", store.recovery());
        let loaded = store.load().await.unwrap();
        assert_eq!(loaded.jobs.len(), 30, "{what}");
        assert_eq!(loaded.mended, store.recovery().is_some(), "{what}");
        told += usize::from(loaded.mended);
        if let Some(Recovery { kept: Some(kept), .. }) = store.recovery() {
            assert!(kept.exists(), "{what}");
        }
        store.close().await;
    }
    told
}

#[tokio::test]
async fn test_damage_anywhere_in_the_database_loses_no_job() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    let jobs = filled(&store).await;
    store.close().await;
    let told = survives_damage("db", dir.path(), &jobs, 60).await;
    assert!(told > 40, "{told} of 60 were told of");
}

/// A long history is checked while the controller works, and mended at the next start.
#[tokio::test]
async fn test_damage_in_a_long_history_is_found_and_mended() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    let jobs = filled(&store).await;
    // The index of the names of submissions, which no start reads.
    let page = "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_jobs_2'";
    let page: i64 = sqlx::query_scalar(page).fetch_one(&store.pool()).await.unwrap();
    store.close().await;
    std::fs::create_dir(dir.path().join("archive")).unwrap();
    let mut bytes = std::fs::read(dir.path().join("db")).unwrap();
    let at = usize::try_from(page - 1).unwrap() * 4096;
    bytes[at..at + 4096].fill(0);
    std::fs::write(dir.path().join("db"), bytes).unwrap();

    let store = open_large(dir.path()).await.unwrap();
    assert_eq!((store.recovery(), store.damage()), (None, None));
    store.check_rest().await;
    assert!(store.damage().is_some(), "it was not found");
    store.close().await;
    let store = open_large(dir.path()).await.unwrap();
    assert!(store.recovery().is_some(), "it was mended");
    assert_eq!(store.page(Among::All, None, 1000).await.unwrap().len(), jobs.len());
    store.close().await;
    let store = open_large(dir.path()).await.unwrap();
    store.check_rest().await;
    assert_eq!(store.damage(), None);
    store.close().await;
}

/// Wherever a long database is damaged, no job that has not ended is missing.
#[tokio::test]
async fn test_damage_anywhere_in_a_long_history_hides_no_job() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    filled(&store).await;
    store.close().await;
    for (what, copy) in damaged(dir.path(), "db", 60) {
        let store = match open_large(copy.path()).await {
            Err(OpenStoreError::Newer { .. }) => continue,
            store => store.unwrap(),
        };
        assert_eq!(store.load().await.unwrap().jobs.len(), 30, "{what}");
        store.close().await;
    }
}

/// A job that an index has lost is not seen by any list, and would wait for ever.
#[tokio::test]
async fn test_job_that_an_index_lost_is_missed_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    let waits = JobRecord { state: JobState::Queued, ..full("waits", 1) };
    store.commit(&Changes { jobs: vec![Arc::new(waits)], ..Changes::default() }).await.unwrap();
    // The row says that the job has ended, and its entry in the index is gone.
    sqlx::query("UPDATE jobs SET active = 0, proof = NULL").execute(&store.pool()).await.unwrap();
    store.close().await;
    std::fs::create_dir(dir.path().join("archive")).unwrap();
    let store = open_large(dir.path()).await.unwrap();
    let problem = &store.recovery().unwrap().problem;
    assert!(problem.contains("the job waits is missing"), "{problem}");
    assert_eq!(store.load().await.unwrap().jobs.len(), 1);
    store.close().await;
}

#[tokio::test]
async fn test_damage_anywhere_in_the_log_loses_no_job() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    let jobs = filled(&store).await;
    // Its files as a killed process leaves them.
    let told = survives_damage("db-wal", dir.path(), &jobs, 60).await;
    assert!(told >= 3, "{told} of 60 were told of");
    store.close().await;
}

/// A log is read up to its first damaged frame; at the beginning of it there may not even be the database's name.
#[tokio::test]
async fn test_log_that_breaks_at_its_beginning_loses_no_job() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    let jobs = filled(&store).await;
    for frame in 0..12 {
        let copy = tempfile::tempdir().unwrap();
        copy_files(dir.path(), copy.path());
        damage(&copy.path().join("db-wal"), 2, 32 + frame * (24 + 4096) + 100);
        std::fs::create_dir(copy.path().join("archive")).unwrap();
        let mended = open(copy.path()).await.unwrap();
        let found = mended.page(Among::All, None, 1000).await.unwrap();
        let missing = jobs.iter().filter(|job| !found.contains(job)).count();
        assert_eq!(missing, 0, "frame {frame}: {:?}", mended.recovery());
        mended.close().await;
    }
    store.close().await;
}

/// Runs one of the tests below in a process of its own, in which something fails.
fn with_failures(test: &str, plan: &str) {
    #[allow(clippy::disallowed_methods, reason = "failures are planned for a whole process")]
    let mut program = std::process::Command::new(std::env::current_exe().unwrap());
    let name = format!("store::tests::{test}");
    let run = program
        .args(["--exact", &name, "--ignored", "--nocapture"])
        .env(agent_model::failpoint::VARIABLE, plan);
    let output = run.output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains("1 passed"), "{plan}: {told}");
}

#[test]
fn test_commit_that_fails_in_any_way_is_not_acknowledged() {
    for plan in
        ["control.store.commit=errno:5@2", "control.store.commit=error=2", "control.store.commit=errno:28@2"]
    {
        with_failures("failing_commit", plan);
    }
    with_failures("failing_return", "control.store.back=errno:28=1");
    with_failures("failing_copy", "control.redo.write=errno:28@2");
    with_failures("failing_copy", "control.redo.begin=errno:5,control.ballast.fill=errno:28");
    for place in ["keep", "fill", "rename"] {
        with_failures("failing_salvage", &format!("control.salvage.{place}=errno:28=1"));
    }
}

fn one(name: &str, seq: u64) -> Changes {
    Changes {
        jobs: vec![Arc::new(job(name, seq))],
        events: vec![event(name, "queued")],
        ..Changes::default()
    }
}

#[tokio::test]
#[ignore = "run by the test above, with a plan of failures"]
async fn failing_commit() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    store.commit(&one("a", 1)).await.unwrap();
    store.commit(&one("b", 2)).await.unwrap_err();
    assert_eq!(store.load().await.unwrap().jobs.len(), 1);
    assert_eq!(store.job(&"b".parse().unwrap()).await.unwrap(), None, "reads go on");
}

#[tokio::test]
#[ignore = "run by the test above, with a plan of failures"]
async fn failing_return() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    store.commit(&one("a", 1)).await.unwrap();
    std::fs::remove_file(dir.path().join("db")).unwrap();
    assert!(matches!(store.commit(&one("b", 2)).await.unwrap_err(), StoreError::Moved { .. }));
    assert!(store.is_moved() && store.job(&"b".parse().unwrap()).await.unwrap().is_none());
    store.commit(&one("b", 2)).await.unwrap();
    assert!(!store.is_moved() && store.load().await.unwrap().jobs.len() == 2);
}

#[tokio::test]
#[ignore = "run by the test above, with a plan of failures"]
async fn failing_copy() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    for seq in 1..4 {
        store.commit(&one(&format!("j{seq}"), seq)).await.unwrap();
    }
    store.close().await;
    let store = open(dir.path()).await.unwrap();
    assert_eq!(store.load().await.unwrap().jobs.len(), 3);
}

#[tokio::test]
#[ignore = "run by the test above, with a plan of failures"]
async fn failing_salvage() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await.unwrap();
    for seq in 1..40 {
        store.commit(&one(&format!("j{seq}"), seq)).await.unwrap();
    }
    store.close().await;
    let mut bytes = std::fs::read(dir.path().join("db")).unwrap();
    bytes[..4096].fill(0xa5);
    std::fs::write(dir.path().join("db"), bytes).unwrap();
    open(dir.path()).await.unwrap_err();
    let store = open(dir.path()).await.unwrap();
    assert_eq!(store.load().await.unwrap().jobs.len(), 39, "a salvage that was cut short begins anew");
}

/// SQLite opens a database read-only when its shared-memory file cannot be made.
#[tokio::test]
async fn test_database_that_cannot_be_written_is_told_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).await.unwrap().close().await;
    std::fs::create_dir(dir.path().join("db-shm")).unwrap();
    let refused = open(dir.path()).await.unwrap_err();
    assert!(matches!(&refused, OpenStoreError::File { path, .. } if path.ends_with("db")), "{refused:?}");
    std::fs::remove_dir(dir.path().join("db-shm")).unwrap();
    open(dir.path()).await.unwrap();
}

/// Somebody cuts the log of a database that is open, and SQLite opens a connection anew.
#[tokio::test]
async fn test_a_log_that_was_cut_under_its_database_is_harm_and_costs_no_commit() {
    for part in [0, 2, 4] {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path()).await.unwrap();
        for (seq, id) in ["a", "b", "c"].into_iter().enumerate() {
            store.commit(&one(id, seq as u64 + 1)).await.unwrap();
        }
        let log = std::fs::File::options().write(true).open(dir.path().join("db-wal")).unwrap();
        log.set_len(log.metadata().unwrap().len() * part / 5).unwrap();
        store.pool().acquire().await.unwrap().close().await.unwrap();
        let refused = store.commit(&one("d", 4)).await.expect_err("nothing is built on what is not there");
        assert!(refused.is_harm(), "{part}: {refused:?}");
        drop(store);
        let store = open(dir.path()).await.unwrap();
        for id in ["a", "b", "c"] {
            assert!(store.job(&id.parse().unwrap()).await.unwrap().is_some(), "{part}: {id}");
        }
    }
}
