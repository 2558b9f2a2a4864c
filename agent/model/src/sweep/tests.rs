use std::collections::BTreeSet;

use proptest::prelude::*;

use super::policy::Seen;
use super::*;
use crate::Verdict;

fn whole(value: i64) -> Alternative {
    Alternative::Value(Scalar::Whole(value))
}

fn space(entries: impl IntoIterator<Item = (&'static str, Distribution)>) -> Space {
    Space(entries.into_iter().map(|(name, distribution)| (name.to_owned(), distribution)).collect())
}

fn sweep(space: Space, sampling: Sampling) -> Sweep {
    let objective = Objective { goal: Goal::Minimize, metric: "loss".to_owned() };
    Sweep { space, sampling, objective, policy: None, timeout: None, given: BTreeMap::new(), extends: None }
}

fn random(seed: u64) -> Sampling {
    Sampling::Random { seed: Some(seed), sobol: false, logbase: None }
}

/// A deterministic stream of numbers that is none of ours.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, most: u64) -> u64 {
        self.next() % most
    }
}

fn every_distribution() -> Space {
    let (mu, sigma, min, max) = (1.0, 2.0, -3.0, 2.0);
    space([
        ("choice", Distribution::Choice(vec![whole(1), Alternative::Value(Scalar::Text("a".into()))])),
        ("randint", Distribution::Randint { upper: 5 }),
        ("uniform", Distribution::Uniform { min, max }),
        ("quniform", Distribution::Quniform { min, max, q: 0.5 }),
        ("loguniform", Distribution::Loguniform { min, max }),
        ("qloguniform", Distribution::Qloguniform { min, max, q: 2.0 }),
        ("normal", Distribution::Normal { mu, sigma }),
        ("qnormal", Distribution::Qnormal { mu, sigma, q: 3.0 }),
        ("lognormal", Distribution::Lognormal { mu, sigma }),
        ("qlognormal", Distribution::Qlognormal { mu, sigma, q: 0.25 }),
    ])
}

fn number(value: &Scalar) -> f64 {
    match value {
        Scalar::Whole(whole) => *whole as f64,
        Scalar::Number(number) => *number,
        Scalar::Text(text) => panic!("{text} is no number"),
    }
}

#[test]
fn test_draws_have_the_moments_of_their_distribution() {
    for sampling in [random(7), Sampling::Random { seed: Some(3), sobol: true, logbase: None }] {
        let sweep = sweep(every_distribution(), sampling);
        let draws: Vec<Values> = (0..4096).map(|index| sweep.drawn(3, index, 0)).collect();
        let mean = |name: &str, of: &dyn Fn(f64) -> f64| {
            draws.iter().map(|values| of(number(&values[name]))).sum::<f64>() / draws.len() as f64
        };
        let near = |name: &str, of: &dyn Fn(f64) -> f64, expected: f64, slack: f64| {
            let found = mean(name, of);
            assert!((found - expected).abs() < slack, "{name}: {found}, not {expected}");
        };
        near("randint", &|x| x, 2.0, 0.1);
        near("uniform", &|x| x, -0.5, 0.1);
        near("quniform", &|x| x, -0.5, 0.1);
        near("loguniform", &f64::ln, -0.5, 0.1);
        near("normal", &|x| x, 1.0, 0.15);
        near("normal", &|x| (x - 1.0) * (x - 1.0), 4.0, 0.4);
        near("lognormal", &f64::ln, 1.0, 0.15);
        near("qnormal", &|x| x, 1.0, 0.2);
        near("qlognormal", &|x| x.max(0.1).ln(), 1.0, 0.2);
        for values in &draws {
            let multiple = |name: &str, q: f64| (number(&values[name]) / q).fract().abs() < 1e-9;
            assert!(multiple("quniform", 0.5) && multiple("qnormal", 3.0) && multiple("qlognormal", 0.25));
            assert!(multiple("qloguniform", 2.0) && matches!(values["qloguniform"], Scalar::Whole(0..=8)));
            assert!(matches!(values["randint"], Scalar::Whole(0..5)));
            assert!((-3.0..2.0).contains(&number(&values["uniform"])));
        }
        let first = draws.iter().filter(|values| values["choice"] == Scalar::Whole(1)).count();
        assert!((1700..2400).contains(&first), "{first}");
    }
}

