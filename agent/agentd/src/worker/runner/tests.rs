use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use agent_cas::gc::{self, Collector};
use agent_cas::{Disk, Remote, Store, Tiered};
use agent_model::disk::Watermarks;
use agent_model::job::{Limits, OnDisconnect};
use agent_model::{Boot, Code, ExitStatus, JobDraft, Outcome, ReplicaId, Stream, SystemClock, Verdict};
use agent_runtime::docker::DockerError;
use agent_runtime::env::{EnvBuilder, EnvConfig, Environments, Image, Script, Scripted};
use agent_runtime::exec::{Fake, LaunchError};
use futures_util::future::BoxFuture;
use tonic::transport::{Channel, Endpoint};

use super::*;
use crate::cli::Flags;
use crate::config::{Config, Variables};
use crate::disk::DiskKeeper;
use crate::worker::gpus::{Gpus, Looker};
use crate::worker::journal::{Journal, Sqlite};
use crate::worker::preemption::Preemptions;
use crate::worker::prestaged_trees::PrestagedTrees;
use crate::worker::report::Outbox;
use crate::worker::retention::Retention;
use crate::worker::secrets::Secrets;
use crate::worker::telemetry::{Telemetry, ToController};
use crate::worker::tracking::Tracking;
use crate::worker::users::Users;
use crate::worker::views::Views;
use crate::worker::{faults, recover};

/// A journal that fails on demand, or lets the daemon die right after a record.
struct Twin {
    real: Sqlite,
    broken: AtomicBool,
    /// How many records are left until the daemon dies.
    left: AtomicUsize,
    /// How many of the next records find no room.
    full: AtomicUsize,
    died: Notify,
}

impl Twin {
    async fn open(state: &Path, left: usize) -> Twin {
        let real = Sqlite::open(&state.join("journal.db")).await.unwrap();
        Twin {
            real,
            broken: AtomicBool::new(false),
            left: AtomicUsize::new(left),
            full: AtomicUsize::new(0),
            died: Notify::new(),
        }
    }
}

impl Journal for Twin {
    fn enter<'a>(&'a self, record: &'a Record) -> BoxFuture<'a, Result<(), JournalError>> {
        Box::pin(async move {
            if self.broken.load(Ordering::SeqCst) {
                return Err(JournalError::SetAside {
                    path: "journal.db".into(),
                    source: std::io::ErrorKind::StorageFull.into(),
                });
            }
            if self.full.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
            {
                let source = std::io::ErrorKind::StorageFull.into();
                return Err(JournalError::Disk { replica: record.replica.clone(), source });
            }
            self.real.enter(record).await?;
            if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
                self.died.notify_one();
                std::future::pending::<()>().await;
            }
            Ok(())
        })
    }

    fn done<'a>(&'a self, replica: &'a ReplicaId) -> BoxFuture<'a, Result<(), JournalError>> {
        Box::pin(async move { self.real.done(replica).await })
    }

    fn open_replicas(&self) -> BoxFuture<'_, Result<Vec<Record>, JournalError>> {
        Box::pin(async move { self.real.open_replicas().await })
    }
}

mod longer;

/// What a runner gets, and its journal.
struct TestNode {
    worker: Arc<Worker>,
    journal: Arc<Twin>,
}

impl Deref for TestNode {
    type Target = Arc<Worker>;

    fn deref(&self) -> &Arc<Worker> {
        &self.worker
    }
}

impl DerefMut for TestNode {
    fn deref_mut(&mut self) -> &mut Arc<Worker> {
        &mut self.worker
    }
}

/// A controller that is not there.
fn nobody() -> Channel {
    Endpoint::from_static("http://127.0.0.1:1").connect_lazy()
}

/// A node with its state in `state`, whose controller is unreachable.
async fn node(state: &Path, left: usize) -> TestNode {
    node_with(state, left, &Fake::default(), []).await
}

