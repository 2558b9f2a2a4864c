//! The task that keeps pools: in each round it asks the queue what the waiting jobs would use, decides ([`plan`]),
//! records the decisions, and acts.
//!
//! Owns the records of pools and machines, and the calls to their providers. Invariants: a decision is on disk before
//! its act, and every act may be repeated, so a restart at any point loses no machine. A machine goes in four steps:
//! its node is kept from new work and says that it has none and will start none ([`Retirement`]); it is taken out of
//! the fleet, so that its certificate is worth nothing; its provider removes it; its record is removed. Only the first
//! step can be taken back.

mod asks;
mod prospects;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::provider::{
    CreateMachine, Deadlines, DeleteMachine, Machine, MachinePriority, MachineState, Provider, ProviderError,
};
use agent_identity::TokenKind;
use agent_model::machine::{Eligibility, EligibilityEvent, Liveness};
use agent_model::{Code, Fault, NodeId, PoolName, Timestamp};
use futures_util::FutureExt;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::plan::{self, Failing, MachineView, NodeView, PoolStep, PoolView};
use super::{Ask, KeeperInbox, Pools};
use crate::members::{IdentityConfig, Members};
use crate::queue::{NodeState, Outlook, Retirement};
use crate::refusal::Refusal;
use crate::scheduler::Size;
use crate::store::{Document, MachineRecord, MachineStep, PoolRecord, SeenMachine, TokenRecord};
use prospects::labels_of;

/// The time between two rounds while there is a pool.
const ROUND: Duration = Duration::from_secs(1);
/// The time between two questions to a provider about what it has.
const LIST: Duration = Duration::from_secs(30);
/// The same once something is missing in its answer.
const LIST_AGAIN: Duration = Duration::from_secs(5);
/// How often in a row a machine must be missing in its provider's list before it counts as gone.
const MISSED: u32 = 2;
/// How long a list may lag behind what was made: a machine that it never had is not missed before.
const LAG: Duration = Duration::from_secs(300);
/// How long a node that is to leave may be silent; nothing is placed on it, so nothing is lost.
const LEAVES_WITHIN: Duration = Duration::from_secs(120);
/// The most machines that a pool is expected to get in a round.
const EXPECTED: usize = 256;
/// How long an idle machine is kept, by default.
const IDLE: Duration = Duration::from_secs(120);
/// Who removes nodes, in the log.
const WHO: &str = "its pool";

/// What is known of a pool beside its record.
#[derive(Debug, Default)]
struct KnownPool {
    /// To make machines.
    failing: Option<Failing>,
    /// To list them.
    unlisted: Option<Failing>,
    /// What its provider has, by its own names, that was not asked for.
    orphans: Vec<String>,
    listed: Option<Instant>,
    lists: bool,
    target: usize,
    target_since: Option<Timestamp>,
    /// How many machines waiting jobs would use beside those it has; `None` while that is not known.
    more: Option<usize>,
}

/// What is known of a machine beside its record.
#[derive(Debug, Default)]
struct KnownMachine {
    called: bool,
    /// Waiting jobs would use it.
    used: bool,
    /// How often in a row its provider did not list it, and whether it ever did.
    missed: u32,
    listed: bool,
    /// To remove it.
    failing: Option<Failing>,
    idle_since: Option<Instant>,
    silent_since: Option<Instant>,
    /// It was asked to retire.
    asked: bool,
}

/// The end of a call to a provider.
#[derive(Debug)]
enum Called {
    Created(NodeId, Result<String, ProviderError>),
    Deleted(NodeId, Result<(), ProviderError>),
    Listed(PoolName, Result<Vec<Machine>, ProviderError>),
}

/// See the module.
pub(crate) struct Keeper {
    handle: Pools,
    members: Members,
    identity: Option<IdentityConfig>,
    asks: mpsc::Receiver<Ask>,
    pools: BTreeMap<PoolName, PoolRecord>,
    machines: BTreeMap<NodeId, MachineRecord>,
    known_pools: BTreeMap<PoolName, KnownPool>,
    known_machines: BTreeMap<NodeId, KnownMachine>,
    calls: JoinSet<Called>,
    /// As of the last round.
    nodes: BTreeMap<NodeId, NodeState>,
}

impl Keeper {
    pub(crate) fn new(
        inbox: KeeperInbox,
        handle: Pools,
        members: Members,
        identity: Option<IdentityConfig>,
    ) -> Keeper {
        Keeper {
            handle,
            members,
            identity,
            asks: inbox.asks,
            pools: inbox.pools.into_iter().map(|pool| (pool.name.clone(), pool)).collect(),
            machines: inbox.machines.into_iter().map(|machine| (machine.name.clone(), machine)).collect(),
            known_pools: BTreeMap::new(),
            known_machines: BTreeMap::new(),
            calls: JoinSet::new(),
            nodes: BTreeMap::new(),
        }
    }

