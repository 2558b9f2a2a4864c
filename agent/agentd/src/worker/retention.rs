//! Directories of ended replicas: each is kept for the time that was set for it, then it is removed.
//!
//! The time is stored in the directory itself, in the file `remove-after`; so the retention keeps no state in memory,
//! and the daemon can be restarted. Time counts while the machine is up, sleep included, and never by the wall clock:
//! setting the clock ten years ahead removes nothing. A machine that was off keeps directories longer, which is
//! harmless.
//!
//! While the disk is low, directories of which the controller has everything are removed early, those with the least
//! time left first.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_blocking::blocking;
use agent_model::node::{Inventory, KeptResult};
use agent_model::{Boot, Clock, Principal, failpoint};
use agent_shim::JobDir;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::disk::Reclaimer;

/// How long a directory is kept whose logs or outputs are not stored elsewhere.
pub(crate) const ORPHANS_STAY: Duration = Duration::from_secs(7 * 24 * 3600);

/// How often the directories are checked.
const LOOK_EVERY: Duration = Duration::from_secs(10);

const MARK: &str = "remove-after";
/// The prefix of the name of a directory that is being removed.
const GONE: &str = ".gone-";

/// Until when a directory is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    /// How much of its time was left when this was written, in milliseconds.
    left_ms: u64,
    /// The boot in which it was written, and when.
    boot_id: String,
    at: Boot,
    /// Some of its data is nowhere else, so it is kept until then even if the disk is low.
    #[serde(default = "yes")]
    precious: bool,
    /// The room that it takes on the disk; `None` before that was measured.
    #[serde(default)]
    bytes: Option<u64>,
}

/// The default for marks without the field.
fn yes() -> bool {
    true
}

impl Mark {
    /// How much is left now. After a reboot, at least the whole time since that reboot has passed.
    fn left(&self, boot_id: &str, now: Boot) -> Duration {
        let passed = if self.boot_id == boot_id { now.since(self.at) } else { now.0 };
        Duration::from_millis(self.left_ms).saturating_sub(passed)
    }
}

/// Keeps directories for a while. Clones share them.
#[derive(Clone)]
pub(crate) struct Retention {
    /// Where what is kept is made known, if anywhere.
    inventory: Option<watch::Sender<Inventory>>,
    jobs: PathBuf,
    clock: Arc<dyn Clock>,
    boot_id: Arc<str>,
}

/// How long a directory is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stay {
    /// For this time, for users to look at; the controller has everything.
    Copy(Duration),
    /// For [`ORPHANS_STAY`], because some of its data is nowhere else.
    Original,
}

/// Whether the replica of this directory is over.
pub(crate) fn is_over(dir: &JobDir) -> bool {
    dir.path().join(MARK).exists()
}

impl Retention {
    pub(crate) fn new(jobs: PathBuf, clock: Arc<dyn Clock>, boot_id: &str) -> Retention {
        Retention { inventory: None, jobs, clock, boot_id: boot_id.into() }
    }

    /// The same, and what is kept because it is nowhere else is made known there.
    pub(crate) fn shown_in(self, inventory: watch::Sender<Inventory>) -> Retention {
        Retention { inventory: Some(inventory), ..self }
    }

    /// Removes what is kept of a replica that is over, if there is anything.
    pub(crate) async fn discard(&self, dir: &JobDir) {
        if !is_over(dir) {
            return;
        }
        let path = dir.path().to_owned();
        let removed = blocking(move || {
            tell(&path, discard(&path));
        });
        removed.await;
        self.clone().swept(false).await;
    }

    /// Marks the directory of an ended replica to be removed after `stay`.
    pub(crate) async fn put(&self, dir: &JobDir, stay: Stay) -> io::Result<()> {
        let (left, precious) = match stay {
            Stay::Copy(left) => (left, false),
            Stay::Original => (ORPHANS_STAY, true),
        };
        let (dir, mark) = (dir.clone(), self.mark(left, precious));
        let put = move || match stay {
            Stay::Copy(Duration::ZERO) => discard(dir.path()),
            _ => {
                // What it wrote over its environment is of use to nobody, and may be large.
                if let Err(error) = agent_spawn::remove_tree(&dir.layer()) {
                    warn!(path = %dir.layer().display(), %error, "cannot remove the layer of a job");
                }
                write(dir.path(), &mark)
            }
        };
        agent_blocking::blocking_io(put).await
    }

    fn mark(&self, left: Duration, precious: bool) -> Mark {
        let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        Mark { left_ms, boot_id: self.boot_id.to_string(), at: self.clock.boot(), precious, bytes: None }
    }

    async fn swept(self, is_low: bool) {
        if let Err(error) = blocking(move || self.sweep(is_low)).await {
            warn!(%error, "cannot list job directories");
        }
    }

