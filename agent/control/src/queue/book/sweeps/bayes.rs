//! Values that are drawn where earlier trials were good: a tree-structured Parzen estimator for each hyperparameter.
//!
//! Owns the crate that estimates. A draw is a function of the seed, the index and what is known of the trials, so it
//! is the same however often the controller was started. The estimators are made anew for each draw, from at most
//! [`MOST`] trials, so the cost of a draw does not grow with the sweep.

use std::collections::BTreeSet;

use agent_model::sweep::{Alternative, Distribution, Goal, Scalar, Sweep, Trials, Values};
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Trials that are drawn at random first, at least.
const FIRST: usize = 10;
/// The latest trials that are looked at.
const MOST: usize = 1000;
/// Draws of what another trial has already, after which one is taken all the same.
const AGAIN: u32 = 10;

/// The values of a trial.
pub(super) fn draw(sweep: &Sweep, seed: u64, trials: &Trials, index: u32) -> Values {
    let known: Vec<_> = trials.iter().filter(|(other, ..)| *other != index).collect();
    let known = &known[known.len().saturating_sub(MOST)..];
    let taken: BTreeSet<String> = known.iter().map(|(_, trial, _)| format!("{:?}", trial.values)).collect();
    let costs = known.iter().filter_map(|(_, trial, _)| Some(cost(sweep, trial.curve.best?)));
    // One that has no value yet, or never had one, counts as the worst.
    let worst = costs.clone().fold(f64::NEG_INFINITY, f64::max);
    let learned = costs.count() >= FIRST.max(2 * sweep.space.0.len());
    let mut values = Values::new();
    for again in 0..AGAIN {
        values = match learned {
            false => sweep.drawn(seed, index, again),
            true => {
                let mut rng = StdRng::seed_from_u64(seed ^ (u64::from(index) << 8) ^ u64::from(again));
                let told = known.iter().map(|(_, trial, _)| {
                    (&trial.values, trial.curve.best.map_or(worst, |best| cost(sweep, best)))
                });
                let told: Vec<_> = told.collect();
                let asked = sweep.space.0.iter().map(|(name, distribution)| {
                    Some((name.clone(), ask(name, distribution, &told, &mut rng)?))
                });
                asked.collect::<Option<Values>>().unwrap_or_else(|| sweep.drawn(seed, index, again))
            }
        };
        if !taken.contains(&format!("{values:?}")) {
            break;
        }
    }
    values
}

/// The lower the better.
fn cost(sweep: &Sweep, value: f64) -> f64 {
    if sweep.objective.goal == Goal::Minimize { value } else { -value }
}

/// Where a value is on the axis of the estimator.
type OnAxis<'a> = Box<dyn Fn(&Scalar) -> Option<f64> + 'a>;

/// One value, by what values of it cost.
fn ask(name: &str, distribution: &Distribution, told: &[(&Values, f64)], rng: &mut StdRng) -> Option<Scalar> {
    let (estimator, range, place): (_, _, OnAxis<'_>) = match distribution {
        Distribution::Choice(among) => {
            let place = |value: &Scalar| {
                let is = |one: &Alternative| matches!(one, Alternative::Value(other) if other == value);
                among.iter().position(is).map(|place| place as f64)
            };
            (tpe::histogram_estimator(), tpe::categorical_range(among.len()).ok()?, Box::new(place))
        }
        Distribution::Uniform { min, max } | Distribution::Quniform { min, max, .. } => {
            let (min, max) = (*min, *max);
            let number = move |value: &Scalar| {
                let number = match value {
                    Scalar::Whole(whole) => *whole as f64,
                    Scalar::Number(number) => *number,
                    Scalar::Text(_) => return None,
                };
                // Rounding may have put it beyond the bounds, which the estimator excludes.
                Some(number.clamp(min, max - (max - min) * 1e-12))
            };
            (tpe::parzen_estimator(), tpe::range(min, max).ok()?, Box::new(number))
        }
        _ => return None, // refused when the sweep was validated
    };
    let mut optimizer = tpe::TpeOptimizer::new(estimator, range);
    for (values, cost) in told {
        if let Some(place) = values.get(name).and_then(&place) {
            let _ = optimizer.tell(place, *cost); // what it does not take is not learned from
        }
    }
    let asked = optimizer.ask(rng).ok()?;
    Some(match distribution {
        Distribution::Choice(among) => match among.get(asked as usize)? {
            Alternative::Value(value) => value.clone(),
            Alternative::Space(_) => return None,
        },
        Distribution::Quniform { q, .. } => Scalar::multiple(asked, *q),
        _ => Scalar::Number(asked),
    })
}

