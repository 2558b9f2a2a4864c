//! How the values of a trial are drawn.
//!
//! Owns the ways that need no observations: at random, by Sobol's sequence, and a grid. Each is a function of the
//! seed and the index of the trial, so it needs no state. What learns from observations is drawn where they are.

use serde::{Deserialize, Serialize};

use super::{Sweep, Values};

/// How values are drawn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// Each value for itself.
    Random {
        /// Another seed gives other values; the sweep's name when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seed: Option<u64>,
        /// By Sobol's sequence, which fills the space evenly.
        #[serde(default)]
        sobol: bool,
        /// The base of the logarithmic distributions; e when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        logbase: Option<f64>,
    },
    /// Every combination, in order.
    Grid,
    /// Where earlier trials were good.
    Bayesian {
        /// Another seed gives other values; the sweep's name when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seed: Option<u64>,
    },
}

impl Sampling {
    /// Every word for one.
    pub const WORDS: [&'static str; 3] = ["random", "grid", "bayesian"];

    /// What is taken where nothing is said.
    pub fn usual() -> Sampling {
        Sampling::Random { seed: None, sobol: false, logbase: None }
    }

    /// The word for it.
    pub fn name(&self) -> &'static str {
        match self {
            Sampling::Random { .. } => "random",
            Sampling::Grid => "grid",
            Sampling::Bayesian { .. } => "bayesian",
        }
    }

    /// The seed, which is that of `name` where none is given.
    pub fn seed(&self, name: &str) -> u64 {
        let given = match self {
            Sampling::Random { seed, .. } | Sampling::Bayesian { seed } => *seed,
            Sampling::Grid => None,
        };
        // FNV-1a: the same for ever, unlike the hashes of the library.
        let of_name = |seed: u64, byte: u8| (seed ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        given.unwrap_or_else(|| name.bytes().fold(0xcbf2_9ce4_8422_2325, of_name))
    }
}

impl Sweep {
    /// The values of a trial as far as they depend on no other one: `again` counts draws that were rejected.
    pub fn drawn(&self, seed: u64, index: u32, again: u32) -> Values {
        match self.sampling {
            Sampling::Grid => self.space.point(u64::from(index)),
            Sampling::Random { sobol: true, logbase, .. } => {
                let seed = (seed ^ (seed >> 32)) as u32;
                let share = |dimension: usize| f64::from(sobol_burley::sample(index, dimension as u32, seed));
                self.space.at(&share, logbase)
            }
            Sampling::Random { logbase, .. } => {
                self.space.at(&|dimension| share(seed, index, again, dimension), logbase)
            }
            Sampling::Bayesian { .. } => {
                self.space.at(&|dimension| share(seed, index, again, dimension), None)
            }
        }
    }
}

/// A number from 0 to below 1, by SplitMix64 over its four coordinates.
fn share(seed: u64, index: u32, again: u32, dimension: usize) -> f64 {
    let mix = |state: u64| {
        let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let coordinates = [u64::from(index), u64::from(again), dimension as u64];
    let mixed = coordinates.into_iter().fold(mix(seed), |state, coordinate| mix(state ^ coordinate));
    (mixed >> 11) as f64 / (1_u64 << 53) as f64
}
