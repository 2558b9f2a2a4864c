//! The tasks of the daemon: how each is started, what its end means, and the order in which they are stopped.
//!
//! Owns: the only `spawn` of the program. Hides: tracking, panics, restarts, stop deadlines. Every task is boxed, so
//! that the runtime's code for a task is compiled once (ADR 0071).
//!
//! Invariants: a task belongs to one [`TaskKind`], which defines what its end means ([`OnEnd`]) and what a stop means
//! ([`OnStop`]); an unexpected end, a panic included, is never lost: the task is restarted, or the daemon stops with
//! it as the reason (the service manager restarts it, and jobs are not affected), or, for a runner, the reconciler
//! starts another one for the replica; a stop goes through the kinds in the order of declaration, logs what it waits
//! for, and never takes longer than the sum of their deadlines.
//!
//! ```text
//! stop:  Intake ─▶ Runner ─▶ Telemetry ─▶ Sync ─▶ Tracking, Upkeep ─▶ Controller ─▶ Api
//!        (refuse    (jobs      (flush)     (last                       (stores)
//!         orders)    go on)                 word)
//! ```

use std::error::Error;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use agent_model::causes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, error, info, warn};

/// What a task is for, in the order in which the kinds are stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaskKind {
    /// Not a task: the permission to accept new orders, withdrawn first.
    Intake,
    /// Drives one replica. Dropped at a stop: the job goes on, and a later runner resumes from the journal.
    Runner,
    /// Ships logs and tracking records.
    Telemetry,
    /// Syncs the replicas with the controller.
    Sync,
    /// Serves the tracking endpoint of the jobs.
    Tracking,
    /// Looks after the node: its disk, its health, the directories of replicas that are over.
    Upkeep,
    /// Places jobs and watches leases.
    Controller,
    /// Serves the socket.
    Api,
}

/// What it means when a task of a kind ends without a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnEnd {
    /// The daemon is of no use without it: it stops, and the service manager restarts it.
    StopDaemon,
    /// It keeps nothing in memory that matters: it is restarted, with growing delays.
    StartAgain,
    /// The code that spawned it handles its end.
    Tell,
}

/// What a stop does to the tasks of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnStop {
    /// Drop them where they are.
    Drop,
    /// Ask them to end and drop them after this time.
    Wait(Duration),
}

/// How many kinds there are.
const KINDS: usize = 8;

/// How long dropped tasks may take to end: only one that never awaits needs longer.
const DROP_WITHIN: Duration = Duration::from_secs(2);

/// The first and the longest wait before a task is started again.
const AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));

impl TaskKind {
    /// Every kind, in stop order.
    const ALL: [TaskKind; KINDS] = [
        TaskKind::Intake,
        TaskKind::Runner,
        TaskKind::Telemetry,
        TaskKind::Sync,
        TaskKind::Tracking,
        TaskKind::Upkeep,
        TaskKind::Controller,
        TaskKind::Api,
    ];

    fn on_stop(self) -> OnStop {
        match self {
            TaskKind::Intake | TaskKind::Runner | TaskKind::Tracking | TaskKind::Upkeep => OnStop::Drop,
            TaskKind::Telemetry => OnStop::Wait(Duration::from_secs(3)),
            TaskKind::Sync => OnStop::Wait(Duration::from_secs(1)),
            TaskKind::Controller => OnStop::Wait(Duration::from_secs(5)),
            // Calls that follow a log or watch a job never end by themselves.
            TaskKind::Api => OnStop::Wait(Duration::from_millis(500)),
        }
    }

    fn on_end(self) -> OnEnd {
        match self {
            TaskKind::Runner => OnEnd::Tell,
            TaskKind::Upkeep => OnEnd::StartAgain,
            _ => OnEnd::StopDaemon,
        }
    }

    /// What a stop does in this phase, for the log.
    fn stopping(self) -> &'static str {
        match self {
            TaskKind::Intake => "no new orders are taken",
            TaskKind::Runner => "letting go of the jobs; they go on",
            TaskKind::Telemetry => "sending what logs there are",
            TaskKind::Sync => "saying a last word to the controller",
            TaskKind::Tracking => "closing the tracking endpoint",
            TaskKind::Upkeep => "ending the upkeep of the node",
            TaskKind::Controller => "closing the store",
            TaskKind::Api => "letting clients go",
        }
    }
}

/// Why the daemon had to stop by itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind:?} ended unexpectedly: {reason}")]
pub(crate) struct TaskFailure {
    /// What ended.
    pub(crate) kind: TaskKind,
    /// The error it ended with, each source once, or the panic.
    pub(crate) reason: String,
}