#[test]
fn test_a_draw_is_what_its_seed_and_index_say() {
    let sweep = sweep(every_distribution(), random(7));
    assert_eq!(sweep.drawn(7, 3, 0), sweep.drawn(7, 3, 0));
    let other = [sweep.drawn(8, 3, 0), sweep.drawn(7, 4, 0), sweep.drawn(7, 3, 1)];
    assert!(other.iter().all(|values| *values != sweep.drawn(7, 3, 0)));
    assert_eq!(sweep.sampling.seed("any"), 7);
    let unseeded = Sampling::usual();
    assert_ne!(unseeded.seed("a"), unseeded.seed("b"));
    // FNV-1a as published: a release that computes another one draws other values.
    assert_eq!(unseeded.seed("a"), 0xaf63_dc4c_8601_ec8c);
}

#[test]
fn test_the_base_of_logarithms_may_be_another() {
    let space = space([("lr", Distribution::Loguniform { min: -6.0, max: -1.0 })]);
    let sampling = Sampling::Random { seed: Some(1), sobol: false, logbase: Some(10.0) };
    let sweep = sweep(space, sampling);
    for index in 0..100 {
        let drawn = number(&sweep.drawn(1, index, 0)["lr"]);
        assert!((1e-6..=0.1).contains(&drawn), "{drawn}");
    }
}

fn nested() -> Space {
    let deep = space([
        ("layers", Distribution::Choice(vec![whole(2), whole(3)])),
        ("width", Distribution::Choice(vec![whole(64)])),
    ]);
    let flat = space([("depth", Distribution::Choice(vec![whole(1), whole(2), whole(3)]))]);
    space([
        ("lr", Distribution::Choice(vec![whole(1), whole(2)])),
        ("model", Distribution::Choice(vec![Alternative::Space(deep), Alternative::Space(flat), whole(9)])),
    ])
}

#[test]
fn test_a_grid_has_each_point_once() {
    let space = nested();
    assert_eq!(space.points(), 12);
    let points: Vec<Values> = (0..12).map(|index| space.point(index)).collect();
    let texts: BTreeSet<String> = points.iter().map(|point| format!("{point:?}")).collect();
    assert_eq!(texts.len(), 12);
    let names = |point: &Values| point.keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(points.iter().filter(|point| names(point) == "layers lr width").count(), 4);
    assert_eq!(points.iter().filter(|point| names(point) == "depth lr").count(), 6);
    assert_eq!(points.iter().filter(|point| names(point) == "lr model").count(), 2);
    assert_eq!(space.names().into_iter().collect::<Vec<_>>(), ["depth", "layers", "lr", "model", "width"]);
    let grid = sweep(space, Sampling::Grid);
    assert_eq!((grid.size(1000), grid.size(5)), (12, 5));
    grid.check().unwrap();
}

#[test]
fn test_a_nested_choice_gives_values_to_the_names_that_were_drawn() {
    let sweep = sweep(nested(), random(1));
    let names = |index| sweep.drawn(1, index, 0).keys().cloned().collect::<Vec<_>>().join(" ");
    let drawn: BTreeSet<String> = (0..50).map(names).collect();
    assert_eq!(drawn.into_iter().collect::<Vec<_>>(), ["depth lr", "layers lr width", "lr model"]);
}

