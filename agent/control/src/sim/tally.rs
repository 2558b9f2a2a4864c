//! What a simulation amounts to.

/// What was simulated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) events: u64,
    pub(super) messages: u64,
    pub(super) faults: u64,
    pub(super) attempts: u64,
    pub(super) lost: u64,
    pub(super) millis: u64,
    /// A digest of everything that happened.
    pub(super) trace: u64,
}

impl Tally {
    pub(super) fn add(&mut self, other: Tally) {
        self.events += other.events;
        self.messages += other.messages;
        self.faults += other.faults;
        self.attempts += other.attempts;
        self.lost += other.lost;
        self.millis += other.millis;
        self.trace ^= other.trace;
    }
}
