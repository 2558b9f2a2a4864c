//! Which waiting job goes to which node: one pure function.
//!
//! Owns the rule of order and of room. Hides nothing else: no clock, no store, no wire. Invariants, held by
//! property tests: a node never gets more than its slots, GPUs and memory; a job never takes room on a node
//! where an earlier waiting job could run; every job left waiting has a [`Wait`] that says why.
//!
//! Called by `queue` whenever room, nodes or the line of waiting jobs changed.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use agent_model::job::Resources;
use agent_model::{JobId, NodeId};

/// A job that may start now.
#[derive(Debug, Clone)]
pub(crate) struct Pending {
    pub(crate) job: JobId,
    pub(crate) wants: Resources,
    /// Where the attempt before failed; any other node is better.
    pub(crate) avoid: Option<NodeId>,
}

/// What one job takes on a node.
#[derive(Debug, Clone)]
pub(crate) struct Taken {
    pub(crate) job: JobId,
    pub(crate) gpus: u32,
    pub(crate) memory: u64,
}

/// A node, its size, and what takes room on it.
#[derive(Debug, Clone)]
pub(crate) struct Room {
    pub(crate) node: NodeId,
    /// Why it takes no work at all now, for people: `does not answer`.
    pub(crate) closed: Option<Cow<'static, str>>,
    pub(crate) slots: u32,
    pub(crate) gpus: u32,
    pub(crate) memory: u64,
    pub(crate) taken: Vec<Taken>,
}

impl Room {
    fn could_hold(&self, wants: &Resources) -> bool {
        self.slots > 0 && wants.gpus <= self.gpus && wants.memory <= self.memory
    }

    fn free_slots(&self) -> u32 {
        self.slots.saturating_sub(u32::try_from(self.taken.len()).unwrap_or(u32::MAX))
    }

    fn free_gpus(&self) -> u32 {
        self.gpus.saturating_sub(self.taken.iter().map(|taken| taken.gpus).sum())
    }

    fn free_memory(&self) -> u64 {
        self.memory.saturating_sub(self.taken.iter().map(|taken| taken.memory).sum())
    }

    fn holds_now(&self, wants: &Resources) -> bool {
        self.free_slots() > 0 && wants.gpus <= self.free_gpus() && wants.memory <= self.free_memory()
    }

    /// `both slots of box busy: train-a, train-b`
    fn describe(&self) -> String {
        const SHOWN: usize = 4;
        let names: Vec<&str> = self.taken.iter().take(SHOWN).map(|taken| taken.job.as_str()).collect();
        let more = match self.taken.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let busy = match (self.free_slots(), self.slots) {
            (0, 1) => format!("the slot of {} busy", self.node),
            (0, 2) => format!("both slots of {} busy", self.node),
            (0, slots) => format!("all {slots} slots of {} busy", self.node),
            (free, slots) => format!(
                "{} has {free} of {slots} slots, {} of {} GPUs and {} MiB of memory free",
                self.node,
                self.free_gpus(),
                self.gpus,
                self.free_memory() >> 20
            ),
        };
        if names.is_empty() { busy } else { format!("{busy}: {}{more}", names.join(", ")) }
    }
}

/// Why a job waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wait {
    /// There is no node at all.
    NoNode,
    /// It asks for several nodes at once.
    Gang { nodes: u32 },
    /// No node could ever hold it.
    TooLarge { wants: String, largest: String },
    /// Nodes could hold it, but none takes work now.
    Closed { why: Arc<str> },
    /// The room it needs is taken, or promised to jobs before it.
    Busy { ahead: usize, busy: Arc<str> },
    /// Its next attempt has a date.
    Date,
    /// After a loss of records, these nodes must first say what they run.
    Unheard { nodes: Arc<str> },
}

impl Wait {
    /// It waits for something else than `other` does; a mere change of numbers is no change of kind.
    pub(crate) fn differs_in_kind(&self, other: &Wait) -> bool {
        std::mem::discriminant(self) != std::mem::discriminant(other)
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wait::NoNode => f.write_str("no node has joined yet"),
            Wait::Gang { nodes } => {
                write!(f, "it asks for {nodes} nodes at once; this version runs a job on one node")
            }
            Wait::TooLarge { wants, largest } => write!(f, "no node is large enough for {wants}: {largest}"),
            Wait::Closed { why } => write!(f, "no node takes work now: {why}"),
            Wait::Busy { ahead: 0, busy } => write!(f, "next in line, {busy}"),
            Wait::Busy { ahead: 1, busy } => write!(f, "1 job ahead, {busy}"),
            Wait::Busy { ahead, busy } => write!(f, "{ahead} jobs ahead, {busy}"),
            Wait::Unheard { nodes } => write!(
                f,
                "the controller's database was mended: {nodes} must first say what runs there, or be declared \
                 lost (`agentctl node lost NODE`)"
            ),
            Wait::Date => f.write_str("waits for the date of its next attempt"),
        }
    }
}