#[test]
fn test_what_cannot_be_drawn_from_is_refused() {
    let refused = |sweep: &Sweep| sweep.check().unwrap_err().what;
    let one = |distribution: Distribution| sweep(space([("x", distribution)]), random(1));
    for distribution in [
        Distribution::Choice(Vec::new()),
        Distribution::Randint { upper: 0 },
        Distribution::Uniform { min: 1.0, max: 1.0 },
        Distribution::Loguniform { min: f64::NAN, max: 1.0 },
        Distribution::Quniform { min: 0.0, max: 1.0, q: 0.0 },
        Distribution::Normal { mu: 0.0, sigma: -1.0 },
        Distribution::Qlognormal { mu: f64::INFINITY, sigma: 1.0, q: 1.0 },
    ] {
        let name = distribution.name();
        assert_eq!(
            refused(&one(distribution)),
            format!("`search_space.x` is no `{name}` that can be drawn from")
        );
    }
    assert!(refused(&sweep(Space::default(), random(1))).contains("names no hyperparameter"));
    let bad_name = sweep(space([("a-b", Distribution::Randint { upper: 2 })]), random(1));
    assert!(refused(&bad_name).contains("no name of a hyperparameter"));
    let inner = space([("x", Distribution::Randint { upper: 2 })]);
    let twice = space([
        ("x", Distribution::Randint { upper: 2 }),
        ("y", Distribution::Choice(vec![Alternative::Space(inner)])),
    ]);
    assert!(refused(&sweep(twice, random(1))).contains("twice"));
    let uniform = || space([("x", Distribution::Uniform { min: 0.0, max: 1.0 })]);
    assert!(sweep(uniform(), Sampling::Grid).check().is_err());
    assert!(sweep(uniform(), Sampling::Bayesian { seed: None }).check().is_ok());
    assert!(sweep(nested(), Sampling::Bayesian { seed: None }).check().is_err());
    let policy = Some(Policy { kind: PolicyKind::MedianStopping, every: 1, delay: 0 });
    let both = Sweep { policy, ..sweep(uniform(), Sampling::Bayesian { seed: None }) };
    assert!(refused(&both).contains("does not go with"));
    for kind in [
        PolicyKind::BanditFactor(0.0),
        PolicyKind::BanditAmount(f64::NAN),
        PolicyKind::Truncation { percent: 100, exclude_finished: false },
    ] {
        let policy = Some(Policy { kind, every: 1, delay: 0 });
        assert!(Sweep { policy, ..sweep(uniform(), random(1)) }.check().is_err(), "{kind:?}");
    }
}

#[test]
fn test_values_are_printed_as_they_were_written() {
    for (text, scalar) in [
        ("16", Scalar::Whole(16)),
        ("16.0", Scalar::Number(16.0)),
        ("1e-05", Scalar::Number(1e-5)),
        ("true", Scalar::Text("True".into())),
        ("adam", Scalar::Text("adam".into())),
        ("nan", Scalar::Text("nan".into())),
        ("1.2.3", Scalar::Text("1.2.3".into())),
    ] {
        assert_eq!(Scalar::read(text), scalar, "{text}");
        let json = serde_json::to_string(&scalar).unwrap();
        assert_eq!(serde_json::from_str::<Scalar>(&json).unwrap(), scalar, "{json}");
    }
    let printed = [Scalar::Whole(16), Scalar::Number(16.0), Scalar::Number(1e-7), Scalar::Number(0.1)];
    assert_eq!(printed.map(|scalar| scalar.to_string()), ["16", "16.0", "1e-7", "0.1"]);
    assert_eq!(Scalar::multiple(2.5, 1.0), Scalar::Whole(2), "a tie goes to the even one");
}

/// The rules of the reference, written down a second time: from lists of values, one rule after the other, without
/// anything that the product has.
mod reference {
    use super::{Dice, Goal, PolicyKind};

    pub(super) struct Trial {
        pub(super) values: Vec<f64>,
        pub(super) ended: bool,
    }

    fn best(goal: Goal, values: &[f64]) -> Option<f64> {
        let numbers = values.iter().copied().filter(|value| !value.is_nan());
        match goal {
            Goal::Minimize => numbers.reduce(f64::min),
            Goal::Maximize => numbers.reduce(f64::max),
        }
    }

    fn upto(trial: &Trial, n: usize) -> &[f64] {
        &trial.values[..n.min(trial.values.len())]
    }