    /// Removes the directories that are due, and while the disk `is_low` also the one copy with the least time left.
    fn sweep(&self, is_low: bool) -> io::Result<()> {
        failpoint::hit("node.retention.sweep")?;
        let (mut copies, mut kept) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(&self.jobs)? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(GONE.as_bytes())) {
                tell(&path, agent_spawn::remove_tree(&path));
                continue;
            }
            match self.look(&path) {
                Some(Mark { left_ms: 0, .. }) => tell(&path, discard(&path)),
                Some(Mark { left_ms, precious: false, .. }) => copies.push((left_ms, path)),
                Some(Mark { bytes, .. }) => kept.extend(kept_in(&path, bytes.unwrap_or(0))),
                None => {}
            }
        }
        self.show(kept);
        if is_low && let Some((_, path)) = copies.into_iter().min() {
            tell(&path, discard(&path));
        }
        Ok(())
    }

    /// Makes known what is kept.
    fn show(&self, mut kept: Vec<KeptResult>) {
        kept.sort();
        if let Some(inventory) = &self.inventory {
            inventory.send_if_modified(|known| {
                let differs = known.kept != kept;
                known.kept = kept;
                differs
            });
        }
    }

    /// The mark of a directory with the time that is left now; `None` when its replica is not over.
    fn look(&self, path: &Path) -> Option<Mark> {
        let text = match std::fs::read(path.join(MARK)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            text => text.unwrap_or_default(),
        };
        let mark: Mark = serde_json::from_slice(&text).unwrap_or_else(|_| {
            warn!(path = %path.display(), "cannot read retention of directory: its time begins anew");
            Mark { boot_id: String::new(), ..self.mark(ORPHANS_STAY + self.clock.boot().0, true) }
        });
        let now = self.mark(mark.left(&self.boot_id, self.clock.boot()), mark.precious);
        let bytes = mark.bytes.or_else(|| mark.precious.then(|| room_of(path)));
        let now = Mark { bytes, ..now };
        if (mark.boot_id != *self.boot_id || mark.bytes != now.bytes)
            && let Err(error) = write(path, &now)
        {
            warn!(path = %path.display(), %error, "cannot note retention of directory");
        }
        Some(now)
    }
}

impl Reclaimer for Retention {
    fn tidy(&self) -> BoxFuture<'_, Duration> {
        self.clone().swept(false).map(|()| LOOK_EVERY).boxed()
    }
    /// One at a time: the caller measures how much that frees.
    fn reclaim(&self, _: u64) -> BoxFuture<'_, ()> {
        self.clone().swept(true).boxed()
    }
}

/// What is kept in the directory of a replica.
fn kept_in(path: &Path, bytes: u64) -> Option<KeptResult> {
    let replica = path.file_name()?.to_str()?.parse().ok()?;
    // For people: whatever the order is otherwise, it says whose it is, or nothing.
    let order: Option<serde_json::Value> =
        std::fs::read(path.join("order.json")).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let owner =
        order.and_then(|mut order| serde_json::from_value::<Principal>(order["spec"]["owner"].take()).ok());
    Some(KeptResult { replica, owner: owner.map(|owner| owner.to_string()).unwrap_or_default(), bytes })
}

/// The room that a directory takes, as far as it can be read.
fn room_of(path: &Path) -> u64 {
    let Ok(found) = path.symlink_metadata() else { return 0 };
    let below = || -> u64 {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| room_of(&entry.path())).sum()
    };
    found.blocks() * 512 + if found.is_dir() { below() } else { 0 }
}

fn tell(path: &Path, removed: io::Result<()>) {
    match removed {
        Ok(()) => info!(path = %path.display(), "removed the directory of a replica that is over"),
        Err(error) => warn!(path = %path.display(), %error, "a job directory cannot be removed"),
    }
}

/// Removes a directory. A half removed one would be read wrongly, so it is renamed first.
fn discard(path: &Path) -> io::Result<()> {
    failpoint::hit("node.retention.remove")?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let gone = path.with_file_name(format!("{GONE}{name}"));
    match std::fs::rename(path, &gone) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        renamed => renamed?,
    }
    agent_spawn::remove_tree(&gone)
}

/// Writes a mark durably and atomically.
fn write(dir: &Path, mark: &Mark) -> io::Result<()> {
    failpoint::hit("node.retention.write")?;
    agent_fs::write_durable(&dir.join(MARK), &serde_json::to_vec(mark)?)
}

#[cfg(test)]
mod tests {
    use agent_model::{ManualClock, Timestamp};

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    /// A clock whose wall time and boot time differ.
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

    fn retention(jobs: &Path, clock: &Arc<Apart>, boot_id: &str) -> Retention {
        Retention::new(jobs.to_owned(), clock.clone(), boot_id)
    }

    fn dirs<const N: usize>(jobs: &Path, names: [&str; N]) -> [JobDir; N] {
        names.map(|name| {
            let dir = JobDir::new(jobs.join(name));
            dir.create().unwrap();
            dir
        })
    }

    fn left(retention: &Retention, dir: &JobDir) -> Duration {
        retention.sweep(false).unwrap();
        retention.look(dir.path()).map_or(Duration::ZERO, |mark| Duration::from_millis(mark.left_ms))
    }

