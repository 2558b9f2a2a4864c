//! Pipelines: steps that read what earlier ones left.

use std::fs;
use std::time::Duration;

use agent_tests::{Host, eventually};
use serde_json::Value;

fn host(slots: &str) -> Host {
    let mut host = Host::new();
    host.set("AGENTD_SLOTS", slots);
    host.start();
    host
}

/// A word of each step that runs goes into a file outside of all jobs.
fn seen(host: &Host) -> String {
    host.home().join("seen").display().to_string()
}

/// The words, sorted.
fn ran(host: &Host) -> Vec<String> {
    let text = fs::read_to_string(host.home().join("seen")).unwrap_or_default();
    let mut words: Vec<String> = text.lines().map(str::to_owned).collect();
    words.sort();
    words
}

const PREP: &str = "\
name: prep
type: command
inputs: {raw: {type: uri_folder}, factor: {type: integer, default: 2}}
outputs: {clean: {type: uri_folder}}
code: ../src
environment: host
command: sh prep.sh ${{inputs.raw}} ${{inputs.factor}} ${{outputs.clean}}
";

/// `prep` → `one`, `two` → `sum`; `aside` for itself. Files of each kind go from step to step.
fn files(host: &Host, one: &str) -> Vec<(&'static str, String)> {
    let seen = seen(host);
    let pipeline = format!(
        "\
type: pipeline
inputs:
  raw: {{type: uri_folder, path: data}}
  add: {{type: integer, default: 1}}
outputs:
  total:
jobs:
  prep:
    component: ./components/prep.yml
    inputs: {{raw: '${{{{parent.inputs.raw}}}}'}}
    environment_variables: {{SEEN: '{seen}'}}
  one:
    command: echo one >>{seen}; {one}
    environment: host
    inputs: {{d: '${{{{parent.jobs.prep.outputs.clean}}}}', add: '${{{{parent.inputs.add}}}}'}}
    outputs: {{n: {{type: uri_file}}}}
  two:
    command: echo two >>{seen}; cat ${{{{inputs.d}}}}/n >${{{{outputs.n}}}}; echo said; mkdir -p outputs; echo kept >outputs/kept
    environment: host
    inputs: {{d: {{type: uri_folder, path: '${{{{parent.jobs.prep.outputs.clean}}}}'}}}}
    outputs: {{n: {{type: uri_file}}}}
  sum:
    command: >-
      echo sum >>{seen}; test -e ${{{{inputs.all}}}}/outputs/kept;
      expr $(cat ${{{{inputs.one}}}}) + $(cat ${{{{inputs.two}}}}) >${{{{outputs.total}}}}/total
    environment: host
    inputs:
      one: {{type: uri_file, path: '${{{{parent.jobs.one.outputs.n}}}}'}}
      two: {{type: uri_file, path: '${{{{parent.jobs.two.outputs.n}}}}'}}
      all: ${{{{parent.jobs.two.outputs.artifacts}}}}
    outputs: {{total: '${{{{parent.outputs.total}}}}'}}
  aside:
    command: echo aside >>{seen}
    environment: host
"
    );
    vec![
        ("pipeline.yml", pipeline),
        ("components/prep.yml", PREP.to_owned()),
        ("src/prep.sh", "echo prep >>$SEEN\nexpr $(cat $1/n) '*' $2 >$3/n\n".to_owned()),
        ("data/n", "20\n".to_owned()),
    ]
}

/// Runs it; which steps ran.
fn run_again(host: &Host, file: &str, words: &[&str]) -> Vec<String> {
    let _ = fs::remove_file(host.home().join("seen"));
    host.ctl(&[&["run", file], words].concat()).ok();
    ran(host)
}