    /// Is `me` canceled when it logs its n-th value?
    pub(super) fn cancels(
        kind: PolicyKind,
        (every, delay): (usize, usize),
        goal: Goal,
        trials: &[Trial],
        me: usize,
        n: usize,
    ) -> bool {
        if !n.is_multiple_of(every) || n < delay {
            return false;
        }
        let mine = best(goal, upto(&trials[me], n));
        // Everything below is for maximising: minimising is its mirror.
        let sign = if goal == Goal::Maximize { 1.0 } else { -1.0 };
        match kind {
            PolicyKind::BanditFactor(s) | PolicyKind::BanditAmount(s) => {
                let bests: Vec<f64> = trials.iter().filter_map(|trial| best(goal, upto(trial, n))).collect();
                let Some(b) = best(goal, &bests) else { return false };
                let Some(mine) = mine else { return true };
                let limit = match (kind, goal) {
                    (PolicyKind::BanditAmount(_), Goal::Maximize) => b - s,
                    (PolicyKind::BanditAmount(_), Goal::Minimize) => b + s,
                    (_, Goal::Maximize) if b > 0.0 => b / (1.0 + s),
                    (_, Goal::Maximize) => b - b.abs() * s / (1.0 + s),
                    (_, Goal::Minimize) if b > 0.0 => b * (1.0 + s),
                    (_, Goal::Minimize) => b + b.abs() * s,
                };
                if goal == Goal::Maximize { mine < limit } else { mine > limit }
            }
            PolicyKind::MedianStopping => {
                let mean = |trial: &Trial| {
                    let numbers: Vec<f64> = upto(trial, n).iter().copied().filter(|v| !v.is_nan()).collect();
                    (!numbers.is_empty()).then(|| numbers.iter().sum::<f64>() / numbers.len() as f64)
                };
                let reached = |index: &usize| trials[*index].values.len() >= n;
                let others = (0..trials.len()).filter(|index| *index != me).filter(reached);
                let others: Vec<f64> = others.filter_map(|index| mean(&trials[index])).collect();
                if others.len() < 2 {
                    return false;
                }
                let mut all = others;
                all.extend(mean(&trials[me]));
                all.sort_by(f64::total_cmp);
                let middle = all.len() / 2;
                let median =
                    if all.len() % 2 == 1 { all[middle] } else { all[middle - 1].midpoint(all[middle]) };
                mine.is_none_or(|mine| sign * mine < sign * median)
            }
            PolicyKind::Truncation { percent, exclude_finished } => {
                let counts = |index: usize| {
                    index == me
                        || !(trials[index].values.is_empty() || exclude_finished && trials[index].ended)
                };
                let at = |index: usize| {
                    let value = *upto(&trials[index], n).last().unwrap();
                    if value.is_nan() { f64::NEG_INFINITY } else { sign * value }
                };
                let ranked: Vec<f64> = (0..trials.len()).filter(|index| counts(*index)).map(at).collect();
                let go = ranked.len() * percent as usize / 100;
                // In the lowest `go` only if all that stay are better.
                let better = ranked.iter().filter(|value| **value > at(me)).count();
                go > 0 && better >= ranked.len() - go
            }
        }
    }

    pub(super) fn kind(dice: &mut Dice) -> PolicyKind {
        match dice.below(5) {
            0 => PolicyKind::BanditFactor(0.05 + dice.below(10) as f64 / 10.0),
            1 => PolicyKind::BanditAmount(0.05 + dice.below(10) as f64 / 10.0),
            2 => PolicyKind::MedianStopping,
            _ => PolicyKind::Truncation {
                percent: 1 + dice.below(99) as u32,
                exclude_finished: dice.below(2) == 0,
            },
        }
    }
}

/// Trials log in a random order, end, and are judged at each logging, by both.
fn history(seed: u64, stops: &mut usize) {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9) | 1);
    let goal = if dice.below(2) == 0 { Goal::Minimize } else { Goal::Maximize };
    let (every, delay) = (1 + dice.below(3) as u32, dice.below(6) as u32);
    let policy = Policy { kind: reference::kind(&mut dice), every, delay };
    policy.check().unwrap();
    let count = 1 + dice.below(12) as usize;
    let shift = dice.below(3) as f64 - 1.0;
    let mut known: Vec<(Curve, Tally)> = vec![(Curve::default(), Tally::new(goal, every.into())); count];
    let mut trials: Vec<reference::Trial> =
        (0..count).map(|_| reference::Trial { values: Vec::new(), ended: false }).collect();
    for _ in 0..40 * count {
        let me = dice.below(count as u64) as usize;
        if trials[me].ended || dice.below(50) == 0 {
            trials[me].ended = true;
            continue;
        }
        let value = match dice.below(20) {
            0 => f64::NAN,
            // Few different values, so that many are equal.
            _ => shift + dice.below(9) as f64 / 8.0,
        };
        trials[me].values.push(value);
        let point = known[me].1.log(value);
        let tally = known[me].1;
        known[me].0.extend(&tally, point);
        let n = trials[me].values.len();
        let expected =
            reference::cancels(policy.kind, (every as usize, delay as usize), goal, &trials, me, n);
        let seen = |index: usize| Seen {
            index: index as u32,
            curve: &known[index].0,
            has_ended: trials[index].ended,
        };
        let stop =
            point.and_then(|_| policy.judge(goal, (0..count).map(seen), seen(me), n / every as usize - 1));
        assert_eq!(
            stop.is_some(),
            expected,
            "seed {seed}, {policy:?}, {goal:?}, trial {me} at {n}: {stop:?}"
        );
        if let Some(stop) = stop {
            assert_eq!(stop.interval, n as u64);
            *stops += 1;
            trials[me].ended = true;
        }
    }
}

