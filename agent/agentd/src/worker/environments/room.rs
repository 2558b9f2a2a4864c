//! The reclaimers for environments: unused ones, images of removed ones, and cached packages. Nothing that a job
//! uses, or that is pinned, is removed.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use agent_blocking::blocking;
use agent_model::{Clock, size};
use agent_runtime::env::{AcquireError, Environments, Kept, RemoveError};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::eviction::{Candidate, EnvLimits, choose_victims};
use crate::disk::Reclaimer;

/// How often environments that are too old or too large together are removed.
const EVICT_EVERY: Duration = Duration::from_secs(60);
/// How often unneeded images are removed.
const DISCARD_EVERY: Duration = Duration::from_secs(10);
/// How often the package cache is swept, and how often at most when the disk is low.
const SWEEP_EVERY: Duration = Duration::from_secs(24 * 3600);
const SWEEP_LOW_EVERY: Duration = Duration::from_secs(600);

/// The environments that nobody uses.
pub(crate) struct Unused {
    pub(crate) environments: Environments,
    pub(crate) limits: EnvLimits,
    pub(crate) clock: Arc<dyn Clock>,
}

/// The images of removed environments.
pub(crate) struct Images(pub(crate) Environments);

/// The packages that no environment shares.
pub(crate) struct Packages {
    environments: Environments,
    /// How long an unused one is kept.
    age: Duration,
    swept: Mutex<Option<Instant>>,
}

impl Unused {
    /// Removes what is too old or above the limit, and more until `wanted` bytes are freed.
    pub(super) async fn evict(&self, wanted: u64) {
        let environments = self.environments.clone();
        let kept = blocking(move || environments.list()).await;
        let candidates: Vec<_> = kept.iter().map(candidate).collect();
        let now = SystemTime::UNIX_EPOCH + Duration::from_millis(self.clock.now().0);
        for key in choose_victims(&candidates, &self.limits, now, wanted) {
            let (environments, name) = (self.environments.clone(), key.clone());
            match blocking(move || environments.remove(&name)).await {
                Ok(freed) => {
                    info!(key, freed = size::binary(freed), "removed an environment to make room");
                }
                Err(RemoveError::InUse { .. } | RemoveError::Unknown { .. }) => {}
                Err(error) => warn!(key, %error, "cannot remove environment"),
            }
        }
    }
}

fn candidate(kept: &Kept) -> Candidate<'_> {
    let spared = kept.pinned || kept.uses > 0;
    Candidate { key: &kept.key, bytes: kept.bytes, used: kept.used.max(kept.built), spared }
}

impl Reclaimer for Unused {
    fn tidy(&self) -> BoxFuture<'_, Duration> {
        self.evict(0).map(|()| EVICT_EVERY).boxed()
    }
    fn reclaim(&self, bytes: u64) -> BoxFuture<'_, ()> {
        self.evict(bytes).boxed()
    }
}

impl Reclaimer for Images {
    fn tidy(&self) -> BoxFuture<'_, Duration> {
        self.0.discard().map(|()| DISCARD_EVERY).boxed()
    }
    fn reclaim(&self, _: u64) -> BoxFuture<'_, ()> {
        self.0.discard().boxed()
    }
}

impl Packages {
    pub(crate) fn new(environments: Environments, age: Duration) -> Packages {
        Packages { environments, age, swept: Mutex::default() }
    }

    async fn sweep(&self, unused_for: Duration) {
        *self.swept.lock() = Some(Instant::now());
        tell_swept(self.environments.sweep(unused_for).await);
    }

    fn is_fresh(&self) -> bool {
        let swept = *self.swept.lock();
        swept.is_some_and(|swept| swept.elapsed() < SWEEP_LOW_EVERY)
    }
}

fn tell_swept(swept: Result<u64, AcquireError>) {
    match swept {
        Ok(0) => debug!("nothing was to be swept from the package cache"),
        Ok(freed) => info!(freed = size::binary(freed), "swept the package cache"),
        Err(AcquireError::EngineMissing { .. }) => debug!("there is no engine to sweep with"),
        Err(error) => warn!(%error, "the package cache could not be swept"),
    }
}

impl Reclaimer for Packages {
    fn tidy(&self) -> BoxFuture<'_, Duration> {
        self.sweep(self.age).map(|()| SWEEP_EVERY).boxed()
    }
    fn reclaim(&self, _: u64) -> BoxFuture<'_, ()> {
        async move {
            if !self.is_fresh() {
                self.sweep(SWEEP_LOW_EVERY).await;
            }
        }
        .boxed()
    }
}
