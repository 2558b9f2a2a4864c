//! The policies that end trials early, by what was observed of all trials.
//!
//! Owns the folding of logged values into what a policy needs, and the exact rules. Interval n of a trial is the n-th
//! time that it logged the metric. A policy looks at a trial at the multiples of its interval from the delay on; what
//! it compares with is what the other trials had at the same n. A value that is no finite number counts as an interval
//! and is never best.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Goal;
use crate::fault::{Code, Fault};

/// What ends trials.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Policy {
    /// The rule.
    pub kind: PolicyKind,
    /// It looks at every so manieth interval; at least 1.
    pub every: u32,
    /// It does not look before this interval.
    #[serde(default)]
    pub delay: u32,
}

/// A rule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKind {
    /// The best of the trial is too far from the best of all, as a factor.
    BanditFactor(f64),
    /// The same, as an amount.
    BanditAmount(f64),
    /// The best of the trial is worse than the median of the means of all.
    MedianStopping,
    /// The value of the trial is among the worst ones.
    Truncation {
        /// So many of a hundred.
        percent: u32,
        /// Trials that have ended are not ranked.
        exclude_finished: bool,
    },
}

impl Policy {
    /// The word for it.
    pub fn name(&self) -> &'static str {
        match self.kind {
            PolicyKind::BanditFactor(_) | PolicyKind::BanditAmount(_) => "bandit",
            PolicyKind::MedianStopping => "median_stopping",
            PolicyKind::Truncation { .. } => "truncation_selection",
        }
    }

    pub(super) fn check(&self) -> Result<(), Fault> {
        let wrong = |what: String, fix: &str| Err(Fault::new(Code::JobInvalid, what).fix(fix));
        match self.kind {
            _ if self.every == 0 => wrong(
                "`early_termination.evaluation_interval` is 0".to_owned(),
                "write at least 1, or leave the key out",
            ),
            PolicyKind::BanditFactor(slack) | PolicyKind::BanditAmount(slack)
                if !(slack.is_finite() && slack > 0.0) =>
            {
                wrong(
                    format!("the slack of `early_termination` is {slack}"),
                    "write either `slack_factor` or `slack_amount`, above 0",
                )
            }
            PolicyKind::Truncation { percent, .. } if !(1..=99).contains(&percent) => wrong(
                format!("`early_termination.truncation_percentage` is {percent}"),
                "write a whole number from 1 to 99",
            ),
            _ => Ok(()),
        }
    }
}

/// What a trial had at one interval; what is no number is unknown.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(from = "[Option<f64>; 3]", into = "[Option<f64>; 3]")]
pub struct CurvePoint {
    /// The value that was logged.
    pub value: f64,
    /// The best up to it.
    pub best: f64,
    /// The mean up to it.
    pub mean: f64,
}

impl From<[Option<f64>; 3]> for CurvePoint {
    fn from(point: [Option<f64>; 3]) -> CurvePoint {
        let [value, best, mean] = point.map(|number| number.unwrap_or(f64::NAN));
        CurvePoint { value, best, mean }
    }
}

impl From<CurvePoint> for [Option<f64>; 3] {
    fn from(CurvePoint { value, best, mean }: CurvePoint) -> [Option<f64>; 3] {
        [value, best, mean].map(known)
    }
}

impl PartialEq for CurvePoint {
    fn eq(&self, other: &CurvePoint) -> bool {
        <[Option<f64>; 3]>::from(*self) == <[Option<f64>; 3]>::from(*other)
    }
}

fn known(number: f64) -> Option<f64> {
    number.is_finite().then_some(number)
}

/// The fold over the values that one trial logged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tally {
    goal: Goal,
    /// What comes at multiples of it is a point; 0 for none.
    every: u64,
    /// How many were logged.
    pub count: u64,
    /// The last value.
    pub last: f64,
    /// The best one.
    pub best: f64,
    sum: f64,
    summed: u64,
}

impl Tally {
    /// Of a trial that has logged nothing.
    pub fn new(goal: Goal, every: u64) -> Tally {
        Tally { goal, every, count: 0, last: f64::NAN, best: f64::NAN, sum: 0.0, summed: 0 }
    }

    /// One more value; the point, if a policy could look there.
    pub fn log(&mut self, value: f64) -> Option<CurvePoint> {
        let value = if value.is_finite() { value } else { f64::NAN };
        (self.count, self.last) = (self.count + 1, value);
        if self.goal.is_better(value, self.best) {
            self.best = value;
        }
        if !value.is_nan() {
            (self.sum, self.summed) = (self.sum + value, self.summed + 1);
        }
        let mean = if self.summed == 0 { f64::NAN } else { self.sum / self.summed as f64 };
        let looked_at = self.every != 0 && self.count.is_multiple_of(self.every);
        looked_at.then_some(CurvePoint { value, best: self.best, mean })
    }
}

/// What is known of the metric of one trial.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Curve {
    /// How many values it logged.
    pub count: u64,
    /// The last of them, if it is a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<f64>,
    /// The best of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<f64>,
    /// What it had at the multiples of the interval of the policy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<CurvePoint>,
}

impl Curve {
    /// Adds what came after it: `tally` is the fold up to now, with the points on the way.
    pub fn extend(&mut self, tally: &Tally, points: impl IntoIterator<Item = CurvePoint>) {
        self.points.extend(points);
        (self.count, self.last, self.best) = (tally.count, known(tally.last), known(tally.best));
    }

    /// The best up to the `k`-th point, or up to now if it has not come so far.
    fn best_at(&self, k: usize) -> f64 {
        self.points.get(k).map_or(self.best.unwrap_or(f64::NAN), |point| point.best)
    }

