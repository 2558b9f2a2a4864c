//! Sweeps: one command that is tried with many values of its hyperparameters, each time as a job of its own, a trial.
//!
//! Owns what a valid sweep is ([`Sweep`]), how the values of a trial are drawn ([`space`], [`draw`]), and which trials
//! a policy ends and by which numbers ([`policy`]). Pure: no clock, no randomness but that of a seed. Values that were
//! drawn are stored with their trial; they, not the seed, are the promise.
//!
//! A sweep is also an array: its indices are those of its trials, and how many may run at a time is the array's.

pub mod draw;
pub mod policy;
pub mod space;
pub mod trials;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::JobId;
use crate::fault::{Code, Fault};
pub use draw::Sampling;
pub use policy::{Curve, CurvePoint, Policy, PolicyKind, Stop, Tally};
pub use space::{Alternative, Distribution, Scalar, Space};
pub use trials::{Best, Decision, Logged, Trial, Trials};

/// The values of one trial, by the names of its hyperparameters.
pub type Values = BTreeMap<String, Scalar>;

/// Whether a lower or a higher value of the metric is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Goal {
    /// Lower.
    Minimize,
    /// Higher.
    Maximize,
}

impl Goal {
    /// Every word for one.
    pub const WORDS: [&'static str; 2] = ["minimize", "maximize"];

    /// From the word for it.
    pub fn parse(word: &str) -> Option<Goal> {
        match word {
            "minimize" => Some(Goal::Minimize),
            "maximize" => Some(Goal::Maximize),
            _ => None,
        }
    }

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Goal::Minimize => "minimize",
            Goal::Maximize => "maximize",
        }
    }

    /// Whether `one` is better than `other`. What is no number is never better, and worse than every number.
    pub fn is_better(self, one: f64, other: f64) -> bool {
        match (one.is_nan(), other.is_nan()) {
            (true, _) => false,
            (false, true) => true,
            (false, false) if self == Goal::Minimize => one < other,
            (false, false) => one > other,
        }
    }
}

/// What a sweep is to make as low or as high as possible.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Objective {
    /// Which of the two.
    pub goal: Goal,
    /// The name of the metric.
    pub metric: String,
}

/// What makes a job a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    /// What the values are drawn from.
    pub space: Space,
    /// How.
    pub sampling: Sampling,
    /// What is better.
    pub objective: Objective,
    /// What ends a trial early; nothing when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// The longest time from the start of the first trial; then all are ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Duration>,
    /// Trials that have these values, and are not drawn.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub given: BTreeMap<u32, Values>,
    /// The sweep that ended, and whose trials count as earlier ones of this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extends: Option<JobId>,
}

/// The most trials of a sweep with a policy: at each point a trial is compared with all of them.
pub const MAX_COMPARED: u32 = 1000;

/// The most hyperparameters of a sweep: Sobol's sequence has so many dimensions.
pub const MAX_PARAMETERS: usize = 256;

impl Sweep {
    /// Every interval of which a policy needs to know; 0 when there is no policy.
    pub fn every(&self) -> u64 {
        self.policy.as_ref().map_or(0, |policy| u64::from(policy.every))
    }

    /// How many trials there can be: as many as are asked for, and of a grid no more than it has points.
    pub fn size(&self, asked: u32) -> u32 {
        match self.sampling {
            Sampling::Grid => u32::try_from(self.space.points()).unwrap_or(u32::MAX).min(asked),
            _ => asked,
        }
    }

    /// Checks every rule.
    pub fn check(&self) -> Result<(), Fault> {
        let invalid = |what: &str| Fault::new(Code::JobInvalid, what.to_owned());
        self.space.check()?;
        if self.objective.metric.is_empty() {
            return Err(invalid("the sweep has no `objective.primary_metric`")
                .fix("name the metric that the trials log, for example `primary_metric: loss`"));
        }
        let leaves = self.space.leaves();
        if leaves.len() > MAX_PARAMETERS {
            return Err(invalid(&format!("`search_space` has {} distributions", leaves.len()))
                .fix(format!("at most {MAX_PARAMETERS} are drawn from")));
        }
        let other = |fits: &dyn Fn(&Distribution) -> bool| {
            let misfit = leaves.iter().find(|(_, leaf)| !fits(leaf));
            misfit.map(|(name, leaf)| format!("`search_space.{name}` is `{}`", leaf.name()))
        };
        match self.sampling {
            Sampling::Grid => {
                if let Some(what) = other(&|leaf| matches!(leaf, Distribution::Choice(_))) {
                    return Err(invalid(&what)
                        .why("`sampling_algorithm: grid` tries every point, so it takes only `choice`")
                        .fix("write a `choice` of values, or sample at `random`"));
                }
            }
            Sampling::Bayesian { .. } => {
                let fits = |leaf: &Distribution| match leaf {
                    Distribution::Choice(among) => !among.iter().any(Alternative::is_space),
                    Distribution::Uniform { .. } | Distribution::Quniform { .. } => true,
                    _ => false,
                };
                if let Some(what) = other(&fits) {
                    return Err(invalid(&what)
                        .why("`sampling_algorithm: bayesian` takes `choice` of plain values, `uniform` and `quniform`")
                        .fix("write one of these, or sample at `random`"));
                }
                if self.policy.is_some() {
                    return Err(invalid(
                        "`early_termination` does not go with `sampling_algorithm: bayesian`",
                    )
                    .why("what it learns from a trial is its end, and an ended one says too little")
                    .fix("leave one of the two out"));
                }
            }
            Sampling::Random { logbase: Some(base), .. }
                if !(base.is_finite() && base > 0.0 && base != 1.0) =>
            {
                return Err(invalid(&format!("`sampling_algorithm.logbase` is {base}"))
                    .fix("write a positive number other than 1, or `e`"));
            }
            Sampling::Random { .. } => {}
        }
        self.policy.as_ref().map_or(Ok(()), Policy::check)
    }
}

/// As it is sent: JSON.
impl fmt::Display for Sweep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Names are texts and numbers are finite, so it always serialises.
        f.write_str(&serde_json::to_string(self).unwrap_or_default())
    }
}

impl FromStr for Sweep {
    type Err = serde_json::Error;
    fn from_str(text: &str) -> Result<Sweep, serde_json::Error> {
        serde_json::from_str(text)
    }
}

#[cfg(test)]
mod tests;
