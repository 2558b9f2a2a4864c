//! `Directory` messages: the one encoder, the strict decoder, and reading a whole tree of them.
//!
//! A message is accepted only if encoding what was understood gives the same bytes again. So order,
//! uniqueness, unknown fields and field order need no rule each, and equal trees have equal digests. Names
//! are single path segments; a link is relative, climbs only at its beginning and never above the root.
//!
//! A tree is read level by level in batches, which every server can serve. Its size is computed from the
//! distinct messages before anything is expanded, so a small set of messages that names billions of paths is
//! refused at the cost of the small set.

use std::collections::HashMap;

use agent_model::Digest;
use bazel_remote_apis::build::bazel::remote::execution::v2 as reapi;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use prost::Message;

use super::{MAX_DEPTH, MAX_DIRECTORIES, MAX_FILES};
use crate::digest_of;
use crate::remote::{digest_from_wire, digest_to_wire};
use crate::store::{BATCH_BLOBS, BATCH_BYTES, BlobStore, ReadError, batches};

/// The largest `Directory` message read, in bytes: about 300,000 names.
const MAX_MESSAGE: u64 = 32 * 1024 * 1024;

/// The longest name of a file, in bytes, that Linux file systems take.
const MAX_NAME: usize = 255;

/// Batches of messages asked for at once.
const READS: usize = 4;

/// Why a tree cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// One of its directories could not be read.
    #[error("cannot read a directory of the tree")]
    Read(#[source] ReadError),
    /// A directory is larger than any real one.
    #[error("directory {directory} has more than {limit} bytes")]
    TooLarge {
        /// The directory.
        directory: Digest,
        /// The limit, in bytes.
        limit: u64,
    },
    /// A directory is no `Directory` message.
    #[error("directory {directory} cannot be decoded")]
    Malformed {
        /// The directory.
        directory: Digest,
        #[source]
        /// What is wrong with it.
        source: prost::DecodeError,
    },
    /// A directory is not in the one form it may have: unsorted, a name twice, or unknown fields.
    #[error("directory {directory} is not in canonical form")]
    NotCanonical {
        /// The directory.
        directory: Digest,
    },
    /// A name is not the name of a file.
    #[error("directory {directory} holds a file with the name {name:?}")]
    Name {
        /// The directory.
        directory: Digest,
        /// The name.
        name: String,
    },
    /// A file or directory is named without a usable digest.
    #[error("directory {directory} says nothing of the content of {name:?}")]
    Content {
        /// The directory.
        directory: Digest,
        /// The name of the file or directory in it.
        name: String,
    },
    /// A symbolic link leads, or may lead, out of the tree.
    #[error("the link {path} points to {target:?}, outside the tree")]
    Link {
        /// The link.
        path: String,
        /// Where it points.
        target: String,
    },
    /// Directories are nested too deep.
    #[error("the tree is more than {limit} directories deep")]
    TooDeep {
        /// The limit.
        limit: usize,
    },
    /// There are too many directories.
    #[error("the tree has more than {limit} directories")]
    TooManyDirectories {
        /// The limit.
        limit: u64,
    },
    /// There are too many files.
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
    Ok(fetch(store, root).await?.expand()?.files)
}

/// What one directory holds, each kind sorted by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Directory {
    /// Name, content, executable.
    pub(super) files: Vec<(String, Digest, bool)>,
    /// Name, message.
    pub(super) directories: Vec<(String, Digest)>,
    /// Name, target.
    pub(super) links: Vec<(String, String)>,
}

