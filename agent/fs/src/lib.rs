//! Durable files: small files that are written whole, lock files, and the signs of a full disk.
//!
//! Files of a job, which may be anything, are opened only through [`beneath`](open_beneath).
//!
//! Owns the crash-safe order of write, flush, rename and flush, the ways to ask for a lock without waiting for ever,
//! and the only definition of "the disk is full". It knows none of its callers: the caller decides what is promised,
//! and has the failpoints.
//!
//! Invariants: a path holds the old file or the new one, never a part of either, whenever the process is killed or
//! the disk fills; after [`write_durable`] returned, the file survives a power cut; a failed attempt leaves nothing
//! beside the file, and a killed one leaves at most `NAME.new`, which the next one takes over.

mod beneath;
mod names;

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, IoSliceMut, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::{ReadWriteFlags, preadv2};

pub use beneath::{
    Links, append_plain, make_anew, names_beneath, open_beneath, open_directory, open_file_beneath,
    open_plain, read_beneath, read_plain, read_whole,
};
pub use names::{name_of_text, text_of_name};

/// Fills `buffer` from `offset` on if all of that is in memory, without waiting for a disk. `false`: it has to be read
/// where that may wait.
pub fn read_cached(file: &File, buffer: &mut [u8], offset: u64) -> bool {
    let wanted = buffer.len();
    let read = preadv2(file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT);
    read.is_ok_and(|read| read == wanted)
}

/// How long [`lock_soon`] waits, and the pause between its tries.
const SOON: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_millis(20);

/// Replaces the file at `path` by one of these bytes, which only its owner can read. It is durable once this returns.
///
/// After an error the old file is there, or the new one if only its name could not be flushed; a caller that must
/// know tries again. Each path has one writer at a time.
pub fn write_durable(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, bytes, OWNER, &mut File::sync_all)
}

/// As [`write_durable`], without waiting for the disk: a power cut may leave the old file, the new one, or an empty
/// one. For data that is valid for one boot, or that can be lost.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, bytes, OWNER, &mut |_| Ok(()))
}

/// As [`write_whole`], and everybody who gets as far as its directory can read it.
pub fn write_for_all(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, bytes, 0o644, &mut |_| Ok(()))
}

/// The mode of a file for its owner alone.
const OWNER: u32 = 0o600;

fn replace(
    path: &Path,
    bytes: &[u8],
    mode: u32,
    flush: &mut dyn FnMut(&File) -> io::Result<()>,
) -> io::Result<()> {
    let new = path.with_added_extension("new");
    let mut write = || {
        let mut file = File::options().write(true).create(true).truncate(true).mode(OWNER).open(&new)?;
        if mode != OWNER {
            file.set_permissions(fs::Permissions::from_mode(mode))?; // whatever the umask
        }
        file.write_all(bytes)?;
        flush(&file)?;
        fs::rename(&new, path)
    };
    write().inspect_err(|_| {
        let _ = fs::remove_file(&new); // the error of the write says more
    })?;
    flush(&File::open(directory_of(path))?)
}

/// Makes the names in a directory durable: files that were created, renamed or removed there.
pub fn flush_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens a lock file and creates it if needed; its content is kept.
///
/// A lock belongs to the open file: it is released when the last copy of that is closed, at the latest with the
/// process. It is advisory. The file itself is never removed, or two processes could hold locks of one name.
pub fn open_lock(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Takes the lock exclusively; `false` when another holder has it or shares it.
pub fn try_lock(file: &File) -> io::Result<bool> {
    taken(file.try_lock())
}

/// Takes the lock shared; `false` when another holder has it exclusively.
pub fn try_lock_shared(file: &File) -> io::Result<bool> {
    taken(file.try_lock_shared())
}

/// Takes the lock exclusively, waiting a moment for a holder that is about to end; `false` when it does not. Blocks.
///
/// When a daemon is killed the moment it starts a child, its locks seem held until that child has called `exec`.
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

/// The disk is full: no blocks or inodes are left, or the owner's quota has none. Freeing space may help.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// The disk fails, or may only be read since it failed. It may be mended, but not by freeing space.
pub fn is_failing(error: &io::Error) -> bool {
    error.kind() == ErrorKind::ReadOnlyFilesystem
        || error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
}

/// Whether a program's output, or an error of which only the text is left, means that the disk is full.
pub fn says_full(text: &str) -> bool {
    // The messages of the C library and of Go, and the numbers in messages of Rust programs.
    let signs = ["o space left on device", "isk quota exceeded", "(os error 28)", "(os error 122)"];
    signs.iter().any(|sign| text.contains(sign))
}

/// Whether SQLite means that the disk of `database` is full, by its extended result code.
///
/// It has a code of its own only for missing blocks (`SQLITE_FULL`). For a quota it reports a failed write, and for
/// no room for the shared memory another code. Both have other causes, too: a disk that fails or that may only be
/// read. So then a small file is written beside the database, for the system to say which.
pub fn is_full_for_sqlite(code: i32, database: &Path) -> bool {
    const FULL: i32 = 13;
    const IOERR_WRITE: i32 = 10 | 3 << 8;
    const IOERR_SHMSIZE: i32 = 10 | 19 << 8;
    match code {
        FULL => true,
        IOERR_WRITE | IOERR_SHMSIZE => lacks_room(database).is_err_and(|error| is_full(&error)),
        _ => false,
    }
}

/// Writes and removes a small file beside `path`.
fn lacks_room(path: &Path) -> io::Result<()> {
    const SMALL: usize = 64 * 1024; // more than one page of any database
    let probe = path.with_added_extension("room");
    let written = File::options().write(true).create(true).truncate(true).mode(OWNER).open(&probe).and_then(
        |mut file| {
            file.write_all(&[0; SMALL])?;
            file.sync_data()
        },
    );
    let _ = fs::remove_file(&probe); // one that stays is written over by the next
    written
}

#[cfg(any(test, feature = "fakes"))]
mod small;
#[cfg(any(test, feature = "fakes"))]
pub use small::SmallDisk;

#[cfg(test)]
mod tests;
