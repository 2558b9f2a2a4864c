//! The agent and the supervisors of the simulation: how they carry out the decisions of the protocol.

use std::collections::{BTreeMap, BTreeSet};

use agent_model::job::OnDisconnect;
use agent_model::node::{Inventory, Load};
use agent_model::protocol::gang::{self, Next, Ready, Secret};
use agent_model::protocol::log::unsent;
use agent_model::protocol::orders::{Action, Desired, OrderFence, Stamps, Wanted, decide};
use agent_model::protocol::start::{Deadline, Found, Traces};
use agent_model::{Boot, Code, Fault, ReplicaId, Verdict};

use super::mutant::Mutant;
use super::node::{Agent, Directory, End, Run, Shim, Work, ending, outcome, place, terms};
use super::world::{Event, GRACE, Message, World, slips};
use crate::lease;
use crate::queue::Report;

/// Between two reports, in milliseconds.
const BEAT: u64 = 15_000;
/// The most lines of a log in one request.
const CHUNK: u64 = 40;

impl World {
    fn boot(&self, node: usize) -> Boot {
        self.nodes[node].clock.boot(self.now)
    }

    fn run_of(&mut self, node: usize, replica: &ReplicaId) -> Option<&mut Run> {
        self.nodes[node].agent.as_mut()?.runs.get_mut(replica)
    }

    pub(super) fn node_starts(&mut self, node: usize) {
        if self.nodes[node].dead {
            return;
        }
        let state = &mut self.nodes[node];
        (state.up, state.boots) = (true, state.boots + 1);
        // A machine's boot clock runs for a while before anybody reads it.
        state.clock.since = self.now.saturating_sub(20_000);
        self.agent_starts(node);
    }

    /// Another agent process: it holds the directories that it finds.
    pub(super) fn agent_starts(&mut self, node: usize) {
        if !self.nodes[node].up || self.nodes[node].agent.is_some() {
            return;
        }
        let session = self.now * 8 + 1;
        let boot = self.boot(node);
        let agent = Agent {
            session,
            order_fence: OrderFence::new(boot),
            stamps: Stamps::default(),
            runs: BTreeMap::new(),
            gone: BTreeSet::new(),
        };
        self.nodes[node].agent = Some(agent);
        for replica in self.nodes[node].directories.keys().cloned().collect::<Vec<_>>() {
            self.recover(node, &replica);
        }
        self.beat(node, session);
    }

    fn recover(&mut self, node: usize, replica: &ReplicaId) {
        let boot = self.boot(node);
        let state = &mut self.nodes[node];
        let Some(directory) = state.directories.get_mut(replica) else { return };
        let traces = Traces {
            supervised: state.shims.contains_key(replica),
            started: directory.started && !slips(Mutant::NoStartMark),
            ended: directory.exit.is_some(),
            may_start: false,
        };
        let deadline = Deadline::found(directory.spec.limits.on_disconnect);
        let desired = Desired::Run { until: None, gang: None };
        let work = match traces.found() {
            _ if directory.ending.is_some() => Work::Ending,
            Found::Fresh => Work::Preparing,
            Found::Live => Work::Running,
            Found::Ended => {
                let end = directory.exit.clone().unwrap_or(End::Stopped);
                directory.ending = Some(ending(&end, &desired, replica.epoch));
                Work::Ending
            }
            Found::Lost => {
                let lost = Fault::new(Code::RunLost, "no supervisor and no record");
                directory.ending = Some((Verdict::Failed, Some(lost)));
                Work::Ending
            }
        };
        if slips(Mutant::RestartResetsLease)
            && let Some(shim) = state.shims.get_mut(replica)
        {
            shim.deadline.hear(terms().held_until(boot));
        }
        let session = state.agent.as_ref().map_or(0, |agent| agent.session);
        if let Some(agent) = &mut state.agent {
            agent.runs.insert(replica.clone(), Run::new(desired, deadline, work));
        }
        if work == Work::Preparing {
            let wait = self.chance.between(100, 20_000);
            self.after(wait, Event::Prepared { node, session, replica: replica.clone() });
        }
    }