impl Directory {
    /// Its canonical message.
    pub(super) fn encode(mut self) -> (Digest, Bytes) {
        self.files.sort_unstable();
        self.directories.sort_unstable();
        self.links.sort_unstable();
        let file = |(name, digest, is_executable)| reapi::FileNode {
            name,
            digest: Some(digest_to_wire(&digest)),
            is_executable,
            node_properties: None,
        };
        let directory = |(name, digest)| reapi::DirectoryNode { name, digest: Some(digest_to_wire(&digest)) };
        let link = |(name, target)| reapi::SymlinkNode { name, target, node_properties: None };
        let message = reapi::Directory {
            files: self.files.into_iter().map(file).collect(),
            directories: self.directories.into_iter().map(directory).collect(),
            symlinks: self.links.into_iter().map(link).collect(),
            node_properties: None,
        };
        let bytes = Bytes::from(message.encode_to_vec());
        (digest_of(&bytes), bytes)
    }

    /// Understands a message, if it is canonical. Node properties (times, full modes) are of no use here and
    /// ours never have them; they make a message as foreign as an unknown field does.
    fn decode(directory: Digest, bytes: &[u8]) -> Result<Directory, TreeError> {
        let message =
            reapi::Directory::decode(bytes).map_err(|source| TreeError::Malformed { directory, source })?;
        let content = |name: &str, digest: Option<reapi::Digest>| {
            digest
                .and_then(|wire| digest_from_wire(&wire).ok())
                .ok_or_else(|| TreeError::Content { directory, name: name.to_owned() })
        };
        let mut decoded = Directory::default();
        for node in message.files {
            let digest = content(&node.name, node.digest)?;
            decoded.files.push((node.name, digest, node.is_executable));
        }
        for node in message.directories {
            let digest = content(&node.name, node.digest)?;
            decoded.directories.push((node.name, digest));
        }
        decoded.links = message.symlinks.into_iter().map(|node| (node.name, node.target)).collect();
        decoded.check_names(directory)?;
        match decoded.clone().encode() {
            (_, canonical) if canonical == bytes => Ok(decoded),
            _ => Err(TreeError::NotCanonical { directory }),
        }
    }

    fn check_names(&self, directory: Digest) -> Result<(), TreeError> {
        let files = self.files.iter().map(|(name, ..)| name);
        let directories = self.directories.iter().map(|(name, _)| name);
        let mut names: Vec<&String> =
            files.chain(directories).chain(self.links.iter().map(|(name, _)| name)).collect();
        if let Some(name) = names.iter().find(|name| !is_segment(name)) {
            return Err(TreeError::Name { directory, name: (*name).clone() });
        }
        names.sort_unstable();
        match names.windows(2).any(|pair| pair[0] == pair[1]) {
            true => Err(TreeError::NotCanonical { directory }),
            false => Ok(()),
        }
    }
}

/// `name` is one segment of a path, and not a special one.
fn is_segment(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && name.len() <= MAX_NAME && !name.contains(['/', '\0'])
}

/// A link in a directory `depth` levels below the root stays inside: it is relative, and climbs at most to
/// the root, before anything else. A `..` after a name is refused because the name may itself be a link.
pub(super) fn stays_inside(depth: usize, target: &str) -> bool {
    let climbs = target.split('/').take_while(|segment| matches!(*segment, ".." | ".")).collect::<Vec<_>>();
    let rest = target.split('/').skip(climbs.len());
    let up = climbs.iter().filter(|segment| **segment == "..").count();
    !target.is_empty()
        && !target.starts_with('/')
        && !target.contains('\0')
        && up <= depth
        && rest.into_iter().all(|segment| segment != "..")
}

/// The distinct directories of a tree, checked one by one and for their sum.
#[derive(Debug)]
pub(super) struct Tree {
    root: Digest,
    directories: HashMap<Digest, Directory>,
}

/// A tree as paths.
#[derive(Debug, Default)]
pub(super) struct Paths {
    /// Parents before children, the root (an empty path) first.
    pub(super) directories: Vec<String>,
    pub(super) files: Vec<Entry>,
    /// Path, target.
    pub(super) links: Vec<(String, String)>,
}

/// The sum of what is below one directory, itself included.
#[derive(Debug, Clone, Copy)]
struct Extent {
    depth: usize,
    directories: u64,
    files: u64,
}