#[cfg(test)]
mod tests {
    use agent_model::Verdict;
    use agent_model::sweep::{Logged, Objective, Sampling, Space, Tally};

    use super::*;

    fn sweep() -> Sweep {
        let among = ["a", "b", "c"].map(|text| Alternative::Value(Scalar::Text(text.to_owned())));
        let space = Space(
            [
                ("kind".to_owned(), Distribution::Choice(among.into())),
                ("x".to_owned(), Distribution::Uniform { min: -5.0, max: 5.0 }),
                ("n".to_owned(), Distribution::Quniform { min: 0.0, max: 8.0, q: 2.0 }),
            ]
            .into(),
        );
        Sweep {
            space,
            sampling: Sampling::Bayesian { seed: None },
            objective: Objective { goal: Goal::Minimize, metric: "loss".to_owned() },
            policy: None,
            timeout: None,
            given: Default::default(),
            extends: None,
        }
    }

    fn number(value: &Scalar) -> f64 {
        match value {
            Scalar::Whole(whole) => *whole as f64,
            Scalar::Number(number) => *number,
            Scalar::Text(_) => panic!(),
        }
    }

    fn loss(values: &Values) -> f64 {
        let kind = if values["kind"] == Scalar::Text("b".to_owned()) { 0.0 } else { 3.0 };
        (number(&values["x"]) - 1.0).powi(2) + kind + (number(&values["n"]) - 4.0).abs()
    }

    /// The best of 60 trials, of which so many run at a time.
    fn best(seed: u64, at_once: u32, learns: bool) -> f64 {
        let (mut sweep, mut trials) = (sweep(), Trials::default());
        if !learns {
            sweep.sampling = Sampling::usual();
        }
        let mut best = f64::INFINITY;
        for index in 0..60 {
            let values =
                if learns { draw(&sweep, seed, &trials, index) } else { sweep.drawn(seed, index, 0) };
            assert!((-5.0..=5.0).contains(&number(&values["x"])));
            assert!(matches!(values["n"], Scalar::Whole(0 | 2 | 4 | 6 | 8)), "{values:?}");
            best = best.min(loss(&values));
            trials.begin(index, values);
            if let Some(done) = index.checked_sub(at_once - 1) {
                let mut tally = Tally::new(Goal::Minimize, 0);
                tally.log(loss(&trials.get(done).unwrap().values));
                let logged =
                    Logged { anew: true, tally, points: Vec::new(), names: BTreeSet::new(), is_over: false };
                trials.observe(done, logged);
                trials.end(done, Verdict::Completed);
            }
        }
        best
    }

    fn median(of: impl Fn(u64) -> f64) -> f64 {
        let mut all: Vec<f64> = (1..=21).map(of).collect();
        all.sort_by(f64::total_cmp);
        all[10]
    }

    #[test]
    fn test_it_finds_better_values_than_chance_also_with_many_at_a_time() {
        let chance = median(|seed| best(seed, 1, false));
        for at_once in [1, 8] {
            let learned = median(|seed| best(seed, at_once, true));
            assert!(learned < chance / 2.0, "{at_once} at a time: {learned}, by chance {chance}");
        }
    }

    #[test]
    fn test_a_draw_is_the_same_after_a_restart_and_no_other_trials() {
        let (sweep, mut trials) = (sweep(), Trials::default());
        let mut seen = BTreeSet::new();
        for index in 0..40 {
            let values = draw(&sweep, 7, &trials, index);
            assert_eq!(draw(&sweep, 7, &trials, index), values);
            assert!(seen.insert(format!("{values:?}")), "trial {index} is drawn twice");
            trials.begin(index, values);
        }
    }
}
