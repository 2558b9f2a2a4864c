//! Walks a tree that may be deeper than there are descriptors, and that others may change meanwhile.
//!
//! The way back up is by the descriptors of the levels near the root, and by `..` from the others: what `..` leads to
//! must be the directory that was left, or the walk ends with an error. So nobody leads a walk out of its tree by moving
//! a part of it. Invariants: at most [`KEPT`] descriptors and three more, no recursion, and memory for each level.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Dir, Mode, OFlags};
use rustix::io::Errno;

/// Levels whose directories stay open: more than usual trees have.
const KEPT: usize = 32;

/// Which directory it is: its device and its number there.
type Identity = (u64, u64);

/// A directory, and the way back to its root.
pub(crate) struct Ladder {
    at: OwnedFd,
    kept: Vec<OwnedFd>,
    above: Vec<Identity>,
}

impl Ladder {
    pub(crate) fn new(root: OwnedFd) -> Ladder {
        Ladder { at: root, kept: Vec::new(), above: Vec::new() }
    }

    pub(crate) fn at(&self) -> &OwnedFd {
        &self.at
    }

    /// Goes to a directory that is in this one.
    pub(crate) fn down(&mut self, below: OwnedFd) -> io::Result<()> {
        self.above.push(identity(&self.at)?);
        let left = std::mem::replace(&mut self.at, below);
        if self.above.len() <= KEPT {
            self.kept.push(left);
        }
        Ok(())
    }

    /// Goes back by one level; `false` at the root. An error if somebody has moved the directory away.
    pub(crate) fn up(&mut self) -> io::Result<bool> {
        let Some(before) = self.above.pop() else { return Ok(false) };
        self.at = match self.kept.len() > self.above.len() {
            true => self.kept.pop().ok_or(Errno::STALE)?,
            false => open(&self.at, c"..")?,
        };
        if identity(&self.at)? == before { Ok(true) } else { Err(Errno::STALE.into()) }
    }
}

fn identity(directory: &OwnedFd) -> io::Result<Identity> {
    let seen = rustix::fs::fstat(directory)?;
    Ok((seen.st_dev, seen.st_ino))
}

/// Opens a directory that is no link.
pub(crate) fn open(directory: &OwnedFd, name: &std::ffi::CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(directory, name, flags, Mode::empty())
}

/// The listing of a directory, and where it goes on.
#[derive(Default)]
struct Listing {
    open: Option<Dir>,
    next: i64,
    again: u32,
}

/// A walk through a tree, which enters what it is told to.
pub(crate) struct Walk {
    ladder: Ladder,
    listings: Vec<Listing>,
}

impl Walk {
    pub(crate) fn of(root: OwnedFd) -> Walk {
        Walk { ladder: Ladder::new(root), listings: vec![Listing::default()] }
    }

    /// The directory whose entries [`Walk::next`] names.
    pub(crate) fn at(&self) -> &OwnedFd {
        self.ladder.at()
    }

    /// The next name in this directory; `None` after the last.
    pub(crate) fn next(&mut self) -> io::Result<Option<CString>> {
        let Some(listing) = self.listings.last_mut() else { return Ok(None) };
        let dir = match &mut listing.open {
            Some(dir) => dir,
            none => {
                let mut dir = Dir::read_from(self.ladder.at())?;
                if listing.next != 0 {
                    dir.seek(listing.next)?;
                }
                none.insert(dir)
            }
        };
        for entry in dir {
            let entry = entry?;
            listing.next = entry.offset();
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                return Ok(Some(entry.file_name().to_owned()));
            }
        }
        Ok(None)
    }

    /// Goes on with the entries of a directory that is in this one.
    pub(crate) fn enter(&mut self, below: OwnedFd) -> io::Result<()> {
        self.ladder.down(below)?;
        if self.listings.len() > KEPT
            && let Some(listing) = self.listings.last_mut()
        {
            listing.open = None;
        }
        self.listings.push(Listing::default());
        Ok(())
    }

    /// Goes on with the directory above; `false` at the root.
    pub(crate) fn up(&mut self) -> io::Result<bool> {
        self.listings.pop();
        self.ladder.up()
    }

    /// Names the entries of this directory from the first on; returns how often it has done that.
    pub(crate) fn again(&mut self) -> u32 {
        let Some(listing) = self.listings.last_mut() else { return 0 };
        *listing = Listing { again: listing.again + 1, ..Listing::default() };
        listing.again
    }
}
