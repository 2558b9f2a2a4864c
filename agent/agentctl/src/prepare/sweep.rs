//! What the options of a sweep make of a job.

use std::collections::BTreeMap;

use agent_model::expr::{self, Reference};
use agent_model::job::{Array, Input, JobDraft};
use agent_model::sweep::{Goal, Objective, Sampling, Space, Sweep};
use agent_model::{Code, Fault};

use crate::cli::SweepSettings;

/// Makes a job the sweep that was asked for: its distributions are added to those of the file, and an input of the same
/// name is drawn from then on.
pub(crate) fn make_sweep(
    draft: &mut JobDraft,
    settings: &SweepSettings,
    drawn: &[(String, String)],
) -> Result<(), Fault> {
    let invalid = |what: String, fix: &str| Fault::new(Code::JobInvalid, what).fix(fix);
    let objective = |goal, metric: &String| Objective { goal, metric: metric.clone() };
    let asked = settings.minimize.as_ref().map(|metric| objective(Goal::Minimize, metric));
    let asked = asked.or_else(|| settings.maximize.as_ref().map(|metric| objective(Goal::Maximize, metric)));
    let mut sweep = match (draft.sweep.take(), asked) {
        (Some(sweep), None) => *sweep,
        (Some(sweep), Some(objective)) => Sweep { objective, ..*sweep },
        (None, Some(objective)) => Sweep {
            space: Space::default(),
            sampling: Sampling::usual(),
            objective,
            policy: None,
            timeout: None,
            given: BTreeMap::new(),
            extends: None,
        },
        (None, None) => {
            return Err(invalid(
                "nobody says which metric is to become better".to_owned(),
                "name the one that the trials log: --minimize loss, or --maximize accuracy",
            ));
        }
    };
    for (name, text) in drawn {
        let distribution = agent_jobfile::written_distribution(text);
        let distribution = distribution
            .map_err(|why| invalid(format!("`--set {name}={text}` names no distribution"), &why))?;
        sweep.space.0.insert(name.clone(), distribution);
    }
    if let Some(word) = &settings.sampling {
        sweep.sampling = word.clone();
    }
    if let (Some(seed), Sampling::Random { seed: known, .. } | Sampling::Bayesian { seed: known }) =
        (settings.seed, &mut sweep.sampling)
    {
        *known = Some(seed);
    }
    let names: Vec<String> = drawn.iter().map(|(name, _)| name.clone()).collect();
    for name in &names {
        if let Some(Input::Literal(_)) = draft.inputs.get(name) {
            draft.inputs.remove(name);
        }
    }
    let is_drawn = |name: &String| names.contains(name) && !draft.inputs.contains_key(name);
    draft.command = expr::substitute(&draft.command, |reference| match reference {
        Reference::Input(name) if is_drawn(name) => Reference::Drawn(name.clone()).to_string(),
        other => other.to_string(),
    })?;
    let before = draft.array.as_ref().map(|array| array.indices().len());
    let total = sweep.size(settings.max.or(before).unwrap_or(1));
    let at_once = settings.at_once.or_else(|| draft.array.as_ref().and_then(Array::at_once));
    let trials = Array::counted(total).and_then(|array| Array::new(array.indices().clone(), at_once));
    draft.array = Some(trials.map_err(|error| invalid(format!("--max: {error}"), "give another number"))?);
    draft.sweep = Some(Box::new(sweep));
    Ok(())
}
