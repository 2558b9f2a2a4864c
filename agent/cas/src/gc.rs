//! Keeps a store small: when there is too little room, blobs that nobody needs are removed, and no others.
//!
//! ```text
//! users ── roots ──▶ closure ──▶ what is held ─┐
//! store ── listing ─────────────────────────────┴─▶ choice ──▶ evict, batch by batch
//! ```
//!
//! Owns the [`Collector`] of a store. Hides the walk over trees ([`closure`]) and the order of removal ([`choice`]).
//! The users of the store report what they hold as [`Pin`]s, anew for each collection, from their state on disk: so
//! no pin outlives its reason, and none is forgotten by a crash.
//!
//! Invariants: nothing is removed before every user has reported its pins, and nothing at all when one cannot; no
//! blob is removed that a pin reaches, that was used within the lease, or that somebody begins to rely on during a
//! collection ([`Collector::rely_on`]). A clock that jumps shortens or lengthens leases and affects no pin; a caller
//! that relied on a lease alone learns from [`Collector::first_missing`] what to have sent again.

mod choice;
mod closure;

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agent_blocking::blocking;
use agent_model::{Boot, Clock, Digest, size};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{RwLock, RwLockReadGuard};

pub use choice::{Goal, Reason, Room, Stay, StoreLimits};
use closure::{HeldBlobs, Walk};

use crate::{BlobStore, Disk, Evicted, Kept, MissingError, ReadError};

/// Blobs removed in one batch. [`Collector::rely_on`] waits for one batch at most.
const BATCH: usize = 1000;

/// Contents in one query to the store.
const QUESTION: usize = 40_000;

/// After a failed attempt to make room for a blob, how long no other attempt is made.
const AGAIN: Duration = Duration::from_secs(30);

/// Directories that are remembered as complete.
const REMEMBERED: usize = 200_000;

/// Who needs a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holder {
    /// Jobs that have not ended: their code and inputs.
    Jobs,
    /// Jobs that have ended: what they left. There is no other copy.
    Outputs,
    /// Environments that machines keep: their locks and build logs.
    Environments,
    /// Data that users gave a name to.
    Assets,
    /// Replicas that this machine holds.
    Replicas,
}

/// Something that is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pin {
    /// A blob.
    pub digest: Digest,
    /// It is a directory, and everything below it is needed as well.
    pub is_tree: bool,
    /// Who needs it.
    pub by: Holder,
}

impl Pin {
    /// A directory with all that is below it.
    pub fn tree(digest: Digest, by: Holder) -> Pin {
        Pin { digest, is_tree: true, by }
    }

    /// A single blob.
    pub fn blob(digest: Digest, by: Holder) -> Pin {
        Pin { digest, is_tree: false, by }
    }
}

/// Why a user cannot report what it holds, for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unknown(pub String);

/// Returns everything that a user of the store holds now.
pub type Pins = Box<dyn Fn() -> BoxFuture<'static, Result<Vec<Pin>, Unknown>> + Send + Sync>;

