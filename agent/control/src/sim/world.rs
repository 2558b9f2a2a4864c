//! The simulated cluster: time, the network, the clients, the faults, and the true state.
//!
//! Everything happens in events, one at a time, in the order of true time, which no process in the simulation can
//! read. A message is bound to the process that it was sent to, as a connection is: it may be lost, late, doubled or
//! overtaken, but it never reaches a successor of that process. Only copies of reports do: the network keeps some,
//! and delivers them when the controller or the machine has been restarted.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use agent_model::job::Priority;
use agent_model::machine::EligibilityEvent;
use agent_model::{JobState, Outcome, ReplicaId};

use super::chance::Chance;
use super::controller::Controller;
use super::disk::{Broken, Disk, broken, lines};
use super::mutant::{self, Mutant};
use super::node::{Drifting, Node};
use super::tally::Tally;
use super::wish::{Wish, wish};
use crate::lease::{Desired, Orders};
use crate::queue::{DeclaredLost, Report, Retirement};
use crate::scheduler::UserLimits;

/// How long a seed is simulated, and how much of it has faults, in milliseconds.
const END: u64 = 100 * 60_000;
const CALM: u64 = 60 * 60_000;
/// How many reports of a node the network keeps.
const KEPT: usize = 12;
pub(super) const GRACE: Duration = Duration::from_secs(10);

/// A message in transit.
#[derive(Debug, Clone)]
pub(super) enum Message {
    // From a node.
    Report {
        session: u64,
        report: Report,
    },
    Append {
        replica: ReplicaId,
        offset: u64,
        data: Vec<u32>,
    },
    Result {
        replica: ReplicaId,
        outcome: Outcome,
        written: u64,
    },
    // To a node.
    Orders(Orders),
    Stored {
        replica: ReplicaId,
        length: u64,
    },
    /// The stored log is too short for the outcome.
    Lacking {
        replica: ReplicaId,
        length: u64,
    },
    Unwanted {
        replica: ReplicaId,
    },
    Taken {
        replica: ReplicaId,
    },
    Fenced {
        replica: ReplicaId,
    },
}

#[derive(Debug, Clone)]
pub(super) enum Event {
    Submit(usize),
    Cancel(usize),
    /// A user wants it to go before others.
    Change(usize),
    /// An operator changes the eligibility of a node.
    Want(usize, EligibilityEvent),
    DeclareLost(usize),
    /// A pool wants to remove a machine.
    Retire(usize),
    /// A machine that was let go is removed.
    Removed(usize),
    ToController {
        controller_epoch: u64,
        from: usize,
        message: Message,
    },
    ToNode {
        to: usize,
        session: u64,
        message: Message,
    },
    NodeFault(usize),
    ControllerFault,
    /// A copy of some report of a node arrives.
    Repeat(usize),
    AgentStarts(usize),
    NodeStarts(usize),
    ControllerStarts,
    /// A rule of the controller may apply.
    Alarm {
        controller_epoch: u64,
    },
    /// The agent reports, and sends what it has.
    Beat {
        node: usize,
        session: u64,
    },
    Prepared {
        node: usize,
        session: u64,
        replica: ReplicaId,
    },
    /// A rank of a gang has reached the others of that roster.
    Met {
        node: usize,
        session: u64,
        replica: ReplicaId,
        digest: u64,
    },
    CommandEnds {
        node: usize,
        instance: u64,
        replica: ReplicaId,
    },
    DeadlineComes {
        node: usize,
        instance: u64,
        replica: ReplicaId,
    },
    Killed {
        node: usize,
        instance: u64,
        replica: ReplicaId,
    },
}

/// See the module.
pub(super) struct World {
    pub(super) now: u64,
    pub(super) chance: Chance,
    queue: BTreeMap<(u64, u64), Event>,
    serial: u64,
    pub(super) disk: Disk,
    pub(super) controller: Option<Controller>,
    pub(super) controller_clock: Drifting,
    /// What the user of all jobs may have at a time.
    pub(super) limits: UserLimits,
    pub(super) nodes: Vec<Node>,
    pub(super) wishes: Vec<Wish>,
    /// Commands that run, and where.
    pub(super) live: BTreeMap<ReplicaId, usize>,
    started: BTreeSet<ReplicaId>,
    /// Ranks of gangs that could start at some time.
    pub(super) could_start: BTreeSet<ReplicaId>,
    /// Copies of reports, of each node.
    kept: Vec<VecDeque<Report>>,
    pub(super) failure: Option<Broken>,
    pub(super) tally: Tally,
}

