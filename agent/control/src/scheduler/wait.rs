//! Why each job waits, as text for users.
//!
//! Jobs of one size and interpreter share one text, so that a long line of them stays cheap.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use agent_model::job::{Predecessor, Resources};
use agent_model::node::{Capability, Interpreter};
use agent_model::words::count;
use agent_model::{JobId, NodeId, Timestamp, size};

use super::limits::Excess;
use super::{Pending, Presence, Pythons, Room, Size, suits, suits_but_for_engines};

impl Room {
    /// The text for a job that wants GPUs about those it cannot get.
    fn without(&self, wants_gpus: bool) -> String {
        match wants_gpus && !self.unfit.is_empty() {
            true => format!(" ({})", self.unfit),
            false => String::new(),
        }
    }

    /// `both slots of box busy: train-a, train-b`
    fn describe(&self, wants: Size) -> String {
        const SHOWN: usize = 4;
        let names: Vec<&str> = self.taken.iter().take(SHOWN).map(|taken| taken.job.as_str()).collect();
        let more = match self.taken.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let busy = match (self.free_slots(), self.slots) {
            _ if self.job_cpus > 0 => {
                let (free, counts) = (self.free(), self.counts(wants));
                let gpus = match self.size.gpus {
                    0 => String::new(),
                    gpus => format!("{} of {}, ", free.gpus, count(gpus.into(), "GPU")),
                };
                format!(
                    "{} has {} of {}, {gpus}{} of {} of memory free, and it takes {} and {} there",
                    self.node,
                    free.cpus,
                    count(self.size.cpus.into(), "CPU"),
                    size::binary(free.memory),
                    size::binary(self.size.memory),
                    count(counts.cpus.into(), "CPU"),
                    size::binary(counts.memory)
                )
            }
            (0, 1) => format!("the slot of {} busy", self.node),
            (0, 2) => format!("both slots of {} busy", self.node),
            (0, slots) => format!("all {slots} slots of {} busy", self.node),
            (free, slots) => {
                let Size { gpus, cpus, memory } = self.free();
                // CPUs are named only if some job asked for them.
                let counted = self.taken.iter().any(|taken| taken.size.cpus > 0) || wants.cpus > 0;
                let cpus = match counted {
                    true => format!("{cpus} of {}, ", count(self.size.cpus.into(), "CPU")),
                    false => String::new(),
                };
                let memory = size::binary(memory);
                format!(
                    "{} has {free} of {}, {cpus}{gpus} of {} and {memory} of memory free",
                    self.node,
                    count(slots.into(), "slot"),
                    count(self.size.gpus.into(), "GPU")
                )
            }
        };
        let busy = format!("{busy}{}", self.without(wants.gpus > 0));
        if names.is_empty() { busy } else { format!("{busy}: {}{more}", names.join(", ")) }
    }
}

