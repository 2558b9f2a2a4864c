//! The jobs that have not ended and the nodes, in memory, and every rule that changes them.
//!
//! Pure: the input is messages and the time; the output is changed records, history and waiting reasons, through
//! [`Book::changes`]. Each part owns its state and the changes to it that are not on disk yet: the records of
//! [`jobs`], the waiting [`line`], the [`fleet`] of nodes, the [`replicas`] that are over and that their nodes may
//! still hold or start, the unknown jobs of [`adopt`]. Here and in [`nodes`] are the rules that touch several.
//!
//! Invariants: every placed job has the epoch of its replicas; an outcome counts once; a terminal job is never
//! touched again and leaves the book when it is written ([`Book::retire`]).
//!
//! Owned by the one task of `queue`; nobody else sees it.

mod adopt;
mod arrays;
mod blocked;
mod change;
mod closing;
mod dates;
mod environments;
mod fleet;
mod gangs;
mod held_back;
mod jobs;
mod kept;
mod line;
mod lives;
mod naming;
mod nodes;
mod pipelines;
mod placing;
mod pools;
mod preemption;
mod ranks;
mod replicas;
mod resume;
mod reuse;
mod sweeps;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

use crate::lease::Leases;
use crate::queue::assets::Register;
use crate::scheduler::{Prospect, UserLimits};
use crate::store::{ArrayRecord, Changes, Document, JobRecord, Loaded, RankEnd, ReplicaRecord};
use adopt::Strangers;
pub(crate) use adopt::{Described, Doubt, Judgement, Unproved};
use agent_model::lease::Terms;
use agent_model::{
    Artifacts, Boot, Code, Epoch, Fault, JobEvent, JobId, JobSpec, JobState, NodeId, Outcome, ReplicaId,
    Timestamp, Verdict,
};
use blocked::Predecessors;
pub(crate) use environments::{Wish, WishState};
use fleet::Fleet;
pub(crate) use fleet::{Held, NodeState, Report};
use gangs::Gangs;
use jobs::Jobs;
use line::Line;
use lives::Lives;
pub(crate) use nodes::{DeclaredLost, RemovedNode};
pub(crate) use pools::{Outlook, Retirement};
use replicas::Replicas;
pub(crate) use reuse::{Similar, judge};
use sweeps::Sweeps;

/// The two clocks a rule may need: wall time as a label, this machine's boot time for leases.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    pub(crate) wall: Timestamp,
    pub(crate) boot: Boot,
}

/// A job that somebody submits.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) request: String,
    pub(crate) id: JobId,
    /// Its owner is in it.
    pub(crate) spec: JobSpec,
    /// The last attempt of an earlier job of this name, which was removed; 0 if there was none.
    pub(crate) after: Epoch,
    /// Of a sweep that extends another one: the trials of that; of a pipeline that goes on where another ended: that.
    pub(crate) earlier: Vec<JobRecord>,
}

/// Whether an outcome or a log of a replica is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It is the latest attempt and its outcome is not in.
    Open,
    /// Its outcome is in.
    Settled,
    /// A later attempt, or a loss, took its place.
    Fenced,
    /// A later attempt than any on record: it is taken over when its node proves that it was given.
    Ahead,
    /// The job ended or never existed: only the store knows.
    Unknown,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Book {
    jobs: Jobs,
    line: Line,
    fleet: Fleet,
    leases: Leases,
    /// What one user may have at a time.
    limits: UserLimits,
    gangs: Gangs,
    replicas: Replicas,
    strangers: Strangers,
    lives: Lives,
    predecessors: Predecessors,
    /// What is known of the trials of sweeps.
    sweeps: Sweeps,
    /// Steps of pipelines that may not need to run.
    reuses: reuse::Reuses,
    /// The names of data.
    names: Register,
    /// Machines that are made or could be.
    prospects: Vec<Prospect>,
    /// Wishes about the environments that nodes keep, each while somebody waits for it.
    wishes: environments::Wishes,
    /// Documents that are only written to the disk, and not used here.
    passing: Changes,
    kept: kept::KeptResults,
    /// Why nothing is placed now: the machine is about to be shut down.
    closed: Option<Arc<str>>,
    /// There is a decision that must be on disk before it is reported.
    urgent: bool,
    /// Something changed that decides where jobs are placed.
    replan: bool,
}