    pub(super) fn beat(&mut self, node: usize, session: u64) {
        if self.nodes[node].agent.as_ref().is_none_or(|agent| agent.session != session) {
            return;
        }
        self.after(BEAT, Event::Beat { node, session });
        self.report(node);
        let replicas: Vec<ReplicaId> =
            self.nodes[node].agent.iter().flat_map(|agent| agent.runs.keys().cloned()).collect();
        for replica in replicas {
            self.send(node, &replica);
        }
    }

    fn report(&mut self, node: usize) {
        let state = &self.nodes[node];
        let Some(agent) = &state.agent else { return };
        let session = agent.session;
        let report = Report {
            node: state.id.clone(),
            boot_id: state.boot_id(),
            sent: agent.stamps.next(self.boot(node)),
            obeyed: agent.order_fence.obeyed(),
            inventory: Some(Inventory { slots: state.slots, gangs: true, ..Inventory::default() }),
            load: Load::default(),
            replicas: state.held(),
            preemption: None,
            own: false,
        };
        self.tell_controller(node, Message::Report { session, report });
    }

    /// Sends the next message about a replica: a part of its log, or its outcome.
    fn send(&mut self, node: usize, replica: &ReplicaId) {
        let state = &self.nodes[node];
        let Some(run) = state.agent.as_ref().and_then(|agent| agent.runs.get(replica)) else { return };
        let Some(directory) = state.directories.get(replica) else { return };
        let written = state.written(replica, self.now);
        let message = match run.stored {
            _ if run.work == Work::Done => return,
            None if !run.unwanted => {
                Message::Append { replica: replica.clone(), offset: directory.trimmed, data: Vec::new() }
            }
            stored => match unsent(stored.unwrap_or(u64::MAX), written, CHUNK) {
                // Lines that were acknowledged are deleted: only an old answer asks for them.
                Some(next) if next.start < directory.trimmed => {
                    Message::Append { replica: replica.clone(), offset: directory.trimmed, data: Vec::new() }
                }
                Some(next) => Message::Append {
                    replica: replica.clone(),
                    offset: next.start,
                    data: super::disk::lines(replica, next),
                },
                None => match (&directory.ending, run.work) {
                    (Some(ending), Work::Ending) => {
                        let outcome = outcome(ending);
                        Message::Result { replica: replica.clone(), outcome, written }
                    }
                    _ => return,
                },
            },
        };
        self.tell_controller(node, message);
    }

    pub(super) fn node_hears(&mut self, node: usize, message: Message) {
        match message {
            Message::Orders(orders) => self.obey(node, orders),
            Message::Stored { replica, length } => {
                // An overtaken answer has a shorter length than is known.
                let known = self.nodes[node].directories.get(&replica).map_or(0, |dir| dir.trimmed);
                if let Some(run) = self.run_of(node, &replica) {
                    let length = length.max(known).max(run.stored.unwrap_or(0));
                    run.stored = Some(length);
                    if let Some(directory) = self.nodes[node].directories.get_mut(&replica) {
                        directory.trimmed = length;
                    }
                    self.send(node, &replica);
                }
            }
            Message::Lacking { replica, length } => {
                if let Some(run) = self.run_of(node, &replica) {
                    run.stored = Some(length);
                }
            }
            Message::Unwanted { replica } => {
                if let Some(run) = self.run_of(node, &replica) {
                    (run.unwanted, run.stored) = (true, None);
                    self.send(node, &replica);
                }
            }
            Message::Taken { replica } => {
                if let Some(run) = self.run_of(node, &replica).filter(|run| run.work == Work::Ending) {
                    run.work = Work::Done;
                    self.report(node);
                }
            }
            Message::Fenced { replica } => self.remove(node, &replica),
            _ => {}
        }
    }