/// Reads and checks every directory below `root`.
pub(super) async fn fetch(store: &impl BlobStore, root: Digest) -> Result<Tree, TreeError> {
    let mut tree = Tree { root, directories: HashMap::new() };
    let mut level = vec![root];
    let mut files = 0;
    for _ in 0..=MAX_DEPTH {
        if level.is_empty() {
            tree.measure(root, 1, &mut HashMap::new())?;
            return Ok(tree);
        }
        let mut next = Vec::new();
        for (digest, directory) in read_level(store, level).await? {
            files += (directory.files.len() + directory.links.len()) as u64;
            next.extend(directory.directories.iter().map(|(_, child)| *child));
            tree.directories.insert(digest, directory);
            check_count(tree.directories.len() as u64, files)?;
        }
        next.sort_unstable();
        next.dedup();
        next.retain(|child| !tree.directories.contains_key(child));
        check_count((tree.directories.len() + next.len()) as u64, files)?;
        level = next;
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

async fn read_level(
    store: &impl BlobStore,
    level: Vec<Digest>,
) -> Result<Vec<(Digest, Directory)>, TreeError> {
    if let Some(large) = level.iter().find(|digest| digest.size > MAX_MESSAGE) {
        return Err(TreeError::TooLarge { directory: *large, limit: MAX_MESSAGE });
    }
    let reads = batches(level, BATCH_BYTES, BATCH_BLOBS, |digest| digest.size)
        .into_iter()
        .map(|batch| async { (batch.clone(), store.read_batch(batch).await) });
    let mut answers = stream::iter(reads).buffer_unordered(READS);
    let mut read = Vec::new();
    while let Some((batch, answers)) = answers.next().await {
        for (digest, answer) in batch.into_iter().zip(answers) {
            let bytes = answer.map_err(TreeError::Read)?;
            read.push((digest, Directory::decode(digest, &bytes)?));
        }
    }
    Ok(read)
}

impl Tree {
    /// What is below `digest`, which stands `at` directories below the root's parent. Recursion ends with
    /// the depth limit; each directory is summed up once.
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
        let directory = self.directory(&digest)?;
        let mut sum = Extent {
            depth: 1,
            directories: 1,
            files: (directory.files.len() + directory.links.len()) as u64,
        };
        for (_, child) in &directory.directories {
            let child = self.measure(*child, at + 1, known)?;
            sum.depth = sum.depth.max(child.depth + 1);
            sum.directories = sum.directories.saturating_add(child.directories);
            sum.files = sum.files.saturating_add(child.files);
        }
        check_count(sum.directories, sum.files)?;
        known.insert(digest, sum);
        Ok(sum)
    }

    fn directory(&self, digest: &Digest) -> Result<&Directory, TreeError> {
        self.directories.get(digest).ok_or(TreeError::Read(ReadError::Absent { digest: *digest }))
    }

    /// Every path of the tree.
    pub(super) fn expand(&self) -> Result<Paths, TreeError> {
        let mut paths = Paths::default();
        self.expand_below(String::new(), 0, self.root, &mut paths)?;
        Ok(paths)
    }

    fn expand_below(
        &self,
        path: String,
        depth: usize,
        digest: Digest,
        paths: &mut Paths,
    ) -> Result<(), TreeError> {
        let directory = self.directory(&digest)?;
        let below = |name: &str| join(&path, name);
        for (name, digest, executable) in &directory.files {
            paths.files.push(Entry { path: below(name), digest: *digest, executable: *executable });
        }
        for (name, target) in &directory.links {
            if !stays_inside(depth, target) {
                return Err(TreeError::Link { path: below(name), target: target.clone() });
            }
            paths.links.push((below(name), target.clone()));
        }
        paths.directories.push(path.clone());
        for (name, child) in &directory.directories {
            self.expand_below(below(name), depth + 1, *child, paths)?;
        }
        Ok(())
    }
}

/// `name` below `path`, which is empty for the root.
pub(super) fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") }
}

#[cfg(test)]
mod tests;
