//! What is done next with the machines of one pool: one pure function.
//!
//! Owns the rules: how many machines a pool has, which ones are removed, and what is tried again when. It is called
//! with what is known now and says all that is to be done now; called again with the same facts it says the same, so
//! nothing is lost when the controller is restarted between a decision and its act.
//!
//! Invariants, held by tests: a pool never has more machines than its maximum, those that are being removed
//! included, unless the maximum was lowered; a machine with jobs, or one that waiting jobs would use, is never asked
//! to leave; whatever its record says, a machine whose node is there counts as joined, and none is given back before its
//! node has left the fleet; while a provider fails to make machines it is asked for one at a time, and only when its
//! wait is over.

use std::time::Duration;

use agent_model::{NodeId, Timestamp};

use crate::store::{MachineRecord, MachineStep, PoolRecord};

/// The most machines that are asked for at a time.
const AT_ONCE: usize = 20;
/// How long a node without jobs may be silent before its machine is replaced.
const SILENT: Duration = Duration::from_secs(10 * 60);

/// A provider that failed last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failing {
    /// In the words of the provider.
    pub(crate) what: String,
    pub(crate) at: Timestamp,
    /// It is not asked before.
    pub(crate) again: Timestamp,
    times: u32,
}

impl Failing {
    /// A further failure; `before` is the last one.
    pub(super) fn after(before: Option<&Failing>, what: String, now: Timestamp) -> Failing {
        const FIRST: Duration = Duration::from_secs(5);
        const LONGEST: Duration = Duration::from_secs(600);
        let times = before.map_or(1, |before| before.times.saturating_add(1));
        let wait = FIRST.saturating_mul(1 << (times - 1).min(10)).min(LONGEST);
        Failing { what, at: now, again: now + wait, times }
    }

    /// A failure of what is asked again after this time, however often it fails.
    pub(super) fn once(what: String, now: Timestamp, again: Duration) -> Failing {
        Failing { what, at: now, again: now + again, times: 1 }
    }
}

/// A pool as it is known now.
#[derive(Debug)]
pub(super) struct PoolView<'a> {
    pub(super) record: &'a PoolRecord,
    pub(super) machines: Vec<MachineView<'a>>,
    /// How many machines waiting jobs would use beside those it has; `None` while that is not known.
    pub(super) more: Option<usize>,
    pub(super) failing: Option<&'a Failing>,
    /// How long a machine may take to join.
    pub(super) join_within: Duration,
}

/// A machine of it as it is known now.
#[derive(Debug, Clone)]
pub(super) struct MachineView<'a> {
    pub(super) record: &'a MachineRecord,
    /// Its provider is being called about it.
    pub(super) called: bool,
    /// It may connect as a node.
    pub(super) member: bool,
    pub(super) node: Option<NodeView>,
    /// Waiting jobs would use it.
    pub(super) used: bool,
    /// Its provider says that it has no such machine any more.
    pub(super) gone: bool,
}

impl MachineView<'_> {
    fn has_joined(&self) -> bool {
        self.member && self.node.is_some()
    }
}

/// Its node.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct NodeView {
    /// How long it has not answered; zero while it does.
    pub(super) silent: Duration,
    pub(super) jobs: usize,
    /// Its operators let it take work.
    pub(super) open: bool,
    /// How long it has had no job, nor been used by one that waits.
    pub(super) idle: Duration,
    /// How many environments it keeps.
    pub(super) kept: usize,
}

/// Something to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PoolStep {
    /// Record a new machine that is to be made.
    Ask,
    /// Call the provider to make it.
    Create(NodeId),
    /// Record where it stands, and why.
    Move(NodeId, MachineStep, String),
    /// Record that it did not become a node, which counts as a failure of the provider; it is to leave.
    Fail(NodeId, String),
    /// Keep new jobs off it; those that it has go on.
    Drain(NodeId),
    /// Ask its node to retire, or how far it is.
    Retire(NodeId),
    /// Take it out of the fleet; its jobs, if it has some, are lost.
    Remove(NodeId, String),
    /// Call the provider to remove it.
    Delete(NodeId),
    /// Remove the pool, which has no more machines.
    Forget,
}

/// What is to be done now.
pub(super) fn plan(pool: &PoolView<'_>, now: Timestamp) -> Vec<PoolStep> {
    let record = pool.record;
    if record.deleting && pool.machines.is_empty() {
        return vec![PoolStep::Forget];
    }
    let mut steps: Vec<PoolStep> =
        pool.machines.iter().flat_map(|machine| next(pool, machine, now)).collect();
    steps.extend(shrink(pool));
    // What did not come, or is not needed, is taken back; what waits for its turn is tried.
    let may_try = pool.failing.is_none_or(|failing| failing.again <= now);
    let waiting = |machine: &&MachineView<'_>| {
        machine.record.step == MachineStep::Asked && !machine.called && !machine.has_joined()
    };
    let calls = pool.machines.iter().filter(|machine| machine.called).count();
    let at_once = if pool.failing.is_some() { 1 } else { AT_ONCE };
    let tries = if may_try { at_once.saturating_sub(calls) } else { 0 };
    let wanted: Vec<&MachineView<'_>> =
        pool.machines.iter().filter(waiting).filter(|machine| !is_needless(pool, machine)).collect();
    steps.extend(wanted.iter().take(tries).map(|machine| PoolStep::Create(machine.record.name.clone())));
    let free = (record.max as usize).saturating_sub(pool.machines.len());
    let lacking = (record.min as usize).saturating_sub(alive(pool));
    let more = pool.more.unwrap_or_default().max(lacking).min(free).min(tries.saturating_sub(wanted.len()));
    if !record.deleting {
        steps.extend(std::iter::repeat_n(PoolStep::Ask, more));
    }
    steps
}

