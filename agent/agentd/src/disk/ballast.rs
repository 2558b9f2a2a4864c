//! Disk space that is reserved so that it can be released when the disk is full.
//!
//! Owns the file `ballast` of the state directory. Invariants: it is never larger than [`wanted`]; released space is
//! free when the call returns; failing to reserve it is no error, only less safety.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use agent_model::{failpoint, size};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate};
use tracing::{debug, info, warn};

/// The largest size of the ballast, in bytes.
const MOST: u64 = 16 << 20;
/// In how many pieces it is released.
const PIECES: u64 = 4;

/// The ballast of a state directory.
#[derive(Debug)]
pub(crate) struct Ballast {
    file: Option<Mutex<File>>,
    wanted: u64,
}

impl Ballast {
    /// Of a state directory on a disk of this size, as large as an earlier process left it.
    pub(crate) fn open(state_dir: &Path, disk: u64) -> Ballast {
        let path = state_dir.join("ballast");
        let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let file = file.inspect_err(
            |error| warn!(%error, path = %path.display(), "no room can be held for a full disk"),
        );
        Ballast { file: file.ok().map(Mutex::new), wanted: wanted(disk) }
    }

    /// Releases a piece because there was no room for a record; `false` when there is none left.
    pub(crate) fn give_way(&self) -> bool {
        self.resize(|held| lighter(held, self.wanted)) == Some(true)
    }

    /// Releases a piece or reserves all of it again, depending on the `free` bytes of the disk.
    pub(crate) fn balance(&self, free: u64) {
        self.resize(|held| balanced(held, self.wanted, free));
    }

    /// `Some(true)` if it was made smaller, otherwise `None`.
    fn resize(&self, choose: impl FnOnce(u64) -> u64) -> Option<bool> {
        let mut file = self.file.as_ref()?.lock();
        let held = file.metadata().ok()?.len();
        let chosen = choose(held);
        let resized = match chosen {
            less if less < held => file.set_len(less),
            more if more > held => fill(&mut file, more).inspect_err(|_| drop(file.set_len(held))),
            _ => return None,
        };
        match &resized {
            Ok(()) if chosen < held => {
                warn!(left = size::binary(chosen), "releasing ballast: the disk is full");
            }
            Ok(()) => info!(held = size::binary(chosen), "room is held for records on a full disk"),
            Err(error) => debug!(%error, "no room can be held for a full disk"),
        }
        (resized.is_ok() && chosen < held).then_some(true)
    }
}

/// How much ballast a disk of this size should hold.
fn wanted(disk: u64) -> u64 {
    MOST.min(disk / 16)
}

/// How much ballast should be left after one piece of it is released.
fn lighter(held: u64, wanted: u64) -> u64 {
    held.saturating_sub(wanted.div_ceil(PIECES))
}

/// How much ballast there should be, given the bytes that are held, wanted, and free beside it. It is reserved again
/// only when there would be as much room left again, so that it does not oscillate.
fn balanced(held: u64, wanted: u64, free: u64) -> u64 {
    let full = wanted / PIECES / 2;
    if free < full {
        lighter(held, wanted)
    } else if held < wanted && free >= (wanted - held).saturating_add(wanted) {
        wanted
    } else {
        held
    }
}

/// Makes a file take up this much of the disk.
fn fill(file: &mut File, length: u64) -> io::Result<()> {
    failpoint::hit("node.ballast.fill")?;
    match fallocate(&*file, FallocateFlags::empty(), 0, length) {
        Err(rustix::io::Errno::OPNOTSUPP) => {}
        allocated => return Ok(allocated?),
    }
    let mut at = file.seek(SeekFrom::End(0))?;
    let zeros = [0; 64 << 10];
    while at < length {
        at +=
            file.write(&zeros[..zeros.len().min(usize::try_from(length - at).unwrap_or(usize::MAX))])? as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_room_is_given_up_until_none_is_left_and_taken_again() {
        let dir = tempfile::tempdir().unwrap();
        let blocks = || {
            use std::os::unix::fs::MetadataExt;
            dir.path().join("ballast").metadata().unwrap().blocks() * 512
        };
        let ballast = Ballast::open(dir.path(), 64 << 20);
        assert!(!ballast.give_way(), "there is none yet");
        ballast.balance(1 << 30);
        assert_eq!(blocks(), 4 << 20);
        for left in [3, 2, 1, 0] {
            assert!(ballast.give_way());
            assert_eq!(blocks(), left << 20);
        }
        assert!(!ballast.give_way());
        ballast.balance(1 << 20);
        assert_eq!(blocks(), 0, "not as long as there is no room");
        Ballast::open(dir.path(), 64 << 20).balance(1 << 30);
        assert_eq!(blocks(), 4 << 20);
    }

    #[test]
    fn test_ballast_goes_piece_by_piece_and_comes_back_whole() {
        const MIB: u64 = 1 << 20;
        let most = wanted(1 << 40);
        assert_eq!((most, wanted(64 * MIB)), (16 * MIB, 4 * MIB));
        let mut held = most;
        for left in [12, 8, 4, 0, 0] {
            held = balanced(held, most, MIB);
            assert_eq!(held, left * MIB);
        }
        assert_eq!(balanced(4 * MIB, most, 2 * MIB), 4 * MIB, "a little room is enough to write records");
        assert_eq!(balanced(4 * MIB, most, 27 * MIB), 4 * MIB, "not while that would fill the disk again");
        assert_eq!(balanced(4 * MIB, most, 28 * MIB), most);
        assert_eq!(balanced(most, most, u64::MAX), most);
        assert_eq!(balanced(0, 0, 0), 0);
    }
}
