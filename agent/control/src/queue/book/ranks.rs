//! The outcome of an attempt, from the ends of its ranks: one pure rule.
//!
//! An attempt has ended when every rank has. It completed if every rank did; otherwise the first rank that failed is
//! the cause, and the outcomes of the others, which were stopped for it, are not repeated. A lost rank counts as
//! ended when its node was last heard: the others fail because of it, and report that before it is given up. A fault
//! that broke the attempt as a whole has priority over all that. If the first rank leads the others and completed,
//! the attempt completed.

use agent_model::machine::Before;
use agent_model::{Code, ExitStatus, Fault, JobState, NodeId, Outcome, Timestamp, Verdict};

use super::without_run;
use crate::store::{JobRecord, RankEnd, ReplicaRecord};

/// The end of an attempt.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) outcome: Outcome,
    /// The cause is a rank that is lost.
    pub(super) lost: bool,
    /// The node of the cause.
    pub(super) node: NodeId,
}

impl JobRecord {
    /// Why its ranks that have not ended are to be stopped; `None` when they are to run.
    pub(crate) fn why_stopped(&self) -> Option<String> {
        match self.state {
            JobState::Finalizing(Verdict::Canceled)
            | JobState::NotResponding(Before::Finalizing(Verdict::Canceled)) => {
                Some(self.cancel.clone().unwrap_or_else(|| "canceled".to_owned()))
            }
            _ if self.broken.is_some() => self.broken.as_ref().map(|broken| broken.fault.what.clone()),
            _ if leader_completed(self) => Some("rank 0 of it, which leads, has ended".to_owned()),
            _ => cause(self).map(|cause| format!("rank {} of it, on {}, has ended", cause.rank, cause.node)),
        }
    }
}

/// The rank that leads the others completed, so the ends of the others do not matter.
fn leader_completed(job: &JobRecord) -> bool {
    let completed = |end: &RankEnd| matches!(end, RankEnd::Told(Outcome { verdict: Verdict::Completed, .. }));
    job.spec.is_led() && job.rank(0).and_then(|first| first.end.as_ref()).is_some_and(completed)
}

/// The rank because of which an attempt does not complete, if there is one.
fn cause(job: &JobRecord) -> Option<&ReplicaRecord> {
    if leader_completed(job) {
        return None;
    }
    let bad = |replica: &&ReplicaRecord| replica.end.as_ref().is_some_and(|end| rate(end) > 0);
    // A canceled rank is the cause only if none failed.
    job.replicas.iter().filter(bad).min_by_key(|replica| {
        let end = replica.end.as_ref();
        end.map(|end| (std::cmp::Reverse(rate(end)), ended_at(end), replica.rank))
    })
}

/// The end of the latest attempt of a job; `None` while a rank has not ended. One that is canceled does not wait for
/// ranks that are not on record.
pub(super) fn join(job: &JobRecord, now: Timestamp) -> Option<Joined> {
    let known = job.replicas.len() as u64 == u64::from(job.spec.resources.nodes);
    let ended = job.replicas.iter().all(|replica| replica.end.is_some());
    let partly = broken!(GangRestartedPartly) && cause(job).is_some();
    if !(ended && (known || job.cancel.is_some()) || partly) {
        return None;
    }
    let broken = job.broken.as_ref().and_then(|broken| Some((job.rank(broken.rank)?, &broken.fault)));
    // What was asked to end because a machine goes may have been done just before.
    let done = |fault: &Fault| fault.code == Code::Preempted && cause(job).is_none();
    if let Some((cause, fault)) = broken.filter(|(_, fault)| !done(fault)) {
        let outcome = without_run(Verdict::Failed, Some(fault.clone()), now);
        return Some(Joined { outcome, lost: false, node: cause.node.clone() });
    }
    let told = cause(job).or_else(|| job.replicas.iter().min_by_key(|replica| replica.rank))?;
    let (mut outcome, lost) = match told.end.as_ref()? {
        RankEnd::Told(outcome) => (outcome.clone(), false),
        RankEnd::Lost { fault, .. } => (without_run(Verdict::Failed, Some(fault.clone()), now), true),
    };
    if job.spec.resources.nodes > 1 {
        let place = format!("rank {} of {}, on {}", told.rank, job.spec.resources.nodes, told.node);
        // Its outputs are those of its first rank; the outcomes of the others are kept with each rank.
        outcome.artifacts = match job.rank(0).and_then(|first| first.end.as_ref()) {
            Some(RankEnd::Told(first)) => first.artifacts,
            _ => None,
        };
        outcome.fault =
            outcome.fault.map(|fault| Fault { what: format!("{place}: {}", fault.what), ..fault });
    }
    Some(Joined { outcome, lost, node: told.node.clone() })
}

/// How strongly an end counts as the cause: the highest wins. Ranks fail because the machine of another one goes.
fn rate(end: &RankEnd) -> u8 {
    let preempted = |fault: &Fault| fault.code == Code::Preempted;
    match end {
        RankEnd::Told(Outcome { fault: Some(fault), .. }) | RankEnd::Lost { fault, .. }
            if preempted(fault) =>
        {
            3
        }
        RankEnd::Told(Outcome { verdict: Verdict::Completed, .. }) => 0,
        RankEnd::Told(Outcome { verdict: Verdict::Canceled, .. }) => 1,
        RankEnd::Told(_) | RankEnd::Lost { .. } => 2,
    }
}

fn ended_at(end: &RankEnd) -> Timestamp {
    match end {
        RankEnd::Told(outcome) => outcome.ended_at,
        RankEnd::Lost { heard, .. } => *heard,
    }
}

