//! The promises of every executor. Each implementation runs this; it panics at the first broken promise.
//!
//! Commands use only the words that a shell and [`Fake`](super::Fake) both understand.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use agent_model::{Boot, Clock as _, ExitStatus, SystemClock};
use agent_shim::segments::Reader;
use agent_shim::{End, ExitRecord, JobDir, Launch, Limits, LogPolicy, NotStarted, VERSION};
use tokio::time::{Instant, timeout};

use super::{Executor, Found, LaunchError, LimitError, RenewError, Running, WaitError};

const LONG: Duration = Duration::from_secs(60);
const AT_ONCE: Duration = Duration::ZERO;
const FOR_EVER: &str = "echo once >> starts; echo ready; sleep 1000";

/// An executor, and the faults of its supervisors.
pub(super) struct Subject<'a> {
    pub(super) executor: &'a dyn Executor,
    /// Kills a supervisor.
    pub(super) kill: &'a dyn Fn(&JobDir),
    /// Halts a supervisor.
    pub(super) halt: &'a dyn Fn(&JobDir),
}

/// Runs the suite.
pub(super) async fn check(subject: &Subject<'_>) {
    ends_are_told_as_they_were(subject).await;
    output_is_where_it_is_read(subject).await;
    a_command_is_started_once(subject).await;
    a_launch_that_is_cut_short_starts_once_at_most(subject).await;
    a_job_outlives_who_launched_it(subject).await;
    a_stop_ends_it(subject).await;
    a_lease_ends_it(subject).await;
    a_lease_is_renewed_or_refused(subject).await;
    a_time_limit_is_raised_or_refused(subject).await;
    its_time_ends_it(subject).await;
    a_lost_job_is_never_started_again(subject).await;
    a_halted_supervisor_is_told_and_can_be_ended(subject).await;
}

/// A job in a directory of its own, ended when the case is over.
struct Case<'a> {
    executor: &'a dyn Executor,
    dir: JobDir,
    _keep: tempfile::TempDir,
}

