//! Copies trees from one store to another.
//!
//! Contents are sent first, then directories, and a tree's root after all below it, so that a store which has the root
//! has the tree. Only what the other store lacks is sent.

use std::collections::HashSet;

use agent_model::Digest;

use super::tree::{TreeError, named};
use crate::store::{
    BATCH_BLOBS, BATCH_BYTES, BlobStore, MissingError, ReadError, SMALL_BLOB, WriteError, batches,
};

/// Why trees were not copied.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// A blob of them cannot be read.
    #[error("cannot read what is to be copied")]
    Read(#[source] ReadError),
    /// A blob of them is no directory.
    #[error("cannot read a directory that is to be copied")]
    Tree(#[source] Box<TreeError>),
    /// The other store cannot report what it lacks.
    #[error("cannot ask the store what it lacks")]
    Missing(#[source] MissingError),
    /// The other store does not take a blob.
    #[error("cannot send what is to be copied")]
    Write(#[source] WriteError),
}

impl CopyError {
    /// A blob is not in the store to copy from.
    pub fn is_absent(&self) -> bool {
        matches!(self, CopyError::Read(ReadError::Absent { .. }))
    }
}

/// The blobs of some trees.
#[derive(Debug, Default)]
pub struct Blobs {
    files: Vec<Digest>,
    /// Each after those that name it.
    directories: Vec<Digest>,
}

/// Every blob of these trees; all directories must be in `store`.
pub async fn blobs(store: &impl BlobStore, roots: &[Digest]) -> Result<Blobs, CopyError> {
    let (mut seen, mut found) = (HashSet::new(), Blobs::default());
    let mut level: Vec<Digest> = roots.iter().copied().filter(|root| seen.insert(*root)).collect();
    while !level.is_empty() {
        let mut below = Vec::new();
        for batch in batches(level.iter().copied(), BATCH_BYTES, BATCH_BLOBS, |one| one.size) {
            for (directory, message) in batch.iter().zip(store.read_batch(batch.clone()).await) {
                let message = message.map_err(CopyError::Read)?;
                let tree = |error| CopyError::Tree(Box::new(error));
                let named = named(*directory, &message).map_err(tree)?;
                found.files.extend(named.files.into_iter().filter(|file| seen.insert(*file)));
                below.extend(named.directories.into_iter().filter(|one| seen.insert(*one)));
            }
        }
        found.directories.append(&mut level);
        level = below;
    }
    Ok(found)
}

impl Blobs {
    /// One that `store` lacks.
    pub async fn missing_in(&self, store: &impl BlobStore) -> Result<Option<Digest>, CopyError> {
        Ok(store.missing(&self.files).await.map_err(CopyError::Missing)?.first().copied())
    }

    /// Sends what `to` lacks of them.
    pub async fn copy(&self, from: &impl BlobStore, to: &impl BlobStore) -> Result<(), CopyError> {
        let lacks = to.missing(&self.files).await.map_err(CopyError::Missing)?;
        let (small, large): (Vec<_>, Vec<_>) = lacks.into_iter().partition(|file| file.size <= SMALL_BLOB);
        for blob in large {
            let content = from.read(blob, 0).await.map_err(CopyError::Read)?;
            to.write(blob, content).await.map_err(CopyError::Write)?;
        }
        let directories: Vec<Digest> = self.directories.iter().rev().copied().collect();
        let directories = to.missing(&directories).await.map_err(CopyError::Missing)?;
        for some in [small, directories] {
            for batch in batches(some, BATCH_BYTES, BATCH_BLOBS, |blob| blob.size) {
                let contents = from.read_batch(batch.clone()).await.into_iter();
                let contents: Result<Vec<_>, _> = contents.collect::<Result<Vec<_>, _>>();
                let blobs = batch.into_iter().zip(contents.map_err(CopyError::Read)?).collect();
                for written in to.write_batch(blobs).await {
                    written.map_err(CopyError::Write)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{push, scan_whole};
    use super::*;
    use crate::Memory;

    #[tokio::test]
    async fn test_trees_are_copied_whole_and_what_is_absent_is_told() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        std::fs::create_dir_all(dir.path().join("c/b")).unwrap();
        for (name, text) in [("x", "one"), ("a/b/y", "two"), ("c/b/y", "two"), ("a/empty", "")] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        std::fs::write(dir.path().join("large"), vec![7; SMALL_BLOB as usize + 1]).unwrap();
        let snapshot = scan_whole(dir.path()).unwrap();
        let (here, there) = (Memory::default(), Memory::default());
        push(&snapshot, &here, |_| {}).await.unwrap();

        let tree = blobs(&here, &[snapshot.root, snapshot.root]).await.unwrap();
        assert_eq!(tree.missing_in(&here).await.unwrap(), None);
        assert!(tree.missing_in(&there).await.unwrap().is_some());
        for _ in 0..2 {
            tree.copy(&here, &there).await.unwrap();
        }
        let copied = blobs(&there, &[snapshot.root]).await.unwrap();
        assert_eq!(
            (copied.files.len(), copied.directories.len()),
            (tree.files.len(), tree.directories.len())
        );
        assert_eq!(copied.missing_in(&there).await.unwrap(), None);
        assert!(blobs(&Memory::default(), &[snapshot.root]).await.unwrap_err().is_absent());
    }
}
