//! A near store in front of a far one, and the choice between stores at run time.
//!
//! Reads are served by the near store and leave a copy there. Writes and queries are sent to the far one: it is what
//! others see, and what must be complete. A damaged near blob counts as absent: the near store has quarantined it by
//! the time it reports that, and a copy from the far one replaces it.
//!
//! Before the far store, other nodes are asked for the blobs of a tree, where there are such ([`Peers`]). Whatever they
//! do costs only the time until the next one, or the far store, is asked.
//!
//! A blob that the far store lacks although it reported it, or has with other bytes, is read once more, then from the
//! `other` store if there is one, and the right bytes are written to the far store again. A blob found nowhere is
//! *doubted*: it counts as missing, so that clients send it again, until it was written again. So do all blobs that
//! are queried together with it, usually a whole snapshot: nobody has read the rest of it yet, and with one gap found
//! for each attempt there would be many attempts. Doubt does not survive a restart; the next read doubts it again.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use agent_model::Digest;
use bytes::Bytes;
use parking_lot::Mutex;

use crate::peer::{Peers, TreeSources};
use crate::store::{
    BATCH_BLOBS, BATCH_BYTES, BlobStore, Chunks, MissingError, ReadError, SMALL_BLOB, WriteError, batches,
};
use crate::{ByteCounter, Disk, Ingest, Remote};

/// Most blobs that are doubted. A far store that is wrong about more has lost everything.
const DOUBTED: usize = 100_000;

/// See the module.
#[derive(Debug, Clone)]
pub struct Tiered<N, F> {
    near: N,
    far: F,
    /// Where else a blob may be.
    other: Option<F>,
    doubted: Arc<Mutex<HashSet<Digest>>>,
    /// Told what arrives of large blobs.
    counter: Option<Arc<ByteCounter>>,
    /// Other nodes.
    peers: Option<Arc<dyn Peers>>,
    /// Those that have the tree of this task.
    sources: Option<Arc<dyn TreeSources>>,
}

impl<N: BlobStore, F: BlobStore> Tiered<N, F> {
    /// `near` in front of `far`.
    pub fn new(near: N, far: F) -> Tiered<N, F> {
        Tiered { near, far, other: None, doubted: Arc::default(), counter: None, peers: None, sources: None }
    }

    /// The same with another store that is asked for blobs that `far` turns out not to have.
    #[must_use]
    pub fn or_from(self, other: F) -> Tiered<N, F> {
        Tiered { other: Some(other), ..self }
    }

    /// The same with other nodes that are asked before `far`.
    #[must_use]
    pub fn beside(self, peers: Arc<dyn Peers>) -> Tiered<N, F> {
        Tiered { peers: Some(peers), ..self }
    }

    /// The same store, for a task that fetches a tree and is counted.
    #[must_use]
    pub(crate) fn for_tree(self, root: Digest, counter: &Arc<ByteCounter>) -> Tiered<N, F> {
        let sources = self.peers.as_ref().map(|peers| peers.tree(root));
        Tiered { counter: Some(Arc::clone(counter)), sources, ..self }
    }

    /// The near store.
    pub(super) fn near(&self) -> &N {
        &self.near
    }

    /// Gives the far store a blob that the near one has.
    pub(super) async fn pass_on(&self, digest: Digest) -> Result<(), WriteError> {
        let source = self.near.read(digest, 0).await;
        let source = source.map_err(|source| WriteError::Source { digest, source: source.into() })?;
        self.write(digest, source).await
    }

    /// Keeps whole blobs in both. The results are those of the far store; the near copies can be given to it again.
    pub(super) async fn write_both(&self, blobs: Vec<(Digest, Bytes)>) -> Vec<Result<(), WriteError>> {
        let kept = self.near.write_batch(blobs.clone()).await;
        if let Some(error) = kept.iter().find_map(|kept| kept.as_ref().err()) {
            tracing::debug!(%error, "cannot keep near copy of blob");
        }
        self.write_batch(blobs).await
    }

    /// Ensures that the near store has the blob.
    async fn fetch(&self, digest: Digest) -> Result<(), ReadError> {
        if self.fetch_from_peers(digest).await? {
            return Ok(());
        }
        let from_far = async || self.bring(self.far.read(digest, 0).await?, digest).await;
        let mut fetched = from_far().await;
        // The bytes may have been damaged in transit.
        if fetched.as_ref().is_err_and(ReadError::is_unsound) {
            fetched = from_far().await;
        }
        let Err(error) = fetched else { return Ok(()) };
        if !error.is_unsound() {
            return Err(error);
        }
        self.doubt(digest);
        let Some(other) = &self.other else { return Err(error) };
        let from_other = async { self.bring(other.read(digest, 0).await?, digest).await };
        from_other.await.map_err(|_: ReadError| error)?;
        mended(digest, self.pass_on(digest).await);
        Ok(())
    }