/// The same with this executor, and builds that go like this.
async fn node_with(
    state: &Path,
    left: usize,
    executor: &Fake,
    builds: impl IntoIterator<Item = Script>,
) -> TestNode {
    let flags = Flags { user: true, state_dir: Some(state.display().to_string()), ..Flags::default() };
    let mut config = Config::resolve(&flags, &Variables::of_process()).unwrap();
    config.disk_reserve = 0;
    std::fs::create_dir_all(crate::worker::jobs_dir(state)).unwrap();
    let environments = EnvConfig::plain(state.join("envs"), String::new());
    let builders: [Arc<dyn EnvBuilder>; 1] = [Arc::new(Scripted::new(builds))];
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let clock: Arc<dyn agent_model::Clock> = Arc::new(SystemClock);
    // It waits for the lock of the previous node, whose tasks end meanwhile.
    let place = state.join("cas");
    let blobs = tokio::task::spawn_blocking(move || Disk::open(&place)).await.unwrap().unwrap();
    let (store, disk) = (Store::Disk(blobs.clone()), DiskKeeper::open(state, 0));
    let limits = gc::StoreLimits { size: u64::MAX, marks: Watermarks::new(0), lease: Duration::ZERO };
    let journal = Arc::new(Twin::open(state, left).await);
    let worker = Arc::new(Worker {
        clock: clock.clone(),
        boot_id: "this boot".into(),
        journal: journal.clone(),
        prestaged_trees: PrestagedTrees::new(state, store.clone(), disk.clone()),
        store,
        collector: Collector::new(blobs, limits, &[], clock.clone()),
        data: crate::worker::data::Data::open(&config, Path::new("agent-shim"), &clock).unwrap(),
        environments: Environments::with_builders(&environments, Arc::new(builders)).unwrap(),
        built: Arc::default(),
        executor: Arc::new(executor.clone()),
        gpus: Gpus::new(Looker::new(&config), watch::Sender::default(), watch::Sender::default(), []),
        telemetry: Telemetry::new(ToController::Far(nobody())).0,
        taken: crate::worker::system::RunningUse::default(),
        outbox: Outbox::new(nobody(), config.node_name.clone()),
        tracking: Tracking::start(listener, clock.clone(), std::future::pending()).unwrap().0,
        views: Views::Machine,
        users: Users::new(&config, crate::worker::jobs_dir(state), &[]),
        secrets: Secrets::new(nobody(), config.node_name.clone()),
        preemptions: Preemptions::new(&config.preemption, clock.clone()),
        job_memory: 0,
        retention: Retention::new(crate::worker::jobs_dir(state), clock, "this boot"),
        disk,
        config,
    });
    TestNode { worker, journal }
}

/// A command that writes nothing to its log, so that its controller is not needed before the outcome.
const ONCE: &str = "echo once >> outputs/starts; exit 7";

fn record() -> Record {
    let draft = JobDraft { command: ONCE.into(), ..JobDraft::default() };
    Record::accepted("job.1.0".parse().unwrap(), draft.validate().unwrap(), "this boot", "token".into())
}

/// The runner of a record, and the controller's end of its channels.
fn runner(
    worker: &Arc<Worker>,
    record: Record,
) -> (Runner, watch::Sender<Desired>, watch::Receiver<ReplicaView>) {
    let (desired, wanted) = watch::channel(Desired::Run { until: None, gang: None });
    let step = Some(record.step);
    let view = ReplicaView {
        step,
        detail: String::new(),
        started_at: None,
        alive: true,
        over: false,
        ready: None,
        preempted: false,
        outcome: None,
    };
    let (publish, view) = watch::channel(view);
    let orders = Orders { desired: wanted, given: watch::channel(None).1 };
    (Runner::new(worker.clone(), record, orders, publish, Arc::new(Notify::new())), desired, view)
}

fn fault(step: Step<impl Sized>) -> Code {
    match step {
        Break(End::Failed(fault)) => fault.code,
        _ => panic!("it did not fail"),
    }
}

/// Lives until the daemon dies or the outcome is written down.
async fn live(worker: &TestNode, record: Record) {
    live_while(worker, record, async |_, _| {}).await;
}

