//! A directory as a digest, and back.
//!
//! Owns what a snapshot is: a tree of canonical REAPI `Directory` messages whose leaves are files by digest,
//! an executable bit, and relative symbolic links that stay inside. Hides ignore rules, hashing, the order of
//! uploads, the strict decoder and the writing of trees.
//!
//! [`scan`], [`scan_file`] and [`scan_outputs`] read a directory into a [`Snapshot`]; a [`Choice`] selects the files
//! that count, or only surveys them; a [`StatCache`] avoids reading unchanged files; [`push`] sends the blobs that a
//! store lacks; [`list`], [`materialize`] and [`download`] begin with a root digest and trust nothing that the store
//! returns. A [`PrestagedTree`] is a tree that was laid out before it was wanted; [`materialize`] turns one into a
//! job's tree where it can.

mod difference;
mod ground;
mod ignore;
mod left_out;
mod links;
mod materialize;
mod outputs;
mod prestaged;
mod push;
mod scan;
mod stamp;
mod statcache;
mod tree;
mod usual;
mod walk;

use std::os::fd::{AsFd, OwnedFd};

use agent_fs::Links;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

pub use ground::{MaterializeError, Owner};
pub use left_out::{Ruled, ScanError, Unread};
pub use materialize::{Laid, download, download_parts};
pub use outputs::{Elsewhere, scan_outputs};
pub use prestaged::{PrestageError, PrestagedTree, materialize, materialize_counted};
pub use push::{PushError, PushProgress, Pushed, push, push_lightly};
pub use scan::{Choice, Snapshot, Survey, scan, scan_file, scan_whole};
pub use statcache::StatCache;
pub use tree::{Entry, TreeError, file_alone, folder, list, part};
pub(crate) use tree::{MAX_MESSAGE, Named, named};

/// Directories on the longest path of a tree, the root included.
pub const MAX_DEPTH: usize = 200;

/// Directories in a tree, counted once for each place they appear at.
pub const MAX_DIRECTORIES: u64 = 1_000_000;

/// Files and links in a tree, counted once for each place they appear at.
pub const MAX_FILES: u64 = 4_000_000;

/// Bytes of the longest path in a tree, and of the longest target of a link: what Linux takes.
pub const MAX_PATH: usize = 4095;

/// Opens an entry below an open directory, following no link, by the text of its path ([`agent_fs::name_of_text`]).
fn open_text_beneath(root: impl AsFd, path: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    agent_fs::open_beneath(root, &*agent_fs::name_of_text(path), flags, mode, Links::Never)
}
