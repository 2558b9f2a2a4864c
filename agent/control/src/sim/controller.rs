//! The controller of the simulation: the real [`Book`], driven as its task drives it.
//!
//! A turn applies one message, then the rules that need none, then writes if something was decided, then
//! answers. The process may die before the commit, and between the commit and the answers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use agent_model::job::{Change, Input, Priority};
use agent_model::machine::{Eligibility, EligibilityEvent};
use agent_model::protocol::log::{Splice, splice};
use agent_model::{Digest, JobState, NodeId, Outcome, ReplicaId, Timestamp, Verdict};

use super::disk::broken;
use super::mutant::{self, Mutant};
use super::node::terms;
use super::wish::OUT;
use super::world::{Event, Message, World};
use crate::lease::{Desired, Orders};
use crate::queue::assets::FoundOutputs;
use crate::queue::{Book, DeclaredLost, Moment, NodeState, Report, Retirement, Standing, Submission, judge};

/// How long a node counts as connected after a report.
const CONTACT: Duration = Duration::from_secs(45);
/// The session of a stream that only repeats old reports.
const NOBODY: u64 = 0;
/// How long a change that need not be durable at once may stay unwritten.
const LAZY: u64 = 1000;

/// One process of the controller.
pub(super) struct Controller {
    pub(super) controller_epoch: u64,
    book: Book,
    /// The process that speaks for each node.
    sessions: BTreeMap<NodeId, u64>,
    told: BTreeMap<NodeId, Orders>,
    owed: BTreeSet<NodeId>,
    flush: Option<u64>,
    alarm: Option<u64>,
}

/// An answer that is sent once everything is written.
enum Answer {
    Node(usize, u64, Box<Message>),
    Submitted(usize),
    Canceled(usize),
    Changed(usize),
}

impl World {
    fn moment(&self) -> Moment {
        Moment { wall: Timestamp(1_000_000_000_000 + self.now), boot: self.controller_clock.boot(self.now) }
    }

    pub(super) fn controller_starts(&mut self) {
        let controller_epoch = self.chance.below(u64::MAX >> 12);
        let book = Book::new(self.disk.load(), CONTACT, terms(), controller_epoch, self.moment().boot)
            .with_limits(self.limits);
        self.controller = Some(Controller {
            controller_epoch,
            book,
            sessions: BTreeMap::new(),
            told: BTreeMap::new(),
            owed: BTreeSet::new(),
            flush: None,
            alarm: None,
        });
        self.turn(|_, _| Vec::new());
        (0..self.nodes.len()).for_each(|node| self.perhaps_repeat(node, 300, 20_000));
    }

    /// Receives a copy of a report on a stream of its own, whose answers nobody reads.
    pub(super) fn controller_hears_again(&mut self, report: Report) {
        self.turn(|controller, world| {
            controller.sessions.insert(report.node.clone(), NOBODY);
            controller.hear(&report, world.moment());
            Vec::new()
        });
    }

    /// Its process has ended; another one will start.
    pub(super) fn controller_crashed(&mut self) {
        self.tally.faults += 1;
        self.disk.crash();
        let wait = self.chance.between(100, 30_000);
        self.after(wait, Event::ControllerStarts);
    }

    pub(super) fn alarm(&mut self, controller_epoch: u64) {
        if let Some(controller) =
            self.controller.as_mut().filter(|controller| controller.controller_epoch == controller_epoch)
        {
            controller.alarm = None;
            self.turn(|_, _| Vec::new());
        }
    }

    /// True when the process dies at this point.
    fn dies_here(&mut self) -> bool {
        self.is_faulty() && self.chance.per_mille(3)
    }

    fn turn(&mut self, work: impl FnOnce(&mut Controller, &mut World) -> Vec<Answer>) {
        let Some(mut controller) = self.controller.take() else { return };
        let answers = work(&mut controller, self);
        let now = self.moment();
        for replica in controller.book.unresolved() {
            controller.book.resolve(&replica, self.disk.jobs.get(&replica.job).map(|job| &**job));
        }
        for (step, record) in controller.book.reuse_questions() {
            let similar = self.disk.similar(&record);
            controller.book.resolve_reuse(&step, judge(&record, similar), now);
        }
        for (step, _) in controller.book.reuse_candidates() {
            let is_whole = self.chance.per_mille(900);
            controller.book.reuse_checked(&step, is_whole, now);
        }
        controller.book.expire(now);
        let sessions = &controller.sessions;
        controller.book.link(|node| sessions.contains_key(node));
        controller.book.schedule(now);
        let due = controller.flush.is_some_and(|at| at <= self.now);
        let write = controller.book.is_urgent() || due;
        if write {
            if self.dies_here() {
                return self.controller_crashed();
            }
            self.write(&mut controller);
            controller.flush = None;
            if self.dies_here() {
                return self.controller_crashed();
            }
        } else if controller.flush.is_none() && controller.book.is_dirty() {
            controller.flush = Some(self.now + LAZY);
        }
        self.publish(&mut controller);
        if write {
            controller.book.retire();
        }
        for answer in answers {
            match answer {
                Answer::Node(node, session, message) => self.tell_node(node, session, *message),
                Answer::Submitted(job) => self.wishes[job].submitted = true,
                Answer::Canceled(job) => self.wishes[job].canceled = true,
                Answer::Changed(job) => self.wishes[job].changed = true,
            }
        }
        let alarm = controller.book.next_alarm(now).map(|at| self.controller_clock.when(at));
        if let Some(at) = alarm.into_iter().chain(controller.flush).min() {
            let at = at.max(self.now + 1);
            if controller.alarm.is_none_or(|set| at < set || set <= self.now) {
                controller.alarm = Some(at);
                let controller_epoch = controller.controller_epoch;
                self.at(at, Event::Alarm { controller_epoch });
            }
        }
        self.controller = Some(controller);
    }