    /// Works until the queue ends.
    pub(crate) async fn run(mut self) {
        let queue = self.members.queue.clone();
        let mut rounds = interval(ROUND);
        rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let worked = tokio::select! {
                () = queue.closed() => return,
                Some(ask) = self.asks.recv() => {
                    self.answer(ask).await;
                    Ok(())
                }
                Some(Ok(called)) = self.calls.join_next() => self.take_in(called).await,
                _ = rounds.tick(), if !self.pools.is_empty() => self.round().await,
            };
            if let Err(refusal) = worked {
                tracing::warn!(?refusal, "cannot look after pools: trying again soon");
            }
        }
    }

    /// Decides and acts once.
    async fn round(&mut self) -> Result<(), Refusal> {
        let now = self.members.clock.now();
        let prospects = self.pools.values().flat_map(|pool| self.prospects(pool)).collect();
        let outlook = self.members.queue.outlook(prospects).await?;
        self.look(outlook);
        self.list();
        for name in self.pools.keys().cloned().collect::<Vec<_>>() {
            let Some(view) = self.view(&name) else { continue };
            let (steps, target) = (plan::plan(&view, now), plan::target(&view));
            let known = self.known_pools.entry(name.clone()).or_default();
            if known.target != target {
                (known.target, known.target_since) = (target, Some(now));
            }
            for step in steps {
                self.act(&name, step, now).await?;
            }
        }
        Ok(())
    }

    /// Takes in the nodes, and what waiting jobs would use.
    fn look(&mut self, outlook: Outlook) {
        let Outlook { nodes, used, known } = outlook;
        for name in self.pools.keys() {
            let more = used.get(&NodeId::from(name)).copied().unwrap_or_default();
            self.known_pools.entry(name.clone()).or_default().more = known.then_some(more);
        }
        self.nodes = nodes.into_iter().map(|node| (node.record.id.clone(), node)).collect();
        let machines = &self.machines;
        self.known_machines.retain(|name, _| machines.contains_key(name));
        for name in machines.keys() {
            let seen = self.known_machines.entry(name.clone()).or_default();
            let node = self.nodes.get(name);
            seen.used = used.contains_key(name);
            let idle = !seen.used && node.is_none_or(|node| node.jobs.is_empty());
            let silent = node
                .is_some_and(|node| matches!(node.record.liveness, Liveness::NotResponding | Liveness::Down));
            let since =
                |holds: bool, since: Option<Instant>| holds.then(|| since.unwrap_or_else(Instant::now));
            seen.idle_since = since(idle, seen.idle_since);
            seen.silent_since = since(silent, seen.silent_since);
        }
    }

    fn provider(&self, pool: &PoolName) -> Option<&Provider> {
        self.handle.providers.get(&self.pools.get(pool)?.provider)
    }

    fn join_within(&self, pool: &PoolName) -> Duration {
        // The usual time where its provider is not configured any more.
        self.provider(pool).map_or_else(Deadlines::default, |provider| provider.config().deadlines).join
    }

    fn machines_of<'a>(&'a self, pool: &'a PoolName) -> impl Iterator<Item = &'a MachineRecord> {
        self.machines.values().filter(move |machine| machine.pool == *pool)
    }

    fn view(&self, pool: &PoolName) -> Option<PoolView<'_>> {
        let record = self.pools.get(pool)?;
        let known = self.known_pools.get(pool);
        Some(PoolView {
            record,
            machines: self.machines_of(&record.name).map(|machine| self.machine_view(machine)).collect(),
            more: known.and_then(|known| known.more),
            failing: known.and_then(|known| known.failing.as_ref()),
            join_within: self.join_within(pool),
        })
    }

    fn machine_view<'a>(&'a self, record: &'a MachineRecord) -> MachineView<'a> {
        let seen = self.known_machines.get(&record.name);
        let elapsed = |since: Option<Instant>| since.map_or(Duration::ZERO, |since| since.elapsed());
        MachineView {
            record,
            called: seen.is_some_and(|seen| seen.called),
            member: self.members.registry.has_node(&record.name),
            node: self.nodes.get(&record.name).map(|node| NodeView {
                silent: elapsed(seen.and_then(|seen| seen.silent_since)),
                jobs: node.jobs.len(),
                open: node.record.eligibility == Eligibility::Open,
                idle: elapsed(seen.and_then(|seen| seen.idle_since)),
                kept: node.record.inventory.environments.len(),
            }),
            used: seen.is_some_and(|seen| seen.used),
            gone: seen.is_some_and(|seen| {
                let age = self.members.clock.now().since(record.since);
                seen.missed >= MISSED && (seen.listed || age > LAG)
            }),
        }
    }
}

