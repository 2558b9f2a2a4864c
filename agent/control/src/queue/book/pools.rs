//! The part of the book about machines that come and go: those that may be expected, and nodes that retire.
//!
//! Invariants: a node that retires has no job, and gets none. It is clear only after it reported, under orders that
//! were made after it was chosen, that it holds nothing: from then on it starts nothing that was ordered before,
//! however late that arrives ([`OrderFence`](agent_model::protocol::orders::OrderFence)). Whoever allows new work on
//! it meanwhile ends its retirement.

use std::collections::BTreeMap;

use agent_model::NodeId;
use agent_model::machine::EligibilityEvent;

use super::{Book, Moment, NodeState};
use crate::scheduler::{self, Presence, Prospect, Pythons, Room};

/// Where a node that is to go stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retirement {
    /// There is no such node.
    Unknown,
    /// It has jobs, so it stays.
    Busy,
    /// It gets no more work, and has not said yet that it has none.
    Asked,
    /// It has no work, and will start none.
    Clear,
}

/// What the waiting jobs would use.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outlook {
    /// Every node.
    pub(crate) nodes: Vec<NodeState>,
    /// How often each was chosen: nodes that are there or coming, and, by the name of its pool, those that are possible.
    pub(crate) used: BTreeMap<NodeId, usize>,
    /// After a loss of records, nodes must report before this means anything.
    pub(crate) known: bool,
}

impl Book {
    /// Takes in which machines may be expected, for the reasons of jobs that wait, and tries where these jobs would be
    /// placed if all of them were there. Nothing is placed by it.
    pub(crate) fn outlook(&mut self, prospects: Vec<Prospect>, now: Moment) -> Outlook {
        self.replan |= prospects != self.prospects;
        self.prospects = prospects;
        let nodes = self.fleet.iter().cloned().collect();
        let (mut rooms, pythons) = self.rooms(now);
        let (pending, _) = self.waiting(super::arrays::most(&rooms));
        let known = self.fleet.unheard().is_none();
        if pending.is_empty() || !known {
            return Outlook { nodes, used: BTreeMap::new(), known };
        }
        for (room, node) in rooms.iter_mut().zip(self.fleet.iter()) {
            // One that is about to connect again needs no other in its place.
            if node.is_expected() {
                room.closed = None;
            }
        }
        rooms.iter_mut().filter(|room| room.presence > Presence::There).for_each(|room| room.closed = None);
        let decided = scheduler::place(&pending, rooms, &pythons, self.limits);
        let mut used = BTreeMap::new();
        for node in decided.placed.into_iter().flat_map(|(_, nodes)| nodes) {
            *used.entry(node).or_default() += 1;
        }
        Outlook { nodes, used, known: true }
    }

    /// The nodes, then the machines that may be expected, and the interpreters of both.
    pub(super) fn rooms(&self, now: Moment) -> (Vec<Room>, Pythons<'_>) {
        let (mut rooms, mut pythons) = (self.fleet.rooms(&self.jobs, now.wall), self.fleet.pythons());
        for Prospect { room, interpreters } in &self.prospects {
            rooms.push(room.clone());
            if !interpreters.is_empty() {
                pythons.insert(&room.node, interpreters);
            }
        }
        (rooms, pythons)
    }

    /// Asks a node to retire, or how far it is.
    pub(crate) fn retire_node(&mut self, id: &NodeId) -> Retirement {
        let state = self.fleet.retire(id);
        if state == Retirement::Asked
            && self.fleet.set_eligibility(id, EligibilityEvent::Cordon) == Some(true)
        {
            (self.urgent, self.replan) = (true, true);
        }
        state
    }
}
