//! Which orders are valid, and what has to be done about them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::gang::Gang;
use crate::{Boot, Epoch, JobId, JobSpec, ReplicaId};

/// Which orders one process of a node's daemon obeys.
///
/// Orders name the report they answer by the time it was sent, on the node's own clock, and those that answer
/// the same one are numbered. Orders that answer an earlier report than the last that were obeyed, or the same one
/// with a smaller number, were overtaken; orders that answer a report from before the daemon started were meant for
/// its predecessor. Because a node is this strict, a controller may conclude from a report that lacks a replica, and
/// that obeyed later orders, that the replica will never start.
///
/// Numbers of two controller epochs cannot be compared, so of orders of different epochs only those that answer a
/// later report are obeyed. A report echoes the controller epoch, which proves that it was made in it.
#[derive(Debug, Clone, Copy)]
pub struct OrderFence {
    since: Boot,
    obeyed: Option<(Obeyed, u64)>,
}

/// The latest orders that were obeyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Obeyed {
    /// The controller epoch in which they were made.
    pub controller_epoch: u64,
    /// When the report that they answer was sent.
    pub answers: Boot,
}

impl OrderFence {
    /// Of a daemon that starts at `now`.
    pub fn new(now: Boot) -> OrderFence {
        OrderFence { since: Boot::from_millis(now.millis()), obeyed: None }
    }

    /// Whether to obey these orders, which answer the report sent at `answers`; if so, they are the latest from now
    /// on. An `answers` of zero, of a controller that does not set it, is always obeyed.
    pub fn admits(&mut self, controller_epoch: u64, answers: Boot, revision: u64) -> bool {
        if answers == Boot::default() {
            return true;
        }
        let counts = answers >= self.since
            && self.obeyed.is_none_or(|(latest, last)| {
                answers > latest.answers
                    || (latest == Obeyed { controller_epoch, answers } && revision >= last)
            });
        if counts {
            self.obeyed = Some((Obeyed { controller_epoch, answers }, revision));
        }
        counts
    }

    /// The latest orders that were obeyed.
    pub fn obeyed(&self) -> Option<Obeyed> {
        self.obeyed.map(|(latest, _)| latest)
    }

    /// The controller epoch of the latest orders that were obeyed; zero before the first.
    pub fn controller_epoch(&self) -> u64 {
        self.obeyed().map_or(0, |latest| latest.controller_epoch)
    }
}

/// The times at which a node sends its reports: each later than the one before, even if the clock stops, so that the
/// later one of two reports is always known.
#[derive(Debug, Default)]
pub struct Stamps(AtomicU64);

impl Stamps {
    /// The stamp of a report that is made at `now`.
    pub fn next(&self, now: Boot) -> Boot {
        let later = |last: u64| Some(now.millis().max(last + 1));
        let last = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later).unwrap_or_default();
        Boot::from_millis(now.millis().max(last + 1))
    }
}

/// What an order wants of a replica.
#[derive(Debug, Clone, PartialEq)]
pub enum Wanted {
    /// Run it, at most until then unless a later time is received; `None` is without limit. A rank of a gang starts
    /// when it gets the go.
    Run(JobSpec, Option<Boot>, Option<Gang>),
    /// A message to its runner, if there is one.
    Other(Desired),
    /// Not understood, so nothing is changed.
    Unclear,
}

/// What a runner is asked to bring about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Desired {
    /// Run it to its end, or until a moment of this boot unless a later one is received.
    Run {
        /// The latest that was ever received; `None` is without limit.
        until: Option<Boot>,
        /// The gang, as it was sent to this rank.
        gang: Option<Gang>,
    },
    /// End it.
    Stop {
        /// Between the polite signal and the final one.
        grace: Duration,
        /// For people.
        reason: String,
    },
    /// Its outcome is stored; remove it.
    Forget,
    /// The controller does not know it: end it and keep its directory for a while.
    Disown,
}

impl Desired {
    /// To run it.
    pub fn is_run(&self) -> bool {
        matches!(self, Desired::Run { .. })
    }

    /// What is wanted when this is received after `known`: the go of a gang is never taken back.
    #[must_use]
    pub fn after_go(&self, known: &Desired) -> Desired {
        let goes = |gang: &Option<Gang>| gang.as_ref().is_some_and(|gang| gang.go.is_some());
        match (self, known) {
            (Desired::Run { until, gang }, Desired::Run { gang: gone, .. }) if goes(gone) && !goes(gang) => {
                Desired::Run { until: *until, gang: gone.clone() }
            }
            _ => self.clone(),
        }
    }

