//! Work on a new environment after it is ready, for which nobody waits.
//!
//! Its files are forced to the disk, see [`EnvDir::settle`]. Then its Python files are compiled: a conda package for
//! every Python version contains only sources, and a job may not be allowed to write the bytecode; then each start of
//! it would compile them again. The process that compiles gives way to all others, and is stopped when its
//! environment is removed. Interrupted work is repeated at the next use.
//!
//! Tasks: one per environment, owned here, aborted on drop.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::{AbortHandle, JoinSet};

use super::builder::Builder;
use super::cache::{EnvDir, Left};
use crate::exec::Command;

/// How long compiling may take: it prints nothing while it works.
const WITHIN: Duration = Duration::from_secs(3600);

/// The lowest priority.
const NICE: i32 = 19;

/// The environments that are being worked on.
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
    /// With the user whose Python compiles.
    pub(super) fn by(builder: Option<Builder>) -> Aftercare {
        Aftercare { builder, running: Mutex::default() }
    }

    /// Does the remaining work for an environment, unless it is being done.
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

    /// Stops the work for an environment that is about to be removed.
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
    // First the packages that jobs import. They do not import tests.
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
    // The start files that Python runs belong to the packages, so it runs as the builder.
    if let Err(error) = change_hands(&place, builder.clone(), Builder::lend).await {
        return tracing::warn!(place = place.name(), %error, "an environment is not compiled");
    }
    let compiled = command.capture().await;
    if let Err(error) = change_hands(&place, builder, Builder::take_back).await {
        return tracing::warn!(place = place.name(), %error, "an environment stays its builder's for now");
    }
    // A file that cannot be compiled is not reported: the job that imports it gets the error.
    match compiled {
        Ok(_) => {
            // If this is interrupted, everything is compiled again, which is quick the second time.
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