/// What is done.
impl Keeper {
    async fn act(&mut self, pool: &PoolName, step: PoolStep, now: Timestamp) -> Result<(), Refusal> {
        match step {
            PoolStep::Ask => self.add_machine(pool, now).await,
            PoolStep::Create(name) => self.create(name, now).await,
            PoolStep::Move(name, to, why) => self.set_step(&name, to, why, now).await,
            PoolStep::Fail(name, why) => {
                self.fail(pool, format!("{name}: {why}"), now);
                self.set_step(&name, MachineStep::Leaving, why, now).await
            }
            PoolStep::Drain(name) => {
                let drained = self.members.queue.set_eligibility(&name, EligibilityEvent::Drain, WHO).await;
                drained.map(drop).map_err(Refusal::from)
            }
            PoolStep::Retire(name) => self.retire(name, now).await,
            PoolStep::Remove(name, why) => self.remove(&name, why, now).await,
            PoolStep::Delete(name) => {
                self.delete_at_provider(name);
                Ok(())
            }
            PoolStep::Forget => {
                self.members.queue.write(Vec::new(), vec![Document::name_of_pool(pool)]).await?;
                self.pools.remove(pool);
                self.known_pools.remove(pool);
                self.handle.names.lock().remove(pool);
                tracing::info!(%pool, "removed pool");
                self.members.queue.outlook(Vec::new()).await?;
                Ok(())
            }
        }
    }

    /// Records a machine that is to be made.
    async fn add_machine(&mut self, pool: &PoolName, now: Timestamp) -> Result<(), Refusal> {
        let mut name = pool.machine(getrandom::u32().map_err(|_| no_chance())?);
        while self.machines.contains_key(&name) || self.nodes.contains_key(&name) {
            name = pool.machine(getrandom::u32().map_err(|_| no_chance())?);
        }
        let machine = MachineRecord {
            name: name.clone(),
            pool: pool.clone(),
            id: None,
            step: MachineStep::Asked,
            since: now,
            why: String::new(),
        };
        self.keep(machine).await?;
        tracing::info!(%pool, machine = %name, "asking for machine");
        self.create(name, now).await
    }

    /// Writes a machine, then counts it as such.
    async fn keep(&mut self, machine: MachineRecord) -> Result<(), Refusal> {
        self.members.queue.write(vec![Document::Machine(machine.clone())], Vec::new()).await?;
        self.machines.insert(machine.name.clone(), machine);
        Ok(())
    }

    async fn set_step(
        &mut self,
        name: &NodeId,
        to: MachineStep,
        why: String,
        now: Timestamp,
    ) -> Result<(), Refusal> {
        let Some(machine) = self.machines.get(name).cloned() else { return Ok(()) };
        tracing::info!(machine = %name, from = machine.step.name(), to = to.name(), why, "moving machine");
        match to {
            MachineStep::Joined => {
                self.members.registry.revoke_for(name).await?;
                self.learn(&machine.pool, name).await?;
            }
            MachineStep::Deleting => self.members.registry.revoke_for(name).await?,
            _ => {}
        }
        self.keep(MachineRecord { step: to, since: now, why, ..machine }).await
    }

    /// Takes in what the machines of the pool have, from one that joined.
    async fn learn(&mut self, pool: &PoolName, name: &NodeId) -> Result<(), Refusal> {
        let (Some(pool), Some(node)) = (self.pools.get_mut(pool), self.nodes.get(name)) else {
            return Ok(());
        };
        let inventory = &node.record.inventory;
        let given = Size::given_by(inventory);
        let seen = Some(Box::new(SeenMachine {
            slots: inventory.slots,
            job_cpus: inventory.job_cpus,
            gpus: u32::try_from(inventory.gpus.len()).unwrap_or(u32::MAX),
            cpus: given.cpus,
            memory: given.memory,
            labels: inventory.labels.clone(),
            gangs: inventory.gangs,
            interpreters: inventory.interpreters.clone(),
        }));
        if pool.seen == seen || inventory.slots == 0 {
            return Ok(());
        }
        pool.seen = seen;
        let written = self.members.queue.write(vec![Document::Pool(pool.clone())], Vec::new()).await;
        written.map_err(Refusal::from)
    }

