//! The machines that pools may be expected to get, as the scheduler sees them and as people read of them.

use std::collections::BTreeMap;

use agent_model::NodeId;
use agent_model::job::POOL;
use agent_model::node::Slots;

use super::{EXPECTED, Keeper};
use crate::pools::plan::Failing;
use crate::scheduler::{Presence, Prospect, Room, Size};
use crate::store::{MachineRecord, MachineStep, PoolRecord};

impl Keeper {
    /// The machines that a pool may be expected to get: those that are coming, then those that could be made.
    pub(super) fn prospects(&self, pool: &PoolRecord) -> Vec<Prospect> {
        let like = self.expected(pool);
        let prospect = |room| Prospect {
            room,
            interpreters: pool.seen.as_ref().map(|seen| seen.interpreters.clone()).unwrap_or_default(),
        };
        let mut prospects: Vec<Prospect> = self
            .machines_of(&pool.name)
            .filter(|machine| matches!(machine.step, MachineStep::Asked | MachineStep::Created))
            .filter(|machine| !self.nodes.contains_key(&machine.name))
            .map(|machine| {
                let closed = Some(self.coming(pool, machine).into());
                prospect(Room {
                    node: machine.name.clone(),
                    presence: Presence::Coming,
                    closed,
                    ..like.clone()
                })
            })
            .collect();
        let free = (pool.max as usize).saturating_sub(self.machines_of(&pool.name).count());
        let possible = if pool.deleting { 0 } else { free.min(EXPECTED) };
        prospects.extend(std::iter::repeat_n(prospect(like), possible));
        prospects
    }

    /// A machine that the pool could get.
    fn expected(&self, pool: &PoolRecord) -> Room {
        let shape = self.provider(&pool.name).map(|provider| provider.config().node).unwrap_or_default();
        let seen = pool.seen.as_deref();
        let size = match seen {
            Some(seen) => Size { gpus: seen.gpus, cpus: seen.cpus, memory: seen.memory },
            None => Size {
                gpus: shape.gpus.unwrap_or(0),
                cpus: shape.cpus.unwrap_or(u32::MAX),
                memory: shape.memory.unwrap_or(u64::MAX),
            },
        };
        let mut labels = seen.map(|seen| seen.labels.clone()).unwrap_or_default();
        labels.extend(labels_of(pool));
        let failing = self.known_pools.get(&pool.name).and_then(|known| known.failing.as_ref());
        let closed =
            failing.map_or_else(|| "makes another machine".to_owned(), |failing| cannot(pool, failing));
        let (slots, job_cpus) = match (seen, shape.slots) {
            (Some(seen), _) => (seen.slots, seen.job_cpus),
            (None, Some(Slots::Number(slots))) => (slots, 0),
            (None, Some(Slots::Auto)) => (size.cpus, 1),
            (None, None) => (1, 0),
        };
        Room {
            node: NodeId::from(&pool.name),
            presence: Presence::Possible,
            closed: Some(closed.into()),
            slots,
            size,
            job_cpus,
            unfit: String::new(),
            labels,
            gangs: seen.is_none_or(|seen| seen.gangs),
            lacking: Vec::new(),
            kept: Default::default(),
            taken: Vec::new(),
            barred: Default::default(),
        }
    }

    /// How far a machine is that has not joined, as text for users after its name.
    pub(super) fn coming(&self, pool: &PoolRecord, machine: &MachineRecord) -> String {
        let failing = self.known_pools.get(&pool.name).and_then(|known| known.failing.as_ref());
        match (machine.step, failing) {
            (MachineStep::Asked, Some(failing)) => cannot(pool, failing),
            (MachineStep::Asked, None) => format!("is being made by {}", pool.provider),
            _ => {
                let until = machine.since + self.join_within(&pool.name);
                format!("is starting; it has until {} to join", until.utc())
            }
        }
    }
}

/// Why there is no machine yet, as text for users after its name.
fn cannot(pool: &PoolRecord, failing: &Failing) -> String {
    format!(
        "cannot be made by {}: {}; it is tried again at {}",
        pool.provider,
        failing.what,
        failing.again.utc()
    )
}

pub(super) fn labels_of(pool: &PoolRecord) -> BTreeMap<String, String> {
    let mut labels = pool.labels.clone();
    labels.insert(POOL.to_owned(), pool.name.to_string());
    labels
}
