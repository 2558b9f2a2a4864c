//! What keeps the controller's machine up, for whoever shuts it down when nothing does.
//!
//! Owns the answer to "may it go now?": whoever decides asks by [`Standby`], and closes the queue before the machine
//! goes. This crate does not know how a machine is shut down. Users see what is planned on the [`Board`], and can keep
//! the machine up with it.
//!
//! Invariants: between [`Standby::close`] and [`Standby::open`] nothing is placed, so no job starts on a machine that
//! is about to go; what is submitted meanwhile is on disk and waits. What users asked for outlives the daemon.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_model::Timestamp;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::queue::{Queue, Work};

/// A client sends blobs one after the other: this long after one, the next or the job is expected.
const NEXT_BLOB: Duration = Duration::from_secs(30);

/// What is planned, for users.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShutdownPlan {
    /// Since when nothing has kept the machine up.
    pub idle_since: Option<Timestamp>,
    /// When it is shut down, as far as that is known.
    pub due: Option<Timestamp>,
    /// The rule by which it is: `idle for 30 min`.
    pub rule: String,
    /// What keeps it up now; empty when nothing does.
    pub kept_up_by: String,
    /// The command that shuts it down has been started.
    pub running: bool,
    /// Why that failed the last time; empty when it did not.
    pub failed: String,
}

/// What is planned, and until when users want the machine up. Clones show the same.
#[derive(Clone)]
pub(crate) struct Board(Arc<Mutex<Shown>>);

struct Shown {
    plan: Option<ShutdownPlan>,
    awake_until: Option<Timestamp>,
    file: PathBuf,
}

impl Board {
    /// With what users asked an earlier process for, in a file of this directory.
    pub(crate) fn open(home: &Path) -> Board {
        let file = home.join("awake");
        // A file that cannot be read is as one that is not there: a machine is shut down, and no job is lost by it.
        let known = std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
        Board(Arc::new(Mutex::new(Shown { plan: None, awake_until: known.map(Timestamp), file })))
    }

    /// What is planned, and until when the machine is kept up; `None` where nothing shuts it down.
    pub(crate) fn look(&self) -> Option<(ShutdownPlan, Option<Timestamp>)> {
        let shown = self.0.lock();
        shown.plan.clone().map(|plan| (plan, shown.awake_until))
    }

    /// Keeps the machine up until then, or no longer. Blocking.
    pub(crate) fn keep_awake(&self, until: Option<Timestamp>) -> io::Result<()> {
        let mut shown = self.0.lock();
        let text = until.map_or_else(String::new, |until| until.0.to_string());
        agent_fs::write_whole(&shown.file, text.as_bytes())?;
        shown.awake_until = until;
        Ok(())
    }
}

/// Calls about blobs that are going on. Clones count the same ones.
#[derive(Debug, Clone, Default)]
pub(crate) struct Transfers(Arc<Mutex<(usize, Option<Instant>)>>);

/// A call that is going on until this is dropped.
pub(crate) struct Transfer(Transfers);

impl Transfers {
    pub(crate) fn begin(&self) -> Transfer {
        self.0.lock().0 += 1;
        Transfer(self.clone())
    }

    fn go_on(&self) -> bool {
        let (count, last) = *self.0.lock();
        count > 0 || last.is_some_and(|last| last.elapsed() < NEXT_BLOB)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let mut all = self.0.0.lock();
        *all = (all.0 - 1, Some(Instant::now()));
    }
}

/// See the module.
pub struct Standby {
    pub(crate) queue: Queue,
    pub(crate) board: Board,
    pub(crate) transfers: Transfers,
}

/// The controller is stopping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the controller is stopping")]
pub struct ControllerStops;

impl Standby {
    /// What keeps the machine up, as text for users; `None` when nothing does.
    pub async fn kept_up_by(&self, work: Work) -> Result<Option<String>, ControllerStops> {
        let job = self.queue.kept_up_by(work).await.map_err(|_| ControllerStops)?;
        let sending = || (work == Work::Any && self.transfers.go_on()).then(|| "files are being sent".into());
        Ok(job.or_else(sending))
    }

    /// From now on nothing is placed, for this reason, unless `work` keeps the machine up: then that is returned and
    /// nothing changes. Without `work` nothing is asked.
    pub async fn close(&self, why: &str, work: Option<Work>) -> Result<Option<String>, ControllerStops> {
        if work == Some(Work::Any) && self.transfers.go_on() {
            return Ok(Some("files are being sent".into()));
        }
        self.queue.close(why, work).await.map_err(|_| ControllerStops)
    }

    /// What can be placed is placed again.
    pub async fn open(&self) -> Result<(), ControllerStops> {
        self.queue.open().await.map_err(|_| ControllerStops)
    }

    /// Until when users want the machine up.
    pub fn awake_until(&self) -> Option<Timestamp> {
        self.board.0.lock().awake_until
    }

    /// Shows users what is planned.
    pub fn show(&self, plan: ShutdownPlan) {
        self.board.0.lock().plan = Some(plan);
    }
}

impl fmt::Debug for Standby {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Standby").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_what_users_asked_for_outlives_the_daemon() {
        let home = tempfile::tempdir().unwrap();
        let board = Board::open(home.path());
        assert_eq!(board.look(), None, "nothing shuts the machine down");
        let look = |board: &Board| {
            board.0.lock().plan = Some(ShutdownPlan::default());
            board.look().unwrap().1
        };
        assert_eq!(look(&board), None);
        board.keep_awake(Some(Timestamp(7_000))).unwrap();
        assert_eq!(
            (look(&board), look(&Board::open(home.path()))),
            (Some(Timestamp(7_000)), Some(Timestamp(7_000)))
        );
        board.keep_awake(None).unwrap();
        assert_eq!((look(&board), look(&Board::open(home.path()))), (None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn test_files_are_being_sent_until_a_while_after_the_last() {
        let transfers = Transfers::default();
        assert!(!transfers.go_on());
        let (one, other) = (transfers.begin(), transfers.begin());
        drop(one);
        tokio::time::advance(NEXT_BLOB * 2).await;
        assert!(transfers.go_on(), "one goes on");
        drop(other);
        assert!(transfers.go_on());
        tokio::time::advance(NEXT_BLOB).await;
        assert!(!transfers.go_on());
    }
}
