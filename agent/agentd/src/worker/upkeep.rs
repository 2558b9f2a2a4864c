//! Watches the machine: whether its inventory is still true, and whether unused control groups were left on it.
//!
//! Owns the inventory, as a watch channel that `worker::reconcile` reports whenever it changed. Invariants: the
//! disk's keeper reports when the disk fills, so a node that became unfit stops taking jobs, and one that is fit
//! again takes them, within seconds; the end of the container engine is noticed at once, by an idle connection that
//! is closed; the inventory changes only when a finding's grade or meaning does, not with every number in it.
//!
//! It has no state that matters, so it can be restarted at any time. Started by `crate::roles`.

use std::time::Duration;

use agent_blocking::blocking;
use agent_model::disk::Pressure;
use agent_model::failpoint;
use agent_model::node::{Finding, Inventory};
use agent_node::ProbeConfig;
use agent_shim::sys;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use super::gpus;

/// How often the container engine and root's helper are checked by a request: a frozen one does not close its
/// connections.
const ASK_ENGINE_EVERY: Duration = Duration::from_secs(10);
/// How often everything is checked.
const PROBE_EVERY: Duration = Duration::from_secs(60);

/// The upkeep of a node. Clones share its state.
#[derive(Clone)]
pub(crate) struct Upkeep {
    probe: ProbeConfig,
    pressure: watch::Receiver<Pressure>,
    failing: watch::Receiver<(usize, String)>,
    inventory: watch::Sender<Inventory>,
}

impl Upkeep {
    /// For a machine whose `inventory` was just taken.
    pub(crate) fn new(
        probe: ProbeConfig,
        (pressure, failing): (watch::Receiver<Pressure>, watch::Receiver<(usize, String)>),
        inventory: Inventory,
    ) -> Upkeep {
        Upkeep { probe, pressure, failing, inventory: watch::Sender::new(inventory) }
    }

    /// The inventory of the machine, now and after each change.
    pub(crate) fn inventory(&self) -> watch::Receiver<Inventory> {
        self.inventory.subscribe()
    }

    /// The sender with which others publish their parts of the inventory: [`super::environments`].
    pub(crate) fn publisher(&self) -> watch::Sender<Inventory> {
        self.inventory.clone()
    }

    /// Runs forever: checks the machine and updates the inventory.
    pub(crate) async fn run(mut self) {
        let (mut probed, mut asked) = (Instant::now(), Instant::now());
        let mut engine = UnixStream::connect(&self.probe.docker).await.ok();
        loop {
            let ended = tokio::select! {
                () = tokio::time::sleep_until(asked + ASK_ENGINE_EVERY) => false,
                Ok(()) = self.pressure.changed() => false,
                Ok(()) = self.failing.changed() => false,
                () = until_closed(engine.as_mut()) => true,
            };
            let depth = match (probed.elapsed() >= PROBE_EVERY, asked.elapsed() >= ASK_ENGINE_EVERY) {
                (true, _) => Depth::Whole,
                (false, due) if due || ended => Depth::Others,
                _ => Depth::Disk,
            };
            if ended {
                engine = None;
            }
            if depth != Depth::Disk {
                asked = Instant::now();
                // After an end there is a pause before the next connection, to avoid a busy loop.
                if engine.is_none() && !ended {
                    engine = UnixStream::connect(&self.probe.docker).await.ok();
                }
            }
            if depth == Depth::Whole {
                probed = asked;
            }
            let this = self.clone();
            blocking(move || this.look(depth)).await;
        }
    }

    fn look(&self, depth: Depth) {
        if let Err(error) = failpoint::hit("node.upkeep.look") {
            warn!(%error, "cannot probe machine");
            return;
        }
        if depth == Depth::Whole {
            let swept = agent_runtime::exec::sweep_groups();
            if swept > 0 {
                info!(swept, "removed control groups that nobody would");
            }
            // After a large directory or many jobs that is tens of megabytes.
            sys::give_memory_back();
        }
        let mut found = match depth {
            Depth::Whole => agent_node::probe(&self.probe),
            Depth::Others | Depth::Disk => {
                let mut findings = agent_node::check(&self.probe);
                if depth == Depth::Others {
                    findings.extend(agent_node::check_others(&self.probe));
                }
                renewed(&self.inventory.borrow(), findings)
            }
        };
        if let (1.., why) = &*self.failing.borrow() {
            found = renewed(&found, vec![agent_node::failing_disk(why)]);
        }
        self.inventory.send_if_modified(|known| {
            // Other tasks update these.
            found.environments.clone_from(&known.environments);
            found.kept.clone_from(&known.kept);
            found.interpreters.clone_from(&known.interpreters);
            gpus::keep_known(known, &mut found);
            let differs = !is_same(known, &found);
            if differs {
                tell(known, &found);
                *known = found;
            }
            differs
        });
    }
}

/// How much of the machine is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Depth {
    Disk,
    /// The container engine and root's helper as well.
    Others,
    Whole,
}

/// Returns when the other side closes the connection; its data is ignored.
async fn until_closed(connection: Option<&mut UnixStream>) {
    let Some(connection) = connection else { return std::future::pending().await };
    while connection.read(&mut [0; 512]).await.is_ok_and(|length| length > 0) {}
}

/// An inventory with some findings replaced.
fn renewed(known: &Inventory, findings: Vec<Finding>) -> Inventory {
    let mut inventory = known.clone();
    for finding in findings {
        if let Some(old) = inventory.findings.iter_mut().find(|old| old.topic == finding.topic) {
            *old = finding;
        }
    }
    inventory
}