/// Why nothing, or no more, was removed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum CollectError {
    #[error("it is not known yet what {user} needs")]
    NotYet { user: &'static str },
    #[error("it is not known what {user} needs")]
    Pins { user: &'static str, source: Unknown },
    #[error("a directory that is needed cannot be read")]
    Read(#[source] ReadError),
}

/// Why it is unknown whether a tree is complete.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum WholeError {
    #[error("cannot read a directory of the tree")]
    Read(#[source] ReadError),
    #[error("cannot ask the store what it lacks")]
    Missing(#[source] MissingError),
}

/// What a collection did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collected {
    /// How much room there was before.
    pub before: Room,
    /// Bytes that should be removed; `u64::MAX` for all that may be.
    pub wanted: u64,
    /// What was removed, or in a dry run would be.
    pub freed: Evicted,
    /// What is kept, once for each reason, most bytes first.
    pub stays: Vec<Stay>,
}

impl Collected {
    /// As many bytes were removed as wanted.
    pub fn is_enough(&self) -> bool {
        self.freed.bytes >= self.wanted
    }
}

/// The collector of a store. Clones are of the same one.
#[derive(Clone)]
pub struct Collector {
    shared: Arc<Shared>,
}

struct Shared {
    disk: Disk,
    limits: StoreLimits,
    clock: Arc<dyn Clock>,
    users: Vec<(&'static str, OnceLock<Pins>)>,
    /// Held for reading while somebody begins to rely on something, for writing while blobs are removed.
    gate: RwLock<()>,
    /// Pins of [`Collector::rely_on`] since the running collection began; `None` while none runs.
    relied: Mutex<Option<Vec<Pin>>>,
    /// One collection at a time.
    collecting: tokio::sync::Mutex<()>,
    whole: Mutex<Whole>,
    /// When making room last failed.
    in_vain: Mutex<Option<Boot>>,
}

/// Directories that were found complete, with all that is below them, since the last removal.
#[derive(Default)]
struct Whole {
    complete: HashSet<Digest>,
    /// How many blobs were damaged then.
    damaged: u64,
    /// Counts how often all was forgotten.
    forgotten: u64,
}

/// While it is held, nothing is removed.
pub struct Relied<'a> {
    shared: &'a Shared,
    #[expect(dead_code, reason = "it is held")]
    gate: RwLockReadGuard<'a, ()>,
}

impl Relied<'_> {
    /// Its holder is about to need these, too.
    pub fn add(&self, pins: Vec<Pin>) {
        if let Some(relied) = &mut *self.shared.relied() {
            relied.extend(pins);
        }
    }
}

impl Collector {
    /// Of the store `disk`, which has these users. [`Collector::held_by`] must be called for each before anything
    /// is removed.
    pub fn new(disk: Disk, limits: StoreLimits, users: &[&'static str], clock: Arc<dyn Clock>) -> Collector {
        let users = users.iter().map(|user| (*user, OnceLock::new())).collect();
        let shared = Shared {
            disk,
            limits,
            clock,
            users,
            gate: RwLock::default(),
            relied: Mutex::default(),
            collecting: tokio::sync::Mutex::default(),
            whole: Mutex::default(),
            in_vain: Mutex::default(),
        };
        Collector { shared: Arc::new(shared) }
    }

    /// From now on `pins` returns what `user` holds. Only the first call for a user counts, and only for one that
    /// was given to [`Collector::new`].
    pub fn held_by(&self, user: &'static str, pins: Pins) {
        if let Some((_, known)) = self.shared.users.iter().find(|(known, _)| *known == user) {
            let _ = known.set(pins);
        }
    }

    /// The store.
    pub fn disk(&self) -> &Disk {
        &self.shared.disk
    }

    /// What the store may take.
    pub fn limits(&self) -> StoreLimits {
        self.shared.limits
    }

    /// How much room there is.
    pub async fn room(&self) -> Room {
        let shared = Arc::clone(&self.shared);
        blocking(move || shared.room()).await
    }

    /// Whether blobs should go.
    pub async fn is_due(&self) -> bool {
        choice::excess(self.room().await, &self.shared.limits) > 0
    }

    /// The caller is about to need `pins`, and will then report them itself. Until it does, it holds the returned
    /// guard: meanwhile nothing is removed, and a collection that is running removes none of `pins` afterwards.
    pub async fn rely_on(&self, pins: Vec<Pin>) -> Relied<'_> {
        let gate = self.shared.gate.read().await;
        let relied = Relied { shared: &self.shared, gate };
        relied.add(pins);
        relied
    }

    /// A blob that one of these trees needs and the store lacks. A blob that is no valid directory is no error here.
    pub async fn first_missing(&self, roots: &[Digest]) -> Result<Option<Digest>, WholeError> {
        let shared = &self.shared;
        let forgotten = shared.whole().forgotten;
        let mut walk = Walk::new();
        roots.iter().filter(|root| !shared.whole().complete.contains(root)).for_each(|root| walk.add(*root));
        let roots = shared.disk.missing(roots).await.map_err(WholeError::Missing)?;
        if let Some(root) = roots.first() {
            return Ok(Some(*root));
        }
        loop {
            let step = match walk.step(&shared.disk).await {
                Ok(Some(step)) => step,
                Ok(None) => break,
                // It was quarantined just now.
                Err(ReadError::Corrupt { digest, .. }) => return Ok(Some(digest)),
                Err(error) => return Err(WholeError::Read(error)),
            };
            if let Some(directory) = step.absent.first() {
                return Ok(Some(*directory));
            }
            for some in step.files.chunks(QUESTION) {
                let missing = shared.disk.missing(some).await.map_err(WholeError::Missing)?;
                if let Some(content) = missing.first() {
                    return Ok(Some(*content));
                }
            }
            let whole = shared.whole();
            step.directories
                .into_iter()
                .filter(|child| !whole.complete.contains(child))
                .for_each(|child| walk.add(child));
        }
        let mut whole = shared.whole();
        if whole.forgotten == forgotten {
            let found = walk.into_seen();
            if whole.complete.len() + found.len() > REMEMBERED {
                whole.complete.clear();
            }
            whole.complete.extend(found);
        }
        Ok(None)
    }

    /// Makes room for `bytes` that found none; returns whether there is room for them now. After a failure it is
    /// not tried again for a while.
    pub fn make_room(&self, bytes: u64) -> BoxFuture<'_, bool> {
        async move {
            let shared = &self.shared;
            let tried = *shared.in_vain.lock();
            if tried.is_some_and(|tried| shared.clock.boot().since(tried) < AGAIN) {
                return false;
            }
            let collected = self.collect(Goal::Free(bytes), false).await;
            let free = self.room().await.free;
            let enough = free >= bytes.saturating_add(shared.limits.marks.reserve());
            *shared.in_vain.lock() = (!enough).then(|| shared.clock.boot());
            match collected {
                Ok(Collected { freed, .. }) => {
                    let (freed, free) = (size::binary(freed.bytes), size::binary(free));
                    tracing::info!(bytes, freed, free, enough, "cannot store blob: no room");
                }
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "cannot make room for blob");
                }
            }
            enough
        }
        .boxed()
    }

    /// Removes blobs that nobody needs, as far as the goal demands; with `dry` it only reports which.
    pub fn collect(&self, goal: Goal, dry: bool) -> BoxFuture<'_, Result<Collected, CollectError>> {
        async move {
            let shared = &self.shared;
            let _one_at_a_time = shared.collecting.lock().await;
            let _noting = Noting::begin(shared).await;
            let mut held = HeldBlobs::new();
            held.add(&shared.disk, &shared.pins().await?).await.map_err(CollectError::Read)?;
            let (before, listing) = (self.room().await, shared.disk.listing().await);
            let (now, wanted) = (shared.now(), choice::wanted(before, &shared.limits, goal));
            let lease = shared.limits.lease;
            let (choice, mut held) = blocking(move || {
                (choice::choose(listing, |digest| held.holder(digest), now, lease, wanted), held)
            })
            .await;
            let freed = match dry {
                true => sum(&choice.victims),
                false => shared.evict(choice.victims, &mut held).await?,
            };
            Ok(Collected { before, wanted, freed, stays: choice.stays })
        }
        .boxed()
    }
}

