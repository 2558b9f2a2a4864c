//! Which node fetches a tree from which other one, when many want the same.
//!
//! Pure and in memory: after a restart, trees are known again as nodes ask for them. The first node that asks for a
//! tree gets it from the store; each later one gets it from a node that has it or is getting it, and passes on what
//! arrives. The nodes that get a tree at the same time form a tree themselves, rather deep than wide: in a chain each
//! of them sends every byte once, as fast as its network carries it, but what fails in it concerns all behind.
//!
//! Invariants: no node gets a tree, over however many others, from itself; a node is named only while it is connected
//! to this controller; a node that somebody else cannot use is still named to others.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use agent_model::protocol::peers::PeerFailure;
use agent_model::{Digest, NodeId, Timestamp};

/// One more node that fetches from the same one weighs as much as so many steps from the store.
const WIDE: usize = 8;

/// A fetch that lasts longer is taken for one that nobody ended.
const LONGEST: Duration = Duration::from_secs(6 * 3600);

/// For how long faults are told.
const TOLD: Duration = Duration::from_secs(3600);

/// The most trees that are known, and nodes of all trees together. The trees that were asked for last are kept.
const TREES: usize = 1000;
const HOLDERS: usize = 100_000;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Fanout {
    trees: HashMap<Digest, Holders>,
    /// By the node that they are about, the failure and the node that told of it.
    faults: BTreeMap<NodeId, Faults>,
}

/// How often each failure was told by each node, and when last.
type Faults = BTreeMap<(PeerFailure, NodeId), (u64, Timestamp)>;

/// Who has a tree.
#[derive(Debug, Default)]
struct Holders {
    asked: Timestamp,
    nodes: BTreeMap<NodeId, Holder>,
}

#[derive(Debug)]
struct Holder {
    address: String,
    /// While it gets the tree.
    fetch: Option<Fetch>,
}

#[derive(Debug)]
struct Fetch {
    /// The node it gets it from; `None`: the store.
    from: Option<NodeId>,
    since: Timestamp,
}

/// A node that asks for a tree.
#[derive(Debug)]
pub(crate) struct Asker<'a> {
    pub(crate) node: &'a NodeId,
    /// Where it serves what it has; empty: nowhere.
    pub(crate) address: &'a str,
    /// Nodes it does not want, and what they did, unless that was told before.
    pub(crate) failed: &'a [(NodeId, Option<PeerFailure>)],
}

impl Fanout {
    /// The node, and its address, from which `asker` should get a tree; `None`: the store.
    pub(crate) fn find(
        &mut self,
        asker: &Asker<'_>,
        tree: Digest,
        now: Timestamp,
        is_connected: impl Fn(&NodeId) -> bool,
    ) -> Option<(NodeId, String)> {
        self.take_failures(asker, tree, now);
        self.make_room();
        let holders = self.trees.entry(tree).or_default();
        holders.asked = now;
        // What it had got it from before counts no more.
        holders.nodes.remove(asker.node);
        let may_be =
            |node: &NodeId| is_connected(node) && !asker.failed.iter().any(|(failed, _)| failed == node);
        let from = holders.best(asker.node, now, may_be);
        let fetch = Some(Fetch { from: from.as_ref().map(|(node, _)| node.clone()), since: now });
        let holder = Holder { address: asker.address.to_owned(), fetch };
        holders.nodes.insert(asker.node.clone(), holder);
        from
    }

    /// The asker has a tree, or gave it up.
    pub(crate) fn over(&mut self, asker: &Asker<'_>, tree: Digest, now: Timestamp) {
        self.take_failures(asker, tree, now);
        let holders = self.trees.get_mut(&tree);
        if let Some(holder) = holders.and_then(|holders| holders.nodes.get_mut(asker.node)) {
            holder.fetch = None;
        }
    }

    /// What others told of a node lately: each failure, who told it, and how often.
    pub(crate) fn faults(&mut self, node: &NodeId, now: Timestamp) -> Vec<(PeerFailure, NodeId, u64)> {
        let Some(faults) = self.faults.get_mut(node) else { return Vec::new() };
        faults.retain(|_, (_, at)| now.since(*at) < TOLD);
        faults.iter().map(|((failure, by), (times, _))| (*failure, by.clone(), *times)).collect()
    }

    /// The node was removed.
    pub(crate) fn forget(&mut self, node: &NodeId) {
        self.faults.remove(node);
        for holders in self.trees.values_mut() {
            holders.nodes.remove(node);
        }
    }

    fn take_failures(&mut self, asker: &Asker<'_>, tree: Digest, now: Timestamp) {
        for (node, failure) in asker.failed {
            if let Some(failure) = failure {
                self.take_failure(asker.node, node, *failure, tree, now);
            }
        }
    }