/// The same with something that happens meanwhile.
async fn live_while(
    worker: &TestNode,
    record: Record,
    meanwhile: impl AsyncFnOnce(&watch::Sender<Desired>, watch::Receiver<ReplicaView>),
) {
    let (runner, desired, mut view) = runner(worker, record);
    let follow = async {
        meanwhile(&desired, view.clone()).await;
        view.wait_for(|view| view.step == Some(ReplicaStep::Reported)).await.map(drop)
    };
    tokio::select! {
        () = worker.journal.died.notified() => {}
        () = runner.live() => panic!("nobody gave leave to go"),
        _ = follow => {}
        () = tokio::time::sleep(Duration::from_secs(60)) => panic!("the replica makes no progress"),
    }
}

async fn outcome(worker: &TestNode) -> Option<Outcome> {
    worker.journal.open_replicas().await.unwrap().pop()?.outcome
}

#[tokio::test]
async fn test_crash_after_any_record_gives_the_same_outcome() {
    const NEVER: usize = usize::MAX;
    let whole = tempfile::tempdir().unwrap();
    let worker = node(whole.path(), NEVER).await;
    live(&worker, record()).await;
    let expected = outcome(&worker).await.unwrap();
    assert_eq!(expected.exit, Some(ExitStatus::Code(7)));
    assert_eq!(expected.artifacts.unwrap().bytes, 5, "the command ran once");

    // A lost journal is restored from the directories, in which every replica is at its first step.
    for (records, lost) in (1..).flat_map(|records| [(records, false), (records, true)]) {
        let state = tempfile::tempdir().unwrap();
        let worker = node(state.path(), records).await;
        live(&worker, record()).await;
        if worker.journal.left.load(Ordering::SeqCst) > 0 {
            assert!(records > 8, "every step has a record");
            break;
        }
        drop(worker);
        if lost {
            let of_journal = |path: &std::path::PathBuf| path.to_string_lossy().contains("journal.db");
            let files = std::fs::read_dir(state.path()).unwrap().map(|file| file.unwrap().path());
            for file in files.filter(of_journal) {
                // The database is closed in the background, which removes some of them, too.
                let removed = std::fs::remove_file(file).map_err(|error| error.kind());
                assert!(matches!(removed, Ok(()) | Err(std::io::ErrorKind::NotFound)), "{removed:?}");
            }
        }
        let worker = node(state.path(), NEVER).await;
        let jobs = crate::worker::jobs_dir(state.path());
        let found = recover::open_replicas(&*worker.journal, &jobs).await.unwrap().pop().unwrap();
        live(&worker, found).await;
        let found = outcome(&worker).await.unwrap();
        let log = |outcome: &Outcome| outcome.streams.iter().find(|end| end.stream == Stream::Job).cloned();
        let same = (found.verdict, found.exit, found.artifacts, log(&found));
        let other = (expected.verdict, expected.exit, expected.artifacts, log(&expected));
        assert_eq!(same, other, "after record {records}, journal lost: {lost}");
    }
}

#[tokio::test]
async fn test_nothing_starts_that_cannot_be_written_down() {
    let state = tempfile::tempdir().unwrap();
    let worker = node(state.path(), usize::MAX).await;
    worker.journal.broken.store(true, Ordering::SeqCst);
    let (mut runner, _desired, view) = runner(&worker, record());
    assert_eq!(fault(runner.accept().await), Code::DiskFull);
    // The controller still gets a report, and the remaining steps are done.
    let ending = runner.release(End::Failed(faults::rebooted())).await;
    runner.upload(&ending).await;
    assert_eq!(view.borrow().step, Some(ReplicaStep::Reported));
}

#[tokio::test]
async fn test_stop_before_the_start_means_never() {
    let state = tempfile::tempdir().unwrap();
    let worker = node(state.path(), usize::MAX).await;
    let (mut runner, desired, _view) = runner(&worker, record());
    assert!(runner.accept().await.is_continue());
    desired.send_replace(Desired::Stop { grace: Duration::ZERO, reason: "canceled".into() });
    assert!(matches!(runner.fetch().await, Break(End::Stopped)));
    assert!(matches!(runner.build().await, Break(End::Stopped)));
    assert_eq!(runner.release(End::Stopped).await.verdict, Verdict::Canceled);
}