/// Simulates one seed; `told` is called with each event.
pub(super) fn run(seed: u64, told: impl Fn(u64, &Event)) -> (Tally, Option<Broken>) {
    let mut world = World::new(seed);
    while world.failure.is_none() {
        let Some(((at, _), event)) = world.queue.pop_first() else { break };
        if at > END {
            break;
        }
        world.now = at;
        world.tally.events += 1;
        world.mark(&event);
        told(at, &event);
        world.happen(event);
    }
    world.tally.millis = world.now;
    if world.failure.is_none() {
        world.failure = world.check_end().err();
    }
    (world.tally, world.failure)
}

impl World {
    fn new(seed: u64) -> World {
        let mut chance = Chance::new(seed);
        let drift = |chance: &mut Chance| chance.below(2001) as i64 - 1000;
        let nodes = (0..chance.between(2, 5)).map(|i| Node {
            id: format!("n{i}").parse().unwrap(),
            slots: chance.between(1, 3) as u32,
            clock: Drifting { since: 0, ppm: drift(&mut chance) },
            boots: 0,
            up: false,
            dead: false,
            cleared: false,
            reopened: false,
            directories: BTreeMap::new(),
            shims: BTreeMap::new(),
            agent: None,
            cut: (0, 0),
        });
        let nodes: Vec<Node> = nodes.collect();
        let kept = vec![VecDeque::new(); nodes.len()];
        let gangs = seed.is_multiple_of(2); // some jobs have two ranks
        let wishes = (0..chance.between(5, 11)).map(|i| wish(i, gangs, &mut chance)).collect();
        let controller_clock = Drifting { since: 0, ppm: drift(&mut chance) };
        let jobs = seed.is_multiple_of(3).then_some(2); // they wait for each other, not only for room
        let mut world = World {
            now: 0,
            chance,
            queue: BTreeMap::new(),
            serial: 0,
            disk: Disk::default(),
            controller: None,
            controller_clock,
            limits: UserLimits { jobs, ..UserLimits::default() },
            nodes,
            wishes,
            live: BTreeMap::new(),
            started: BTreeSet::new(),
            could_start: BTreeSet::new(),
            kept,
            failure: None,
            tally: Tally::default(),
        };
        // In every fourth history a pool wants to remove machines.
        world.plan(seed.is_multiple_of(4));
        world
    }

    /// Plans the events that do not depend on others.
    fn plan(&mut self, retires: bool) {
        self.after(1, Event::ControllerStarts);
        for node in 0..self.nodes.len() {
            let soon = self.chance.between(1, 5000);
            self.after(soon, Event::NodeStarts(node));
            let first = self.chance.wait(110_000);
            self.after(first, Event::NodeFault(node));
            if self.chance.per_mille(300) {
                let at = self.chance.below(CALM);
                self.after(at, Event::Want(node, EligibilityEvent::Drain));
                let back = self.chance.between(at, at + 1_200_000);
                self.after(back, Event::Want(node, EligibilityEvent::Uncordon));
            }
            if retires && self.chance.per_mille(500) {
                let at = self.chance.below(CALM);
                self.after(at, Event::Retire(node));
            }
        }
        let first = self.chance.wait(400_000);
        self.after(first, Event::ControllerFault);
        for job in 0..self.wishes.len() {
            let at = self.chance.below(CALM - 300_000);
            self.after(at, Event::Submit(job));
            if self.chance.per_mille(300) {
                // Many users cancel at once, when the order is still in transit.
                let within = if self.chance.per_mille(500) { 20_000 } else { 600_000 };
                let at = at + self.chance.below(within);
                self.after(at, Event::Cancel(job));
            }
            if self.chance.per_mille(300) {
                let at = at + self.chance.below(600_000);
                self.after(at, Event::Change(job));
            }
        }
    }

    pub(super) fn after(&mut self, wait: u64, event: Event) {
        self.at(self.now + wait, event);
    }

    pub(super) fn at(&mut self, at: u64, event: Event) {
        self.serial += 1;
        self.queue.insert((at.max(self.now), self.serial), event);
    }

