//! Nodes that are held back because jobs do not start there: what the rule of [`agent_model::breaker`] is told, and
//! what follows for places.
//!
//! A node that is held back takes no work, and its waiting jobs say why. When a hold is over it is on trial: it gets one
//! job at a time beyond those that have shown that commands run there, until one shows it again.

use agent_model::{Boot, JobId, NodeId, Outcome, ReplicaStep, Timestamp};

use super::fleet::NodeState;
use super::jobs::Jobs;
use super::{Book, Moment};
use crate::store::ReplicaRecord;

impl NodeState {
    /// How many jobs it may have at a time.
    pub(super) fn slots(&self, jobs: &Jobs, now: Timestamp) -> u32 {
        let slots = self.record.inventory.slots;
        if !self.record.breaker.is_on_trial(now) {
            return slots;
        }
        let runs = |replica: &ReplicaRecord| {
            let step = replica.step;
            replica.node == self.record.id
                && matches!(step, Some(ReplicaStep::Running | ReplicaStep::Releasing))
        };
        let proven = |id: &&JobId| jobs.get(id).is_some_and(|job| job.replicas.iter().any(runs));
        let proven = self.jobs.iter().filter(proven).count();
        slots.min(u32::try_from(proven + 1).unwrap_or(u32::MAX))
    }
}

impl Book {
    /// Takes in whether an attempt that ended on a node got as far as its command.
    pub(super) fn judge_start(&mut self, node: &NodeId, job: &JobId, outcome: &Outcome, now: Moment) {
        if outcome.started_at.is_some() {
            return self.has_started(node);
        }
        let Some(fault) = &outcome.fault else { return };
        let owner = self.jobs.get(job).and_then(|job| job.owner());
        let told = self.fleet.edit(node, |node| node.record.breaker.failed(owner, fault, now.wall));
        self.replan |= told == Some(true);
    }

    /// A command ran on a node.
    pub(super) fn has_started(&mut self, node: &NodeId) {
        self.replan |= self.fleet.edit(node, |node| node.record.breaker.clear()) == Some(true);
    }

    /// Notes which nodes are not held back any more.
    pub(super) fn end_holds(&mut self, now: Moment) {
        for node in self.fleet.iter_mut() {
            let was = std::mem::replace(&mut node.held_back, node.record.breaker.hold(now.wall).is_some());
            self.replan |= was && !node.held_back;
        }
    }

    /// When the next of them is not.
    pub(super) fn next_hold_end(&self, now: Moment) -> Option<Boot> {
        let holds = self.fleet.iter().filter_map(|node| node.record.breaker.hold(now.wall));
        holds.map(|hold| now.boot + hold.until().since(now.wall)).min()
    }
}

#[cfg(test)]
mod tests {
    use agent_model::job::Priority;
    use agent_model::machine::EligibilityEvent;
    use agent_model::{Code, Epoch, Fault, JobSpec, JobState, Principal, Verdict};

    use super::super::tests::{START, book, ended, hear, held, moment, report, submission};
    use super::super::{Held, Submission};
    use super::*;

    /// A node with two slots, which fails to start jobs.
    struct Bed {
        book: Book,
        seconds: u64,
        made: u32,
    }

    impl Bed {
        fn new() -> Bed {
            Bed { book: book(2, START), seconds: 0, made: 0 }
        }

        fn now(&self) -> Moment {
            moment(self.seconds, START)
        }

        /// Seconds pass, and the node reports what it holds.
        fn pass(&mut self, seconds: u64, replicas: Vec<Held>) {
            self.seconds += seconds;
            let now = self.now();
            hear(&mut self.book, report(2, "b1", replicas), now);
            self.book.link(|_| true);
            self.book.expire(now);
            self.book.schedule(now);
        }

        fn submit(&mut self, uid: u32) -> JobId {
            self.made += 1;
            let name = format!("j{}", self.made);
            let new = submission(&name, Priority::Medium, 1);
            let spec: JobSpec = new.spec.owned_by(Some(Principal::Local { uid }), None);
            let id = self.book.submit(Submission { spec, ..new }, self.now()).unwrap();
            self.book.schedule(self.now());
            id
        }

        fn state(&self, id: &JobId) -> JobState {
            self.book.job(id).unwrap().state
        }

        fn fail(&mut self, id: &JobId, code: Code) {
            let replica = self.book.job(id).unwrap().replica(0);
            let outcome = ended(Verdict::Failed, Some(Fault::new(code, "no")));
            let now = self.now();
            self.book.settle(&replica, &"box".parse().unwrap(), outcome, now);
            self.book.expire(now);
            self.book.schedule(now);
        }
    }

    #[test]
    fn test_a_node_that_fails_jobs_of_two_owners_takes_no_more_and_is_tried_with_one() {
        let mut bed = Bed::new();
        for uid in [1, 1, 2] {
            let job = bed.submit(uid);
            assert_eq!(bed.state(&job), JobState::Preparing);
            bed.fail(&job, Code::LaunchFailed);
            assert_eq!(bed.state(&job), JobState::Failed);
        }
        let next = [bed.submit(1), bed.submit(2)];
        let said = bed.book.detail(bed.book.job(&next[0]).unwrap());
        assert!(said.contains("box could not start jobs and is tried again at 00:17:40 UTC: no"), "{said}");
        assert!(bed.book.is_dirty(), "it is on disk before it is told");
        assert!(bed.book.next_alarm(bed.now()).is_some_and(|at| at <= bed.now().boot + bed.hold()));

        bed.pass(60, Vec::new());
        assert_eq!(next.each_ref().map(|id| bed.state(id)), [JobState::Preparing, JobState::Queued]);
        // The one that is tried runs, so the node is as good as ever.
        let runs = bed.book.job(&next[0]).unwrap().replica(0);
        let runs = Held { started_at: Some(bed.now().wall), ..held(runs, ReplicaStep::Running) };
        bed.pass(1, vec![runs]);
        assert_eq!(next.each_ref().map(|id| bed.state(id)), [JobState::Running, JobState::Preparing]);
        bed.fail(&next[1], Code::LaunchFailed);
        let third = bed.submit(2);
        assert_eq!(bed.state(&third), JobState::Preparing, "one failure of one owner");
    }

    #[test]
    fn test_what_the_job_has_no_part_in_costs_it_no_attempt_and_an_operator_ends_the_hold() {
        let mut bed = Bed::new();
        let job = bed.submit(1);
        bed.fail(&job, Code::NodeUnfit);
        assert_eq!(bed.state(&job), JobState::Queued, "it has one attempt, and still has it");
        bed.pass(60, Vec::new());
        assert_eq!(bed.state(&job), JobState::Preparing);
        bed.fail(&job, Code::NodeUnfit);
        bed.pass(60, Vec::new());
        assert_eq!(bed.state(&job), JobState::Queued, "the second hold is longer");
        bed.book.set_eligibility(&"box".parse().unwrap(), EligibilityEvent::Uncordon).unwrap();
        bed.pass(0, Vec::new());
        let record = bed.book.job(&job).unwrap();
        assert_eq!((record.state, record.epoch), (JobState::Preparing, Epoch(3)));
    }

    impl Bed {
        fn hold(&self) -> std::time::Duration {
            self.book.nodes().next().unwrap().record.breaker.hold(self.now().wall).unwrap().length
        }
    }
}
