//! The keeper of the disk that the state directory is on.
//!
//! ```text
//! measure ── every 2 to 10 s ──▶ Pressure ──▶ upkeep
//!    │                              └───────▶ reclaim: one Reclaimer after the other, until there is ample room
//!    └▶ ballast: given up when the disk is full all the same
//! ```
//!
//! Owns: how full the disk is, measured in one place and published in a watch channel; the [`Ballast`]; the order in
//! which room is made. Hides: the marks ([`Watermarks`]) and the intervals of measurement. Each part that can free
//! disk space is a [`Reclaimer`]: it chooses what to remove, and does not look at the disk.
//!
//! Invariants: no work that fills the disk begins while the disk is low ([`DiskKeeper::room`]); room is made in the
//! order in which the reclaimers are given, and each is asked only while there is still too little; a slow reclaimer
//! delays only the others of its own lane, and never the measurement.
//!
//! Tasks: [`DiskKeeper::measure`], and [`DiskKeeper::reclaim`] once for each lane. They have no state of their own,
//! so they can be restarted at any time. Started by `crate::roles`.

mod ballast;
pub(crate) mod blobs;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_blocking::blocking;
use agent_model::disk::{Pressure, Shortfall, Watermarks};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::Instant;

use ballast::Ballast;

/// How often the disk is measured while there is little room, and how often room is made while there is too little.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How often it is measured at least.
const LOOK_AT_LEAST_EVERY: Duration = Duration::from_secs(10);
/// No faster is a disk filled, in bytes a second.
const FILLS: u64 = 1 << 30;

/// While the disk is short of files (inodes), not of bytes: how many bytes to remove at a time.
const FOR_FILES: u64 = 64 << 20;

/// Something on the disk of which a part can be removed.
pub(crate) trait Reclaimer: Send + Sync {
    /// The lowest pressure at which it is asked for room.
    fn starts_at(&self) -> Pressure {
        Pressure::Low
    }

    /// Removes what is too old or above a limit of its own, however much room there is. Returns after how long to
    /// call it again.
    fn tidy(&self) -> BoxFuture<'_, Duration> {
        std::future::ready(Duration::from_secs(24 * 3600)).boxed()
    }

    /// Removes about `bytes` bytes that nobody needs now, the least recently used first, and logs it. It is called
    /// again soon, so anything expensive to find out is not found out each time.
    fn reclaim(&self, bytes: u64) -> BoxFuture<'_, ()>;
}

/// Reclaimers that are asked one after the other.
pub(crate) type Lane = Vec<Box<dyn Reclaimer>>;

/// The keeper of a disk. Clones are the same one.
#[derive(Clone)]
pub(crate) struct DiskKeeper {
    dir: PathBuf,
    marks: Watermarks,
    ballast: Arc<Ballast>,
    pressure: watch::Sender<Pressure>,
    /// Who waits because it failed, and why the last of them does.
    failing: watch::Sender<(usize, String)>,
}

/// That somebody waits for a disk that fails, for as long as this lives.
pub(crate) struct Failing(watch::Sender<(usize, String)>);

impl Drop for Failing {
    fn drop(&mut self) {
        self.0.send_modify(|(waiting, _)| *waiting -= 1);
    }
}

impl DiskKeeper {
    /// For the disk of a state directory, of which `reserve` bytes must stay free. If the disk became full while no
    /// daemon ran, ballast is released at once, so that everything else can be opened.
    pub(crate) fn open(state_dir: &Path, reserve: u64) -> DiskKeeper {
        let ballast = Arc::new(Ballast::open(state_dir, agent_node::disk_size(state_dir)));
        let (dir, marks) = (state_dir.to_owned(), Watermarks::new(reserve));
        let (pressure, failing) = (watch::Sender::new(Pressure::Enough), watch::Sender::default());
        let keeper = DiskKeeper { dir, marks, ballast, pressure, failing };
        keeper.look();
        keeper
    }

