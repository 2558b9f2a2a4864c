//! Ready environments: give me this software stack, usable.
//!
//! Owns one directory of built environments, and hides how each kind is built, who builds it when several
//! want it, and what a killed builder leaves behind.
//!
//! Invariants:
//! - an environment exists only with its marker, which is written last; anything else is wiped;
//! - it is named by its content (kind and digest), never by the name a job gives it;
//! - it is built once however many want it: tasks of one process share one build ([`flight`]), processes share a
//!   lock file ([`shelf`]), and each of them gets the same build log;
//! - a build lives as long as somebody waits for it, and it is not touched while an [`EnvLease`] is held.
//!
//! There are no tasks: a build is a shared future, polled by those who wait for it. Called by the runner of the
//! daemon. A new kind of environment is a new [`EnvBuilder`].

mod bench;
mod error;
#[cfg(any(test, feature = "fakes"))]
mod fake;
mod flight;
mod host;
mod interpreter;
mod pip;
mod shelf;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_model::EnvSpec;
use futures_util::future::BoxFuture;

pub use bench::{Bench, Built};
pub use error::{AcquireError, OpenEnvError};
#[cfg(any(test, feature = "fakes"))]
pub use fake::{Script, Scripted};
pub use shelf::EnvLease;

use flight::Flights;
use host::Host;
use interpreter::Interpreters;
use pip::Pip;
use shelf::Shelf;

/// Where environments live, and what their builders are given.
#[derive(Debug, Clone)]
pub struct EnvConfig {
    /// The directory that holds them, absolute; made when absent.
    pub root: PathBuf,
    /// Where interpreters are looked for, as in `PATH`; also the `PATH` of builders.
    pub path: String,
    /// Variables of builders: `HOME`, `PIP_*`, proxies, certificates.
    pub vars: BTreeMap<String, String>,
    /// A builder that prints nothing for this long is ended.
    pub stall: Duration,
}

/// Makes environments of one kind.
pub trait EnvBuilder: Send + Sync + 'static {
    /// Whether it makes what this specification asks for.
    fn handles(&self, spec: &EnvSpec) -> bool;

    /// Everything that makes the environment what it is, as one text: the specification, the interpreter, the
    /// platform, the version of the builder. Cheap when asked again, because every job asks.
    fn identity<'a>(&'a self, spec: &'a EnvSpec) -> BoxFuture<'a, Result<String, AcquireError>>;

    /// Makes the environment in the empty directory of the bench, in its final place. May be dropped at any
    /// await; what it left is wiped.
    fn build<'a>(&'a self, spec: &'a EnvSpec, bench: &'a Bench)
    -> BoxFuture<'a, Result<Built, AcquireError>>;
}

/// The environments of a node; clones are the same ones.
#[derive(Clone)]
pub struct Environments {
    builders: Arc<[Arc<dyn EnvBuilder>]>,
    shelf: Shelf,
    flights: Arc<Flights>,
}

impl Environments {
    /// Takes charge of the directory and wipes what killed builders left half-built. Blocking while it does.
    pub fn open(config: EnvConfig) -> Result<Environments, OpenEnvError> {
        let config = Arc::new(config);
        let interpreters = Arc::new(Interpreters::new(config.clone()));
        let builders: [Arc<dyn EnvBuilder>; 2] =
            [Arc::new(Pip::new(config.clone(), interpreters.clone())), Arc::new(Host::new(interpreters))];
        Environments::with_builders(&config, Arc::new(builders))
    }

    /// With other builders than those of a node; the first that handles a specification makes it.
    pub fn with_builders(
        config: &EnvConfig,
        builders: Arc<[Arc<dyn EnvBuilder>]>,
    ) -> Result<Environments, OpenEnvError> {
        let shelf = Shelf::open(&config.root)?;
        Ok(Environments { builders, shelf, flights: Arc::new(Flights::new(config.stall)) })
    }

    /// The environment of a specification, ready; built when it is not there.
    ///
    /// What its builder prints is appended to the file `log` meanwhile, also when another caller or another
    /// process started the build. Dropping the future ends the wait, and ends the build when nobody else waits.
    /// A build that failed for a lasting reason is not tried again for ten seconds.
    pub async fn acquire(&self, spec: &EnvSpec, log: &Path) -> Result<EnvLease, AcquireError> {
        let builder = self.builders.iter().find(|builder| builder.handles(spec));
        let builder = builder.ok_or(AcquireError::Unsupported { kind: spec.kind() })?;
        let place = self.shelf.place(spec.kind(), &builder.identity(spec).await?);
        let mut reused = true;
        loop {
            if let Some(lease) = place.lease(reused)? {
                return Ok(lease);
            }
            reused = false;
            Flights::join(&self.flights, &place, builder, spec)?.follow(log).await?;
        }
    }

    /// Holds the environment of this key, as [`EnvLease::key`] gave it to an earlier life of the daemon: for a
    /// command that still runs in it. `None` when it is not there, or somebody works on it.
    pub fn hold(&self, key: &str) -> Option<EnvLease> {
        let place = self.shelf.found(key)?;
        place.lease(true).inspect_err(|error| tracing::warn!(key, %error, "it cannot be held")).ok()?
    }
}