    #[tokio::test]
    async fn test_directory_goes_when_its_time_is_over() {
        let (temp, clock) = (tempfile::tempdir().unwrap(), Arc::new(Apart::default()));
        let retention = retention(temp.path(), &clock, "boot");
        let [a, b, c, open] = dirs(temp.path(), ["a", "b", "c", "open"]);
        for (dir, seconds) in [(&a, 0), (&b, 1), (&c, 9)] {
            retention.put(dir, Stay::Copy(Duration::from_secs(seconds))).await.unwrap();
        }
        assert!(!a.path().exists() && is_over(&b) && !is_over(&open));
        clock.boot.advance(Duration::from_secs(2));
        let [half] = dirs(temp.path(), [".gone-d"]);
        assert_eq!(left(&retention, &c), Duration::from_secs(7));
        assert!(!half.path().exists(), "one that a crash left half removed");
        assert!(".gone-a.1.0".parse::<agent_model::ReplicaId>().is_err(), "it is taken for no replica");
        assert!(!b.path().exists() && c.path().exists() && open.path().exists());
    }

    #[tokio::test]
    async fn test_low_disk_costs_copies_one_by_one_and_no_original() {
        let (temp, clock) = (tempfile::tempdir().unwrap(), Arc::new(Apart::default()));
        let retention = retention(temp.path(), &clock, "boot");
        let [newer, older, original, open] = dirs(temp.path(), ["newer", "older", "original", "open"]);
        retention.put(&older, Stay::Copy(DAY)).await.unwrap();
        retention.put(&newer, Stay::Copy(2 * DAY)).await.unwrap();
        retention.put(&original, Stay::Original).await.unwrap();
        retention.reclaim(1).await;
        assert!(!older.path().exists() && newer.path().exists());
        retention.reclaim(1).await;
        retention.reclaim(1).await;
        assert!(!newer.path().exists() && original.path().exists() && open.path().exists());
    }

    #[tokio::test]
    async fn test_what_is_nowhere_else_is_shown_with_its_size_and_goes_when_it_is_told_to() {
        let (temp, clock) = (tempfile::tempdir().unwrap(), Arc::new(Apart::default()));
        let inventory = watch::Sender::new(Inventory::default());
        let retention = retention(temp.path(), &clock, "boot").shown_in(inventory.clone());
        let [copy, original, open] = dirs(temp.path(), ["a.1.0", "b.2.0", "c.1.0"]);
        std::fs::write(original.path().join("out"), vec![7; 1 << 20]).unwrap();
        retention.put(&copy, Stay::Copy(DAY)).await.unwrap();
        retention.put(&original, Stay::Original).await.unwrap();
        retention.tidy().await;
        let kept = inventory.borrow().kept.clone();
        assert_eq!(kept.iter().map(|one| one.replica.to_string()).collect::<Vec<_>>(), ["b.2.0"]);
        assert!((1 << 20..2 << 20).contains(&kept[0].bytes), "{kept:?}");
        retention.discard(&open).await;
        assert!(open.path().exists(), "it is not over");
        retention.discard(&original).await;
        assert!(!original.path().exists() && copy.path().exists());
        assert!(inventory.borrow().kept.is_empty());
    }

    #[tokio::test]
    async fn test_results_stay_for_seven_days_whatever_the_wall_clock_says() {
        let (temp, clock) = (tempfile::tempdir().unwrap(), Arc::new(Apart::default()));
        clock.boot.advance(DAY);
        let before = retention(temp.path(), &clock, "first boot");
        let [dir] = dirs(temp.path(), ["a"]);
        before.put(&dir, Stay::Original).await.unwrap();
        clock.wall.advance(3653 * DAY);
        assert_eq!(left(&before, &dir), 7 * DAY);
        clock.boot.advance(3 * DAY);
        assert_eq!(left(&before, &dir), 4 * DAY);

        // After reboots, only time that certainly passed counts, and it counts once.
        let clock = Arc::new(Apart::default());
        clock.boot.advance(2 * DAY);
        let after = retention(temp.path(), &clock, "second boot");
        assert_eq!(left(&after, &dir), 5 * DAY);
        clock.boot.advance(DAY);
        assert_eq!(left(&after, &dir), 4 * DAY);
        clock.boot.advance(4 * DAY);
        assert_eq!(left(&after, &dir), Duration::ZERO);
        assert!(!dir.path().exists());
    }

    #[tokio::test]
    async fn test_unreadable_date_begins_anew() {
        for text in ["", "17", "{\"left_ms\":"] {
            let (temp, clock) = (tempfile::tempdir().unwrap(), Arc::new(Apart::default()));
            clock.boot.advance(30 * DAY);
            let [dir] = dirs(temp.path(), ["a"]);
            std::fs::write(dir.path().join(MARK), text).unwrap();
            let retention = retention(temp.path(), &clock, "boot");
            assert_eq!(left(&retention, &dir), ORPHANS_STAY, "{text}");
            clock.boot.advance(DAY);
            assert_eq!(left(&retention, &dir), 6 * DAY, "{text}");
            retention.reclaim(1).await;
            assert!(dir.path().exists(), "it may be precious");
        }
    }
}