    pub(super) fn is_faulty(&self) -> bool {
        self.now < CALM
    }

    fn mark(&mut self, event: &Event) {
        let kind = match event {
            Event::Submit(i) | Event::Cancel(i) | Event::Want(i, _) | Event::DeclareLost(i) => *i as u64,
            Event::Change(i) => 70 + *i as u64,
            Event::Retire(i) | Event::Removed(i) => 50 + *i as u64,
            Event::ToController { from, .. } => 100 + *from as u64,
            Event::ToNode { to, .. } => 200 + *to as u64,
            Event::NodeFault(i) | Event::AgentStarts(i) | Event::NodeStarts(i) => 300 + *i as u64,
            Event::Repeat(i) => 350 + *i as u64,
            Event::ControllerFault | Event::ControllerStarts | Event::Alarm { .. } => 400,
            Event::Beat { node, session } => 500 + *node as u64 + session * 8,
            Event::Prepared { node, replica, .. } | Event::Met { node, replica, .. } => {
                600 + *node as u64 + replica.epoch.0 * 8
            }
            Event::CommandEnds { node, instance, .. }
            | Event::DeadlineComes { node, instance, .. }
            | Event::Killed { node, instance, .. } => 700 + *node as u64 + instance * 8,
        };
        // What the event found, so that two histories that differ anywhere differ here.
        for part in [self.now, kind, self.live.len() as u64] {
            self.tally.trace = (self.tally.trace ^ part).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Submit(job) => self.submit(job),
            Event::Cancel(job) => self.cancel(job),
            Event::Change(job) => self.ask_change(job),
            Event::Want(node, want) => self.want(node, want),
            Event::DeclareLost(node) => self.declare_lost(node),
            Event::Retire(node) => self.retire(node),
            Event::Removed(node) => {
                self.power_off(node);
                self.nodes[node].dead = true;
            }
            Event::ToController { controller_epoch, from, message } => {
                if self
                    .controller
                    .as_ref()
                    .is_some_and(|controller| controller.controller_epoch == controller_epoch)
                    && !self.nodes[from].cleared
                // its certificate is worth nothing
                {
                    self.controller_hears(from, message);
                }
            }
            Event::ToNode { to, session, message } => {
                if self.nodes[to].agent.as_ref().is_some_and(|agent| agent.session == session) {
                    self.node_hears(to, message);
                }
            }
            Event::NodeFault(node) => self.node_fault(node),
            Event::ControllerFault => {
                let next = self.chance.wait(400_000);
                self.after(next, Event::ControllerFault);
                if self.is_faulty() && self.controller.take().is_some() {
                    self.controller_crashed();
                }
            }
            Event::Repeat(node) => self.repeat(node),
            Event::AgentStarts(node) => self.agent_starts(node),
            Event::NodeStarts(node) => {
                self.node_starts(node);
                self.perhaps_repeat(node, 300, 20_000);
            }
            Event::ControllerStarts => self.controller_starts(),
            Event::Alarm { controller_epoch } => self.alarm(controller_epoch),
            Event::Beat { node, session } => self.beat(node, session),
            Event::Prepared { node, session, replica } => self.prepared(node, session, &replica),
            Event::Met { node, session, replica, digest } => self.met(node, session, &replica, digest),
            Event::CommandEnds { node, instance, replica } => self.command_ends(node, instance, &replica),
            Event::DeadlineComes { node, instance, replica } => self.deadline(node, instance, &replica),
            Event::Killed { node, instance, replica } => self.killed(node, instance, &replica),
        }
    }

    /// The travel time of a message; `None` when it is lost.
    fn travel(&mut self, node: usize, up: bool) -> Option<u64> {
        self.tally.messages += 1;
        let cut = self.nodes[node].cut;
        if self.now < if up { cut.0 } else { cut.1 } || (self.is_faulty() && self.chance.per_mille(10)) {
            return None;
        }
        let slow = self.is_faulty() && self.chance.per_mille(60);
        Some(if slow { self.chance.between(50, 60_000) } else { self.chance.between(1, 50) })
    }

