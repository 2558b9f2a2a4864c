//! How full a disk may get. Pure: those who write to a disk and those who free space on it use the same watermarks.

use crate::size;
use crate::words::count;

/// The marks of a disk, in bytes that are free. All of them follow from the one that is configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watermarks {
    reserve: u64,
}

/// How full a disk is, by its marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pressure {
    /// Data that only saves time later may be made.
    Ample,
    /// Work may begin.
    Enough,
    /// Work may begin, and data that nobody needs is removed.
    Tight,
    /// No work begins that fills the disk, and data that can be made again is removed as well.
    Low,
}

impl Watermarks {
    /// Of a disk on which so many bytes must stay free.
    #[must_use]
    pub const fn new(reserve: u64) -> Watermarks {
        Watermarks { reserve }
    }

    /// Bytes that must stay free.
    #[must_use]
    pub fn reserve(self) -> u64 {
        self.reserve
    }

    /// As soon as fewer bytes are free, room is made.
    #[must_use]
    pub fn tight(self) -> u64 {
        self.reserve.saturating_add(self.reserve / 2)
    }

    /// Room is made until so many bytes are free, so that the next job does not find the disk low again.
    #[must_use]
    pub fn ample(self) -> u64 {
        self.reserve.saturating_mul(2)
    }

    /// The pressure when so many bytes are free.
    #[must_use]
    pub fn pressure(self, free: u64) -> Pressure {
        match free {
            free if free < self.reserve => Pressure::Low,
            free if free < self.tight() => Pressure::Tight,
            free if free < self.ample() => Pressure::Enough,
            _ => Pressure::Ample,
        }
    }

    /// Whether work that fills the disk may begin, given the bytes that are free, and how many files can still be
    /// made if those are too few.
    pub fn admit(self, free: u64, few_files: Option<u64>) -> Result<(), Shortfall> {
        match few_files {
            _ if free < self.reserve => Err(Shortfall::Bytes { free, reserve: self.reserve }),
            Some(left) => Err(Shortfall::Files { left }),
            None => Ok(()),
        }
    }
}

/// There is too little room to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Shortfall {
    #[error("{} are free and {} must stay free", size::binary(*.free), size::binary(*.reserve))]
    Bytes {
        /// Bytes free.
        free: u64,
        /// Bytes that must stay free.
        reserve: u64,
    },
    #[error("only {} can still be made (`df -i`), too few for a job", count(*.left, "file"))]
    Files {
        /// Files that can still be made.
        left: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_marks_follow_from_the_reserve() {
        let marks = Watermarks::new(100);
        let pressures = [99, 100, 149, 150, 199, 200].map(|free| marks.pressure(free));
        use Pressure::{Ample, Enough, Low, Tight};
        assert_eq!(pressures, [Low, Tight, Tight, Enough, Enough, Ample]);
        assert_eq!(Watermarks::new(0).pressure(0), Ample, "who keeps no reserve never makes room");
        assert_eq!(Watermarks::new(u64::MAX).pressure(u64::MAX - 1), Low);
    }

    #[test]
    fn test_reserve_is_kept() {
        let admit = |free, few_files| Watermarks::new(1 << 30).admit(free, few_files);
        assert_eq!(admit(1 << 30, None), Ok(()));
        assert_eq!(admit(1 << 30, Some(7)), Err(Shortfall::Files { left: 7 }));
        let refused = admit(3 << 20, None).unwrap_err();
        assert_eq!(refused.to_string(), "3 MiB are free and 1 GiB must stay free");
    }
}