    fn write(&mut self, controller: &mut Controller) {
        let changes = controller.book.changes();
        for job in &changes.jobs {
            let before = self.disk.jobs.get(&job.id);
            if before.is_some_and(|before| before.state.is_placed() && job.state == JobState::Queued) {
                self.tally.lost += 1;
            }
            let placed = before.is_none_or(|before| before.epoch < job.epoch) && job.state.is_placed();
            for replica in job.replicas.iter().filter(|_| placed) {
                let open = |node: &&NodeState| node.record.id == replica.node;
                let node = controller.book.nodes().find(open);
                if node.is_none_or(|node| node.record.eligibility != Eligibility::Open) {
                    let how = format!("{} on {}", job.id, replica.node);
                    self.failure = broken::<()>("nothing is placed on a node that is closed", how).err();
                }
            }
        }
        let live = &self.live;
        let alive = |job: &agent_model::JobId| live.keys().any(|replica| replica.job == *job);
        if let Err(failure) = self.disk.commit(&changes, alive) {
            self.failure = Some(failure);
        }
    }

    fn publish(&mut self, controller: &mut Controller) {
        for node in 0..self.nodes.len() {
            let id = self.nodes[node].id.clone();
            let Some(session) = controller.sessions.get(&id).copied() else { continue };
            let mut orders = controller.book.orders(&id);
            let owed = controller.owed.remove(&id);
            let told = controller.told.get(&id);
            if !owed && told.is_some_and(|told| told.list == orders.list) {
                continue;
            }
            orders.revision = told.map_or(0, |told| told.revision) + 1;
            self.check_orders(&orders);
            self.tell_node(node, session, Message::Orders(orders.clone()));
            controller.told.insert(id, orders);
        }
    }

    fn check_orders(&mut self, orders: &Orders) {
        let mut epochs = BTreeMap::new();
        for order in orders.list.iter().filter(|order| order.desired != Desired::Forget) {
            let epoch = order.replica.epoch;
            if epochs.insert(&order.replica.job, epoch).is_some_and(|other| other != epoch) {
                let how = order.replica.to_string();
                self.failure = broken::<()>("orders never name two epochs of a job", how).err();
            }
        }
    }

    pub(super) fn controller_hears(&mut self, from: usize, message: Message) {
        match message {
            Message::Report { session, report } => {
                self.turn(|controller, world| controller.report(session, report, world.moment()));
            }
            Message::Append { replica, offset, data } => {
                self.turn(|controller, world| {
                    let answer = controller.append(world, replica, offset, data);
                    world.answer(from, answer)
                });
            }
            Message::Result { replica, outcome, written } => {
                self.turn(|controller, world| {
                    let answer = controller.result(world, from, replica, outcome, written);
                    world.answer(from, answer)
                });
            }
            _ => {}
        }
    }

    /// A call is answered over its own connection.
    fn answer(&self, to: usize, message: Message) -> Vec<Answer> {
        let session = self.nodes[to].agent.as_ref().map(|agent| agent.session);
        session.into_iter().map(|session| Answer::Node(to, session, Box::new(message.clone()))).collect()
    }

    pub(super) fn ask_submit(&mut self, job: usize) {
        self.turn(|controller, world| {
            let wish = &world.wishes[job];
            let new = Submission {
                request: wish.id.to_string(),
                id: wish.id.clone(),
                spec: wish.spec.clone(),
                after: agent_model::Epoch::default(),
                earlier: Vec::new(),
            };
            // Only the store knows a job that has ended.
            if !world.disk.jobs.contains_key(&new.id) {
                controller.book.submit(new, world.moment());
            }
            vec![Answer::Submitted(job)]
        });
    }