    /// The same, and a lease is never shortened.
    #[must_use]
    pub fn after(&self, known: &Desired) -> Desired {
        match (self, known) {
            (Desired::Run { until, .. }, Desired::Run { until: before, .. }) => match self.after_go(known) {
                Desired::Run { gang, .. } => Desired::Run { until: *until.max(before), gang },
                other => other,
            },
            _ => self.clone(),
        }
    }
}

/// The end of a lease in an order when the controller has had no report of the run since it, or the node, was
/// restarted: a time long past, so that the order starts nothing. It is no reason to end a running command.
pub const UNHEARD: Boot = Boot(Duration::from_millis(1));

/// What an operator wants of an environment that a node keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnvironmentWant {
    /// That it is removed, once no job uses it.
    Remove,
    /// That it is never removed to make room.
    Pin,
    /// That it may be.
    Unpin,
}

impl EnvironmentWant {
    const ALL: [EnvironmentWant; 3] = [EnvironmentWant::Remove, EnvironmentWant::Pin, EnvironmentWant::Unpin];

    /// From its word.
    pub fn parse(word: &str) -> Option<EnvironmentWant> {
        EnvironmentWant::ALL.into_iter().find(|want| want.name() == word)
    }

    /// Its word.
    pub fn name(self) -> &'static str {
        match self {
            EnvironmentWant::Remove => "remove",
            EnvironmentWant::Pin => "pin",
            EnvironmentWant::Unpin => "unpin",
        }
    }
}

/// What to do about a replica.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Start it; its lease ends at that time.
    Start(ReplicaId, JobSpec, Option<Boot>, Option<Gang>),
    /// Tell its runner.
    Tell(ReplicaId, Desired),
    /// Nothing was done about this order: a later attempt of the job was ordered or is held.
    Refuse(ReplicaId),
}

/// What has to be done so that the replicas `held` match the orders.
///
/// | Order | Held | Not held |
/// |---|---|---|
/// | run | tell until when | start, once no other epoch of the job is held; never beside a later one |
/// | stop, forget | tell | – |
/// | not understood | – | – |
/// | not named | disown | – |
pub fn decide(orders: BTreeMap<ReplicaId, Wanted>, held: &BTreeSet<ReplicaId>) -> Vec<Action> {
    let latest = latest_epochs(&orders, held);
    let busy = |new: &ReplicaId| held.iter().any(|old| old.job == new.job && old.epoch < new.epoch);
    let mut actions = Vec::new();
    let unnamed: Vec<ReplicaId> = held.iter().filter(|id| !orders.contains_key(*id)).cloned().collect();
    for (replica, wanted) in orders {
        let (busy, held) = (busy(&replica), held.contains(&replica));
        match wanted {
            Wanted::Run(..) if !held && latest.get(&replica.job) > Some(&replica.epoch) => {
                actions.push(Action::Refuse(replica));
            }
            // The earlier attempt is ended first; the order is repeated when that is gone.
            Wanted::Run(..) if !held && busy => {}
            Wanted::Run(spec, until, gang) if !held => {
                actions.push(Action::Start(replica, spec, until, gang));
            }
            Wanted::Run(_, until, gang) => actions.push(Action::Tell(replica, Desired::Run { until, gang })),
            Wanted::Other(desired) if held => actions.push(Action::Tell(replica, desired)),
            Wanted::Other(_) | Wanted::Unclear => {}
        }
    }
    actions.extend(unnamed.into_iter().map(|replica| Action::Tell(replica, Desired::Disown)));
    actions
}

