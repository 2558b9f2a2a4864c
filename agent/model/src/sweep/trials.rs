//! What is known of all trials of a sweep, and what follows from it.
//!
//! Owns the one function that decides ([`Trials::next`]). Invariants: a trial is judged at a point once; one that has
//! ended, or that is being ended, is not judged at all; its values do not change.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::policy::Seen;
use super::{Curve, CurvePoint, Goal, Stop, Sweep, Tally, Values};
use crate::Verdict;

/// What the record of a trial holds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trial {
    /// The values that were drawn for it.
    pub values: Values,
    /// What it logged of the metric. While it runs, points are read from what it recorded, and not stored.
    pub curve: Curve,
    /// The names of other metrics that it logged, if it never logged that of the sweep.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub others: BTreeSet<String>,
    /// Why a policy ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop: Option<Stop>,
}

/// More that a trial was seen to log.
#[derive(Debug, Clone, PartialEq)]
pub struct Logged {
    /// It begins anew: what was known of the trial before counts no more.
    pub anew: bool,
    /// All of its values so far.
    pub tally: Tally,
    /// The points that came since.
    pub points: Vec<CurvePoint>,
    /// The names of the metrics that it logged.
    pub names: BTreeSet<String>,
    /// Its command has ended: no policy looks at it any more.
    pub is_over: bool,
}

/// Something that follows.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// A policy ends this trial.
    Stop(u32, Stop),
    /// This is the first trial that completed, and it never logged the metric.
    NoMetric(u32),
}

/// The best trial of those that completed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Its index.
    pub trial: u32,
    /// Its best value.
    pub value: f64,
}

#[derive(Debug, Clone, Default)]
struct KnownTrial {
    trial: Trial,
    /// `None` while it has not ended.
    end: Option<Verdict>,
    /// So many of its points were judged.
    judged: usize,
    /// It was loaded, so what it had logged before was judged before.
    is_old: bool,
}

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct Trials {
    known: BTreeMap<u32, KnownTrial>,
    /// Those of which there is something new.
    fresh: BTreeSet<u32>,
    /// It was said that nobody logs the metric, or somebody did.
    settled: bool,
}

impl Trials {
    /// Takes in a trial that was placed before.
    pub fn load(&mut self, index: u32, trial: Trial, end: Option<Verdict>) {
        self.settled |= end == Some(Verdict::Completed);
        let judged = trial.curve.points.len();
        self.known.insert(index, KnownTrial { trial, end, judged, is_old: end.is_none() });
    }

    /// A trial got its values.
    pub fn begin(&mut self, index: u32, values: Values) {
        self.known.insert(
            index,
            KnownTrial { trial: Trial { values, ..Trial::default() }, ..KnownTrial::default() },
        );
    }

    /// A trial logged more.
    pub fn observe(&mut self, index: u32, logged: Logged) {
        let Some(known) = self.known.get_mut(&index).filter(|known| known.end.is_none()) else { return };
        if logged.anew {
            (known.trial.curve, known.judged) = (Curve::default(), 0);
        }
        known.trial.curve.extend(&logged.tally, logged.points);
        if std::mem::take(&mut known.is_old) || logged.is_over {
            known.judged = known.trial.curve.points.len();
        }
        known.trial.others = if logged.tally.count == 0 { logged.names } else { BTreeSet::new() };
        self.fresh.insert(index);
    }

    /// A trial has ended.
    pub fn end(&mut self, index: u32, verdict: Verdict) {
        if let Some(known) = self.known.get_mut(&index) {
            known.end.get_or_insert(verdict);
            self.fresh.insert(index);
        }
    }

    /// What is known of one.
    pub fn get(&self, index: u32) -> Option<&Trial> {
        self.known.get(&index).map(|known| &known.trial)
    }

    /// Each trial with how it ended.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Trial, Option<Verdict>)> {
        self.known.iter().map(|(index, known)| (*index, &known.trial, known.end))
    }

    /// The best of those that completed.
    pub fn best(&self, goal: Goal) -> Option<Best> {
        let completed = self.iter().filter(|(_, _, end)| *end == Some(Verdict::Completed));
        let bests =
            completed.filter_map(|(index, trial, _)| Some(Best { trial: index, value: trial.curve.best? }));
        bests.reduce(|one, other| if goal.is_better(other.value, one.value) { other } else { one })
    }

    /// The metrics that trials logged, where none logged that of the sweep.
    pub fn others(&self) -> BTreeSet<&str> {
        self.known.values().flat_map(|known| known.trial.others.iter().map(String::as_str)).collect()
    }

    /// What follows from what is new: each decision once.
    pub fn next(&mut self, sweep: &Sweep) -> Vec<Decision> {
        let mut decisions = Vec::new();
        for index in std::mem::take(&mut self.fresh) {
            if let Some(stop) = self.judge(sweep, index) {
                let known = self.known.entry(index).or_default();
                known.trial.stop = Some(stop.clone());
                decisions.push(Decision::Stop(index, stop));
            }
            let Some(known) = self.known.get(&index).filter(|_| !self.settled) else { continue };
            if known.end == Some(Verdict::Completed) {
                self.settled = true;
                if known.trial.curve.count == 0 {
                    decisions.push(Decision::NoMetric(index));
                }
            }
        }
        decisions
    }

    fn judge(&mut self, sweep: &Sweep, index: u32) -> Option<Stop> {
        let policy = sweep.policy.as_ref()?;
        let known = self.known.get_mut(&index)?;
        let points = known.trial.curve.points.len();
        let first = std::mem::replace(&mut known.judged, points);
        let known = self.known.get(&index)?;
        if known.end.is_some() || known.trial.stop.is_some() {
            return None;
        }
        let all = self.known.iter().map(|(index, known)| Seen {
            index: *index,
            curve: &known.trial.curve,
            has_ended: known.end.is_some(),
        });
        let me = Seen { index, curve: &known.trial.curve, has_ended: false };
        (first..points).find_map(|k| policy.judge(sweep.objective.goal, all.clone(), me, k))
    }
}