    /// Has the provider make a machine. Its token admits this machine alone, until it must have joined.
    async fn create(&mut self, name: NodeId, now: Timestamp) -> Result<(), Refusal> {
        let Some(machine) = self.machines.get(&name) else { return Ok(()) };
        let Some(pool) = self.pools.get(&machine.pool) else { return Ok(()) };
        let (pool, Some(identity)) = (pool.clone(), self.identity.clone()) else {
            self.fail(
                &machine.pool.clone(),
                "the controller has no `listen` in its configuration".to_owned(),
                now,
            );
            return Ok(());
        };
        let Some(provider) = self.provider(&pool.name).cloned() else {
            let what = format!("there is no provider `{}` in the controller's configuration", pool.provider);
            self.fail(&pool.name, what, now);
            return Ok(());
        };
        let token = TokenRecord {
            hash: String::new(),
            user: None,
            labels: labels_of(&pool),
            node: Some(name.clone()),
            uses_left: 1,
            until: now + provider.config().deadlines.create + self.join_within(&pool.name),
            by: format!("pool {}", pool.name),
        };
        let fingerprint = identity.authority.fingerprint();
        let issued = self.members.registry.issue(TokenKind::Join, fingerprint, token, now).await;
        let (token, _) = issued.map_err(|_| no_chance())?;
        self.known_machines.entry(name.clone()).or_default().called = true;
        let call = async move {
            let priority = if pool.low_priority { MachinePriority::Low } else { MachinePriority::Dedicated };
            let wish = CreateMachine {
                request: name.as_str(),
                pool: pool.name.as_str(),
                name: &name,
                priority,
                labels: &labels_of(&pool),
                address: &identity.address,
                token: &token.to_string(),
            };
            let made = provider.create(&wish).await;
            Called::Created(name, made)
        };
        self.calls.spawn(call.boxed());
        Ok(())
    }

    /// The provider of a pool failed to make a machine: it is not asked again at once.
    fn fail(&mut self, pool: &PoolName, what: String, now: Timestamp) {
        let known = self.known_pools.entry(pool.clone()).or_default();
        let failing = Failing::after(known.failing.as_ref(), what, now);
        tracing::warn!(%pool, what = failing.what, again = failing.again.utc(), "provider failed");
        known.failing = Some(failing);
    }

    /// Asks the node of a machine to retire, and removes the machine when it has.
    async fn retire(&mut self, name: NodeId, now: Timestamp) -> Result<(), Refusal> {
        let node = self.nodes.get(&name);
        let seen = self.known_machines.entry(name.clone()).or_default();
        if seen.asked && node.is_some_and(|node| node.record.eligibility == Eligibility::Open) {
            seen.asked = false;
            return self
                .set_step(&name, MachineStep::Joined, "its operators opened it".to_owned(), now)
                .await;
        }
        seen.asked = true;
        let silent = seen.silent_since.is_some_and(|since| since.elapsed() > LEAVES_WITHIN);
        let why = self.machines.get(&name).map(|machine| machine.why.clone()).unwrap_or_default();
        match self.members.queue.retire(&name).await? {
            Retirement::Busy => {
                self.known_machines.entry(name.clone()).or_default().asked = false;
                self.set_step(&name, MachineStep::Joined, "it got a job".to_owned(), now).await
            }
            Retirement::Asked if !silent => Ok(()),
            Retirement::Asked | Retirement::Clear | Retirement::Unknown => self.remove(&name, why, now).await,
        }
    }

    /// Takes a machine out of the fleet; then its provider is to remove it.
    async fn remove(&mut self, name: &NodeId, why: String, now: Timestamp) -> Result<(), Refusal> {
        // The record first: a machine that is no node any more must not be taken for one that is coming.
        self.set_step(name, MachineStep::Deleting, why, now).await?;
        self.members.forget(name, true, WHO).await.map(drop)
    }

    fn delete_at_provider(&mut self, name: NodeId) {
        let Some(machine) = self.machines.get(&name) else { return };
        let Some(provider) = self.provider(&machine.pool).cloned() else { return };
        let seen = self.known_machines.entry(name.clone()).or_default();
        let now = self.members.clock.now();
        if seen.failing.as_ref().is_some_and(|failing| failing.again > now) {
            return;
        }
        let (id, pool) = (machine.id.clone(), machine.pool.clone());
        seen.called = true;
        let call = async move {
            let (id, text) = (id.as_deref(), name.as_str());
            let machine = DeleteMachine { pool: pool.as_str(), id, request: text, name: text };
            let deleted = provider.delete(&machine).await;
            Called::Deleted(name, deleted)
        };
        self.calls.spawn(call.boxed());
    }

