//! Jobs as processes of this machine, each under a shim.

use std::path::PathBuf;
use std::process::Stdio;
use std::{fs, io};

use agent_model::{Boot, failpoint};
use agent_shim::wire::{Event, Request};
use agent_shim::{JobDir, Launch};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Child;
use tokio::time::Instant;

use super::connection::{AGAIN, ANSWER, Connection, LEASES, Place, clear_lost, look};
use super::scope;
use super::{Executor, Found, LaunchError, ReattachError, Running};

/// Runs jobs as processes of this machine.
#[derive(Debug, Clone)]
pub struct Process {
    /// The shim's program; see [`find_shim`](super::find_shim).
    pub shim: PathBuf,
}

impl Executor for Process {
    async fn launch(&self, dir: &JobDir, launch: &Launch) -> Result<Running, LaunchError> {
        let path = || dir.path().to_owned();
        let deadline = Instant::now() + ANSWER;
        while Instant::now() < deadline {
            let (connection, child) = match told_by(dir).await? {
                Place::Live(connection) => (connection, None),
                Place::Ended(_) => return Ok(Running::ended(dir.clone())),
                Place::Lost => return Err(lost(dir).await?),
                Place::Fresh => match self.start_shim(dir, launch).await? {
                    Some((connection, child)) => (connection, Some(child)),
                    // Another shim has the place, or has not quite left it: look again.
                    None => {
                        tokio::time::sleep(AGAIN).await;
                        continue;
                    }
                },
            };
            return say_go(dir, launch, connection, child).await;
        }
        Err(LaunchError::Silent { dir: path(), after: ANSWER })
    }

    async fn reattach(&self, dir: &JobDir) -> Result<Found, ReattachError> {
        reattach(dir).await
    }
}

/// What became of a job, however it was started.
pub(super) async fn reattach(dir: &JobDir) -> Result<Found, ReattachError> {
    Ok(match look(dir).await? {
        Place::Live(connection) if connection.gone => {
            Found::Running(Running::follow(dir.clone(), connection, None))
        }
        Place::Live(_) | Place::Fresh => Found::NotStarted,
        Place::Ended(record) => Found::Ended(record),
        Place::Lost => Found::Lost(clear_lost(dir).await?),
    })
}

/// What there is at the directory of a job that is to be started.
pub(super) async fn told_by(dir: &JobDir) -> Result<Place, LaunchError> {
    look(dir).await.map_err(|source| LaunchError::Look { dir: dir.path().to_owned(), source })
}

/// The error for a job that cannot be started because it was lost before; what is left of it is killed.
pub(super) async fn lost(dir: &JobDir) -> Result<LaunchError, LaunchError> {
    let path = || dir.path().to_owned();
    let lost = clear_lost(dir).await.map_err(|source| LaunchError::Look { dir: path(), source })?;
    Ok(LaunchError::Lost { dir: path(), lost })
}

impl Process {
    /// Starts a shim and connects to it; `None` when another one has the place.
    pub(super) async fn start_shim(
        &self,
        dir: &JobDir,
        launch: &Launch,
    ) -> Result<Option<(Connection, Child)>, LaunchError> {
        let path = || dir.path().to_owned();
        remove_if_there(dir.exit())?;
        dir.write_launch(launch)?;
        let mut child =
            self.spawn(dir).map_err(|source| LaunchError::Spawn { shim: self.shim.clone(), source })?;
        let ready = async {
            // It greets on its standard output as soon as it listens, or ends.
            let mut greeting = String::new();
            if let Some(output) = child.stdout.take() {
                BufReader::new(output).read_line(&mut greeting).await?;
            }
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

    fn spawn(&self, dir: &JobDir) -> io::Result<Child> {
        failpoint::hit("shim.spawn")?;
        #[allow(clippy::disallowed_methods, reason = "this module starts the shims")]
        let mut command = tokio::process::Command::new(&self.shim);
        command.arg(dir.path()).env_clear();
        if let Some(plan) = failpoint::plan() {
            command.env(failpoint::VARIABLE, plan);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        command.spawn()
    }
}

/// Says `go` and waits until the command is started, or could not be. The shim may have been started by an
/// earlier life of the daemon, whose lease was another.
pub(super) async fn say_go(
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
    // It may have ended under our hands.
    match told_by(dir).await? {
        Place::Ended(_) => Ok(Running::ended(dir.clone())),
        _ => Err(LaunchError::Talk { dir: dir.path().to_owned(), source }),
    }
}

async fn tell(dir: &JobDir, launch: &Launch, connection: &mut Connection) -> io::Result<()> {
    if !connection.gone {
        enclose(dir).await;
        if let Some(until) = launch.lease_until {
            renew(dir, connection, until).await?;
        }
    }
    connection.ask(&Request::Go, |event| matches!(event, Event::Going | Event::Ended)).await.map(drop)
}

async fn renew(dir: &JobDir, connection: &mut Connection, until: Boot) -> io::Result<()> {
    let dir = dir.path().display();
    if connection.version < LEASES {
        tracing::warn!(%dir, "an old supervisor stands there: only the daemon ends the job when its lease is over");
        return Ok(());
    }
    if let Event::Refused { why } = connection.renew(until).await? {
        tracing::warn!(%dir, why, "the supervisor that stands there does not take the lease");
    }
    Ok(())
}

/// Puts the shim into a scope where there are some. Without one the job runs as well; that in a container needs none,
/// and its number means somebody else here.
async fn enclose(dir: &JobDir) {
    if let Ok(Some(hello)) = dir.read_hello()
        && !hello.container
        && let Err(error) = scope::enclose(&hello).await
    {
        let error = &error as &dyn std::error::Error;
        tracing::warn!(dir = %dir.path().display(), error, "the job gets no scope of its own");
    }
}

pub(super) fn remove_if_there(path: PathBuf) -> Result<(), LaunchError> {
    match fs::remove_file(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(LaunchError::Clean { path, source }),
        _ => Ok(()),
    }
}

pub(super) fn last_words(dir: &JobDir) -> String {
    let log = fs::read_to_string(dir.shim_log()).unwrap_or_default();
    log.lines().last().unwrap_or("it left no word").to_owned()
}
