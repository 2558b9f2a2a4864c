//! Trees that were laid out ahead of time, so that a job that wants one of them, or a similar one, has it at once.
//!
//! A [`PrestagedTree`] is a private copy of a tree that no job has seen. [`materialize`] gives a job the prestaged
//! tree that is most similar to the wanted one: it proves that nobody touched it, moves it to the job's place, and
//! applies the differences. This uses it up. Where none is similar enough, or the proof fails, the tree is laid out
//! anew; a prestaged tree only ever saves time.
//!
//! Invariants:
//! - A prestaged tree is usable once it was read back: [`SETTLING`] after its stamps were taken, every name in it is
//!   compared and every byte hashed, so that any change while it was laid out is found. From then on its stamps prove
//!   it: the metadata of each file, link and directory, with the change time, which no program can set; a change
//!   after the reading has a later time on the coarsest clock. They are compared once more after the reading, and
//!   when it is used. They are only in memory, where no job writes; so no prestaged tree outlives the process.
//! - A prestaged tree is claimed once. The claimer moves or removes it, even when it fails.
//! - No file of a prestaged tree was ever shared, with the store or with another tree.
//!
//! Like the stat cache, it cannot detect a write through a memory mapping that was made before it was read back, by
//! somebody who may enter the agent's own directories.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use agent_blocking::blocking;
use agent_fs::name_of_text;
use agent_model::{Digest, causes, failpoint};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};

use super::difference::Difference;
use super::ground::{Ground, Manner, MaterializeError, Owner};
use super::materialize::{Laid, lay, lay_files, publish, staging_path};
use super::open_text_beneath;
use super::scan::hash_content;
use super::stamp::Stamp;
use super::tree::{self, Branch, Directory, Tree};
use crate::counter::ByteCounter;
use crate::holes;
use crate::parallel;
use crate::store::{BlobStore, remove_tree};

/// How long a new prestaged tree is left alone before it is read back: a tick of a file system's coarsest clock.
const SETTLING: Duration = Duration::from_secs(2);

/// Why a prestaged tree could not be made or used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum PrestageError {
    #[error("the prestaged could not be laid out")]
    Lay(#[source] MaterializeError),
    #[error("cannot work on {path}")]
    Disk { path: PathBuf, source: io::Error },
    #[error("somebody changed {path}")]
    Touched { path: PathBuf },
}

/// A tree that was laid out for a future job.
#[derive(Debug)]
pub struct PrestagedTree {
    path: PathBuf,
    tree: Arc<Tree>,
    owner: Option<Owner>,
    /// Of each directory in the order of the tree: its own, then those of its files, then those of its links.
    stamps: Vec<Vec<Stamp>>,
    claimed: AtomicBool,
}

impl PrestagedTree {
    /// Lays the tree out at `path`, which must not exist and which nobody but the caller may know, for jobs of
    /// `owner`. Takes [`SETTLING`] longer than that, and memory for the names in the tree while it exists.
    pub async fn lay(
        store: &impl BlobStore,
        root: Digest,
        path: &Path,
        owner: Option<Owner>,
    ) -> Result<PrestagedTree, PrestageError> {
        PrestagedTree::lay_settled(store, root, path, owner, SETTLING).await
    }

    pub(super) async fn lay_settled(
        store: &impl BlobStore,
        root: Digest,
        path: &Path,
        owner: Option<Owner>,
        settling: Duration,
    ) -> Result<PrestagedTree, PrestageError> {
        let failed = |source| PrestageError::Lay(MaterializeError::Tree(source));
        let tree = Arc::new(tree::fetch(store, root).await.map_err(failed)?);
        lay(store, &tree, path, Manner::Job(owner), &Arc::default()).await.map_err(PrestageError::Lay)?;
        PrestagedTree::settle(path.to_owned(), tree, owner, settling).await
    }

    /// Verifies that the directory at `path` is the tree, and takes the stamps that prove it later.
    async fn settle(
        path: PathBuf,
        tree: Arc<Tree>,
        owner: Option<Owner>,
        settling: Duration,
    ) -> Result<PrestagedTree, PrestageError> {
        let claimed = AtomicBool::new(false);
        let prestaged = blocking(move || {
            let stamps = stamps(&path, &tree)?;
            Ok(PrestagedTree { path, tree, owner, stamps, claimed })
        });
        let prestaged = prestaged.await?;
        tokio::time::sleep(settling).await;
        blocking(move || {
            prestaged.read_back()?;
            prestaged.prove().map(|()| prestaged)
        })
        .await
    }

    /// The root of its tree.
    pub fn root(&self) -> Digest {
        self.tree.root()
    }

