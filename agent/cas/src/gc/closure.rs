//! All blobs that are reached from roots that somebody holds: the directories below them, and their contents.
//!
//! A tree is walked in batches, each distinct directory once, however many roots share it. A blob that is absent is
//! skipped: it cannot be removed, and nothing is known below it. A directory that is present and cannot be read
//! ends the walk, because the blobs it names would be taken for unneeded.
//!
//! Memory: a digest for each distinct directory, and 16 bytes for each content. Contents are known by the first 8
//! bytes of their hash; two that share them are both kept, which costs room and loses nothing.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use agent_blocking::blocking;
use agent_model::Digest;

use super::{Holder, Pin};
use crate::snapshot::{MAX_MESSAGE, Named, named};
use crate::store::{BATCH_BLOBS, BATCH_BYTES, BlobStore, ReadError, fitting};

/// A walk over all directories that are reached from some roots.
pub(super) struct Walk {
    open: Vec<Digest>,
    seen: HashSet<Digest>,
}

/// The result of reading a batch of directories.
#[derive(Debug, Default)]
pub(super) struct Step {
    /// Directories that are not here.
    pub(super) absent: Vec<Digest>,
    /// What the others name.
    pub(super) files: Vec<Digest>,
    pub(super) directories: Vec<Digest>,
}

impl Walk {
    /// Of nothing yet.
    pub(super) fn new() -> Walk {
        Walk { open: Vec::new(), seen: HashSet::new() }
    }

    /// Adds a directory, once. A blob that is too large to be one is ignored.
    pub(super) fn add(&mut self, directory: Digest) {
        if directory.size <= MAX_MESSAGE && self.seen.insert(directory) {
            self.open.push(directory);
        }
    }

    /// Every directory that was added.
    pub(super) fn into_seen(self) -> HashSet<Digest> {
        self.seen
    }

    /// Reads some directories; `None` when none is left. The caller adds those they name that it wants read.
    pub(super) async fn step(&mut self, store: &impl BlobStore) -> Result<Option<Step>, ReadError> {
        let sizes = self.open.iter().rev().map(|directory| directory.size);
        let batch = self.open.split_off(self.open.len() - fitting(sizes, BATCH_BYTES, BATCH_BLOBS));
        if batch.is_empty() {
            return Ok(None);
        }
        let answers = store.read_batch(batch.clone()).await;
        blocking(move || {
            let mut step = Step::default();
            for (directory, answer) in batch.into_iter().zip(answers) {
                match answer {
                    Err(ReadError::Absent { .. }) => step.absent.push(directory),
                    // A blob that is no directory is never laid out: an attempt fails with an error of its own.
                    answer => {
                        let Named { files, directories } = named(directory, &answer?).unwrap_or_default();
                        step.files.extend(files);
                        step.directories.extend(directories);
                    }
                }
            }
            Ok(Some(step))
        })
        .await
    }
}

/// The blobs that somebody holds.
pub(super) struct HeldBlobs {
    walk: Walk,
    holders: HashMap<u64, Holder>,
}

impl HeldBlobs {
    /// Nothing.
    pub(super) fn new() -> HeldBlobs {
        HeldBlobs { walk: Walk::new(), holders: HashMap::new() }
    }

    /// Who holds the blob; the first that was added, when several do.
    pub(super) fn holder(&self, digest: &Digest) -> Option<Holder> {
        self.holders.get(&short(digest)).copied()
    }

    /// Adds everything that these pins reach.
    pub(super) async fn add(&mut self, store: &impl BlobStore, pins: &[Pin]) -> Result<(), ReadError> {
        for some in pins.chunk_by(|one, next| one.by == next.by) {
            for pin in some {
                self.hold(&pin.digest, pin.by);
                if pin.is_tree {
                    self.walk.add(pin.digest);
                }
            }
            self.walk_on(store, some[0].by).await?;
        }
        Ok(())
    }

    async fn walk_on(&mut self, store: &impl BlobStore, by: Holder) -> Result<(), ReadError> {
        while let Some(step) = self.walk.step(store).await? {
            for content in &step.files {
                self.hold(content, by);
            }
            for directory in step.directories {
                self.hold(&directory, by);
                self.walk.add(directory);
            }
        }
        Ok(())
    }

    fn hold(&mut self, digest: &Digest, by: Holder) {
        if let Entry::Vacant(entry) = self.holders.entry(short(digest)) {
            entry.insert(by);
        }
    }
}

fn short(digest: &Digest) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = digest.hash;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}