#[test]
fn test_a_step_that_ran_before_is_not_run_again_and_why_tells_what_is_another_one() {
    let host = host("2");
    let file = project(&host, "again", ADD);
    let all = ["aside", "one", "prep", "sum", "two"];
    assert_eq!(run_again(&host, &file, &["--name", "first"]), all);
    assert!(
        host.ctl(&["why", "first[prep]"]).ok().stdout.contains("no earlier run of this step is on record")
    );
    assert_eq!(run_again(&host, &file, &["--name", "second"]), [""; 0], "all of it ran");
    let shown = host.ctl(&["show", "second"]).ok().stdout;
    assert!(shown.contains("first--3"), "{shown}");
    assert_eq!(host.ctl(&["logs", "second[two]"]).ok().stdout, "said\n", "its log is that of the other");
    let dir = host.home().join("got");
    host.ctl(&["download", "second", "-o", dir.to_str().unwrap()]).ok();
    assert_eq!(fs::read_to_string(dir.join("total/total")).unwrap(), "81\n");

    // Another value of an input: that step, and what reads what it leaves.
    let words = ["--name", "third", "--set", "inputs.add=7"];
    assert_eq!(run_again(&host, &file, &words), ["one", "sum"]);
    let why = host.ctl(&["why", "third[one]"]).ok().stdout;
    assert!(why.contains("another inputs than when first--1 ran"), "{why}");
    // Another script that leaves the same: nothing after it.
    fs::write(
        std::path::Path::new(&file).with_file_name("src/prep.sh"),
        "echo prep >>$SEEN\necho 40 >$3/n\n",
    )
    .unwrap();
    assert_eq!(run_again(&host, &file, &["--name", "fourth"]), ["prep"]);
    assert!(host.ctl(&["why", "fourth[prep]"]).ok().stdout.contains("another code than when first--0 ran"));
    assert_eq!(run_again(&host, &file, &["--name", "fifth", "--force-rerun"]), all);

    // What is removed cannot be taken; what is left can.
    for job in ["first", "second", "third", "fourth", "fifth"] {
        host.ctl(&["rm", job]).ok();
    }
    assert_eq!(run_again(&host, &file, &["--name", "sixth"]), all);
}

#[test]
fn test_of_pipelines_that_are_the_same_at_the_same_time_each_step_runs_once_also_through_a_restart() {
    let mut host = host("4");
    let go = host.home().join("go");
    let wait = format!("while [ ! -e {} ]; do sleep 0.05; done; {ADD}", go.display());
    let file = project(&host, "twins", &wait);
    for name in ["left", "right"] {
        host.ctl(&["submit", &file, "--name", name]).ok();
    }
    eventually("the step runs", Duration::from_secs(60), || {
        ran(&host).contains(&"one".to_owned()).then_some(())
    });
    host.kill();
    host.start();
    fs::write(go, "").unwrap();
    for name in ["left", "right"] {
        host.wait_for(name, &["Completed"]);
    }
    assert_eq!(ran(&host), ["aside", "one", "prep", "sum", "two"]);
}

const ADD: &str = "expr $(cat ${{inputs.d}}/n) + ${{inputs.add}} >${{outputs.n}}";

/// The path of the pipeline in a project of its own.
fn project(host: &Host, name: &str, one: &str) -> String {
    let files = files(host, one);
    let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (*path, text.as_str())).collect();
    host.project(name, &files).join("pipeline.yml").display().to_string()
}

fn steps(host: &Host, pipeline: &str) -> Vec<(String, String)> {
    let text = host.ctl(&["jobs", pipeline, "--json"]).ok().stdout;
    let jobs: Value = serde_json::from_str(&text).unwrap();
    let jobs = jobs["jobs"].as_array().unwrap_or_else(|| jobs.as_array().unwrap()).clone();
    let word = |job: &Value, key: &str| job[key].as_str().unwrap().to_owned();
    let mut steps: Vec<_> = jobs.iter().map(|job| (word(job, "title"), word(job, "state"))).collect();
    steps.sort();
    steps
}

