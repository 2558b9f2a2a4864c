//! Jobs as processes of this machine: how a shim is started for a job directory, in a scope of its own.
//!
//! Owns the start of the shim's program, and the removal of an earlier one's exit record before it. [`super::local`]
//! finds a running shim again and tells it to end.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::{fs, io};

use agent_command::Child;
use agent_model::failpoint;
use agent_shim::{JobDir, Launch};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::unix::pipe;

use super::connection::{ANSWER, Connection};
use super::{LaunchError, Local, scope};

/// Bytes read of the log of a shim that did not get ready, and characters reported of its last line.
const LARGEST_LOG: u64 = 1 << 20;
const MOST_WORDS: usize = 500;

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
pub(super) async fn enclose(dir: &JobDir, launch: &Launch) {
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

/// The last line of an output, without control characters and cut to a length for messages.
pub(super) fn last_line(said: &str) -> String {
    let last = said.lines().last().unwrap_or_default().trim();
    last.chars().filter(|c| !c.is_control()).take(MOST_WORDS).collect()
}
