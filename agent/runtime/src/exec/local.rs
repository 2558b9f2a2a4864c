//! The executor of a real machine: every job under a shim, as processes of the machine or in a container.
//!
//! Owns the steps that both ways, and the fake, have in common: checking for a running shim before anything is
//! started, sending `go` ([`begin`]), and finding a job again ([`reattach`]). Hides which way a job was started.
//! A shim is started for a job directory as a process of this machine here, in a scope of its own, or by
//! [`super::container`].
//!
//! Invariants: no shim is started where one runs, or where a command was started before; before `go` is sent, the
//! identity of the listener is checked.

use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use agent_command::Child;
use agent_model::{Boot, failpoint};
use agent_shim::cgroup::Groups;
use agent_shim::wire::{Event, Request};
use agent_shim::{JobDir, Launch, process};
use futures_util::future::{BoxFuture, FutureExt as _, TryFutureExt as _};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::unix::pipe;
use tokio::time::Instant;

use super::connection::{AGAIN, ANSWER, Connection, JobTrace, LEASES, clear_lost, end_all, look};
use super::note::Note;
use super::{
    ContainerSpec, Containers, Executor, Found, LaunchError, ReattachError, Running, last_line, scope,
};
use crate::docker::DockerError;

/// Bytes read of the log of a shim that did not get ready.
const LARGEST_LOG: u64 = 1 << 20;

/// Runs jobs on this machine.
#[derive(Debug, Clone)]
pub struct Local {
    /// The shim's program; see [`find_shim`](super::find_shim).
    pub(super) shim: PathBuf,
    pub(super) containers: Containers,
}

impl Local {
    /// With this program as the shim, and these containers for jobs that run in one.
    pub fn new(shim: PathBuf, containers: Containers) -> Local {
        Local { shim, containers }
    }
}

impl Executor for Local {
    fn prepare<'a>(
        &'a self,
        dir: &'a JobDir,
        launch: &'a Launch,
        container_spec: &'a ContainerSpec,
    ) -> BoxFuture<'a, Result<(), LaunchError>> {
        self.containers.prepare(dir, launch, container_spec).boxed()
    }

    fn launch<'a>(
        &'a self,
        dir: &'a JobDir,
        launch: &'a Launch,
        container_spec: Option<&'a ContainerSpec>,
    ) -> BoxFuture<'a, Result<Running, LaunchError>> {
        match container_spec {
            None => begin(dir, launch, || self.start_shim(dir, launch)).boxed(),
            Some(container_spec) => {
                let stand = || self.containers.stand(dir, launch, container_spec).map_ok(|()| None);
                begin(dir, launch, stand).boxed()
            }
        }
    }

    fn reattach<'a>(&'a self, dir: &'a JobDir) -> BoxFuture<'a, Result<Found, ReattachError>> {
        reattach(dir).boxed()
    }

    fn is_halted(&self, dir: &JobDir) -> bool {
        let hello = dir.read_hello().ok().flatten();
        hello.is_some_and(|hello| !hello.container && process::is_halted(hello.pid))
    }

    fn groups(&self, dir: &JobDir) -> Groups {
        match dir.read_hello().ok().flatten() {
            Some(hello) if hello.container => match Note::read(dir) {
                Ok(Some(note)) => Groups::of_running_container(&note.id),
                _ => Groups::default(),
            },
            Some(hello) => Groups::of(&hello),
            None => Groups::default(),
        }
    }

    fn end<'a>(
        &'a self,
        dir: &'a JobDir,
        within: Duration,
    ) -> BoxFuture<'a, Result<(usize, usize), ReattachError>> {
        end_all(dir, within).boxed()
    }

    fn clear<'a>(&'a self, dir: &'a JobDir) -> BoxFuture<'a, Result<(), DockerError>> {
        self.containers.clear(dir).boxed()
    }
}