impl<'a> Case<'a> {
    fn new(subject: &Subject<'a>) -> Case<'a> {
        let keep = tempfile::tempdir().unwrap();
        let dir = JobDir::new(keep.path().join("d".repeat(120)).join("train.1.0"));
        dir.create().unwrap();
        std::fs::create_dir(dir.work()).unwrap();
        Case { executor: subject.executor, dir, _keep: keep }
    }

    fn order(&self, script: &str) -> Launch {
        launch_of(&["bash", "-c", script])
    }

    async fn launch(&self, launch: &Launch) -> Running {
        self.executor.launch(&self.dir, launch, None).await.unwrap()
    }

    async fn start(&self, script: &str) -> Running {
        self.launch(&self.order(script)).await
    }

    async fn found(&self) -> Found {
        self.executor.reattach(&self.dir).await.unwrap()
    }

    fn log(&self) -> String {
        String::from_utf8(log_of(&self.dir)).unwrap()
    }

    fn starts(&self) -> usize {
        fs::read_to_string(self.dir.work().join("starts")).unwrap_or_default().lines().count()
    }

    async fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + LONG;
        while !condition() {
            assert!(Instant::now() < deadline, "never: {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn until_ready(&self) {
        self.until("it is ready", || self.log().contains("ready")).await;
    }
}

/// A launch record with nothing but this command.
pub(super) fn launch_of(argv: &[&str]) -> Launch {
    Launch {
        version: VERSION,
        replica: "train.1.0".parse().unwrap(),
        argv: argv.iter().map(|arg| (*arg).to_owned()).collect(),
        env: BTreeMap::from([("PATH".into(), "/usr/local/bin:/usr/bin:/bin".into())]),
        cwd: "work".into(),
        grace: Duration::from_secs(1),
        timeout: None,
        user: None,
        log: LogPolicy::default(),
        limits: Limits::default(),
        open_files: None,
        lease_until: None,
        cgroup: None,
        container: false,
        tmp: None,
        view: None,
        metadata: false,
        denied: Vec::new(),
        nameless: false,
        hold_port: None,
        secrets: BTreeMap::new(),
        gang: None,
    }
}

/// All that a job has written so far.
pub(super) fn log_of(dir: &JobDir) -> Vec<u8> {
    let mut log = Reader::of(dir).unwrap();
    let mut bytes = vec![0; log.len().unwrap() as usize];
    assert_eq!(log.read_at(0, &mut bytes).unwrap(), bytes.len());
    bytes
}

async fn ended(running: &Running) -> ExitRecord {
    timeout(LONG, running.wait()).await.expect("the job ends").unwrap()
}

/// In whole milliseconds, the unit of leases.
fn soon(millis: u64) -> Option<Boot> {
    Some(Boot::from_millis(SystemClock.boot().millis() + millis))
}

fn signaled(signal: i32) -> End {
    End::Exited(ExitStatus::Signal(signal))
}

async fn ends_are_told_as_they_were(subject: &Subject<'_>) {
    for (script, code) in [("true", 0), ("exit 42", 42), ("no-such-program", 127)] {
        let case = Case::new(subject);
        let record = ended(&case.start(script).await).await;
        assert_eq!(record.end, End::Exited(ExitStatus::Code(code)), "{script}");
        assert_eq!(record, case.dir.read_exit().unwrap().unwrap());
        assert!(record.stopped.is_none() && !record.timed_out && !record.lease_over && record.oom.is_none());
        assert!(record.started_at.unwrap() <= record.ended_at);
        assert_eq!((record.leftovers, record.unkilled), (0, 0));
    }
}

async fn output_is_where_it_is_read(subject: &Subject<'_>) {
    let case = Case::new(subject);
    let script = "echo one; echo {} >> ../tracking.jsonl; echo two words; echo out >> file; exit 7";
    let running = case.start(script).await;
    let mut progress = running.progress();
    let record = ended(&running).await;
    assert_eq!((record.end, case.log().as_str()), (End::Exited(ExitStatus::Code(7)), "one\ntwo words\n"));
    assert_eq!((record.log_bytes, record.log_dropped, record.tracking_bytes), (14, 0, 3));
    let hash = "e24d8f5ab1603a3b1de04438c74e36ee684e944717311116e689d69f14fc771e";
    assert_eq!(record.log_sha256.as_deref(), Some(hash));
    while progress.changed().await.is_ok() {}
    assert_eq!((progress.borrow().log_bytes, progress.borrow().tracking_bytes), (14, 3));
    assert_eq!(Reader::of_tracking(&case.dir).unwrap().len().unwrap(), 3);
    assert_eq!(fs::read_to_string(case.dir.work().join("file")).unwrap(), "out\n");

    // Progress is reported before the end, too.
    let case = Case::new(subject);
    let running = case.start(FOR_EVER).await;
    let mut progress = running.progress();
    timeout(LONG, progress.wait_for(|now| now.log_bytes == 6)).await.unwrap().unwrap();
    running.stop(AT_ONCE, "enough").await.unwrap();
    ended(&running).await;
}

async fn a_command_is_started_once(subject: &Subject<'_>) {
    let case = Case::new(subject);
    let order = case.order(FOR_EVER);
    let launches = (0..6).map(|_| case.launch(&order));
    let running = futures_util::future::join_all(launches).await;
    case.until_ready().await;
    running[0].stop(AT_ONCE, "enough").await.unwrap();
    let record = ended(&running[0]).await;
    for other in &running[1..] {
        assert_eq!(ended(other).await, record);
    }
    // Nor is it started again after it has ended.
    assert_eq!(ended(&case.launch(&order).await).await, record);
    assert!(matches!(case.found().await, Found::Ended(found) if found == record));
    assert_eq!((case.starts(), case.log().as_str()), (1, "ready\n"));
}

async fn a_launch_that_is_cut_short_starts_once_at_most(subject: &Subject<'_>) {
    for step in 0..20 {
        let case = Case::new(subject);
        let order = case.order("echo once >> starts");
        let _ = timeout(Duration::from_micros(400 * step), case.launch(&order)).await;
        let record = ended(&case.launch(&order).await).await;
        assert_eq!((record.end, case.starts()), (End::Exited(ExitStatus::Code(0)), 1), "step {step}");
    }
}

async fn a_job_outlives_who_launched_it(subject: &Subject<'_>) {
    let case = Case::new(subject);
    assert!(matches!(case.found().await, Found::NotStarted));
    drop(case.start(FOR_EVER).await);
    case.until_ready().await;
    let Found::Running(running) = case.found().await else { panic!("it runs") };
    case.executor.clear(&case.dir).await.unwrap();
    assert!(!case.dir.exit().exists(), "what runs is not cleared away");
    running.stop(AT_ONCE, "enough").await.unwrap();
    let record = ended(&running).await;
    case.executor.clear(&case.dir).await.unwrap();
    assert!(matches!(case.found().await, Found::Ended(found) if found == record));
}

async fn a_stop_ends_it(subject: &Subject<'_>) {
    let case = Case::new(subject);
    let running = case.start(FOR_EVER).await;
    case.until_ready().await;
    running.stop(LONG, "canceled by uid 7").await.unwrap();
    let record = ended(&running).await;
    assert_eq!((record.end, record.stopped.as_deref()), (signaled(15), Some("canceled by uid 7")));
    assert!(!record.timed_out && !record.lease_over);
    running.stop(LONG, "after the end").await.unwrap();

    // A command that ignores SIGTERM; a shorter grace counts, the first reason stays.
    let case = Case::new(subject);
    let running = case.start("trap '' TERM; echo ready; sleep 1000").await;
    case.until_ready().await;
    running.stop(LONG * 10, "please").await.unwrap();
    assert!(timeout(Duration::from_millis(100), running.wait()).await.is_err());
    running.stop(AT_ONCE, "now").await.unwrap();
    let record = ended(&running).await;
    assert_eq!((record.end, record.stopped.as_deref()), (signaled(9), Some("please")));
}

async fn a_lease_ends_it(subject: &Subject<'_>) {
    let case = Case::new(subject);
    let until = soon(300);
    let grace = Duration::from_millis(100);
    let script = "trap '' TERM; echo ready; sleep 1000";
    let launch = Launch { grace, lease_until: until, ..case.order(script) };
    let running = case.launch(&launch).await;
    let record = ended(&running).await;
    assert!(SystemClock.boot() >= until.unwrap() + grace);
    assert_eq!((record.lease_over, record.end), (true, signaled(9)));
    assert!(record.stopped.is_none() && !record.timed_out);

    let case = Case::new(subject);
    let launch = Launch { lease_until: Some(Boot::from_millis(1)), ..case.order(FOR_EVER) };
    let record = ended(&case.launch(&launch).await).await;
    assert_eq!((record.lease_over, record.end), (true, End::NeverStarted(NotStarted::LeaseOver)));
    assert!(!case.dir.is_started() && case.starts() == 0);
}

async fn a_lease_is_renewed_or_refused(subject: &Subject<'_>) {
    let case = Case::new(subject);
    let (first, later) = (soon(300), soon(600_000).unwrap());
    let running = case.launch(&Launch { lease_until: first, ..case.order("trap '' TERM; sleep 1000") }).await;
    assert_eq!(running.renew(later).await.unwrap(), Some(later));
    assert_eq!(running.renew(Boot::from_millis(1)).await.unwrap(), Some(later), "it is never shortened");
    tokio::time::sleep(first.unwrap().since(SystemClock.boot()) + Duration::from_millis(100)).await;
    assert!(!case.dir.exit().exists());
    running.stop(LONG, "enough").await.unwrap();
    assert!(matches!(running.renew(later).await, Err(RenewError::Refused { .. })), "it is being ended");
    running.stop(AT_ONCE, "now").await.unwrap();
    assert!(!ended(&running).await.lease_over);
    assert_eq!(running.renew(later).await.unwrap(), None, "it has ended");

    let case = Case::new(subject);
    let running = case.start(FOR_EVER).await;
    assert!(matches!(running.renew(later).await, Err(RenewError::Refused { .. })), "it has none");
    running.stop(AT_ONCE, "enough").await.unwrap();
    ended(&running).await;
}

async fn a_time_limit_is_raised_or_refused(subject: &Subject<'_>) {
    let case = Case::new(subject);
    let (short, long) = (Duration::from_millis(300), Duration::from_secs(600));
    let running = case.launch(&Launch { timeout: Some(short), ..case.order(FOR_EVER) }).await;
    assert_eq!(running.limit(long).await.unwrap(), Some(long));
    assert_eq!(running.limit(short).await.unwrap(), Some(long), "it is never shortened");
    tokio::time::sleep(2 * short).await;
    assert!(!case.dir.exit().exists());
    running.stop(AT_ONCE, "enough").await.unwrap();
    assert!(!ended(&running).await.timed_out);
    assert_eq!(running.limit(long).await.unwrap(), None, "it has ended");

    let case = Case::new(subject);
    let running = case.start(FOR_EVER).await;
    assert!(matches!(running.limit(long).await, Err(LimitError::Refused { .. })), "it has none");
    running.stop(AT_ONCE, "enough").await.unwrap();
    ended(&running).await;
}

async fn its_time_ends_it(subject: &Subject<'_>) {
    let case = Case::new(subject);
    let timeout = Some(Duration::from_millis(100));
    let running =
        case.launch(&Launch { timeout, lease_until: soon(600_000), ..case.order("sleep 1000") }).await;
    let record = ended(&running).await;
    assert_eq!((record.timed_out, record.lease_over, record.end), (true, false, signaled(15)));
    assert!(record.stopped.is_none());
}

async fn a_lost_job_is_never_started_again(subject: &Subject<'_>) {
    let case = Case::new(subject);
    let running = case.start(FOR_EVER).await;
    case.until_ready().await;
    (subject.kill)(&case.dir);
    let lost = timeout(LONG, running.wait()).await.unwrap().unwrap_err();
    let WaitError::Lost { lost, .. } = lost else { panic!("{lost}") };
    assert_eq!((lost.rebooted, lost.left, lost.starved), (false, 0, 0));
    assert!(matches!(case.found().await, Found::Lost(lost) if lost.left == 0));
    let again = case.executor.launch(&case.dir, &case.order(FOR_EVER), None).await;
    assert!(matches!(again, Err(LaunchError::Lost { .. })), "{again:?}");
    assert_eq!(case.starts(), 1);
}

async fn a_halted_supervisor_is_told_and_can_be_ended(subject: &Subject<'_>) {
    let case = Case::new(subject);
    let running = case.start(FOR_EVER).await;
    case.until_ready().await;
    assert!(!case.executor.is_halted(&case.dir));
    (subject.halt)(&case.dir);
    case.until("it is halted", || case.executor.is_halted(&case.dir)).await;
    let (stop, look) = (running.stop(AT_ONCE, "unheard"), case.executor.reattach(&case.dir));
    assert!(timeout(Duration::from_millis(200), stop).await.is_err());
    assert!(timeout(Duration::from_millis(200), look).await.is_err(), "silence is not death");
    let (found, left) = case.executor.end(&case.dir, LONG).await.unwrap();
    assert!(found >= 1 && left == 0, "{found} {left}");
    assert!(matches!(timeout(LONG, running.wait()).await.unwrap(), Err(WaitError::Lost { .. })));
    assert!(!case.dir.exit().exists(), "nothing of an unheard stop is written down");
}
