use std::time::Duration;

use super::*;
use crate::command_job;
use crate::job_text;
use agent_model::{Fault, JobDraft};

const FULL: &str = r"
type: Sweep
display_name: tune
trial:
  command: python train.py --lr ${{search_space.lr}} --n ${{inputs.n}} $[[--depth ${{search_space.depth}}]]
  code: ./src
  environment: {python: python3.11}
  environment_variables: {A: 1}
inputs: {n: 3}
sampling_algorithm: {type: Random, seed: 5, rule: sobol, logbase: 10}
search_space:
  lr: {type: loguniform, min_value: -6, max_value: -1}
  batch: {type: choice, values: [16, 32.0, true, adam]}
  model:
    type: choice
    values:
      - {depth: {type: randint, upper: 3}, kind: tree}
      - {width: {type: qnormal, mu: 10, sigma: 2.5, q: 2}}
objective: {goal: Maximize, primary_metric: test-accuracy}
early_termination: {type: bandit, slack_factor: 0.1, slack_amount: 0, evaluation_interval: 0, delay_evaluation: 5}
limits: {max_total_trials: 20, max_concurrent_trials: 4, timeout: 7200, trial_timeout: 600, grace: 5}
";

fn read(text: &str) -> JobDraft {
    command_job(text, &[]).unwrap_or_else(|refused| panic!("{}", Fault::from(refused))).draft
}

fn refused(text: &str) -> String {
    Fault::from(command_job(text, &[]).expect_err(text)).to_string()
}

#[test]
fn test_a_sweep_file_is_read_as_it_is() {
    let draft = read(FULL);
    let sweep = draft.sweep.as_deref().unwrap();
    assert_eq!(sweep.objective, Objective { goal: Goal::Maximize, metric: "test-accuracy".into() });
    assert_eq!(sweep.sampling, Sampling::Random { seed: Some(5), sobol: true, logbase: Some(10.0) });
    assert_eq!(sweep.policy, Some(Policy { kind: PolicyKind::BanditFactor(0.1), every: 1, delay: 5 }));
    assert_eq!(
        (sweep.timeout, draft.limits.timeout),
        (Some(Duration::from_secs(7200)), Some(Duration::from_secs(600)))
    );
    assert_eq!(draft.limits.grace, Some(Duration::from_secs(5)));
    assert_eq!(draft.array.as_ref().unwrap().to_string(), "0-19%4");
    let Distribution::Choice(among) = &sweep.space.0["batch"] else { panic!() };
    let plain = among.iter().map(|alternative| match alternative {
        Alternative::Value(value) => value.to_string(),
        Alternative::Space(_) => String::new(),
    });
    assert_eq!(plain.collect::<Vec<_>>(), ["16", "32.0", "True", "adam"]);
    let names: Vec<&str> = sweep.space.names().into_iter().collect();
    assert_eq!(names, ["batch", "depth", "kind", "lr", "width"]);
    assert_eq!(draft.environment_variables["A"], "1");
    // The optional part waits for the draw.
    assert!(draft.command.ends_with("$[[--depth ${{search_space.depth}}]]"), "{}", draft.command);
}

#[test]
fn test_a_trial_has_its_values() {
    let spec = read(FULL).validate().unwrap();
    let id = "tune".parse().unwrap();
    let values = |texts: &[(&str, &str)]| -> Values {
        texts.iter().map(|(name, text)| ((*name).to_owned(), Scalar::read(text))).collect()
    };
    let deep = spec.trial(&id, 3, &values(&[("lr", "0.01"), ("depth", "2"), ("kind", "tree")]));
    assert_eq!(deep.command, "python train.py --lr 0.01 --n ${{inputs.n}} --depth 2");
    let wide = spec.trial(&id, 4, &values(&[("lr", "1e-7"), ("width", "8")]));
    assert_eq!(wide.command, "python train.py --lr 1e-07 --n ${{inputs.n}} ".replace("1e-07", "1e-7"));
    assert_eq!(wide.environment_variables["AZUREML_SWEEP_width"], "8");
    assert_eq!(wide.environment_variables["AZUREML_PARAMETER_lr"], "1e-7");
    assert_eq!(wide.environment_variables["AGENTD_ARRAY_INDEX"], "4");
    assert!(wide.sweep.is_none() && wide.array.is_none());
    assert!(JobDraft::from(wide).validate().is_ok(), "a node reads it");
}