/// Why a job waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wait {
    /// There is no node at all.
    NoNode,
    /// It asks for several nodes at once, and only `fit` nodes could ever run a rank of it.
    Gang { nodes: u32, fit: usize },
    /// No node could ever hold it.
    TooLarge { wants: String, largest: String },
    /// Nodes could hold it, but none has its interpreter.
    NoPython { python: String, have: Arc<str> },
    /// Nodes could hold it, but too few have what makes its environment.
    NoEngine { what: Capability, have: String },
    /// Nodes could hold it, but too few have the labels it asks for.
    NoLabel { label: String, have: String },
    /// Nodes could hold it, but none takes work now.
    Closed { why: Arc<str> },
    /// Machines that could hold it are being made, or cannot be made now.
    Coming { what: Arc<str> },
    /// The room it needs is taken, or promised to jobs before it. It starts `within` this time at the latest, if
    /// known.
    Busy { ahead: usize, busy: Arc<str>, within: Option<Duration> },
    /// Its user has as much as one user may have at a time.
    Limit(Box<Excess>),
    /// A user holds it: `held by uid 1000`.
    Held { by: String },
    /// It comes after these jobs.
    Predecessors { when: String },
    /// As many tasks of the array run as may run at a time.
    AtOnce { most: u32 },
    /// Steps of the pipeline come after these ones.
    Steps { steps: String },
    /// Its next attempt has a date.
    Date,
    /// It is not to begin before.
    Begin { at: Timestamp },
    /// After a loss of records, these nodes must first report what they run.
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
            Wait::NoEngine { what, have } => {
                write!(
                    f,
                    "too few nodes have a {}: {have}; `agentctl doctor` says what to do",
                    what.describe()
                )
            }
            Wait::NoLabel { label, have } => {
                write!(
                    f,
                    "too few nodes have the label {label}{have}; `labels` of a node's configuration gives it one"
                )
            }
            Wait::Closed { why } => write!(f, "no node takes work now: {why}"),
            Wait::Coming { what } => f.write_str(what),
            Wait::Busy { ahead, busy, within } => {
                match ahead {
                    0 => f.write_str("next in line"),
                    ahead => write!(f, "{} ahead", count(*ahead as u64, "job")),
                }?;
                if let Some(within) = within {
                    write!(f, ", starts in {} min at the latest", within.as_secs().div_ceil(60))?;
                }
                write!(f, ", {busy}")
            }
            Wait::Unheard { nodes } => write!(
                f,
                "the controller's database was mended: {nodes} must first say what runs there, or be declared \
                 lost (`agentctl node lost NODE`)"
            ),
            Wait::Limit(excess) => excess.fmt(f),
            Wait::Held { by } => write!(f, "{by}; `agentctl release` lets it go"),
            Wait::Predecessors { when } => write!(f, "is to {when}"),
            Wait::AtOnce { most } => {
                write!(
                    f,
                    "{} of it {} at a time",
                    count(u64::from(*most), "task"),
                    if *most == 1 { "runs" } else { "run" }
                )
            }
            Wait::Steps { steps } => write!(f, "the next steps start when {steps} ended"),
            Wait::Date => f.write_str("waits for the date of its next attempt"),
            Wait::Begin { at } => write!(f, "waits until {}", at.utc()),
        }
    }
}

/// Why a job must not start yet, even if there is room.
pub(crate) fn blocked(held: Option<&str>, waits_for: &[Predecessor]) -> Option<Wait> {
    const SHOWN: usize = 3;
    if let Some(by) = held {
        return Some(Wait::Held { by: by.to_owned() });
    }
    let mut when: Vec<String> = waits_for.iter().take(SHOWN).map(Predecessor::to_string).collect();
    let more = waits_for.len().saturating_sub(SHOWN);
    when.extend((more > 0).then(|| format!("{more} more {} ended", if more == 1 { "has" } else { "have" })));
    (!when.is_empty()).then(|| Wait::Predecessors { when: when.join(" and ") })
}

/// What the text of a job that waits depends on: whether it has several ranks, its size, labels, interpreter and engines.
type Kind<'a> = (bool, Size, &'a BTreeMap<String, String>, Option<&'a str>, &'a [Capability]);

/// A job that was not placed.
pub(super) struct Waiting<'a> {
    pub(super) job: &'a Pending,
    /// How many wait before it for room; `None` if it waits for something else.
    pub(super) ahead: Option<usize>,
    /// The longest time from now until it starts, if known.
    pub(super) within: Option<Duration>,
}