    /// The value at or before the `k`-th point.
    fn value_at(&self, k: usize) -> f64 {
        self.points.get(k).map_or(self.last.unwrap_or(f64::NAN), |point| point.value)
    }
}

/// Why a policy ended a trial, with the numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stop {
    /// The word for the policy.
    pub policy: String,
    /// The interval at which it looked.
    pub interval: u64,
    /// What the trial had; absent when it had no number.
    pub had: Option<f64>,
    /// What it had to have.
    pub needed: f64,
    /// Where that comes from.
    pub from: String,
}

/// `bandit at interval 4: best 0.61 is worse than 0.667, which is 0.8 of trial 3 less slack_factor 0.2`
impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let had = self.had.map_or_else(|| "no number".to_owned(), |had| had.to_string());
        let what = if self.policy == "truncation_selection" { "value" } else { "best" };
        let Stop { policy, interval, needed, from, .. } = self;
        write!(f, "{policy} at interval {interval}: its {what}, {had}, is worse than {needed}, {from}")
    }
}

/// A trial as a policy sees it.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// Its index.
    pub index: u32,
    /// What it logged.
    pub curve: &'a Curve,
    /// It has ended.
    pub has_ended: bool,
}

impl Policy {
    /// Whether the trial `me` is ended at its `k`-th point, counted from 0, by what is known of all trials, itself
    /// among them.
    pub fn judge<'a>(
        &self,
        goal: Goal,
        all: impl Iterator<Item = Seen<'a>> + Clone,
        me: Seen<'a>,
        k: usize,
    ) -> Option<Stop> {
        let interval = (k as u64 + 1) * u64::from(self.every);
        if interval < u64::from(self.delay) {
            return None;
        }
        let point = me.curve.points.get(k)?;
        let stop = |had: f64, needed: f64, from: String| {
            let policy = self.name().to_owned();
            goal.is_better(needed, had).then(|| Stop { policy, interval, had: known(had), needed, from })
        };
        match self.kind {
            PolicyKind::BanditFactor(_) | PolicyKind::BanditAmount(_) => {
                let better = |one: (f64, u32), other: (f64, u32)| {
                    if goal.is_better(other.0, one.0) { other } else { one }
                };
                let (best, of) = all.map(|seen| (seen.curve.best_at(k), seen.index)).reduce(better)?;
                let (bound, slack) = bound(goal, self.kind, best);
                stop(point.best, bound, format!("which is {best} of trial {of} with {slack}"))
            }
            PolicyKind::MedianStopping => {
                let others = all.filter(|seen| seen.index != me.index);
                let others = others.filter_map(|seen| known(seen.curve.points.get(k)?.mean));
                let mut means: Vec<f64> = others.collect();
                if means.len() < 2 {
                    return None;
                }
                means.extend(known(point.mean));
                let count = means.len();
                let median = median(&mut means);
                stop(point.best, median, format!("the median of the means of {count} trials up to there"))
            }
            PolicyKind::Truncation { percent, exclude_finished } => {
                let ranked = all.filter(|seen| {
                    seen.index == me.index || (seen.curve.count > 0 && !(exclude_finished && seen.has_ended))
                });
                let values = ranked
                    .map(|seen| if seen.index == me.index { point.value } else { seen.curve.value_at(k) });
                let mut values: Vec<f64> = values.collect();
                let cut = values.len() * percent as usize / 100;
                if cut == 0 {
                    return None;
                }
                // The worst of those that stay: whoever is as good as it stays too.
                let order = |one: &f64, other: &f64| match (
                    goal.is_better(*other, *one),
                    goal.is_better(*one, *other),
                ) {
                    (true, _) => std::cmp::Ordering::Less,
                    (_, true) => std::cmp::Ordering::Greater,
                    _ => std::cmp::Ordering::Equal,
                };
                let count = values.len();
                let (_, worst_kept, _) = values.select_nth_unstable_by(cut, order);
                let worst_kept = *worst_kept;
                stop(
                    point.value,
                    worst_kept,
                    format!("the worst of those kept: {cut} of {count} trials go ({percent} %)"),
                )
            }
        }
    }
}

/// The worst value that a trial may have as its best, and the slack as text. A factor of a best that is not above 0
/// would turn its sense, so it is taken of its size.
fn bound(goal: Goal, kind: PolicyKind, best: f64) -> (f64, String) {
    match (kind, goal) {
        (PolicyKind::BanditAmount(slack), Goal::Maximize) => (best - slack, format!("slack_amount {slack}")),
        (PolicyKind::BanditAmount(slack), Goal::Minimize) => (best + slack, format!("slack_amount {slack}")),
        (PolicyKind::BanditFactor(slack), goal) => {
            let turned = if best > 0.0 { "" } else { " of its size, since it is not above 0" };
            let bound = match goal {
                Goal::Maximize if best > 0.0 => best / (1.0 + slack),
                Goal::Maximize => best - best.abs() * slack / (1.0 + slack),
                Goal::Minimize if best > 0.0 => best * (1.0 + slack),
                Goal::Minimize => best + best.abs() * slack,
            };
            (bound, format!("slack_factor {slack}{turned}"))
        }
        _ => (best, String::new()),
    }
}

/// The middle, or the mean of the two in the middle.
fn median(numbers: &mut [f64]) -> f64 {
    let middle = numbers.len() / 2;
    let even = numbers.len().is_multiple_of(2);
    let (below, upper, _) = numbers.select_nth_unstable_by(middle, f64::total_cmp);
    let upper = *upper;
    match even {
        false => upper,
        true => below.iter().copied().fold(f64::MIN, f64::max).midpoint(upper),
    }
}