impl Book {
    /// The book at the start of a controller. Every node counts as just heard and every lease as just answered,
    /// because neither is stored. `contact` is how long a node counts as connected after a report; `controller_epoch`
    /// is random.
    pub(crate) fn new(
        loaded: Loaded,
        contact: Duration,
        terms: Terms,
        controller_epoch: u64,
        now: Boot,
    ) -> Book {
        let nodes = loaded.all(|one| if let Document::Node(node) = one { Some(&**node) } else { None });
        let settled =
            loaded.all(|one| if let Document::Settled(settled) = one { Some(settled) } else { None });
        let lives = Lives::new(&loaded, format!("{controller_epoch:016x}"));
        let mut book = Book {
            jobs: Jobs::new(loaded.last_seq),
            line: Line::default(),
            fleet: Fleet::new(nodes, loaded.mended, contact, controller_epoch, now),
            leases: Leases::new(terms),
            limits: UserLimits::default(),
            gangs: Gangs::new(terms.gather),
            replicas: Replicas::new(settled),
            strangers: Strangers::default(),
            lives,
            predecessors: Predecessors::default(),
            sweeps: Sweeps::load(&loaded.jobs, &loaded.trials),
            reuses: reuse::Reuses::default(),
            names: Register::new(&loaded),
            prospects: Vec::new(),
            wishes: environments::Wishes::new(),
            passing: Changes::default(),
            kept: kept::KeptResults::default(),
            closed: None,
            urgent: false,
            replan: true,
        };
        for job in loaded.jobs {
            book.leases.grant(&job, None, if broken!(LeasesForgotten) { Boot::default() } else { now });
            #[cfg(test)]
            let job = if broken!(CancelForgotten) { uncanceled(job) } else { job };
            #[cfg(test)]
            let job = if broken!(ChangeForgotten) { change::forgotten(job) } else { job };
            #[cfg(test)]
            let job = if broken!(GoNotRecorded) { JobRecord { go: None, ..job } } else { job };
            book.gangs.load(&job, now);
            book.reuses.load(&job);
            book.take_place(&job);
            book.jobs.load(job);
        }
        book.mark_again();
        book.claim_indices_again();
        book.await_predecessors_again();
        book
    }

    /// Replicas that a release before grants placed count as placed now.
    fn mark_again(&mut self) {
        let unmarked = |job: &&Arc<JobRecord>| job.replicas.iter().any(|replica| replica.placed.is_none());
        let unmarked: Vec<JobId> = self.jobs.iter().filter(unmarked).map(|job| job.id.clone()).collect();
        for id in unmarked {
            let mark = self.lives.mark();
            self.jobs.edit(&id, |job| {
                for replica in &mut job.replicas {
                    replica.placed.get_or_insert(mark.clone());
                }
            });
            self.urgent = true;
        }
    }

    /// A job as it is on record takes its place: on its nodes, and in the line.
    fn take_place(&mut self, job: &JobRecord) {
        job.replicas.iter().for_each(|replica| self.fleet.assign(&replica.node, &job.id));
        job.replicas.iter().for_each(|replica| self.fleet.note(replica, &job.spec));
        if job.state == JobState::Queued || job.has_waiting_tasks() {
            self.line.join(job);
        }
    }

    /// The same with limits for each user.
    pub(crate) fn with_limits(self, limits: UserLimits) -> Book {
        Book { limits, ..self }
    }

    /// The job, if it has not ended or ended just now.
    pub(crate) fn job(&self, id: &JobId) -> Option<&Arc<JobRecord>> {
        self.jobs.find(id)
    }