#[test]
fn test_policies_end_whom_the_reference_ends() {
    let mut stops = 0;
    (1..=1000).for_each(|seed| history(seed, &mut stops));
    assert!(stops > 1000, "the histories say too little: {stops}");
}

#[test]
fn test_the_example_of_the_reference() {
    let curves: Vec<Curve> = [0.8, 0.67, 0.66]
        .map(|value| {
            let mut tally = Tally::new(Goal::Maximize, 1);
            let point = tally.log(value);
            let mut curve = Curve::default();
            curve.extend(&tally, point);
            curve
        })
        .into();
    let seen = |index: usize| Seen { index: index as u32, curve: &curves[index], has_ended: false };
    let policy = Policy { kind: PolicyKind::BanditFactor(0.2), every: 1, delay: 0 };
    let judge = |index: usize| policy.judge(Goal::Maximize, (0..3).map(seen), seen(index), 0);
    assert_eq!((judge(0), judge(1)), (None, None));
    let stop = judge(2).unwrap();
    assert_eq!(
        stop.to_string(),
        "bandit at interval 1: its best, 0.66, is worse than 0.6666666666666667, which is 0.8 of trial 0 with slack_factor 0.2"
    );
    let back: Stop = serde_json::from_str(&serde_json::to_string(&stop).unwrap()).unwrap();
    assert_eq!(back, stop);
}

proptest! {
    #[test]
    fn test_a_sweep_comes_back_from_json(seed in any::<u64>(), q in 0.1_f64..3.0, upper in 1_u64..1000) {
        let sweep = sweep(
            space([
                ("a", Distribution::Qnormal { mu: q - 1.0, sigma: q, q }),
                ("b", Distribution::Randint { upper }),
                ("c", Distribution::Choice(vec![whole(1), Alternative::Space(nested())])),
            ]),
            random(seed),
        );
        let back: Sweep = serde_json::from_str(&serde_json::to_string(&sweep).unwrap()).unwrap();
        prop_assert_eq!(&back, &sweep);
        let values = sweep.drawn(seed, 5, 0);
        let back: Values = serde_json::from_str(&serde_json::to_string(&values).unwrap()).unwrap();
        prop_assert_eq!(back, values);
    }

    #[test]
    fn test_a_curve_comes_back_from_json(values in proptest::collection::vec(-1e300_f64..1e300, 0..30), nan in any::<bool>()) {
        let mut curve = Curve::default();
        let mut tally = Tally::new(Goal::Minimize, 2);
        if nan {
            let point = tally.log(f64::NAN);
            curve.extend(&tally, point);
        }
        for value in values {
            let point = tally.log(value);
            curve.extend(&tally, point);
        }
        let back: Curve = serde_json::from_str(&serde_json::to_string(&curve).unwrap()).unwrap();
        prop_assert_eq!(back, curve);
    }
}

fn logged(trial: &mut Tally, anew: bool, values: &[f64]) -> Logged {
    if anew {
        *trial = Tally::new(Goal::Maximize, 1);
    }
    let points = values.iter().filter_map(|value| trial.log(*value)).collect();
    Logged { anew, tally: *trial, points, names: BTreeSet::from(["acc".to_owned()]), is_over: false }
}

