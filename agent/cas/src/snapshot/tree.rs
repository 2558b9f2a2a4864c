//! A whole tree of `Directory` messages.
//!
//! Each message is checked by itself ([`message`]); every link, at each of its places, must lead into its own tree.
//!
//! A tree is read level by level in batches, which every server can serve. The memory for its distinct messages
//! is bounded; its size is computed from them before anything is expanded, so a small set of messages that names
//! billions of paths is refused at the cost of the small set. Nothing here ever holds all paths.

mod message;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use agent_blocking::blocking;
use agent_model::Digest;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};

pub(super) use self::message::Directory;
use self::message::length;
use super::links::{Leads, LinkTarget, Steps, follow};
use super::{MAX_DEPTH, MAX_DIRECTORIES, MAX_FILES, MAX_PATH};
use crate::store::{BATCH_BLOBS, BATCH_BYTES, BlobStore, ReadError, batches};

/// The largest `Directory` message read, in bytes: about 300,000 names.
pub(crate) const MAX_MESSAGE: u64 = 32 * 1024 * 1024;

/// Most memory for the distinct directories of a tree, in bytes: those of more than a million files fit.
const MAX_WEIGHT: u64 = 160 * 1024 * 1024;

/// Batches of messages asked for at once.
const READS: usize = 4;

/// Why a tree cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum TreeError {
    #[error("cannot read a directory of the tree")]
    Read(#[source] ReadError),
    #[error("directory {directory} has more than {limit} bytes")]
    TooLarge {
        directory: Digest,
        /// The limit, in bytes.
        limit: u64,
    },
    #[error("an entry of directory {directory} has more than {limit} bytes")]
    LargeEntry {
        directory: Digest,
        /// The limit, in bytes.
        limit: usize,
    },
    #[error("directory {directory} cannot be decoded")]
    Malformed { directory: Digest, source: prost::DecodeError },
    #[error("directory {directory} is not in canonical form")]
    NotCanonical { directory: Digest },
    #[error("directory {directory} holds a file with the name {name:?}")]
    Name { directory: Digest, name: String },
    #[error("directory {directory} says nothing of the content of {name:?}")]
    Content {
        directory: Digest,
        /// The name of the file or directory in it.
        name: String,
    },
    #[error("the link {path} points to {target:?}, outside the tree")]
    Link { path: String, target: String },
    #[error("the directories of the tree take more than {limit} bytes")]
    TooHeavy {
        /// The limit, in bytes.
        limit: u64,
    },
    #[error("the tree has a path of more than {limit} bytes")]
    PathTooLong {
        /// The limit, in bytes.
        limit: usize,
    },
    #[error("the tree is more than {limit} directories deep")]
    TooDeep {
        /// The limit.
        limit: usize,
    },
    #[error("the tree has more than {limit} directories")]
    TooManyDirectories {
        /// The limit.
        limit: u64,
    },
    #[error("the tree has more than {limit} files")]
    TooManyFiles {
        /// The limit.
        limit: u64,
    },
}

/// A file of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Where it is, below the root, with `/` between the segments.
    pub path: String,
    /// Its content.
    pub digest: Digest,
    /// Its owner may execute it.
    pub executable: bool,
}

/// Every file of the tree, sorted by directory and name; links are left out.
pub async fn list(store: &impl BlobStore, root: Digest) -> Result<Vec<Entry>, TreeError> {
    Ok(fetch(store, root).await?.files().collect())
}

/// The tree that is the directory of this name in another one; `None` if there is none. Links are not followed.
pub async fn folder(store: &impl BlobStore, root: Digest, name: &str) -> Result<Option<Digest>, TreeError> {
    let tree = fetch(store, root).await?;
    let directories = tree.directory(&root).map(|directory| &directory.directories);
    Ok(directories.into_iter().flatten().find(|(known, _)| known.as_str() == name).map(|(_, folder)| *folder))
}