    /// The owner of its files.
    pub fn owner(&self) -> Option<Owner> {
        self.owner
    }

    /// A job has it, or it was removed.
    pub fn is_claimed(&self) -> bool {
        self.claimed.load(Ordering::Acquire)
    }

    /// Removes it, unless somebody claimed it.
    pub async fn discard(self: Arc<PrestagedTree>) -> Result<(), PrestageError> {
        blocking(move || match self.claim() {
            true => remove_tree(&self.path)
                .map_err(|source| PrestageError::Disk { path: self.path.clone(), source }),
            false => Ok(()),
        })
        .await
    }

    fn claim(&self) -> bool {
        !self.claimed.swap(true, Ordering::AcqRel)
    }

    /// Verifies it against its tree, to the last byte.
    fn read_back(&self) -> Result<(), PrestageError> {
        let root = open(&self.path)?;
        let branches: Vec<Branch<'_>> = self.tree.branches().collect();
        let read = parallel::map(&branches, parallel::cores(), |branch| match holds(&root, branch) {
            Ok(true) => Ok(()),
            Ok(false) => Err(PrestageError::Touched { path: self.path.join(&branch.path) }),
            Err(source) => Err(PrestageError::Disk { path: self.path.join(&branch.path), source }),
        });
        read.into_iter().collect()
    }

    /// Verifies that all its stamps are those that were taken.
    fn prove(&self) -> Result<(), PrestageError> {
        let root = open(&self.path)?;
        let known: Vec<_> = self.tree.branches().zip(&self.stamps).collect();
        let proven = parallel::map(&known, parallel::cores(), |(branch, stamps)| {
            let (mut then, mut is_same) = (stamps.iter(), true);
            let looked = look(&root, branch, |now| is_same &= then.next() == Some(&now));
            let path = || self.path.join(&branch.path);
            match looked {
                Err(source) => Err(PrestageError::Disk { path: path(), source }),
                Ok(()) if !is_same => Err(PrestageError::Touched { path: path() }),
                Ok(()) => Ok(()),
            }
        });
        proven.into_iter().collect()
    }

    /// Moves it to `to`, replacing what is there, if it is proven. If that fails, it is removed.
    fn take(&self, to: &Path) -> Result<(), PrestageError> {
        let take = || {
            self.prove()?;
            let moved = failpoint::hit("cas.prestaged.take")
                .and_then(|()| remove_tree(to))
                .and_then(|()| std::fs::rename(&self.path, to));
            moved.map_err(|source| PrestageError::Disk { path: self.path.clone(), source })
        };
        take().inspect_err(|_| {
            // The first error is more useful; the rest of it is removed with its directory.
            let _ = remove_tree(&self.path);
        })
    }

    /// Turns this claimed prestaged tree into the tree at `dest`, by applying `difference`.
    async fn become_tree(
        self: &Arc<PrestagedTree>,
        store: &impl BlobStore,
        mut difference: Difference,
        dest: &Path,
        counter: &Arc<ByteCounter>,
    ) -> Result<(), PrestageError> {
        let (prestaged, dest, counter) = (Arc::clone(self), dest.to_owned(), Arc::clone(counter));
        let staging = staging_path(&dest).map_err(PrestageError::Lay)?;
        let (to, extent) = (staging.clone(), difference.extent());
        let files = std::mem::take(&mut difference.files);
        let begun = blocking(move || {
            prestaged.take(&to)?;
            let prepared = Ground::open(to, Manner::Job(prestaged.owner), counter).and_then(|ground| {
                ground.expect(extent)?;
                difference.unlinked.iter().try_for_each(|path| ground.unlink(path))?;
                difference.emptied.iter().try_for_each(|path| ground.remove_directory(path))?;
                difference.directories.iter().try_for_each(|path| ground.directory(path))?;
                Ok((Arc::new(ground), difference.links))
            });
            prepared.map_err(PrestageError::Lay)
        });
        let (ground, links) = begun.await?;
        lay_files(store, &ground, files.into_iter()).await.map_err(PrestageError::Lay)?;
        let finish = move || {
            links.iter().try_for_each(|(path, to)| ground.link(path, to))?;
            publish(&staging, &dest)
        };
        blocking(finish).await.map_err(PrestageError::Lay)
    }
}

/// The stamps of everything in the tree at `path`.
fn stamps(path: &Path, tree: &Tree) -> Result<Vec<Vec<Stamp>>, PrestageError> {
    let root = open(path)?;
    let branches: Vec<Branch<'_>> = tree.branches().collect();
    let looked = parallel::map(&branches, parallel::cores(), |branch| {
        let mut stamps = Vec::new();
        let looked = look(&root, branch, |stamp| stamps.push(stamp));
        looked
            .map(|()| stamps)
            .map_err(|source| PrestageError::Disk { path: path.join(&branch.path), source })
    });
    looked.into_iter().collect()
}