/// The latest epoch of each job that is ordered to run or held.
fn latest_epochs(orders: &BTreeMap<ReplicaId, Wanted>, held: &BTreeSet<ReplicaId>) -> BTreeMap<JobId, Epoch> {
    let ordered = orders.iter().filter(|(_, wanted)| matches!(wanted, Wanted::Run(..))).map(|(id, _)| id);
    let mut latest: BTreeMap<JobId, Epoch> = BTreeMap::new();
    for replica in ordered.chain(held) {
        let epoch = latest.entry(replica.job.clone()).or_default();
        *epoch = replica.epoch.max(*epoch);
    }
    latest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::JobDraft;

    fn id(text: &str) -> ReplicaId {
        text.parse().unwrap()
    }

    fn spec() -> JobSpec {
        JobDraft { command: "true".into(), ..JobDraft::default() }.validate().unwrap()
    }

    fn held(ids: &[&str]) -> BTreeSet<ReplicaId> {
        ids.iter().map(|text| id(text)).collect()
    }

    #[test]
    fn test_orders_against_reality() {
        let stop = || Desired::Stop { grace: Duration::ZERO, reason: "canceled".into() };
        let orders = [
            ("new.1.0", Wanted::Run(spec(), None, None)),
            ("known.1.0", Wanted::Run(spec(), Some(Boot::from_millis(7)), None)),
            ("stopped.1.0", Wanted::Other(stop())),
            ("gone.1.0", Wanted::Other(stop())),
            ("done.1.0", Wanted::Other(Desired::Forget)),
            ("forgotten.1.0", Wanted::Other(Desired::Forget)),
            ("odd.1.0", Wanted::Unclear),
        ];
        let orders = orders.into_iter().map(|(text, wanted)| (id(text), wanted)).collect();
        let held = held(&["known.1.0", "stopped.1.0", "done.1.0", "odd.1.0", "orphan.1.0"]);
        let expected = [
            Action::Tell(id("done.1.0"), Desired::Forget),
            Action::Tell(id("known.1.0"), Desired::Run { until: Some(Boot::from_millis(7)), gang: None }),
            Action::Start(id("new.1.0"), spec(), None, None),
            Action::Tell(id("stopped.1.0"), stop()),
            Action::Tell(id("orphan.1.0"), Desired::Disown),
        ];
        assert_eq!(decide(orders, &held), expected);
    }

    #[test]
    fn test_repeated_orders_start_nothing_twice() {
        let orders: BTreeMap<_, _> = [(id("a.1.0"), Wanted::Run(spec(), None, None))].into();
        assert_eq!(decide(orders.clone(), &held(&[])).len(), 1);
        assert_eq!(
            decide(orders, &held(&["a.1.0"])),
            [Action::Tell(id("a.1.0"), Desired::Run { until: None, gang: None })]
        );
    }

    #[test]
    fn test_an_earlier_epoch_is_never_started_beside_a_later_one() {
        let run = |text| (id(text), Wanted::Run(spec(), None, None));
        let orders = [run("a.1.0"), run("b.2.0"), run("b.3.0"), run("c.2.0")].into();
        let actions = decide(orders, &held(&["a.2.0", "c.1.0"]));
        let expected = [
            Action::Refuse(id("a.1.0")),
            Action::Refuse(id("b.2.0")),
            Action::Start(id("b.3.0"), spec(), None, None),
            Action::Tell(id("a.2.0"), Desired::Disown),
            Action::Tell(id("c.1.0"), Desired::Disown),
        ];
        assert_eq!(actions, expected);
    }

    #[test]
    fn test_a_lease_is_never_shortened() {
        let run = |until: Option<u64>| Desired::Run { until: until.map(Boot::from_millis), gang: None };
        assert_eq!(run(Some(5)).after(&run(Some(7))), run(Some(7)));
        assert_eq!(run(Some(8)).after(&run(Some(7))), run(Some(8)));
        assert_eq!(run(Some(8)).after(&run(None)), run(Some(8)), "nothing was heard before");
        assert_eq!(Desired::Forget.after(&run(None)), Desired::Forget);
    }

    #[test]
    fn test_stamps_grow_even_if_the_clock_does_not() {
        let (stamps, at) = (Stamps::default(), Boot::from_millis);
        let made: Vec<_> = [7, 7, 8, 20].map(|now| stamps.next(at(now))).into();
        assert_eq!(made, [at(7), at(8), at(9), at(20)]);
    }

    #[test]
    fn test_overtaken_orders_do_not_count() {
        let at = Boot::from_millis;
        let mut order_fence = OrderFence::new(at(100));
        assert!(!order_fence.admits(7, at(99), 9), "meant for the daemon before");
        assert_eq!((order_fence.obeyed(), order_fence.controller_epoch()), (None, 0));
        assert!(order_fence.admits(7, at(0), 0) && order_fence.admits(7, at(120), 5));
        assert!(order_fence.admits(7, at(120), 5));
        assert!(!order_fence.admits(7, at(119), 6) && !order_fence.admits(7, at(120), 4));
        assert!(!order_fence.admits(8, at(120), 6), "the numbers of another controller_epoch say nothing");
        assert!(order_fence.admits(8, at(121), 1) && !order_fence.admits(7, at(120), 9));
        assert_eq!(
            (order_fence.obeyed(), order_fence.controller_epoch()),
            (Some(Obeyed { controller_epoch: 8, answers: at(121) }), 8)
        );
    }
}
