//! The keys that make a command job a sweep.
//!
//! Owns `trial`, `search_space`, `sampling_algorithm`, `objective`, `early_termination` and the limits of a sweep. What
//! is in `trial` is put beside the other keys, so that a trial is read by the rules of every command job.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use super::keys;
use crate::section::{Mistakes, Rejection, Section, Warning, nearest, within};
use crate::yaml::{Key, Node, Place, Value};
use agent_model::JobId;
use agent_model::job::{Array, MAX_TASKS};
use agent_model::sweep::{
    Alternative, Distribution, Goal, Objective, Policy, PolicyKind, Sampling, Scalar, Space, Sweep, Values,
};

/// Trials of a sweep that does not say how many.
const TOTAL: u32 = 1000;

/// Takes the sweep out of the document, with its trials as the tasks of an array; what is left of the document is the
/// job that a trial is.
pub(super) fn sweep(
    top: &mut Section,
    warnings: &mut Vec<Warning>,
    wrong: &mut Mistakes,
) -> Result<(Option<Box<Sweep>>, Option<Array>), Rejection> {
    let place = top.place();
    take_trial(top, warnings)?;
    let space = wrong.note(read_space(top, place, warnings).map(Some));
    let sampling = wrong.note(read_sampling(top, warnings).map(Some));
    let objective = wrong.note(read_objective(top, place, warnings).map(Some));
    let policy = wrong.note(read_policy(top, warnings));
    let given = wrong.note(read_given(top));
    let extends = wrong.note(read_extends(top));
    let (total, at_once, timeout) = wrong.note(read_limits(top, place, warnings));
    let (Some(space), Some(sampling), Some(objective)) = (space, sampling, objective) else {
        return Ok((None, None));
    };
    let sweep = Sweep { space, sampling, objective, policy, timeout, given, extends };
    wrong.note(sweep.check().map_err(|fault| {
        Rejection::invalid(place, fault.what.clone()).fix(fault.fix.clone().unwrap_or_default())
    }));
    let count = sweep.size(total.map_or(TOTAL, NonZeroU32::get).min(MAX_TASKS));
    let trials = Array::counted(count).and_then(|array| Array::new(array.indices().clone(), at_once));
    Ok((Some(Box::new(sweep)), trials.ok()))
}

/// The mapping of `trial` is put beside the other keys. Resources of the sweep win.
fn take_trial(top: &mut Section, warnings: &mut Vec<Warning>) -> Result<(), Rejection> {
    let Some(node) = top.node("trial") else {
        return Err(Rejection::invalid(top.place(), "the sweep has no `trial`")
            .fix("write what is to be tried under it: `trial: {command: python train.py --lr ${{search_space.lr}}}`"));
    };
    if let Value::Scalar(text) = &node.value {
        return Err(Rejection::unsupported(
            node.place,
            format!("`trial: {text}` names a component, which is not read"),
            "write the trial as a mapping with `command`, `code` and `environment`",
        ));
    }
    let mut trial = Section::open(node, "trial", &keys::TRIAL)?;
    for key in ["command", "code", "environment", "environment_variables", "distribution", "resources"] {
        let Some(node) = trial.node(key) else { continue };
        let taken = top.at_node(key).map(|other| other.place);
        match taken {
            None => top.put(Key { place: node.place, text: key.to_owned() }, node),
            Some(_) if key == "resources" => {}
            Some(place) => {
                let message = format!("`{key}` stands in `trial` and beside it");
                return Err(Rejection::invalid(place, message).fix("leave one of them out"));
            }
        }
    }
    trial.finish(warnings);
    Ok(())
}

fn read_space(top: &mut Section, place: Place, warnings: &mut Vec<Warning>) -> Result<Space, Rejection> {
    let Some(node) = top.node("search_space") else {
        return Err(Rejection::invalid(place, "the sweep has no `search_space`").fix(
            "give each hyperparameter a distribution, for example `lr: {type: uniform, min_value: 0.01, max_value: 0.1}`",
        ));
    };
    space_of(node, "search_space", warnings)
}

fn space_of(node: Node, path: &str, warnings: &mut Vec<Warning>) -> Result<Space, Rejection> {
    if let Value::List(_) = node.value {
        let message = format!("`{path}` is a list: this is an AutoML job, which is not run");
        return Err(Rejection::unsupported(node.place, message, "write a sweep of your own training script"));
    }
    let mut space = Space::default();
    for (key, node) in node.map().map_err(|at| within(path, at))?.rest() {
        let name = format!("{path}.{}", key.text);
        let distribution = match &node.value {
            // In an alternative of a choice a plain value stands for itself.
            Value::Scalar(text) => Distribution::Choice(vec![Alternative::Value(Scalar::read(text))]),
            _ => distribution_of(node, &name, warnings)?,
        };
        space.0.insert(key.text, distribution);
    }
    Ok(space)
}

