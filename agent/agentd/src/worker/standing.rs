//! What this node knows of itself now: how it stands with its controller, what it holds, and what failed lately.
//!
//! `worker::reconcile` writes it as it learns, and whoever is asked on this machine (`crate::node_api`) reads it
//! without waiting for that task. It is lost with the process: nothing is decided by it.

use std::collections::VecDeque;

use agent_model::{JobSpec, Outcome, ReplicaId, Timestamp};
use tokio::sync::watch;

use super::runner::ReplicaView;

/// The most failures that are remembered.
const FAILURES: usize = 20;

/// See the module.
#[derive(Debug, Clone)]
pub(crate) struct NodeStanding {
    /// Whether the controller answers.
    pub(crate) up: bool,
    /// Since when it does, or does not.
    pub(crate) since: Timestamp,
    /// When it was heard last.
    pub(crate) heard: Option<Timestamp>,
    /// Why it does not answer, for people.
    pub(crate) why: String,
    /// Whether it lets new work onto this node, in its own word; empty if it never said.
    pub(crate) eligibility: String,
    /// Every replica this node is responsible for.
    pub(crate) held: Vec<StandingReplica>,
    /// Those that failed in the life of this process, the latest first.
    pub(crate) failed: VecDeque<FailedReplica>,
}

/// A replica that this node holds.
#[derive(Debug, Clone)]
pub(crate) struct StandingReplica {
    pub(crate) replica: ReplicaId,
    pub(crate) spec: JobSpec,
    /// Since when it is here.
    pub(crate) since: Timestamp,
    /// Its present state.
    pub(crate) view: watch::Receiver<ReplicaView>,
}

/// A replica whose outcome was a fault.
#[derive(Debug, Clone)]
pub(crate) struct FailedReplica {
    pub(crate) replica: ReplicaId,
    pub(crate) spec: JobSpec,
    pub(crate) outcome: Outcome,
}

impl NodeStanding {
    /// Before the controller said anything.
    pub(crate) fn new(now: Timestamp) -> NodeStanding {
        NodeStanding {
            up: false,
            since: now,
            heard: None,
            why: "it has not answered yet".to_owned(),
            eligibility: String::new(),
            held: Vec::new(),
            failed: VecDeque::new(),
        }
    }

    /// Orders arrived.
    pub(crate) fn heard(&mut self, now: Timestamp, eligibility: &str) {
        if !self.up {
            (self.up, self.since) = (true, now);
            self.why.clear();
        }
        self.heard = Some(now);
        eligibility.clone_into(&mut self.eligibility);
    }

    /// The conversation ended, or none began.
    pub(crate) fn broke(&mut self, now: Timestamp, why: String) {
        if self.up {
            (self.up, self.since) = (false, now);
        }
        self.why = why;
    }

    /// A replica failed.
    pub(crate) fn fails(&mut self, failed: FailedReplica) {
        self.failed.push_front(failed);
        self.failed.truncate(FAILURES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_since_is_when_the_link_changed_and_why_the_latest_reason() {
        let mut known = NodeStanding::new(Timestamp(1));
        known.broke(Timestamp(2), "refused".into());
        assert_eq!((known.up, known.since, known.why.as_str()), (false, Timestamp(1), "refused"));
        known.heard(Timestamp(3), "open");
        known.heard(Timestamp(4), "draining");
        assert_eq!((known.up, known.since, known.heard), (true, Timestamp(3), Some(Timestamp(4))));
        assert_eq!((known.why.as_str(), known.eligibility.as_str()), ("", "draining"));
        known.broke(Timestamp(5), "silent".into());
        assert_eq!((known.up, known.since, known.heard), (false, Timestamp(5), Some(Timestamp(4))));
        assert_eq!(known.eligibility, "draining", "what it said last");
    }
}