    pub(super) fn ask_cancel(&mut self, job: usize) {
        self.turn(|controller, world| {
            let id = &world.wishes[job].id;
            controller.book.cancel(id, "u", world.moment());
            let canceled = controller.book.job(id).is_some_and(|job| job.cancel.is_some());
            if canceled { vec![Answer::Canceled(job)] } else { Vec::new() }
        });
    }

    pub(super) fn ask_change(&mut self, job: usize) {
        self.turn(|controller, world| {
            let (id, change) =
                (&world.wishes[job].id, Change { priority: Some(Priority::High), ..Change::default() });
            let changed = controller.book.change(id, &change, "u", world.moment());
            if matches!(changed, Ok(true)) { vec![Answer::Changed(job)] } else { Vec::new() }
        });
    }

    /// False when there was no answer.
    pub(super) fn ask_eligibility(&mut self, node: usize, want: EligibilityEvent) -> bool {
        let mut done = false;
        let id = self.nodes[node].id.clone();
        self.turn(|controller, _| {
            done = controller.book.set_eligibility(&id, want).is_some();
            Vec::new()
        });
        done && self.controller.is_some()
    }

    /// Asks a node to retire; one that has is removed.
    pub(super) fn ask_retire(&mut self, node: usize) -> Option<Retirement> {
        let mut answer = None;
        let id = self.nodes[node].id.clone();
        self.turn(|controller, world| {
            let state = controller.book.retire_node(&id);
            if state == Retirement::Clear {
                controller.book.remove_node(&id, false, "its pool", world.moment());
            }
            answer = Some(state);
            Vec::new()
        });
        answer.filter(|_| self.controller.is_some())
    }

    pub(super) fn ask_declare_lost(&mut self, node: usize) -> Option<DeclaredLost> {
        let mut answer = None;
        let id = self.nodes[node].id.clone();
        self.turn(|controller, world| {
            answer = Some(controller.book.declare_lost(&id, "operator", world.moment()));
            Vec::new()
        });
        answer.filter(|_| self.controller.is_some())
    }
}

impl Controller {
    fn report(&mut self, session: u64, report: Report, now: Moment) -> Vec<Answer> {
        let known = self.sessions.get(&report.node).copied().unwrap_or(0);
        if session >= known {
            self.sessions.insert(report.node.clone(), session);
            self.hear(&report, now);
        }
        Vec::new()
    }

    fn hear(&mut self, report: &Report, now: Moment) {
        self.owed.insert(report.node.clone());
        self.book.report(report, now);
    }

    fn append(&self, world: &mut World, replica: ReplicaId, offset: u64, data: Vec<u32>) -> Message {
        if self.book.wants_log(&replica) != Standing::Open {
            return Message::Unwanted { replica };
        }
        let length = |world: &World| world.disk.logs.get(&replica).map_or(0, Vec::len) as u64;
        if mutant::is(Mutant::AckBeforeCommit) && world.chance.per_mille(20) {
            let length = length(world).max(offset + data.len() as u64);
            return Message::Stored { replica, length };
        }
        let fresh = match splice(length(world), offset, data.len()) {
            Splice::Known | Splice::Gap if !mutant::is(Mutant::NoOffsetDedup) => &[],
            Splice::Append(fresh) if !mutant::is(Mutant::NoOffsetDedup) => &data[fresh],
            _ => &data[..],
        };
        if !fresh.is_empty()
            && let Err(failure) = world.disk.append(&replica, fresh)
        {
            world.failure = Some(failure);
        }
        let length = length(world);
        Message::Stored { replica, length }
    }

    fn result(
        &mut self,
        world: &mut World,
        from: usize,
        replica: ReplicaId,
        outcome: Outcome,
        written: u64,
    ) -> Message {
        let node = world.nodes[from].id.clone();
        let mut standing = self.book.standing(&replica, &node);
        if standing == Standing::Open {
            let length = world.disk.logs.get(&replica).map_or(0, Vec::len) as u64;
            if length < written {
                return Message::Lacking { replica, length };
            }
            if outcome.verdict == Verdict::Completed {
                let made = BTreeMap::from([(OUT.to_owned(), Input::Folder(Digest::EMPTY))]);
                self.book.note_found(&replica, &node, FoundOutputs { made, ..FoundOutputs::default() });
            }
            standing = self.book.settle(&replica, &node, outcome, world.moment());
        }
        match standing {
            Standing::Open | Standing::Settled => Message::Taken { replica },
            Standing::Fenced | Standing::Ahead => Message::Fenced { replica },
            Standing::Unknown => {
                let job = world.disk.jobs.get(&replica.job);
                let known =
                    job.is_some_and(|job| job.epoch == replica.epoch && job.rank(replica.rank).is_some());
                if known { Message::Taken { replica } } else { Message::Fenced { replica } }
            }
        }
    }
}
