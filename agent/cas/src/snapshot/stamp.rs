//! What tells two states of a file apart without reading it.

use rustix::fs::Stat;

/// All that the system reports about a file's content without reading it. No program can set the change time, so
/// a later write is detected even where the other time was put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) size: u64,
    /// In nanoseconds since 1970, like the next one.
    pub(super) modified: i64,
    pub(super) changed: i64,
}

impl Stamp {
    pub(super) fn of(stat: &Stat) -> Stamp {
        let nanoseconds = |seconds: i64, rest: u64| {
            seconds.saturating_mul(1_000_000_000).saturating_add(i64::try_from(rest).unwrap_or(i64::MAX))
        };
        Stamp {
            device: stat.st_dev,
            inode: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            modified: nanoseconds(stat.st_mtime, stat.st_mtime_nsec),
            changed: nanoseconds(stat.st_ctime, stat.st_ctime_nsec),
        }
    }

    /// It is the same file, and longer than it was.
    pub(super) fn is_longer(&self, known: &Stamp) -> bool {
        (self.device, self.inode) == (known.device, known.inode) && self.size > known.size
    }
}
