//! The directory that a tree is written into.
//!
//! Every path is resolved below its open root and through no link; every entry is created exclusively. So neither a
//! hostile tree nor somebody who changes the directory meanwhile can redirect a write. Entries have their owner and
//! mode before anybody else can know of them, because the directory does not have its final name yet.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use agent_fs::name_of_text;
use agent_model::{Digest, failpoint};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use super::open_text_beneath;
use super::tree::{Extent, Tree, TreeError};
use crate::counter::ByteCounter;
use crate::store::{CHUNK, ReadError, remove_tree};
use crate::{Hasher, holes};

/// Why a tree could not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum MaterializeError {
    #[error("the snapshot cannot be used")]
    Tree(#[source] TreeError),
    #[error("there is no {path} in it")]
    NoSuchPart { path: String },
    #[error("{path} exists and is not an empty directory")]
    Exists { path: PathBuf },
    #[error("{path} does not name a directory to be made")]
    Destination { path: PathBuf },
    #[error("cannot read the content of {path}")]
    Read {
        /// The file, relative to the destination.
        path: String,
        source: ReadError,
    },
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
}

/// The owner of files, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// For whom files and directories are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Manner {
    /// A job: all of one mode, and its user's where it has one.
    Job(Option<Owner>),
    /// A person: executable files stay so, and the process's file mode mask applies.
    Person,
}

/// A place for a content.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) path: String,
    pub(super) executable: bool,
}

/// A directory that is being written.
#[derive(Debug)]
pub(super) struct Ground {
    path: PathBuf,
    root: OwnedFd,
    manner: Manner,
    counter: Arc<ByteCounter>,
}

impl Ground {
    /// An empty directory at `path` with all directories of `tree` in it, if there is room for the tree.
    pub(super) fn prepare(
        path: PathBuf,
        manner: Manner,
        tree: &Tree,
        counter: Arc<ByteCounter>,
    ) -> Result<Ground, MaterializeError> {
        let fail = |source| MaterializeError::Write { path: path.clone(), source };
        remove_tree(&path).and_then(|()| std::fs::create_dir(&path)).map_err(fail)?;
        let ground = Ground::open(path, manner, counter)?;
        ground.expect(tree.extent())?;
        tree.branches().try_for_each(|branch| ground.directory(&branch.path))?;
        Ok(ground)
    }