fn open(path: &Path) -> Result<OwnedFd, PrestageError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
        .map_err(|source| PrestageError::Disk { path: path.to_owned(), source: source.into() })
}

/// Passes the stamps of a directory, its files and its links to `tell`. The names in a directory are covered by its
/// own stamp: adding or removing one changes its times.
fn look(root: &OwnedFd, branch: &Branch<'_>, mut tell: impl FnMut(Stamp)) -> io::Result<()> {
    let dir = open_text_beneath(root, &branch.path, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?;
    tell(Stamp::of(&rustix::fs::fstat(&dir)?));
    let (files, links) = (&branch.directory.files, &branch.directory.links);
    for name in files.iter().map(|(name, ..)| name).chain(links.iter().map(|(name, _)| name)) {
        tell(Stamp::of(&rustix::fs::statat(&dir, &*name_of_text(name), AtFlags::SYMLINK_NOFOLLOW)?));
    }
    Ok(())
}

/// Whether a directory holds just what it should: these names, and files without other names, with this content.
fn holds(root: &OwnedFd, branch: &Branch<'_>) -> io::Result<bool> {
    let dir = open_text_beneath(root, &branch.path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
    let Directory { files, directories, links } = branch.directory;
    let mut names = 0;
    for entry in Dir::read_from(&dir)? {
        names += usize::from(!matches!(entry?.file_name().to_bytes(), b"." | b".."));
    }
    if names != files.len() + directories.len() + links.len() {
        return Ok(false);
    }
    for (name, digest, _) in files {
        let file = File::from(open_text_beneath(&dir, name, OFlags::RDONLY, Mode::empty())?);
        let stat = rustix::fs::fstat(&file)?;
        let is_own = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && stat.st_mode & 0o7777 == 0o775
            && stat.st_nlink == 1;
        let mut file = holes::Reader::new(file);
        let read = hash_content(&mut file, digest.size, &mut Vec::new(), &AtomicBool::new(false))?;
        if !is_own || read != Some(*digest) {
            return Ok(false);
        }
    }
    for (name, target) in links {
        let found = rustix::fs::readlinkat(&dir, &*name_of_text(name), Vec::new())?;
        if found.to_bytes() != name_of_text(target).as_encoded_bytes() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes the tree to `dest` for a job of `owner` to work in, from the most similar of `prestaged_trees` where that
/// is less work. Directories and files have mode 0775, so that a script runs whether or not it was executable where
/// it came from. `dest` must not exist, or be empty.
pub async fn materialize(
    store: &impl BlobStore,
    root: Digest,
    dest: &Path,
    owner: Option<Owner>,
    prestaged_trees: &[Arc<PrestagedTree>],
) -> Result<Laid, MaterializeError> {
    materialize_counted(store, root, dest, owner, prestaged_trees, &Arc::default()).await
}

/// The same, and counts what is written: of a similar tree only what differs.
pub async fn materialize_counted(
    store: &impl BlobStore,
    root: Digest,
    dest: &Path,
    owner: Option<Owner>,
    prestaged_trees: &[Arc<PrestagedTree>],
    counter: &Arc<ByteCounter>,
) -> Result<Laid, MaterializeError> {
    let usable: Vec<&Arc<PrestagedTree>> =
        prestaged_trees.iter().filter(|prestaged| prestaged.owner == owner).collect();
    let known: Vec<Arc<Tree>> = usable.iter().map(|prestaged| Arc::clone(&prestaged.tree)).collect();
    let tree = Arc::new(tree::fetch_beside(store, root, &known).await.map_err(MaterializeError::Tree)?);
    let mut near: Vec<(Difference, &Arc<PrestagedTree>)> = Vec::new();
    for prestaged in usable.into_iter().filter(|prestaged| !prestaged.is_claimed()) {
        near.extend(Difference::between(&prestaged.tree, &tree).map(|difference| (difference, prestaged)));
    }
    near.sort_by_key(|(difference, _)| difference.cost);
    for (difference, prestaged) in near {
        if prestaged.claim() {
            match prestaged.become_tree(store, difference, dest, counter).await {
                Ok(()) => return Ok(Laid::of(&tree)),
                Err(error) => {
                    let error = causes::tell(&error);
                    tracing::warn!(error, "cannot use prestaged tree: laying out anew");
                }
            }
        }
    }
    lay(store, &tree, dest, Manner::Job(owner), counter).await
}

#[cfg(test)]
mod tests;