#[tokio::test]
async fn test_another_boot_starts_nothing() {
    let state = tempfile::tempdir().unwrap();
    let worker = node(state.path(), usize::MAX).await;
    let (mut runner, _desired, _view) =
        runner(&worker, Record { boot_id: "an earlier one".into(), ..record() });
    assert!(runner.accept().await.is_continue());
    assert_eq!(fault(runner.recall().await), Code::NodeRebooted);
}

#[tokio::test]
async fn test_too_full_a_disk_holds_a_replica_before_anything_is_fetched() {
    let state = tempfile::tempdir().unwrap();
    let mut worker = node(state.path(), usize::MAX).await;
    Arc::get_mut(&mut worker).unwrap().disk = DiskKeeper::open(state.path(), u64::MAX);
    let (mut runner, desired, mut view) = runner(&worker, record());
    tokio::select! {
        _ = runner.fetch() => panic!("there is no room"),
        seen = view.wait_for(|view| view.detail.starts_with("waiting for room: NODE-101")) => drop(seen.unwrap()),
    }
    assert!(!runner.dir.work().exists());
    desired.send_replace(Desired::Stop { grace: Duration::ZERO, reason: "canceled".into() });
    assert!(matches!(runner.fetch().await, Break(End::Stopped)), "it can still be canceled");
}

#[tokio::test]
async fn test_full_disk_gives_way_to_records() {
    let state = tempfile::tempdir().unwrap();
    let worker = node(state.path(), usize::MAX).await;
    worker.journal.full.store(3, Ordering::SeqCst);
    let (mut runner, _desired, _view) = runner(&worker, record());
    assert!(runner.accept().await.is_continue());
    assert_eq!(worker.journal.full.load(Ordering::SeqCst), 0);
    assert_eq!(state.path().join("ballast").metadata().unwrap().len(), 4 << 20, "a piece for each refusal");
    assert_eq!(worker.journal.open_replicas().await.unwrap().len(), 1);
}

#[tokio::test]
async fn test_record_that_finds_no_room_is_waited_for() {
    let state = tempfile::tempdir().unwrap();
    let mut worker = node(state.path(), usize::MAX).await;
    while worker.disk.give_way() {} // no ballast is left
    // The room was freed since the failure.
    worker.journal.full.store(2, Ordering::SeqCst);
    let (mut ready, _desired, view) = runner(&worker, record());
    assert!(ready.accept().await.is_continue());
    assert_eq!(view.borrow().step, Some(ReplicaStep::Accepted));
    drop(ready);
    // The same while there is no room.
    Arc::get_mut(&mut worker).unwrap().disk = DiskKeeper::open(state.path(), u64::MAX);
    while worker.disk.give_way() {}
    worker.journal.full.store(1, Ordering::SeqCst);
    let (mut runner, desired, mut view) = runner(&worker, record());
    tokio::select! {
        _ = runner.accept() => panic!("there is no room"),
        seen = view.wait_for(|view| view.detail.starts_with("waiting for room: NODE-101")) => drop(seen.unwrap()),
    }
    assert_eq!(worker.journal.full.load(Ordering::SeqCst), 0, "the record was refused");
    desired.send_replace(Desired::Stop { grace: Duration::ZERO, reason: "canceled".into() });
    worker.journal.full.store(1, Ordering::SeqCst);
    assert!(matches!(runner.accept().await, Break(End::Stopped)), "it can still be canceled");
}

/// A job that may be replaced while its node is silent.
fn replaced() -> Record {
    sleeper(OnDisconnect::Replace)
}

fn sleeper(on_disconnect: OnDisconnect) -> Record {
    job("sleep 1000", on_disconnect)
}

fn job(command: &str, on_disconnect: OnDisconnect) -> Record {
    let limits = Limits { on_disconnect, ..Limits::default() };
    let draft = JobDraft { command: command.into(), limits, ..JobDraft::default() };
    Record { spec: draft.validate().unwrap(), ..record() }
}