    fn take_failure(&mut self, by: &NodeId, of: &NodeId, failure: PeerFailure, tree: Digest, now: Timestamp) {
        if failure == PeerFailure::Lacks
            && let Some(holders) = self.trees.get_mut(&tree)
        {
            holders.nodes.remove(of);
        }
        // A node that is not here is nobody to tell of: the name comes from another node.
        let is_known = self.trees.get(&tree).is_some_and(|holders| holders.nodes.contains_key(of));
        if failure.is_fault() && is_known {
            let fault = self.faults.entry(of.clone()).or_default().entry((failure, by.clone()));
            let (times, at) = fault.or_insert((0, now));
            (*times, *at) = (*times + 1, now);
        }
    }

    fn make_room(&mut self) {
        let holders = |trees: &HashMap<Digest, Holders>| trees.values().map(|h| h.nodes.len()).sum::<usize>();
        while self.trees.len() > 1 && (self.trees.len() >= TREES || holders(&self.trees) >= HOLDERS) {
            let oldest = self.trees.iter().min_by_key(|(_, holders)| holders.asked).map(|(tree, _)| *tree);
            oldest.map(|oldest| self.trees.remove(&oldest));
        }
    }
}

impl Holders {
    /// The best of those that may be, and its address.
    fn best(
        &self,
        asker: &NodeId,
        now: Timestamp,
        may_be: impl Fn(&NodeId) -> bool,
    ) -> Option<(NodeId, String)> {
        let mut served: HashMap<&NodeId, usize> = HashMap::new();
        for from in self.nodes.values().filter_map(|holder| holder.source(now)) {
            *served.entry(from).or_default() += 1;
        }
        let cost = |node: &NodeId| {
            Some(self.steps(node, asker, now)? + WIDE * served.get(node).copied().unwrap_or(0))
        };
        let holders = self.nodes.iter().filter(|(node, holder)| !holder.address.is_empty() && may_be(node));
        let costs = holders.filter_map(|(node, holder)| Some((cost(node)?, node, holder)));
        let (_, node, holder) = costs.min_by_key(|(cost, node, _)| (*cost, *node))?;
        Some((node.clone(), holder.address.clone()))
    }

    /// How many nodes pass on what `node` gets, itself included; 0 when it has the tree. `None` when `asker` is among
    /// them.
    fn steps(&self, node: &NodeId, asker: &NodeId, now: Timestamp) -> Option<usize> {
        let (mut at, mut steps) = (node, 0);
        loop {
            let Some(holder) = self.nodes.get(at).filter(|holder| holder.is_fetching(now)) else {
                return Some(steps);
            };
            steps += 1;
            match holder.source(now) {
                Some(from) if from == asker || steps > self.nodes.len() => return None,
                Some(from) => at = from,
                None => return Some(steps),
            }
        }
    }
}

impl Holder {
    fn is_fetching(&self, now: Timestamp) -> bool {
        self.fetch.as_ref().is_some_and(|fetch| now.since(fetch.since) < LONGEST)
    }