    fn obey(&mut self, node: usize, orders: lease::Orders) {
        let boot = self.boot(node);
        let Some(agent) = &mut self.nodes[node].agent else { return };
        let (controller_epoch, their_epoch) = (agent.order_fence.controller_epoch(), orders.controller_epoch);
        if !agent.order_fence.admits(their_epoch, orders.answers, orders.revision)
            && !slips(Mutant::OvertakenOrders)
        {
            return;
        }
        let wanted = orders.list.into_iter().map(|order| {
            let wanted = match order.desired {
                // On the wire a time of 0 is no limit.
                lease::Desired::Run { spec, until, gang, .. } => {
                    let receipt = slips(Mutant::LeaseFromReceipt).then(|| terms().held_until(boot));
                    let until = until.map(|until| receipt.unwrap_or(until));
                    if gang.as_ref().is_some_and(|gang| gang.go.is_some()) {
                        agent.gone.insert(order.replica.job.clone());
                    }
                    Wanted::Run(spec, until, gang)
                }
                lease::Desired::Stop { grace, reason } => Wanted::Other(Desired::Stop { grace, reason }),
                lease::Desired::Forget => Wanted::Other(Desired::Forget),
                lease::Desired::Describe => Wanted::Other(Desired::Run { until: None, gang: None }),
            };
            (order.replica, wanted)
        });
        let held = agent.runs.keys().cloned().collect();
        for action in decide(wanted.collect(), &held) {
            match action {
                Action::Start(replica, spec, until, gang) => {
                    let directory =
                        Directory { spec, started: false, exit: None, ending: None, written: 0, trimmed: 0 };
                    self.nodes[node].directories.insert(replica.clone(), directory);
                    let run = Run::new(Desired::Run { until, gang }, Deadline::new(until), Work::Preparing);
                    let Some(agent) = &mut self.nodes[node].agent else { return };
                    let session = agent.session;
                    agent.runs.insert(replica.clone(), run);
                    let wait = self.chance.between(100, 20_000);
                    self.after(wait, Event::Prepared { node, session, replica });
                    self.report(node);
                }
                Action::Tell(replica, desired) => self.tell(node, &replica, desired),
                Action::Refuse(_) => {}
            }
        }
        if controller_epoch != their_epoch {
            self.report(node); // the proof that the orders arrived
        }
    }

    /// Passes the desired state to the runner of a replica.
    fn tell(&mut self, node: usize, replica: &ReplicaId, desired: Desired) {
        let Some(run) = self.run_of(node, replica) else { return };
        run.desired = desired.after(&run.desired);
        let work = run.work;
        match &desired {
            Desired::Run { until, .. } => {
                if let Some(until) = until {
                    run.deadline.hear(*until);
                    if let Some(shim) = self.nodes[node].shims.get_mut(replica) {
                        shim.deadline.hear(*until);
                    }
                }
                match work {
                    Work::Unleased => self.launch(node, replica),
                    Work::Ready => self.muster(node, replica),
                    _ => {}
                }
            }
            Desired::Stop { .. } | Desired::Disown if work == Work::Running => {
                self.end(node, replica, End::Stopped);
            }
            Desired::Stop { .. } if matches!(work, Work::Preparing | Work::Ready | Work::Unleased) => {
                self.conclude(node, replica, (Verdict::Canceled, None));
            }
            Desired::Stop { .. } => {}
            Desired::Forget | Desired::Disown => self.remove(node, replica),
        }
    }

    fn remove(&mut self, node: usize, replica: &ReplicaId) {
        if self.nodes[node].shims.contains_key(replica) {
            if let Some(run) = self.run_of(node, replica) {
                run.desired = Desired::Disown;
            }
            return self.end(node, replica, End::Stopped);
        }
        self.nodes[node].directories.remove(replica);
        if let Some(agent) = &mut self.nodes[node].agent {
            agent.runs.remove(replica);
        }
        self.report(node);
    }