#[tokio::test]
async fn test_nothing_that_may_be_replaced_starts_without_a_lease_that_holds() {
    let state = tempfile::tempdir().unwrap();
    let worker = node(state.path(), usize::MAX).await;
    let (mut runner, desired, mut view) = runner(&worker, replaced());
    let now = worker.clock.boot();
    let later = now + Duration::from_secs(3600);
    for over in [None, Some(now)] {
        desired.send_replace(Desired::Run { until: over, gang: None });
        tokio::select! {
            _ = runner.leave_to_start() => panic!("no lease holds"),
            seen = view.wait_for(|view| view.detail.starts_with("waiting for the controller")) => drop(seen.unwrap()),
        }
    }
    desired.send_replace(Desired::Run { until: Some(later), gang: None });
    assert!(matches!(runner.leave_to_start().await, Continue(Some(until)) if until == later));
    desired.send_replace(Desired::Disown);
    assert!(matches!(runner.leave_to_start().await, Break(End::Stopped)));
}

#[tokio::test]
async fn test_job_whose_supervisor_does_not_end_it_is_ended_by_the_agent() {
    let state = tempfile::tempdir().unwrap();
    let executor = Fake::default();
    let worker = node_with(state.path(), usize::MAX, &executor, []).await;
    let (runner, desired, mut view) = runner(&worker, replaced());
    let now = worker.clock.boot();
    desired.send_replace(Desired::Run { until: Some(now + Duration::from_secs(3600)), gang: None });
    let dir = runner.dir.clone();
    let live = runner.live();
    tokio::pin!(live);
    tokio::select! {
        () = &mut live => panic!("it sleeps"),
        seen = view.wait_for(|view| view.step == Some(ReplicaStep::Running)) => drop(seen.unwrap()),
    }
    // A stopped supervisor does not answer, and its lease is long over by now.
    executor.halt(&dir);
    desired.send_replace(Desired::Run { until: Some(Boot::from_millis(2)), gang: None });
    tokio::select! {
        () = &mut live => panic!("nobody gave leave to go"),
        seen = view.wait_for(|view| !view.alive && view.detail.ends_with("ended by the agent")) => drop(seen.unwrap()),
        () = tokio::time::sleep(Duration::from_secs(60)) => panic!("the job lives"),
    }
    // The supervisor is ended too, so nobody has to continue it.
    tokio::select! {
        () = &mut live => panic!("nobody gave leave to go"),
        seen = view.wait_for(|view| view.step == Some(ReplicaStep::Reported)) => drop(seen.unwrap()),
        () = tokio::time::sleep(Duration::from_secs(60)) => panic!("the job lives"),
    }
    let outcome = outcome(&worker).await.unwrap();
    assert_eq!((outcome.verdict, outcome.fault.unwrap().code), (Verdict::Failed, Code::LeaseOver));
}

/// A start for which the node lacks something, and one whose container engine is unreachable.
fn lack() -> LaunchError {
    LaunchError::Spawn { shim: "agent-shim".into(), source: std::io::Error::from_raw_os_error(11) }
}

fn away() -> LaunchError {
    DockerError::Absent { socket: "docker.sock".into(), detail: "nobody is there".into() }.into()
}

/// A job that was started once, and wrote down that it was.
fn assert_started_once(outcome: &Outcome) {
    assert_eq!(outcome.exit, Some(ExitStatus::Code(7)), "{outcome:?}");
    assert_eq!(outcome.artifacts.as_ref().unwrap().bytes, 5, "the command ran once");
}

#[tokio::test]
async fn test_start_that_lacks_something_or_is_not_answered_is_tried_again() {
    let silent = LaunchError::Silent { dir: "job".into(), after: Duration::ZERO };
    for errors in [vec![lack()], vec![silent], vec![lack(), lack()]] {
        let (state, executor) = (tempfile::tempdir().unwrap(), Fake::default());
        executor.refuse(errors);
        let worker = node_with(state.path(), usize::MAX, &executor, []).await;
        live_while(&worker, record(), async |_, mut view| {
            view.wait_for(|view| view.detail.starts_with("waiting for what the node lacks: ")).await.unwrap();
        })
        .await;
        assert_started_once(&outcome(&worker).await.unwrap());
    }
}

