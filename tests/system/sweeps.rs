//! Sweeps: a job that is tried with many values, of which the best trial is what counts.

use std::fs;
use std::time::Duration;

use agent_tests::{Host, eventually};
use serde_json::Value;

/// A host whose daemon has room for so many jobs.
fn host(slots: &str) -> Host {
    let mut host = Host::new();
    host.set("AGENTD_SLOTS", slots);
    host.start();
    host
}

const HEAD: &str = "type: sweep\nobjective: {goal: minimize, primary_metric: loss}\n";

fn submit(host: &Host, rest: &str) -> String {
    let dir = host.project("sweep", &[("job.yml", &format!("{HEAD}{rest}"))]);
    host.ctl(&["submit", dir.to_str().unwrap()]).ok().stdout.trim().to_owned()
}

/// A command that appends a value of a metric.
fn log(metric: &str, value: &str) -> String {
    format!(r#"printf '{{"metric": "{metric}", "value": %s}}\n' {value} >>"$AGENTD_METRICS""#)
}

fn trials(host: &Host, sweep: &str) -> Vec<Value> {
    host.show(sweep)["trials"].as_array().unwrap().clone()
}

#[test]
fn test_six_trials_over_a_kill_of_the_controller_of_which_a_policy_ends_one() {
    let mut host = host("3");
    let seen = host.home().join("seen");
    // The third point of the grid is bad each time that it logs, and would go on for an hour. It goes on logging: a
    // policy looks at a trial when that logs, so one that logs once, before all others, is compared with nobody.
    let command = format!(
        "echo $AZUREML_SWEEP_x $AZUREML_PARAMETER_x ${{{{search_space.x}}}} >>{}; {}; mkdir -p outputs; \
         echo ${{{{search_space.x}}}} >outputs/x; if test ${{{{search_space.x}}}} = 90; then \
         for i in $(seq 3600); do sleep 1; {}; done; fi; sleep 2; {}",
        seen.display(),
        log("loss", "${{search_space.x}}"),
        log("loss", "${{search_space.x}}"),
        log("loss", "$((${{search_space.x}} + 1))"),
    );
    let rest = format!(
        "trial:\n  command: >-\n    {command}\nsampling_algorithm: grid\nsearch_space:\n  \
         x: {{type: choice, values: [30, 20, 90, 10, 40, 50]}}\nlimits: {{max_total_trials: 100, max_concurrent_trials: 3}}\n\
         early_termination: {{type: bandit, slack_amount: 55}}\n"
    );
    let sweep = submit(&host, &rest);
    eventually("the bad trial is ended", Duration::from_secs(60), || {
        trials(&host, &sweep).iter().any(|trial| trial["trial"]["stopped"] != "").then_some(())
    });
    let before = trials(&host, &sweep);
    host.kill();
    host.start();
    let values = |trials: &[Value]| {
        let mut values: Vec<(u64, String)> = trials
            .iter()
            .map(|trial| (trial["index"].as_u64().unwrap(), trial["trial"]["values"].to_string()))
            .collect();
        values.sort();
        values
    };
    host.ctl(&["wait", &sweep]).ok();
    let after = values(&trials(&host, &sweep));
    assert!(values(&before).iter().all(|before| after.contains(before)), "{after:?}");
    assert_eq!(after.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    let lines = fs::read_to_string(&seen).unwrap();
    let mut lines: Vec<&str> = lines.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        ["10 10 10", "20 20 20", "30 30 30", "40 40 40", "50 50 50", "90 90 90"],
        "no trial ran twice"
    );
    // The table is sorted by what is better, and names who ended whom by which numbers.
    let shown = trials(&host, &sweep);
    let bests: Vec<f64> = shown.iter().map(|trial| trial["trial"]["best"].as_f64().unwrap()).collect();
    assert_eq!(bests, [10.0, 20.0, 30.0, 40.0, 50.0, 90.0]);
    assert_eq!((&shown[0]["trial"]["count"], &shown[0]["trial"]["last"]), (&2.into(), &11.0.into()));
    let table = host.ctl(&["show", &sweep]).ok().stdout;
    assert!(table.contains("best         trial 3: loss 10"), "{table}");
    let stopped = &shown[5];
    assert_eq!(stopped["state"], "Canceled");
    let trial = stopped["job"].as_str().unwrap();
    assert_eq!(trial, format!("{sweep}--2"));
    let why = host.ctl(&["why", trial]).ok().stdout.replace('\n', " ");
    let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(why.contains("the policy bandit at interval"), "{why}");
    assert!(why.contains(": its best, 90, is worse than"), "{why}");
    // Its name as the cloud gives it, and the story of the sweep.
    host.ctl(&["show", &format!("{sweep}_2")]).ok();
    host.ctl(&["show", &format!("{sweep}[2]")]).ok();
    let story = host.ctl(&["logs", &sweep]).ok().stdout;
    assert!(story.contains("trial 3: x=10") && story.contains("trial 2 is ended by bandit"), "{story}");
    // The best trial is what is downloaded.
    let (best, all) = (host.home().join("best"), host.home().join("all"));
    host.ctl(&["download", &sweep, "-o", best.to_str().unwrap()]).ok().says("is the best trial of");
    assert_eq!(fs::read_to_string(best.join("outputs/x")).unwrap(), "10\n");
    host.ctl(&["download", &sweep, "--all", "-o", all.to_str().unwrap()]).ok();
    assert_eq!(fs::read_to_string(all.join("4/outputs/x")).unwrap(), "40\n");
    // A grid that was worked off has no more trials.
    host.ctl(&["sweep", "extend", &sweep, "--trials", "2"]).code(1).says("has no point left");
}

#[test]
fn test_a_sweep_from_the_command_line_is_followed_and_then_extended() {
    let host = host("2");
    let command = log("loss", "${{inputs.lr}}");
    let job = format!("command: >-\n  {command}\ninputs: {{lr: 0.1}}\n");
    let dir = host.project("one", &[("job.yml", &job)]);
    let dir = dir.to_str().unwrap();
    let set = ["--set", "lr=uniform(0.5,0.6)", "--set", "batch=choice(16,32)"];
    host.ctl(&[&["sweep", dir], &set[..], &["--max", "3"]].concat()).code(1).says("--minimize loss");
    host.ctl(&["sweep", dir, "--set", "lr=unifrom(1,2)", "--minimize", "loss"])
        .code(1)
        .says("is no distribution");
    let line = [&["sweep", dir, "--name", "tune"], &set[..], &["--minimize", "loss", "--max", "3"]].concat();
    let followed = host.ctl(&line).ok();
    assert!(followed.stdout.contains("trial 2: batch="), "{}", followed.stdout);
    assert!(followed.stdout.contains("minimize loss"), "{}", followed.stdout);
    let first = trials(&host, "tune");
    assert_eq!(first.len(), 3);
    for trial in &first {
        let (lr, best) = (&trial["trial"]["values"]["lr"], &trial["trial"]["best"]);
        assert_eq!(lr, best, "what was drawn is what the command logged");
        assert!((0.5..0.6).contains(&lr.as_f64().unwrap()));
    }
    // In MLflow the sweep is a run, and its trials are runs in it, with their values as parameters.
    let store = host.home().join("mlruns");
    host.ctl(&["mlflow", "export", "tune", "--to", store.to_str().unwrap(), "--no-artifacts"]).ok();
    let mut parents = Vec::new();
    let mut left = vec![store];
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match entry.is_dir() {
                true => left.push(entry),
                false if entry.ends_with("tags/mlflow.parentRunId") => {
                    let run = entry.parent().unwrap().parent().unwrap();
                    parents.push(fs::read_to_string(&entry).unwrap());
                    assert!(run.join("params/lr").exists() && run.join("metrics/loss").exists());
                    assert!(run.parent().unwrap().join(parents[0].trim()).join("meta.yaml").exists());
                }
                false => {}
            }
        }
    }
    assert_eq!(parents, vec![parents[0].clone(); 3]);
    let more = host.ctl(&["sweep", "extend", "tune", "--trials", "2", "--name", "tune-2"]).ok().stdout;
    assert_eq!(more.trim(), "tune-2");
    host.ctl(&["wait", "tune-2"]).ok();
    let second = trials(&host, "tune-2");
    let mut indices: Vec<u64> = second.iter().map(|trial| trial["index"].as_u64().unwrap()).collect();
    indices.sort_unstable();
    assert_eq!(indices, [3, 4]);
    // The best is that of both.
    let best =
        |trials: &[Value]| trials.iter().map(|t| t["trial"]["best"].as_f64().unwrap()).fold(9.0, f64::min);
    let both = best(&first).min(best(&second));
    assert_eq!(host.show("tune-2")["best"]["value"].as_f64(), Some(both));
    host.ctl(&["sweep", "extend", "tune-2", "--trials", "1", "--name", "tune-3"]).ok();
    host.ctl(&["wait", "tune-3"]).ok();
    assert_eq!(trials(&host, "tune-3")[0]["index"], 5);
}

