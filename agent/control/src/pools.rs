//! Pools: machines that are made when jobs wait for them, and removed when they are idle.
//!
//! Here is what the services see of them. One task changes everything: [`Keeper`].

mod keeper;
mod plan;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::provider::Provider;
use agent_model::{Code, Fault, JobSpec, NodeId, PoolName, Timestamp};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use crate::refusal::Refusal;
use crate::store::{Document, Loaded, MachineRecord, PoolRecord};
pub(crate) use keeper::Keeper;
use plan::Failing;

/// A pool for those who ask: its record, its machines, and what is known of its provider.
#[derive(Debug, Clone)]
pub(crate) struct PoolReport {
    pub(crate) record: PoolRecord,
    pub(crate) machines: Vec<MachineReport>,
    pub(crate) target: usize,
    pub(crate) target_since: Option<Timestamp>,
    pub(crate) failing: Option<Failing>,
    pub(crate) orphans: Vec<String>,
}

/// A machine for those who ask.
#[derive(Debug, Clone)]
pub(crate) struct MachineReport {
    pub(crate) record: MachineRecord,
    /// `idle`, `running`, `preparing`, `unusable`, `leaving` or `preempted`.
    pub(crate) state: &'static str,
    pub(crate) detail: String,
}

/// What is to be set of a pool; what is absent stays, or gets its default.
#[derive(Debug, Clone)]
pub(crate) struct PoolChange {
    pub(crate) name: PoolName,
    pub(crate) create: bool,
    pub(crate) provider: Option<String>,
    pub(crate) min: Option<u32>,
    pub(crate) max: Option<u32>,
    pub(crate) idle: Option<Duration>,
    pub(crate) low_priority: Option<bool>,
    pub(crate) labels: Option<BTreeMap<String, String>>,
}

#[derive(Debug)]
enum Ask {
    Set(PoolChange, oneshot::Sender<Result<PoolReport, Refusal>>),
    List(oneshot::Sender<Vec<PoolReport>>),
    Delete(PoolName, oneshot::Sender<Result<Vec<NodeId>, Refusal>>),
}

/// The handle of the services. Clones share one keeper.
#[derive(Debug, Clone)]
pub(crate) struct Pools {
    asks: mpsc::Sender<Ask>,
    providers: Arc<BTreeMap<String, Provider>>,
    /// The names of the pools, for every submission.
    names: Arc<Mutex<BTreeSet<PoolName>>>,
}

impl Pools {
    /// The handle, and what [`Keeper::new`] needs of it.
    pub(crate) fn new(providers: BTreeMap<String, Provider>, loaded: &Loaded) -> (Pools, KeeperInbox) {
        let (asks, inbox) = mpsc::channel(32);
        let pools = loaded.all(|one| if let Document::Pool(pool) = one { Some(pool) } else { None });
        let machines = loaded.all(|one| if let Document::Machine(made) = one { Some(made) } else { None });
        let names = pools.iter().map(|pool| pool.name.clone()).collect();
        (
            Pools { asks, providers: Arc::new(providers), names: Arc::new(Mutex::new(names)) },
            KeeperInbox { asks: inbox, pools, machines },
        )
    }

    /// The names of the providers.
    pub(crate) fn providers(&self) -> impl Iterator<Item = &String> {
        self.providers.keys()
    }

    /// The job with the pool that it names as a demand, and what is to be told to who submits it.
    pub(crate) fn demand(&self, spec: JobSpec) -> Result<(JobSpec, Option<String>), Fault> {
        let Some(wanted) = spec.compute.clone() else { return Ok((spec, None)) };
        let names = self.names.lock();
        if let Some(pool) = names.iter().find(|name| name.as_str().eq_ignore_ascii_case(&wanted)) {
            return Ok((spec.on_pool(pool), None));
        }
        if names.is_empty() {
            let told = format!(
                "`compute: {wanted}` has no effect: there are no pools here, so any machine may run it"
            );
            return Ok((spec, Some(told)));
        }
        let names: Vec<&str> = names.iter().map(PoolName::as_str).collect();
        Err(Fault::new(
            Code::NotKnownHere,
            format!("the job is to run in the pool `{wanted}`, and there is none"),
        )
        .why(format!("there are: {}", names.join(", ")))
        .fix("name one of them, or `compute: local` for any machine: --set compute=local"))
    }

    async fn ask<T>(&self, ask: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.asks.send(ask(reply)).await.map_err(|_| Refusal::Stopping)?;
        answer.await.map_err(|_| Refusal::Stopping)
    }

    pub(crate) async fn set(&self, change: PoolChange) -> Result<PoolReport, Refusal> {
        self.ask(|reply| Ask::Set(change, reply)).await?
    }

    pub(crate) async fn list(&self) -> Result<Vec<PoolReport>, Refusal> {
        self.ask(Ask::List).await
    }

    /// The pool is removed once its machines are; returns those.
    pub(crate) async fn delete(&self, name: PoolName) -> Result<Vec<NodeId>, Refusal> {
        self.ask(|reply| Ask::Delete(name, reply)).await?
    }
}

/// What a keeper starts with.
#[derive(Debug)]
pub(crate) struct KeeperInbox {
    asks: mpsc::Receiver<Ask>,
    pools: Vec<PoolRecord>,
    machines: Vec<MachineRecord>,
}
