//! The record of a job's container in its directory, written before the engine is called: a daemon that is killed at
//! any instruction leaves a name to look for.

use std::io;
use std::path::{Path, PathBuf};

use agent_model::failpoint;
use agent_shim::JobDir;
use agent_shim::process::Process;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

const FILE: &str = "container.json";

/// The largest record that is read, in bytes; more than it ever is.
const LARGEST: u64 = 64 << 10;

/// Which container belongs to a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Note {
    pub(super) version: u32,
    /// Its name.
    pub(super) name: String,
    /// The engine's ID of it; empty until it is made, and known before anything is started in it.
    #[serde(default)]
    pub(super) id: String,
    /// Where the engine listens.
    pub(super) socket: PathBuf,
    /// The process of the engine, if it can be seen.
    #[serde(default)]
    pub(super) engine: Option<Engine>,
}

/// The process of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Engine {
    pid: i32,
    started: u64,
}

impl Engine {
    /// The process that listens at `socket` now. A service manager that listens in its place is never restarted.
    pub(super) async fn at(socket: &Path) -> Option<Engine> {
        let pid = UnixStream::connect(socket).await.ok()?.peer_cred().ok()?.pid()?;
        Process::find(pid).map(|process| Engine { pid, started: process.started })
    }

    /// It no longer exists.
    pub(super) fn is_gone(self) -> bool {
        Process::find(self.pid).is_none_or(|process| process.started != self.started)
    }
}

impl Note {
    pub(super) const VERSION: u32 = 1;

    /// The record of a job that has, or may have, a container.
    pub(super) fn read(dir: &JobDir) -> io::Result<Option<Note>> {
        match agent_fs::read_plain(&dir.path().join(FILE), LARGEST) {
            Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Written whole and durable, or not at all.
    pub(super) fn write(&self, dir: &JobDir) -> io::Result<()> {
        failpoint::hit("node.container.write")?;
        agent_fs::write_durable(&dir.path().join(FILE), &serde_json::to_vec(self)?)
    }

    /// The key to ask the engine with.
    pub(super) fn key(&self) -> &str {
        if self.id.is_empty() { &self.name } else { &self.id }
    }
}
