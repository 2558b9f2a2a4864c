//! A running job: its progress, how to stop it, how it ended.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use agent_command::Child;
use agent_model::Boot;
use agent_shim::segments::Reader;
use agent_shim::wire::{Event, Progress, Request};
use agent_shim::{ExitRecord, JobDir};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::connection::{Connection, JobTrace, LEASES, clear_lost, look};
use super::{Lost, ReattachError};

/// How long a shim that reported the end may take to exit.
const REAP: Duration = Duration::from_secs(10);

/// Pause between two looks for a job after the connection was lost.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A job that runs, or did when this was made. Dropping it does not touch the job.
#[derive(Debug)]
pub struct Running {
    dir: JobDir,
    progress: watch::Receiver<Progress>,
    ended: watch::Receiver<bool>,
    _follower: JoinSet<()>,
}

/// Why a job could not be stopped.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum StopError {
    #[error(transparent)]
    Look(#[from] ReattachError),
    #[error("could not tell the supervisor of {} to stop the job", dir.display())]
    Talk { dir: PathBuf, source: io::Error },
}

/// Why the lease of a job could not be renewed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum RenewError {
    #[error(transparent)]
    Look(#[from] ReattachError),
    #[error("the supervisor of {} has version {version}, which knows no leases", dir.display())]
    Unsupported { dir: PathBuf, version: u32 },
    #[error("the supervisor of {} refuses: {why}", dir.display())]
    Refused { dir: PathBuf, why: String },
    #[error("could not renew the lease with the supervisor of {}", dir.display())]
    Talk { dir: PathBuf, source: io::Error },
}

/// Why a job could not be given more time.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum LimitError {
    #[error(transparent)]
    Look(#[from] ReattachError),
    #[error("the supervisor of {} refuses: {why}", dir.display())]
    Refused { dir: PathBuf, why: String },
    #[error("could not tell the supervisor of {} the new time limit", dir.display())]
    Talk { dir: PathBuf, source: io::Error },
}

/// Why it is not known how a job ended.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum WaitError {
    #[error("the supervisor of {} is gone and left no record", dir.display())]
    Lost { dir: PathBuf, lost: Lost },
    #[error(transparent)]
    Look(#[from] ReattachError),
}

impl Running {
    /// Follows a job over a connection on which at most `go` was sent. `child` is the shim, if this process must reap
    /// it.
    pub(super) fn follow(dir: JobDir, connection: Connection, child: Option<Child>) -> Running {
        let (progress_to, progress) = watch::channel(Progress::default());
        let (ended_to, ended) = watch::channel(false);
        let mut follower = JoinSet::new();
        let of = dir.clone();
        let following = async move {
            if !follow(&of, connection, &progress_to).await {
                progress_to.send_replace(written(&of));
            }
            ended_to.send_replace(true);
            drop(progress_to);
            if let Some(mut child) = child
                && tokio::time::timeout(REAP, child.wait()).await.is_err()
            {
                tracing::warn!(dir = %of.path().display(), "waiting for supervisor to go: the job has ended");
            }
        };
        follower.spawn(following.boxed());
        Running { dir, progress, ended, _follower: follower }
    }

    /// A job that has already ended.
    pub(super) fn ended(dir: JobDir) -> Running {
        let progress = watch::channel(written(&dir)).1;
        Running { dir, progress, ended: watch::channel(true).1, _follower: JoinSet::new() }
    }

    /// How much it has written. Closed after the last change, so the numbers are final then.
    pub fn progress(&self) -> watch::Receiver<Progress> {
        self.progress.clone()
    }

    /// Ends the job: SIGTERM to each of its processes now, SIGKILL after `grace`. Returns when the shim has accepted
    /// this, not when the job has ended. May be repeated: a shorter grace counts, the first reason stays. Does
    /// nothing to a job that has ended.
    pub fn stop<'a>(&'a self, grace: Duration, reason: &'a str) -> BoxFuture<'a, Result<(), StopError>> {
        async move {
            let JobTrace::Live(mut connection) = look(&self.dir).await? else { return Ok(()) };
            let wanted = |event: &Event| matches!(event, Event::Stopping | Event::Ended);
            match connection.ask(&Request::stop(grace, reason), wanted).await {
                Ok(_) => Ok(()),
                // The job may have ended meanwhile.
                Err(source) => match look(&self.dir).await? {
                    JobTrace::Live(_) => Err(StopError::Talk { dir: self.dir.path().to_owned(), source }),
                    _ => Ok(()),
                },
            }
        }
        .boxed()
    }