    /// Sends a message to the controller, perhaps twice.
    pub(super) fn tell_controller(&mut self, from: usize, message: Message) {
        let Some(controller_epoch) = self.controller.as_ref().map(|controller| controller.controller_epoch)
        else {
            return;
        };
        if self.is_faulty() && self.chance.per_mille(50) {
            self.deliver_to_controller(controller_epoch, from, message.clone());
        }
        if let Message::Report { report, .. } = &message
            && self.chance.per_mille(250)
        {
            self.kept[from].push_back(report.clone());
            while self.kept[from].len() > KEPT {
                self.kept[from].pop_front();
            }
            self.perhaps_repeat(from, 40, 600_000);
        }
        self.deliver_to_controller(controller_epoch, from, message);
    }

    /// With a chance of `per_mille` in a thousand, a copy of some report arrives within `within` milliseconds.
    pub(super) fn perhaps_repeat(&mut self, node: usize, per_mille: u64, within: u64) {
        if self.is_faulty() && self.chance.per_mille(per_mille) {
            let wait = self.chance.between(1, within);
            self.after(wait, Event::Repeat(node));
        }
    }

    fn repeat(&mut self, node: usize) {
        let heard = self.controller.is_some() && !self.nodes[node].cleared;
        if self.is_faulty() && heard && !self.kept[node].is_empty() {
            self.tally.faults += 1;
            let index = self.chance.below(self.kept[node].len() as u64) as usize;
            self.controller_hears_again(self.kept[node][index].clone());
        }
    }

    fn deliver_to_controller(&mut self, controller_epoch: u64, from: usize, message: Message) {
        if let Some(wait) = self.travel(from, true) {
            self.after(wait, Event::ToController { controller_epoch, from, message });
        }
    }

    /// Sends a message to a process of a node, perhaps twice.
    pub(super) fn tell_node(&mut self, to: usize, session: u64, message: Message) {
        if self.is_faulty()
            && self.chance.per_mille(20)
            && let Some(wait) = self.travel(to, false)
        {
            self.after(wait, Event::ToNode { to, session, message: message.clone() });
        }
        if let Some(wait) = self.travel(to, false) {
            self.after(wait, Event::ToNode { to, session, message });
        }
    }

    fn submit(&mut self, job: usize) {
        if !self.wishes[job].submitted {
            self.ask_submit(job);
            self.after(2000, Event::Submit(job));
        }
    }

    fn cancel(&mut self, job: usize) {
        let known = self.wishes[job].submitted;
        let over = self.disk.jobs.get(&self.wishes[job].id).is_some_and(|job| job.state.is_terminal());
        if self.wishes[job].canceled || (known && over) {
            return;
        }
        if known {
            // Earlier orders may still be in transit when later ones are lost.
            if self.is_faulty() && self.chance.per_mille(300) {
                let until = self.now + self.chance.between(1000, 60_000);
                self.nodes.iter_mut().for_each(|node| node.cut.1 = node.cut.1.max(until));
            }
            self.ask_cancel(job);
        }
        self.after(2000, Event::Cancel(job));
    }

    fn want(&mut self, node: usize, want: EligibilityEvent) {
        let state = &mut self.nodes[node];
        state.reopened |= want == EligibilityEvent::Uncordon;
        let is_late = want == EligibilityEvent::Drain && state.reopened; // it got no answer before
        if !is_late && !self.ask_eligibility(node, want) {
            self.after(2000, Event::Want(node, want));
        }
    }

    fn declare_lost(&mut self, node: usize) {
        let done = matches!(self.ask_declare_lost(node), Some(DeclaredLost::Done(_) | DeclaredLost::Unknown));
        // A copy of an old report may make the machine look alive again.
        self.after(if done { 60_000 } else { 5000 }, Event::DeclareLost(node));
    }

    /// Lets a machine go as soon as the controller says that nothing is on it, if enough others are left.
    fn retire(&mut self, node: usize) {
        if self.nodes[node].dead {
            return;
        }
        if !self.can_spare_a_node() {
            return self.want(node, EligibilityEvent::Uncordon);
        }
        if self.ask_retire(node) != Some(Retirement::Clear) {
            return self.after(2000, Event::Retire(node));
        }
        if let Some((replica, _)) = self.live.iter().find(|(_, on)| **on == node) {
            let how = format!("{replica} runs on n{node}");
            self.failure = broken::<()>("a machine that goes runs nothing", how).err();
        }
        self.nodes[node].cleared = true;
        let wait = self.chance.between(1, 120_000);
        self.after(wait, Event::Removed(node));
    }

