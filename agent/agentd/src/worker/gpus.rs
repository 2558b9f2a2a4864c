//! Knows the GPUs of this machine, gives them to jobs, and checks that they are empty afterwards.
//!
//! ```text
//! helper ──▶ look ──▶ ledger ──▶ inventory ──▶ worker::reconcile
//!                        ▲
//!           take, give_back: worker::runner
//! ```
//!
//! Owns the only view of the GPUs, and the task that updates it ([`Gpus::run`]). Hides the helper process, the rules
//! of quarantine, and the owners of stray processes.
//!
//! Invariants: a GPU belongs to one job at a time, from before its runner journals that until, after the job's end,
//! it was found empty or quarantined; nothing here waits longer than [`TAKE_WITHIN`] or [`PROVE_WITHIN`] for a driver
//! that does not answer, and only jobs with GPUs wait at all; a requested look is always begun after the request.
//!
//! The task has no state that matters, so it can be restarted at any time. Started by `crate::roles`; called by
//! `worker::runner`.

mod assign;
mod ledger;
mod look;
mod measured;
mod nodes;
mod owner;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use agent_model::ReplicaId;
use agent_model::gpu::Look;
use agent_model::node::{Finding, Gpu, Inventory};
use agent_model::system::SystemSample;
use agent_shim::DeviceNode;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

pub(crate) use assign::Wait;
use ledger::Ledger;
pub(crate) use look::Looker;
pub(crate) use measured::GpuNumbers;
use measured::IdleTimes;

/// The interval between looks while there are GPUs, and while there are none.
const LOOK_EVERY: Duration = Duration::from_secs(10);
const LOOK_FOR_SOME_EVERY: Duration = Duration::from_secs(60);
/// How long a job waits for a look before it gets [`Wait::unseen`].
const TAKE_WITHIN: Duration = Duration::from_secs(30);
/// How long the outcome of a job may wait for the check that its GPUs are empty.
const PROVE_WITHIN: Duration = Duration::from_secs(30);
/// How often that is tried.
const PROVE_EVERY: Duration = Duration::from_millis(500);

/// The GPUs of this machine. Clones share them.
#[derive(Clone)]
pub(crate) struct Gpus(Arc<Shared>);

struct Shared {
    looker: Looker,
    ledger: Mutex<Ledger>,
    /// The number of the last requested look, and of the last finished one.
    asked: watch::Sender<u64>,
    made: watch::Sender<u64>,
    /// Changes whenever the published state of the GPUs does.
    changed: watch::Sender<u64>,
    inventory: watch::Sender<Inventory>,
    idle: Mutex<IdleTimes>,
    /// Whether there are GPUs; `None` while that is unknown.
    there: watch::Sender<Option<bool>>,
}

impl Gpus {
    /// Without a look yet; `held` are those of jobs of an earlier process of the daemon. Sends to `there` whether
    /// there are any, once that is known.
    pub(crate) fn new(
        looker: Looker,
        inventory: watch::Sender<Inventory>,
        there: watch::Sender<Option<bool>>,
        held: impl IntoIterator<Item = (ReplicaId, Vec<String>)>,
    ) -> Gpus {
        let counter = || watch::Sender::new(0);
        let mut ledger = Ledger::new(held);
        // One's own daemon has nobody to keep out; a helper's supervisors have the right to it.
        let is_root = agent_spawn::serves_others() && !agent_spawn::has_helper();
        ledger.leave_open(is_root && !agent_shim::cgroup::can_deny());
        let ledger = Mutex::new(ledger);
        let (asked, made, changed) = (counter(), counter(), counter());
        let idle = Mutex::default();
        Gpus(Arc::new(Shared { looker, ledger, asked, made, changed, inventory, idle, there }))
    }

    /// Runs forever: looks at intervals and on request.
    pub(crate) async fn run(self) {
        let mut asked = self.0.asked.subscribe();
        loop {
            let number = *asked.borrow_and_update();
            let look = self.0.looker.look().await;
            self.absorb(look, number).await;
            let every = if self.ledger().is_in_use() { LOOK_EVERY } else { LOOK_FOR_SOME_EVERY };
            let _ = tokio::time::timeout(every, asked.changed()).await;
        }
    }

    async fn absorb(&self, look: Look, number: u64) {
        let strangers = self.ledger().strangers(&look);
        let owners = owner::owners(strangers).await;
        let mut ledger = self.ledger();
        ledger.absorb(&look, number, owners);
        self.0.idle.lock().absorb(&look, &ledger.gpus(), Instant::now());
        let there = ledger.are_there();
        self.0.there.send_if_modified(|known| std::mem::replace(known, there) != there);
        self.publish(&ledger);
        drop(ledger);
        self.0.made.send_replace(number);
    }

    /// Waits for a look that is begun after this was called.
    async fn look_anew(&self) {
        self.0.asked.send_modify(|asked| *asked += 1);
        let number = *self.0.asked.borrow();
        // The sender lives as long as this does.
        let _ = self.0.made.subscribe().wait_for(|made| *made >= number).await;
    }

