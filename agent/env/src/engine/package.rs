//! What a package says of itself: its description, and the list of its files.
//!
//! Owns the reading of `info/`, in its two formats. Hides them.
//!
//! Invariants: nothing is read through a link; a listed path is a [`PlainPath`] that the engine has no use of its own
//! for, so that whoever links it can rely on that.

use std::io;
use std::path::{Path, PathBuf};

use rattler_conda_types::package::{
    EntryPoint, Files, HasPrefix, IndexJson, LinkJson, NoArchLinks, NoLink, NoSoftlink, PackageFile,
    PathType, PathsEntry, PathsJson,
};

use super::tree::{EntryKind, OpenTree, PlainPath};

/// The largest file of a description, in bytes.
const LARGEST: u64 = 256 << 20;

/// Temporary directory of an environment that is being built; it also marks one as unfinished.
pub(crate) const WORKSHOP: &str = ".agent-env";

/// The directory of an environment with the records of its packages.
pub(crate) const RECORDS: &str = "conda-meta";

/// A package, as it describes itself.
#[derive(Debug)]
pub(crate) struct PackageInfo {
    /// Its name and so on.
    pub(crate) index: IndexJson,
    /// Its files.
    pub(crate) listed: Vec<ListedFile>,
    /// The programs that are made for it.
    pub(crate) entry_points: Vec<EntryPoint>,
}

/// A file of a package.
#[derive(Debug, Clone)]
pub(crate) struct ListedFile {
    /// Where.
    pub(crate) way: PlainPath,
    /// What is said of it.
    pub(crate) entry: PathsEntry,
}

/// Why a description is not usable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Undescribed {
    #[error("it lists `{0}`, which lies outside of the environment")]
    Path(PathBuf),
    #[error("it asks for programs in a way that cannot be followed: {0}")]
    EntryPoints(io::Error),
    #[error(transparent)]
    Unreadable(#[from] io::Error),
}

impl PackageInfo {
    /// Reads the description of an unpacked package.
    pub(crate) fn read(tree: &OpenTree) -> Result<PackageInfo, Undescribed> {
        let listed = paths(tree)?.paths.into_iter().map(ListedFile::of).collect::<Result<_, _>>()?;
        let links = optional::<LinkJson>(tree).map_err(Undescribed::EntryPoints)?;
        let index: IndexJson = required(tree)?;
        let entry_points = match links.map(|links| links.noarch) {
            Some(NoArchLinks::Python(python)) if index.noarch.is_python() => python.entry_points,
            _ => Vec::new(),
        };
        Ok(PackageInfo { index, listed, entry_points })
    }
}

impl ListedFile {
    fn of(entry: PathsEntry) -> Result<ListedFile, Undescribed> {
        match PlainPath::of(&entry.relative_path).filter(is_free) {
            Some(way) => Ok(ListedFile { way, entry }),
            None => Err(Undescribed::Path(entry.relative_path)),
        }
    }

    /// Whether it is what the list says, with its size, at a way without links; and a link, if it is one, leads out of
    /// nothing.
    pub(crate) fn is_sound(&self, tree: &OpenTree) -> io::Result<bool> {
        Ok(match (self.entry.path_type, tree.kind(&self.way)?) {
            (PathType::HardLink, EntryKind::File(len)) => {
                self.entry.size_in_bytes.is_none_or(|size| size == len)
            }
            (PathType::SoftLink, EntryKind::Link) => {
                self.entry.prefix_placeholder.is_none() && !tree.leads_out(&self.way)?
            }
            (PathType::Directory, EntryKind::Directory) => true,
            _ => false,
        })
    }
}

/// Whether packages may have something there.
pub(crate) fn is_free(way: &PlainPath) -> bool {
    !way.is_in(RECORDS) && !way.is_in(WORKSHOP)
}

fn required<T: PackageFile>(tree: &OpenTree) -> io::Result<T> {
    T::from_slice(&tree.read(T::package_path(), LARGEST)?)
}

fn optional<T: PackageFile>(tree: &OpenTree) -> io::Result<Option<T>> {
    match required(tree) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

/// The list of files; older packages have several.
fn paths(tree: &OpenTree) -> io::Result<PathsJson> {
    if let Some(paths) = optional::<PathsJson>(tree)? {
        return Ok(paths);
    }
    let (prefixes, unlinked, hard) =
        (optional::<HasPrefix>(tree)?, optional::<NoLink>(tree)?, optional::<NoSoftlink>(tree)?);
    PathsJson::from_deprecated(required::<Files>(tree)?, prefixes, unlinked, hard, |path: &Path| {
        let Some(way) = PlainPath::of(path) else { return Ok(PathType::HardLink) }; // refused by its path
        Ok(match tree.kind(&way)? {
            EntryKind::Link => PathType::SoftLink,
            EntryKind::Directory => PathType::Directory,
            EntryKind::File(_) | EntryKind::Other => PathType::HardLink,
        })
    })
}
