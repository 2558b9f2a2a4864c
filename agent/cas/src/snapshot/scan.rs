//! From directories to a [`Snapshot`]: walk, hash on all processors, encode from the leaves up.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_model::Digest;
use bytes::Bytes;

use super::tree::{Directory, join};
use super::walk::{Folder, LeftOut, Node, Place, Root, Rules, walk};
use crate::{Hasher, parallel};

/// Times a file is read again when it changed while it was read.
const ATTEMPTS: usize = 3;

/// Bytes read at once, at most.
const BUFFER: usize = 256 * 1024;

/// Entries of [`Snapshot::largest`].
const LARGEST: usize = 10;

/// A directory as it was, by digest. The contents stay where they are until [`push`](super::push).
#[derive(Debug)]
pub struct Snapshot {
    /// The digest of the root directory.
    pub root: Digest,
    /// Files in it.
    pub files: u64,
    /// Bytes in these files.
    pub bytes: u64,
    /// Entries left out, by ignore rules or because they cannot be kept. A directory counts once.
    pub skipped: u64,
    /// The largest files and their sizes in bytes, largest first.
    pub largest: Vec<(String, u64)>,
    /// What was left out or doubtful, one sentence each.
    pub warnings: Vec<String>,
    /// Each content once, with one place to read it from.
    pub(super) contents: Vec<(Digest, Place)>,
    /// Each directory message once, children before parents, the root last.
    pub(super) directories: Vec<(Digest, Bytes)>,
}

#[cfg(test)]
impl Snapshot {
    /// The digest of every content.
    pub(crate) fn digests(&self) -> Vec<Digest> {
        self.contents.iter().map(|(digest, _)| *digest).collect()
    }
}

/// Why a directory could not become a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// A directory could not be listed.
    #[error("cannot read the directory {path}")]
    Directory {
        /// The directory.
        path: PathBuf,
        #[source]
        /// What the system said.
        source: io::Error,
    },
    /// A file could not be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        #[source]
        /// What the system said.
        source: io::Error,
    },
    /// A file changed each time it was read.
    #[error("{path} changes while it is read")]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// Directories are nested too deep.
    #[error("{path} is more than {limit} directories deep")]
    TooDeep {
        /// The directory.
        path: PathBuf,
        /// The limit.
        limit: usize,
    },
    /// The ignore rules cannot be used.
    #[error("the ignore file cannot be used")]
    Ignore {
        #[source]
        /// What is wrong with it.
        source: Box<ignore::Error>,
    },
    /// A path is not that of a file with a plain name.
    #[error("{path} is not a file with a UTF-8 name")]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
}

/// A code directory: without what `.amlignore`, or else `.gitignore`, in its root excludes, and without
/// anything named `.git`. Blocks.
pub fn scan(dir: &Path) -> Result<Snapshot, ScanError> {
    let mut left_out = LeftOut::default();
    let folder = walk(&Arc::new(Root::open(dir)?), Rules::Code, &mut left_out)?;
    build(folder, left_out)
}

/// A directory with all it holds: no ignore rules, because somebody else has rules of his own for it. Blocks.
pub fn scan_whole(dir: &Path) -> Result<Snapshot, ScanError> {
    let mut left_out = LeftOut::default();
    let folder = walk(&Arc::new(Root::open(dir)?), Rules::Everything, &mut left_out)?;
    build(folder, left_out)
}

/// One file, under its own name. Blocks.
pub fn scan_file(path: &Path) -> Result<Snapshot, ScanError> {
    let not_a_file = || ScanError::NotAFile { path: path.to_owned() };
    // The file may be reached through a link; the snapshot holds what the link stands for.
    let real = path.canonicalize().map_err(|source| ScanError::Read { path: path.to_owned(), source })?;
    let text = |path: &Path| path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let (name, relative) = (text(path).ok_or_else(not_a_file)?, text(&real).ok_or_else(not_a_file)?);
    let parent = real.parent().ok_or_else(not_a_file)?;
    if !real.is_file() {
        return Err(not_a_file());
    }
    let place = Place { root: Arc::new(Root::open(parent)?), relative };
    build(Folder::from([(name, Node::File(place))]), LeftOut::default())
}

/// Several directories below `base` as one, each below its prefix (`""`, `outputs`, `named-outputs/model`),
/// with all they hold: no ignore rules. A directory that does not exist is empty; one that a link puts outside
/// of `base`, or that is none, is left out with a warning. Where two parts have the same path, directories are
/// joined, and of anything else the first part's stays, with a warning. Blocks.
pub fn scan_all(base: &Path, parts: &[(&str, &Path)]) -> Result<Snapshot, ScanError> {
    let mut left_out = LeftOut::default();
    let mut whole = Folder::new();
    for (prefix, dir) in parts {
        let root = match Root::open_below(base, dir) {
            Ok(root) => Arc::new(root),
            Err(ScanError::Directory { source, .. }) if source.kind() == io::ErrorKind::NotFound => continue,
            Err(ScanError::Directory { path, source }) if leads_elsewhere(&source) => {
                left_out.warn(
                    &path.display().to_string(),
                    "is no directory, or a link to one outside; it is left out",
                );
                continue;
            }
            Err(error) => return Err(error),
        };
        let mut part = walk(&root, Rules::Everything, &mut left_out)?;
        for segment in prefix.split('/').rev().filter(|segment| !segment.is_empty()) {
            part = Folder::from([(segment.to_owned(), Node::Directory(part))]);
        }
        join_folders(&mut whole, part, "", &mut left_out);
    }
    build(whole, left_out)
}

