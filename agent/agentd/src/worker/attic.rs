//! Directories of replicas that are over: each stays for the time that was set for it, then it is removed.
//!
//! A directory says itself until when it stays, in the file `remove-after`; so the attic needs no memory and
//! the daemon may be restarted meanwhile. One task ([`Attic::run`]) sleeps until the next date. Called by
//! `worker::runner` (keeps) and `worker::recover` (tells what is over from what is open).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_model::{Clock, Timestamp};
use agent_shim::JobDir;
use tokio::sync::Notify;
use tracing::{info, warn};

/// How long the outputs of a replica stay that the controller did not take.
pub(crate) const ORPHANS_STAY: Duration = Duration::from_secs(7 * 24 * 3600);

const MARK: &str = "remove-after";

/// Keeps directories for a while. Clones are the same attic.
#[derive(Clone)]
pub(crate) struct Attic {
    jobs: PathBuf,
    clock: Arc<dyn Clock>,
    arrived: Arc<Notify>,
}

/// Whether the replica of this directory is over.
pub(crate) fn is_over(dir: &JobDir) -> bool {
    dir.path().join(MARK).exists()
}

impl Attic {
    pub(crate) fn new(jobs: PathBuf, clock: Arc<dyn Clock>) -> Attic {
        Attic { jobs, clock, arrived: Arc::new(Notify::new()) }
    }

    /// The replica of this directory is over: the directory goes after `stay`.
    pub(crate) async fn put(&self, dir: &JobDir, stay: Duration) -> io::Result<()> {
        let (dir, until) = (dir.clone(), self.clock.now() + stay);
        let put = move || match stay.is_zero() {
            true => super::fetch::remove(dir.path()),
            false => std::fs::write(dir.path().join(MARK), until.0.to_string()),
        };
        tokio::task::spawn_blocking(put).await.map_err(io::Error::other).flatten()?;
        self.arrived.notify_one();
        Ok(())
    }

    /// Removes what is due, whenever something is.
    pub(crate) async fn run(self) {
        loop {
            let (jobs, now) = (self.jobs.clone(), self.clock.now());
            let swept = tokio::task::spawn_blocking(move || sweep(&jobs, now)).await;
            let next = match swept.map_err(io::Error::other).flatten() {
                Ok(next) => next,
                Err(error) => {
                    warn!(%error, "job directories cannot be looked through");
                    None
                }
            };
            match next {
                // A clock that was set must not make the sleep endless, nor busy.
                Some(date) => {
                    let wait =
                        date.since(self.clock.now()).clamp(Duration::from_secs(5), Duration::from_secs(3600));
                    let _ = tokio::time::timeout(wait, self.arrived.notified()).await;
                }
                None => self.arrived.notified().await,
            }
        }
    }
}

/// Removes the directories that are due at `now`; gives the next date.
fn sweep(jobs: &Path, now: Timestamp) -> io::Result<Option<Timestamp>> {
    let mut next: Option<Timestamp> = None;
    for entry in std::fs::read_dir(jobs)? {
        let path = entry?.path();
        let Ok(text) = std::fs::read_to_string(path.join(MARK)) else { continue };
        // A date that was cut short by a crash is over.
        let date = Timestamp(text.trim().parse().unwrap_or(0));
        if date > now {
            next = Some(next.map_or(date, |next| next.min(date)));
            continue;
        }
        match super::fetch::remove(&path) {
            Ok(()) => info!(path = %path.display(), "removed the directory of a replica that is over"),
            Err(error) => warn!(path = %path.display(), %error, "a job directory cannot be removed"),
        }
    }
    Ok(next)
}

#[cfg(test)]
mod tests {
    use agent_model::ManualClock;

    use super::*;

    #[tokio::test]
    async fn test_directory_goes_when_its_time_is_over() {
        let temp = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::new(Timestamp(1000)));
        let attic = Attic::new(temp.path().to_owned(), clock.clone());
        let dirs: Vec<JobDir> =
            ["a", "b", "c", "open"].map(|name| JobDir::new(temp.path().join(name))).into();
        dirs.iter().for_each(|dir| dir.create().unwrap());
        attic.put(&dirs[0], Duration::ZERO).await.unwrap();
        attic.put(&dirs[1], Duration::from_secs(1)).await.unwrap();
        attic.put(&dirs[2], Duration::from_secs(9)).await.unwrap();
        assert!(!dirs[0].path().exists() && is_over(&dirs[1]) && !is_over(&dirs[3]));
        clock.advance(Duration::from_secs(2));
        assert_eq!(sweep(temp.path(), clock.now()).unwrap(), Some(Timestamp(10_000)));
        assert!(!dirs[1].path().exists() && dirs[2].path().exists() && dirs[3].path().exists());
    }
}