/// A task; its error is told with each source once.
type BoxedTask = BoxFuture<'static, Result<(), String>>;

struct StopPhase {
    tasks: TaskTracker,
    stop: CancellationToken,
    drop: CancellationToken,
}

/// Starts, watches and stops the tasks. Clones share them.
#[derive(Clone)]
pub(crate) struct Supervisor {
    phases: Arc<[StopPhase; KINDS]>,
    failure: watch::Sender<Option<TaskFailure>>,
}

impl Supervisor {
    /// One without tasks.
    pub(crate) fn new() -> Supervisor {
        let phase = |_| StopPhase {
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            drop: CancellationToken::new(),
        };
        Supervisor { phases: Arc::new(std::array::from_fn(phase)), failure: watch::channel(None).0 }
    }

    /// Canceled when tasks of `kind` are asked to end.
    pub(crate) fn stopping(&self, kind: TaskKind) -> CancellationToken {
        self.phases[kind as usize].stop.clone()
    }

    /// Starts a task. `name` is for the log. A task of a kind that is waited for at a stop ends when
    /// [`Self::stopping`] is canceled.
    pub(crate) fn spawn<F, E>(&self, kind: TaskKind, name: &str, task: F)
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Error + Send + 'static,
    {
        self.start(kind, name, task.map(|done| done.map_err(|error| causes::tell(&error))).boxed());
    }

    fn start(&self, kind: TaskKind, name: &str, task: BoxedTask) {
        let phase = &self.phases[kind as usize];
        let (stop, drop, failure) = (phase.stop.clone(), phase.drop.clone(), self.failure.clone());
        let name = name.to_owned();
        phase.tasks.spawn(async move {
            let reason = tokio::select! {
                biased;
                () = drop.cancelled() => return,
                reason = ending(task) => reason,
            };
            if stop.is_cancelled() || (kind.on_end() == OnEnd::Tell && reason == RETURNED) {
                debug!(?kind, name, reason, "ended task");
                return;
            }
            error!(?kind, name, reason, "lost task");
            if kind.on_end() == OnEnd::StopDaemon {
                failure.send_if_modified(|first| {
                    let is_first = first.is_none();
                    first.get_or_insert(TaskFailure { kind, reason });
                    is_first
                });
            }
        });
    }

    /// Starts a task that cannot fail.
    pub(crate) fn spawn_infallible<F>(&self, kind: TaskKind, name: &str, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.start(kind, name, task.map(Ok).boxed());
    }

    /// Starts a task that is made again whenever it ends.
    pub(crate) fn spawn_again<F>(
        &self,
        kind: TaskKind,
        name: &str,
        mut make: impl FnMut() -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        self.start_again(kind, name, Box::new(move || make().map(Ok).boxed()));
    }

    fn start_again(&self, kind: TaskKind, name: &str, mut make: Box<dyn FnMut() -> BoxedTask + Send>) {
        debug_assert_eq!(
            kind.on_end(),
            OnEnd::StartAgain,
            "of the others only the daemon's next life makes one"
        );
        let task_name = name.to_owned();
        self.spawn_infallible(kind, name, async move {
            let mut wait = AGAIN.0;
            loop {
                let started = tokio::time::Instant::now();
                let reason = ending(make()).await;
                if started.elapsed() > AGAIN.1 {
                    wait = AGAIN.0;
                }
                error!(?kind, name = task_name, reason, ?wait, "restarting task");
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(AGAIN.1);
            }
        });
    }

    /// Waits for `shutdown` or the end of a vital task, then stops every task in order.
    pub(crate) async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), TaskFailure> {
        let mut failed = self.failure.subscribe();
        let outcome = tokio::select! {
            () = shutdown => Ok(()),
            // The sender lives in `self`, so the wait ends only with a failure.
            Ok(failure) = failed.wait_for(Option::is_some) => failure.clone().map_or(Ok(()), Err),
        };
        for kind in TaskKind::ALL {
            self.stop(kind).await;
        }
        outcome
    }

    async fn stop(&self, kind: TaskKind) {
        let phase = &self.phases[kind as usize];
        let tasks = phase.tasks.len();
        phase.stop.cancel();
        phase.tasks.close();
        if kind == TaskKind::Intake || tasks > 0 {
            info!(?kind, tasks, on_stop = ?kind.on_stop(), "stopping: {}", kind.stopping());
        }
        if let OnStop::Wait(deadline) = kind.on_stop()
            && tokio::time::timeout(deadline, phase.tasks.wait()).await.is_err()
        {
            warn!(?kind, left = phase.tasks.len(), "did not end in time and was dropped");
        }
        phase.drop.cancel();
        if tokio::time::timeout(DROP_WITHIN, phase.tasks.wait()).await.is_err() {
            error!(?kind, left = phase.tasks.len(), "gave up on phase of stop: tasks do not end");
        }
    }
}

