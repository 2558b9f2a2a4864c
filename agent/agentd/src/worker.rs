//! The node role: what it takes to run replicas.
//!
//! ```text
//! controller ◀── Sync ──▶ reconcile ── Desired ──▶ runner (one per replica) ──▶ fetch, launch, outputs
//!            ◀── Append ── telemetry ◀── lengths ────┤ │
//!            ◀── ReportOutcome ── report ◀── outcome ┘ └── records ──▶ journal
//! ```
//!
//! Owns: what all runners share ([`Worker`]). Only `reconcile` and `runner` use all of it; the others are given the
//! parts they use. A step (`fetch`, `launch`, `outputs`, `containers`, `rendezvous`, `report`) uses no other step and
//! not its caller. The allowed dependencies are a table in `tests/repo/layering.rs`, which a test checks.
//!
//! Tasks: one each of `reconcile`, `telemetry`, `containers`, `environments`, `gpus`, `preemption`, `prestaged_trees`,
//! `sessions` and `upkeep`, one for each replica.
//!
//! Built by `crate::roles`.

mod backoff;
pub(crate) mod containers;
pub(crate) mod data;
pub(crate) mod environments;
mod faults;
mod fetch;
pub(crate) mod gpus;
pub(crate) mod journal;
mod late;
mod launch;
mod outputs;
pub(crate) mod peers;
pub(crate) mod pins;
pub(crate) mod preemption;
pub(crate) mod prestaged_trees;
pub(crate) mod reconcile;
pub(crate) mod recover;
mod rendezvous;
pub(crate) mod report;
pub(crate) mod retention;
mod runner;
pub(crate) mod secrets;
pub(crate) mod sessions;
mod slurm;
mod stand_in;
pub(crate) mod standing;
pub(crate) mod system;
pub(crate) mod telemetry;
pub(crate) mod tracking;
pub(crate) mod upkeep;
pub(crate) mod users;
pub(crate) mod views;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_cas::Store;
use agent_cas::gc::Collector;
use agent_model::{Clock, ReplicaId};
use agent_runtime::env::Environments;
use agent_runtime::exec::Executor;
use agent_shim::JobDir;
use tokio::sync::Notify;

use crate::config::Config;
use crate::disk::DiskKeeper;
use data::Data;
use gpus::Gpus;
use journal::Journal;
use preemption::Preemptions;
use prestaged_trees::PrestagedTrees;
use report::Outbox;
use retention::Retention;
use secrets::Secrets;
use system::RunningUse;
use telemetry::Telemetry;
use tracking::Tracking;
use users::Users;
use views::Views;

/// What all runners of a node share.
pub(crate) struct Worker {
    pub(crate) config: Config,
    pub(crate) clock: Arc<dyn Clock>,
    /// The id of this boot of the machine.
    pub(crate) boot_id: String,
    pub(crate) journal: Arc<dyn Journal>,
    pub(crate) store: Store,
    /// Makes room in the part of the store on this disk.
    pub(crate) collector: Collector,
    pub(crate) prestaged_trees: PrestagedTrees,
    pub(crate) environments: Environments,
    /// What jobs read and nobody sends.
    pub(crate) data: Data,
    /// Notified when an environment was built.
    pub(crate) built: Arc<Notify>,
    pub(crate) executor: Arc<dyn Executor>,
    pub(crate) gpus: Gpus,
    pub(crate) telemetry: Telemetry,
    /// What running jobs take.
    pub(crate) taken: RunningUse,
    pub(crate) outbox: Outbox,
    pub(crate) tracking: Tracking,
    pub(crate) retention: Retention,
    pub(crate) users: Users,
    pub(crate) views: Views,
    pub(crate) secrets: Secrets,
    pub(crate) preemptions: Preemptions,
    /// The memory limit of a job that sets none, in bytes; 0 is no limit.
    pub(crate) job_memory: u64,
    pub(crate) disk: DiskKeeper,
}

impl Worker {
    /// Whether jobs have a `/tmp` of their own; not where it would hide their directories.
    fn gives_tmp(&self) -> bool {
        let hidden = ["/tmp", "/dev/shm"].iter().any(|place| self.config.state_dir.starts_with(place));
        self.config.jobs.private && !hidden
    }

    fn job_dir(&self, replica: &ReplicaId) -> JobDir {
        JobDir::new(jobs_dir(&self.config.state_dir).join(replica.to_string()))
    }
}

/// Where the job directories are.
pub(crate) fn jobs_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("jobs")
}
