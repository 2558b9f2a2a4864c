//! Which waiting job goes to which node: one pure function.
//!
//! Owns the rule of order and of room. Hides nothing else: no clock, no store, no wire. Invariants, held by
//! property tests: a node never gets more than its slots, GPUs and memory; a job gets all the nodes it asks for,
//! each once, or none; it never goes where its Python is known to be missing; a job never takes room on a node where an earlier waiting job could run; every job left
//! waiting has a [`Wait`] that says why.
//!
//! Called by `queue` whenever room, nodes or the line of waiting jobs changed.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use agent_model::job::Resources;
use agent_model::node::Interpreter;
use agent_model::{EnvSpec, JobId, NodeId, size};

/// A job that may start now.
#[derive(Debug, Clone)]
pub(crate) struct Pending {
    pub(crate) job: JobId,
    pub(crate) wants: Resources,
    /// The interpreter of the machine that it runs on, see [`python_of`].
    pub(crate) python: Option<String>,
    /// Where the attempt before failed; any other node is better.
    pub(crate) avoid: Option<NodeId>,
}

/// The interpreters that nodes say they have. A node that says nothing is not in it: it may have any.
pub(crate) type Pythons<'a> = BTreeMap<&'a NodeId, &'a [Interpreter]>;

/// The name of the interpreter that a node must have for an environment. A path is not judged from afar.
pub(crate) fn python_of(environment: &EnvSpec) -> Option<&str> {
    match environment {
        EnvSpec::Host { python, .. } | EnvSpec::Pip { python, .. } => {
            Some(python.as_str()).filter(|name| !name.contains('/'))
        }
        _ => None,
    }
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
    /// Those it hands out.
    pub(crate) gpus: u32,
    /// Which of its GPUs it does not hand out, and why, for people; empty when there is none.
    pub(crate) unfit: String,
    pub(crate) memory: u64,
    /// It can run one rank of a job beside the ranks on other nodes.
    pub(crate) gangs: bool,
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

    /// What a job that wants GPUs is told of those it cannot get.
    fn without(&self, wants_gpus: bool) -> String {
        match wants_gpus && !self.unfit.is_empty() {
            true => format!(" ({})", self.unfit),
            false => String::new(),
        }
    }

    /// `both slots of box busy: train-a, train-b`
    fn describe(&self, wants_gpus: bool) -> String {
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
                "{} has {free} of {slots} slots, {} of {} GPUs and {} of memory free",
                self.node,
                self.free_gpus(),
                self.gpus,
                size::binary(self.free_memory())
            ),
        };
        let busy = format!("{busy}{}", self.without(wants_gpus));
        if names.is_empty() { busy } else { format!("{busy}: {}{more}", names.join(", ")) }
    }
}

/// Why a job waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wait {
    /// There is no node at all.
    NoNode,
    /// It asks for several nodes at once, and so many could ever run a rank of it.
    Gang { nodes: u32, fit: usize },
    /// No node could ever hold it.
    TooLarge { wants: String, largest: String },
    /// Nodes could hold it, but none has its interpreter.
    NoPython { python: String, have: Arc<str> },
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
            Wait::Gang { nodes, fit: 0 } => {
                write!(f, "it asks for {nodes} nodes at once, and no node runs a part of a job yet")
            }
            Wait::Gang { nodes, fit } => {
                write!(f, "it asks for {nodes} nodes at once, and {fit} could run it")
            }
            Wait::TooLarge { wants, largest } => write!(f, "no node is large enough for {wants}: {largest}"),
            Wait::NoPython { python, have } => write!(f, "no node has a Python called {python}; {have}"),
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
    /// The node of each rank, in their order.
    pub(crate) placed: Vec<(JobId, Vec<NodeId>)>,
    pub(crate) waiting: Vec<(JobId, Wait)>,
}

/// Whether a node could run a job once it has room and takes work.
fn suits(node: &Room, job: &Pending, pythons: &Pythons<'_>) -> bool {
    let has = |name: &String| match pythons.get(&node.node) {
        Some(said) => said.iter().any(|interpreter| interpreter.name == *name),
        None => true,
    };
    let meets = job.wants.nodes == 1 || node.gangs;
    meets && node.could_hold(&job.wants) && job.python.as_ref().is_none_or(has)
}

/// The nodes of each rank of a job, all of them or none.
fn choose(job: &Pending, nodes: &[Room], open: impl Fn(usize) -> bool) -> Option<Vec<usize>> {
    let mut fit: Vec<usize> =
        (0..nodes.len()).filter(|i| open(*i) && nodes[*i].holds_now(&job.wants)).collect();
    let ranks = usize::try_from(job.wants.nodes).ok().filter(|ranks| *ranks <= fit.len())?;
    fit.sort_by_key(|i| {
        (job.avoid.as_ref() == Some(&nodes[*i].node), std::cmp::Reverse(nodes[*i].free_slots()), *i)
    });
    fit.truncate(ranks);
    Some(fit)
}

