//! Chance that can be repeated: every random instant of a test comes from a seed that is printed.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

/// A source of random numbers.
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    /// The same numbers for the same seed.
    pub fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    /// A seed that was never used before.
    pub fn seed() -> u64 {
        RandomState::new().build_hasher().finish() & 0xffff_ffff
    }

    /// The next number (splitmix64).
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end.max(1)
    }

    /// A time between the two, in milliseconds.
    pub fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to.saturating_sub(from) + 1))
    }

    /// `true` in so many of a hundred cases.
    pub fn percent(&mut self, of_a_hundred: u64) -> bool {
        self.below(100) < of_a_hundred
    }

    /// One of these.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[usize::try_from(self.below(of.len() as u64)).unwrap_or(0)]
    }
}