    /// Lets the job run until `until` at least. The shim ends it then, unless it gets a later time before. Returns
    /// until when the job may run now; `None` if it has ended.
    pub fn renew(&self, until: Boot) -> BoxFuture<'_, Result<Option<Boot>, RenewError>> {
        async move {
            let dir = || self.dir.path().to_owned();
            let JobTrace::Live(mut connection) = look(&self.dir).await? else { return Ok(None) };
            if connection.version < LEASES {
                return Err(RenewError::Unsupported { dir: dir(), version: connection.version });
            }
            match connection.renew(until).await {
                Ok(Event::Refused { why }) => Err(RenewError::Refused { dir: dir(), why }),
                Ok(Event::Renewed { until_ms }) => Ok(Some(Boot::from_millis(until_ms))),
                Ok(_) => Ok(None),
                Err(source) => match look(&self.dir).await? {
                    JobTrace::Live(_) => Err(RenewError::Talk { dir: dir(), source }),
                    _ => Ok(None),
                },
            }
        }
        .boxed()
    }

    /// Lets the command run so long in all. A shorter time than before changes nothing. Returns how long it may run now;
    /// `None` if the job has ended.
    pub fn limit(&self, timeout: Duration) -> BoxFuture<'_, Result<Option<Duration>, LimitError>> {
        async move {
            let dir = || self.dir.path().to_owned();
            let JobTrace::Live(mut connection) = look(&self.dir).await? else { return Ok(None) };
            match connection.limit(timeout).await {
                Ok(Event::Refused { why }) => Err(LimitError::Refused { dir: dir(), why }),
                Ok(Event::Limited { timeout_ms }) => Ok(Some(Duration::from_millis(timeout_ms))),
                Ok(_) => Ok(None),
                Err(source) => match look(&self.dir).await? {
                    JobTrace::Live(_) => Err(LimitError::Talk { dir: dir(), source }),
                    _ => Ok(None),
                },
            }
        }
        .boxed()
    }

    /// Waits until the job has ended. May be dropped and called again.
    pub fn wait(&self) -> BoxFuture<'_, Result<ExitRecord, WaitError>> {
        async move {
            // An error means that the follower is gone, which counts as an end: the job directory decides.
            let _ = self.ended.clone().wait_for(|ended| *ended).await;
            loop {
                match look(&self.dir).await? {
                    JobTrace::Ended(record) => return Ok(record),
                    trace @ (JobTrace::Lost(_) | JobTrace::Fresh) => {
                        let damaged = if let JobTrace::Lost(damaged) = trace { damaged } else { None };
                        let lost = clear_lost(&self.dir, damaged).await?;
                        return Err(WaitError::Lost { dir: self.dir.path().to_owned(), lost });
                    }
                    JobTrace::Live(connection) => {
                        follow(&self.dir, connection, &watch::Sender::default()).await;
                    }
                }
            }
        }
        .boxed()
    }
}

/// Publishes progress until the job has ended. Reconnects if the connection breaks while the shim lives. Returns whether
/// what was published last is all that there is.
async fn follow(dir: &JobDir, mut connection: Connection, progress: &watch::Sender<Progress>) -> bool {
    loop {
        match listen(&mut connection, progress).await {
            Ok(is_told) => return is_told,
            Err(error) => {
                tracing::debug!(dir = %dir.path().display(), %error, "lost connection to supervisor")
            }
        }
        connection = loop {
            match look(dir).await {
                Ok(JobTrace::Live(connection)) => break connection,
                Ok(_) => return false,
                Err(ReattachError::Record(_)) => return false, // the caller of `wait` gets the same error and reports it
                Err(error) => {
                    tracing::warn!(dir = %dir.path().display(), %error, "lost sight of job: looking again");
                }
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        };
    }
}

/// `Ok` when the shim reported that the job has ended, with whether it reported before how much there is: it does to
/// whoever watches, which it may not know of this connection yet.
async fn listen(connection: &mut Connection, progress: &watch::Sender<Progress>) -> io::Result<bool> {
    connection.send(&Request::Watch).await?;
    let mut is_told = false;
    loop {
        match connection.next().await? {
            Some(Event::Progress(now)) => {
                is_told = true;
                progress.send_if_modified(|last| std::mem::replace(last, now) != now);
            }
            Some(Event::Ended) => return Ok(is_told),
            Some(_) => {}
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// How much there is on disk.
fn written(dir: &JobDir) -> Progress {
    let length = |log: io::Result<Reader>| log.and_then(|mut log| log.len()).unwrap_or(0);
    Progress { log_bytes: length(Reader::of(dir)), tracking_bytes: length(Reader::of_tracking(dir)) }
}