/// The reason of a task that returned by itself.
const RETURNED: &str = "it returned";

/// Runs a task and returns how it ended.
async fn ending(task: BoxedTask) -> String {
    match AssertUnwindSafe(task).catch_unwind().await {
        Ok(Ok(())) => RETURNED.to_owned(),
        Ok(Err(reason)) => reason,
        Err(panic) => panic_text(&*panic),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().map(str::to_owned);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panic: {}", text.as_deref().unwrap_or("without a message"))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Starts a task of `kind` that notes its end, `linger` after it was asked.
    fn note(supervisor: &Supervisor, kind: TaskKind, linger: Duration, ends: &Arc<Mutex<Vec<TaskKind>>>) {
        let (stop, ends) = (supervisor.stopping(kind), ends.clone());
        supervisor.spawn_infallible(kind, "test", async move {
            stop.cancelled().await;
            tokio::time::sleep(linger).await;
            ends.lock().unwrap().push(kind);
        });
    }

    #[tokio::test(start_paused = true)]
    async fn test_stop_goes_through_the_kinds_in_order() {
        let supervisor = Supervisor::new();
        let ends = Arc::new(Mutex::new(Vec::new()));
        for kind in [TaskKind::Controller, TaskKind::Telemetry, TaskKind::Sync, TaskKind::Api] {
            note(&supervisor, kind, Duration::from_millis(20), &ends);
        }
        supervisor.run(std::future::ready(())).await.unwrap();
        let order = [TaskKind::Telemetry, TaskKind::Sync, TaskKind::Controller, TaskKind::Api];
        assert_eq!(*ends.lock().unwrap(), order);
    }

    #[tokio::test(start_paused = true)]
    async fn test_stop_drops_runners_and_whoever_is_late() {
        let supervisor = Supervisor::new();
        let ends = Arc::new(Mutex::new(Vec::new()));
        note(&supervisor, TaskKind::Runner, Duration::from_millis(1), &ends);
        note(&supervisor, TaskKind::Telemetry, Duration::from_secs(3600), &ends);
        let start = tokio::time::Instant::now();
        supervisor.run(std::future::ready(())).await.unwrap();
        assert!(ends.lock().unwrap().is_empty());
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }

    #[tokio::test]
    async fn test_end_of_a_vital_task_stops_the_daemon() {
        let supervisor = Supervisor::new();
        supervisor.spawn_infallible(TaskKind::Sync, "test", async { panic!("out of cheese") });
        let failure = supervisor.run(std::future::pending()).await.unwrap_err();
        assert_eq!(failure, TaskFailure { kind: TaskKind::Sync, reason: "panic: out of cheese".into() });
    }

    #[tokio::test]
    async fn test_end_of_a_runner_stops_nothing() {
        let supervisor = Supervisor::new();
        supervisor.spawn_infallible(TaskKind::Runner, "test", async { panic!("one replica") });
        let (done, ended) = tokio::sync::oneshot::channel::<()>();
        supervisor.spawn_infallible(TaskKind::Runner, "test", async { drop(done) });
        let shutdown = ended.map(|_| ());
        supervisor.run(shutdown).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn test_upkeep_that_panics_is_started_again() {
        let supervisor = Supervisor::new();
        let (lives, mut seen) = watch::channel(0);
        supervisor.spawn_again(TaskKind::Upkeep, "test", move || {
            lives.send_modify(|count| *count += 1);
            async { panic!("again") }
        });
        seen.wait_for(|count| *count == 20).await.unwrap();
        supervisor.run(std::future::ready(())).await.unwrap();
    }

    #[tokio::test]
    async fn test_error_of_a_vital_task_is_told_with_its_source() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot serve")]
        struct Refused(#[source] std::io::Error);
        let supervisor = Supervisor::new();
        let refused = Refused(std::io::ErrorKind::AddrInUse.into());
        supervisor.spawn(TaskKind::Api, "test", std::future::ready(Err(refused)));
        let failure = supervisor.run(std::future::pending()).await.unwrap_err();
        assert_eq!(
            failure,
            TaskFailure { kind: TaskKind::Api, reason: "cannot serve: address in use".into() }
        );
    }
}