impl Shared {
    fn room(&self) -> Room {
        // A disk whose free space is unknown is no reason to remove anything.
        Room { taken: self.disk.taken(), free: self.disk.free().unwrap_or(u64::MAX) }
    }

    fn now(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.clock.now().0)
    }

    /// What all users hold.
    async fn pins(&self) -> Result<Vec<Pin>, CollectError> {
        let mut all = Vec::new();
        for (user, pins) in &self.users {
            let pins = pins.get().ok_or(CollectError::NotYet { user })?;
            all.extend(pins().await.map_err(|source| CollectError::Pins { user, source })?);
        }
        all.sort_by_key(|pin| pin.by);
        Ok(all)
    }

    /// Removes the victims, except those that somebody began to rely on meanwhile.
    async fn evict(&self, victims: Vec<Kept>, held: &mut HeldBlobs) -> Result<Evicted, CollectError> {
        let evicted = self.evict_in_batches(victims, held).await;
        self.disk.compact().await;
        evicted
    }

    async fn evict_in_batches(
        &self,
        victims: Vec<Kept>,
        held: &mut HeldBlobs,
    ) -> Result<Evicted, CollectError> {
        let mut evicted = Evicted::default();
        for some in victims.chunks(BATCH) {
            let _gate = self.gate.write().await;
            let mut relied = self.relied().as_mut().map(std::mem::take).unwrap_or_default();
            relied.sort_by_key(|pin| pin.by);
            held.add(&self.disk, &relied).await.map_err(CollectError::Read)?;
            let some = some.iter().filter(|kept| held.holder(&kept.digest).is_none()).copied().collect();
            self.forget_whole();
            let gone = self.disk.evict(some).await;
            evicted.blobs += gone.blobs;
            evicted.bytes += gone.bytes;
        }
        Ok(evicted)
    }

    fn relied(&self) -> MutexGuard<'_, Option<Vec<Pin>>> {
        self.relied.lock()
    }

    /// What is known to be complete; nothing when a blob was found damaged since.
    fn whole(&self) -> MutexGuard<'_, Whole> {
        let mut whole = self.whole.lock();
        let damaged = self.disk.damaged();
        if whole.damaged != damaged {
            *whole = Whole { damaged, forgotten: whole.forgotten + 1, ..Whole::default() };
        }
        whole
    }

    fn forget_whole(&self) {
        let mut whole = self.whole();
        whole.complete.clear();
        whole.forgotten += 1;
    }
}

/// While it exists, pins of [`Collector::rely_on`] are recorded.
struct Noting<'a>(&'a Shared);

impl Noting<'_> {
    /// Waits until nobody holds a [`Relied`] whose pins were not recorded.
    async fn begin(shared: &Shared) -> Noting<'_> {
        let _gate = shared.gate.write().await;
        *shared.relied() = Some(Vec::new());
        Noting(shared)
    }
}

impl Drop for Noting<'_> {
    fn drop(&mut self) {
        *self.0.relied() = None;
    }
}

impl fmt::Debug for Relied<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relied").finish_non_exhaustive()
    }
}

impl fmt::Debug for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collector").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}

fn sum(kept: &[Kept]) -> Evicted {
    Evicted { blobs: kept.len() as u64, bytes: kept.iter().map(|kept| kept.digest.size).sum() }
}

#[cfg(test)]
mod tests;