#[test]
fn test_a_pipeline_is_followed_and_what_steps_left_goes_to_the_next_by_content() {
    let host = host("2");
    let file = project(&host, "sums", ADD);
    let followed = host.ctl(&["run", &file, "--name", "sums", "--set", "inputs.add=5"]).ok();
    for line in ["prep starts: sums--0", "prep Completed", "sum Completed", "ended: Completed"] {
        assert!(followed.stdout.contains(line), "{line}: {}", followed.stdout);
    }
    assert_eq!(ran(&host), ["aside", "one", "prep", "sum", "two"]);
    let dir = host.home().join("got");
    host.ctl(&["download", "sums", "-o", dir.to_str().unwrap()]).ok();
    assert_eq!(fs::read_to_string(dir.join("total/total")).unwrap(), "85\n");
    let all = host.home().join("all");
    host.ctl(&["download", "sums", "--all", "-o", all.to_str().unwrap()]).ok();
    assert_eq!(fs::read_to_string(all.join("prep/named-outputs/clean/n")).unwrap(), "40\n");
    // By the names of its steps.
    assert_eq!(host.ctl(&["logs", "sums[two]"]).ok().stdout, "said\n");
    let table = host.ctl(&["show", "sums"]).ok().stdout;
    for row in ["prep   Completed", "sum    Completed"] {
        assert!(table.contains(row), "{table}");
    }
    assert!(table.contains("one, two"), "what it comes after: {table}");
    assert!(host.ctl(&["why", "sums[sum]"]).ok().stdout.contains("step sum of sums"));
    assert!(host.ctl(&["logs", "sums"]).ok().stdout.contains("one starts: sums--1"));
    host.ctl(&["show", "sums[gone]"]).code(1).says("sums has no step `gone`");
    host.ctl(&["exec", "sums", "--", "true"]).code(125).says("no session can be opened in sums");
    // The job of a step has what it read on record, by its content.
    let shown: Value = host.show("sums--3");
    assert!(shown["spec"]["inputs"]["one"]["root"].is_string(), "{}", shown["spec"]["inputs"]);
    host.ctl(&["rm", "sums"]).ok();
    host.ctl(&["show", "sums--3"]).code(1);
}

#[test]
fn test_a_failed_step_stops_what_needs_it_and_the_pipeline_goes_on_from_there() {
    let host = host("2");
    let broken = format!("test -e {} || exit 7; {ADD}", host.home().join("mended").display());
    let file = project(&host, "sums", &broken);
    let ran_it = host.ctl(&["run", &file, "--name", "first"]).code(7);
    ran_it.says("1 step of 5 failed").says("agentctl rerun first --from one");
    assert_eq!(ran(&host), ["aside", "one", "prep", "two"], "what does not need it ran");
    let table = host.ctl(&["show", "first"]).ok().stdout;
    assert!(table.contains("NotRun") && table.contains("because one did not complete"), "{table}");
    host.ctl(&["why", "first[one]"]).ok();
    fs::write(host.home().join("mended"), "").unwrap();
    let again = host.ctl(&["rerun", "first", "--from", "one", "--name", "second"]).ok().stdout;
    assert_eq!(again.trim(), "second");
    host.ctl(&["wait", "second"]).ok();
    assert_eq!(ran(&host), ["aside", "one", "one", "prep", "sum", "two"], "what completed is not run again");
    let table = host.ctl(&["show", "second"]).ok().stdout;
    assert!(table.contains("first--0") && table.contains("(before)"), "{table}");
    let dir = host.home().join("got");
    host.ctl(&["download", "second", "-o", dir.to_str().unwrap()]).ok();
    assert_eq!(fs::read_to_string(dir.join("total/total")).unwrap(), "81\n");
    host.ctl(&["rerun", "first", "--from", "gone"]).code(1).says("the steps are prep, one, two, sum, aside");
    // All that did not complete, which is the same here; and one more from a step that completed.
    host.ctl(&["rerun", "first", "--failed", "--name", "third"]).ok();
    host.ctl(&["wait", "third"]).ok();
    host.ctl(&["rerun", "second", "--from", "two", "--name", "fourth"]).ok();
    host.ctl(&["wait", "fourth"]).ok();
    let count = |word: &str| ran(&host).iter().filter(|ran| *ran == word).count();
    assert_eq!(["prep", "one", "two", "sum"].map(count), [1, 3, 2, 3]);
}

