//! The part of the book about environments: the wishes about those that nodes keep.
//!
//! Like an order, a wish is repeated to the node until its inventory shows that it was fulfilled. It is kept only
//! here, and only while somebody waits for it: a removal hours later, when the environment was built again, is not
//! what anybody asked for.

use std::collections::BTreeMap;

use agent_model::node::CachedEnvironment;
use agent_model::protocol::orders::EnvironmentWant;
use agent_model::{JobId, JobState, NodeId};

use super::Book;

/// Whether a node that reports an environment as `shown` has done what is wanted.
fn is_done(want: EnvironmentWant, shown: Option<&CachedEnvironment>) -> bool {
    match (want, shown) {
        (EnvironmentWant::Remove, shown) => shown.is_none(),
        (EnvironmentWant::Pin, Some(shown)) => shown.pinned,
        (EnvironmentWant::Unpin, Some(shown)) => !shown.pinned,
        (_, None) => false,
    }
}

/// An environment of a node, and what is wanted of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) node: NodeId,
    pub(crate) key: String,
    pub(crate) want: EnvironmentWant,
}

/// The state of a wish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WishState {
    /// There is no such node.
    NoNode,
    /// The node has no such environment; it has these.
    NoEnvironment { has: Vec<String> },
    /// These jobs use the environment that is to be removed.
    InUse { jobs: Vec<JobId> },
    /// The node has not done it yet. It may be that it is not connected, or that the environment is in use.
    Open { connected: bool, uses: u32 },
    /// Done; the environment as it is now, if it still exists.
    Done(Option<CachedEnvironment>),
}

pub(super) type Wishes = BTreeMap<NodeId, BTreeMap<String, EnvironmentWant>>;

impl Book {
    /// The environment of a node, as the node last reported it.
    pub(crate) fn environment(&self, node: &NodeId, key: &str) -> Option<&CachedEnvironment> {
        let kept = &self.fleet.get(node)?.record.inventory.environments;
        kept.iter().find(|environment| environment.key == key)
    }

    /// Makes a wish about an environment; it replaces an earlier one.
    pub(crate) fn wish(&mut self, wish: &Wish) -> WishState {
        let state = self.wish_state(wish, true);
        if matches!(state, WishState::Open { .. }) {
            self.wishes.entry(wish.node.clone()).or_default().insert(wish.key.clone(), wish.want);
        }
        state
    }

    /// The state of a wish. A `new` one must be for an environment that exists.
    pub(crate) fn wish_state(&self, wish: &Wish, new: bool) -> WishState {
        let Some(node) = self.fleet.get(&wish.node) else { return WishState::NoNode };
        let shown = self.environment(&wish.node, &wish.key);
        let gone = || WishState::NoEnvironment {
            has: node.record.inventory.environments.iter().map(|kept| kept.key.clone()).collect(),
        };
        match shown {
            None if new || wish.want != EnvironmentWant::Remove => gone(),
            shown if is_done(wish.want, shown) => WishState::Done(shown.cloned()),
            shown => {
                let jobs = self.users(&wish.node, &wish.key);
                match wish.want == EnvironmentWant::Remove && !jobs.is_empty() {
                    true => WishState::InUse { jobs },
                    false => {
                        WishState::Open { connected: node.linked, uses: shown.map_or(0, |shown| shown.uses) }
                    }
                }
            }
        }
    }

    /// Removes a wish, unless another one replaced it.
    pub(crate) fn unwish(&mut self, wish: &Wish) {
        if let Some(wishes) = self.wishes.get_mut(&wish.node)
            && wishes.get(&wish.key) == Some(&wish.want)
        {
            wishes.remove(&wish.key);
        }
        self.wishes.retain(|_, wishes| !wishes.is_empty());
    }

    /// What a node is to do with its environments.
    pub(super) fn wishes_for(&self, node: &NodeId) -> Vec<(String, EnvironmentWant)> {
        let wishes = self.wishes.get(node).into_iter().flatten();
        let open = wishes.filter(|(key, want)| !is_done(**want, self.environment(node, key)));
        open.map(|(key, want)| (key.clone(), *want)).collect()
    }