fn distribution_of(node: Node, path: &str, warnings: &mut Vec<Warning>) -> Result<Distribution, Rejection> {
    let place = node.place;
    let mut entries = node.map().map_err(|at| within(path, at))?;
    let Some(kind) = entries.take("type") else {
        return Err(Rejection::invalid(place, format!("`{path}` has no `type`"))
            .fix(format!("write one of {}", Distribution::WORDS.join(", "))));
    };
    let word = kind.text().map_err(|at| within(path, at))?.trim().to_ascii_lowercase();
    let mut values = Vec::new();
    if word == "choice" {
        let list = entries.take("values");
        let list = list.as_ref().map(Node::list).transpose().map_err(|at| within(path, at))?;
        for node in list.unwrap_or_default() {
            values.push(match &node.value {
                Value::Scalar(text) => Alternative::Value(Scalar::read(text)),
                _ => Alternative::Space(space_of(node.clone(), path, warnings)?),
            });
        }
    }
    let mut numbers = BTreeMap::new();
    for (key, node) in entries.rest() {
        let name = format!("{path}.{}", key.text);
        let number = node.parsed::<f64>("a number").map_err(|at| within(&name, at))?;
        numbers.insert(key.text, (number, key.place));
    }
    let distribution =
        distribution_from(&word, values, &mut |name| numbers.remove(name).map(|(number, _)| number));
    let distribution = distribution.map_err(|missing| match missing {
        None => Rejection::invalid(kind.place, format!("`{path}.type: {word}` is no distribution")).fix(
            match nearest(&word, &Distribution::WORDS) {
                Some(meant) => format!("did you mean `{meant}`?"),
                None => format!("write one of {}", Distribution::WORDS.join(", ")),
            },
        ),
        Some(key) => Rejection::invalid(place, format!("`{path}` is `{word}` and has no `{key}`"))
            .fix(format!("add `{key}`")),
    })?;
    if let Some((key, (_, place))) = numbers.into_iter().next() {
        let message = format!("`{path}.{key}` is no key of `{word}`");
        return Err(Rejection::invalid(place, message).fix("leave it out"));
    }
    if let Distribution::Loguniform { min, max } = distribution
        && min >= 0.0
        && max.exp() < 10.0
    {
        let message = format!(
            "`{path}`: bounds of `loguniform` are logarithms, so values lie between {} and {}",
            min.exp(),
            max.exp()
        );
        warnings.push(Warning::new(place, message));
    }
    Ok(distribution)
}

/// A distribution by its word and its numbers; the name of the number that is missing, or `None` where there is no
/// distribution of the word.
fn distribution_from(
    word: &str,
    values: Vec<Alternative>,
    number: &mut impl FnMut(&'static str) -> Option<f64>,
) -> Result<Distribution, Option<&'static str>> {
    let mut need = |name: &'static str| number(name).ok_or(Some(name));
    Ok(match word {
        "choice" => Distribution::Choice(values),
        "randint" => {
            let upper = need("upper")?;
            let is_whole = upper.fract() == 0.0 && upper >= 0.0;
            Distribution::Randint { upper: if is_whole { upper as u64 } else { 0 } }
        }
        "uniform" => Distribution::Uniform { min: need("min_value")?, max: need("max_value")? },
        "loguniform" => Distribution::Loguniform { min: need("min_value")?, max: need("max_value")? },
        "quniform" => {
            Distribution::Quniform { min: need("min_value")?, max: need("max_value")?, q: need("q")? }
        }
        "qloguniform" => {
            Distribution::Qloguniform { min: need("min_value")?, max: need("max_value")?, q: need("q")? }
        }
        "normal" => Distribution::Normal { mu: need("mu")?, sigma: need("sigma")? },
        "lognormal" => Distribution::Lognormal { mu: need("mu")?, sigma: need("sigma")? },
        "qnormal" => Distribution::Qnormal { mu: need("mu")?, sigma: need("sigma")?, q: need("q")? },
        "qlognormal" => Distribution::Qlognormal { mu: need("mu")?, sigma: need("sigma")?, q: need("q")? },
        _ => return Err(None),
    })
}

