//! The jobs that have not ended and the nodes, in memory, and every rule that changes them.
//!
//! Pure: messages and the time go in; changed records, history and waiting reasons come out through
//! [`Book::take_changes`]. A job's state moves through `JobState::after` only. Invariants: every placed job
//! has the epoch of its replicas; an outcome counts once; a terminal job is never touched again and leaves
//! the book when it is written ([`Book::retire`]).
//!
//! Owned by the one task of `queue`; nobody else sees it.

mod adopt;
mod environments;
mod nodes;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::lease::{Contacts, Leases};
use crate::scheduler::{self, Pending, Wait};
use crate::store::{Changes, Event, JobRecord, Loaded, ReplicaRecord};
use agent_model::job::Priority;
use agent_model::lease::Terms;
use agent_model::machine::Liveness;
use agent_model::{
    Artifacts, Boot, Code, Epoch, ExitStatus, Fault, JobEvent, JobId, JobSpec, JobState, NodeId, Outcome,
    ReplicaId, Retry, Timestamp, Verdict,
};
pub(crate) use environments::{Wish, WishState};
pub(crate) use nodes::{DeclaredLost, Held, NodeState, Report};

/// How many ended jobs stay in memory, so that a repeated submission that crosses the end of its job in
/// flight still finds it.
const RECENT: usize = 64;

/// The two clocks a rule may need: wall time as a label, this machine's boot time for leases.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    pub(crate) wall: Timestamp,
    pub(crate) boot: Boot,
}

/// A job someone wants to have run.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) request: String,
    pub(crate) id: JobId,
    pub(crate) spec: JobSpec,
    /// Who asks, for people: `uid 1000`.
    pub(crate) who: String,
}

/// What the book says to an outcome or a log of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It is the latest attempt and its outcome is not in.
    Open,
    /// Its outcome is in.
    Settled,
    /// A later attempt, or a loss, took its place.
    Fenced,
    /// A later attempt than any on record: it is taken over with the next report of its node.
    Ahead,
    /// The job ended or never was: only the store knows.
    Unknown,
}

/// A replica whose outcome is in and that its node may still hold.
#[derive(Debug)]
struct Settled {
    node: NodeId,
    /// The node named it in a report.
    named: bool,
    /// Reports without it, one after the other.
    absent: u8,
}