    /// Gives a replica `wanted` GPUs that are empty now, or returns what it waits for.
    pub(crate) async fn take(&self, replica: &ReplicaId, wanted: u32) -> Result<Vec<String>, Wait> {
        if tokio::time::timeout(TAKE_WITHIN, self.look_anew()).await.is_err() {
            return Err(Wait::unseen(wanted));
        }
        let mut ledger = self.ledger();
        let given = ledger.assign(replica, wanted);
        self.publish(&ledger);
        given
    }

    /// Takes back the GPUs of a replica whose job has ended, when they are empty or the time for that is over. One
    /// that is not empty is quarantined until it is. Returns what was wrong with them, one line each.
    pub(crate) async fn give_back(&self, replica: &ReplicaId) -> Vec<String> {
        if self.ledger().held_by(replica).is_empty() {
            return Vec::new();
        }
        self.ledger().ends(replica);
        let deadline = Instant::now() + PROVE_WITHIN;
        let mut seen = false;
        while tokio::time::timeout_at(deadline, self.look_anew()).await.is_ok() {
            seen = true;
            if !self.ledger().may_clear(replica) || Instant::now() + PROVE_EVERY >= deadline {
                break;
            }
            tokio::time::sleep(PROVE_EVERY).await;
        }
        let next = (!seen).then(|| {
            self.0.asked.send_modify(|asked| *asked += 1);
            *self.0.asked.borrow()
        });
        let mut ledger = self.ledger();
        let trouble = ledger.trouble(replica);
        ledger.release(replica, next);
        self.publish(&ledger);
        trouble
    }

    /// The device nodes of GPUs that a job does not have; none if it is not known which are its own. Blocks briefly.
    pub(crate) fn nodes_of_others(&self, own: &[String]) -> Vec<DeviceNode> {
        let Some(minors) = self.ledger().minors(own) else {
            warn!(
                gpus = own.join(","),
                "the GPUs of others stay within reach of a job: its own do not tell their nodes"
            );
            return Vec::new();
        };
        nodes::of_others(Path::new(nodes::PLACE), &minors).unwrap_or_else(|error| {
            warn!(%error, "the GPUs of others stay within reach of a job");
            Vec::new()
        })
    }

    /// What is wrong with the GPUs of a replica now, one line each, for users.
    pub(crate) fn trouble(&self, replica: &ReplicaId) -> Vec<String> {
        self.ledger().trouble(replica)
    }

    /// What the latest look, which is of the last 10 s, shows of these GPUs, numbered in this order.
    pub(crate) fn sample(&self, gpus: &[String]) -> SystemSample {
        measured::sample(self.ledger().look(), gpus)
    }

    /// All GPUs of this machine, in numbers.
    pub(crate) fn numbers(&self) -> Vec<GpuNumbers> {
        let ledger = self.ledger();
        self.0.idle.lock().numbers(ledger.look(), &ledger.gpus())
    }

    /// Whether this machine has GPUs; `None` while that is unknown.
    pub(crate) fn are_there(&self) -> Option<bool> {
        *self.0.there.borrow()
    }

    /// A receiver that changes whenever the published state of the GPUs does.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // A panic in there leaves it consistent: each change is made in one step.
        self.0.ledger.lock()
    }

    /// Updates the inventory, and wakes waiting jobs, if anything changed.
    fn publish(&self, ledger: &Ledger) {
        let (gpus, (driver, cuda), finding) = (ledger.gpus(), ledger.versions(), ledger.finding());
        let changed = self.0.inventory.send_if_modified(|known| {
            let place = known.findings.iter().position(|finding| finding.topic == ledger::TOPIC);
            let told =
                place.and_then(|place| known.findings.get(place)) == finding.as_ref() || finding.is_none();
            if known.gpus == gpus && known.gpu_driver == driver && known.cuda == cuda && told {
                return false;
            }
            tell(&known.gpus, &gpus);
            (known.gpus, known.gpu_driver, known.cuda) = (gpus, driver, cuda);
            match (place, finding) {
                (Some(place), Some(finding)) => known.findings[place] = finding,
                (None, Some(finding)) => known.findings.push(finding),
                (_, None) => {}
            }
            true
        });
        if changed {
            self.0.changed.send_modify(|changed| *changed += 1);
        }
    }
}

/// Copies what is `known` of the GPUs into a new inventory: the probe of the machine knows less about them.
pub(crate) fn keep_known(known: &Inventory, found: &mut Inventory) {
    found.gpus.clone_from(&known.gpus);
    found.gpu_driver.clone_from(&known.gpu_driver);
    found.cuda.clone_from(&known.cuda);
    let topic = |finding: &&Finding| finding.topic == ledger::TOPIC;
    if let Some(told) = known.findings.iter().find(topic) {
        for finding in found.findings.iter_mut().filter(|finding| finding.topic == ledger::TOPIC) {
            finding.clone_from(told);
        }
    }
}

/// Logs which GPUs are no longer handed out, and which are again.
fn tell(known: &[Gpu], found: &[Gpu]) {
    for gpu in found {
        let before = known.iter().find(|before| before.uuid == gpu.uuid);
        match (before, &gpu.unfit) {
            (Some(before), unfit) if before.unfit == *unfit => {}
            (_, Some(unfit)) => warn!(gpu = gpu.index, uuid = gpu.uuid, unfit, "a GPU is not handed out"),
            (_, None) => info!(gpu = gpu.index, uuid = gpu.uuid, name = gpu.name, "a GPU can be handed out"),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
