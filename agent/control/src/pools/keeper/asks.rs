//! What the services ask of the keeper.

use std::collections::BTreeMap;

use agent_model::machine::Liveness;
use agent_model::{Code, Fault, NodeId, PoolName, Timestamp};

use super::{IDLE, Keeper};
use crate::pools::{Ask, MachineReport, PoolChange, PoolReport};
use crate::refusal::{Refusal, invalid};
use crate::store::{Document, MachineRecord, MachineStep, Notice, PoolRecord};

impl Keeper {
    pub(super) async fn answer(&mut self, ask: Ask) {
        // Whoever asked may be gone.
        match ask {
            Ask::Set(change, reply) => drop(reply.send(self.set(change).await)),
            Ask::List(reply) => drop(reply.send(self.reports())),
            Ask::Delete(name, reply) => drop(reply.send(self.delete(&name).await)),
        }
    }

    /// Makes a pool, or changes one.
    async fn set(&mut self, change: PoolChange) -> Result<PoolReport, Refusal> {
        let now = self.members.clock.now();
        let before = self.pools.get(&change.name).cloned();
        let pool = changed(before, change, now)?;
        if !self.handle.providers.contains_key(&pool.provider) {
            let names: Vec<&str> = self.handle.providers().map(String::as_str).collect();
            let fault =
                Fault::new(Code::NotKnownHere, format!("there is no provider `{}` here", pool.provider));
            return Err(match names[..] {
                [] => fault.why("the controller's configuration names none"),
                _ => fault.why(format!("the controller's configuration has: {}", names.join(", "))),
            }
            .fix("add it under `providers` in the controller's configuration, and restart the daemon there")
            .into());
        }
        if self.identity.is_none() {
            let fault = Fault::new(Code::NoListener, "this controller serves its own machine alone");
            return Err(fault
                .fix("set `listen: 0.0.0.0:7443` in its configuration and start it again")
                .into());
        }
        self.members.queue.write(vec![Document::Pool(pool.clone())], Vec::new()).await?;
        let name = pool.name.clone();
        self.handle.names.lock().insert(name.clone());
        // A change may be the remedy.
        let known = self.known_pools.entry(name.clone()).or_default();
        (known.failing, known.unlisted) = (None, None);
        for machine in self.machines.values().filter(|machine| machine.pool == name) {
            self.known_machines.entry(machine.name.clone()).or_default().failing = None;
        }
        self.pools.insert(name.clone(), pool);
        self.report(&name).ok_or_else(|| unknown_pool(&name).into())
    }

    async fn delete(&mut self, name: &PoolName) -> Result<Vec<NodeId>, Refusal> {
        let pool = self.pools.get(name).cloned().ok_or_else(|| unknown_pool(name))?;
        let now = self.members.clock.now();
        let pool = PoolRecord { deleting: true, modified_at: now, ..pool };
        self.members.queue.write(vec![Document::Pool(pool.clone())], Vec::new()).await?;
        self.pools.insert(name.clone(), pool);
        self.round().await?;
        Ok(self.machines_of(name).map(|machine| machine.name.clone()).collect())
    }

    fn reports(&self) -> Vec<PoolReport> {
        self.pools.keys().filter_map(|name| self.report(name)).collect()
    }

    fn report(&self, name: &PoolName) -> Option<PoolReport> {
        let known = self.known_pools.get(name);
        let record = self.pools.get(name)?.clone();
        let removals = self.machines_of(name).filter_map(|machine| self.known_machines.get(&machine.name));
        let failing = removals.filter_map(|machine| machine.failing.as_ref());
        let failing =
            failing.chain(known.into_iter().flat_map(|known| [&known.failing, &known.unlisted]).flatten());
        Some(PoolReport {
            machines: self.machines_of(name).map(|machine| self.machine_report(&record, machine)).collect(),
            record,
            target: known.map_or(0, |known| known.target),
            target_since: known.and_then(|known| known.target_since),
            failing: failing.max_by_key(|failing| failing.at).cloned(),
            orphans: known.map(|known| known.orphans.clone()).unwrap_or_default(),
        })
    }

    fn machine_report(&self, pool: &PoolRecord, machine: &MachineRecord) -> MachineReport {
        let node = self.nodes.get(&machine.name);
        let ready = node.is_some_and(|node| node.record.liveness == Liveness::Ready);
        let notice = node.and_then(|node| node.record.preemption.notice());
        let state = match machine.step {
            MachineStep::Asked | MachineStep::Created => "preparing",
            MachineStep::Leaving | MachineStep::Deleting => "leaving",
            MachineStep::Joined if notice.is_some() => "preempted",
            MachineStep::Joined if !ready => "unusable",
            MachineStep::Joined if node.is_some_and(|node| !node.jobs.is_empty()) => "running",
            MachineStep::Joined => "idle",
        };
        let detail = match machine.step {
            MachineStep::Asked | MachineStep::Created => self.coming(pool, machine),
            _ => notice.map_or_else(|| machine.why.clone(), Notice::describe),
        };
        MachineReport { record: machine.clone(), state, detail }
    }
}

/// A pool after a change.
fn changed(before: Option<PoolRecord>, change: PoolChange, now: Timestamp) -> Result<PoolRecord, Fault> {
    let name = change.name;
    let mut pool = match before {
        Some(_) if change.create => {
            return Err(Fault::new(Code::RequestInvalid, format!("there is a pool `{name}` already"))
                .fix(format!("change it with: agentctl pool set {name}")));
        }
        Some(pool) if pool.deleting => {
            return Err(Fault::new(Code::RequestInvalid, format!("the pool `{name}` is being removed"))
                .fix("wait until it is gone, and make it anew"));
        }
        Some(pool) => pool,
        None if !change.create => return Err(unknown_pool(&name)),
        None => PoolRecord {
            name,
            provider: String::new(),
            min: 0,
            max: 0,
            idle: IDLE,
            low_priority: false,
            labels: BTreeMap::new(),
            created_at: now,
            modified_at: now,
            deleting: false,
            seen: None,
        },
    };
    if let Some(provider) = change.provider.filter(|provider| *provider != pool.provider) {
        (pool.provider, pool.seen) = (provider, None);
    }
    pool.min = change.min.unwrap_or(pool.min);
    pool.max = change.max.unwrap_or(pool.max.max(pool.min));
    pool.idle = change.idle.unwrap_or(pool.idle);
    pool.low_priority = change.low_priority.unwrap_or(pool.low_priority);
    pool.labels = change.labels.unwrap_or(pool.labels);
    pool.modified_at = now;
    if pool.min > pool.max {
        let what = format!("a pool of at least {} and at most {} machines is none", pool.min, pool.max);
        return Err(invalid(what));
    }
    Ok(pool)
}

fn unknown_pool(name: &PoolName) -> Fault {
    Fault::new(Code::NotKnownHere, format!("there is no pool `{name}`"))
        .fix("list them with `agentctl pool list`; make it with `agentctl pool create`")
}