/// What [`place`] decided.
#[derive(Debug, Default)]
pub(crate) struct Placements {
    pub(crate) placed: Vec<(JobId, NodeId)>,
    pub(crate) waiting: Vec<(JobId, Wait)>,
}

/// Places `pending`, in their order, on `nodes`.
///
/// A job that must wait for room closes every node it could run on to the jobs behind it, so that a large
/// job is never starved by small ones; nodes it could not use stay open.
pub(crate) fn place(pending: &[Pending], mut nodes: Vec<Room>) -> Placements {
    let mut decided = Placements::default();
    let mut promised = vec![false; nodes.len()];
    let mut waiting: Vec<(&Pending, Option<usize>)> = Vec::new();
    let mut ahead = 0;
    for job in pending {
        let wants = &job.wants;
        let usable = |node: &Room| node.closed.is_none() && node.could_hold(wants);
        if wants.nodes > 1 || !nodes.iter().any(usable) {
            waiting.push((job, None));
            continue;
        }
        let best = nodes
            .iter()
            .enumerate()
            .filter(|(i, node)| usable(node) && !promised[*i] && node.holds_now(wants))
            .max_by_key(|(i, node)| {
                (job.avoid.as_ref() != Some(&node.node), node.free_slots(), std::cmp::Reverse(*i))
            })
            .map(|(i, _)| i);
        if let Some(i) = best {
            nodes[i].taken.push(Taken { job: job.job.clone(), gpus: wants.gpus, memory: wants.memory });
            decided.placed.push((job.job.clone(), nodes[i].node.clone()));
        } else {
            for (promised, node) in promised.iter_mut().zip(&nodes) {
                *promised |= usable(node);
            }
            waiting.push((job, Some(ahead)));
            ahead += 1;
        }
    }
    decided.waiting = reasons(&waiting, &nodes);
    decided
}

fn reasons(waiting: &[(&Pending, Option<usize>)], nodes: &[Room]) -> Vec<(JobId, Wait)> {
    // Jobs of one size have one text; a long line of them must not cost a text each.
    let mut texts: HashMap<(bool, u32, u64), Arc<str>> = HashMap::new();
    let mut text = |wants: &Resources, open: bool| -> Arc<str> {
        let key = (open, wants.gpus, wants.memory);
        Arc::clone(texts.entry(key).or_insert_with(|| {
            let usable = nodes.iter().filter(|node| node.could_hold(wants));
            let parts: Vec<String> = match open {
                true => usable.filter(|node| node.closed.is_none()).map(Room::describe).take(3).collect(),
                false => usable
                    .filter_map(|node| node.closed.as_ref().map(|why| format!("{} {why}", node.node)))
                    .take(3)
                    .collect(),
            };
            parts.join("; ").into()
        }))
    };
    waiting
        .iter()
        .map(|(job, ahead)| {
            let wants = &job.wants;
            let wait = match ahead {
                Some(ahead) => Wait::Busy { ahead: *ahead, busy: text(wants, true) },
                None if wants.nodes > 1 => Wait::Gang { nodes: wants.nodes },
                None if nodes.is_empty() => Wait::NoNode,
                None if nodes.iter().any(|node| node.could_hold(wants)) => {
                    Wait::Closed { why: text(wants, false) }
                }
                None => too_large(wants, nodes),
            };
            (job.job.clone(), wait)
        })
        .collect()
}

fn too_large(wants: &Resources, nodes: &[Room]) -> Wait {
    let size = |gpus: u32, memory: u64| match memory {
        0 => format!("{gpus} GPUs"),
        memory => format!("{gpus} GPUs and {} MiB of memory", memory >> 20),
    };
    let largest = nodes
        .iter()
        .max_by_key(|node| (node.gpus, node.memory))
        .map(|node| format!("{} has {} slots, {}", node.node, node.slots, size(node.gpus, node.memory)));
    Wait::TooLarge { wants: size(wants.gpus, wants.memory), largest: largest.unwrap_or_default() }
}

#[cfg(test)]
mod tests;
