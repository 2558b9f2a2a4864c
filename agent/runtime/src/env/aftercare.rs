//! What is done for a new environment when it is ready already and nobody waits for it.
//!
//! Its files are forced to the disk, see [`EnvDir::settle`]. Then its Python files are compiled: a conda package that
//! is for every Python brings sources alone, and a job may not be allowed to write what Python makes of them; each
//! of its starts would compile them again. The process that does it gives way to every other, and goes when its
//! environment goes. What was cut short is done at the next use.
//!
//! Tasks: one per environment, owned here, ended with this.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::{AbortHandle, JoinSet};

use super::builder::Builder;
use super::cache::{EnvDir, Left};
use crate::exec::Command;

/// How long it may take: it says nothing while it works.
const WITHIN: Duration = Duration::from_secs(3600);

/// As much as possible.
const NICE: i32 = 19;

/// The environments that are looked after.
#[derive(Debug, Default)]
pub(super) struct Aftercare {
    builder: Option<Builder>,
    running: Mutex<Running>,
}

#[derive(Debug, Default)]
struct Running {
    tasks: JoinSet<()>,
    by_name: HashMap<String, AbortHandle>,
}

impl Aftercare {
    /// Whose Python compiles.
    pub(super) fn by(builder: Option<Builder>) -> Aftercare {
        Aftercare { builder, running: Mutex::default() }
    }

    /// Does what is left to be done for an environment, unless it is being done.
    pub(super) fn start(&self, place: &EnvDir, left: Left) {
        if left == Left::default() {
            return;
        }
        let mut running = self.running.lock();
        while running.tasks.try_join_next().is_some() {}
        running.by_name.retain(|_, task| !task.is_finished());
        if !running.by_name.contains_key(place.name()) {
            let task = running.tasks.spawn(look_after(place.clone(), left, self.builder.clone()));
            running.by_name.insert(place.name().to_owned(), task);
        }
    }

    /// Ends it for an environment that is about to go.
    pub(super) fn stop(&self, name: &str) {
        let mut running = self.running.lock();
        if let Some(task) = running.by_name.remove(name) {
            task.abort();
        }
    }
}

async fn look_after(place: EnvDir, left: Left, builder: Option<Builder>) {
    if left.settle {
        let settling = place.clone();
        match tokio::task::spawn_blocking(move || settling.settle()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(place = place.name(), %error, "cannot force environment to disk")
            }
            Err(error) => {
                tracing::warn!(place = place.name(), %error, "cannot force environment to disk")
            }
        }
    }
    if left.compile {
        compile(place, builder).await;
    }
}

async fn compile(place: EnvDir, builder: Option<Builder>) {
    let lib = place.prefix().join("lib");
    let pythons = lib.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
    let pythons: Vec<PathBuf> = pythons.filter(|dir| dir.join("site-packages").is_dir()).collect();
    // What jobs import first comes first. Tests are not what they import.
    let dirs = pythons.iter().map(|dir| dir.join("site-packages")).chain(pythons.iter().cloned());
    let command = Command::new(place.prefix().join("bin/python"))
        .args(["-I", "-m", "compileall", "-q", "-x", r"/(tests?|lib2to3|idlelib|turtledemo)/"])
        .args(dirs)
        .envs([("LC_ALL", "C.UTF-8")])
        .cwd(place.prefix())
        .mark(&place.prefix().to_string_lossy())
        .stall(WITHIN)
        .nice(NICE);
    let command = match &builder {
        Some(builder) => command.run_as(&builder.shim, builder.id),
        None => command,
    };
    // What Python runs at its start came with the packages.
    if let Err(error) = change_hands(&place, builder.clone(), Builder::lend).await {
        return tracing::warn!(place = place.name(), %error, "an environment is not compiled");
    }
    let compiled = command.capture().await;
    if let Err(error) = change_hands(&place, builder, Builder::take_back).await {
        return tracing::warn!(place = place.name(), %error, "an environment stays its builder's for now");
    }
    // A file that cannot be compiled is not reported: whoever imports it hears it.
    match compiled {
        Ok(_) => {
            // When this is cut short it is compiled again, which is quick the second time.
            let _ = tokio::task::spawn_blocking(move || place.note_compiled()).await;
        }
        Err(error) => tracing::warn!(place = place.name(), %error, "an environment is not compiled"),
    }
}

/// Lends an environment to its builder, or takes it back.
async fn change_hands(
    place: &EnvDir,
    builder: Option<Builder>,
    change: fn(&Builder, &Path) -> io::Result<()>,
) -> io::Result<()> {
    let (Some(builder), prefix) = (builder, place.prefix().to_owned()) else { return Ok(()) };
    tokio::task::spawn_blocking(move || change(&builder, &prefix)).await.map_err(io::Error::other)?
}
