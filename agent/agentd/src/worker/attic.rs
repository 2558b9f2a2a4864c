//! Directories of replicas that are over: each stays for the time that was set for it, then it is removed.
//!
//! A directory says itself how long it stays, in the file `remove-after`; so the attic needs no memory and
//! the daemon may be restarted meanwhile. Time counts while the machine is up, sleep included, and never by
//! the wall clock: an administrator who sets the clock ten years ahead removes nothing. A machine that was
//! off keeps things for longer, which harms nobody.
//!
//! One task ([`Attic::run`]) sleeps until the next date. Called by `worker::runner` (keeps) and
//! `worker::recover` (tells what is over from what is open).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_model::{Boot, Clock, failpoint};
use agent_shim::JobDir;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tracing::{info, warn};

/// How long the outputs of a replica stay that the controller did not take.
pub(crate) const ORPHANS_STAY: Duration = Duration::from_secs(7 * 24 * 3600);

/// When the directories are looked through again that could not be.
const AGAIN: Duration = Duration::from_secs(60);

const MARK: &str = "remove-after";
/// How the name of a directory begins that is being removed.
const GONE: &str = ".gone-";

/// Until when a directory stays.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    /// What was left of its time when this was written, in milliseconds.
    left_ms: u64,
    /// The boot in which it was written, and when.
    boot_id: String,
    at: Boot,
}

impl Mark {
    /// What is left now. In another boot all of that boot has passed at least.
    fn left(&self, boot_id: &str, now: Boot) -> Duration {
        let passed = if self.boot_id == boot_id { now.since(self.at) } else { now.0 };
        Duration::from_millis(self.left_ms).saturating_sub(passed)
    }
}

/// Keeps directories for a while. Clones are the same attic.
#[derive(Clone)]
pub(crate) struct Attic {
    jobs: PathBuf,
    clock: Arc<dyn Clock>,
    boot_id: Arc<str>,
    arrived: Arc<Notify>,
}

/// Whether the replica of this directory is over.
pub(crate) fn is_over(dir: &JobDir) -> bool {
    dir.path().join(MARK).exists()
}

impl Attic {
    pub(crate) fn new(jobs: PathBuf, clock: Arc<dyn Clock>, boot_id: &str) -> Attic {
        Attic { jobs, clock, boot_id: boot_id.into(), arrived: Arc::new(Notify::new()) }
    }

    /// The replica of this directory is over: the directory goes after `stay`.
    pub(crate) async fn put(&self, dir: &JobDir, stay: Duration) -> io::Result<()> {
        let (dir, mark) = (dir.clone(), self.mark(stay));
        let put = move || match stay.is_zero() {
            true => discard(dir.path()),
            false => write(dir.path(), &mark),
        };
        tokio::task::spawn_blocking(put).await.map_err(io::Error::other).flatten()?;
        self.arrived.notify_one();
        Ok(())
    }

    fn mark(&self, left: Duration) -> Mark {
        let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        Mark { left_ms, boot_id: self.boot_id.to_string(), at: self.clock.boot() }
    }

    /// Removes what is due, whenever something is.
    pub(crate) async fn run(self) {
        loop {
            let this = self.clone();
            let next = match tokio::task::spawn_blocking(move || this.sweep()).await {
                Ok(Ok(next)) => next,
                Ok(Err(error)) => {
                    warn!(%error, "job directories cannot be looked through");
                    Some(AGAIN)
                }
                Err(ended) => match ended.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    Err(_) => return, // the daemon stops
                },
            };
            match next {
                // The sleep does not count the time that the machine sleeps, so it is never a long one.
                Some(left) => {
                    let wait = left.clamp(Duration::from_secs(5), Duration::from_secs(3600));
                    let _ = tokio::time::timeout(wait, self.arrived.notified()).await;
                }
                None => self.arrived.notified().await,
            }
        }
    }

    /// Removes the directories that are due; says when the next one is.
    fn sweep(&self) -> io::Result<Option<Duration>> {
        failpoint::hit("node.attic.sweep")?;
        let mut next: Option<Duration> = None;
        for entry in std::fs::read_dir(&self.jobs)? {
            let path = entry?.path();
            let is_gone =
                path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(GONE.as_bytes()));
            let left = if is_gone { Some(Duration::ZERO) } else { self.look(&path) };
            let Some(left) = left else { continue };
            if !left.is_zero() {
                next = Some(next.map_or(left, |next| next.min(left)));
                continue;
            }
            match if is_gone { agent_cas::remove_tree(&path) } else { discard(&path) } {
                Ok(()) => info!(path = %path.display(), "removed the directory of a replica that is over"),
                Err(error) => warn!(path = %path.display(), %error, "a job directory cannot be removed"),
            }
        }
        Ok(next)
    }

    /// What is left of the time of a directory; `None` when its replica is not over.
    fn look(&self, path: &Path) -> Option<Duration> {
        let text = match std::fs::read(path.join(MARK)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            text => text.unwrap_or_default(),
        };
        let mark = serde_json::from_slice(&text).unwrap_or_else(|_| {
            warn!(path = %path.display(), "it cannot be read how long a directory stays; its time begins anew");
            Mark { boot_id: String::new(), ..self.mark(ORPHANS_STAY + self.clock.boot().0) }
        });
        let left = mark.left(&self.boot_id, self.clock.boot());
        if mark.boot_id != *self.boot_id
            && let Err(error) = write(path, &self.mark(left))
        {
            warn!(path = %path.display(), %error, "it cannot be written how long a directory stays");
        }
        Some(left)
    }
}

