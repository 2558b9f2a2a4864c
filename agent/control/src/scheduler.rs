//! Which waiting job is placed on which nodes: one pure function.
//!
//! Owns the rules of order and of room. It uses no clock, no store and no wire. Jobs of higher priority come first;
//! among equals those of the user who uses least of the nodes now, and of one user in the order of submission. What one
//! user may have at a time can be limited ([`limits`]). A job that must wait for room gets a reservation of nodes
//! ([`reserve`]), and later jobs may use them meanwhile only if that cannot delay it (backfill): so nodes do not idle
//! for a large job, and small jobs never starve it. Of the nodes with room those come first that have the job's
//! environment, then those with more free slots, then those that have its snapshots ([`locality`]).
//!
//! On a node with `slots: auto` a job that names no processors counts for some all the same ([`Room::counts`]).
//!
//! Invariants, held by property tests: a node never gets more than its slots and [`Size`], and a user never more than
//! the limits; a job gets all the nodes
//! it asks for, each once, or none; it is never placed where its Python, or the engine that makes its environment, is known to be
//! missing, or where a label has another value; no placed job delays another one beyond its promised start; every job left waiting has a [`Wait`]
//! with the reason.

mod limits;
mod locality;
mod reserve;
mod wait;

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use agent_model::job::{INSTANCE_TYPE, Priority, Resources};
use agent_model::node::{Capability, Interpreter, Inventory};
use agent_model::{EnvSpec, JobId, NodeId};

use limits::Ledger;
pub use limits::UserLimits;
pub(crate) use locality::{JobNeeds, NodeCache};
use reserve::Promises;
pub(crate) use wait::{Wait, blocked};
use wait::{Waiting, reasons};

/// A job that may start now.
#[derive(Debug, Clone)]
pub(crate) struct Pending {
    pub(crate) job: JobId,
    pub(crate) wants: Resources,
    /// What it needs that nodes may have already.
    pub(crate) needs: JobNeeds,
    pub(crate) priority: Priority,
    /// The user who submitted it, if known.
    pub(crate) owner: Option<String>,
    /// The longest time it takes its place; `None` when it has no limit.
    pub(crate) longest: Option<Duration>,
    /// The interpreter of the machine that it runs on, see [`python_of`].
    pub(crate) python: Option<String>,
    /// What else a machine must have for its environment.
    pub(crate) requires: Vec<Capability>,
    /// Where the attempt before failed; any other node is better.
    pub(crate) avoid: Option<NodeId>,
}

/// The interpreters that nodes report. A node that reports none is not in it: it may have any.
pub(crate) type Pythons<'a> = BTreeMap<&'a NodeId, &'a [Interpreter]>;

/// The name of the interpreter that a node must have for an environment. A path is not checked here.
pub(crate) fn python_of(environment: &EnvSpec) -> Option<&str> {
    match environment {
        EnvSpec::Host { python, .. } | EnvSpec::Pip { python, .. } => {
            Some(python.as_str()).filter(|name| !name.contains('/'))
        }
        _ => None,
    }
}

/// The counted resources: those of a node that jobs can be given, or those that a job asks for beside a slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Size {
    pub(crate) gpus: u32,
    pub(crate) cpus: u32,
    /// In bytes.
    pub(crate) memory: u64,
}

impl Size {
    pub(crate) fn of(wants: &Resources) -> Size {
        Size { gpus: wants.gpus, cpus: wants.cpus, memory: wants.memory }
    }

    /// What a node can give jobs.
    pub(crate) fn given_by(inventory: &Inventory) -> Size {
        let gpus = inventory.gpus.iter().filter(|gpu| gpu.counts()).count();
        Size {
            gpus: u32::try_from(gpus).unwrap_or(u32::MAX),
            cpus: inventory.cpus.saturating_sub(inventory.reserved_cpus),
            memory: inventory.memory.saturating_sub(inventory.reserved_memory),
        }
    }