/// It is there, but as nothing that may be walked: a link out of the base, a circle of links, or no directory.
fn leads_elsewhere(error: &io::Error) -> bool {
    let kinds = [io::ErrorKind::CrossesDevices, io::ErrorKind::NotADirectory];
    kinds.contains(&error.kind()) || rustix::io::Errno::from_io_error(error) == Some(rustix::io::Errno::LOOP)
}

fn join_folders(into: &mut Folder, from: Folder, path: &str, left_out: &mut LeftOut) {
    for (name, node) in from {
        let below = join(path, &name);
        match (into.get_mut(&name), node) {
            (None, node) => {
                into.insert(name, node);
            }
            (Some(Node::Directory(into)), Node::Directory(from)) => {
                join_folders(into, from, &below, left_out)
            }
            (Some(_), _) => left_out.warn(&below, "exists twice; the second one is left out"),
        }
    }
}

fn build(folder: Folder, left_out: LeftOut) -> Result<Snapshot, ScanError> {
    let mut places = Vec::new();
    collect(&folder, &mut places);
    let hashed = parallel::map(&places, parallel::cores(), |place| hash(place));
    let hashed: Vec<Hashed> = hashed.into_iter().collect::<Result<_, _>>()?;

    let mut encoder = Encoder { hashed: hashed.iter(), seen: HashSet::new(), directories: Vec::new() };
    let root = encoder.folder(&folder);
    let directories = encoder.directories;
    let mut seen = HashSet::new();
    Ok(Snapshot {
        root,
        files: hashed.len() as u64,
        bytes: hashed.iter().map(|file| file.digest.size).sum(),
        skipped: left_out.count,
        largest: largest(&places, &hashed),
        warnings: left_out.warnings,
        contents: hashed
            .iter()
            .zip(places)
            .filter(|(file, _)| seen.insert(file.digest))
            .map(|(file, place)| (file.digest, place.clone()))
            .collect(),
        directories,
    })
}

/// The files below `folder`, in the order of the walk.
fn collect<'a>(folder: &'a Folder, places: &mut Vec<&'a Place>) {
    for node in folder.values() {
        match node {
            Node::File(place) => places.push(place),
            Node::Directory(folder) => collect(folder, places),
            Node::Link(_) => {}
        }
    }
}

/// What reading a file told.
struct Hashed {
    digest: Digest,
    executable: bool,
}

fn hash(place: &Place) -> Result<Hashed, ScanError> {
    let fail = |source| ScanError::Read { path: place.shown(), source };
    for _ in 0..ATTEMPTS {
        let mut file = place.open().map_err(fail)?;
        let before = file.metadata().map_err(fail)?;
        if !before.is_file() {
            return Err(ScanError::NotAFile { path: place.shown() });
        }
        let digest = hash_content(&mut file, before.len()).map_err(fail)?;
        let after = file.metadata().map_err(fail)?;
        if stamp(&before) == stamp(&after) && digest.size == after.len() {
            return Ok(Hashed { digest, executable: after.mode() & 0o100 != 0 });
        }
    }
    Err(ScanError::Changed { path: place.shown() })
}

fn hash_content(file: &mut File, expected: u64) -> io::Result<Digest> {
    let mut hasher = Hasher::new();
    // Most files are far smaller than the buffer, and making it costs more than reading them.
    let mut buffer = vec![0; usize::try_from(expected).unwrap_or(BUFFER).clamp(1, BUFFER)];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hasher.finish()),
            Ok(length) => hasher.update(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Everything that changes when the content does.
fn stamp(file: &Metadata) -> (u64, i64, i64, i64, i64) {
    (file.len(), file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec())
}

fn largest(places: &[&Place], hashed: &[Hashed]) -> Vec<(String, u64)> {
    let mut sizes: Vec<(u64, &str)> =
        hashed.iter().zip(places).map(|(file, place)| (file.digest.size, place.relative.as_str())).collect();
    let most = sizes.len().min(LARGEST);
    if most < sizes.len() {
        sizes.select_nth_unstable_by_key(most, |(size, _)| Reverse(*size));
    }
    sizes.truncate(most);
    sizes.sort_unstable_by_key(|(size, path)| (Reverse(*size), *path));
    sizes.into_iter().map(|(size, path)| (path.to_owned(), size)).collect()
}

struct Encoder<'a> {
    /// Of the files, in the order of the walk.
    hashed: std::slice::Iter<'a, Hashed>,
    seen: HashSet<Digest>,
    directories: Vec<(Digest, Bytes)>,
}

impl Encoder<'_> {
    fn folder(&mut self, folder: &Folder) -> Digest {
        let mut directory = Directory::default();
        for (name, node) in folder {
            match node {
                Node::File(_) => directory
                    .files
                    .extend(self.hashed.next().map(|file| (name.clone(), file.digest, file.executable))),
                Node::Directory(child) => directory.directories.push((name.clone(), self.folder(child))),
                Node::Link(target) => directory.links.push((name.clone(), target.clone())),
            }
        }
        let (digest, bytes) = directory.encode();
        if self.seen.insert(digest) {
            self.directories.push((digest, bytes));
        }
        digest
    }
}

#[cfg(test)]
mod tests;