    /// The jobs of a node whose detail names an environment.
    fn users(&self, node: &NodeId, key: &str) -> Vec<JobId> {
        let says = format!("environment {key} ");
        let jobs = self.fleet.get(node).into_iter().flat_map(|node| &node.jobs);
        let jobs = jobs.filter_map(|id| self.jobs.get(id)).filter(|job| {
            let uses = |replica: &crate::store::ReplicaRecord| {
                replica.node == *node && format!("{} ", replica.detail).contains(&says)
            };
            matches!(job.state, JobState::Preparing | JobState::Running) && job.replicas.iter().any(uses)
        });
        jobs.map(|job| job.id.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use agent_model::job::Priority;
    use agent_model::node::{Interpreter, Inventory};
    use agent_model::{Boot, EnvSpec, JobDraft, ReplicaStep};

    use super::super::tests::{START, book, held, moment, report, submission};
    use super::super::{Held, Report, Submission};
    use super::*;

    fn kept(key: &str, pinned: bool) -> CachedEnvironment {
        CachedEnvironment { key: key.into(), pinned, ..CachedEnvironment::default() }
    }

    /// A report of `box`, which keeps these environments and holds these replicas.
    fn keeping(environments: Vec<CachedEnvironment>, replicas: Vec<Held>) -> Report {
        let inventory = Inventory { slots: 1, environments, ..Inventory::default() };
        Report { inventory: Some(inventory), ..report(1, "b1", replicas) }
    }

    fn wish(key: &str, want: EnvironmentWant) -> Wish {
        Wish { node: "box".parse().unwrap(), key: key.into(), want }
    }

    #[test]
    fn test_wish_is_repeated_until_the_node_shows_that_it_came_true() {
        use EnvironmentWant::{Pin, Remove, Unpin};
        let mut book = book(1, START);
        let node: NodeId = "box".parse().unwrap();
        for (want, before, after) in [
            (Remove, kept("pip-1", false), vec![]),
            (Pin, kept("pip-1", false), vec![kept("pip-1", true)]),
            (Unpin, kept("pip-1", true), vec![kept("pip-1", false)]),
        ] {
            book.report(&keeping(vec![before.clone()], vec![]), moment(1, START));
            let wished = wish("pip-1", want);
            assert_eq!(book.wish(&wished), WishState::Open { connected: true, uses: 0 });
            assert_eq!(book.wishes_for(&node), [("pip-1".to_owned(), want)]);
            book.report(&keeping(vec![before], vec![]), moment(2, START));
            assert_eq!(book.wishes_for(&node).len(), 1);
            book.report(&keeping(after.clone(), vec![]), moment(3, START));
            assert_eq!(book.wishes_for(&node), []);
            assert_eq!(book.wish_state(&wished, false), WishState::Done(after.first().cloned()));
            book.unwish(&wished);
        }
        assert!(book.wishes.is_empty());
    }

    #[test]
    fn test_wish_for_what_is_not_there_is_none() {
        let mut book = book(1, START);
        book.report(&keeping(vec![kept("pip-1", false)], vec![]), moment(1, START));
        for want in [EnvironmentWant::Remove, EnvironmentWant::Pin] {
            assert_eq!(
                book.wish(&wish("pip-2", want)),
                WishState::NoEnvironment { has: vec!["pip-1".into()] }
            );
            let stranger = Wish { node: "other".parse().unwrap(), ..wish("pip-1", want) };
            assert_eq!(book.wish(&stranger), WishState::NoNode);
        }
        assert!(book.wishes.is_empty());
        // One that the node removed by itself cannot be pinned any more.
        book.wish(&wish("pip-1", EnvironmentWant::Pin));
        book.report(&keeping(vec![], vec![]), moment(2, START));
        let state = book.wish_state(&wish("pip-1", EnvironmentWant::Pin), false);
        assert_eq!(state, WishState::NoEnvironment { has: vec![] });
    }

    #[test]
    fn test_what_a_job_uses_is_not_removed_and_the_job_is_named() {
        let mut book = book(1, START);
        let id = book.submit(submission("a", Priority::Medium, 1), moment(1, START)).unwrap();
        book.schedule(moment(1, START));
        let replica = book.job(&id).unwrap().replica(0);
        let runs =
            |detail: &str| Held { detail: detail.into(), ..held(replica.clone(), ReplicaStep::Running) };
        let environments = vec![kept("pip-1", false), kept("pip-12", false)];
        book.report(&keeping(environments, vec![runs("environment pip-1 reused")]), moment(2, START));
        let remove = |key| wish(key, EnvironmentWant::Remove);
        assert_eq!(book.wish(&remove("pip-1")), WishState::InUse { jobs: vec![id] });
        assert!(matches!(book.wish(&remove("pip-12")), WishState::Open { .. }));
        assert!(matches!(book.wish(&wish("pip-1", EnvironmentWant::Pin)), WishState::Open { .. }));
    }

    #[test]
    fn test_job_waits_until_a_node_says_that_it_has_its_python() {
        let mut book = book(1, START);
        let environment = EnvSpec::Host { python: "python3.9".into(), requirements: vec![] };
        let draft = JobDraft { command: "true".into(), environment, ..JobDraft::default() };
        let spec = draft.validate().unwrap();
        let id = book
            .submit(Submission { spec, ..submission("a", Priority::Medium, 1) }, moment(1, START))
            .unwrap();
        let having = |seconds, name: &str| {
            let interpreters = vec![Interpreter { name: name.into(), version: "3.9.2".into() }];
            let inventory = Inventory { slots: 1, interpreters, ..Inventory::default() };
            Report { inventory: Some(inventory), sent: Boot::from_millis(seconds), ..report(1, "b1", vec![]) }
        };
        book.report(&having(2, "python3"), moment(2, START));
        book.schedule(moment(2, START));
        let job = book.job(&id).unwrap().clone();
        assert_eq!(job.state, JobState::Queued);
        assert!(
            book.detail(&job).starts_with("no node has a Python called python3.9; box has python3 (3.9.2)")
        );
        book.report(&having(3, "python3.9"), moment(3, START));
        book.schedule(moment(3, START));
        assert_eq!(book.job(&id).unwrap().state, JobState::Preparing);
    }
}