    /// What a job that asks for this counts for on a node that can give `all`: what it does not name is `job_cpus`
    /// processors, and of the memory the same part as of the processors. With 0 it counts for what it names alone.
    pub(crate) fn counted(self, all: Size, job_cpus: u32) -> Size {
        if job_cpus == 0 {
            return self;
        }
        let cpus = if self.cpus == 0 { job_cpus } else { self.cpus };
        let share = all.memory / u64::from(all.cpus.max(1));
        let memory =
            if self.memory == 0 { share.saturating_mul(cpus.min(all.cpus).into()) } else { self.memory };
        Size { cpus, memory, ..self }
    }

    fn and(self, other: Size) -> Size {
        Size {
            gpus: self.gpus.saturating_add(other.gpus),
            cpus: self.cpus.saturating_add(other.cpus),
            memory: self.memory.saturating_add(other.memory),
        }
    }

    fn without(self, other: Size) -> Size {
        Size {
            gpus: self.gpus.saturating_sub(other.gpus),
            cpus: self.cpus.saturating_sub(other.cpus),
            memory: self.memory.saturating_sub(other.memory),
        }
    }

    fn fits_into(self, room: Size) -> bool {
        self.gpus <= room.gpus && self.cpus <= room.cpus && self.memory <= room.memory
    }
}

/// What jobs that ask for this count for on a node, in processors and bytes of memory.
pub fn used_by<'a>(inventory: &Inventory, asked: impl Iterator<Item = &'a Resources>) -> (u32, u64) {
    let (all, job_cpus) = (Size::given_by(inventory), inventory.job_cpus);
    let Size { cpus, memory, .. } = asked.map(|asked| Size::of(asked).counted(all, job_cpus)).sum();
    (cpus, memory)
}

impl std::iter::Sum for Size {
    fn sum<I: Iterator<Item = Size>>(sizes: I) -> Size {
        sizes.fold(Size::default(), Size::and)
    }
}

/// A machine that is made, or could be: a room that is closed until it has joined.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Prospect {
    pub(crate) room: Room,
    /// Those that it is expected to have; none if that is not known.
    pub(crate) interpreters: Vec<Interpreter>,
}

/// What one job takes on a node.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Taken {
    pub(crate) job: JobId,
    pub(crate) owner: Option<String>,
    /// What it asked for.
    pub(crate) size: Size,
    /// The longest time from now until it ends; `None` when unknown.
    pub(crate) ends: Option<Duration>,
}

impl Taken {
    fn of(job: &Pending) -> Taken {
        Taken {
            job: job.job.clone(),
            owner: job.owner.clone(),
            size: Size::of(&job.wants),
            ends: job.longest,
        }
    }

    /// Its weight in the share of its owner.
    fn weight(gpus: u32) -> u64 {
        1 + u64::from(gpus)
    }
}

/// Whether a machine is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Presence {
    /// It has joined.
    There,
    /// It is being made.
    Coming,
    /// It could be made. Its name is that of its pool.
    Possible,
}

/// A node, its size, and what takes room on it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Room {
    pub(crate) node: NodeId,
    pub(crate) presence: Presence,
    /// Why it takes no work at all now, as text for users: `does not answer`.
    pub(crate) closed: Option<Cow<'static, str>>,
    pub(crate) slots: u32,
    /// What it can give jobs; of its GPUs only those that it hands out.
    pub(crate) size: Size,
    /// See [`Inventory::job_cpus`].
    pub(crate) job_cpus: u32,
    /// Which of its GPUs it does not hand out, and why, as text for users; empty when there is none.
    pub(crate) unfit: String,
    /// Set by its operators.
    pub(crate) labels: BTreeMap<String, String>,
    /// It can run one rank of a job beside the ranks on other nodes.
    pub(crate) gangs: bool,
    /// What some jobs need and it has not, with what was found instead.
    pub(crate) lacking: Vec<(Capability, String)>,
    /// What it has of what jobs need.
    pub(crate) kept: Arc<NodeCache>,
    pub(crate) taken: Vec<Taken>,
    /// Jobs of these names are not placed here, because something of the name is here already.
    pub(crate) barred: BTreeSet<JobId>,
}

impl Room {
    fn could_hold(&self, wants: &Resources) -> bool {
        self.slots > 0 && self.counts(Size::of(wants)).fits_into(self.size)
    }

    /// What a job counts for here that asks for `asked`.
    fn counts(&self, asked: Size) -> Size {
        asked.counted(self.size, self.job_cpus)
    }