/// The directory at a path in a tree, as a tree of its own; `None` if there is none. Links are not followed, and one
/// that leads out of the directory is an error.
pub async fn part(store: &impl BlobStore, root: Digest, path: &str) -> Result<Option<Digest>, TreeError> {
    let mut found = root;
    for name in path.split('/') {
        let directories = read_directory(store, found).await?.directories;
        match directories.into_iter().find(|(known, _)| known == name) {
            Some((_, below)) => found = below,
            None => return Ok(None),
        }
    }
    fetch(store, found).await?;
    Ok(Some(found))
}

/// A directory that holds only the file `name` of another one, with its message, which may not be in the store; `None`
/// if there is no such file.
pub async fn file_alone(
    store: &impl BlobStore,
    directory: Digest,
    name: &str,
) -> Result<Option<(Digest, Bytes)>, TreeError> {
    let files = read_directory(store, directory).await?.files;
    let file = files.into_iter().find(|(known, _, _)| known == name);
    Ok(file.map(|file| Directory { files: vec![file], ..Directory::default() }.encode()))
}

async fn read_directory(store: &impl BlobStore, digest: Digest) -> Result<Directory, TreeError> {
    if digest.size > MAX_MESSAGE {
        return Err(TreeError::TooLarge { directory: digest, limit: MAX_MESSAGE });
    }
    let absent = || ReadError::Absent { digest };
    let answer = store.read_batch(vec![digest]).await.pop().ok_or_else(absent).flatten();
    Directory::decode(digest, &answer.map_err(TreeError::Read)?)
}

/// What one directory names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Named {
    /// The contents of its files.
    pub(crate) files: Vec<Digest>,
    /// The directories in it.
    pub(crate) directories: Vec<Digest>,
}

/// What the message of `directory` names, if it is one that could be laid out.
pub(crate) fn named(directory: Digest, message: &[u8]) -> Result<Named, TreeError> {
    let decoded = Directory::decode(directory, message)?;
    Ok(Named {
        files: decoded.files.into_iter().map(|(_, content, _)| content).collect(),
        directories: decoded.directories.into_iter().map(|(_, child)| child).collect(),
    })
}

/// The distinct directories of a tree, checked one by one and in sum, with its links checked at each place.
#[derive(Debug)]
pub(super) struct Tree {
    root: Digest,
    directories: HashMap<Digest, Arc<Directory>>,
    /// Memory that all directories take, in bytes.
    weight: u64,
    /// Files and links in all directories, counted once for each time one is read.
    files: u64,
    extent: Extent,
}

/// The sum of what is below one directory, itself included, at each place.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Extent {
    pub(super) depth: usize,
    pub(super) directories: u64,
    pub(super) files: u64,
    pub(super) links: u64,
    /// Bytes in the files.
    pub(super) bytes: u64,
    /// Bytes of the longest path.
    pub(super) longest: usize,
}

/// A place of a directory in the tree.
#[derive(Debug, Clone)]
pub(super) struct Branch<'a> {
    /// Its path; empty for the root.
    pub(super) path: String,
    depth: usize,
    pub(super) directory: &'a Directory,
}

/// Reads and checks every directory below `root`.
pub(super) async fn fetch(store: &impl BlobStore, root: Digest) -> Result<Tree, TreeError> {
    fetch_beside(store, root, &[]).await
}

/// The same; directories that are part of one of the `known` trees are not read again.
pub(super) async fn fetch_beside(
    store: &impl BlobStore,
    root: Digest,
    known: &[Arc<Tree>],
) -> Result<Tree, TreeError> {
    let directories = HashMap::new();
    let mut tree = Tree { root, directories, weight: 0, files: 0, extent: Extent::default() };
    let mut level = vec![root];
    for _ in 0..=MAX_DEPTH {
        if level.is_empty() {
            // Up to millions of places are checked.
            return blocking(move || tree.check()).await;
        }
        level = tree.read_level(store, level, known).await?;
    }
    Err(TreeError::TooDeep { limit: MAX_DEPTH })
}