    /// How full the disk was at the last measurement; changes are published.
    pub(crate) fn pressure(&self) -> watch::Receiver<Pressure> {
        self.pressure.subscribe()
    }

    /// A write failed because of `why`, and is tried again: until that ends the disk counts as failing.
    pub(crate) fn is_waited_for(&self, why: &str) -> Failing {
        self.failing.send_modify(|(waiting, last)| {
            *waiting += 1;
            why.clone_into(last);
        });
        Failing(self.failing.clone())
    }

    /// Why the disk fails, if it does; changes are published.
    pub(crate) fn failing(&self) -> watch::Receiver<(usize, String)> {
        self.failing.subscribe()
    }

    /// Whether the reserve, which is kept for what must always work, is free now.
    pub(crate) fn room(&self) -> Result<(), Shortfall> {
        self.marks.admit(self.free(), agent_node::few_files(&self.dir))
    }

    /// Returns when there is room.
    pub(crate) async fn until_room(&self) {
        while self.room().is_err() {
            tokio::time::sleep(LOOK_EVERY / 2).await;
        }
    }

    /// Whether `bytes` bytes can be used for something that only saves time later.
    pub(crate) fn can_spare(&self, bytes: u64) -> bool {
        self.free() >= self.marks.ample().saturating_add(bytes)
    }

    /// How many bytes can be used for what is soon removed again.
    pub(crate) fn spare(&self) -> u64 {
        self.free().saturating_sub(self.marks.ample())
    }

    /// Releases a piece of the ballast because there was no room for a record; `false` when there is none left.
    pub(crate) fn give_way(&self) -> bool {
        self.ballast.give_way()
    }

    /// Measures the disk again and again.
    pub(crate) async fn measure(self) {
        let mut pause = LOOK_EVERY;
        loop {
            tokio::time::sleep(pause).await;
            let this = self.clone();
            // A broken disk may take long to answer.
            pause = blocking(move || this.look()).await;
        }
    }

    /// Tidies the reclaimers of `lane` when they are due, and makes room with them in order.
    pub(crate) async fn reclaim(self, lane: Arc<Lane>) {
        let mut pressure = self.pressure.subscribe();
        let mut due = vec![Instant::now(); lane.len()];
        loop {
            for (reclaimer, due) in lane.iter().zip(&mut due) {
                if *due <= Instant::now() {
                    let next = reclaimer.tidy().await;
                    *due = Instant::now() + next;
                }
            }
            let is_short = *pressure.borrow_and_update() >= Pressure::Tight;
            if is_short {
                self.make_room(&lane).await;
            }
            let again = is_short.then(|| Instant::now() + LOOK_EVERY);
            let next = due.iter().copied().chain(again).min().unwrap_or_else(Instant::now);
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                Ok(()) = pressure.changed() => {}
            }
        }
    }

    /// Asks one reclaimer after the other while there is too little room.
    async fn make_room(&self, lane: &Lane) {
        for reclaimer in lane {
            if self.measured() >= reclaimer.starts_at() {
                let files = if self.is_short_of_files() { FOR_FILES } else { 0 };
                reclaimer.reclaim(self.marks.ample().saturating_sub(self.free()).max(files)).await;
            }
        }
    }

    /// Measures the disk; returns after how long to do so again.
    fn look(&self) -> Duration {
        self.ballast.balance(self.free());
        let free = self.free(); // the ballast may have changed it
        let pressure = self.pressure_with(free);
        self.pressure.send_if_modified(|known| std::mem::replace(known, pressure) != pressure);
        until_next_look(free.saturating_sub(self.marks.ample()))
    }

    /// A shortage of files is as bad as one of bytes.
    fn pressure_with(&self, free: u64) -> Pressure {
        if self.is_short_of_files() { Pressure::Low } else { self.marks.pressure(free) }
    }

    fn measured(&self) -> Pressure {
        self.pressure_with(self.free())
    }

    fn is_short_of_files(&self) -> bool {
        agent_node::few_files(&self.dir).is_some()
    }

    fn free(&self) -> u64 {
        agent_node::disk_free(&self.dir)
    }
}