    pub(super) fn prepared(&mut self, node: usize, session: u64, replica: &ReplicaId) {
        let same = self.nodes[node].agent.as_ref().is_some_and(|agent| agent.session == session);
        if !same || self.run_of(node, replica).is_none_or(|run| run.work != Work::Preparing) {
            return;
        }
        let ranks = self.nodes[node].directories.get(replica).map_or(1, |found| found.spec.resources.nodes);
        if ranks == 1 {
            return self.launch(node, replica);
        }
        self.could_start.insert(replica.clone());
        let Some(run) = self.run_of(node, replica) else { return };
        let secret = Secret::new(if replica.rank == 0 { "s" } else { "" });
        run.ready = Some(Ready { place: place(session), environment: String::new(), secret, met: 0 });
        run.work = Work::Ready;
        self.report(node);
        self.muster(node, replica);
    }

    /// Carries out the latest order about the gang of a rank that could start.
    fn muster(&mut self, node: usize, replica: &ReplicaId) {
        let boot = self.boot(node);
        let Some(agent) = self.nodes[node].agent.as_ref() else { return };
        let (session, gone) = (agent.session, agent.gone.contains(&replica.job));
        let Some(run) = agent.runs.get(replica).filter(|run| run.work == Work::Ready) else { return };
        let (Desired::Run { gang, .. }, Some(ready)) = (&run.desired, &run.ready) else { return };
        let late = || Fault::new(Code::GangLate, "it was told to go and could not");
        match gang::next(gang.as_ref(), replica.rank, &ready.place, ready.met, boot) {
            Next::Wait if gone && slips(Mutant::GoOfAnotherEpoch) => self.launch(node, replica),
            Next::Wait => {}
            Next::Meet => {
                let digest = gang.as_ref().map_or(0, |gang| gang.roster.digest());
                let wait = self.chance.between(10, 3000);
                self.after(wait, Event::Met { node, session, replica: replica.clone(), digest });
            }
            Next::Late if slips(Mutant::GoDateIgnored) => self.launch(node, replica),
            Next::Start => self.launch(node, replica),
            Next::Late | Next::Moved => self.conclude(node, replica, (Verdict::Failed, Some(late()))),
        }
    }

    /// The rank has reached the others.
    pub(super) fn met(&mut self, node: usize, session: u64, replica: &ReplicaId, digest: u64) {
        if self.nodes[node].agent.as_ref().is_none_or(|agent| agent.session != session) {
            return;
        }
        let Some(run) = self.run_of(node, replica).filter(|run| run.work == Work::Ready) else { return };
        let changed =
            run.ready.as_mut().is_some_and(|ready| std::mem::replace(&mut ready.met, digest) != digest);
        if changed {
            self.report(node);
            self.muster(node, replica);
        }
    }

    /// Starts the command, unless its lease is over.
    fn launch(&mut self, node: usize, replica: &ReplicaId) {
        let boot = self.boot(node);
        let Some(run) = self.run_of(node, replica) else { return };
        if run.deadline.is_over(boot) && !slips(Mutant::StartsUnleased) {
            // A rank of a gang is told again when it may start.
            run.work = if run.ready.is_some() { Work::Ready } else { Work::Unleased };
            return self.report(node);
        }
        run.work = Work::Running;
        let deadline = run.deadline;
        self.executes(node, replica);
        let instance = self.tally.attempts;
        let shim = Shim {
            instance,
            started_at: self.now,
            deadline,
            grace: GRACE,
            dying: None,
            hung: false,
            pace: self.chance.between(300, 3000),
        };
        self.nodes[node].shims.insert(replica.clone(), shim);
        if let Some(directory) = self.nodes[node].directories.get_mut(replica) {
            directory.started = true;
        }
        let length = if self.chance.per_mille(150) { (120_000, 600_000) } else { (2000, 170_000) };
        let length = self.chance.between(length.0, length.1);
        self.after(length, Event::CommandEnds { node, instance, replica: replica.clone() });
        self.watch_deadline(node, instance, replica);
        self.report(node);
    }

    fn watch_deadline(&mut self, node: usize, instance: u64, replica: &ReplicaId) {
        let state = &self.nodes[node];
        let at = state.shims.get(replica).and_then(|shim| shim.deadline.at());
        if let Some(at) = at.map(|at| state.clock.when(at)) {
            self.at(at, Event::DeadlineComes { node, instance, replica: replica.clone() });
        }
    }