fn check_count(directories: u64, files: u64) -> Result<(), TreeError> {
    if directories > MAX_DIRECTORIES {
        return Err(TreeError::TooManyDirectories { limit: MAX_DIRECTORIES });
    }
    if files > MAX_FILES {
        return Err(TreeError::TooManyFiles { limit: MAX_FILES });
    }
    Ok(())
}

fn check_weight(weight: u64) -> Result<(), TreeError> {
    if weight > MAX_WEIGHT { Err(TreeError::TooHeavy { limit: MAX_WEIGHT }) } else { Ok(()) }
}

/// The sum of the directories of a tree that is being made, so that none is made which would be refused.
#[derive(Debug, Default)]
pub(super) struct Tally {
    distinct: HashSet<Digest>,
    weight: u64,
    directories: u64,
    files: u64,
}

impl Tally {
    /// Encodes a directory, if it and all those before it are within bounds.
    pub(super) fn encode(&mut self, directory: Directory) -> Result<(Digest, Bytes), TreeError> {
        self.directories += 1;
        self.files += (directory.files.len() + directory.links.len()) as u64;
        let weight = directory.weight();
        let (digest, bytes) = directory.encode();
        if digest.size > MAX_MESSAGE {
            return Err(TreeError::TooLarge { directory: digest, limit: MAX_MESSAGE });
        }
        if self.distinct.insert(digest) {
            self.weight += weight;
        }
        check_count(self.directories, self.files)?;
        check_weight(self.weight)?;
        Ok((digest, bytes))
    }
}

impl Tree {
    /// Reads these directories; returns the ones they name that are not read yet.
    async fn read_level(
        &mut self,
        store: &impl BlobStore,
        mut level: Vec<Digest>,
        known: &[Arc<Tree>],
    ) -> Result<Vec<Digest>, TreeError> {
        let (mut next, mut at_hand) = (Vec::new(), Vec::new());
        level.retain(|digest| {
            let found = known.iter().find_map(|tree| tree.directories.get(digest));
            at_hand.extend(found.map(|directory| (*digest, Arc::clone(directory))));
            found.is_none()
        });
        for (digest, directory) in at_hand {
            self.take(digest, directory, &mut next)?;
        }
        if let Some(large) = level.iter().find(|digest| digest.size > MAX_MESSAGE) {
            return Err(TreeError::TooLarge { directory: *large, limit: MAX_MESSAGE });
        }
        let announced = level.iter().fold(self.weight, |sum, digest| sum.saturating_add(digest.size));
        check_weight(announced)?;
        check_count((self.directories.len() + level.len()) as u64, self.files)?;
        // Large ones are in memory one at a time.
        let (large, small): (Vec<_>, Vec<_>) =
            level.into_iter().partition(|digest| digest.size > BATCH_BYTES);
        for (digests, at_once) in [(small, READS), (large, 1)] {
            let reads = batches(digests, BATCH_BYTES, BATCH_BLOBS, |digest| digest.size)
                .into_iter()
                .map(|batch| async { (batch.clone(), store.read_batch(batch).await) });
            let mut answers = stream::iter(reads).buffer_unordered(at_once);
            while let Some((batch, answers)) = answers.next().await {
                for (digest, answer) in batch.into_iter().zip(answers) {
                    let bytes = answer.map_err(TreeError::Read)?;
                    self.take(digest, Arc::new(Directory::decode(digest, &bytes)?), &mut next)?;
                }
            }
        }
        next.sort_unstable();
        next.dedup();
        next.retain(|child| !self.directories.contains_key(child));
        Ok(next)
    }

    fn take(
        &mut self,
        digest: Digest,
        directory: Arc<Directory>,
        next: &mut Vec<Digest>,
    ) -> Result<(), TreeError> {
        self.weight += directory.weight();
        self.files += (directory.files.len() + directory.links.len()) as u64;
        check_weight(self.weight)?;
        check_count(self.directories.len() as u64, self.files)?;
        next.extend(directory.directories.iter().map(|(_, child)| *child));
        self.directories.insert(digest, directory);
        Ok(())
    }