impl Settled {
    /// Takes in a report; true when the node holds the replica no more.
    ///
    /// One report without a replica that was never named may be older than its outcome; two are not.
    fn hear(&mut self, held: bool) -> bool {
        self.named |= held;
        self.absent = if held { 0 } else { self.absent.saturating_add(1) };
        self.absent >= if self.named { 1 } else { 2 }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Book {
    jobs: BTreeMap<JobId, Arc<JobRecord>>,
    /// The line: high priority first, then in the order of submission.
    waiting: BTreeSet<(Reverse<Priority>, u64, JobId)>,
    /// Those in line whose next attempt has a date.
    dates: BTreeMap<JobId, Timestamp>,
    reasons: HashMap<JobId, Wait>,
    requests: HashMap<String, JobId>,
    recent: VecDeque<Arc<JobRecord>>,
    nodes: BTreeMap<NodeId, NodeState>,
    settled: BTreeMap<ReplicaId, Settled>,
    /// What nodes hold and nobody here knows.
    strangers: BTreeMap<ReplicaId, adopt::Stranger>,
    /// After a loss: the nodes that must be heard before anything is placed.
    awaited: BTreeSet<NodeId>,
    /// Replicas of canceled jobs that no node has named yet, and when, by its clock, their node sent the first
    /// report after the cancel.
    withdrawn: BTreeMap<ReplicaId, Boot>,
    /// What is wanted of the environments that nodes keep, while somebody waits for it.
    wishes: environments::Wishes,
    contacts: Contacts,
    leases: Leases,
    last_seq: u64,
    /// The last one that a node was given; see [`nodes`].
    life: u64,
    dirty_jobs: BTreeSet<JobId>,
    dirty_nodes: BTreeSet<NodeId>,
    /// Jobs that ended before, of which something more is known by now.
    amended: BTreeMap<JobId, Arc<JobRecord>>,
    changes: Changes,
    urgent: bool,
    replan: bool,
}

impl Book {
    /// What a controller starts from. Every node counts as just heard and every lease as just answered:
    /// neither is remembered. `contact` is how long a node counts as connected after a report; `life` is random.
    pub(crate) fn new(loaded: Loaded, contact: Duration, terms: Terms, life: u64, now: Boot) -> Book {
        let mut book = Book {
            jobs: BTreeMap::new(),
            waiting: BTreeSet::new(),
            dates: BTreeMap::new(),
            reasons: HashMap::new(),
            requests: HashMap::new(),
            recent: VecDeque::new(),
            nodes: BTreeMap::new(),
            settled: BTreeMap::new(),
            strangers: BTreeMap::new(),
            awaited: BTreeSet::new(),
            withdrawn: BTreeMap::new(),
            wishes: environments::Wishes::new(),
            contacts: Contacts::new(contact),
            leases: Leases::new(terms),
            last_seq: loaded.last_seq,
            life,
            dirty_jobs: BTreeSet::new(),
            dirty_nodes: BTreeSet::new(),
            amended: BTreeMap::new(),
            changes: Changes::default(),
            urgent: false,
            replan: true,
        };
        for (replica, node) in loaded.settled {
            book.settled.insert(replica, Settled { node, named: true, absent: 0 });
        }
        for node in loaded.nodes {
            if matches!(node.liveness, Liveness::Ready | Liveness::Degraded) {
                book.contacts.renew(&node.id, now);
            }
            if loaded.mended && !matches!(node.liveness, Liveness::Down | Liveness::Removed) {
                book.awaited.insert(node.id.clone());
            }
            book.nodes.insert(node.id.clone(), NodeState::new(node, life));
        }
        for job in loaded.jobs {
            book.leases.grant(&job, None, if broken!(LeasesForgotten) { Boot::default() } else { now });
            #[cfg(test)]
            let job = if broken!(CancelForgotten) { uncanceled(job) } else { job };
            book.admit(job);
        }
        book
    }

    fn admit(&mut self, job: JobRecord) {
        for replica in &job.replicas {
            if let Some(node) = self.nodes.get_mut(&replica.node) {
                node.jobs.insert(job.id.clone());
            }
        }
        if job.state == JobState::Queued {
            self.waiting.insert(place_in_line(&job));
        }
        if let Some(date) = job.not_before {
            self.dates.insert(job.id.clone(), date);
        }
        self.requests.insert(job.request.clone(), job.id.clone());
        self.jobs.insert(job.id.clone(), Arc::new(job));
    }

    /// The job, if it has not ended or ended just now.
    pub(crate) fn job(&self, id: &JobId) -> Option<&Arc<JobRecord>> {
        self.jobs.get(id).or_else(|| self.recent.iter().find(|job| job.id == *id))
    }

    /// Every job that has not ended.
    pub(crate) fn jobs(&self) -> impl Iterator<Item = &Arc<JobRecord>> {
        self.jobs.values()
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.values()
    }

    /// Why a job waits, or what its node does for it now.
    pub(crate) fn detail(&self, job: &JobRecord) -> String {
        if job.state == JobState::Queued {
            return self.reasons.get(&job.id).map(Wait::to_string).unwrap_or_default();
        }
        if job.state.is_terminal() {
            return String::new();
        }
        let Some(replica) = job.replicas.first() else { return String::new() };
        if matches!(job.state, JobState::NotResponding(_)) {
            return format!("{} does not answer; the job goes on there", replica.node);
        }
        match replica.step {
            None => format!("waiting for {} to take it", replica.node),
            Some(step) if replica.detail.is_empty() => step.describe().to_owned(),
            Some(_) => replica.detail.clone(),
        }
    }

    /// The job that a request made, if it has not ended or ended just now.
    fn submitted(&self, request: &str) -> Option<&JobId> {
        let recent = || self.recent.iter().find(|job| job.request == request).map(|job| &job.id);
        self.requests.get(request).or_else(recent)
    }

    /// Puts a job in line. The same request gives the same job; a name that is taken is `None`.
    pub(crate) fn submit(&mut self, new: Submission, now: Moment) -> Option<JobId> {
        if let Some(id) = self.submitted(&new.request) {
            return Some(id.clone());
        }
        if self.job(&new.id).is_some() || self.is_stranger(&new.id) {
            return None;
        }
        self.last_seq += 1;
        let id = new.id;
        self.admit(JobRecord {
            id: id.clone(),
            seq: self.last_seq,
            request: new.request,
            spec: new.spec,
            state: JobState::Queued,
            epoch: Epoch::default(),
            uncharged: 0,
            not_before: None,
            avoid: None,
            submitted_at: now.wall,
            started_at: None,
            ended_at: None,
            cancel: None,
            replicas: Vec::new(),
            outcome: None,
        });
        self.urgent = true;
        self.replan = true;
        self.dirty_jobs.insert(id.clone());
        self.tell(&id, None, now, format!("queued by {}", new.who));
        Some(id)
    }

    /// Asks for the end of a job; `None` when it is not active. Asking again changes nothing.
    pub(crate) fn cancel(&mut self, id: &JobId, who: &str, now: Moment) -> Option<()> {
        if !self.jobs.contains_key(id) {
            return self.job(id).map(|_| ());
        }
        if !self.advance(id, JobEvent::CancelRequested) {
            return Some(()); // its verdict is fixed
        }
        let reason = format!("canceled by {who}");
        self.tell(id, None, now, reason.clone());
        self.urgent = true;
        self.edit(id, |job| job.cancel = Some(reason));
        if self.state(id) == Some(JobState::Canceled) {
            let outcome = without_run(Verdict::Canceled, None, now.wall);
            self.end(id, outcome, now);
        }
        Some(())
    }

    /// How a replica on `node` stands.
    pub(crate) fn standing(&self, replica: &ReplicaId, node: &NodeId) -> Standing {
        if self.settled.contains_key(replica) {
            return Standing::Settled;
        }
        let Some(job) = self.jobs.get(&replica.job) else { return Standing::Unknown };
        if broken!(NoEpochCheck) {
            return Standing::Open;
        }
        let ours = |r: &ReplicaRecord| r.rank == replica.rank && r.node == *node;
        if job.epoch == replica.epoch && job.replicas.iter().any(ours) {
            Standing::Open
        } else if adopt::is_ahead(job, replica) {
            Standing::Ahead
        } else {
            Standing::Fenced
        }
    }

    /// Whether logs of a replica are wanted: those of any attempt there was, until its outcome is in.
    pub(crate) fn wants_log(&self, replica: &ReplicaId) -> Standing {
        if self.settled.contains_key(replica) {
            return Standing::Settled;
        }
        match self.jobs.get(&replica.job) {
            None => Standing::Unknown,
            Some(_) if replica.epoch == Epoch(0) => Standing::Fenced,
            Some(job) if adopt::is_ahead(job, replica) => Standing::Ahead,
            Some(_) => Standing::Open,
        }
    }

    /// Takes in what came of a replica; the answer is how it stood before.
    pub(crate) fn settle(
        &mut self,
        replica: &ReplicaId,
        node: &NodeId,
        mut outcome: Outcome,
        now: Moment,
    ) -> Standing {
        let standing = self.standing(replica, node);
        let Some(job) = self.jobs.get(&replica.job).cloned().filter(|_| standing == Standing::Open) else {
            return standing;
        };
        let id = &job.id;
        self.urgent = true;
        let named = job.replicas.iter().any(|r| r.rank == replica.rank && r.step.is_some());
        self.settled.insert(replica.clone(), Settled { node: node.clone(), named, absent: 0 });
        self.changes.settled.push((replica.clone(), node.clone()));
        self.advance(id, JobEvent::SeenAgain);
        let retry = outcome.fault.as_ref().is_some_and(|fault| may_retry(&job, fault));
        self.advance(
            id,
            match outcome.verdict {
                Verdict::Completed => JobEvent::AllSucceeded,
                Verdict::Failed => JobEvent::ReplicaFailed { retry },
                Verdict::Canceled => JobEvent::ReplicaCanceled,
            },
        );
        self.tell(id, Some(node), now, describe(&outcome));
        if let Some(stored) = outcome.artifacts {
            self.tell(id, Some(node), now, format!("stored {} files, {} bytes", stored.files, stored.bytes));
        }
        self.edit(id, |job| job.started_at = outcome.started_at.or(job.started_at));
        if self.state(id) == Some(JobState::Queued) {
            let unexplained = || Fault::new(Code::Bug, "the attempt failed without a fault");
            self.requeue(id, &outcome.fault.unwrap_or_else(unexplained), now);
        } else {
            let stored = outcome.fault.as_ref().is_none_or(|fault| fault.code != Code::OutputsUnstored);
            self.advance(id, if stored { JobEvent::OutputsStored } else { JobEvent::OutputsLost });
            outcome.verdict = self.verdict(id);
            self.end(id, outcome, now);
        }
        Standing::Open
    }

    /// The outputs of a job that ended without are stored by now. How it ended stays as it is.
    pub(crate) fn stored_later(&mut self, mut job: JobRecord, node: &NodeId, stored: Artifacts, now: Moment) {
        let Some(outcome) = job.outcome.as_mut() else { return };
        outcome.artifacts = Some(stored);
        if let Some(fault) = outcome.fault.as_mut().filter(|fault| fault.code == Code::OutputsUnstored) {
            fault.why.push("they were stored later, when somebody asked for it".to_owned());
            fault.fix = Some(format!("get them: agentctl download {}", job.id));
        }
        let text = format!("stored {} files, {} bytes, later", stored.files, stored.bytes);
        let (id, epoch) = (job.id.clone(), job.epoch);
        self.changes.events.push(Event { job: id, at: now.wall, epoch, node: Some(node.clone()), text });
        let job = Arc::new(job);
        for known in self.recent.iter_mut().filter(|known| known.id == job.id) {
            *known = Arc::clone(&job);
        }
        self.amended.insert(job.id.clone(), job);
        self.urgent = true;
    }

    /// Places what can be placed, if anything changed since the last time.
    pub(crate) fn schedule(&mut self, now: Moment) {
        let waited = self.dates.len();
        self.dates.retain(|_, date| *date > now.wall);
        if !std::mem::take(&mut self.replan) && self.dates.len() == waited {
            return;
        }
        let mut pending = Vec::with_capacity(self.waiting.len());
        let mut waiting = Vec::new();
        for job in self.waiting.iter().filter_map(|(_, _, id)| self.jobs.get(id)) {
            if let Some(nodes) = self.unheard() {
                waiting.push((job.id.clone(), Wait::Unheard { nodes }));
            } else if self.dates.contains_key(&job.id) {
                waiting.push((job.id.clone(), Wait::Date));
            } else {
                pending.push(Pending {
                    job: job.id.clone(),
                    wants: job.spec.resources.clone(),
                    python: scheduler::python_of(&job.spec.environment).map(str::to_owned),
                    avoid: job.avoid.clone(),
                });
            }
        }
        let rooms = self.nodes.values().map(|node| self.room(node)).collect();
        let decided = scheduler::place(&pending, rooms, &self.pythons());
        for (job, node) in decided.placed {
            self.place(&job, &node, now);
        }
        for (job, reason) in waiting.into_iter().chain(decided.waiting) {
            let new = self.reasons.get(&job).is_none_or(|before| before.differs_in_kind(&reason));
            if new {
                self.tell(&job, None, now, format!("waits: {reason}"));
            }
            self.reasons.insert(job, reason);
        }
    }

    fn place(&mut self, id: &JobId, node: &NodeId, now: Moment) {
        if !self.advance(id, JobEvent::Placed) {
            return;
        }
        let boot_id = self.nodes.get(node).map(|node| node.record.boot_id.clone()).unwrap_or_default();
        self.edit(id, |job| {
            job.epoch = job.epoch.next();
            job.not_before = None;
            job.started_at = None;
            let replica =
                ReplicaRecord { rank: 0, node: node.clone(), boot_id, step: None, detail: String::new() };
            job.replicas = vec![replica];
        });
        let Some(job) = self.jobs.get(id) else { return };
        let attempt = job.epoch;
        self.leases.grant(job, self.nodes.get(node).and_then(|node| node.sent), now.boot);
        self.waiting.remove(&place_in_line(job));
        self.reasons.remove(id);
        if let Some(node) = self.nodes.get_mut(node) {
            node.jobs.insert(id.clone());
        }
        self.urgent = true;
        self.tell(id, Some(node), now, format!("placed on {node} as attempt {attempt}"));
    }

    /// Back in line after a failed or lost attempt.
    fn requeue(&mut self, id: &JobId, fault: &Fault, now: Moment) {
        self.leave_node(id);
        let Some(job) = self.jobs.get(id) else { return };
        let next = u32::try_from(job.epoch.0 + 1).unwrap_or(u32::MAX);
        let wait = match fault.retry {
            Retry::SameNode => Duration::ZERO,
            Retry::After(at_least) => job.spec.retry.wait_before(next).max(at_least),
            Retry::Never | Retry::OtherNode => job.spec.retry.wait_before(next),
        };
        let last = job.replicas.first().map(|replica| replica.node.clone());
        let line = place_in_line(job);
        self.edit(id, |job| {
            job.avoid = last.filter(|_| fault.retry == Retry::OtherNode);
            job.not_before = Some(now.wall + wait);
            job.replicas.clear();
        });
        self.dates.insert(id.clone(), now.wall + wait);
        self.waiting.insert(line);
        self.replan = true;
        let when = if wait.is_zero() { "now".to_owned() } else { format!("in {} s", wait.as_secs_f32()) };
        self.tell(id, None, now, format!("attempt {next} may start {when}"));
    }

    /// The job reached its terminal state.
    fn end(&mut self, id: &JobId, mut outcome: Outcome, now: Moment) {
        if self.state(id) == Some(JobState::Failed) && outcome.fault.is_none() {
            let fault = Fault::new(Code::Bug, "the job failed, and its node did not say why");
            outcome.fault = Some(fault.fix("the log may say it: `agentctl logs`"));
        }
        self.leave_node(id);
        let Some(line) = self.jobs.get(id).map(|job| place_in_line(job)) else { return };
        self.waiting.remove(&line);
        self.dates.remove(id);
        self.reasons.remove(id);
        self.replan = true;
        self.edit(id, |job| {
            job.ended_at = Some(now.wall);
            job.outcome = Some(outcome);
        });
        let state = self.state(id).map_or("", JobState::name);
        self.tell(id, None, now, format!("ended: {state}"));
    }

    fn leave_node(&mut self, id: &JobId) {
        self.leases.end(id);
        self.withdrawn.retain(|replica, _| replica.job != *id);
        for replica in self.jobs.get(id).map(|job| job.replicas.clone()).unwrap_or_default() {
            if let Some(node) = self.nodes.get_mut(&replica.node) {
                node.jobs.remove(id);
            }
            self.rest(&replica.node);
        }
    }

    /// Something was decided that must be on disk before anybody hears of it.
    pub(crate) fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// Something is not on disk yet.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty_jobs.is_empty() || !self.dirty_nodes.is_empty() || !self.changes.is_empty()
    }

    /// Asks for the next commit to happen at once.
    pub(crate) fn hurry(&mut self) {
        self.urgent |= self.is_dirty();
    }

    /// Everything that is not on disk yet. It stays listed until [`Book::retire`].
    pub(crate) fn changes(&mut self) -> Changes {
        let mut changes = self.changes.clone();
        let dirty = self.dirty_jobs.iter().filter_map(|id| self.jobs.get(id));
        changes.jobs = dirty.chain(self.amended.values()).cloned().collect();
        changes.nodes = self
            .dirty_nodes
            .iter()
            .filter_map(|id| self.nodes.get(id))
            .map(|node| node.record.clone())
            .collect();
        changes
    }

    /// Everything is on disk: jobs that ended leave.
    pub(crate) fn retire(&mut self) {
        for id in std::mem::take(&mut self.dirty_jobs) {
            if self.state(&id).is_some_and(JobState::is_terminal)
                && let Some(job) = self.jobs.remove(&id)
            {
                self.requests.remove(&job.request);
                self.recent.push_back(job);
            }
        }
        while self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        self.dirty_nodes.clear();
        self.amended.clear();
        self.changes = Changes::default();
        self.urgent = false;
    }

    /// The next moment at which a rule applies without a message: a lease ends, or a job's date comes.
    pub(crate) fn next_alarm(&self, now: Moment) -> Option<Boot> {
        let date = self.dates.values().min().map(|date| now.boot + date.since(now.wall));
        self.contacts.next().into_iter().chain(self.leases.next()).chain(date).min()
    }

    fn state(&self, id: &JobId) -> Option<JobState> {
        self.jobs.get(id).map(|job| job.state)
    }

    /// The verdict of a job that ended.
    fn verdict(&self, id: &JobId) -> Verdict {
        match self.state(id) {
            Some(JobState::Completed) => Verdict::Completed,
            Some(JobState::Canceled) => Verdict::Canceled,
            _ => Verdict::Failed,
        }
    }

    /// Moves a job's state; false when the event does not apply.
    fn advance(&mut self, id: &JobId, event: JobEvent) -> bool {
        let Some(next) = self.state(id).and_then(|state| state.after(event)) else { return false };
        self.edit(id, |job| job.state = next);
        true
    }

    fn edit(&mut self, id: &JobId, change: impl FnOnce(&mut JobRecord)) {
        if let Some(job) = self.jobs.get_mut(id) {
            change(Arc::make_mut(job));
            self.dirty_jobs.insert(id.clone());
        }
    }

    fn tell(&mut self, id: &JobId, node: Option<&NodeId>, now: Moment, text: String) {
        let epoch = self.jobs.get(id).map(|job| job.epoch).unwrap_or_default();
        self.changes.events.push(Event { job: id.clone(), at: now.wall, epoch, node: node.cloned(), text });
    }
}

fn place_in_line(job: &JobRecord) -> (Reverse<Priority>, u64, JobId) {
    (Reverse(job.spec.priority), job.seq, job.id.clone())
}

fn may_retry(job: &JobRecord, fault: &Fault) -> bool {
    job.cancel.is_none()
        && fault.retry != Retry::Never
        && job.epoch.0 - job.uncharged < u64::from(job.spec.retry.max_attempts)
}

/// The outcome of a job that ended without a word from a node.
fn without_run(verdict: Verdict, fault: Option<Fault>, ended_at: Timestamp) -> Outcome {
    Outcome {
        verdict,
        exit: None,
        fault,
        started_at: None,
        ended_at,
        streams: Vec::new(),
        tracking_bytes: 0,
        artifacts: None,
    }
}

fn describe(outcome: &Outcome) -> String {
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

/// What a controller that forgets cancels would start from.
#[cfg(test)]
fn uncanceled(mut job: JobRecord) -> JobRecord {
    if job.state == JobState::Finalizing(Verdict::Canceled) {
        (job.state, job.cancel) = (JobState::Running, None);
    }
    job
}

#[cfg(test)]
mod tests;