    /// Whether another node sent it.
    async fn fetch_from_peers(&self, digest: Digest) -> Result<bool, ReadError> {
        let Some(sources) = &self.sources else { return Ok(false) };
        while let Some(peer) = sources.next(digest.size).await {
            let brought = async { self.bring(peer.read(digest).await?, digest).await };
            match brought.await {
                Ok(()) => return Ok(true),
                // The peer is not to blame for this disk.
                Err(error @ ReadError::Keep { .. }) => return Err(error),
                Err(error) => sources.failed(&peer, &error).await,
            }
        }
        Ok(false)
    }

    /// Whole blobs from other nodes, as many as they sent.
    async fn read_from_peers(&self, digests: &[Digest]) -> HashMap<Digest, Bytes> {
        let mut got = HashMap::new();
        let Some(sources) = &self.sources else { return got };
        for batch in batches(digests.iter().copied(), BATCH_BYTES, BATCH_BLOBS, |digest| digest.size) {
            let mut wanted: Vec<Digest> = batch
                .into_iter()
                .filter(|digest| digest.size <= SMALL_BLOB && *digest != Digest::EMPTY)
                .collect();
            while !wanted.is_empty()
                && let Some(peer) = sources.next(wanted.iter().map(|digest| digest.size).sum()).await
            {
                let (came, error) = peer.read_batch(&wanted).await;
                got.extend(came);
                wanted.retain(|digest| !got.contains_key(digest));
                if let Some(error) = error {
                    sources.failed(&peer, &error).await;
                }
            }
        }
        got
    }

    /// Keeps what comes as the blob in the near store.
    async fn bring(&self, source: Chunks, digest: Digest) -> Result<(), ReadError> {
        let meter = self.counter.as_ref().map(|counter| counter.meter());
        let source = match &meter {
            Some(meter) => meter.count(source),
            None => source,
        };
        self.near.write(digest, source).await.map_err(|error| match error {
            WriteError::Source { source, .. } => *source,
            error => ReadError::Keep { digest, source: Box::new(error) },
        })
    }

    /// Whole blobs from other nodes, the far store, or the other one.
    async fn fetch_batch(&self, digests: Vec<Digest>) -> Vec<Result<Bytes, ReadError>> {
        let got = self.read_from_peers(&digests).await;
        let rest: Vec<Digest> = digests.iter().copied().filter(|digest| !got.contains_key(digest)).collect();
        let mut rest = match rest.is_empty() {
            true => Vec::new(),
            false => self.fetch_batch_far(rest).await,
        }
        .into_iter();
        let absent = |digest| Err(ReadError::Absent { digest });
        let one = |digest: Digest| match got.get(&digest) {
            Some(bytes) => Ok(bytes.clone()),
            None => rest.next().unwrap_or_else(|| absent(digest)),
        };
        digests.into_iter().map(one).collect()
    }

    async fn fetch_batch_far(&self, digests: Vec<Digest>) -> Vec<Result<Bytes, ReadError>> {
        let mut results = self.far.read_batch(digests.clone()).await;
        self.read_again(&self.far, &digests, &mut results).await;
        let unsound = unsound(&results);
        unsound.iter().for_each(|index| self.doubt(digests[*index]));
        let Some(other) = &self.other else { return results };
        self.read_again(other, &digests, &mut results).await;
        let found: Vec<(Digest, Bytes)> = unsound
            .into_iter()
            .filter_map(|index| Some((digests[index], results[index].as_ref().ok()?.clone())))
            .collect();
        if !found.is_empty() {
            let names: Vec<Digest> = found.iter().map(|(digest, _)| *digest).collect();
            let written = self.write_batch(found).await;
            names.into_iter().zip(written).for_each(|(digest, written)| mended(digest, written));
        }
        results
    }

    /// Replaces unsound results by those of another read from `from`.
    async fn read_again(&self, from: &F, digests: &[Digest], results: &mut [Result<Bytes, ReadError>]) {
        let unsound = unsound(results);
        if unsound.is_empty() {
            return;
        }
        let again = from.read_batch(unsound.iter().map(|index| digests[*index]).collect()).await;
        for (index, result) in unsound.into_iter().zip(again) {
            if result.is_ok() {
                results[index] = result;
            }
        }
    }

    fn doubt(&self, digest: Digest) {
        let mut doubted = self.doubted.lock();
        if doubted.len() < DOUBTED && doubted.insert(digest) {
            tracing::warn!(%digest, "distrusting remote store: it says it has a blob it does not give");
        }
    }