    /// Every job that has not ended.
    pub(crate) fn jobs(&self) -> impl Iterator<Item = &Arc<JobRecord>> {
        self.jobs.iter()
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = &NodeState> {
        self.fleet.iter()
    }

    /// Why a job waits, or what its node does for it now.
    pub(crate) fn detail(&self, job: &JobRecord) -> String {
        if job.state.is_terminal() {
            return String::new();
        }
        if job.state == JobState::Queued || job.tasks.is_some() {
            return self.line.reason(&self.in_line(job.id.clone()));
        }
        // Of several ranks, the others wait for the one that is furthest behind.
        let open = job.replicas.iter().filter(|replica| replica.end.is_none());
        let silent = |replica: &&ReplicaRecord| !self.fleet.is_heard(&replica.node);
        let told = match job.state {
            JobState::NotResponding(_) => open.clone().find(silent).or_else(|| open.clone().next()),
            _ => open.min_by_key(|replica| (replica.step, replica.ready.is_some())),
        };
        let Some(replica) = told else { return String::new() };
        let said = match replica.step {
            _ if matches!(job.state, JobState::NotResponding(_)) => {
                format!("{} does not answer; the job goes on there", replica.node)
            }
            None => match self.fleet.get(&replica.node).and_then(NodeState::failed_check) {
                None => format!("waiting for {} to take it", replica.node),
                Some(check) => format!("waiting for {} to take it, which {check}", replica.node),
            },
            Some(step) if replica.detail.is_empty() => step.describe().to_owned(),
            Some(_) => replica.detail.clone(),
        };
        match job.spec.resources.nodes {
            1 => said,
            ranks => format!("rank {} of {ranks}: {said}", replica.rank),
        }
    }

    /// Puts a job in line. The same request gives the same job; `None` when the name is taken.
    pub(crate) fn submit(&mut self, new: Submission, now: Moment) -> Option<JobId> {
        if let Some(id) = self.jobs.submitted(&new.request) {
            return Some(id.clone());
        }
        if self.job(&new.id).is_some() || self.strangers.have(&new.id) {
            return None;
        }
        let id = new.id;
        let waits_for = new.spec.predecessors.clone();
        let mut tasks = new.spec.array.as_ref().map(|array| Box::new(ArrayRecord::new(array, new.after)));
        let steps = tasks.as_mut().and_then(|tasks| pipelines::begin(&new.spec, &new.earlier, tasks));
        let owner = new.spec.owner.clone().map_or_else(|| "somebody".to_owned(), |owner| owner.to_string());
        self.sweeps.begin(&id, &new.spec);
        new.earlier.iter().for_each(|trial| self.sweeps.learn(&id, trial));
        let job = self.jobs.add(JobRecord {
            epoch: new.after,
            uncharged: new.after.0,
            waits_for,
            tasks,
            steps,
            ..JobRecord::new(id.clone(), new.request, new.spec, now.wall)
        });
        self.line.join(job);
        self.await_predecessors(&id);
        (self.urgent, self.replan) = (true, true);
        self.jobs.tell(&id, None, now, format!("queued by {owner}"));
        Some(id)
    }

    /// Asks for the end of a job; `None` when it is not active. Asking again changes nothing.
    pub(crate) fn cancel(&mut self, id: &JobId, who: &str, now: Moment) -> Option<()> {
        self.begin_task(id, now);
        if self.jobs.get(id).is_none() {
            return self.job(id).map(|_| ());
        }
        if !self.jobs.advance(id, JobEvent::CancelRequested) {
            return Some(()); // its verdict is fixed
        }
        let reason = format!("canceled by {who}");
        self.jobs.tell(id, None, now, reason.clone());
        self.urgent = true;
        self.jobs.edit(id, |job| job.cancel = Some(reason));
        let ended = self.jobs.state(id) == Some(JobState::Canceled);
        self.cancel_tasks(id, who, now);
        if ended {
            let outcome = without_run(Verdict::Canceled, None, now.wall);
            self.end(id, outcome, now);
        }
        Some(())
    }

    /// Marks a job that ended as removed; false when a job of that name has not ended, or its end is not written.
    pub(crate) fn remove(&mut self, job: JobRecord, now: Moment) -> bool {
        let ended = self.jobs.get(&job.id).is_none() && job.state.is_terminal();
        if ended {
            self.kept.has_been_removed(&job.id, job.epoch);
            self.jobs.remove(job, now);
            self.urgent = true;
        }
        ended
    }

    /// The standing of a replica on `node`.
    pub(crate) fn standing(&self, replica: &ReplicaId, node: &NodeId) -> Standing {
        if self.replicas.is_settled(replica) {
            return Standing::Settled;
        }
        let Some(job) = self.jobs.get(&replica.job) else { return Standing::Unknown };
        if broken!(NoEpochCheck) {
            return Standing::Open;
        }
        let ours = |known: &&ReplicaRecord| job.epoch == replica.epoch && known.node == *node;
        if let Some(known) = job.rank(replica.rank).filter(ours) {
            match known.end {
                None => Standing::Open,
                Some(RankEnd::Told(_)) => Standing::Settled,
                Some(RankEnd::Lost { .. }) => Standing::Fenced,
            }
        } else if adopt::is_ahead(job, replica) {
            Standing::Ahead
        } else {
            Standing::Fenced
        }
    }

    /// Whether logs of a replica are accepted: those of any attempt so far, until the replica's outcome is in.
    pub(crate) fn wants_log(&self, replica: &ReplicaId) -> Standing {
        if self.replicas.is_settled(replica) {
            return Standing::Settled;
        }
        match self.jobs.get(&replica.job) {
            None => Standing::Unknown,
            Some(_) if replica.epoch == Epoch(0) => Standing::Fenced,
            Some(job) if adopt::is_ahead(job, replica) => Standing::Ahead,
            Some(_) => Standing::Open,
        }
    }

    /// Takes in the outcome of a replica; returns its standing before that.
    pub(crate) fn settle(
        &mut self,
        replica: &ReplicaId,
        node: &NodeId,
        outcome: Outcome,
        now: Moment,
    ) -> Standing {
        let standing = self.standing(replica, node);
        let Some(job) = self.jobs.get(&replica.job).filter(|_| standing == Standing::Open) else {
            return standing;
        };
        let named = job.rank(replica.rank).is_some_and(|rank| rank.step.is_some());
        self.replicas.settle(replica, node, named);
        let id = &replica.job;
        self.jobs.tell(id, Some(node), now, ranks::describe(&outcome));
        if let Some(stored) = outcome.artifacts {
            self.jobs.tell(id, Some(node), now, format!("stored {stored}"));
        }
        self.judge_start(node, id, &outcome, now);
        self.jobs.edit(id, |job| job.started_at = outcome.started_at.or(job.started_at));
        self.end_rank(replica, RankEnd::Told(outcome), now);
        Standing::Open
    }

    /// A rank has ended; with the last rank the attempt ends.
    fn end_rank(&mut self, replica: &ReplicaId, end: RankEnd, now: Moment) {
        let (id, end) = (&replica.job, self.explain_end(replica, end));
        self.urgent = true;
        self.leases.end_run(replica);
        self.jobs.edit(id, |job| {
            let ours = job.replicas.iter_mut().find(|known| known.rank == replica.rank);
            ours.into_iter().for_each(|known| known.end = Some(end.clone()));
        });
        let Some(job) = self.jobs.get(id) else { return };
        let Some(ranks::Joined { mut outcome, lost, node }) = ranks::join(job, now.wall) else { return };
        let retry = outcome.fault.as_ref().is_some_and(|fault| job.may_retry(fault));
        self.uncharge(id, outcome.fault.as_ref());
        if lost {
            self.jobs.advance(id, JobEvent::LeaseExpired);
            self.jobs.advance(id, JobEvent::GraceOver { retry });
        } else {
            self.jobs.advance(id, JobEvent::SeenAgain);
            let event = match outcome.verdict {
                Verdict::Completed => JobEvent::AllSucceeded,
                Verdict::Failed => JobEvent::ReplicaFailed { retry },
                Verdict::Canceled => JobEvent::ReplicaCanceled,
            };
            self.jobs.advance(id, event);
        }
        if self.jobs.state(id) == Some(JobState::Queued) {
            self.keep_left(id, now);
            let unexplained = || Fault::new(Code::Bug, "the attempt failed without a fault");
            self.requeue(id, &outcome.fault.unwrap_or_else(unexplained), node, now);
        } else {
            let stored = outcome.fault.as_ref().is_none_or(|fault| fault.code != Code::OutputsUnstored);
            self.jobs.advance(id, if stored { JobEvent::OutputsStored } else { JobEvent::OutputsLost });
            outcome.verdict = self.jobs.verdict(id);
            self.end(id, outcome, now);
        }
    }

    /// The outputs of a job that ended without them have been stored. Its verdict does not change.
    pub(crate) fn stored_later(&mut self, mut job: JobRecord, node: &NodeId, stored: Artifacts, now: Moment) {
        let Some(outcome) = job.outcome.as_mut() else { return };
        outcome.artifacts = Some(stored);
        if let Some(fault) = outcome.fault.as_mut().filter(|fault| fault.code == Code::OutputsUnstored) {
            fault.why.push("they were stored later, when somebody asked for it".to_owned());
            fault.fix = Some(format!("get them: agentctl download {}", job.id));
        }
        self.jobs.amend(job, node, now, format!("stored {stored}, later"));
        self.urgent = true;
    }

    /// The job reached its terminal state.
    fn end(&mut self, id: &JobId, mut outcome: Outcome, now: Moment) {
        if self.jobs.state(id) == Some(JobState::Failed) && outcome.fault.is_none() {
            let fault = Fault::new(Code::Bug, "the job failed, and its node did not say why");
            outcome.fault = Some(fault.fix("the log may say it: `agentctl logs`"));
        }
        self.leave_node(id);
        self.leave_line(id);
        self.replan = true;
        self.jobs.edit(id, |job| {
            job.ended_at = Some(now.wall);
            job.outcome = Some(outcome);
            // An outcome that the node of a lost rank still delivers is fenced.
            job.replicas.retain(|replica| !matches!(replica.end, Some(RankEnd::Lost { .. })));
            job.tasks.iter_mut().for_each(|tasks| tasks.give_up());
        });
        self.name_outputs(id, now);
        self.sweeps.end(id);
        self.predecessors.has_ended(id, self.jobs.verdict(id));
        self.end_unstarted(id);
        let state = self.jobs.state(id).map_or("", JobState::name);
        self.jobs.tell(id, None, now, format!("ended: {state}"));
        self.settle_task(id, now);
    }

    fn leave_line(&mut self, id: &JobId) {
        self.jobs.get(id).into_iter().for_each(|job| self.line.leave(job));
    }

    fn leave_node(&mut self, id: &JobId) {
        self.leases.end(id);
        self.gangs.end(id);
        self.replicas.end(id);
        let replicas = self.jobs.get(id).into_iter().flat_map(|job| &job.replicas);
        replicas.for_each(|replica| self.fleet.release(&replica.node, id));
    }

    /// There is a decision that must be on disk before it is reported.
    pub(crate) fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// Something is not on disk yet.
    pub(crate) fn is_dirty(&self) -> bool {
        let written = self.jobs.is_written() && self.fleet.is_written() && self.replicas.is_written();
        !(written && self.names.is_written() && self.lives.is_written())
    }

    /// Asks for the next commit to happen at once.
    pub(crate) fn hurry(&mut self) {
        self.urgent |= self.is_dirty();
    }

    /// Everything that is not on disk yet. It stays listed until [`Book::retire`].
    pub(crate) fn changes(&self) -> Changes {
        let mut changes = Changes::default();
        self.jobs.collect(&mut changes);
        self.fleet.collect(&mut changes);
        self.replicas.collect(&mut changes);
        self.names.collect(&mut changes);
        self.lives.collect(&mut changes);
        changes.documents.extend(self.passing.documents.iter().cloned());
        changes.dropped.extend(self.passing.dropped.iter().cloned());
        changes
    }

    /// Writes documents, and removes others, that the book does not use.
    pub(crate) fn write(&mut self, documents: Vec<Document>, dropped: Vec<String>) {
        self.urgent = true;
        self.passing.documents.extend(documents);
        self.passing.dropped.extend(dropped);
    }

    /// Everything is on disk: jobs that ended leave the book.
    pub(crate) fn retire(&mut self) {
        self.jobs.written();
        self.fleet.written();
        self.replicas.written();
        self.names.written();
        self.lives.written();
        self.passing = Changes::default();
        self.urgent = false;
    }

    /// The next moment at which a rule applies without a message: a lease ends, or a job's date comes.
    pub(crate) fn next_alarm(&self, now: Moment) -> Option<Boot> {
        let date =
            self.line.next_date(self.fleet.unheard().is_none()).map(|date| now.boot + date.since(now.wall));
        self.fleet
            .next_silence()
            .into_iter()
            .chain(self.leases.next())
            .chain(self.gangs.next())
            .chain(self.next_preemption(now))
            .chain(self.next_sweep_end(now))
            .chain(self.next_hold_end(now))
            .chain(self.reuses.next(now))
            .chain(date)
            .min()
    }
}

/// The longest time a job takes its place once its command runs: its time limit, its grace period, and storing its
/// outputs.
pub(super) fn longest(spec: &JobSpec) -> Option<Duration> {
    const OUTPUTS: Duration = Duration::from_secs(60);
    Some(spec.limits.timeout? + spec.limits.grace() + OUTPUTS)
}

/// The outcome of a job that ended without one from a node.
pub(crate) fn without_run(verdict: Verdict, fault: Option<Fault>, ended_at: Timestamp) -> Outcome {
    Outcome {
        verdict,
        exit: None,
        fault,
        started_at: None,
        ended_at,
        streams: Vec::new(),
        tracking_bytes: 0,
        tracking: None,
        artifacts: None,
        usage: None,
        environment: None,
        left_out: Vec::new(),
    }
}

/// The record as a controller that forgets cancels would load it.
#[cfg(test)]
fn uncanceled(mut job: JobRecord) -> JobRecord {
    if job.state == JobState::Finalizing(Verdict::Canceled) {
        (job.state, job.cancel) = (JobState::Running, None);
    }
    job
}

#[cfg(test)]
mod tests;
