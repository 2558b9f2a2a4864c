//! A sweep as the keys of a job file.

use super::{Mapping, seconds};
use crate::yaml::Item;
use agent_model::JobId;
use agent_model::job::Array;
use agent_model::sweep::{
    Alternative, Distribution, Policy, PolicyKind, Sampling, Scalar, Space, Sweep, Values,
};

/// What of a job is written under `trial`.
const TRIAL: [&str; 5] = ["command", "code", "environment", "environment_variables", "distribution"];

/// The keys of the job that a trial is become those of the sweep.
pub(super) fn of_sweep(job: Mapping, sweep: &Sweep, array: Option<&Array>) -> Mapping {
    let Sweep { space, sampling, objective, policy, timeout, given, extends } = sweep;
    let (trial, rest): (Vec<_>, Vec<_>) =
        job.0.into_iter().partition(|(key, _)| TRIAL.contains(&key.as_str()));
    let mut whole = Mapping(vec![("type".to_owned(), "sweep".into())]);
    whole.add("trial", Item::Map(trial));
    whole.add("search_space", of_space(space));
    whole.add("sampling_algorithm", of_sampling(sampling));
    let goal = ("goal".to_owned(), objective.goal.name().into());
    let metric = ("primary_metric".to_owned(), objective.metric.as_str().into());
    whole.add("objective", Item::Map(vec![goal, metric]));
    if let Some(policy) = policy {
        whole.add("early_termination", of_policy(policy));
    }
    let mut limits = Mapping::default();
    let counted = array.and_then(|array| Array::counted(array.indices().len()).ok());
    let is_counted = array.map(Array::indices) == counted.as_ref().map(Array::indices);
    if let Some(array) = array.filter(|_| is_counted) {
        limits.number("max_total_trials", array.indices().len());
        limits.number("max_concurrent_trials", array.at_once().map_or(0, std::num::NonZeroU32::get));
    }
    limits.0.extend(timeout.map(|time| ("timeout".to_owned(), seconds(time))));
    for (key, item) in rest {
        match (key.as_str(), item) {
            ("limits", Item::Map(of_trial)) => {
                limits.0.extend(of_trial.into_iter().map(|(key, item)| {
                    (if key == "timeout" { "trial_timeout".to_owned() } else { key }, item)
                }))
            }
            ("array", _) if is_counted => {}
            (_, item) => whole.0.push((key, item)),
        }
    }
    whole.mapping("limits", limits);
    whole.text("extends", extends.as_ref().map(JobId::as_str).unwrap_or_default());
    let given = given.iter().map(|(index, values)| (index.to_string(), of_values(values)));
    whole.mapping("trials", Mapping(given.collect()));
    whole
}

fn of_scalar(scalar: &Scalar) -> Item {
    match scalar {
        Scalar::Text(text) => text.as_str().into(),
        number => Item::Number(number.to_string()),
    }
}

fn of_values(values: &Values) -> Item {
    Item::Map(values.iter().map(|(name, value)| (name.clone(), of_scalar(value))).collect())
}

fn of_space(space: &Space) -> Item {
    Item::Map(
        space.0.iter().map(|(name, distribution)| (name.clone(), of_distribution(distribution))).collect(),
    )
}

fn of_distribution(distribution: &Distribution) -> Item {
    let mut mapping = Mapping::default();
    mapping.add("type", distribution.name().into());
    let mut numbers = |numbers: &[(&str, f64)]| {
        for (key, number) in numbers {
            mapping.add(key, Item::Number(format!("{number:?}")));
        }
    };
    match *distribution {
        Distribution::Choice(ref among) => {
            let alternative = |alternative: &Alternative| match alternative {
                Alternative::Value(value) => of_scalar(value),
                Alternative::Space(space) => of_space(space),
            };
            mapping.add("values", Item::List(among.iter().map(alternative).collect()));
        }
        Distribution::Randint { upper } => mapping.add("upper", Item::Whole(upper)),
        Distribution::Uniform { min, max } | Distribution::Loguniform { min, max } => {
            numbers(&[("min_value", min), ("max_value", max)]);
        }
        Distribution::Quniform { min, max, q } | Distribution::Qloguniform { min, max, q } => {
            numbers(&[("min_value", min), ("max_value", max), ("q", q)]);
        }
        Distribution::Normal { mu, sigma } | Distribution::Lognormal { mu, sigma } => {
            numbers(&[("mu", mu), ("sigma", sigma)]);
        }
        Distribution::Qnormal { mu, sigma, q } | Distribution::Qlognormal { mu, sigma, q } => {
            numbers(&[("mu", mu), ("sigma", sigma), ("q", q)]);
        }
    }
    Item::Map(mapping.0)
}

fn of_sampling(sampling: &Sampling) -> Item {
    let mut mapping = Mapping::default();
    mapping.add("type", sampling.name().into());
    if let Sampling::Random { seed: Some(seed), .. } | Sampling::Bayesian { seed: Some(seed) } = sampling {
        mapping.add("seed", Item::Number(seed.to_string()));
    }
    if let Sampling::Random { sobol, logbase, .. } = sampling {
        if *sobol {
            mapping.add("rule", "sobol".into());
        }
        mapping.0.extend(logbase.map(|base| ("logbase".to_owned(), Item::Number(format!("{base:?}")))));
    }
    Item::Map(mapping.0)
}

fn of_policy(policy: &Policy) -> Item {
    let mut mapping = Mapping::default();
    mapping.add("type", policy.name().into());
    mapping.number("evaluation_interval", policy.every);
    mapping.number("delay_evaluation", policy.delay);
    match policy.kind {
        PolicyKind::BanditFactor(slack) => mapping.add("slack_factor", Item::Number(format!("{slack:?}"))),
        PolicyKind::BanditAmount(slack) => mapping.add("slack_amount", Item::Number(format!("{slack:?}"))),
        PolicyKind::MedianStopping => {}
        PolicyKind::Truncation { percent, exclude_finished } => {
            mapping.number("truncation_percentage", percent);
            if exclude_finished {
                mapping.add("exclude_finished_jobs", Item::Flag(true));
            }
        }
    }
    Item::Map(mapping.0)
}