    fn shim_of(&mut self, node: usize, instance: u64, replica: &ReplicaId) -> Option<&mut Shim> {
        self.nodes[node].shims.get_mut(replica).filter(|shim| shim.instance == instance)
    }

    /// The supervisor's timer: it needs no agent.
    pub(super) fn deadline(&mut self, node: usize, instance: u64, replica: &ReplicaId) {
        let boot = self.boot(node);
        let alone = slips(Mutant::AgentEnforcesAlone) && self.nodes[node].agent.is_none();
        let Some(shim) = self.shim_of(node, instance, replica).filter(|shim| !shim.hung) else { return };
        if alone {
            self.after(1000, Event::DeadlineComes { node, instance, replica: replica.clone() });
        } else if shim.deadline.is_over(boot) {
            self.end(node, replica, End::LeaseOver);
        } else {
            self.watch_deadline(node, instance, replica);
        }
    }

    /// Asks a command to end; it takes its time, but not more than its grace and the time to kill it.
    fn end(&mut self, node: usize, replica: &ReplicaId, end: End) {
        let Some(shim) = self.nodes[node].shims.get_mut(replica) else { return };
        if shim.dying.is_some() {
            return;
        }
        shim.dying = Some(end);
        let instance = shim.instance;
        let longest = (shim.grace + terms().kill).as_millis() as u64;
        let wait = self.chance.between(1, longest);
        self.after(wait, Event::Killed { node, instance, replica: replica.clone() });
    }

    pub(super) fn command_ends(&mut self, node: usize, instance: u64, replica: &ReplicaId) {
        let hangs = self.is_faulty() && self.chance.per_mille(50);
        let code = i32::from(self.chance.per_mille(150));
        let replaced = self.nodes[node]
            .directories
            .get(replica)
            .is_some_and(|directory| directory.spec.limits.on_disconnect == OnDisconnect::Replace);
        let now = self.now;
        let Some(shim) = self.shim_of(node, instance, replica) else { return };
        if shim.dying.is_some() {
            return;
        }
        if hangs && replaced {
            let written = shim.written(now);
            shim.hung = true;
            self.live.remove(replica);
            self.nodes[node].directories.entry(replica.clone()).and_modify(|dir| dir.written = written);
        } else {
            self.ended(node, replica, Some(End::Code(code)));
        }
    }

    pub(super) fn killed(&mut self, node: usize, instance: u64, replica: &ReplicaId) {
        let Some(shim) = self.shim_of(node, instance, replica) else { return };
        // One that hangs leaves no record.
        let end = if shim.hung { None } else { shim.dying.clone() };
        self.ended(node, replica, end);
    }

    /// The supervisor has ended, and perhaps left a record.
    fn ended(&mut self, node: usize, replica: &ReplicaId, end: Option<End>) {
        self.live.remove(replica);
        let written = self.nodes[node].written(replica, self.now);
        let state = &mut self.nodes[node];
        state.shims.remove(replica);
        if let Some(directory) = state.directories.get_mut(replica) {
            directory.written = written;
            directory.exit = end.clone();
        }
        let Some(run) = self.run_of(node, replica) else { return };
        let desired = run.desired.clone();
        if desired == Desired::Disown {
            return self.remove(node, replica);
        }
        let ending = match end {
            Some(end) => ending(&end, &desired, replica.epoch),
            None if matches!(desired, Desired::Stop { .. }) => (Verdict::Canceled, None),
            None => (Verdict::Failed, Some(Fault::new(Code::RunLost, "the supervisor hung"))),
        };
        self.conclude(node, replica, ending);
    }

    fn conclude(&mut self, node: usize, replica: &ReplicaId, ending: (Verdict, Option<Fault>)) {
        if let Some(directory) = self.nodes[node].directories.get_mut(replica) {
            directory.ending = Some(ending);
        }
        if let Some(run) = self.run_of(node, replica) {
            run.work = Work::Ending;
        }
        self.report(node);
        self.send(node, replica);
    }
}
