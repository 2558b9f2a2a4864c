//! An executor without processes: its shims are tasks ([`supervisor`]).
//!
//! Directory, records, lock and socket of a job are as a shim makes them, so a reader finds no difference; only the
//! supervisor is another. It lives as long as the runtime it was launched in, whatever becomes of the executor and
//! its caller: as a shim outlives the daemon.
//!
//! Owns the faults that a test injects: failed starts, supervisors that are killed or halted. Users, limits and
//! variables have no effect, and no container is made. It passes `conformance`; all else needs tests of the real one.

mod supervisor;

use std::collections::{HashMap, VecDeque};
use std::future::{Future, poll_fn};
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use agent_shim::cgroup::Groups;
use agent_shim::{JobDir, Launch};
use futures_util::future::{BoxFuture, FutureExt as _};
use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio::task::AbortHandle;

use super::connection::JobTrace;
use super::local::{begin, reattach, remove_if_there, told_by};
use super::{ContainerSpec, Executor, Found, LaunchError, ReattachError, Running};
use crate::docker::DockerError;
use supervisor::{Job, kills, supervise};

/// See the module. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct Fake {
    shared: Arc<FakeState>,
}

#[derive(Debug, Default)]
struct FakeState {
    supervisors: Mutex<HashMap<PathBuf, FakeSupervisor>>,
    refusals: Mutex<VecDeque<LaunchError>>,
}

/// The task of a supervisor, and whether it is halted.
#[derive(Debug)]
struct FakeSupervisor {
    task: AbortHandle,
    halted: Arc<AtomicBool>,
}

impl Fake {
    /// The next calls to prepare or launch fail with these errors, one after the other.
    pub fn refuse(&self, errors: impl IntoIterator<Item = LaunchError>) {
        self.shared.refusals.lock().extend(errors);
    }

    /// Makes the kernel appear to have killed so many processes for lack of memory next to the supervisor of a job.
    pub fn starve(&self, dir: &JobDir, processes: u64) -> io::Result<()> {
        std::fs::write(kills(dir), format!("oom_kill {processes}\n"))
    }

    /// Kills a supervisor as SIGKILL does: its command ends with it, and nothing is written. Returns whether there
    /// was one.
    pub fn kill(&self, dir: &JobDir) -> bool {
        let found = self.shared.supervisors.lock().remove(dir.path());
        found.inspect(|supervisor| supervisor.task.abort()).is_some()
    }

    /// Halts a supervisor and its command: they live, but do nothing any more.
    pub fn halt(&self, dir: &JobDir) {
        if let Some(supervisor) = self.shared.supervisors.lock().get(dir.path()) {
            supervisor.halted.store(true, Ordering::Relaxed);
        }
    }

    fn refusal(&self) -> Result<(), LaunchError> {
        self.shared.refusals.lock().pop_front().map_or(Ok(()), Err)
    }

    /// Starts a supervisor for a directory where nothing was started yet, unless another one has the lock.
    fn stand(&self, dir: &JobDir, launch: &Launch) -> Result<(), LaunchError> {
        remove_if_there(dir.exit())?;
        dir.write_launch(launch)?;
        let talk = |source| LaunchError::Talk { dir: dir.path().to_owned(), source };
        let Some(place) = dir.take_place().map_err(talk)?.filter(|_| !dir.is_started()) else {
            return Ok(());
        };
        let job = Job::new(dir, launch.clone()).map_err(talk)?;
        dir.write_hello(&job.hello())?;
        let _ = std::fs::remove_file(dir.socket());
        let listener = dir.short_socket_path().and_then(|(_keep, path)| UnixListener::bind(path));
        let halted = Arc::new(AtomicBool::new(false));
        let task = supervise(job, place, listener.map_err(talk)?);
        #[allow(clippy::disallowed_methods, reason = "a supervisor outlives whoever started it")]
        let task = tokio::spawn(unless(halted.clone(), task)).abort_handle();
        self.shared.supervisors.lock().insert(dir.path().to_owned(), FakeSupervisor { task, halted });
        Ok(())
    }
}

impl Executor for Fake {
    fn prepare<'a>(
        &'a self,
        dir: &'a JobDir,
        launch: &'a Launch,
        _: &'a ContainerSpec,
    ) -> BoxFuture<'a, Result<(), LaunchError>> {
        async move {
            self.refusal()?;
            match told_by(dir).await? {
                JobTrace::Fresh => self.stand(dir, launch),
                _ => Ok(()),
            }
        }
        .boxed()
    }

    fn launch<'a>(
        &'a self,
        dir: &'a JobDir,
        launch: &'a Launch,
        _: Option<&'a ContainerSpec>,
    ) -> BoxFuture<'a, Result<Running, LaunchError>> {
        async move {
            self.refusal()?;
            begin(dir, launch, || std::future::ready(self.stand(dir, launch).map(|()| None))).await
        }
        .boxed()
    }

    fn reattach<'a>(&'a self, dir: &'a JobDir) -> BoxFuture<'a, Result<Found, ReattachError>> {
        reattach(dir).boxed()
    }

    fn is_halted(&self, dir: &JobDir) -> bool {
        let supervisors = self.shared.supervisors.lock();
        supervisors.get(dir.path()).is_some_and(|found| found.halted.load(Ordering::Relaxed))
    }

    fn groups(&self, _: &JobDir) -> Groups {
        Groups::default()
    }

    fn end<'a>(
        &'a self,
        dir: &'a JobDir,
        _: Duration,
    ) -> BoxFuture<'a, Result<(usize, usize), ReattachError>> {
        async { Ok((usize::from(self.kill(dir)), 0)) }.boxed()
    }

    fn clear<'a>(&'a self, _: &'a JobDir) -> BoxFuture<'a, Result<(), DockerError>> {
        async { Ok(()) }.boxed()
    }
}

/// Does `work` until it is halted.
async fn unless(halted: Arc<AtomicBool>, work: impl Future<Output = ()>) {
    let mut work = pin!(work);
    poll_fn(|context| match halted.load(Ordering::Relaxed) {
        true => Poll::Pending,
        false => work.as_mut().poll(context),
    })
    .await;
}