    fn node_fault(&mut self, node: usize) {
        let next = self.chance.wait(110_000);
        self.after(next, Event::NodeFault(node));
        if !self.is_faulty() || !self.nodes[node].up {
            return;
        }
        self.tally.faults += 1;
        match self.chance.below(100) {
            0..45 => {
                let until = self.now + self.chance.between(2000, 180_000);
                let both = self.chance.below(3);
                let cut = &mut self.nodes[node].cut;
                if both != 1 {
                    cut.0 = cut.0.max(until);
                }
                if both != 2 {
                    cut.1 = cut.1.max(until);
                }
            }
            45..85 => {
                self.nodes[node].agent = None;
                let long = self.chance.per_mille(250);
                let wait = self.chance.between(100, if long { 150_000 } else { 4000 });
                self.after(wait, Event::AgentStarts(node));
            }
            85..98 => {
                self.power_off(node);
                let wait = self.chance.between(3000, 90_000);
                self.after(wait, Event::NodeStarts(node));
            }
            _ => {
                if self.can_spare_a_node() && !self.nodes[node].cleared {
                    self.power_off(node);
                    self.nodes[node].dead = true;
                    let wait = self.chance.between(30_000, 600_000);
                    self.after(wait, Event::DeclareLost(node));
                }
            }
        }
    }

    /// Without one more every job can still run.
    fn can_spare_a_node(&self) -> bool {
        let left = self.nodes.iter().filter(|node| !node.dead && !node.cleared).count();
        let jobs = self.wishes.iter().flat_map(|wish| wish.spec.steps().chain([&wish.spec]));
        let needed = jobs.map(|job| job.resources.nodes).max();
        left > needed.unwrap_or(1) as usize
    }

    fn power_off(&mut self, node: usize) {
        let now = self.now;
        let node_state = &mut self.nodes[node];
        (node_state.up, node_state.agent) = (false, None);
        for (replica, shim) in std::mem::take(&mut node_state.shims) {
            let directory = node_state.directories.get_mut(&replica);
            if let Some(directory) = directory.filter(|_| !shim.hung) {
                directory.written = shim.written(now);
            }
        }
        self.live.retain(|_, on| *on != node);
    }

    /// A command starts: checks what must hold then.
    pub(super) fn executes(&mut self, node: usize, replica: &ReplicaId) {
        self.tally.attempts += 1;
        if self.nodes[node].cleared {
            self.failure = broken::<()>("a machine that goes starts nothing", replica.to_string()).err();
        }
        // Ranks of one gang run side by side, but only under one epoch.
        let beside = |other: &ReplicaId| other.epoch == replica.epoch && other.rank != replica.rank;
        let mut others = self.live.iter().filter(|(other, _)| other.job == replica.job);
        if let Some((other, on)) = others.find(|(other, _)| !beside(other)) {
            let how = format!("{replica} starts on n{node} while {other} runs on n{on}");
            self.failure = broken::<()>("a job has one live run", how).err();
        }
        if self.disk.jobs.get(&replica.job).is_some_and(|job| job.state.is_terminal()) {
            self.failure = broken::<()>("a job that ended starts no run", replica.to_string()).err();
        }
        if !self.started.insert(replica.clone()) {
            self.failure = broken::<()>("an epoch is executed once", replica.to_string()).err();
        }
        self.check_gang(node, replica);
        self.live.insert(replica.clone(), node);
    }

    /// Checks that a rank of several starts with all the others, after its go and in time.
    fn check_gang(&mut self, node: usize, replica: &ReplicaId) {
        let spec = self.nodes[node].directories.get(replica).map(|found| found.spec.clone());
        let ranks = spec.map_or(1, |spec| spec.resources.nodes);
        if ranks == 1 {
            return;
        }
        let missing = (0..ranks).map(|rank| ReplicaId { rank, ..replica.clone() });
        if let Some(missing) = missing.into_iter().find(|rank| !self.could_start.contains(rank)) {
            let how = format!("{replica} starts before {missing} could");
            self.failure = broken::<()>("no rank starts before all could", how).err();
            return;
        }
        let job = self.disk.jobs.get(&replica.job).filter(|job| job.epoch == replica.epoch);
        let until = job.and_then(|job| job.go.as_ref()?.until.get(replica.rank as usize).copied());
        let now = self.nodes[node].clock.boot(self.now);
        match until {
            Some(until) if now < until => {}
            Some(_) => {
                self.failure = broken::<()>("a rank starts in time or not at all", replica.to_string()).err();
            }
            // A later attempt took its place; whether it was fenced is checked above.
            None if job.is_none() => {}
            None => {
                let how = format!("{replica} starts and was not told to");
                self.failure = broken::<()>("a gang that goes is on record", how).err();
            }
        }
    }

