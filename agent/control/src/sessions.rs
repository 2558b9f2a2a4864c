//! Which process speaks for each node, and how far its clock is off.
//!
//! A copied machine has the identity of the first. Both would report, and each would end what the other runs. So a
//! process that connects while another one speaks for the node waits: if the other one keeps reporting, it is alive,
//! and the new one is refused; if its connection ends, or it is silent, it is gone, and the new one is the same
//! machine, restarted. A process that lost its connection and connects again is recognised by its session.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use agent_model::{Code, Fault, NodeId, Timestamp};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Reports arrive at least every five seconds. A process that is heard this long after another one connected is
/// alive; one that is not heard within [`GONE_AFTER`], two reports, is gone.
const ALIVE_AFTER: Duration = Duration::from_secs(2);
const GONE_AFTER: Duration = Duration::from_secs(11);
/// How long a refused machine is reported after its last attempt.
const TOLD: Duration = Duration::from_secs(600);
/// A smaller difference of clocks is not reported.
pub(crate) const SKEW: Duration = Duration::from_secs(5);

/// One process of a node, as it names itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) session: String,
    pub(crate) boot_id: String,
    /// Its address; empty for this machine.
    pub(crate) from: String,
}

#[derive(Debug)]
struct Live {
    process: Process,
    /// Distinguishes one stream from the next.
    number: u64,
    /// When it was last heard; closed when its stream ends.
    heard: watch::Sender<Instant>,
}

/// Two processes that claimed one node at the same time.
#[derive(Debug, Clone)]
pub(crate) struct Twice {
    pub(crate) node: NodeId,
    pub(crate) first: Process,
    pub(crate) second: Process,
    at: Instant,
}

#[derive(Debug, Default)]
struct State {
    live: BTreeMap<NodeId, Live>,
    twice: BTreeMap<NodeId, Twice>,
    /// Nodes of this machine that are refused, because a machine that joined has their name, and when that was last.
    refused: BTreeMap<NodeId, Instant>,
    /// How many milliseconds the clock of a node is ahead.
    ahead: BTreeMap<NodeId, i64>,
    number: u64,
}

/// See the module. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sessions(Arc<Mutex<State>>);

/// The right to speak for a node, until it is dropped.
#[derive(Debug)]
pub(crate) struct Speaker {
    sessions: Sessions,
    node: NodeId,
    number: u64,
}

impl Drop for Speaker {
    fn drop(&mut self) {
        let mut state = self.sessions.0.lock();
        if state.live.get(&self.node).is_some_and(|live| live.number == self.number) {
            state.live.remove(&self.node);
        }
    }
}

impl Speaker {
    /// The process was heard.
    pub(crate) fn heard(&self, clock: Timestamp, now: Timestamp) {
        let mut state = self.sessions.0.lock();
        if let Some(live) = state.live.get(&self.node).filter(|live| live.number == self.number) {
            live.heard.send_replace(Instant::now());
        }
        if clock.0 > 0 {
            let ahead = i64::try_from(clock.0).unwrap_or(i64::MAX) - i64::try_from(now.0).unwrap_or(i64::MAX);
            state.ahead.insert(self.node.clone(), ahead);
        }
    }
}

impl Sessions {
    /// Speaks for a node from now on, unless another process does.
    pub(crate) async fn speak(&self, node: &NodeId, process: Process) -> Result<Speaker, Fault> {
        let came = Instant::now();
        while let Some((first, mut heard)) = self.other(node, &process) {
            tokio::select! {
                changed = heard.changed() => {
                    if changed.is_ok() && heard.borrow_and_update().duration_since(came) >= ALIVE_AFTER {
                        return Err(self.refuse(node, first, process));
                    }
                }
                () = sleep_until(came + GONE_AFTER) => break,
            }
        }
        Ok(self.take(node, process))
    }

    /// Speaks for a node from now on, in place of any other process.
    pub(crate) fn take(&self, node: &NodeId, process: Process) -> Speaker {
        let mut state = self.0.lock();
        state.number += 1;
        let number = state.number;
        if state.twice.get(node).is_some_and(|twice| twice.second.session == process.session) {
            state.twice.remove(node);
        }
        let heard = watch::channel(Instant::now()).0;
        state.live.insert(node.clone(), Live { process, number, heard });
        Speaker { sessions: self.clone(), node: node.clone(), number }
    }

    /// A node of this machine was refused, because a machine that joined has its name.
    pub(crate) fn refuse_own(&self, node: &NodeId) {
        self.0.lock().refused.insert(node.clone(), Instant::now());
    }

    /// Those that were refused a short while ago.
    pub(crate) fn refused(&self) -> Vec<NodeId> {
        let mut state = self.0.lock();
        state.refused.retain(|_, at| at.elapsed() < TOLD);
        state.refused.keys().cloned().collect()
    }

    /// A process of another session that speaks for the node now.
    fn other(&self, node: &NodeId, process: &Process) -> Option<(Process, watch::Receiver<Instant>)> {
        let state = self.0.lock();
        let live = state.live.get(node).filter(|live| live.process.session != process.session)?;
        Some((live.process.clone(), live.heard.subscribe()))
    }