/// A build of an environment that is an image.
fn image() -> Script {
    Script { image: Some(Image::default()), ..Script::default() }
}

#[tokio::test]
async fn test_container_engine_that_is_away_is_waited_for_until_somebody_cancels() {
    for canceled in [false, true] {
        let (state, executor) = (tempfile::tempdir().unwrap(), Fake::default());
        executor.refuse((0..if canceled { 1000 } else { 2 }).map(|_| away()));
        let worker = node_with(state.path(), usize::MAX, &executor, [image()]).await;
        live_while(&worker, record(), async |desired, mut view| {
            view.wait_for(|view| view.detail.starts_with("waiting for the container engine: "))
                .await
                .unwrap();
            if canceled {
                let reason = "canceled by uid 7".to_owned();
                desired.send_replace(Desired::Stop { grace: Duration::ZERO, reason });
            }
        })
        .await;
        let outcome = outcome(&worker).await.unwrap();
        match canceled {
            false => assert_started_once(&outcome),
            true => assert_eq!((outcome.verdict, outcome.started_at), (Verdict::Canceled, None)),
        }
    }
}

#[tokio::test]
async fn test_container_that_cannot_be_prepared_ends_the_job_before_it_starts() {
    let source = DockerError::Refused { step: "make", status: 404, message: "no such image".into() };
    let (state, executor) = (tempfile::tempdir().unwrap(), Fake::default());
    executor.refuse([LaunchError::ImageGone { reference: "busybox".into(), source }]);
    let worker = node_with(state.path(), usize::MAX, &executor, [image()]).await;
    live(&worker, record()).await;
    let outcome = outcome(&worker).await.unwrap();
    assert_eq!((outcome.verdict, outcome.exit, outcome.started_at), (Verdict::Failed, None, None));
    assert_eq!(outcome.fault.unwrap().code, Code::LaunchFailed);
}

#[tokio::test]
async fn test_container_that_stands_waits_for_leave_and_serves_the_next_daemon() {
    let (state, executor) = (tempfile::tempdir().unwrap(), Fake::default());
    executor.refuse([away()]);
    let worker = node_with(state.path(), usize::MAX, &executor, [image()]).await;
    let record = job(ONCE, OnDisconnect::Replace);
    let dir = worker.job_dir(&record.replica);
    let leave = Desired::Run { until: Some(worker.clock.boot() + Duration::from_secs(3600)), gang: None };
    let (first, desired, mut view) = runner(&worker, record);
    desired.send_replace(leave.clone());
    let stands = async {
        view.wait_for(|view| view.detail.starts_with("waiting for the container engine: ")).await.unwrap();
        desired.send_replace(Desired::Run { until: None, gang: None });
        view.wait_for(|view| view.detail.starts_with("waiting for the controller to say")).await.map(drop)
    };
    tokio::select! {
        () = first.live() => panic!("nobody gave leave to start"),
        seen = stands => seen.unwrap(),
    }
    let stood = dir.read_hello().unwrap().unwrap();
    assert!(!dir.is_started());
    drop(worker);
    let worker = node_with(state.path(), usize::MAX, &executor, []).await;
    let found = worker.journal.open_replicas().await.unwrap().pop().unwrap();
    live_while(&worker, found, async |desired, _| drop(desired.send_replace(leave))).await;
    assert_started_once(&outcome(&worker).await.unwrap());
    assert_eq!(dir.read_exit().unwrap().unwrap().instance, stood.instance);
}