/// Places `pending`, in their order, on `nodes`.
///
/// A job that must wait for room closes every node it could run on to the jobs behind it, so that a large
/// job is never starved by small ones; nodes it could not use stay open.
pub(crate) fn place(pending: &[Pending], mut nodes: Vec<Room>, pythons: &Pythons<'_>) -> Placements {
    let mut decided = Placements::default();
    let mut promised = vec![false; nodes.len()];
    let mut waiting: Vec<(&Pending, Option<usize>)> = Vec::new();
    let mut ahead = 0;
    for job in pending {
        let wants = &job.wants;
        let usable = |node: &Room| node.closed.is_none() && suits(node, job, pythons);
        if nodes.iter().filter(|node| usable(node)).count() < wants.nodes as usize {
            waiting.push((job, None));
            continue;
        }
        if let Some(chosen) = choose(job, &nodes, |i| usable(&nodes[i]) && !promised[i]) {
            let taken = Taken { job: job.job.clone(), gpus: wants.gpus, memory: wants.memory };
            chosen.iter().for_each(|i| nodes[*i].taken.push(taken.clone()));
            let named = chosen.into_iter().map(|i| nodes[i].node.clone()).collect();
            decided.placed.push((job.job.clone(), named));
        } else {
            for (promised, node) in promised.iter_mut().zip(&nodes) {
                *promised |= usable(node);
            }
            waiting.push((job, Some(ahead)));
            ahead += 1;
        }
    }
    decided.waiting = reasons(&waiting, &nodes, pythons);
    decided
}

/// What decides where a job could run: whether it has several ranks, GPUs, memory and interpreter.
type Need<'a> = (bool, u32, u64, Option<&'a str>);

fn reasons<'a>(
    waiting: &[(&'a Pending, Option<usize>)],
    nodes: &[Room],
    pythons: &Pythons<'_>,
) -> Vec<(JobId, Wait)> {
    // Jobs of one size and interpreter have one text; a long line of them must not cost a text each.
    let mut texts: HashMap<(bool, Need<'_>), Arc<str>> = HashMap::new();
    let mut text = |job: &'a Pending, open: bool| -> Arc<str> {
        let Pending { wants, python, .. } = job;
        let need = (wants.nodes > 1, wants.gpus, wants.memory, python.as_deref());
        Arc::clone(texts.entry((open, need)).or_insert_with(|| {
            let usable = nodes.iter().filter(|node| suits(node, job, pythons));
            let parts: Vec<String> = match open {
                true => {
                    let open = usable.filter(|node| node.closed.is_none());
                    open.map(|node| node.describe(wants.gpus > 0)).take(3).collect()
                }
                false => usable
                    .filter_map(|node| node.closed.as_ref().map(|why| format!("{} {why}", node.node)))
                    .take(3)
                    .collect(),
            };
            parts.join("; ").into()
        }))
    };
    let have: Arc<str> = have(pythons).into();
    waiting
        .iter()
        .map(|&(job, ahead)| {
            let wants = &job.wants;
            let fit = || nodes.iter().filter(|node| suits(node, job, pythons)).count();
            let wait = match (ahead, &job.python) {
                (Some(ahead), _) => Wait::Busy { ahead, busy: text(job, true) },
                _ if nodes.is_empty() => Wait::NoNode,
                _ if fit() >= wants.nodes as usize => Wait::Closed { why: text(job, false) },
                _ if wants.nodes > 1 => Wait::Gang { nodes: wants.nodes, fit: fit() },
                (None, Some(python)) if nodes.iter().any(|node| node.could_hold(wants)) => {
                    Wait::NoPython { python: python.clone(), have: have.clone() }
                }
                _ => too_large(wants, nodes),
            };
            (job.job.clone(), wait)
        })
        .collect()
}

/// `box has python3 (3.11.7), python (3.11.7)`
fn have(pythons: &Pythons<'_>) -> String {
    const NODES: usize = 3;
    let of_node = |(node, said): (&&NodeId, &&[Interpreter])| {
        let names: Vec<_> = said.iter().map(|one| format!("{} ({})", one.name, one.version)).collect();
        format!("{node} has {}", names.join(", "))
    };
    let mut parts: Vec<String> = pythons.iter().take(NODES).map(of_node).collect();
    parts.extend((pythons.len() > NODES).then(|| format!("and {} more nodes", pythons.len() - NODES)));
    parts.join("; ")
}

fn too_large(wants: &Resources, nodes: &[Room]) -> Wait {
    let needs = |gpus: u32, memory: u64| match memory {
        0 => format!("{gpus} GPUs"),
        memory => format!("{gpus} GPUs and {} of memory", size::binary(memory)),
    };
    let largest = nodes.iter().max_by_key(|node| (node.gpus, node.memory)).map(|node| {
        let has = needs(node.gpus, node.memory);
        format!("{} has {} slots, {has}{}", node.node, node.slots, node.without(wants.gpus > 0))
    });
    Wait::TooLarge { wants: needs(wants.gpus, wants.memory), largest: largest.unwrap_or_default() }
}

#[cfg(test)]
mod tests;