    /// The tree, if its sums and the links at all their places are within bounds.
    pub(super) fn check(mut self) -> Result<Tree, TreeError> {
        self.extent = self.measure(self.root, 1, &mut HashMap::new())?;
        if self.extent.longest > MAX_PATH {
            return Err(TreeError::PathTooLong { limit: MAX_PATH });
        }
        let (mut way, mut steps) = (Vec::new(), Steps::for_links(self.extent.links));
        for branch in self.branches() {
            way.truncate(branch.depth);
            way.push(branch.directory);
            for (name, target) in &branch.directory.links {
                let leads = follow(&way, target, &mut steps, |dir, name| self.find(dir, name));
                if !matches!(leads, Leads::Inside(_) | Leads::Round) {
                    return Err(TreeError::Link { path: join(&branch.path, name), target: target.clone() });
                }
            }
        }
        Ok(self)
    }

    /// The tree with only these files, links and directories, and the directories on the way to them; not checked yet.
    /// Else the first of them that is not there.
    pub(super) fn only<'a>(&self, parts: &'a [String]) -> Result<Tree, &'a str> {
        let mut tree = Tree { directories: self.directories.clone(), ..*self };
        let wanted: Vec<_> = parts.iter().map(|part| (part.as_str(), part.as_str())).collect();
        tree.root = tree.prune(self.root, &wanted)?;
        Ok(tree)
    }

    /// The directory with only these parts, each given as its path from here and its name for the error.
    fn prune<'a>(&mut self, digest: Digest, parts: &[(&'a str, &'a str)]) -> Result<Digest, &'a str> {
        if parts.iter().any(|(path, _)| path.is_empty()) {
            return Ok(digest);
        }
        let all =
            self.directories.get(&digest).map(|directory| Directory::clone(directory)).unwrap_or_default();
        let (mut kept, mut below) = (Directory::default(), BTreeMap::<&str, Vec<_>>::new());
        for (path, part) in parts {
            match path.split_once('/') {
                Some((name, rest)) => below.entry(name).or_default().push((rest, *part)),
                None => below.entry(path).or_default().push(("", *part)),
            }
        }
        for (name, parts) in below {
            let child = all.directories.iter().find(|(known, _)| known == name);
            let file = all.files.iter().find(|(known, ..)| known == name);
            let link = all.links.iter().find(|(known, _)| known == name);
            let beyond = parts.iter().find(|(rest, _)| !rest.is_empty());
            match (child, beyond) {
                (Some((name, child)), _) => {
                    kept.directories.push((name.clone(), self.prune(*child, &parts)?));
                }
                (None, None) if file.is_some() || link.is_some() => {
                    kept.files.extend(file.cloned());
                    kept.links.extend(link.cloned());
                }
                (None, missing) => return Err(missing.or(parts.first()).map_or("", |(_, part)| part)),
            }
        }
        let (digest, _) = kept.clone().encode();
        self.directories.insert(digest, Arc::new(kept));
        Ok(digest)
    }

    fn find<'a>(&'a self, dir: &'a Directory, name: &str) -> LinkTarget<'a, &'a Directory> {
        if let Ok(at) = dir.directories.binary_search_by(|(known, _)| known.as_str().cmp(name)) {
            return self.directory(&dir.directories[at].1).map_or(LinkTarget::Other, LinkTarget::Directory);
        }
        match dir.links.binary_search_by(|(known, _)| known.as_str().cmp(name)) {
            Ok(at) => LinkTarget::Link(&dir.links[at].1),
            Err(_) => LinkTarget::Other,
        }
    }

    /// The sum below `digest`, which is `at` directories below the root's parent. Recursion ends at the depth
    /// limit; each directory is summed up once.
    fn measure(
        &self,
        digest: Digest,
        at: usize,
        known: &mut HashMap<Digest, Extent>,
    ) -> Result<Extent, TreeError> {
        let too_deep = TreeError::TooDeep { limit: MAX_DEPTH };
        if at > MAX_DEPTH {
            return Err(too_deep);
        }
        if let Some(extent) = known.get(&digest) {
            return if at + extent.depth - 1 > MAX_DEPTH { Err(too_deep) } else { Ok(*extent) };
        }
        let absent = TreeError::Read(ReadError::Absent { digest });
        let directory = self.directory(&digest).ok_or(absent)?;
        let names = directory.files.iter().map(|(name, ..)| length(name));
        let names = names.chain(directory.links.iter().map(|(name, _)| length(name)));
        let mut sum = Extent {
            depth: 1,
            directories: 1,
            files: directory.files.len() as u64,
            links: directory.links.len() as u64,
            bytes: directory.files.iter().fold(0, |sum, (_, content, _)| sum.saturating_add(content.size)),
            longest: names.max().unwrap_or(0),
        };
        for (name, child) in &directory.directories {
            let child = self.measure(*child, at + 1, known)?;
            sum.depth = sum.depth.max(child.depth + 1);
            sum.directories = sum.directories.saturating_add(child.directories);
            sum.files = sum.files.saturating_add(child.files);
            sum.links = sum.links.saturating_add(child.links);
            sum.bytes = sum.bytes.saturating_add(child.bytes);
            sum.longest = sum.longest.max(length(name) + 1 + child.longest);
        }
        check_count(sum.directories, sum.files.saturating_add(sum.links))?;
        known.insert(digest, sum);
        Ok(sum)
    }

    /// One of its directories.
    pub(super) fn directory(&self, digest: &Digest) -> Option<&Directory> {
        self.directories.get(digest).map(AsRef::as_ref)
    }

    pub(super) fn root(&self) -> Digest {
        self.root
    }

    /// What there is in all.
    pub(super) fn extent(&self) -> Extent {
        self.extent
    }

    /// Every place of a directory, parents before children, the root first.
    pub(super) fn branches(&self) -> Branches<'_> {
        Branches { tree: self, begun: false, open: Vec::new() }
    }

    /// Every file, by directory and name.
    pub(super) fn files(&self) -> impl Iterator<Item = Entry> {
        self.branches().flat_map(|Branch { path, directory, .. }| {
            directory.files.iter().map(move |(name, digest, executable)| Entry {
                path: join(&path, name),
                digest: *digest,
                executable: *executable,
            })
        })
    }

    /// Every link: its path, its target.
    pub(super) fn links(&self) -> impl Iterator<Item = (String, &str)> {
        self.branches().flat_map(|Branch { path, directory, .. }| {
            directory.links.iter().map(move |(name, target)| (join(&path, name), target.as_str()))
        })
    }
}

/// See [`Tree::branches`]. Holds the directories on the way to the current one.
#[derive(Debug)]
pub(super) struct Branches<'a> {
    tree: &'a Tree,
    begun: bool,
    /// Each with the number of its next child.
    open: Vec<(Branch<'a>, usize)>,
}

impl<'a> Iterator for Branches<'a> {
    type Item = Branch<'a>;

    fn next(&mut self) -> Option<Branch<'a>> {
        let (path, depth, digest) = loop {
            if !self.begun {
                self.begun = true;
                break (String::new(), 0, self.tree.root);
            }
            let (parent, next) = self.open.last_mut()?;
            match parent.directory.directories.get(*next) {
                Some((name, digest)) => {
                    *next += 1;
                    break (join(&parent.path, name), parent.depth + 1, *digest);
                }
                None => self.open.pop(),
            };
        };
        let branch = Branch { path, depth, directory: self.tree.directory(&digest)? };
        self.open.push((branch.clone(), 0));
        Some(branch)
    }
}

/// `name` below `path`, which is empty for the root.
pub(super) fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") }
}

#[cfg(test)]
mod tests;