    /// What must hold when faults have been over for long.
    fn check_end(&self) -> Result<(), Broken> {
        for wish in &self.wishes {
            let Some(job) = self.disk.jobs.get(&wish.id).filter(|_| wish.submitted) else {
                return broken("a job that was accepted is not lost", wish.id.to_string());
            };
            if !job.state.is_terminal() {
                let how = format!("{} is {:?} at epoch {}", job.id, job.state, job.epoch);
                return broken("with faults over, every job ends", how);
            }
            if wish.canceled && job.state != JobState::Canceled {
                return broken("a cancel that was answered counts", format!("{}: {}", job.id, job.state));
            }
            if wish.changed && job.spec.priority != Priority::High {
                return broken("a change that was answered counts", job.id.to_string());
            }
            // The outcome that counted arrived with its whole log.
            for replica in job.replicas.iter().filter(|_| job.state == JobState::Completed) {
                let replica = job.replica(replica.rank);
                let log = self.disk.logs.get(&replica).map_or(0, Vec::len) as u64;
                let written = self.nodes.iter().find_map(|node| node.directories.get(&replica));
                if written.is_some_and(|directory| directory.written != log) {
                    return broken("a log is what was produced", format!("{replica} has {log}"));
                }
            }
        }
        if let Some(job) = self.disk.jobs.values().find(|job| !job.state.is_terminal()) {
            return broken("with faults over, every step ends", format!("{} is {:?}", job.id, job.state));
        }
        for (replica, log) in &self.disk.logs {
            if *log != lines(replica, 0..log.len() as u64) {
                return broken("a log is what was produced", replica.to_string());
            }
        }
        if let Some((replica, node)) = self.live.iter().next() {
            return broken("a job that ended has no live run", format!("{replica} runs on n{node}"));
        }
        for node in self.nodes.iter().filter(|node| !node.dead) {
            if let Some(replica) = node.agent.iter().flat_map(|agent| agent.runs.keys()).next() {
                return broken("a node is told what it may forget", format!("{} holds {replica}", node.id));
            }
        }
        Ok(())
    }
}

/// One line of a history, as text.
pub(super) fn brief(event: &Event) -> String {
    match event {
        Event::ToController { from, message: Message::Report { report, .. }, .. } => {
            let held = report
                .replicas
                .iter()
                .map(|held| format!(" {}:{}{}", held.replica, held.step, if held.alive { "" } else { "?" }));
            let obeyed = report.obeyed.map(|latest| (latest.controller_epoch, latest.answers.millis()));
            let held: String = held.collect();
            format!(
                "n{from} reports boot {} sent {} obeyed {obeyed:?}:{held}",
                report.boot_id,
                report.sent.millis()
            )
        }
        Event::ToNode { to, message: Message::Orders(orders), .. } => {
            let list = orders.list.iter().map(|order| match &order.desired {
                Desired::Run { until, gang, .. } => {
                    let go = gang.as_ref().map(|gang| gang.go.map(|at| at.millis()));
                    format!(" run {} {:?} gang {go:?}", order.replica, until.map(|at| at.millis()))
                }
                other => format!(" {other:?} {}", order.replica),
            });
            let list: String = list.collect();
            format!("n{to} hears orders for {}:{list}", orders.answers.millis())
        }
        Event::ToController { from, message: Message::Append { replica, offset, data }, .. } => {
            format!("n{from} appends {replica} {offset}+{}", data.len())
        }
        Event::ToController { from, message: Message::Result { replica, outcome, written }, .. } => {
            format!("n{from} delivers {replica} {:?} {written}", outcome.verdict)
        }
        other => format!("{other:?}"),
    }
}

/// Whether this mistake is made, where the rule is the node's.
pub(super) fn slips(mutant: Mutant) -> bool {
    mutant::is(mutant)
}
