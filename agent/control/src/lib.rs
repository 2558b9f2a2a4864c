//! The controller: it accepts jobs, decides where they run, receives their outcomes, and stores them.
//!
//! Owns the queue, the scheduler, the leases, the database and the archive of logs. Hides SQL, files and the wire
//! format: the public type is [`Controller`], which serves gRPC services and works in one task. It does not know how
//! anything runs: nodes send it reports, and carry out its orders.
//!
//! ```text
//! api ──▶ queue (one task: book ─▶ lease, scheduler) ──▶ store        api ──▶ archive
//!                          pins ◀── what is needed of the blobs
//! ```
//!
//! Invariants: a change that was confirmed to a caller is on disk; an outcome counts once, and only when its logs
//! have arrived completely; a restart of the controller changes nothing for any job.
//!
//! What others await is boxed here, so that this crate has the code of it (ADR 0071).

/// Whether a test has switched off the rule at this place. Always false outside tests.
#[cfg(test)]
macro_rules! broken {
    ($rule:ident) => {
        crate::sim::mutant::is(crate::sim::mutant::Mutant::$rule)
    };
}
#[cfg(not(test))]
macro_rules! broken {
    ($rule:ident) => {
        false
    };
}

mod aging;
mod api;
mod archive;
mod audit;
mod counts;
mod fanout;
mod lease;
mod members;
mod pins;
mod pools;
pub mod provider;
mod queue;
mod refusal;
mod registry;
mod scheduler;
mod secrets;
mod sessions;
#[cfg(test)]
mod sim;
mod standby;
mod store;
mod tunnels;
mod vitals;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use agent_cas::gc::Collector;
use agent_identity::{GrantKeys, GrantKeysError};
use agent_model::Clock;
use agent_model::lease::Terms;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

pub use api::{LogIntake, Operators, Peer, hide_what_it_does};
pub use members::IdentityConfig;
use provider::Provider;
pub use queue::{HarmedDatabase, Work};
pub use scheduler::{UserLimits, used_by};
pub use standby::{ControllerStops, ShutdownPlan, Standby};
use store::{Loaded, Store};
pub use store::{OpenStoreError, StoreError};
pub use tunnels::{KeptTunnel, TunnelDesk, TunnelRequest, Tunnels};
pub use vitals::Vitals;

/// The settings of a controller.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// The daemon's state directory; the controller keeps everything in `controller/` below it.
    pub state_dir: PathBuf,
    /// How long a node counts as connected after a report.
    pub lease: Duration,
    /// How long a job that may be replaced may run without contact.
    pub terms: Terms,
    /// What the jobs of one user may have at a time.
    pub limits: UserLimits,
    /// Who may do operations that affect everybody.
    pub operators: Operators,
    /// How many bytes of each log of a job are kept; of its metrics, a quarter of that.
    pub archive_quota: u64,
    /// How long an ended job is on record, with its logs; `None` is until somebody removes it.
    pub keep_records: Option<Duration>,
    /// The authority that signs certificates, if other machines are served.
    pub identity: Option<IdentityConfig>,
    /// Whoever keeps the connections to hosts that cannot connect to this controller.
    pub tunnels: Option<Tunnels>,
    /// What makes the machines of pools, by name.
    pub providers: BTreeMap<String, Provider>,
    /// The names of data that its operator gave.
    pub mapped: MappedNames,
}

impl ControllerConfig {
    /// The lease if none is configured.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(15);

    /// More than anybody reads of a log, and less than any disk of a controller.
    const DEFAULT_ARCHIVE_QUOTA: u64 = 16 << 30;

    /// The usual settings.
    pub fn new(state_dir: impl Into<PathBuf>, operators: Operators) -> ControllerConfig {
        ControllerConfig {
            state_dir: state_dir.into(),
            lease: Self::DEFAULT_LEASE,
            terms: Terms::default(),
            limits: UserLimits::default(),
            operators,
            archive_quota: Self::DEFAULT_ARCHIVE_QUOTA,
            keep_records: None,
            identity: None,
            tunnels: None,
            providers: BTreeMap::new(),
            mapped: MappedNames::default(),
        }
    }
}