    /// The label that a job asks for and this node does not have; case is ignored. A node without an instance type
    /// matches any: job files from a cloud name one, and a box has none.
    fn lacks<'a>(&self, wants: &'a Resources) -> Option<(&'a String, &'a String)> {
        let has = |key: &str, value: &str| match self.labels.get(key) {
            Some(label) => label.eq_ignore_ascii_case(value),
            None => key == INSTANCE_TYPE,
        };
        wants.labels.iter().find(|(key, value)| !has(key, value))
    }

    /// The first of these that it lacks.
    fn lacks_any(&self, requires: &[Capability]) -> Option<&(Capability, String)> {
        self.lacking.iter().find(|(what, _)| requires.contains(what))
    }

    pub(crate) fn free_slots(&self) -> u32 {
        self.slots.saturating_sub(u32::try_from(self.taken.len()).unwrap_or(u32::MAX))
    }

    fn free(&self) -> Size {
        self.size.without(self.taken.iter().map(|taken| self.counts(taken.size)).sum())
    }

    fn holds_now(&self, wants: &Resources) -> bool {
        self.free_slots() > 0 && self.counts(Size::of(wants)).fits_into(self.free())
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
    suits_but_for_engines(node, job, pythons) && node.lacks_any(&job.requires).is_none()
}

/// The same for a node that may lack what makes the job's environment.
fn suits_but_for_engines(node: &Room, job: &Pending, pythons: &Pythons<'_>) -> bool {
    let has = |name: &String| match pythons.get(&node.node) {
        Some(said) => said.iter().any(|interpreter| interpreter.name == *name),
        None => true,
    };
    let meets = job.wants.nodes == 1 || node.gangs;
    meets
        && node.could_hold(&job.wants)
        && node.lacks(&job.wants).is_none()
        && job.python.as_ref().is_none_or(has)
}

/// The nodes of each rank of a job, all of them or none.
fn choose(job: &Pending, nodes: &[Room], open: impl Fn(usize) -> bool) -> Option<Vec<usize>> {
    let mut fit: Vec<usize> =
        (0..nodes.len()).filter(|i| nodes[*i].holds_now(&job.wants) && open(*i)).collect();
    let ranks = usize::try_from(job.wants.nodes).ok().filter(|ranks| *ranks <= fit.len())?;
    fit.sort_by_cached_key(|i| {
        let node = &nodes[*i];
        // To build an environment takes longer than sharing a node; to fetch code does not.
        let unbuilt = node.kept.lacks_environment(&job.needs);
        let unfetched = node.kept.lacks_snapshots(&job.needs);
        let avoided = job.avoid.as_ref() == Some(&node.node);
        (node.presence, avoided, unbuilt, Reverse(node.free_slots()), unfetched, *i)
    });
    fit.truncate(ranks);
    Some(fit)
}

/// Everything that decides where a job may be placed. Rooms only shrink while jobs are placed: if one job found none,
/// no other job with the same need does.
type Need<'a> =
    (u32, Size, &'a BTreeMap<String, String>, (Option<&'a str>, &'a [Capability]), Option<Duration>);

fn need(job: &Pending) -> Need<'_> {
    let environment = (job.python.as_deref(), job.requires.as_slice());
    (job.wants.nodes, Size::of(&job.wants), &job.wants.labels, environment, job.longest)
}