#[tokio::test]
async fn test_job_that_does_not_listen_is_canceled_when_its_grace_is_over() {
    let state = tempfile::tempdir().unwrap();
    let worker = node(state.path(), usize::MAX).await;
    live_while(&worker, job("trap '' TERM; sleep 1000", OnDisconnect::Hold), async |desired, mut view| {
        view.wait_for(|view| view.step == Some(ReplicaStep::Running)).await.unwrap();
        let reason = "canceled by uid 7".to_owned();
        desired.send_replace(Desired::Stop { grace: Duration::from_millis(100), reason });
        view.wait_for(|view| view.detail == "stopping: canceled by uid 7").await.unwrap();
    })
    .await;
    let outcome = outcome(&worker).await.unwrap();
    assert_eq!((outcome.verdict, outcome.exit), (Verdict::Canceled, Some(ExitStatus::Signal(9))));
}

#[tokio::test]
async fn test_job_that_is_lost_where_memory_ran_out_is_for_another_node() {
    // Either the daemon that started it finds it lost, or the next one.
    for next in [false, true] {
        let (state, executor) = (tempfile::tempdir().unwrap(), Fake::default());
        let mut worker = node_with(state.path(), if next { 5 } else { usize::MAX }, &executor, []).await;
        let record = sleeper(OnDisconnect::Hold);
        let dir = worker.job_dir(&record.replica);
        let lose = || {
            executor.starve(&dir, 3).unwrap();
            assert!(executor.kill(&dir));
        };
        live_while(&worker, record, async |_, mut view| {
            view.wait_for(|view| view.step == Some(ReplicaStep::Running)).await.unwrap();
            lose();
        })
        .await;
        if next {
            lose();
            drop(worker);
            worker = node_with(state.path(), usize::MAX, &executor, []).await;
            live(&worker, worker.journal.open_replicas().await.unwrap().pop().unwrap()).await;
        }
        let fault = outcome(&worker).await.unwrap().fault.unwrap();
        assert_eq!((fault.code, fault.blame), (Code::OutOfMemory, agent_model::Blame::Node), "{fault:?}");
    }
}

/// A node whose blobs are at an unreachable server, and its replica whose command succeeded and left a file.
async fn without_a_store(state: &Path, disk_reserve: u64) -> (TestNode, Record) {
    let mut node = node(state, usize::MAX).await;
    let worker = Arc::get_mut(&mut node).unwrap();
    let Store::Disk(disk) = worker.store.clone() else { panic!("the store is elsewhere") };
    worker.store = Store::Tiered(Box::new(Tiered::new(disk, Remote::far(nobody(), ""))));
    worker.disk = DiskKeeper::open(state, disk_reserve);
    let now = worker.clock.now();
    let (verdict, exit) = (Verdict::Completed, Some(ExitStatus::Code(0)));
    let ending =
        Some(Ending { verdict, exit, fault: None, started_at: Some(now), ended_at: now, usage: None });
    let record = Record { step: ReplicaStep::Uploading, ending, ..record() };
    let dir = worker.job_dir(&record.replica);
    recover::prepare(&dir, &record).await.unwrap();
    std::fs::create_dir_all(dir.work().join("outputs")).unwrap();
    std::fs::write(dir.work().join("outputs/model"), "weights").unwrap();
    worker.journal.enter(&record).await.unwrap();
    (node, record)
}

/// The report of a replica whose outputs are not stored.
async fn unstored(worker: &TestNode) -> Fault {
    let record = worker.journal.open_replicas().await.unwrap().pop().unwrap();
    assert!(record.precious, "the outputs stay");
    assert!(worker.job_dir(&record.replica).work().join("outputs/model").exists());
    let outcome = record.outcome.unwrap();
    assert_eq!((outcome.verdict, outcome.exit), (Verdict::Failed, Some(ExitStatus::Code(0))));
    let fault = outcome.fault.unwrap();
    assert_eq!((fault.code, fault.blame), (Code::OutputsUnstored, agent_model::Blame::Network));
    assert!(fault.fix.as_ref().unwrap().contains("agentctl node outputs job"), "{fault:?}");
    fault
}

