//! Files that survive: small files that are written whole, files that are locks, and what a full disk looks like.
//!
//! What of this is a job's, and may be anything, is opened by [`beneath`](open_beneath) alone.
//!
//! Owns the order of write, flush, rename and flush that a crash cannot break, the ways to ask for a lock without
//! waiting for ever, and the one meaning of "the disk is full". It knows nobody: whoever writes decides what is
//! promised, and has the failpoints.
//!
//! Invariants: at a path is the old file or the new one and never a part of either, whenever the process is killed or
//! the disk fills; what [`write_durable`] has returned is there after a power cut; an attempt that failed leaves
//! nothing beside the file, and one that was killed leaves at most `NAME.new`, which the next one takes over.

mod beneath;

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

pub use beneath::{
    Links, append_plain, open_beneath, open_directory, open_file_beneath, open_plain, read_plain,
};

/// How long [`lock_soon`] waits, and how long before each time it asks again.
const SOON: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_millis(20);

/// Puts a file of these bytes in the place of the one at `path`, for its owner alone to read. It lasts from when this
/// returns.
///
/// After an error the old file is there, or the new one if only its name could not be flushed; whoever must know tries
/// again. One path has one writer at a time.
pub fn write_durable(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, bytes, &mut File::sync_all)
}

/// As [`write_durable`], without waiting for the disk: a power cut may leave the old file, the new one, or an empty
/// one. For what is good for one boot, or can be done without.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, bytes, &mut |_| Ok(()))
}

fn replace(path: &Path, bytes: &[u8], flush: &mut dyn FnMut(&File) -> io::Result<()>) -> io::Result<()> {
    let new = path.with_added_extension("new");
    let mut write = || {
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(bytes)?;
        flush(&file)?;
        fs::rename(&new, path)
    };
    write().inspect_err(|_| {
        let _ = fs::remove_file(&new); // the error of the write says more
    })?;
    flush(&File::open(directory_of(path))?)
}

/// Makes lasting which names are in a directory: files that were made, renamed or removed there.
pub fn flush_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens a lock file, which is made if need be; what it holds stays.
///
/// A lock belongs to the open file: it goes when the last copy of that is closed, at the latest with the process. It
/// binds those alone who ask for it. The file itself is never removed, or two could hold locks of one name.
pub fn open_lock(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Takes the lock for this one alone; `false` when somebody has it or shares it.
pub fn try_lock(file: &File) -> io::Result<bool> {
    taken(file.try_lock())
}

/// Takes the lock together with others; `false` when somebody has it alone.
pub fn try_lock_shared(file: &File) -> io::Result<bool> {
    taken(file.try_lock_shared())
}

/// Takes the lock for this one alone, waiting a moment for one who is about to end; `false` when he does not. Blocks.
///
/// A daemon that was killed the moment it started a child seems to hold its locks until that child has become a program
/// of its own.
pub fn lock_soon(file: &File) -> io::Result<bool> {
    let deadline = Instant::now() + SOON;
    loop {
        match try_lock(file) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(false) if Instant::now() < deadline => std::thread::sleep(AGAIN),
            answer => return answer,
        }
    }
}

fn taken(tried: Result<(), TryLockError>) -> io::Result<bool> {
    match tried {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The disk is full: no blocks or no inodes are left, or the owner's quota has none. Room made by somebody may help.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// A program says that the disk is full, in its output or in an error that is only text by now.
pub fn says_full(text: &str) -> bool {
    // The words of the C library and of Go, and the numbers as programs in Rust say them.
    let signs = ["o space left on device", "isk quota exceeded", "(os error 28)", "(os error 122)"];
    signs.iter().any(|sign| text.contains(sign))
}

/// SQLite says that the disk is full, by its extended result code.
///
/// It knows want of blocks alone by name (`SQLITE_FULL`). A quota is to it a write that failed, and want of room for
/// the shared memory another: both may be something else, which then fails again.
pub fn is_full_for_sqlite(code: i32) -> bool {
    const FULL: i32 = 13;
    const IOERR_WRITE: i32 = 10 | 3 << 8;
    const IOERR_SHMSIZE: i32 = 10 | 19 << 8;
    [FULL, IOERR_WRITE, IOERR_SHMSIZE].contains(&code)
}

#[cfg(any(test, feature = "fakes"))]
mod small;
#[cfg(any(test, feature = "fakes"))]
pub use small::SmallDisk;

#[cfg(test)]
mod tests;
