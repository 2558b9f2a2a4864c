//! Keeps disk for what must always work: logs, records of outcomes, the journal.
//!
//! Two rules. No work that fills the disk begins below the low-water mark ([`admit`]). And a file of
//! ballast, [`super::ballast`], holds room that is given up piece by piece when the disk is full all the
//! same, because jobs filled it: enough for terminal states, exit records, outcomes and the ends of logs.
//!
//! Pure; `worker::runner` and `worker::upkeep` measure and ask.

/// There is too little room to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{} are free and {} must stay free", bytes(*.free), bytes(*.reserve))]
pub(crate) struct Shortfall {
    /// Bytes free.
    pub(crate) free: u64,
    /// Bytes that must stay free.
    pub(crate) reserve: u64,
}

/// Whether work that fills the disk may begin.
pub(crate) fn admit(free: u64, reserve: u64) -> Result<(), Shortfall> {
    if free < reserve { Err(Shortfall { free, reserve }) } else { Ok(()) }
}

/// The most ballast there is.
const BALLAST: u64 = 16 << 20;
/// In how many pieces it is given up.
const PIECES: u64 = 4;

/// How much ballast a disk of this size should hold.
pub(crate) fn ballast_wanted(disk: u64) -> u64 {
    BALLAST.min(disk / 16)
}

/// How much ballast should be left once a piece of it is given up.
pub(crate) fn lighter(held: u64, wanted: u64) -> u64 {
    held.saturating_sub(wanted.div_ceil(PIECES))
}

/// How much ballast there should be, given what is held, what is wanted, and the bytes that are free beside
/// it. It is taken again only when there is room for it twice over, so that it does not come and go.
pub(crate) fn ballast(held: u64, wanted: u64, free: u64) -> u64 {
    let full = wanted / PIECES / 2;
    if free < full {
        lighter(held, wanted)
    } else if held < wanted && free >= (wanted - held).saturating_add(wanted) {
        wanted
    } else {
        held
    }
}

/// A size as people read it.
pub(crate) fn bytes(size: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let unit = (size.max(1).ilog2() / 10).min(4) as usize;
    match unit {
        0 => format!("{size} bytes"),
        // A double holds every size a disk has to far more digits than are shown.
        #[allow(clippy::cast_precision_loss, reason = "shown with one digit")]
        _ => format!("{:.1} {}", size as f64 / (1_u64 << (10 * unit)) as f64, UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_reserve_is_kept() {
        assert_eq!(admit(10, 10), Ok(()));
        let refused = admit(3 << 20, 1 << 30).unwrap_err();
        assert_eq!(refused.to_string(), "3.0 MiB are free and 1.0 GiB must stay free");
    }

    #[test]
    fn test_ballast_goes_piece_by_piece_and_comes_back_whole() {
        const MIB: u64 = 1 << 20;
        let wanted = ballast_wanted(1 << 40);
        assert_eq!((wanted, ballast_wanted(64 * MIB)), (16 * MIB, 4 * MIB));
        let mut held = wanted;
        for left in [12, 8, 4, 0, 0] {
            held = ballast(held, wanted, MIB);
            assert_eq!(held, left * MIB);
        }
        assert_eq!(ballast(4 * MIB, wanted, 2 * MIB), 4 * MIB, "a little room is enough to write records");
        assert_eq!(ballast(4 * MIB, wanted, 27 * MIB), 4 * MIB, "not while that would fill the disk again");
        assert_eq!(ballast(4 * MIB, wanted, 28 * MIB), wanted);
        assert_eq!(ballast(wanted, wanted, u64::MAX), wanted);
        assert_eq!(ballast(0, 0, 0), 0);
    }

    #[test]
    fn test_sizes_are_readable_at_every_magnitude() {
        for (size, text) in
            [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (u64::MAX, "16777216.0 TiB")]
        {
            assert_eq!(bytes(size), text);
        }
    }
}
