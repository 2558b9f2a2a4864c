//! Builds software environments, or finds them ready, and keeps them.
//!
//! Owns one directory of built environments, and hides how each kind is built, who builds it when several jobs want
//! it, and how the remains of a killed builder are removed.
//!
//! Invariants:
//! - an environment exists only with its marker, which is written last; a directory without one is wiped;
//! - it is named by its content (kind and digest), never by the name a job gives it;
//! - it is built once for any number of waiters: tasks of one process share one build ([`single_flight`]), processes
//!   share a lock file ([`cache`]), and each waiter gets the same build log;
//! - a build goes on only while somebody waits for it, and it is not changed while an [`EnvLease`] is held.
//!
//! There are no tasks: a build is a shared future, polled by its waiters. A new kind of environment is a new
//! [`EnvBuilder`].

mod aftercare;
mod build_workspace;
mod builder;
mod cache;
mod channels;
mod conda;
mod config;
mod curated;
mod dists;
mod downloads;
mod engine;
mod error;
#[cfg(any(test, feature = "fakes"))]
mod fake;
mod glibc;
mod host;
mod image;
mod install;
mod interpreter;
mod kept;
mod marker;
mod owners;
mod pip;
mod pip_output;
mod pip_settings;
mod present;
mod progress;
mod single_flight;
#[cfg(test)]
mod tests;
mod trash;
mod uv;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use agent_model::EnvSpec;
use agent_model::words::duration;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::watch;

pub use crate::docker::Image;
pub use agent_env::{Phase, Progress};
pub use build_workspace::{BuildWorkspace, Built};
pub use builder::Builder;
pub use cache::EnvLease;
pub use config::{CondaConfig, Contexts, EnvConfig, Uv};
pub use error::{AcquireError, OpenEnvError};
#[cfg(any(test, feature = "fakes"))]
pub use fake::{Script, Scripted};
pub use image::{GpuVerdict, judge_gpu};
pub use kept::{Kept, RemoveError};
pub use owners::OwnerBuilders;
pub use progress::describe;

use cache::{EnvCache, Left};
use conda::Conda;
use curated::Curated;
pub(crate) use engine::Ear;
use engine::Engine;
use host::Host;
use image::Images;
use install::Installer;
use interpreter::Interpreters;
use pip::Pip;
use single_flight::{Made, SingleFlights};

/// Builds environments of one kind.
pub trait EnvBuilder: Send + Sync + 'static {
    /// Whether it builds environments for this specification.
    fn handles(&self, spec: &EnvSpec) -> bool;

    /// The identity of the environment as one text: the specification, the interpreter, the platform, the version of
    /// the builder. Cheap when repeated, because every job asks.
    fn identity<'a>(&'a self, spec: &'a EnvSpec) -> BoxFuture<'a, Result<String, AcquireError>>;

    /// Whether code of packages writes the environment: then it belongs to one owner of jobs. Other environments are
    /// written by the daemon's own programs from what has the expected digest, and shared by all.
    fn runs_packages(&self, spec: &EnvSpec) -> bool {
        let _ = spec;
        false
    }

    /// The variables that the specification sets for commands in the environment; not part of its identity.
    fn variables(&self, spec: &EnvSpec) -> BTreeMap<String, String> {
        let _ = spec;
        BTreeMap::new()
    }

    /// How a ready environment is damaged outside of its directory, if it is.
    fn verify<'a>(
        &'a self,
        spec: &'a EnvSpec,
        lease: &'a EnvLease,
    ) -> BoxFuture<'a, Result<Option<String>, AcquireError>> {
        let _ = (spec, lease);
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Builds the environment in the empty directory of the build workspace, its final place. May be dropped at any
    /// await; what it left is wiped.
    fn build<'a>(
        &'a self,
        spec: &'a EnvSpec,
        workspace: &'a BuildWorkspace,
    ) -> BoxFuture<'a, Result<Built, AcquireError>>;
}

/// The environments of a node; clones share them.
#[derive(Clone)]
pub struct Environments {
    builders: Arc<[Arc<dyn EnvBuilder>]>,
    interpreters: Arc<Interpreters>,
    engine: Arc<Engine>,
    curated: Arc<Curated>,
    images: Option<Arc<Images>>,
    cache: EnvCache,
    flights: Arc<SingleFlights>,
    owners: Option<Arc<OwnerBuilders>>,
    common: Option<Builder>,
    owner: Arc<str>,
}

/// Who builds what the operator of the node has defined, which all users share.
const OPERATOR: &str = "operator";