#[test]
fn test_a_metric_that_nobody_logs_is_told_with_the_names_that_were_logged() {
    let host = host("1");
    let rest = format!(
        "trial:\n  command: >-\n    {}\nsearch_space: {{x: {{type: randint, upper: 9}}}}\nlimits: {{max_total_trials: 2}}\n",
        log("Loss", "1")
    );
    let sweep = submit(&host, &rest);
    host.ctl(&["wait", &sweep])
        .code(1)
        .says("JOB-112")
        .says("no trial logged the metric `loss`")
        .says("they logged `Loss`");
    let why = host.ctl(&["why", &sweep]).ok().stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(why.contains("trial 0 completed and logged no metric `loss`"), "{why}");
    host.ctl(&["download", &sweep]).code(1).says("no trial of");
}

#[test]
fn test_trials_that_failed_run_again_with_their_values_and_a_cancel_ends_all() {
    let host = host("2");
    let fixed = host.home().join("fixed");
    let rest = format!(
        "trial:\n  command: >-\n    {}; test -e {} || test $AGENTD_ARRAY_INDEX != 1\nsearch_space:\n  \
         lr: {{type: loguniform, min_value: -6, max_value: -1}}\nlimits: {{max_total_trials: 3}}\n",
        log("loss", "$AZUREML_SWEEP_lr"),
        fixed.display()
    );
    let sweep = submit(&host, &rest);
    host.ctl(&["wait", &sweep]).ok(); // one failed, and others completed
    let failed = trials(&host, &sweep).into_iter().find(|trial| trial["state"] == "Failed").unwrap();
    assert_eq!(failed["index"], 1);
    fs::write(&fixed, "").unwrap();
    let again = host.ctl(&["rerun", &sweep, "--failed"]).ok().stdout.trim().to_owned();
    host.ctl(&["wait", &again]).ok();
    let trials_again = trials(&host, &again);
    assert_eq!(trials_again.len(), 1);
    assert_eq!(trials_again[0]["trial"]["values"], failed["trial"]["values"]);
    // As a job file it makes the same sweep.
    let text = host.ctl(&["show", &again, "--as-job"]).ok().stdout;
    assert!(text.contains("type: sweep") && text.contains("loguniform"), "{text}");
    let long = submit(
        &host,
        "trial: {command: sleep 600}\nsearch_space: {x: {type: randint, upper: 9}}\nlimits: {max_total_trials: 50}\n",
    );
    host.wait_for(&format!("{long}[1]"), &["Running"]);
    host.ctl(&["logs", &format!("{long}[0]")]).ok();
    host.ctl(&["cancel", "--wait", &long]).ok().says("Canceled");
    assert!(trials(&host, &long).iter().all(|trial| trial["state"] == "Canceled"));
    assert_eq!(trials(&host, &long).len(), 2);
}