/// Whether two inventories are equal, except for the numbers in `found`.
fn is_same(one: &Inventory, other: &Inventory) -> bool {
    let judged = |inventory: &Inventory| {
        let findings = inventory.findings.iter();
        let judged = findings.map(|finding| Finding { found: String::new(), ..finding.clone() }).collect();
        Inventory { findings: judged, ..inventory.clone() }
    };
    judged(one) == judged(other)
}

fn tell(known: &Inventory, found: &Inventory) {
    for finding in &found.findings {
        let before = known.findings.iter().find(|before| before.topic == finding.topic);
        if before.is_none_or(|before| before.grade != finding.grade) {
            let Finding { topic, grade, found, means, .. } = finding;
            info!(topic, ?grade, found, means, "noticed change of machine");
        }
    }
}

#[cfg(test)]
mod tests {
    use agent_model::node::Grade;
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn test_disk_that_fills_and_empties_changes_the_inventory_within_seconds() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().to_owned();
        let [engine, docker] = ["/nowhere"; 2].map(std::path::PathBuf::from);
        let jobs = agent_node::JobsRunAs::default();
        let (path, labels) = (String::new(), Default::default());
        let probe = ProbeConfig {
            state_dir,
            sharing: agent_node::Sharing::Slots(1),
            path,
            disk_reserve: 0,
            engine,
            docker,
            jobs,
            helper: || None,
            labels,
        };
        let inventory = agent_node::probe(&probe);
        let grade = |inventory: &Inventory| {
            inventory.findings.iter().find(|finding| finding.topic == "disk").unwrap().grade
        };
        assert_ne!(grade(&inventory), Grade::Bad);
        let (keeper, pressure) = watch::channel(Pressure::Ample);
        let (_disk, failing) = watch::channel(Default::default());
        let full = Upkeep::new(
            ProbeConfig { disk_reserve: u64::MAX, ..probe.clone() },
            (pressure, failing),
            inventory,
        );
        let mut known = full.inventory();
        let room = Upkeep { probe, ..full.clone() };
        let begun = Instant::now();
        for (upkeep, told, expected) in
            [(full, Pressure::Low, Grade::Bad), (room, Pressure::Ample, Grade::Good)]
        {
            keeper.send_replace(told);
            tokio::select! {
                () = upkeep.run() => {}
                seen = known.changed() => seen.unwrap(),
            }
            let grade = grade(&known.borrow_and_update());
            assert!((grade == Grade::Bad) == (expected == Grade::Bad), "{grade:?}");
        }
        assert!(begun.elapsed() < ASK_ENGINE_EVERY, "it heard of it");
    }

    /// An engine that answers for as long as it is polled, and counts connections.
    async fn engine(listener: tokio::net::UnixListener, came: &watch::Sender<u32>) {
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let (mut connection, _) = listener.accept().await.unwrap();
            came.send_modify(|count| *count += 1);
            connections.spawn(async move {
                let mut question = [0; 512];
                while connection.read(&mut question).await.is_ok_and(|length| length > 0) {
                    let _ = connection.write_all(b"HTTP/1.0 200 OK\r\n\r\n{}").await;
                    let _ = connection.shutdown().await;
                }
            });
        }
    }

    #[tokio::test]
    async fn test_end_of_the_engine_is_noticed_long_before_all_is_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let [state_dir, docker, nowhere] = ["state", "docker.sock", "gone"].map(|name| dir.path().join(name));
        let (path, disk_reserve, jobs) = (String::new(), 0, agent_node::JobsRunAs::default());
        let labels = Default::default();
        let probe = ProbeConfig {
            state_dir,
            sharing: agent_node::Sharing::Slots(1),
            path,
            disk_reserve,
            engine: nowhere,
            docker,
            jobs,
            helper: || None,
            labels,
        };
        let came = watch::Sender::new(0);
        // It listens before it is asked.
        let lives = engine(tokio::net::UnixListener::bind(&probe.docker).unwrap(), &came);
        let mut lives = Box::pin(lives);
        let look = probe.clone();
        let inventory = tokio::select! {
            inventory = tokio::task::spawn_blocking(move || agent_node::probe(&look)) => inventory.unwrap(),
            () = &mut lives => unreachable!(),
        };
        let found = |inventory: &Inventory| {
            inventory.findings.iter().find(|finding| finding.topic == "docker").unwrap().found.clone()
        };
        let before = found(&inventory);
        let (_keeper, pressure) = watch::channel(Pressure::Ample);
        let (_disk, failing) = watch::channel(Default::default());
        let upkeep = Upkeep::new(probe.clone(), (pressure, failing), inventory);
        let (mut known, asked) = (upkeep.inventory(), *came.borrow());
        let mut running = Box::pin(upkeep.run());
        let mut hears = came.subscribe();
        tokio::select! {
            _ = hears.wait_for(|count| *count > asked) => {}
            () = &mut lives => unreachable!(),
            () = &mut running => unreachable!(),
        }
        drop(lives);
        std::fs::remove_file(&probe.docker).unwrap();
        let noticed = async {
            tokio::select! {
                seen = known.wait_for(|inventory| found(inventory) != before) => seen.is_ok(),
                () = &mut running => false,
            }
        };
        assert!(tokio::time::timeout(PROBE_EVERY / 2, noticed).await.expect("it is noticed"));
    }

    #[test]
    fn test_numbers_alone_are_no_change() {
        let finding = |found: &str, grade| Finding {
            topic: "disk".into(),
            grade,
            found: found.into(),
            means: "room".into(),
            fix: None,
            lacks: None,
        };
        let with = |finding| Inventory { findings: vec![finding], ..Inventory::default() };
        let known = with(finding("7 GiB", Grade::Good));
        assert!(is_same(&known, &renewed(&known, vec![finding("6 GiB", Grade::Good)])));
        assert!(!is_same(&known, &renewed(&known, vec![finding("6 GiB", Grade::Bad)])));
    }
}
