//! Keeps the list of a node's environments, and does what an operator wants of them.
//!
//! Owns the part of the inventory with environments and interpreters, and the copies of locks and build logs in the
//! store of blobs. What is removed when the disk is low is in [`room`], and the choice of environments in
//! [`eviction`]; how one is removed is hidden by `agent_runtime::env`.
//!
//! Invariants: nothing that a job uses, or that is pinned, is removed; a wish is tried again until it is withdrawn; a
//! time of last use, which changes often, is published at most once a minute.
//!
//! It has no state that matters, so it can be restarted at any time. Started by `crate::roles`; the wishes are sent
//! by `worker::reconcile`.

pub(crate) mod eviction;
pub(crate) mod room;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use agent_blocking::blocking;
use agent_cas::snapshot::download;
use agent_cas::{BlobStore, Store, digest_of};
use agent_model::node::{CachedEnvironment, Interpreter, Inventory};
use agent_model::protocol::orders::EnvironmentWant as Want;
use agent_model::{Digest, Timestamp, causes, size};
use agent_runtime::docker::Docker;
use agent_runtime::env::{CondaConfig, Contexts, EnvConfig, Environments, Kept, RemoveError, Uv};
use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::users;
use crate::config::{Config, UvChoice};

/// How often the environments are listed, beside each time one was made.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How often a wish that could not be fulfilled is tried again.
const WISH_EVERY: Duration = Duration::from_secs(2);
/// How often the interpreters are listed.
const ASK_EVERY: Duration = Duration::from_secs(60);
/// A time of last use is published again when it differs by this much, in ms.
const USED_EVERY: u64 = 60_000;
/// Of a build log longer than this, its end is kept, in bytes.
const LOG_KEPT: usize = 512 << 10;
/// A builder of environments that prints nothing for this long is ended.
const BUILD_STALL: Duration = Duration::from_secs(600);

/// The settings of this daemon's environments, on a machine with `memory` bytes. `gpus` holds whether it has GPUs,
/// once that is known. Jobs of the daemon's own user are `kept_out` of them.
pub(crate) fn settings(
    config: &Config,
    memory: u64,
    shim: &Path,
    kept_out: bool,
    store: Store,
    gpus: watch::Receiver<Option<bool>>,
) -> EnvConfig {
    let said = &config.environments;
    EnvConfig {
        packages: config.state_dir.join("packages"),
        vars: config.host.builder.clone(),
        stall: BUILD_STALL,
        engine: Some(engine()),
        conda: CondaConfig {
            channels: said.channels.clone(),
            alias: said.alias.clone(),
            mirrors: said.mirrors.clone(),
            credentials: said.credentials.clone(),
            offline: said.offline,
            flexible: said.flexible,
        },
        uv: match &said.uv {
            UvChoice::Auto => Uv::Auto,
            UvChoice::Never => Uv::Never,
            UvChoice::At(path) => Uv::At(path.clone()),
        },
        curated: Some(said.curated.clone()),
        curated_builtin: agent_model::curated::SHIPPED,
        memory: if said.builder_memory > 0 { said.builder_memory } else { memory / 4 * 3 },
        // A job of another user cannot write to them.
        hard_links: config.keeps_jobs_out() || kept_out,
        writable: !agent_spawn::serves_others() && !kept_out,
        owners: users::owner_builders(config, shim).map(Arc::new),
        builder: users::builder(config, shim),
        shim: Some(shim.to_owned()),
        docker: Some(Docker::at(&config.devices.docker_socket)),
        registry_credentials: config.devices.docker_credentials.clone(),
        build_ca: config.devices.docker_build_ca.clone(),
        contexts: Some(contexts(store)),
        gpus,
        ..EnvConfig::plain(config.state_dir.join("envs"), config.host.path.clone())
    }
}

/// Lays out the contexts of image builds from the store.
fn contexts(store: Store) -> Contexts {
    Contexts(Arc::new(move |root, dir: PathBuf| {
        let store = store.clone();
        async move {
            let laid = download(&store, root, &dir).await;
            laid.map(drop).map_err(|error| causes::tell(&error))
        }
        .boxed()
    }))
}

/// Where the conda engine is looked for: beside this program.
pub(crate) fn engine() -> PathBuf {
    const ENGINE: &str = "agent-env";
    let own = std::env::current_exe().ok();
    own.as_deref().and_then(Path::parent).map_or_else(|| PathBuf::from(ENGINE), |dir| dir.join(ENGINE))
}

/// What an operator wants of an environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) key: String,
    pub(crate) want: Want,
}

/// The texts of an environment that are in the store of blobs.
#[derive(Debug, Clone, Copy, Default)]
struct Stored {
    built: Timestamp,
    lock: Option<Digest>,
    log: Option<Digest>,
}

/// The keeper of a node's environments. Clones share its state.
#[derive(Clone)]
pub(crate) struct Keeper {
    environments: Environments,
    store: Store,
    inventory: watch::Sender<Inventory>,
    wishes: watch::Receiver<Vec<Wish>>,
    changed: Arc<Notify>,
    stored: Arc<Mutex<HashMap<String, Stored>>>,
}

impl Keeper {
    /// For the environments of this daemon. `changed` is notified when one was made.
    pub(crate) fn new(
        environments: Environments,
        store: Store,
        inventory: watch::Sender<Inventory>,
        wishes: watch::Receiver<Vec<Wish>>,
        changed: Arc<Notify>,
    ) -> Keeper {
        Keeper { environments, store, inventory, wishes, changed, stored: Arc::default() }
    }