/// Starts the command of a job once, even if others try, too. `stand` starts a shim where nothing was started yet; it
/// returns the connection to a shim that must be reaped here, or `None` to look at the directory again.
pub(super) async fn begin<S>(
    dir: &JobDir,
    launch: &Launch,
    mut stand: impl FnMut() -> S,
) -> Result<Running, LaunchError>
where
    S: Future<Output = Result<Option<(Connection, Child)>, LaunchError>>,
{
    let deadline = Instant::now() + ANSWER;
    loop {
        match told_by(dir).await? {
            JobTrace::Live(connection) => return say_go(dir, launch, connection, None).await,
            JobTrace::Ended(_) => return Ok(Running::ended(dir.clone())),
            JobTrace::Lost(damaged) => return Err(lost(dir, damaged).await?),
            JobTrace::Fresh if Instant::now() < deadline => {
                if let Some((connection, child)) = stand().await? {
                    return say_go(dir, launch, connection, Some(child)).await;
                }
            }
            JobTrace::Fresh => return Err(LaunchError::Silent { dir: dir.path().to_owned(), after: ANSWER }),
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// What became of a job, however it was started.
pub(super) async fn reattach(dir: &JobDir) -> Result<Found, ReattachError> {
    Ok(match look(dir).await? {
        JobTrace::Live(connection) if connection.gone => {
            Found::Running(Running::follow(dir.clone(), connection, None))
        }
        JobTrace::Live(_) | JobTrace::Fresh => Found::NotStarted,
        JobTrace::Ended(record) => Found::Ended(record),
        JobTrace::Lost(damaged) => Found::Lost(clear_lost(dir, damaged).await?),
    })
}

/// What the directory of a job that is to be started shows.
pub(super) async fn told_by(dir: &JobDir) -> Result<JobTrace, LaunchError> {
    look(dir).await.map_err(|source| LaunchError::Look { dir: dir.path().to_owned(), source })
}

/// The error for a job that cannot be started because it was lost before; its remaining processes are killed.
async fn lost(dir: &JobDir, damaged: Option<String>) -> Result<LaunchError, LaunchError> {
    let path = || dir.path().to_owned();
    let lost = clear_lost(dir, damaged).await.map_err(|source| LaunchError::Look { dir: path(), source })?;
    Ok(LaunchError::Lost { dir: path(), lost })
}

/// Sends `go` and waits until the command is started, or could not be. The shim may have been started before a
/// restart of the daemon, with another lease.
async fn say_go(
    dir: &JobDir,
    launch: &Launch,
    mut connection: Connection,
    child: Option<Child>,
) -> Result<Running, LaunchError> {
    let source = match tell(dir, launch, &mut connection).await {
        Ok(()) => return Ok(Running::follow(dir.clone(), connection, child)),
        Err(source) => source,
    };
    if source.kind() == io::ErrorKind::TimedOut {
        return Err(LaunchError::Silent { dir: dir.path().to_owned(), after: ANSWER });
    }
    // The job may have ended meanwhile.
    match told_by(dir).await? {
        JobTrace::Ended(_) => Ok(Running::ended(dir.clone())),
        _ => Err(LaunchError::Talk { dir: dir.path().to_owned(), source }),
    }
}

async fn tell(dir: &JobDir, launch: &Launch, connection: &mut Connection) -> io::Result<()> {
    if !connection.gone {
        enclose(dir, launch).await;
        if let Some(until) = launch.lease_until {
            renew(dir, connection, until).await?;
        }
        for (name, value) in &launch.secrets {
            let secret = Request::Secret { name: name.clone(), value: value.clone() };
            let answered =
                |event: &Event| matches!(event, Event::Taken | Event::Refused { .. } | Event::Ended);
            if let Event::Refused { why } = connection.ask(&secret, answered).await? {
                return Err(io::Error::other(format!("the supervisor does not take secrets: {why}")));
            }
        }
    }
    connection.ask(&Request::Go, |event| matches!(event, Event::Going | Event::Ended)).await.map(drop)
}

async fn renew(dir: &JobDir, connection: &mut Connection, until: Boot) -> io::Result<()> {
    let dir = dir.path().display();
    if connection.version < LEASES {
        tracing::warn!(%dir, "found supervisor of an earlier release: only the daemon ends the job when its lease is over");
        return Ok(());
    }
    if let Event::Refused { why } = connection.renew(until).await? {
        tracing::warn!(%dir, why, "cannot give lease to supervisor: it takes none");
    }
    Ok(())
}

impl Local {
    /// Starts a shim and connects to it; `None` when another one has the lock.
    pub(super) async fn start_shim(
        &self,
        dir: &JobDir,
        launch: &Launch,
    ) -> Result<Option<(Connection, Child)>, LaunchError> {
        let path = || dir.path().to_owned();
        remove_if_there(dir.exit())?;
        dir.write_launch(launch)?;
        let failed = |source| LaunchError::Spawn { shim: self.shim.clone(), source };
        let (output, input) = io::pipe().map_err(failed)?;
        let mut child = self.spawn(dir, launch, input.into()).await.map_err(failed)?;
        let ready = async {
            // The shim writes a greeting to its standard output as soon as it listens, or it ends.
            let mut greeting = String::new();
            let output = pipe::Receiver::from_owned_fd(output.into())?;
            BufReader::new(output).read_line(&mut greeting).await?;
            if greeting.is_empty() {
                child.wait().await.map(Err)
            } else {
                Connection::open(dir).await.map(Ok)
            }
        };
        match tokio::time::timeout(ANSWER, ready).await {
            Ok(Ok(Ok(connection))) => Ok(Some((connection, child))),
            Ok(Ok(Err(status))) if status.code() == Some(agent_shim::PLACE_TAKEN) => Ok(None),
            Ok(Ok(Err(status))) => Err(LaunchError::Refused { dir: path(), status, said: last_words(dir) }),
            Ok(Err(source)) => Err(LaunchError::Talk { dir: path(), source }),
            Err(_) => Err(LaunchError::Silent { dir: path(), after: ANSWER }),
        }
    }

    async fn spawn(&self, dir: &JobDir, launch: &Launch, greeting: OwnedFd) -> io::Result<Child> {
        failpoint::hit("shim.spawn")?;
        if let Some(user) = launch.user.as_ref().filter(|_| agent_spawn::has_helper()) {
            let (dir, uid) = (dir.path().to_owned(), user.uid);
            let ask = move || agent_spawn::ask_for_supervisor(&dir, uid, greeting);
            let asked = agent_blocking::spawn_blocking(ask).await.map_err(io::Error::other)?;
            return asked.ok_or(io::ErrorKind::Unsupported)?.map(|started| Child::Helped(Arc::new(started)));
        }
        let mut command =
            tokio::process::Command::from(agent_spawn::supervisor(&self.shim, dir.path(), None));
        command.stdin(Stdio::null()).stdout(greeting).stderr(Stdio::null());
        agent_shim::process::start_supervisor(|| command.spawn().map(Child::Own), Child::id)
    }
}

/// Puts the shim into a scope if systemd makes them. Without one the job runs as well; a shim in a container needs
/// none, and its number means another process here.
async fn enclose(dir: &JobDir, launch: &Launch) {
    if let Ok(Some(hello)) = dir.read_hello()
        && !hello.container
        && let Err(error) = scope::enclose(&hello, launch.metadata).await
    {
        let error = &error as &dyn std::error::Error;
        tracing::warn!(dir = %dir.path().display(), error, "cannot make scope for job");
    }
}

pub(super) fn remove_if_there(path: PathBuf) -> Result<(), LaunchError> {
    match fs::remove_file(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(LaunchError::Clean { path, source }),
        _ => Ok(()),
    }
}

pub(super) fn last_words(dir: &JobDir) -> String {
    let log = agent_fs::read_plain(&dir.shim_log(), LARGEST_LOG).unwrap_or_default();
    let said = last_line(&String::from_utf8_lossy(&log));
    if said.is_empty() { "it left no word".to_owned() } else { said }
}
