//! Numbers that look random and are the same for the same seed, everywhere.

/// A xorshift generator.
#[derive(Debug, Clone)]
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64) -> Chance {
        let mut chance = Chance(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        for _ in 0..8 {
            chance.next();
        }
        chance
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11
    }

    /// A number from 0 to `limit`, which it never reaches.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// A number from `low` to `high`, which it never reaches.
    pub(super) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }

    /// True `times` times in a thousand.
    pub(super) fn per_mille(&mut self, times: u64) -> bool {
        self.below(1000) < times
    }

    /// The time until the next event of a kind that happens once in `mean` on average.
    pub(super) fn wait(&mut self, mean: u64) -> u64 {
        let unit = (self.below(1 << 30) + 1) as f64 / (1u64 << 30) as f64;
        (-unit.ln() * mean as f64) as u64 + 1
    }
}