    /// Asks each provider what it has, when it is time.
    fn list(&mut self) {
        for (name, pool) in &self.pools {
            let Some(provider) = self.handle.providers.get(&pool.provider).cloned() else { continue };
            let known = self.known_pools.entry(name.clone()).or_default();
            let doubts = |machine: &MachineRecord| {
                machine.pool == *name
                    && self.known_machines.get(&machine.name).is_some_and(|seen| seen.missed == 1)
            };
            let wait = if self.machines.values().any(doubts) { LIST_AGAIN } else { LIST };
            if known.lists || known.listed.is_some_and(|at| at.elapsed() < wait) {
                continue;
            }
            (known.lists, known.listed) = (true, Some(Instant::now()));
            let name = name.clone();
            let call = async move {
                let listed = provider.list(name.as_str()).await;
                Called::Listed(name, listed)
            };
            self.calls.spawn(call.boxed());
        }
    }

    /// Takes in the end of a call.
    async fn take_in(&mut self, called: Called) -> Result<(), Refusal> {
        let now = self.members.clock.now();
        match called {
            Called::Created(name, made) => self.created(name, made, now).await,
            Called::Deleted(name, Ok(())) => {
                self.members.queue.write(Vec::new(), vec![Document::name_of_machine(&name)]).await?;
                tracing::info!(machine = %name, "removed machine");
                self.machines.remove(&name);
                Ok(())
            }
            Called::Deleted(name, Err(error)) => {
                let seen = self.known_machines.entry(name.clone()).or_default();
                seen.called = false;
                let what = format!("{name} is not removed: {error}");
                seen.failing = Some(Failing::after(seen.failing.as_ref(), what, now));
                tracing::warn!(machine = %name, %error, "cannot remove machine: trying again");
                Ok(())
            }
            Called::Listed(pool, listed) => {
                let known = self.known_pools.entry(pool.clone()).or_default();
                known.lists = false;
                match listed {
                    Ok(machines) => {
                        known.unlisted = None;
                        self.compare(&pool, &machines);
                    }
                    Err(error) => {
                        let what = format!("its machines cannot be listed: {error}");
                        known.unlisted = Some(Failing::once(what, now, LIST));
                        tracing::warn!(%pool, %error, "cannot list machines: trying again soon");
                    }
                }
                Ok(())
            }
        }
    }

    async fn created(
        &mut self,
        name: NodeId,
        made: Result<String, ProviderError>,
        now: Timestamp,
    ) -> Result<(), Refusal> {
        let seen = self.known_machines.entry(name.clone()).or_default();
        (seen.called, seen.missed) = (false, 0);
        let Some(machine) = self.machines.get(&name).cloned() else { return Ok(()) };
        let pool = machine.pool.clone();
        match made {
            Ok(id) => {
                self.known_pools.entry(pool.clone()).or_default().failing = None;
                tracing::info!(%pool, machine = %name, id, "made machine");
                let id = Some(id);
                self.keep(MachineRecord { id, step: MachineStep::Created, since: now, ..machine }).await
            }
            // It may be there all the same: the same request again finds it.
            Err(error) => {
                self.fail(&pool, error.to_string(), now);
                Ok(())
            }
        }
    }

    /// Compares what a provider has with what was asked for.
    fn compare(&mut self, pool: &PoolName, machines: &[Machine]) {
        let ours = |listed: &Machine| {
            self.machines_of(pool).find(|known| match &known.id {
                Some(id) => listed.id == *id,
                None => {
                    listed.request.as_deref() == Some(known.name.as_str())
                        || listed.name.as_ref() == Some(&known.name)
                }
            })
        };
        let there = |listed: &&Machine| listed.state != MachineState::Gone;
        let orphans: Vec<String> = machines
            .iter()
            .filter(there)
            .filter(|listed| ours(listed).is_none())
            .map(|listed| listed.id.clone())
            .collect();
        let found: Vec<NodeId> =
            machines.iter().filter(there).filter_map(ours).map(|known| known.name.clone()).collect();
        let names: Vec<NodeId> = self.machines_of(pool).map(|machine| machine.name.clone()).collect();
        for name in names {
            let seen = self.known_machines.entry(name.clone()).or_default();
            match found.contains(&name) {
                true => (seen.missed, seen.listed) = (0, true),
                false => seen.missed = seen.missed.saturating_add(1),
            }
        }
        let known = self.known_pools.entry(pool.clone()).or_default();
        if known.orphans != orphans {
            tracing::warn!(%pool, ?orphans, "noticed machines that nobody asked for");
            known.orphans = orphans;
        }
    }
}

fn no_chance() -> Fault {
    Fault::new(Code::Bug, "the system gave no random numbers")
}