/// A disk with `spare` bytes to fill is measured again before it can be full.
fn until_next_look(spare: u64) -> Duration {
    Duration::from_secs(spare / FILLS).clamp(LOOK_EVERY, LOOK_AT_LEAST_EVERY)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Records how it is called, and frees nothing.
    struct Asked {
        name: &'static str,
        starts_at: Pressure,
        log: Arc<Mutex<Vec<String>>>,
    }

    impl Reclaimer for Asked {
        fn starts_at(&self) -> Pressure {
            self.starts_at
        }
        fn tidy(&self) -> BoxFuture<'_, Duration> {
            self.log.lock().unwrap().push(format!("tidy {}", self.name));
            std::future::ready(Duration::from_secs(60)).boxed()
        }
        fn reclaim(&self, bytes: u64) -> BoxFuture<'_, ()> {
            assert!(bytes > 0);
            self.log.lock().unwrap().push(format!("reclaim {}", self.name));
            std::future::ready(()).boxed()
        }
    }

    /// The calls to two reclaimers within these seconds on a disk with this reserve.
    async fn asked(reserve: u64, seconds: u64) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let asked =
            |name, starts_at| -> Box<dyn Reclaimer> { Box::new(Asked { name, starts_at, log: log.clone() }) };
        let lane = Arc::new(vec![asked("first", Pressure::Tight), asked("second", Pressure::Low)]);
        let keeper = DiskKeeper::open(dir.path(), reserve);
        let ran = tokio::time::timeout(Duration::from_secs(seconds), keeper.reclaim(lane)).await;
        assert!(ran.is_err(), "it goes on for ever");
        let log = log.lock().unwrap();
        log.clone()
    }

    #[tokio::test(start_paused = true)]
    async fn test_room_is_made_in_order_and_only_while_there_is_too_little() {
        let free = agent_node::disk_free(&std::env::temp_dir());
        let tidied = ["tidy first", "tidy second"];
        assert_eq!(asked(0, 50).await, tidied);
        assert_eq!(asked(0, 110).await, [tidied, tidied].concat());
        // Between the reserve and half as much again.
        assert_eq!(asked(free / 5 * 4, 1).await, [&tidied[..], &["reclaim first"]].concat());
        let both = ["reclaim first", "reclaim second"];
        assert_eq!(asked(u64::MAX, 1).await, [tidied, both].concat());
        assert_eq!(asked(u64::MAX, 3).await, [tidied, both, both].concat(), "again while it is low");
    }

    #[test]
    fn test_a_disk_is_measured_more_often_when_it_could_be_full_sooner() {
        let seconds = |spare| until_next_look(spare).as_secs();
        assert_eq!([0, 1, 5 << 30, 1 << 50].map(seconds), [2, 2, 5, 10]);
    }

    #[tokio::test(start_paused = true)]
    async fn test_pressure_is_told_when_the_disk_fills() {
        let dir = tempfile::tempdir().unwrap();
        let keeper = DiskKeeper::open(dir.path(), 0);
        assert_eq!(*keeper.pressure().borrow(), Pressure::Ample);
        assert!(keeper.room().is_ok() && keeper.can_spare(1) && !keeper.can_spare(u64::MAX));
        let low = DiskKeeper { marks: Watermarks::new(u64::MAX), ..keeper };
        let mut pressure = low.pressure();
        tokio::select! {
            () = low.clone().measure() => {}
            seen = pressure.changed() => seen.unwrap(),
        }
        assert_eq!(*pressure.borrow(), Pressure::Low);
        assert!(low.room().is_err() && !low.can_spare(0));
    }
}