impl Environments {
    /// Opens the directory and wipes what killed builders left half-built. Blocks.
    pub fn open(config: EnvConfig) -> Result<Environments, OpenEnvError> {
        let config = Arc::new(config);
        let interpreters = Arc::new(Interpreters::new(config.clone()));
        let installer = Arc::new(Installer::new(config.clone()));
        let engine = Arc::new(Engine::new(config.clone()));
        let images = config.docker.clone().map(|docker| {
            let conda = Conda::new(config.clone(), engine.clone(), installer.clone());
            Arc::new(Images::new(config.clone(), docker, conda))
        });
        let mut builders: Vec<Arc<dyn EnvBuilder>> = vec![
            Arc::new(Conda::new(config.clone(), engine, installer.clone())),
            Arc::new(Pip::new(config.clone(), interpreters.clone(), installer)),
            Arc::new(Host::new(config.clone(), interpreters.clone())),
        ];
        builders.extend(images.iter().flat_map(|images| images.builders()));
        let environments = Environments::assemble(&config, builders.into(), interpreters)?;
        Ok(Environments { images, ..environments })
    }

    /// With other builders than those of a node; a specification goes to the first builder that handles it.
    pub fn with_builders(
        config: &EnvConfig,
        builders: Arc<[Arc<dyn EnvBuilder>]>,
    ) -> Result<Environments, OpenEnvError> {
        let interpreters = Arc::new(Interpreters::new(Arc::new(config.clone())));
        Environments::assemble(config, builders, interpreters)
    }

    fn assemble(
        config: &EnvConfig,
        builders: Arc<[Arc<dyn EnvBuilder>]>,
        interpreters: Arc<Interpreters>,
    ) -> Result<Environments, OpenEnvError> {
        let cache = EnvCache::open(&config.root, config.writable)?;
        let engine = Engine::new(Arc::new(config.clone()));
        let flights = Arc::new(SingleFlights::new(config.stall, config.memory));
        Ok(Environments {
            builders,
            interpreters,
            engine: Arc::new(engine),
            curated: Arc::new(Curated::new(config)),
            images: None,
            cache,
            flights,
            owners: config.owners.clone(),
            common: config.builder.clone(),
            owner: OPERATOR.into(),
        })
    }

    /// The same for an owner of jobs. What code of packages has written he shares with nobody, unless the operator of
    /// the node has defined it.
    pub fn of(&self, owner: &str) -> Environments {
        Environments { owner: owner.into(), ..self.clone() }
    }