/// A distribution as it is written on a command line: `loguniform(-6,-1)`, `choice(16,32)`, `uniform(0.1,1)`.
pub fn written(text: &str) -> Result<Distribution, String> {
    let form = || "write it as `loguniform(-6,-1)` or `choice(16,32,64)`".to_owned();
    let (word, rest) = text.trim().split_once('(').ok_or_else(form)?;
    let inside = rest.strip_suffix(')').ok_or_else(form)?;
    let word = word.trim().to_ascii_lowercase();
    let parts: Vec<&str> = inside.split(',').map(str::trim).collect();
    if word == "choice" {
        let values = parts.iter().filter(|part| !part.is_empty());
        return Ok(Distribution::Choice(values.map(|part| Alternative::Value(Scalar::read(part))).collect()));
    }
    let mut numbers = Vec::new();
    for part in &parts {
        numbers.push(part.parse::<f64>().map_err(|_| format!("`{part}` is no number"))?);
    }
    let mut left = numbers.into_iter();
    let read = distribution_from(&word, Vec::new(), &mut |_| left.next());
    let read = read.map_err(|missing| match missing {
        None => format!("`{word}` is no distribution; write one of {}", Distribution::WORDS.join(", ")),
        Some(name) => format!("`{word}` needs `{name}` too; {}", form()),
    })?;
    match left.next() {
        Some(more) => Err(format!("`{more}` is one number too many for `{word}`")),
        None => Ok(read),
    }
}

fn read_sampling(top: &mut Section, warnings: &mut Vec<Warning>) -> Result<Sampling, Rejection> {
    let is_mapping =
        top.at_node("sampling_algorithm").is_some_and(|node| matches!(node.value, Value::Map(_)));
    let mut seed = None;
    let (word, place, rule, logbase) = if is_mapping {
        let Some(mut section) = top.section("sampling_algorithm")? else { return Ok(Sampling::usual()) };
        let place = section.place();
        let word = section.word("type")?.unwrap_or("random");
        seed = section.parsed::<u64>("seed", "a whole number")?;
        let rule = section.word("rule")?;
        let base = section.text("logbase")?;
        let base = base.map(|text| match text.trim() {
            "e" => Ok(None),
            text => text.parse::<f64>().map(Some),
        });
        let wrong = |_| {
            Rejection::invalid(place, "`sampling_algorithm.logbase` is no number")
                .fix("write a number or `e`")
        };
        let base = base.transpose().map_err(wrong)?.flatten();
        section.finish(warnings);
        (word, place, rule, base)
    } else {
        let Some(node) = top.node("sampling_algorithm") else { return Ok(Sampling::usual()) };
        let text = node.text().map_err(|at| within("sampling_algorithm", at))?.trim().to_ascii_lowercase();
        let word = Sampling::WORDS.into_iter().find(|word| *word == text);
        let word = word.ok_or_else(|| {
            Rejection::invalid(node.place, format!("`sampling_algorithm: {text}` is none"))
                .fix(format!("write one of {}", Sampling::WORDS.join(", ")))
        })?;
        (word, node.place, None, None)
    };
    let only_random = |key: &str| {
        let message = format!("`sampling_algorithm.{key}` is only for `random`");
        Err(Rejection::invalid(place, message).fix("leave it out, or sample at `random`"))
    };
    match word {
        "random" => Ok(Sampling::Random { seed, sobol: rule == Some("sobol"), logbase }),
        _ if rule.is_some() => only_random("rule"),
        _ if logbase.is_some() => only_random("logbase"),
        "grid" => Ok(Sampling::Grid),
        _ => Ok(Sampling::Bayesian { seed }),
    }
}

fn read_objective(
    top: &mut Section,
    place: Place,
    warnings: &mut Vec<Warning>,
) -> Result<Objective, Rejection> {
    let Some(mut section) = top.section("objective")? else {
        return Err(Rejection::invalid(place, "the sweep has no `objective`")
            .fix("write `objective: {goal: minimize, primary_metric: loss}`"));
    };
    let place = section.place();
    let goal = section.word("goal")?.and_then(Goal::parse);
    let metric = section.text("primary_metric")?;
    section.finish(warnings);
    match (goal, metric) {
        (Some(goal), Some(metric)) => Ok(Objective { goal, metric }),
        (None, _) => {
            Err(Rejection::invalid(place, "`objective` has no `goal`").fix("write `minimize` or `maximize`"))
        }
        (_, None) => Err(Rejection::invalid(place, "`objective` has no `primary_metric`")
            .fix("name the metric that the trials log")),
    }
}