/// Why each of them waits.
pub(super) fn reasons<'a>(
    waiting: &[Waiting<'a>],
    nodes: &[Room],
    pythons: &Pythons<'_>,
) -> Vec<(JobId, Wait)> {
    // Shared by jobs of one size and interpreter: see the module.
    let mut texts: HashMap<(bool, Kind<'_>), Arc<str>> = HashMap::new();
    let mut text = |job: &'a Pending, open: bool| -> Arc<str> {
        let Pending { wants, python, .. } = job;
        let size = Size::of(wants);
        let need = (wants.nodes > 1, size, &wants.labels, python.as_deref(), job.requires.as_slice());
        Arc::clone(texts.entry((open, need)).or_insert_with(|| {
            let usable = || nodes.iter().filter(|node| suits(node, job, pythons));
            let closed = |node: &Room| node.closed.as_ref().map(|why| format!("{} {why}", node.node));
            // A machine that will come says more than one that is closed, and one says enough.
            let mut coming: Vec<&Room> = usable().filter(|node| node.presence > Presence::There).collect();
            coming.dedup_by_key(|node| &node.node);
            let mut parts: Vec<String> = coming.first().and_then(|node| closed(node)).into_iter().collect();
            parts.extend((coming.len() > 1).then(|| format!("and {} more", coming.len() - 1)));
            if open {
                let open = usable().filter(|node| node.closed.is_none());
                parts.splice(0..0, open.map(|node| node.describe(size)).take(3));
            } else if parts.is_empty() {
                parts.extend(usable().filter_map(closed).take(3));
            }
            parts.join("; ").into()
        }))
    };
    let have: Arc<str> = have(pythons).into();
    waiting
        .iter()
        .map(|Waiting { job, ahead, within }| {
            let wants = &job.wants;
            let fit = || nodes.iter().filter(|node| suits(node, job, pythons)).count();
            let comes = |job: &Pending| {
                nodes.iter().any(|node| node.presence > Presence::There && suits(node, job, pythons))
            };
            let wait = match (*ahead, &job.python) {
                (Some(ahead), _) => Wait::Busy { ahead, busy: text(job, true), within: *within },
                _ if nodes.is_empty() => Wait::NoNode,
                _ if fit() >= wants.nodes as usize && comes(job) => Wait::Coming { what: text(job, false) },
                _ if fit() >= wants.nodes as usize => Wait::Closed { why: text(job, false) },
                _ if lacks_label(wants, nodes) => no_label(wants, nodes),
                _ if let Some(wait) = no_engine(job, nodes, pythons) => wait,
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
    parts.extend((pythons.len() > NODES).then(|| format!("and {} more", pythons.len() - NODES)));
    parts.join("; ")
}

/// Enough nodes could hold it, and too few of them have the labels it asks for.
fn lacks_label(wants: &Resources, nodes: &[Room]) -> bool {
    let could_hold = || nodes.iter().filter(|node| node.could_hold(wants));
    let enough = |count: usize| count >= wants.nodes as usize;
    enough(could_hold().count()) && !enough(could_hold().filter(|node| node.lacks(wants).is_none()).count())
}

/// Enough nodes would suit it if they had what makes its environment; names what they lack.
fn no_engine(job: &Pending, nodes: &[Room], pythons: &Pythons<'_>) -> Option<Wait> {
    const SHOWN: usize = 3;
    let suit = || nodes.iter().filter(|node| suits_but_for_engines(node, job, pythons));
    let mut lacking = suit().filter_map(|node| Some((node, node.lacks_any(&job.requires)?)));
    let (_, (what, _)) = lacking.clone().next().filter(|_| suit().count() >= job.wants.nodes as usize)?;
    let have = |(node, (_, found)): (&Room, &(_, String))| format!("on {} it is {found}", node.node);
    let have = lacking.by_ref().take(SHOWN).map(have).collect::<Vec<_>>().join(", ");
    Some(Wait::NoEngine { what: *what, have })
}

/// Names the first label that some node lacks, and the values that nodes have instead.
fn no_label(wants: &Resources, nodes: &[Room]) -> Wait {
    const SHOWN: usize = 3;
    let first = nodes.iter().find_map(|node| node.lacks(wants));
    let label = first.map_or_else(String::new, |(key, value)| format!("{key}={value}"));
    let value = |node: &Room| {
        let (key, _) = first?;
        Some(format!("{} has {key}={}", node.node, node.labels.get(key)?))
    };
    let mut have: Vec<String> = nodes.iter().filter_map(value).collect();
    let more = have.len().saturating_sub(SHOWN);
    have.truncate(SHOWN);
    have.extend((more > 0).then(|| format!("and {more} more")));
    let have = if have.is_empty() { String::new() } else { format!(": {}", have.join(", ")) };
    Wait::NoLabel { label, have }
}

fn too_large(wants: &Resources, nodes: &[Room]) -> Wait {
    let needs = |Size { gpus, cpus, memory }: Size| {
        let cpus = if wants.cpus > 0 { count(cpus.into(), "CPU") + ", " } else { String::new() };
        let gpus = count(gpus.into(), "GPU");
        match memory {
            0 => format!("{cpus}{gpus}"),
            memory => format!("{cpus}{gpus} and {} of memory", size::binary(memory)),
        }
    };
    let size = |node: &&Room| (node.size.gpus, node.size.memory, node.size.cpus);
    let largest = nodes.iter().max_by_key(size).map(|node| {
        let has = needs(node.size);
        let slots = match node.job_cpus {
            0 => count(node.slots.into(), "slot") + ", ",
            _ => "for jobs ".to_owned(), // less what is reserved
        };
        format!("{} has {slots}{has}{}", node.node, node.without(wants.gpus > 0))
    });
    Wait::TooLarge { wants: needs(Size::of(wants)), largest: largest.unwrap_or_default() }
}