/// The names of data in the operator's `data_map`, as they are when somebody asks. Clones ask the same.
#[derive(Clone)]
pub struct MappedNames(Arc<dyn Fn() -> BTreeSet<String> + Send + Sync>);

impl MappedNames {
    /// `names` may block.
    pub fn new(names: impl Fn() -> BTreeSet<String> + Send + Sync + 'static) -> MappedNames {
        MappedNames(Arc::new(names))
    }

    /// Blocks.
    pub(crate) fn names(&self) -> BTreeSet<String> {
        (self.0)()
    }
}

impl Default for MappedNames {
    fn default() -> MappedNames {
        MappedNames::new(BTreeSet::new)
    }
}

impl fmt::Debug for MappedNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MappedNames")
    }
}

/// Why a controller cannot start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum OpenError {
    #[error("cannot make the controller's directory {}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error("the controller's database cannot be used")]
    Store(#[source] OpenStoreError),
    #[error("the jobs of an earlier run cannot be read")]
    Load(#[source] StoreError),
    #[error("the keys with which orders are proved cannot be used")]
    Grants(#[source] GrantKeysError),
    #[error("the system gave no random numbers")]
    Chance(#[source] io::Error),
}

/// The jobs of the controller in this state directory that have not ended, oldest first. It may be running or not, and
/// there may never have been one.
pub fn unfinished_jobs(state_dir: &std::path::Path) -> BoxFuture<'_, Result<Vec<String>, StoreError>> {
    async move { store::unfinished(&state_dir.join("controller/db")).await }.boxed()
}

/// A controller. Serve [`Controller::routes`] while [`Controller::run`] works.
pub struct Controller {
    services: api::Services,
    task: queue::Task,
    keeper: pools::Keeper,
    keep_records: Option<Duration>,
    store: Arc<dyn Store>,
    vitals: Vitals,
}

/// The keys that prove what nodes were given.
fn grant_keys(home: &std::path::Path, loaded: &Loaded) -> Result<GrantKeys, OpenError> {
    let path = home.join("grant.keys");
    let gave = loaded.documents.iter().any(|document| matches!(document, store::Document::Life(_)));
    if gave && !path.exists() {
        tracing::warn!(
            path = %path.display(),
            "the keys are gone: what nodes were given before can be proved again once they have heard this controller"
        );
    }
    GrantKeys::open(&path).map_err(OpenError::Grants)
}

/// When a long history is checked: the time after a start belongs to the jobs.
const CHECK_AFTER: Duration = Duration::from_secs(30);

impl Controller {
    /// The name under which a collector knows the controller as a user of its store.
    pub const BLOB_USER: &str = pins::USER;

    /// Opens or creates the controller's state and loads every job that has not ended. The collector of its blobs can
    /// then ask which ones it needs.
    pub fn open(
        config: ControllerConfig,
        clock: Arc<dyn Clock>,
        blobs: agent_cas::Store,
        collector: Collector,
    ) -> BoxFuture<'static, Result<Controller, OpenError>> {
        async move {
            let home = config.state_dir.join("controller");
            let archive_dir = home.join("archive");
            let make = |path: &PathBuf| {
                std::fs::create_dir_all(path)
                    .map_err(|source| OpenError::Directory { path: path.clone(), source })
            };
            make(&home)?;
            // Results of actions of builds, which earlier releases kept.
            let _ = std::fs::remove_dir_all(home.join("actions"));
            let store = store::open(&home.join("db"), &archive_dir).await.map_err(OpenError::Store)?;
            make(&archive_dir)?; // after the database: where an archive exists, a missing one is lost
            let loaded = store.load().await.map_err(OpenError::Load)?;
            let controller_epoch =
                getrandom::u64().map_err(|error| OpenError::Chance(io::Error::other(error.to_string())))?;
            let documents = Loaded { documents: loaded.documents.clone(), ..Loaded::default() };
            let (pools, inbox) = pools::Pools::new(config.providers, &documents);
            let (queue, task) = queue::queue(
                loaded,
                config.lease,
                config.terms,
                config.limits,
                controller_epoch,
                Arc::clone(&store),
                Arc::clone(&clock),
            );
            let vitals = Vitals::new(queue.clone(), Arc::clone(&clock), task.counts());
            let assets = queue::assets::Assets::new(&task.names(), queue.clone());
            collector.held_by(pins::USER, pins::all(queue.clone(), Arc::clone(&store), assets.clone()));
            let keys = grant_keys(&home, &documents)?;
            let registry = registry::Registry::new(&documents, queue.clone());
            let sessions = sessions::Sessions::default();
            let gate = api::Gate {
                operators: config.operators,
                registry: registry.clone(),
                sessions: sessions.clone(),
                audit: audit::Audit::new(&home),
                clock: Arc::clone(&clock),
                transfers: standby::Transfers::default(),
            };
            let members = members::Members {
                queue: queue.clone(),
                registry: registry.clone(),
                sessions,
                fanout: Arc::default(),
                tunnels: config.tunnels,
                clock: Arc::clone(&clock),
            };
            let keeper = pools::Keeper::new(inbox, pools.clone(), members.clone(), config.identity.clone());
            let services = api::Services {
                gate,
                identity: config.identity,
                mapped: config.mapped,
                queue,
                store: Arc::clone(&store),
                archive: archive::Archive::new(&archive_dir, config.archive_quota),
                blobs,
                collector,
                lease: config.lease.min(config.terms.length),
                secrets: secrets::Secrets::new(&home),
                grants: api::Grants::new(keys, registry),
                assets,
                observer: api::Observer::default(),
                offers: api::Offers::default(),
                pools,
                members,
                board: standby::Board::open(&home),
                about: api::About::new(&config.state_dir, &*clock),
            };
            Ok(Controller { services, task, keeper, keep_records: config.keep_records, store, vitals })
        }
        .boxed()
    }

    /// Every service of the controller, for any number of servers.
    ///
    /// Calls wait until [`Controller::run`] works and fail as unavailable once it ended.
    pub fn routes(&self) -> tonic::service::Routes {
        self.services.routes()
    }

    /// For the logs of a node in this process.
    pub fn log_intake(&self) -> LogIntake {
        LogIntake::new(self.services.clone())
    }

    /// Shows whether the main loop is running, for a watchdog.
    pub fn rounds(&self) -> Rounds {
        Rounds(self.services.queue.clone())
    }

    /// Its numbers, for Prometheus.
    pub fn vitals(&self) -> Vitals {
        self.vitals.clone()
    }

    /// For whoever shuts the machine down.
    pub fn standby(&self) -> Standby {
        let api::Services { queue, board, gate, .. } = &self.services;
        Standby { queue: queue.clone(), board: board.clone(), transfers: gate.transfers.clone() }
    }

    /// Works until `shutdown`, then writes all unwritten changes and ends all streams.
    pub fn run(
        self,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> BoxFuture<'static, Result<(), HarmedDatabase>> {
        self.work_until(shutdown.boxed())
    }

    fn work_until(self, shutdown: BoxFuture<'static, ()>) -> BoxFuture<'static, Result<(), HarmedDatabase>> {
        async move {
            // The others end with the queue.
            let queue = self.services.queue.clone();
            let check = async {
                tokio::time::sleep(CHECK_AFTER).await;
                self.store.check_rest().await;
            };
            let check = async {
                tokio::select! {
                    () = check => {}
                    () = queue.closed() => {}
                }
            };
            let (seen, reused) = (self.services.clone(), self.services.clone());
            let aging = aging::run(self.services, self.keep_records);
            let (observed, reused) = (seen.observe_again(), reused.check_reuse());
            let (ended, ..) =
                tokio::join!(self.task.run(shutdown), self.keeper.run(), aging, check, observed, reused);
            self.store.close().await;
            ended
        }
        .boxed()
    }
}

/// Shows whether a controller's main loop is running. Clones show the same one.
#[derive(Clone)]
pub struct Rounds(queue::Queue);

impl Rounds {
    /// Returns when the controller's main loop has completed one more round. That needs nothing outside this process,
    /// and no success of the store.
    pub async fn next(&self) {
        self.0.come_round().await;
    }
}

impl fmt::Debug for Rounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rounds").finish_non_exhaustive()
    }
}

impl fmt::Debug for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controller").field("about", &self.services.about).finish_non_exhaustive()
    }
}