/// How many machines it would have now.
pub(super) fn target(pool: &PoolView<'_>) -> usize {
    if pool.record.deleting {
        return 0;
    }
    let kept = |machine: &&MachineView<'_>| {
        machine.used || machine.node.is_some_and(|node| node.jobs > 0 || node.idle < pool.record.idle)
    };
    let kept = pool.machines.iter().filter(is_alive).filter(kept).count();
    (kept + pool.more.unwrap_or_default()).clamp(pool.record.min as usize, pool.record.max as usize)
}

fn is_alive(machine: &&MachineView<'_>) -> bool {
    matches!(machine.record.step, MachineStep::Asked | MachineStep::Created | MachineStep::Joined)
}

fn alive(pool: &PoolView<'_>) -> usize {
    pool.machines.iter().filter(is_alive).count()
}

/// It was not made yet, and nobody needs it any more.
fn is_needless(pool: &PoolView<'_>, machine: &MachineView<'_>) -> bool {
    let surplus = pool.more.is_some() && !machine.used && alive(pool) > pool.record.min as usize;
    surplus || has_no_place(pool, machine)
}

/// It has not joined, and the pool has as many others as it may have: those that joined come first.
fn has_no_place(pool: &PoolView<'_>, machine: &MachineView<'_>) -> bool {
    let order = |machine: &MachineView<'_>| {
        let step = machine.record.step;
        (step != MachineStep::Joined, step != MachineStep::Created, machine.record.name.clone())
    };
    let own = order(machine);
    let before = pool.machines.iter().filter(is_alive).filter(|other| order(other) < own).count();
    pool.record.deleting || before >= pool.record.max as usize
}

/// What one machine needs, whatever the others do.
fn next(pool: &PoolView<'_>, machine: &MachineView<'_>, now: Timestamp) -> Option<PoolStep> {
    let MachineView { record, member, called, .. } = machine;
    let name = || record.name.clone();
    let to = |step, why: &str| Some(PoolStep::Move(name(), step, why.to_owned()));
    match record.step {
        _ if *called => None,
        // A provider may fail after it made the machine.
        MachineStep::Asked | MachineStep::Created if machine.has_joined() => to(MachineStep::Joined, ""),
        MachineStep::Asked if is_needless(pool, machine) => {
            to(MachineStep::Leaving, "it is not needed any more")
        }
        MachineStep::Asked => None,
        MachineStep::Created if has_no_place(pool, machine) => {
            to(MachineStep::Leaving, "the pool has no place for it any more")
        }
        MachineStep::Created if machine.gone => {
            Some(PoolStep::Fail(name(), "the provider has removed it before it joined".to_owned()))
        }
        MachineStep::Created if now.since(record.since) > pool.join_within => {
            let minutes = pool.join_within.as_secs().div_ceil(60);
            Some(PoolStep::Fail(name(), format!("it did not join within {minutes} min")))
        }
        MachineStep::Created => None,
        MachineStep::Joined if !member => to(MachineStep::Deleting, "its node was removed"),
        // Its token is revoked with this step.
        MachineStep::Leaving if !member => to(MachineStep::Deleting, &record.why),
        MachineStep::Joined => joined(pool, machine),
        MachineStep::Leaving => Some(PoolStep::Retire(name())),
        // It joined in the moment in which that was decided.
        MachineStep::Deleting if *member => to(MachineStep::Leaving, &record.why),
        MachineStep::Deleting => Some(PoolStep::Delete(name())),
    }
}

fn joined(pool: &PoolView<'_>, machine: &MachineView<'_>) -> Option<PoolStep> {
    let (name, node) = (machine.record.name.clone(), machine.node.unwrap_or_default());
    if machine.gone && !node.silent.is_zero() {
        return Some(PoolStep::Remove(name, "its provider has taken it away".to_owned()));
    }
    if node.silent > SILENT && node.jobs == 0 {
        return Some(PoolStep::Move(name, MachineStep::Leaving, "it does not answer".to_owned()));
    }
    (pool.record.deleting && node.open && node.jobs > 0).then_some(PoolStep::Drain(name))
}

/// The machines that are to leave because nobody needs them: those that keep the fewest environments first, then
/// those that have been idle for longest.
fn shrink<'a>(pool: &'a PoolView<'_>) -> impl Iterator<Item = PoolStep> + use<'a> {
    let record = pool.record;
    let (alive, min, max) = (alive(pool), record.min as usize, record.max as usize);
    let mut idle: Vec<(&NodeId, NodeView)> = pool
        .machines
        .iter()
        .filter(|machine| machine.record.step == MachineStep::Joined && machine.member && !machine.called)
        .filter_map(|machine| Some((machine, machine.node?)))
        .filter(|(machine, node)| node.jobs == 0 && (record.deleting || (!machine.used && node.open)))
        .map(|(machine, node)| (&machine.record.name, node))
        .collect();
    idle.sort_by_key(|(name, node)| (node.kept, std::cmp::Reverse(node.idle), (*name).clone()));
    let surplus = if record.deleting { alive } else { alive.saturating_sub(min) };
    let now = if record.deleting { alive } else { alive.saturating_sub(max) };
    let known = pool.more.is_some() || record.deleting;
    let leaving = idle.into_iter().take(if known { surplus } else { 0 }).enumerate();
    leaving.filter(move |(place, (_, node))| *place < now || node.idle >= record.idle).map(
        |(_, (name, node))| {
            let why = match record.deleting {
                true => "the pool is being removed".to_owned(),
                false => format!("it was idle for {} s", node.idle.as_secs()),
            };
            PoolStep::Move(name.clone(), MachineStep::Leaving, why)
        },
    )
}

#[cfg(test)]
mod tests;