/// Removes a directory. Half of one would tell another story than the whole, so it loses its name first.
fn discard(path: &Path) -> io::Result<()> {
    failpoint::hit("node.attic.remove")?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let gone = path.with_file_name(format!("{GONE}{name}"));
    match std::fs::rename(path, &gone) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        renamed => renamed?,
    }
    agent_cas::remove_tree(&gone)
}

/// Writes a mark that lasts, and is there whole or not at all.
fn write(dir: &Path, mark: &Mark) -> io::Result<()> {
    failpoint::hit("node.attic.write")?;
    agent_fs::write_durable(&dir.join(MARK), &serde_json::to_vec(mark)?)
}

#[cfg(test)]
mod tests {
    use agent_model::{ManualClock, Timestamp};

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    /// Wall and boot time that move apart.
    #[derive(Default)]
    struct Apart {
        wall: ManualClock,
        boot: ManualClock,
    }

    impl Clock for Apart {
        fn now(&self) -> Timestamp {
            self.wall.now()
        }
        fn boot(&self) -> Boot {
            self.boot.boot()
        }
    }

    fn attic(jobs: &Path, clock: &Arc<Apart>, boot_id: &str) -> Attic {
        Attic::new(jobs.to_owned(), clock.clone(), boot_id)
    }

    fn dirs<const N: usize>(jobs: &Path, names: [&str; N]) -> [JobDir; N] {
        names.map(|name| {
            let dir = JobDir::new(jobs.join(name));
            dir.create().unwrap();
            dir
        })
    }

    #[tokio::test]
    async fn test_directory_goes_when_its_time_is_over() {
        let (temp, clock) = (tempfile::tempdir().unwrap(), Arc::new(Apart::default()));
        let attic = attic(temp.path(), &clock, "boot");
        let [a, b, c, open] = dirs(temp.path(), ["a", "b", "c", "open"]);
        attic.put(&a, Duration::ZERO).await.unwrap();
        attic.put(&b, Duration::from_secs(1)).await.unwrap();
        attic.put(&c, Duration::from_secs(9)).await.unwrap();
        assert!(!a.path().exists() && is_over(&b) && !is_over(&open));
        clock.boot.advance(Duration::from_secs(2));
        let [half] = dirs(temp.path(), [".gone-d"]);
        assert_eq!(attic.sweep().unwrap(), Some(Duration::from_secs(7)));
        assert!(!half.path().exists(), "one that a crash left half removed");
        assert!(".gone-a.1.0".parse::<agent_model::ReplicaId>().is_err(), "it is taken for no replica");
        assert!(!b.path().exists() && c.path().exists() && open.path().exists());
    }

    #[tokio::test]
    async fn test_results_stay_for_seven_days_whatever_the_wall_clock_says() {
        let (temp, clock) = (tempfile::tempdir().unwrap(), Arc::new(Apart::default()));
        clock.boot.advance(DAY);
        let before = attic(temp.path(), &clock, "first boot");
        let [dir] = dirs(temp.path(), ["a"]);
        before.put(&dir, ORPHANS_STAY).await.unwrap();
        clock.wall.advance(3653 * DAY);
        assert_eq!(before.sweep().unwrap(), Some(7 * DAY));
        clock.boot.advance(3 * DAY);
        assert_eq!(before.sweep().unwrap(), Some(4 * DAY));

        // Restarts of the machine: only what certainly passed counts, and it counts once.
        let clock = Arc::new(Apart::default());
        clock.boot.advance(2 * DAY);
        let after = attic(temp.path(), &clock, "second boot");
        assert_eq!(after.sweep().unwrap(), Some(5 * DAY));
        clock.boot.advance(DAY);
        assert_eq!(after.sweep().unwrap(), Some(4 * DAY));
        clock.boot.advance(4 * DAY);
        assert_eq!(after.sweep().unwrap(), None);
        assert!(!dir.path().exists());
    }

    #[tokio::test]
    async fn test_unreadable_date_begins_anew() {
        for text in ["", "17", "{\"left_ms\":"] {
            let (temp, clock) = (tempfile::tempdir().unwrap(), Arc::new(Apart::default()));
            clock.boot.advance(30 * DAY);
            let [dir] = dirs(temp.path(), ["a"]);
            std::fs::write(dir.path().join(MARK), text).unwrap();
            let attic = attic(temp.path(), &clock, "boot");
            assert_eq!(attic.sweep().unwrap(), Some(ORPHANS_STAY), "{text}");
            clock.boot.advance(DAY);
            assert_eq!(attic.sweep().unwrap(), Some(6 * DAY), "{text}");
        }
    }
}