    fn is_doubtful(&self, digests: &[Digest]) -> bool {
        let doubted = self.doubted.lock();
        !doubted.is_empty() && digests.iter().any(|digest| doubted.contains(digest))
    }

    fn trust(&self, digest: Digest) {
        self.doubted.lock().remove(&digest);
    }
}

fn unsound(results: &[Result<Bytes, ReadError>]) -> Vec<usize> {
    let indexed = results.iter().enumerate();
    indexed.filter(|(_, result)| result.as_ref().is_err_and(ReadError::is_unsound)).map(|(i, _)| i).collect()
}

fn mended(digest: Digest, written: Result<(), WriteError>) {
    match written {
        Ok(()) => tracing::info!(%digest, "written to the far store again"),
        Err(error) => tracing::warn!(%digest, %error, "cannot be written to the far store again"),
    }
}

impl<N: BlobStore, F: BlobStore> BlobStore for Tiered<N, F> {
    async fn missing(&self, digests: &[Digest]) -> Result<Vec<Digest>, MissingError> {
        if !self.is_doubtful(digests) {
            return self.far.missing(digests).await;
        }
        let mut seen = HashSet::from([Digest::EMPTY]);
        let asked: Vec<Digest> = digests.iter().copied().filter(|digest| seen.insert(*digest)).collect();
        asked.iter().for_each(|digest| self.doubt(*digest));
        Ok(asked)
    }

    async fn read(&self, digest: Digest, offset: u64) -> Result<Chunks, ReadError> {
        match self.near.read(digest, offset).await {
            Err(ReadError::Absent { .. } | ReadError::Corrupt { .. } | ReadError::Disk { .. }) => {
                self.fetch(digest).await?;
                self.near.read(digest, offset).await
            }
            other => other,
        }
    }

    async fn read_batch(&self, digests: Vec<Digest>) -> Vec<Result<Bytes, ReadError>> {
        let asked = digests.clone();
        let mut results = self.near.read_batch(digests).await;
        let absent: Vec<(usize, Digest)> =
            asked.into_iter().enumerate().filter(|(index, _)| results[*index].is_err()).collect();
        if absent.is_empty() {
            return results;
        }
        let fetched = self.fetch_batch(absent.iter().map(|(_, digest)| *digest).collect()).await;
        let mut copies = Vec::new();
        for ((index, digest), result) in absent.into_iter().zip(fetched) {
            if let Ok(bytes) = &result {
                copies.push((digest, bytes.clone()));
            }
            results[index] = result;
        }
        // The bytes are at hand and checked; a copy that cannot be kept only costs another fetch.
        self.near.write_batch(copies).await;
        results
    }

    async fn write(&self, digest: Digest, source: Chunks) -> Result<(), WriteError> {
        self.far.write(digest, source).await?;
        self.trust(digest);
        Ok(())
    }

    async fn write_batch(&self, blobs: Vec<(Digest, Bytes)>) -> Vec<Result<(), WriteError>> {
        let names: Vec<Digest> = blobs.iter().map(|(digest, _)| *digest).collect();
        let results = self.far.write_batch(blobs).await;
        let written = names.into_iter().zip(&results).filter(|(_, result)| result.is_ok());
        written.for_each(|(digest, _)| self.trust(digest));
        results
    }

    async fn quarantine(&self, digest: Digest) {
        self.near.quarantine(digest).await;
    }

    async fn file(&self, digest: Digest) -> Option<std::fs::File> {
        if let Some(file) = self.near.file(digest).await {
            return Some(file);
        }
        self.fetch(digest).await.ok()?;
        self.near.file(digest).await
    }
}

/// A store chosen at run time. Either kind has a part on this machine.
#[derive(Debug, Clone)]
pub enum Store {
    /// In a directory of this machine.
    Disk(Disk),
    /// At the other end of a connection, with a copy here of all that was read.
    Tiered(Box<Tiered<Disk, Remote>>),
}

impl Store {
    fn near(&self) -> &Disk {
        match self {
            Store::Disk(disk) => disk,
            Store::Tiered(tiered) => tiered.near(),
        }
    }

    /// Begins a blob whose bytes arrive in pieces; they are gathered on this machine.
    pub async fn ingest(&self, digest: Digest) -> Result<Ingest, WriteError> {
        self.near().ingest(digest).await
    }

    /// Checks the bytes and keeps them, under the rules of [`BlobStore::write`]. A store elsewhere gets them
    /// from the disk, where they are kept: a blob that it did not take can be given to it again.
    pub async fn keep(&self, ingest: Ingest) -> Result<(), WriteError> {
        let digest = ingest.digest();
        ingest.commit().await?;
        match self {
            Store::Disk(_) => Ok(()),
            Store::Tiered(tiered) => tiered.pass_on(digest).await,
        }
    }