fn bandit() -> Sweep {
    let policy = Some(Policy { kind: PolicyKind::BanditAmount(0.2), every: 1, delay: 0 });
    let objective = Objective { goal: Goal::Maximize, metric: "acc".to_owned() };
    Sweep { policy, objective, ..sweep(space([("x", Distribution::Randint { upper: 9 })]), random(1)) }
}

#[test]
fn test_a_trial_is_ended_once_and_an_ended_one_never() {
    let (sweep, mut trials) = (bandit(), Trials::default());
    let mut tally = [Tally::new(Goal::Maximize, 1); 3];
    (0..3).for_each(|index| trials.begin(index, Values::new()));
    trials.observe(0, logged(&mut tally[0], false, &[0.9]));
    trials.observe(1, logged(&mut tally[1], false, &[0.1]));
    let decisions = trials.next(&sweep);
    assert!(matches!(&decisions[..], [Decision::Stop(1, stop)] if stop.had == Some(0.1)), "{decisions:?}");
    trials.observe(1, logged(&mut tally[1], false, &[0.1]));
    assert_eq!(trials.next(&sweep), []);
    trials.end(2, Verdict::Completed);
    trials.observe(2, logged(&mut tally[2], false, &[0.0]));
    // It completed without the metric.
    assert_eq!(trials.next(&sweep), [Decision::NoMetric(2)]);
    assert_eq!(trials.best(Goal::Maximize), None, "only what completed is best");
    trials.end(0, Verdict::Completed);
    assert_eq!(trials.best(Goal::Maximize), Some(Best { trial: 0, value: 0.9 }));
    assert_eq!(trials.next(&sweep), []);
}

#[test]
fn test_a_trial_that_ended_by_itself_is_not_judged_by_the_last_that_it_logged() {
    let (sweep, mut trials) = (bandit(), Trials::default());
    let mut tally = [Tally::new(Goal::Maximize, 1); 2];
    (0..2).for_each(|index| trials.begin(index, Values::new()));
    trials.observe(0, logged(&mut tally[0], false, &[0.9]));
    trials.observe(1, Logged { is_over: true, ..logged(&mut tally[1], false, &[0.1]) });
    assert_eq!(trials.next(&sweep), []);
    assert_eq!(trials.get(1).unwrap().curve.best, Some(0.1));
}

#[test]
fn test_an_attempt_that_starts_anew_counts_from_one() {
    let (sweep, mut trials) = (bandit(), Trials::default());
    let mut tally = [Tally::new(Goal::Maximize, 1); 2];
    (0..2).for_each(|index| trials.begin(index, Values::new()));
    trials.observe(0, logged(&mut tally[0], true, &[0.5, 0.9]));
    trials.observe(1, logged(&mut tally[1], true, &[0.4]));
    assert_eq!(trials.next(&sweep), []);
    trials.observe(1, logged(&mut tally[1], true, &[0.35]));
    assert_eq!((trials.get(1).unwrap().curve.count, trials.next(&sweep).len()), (1, 0));
    trials.observe(1, logged(&mut tally[1], false, &[0.5]));
    assert_eq!(trials.get(1).unwrap().curve.count, 2);
    assert!(matches!(&trials.next(&sweep)[..], [Decision::Stop(1, stop)] if stop.interval == 2));
}

#[test]
fn test_what_was_logged_before_a_restart_is_not_judged_again() {
    let (sweep, mut trials) = (bandit(), Trials::default());
    let mut tally = [Tally::new(Goal::Maximize, 1); 2];
    let done = Trial {
        curve: Curve { count: 1, last: Some(0.9), best: Some(0.9), points: vec![tally[0].log(0.9).unwrap()] },
        ..Trial::default()
    };
    trials.load(0, done, Some(Verdict::Completed));
    trials.load(1, Trial::default(), None);
    trials.observe(1, logged(&mut tally[1], true, &[0.1]));
    assert_eq!(trials.next(&sweep), []);
    trials.observe(1, logged(&mut tally[1], false, &[0.1]));
    assert!(matches!(&trials.next(&sweep)[..], [Decision::Stop(1, stop)] if stop.interval == 2));
}