    /// The node from which it gets the tree now.
    fn source(&self, now: Timestamp) -> Option<&NodeId> {
        self.fetch.as_ref().filter(|_| self.is_fetching(now))?.from.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(1_000_000);

    fn node(number: usize) -> NodeId {
        format!("n{number:04}").parse().unwrap()
    }

    fn tree(number: u64) -> Digest {
        Digest { size: number, ..Digest::EMPTY }
    }

    /// Asks for the first tree; the number of the node that is named.
    fn ask(fanout: &mut Fanout, number: usize, failed: &[(usize, Option<PeerFailure>)]) -> Option<usize> {
        ask_among(fanout, number, failed, |_| true)
    }

    fn ask_among(
        fanout: &mut Fanout,
        number: usize,
        failed: &[(usize, Option<PeerFailure>)],
        is_connected: impl Fn(&NodeId) -> bool,
    ) -> Option<usize> {
        let failed: Vec<_> = failed.iter().map(|(number, failure)| (node(*number), *failure)).collect();
        let (name, address) = (node(number), format!("10.0.0.1:{number}"));
        let asker = Asker { node: &name, address: &address, failed: &failed };
        let (named, at) = fanout.find(&asker, tree(1), NOW, is_connected)?;
        let number = named.as_str()[1..].parse().unwrap();
        assert_eq!(at, format!("10.0.0.1:{number}"));
        Some(number)
    }

    /// The node has the first tree, and tells what others did meanwhile.
    fn over(fanout: &mut Fanout, number: usize, failed: &[(usize, PeerFailure)]) {
        let failed: Vec<_> = failed.iter().map(|(number, what)| (node(*number), Some(*what))).collect();
        let asker = Asker { node: &node(number), address: "", failed: &failed };
        fanout.over(&asker, tree(1), NOW);
    }

    #[test]
    fn test_nodes_that_begin_together_form_a_chain() {
        let mut fanout = Fanout::default();
        let from: Vec<_> = (0..8).map(|number| ask(&mut fanout, number, &[])).collect();
        assert_eq!(from, [None, Some(0), Some(1), Some(2), Some(3), Some(4), Some(5), Some(6)]);
        over(&mut fanout, 0, &[]);
        assert_eq!(ask(&mut fanout, 8, &[]), Some(7), "the first is busy with one");
    }

    #[test]
    fn test_a_thousand_nodes_are_neither_a_star_nor_a_line() {
        let mut fanout = Fanout::default();
        let mut from = BTreeMap::new();
        for number in 0..1000 {
            from.insert(number, ask(&mut fanout, number, &[]));
        }
        let depth = |mut at: usize| {
            let mut depth = 0;
            while let Some(Some(next)) = from.get(&at) {
                (at, depth) = (*next, depth + 1);
            }
            depth
        };
        assert_eq!(from.values().filter(|from| from.is_none()).count(), 1, "one copy leaves the store");
        let deepest = (0..1000).map(depth).max().unwrap();
        let widest = (0..1000).map(|n| from.values().filter(|f| **f == Some(n)).count()).max().unwrap();
        assert!(deepest <= 40 && widest <= 5, "{deepest} deep, {widest} wide");
    }

    #[test]
    fn test_who_has_the_tree_serves_before_those_who_get_it() {
        let mut fanout = Fanout::default();
        assert_eq!(ask(&mut fanout, 0, &[]), None);
        over(&mut fanout, 0, &[]);
        assert_eq!(ask(&mut fanout, 1, &[]), Some(0));
        over(&mut fanout, 1, &[]);
        assert_eq!(ask(&mut fanout, 2, &[]), Some(0));
        assert_eq!(ask(&mut fanout, 3, &[]), Some(1), "each of them serves one");
    }

    #[test]
    fn test_nobody_gets_it_from_itself() {
        let mut fanout = Fanout::default();
        for number in 0..4 {
            ask(&mut fanout, number, &[]);
        }
        // The first lost the store: all others depend on it.
        assert_eq!(ask(&mut fanout, 0, &[]), None);
        // The second cannot use the first any more: the others depend on it, too.
        assert_eq!(ask(&mut fanout, 1, &[(0, Some(PeerFailure::Stalls))]), None);
        // The third can use the first.
        assert_eq!(ask(&mut fanout, 2, &[(1, Some(PeerFailure::Stalls))]), Some(0));
    }

    #[test]
    fn test_who_lacks_the_tree_is_not_named_again_and_is_no_fault() {
        let mut fanout = Fanout::default();
        ask(&mut fanout, 0, &[]);
        over(&mut fanout, 0, &[]);
        assert_eq!(ask(&mut fanout, 1, &[]), Some(0));
        assert_eq!(ask(&mut fanout, 1, &[(0, Some(PeerFailure::Lacks))]), None);
        assert_eq!(ask(&mut fanout, 2, &[]), Some(1));
        assert!(fanout.faults(&node(0), NOW).is_empty());
    }

    #[test]
    fn test_what_one_cannot_use_others_may_and_it_is_told_for_a_while() {
        let mut fanout = Fanout::default();
        ask(&mut fanout, 0, &[]);
        over(&mut fanout, 0, &[]);
        let lies = Some(PeerFailure::Lies);
        assert_eq!(ask(&mut fanout, 1, &[(0, lies)]), None);
        assert_eq!(ask(&mut fanout, 1, &[(0, lies), (9, lies)]), None);
        assert_eq!(fanout.faults(&node(0), NOW), [(PeerFailure::Lies, node(1), 2)]);
        assert!(fanout.faults(&node(9), NOW).is_empty(), "nobody knows it");
        assert_eq!(ask(&mut fanout, 2, &[]), Some(0));
        over(&mut fanout, 2, &[(0, PeerFailure::Stalls)]);
        assert_eq!(fanout.faults(&node(0), NOW)[0], (PeerFailure::Stalls, node(2), 1), "told at the end");
        assert!(fanout.faults(&node(0), NOW + TOLD).is_empty());
    }

    #[test]
    fn test_only_the_connected_are_named_and_the_removed_are_forgotten() {
        let mut fanout = Fanout::default();
        ask(&mut fanout, 0, &[]);
        assert_eq!(ask_among(&mut fanout, 1, &[], |name| *name != node(0)), None);
        fanout.forget(&node(1));
        assert_eq!(ask(&mut fanout, 2, &[]), Some(0));
    }

    #[test]
    fn test_what_is_known_is_bounded() {
        let (mut fanout, name) = (Fanout::default(), node(0));
        for number in 0..2 * TREES as u64 {
            let asker = Asker { node: &name, address: "10.0.0.1:1", failed: &[] };
            fanout.find(&asker, tree(number), NOW + Duration::from_secs(number), |_| true);
        }
        assert!(fanout.trees.len() <= TREES && fanout.trees.contains_key(&tree(2 * TREES as u64 - 1)));
    }
}