    /// Runs forever: fulfils wishes and updates the inventory.
    pub(crate) async fn run(mut self) {
        let known = !self.inventory.borrow().interpreters.is_empty();
        let mut asked = known.then(Instant::now);
        loop {
            self.fulfil().await;
            self.show().await;
            if is_due(&mut asked, ASK_EVERY) {
                let interpreters = self.environments.interpreters().await;
                show_interpreters(&self.inventory, interpreters);
            }
            let pause = if self.wishes.borrow().is_empty() { LOOK_EVERY } else { WISH_EVERY };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.changed.notified() => {}
                Ok(()) = self.wishes.changed() => {}
            }
        }
    }

    /// Fulfils the wishes that can be fulfilled now.
    async fn fulfil(&mut self) {
        let wishes = self.wishes.borrow_and_update().clone();
        for Wish { key, want } in wishes {
            let (environments, name) = (self.environments.clone(), key.clone());
            let done = blocking(move || match want {
                Want::Remove => environments.remove(&name).map(Some),
                Want::Pin => environments.pin(&name, true).map(|()| None),
                Want::Unpin => environments.pin(&name, false).map(|()| None),
            });
            tell_done(&key, want, done.await);
        }
    }

    async fn list(&self) -> Vec<Kept> {
        let environments = self.environments.clone();
        blocking(move || environments.list()).await
    }

    /// Brings the inventory up to date.
    async fn show(&self) {
        let kept = self.list().await;
        let mut shown = Vec::with_capacity(kept.len());
        for kept in &kept {
            let texts = self.texts(kept).await;
            shown.push(describe(kept, texts));
        }
        self.stored.lock().retain(|key, _| kept.iter().any(|kept| kept.key == *key));
        self.inventory.send_if_modified(|known| {
            let differs = !is_same(&known.environments, &shown);
            if differs {
                known.environments = shown;
            }
            differs
        });
    }

    /// The stored texts of an environment; they are stored when it is first seen.
    async fn texts(&self, kept: &Kept) -> Stored {
        let built = timestamp(kept.built);
        let known = self.stored.lock().get(&kept.key).copied().filter(|known| known.built == built);
        if let Some(known) = known {
            return known;
        }
        let lock = self.keep(kept.lock_file().map(Path::to_owned), usize::MAX).await;
        let log = self.keep(Some(kept.log_file().to_owned()), LOG_KEPT).await;
        match (lock, log) {
            (Ok(lock), Ok(log)) => {
                let stored = Stored { built, lock, log };
                self.stored.lock().insert(kept.key.clone(), stored);
                stored
            }
            (Err(error), _) | (_, Err(error)) => {
                debug!(key = kept.key, %error, "cannot store lock and log of environment yet");
                Stored::default()
            }
        }
    }

    /// Stores the last `at_most` bytes of a file; `None` when there is no file.
    async fn keep(&self, path: Option<PathBuf>, at_most: usize) -> io::Result<Option<Digest>> {
        let Some(path) = path else { return Ok(None) };
        let text = match blocking(move || std::fs::read(path)).await {
            Ok(text) => text[text.len().saturating_sub(at_most)..].to_vec(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let digest = digest_of(&text);
        let written = self.store.write_batch(vec![(digest, text.into())]).await;
        written.into_iter().collect::<Result<(), _>>().map_err(io::Error::other)?;
        Ok(Some(digest))
    }
}

fn show_interpreters(inventory: &watch::Sender<Inventory>, found: Vec<Interpreter>) {
    inventory.send_if_modified(|known| {
        let differs = known.interpreters != found;
        if differs {
            info!(?found, "noticed change of interpreters");
            known.interpreters = found;
        }
        differs
    });
}

fn tell_done(key: &str, want: Want, done: Result<Option<u64>, RemoveError>) {
    match done {
        Ok(Some(freed)) => info!(key, freed = size::binary(freed), "removed an environment as asked"),
        Ok(None) => debug!(key, ?want, "did as asked"),
        // The wish is tried again until it is withdrawn.
        Err(error @ RemoveError::InUse { .. }) => debug!(%error, "not removed yet"),
        Err(RemoveError::Unknown { .. }) => {}
        Err(error) => warn!(key, %error, ?want, "could not do what is wanted of an environment"),
    }
}

/// Whether it is due; if so, the time begins again.
fn is_due(last: &mut Option<Instant>, every: Duration) -> bool {
    let due = last.is_none_or(|last| last.elapsed() >= every);
    if due {
        *last = Some(Instant::now());
    }
    due
}

fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

fn describe(kept: &Kept, texts: Stored) -> CachedEnvironment {
    CachedEnvironment {
        key: kept.key.clone(),
        summary: kept.summary.clone(),
        python: kept.python.clone(),
        packages: kept.packages,
        bytes: kept.bytes,
        built: timestamp(kept.built),
        used: timestamp(kept.used),
        uses: kept.uses,
        pinned: kept.pinned,
        lock: texts.lock,
        log: texts.log,
    }
}

/// Whether two lists are equal, except for times of last use that hardly differ.
fn is_same(known: &[CachedEnvironment], found: &[CachedEnvironment]) -> bool {
    let same = |(known, found): (&CachedEnvironment, &CachedEnvironment)| {
        let near = known.used.0.abs_diff(found.used.0) < USED_EVERY;
        near && *known == CachedEnvironment { used: known.used, ..found.clone() }
    };
    known.len() == found.len() && known.iter().zip(found).all(same)
}

#[cfg(test)]
mod tests;