#[tokio::test(start_paused = true)]
async fn test_outputs_wait_for_the_store_until_somebody_cancels() {
    let state = tempfile::tempdir().unwrap();
    let (worker, record) = without_a_store(state.path(), 0).await;
    let (runner, desired, mut view) = runner(&worker, record);
    let follow = async {
        for _ in 0..3 {
            view.wait_for(|view| view.detail.starts_with("waiting for the store of blobs: ")).await.unwrap();
            tokio::time::sleep(Duration::from_secs(100)).await;
            assert_eq!(view.borrow().step, Some(ReplicaStep::Uploading), "it waits for as long as it takes");
        }
        let reason = "canceled by uid 7".to_owned();
        desired.send_replace(Desired::Stop { grace: Duration::ZERO, reason });
        view.wait_for(|view| view.step == Some(ReplicaStep::Reported)).await.unwrap();
    };
    tokio::select! {
        () = runner.live() => panic!("nobody gave leave to go"),
        () = follow => {}
    }
    assert!(unstored(&worker).await.why[0].contains("canceled"));
}

#[tokio::test(start_paused = true)]
async fn test_outputs_do_not_wait_where_the_node_needs_the_room() {
    let state = tempfile::tempdir().unwrap();
    let (worker, record) = without_a_store(state.path(), u64::MAX).await;
    let (runner, _desired, mut view) = runner(&worker, record);
    tokio::select! {
        () = runner.live() => panic!("nobody gave leave to go"),
        _ = view.wait_for(|view| view.step == Some(ReplicaStep::Reported)) => {}
    }
    assert!(unstored(&worker).await.why[0].contains("needs the room"));
}

/// The machine goes in so many seconds, as an operator says.
fn goes(worker: &Worker, seconds: u64) {
    let until = worker.clock.boot() + Duration::from_secs(seconds);
    worker.preemptions.ask(Some((until, "maintenance".into())));
}

#[tokio::test]
async fn test_a_machine_that_goes_starts_nothing() {
    let state = tempfile::tempdir().unwrap();
    let worker = node(state.path(), usize::MAX).await;
    let (mut runner, _desired, view) = runner(&worker, record());
    goes(&worker, 60);
    assert!(runner.accept().await.is_continue());
    let Break(end @ End::Preempted(_)) = runner.fetch().await else { panic!("it goes on") };
    assert!(matches!(runner.build().await, Break(End::Preempted(_))));
    assert!(matches!(runner.leave_to_start().await, Break(End::Preempted(_))));
    let ending = runner.release(end).await;
    assert_eq!(ending.fault.unwrap().code, Code::Preempted);
    assert!(view.borrow().preempted, "nothing changes that any more");
}

#[tokio::test]
async fn test_a_command_is_told_and_a_withdrawn_notice_comes_too_late() {
    let state = tempfile::tempdir().unwrap();
    let worker = node(state.path(), usize::MAX).await;
    let (told, sleeps) = (worker.clone(), sleeper(OnDisconnect::Hold));
    let file = worker.job_dir(&sleeps.replica).preemption();
    live_while(&worker, sleeps, async |_, mut view| {
        view.wait_for(|view| view.step == Some(ReplicaStep::Running)).await.unwrap();
        assert!(!file.exists());
        goes(&told, 120);
        view.wait_for(|view| view.preempted).await.unwrap();
        told.preemptions.ask(None);
    })
    .await;
    let outcome = outcome(&worker).await.unwrap();
    assert_eq!((outcome.verdict, outcome.exit), (Verdict::Failed, Some(ExitStatus::Signal(15))));
    assert_eq!(outcome.fault.unwrap().code, Code::Preempted);
    let text = std::fs::read_to_string(file).unwrap();
    assert!(text.contains("\"deadline_ms\"") && text.contains("maintenance"), "{text}");
}

#[tokio::test]
async fn test_a_notice_in_the_record_outlives_the_daemon() {
    let state = tempfile::tempdir().unwrap();
    let worker = node(state.path(), usize::MAX).await;
    goes(&worker, 60);
    let notice = worker.preemptions.notice();
    worker.preemptions.ask(None);
    live(&worker, Record { preempted: notice, ..record() }).await;
    let outcome = outcome(&worker).await.unwrap();
    assert_eq!((outcome.exit, outcome.fault.unwrap().code), (None, Code::Preempted));
}