    /// Keeps whole blobs for others: under the rules of [`BlobStore::write_batch`], and with a copy here where the
    /// store is elsewhere, as [`Store::keep`] does.
    pub async fn keep_batch(&self, blobs: Vec<(Digest, Bytes)>) -> Vec<Result<(), WriteError>> {
        match self {
            Store::Disk(disk) => disk.write_batch(blobs).await,
            Store::Tiered(tiered) => tiered.write_both(blobs).await,
        }
    }

    /// The same store for a task that fetches the tree with this root: `counter` is told what arrives from elsewhere.
    #[must_use]
    pub fn for_tree(&self, root: Digest, counter: &Arc<ByteCounter>) -> Store {
        match self {
            Store::Disk(_) => self.clone(),
            Store::Tiered(tiered) => Store::Tiered(Box::new(tiered.as_ref().clone().for_tree(root, counter))),
        }
    }

    /// It asks another store for blobs that are not here; the answer may change in a moment.
    pub fn is_elsewhere(&self) -> bool {
        matches!(self, Store::Tiered(_))
    }
}

macro_rules! chosen {
    ($self:ident, $store:ident => $call:expr) => {
        match $self {
            Store::Disk($store) => $call.await,
            Store::Tiered($store) => $call.await,
        }
    };
}

impl BlobStore for Store {
    async fn missing(&self, digests: &[Digest]) -> Result<Vec<Digest>, MissingError> {
        chosen!(self, store => store.missing(digests))
    }

    async fn read(&self, digest: Digest, offset: u64) -> Result<Chunks, ReadError> {
        chosen!(self, store => store.read(digest, offset))
    }

    async fn read_batch(&self, digests: Vec<Digest>) -> Vec<Result<Bytes, ReadError>> {
        chosen!(self, store => store.read_batch(digests))
    }

    async fn write(&self, digest: Digest, source: Chunks) -> Result<(), WriteError> {
        chosen!(self, store => store.write(digest, source))
    }

    async fn write_batch(&self, blobs: Vec<(Digest, Bytes)>) -> Vec<Result<(), WriteError>> {
        chosen!(self, store => store.write_batch(blobs))
    }

    async fn quarantine(&self, digest: Digest) {
        chosen!(self, store => store.quarantine(digest));
    }

    async fn file(&self, digest: Digest) -> Option<std::fs::File> {
        chosen!(self, store => store.file(digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Memory, digest_of};

    fn blob(text: &'static str) -> (Digest, Bytes) {
        (digest_of(text.as_bytes()), Bytes::from_static(text.as_bytes()))
    }

    #[tokio::test]
    async fn test_what_the_far_store_lacks_comes_from_the_other_and_is_written_again() {
        let (near, far, other) = (Memory::default(), Memory::default(), Memory::default());
        let (one, two) = (blob("one"), blob("two"));
        other.write_batch(vec![one.clone(), two.clone()]).await;
        let store = Tiered::new(near, far.clone()).or_from(other);
        assert_eq!(store.read_batch(vec![one.0]).await.remove(0).unwrap(), one.1);
        assert!(store.read(two.0, 0).await.is_ok());
        assert_eq!(far.missing(&[one.0, two.0]).await.unwrap(), []);
        assert_eq!(store.missing(&[one.0, two.0]).await.unwrap(), [], "it is doubted no more");
    }

    #[tokio::test]
    async fn test_what_cannot_be_had_counts_as_missing_until_it_is_sent_again() {
        let (near, far) = (Memory::default(), Memory::default());
        let (one, two) = (blob("one"), blob("two"));
        far.write_batch(vec![one.clone(), two.clone()]).await;
        far.corrupt(one.0, "eno");
        let store = Tiered::new(near, far.clone());
        assert_eq!(store.missing(&[two.0, one.0]).await.unwrap(), [], "it says that it has them");
        assert!(store.read_batch(vec![one.0, two.0]).await[0].as_ref().is_err_and(ReadError::is_damage));
        let empty = Digest::EMPTY;
        assert_eq!(store.missing(&[two.0]).await.unwrap(), [], "what is asked alone is believed");
        assert_eq!(store.missing(&[empty, two.0, one.0, one.0]).await.unwrap(), [two.0, one.0]);
        assert_eq!(store.missing(&[two.0]).await.unwrap(), [two.0], "by now it is to be sent");
        // Even if the far store keeps what it had, there is a near copy from now on.
        assert!(store.write_both(vec![one.clone(), two.clone()]).await.iter().all(Result::is_ok));
        far.corrupt(one.0, "eno");
        assert_eq!(store.missing(&[two.0, one.0]).await.unwrap(), []);
        assert_eq!(store.read_batch(vec![one.0]).await.remove(0).unwrap(), one.1);
    }
}
