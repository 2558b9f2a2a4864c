//! Looks after the machine: how full its disk is, whether it is still what it said it was, and what control
//! groups were left on it.
//!
//! Owns the inventory, as a watched value that `worker::reconcile` reports whenever it changed. Invariants:
//! what may change from one moment to the next is looked at every [`LOOK_EVERY`], so a node that became unfit
//! stops taking jobs, and one that is fit again takes them, within seconds; the inventory changes only when a
//! judgement does, not with every number in it.
//!
//! It holds nothing that matters, so it may be started again at any time. Started by `crate::roles`.

use std::sync::Arc;
use std::time::Duration;

use agent_model::failpoint;
use agent_model::node::{Finding, Inventory};
use agent_node::ProbeConfig;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use super::ballast::Ballast;
use super::gpus;

/// How often the disk is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How often everything is.
const PROBE_EVERY: Duration = Duration::from_secs(60);

/// The upkeep of a node. Clones look after the same one.
#[derive(Clone)]
pub(crate) struct Upkeep {
    probe: ProbeConfig,
    ballast: Arc<Ballast>,
    inventory: watch::Sender<Inventory>,
}

impl Upkeep {
    /// Of a machine that was just found to be `inventory`.
    pub(crate) fn new(probe: ProbeConfig, ballast: Arc<Ballast>, inventory: Inventory) -> Upkeep {
        Upkeep { probe, ballast, inventory: watch::Sender::new(inventory) }
    }

    /// What the machine is, now and whenever that changed.
    pub(crate) fn inventory(&self) -> watch::Receiver<Inventory> {
        self.inventory.subscribe()
    }

    /// Where others put into the inventory what they know: [`super::environments`].
    pub(crate) fn publisher(&self) -> watch::Sender<Inventory> {
        self.inventory.clone()
    }

    /// Looks again and again.
    pub(crate) async fn run(self) {
        let mut probed = Instant::now();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let whole = probed.elapsed() >= PROBE_EVERY;
            if whole {
                probed = Instant::now();
            }
            let this = self.clone();
            let looked = tokio::task::spawn_blocking(move || this.look(whole)).await;
            if let Err(Ok(panic)) = looked.map_err(tokio::task::JoinError::try_into_panic) {
                std::panic::resume_unwind(panic);
            }
        }
    }

    fn look(&self, whole: bool) {
        if let Err(error) = failpoint::hit("node.upkeep.look") {
            warn!(%error, "the machine was not looked at");
            return;
        }
        self.ballast.balance(agent_node::disk_free(&self.probe.state_dir));
        if whole {
            let swept = agent_runtime::exec::sweep_groups();
            if swept > 0 {
                info!(swept, "removed control groups that nobody would");
            }
        }
        let mut found = match whole {
            true => agent_node::probe(&self.probe),
            false => renewed(&self.inventory.borrow(), agent_node::check(&self.probe)),
        };
        self.inventory.send_if_modified(|known| {
            // Somebody else looks after these.
            found.environments.clone_from(&known.environments);
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

/// An inventory with some findings made anew.
fn renewed(known: &Inventory, findings: Vec<Finding>) -> Inventory {
    let mut inventory = known.clone();
    for finding in findings {
        if let Some(old) = inventory.findings.iter_mut().find(|old| old.topic == finding.topic) {
            *old = finding;
        }
    }
    inventory
}

/// Whether two inventories say the same; what was found in numbers may differ while it means the same.
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
            info!(topic, ?grade, found, means, "the machine changed");
        }
    }
}

#[cfg(test)]
mod tests {
    use agent_model::node::Grade;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn test_disk_that_fills_and_empties_changes_the_inventory_within_seconds() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().to_owned();
        let [engine, docker] = ["/nowhere"; 2].map(std::path::PathBuf::from);
        let probe = ProbeConfig { state_dir, slots: 1, path: String::new(), disk_reserve: 0, engine, docker };
        let inventory = agent_node::probe(&probe);
        let grade = |inventory: &Inventory| {
            inventory.findings.iter().find(|finding| finding.topic == "disk").unwrap().grade
        };
        assert_ne!(grade(&inventory), Grade::Bad);
        let ballast = Arc::new(Ballast::open(dir.path(), 64 << 20));
        let full = Upkeep::new(ProbeConfig { disk_reserve: u64::MAX, ..probe.clone() }, ballast, inventory);
        let mut known = full.inventory();
        let room = Upkeep { probe, ..full.clone() };
        for (upkeep, expected) in [(full, Grade::Bad), (room, Grade::Good)] {
            tokio::select! {
                () = upkeep.run() => {}
                seen = known.changed() => seen.unwrap(),
            }
            let grade = grade(&known.borrow_and_update());
            assert!((grade == Grade::Bad) == (expected == Grade::Bad), "{grade:?}");
        }
        assert_eq!(dir.path().join("ballast").metadata().unwrap().len(), 4 << 20);
    }

    #[test]
    fn test_numbers_alone_are_no_change() {
        let finding = |found: &str, grade| Finding {
            topic: "disk".into(),
            grade,
            found: found.into(),
            means: "room".into(),
            fix: None,
        };
        let with = |finding| Inventory { findings: vec![finding], ..Inventory::default() };
        let known = with(finding("7 GiB", Grade::Good));
        assert!(is_same(&known, &renewed(&known, vec![finding("6 GiB", Grade::Good)])));
        assert!(!is_same(&known, &renewed(&known, vec![finding("6 GiB", Grade::Bad)])));
    }
}
