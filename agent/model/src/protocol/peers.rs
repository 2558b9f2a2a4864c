//! What nodes tell of each other as sources of blobs.

/// What a node did instead of sending another one a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PeerFailure {
    /// It does not have the blob.
    Lacks,
    /// It serves as many others as it may.
    Busy,
    /// It waits for the blob itself.
    Waits,
    /// It cannot be reached, or its connection ended.
    Away,
    /// It sent nothing for seconds.
    Stalls,
    /// It sent something else.
    Lies,
}

impl PeerFailure {
    const ALL: [PeerFailure; 6] = [
        PeerFailure::Lacks,
        PeerFailure::Busy,
        PeerFailure::Waits,
        PeerFailure::Away,
        PeerFailure::Stalls,
        PeerFailure::Lies,
    ];

    /// For the wire, and for people: `gpu-1 NAME`.
    pub fn name(self) -> &'static str {
        match self {
            PeerFailure::Lacks => "lacks the blob",
            PeerFailure::Busy => "is busy",
            PeerFailure::Waits => "waits itself",
            PeerFailure::Away => "cannot be reached",
            PeerFailure::Stalls => "stalled",
            PeerFailure::Lies => "sent wrong bytes",
        }
    }

    /// The failure of this name; of a name that another release uses, [`PeerFailure::Away`].
    pub fn parse(name: &str) -> PeerFailure {
        PeerFailure::ALL.into_iter().find(|failure| failure.name() == name).unwrap_or(PeerFailure::Away)
    }

    /// Something is wrong with the node, or with the network to it, that its operator should know.
    pub fn is_fault(self) -> bool {
        matches!(self, PeerFailure::Away | PeerFailure::Stalls | PeerFailure::Lies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_failures_go_over_the_wire() {
        for failure in PeerFailure::ALL {
            assert_eq!(PeerFailure::parse(failure.name()), failure);
        }
        assert_eq!(PeerFailure::parse("sings"), PeerFailure::Away);
    }
}