    /// The directory at `path`, with what is in it.
    pub(super) fn open(
        path: PathBuf,
        manner: Manner,
        counter: Arc<ByteCounter>,
    ) -> Result<Ground, MaterializeError> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(root) => Ok(Ground { path, root, manner, counter }),
            Err(source) => Err(MaterializeError::Write { path, source: source.into() }),
        }
    }

    /// Begins to count what is written. An error unless the file system has room for all of it, or cannot report its
    /// room.
    pub(super) fn expect(&self, extent: Extent) -> Result<(), MaterializeError> {
        self.counter.begin(extent.bytes);
        let Ok(disk) = rustix::fs::fstatvfs(&self.root) else { return Ok(()) };
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        let inodes = extent.directories + extent.files + extent.links;
        // File systems that make inodes on demand report that there are none.
        let has_inodes = disk.f_files == 0 || inodes <= disk.f_favail;
        match has_inodes && (extent.bytes <= free || self.can_clone()) {
            true => Ok(()),
            false => Err(self.fail("", io::ErrorKind::StorageFull.into())),
        }
    }

    /// Whether files can share blocks here, so that the sum of their sizes is not the room they need.
    fn can_clone(&self) -> bool {
        let unnamed = || self.open_beneath("", OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR | Mode::WUSR);
        let cloned = || Ok::<_, io::Error>(rustix::fs::ioctl_ficlone(unnamed()?, unnamed()?)?);
        cloned().is_ok()
    }

    pub(super) fn fail(&self, path: &str, source: io::Error) -> MaterializeError {
        MaterializeError::Write { path: self.path.join(&*name_of_text(path)), source }
    }

    fn open_beneath(&self, path: &str, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        Ok(open_text_beneath(&self.root, path, flags, mode)?)
    }

    /// The open parent of `path`, and the name of its last segment.
    fn parent<'a>(&self, path: &'a str) -> io::Result<(OwnedFd, Cow<'a, OsStr>)> {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        let parent = self.open_beneath(parent, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?;
        Ok((parent, name_of_text(name)))
    }

    /// Makes a directory; the root exists already.
    pub(super) fn directory(&self, path: &str) -> Result<(), MaterializeError> {
        let mode = Mode::from_raw_mode(0o775);
        let make = || {
            if !path.is_empty() {
                let (parent, name) = self.parent(path)?;
                rustix::fs::mkdirat(parent, &*name, mode)?;
            }
            match self.manner {
                Manner::Job(owner) => {
                    settle(self.open_beneath(path, OFlags::DIRECTORY, Mode::empty())?, owner)
                }
                Manner::Person => Ok(()),
            }
        };
        make().map_err(|source| self.fail(path, source))
    }

    /// Makes an empty file.
    pub(super) fn create(&self, target: &Target) -> Result<File, MaterializeError> {
        let executable = target.executable || self.manner != Manner::Person;
        let mode = Mode::from_raw_mode(if executable { 0o777 } else { 0o666 });
        let create = || {
            let file =
                self.open_beneath(&target.path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, mode)?;
            if let Manner::Job(owner) = self.manner {
                settle(&file, owner)?;
            }
            Ok(file.into())
        };
        create().map_err(|source| self.fail(&target.path, source))
    }

    /// Makes a link.
    pub(super) fn link(&self, path: &str, to: &str) -> Result<(), MaterializeError> {
        let link = || {
            let (parent, name) = self.parent(path)?;
            rustix::fs::symlinkat(&*name_of_text(to), &parent, &*name)?;
            if let Manner::Job(Some(Owner { uid, gid })) = self.manner {
                let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
                rustix::fs::chownat(parent, &*name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Ok(())
        };
        link().map_err(|source| self.fail(path, source))
    }

    /// Removes a file or link, if it is there.
    pub(super) fn unlink(&self, path: &str) -> Result<(), MaterializeError> {
        self.remove(path, AtFlags::empty())
    }

    /// Removes an empty directory.
    pub(super) fn remove_directory(&self, path: &str) -> Result<(), MaterializeError> {
        self.remove(path, AtFlags::REMOVEDIR)
    }

    fn remove(&self, path: &str, flags: AtFlags) -> Result<(), MaterializeError> {
        let remove = || {
            let (parent, name) = self.parent(path)?;
            match rustix::fs::unlinkat(parent, &*name, flags) {
                Err(error) if error != Errno::NOENT => Err(error.into()),
                _ => Ok(()),
            }
        };
        remove().map_err(|source| self.fail(path, source))
    }

    /// Writes a file with the content of `source`, which is checked, as its own copy.
    pub(super) fn copy(&self, digest: Digest, source: File, target: &Target) -> Result<(), MaterializeError> {
        let file = self.create(target)?;
        let unread = |source| MaterializeError::Read { path: target.path.clone(), source };
        let is_clone = rustix::fs::ioctl_ficlone(&file, &source).is_ok();
        let (mut source, mut file) = (holes::Reader::new(source), holes::Writer::new(file));
        let mut hasher = Hasher::new();
        let mut chunk = vec![0; CHUNK];
        loop {
            let length = match source.read(&mut chunk) {
                Ok(0) => break,
                Ok(length) => length,
                Err(source) => return Err(self.fail(&target.path, source)),
            };
            hasher.update(&chunk[..length]);
            match is_clone {
                true => self.counter.add(length),
                false => self
                    .write(&mut file, &chunk[..length])
                    .map_err(|source| self.fail(&target.path, source))?,
            }
        }
        if !is_clone {
            file.finish().map_err(|source| self.fail(&target.path, source))?;
        }
        match hasher.finish() {
            actual if actual == digest => Ok(()),
            actual => Err(unread(ReadError::Corrupt { digest, actual })),
        }
    }

    /// Appends to a file of this directory.
    pub(super) fn write(&self, file: &mut holes::Writer, bytes: &[u8]) -> io::Result<()> {
        failpoint::hit("cas.tree.write")?;
        file.append(bytes)?;
        self.counter.add(bytes.len());
        Ok(())
    }
}

/// Sets the owner, and the mode that all files of a job have.
fn settle(file: impl AsFd, owner: Option<Owner>) -> io::Result<()> {
    if let Some(Owner { uid, gid }) = owner {
        rustix::fs::fchown(&file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
    }
    Ok(rustix::fs::fchmod(file, Mode::from_raw_mode(0o775))?)
}