#[test]
fn test_what_is_written_is_read_as_the_same_sweep() {
    let plain = "type: sweep\ntrial: {command: 'true'}\nsearch_space: {x: {type: uniform, min_value: 0.1, max_value: 1}}\nobjective: {goal: minimize, primary_metric: m}\n";
    let others = [
        "sampling_algorithm: bayesian\nlimits: {max_total_trials: 3}\n",
        "sampling_algorithm: {type: bayesian, seed: 3}\narray: 2,5%1\nextends: tune-1\ntrials: {2: {x: 0.5}, 5: {x: a}}\n",
        "early_termination: {type: median_stopping, evaluation_interval: 2}\nlimits: {timeout: 60}\n",
        "early_termination: {type: truncation_selection, truncation_percentage: 20, exclude_finished_jobs: true}\n",
        "early_termination: {type: bandit, slack_amount: 0.2}\nresources: {gpus: 1}\nretry: {max_attempts: 2}\n",
    ];
    for text in others.iter().map(|other| format!("{plain}{other}")).chain([FULL.replace("code: ./src", "")])
    {
        let draft = read(&text);
        let draft = JobDraft { environment: agent_model::EnvSpec::host(), ..draft };
        let written = job_text(&draft);
        let again = JobDraft { environment: agent_model::EnvSpec::host(), ..read(&written) };
        assert_eq!(again, draft, "{written}");
    }
    let grid = format!(
        "{}sampling_algorithm: grid\n",
        plain.replace("type: uniform, min_value: 0.1, max_value: 1", "type: choice, values: [1, 2, 3]")
    );
    assert_eq!(read(&grid).array.unwrap().to_string(), "0-2", "a grid ends where it is exhausted");
}

#[test]
fn test_what_makes_no_sweep_is_refused_by_name() {
    for (from, to, said) in [
        ("python train.py", "python ${{search_space.learning}}", "which the job does not define"),
        ("  command:", "  comand:", "the job has no `command`"),
        ("type: loguniform", "type: loguniforn", "did you mean `loguniform`?"),
        ("min_value: -6, ", "", "has no `min_value`"),
        ("max_value: -1", "max_value: -1, q: 1", "`search_space.lr.q` is no key of `loguniform`"),
        ("min_value: -6", "min_value: x", "expected a number"),
        ("goal: Maximize, ", "", "`objective` has no `goal`"),
        (", primary_metric: test-accuracy", "", "`objective` has no `primary_metric`"),
        ("slack_amount: 0", "slack_amount: 1", "needs one slack"),
        ("slack_factor: 0.1", "slack_factor: 0", "needs one slack"),
        ("type: bandit", "type: median_stopping", "takes no slack"),
        ("type: Random", "type: grid", "`sampling_algorithm.rule` is only for `random`"),
        ("type: Random", "type: genetic", "is not one of"),
        ("max_total_trials: 20", "max_total_trials: 20000", "at most 10000 trials"),
        ("max_total_trials: 20", "max_total_trials: 0", "expected a whole number of at least 1"),
        ("inputs: {n: 3}", "inputs: {n: 3}\ncommand: x", "stands in `trial` and beside it"),
    ] {
        assert!(FULL.contains(from), "{from}");
        let text = refused(&FULL.replacen(from, to, 1));
        assert!(text.contains(said), "{to}: {text}");
        assert!(text.contains("line ") || said.contains("does not define"), "{text}");
    }
    assert!(refused("type: sweep\nsearch_space: {}\n").contains("has no `trial`"));
    assert!(refused("type: sweep\ntrial: ./train.yml\n").contains("names a component, which is not read"));
    let list = FULL.replace("search_space:", "search_space: [1]\nx:").replace("type: loguniform", "t: x");
    assert!(refused(&list).contains("AutoML"));
}

#[test]
fn test_a_policy_compares_a_thousand_trials_at_the_most() {
    let many =
        |total: u32| read(&FULL.replace("max_total_trials: 20", &format!("max_total_trials: {total}")));
    assert!(many(1000).validate().is_ok());
    assert!(many(1001).validate().unwrap_err().what.contains("1001 trials"));
    let draft = many(10_000);
    let free = agent_model::sweep::Sweep { policy: None, ..*draft.sweep.clone().unwrap() };
    assert!(JobDraft { sweep: Some(Box::new(free)), ..draft }.validate().is_ok());
}

#[test]
fn test_bounds_that_look_like_values_are_told() {
    let text = FULL.replace("min_value: -6, max_value: -1", "min_value: 0.001, max_value: 0.1");
    let warnings = command_job(&text, &[]).unwrap().warnings;
    assert!(warnings.iter().any(|warning| warning.message.contains("are logarithms")), "{warnings:?}");
}

#[test]
fn test_distributions_of_a_command_line() {
    assert_eq!(written("loguniform(-6,-1)"), Ok(Distribution::Loguniform { min: -6.0, max: -1.0 }));
    assert_eq!(written(" QNormal(1, 2,0.5) "), Ok(Distribution::Qnormal { mu: 1.0, sigma: 2.0, q: 0.5 }));
    assert_eq!(written("randint(4)"), Ok(Distribution::Randint { upper: 4 }));
    let among = ["16", "a b"].map(|text| Alternative::Value(Scalar::read(text)));
    assert_eq!(written("choice(16, a b)"), Ok(Distribution::Choice(among.into())));
    for (text, said) in [
        ("0.1", "write it as"),
        ("uniform(1", "write it as"),
        ("unifrom(1,2)", "is no distribution"),
        ("uniform(1)", "needs `max_value` too"),
        ("uniform(1,2,3)", "one number too many"),
        ("uniform(a,2)", "`a` is no number"),
    ] {
        assert!(written(text).unwrap_err().contains(said), "{text}");
    }
}