    /// The interpreters of this node that jobs can name and that work, best first. Each is asked once, so this is
    /// cheap when repeated.
    pub fn interpreters(&self) -> BoxFuture<'_, Vec<agent_model::node::Interpreter>> {
        async move { self.interpreters.all().await }.boxed()
    }

    /// The same, if all of them were asked before; nothing is asked now. Blocking.
    pub fn known_interpreters(&self) -> Option<Vec<agent_model::node::Interpreter>> {
        self.interpreters.all_known()
    }

    /// The ready environment of a specification; it is built if it does not exist.
    ///
    /// The builder's output is appended to the file `log` meanwhile, also when another caller or another process
    /// started the build. Dropping the future ends the wait, and ends the build if nobody else waits. Progress is
    /// reported on the channel; `None` when nothing is being built. A lasting failure is not tried again for a
    /// minute.
    pub fn acquire<'a>(
        &'a self,
        spec: &'a EnvSpec,
        log: &'a Path,
        told: &'a watch::Sender<Option<Progress>>,
    ) -> BoxFuture<'a, Result<EnvLease, AcquireError>> {
        async move {
            if let EnvSpec::Named { reference } = spec {
                let (named, operators) = (self.curated.resolve(reference)?, self.of(OPERATOR));
                return operators.acquire(&named, log, told).await;
            }
            match (&self.images, spec) {
                (Some(images), EnvSpec::Image { image, conda: Some(document) }) => {
                    self.compose(images, spec, image, document, log, told).await
                }
                _ => {
                    let builder = self.builders.iter().find(|builder| builder.handles(spec));
                    let builder = builder.ok_or(AcquireError::Unsupported { kind: spec.kind() })?;
                    self.get(builder, spec, log, told).await
                }
            }
        }
        .boxed()
    }

    /// The environment that one builder builds for a specification.
    async fn get(
        &self,
        builder: &Arc<dyn EnvBuilder>,
        spec: &EnvSpec,
        log: &Path,
        told: &watch::Sender<Option<Progress>>,
    ) -> Result<EnvLease, AcquireError> {
        let identity = builder.identity(spec).await?;
        let owners = self.owners.as_ref().filter(|_| builder.runs_packages(spec));
        let place = match owners {
            Some(_) => self.cache.place(spec.kind(), &format!("{identity}\nof {}", self.owner)),
            None => self.cache.place(spec.kind(), &identity),
        };
        let who = || self.who(owners);
        let mut took = None;
        loop {
            if let Some(lease) = place.lease(took)? {
                let damage = match place.inspect(&lease).await? {
                    None => builder.verify(spec, &lease).await?,
                    damage => damage,
                };
                let Some(damage) = damage else {
                    let left = place.left(&lease);
                    if left != Left::default() {
                        self.flights.look_after(&place, left, who().await?);
                    }
                    return Ok(lease.with_variables(builder.variables(spec)));
                };
                place.condemn()?;
                tracing::warn!(key = lease.key(), damage, "rebuilding changed environment");
                note(
                    log,
                    &format!("{} was changed since it was built: {damage}; it is built anew\n", lease.key()),
                );
            }
            let flight = SingleFlights::join(&self.flights, &place, builder, spec, who().await?)?;
            if let Made::Anew(time) = flight.follow(log, told).await? {
                took = Some(took.unwrap_or_default() + time);
            }
        }
    }

    /// Who runs code of packages, if that is not the daemon's user.
    async fn who(&self, owners: Option<&Arc<OwnerBuilders>>) -> Result<Option<Builder>, AcquireError> {
        let Some(owners) = owners else { return Ok(self.common.clone()) };
        let (owners, owner) = (owners.clone(), self.owner.clone());
        let given = agent_blocking::blocking_io(move || owners.of(&owner)).await;
        given.map(Some).map_err(AcquireError::io("find a builder for", Path::new(&*self.owner)))
    }

    /// An image with a conda environment of this machine: two environments, each of which may be shared with others,
    /// and one that records that they work together.
    async fn compose(
        &self,
        images: &Arc<Images>,
        spec: &EnvSpec,
        image: &str,
        document: &str,
        log: &Path,
        told: &watch::Sender<Option<Progress>>,
    ) -> Result<EnvLease, AcquireError> {
        let ground = EnvSpec::Image { image: image.to_owned(), conda: None };
        let packages = EnvSpec::Conda { file: String::new(), document: document.to_owned(), lock: None };
        images.conda().identity(&packages).await?; // a file that cannot be read is reported before anything is pulled
        let ground = self.get(images.pull(), &ground, log, told).await?;
        let (conda, glibc) = images.conda_in(&ground).await?;
        let packages = self.get(&conda, &packages, log, told).await?;
        let together = images.together(&ground, glibc, &packages);
        let lease = self.get(&together, spec, log, told).await?;
        let is_last_step = ground.reused() && packages.reused();
        let lease = lease.with_parts(vec![ground, packages]);
        if let Some(took) = lease.took().filter(|_| !is_last_step) {
            note(log, &format!("{} is ready after {} in all\n", lease.key(), duration(took)));
        }
        Ok(lease)
    }

    /// Takes a lease of the environment with this key, as [`EnvLease::key`] gave it before a restart of the daemon:
    /// for a command that still runs in it. `None` when it does not exist, or a builder works on it.
    pub fn hold(&self, key: &str) -> Option<EnvLease> {
        let place = self.cache.found(key)?;
        let lease = place
            .lease(None)
            .inspect_err(|error| tracing::warn!(key, %error, "it cannot be held"))
            .ok()??;
        let parts = lease.parts().iter().filter_map(|part| self.hold(part)).collect();
        Some(lease.with_parts(parts))
    }

    /// The ready environments, in the order of their keys. Blocks: looks at each.
    pub fn list(&self) -> Vec<Kept> {
        self.cache.list()
    }

    /// Removes an environment that is not in use, and returns how many bytes that frees; its files may be deleted a
    /// little later. Blocks.
    pub fn remove(&self, key: &str) -> Result<u64, RemoveError> {
        self.flights.leave(key);
        self.cache.remove(key)
    }

    /// Removes the images of environments that are gone. One that cannot be removed now stays noted.
    pub fn discard(&self) -> BoxFuture<'_, ()> {
        async move {
            if let Some(images) = &self.images {
                images.discard(&self.cache).await;
            }
        }
        .boxed()
    }

    /// Marks an environment as one that is never removed to make room, or removes the mark. Blocks briefly.
    pub fn pin(&self, key: &str, pinned: bool) -> Result<(), RemoveError> {
        self.cache.pin(key, pinned)
    }

    /// Removes packages from the cache that no environment shares and that were unused for this long, the caches of
    /// installers of owners for whom nothing was built as long, and remains of killed builds and removals. Returns how many
    /// bytes that freed.
    pub fn sweep(&self, unused_for: Duration) -> BoxFuture<'_, Result<u64, AcquireError>> {
        async move {
            // Removed environments first: packages that only they share are no longer needed.
            let cache = self.cache.clone();
            let emptied = agent_blocking::spawn_blocking(move || trash::remove_all(cache.trash())).await;
            if let Err(error) = emptied {
                tracing::warn!(%error, "cannot remove all of cache entry");
            }
            let freed = self.engine.sweep(unused_for).await?;
            let Some(owners) = self.owners.clone() else { return Ok(freed) };
            let caches = agent_blocking::blocking_io(move || owners.sweep(unused_for)).await;
            let fail = AcquireError::io("sweep", Path::new("packages/of"));
            Ok(freed + caches.map_err(fail)?)
        }
        .boxed()
    }
}

/// Adds a line to a waiter's log; a failure loses no more than that line.
pub fn note(log: &Path, line: &str) {
    let file = std::fs::OpenOptions::new().create(true).append(true).open(log);
    if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
        tracing::warn!(path = %log.display(), %error, "lost line of build log");
    }
}