/// How a command ended, as text for users.
pub(super) fn describe(outcome: &Outcome) -> String {
    let exit = match outcome.exit {
        Some(ExitStatus::Code(code)) => format!("the command ended with code {code}"),
        Some(ExitStatus::Signal(signal)) => format!("signal {signal} ended the command"),
        None => "the command was not run to its end".to_owned(),
    };
    match &outcome.fault {
        Some(fault) => format!("{exit}: {fault}"),
        None => exit,
    }
}

#[cfg(test)]
mod tests {
    use agent_model::JobDraft;
    use agent_model::job::Resources;

    use super::*;
    use crate::store::tests::job;

    fn gang(ends: &[Option<RankEnd>]) -> JobRecord {
        let nodes = u32::try_from(ends.len()).unwrap();
        let resources = Resources { nodes, ..Resources::default() };
        let draft = JobDraft { command: "true".into(), resources, ..JobDraft::default() };
        let replica = |(rank, end): (usize, &Option<RankEnd>)| ReplicaRecord {
            rank: u32::try_from(rank).unwrap(),
            end: end.clone(),
            ..ReplicaRecord::on(&format!("n{rank}").parse().unwrap(), "b")
        };
        let replicas = ends.iter().enumerate().map(replica).collect();
        JobRecord { spec: draft.validate().unwrap(), replicas, ..job("a", 1) }
    }

    fn told(verdict: Verdict, at: u64) -> Option<RankEnd> {
        let fault = (verdict == Verdict::Failed).then(|| Fault::new(Code::CommandFailed, "exit 1"));
        Some(RankEnd::Told(without_run(verdict, fault, Timestamp(at))))
    }

    fn lost(heard: u64) -> Option<RankEnd> {
        let fault = Fault::new(Code::NodeLost, "n0 is silent");
        Some(RankEnd::Lost { fault, heard: Timestamp(heard) })
    }

    #[test]
    fn test_what_broke_an_attempt_comes_first_and_a_leader_that_completed_is_the_job() {
        use Verdict::{Canceled, Completed, Failed};
        let mut broken = gang(&[told(Canceled, 1), told(Failed, 2)]);
        let fault = Fault::new(Code::GangLate, "rank 0 was late");
        broken.broken = Some(crate::store::Broken { rank: 0, fault: fault.clone() });
        broken.state = JobState::Preparing;
        let joined = join(&broken, Timestamp(9)).unwrap();
        assert_eq!(
            (joined.outcome.verdict, joined.outcome.fault, joined.node.as_str()),
            (Failed, Some(fault), "n0")
        );
        assert_eq!(broken.why_stopped().unwrap(), "rank 0 was late");

        let led = |ends: &[Option<RankEnd>]| {
            let record = gang(ends);
            let draft = JobDraft {
                distribution: Some(agent_model::job::Distribution::Mpi { processes: 1 }),
                ..record.spec.clone().into()
            };
            JobRecord { spec: draft.validate().unwrap(), state: JobState::Running, ..record }
        };
        assert!(led(&[None, None]).why_stopped().is_none());
        assert!(led(&[told(Completed, 1), None]).why_stopped().is_some());
        assert!(gang(&[told(Completed, 1), None]).why_stopped().is_none(), "its ranks are equals");
        let verdict = |ends: &[Option<RankEnd>]| join(&led(ends), Timestamp(9)).unwrap().outcome.verdict;
        assert_eq!(verdict(&[told(Completed, 1), told(Canceled, 2)]), Completed);
        assert_eq!(verdict(&[told(Completed, 1), lost(2)]), Completed);
        assert_eq!(verdict(&[told(Failed, 1), told(Canceled, 2)]), Failed);
        assert_eq!(verdict(&[told(Canceled, 3), told(Failed, 2)]), Failed);
    }

    #[test]
    fn test_attempt_ends_with_its_last_rank_and_its_first_failure_is_told() {
        use Verdict::{Canceled, Completed, Failed};
        let joined = |ends: &[Option<RankEnd>]| {
            join(&gang(ends), Timestamp(99)).map(|joined| {
                let what = joined.outcome.fault.map(|fault| fault.what).unwrap_or_default();
                (joined.outcome.verdict, joined.lost, what)
            })
        };
        let said = |verdict, lost, what: &str| Some((verdict, lost, what.to_owned()));
        assert_eq!(joined(&[told(Completed, 5)]), said(Completed, false, ""));
        assert_eq!(joined(&[told(Failed, 5)]), said(Failed, false, "exit 1"), "one rank is the job");
        assert_eq!(joined(&[told(Completed, 5), None]), None);
        assert_eq!(joined(&[told(Completed, 5), told(Completed, 9)]), said(Completed, false, ""));
        let first = "rank 1 of 3, on n1: exit 1";
        assert_eq!(
            joined(&[told(Canceled, 1), told(Failed, 5), told(Failed, 6)]),
            said(Failed, false, first)
        );
        // A rank that is lost is given up late, and was silent before the others failed for it.
        let gone = "rank 0 of 2, on n0: n0 is silent";
        assert_eq!(joined(&[lost(4), told(Failed, 5)]), said(Failed, true, gone));
        assert_eq!(joined(&[lost(6), told(Failed, 5)]), said(Failed, false, "rank 1 of 2, on n1: exit 1"));
        assert_eq!(joined(&[told(Canceled, 1), told(Completed, 2)]), said(Canceled, false, ""));
        let mut partly = gang(&[told(Canceled, 1), None]);
        partly.replicas.truncate(1);
        assert!(join(&partly, Timestamp(9)).is_none(), "a rank that nobody has heard of may run");
        partly.cancel = Some("canceled".into());
        assert!(join(&partly, Timestamp(9)).is_some());
    }
}