    fn refuse(&self, node: &NodeId, first: Process, second: Process) -> Fault {
        let fault = Fault::new(Code::NodeTwice, format!("another machine lives as `{node}`"))
            .why(format!("it was there first: {}; this one: {}", describe(&first), describe(&second)))
            .fix(
                "on the copy: `agentd leave`, then join under another name with a token of its own; \
                 `agentctl explain NODE-108` says more",
            );
        tracing::warn!(%node, first = describe(&first), second = describe(&second), "two machines live under one identity");
        let twice = Twice { node: node.clone(), first, second, at: Instant::now() };
        self.0.lock().twice.insert(node.clone(), twice);
        fault
    }

    /// Whether a process may speak for a node beside its stream: no other process does.
    pub(crate) fn may_speak(&self, node: &NodeId, session: &str) -> bool {
        let state = self.0.lock();
        state.live.get(node).is_none_or(|live| live.process.session == session)
            && state.twice.get(node).is_none_or(|twice| twice.second.session != session)
    }

    /// Whether a process speaks for a node now.
    pub(crate) fn is_live(&self, node: &NodeId) -> bool {
        self.0.lock().live.contains_key(node)
    }

    /// The nodes that two processes claimed at the same time lately.
    pub(crate) fn twice(&self) -> Vec<Twice> {
        let mut state = self.0.lock();
        state.twice.retain(|_, twice| twice.at.elapsed() < TOLD);
        state.twice.values().cloned().collect()
    }

    /// By how many milliseconds the clock of a node is ahead of this one, where that is too much.
    pub(crate) fn skew(&self, node: &NodeId) -> Option<i64> {
        let ahead = *self.0.lock().ahead.get(node)?;
        (u128::from(ahead.unsigned_abs()) > SKEW.as_millis()).then_some(ahead)
    }

    /// The node was removed.
    pub(crate) fn forget(&self, node: &NodeId) {
        let mut state = self.0.lock();
        state.twice.remove(node);
        state.refused.remove(node);
        state.ahead.remove(node);
    }
}

pub(crate) fn describe(process: &Process) -> String {
    let short = |text: &str| text.chars().take(8).collect::<String>();
    let from = if process.from.is_empty() { "this machine" } else { process.from.as_str() };
    format!("boot {}, session {}, from {from}", short(&process.boot_id), short(&process.session))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(session: &str) -> Process {
        Process { session: session.into(), boot_id: format!("boot-{session}"), from: "10.0.0.7:1".into() }
    }

    fn node() -> NodeId {
        "gpu".parse().unwrap()
    }

    const NOW: Timestamp = Timestamp(1_000_000);

    #[tokio::test(start_paused = true)]
    async fn test_a_copy_is_kept_out_while_the_first_lives() {
        let (sessions, gpu) = (Sessions::default(), node());
        let first = sessions.speak(&gpu, process("a")).await.unwrap();
        let reports = async {
            loop {
                tokio::time::sleep(Duration::from_secs(5)).await;
                first.heard(NOW, NOW);
            }
        };
        let fault = tokio::select! {
            refused = sessions.speak(&gpu, process("b")) => refused.unwrap_err(),
            () = reports => unreachable!(),
        };
        assert_eq!(fault.code, Code::NodeTwice);
        assert!(fault.why[0].contains("boot-a") && fault.why[0].contains("boot-b"), "{fault}");
        assert!(sessions.may_speak(&gpu, "a") && !sessions.may_speak(&gpu, "b"));
        assert_eq!(sessions.twice().len(), 1);
        drop(first);
        assert!(!sessions.may_speak(&gpu, "b"), "it was never taken in");
        let _second = sessions.speak(&gpu, process("b")).await.unwrap();
        assert!(sessions.may_speak(&gpu, "b") && sessions.twice().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn test_a_restart_is_no_copy() {
        let (sessions, gpu) = (Sessions::default(), node());
        let first = sessions.speak(&gpu, process("a")).await.unwrap();
        // The same process, over another connection, at once.
        let again = sessions.speak(&gpu, process("a")).await.unwrap();
        drop(first);
        assert!(!sessions.may_speak(&gpu, "b"), "the end of the old stream is not the end of the new one");
        // Another process: the last reports of the old one are read before its end is seen.
        let old_ends = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            again.heard(NOW, NOW);
            drop(again);
        };
        let (second, ()) = tokio::join!(sessions.speak(&gpu, process("b")), old_ends);
        let second = second.unwrap();
        // A machine that lost its power: nothing shows that the old connection is dead.
        let begin = Instant::now();
        let _third = sessions.speak(&gpu, process("c")).await.unwrap();
        assert!(begin.elapsed() <= GONE_AFTER + Duration::from_secs(1));
        drop(second);
        assert!(sessions.twice().is_empty() && sessions.may_speak(&gpu, "c"));
    }

    #[test]
    fn test_clocks_that_differ_by_little_are_right() {
        let (sessions, gpu) = (Sessions::default(), node());
        let speaker = Speaker { sessions: sessions.clone(), node: node(), number: 0 };
        for (clock, skew) in
            [(1_004_000, None), (1_060_000, Some(60_000)), (0, Some(60_000)), (880_000, Some(-120_000))]
        {
            speaker.heard(Timestamp(clock), NOW);
            assert_eq!(sessions.skew(&gpu), skew);
        }
    }
}
