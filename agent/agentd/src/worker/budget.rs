//! Keeps disk for what must always work: logs, records of outcomes, the journal.
//!
//! Pure; `worker::runner` measures and asks before it fetches and before it builds.

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
    fn test_sizes_are_readable_at_every_magnitude() {
        for (size, text) in
            [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (u64::MAX, "16777216.0 TiB")]
        {
            assert_eq!(bytes(size), text);
        }
    }
}