fn read_policy(top: &mut Section, warnings: &mut Vec<Warning>) -> Result<Option<Policy>, Rejection> {
    let Some(mut section) = top.section("early_termination")? else { return Ok(None) };
    let place = section.place();
    let invalid = |message: &str, fix: &str| Err(Rejection::invalid(place, message).fix(fix));
    let word = section.word("type")?;
    let every = section.parsed::<u32>("evaluation_interval", "a whole number")?;
    let delay = section.parsed::<u32>("delay_evaluation", "a whole number")?.unwrap_or(0);
    // The SDK writes 0 for both where only one was given.
    let factor = section.parsed::<f64>("slack_factor", "a number")?.filter(|slack| *slack != 0.0);
    let amount = section.parsed::<f64>("slack_amount", "a number")?.filter(|slack| *slack != 0.0);
    let percent = section.parsed::<u32>("truncation_percentage", "a whole number")?;
    let exclude_finished = section.flag("exclude_finished_jobs")?;
    section.finish(warnings);
    let kind = match (word, factor, amount) {
        (None, ..) => {
            return invalid(
                "`early_termination` has no `type`",
                "write `type: bandit`, `median_stopping` or `truncation_selection`",
            );
        }
        (Some("bandit"), Some(factor), None) => PolicyKind::BanditFactor(factor),
        (Some("bandit"), None, Some(amount)) => PolicyKind::BanditAmount(amount),
        (Some("bandit"), ..) => {
            return invalid(
                "`early_termination` needs one slack",
                "write either `slack_factor` or `slack_amount`",
            );
        }
        (Some(word), Some(_), _) | (Some(word), _, Some(_)) => {
            return invalid(&format!("`{word}` takes no slack"), "leave it out, or write `type: bandit`");
        }
        (Some("median_stopping"), ..) => PolicyKind::MedianStopping,
        (Some(_), ..) => {
            let Some(percent) = percent else {
                return invalid(
                    "`truncation_selection` has no `truncation_percentage`",
                    "write a whole number from 1 to 99",
                );
            };
            PolicyKind::Truncation { percent, exclude_finished: exclude_finished.unwrap_or(false) }
        }
    };
    if !matches!(kind, PolicyKind::Truncation { .. }) && (percent.is_some() || exclude_finished.is_some()) {
        return invalid(
            "`truncation_percentage` and `exclude_finished_jobs` are for `truncation_selection`",
            "leave them out",
        );
    }
    // The SDK writes 0 where nothing was given, and means 1.
    Ok(Some(Policy { kind, every: every.unwrap_or(1).max(1), delay }))
}

fn read_given(top: &mut Section) -> Result<BTreeMap<u32, Values>, Rejection> {
    let Some(node) = top.node("trials") else { return Ok(BTreeMap::new()) };
    let mut given = BTreeMap::new();
    for (key, node) in node.map().map_err(|at| within("trials", at))?.rest() {
        let index = key.text.parse().map_err(|_| {
            Rejection::invalid(key.place, format!("`trials.{}` is no index of a trial", key.text))
                .fix("write a number")
        })?;
        let name = format!("trials.{index}");
        let mut values = Values::new();
        for (key, node) in node.map().map_err(|at| within(&name, at))?.rest() {
            values.insert(key.text, Scalar::read(node.text().map_err(|at| within(&name, at))?));
        }
        given.insert(index, values);
    }
    Ok(given)
}

fn read_extends(top: &mut Section) -> Result<Option<JobId>, Rejection> {
    let Some(node) = top.node("extends") else { return Ok(None) };
    let text = node.text().map_err(|at| within("extends", at))?;
    let refuse = |error: agent_model::ids::IdError| {
        Rejection::invalid(node.place, format!("`extends`: {error}"))
            .fix("write the name of a sweep that has ended")
    };
    text.parse().map(Some).map_err(refuse)
}

/// How many trials, how many at a time, and how long all of them may take.
type SweepLimits = (Option<NonZeroU32>, Option<NonZeroU32>, Option<std::time::Duration>);

/// Takes what is the sweep's out of `limits`; the rest stays, with the limit of a trial as that of the job.
fn read_limits(
    top: &mut Section,
    place: Place,
    warnings: &mut Vec<Warning>,
) -> Result<SweepLimits, Rejection> {
    let Some(node) = top.node("limits") else {
        let message = format!("`limits.max_total_trials` is missing: at most {TOTAL} trials are made");
        warnings.push(Warning::new(place, message));
        return Ok((None, None, None));
    };
    let at = node.place;
    let mut section = Section::open(node, "limits", &keys::LIMITS)?;
    let count = "a whole number of at least 1";
    let total = section.parsed::<NonZeroU32>("max_total_trials", count)?;
    let at_once = section.parsed::<NonZeroU32>("max_concurrent_trials", count)?;
    let timeout = super::read_timeout(&mut section, "timeout")?;
    if let Some(trial) = section.node("trial_timeout") {
        section.put(Key { place: trial.place, text: "timeout".to_owned() }, trial);
    }
    if let Some(total) = total.filter(|total| total.get() > MAX_TASKS) {
        let message = format!("`limits.max_total_trials` is {total}: a sweep has at most {MAX_TASKS} trials");
        return Err(Rejection::invalid(at, message).fix("write a lower number"));
    }
    let rest = Value::Map(section.into_entries());
    top.put(Key { place: at, text: "limits".to_owned() }, Node { place: at, value: rest });
    Ok((total, at_once, timeout))
}

#[cfg(test)]
mod tests;