/// Places `pending` on `nodes`; jobs of one owner and priority are in the order of their submission.
pub(crate) fn place(
    pending: &[Pending],
    mut nodes: Vec<Room>,
    pythons: &Pythons<'_>,
    limits: UserLimits,
) -> Placements {
    let mut decided = Placements::default();
    let mut ledger = Ledger::new(limits, pending, &nodes);
    let mut promises = Promises::new(nodes.len());
    let mut full: HashSet<Need<'_>> = HashSet::new();
    let mut waiting = Vec::new();
    let mut ahead = 0;
    for job in Turns::new(pending, &nodes) {
        let usable = |node: &Room| node.closed.is_none() && suits(node, job, pythons);
        let mut wait = |within: Option<Duration>| {
            waiting.push(Waiting { job, ahead: Some(ahead), within });
            ahead += 1;
        };
        let no_room = full.contains(&need(job)) && promises.are_given();
        let candidates: Vec<usize> = (0..nodes.len()).filter(|i| !no_room && usable(&nodes[*i])).collect();
        if !no_room && candidates.len() < job.wants.nodes as usize {
            waiting.push(Waiting { job, ahead: None, within: None });
        } else if let Some(excess) = ledger.excess(job) {
            decided.waiting.push((job.job.clone(), excess.into()));
        } else if no_room {
            wait(None);
        } else if let Some(chosen) = choose(job, &nodes, |i| {
            let free = candidates.binary_search(&i).is_ok() && !nodes[i].barred.contains(&job.job);
            free && promises.leave_room(i, &nodes[i], job)
        }) {
            chosen.iter().for_each(|i| nodes[*i].taken.push(Taken::of(job)));
            ledger.count(job);
            let named = chosen.into_iter().map(|i| nodes[i].node.clone()).collect();
            decided.placed.push((job.job.clone(), named));
        } else {
            if nodes.iter().all(|node| !node.barred.contains(&job.job)) {
                full.insert(need(job));
            }
            wait(promises.give(job, &candidates, &nodes));
        }
    }
    decided.waiting.extend(reasons(&waiting, &nodes, pythons));
    decided
}

/// The order of turns: a job of the highest priority, of the owner who uses least.
struct Turns<'a> {
    /// The waiting jobs by priority and owner, in their order.
    lines: HashMap<(Priority, Option<&'a str>), VecDeque<&'a Pending>>,
    /// The owners with a waiting job: highest priority first, then least used, then earliest submitted.
    order: BTreeSet<(Reverse<Priority>, u64, usize, Option<&'a str>)>,
    used: HashMap<Option<&'a str>, u64>,
    /// The place of a job in the order of submission.
    places: HashMap<&'a JobId, usize>,
}

impl<'a> Turns<'a> {
    fn new(pending: &'a [Pending], nodes: &[Room]) -> Turns<'a> {
        let mut taken: HashMap<Option<&str>, u64> = HashMap::new();
        for one in nodes.iter().flat_map(|node| &node.taken) {
            *taken.entry(one.owner.as_deref()).or_default() += Taken::weight(one.size.gpus);
        }
        let used = pending.iter().map(|job| job.owner.as_deref());
        let used = used.map(|owner| (owner, taken.get(&owner).copied().unwrap_or_default())).collect();
        let places = pending.iter().enumerate().map(|(place, job)| (&job.job, place)).collect();
        let mut lines: HashMap<_, VecDeque<&Pending>> = HashMap::new();
        for job in pending {
            lines.entry((job.priority, job.owner.as_deref())).or_default().push_back(job);
        }
        let mut turns = Turns { lines, order: BTreeSet::new(), used, places };
        let keys: Vec<_> = turns.lines.keys().copied().collect();
        keys.into_iter().for_each(|(priority, owner)| turns.line_up(priority, owner));
        turns
    }

    /// Puts the first job of a line in order.
    fn line_up(&mut self, priority: Priority, owner: Option<&'a str>) {
        if let Some(first) = self.lines.get(&(priority, owner)).and_then(VecDeque::front) {
            let used = self.used.get(&owner).copied().unwrap_or_default();
            self.order.insert((Reverse(priority), used, self.places[&first.job], owner));
        }
    }
}

impl<'a> Iterator for Turns<'a> {
    type Item = &'a Pending;

    /// A job counts as used from its turn on, also when it must wait: so no owner's line blocks those of others.
    fn next(&mut self) -> Option<&'a Pending> {
        let (priority, owner) = loop {
            let (Reverse(priority), used, _, owner) = self.order.pop_first()?;
            if self.used.get(&owner).is_none_or(|now| *now == used) {
                break (priority, owner);
            }
            self.line_up(priority, owner); // another line of the owner had a turn meanwhile
        };
        let job = self.lines.get_mut(&(priority, owner))?.pop_front()?;
        *self.used.entry(owner).or_default() += Taken::weight(job.wants.gpus) * u64::from(job.wants.nodes);
        self.line_up(priority, owner);
        Some(job)
    }
}

#[cfg(test)]
mod tests;