#[test]
fn test_a_cancel_ends_all_steps_and_a_failure_may_end_all() {
    let host = host("2");
    let wait = |name: &str| {
        eventually("a step runs", Duration::from_secs(60), || {
            steps(&host, name).iter().any(|(_, state)| state == "Running").then_some(())
        });
    };
    let file = project(&host, "sums", "sleep 3600");
    host.ctl(&["submit", &file, "--name", "long"]).ok();
    eventually("two has completed", Duration::from_secs(60), || {
        steps(&host, "long").contains(&("two".to_owned(), "Completed".to_owned())).then_some(())
    });
    wait("long");
    host.ctl(&["cancel", "--wait", "long"]).ok();
    let states = steps(&host, "long");
    assert!(states.contains(&("one".to_owned(), "Canceled".to_owned())), "{states:?}");
    assert!(states.iter().all(|(step, _)| step != "sum"), "it was never started: {states:?}");
    assert_eq!(host.show("long")["state"], "Canceled");

    let text = "\
settings: {continue_on_step_failure: false}
jobs:
  bad: {command: sleep 2; exit 3, environment: host}
  long: {command: sleep 3600, environment: host}
  later: {command: 'true', environment: host, after: long}
";
    let dir = host.project("stop", &[("job.yml", text)]);
    host.ctl(&["run", dir.to_str().unwrap(), "--name", "stop"]).code(3);
    assert_eq!(
        steps(&host, "stop"),
        [("bad", "Failed"), ("long", "Canceled")].map(|(step, state)| (step.to_owned(), state.to_owned()))
    );
}

#[test]
fn test_mistakes_are_told_before_anything_is_sent() {
    let host = host("1");
    let file = project(&host, "sums", ADD);
    let text = fs::read_to_string(&file).unwrap();
    for (from, to, said) in [
        (
            "parent.jobs.one.outputs.n}",
            "parent.jobs.one.outputs.m}",
            "line 28, column 35: the step `one` has no output `m`",
        ),
        ("components/prep.yml", "components/pre.yml", "line 9, column 16: the component"),
        (
            "    environment: host\n    inputs: {d",
            "    environmnt: host\n    inputs: {d",
            "`environmnt` is not known",
        ),
    ] {
        assert!(text.contains(from), "{from}");
        fs::write(&file, text.replacen(from, to, 1)).unwrap();
        let told = host.ctl(&["check", &file]);
        assert!(format!("{}{}", told.stdout, told.stderr).contains(said), "{said}: {}", told.stdout);
    }
    fs::write(&file, &text).unwrap();
    fs::write(file.replace("pipeline.yml", "components/prep.yml"), PREP.replace("inputs.raw", "inputs.row"))
        .unwrap();
    host.ctl(&["run", &file])
        .code(125)
        .says("prep.yml: line 7, column 10: the command uses `${{inputs.row}}`");
    fs::write(file.replace("pipeline.yml", "components/prep.yml"), PREP).unwrap();
    host.ctl(&["check", &file]).ok();
    host.ctl(&["run", &file, "--set", "inputs.add=many"]).code(125).says("`many` is not an integer");
    host.ctl(&["run", &file, "--gpus", "1"]).code(125).says("a pipeline takes no --gpus");
    host.ctl(&["submit", &file, "--array", "0-3"]).code(1).says("a pipeline takes no --array");
    let listed = host.ctl(&["submit", &file, "--dry-run"]).ok().stdout;
    assert!(listed.contains("prep: code") && listed.contains("prep: input raw"), "{listed}");
    assert!(ran(&host).is_empty(), "nothing was run");
}

#[test]
fn test_a_daemon_killed_at_any_moment_goes_on_with_the_same_steps() {
    // The moments meet a commit of each kind in some round or other: of a step that starts, runs, ends.
    let mut host = host("2");
    let file = project(&host, "sums", ADD);
    for (round, delay) in [0, 30, 60, 100, 150, 200, 260, 330, 400, 500, 650, 800].into_iter().enumerate() {
        let name = format!("sums-{round}");
        host.ctl(&["submit", &file, "--name", &name, "--force-rerun"]).ok();
        std::thread::sleep(Duration::from_millis(delay));
        host.kill();
        host.start();
        host.ctl(&["wait", &name]).ok();
        assert_eq!(ran(&host), ["aside", "one", "prep", "sum", "two"], "killed after {delay} ms");
        assert_eq!(steps(&host, &name).len(), 5);
        fs::remove_file(host.home().join("seen")).unwrap();
    }
}
